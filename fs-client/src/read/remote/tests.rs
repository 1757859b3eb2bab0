use super::super::near_rnic::{NearRnic, Order};
use super::*;
use cuttlefs_common::ids::{FilePage, FrameIndex, InodeNo, PAGE_SIZE, PoolPage};
use cuttlefs_common::memory::SharedMemory;
use cuttlefs_common::region::Extent;
use cuttlefs_common::rpc::Layout;
use std::sync::Arc;

const SLOT: FileSlot = FileSlot(1);
const EPOCH: u64 = 1;
/// The number of pages of the file: more than are read together.
const PAGES_OF_FILE: u64 = 40;

struct Server {
    frames: Arc<SharedMemory>,
    residency: ResidencyTable,
    files: FileTable,
}

impl Server {
    /// Page `n` of the file is pool page `100 - n`, so that no two pages are neighbours in the pool. It is in frame `3 + n`, and its bytes are `n`;
    /// but every fourth page is on SSD.
    fn new() -> Self {
        let frames = Arc::new(SharedMemory::new("frames", 64 * PAGE_SIZE).expect("frames"));
        let residency = ResidencyTable::new(512).expect("residency");
        let files = FileTable::new(4).expect("files");
        for page in (0..PAGES_OF_FILE).filter(|page| page % 4 != 3) {
            frames.fill((3 + page as usize) * PAGE_SIZE, PAGE_SIZE, page as u8);
            residency.begin_change(PoolPage(100 - page));
            residency.end_change(PoolPage(100 - page), FrameIndex(3 + page as u32), false);
        }
        files.publish(SLOT, InodeNo(5), 7, PAGES_OF_FILE * PAGE_SIZE_U64 - 10);
        Self { frames, residency, files }
    }

    fn rnic(&self) -> NearRnic {
        NearRnic::new(self.frames.clone(), self.residency.memory().clone(), self.files.memory().clone())
    }
}

fn layout(generation: u64) -> CachedLayout {
    let extent = |page| Extent {
        file_page: FilePage(page),
        pool_page: PoolPage(100 - page),
        len_pages: 1,
        state: ExtentState::Written,
    };
    let extents = (0..PAGES_OF_FILE).map(extent).collect();
    CachedLayout::new(FilePage(0), Layout { generation, extents, known_until: None })
}

fn read_with(
    rnic: &mut NearRnic,
    known: &KnownEntries,
    out: &mut [u8],
) -> Result<Option<OneSided>, NoAnswer> {
    read_as(rnic, known, SLOT, &layout(7), 0, out)
}

fn read_as(
    rnic: &mut NearRnic,
    known: &KnownEntries,
    slot: FileSlot,
    layout: &CachedLayout,
    offset: u64,
    out: &mut [u8],
) -> Result<Option<OneSided>, NoAnswer> {
    let (windows, counted) = (rnic.windows(), SpreadCount::default());
    let got = read(
        rnic,
        Shown { windows: &windows, magic: &MAGIC, epoch: EPOCH, counted: &counted },
        known,
        slot,
        layout,
        offset,
        out,
    );
    if let (Some(_), Ok(Some(got))) = (windows.pages, &got) {
        let pages = divide(offset, got.valid_len).len() - got.missing.count();
        // A page that was read twice for another one is counted twice.
        assert!(counted.get() >= pages as u64, "each page came through the window");
    }
    got
}

/// The pattern of pages on SSD.
const MAGIC: MagicPattern = MagicPattern::new([0x5a; 32]);

/// Checks which pages are missing, and the bytes of all others.
fn check(got: &OneSided, out: &[u8]) {
    for (page, bytes) in out[..got.valid_len].chunks(PAGE_SIZE).enumerate() {
        assert_eq!(got.missing.contains(page), page % 4 == 3, "page {page}");
        assert!(page % 4 == 3 || bytes.iter().all(|byte| *byte == page as u8), "page {page}");
    }
}

#[test]
fn a_first_read_takes_three_round_trips_for_each_part_and_the_next_one_two() {
    let (server, known) = (Server::new(), KnownEntries::default());
    let mut out = vec![0xff; (PAGES_OF_FILE as usize + 2) * PAGE_SIZE];
    // Two parts.
    for doorbells in [6, 4] {
        let mut rnic = server.rnic();
        let got = read_with(&mut rnic, &known, &mut out).expect("answer").expect("read");
        assert_eq!(got.valid_len, PAGES_OF_FILE as usize * PAGE_SIZE - 10);
        check(&got, &out);
        assert_eq!(rnic.doorbells, doorbells);
        out.fill(0xff);
    }
}

#[test]
fn a_page_that_is_somewhere_else_is_read_there_and_one_that_moves_on_is_missing() {
    let (server, known) = (Server::new(), KnownEntries::default());
    let mut out = vec![0xff; PAGE_SIZE];
    let move_to = |residency: &ResidencyTable, frames: &SharedMemory, frame: u32| {
        frames.fill(frame as usize * PAGE_SIZE, PAGE_SIZE, 0);
        residency.begin_change(PoolPage(100));
        residency.end_change(PoolPage(100), FrameIndex(frame), false);
    };
    let mut rnic = server.rnic();
    read_with(&mut rnic, &known, &mut out).expect("answer");
    // The page has moved since: the guess is wrong, and the bytes that come with it are not those of the page.
    move_to(&server.residency, &server.frames, 60);
    server.frames.fill(3 * PAGE_SIZE, PAGE_SIZE, 0xee);
    let mut rnic = server.rnic();
    let got = read_with(&mut rnic, &known, &mut out).expect("answer").expect("read");
    assert!(got.missing.is_empty() && out.iter().all(|byte| *byte == 0));
    assert_eq!(rnic.doorbells, 4);
    // The page moves on before it is read there.
    let (residency, frames) = (server.residency.clone(), server.frames.clone());
    move_to(&residency, &frames, 61);
    let mut rnic = server.rnic();
    rnic.meanwhile = Box::new(move |doorbell| {
        if doorbell == 2 {
            move_to(&residency, &frames, 62);
        }
    });
    let got = read_with(&mut rnic, &known, &mut out).expect("answer").expect("read");
    assert!(got.missing.contains(0));
    assert_eq!(rnic.doorbells, 4);
}

/// Bytes of the second execution of a READ, and an entry of its first one, agreed with the entry before (soft-RoCE, answers lost and late).
#[test]
fn a_page_that_leaves_its_frame_and_comes_back_between_two_doorbells_is_read_again() {
    let (server, known) = (Server::new(), KnownEntries::default());
    let mut out = vec![0xff; PAGE_SIZE];
    read_with(&mut server.rnic(), &known, &mut out).expect("answer");
    let (residency, frames) = (server.residency.clone(), server.frames.clone());
    let mut rnic = server.rnic();
    // The frame has another page's bytes when it is read, and this page's when the entries are.
    frames.fill(3 * PAGE_SIZE, PAGE_SIZE, 0xee);
    residency.begin_change(PoolPage(100));
    rnic.meanwhile = Box::new(move |doorbell| {
        if doorbell == 1 {
            frames.fill(3 * PAGE_SIZE, PAGE_SIZE, 0);
            residency.end_change(PoolPage(100), FrameIndex(3), false);
        }
    });
    let got = read_with(&mut rnic, &known, &mut out).expect("answer").expect("read");
    assert!(got.missing.is_empty() && out.iter().all(|byte| *byte == 0));
    assert_eq!(rnic.doorbells, 4);
}

#[test]
fn entries_of_the_server_before_prove_nothing() {
    let (server, known) = (Server::new(), KnownEntries::default());
    let mut out = vec![0xff; PAGE_SIZE];
    known.note(EPOCH - 1, PoolPage(100), server.residency.load(PoolPage(100)));
    let mut rnic = server.rnic();
    read_with(&mut rnic, &known, &mut out).expect("answer").expect("read");
    assert_eq!(rnic.doorbells, 3);
}

/// A page whose entry was not known, and one that was somewhere else at the last look, beside pages whose entries are known.
#[test]
fn pages_that_are_read_together_wait_for_the_slowest() {
    let server = Server::new();
    let mut out = vec![0xff; 3 * PAGE_SIZE];
    for (second, third, doorbells) in [(None, None, 3), (None, Some(50), 4), (Some(51), Some(50), 4)] {
        let known = KnownEntries::default();
        known.note(EPOCH, PoolPage(100), server.residency.load(PoolPage(100)));
        for (page, frame) in [(99, second), (98, third)] {
            if let Some(frame) = frame {
                known.note(EPOCH, PoolPage(page), ResidencyEntry::new(FrameIndex(frame), 0, false));
            }
        }
        out.fill(0xff);
        let mut rnic = server.rnic();
        let got = read_with(&mut rnic, &known, &mut out).expect("answer").expect("read");
        assert!(got.missing.is_empty());
        check(&got, &out);
        assert_eq!(rnic.doorbells, doorbells);
    }
}

#[test]
fn a_page_that_leaves_the_frame_of_its_first_look_is_missing() {
    let server = Server::new();
    // Before the bytes, and between them and the proof.
    for moved_at in [1, 2] {
        let (known, residency, frames) =
            (KnownEntries::default(), server.residency.clone(), server.frames.clone());
        let mut rnic = server.rnic();
        rnic.meanwhile = Box::new(move |doorbell| {
            if doorbell == moved_at {
                residency.begin_change(PoolPage(100));
                frames.fill(3 * PAGE_SIZE, PAGE_SIZE, 0xee);
                residency.end_change(PoolPage(100), FrameIndex(3), false);
            }
        });
        let mut out = vec![0; PAGE_SIZE];
        let got = read_with(&mut rnic, &known, &mut out).expect("answer").expect("read");
        assert!(got.missing.contains(0));
        assert_eq!(rnic.doorbells, 3);
    }
}

/// The first look's doorbell proves nothing: the page may be given to another file before its bytes are READ.
#[test]
fn a_page_that_another_file_gets_behind_its_first_look_is_not_taken() {
    let server = Server::new();
    // Before the bytes, and between them and the proof.
    for given_at in [1, 2] {
        let (files, residency, frames) =
            (server.files.clone(), server.residency.clone(), server.frames.clone());
        files.publish(SLOT, InodeNo(5), 7, PAGE_SIZE_U64);
        let mut rnic = server.rnic();
        rnic.meanwhile = Box::new(move |doorbell| {
            if doorbell == given_at {
                files.change_layout(SLOT, 8, 0);
                residency.begin_change(PoolPage(100));
                frames.fill(3 * PAGE_SIZE, PAGE_SIZE, 0xee);
                residency.end_change(PoolPage(100), FrameIndex(3), false);
            }
        });
        let (mut out, fresh) = (vec![0; PAGE_SIZE], KnownEntries::default());
        assert_eq!(read_with(&mut rnic, &fresh, &mut out), Err(NoAnswer::LayoutStale), "{given_at}");
        assert_eq!(rnic.doorbells, given_at + 1);
    }
}

#[test]
fn a_file_that_becomes_shorter_between_two_doorbells_ends_at_the_shorter_length() {
    let (server, known) = (Server::new(), KnownEntries::default());
    let mut out = vec![0xff; 36 * PAGE_SIZE];
    let mut rnic = server.rnic();
    let files = server.files.clone();
    rnic.meanwhile = Box::new(move |doorbell| {
        if doorbell == 1 {
            files.set_size(SLOT, 5);
        }
    });
    let got = read_with(&mut rnic, &known, &mut out).expect("answer").expect("read");
    assert_eq!(got.valid_len, 5);
    assert_eq!(rnic.doorbells, 3, "nothing is read past the end");
}

#[test]
fn layouts_and_slots_that_are_gone_are_noticed() {
    let (server, known) = (Server::new(), KnownEntries::default());
    let mut out = vec![0; 100];
    let mut read =
        |slot, generation| read_as(&mut server.rnic(), &known, slot, &layout(generation), 0, &mut out);
    assert_eq!(read(SLOT, 6), Err(NoAnswer::LayoutStale));
    assert_eq!(read(FileSlot(999), 7), Err(NoAnswer::SlotGone));
    server.files.retire(SLOT);
    assert_eq!(read(SLOT, 7), Err(NoAnswer::SlotGone));
    // The layout changes before the bytes, and between them and the proof.
    for changed_at in 1..=2 {
        let files = server.files.clone();
        files.publish(SLOT, InodeNo(5), 7, 100);
        let mut rnic = server.rnic();
        rnic.meanwhile = Box::new(move |doorbell| {
            if doorbell == changed_at {
                files.change_layout(SLOT, 8, 100);
            }
        });
        let mut out = vec![0; 100];
        let fresh = KnownEntries::default();
        assert_eq!(read_with(&mut rnic, &fresh, &mut out), Err(NoAnswer::LayoutStale), "{changed_at}");
    }
}

#[test]
fn a_file_of_any_size_is_read_once() {
    let (server, known) = (Server::new(), KnownEntries::default());
    server.files.set_size(SLOT, u64::MAX);
    let mut out = vec![0xff; PAGE_SIZE];
    let mut rnic = server.rnic();
    let got = read_with(&mut rnic, &known, &mut out).expect("answer").expect("read");
    assert!(got.missing.is_empty() && got.valid_len == PAGE_SIZE);
    assert_eq!(rnic.doorbells, 3);
}

#[test]
fn numbers_from_a_broken_peer_are_checked() {
    let (server, known) = (Server::new(), KnownEntries::default());
    let mut out = vec![0; 100];
    // A frame beyond the window, both in the entry and as a guess.
    server.residency.begin_change(PoolPage(100));
    server.residency.end_change(PoolPage(100), FrameIndex(u32::MAX), false);
    for _ in 0..2 {
        let got = read_with(&mut server.rnic(), &known, &mut out).expect("answer").expect("read");
        assert!(got.missing.contains(0));
    }
    // A pool page beyond the table.
    let wild = Extent {
        file_page: FilePage(0),
        pool_page: PoolPage(u64::MAX / 2),
        len_pages: 1,
        state: ExtentState::Written,
    };
    let wild =
        CachedLayout::new(FilePage(0), Layout { generation: 7, extents: vec![wild], known_until: None });
    let mut rnic = server.rnic();
    let got = read_as(&mut rnic, &known, SLOT, &wild, 0, &mut out).expect("answer").expect("read");
    assert!(got.missing.contains(0));
}

/// The server's window of pages, which shows all pages that are in frames.
fn window(server: &Server) -> Arc<SharedMemory> {
    let window = Arc::new(SharedMemory::new("window", 101 * PAGE_SIZE).expect("window"));
    window.fill(0, 101 * PAGE_SIZE, 0x5a);
    for page in (0..PAGES_OF_FILE as usize).filter(|page| page % 4 != 3) {
        window.fill((100 - page) * PAGE_SIZE, PAGE_SIZE, page as u8);
    }
    // What is read comes from there and not from the frames.
    server.frames.fill(0, 64 * PAGE_SIZE, 0xee);
    window
}

#[test]
fn through_a_window_a_first_read_takes_three_round_trips_for_each_part_and_the_next_one_two() {
    let (server, known) = (Server::new(), KnownEntries::default());
    let window = window(&server);
    // From and to the middle of a page.
    for (offset, doorbells) in [(0, 6), (0, 4), (4 * PAGE_SIZE_U64 + 100, 4)] {
        let mut out = vec![0xff; PAGES_OF_FILE as usize * PAGE_SIZE - 5000];
        let mut rnic = server.rnic().with_pages(window.clone());
        let got = read_as(&mut rnic, &known, SLOT, &layout(7), offset, &mut out);
        let got = got.expect("answer").expect("read");
        assert_eq!(rnic.doorbells, doorbells);
        for (index, part) in divide(offset, got.valid_len).enumerate() {
            let bytes = &out[part.offset_in_request..part.offset_in_request + part.len];
            let page = part.page.0;
            assert_eq!(got.missing.contains(index), page % 4 == 3, "page {page}");
            assert!(page % 4 == 3 || bytes.iter().all(|byte| u64::from(*byte) == page), "page {page}");
        }
    }
}

#[test]
fn a_page_that_the_window_does_not_show_yet_or_shows_in_part_is_missing() {
    let (server, known) = (Server::new(), KnownEntries::default());
    let window = window(&server);
    let mut out = vec![0xff; 100];
    // The magic page is behind the bytes that are asked for, too.
    window.fill(101 * PAGE_SIZE - 32, 32, 0x5a);
    let mut rnic = server.rnic().with_pages(window.clone());
    let got = read_with(&mut rnic, &known, &mut out).expect("answer").expect("read");
    assert!(got.missing.contains(0));
    window.fill(100 * PAGE_SIZE, PAGE_SIZE, 0);
    let got = read_with(&mut rnic, &known, &mut out).expect("answer").expect("read");
    assert!(got.missing.is_empty() && out.iter().all(|byte| *byte == 0));
    // The page is written while it is read.
    let residency = server.residency.clone();
    let mut rnic = server.rnic().with_pages(window);
    rnic.meanwhile = Box::new(move |doorbell| {
        if doorbell == 0 {
            residency.begin_change(PoolPage(100));
        }
    });
    let got = read_with(&mut rnic, &known, &mut out).expect("answer").expect("read");
    assert!(got.missing.contains(0));
}

#[test]
fn a_page_that_was_on_ssd_at_the_last_look_is_asked_for_when_it_is_back() {
    let (server, known) = (Server::new(), KnownEntries::default());
    let window = window(&server);
    known.note(EPOCH, PoolPage(100), ResidencyEntry::new(FrameIndex::MAGIC, 2, false));
    let mut out = vec![0xff; 100];
    let mut rnic = server.rnic().with_pages(window);
    let got = read_with(&mut rnic, &known, &mut out).expect("answer").expect("read");
    assert!(got.missing.is_empty() && out.iter().all(|byte| *byte == 0));
    assert_eq!(rnic.doorbells, 3);
}

#[test]
fn pages_that_the_last_look_around_found_on_ssd_take_no_doorbell() {
    let (server, known) = (Server::new(), KnownEntries::default());
    known.begin_look();
    // Both have come into frames since: a look may be old.
    for page in 0..2 {
        known.note_away(EPOCH, PoolPage(100 - page), ResidencyEntry::new(FrameIndex::MAGIC, 2, false));
    }
    let mut out = vec![0xff; 3 * PAGE_SIZE];
    let mut rnic = server.rnic();
    let got = read_as(&mut rnic, &known, SLOT, &layout(7), 0, &mut out[..2 * PAGE_SIZE]);
    assert_eq!((got, rnic.doorbells), (Ok(None), 0), "all of it is fetched");
    // Beside another page they are missing, and that one is read.
    let got = read_with(&mut rnic, &known, &mut out).expect("answer").expect("read");
    assert_eq!([0, 1, 2].map(|page| got.missing.contains(page)), [true, true, false]);
    assert!(out[2 * PAGE_SIZE..].iter().all(|byte| *byte == 2));
    assert_eq!(rnic.doorbells, 3);
    // The next look around does not find them on SSD.
    known.begin_look();
    let got = read_with(&mut rnic, &known, &mut out).expect("answer").expect("read");
    assert!(got.missing.is_empty());
    check(&got, &out);
}

/// The words of a doorbell's READs come in any order; the model checker looks at what happens between them.
#[test]
fn words_are_read_in_any_order() {
    let (server, known) = (Server::new(), KnownEntries::default());
    for order in 0..24 {
        let mut out = [0xff; 16];
        let mut rnic = server.rnic();
        rnic.order = Order::Words(order);
        let got = read_with(&mut rnic, &known, &mut out).expect("answer").expect("read");
        assert!(got.missing.is_empty() && out == [0; 16], "{order}");
    }
}
