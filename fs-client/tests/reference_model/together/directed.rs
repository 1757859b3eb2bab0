//! Faults that the walks found: the few operations that each needs, in several orders, with the server dying at each of the first events.

use super::op::Op;
use super::*;
use cuttlefs_common::ids::PAGE_SIZE_U64;
use cuttlefs_common::life::End;
use cuttlefs_common::rpc::Allocate;

/// The number of orders for each event.
const ORDERS: u64 = 6;

/// Runs `before`, and then `ops` with the server dying at an event counted from their beginning. Does this for each of the `moments` and `ORDERS`
/// orders.
fn in_each_moment(kind: Kind, before: &[(usize, Op)], ops: &[(usize, Op)], moments: std::ops::Range<u64>) {
    for (after, seed) in moments.flat_map(|after| (0..ORDERS).map(move |seed| (after, seed))) {
        // The first client gets few turns, so that others act before it sends its request again.
        let pace = Pace { seed, clients: [1, 20, 20, 20], world: 20, away: None };
        let crash = Crash { end: End { after, of: None }, power: kind == Kind::Ack };
        let batch = Batch { ops: before.to_vec(), pace, crash: None, cut: None };
        let dying = Batch { ops: ops.to_vec(), crash: Some((crash, None)), ..batch.clone() };
        let small = WorldConfig::new(seed, Translation::Target, POOL_PAGES, 32);
        let config = WorldConfig { durable_answers: kind == Kind::Ack, restless: true, ..small };
        let items = vec![Item::Together(batch), Item::Together(dying)];
        run(&Case { kind, config, clients: 3, weather: None, items, furnish });
    }
}

/// The index of each client's handle of the first file (`furnish`). The handles of clients with odd numbers append.
const FIRST: usize = 1;
/// The index of the first client's handle of the second file.
const SECOND: usize = 2;

/// `first` by the first client, and `then` by the last client. The last client sends five other requests before, else `then` would be done when
/// `first` begins.
fn behind(first: Op, then: [Op; 2]) -> Vec<(usize, Op)> {
    let before = (0..5).map(|_| Op::Lookup { at: (0, 0) });
    let last = before.chain(then).map(|op| (2, op));
    [(0, first)].into_iter().chain(last).collect()
}

/// A write of whole pages of the first file.
fn write(page: u64, pages: u64) -> Op {
    let (offset, len) = (page * PAGE_SIZE_U64, pages * PAGE_SIZE_U64);
    Op::Write { handle: FIRST, offset, len, salt: page + pages }
}

#[test]
fn a_cut_is_not_made_twice() {
    let before = [(0, write(0, 5))];
    let cut = Op::Truncate { ino: 1, size: 2 * PAGE_SIZE_U64 };
    // The handle of client 1 appends, so the place of its write shows whether the cut was made before.
    let ops = [(0, cut), (1, write(0, 1)), (1, Op::GetAttr { ino: 1 })];
    in_each_moment(Kind::Ack, &before, &ops, 0..24);
}

#[test]
fn an_allocation_is_not_made_twice() {
    let before = [(0, write(0, 3))];
    for how in [Allocate::PunchHole, Allocate::ZeroRange { keep_size: false }] {
        let zeros = Op::Allocate { handle: FIRST, offset: 0, len: 4 * PAGE_SIZE_U64, how };
        let ops = behind(zeros, [Op::Read { handle: FIRST, page: 0 }, write(0, 1)]);
        in_each_moment(Kind::Ack, &before, &ops, 8..48);
    }
}

#[test]
fn a_copy_is_not_made_twice() {
    let len = 3 * PAGE_SIZE_U64;
    let source = Op::Write { handle: SECOND, offset: 0, len, salt: 1 };
    let copy = Op::Copy { from: SECOND, from_offset: 0, to: FIRST, to_offset: 0, len };
    // The client that has seen the copy writes over it.
    let ops = behind(copy, [Op::Read { handle: FIRST, page: 1 }, write(1, 1)]);
    let before = [(0, source), (0, write(0, 2))];
    in_each_moment(Kind::Ack, &before, &ops, 8..48);
}

/// A server that is killed after its write-back and before its answer knows that the write was done. An older write of the same client to the same
/// place, which the client makes again in recovery, must not replace it.
#[test]
fn a_write_is_not_lost_under_an_older_one() {
    let before = [(0, write(0, 5))];
    let ops = [(0, write(1, 1)), (1, Op::Lookup { at: (0, 0) }), (2, Op::Lookup { at: (0, 1) })];
    in_each_moment(Kind::Names, &before, &ops, 0..24);
}

#[test]
fn what_was_made_and_removed_by_another_client_was_made() {
    let at = (4, 2);
    let made = Op::Make { at, kind: FileKind::Directory };
    let ops = [(0, made), (1, Op::Rmdir { at }), (2, Op::List { ino: 4 })];
    for kind in [Kind::Names, Kind::Ack] {
        in_each_moment(kind, &[], &ops, 0..12);
    }
}

#[test]
fn space_reserved_behind_the_end_stays_when_the_file_grows() {
    let (offset, len) = (8 * PAGE_SIZE_U64, 3 * PAGE_SIZE_U64);
    let reserve = Op::Allocate { handle: FIRST, offset, len, how: Allocate::Reserve { keep_size: true } };
    let grow = Op::Truncate { ino: 1, size: 5 * PAGE_SIZE_U64 + 7 };
    let ops = [(0, reserve), (0, grow), (1, Op::Lookup { at: (0, 0) })];
    in_each_moment(Kind::Ack, &[(0, write(0, 1))], &ops, 0..24);
}
