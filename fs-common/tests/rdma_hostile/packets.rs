//! Packets, messages and answers that are not as the protocol has them.

use super::*;

with_and_without_keys!(
    broken_packets_end_their_connection_only,
    a_packet_in_many_pieces_is_one_packet,
    a_refused_request_is_named_and_what_follows_is_not_executed,
    the_owners_bytes_are_not_written,
    a_write_of_many_pieces_is_made_whole_or_not,
);

/// Corrects the header's checksum after a change.
fn seal_again(packet: &mut [u8]) {
    let header = packet.first_chunk_mut().expect("a header");
    let crc = header_checksum(header);
    header[PACKET_HEADER_LEN - 4..].copy_from_slice(&crc.to_le_bytes());
}

fn broken_packets_end_their_connection_only(trust: Trust) {
    let served = tcp(trust);
    let client_cq = served.device.create_cq(16).expect("cq");
    let good = served.connect_with(&client_cq);
    let _good_server = served.accepted();
    let rkey = served.mr.rkey().0;
    let mut corrupt = build(PacketHeader::new(PacketKind::Send, 1), b"message");
    corrupt[PACKET_HEADER_LEN] ^= 1;
    let mut oversized = build(PacketHeader::new(PacketKind::Send, 1), b"");
    oversized[8..12].copy_from_slice(&u32::MAX.to_le_bytes());
    seal_again(&mut oversized);
    // A wrong length that the server would wait for, if the checksum did not give it away.
    let mut longer = build(PacketHeader::new(PacketKind::Send, 1), b"message");
    longer[9] ^= 1;
    let mut version = build(read(1, rkey, 8), b"");
    version[4] = 1;
    let cases: Vec<(&str, Vec<u8>)> = vec![
        ("garbage", vec![0xa5; 4096]),
        ("corrupt payload", corrupt),
        ("oversized", oversized),
        ("damaged length", longer),
        ("unknown version", version),
        ("unknown kind", {
            let mut packet = build(read(1, rkey, 8), b"");
            packet[5] = 200;
            seal_again(&mut packet);
            packet
        }),
        ("out of order", build(read(2, rkey, 8), b"")),
        ("second hello", build(PacketHeader::new(PacketKind::Hello, 0), &hello_payload())),
        ("reply to nothing", build(PacketHeader::new(PacketKind::ReadReply, 1), b"bytes")),
        ("flush ack of nothing", build(PacketHeader::new(PacketKind::FlushAck, 1), b"")),
        (
            "flush to nowhere",
            build(PacketHeader { first: 8, ..PacketHeader::new(PacketKind::Flush, 1) }, b""),
        ),
        ("ack of nothing", build(PacketHeader::new(PacketKind::WriteAck, 1), b"")),
        (
            "nak of nothing",
            build(
                PacketHeader {
                    status: Some(WcStatus::RemoteAccess),
                    ..PacketHeader::new(PacketKind::Nak, 1)
                },
                b"",
            ),
        ),
    ];
    for (name, bytes) in cases {
        let (mut stream, qp) = greeted(&served);
        stream.write_all(&bytes).expect(name);
        wait_for_error(&*qp);
        let mut rest = Vec::new();
        // The server has ended the connection: an end of file, or a reset if it had not read all of the garbage.
        let _ = stream.read_to_end(&mut rest);
        assert!(rest.is_empty(), "{name}: {rest:?}");
        // A read on the other connection still works.
        let local = served.mr.sge(8192, 8);
        let remote = Remote::Memory { rkey: served.mr.rkey(), offset: 0 };
        good.post_send(&[SendWr {
            wr_id: WrId(5),
            op: SendOp::Read(remote),
            local: local.into(),
            signaled: true,
        }])
        .expect("post");
        assert_eq!(next(&*client_cq).status, WcStatus::Success, "{name}");
    }
}

fn a_packet_in_many_pieces_is_one_packet(trust: Trust) {
    let served = tcp(trust);
    let (mut stream, _qp) = greeted(&served);
    let packets =
        [build(read(1, served.mr.rkey().0, 8), b""), build(read(2, served.mr.rkey().0, 4), b"")].concat();
    for byte in packets {
        stream.write_all(&[byte]).expect("write");
        stream.flush().expect("flush");
    }
    for (sequence, len) in [(1, 8usize), (2, 4)] {
        let mut reply = vec![0; PACKET_HEADER_LEN + len];
        stream.read_exact(&mut reply).expect("reply");
        assert_eq!(reply, build(PacketHeader::new(PacketKind::ReadReply, sequence), &[7; 8][..len]));
    }
}

fn a_refused_request_is_named_and_what_follows_is_not_executed(trust: Trust) {
    let served = tcp(trust);
    let (mut stream, qp) = greeted(&served);
    let write = PacketHeader { key: served.mr.rkey().0.into(), ..PacketHeader::new(PacketKind::Write, 2) };
    stream.write_all(&[build(read(1, 99, 8), b""), build(write, b"never")].concat()).expect("write");
    let mut reply = vec![0; PACKET_HEADER_LEN];
    stream.read_exact(&mut reply).expect("nak");
    let header = PacketHeader::parse(&reply).expect("packet");
    assert_eq!(
        (header.kind, header.sequence, header.status),
        (PacketKind::Nak, 1, Some(WcStatus::RemoteAccess))
    );
    assert_eq!(stream.read(&mut reply).expect("end"), 0);
    wait_for_error(&*qp);
    let mut bytes = [0; 8];
    served.mr.memory().read(0, &mut bytes);
    assert_eq!(bytes, [7; 8]);
}

/// A WRITE of 1 MiB comes in pieces. It is made when the last one is there: not if the connection ends before, nor if the region goes.
fn a_write_of_many_pieces_is_made_whole_or_not(trust: Trust) {
    const LEN: usize = 1 << 20;
    let served = tcp(trust);
    for end in ["whole", "cut", "deregistered"] {
        let memory = Arc::new(SharedMemory::new("large", LEN).expect("memory"));
        let large = served.pd.register(memory.clone(), Access::ALL).expect("register");
        let (mut stream, qp) = greeted(&served);
        let write =
            PacketHeader { key: large.rkey().0.into(), ack: true, ..PacketHeader::new(PacketKind::Write, 1) };
        let packet = build(write, &[3; LEN]);
        let (first, rest) = packet.split_at(packet.len() / 2);
        stream.write_all(first).expect("write");
        stream.flush().expect("flush");
        // So that the server has most likely read it.
        std::thread::sleep(Duration::from_millis(50));
        let mut bytes = vec![0; LEN];
        memory.read(0, &mut bytes);
        assert!(bytes.iter().all(|byte| *byte == 0), "{end}: a piece was written");
        if end == "cut" {
            drop(stream);
            wait_for_error(&*qp);
        } else {
            let kept = (end == "whole").then_some(large);
            stream.write_all(rest).expect("write");
            stream.flush().expect("flush");
            let mut reply = vec![0; PACKET_HEADER_LEN];
            stream.read_exact(&mut reply).expect("a reply");
            let reply = PacketHeader::parse(&reply).expect("packet");
            let refused = (PacketKind::Nak, Some(WcStatus::RemoteAccess));
            let expected = if kept.is_some() { (PacketKind::WriteAck, None) } else { refused };
            assert_eq!((reply.kind, reply.status), expected, "{end}");
        }
        memory.read(0, &mut bytes);
        let expected = if end == "whole" { 3 } else { 0 };
        assert!(bytes.iter().all(|byte| *byte == expected), "{end}");
    }
}

/// A peer may read the bytes that an owner keeps for itself at the beginning of a region, but not write them.
fn the_owners_bytes_are_not_written(trust: Trust) {
    let served = tcp(trust);
    let memory = Arc::new(SharedMemory::new("owned", 8192).expect("memory"));
    memory.write(0, b"the owner's own.");
    let access = Access { own_bytes: 4096, ..Access::ALL };
    let owned = served.pd.register(memory.clone(), access).expect("register");
    let key = u64::from(owned.rkey().0);
    let write = |offset| PacketHeader { key, offset, ..PacketHeader::new(PacketKind::Write, 1) };
    for (offset, allowed) in [(0, false), (4095, false), (4096, true)] {
        let (mut stream, qp) = greeted(&served);
        stream.write_all(&build(write(offset), b"a peer's")).expect("write");
        if allowed {
            let deadline = Instant::now() + Duration::from_secs(10);
            let mut found = [0; 8];
            while &found != b"a peer's" {
                assert!(Instant::now() < deadline, "nothing was written");
                std::thread::sleep(Duration::from_millis(1));
                memory.read(4096, &mut found);
            }
        } else {
            wait_for_error(&*qp);
        }
    }
    let mut found = [0; 16];
    memory.read(0, &mut found);
    assert_eq!(&found, b"the owner's own.");
    memory.read(4080, &mut found);
    assert_eq!(found, [0; 16]);
}

/// Packets that arrive together with the end of the connection are executed first, however many turns that takes.
#[test]
fn what_comes_with_the_end_is_taken_first() {
    for trust in [Trust::Plain, Trust::Keyed] {
        let served = tcp(trust);
        let (mut stream, qp) = greeted(&served);
        let mr =
            served.pd.register(Arc::new(SharedMemory::new("written", 4096).expect("memory")), Access::ALL);
        let mr = mr.expect("registered");
        let packets: Vec<u8> = (1..=512u64)
            .flat_map(|sequence| {
                let mut header = PacketHeader::new(PacketKind::Write, sequence);
                (header.key, header.offset) = (u64::from(mr.rkey().0), 8 * (sequence - 1));
                build(PacketHeader { payload_len: 8, ..header }, &sequence.to_le_bytes())
            })
            .collect();
        stream.write_all(&packets).expect("packets");
        drop(stream);
        wait_for_error(&*qp);
        for sequence in 1..=512u64 {
            let mut word = [0; 8];
            mr.memory().read(8 * (sequence as usize - 1), &mut word);
            assert_eq!(u64::from_le_bytes(word), sequence);
        }
    }
}

/// A server that answers a READ with too few or too many bytes: none of the request's ranges is filled. A message too long for its receive's ranges fills
/// none, either.
#[test]
fn what_does_not_fit_the_ranges_fills_none_of_them() {
    for (kind, len) in [
        (PacketKind::ReadReply, 0),
        (PacketKind::ReadReply, 11),
        (PacketKind::ReadReply, 13),
        (PacketKind::ReadReply, 4096),
        (PacketKind::Send, 13),
    ] {
        let listener = TcpListener::bind("127.0.0.1:0").expect("bound");
        let port = listener.local_addr().expect("bound").port();
        let server = std::thread::spawn(move || {
            let (mut stream, _) = listener.accept().expect("accepted");
            let mut hello = vec![0; PACKET_HEADER_LEN + hello_payload().len()];
            stream.read_exact(&mut hello).expect("hello");
            let welcome = build(PacketHeader::new(PacketKind::Welcome, 0), &hello_payload());
            stream.write_all(&welcome).expect("welcome");
            let mut asked = [0; PACKET_HEADER_LEN];
            stream.read_exact(&mut asked).expect("a READ");
            let asked = PacketHeader::parse(&asked).expect("a packet");
            assert_eq!((asked.kind, asked.wanted), (PacketKind::ReadMemory, 12));
            stream.write_all(&build(PacketHeader::new(kind, 1), &vec![0xee; len])).expect("said");
            let _ = stream.read_to_end(&mut Vec::new());
        });
        let endpoint = Endpoint::Tcp { host: "127.0.0.1".into(), port };
        let peer = connect(&endpoint, TcpSecurity::Loopback).expect("welcome");
        peer.mr.memory().fill(0, 4096, 0x11);
        let local = [(0, 4), (1024, 7), (3000, 1)].map(|(at, len)| peer.mr.sge(at, len));
        let local = SgeList::of(&local).expect("three");
        peer.qp.post_recv(&[RecvWr { wr_id: WrId(2), local }]).expect("receive");
        let op = SendOp::Read(Remote::Memory { rkey: peer.mr.rkey(), offset: 0 });
        peer.qp.post_send(&[SendWr { wr_id: WrId(1), op, local, signaled: true }]).expect("post");
        let mut ends = [next(&*peer.cq), next(&*peer.cq)];
        ends.sort_by_key(|end| end.wr_id.0);
        let too_long = if kind == PacketKind::Send { WcStatus::LocalLength } else { WcStatus::Flushed };
        assert_eq!(ends.map(|end| end.status), [WcStatus::Flushed, too_long], "{kind:?} of {len}");
        let mut there = [0; 4096];
        peer.mr.memory().read(0, &mut there);
        assert!(there == [0x11; 4096], "{kind:?} of {len}");
        drop(peer);
        server.join().expect("server");
    }
}

#[test]
fn shm_refuses_nonsense_and_serves_the_next() {
    let dir = tempfile::tempdir().expect("dir");
    let path = dir.path().join("shm.sock");
    let served = serve(&Endpoint::Shm(path.clone()), Trust::Plain);
    let hello = ShmMessage::Hello { page_len: 4096 }.encode();
    // A hello without descriptors, one that is too short, one with another page size, and garbage.
    for bytes in
        [hello.clone(), hello[..40].to_vec(), ShmMessage::Hello { page_len: 8192 }.encode(), vec![9; 80]]
    {
        let socket = rustix::net::socket(AddressFamily::UNIX, SocketType::SEQPACKET, None).expect("socket");
        rustix::net::connect(&socket, &SocketAddrUnix::new(&path).expect("address")).expect("connect");
        rustix::net::send(&socket, &bytes, rustix::net::SendFlags::NOSIGNAL).expect("send");
        let mut answer = [0; 512];
        let (_, len) =
            rustix::net::recv(&socket, &mut answer, rustix::net::RecvFlags::empty()).expect("answer");
        assert!(
            matches!(ShmMessage::parse(&answer[..len]), Ok(ShmMessage::Refuse { .. })),
            "{:?}",
            &answer[..len]
        );
    }
    let qp = served.connect();
    let _server = served.accepted();
    assert_eq!(qp.state(), QpState::ReadyToSend);
    assert!(served.cq.arm());
}
