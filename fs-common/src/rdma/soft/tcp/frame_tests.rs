use super::*;
use proptest::prelude::*;

/// A frame with the given bytes at the given places, all else zero, and its checksum.
fn golden(kind: u8, fields: &[(usize, &[u8])], payload: &[u8], crc: u32) -> Vec<u8> {
    let mut bytes = vec![0; FRAME_HEADER_LEN];
    bytes[..6].copy_from_slice(&[b'C', b'F', b'N', b'F', 2, kind]);
    bytes[8] = payload.len() as u8;
    for (at, value) in fields {
        bytes[*at..*at + value.len()].copy_from_slice(value);
    }
    bytes[12..16].copy_from_slice(&crc.to_le_bytes());
    bytes.extend_from_slice(payload);
    bytes
}

/// A header, its bytes that are not zero, and a payload.
type Example = (FrameHeader, Vec<(usize, &'static [u8])>, &'static [u8]);

fn full(kind: FrameKind) -> Example {
    let mut header = FrameHeader::new(kind, 0x0102_0304_0506_0708);
    let sequence: (usize, &[u8]) = (16, &[8, 7, 6, 5, 4, 3, 2, 1]);
    let key: (usize, &[u8]) = (24, &[4, 3, 2, 1]);
    let offset: (usize, &[u8]) = (32, &[0, 0, 0, 0, 0x0a]);
    match kind {
        FrameKind::Hello | FrameKind::Welcome => {
            header.sequence = 0;
            (header, vec![], &[0, 0x10, 1, 0, 0, 0, 0x10, 0, 0, 0, 0, 0, 0, 0, 0, 0])
        }
        FrameKind::Refuse => {
            header.sequence = 0;
            (header, vec![], b"no")
        }
        FrameKind::Send => {
            header.imm = Some(0x0a0b_0c0d);
            (header, vec![sequence, (6, &[1]), (56, &[0x0d, 0x0c, 0x0b, 0x0a])], b"hello")
        }
        FrameKind::Write => {
            (header.key, header.offset, header.ack) = (0x0102_0304, 0x0a_0000_0000, true);
            (header, vec![sequence, key, offset, (6, &[2])], b"bytes")
        }
        FrameKind::ReadMemory | FrameKind::ReadFile | FrameKind::ReadBitmap => {
            (header.key, header.offset, header.wanted) = (0x0102_0304, 0x0a_0000_0000, 4096);
            (header, vec![sequence, key, offset, (60, &[0, 0x10])], b"")
        }
        FrameKind::CompareSwap => {
            (header.key, header.offset, header.first, header.second) = (0x0102_0304, 0x0a_0000_0000, 5, 6);
            (header, vec![sequence, key, offset, (40, &[5]), (48, &[6])], b"")
        }
        FrameKind::FetchAdd => {
            (header.key, header.offset, header.first) = (0x0102_0304, 0x0a_0000_0000, 5);
            (header, vec![sequence, key, offset, (40, &[5])], b"")
        }
        FrameKind::ReadReply => (header, vec![sequence], b"page"),
        FrameKind::AtomicReply => {
            header.first = 5;
            (header, vec![sequence, (40, &[5])], b"")
        }
        FrameKind::WriteAck | FrameKind::FlushAck => (header, vec![sequence], b""),
        FrameKind::Flush => {
            (header.key, header.offset, header.first, header.second) = (0x0102_0304, 0x0a_0000_0000, 4096, 2);
            (header, vec![sequence, key, offset, (40, &[0, 0x10]), (48, &[2])], b"")
        }
        FrameKind::Nak => {
            header.status = Some(WcStatus::RemoteInvalid);
            (header, vec![sequence, (56, &[2])], b"")
        }
    }
}

/// The checksums stand here as numbers, computed by another implementation, so that a change of the
/// polynomial or of its range is seen.
const CHECKSUMS: [u32; 16] = [
    0xb3c3_5f24,
    0x2942_0550,
    0x3622_eb12,
    0x0875_9e73,
    0xe38a_8130,
    0x424d_f2d2,
    0x760c_7f66,
    0x5c28_c43b,
    0x6793_d0b7,
    0x1ca1_878d,
    0x4e6e_b41c,
    0x865e_c3e6,
    0xeab7_6b06,
    0x240d_0794,
    0x0400_37e7,
    0xe23c_8b60,
];

#[test]
fn golden_bytes() {
    for number in 1..=16u8 {
        let kind = FrameKind::from_number(number).expect("kind");
        let (mut header, fields, payload) = full(kind);
        let bytes = golden(number, &fields, payload, CHECKSUMS[number as usize - 1]);
        let built = build(header, payload);
        assert_eq!(
            built,
            bytes,
            "{kind:?}: crc {:#010x}",
            u32::from_le_bytes(built[12..16].try_into().expect("4"))
        );
        header.payload_len = payload.len() as u32;
        assert_eq!(FrameHeader::parse(&bytes), Ok(header));
        assert_eq!(verify(&bytes), Ok(()));
    }
    assert!(FrameKind::from_number(0).is_none() && FrameKind::from_number(17).is_none());
}

#[test]
fn bad_headers_are_named() {
    let frame = build(FrameHeader::new(FrameKind::WriteAck, 1), b"");
    let with = |at: usize, value: u8| {
        let mut bytes = frame.clone();
        bytes[at] = value;
        FrameHeader::parse(&bytes)
    };
    assert_eq!(with(0, b'X'), Err(FrameError::Magic));
    assert_eq!(with(4, 9), Err(FrameError::Version(9)));
    assert_eq!(with(5, 99), Err(FrameError::Kind(99)));
    assert_eq!(with(6, 4), Err(FrameError::Field("flags")));
    assert_eq!(with(8, 1), Err(FrameError::Oversized(1)));
    assert_eq!(with(24, 1), Err(FrameError::Field("key")));
    assert_eq!(with(60, 1), Err(FrameError::Field("wanted")));
    assert_eq!(FrameHeader::parse(&frame[..63]), Err(FrameError::Truncated(63)));
    let mut read = FrameHeader::new(FrameKind::ReadFile, 1);
    read.wanted = MAX_TRANSFER_BYTES + 1;
    assert_eq!(FrameHeader::parse(&build(read, b"")), Err(FrameError::Oversized(MAX_TRANSFER_BYTES + 1)));
    let flush = |first, second| {
        let header = FrameHeader { first, second, ..FrameHeader::new(FrameKind::Flush, 1) };
        FrameHeader::parse(&build(header, b"")).err()
    };
    assert_eq!(flush(1 << 32, 1), Some(FrameError::Field("first")));
    assert_eq!(flush(0, 0), Some(FrameError::Field("second")));
    assert_eq!(flush(0, 3), Some(FrameError::Field("second")));
    let nak = FrameHeader::new(FrameKind::Nak, 1);
    assert_eq!(FrameHeader::parse(&build(nak, b"")), Err(FrameError::Field("imm")));
}

proptest! {
    #[test]
    fn no_bytes_panic(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
        let _ = FrameHeader::parse(&bytes);
        let _ = verify(&bytes);
    }

    #[test]
    fn any_flipped_bit_is_noticed(number in 1u8..=16, at in any::<prop::sample::Index>(), bit in 0u8..8) {
        let (header, _, payload) = full(FrameKind::from_number(number).expect("kind"));
        let mut frame = build(header, payload);
        let at = at.index(frame.len());
        frame[at] ^= 1 << bit;
        prop_assert!(FrameHeader::parse(&frame).is_err() || verify(&frame).is_err());
    }
}
