//! A fresh memmap of `LinuxPage` holds, byte for byte, what Linux 6.12 on x86-64 was seen to write:
//! every value below was read back from a running kernel with emulated persistent memory.
#![cfg(not(loom))]

use uzone_pages::{
    Layout, LinuxPage, LinuxSeed, MemoryKind, Order, PageCount, Pfn, PfnRange, Tails, Template,
};

const PAGEMAP: u64 = 0xffff_8881_0abc_d000;
const MEMMAP: u64 = 0xffff_ea00_0400_0000;
const BASE: u64 = 0x10_0000;

fn template<const WORDS: usize>(
    order: u8,
    tails: Tails,
    seed: LinuxSeed,
) -> Template<LinuxPage<WORDS>> {
    template_of(MemoryKind::Generic, order, tails, seed)
}

fn template_of<const WORDS: usize>(
    kind: MemoryKind,
    order: u8,
    tails: Tails,
    seed: LinuxSeed,
) -> Template<LinuxPage<WORDS>> {
    let range = PfnRange::try_new(Pfn::new(BASE), PageCount::new(1 << 19)).expect("2 GiB of pages");
    let layout = Layout::try_new(range, Order::new(order), tails).expect("an aligned range");
    Template::new(layout, kind, seed, MEMMAP)
}

fn seed() -> LinuxSeed {
    LinuxSeed { pagemap_address: PAGEMAP, ..LinuxSeed::default() }
}

fn words(template: &Template<LinuxPage>, offset: u64) -> [u64; 7] {
    *template.fresh(Pfn::new(BASE + offset)).expect("a page of the range").words()
}

#[test]
fn a_descriptor_has_the_size_of_linuxs() {
    assert_eq!(Template::<LinuxPage>::DESCRIPTOR_BYTES, 64);
    assert_eq!(Template::<LinuxPage<6>>::DESCRIPTOR_BYTES, 56);
    assert_eq!(Template::<LinuxPage<11>>::DESCRIPTOR_BYTES, 96);
    assert_eq!(Template::<()>::DESCRIPTOR_BYTES, 8);
}

#[test]
fn a_base_page_is_linuxs_plain_page() {
    let plain = [0x0027_ffff_c000_2000, PAGEMAP, 0, 0, 0, 0, 0x0000_0001_ffff_ffff];
    for tails in [Tails::Derived, Tails::Stored] {
        let template = template::<7>(0, tails, seed());
        for offset in [0, 1, 511, 512, (1 << 19) - 1] {
            assert_eq!(words(&template, offset), plain);
        }
    }
}

#[test]
fn a_compound_page_is_linuxs_head_first_tail_and_tails() {
    for (order, first_tail_flags) in [(9, 0x0027_ffff_c000_2009), (18, 0x0027_ffff_c000_2012)] {
        let template = template::<7>(order, Tails::Stored, seed());
        for folio in [0, 1] {
            let head = folio << order;
            let head_plus_one = MEMMAP + head * 64 + 1;
            assert_eq!(
                words(&template, head),
                [0x0027_ffff_c000_2040, PAGEMAP, 0, 0, 0, 0, 0x0000_0001_ffff_ffff]
            );
            assert_eq!(
                words(&template, head + 1),
                [first_tail_flags, head_plus_one, u64::MAX, 0, 1 << order, 0, 0xffff_ffff]
            );
            for tail in [2, 3, 63, 64, 128, (1 << order) - 1] {
                assert_eq!(
                    words(&template, head + tail),
                    [
                        0x0027_ffff_c000_2000,
                        head_plus_one,
                        0,
                        0xdead_0000_0000_0400,
                        0,
                        0,
                        0xffff_ffff
                    ]
                );
            }
        }
    }
}

#[test]
fn a_derived_tail_answers_what_linux_stores() {
    let stored = template::<7>(9, Tails::Stored, seed());
    let derived = template::<7>(9, Tails::Derived, seed());
    for offset in 0..2048 {
        let mut from_arithmetic = words(&derived, offset);
        if offset % 512 != 0 {
            // The head lies elsewhere where tails take no room; nothing else differs.
            assert_eq!(from_arithmetic[1], MEMMAP + offset / 512 * 64 + 1);
            from_arithmetic[1] = words(&stored, offset)[1];
        }
        assert_eq!(from_arithmetic, words(&stored, offset));
    }
}

#[test]
fn first_references_follow_kind_and_release_and_tails_have_none() {
    for (release, dax_starts_free) in [("6.12", false), ("6.15", true)] {
        for kind in MemoryKind::ALL {
            let seed = LinuxSeed { dax_starts_free, ..seed() };
            let expected = match (kind, release) {
                (MemoryKind::Generic, _) | (MemoryKind::FsDax, "6.12") => 1,
                _ => 0,
            };
            let template = template_of::<7>(kind, 9, Tails::Stored, seed);
            assert_eq!(words(&template, 0)[6] >> 32, expected, "{kind} {release}");
            for tail in [1, 2, 511] {
                assert_eq!(words(&template, tail)[6], 0xffff_ffff);
            }
        }
    }
}

#[test]
fn the_section_and_the_address_are_those_of_the_page() {
    let seed = LinuxSeed { section: true, virtual_base: Some(0xffff_8880_0000_0000), ..seed() };
    let template = template::<8>(9, Tails::Stored, seed);
    for offset in [0, 1, 2, 32_767, 32_768, 65_535, 65_536] {
        let pfn = BASE + offset;
        let page = template.fresh(Pfn::new(pfn)).unwrap();
        assert_eq!(page.words()[0] >> 45, pfn >> 15);
        assert!(page.words()[0] & 1 << 13 != 0, "reserved");
        assert_eq!(page.words()[7], 0xffff_8880_0000_0000 + pfn * 4096);
    }
    // Sections are 64 folios of 2 MiB: the fields are linear up to the next one.
    assert_eq!(template.linear_until(5), 32_768);
    assert_eq!(template.linear_until(32_768), 65_536);
}

#[test]
fn the_order_fits_the_first_tail_for_every_folio_size() {
    for order in 1..=18 {
        let template = template::<7>(order, Tails::Stored, seed());
        let first_tail = words(&template, 1);
        assert_eq!(first_tail[0] & 0xff, u64::from(order));
        assert_eq!(first_tail[4], 1 << order);
    }
}
