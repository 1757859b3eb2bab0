//! A walk of two sessions beside the reference model: one has the file open, the other has it by a key. Grants, one-sided changes, requests, truncates,
//! evictions and revoked keys; after each step both read what the model has.

use super::*;
use cuttlefs_client::native::{Buffer, Grant, RegionKey};
use cuttlefs_reference::Contents;
use proptest::prelude::*;

/// No operation reaches past this offset.
const SPAN: u64 = 6 * PAGE as u64;
/// Frames of the server: its pool's pages are many times as many.
const FRAMES: u64 = 96;

#[derive(Clone, Debug)]
enum Step {
    Grant {
        offset: u64,
        len: u64,
    },
    Drop {
        which: usize,
    },
    Write {
        offset: u64,
        len: u64,
    },
    /// Through a queue, together with an append.
    Post {
        offset: u64,
        len: u64,
    },
    Append {
        len: u64,
    },
    Add {
        offset: u64,
        add: u64,
    },
    Swap {
        offset: u64,
        hits: bool,
    },
    Cut {
        len: u64,
    },
    Sync,
    /// Another file takes the frames.
    Evict,
    /// The key ends, and another is handed over.
    Revoke,
}

fn steps() -> impl Strategy<Value = Vec<(bool, Step)>> {
    let range = || (0..SPAN).prop_flat_map(|offset| (Just(offset), 1..=(SPAN - offset).min(9000)));
    let step = prop_oneof![
        3 => range().prop_map(|(offset, len)| Step::Grant { offset, len }),
        1 => any::<prop::sample::Index>().prop_map(|which| Step::Drop { which: which.index(8) }),
        4 => range().prop_map(|(offset, len)| Step::Write { offset, len }),
        3 => range().prop_map(|(offset, len)| Step::Post { offset, len }),
        3 => (1u64..1500).prop_map(|len| Step::Append { len }),
        3 => (0..SPAN / 8, any::<u64>()).prop_map(|(word, add)| Step::Add { offset: word * 8, add }),
        3 => (0..SPAN / 8, any::<bool>()).prop_map(|(word, hits)| Step::Swap { offset: word * 8, hits }),
        2 => (0..SPAN).prop_map(|len| Step::Cut { len }),
        1 => Just(Step::Sync),
        1 => Just(Step::Evict),
        1 => Just(Step::Revoke),
    ];
    prop::collection::vec((any::<bool>(), step), 1..60)
}

struct Side {
    session: Session,
    file: File,
    queue: Queue,
    buffer: Buffer,
    granted: Vec<Grant>,
}

impl Side {
    fn new(session: Session, file: File) -> Self {
        let queue = Queue::new(&session, 4).expect("a queue");
        let buffer = Buffer::new(&session, SPAN as usize).expect("memory");
        Self { session, file, queue, buffer, granted: Vec::new() }
    }
}

struct Walk {
    owner: Side,
    holder: Side,
    key: RegionKey,
    churn: File,
    model: Contents,
    salt: u64,
}

impl Walk {
    fn new(server: &Server, number: u64) -> Self {
        let (one, two) = (server.connect(LINKS[number as usize % 2]), server.connect("tcp"));
        let file = create(&one, &format!("file-{number}"), b"");
        let churn = one.open("churn", OpenOptions::READ).expect("it was made");
        let key = file.bind(0, SPAN, BOTH, None).expect("bound");
        let part = two.redeem(&key).expect("opened");
        let (owner, holder) = (Side::new(one, file), Side::new(two, part));
        Self { owner, holder, key, churn, model: Contents::default(), salt: number }
    }

    fn bytes(&mut self, len: u64) -> Vec<u8> {
        self.salt += 1;
        pattern(len as usize, self.salt)
    }

    /// What is at an aligned place, with zeros behind the end.
    fn word(&self, offset: u64) -> u64 {
        let mut word = [0; 8];
        let bytes = self.model.read(offset, 8);
        word[..bytes.len()].copy_from_slice(bytes);
        u64::from_le_bytes(word)
    }

    /// Whether an atomic could be done, granted or not, and whether it was.
    fn atomic(&mut self, offset: u64, outcome: Result<u64, NativeError>, new: u64) {
        let is_before_end = offset + 8 <= self.model.size();
        match outcome {
            Ok(old) => {
                assert!(is_before_end, "it could not be done");
                assert_eq!(old, self.word(offset));
                self.model.write(offset, &new.to_le_bytes());
            }
            Err(NativeError::PastEnd) => assert!(!is_before_end),
            Err(error) => panic!("{error}"),
        }
    }

    fn step(&mut self, is_owner: bool, step: &Step) {
        let size = self.model.size();
        match *step {
            Step::Grant { offset, len } => {
                let side = if is_owner { &mut self.owner } else { &mut self.holder };
                let range = offset..offset + len;
                let overlaps =
                    |grant: &Grant| grant.range().start < range.end && range.start < grant.range().end;
                let overlaps = side.granted.iter().any(overlaps);
                match side.file.grant_write(offset, len) {
                    Ok(grant) => {
                        assert!(!overlaps);
                        side.granted.push(grant);
                    }
                    Err(NativeError::GrantOverlaps) => assert!(overlaps),
                    // Both sides have the same address, which has a share.
                    Err(NativeError::Server(Status::Busy)) => {}
                    Err(error) => panic!("{error}"),
                }
            }
            Step::Drop { which } => {
                let side = if is_owner { &mut self.owner } else { &mut self.holder };
                if which < side.granted.len() {
                    drop(side.granted.swap_remove(which));
                }
            }
            Step::Write { offset, len } => {
                let bytes = self.bytes(len);
                let side = if is_owner { &self.owner } else { &self.holder };
                side.file.write_at(offset, &bytes).expect("written");
                self.model.write(offset, &bytes);
            }
            Step::Post { offset, len } => {
                let bytes = self.bytes(len);
                let side = if is_owner { &mut self.owner } else { &mut self.holder };
                side.buffer.write(0, &bytes).expect("in the buffer");
                side.queue.post_write(1, &side.file, offset, (&side.buffer, 0, bytes.len())).expect("posted");
                assert_eq!(done(&all_of(&mut side.queue), 1), Done::Written { offset, len: bytes.len() });
                self.model.write(offset, &bytes);
            }
            Step::Append { len } => {
                let bytes = self.bytes(len);
                let side = if is_owner { &self.owner } else { &self.holder };
                if size + len > SPAN {
                    // The key's part ends there; the owner's appends would leave what both read.
                    if !is_owner {
                        assert_eq!(status(side.file.append(&bytes)), Status::Denied);
                    }
                    return;
                }
                assert_eq!(side.file.append(&bytes).expect("appended"), size);
                self.model.write(size, &bytes);
            }
            Step::Add { offset, add } => {
                let side = if is_owner { &self.owner } else { &self.holder };
                let outcome = side.file.fetch_add(offset, add);
                self.atomic(offset, outcome, self.word(offset).wrapping_add(add));
            }
            Step::Swap { offset, hits } => {
                let (old, new) = (self.word(offset), self.salt);
                let expect = if hits { old } else { !old };
                let side = if is_owner { &self.owner } else { &self.holder };
                let outcome = side.file.compare_swap(offset, expect, new);
                self.atomic(offset, outcome, if hits { new } else { old });
            }
            Step::Cut { len } => {
                self.owner.file.set_len(len).expect("cut");
                self.model.truncate(len);
            }
            Step::Sync => {
                let side = if is_owner { &self.owner } else { &self.holder };
                side.file.sync().expect("durable");
            }
            Step::Evict => {
                let mut bytes = vec![0; 2 * FRAMES as usize * PAGE];
                self.churn.read_at(0, &mut bytes).expect("read");
            }
            Step::Revoke => {
                self.owner.file.unbind(&self.key).expect("unbound");
                has_ended(read(&self.holder.file, 0, 1));
                has_ended(self.holder.file.write_at(0, b"no"));
                self.key = self.owner.file.bind(0, SPAN, BOTH, None).expect("bound");
                self.holder.granted.clear();
                self.holder.file = self.holder.session.redeem(&self.key).expect("opened");
            }
        }
    }

    fn check(&self) {
        let size = self.model.size();
        for side in [&self.owner, &self.holder] {
            let got = read(&side.file, 0, SPAN as usize).expect("read");
            assert!(got == self.model.read(0, size), "{} bytes, and {size} were expected", got.len());
        }
    }
}

#[test]
fn two_sessions_keep_to_the_model() {
    let server = Server::new(FRAMES);
    let churner = server.connect("unix");
    let _churn = create(&churner, "churn", &pattern(4 * FRAMES as usize * PAGE, 3));
    let config = ProptestConfig { cases: 24, failure_persistence: None, ..ProptestConfig::default() };
    let number = std::cell::Cell::new(0);
    proptest!(config, |(steps in steps())| {
        number.set(number.get() + 1);
        let mut walk = Walk::new(&server, number.get());
        for (is_owner, step) in &steps {
            walk.step(*is_owner, step);
            walk.check();
        }
    });
    let counts = server.running.server().files.pages().figures().counts;
    assert!(counts.target_appends > 0 && counts.target_atomics > 0, "{counts:?}");
}
