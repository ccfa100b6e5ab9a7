//! The memory limit of a control group, of version 1 or 2, whichever has the controller here.

use std::fs;
use std::path::Path;

use uzone_os::memory::{self, Limit};
use uzone_os::{Mapping, SystemRoot};
use uzone_pages::ByteLen;

use crate::needs::{Group, or_skip};
use crate::{is_child, run_alone, small_pages};

const LIMIT: ByteLen = ByteLen::mib(64);

/// The variable with the group that the child is to join.
const GROUP: &str = "UZONE_OS_TEST_CGROUP";

#[test]
fn the_limit_of_a_control_group_is_named_with_what_it_leaves() {
    let name = "cgroup::the_limit_of_a_control_group_is_named_with_what_it_leaves";
    if is_child(name) {
        return assert_limited_by(Path::new(&std::env::var_os(GROUP).unwrap()));
    }
    let Some(group) = or_skip("the_limit_of_a_control_group", Group::try_new(LIMIT)) else {
        return;
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

    // The memory that this process had before stays with its old group, so little is used here.
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
