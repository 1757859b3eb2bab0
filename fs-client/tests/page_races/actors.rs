//! The threads that write and read at the same time.

use super::native_writer::NativeWriter;
use super::running::{CALLER, READ, READ_WRITE, read};
use super::words::{PageState, WORDS, bytes_of, cut_of};
use cuttlefs_client::file::RemoteVolume;
use cuttlefs_client::file::volume::{FsError, Handle, Volume};
use cuttlefs_common::attr::SetAttr;
use cuttlefs_common::ids::{FilePage, InodeNo, PAGE_SIZE_U64};
use cuttlefs_common::rpc::Allocate;
use cuttlefs_common::status::Status;
use cuttlefs_common::world::{Random, SeededRandom};
use parking_lot::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Instant;

/// The number of files with one writer each.
const FILES: usize = 3;
/// The number of pages of each file. Together the files have more than twice as many pages as there are frames.
const FILE_PAGES: u64 = 72;
/// The number of steps of a writer, if no time is given.
const STEPS: u64 = 900;

/// A file that exists for a while only.
#[derive(Clone, Copy)]
pub struct Churned {
    pub ino: InodeNo,
    /// The file number in its words.
    pub file: u64,
}

/// State that all threads share.
pub struct World<'a> {
    /// The clients: over tcp, over shm, over tcp reading the tables, over shm; or all over an RNIC.
    pub clients: [&'a RemoteVolume; 4],
    pub churned: Mutex<Vec<Churned>>,
    pub churned_reads: AtomicU64,
    /// Pages that were moved.
    pub moved: AtomicU64,
    handles: [[Handle; 4]; FILES],
    /// The writer of the first file, where the links have one-sided changes of files; else its writer is one as the others.
    native: Option<&'a NativeWriter>,
    pages: Vec<Vec<PageState>>,
    seed: u64,
    until: Option<Instant>,
    stop: AtomicBool,
}

/// Ends the run when its thread panics.
struct EndOnPanic<'a>(&'a AtomicBool);

impl Drop for EndOnPanic<'_> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.0.store(true, Ordering::SeqCst);
        }
    }
}

/// Whether there was room for a change. Panics if the change failed for another reason.
pub fn had_room<T>(result: Result<T, FsError>) -> bool {
    match result {
        Ok(_) => true,
        Err(FsError::Server(Status::NoSpace)) => false,
        Err(error) => panic!("{error}"),
    }
}

impl<'a> World<'a> {
    /// Makes files of holes and opens them at every client.
    pub fn new(
        clients: [&'a RemoteVolume; 4],
        native: Option<&'a NativeWriter>,
        seed: u64,
        until: Option<Instant>,
    ) -> Self {
        let handles = std::array::from_fn(|file| {
            let name = format!("file-{file}");
            let made = clients[0].create(&CALLER, InodeNo::ROOT, name.as_bytes(), 0o644, true, READ_WRITE);
            let (attr, opened) = made.expect("create");
            if let Some(native) = native.filter(|_| file == 0) {
                native.open(&name);
            }
            let size = SetAttr { size: Some(FILE_PAGES * PAGE_SIZE_U64), ..SetAttr::default() };
            clients[0].set_attr(&CALLER, attr.ino, size).expect("truncate");
            clients[0].release(opened.handle);
            clients.map(|client| client.open(&CALLER, attr.ino, READ_WRITE).expect("open").handle)
        });
        let pages = (0..FILES).map(|_| (0..FILE_PAGES).map(|_| PageState::new()).collect()).collect();
        Self {
            clients,
            churned: Mutex::default(),
            churned_reads: AtomicU64::new(0),
            moved: AtomicU64::new(0),
            handles,
            native,
            pages,
            seed,
            until,
            stop: AtomicBool::new(false),
        }
    }

    /// Runs a thread's part. If it panics, all threads end.
    pub fn bounded(&self, part: impl FnOnce()) {
        let _end = EndOnPanic(&self.stop);
        part();
    }

    pub fn stop(&self) {
        self.stop.store(true, Ordering::SeqCst);
    }

    pub fn running(&self) -> bool {
        !self.stop.load(Ordering::SeqCst)
    }

    /// A source of random numbers for one thread.
    pub fn random(&self, thread: u64) -> impl Fn(u64) -> u64 + use<> {
        let random = SeededRandom::new(self.seed ^ thread.wrapping_mul(0x9e37_79b9_7f4a_7c15));
        move |below| random.next_u64() % below
    }

    /// Whether a bounded thread goes on after this many steps.
    pub fn goes_on(&self, steps: u64, share: u64) -> bool {
        self.running() && self.until.map_or(steps < STEPS / share, |until| Instant::now() < until)
    }

    pub fn churned_reads(&self) -> u64 {
        self.churned_reads.load(Ordering::Relaxed)
    }

    /// Writes and punches pages of its file: natively, or through a random client each time.
    pub fn writer(&self, file: usize) {
        let draw = self.random(1 + file as u64);
        let mut steps = 0;
        while self.goes_on(steps, 1) {
            steps += 1;
            let client = draw(4) as usize;
            let (volume, handle) = (self.clients[client], self.handles[file][client]);
            let native = self.native.filter(|_| file == 0);
            let put = |offset: u64, bytes: &[u8]| match native {
                Some(native) => native.write(offset, bytes, FILE_PAGES * PAGE_SIZE_U64),
                None => had_room(volume.write(&CALLER, handle, offset, bytes)),
            };
            // Half of the changes are in a sixth of the pages, so that some pages are hot.
            let first = draw(if draw(2) == 0 { FILE_PAGES / 6 } else { FILE_PAGES });
            let count = (1 + draw(3)).min(FILE_PAGES - first);
            match draw(10) {
                0 => self.punch(file, volume, handle, first, count),
                1 => volume.fsync(&CALLER, handle, true).expect("fsync"),
                2..=4 => self.write_whole(file, &put, first, count),
                _ => self.write_page(file, &put, first),
            }
        }
    }

    fn punch(&self, file: usize, volume: &RemoteVolume, handle: Handle, first: u64, count: u64) {
        let pages = &self.pages[file][first as usize..(first + count) as usize];
        let versions: Vec<u64> = pages.iter().map(|page| page.begin(true)).collect();
        let (offset, len) = (first * PAGE_SIZE_U64, count * PAGE_SIZE_U64);
        volume.allocate(&CALLER, handle, offset, len, Allocate::PunchHole).expect("punch");
        pages.iter().zip(versions).for_each(|(page, version)| page.end(version));
    }

    /// Writes several pages at once, all with versions that are not cut.
    fn write_whole(&self, file: usize, put: &dyn Fn(u64, &[u8]) -> bool, first: u64, count: u64) {
        let name = file as u64 + 1;
        let pages = &self.pages[file][first as usize..(first + count) as usize];
        let versions: Vec<u64> = (first..)
            .zip(pages)
            .map(|(at, page)| {
                let mut version = page.begin(false);
                while cut_of(name, at, version) != 0 {
                    version = page.begin(false);
                }
                version
            })
            .collect();
        let bytes: Vec<u8> =
            (first..).zip(&versions).flat_map(|(at, version)| bytes_of(name, at, *version, WORDS)).collect();
        if put(first * PAGE_SIZE_U64, &bytes) {
            pages.iter().zip(versions).for_each(|(page, version)| page.end(version));
        }
    }

    /// Writes one page, in two parts if its version is cut.
    fn write_page(&self, file: usize, put: &dyn Fn(u64, &[u8]) -> bool, at: u64) {
        let name = file as u64 + 1;
        let page = &self.pages[file][at as usize];
        let version = page.begin(false);
        let cut = cut_of(name, at, version);
        let rear = bytes_of(name, at, version, WORDS - cut);
        if !put(at * PAGE_SIZE_U64 + cut as u64 * 8, &rear) {
            return;
        }
        if cut > 0 {
            let front = bytes_of(name, at, version, cut);
            // The page exists by now, so there is room.
            assert!(put(at * PAGE_SIZE_U64, &front), "there is room");
        }
        page.end(version);
    }

    /// Moves pages of the files to fewer runs of the pool, under all handles, until all else has stopped.
    pub fn mover(&self) {
        let draw = self.random(60);
        while self.running() {
            let (file, client) = (draw(FILES as u64) as usize, draw(4) as usize);
            let volume = self.clients[client];
            let (handle, first) = (self.handles[file][client], FilePage(draw(FILE_PAGES)));
            match volume.defragment(&CALLER, handle, first) {
                Ok(moved) => _ = self.moved.fetch_add(moved.pages, Ordering::Relaxed),
                Err(FsError::Server(Status::NoSpace)) => {}
                Err(error) => panic!("{error}"),
            }
        }
    }

    /// Reads whole pages, parts of pages and spans of several pages through one client.
    pub fn reader(&self, client: usize) {
        let draw = self.random(100 + client as u64);
        while self.running() {
            let file = draw(FILES as u64) as usize;
            let first = draw(if draw(2) == 0 { FILE_PAGES / 6 } else { FILE_PAGES });
            let (mut offset, mut len) = (first * PAGE_SIZE_U64, PAGE_SIZE_U64);
            match draw(3) {
                0 => {}
                1 => {
                    let word = draw(WORDS as u64);
                    (offset, len) = (offset + word * 8, (1 + draw(WORDS as u64 - word)) * 8);
                }
                _ => {
                    offset += draw(WORDS as u64) * 8;
                    len = (1 + draw(5 * WORDS as u64)) * 8;
                }
            }
            self.read_and_judge(file, client, offset, len.min(FILE_PAGES * PAGE_SIZE_U64 - offset));
        }
    }

    fn read_and_judge(&self, file: usize, client: usize, offset: u64, len: u64) {
        let pages = offset / PAGE_SIZE_U64..(offset + len).div_ceil(PAGE_SIZE_U64);
        let state = |page: u64| &self.pages[file][page as usize];
        let floors: Vec<u64> = pages.clone().map(|page| state(page).done()).collect();
        let got = read(self.clients[client], self.handles[file][client], offset, len as u32).expect("read");
        assert_eq!(got.len() as u64, len, "the file's length stands");
        for (page, floor) in pages.zip(floors) {
            let start = (page * PAGE_SIZE_U64).max(offset);
            let end = ((page + 1) * PAGE_SIZE_U64).min(offset + len);
            let part = &got[(start - offset) as usize..(end - offset) as usize];
            let first_word = (start % PAGE_SIZE_U64 / 8) as usize;
            state(page).judge(file as u64 + 1, page, first_word, floor, part);
        }
    }

    /// After all changes: checks that every client reads the last version of every page.
    pub fn finish(&self) {
        for client in 0..4 {
            for (file, handles) in self.handles.iter().enumerate() {
                for page in 0..FILE_PAGES {
                    self.read_and_judge(file, client, page * PAGE_SIZE_U64, PAGE_SIZE_U64);
                }
                self.clients[client].release(handles[client]);
            }
        }
    }

    /// Opens a file for reading; `None` if it is gone.
    pub fn open_to_read(&self, client: usize, ino: InodeNo) -> Option<Handle> {
        match self.clients[client].open(&CALLER, ino, READ) {
            Ok(opened) => Some(opened.handle),
            Err(FsError::Server(Status::NotFound | Status::Stale)) => None,
            Err(error) => panic!("{error}"),
        }
    }
}
