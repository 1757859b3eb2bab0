//! Messages between a client and its node: of control connections, and the first one of each connection for chains.
//!
//! A message is its version and a postcard encoding. The client asks, the node answers each question once.

use super::chains::Kind;
use super::figures::NodeFigures;
use serde::{Deserialize, Serialize};

/// The version of the messages and of the chains' own messages.
pub const VERSION: u8 = 2;
/// The longest message.
pub const MESSAGE_MAX: usize = 4096;
/// Entries of one answer about what is mapped: their bits fit a message.
pub const MAPPED_PER_ANSWER: u64 = 16 * 1024;

/// A client's question.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Question {
    /// Joins, with a swap space of this number of pages.
    Join {
        /// Pages.
        pages: u64,
    },
    /// This connection is for chains of this kind.
    Attach {
        /// The client's proof that it is itself.
        token: u128,
        /// The kind.
        kind: Kind,
    },
    /// The client is there.
    Beat,
    /// What is mapped from this entry on.
    Mapped {
        /// A multiple of 8.
        first: u64,
    },
    /// Why the connection of a kind broke.
    Why {
        /// The kind.
        kind: Kind,
    },
    /// What the node says of itself. Whoever has not joined may ask that, too.
    Figures,
}

/// The node's answer.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Answer {
    /// The client has joined.
    Joined {
        /// Shown by each of its other connections.
        token: u128,
        /// The most pages that it may have mapped.
        budget: u64,
        /// Seconds after which a silent client is gone.
        lease_seconds: u32,
    },
    /// The connection is armed.
    Attached,
    /// The node knows.
    Heard,
    /// One bit an entry, the lowest first.
    Mapped {
        /// The bits.
        #[serde(with = "serde_bytes")]
        bits: Vec<u8>,
    },
    /// Why it broke.
    Broke {
        /// What stopped the chain.
        why: Why,
    },
    /// The node does not do that.
    Refused {
        /// The reason, and what to do.
        reason: String,
    },
    /// What the node says of itself.
    Figures(NodeFigures),
}

/// What stopped a client's chain.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Why {
    /// Nothing that the node knows of: the connection was cut.
    Unknown,
    /// There was no free page.
    Empty,
    /// The page was not mapped, or the request was wrong.
    Fault(String),
}

/// Why bytes are no message.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum BadMessage {
    /// Another version, or no bytes at all.
    #[error("the peer speaks version {0:?}, this side {VERSION}; run the same release on both")]
    Version(Option<u8>),
    /// The bytes are no message.
    #[error("the message does not parse")]
    Malformed,
    /// It is longer than a message may be.
    #[error("a message of {0} bytes is longer than {MESSAGE_MAX}")]
    Long(usize),
}

/// Encodes a message.
///
/// # Errors
/// `BadMessage::Long`.
pub fn encode<M: Serialize>(message: &M) -> Result<Vec<u8>, BadMessage> {
    let mut bytes = vec![VERSION];
    bytes.extend(postcard::to_allocvec(message).map_err(|_| BadMessage::Malformed)?);
    if bytes.len() <= MESSAGE_MAX { Ok(bytes) } else { Err(BadMessage::Long(bytes.len())) }
}

/// Parses a message.
///
/// # Errors
/// `BadMessage`.
pub fn parse<'m, M: Deserialize<'m>>(bytes: &'m [u8]) -> Result<M, BadMessage> {
    if bytes.len() > MESSAGE_MAX {
        return Err(BadMessage::Long(bytes.len()));
    }
    let (version, rest) = bytes.split_first().ok_or(BadMessage::Version(None))?;
    if *version != VERSION {
        return Err(BadMessage::Version(Some(*version)));
    }
    let (message, rest) = postcard::take_from_bytes(rest).map_err(|_| BadMessage::Malformed)?;
    if rest.is_empty() { Ok(message) } else { Err(BadMessage::Malformed) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn messages_have_their_golden_bytes() {
        let question = Question::Attach { token: 300, kind: Kind::Invalidate };
        assert_eq!(encode(&question), Ok(vec![VERSION, 1, 0xac, 2, 3]));
        assert_eq!(parse(&[VERSION, 1, 0xac, 2, 3]), Ok(question));
        let answer = Answer::Joined { token: 5, budget: 6, lease_seconds: 10 };
        assert_eq!(encode(&answer), Ok(vec![VERSION, 0, 5, 6, 10]));
        assert_eq!(encode(&Answer::Broke { why: Why::Empty }), Ok(vec![VERSION, 4, 1]));
        assert_eq!(encode(&Question::Mapped { first: 8 }), Ok(vec![VERSION, 3, 8]));
        assert_eq!(encode(&Question::Figures), Ok(vec![VERSION, 5]));
        let figures = NodeFigures {
            clients: 1,
            clients_max: 64,
            by_processor: true,
            pages: 3,
            free: 4,
            mapped: 5,
            budget: 6,
            chains: [7, 8, 9, 10],
            entries: 300,
            control_messages: 12,
            faults: 13,
            set_right: 14,
            gone: 15,
        };
        let golden = [VERSION, 6, 1, 64, 1, 3, 4, 5, 6, 7, 8, 9, 10, 0xac, 2, 12, 13, 14, 15];
        assert_eq!(encode(&Answer::Figures(figures)), Ok(golden.to_vec()));
    }

    #[test]
    fn an_answer_about_all_its_entries_fits() {
        let bits = vec![0xff; MAPPED_PER_ANSWER as usize / 8];
        assert!(encode(&Answer::Mapped { bits }).is_ok());
        let long = Answer::Refused { reason: "x".repeat(MESSAGE_MAX) };
        assert!(matches!(encode(&long), Err(BadMessage::Long(_))));
    }

    #[test]
    fn foreign_bytes_are_refused_with_words() {
        assert_eq!(parse::<Question>(&[]), Err(BadMessage::Version(None)));
        assert_eq!(parse::<Question>(&[9, 2]), Err(BadMessage::Version(Some(9))));
        assert_eq!(parse::<Question>(&[VERSION, 2, 0]), Err(BadMessage::Malformed), "a byte too many");
    }

    fn questions() -> impl Strategy<Value = Question> {
        let kind = || proptest::sample::select(Kind::ALL.to_vec());
        prop_oneof![
            any::<u64>().prop_map(|pages| Question::Join { pages }),
            (any::<u128>(), kind()).prop_map(|(token, kind)| Question::Attach { token, kind }),
            Just(Question::Beat),
            any::<u64>().prop_map(|first| Question::Mapped { first }),
            kind().prop_map(|kind| Question::Why { kind }),
            Just(Question::Figures),
        ]
    }

    fn answers() -> impl Strategy<Value = Answer> {
        let bits = proptest::collection::vec(any::<u8>(), 0..=MAPPED_PER_ANSWER as usize / 8);
        let joined = (any::<u128>(), any::<u64>(), any::<u32>());
        let why = prop_oneof![Just(Why::Unknown), Just(Why::Empty), ".{0,200}".prop_map(Why::Fault)];
        prop_oneof![
            joined.prop_map(|(token, budget, lease_seconds)| Answer::Joined { token, budget, lease_seconds }),
            Just(Answer::Attached),
            Just(Answer::Heard),
            bits.prop_map(|bits| Answer::Mapped { bits }),
            why.prop_map(|why| Answer::Broke { why }),
            ".{0,200}".prop_map(|reason| Answer::Refused { reason }),
            any::<([u64; 11], [u64; 4])>()
                .prop_map(|(words, chains)| Answer::Figures(figures(words, chains))),
        ]
    }

    fn figures(words: [u64; 11], chains: [u64; 4]) -> NodeFigures {
        NodeFigures {
            clients: words[0],
            clients_max: words[1],
            by_processor: words[1] % 2 == 1,
            pages: words[2],
            free: words[3],
            mapped: words[4],
            budget: words[5],
            entries: words[6],
            control_messages: words[7],
            faults: words[8],
            set_right: words[9],
            gone: words[10],
            chains,
        }
    }

    /// A message survives the wire, and neither a part of it nor more than it is one.
    fn survives<M>(message: &M, at: usize) -> Result<(), TestCaseError>
    where
        M: Serialize + for<'m> Deserialize<'m> + PartialEq + std::fmt::Debug,
    {
        let mut bytes = encode(message).expect("it fits");
        prop_assert_eq!(&parse::<M>(&bytes).expect("it parses"), message);
        prop_assert!(parse::<M>(&bytes[..at % bytes.len()]).is_err(), "a part");
        bytes.push(0);
        prop_assert_eq!(parse::<M>(&bytes), Err(BadMessage::Malformed), "a byte more");
        bytes[0] ^= 1 << (at % 8);
        prop_assert_eq!(parse::<M>(&bytes), Err(BadMessage::Version(Some(bytes[0]))));
        Ok(())
    }

    proptest! {
        #[test]
        fn messages_survive_the_wire(question in questions(), answer in answers(), at in any::<usize>()) {
            survives(&question, at)?;
            survives(&answer, at)?;
        }

        #[test]
        fn arbitrary_bytes_do_not_panic(bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
            let _ = parse::<Question>(&bytes);
            let _ = parse::<Answer>(&bytes);
        }
    }
}
