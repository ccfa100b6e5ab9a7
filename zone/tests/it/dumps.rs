//! The core dump of a process has the memory of regions that was populated, and not the addresses that were reserved.

use std::fs::{self, File};
use std::io;
use std::os::unix::fs::FileExt;
use std::process::{Command, Stdio};

use object::read::elf::ElfFile64;
use object::{Object, ObjectSegment, ReadCache};
use rustix::process::{Resource, Rlimit, setrlimit};
use uzone_pages::ByteLen;
use uzone_zone::{Huge, PopulateOptions, Region};

use crate::common::needs::skip;

const CHILD: &str = "UZONE_DUMP";
const GIB: u64 = 1 << 30;
const LEN: u64 = 64 * GIB;
/// The place of a populated page, in the middle of the region.
const POPULATED: u64 = 40 * GIB + 4096;
const BYTES: [u8; 16] = *b"a populated page";

/// Returns whether core dumps leave out the memory at an address, by its flags.
fn is_left_out(address: u64) -> bool {
    let smaps = fs::read_to_string("/proc/self/smaps").unwrap();
    let mut lines = smaps.lines().skip_while(|line| {
        let range = line.split(' ').next().and_then(|range| range.split_once('-'));
        let number = |digits| u64::from_str_radix(digits, 16).ok();
        let range = range.and_then(|(start, end)| Some(number(start)?..number(end)?));
        !range.is_some_and(|range| range.contains(&address))
    });
    let flags = lines.find(|line| line.starts_with("VmFlags:")).unwrap();
    flags.split(' ').any(|flag| flag == "dd")
}

fn populate(region: &Region, offset: u64) {
    let options = PopulateOptions::default().huge(Huge::Never);
    let report = region.populate(offset..offset + 1, &options).unwrap();
    assert!(report.is_whole());
}

#[test]
fn dumps_have_the_populated_steps_of_a_region_and_those_that_the_program_names() {
    let page = uzone_os::probe::page_size().bytes();
    for region in [
        Region::anonymous(ByteLen::new(LEN + page)).unwrap(),
        Region::memfd("dumped", ByteLen::new(LEN + page)).unwrap(),
    ] {
        let at = |offset: u64| is_left_out(region.addr().get() as u64 + offset);
        assert!(at(0) && at(POPULATED) && at(LEN));
        populate(&region, POPULATED);
        assert!(!at(POPULATED) && at(POPULATED - GIB) && at(POPULATED + GIB) && at(0) && at(LEN));
        populate(&region, LEN);
        assert!(!at(LEN));
        region.include_in_dumps(0..1).unwrap();
        assert!(!at(0) && at(page));
        // From then on, nothing is included by being populated.
        region.leave_out_of_dumps().unwrap();
        populate(&region, POPULATED);
        assert!(at(0) && at(POPULATED) && at(LEN));
    }
}

/// Ends this process by a signal that has its core dumped, or returns the reason why not.
fn crash(region: &Region) -> io::Result<()> {
    let all = Rlimit { current: Some(8 * GIB), maximum: Some(8 * GIB) };
    setrlimit(Resource::Core, all)?;
    populate(region, POPULATED);
    region.write_at(POPULATED, &BYTES).unwrap();
    println!("region: {}", region.addr().get());
    std::process::abort();
}

#[test]
fn a_crash_with_64_gib_reserved_and_a_page_populated_dumps_that_page_and_no_64_gib() {
    const NAME: &str =
        "dumps::a_crash_with_64_gib_reserved_and_a_page_populated_dumps_that_page_and_no_64_gib";
    if std::env::var_os(CHILD).is_some() {
        panic!("{:?}", crash(&Region::anonymous(ByteLen::new(LEN)).unwrap()));
    }
    let pattern = fs::read_to_string("/proc/sys/kernel/core_pattern").unwrap_or_default();
    if pattern.trim_end() != "core" {
        return skip(NAME, &format!("core dumps go to {pattern:?}"));
    }
    let folder = std::env::temp_dir().join(format!("uzone-dump-{}", std::process::id()));
    fs::create_dir_all(&folder).unwrap();
    let mut child = Command::new(std::env::current_exe().unwrap());
    child.args([NAME, "--exact", "--nocapture"]).env(CHILD, "1").current_dir(&folder);
    let output = child.stderr(Stdio::null()).output().unwrap();
    let text = String::from_utf8_lossy(&output.stdout);
    let core = fs::read_dir(&folder).unwrap().next();
    let Some(address) = text.lines().find_map(|line| line.split("region: ").nth(1)) else {
        return skip(NAME, &format!("the limit of core dumps cannot be raised: {text}"));
    };
    let address = address.parse::<u64>().unwrap() + POPULATED;
    let Some(core) = core else { return skip(NAME, "the kernel wrote no core dump") };
    let file = File::open(core.unwrap().path()).unwrap();
    assert!(file.metadata().unwrap().len() < 4 * GIB, "{:?}", file.metadata());
    let cache = ReadCache::new(file.try_clone().unwrap());
    let dump: ElfFile64<'_, object::Endianness, _> = ElfFile64::parse(&cache).unwrap();
    let holds = |start: u64, len: u64| start <= address && address < start + len;
    let segment = dump.segments().find(|one| holds(one.address(), one.file_range().1)).unwrap();
    let mut bytes = [0; BYTES.len()];
    let offset = segment.file_range().0 + (address - segment.address());
    file.read_exact_at(&mut bytes, offset).unwrap();
    assert_eq!(bytes, BYTES);
    fs::remove_dir_all(&folder).unwrap();
}
