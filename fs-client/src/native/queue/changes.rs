//! The changes of a queue: one-sided verbs under write grants, or requests.

use super::reads::Range;
use super::{Done, Queue, RUN_BITS, UnderWay};
use crate::file::Reach;
use crate::file::volume::WriteHow;
use crate::native::session::Opened;
use crate::native::{File, NativeError};
use crate::session::Life;
use crate::transport::{Posted, Refusal, Verb};
use cuttlefs_common::ids::FileKey;
use cuttlefs_common::rdma::{FileAtomic, Remote};
use cuttlefs_common::status::Status;
use std::sync::Arc;

/// What a change does.
pub(super) enum What {
    /// Overwrites from this offset on.
    Write(u64, Range),
    Append(Range),
    /// An atomic of the word at this offset.
    Word(u64, FileAtomic),
}

/// A change whose verb is under way.
pub(super) struct ChangeUnderWay {
    file: Arc<Opened>,
    what: What,
    filekey: FileKey,
    life: Life,
    sync: bool,
}

impl What {
    fn reach(&self) -> Reach {
        match self {
            Self::Write(offset, range) => Reach::range(*offset, range.len),
            Self::Append(_) => Reach::End,
            Self::Word(offset, _) => Reach::range(*offset, 8),
        }
    }
}

impl Queue {
    /// Begins a change. If it goes one-sidedly, its verb is added to `posts`.
    pub(super) fn begin_change(&mut self, number: u64, file: &File, what: What, posts: &mut Vec<Posted>) {
        self.writes.insert((file.ino(), number));
        let sync = file.is_sync();
        let file = file.opened().clone();
        let is_empty = match &what {
            What::Write(_, range) | What::Append(range) => range.len == 0,
            What::Word(..) => false,
        };
        let volume = self.session.volume().clone();
        // What is to be durable at once is a request.
        if !is_empty
            && !sync
            && let Some(lane) = &mut self.lane
            && let Some(post) = volume.postable(&file.state, what.reach())
            && lane.is_ready(&**volume.session(), post.session)
            && posts.len() < lane.room()
        {
            let remote = |offset| Remote::File { filekey: post.filekey, offset };
            let verb = match &what {
                What::Write(offset, range) => {
                    let local = range.buffer.sge(range.at, range.len);
                    Verb::Write { remote: remote(*offset), local }
                }
                What::Append(range) => {
                    Verb::Append { filekey: post.filekey, local: range.buffer.sge(range.at, range.len) }
                }
                What::Word(offset, FileAtomic::CompareSwap { expect, swap }) => {
                    Verb::CompareSwap { remote: remote(*offset), expect: *expect, swap: *swap }
                }
                What::Word(offset, FileAtomic::FetchAdd { add }) => {
                    Verb::FetchAdd { remote: remote(*offset), add: *add }
                }
            };
            posts.push(Posted { id: number << RUN_BITS, verb });
            let change = ChangeUnderWay { file, what, filekey: post.filekey, life: post.life, sync };
            self.under_way.insert(number, UnderWay::Change(change));
            return;
        }
        self.change_by_request(number, file, what, sync);
    }

    /// Has a thread do it: it waits where that is needed, asks for lost grants again, and finds the way by itself.
    fn change_by_request(&mut self, number: u64, file: Arc<Opened>, what: What, sync: bool) {
        let caller = self.session.caller();
        self.spawn(number, move || {
            let (offset, range, append) = match what {
                What::Word(offset, operation) => {
                    return Ok(Done::Old(file.atomic(&caller, offset, operation, sync)?));
                }
                What::Write(offset, range) => (offset, range, false),
                What::Append(range) => (0, range, true),
            };
            let mut bytes = vec![0; range.len];
            range.buffer.read(range.at, &mut bytes)?;
            let how = WriteHow { append, sync };
            let (first, mut done) = file.write(&caller, offset, &bytes, how)?;
            while done < bytes.len() {
                done += file.write(&caller, first + done as u64, &bytes[done..], how)?.1;
            }
            Ok(Done::Written { offset: first, len: done })
        });
    }

    /// The verb of a change is done; `value` came back.
    pub(super) fn changed(&mut self, number: u64, change: &ChangeUnderWay, value: u64) {
        let ChangeUnderWay { file, what, life, .. } = change;
        let (append_len, done) = match what {
            What::Write(offset, range) => (None, Done::Written { offset: *offset, len: range.len }),
            What::Append(range) => (Some(range.len), Done::Written { offset: value, len: range.len }),
            What::Word(..) => (None, Done::Old(value)),
        };
        self.session.volume().note_changed(&file.state, append_len, *life, value);
        self.end(number, Ok(done));
    }

    /// The server has refused the verb. If that is for lack of a grant, a thread makes the change by a request.
    pub(super) fn change_refused(&mut self, number: u64, change: ChangeUnderWay, why: Refusal) {
        if why == Refusal::NoSpace {
            return self.end(number, Err(NativeError::Server(Status::NoSpace)));
        }
        let ChangeUnderWay { file, what, filekey, sync, .. } = change;
        self.session.volume().note_refused(&file.state, filekey, what.reach());
        self.change_by_request(number, file, what, sync);
    }

    /// The connection broke. A write is done again, as it does the same; an append or atomic only if it was not done.
    pub(super) fn change_broken(&mut self, number: u64, change: ChangeUnderWay, is_undone: bool) {
        if is_undone || matches!(change.what, What::Write(..)) {
            self.change_by_request(number, change.file, change.what, change.sync);
        } else {
            self.end(number, Err(NativeError::MayBeDone));
        }
    }
}
