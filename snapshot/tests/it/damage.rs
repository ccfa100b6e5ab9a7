//! Images whose source errs, 10,000 times: the bytes are right, or the error names the image. `corpus.rs` changes the bytes
//! of images.
//!
//! The seeds are fixed, so an attempt has the same number in every run with the same `fastrand`, and a failure prints it.

use std::collections::{BTreeMap, HashSet};
use std::io;
use std::sync::{Arc, Condvar, Mutex};

use crate::common::{Directory, Named, memory};
use fastrand::Rng;
use uzone_pages::{ByteLen, ErrorKind};
use uzone_snapshot::{Codec, FrameCache, Image, OpenOptions, Packer, Root, SnapshotError, Source};

const FAULTS: u64 = 10_000;
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
        let raw = memory(26, 777, 1);
        let (file, root) = pack(codec.name(), codec, &raw, None);
        samples.push(Sample { label: codec.name(), raw, file, parent: None, root });
    }
    let parent = Image::open(directory.file("lz4"), &OpenOptions::default()).unwrap();
    let mut raw = memory(26, 777, 1);
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

impl Conduct {
    fn label(self) -> &'static str {
        match self {
            Self::Sound => "sound source",
            Self::Short { .. } => "short source",
            Self::Slow => "slow source",
            Self::Flaky(_) => "reads that fail",
            Self::CorruptOnce => "corrupt once",
            Self::CorruptAlways => "corrupt always",
        }
    }

    /// Returns the conduct of a number, for a file of `len` bytes.
    fn choose(number: u64, len: usize, random: &mut Rng) -> Self {
        match number % 5 {
            0 => Self::Short { len: random.usize(..len), after: random.u64(..24) },
            1 => Self::Slow,
            2 => Self::Flaky(3 + random.u64(..30)),
            3 => Self::CorruptOnce,
            _ => Self::CorruptAlways,
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

/// Returns the name of the kind of an error, which must be one of two and name its source.
fn kind(error: &SnapshotError) -> &'static str {
    assert!(error.to_string().contains(NAME), "{error}");
    match error.kind() {
        ErrorKind::InvalidData => "InvalidData",
        ErrorKind::Io => "Io",
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
fn inject(sample: &Sample, conduct: Conduct, random: &mut Rng) -> Option<&'static str> {
    let (file, len) = (sample.file.clone(), data_len(&sample.file));
    // The parent errs every second time.
    let in_parent = sample.parent.is_some() && random.bool();
    let (own, below) =
        if in_parent { (Conduct::Sound, conduct) } else { (conduct, Conduct::Sound) };
    let mut source = Faulty::new(file, len, own, random.clone());
    source.parent = sample.parent.clone().map(|file| (file, below));
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
    read_all(&image, sample, conduct, &gate, random)
}

/// Reads all of an image that was opened in spite of its fault.
fn read_all(
    image: &Image,
    sample: &Sample,
    conduct: Conduct,
    gate: &Gate,
    random: &mut Rng,
) -> Option<&'static str> {
    let raw = &sample.raw;
    let frames = raw.len().div_ceil(FRAME);
    if conduct == Conduct::Slow {
        std::thread::scope(|scope| {
            scope.spawn(|| assert!(read_frames(image, raw, 0..frames).is_empty()));
            scope.spawn(|| assert!(read_frames(image, raw, (0..frames).rev()).is_empty()));
            gate.open_when_a_read_waits();
        });
    }
    let errors = read_frames(image, raw, 0..frames);
    match conduct {
        Conduct::Slow | Conduct::CorruptOnce | Conduct::Sound => {
            assert!(errors.is_empty(), "{errors:?}");
        }
        Conduct::CorruptAlways => {
            assert!(errors.len() > 2 && errors.iter().all(|kind| *kind == "InvalidData"));
        }
        // An error is not remembered: a read that fails now and then succeeds in the end.
        Conduct::Flaky(_) => {
            for frame in 0..frames {
                let again = || read_frames(image, raw, frame..=frame).is_empty();
                assert!((0..20).any(|_| again()), "frame {frame} is never read");
            }
        }
        Conduct::Short { .. } => {}
    }
    // A range that starts and ends anywhere.
    let start = random.usize(..raw.len());
    let mut read = vec![0xaa; 1 + random.usize(..raw.len() - start)];
    match image.read_at(start as u64, &mut read) {
        Ok(()) => assert!(read == raw[start..start + read.len()]),
        Err(error) => drop(kind(&error)),
    }
    if let Err(error) = image.verify(1, random.bool(), &|_| ()) {
        kind(&error);
    }
    errors.first().copied()
}

#[test]
fn bytes_from_a_source_that_errs_are_right_or_an_error() {
    let samples = samples("damage");
    let mut outcomes: BTreeMap<(&str, &str), u32> = BTreeMap::new();
    for number in 0..FAULTS {
        let mut random = Rng::with_seed(number);
        let sample = &samples[random.usize(..samples.len())];
        let shortest =
            sample.parent.iter().map(|file| file.len()).fold(sample.file.len(), usize::min);
        let conduct = Conduct::choose(number, shortest, &mut random);
        let _named = Named(format!("attempt {number} of the image {}: {conduct:?}", sample.label));
        let outcome = inject(sample, conduct, &mut random).unwrap_or("right");
        *outcomes.entry((conduct.label(), outcome)).or_default() += 1;
    }
    let total = |wanted: &str| -> u32 {
        outcomes.iter().filter(|((_, outcome), _)| *outcome == wanted).map(|(_, count)| count).sum()
    };
    for ((conduct, outcome), count) in &outcomes {
        println!("{conduct:<16} {outcome:<12} {count:>5}");
    }
    let totals = ["right", "InvalidData", "Io"].map(|wanted| (wanted, total(wanted)));
    println!("{totals:?}");
    assert_eq!(u64::from(totals.iter().map(|(_, count)| count).sum::<u32>()), FAULTS);
    assert!(totals.iter().all(|(_, count)| *count > 0), "each outcome occurs: {totals:?}");
}
