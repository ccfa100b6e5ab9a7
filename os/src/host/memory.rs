//! The memory that this process may still take: [`available`].
//!
//! The answer is the smallest of the memory of the host, the rest of each control group above the process (version 1 and
//! 2), and the rest of the limits of the process. It names that limit. File pages that the
//! kernel can take back at once are available, in a group as on the host. It is a snapshot: other processes
//! take memory too, so a plan based on it can still fail.
//!
//! Source: proc_meminfo(5), "Control Group v2" and "Memory Resource Controller" in the Linux
//! administrator's guide, getrlimit(2).

use std::fmt;
use std::path::{Path, PathBuf};

use rustix::process::{Resource, getrlimit};
use uzone_pages::ByteLen;

use crate::host::root::{SysError, SystemRoot, if_there, kib_field};

/// Version 1 writes "no limit" as the largest multiple of a page that is a signed number; with
/// pages of 64 KiB that is this number.
const UNLIMITED: u64 = 0x7fff_ffff_ffff_0000;

/// The limit of the memory that this process may still take.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Limit {
    /// The host's own memory.
    System,
    /// A control group, by the directory of its files.
    Cgroup {
        /// The file with its limit, which can be raised there.
        path: PathBuf,
    },
    /// The address space limit of the process, `RLIMIT_AS`.
    AddressSpace,
    /// The limit on private writable memory, `RLIMIT_DATA`.
    Data,
}

impl fmt::Display for Limit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::System => f.write_str("the memory of the host"),
            Self::Cgroup { path } => write!(f, "the control group {}", path.display()),
            Self::AddressSpace => f.write_str("RLIMIT_AS"),
            Self::Data => f.write_str("RLIMIT_DATA"),
        }
    }
}

/// The memory that this process may still take.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Available {
    /// The bytes.
    pub bytes: ByteLen,
    /// The limit.
    pub limited_by: Limit,
}

/// Returns the host's memory: all of it, and the part that is available without swapping, by the kernel's estimate.
///
/// # Errors
/// [`SysError`] if `/proc/meminfo` cannot be read or understood.
pub fn system(root: &SystemRoot) -> Result<(ByteLen, ByteLen), SysError> {
    let wanted = "lines MemTotal and MemAvailable in kB";
    let field = |text: &str, name| kib_field(text, name).map(ByteLen::new);
    root.parse("proc/meminfo", wanted, |text| {
        Some((field(text, "MemTotal")?, field(text, "MemAvailable")?))
    })
}

/// Returns the memory that this process may still take, and its limit.
///
/// # Errors
/// [`SysError`] names the file that could not be read or understood. A control group that is not there, or
/// has no memory controller, does not limit.
pub fn available(root: &SystemRoot) -> Result<Available, SysError> {
    let limit = |of| getrlimit(of).current.map(ByteLen::new);
    available_under(root, limit(Resource::As), limit(Resource::Data))
}

/// As [`available`], for a process with these limits. `None` is unlimited.
fn available_under(
    root: &SystemRoot,
    address_space: Option<ByteLen>,
    data: Option<ByteLen>,
) -> Result<Available, SysError> {
    let mut least = Available { bytes: system(root)?.1, limited_by: Limit::System };
    let mut offer = |bytes: ByteLen, limited_by: Limit| {
        if bytes < least.bytes {
            least = Available { bytes, limited_by };
        }
    };
    for (path, left) in cgroups(root)? {
        offer(left, Limit::Cgroup { path });
    }
    if address_space.is_some() || data.is_some() {
        let wanted = "lines VmSize and VmData in kB";
        let (mapped, private) = root.parse("proc/self/status", wanted, |text| {
            Some((kib_field(text, "VmSize")?, kib_field(text, "VmData")?))
        })?;
        let rest = |limit: ByteLen, used| ByteLen::new(limit.get().saturating_sub(used));
        if let Some(limit) = address_space {
            offer(rest(limit, mapped), Limit::AddressSpace);
        }
        if let Some(limit) = data {
            offer(rest(limit, private), Limit::Data);
        }
    }
    Ok(least)
}

/// Returns the control groups with a limit on memory that this process is in, innermost first: the directory of each, and
/// the memory that it may still take.
fn cgroups(root: &SystemRoot) -> Result<Vec<(PathBuf, ByteLen)>, SysError> {
    let Some(memberships) = if_there(root.read("proc/self/cgroup"))? else {
        // A kernel without control groups.
        return Ok(Vec::new());
    };
    let mounts = root.read("proc/self/mountinfo")?;
    let mut groups = Vec::new();
    for (version, files) in [(Version::Two, FILES_2), (Version::One, FILES_1)] {
        let (Some(group), Some(mount)) =
            (parse_membership(&memberships, version), parse_mount(&mounts, version))
        else {
            continue;
        };
        for directory in ancestry(&mount, group) {
            groups.extend(read_group(root, &directory, &files)?);
        }
    }
    Ok(groups)
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Version {
    One,
    Two,
}

/// The files of a control group: its limit, its usage, and the line of `memory.stat` for the inactive
/// file pages of it and of the groups below.
struct Files {
    limit: &'static str,
    usage: &'static str,
    inactive_file: &'static str,
}

const FILES_1: Files = Files {
    limit: "memory.limit_in_bytes",
    usage: "memory.usage_in_bytes",
    inactive_file: "total_inactive_file",
};

const FILES_2: Files =
    Files { limit: "memory.max", usage: "memory.current", inactive_file: "inactive_file" };

/// Returns the group of the memory controller of a text such as `4:memory:/a/b` or `0::/a/b`.
fn parse_membership(text: &str, version: Version) -> Option<&str> {
    text.lines().find_map(|line| {
        let mut fields = line.splitn(3, ':');
        let (number, controllers, group) = (fields.next()?, fields.next()?, fields.next()?);
        let is_wanted = match version {
            Version::One => controllers.split(',').any(|name| name == "memory"),
            Version::Two => number == "0" && controllers.is_empty(),
        };
        is_wanted.then_some(group)
    })
}

/// The mount point of a hierarchy of control groups, and the group that shows up there.
#[derive(Debug, PartialEq, Eq)]
struct Mount {
    group: String,
    point: PathBuf,
}

/// Returns the mount of the hierarchy with the memory controller, from a text such as
/// `35 31 0:32 / /sys/fs/cgroup/memory rw,relatime - cgroup cgroup rw,memory`.
fn parse_mount(text: &str, version: Version) -> Option<Mount> {
    text.lines().find_map(|line| {
        let (left, right) = line.split_once(" - ")?;
        let mut left = left.split(' ').skip(3);
        let (group, point) = (left.next()?, left.next()?);
        let mut right = right.split(' ');
        let (kind, _, options) = (right.next()?, right.next()?, right.next()?);
        let is_wanted = match version {
            Version::One => kind == "cgroup" && options.split(',').any(|name| name == "memory"),
            Version::Two => kind == "cgroup2",
        };
        is_wanted.then(|| Mount { group: unescape(group), point: unescape(point).into() })
    })
}

/// Returns a field of mountinfo with its octal escapes resolved: `\040` is a space.
fn unescape(field: &str) -> String {
    let mut plain = String::with_capacity(field.len());
    let mut rest = field;
    while let Some((before, after)) = rest.split_once('\\') {
        plain.push_str(before);
        let code = after.get(..3).and_then(|digits| u8::from_str_radix(digits, 8).ok());
        if let Some(code) = code.filter(u8::is_ascii) {
            plain.push(char::from(code));
            rest = &after[3..];
        } else {
            plain.push('\\');
            rest = after;
        }
    }
    plain.push_str(rest);
    plain
}

/// Returns the directories of a group and of those above it, as far as the mount shows them.
///
/// A group that the mount does not show (its path has `..`, or lies elsewhere) leaves the mount's
/// own.
fn ancestry(mount: &Mount, group: &str) -> Vec<PathBuf> {
    let below = Path::new(group)
        .strip_prefix(&mount.group)
        .ok()
        .filter(|below| !below.components().any(|part| part.as_os_str() == ".."))
        .unwrap_or_else(|| Path::new(""));
    mount
        .point
        .join(below)
        .ancestors()
        .take_while(|directory| directory.starts_with(&mount.point))
        .map(Path::to_path_buf)
        .collect()
}

/// Returns the limit of a text such as `max` or `1073741824`: `Some(None)` is none.
fn parse_limit(text: &str) -> Option<Option<u64>> {
    match text.trim() {
        "max" => Some(None),
        number => number.parse().ok().map(|limit| Some(limit).filter(|&limit| limit < UNLIMITED)),
    }
}

/// Returns the number of a line such as `inactive_file 4096`.
fn parse_stat(text: &str, name: &str) -> Option<u64> {
    text.lines().find_map(|line| {
        let (field, number) = line.split_once(' ')?;
        (field == name).then(|| number.trim().parse().ok())?
    })
}

/// Returns the directory of a group, and the memory that it may still take: `limit - (usage - inactive_file)`, and at
/// least nothing and at most the limit, because the numbers are not read at one moment. File pages that
/// were not used lately count as usage, and the kernel takes them back before it refuses anything; container
/// tools leave them out for the same reason.
fn read_group(
    root: &SystemRoot,
    directory: &Path,
    files: &Files,
) -> Result<Option<(PathBuf, ByteLen)>, SysError> {
    let limit = root.parse(directory.join(files.limit), "max or a number", parse_limit);
    // The root of a hierarchy has no limit, and so has a group without the controller.
    let Some(limit) = if_there(limit)?.flatten() else {
        return Ok(None);
    };
    let usage = root.number(directory.join(files.usage))?;
    let inactive_file = match root.read(directory.join("memory.stat")) {
        Ok(text) => parse_stat(&text, files.inactive_file).unwrap_or(0),
        // Without it, all usage counts: the answer is too small rather than too large.
        Err(_) => 0,
    };
    let left = limit.saturating_sub(usage.saturating_sub(inactive_file));
    Ok(Some((root.path(directory), ByteLen::new(left))))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::host::root::MadeUp;

    const MEMINFO: (&str, &str) =
        ("proc/meminfo", "MemTotal: 8388608 kB\nMemFree: 1 kB\nMemAvailable: 4194304 kB\n");
    const MOUNT_1: &str = "31 23 0:28 / /sys/fs/cgroup rw - tmpfs tmpfs rw\n35 31 0:32 / /sys/fs/cgroup/memory rw,relatime - cgroup cgroup rw,memory\n";
    const MOUNT_2: &str = "41 31 0:38 / /sys/fs/cgroup rw,relatime shared:4 - cgroup2 cgroup2 rw\n";

    #[track_caller]
    fn assert_available(tree: &MadeUp, bytes: ByteLen, limited_by: Limit) {
        let expected = Available { bytes, limited_by };
        assert_eq!(available_under(&tree.root(), None, None).unwrap(), expected);
    }

    #[test]
    fn a_process_without_limits_has_what_the_host_has() {
        let tree = MadeUp::new(&[MEMINFO]);
        assert_available(&tree, ByteLen::gib(4), Limit::System);
    }

    #[test]
    fn the_tightest_group_above_the_process_limits_it() {
        let tree = MadeUp::new(&[
            MEMINFO,
            ("proc/self/cgroup", "0::/a/b\n"),
            ("proc/self/mountinfo", MOUNT_2),
            ("sys/fs/cgroup/memory.stat", "inactive_file 1\n"),
            ("sys/fs/cgroup/a/memory.max", "2147483648\n"),
            ("sys/fs/cgroup/a/memory.current", "1610612736\n"),
            ("sys/fs/cgroup/a/memory.stat", "anon 1\ninactive_file 536870912\n"),
            ("sys/fs/cgroup/a/b/memory.max", "max\n"),
            ("sys/fs/cgroup/a/b/memory.current", "0\n"),
        ]);
        let path = tree.root().path("sys/fs/cgroup/a");
        assert_available(&tree, ByteLen::gib(1), Limit::Cgroup { path });
    }

    #[test]
    fn inactive_file_pages_of_a_group_are_available() {
        const GIB: u64 = 1 << 30;
        // Usage and memory.stat of each version, and the rest of a limit of 3 GiB.
        for (usage, stat_1, stat_2, left) in [
            (GIB, "total_inactive_file 0\n", "inactive_file 0\n", 2 * GIB),
            (
                2 * GIB,
                "inactive_file 5\ntotal_inactive_file 1610612736\n",
                "anon 536870912\nfile 1610612736\ninactive_file 1610612736\n",
                5 * GIB / 2,
            ),
            // Active pages, and those of a group alone in version 1, are no such thing.
            (
                GIB,
                "inactive_file 4096\ntotal_active_file 4096\n",
                "active_file 4096\nworkingset_inactive_file 4096\n",
                2 * GIB,
            ),
            (GIB, "nonsense\n", "inactive_file many\n", 2 * GIB),
            (3 * GIB, "total_inactive_file 4096\n", "inactive_file 4096\n", 4096),
            // Read at different moments: usage shrank, or a limit was set below it.
            (4096, "total_inactive_file 8192\n", "inactive_file 8192\n", 3 * GIB),
            (5 * GIB, "total_inactive_file 4096\n", "inactive_file 4096\n", 0),
        ] {
            let usage = usage.to_string();
            let group_1 = MadeUp::new(&[
                MEMINFO,
                ("proc/self/cgroup", "4:memory:/g\n"),
                ("proc/self/mountinfo", MOUNT_1),
                ("sys/fs/cgroup/memory/g/memory.limit_in_bytes", "3221225472\n"),
                ("sys/fs/cgroup/memory/g/memory.usage_in_bytes", &usage),
                ("sys/fs/cgroup/memory/g/memory.stat", stat_1),
            ]);
            let group_2 = MadeUp::new(&[
                MEMINFO,
                ("proc/self/cgroup", "0::/g\n"),
                ("proc/self/mountinfo", MOUNT_2),
                ("sys/fs/cgroup/g/memory.max", "3221225472\n"),
                ("sys/fs/cgroup/g/memory.current", &usage),
                ("sys/fs/cgroup/g/memory.stat", stat_2),
            ]);
            for (tree, path, stat) in [
                (&group_1, "sys/fs/cgroup/memory/g", stat_1),
                (&group_2, "sys/fs/cgroup/g", stat_2),
            ] {
                let path = tree.root().path(path);
                assert_eq!(
                    available_under(&tree.root(), None, None).unwrap(),
                    Available { bytes: ByteLen::new(left), limited_by: Limit::Cgroup { path } },
                    "{usage} used, {stat:?}"
                );
            }
        }
    }

    #[test]
    fn a_group_of_version_one_limits_and_its_largest_number_does_not() {
        let tree = MadeUp::new(&[
            MEMINFO,
            ("proc/self/cgroup", "5:devices:/x\n4:cpu,memory:/g\n0::/\n"),
            ("proc/self/mountinfo", MOUNT_1),
            ("sys/fs/cgroup/memory/memory.limit_in_bytes", "9223372036854771712\n"),
            ("sys/fs/cgroup/memory/memory.usage_in_bytes", "5\n"),
            ("sys/fs/cgroup/memory/g/memory.limit_in_bytes", "1048576\n"),
            ("sys/fs/cgroup/memory/g/memory.usage_in_bytes", "2097152\n"),
        ]);
        let path = tree.root().path("sys/fs/cgroup/memory/g");
        assert_available(&tree, ByteLen::ZERO, Limit::Cgroup { path });
        assert_eq!(cgroups(&tree.root()).unwrap().len(), 1);
    }

    #[test]
    fn limits_of_the_process_count_what_it_has_already() {
        let tree =
            MadeUp::new(&[MEMINFO, ("proc/self/status", "VmSize: 1024 kB\nVmData: 512 kB\n")]);
        let address_space = Some(ByteLen::mib(3));
        for (data, bytes, limited_by) in [
            (None, ByteLen::mib(2), Limit::AddressSpace),
            (Some(ByteLen::mib(1)), ByteLen::kib(512), Limit::Data),
        ] {
            let available = available_under(&tree.root(), address_space, data).unwrap();
            assert_eq!(available, Available { bytes, limited_by });
        }
    }

    #[test]
    fn the_directories_of_a_group_end_at_its_mount() {
        let mount = |group: &str, point: &str| Mount { group: group.into(), point: point.into() };
        for (mount, group, directories) in [
            (mount("/", "/m"), "/a/b", vec!["/m/a/b", "/m/a", "/m"]),
            (mount("/", "/m"), "/", vec!["/m"]),
            (mount("/docker/x", "/m"), "/docker/x", vec!["/m"]),
            (mount("/docker/x", "/m"), "/docker/x/y", vec!["/m/y", "/m"]),
            (mount("/docker/x", "/m"), "/elsewhere", vec!["/m"]),
            (mount("/", "/m"), "/../sibling", vec!["/m"]),
        ] {
            let expected: Vec<PathBuf> = directories.iter().map(PathBuf::from).collect();
            assert_eq!(ancestry(&mount, group), expected, "{mount:?} {group}");
        }
    }

    #[test]
    fn the_texts_of_the_kernel_are_read_as_documented() {
        assert_eq!(parse_limit("max\n"), Some(None));
        assert_eq!(parse_limit("4096\n"), Some(Some(4096)));
        assert_eq!(parse_limit("9223372036854771712"), Some(None));
        assert_eq!(parse_limit("-1"), None);
        assert_eq!(parse_stat("inactive_file_x 1\ninactive_file 7\n", "inactive_file"), Some(7));
        assert_eq!(parse_stat("inactive_file\n", "inactive_file"), None);
        assert_eq!(unescape("/a\\040b\\134c\\9"), "/a b\\c\\9");
        assert_eq!(unescape("\\"), "\\");
        assert_eq!(unescape("\\\u{e4}\u{f6}"), "\\\u{e4}\u{f6}");
        assert_eq!(parse_mount("nonsense\n", Version::One), None);
        assert_eq!(parse_membership("0::/x:y\n", Version::Two), Some("/x:y"));
    }
}
