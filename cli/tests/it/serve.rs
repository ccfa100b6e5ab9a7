//! `uzone serve`: what it prints while it runs, and how it ends.

use std::fs;
use std::io::{Read, Write};
use std::net::TcpStream;
use std::os::unix::fs::{MetadataExt, PermissionsExt, chown};
use std::os::unix::net::{UnixDatagram, UnixStream};
use std::os::unix::process::CommandExt;
use std::process::{Command, Stdio};
use std::time::Duration;

use crate::common::served::{Machine, PAGE, PAGES, Server, status_at, stop_process, write_image};
use crate::common::{Dir, has_failed, keeps_to, object, refuses, skip, text, uzone, wait_until};
use rustix::process::{Signal, geteuid, kill_process};
use serde_json::Value;

/// Starts a server that prints events.
fn serve(arguments: &[&str]) -> Server {
    Server::beside(uzone(&["serve", "--json"]).args(arguments))
}

/// Returns a folder with a raw image in it, that, and a name for a socket.
fn folder(test: &str) -> (Dir, String, String) {
    let dir = Dir::new(test);
    let (image, socket) = (dir.file("raw", vec![7; 1 << 20]), dir.name("sock"));
    (dir, image, socket)
}

/// Ends a server whose next event is its end.
fn stop(mut server: Server) {
    server.signal(Signal::TERM);
    server.next_event("stopped");
    assert!(server.wait().success());
}

#[test]
fn a_server_says_where_it_listens_names_what_it_refuses_and_ends_with_a_signal() {
    let (dir, image, socket) = folder("serve");
    let mut server = serve(&[&image, "--socket", &socket, "--metrics", "127.0.0.1:0"]);
    let listening = server.next_event("listening");
    assert_eq!(listening["socket"], socket.as_str());

    let mut stream = UnixStream::connect(&socket).expect("it listens");
    stream.write_all(b"GET / HTTP/1.1\r\n\r\n").expect("it is taken");
    let refused = server.next_event("refused");
    assert_eq!(refused["was_killed"], false);
    assert!(refused["reason"].as_str().expect("text").contains("no array of regions"));
    refuses(&["serve", &image, "--socket", &socket], 75, "another server listens on");

    let status = status_at(&socket);
    let keeper = server.child.id();
    assert_eq!((&status["keeper"], &status["is_draining"]), (&keeper.into(), &false.into()));
    let mut scraped = String::new();
    let mut client =
        TcpStream::connect(listening["metrics"].as_str().expect("an address")).expect("it listens");
    client.write_all(b"GET /metrics HTTP/1.1\r\nHost: here\r\n\r\n").expect("it is taken");
    client.read_to_string(&mut scraped).expect("it answers");
    assert!(scraped.starts_with("HTTP/1.1 200 OK\r\n"), "{scraped}");
    assert!(scraped.contains("\nuzone_worker_up 1\n"), "{scraped}");

    // The process that answers faults is another, and replaced when it dies.
    assert_eq!(server.workers().len(), 1);
    server.kill_workers();
    assert_eq!(server.next_event("worker_ended")["sessions"], 0);

    let drained = object(&["drain", "--socket", &socket, "--json"]);
    keeps_to("uzone.status-1", &drained);
    assert_eq!((&drained["worker_deaths"], &drained["is_draining"]), (&1.into(), &true.into()));
    let stopped = server.next_event("stopped");
    for (key, count) in [("sessions", 0), ("worker_deaths", 1), ("dropped_events", 0)] {
        assert_eq!(stopped[key], count, "{key}");
    }
    assert!(server.wait().success());
    assert_eq!(dir.names(), ["raw"], "the socket is gone");
}

/// Returns the value of a line of the status of each thread of a process.
fn each_thread(pid: &Value, line: &str) -> Vec<String> {
    let tasks = fs::read_dir(format!("/proc/{pid}/task")).expect("it runs");
    let value = |task: std::io::Result<fs::DirEntry>| {
        let status = fs::read_to_string(task.expect("a thread").path().join("status"));
        let status = status.expect("it is read");
        let value = status.lines().find_map(|text| text.strip_prefix(line)).expect("a line");
        value.trim_start_matches(':').trim().to_owned()
    };
    tasks.map(value).collect()
}

#[test]
fn each_thread_that_answers_faults_is_confined_unless_that_is_turned_off() {
    let name = "each_thread_that_answers_faults_is_confined_unless_that_is_turned_off";
    let (_dir, image, socket) = folder("serve-sandbox");
    for arguments in [&[][..], &["--no-sandbox"], &["--user", "65534"]] {
        if arguments.contains(&"--user") && !geteuid().is_root() {
            skip(name, "another user takes root");
            continue;
        }
        let of_server = [&image, "--socket", &socket];
        let mut server = serve(&[&of_server[..], arguments].concat());
        let sandbox = server.any_event()["sandbox"].take();
        let status = status_at(&socket);
        assert_eq!(status["sandbox"], sandbox);
        let is_off = arguments.contains(&"--no-sandbox");
        let worker = &status["worker"];
        let is_confined = |line: &str, value: &str| {
            let values = each_thread(worker, line);
            // The main thread, two that answer and two that read, at least.
            assert!(values.len() >= 4, "{values:?}");
            values.iter().all(|other| other == value)
        };
        assert_eq!(is_confined("NoNewPrivs", "1"), !is_off, "{arguments:?}");
        for line in ["CapEff", "CapPrm", "CapInh", "CapAmb"] {
            let has_none = is_confined(line, "0000000000000000");
            assert!(has_none || is_off, "{arguments:?}: {line}");
        }
        assert_eq!(sandbox["missing"] == Value::Array(vec![]), !is_off, "{sandbox}");
        assert_eq!(is_confined("Seccomp", "2"), sandbox["seccomp"] == true, "{arguments:?}");
        assert_eq!(sandbox["seccomp"], !is_off, "{sandbox}");
        if arguments.contains(&"--user") {
            assert_eq!(sandbox["user"], 65534);
            assert!(is_confined("Uid", "65534\t65534\t65534\t65534"));
            assert!(is_confined("Gid", "65534\t65534\t65534\t65534"));
            assert!(is_confined("Groups", ""));
        }
        stop(server);
    }
}

#[test]
fn an_image_that_the_user_cannot_read_and_a_user_that_there_is_not_are_named_with_the_fix() {
    let (dir, image, socket) = folder("serve-unreadable");
    fs::set_permissions(&image, PermissionsExt::from_mode(0o600)).expect("it is ours");
    let cases = [("65534", 77, "65534"), ("no such user", 2, "name one that it has")];
    for (user, code, part) in cases {
        let output = refuses(&["serve", &image, "--socket", &socket, "--user", user], code, part);
        let message = text(&output.stderr);
        if code == 77 && geteuid().is_root() {
            assert!(message.contains(&image) && message.contains("--user"), "{message}");
        }
    }
    assert_eq!(dir.names(), ["raw"]);
}

#[test]
fn a_service_manager_is_notified_when_machines_can_connect() {
    let (dir, image, socket) = folder("serve-notify");
    let manager = dir.name("manager");
    let notified = UnixDatagram::bind(&manager).expect("it listens");
    notified.set_read_timeout(Some(Duration::from_secs(30))).expect("a time");
    let mut command = uzone(&["serve", "--quiet", &image, "--socket", &socket]);
    let mut server = Server::beside(command.env("NOTIFY_SOCKET", &manager));
    let mut heard = [0; 256];
    let mut next = || {
        let len = notified.recv(&mut heard).expect("it is notified");
        text(&heard[..len]).to_owned()
    };
    // Descriptors may be kept before.
    let ready = loop {
        let text = next();
        if text.contains("READY=1") {
            break text;
        }
        assert!(text.contains("FDNAME=uzone."), "{text}");
    };
    assert!(ready.contains(&format!("MAINPID={}", server.child.id())), "{ready}");
    drop(UnixStream::connect(&socket).expect("it listens"));
    server.signal(Signal::TERM);
    loop {
        let text = next();
        if text.contains("STOPPING=1") {
            break;
        }
        assert!(text.contains("FDNAME=uzone."), "{text}");
    }
    assert!(server.wait().success());
}

#[test]
fn both_processes_have_no_descriptor_of_the_caller_and_as_many_as_the_hard_limit_admits() {
    let (dir, image, socket) = folder("serve-descriptors");
    let secret = dir.file("secret", "secret");
    let mut command = Command::new("/bin/sh");
    command.args(["-c", "ulimit -Sn 100; ulimit -Hn 5000; exec \"$@\" 7<\"$SECRET\"", "sh"]);
    command.env("SECRET", &secret).args([env!("CARGO_BIN_EXE_uzone"), "serve", "--json"]);
    let mut server = Server::beside(command.args([&image, "--socket", &socket]));
    server.next_event("listening");
    let status = status_at(&socket);
    for process in ["keeper", "worker"] {
        let pid = &status[process];
        let numbers = fs::read_dir(format!("/proc/{pid}/fd")).expect("it runs");
        let files = numbers.filter_map(|fd| fs::read_link(fd.ok()?.path()).ok());
        let files: Vec<_> = files.collect();
        assert!(!files.contains(&secret.clone().into()), "{process}: {files:?}");
        let limits = fs::read_to_string(format!("/proc/{pid}/limits")).expect("it runs");
        let limit = limits.lines().find(|line| line.starts_with("Max open files")).expect("a line");
        let soft = limit["Max open files".len()..].split_whitespace().next();
        assert_eq!(soft, Some("5000"), "{process}");
    }
    // A tool that lists processes tells the two apart.
    let name = fs::read_to_string(format!("/proc/{}/comm", status["worker"])).expect("it runs");
    assert_eq!(name.trim_end(), "uzone-worker");
    stop(server);
}

#[test]
fn a_server_that_is_to_take_over_from_none_starts_and_a_hangup_does_not_end_it() {
    let (_dir, image, socket) = folder("serve-alone");
    let mut server = serve(&[&image, "--socket", &socket, "--take-over"]);
    let listening = server.next_event("listening");
    // RFC 3339, of this decade or a later one.
    let time = listening["time"].as_str().expect("text");
    assert!(time.starts_with("20") && time.ends_with('Z') && time.len() == 24, "{time}");
    server.signal(Signal::HUP);
    server.signal(Signal::HUP);
    let status = status_at(&socket);
    assert_eq!(status["keeper"], server.child.id());
    stop(server);
}

#[test]
fn a_process_that_the_server_cannot_see_is_refused_by_name() {
    let name = "a_process_that_the_server_cannot_see_is_refused_by_name";
    let (_dir, image, socket) = folder("serve-namespace");
    let unshare = ["--fork", "--pid", "--mount-proc", "--kill-child"];
    let may = Command::new("unshare").args(unshare).arg("true").output();
    if !may.as_ref().is_ok_and(|output| output.status.success()) {
        return skip(name, format_args!("a PID namespace cannot be made here: {may:?}"));
    }
    let mut command = Command::new("unshare");
    command.args(unshare).args([env!("CARGO_BIN_EXE_uzone"), "serve", "--json"]);
    let mut server = Server::beside(command.args([&image, "--socket", &socket]));
    server.next_event("listening");
    let mut stream = UnixStream::connect(&socket).expect("it listens");
    let refused = server.next_event("refused");
    assert_eq!(refused["pid"], 0);
    let reason = refused["reason"].as_str().expect("text");
    assert!(reason.contains("PID namespace") && !reason.contains("waits"), "{reason}");
    // A monitor that sends its memory from now on learns it.
    wait_until("an error", || stream.write_all(b"[]").is_err());
    // One that has sent it gets SIGBUS, also for pages that it touches later: it does not wait.
    server.workers().into_iter().for_each(stop_process);
    let Some(machine) = Machine::connect(&socket) else { return drop(server) };
    for keeper in server.workers() {
        kill_process(keeper, Signal::CONT).expect("it runs");
    }
    uzone_os::sigbus::install().expect("a handler");
    let touch = |page: u64| machine.memory.mapping().read_at(page * PAGE, &mut [0]);
    touch(0).expect_err("SIGBUS");
    let refused = server.next_event("refused");
    let reason = refused["reason"].as_str().expect("text");
    assert!(reason.contains("gets SIGBUS at its first page"), "{reason}");
    (1..PAGES).for_each(|page| assert!(touch(page).is_err(), "page {page} has bytes"));
    drop(machine);
    // The processes of the namespace end with its first.
    server.signal(Signal::KILL);
    server.wait();
}

#[test]
fn a_signal_ends_a_server_and_one_that_is_not_there_cannot_be_asked() {
    let (_dir, image, socket) = folder("serve-signal");
    let mut server = serve(&[&image, "--socket", &socket]);
    assert_eq!(server.next_event("listening")["metrics"], Value::Null);
    stop(server);
    for command in ["status", "drain"] {
        refuses(&[command, "--socket", &socket], 66, "no server at");
    }
}

#[test]
fn a_log_line_states_what_is_not_verified() {
    let (dir, raw, socket) = folder("serve-trust");
    let packed = dir.name("packed");
    let report = object(&["pack", &raw, &packed, "--json"]);
    let root = format!("--root={}", report["root"].as_str().expect("a hash"));
    for (arguments, part) in [
        (&[&raw[..]][..], "neither damage nor forgery"),
        (&[&packed], "forgery is not"),
        (&[&raw, "--quiet"], ""),
        (&[&packed, &root], ""),
    ] {
        // Without a user, root has a warning of its own.
        let user = geteuid().as_raw().to_string();
        let mut command = uzone(&["serve", "--json", "--socket", &socket, "--user", &user]);
        let mut server = Server::beside(command.args(arguments).stderr(Stdio::piped()));
        wait_until("the socket", || UnixStream::connect(&socket).is_ok());
        if !arguments.contains(&"--quiet") {
            server.any_event();
        }
        server.signal(Signal::TERM);
        let mut logged = String::new();
        server.child.stderr.take().expect("a pipe").read_to_string(&mut logged).expect("text");
        assert!(server.wait().success());
        assert!(logged.contains(part) && logged.is_empty() == part.is_empty(), "{logged}");
    }
}

#[test]
fn an_image_that_cannot_be_served_is_named_with_its_exit_code() {
    let dir = Dir::new("serve-not");
    let (none, socket) = (dir.name("none"), dir.name("sock"));
    let (cut, raw) = (dir.file("cut", vec![7; 5000]), dir.file("raw", vec![7; 4096]));
    let root = format!("--root={}", "12".repeat(32));
    for (image, root, code) in [(&cut, "-v", 65), (&none, "-v", 66), (&raw, &root, 65)] {
        refuses(&["serve", root, image, "--socket", &socket], code, image);
    }
    refuses(&["serve", &cut, "--mode", "1777"], 2, "--mode");
}

/// Returns whether tests can be of several users, which takes root and a program that any user may run.
fn has_users(name: &str) -> bool {
    let run = uzone(&["--version"]).uid(65534).gid(65534).output();
    let has_users = geteuid().is_root() && run.as_ref().is_ok_and(|output| output.status.success());
    if !has_users {
        let reason = "it takes root, and a program that others may run";
        skip(name, format_args!("{reason}: {run:?}"));
    }
    has_users
}

#[test]
fn a_socket_has_its_group_and_admits_the_users_that_are_named() {
    let name = "a_socket_has_its_group_and_admits_the_users_that_are_named";
    if !has_users(name) {
        return;
    }
    let (_dir, image, socket) = folder("serve-users");
    let rights = |path: &str| {
        let metadata = fs::metadata(path).expect("it is there");
        (metadata.mode() & 0o777, metadata.gid())
    };
    let control = format!("{socket}.control");
    let own = rustix::process::getegid().as_raw();
    for (arguments, expected) in [
        (&["--group", "65533"][..], (0o660, 65533)),
        (&["--group", "root", "--mode", "620"], (0o620, 0)),
        (&["--allow-uid", "65534"], (0o666, own)),
        (&["--allow-uid", "65534,root", "--group=65533"], (0o660, 65533)),
    ] {
        let server = Server::start(&[&[&image, "--socket", &socket][..], arguments].concat());
        assert_eq!(rights(&socket), expected, "{arguments:?}");
        assert_eq!(rights(&control), (0o600, own), "{arguments:?}");
        stop(server);
    }

    // Another command looks whether a server is there, and so connects.
    let mut server = Server::start(&[&image, "--socket", &socket, "--allow-uid", "65534"]);
    let looks = |user: u32| {
        let mut command = uzone(&["serve", &image, "--socket", &socket]);
        let output = command.uid(user).gid(user).output().expect("it runs");
        assert_eq!(output.status.code(), Some(75));
    };
    looks(65534);
    looks(65533);
    let refused = server.next_event("refused");
    assert_eq!(refused["session"], 2);
    let reason = refused["reason"].as_str().expect("text");
    assert!(reason.contains("user 65533 may not connect") && reason.contains("--allow-uid"));
    object(&["drain", "--socket", &socket, "--json"]);
}

#[test]
fn root_keeps_few_capabilities_and_states_that_it_answers_faults_where_no_other_user_does() {
    let name =
        "root_keeps_few_capabilities_and_states_that_it_answers_faults_where_no_other_user_does";
    if !has_users(name) {
        return;
    }
    let (dir, image, socket) = folder("serve-root");
    fs::set_permissions(dir.path(), fs::Permissions::from_mode(0o755)).expect("it is ours");
    // Capabilities 2, 5 and 19: reading files, ending processes, tracing them. 6 and 7: other users and groups.
    let (few, more) = ("0000000000080024", "00000000000800e4");
    let users = fs::read_to_string("/etc/passwd").expect("it is read");
    let of_package = users.lines().find_map(|line| line.strip_prefix("uzone:x:"));
    let of_package = of_package.and_then(|line| line.split(':').next());
    let usual = if of_package.is_some() { more } else { few };
    for (named, user, left) in
        [(Some("65534"), "65534", more), (None, of_package.unwrap_or("0"), usual)]
    {
        let mut command = uzone(&["serve", "--json", &image, "--socket", &socket]);
        command.args(named.map(|user| format!("--user={user}")));
        let mut server = Server::beside(command.stderr(Stdio::piped()));
        let sandbox = server.any_event()["sandbox"].take();
        assert_eq!(sandbox["user"].to_string(), user, "{named:?}");
        // The main thread, and those for signals, printing and questions, which start a little later.
        let pid = Value::from(server.child.id());
        wait_until("the threads", || each_thread(&pid, "CapEff").len() >= 4);
        for line in ["CapEff", "CapPrm", "CapBnd"] {
            let values = each_thread(&pid, line);
            assert!(values.len() >= 4 && values.iter().all(|value| value == left), "{values:?}");
        }
        server.signal(Signal::TERM);
        server.next_event("stopped");
        let mut text = String::new();
        server.child.stderr.take().expect("a pipe").read_to_string(&mut text).expect("text");
        assert_eq!(
            text.contains("the worker runs as root, without its capabilities"),
            user == "0",
            "{text}"
        );
    }
}

#[test]
fn a_group_or_a_user_that_cannot_be_had_is_named_with_the_fix() {
    let (dir, image, socket) = folder("serve-no-group");
    let refused = |is_other: bool, arguments: &[&str], code: i32, parts: &[&str]| {
        let mut command = uzone(&["serve", &image, "--socket", &socket]);
        command.args(arguments);
        if is_other {
            command.uid(65534).gid(65534);
        }
        let output = command.output().expect("it runs");
        parts.iter().for_each(|part| has_failed(&output, code, part));
    };
    let unknown = ["/etc/group", "no such group", "number"];
    refused(false, &["--group", "no such group"], 2, &unknown);
    refused(false, &["--allow-uid", "0,no such user"], 2, &["no such user", "number"]);
    assert_eq!(dir.names(), ["raw"]);
    if has_users("a_group_or_a_user_that_cannot_be_had_is_named_with_the_fix") {
        chown(dir.path(), Some(65534), None).expect("this is root");
        let parts = [socket.as_str(), "group 0", "as root or as a member"];
        refused(true, &["--group", "root"], 77, &parts);
        assert_eq!(dir.names(), ["raw"], "nothing is left behind");
    }
}

#[test]
fn huge_pages_are_counted_and_a_server_that_may_not_make_them_states_why() {
    let name = "huge_pages_are_counted_and_a_server_that_may_not_make_them_states_why";
    if !has_users(name) {
        return;
    }
    let dir = Dir::new("serve-huge");
    chown(dir.path(), Some(65534), None).expect("this is root");
    let (image, socket) = (write_image(&dir, "raw", 0), dir.name("sock"));
    let counts = || {
        let status = status_at(&socket);
        let stats = &status["sessions"][0]["stats"];
        [&stats["huge_pages"], &stats["not_huge"]].map(|count| count.as_u64().unwrap_or(0))
    };
    for is_root in [true, false] {
        let mut command = uzone(&["serve", "--json", "--huge", "--on-failure", "hold"]);
        command.args(["--mode", "666", &image, "--socket", &socket]);
        if !is_root {
            command.uid(65534).gid(65534);
        }
        let mut server = Server::beside(&mut command);
        server.next_event("listening");
        let Some(machine) = Machine::connect(&socket) else { return drop(server.stop()) };
        server.next_event("connected");
        (0..PAGES).for_each(|page| machine.check_page(page));
        wait_until("a block that is filled", || counts() != [0, 0]);
        if !is_root {
            let not_huge = server.next_event("not_huge");
            let reason = not_huge["reason"].as_str().expect("text");
            assert!(reason.contains("may not") && reason.contains("CAP_SYS_NICE"), "{reason}");
            assert_eq!(counts()[0], 0);
        } else if counts()[0] == 0 {
            skip(name, server.any_event());
        }
        (0..PAGES).for_each(|page| machine.check_page(page));
        // The process that has the machine is this one, which goes on.
        server.stop_at_once(&socket);
        assert_eq!(server.wait().code(), Some(75), "a machine is left");
        drop(machine);
    }
    // One page a fault is no block.
    refuses(&["serve", &image, "--huge", "--record", &dir.name("set")], 2, "--record");
}

#[test]
fn neighbours_come_along_although_the_kernel_does_not_tell_the_user_what_is_cached() {
    let name = "neighbours_come_along_although_the_kernel_does_not_tell_the_user_what_is_cached";
    if !has_users(name) {
        return;
    }
    let dir = Dir::new("serve-not-cached");
    let (image, socket) = (write_image(&dir, "raw", 0), dir.name("sock"));
    fs::set_permissions(dir.path(), fs::Permissions::from_mode(0o755)).expect("it is ours");
    fs::set_permissions(&image, fs::Permissions::from_mode(0o644)).expect("it is ours");
    // The owner of the file, and a user that may read it alone.
    for user in ["root", "65534"] {
        let how = ["--on-failure", "hold", "--recover", "none", "--user", user];
        let server = Server::start(&[&[&image[..], "--socket", &socket], &how[..]].concat());
        let Some(machine) = Machine::connect(&socket) else { return drop(server.stop()) };
        (0..PAGES).for_each(|page| machine.check_page(page));
        let status = status_at(&socket);
        let faults = status["sessions"][0]["stats"]["faults"].as_u64().expect("a number");
        assert!(faults <= PAGES / 12, "user {user}: {status}");
        drop(machine);
        server.kill();
    }
}
