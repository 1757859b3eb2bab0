//! The data files of an open pool, as one row of pool pages.
//!
//! Owns the open descriptors. A data file is a regular file or a block device; its first `DATA_START` bytes hold
//! the superblock and are not pool pages. Behind them, the files' pages follow one another in the order of
//! `cuttlefs.toml`.
//!
//! ```text
//! pool page    0 ............ n0-1 | n0 .............. n0+n1-1 |
//! data file 0  [superblock][pages ]  data file 1 [superblock][pages ]
//! ```
//!
//! # Invariants
//! * Files lie back to back: `files[i+1].first_page == files[i].first_page + files[i].pages`.
//! * `locate` never answers a place before `DATA_START`, so no pool IO can reach a superblock.

use cuttlefs_common::ids::PAGE_SIZE_U64;
use std::fs::File;
use std::os::fd::{AsFd, BorrowedFd};
use std::path::{Path, PathBuf};

/// Where pool pages begin in a data file. The superblock needs one page; the rest is reserved, and keeps pool pages
/// aligned to what RAID chunks and SSD pages usually are.
pub const DATA_START: u64 = 64 << 10;

const _: () = assert!(DATA_START.is_multiple_of(PAGE_SIZE_U64) && DATA_START >= PAGE_SIZE_U64);

/// An open data file.
#[derive(Debug)]
pub struct DataFile {
    path: PathBuf,
    file: File,
    first_page: u64,
    pages: u64,
    direct: bool,
}

impl DataFile {
    /// Where it is.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// It, open.
    pub(super) fn file(&self) -> &File {
        &self.file
    }

    /// Pool page of its first page.
    pub fn first_page(&self) -> u64 {
        self.first_page
    }

    /// Pool pages in it.
    pub fn pages(&self) -> u64 {
        self.pages
    }

    /// Whether it is open with O_DIRECT; not every file system can.
    pub fn is_direct(&self) -> bool {
        self.direct
    }
}

impl AsFd for DataFile {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }
}

/// Where a pool offset is.
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
}

impl DataFiles {
    /// No files yet.
    pub fn new() -> Self {
        Self::default()
    }

    /// Appends a file with `pages` pool pages.
    pub fn push(&mut self, path: PathBuf, file: File, pages: u64, direct: bool) {
        self.files.push(DataFile { path, file, first_page: self.pages, pages, direct });
        self.pages += pages;
    }

    /// Pages of the pool.
    pub fn pages(&self) -> u64 {
        self.pages
    }

    /// The files in order.
    pub fn files(&self) -> &[DataFile] {
        &self.files
    }

    /// The file and place of a byte of the pool; `None` past the end.
    pub fn locate(&self, pool_offset: u64) -> Option<Place> {
        let page = pool_offset / PAGE_SIZE_U64;
        let file = self.files.partition_point(|file| file.first_page + file.pages <= page);
        let found = self.files.get(file)?;
        let inside = pool_offset - found.first_page * PAGE_SIZE_U64;
        Some(Place {
            file,
            file_offset: DATA_START + inside,
            contiguous_bytes: found.pages * PAGE_SIZE_U64 - inside,
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
        assert_eq!(place(8), None);
        assert_eq!(files.locate(u64::MAX), None);
    }
}
