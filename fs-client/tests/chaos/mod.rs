//! A bad link: a proxy between tcp clients and their server that damages what it passes on. A seed decides the faults.
//!
//! | fault | effect on a piece of the stream |
//! | --- | --- |
//! | corrupt | one bit is flipped |
//! | corrupt header | one bit of the first bytes is flipped, where a packet's header is in most cases |
//! | lose | some bytes are missing |
//! | double | some bytes come twice |
//! | swap | two neighbouring parts change places |
//! | cut | after some byte the connection ends, in both directions |
//! | stall | the piece comes later |
//! | dribble | the piece comes in parts of a few bytes |
//!
//! TCP itself would not lose bytes, so an end may wait for a long time for bytes that this link has dropped. Therefore the link cuts a damaged
//! connection after a while, unless one of its ends has closed it before. `Figures` counts both cases.

#![allow(dead_code, reason = "each test binary uses its part")]

use cuttlefs_common::rdma::Endpoint;
use cuttlefs_common::world::{Random, SeededRandom};
use std::io::{ErrorKind, Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// The value of `only` that allows all faults.
const ANY: u64 = u64::MAX;
/// The most bytes that are read, and damaged, as one piece.
const PIECE_BYTES: usize = 16 * 1024;
/// How often a pump looks whether its connection must end.
const LOOK: Duration = Duration::from_millis(20);
/// The length of a packet's header.
const HEADER_BYTES: usize = 64;
/// How long a damaged connection stands before it is cut.
const DAMAGED_STANDS: Duration = Duration::from_millis(150);

/// What the link does to a piece.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    Corrupt,
    Lose,
    Double,
    Swap,
    Cut,
    Stall,
    Dribble,
    CorruptHeader,
}

impl Fault {
    pub const ALL: [Self; 8] = [
        Self::Corrupt,
        Self::Lose,
        Self::Double,
        Self::Swap,
        Self::Cut,
        Self::Stall,
        Self::Dribble,
        Self::CorruptHeader,
    ];

    fn damages(self) -> bool {
        matches!(self, Self::Corrupt | Self::CorruptHeader | Self::Lose | Self::Double | Self::Swap)
    }
}

/// Counts of faults and of damaged connections.
#[derive(Debug, Default)]
pub struct Figures {
    /// The pieces with each fault, indexed by `Fault as usize`.
    pub faults: [AtomicU64; 8],
    /// Damaged connections that one of their ends closed.
    pub noticed: AtomicU64,
    /// Damaged connections that the link had to cut.
    pub cut_late: AtomicU64,
}

struct Shared {
    to: SocketAddr,
    seed: u64,
    /// One piece of this many has a fault; 0: none.
    one_in: AtomicU64,
    /// Connections up to this number stand and pass nothing on.
    dead_up_to: AtomicU64,
    /// Connections up to this number are cut.
    cut_up_to: AtomicU64,
    connections: AtomicU64,
    /// The only fault that is used, as `Fault as usize`; `ANY`: all of them.
    only: AtomicU64,
    /// Damaged connections are not cut, and stand until one of their ends closes them.
    leaves_damaged: AtomicBool,
    stopped: AtomicBool,
    figures: Figures,
}

/// A bad link, which works until it is dropped.
pub struct BadLink {
    at: SocketAddr,
    shared: Arc<Shared>,
}

impl BadLink {
    /// A link to a server's tcp endpoint, without faults at first.
    pub fn to(server: &Endpoint, seed: u64) -> Self {
        Self::between("127.0.0.1:0", server, seed)
    }

    /// As `to`, but the link listens at the address `at`.
    pub fn between(at: &str, server: &Endpoint, seed: u64) -> Self {
        let address = server.to_string();
        let to = address.strip_prefix("tcp://").expect("a tcp endpoint").parse().expect("an address");
        let listener = TcpListener::bind(at).expect("listen");
        let at = listener.local_addr().expect("an address");
        let shared = Arc::new(Shared {
            to,
            seed,
            one_in: AtomicU64::new(0),
            dead_up_to: AtomicU64::new(0),
            cut_up_to: AtomicU64::new(0),
            connections: AtomicU64::new(0),
            only: AtomicU64::new(ANY),
            leaves_damaged: AtomicBool::new(false),
            stopped: AtomicBool::new(false),
            figures: Figures::default(),
        });
        let accepting = shared.clone();
        std::thread::spawn(move || accept(&listener, &accepting));
        Self { at, shared }
    }

    /// The endpoint for clients to connect to.
    pub fn endpoint(&self) -> Endpoint {
        format!("tcp://{}", self.at).parse().expect("an endpoint")
    }

    /// From now on one piece of this many has a fault; 0: none.
    pub fn set_faults(&self, one_in: u64) {
        self.shared.one_in.store(one_in, Ordering::Relaxed);
    }

    /// From now on only this fault is used.
    pub fn set_only(&self, fault: Fault) {
        self.shared.only.store(fault as u64, Ordering::Relaxed);
    }

    /// From now on damaged connections are not cut: their ends must notice the damage.
    pub fn leave_damaged(&self) {
        self.shared.leaves_damaged.store(true, Ordering::Relaxed);
    }

    /// From now on the present connections pass nothing on, and stay up.
    pub fn swallow(&self) {
        let all = self.shared.connections.load(Ordering::Relaxed);
        self.shared.dead_up_to.store(all, Ordering::Relaxed);
    }

    /// Breaks the present connections.
    pub fn cut(&self) {
        let all = self.shared.connections.load(Ordering::Relaxed);
        self.shared.cut_up_to.store(all, Ordering::Relaxed);
    }

    /// The counts so far.
    pub fn figures(&self) -> &Figures {
        &self.shared.figures
    }
}

impl Drop for BadLink {
    fn drop(&mut self) {
        self.shared.stopped.store(true, Ordering::Relaxed);
        // Wakes the thread that waits in accept.
        let _ = TcpStream::connect(self.at);
    }
}

fn accept(listener: &TcpListener, shared: &Arc<Shared>) {
    for (number, client) in (1u64..).zip(listener.incoming()) {
        if shared.stopped.load(Ordering::Relaxed) {
            return;
        }
        let (Ok(client), Ok(server)) = (client, TcpStream::connect(shared.to)) else { continue };
        shared.connections.store(number, Ordering::Relaxed);
        let damaged = Arc::new(AtomicBool::new(false));
        for (from, to, seed) in [(&client, &server, 2 * number), (&server, &client, 2 * number + 1)] {
            let (Ok(from), Ok(to)) = (from.try_clone(), to.try_clone()) else { continue };
            let random = SeededRandom::new(shared.seed.wrapping_mul(0x9e37_79b9).wrapping_add(seed));
            let pump = Pump { number, from, to, random, shared: shared.clone(), damaged: damaged.clone() };
            std::thread::spawn(move || pump.run());
        }
    }
}

/// One direction of a connection.
struct Pump {
    number: u64,
    from: TcpStream,
    to: TcpStream,
    random: SeededRandom,
    shared: Arc<Shared>,
    /// Shared by both directions, so that a damaged connection is counted once.
    damaged: Arc<AtomicBool>,
}

impl Pump {
    fn run(mut self) {
        let _ = self.from.set_nodelay(true);
        let _ = self.from.set_read_timeout(Some(LOOK));
        let mut damaged_at: Option<Instant> = None;
        let mut piece = vec![0; PIECE_BYTES];
        loop {
            let read = self.from.read(&mut piece);
            if self.number <= self.shared.cut_up_to.load(Ordering::Relaxed) {
                break;
            }
            let leaves = self.shared.leaves_damaged.load(Ordering::Relaxed);
            if !leaves && damaged_at.is_some_and(|at| at.elapsed() >= DAMAGED_STANDS) {
                self.shared.figures.cut_late.fetch_add(1, Ordering::Relaxed);
                break;
            }
            let passed = match read {
                Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut) => {
                    if self.shared.stopped.load(Ordering::Relaxed) {
                        break;
                    }
                    continue;
                }
                Ok(0) | Err(_) => None,
                Ok(count) => self.pass(&piece[..count]),
            };
            match passed {
                Some(damaged) => {
                    if damaged && !self.damaged.swap(true, Ordering::Relaxed) {
                        damaged_at = Some(Instant::now());
                    }
                }
                None => {
                    if damaged_at.is_some() {
                        self.shared.figures.noticed.fetch_add(1, Ordering::Relaxed);
                    }
                    break;
                }
            }
        }
        let _ = self.from.shutdown(Shutdown::Both);
        let _ = self.to.shutdown(Shutdown::Both);
    }

    fn below(&self, bound: usize) -> usize {
        (self.random.next_u64() % bound.max(1) as u64) as usize
    }

    /// Passes a piece on. Returns whether it was damaged; `None` if the connection is over.
    fn pass(&mut self, piece: &[u8]) -> Option<bool> {
        if self.number <= self.shared.dead_up_to.load(Ordering::Relaxed) {
            return Some(false);
        }
        let one_in = self.shared.one_in.load(Ordering::Relaxed);
        if one_in == 0 || !self.random.next_u64().is_multiple_of(one_in) {
            return self.to.write_all(piece).ok().map(|()| false);
        }
        let fault = match self.shared.only.load(Ordering::Relaxed) {
            ANY => Fault::ALL[self.below(Fault::ALL.len())],
            only => Fault::ALL[only as usize],
        };
        self.shared.figures.faults[fault as usize].fetch_add(1, Ordering::Relaxed);
        let middle = self.below(piece.len());
        let end = middle + 1 + self.below(piece.len() - middle);
        let mut changed = piece.to_vec();
        match fault {
            Fault::Corrupt => changed[middle] ^= 1 << self.below(8),
            Fault::CorruptHeader => changed[middle % HEADER_BYTES] ^= 1 << self.below(8),
            Fault::Lose => drop(changed.drain(middle..end)),
            Fault::Double => drop(changed.splice(end..end, piece[middle..end].iter().copied())),
            Fault::Swap => changed[..end].rotate_left(middle),
            Fault::Cut => {
                let _ = self.to.write_all(&piece[..middle]);
                return None;
            }
            Fault::Stall => std::thread::sleep(Duration::from_millis(1 + self.below(30) as u64)),
            Fault::Dribble => {
                let _ = self.to.set_nodelay(true);
                let most = 1 + self.below(200);
                for part in piece.chunks(most) {
                    self.to.write_all(part).ok()?;
                }
                return Some(false);
            }
        }
        self.to.write_all(&changed).ok().map(|()| fault.damages() && changed != piece)
    }
}
