//! The contents of a file: the pages that exist. All other pages are holes.

use cuttlefs_common::ids::{PAGE_SIZE, PAGE_SIZE_U64};
use cuttlefs_common::rpc::SeekFor;
use std::collections::BTreeMap;

#[derive(Default)]
pub struct FilePages {
    pages: BTreeMap<u64, Box<[u8; PAGE_SIZE]>>,
}

impl FilePages {
    pub fn count(&self) -> u64 {
        self.pages.len() as u64
    }

    pub fn read(&self, offset: u64, len: usize) -> Vec<u8> {
        let mut out = vec![0; len];
        for (page, at, part) in parts(offset, offset + len as u64) {
            if let Some(bytes) = self.pages.get(&page) {
                let from = (page * PAGE_SIZE_U64 + at as u64 - offset) as usize;
                out[from..from + part].copy_from_slice(&bytes[at..at + part]);
            }
        }
        out
    }

    pub fn write(&mut self, offset: u64, bytes: &[u8]) {
        for (page, at, part) in parts(offset, offset + bytes.len() as u64) {
            let from = (page * PAGE_SIZE_U64 + at as u64 - offset) as usize;
            self.page(page)[at..at + part].copy_from_slice(&bytes[from..from + part]);
        }
    }

    pub fn reserve(&mut self, offset: u64, end: u64) {
        for (page, _, _) in parts(offset, end) {
            self.page(page);
        }
    }

    pub fn punch(&mut self, offset: u64, end: u64) {
        let whole = offset.div_ceil(PAGE_SIZE_U64)..end / PAGE_SIZE_U64;
        self.pages.retain(|page, _| !whole.contains(page));
        let edges = [offset / PAGE_SIZE_U64, end / PAGE_SIZE_U64];
        for (page, at, part) in edges.into_iter().flat_map(|page| {
            let start = page * PAGE_SIZE_U64;
            parts(offset.max(start), end.min(start.saturating_add(PAGE_SIZE_U64)))
        }) {
            if let Some(bytes) = self.pages.get_mut(&page) {
                bytes[at..at + part].fill(0);
            }
        }
    }

    pub fn resize(&mut self, size: u64) {
        let keep = size.div_ceil(PAGE_SIZE_U64);
        self.pages.split_off(&keep);
        if let Some(last) = self.pages.get_mut(&(size / PAGE_SIZE_U64)) {
            last[(size % PAGE_SIZE_U64) as usize..].fill(0);
        }
    }

    pub fn seek(&self, offset: u64, size: u64, seek: SeekFor) -> Option<u64> {
        let first = offset / PAGE_SIZE_U64;
        let found = match seek {
            SeekFor::Data => *self.pages.range(first..).next()?.0,
            SeekFor::Hole => {
                let mut page = first;
                while self.pages.contains_key(&page) {
                    page += 1;
                }
                return Some((page * PAGE_SIZE_U64).max(offset).min(size));
            }
        };
        Some((found * PAGE_SIZE_U64).max(offset)).filter(|found| *found < size)
    }

    fn page(&mut self, page: u64) -> &mut [u8; PAGE_SIZE] {
        self.pages.entry(page).or_insert_with(|| Box::new([0; PAGE_SIZE]))
    }
}

/// Splits a byte range at page boundaries: (page, first byte within it, length).
fn parts(offset: u64, end: u64) -> impl Iterator<Item = (u64, usize, usize)> {
    let mut at = offset;
    std::iter::from_fn(move || {
        if at >= end {
            return None;
        }
        let in_page = at % PAGE_SIZE_U64;
        let part = (PAGE_SIZE_U64 - in_page).min(end - at);
        let item = (at / PAGE_SIZE_U64, in_page as usize, part as usize);
        at += part;
        Some(item)
    })
}
