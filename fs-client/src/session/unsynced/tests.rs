use super::*;

const INO: InodeNo = InodeNo(7);
const BOUND: usize = 1 << 20;

fn unsynced() -> Unsynced {
    let unsynced = Unsynced::new(BOUND);
    unsynced.begin_session(1, false);
    unsynced
}

fn note(unsynced: &Unsynced, session: u64, ino: InodeNo, offset: u64, bytes: &[u8], change: u64) -> bool {
    let room = unsynced.reserve(bytes.len()).expect("room");
    unsynced.note(room, session, ino, offset, bytes, change)
}

fn ranges(unsynced: &Unsynced) -> Vec<(u64, Vec<u8>)> {
    unsynced
        .changes_of(INO)
        .into_iter()
        .filter_map(|kept| match kept.what {
            What::Bytes(bytes) => Some((kept.offset, bytes.to_vec())),
            _ => None,
        })
        .collect()
}

#[test]
fn a_sync_frees_what_was_before_it() {
    let unsynced = unsynced();
    assert!(note(&unsynced, 1, INO, 0, b"before", 1));
    let mark = unsynced.mark();
    assert!(note(&unsynced, 1, INO, 6, b"after", 2));
    assert!(note(&unsynced, 1, InodeNo(8), 0, b"other", 3));
    unsynced.synced(Some(INO), mark);
    assert_eq!(ranges(&unsynced), [(6, b"after".to_vec())]);
    assert_eq!(unsynced.changes().to_string(), "10 unsynced bytes in 2 files");
    unsynced.synced(None, unsynced.mark());
    assert!(unsynced.is_empty());
    assert_eq!(unsynced.changes(), UnsyncedChanges::default());
    assert_eq!(unsynced.state.lock().cost, 0);
}

#[test]
fn changes_are_kept_whole_and_in_the_order_of_their_counters() {
    let unsynced = unsynced();
    let punch = What::Allocate { len: 90, how: Allocate::PunchHole };
    assert!(note(&unsynced, 1, INO, 2, b"answered late", 3));
    assert!(note(&unsynced, 1, INO, 0, b"first", 1));
    unsynced.note_end(unsynced.reserve(0).expect("room"), 1, INO, 4, 4);
    unsynced.note_allocate(unsynced.reserve(0).expect("room"), 1, INO, (1, 90), Allocate::PunchHole, 5);
    assert!(note(&unsynced, 1, INO, 0, b"all of it", 2));
    let kept = unsynced.changes_of(INO).into_iter();
    let kept: Vec<_> = kept.map(|kept| (kept.change, kept.offset, kept.what)).collect();
    let written = |bytes: &[u8]| What::Bytes(Arc::from(bytes));
    assert_eq!(
        kept,
        [
            (1, 0, written(b"first")),
            (2, 0, written(b"all of it")),
            (3, 2, written(b"answered late")),
            (4, 4, What::End),
            (5, 1, punch),
        ]
    );
    unsynced.synced(None, unsynced.mark());
    assert_eq!(unsynced.state.lock().cost, 0);
    // A change that a lost server answered cannot be made again.
    unsynced.begin_session(2, false);
    let told = unsynced.losses().before_open(INO);
    let room = unsynced.reserve(0).expect("room");
    unsynced.note_allocate(room, 1, INO, (0, 1), Allocate::PunchHole, 100);
    assert!(unsynced.losses().tell(INO, &told));
}

#[test]
fn another_session_s_answer_is_not_taken() {
    let unsynced = unsynced();
    unsynced.begin_session(2, false);
    assert!(!note(&unsynced, 1, INO, 0, b"late", 1));
    assert!(unsynced.is_empty());
}

#[test]
fn what_cannot_be_synced_goes_and_is_told() {
    let unsynced = unsynced();
    let told = unsynced.losses().before_open(INO);
    assert!(note(&unsynced, 1, INO, 0, b"before", 1));
    let mark = unsynced.mark();
    assert!(note(&unsynced, 1, INO, 6, b"after", 2));
    unsynced.give_up(INO, mark);
    assert_eq!(ranges(&unsynced), [(6, b"after".to_vec())]);
    assert!(unsynced.losses().tell(INO, &told));
}

#[test]
fn the_heaviest_file_has_more_than_half() {
    let unsynced = unsynced();
    assert_eq!(unsynced.heaviest(), None);
    assert!(note(&unsynced, 1, INO, 0, &[1; 100_000], 1));
    assert_eq!(unsynced.heaviest(), Some(INO));
    assert!(note(&unsynced, 1, InodeNo(8), 0, &[1; 100_000], 1));
    assert_eq!(unsynced.heaviest(), None);
    assert!(note(&unsynced, 1, InodeNo(8), 0, &[1; 10_000], 1));
    assert_eq!(unsynced.heaviest(), Some(InodeNo(8)));
}

#[test]
fn while_a_recovery_is_under_way_nothing_is_taken() {
    let unsynced = unsynced();
    unsynced.begin_recovery();
    assert!(!note(&unsynced, 1, INO, 0, b"recovery may have passed it", 1));
    unsynced.begin_recovery();
    unsynced.begin_session(2, true);
    assert!(note(&unsynced, 2, INO, 0, b"its server cannot lose it", 2));
    unsynced.begin_recovery();
    assert!(note(&unsynced, 2, INO, 0, b"nor this", 3), "its server cannot lose it");
    unsynced.begin_session(3, false);
    assert!(note(&unsynced, 2, INO, 0, b"nor this", 4) && unsynced.is_empty());
}
