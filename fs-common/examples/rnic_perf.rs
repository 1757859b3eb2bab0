//! The measurements of perftest's ib_*_bw and ib_*_lat, through this library instead of libibverbs: scripts/vm/perftest.sh runs both.
//!
//! `rnic_perf serve rdma://ADDRESS:PORT` answers one client after another until standard input ends.
//! `rnic_perf TEST BYTES ITERATIONS rdma://ADDRESS:PORT` prints what it measured in one line. TEST is `read_bw`, `write_bw`, `send_bw` (MiB a
//! second), `read_lat`, `write_lat` or `send_lat` (median, 99 in 100, 999 in 1000, in microseconds; of a WRITE and a SEND half of there and back).
//!
//! As in perftest, 128 requests are under way, posted one by one, with a completion for every hundredth; a side that has something to do next polls and
//! does not sleep, and one that only serves READs and WRITEs sleeps; and a WRITE is noticed by its last byte in memory.

use cuttlefs_common::ids::Rkey;
use cuttlefs_common::memory::SharedMemory;
use cuttlefs_common::rdma::soft::TcpSecurity;
use cuttlefs_common::rdma::verbs_provider::VerbsDevice;
use cuttlefs_common::rdma::{
    Access, Completion, CompletionKind, CompletionQueue, ConnectOptions, Device, Endpoint, MemoryRegion,
    QpConfig, QueuePair, RecvWr, Remote, SendOp, SendWr, WcStatus, WrId,
};
use std::io::Read;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

/// Requests under way (perftest's --tx-depth).
const DEPTH: u32 = 128;
/// Posted receives (perftest's --rx-depth).
const RECEIVES: u32 = 512;
/// Requests for each completion (perftest's --cq-mod).
const COMPLETION_EVERY: u64 = 100;
/// Largest transfer.
const BUFFER_BYTES: u64 = 1 << 20;
/// Offset of the words that both sides exchange about a test, behind the buffers.
const WORDS_AT: u64 = 2 * BUFFER_BYTES;
const WORDS_BYTES: u32 = 64;
/// Longest WRITEs and SENDs that are copied when they are posted, where latency is measured (perftest's --inline_size: 220 for WRITEs, 236 for SENDs).
const INLINE_OF_LATENCY: u32 = 220;
/// Longest wait for anything.
const PATIENCE: Duration = Duration::from_secs(120);

/// Looks at the clock seldom: in a virtual machine without KVM that takes longer than a request.
struct Patience {
    asked: u32,
    since: Option<Instant>,
}

impl Patience {
    const ASKED_BETWEEN: u32 = 4096;

    fn new() -> Self {
        Self { asked: 0, since: None }
    }

    #[inline(always)]
    fn is_over(&mut self) -> bool {
        self.asked += 1;
        self.asked.is_multiple_of(Self::ASKED_BETWEEN)
            && Self::is_long_ago(*self.since.get_or_insert_with(Instant::now))
    }

    #[cold]
    fn is_long_ago(since: Instant) -> bool {
        since.elapsed() > PATIENCE
    }
}

type Failure = Box<dyn std::error::Error>;

#[cold]
fn failed(completion: &Completion) -> Failure {
    format!("a request failed: {completion:?}").into()
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Verb {
    Read,
    Write,
    Send,
}

/// A measurement, as client and server name it to each other.
#[derive(Clone, Copy)]
struct Test {
    verb: Verb,
    is_latency: bool,
    len: u32,
    iterations: u64,
}

impl Test {
    fn named(name: &str, len: u32, iterations: u64) -> Option<Self> {
        let (verb, what) = name.split_once('_')?;
        let verb = match verb {
            "read" => Verb::Read,
            "write" => Verb::Write,
            "send" => Verb::Send,
            _ => return None,
        };
        let is_latency = match what {
            "lat" => true,
            "bw" => false,
            _ => return None,
        };
        let fits = (1..=BUFFER_BYTES).contains(&u64::from(len)) && iterations > 0;
        fits.then_some(Self { verb, is_latency, len, iterations })
    }

    /// Requests of a latency test: one more than are measured.
    fn exchanges(self) -> u64 {
        self.iterations.saturating_add(self.is_latency.into())
    }

    fn words(self) -> [u64; 4] {
        [self.verb as u64, u64::from(self.is_latency), u64::from(self.len), self.iterations]
    }

    fn of_words([verb, is_latency, len, iterations]: [u64; 4]) -> Option<Self> {
        let verb = [Verb::Read, Verb::Write, Verb::Send].into_iter().find(|known| *known as u64 == verb)?;
        let len = u32::try_from(len).ok().filter(|len| u64::from(*len) <= BUFFER_BYTES)?;
        Some(Self { verb, is_latency: is_latency == 1, len, iterations })
    }
}

/// One side of a connection. Bytes that it sends lie at 0, bytes that it receives at `BUFFER_BYTES`.
struct Side {
    cq: Arc<dyn CompletionQueue>,
    mr: Arc<dyn MemoryRegion>,
    qp: Arc<dyn QueuePair>,
    out: Vec<Completion>,
    /// Completions that `wait_for` has polled and not returned yet, by kind.
    came: [u64; CompletionKind::Invalidate as usize + 1],
}

impl Side {
    fn new(cq: Arc<dyn CompletionQueue>, mr: Arc<dyn MemoryRegion>, qp: Arc<dyn QueuePair>) -> Self {
        Self { cq, mr, qp, out: Vec::new(), came: Default::default() }
    }

    fn words_receive(mr: &Arc<dyn MemoryRegion>) -> RecvWr {
        RecvWr { wr_id: WrId(0), local: mr.sge(WORDS_AT, WORDS_BYTES).into() }
    }

    /// Waits for completions of this kind, and returns how many there are: at least one. Completions of other kinds are kept. Polls all the time, and
    /// does not pause the processor in between, as perftest does not: without KVM, each pause leaves the emulated processor.
    #[inline(always)]
    fn wait_for(&mut self, kind: CompletionKind) -> Result<u64, Failure> {
        self.wait_with(kind, |_| {})
    }

    #[inline(always)]
    fn wait_with(
        &mut self,
        kind: CompletionKind,
        pause: impl Fn(&dyn CompletionQueue),
    ) -> Result<u64, Failure> {
        let mut patience = Patience::new();
        let Self { cq, out, came, .. } = self;
        let cq = &**cq;
        while came[kind as usize] == 0 {
            while cq.poll(out, 16) == 0 {
                if patience.is_over() {
                    return Err("no completion came".into());
                }
                pause(cq);
            }
            for completion in out.iter() {
                if completion.status != WcStatus::Success {
                    return Err(failed(completion));
                }
                came[completion.kind as usize] += 1;
            }
            out.clear();
        }
        Ok(std::mem::take(&mut came[kind as usize]))
    }

    fn request(&self, op: SendOp, at: u64, len: u32, signaled: bool) -> [SendWr; 1] {
        [SendWr { wr_id: WrId(0), op, local: self.mr.sge(at, len).into(), signaled }]
    }

    fn post(&self, op: SendOp, at: u64, len: u32, signaled: bool) -> Result<(), Failure> {
        Ok(self.qp.post_send(&self.request(op, at, len, signaled))?)
    }

    fn post_receive(&self, len: u32) -> Result<(), Failure> {
        Ok(self.qp.post_recv(&[RecvWr { wr_id: WrId(0), local: self.mr.sge(BUFFER_BYTES, len).into() }])?)
    }

    /// Sends these words to the peer.
    fn tell(&mut self, words: &[u64]) -> Result<(), Failure> {
        let bytes: Vec<u8> = words.iter().flat_map(|word| word.to_le_bytes()).collect();
        let at = WORDS_AT + u64::from(WORDS_BYTES);
        self.mr.memory().write(at as usize, &bytes);
        self.post(SendOp::Send, at, bytes.len() as u32, true)?;
        self.wait_for(CompletionKind::Send)?;
        Ok(())
    }

    fn told<const N: usize>(&mut self) -> Result<[u64; N], Failure> {
        self.wait_for(CompletionKind::Recv)?;
        Ok(std::array::from_fn(|index| self.mr.memory().load_u64(WORDS_AT as usize + 8 * index)))
    }

    /// Waits for the peer's word that a test is over. Sleeps, as perftest's passive side does: where READs and WRITEs are the kernel's work, a side
    /// that polls takes the time for them.
    fn told_the_end(&mut self) -> Result<(), Failure> {
        self.wait_with(CompletionKind::Recv, |cq| cq.wait(Duration::from_secs(1)))?;
        Ok(())
    }

    /// Waits until the last byte that the peer writes has this value.
    fn wait_for_byte(&self, len: u32, wanted: u8) -> Result<(), Failure> {
        let last = self.mr.memory().atomic_u8((BUFFER_BYTES + u64::from(len) - 1) as usize);
        let mut patience = Patience::new();
        while last.load(Ordering::Acquire) != wanted {
            if patience.is_over() {
                return Err("the peer's WRITE did not come".into());
            }
        }
        Ok(())
    }

    /// Posts requests as fast as they complete. Returns the time from the first post to the last completion.
    fn stream(&mut self, test: Test, op: SendOp, kind: CompletionKind) -> Result<Duration, Failure> {
        let at = if kind == CompletionKind::Read { BUFFER_BYTES } else { 0 };
        // Made once, as perftest makes its requests.
        let [silent, signaled] = [false, true].map(|signaled| self.request(op, at, test.len, signaled));
        let (mut posted, mut done) = (0, 0);
        let start = Instant::now();
        while done < test.iterations {
            while posted < test.iterations && posted - done < u64::from(DEPTH) {
                let is_last = posted + 1 == test.iterations || (posted + 1).is_multiple_of(COMPLETION_EVERY);
                self.qp.post_send(if is_last { &signaled } else { &silent })?;
                posted += 1;
            }
            // Each completion stands for all requests since the one before.
            for _ in 0..self.wait_for(kind)? {
                done = ((done / COMPLETION_EVERY + 1) * COMPLETION_EVERY).min(test.iterations);
            }
        }
        Ok(start.elapsed())
    }
}

fn device_parts(device: &VerbsDevice) -> Result<(Arc<dyn CompletionQueue>, Arc<SharedMemory>), Failure> {
    let len = WORDS_AT as usize + 4096;
    Ok((device.create_cq(DEPTH + RECEIVES)?, Arc::new(SharedMemory::new("perf", len)?)))
}

fn config(cq: &Arc<dyn CompletionQueue>, max_inline: u32) -> QpConfig {
    QpConfig::new(cq, DEPTH, RECEIVES).inline(max_inline)
}

/// The passive side of one test.
fn answer(side: &mut Side) -> Result<(), Failure> {
    let test = Test::of_words(side.told()?).ok_or("the client asks for an unknown test")?;
    let receives = test.exchanges().min(RECEIVES.into());
    if test.verb == Verb::Send {
        for _ in 0..receives {
            side.post_receive(test.len)?;
        }
    } else {
        // For the client's message that the test is over.
        side.qp.post_recv(&[Side::words_receive(&side.mr)])?;
    }
    side.tell(&[u64::from(side.mr.rkey().0)])?;
    match (test.verb, test.is_latency) {
        (Verb::Write, true) => {
            let theirs = Side::remote(side.told_rkey()?);
            side.qp.post_recv(&[Side::words_receive(&side.mr)])?;
            side.tell(&[1])?;
            let request = side.request(SendOp::Write(theirs), 0, test.len, true);
            for round in 0..test.exchanges() {
                side.wait_for_byte(test.len, mark(round))?;
                side.write_mark(test.len, round)?;
                side.qp.post_send(&request)?;
                side.wait_for(CompletionKind::Write)?;
            }
        }
        (Verb::Send, is_latency) => {
            let (mut got, mut posted) = (0, receives);
            let request = side.request(SendOp::Send, 0, test.len, true);
            while got < test.exchanges() {
                let now = side.wait_for(CompletionKind::Recv)?;
                got += now;
                for _ in 0..now.min(test.exchanges() - posted) {
                    side.post_receive(test.len)?;
                    posted += 1;
                }
                if is_latency {
                    side.qp.post_send(&request)?;
                    side.wait_for(CompletionKind::Send)?;
                }
            }
            side.qp.post_recv(&[Side::words_receive(&side.mr)])?;
        }
        _ => {}
    }
    side.told_the_end()
}

/// The last byte of the WRITE of a round, different from that of the round before.
fn mark(round: u64) -> u8 {
    (round % 250) as u8 + 1
}

impl Side {
    fn remote(rkey: u64) -> Remote {
        Remote::Memory { rkey: Rkey(rkey as u32), offset: BUFFER_BYTES }
    }

    fn told_rkey(&mut self) -> Result<u64, Failure> {
        Ok(self.told::<1>()?[0])
    }

    fn write_mark(&self, len: u32, round: u64) -> Result<(), Failure> {
        self.mr.memory().atomic_u8(len as usize - 1).store(mark(round), Ordering::Release);
        Ok(())
    }
}

fn serve(endpoint: &Endpoint) -> Result<(), Failure> {
    let device = VerbsDevice::to_listen(endpoint, TcpSecurity::Insecure)?;
    let pd = device.alloc_pd()?;
    let listener = pd.listen(endpoint)?;
    std::thread::spawn(|| {
        // The server runs until standard input ends. A read error is an end, too.
        let _ = std::io::stdin().read_to_end(&mut Vec::new());
        std::process::exit(0);
    });
    println!("ready");
    loop {
        let (cq, memory) = device_parts(&device)?;
        let mr = pd.register(memory, Access::ALL)?;
        let receives = vec![Side::words_receive(&mr)];
        let qp = listener.accept()?.accept(config(&cq, INLINE_OF_LATENCY), receives)?;
        let mut side = Side::new(cq, mr, qp);
        // The failure of one client does not end the server.
        if let Err(error) = answer(&mut side) {
            eprintln!("a test failed: {error}");
        }
    }
}

/// Times of single exchanges, in nanoseconds: from each post to the next. As perftest does, it makes its request once, and reckons behind the last exchange.
/// It looks at the clock while a request is under way: perftest reads the processor's counter, which takes a tenth of the time.
fn exchanges(side: &mut Side, test: Test, theirs: Remote) -> Result<Vec<u64>, Failure> {
    let (op, at) = match test.verb {
        Verb::Read => (SendOp::Read(theirs), BUFFER_BYTES),
        Verb::Write => (SendOp::Write(theirs), 0),
        Verb::Send => (SendOp::Send, 0),
    };
    let request = side.request(op, at, test.len, true);
    let mut posts = Vec::with_capacity(test.iterations as usize + 1);
    let qp = side.qp.clone();
    let qp = &*qp;
    for round in 0..test.exchanges() {
        match test.verb {
            Verb::Write => side.write_mark(test.len, round)?,
            Verb::Send => side.post_receive(test.len)?,
            Verb::Read => {}
        }
        qp.post_send(&request)?;
        posts.push(Instant::now());
        match test.verb {
            Verb::Read => {
                side.wait_for(CompletionKind::Read)?;
            }
            Verb::Write => {
                // Before the peer's answer, as perftest does.
                side.wait_for(CompletionKind::Write)?;
                side.wait_for_byte(test.len, mark(round))?;
            }
            Verb::Send => {
                side.wait_for(CompletionKind::Recv)?;
                // It came before the answer, or comes now.
                side.wait_for(CompletionKind::Send)?;
            }
        }
    }
    let ways = if test.verb == Verb::Read { 1 } else { 2 };
    Ok(posts.windows(2).map(|pair| (pair[1] - pair[0]).as_nanos() as u64 / ways).collect())
}

fn run(test: Test, endpoint: &Endpoint) -> Result<(), Failure> {
    let device = VerbsDevice::to_connect(endpoint, TcpSecurity::Insecure)?;
    let pd = device.alloc_pd()?;
    let (cq, memory) = device_parts(&device)?;
    let mr = pd.register(memory, Access::ALL)?;
    let receives = vec![Side::words_receive(&mr)];
    let max_inline = if test.is_latency { INLINE_OF_LATENCY } else { 0 };
    let options = ConnectOptions { qp: config(&cq, max_inline), receives, timeout: PATIENCE };
    let qp = pd.connect(endpoint, options)?.qp;
    let mut side = Side::new(cq, mr, qp);
    side.tell(&test.words())?;
    let theirs = Side::remote(side.told_rkey()?);
    if (test.verb, test.is_latency) == (Verb::Write, true) {
        side.qp.post_recv(&[Side::words_receive(&side.mr)])?;
        side.tell(&[side.mr.rkey().0.into()])?;
        side.told::<1>()?;
    }
    if test.is_latency {
        let mut times = exchanges(&mut side, test, theirs)?;
        times.sort_unstable();
        let at = |part: f64| times[((times.len() - 1) as f64 * part) as usize] as f64 / 1000.0;
        println!("{:.2} {:.2} {:.2}", at(0.5), at(0.99), at(0.999));
    } else {
        let (op, kind) = match test.verb {
            Verb::Read => (SendOp::Read(theirs), CompletionKind::Read),
            Verb::Write => (SendOp::Write(theirs), CompletionKind::Write),
            Verb::Send => (SendOp::Send, CompletionKind::Send),
        };
        let time = side.stream(test, op, kind)?;
        let bytes = test.iterations * u64::from(test.len);
        println!("{:.3}", bytes as f64 / f64::from(1 << 20) / time.as_secs_f64());
    }
    // The peer hangs up when it has this, maybe before its RNIC has acknowledged it.
    let _ = side.tell(&[0]);
    Ok(())
}

fn main() -> Result<(), Failure> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
    match arguments[..] {
        ["serve", endpoint] => serve(&endpoint.parse()?),
        [name, len, iterations, endpoint] => {
            let test = Test::named(name, len.parse()?, iterations.parse()?);
            run(test.ok_or("no such test, or too large; the head of this file says which there are")?, &endpoint.parse()?)
        }
        _ => Err("usage: rnic_perf serve rdma://ADDRESS:PORT, or rnic_perf TEST BYTES ITERATIONS rdma://ADDRESS:PORT".into()),
    }
}
