//! What a kill of the server does to keys, grants and one-sided changes.

use super::killed::Site;
use super::*;
use cuttlefs_client::native::Buffer;
use std::sync::Arc;

const POOL: u64 = 16 << 20;

fn session(site: &Site) -> Session {
    Session::over(Arc::new(site.connect()), 4, None).expect("a session")
}

fn lost<T: std::fmt::Debug>(result: Result<T, NativeError>) {
    assert!(matches!(result, Err(NativeError::BytesLost)), "{result:?}");
}

#[test]
fn keys_outlive_a_kill_and_those_that_ended_stay_ended() {
    for link in ["unix", "tcp"] {
        let mut site = Site::new(link, POOL);
        let (binder, redeemer) = (session(&site), session(&site));
        let file = create(&binder, "file", &pattern(8000, 1));
        let (kept, revoked) =
            (file.bind(0, 8000, BOTH, None).expect("bound"), file.bind(0, 10, BOTH, None).expect("bound"));
        let (part, gone) =
            (redeemer.redeem(&kept).expect("opened"), redeemer.redeem(&revoked).expect("opened"));
        part.write_at(100, b"written by the key").expect("written");
        file.sync().expect("durable");
        file.unbind(&revoked).expect("unbound");
        site.kill();
        site.start();
        // Whoever comes first: the redeemer waits for the binder, and the binder for nobody.
        let bytes = read(&part, 100, 18).expect("opened again");
        assert_eq!(bytes, b"written by the key");
        has_ended(read(&gone, 0, 1));
        has_ended(redeemer.redeem(&revoked).map(drop));
        assert_eq!(
            read(&redeemer.redeem(&kept).expect("opened"), 0, 8).expect("read"),
            pattern(8000, 1)[..8]
        );
        part.write_at(0, b"again").expect("written");
        assert_eq!(read(&file, 0, 5).expect("read"), b"again");
        // Twice, as the next recovery is of the same kind.
        site.kill();
        site.start();
        assert_eq!(read(&part, 0, 5).expect("opened again"), b"again", "restored by who wrote it");
        file.unbind(&kept).expect("unbound");
        has_ended(read(&part, 0, 5));
        drop((part, gone, file, binder, redeemer));
        site.stop();
    }
}

#[test]
fn who_has_a_key_waits_for_who_bound_it_as_long_as_he_says() {
    let mut site = Site::new("tcp", POOL);
    let redeemer = session(&site);
    // It comes back to a new server only when it is used.
    let binder = Session::over(Arc::new(site.connect_quietly()), 1, None).expect("a session");
    let file = create(&binder, "file", &[1; 100]);
    let key = file.bind(0, 100, BOTH, None).expect("bound");
    let part = redeemer.redeem(&key).expect("opened");
    file.sync().expect("durable");
    site.kill();
    site.start();
    let late = read(&part.with_deadline(Some(Duration::from_millis(200))), 0, 1);
    assert!(matches!(late, Err(NativeError::Deadline { .. })), "{late:?}");
    assert_eq!(file.len().expect("the binder is back"), 100);
    assert_eq!(read(&part, 0, 2).expect("opened again"), [1; 2]);
    part.write_at(0, b"x").expect("written");
    drop((part, file, redeemer, binder));
    site.stop();
}

#[test]
fn one_sided_changes_that_were_not_synced_are_told_to_be_lost() {
    for link in ["unix", "tcp"] {
        let mut site = Site::new(link, POOL);
        // Without the thread that syncs every two seconds.
        let writer = Session::over(Arc::new(site.connect_quietly()), 4, None).expect("a session");
        let file = create(&writer, "file", &[1; 2 * PAGE]);
        let twin = writer.open("file", OpenOptions::READ_WRITE).expect("opened");
        let synced = create(&writer, "synced", &[1; 100]);
        let untouched = create(&writer, "untouched", &[1; 100]);
        let grant = file.grant_write(0, 2 * PAGE as u64).expect("granted");
        let of_synced = synced.grant_write(0, 100).expect("granted");
        assert!(grant.is_one_sided());
        synced.write_at(0, b"safe").expect("granted");
        assert_eq!(synced.append(b"tail").expect("granted"), 100);
        synced.sync().expect("durable");
        untouched.sync().expect("durable");
        file.sync().expect("durable");
        file.write_at(0, b"may be lost").expect("granted");
        file.fetch_add(64, 1).expect("granted");
        site.kill();
        site.start();
        // Each open file is told once, at its next sync; the session goes on.
        lost(file.sync());
        lost(twin.sync());
        file.sync().expect("told before");
        twin.sync().expect("told before");
        synced.sync().expect("nothing of it was lost");
        untouched.sync().expect("nothing of it was lost");
        assert_eq!(read(&synced, 0, 4).expect("read"), b"safe");
        assert_eq!(read(&synced, 100, 10).expect("read"), b"tail");
        let now = read(&file, 0, 11).expect("read");
        assert!(now == [1; 11] || now == b"may be lost", "{now:?}");
        // Grants come back with the next change.
        assert!(!grant.stands());
        file.write_at(0, b"once more").expect("written");
        assert!(grant.stands());
        let old = file.fetch_add(8, 1).expect("granted again");
        assert_eq!(old.to_le_bytes()[1..], [1; 7], "the rest of the word");
        assert_eq!(of_synced.range(), 0..100);
        synced.fetch_add(8, 1).expect("granted again");
        file.sync().expect("durable");
        drop((grant, of_synced, file, twin, synced, untouched, writer));
        site.stop();
    }
}

/// A grant that a kill took, and for which the next server has no space, comes back with a later change, when there is space: nobody has to renew it.
#[test]
fn a_grant_that_met_a_full_pool_behind_a_kill_comes_back_by_itself() {
    for link in ["unix", "tcp"] {
        let mut site = Site::new(link, POOL);
        let (session, other) = (session(&site), self::session(&site));
        let file = create(&session, "file", &[1; PAGE]);
        file.set_len(100 * PAGE as u64).expect("longer");
        let holes = file.grant_write(10 * PAGE as u64, 4 * PAGE as u64).expect("granted");
        let bytes = file.grant_write(0, PAGE as u64).expect("granted");
        file.sync().expect("durable");
        let filler = create(&other, "filler", &[]);
        let fill = || {
            let mut len = 1 << 20;
            while len > 0 {
                match filler.append(&vec![2; len]) {
                    Err(NativeError::Server(Status::NoSpace)) => len /= 2,
                    appended => drop(appended.expect("appended")),
                }
            }
        };
        fill();
        filler.sync().expect("durable");
        site.kill();
        site.start();
        // What the grant had set aside is free for all.
        fill();
        assert!(!holes.stands() && !bytes.stands());
        file.write_at(0, b"by request, or granted again").expect("written");
        assert!(bytes.stands() && !holes.stands(), "{link}: it needs no space");
        let word = 12 * PAGE as u64;
        assert_eq!(status(file.fetch_add(word, 1)), Status::NoSpace);
        assert_eq!(status(file.write_at(word, b"no space")), Status::NoSpace);
        assert!(!holes.stands());
        filler.set_len(0).expect("cut");
        let since = Instant::now();
        while !holes.stands() {
            assert!(since.elapsed() < LONG, "{link}: it does not come back");
            file.write_at(8, b"some change").expect("written");
        }
        assert_eq!(file.fetch_add(word, 1).expect("granted again"), 0, "{link}");
        drop((holes, bytes, file, filler, session, other));
        site.stop();
    }
}

/// A server that stands still when the requests are posted, and is killed then: what was under way may have been done.
#[test]
fn what_was_under_way_in_a_kill_is_done_once_more_or_told() {
    for link in ["unix", "tcp"] {
        let mut site = Site::new(link, POOL);
        let session = session(&site);
        let file = create(&session, "file", &[1; 2 * PAGE]);
        file.sync().expect("durable");
        let _grant = file.grant_write(0, 3 * PAGE as u64).expect("granted");
        let mut queue = Queue::new(&session, 16).expect("a queue");
        let buffer = Buffer::new(&session, PAGE).expect("memory");
        buffer.write(0, b"abcdefgh").expect("in the buffer");
        // Until the queue has a connection of its own.
        let since = Instant::now();
        loop {
            queue.post_fetch_add(1, &file, 64, 0).expect("posted");
            assert!(matches!(done(&all_of(&mut queue), 1), Done::Old(_)));
            file.sync().expect("durable");
            site.freeze();
            queue.post_write(1, &file, 0, (&buffer, 0, 8)).expect("posted");
            queue.post_append(2, &file, (&buffer, 0, 8)).expect("posted");
            queue.post_fetch_add(3, &file, 64, 1).expect("posted");
            queue.post_read(4, &file, 0, (&buffer, 100, 8)).expect("posted");
            site.kill();
            site.start();
            let ends = all_of(&mut queue);
            assert_eq!(done(&ends, 1), Done::Written { offset: 0, len: 8 }, "done again");
            assert_eq!(done(&ends, 4), Done::Read(8));
            let told = |token: u64| matches!(ends[&token], Err(NativeError::MayBeDone));
            if told(2) && told(3) {
                break;
            }
            // They went as requests, which are done once: the queue had no connection then.
            assert!(since.elapsed() < LONG, "{link}: {ends:?}");
        }
        assert_eq!(read(&file, 0, 8).expect("read"), b"abcdefgh");
        // The queue goes on.
        queue.post_append(5, &file, (&buffer, 0, 8)).expect("posted");
        queue.post_fetch_add(6, &file, 64, 1).expect("posted");
        let ends = all_of(&mut queue);
        assert!(matches!(done(&ends, 5), Done::Written { len: 8, .. }));
        assert!(matches!(done(&ends, 6), Done::Old(_)));
        file.sync().expect("nothing that was told to be done is lost");
        drop((queue, _grant, file, session));
        site.stop();
    }
}

/// Two sessions append in turns, one of them one-sidedly, and the server is killed. What was answered to the other one has all before it that both had
/// appended.
#[test]
fn no_zeros_stand_in_the_place_of_a_lost_append() {
    const ROUNDS: u8 = 5;
    for link in ["unix", "tcp"] {
        let mut site = Site::new(link, POOL);
        let (appender, requester) = (session(&site), session(&site));
        let file = create(&appender, "file", &[1; 100]);
        file.sync().expect("durable");
        let theirs = requester.open("file", OpenOptions::READ_WRITE).expect("opened");
        let grant = file.grant_write(0, 100).expect("granted");
        assert!(grant.is_one_sided());
        let mut known = vec![1; 100];
        for round in 0..ROUNDS {
            for (own, byte) in [(&file, 0x10 | round), (&theirs, 0x20 | round)] {
                let bytes = vec![byte; 3000];
                let at = own.append(&bytes).expect("appended");
                // After a kill some of the last one-sided appends may be gone, and nothing else.
                known.truncate(at as usize);
                assert_eq!(known.len() as u64, at, "{link}: a hole that no one made");
                known.extend(bytes);
            }
            let answered = known.len();
            let one_sided = file.append(&[0x30 | round; 100]).expect("appended");
            assert_eq!(one_sided, answered as u64);
            known.extend([0x30 | round; 100]);
            site.kill();
            site.start();
            let found = read(&theirs, 0, 100_000).expect("read");
            assert!(found.len() >= answered, "{link}, {round}: {} bytes of {answered}", found.len());
            assert!(known.starts_with(&found), "{link}, {round}: other bytes than were appended");
        }
        drop((grant, file, theirs, appender, requester));
        site.stop();
    }
}
