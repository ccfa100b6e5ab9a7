//! The user that a process is started as: [`User`], by its name or its number, from `/etc/passwd`.

use std::io;
use std::os::unix::process::CommandExt;
use std::process::Command;

use uzone_os::privilege::Privileges;

use crate::exit::{Exit, Failure};

/// Where names of users are. Other sources of names are not asked: a number needs none.
const USERS: &str = "/etc/passwd";

/// A user and its group.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct User {
    number: u32,
    group: u32,
}

/// A user that no process can be started as.
#[derive(Debug, thiserror::Error)]
pub(crate) enum UserError {
    #[error("no user of {USERS} is called {name}: name one that is there, or its number")]
    Unknown { name: String },
    #[error("cannot read {USERS}: {cause}; give the user by its number")]
    Unread {
        #[source]
        cause: io::Error,
    },
    #[error(
        "user {ours} cannot start a process as user {theirs}: start this command as root, or as that user"
    )]
    Denied { ours: u32, theirs: u32 },
    #[error("cannot learn the user of this process: {0}")]
    Ours(#[source] io::Error),
}

impl UserError {
    /// Returns the failure that the command ends with.
    pub(crate) fn failure(self) -> Failure {
        let exit = match &self {
            Self::Unknown { .. } => Exit::Usage,
            Self::Denied { .. } => Exit::Permission,
            Self::Unread { .. } | Self::Ours(_) => Exit::Os,
        };
        Failure::with(exit, self)
    }
}

impl User {
    /// Returns the user of that name or number, if this process may start one of it.
    pub(crate) fn named(name: &str) -> Result<Self, UserError> {
        let users = std::fs::read_to_string(USERS);
        let user = match (users, name.parse()) {
            (Ok(users), _) => Self::among(&users, name),
            (Err(_), Ok(number)) => Some(Self { number, group: number }),
            (Err(cause), Err(_)) => return Err(UserError::Unread { cause }),
        };
        let user = user.ok_or_else(|| UserError::Unknown { name: name.to_owned() })?;
        let ours = Privileges::of_this_thread().map_err(UserError::Ours)?.user;
        if ours != 0 && ours != user.number {
            return Err(UserError::Denied { ours, theirs: user.number });
        }
        Ok(user)
    }

    /// Finds a name or a number among lines of `/etc/passwd`. A number that is not there has the group of the
    /// same number.
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

    /// Has `command` run as this user, without the groups of this process.
    pub(crate) fn runs(self, command: &mut Command) {
        // A process that is its already may lack the right to, and needs nothing.
        if Privileges::of_this_thread().is_ok_and(|ours| ours.user != self.number) {
            command.uid(self.number).gid(self.group);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

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
