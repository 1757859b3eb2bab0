//! The reads of a queue: out of mapped frames, by READs, or by requests.

use super::{Done, Queue, RUN_BITS};
use crate::native::session::Opened;
use crate::native::{Buffer, File};
use crate::read::{Part, PlannedRead};
use crate::transport::{PostedRead, ReadEnd};
use cuttlefs_common::region::{PageSet, divide};
use std::sync::Arc;

/// A range of a buffer that a request is for.
pub(super) struct Range {
    pub(super) buffer: Buffer,
    pub(super) at: usize,
    pub(super) len: usize,
}

/// A read whose READs are under way.
pub(super) struct UnderWay {
    file: Arc<Opened>,
    offset: u64,
    range: Range,
    planned: PlannedRead,
    runs_left: usize,
}

impl Queue {
    /// Begins a read. If it goes by READs, they are added to `reads`.
    pub(super) fn begin_read(
        &mut self,
        number: u64,
        file: &File,
        offset: u64,
        range: Range,
        reads: &mut Vec<PostedRead>,
    ) {
        let volume = self.session.volume().clone();
        let mut part = Part { memory: range.buffer.memory(), start: range.at, len: range.len };
        if let Some(got) = volume.read_mapped(file.state(), offset, &mut part) {
            return self.end(number, Ok(Done::Read(got)));
        }
        if let Some(lane) = &mut self.lane
            && let Some((planned, session)) = volume.plan_read(file.state(), offset, range.len)
            && lane.is_ready(&**volume.session(), session)
            && planned.runs().len() <= lane.room().saturating_sub(reads.len())
        {
            reads.extend((0..).zip(planned.runs()).map(|(run, &(start, len))| PostedRead {
                id: number << RUN_BITS | run,
                remote: planned.remote(start),
                local: range.buffer.sge(range.at + start, len),
            }));
            let runs_left = planned.runs().len();
            let file = file.opened().clone();
            self.under_way.insert(number, UnderWay { file, offset, range, planned, runs_left });
            return;
        }
        self.read_by_request(number, file.opened().clone(), offset, range);
    }

    /// Has a thread read all of it.
    fn read_by_request(&mut self, number: u64, file: Arc<Opened>, offset: u64, range: Range) {
        let caller = self.session.caller();
        self.spawn(number, move || {
            let mut bytes = vec![0; range.len];
            let got = file.volume().read_into(&caller, &file.state, offset, &mut bytes)?;
            range.buffer.write(range.at, &bytes[..got])?;
            Ok(Done::Read(got))
        });
    }

    /// The lane's connection broke: threads ask for what was under way, and find out why.
    pub(super) fn read_by_requests(&mut self) {
        for (number, read) in std::mem::take(&mut self.under_way) {
            self.read_by_request(number, read.file, read.offset, read.range);
        }
    }

    /// Has a thread fetch the missing pages of a read; the others are in the buffer.
    fn fetch(
        &mut self,
        number: u64,
        (file, offset, range): (Arc<Opened>, u64, Range),
        missing: PageSet,
        valid_len: usize,
    ) {
        let caller = self.session.caller();
        self.spawn(number, move || {
            let mut bytes = vec![0; valid_len];
            let got = file.volume().fetch_into(&caller, &file.state, offset, &missing, &mut bytes)?;
            for (index, part) in divide(offset, got).enumerate() {
                if missing.contains(index) {
                    let at = part.offset_in_request;
                    range.buffer.write(range.at + at, &bytes[at..at + part.len])?;
                }
            }
            Ok(Done::Read(got))
        });
    }

    /// Takes the end of a READ, or of all of them.
    pub(super) fn read_ended(&mut self, end: ReadEnd) {
        match end {
            ReadEnd::Came { id, len } => self.came(id >> RUN_BITS, id & ((1 << RUN_BITS) - 1), len),
            ReadEnd::Broken => self.read_by_requests(),
        }
    }

    fn came(&mut self, number: u64, run: u64, len: usize) {
        let Some(read) = self.under_way.get_mut(&number) else { return };
        if !read.planned.came(run as usize, len) {
            tracing::error!("the server's RNIC sent more than was asked for");
            let Some(read) = self.under_way.remove(&number) else { return };
            return self.read_by_request(number, read.file, read.offset, read.range);
        }
        read.runs_left -= 1;
        if read.runs_left > 0 {
            return;
        }
        let Some(UnderWay { file, offset, range, planned, .. }) = self.under_way.remove(&number) else {
            return;
        };
        let look = |at: usize, out: &mut [u8]| range.buffer.memory().read(range.at + at, out);
        let (valid_len, missing) = planned.finish(self.session.volume().reads(), look);
        if missing.is_empty() {
            return self.end(number, Ok(Done::Read(valid_len)));
        }
        self.fetch(number, (file, offset, range), missing, valid_len);
    }
}
