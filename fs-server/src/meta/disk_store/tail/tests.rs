//! The log's files: appended to, switched, torn, rotten.

use super::*;
use crate::meta::disk_store::direct;
use crate::meta::disk_store::logged::{self, LogError};
use crate::meta::disk_store::replay::{self, Replay};
use crate::meta::store::Batch;
use std::collections::BTreeMap;
use std::convert::Infallible;

const FILL: u64 = 4096;

fn batch(number: u8) -> Batch {
    let mut batch = Batch::default();
    batch.put([number], vec![number; 5]);
    batch
}

fn logged(number: u8) -> Vec<u8> {
    logged::encode(u64::from(number), &batch(number))
}

/// A record with a batch of about `len` bytes.
pub fn record(life: u64, number: u64, len: usize) -> Vec<u8> {
    let mut batch = Batch::default();
    batch.put(*b"k", vec![7; len]);
    framed(life, 0, &logged::encode(number, &batch))
}

/// Appends a batch; the record says that no batch is durable yet.
fn append(tail: &mut Tail, number: u8) {
    tail.append(&logged(number), 0).expect("append");
}

fn begun(directory: &Path) -> Tail {
    let space = Arc::new(Space::open(directory, 0).expect("space"));
    let mut tail = Tail::open(directory, space, FILL).expect("open");
    tail.begin().expect("begin");
    tail
}

/// The current file's bytes up to the end of its records, and the whole file.
fn used(tail: &Tail, at: &Path) -> (Vec<u8>, Vec<u8>) {
    let all = std::fs::read(at.join(FILES[tail.current])).expect("read");
    assert_eq!(all.len() as u64, tail.filled[tail.current]);
    (all[..tail.lens[tail.current] as usize].to_vec(), all)
}

/// The keys and values of all records of the log.
fn contents(read: &Replay) -> BTreeMap<Vec<u8>, Vec<u8>> {
    let mut found = BTreeMap::new();
    for overlay in read.frozen.iter().map(|(frozen, _)| frozen).chain([&read.active]) {
        let visited = overlay.visit(|key, value| {
            found.insert(key.to_vec(), value.expect("nothing is removed").to_vec());
            Ok::<(), Infallible>(())
        });
        visited.expect("infallible");
    }
    found
}

fn numbers(directory: &Path, last: u64) -> Vec<u64> {
    let read = replay::read(directory, last).expect("read");
    assert_eq!(read.last, last + read.batches);
    let found = contents(&read);
    for number in last + 1..=read.last {
        let number = number as u8;
        assert_eq!(found.get(&vec![number]), Some(&vec![number; 5]), "batch {number}");
    }
    (last + 1..=read.last).collect()
}

#[test]
fn what_follows_is_read_in_order_over_both_files() {
    let directory = tempfile::tempdir().expect("directory");
    let at = directory.path();
    assert_eq!(numbers(at, 0), [0u64; 0], "no files, no batches");
    let mut tail = begun(at);
    assert_eq!(numbers(at, 0), [0u64; 0]);
    (1..=3).for_each(|number| append(&mut tail, number));
    tail.turn();
    (4..=5).for_each(|number| append(&mut tail, number));
    assert_eq!(numbers(at, 0), [1, 2, 3, 4, 5], "killed in a checkpoint");
    assert_eq!(numbers(at, 2), [3, 4, 5], "the checkpoint has the first two");
    assert_eq!(numbers(at, 5), [0u64; 0]);
    tail.give_up_the_other().expect("given up");
    assert_eq!(numbers(at, 3), [4, 5], "killed after the checkpoint: what it has is skipped");
    tail.turn();
    append(&mut tail, 6);
    assert_eq!(numbers(at, 3), [4, 5, 6], "turned back: the first record is written over");
    assert_eq!(numbers(at, 0), [0u64; 0], "and missed by who has no checkpoint");
    tail.begin().expect("empty");
    assert_eq!(numbers(at, 0), [0u64; 0]);
}

#[test]
fn a_file_that_is_written_over_keeps_its_length_and_is_torn_anywhere() {
    let directory = tempfile::tempdir().expect("directory");
    let at = directory.path();
    let mut tail = begun(at);
    // The batches have different lengths, so that new records end in the midst of old ones.
    let long = |number: u8| {
        let mut batch = Batch::default();
        batch.put([number], vec![number; 40 + 7 * usize::from(number)]);
        logged::encode(u64::from(number), &batch)
    };
    (1..=9).for_each(|number| drop(tail.append(&long(number), 0).expect("append")));
    tail.turn();
    append(&mut tail, 10);
    tail.give_up_the_other().expect("given up");
    tail.turn();
    let before = used(&tail, at).1;
    let mut written_over = Vec::new();
    for number in 11..=14 {
        append(&mut tail, number);
        written_over.push(tail.lens[tail.current] as usize);
    }
    let after = used(&tail, at).1;
    assert_eq!(before.len(), after.len(), "no sync of this has anything but data to write");
    for cut in HEADER_BYTES..=*written_over.last().expect("some") {
        let torn = [&after[..cut], &before[cut..]].concat();
        std::fs::write(at.join("tail-0"), torn).expect("write");
        let whole = written_over.iter().filter(|end| **end <= cut).count() as u64;
        assert_eq!(numbers(at, 9), (10..=10 + whole).collect::<Vec<_>>(), "cut at {cut}");
    }
}

#[test]
fn without_plenty_of_room_nothing_is_filled_and_nothing_kept() {
    let directory = tempfile::tempdir().expect("directory");
    let at = directory.path();
    let mut tail = begun(at);
    append(&mut tail, 1);
    assert_eq!(tail.filled, [2 * FILL, HEADER_BYTES as u64], "the one is filled, the other not yet");
    tail.space.set_full(true);
    tail.turn();
    let refused = tail.append(&logged(2), 0).expect_err("full");
    assert_eq!(refused.kind(), io::ErrorKind::StorageFull);
    tail.give_up_the_other().expect("given up");
    assert_eq!(tail.len_bytes(), 2 * HEADER_BYTES as u64);
    tail.space.set_full(false);
    append(&mut tail, 2);
    assert_eq!(numbers(at, 1), [2]);
}

#[test]
fn a_copy_of_a_record_in_a_torn_one_ends_nothing() {
    let directory = tempfile::tempdir().expect("directory");
    let at = directory.path();
    let mut tail = begun(at);
    append(&mut tail, 1);
    append(&mut tail, 2);
    let log = used(&tail, at).0;
    // The third batch holds a copy of the log, as if a client had synced a file with that copy. Then the power fails.
    let mut batch = Batch::default();
    batch.put(*b"P", log);
    tail.append(&logged::encode(3, &batch), 0).expect("append");
    let (log, mut all) = used(&tail, at);
    all[log.len() - 1] ^= 1;
    std::fs::write(at.join("tail-0"), all).expect("write");
    assert_eq!(numbers(at, 0), [1, 2]);
}

#[test]
fn a_torn_end_is_cut_off_anywhere() {
    let directory = tempfile::tempdir().expect("directory");
    let at = directory.path();
    let mut tail = begun(at);
    append(&mut tail, 1);
    let whole_one = used(&tail, at).0.len();
    append(&mut tail, 2);
    let bytes = used(&tail, at).0;
    for cut in 0..bytes.len() {
        std::fs::write(at.join("tail-0"), &bytes[..cut]).expect("write");
        assert_eq!(numbers(at, 0).len(), usize::from(cut >= whole_one), "cut at {cut}");
        let mut zeros = bytes.clone();
        zeros[cut..].fill(0);
        std::fs::write(at.join("tail-0"), &zeros).expect("write");
        assert!(numbers(at, 0).len() <= 1, "zeros from {cut}");
    }
}

/// Writes four batches; the last record says that the batches up to `durable` are durable. Returns the file's bytes and the length of a record.
fn four(at: &Path, durable: u64) -> (Vec<u8>, usize) {
    let mut tail = begun(at);
    (1..=3).for_each(|number| append(&mut tail, number));
    tail.append(&logged(4), durable).expect("append");
    let bytes = used(&tail, at).0;
    let record = (bytes.len() - HEADER_BYTES) / 4;
    (bytes, record)
}

#[test]
fn rot_in_what_was_durable_is_not_taken_for_the_end() {
    let directory = tempfile::tempdir().expect("directory");
    let at = directory.path();
    let (bytes, record) = four(at, 3);
    for place in HEADER_BYTES..bytes.len() {
        let mut rotten = bytes.clone();
        rotten[place] ^= 1 << (place % 8);
        std::fs::write(at.join("tail-0"), &rotten).expect("write");
        let hit = ((place - HEADER_BYTES) / record) as u64 + 1;
        if hit == 4 {
            // Rot in the last record looks like a write that was cut off.
            assert_eq!(numbers(at, 0), [1, 2, 3]);
            continue;
        }
        let read = replay::read(at, 0);
        assert!(
            matches!(read, Err(LogError::Damaged { missing, durable: 3 }) if missing == hit),
            "byte {place}: {read:?}"
        );
        // If the checkpoint has the batches, the rotten record is not missed.
        assert_eq!(numbers(at, 3), [4]);
    }
    // The first three records are gone.
    let mut gone = bytes.clone();
    gone[HEADER_BYTES..HEADER_BYTES + 3 * record].fill(0);
    std::fs::write(at.join("tail-0"), &gone).expect("write");
    assert!(matches!(replay::read(at, 0), Err(LogError::Damaged { missing: 1, durable: 3 })));
}

#[test]
fn a_sync_that_was_under_way_may_leave_holes() {
    let directory = tempfile::tempdir().expect("directory");
    let at = directory.path();
    let (bytes, record) = four(at, 1);
    for (hole, left) in [(2, vec![1]), (3, vec![1, 2])] {
        let mut torn = bytes.clone();
        let from = HEADER_BYTES + (hole - 1) * record;
        torn[from..from + record].fill(0);
        std::fs::write(at.join("tail-0"), &torn).expect("write");
        assert_eq!(numbers(at, 0), left);
    }
}

#[test]
fn a_header_that_rots_loses_nothing() {
    let directory = tempfile::tempdir().expect("directory");
    let at = directory.path();
    let (bytes, _) = four(at, 3);
    for bit in 0..HEADER_BYTES * 8 {
        let mut rotten = bytes.clone();
        rotten[bit / 8] ^= 1 << (bit % 8);
        std::fs::write(at.join("tail-0"), &rotten).expect("write");
        assert_eq!(numbers(at, 0), [1, 2, 3, 4], "bit {bit}");
    }
}

#[test]
fn a_log_of_another_version_is_refused_and_left_alone() {
    let directory = tempfile::tempdir().expect("directory");
    let at = directory.path();
    append(&mut begun(at), 1);
    let mut bytes = std::fs::read(at.join("tail-0")).expect("read");
    bytes[..HEADER_BYTES].copy_from_slice(&header_of(*b"CFTAIL04", 77));
    std::fs::write(at.join("tail-0"), &bytes).expect("write");
    let refused = replay::read(at, 0).expect_err("another version");
    assert!(matches!(&refused, LogError::Version { found, .. } if found == "04"), "{refused}");
    assert_eq!(std::fs::read(at.join("tail-0")).expect("read"), bytes);
}

#[test]
fn what_a_client_wrote_is_no_record() {
    let directory = tempfile::tempdir().expect("directory");
    let at = directory.path();
    let tail = begun(at);
    // The bytes of a name or value look like a record, and lie in a record that a power loss tore.
    let forged = framed(tail.life ^ 2, u64::MAX, &logged(9));
    let mut torn = framed(tail.life, 0, &forged);
    torn.truncate(torn.len() - 1);
    torn.push(!torn[torn.len() - 1]);
    std::fs::write(at.join("tail-0"), [&header(tail.life)[..], &torn].concat()).expect("write");
    assert_eq!(numbers(at, 0), [0u64; 0]);
}

#[test]
fn what_finds_no_space_leaves_the_file_as_it_was() {
    let directory = tempfile::tempdir().expect("directory");
    let at = directory.path();
    let mut tail = begun(at);
    append(&mut tail, 1);
    // `/dev/full`: a device that is always full.
    let whole = std::mem::replace(
        &mut tail.files[0],
        Arc::new(File::options().write(true).open("/dev/full").expect("open")),
    );
    let refused = tail.append(&logged(2), 0).map_err(|error| error.kind());
    // The append failed. The test puts the real file back, whose length can be set, and goes on.
    assert!(refused.is_err());
    tail.files[0] = whole;
    append(&mut tail, 2);
    assert_eq!(numbers(at, 0), [1, 2]);
}

#[test]
fn only_what_was_written_to_is_synced() {
    let directory = tempfile::tempdir().expect("directory");
    let mut tail = begun(directory.path());
    assert_eq!(tail.begin_sync().len(), 0);
    append(&mut tail, 1);
    tail.turn();
    assert_eq!(tail.begin_sync().len(), 1);
    assert_eq!(tail.begin_sync().len(), 0);
    append(&mut tail, 2);
    tail.turn();
    append(&mut tail, 3);
    assert_eq!(tail.begin_sync().len(), 2);
}

#[test]
fn golden_bytes() {
    let directory = tempfile::tempdir().expect("directory");
    let mut tail = begun(directory.path());
    tail.life = 0x0102_0304_0506_0708;
    tail.begin().expect("begin");
    tail.append(&logged(7), 6).expect("append");
    let bytes = used(&tail, directory.path()).0;
    let mut expected = b"CFTAIL05\x08\x07\x06\x05\x04\x03\x02\x01".to_vec();
    expected.extend_from_slice(&HEADER_CRC.to_le_bytes());
    expected.extend_from_slice(&[0; 4]);
    expected.extend_from_slice(&[8, 7, 6, 5, 4, 3, 2, 1, 6, 0, 0, 0, 0, 0, 0, 0, 12, 0, 0, 0]);
    expected.extend_from_slice(&RECORD_CRC.to_le_bytes());
    // Batch: version, number 7, one change, key 07, a value of five times 07.
    expected.extend_from_slice(&[1, 7, 1, 1, 7, 1, 5, 7, 7, 7, 7, 7]);
    assert_eq!(bytes, expected);
}

// Computed by another implementation.
const HEADER_CRC: u32 = 0x6200_6160;
const RECORD_CRC: u32 = 0xdfdf_640d;

#[test]
fn a_file_that_is_no_logs_is_not_read_whole() {
    for (name, most) in [("tail-1", FILE_MOST_BYTES), ("direct-0", direct::FILE_BYTES)] {
        let dir = tempfile::tempdir().expect("a directory");
        let at = dir.path();
        append(&mut begun(at), 1);
        let file = std::fs::File::options()
            .write(true)
            .create(true)
            .truncate(false)
            .open(at.join(name))
            .expect("there");
        file.set_len(4 << 30).expect("sparse");
        let refused = replay::read(at, 0).expect_err("too long");
        assert!(
            matches!(refused, LogError::TooLong { name: found, most: known } if (found, known) == (name, most))
        );
        assert!(refused.to_string().starts_with(&format!("meta/{name} has more than")), "{refused}");
    }
}
