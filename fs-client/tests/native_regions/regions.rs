//! Keys that are handed over: what they open, and typed errors for those that are worth nothing.

use super::*;
use cuttlefs_client::native::{Buffer, Post, RegionKey, RegionKeyError};

#[test]
fn a_key_opens_its_range_and_nothing_else() {
    let server = Server::new(512);
    let binder = server.connect("unix");
    let contents = pattern(20_000, 1);
    let file = create(&binder, "file", &contents);
    for link in ["shm", "unix", "tcp"] {
        let session = server.connect(link);
        let text = file.bind(5000, 6000, BOTH, None).expect("bound").to_string();
        let key: RegionKey = text.parse().expect("as it was handed over");
        let part = session.redeem(&key).expect("opened");
        assert_eq!(part.region(), Some(key));
        assert_eq!(read(&part, 5000, 6000).expect("inside"), contents[5000..11_000], "{link}");
        for (offset, len) in [(4999, 2), (10_999, 2), (0, 20_000), (u64::MAX, 1)] {
            let refused = read(&part, offset, len);
            assert!(
                matches!(refused, Err(NativeError::OutsideRegion { start: 5000, end: 11_000 })),
                "{refused:?}"
            );
        }
        assert!(matches!(part.write_at(10_999, b"no"), Err(NativeError::OutsideRegion { .. })));
        assert!(matches!(part.grant_write(0, 5001), Err(NativeError::OutsideRegion { .. })));
        assert!(matches!(part.set_len(5000), Err(NativeError::NotOpenFor(_))));
        assert!(matches!(part.bind(5000, 1, READING, None), Err(NativeError::NotOpenFor(_))));
        assert_eq!(status(part.append(b"no")), Status::Denied, "the end is not in the part");
        part.write_at(5000, &contents[5000..5100]).expect("inside");
        let mut queue = Queue::new(&session, 8).expect("a queue");
        let buffer = Buffer::new(&session, PAGE).expect("memory");
        assert!(queue.post_read(0, &part, 4000, (&buffer, 0, 10)).is_err());
        queue.post_read(0, &part, 6000, (&buffer, 0, 100)).expect("posted");
        assert_eq!(done(&all_of(&mut queue), 0), Done::Read(100));
        if link != "shm" {
            let _grant = part.grant_write(5000, 6000).expect("inside");
            part.write_at(6000, &contents[6000..6100]).expect("granted");
            let known = u64::from_le_bytes(contents[5008..5016].try_into().expect("eight"));
            assert_eq!(part.fetch_add(5008, 0).expect("granted"), known);
        }
        part.sync().expect("durable");
        // It ends for its holder alone: other requests of the same queue go on.
        let own = session.open("file", OpenOptions::READ).expect("opened");
        file.unbind(&key).expect("unbound");
        has_ended(file.unbind(&key));
        let posts: Vec<(u64, Post<'_>)> = (0..8)
            .map(|token| {
                let file = if token == 3 { &part } else { &own };
                let (at, offset) = (token as usize * 10, 6000 + token);
                (token, Post::Read { file, offset, buffer: &buffer, at, len: 10 })
            })
            .collect();
        queue.post(&posts).expect("posted");
        let ends = all_of(&mut queue);
        assert!(matches!(ends[&3], Err(NativeError::RegionEnded)), "{link}: {:?}", ends[&3]);
        for token in (0..8).filter(|token| *token != 3) {
            assert_eq!(done(&ends, token), Done::Read(10));
            let (mut bytes, at) = ([0; 10], 6000 + token as usize);
            buffer.read(token as usize * 10, &mut bytes).expect("out of the buffer");
            assert_eq!(bytes, contents[at..at + 10], "{link}");
        }
        has_ended(read(&part, 5000, 10));
        has_ended(part.write_at(5000, b"no"));
        has_ended(session.redeem(&key).map(drop));
        assert_eq!(read(&file, 0, 20_000).expect("its own"), contents);
    }
}

#[test]
fn keys_that_are_worth_nothing_are_typed_errors() {
    let (server, elsewhere) = (Server::new(128), Server::new(128));
    let (binder, redeemer) = (server.connect("tcp"), server.connect("tcp"));
    let file = create(&binder, "file", &[1; 100]);
    let reading = binder.open("file", OpenOptions::READ).expect("opened");
    assert!(matches!(reading.bind(0, 10, BOTH, None), Err(NativeError::NotOpenFor(_))));
    assert_eq!(status(reading.bind(0, 0, READING, None)), Status::Invalid);
    let key = reading.bind(0, 10, READING, None).expect("bound");
    let refused = |key: RegionKey| {
        let opened = redeemer.redeem(&key);
        assert!(matches!(opened, Err(NativeError::KeyRefused)), "{opened:?}");
    };
    refused(RegionKey { rights: BOTH, ..key });
    refused(RegionKey { len: 11, ..key });
    refused(RegionKey { mac: [1; 16], ..key });
    has_ended(redeemer.redeem(&RegionKey { number: key.number ^ 1, ..key }).map(drop));
    // A server that did not make it knows no such binding.
    has_ended(elsewhere.connect("unix").redeem(&key).map(drop));
    assert!(matches!("4346524b".parse::<RegionKey>(), Err(RegionKeyError::Length)));
    let part = redeemer.redeem(&key).expect("opened");
    assert!(matches!(part.write_at(0, b"no"), Err(NativeError::NotOpenFor(_))));
    assert!(matches!(part.grant_write(0, 1), Err(NativeError::NotOpenFor(_))));
    // Only who bound it ends it.
    let theirs = redeemer.open("file", OpenOptions::READ).expect("opened");
    has_ended(theirs.unbind(&key));
    assert_eq!(read(&part, 0, 10).expect("it goes on"), [1; 10]);
    // It ends with the open file that it is of.
    drop(reading);
    let since = Instant::now();
    loop {
        match read(&part, 0, 10) {
            Ok(_) => assert!(since.elapsed() < LONG, "it never ends"),
            ended => break has_ended(ended),
        }
        std::thread::sleep(Duration::from_millis(5));
    }
    drop(file);
}

#[test]
fn a_key_ends_with_its_time() {
    let server = Server::new(128);
    let (binder, redeemer) = (server.connect("tcp"), server.connect("unix"));
    let file = create(&binder, "file", &[1; 100]);
    let since = Instant::now();
    // On a slow machine its time may be over before it is opened.
    let (key, part) = loop {
        assert!(since.elapsed() < LONG, "no key was opened in time");
        let key = file.bind(0, 10, BOTH, Some(Duration::from_millis(500))).expect("bound");
        match redeemer.redeem(&key) {
            Ok(part) => break (key, part),
            ended => has_ended(ended.map(drop)),
        }
    };
    loop {
        match read(&part, 0, 4) {
            Ok(bytes) => assert_eq!(bytes, [1; 4]),
            ended => break has_ended(ended),
        }
        assert!(since.elapsed() < LONG, "it never ends");
    }
    has_ended(part.grant_write(0, 4).map(drop));
    has_ended(redeemer.redeem(&key).map(drop));
    assert_eq!(read(&file, 0, 4).expect("its own"), [1; 4]);
}

/// Requests that were looked at before the key ended were carried out behind the answer to `unbind`, in one round of some hundred.
#[test]
fn once_a_key_is_unbound_its_holders_change_nothing_more() {
    const LEN: usize = 256 << 10;
    let server = Server::new(512);
    let binder = server.connect("unix");
    let file = create(&binder, "file", &vec![0; LEN]);
    for round in 0..300u64 {
        let link = ["unix", "tcp", "shm"][round as usize % 3];
        let key = file.bind(0, LEN as u64, BOTH, None).expect("bound");
        std::thread::scope(|scope| {
            for half in 0..2u64 {
                let session = server.connect(link);
                let part = session.redeem(&key).expect("opened");
                scope.spawn(move || {
                    let at = half * LEN as u64 / 2;
                    // Longer and shorter ones.
                    let len = if round % 2 == 0 { LEN / 2 } else { PAGE };
                    let mut byte = round as u8;
                    loop {
                        byte = byte.wrapping_add(1);
                        let changed = match round % 5 {
                            4 => part.fetch_add(at, 1).map(drop),
                            _ => part.write_at(at, &vec![byte; len]),
                        };
                        match changed {
                            Ok(()) => {}
                            Err(NativeError::RegionEnded) => return,
                            Err(error) => panic!("{error}"),
                        }
                    }
                });
            }
            std::thread::sleep(Duration::from_millis(4));
            file.unbind(&key).expect("unbound");
            let first = read(&file, 0, LEN).expect("read");
            for _ in 0..4 {
                std::thread::sleep(Duration::from_micros(500));
                assert!(read(&file, 0, LEN).expect("read") == first, "{link}: changed behind unbind");
            }
        });
    }
}
