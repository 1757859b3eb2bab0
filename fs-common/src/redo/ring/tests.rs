//! The ring, compared with a model: a queue of flushed records. A crash keeps or drops each unflushed cache line independently.

use super::layout::{Checkpoint, Geometry, RingError};
use super::*;
use crate::ids::{ClientId, LogSeq, SlotIndex};
use crate::memory::SharedMemory;
use crate::persist::{CacheLines, Persistence, SyncFailed, WhenPersistent};
use crate::redo::record::{LogId, Record, RecordKind, encoded_len};
use proptest::prelude::*;
use std::collections::VecDeque;
use std::sync::{Arc, Mutex};

const LINE: usize = crate::persist::cache_lines::LINE_LEN;
const CLIENT: ClientId = ClientId(7);

/// Persistent memory at a crash: lines that were written back are there, each other line may be old or new.
struct Medium {
    durable: Mutex<Vec<u8>>,
}

impl Persistence for Medium {
    fn by_cache_lines(&self) -> bool {
        false
    }

    fn persist(&self, memory: &SharedMemory, offset: usize, len: usize, done: WhenPersistent) {
        let (first, end) = (offset / LINE * LINE, (offset + len).next_multiple_of(LINE));
        memory.read(first, &mut self.durable.lock().expect("no panic")[first..end]);
        done(Ok(()));
    }
}

impl Medium {
    fn new(len: usize) -> Arc<Self> {
        Arc::new(Self { durable: Mutex::new(vec![0; len]) })
    }

    /// The memory after a crash. For each line that differs, `kept` tells whether it was written in time; a line can be torn only between words of
    /// eight bytes.
    fn crash(&self, memory: &SharedMemory, mut kept: impl FnMut() -> u16) -> Arc<SharedMemory> {
        let mut durable = self.durable.lock().expect("no panic");
        let mut live = vec![0; durable.len()];
        memory.read(0, &mut live);
        for (durable, live) in durable.chunks_mut(LINE).zip(live.chunks(LINE)) {
            if durable != live {
                let words = match kept() % 4 {
                    0 => 0,
                    1 => LINE,
                    // The line was written back while the store buffer had come as far as this.
                    some => (some as usize * 7 + kept() as usize) % 8 * 8,
                };
                durable[..words].copy_from_slice(&live[..words]);
            }
        }
        let after = SharedMemory::new("after", durable.len()).expect("memory");
        after.write(0, &durable);
        Arc::new(after)
    }
}

fn record(data: &[u8]) -> Record<'_> {
    Record {
        kind: RecordKind::Request,
        lsn: LogSeq(0),
        client: CLIENT,
        slot: SlotIndex(0),
        seq: data.len() as u64,
        data,
    }
}

fn found(recovery: Result<Recovery, RingError>) -> (RingReader, Recovered) {
    match recovery.expect("opened") {
        Recovery::Found(reader, recovered) => (reader, recovered),
        Recovery::Fresh(_) => panic!("a ring was there"),
    }
}

/// A client, a server, the memory between them, and a model of what must be in it.
struct Walk {
    memory: Arc<SharedMemory>,
    medium: Arc<Medium>,
    mirror: SharedMemory,
    writer: RingWriter,
    reader: RingReader,
    geometry: Geometry,
    lives: u64,
    /// Records that were written and not executed yet: the data, and whether it was flushed.
    model: VecDeque<(Vec<u8>, bool)>,
    spans: VecDeque<Span>,
    taken: VecDeque<Taken>,
}

impl Walk {
    fn new(geometry: Geometry) -> Self {
        let memory = Arc::new(SharedMemory::new("ring", geometry.memory_len()).expect("memory"));
        let medium = Medium::new(memory.len());
        let reader =
            RingReader::make(memory.clone(), medium.clone(), geometry, LogId(1), CLIENT).expect("made");
        Self {
            mirror: SharedMemory::new("mirror", geometry.memory_len()).expect("memory"),
            writer: RingWriter::new(geometry, LogId(1)),
            memory,
            medium,
            reader,
            geometry,
            lives: 1,
            model: VecDeque::new(),
            spans: VecDeque::new(),
            taken: VecDeque::new(),
        }
    }

    fn copy(&self, offset: usize, len: usize) {
        self.mirror.copy_to_word_last(offset, &self.memory, offset, len);
    }

    fn write(&mut self, data: Vec<u8>, torn: Option<usize>) {
        match self.writer.room(data.len()) {
            Ok(Room::Enough) => {}
            Ok(Room::After(position)) => {
                assert!(position > self.reader.checkpoint().position, "there was room");
                return;
            }
            Err(RingError::TooLong { .. }) => return assert!(encoded_len(data.len()) > self.geometry.most()),
            Err(error) => panic!("{error}"),
        }
        let span = self.writer.put(&self.mirror, &record(&data), &mut Vec::new());
        if let Some((offset, len)) = span.wrap {
            self.copy(offset, len);
        }
        match torn {
            // The write was cut off, so only its first bytes are there.
            Some(cut) => self.mirror.copy_to(span.offset, &self.memory, span.offset, cut % span.len),
            None => self.copy(span.offset, span.len),
        }
        self.model.push_back((data, false));
        self.spans.push_back(span);
    }

    /// Flushes all written records, in order, as a queue pair does.
    fn flush(&mut self) {
        for (span, entry) in self.spans.iter().zip(&mut self.model) {
            if !entry.1 {
                if let Some((offset, len)) = span.wrap {
                    self.medium.persist(&self.memory, offset, len, Box::new(|_| {}));
                }
                self.medium.persist(&self.memory, span.offset, span.len, Box::new(|_| {}));
                entry.1 = true;
            }
        }
    }

    fn take(&mut self, count: usize) {
        for _ in 0..count {
            let Some(taken) = self.reader.poll().expect("this version") else { break };
            assert_eq!(taken.data, self.model[self.taken.len()].0);
            self.taken.push_back(taken);
        }
    }

    fn checkpoint(&mut self, count: usize) {
        // As a receiver, this executes and checkpoints only flushed records.
        let flushed = self.model.iter().take_while(|entry| entry.1).count();
        for _ in 0..count.min(flushed).min(self.taken.len()) {
            let taken = self.taken.pop_front().expect("counted");
            self.reader.checkpoint_to(taken.end, LogSeq(taken.lsn.0 + 1)).expect("persistent");
            self.model.pop_front();
            self.spans.pop_front();
        }
        let now = *self.reader.checkpoint();
        self.writer.read_head(&now).expect("within");
    }

    fn crash(&mut self, kept: &mut dyn FnMut() -> u16) {
        self.memory = self.medium.crash(&self.memory, kept);
        self.lives += 1;
        let next = LogId(self.lives);
        let opened = RingReader::open(self.memory.clone(), self.medium.clone(), self.geometry, next, CLIENT);
        let (mut reader, recovered) = found(opened);
        assert_eq!((recovered.log, recovered.client), (self.writer.log(), CLIENT));
        let flushed = self.model.iter().take_while(|entry| entry.1).count();
        let bytes: Vec<_> = recovered.records.iter().map(|taken| taken.data.clone()).collect();
        assert!(bytes.len() >= flushed, "{flushed} were acknowledged, {} are there", bytes.len());
        assert!(bytes.len() <= self.model.len(), "more than was written");
        for (index, (bytes, model)) in bytes.iter().zip(&self.model).enumerate() {
            assert_eq!(bytes, &model.0, "record {index}");
        }
        if let Some(last) = recovered.records.last() {
            reader.checkpoint_to(last.end, LogSeq(last.lsn.0 + 1)).expect("persistent");
        }
        let past = LogSeq(reader.checkpoint().lsn.0 - 1);
        reader.renew(next, CLIENT).expect("persistent");
        if past.0 > 0 {
            assert_eq!(reader.checkpoint().past, (recovered.log, past));
        }
        self.reader = reader;
        self.writer = RingWriter::new(self.geometry, next);
        self.model.clear();
        self.spans.clear();
        self.taken.clear();
        assert!(self.reader.poll().expect("this version").is_none(), "an old life left nothing");
    }
}

#[derive(Clone, Debug)]
enum Step {
    Write(usize, u8),
    WriteTorn(usize, usize),
    Flush,
    Take(usize),
    Checkpoint(usize),
    Crash(Vec<u16>),
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        6 => (0usize..1500, any::<u8>()).prop_map(|(len, byte)| Step::Write(len, byte)),
        1 => (0usize..600, any::<usize>()).prop_map(|(len, cut)| Step::WriteTorn(len, cut)),
        4 => Just(Step::Flush),
        4 => (1usize..8).prop_map(Step::Take),
        4 => (1usize..8).prop_map(Step::Checkpoint),
        1 => prop::collection::vec(any::<u16>(), 1..64).prop_map(Step::Crash),
    ]
}

proptest! {
    #[test]
    fn the_ring_is_a_queue_that_survives(
        slots in any::<bool>(),
        steps in prop::collection::vec(step(), 1..120),
    ) {
        let geometry = if slots { Geometry::slots(1024, 9) } else { Geometry::stream(8192) };
        let mut walk = Walk::new(geometry.expect("possible"));
        for step in steps {
            match step {
                Step::Write(len, byte) => walk.write(vec![byte; len], None),
                Step::WriteTorn(len, cut) => {
                    walk.write(vec![0x5a; len], Some(cut));
                    // The writer is gone, too: the next crash finds the part that it has written.
                    let mut lines = 0u16;
                    walk.crash(&mut || { lines = lines.wrapping_add(3); lines });
                }
                Step::Flush => walk.flush(),
                Step::Take(count) => walk.take(count),
                Step::Checkpoint(count) => walk.checkpoint(count),
                Step::Crash(kept) => {
                    let mut at = 0;
                    walk.crash(&mut || { at += 1; kept[at % kept.len()] });
                }
            }
        }
    }

    #[test]
    fn no_bytes_panic(bytes in prop::collection::vec(any::<u8>(), 0..400), at in 0usize..5000, good in any::<bool>()) {
        let memory = Arc::new(SharedMemory::new("ring", RECORDS_AT + 8192).expect("memory"));
        let medium = Medium::new(memory.len());
        let geometry = Geometry::stream(8192).expect("possible");
        if good {
            RingReader::make(memory.clone(), medium.clone(), geometry, LogId(1), CLIENT).expect("made");
        }
        memory.write(at, &bytes);
        if let Ok(Recovery::Found(mut reader, _)) = RingReader::open(memory, medium, geometry, LogId(2), CLIENT) {
            let _ = reader.poll();
        }
        let _ = Checkpoint::parse(&bytes);
    }
}

#[test]
fn golden_bytes() {
    let checkpoint = Checkpoint {
        generation: 3,
        log: LogId(0x0102),
        position: 0x0304,
        lsn: LogSeq(0x05),
        client: ClientId(0x06),
        past: (LogId(0x07), LogSeq(0x08)),
    };
    let mut bytes = [0; CHECKPOINT_LEN];
    for (at, value) in [(0, 3), (8, 2), (9, 1), (16, 4), (17, 3), (24, 5), (32, 6), (48, 7), (56, 8)] {
        bytes[at] = value;
    }
    bytes[64..68].copy_from_slice(&CHECKPOINT_CRC.to_le_bytes());
    assert_eq!(
        checkpoint.encode(),
        bytes,
        "{:#x}",
        u32::from_le_bytes(checkpoint.encode()[64..68].try_into().expect("4"))
    );
    assert_eq!(Checkpoint::parse(&bytes), Some(checkpoint));
    let memory = SharedMemory::new("ring", 3 * 4096).expect("memory");
    let geometry = Geometry::slots(1024, 8).expect("possible");
    super::layout::put_identity(&memory, &CacheLines, geometry).expect("persistent");
    let mut identity = [0; 28];
    memory.read(0, &mut identity);
    let mut expected = *b"CFRG\x01\0\0\0\0\x20\0\0\0\0\0\0\0\x04\0\0\0\0\0\0\0\0\0\0";
    expected[24..].copy_from_slice(&IDENTITY_CRC.to_le_bytes());
    assert_eq!(identity, expected, "{:#x}", u32::from_le_bytes(identity[24..].try_into().expect("4")));
}

// Another implementation gave these values.
const CHECKPOINT_CRC: u32 = 0x6308_19a4;
const IDENTITY_CRC: u32 = 0x6191_7a45;

#[test]
fn either_checkpoint_may_be_torn_and_without_one_the_ring_is_refused() {
    let geometry = Geometry::stream(8192).expect("possible");
    let mut walk = Walk::new(geometry);
    for count in 0..3u8 {
        walk.write(vec![count; 10], None);
    }
    walk.flush();
    walk.take(3);
    walk.checkpoint(2);
    let open = |memory: &Arc<SharedMemory>| {
        RingReader::open(memory.clone(), walk.medium.clone(), geometry, LogId(9), CLIENT)
    };
    for (place, records) in [(CHECKPOINTS_AT, 2), (CHECKPOINTS_AT + CHECKPOINT_LEN, 1)] {
        let memory = Arc::new(SharedMemory::new("copy", geometry.memory_len()).expect("memory"));
        walk.memory.copy_to(0, &memory, 0, geometry.memory_len());
        memory.write(place + 20, &[0xff]);
        let (_, recovered) = found(open(&memory));
        // The checkpoint that is left may be the older one: then more records are executed again, and none is lost.
        assert_eq!(recovered.records.len(), records);
        memory.write(CHECKPOINTS_AT + 20, &[0xff]);
        memory.write(CHECKPOINTS_AT + CHECKPOINT_LEN + 20, &[0xff]);
        assert!(matches!(open(&memory), Err(RingError::Damaged("checkpoints"))));
        memory.write(8, &[1]);
        assert!(matches!(open(&memory), Err(RingError::Damaged("identity"))));
    }
}

/// Makes this number of ranges persistent, then loses power.
struct Dying {
    medium: Arc<Medium>,
    left: Mutex<usize>,
}

impl Persistence for Dying {
    fn by_cache_lines(&self) -> bool {
        false
    }

    fn persist(&self, memory: &SharedMemory, offset: usize, len: usize, done: WhenPersistent) {
        let mut left = self.left.lock().expect("no panic");
        match left.checked_sub(1) {
            Some(fewer) => {
                *left = fewer;
                self.medium.persist(memory, offset, len, done);
            }
            None => done(Err(SyncFailed)),
        }
    }
}

proptest! {
    #[test]
    fn a_ring_whose_making_was_cut_off_is_made_again(
        over_another in any::<bool>(),
        ranges in 0usize..8,
        kept in prop::collection::vec(any::<u16>(), 8),
    ) {
        let old = Geometry::stream(8192).expect("possible");
        let geometry = Geometry::slots(1024, 8).expect("possible");
        let memory = Arc::new(SharedMemory::new("ring", old.memory_len()).expect("memory"));
        let medium = Medium::new(memory.len());
        if over_another {
            let mut ring = RingReader::make(memory.clone(), medium.clone(), old, LogId(1), CLIENT).expect("made");
            ring.renew(LogId(2), CLIENT).expect("persistent");
        }
        let dying = Arc::new(Dying { medium: medium.clone(), left: Mutex::new(ranges) });
        let made = RingReader::make(memory.clone(), dying, geometry, LogId(3), CLIENT);
        let mut kept = kept.iter().cycle();
        let after = medium.crash(&memory, || *kept.next().expect("a cycle"));
        let again = RingReader::open(after, medium, geometry, LogId(4), CLIENT);
        match again.expect("nothing was in it") {
            Recovery::Fresh(reader) => {
                prop_assert!(made.is_err());
                prop_assert_eq!(reader.geometry(), geometry);
            }
            Recovery::Found(reader, recovered) => {
                prop_assert!(recovered.records.is_empty());
                prop_assert!(reader.geometry() == geometry || (over_another && ranges == 0));
            }
        }
    }
}

#[test]
fn heads_that_cannot_be_are_refused() {
    let mut writer = RingWriter::new(Geometry::stream(8192).expect("possible"), LogId(1));
    assert_eq!(writer.heard(8, LogSeq(1)), Err(RingError::Head(8)));
    assert_eq!(writer.room(8000), Err(RingError::TooLong { len: 8072, most: 4096 }));
    assert!(Geometry::stream(100).is_err() && Geometry::slots(12, 800).is_err());
    assert!(Geometry::new(8192, 8192).is_err() && Geometry::new(8200, 16).is_err());
}
