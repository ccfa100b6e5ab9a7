//! Images with 10,000 injected faults: the bytes are right, or the error names the image. Images with a
//! forged index, whose hashes match: no panic, and never the required root hash.
//!
//! The seeds are fixed, so a fault has the same number in every run with the same `fastrand`, and a failure prints it. Half of the
//! faults change the bytes of the file; the other half are in the source, which the tests write themselves.
#![allow(
    clippy::unwrap_used,
    clippy::cast_possible_truncation,
    reason = "helpers of tests fail by panicking, as tests do"
)]

mod common;
mod targets;

use std::collections::{BTreeMap, HashSet};
use std::io;
use std::sync::{Arc, Condvar, Mutex};

use common::{Directory, Named, random_memory};
use fastrand::Rng;
use uzone_pages::{ByteLen, ErrorKind};
use uzone_snapshot::{Codec, FrameCache, Image, OpenOptions, Packer, Root, SnapshotError, Source};

const FAULTS: u64 = 10_000;
const FORGERIES: u64 = 2_000;
/// The name of the source of these tests, in errors.
const NAME: &str = "the source of the test";
const FRAME: usize = 8 << 10;
/// The bytes before the index: the header of its skippable frame.
const BEFORE_INDEX: usize = 8;

/// An image as the bytes of its file, and those of its parent.
struct Sample {
    label: &'static str,
    raw: Vec<u8>,
    file: Arc<Vec<u8>>,
    parent: Option<Arc<Vec<u8>>>,
    root: Root,
}

/// Returns one image of each codec, and one with a parent.
fn samples(test: &str) -> Vec<Sample> {
    let directory = Directory::new(test);
    let pack = |name: &str, codec, raw: &[u8], parent: Option<&Image>| {
        let packer = Packer::default().codec(codec).frame(ByteLen::new(FRAME as u64)).threads(1);
        let path = directory.file(name);
        let packed = packer
            .working_set(vec![3, 1, 4, 1, 5])
            .pack(&mut &*raw, &path, parent, &|_| true)
            .unwrap();
        (Arc::new(std::fs::read(&path).unwrap()), packed.root)
    };
    let mut samples = Vec::new();
    for codec in [Codec::None, Codec::Zstd, Codec::Lz4] {
        let raw = random_memory(26, 1);
        let (file, root) = pack(codec.name(), codec, &raw, None);
        samples.push(Sample { label: codec.name(), raw, file, parent: None, root });
    }
    let parent = Image::open(directory.file("lz4"), &OpenOptions::default()).unwrap();
    let mut raw = random_memory(26, 1);
    for at in [5, 60_000, 100_000] {
        raw[at] ^= 1;
    }
    let (file, root) = pack("child", Codec::Zstd, &raw, Some(&parent));
    let parent = Some(samples[2].file.clone());
    samples.push(Sample { label: "child", raw, file, parent, root });
    samples
}

/// Returns where the stored frames of an image end.
fn data_len(file: &[u8]) -> usize {
    file.windows(8).rposition(|window| window == b"UZONEIMG").unwrap() - BEFORE_INDEX
}

/// How a source errs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Conduct {
    Sound,
    /// After so many reads it ends at `len`, whatever length it names: a file that was cut while it was open.
    Short {
        len: usize,
        after: u64,
    },
    /// It is not ready until the gate opens.
    Slow,
    /// Every so many reads fail.
    Flaky(u64),
    /// The first read of a place has a wrong bit.
    CorruptOnce,
    /// Each read has a wrong bit, now this one, now another.
    CorruptAlways,
}

/// A kind of damage to an image.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Fault {
    Flip { bits: usize },
    Truncate { len: usize },
    Swap { one: usize, other: usize, len: usize },
    Clear { start: usize, len: usize },
    Source(Conduct),
}

impl Fault {
    fn label(self) -> &'static str {
        match self {
            Self::Flip { .. } => "flipped bits",
            Self::Truncate { .. } => "truncated",
            Self::Swap { .. } => "swapped ranges",
            Self::Clear { .. } => "cleared range",
            Self::Source(Conduct::Sound) => "sound source",
            Self::Source(Conduct::Short { .. }) => "short source",
            Self::Source(Conduct::Slow) => "slow source",
            Self::Source(Conduct::Flaky(_)) => "reads that fail",
            Self::Source(Conduct::CorruptOnce) => "corrupt once",
            Self::Source(Conduct::CorruptAlways) => "corrupt always",
        }
    }

    /// Returns the fault of a number, for a file of `len` bytes.
    fn choose(number: u64, len: usize, random: &mut Rng) -> Self {
        match number % 10 {
            0 | 1 => Self::Flip { bits: 1 + random.usize(..6) },
            2 => Self::Truncate { len: random.usize(..len) },
            3 => {
                let half = len / 2;
                let one = random.usize(..half);
                let count = 1 + random.usize(..(half - one).min(2 * FRAME));
                Self::Swap { one, other: half + random.usize(..half - count + 1), len: count }
            }
            4 => {
                let start = random.usize(..len);
                Self::Clear { start, len: 1 + random.usize(..(len - start).min(2 * FRAME)) }
            }
            5 => Self::Source(Conduct::Short { len: random.usize(..len), after: random.u64(..24) }),
            6 => Self::Source(Conduct::Slow),
            7 => Self::Source(Conduct::Flaky(3 + random.u64(..30))),
            8 => Self::Source(Conduct::CorruptOnce),
            _ => Self::Source(Conduct::CorruptAlways),
        }
    }

    /// Changes the bytes of a file, or nothing if the fault is in its source.
    fn apply(self, file: &mut Vec<u8>, random: &mut Rng) {
        match self {
            Self::Flip { bits } => {
                // The index is small, and is hit every second time.
                let from = if random.bool() { 0 } else { data_len(file) };
                for _ in 0..bits {
                    let at = from + random.usize(..file.len() - from);
                    file[at] ^= 1 << random.usize(..8);
                }
            }
            Self::Truncate { len } => file.truncate(len),
            Self::Swap { one, other, len } => {
                let (front, behind) = file.split_at_mut(other);
                front[one..one + len].swap_with_slice(&mut behind[..len]);
            }
            Self::Clear { start, len } => file[start..start + len].fill(0),
            Self::Source(_) => {}
        }
    }
}

/// A place where reads wait, and which counts those that do.
#[derive(Default)]
struct Gate {
    state: Mutex<(bool, u32)>,
    moved: Condvar,
}

impl Gate {
    fn pass(&self) {
        let mut state = self.state.lock().unwrap();
        state.1 += 1;
        self.moved.notify_all();
        drop(self.moved.wait_while(state, |(is_open, _)| !*is_open).unwrap());
    }

    fn open_when_a_read_waits(&self) {
        let state = self.state.lock().unwrap();
        let mut state = self.moved.wait_while(state, |(_, waiting)| *waiting == 0).unwrap();
        state.0 = true;
        self.moved.notify_all();
    }
}

/// A source that errs as it is asked to.
struct Faulty {
    file: Arc<Vec<u8>>,
    /// The parent, and how reads of that one err.
    parent: Option<(Arc<Vec<u8>>, Conduct)>,
    conduct: Conduct,
    data_len: usize,
    gate: Arc<Gate>,
    state: Mutex<State>,
}

struct State {
    random: Rng,
    reads: u64,
    seen: HashSet<u64>,
}

impl Faulty {
    fn new(file: Arc<Vec<u8>>, data_len: usize, conduct: Conduct, random: Rng) -> Self {
        let state = Mutex::new(State { random, reads: 0, seen: HashSet::new() });
        Self { file, parent: None, conduct, data_len, gate: Arc::default(), state }
    }
}

impl Source for Faulty {
    fn name(&self) -> String {
        NAME.to_owned()
    }

    fn byte_len(&self) -> u64 {
        self.file.len() as u64
    }

    fn read_at(&self, offset: u64, out: &mut [u8]) -> io::Result<()> {
        let start = usize::try_from(offset).unwrap();
        let end = start + out.len();
        let is_frame = end <= self.data_len;
        if self.conduct == Conduct::Slow && is_frame {
            self.gate.pass();
        }
        out.copy_from_slice(self.file.get(start..end).ok_or(io::ErrorKind::UnexpectedEof)?);
        let mut state = self.state.lock().unwrap();
        state.reads += 1;
        match self.conduct {
            Conduct::Short { len, after } if state.reads > after && end > len => {
                out.fill(0x5a);
                return Err(io::ErrorKind::UnexpectedEof.into());
            }
            Conduct::Flaky(every) if state.reads.is_multiple_of(every) => {
                // Bytes that were read before it failed have no meaning.
                out.fill(0x5a);
                let kinds = [
                    io::ErrorKind::TimedOut,
                    io::ErrorKind::ConnectionReset,
                    io::ErrorKind::Interrupted,
                ];
                return Err(kinds[state.random.usize(..3)].into());
            }
            Conduct::CorruptOnce if !is_frame || !state.seen.insert(offset) => {}
            Conduct::CorruptAlways if !is_frame => {}
            Conduct::CorruptOnce | Conduct::CorruptAlways => {
                let at = state.random.usize(..out.len());
                out[at] ^= 1 << state.random.usize(..8);
            }
            _ => {}
        }
        Ok(())
    }

    fn neighbour(&self, _name: &str) -> io::Result<Box<dyn Source>> {
        let (file, conduct) = self.parent.clone().ok_or(io::ErrorKind::NotFound)?;
        let random = self.state.lock().unwrap().random.clone();
        let data_len = if conduct == Conduct::Sound { 0 } else { data_len(&file) };
        let gate = self.gate.clone();
        Ok(Box::new(Self { gate, ..Self::new(file, data_len, conduct, random) }))
    }
}

/// Returns the name of the kind of an error, which must be one of three and name its source.
fn kind(error: &SnapshotError) -> &'static str {
    assert!(error.to_string().contains(NAME), "{error}");
    match error.kind() {
        ErrorKind::InvalidData => "InvalidData",
        ErrorKind::Io => "Io",
        ErrorKind::NotSupported => "NotSupported",
        other => panic!("{other:?}: {error}"),
    }
}

/// Reads each frame, and returns the kinds of the errors; the bytes must be those of `raw`.
fn read_frames(
    image: &Image,
    raw: &[u8],
    frames: impl Iterator<Item = usize>,
) -> Vec<&'static str> {
    let mut errors = Vec::new();
    for start in frames.map(|frame| frame * FRAME) {
        let expected = &raw[start..raw.len().min(start + FRAME)];
        let mut read = vec![0xaa; expected.len()];
        match image.read_at(start as u64, &mut read) {
            Ok(()) => assert!(read == expected, "other bytes at {start}"),
            Err(error) => errors.push(kind(&error)),
        }
    }
    errors
}

/// Opens an image whose source errs, and reads all of it. Returns the kind of the first error.
fn inject(sample: &Sample, fault: Fault, random: &mut Rng) -> Option<&'static str> {
    // The fault is in the parent every second time.
    let in_parent = sample.parent.is_some() && random.bool();
    let conduct = if let Fault::Source(conduct) = fault { conduct } else { Conduct::Sound };
    let harmed = |file: &Arc<Vec<u8>>, random: &mut Rng| match fault {
        Fault::Source(_) => file.clone(),
        _ => {
            let mut bytes = (**file).clone();
            fault.apply(&mut bytes, random);
            Arc::new(bytes)
        }
    };
    let mut source = if in_parent {
        let mut source = Faulty::new(sample.file.clone(), 0, Conduct::Sound, random.clone());
        source.parent = sample.parent.as_ref().map(|file| (harmed(file, random), conduct));
        source
    } else {
        let file = harmed(&sample.file, random);
        let mut source = Faulty::new(file, data_len(&sample.file), conduct, random.clone());
        source.parent = sample.parent.clone().map(|file| (file, Conduct::Sound));
        source
    };
    let gate = Arc::new(Gate::default());
    source.gate = gate.clone();
    // A cache of nothing, of two frames, and of all of them.
    let cache = FrameCache::new([0, 2 * FRAME as u64, 1 << 20][random.usize(..3)]);
    let mut options = OpenOptions::default().cache(cache);
    if random.bool() {
        options = options.root(sample.root);
    }
    let image = match Image::from_source(Box::new(source), &options) {
        Ok(image) => image,
        Err(error) => return Some(kind(&error)),
    };
    assert_eq!((image.root(), image.byte_len()), (sample.root, sample.raw.len() as u64));
    read_all(&image, sample, fault, &gate, random)
}

/// Reads all of an image that was opened in spite of its fault.
fn read_all(
    image: &Image,
    sample: &Sample,
    fault: Fault,
    gate: &Gate,
    random: &mut Rng,
) -> Option<&'static str> {
    let raw = &sample.raw;
    let frames = raw.len().div_ceil(FRAME);
    if fault == Fault::Source(Conduct::Slow) {
        std::thread::scope(|scope| {
            scope.spawn(|| assert!(read_frames(image, raw, 0..frames).is_empty()));
            scope.spawn(|| assert!(read_frames(image, raw, (0..frames).rev()).is_empty()));
            gate.open_when_a_read_waits();
        });
    }
    let errors = read_frames(image, raw, 0..frames);
    match fault {
        Fault::Truncate { .. } => panic!("an image that is cut was opened"),
        Fault::Source(Conduct::Slow | Conduct::CorruptOnce | Conduct::Sound) => {
            assert!(errors.is_empty(), "{errors:?}");
        }
        Fault::Source(Conduct::CorruptAlways) => {
            assert!(errors.len() > 2 && errors.iter().all(|kind| *kind == "InvalidData"));
        }
        // An error is not remembered: a read that fails now and then succeeds in the end.
        Fault::Source(Conduct::Flaky(_)) => {
            for frame in 0..frames {
                let again = || read_frames(image, raw, frame..=frame).is_empty();
                assert!((0..20).any(|_| again()), "frame {frame} is never read");
            }
        }
        _ => {}
    }
    // A range that starts and ends anywhere.
    let start = random.usize(..raw.len());
    let mut read = vec![0xaa; 1 + random.usize(..raw.len() - start)];
    match image.read_at(start as u64, &mut read) {
        Ok(()) => assert!(read == raw[start..start + read.len()]),
        Err(error) => drop(kind(&error)),
    }
    match image.verify(1, random.bool(), &|_| ()) {
        // The parent is verified on its own.
        Ok(_) => assert!(errors.is_empty() || sample.parent.is_some() || is_in_source(fault)),
        Err(error) => drop(kind(&error)),
    }
    errors.first().copied()
}

fn is_in_source(fault: Fault) -> bool {
    matches!(fault, Fault::Source(_))
}

#[test]
fn what_is_read_from_a_damaged_image_is_right_or_an_error() {
    let samples = samples("damage");
    let mut outcomes: BTreeMap<(&str, &str), u32> = BTreeMap::new();
    for number in 0..FAULTS {
        let mut random = Rng::with_seed(number);
        let sample = &samples[random.usize(..samples.len())];
        let shortest =
            sample.parent.iter().map(|file| file.len()).fold(sample.file.len(), usize::min);
        let fault = Fault::choose(number, shortest, &mut random);
        let _named = Named(format!("fault {number} of the image {}: {fault:?}", sample.label));
        let outcome = inject(sample, fault, &mut random).unwrap_or("right");
        *outcomes.entry((fault.label(), outcome)).or_default() += 1;
    }
    let total = |wanted: &str| -> u32 {
        outcomes.iter().filter(|((_, outcome), _)| *outcome == wanted).map(|(_, count)| count).sum()
    };
    for ((fault, outcome), count) in &outcomes {
        println!("{fault:<16} {outcome:<12} {count:>5}");
    }
    let totals =
        ["right", "InvalidData", "Io", "NotSupported"].map(|wanted| (wanted, total(wanted)));
    println!("{totals:?}");
    assert_eq!(u64::from(totals.iter().map(|(_, count)| count).sum::<u32>()), FAULTS);
    assert!(totals.iter().all(|(_, count)| *count > 0), "each outcome occurs: {totals:?}");
}

/// Changes an index in up to three places, and gives it the root hash that it should have then.
fn forge(index: &mut [u8], random: &mut Rng) {
    for _ in 0..=random.usize(..3) {
        if random.bool() {
            let at = random.usize(..index.len());
            index[at] = random.u8(..);
            continue;
        }
        // A number of the header, a region or the working set.
        let at = random.usize(..index.len() / 8 - 1) * 8;
        let before = u64::from_le_bytes(index[at..at + 8].try_into().unwrap());
        let numbers = [
            0,
            1,
            before.wrapping_add(1),
            before.wrapping_sub(1),
            before ^ 1 << random.usize(..64),
            1 << 60,
            u64::MAX,
        ];
        index[at..at + 8].copy_from_slice(&numbers[random.usize(..numbers.len())].to_le_bytes());
    }
    targets::fix_root(index);
}

#[test]
fn a_forged_index_never_makes_a_panic_and_never_has_the_required_root() {
    let samples = samples("forgery");
    let (mut opened, mut refused) = (0, 0);
    for number in 0..FORGERIES {
        let mut random = Rng::with_seed(number ^ 0xf0e);
        let sample = &samples[random.usize(..samples.len())];
        let _named = Named(format!("forgery {number} of the image {}", sample.label));
        let mut file = (*sample.file).clone();
        let start = data_len(&file) + BEFORE_INDEX;
        let trailer = file.windows(8).rposition(|window| window == b"UZONEEND").unwrap() - 8;
        forge(&mut file[start..trailer], &mut random);
        let covered = targets::covered_len(&sample.file[start..trailer]).unwrap();
        let is_same = file[start..start + covered] == sample.file[start..start + covered];
        let file = Arc::new(file);
        let open = |options: &OpenOptions| {
            let mut source = Faulty::new(file.clone(), 0, Conduct::Sound, Rng::with_seed(number));
            source.parent = sample.parent.clone().map(|parent| (parent, Conduct::Sound));
            Image::from_source(Box::new(source), options)
        };
        let required = open(&OpenOptions::default().root(sample.root));
        assert_eq!(required.is_ok(), is_same);
        let Ok(image) = open(&OpenOptions::default()) else {
            refused += 1;
            continue;
        };
        opened += 1;
        let counts = image.frame_counts();
        assert_eq!(counts.zero + counts.stored + counts.parent, counts.frames);
        assert!(
            image.working_set().iter().all(|page| page * image.page_bytes() < image.byte_len())
        );
        for frame in 0..counts.frames {
            let mut byte = [0];
            if let Err(error) = image.read_at(frame * image.frame_bytes(), &mut byte) {
                kind(&error);
            }
        }
        if let Err(error) = image.verify(1, true, &|_| ()) {
            kind(&error);
        }
    }
    println!("{opened} opened, {refused} refused");
    assert!(opened > FORGERIES / 20 && refused > FORGERIES / 20, "{opened} {refused}");
}
