//! The servers that a file describes ([`read`]): its keys are the long options of `uzone serve`, and each
//! server becomes the arguments that it would be started with by itself.
//!
//! An option on the command line goes before a variable of the environment, that before the file, and that
//! before the default.

use std::collections::HashSet;
use std::env;
use std::ffi::OsString;
use std::fmt::Display;
use std::fs;
use std::path::Path;

use clap::parser::ValueSource;
use clap::{Arg, ArgAction, ArgMatches, Args as _, Command, FromArgMatches};
use toml::{Table, Value};

use super::Args;
use crate::exit::{Exit, Failure};
use crate::output::Flags;

/// The key of the tables, and that of the image in each.
const IMAGES: &str = "image";
const PATH: &str = "path";
/// What a file has no key for.
const NOT_KEYS: [&str; 6] =
    ["config", "print-config", "take-over", "worker", "check", "allow-numbers"];

/// A server, and what its processes are started with.
#[derive(Debug)]
pub(super) struct Server {
    pub(super) args: Args,
    pub(super) arguments: Vec<OsString>,
    matches: ArgMatches,
}

fn command() -> Command {
    let command = <Flags as clap::Args>::augment_args(Command::new("serve"));
    Args::augment_args(command).disable_help_flag(true)
}

/// Returns the servers that a file describes.
pub(super) fn read(path: &Path) -> Result<Vec<Server>, Failure> {
    let text = fs::read_to_string(path).map_err(|cause| {
        Failure::of(format!("cannot read {}: {cause}", path.display()), cause).with(Exit::Input)
    })?;
    servers(path, &text, &given())
}

/// Returns what is wrong with a file.
fn wrong(path: &Path, what: impl Display) -> Failure {
    Failure::new(Exit::Data, format!("{}{what}", path.display()))
}

fn servers(path: &Path, text: &str, given: &[OsString]) -> Result<Vec<Server>, Failure> {
    let no_image = || {
        let how = format!("add a table [[{IMAGES}]] with a {PATH} and a socket for each");
        wrong(path, format_args!(" has no image: {how}"))
    };
    let mut file: Table = text.parse().map_err(|cause: toml::de::Error| {
        let text = format!("{} is no TOML: {}", path.display(), cause.to_string().trim_end());
        Failure::of(text, cause).with(Exit::Data)
    })?;
    let Some(Value::Array(images)) = file.remove(IMAGES) else { return Err(no_image()) };
    let mut sockets = HashSet::new();
    let mut servers = Vec::new();
    for (number, image) in (1..).zip(images) {
        let Value::Table(mut image) = image else { return Err(no_image()) };
        let table = format!(": the table [[{IMAGES}]] number {number}");
        let lacks = |key| wrong(path, format_args!("{table} has no {key}"));
        let Some(Value::String(name)) = image.remove(PATH) else { return Err(lacks(PATH)) };
        // What a table has goes before what is above all tables.
        let mut keys = file.clone();
        keys.extend(image);
        let mut arguments = vec![OsString::from("serve")];
        for (key, value) in &keys {
            arguments.extend(option(path, text, key, value, given)?);
        }
        arguments.extend(given.iter().cloned());
        arguments.push(name.into());
        let invalid = |error: clap::Error| {
            let reason = error.to_string().lines().next().unwrap_or_default().to_owned();
            wrong(path, format_args!("{table}: {}", reason.trim_start_matches("error: ")))
        };
        let matches = command().try_get_matches_from(&arguments).map_err(invalid)?;
        let args = Args::from_arg_matches(&matches).map_err(invalid)?;
        let Some(socket) = &args.socket else { return Err(lacks("socket")) };
        if !sockets.insert(socket.clone()) {
            let socket = socket.display();
            return Err(wrong(path, format_args!(": two images have the socket {socket}")));
        }
        servers.push(Server { args, arguments, matches });
    }
    if servers.is_empty() { Err(no_image()) } else { Ok(servers) }
}

/// Returns the server of the command line.
pub(super) fn alone() -> Result<Server, Failure> {
    let arguments: Vec<_> = [OsString::from("serve")].into_iter().chain(given()).collect();
    let matches = command().try_get_matches_from(&arguments)?;
    let args = Args::from_arg_matches(&matches)?;
    Ok(Server { args, arguments, matches })
}

/// Returns what was given on the command line beside the file.
fn given() -> Vec<OsString> {
    let mut arguments = env::args_os().skip(1);
    let (mut given, mut is_before) = (Vec::new(), true);
    while let Some(argument) = arguments.next() {
        if is_before && argument == "serve" {
            is_before = false;
        } else if argument == "--config" {
            arguments.next();
        } else if argument != "--print-config"
            && !argument.as_encoded_bytes().starts_with(b"--config=")
        {
            given.push(argument);
        }
    }
    given
}

fn keys(command: &Command) -> impl Iterator<Item = (&str, &Arg)> {
    let longs = command.get_arguments().filter_map(|arg| Some((arg.get_long()?, arg)));
    longs.filter(|(long, arg)| !arg.is_global_set() && !NOT_KEYS.contains(long))
}

/// Returns the option that a key stands for, or nothing if another goes before it.
fn option(
    path: &Path,
    text: &str,
    key: &str,
    value: &Value,
    given: &[OsString],
) -> Result<Vec<OsString>, Failure> {
    let command = command();
    let Some((_, arg)) = keys(&command).find(|(long, _)| *long == key) else {
        let is_it = |line: &str| {
            line.trim_start()
                .strip_prefix(key)
                .is_some_and(|rest| rest.trim_start().starts_with('='))
        };
        let line = text.lines().position(is_it).map_or(1, |line| line + 1);
        return Err(wrong(
            path,
            format_args!(
                ", line {line}: there is no key {key}; the keys are the long options of `uzone serve`, and {IMAGES} for \
             a table with the {PATH} of each image"
            ),
        ));
    };
    let option = format!("--{key}");
    let is_given = |argument: &OsString| {
        let rest = argument.as_encoded_bytes().strip_prefix(option.as_bytes());
        rest.is_some_and(|rest| rest.is_empty() || rest.starts_with(b"="))
    };
    let is_set = arg.get_env().is_some_and(|name| env::var_os(name).is_some());
    if is_set || given.iter().any(is_given) {
        return Ok(Vec::new());
    }
    let is_flag = matches!(arg.get_action(), ArgAction::SetTrue);
    match (value, is_flag) {
        (Value::Boolean(true), true) => Ok(vec![option.into()]),
        (Value::Boolean(false), true) => Ok(Vec::new()),
        (Value::String(text), false) => Ok(vec![format!("{option}={text}").into()]),
        (Value::Integer(number), false) => Ok(vec![format!("{option}={number}").into()]),
        (value, _) => Err(wrong(path, format_args!(": {key} has no such value: {value}"))),
    }
}

/// Returns the whole configuration of some servers, as a file that [`read`] reads.
pub(super) fn print(servers: &[Server]) -> String {
    let command = command();
    let table = |server: &Server| {
        let name = server.args.image.as_deref().unwrap_or(Path::new("-")).display().to_string();
        let mut table = Table::from_iter([(PATH.to_owned(), Value::String(name))]);
        for (key, arg) in keys(&command) {
            let id = arg.get_id().as_str();
            let value = if matches!(arg.get_action(), ArgAction::SetTrue) {
                let is_default = server.matches.value_source(id) == Some(ValueSource::DefaultValue);
                Some(Value::Boolean(!is_default && server.matches.get_flag(id)))
            } else {
                let raw = server.matches.get_raw(id).and_then(|mut values| values.next());
                raw.map(|raw| Value::String(raw.to_string_lossy().into_owned()))
            };
            table.extend(value.map(|value| (key.to_owned(), value)));
        }
        Value::Table(table)
    };
    let images = Value::Array(servers.iter().map(table).collect());
    // Tables of texts and booleans are TOML.
    toml::to_string(&Table::from_iter([(IMAGES.to_owned(), images)])).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(text: &str) -> Result<Vec<Server>, String> {
        servers(Path::new("uzone.toml"), text, &[]).map_err(|failure| failure.text())
    }

    #[test]
    fn each_table_is_a_server_and_has_what_is_above_all_tables() {
        let text = "deadline = 7\nno-sandbox = true\n[[image]]\npath = 'a'\nsocket = 'a.sock'\n\
                    deadline = 9\n[[image]]\npath = 'b'\nsocket = 'b.sock'\nno-sandbox = false\n";
        let servers = of(text).unwrap();
        let seen: Vec<_> = servers
            .iter()
            .map(|server| (server.args.deadline, server.args.no_sandbox, server.args.image.clone()))
            .collect();
        assert_eq!(seen, [(9, true, Some("a".into())), (7, false, Some("b".into()))]);
        // What is printed describes the same servers.
        let again = of(&print(&servers)).unwrap();
        assert_eq!(print(&again), print(&servers));
        assert_eq!(again[0].args.deadline, 9);
        assert!(print(&servers).contains("mode = \"600\""), "{}", print(&servers));
    }

    #[test]
    fn the_mode_of_a_socket_follows_its_group_and_its_users_unless_it_is_given() {
        let mode = |keys: &str| {
            let text = format!("{keys}[[image]]\npath = 'a'\nsocket = 'a.sock'\n");
            let servers = of(&text).unwrap();
            let again = of(&print(&servers)).unwrap();
            assert_eq!(print(&again), print(&servers));
            servers[0].args.mode
        };
        assert_eq!(mode(""), 0o600);
        assert_eq!(mode("group = 'kvm'\n"), 0o660);
        assert_eq!(mode("allow-uid = 'vm,77'\n"), 0o666);
        assert_eq!(mode("allow-uid = 77\ngroup = 78\n"), 0o660);
        assert_eq!(mode("allow-uid = 77\ngroup = 78\nmode = 600\n"), 0o600);
    }

    #[test]
    fn what_is_wrong_is_named_with_its_place() {
        for (text, expected) in [
            ("", "has no image"),
            ("image = 3", "has no image"),
            ("x = [", "is no TOML"),
            ("[[image]]\nsocket = 'a'", "number 1 has no path"),
            ("[[image]]\npath = 'a'", "number 1 has no socket"),
            ("[[image]]\npath = 'a'\nsocket = 's'\nspeed = 1", "line 4: there is no key speed"),
            (
                "worker = true\n[[image]]\npath = 'a'\nsocket = 's'",
                "line 1: there is no key worker",
            ),
            ("[[image]]\npath = 'a'\nsocket = 's'\ndeadline = 0", "invalid value '0'"),
            ("[[image]]\npath = 'a'\nsocket = true", "socket has no such value: true"),
            (
                "socket = 's'\n[[image]]\npath = 'a'\n[[image]]\npath = 'b'",
                "two images have the socket s",
            ),
        ] {
            let error = of(text).unwrap_err();
            assert!(error.contains(expected), "{text}: {error}");
        }
    }
}
