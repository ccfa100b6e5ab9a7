//! DAX: memory that is mapped without a page cache between. [`device`] describes a DAX device;
//! [`Mapping::devdax`](crate::Mapping::devdax) and [`Mapping::fsdax`](crate::Mapping::fsdax) map one, or a file on a DAX mount.
//!
//! Persistent memory, and the memory of a CXL device, comes to a program in one of two ways. As
//! *devdax* it is a character device such as `/dev/dax0.0`: the driver maps it in pages of one size,
//! the device's alignment, and keeps nothing else there. As *fsdax* it carries a file system, whose
//! files are mapped. CXL memory that is not devdax is *system RAM*: a NUMA node whose memory any
//! allocation may get, and then nothing here applies. `daxctl reconfigure-device` changes between
//! devdax and system RAM.
//!
//! Units: sizes and offsets are bytes.
//! Cost: the facts about a device are four files of sysfs, about 50 us.
//! Source: `drivers/dax` of Linux and `Documentation/ABI/testing/sysfs-bus-dax`; `MAP_SYNC` in
//! mmap(2).

use std::io;
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};

use rustix::fs::{AtFlags, FileType, StatxAttributes, StatxFlags};
use rustix::io::Errno;
use uzone_pages::{ByteLen, PageSize};

use crate::host::root::{SysError, SystemRoot, if_there};
use crate::map::shortage::MapError;

/// The largest alignment that Linux gives a DAX device: the reach of one entry of a page upper directory, on a kernel
/// with the largest base pages.
const MAX_ALIGN: u64 = 4 << 40;

/// A DAX device, as the kernel describes it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DaxDevice {
    /// The number of bytes that it has: a multiple of `align`, never zero.
    pub size: ByteLen,
    /// The size of the pages in which it is mapped. Offsets, lengths and addresses of its mappings
    /// are multiples of it.
    pub align: PageSize,
    /// The NUMA node that it is nearest to; `None` if the kernel knows of none.
    pub node: Option<u32>,
}

impl DaxDevice {
    /// Returns the error for a range of the device that is not whole pages of it, if there is one.
    ///
    /// # Errors
    /// [`MapError::CutsPage`], [`MapError::BeyondDax`].
    pub fn check(&self, offset: u64, len: ByteLen) -> Result<(), MapError> {
        let len_bytes = len.get();
        let align = self.align.bytes();
        if !offset.is_multiple_of(align) || !len_bytes.is_multiple_of(align) {
            return Err(MapError::CutsPage { start: offset, len, page: self.align });
        }
        let size_bytes = self.size.get();
        if offset.checked_add(len_bytes).is_none_or(|end| end > size_bytes) {
            return Err(MapError::BeyondDax { offset, len_bytes, size_bytes });
        }
        Ok(())
    }
}

/// Returns the properties of the DAX device that is open as `file`.
///
/// # Errors
/// [`MapError::NotDaxDevice`] or [`MapError::DaxDevice`] if it is no DAX device, and [`MapError::Inspect`] or
/// [`MapError::DaxDevice`] if the kernel does not describe one that can be mapped.
pub fn device(root: &SystemRoot, file: impl AsFd) -> Result<DaxDevice, MapError> {
    let inspect = |cause: Errno| MapError::Inspect(cause.into());
    let stat = rustix::fs::fstat(file).map_err(inspect)?;
    if FileType::from_raw_mode(stat.st_mode) != FileType::CharacterDevice {
        return Err(MapError::NotDaxDevice);
    }
    numbered(root, rustix::fs::major(stat.st_rdev), rustix::fs::minor(stat.st_rdev))
}

/// Returns whether a file lies on a DAX mount (`STATX_ATTR_DAX` of statx(2)): all of its bytes are memory, without a page
/// cache between. `false` also where the kernel does not tell.
#[must_use]
pub fn is_file(file: impl AsFd) -> bool {
    let stat = rustix::fs::statx(file, c"", AtFlags::EMPTY_PATH, StatxFlags::empty());
    stat.is_ok_and(|stat| stat.stx_attributes.contains(StatxAttributes::DAX))
}

/// Returns the node that the DAX memory behind a file is nearest to: of a DAX device, or of the device
/// of the file system that a file lies on. `None` if the kernel knows of none.
#[must_use]
pub fn node_of(root: &SystemRoot, file: impl AsFd) -> Option<u32> {
    let stat = rustix::fs::fstat(file).ok()?;
    let (kind, device, to) = match FileType::from_raw_mode(stat.st_mode) {
        FileType::CharacterDevice => ("char", stat.st_rdev, ""),
        _ => ("block", stat.st_dev, "device"),
    };
    let number = format!("{}:{}", rustix::fs::major(device), rustix::fs::minor(device));
    node(root, &Path::new("sys/dev").join(kind).join(number).join(to)).ok()?
}

/// Returns the properties of the character device of a number.
fn numbered(root: &SystemRoot, major: u32, minor: u32) -> Result<DaxDevice, MapError> {
    let directory = PathBuf::from(format!("sys/dev/char/{major}:{minor}"));
    let path = root.path(&directory);
    let link = path.join("subsystem");
    let target = std::fs::read_link(&link).map_err(|cause| unread(link, cause))?;
    let subsystem = target.file_name().unwrap_or_default().to_string_lossy();
    if subsystem != "dax" {
        let problem = format!(
            "{} is a device of {subsystem:?}, expected \"dax\": `daxctl list` shows the DAX devices; one is made by `ndctl create-namespace --mode=devdax` of persistent memory, or by `daxctl reconfigure-device --mode=devdax` of system RAM",
            path.display()
        );
        return Err(MapError::DaxDevice { problem, cause: None });
    }
    described(root, &directory)
}

/// Returns the error for a file that the kernel lacks, or that cannot be read.
fn unread(path: PathBuf, cause: io::Error) -> MapError {
    let problem = format!(
        "{} should lead to the subsystem of the device, and cannot be read: mount sysfs at /sys",
        path.display()
    );
    MapError::DaxDevice { problem, cause: Some(Box::new(SysError::Read { path, cause })) }
}

/// Returns the names and properties of the DAX devices of a host that a program can map, sorted by name.
/// Devices that are system RAM are not among them.
///
/// # Errors
/// [`MapError::DaxDevice`] if they cannot be read, and of each device as [`device`].
pub fn devices(root: &SystemRoot) -> Result<Vec<(String, DaxDevice)>, MapError> {
    const DEVICES: &str = "sys/bus/dax/devices";
    let path = root.path(DEVICES);
    let entries = match std::fs::read_dir(&path) {
        Ok(entries) => entries,
        // A kernel without the bus has no device.
        Err(cause) if cause.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        Err(cause) => return Err(unread(path, cause)),
    };
    let mut found = Vec::new();
    for entry in entries {
        let entry = entry.map_err(|cause| unread(path.clone(), cause))?;
        let driver = std::fs::read_link(entry.path().join("driver")).unwrap_or_default();
        if driver.file_name().is_some_and(|driver| driver == "device_dax") {
            let name = entry.file_name().to_string_lossy().into_owned();
            let device = described(root, &Path::new(DEVICES).join(&name))?;
            found.push((name, device));
        }
    }
    found.sort_by(|(one, _), (other, _)| one.cmp(other));
    Ok(found)
}

/// Returns the properties of the DAX device of a directory of sysfs.
fn described(root: &SystemRoot, directory: &Path) -> Result<DaxDevice, MapError> {
    let path = root.path(directory);
    let path = &path.display();
    let attribute = |what| {
        move |cause| {
            let problem = format!(
                "the DAX device {path} does not state its {what}: set it up by `daxctl reconfigure-device --mode=devdax`"
            );
            MapError::DaxDevice { problem, cause: Some(Box::new(cause)) }
        }
    };
    let size = root.number(directory.join("size")).map_err(attribute("size"))?;
    let wanted = "a power of two of at least 4096, the alignment in bytes";
    let align =
        root.parse(directory.join("align"), wanted, parse_align).map_err(attribute("alignment"))?;
    let node = node(root, directory).map_err(attribute("node"))?;
    let step = align.bytes();
    if size != 0 && size.is_multiple_of(step) {
        return Ok(DaxDevice { size: ByteLen::new(size), align, node });
    }
    let problem = if size == 0 {
        format!(
            "the DAX device {path} has no byte: give it memory with `daxctl create-device` or `daxctl reconfigure-device --size`"
        )
    } else {
        format!(
            "the DAX device {path} has {size} bytes, which is no multiple of its alignment, {align}: make it anew with `ndctl create-namespace --mode=devdax --align={step}` or `daxctl reconfigure-device --align={step}`"
        )
    };
    Err(MapError::DaxDevice { problem, cause: None })
}

/// Returns the node of a device; a kernel that was built without nodes has no such file.
fn node(root: &SystemRoot, directory: &Path) -> Result<Option<u32>, SysError> {
    let wanted = "the number of a node, or -1 for none";
    Ok(if_there(root.parse(directory.join("numa_node"), wanted, parse_node))?.flatten())
}

/// Returns the page size in an `align` file.
fn parse_align(text: &str) -> Option<PageSize> {
    let bytes: u64 = text.trim().parse().ok()?;
    PageSize::try_from_bytes(bytes).ok().filter(|align| align.bytes() <= MAX_ALIGN)
}

/// Returns the node in a `numa_node` file; the outer `None` if it is malformed.
fn parse_node(text: &str) -> Option<Option<u32>> {
    match text.trim() {
        "-1" => Some(None),
        number => Some(Some(number.parse().ok()?)),
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use super::*;
    use crate::host::root::MadeUp;

    const DEVICE: &str = "sys/dev/char/252:0";

    /// A tree with one device, of which `missing` names a file that is not there.
    fn tree(subsystem: &str, size: &str, align: &str, node: &str, missing: &str) -> MadeUp {
        let files = [("size", size), ("align", align), ("numa_node", node)];
        let files: Vec<(String, &str)> = files
            .into_iter()
            .filter(|(name, _)| *name != missing)
            .map(|(name, text)| (format!("{DEVICE}/{name}"), text))
            .collect();
        let files: Vec<(&str, &str)> =
            files.iter().map(|(path, text)| (path.as_str(), *text)).collect();
        let tree = MadeUp::new(&files);
        if missing != "subsystem" {
            let link = tree.root().path(DEVICE).join("subsystem");
            symlink(format!("../../../bus/{subsystem}"), link).unwrap();
        }
        tree
    }

    #[test]
    fn a_device_is_what_its_files_say() {
        for (size, align, node, device) in [
            ("4096\n", "4096\n", "0\n", (4096, 4096, Some(0))),
            ("266338304\n", "2097152\n", "-1\n", (266_338_304, 2 << 20, None)),
            ("34359738368\n", "1073741824\n", "3\n", (32 << 30, 1 << 30, Some(3))),
        ] {
            let tree = tree("dax", size, align, node, "");
            let found = numbered(&tree.root(), 252, 0).unwrap();
            let (size, align, node) = device;
            assert_eq!((found.size.get(), found.align.bytes(), found.node), (size, align, node));
        }
        // A kernel without nodes has a device all the same.
        let tree = tree("dax", "4096\n", "4096\n", "", "numa_node");
        assert_eq!(numbered(&tree.root(), 252, 0).unwrap().node, None);
    }

    #[test]
    fn a_file_that_is_missing_or_garbled_is_named_with_what_it_should_hold() {
        for (size, align, node, missing, file, wanted) in [
            ("", "4096", "0", "size", "size", "cannot read"),
            ("4096", "", "0", "align", "align", "cannot read"),
            ("0x1000", "4096", "0", "", "size", "a whole number"),
            ("-1", "4096", "0", "", "size", "a whole number"),
            ("18446744073709551616", "4096", "0", "", "size", "a whole number"),
            ("4096", "", "0", "", "align", "a power of two"),
            ("4096", "0", "0", "", "align", "a power of two"),
            ("4096", "2048", "0", "", "align", "a power of two"),
            ("4096", "4097", "0", "", "align", "a power of two"),
            ("4096", "9223372036854775808", "0", "", "align", "a power of two"),
            ("4096", "4096", "-2", "", "numa_node", "the number of a node"),
            ("4096", "4096", "", "", "numa_node", "the number of a node"),
        ] {
            let tree = tree("dax", size, align, node, missing);
            let error = numbered(&tree.root(), 252, 0).unwrap_err();
            let text = error.to_string();
            assert!(text.contains(DEVICE) && text.contains("daxctl"), "{text}");
            assert!(text.contains("does not state its"), "{text}");
            let MapError::DaxDevice { cause: Some(cause), .. } = error else {
                panic!("{error:?}");
            };
            let cause = cause.to_string();
            assert!(cause.contains(&format!("{DEVICE}/{file}")), "{cause}");
            assert!(cause.contains(wanted), "{cause}");
        }
    }

    #[test]
    fn a_device_of_another_subsystem_or_of_no_number_is_refused_with_the_fix() {
        let other = tree("misc", "4096", "4096", "0", "");
        let error = numbered(&other.root(), 252, 0).unwrap_err();
        let text = error.to_string();
        assert!(matches!(&error, MapError::DaxDevice { cause: None, .. }), "{error:?}");
        assert!(text.contains("is a device of \"misc\", expected \"dax\""), "{text}");
        assert!(text.contains(DEVICE) && text.contains("ndctl create-namespace --mode=devdax"));
        for (tree, minor) in [(&other, 1), (&tree("dax", "1", "1", "0", "subsystem"), 0)] {
            let error = numbered(&tree.root(), 252, minor).unwrap_err();
            assert!(matches!(error, MapError::DaxDevice { cause: Some(_), .. }), "{error:?}");
            let reason = format!("sys/dev/char/252:{minor}/subsystem should lead to the subsystem");
            assert!(error.to_string().contains(&reason), "{error}");
        }
    }

    #[test]
    fn a_device_without_a_whole_page_is_refused() {
        let empty = tree("dax", "0", "2097152", "0", "");
        let error = numbered(&empty.root(), 252, 0).unwrap_err();
        assert!(matches!(error, MapError::DaxDevice { cause: None, .. }), "{error:?}");
        assert!(error.to_string().contains("has no byte"), "{error}");
        let cut = tree("dax", "2101248", "2097152", "0", "");
        let error = numbered(&cut.root(), 252, 0).unwrap_err();
        assert!(matches!(error, MapError::DaxDevice { cause: None, .. }), "{error:?}");
        assert!(error.to_string().contains("has 2101248 bytes, which is no multiple"), "{error}");
        assert!(error.to_string().contains("--align=2097152"), "{error}");
    }

    #[test]
    fn a_range_of_a_device_is_whole_pages_inside_of_it() {
        let align = PageSize::try_from_bytes(2 << 20).unwrap();
        let device = DaxDevice { size: ByteLen::mib(8), align, node: None };
        for (offset, len) in [(0, 8 << 20), (0, 2 << 20), (6 << 20, 2 << 20)] {
            device.check(offset, ByteLen::new(len)).unwrap();
        }
        for (offset, len) in [(4096, 2 << 20), (0, 4096), (1, 1), (0, (8 << 20) + 1)] {
            let error = device.check(offset, ByteLen::new(len)).unwrap_err();
            assert!(matches!(error, MapError::CutsPage { .. }), "{offset} {len}: {error}");
        }
        let last = u64::MAX - ((2 << 20) - 1);
        for (offset, len) in [(0, 10 << 20), (8 << 20, 2 << 20), (last, 2 << 20), (last, last)] {
            let error = device.check(offset, ByteLen::new(len)).unwrap_err();
            assert!(matches!(error, MapError::BeyondDax { .. }), "{offset} {len}: {error}");
        }
    }

    #[test]
    fn devices_that_are_system_ram_are_not_listed() {
        const DEVICES: &str = "sys/bus/dax/devices";
        let files = |name: &str| {
            let at = |file| format!("{DEVICES}/{name}/{file}");
            [(at("size"), "4194304\n"), (at("align"), "2097152\n"), (at("numa_node"), "1\n")]
        };
        let files = [files("dax1.0"), files("dax0.1"), files("dax0.0")].concat();
        let files: Vec<(&str, &str)> =
            files.iter().map(|(path, text)| (path.as_str(), *text)).collect();
        let tree = MadeUp::new(&files);
        for (name, driver) in
            [("dax1.0", "device_dax"), ("dax0.1", "kmem"), ("dax0.0", "device_dax")]
        {
            let link = tree.root().path(format!("{DEVICES}/{name}/driver"));
            symlink(format!("/sys/bus/dax/drivers/{driver}"), link).unwrap();
        }
        let found = devices(&tree.root()).unwrap();
        let names: Vec<_> = found.iter().map(|(name, _)| name.as_str()).collect();
        assert_eq!(names, ["dax0.0", "dax1.0"]);
        assert_eq!((found[0].1.size, found[0].1.node), (ByteLen::mib(4), Some(1)));
        assert_eq!(devices(&MadeUp::new(&[("proc/version", "")]).root()).unwrap(), []);
        let broken = MadeUp::new(&[("sys/bus/dax/devices/dax0.0/size", "none\n")]);
        let link = broken.root().path("sys/bus/dax/devices/dax0.0/driver");
        symlink("/sys/bus/dax/drivers/device_dax", link).unwrap();
        let error = devices(&broken.root()).unwrap_err();
        assert!(matches!(error, MapError::DaxDevice { cause: Some(_), .. }), "{error:?}");
        assert!(error.to_string().contains("does not state its size"), "{error}");
    }
}
