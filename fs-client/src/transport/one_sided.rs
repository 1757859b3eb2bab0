//! One-sided reads and changes over a borrowed lane, and one-sided writes for comparison.

use super::exchange::Broken;
use super::lane::{DATA_LEN, DATA_OFFSET, MAX_RUNS, PROOFS_OFFSET};
use super::{Attach, FsError, LaneGuard};
use cuttlefs_common::ids::FileKey;
use cuttlefs_common::rdma::{Completion, CompletionKind, FileAtomic, Remote, SendOp, SendWr, WcStatus, WrId};

/// The place in a lane's memory where the bytes of a READ land.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Landing {
    /// At this offset of the data.
    Data(usize),
    /// At this offset of the proofs.
    Proof(usize),
}

/// One READ.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Piece {
    /// The source.
    pub(crate) remote: Remote,
    /// The length in bytes.
    pub(crate) len: usize,
    /// The destination.
    pub(crate) to: Landing,
}

/// A change of a file by one verb.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Change<'b> {
    /// Overwrites bytes, at most `MAX_TRANSFER_BYTES`.
    Write { offset: u64, bytes: &'b [u8] },
    /// Places bytes at the end, at most `MAX_TRANSFER_BYTES`.
    Append { bytes: &'b [u8] },
    /// An atomic of an aligned word.
    Word { offset: u64, operation: FileAtomic },
}

/// What came of a change.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Changed {
    /// It is done: the old word of an atomic, or where an APPEND's bytes are.
    Done(u64),
    /// The target has refused it: nothing was done.
    Refused(Refusal),
    /// The lane is in another session: nothing was done.
    Unsent,
    /// The connection broke: it may be done.
    Unknown,
}

/// Why a target has refused a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Refusal {
    /// It is not granted, or nothing that this target does in this way.
    NotGranted,
    /// The pool is full.
    NoSpace,
}

impl Refusal {
    /// Of a request that ended in this way; `None`: the target may have done something of it.
    pub(super) fn of(status: WcStatus) -> Option<Self> {
        match status {
            WcStatus::RemoteAccess | WcStatus::RemoteInvalid => Some(Self::NotGranted),
            WcStatus::RemoteNoSpace => Some(Self::NoSpace),
            _ => None,
        }
    }
}

impl<S: Attach> LaneGuard<'_, S> {
    /// Reads runs `(offset in request, len)` from the places that `remote` gives; the bytes land in the data at their offset in the request. Returns
    /// as [`Self::read_pieces`].
    pub(crate) fn read_runs(
        &mut self,
        runs: &[(usize, usize)],
        remote: impl Fn(usize) -> Remote,
    ) -> Option<Vec<usize>> {
        let piece =
            |&(start, len): &(usize, usize)| Piece { remote: remote(start), len, to: Landing::Data(start) };
        self.read_pieces(&runs.iter().map(piece).collect::<Vec<_>>())
    }

    /// Reads at most [`MAX_RUNS`] pieces, posted with one doorbell, and waits for them. They may be of any moments of the call. Returns for each the
    /// number of bytes that came, which is smaller where a file ends. `None` if the connection broke or the target refused: the caller then requests
    /// everything by RPC, which also finds out why.
    pub(crate) fn read_pieces(&mut self, pieces: &[Piece]) -> Option<Vec<usize>> {
        if pieces.len() > MAX_RUNS || !self.lane.is_connected() {
            return None;
        }
        let wrs: Vec<SendWr> = pieces
            .iter()
            .enumerate()
            .map(|(index, piece)| {
                let at = match piece.to {
                    Landing::Data(at) => DATA_OFFSET + at,
                    Landing::Proof(at) => PROOFS_OFFSET + at,
                };
                SendWr {
                    wr_id: WrId(index as u64),
                    op: SendOp::Read(piece.remote),
                    local: self.lane.region.sge(at as u64, piece.len as u32).into(),
                    signaled: true,
                }
            })
            .collect();
        let mut lens = vec![0usize; pieces.len()];
        self.execute(&wrs, CompletionKind::Read, |done| {
            *lens.get_mut(done.wr_id.0 as usize)? = done.byte_len as usize;
            Some(())
        })?;
        Some(lens)
    }

    /// Connects if needed, and writes bytes, at most `MAX_TRANSFER_BYTES`, to a place at the server of this session. `false` if the lane is in
    /// another session by now, or the target refused, or the connection broke; in the last case it is not known which bytes are there.
    pub(crate) fn write_place(
        &mut self,
        session: u64,
        remote: Remote,
        bytes: &[u8],
    ) -> Result<bool, FsError> {
        self.lane.ensure(self.session, true)?;
        if bytes.len() > DATA_LEN || !self.is_attached_to(session) {
            return Ok(false);
        }
        self.lane.region.memory().write(DATA_OFFSET, bytes);
        let local = self.lane.region.sge(DATA_OFFSET as u64, bytes.len() as u32);
        let wr = SendWr { wr_id: WrId(0), op: SendOp::Write(remote), local: local.into(), signaled: true };
        Ok(self.execute(&[wr], CompletionKind::Write, |_| Some(())).is_some())
    }

    /// Connects if needed, and changes a file that is open by `filekey` in the session `session`.
    ///
    /// # Errors
    /// `ShutDown`; `Interrupted` before anything was sent.
    pub(crate) fn change(
        &mut self,
        session: u64,
        filekey: FileKey,
        change: Change<'_>,
    ) -> Result<Changed, FsError> {
        self.lane.ensure(self.session, true)?;
        if !self.is_attached_to(session) {
            return Ok(Changed::Unsent);
        }
        let (memory, sge) =
            (self.lane.region.memory(), |at: usize, len: usize| self.lane.region.sge(at as u64, len as u32));
        let value = sge(PROOFS_OFFSET, 8);
        let remote = |offset| Remote::File { filekey, offset };
        let (op, local) = match change {
            Change::Write { offset, bytes } => {
                memory.write(DATA_OFFSET, bytes);
                (SendOp::Write(remote(offset)), sge(DATA_OFFSET, bytes.len()))
            }
            Change::Append { bytes } => {
                memory.write(DATA_OFFSET, bytes);
                (SendOp::Append { filekey, placed: value }, sge(DATA_OFFSET, bytes.len()))
            }
            Change::Word { offset, operation: FileAtomic::CompareSwap { expect, swap } } => {
                (SendOp::CompareSwap { remote: remote(offset), expect, swap }, value)
            }
            Change::Word { offset, operation: FileAtomic::FetchAdd { add } } => {
                (SendOp::FetchAdd { remote: remote(offset), add }, value)
            }
        };
        let kind = op.kind();
        if self.lane.post(&[SendWr { wr_id: WrId(0), op, local: local.into(), signaled: true }]).is_err() {
            self.lane.disconnect();
            return Ok(Changed::Unknown);
        }
        let link = self.session.link();
        let ended = loop {
            match self.lane.next_completion(link) {
                Ok(completion) if completion.kind == kind => break completion.status,
                Ok(completion) if self.lane.pass_over(&completion).is_ok() => {}
                Err(Broken::ShutDown) => return Err(FsError::ShutDown),
                _ => break WcStatus::Disconnected,
            }
        };
        if ended == WcStatus::Success {
            let mut bytes = [0; 8];
            self.lane.region.memory().read(PROOFS_OFFSET, &mut bytes);
            return Ok(Changed::Done(u64::from_le_bytes(bytes)));
        }
        self.lane.disconnect();
        Ok(Refusal::of(ended).map_or(Changed::Unknown, Changed::Refused))
    }

    /// Posts requests of one kind, hands each completion to `take`, and waits until all are done.
    fn execute(
        &mut self,
        wrs: &[SendWr],
        kind: CompletionKind,
        mut take: impl FnMut(&Completion) -> Option<()>,
    ) -> Option<()> {
        let link = self.session.link();
        let mut outstanding = wrs.len();
        self.lane.post(wrs).ok()?;
        while outstanding > 0 {
            match self.lane.next_completion(link) {
                Ok(completion) if completion.kind == kind => {
                    if completion.status != WcStatus::Success {
                        self.lane.disconnect();
                        return None;
                    }
                    take(&completion)?;
                    outstanding -= 1;
                }
                Ok(completion) => {
                    if self.lane.pass_over(&completion).is_err() {
                        self.lane.disconnect();
                        return None;
                    }
                }
                Err(_) => {
                    self.lane.disconnect();
                    return None;
                }
            }
        }
        Some(())
    }
}
