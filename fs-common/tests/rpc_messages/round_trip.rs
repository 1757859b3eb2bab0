//! What is encoded parses to the same, and nothing shorter or longer does.

use crate::room;
use crate::strategies::{reply, request};
use cuttlefs_common::rpc::{BodyError, Reply, Request};
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
