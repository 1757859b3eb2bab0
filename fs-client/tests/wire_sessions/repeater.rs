//! A client that sends each request several times, on several connections and in any order, and drops connections. Each request must take effect
//! once.
//!
//! A request has a token of the session's number, its slot and its number in the slot. The request appends the token to a file, or makes a file with
//! the token as its name. So the file and the directory show how often each request took effect.

use crate::asking::{Asking, PATIENCE, body_of, message};
use crate::dice::Dice;
use crate::grammar::Kind;
use crate::oracle::{Oracle, Way};
use crate::site::{READ_WRITE, REPEATER, ROOT, Site, read};
use crate::wire::Wire;
use cuttlefs_client::file::volume::Volume;
use cuttlefs_common::ids::{FileKey, InodeNo};
use cuttlefs_common::rdma::soft::tcp::packet::{PacketHeader, PacketKind};
use cuttlefs_common::rpc::{NewNode, Payload, Reply, Request, Rights, SessionSecret};
use cuttlefs_common::status::Status;
use std::path::PathBuf;
use std::time::{Duration, Instant};

const TOKEN_LEN: usize = 16;
/// The number of slots that it uses.
const SLOTS: u16 = 6;

/// A request, and its answer if there is one.
struct Said {
    message: Vec<u8>,
    token: [u8; TOKEN_LEN],
    appends: bool,
    /// The offset at which the token was written; 0 for a name; `u64::MAX` if the disk was full.
    answer: Option<u64>,
}

pub struct Repeater {
    path: PathBuf,
    secret: SessionSecret,
    session: u64,
    directory: InodeNo,
    filekey: FileKey,
    wires: Vec<(Wire, Way)>,
    /// The last request of each slot.
    last: Vec<Option<Said>>,
    seqs: Vec<u64>,
    done: Vec<Said>,
    trace: u64,
}

impl Repeater {
    pub fn new(site: &Site, dice: &Dice, oracle: &mut Oracle) -> Self {
        let (path, secret) = (site.unix(), SessionSecret(dice.array()));
        let mut trace = 2 << 32;
        let mut next = || {
            trace += 1;
            trace
        };
        let mut asking = Asking::connect(&path, REPEATER, oracle);
        let attached = asking.attach(secret, next(), oracle).expect("attached");
        let lookup = Request::Lookup { parent: attached.root, name: b"once" };
        let take = |reply: Reply<'_>| match reply {
            Reply::Attr(attr) => attr.ino,
            other => panic!("{other:?}"),
        };
        let directory = asking.ask(63, next(), &lookup, oracle, take).expect("its directory");
        let rights = Rights { read: true, write: true };
        let create =
            Request::Create { parent: directory, name: b"tokens", mode: 0o600, exclusive: true, rights };
        let take = |reply: Reply<'_>| match reply {
            Reply::Opened(opened) => opened.filekey,
            other => panic!("{other:?}"),
        };
        let filekey = asking.ask(63, next(), &create, oracle, take).expect("its file");
        Self {
            path,
            secret,
            session: attached.session,
            directory,
            filekey,
            wires: vec![(asking.wire, asking.way)],
            last: (0..SLOTS).map(|_| None).collect(),
            seqs: (0..SLOTS).map(|_| dice.number() >> 8).collect(),
            done: Vec::new(),
            trace,
        }
    }

    fn send(&mut self, wire: usize, slot: u16, oracle: &mut Oracle) {
        let Some(said) = &self.last[usize::from(slot)] else { return };
        let (wire, way) = &mut self.wires[wire];
        oracle.note_sent(*way, &said.message);
        wire.put(PacketHeader::new(PacketKind::Send, 0), &said.message);
    }

    pub fn step(&mut self, dice: &Dice, oracle: &mut Oracle) {
        self.listen(oracle);
        let slot = dice.below(usize::from(SLOTS)) as u16;
        match dice.below(10) {
            0 if self.wires.len() < 4 => self.connect(oracle),
            1 if !self.wires.is_empty() => drop(self.wires.swap_remove(dice.below(self.wires.len()))),
            2..5 => {
                for _ in 0..1 + dice.below(3) {
                    if !self.wires.is_empty() {
                        self.send(dice.below(self.wires.len()), slot, oracle);
                    }
                }
            }
            _ => {
                if self.wires.is_empty() {
                    self.connect(oracle);
                }
                if self.last[usize::from(slot)].as_ref().is_none_or(|said| said.answer.is_some()) {
                    self.say_something_new(dice, slot);
                    self.send(dice.below(self.wires.len()), slot, oracle);
                }
            }
        }
    }

    fn connect(&mut self, oracle: &mut Oracle) {
        let mut asking = Asking::connect(&self.path, REPEATER, oracle);
        self.trace += 1;
        let attached = asking.attach(self.secret, self.trace, oracle).expect("its session");
        assert_eq!(attached.session, self.session, "the session has ended");
        self.wires.push((asking.wire, asking.way));
    }

    fn say_something_new(&mut self, dice: &Dice, slot: u16) {
        self.trace += 1;
        let index = usize::from(slot);
        self.done.extend(self.last[index].take());
        self.seqs[index] += 1;
        let seq = self.seqs[index];
        let mut token = [0; TOKEN_LEN];
        token[..8].copy_from_slice(&(seq | 1 << 63).to_be_bytes());
        token[8..].copy_from_slice(&(self.session << 8 | u64::from(slot)).to_be_bytes());
        let appends = dice.chance(70);
        let name = hex(&token);
        let request = if appends {
            let payload = Payload::Inline(&token);
            Request::Write { filekey: self.filekey, offset: 0, append: true, payload }
        } else {
            Request::Make { parent: self.directory, name: &name, node: NewNode::File, mode: 0o600 }
        };
        let message = message(slot, seq, self.trace, &body_of(&request));
        self.last[index] = Some(Said { message, token, appends, answer: None });
    }

    fn listen(&mut self, oracle: &mut Oracle) {
        for (wire, way) in &mut self.wires {
            for (header, payload) in wire.pump() {
                assert_eq!(header.kind, PacketKind::Send, "nothing else was asked for");
                let (header, kind, reply) = oracle.check_message(*way, &payload);
                let index = usize::from(header.slot.0);
                if header.seq != self.seqs[index] {
                    // A copy that was answered after the slot's next request was sent.
                    let known = [None, Some(Status::BadSequence)].contains(&header.result.err());
                    assert!(header.seq < self.seqs[index] && known, "{header:?}");
                    continue;
                }
                let said = self.last[index].as_mut().expect("it was asked");
                let answer = match (kind, reply) {
                    (Kind::Write, Some(Reply::Written { offset, len, .. })) => {
                        assert_eq!(len as usize, TOKEN_LEN);
                        offset
                    }
                    (Kind::Make, Some(Reply::Attr(_))) => 0,
                    // Hostile peers may have filled the disk: nothing is done, and each copy is answered so or tried again.
                    (_, None) if header.result == Err(Status::NoSpace) => u64::MAX,
                    other => panic!("{header:?}: {other:?}"),
                };
                match said.answer {
                    None => said.answer = Some(answer),
                    Some(before) => assert_eq!(before, answer, "two answers to one request"),
                }
            }
        }
        self.wires.retain(|(wire, _)| !wire.is_over);
    }

    /// Sends requests again until each has an answer, detaches, and checks what was done.
    pub fn finish(mut self, site: &Site, dice: &Dice, oracle: &mut Oracle) {
        self.wires.clear();
        self.connect(oracle);
        let is_open = |said: &Option<Said>| said.as_ref().is_some_and(|said| said.answer.is_none());
        let deadline = Instant::now() + PATIENCE;
        for slot in 0..SLOTS {
            if is_open(&self.last[usize::from(slot)]) {
                self.send(0, slot, oracle);
            }
        }
        while self.last.iter().any(is_open) {
            assert!(Instant::now() < deadline, "a request that was sent again is not answered");
            self.listen(oracle);
            std::thread::sleep(Duration::from_micros(50));
        }
        let all: Vec<Said> = self.done.into_iter().chain(self.last.into_iter().flatten()).collect();
        check(site, &all);
        drop(self.wires);
        detach(&self.path, REPEATER, self.secret, dice, oracle);
    }
}

fn hex(token: &[u8; TOKEN_LEN]) -> Vec<u8> {
    format!("{:032x}", u128::from_be_bytes(*token)).into_bytes()
}

fn check(site: &Site, all: &[Said]) {
    let root = site.root();
    let once = root.lookup(&ROOT, InodeNo::ROOT, b"once").expect("lookup").ino;
    let ino = root.lookup(&ROOT, once, b"tokens").expect("lookup").ino;
    let handle = root.open(&ROOT, ino, READ_WRITE).expect("open").handle;
    let appended: Vec<&Said> = all.iter().filter(|said| said.appends).collect();
    let answered = |said: &&&Said| said.answer.is_some_and(|at| at != u64::MAX);
    let tokens = read(root, handle, TOKEN_LEN * (appended.len() + 1)).expect("read");
    root.release(handle);
    assert_eq!(
        tokens.len(),
        TOKEN_LEN * appended.iter().filter(answered).count(),
        "tokens were written twice, or lost"
    );
    for said in appended.iter().filter(answered) {
        let at = said.answer.expect("it was answered") as usize;
        assert_eq!(
            tokens.get(at..at + TOKEN_LEN),
            Some(&said.token[..]),
            "a token is not where it was said to be"
        );
    }
    let mut names = Vec::new();
    root.read_dir(&ROOT, once, 0, false, &mut |entry| {
        names.push(entry.name.to_vec());
        true
    })
    .expect("list");
    names.retain(|name| name != b"tokens");
    names.sort();
    let made = all.iter().filter(|said| !said.appends && said.answer == Some(0));
    let mut expected: Vec<Vec<u8>> = made.map(|said| hex(&said.token)).collect();
    expected.sort();
    assert_eq!(names, expected, "names that were made");
}

/// Ends the session of a secret, if this user may; returns whether it did. Tries all slots: the session's earlier client may have used some of them,
/// and a slot that was never used takes any number.
pub fn detach(
    path: &std::path::Path,
    uid: u32,
    secret: SessionSecret,
    dice: &Dice,
    oracle: &mut Oracle,
) -> bool {
    let mut asking = Asking::connect(path, uid, oracle);
    let mut trace = (3 << 32) | (dice.number() >> 33);
    if let Err(status) = asking.attach(secret, trace, oracle) {
        assert_eq!(status, Status::Denied);
        return false;
    }
    for slot in (0..64).rev() {
        trace += 1 << 40;
        match asking.ask_at(slot, dice.number() >> 1, trace, &Request::Detach, oracle, |_| ()) {
            Ok(()) => return true,
            Err(status) => assert_eq!(status, Status::BadSequence),
        }
    }
    panic!("a session with no slot that takes a number")
}
