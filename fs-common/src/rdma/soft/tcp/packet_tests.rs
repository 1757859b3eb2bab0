use super::*;
use proptest::prelude::*;

/// A packet with the given bytes at the given offsets, zeros elsewhere, and these checksums.
fn golden(kind: u8, fields: &[(usize, &[u8])], payload: &[u8], (crc, header_crc): (u32, u32)) -> Vec<u8> {
    let mut bytes = vec![0; PACKET_HEADER_LEN];
    bytes[..6].copy_from_slice(&[b'C', b'F', b'N', b'F', 5, kind]);
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
    (0xff44_ff86, 0xd813_3edd),
    (0xff44_ff86, 0xb2eb_cc48),
    (0xbaf3_6f18, 0x885d_c757),
    (0x9a71_bb4c, 0x3370_6ac0),
    (0xd06e_9c92, 0xa452_97af),
    (0, 0xa552_f620),
    (0, 0x7fa1_75fc),
    (0, 0xbb56_3bcc),
    (0, 0x5c6f_1473),
    (0, 0x91b3_1e46),
    (0xf026_3318, 0x80f1_e57b),
    (0, 0xffbb_d9dc),
    (0, 0xcf04_7349),
    (0, 0x1a9b_a25d),
    (0, 0x14f6_6a3b),
    (0, 0x29fe_6b4d),
    (0xd06e_9c92, 0x53ae_24b1),
    (0, 0x6f64_e95d),
    (0, 0x12b3_9221),
    (0xd06e_9c92, 0x482c_14f4),
    (0, 0x7cbb_55bb),
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

/// Each status of a refusal, and its number.
#[test]
fn golden_refusals() {
    let all: [(WcStatus, &[u8], u32); 4] = [
        (WcStatus::RemoteAccess, &[1], 0x78b9_2b64),
        (WcStatus::RemoteInvalid, &[2], 0x1a9b_a25d),
        (WcStatus::RemoteOperation, &[3], 0xc7de_08e5),
        (WcStatus::RemoteNoSpace, &[4], 0xdede_b02f),
    ];
    for (status, number, header_crc) in all {
        let (header, fields, _) = full(PacketKind::Nak);
        let header = PacketHeader { status: Some(status), ..header };
        let bytes = golden(PacketKind::Nak as u8, &[fields[0], (56, number)], b"", (0, header_crc));
        assert_eq!(build(header, b""), bytes, "{status:?}");
        assert_eq!(PacketHeader::parse(&bytes), Ok(header));
    }
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
    let mut unknown = build(nak, b"");
    unknown[56] = 5;
    let crc = header_checksum(unknown.first_chunk().expect("a header"));
    unknown[60..].copy_from_slice(&crc.to_le_bytes());
    assert_eq!(PacketHeader::parse(&unknown), Err(PacketError::Field("word")));
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
