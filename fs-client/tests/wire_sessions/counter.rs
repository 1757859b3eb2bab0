//! A user that keeps the rules and has rights past the server's workers: one of its sessions has a file open and a range of it bound, another one has
//! opened the range by its key, has a write grant, and counts there one-sidedly. All hostile peers know their numbers and the key itself. The file is
//! not theirs, so the key opens nothing for them.

use crate::asking::Asking;
use crate::dice::Dice;
use crate::grammar::Known;
use crate::oracle::Oracle;
use crate::site::{Site, VICTIM};
use crate::victim::opened;
use cuttlefs_common::rdma::soft::tcp::packet::{PacketHeader, PacketKind};
use cuttlefs_common::region::PageSet;
use cuttlefs_common::rpc::{Opened, Payload, RegionKey, Reply, Request, Rights, SessionSecret, Sink};

/// The number of filekeys that its two sessions have.
pub const FILEKEYS: usize = 2;
const BOTH: Rights = Rights { read: true, write: true };
/// The bound range: whole words, which count.
const WORDS: usize = 8;
const RANGE: usize = WORDS * 8;

pub struct Counter {
    binder: Asking,
    binder_secret: SessionSecret,
    binder_session: u64,
    opened: Opened,
    key: RegionKey,
    redeemer: Asking,
    redeemer_secret: SessionSecret,
    redeemer_session: u64,
    redeemed: Opened,
    counts: [u64; WORDS],
    trace: u64,
}

fn take_opened(reply: Reply<'_>) -> Opened {
    match reply {
        Reply::Opened(opened) => opened,
        other => panic!("{other:?}"),
    }
}

impl Counter {
    pub fn new(site: &Site, dice: &Dice) -> Self {
        let mut oracle = Oracle::new(Vec::new());
        let (binder_secret, redeemer_secret) = (SessionSecret(dice.array()), SessionSecret(dice.array()));
        let mut binder = Asking::connect(&site.unix(), VICTIM, &mut oracle);
        let attached = binder.attach(binder_secret, 1, &mut oracle).expect("attached");
        let opened = opened(&mut binder, attached.root, b"counter", 2, &mut oracle);
        let filekey = opened.filekey;
        let payload = Payload::Inline(&[0; RANGE]);
        let zeros = Request::Write { filekey, offset: 0, append: false, payload };
        binder.ask(0, 4, &zeros, &mut oracle, |_| ()).expect("written");
        // A lifetime of 0 is none.
        let bind = Request::Bind { filekey, offset: 0, len: RANGE as u64, rights: BOTH, lifetime_ms: 0 };
        let take = |reply: Reply<'_>| match reply {
            Reply::Bound(key) => key,
            other => panic!("{other:?}"),
        };
        let key = binder.ask(0, 5, &bind, &mut oracle, take).expect("bound");
        let mut redeemer = Asking::connect(&site.unix(), VICTIM, &mut oracle);
        let seen = redeemer.attach(redeemer_secret, 6, &mut oracle).expect("attached");
        let open = Request::OpenRegion { key };
        let redeemed = redeemer.ask(0, 7, &open, &mut oracle, take_opened).expect("opened by its key");
        let grant = Request::GrantWrite { filekey: redeemed.filekey, offset: 0, len: RANGE as u64 };
        redeemer.ask(0, 8, &grant, &mut oracle, |_| ()).expect("granted");
        Self {
            binder,
            binder_secret,
            binder_session: attached.session,
            opened,
            key,
            redeemer,
            redeemer_secret,
            redeemer_session: seen.session,
            redeemed,
            counts: [0; WORDS],
            trace: 2 << 32,
        }
    }

    /// Begins an episode: the episode's model learns these sessions, and the hostile peers learn all but their secrets.
    pub fn meet(&mut self, oracle: &mut Oracle, dice: &Dice, known: &mut Known) {
        oracle.note_session(self.binder_session, VICTIM, self.binder_secret);
        oracle.note_session(self.redeemer_session, VICTIM, self.redeemer_secret);
        self.binder.way = oracle.way(VICTIM);
        self.redeemer.way = oracle.way(VICTIM);
        known.learn_opened(dice, &self.opened);
        known.learn_opened(dice, &self.redeemed);
        known.learn_region(dice, self.key);
    }

    fn bytes(&self) -> Vec<u8> {
        self.counts.iter().flat_map(|count| count.to_le_bytes()).collect()
    }

    /// Does one operation, with what the hostile peers would like to take away.
    pub fn step(&mut self, dice: &Dice, oracle: &mut Oracle) {
        match dice.below(3) {
            0 => self.add(dice.below(WORDS)),
            1 => self.check_read(),
            _ => self.check_open_file(oracle),
        }
    }

    /// Adds under the grant of the redeemed key.
    fn add(&mut self, word: usize) {
        let (key, offset) = (self.redeemed.filekey.0, word as u64 * 8);
        let add = PacketHeader { key, offset, first: 1, ..PacketHeader::new(PacketKind::FetchAddFile, 0) };
        self.redeemer.wire.put(add, b"");
        let (header, _) = self.redeemer.packet();
        assert_eq!(header.kind, PacketKind::AtomicReply, "the grant or the key is gone: {:?}", header.status);
        assert_eq!(header.first, self.counts[word], "word {word} was changed by somebody else");
        self.counts[word] += 1;
    }

    /// Reads one-sidedly by the redeemed key. The grant keeps the page in memory.
    fn check_read(&mut self) {
        let (key, wanted) = (self.redeemed.filekey.0, RANGE as u32);
        let read = PacketHeader { key, wanted, ..PacketHeader::new(PacketKind::ReadFile, 0) };
        self.redeemer.wire.put(read, b"");
        let (header, bytes) = self.redeemer.packet();
        assert_eq!(header.kind, PacketKind::ReadReply, "the key is gone: {:?}", header.status);
        assert_eq!(bytes, self.bytes());
    }

    /// Reads by request, with the file that the binder has open.
    fn check_open_file(&mut self, oracle: &mut Oracle) {
        self.trace += 1;
        let (filekey, len, pages) = (self.opened.filekey, RANGE as u32, PageSet::all(1));
        let fetch = Request::Fetch { filekey, offset: 0, len, pages, sink: Sink::Inline };
        let expected = self.bytes();
        let take = |reply: Reply<'_>| match reply {
            Reply::Fetched { inline, .. } => assert_eq!(inline, expected),
            other => panic!("{other:?}"),
        };
        self.binder.ask(0, self.trace, &fetch, oracle, take).expect("its open file");
    }

    /// Checks all of it, after the hostile peers have gone: the grant, the redeemed key, and the open file.
    pub fn check(&mut self, oracle: &mut Oracle) {
        (0..WORDS).for_each(|word| self.add(word));
        self.check_read();
        self.check_open_file(oracle);
    }
}
