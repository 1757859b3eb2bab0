//! The parts of models that do what the server does.

use super::{FOREIGN, NEWER, OWN, RECORD, Site, run};
use crate::files::one_sided_faults::{OneSided, change};
use crate::files::{FileRegion, WriteAt, defragment, return_grant, truncate, write_back_all};
use crate::pool::simdisk::UNWRITTEN_BYTE;
use cuttlefs_common::ids::{FilePage, PAGE_SIZE, PoolPage};
use cuttlefs_common::rdma::{FileTarget, FileValue, FileWrite, WcStatus};
use cuttlefs_common::region::ExtentState;
use cuttlefs_common::status::Status;

impl Site {
    /// A WRITE of the first session over the first bytes of the file, by the engine. It may be refused, or be a fault.
    pub fn write(&self) {
        let (owner, key) = self.sessions[0];
        match self.files.write_file(owner, key, 0, &[NEWER; RECORD]) {
            Ok(FileWrite::Done) => self.noted.lock().is_written = true,
            Ok(FileWrite::Faults) | Err(WcStatus::RemoteAccess) => {}
            Err(other) => self.must(false, || format!("a WRITE ends with {other:?}")),
        }
    }

    /// A WRITE, and then a write-back, behind which it is durable. Only where nobody cuts the file.
    pub fn write_and_sync(&self) {
        self.write();
        self.write_back();
        if self.noted.lock().is_written {
            let pool = Self::pools(&self.file)[0];
            let bytes = self.disk.peek(pool.0);
            self.must(bytes[..RECORD] == [NEWER; RECORD], || {
                "a change that was synced is not durable".into()
            });
        }
    }

    /// An APPEND: by the engine, and by a worker if that is a fault.
    fn append(&self, who: usize, byte: u8) {
        let (owner, key) = self.sessions[who];
        let bytes = [byte; RECORD];
        let placed = match self.files.append_file(owner, key, &bytes) {
            Ok(FileValue::Done(at)) => Ok(at),
            Ok(FileValue::Faults) => {
                let what = OneSided::Append { bytes: bytes.to_vec() };
                run(change(&self.files, &self.disk, (owner, key), what))
            }
            // A cut ends the grant.
            Err(WcStatus::RemoteAccess) => Err(Status::Denied),
            Err(_) => Err(Status::Io),
        };
        self.note_appended(placed, byte);
    }

    pub(super) fn note_appended(&self, placed: Result<u64, Status>, byte: u8) {
        match placed {
            Ok(at) => self.noted.lock().appended.push((at, byte)),
            Err(Status::Denied) => {}
            Err(why) => self.must(false, || format!("an append ends with {why:?}")),
        }
    }

    /// An APPEND of the first session.
    pub fn append_first(&self) {
        self.append(0, 0x41);
    }

    /// An APPEND of the second session.
    pub fn append_second(&self) {
        self.append(1, 0x42);
    }

    /// An append by request.
    pub fn append_by_request(&self) {
        let written = run(self.write_to(&self.file, WriteAt::End, &[0x43; RECORD]));
        self.note_appended(written, 0x43);
    }

    /// Cuts the file to a length.
    pub fn cut(&self, len: u64) {
        let commit = |commit| {
            self.meta.commit_data(&[commit])?;
            self.meta.attr(self.file.ino())
        };
        let cut = run(truncate(&self.files, &self.disk, &self.file, len, commit));
        self.must(cut.is_ok(), || format!("a cut ends with {cut:?}"));
    }

    /// Cuts the file to nothing and gives its page to the other file. Where the pool has one page, it is this one.
    pub fn cut_and_reuse(&self) {
        self.cut(0);
        self.write_other();
    }

    /// The other file gets a page, with a frame that nobody holds for another page.
    pub fn write_other(&self) {
        let written = run(self.write_to(&self.other, WriteAt::Offset(0), &[FOREIGN; PAGE_SIZE]));
        self.must(written.is_ok(), || format!("a write of the other file ends with {written:?}"));
        for pool in Self::pools(&self.other) {
            self.must(!self.is_pinned(pool), || "a frame is pinned for a page that has left its file".into());
        }
    }

    /// Whether the page is in a frame that is pinned.
    fn is_pinned(&self, pool: PoolPage) -> bool {
        let entry = self.files.pages.residency.load(pool);
        entry.is_resident() && self.files.pages.frames().is_pinned(entry.frame())
    }

    /// Grants the first session the first page, which stays in memory from then on.
    pub fn grant(&self) {
        let granted = self.give_grant(0, 1);
        self.must(granted.is_ok(), || format!("a grant ends with {granted:?}"));
        self.check_granted();
    }

    /// The file's pages are in frames.
    pub fn check_granted(&self) {
        for pool in Self::pools(&self.file) {
            self.must(self.frame_bytes(pool).is_some(), || "a page of a grant was evicted".into());
        }
    }

    /// Returns the first session's grants.
    pub fn return_grant(&self) {
        run(return_grant(&self.file, self.sessions[0].1, 0, u64::MAX));
    }

    /// Moves the file's pages to one run of the pool.
    pub fn defragment(&self) {
        let moved = run(defragment(&self.files, &self.disk, &self.file, FilePage(0)));
        self.must(moved.is_ok_and(|moved| moved.pages > 0), || format!("a move ends with {moved:?}"));
    }

    /// The file's pages lie one behind the other. What a WRITE has put there is there.
    pub fn check_moved(&self) {
        let pools = Self::pools(&self.file);
        self.must(pools.windows(2).all(|two| two[0].0 + 1 == two[1].0), || format!("they lie at {pools:?}"));
        let wanted = if self.noted.lock().is_written { NEWER } else { OWN };
        let bytes = self.contents(&self.file);
        self.must(bytes[..RECORD] == [wanted; RECORD], || "a WRITE is lost".into());
        self.must(bytes[RECORD..].iter().all(|byte| *byte == OWN), || "other bytes have changed".into());
    }

    /// Evicts whatever may go.
    pub fn evict(&self) {
        run(self.files.pages.evict(&self.disk, super::USABLE_FRAMES));
    }

    /// Writes back all files. Whatever the store says then of a file is on the disk.
    pub fn write_back(&self) {
        let written = run(write_back_all(&self.files, &self.disk));
        self.must(written.is_ok(), || format!("a write-back ends with {written:?}"));
        [&self.file, &self.other].into_iter().for_each(|file| self.check_durable(file));
    }

    fn check_durable(&self, file: &FileRegion) {
        let extents = self.meta.extents(file.ino()).expect("extents");
        for extent in extents.iter().filter(|extent| extent.state == ExtentState::Written) {
            for page in extent.pool_page.0..extent.pool_page.0 + extent.len_pages {
                let is_there = self.disk.peek(page).iter().all(|byte| *byte != UNWRITTEN_BYTE);
                self.must(is_there, || "the store has a page whose bytes were not written".into());
            }
        }
    }
}
