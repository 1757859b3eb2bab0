//! The data files of an open pool, as one sequence of pool pages.
//!
//! A data file is a regular file or a block device. Its first `DATA_START` bytes have the superblock and are not pool pages. Behind them, the files'
//! pages follow one another in the order of `cuttlefs.toml`. Behind its pages a file has their checksums (`sums::layout`). For disks these are pages
//! as well, numbered on from the pool's last page.
//!
//! ```text
//! pool page    0 ............ n0-1 | n0 .............. n0+n1-1 |
//! data file 0  [superblock][pages ][sums]  data file 1 [superblock][pages ][sums]
//! ```
//!
//! # Invariants
//! * Files follow one another without gaps: `files[i+1].first_page == files[i].first_page + files[i].pages`.
//! * `locate` never returns a place before `DATA_START`, so no pool IO can reach a superblock.
//! * No IO that `holds` accepts reaches from pages into sums.

use super::sums::layout::{SumLayout, sum_blocks};
use cuttlefs_common::ids::PAGE_SIZE_U64;
use std::fs::File;
use std::os::fd::{AsFd, BorrowedFd};
use std::path::{Path, PathBuf};

/// Where pool pages begin in a data file. The superblock needs one page. The rest is reserved, and aligns pool pages to the usual sizes of RAID
/// chunks and SSD pages.
pub const DATA_START: u64 = 64 << 10;

const _: () = assert!(DATA_START.is_multiple_of(PAGE_SIZE_U64) && DATA_START >= PAGE_SIZE_U64);

/// An open data file.
#[derive(Debug)]
pub struct DataFile {
    path: PathBuf,
    file: File,
    first_page: u64,
    pages: u64,
    /// The number of its first sum block, counted from the pool's last page.
    first_extra: u64,
    direct: bool,
}

impl DataFile {
    /// The file's path.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The open file.
    pub(super) fn file(&self) -> &File {
        &self.file
    }

    /// The number of its first pool page.
    pub fn first_page(&self) -> u64 {
        self.first_page
    }

    /// The number of its pool pages.
    pub fn pages(&self) -> u64 {
        self.pages
    }

    /// The number of all its pages, with the sum blocks.
    pub fn all_pages(&self) -> u64 {
        self.pages + sum_blocks(self.pages)
    }

    /// Whether it is open with O_DIRECT, which not every file system has.
    pub fn is_direct(&self) -> bool {
        self.direct
    }
}

impl AsFd for DataFile {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }
}

/// The place of a pool offset.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Place {
    /// Index of the data file.
    pub file: usize,
    /// Byte offset in that file.
    pub file_offset: u64,
    /// Bytes from there to the end of that file's pages.
    pub contiguous_bytes: u64,
}

/// All data files of a pool.
#[derive(Debug, Default)]
pub struct DataFiles {
    files: Vec<DataFile>,
    pages: u64,
    extra: u64,
}

impl DataFiles {
    /// No files yet.
    pub fn new() -> Self {
        Self::default()
    }

    /// Appends a file with `pages` pool pages.
    pub fn push(&mut self, path: PathBuf, file: File, pages: u64, direct: bool) {
        let (first_page, first_extra) = (self.pages, self.extra);
        self.files.push(DataFile { path, file, first_page, pages, first_extra, direct });
        self.pages += pages;
        self.extra += sum_blocks(pages);
    }

    /// The number of the pool's pages.
    pub fn pages(&self) -> u64 {
        self.pages
    }

    /// The places of the pages' checksums.
    pub fn sum_layout(&self) -> SumLayout {
        SumLayout::new(self.files.iter().map(DataFile::pages))
    }

    /// Whether an IO of `len` bytes is possible: it is in pool pages as a whole, or in sum blocks as a whole.
    pub fn holds(&self, pool_offset: u64, len: usize) -> bool {
        let (pool_end, end) = (self.pages * PAGE_SIZE_U64, (self.pages + self.extra) * PAGE_SIZE_U64);
        let io_end = pool_offset.checked_add(len as u64);
        io_end.is_some_and(|io_end| io_end <= pool_end || (pool_offset >= pool_end && io_end <= end))
    }

    /// The files in order.
    pub fn files(&self) -> &[DataFile] {
        &self.files
    }

    /// The file and place of a byte of the pool, or of the sums behind it; `None` past the end.
    pub fn locate(&self, pool_offset: u64) -> Option<Place> {
        let page = pool_offset / PAGE_SIZE_U64;
        if page >= self.pages {
            return self.locate_extra(pool_offset - self.pages * PAGE_SIZE_U64);
        }
        let file = self.files.partition_point(|file| file.first_page + file.pages <= page);
        let found = self.files.get(file)?;
        let inside = pool_offset - found.first_page * PAGE_SIZE_U64;
        Some(Place {
            file,
            file_offset: DATA_START + inside,
            contiguous_bytes: found.pages * PAGE_SIZE_U64 - inside,
        })
    }

    fn locate_extra(&self, offset: u64) -> Option<Place> {
        let page = offset / PAGE_SIZE_U64;
        let file = self.files.partition_point(|file| file.first_extra + sum_blocks(file.pages) <= page);
        let found = self.files.get(file)?;
        let inside = offset - found.first_extra * PAGE_SIZE_U64;
        Some(Place {
            file,
            file_offset: DATA_START + found.pages * PAGE_SIZE_U64 + inside,
            contiguous_bytes: sum_blocks(found.pages) * PAGE_SIZE_U64 - inside,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn offsets_map_across_files_and_never_to_a_superblock() {
        let mut files = DataFiles::new();
        assert_eq!(files.locate(0), None);
        for pages in [3, 1, 4] {
            let file = tempfile::tempfile().expect("a temporary file");
            files.push(PathBuf::from("x"), file, pages, false);
        }
        assert_eq!(files.pages(), 8);
        let place = |page: u64| files.locate(page * 4096 + 5);
        let at = |file, page: u64, left: u64| {
            Some(Place { file, file_offset: DATA_START + page * 4096 + 5, contiguous_bytes: left * 4096 - 5 })
        };
        assert_eq!(place(0), at(0, 0, 3));
        assert_eq!(place(2), at(0, 2, 1));
        assert_eq!(place(3), at(1, 0, 1));
        assert_eq!(place(4), at(2, 0, 4));
        assert_eq!(place(7), at(2, 3, 1));
        // Each file has one sum block.
        let extra = |file, pages: u64| {
            let file_offset = DATA_START + pages * 4096 + 5;
            Some(Place { file, file_offset, contiguous_bytes: 4096 - 5 })
        };
        assert_eq!(place(8), extra(0, 3));
        assert_eq!(place(9), extra(1, 1));
        assert_eq!(place(10), extra(2, 4));
        assert_eq!(place(11), None);
        let holds = |page: u64, pages: usize| files.holds(page * 4096, pages * 4096);
        assert!(holds(0, 8) && holds(8, 3) && !holds(7, 2) && !holds(8, 4) && !files.holds(u64::MAX, 2));
        assert_eq!(files.locate(u64::MAX), None);
    }
}
