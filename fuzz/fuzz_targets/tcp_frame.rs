//! A frame of the `tcp` link as a peer sends it, the handshake's included. Whatever header parses is the one encoding
//! of what it says, and asks for no more room than its kind may have.
#![no_main]

use cuttlefs_common::rdma::soft::tcp::frame::{FRAME_HEADER_LEN, FrameHeader, build, verify};
use cuttlefs_common::rpc::MAX_TRANSFER_BYTES;
use libfuzzer_sys::fuzz_target;

/// Where the checksum stands; hardly an input has the right one.
const CRC: std::ops::Range<usize> = 12..16;

fuzz_target!(|bytes: &[u8]| {
    let Ok(header) = FrameHeader::parse(bytes) else {
        return;
    };
    assert!(header.payload_len <= MAX_TRANSFER_BYTES && header.wanted <= MAX_TRANSFER_BYTES);
    let Some(frame) = bytes.get(..FRAME_HEADER_LEN + header.payload_len as usize) else {
        return;
    };
    let again = build(header, &frame[FRAME_HEADER_LEN..]);
    assert_eq!(again[..CRC.start], frame[..CRC.start]);
    assert_eq!(again[CRC.end..], frame[CRC.end..]);
    assert_eq!(verify(&again), Ok(()));
    assert_eq!(verify(frame).is_ok(), again == frame);
});
