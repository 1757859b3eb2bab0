//! Hostile peers. They send messages and packets that are right, nearly right or wrong, with any number that the server told one of them, in sessions
//! that begin and end and that other peers try to join.

use crate::asking::message;
use crate::dice::Dice;
use crate::grammar::{Grammar, Kind, Known};
use crate::oracle::{Oracle, Way};
use crate::site::STRANGERS;
use crate::wire::Wire;
use cuttlefs_common::rdma::soft::tcp::packet::{PacketHeader, PacketKind, build, hello_payload};
use cuttlefs_common::rpc::{Reply, ReplyHeader, SessionSecret};
use cuttlefs_common::status::Status;
use std::collections::HashMap;
use std::path::PathBuf;
use std::time::Duration;

/// The most connections at a time.
const PEERS_MAX: usize = 7;
/// How many sent messages are kept, to be sent again.
const LOG_MAX: usize = 128;
/// How many one-sided requests of the server a peer keeps to answer later.
const PENDING_MAX: usize = 64;
/// Requests about open files.
const OF_FILES: [Kind; 14] = [
    Kind::Open,
    Kind::Write,
    Kind::Write,
    Kind::Fetch,
    Kind::Fetch,
    Kind::Fetch,
    Kind::Allocate,
    Kind::CopyRange,
    Kind::SetLock,
    Kind::Restore,
    Kind::Bind,
    Kind::OpenRegion,
    Kind::GrantWrite,
    Kind::GrantWrite,
];
const SEND: PacketHeader = PacketHeader::new(PacketKind::Send, 0);

/// A connection of a hostile peer.
struct Stranger {
    wire: Wire,
    way: Way,
    /// The secret of the connection's session, as far as the peer knows.
    secret: Option<SessionSecret>,
    /// The secret of the last attach request.
    attaches_with: Option<SessionSecret>,
    /// Requests for the peer's memory that the server is still waiting for.
    pending: Vec<PacketHeader>,
    /// Whether the peer answers the server's requests for its memory at once.
    is_obliging: bool,
    /// Whether the peer does not read.
    is_deaf: bool,
}

/// All hostile peers, and what they know together.
pub struct Crowd {
    path: PathBuf,
    strangers: Vec<Stranger>,
    pub known: Known,
    /// Two secrets of each hostile user.
    secrets: Vec<SessionSecret>,
    /// Secrets of clients that keep the rules, and byte strings that differ little from one.
    others: Vec<SessionSecret>,
    /// The last number that was used in each slot of each session.
    seqs: HashMap<(SessionSecret2, u16), u64>,
    log: Vec<Vec<u8>>,
    trace: u64,
}

/// A secret as a key of a map.
type SessionSecret2 = [u8; 16];

impl Crowd {
    pub fn new(path: PathBuf, dice: &Dice, known: Known, others: Vec<SessionSecret>) -> Self {
        let secrets = (0..4).map(|_| SessionSecret(dice.array())).collect();
        let (strangers, log) = (Vec::new(), Vec::new());
        Self { path, strangers, known, secrets, others, seqs: HashMap::new(), log, trace: 4 << 32 }
    }

    /// One peer does something.
    pub fn act(&mut self, dice: &Dice, oracle: &mut Oracle) {
        self.listen(dice, oracle);
        let comes = self.strangers.len() < 2 || (self.strangers.len() < PEERS_MAX && dice.chance(15));
        if comes {
            self.come(dice, oracle);
            self.wait_a_little(dice, oracle);
            return;
        }
        let who = dice.below(self.strangers.len());
        match dice.below(100) {
            0..60 => {
                for _ in 0..1 + dice.below(4) {
                    // A detach would end the session: it has a case of its own, with its own odds.
                    let kind = dice.pick(Kind::ALL);
                    self.ask(who, if kind == Kind::Detach { Kind::Create } else { kind }, dice, oracle);
                }
            }
            // Requests that have an effect only with a root, or with an open file.
            60..74 => {
                let (has_root, has_files) =
                    self.strangers[who].secret.map_or((false, false), |s| self.known.has(s));
                let kinds: &[Kind] = match (has_root, has_files) {
                    (false, _) => &[Kind::Attach],
                    (true, false) => &[Kind::Lookup, Kind::Create, Kind::Open, Kind::ReadDir],
                    (true, true) => &OF_FILES,
                };
                match dice.pick(kinds) {
                    Kind::Attach => self.attach(who, dice, oracle),
                    kind => self.ask(who, kind, dice, oracle),
                }
            }
            74 => self.attach(who, dice, oracle),
            75..80 => self.say_again(who, dice, oracle),
            80..83 => self.say_wrong(who, dice, oracle),
            83..87 => self.one_sided(who, dice),
            87..94 => self.answer_transfers(who, dice),
            94 => self.break_packet(who, dice),
            95 if dice.chance(50) => self.unasked_reply(who, dice),
            95..97 => {
                let stranger = &mut self.strangers[who];
                match dice.below(3) {
                    0 => stranger.is_deaf = !stranger.is_deaf,
                    1 => stranger.is_obliging = !stranger.is_obliging,
                    _ => stranger.wire.half_close(),
                }
            }
            97 => self.ask(who, Kind::Detach, dice, oracle),
            98 => drop(self.strangers.swap_remove(who)),
            _ => {}
        }
        if dice.chance(60) {
            self.wait_a_little(dice, oracle);
        }
    }

    fn come(&mut self, dice: &Dice, oracle: &mut Oracle) {
        let uid = dice.pick(&STRANGERS);
        let mut wire = Wire::connect(&self.path, uid);
        match dice.below(20) {
            0 => wire.put_bytes(&dice.bytes(70)),
            1 => {
                let mut payload = hello_payload();
                payload[dice.below(16)] ^= 1 << dice.below(8);
                wire.put_bytes(&build(PacketHeader::new(PacketKind::Hello, 0), &payload));
            }
            2 => {}
            _ => wire.hello(),
        }
        let stranger = Stranger {
            wire,
            way: oracle.way(uid),
            secret: None,
            attaches_with: None,
            pending: Vec::new(),
            is_obliging: dice.chance(75),
            is_deaf: dice.chance(5),
        };
        self.strangers.push(stranger);
        let who = self.strangers.len() - 1;
        if dice.chance(90) {
            self.attach(who, dice, oracle);
        }
    }

    /// A random secret: in most cases one of this user, else one of any hostile user or of a client that keeps the rules.
    fn secret(&self, uid: u32, dice: &Dice) -> SessionSecret {
        let own = if uid == STRANGERS[0] { &self.secrets[..2] } else { &self.secrets[2..] };
        match dice.below(10) {
            0 => dice.pick(&self.others),
            1 => dice.pick(&self.secrets),
            _ => dice.pick(own),
        }
    }

    fn attach(&mut self, who: usize, dice: &Dice, oracle: &mut Oracle) {
        let uid = self.strangers[who].wire.uid;
        let secret = self.secret(uid, dice);
        let grammar = Grammar { dice, known: &self.known, uid, session: secret, attaches_with: secret };
        let body = grammar.draw(Kind::Attach);
        let message = message(0, 0, self.next_trace(), &body);
        let stranger = &mut self.strangers[who];
        stranger.attaches_with = Some(secret);
        stranger.secret = stranger.secret.or(Some(secret));
        self.say(who, message, oracle);
    }

    fn next_trace(&mut self) -> u64 {
        self.trace += 1;
        self.trace
    }

    /// Sends a request in the peer's session, in most cases with the right number.
    fn ask(&mut self, who: usize, kind: Kind, dice: &Dice, oracle: &mut Oracle) {
        let stranger = &self.strangers[who];
        let uid = stranger.wire.uid;
        let attaches_with = self.secret(uid, dice);
        let secret = stranger.secret.unwrap_or(SessionSecret::NONE);
        let slot = if dice.chance(97) { dice.below(56) as u16 } else { dice.edge() as u16 };
        let last = self.seqs.entry((secret.0, slot)).or_insert_with(|| dice.edge());
        let seq = match dice.below(20) {
            0 => *last,
            1 => dice.edge(),
            2 => last.wrapping_sub(1),
            _ => {
                *last = last.wrapping_add(1);
                *last
            }
        };
        let body = Grammar { dice, known: &self.known, uid, session: secret, attaches_with }.draw(kind);
        let message = message(slot, seq, self.next_trace(), &body);
        self.say(who, message, oracle);
    }

    fn say(&mut self, who: usize, message: Vec<u8>, oracle: &mut Oracle) {
        let stranger = &mut self.strangers[who];
        oracle.note_sent(stranger.way, &message);
        stranger.wire.put(SEND, &message);
        if self.log.len() < LOG_MAX {
            self.log.push(message);
        } else {
            let at = (self.trace % LOG_MAX as u64) as usize;
            self.log[at] = message;
        }
    }

    /// Sends messages again that any peer has sent before, on this connection.
    fn say_again(&mut self, who: usize, dice: &Dice, oracle: &mut Oracle) {
        if self.log.is_empty() {
            return;
        }
        for _ in 0..1 + dice.below(3) {
            self.say(who, dice.pick(&self.log), oracle);
        }
    }

    /// Sends an earlier message again with a part of it changed.
    fn say_wrong(&mut self, who: usize, dice: &Dice, oracle: &mut Oracle) {
        if self.log.is_empty() {
            return;
        }
        let mut message = dice.pick(&self.log);
        // A message that does not parse ends the connection, so most changes keep the length and touch the body only.
        match dice.below(8) {
            0 => message.truncate(dice.below(message.len())),
            1 => message.extend(dice.bytes(1 + dice.below(64))),
            2 => message[dice.below(48)] ^= 1 << dice.below(8),
            _ if message.len() > 48 => {
                for _ in 0..1 + dice.below(3) {
                    let at = 48 + dice.below((message.len() - 48).min(40));
                    message[at] =
                        if dice.chance(50) { dice.number() as u8 } else { message[at] ^ 1 << dice.below(8) };
                }
            }
            _ => {}
        }
        let stranger = &mut self.strangers[who];
        oracle.note_sent(stranger.way, &message);
        let immediate = dice.chance(3).then_some(7);
        stranger.wire.put(PacketHeader { imm: immediate, ..SEND }, &message);
    }

    fn one_sided(&mut self, who: usize, dice: &Dice) {
        use PacketKind::{
            Append, CompareSwap, CompareSwapFile, FetchAdd, FetchAddFile, Flush, ReadBitmap, ReadFile,
            ReadMemory, Write, WriteFile,
        };
        let kind = dice.pick(&[
            ReadFile,
            ReadFile,
            ReadFile,
            ReadBitmap,
            ReadMemory,
            Write,
            CompareSwap,
            FetchAdd,
            Flush,
            WriteFile,
            CompareSwapFile,
            FetchAddFile,
            Append,
        ]);
        let key = match kind {
            ReadFile | ReadBitmap | WriteFile | CompareSwapFile | FetchAddFile | Append
                if !self.known.filekeys.is_empty() && dice.chance(90) =>
            {
                dice.pick(&self.known.filekeys).0
            }
            _ if dice.chance(80) => dice.number() % 64,
            _ => dice.edge(),
        };
        let bare = PacketHeader { key, offset: dice.offset(), ..PacketHeader::new(kind, 0) };
        let stranger = &mut self.strangers[who];
        match kind {
            ReadFile | ReadBitmap | ReadMemory => {
                let wanted = dice.len().min(1 << 20) as u32;
                stranger.wire.put(PacketHeader { wanted, ..bare }, b"");
            }
            Write => {
                let imm = dice.chance(20).then_some(1);
                let bytes = dice.bytes(dice.below(5000));
                stranger.wire.put(PacketHeader { imm, ack: dice.chance(50), ..bare }, &bytes);
            }
            WriteFile => {
                let bytes = dice.bytes(dice.below(5000));
                stranger.wire.put(PacketHeader { ack: dice.chance(50), ..bare }, &bytes);
            }
            Append => {
                let bytes = dice.bytes(dice.below(5000));
                stranger.wire.put(PacketHeader { offset: 0, ..bare }, &bytes);
            }
            CompareSwap | CompareSwapFile => {
                stranger.wire.put(PacketHeader { first: dice.edge(), second: dice.edge(), ..bare }, b"");
            }
            FetchAdd | FetchAddFile => stranger.wire.put(PacketHeader { first: dice.edge(), ..bare }, b""),
            _ => {
                let first = dice.len().min(u64::from(u32::MAX));
                stranger.wire.put(PacketHeader { first, second: 1 + dice.number() % 2, ..bare }, b"");
            }
        }
    }

    /// Answers the server's pending requests for the peer's memory: correctly, wrongly or not at all.
    fn answer_transfers(&mut self, who: usize, dice: &Dice) {
        let stranger = &mut self.strangers[who];
        for asked in std::mem::take(&mut stranger.pending) {
            match dice.below(12) {
                0 => stranger.wire.put_bytes(&build(
                    PacketHeader {
                        status: Some(cuttlefs_common::rdma::WcStatus::RemoteAccess),
                        ..PacketHeader::new(PacketKind::Nak, asked.sequence)
                    },
                    b"",
                )),
                1 => {
                    let short = PacketHeader { wanted: (dice.len() as u32).min(1 << 20), ..asked };
                    answer_transfer(&mut stranger.wire, &short, dice);
                }
                2 => {
                    let other =
                        PacketHeader { sequence: asked.sequence.wrapping_add(dice.number() % 3), ..asked };
                    answer_transfer(&mut stranger.wire, &other, dice);
                }
                3 => {}
                _ => answer_transfer(&mut stranger.wire, &asked, dice),
            }
        }
    }

    /// Sends a packet that has one bit changed or lacks its end.
    fn break_packet(&mut self, who: usize, dice: &Dice) {
        let payload = if self.log.is_empty() { dice.bytes(64) } else { dice.pick(&self.log) };
        let mut packet = build(PacketHeader::new(PacketKind::Send, dice.edge()), &payload);
        match dice.below(3) {
            0 => packet.truncate(dice.below(packet.len())),
            1 => packet[dice.below(64)] ^= 1 << dice.below(8),
            _ => packet[dice.below(payload.len().max(1))] ^= 1 << dice.below(8),
        }
        self.strangers[who].wire.put_bytes(&packet);
    }

    fn unasked_reply(&mut self, who: usize, dice: &Dice) {
        use PacketKind::{AtomicReply, FlushAck, ReadReply, Refuse, Welcome, WriteAck};
        let kind = dice.pick(&[AtomicReply, FlushAck, ReadReply, Refuse, Welcome, WriteAck]);
        let payload = match kind {
            ReadReply | Refuse => dice.bytes(dice.below(256)),
            Welcome => hello_payload().to_vec(),
            _ => Vec::new(),
        };
        self.strangers[who].wire.put_bytes(&build(PacketHeader::new(kind, dice.number() % 8), &payload));
    }

    /// Gives the server time to answer, so that the peers learn numbers for their next requests.
    fn wait_a_little(&mut self, dice: &Dice, oracle: &mut Oracle) {
        for _ in 0..20 {
            std::thread::sleep(Duration::from_micros(50));
            if self.listen(dice, oracle) > 0 {
                break;
            }
        }
    }

    /// Receives what has come and checks it by the model; returns the number of packets.
    fn listen(&mut self, dice: &Dice, oracle: &mut Oracle) -> usize {
        let mut came = 0;
        for stranger in self.strangers.iter_mut().filter(|stranger| !stranger.is_deaf) {
            for (header, payload) in stranger.wire.pump() {
                came += 1;
                oracle.check_bytes(stranger.way, &payload);
                match header.kind {
                    PacketKind::Send => {
                        let (header, _, reply) = oracle.check_message(stranger.way, &payload);
                        if let Some(reply) = &reply {
                            if matches!(reply, Reply::Attached(_)) {
                                stranger.secret = stranger.attaches_with;
                            }
                            let session = stranger.secret.unwrap_or(SessionSecret::NONE);
                            self.known.learn(dice, session, reply);
                        }
                        back_off(&mut self.seqs, stranger.secret, &header);
                    }
                    PacketKind::ReadMemory | PacketKind::Write if stranger.is_obliging => {
                        answer_transfer(&mut stranger.wire, &header, dice);
                    }
                    PacketKind::ReadMemory | PacketKind::Write if stranger.pending.len() < PENDING_MAX => {
                        stranger.pending.push(header);
                    }
                    _ => {}
                }
            }
        }
        self.strangers.retain(|stranger| !stranger.wire.is_over);
        came
    }
}

/// If the server refused the last number of a slot, takes it back, so that it is used again.
fn back_off(
    seqs: &mut HashMap<(SessionSecret2, u16), u64>,
    secret: Option<SessionSecret>,
    header: &ReplyHeader,
) {
    let Some(last) = secret.and_then(|secret| seqs.get_mut(&(secret.0, header.slot.0))) else { return };
    if header.result == Err(Status::BadSequence) && *last == header.seq {
        *last = last.wrapping_sub(1);
    }
}

fn answer_transfer(wire: &mut Wire, asked: &PacketHeader, dice: &Dice) {
    match asked.kind {
        PacketKind::ReadMemory => {
            let reply = PacketHeader::new(PacketKind::ReadReply, asked.sequence);
            wire.put_bytes(&build(reply, &dice.bytes(asked.wanted as usize)));
        }
        PacketKind::Write if asked.ack => {
            wire.put_bytes(&build(PacketHeader::new(PacketKind::WriteAck, asked.sequence), b""));
        }
        _ => {}
    }
}
