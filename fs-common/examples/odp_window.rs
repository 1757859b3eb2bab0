//! A window that is registered once and followed by on-demand paging (`PointedMemory`), over an RNIC that has it: rdma_rxe of Linux 7.2.
//!
//! usage: odp_window check|measure ADDRESS  of the RNIC, such as `scripts/vm/run.sh -k 7.2 -r -- odp_window check 10.9.0.1`
//!
//! `check` proves which bytes a READ through the window finds, while nothing changes and while everything does; its exit status is 1 if a READ finds
//! others. `measure` prints the costs of registering, pointing and reading, beside those of a pinned region: each is a median of five rounds, with
//! the least and the most.

use cuttlefs_common::ids::PAGE_SIZE;
use cuttlefs_common::memory::{PointedMemory, SharedMemory};
use cuttlefs_common::rdma::soft::TcpSecurity;
use cuttlefs_common::rdma::verbs_provider::VerbsDevice;
use cuttlefs_common::rdma::{
    Access, Completion, CompletionQueue, ConnectOptions, Device, Endpoint, MemoryRegion, ProtectionDomain,
    QpConfig, QueuePair, RdmaError, Remote, SendOp, SendWr, WcStatus, WrId,
};
use cuttlefs_common::region::MagicPattern;
use cuttlefs_common::world::{Random, SeededRandom};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// Longest wait for a completion. The machine may stand still now and then.
const PATIENCE: Duration = Duration::from_secs(60);
const READABLE: Access = Access { remote_read: true, ..Access::NONE };
const ROUNDS: usize = 5;

/// One side of a connection.
struct Side {
    _device: Arc<VerbsDevice>,
    pd: Arc<dyn ProtectionDomain>,
    cq: Arc<dyn CompletionQueue>,
    qp: Arc<dyn QueuePair>,
}

fn open(address: &str) -> (Arc<VerbsDevice>, Arc<dyn ProtectionDomain>, Arc<dyn CompletionQueue>, Endpoint) {
    let endpoint = Endpoint::Rdma { host: address.to_owned(), port: 0, via: None };
    let device = VerbsDevice::to_listen(&endpoint, TcpSecurity::Insecure).expect("an RNIC");
    let (pd, cq) = (device.alloc_pd().expect("a domain"), device.create_cq(128).expect("a queue"));
    (device, pd, cq, endpoint)
}

/// A connection of this process with itself: the end that READs, and the end whose memory is READ.
fn joined(address: &str) -> (Side, Side) {
    let config = |cq: &Arc<dyn CompletionQueue>| QpConfig::new(cq, 64, 16);
    let (far_device, far_pd, far_cq, endpoint) = open(address);
    let (near_device, near_pd, near_cq, _) = open(address);
    let listener = far_pd.listen(&endpoint).expect("listen");
    let (near_qp, far_qp) = std::thread::scope(|scope| {
        let accepting = scope.spawn(|| {
            listener.accept().expect("somebody").accept(config(&far_cq), Vec::new()).expect("accept")
        });
        let options = ConnectOptions { qp: config(&near_cq), receives: Vec::new(), timeout: PATIENCE };
        let near = near_pd.connect(&listener.endpoint(), options).expect("connect").qp;
        (near, accepting.join().expect("a thread"))
    });
    (
        Side { _device: near_device, pd: near_pd, cq: near_cq, qp: near_qp },
        Side { _device: far_device, pd: far_pd, cq: far_cq, qp: far_qp },
    )
}

/// The end that READs pages, one at a time.
struct Reader {
    side: Side,
    local: Arc<dyn MemoryRegion>,
}

impl Reader {
    fn new(side: Side) -> Self {
        let memory = Arc::new(SharedMemory::new("read", PAGE_SIZE).expect("memory"));
        let local = side.pd.register(memory, Access::LOCAL).expect("register");
        Self { side, local }
    }

    fn read(&self, region: &dyn MemoryRegion, page: usize) -> WcStatus {
        let offset = region.first_address() + (page * PAGE_SIZE) as u64;
        let remote = Remote::Memory { rkey: region.rkey(), offset };
        let local = self.local.sge(0, PAGE_SIZE as u32);
        let request =
            SendWr { wr_id: WrId(0), op: SendOp::Read(remote), local: local.into(), signaled: true };
        self.side.qp.post_send(&[request]).expect("post");
        next(&*self.side.cq).status
    }

    fn words(&self) -> Vec<u64> {
        let mut bytes = vec![0; PAGE_SIZE];
        self.local.memory().read(0, &mut bytes);
        bytes.chunks_exact(8).map(|word| u64::from_le_bytes(word.try_into().expect("eight"))).collect()
    }

    /// The one word that a page consists of; `None` if its words differ.
    fn word_of(&self, region: &dyn MemoryRegion, page: usize) -> Option<u64> {
        assert_eq!(self.read(region, page), WcStatus::Success, "page {page}");
        let words = self.words();
        words.iter().all(|word| *word == words[0]).then_some(words[0])
    }
}

fn next(cq: &dyn CompletionQueue) -> Completion {
    let deadline = Instant::now() + PATIENCE;
    let mut out = Vec::new();
    while cq.poll(&mut out, 1) == 0 {
        assert!(Instant::now() < deadline, "no completion came");
        cq.wait(Duration::from_secs(1));
    }
    out[0]
}

const MAGIC: u64 = 0x6369_6761_6d5f_5f21;

fn magic_page() -> Vec<u8> {
    let mut page = vec![0; PAGE_SIZE];
    let mut pattern = [0; 32];
    pattern.chunks_exact_mut(8).for_each(|word| word.copy_from_slice(&MAGIC.to_le_bytes()));
    MagicPattern::new(pattern).fill(0, &mut page);
    page
}

/// Fills a page with a word, which tells the page of the window and the turn.
fn fill(frames: &SharedMemory, frame: usize, word: u64) {
    let page: Vec<u8> = std::iter::repeat_n(word.to_le_bytes(), PAGE_SIZE / 8).flatten().collect();
    frames.write(frame * PAGE_SIZE, &page);
}

struct Window {
    frames: Arc<SharedMemory>,
    pointed: PointedMemory,
    region: Arc<dyn MemoryRegion>,
}

impl Window {
    fn new(far: &Side, pages: usize, frames: usize) -> Result<Self, RdmaError> {
        let frames = Arc::new(SharedMemory::new("frames", frames * PAGE_SIZE).expect("memory"));
        let pointed = PointedMemory::new(frames.clone(), pages, &magic_page()).expect("a window");
        let region = far.pd.register(pointed.memory().clone(), READABLE)?;
        Ok(Self { frames, pointed, region })
    }

    fn point(&self, page: usize, frame: Option<usize>) {
        self.pointed.point(page, frame).expect("pointed");
    }
}

// ---- what a READ finds

#[derive(Default)]
struct Checks {
    passed: u32,
    failed: u32,
}

impl Checks {
    fn check(&mut self, is_good: bool, what: &str) {
        if is_good {
            self.passed += 1
        } else {
            self.failed += 1
        }
        println!("{}  {what}", if is_good { "ok  " } else { "FAIL" });
    }
}

fn nothing_else_changes(checks: &mut Checks, address: &str) {
    const PAGES: usize = 700;
    let (near, far) = joined(address);
    let reader = Reader::new(near);
    let window = Window::new(&far, PAGES, 8).expect("the RNIC follows a window");
    let of = |page| reader.word_of(&*window.region, page);
    (0..8).for_each(|frame| fill(&window.frames, frame, frame as u64 + 1));
    checks
        .check([0, 255, 256, PAGES - 1].iter().all(|page| of(*page) == Some(MAGIC)), "a new window is magic");
    window.point(PAGES - 1, Some(2));
    window.point(300, Some(7));
    checks.check(
        of(PAGES - 1) == Some(3) && of(300) == Some(8),
        "a page that was promoted is its frame, with no registration in between",
    );
    checks.check(of(299) == Some(MAGIC) && of(301) == Some(MAGIC), "its neighbours are magic");
    fill(&window.frames, 7, 99);
    checks.check(of(300) == Some(99), "what is written to the frame afterwards is read");
    window.point(300, None);
    checks.check(of(300) == Some(MAGIC), "a page that was evicted is magic");
    window.point(300, Some(4));
    checks.check(of(300) == Some(5), "it comes back in another frame");
    window.point(300, Some(5));
    checks.check(of(300) == Some(6), "and moves to a third without having been gone");
    let first = window.point_all();
    checks.check(
        (0..PAGES).all(|page| of(page) == Some(page as u64 % 8 + first)),
        "all pages are shown: each is its own frame",
    );
    (0..PAGES).for_each(|page| window.point(page, None));
    checks.check((0..PAGES).all(|page| of(page) == Some(MAGIC)), "all are gone: each is magic");
    window.pointed.close();
    checks.check(
        reader.read(&*window.region, 3) != WcStatus::Success,
        "a window that was taken away fails READs and brings nothing",
    );
}

impl Window {
    /// Points every page at a frame, round robin, and returns the word of the first frame.
    fn point_all(&self) -> u64 {
        let frames = self.frames.len() / PAGE_SIZE;
        (0..frames).for_each(|frame| fill(&self.frames, frame, frame as u64 + 1));
        let pages = self.region.memory().len() / PAGE_SIZE;
        (0..pages).for_each(|page| self.point(page, Some(page % frames)));
        1
    }
}

/// A thread evicts and promotes as a server does: a frame is filled for another page as soon as its old page is gone. READs find words of the page
/// that they name, or magic, and nothing else.
fn everything_changes(checks: &mut Checks, address: &str) {
    const PAGES: usize = 64;
    const FRAMES: usize = 24;
    const READS: usize = 4000;
    let (near, far) = joined(address);
    let reader = Reader::new(near);
    let window = Window::new(&far, PAGES, FRAMES).expect("the RNIC follows a window");
    let (is_over, turns) = (AtomicBool::new(false), AtomicU64::new(0));
    let (mut whole, mut gone, mut mixed, mut foreign) = (0, 0, 0, 0);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let random = SeededRandom::new(7);
            let mut holds: Vec<Option<usize>> = vec![None; FRAMES];
            while !is_over.load(Ordering::Relaxed) {
                let frame = (random.next_u64() % FRAMES as u64) as usize;
                if let Some(page) = holds[frame].take() {
                    window.point(page, None);
                }
                // From here on the frame belongs to another page.
                fill(&window.frames, frame, u64::MAX);
                let page = (random.next_u64() % PAGES as u64) as usize;
                if !holds.contains(&Some(page)) {
                    let turn = turns.fetch_add(1, Ordering::Relaxed);
                    fill(&window.frames, frame, (page as u64) << 32 | (turn & 0xffff_ffff));
                    window.point(page, Some(frame));
                    holds[frame] = Some(page);
                }
            }
        });
        let random = SeededRandom::new(8);
        for _ in 0..READS {
            let page = (random.next_u64() % PAGES as u64) as usize;
            assert_eq!(reader.read(&*window.region, page), WcStatus::Success);
            let words = reader.words();
            let is_magic = words.iter().filter(|word| **word == MAGIC).count();
            foreign += words.iter().filter(|word| **word != MAGIC && **word >> 32 != page as u64).count();
            match is_magic {
                0 => whole += 1,
                count if count == words.len() => gone += 1,
                _ => mixed += 1,
            }
        }
        is_over.store(true, Ordering::Relaxed);
    });
    println!(
        "      {READS} READs of {PAGES} pages in {FRAMES} frames while {} were promoted: {whole} the page, {gone} magic, {mixed} some of both, {foreign} \
         words of anything else",
        turns.load(Ordering::Relaxed)
    );
    checks.check(
        foreign == 0,
        "under concurrent READs no word of another page, or of a frame that was given away",
    );
    checks.check(whole > READS / 20 && gone > READS / 20, "and READs met both");
}

// ---- what it costs

/// The times of the rounds.
struct Times(Vec<f64>);

impl Times {
    fn report(mut self, what: &str, unit: &str) {
        self.0.sort_by(f64::total_cmp);
        let at = |place: usize| self.0[place];
        println!(
            "{what:62} {:10.2} {unit} ({:.2} to {:.2})",
            at(self.0.len() / 2),
            at(0),
            at(self.0.len() - 1)
        );
    }
}

fn us_each(count: usize, mut each: impl FnMut(usize)) -> f64 {
    let start = Instant::now();
    (0..count).for_each(&mut each);
    start.elapsed().as_secs_f64() * 1e6 / count as f64
}

/// Runs all measurements in turn, so that other work of the machine slows each of them alike.
fn in_turn(what: &mut [(&str, &str, &mut dyn FnMut() -> f64)]) {
    let mut times: Vec<Vec<f64>> = what.iter().map(|_| Vec::new()).collect();
    for _ in 0..ROUNDS {
        for (one, times) in what.iter_mut().zip(&mut times) {
            times.push((one.2)());
        }
    }
    for (one, times) in what.iter().zip(times) {
        Times(times).report(one.0, one.1);
    }
}

fn measure(address: &str) {
    let (near, far) = joined(address);
    let reader = Reader::new(near);
    registering(&far);
    reading(&far, &reader);
    pointing(&far, &reader);
}

fn registering(far: &Side) {
    const BYTES: usize = 1 << 30;
    let frames = Arc::new(SharedMemory::new("frames", BYTES).expect("memory"));
    (0..BYTES).step_by(PAGE_SIZE).for_each(|at| frames.write(at, &[1]));
    let ms = |memory: &Arc<SharedMemory>| {
        let start = Instant::now();
        let region = far.pd.register(memory.clone(), READABLE).expect("register");
        let took = start.elapsed().as_secs_f64() * 1e3;
        drop(region);
        took
    };
    let window = || PointedMemory::new(frames.clone(), BYTES / PAGE_SIZE, &magic_page()).expect("a window");
    let page = Arc::new(SharedMemory::new("frames", PAGE_SIZE).expect("memory"));
    let small = PointedMemory::new(frames.clone(), 1, &magic_page()).expect("a window");
    in_turn(&mut [
        ("register a page, pinned", "us", &mut || ms(&page) * 1e3),
        ("register a window of a page", "us", &mut || ms(small.memory()) * 1e3),
        ("register 1 GiB, pinned, its pages in memory", "ms", &mut || ms(&frames)),
        ("register a window of 1 GiB, all pages gone", "ms", &mut || ms(window().memory())),
        ("make that window", "ms", &mut || us_each(1, |_| drop(window())) / 1e3),
    ]);
}

fn reading(far: &Side, reader: &Reader) {
    const PAGES: usize = 64;
    const READS: usize = 300;
    let window = Window::new(far, PAGES, PAGES).expect("the RNIC follows a window");
    let pinned = far.pd.register(window.frames.clone(), READABLE).expect("register");
    window.point_all();
    let read = |region: &dyn MemoryRegion, page: usize| {
        assert_eq!(reader.read(region, page % PAGES), WcStatus::Success);
    };
    (0..PAGES).for_each(|page| read(&*window.region, page));
    let first = || {
        let mut took = 0.0;
        for page in 0..PAGES {
            window.point(page, None);
            window.point(page, Some(page));
            took += us_each(1, |_| read(&*window.region, page));
        }
        took / PAGES as f64
    };
    in_turn(&mut [
        ("READ 4 KiB, pinned", "us", &mut || us_each(READS, |page| read(&*pinned, page))),
        ("READ 4 KiB, window", "us", &mut || us_each(READS, |page| read(&*window.region, page))),
        ("READ 4 KiB, window, the first since the page was shown", "us", &mut || first()),
    ]);
}

fn pointing(far: &Side, reader: &Reader) {
    const PAGES: usize = 8192;
    let make = || {
        let frames = Arc::new(SharedMemory::new("frames", PAGES * PAGE_SIZE).expect("memory"));
        (0..PAGES).for_each(|frame| fill(&frames, frame, frame as u64));
        PointedMemory::new(frames, PAGES, &magic_page()).expect("a window")
    };
    // Every other page, so that no run is joined with its neighbour.
    let every_other = |window: &PointedMemory, show: bool| {
        us_each(PAGES / 2, |page| {
            window.point(2 * page, show.then_some(PAGES - 1 - page)).expect("pointed");
        })
    };
    let (alone, followed) = (make(), make());
    let region = far.pd.register(followed.memory().clone(), READABLE).expect("register");
    let touch =
        || (0..PAGES / 2).for_each(|page| assert_eq!(reader.read(&*region, 2 * page), WcStatus::Success));
    in_turn(&mut [
        ("show a page, no RNIC", "us", &mut || every_other(&alone, true)),
        ("hide a page, no RNIC", "us", &mut || every_other(&alone, false)),
        ("show a page, registered", "us", &mut || every_other(&followed, true)),
        ("hide a page, registered, READ since it was shown", "us", &mut || {
            touch();
            every_other(&followed, false)
        }),
    ]);
    println!("runs of a process: vm.max_map_count lets a window show {} pages at once", alone.room());
}

fn main() {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    match arguments.iter().map(String::as_str).collect::<Vec<_>>()[..] {
        ["check", address] => {
            let mut checks = Checks::default();
            nothing_else_changes(&mut checks, address);
            everything_changes(&mut checks, address);
            println!("{} passed, {} failed", checks.passed, checks.failed);
            std::process::exit(i32::from(checks.failed > 0));
        }
        ["measure", address] => measure(address),
        _ => {
            eprintln!("usage: odp_window check|measure ADDRESS");
            std::process::exit(2);
        }
    }
}
