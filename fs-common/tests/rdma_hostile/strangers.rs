//! Peers without the key, and somebody between the two ends.

use super::*;

/// A client with another key or none is told what to do. A client with a key does not go on without encryption.
#[test]
fn who_has_not_the_key_is_told_and_nothing_else() {
    let (keyed, plain) = (tcp(Trust::Keyed), tcp(Trust::Plain));
    for (served, tcp, why) in [
        (&keyed, TcpSecurity::Loopback, "give --key FILE"),
        (&keyed, TcpSecurity::Keys(keys(2)), "does not know this key"),
        (&plain, TcpSecurity::Keys(keys(1)), "takes no keys"),
    ] {
        match connect(&served.listener.endpoint(), tcp) {
            Err(RdmaError::Refused { reason, .. }) => assert!(reason.contains(why), "{reason}"),
            Err(other) => panic!("{other}"),
            Ok(_) => panic!("it should be: {why}"),
        }
    }
    assert_eq!(keyed.device.figures().refused, 2);
    // The client does not believe a server that answers in plain text.
    let impostor = TcpListener::bind("127.0.0.1:0").expect("bound");
    let endpoint =
        Endpoint::Tcp { host: "127.0.0.1".into(), port: impostor.local_addr().expect("bound").port() };
    let welcomes = std::thread::spawn(move || {
        let (mut stream, _) = impostor.accept().expect("accepted");
        let _ = stream.read(&mut [0; 4096]);
        stream
            .write_all(&build(PacketHeader::new(PacketKind::Welcome, 0), &hello_payload()))
            .expect("welcome");
        let mut rest = Vec::new();
        let _ = stream.read_to_end(&mut rest);
        assert!(rest.is_empty(), "something was said in plain: {rest:?}");
    });
    let refused = connect(&endpoint, TcpSecurity::Keys(keys(1))).err().expect("not believed");
    assert!(refused.to_string().contains("takes no keys"), "{refused}");
    welcomes.join().expect("thread");
    connect(&keyed.listener.endpoint(), TcpSecurity::Keys(keys(1))).expect("who has the key");
}

/// Something else listens there, says something, and waits. The client does not wait for more, and says so, with a key and without.
#[test]
fn what_is_no_server_is_told_from_one() {
    for words in [&b"SSH-2.0-x\r\n"[..], b"HTTP/1.1 400 Bad Request\r\n\r\n", &[0; 4096]] {
        for tcp in [TcpSecurity::Keys(keys(1)), TcpSecurity::Loopback] {
            let other = TcpListener::bind("127.0.0.1:0").expect("bound");
            let port = other.local_addr().expect("bound").port();
            let speaks = std::thread::spawn(move || {
                let (mut stream, _) = other.accept().expect("accepted");
                stream.write_all(words).expect("said");
                while stream.read(&mut [0; 4096]).is_ok_and(|len| len > 0) {}
            });
            let error =
                connect(&Endpoint::Tcp { host: "127.0.0.1".into(), port }, tcp).err().expect("no server");
            assert!(matches!(error, RdmaError::Handshake { .. }), "{error}");
            assert!(error.to_string().contains("no cuttlefs server"), "{error}");
            speaks.join().expect("thread");
        }
    }
}

/// Somebody between the client and the server flips a bit, in either direction, at many places. The connection ends or stalls, and no wrong request
/// is executed.
#[test]
fn what_is_changed_on_its_way_ends_the_connection() {
    let served = tcp(Trust::Keyed);
    let Endpoint::Tcp { port, .. } = served.listener.endpoint() else { panic!("tcp") };
    for (at, to_server) in (0..40).flat_map(|step| [(step * 37, true), (step * 37, false)]) {
        let between = TcpListener::bind("127.0.0.1:0").expect("bound");
        let endpoint =
            Endpoint::Tcp { host: "127.0.0.1".into(), port: between.local_addr().expect("bound").port() };
        let tampers = std::thread::spawn(move || {
            let (here, _) = between.accept().expect("accepted");
            let there = TcpStream::connect(("127.0.0.1", port)).expect("connected");
            let ways = [
                (here.try_clone().expect("fd"), there.try_clone().expect("fd"), to_server),
                (there, here, !to_server),
            ];
            let pumps = ways
                .map(|(from, to, tampers)| std::thread::spawn(move || pump(from, to, tampers.then_some(at))));
            pumps.into_iter().for_each(|pump| pump.join().expect("thread"));
        });
        if let Ok(peer) = connect(&endpoint, TcpSecurity::Keys(keys(1))) {
            let remote = Remote::Memory { rkey: served.mr.rkey(), offset: 0 };
            for _ in 0..20 {
                let local = peer.mr.sge(0, 8);
                if peer
                    .qp
                    .post_send(&[SendWr {
                        wr_id: WrId(1),
                        op: SendOp::Read(remote),
                        local: local.into(),
                        signaled: true,
                    }])
                    .is_err()
                {
                    break;
                }
                let mut out = Vec::new();
                peer.cq.wait(Duration::from_millis(500));
                peer.cq.poll(&mut out, 1);
                // A record with a damaged length makes the receiver wait for more bytes, as if somebody held them back.
                if out.first().is_none_or(|completion| completion.status != WcStatus::Success) {
                    break;
                }
                let mut found = [0; 8];
                peer.mr.memory().read(0, &mut found);
                assert_eq!(found, [7; 8]);
            }
            peer.qp.close();
        }
        drop(served.accepted.try_recv());
        tampers.join().expect("thread");
    }
    let mut bytes = [0; 8];
    served.mr.memory().read(0, &mut bytes);
    assert_eq!(bytes, [7; 8]);
    connect(&served.listener.endpoint(), TcpSecurity::Keys(keys(1))).expect("others go on");
}

/// Passes bytes on, and flips one bit of byte number `tampered`.
fn pump(mut from: TcpStream, mut to: TcpStream, tampered: Option<usize>) {
    let (mut passed, mut buffer) = (0, [0; 4096]);
    while let Ok(count @ 1..) = from.read(&mut buffer) {
        if let Some(at) = tampered.filter(|at| (passed..passed + count).contains(at)) {
            buffer[at - passed] ^= 0x10;
        }
        passed += count;
        if to.write_all(&buffer[..count]).is_err() {
            break;
        }
    }
    let _ = from.shutdown(std::net::Shutdown::Both);
    let _ = to.shutdown(std::net::Shutdown::Both);
}
