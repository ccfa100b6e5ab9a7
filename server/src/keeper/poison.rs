//! The memory of refused VMs whose process the keeper cannot end: of a user that it may not kill, of a PID namespace that
//! it cannot see into, or by [`OnFailure::Poison`]. The keeper answers each of their faults with a page that raises
//! SIGBUS, so no VM waits for a server that has refused it. A guest whose access KVM emulates may see zeroes instead, as by
//! that policy, until its first other access.
//!
//! It goes by the faults alone, and parses no message. The memory is forgotten when its process has ended, and earlier
//! where a VM takes the place of the oldest one.

use uzone_os::uffd::{Answered, Event, EventBuffer, Fill, Install, Remote, UffdError};
use uzone_os::{Vaddr, probe};
use uzone_pages::ByteLen;

use super::Keeper;
use crate::machine::Machine;
use crate::options::OnFailure;
use crate::process;

/// The most faults that are answered before other clients.
const FAULTS: usize = 16;
/// The sizes of huge pages, which a fault has not: it has the address alone.
const HUGE: [u64; 2] = [2 << 20, 1 << 30];

/// The addition to the reason of a refusal.
const POISONED: &str = "; it has handed its memory over, and gets SIGBUS at its first page";
const WAITS: &str = "; it has handed its memory over, and waits for its first page: end it there";

impl Keeper {
    /// Ends a refused VM that has handed its memory over, as its faults would wait for ever. Returns whether its process
    /// was killed.
    pub(super) fn end_refused(
        &mut self,
        session: u64,
        machine: &mut Machine,
        reason: &mut String,
    ) -> bool {
        let Some(memory) = machine.take_memory() else { return false };
        if self.kills() && process::kill(&machine.peer).is_ok() {
            return true;
        }
        self.poison(session, memory, reason);
        false
    }

    /// Has each touched page of a refused VM raise SIGBUS from now on.
    pub(super) fn poison(
        &mut self,
        session: u64,
        memory: Result<Remote, UffdError>,
        reason: &mut String,
    ) {
        // A process that has ended waits for nothing, and could not be killed for that.
        if memory.as_ref().is_ok_and(Remote::is_gone) {
            return;
        }
        let memory = memory.ok().filter(|_| self.options.on_failure != OnFailure::Hold);
        let memory = memory.filter(|memory| self.set.add(memory, session).is_ok());
        let Some(memory) = memory else { return reason.push_str(WAITS) };
        self.make_room_for_memory(1);
        self.poisoned.insert(session, memory);
        reason.push_str(POISONED);
    }

    /// Forgets the oldest memory of refused VMs where the VMs and it would be too many with `more`.
    pub(super) fn make_room_for_memory(&mut self, more: usize) {
        let used = self.machines.values().filter(|one| one.has_descriptors()).count() + more;
        let most = self.room().machines.saturating_sub(used);
        while self.poisoned.len() > most
            && let Some((_, memory)) = self.poisoned.pop_first()
        {
            // It was waited for.
            let _ = self.set.remove(&memory);
        }
    }

    /// Forgets the memory of refused VMs that have ended.
    pub(super) fn forget_poisoned(&mut self) {
        let set = &self.set;
        self.poisoned.retain(|_, memory| {
            let is_gone = memory.is_gone();
            if is_gone {
                let _ = set.remove(&*memory);
            }
            !is_gone
        });
    }

    /// Poisons the pages that threads of a refused VM wait for. Returns whether there is such a VM.
    pub(super) fn answer_poisoned(&mut self, session: u64) -> bool {
        let Some(memory) = self.poisoned.get(&session) else { return false };
        let mut events = EventBuffer::new(FAULTS);
        // An error is of a process that has ended.
        let _ = memory.read(&mut events);
        for event in events {
            if let Event::PageFault(fault) = event {
                poison_page(memory, fault.address);
            }
        }
        true
    }
}

/// Poisons a page of any size.
fn poison_page(memory: &Remote, address: Vaddr) {
    for bytes in [probe::page_size().bytes()].into_iter().chain(HUGE) {
        let (start, len) = (Vaddr::new(address.get() & !(bytes - 1)), ByteLen::new(bytes));
        let answer = match memory.install(start, len, Fill::Poison, Install::default()) {
            Ok(Answered::All | Answered::Gone | Answered::NotRegistered) => return,
            // The page is there, or the layout changes: the thread asks again.
            Ok(_) => memory.wake(start, len),
            // It has pages of another size.
            Err(error) => Err(error),
        };
        if answer.is_ok() {
            return;
        }
    }
}
