//! A walk: does steps on the file system and on the model, and compares.

use super::super::world::{Crash, World, WorldConfig};
use super::model::Model;
use super::side::{Side, give_back};
use super::steps::Step;
use super::{CHURN_PAGES, KEYED, PAGE, SPAN};
use cuttlefs_client::native::{File, NativeError, OpenOptions, RegionKey, Rights, Status};
use cuttlefs_common::life::End;
use cuttlefs_common::world::Clock;
use std::time::Duration;

const BOTH: Rights = Rights { read: true, write: true };

/// What the walks came across.
#[derive(Clone, Copy, Debug, Default)]
pub struct Counts {
    pub atomics: u64,
    pub appends: u64,
    pub writes: u64,
    pub in_doubt: u64,
    pub losses: u64,
    pub ended: u64,
    pub moved: u64,
    /// Requests that were answered behind appends which no sync had covered.
    pub behind: u64,
}

/// A walk under way.
pub struct Walk {
    sides: [Side; 3],
    key: Option<RegionKey>,
    /// When the key's time is over, in milliseconds.
    expires_ms: Option<u64>,
    churn: File,
    model: Model,
    /// The session that has synced in this step, and whether it was told of a loss.
    synced: Option<(usize, bool)>,
    salt: u64,
    pub counts: Counts,
    // Dropped behind the sessions, which need it.
    pub world: World,
}

impl Walk {
    pub fn new(config: WorldConfig) -> Self {
        let world = World::new(config);
        let sides = [(); 3].map(|()| Side::new(&world));
        let churn = sides[0].session.open("churn", OpenOptions::CREATE).expect("made");
        let part = vec![7; 16 * PAGE];
        for at in (0..CHURN_PAGES * PAGE).step_by(part.len()) {
            churn.write_at(at as u64, &part).expect("written");
        }
        let file = sides[0].session.open("file", OpenOptions::CREATE).expect("made");
        churn.sync().and_then(|()| file.sync()).expect("durable");
        let (model, counts) = (Model::new(), Counts::default());
        let (key, expires_ms, salt) = (None, None, config.seed << 16);
        let mut walk = Self { sides, key, expires_ms, churn, model, synced: None, salt, counts, world };
        walk.sides[0].file = Some(file);
        walk.open_again(1);
        walk.set_bystanders();
        walk.hand_over(None);
        walk
    }

    fn set_bystanders(&self) {
        // None is being called.
        self.world.speaks(usize::MAX);
        self.world.set_bystanders(self.sides.iter().map(|side| &*side.volume));
    }

    fn open_again(&mut self, index: usize) {
        self.world.speaks(index);
        let opened = self.sides[index].session.open("file", OpenOptions::READ_WRITE).expect("opened");
        self.sides[index].file = Some(opened);
    }

    fn now_ms(&self) -> u64 {
        let now = self.world.clock().now();
        now.secs as u64 * 1000 + u64::from(now.nanos / 1_000_000)
    }

    fn is_expired(&self) -> bool {
        self.expires_ms.is_some_and(|time| self.now_ms() >= time)
    }

    fn bytes(&mut self, len: usize) -> Vec<u8> {
        self.salt += 1;
        // Never zero, so that a hole shows.
        (0..len as u64)
            .map(|at| (self.salt.wrapping_mul(31) + at.wrapping_mul(7) + (at >> 8)) as u8 | 1)
            .collect()
    }

    /// Whether a change of a session may have been one-sided: it has a grant.
    fn is_one_sided(&mut self, index: usize) -> bool {
        let side = &mut self.sides[index];
        let may_be = !side.grants.is_empty();
        side.is_ahead |= may_be;
        may_be
    }

    /// What session 2 opened by the key has ended.
    fn key_ended(&mut self) {
        assert!(self.key.is_none() || self.is_expired(), "nobody ended the key");
        self.counts.ended += 1;
        // A grant has ended with it.
        self.sides[KEYED].replace(None);
    }

    fn hand_over(&mut self, lifetime_ms: Option<u64>) {
        self.world.speaks(KEYED);
        self.sides[KEYED].replace(None);
        self.world.speaks(0);
        let owner = self.sides[0].file.clone().expect("session 0 has it open");
        if let Some(key) = self.key.take() {
            let unbound = owner.unbind(&key);
            assert!(unbound.is_ok() || self.is_expired(), "{unbound:?}");
        }
        let key = owner.bind(0, SPAN as u64, BOTH, lifetime_ms.map(Duration::from_millis)).expect("bound");
        (self.key, self.expires_ms) = (Some(key), key.expiry_ms);
        self.world.speaks(KEYED);
        match self.sides[KEYED].session.redeem(&key) {
            Ok(file) => self.sides[KEYED].file = Some(file),
            Err(NativeError::RegionEnded) if self.is_expired() => {}
            Err(error) => panic!("{error}"),
        }
    }

    /// Does a step, and returns whether a server died meanwhile.
    pub fn step(&mut self, index: usize, step: &Step) -> bool {
        self.world.speaks(index);
        self.synced = None;
        match *step {
            Step::Reuse { pages } => self.reuse(pages),
            Step::Unbind => {
                if let Some(key) = self.key {
                    self.world.speaks(0);
                    let unbound = self.sides[0].file.as_ref().expect("open").unbind(&key);
                    assert!(unbound.is_ok() || self.is_expired(), "{unbound:?}");
                    self.key = None;
                }
            }
            Step::HandOver { lifetime_ms } => self.hand_over(lifetime_ms),
            Step::Vanish => {
                let new = Side::new(&self.world);
                // As a killed process leaves it: nobody tells the server.
                std::mem::forget(std::mem::replace(&mut self.sides[1], new));
                if !self.world.answers_are_durable() {
                    self.model.vanished(1);
                }
                self.open_again(1);
                self.set_bystanders();
            }
            Step::Pass { ms } => self.world.pass(Duration::from_millis(ms)),
            Step::Lose { cut, pass } => self.world.network().cut_after(cut, pass),
            Step::Die { end } => self.world.crash_after(Crash { end, power: false }, None),
            Step::AppendBehind { len, end } => self.append_behind(index, len, end),
            Step::Evict => {
                self.world.speaks(0);
                let mut bytes = vec![0; CHURN_PAGES * PAGE];
                self.churn.read_at(0, &mut bytes).expect("read");
                assert!(bytes.iter().all(|byte| *byte == 7), "another file's bytes");
            }
            _ => {
                let Some(file) = self.sides[index].file.clone() else { return self.world.has_died() };
                self.change(index, &file, step);
            }
        }
        self.world.has_died()
    }

    /// Has a session append under a grant, and the next session by a request, unless the server dies meanwhile.
    fn append_behind(&mut self, index: usize, len: usize, end: Option<End>) {
        let other = (index + 1) % 3;
        self.world.speaks(other);
        self.sides[other].grants.drain(..).for_each(give_back);
        let parts = [
            (index, Step::Grant { offset: 0, len: 1 }),
            (index, Step::Append { len }),
            (other, Step::Append { len }),
        ];
        for (who, part) in parts {
            if self.world.is_new() {
                return;
            }
            self.world.speaks(who);
            if let Some(file) = self.sides[who].file.clone() {
                self.change(who, &file, &part);
            }
        }
        if let Some(end) = end.filter(|_| !self.world.is_new()) {
            self.world.crash_after(Crash { end, power: false }, None);
        }
    }

    fn reuse(&mut self, pages: usize) {
        self.world.speaks(0);
        let bytes = self.bytes(pages * PAGE);
        let session = &self.sides[0].session;
        let file = session.open("reuse", OpenOptions::CREATE).expect("made");
        file.write_at(0, &bytes).expect("written");
        let mut read = vec![0; bytes.len()];
        file.read_at(0, &mut read).expect("read");
        assert!(read == bytes, "another file's bytes");
        session.unlink("reuse").expect("removed");
    }

    fn change(&mut self, index: usize, file: &File, step: &Step) {
        let (size, deaths) = (self.model.bytes.len(), self.world.deaths());
        // The place behind which a request put something.
        let mut place = None;
        let result = match *step {
            Step::Grant { offset, len } => match file.grant_write(offset as u64, len as u64) {
                Ok(grant) => {
                    self.sides[index].grants.push(grant);
                    Ok(())
                }
                Err(NativeError::GrantOverlaps | NativeError::Server(Status::Busy)) => Ok(()),
                Err(error) => Err(error),
            },
            Step::GiveBack { which } => {
                let grants = &mut self.sides[index].grants;
                if which < grants.len() {
                    give_back(grants.swap_remove(which));
                }
                Ok(())
            }
            Step::Write { offset, len } => {
                let (bytes, is_one_sided) = (self.bytes(len), self.is_one_sided(index));
                let written = file.write_at(offset as u64, &bytes);
                if written.is_ok() {
                    self.counts.writes += 1;
                    self.model.write(index, is_one_sided, offset, &bytes);
                    place = Some(offset).filter(|_| !is_one_sided);
                }
                written
            }
            Step::Append { len } if size + len <= SPAN => {
                let is_request = self.sides[index].grants.is_empty();
                let appended = self.append(index, file, len);
                place = Some(size).filter(|_| is_request && appended.is_ok());
                appended
            }
            Step::Add { word, add } => {
                let done = file.fetch_add(word as u64 * 8, add);
                self.atomic(index, word * 8, done, |old| old.wrapping_add(add))
            }
            Step::Swap { word, hits } => {
                let there = self.model.word(word * 8);
                let (expect, swap) = (if hits { there } else { !there }, self.salt | 1 << 63);
                let done = file.compare_swap(word as u64 * 8, expect, swap);
                self.atomic(index, word * 8, done, |old| if old == expect { swap } else { old })
            }
            Step::SetLen { len } if index != KEYED => {
                let done = file.set_len(len as u64);
                if done.is_ok() {
                    self.model.set_len(index, len);
                    place = Some(len);
                }
                done
            }
            Step::Sync => self.sync(index, file),
            // A move is of whole files.
            Step::Defragment if index != KEYED => match file.defragment(|_| true) {
                Ok(moved) => {
                    self.counts.moved += moved.moved_pages;
                    Ok(())
                }
                Err(NativeError::Server(Status::NoSpace)) => Ok(()),
                Err(error) => Err(error),
            },
            _ => Ok(()),
        };
        // A request that met a death was done by the next server, which may have lost what was before it.
        if let Some(place) = place.filter(|_| self.world.deaths() == deaths) {
            self.counts.behind += u64::from(self.model.answered(place));
        }
        match result {
            Ok(()) => {}
            Err(NativeError::RegionEnded) if index == KEYED => self.key_ended(),
            Err(error) => panic!("session {index}: {step:?}: {error}"),
        }
    }

    fn append(&mut self, index: usize, file: &File, len: usize) -> Result<(), NativeError> {
        let (bytes, is_one_sided) = (self.bytes(len), self.is_one_sided(index));
        let (size, mut is_in_doubt) = (self.model.bytes.len(), false);
        let at = match file.append(&bytes) {
            Ok(at) => at as usize,
            Err(NativeError::MayBeDone) => {
                is_in_doubt = true;
                self.counts.in_doubt += 1;
                // If a server died, its bytes may be there or not, like those of others; if not, the length tells.
                let found = self.sides[0].file.as_ref().expect("open").len().expect("a length") as usize;
                if !self.world.is_new() && found == size {
                    return Ok(());
                }
                size
            }
            Err(error) => return Err(error),
        };
        assert!(at == size || self.world.is_new(), "an append to {size} bytes is at {at}");
        self.counts.appends += 1;
        if at <= self.model.bytes.len() {
            self.model.append(index, is_one_sided, at, &bytes);
            if is_in_doubt {
                self.model.doubt(at, len);
            }
        }
        Ok(())
    }

    fn atomic(
        &mut self,
        index: usize,
        offset: usize,
        done: Result<u64, NativeError>,
        new: impl Fn(u64) -> u64,
    ) -> Result<(), NativeError> {
        // One by request has no copy either. Also if it does not change the word: whoever posted a one-sided one does not know before it completes.
        let is_kept = !self.is_one_sided(index) && self.world.answers_are_durable();
        self.sides[index].is_ahead |= !is_kept;
        let there = self.model.word(offset);
        let is_in_doubt = matches!(done, Err(NativeError::MayBeDone));
        let old = match done {
            Ok(old) => old,
            Err(NativeError::PastEnd) => {
                assert!(offset + 8 > self.model.bytes.len() || self.world.is_new(), "before the end");
                return Ok(());
            }
            Err(NativeError::MayBeDone) => {
                self.counts.in_doubt += 1;
                if !self.world.is_new() {
                    let mut word = [0; 8];
                    self.sides[0]
                        .file
                        .as_ref()
                        .expect("open")
                        .read_at(offset as u64, &mut word)
                        .expect("read");
                    let found = u64::from_le_bytes(word);
                    assert!(found == there || found == new(there), "{found:x}: neither before nor behind it");
                    if found == there && new(there) != there {
                        return Ok(());
                    }
                }
                there
            }
            Err(error) => return Err(error),
        };
        // Behind a death, what it was before some of the changes that no sync had covered. What this one stores was never there: else it was done twice.
        let may_have = || self.world.is_new() && self.model.may_have(offset, &old.to_le_bytes());
        assert!(old == there || may_have(), "the word at {offset} was {old:x}, and {there:x} was expected");
        assert!(offset + 8 <= self.model.bytes.len() || self.world.is_new(), "behind the end");
        self.counts.atomics += 1;
        if new(old) != old && offset + 8 <= self.model.bytes.len() {
            self.model.write(index, !is_kept || is_in_doubt, offset, &new(old).to_le_bytes());
            if is_in_doubt {
                self.model.doubt(offset, 8);
            }
        }
        Ok(())
    }

    fn sync(&mut self, index: usize, file: &File) -> Result<(), NativeError> {
        let deaths = self.world.deaths();
        let side = &mut self.sides[index];
        let synced = file.sync();
        self.synced = Some((index, matches!(synced, Err(NativeError::BytesLost))));
        match synced {
            Ok(()) => {
                assert!(!side.must_hear, "a loss that session {index} was not told of");
            }
            Err(NativeError::BytesLost) => {
                assert!(side.may_hear || self.world.deaths() > deaths, "session {index} has lost nothing");
                (side.must_hear, side.may_hear) = (false, false);
                return Ok(());
            }
            Err(error) => return Err(error),
        }
        if self.world.deaths() == deaths {
            // The others do not know of it: they are told of a loss that this has prevented.
            (side.may_hear, side.is_ahead) = (false, false);
            self.model.synced();
        }
        Ok(())
    }

    /// The file as a session reads it; `None`: its key has ended.
    fn read(&mut self, index: usize) -> Option<Vec<u8>> {
        self.world.speaks(index);
        let mut bytes = vec![0; SPAN + 100];
        match self.sides[index].file.as_ref()?.read_at(0, &mut bytes[..SPAN]) {
            Ok(len) => bytes.truncate(len),
            Err(NativeError::RegionEnded) if index == KEYED => {
                self.key_ended();
                return None;
            }
            Err(error) => panic!("session {index} cannot read: {error}"),
        }
        Some(bytes)
    }

    /// Lets all come back to the next server, and checks what it has.
    pub fn survive(&mut self) {
        self.world.hold_crash(true);
        loop {
            (0..3).for_each(|index| drop(self.read(index)));
            self.world.pass(Duration::from_millis(200));
            if !self.world.has_died() {
                break;
            }
        }
        let found = self.read(0).expect("session 0 has it open");
        let losers = self.model.survive(&found);
        self.counts.losses += losers.len() as u64;
        for (index, side) in self.sides.iter_mut().enumerate() {
            let (is_loser, has_synced) = (losers.contains(&index), self.synced);
            assert!(
                !is_loser || has_synced != Some((index, false)),
                "a sync of session {index} has lost bytes"
            );
            side.must_hear |= is_loser && has_synced != Some((index, true));
            side.may_hear |= side.is_ahead;
        }
        self.world.hold_crash(false);
    }

    pub fn check(&mut self) {
        let was_over = self.key.is_none() || self.is_expired();
        for index in 0..3 {
            let found = self.read(index);
            if self.world.has_died() {
                return self.survive();
            }
            let known = &self.model.bytes;
            let differs = |found: &Vec<u8>| found != known;
            if let Some(found) = found.filter(differs) {
                let at = found.iter().zip(known).position(|(one, other)| one != other);
                panic!(
                    "session {index} reads {} bytes of {}, another one at {at:?}",
                    found.len(),
                    known.len()
                );
            }
        }
        assert!(!was_over || self.sides[KEYED].file.is_none(), "the key is over, and opens the file");
    }
}
