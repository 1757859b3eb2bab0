//! A file whose ranges are handed over by key, and a model of its bytes and of who has which right. The landlord, a session of the user `LANDLORD`, binds
//! ranges, for ever or for moments, and unbinds them; it writes, cuts, grows, punches and syncs the file, and takes its name and the file itself away.
//! Another file of its own, the *neighbour*, takes pages that this one has given back.
//!
//! `tenants` are sessions of the same user. They have the file by keys only, and overstep them.

use crate::asking::Asking;
use crate::dice::Dice;
use crate::oracle::Oracle;
use crate::site::{LANDLORD, Site};
use crate::victim::look_up;
use cuttlefs_common::attr::SetAttr;
use cuttlefs_common::ids::{FileKey, InodeNo};
use cuttlefs_common::region::{MagicPattern, PageSet};
use cuttlefs_common::rpc::{
    Allocate, Opened, Payload, RegionKey, Reply, Request, Rights, SessionSecret, Sink, SyncScope,
};
use cuttlefs_common::status::Status;
use std::ops::Range;
use std::path::PathBuf;
use std::time::{SystemTime, UNIX_EPOCH};

pub const PAGE: u64 = 4096;
/// No key reaches past this offset.
pub const SPAN: u64 = 12 * PAGE;
pub const BOTH: Rights = Rights { read: true, write: true };
const NEIGHBOUR_PAGES: u64 = 10;
/// The most bound ranges at a time.
const KEYS_MAX: usize = 6;
/// The longest inline fetch.
const FETCH: u64 = 16 << 10;
/// Around the end of a key's time nobody says whether it is over: the clock of a step is read before and behind it.
const AROUND_MS: u64 = 5;

/// A bound range.
pub struct Bound {
    pub key: RegionKey,
    pub is_over: bool,
}

/// What a tenant has got by a key. It is kept when it is over: then it must be worth nothing.
pub struct Held {
    /// The tenant that has it.
    pub tenant: usize,
    pub filekey: FileKey,
    pub key: RegionKey,
    pub is_over: bool,
    pub grants: Vec<Range<u64>>,
}

/// Milliseconds of Unix time.
pub fn now_ms() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).expect("after 1970").as_millis() as u64
}

/// Whether a key is good all the time from `before` to `after`; `None`: its time ends thereabouts.
pub fn is_good(key: &RegionKey, is_over: bool, before: u64, after: u64) -> Option<bool> {
    match key.expiry_ms {
        _ if is_over => Some(false),
        Some(end) if before > end + AROUND_MS => Some(false),
        Some(end) if after + AROUND_MS >= end => None,
        _ => Some(true),
    }
}

impl Held {
    pub fn holds(&self, offset: u64, end: u64) -> bool {
        self.key.offset <= offset && end <= self.key.end()
    }

    /// Whether all of a range is granted.
    pub fn covers(&self, offset: u64, end: u64) -> bool {
        let has = |at: u64| self.grants.iter().find(|grant| grant.contains(&at));
        let mut at = offset;
        while at < end {
            match has(at) {
                Some(grant) => at = grant.end,
                None => return false,
            }
        }
        true
    }

    pub fn lose(&mut self, offset: u64, end: u64) {
        self.grants.retain(|grant| !(grant.start < end && offset < grant.end));
    }
}

pub struct Landlord {
    pub path: PathBuf,
    pub asking: Asking,
    pub magic: MagicPattern,
    directory: InodeNo,
    pub opened: Opened,
    neighbour: Opened,
    neighbour_bytes: Vec<u8>,
    /// The file's bytes.
    pub bytes: Vec<u8>,
    pub bound: Vec<Bound>,
    pub held: Vec<Held>,
    mark: [u8; 16],
    made: u64,
    trace: u64,
}

fn created(asking: &mut Asking, parent: InodeNo, name: &[u8], trace: u64, oracle: &mut Oracle) -> Opened {
    let create = Request::Create { parent, name, mode: 0o600, exclusive: true, rights: BOTH };
    let take = |reply: Reply<'_>| match reply {
        Reply::Opened(opened) => opened,
        other => panic!("{other:?}"),
    };
    asking.ask(0, trace, &create, oracle, take).expect("its file")
}

impl Landlord {
    pub fn new(site: &Site, dice: &Dice, oracle: &mut Oracle) -> Self {
        let path = site.unix();
        let mut trace = 6 << 32;
        let mut next = || {
            trace += 1;
            trace
        };
        let mut asking = Asking::connect(&path, LANDLORD, oracle);
        let attached = asking.attach(SessionSecret(dice.array()), next(), oracle).expect("attached");
        let directory = look_up(&mut asking, attached.root, b"let", next(), oracle);
        let opened = created(&mut asking, directory, b"house", next(), oracle);
        let neighbour = created(&mut asking, directory, b"neighbour", next(), oracle);
        Self {
            path,
            asking,
            magic: attached.magic,
            directory,
            opened,
            neighbour,
            neighbour_bytes: Vec::new(),
            bytes: Vec::new(),
            bound: Vec::new(),
            held: Vec::new(),
            mark: site.house_mark,
            made: 0,
            trace,
        }
    }

    pub fn trace(&mut self) -> u64 {
        self.trace += 1;
        self.trace
    }

    pub fn size(&self) -> u64 {
        self.bytes.len() as u64
    }

    /// New bytes of the house: none of them may be seen in another file, or by another user.
    pub fn fresh(&mut self, len: u64) -> Vec<u8> {
        self.made += 1;
        let word = [&self.mark[..], &self.made.to_le_bytes()].concat();
        word.into_iter().cycle().take(len as usize).collect()
    }

    /// In most cases a range near to the file's bytes.
    pub fn range(&self, dice: &Dice) -> (u64, u64) {
        let offset = match dice.below(3) {
            0 => dice.number() % (SPAN / PAGE) * PAGE,
            _ => dice.number() % SPAN,
        };
        let len = if dice.chance(50) { PAGE * (1 + dice.number() % 3) } else { 1 + dice.number() % 6000 };
        (offset, len)
    }

    pub fn ask<T>(
        &mut self,
        request: &Request<'_>,
        oracle: &mut Oracle,
        take: impl FnOnce(Reply<'_>) -> T,
    ) -> Result<T, Status> {
        let trace = self.trace();
        self.asking.ask(0, trace, request, oracle, take)
    }

    fn lose(&mut self, offset: u64, end: u64) {
        self.held.iter_mut().for_each(|held| held.lose(offset, end));
    }

    /// Puts bytes into the model.
    pub fn put(&mut self, offset: u64, bytes: &[u8]) {
        let (start, end) = (offset as usize, offset as usize + bytes.len());
        if self.bytes.len() < end {
            self.bytes.resize(end, 0);
        }
        self.bytes[start..end].copy_from_slice(bytes);
    }

    pub fn step(&mut self, dice: &Dice, oracle: &mut Oracle) {
        match dice.below(16) {
            0..3 => {
                let (offset, len) = self.range(dice);
                let bytes = self.fresh(len.min(SPAN - offset));
                let payload = Payload::Inline(&bytes);
                let write = Request::Write { filekey: self.opened.filekey, offset, append: false, payload };
                match self.ask(&write, oracle, |_| ()) {
                    Ok(()) => self.put(offset, &bytes),
                    // Hostile peers may have filled the disk.
                    Err(status) => assert_eq!(status, Status::NoSpace),
                }
            }
            3 | 4 => {
                let size = if dice.chance(30) { SPAN - dice.number() % PAGE } else { dice.number() % SPAN };
                self.set_size(size, oracle);
            }
            5 => {
                let (offset, len) = self.range(dice);
                self.punch(offset, len, oracle);
            }
            6..10 => self.bind(dice, oracle),
            10 => self.unbind(dice.below(KEYS_MAX), oracle),
            11 | 12 => self.rewrite_neighbour(oracle),
            13 if dice.chance(30) => {
                self.unlink(oracle);
                // Without a name it is what it was.
                self.check(oracle);
                self.leave(oracle);
            }
            14 if dice.chance(50) => {
                let sync = Request::Sync(SyncScope::Inode(self.opened.attr.ino));
                match self.ask(&sync, oracle, |_| ()) {
                    Ok(()) | Err(Status::NoSpace) => {}
                    other => panic!("{other:?}"),
                }
            }
            _ => self.check(oracle),
        }
    }

    pub fn set_size(&mut self, size: u64, oracle: &mut Oracle) {
        let set = SetAttr { size: Some(size), ..SetAttr::default() };
        let request = Request::SetAttr { ino: self.opened.attr.ino, set };
        self.ask(&request, oracle, |_| ()).expect("its own file");
        if size < self.size() {
            self.lose(size, u64::MAX);
        }
        self.bytes.resize(size as usize, 0);
    }

    pub fn punch(&mut self, offset: u64, len: u64, oracle: &mut Oracle) {
        let (filekey, how) = (self.opened.filekey, Allocate::PunchHole);
        let punched = self.ask(&Request::Allocate { filekey, offset, len, how }, oracle, |_| ());
        if punched.is_err() {
            // Parts of pages are made zeros, and hostile peers may have filled the disk. Grants may have ended.
            assert_eq!(punched, Err(Status::NoSpace));
            return self.empty(oracle);
        }
        let (size, end) = (self.size(), offset + len);
        self.lose(offset, if end >= size { end.next_multiple_of(PAGE) } else { end });
        if offset < size {
            self.bytes[offset as usize..end.min(size) as usize].fill(0);
        }
    }

    /// Empties the file, so that all grants of it have ended.
    fn empty(&mut self, oracle: &mut Oracle) {
        self.set_size(SPAN, oracle);
        self.set_size(0, oracle);
    }

    fn bind(&mut self, dice: &Dice, oracle: &mut Oracle) {
        if self.bound.len() == KEYS_MAX {
            let at = dice.below(KEYS_MAX);
            if !self.bound[at].is_over {
                self.unbind(at, oracle);
            }
            self.bound.swap_remove(at);
        }
        let (offset, len) = if dice.chance(50) { (0, SPAN) } else { self.range(dice) };
        let len = len.min(SPAN - offset);
        let rights = dice.pick(&[
            BOTH,
            BOTH,
            BOTH,
            Rights { read: true, write: false },
            Rights { read: false, write: true },
        ]);
        let lifetime_ms = if dice.chance(60) { 0 } else { 20 + dice.number() % 150 };
        let bind = Request::Bind { filekey: self.opened.filekey, offset, len, rights, lifetime_ms };
        let take = |reply: Reply<'_>| match reply {
            Reply::Bound(key) => key,
            other => panic!("{other:?}"),
        };
        let key = self.ask(&bind, oracle, take).expect("its own file");
        assert_eq!((key.offset, key.len, key.rights), (offset, len, rights));
        self.bound.push(Bound { key, is_over: false });
    }

    /// From now on the key of a range, and what was opened by it, are worth nothing.
    pub fn unbind(&mut self, at: usize, oracle: &mut Oracle) {
        let Some(bound) = self.bound.get_mut(at).filter(|bound| !bound.is_over) else { return };
        bound.is_over = true;
        let number = bound.key.number;
        self.ask(&Request::Unbind { number }, oracle, |_| ()).expect("its own key");
        self.end_held(|held| held.key.number == number);
    }

    pub fn end_held(&mut self, is_over: impl Fn(&Held) -> bool) {
        for held in self.held.iter_mut().filter(|held| is_over(held)) {
            held.is_over = true;
            held.grants.clear();
        }
    }

    pub fn unlink(&mut self, oracle: &mut Oracle) {
        let parent = self.directory;
        self.ask(&Request::Unlink { parent, name: b"house" }, oracle, |_| ()).expect("its own file");
    }

    /// The file without a name loses its last opener, with all grants there are. Another one gets the name.
    pub fn leave(&mut self, oracle: &mut Oracle) {
        self.ask(&Request::Close { filekeys: vec![self.opened.filekey] }, oracle, |_| ()).expect("closed");
        self.bound.iter_mut().for_each(|bound| bound.is_over = true);
        self.end_held(|_| true);
        let trace = self.trace();
        self.opened = created(&mut self.asking, self.directory, b"house", trace, oracle);
        self.bytes.clear();
    }

    /// The neighbour takes pages that have just been given back, or others.
    pub fn rewrite_neighbour(&mut self, oracle: &mut Oracle) {
        let (filekey, ino) = (self.neighbour.filekey, self.neighbour.attr.ino);
        let set = SetAttr { size: Some(0), ..SetAttr::default() };
        self.ask(&Request::SetAttr { ino, set }, oracle, |_| ()).expect("its own file");
        self.made += 1;
        let made = self.made;
        // Nobody has written the other half of a page: it would show what was in the frame.
        let half = (PAGE / 2) as usize;
        let part: Vec<u8> = (0..half).map(|at| (made as usize * 13 + at * 3) as u8 | 1).collect();
        self.neighbour_bytes.clear();
        for page in 0..NEIGHBOUR_PAGES {
            let payload = Payload::Inline(&part);
            let write = Request::Write { filekey, offset: page * PAGE, append: false, payload };
            match self.ask(&write, oracle, |_| ()) {
                Ok(()) => {
                    self.neighbour_bytes.resize((page * PAGE) as usize, 0);
                    self.neighbour_bytes.extend(&part);
                }
                Err(status) => assert_eq!(status, Status::NoSpace),
            }
        }
    }

    /// All bytes of a file, by request.
    fn contents(&mut self, filekey: FileKey, oracle: &mut Oracle) -> Vec<u8> {
        let mut bytes = Vec::new();
        loop {
            let (offset, pages) = (bytes.len() as u64, PageSet::all((FETCH / PAGE) as usize));
            let fetch = Request::Fetch { filekey, offset, len: FETCH as u32, pages, sink: Sink::Inline };
            let take = |reply: Reply<'_>| match reply {
                Reply::Fetched { inline, .. } => inline.to_vec(),
                other => panic!("{other:?}"),
            };
            let part = self.ask(&fetch, oracle, take).expect("its own file");
            bytes.extend(&part);
            if (part.len() as u64) < FETCH {
                return bytes;
            }
        }
    }

    pub fn house(&mut self, oracle: &mut Oracle) -> Vec<u8> {
        self.contents(self.opened.filekey, oracle)
    }

    /// Checks every byte of both files.
    pub fn check(&mut self, oracle: &mut Oracle) {
        let house = self.house(oracle);
        check_bytes("the file that is handed over", &house, &self.bytes);
        let neighbour = self.contents(self.neighbour.filekey, oracle);
        check_bytes("another file", &neighbour, &self.neighbour_bytes);
    }

    /// Ends the session. Its files are closed then.
    pub fn finish(mut self, oracle: &mut Oracle) {
        self.check(oracle);
        self.ask(&Request::Detach, oracle, |_| ()).expect("it goes");
    }
}

fn check_bytes(what: &str, found: &[u8], known: &[u8]) {
    let wrong = found.iter().zip(known).position(|(one, other)| one != other);
    assert!(
        wrong.is_none() && found.len() == known.len(),
        "{what} has {} bytes of {}, another one at {wrong:?}",
        found.len(),
        known.len()
    );
}
