//! What the other process of a `shm` link says: messages of the handshake, and headers of ring records. Whatever parses
//! says the same after another way round.
#![no_main]

use cuttlefs_common::rdma::soft::shm::ring::{RECORD_HEADER_LEN, RecordHeader};
use cuttlefs_common::rdma::soft::shm::wire::ShmMessage;
use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| {
    if let Ok(message) = ShmMessage::parse(bytes) {
        assert_eq!(ShmMessage::parse(&message.encode()).as_ref(), Ok(&message));
    }
    if let Ok(header) = RecordHeader::parse(bytes) {
        assert_eq!(header.encode(), bytes[..RECORD_HEADER_LEN]);
    }
});
