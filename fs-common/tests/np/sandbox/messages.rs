//! Messages of hostile peers, and what must come of them.

use super::{BUFFER, World, contents};
use cuttlefs_common::np::{INLINE_MAX, Message, NP_MESSAGE_LEN, Reply, Request, RequestOp, Status};
use cuttlefs_common::rdma::PagedAccess;

impl World {
    /// The status that a request deserves.
    fn verdict(&self, request: &Request) -> Status {
        let is_atomic = matches!(request.op, RequestOp::CompareSwap { .. } | RequestOp::FetchAdd(_));
        let is_there = Self::range(request.offset, request.op.len()).is_some();
        if request.op.changes() && self.access == PagedAccess::Read {
            Status::Rights
        } else if !is_there || is_atomic && !request.offset.is_multiple_of(8) {
            Status::Range
        } else {
            Status::Done
        }
    }

    /// Whether the request can be executed with the buffer that it names.
    fn has_buffer(&self, request: &Request) -> bool {
        let (len, rkey, address, good) = match request.op {
            RequestOp::Read { len, rkey, address } => (len, rkey, address, &self.sink),
            RequestOp::Write { len, rkey, address } => (len, rkey, address, &self.source),
            _ => return true,
        };
        rkey == good.rkey().0 && address.checked_add(len.into()).is_some_and(|end| end <= BUFFER)
    }

    /// Sends messages before the owner looks, and checks what comes of them.
    pub(super) fn say(&mut self, who: usize, messages: &[Vec<u8>]) {
        let stranger = &mut self.strangers[who];
        let (mut asked, mut welcomes, mut ends) = (Vec::<Request>::new(), 0, false);
        for bytes in messages {
            stranger.send(bytes);
            if ends {
                // Nothing behind it has an effect.
                continue;
            }
            let is_too_long = bytes.len() > NP_MESSAGE_LEN + INLINE_MAX;
            match Message::parse(bytes).ok().filter(|_| !is_too_long) {
                Some(Message::Hello) if !stranger.greeted => {
                    stranger.greeted = true;
                    welcomes += 1;
                }
                Some(Message::Request(request)) if stranger.greeted => asked.push(request),
                _ => ends = true,
            }
        }
        let serves = |request: &Request| self.verdict(request) == Status::Done;
        let may_end = asked.iter().any(|request| serves(request) && !self.has_buffer(request));
        let mut replies = Vec::new();
        // Answers wait for the peer's receives, and requests for answers.
        loop {
            self.settle();
            let (_, came) = self.strangers[who].take();
            if came.is_empty() {
                break;
            }
            replies.extend(came);
        }
        for reply in replies {
            match reply {
                Message::Welcome(welcome) => {
                    welcomes -= 1;
                    assert_eq!(*self.welcome.get_or_insert(welcome), welcome);
                }
                Message::Reply(reply) => {
                    let at = asked.iter().position(|request| request.tag == reply.tag);
                    let request = asked.remove(at.expect("an answer to nothing that was asked"));
                    self.check_reply(&request, reply);
                }
                other => panic!("{other:?}"),
            }
        }
        let is_over = self.strangers[who].is_over();
        assert!(!ends || is_over, "a connection goes on behind what is no message");
        assert!(!is_over || ends || may_end, "a connection was ended without a reason");
        if is_over {
            self.counts.ended += 1;
            self.counts.in_doubt += asked.len() as u64;
            for request in asked {
                self.take_over(&request);
            }
            self.strangers.swap_remove(who);
        } else {
            assert!(asked.is_empty() && welcomes == 0, "{asked:?} is not answered");
        }
        assert!(contents(&self.sink) == self.sink_model, "a peer's memory was changed where no request said");
        // The peer that keeps the rules is one.
        let connections = self.target.figures().connections;
        assert_eq!(connections, self.strangers.len() as u64 + 1, "a connection is left, or lost");
    }

    /// Checks an answer. Answers come in the order of their effects.
    fn check_reply(&mut self, request: &Request, reply: Reply) {
        let verdict = self.verdict(request);
        assert_eq!(reply.status, verdict, "{request:?}");
        if verdict != Status::Done {
            self.counts.refused += 1;
            assert!(
                reply.old == 0 && reply.bytes.is_empty(),
                "{request:?} is refused, and answered: {reply:?}"
            );
            return;
        }
        self.counts.done += 1;
        assert!(self.has_buffer(request), "{request:?} names a buffer that is none, and is done");
        let bytes = Self::range(request.offset, request.op.len()).expect("it is done");
        match request.op {
            RequestOp::ReadInline(_) => {
                assert!(reply.bytes == self.model[bytes], "{request:?} brings other bytes")
            }
            RequestOp::WriteInline(ref new) => self.model[bytes].copy_from_slice(new),
            RequestOp::Read { len, address, .. } => {
                let to = address as usize..address as usize + len as usize;
                self.sink_model[to].copy_from_slice(&self.model[bytes]);
            }
            RequestOp::Write { address, .. } => {
                self.source.memory().read(address as usize, &mut self.model[bytes]);
            }
            RequestOp::CompareSwap { expect, swap } => {
                let old = self.word(request.offset).expect("it is done");
                assert_eq!(reply.old, old, "{request:?}");
                if old == expect {
                    self.model[bytes].copy_from_slice(&swap.to_le_bytes());
                }
            }
            RequestOp::FetchAdd(add) => {
                let old = self.word(request.offset).expect("it is done");
                assert_eq!(reply.old, old, "{request:?}");
                self.model[bytes].copy_from_slice(&old.wrapping_add(add).to_le_bytes());
            }
        }
    }

    /// A request whose answer was lost with its connection: it may be done or not, and so the model takes what is there.
    pub(super) fn take_over(&mut self, request: &Request) {
        if self.verdict(request) != Status::Done || !self.has_buffer(request) {
            return;
        }
        let bytes = Self::range(request.offset, request.op.len()).expect("it may be done");
        if request.op.changes() {
            self.region.read(request.offset, &mut self.model[bytes]).expect("read");
        } else if let RequestOp::Read { len, address, .. } = request.op {
            let to = address as usize..address as usize + len as usize;
            self.sink.memory().read(address as usize, &mut self.sink_model[to]);
        }
    }
}
