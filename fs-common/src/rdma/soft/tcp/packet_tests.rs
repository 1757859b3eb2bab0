use super::*;
use proptest::prelude::*;

/// A packet with the given bytes at the given offsets, zeros elsewhere, and these checksums.
fn golden(kind: u8, fields: &[(usize, &[u8])], payload: &[u8], (crc, header_crc): (u32, u32)) -> Vec<u8> {
    let mut bytes = vec![0; PACKET_HEADER_LEN];
    bytes[..6].copy_from_slice(&[b'C', b'F', b'N', b'F', 4, kind]);
    bytes[8] = payload.len() as u8;
    for (at, value) in fields {
        bytes[*at..*at + value.len()].copy_from_slice(value);
    }
    bytes[12..16].copy_from_slice(&crc.to_le_bytes());
    bytes[60..].copy_from_slice(&header_crc.to_le_bytes());
    bytes.extend_from_slice(payload);
    bytes
}

/// A header, the bytes of it that are not zero, and a payload.
type Example = (PacketHeader, Vec<(usize, &'static [u8])>, &'static [u8]);

fn full(kind: PacketKind) -> Example {
    let mut header = PacketHeader::new(kind, 0x0102_0304_0506_0708);
    let sequence: (usize, &[u8]) = (16, &[8, 7, 6, 5, 4, 3, 2, 1]);
    let key: (usize, &[u8]) = (24, &[4, 3, 2, 1]);
    let offset: (usize, &[u8]) = (32, &[0, 0, 0, 0, 0x0a]);
    match kind {
        PacketKind::Hello | PacketKind::Welcome => {
            header.sequence = 0;
            (header, vec![], &[0, 0x10, 1, 0, 0, 0, 0x10, 0, 0, 0, 0, 0, 0, 0, 0, 0])
        }
        PacketKind::Refuse => {
            header.sequence = 0;
            (header, vec![], b"no")
        }
        PacketKind::Send => {
            header.imm = Some(0x0a0b_0c0d);
            (header, vec![sequence, (6, &[1]), (56, &[0x0d, 0x0c, 0x0b, 0x0a])], b"hello")
        }
        PacketKind::Write | PacketKind::WriteFile => {
            (header.key, header.offset, header.ack) = (0x0102_0304, 0x0a_0000_0000, true);
            (header, vec![sequence, key, offset, (6, &[2])], b"bytes")
        }
        PacketKind::ReadMemory | PacketKind::ReadFile | PacketKind::ReadBitmap => {
            (header.key, header.offset, header.wanted) = (0x0102_0304, 0x0a_0000_0000, 4096);
            (header, vec![sequence, key, offset, (56, &[0, 0x10])], b"")
        }
        PacketKind::CompareSwap | PacketKind::CompareSwapFile => {
            (header.key, header.offset, header.first, header.second) = (0x0102_0304, 0x0a_0000_0000, 5, 6);
            (header, vec![sequence, key, offset, (40, &[5]), (48, &[6])], b"")
        }
        PacketKind::FetchAdd | PacketKind::FetchAddFile => {
            (header.key, header.offset, header.first) = (0x0102_0304, 0x0a_0000_0000, 5);
            (header, vec![sequence, key, offset, (40, &[5])], b"")
        }
        PacketKind::ReadReply => (header, vec![sequence], b"page"),
        PacketKind::Append => {
            header.key = 0x0102_0304;
            (header, vec![sequence, key], b"bytes")
        }
        PacketKind::AtomicReply | PacketKind::AppendReply => {
            header.first = 5;
            (header, vec![sequence, (40, &[5])], b"")
        }
        PacketKind::WriteAck | PacketKind::FlushAck => (header, vec![sequence], b""),
        PacketKind::Flush => {
            (header.key, header.offset, header.first, header.second) = (0x0102_0304, 0x0a_0000_0000, 4096, 2);
            (header, vec![sequence, key, offset, (40, &[0, 0x10]), (48, &[2])], b"")
        }
        PacketKind::Nak => {
            header.status = Some(WcStatus::RemoteInvalid);
            (header, vec![sequence, (56, &[2])], b"")
        }
    }
}

/// The checksums of payload and header, computed by another implementation, so that a change of the polynomial or of the checked range is noticed.
const CHECKSUMS: [(u32, u32); 21] = [
    (0xff44_ff86, 0x4659_e325),
    (0xff44_ff86, 0x2ca1_11b0),
    (0xbaf3_6f18, 0x1617_1aaf),
    (0x9a71_bb4c, 0xad3a_b738),
    (0xd06e_9c92, 0x3a18_4a57),
    (0, 0x3b18_2bd8),
    (0, 0xe1eb_a804),
    (0, 0x251c_e634),
    (0, 0xc225_c98b),
    (0, 0x0ff9_c3be),
    (0xf026_3318, 0x1ebb_3883),
    (0, 0x61f1_0424),
    (0, 0x514e_aeb1),
    (0, 0x84d1_7fa5),
    (0, 0x8abc_b7c3),
    (0, 0xb7b4_b6b5),
    (0xd06e_9c92, 0xcde4_f949),
    (0, 0xf12e_34a5),
    (0, 0x8cf9_4fd9),
    (0xd06e_9c92, 0xd666_c90c),
    (0, 0xe2f1_8843),
];

#[test]
fn golden_bytes() {
    for number in 1..=21u8 {
        let kind = PacketKind::from_number(number).expect("kind");
        let (mut header, fields, payload) = full(kind);
        let bytes = golden(number, &fields, payload, CHECKSUMS[number as usize - 1]);
        let built = build(header, payload);
        assert_eq!(built, bytes, "{kind:?}");
        header.payload_len = payload.len() as u32;
        assert_eq!(PacketHeader::parse(&bytes), Ok(header));
        assert_eq!(verify(&bytes), Ok(()));
    }
    assert!(PacketKind::from_number(0).is_none() && PacketKind::from_number(22).is_none());
}

#[test]
fn bad_headers_are_named() {
    let packet = build(PacketHeader::new(PacketKind::WriteAck, 1), b"");
    let with = |at: usize, value: u8| {
        let mut bytes = packet.clone();
        bytes[at] = value;
        let crc = header_checksum(bytes.first_chunk().expect("a header"));
        bytes[60..].copy_from_slice(&crc.to_le_bytes());
        PacketHeader::parse(&bytes)
    };
    assert_eq!(with(0, b'X'), Err(PacketError::Magic));
    assert_eq!(with(4, 9), Err(PacketError::Version(9)));
    assert_eq!(with(5, 99), Err(PacketError::Kind(99)));
    assert_eq!(with(6, 4), Err(PacketError::Field("flags")));
    assert_eq!(with(8, 1), Err(PacketError::Oversized(1)));
    assert_eq!(with(24, 1), Err(PacketError::Field("key")));
    assert_eq!(with(56, 1), Err(PacketError::Field("word")));
    assert_eq!(PacketHeader::parse(&packet[..63]), Err(PacketError::Truncated(63)));
    let mut read = PacketHeader::new(PacketKind::ReadFile, 1);
    read.wanted = MAX_TRANSFER_BYTES + 1;
    assert_eq!(PacketHeader::parse(&build(read, b"")), Err(PacketError::Oversized(MAX_TRANSFER_BYTES + 1)));
    let flush = |first, second| {
        let header = PacketHeader { first, second, ..PacketHeader::new(PacketKind::Flush, 1) };
        PacketHeader::parse(&build(header, b"")).err()
    };
    assert_eq!(flush(1 << 32, 1), Some(PacketError::Field("first")));
    assert_eq!(flush(0, 0), Some(PacketError::Field("second")));
    assert_eq!(flush(0, 3), Some(PacketError::Field("second")));
    let nak = PacketHeader::new(PacketKind::Nak, 1);
    assert_eq!(PacketHeader::parse(&build(nak, b"")), Err(PacketError::Field("word")));
}

/// A length counts only if the header is intact, for every kind of packet and whatever part of the payload is there.
#[test]
fn a_damaged_header_is_noticed_without_its_payload() {
    for number in 1..=21u8 {
        let (header, _, payload) = full(PacketKind::from_number(number).expect("kind"));
        let packet = build(header, payload);
        for bit in 0..PACKET_HEADER_LEN * 8 {
            let mut damaged = packet[..PACKET_HEADER_LEN].to_vec();
            damaged[bit / 8] ^= 1 << (bit % 8);
            let expected = match bit / 8 {
                0..4 => PacketError::Magic,
                4 => PacketError::Version(damaged[4]),
                _ => PacketError::HeaderChecksum,
            };
            assert_eq!(PacketHeader::parse(&damaged), Err(expected), "kind {number}, bit {bit}");
        }
    }
}

proptest! {
    #[test]
    fn no_bytes_panic(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
        let _ = PacketHeader::parse(&bytes);
        let _ = verify(&bytes);
    }

    #[test]
    fn any_flipped_bit_is_noticed(number in 1u8..=21, at in any::<prop::sample::Index>(), bit in 0u8..8) {
        let (header, _, payload) = full(PacketKind::from_number(number).expect("kind"));
        let mut packet = build(header, payload);
        let at = at.index(packet.len());
        packet[at] ^= 1 << bit;
        prop_assert!(PacketHeader::parse(&packet).is_err() || verify(&packet).is_err());
    }
}
