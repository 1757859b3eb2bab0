//! The reads of a queue: out of mapped frames, by READs, or by requests.

use super::{Done, Queue, RUN_BITS, UnderWay};
use crate::native::session::Opened;
use crate::native::{Buffer, File};
use crate::read::{Part, PlannedRead};
use crate::transport::{Posted, Verb};
use cuttlefs_common::region::{PageSet, divide};
use std::sync::Arc;

/// A range of a buffer that a request is for.
pub(super) struct Range {
    pub(super) buffer: Buffer,
    pub(super) at: usize,
    pub(super) len: usize,
}

/// A read whose READs are under way.
pub(super) struct ReadUnderWay {
    pub(super) file: Arc<Opened>,
    pub(super) offset: u64,
    pub(super) range: Range,
    planned: PlannedRead,
    runs_left: usize,
}

impl Queue {
    /// Begins a read. If it goes by READs, they are added to `posts`.
    pub(super) fn begin_read(
        &mut self,
        number: u64,
        file: &File,
        offset: u64,
        range: Range,
        posts: &mut Vec<Posted>,
    ) {
        let volume = self.session.volume().clone();
        let mut part = Part { memory: range.buffer.memory(), start: range.at, len: range.len };
        if let Some(got) = volume.read_mapped(file.state(), offset, &mut part) {
            return self.end(number, Ok(Done::Read(got)));
        }
        if let Some(lane) = &mut self.lane
            && let Some((planned, session)) = volume.plan_read(file.state(), offset, range.len)
            && lane.is_ready(&**volume.session(), session)
            && planned.runs().len() <= lane.room().saturating_sub(posts.len())
        {
            posts.extend((0..).zip(planned.runs()).map(|(run, &(start, len))| {
                let local = range.buffer.sge(range.at + start, len);
                let verb = Verb::Read { remote: planned.remote(start), local };
                Posted { id: number << RUN_BITS | run, verb }
            }));
            let runs_left = planned.runs().len();
            let file = file.opened().clone();
            let read = ReadUnderWay { file, offset, range, planned, runs_left };
            self.under_way.insert(number, UnderWay::Read(read));
            return;
        }
        self.read_by_request(number, file.opened().clone(), offset, range);
    }

    /// Has a thread read all of it.
    pub(super) fn read_by_request(&mut self, number: u64, file: Arc<Opened>, offset: u64, range: Range) {
        let caller = self.session.caller();
        self.spawn(number, move || {
            let mut bytes = vec![0; range.len];
            let got = file.read_into(&caller, offset, &mut bytes)?;
            range.buffer.write(range.at, &bytes[..got])?;
            Ok(Done::Read(got))
        });
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
            let got = file.volume().fetch_into(&caller, &file.state, offset, &missing, &mut bytes);
            let got = got.map_err(|error| file.explained(error))?;
            for (index, part) in divide(offset, got).enumerate() {
                if missing.contains(index) {
                    let at = part.offset_in_request;
                    range.buffer.write(range.at + at, &bytes[at..at + part.len])?;
                }
            }
            Ok(Done::Read(got))
        });
    }

    /// A run of a read has come.
    pub(super) fn came(&mut self, number: u64, run: u64, len: usize) {
        let Some(UnderWay::Read(read)) = self.under_way.get_mut(&number) else { return };
        let is_sound = read.planned.came(run as usize, len);
        if is_sound {
            read.runs_left -= 1;
            if read.runs_left > 0 {
                return;
            }
        }
        let Some(UnderWay::Read(read)) = self.under_way.remove(&number) else { return };
        let ReadUnderWay { file, offset, range, planned, .. } = read;
        if !is_sound {
            tracing::error!("the server's RNIC sent more than was asked for");
            return self.read_by_request(number, file, offset, range);
        }
        let look = |at: usize, out: &mut [u8]| range.buffer.memory().read(range.at + at, out);
        let (valid_len, missing) = planned.finish(self.session.volume().reads(), look);
        if missing.is_empty() {
            return self.end(number, Ok(Done::Read(valid_len)));
        }
        self.fetch(number, (file, offset, range), missing, valid_len);
    }
}
