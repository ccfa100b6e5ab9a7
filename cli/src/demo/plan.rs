//! The arguments of the demo ([`Args`]), and what follows from them ([`Plan`]).

use std::path::PathBuf;

use uzone_harness::demo;
use uzone_pages::ByteLen;

use crate::exit::{self, Failure};

/// Describe a huge region, pin it, clear it, and map a file lazily
///
/// It makes a file of what is found on any Linux, describes a region larger than this machine, pins and
/// clears a part of it, maps the file lazily, touches every page and compares every byte. Then it
/// measures what the same takes the plain way, and how much of the machine's limit is reached. It needs
/// no root and no network, takes under a minute, and leaves two files: a page with charts, and the
/// trace of page faults that they are drawn from.
#[derive(Debug, clap::Args)]
#[command(after_help = exit::help("uzone demo --size 4G --output /tmp", &EXITS))]
pub(crate) struct Args {
    /// How large the file is that is mapped lazily, in multiples of 8 MiB [default: 1G, or what fits]
    #[arg(long, value_name = "SIZE")]
    size: Option<ByteLen>,
    /// How large the region is that is described, in whole GiB; only a part of it is used [default:
    /// 100G, or what fits]
    #[arg(long, value_name = "SIZE")]
    reserve: Option<ByteLen>,
    /// Where the file is made, without a name [default: where temporary files go]
    #[arg(long, value_name = "DIR")]
    dir: Option<PathBuf>,
    /// Where uzone-demo.html and uzone-demo.trace.json are written
    #[arg(short, long, default_value = ".", value_name = "DIR")]
    output: PathBuf,
}

const EXITS: [u8; 8] = [0, 1, 2, 66, 69, 71, 74, 77];

/// As much is written into the pinned part of the region.
const PART: ByteLen = ByteLen::mib(256);
/// The sizes that are tried, until one fits the memory that can be had.
const SIZES: [ByteLen; 5] =
    [ByteLen::gib(1), ByteLen::mib(512), ByteLen::mib(256), ByteLen::mib(128), ByteLen::mib(64)];
/// The same for the region, where its addresses are limited.
const RESERVES: [ByteLen; 4] =
    [ByteLen::gib(100), ByteLen::gib(16), ByteLen::gib(4), ByteLen::gib(1)];
/// As much is described where the plain way is measured as well, which writes 64 bytes a page.
const DESCRIBED: ByteLen = ByteLen::gib(4);

/// The least memory that clearing is compared in.
const LEAST_ARENA: ByteLen = ByteLen::mib(32);

/// The arguments of the demo, and what follows from them.
pub(super) struct Plan {
    pub(super) size: ByteLen,
    pub(super) reserve: ByteLen,
    /// How much of the region is used.
    pub(super) part: ByteLen,
    /// How much is described where that is compared.
    pub(super) described: ByteLen,
    /// How much memory clearing is compared in, twice.
    pub(super) arena: ByteLen,
    /// Where the image is made.
    pub(super) directory: PathBuf,
    /// Where the results are written.
    pub(super) output: PathBuf,
}

impl Plan {
    /// Returns every plan that the arguments leave, the one to prefer first.
    pub(super) fn all(args: &Args) -> Result<Vec<Self>, Failure> {
        let sizes = args.size.map_or(SIZES.to_vec(), |size| vec![size]);
        let reserves = args.reserve.map_or(RESERVES.to_vec(), |reserve| vec![reserve]);
        let pairs =
            sizes.iter().flat_map(|size| reserves.iter().map(move |reserve| (*size, *reserve)));
        pairs.map(|(size, reserve)| Self::of(args, size, reserve)).collect()
    }

    fn of(args: &Args, size: ByteLen, reserve: ByteLen) -> Result<Self, Failure> {
        if size.is_zero() || !size.get().is_multiple_of(8 << 20) {
            return Err(Failure::usage(format!(
                "an image of {size} cannot be made: a size is a multiple of 8 MiB, such as 1G"
            )));
        }
        if reserve.is_zero() || !reserve.get().is_multiple_of(1 << 30) {
            return Err(Failure::usage(format!(
                "{reserve} cannot be described: --reserve is a multiple of 1 GiB, such as 100G"
            )));
        }
        Ok(Self {
            size,
            reserve,
            part: size.min(PART),
            described: reserve.min(DESCRIBED).min(ByteLen::new((size.get() * 4).max(1 << 30))),
            arena: size.min(demo::ARENA).max(LEAST_ARENA),
            directory: args.dir.clone().unwrap_or_else(std::env::temp_dir),
            output: args.output.clone(),
        })
    }

    pub(super) fn page_path(&self) -> PathBuf {
        self.output.join("uzone-demo.html")
    }

    pub(super) fn trace_path(&self) -> PathBuf {
        self.output.join("uzone-demo.trace.json")
    }

    /// Returns how much of the image is touched in order; the rest is touched here and there.
    pub(super) fn in_order(&self) -> ByteLen {
        let scattered = (self.size.get() / 4).min(PART.get());
        ByteLen::new(self.size.get() - scattered)
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;

    #[test]
    fn arguments_of_the_demo_become_a_plan_or_are_refused() {
        let args = |size, reserve| Args {
            size: Some(size),
            reserve: Some(reserve),
            dir: None,
            output: PathBuf::from("there"),
        };
        let only = |args: &Args| Plan::all(args).map(|mut plans| plans.remove(0));
        let plan = only(&args(ByteLen::gib(1), ByteLen::gib(100))).expect("a plan");
        assert_eq!((plan.part, plan.described), (ByteLen::mib(256), ByteLen::gib(4)));
        assert_eq!(plan.in_order(), ByteLen::mib(768));
        assert_eq!(plan.page_path(), Path::new("there/uzone-demo.html"));
        let plan = only(&args(ByteLen::mib(8), ByteLen::gib(1))).expect("a plan");
        assert_eq!((plan.part, plan.described), (ByteLen::mib(8), ByteLen::gib(1)));
        assert_eq!(plan.in_order(), ByteLen::mib(6));
        for (size, reserve) in [(0, 1 << 30), (4 << 20, 1 << 30), (8 << 20, 0), (8 << 20, 1 << 20)]
        {
            assert!(only(&args(ByteLen::new(size), ByteLen::new(reserve))).is_err());
        }
        // Without arguments the plans follow the machine, the largest first.
        let default = Args { size: None, reserve: None, ..args(ByteLen::ZERO, ByteLen::ZERO) };
        let plans = Plan::all(&default).expect("plans");
        let sizes = |plan: &Plan| (plan.size, plan.reserve);
        assert_eq!(plans.first().map(sizes), Some((ByteLen::gib(1), ByteLen::gib(100))));
        assert_eq!(plans.last().map(sizes), Some((ByteLen::mib(64), ByteLen::gib(1))));
    }
}
