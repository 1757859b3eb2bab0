//! An encoded message parses to itself; a shorter or longer one does not parse.

use crate::room;
use crate::strategies::{reply, request};
use cuttlefs_common::rpc::{BodyError, FetchedHead, Reply, Request};
use proptest::prelude::*;
use proptest::sample::Index;

proptest! {
    #[test]
    fn requests(request in request(), cut in any::<Index>(), extra in 1usize..20) {
        let mut buffer = room();
        let len = request.encode(&mut buffer).expect("it fits");
        prop_assert_eq!(Request::parse(&buffer[..len]), Ok(request.clone()));
        prop_assert_eq!(Request::parse(&buffer[..cut.index(len)]), Err(BodyError::Malformed));
        prop_assert_eq!(Request::parse(&buffer[..len + extra]), Err(BodyError::Trailing(extra)));
        let short = cut.index(len);
        prop_assert_eq!(request.encode(&mut buffer[..short]), Err(BodyError::TooLarge(short)));
    }

    #[test]
    fn a_fetched_head_and_its_bytes_are_the_reply(valid_len in any::<u32>(), len in 0usize..20_000) {
        let inline = vec![7; len];
        let mut built = FetchedHead::new(valid_len, len).as_slice().to_vec();
        built.extend_from_slice(&inline);
        let reply = Reply::Fetched { valid_len, inline: &inline };
        prop_assert_eq!(Ok(built), reply.encode_to_vec());
    }

    #[test]
    fn replies(reply in reply(), cut in any::<Index>(), extra in 1usize..20) {
        let mut buffer = room();
        let len = reply.encode(&mut buffer).expect("it fits");
        prop_assert_eq!(Reply::parse(&buffer[..len]), Ok(reply.clone()));
        prop_assert_eq!(Reply::parse(&buffer[..cut.index(len)]), Err(BodyError::Malformed));
        prop_assert_eq!(Reply::parse(&buffer[..len + extra]), Err(BodyError::Trailing(extra)));
        let short = cut.index(len);
        prop_assert_eq!(reply.encode(&mut buffer[..short]), Err(BodyError::TooLarge(short)));
    }
}
