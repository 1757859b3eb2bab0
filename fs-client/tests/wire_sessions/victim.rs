//! A user that keeps the rules, whose wire messages the test writes itself. It has something to lose: a file with a lock on it, in a session whose
//! numbers all hostile peers know. Only its secret is its own.

use crate::asking::Asking;
use crate::dice::Dice;
use crate::grammar::Known;
use crate::oracle::Oracle;
use crate::site::{PLANTED_LEN, Site, VICTIM};
use cuttlefs_common::ids::InodeNo;
use cuttlefs_common::locks::{Lock, LockMode, LockOwner, LockRange, LockSpace, WaitId};
use cuttlefs_common::rdma::soft::tcp::packet::{PacketHeader, PacketKind};
use cuttlefs_common::region::{MagicPattern, PageSet};
use cuttlefs_common::rpc::{
    OpenBy, Opened, Payload, Reply, Request, Rights, SessionSecret, Sink, TestedLock,
};
use cuttlefs_common::status::Status;
use std::path::PathBuf;

/// The number of files that its two sessions have open.
pub const OPEN_FILES: usize = 2;
const PAGE: usize = 4096;
const PAGES: usize = PLANTED_LEN / PAGE;
/// The lock of the victim. Its owner is a small number, because others try small numbers first.
const LOCK: Lock = Lock {
    space: LockSpace::Whole,
    owner: LockOwner(1),
    range: LockRange::WHOLE,
    mode: LockMode::Exclusive,
    pid: 4242,
};

pub struct Victim {
    path: PathBuf,
    holder: Asking,
    secret: SessionSecret,
    session: u64,
    magic: MagicPattern,
    opened: Opened,
    /// Another session of the same user, which tests the lock.
    witness: Asking,
    witness_secret: SessionSecret,
    witness_session: u64,
    witness_opened: Opened,
    /// How often each page was written.
    versions: Vec<u64>,
    mark: [u8; 16],
    trace: u64,
}

pub fn look_up(
    asking: &mut Asking,
    parent: InodeNo,
    name: &[u8],
    trace: u64,
    oracle: &mut Oracle,
) -> InodeNo {
    let take = |reply: Reply<'_>| match reply {
        Reply::Attr(attr) => attr.ino,
        other => panic!("{other:?}"),
    };
    asking.ask(0, trace, &Request::Lookup { parent, name }, oracle, take).expect("it is there")
}

/// Opens a file of the root directory for reading and writing, in two requests.
pub fn opened(asking: &mut Asking, root: InodeNo, name: &[u8], trace: u64, oracle: &mut Oracle) -> Opened {
    let ino = look_up(asking, root, name, trace, oracle);
    let open = Request::Open {
        ino,
        rights: Rights { read: true, write: true },
        truncate: false,
        by: OpenBy::Name { told: 0 },
    };
    let take = |reply: Reply<'_>| match reply {
        Reply::Opened(opened) => opened,
        other => panic!("{other:?}"),
    };
    asking.ask(0, trace + 1, &open, oracle, take).expect("its file")
}

impl Victim {
    pub fn new(site: &Site, dice: &Dice) -> Self {
        let mut oracle = Oracle::new(Vec::new());
        let path = site.unix();
        let (secret, witness_secret) = (SessionSecret(dice.array()), SessionSecret(dice.array()));
        let mut holder = Asking::connect(&path, VICTIM, &mut oracle);
        let attached = holder.attach(secret, 1, &mut oracle).expect("attached");
        let mut witness = Asking::connect(&path, VICTIM, &mut oracle);
        let seen = witness.attach(witness_secret, 2, &mut oracle).expect("attached");
        let opened_by = |asking: &mut Asking, trace, oracle: &mut Oracle| {
            opened(asking, attached.root, b"victim", trace, oracle)
        };
        let opened = opened_by(&mut holder, 3, &mut oracle);
        let witness_opened = opened_by(&mut witness, 5, &mut oracle);
        let set = Request::SetLock { filekey: opened.filekey, lock: LOCK, wait: WaitId(1), blocking: false };
        holder.ask(0, 7, &set, &mut oracle, |_| ()).expect("a lock");
        Self {
            path,
            holder,
            secret,
            session: attached.session,
            magic: attached.magic,
            opened,
            witness,
            witness_secret,
            witness_session: seen.session,
            witness_opened,
            versions: vec![0; PAGES],
            mark: site.victim_mark,
            trace: 1 << 32,
        }
    }

    /// Begins an episode: the episode's model learns these sessions, and the hostile peers learn their numbers.
    pub fn meet(&mut self, oracle: &mut Oracle, dice: &Dice, known: &mut Known) {
        oracle.note_session(self.session, VICTIM, self.secret);
        oracle.note_session(self.witness_session, VICTIM, self.witness_secret);
        self.holder.way = oracle.way(VICTIM);
        self.witness.way = oracle.way(VICTIM);
        known.learn_opened(dice, &self.opened);
        known.learn_opened(dice, &self.witness_opened);
    }

    /// Secrets with which others may try to join: the secret itself, from another user; the secret with a bit changed; the client id.
    pub fn secrets(&self, dice: &Dice) -> [SessionSecret; 3] {
        let mut nearly = self.secret;
        nearly.0[dice.below(16)] ^= 1 << dice.below(8);
        let id = SessionSecret(self.secret.client().0.to_le_bytes());
        [self.secret, nearly, id]
    }

    fn page(&self, page: usize) -> Vec<u8> {
        let mut bytes = self.mark.repeat(PAGE / 16);
        if self.versions[page] > 0 {
            let version = ((self.versions[page] as u128) << 32 | page as u128).to_le_bytes();
            bytes[..16].copy_from_slice(&version);
        }
        bytes
    }

    fn trace(&mut self) -> u64 {
        self.trace += 1;
        self.trace
    }

    /// Does one operation, and checks that the session's data are unchanged.
    pub fn step(&mut self, dice: &Dice, oracle: &mut Oracle) {
        let (trace, slot) = (self.trace(), dice.below(8) as u16);
        let page = dice.below(PAGES);
        let (filekey, offset) = (self.opened.filekey, (page * PAGE) as u64);
        match dice.below(6) {
            0 => {
                self.versions[page] += 1;
                let bytes = self.page(page);
                let write =
                    Request::Write { filekey, offset, append: false, payload: Payload::Inline(&bytes) };
                let take = |reply: Reply<'_>| match reply {
                    Reply::Written { offset: at, len, change, .. } => {
                        assert_eq!((at, len as usize), (offset, PAGE));
                        change
                    }
                    other => panic!("{other:?}"),
                };
                let change = self.holder.ask(slot, trace, &write, oracle, take).expect("written");
                let again = self.holder.ask_again(slot, trace, &write, oracle, take);
                assert_eq!(again, Ok(change), "what comes twice is done once");
            }
            1 => self.check_page(dice, oracle, page),
            2 => self.check_lock(oracle),
            3 => {
                let read = PacketHeader {
                    key: filekey.0,
                    offset,
                    wanted: PAGE as u32,
                    ..PacketHeader::new(PacketKind::ReadFile, 0)
                };
                self.holder.wire.put(read, b"");
                let (header, bytes) = self.holder.packet();
                assert_eq!(header.kind, PacketKind::ReadReply, "a one-sided read of one's own file");
                assert!(self.magic.covers(0, &bytes) || bytes == self.page(page), "other bytes");
            }
            4 => {
                let mut more = Asking::connect(&self.path, VICTIM, oracle);
                let attached = more.attach(self.secret, trace, oracle).expect("its own session");
                assert_eq!(attached.session, self.session, "the session has ended");
                // The same user cannot join without the secret either.
                let [_, nearly, _] = self.secrets(dice);
                let mut other = Asking::connect(&self.path, VICTIM, oracle);
                let trace = self.trace();
                match other.attach(nearly, trace, oracle) {
                    Ok(attached) => {
                        assert_ne!(attached.session, self.session, "a session is joined without its secret");
                        let trace = self.trace();
                        other.ask(0, trace, &Request::Detach, oracle, |_| ()).expect("it goes again");
                    }
                    // A hostile peer may have drawn the same secret and come first.
                    Err(status) => assert_eq!(status, Status::Denied),
                }
            }
            _ => {
                let asked = Request::GetXattr { ino: self.opened.attr.ino, name: b"user.mark" };
                let mark = self.mark;
                self.holder
                    .ask(slot, trace, &asked, oracle, |reply| assert_eq!(reply, Reply::Bytes(&mark)))
                    .expect("its attribute");
            }
        }
    }

    fn check_page(&mut self, dice: &Dice, oracle: &mut Oracle, page: usize) {
        let (trace, slot) = (self.trace(), dice.below(8) as u16);
        let (filekey, offset, len) = (self.opened.filekey, (page * PAGE) as u64, PAGE as u32);
        let mut pages = PageSet::none_of_range(offset, PAGE);
        pages.insert(0);
        let fetch = Request::Fetch { filekey, offset, len, pages, sink: Sink::Inline };
        let expected = self.page(page);
        let take = |reply: Reply<'_>| match reply {
            Reply::Fetched { inline, .. } => assert!(inline == expected, "page {page} has other bytes"),
            other => panic!("{other:?}"),
        };
        self.holder.ask(slot, trace, &fetch, oracle, take).expect("its file");
    }

    fn check_lock(&mut self, oracle: &mut Oracle) {
        let trace = self.trace();
        let lock = Lock { owner: LockOwner(9), pid: 1, ..LOCK };
        let test = Request::TestLock { filekey: self.witness_opened.filekey, lock };
        let tested = self
            .witness
            .ask(0, trace, &test, oracle, |reply| match reply {
                Reply::Tested(tested) => tested,
                other => panic!("{other:?}"),
            })
            .expect("its own file");
        assert!(
            matches!(tested, TestedLock::Blocked(by) if by.pid == LOCK.pid),
            "the lock is gone: {tested:?}"
        );
    }

    /// Checks all pages and the lock, after the hostile peers have gone.
    pub fn check(&mut self, dice: &Dice, oracle: &mut Oracle) {
        (0..PAGES).for_each(|page| self.check_page(dice, oracle, page));
        self.check_lock(oracle);
    }
}
