//! A virtual machine of one CPU whose guest walks its memory in ring 3 of long mode, and checks every word of it.
//!
//! Some hosts interpret the instructions of a guest in ring 0, and let ring 3 run. So the guest enters ring 3 at once and
//! stays there. It has no interrupts, and its ports are open to ring 3: it reports by `out`.
//!
//! The guest compares each page with one of a second memory, the oracle, which is not served. Every other page is written
//! to before it is read. At the end of both pages it inverts a word, so its writes are checked by the next walk.

use kvm_bindings::{kvm_regs, kvm_segment, kvm_userspace_memory_region};
use kvm_ioctls::{Kvm, VcpuExit, VcpuFd, VmFd};
use uzone_os::{Anonymous, Mapping};
use uzone_pages::ByteLen;

use crate::{PAGE, PAGES};

/// The guest address of the oracle; the memory is at 0.
const ORACLE: u64 = 16 << 20;
/// The guest addresses of the page tables, the segments and the code.
const SETUP: u64 = 32 << 20;
const SEGMENTS: u64 = SETUP + 3 * PAGE;
const CODE: u64 = SEGMENTS + 64;
/// Ring 0 leaves five words on it.
const STACK: u64 = SETUP + 4 * PAGE;
const PORT: u16 = 0xf4;

/// The program of the guest. `rbx` is the number of pages that it visits before it reports, and `rbp` the next one.
#[rustfmt::skip]
const GUEST: [u8; 87] = [
    // Ring 0: to ring 3.
    0x6a, 0x1b,                         // push 0x1b, data of ring 3
    0x6a, 0,                            // push 0, no stack
    0x68, 2, 0x30, 0, 0,                // push 0x3002, flags: ports are open to ring 3
    0x6a, 0x23,                         // push 0x23, code of ring 3
    0x48, 0x8d, 0x05, 3, 0, 0, 0,       // lea rax, [walk]
    0x50,                               // push rax
    0x48, 0xcf,                         // iretq
    // walk:
    0x48, 0x89, 0xee,                   // mov rsi, rbp
    0x48, 0x8d, 0xbd, 0, 0, 0, 1,       // lea rdi, [rbp + ORACLE]
    0xf7, 0xc5, 0, 0x10, 0, 0,          // test ebp, 0x1000
    0x74, 3,                            // jz compare
    0x80, 0x0e, 0,                      // or byte [rsi], 0
    // compare:
    0xb9, 0, 2, 0, 0,                   // mov ecx, 512
    0xf3, 0x48, 0xa7,                   // repe cmpsq
    0x75, 30,                           // jne wrong
    0x48, 0xf7, 0x56, 0xf8,             // not qword [rsi - 8]
    0x48, 0xf7, 0x57, 0xf8,             // not qword [rdi - 8]
    0x81, 0xc5, 0, 0x50, 2, 0,          // add ebp, 37 pages
    0x81, 0xe5, 0, 0xf0, 0x7f, 0,       // and ebp, the last page
    0xff, 0xcb,                         // dec ebx
    0x75, 0xc9,                         // jnz walk
    0x31, 0xc0,                         // xor eax, eax
    0xe6, 0xf4,                         // out PORT, al
    0xeb, 0xc3,                         // jmp walk
    // wrong:
    0xb0, 1,                            // mov al, 1
    0xe6, 0xf4,                         // out PORT, al
    0xf4,                               // hlt
];

const _: () = assert!(PAGES == 2048 && ORACLE == 1 << 24, "as the code has them");

pub(crate) struct Guest<'a> {
    cpu: VcpuFd,
    _machine: VmFd,
    _setup: Mapping,
    _memory: [&'a Mapping; 2],
}

impl<'a> Guest<'a> {
    /// Makes a guest of `memory` that runs from its first page on.
    pub(crate) fn new(memory: &'a Mapping, oracle: &'a Mapping) -> Self {
        let machine = Kvm::new().unwrap().create_vm().unwrap();
        // Only some hosts need it.
        let _ = machine.set_tss_address(0xfffb_d000);
        let setup = setup();
        for (slot, at, mapping) in [(0, 0, memory), (1, ORACLE, oracle), (2, SETUP, &setup)] {
            let region = kvm_userspace_memory_region {
                slot,
                flags: 0,
                guest_phys_addr: at,
                memory_size: mapping.len().get(),
                userspace_addr: mapping.addr().get() as u64,
            };
            // SAFETY: `self` keeps the mappings longer than the VM, and no slice of them is lent.
            unsafe { machine.set_user_memory_region(region) }.unwrap();
        }
        let cpu = machine.create_vcpu(0).unwrap();
        enter_long_mode(&cpu);
        Self { cpu, _machine: machine, _setup: setup, _memory: [memory, oracle] }
    }

    /// Has the guest visit so many pages more.
    ///
    /// # Errors
    /// The address at which the guest found a wrong word.
    pub(crate) fn walk(&mut self, pages: u64) -> Result<(), u64> {
        let mut registers = self.cpu.get_regs().unwrap();
        registers.rbx = pages;
        self.cpu.set_regs(&registers).unwrap();
        let is_right = match self.cpu.run().unwrap() {
            VcpuExit::IoOut(PORT, code) => code == [0],
            exit => panic!("the guest stops by {exit:?}"),
        };
        let segment = self.cpu.get_sregs().unwrap().cs;
        assert_eq!(segment.selector & 3, 3, "it does not run in ring 3");
        if is_right { Ok(()) } else { Err(self.cpu.get_regs().unwrap().rsi) }
    }
}

/// Returns page tables that map the first GiB to itself for ring 3, the segments, and the code.
fn setup() -> Mapping {
    let setup = Mapping::anonymous(ByteLen::new(4 * PAGE), Anonymous::default()).unwrap();
    let write = |at: u64, word: u64| setup.write_at(at - SETUP, &word.to_le_bytes()).unwrap();
    // Present, writable, of ring 3; and for the last level, 2 MiB large.
    write(SETUP, (SETUP + PAGE) | 7);
    write(SETUP + PAGE, (SETUP + 2 * PAGE) | 7);
    (0..512).for_each(|at| write(SETUP + 2 * PAGE + at * 8, at << 21 | 0x87));
    let segments = [
        0,
        0x00af_9b00_0000_ffff, // 0x08: code of ring 0
        0x00cf_9300_0000_ffff, // 0x10: data of ring 0
        0x00cf_f300_0000_ffff, // 0x18: data of ring 3
        0x00af_fb00_0000_ffff, // 0x20: code of ring 3
    ];
    (0..).zip(segments).for_each(|(at, segment)| write(SEGMENTS + at * 8, segment));
    setup.write_at(CODE - SETUP, &GUEST).unwrap();
    setup
}

/// Has the CPU begin in ring 0 of long mode.
fn enter_long_mode(cpu: &VcpuFd) {
    let mut special = cpu.get_sregs().unwrap();
    // Protection and paging; physical addresses of 64 bits; long mode, enabled and active.
    special.cr0 |= 1 | 1 << 31;
    special.cr3 = SETUP;
    special.cr4 |= 1 << 5;
    special.efer |= 1 << 8 | 1 << 10;
    (special.gdt.base, special.gdt.limit) = (SEGMENTS, 5 * 8 - 1);
    let data = kvm_segment {
        limit: u32::MAX,
        selector: 0x10,
        type_: 3,
        present: 1,
        db: 1,
        s: 1,
        g: 1,
        ..kvm_segment::default()
    };
    special.cs = kvm_segment { selector: 8, type_: 11, db: 0, l: 1, ..data };
    (special.ds, special.es, special.ss) = (data, data, data);
    cpu.set_sregs(&special).unwrap();
    let registers = kvm_regs { rip: CODE, rsp: STACK, rflags: 2, ..kvm_regs::default() };
    cpu.set_regs(&registers).unwrap();
}
