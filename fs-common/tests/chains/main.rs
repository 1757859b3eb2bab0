//! What the checker of chains accepts touches no memory outside of its views, changes no byte of its queue that is fixed, and ends: over a fixed number
//! of arbitrary chains and messages, the same each time. And control messages of a memory node that are arbitrary or damaged do no harm.
//! `CUTTLEFS_CHAIN_CASES` has more of them; the fuzz targets `chain` and `odrp_message` look for their own.

mod messages;
mod sandbox;

use cuttlefs_common::odrp::{Answer, Kind, Question, Why, encode};
use cuttlefs_common::rdma::chain::check;
use sandbox::{Outcome, run};

const CASES: u64 = 60_000;
/// Bytes that decide a case.
const INPUT: usize = 160;

/// SplitMix64: bytes from a number.
fn input(case: u64) -> Vec<u8> {
    let mut state = case.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ 0x5bd1_e995;
    let mut word = || {
        state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mixed = (state ^ state >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let mixed = (mixed ^ mixed >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        (mixed ^ mixed >> 31).to_le_bytes()
    };
    (0..INPUT / 8).flat_map(|_| word()).collect()
}

fn cases() -> u64 {
    let more = std::env::var("CUTTLEFS_CHAIN_CASES").ok();
    more.map_or(CASES, |more| more.parse().expect("CUTTLEFS_CHAIN_CASES is a number"))
}

#[test]
fn what_is_proven_hurts_nobody_and_ends() {
    let (mut ran, mut with_work) = (0u64, 0u64);
    for case in 0..cases() {
        match run(&input(case), |queue| check(queue).is_ok()) {
            Outcome::Refused => {}
            Outcome::Ran(entries) => {
                ran += 1;
                with_work += u64::from(entries > 8);
            }
            Outcome::Broke(what) => panic!("case {case}: {what}"),
        }
    }
    eprintln!("{ran} queues were proven, {with_work} of them executed more than eight entries");
    // Or nothing would be tested.
    assert!(ran >= CASES / 50 && with_work >= CASES / 500, "{ran} proven, {with_work} with work");
}

#[test]
fn without_the_checker_the_sandbox_sees_harm() {
    let harm = (0..CASES).find_map(|case| match run(&input(case), |queue| queue.look().is_ok()) {
        Outcome::Broke(what) => Some(what),
        _ => None,
    });
    assert_eq!(harm.as_deref(), Some("a fixed byte of the queue has changed"));
}

/// Found by the fuzz target: WRITEs to the queue changed each other's addresses.
#[test]
fn regression_what_a_write_to_the_queue_fills_in_is_no_fixed_address() {
    let mut bytes = [0x44; 110];
    (bytes[39], bytes[84]) = (0x11, 0x11);
    bytes[98..100].copy_from_slice(&[0xa5, 0x5c]);
    bytes[108..].copy_from_slice(&[0xa5, 0x5c]);
    assert_eq!(run(&bytes, |queue| check(queue).is_ok()), Outcome::Refused);
    let unchecked = run(&bytes, |queue| queue.look().is_ok());
    assert_eq!(unchecked, Outcome::Broke("a fixed byte of the queue has changed".to_owned()));
}

/// One of each kind of control message.
fn control_messages() -> Vec<Vec<u8>> {
    let questions = [
        Question::Join { pages: 1 << 20 },
        Question::Attach { token: u128::MAX - 5, kind: Kind::Load },
        Question::Beat,
        Question::Mapped { first: 16_384 },
        Question::Why { kind: Kind::UnmappedStore },
    ];
    let answers = [
        Answer::Joined { token: 300, budget: u64::MAX, lease_seconds: 10 },
        Answer::Attached,
        Answer::Heard,
        Answer::Mapped { bits: vec![0xa5; 200] },
        Answer::Broke { why: Why::Unknown },
        Answer::Broke { why: Why::Fault("not mapped".into()) },
        Answer::Refused { reason: "the node is full; join a larger one".into() },
    ];
    let questions = questions.iter().map(encode);
    questions.chain(answers.iter().map(encode)).map(|bytes| bytes.expect("short")).collect()
}

#[test]
fn damaged_control_messages_do_no_harm() {
    let whole = control_messages();
    for message in &whole {
        assert!(messages::look(message) > 0, "{message:x?}");
        for len in 0..message.len() {
            messages::look(&message[..len]);
        }
    }
    let mut parsed = 0;
    for case in 0..cases() {
        let dice = input(case);
        let mut bytes = whole[usize::from(dice[0]) % whole.len()].clone();
        for change in dice[8..].chunks_exact(8).take(1 + usize::from(dice[1]) % 4) {
            let at = usize::from(u16::from_le_bytes([change[1], change[2]]));
            match change[0] % 6 {
                0 => {
                    let at = at % bytes.len();
                    bytes[at] ^= 1 << (change[4] % 8);
                }
                1 => bytes.truncate(1 + at % bytes.len()),
                2 => bytes.extend(&change[3..3 + at % 5]),
                // A number that goes on, and ends, elsewhere.
                3 => bytes.insert(1 + at % bytes.len(), 0x80 | change[3]),
                4 => {
                    let at = at % bytes.len();
                    bytes[at] = change[3];
                }
                // Longer than a message may be.
                _ => bytes.resize(bytes.len() + at % 5000, change[3]),
            }
        }
        parsed += messages::look(&bytes);
        parsed += messages::look(&dice[..usize::from(dice[1]) % INPUT]);
        // Arbitrary, but of this version.
        parsed += messages::look(&[&whole[0][..1], &dice[..usize::from(dice[2]) % 40]].concat());
    }
    eprintln!("{parsed} of them were messages");
    assert!(parsed as u64 > CASES / 20, "{parsed}: nearly nothing gets past the version");
}
