//! The holes of a file, and whether they show which pages were written: [`next_data`], [`hole_problem`].
//!
//! A file that another program wrote sparsely, page by page, has holes where it wrote nothing, if its file
//! system keeps holes of a page, reports them, and makes none of zeroes that were written. Which do is not
//! asked of the kernel, which has no such call: it is known of file systems by their type.
//!
//! Source: lseek(2) "Seeking file data and holes", statfs(2), linux/magic.h, `shmem_getattr` of mm/shmem.c.

use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::unix::fs::MetadataExt;

use rustix::fs::SeekFrom;
use rustix::io::Errno;

const HUGE_PAGES: &str = "where a page that was written takes a whole huge page along";
const ZEROES_ARE_HOLES: &str = "which makes holes of zeroes that were written";
const NO_HOLES: &str = "which has no holes or does not always report them";

/// Types of file systems: the number, the name, and the problem with its holes, if there is one.
const KNOWN: [(u64, &str, Option<&str>); 21] = [
    (0xef53, "ext4", None),
    (0x5846_5342, "XFS", None),
    (0x9123_683e, "Btrfs", None),
    (0xf2f5_2010, "F2FS", None),
    (0xca45_1a4e, "bcachefs", None),
    (0x0102_1994, "tmpfs", None),
    (0x794c_7630, "overlayfs", None),
    (0x0116_1970, "GFS2", None),
    (0x7461_636f, "OCFS2", None),
    (0x9584_58f6, "hugetlbfs", Some(HUGE_PAGES)),
    (0x2fc1_2fc1, "ZFS", Some(ZEROES_ARE_HOLES)),
    (0x4d44, "FAT", Some(NO_HOLES)),
    (0x2011_bab0, "exFAT", Some(NO_HOLES)),
    (0x6969, "NFS", Some(NO_HOLES)),
    (0x0102_1997, "9p", Some(NO_HOLES)),
    (0x6573_5546, "FUSE", Some(NO_HOLES)),
    (0xff53_4d42, "CIFS", Some(NO_HOLES)),
    (0xfe53_4d42, "SMB", Some(NO_HOLES)),
    (0x00c3_6400, "Ceph", Some(NO_HOLES)),
    (0x482b, "HFS+", Some(NO_HOLES)),
    (0x8584_58f6, "ramfs", Some(NO_HOLES)),
];

const TMPFS: u64 = 0x0102_1994;

/// Returns the reason why the holes of a file do not show which pages of `page_bytes` were written, or `None` if they
/// do, as far as the file system is concerned: a copy may have other holes.
///
/// # Errors
/// The error of fstat(2), fstatfs(2) or lseek(2).
pub fn hole_problem(file: &File, page_bytes: u64) -> io::Result<Option<String>> {
    let metadata = file.metadata()?;
    // Of a type that differs from one architecture to the other; the magic number has 32 bits.
    let magic = u64::try_from(i128::from(rustix::fs::fstatfs(file)?.f_type) & 0xffff_ffff);
    let magic = magic.unwrap_or(0);
    if let Some(problem) = problem_of(magic, metadata.blksize(), page_bytes) {
        return Ok(Some(problem));
    }
    let is_short = metadata.blocks().saturating_mul(512) < metadata.len();
    let has_no_hole = || Ok::<_, io::Error>(next_data(file, 0)? == Some(0..metadata.len()));
    Ok((is_short && has_no_hole()?).then(|| {
        "it takes less room than its bytes do, and its file system reports no hole".to_owned()
    }))
}

/// Returns the problem with a type of file system whose files have blocks of so many bytes.
fn problem_of(magic: u64, block_bytes: u64, page_bytes: u64) -> Option<String> {
    let Some((_, file_system, known)) = KNOWN.iter().find(|(known, ..)| *known == magic) else {
        return Some(format!(
            "it is on a file system of the type {magic:#x}, which is not known to report holes"
        ));
    };
    match known {
        Some(why) => Some(format!("it is on {file_system}, {why}")),
        None if block_bytes <= page_bytes => None,
        // Of a file that may have huge pages it states the size of those.
        None if magic == TMPFS => Some(format!("it is on tmpfs with huge pages, {HUGE_PAGES}")),
        None => Some(format!(
            "it is on {file_system} in blocks of {block_bytes} bytes, more than a page"
        )),
    }
}

/// Returns the next byte of a file that is in no hole, from `from` on, or `None` behind the last. It moves the position of
/// the file.
///
/// # Errors
/// The error of lseek(2).
pub fn data_from(file: &File, from: u64) -> io::Result<Option<u64>> {
    match rustix::fs::seek(file, SeekFrom::Data(from)) {
        Ok(start) => Ok(Some(start)),
        Err(Errno::NXIO) => Ok(None),
        Err(cause) => Err(cause.into()),
    }
}

/// Returns the next part of a file that is no hole, from `from` on, or `None` behind the last, as [`data_from`] does. In
/// a file in memory, this takes longer the longer the part is.
///
/// # Errors
/// The error of lseek(2).
pub fn next_data(file: &File, from: u64) -> io::Result<Option<Range<u64>>> {
    let Some(start) = data_from(file, from)? else { return Ok(None) };
    let end = rustix::fs::seek(file, SeekFrom::Hole(start))?;
    Ok(Some(start..end))
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::FileExt;

    use super::*;

    #[test]
    fn each_type_of_file_system_is_refused_by_its_name_or_is_fine() {
        let problem = |magic, block| problem_of(magic, block, 4096);
        for fine in [0xef53, 0x5846_5342, 0x9123_683e, TMPFS] {
            assert_eq!(problem(fine, 4096), None, "{fine:#x}");
            assert_eq!(problem(fine, 1024), None, "{fine:#x}");
        }
        for (magic, block, part) in [
            (0x9584_58f6, 2 << 20, "hugetlbfs, where a page"),
            (TMPFS, 2 << 20, "tmpfs with huge pages"),
            (0x5846_5342, 65536, "XFS in blocks of 65536 bytes"),
            (0x2fc1_2fc1, 4096, "ZFS, which makes holes of zeroes"),
            (0x4d44, 4096, "FAT, which has no holes"),
            (0x1234, 4096, "0x1234, which is not known"),
        ] {
            let problem = problem(magic, block).unwrap();
            assert!(problem.contains(part), "{problem}");
        }
    }

    #[test]
    fn the_data_of_a_sparse_file_is_found_page_by_page() {
        let file = tempfile::tempfile().unwrap();
        file.set_len(1 << 20).unwrap();
        if hole_problem(&file, 4096).unwrap().is_some() {
            eprintln!("skipped: sparse files: the temporary directory has none");
            return;
        }
        assert_eq!(next_data(&file, 0).unwrap(), None);
        for page in [3_u64, 4, 200] {
            file.write_all_at(&[0; 4096], page * 4096).unwrap();
        }
        assert_eq!(next_data(&file, 0).unwrap(), Some(3 * 4096..5 * 4096));
        assert_eq!(next_data(&file, 4 * 4096).unwrap(), Some(4 * 4096..5 * 4096));
        assert_eq!(next_data(&file, 5 * 4096).unwrap(), Some(200 * 4096..201 * 4096));
        assert_eq!(next_data(&file, 201 * 4096).unwrap(), None);
        assert_eq!(next_data(&file, 1 << 21).unwrap(), None, "behind its end");
    }
}
