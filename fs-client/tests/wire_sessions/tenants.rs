//! Sessions that have parts of the `landlord`'s file by keys, and overstep them: keys that are changed, expired, unbound, closed, or another session's;
//! ranges behind their part, their grant, the end of the file, or any file; atomics at odd places. `bursts` has requests whose rights end, or whose tenant
//! dies, while they are under way.
//!
//! The landlord's model knows what each request must come to: done, with the right bytes, or refused at the connection that asked.

use crate::acts::Act;
use crate::asking::{Asking, PATIENCE};
use crate::dice::Dice;
use crate::landlord::{Held, Landlord, SPAN, is_good, now_ms};
use crate::oracle::Oracle;
use crate::site::LANDLORD;
use cuttlefs_common::ids::FileKey;
use cuttlefs_common::rdma::soft::tcp::packet::{PacketHeader, PacketKind};
use cuttlefs_common::rdma::{FileAtomic, WcStatus};
use cuttlefs_common::region::{PageSet, divide};
use cuttlefs_common::rpc::{Payload, Reply, Request, SessionSecret, Sink};
use cuttlefs_common::status::Status;
use std::time::{Duration, Instant};

const TENANTS: usize = 2;
/// The most that is kept of what tenants got.
const HELD_MAX: usize = 24;

/// What the tenants did, for the summary.
#[derive(Clone, Copy, Debug, Default)]
pub struct Counts {
    pub done: u64,
    pub refused: u64,
    /// Requests by keys that were over, or another session's.
    pub worthless: u64,
    pub grants: u64,
    /// Requests that were under way while their pages, or their key, were taken away: done before, refused, and cut off with their session.
    pub before: u64,
    pub behind: u64,
    pub died: u64,
}

impl Counts {
    /// What came least.
    pub fn least(&self) -> u64 {
        let Self { done, refused, worthless, grants, before, behind, died } = *self;
        [done, refused, worthless, grants, before, behind, died].into_iter().min().unwrap_or(0)
    }
}

impl std::ops::AddAssign for Counts {
    fn add_assign(&mut self, more: Self) {
        self.done += more.done;
        self.refused += more.refused;
        self.worthless += more.worthless;
        self.grants += more.grants;
        self.before += more.before;
        self.behind += more.behind;
        self.died += more.died;
    }
}

pub struct Tenant {
    pub asking: Asking,
    secret: SessionSecret,
}

impl Tenant {
    pub fn new(landlord: &mut Landlord, dice: &Dice, oracle: &mut Oracle) -> Self {
        let secret = SessionSecret(dice.array());
        let mut asking = Asking::connect(&landlord.path, LANDLORD, oracle);
        asking.attach(secret, landlord.trace(), oracle).expect("attached");
        Self { asking, secret }
    }

    /// The same session on another connection.
    pub fn come_back(&mut self, landlord: &mut Landlord, oracle: &mut Oracle) {
        let trace = landlord.trace();
        self.asking.reconnect(&landlord.path, self.secret, trace, oracle);
    }

    pub fn send(&mut self, act: &Act, filekey: FileKey) {
        let (packet, payload) = act.packet(filekey);
        self.asking.wire.put(packet, payload);
    }

    /// Takes so many answers, or those before a refusal, and its status.
    pub fn answers(&mut self, count: usize) -> (Vec<PacketHeader>, Option<WcStatus>) {
        let (mut answers, deadline) = (Vec::new(), Instant::now() + PATIENCE);
        while answers.len() < count {
            for (header, _) in self.asking.wire.pump() {
                if header.kind == PacketKind::Nak {
                    return (answers, header.status);
                }
                answers.push(header);
            }
            assert!(!self.asking.wire.is_over || answers.len() == count, "it ends without a refusal");
            assert!(Instant::now() < deadline, "no answer in {PATIENCE:?}");
            std::thread::sleep(Duration::from_micros(30));
        }
        (answers, None)
    }
}

pub struct Tenants {
    pub all: Vec<Tenant>,
    pub counts: Counts,
}

impl Tenants {
    pub fn new(landlord: &mut Landlord, dice: &Dice, oracle: &mut Oracle) -> Self {
        let all = (0..TENANTS).map(|_| Tenant::new(landlord, dice, oracle)).collect();
        Self { all, counts: Counts::default() }
    }

    pub fn step(&mut self, landlord: &mut Landlord, dice: &Dice, oracle: &mut Oracle) {
        let now = now_ms();
        landlord.end_held(|held| is_good(&held.key, false, now, now) == Some(false));
        let who = dice.below(TENANTS);
        match dice.below(20) {
            0..3 => self.open(who, landlord, dice, oracle),
            3..7 => self.grant(who, landlord, dice, oracle),
            7 => self.close(who, landlord, dice, oracle),
            8 => self.request(who, landlord, dice, oracle),
            9 | 10 => self.burst(who, landlord, dice, oracle),
            _ => self.one_sided(who, landlord, dice, oracle),
        }
    }

    pub fn ask<T>(
        &mut self,
        who: usize,
        landlord: &mut Landlord,
        request: &Request<'_>,
        oracle: &mut Oracle,
        take: impl FnOnce(Reply<'_>) -> T,
    ) -> Result<T, Status> {
        self.all[who].asking.ask(0, landlord.trace(), request, oracle, take)
    }

    /// Something to act by: in most cases a good key of the tenant's own.
    fn held(&self, who: usize, landlord: &Landlord, dice: &Dice) -> Option<usize> {
        let (any, over) = (dice.chance(8), dice.chance(15));
        let fits = |held: &&Held| any || held.tenant == who && held.is_over == over;
        let fitting = landlord.held.iter().enumerate().filter(|(_, held)| fits(held));
        let found: Vec<usize> = fitting.map(|(at, _)| at).collect();
        (!found.is_empty()).then(|| dice.pick(&found))
    }

    /// Whether a request must be done, if it began then and is answered now; `None`: the key's time ends thereabouts.
    fn due(&mut self, who: usize, held: &Held, is_within: bool, before: u64) -> Option<bool> {
        let is_good = is_good(&held.key, held.is_over, before, now_ms());
        let is_own = held.tenant == who;
        self.counts.worthless += u64::from(!is_own || is_good == Some(false));
        if is_within && is_own { is_good } else { Some(false) }
    }

    /// Opens a bound range by its key, or by one that differs.
    pub fn open(&mut self, who: usize, landlord: &mut Landlord, dice: &Dice, oracle: &mut Oracle) {
        if landlord.bound.is_empty() {
            return;
        }
        let bounds = landlord.bound.iter().enumerate();
        let good: Vec<usize> = bounds.filter(|(_, bound)| !bound.is_over).map(|(at, _)| at).collect();
        let at = match good.is_empty() || dice.chance(20) {
            true => dice.below(landlord.bound.len()),
            false => dice.pick(&good),
        };
        let (mut key, is_over) = (landlord.bound[at].key, landlord.bound[at].is_over);
        let is_forged = dice.chance(10);
        if is_forged {
            match dice.below(4) {
                0 => key.mac[dice.below(16)] ^= 1 << dice.below(8),
                1 => key.len += 1,
                2 => key.expiry_ms = Some(key.expiry_ms.unwrap_or(now_ms()) + 1000),
                _ => key.number ^= 1,
            }
        }
        let before = now_ms();
        let take = |reply: Reply<'_>| match reply {
            Reply::Opened(opened) => opened.filekey,
            other => panic!("{other:?}"),
        };
        let opened = self.ask(who, landlord, &Request::OpenRegion { key }, oracle, take);
        let due = if is_forged { Some(false) } else { is_good(&key, is_over, before, now_ms()) };
        match opened {
            Ok(filekey) => {
                assert_ne!(due, Some(false), "{key:?} opens the file");
                if landlord.held.len() == HELD_MAX {
                    let oldest = landlord.held.iter().position(|held| held.is_over).unwrap_or(0);
                    let held = landlord.held.remove(oldest);
                    self.close_held(&held, landlord, oracle);
                }
                landlord.held.push(Held { tenant: who, filekey, key, is_over: false, grants: Vec::new() });
            }
            Err(Status::Busy) => {}
            Err(status) => assert_ne!(due, Some(true), "{key:?}: {status:?}"),
        }
    }

    fn close_held(&mut self, held: &Held, landlord: &mut Landlord, oracle: &mut Oracle) {
        if !held.is_over {
            let close = Request::Close { filekeys: vec![held.filekey] };
            // Its time may have ended.
            let _ = self.ask(held.tenant, landlord, &close, oracle, |_| ());
        }
    }

    fn close(&mut self, who: usize, landlord: &mut Landlord, dice: &Dice, oracle: &mut Oracle) {
        let Some(at) = self.held(who, landlord, dice) else { return };
        let held = &landlord.held[at];
        let (filekey, tenant) = (held.filekey, held.tenant);
        if dice.chance(50) {
            let give_back = Request::ReturnGrant { filekey, offset: 0, len: 2 * SPAN };
            // It may be over, or of a range that is not written.
            if self.ask(tenant, landlord, &give_back, oracle, |_| ()).is_ok() {
                landlord.held[at].grants.clear();
            }
            return;
        }
        let held = landlord.held.remove(at);
        self.close_held(&held, landlord, oracle);
        landlord.held.push(Held { is_over: true, grants: Vec::new(), ..held });
    }

    /// A range that is within what a key is for, or leaves it a little.
    fn aimed(landlord: &Landlord, held: &Held, dice: &Dice) -> (u64, u64) {
        let (mut offset, mut len) = landlord.range(dice);
        let granted = held.grants.iter().find(|grant| grant.start < landlord.size());
        let (start, end) = match granted.filter(|_| dice.chance(75)) {
            Some(grant) => (grant.start, grant.end.min(landlord.size())),
            None => (held.key.offset, held.key.end()),
        };
        if dice.chance(85) {
            offset = start + offset % (end - start);
            len = 1 + len % (end - offset);
        }
        match dice.below(24) {
            0 => offset = (end + dice.number() % 16).saturating_sub(8),
            1 => offset = (landlord.size() + dice.number() % 16).saturating_sub(8),
            2 => offset = u64::MAX - dice.number() % 16,
            3 => offset = start.saturating_sub(1),
            _ => {}
        }
        (offset, len)
    }

    fn grant(&mut self, who: usize, landlord: &mut Landlord, dice: &Dice, oracle: &mut Oracle) {
        let Some(at) = self.held(who, landlord, dice) else { return };
        let key = landlord.held[at].key;
        let range = match dice.below(3) {
            0 => Self::aimed(landlord, &landlord.held[at], dice),
            _ => (key.offset, key.len),
        };
        self.grant_range(who, at, range, landlord, oracle);
    }

    /// Asks for a grant. Some of the range may be behind the end of the file.
    pub fn grant_range(
        &mut self,
        who: usize,
        at: usize,
        (offset, len): (u64, u64),
        landlord: &mut Landlord,
        oracle: &mut Oracle,
    ) {
        let (filekey, key) = (landlord.held[at].filekey, landlord.held[at].key);
        let before = now_ms();
        let request = Request::GrantWrite { filekey, offset, len };
        let granted = self.ask(who, landlord, &request, oracle, |_| ());
        let held = &landlord.held[at];
        let end = offset.saturating_add(len);
        let due = self.due(who, held, key.rights.write && held.holds(offset, end), before);
        match granted {
            Ok(()) => {
                assert_ne!(due, Some(false), "{offset} to {end} of {key:?} is granted");
                self.counts.grants += 1;
                landlord.held[at].lose(offset, end);
                landlord.held[at].grants.push(offset..end);
            }
            Err(Status::Busy | Status::NoSpace) => {}
            Err(status) => assert_ne!(due, Some(true), "{offset} to {end} of {key:?}: {status:?}"),
        }
    }

    /// Reads or writes by request.
    fn request(&mut self, who: usize, landlord: &mut Landlord, dice: &Dice, oracle: &mut Oracle) {
        let Some(at) = self.held(who, landlord, dice) else { return };
        let (offset, len) = Self::aimed(landlord, &landlord.held[at], dice);
        let (filekey, rights) = (landlord.held[at].filekey, landlord.held[at].key.rights);
        let (offset, len) = (offset.min(SPAN), len.min(6000));
        let (reads, before, bytes) = (dice.chance(50), now_ms(), landlord.fresh(len));
        let request = match reads {
            true => {
                let mut pages = PageSet::none_of_range(offset, len as usize);
                (0..divide(offset, len as usize).len()).for_each(|page| pages.insert(page));
                Request::Fetch { filekey, offset, len: len as u32, pages, sink: Sink::Inline }
            }
            false => Request::Write { filekey, offset, append: false, payload: Payload::Inline(&bytes) },
        };
        let known: Vec<u8> =
            landlord.bytes.iter().skip(offset as usize).take(len as usize).copied().collect();
        let take = |reply: Reply<'_>| {
            if let Reply::Fetched { inline, .. } = reply {
                assert!(inline == known, "other bytes by request");
            }
        };
        let done = self.ask(who, landlord, &request, oracle, take);
        let held = &landlord.held[at];
        let is_within = held.holds(offset, offset + len) && if reads { rights.read } else { rights.write };
        let due = self.due(who, held, is_within, before);
        match done {
            Ok(()) => {
                assert_ne!(due, Some(false), "{len} bytes at {offset} by {:?}", held.key);
                if !reads {
                    landlord.put(offset, &bytes);
                }
            }
            Err(Status::NoSpace) => {}
            Err(status) => {
                assert_ne!(due, Some(true), "{len} bytes at {offset} by {:?}: {status:?}", held.key)
            }
        }
    }

    fn draw(landlord: &mut Landlord, at: usize, dice: &Dice) -> Act {
        let (offset, len) = Self::aimed(landlord, &landlord.held[at], dice);
        match dice.below(12) {
            0..3 => Act::Read { offset, len },
            3 => Act::Bitmap { first_page: dice.number() % 3 * 8, len: 1 + dice.number() % 4 },
            4..8 => Act::Write { offset, bytes: landlord.fresh(len.min(6000)) },
            8..10 => {
                let offset = if dice.chance(80) { offset & !7 } else { offset };
                let there = landlord.bytes.iter().skip(offset as usize).take(8).copied();
                let there: Vec<u8> = there.collect();
                let expect = there.try_into().map_or(1, u64::from_le_bytes);
                let operation = match dice.below(3) {
                    0 => FileAtomic::CompareSwap { expect, swap: dice.number() },
                    1 => FileAtomic::CompareSwap { expect: !expect, swap: dice.number() },
                    _ => FileAtomic::FetchAdd { add: dice.number() },
                };
                Act::Atomic { offset, operation }
            }
            _ => Act::Append { bytes: landlord.fresh(1 + dice.number() % 3000) },
        }
    }

    fn one_sided(&mut self, who: usize, landlord: &mut Landlord, dice: &Dice, oracle: &mut Oracle) {
        let is_granted = |held: &Held| held.tenant == who && !held.grants.is_empty();
        let granted = landlord.held.iter().position(is_granted).filter(|_| dice.chance(50));
        let Some(at) = granted.or_else(|| self.held(who, landlord, dice)) else { return };
        let act = Self::draw(landlord, at, dice);
        let before = now_ms();
        self.all[who].send(&act, landlord.held[at].filekey);
        let (header, payload) = self.all[who].asking.packet();
        let (held, size) = (&landlord.held[at], landlord.size());
        let (key, is_within) = (held.key, act.is_within(held, size));
        let due = self.due(who, held, is_within, before);
        if header.kind != PacketKind::Nak {
            let what = act.packet(held.filekey).0;
            assert_ne!(due, Some(false), "{what:?} by {key:?}, granted {:?} of {size} bytes", held.grants);
            self.counts.done += 1;
            return act.done(landlord, &key, &header, &payload);
        }
        let status = header.status.expect("a refusal has a status");
        if due == Some(true) {
            // A full disk, or a failed one. Then it is not done either.
            let is_excused = matches!(status, WcStatus::RemoteNoSpace | WcStatus::RemoteOperation);
            let what = act.packet(held.filekey).0;
            assert!(is_excused, "{status:?}: {what:?} by {key:?}, granted {:?} of {size} bytes", held.grants);
        } else {
            assert_eq!(status, act.refusal());
            self.counts.refused += 1;
        }
        self.all[who].come_back(landlord, oracle);
    }

    /// Ends their sessions, with all that they have.
    pub fn finish(mut self, landlord: &mut Landlord, oracle: &mut Oracle) -> Counts {
        landlord.check(oracle);
        for who in 0..TENANTS {
            self.ask(who, landlord, &Request::Detach, oracle, |_| ()).expect("it goes");
        }
        self.counts
    }
}
