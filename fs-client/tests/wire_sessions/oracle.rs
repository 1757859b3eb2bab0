//! The model of sessions: what a server may say to whom.
//!
//! It knows every message that was sent, on which connection, and which secrets were said there. From that follows of each
//! answer whether it may come where it comes:
//!
//! * a session has one user and one secret, from its first connection to its last;
//! * an answer belongs to a request that was sent, by its trace, slot and number, on this connection or on another one of the
//!   same session; it is of that request's kind, and there are no more answers than there were requests;
//! * nobody is sent bytes that are not theirs: files that they may not read hold marks, which are in nothing that comes.

use crate::grammar::Kind;
use cuttlefs_common::ids::{SlotIndex, TraceId};
use cuttlefs_common::rpc::{Attached, Reply, ReplyHeader, Request, RequestHeader, SessionSecret};
use std::collections::{BTreeMap, HashMap};

/// A connection, by number.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Way(pub usize);

/// A message that parses, as it was sent.
#[derive(Clone, Copy, Debug)]
struct Asked {
    kind: Kind,
    way: Way,
    slot: SlotIndex,
    seq: u64,
    secret: Option<SessionSecret>,
}

/// What is known of a connection.
#[derive(Debug)]
struct WayState {
    uid: u32,
    /// Secrets that were said on it.
    said: Vec<SessionSecret>,
}

/// What is known of all.
pub struct Oracle {
    /// In files that the peers of this model may not read.
    pub marks: Vec<[u8; 16]>,
    ways: Vec<WayState>,
    /// The user of each, and what its secret can be: attaches that are said again with a bit changed are told apart by nothing but it.
    sessions: HashMap<u64, (u32, Vec<SessionSecret>)>,
    asked: HashMap<u64, Vec<Asked>>,
    /// Requests by slot and number, without those that were answered: an answer that is kept is sent to whatever comes with its
    /// request's number.
    unanswered: HashMap<(SlotIndex, u64), usize>,
    /// Answers by kind, done or refused, for the summary.
    pub seen: BTreeMap<(Kind, bool), u64>,
}

impl Oracle {
    pub fn new(marks: Vec<[u8; 16]>) -> Self {
        Self {
            marks,
            ways: Vec::new(),
            sessions: HashMap::new(),
            asked: HashMap::new(),
            unanswered: HashMap::new(),
            seen: BTreeMap::new(),
        }
    }

    /// A session that was there before.
    pub fn note_session(&mut self, number: u64, uid: u32, secret: SessionSecret) {
        self.sessions.insert(number, (uid, vec![secret]));
    }

    /// A new connection.
    pub fn way(&mut self, uid: u32) -> Way {
        self.ways.push(WayState { uid, said: Vec::new() });
        Way(self.ways.len() - 1)
    }

    /// These bytes are sent as a message.
    pub fn note_sent(&mut self, way: Way, message: &[u8]) {
        let Ok((header, body)) = RequestHeader::parse(message) else { return };
        let Ok(request) = Request::parse(body) else { return };
        let secret = match &request {
            Request::Attach { secret, .. } => Some(*secret),
            _ => None,
        };
        self.ways[way.0].said.extend(secret);
        let (kind, slot, seq) = (Kind::of(&request), header.slot, header.seq);
        *self.unanswered.entry((slot, seq)).or_default() += 1;
        self.asked.entry(header.trace.0).or_default().push(Asked { kind, way, slot, seq, secret });
    }

    /// Every secret that a user may have a session with.
    pub fn said(&self) -> Vec<(u32, SessionSecret)> {
        let mut said = Vec::new();
        for way in &self.ways {
            for secret in &way.said {
                if !said.contains(&(way.uid, *secret)) {
                    said.push((way.uid, *secret));
                }
            }
        }
        said
    }

    fn shares_session(&self, one: Way, other: Way) -> bool {
        let (one, other) = (&self.ways[one.0], &self.ways[other.0]);
        one.uid == other.uid && one.said.iter().any(|secret| other.said.contains(secret))
    }

    /// Bytes that came, of whichever frame.
    ///
    /// # Panics
    /// They are somebody else's.
    pub fn check_bytes(&self, way: Way, bytes: &[u8]) {
        for mark in &self.marks {
            let found = bytes.windows(mark.len()).position(|window| window == mark);
            assert_eq!(found, None, "{:?} is sent bytes of a file it may not read", self.ways[way.0]);
        }
    }

    /// A message that came. Gives what it answers, and the reply, if it is one.
    ///
    /// # Panics
    /// It may not come here.
    pub fn check_message<'m>(
        &mut self,
        way: Way,
        message: &'m [u8],
    ) -> (ReplyHeader, Kind, Option<Reply<'m>>) {
        let (header, body) = ReplyHeader::parse(message).expect("the server sends replies");
        let ReplyHeader { slot, seq, trace: TraceId(trace), result } = header;
        let asked = self.asked.get(&trace).map(Vec::as_slice).unwrap_or_default();
        let mine: Vec<Asked> = asked
            .iter()
            .filter(|asked| asked.way == way || self.shares_session(asked.way, way))
            .filter(|asked| (asked.slot, asked.seq) == (slot, seq))
            .copied()
            .collect();
        assert!(
            !mine.is_empty(),
            "{header:?} answers nothing that {:?} asked, but {asked:?}",
            self.ways[way.0]
        );
        let unanswered = self.unanswered.entry((slot, seq)).or_default();
        let less = unanswered.checked_sub(1);
        *unanswered = less.unwrap_or_else(|| panic!("{header:?} is one answer too many to {asked:?}"));
        if result.is_err() {
            assert!(body.is_empty(), "{header:?} fails and has a body");
            *self.seen.entry((mine[0].kind, false)).or_default() += 1;
            return (header, mine[0].kind, None);
        }
        let reply = Reply::parse(body).expect("the server's replies parse");
        let Some(asked) = mine.iter().find(|asked| asked.kind.is_answered_by(&reply)) else {
            panic!("{reply:?} does not answer {mine:?}")
        };
        *self.seen.entry((asked.kind, true)).or_default() += 1;
        let kind = asked.kind;
        if let Reply::Attached(attached) = &reply {
            let secrets: Vec<_> = mine.iter().filter_map(|asked| asked.secret).collect();
            self.check_attached(way, &secrets, attached);
        }
        (header, kind, Some(reply))
    }

    fn check_attached(&mut self, way: Way, secrets: &[SessionSecret], attached: &Attached) {
        let uid = self.ways[way.0].uid;
        let (owner, known) = self.sessions.entry(attached.session).or_insert((uid, secrets.to_vec()));
        assert_eq!(*owner, uid, "a session of {owner} is joined by {uid}");
        known.retain(|secret| secrets.contains(secret));
        assert!(!known.is_empty(), "a session is joined without its secret");
    }
}
