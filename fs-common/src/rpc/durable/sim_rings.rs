//! Rings in the memory of a simulation, persistent by cache lines: what a crash leaves of them is as open as on a machine.
//!
//! | of | killed | power lost |
//! | --- | --- | --- |
//! | what was stored | all of it | what was written back; of each other line all, nothing, or its first words |
//! | a ring that was removed | gone | gone, or there as it was |
//!
//! What a process does to them are events of its life; after its end nothing of it has any effect but bare stores, which a
//! process that died a moment later could have made as well.

use super::ring_place::RingPlace;
use super::rings::RingStoreError;
use crate::ids::ClientId;
use crate::life::{Event, Fate, Life};
use crate::memory::SharedMemory;
use crate::persist::cache_lines::LINE_LEN;
use crate::persist::{LogDevice, Persistence, SyncFailed, WhenPersistent};
use crate::redo::ring::RECORDS_AT;
use crate::world::Random;
use parking_lot::Mutex;
use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;

/// Bytes a word has that is stored whole.
const WORD_LEN: usize = 8;

#[derive(Default)]
struct State {
    rings: BTreeMap<ClientId, SimRing>,
    /// Nothing has synced their directory since.
    removed: BTreeMap<ClientId, SimRing>,
}

struct SimRing {
    memory: Arc<SharedMemory>,
    lines: Arc<Lines>,
}

/// The rings of a simulated server.
pub struct SimRings {
    life: Life,
    state: Mutex<State>,
    lies: bool,
}

/// What of a ring's memory is persistent.
struct Lines {
    life: Life,
    durable: Mutex<Vec<u8>>,
    lies: bool,
}

impl SimRings {
    /// None yet. With `lies`, write-back of records does nothing.
    pub fn new(life: Life, lies: bool) -> Self {
        Self { life, state: Mutex::default(), lies }
    }

    /// The power went.
    pub fn crash(&self, random: &dyn Random) {
        let mut state = self.state.lock();
        let State { rings, removed } = &mut *state;
        for (client, ring) in std::mem::take(removed) {
            if random.next_u64().is_multiple_of(2) {
                rings.entry(client).or_insert(ring);
            }
        }
        for SimRing { memory, lines } in rings.values() {
            let mut durable = lines.durable.lock();
            let mut live = vec![0; durable.len()];
            memory.read(0, &mut live);
            for (durable, live) in durable.chunks_mut(LINE_LEN).zip(live.chunks(LINE_LEN)) {
                if durable != live {
                    let words = match random.next_u64() % 4 {
                        0 => 0,
                        1 => LINE_LEN,
                        // The store buffer had got so far when the line was written back.
                        _ => (random.next_u64() as usize % (LINE_LEN / WORD_LEN)) * WORD_LEN,
                    };
                    durable[..words].copy_from_slice(&live[..words]);
                }
            }
            memory.write(0, &durable);
        }
    }

    fn dead() -> RingStoreError {
        RingStoreError::Sync(SyncFailed)
    }
}

impl SimRing {
    fn new(life: &Life, len_bytes: usize, lies: bool) -> Result<Self, std::io::Error> {
        let memory = Arc::new(SharedMemory::new("sim-ring", len_bytes)?);
        let durable = Mutex::new(vec![0; memory.len()]);
        Ok(Self { memory, lines: Arc::new(Lines { life: life.clone(), durable, lies }) })
    }
}

impl RingPlace for SimRings {
    fn path(&self, client: ClientId) -> PathBuf {
        format!("{:032x}.ring", client.0).into()
    }

    fn clients(&self) -> Result<Vec<ClientId>, RingStoreError> {
        Ok(self.state.lock().rings.keys().copied().collect())
    }

    fn len_bytes(&self, client: ClientId) -> Result<Option<u64>, RingStoreError> {
        Ok(self.state.lock().rings.get(&client).map(|ring| ring.memory.len() as u64))
    }

    fn open(&self, client: ClientId, len_bytes: usize) -> Result<LogDevice, RingStoreError> {
        let mut state = self.state.lock();
        let path = self.path(client);
        let failed = |source| RingStoreError::Directory { path: path.clone(), source };
        let is_new = !state.rings.contains_key(&client);
        if is_new {
            let fate = self.life.meets(Event::RingMade, len_bytes as u64);
            // Of one that was being made there may be a file of zeros.
            if fate == Fate::Happens || (fate == Fate::CutOff && self.life.events().1.is_multiple_of(2)) {
                let ring = SimRing::new(&self.life, len_bytes, self.lies).map_err(failed)?;
                state.rings.insert(client, ring);
                state.removed.remove(&client);
            }
            if fate != Fate::Happens {
                return Err(Self::dead());
            }
        }
        let ring = state.rings.get_mut(&client).ok_or_else(Self::dead)?;
        if ring.memory.len() < len_bytes {
            let longer = SimRing::new(&self.life, len_bytes, self.lies).map_err(failed)?;
            ring.memory.copy_to(0, &longer.memory, 0, ring.memory.len());
            longer.lines.durable.lock()[..ring.memory.len()].copy_from_slice(&ring.lines.durable.lock());
            *ring = longer;
        }
        Ok(LogDevice::simulated(&path, ring.memory.clone(), ring.lines.clone()))
    }

    fn remove(&self, client: ClientId) -> Result<(), RingStoreError> {
        let mut state = self.state.lock();
        if !state.rings.contains_key(&client) {
            return Ok(());
        }
        if !self.life.allows(Event::RingRemoved, 0) {
            return Err(Self::dead());
        }
        if let Some(ring) = state.rings.remove(&client) {
            state.removed.insert(client, ring);
        }
        Ok(())
    }
}

impl Persistence for Lines {
    fn by_cache_lines(&self) -> bool {
        true
    }

    fn persist(&self, memory: &SharedMemory, offset: usize, len: usize, done: WhenPersistent) {
        done(self.persist_and_wait(memory, offset, len));
    }

    fn persist_and_wait(&self, memory: &SharedMemory, offset: usize, len: usize) -> Result<(), SyncFailed> {
        let event = if offset < RECORDS_AT { Event::RingHead } else { Event::RingFlush };
        let fate = self.life.meets(event, offset as u64);
        let first = offset / LINE_LEN * LINE_LEN;
        let lines = (offset + len - first).div_ceil(LINE_LEN);
        let written = match fate {
            Fate::Happens if self.lies && event == Event::RingFlush => 0,
            Fate::Happens => lines,
            // It dies with the first of them written back; the others go or stay as any line does.
            Fate::CutOff => self.life.events().1 as usize % (lines + 1),
            Fate::Never => 0,
        };
        let mut durable = self.durable.lock();
        let end = (first + written * LINE_LEN).min(durable.len());
        memory.read(first, &mut durable[first..end]);
        if fate == Fate::Happens { Ok(()) } else { Err(SyncFailed) }
    }
}
