//! A monitor in Firecracker's jailer, which gives it a root folder and a mount namespace of its own, perhaps a PID
//! namespace, and another user. It finds the socket of the server by a hard link in its root folder, or by a bind mount
//! of the socket's folder, as `docs/SERVER.md` describes it.

use std::fs;
use std::io;
use std::path::Path;
use std::process::{Command, Stdio};

use rustix::mount::{
    MountPropagationFlags, UnmountFlags, mount_bind, mount_bind_recursive, mount_change, unmount,
};
use rustix::process::{chdir, pivot_root};
use rustix::thread::{
    Gid, Uid, UnshareFlags, set_thread_gid, set_thread_groups, set_thread_uid, unshare_unsafe,
};
use uzone_server::ServeEvent;

use crate::common::needs::skip;
use crate::{
    MACHINE, PAGES, Process, Running, STRANGER, be_a_machine, case_of, end_of, has_users, program,
};

/// The root folder of a jailed VM.
const JAIL: &str = "UZONE_SERVER_TEST_JAIL";
/// Whether it gets a bind mount of the socket's folder; the socket's folder of the jail is empty otherwise.
const BINDS: &str = "UZONE_SERVER_TEST_BINDS";

/// Gives this thread another root folder and user, in the steps of the jailer.
fn enter(jail: &Path, socket: &Path) -> io::Result<()> {
    // SAFETY: it wants that no other code relies on what the threads share: this thread alone gets the mounts of its
    // own, and no descriptor changes.
    unsafe { unshare_unsafe(UnshareFlags::NEWNS) }?;
    mount_change("/", MountPropagationFlags::DOWNSTREAM | MountPropagationFlags::REC)?;
    if std::env::var_os(BINDS).is_some() {
        // By the operator, before the jailer starts.
        mount_bind(socket.parent().unwrap(), jail.join("run"))?;
    }
    mount_bind_recursive(jail, jail)?;
    chdir(jail)?;
    fs::create_dir("old_root")?;
    pivot_root(".", "old_root")?;
    chdir("/")?;
    unmount("old_root", UnmountFlags::DETACH)?;
    fs::remove_dir("old_root")?;
    set_thread_groups(&[])?;
    set_thread_gid(Gid::from_raw(STRANGER))?;
    Ok(set_thread_uid(Uid::from_raw(STRANGER))?)
}

fn be_jailed(socket: &Path) {
    let jail = std::env::var_os(JAIL).unwrap();
    enter(Path::new(&jail), socket).unwrap();
    assert!(!fs::exists(socket).unwrap(), "it sees the folders of others");
    be_a_machine(Path::new("/run/sock"));
}

#[test]
fn a_jailed_monitor_is_served_by_a_hard_link_of_the_socket_and_by_a_bind_mount_of_its_folder() {
    let name = "jailer::a_jailed_monitor_is_served_by_a_hard_link_of_the_socket_and_by_a_bind_mount_of_its_folder";
    let Some((folder, socket)) = case_of(name, "jailer", be_jailed).filter(|_| has_users(name))
    else {
        return;
    };
    let may = Command::new("unshare").args(["--mount", "--pid", "--fork", "true"]).output();
    if !may.as_ref().is_ok_and(|output| output.status.success()) {
        return skip(name, &format!("no namespaces can be made here: {may:?}"));
    }
    let image = folder.join("packed");
    for (binds, has_pid_namespace) in [(false, false), (true, false), (true, true)] {
        let server = Running::start(&socket, &image, &format!("allow {STRANGER}"));
        let jail = folder.join(format!("jail-{binds}-{has_pid_namespace}"));
        fs::create_dir_all(jail.join("run")).unwrap();
        let mut command = program(name);
        if has_pid_namespace {
            let mut around = Command::new("unshare");
            around.args(["--pid", "--fork", "--kill-child"]).arg(command.get_program());
            around.args(command.get_args()).stdout(Stdio::null());
            command = around;
        }
        if binds {
            command.env(BINDS, "1");
        } else {
            fs::hard_link(&socket, jail.join("run/sock")).unwrap();
        }
        let mut machine = Process::start(command.env(MACHINE, &socket).env(JAIL, &jail));
        let ended = end_of(&mut machine);
        assert!(ended.success(), "{binds} {has_pid_namespace}: {ended} {:?}", server.events);
        let (_, events) = server.stop_after(1, 0..=0);
        let is_it = |event: &ServeEvent| {
            let bytes = PAGES * crate::PAGE;
            matches!(event, ServeEvent::Connected { uid: STRANGER, can_be_killed: true, can_be_read: true, len_bytes, .. } if *len_bytes == bytes)
        };
        assert!(events.iter().any(is_it), "{events:?}");
    }
}
