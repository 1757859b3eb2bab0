//! The ordering bits: a request of a page that is gone takes long, and others overtake it, or do not.

use super::*;

/// Completions of two READs, of which the first waits for a slow device.
fn completions(first: NpOrder, second: NpOrder, strict: bool, same: bool) -> Vec<u64> {
    let served = Served::new(LinkKind::Unix, 64);
    let mut peer = served.peer_with(NpSettings { strict, ..Served::settings() });
    peer.write(0, &[1; 4096]);
    served.region.evict_page(0).expect("evicted");
    served.region.bring_in(PAGE, 1).expect("in");
    served.backing.set_delay(Duration::from_millis(50));
    let op = if same { NpOp::Write } else { NpOp::Read };
    let mut requests = [peer.wr(op, 0, 0, 64), peer.wr(NpOp::Read, if same { 32 } else { PAGE }, 4096, 64)];
    (requests[0].order, requests[1].order) = (first, second);
    let ids = requests.each_ref().map(|request| request.id);
    peer.memory.write(0, &[9; 64]);
    peer.peer.post_all(requests).expect("posted");
    let done = peer.peer.drain();
    assert!(done.iter().all(|done| done.status == NpStatus::Success));
    if same {
        let mut found = [0; 64];
        peer.memory.read(4096, &mut found);
        assert_eq!((&found[..32], &found[32..]), (&[9; 32][..], &[1; 32][..]), "it sees the WRITE before it");
    }
    done.iter().map(|done| done.id - ids[0]).collect()
}

#[test]
fn others_overtake_a_fault_unless_order_forbids_it() {
    let (before, after) = (NpOrder { before: true, after: false }, NpOrder { before: false, after: true });
    let relaxed = NpOrder::RELAXED;
    assert_eq!(completions(relaxed, relaxed, false, false), [1, 0]);
    assert_eq!(completions(before, after, false, false), [1, 0], "the bits look the other way");
    assert_eq!(completions(after, relaxed, false, false), [0, 1]);
    assert_eq!(completions(relaxed, before, false, false), [0, 1]);
    assert_eq!(completions(relaxed, relaxed, true, false), [0, 1], "strict");
    assert_eq!(completions(relaxed, relaxed, false, true), [0, 1], "of overlapping ranges");
}
