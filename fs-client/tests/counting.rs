//! Counts of one-sided reads, which clients keep and the server pulls. The server, and the next server too, learns which pages are hot although they
//! are read one-sidedly only, and a client that counts wrong harms nobody.

mod running;

use cuttlefs_client::file::RemoteVolume;
use cuttlefs_client::file::volume::{FsError, Handle, Volume};
use cuttlefs_common::ids::{InodeNo, PAGE_SIZE, PAGE_SIZE_U64, Rkey};
use cuttlefs_common::rdma::{FileTarget, RegionOwner};
use cuttlefs_common::region::CountersShape;
use cuttlefs_common::rpc::{RemoteBuffer, Request, Rights, Sampling};
use cuttlefs_common::status::Status;
use cuttlefs_server::pages::Hotspots;
use cuttlefs_server::pages::window::WindowKind;
use running::{CALLER, READ_WRITE, Site, Sizes, figure, read, until};

const FRAMES: u64 = 67;
/// Half of the frames.
const HOT_PAGES: u64 = 32;
/// Twice the frames.
const SCAN_PAGES: u64 = 128;

fn site() -> Site {
    Site::new(Sizes {
        pool_bytes: 4 << 20,
        frames: FRAMES,
        hotspots: Hotspots::Pages,
        window: WindowKind::Pinned,
    })
}

fn make(volume: &RemoteVolume, name: &str, pages: u64) -> (InodeNo, Handle) {
    let made = volume.create(&CALLER, InodeNo::ROOT, name.as_bytes(), 0o644, true, READ_WRITE);
    let (attr, opened) = made.expect("create");
    for page in 0..pages {
        let bytes = vec![page as u8 + 1; PAGE_SIZE];
        volume.write(&CALLER, opened.handle, page * PAGE_SIZE_U64, &bytes).expect("write");
    }
    volume.fsync(&CALLER, opened.handle, false).expect("fsync");
    (attr.ino, opened.handle)
}

fn read_through(volume: &RemoteVolume, handle: Handle, pages: u64) {
    for page in 0..pages {
        let got = read(volume, handle, page * PAGE_SIZE_U64, PAGE_SIZE as u32).expect("read");
        assert!(got.len() == PAGE_SIZE && got.iter().all(|byte| *byte == page as u8 + 1), "page {page}");
    }
}

fn counted(site: &Site) -> u64 {
    site.files().pages().figures().counts.counted
}

/// How many pages of the hot file are in frames. Reads the bitmap as a NIC would, and changes nothing.
fn resident(site: &Site, ino: InodeNo) -> u32 {
    let looking = RegionOwner(u64::MAX / 2);
    let opened = site.files().open(looking, ino, Rights { read: true, write: false }).expect("open");
    let mut bitmap = [0; HOT_PAGES as usize / 8];
    site.files().read_bitmap(looking, opened.filekey, 0, &mut bitmap).expect("bitmap");
    site.files().close(looking, opened.filekey).expect("close");
    bitmap.iter().map(|byte| byte.count_ones()).sum()
}

/// The length of the counters that a server of `running` requests from its clients.
fn counters_len() -> u32 {
    let shape = CountersShape::of(&Sampling { unit_pages: 16, period_ms: 50 }).expect("a shape");
    shape.len_bytes() as u32
}

/// One client reads a hot set one-sidedly, while another client scans a file. Without `scans`: returns after how many scans most of the hot set was
/// on SSD. With `scans`: does that many, and returns the smallest number of hot pages that were in frames.
fn scanned(scheme: &str, counting: bool, scans: Option<u32>) -> u32 {
    let site = site();
    let (reader, scanner) = (site.connect(scheme, 2, counting), site.connect("tcp", 2, false));
    let (_, scan) = make(&scanner, "scan", SCAN_PAGES);
    let (ino, hot) = make(&reader, "hot", HOT_PAGES);
    until("the hot set is resident and known to be hot", || {
        read_through(&reader, hot, HOT_PAGES);
        let is_known = !counting || counted(&site) > 100 * HOT_PAGES;
        resident(&site, ino) == HOT_PAGES as u32 && is_known
    });
    let mut rounds = 0;
    let mut least = HOT_PAGES as u32;
    let result = loop {
        read_through(&scanner, scan, SCAN_PAGES);
        rounds += 1;
        least = least.min(resident(&site, ino));
        match scans {
            None if least < HOT_PAGES as u32 / 4 => break rounds,
            None => assert!(rounds < 2000, "uncounted, and {least} pages are resident after {rounds} scans"),
            Some(scans) if rounds >= scans => break least,
            Some(_) => {
                // Read the hot set one-sidedly, about as often as the pages of a scan together.
                (0..20).for_each(|_| read_through(&reader, hot, HOT_PAGES));
            }
        }
        if !counting {
            // The server does not notice one-sided reads of resident pages.
            assert_eq!(counted(&site), 0);
        }
    };
    reader.shut_down();
    scanner.shut_down();
    site.check();
    result
}

fn what_is_read_one_sidedly_stays(scheme: &str) {
    let scans = scanned(scheme, false, None);
    let least = scanned(scheme, true, Some(2 * scans + 10));
    println!("{scheme}: {scans} scans drive out what is not counted; of what is, {least} pages stayed");
    assert!(least >= HOT_PAGES as u32 * 3 / 4, "{least} of {HOT_PAGES} pages stayed");
}

#[test]
fn what_is_read_one_sidedly_stays_over_tcp() {
    what_is_read_one_sidedly_stays("tcp");
}

#[test]
fn what_is_read_one_sidedly_stays_over_shared_memory() {
    what_is_read_one_sidedly_stays("shm");
}

/// As over RDMA hardware: the client READs the server's tables and frames, and the server READs the client's counters.
#[test]
fn what_is_read_one_sidedly_stays_where_the_servers_tables_are_read() {
    what_is_read_one_sidedly_stays("tables");
}

#[test]
fn counters_are_shared_with_each_next_server() {
    let mut site = site();
    let clients = ["tcp", "shm", "tables"].map(|link| site.connect(link, 2, true));
    let handles = [0, 1, 2].map(|index| make(&clients[index], &format!("file-{index}"), 8).1);
    for round in 0..3 {
        if round > 0 {
            site.restart();
        }
        for (client, handle) in clients.iter().zip(handles) {
            let before = counted(&site);
            let reads = figure(client, "onesided_reads");
            until("the server hears of one-sided reads", || {
                read_through(client, handle, 8);
                counted(&site) > before + 50
            });
            assert!(figure(client, "onesided_reads") > reads);
        }
    }
    clients.iter().for_each(Volume::shut_down);
    site.check();
}

/// As most programs read: a file is closed long before the server pulls the counts.
#[test]
fn reads_of_files_that_are_closed_before_the_pull_are_heard_of() {
    const PAGES: u64 = 8;
    let site = site();
    for link in ["tcp", "shm", "tables"] {
        let client = site.connect(link, 2, true);
        let (ino, handle) = make(&client, &format!("file-{link}"), PAGES);
        until("the client's counts are pulled", || {
            let before = counted(&site);
            read_through(&client, handle, PAGES);
            std::thread::sleep(std::time::Duration::from_millis(20));
            counted(&site) > before
        });
        client.release(handle);
        for _ in 0..20 {
            let (before, reads) = (counted(&site), figure(&client, "onesided_reads"));
            let opened = client.open(&CALLER, ino, READ_WRITE).expect("open");
            read_through(&client, opened.handle, PAGES);
            client.release(opened.handle);
            assert!(figure(&client, "onesided_reads") > reads, "{link}");
            until("the server hears of them", || counted(&site) > before);
        }
        client.shut_down();
    }
    site.check();
}

#[test]
fn who_shares_what_cannot_be_is_refused_or_dropped_and_harms_nobody() {
    let site = site();
    for scheme in ["tcp", "shm"] {
        let honest = site.connect(scheme, 2, true);
        let (_, file) = make(&honest, &format!("file-{scheme}"), 8);
        // One lane: every call uses the same connection. No control thread: the client shares only the counters that the test shares.
        let hostile = site.connect(scheme, 1, false);
        let share = |rkey: u32, offset, len| {
            let buffer = RemoteBuffer { rkey: Rkey(rkey), offset, len };
            hostile.session().call(&CALLER, || Request::ShareCounters { buffer }, |_| Ok(()))
        };
        let invalid = Err(FsError::Server(Status::Invalid));
        assert_eq!(share(1, 0, 0), invalid);
        assert_eq!(share(1, 0, counters_len() - 1), invalid, "too short");
        assert_eq!(share(1, u64::MAX - 10, counters_len()), invalid, "past all memory");
        let before = figure(&hostile, "rpc_requests");
        // The server READs the memory at the end of the period or never. If it does, the READ fails, and the connection with it.
        assert_eq!(share(0xdead_beef, 0, counters_len()), Ok(()));
        let again = share(0xdead_beef, 0, counters_len());
        assert!(again == invalid || again == Ok(()), "refused, or on the next connection: {again:?}");
        until("an honest client is listened to", || {
            let before = counted(&site);
            read_through(&honest, file, 8);
            std::thread::sleep(std::time::Duration::from_millis(20));
            counted(&site) > before
        });
        // Whether it was dropped or not, the server serves it like any client.
        let (_, own) = make(&hostile, &format!("own-{scheme}"), 4);
        read_through(&hostile, own, 4);
        assert!(figure(&hostile, "rpc_requests") > before);
        hostile.shut_down();
        read_through(&honest, file, 8);
        honest.shut_down();
    }
    site.check();
}
