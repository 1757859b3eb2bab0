//! The pull of clients' counters (TeRM section 4.4): once a sample period the server reads a client's counts
//! one-sidedly, and writes zeros over them. The client's CPU takes no part.
//!
//! There is one task for each client, on the worker of the connection over which the counters were shared; it ends with that connection. Only the
//! records and page counters of units that were read are transferred.
//!
//! # Failure
//! A client whose counters cannot be read is not sampled again; the failed READ closes its connection, like any failed
//! READ. Counts are hints: keys that name nothing are ignored, but for those that the client has closed since the last pull, and no count can do
//! more than keep in DRAM a page of a file that the client may read, or could before it closed it.

use super::bounce::Bounce;
use super::connection::Connection;
use super::transfer::Direction;
use super::turns::Claim;
use super::worker::WorkerContext;
use crate::session::Session;
use cuttlefs_common::rdma::WcStatus;
use cuttlefs_common::region::{CountersShape, UNIT_RECORD_LEN, UnitRecord};
use cuttlefs_common::rpc::{MAX_TRANSFER_BYTES, RemoteBuffer};
use std::ops::Range;
use std::rc::Rc;
use std::sync::{Arc, Weak};
use std::time::Duration;

/// Unread units between two units that were read are pulled along, up to this number: one READ instead of two.
const MAX_GAP_UNITS: usize = 16;

/// A client's counters.
pub(crate) struct SharedCounters {
    /// Their address in the client's memory.
    pub buffer: RemoteBuffer,
    /// Their layout in that buffer.
    pub shape: CountersShape,
    /// Whose filekeys they name.
    pub session: Arc<Session>,
}

impl SharedCounters {
    fn part(&self, bytes: Range<usize>) -> RemoteBuffer {
        RemoteBuffer {
            rkey: self.buffer.rkey,
            // A peer's number: an address past the largest number names no memory, and its NIC reports that.
            offset: self.buffer.offset.saturating_add(bytes.start as u64),
            len: bytes.len() as u32,
        }
    }
}

/// Pulls a client's counters every `period` until its connection ends.
pub(crate) async fn run(
    context: Rc<WorkerContext>,
    connection: Weak<Connection>,
    counters: SharedCounters,
    period: Duration,
) {
    loop {
        context.sleep(period).await;
        let Some(connection) = connection.upgrade() else {
            return;
        };
        if let Err(status) = pull(&context, &connection, &counters).await {
            tracing::debug!(
                ?status,
                session = counters.session.number().0,
                "a client's counters cannot be read any more"
            );
            return;
        }
    }
}

async fn pull(
    context: &WorkerContext,
    connection: &Arc<Connection>,
    counters: &SharedCounters,
) -> Result<(), WcStatus> {
    let (shape, session) = (counters.shape, &counters.session);
    let owner = session.number();
    let bounce = Rc::new(context.bounce.lend(&Claim::new(connection.peer(), owner.0)).await);
    session.closed_keys().begin_pull();
    let transfer = async |direction, bytes: Range<usize>| {
        let len = bytes.len();
        context.transfers.run(connection, direction, &bounce, &counters.part(bytes), 0, len).await
    };
    transfer(Direction::Pull, 0..shape.units() * UNIT_RECORD_LEN).await?;
    let records: Vec<(usize, UnitRecord)> = (0..shape.units())
        .filter_map(|index| {
            let mut bytes = [0; UNIT_RECORD_LEN];
            bounce.memory().read(bounce.offset() + index * UNIT_RECORD_LEN, &mut bytes);
            Some((index, UnitRecord::parse(&bytes)?))
        })
        .collect();
    let mut pages = vec![0; shape.unit_pages() as usize];
    for run in runs(&records, MAX_TRANSFER_BYTES as usize / shape.unit_pages() as usize) {
        let (first, last) = (records[run.start].0, records[run.end - 1].0);
        let bytes = shape.pages_offset(first)..shape.pages_offset(last + 1);
        transfer(Direction::Pull, bytes.clone()).await?;
        for (index, record) in &records[run] {
            let at = bounce.offset() + (shape.pages_offset(*index) - bytes.start);
            bounce.memory().read(at, &mut pages);
            let files = &context.server.files;
            let file = files.readable(owner, record.filekey);
            let file = file.or_else(|| files.active(session.closed_keys().get(record.filekey)?));
            if let Some(file) = file {
                files.note_counted(&file, record, &pages);
            }
        }
        zero(&bounce, bytes.len());
        transfer(Direction::Push, bytes).await?;
        transfer(Direction::Push, first * UNIT_RECORD_LEN..(last + 1) * UNIT_RECORD_LEN).await?;
        // Thousands of units take a while, so other requests get their turn.
        futures_lite::future::yield_now().await;
    }
    Ok(())
}

fn zero(bounce: &Bounce, len: usize) {
    bounce.memory().fill(bounce.offset(), len.max(UNIT_RECORD_LEN), 0);
}

/// Cuts records into runs of near neighbours, each of at most `max_units` units: ranges of `records`.
fn runs(records: &[(usize, UnitRecord)], max_units: usize) -> Vec<Range<usize>> {
    let mut runs: Vec<Range<usize>> = Vec::new();
    for (at, (index, _)) in records.iter().enumerate() {
        match runs.last_mut() {
            Some(run)
                if index - records[run.end - 1].0 <= MAX_GAP_UNITS
                    && index - records[run.start].0 < max_units =>
            {
                run.end = at + 1;
            }
            _ => runs.push(at..at + 1),
        }
    }
    runs
}

#[cfg(test)]
mod tests {
    use super::*;
    use cuttlefs_common::ids::FileKey;

    #[test]
    fn neighbours_are_pulled_together() {
        let record = UnitRecord { filekey: FileKey(1), unit: 0, count: 1 };
        let records: Vec<_> = [0, 1, 17, 40, 41, 42, 43].map(|index| (index, record)).into();
        assert_eq!(runs(&records, 100), [0..3, 3..7]);
        assert_eq!(runs(&records, 3), [0..2, 2..3, 3..6, 6..7]);
        assert!(runs(&[], 3).is_empty());
    }
}
