//! The most VMs of a server: [`Room`], counted in descriptors of the keeper and of its worker, so that one VM too many is
//! refused by name and no other notices.

/// The descriptors of a keeper or a worker itself: sockets, bells, sets, and clients of the control socket.
const OWN: u64 = 32;
/// The number of times that a process has each file of the image open.
const TIMES_OPEN: u64 = 3;
/// The descriptors of a VM in the keeper: the stream, the process, its userfaultfd, its log and its record.
const IN_KEEPER: u64 = 5;
/// The descriptors of a VM in the worker: the first three, two more of its userfaultfd, its log twice, and one to spare.
const IN_WORKER: u64 = 8;
/// The descriptors of a connection without a whole message: the stream, the process, and two that came.
const GREETING: u64 = 4;
/// The most connections without a whole message; further ones wait.
const GREETINGS: u64 = 64;

/// The most VMs and connections at once.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Room {
    /// The most descriptors of each process.
    pub(super) descriptors: u64,
    pub(super) machines: usize,
    pub(super) greetings: usize,
}

impl Room {
    /// Returns the room in processes with so many descriptors, for an image of so many files.
    pub(super) fn new(descriptors: u64, files: usize) -> Self {
        let own = OWN.saturating_add((files as u64).saturating_mul(TIMES_OPEN));
        let left = descriptors.saturating_sub(own);
        // At most a quarter of the rest.
        let greetings = (left / 4 / GREETING).clamp(1, GREETINGS);
        let in_keeper = left.saturating_sub(greetings * GREETING) / IN_KEEPER;
        let machines = in_keeper.min(left / IN_WORKER);
        let count = |count| usize::try_from(count).unwrap_or(usize::MAX);
        Self { descriptors, machines: count(machines), greetings: count(greetings) }
    }

    /// Returns the reason why one VM more is refused.
    pub(super) fn is_full(&self) -> String {
        let Self { descriptors, machines, .. } = self;
        format!(
            "at most {machines} VMs are served at once, as each process may have {descriptors} descriptors: raise the \
             hard limit (LimitNOFILE= of a unit, or `ulimit -Hn`)"
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn there_is_room_for_as_many_machines_as_the_descriptors_of_both_processes_suffice_for() {
        for (descriptors, files, machines, greetings) in [
            (0, 0, 0, 1),
            (64, 1, 3, 1),
            (1024, 1, 123, 61),
            (4096, 3, 506, 64),
            (20_000, 1, 2495, 64),
            (u64::MAX, 1, usize::MAX / 8 - 4, 64),
        ] {
            let room = Room::new(descriptors, files);
            assert_eq!((room.machines, room.greetings), (machines, greetings), "{descriptors}");
            let (machines, greetings) = (machines as u64, greetings as u64);
            let keeper = (machines.saturating_mul(5)).saturating_add(greetings * 4);
            assert!(machines == 0 || keeper.saturating_add(35) <= descriptors);
            assert!(machines == 0 || machines.saturating_mul(8).saturating_add(35) <= descriptors);
        }
    }
}
