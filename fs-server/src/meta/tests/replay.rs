//! `apply` as the redo log will use it: operations that were written out and read back do the same.

use super::super::{
    ApplyContext, Caller, Climbs, Covers, CutStep, DataCommit, DataStamp, Direction, DoneRequest, Images,
    MemoryStore, Operation, PageImage, Placed, RangeUpdate, RequestId, Store, View, apply, key,
};
use super::{HASH_KEY, check, extent, format};
use cuttlefs_common::attr::{SetAttr, Timestamp};
use cuttlefs_common::ids::{ClientId, FilePage, InodeNo, LogSeq, SlotIndex};
use cuttlefs_common::rpc::{NewNode, RenameMode, XattrMode};
use std::borrow::Cow;

const ROOT: InodeNo = InodeNo::ROOT;

fn contents(store: &MemoryStore) -> Vec<(Vec<u8>, Vec<u8>)> {
    let mut records = Vec::new();
    let mut visit = |key: &[u8], value: &[u8]| {
        records.push((key.to_vec(), value.to_vec()));
        true
    };
    store.scan(&[0], &[0xff], Direction::Forward, &mut visit).expect("scan");
    records
}

fn do_one(store: &MemoryStore, operation: &Operation<'_>, seq: u64) {
    let forgets = matches!(operation, Operation::RemoveClient { .. });
    let request = (!forgets).then_some(RequestId { client: ClientId(9), slot: SlotIndex(1), seq });
    let context = ApplyContext {
        now: Timestamp { secs: seq as i64, nanos: 5 },
        caller: Caller { uid: 1, gid: 2, umask: 0, drops_privileges: false, request },
        log_seq: Some(LogSeq(seq)),
        new_ino: InodeNo(100 + seq),
        change_floor: 1 << 32,
        is_open: &|_| false,
        climbs: &Climbs::default(),
    };
    let view = View::of_store(store, HASH_KEY);
    let applied = apply(&view, operation, &context).expect("apply");
    // Pure: asked again, it says the same.
    let again = apply(&view, operation, &context).expect("apply");
    assert_eq!(applied.batch, again.batch);
    let marks = applied.batch.iter().filter(|(key, _)| *key == key::APPLIED).count();
    assert_eq!(marks, 1, "the sequence number is in the batch");
    store.commit(applied.batch).expect("commit");
}

#[test]
fn operations_survive_the_log() {
    let file = InodeNo(101);
    let commit = DataCommit {
        ino: file,
        ranges: vec![RangeUpdate {
            first: FilePage(0),
            end: FilePage(9),
            extents: vec![extent(0, 50, 4), extent(6, 70, 2)],
        }],
        size: 30_000,
        covers: Covers::Changes { until: 9, restored: Vec::new() },
        done: vec![DoneRequest {
            request: RequestId { client: ClientId(9), slot: SlotIndex(2), seq: 1 },
            placed: Placed { offset: 29_000, len: 1000 },
        }],
        cut: CutStep::Unchanged,
        images: Images::Put(vec![PageImage { page: FilePage(3), bytes: vec![1, 2] }]),
    };
    let gone = RangeUpdate { first: FilePage(2), end: FilePage(9), extents: vec![] };
    let cut = DataCommit::of_ranges(file, vec![gone], 5000);
    let stamp = DataStamp {
        mtime: Timestamp { secs: 3, nanos: 3 },
        ctime: Timestamp { secs: 3, nanos: 3 },
        change: 1 << 33,
    };
    let set = SetAttr { size: Some(5000), ..SetAttr::default() };
    let operations = [
        Operation::Create { parent: ROOT, name: b"file", mode: 0o644, exclusive: true },
        Operation::Make { parent: ROOT, name: b"directory", node: NewNode::Directory, mode: 0o755 },
        Operation::Make { parent: ROOT, name: b"link", node: NewNode::Symlink(b"to"), mode: 0 },
        Operation::Link { ino: file, parent: InodeNo(102), name: b"again" },
        Operation::SetXattr { ino: file, name: b"user.a", value: &[7; 9000], mode: XattrMode::Any },
        Operation::CommitData { commits: Cow::Owned(vec![commit]), stamps: vec![Some(stamp)] },
        Operation::SetAttr { ino: file, set, commit: Some(Box::new(cut)) },
        Operation::Rename {
            parent: ROOT,
            name: b"link",
            new_parent: ROOT,
            new_name: b"file",
            mode: RenameMode::Replace,
        },
        Operation::RemoveXattr { ino: file, name: b"user.a" },
        Operation::Unlink { parent: InodeNo(102), name: b"again" },
        Operation::Rmdir { parent: ROOT, name: b"directory" },
        Operation::PutClient { client: ClientId(9) },
        Operation::EndSession { client: ClientId(9) },
        Operation::RemoveClient { client: ClientId(9) },
    ];
    let (live, replayed) = (MemoryStore::new(), MemoryStore::new());
    format(&live);
    format(&replayed);
    for (seq, operation) in (1..).zip(&operations) {
        do_one(&live, operation, seq);
        let logged = postcard::to_allocvec(operation).expect("operations serialise");
        let read_back: Operation<'_> = postcard::from_bytes(&logged).expect("and parse");
        assert_eq!(&read_back, operation);
        do_one(&replayed, &read_back, seq);
        assert_eq!(contents(&replayed), contents(&live), "{operation:?}");
        assert_eq!(check(&live, HASH_KEY).expect("records parse"), []);
    }
    // The root, the symlink that replaced the file, and the superblock are left.
    let left: Vec<_> = contents(&live).into_iter().map(|(key, _)| key[0] as char).collect();
    assert_eq!(left, ['D', 'I', 'I', 'M', 'M', 'M', 'M', 'S']);
}
