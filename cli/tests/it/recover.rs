//! `uzone serve --recover`: VMs are served on by the next server after the processes of one were killed, without a service
//! manager.

use std::fs;
use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::thread;
use std::time::Duration;

use crate::common::served::{
    KILLS, Machine, PAGE, PAGES, Server, page_of, status_at, stop_process, wait_for_the_end,
    write_image,
};
use crate::common::{Dir, no_disk, object, run, skip, small_disk, text, uzone, wait_until};
use rustix::process::{Pid, Signal, geteuid, kill_process};
use serde_json::Value;

fn start(arguments: &[&str]) -> Server {
    Server::start(&[&["--on-failure", "poison"], arguments].concat())
}

/// Returns a folder with an image in it, the names of that, of a socket, and of the folder for recovery.
fn folder(test: &str) -> (Dir, String, String, String) {
    let dir = Dir::new(test);
    let (image, socket, folder) = (write_image(&dir, "raw", 0), dir.name("sock"), dir.name("kept"));
    (dir, image, socket, folder)
}

/// Waits until a process is the keeper of a socket, and returns the status then.
fn status_of(keeper: Pid, socket: &str) -> Value {
    wait_until("the keeper", || {
        let status = run(&["status", "--json", "--socket", socket]).stdout;
        let status = serde_json::from_slice::<Value>(&status);
        status.is_ok_and(|status| status["keeper"] == keeper.as_raw_nonzero().get())
    });
    status_at(socket)
}

/// Returns how many machines a server has.
fn sessions(server: &Server, socket: &str) -> Option<usize> {
    status_of(server.pid(), socket)["sessions"].as_array().map(Vec::len)
}

/// Returns an address on which no process listens.
fn free_port() -> String {
    let address = TcpListener::bind("127.0.0.1:0").and_then(|listener| listener.local_addr());
    address.expect("a port is free").to_string()
}

/// Returns the metrics of the server that has a port.
fn metrics_of(address: &str) -> String {
    let mut metrics = String::new();
    let mut client = TcpStream::connect(address).expect("it listens");
    client.write_all(b"GET /metrics HTTP/1.1\r\n\r\n").expect("it is taken");
    client.read_to_string(&mut metrics).expect("it answers");
    metrics
}

/// Changes a page of each machine, and checks what is packed of it.
fn check_diffs(machines: &[&Machine], status: &Value, image: &str, changed: &str) {
    let socket = status["socket"].as_str().expect("a path");
    let sessions = status["sessions"].as_array().expect("a list");
    assert_eq!(sessions.len(), machines.len());
    let run = |arguments: &[&str]| {
        let output = run(arguments);
        assert!(output.status.success(), "{}", text(&output.stderr));
        output.stdout
    };
    let before = fs::read(image).expect("it is there");
    for (session, machine) in sessions.iter().zip(machines) {
        let number = session["session"].as_u64().expect("a number");
        let page = number + 10;
        machine.memory.mapping().write_at(page * PAGE, &[9; 4096]).expect("it is served");
        run(&["diff", &number.to_string(), image, "-o", changed, "--json", "--socket", socket]);
        let memory = run(&["unpack", changed, "-"]);
        let at = usize::try_from(page * PAGE).expect("it is small");
        assert!(memory[at..at + 4096] == [9; 4096], "what it changed");
        assert!(memory[..at] == before[..at] && memory[at + 4096..] == before[at + 4096..]);
    }
}

/// Returns the folders of servers.
fn servers(folder: impl AsRef<Path>) -> Vec<PathBuf> {
    let servers = fs::read_dir(folder).into_iter().flatten();
    servers.map(|entry| entry.expect("an entry").path()).collect()
}

/// Returns the records and logs of VMs in the folders of servers.
fn kept(folder: impl AsRef<Path>) -> Vec<PathBuf> {
    let files = servers(folder).into_iter().filter_map(|server| fs::read_dir(server).ok());
    let files = files.flatten().map(|entry| entry.expect("an entry").path());
    let of_vm = |path: &PathBuf| path.extension().is_some_and(|of| of == "machine" || of == "log");
    let mut kept: Vec<_> = files.filter(of_vm).collect();
    kept.sort();
    kept
}

#[test]
fn machines_outlive_both_processes_of_a_server_without_a_service_manager() {
    let (dir, image, _, folder) = folder("recover");
    let (other, socket) = (dir.file("other", page_of(7).repeat(1024)), dir.name("a b.sock"));
    let arguments = [&image[..], "--socket", &socket, "--recover", &folder];
    let mut server = start(&arguments);
    let Some(machine) = Machine::connect(&socket) else { return drop(server.stop()) };
    // Each time, a part is touched and a part is given back, also right before the kill.
    let part = PAGES / KILLS;
    for kill in 0..KILLS {
        let (first, half) = (kill * part, kill * part + part / 2);
        (first..half - 1).for_each(|page| machine.check_page(page));
        machine.give_back(first..half - 1);
        if kill == 3 {
            // A worker that dies alone is followed by one that goes on with the log.
            server.kill_workers();
            server.event("taken_over");
        }
        machine.give_back(half - 1..half);
        server.kill();
        server = start(&arguments);
        (first..half).for_each(|page| machine.check(page, &[0; 4096]));
        (half..half + part / 4).for_each(|page| machine.check_page(page));
        assert_eq!(server.event("taken_over")["pid"], std::process::id());
    }
    assert_eq!(kept(&folder).len(), 2, "the machine and its log");
    // What was left of another machine is given up.
    let copy = kept(&folder)[1].with_file_name("1.machine");
    fs::copy(&kept(&folder)[1], &copy).expect("it is copied");
    server.kill();
    let server = start(&arguments);
    machine.check_page(PAGES - 1);
    assert!(!copy.exists());
    for page in 0..PAGES {
        let is_zero = page % part < part / 2;
        machine.check(page, &if is_zero { vec![0; 4096] } else { page_of(page) });
    }
    // The worker of a keeper that was killed alone answers on, and goes on with the log.
    let worker = server.kill_keeper();
    machine.give_back(PAGES - 2..PAGES);
    let server = start(&arguments);
    wait_for_the_end(&[worker]);
    machine.check(PAGES - 2, &[0; 4096]);
    machine.check(PAGES - 1, &[0; 4096]);
    // Another image is refused, and not mistaken for the one that the machine has pages of.
    server.kill();
    let mut server = start(&[&other, "--socket", &socket, "--recover", &folder]);
    let refused = server.event("refused");
    assert!(refused["reason"].as_str().is_some_and(|text| text.contains("another image")));
    assert!(kept(&folder).is_empty(), "what a server gave up is kept for none");
    drop(machine);
    server.stop();
    assert!(servers(&folder).is_empty(), "a server that ends leaves no folder");
    // A folder in which others can write is none.
    fs::set_permissions(&folder, fs::Permissions::from_mode(0o770)).expect("it is ours");
    let output = run(&[&["serve"], &arguments[..]].concat());
    let text = text(&output.stderr);
    assert!(!output.status.success() && text.contains("other users can write"), "{text}");
}

#[test]
fn without_any_option_machines_outlive_both_processes_too() {
    let (dir, image, socket, _) = folder("recover-default");
    let start = |more: &[&str]| {
        let mut command = uzone(&["serve", "--json", "--on-failure", "poison"]);
        command.args([&image, "--socket", &socket]);
        Server::spawn(command.args(more).env("XDG_RUNTIME_DIR", dir.path()))
    };
    let kept = || {
        let folder =
            if geteuid().is_root() { PathBuf::from("/run") } else { dir.path().to_owned() };
        let is_its = |server: &PathBuf| {
            fs::read_to_string(server.join("server")).is_ok_and(|text| text.contains(&socket))
        };
        servers(folder.join("uzone-recover")).into_iter().filter(is_its).collect::<Vec<_>>()
    };
    let server = start(&[]);
    let Some(machine) = Machine::connect(&socket) else { return drop(server.stop()) };
    machine.check_page(0);
    machine.give_back(0..1);
    server.kill();
    assert_eq!(kept().len(), 1);
    let mut server = start(&[]);
    assert_eq!(server.event("taken_over")["pid"], std::process::id());
    machine.check(0, &[0; 4096]);
    machine.check_page(1);
    // A server that is stopped at once leaves its machines to the next.
    assert_eq!(server.stop_at_once(&socket)["left"], 1);
    let mut server = start(&[]);
    server.event("taken_over");
    machine.check_page(2);
    drop(machine);
    server.kill();
    // The process of the machine lives, and has its userfaultfd no more.
    start(&[]).stop();
    assert!(kept().is_empty(), "{:?}", kept());
    // Where it is turned off, nothing is kept.
    let server = start(&["--recover", "none"]);
    let machine = Machine::connect(&socket).expect("it did before");
    machine.check_page(3);
    assert!(kept().is_empty(), "{:?}", kept());
    drop((machine, server));
}

#[test]
fn a_worker_whose_keeper_was_killed_serves_on_and_the_next_server_may_do_all_again() {
    for user in [&[][..], &["--user", "65534"]] {
        if user.is_empty() || geteuid().is_root() {
            start_again(user);
        }
    }
}

fn start_again(user: &[&str]) {
    let (dir, image, socket, folder) = folder("start-again");
    let changed = dir.name("changed");
    // Each server has the port when the one before has handed over.
    let address = free_port();
    let own = ["--socket", &socket, "--recover", &folder, "--metrics", &address];
    let arguments = [&[&*image], &own[..], user].concat();
    let server = start(&arguments);
    let Some(first) = Machine::connect(&socket) else { return drop(server.stop()) };
    first.check_page(0);
    let worker = server.kill_keeper();
    first.check_page(1);
    // The worker accepts nothing, and answers no question.
    assert!(UnixStream::connect(&socket).is_err());
    assert_eq!(run(&["status", "--socket", &socket]).status.code(), Some(66));
    let mut server = start(&arguments);
    server.event("taken_over");
    wait_for_the_end(&[worker]);
    let second = Machine::connect(&socket).expect("it did before");
    second.check_page(2);
    let machines = [first, second];
    let status = status_of(server.pid(), &socket);
    check_diffs(&machines.each_ref(), &status, &image, &changed);
    assert_eq!(kept(&folder).len(), 4, "two VMs and their logs");
    // An upgrade, to which another folder is another store.
    let output = run(&["serve", "--take-over", "--recover", "none", "--socket", &socket, &image]);
    let text = text(&output.stderr);
    assert!(!output.status.success() && text.contains("--recover"), "{text}");
    let mut next = start(&[&arguments[..], &["--take-over"]].concat());
    server.event("handed_over");
    assert!(server.wait().success());
    assert!(metrics_of(&address).contains("\nuzone_sessions 2\n"));
    for machine in &machines {
        next.event("taken_over");
        machine.check_page(PAGES - 1);
    }
    // Its machines are of this process, so it leaves them.
    let names = [socket.clone(), format!("{socket}.control")];
    assert!(names.iter().all(|name| fs::exists(name).expect("it is known")));
    assert_eq!(next.stop_at_once(&socket)["left"], 2);
    assert!(names.iter().all(|name| !fs::exists(name).expect("it is known")));
}

#[test]
fn a_server_that_drains_keeps_its_machines_from_the_next_one() {
    let (dir, image, socket, folder) = folder("recover-drain");
    let other = write_image(&dir, "other", 1);
    let address = free_port();
    let start = |image: &str| {
        start(&[image, "--socket", &socket, "--recover", &folder, "--metrics", &address])
    };
    let first = start(&image);
    let Some(machine) = Machine::connect(&socket) else { return drop(first.stop()) };
    machine.check_page(0);
    first.signal(Signal::TERM);
    wait_until("the end of the socket", || !fs::exists(&socket).expect("it is known"));
    // Neither of the same image nor of another one.
    for (round, next) in (1..).zip([&image, &other]) {
        let server = start(next);
        assert_eq!(sessions(&server, &socket), Some(0));
        let metrics = metrics_of(&address);
        assert!(metrics.contains("\nuzone_draining 0\n"), "{metrics}");
        machine.give_back(0..round);
        machine.check(0, &[0; 4096]);
        machine.check(round * 100, &page_of(round * 100));
        let second = Machine::connect(&socket).expect("it did before");
        second.check(5, &page_of(if next == &image { 5 } else { 6 }));
        // What it kept of that machine, which is gone, is given up by the next one.
        drop(second);
        server.kill();
    }
    // When it was killed, the next one has its machine.
    first.kill();
    let mut next = start(&image);
    assert_eq!(next.event("taken_over")["pid"], std::process::id());
    machine.check(1, &[0; 4096]);
    machine.check_page(300);
    assert_eq!(kept(&folder).len(), 2, "the VM and its log");
    assert_eq!(servers(&folder).len(), 1, "one folder");
    drop(machine);
    next.kill();
}

#[test]
fn a_machine_gets_the_bytes_of_its_image_although_the_file_was_replaced() {
    let dir = Dir::new("recover-replaced");
    let (image, new, socket) = (dir.name("image"), dir.name("new"), dir.name("sock"));
    for is_packed in [false, true] {
        for (name, first) in [("image", 0), ("new", 7)] {
            let path = write_image(&dir, name, first);
            if is_packed {
                let raw = dir.name("raw");
                fs::rename(&path, &raw).expect("it is there");
                object(&["pack", &raw, &path, "--json"]);
            }
        }
        let mut server = start(&[&image, "--socket", &socket, "--recover", &dir.name("kept")]);
        let Some(machine) = Machine::connect(&socket) else { return drop(server.stop()) };
        machine.check_page(0);
        server.event("connected");
        fs::rename(&new, &image).expect("it is there");
        for page in [100, 200] {
            server.kill_workers();
            server.event("taken_over");
            machine.check_page(page);
        }
        // A server with the new image does not take over, and costs the machine a pause.
        let output = run(&["serve", "--take-over", "--socket", &socket, &image]);
        let text = text(&output.stderr);
        assert!(!output.status.success() && text.contains("another image"), "{text}");
        machine.check_page(300);
        // The worker without a keeper goes on with it as well.
        let worker = server.kill_keeper();
        machine.check_page(400);
        drop(machine);
        kill_process(worker, Signal::KILL).expect("it runs");
        wait_for_the_end(&[worker]);
    }
    // Bytes that were changed in place are not mixed with those of before.
    write_image(&dir, "image", 0);
    let mut server = start(&[&image, "--socket", &socket, "--recover", &dir.name("kept")]);
    let machine = Machine::connect(&socket).expect("it did before");
    machine.check_page(0);
    thread::sleep(Duration::from_millis(20)); // a file system counts its changes by the clock
    write_image(&dir, "image", 7);
    server.kill_workers();
    let refused = server.event("refused");
    assert!(refused["reason"].as_str().is_some_and(|text| text.contains("another image")));
    drop(machine);
    server.stop();
}

#[test]
fn machines_are_served_without_room_to_keep_them_and_are_not_recovered_from_what_is_old() {
    let (dir, image, socket, _) = folder("recover-full");
    let disk = dir.name("disk");
    if !small_disk(&disk, "size=64k") {
        return skip("machines without room to keep them", "this user mounts no tmpfs");
    }
    let start = |folder: &str, more: &[&str]| {
        start(&[&[&image, "--socket", &socket, "--recover", folder], more].concat())
    };
    let fill = || {
        let filled = fs::write(format!("{disk}/full"), vec![1; 128 << 10]);
        assert!(filled.is_err(), "it has room");
    };
    // The disk is full when the machine comes.
    let mut server = start(&disk, &[]);
    fill();
    if let Some(machine) = Machine::connect(&socket) {
        machine.check_page(1);
        server.event("connected");
        machine.give_back(1..2);
        server.kill_workers();
        server.event("taken_over");
        for (page, expected) in [(1, vec![0; 4096]), (2, page_of(2))] {
            machine.check(page, &expected);
        }
        server.kill();
        fs::remove_file(format!("{disk}/full")).expect("it is ours");
        let server = start(&disk, &[]);
        assert_eq!(sessions(&server, &socket), Some(0));
        server.kill();
    }
    no_disk(&disk);
}

#[test]
fn a_machine_whose_message_has_not_been_read_is_no_silent_connection() {
    let (_dir, image, socket, _) = folder("recover-unread");
    let server = start(&[&image, "--socket", &socket, "--recover", "none"]);
    let connect = |count| {
        let streams = (0..count).map(|_| UnixStream::connect(&socket).expect("it listens"));
        streams.collect::<Vec<_>>()
    };
    // The oldest of as many as are waited for.
    let stream = connect(1).remove(0);
    let silent = connect(63);
    wait_until("all connections", || status_at(&socket)["greetings"] == 64);
    stop_process(server.pid());
    // Silence of half a second makes room.
    thread::sleep(Duration::from_millis(600));
    let more = connect(3);
    let machine = Machine::on(stream);
    kill_process(server.pid(), Signal::CONT).expect("it runs");
    if let Some(machine) = machine {
        machine.check_page(5);
    }
    drop((silent, more));
    server.kill();
}

#[test]
fn a_machine_that_has_connected_when_its_server_begins_to_drain_is_served() {
    let (_dir, image, socket, _) = folder("recover-queued");
    for is_ended_first in [true, false] {
        let mut server = start(&[&image, "--socket", &socket, "--recover", "none"]);
        stop_process(server.pid());
        let end = || kill_process(server.pid(), Signal::TERM).expect("it runs");
        is_ended_first.then(end);
        // More than are waited for at a time.
        let silent: Vec<_> = (0..70).map(|_| UnixStream::connect(&socket)).collect();
        let machine = Machine::connect(&socket);
        (!is_ended_first).then(end);
        kill_process(server.pid(), Signal::CONT).expect("it runs");
        if let Some(machine) = machine {
            machine.check_page(5);
            server.event("connected");
        }
        assert!(fs::exists(&socket).is_ok_and(|is_there| !is_there), "the socket is there");
        drop(silent);
        // The machine is of this process.
        server.kill();
    }
}

#[test]
fn a_start_without_the_right_to_recover_machines_gives_none_up() {
    let name = "a_start_without_the_right_to_recover_machines_gives_none_up";
    let (_dir, image, socket, folder) = folder("recover-right");
    let arguments = [&image[..], "--socket", &socket, "--recover", &folder];
    let without = || {
        let mut command = Command::new("setpriv");
        command.args(["--bounding-set", "-sys_ptrace", "--inh-caps", "-all"]);
        command
    };
    if !geteuid().is_root() || !without().arg("true").status().is_ok_and(|it| it.success()) {
        return skip(name, "it takes root and setpriv");
    }
    let server = start(&arguments);
    let Some(machine) = Machine::connect(&socket) else { return drop(server.stop()) };
    machine.check_page(0);
    let before = kept(&folder);
    server.kill();
    let mut command = without();
    command.args([env!("CARGO_BIN_EXE_uzone"), "serve", "--json"]).args(arguments);
    Server::spawn(&mut command).kill();
    assert_eq!(kept(&folder), before);
    let mut server = start(&arguments);
    server.event("taken_over");
    machine.check_page(1);
    drop(machine);
    server.kill();
}

#[test]
fn a_worker_goes_on_without_what_costs_time_alone_where_machines_wait() {
    let (dir, image, socket, folder) = folder("recover-without");
    let list = dir.name("lists");
    fs::create_dir(&list).expect("a folder is made");
    let (record, prefetch) = (format!("{list}/record"), format!("{list}/prefetch"));
    fs::write(&prefetch, "7\n").expect("a file is written");
    let cache = format!("{list}/cache");
    let arguments = [
        &[&image[..], "--socket", &socket, "--recover", &folder][..],
        &["--record", &record, "--prefetch", &prefetch, "--cache-dir", &cache],
    ]
    .concat();
    let mut server = start(&arguments);
    let Some(machine) = Machine::connect(&socket) else { return drop(server.stop()) };
    machine.check_page(0);
    server.event("connected");
    fs::remove_dir_all(&list).expect("it is ours");
    fs::write(&list, "").expect("a file is in its place");
    for page in [1, 2] {
        server.kill_workers();
        server.event("taken_over");
        machine.check_page(page);
    }
    // A stopped process whose parent dies gets a SIGHUP, too.
    let worker = server.workers()[0];
    stop_process(worker);
    server.kill_keeper();
    machine.check_page(3);
    drop(machine);
    kill_process(worker, Signal::KILL).expect("it runs");
    wait_for_the_end(&[worker]);
}
