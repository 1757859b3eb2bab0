//! With durable answers, all changes of a request are durable before its answer is sent.

use super::harness::write;
use super::harness::{Storage, stamped};
use super::records::inode;
use crate::files::write_back::write_back;
use crate::files::{
    Asked, Changed, Copied, WriteAt, Written, allocate_for, begin_change, copy_range, write_for,
};
use crate::meta::{Answer, DoneRequest, RequestId};
use crate::pages::Source;
use crate::pool::simdisk::SimMode;
use cuttlefs_common::ids::{ClientId, PAGE_SIZE, SlotIndex};
use cuttlefs_common::rpc::Allocate;
use cuttlefs_common::world::SeededRandom;
use futures_lite::future::block_on;

fn storage() -> Storage {
    let storage = Storage::new(96, 40);
    storage.meta.create(inode(1));
    answered(&storage, &committed());
    storage
}

/// The notes of a request that has committed a batch of records.
fn committed() -> Changed {
    let changed = Changed::default();
    changed.note_records();
    changed
}

/// Does the work of a client's write of `len` bytes, without making it durable or answering it.
fn put(storage: &Storage, len: usize) -> Changed {
    let (file, changed) = (storage.file(1), Changed::default());
    let done = async {
        let changing = begin_change(&storage.files, &file, &changed).await.expect("begins");
        let (at, bytes) = (WriteAt::Offset(0), stamped(1, 0, len));
        let source = Source::Bytes(&bytes);
        let written = write(&storage.files, &storage.disk, &file, at, source).await.expect("writes");
        changing.done(written.attr.change, 0..len as u64);
    };
    block_on(done);
    changed
}

fn answered(storage: &Storage, changed: &Changed) {
    block_on(changed.make_durable(&storage.files, &storage.disk)).expect("durable");
}

fn is_durable(storage: &Storage) -> bool {
    storage.meta.crash_states() == 1
}

#[test]
fn what_a_request_has_written_outlives_the_machine() {
    // A few bytes are made durable by images, many by writing pages to their places.
    for len in [100, 20 * PAGE_SIZE] {
        let storage = storage();
        let changed = put(&storage, len);
        assert!(changed.has_contents());
        answered(&storage, &changed);
        assert!(is_durable(&storage) && !changed.has_contents());
        storage.disk.crash(&SeededRandom::new(7));
        storage.disk.set_mode(SimMode::AtOnce);
        let next = storage.restart(storage.meta.crash(0));
        assert!(next.read(&next.file(1), 0, len) == Ok(stamped(1, 0, len)), "{len} bytes");
        next.check();
    }
}

#[test]
fn who_finds_nothing_left_to_do_waits_for_the_batch_that_took_his_bytes_along() {
    let storage = storage();
    let changed = put(&storage, 100);
    // A write-back for another purpose commits the file's records and does not sync them.
    block_on(write_back(&storage.files, &storage.disk, &[storage.file(1)], false)).expect("committed");
    assert!(storage.file(1).is_clean() && !is_durable(&storage));
    answered(&storage, &changed);
    assert!(is_durable(&storage));
}

#[test]
fn names_are_flushed_by_whoever_has_changed_some() {
    let storage = storage();
    storage.meta.create(inode(2));
    answered(&storage, &Changed::default());
    assert!(!is_durable(&storage), "another's: he waits for it himself");
    answered(&storage, &committed());
    assert!(is_durable(&storage));
}

/// The noted answers are made durable with the file, by whichever request syncs it next.
#[test]
fn what_was_done_is_noted_with_its_counter_and_its_answer() {
    let storage = storage();
    storage.meta.create(inode(2));
    let (file, from) = (storage.file(1), storage.file(2));
    let (files, disk) = (&storage.files, &storage.disk);
    let bytes = stamped(1, 0, 5_000);
    let noted = |seq, answer, change| {
        let state = file.state();
        let request = request(seq);
        assert!(state.uncommitted && state.contents == change, "{} and {change}", state.contents);
        assert_eq!(state.done.values().collect::<Vec<_>>(), [&DoneRequest { request, answer }]);
    };
    // Writes over holes, writes over bytes, a copy, and each kind of allocation.
    for (seq, at) in [(1, WriteAt::End), (2, WriteAt::Offset(100))] {
        let asked: Asked<'_> = (request(seq), &Written::answer);
        let source = Source::Bytes(&bytes[..4_000]);
        let written = block_on(write_for(files, disk, &file, at, source, Some(asked))).expect("writes");
        let attr = written.attr;
        let (offset, change) = (written.offset, attr.change);
        assert_eq!(attr, files.meta.attr(inode(1)).expect("attr"));
        noted(seq, Answer::Written { offset, len: 4_000, size: attr.size, change }, change);
    }
    block_on(write(files, disk, &from, WriteAt::End, Source::Bytes(&bytes))).expect("writes");
    let copy = copy_range(files, disk, (&from, 0), (&file, 10_000), 20_000, Some(request(3)));
    let Copied { len, change } = block_on(copy).expect("copies");
    assert_eq!(len, 5_000);
    noted(3, Answer::Copied { len, change }, change);
    let kinds = [
        Allocate::PunchHole,
        Allocate::ZeroRange { keep_size: true },
        Allocate::Reserve { keep_size: false },
    ];
    for (seq, how) in (4..).zip(kinds) {
        let attr = block_on(allocate_for(files, disk, &file, (50, 30_000), how, Some(request(seq))));
        let attr = attr.expect("allocates");
        noted(seq, Answer::Attr(attr), attr.change);
    }
}

fn request(seq: u64) -> RequestId {
    RequestId { client: ClientId(7), slot: SlotIndex(3), seq }
}
