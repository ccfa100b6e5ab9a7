//! The memory limit of a control group, of version 1 or 2, whichever has the controller here.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

use uzone_os::memory::{self, Limit};
use uzone_os::{Mapping, SystemRoot};
use uzone_pages::ByteLen;

use crate::{is_child, run_alone, skip, small_pages};

const LIMIT: ByteLen = ByteLen::mib(64);

/// Where the child finds the group that it is to join.
const GROUP: &str = "UZONE_OS_TEST_CGROUP";

/// A control group of our own with a limit on memory, removed when dropped.
///
/// It lies at the top of what is mounted and not below the group of this process: in version 2 a
/// group that has processes cannot have groups with limits.
struct Group {
    path: PathBuf,
}

impl Group {
    fn try_new() -> Result<Self, String> {
        let mounts = fs::read_to_string("/proc/self/mountinfo").map_err(|e| e.to_string())?;
        let (top, limit) = find_controller(&mounts)
            .ok_or("no hierarchy of control groups has the memory controller to give")?;
        let path = top.join(format!("uzone-os-test-{}", std::process::id()));
        let said = |error| format!("{}: {error}: run as root", path.display());
        fs::create_dir(&path).map_err(said)?;
        // Made before the limit is set, so that it is removed also when that fails.
        let group = Self { path: path.clone() };
        fs::write(path.join(limit), LIMIT.get().to_string()).map_err(said)?;
        Ok(group)
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        // A process that has just ended may be counted for a moment longer.
        for _ in 0..100 {
            match fs::remove_dir(&self.path) {
                Err(error) if error.kind() == std::io::ErrorKind::ResourceBusy => {
                    std::thread::sleep(Duration::from_millis(10));
                }
                Ok(()) => return,
                Err(error) => {
                    eprintln!("{} is left behind: {error}", self.path.display());
                    return;
                }
            }
        }
        eprintln!("{} is left behind: it is busy", self.path.display());
    }
}

/// Returns the top of the hierarchy in which groups can have memory limits, and the file for one.
fn find_controller(mounts: &str) -> Option<(PathBuf, &'static str)> {
    mounts.lines().find_map(|line| {
        let (left, right) = line.split_once(" - ")?;
        let point = PathBuf::from(left.split(' ').nth(4)?);
        match right.split(' ').next()? {
            "cgroup" if right.rsplit(' ').next()?.split(',').any(|name| name == "memory") => {
                Some((point, "memory.limit_in_bytes"))
            }
            "cgroup2" => {
                let given = fs::read_to_string(point.join("cgroup.subtree_control")).ok()?;
                let has_memory = given.split_whitespace().any(|name| name == "memory");
                has_memory.then_some((point, "memory.max"))
            }
            _ => None,
        }
    })
}

#[test]
fn the_limit_of_a_control_group_is_named_with_what_it_leaves() {
    let name = "cgroup::the_limit_of_a_control_group_is_named_with_what_it_leaves";
    if is_child(name) {
        return assert_limited_by(Path::new(&std::env::var_os(GROUP).unwrap()));
    }
    let group = match Group::try_new() {
        Ok(group) => group,
        Err(reason) => return skip("the_limit_of_a_control_group", &reason),
    };
    let path = group.path.clone();
    run_alone(name, &[(GROUP, path.as_os_str())]);
    drop(group);
    assert!(!path.exists(), "{} is left behind", path.display());
}

fn assert_limited_by(group: &Path) {
    let root = SystemRoot::host();
    assert_ne!(
        memory::available(&root).unwrap().limited_by,
        Limit::Cgroup { path: group.to_path_buf() },
        "not a member yet"
    );
    fs::write(group.join("cgroup.procs"), std::process::id().to_string()).unwrap();

    // What this process had before stays with its old group, so little is used here.
    let before = memory::available(&root).unwrap();
    assert_eq!(before.limited_by, Limit::Cgroup { path: group.to_path_buf() });
    assert!(before.bytes <= LIMIT && before.bytes > ByteLen::mib(56), "{before:?}");

    let mapping = Mapping::anonymous(ByteLen::mib(16), small_pages()).unwrap();
    mapping.populate(0..16 << 20).unwrap();
    let after = memory::available(&root).unwrap();
    assert_eq!(after.limited_by, before.limited_by);
    // The kernel's counter takes memory in lots for each CPU, so it is not exact.
    let taken = before.bytes.get() - after.bytes.get();
    assert!((14 << 20..=20 << 20).contains(&taken), "16 MiB took {taken} bytes");
}
