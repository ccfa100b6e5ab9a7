//! `uzone serve`: what it prints while it runs, and how it ends.

mod common;

use std::fs;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::os::unix::net::{UnixDatagram, UnixStream};
use std::process::{Child, ChildStdout, Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use common::{Dir, keeps_to};
use serde_json::Value;

fn serve(arguments: &[&str]) -> (Child, BufReader<ChildStdout>) {
    let mut command = Command::new(env!("CARGO_BIN_EXE_uzone"));
    command.args(["serve", "--json"]).args(arguments).stdin(Stdio::null()).stdout(Stdio::piped());
    let mut child = command.spawn().expect("the binary under test runs");
    let lines = BufReader::new(child.stdout.take().expect("a pipe"));
    (child, lines)
}

fn event(lines: &mut impl BufRead) -> Value {
    let mut line = String::new();
    lines.read_line(&mut line).expect("it is read");
    let object = serde_json::from_str(&line).expect("an object a line");
    keeps_to("uzone.serve-1", &object);
    object
}

fn signal(child: &Child) {
    let pid = rustix::process::Pid::from_child(child);
    rustix::process::kill_process(pid, rustix::process::Signal::TERM).expect("it runs");
}

#[test]
fn a_server_says_where_it_listens_names_what_it_refuses_and_ends_with_a_signal() {
    let dir = Dir::new("serve");
    let (image, socket) = (dir.name("raw"), dir.name("sock"));
    fs::write(&image, vec![7; 1 << 20]).expect("a file is written");
    let (mut server, mut lines) = serve(&[&image, "--socket", &socket, "--metrics", "127.0.0.1:0"]);
    let listening = event(&mut lines);
    assert_eq!(listening["event"], "listening");
    assert_eq!(listening["socket"], socket.as_str());

    let mut stream = UnixStream::connect(&socket).expect("it listens");
    stream.write_all(b"GET / HTTP/1.1\r\n\r\n").expect("it is taken");
    let refused = event(&mut lines);
    assert_eq!((&refused["event"], &refused["was_killed"]), (&"refused".into(), &false.into()));
    assert!(refused["reason"].as_str().expect("text").contains("no array of regions"));

    let second = Command::new(env!("CARGO_BIN_EXE_uzone"))
        .args(["serve", &image, "--socket", &socket])
        .output()
        .expect("the binary under test runs");
    assert_eq!(second.status.code(), Some(75));
    let message = String::from_utf8(second.stderr).expect("text");
    assert!(message.contains("another server listens on"), "{message}");

    let object = |arguments: &[&str]| {
        let output = Command::new(env!("CARGO_BIN_EXE_uzone"))
            .args(arguments)
            .args(["--socket", &socket, "--json"])
            .output()
            .expect("the binary under test runs");
        assert!(output.status.success(), "{output:?}");
        let object: Value = serde_json::from_slice(&output.stdout).expect("an object");
        keeps_to("uzone.status-1", &object);
        object
    };
    let status = object(&["status"]);
    assert_eq!((&status["keeper"], &status["is_draining"]), (&server.id().into(), &false.into()));
    let mut scraped = String::new();
    let mut client =
        TcpStream::connect(listening["metrics"].as_str().expect("an address")).expect("it listens");
    client.write_all(b"GET /metrics HTTP/1.1\r\nHost: here\r\n\r\n").expect("it is taken");
    client.read_to_string(&mut scraped).expect("it answers");
    assert!(scraped.starts_with("HTTP/1.1 200 OK\r\n"), "{scraped}");
    assert!(scraped.contains("\nuzone_worker_up 1\n"), "{scraped}");

    // The process that answers faults is another, and replaced when it dies.
    let pid = server.id();
    let children =
        fs::read_to_string(format!("/proc/{pid}/task/{pid}/children")).expect("it is read");
    let worker: i32 = children.trim().parse().expect("one number");
    let worker = rustix::process::Pid::from_raw(worker).expect("a process");
    rustix::process::kill_process(worker, rustix::process::Signal::KILL).expect("it runs");
    let died = event(&mut lines);
    assert_eq!((&died["event"], &died["sessions"]), (&"worker_ended".into(), &0.into()));

    let drained = object(&["drain"]);
    assert_eq!((&drained["worker_deaths"], &drained["is_draining"]), (&1.into(), &true.into()));
    let stopped = event(&mut lines);
    assert_eq!((&stopped["event"], &stopped["sessions"]), (&"stopped".into(), &0.into()));
    assert_eq!((&stopped["worker_deaths"], &stopped["dropped_events"]), (&1.into(), &0.into()));
    assert!(server.wait().expect("it ends").success());
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
    let dir = Dir::new("serve-sandbox");
    let (image, socket) = (dir.name("raw"), dir.name("sock"));
    fs::write(&image, vec![7; 1 << 20]).expect("a file is written");
    for arguments in [&[][..], &["--no-sandbox"], &["--user", "65534"]] {
        let is_root = rustix::process::geteuid().is_root();
        if arguments.contains(&"--user") && !is_root {
            assert!(std::env::var("REQUIRE_ALL").as_deref() != Ok("1"), "{name}: it takes root");
            eprintln!("skipped: {name}: another user takes root");
            continue;
        }
        let of_server = [&image, "--socket", &socket];
        let (mut server, mut lines) = serve(&[&of_server[..], arguments].concat());
        let sandbox = event(&mut lines)["sandbox"].take();
        let output = Command::new(env!("CARGO_BIN_EXE_uzone"))
            .args(["status", "--json", "--socket", &socket])
            .output()
            .expect("the binary under test runs");
        let status: Value = serde_json::from_slice(&output.stdout).expect("an object");
        keeps_to("uzone.status-1", &status);
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
        signal(&server);
        assert_eq!(event(&mut lines)["event"], "stopped");
        assert!(server.wait().expect("it ends").success());
    }
}

#[test]
fn an_image_that_the_user_cannot_read_and_a_user_that_there_is_not_are_named_with_the_fix() {
    let dir = Dir::new("serve-unreadable");
    let (image, socket) = (dir.name("raw"), dir.name("sock"));
    fs::write(&image, vec![7; 1 << 20]).expect("a file is written");
    let private = std::os::unix::fs::PermissionsExt::from_mode(0o600);
    fs::set_permissions(&image, private).expect("it is ours");
    let cases = [("65534", 77, "65534"), ("no such user", 2, "name one that is there")];
    for (user, code, part) in cases {
        let output = Command::new(env!("CARGO_BIN_EXE_uzone"))
            .args(["serve", &image, "--socket", &socket, "--user", user])
            .output()
            .expect("the binary under test runs");
        let message = String::from_utf8(output.stderr).expect("text");
        assert_eq!(output.status.code(), Some(code), "{message}");
        assert!(message.contains(part), "{message}");
        if code == 77 && rustix::process::geteuid().is_root() {
            assert!(message.contains(&image) && message.contains("--user"), "{message}");
        }
    }
    assert_eq!(dir.names(), ["raw"]);
}

#[test]
fn a_service_manager_is_notified_when_machines_can_connect() {
    let dir = Dir::new("serve-notify");
    let (image, socket, manager) = (dir.name("raw"), dir.name("sock"), dir.name("manager"));
    fs::write(&image, vec![7; 1 << 20]).expect("a file is written");
    let notified = UnixDatagram::bind(&manager).expect("it listens");
    notified.set_read_timeout(Some(Duration::from_secs(30))).expect("a time");
    let mut command = Command::new(env!("CARGO_BIN_EXE_uzone"));
    command.args(["serve", "--quiet", &image, "--socket", &socket]).env("NOTIFY_SOCKET", &manager);
    let mut server = command.stdin(Stdio::null()).spawn().expect("the binary under test runs");
    let mut heard = [0; 256];
    let len = notified.recv(&mut heard).expect("it is notified");
    let text = String::from_utf8_lossy(&heard[..len]).into_owned();
    assert!(
        text.contains("READY=1") && text.contains(&format!("MAINPID={}", server.id())),
        "{text}"
    );
    drop(UnixStream::connect(&socket).expect("it listens"));
    signal(&server);
    loop {
        let len = notified.recv(&mut heard).expect("it is notified");
        let text = String::from_utf8_lossy(&heard[..len]);
        if text.contains("STOPPING=1") {
            break;
        }
        assert!(text.contains("FDNAME=uzone.socket."), "{text}");
    }
    assert!(server.wait().expect("it ends").success());
}

#[test]
fn a_process_that_the_server_cannot_see_is_refused_by_name() {
    let name = "a_process_that_the_server_cannot_see_is_refused_by_name";
    let dir = Dir::new("serve-namespace");
    let (image, socket) = (dir.name("raw"), dir.name("sock"));
    fs::write(&image, vec![7; 1 << 20]).expect("a file is written");
    let unshare = ["--fork", "--pid", "--mount-proc", "--kill-child"];
    let may = Command::new("unshare").args(unshare).arg("true").output();
    if !may.as_ref().is_ok_and(|output| output.status.success()) {
        assert!(std::env::var("REQUIRE_ALL").as_deref() != Ok("1"), "{name}: {may:?}");
        println!("skipped: {name}: a PID namespace cannot be made here");
        return;
    }
    let mut command = Command::new("unshare");
    command.args(unshare).args([env!("CARGO_BIN_EXE_uzone"), "serve", "--json"]);
    command.args([&image, "--socket", &socket]).stdin(Stdio::null()).stdout(Stdio::piped());
    let mut server = command.spawn().expect("it runs");
    let mut lines = BufReader::new(server.stdout.take().expect("a pipe"));
    assert_eq!(event(&mut lines)["event"], "listening");
    let _stream = UnixStream::connect(&socket).expect("it listens");
    let refused = event(&mut lines);
    assert_eq!((&refused["event"], &refused["pid"]), (&"refused".into(), &0.into()));
    assert!(refused["reason"].as_str().is_some_and(|text| text.contains("PID namespace")));
    server.kill().expect("it runs");
    server.wait().expect("it ends");
}

#[test]
fn a_signal_ends_a_server_and_one_that_is_not_there_cannot_be_asked() {
    let dir = Dir::new("serve-signal");
    let (image, socket) = (dir.name("raw"), dir.name("sock"));
    fs::write(&image, vec![7; 1 << 20]).expect("a file is written");
    let (mut server, mut lines) = serve(&[&image, "--socket", &socket]);
    assert_eq!(event(&mut lines)["metrics"], Value::Null);
    signal(&server);
    assert_eq!(event(&mut lines)["event"], "stopped");
    assert!(server.wait().expect("it ends").success());
    for command in ["status", "drain"] {
        let output = Command::new(env!("CARGO_BIN_EXE_uzone"))
            .args([command, "--socket", &socket])
            .output()
            .expect("the binary under test runs");
        let message = String::from_utf8(output.stderr).expect("text");
        assert_eq!(output.status.code(), Some(66), "{message}");
        assert!(message.contains("cannot ask the server at"), "{message}");
    }
}

#[test]
fn a_log_line_states_what_is_not_verified() {
    let dir = Dir::new("serve-trust");
    let (raw, packed, socket) = (dir.name("raw"), dir.name("packed"), dir.name("sock"));
    fs::write(&raw, vec![7; 1 << 20]).expect("a file is written");
    let pack = Command::new(env!("CARGO_BIN_EXE_uzone")).args(["pack", &raw, &packed]).output();
    assert!(pack.is_ok_and(|output| output.status.success()));
    let mut command = Command::new(env!("CARGO_BIN_EXE_uzone"));
    let inspected = command.args(["inspect", "--json", &packed]).output().expect("it runs");
    let inspected: Value = serde_json::from_slice(&inspected.stdout).expect("an object");
    let root = format!("--root={}", inspected["chain"][0]["root"].as_str().expect("a hash"));
    for (arguments, part) in [
        (&[&raw[..]][..], "neither damage nor forgery"),
        (&[&packed], "forgery is not"),
        (&[&raw, "--quiet"], ""),
        (&[&packed, &root], ""),
    ] {
        let mut command = Command::new(env!("CARGO_BIN_EXE_uzone"));
        command.args(["serve", "--json", "--socket", &socket]).args(arguments);
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut server = command.spawn().expect("it runs");
        let mut lines = BufReader::new(server.stdout.take().expect("a pipe"));
        if !arguments.contains(&"--quiet") {
            event(&mut lines);
        } else {
            while UnixStream::connect(&socket).is_err() {
                thread::sleep(Duration::from_millis(5));
            }
        }
        signal(&server);
        let mut logged = String::new();
        server.stderr.take().expect("a pipe").read_to_string(&mut logged).expect("text");
        assert!(server.wait().expect("it ends").success());
        assert!(logged.contains(part) && logged.is_empty() == part.is_empty(), "{logged}");
    }
}

#[test]
fn an_image_that_cannot_be_served_is_named_with_its_exit_code() {
    let dir = Dir::new("serve-not");
    let (cut, none, socket) = (dir.name("cut"), dir.name("none"), dir.name("sock"));
    fs::write(&cut, vec![7; 5000]).expect("a file is written");
    let (raw, root) = (dir.name("raw"), format!("--root={}", "12".repeat(32)));
    fs::write(&raw, vec![7; 4096]).expect("a file is written");
    for (image, root, code) in [(&cut, "-v", 65), (&none, "-v", 66), (&raw, &root, 65)] {
        let output = Command::new(env!("CARGO_BIN_EXE_uzone"))
            .args(["serve", root, image, "--socket", &socket])
            .output()
            .expect("the binary under test runs");
        let message = String::from_utf8(output.stderr).expect("text");
        assert_eq!(output.status.code(), Some(code), "{message}");
        assert!(message.contains(image.as_str()), "{message}");
    }
    let output = Command::new(env!("CARGO_BIN_EXE_uzone"))
        .args(["serve", &cut, "--mode", "1777"])
        .output()
        .expect("the binary under test runs");
    assert_eq!(output.status.code(), Some(2));
}

#[test]
fn a_file_describes_several_servers_and_flags_go_before_it() {
    let dir = Dir::new("serve-config");
    let (one, two) = (dir.name("one"), dir.name("two"));
    for (path, byte) in [(&one, 1), (&two, 2)] {
        fs::write(path, vec![byte; 1 << 20]).expect("a file is written");
    }
    let (first, second) = (dir.name("first.sock"), dir.name("second.sock"));
    let text = format!(
        "deadline = 20\n\n[[image]]\npath = \"{one}\"\nsocket = \"{first}\"\n\n[[image]]\npath = \"{two}\"\n\
         socket = \"{second}\"\ndeadline = 10\n"
    );
    let config = dir.file("uzone.toml", &text);
    let print = |arguments: &[&str]| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_uzone"));
        command.args(["serve", "--config", &config, "--print-config"]).args(arguments);
        let output = command.env("UZONE_SERVE_CACHE_BYTES", "8M").output().expect("it runs");
        assert!(output.status.success(), "{output:?}");
        String::from_utf8(output.stdout).expect("text")
    };
    let printed = print(&[]);
    assert!(
        printed.contains("deadline = \"20\"") && printed.contains("deadline = \"10\""),
        "{printed}"
    );
    assert_eq!(printed.matches("cache-bytes = \"8M\"").count(), 2, "{printed}");
    // The variable goes before the file, and the option before both.
    let text =
        format!("source-timeout = 7\nsource-retry = \"40s\"\nsource-retry-pause = 1\n{text}");
    let requests = dir.file("requests.toml", &text);
    let of = |arguments: &[&str]| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_uzone"));
        command.args(["serve", "--config", &requests, "--print-config"]).args(arguments);
        command.env("UZONE_SOURCE_RETRY", "50s").env("UZONE_SOURCE_RETRY_PAUSE", "2s");
        let printed = String::from_utf8(command.output().expect("it runs").stdout).expect("text");
        let values = ["timeout", "retry", "retry-pause", "retry-count"].map(|name| {
            let mut lines = printed.lines().filter_map(|line| line.strip_prefix("source-"));
            let value = lines.find_map(|line| line.strip_prefix(name)?.strip_prefix(" = "));
            value.unwrap_or_default().trim_matches('"').to_owned()
        });
        assert_eq!(printed.matches("source-").count(), 8, "{printed}");
        values
    };
    assert_eq!(of(&[]), ["7", "50s", "2s", "6"]);
    assert_eq!(of(&["--source-retry-pause", "500ms"]), ["7", "50s", "500ms", "6"]);
    assert_eq!(print(&["--deadline", "5"]).matches("deadline = \"5\"").count(), 2);
    assert_eq!(print(&["--session-bytes", "64M"]).matches("session-bytes = \"64M\"").count(), 2);
    for (given, reason) in
        [("--session-bytes=100", "at least 1 MiB"), ("--session-faults=0", "zero")]
    {
        let refused = Command::new(env!("CARGO_BIN_EXE_uzone"))
            .args(["serve", "--config", &config, "--print-config", given])
            .output()
            .expect("it runs");
        assert_eq!(refused.status.code(), Some(2), "{given}");
        let message = String::from_utf8(refused.stderr).expect("text");
        assert!(message.contains(reason), "{message}");
    }

    let (mut server, mut lines) = serve(&["--config", &config]);
    for socket in [&first, &second] {
        let listening = event(&mut lines);
        assert_eq!(
            (&listening["event"], &listening["socket"]),
            (&"listening".into(), &socket[..].into())
        );
    }
    for (socket, byte) in [(&first, 1), (&second, 2)] {
        let options = uzone_attach::AttachOptions::default();
        match uzone_attach::AttachedMemory::attach(socket.as_ref(), &options) {
            Ok(memory) => {
                let mut seen = [0; 64];
                memory.mapping().read_at(5000, &mut seen).expect("it is served");
                assert_eq!(seen, [byte; 64]);
            }
            Err(uzone_attach::AttachError::Open(error)) => println!("skipped: attaching: {error}"),
            Err(error) => panic!("{error}"),
        }
        UnixStream::connect(socket)
            .expect("it listens")
            .write_all(b"rubbish")
            .expect("it is taken");
        // The session before may end later than this client is refused.
        loop {
            let happened = event(&mut lines);
            if happened["event"] == "refused" {
                assert_eq!(happened["server"], socket[..], "{happened}");
                break;
            }
        }
    }
    signal(&server);
    let mut stopped: Vec<_> = (0..2)
        .map(|_| {
            loop {
                let happened = event(&mut lines);
                if happened["event"] == "stopped" {
                    break happened["server"].as_str().expect("a socket").to_owned();
                }
            }
        })
        .collect();
    stopped.sort();
    assert_eq!(stopped, [&first[..], &second[..]]);
    assert!(server.wait().expect("it ends").success());

    // Machines of the others may wait for their server.
    fs::remove_file(&one).expect("it is there");
    let (mut server, mut lines) = serve(&["--config", &config]);
    let mut line = String::new();
    lines.read_line(&mut line).expect("it is read");
    let error: Value = serde_json::from_str(&line).expect("an object on a line");
    keeps_to("uzone.error-1", &error);
    assert_eq!(error["exit_code"], 66, "{error}");
    assert_eq!(event(&mut lines)["socket"], second[..]);
    signal(&server);
    assert_eq!(event(&mut lines)["event"], "stopped");
    assert_eq!(server.wait().expect("it ends").code(), Some(66), "one image is missing");

    let config = dir.file("wrong.toml", "[[image]]\npath = 'a'\nsocket = 'b'\nspeed = 3\n");
    let mut command = Command::new(env!("CARGO_BIN_EXE_uzone"));
    let output = command.args(["serve", "--config", &config]).output().expect("it runs");
    let message = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(65), "{message}");
    assert!(message.contains("line 4: there is no key speed"), "{message}");
}

/// Returns whether tests can be of several users, which takes root and a program that any user may run.
fn has_users(name: &str) -> bool {
    use std::os::unix::process::CommandExt;
    let mut other = Command::new(env!("CARGO_BIN_EXE_uzone"));
    let run = other.arg("--version").uid(65534).gid(65534).output();
    let has_users = rustix::process::geteuid().is_root()
        && run.as_ref().is_ok_and(|output| output.status.success());
    if !has_users {
        assert!(std::env::var("REQUIRE_ALL").as_deref() != Ok("1"), "{name}: {run:?}");
        println!("skipped: {name}: it takes root, and a program that others may run");
    }
    has_users
}

#[test]
fn a_socket_has_its_group_and_admits_the_users_that_are_named() {
    use std::os::unix::fs::MetadataExt;
    use std::os::unix::process::CommandExt;
    let name = "a_socket_has_its_group_and_admits_the_users_that_are_named";
    if !has_users(name) {
        return;
    }
    let dir = Dir::new("serve-users");
    let (image, socket) = (dir.name("raw"), dir.name("sock"));
    fs::write(&image, vec![7; 1 << 20]).expect("a file is written");
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
        let (mut server, mut lines) =
            serve(&[&[&image, "--socket", &socket][..], arguments].concat());
        event(&mut lines);
        assert_eq!(rights(&socket), expected, "{arguments:?}");
        assert_eq!(rights(&control), (0o600, own), "{arguments:?}");
        signal(&server);
        assert!(server.wait().expect("it ends").success());
    }

    // Another command looks whether a server is there, and so connects.
    let (mut server, mut lines) = serve(&[&image, "--socket", &socket, "--allow-uid", "65534"]);
    event(&mut lines);
    let looks = |user: u32| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_uzone"));
        command.args(["serve", &image, "--socket", &socket]).uid(user).gid(user);
        assert_eq!(command.output().expect("it runs").status.code(), Some(75));
    };
    looks(65534);
    looks(65533);
    let refused = event(&mut lines);
    assert_eq!((&refused["event"], &refused["session"]), (&"refused".into(), &2.into()));
    let reason = refused["reason"].as_str().expect("text");
    assert!(reason.contains("user 65533 may not connect") && reason.contains("--allow-uid"));
    // Its worker, which takes its place, has the same list.
    server.kill().expect("it runs");
    server.wait().expect("it ends");
    let status = || {
        let mut command = Command::new(env!("CARGO_BIN_EXE_uzone"));
        let output = command.args(["status", "--json", "--socket", &socket]).output();
        serde_json::from_slice::<Value>(&output.expect("it runs").stdout).ok()
    };
    let since = Instant::now();
    while status().is_none_or(|status| status["is_confined"] != true) {
        assert!(since.elapsed() < Duration::from_secs(60), "no worker takes its place");
        thread::sleep(Duration::from_millis(5));
    }
    looks(65533);
    loop {
        let happened = event(&mut lines);
        if happened["event"] == "refused" {
            assert!(happened["reason"].as_str().is_some_and(|text| text.contains("65533")));
            break;
        }
    }
    let drained = Command::new(env!("CARGO_BIN_EXE_uzone"))
        .args(["drain", "--socket", &socket])
        .output()
        .expect("it runs");
    assert!(drained.status.success(), "{drained:?}");
}

#[test]
fn faults_are_not_answered_as_root_where_another_user_can_and_root_keeps_few_capabilities() {
    use std::os::unix::fs::{PermissionsExt, chown};
    let name =
        "faults_are_not_answered_as_root_where_another_user_can_and_root_keeps_few_capabilities";
    if !has_users(name) {
        return;
    }
    let dir = Dir::new("serve-root");
    let (image, socket) = (dir.name("raw"), dir.name("sock"));
    fs::write(&image, vec![7; 1 << 20]).expect("a file is written");
    fs::set_permissions(dir.path(), fs::Permissions::from_mode(0o755)).expect("it is ours");
    // Capabilities 2, 5 and 19: reading files, ending processes, tracing them. 6 and 7: other users and groups.
    let (few, more) = ("0000000000080024", "00000000000800e4");
    // A package may have made a user for it.
    let users = fs::read_to_string("/etc/passwd").expect("it is read");
    let of_package = users.lines().find_map(|line| line.strip_prefix("uzone:x:"));
    let other = of_package.and_then(|line| line.split(':').next()).unwrap_or("65534");
    for (owner, mode, user, left) in
        [(0, 0o644, other, more), (65533, 0o600, "65533", more), (0, 0o600, "0", few)]
    {
        chown(&image, Some(owner), None).expect("root may");
        fs::set_permissions(&image, fs::Permissions::from_mode(mode)).expect("root may");
        let mut command = Command::new(env!("CARGO_BIN_EXE_uzone"));
        command.args(["serve", "--json", &image, "--socket", &socket]).stdin(Stdio::null());
        let mut server =
            command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("it runs");
        let mut lines = BufReader::new(server.stdout.take().expect("a pipe"));
        let sandbox = event(&mut lines)["sandbox"].take();
        assert_eq!(sandbox["user"].to_string(), user, "{owner} {mode:o}");
        // The main thread, and those for signals, printing and questions, which start a little later.
        let begun = Instant::now();
        while each_thread(&Value::from(server.id()), "CapEff").len() < 4 {
            assert!(begun.elapsed() < Duration::from_secs(20), "threads are missing");
            thread::yield_now();
        }
        for line in ["CapEff", "CapPrm", "CapBnd"] {
            let values = each_thread(&Value::from(server.id()), line);
            assert!(values.len() >= 4 && values.iter().all(|value| value == left), "{values:?}");
        }
        signal(&server);
        assert_eq!(event(&mut lines)["event"], "stopped");
        let output = server.wait_with_output().expect("it ends");
        let text = String::from_utf8_lossy(&output.stderr);
        assert_eq!(text.contains("answered as root"), user == "0", "{text}");
    }
}

#[test]
fn a_group_or_a_user_that_cannot_be_had_is_named_with_the_fix() {
    use std::os::unix::process::CommandExt;
    let dir = Dir::new("serve-no-group");
    let (image, socket) = (dir.name("raw"), dir.name("sock"));
    fs::write(&image, vec![7; 1 << 20]).expect("a file is written");
    let refused = |command: &mut Command, arguments: &[&str], code: i32, parts: &[&str]| {
        command.args(["serve", &image, "--socket", &socket]).args(arguments);
        let output = command.output().expect("it runs");
        let message = String::from_utf8(output.stderr).expect("text");
        assert_eq!(output.status.code(), Some(code), "{message}");
        assert!(parts.iter().all(|part| message.contains(part)), "{message}");
    };
    let uzone = || Command::new(env!("CARGO_BIN_EXE_uzone"));
    let unknown = ["/etc/group", "no such group", "number"];
    refused(&mut uzone(), &["--group", "no such group"], 2, &unknown);
    refused(&mut uzone(), &["--allow-uid", "0,no such user"], 2, &["no such user", "number"]);
    assert_eq!(dir.names(), ["raw"]);
    if has_users("a_group_or_a_user_that_cannot_be_had_is_named_with_the_fix") {
        std::os::unix::fs::chown(dir.path(), Some(65534), None).expect("this is root");
        let parts = [socket.as_str(), "group 0", "as root or as a member"];
        refused(uzone().uid(65534).gid(65534), &["--group", "root"], 77, &parts);
        assert_eq!(dir.names(), ["raw"], "nothing is left behind");
    }
}

#[test]
fn huge_pages_are_counted_and_a_server_that_may_not_make_them_states_why() {
    use common::served::{Machine, PAGES, page_of};
    use std::os::unix::process::CommandExt;
    let name = "huge_pages_are_counted_and_a_server_that_may_not_make_them_states_why";
    if !has_users(name) {
        return;
    }
    let dir = Dir::new("serve-huge");
    std::os::unix::fs::chown(dir.path(), Some(65534), None).expect("this is root");
    let (image, socket) = (dir.name("raw"), dir.name("sock"));
    fs::write(&image, (0..PAGES).flat_map(page_of).collect::<Vec<_>>()).expect("it is written");
    let counts = || {
        let mut command = Command::new(env!("CARGO_BIN_EXE_uzone"));
        let output = command.args(["status", "--json", "--socket", &socket]).output();
        let status: Value =
            serde_json::from_slice(&output.expect("it runs").stdout).expect("an object");
        keeps_to("uzone.status-1", &status);
        let stats = &status["sessions"][0]["stats"];
        [&stats["huge_pages"], &stats["not_huge"]].map(|count| count.as_u64().unwrap_or(0))
    };
    for is_root in [true, false] {
        let mut command = Command::new(env!("CARGO_BIN_EXE_uzone"));
        command.args(["serve", "--json", "--huge", "--on-failure", "hold", "--mode", "666"]);
        command.args([&image, "--socket", &socket]).stdin(Stdio::null()).stdout(Stdio::piped());
        if !is_root {
            command.uid(65534).gid(65534);
        }
        let mut server = command.spawn().expect("it runs");
        let mut lines = BufReader::new(server.stdout.take().expect("a pipe"));
        assert_eq!(event(&mut lines)["event"], "listening");
        let Some(machine) = Machine::connect(&socket) else {
            signal(&server);
            server.wait().expect("it ends");
            return;
        };
        assert_eq!(event(&mut lines)["event"], "connected");
        (0..PAGES).for_each(|page| machine.check(page, &page_of(page)));
        let since = Instant::now();
        while counts() == [0, 0] {
            assert!(since.elapsed() < Duration::from_secs(60), "no block is filled");
            thread::sleep(Duration::from_millis(5));
        }
        if !is_root {
            let not_huge = event(&mut lines);
            assert_eq!(not_huge["event"], "not_huge");
            let reason = not_huge["reason"].as_str().expect("text");
            assert!(reason.contains("may not") && reason.contains("CAP_SYS_NICE"), "{reason}");
            assert_eq!(counts()[0], 0);
        } else if counts()[0] == 0 {
            let reason = event(&mut lines);
            assert!(std::env::var("REQUIRE_ALL").as_deref() != Ok("1"), "{reason}");
            println!("skipped: {name}: {reason}");
        }
        (0..PAGES).for_each(|page| machine.check(page, &page_of(page)));
        signal(&server);
        // The process that has the machine is this one, which goes on: the second signal ends the server. The
        // first was heard when the socket is gone.
        while fs::exists(&socket).expect("it is read") {
            thread::sleep(Duration::from_millis(1));
        }
        signal(&server);
        assert_eq!(server.wait().expect("it ends").code(), Some(75), "a machine is left");
        drop(machine);
    }
    let both = Command::new(env!("CARGO_BIN_EXE_uzone"))
        .args(["serve", &image, "--huge", "--record", &dir.name("set")])
        .output()
        .expect("it runs");
    assert_eq!(both.status.code(), Some(2), "one page a fault is no block");
}

#[test]
fn neighbours_come_along_although_the_kernel_does_not_tell_the_user_what_is_cached() {
    use common::served::{Machine, PAGES, Server, page_of};
    use std::os::unix::fs::PermissionsExt;
    let name = "neighbours_come_along_although_the_kernel_does_not_tell_the_user_what_is_cached";
    if !has_users(name) {
        return;
    }
    let dir = Dir::new("serve-not-told");
    let (image, socket) = (dir.name("raw"), dir.name("sock"));
    fs::write(&image, (0..PAGES).flat_map(page_of).collect::<Vec<u8>>()).expect("it is written");
    fs::set_permissions(dir.path(), fs::Permissions::from_mode(0o755)).expect("it is ours");
    fs::set_permissions(&image, fs::Permissions::from_mode(0o644)).expect("it is ours");
    // The owner of the file, and a user that may read it alone.
    for user in ["root", "65534"] {
        let mut command = Command::new(env!("CARGO_BIN_EXE_uzone"));
        command.args(["serve", "--json", "--on-failure", "hold", "--recover", "none"]);
        let server = Server::spawn(command.args([&image, "--socket", &socket, "--user", user]));
        let Some(machine) = Machine::connect(&socket) else { return drop(server.stop()) };
        (0..PAGES).for_each(|page| machine.check(page, &page_of(page)));
        let mut command = Command::new(env!("CARGO_BIN_EXE_uzone"));
        let output = command.args(["status", "--json", "--socket", &socket]).output();
        let status: Value = serde_json::from_slice(&output.expect("it runs").stdout).expect("JSON");
        let faults = status["sessions"][0]["stats"]["faults"].as_u64().expect("a number");
        assert!(faults <= PAGES / 12, "user {user}: {status}");
        drop(machine);
        server.kill();
    }
}
