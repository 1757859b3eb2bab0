//! A device that fails under a write that was acknowledged: the ring keeps it, and until it can be done nobody sees or
//! changes the file as if it had never been.

use super::client::{Client, Ring};
use super::server::{Running, Site};
use super::{status, wait_until};
use cuttlefs_common::attr::SetAttr;
use cuttlefs_common::ids::{FileKey, FilePage, InodeNo};
use cuttlefs_common::persist::LogDeviceKind;
use cuttlefs_common::rdma::LinkKind;
use cuttlefs_common::region::PageSet;
use cuttlefs_common::rpc::durable::{SenderError, Wants};
use cuttlefs_common::rpc::{Allocate, EarlyWrite, Payload, Request, Rights, SeekFor, Sink};
use cuttlefs_common::status::Status;

/// A server whose device is about to fail under the first page of a file.
struct Failing {
    site: Site,
    running: Running,
    /// Two pages, the second of them in memory. It goes to ring 0.
    ino: InodeNo,
    /// The pool as it was.
    whole: Vec<u8>,
}

impl Failing {
    fn new() -> Self {
        let site = Site::new(LinkKind::Shm, LogDeviceKind::PmemEmulated);
        let running = site.start();
        let mut client = Client::new(&running.endpoint);
        let (ino, filekey) = client.create_in(0, "broken");
        client.write(filekey, 0, &[b'.'; 8192]).expect("written");
        // The next server need not wait for it.
        client.call(&Request::Detach, |_| ()).expect("detached");
        running.stop();
        let data = site.pool().join("data");
        let whole = std::fs::read(&data).expect("read");
        let running = site.start();
        let mut client = Client::new(&running.endpoint);
        let filekey = client.open(ino);
        assert_eq!(read_at(&mut client, filekey, 4096), Ok(()));
        client.call(&Request::Detach, |_| ()).expect("detached");
        let file = std::fs::OpenOptions::new().write(true).open(&data).expect("opened");
        file.set_len(64 * 1024).expect("cut");
        Self { site, running, ino, whole }
    }

    /// A write that changes the page in part, which is on SSD only: it cannot be executed.
    fn break_ring(&self, ring: &mut Ring) {
        let broken = ring.write(self.ino, Some(4000), b"kept").expect("persistent");
        assert_eq!(ring.answer(broken), Err(Status::Io));
    }

    /// The server is killed, its device mended, and another one started.
    fn mend(self) -> (Site, Running) {
        self.running.kill();
        let data = self.site.pool().join("data");
        let mut mended = std::fs::read(&data).expect("read");
        mended.resize(self.whole.len(), 0);
        // What was written since stays.
        for (page, before) in mended.chunks_mut(4096).zip(self.whole.chunks(4096)) {
            if page.iter().all(|byte| *byte == 0) {
                page.copy_from_slice(before);
            }
        }
        std::fs::write(&data, mended).expect("mended");
        let running = self.site.start();
        (self.site, running)
    }
}

fn read_at(client: &mut Client, filekey: FileKey, offset: u64) -> Result<(), Status> {
    let pages = PageSet::all(1);
    client.call(&Request::Fetch { filekey, offset, len: 4096, pages, sink: Sink::Inline }, |_| ())
}

/// Everything that would change a file's contents, or tell of them.
fn is_closed(client: &mut Client, ino: InodeNo, filekey: FileKey, other: FileKey) {
    let mut refused = |what: &str, request: Request<'_>| {
        assert_eq!(client.call(&request, |_| ()), Err(Status::Io), "{what}");
    };
    let all = Rights { read: true, write: true };
    let read = Rights { read: true, write: false };
    let bytes = [b'!'; 4096];
    let write = |offset, append, len: usize| Request::Write {
        filekey,
        offset,
        append,
        payload: Payload::Inline(&bytes[..len]),
    };
    refused("a page written over", write(0, false, 4096));
    refused("a part of a page in memory", write(4096 + 10, false, 10));
    refused("a write behind the end", write(100_000, false, 10));
    refused("an append", write(0, true, 10));
    for size in [0, 5000, 50_000] {
        refused(
            "a new length",
            Request::SetAttr { ino, set: SetAttr { size: Some(size), ..Default::default() } },
        );
    }
    refused("cut by opening", Request::Open { ino, rights: all, truncate: true });
    refused("opened", Request::Open { ino, rights: read, truncate: false });
    for how in
        [Allocate::PunchHole, Allocate::Reserve { keep_size: true }, Allocate::ZeroRange { keep_size: false }]
    {
        refused("allocated", Request::Allocate { filekey, offset: 4096, len: 4096, how });
    }
    let copy = |from, to| Request::CopyRange { from, from_offset: 4096, to, to_offset: 4096, len: 4096 };
    refused("copied into", copy(other, filekey));
    refused("copied", copy(filekey, other));
    refused("its layout", Request::Layout { filekey, first_page: FilePage(0), max_extents: 10 });
    refused("its holes", Request::Seek { filekey, offset: 0, seek: SeekFor::Hole });
    for offset in [0, 4096] {
        assert_eq!(read_at(client, filekey, offset), Err(Status::Io), "read at {offset}");
    }
}

/// A device that fails loses nothing that was acknowledged: the ring keeps it until the device is mended.
#[test]
fn what_cannot_be_executed_is_kept_until_it_can() {
    let failing = Failing::new();
    let mut client = Client::new(&failing.running.endpoint);
    let (other, _) = client.create_in(0, "other");
    let mut ring = client.ring(0, 0).expect("a ring");
    let broken = ring.write(failing.ino, Some(4000), b"kept").expect("persistent");
    let behind = ring.write(other, None, b"as well").expect("persistent");
    assert_eq!(ring.answer(broken), Err(Status::Io));
    assert_eq!(ring.answer(behind), Err(Status::Io), "nothing overtakes it");
    assert_eq!(status(&mut client)["early"]["failed"], 2);
    drop(ring);
    assert!(matches!(client.ring(0, 2).err(), Some(SenderError::Refused)));
    client.ring(1, 0).expect("another ring is none the worse");
    let ino = failing.ino;
    let (_site, running) = failing.mend();
    let mut client = Client::with_secret(&running.endpoint, client.secret);
    let found = client.read(ino);
    assert!(found[..4000] == [b'.'; 4000] && &found[4000..4004] == b"kept");
    assert_eq!(client.read(other), b"as well");
    client.ring(0, 2).expect("a ring again");
    running.stop();
}

/// What was acknowledged must not be undone by what comes later, nor undo it: until it can be executed nothing comes.
#[test]
fn a_file_that_owes_a_write_is_closed_to_everybody() {
    let failing = Failing::new();
    let ino = failing.ino;
    let mut client = Client::new(&failing.running.endpoint);
    let mut reader = Client::new(&failing.running.endpoint);
    let (behind, _) = client.create_in(0, "behind");
    let (fine, fine_key) = client.create_in(1, "fine");
    let (filekey, behind_key, other) = (reader.open(ino), reader.open(behind), reader.open(fine));
    reader.write(other, 0, &[b','; 8192]).expect("written");
    let mut ring = client.ring(0, 0).expect("a ring");
    failing.break_ring(&mut ring);
    let last = ring.write(behind, None, b"behind").expect("persistent");
    assert_eq!(ring.answer(last), Err(Status::Io));
    for (ino, filekey) in [(ino, filekey), (behind, behind_key)] {
        is_closed(&mut reader, ino, filekey, other);
    }
    assert_eq!(status(&mut reader)["early"]["closed_files"], 2);
    // Names and attributes are no contents; other files go on, one-sidedly or not.
    let set = SetAttr { mode: Some(0o600), ..Default::default() };
    reader.call(&Request::SetAttr { ino, set }, |_| ()).expect("its mode");
    client.write(fine_key, 0, b"fine").expect("written");
    assert_eq!(&reader.read(fine)[..5], b"fine,");
    // Somebody else's acknowledged write waits as well, and is not lost either.
    let mut second = reader.ring(0, 0).expect("a ring");
    let also = second.write(ino, Some(4096), b"too").expect("persistent");
    assert_eq!(second.answer(also), Err(Status::Io));
    let (_site, running) = failing.mend();
    let mut client = Client::with_secret(&running.endpoint, client.secret);
    let found = client.read(ino);
    assert_eq!((found.len(), &found[3999..4005], &found[4095..4100]), (8192, &b".kept."[..], &b".too."[..]));
    assert_eq!(client.read(behind), b"behind");
    let filekey = client.open(ino);
    client.write(filekey, 4000, b"over").expect("written again");
    assert_eq!(&client.read(ino)[3999..4005], b".over.");
    assert_eq!(status(&mut client)["early"]["closed_files"], 0);
    running.stop();
}

/// What a ring holds is owed whether the server has looked at it or not.
#[test]
fn what_stands_in_the_ring_behind_it_is_owed_as_well() {
    let failing = Failing::new();
    let mut client = Client::new(&failing.running.endpoint);
    let mut reader = Client::new(&failing.running.endpoint);
    let (unseen, _) = client.create_in(0, "unseen");
    let filekey = reader.open(unseen);
    let mut ring = client.ring(0, 0).expect("a ring");
    failing.break_ring(&mut ring);
    failing.running.freeze();
    // Persistent, and never announced: its sender is gone before the server wakes up.
    let mut body = Vec::new();
    let write = EarlyWrite { client: client.id, ring: 0, ino: unseen, at: None, bytes: b"unseen" };
    write.encode_into(&mut body);
    let ticket = ring.sender.post(&body, Wants::Answer).expect("posted");
    ring.sender.wait_persistent(ticket).expect("persistent without the server");
    drop(ring);
    failing.running.thaw();
    // Whoever is told that the ring is lost finds the file closed.
    assert!(matches!(client.ring(0, 2).err(), Some(SenderError::Refused)));
    let payload = Payload::Inline(b"later");
    let later = Request::Write { filekey, offset: 0, append: false, payload };
    assert_eq!(reader.call(&later, |_| ()), Err(Status::Io));
    let (_site, running) = failing.mend();
    assert_eq!(Client::new(&running.endpoint).read(unseen), b"unseen");
    running.stop();
}

/// A client that goes for good leaves what it was owed, and what is known of its numbers: nothing is done twice.
#[test]
fn good_bye_keeps_what_is_owed_and_its_numbers() {
    let failing = Failing::new();
    let ino = failing.ino;
    let mut client = Client::new(&failing.running.endpoint);
    let (log, _) = client.create_in(0, "log");
    let (done, _) = client.create_in(1, "done");
    let mut ring = client.ring(0, 0).expect("a ring");
    let mut whole = client.ring(1, 0).expect("another");
    let ticket = whole.write(done, None, b"done").expect("persistent");
    whole.answer(ticket).expect("executed");
    let ticket = ring.write(log, None, b"once").expect("persistent");
    ring.answer(ticket).expect("executed");
    failing.break_ring(&mut ring);
    // At once, so that the head has not moved past what was executed; and nobody moves that of a connection that is gone.
    drop(ring);
    wait_until("its connection is gone", || status(&mut client)["early"]["rings"] == 1);
    // The redo log knows the numbers until what it holds is written back.
    wait_until("the redo log has nothing", || status(&mut client)["redo_log"]["used"] == 0);
    client.call(&Request::Detach, |_| ()).expect("detached");
    let left = failing.site.rings();
    assert_eq!(left.len(), 1, "the ring that is owed something stays, and no other: {left:?}");
    let (site, running) = failing.mend();
    let mut client = Client::new(&running.endpoint);
    assert_eq!((client.read(log), client.read(done)), (b"once".to_vec(), b"done".to_vec()));
    assert_eq!(&client.read(ino)[3999..4005], b".kept.");
    assert!(site.rings().is_empty(), "{:?}", site.rings());
    running.stop();
}

/// A client that comes back finds what it is owed, and deleting the file ends that.
#[test]
fn who_comes_back_is_owed_as_before() {
    let failing = Failing::new();
    let ino = failing.ino;
    let mut client = Client::new(&failing.running.endpoint);
    let mut ring = client.ring(0, 0).expect("a ring");
    failing.break_ring(&mut ring);
    client.call(&Request::Detach, |_| ()).expect("detached");
    let mut client = Client::with_secret(&failing.running.endpoint, client.secret);
    assert!(matches!(client.ring(0, 1).err(), Some(SenderError::Refused)));
    let withheld = status(&mut client)["pool"]["withheld_pages"].as_u64().expect("a number");
    assert_eq!(withheld, cuttlefs_server::early::RING_PAGES, "its space is kept as well");
    // Deleting is no change of contents: the write goes with the file.
    let rights = Rights { read: true, write: false };
    assert_eq!(client.call(&Request::Open { ino, rights, truncate: false }, |_| ()), Err(Status::Io));
    for index in 0.. {
        let name = format!("broken{index}");
        let unlink = Request::Unlink { parent: InodeNo::ROOT, name: name.as_bytes() };
        client.call(&unlink, |_| ()).expect("unlinked");
        if client.call(&Request::GetAttr { ino }, |_| ()).is_err() {
            break;
        }
    }
    wait_until("it is gone", || status(&mut client)["early"]["closed_files"] == 0);
    let (_site, running) = failing.mend();
    let mut client = Client::new(&running.endpoint);
    assert_eq!(client.call(&Request::GetAttr { ino }, |_| ()), Err(Status::Stale));
    running.stop();
}
