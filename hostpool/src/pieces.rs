//! Which blocks are registered together: [`Pieces`]. Numbers alone, without a system call.

use std::time::Duration;

use uzone_pages::ByteLen;

use crate::options::Pause;

/// The most bytes that a driver takes at once: 16 bytes a page are one allocation of at most 2 GiB in some.
const MOST: u64 = 64 << 30;
/// Linux 6.11 to 6.13 pin fewer bytes than this at once.
const MOST_OF_SOME: u64 = 2 << 30;
/// How long the first piece is, at least: a first block is to be had soon.
const FIRST: u64 = 2 << 20;
/// The pause where none was set, at least. The timer adds 50 us, in which a thread that waits for the driver wakes up. With
/// 250 us, a driver that registers 58 GB/s kept 0.79 of its rate.
const LEAST_PAUSE: Duration = Duration::from_micros(125);

/// The pieces of a pool, in order: whole blocks, of which the first pieces are short and each is at most twice as long
/// as the one before.
#[derive(Clone, Debug)]
pub(crate) struct Pieces {
    blocks: usize,
    /// How many blocks the next piece has, and how many one has at most.
    next: usize,
    most: usize,
    at: usize,
}

impl Pieces {
    /// Makes the pieces of `blocks` blocks of `block` bytes, of at most `wanted` bytes but one block at least. `release`
    /// is that of the kernel.
    ///
    /// # Errors
    /// Why not: a block is more than the kernel or the driver takes at once.
    pub(crate) fn new(
        blocks: usize,
        block: ByteLen,
        wanted: ByteLen,
        release: &str,
    ) -> Result<Self, String> {
        let most = most(release);
        if block.get() > most {
            let most = ByteLen::new(most);
            return Err(format!("Linux {release} and the driver register at most {most} at once"));
        }
        let count = |bytes: u64| usize::try_from(bytes / block.get()).unwrap_or(1).max(1);
        let most = count(wanted.get().min(most));
        Ok(Self { blocks, next: count(FIRST).min(most), most, at: 0 })
    }
}

impl Iterator for Pieces {
    type Item = std::ops::Range<usize>;

    fn next(&mut self) -> Option<Self::Item> {
        let start = self.at;
        self.at = start.saturating_add(self.next).min(self.blocks);
        self.next = self.next.saturating_mul(2).min(self.most);
        (start < self.at).then_some(start..self.at)
    }
}

/// Returns how many bytes may be registered at once.
fn most(release: &str) -> u64 {
    let mut numbers = release.split(|byte: char| !byte.is_ascii_digit()).map(str::parse::<u32>);
    match (numbers.next(), numbers.next()) {
        (Some(Ok(6)), Some(Ok(11..=13))) => MOST_OF_SOME - 1,
        _ => MOST,
    }
}

/// Returns how long other threads have the driver after a piece that took so long.
pub(crate) fn pause_after(took: Duration, pause: Pause) -> Duration {
    match pause {
        Pause::Adaptive => (took / 10).max(LEAST_PAUSE),
        Pause::Fixed(pause) => pause,
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test reports a failure by panicking")]
    use super::*;

    #[test]
    fn pieces_cover_all_blocks_once_and_end_on_their_borders() {
        let mib = ByteLen::mib;
        for (blocks, block, wanted, release, lens) in [
            (70, mib(2), mib(64), "6.18.1", &[1, 2, 4, 8, 16, 32, 7][..]),
            (3, mib(100), mib(64), "6.18.1", &[1, 1, 1]),
            (5, ByteLen::new(3 << 12), mib(64), "6.18.1", &[5]),
            (8, mib(2), mib(3), "6.18.1", &[1, 1, 1, 1, 1, 1, 1, 1]),
            (3, mib(1024), ByteLen::gib(512), "6.12.3", &[1, 1, 1]),
            (3, mib(1024), ByteLen::gib(512), "6.14.0", &[1, 2]),
            (100, ByteLen::gib(1), ByteLen::tib(1), "7.0", &[1, 2, 4, 8, 16, 32, 37]),
            (200, ByteLen::gib(1), ByteLen::tib(1), "7.0", &[1, 2, 4, 8, 16, 32, 64, 64, 9]),
        ] {
            let pieces: Vec<_> = Pieces::new(blocks, block, wanted, release).unwrap().collect();
            assert_eq!(pieces.iter().map(ExactSizeIterator::len).collect::<Vec<_>>(), lens);
            assert_eq!((pieces[0].start, pieces.last().unwrap().end), (0, blocks));
            assert!(pieces.windows(2).all(|two| two[0].end == two[1].start));
        }
        assert!(Pieces::new(1, ByteLen::gib(65), mib(64), "6.18").is_err());
        let error = Pieces::new(1, ByteLen::gib(2), mib(64), "6.13.2").unwrap_err();
        assert!(error.contains("Linux 6.13.2"), "{error}");
    }

    #[test]
    fn a_pause_follows_the_piece_before_it() {
        let ms = Duration::from_millis;
        for (took, pause, expected) in [
            (ms(0), Pause::Adaptive, LEAST_PAUSE),
            (ms(1), Pause::Adaptive, LEAST_PAUSE),
            (ms(2), Pause::Adaptive, Duration::from_micros(200)),
            (ms(30), Pause::Adaptive, ms(3)),
            (ms(30), Pause::Fixed(Duration::ZERO), Duration::ZERO),
        ] {
            assert_eq!(pause_after(took, pause), expected);
        }
    }
}
