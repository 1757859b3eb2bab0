//! A frame of the `tcp` link as a peer sends it, the handshake's included. Whatever header parses is the one encoding
//! of what it says, and asks for no more room than its kind may have.
#![no_main]

use cuttlefs_common::rdma::soft::tcp::packet::{PACKET_HEADER_LEN, PacketHeader, build, header_checksum, verify};
use cuttlefs_common::rpc::MAX_TRANSFER_BYTES;
use libfuzzer_sys::fuzz_target;

/// Where the payload's checksum stands; hardly an input has the right one.
const CRC: std::ops::Range<usize> = 12..16;
/// Where the header's stands; it is put right, or nothing behind it would be reached.
const HEADER_CRC: std::ops::Range<usize> = 60..64;

fuzz_target!(|bytes: &[u8]| {
    let _ = PacketHeader::parse(bytes);
    let mut bytes = bytes.to_vec();
    let Some(header) = bytes.first_chunk_mut() else {
        return;
    };
    let crc = header_checksum(header);
    header[HEADER_CRC].copy_from_slice(&crc.to_le_bytes());
    let Ok(header) = PacketHeader::parse(&bytes) else {
        return;
    };
    assert!(header.payload_len <= MAX_TRANSFER_BYTES && header.wanted <= MAX_TRANSFER_BYTES);
    let Some(frame) = bytes.get(..PACKET_HEADER_LEN + header.payload_len as usize) else {
        return;
    };
    let again = build(header, &frame[PACKET_HEADER_LEN..]);
    assert_eq!(again[..CRC.start], frame[..CRC.start]);
    assert_eq!(again[CRC.end..HEADER_CRC.start], frame[CRC.end..HEADER_CRC.start]);
    assert_eq!(again[HEADER_CRC.end..], frame[HEADER_CRC.end..]);
    assert_eq!(PacketHeader::parse(&again), Ok(header));
    assert_eq!(verify(&again), Ok(()));
    assert_eq!(verify(frame).is_ok(), again == frame);
});
