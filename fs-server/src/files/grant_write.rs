//! Making of write grants: the pages of a range get space, come into frames, and are pinned there.
//!
//! # How it works
//! Pages on SSD are read into frames first, without any lock. Then, alone with the file: holes and unwritten pages before the end become pages of
//! zeros, as if zeros had been written there; no byte of the file changes, so its times stay. All pages before the end are pinned. For those behind
//! the end frames and space are taken, which only the grant names. If a page was evicted meanwhile, all of it is done again.
//!
//! # Failure
//! `NoSpace` if the pool has too little space, `Busy` if there are not enough frames, or the file has too many grants. What was taken is given back;
//! pages of zeros stay.

use super::detach::{take_holes, undo_allocation, vacate_pieces};
use super::fetch::{bring, fetch};
use super::grants::{GrantPages, TakenSpace, WriteGrant};
use super::range_table::{Piece, PieceState};
use super::write::{end_of, zero_tail};
use super::{FileRegion, Files};
use crate::meta::NoteData;
use crate::pages::policy::Exposure;
use crate::pages::{Base, NewBytes, PageChange, Sink};
use crate::pool::disk::Disk;
use cuttlefs_common::attr::Attr;
use cuttlefs_common::ids::{FileKey, PAGE_SIZE, PAGE_SIZE_U64, PoolPage};
use cuttlefs_common::rdma::RegionOwner;
use cuttlefs_common::region::PageSet;
use cuttlefs_common::status::Status;
use std::sync::Arc;

/// The longest range of one grant. Its pages are made while nobody else changes the file; neighbouring grants are as one.
pub const GRANT_MAX_BYTES: u64 = 64 << 20;
/// How often it is tried again after pages were evicted between being read and being pinned.
const GRANT_ROUNDS: usize = 8;
/// Pages that are read, or made, together: 1 MiB, like the largest request.
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
        let behind = file.size().div_ceil(PAGE_SIZE_U64).clamp(first, last);
        fill_holes(files, disk, file, first, behind).await?;
        if end > file.size() {
            // So that an append finds nothing to be done first.
            zero_tail(files, disk, file).await?;
        }
        let pools: Vec<PoolPage> = {
            let state = file.state();
            (first..behind).filter_map(|page| state.table.get(page.into())).map(|(pool, _)| pool).collect()
        };
        let Some(pins) = files.pages.pin(&pools).await else { continue };
        let wanted = (last - behind) as usize;
        let mut spare = files.pages.take_spare(wanted);
        if spare.len() < wanted {
            files.pages.evict(disk, (wanted - spare.len()) as u32).await;
            spare.extend(files.pages.take_spare(wanted - spare.len()));
        }
        if spare.len() < wanted {
            return Err(Status::Busy);
        }
        let (pieces, _) = take_holes(files, file, (behind, last), PieceState::Fresh).await?;
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
async fn bring_all(
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

/// Gives the pages `[first, last)` that have no bytes zeros. The caller has the file to itself; the pages are before its end.
pub(super) async fn fill_holes(
    files: &Files,
    disk: &dyn Disk,
    file: &Arc<FileRegion>,
    first: u64,
    last: u64,
) -> Result<(), Status> {
    let mut from = first;
    while from < last {
        let to = last.min(from + BATCH_PAGES);
        fill_batch(files, disk, file, from, to).await?;
        from = to;
    }
    Ok(())
}

async fn fill_batch(
    files: &Files,
    disk: &dyn Disk,
    file: &Arc<FileRegion>,
    first: u64,
    last: u64,
) -> Result<(), Status> {
    let (new, runs) = take_holes(files, file, (first, last), PieceState::Fresh).await?;
    let converted: Vec<Piece> = {
        let state = file.state();
        let unwritten = state.table.pieces_in(first, last).filter(|piece| !piece.state.has_bytes());
        unwritten.map(|piece| Piece { state: PieceState::Fresh, ..piece }).collect()
    };
    if new.is_empty() && converted.is_empty() {
        return Ok(());
    }
    let zeros = |piece: &Piece| {
        let each = (piece.first..piece.end()).zip(piece.pool..);
        each.map(|(page, pool)| PageChange {
            file_page: page.into(),
            pool: pool.into(),
            base: Base::Zeros,
            offset_in_page: 0,
            len: PAGE_SIZE,
            offset_in_source: 0,
        })
    };
    let changes: Vec<PageChange> = new.iter().chain(&converted).flat_map(zeros).collect();
    if let Err(status) = files.pages.change(disk, &**file, &changes, NewBytes::Zeros).await {
        {
            let mut dirty = file.dirty.lock();
            for change in &changes {
                dirty.remove(&change.file_page);
            }
        }
        vacate_pieces(files, &converted).await;
        undo_allocation(files, &runs).await;
        return Err(status);
    }
    let noted = {
        let mut state = file.state_mut();
        new.iter().for_each(|piece| state.table.insert(*piece));
        for piece in &converted {
            state.table.set_state(piece.first, piece.end(), PieceState::Fresh);
        }
        state.uncommitted = true;
        state.show_layout(files.file_table(), &files.generations);
        let allocated_pages = Some(state.table.allocated_pages());
        files.meta.note_data(file.ino(), NoteData { allocated_pages, ..NoteData::default() })
    };
    // After the change: a write-back that takes the file off the list sees the change.
    files.list_dirty(file);
    noted.map(drop)
}
