//! Parts that leave one protection out, so that the models show that they can fail. Each is the product's function that it names, but for that.

use super::{NEWER, RECORD, Site, run};
use crate::files::detach::detach;
use crate::files::new_pages::NewPages;
use crate::files::one_sided::Placed;
use crate::files::range_table::{MAX_FILE_PAGES, Piece};
use crate::files::write::{Writer, changes_of};
use crate::files::{FileRegion, Files};
use crate::meta::{DataCommit, RangeUpdate};
use crate::pages::PageOwner;
use cuttlefs_common::ids::{FilePage, InodeNo, PoolPage};
use std::sync::Arc;

/// A file that lists no pages.
struct Unlisted<'f>(&'f FileRegion);

impl PageOwner for Unlisted<'_> {
    fn ino(&self) -> InodeNo {
        self.0.ino()
    }

    fn list_page(&self, _page: FilePage, _pool: PoolPage) {}

    fn note_written_directly(&self) {}
}

impl Site {
    fn all(&self) -> (&Files, &Arc<FileRegion>, [u8; RECORD]) {
        (&self.files, &self.file, [NEWER; RECORD])
    }

    /// `Files::try_write`, which lets go of the file's order behind the check.
    pub fn write_out_of_order(&self) {
        let (files, file, bytes) = self.all();
        let (owner, key) = self.sessions[0];
        let Ok(keyed) = files.grantable(owner, key) else { return };
        let checked = match file.order.try_read() {
            Some(_shared) => files.check_overwrite(&keyed, key, 0, RECORD as u64).is_ok(),
            None => false,
        };
        let changes = if checked { changes_of(&file.state(), 0, RECORD) } else { None };
        if let Some(changes) = changes {
            files.pages.change_at_once(&**file, &changes, &bytes, &mut Vec::new());
        }
    }

    /// `Files::try_append` without the file's order.
    pub fn append_out_of_order(&self) {
        let (files, file, _) = self.all();
        let offset = file.size();
        if let Ok(Placed::Done(_)) =
            files.place_at_once(file, self.sessions[0].1, offset, &[0x44; RECORD], Writer::Grant)
        {
            self.note_appended(Ok(offset), 0x44);
        }
    }

    /// `truncate` to nothing, which ends the grants behind the leaving of the pages.
    pub fn cut_before_the_grants_end(&self) {
        let (files, file, _) = self.all();
        let _alone = run(file.order.write());
        let _settled = run(file.settle.lock());
        let pieces: Vec<Piece> = file.state().table.pieces_in(0, MAX_FILE_PAGES).collect();
        let all = RangeUpdate { first: FilePage(0), end: FilePage(MAX_FILE_PAGES), extents: Vec::new() };
        let commit = DataCommit::of_ranges(file.ino(), vec![all], 0);
        self.must(self.meta.commit_data(&[commit]).is_ok(), || "no commit".into());
        file.change_layout(files.file_table(), &files.generations, |state| {
            state.table.remove(0, MAX_FILE_PAGES);
            (state.size, state.durable_size, state.tail_is_zero) = (0, 0, true);
        });
        file.dirty.lock().clear();
        run(detach(files, &pieces));
        file.end_grants(0, u64::MAX);
    }

    /// `grant_write`, which does not keep the pins.
    pub fn grant_without_pins(&self) {
        let granted = self.give_grant(0, 1);
        self.must(granted.is_ok(), || format!("a grant ends with {granted:?}"));
        let none = run(self.files.pages.pin(&[])).expect("of no pages");
        let pins = {
            let mut grants = self.file.grants.lock();
            let grant = grants.of_page(self.sessions[0].1, 0).expect("it was granted");
            std::mem::replace(&mut grant.pins, none)
        };
        drop(pins);
        self.check_granted();
    }

    /// `Pages::change_at_once`, which lists the page before it has its lock.
    pub fn write_listed_too_early(&self) {
        let (files, file, bytes) = self.all();
        let _shared = run(file.order.read());
        let changes = changes_of(&file.state(), 0, RECORD).expect("the page has bytes");
        file.list_page(changes[0].file_page, changes[0].pool);
        let changed = files.pages.change_at_once(&Unlisted(file), &changes, &bytes, &mut Vec::new());
        if changed.is_some() {
            self.must(files.note_one_sided(file).is_ok(), || "it is not noted".into());
        }
    }

    /// `Files::place_at_once`, which lists the new page when the mapping shows it already.
    pub fn append_listed_too_late(&self) {
        let (files, file, bytes) = self.all();
        let _alone = run(file.order.write());
        let offset = file.size();
        let mut pages = NewPages::of(file, self.sessions[0].1, &files.free_pages);
        let placed = pages.place(file, offset, RECORD).expect("the grant has a page");
        let changed = files.pages.change_at_once(&Unlisted(file), &placed.changes, &bytes, pages.frames());
        let Some(pins) = changed else { return };
        pages.used(pins);
        let mapped = files.map_placed(file, (offset, RECORD), &placed, Writer::Grant);
        self.must(mapped.is_ok(), || "it is not mapped".into());
        placed.changes.iter().for_each(|change| file.list_page(change.file_page, change.pool));
        files.list_dirty(file);
    }

    /// `Files::note_one_sided`, which lists the file before it notes the change.
    pub fn write_noted_too_late(&self) {
        let (files, file, bytes) = self.all();
        let _shared = run(file.order.read());
        let changes = changes_of(&file.state(), 0, RECORD).expect("the page has bytes");
        if files.pages.change_at_once(&**file, &changes, &bytes, &mut Vec::new()).is_some() {
            files.list_dirty(file);
            file.change_bookkeeping(|state| state.uncommitted = true);
        }
    }
}
