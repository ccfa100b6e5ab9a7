//! Users and groups by their names or numbers, from `/etc/passwd` and `/etc/group`: [`User`], [`number_of_user`] and
//! [`number_of_group`].

use std::os::unix::process::CommandExt;
use std::process::Command;

use uzone_server::privilege;

use crate::exit::{Exit, Failure};

/// The files of users and groups. Other sources of names are not asked: a number needs none.
const USERS: &str = "/etc/passwd";
const GROUPS: &str = "/etc/group";

/// A user and its group.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct User {
    number: u32,
    group: u32,
}

impl User {
    /// Returns the user of a name or number, if this process may start a process of that user.
    pub(crate) fn named(name: &str) -> Result<Self, Failure> {
        let user = find("user", USERS, name, Self::among)?;
        let theirs = user.number;
        match privilege::user() {
            ours if ours != 0 && ours != theirs => Err(Failure::new(
                Exit::Permission,
                format!(
                    "user {ours} cannot start a process as user {theirs}: start this command as root, or as \
                     that user"
                ),
            )),
            _ => Ok(user),
        }
    }

    /// Finds a name or a number among lines of `/etc/passwd`. A number that is missing there has the group of the same
    /// number.
    fn among(users: &str, name: &str) -> Option<Self> {
        let users = users.lines().filter_map(|line| {
            let mut fields = line.split(':');
            let (name, number) = (fields.next()?, fields.nth(1)?.parse().ok()?);
            Some((name, Self { number, group: fields.next()?.parse().ok()? }))
        });
        let wanted: Option<u32> = name.parse().ok();
        let is_it = |other: &str, user: &Self| other == name || wanted == Some(user.number);
        users.filter(|(other, user)| is_it(other, user)).map(|(_, user)| user).next().or_else(
            // All bits set means no user to setresuid(2).
            || {
                wanted
                    .filter(|&number| number != u32::MAX)
                    .map(|number| Self { number, group: number })
            },
        )
    }

    /// Sets the user of `command`, without the groups of this process.
    pub(crate) fn runs(self, command: &mut Command) {
        // A process of that user may lack the right to, and needs no change.
        if privilege::user() != self.number {
            command.uid(self.number).gid(self.group);
        }
    }
}

/// Returns the number of a user.
pub(crate) fn number_of_user(name: &str) -> Result<u32, Failure> {
    Ok(find("user", USERS, name, User::among)?.number)
}

/// Returns the number of a group.
pub(crate) fn number_of_group(name: &str) -> Result<u32, Failure> {
    find("group", GROUPS, name, group_among)
}

/// Finds a name or a number in a file. If the file cannot be read, a number is taken as it is.
fn find<T>(
    noun: &'static str,
    file: &'static str,
    name: &str,
    among: impl Fn(&str, &str) -> Option<T>,
) -> Result<T, Failure> {
    let is_number = name.parse::<u32>().is_ok();
    let lines = match std::fs::read_to_string(file) {
        Err(cause) if !is_number => {
            let text = format!("cannot read {file}: {cause}; give the {noun} by its number");
            return Err(Failure::of(text, cause).with(Exit::Os));
        }
        lines => lines.unwrap_or_default(),
    };
    among(&lines, name).ok_or_else(|| {
        Failure::usage(format!("{file} has no {noun} {name}: name one that it has, or a number"))
    })
}

/// Finds a name or a number among lines of `/etc/group`.
fn group_among(groups: &str, name: &str) -> Option<u32> {
    let named = groups.lines().find_map(|line| {
        let mut fields = line.split(':');
        (fields.next()? == name).then(|| fields.nth(1)?.parse().ok())?
    });
    // All bits set means no group to chown(2).
    named.or_else(|| name.parse().ok()).filter(|&number| number != u32::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_group_is_found_by_name_and_by_number() {
        let groups = "root:x:0:\n# a note\nkvm:x:78:vm,other\n7:x:9:\nbroken\n";
        for (name, group) in [("kvm", Some(78)), ("78", Some(78)), ("79", Some(79)), ("7", Some(9))]
        {
            assert_eq!(group_among(groups, name), group, "{name}");
        }
        for name in ["KVM", "", "broken", "-1", "4294967295", "4294967296"] {
            assert_eq!(group_among(groups, name), None, "{name}");
        }
    }

    #[test]
    fn a_user_is_found_by_name_and_by_number() {
        let users =
            "root:x:0:0:root:/root:/bin/sh\n# a note\nvm:x:120:130::/:/bin/false\n7:x:9:9:::\n";
        let user = |number, group| Some(User { number, group });
        assert_eq!(User::among(users, "vm"), user(120, 130));
        assert_eq!(User::among(users, "120"), user(120, 130));
        assert_eq!(User::among(users, "121"), user(121, 121));
        assert_eq!(User::among(users, "7"), user(9, 9));
        for name in ["VM", "", "v", "-1", "4294967295", "4294967296"] {
            assert_eq!(User::among(users, name), None, "{name}");
        }
    }
}
