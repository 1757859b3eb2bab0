//! Loading: reads pages into frames, where they stay (region policy `pin`).
//!
//! There is a frame for each page of the pool, and the block locks keep two loads from taking two frames for one page.

use super::frames::PrivateFrame;
use super::{Pages, add};
use crate::pool::disk::{Disk, IoBuffer, IoKind, IoRequest};
use cuttlefs_common::ids::{FilePage, InodeNo, PoolPage};
use cuttlefs_common::status::Status;

/// Most pages of one IO, like those of a fetch.
const MAX_IO_PAGES: usize = 64;

impl Pages {
    /// Reads the pages that are not resident in one batch, with one IO for each group of neighbours, and returns how many these were. The caller has
    /// the mapping's lock; the pages are in order.
    ///
    /// # Errors
    /// `Io` if a page cannot be read, or there is no frame for it. Pages that were read stay resident.
    pub(crate) async fn load(
        &self,
        disk: &dyn Disk,
        ino: InodeNo,
        mut pools: Vec<(PoolPage, FilePage)>,
    ) -> Result<u64, Status> {
        let _guards = self.locks.lock_many(pools.iter().map(|(pool, _)| *pool)).await;
        pools.retain(|(pool, _)| !self.residency.load(*pool).is_resident());
        let mut groups: Vec<Vec<(PoolPage, FilePage, PrivateFrame)>> = Vec::new();
        for (pool, page) in pools {
            let Some(frame) = self.take_frame() else {
                tracing::error!(ino = %ino, "there is no frame for a page of a file that is to be in memory");
                return Err(Status::Io);
            };
            match groups.last_mut() {
                Some(group)
                    if group.len() < MAX_IO_PAGES
                        && group.last().is_some_and(|(last, ..)| last.0 + 1 == pool.0) =>
                {
                    group.push((pool, page, frame));
                }
                _ => groups.push(vec![(pool, page, frame)]),
            }
        }
        groups.iter_mut().flatten().for_each(|(.., frame)| frame.io_begins());
        let requests = groups
            .iter()
            .map(|group| IoRequest {
                kind: IoKind::Read,
                offset: group[0].0.byte_offset(),
                buffer: IoBuffer::Frames(group.iter().map(|(.., frame)| frame.index()).collect()),
            })
            .collect();
        let mut loaded = 0;
        let mut result = Ok(());
        for (group, done) in groups.into_iter().zip(disk.submit(requests).await) {
            for (pool, page, mut frame) in group {
                frame.io_ended();
                match &done.result {
                    Err(error) if error.concerns(pool) => {
                        self.note_unreadable(error, ino, page, pool);
                        result = Err(Status::Io);
                    }
                    _ => {
                        self.residency.publish(pool, frame, false);
                        loaded += 1;
                    }
                }
            }
        }
        add(&self.counters.promoted, loaded);
        result.map(|()| loaded)
    }
}
