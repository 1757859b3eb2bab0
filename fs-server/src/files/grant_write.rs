//! Making of write grants: the pages of a range come into frames and are pinned there, or get frames and space for when they are written.
//!
//! # How it works
//! Pages on SSD are read into frames first, without any lock. Then, alone with the file: all pages that have bytes are pinned. For the others (holes,
//! unwritten pages, those behind the end) frames and space are taken, which only the grant names. If a page was evicted meanwhile, all of it is done
//! again. The file stays as it is.
//!
//! # Failure
//! `NoSpace` if the pool has too little space, `Busy` if there are not enough frames, or the peer has its share of the file's grants. What was taken is
//! given back.

use super::detach::take_holes;
use super::fetch::{bring, fetch};
use super::grants::{GrantPages, TakenSpace, WriteGrant};
use super::range_table::{Piece, PieceState};
use super::write::{end_of, zero_tail};
use super::{FileRegion, Files};
use crate::pages::Sink;
use crate::pages::policy::Exposure;
use crate::pool::disk::Disk;
use cuttlefs_common::attr::Attr;
use cuttlefs_common::ids::{FileKey, PAGE_SIZE, PAGE_SIZE_U64, PoolPage};
use cuttlefs_common::rdma::RegionOwner;
use cuttlefs_common::region::PageSet;
use cuttlefs_common::status::Status;
use std::sync::Arc;

/// The longest range of one grant. Its pages are pinned while nobody else changes the file; neighbouring grants are as one.
pub const GRANT_MAX_BYTES: u64 = 64 << 20;
/// How often it is tried again after pages were evicted between being read and being pinned.
const GRANT_ROUNDS: usize = 8;
/// Pages that are read together: 1 MiB, like the largest request.
const BATCH_PAGES: u64 = 256;

/// The filekey that gets a grant.
#[derive(Clone, Copy, Debug)]
pub struct Grantee {
    /// The session.
    pub owner: RegionOwner,
    /// The filekey.
    pub filekey: FileKey,
}

impl Files {
    /// Whether one-sided changes are made under grants: frames are what one-sided readers see.
    pub(super) fn grants_writes(&self) -> bool {
        let policy = self.pages.policy();
        policy.exposure == Exposure::Magic && policy.uses_frames()
    }
}

/// Grants a range of a file to a filekey. Grants of this filekey that overlap the range are replaced. Returns the file's attributes.
///
/// # Errors
/// `Unsupported` under a region policy without grants; `Invalid` (empty, or longer than `GRANT_MAX_BYTES`); `TooLarge`; `NoSpace`; `Busy`; `Stale`
/// (the file, or the filekey); `Io`.
pub async fn grant_write(
    files: &Files,
    disk: &dyn Disk,
    file: &Arc<FileRegion>,
    Grantee { owner, filekey }: Grantee,
    (offset, len): (u64, u64),
    pages: GrantPages,
) -> Result<Attr, Status> {
    if !files.grants_writes() {
        return Err(Status::Unsupported);
    }
    if len == 0 || len > GRANT_MAX_BYTES {
        return Err(Status::Invalid);
    }
    let end = end_of(offset, len as usize)?;
    let (first, last) = (offset / PAGE_SIZE_U64, end.div_ceil(PAGE_SIZE_U64));
    let mut pages = Some(pages);
    for _ in 0..GRANT_ROUNDS {
        bring_all(files, disk, file, first, last).await?;
        let alone = file.order.write().await;
        file.usable()?;
        if end > file.size() {
            // So that an append finds nothing to be done first.
            zero_tail(files, disk, file).await?;
        }
        let stored: Vec<PoolPage> = {
            let state = file.state();
            let pieces = state.table.pieces_in(first, last).filter(|piece| piece.state.has_bytes());
            pieces.flat_map(|piece| piece.pool..piece.pool + piece.len).map(PoolPage).collect()
        };
        let Some(pins) = files.pages.pin(&stored).await else { continue };
        let wanted = (last - first) as usize - stored.len();
        let mut spare = files.pages.take_spare(wanted);
        if spare.len() < wanted {
            files.pages.evict(disk, (wanted - spare.len()) as u32).await;
            spare.extend(files.pages.take_spare(wanted - spare.len()));
        }
        if spare.len() < wanted {
            return Err(Status::Busy);
        }
        let (pieces, _) = take_holes(files, file, (first, last), PieceState::Fresh).await?;
        let each = |piece: &Piece| (piece.first..piece.end()).zip((piece.pool..).map(PoolPage));
        let space = TakenSpace { of: files.space.clone(), pages: pieces.iter().flat_map(each).collect() };
        let live = files.meta.hold_live(file.ino())?;
        let Some(pages) = pages.take() else { break };
        let grant = WriteGrant { end, pins, spare, space, _live: live, pages };
        let (is_added, ended) = file.grants.lock().add(filekey, offset, grant);
        drop(ended);
        // A close of the filekey that came before the grant has not seen it.
        if let Err(status) = files.keyed(owner, filekey) {
            file.end_grants_of(filekey);
            return Err(status);
        }
        drop(alone);
        return if is_added { files.meta.attr(file.ino()) } else { Err(Status::Busy) };
    }
    Err(Status::Busy)
}

/// Ends the grants of a filekey that have a byte of the range. When this returns, no one-sided change under them is under way.
pub async fn return_grant(file: &Arc<FileRegion>, filekey: FileKey, offset: u64, len: u64) {
    let _alone = file.order.write().await;
    file.return_grants(filekey, offset, offset.saturating_add(len));
}

/// Reads the pages `[first, last)` that are before the end of the file, and on SSD, into frames, and makes room for them.
pub(super) async fn bring_all(
    files: &Files,
    disk: &dyn Disk,
    file: &FileRegion,
    first: u64,
    last: u64,
) -> Result<(), Status> {
    let absent = |from: u64, to: u64| -> Vec<u64> {
        let state = file.state();
        let pieces = state.table.pieces_in(from, to).filter(|piece| piece.state.has_bytes());
        let each = |piece: Piece| (piece.first..piece.end()).zip((piece.pool..).map(PoolPage));
        pieces
            .flat_map(each)
            .filter(|(_, pool)| !files.pages.is_resident(*pool))
            .map(|(page, _)| page)
            .collect()
    };
    let mut from = first;
    while from < last {
        let to = last.min(from + BATCH_PAGES);
        let missing = absent(from, to).len() as u32;
        if missing > 0 {
            let free = files.pages.frames().free();
            if free < missing {
                files.pages.evict(disk, missing - free).await;
            }
            bring(files, disk, file, from, to).await;
            // A page that cannot be read is an error; one for which there was no frame is waited for.
            if let Some(page) = absent(from, to).first() {
                let mut bytes = vec![0; PAGE_SIZE];
                let (offset, all) = (page * PAGE_SIZE_U64, PageSet::all(1));
                fetch(files, disk, file, offset, PAGE_SIZE, &all, Sink::Bytes(&mut bytes)).await?;
            }
        }
        from = to;
        futures_lite::future::yield_now().await;
    }
    Ok(())
}
