//! One-sided reads, and writes for comparison.

use super::lane::{DATA_LEN, DATA_OFFSET, MAX_RUNS, PROOFS_OFFSET};
use super::{Attach, FsError, LaneGuard};
use cuttlefs_common::rdma::{Completion, CompletionKind, Remote, SendOp, SendWr, WcStatus, WrId};

/// Where in a lane's memory what is read lands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Landing {
    /// At an offset of the data.
    Data(usize),
    /// At an offset of the proofs.
    Proof(usize),
}

/// One READ.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Piece {
    /// What is read.
    pub(crate) remote: Remote,
    /// Bytes.
    pub(crate) len: usize,
    /// Where they land.
    pub(crate) to: Landing,
}

impl<S: Attach> LaneGuard<'_, S> {
    /// Reads runs `(offset in request, len)`, which `remote` places; bytes land in the data at their offset in the request. As
    /// [`Self::read_pieces`].
    pub(crate) fn read_runs(
        &mut self,
        runs: &[(usize, usize)],
        remote: impl Fn(usize) -> Remote,
    ) -> Option<Vec<usize>> {
        let piece =
            |&(start, len): &(usize, usize)| Piece { remote: remote(start), len, to: Landing::Data(start) };
        self.read_pieces(&runs.iter().map(piece).collect::<Vec<_>>())
    }

    /// Reads, at most [`MAX_RUNS`], all posted with one doorbell, one after the other. Returns for each how many bytes came, fewer where a
    /// file ends, or `None` if the connection broke or the target refused: then everything is asked for by RPC, which also finds out
    /// why.
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
                    local: self.lane.region.sge(at as u64, piece.len as u32),
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

    /// Connects, if need be, and writes bytes, at most a transfer's, to a place of the server that this session is with. `false` if there
    /// is another session by now, if the target refused, or if the connection broke, and then nobody knows what is there.
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
        let wr = SendWr { wr_id: WrId(0), op: SendOp::Write(remote), local, signaled: true };
        Ok(self.execute(&[wr], CompletionKind::Write, |_| Some(())).is_some())
    }

    /// Posts requests of one kind and waits until all are done, with their completions for `take`.
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
