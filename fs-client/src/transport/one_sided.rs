//! One-sided reads: what the target's NIC translates.

use super::lane::{DATA_OFFSET, MAX_RUNS};
use super::{Attach, LaneGuard};
use cuttlefs_common::rdma::{CompletionKind, Remote, SendOp, SendWr, WcStatus, WrId};

impl<S: Attach> LaneGuard<'_, S> {
    /// Reads runs `(offset in request, len)`, which `remote` places, all posted with one doorbell; bytes land in the data buffer at their
    /// offset in the request. Returns for each run how many came, fewer where a file ends, or `None` if the connection broke or
    /// the target refused: then everything is asked for by RPC, which also finds out why.
    pub(crate) fn read_runs(
        &mut self,
        runs: &[(usize, usize)],
        remote: impl Fn(usize) -> Remote,
    ) -> Option<Vec<usize>> {
        if runs.len() > MAX_RUNS || !self.lane.is_connected() {
            return None;
        }
        let link = self.session.link();
        let wrs: Vec<SendWr> = runs
            .iter()
            .enumerate()
            .map(|(index, &(start, len))| SendWr {
                wr_id: WrId(index as u64),
                op: SendOp::Read(remote(start)),
                local: self.lane.region.sge((DATA_OFFSET + start) as u64, len as u32),
                signaled: true,
            })
            .collect();
        let mut lens = vec![0usize; runs.len()];
        let mut outstanding = runs.len();
        self.lane.post(&wrs).ok()?;
        while outstanding > 0 {
            match self.lane.next_completion(link) {
                Ok(completion) if completion.kind == CompletionKind::Read => {
                    if completion.status != WcStatus::Success {
                        self.lane.disconnect();
                        return None;
                    }
                    *lens.get_mut(completion.wr_id.0 as usize)? = completion.byte_len as usize;
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
        Some(lens)
    }
}
