//! One-sided changes of 1 MiB, which reach the server in pieces: they are made when the last piece is there, page by page for who reads meanwhile, and not
//! at all if the connection or the right to them ends before.

use super::relay::{Held, Relay, Verdict};
use super::*;
use std::sync::atomic::{AtomicBool, AtomicU8, Ordering};

const LEN: usize = 1 << 20;
/// Grants have a quarter of the frames, and an address half of that.
const FRAMES: u64 = 2560;

/// A server, and a session that reaches it through a relay. Each test has its own for each link.
struct Site {
    writer: Session,
    other: Session,
    // Behind the sessions, which need them to the end.
    relay: Relay,
    server: Server,
}

impl Site {
    fn new(link: &str) -> Self {
        let server = Server::new(FRAMES);
        let relay = Relay::to(&server.endpoint(link));
        let url = relay.endpoint().to_string();
        let writer = Session::connect(&url, ConnectOptions::default()).expect("a session");
        Self { writer, other: server.connect(link), relay, server }
    }

    /// Has a thread make a change, which is held in its midst, and `work` end that.
    fn during<T: Send>(&self, change: impl FnOnce() -> T + Send, work: impl FnOnce(Held)) -> T {
        let armed = self.relay.arm();
        std::thread::scope(|scope| {
            let changing = scope.spawn(change);
            work(armed.held());
            changing.join().expect("no panic")
        })
    }
}

fn all_are(file: &File, byte: u8) {
    let bytes = read(file, 0, 2 * LEN).expect("read");
    assert_eq!(bytes.len(), LEN);
    let other = bytes.iter().position(|found| *found != byte);
    assert_eq!(other, None, "the first that is not {byte}");
}

#[test]
fn a_change_is_made_when_its_last_piece_is_there_and_nobody_waits_for_that() {
    for link in LINKS {
        let site = Site::new(link);
        let file = create(&site.writer, "file", &vec![1; LEN]);
        let theirs = site.other.open("file", OpenOptions::READ_WRITE).expect("opened");
        let grant = file.grant_write(0, LEN as u64).expect("granted");
        assert!(grant.is_one_sided());
        let at = LEN - PAGE;
        let written = site.during(
            || file.write_at(0, &vec![2; LEN]),
            |held| {
                all_are(&theirs, 1);
                // Others write, cut nothing and sync meanwhile, in the part that has come and in the other.
                theirs.write_at(0, b"earlier").expect("written");
                theirs.write_at(at as u64, b"earlier").expect("written");
                theirs.sync().expect("durable");
                assert_eq!(read(&theirs, at as u64, 7).expect("read"), b"earlier");
                held.end(Verdict::GoOn);
            },
        );
        written.expect("written");
        all_are(&theirs, 2);
        assert!(grant.stands());
        let appended = site.during(
            || file.append(&vec![3; LEN]),
            |held| {
                assert_eq!(theirs.len().expect("a length"), LEN as u64);
                assert_eq!(theirs.append(b"comes first").expect("appended"), LEN as u64);
                held.end(Verdict::GoOn);
            },
        );
        assert_eq!(appended.expect("appended"), LEN as u64 + 11, "{link}");
        let end = read(&theirs, LEN as u64, 2 * LEN).expect("read");
        assert!(end.len() == LEN + 11 && end.starts_with(b"comes first"));
        assert!(end[11..].iter().all(|byte| *byte == 3));
    }
}

/// Readers beside it see each page of before or of after, and never an older one again.
#[test]
fn who_reads_meanwhile_sees_whole_pages() {
    const ROUNDS: u8 = 30;
    for link in LINKS {
        let site = Site::new(link);
        let file = create(&site.writer, "file", &vec![1; LEN]);
        let _grant = file.grant_write(0, LEN as u64).expect("granted");
        let (begun, completed, is_over) = (AtomicU8::new(1), AtomicU8::new(1), AtomicBool::new(false));
        std::thread::scope(|scope| {
            let reader = scope.spawn(|| {
                let theirs = site.other.open("file", OpenOptions::READ).expect("opened");
                let mut bytes = vec![0; LEN];
                let mut reads = 0;
                while !is_over.load(Ordering::SeqCst) {
                    let least = completed.load(Ordering::SeqCst);
                    assert_eq!(theirs.read_at(0, &mut bytes).expect("read"), LEN);
                    let most = begun.load(Ordering::SeqCst);
                    for (number, page) in bytes.chunks(PAGE).enumerate() {
                        let version = page[0];
                        assert!(page.iter().all(|byte| *byte == version), "page {number} is torn");
                        assert!((least..=most).contains(&version), "page {number}: {version}");
                    }
                    reads += 1;
                }
                reads
            });
            for version in 2..2 + ROUNDS {
                begun.store(version, Ordering::SeqCst);
                file.write_at(0, &vec![version; LEN]).expect("written");
                completed.store(version, Ordering::SeqCst);
            }
            is_over.store(true, Ordering::SeqCst);
            println!("{link}: {} reads", reader.join().expect("no panic"));
        });
        let writes = site.server.running.server().files.pages().figures().counts.target_writes;
        assert!(writes >= (LEN / PAGE) as u64, "{link}: {writes} pages one-sidedly");
    }
}

#[test]
fn of_a_change_that_is_cut_off_nothing_is_seen() {
    for link in LINKS {
        let site = Site::new(link);
        let file = create(&site.writer, "file", &vec![1; LEN]);
        let theirs = site.other.open("file", OpenOptions::READ_WRITE).expect("opened");
        let _grant = file.grant_write(0, LEN as u64).expect("granted");
        let written = site.during(
            || file.write_at(0, &vec![2; LEN]),
            |held| {
                // Until this has looked, nothing can be done once more.
                site.relay.close(true);
                held.end(Verdict::Cut);
                for _ in 0..3 {
                    all_are(&theirs, 1);
                    std::thread::sleep(Duration::from_millis(10));
                }
                theirs.sync().expect("durable");
                site.relay.close(false);
            },
        );
        written.expect("written once more, by a request");
        all_are(&theirs, 2);
        // An append is not done once more: who asked for it is told.
        let appended = site.during(
            || file.append(&vec![3; LEN]),
            |held| {
                site.relay.close(true);
                held.end(Verdict::Cut);
            },
        );
        assert!(matches!(appended, Err(NativeError::MayBeDone)), "{link}: {appended:?}");
        all_are(&theirs, 2);
        site.relay.close(false);
        assert_eq!(file.append(b"on").expect("appended"), LEN as u64);
    }
}

#[test]
fn a_right_that_ends_between_the_pieces_has_ended() {
    for link in LINKS {
        let site = Site::new(link);
        let owned = create(&site.other, "file", &vec![1; LEN]);
        let key = owned.bind(0, LEN as u64, BOTH, None).expect("bound");
        let part = site.writer.redeem(&key).expect("opened");
        let _grant = part.grant_write(0, LEN as u64).expect("granted");
        let written = site.during(
            || part.write_at(0, &vec![2; LEN]),
            |held| {
                owned.unbind(&key).expect("unbound");
                held.end(Verdict::GoOn);
            },
        );
        has_ended(written);
        all_are(&owned, 1);
        // A grant that others end: it is written by a request.
        let file = site.writer.open("file", OpenOptions::READ_WRITE).expect("opened");
        let grant = file.grant_write(0, LEN as u64).expect("granted");
        let written = site.during(
            || file.write_at(0, &vec![3; LEN]),
            |held| {
                owned.set_len(LEN as u64 / 2).expect("cut");
                assert_eq!(owned.len().expect("a length"), LEN as u64 / 2);
                held.end(Verdict::GoOn);
            },
        );
        written.expect("written by a request");
        assert!(!grant.stands(), "{link}");
        all_are(&owned, 3);
    }
}
