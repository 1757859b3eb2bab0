//! What is held for peers that do not read, say nothing, or come too fast.

use super::*;

with_and_without_keys!(
    replies_that_wait_for_a_flush_are_bounded,
    a_peer_that_asks_and_never_reads_is_held_back,
    nothing_is_held_for_peers_whose_long_packets_were_taken,
);

/// Flushes that wait for a device, each with a READ behind it. The server keeps only so many replies back, then stops reading requests. In the end
/// the device completes the flushes, and all replies arrive in order.
fn replies_that_wait_for_a_flush_are_bounded(trust: Trust) {
    struct Never(Mutex<Vec<WhenPersistent>>);
    impl Persistence for Never {
        fn by_cache_lines(&self) -> bool {
            false
        }

        fn persist(&self, _: &SharedMemory, _: usize, _: usize, done: WhenPersistent) {
            self.0.lock().expect("no panic").push(done);
        }
    }
    let served = tcp(trust);
    let domain = Arc::new(Never(Mutex::default()));
    let memory = Arc::new(SharedMemory::new("large", 1 << 20).expect("memory"));
    let large = served.pd.register_persistent(memory, Access::ALL, domain.clone()).expect("register");
    let (mut stream, qp) = greeted(&served);
    let key = large.rkey().0;
    let flush = |sequence| PacketHeader {
        key: key.into(),
        first: 64,
        second: 2,
        ..PacketHeader::new(PacketKind::Flush, sequence)
    };
    for round in 0..20 {
        let packets = [build(flush(2 * round + 1), b""), build(read(2 * round + 2, key, 1 << 20), b"")];
        stream.write_all(&packets.concat()).expect("write");
    }
    std::thread::sleep(Duration::from_millis(200));
    assert_eq!(qp.state(), QpState::ReadyToSend, "held back, not broken");
    let under_way = domain.0.lock().expect("no panic").len();
    assert!((1..20).contains(&under_way), "{under_way} flushes were taken");
    let releasing = std::thread::spawn(move || {
        for _ in 0..20 {
            let done = loop {
                if let Some(done) = { domain.0.lock().expect("no panic").pop() } {
                    break done;
                }
                std::thread::sleep(Duration::from_millis(1));
            };
            done(Ok(()));
        }
    });
    for round in 0..20 {
        let mut ack = vec![0; PACKET_HEADER_LEN];
        stream.read_exact(&mut ack).expect("ack");
        assert_eq!(ack, build(PacketHeader::new(PacketKind::FlushAck, 2 * round + 1), b""));
        let mut reply = vec![0; PACKET_HEADER_LEN + (1 << 20)];
        stream.read_exact(&mut reply).expect("reply");
        assert_eq!(PacketHeader::parse(&reply).expect("packet").sequence, 2 * round + 2);
    }
    releasing.join().expect("thread");
}

fn a_peer_that_asks_and_never_reads_is_held_back(trust: Trust) {
    let served = tcp(trust);
    let memory = Arc::new(SharedMemory::new("large", 1 << 20).expect("memory"));
    let large = served.pd.register(memory, Access::ALL).expect("register");
    let (mut stream, qp) = greeted(&served);
    stream.set_write_timeout(Duration::from_millis(500));
    // The peer asks for more bytes than the server buffers, so the server stops reading at some point.
    for sequence in 1..200 {
        if stream.write_all(&build(read(sequence, large.rkey().0, 1 << 20), b"")).is_err() {
            break;
        }
    }
    std::thread::sleep(Duration::from_millis(100));
    assert_eq!(qp.state(), QpState::ReadyToSend, "held back, not broken");
    // Other clients are served meanwhile.
    let cq = served.device.create_cq(16).expect("cq");
    let other = served.connect_with(&cq);
    let remote = Remote::Memory { rkey: served.mr.rkey(), offset: 0 };
    let local = served.mr.sge(8192, 8);
    other
        .post_send(&[SendWr {
            wr_id: WrId(5),
            op: SendOp::Read(remote),
            local: local.into(),
            signaled: true,
        }])
        .expect("post");
    assert_eq!(next(&*cq).status, WcStatus::Success);
    // When the peer reads after all, it gets all replies in order.
    for sequence in 1..=20 {
        let mut reply = vec![0; PACKET_HEADER_LEN + (1 << 20)];
        stream.read_exact(&mut reply).expect("reply");
        let header = PacketHeader::parse(&reply).expect("packet");
        assert_eq!((header.kind, header.sequence), (PacketKind::ReadReply, sequence));
    }
}

/// The server holds a bounded number of bytes for a peer, however many connections it has. Other clients get their replies.
#[test]
fn what_is_held_for_peers_is_bounded_and_the_greediest_pays() {
    let held_max_bytes = 8 << 20;
    let device = SoftDevice::holding(SoftOptions::default(), held_max_bytes);
    let endpoint = Endpoint::Tcp { host: "127.0.0.1".into(), port: 0 };
    let served = serve_with(&endpoint, Trust::Plain, device);
    let large = Arc::new(SharedMemory::new("large", 1 << 20).expect("memory"));
    let large = served.pd.register(large, Access::ALL).expect("register");
    let cq = served.device.create_cq(16).expect("cq");
    let honest = served.connect_with(&cq);
    let _honest_server = served.accepted();
    let peers: Vec<_> = (0..12)
        .map(|_| {
            let (mut stream, qp) = greeted(&served);
            for sequence in 1..=16 {
                let asks = build(read(sequence, large.rkey().0, 1 << 20), b"");
                match stream.write_all(&asks) {
                    Ok(()) => {}
                    // The server has closed this connection already.
                    Err(_) => break,
                }
            }
            (stream, qp)
        })
        .collect();
    let ended = || peers.iter().filter(|(_, qp)| qp.state() == QpState::Error).count();
    let deadline = Instant::now() + Duration::from_secs(30);
    // The server holds at least five replies of 1 MiB for each connection, so those of twelve do not fit.
    while ended() == 0 || served.device.figures().held_bytes > held_max_bytes {
        assert!(Instant::now() < deadline, "{:?}", served.device.figures());
        std::thread::sleep(Duration::from_millis(1));
    }
    assert_eq!(served.device.figures().held_bound, held_max_bytes);
    let sink = Arc::new(SharedMemory::new("sink", 65536).expect("memory"));
    let sink = served.pd.register(sink, Access::ALL).expect("register");
    let small = SendWr {
        wr_id: WrId(9),
        op: SendOp::Read(Remote::Memory { rkey: served.mr.rkey(), offset: 0 }),
        local: sink.sge(0, 64).into(),
        signaled: true,
    };
    honest.post_send(&[small]).expect("post");
    assert_eq!(next(&*cq).status, WcStatus::Success);
    drop(peers);
    while served.device.figures().held_bytes > 0 {
        assert!(Instant::now() < deadline, "{:?}", served.device.figures());
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// The room of a long packet is given back when the packet was taken, not when the next one comes: else quiet peers that once sent one would be ended.
fn nothing_is_held_for_peers_whose_long_packets_were_taken(trust: Trust) {
    const LONG: u32 = 1 << 20;
    let tcp = if trust == Trust::Keyed { TcpSecurity::Keys(keys(1)) } else { TcpSecurity::Loopback };
    let device = SoftDevice::holding(SoftOptions { tcp, ..SoftOptions::default() }, 4 * LONG as usize);
    let served = serve_with(&Endpoint::Tcp { host: "127.0.0.1".into(), port: 0 }, trust, device);
    let memory = Arc::new(SharedMemory::new("large", LONG as usize).expect("memory"));
    let large = served.pd.register(memory, Access::ALL).expect("register");
    let op = SendOp::Write(Remote::Memory { rkey: large.rkey(), offset: 0 });
    let cq = served.device.create_cq(16).expect("cq");
    let peers: Vec<_> = (0..8).map(|_| (served.connect_with(&cq), served.accepted())).collect();
    for (qp, _) in &peers {
        let local = large.sge(0, LONG).into();
        qp.post_send(&[SendWr { wr_id: WrId(1), op, local, signaled: true }]).expect("post");
        assert_eq!(next(&*cq).status, WcStatus::Success);
    }
    let deadline = Instant::now() + Duration::from_secs(30);
    while served.device.figures().held_bytes > 0 {
        assert!(Instant::now() < deadline, "{:?}", served.device.figures());
        std::thread::sleep(Duration::from_millis(1));
    }
    assert!(peers.iter().all(|(_, qp)| qp.state() == QpState::ReadyToSend), "none was ended for it");
}

#[test]
fn bad_hellos_are_told_why_and_silent_clients_hold_nobody_up() {
    let served = tcp(Trust::Plain);
    let _silent: Vec<_> = (0..70).map(|_| raw(&served)).collect();
    let mut version = build(PacketHeader::new(PacketKind::Hello, 0), &hello_payload());
    version[4] = 9;
    for (bytes, why) in [
        (version, "version 9"),
        (b"GET / HTTP/1.1\r\nHost: example\r\nAccept: */*\r\nUser-Agent: something-long-enough-to-fill\r\n\r\n".to_vec(), "magic"),
        (build(PacketHeader::new(PacketKind::Send, 1), b"x"), "no hello"),
    ] {
        let mut stream = raw(&served);
        stream.write_all(&bytes).expect("write");
        let mut answer = Vec::new();
        // The end may be a reset: the server never read what follows the length of a hello.
        let _ = stream.read_to_end(&mut answer);
        let header = PacketHeader::parse(&answer).expect("refusal");
        assert_eq!(header.kind, PacketKind::Refuse);
        let reason = String::from_utf8_lossy(&answer[PACKET_HEADER_LEN..]);
        assert!(reason.contains(why), "{reason}");
    }
    let qp = served.connect();
    assert_eq!(qp.state(), QpState::ReadyToSend);
}

/// A peer that connects too fast is delayed, and no connection is lost. The server forgets a connection that hangs up before its turn.
#[test]
fn who_connects_too_fast_is_heard_later() {
    let served = tcp(Trust::Plain);
    let hello = build(PacketHeader::new(PacketKind::Hello, 0), &hello_payload());
    let deadline = Instant::now() + Duration::from_secs(60);
    while served.device.figures().arrivals_delayed == 0 {
        assert!(Instant::now() < deadline, "nobody had to wait");
        let mut streams: Vec<TcpStream> = (0..16).map(|_| raw(&served)).collect();
        streams.iter_mut().for_each(|stream| stream.write_all(&hello).expect("hello"));
        for mut stream in streams {
            let mut welcome = vec![0; PACKET_HEADER_LEN + hello_payload().len()];
            stream.read_exact(&mut welcome).expect("welcome");
            served.accepted();
        }
    }
    assert_eq!(served.device.figures().arrivals_turned_away, 0);
    // More connections than may wait at once. All hang up, so their places are free again.
    for _ in 0..100 {
        raw(&served).write_all(&hello).expect("hello");
    }
    drop(greeted(&served));
}
