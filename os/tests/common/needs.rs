//! The needs of a test: a case that cannot run is skipped by name, a pool of huge pages
//! is raised, and a control group has a limit on memory. The tests of `zone`, `fault` and `server` use
//! it as well.

#![allow(dead_code, reason = "each test program uses its part")]

use std::fmt::Display;
use std::fs;
use std::path::PathBuf;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use uzone_os::hugepages;
use uzone_pages::{ByteLen, PageSize};

/// Prints that a case cannot run, and why. Fails where `REQUIRE_ALL=1` is set.
pub(crate) fn skip(name: &str, reason: &str) {
    skip_unless_set("REQUIRE_ALL", name, reason);
}

/// The same for DAX, which few machines have: fails only where `REQUIRE_DAX=1` is set.
pub(crate) fn skip_dax(name: &str, reason: &str) {
    skip_unless_set("REQUIRE_DAX", name, reason);
}

pub(crate) fn is_dax_required() -> bool {
    is_set("REQUIRE_DAX")
}

fn skip_unless_set(variable: &str, name: &str, reason: &str) {
    assert!(!is_set(variable), "{name} was to run, and cannot: {reason}");
    eprintln!("skipped: {name}: {reason}");
}

fn is_set(variable: &str) -> bool {
    std::env::var_os(variable).is_some_and(|value| value == "1")
}

/// Returns a case's need, or prints that the case cannot run.
pub(crate) fn or_skip<T, E: Display>(name: &str, needed: Result<T, E>) -> Option<T> {
    needed.inspect_err(|reason| skip(name, &reason.to_string())).ok()
}

/// A pool of huge pages that was made larger, and is made smaller again when dropped. Needs root.
pub(crate) struct Pool {
    size: PageSize,
    pub(crate) added: u64,
    _alone: MutexGuard<'static, ()>,
}

/// Cases that change or count a pool take turns.
pub(crate) fn pool_turn() -> MutexGuard<'static, ()> {
    static TURN: Mutex<()> = Mutex::new(());
    TURN.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Pool {
    /// Adds `pages` to the pool of `size`, or prints that the case `name` cannot run.
    pub(crate) fn grow(name: &str, size: PageSize, pages: u64) -> Option<Self> {
        or_skip(name, Self::try_grow(size, pages))
    }

    pub(crate) fn try_grow(size: PageSize, pages: u64) -> Result<Self, String> {
        let alone = pool_turn();
        let path = hugepages::nr_path(size);
        let read = || -> Result<u64, String> {
            let text = fs::read_to_string(&path).map_err(|error| format!("{path}: {error}"))?;
            text.trim().parse().map_err(|error| format!("{path}: {error}"))
        };
        let before = read()?;
        fs::write(&path, (before + pages).to_string())
            .map_err(|error| format!("{path}: {error}: run as root"))?;
        // Made first, so that added pages are taken back also when they were not enough.
        let pool = Self { size, added: read()?.saturating_sub(before), _alone: alone };
        if pool.added < pages {
            return Err(format!("the host gave {} of {pages} huge pages", pool.added));
        }
        Ok(pool)
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        let path = hugepages::nr_path(self.size);
        // By difference: another process may have changed the pool meanwhile.
        let restored = fs::read_to_string(&path)
            .ok()
            .and_then(|text| text.trim().parse::<u64>().ok())
            .map(|now| fs::write(&path, now.saturating_sub(self.added).to_string()));
        if !matches!(restored, Some(Ok(()))) {
            eprintln!("{path} is larger by {} than before this test", self.added);
        }
    }
}

/// A control group of our own with a limit on memory, removed when dropped. Needs root.
///
/// It lies at the top of the mounted tree and not below the group of this process: in version 2 a
/// group that has processes cannot have groups with limits.
pub(crate) struct Group {
    pub(crate) path: PathBuf,
}

impl Group {
    pub(crate) fn try_new(limit: ByteLen) -> Result<Self, String> {
        let mounts = fs::read_to_string("/proc/self/mountinfo").map_err(|e| e.to_string())?;
        let (top, file) = find_controller(&mounts)
            .ok_or("no hierarchy of control groups has the memory controller to give")?;
        let path = top.join(format!("uzone-test-{}", std::process::id()));
        let said = |error| format!("{}: {error}: run as root", path.display());
        fs::create_dir(&path).map_err(said)?;
        // Made before the limit is set, so that it is removed also when that fails.
        let group = Self { path: path.clone() };
        fs::write(path.join(file), limit.get().to_string()).map_err(said)?;
        Ok(group)
    }

    /// The number of times that the kernel has killed a process here; `None` where it does not say.
    pub(crate) fn kills(&self) -> Option<u64> {
        ["memory.events", "memory.oom_control"].into_iter().find_map(|file| {
            let text = fs::read_to_string(self.path.join(file)).ok()?;
            text.lines().find_map(|line| line.strip_prefix("oom_kill ")?.parse().ok())
        })
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        // A process that has just ended may be counted for a moment longer.
        for _ in 0..500 {
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
