//! The model of sessions: which answers the server may send on which connection.
//!
//! The model knows every message that was sent, its connection, and the secrets that were sent there. So it can check each answer:
//!
//! * a session has one user and one secret, from its first connection to its last;
//! * an answer belongs to a request by its trace, slot and number. That request was sent on this connection or on another one of the same session, is
//!   of a kind that the answer fits, and there are no more answers than there were requests;
//! * nobody is sent other users' bytes: files that the peers may not read hold marks, and no mark is in any packet.

use crate::grammar::Kind;
use cuttlefs_common::ids::{SlotIndex, TraceId};
use cuttlefs_common::rpc::{Attached, Reply, ReplyHeader, Request, RequestHeader, SessionSecret};
use std::collections::{BTreeMap, HashMap};

/// The number of a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Way(pub usize);

/// A request that was sent and that parses.
#[derive(Clone, Copy, Debug)]
struct Asked {
    kind: Kind,
    way: Way,
    slot: SlotIndex,
    seq: u64,
    secret: Option<SessionSecret>,
}

/// What the model knows of a connection.
#[derive(Debug)]
struct WayState {
    uid: u32,
    /// Secrets that were sent on it.
    said: Vec<SessionSecret>,
}

/// The model of all connections and sessions.
pub struct Oracle {
    /// Marks in files that the peers of this model may not read.
    pub marks: Vec<[u8; 16]>,
    ways: Vec<WayState>,
    /// The user of each session, and the secrets that it may have. Several attaches may have the same trace, slot and number, namely an attach and
    /// its copies with a bit changed; then the answer does not tell whose secret it was.
    sessions: HashMap<u64, (u32, Vec<SessionSecret>)>,
    asked: HashMap<u64, Vec<Asked>>,
    /// The number of unanswered requests by slot and number. They are not told apart by trace, because the server sends a kept answer to any message
    /// with the number of its request.
    unanswered: HashMap<(SlotIndex, u64), usize>,
    /// Answers by kind and by whether the request was done, for the summary.
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

    /// Adds a session that was there before the episode.
    pub fn note_session(&mut self, number: u64, uid: u32, secret: SessionSecret) {
        self.sessions.insert(number, (uid, vec![secret]));
    }

    /// Adds a connection.
    pub fn way(&mut self, uid: u32) -> Way {
        self.ways.push(WayState { uid, said: Vec::new() });
        Way(self.ways.len() - 1)
    }

    /// Notes that these bytes are sent as a message.
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

    /// Every user and secret that may have a session.
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

    /// Checks received bytes, of any packet.
    ///
    /// # Panics
    /// The bytes contain a mark.
    pub fn check_bytes(&self, way: Way, bytes: &[u8]) {
        for mark in &self.marks {
            let found = bytes.windows(mark.len()).position(|window| window == mark);
            assert_eq!(found, None, "{:?} is sent bytes of a file it may not read", self.ways[way.0]);
        }
    }

    /// Checks a message that came. Returns its header, the kind of its request, and the reply unless it is an error.
    ///
    /// # Panics
    /// The server may not send this message on this connection.
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
