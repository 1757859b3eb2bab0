//! Files that are made, extended, cut and unlinked, so that pool pages move from file to file all the time.

use super::actors::{Churned, World, had_room};
use super::running::{CALLER, READ_WRITE, read};
use super::words::{WORDS, bytes_of, version_of, words};
use cuttlefs_client::file::volume::Volume;
use cuttlefs_common::attr::SetAttr;
use cuttlefs_common::ids::{InodeNo, PAGE_SIZE, PAGE_SIZE_U64};
use std::sync::atomic::Ordering;

/// The number of files at a time.
const PLACES: u64 = 3;
/// The most pages of such a file.
const MOST_PAGES: u64 = 40;
/// The file number of the first one.
const FIRST_FILE: u64 = 1000;
/// How many changes are made to a file before it is unlinked.
const CHANGES: u64 = 12;

impl World<'_> {
    /// Makes one file after another. Each replaces the one that had its name.
    pub fn churner(&self) {
        let draw = self.random(50);
        let mut steps = 0;
        let mut file = FIRST_FILE;
        while self.goes_on(steps, 1) {
            let client = draw(4) as usize;
            let volume = self.clients[client];
            let name = format!("churned-{}", file % PLACES);
            if file >= FIRST_FILE + PLACES {
                volume.unlink(&CALLER, InodeNo::ROOT, name.as_bytes()).expect("unlink");
                self.churned.lock().remove(0);
            }
            let made = volume.create(&CALLER, InodeNo::ROOT, name.as_bytes(), 0o644, true, READ_WRITE);
            let (attr, opened) = made.expect("create");
            self.churned.lock().push(Churned { ino: attr.ino, file });
            for version in 1..=CHANGES {
                steps += 1;
                let page = draw(MOST_PAGES);
                if draw(4) == 0 {
                    // Any size that is a multiple of eight bytes.
                    let size = page * PAGE_SIZE_U64 + draw(WORDS as u64) * 8;
                    let set = SetAttr { size: Some(size), ..SetAttr::default() };
                    volume.set_attr(&CALLER, attr.ino, set).expect("truncate");
                } else {
                    let pages = (1 + draw(8)).min(MOST_PAGES - page);
                    let bytes: Vec<u8> =
                        (page..page + pages).flat_map(|at| bytes_of(file, at, version, WORDS)).collect();
                    had_room(volume.write(&CALLER, opened.handle, page * PAGE_SIZE_U64, &bytes));
                }
            }
            volume.release(opened.handle);
            // A word holds sixteen bits of the file number.
            file = if file < 60_000 { file + 1 } else { FIRST_FILE + PLACES };
        }
    }

    /// Reads such files, also after they were unlinked: it must find their own words or zeros, or an earlier end.
    pub fn churn_reader(&self, client: usize) {
        let draw = self.random(200 + client as u64);
        while self.running() {
            let found = {
                let churned = self.churned.lock();
                if churned.is_empty() { None } else { Some(churned[draw(churned.len() as u64) as usize]) }
            };
            let Some((found, handle)) = found.and_then(|f| Some((f, self.open_to_read(client, f.ino)?)))
            else {
                std::thread::yield_now();
                continue;
            };
            for _ in 0..1 + draw(30) {
                let first = draw(MOST_PAGES);
                let len = (1 + draw(6)) as u32 * PAGE_SIZE as u32;
                let got = read(self.clients[client], handle, first * PAGE_SIZE_U64, len).expect("read");
                assert_eq!(got.len() % 8, 0, "it is cut between words");
                for (page, part) in (first..).zip(got.chunks(PAGE_SIZE)) {
                    for word in words(part) {
                        let version = version_of(found.file, page, word);
                        assert!(version.is_none_or(|version| (1..=CHANGES).contains(&version)));
                    }
                }
                self.churned_reads.fetch_add(1, Ordering::Relaxed);
            }
            self.clients[client].release(handle);
        }
    }
}
