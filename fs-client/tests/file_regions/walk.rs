//! A walk of two sessions over two links beside a model of bytes and grants: what is granted is done, what is not is refused, and each read is as the
//! model knows it. `files/tests/grants.rs` of the server walks further, over evictions and crashes.

use super::program::{BOTH, Program};
use super::{Site, links};
use cuttlefs_common::attr::SetAttr;
use cuttlefs_common::ids::{FileKey, InodeNo};
use cuttlefs_common::rdma::WcStatus;
use cuttlefs_common::rpc::{Allocate, Request, SyncScope};
use cuttlefs_common::status::Status;
use cuttlefs_common::world::{Random, SeededRandom};
use cuttlefs_server::rights::ExportRule;

/// No operation reaches past this offset, so that a read by RPC has all of the file in one message.
const SPAN: u64 = 15_000;
const STEPS: usize = 400;

struct Session {
    program: Program,
    key: FileKey,
    granted: Vec<(u64, u64)>,
}

struct Walk {
    sessions: Vec<Session>,
    ino: InodeNo,
    model: Vec<u8>,
    random: SeededRandom,
    /// One-sided changes that were made, and that were refused.
    made: [u32; 3],
    refused: u32,
}

impl Walk {
    fn below(&self, bound: u64) -> u64 {
        self.random.next_u64() % bound
    }

    /// A range; in most cases one that is granted to the session.
    fn range(&self, who: usize) -> (u64, u64) {
        let granted = &self.sessions[who].granted;
        let (start, end) = match granted.len() as u64 {
            0 => (0, SPAN),
            _ if self.below(4) == 0 => (0, SPAN),
            count => granted[self.below(count) as usize],
        };
        let offset = start + self.below(end - start);
        (offset, 1 + self.below((end - offset).min(5000)))
    }

    fn bytes(&self, len: u64) -> Vec<u8> {
        (0..len).map(|_| self.random.next_u64() as u8).collect()
    }

    fn covers(&self, who: usize, offset: u64, end: u64) -> bool {
        let has =
            |byte: u64| self.sessions[who].granted.iter().any(|(start, end)| (*start..*end).contains(&byte));
        end <= self.model.len() as u64 && (offset..end).all(has)
    }

    fn put(&mut self, offset: u64, bytes: &[u8]) {
        let end = offset as usize + bytes.len();
        if self.model.len() < end {
            self.model.resize(end, 0);
        }
        self.model[offset as usize..end].copy_from_slice(bytes);
    }

    fn end_grants(&mut self, offset: u64, end: u64) {
        for session in &mut self.sessions {
            session.granted.retain(|(start, stop)| !(*start < end && offset < *stop));
        }
    }

    /// Counts the outcome of a one-sided change. Returns its value, if it was made.
    fn outcome<T>(&mut self, kind: usize, may: bool, result: Result<T, WcStatus>) -> Option<T> {
        match result {
            Ok(value) => {
                assert!(may, "it is not granted");
                self.made[kind] += 1;
                Some(value)
            }
            Err(status) => {
                assert_eq!((status, may), (WcStatus::RemoteAccess, false));
                self.refused += 1;
                None
            }
        }
    }

    fn step(&mut self) {
        let who = self.below(2) as usize;
        let (offset, len) = self.range(who);
        let size = self.model.len() as u64;
        let key = self.sessions[who].key;
        match self.below(16) {
            0..2 => {
                let (offset, len) = (self.below(SPAN), 1 + self.below(5000));
                self.sessions[who].program.grant(key, offset, len).expect("there is room");
                let end = offset + len;
                let granted = &mut self.sessions[who].granted;
                granted.retain(|(start, stop)| !(*start < end && offset < *stop));
                granted.push((offset, end));
            }
            2..6 => {
                let (may, bytes) = (self.covers(who, offset, offset + len), self.bytes(len));
                let written = self.sessions[who].program.write_at(key, offset, &bytes);
                if self.outcome(0, may, written).is_some() {
                    self.put(offset, &bytes);
                }
            }
            6..8 => {
                let may = !self.sessions[who].granted.is_empty();
                let bytes = self.bytes(len.min(SPAN.saturating_sub(size)).min(1000));
                let placed = self.sessions[who].program.append(key, &bytes);
                if let Some(at) = self.outcome(1, may, placed) {
                    assert_eq!(at, size);
                    self.put(at, &bytes);
                }
            }
            8..10 => {
                let (at, add) = (offset / 8 * 8, self.random.next_u64());
                let may = self.covers(who, at, at + 8);
                let old = self.sessions[who].program.add(key, at, add);
                if let Some(old) = self.outcome(2, may, old) {
                    let known = self.model[at as usize..][..8].try_into().expect("eight bytes");
                    assert_eq!(old, u64::from_le_bytes(known));
                    self.put(at, &old.wrapping_add(add).to_le_bytes());
                }
            }
            10..12 => {
                let append = self.below(2) == 0;
                let at = if append { size } else { offset };
                let bytes = self.bytes(len.min(SPAN.saturating_sub(at)));
                assert_eq!(self.sessions[who].program.write(key, offset, append, &bytes), Ok(at));
                if !bytes.is_empty() {
                    self.put(at, &bytes);
                }
            }
            12 => {
                let size_now = self.below(SPAN);
                let set = SetAttr { size: Some(size_now), ..SetAttr::default() };
                let request = Request::SetAttr { ino: self.ino, set };
                self.sessions[who].program.call(&request, |_| ()).expect("cut");
                if size_now < size {
                    self.end_grants(size_now, u64::MAX);
                }
                self.model.resize(size_now as usize, 0);
            }
            13 => {
                let how = Allocate::ZeroRange { keep_size: true };
                let request = Request::Allocate { filekey: key, offset, len, how };
                self.sessions[who].program.call(&request, |_| ()).expect("zeroed");
                self.end_grants(offset, offset + len);
                let end = (offset + len).min(size);
                if offset < end {
                    self.model[offset as usize..end as usize].fill(0);
                }
            }
            14 => {
                let program = &mut self.sessions[who].program;
                program.done(&Request::Sync(SyncScope::Inode(self.ino))).expect("durable");
            }
            _ => {
                // The filekey ends, and its grants with it.
                let session = &mut self.sessions[who];
                session.program.done(&Request::Close { filekeys: vec![key] }).expect("closed");
                assert_eq!(session.program.fetch(key, 0, 1), Err(Status::Stale));
                session.key = session.program.open(self.ino, BOTH).expect("opens").filekey;
                session.granted.clear();
            }
        }
        let other = &mut self.sessions[1 - who];
        let (by_rpc, one_sided) = (other.program.fetch(other.key, 0, SPAN as u32 + 1000), {
            let me = &mut self.sessions[who];
            me.program.read_at(me.key, 0, SPAN as u32 + 1000)
        });
        assert_eq!(by_rpc.as_ref(), Ok(&self.model));
        // All of it is in memory.
        assert_eq!(one_sided.as_ref(), Ok(&self.model));
    }
}

#[test]
fn two_sessions_do_what_they_are_granted() {
    let site = Site::new(vec![ExportRule::default()]);
    let mut programs = links(&site).into_iter().zip(1..).map(|(link, secret)| Program::start(&link, secret));
    let (mut one, mut two) = (programs.next().expect("tcp"), programs.next().expect("unix"));
    let opened = one.create(b"file", 0o644);
    let theirs = two.open(opened.attr.ino, BOTH).expect("opens");
    let session = |program, key| Session { program, key, granted: Vec::new() };
    let sessions = vec![session(one, opened.filekey), session(two, theirs.filekey)];
    let (model, random) = (Vec::new(), SeededRandom::new(11));
    let mut walk = Walk { sessions, ino: opened.attr.ino, model, random, made: [0; 3], refused: 0 };
    for step in 0..STEPS {
        // Shown if the step fails.
        println!("step {step}");
        walk.step();
    }
    let all = [walk.made.as_slice(), &[walk.refused]].concat();
    assert!(all.iter().all(|count| *count >= 5), "made {:?}, refused {}", walk.made, walk.refused);
}
