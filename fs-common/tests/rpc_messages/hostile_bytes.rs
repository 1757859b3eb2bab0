//! Bytes that are no message: parsing them ends with an error or a value, never with a panic, and allocates memory in proportion to the length of the
//! bytes, whatever counts they announce.

use crate::counting_allocator::counted;
use crate::room;
use crate::strategies::{reply, request};
use cuttlefs_common::rpc::{DirEntry, MAX_MESSAGE_BYTES, Opened, Reclaim, Reply, Request};
use proptest::prelude::*;
use proptest::sample::Index;

/// A growing list doubles, so all its allocations together are at most twice its last one, and that one may be half empty.
const GROWTH: usize = 4;
/// Bytes of memory that a byte of a request may cost: the smallest list element is one byte on the wire.
const REQUEST_FACTOR: usize = GROWTH * size_of::<Reclaim>();
/// Bytes of memory that a byte of a reply may cost: a file that is gone is one byte on the wire.
const REPLY_FACTOR: usize = GROWTH * size_of::<Option<Opened>>();
/// A list of one element has room for four.
const FLOOR_BYTES: usize = 4 * size_of::<DirEntry<'_>>();

/// Parses as a request and as a reply.
fn parse_within_bounds(bytes: &[u8]) -> Result<(), TestCaseError> {
    let (_, asked) = counted(|| Request::parse(bytes).map(drop));
    prop_assert!(asked <= FLOOR_BYTES + bytes.len() * REQUEST_FACTOR, "request: {asked} of {}", bytes.len());
    let (_, asked) = counted(|| Reply::parse(bytes).map(drop));
    prop_assert!(asked <= FLOOR_BYTES + bytes.len() * REPLY_FACTOR, "reply: {asked} of {}", bytes.len());
    Ok(())
}

/// A count in postcard's encoding.
fn varint(mut count: u64) -> Vec<u8> {
    let mut bytes = Vec::new();
    while count >= 0x80 {
        bytes.push(count as u8 | 0x80);
        count >>= 7;
    }
    bytes.push(count as u8);
    bytes
}

proptest! {
    #[test]
    fn any_bytes(bytes in proptest::collection::vec(any::<u8>(), 0..2000)) {
        parse_within_bounds(&bytes)?;
    }

    #[test]
    fn every_kind_with_any_body(kind in 0u8..40, body in proptest::collection::vec(any::<u8>(), 0..500)) {
        parse_within_bounds(&[&[kind], &body[..]].concat())?;
    }

    #[test]
    fn lists_that_announce_more_than_there_is(
        kind in 0u8..40,
        before in proptest::collection::vec(0u8..3, 0..4),
        count in any::<u64>().prop_flat_map(|count| (0u32..64).prop_map(move |shift| count >> shift)),
        fill in any::<u8>(),
        len in 0usize..5000,
    ) {
        parse_within_bounds(&[&[kind], &before[..], &varint(count), &vec![fill; len]].concat())?;
    }

    #[test]
    fn damaged_requests(request in request(), at in any::<Index>(), byte in any::<u8>()) {
        let mut buffer = room();
        let len = request.encode(&mut buffer).expect("it fits");
        buffer[at.index(len)] = byte;
        parse_within_bounds(&buffer[..len])?;
    }

    #[test]
    fn damaged_replies(reply in reply(), at in any::<Index>(), byte in any::<u8>()) {
        let mut buffer = room();
        let len = reply.encode(&mut buffer).expect("it fits");
        buffer[at.index(len)] = byte;
        parse_within_bounds(&buffer[..len])?;
    }
}

/// The message that costs the most memory: a list of nothing but files that are gone. It shows that the bounds above are tight.
#[test]
fn the_longest_list_in_one_message() {
    let count = u64::from(MAX_MESSAGE_BYTES) - 4;
    let body = [&[2][..], &varint(count), &vec![0; count as usize]].concat();
    let (reply, asked) = counted(|| Reply::parse(&body));
    assert_eq!(
        reply.map(|reply| matches!(reply, Reply::Reclaimed(files) if files.len() as u64 == count)),
        Ok(true)
    );
    assert!(asked >= count as usize * size_of::<Option<Opened>>());
    assert!(asked <= body.len() * REPLY_FACTOR, "{asked}");
}
