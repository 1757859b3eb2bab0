//! The worker with threads, timers, a completion queue and a disk.

use super::*;
use crate::pool::{AlignedBuf, DATA_START, DataFiles, Disk, IoBuffer, IoKind, IoRequest};
use cuttlefs_common::ids::{PAGE_SIZE, QpNumber};
use cuttlefs_common::memory::SharedMemory;
use cuttlefs_common::rdma::{CompletionKind, WcStatus, WrId};
use cuttlefs_common::world::{ManualClock, SystemClock};
use parking_lot::Mutex;
use rustix::fd::{AsFd, BorrowedFd, OwnedFd};
use std::cell::RefCell;
use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc;
use std::task::{Poll, Waker};

const PATIENCE: Duration = Duration::from_secs(60);

fn worker() -> Worker {
    Worker::new(Vec::new(), None, Arc::new(SystemClock::new())).expect("a worker")
}

fn thread_cpu() -> Duration {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::ThreadCPUTime);
    Duration::new(time.tv_sec as u64, time.tv_nsec as u32)
}

#[test]
fn timers_fire_in_order_and_not_early() {
    let worker = worker();
    let fired = Rc::new(RefCell::new(Vec::new()));
    let spawner = worker.spawner();
    for millis in [30u64, 10, 20, 0, 10] {
        let (fired, spawner) = (fired.clone(), spawner.clone());
        worker.spawn_local(async move {
            let before = Instant::now();
            spawner.sleep(Duration::from_millis(millis)).await;
            assert!(before.elapsed() >= Duration::from_millis(millis));
            fired.borrow_mut().push(millis);
        });
    }
    let sleep = worker.sleep(Duration::from_millis(60));
    // The sleep is dropped before it ends, and leaves no entry in the timers.
    worker.spawn_local({
        let long = spawner.sleep(Duration::from_secs(3600));
        futures_lite::future::or(long, spawner.sleep(Duration::from_millis(5)))
    });
    worker.block_on(sleep).expect("it runs").expect("it was not stopped");
    assert_eq!(*fired.borrow(), [0, 10, 10, 20, 30]);
    assert_eq!(worker.next_deadline(), None);
}

#[test]
fn a_simulation_steps_by_hand_and_moves_the_clock() {
    let clock = Arc::new(ManualClock::default());
    let worker = Worker::new(Vec::new(), None, clock.clone()).expect("a worker");
    let log = Rc::new(RefCell::new(Vec::new()));
    for seconds in [5u64, 3] {
        let (log, spawner) = (log.clone(), worker.spawner());
        worker.spawn_local(async move {
            spawner.sleep(Duration::from_secs(seconds)).await;
            log.borrow_mut().push(spawner.now().as_secs());
        });
    }
    let step = || worker.step(&mut |_| {}).expect("no ring to fail");
    while step() {}
    assert!(log.borrow().is_empty());
    while let Some(next) = worker.next_deadline() {
        clock.advance(next - clock.monotonic());
        assert!(step());
        while step() {}
    }
    assert_eq!(*log.borrow(), [3, 5]);
}

#[test]
fn an_idle_worker_sleeps_and_a_stop_wakes_it() {
    let (to_main, from_worker) = mpsc::channel();
    let thread = std::thread::spawn(move || {
        let worker = worker();
        // A far timer and a task that never ends must not keep the worker awake either.
        worker.spawn_local(worker.spawner().sleep(Duration::from_secs(3600)));
        worker.spawn_local(std::future::pending());
        to_main.send(worker.handle()).expect("main waits");
        let before = thread_cpu();
        worker.run(|_| {}).expect("it runs");
        thread_cpu() - before
    });
    let handle = from_worker.recv().expect("a handle");
    std::thread::sleep(Duration::from_millis(500));
    handle.stop();
    let used = thread.join().expect("the worker ends");
    assert!(used < Duration::from_millis(10), "an idle worker used {used:?} of 500 ms");
}

#[test]
fn jobs_of_other_threads_run_and_the_queue_is_bounded() {
    let worker = worker();
    let handle = worker.handle();
    let done = Arc::new(AtomicU64::new(0));
    for _ in 0..INJECTION_DEPTH {
        let done = done.clone();
        let job: Job = Box::new(move |spawner| {
            spawner.spawn(async move {
                done.fetch_add(1, Ordering::Relaxed);
            });
        });
        handle.spawn(job).expect("there is room");
    }
    assert_eq!(handle.spawn(Box::new(|_| {})), Err(WorkerGone::Full));
    std::thread::scope(|scope| {
        let (stopper, done) = (handle.clone(), &done);
        scope.spawn(move || {
            let until = Instant::now() + PATIENCE;
            while done.load(Ordering::Relaxed) < INJECTION_DEPTH as u64 && Instant::now() < until {
                std::thread::yield_now();
            }
            stopper.stop();
        });
        worker.run(|_| {}).expect("it runs");
    });
    assert_eq!(done.load(Ordering::Relaxed), INJECTION_DEPTH as u64);
    drop(worker);
    assert_eq!(handle.spawn(Box::new(|_| {})), Err(WorkerGone::Ended));
}

#[test]
fn dropping_a_worker_drops_its_tasks() {
    struct Probe(Rc<RefCell<u32>>);
    impl Drop for Probe {
        fn drop(&mut self) {
            *self.0.borrow_mut() += 1;
        }
    }
    let dropped = Rc::new(RefCell::new(0));
    let worker = worker();
    let spawner = worker.spawner();
    for sleeping in [true, false] {
        let (probe, spawner) = (Probe(dropped.clone()), spawner.clone());
        worker.spawn_local(async move {
            let _probe = probe;
            if sleeping {
                spawner.sleep(PATIENCE).await;
            }
            std::future::pending::<()>().await;
        });
    }
    worker.step(&mut |_| {}).expect("no ring to fail");
    drop(worker);
    assert_eq!(*dropped.borrow(), 2);
    spawner.spawn(async { unreachable!("the worker is gone") });
    assert!(spawner.spawn_join(async {}).is_none());
}

/// A number that one thread sets and a task of another waits for.
#[derive(Default)]
struct Baton {
    value: AtomicU64,
    waker: Mutex<Option<Waker>>,
}

impl Baton {
    fn set(&self, value: u64) {
        self.value.store(value, Ordering::Release);
        if let Some(waker) = self.waker.lock().take() {
            waker.wake();
        }
    }

    async fn wait_for(&self, value: u64) {
        std::future::poll_fn(|context| {
            *self.waker.lock() = Some(context.waker().clone());
            match self.value.load(Ordering::Acquire) >= value {
                true => Poll::Ready(()),
                false => Poll::Pending,
            }
        })
        .await;
    }
}

/// Two workers hand a number back and forth. A lost wake-up would leave both asleep for ever. The test only demands that the number moves, because
/// the time for all rounds depends on the machine.
#[test]
fn no_wake_up_is_lost_in_30_000_round_trips() {
    const ROUNDS: u64 = 30_000;
    let (ping, pong) = (Arc::new(Baton::default()), Arc::new(Baton::default()));
    let progress = Arc::new(AtomicU64::new(0));
    let (finished, wait) = mpsc::channel();
    for first in [true, false] {
        let (ping, pong) = (ping.clone(), pong.clone());
        let (progress, finished) = (progress.clone(), finished.clone());
        std::thread::spawn(move || {
            let worker = worker();
            let spawner = worker.spawner();
            let play = async move {
                for round in 1..=ROUNDS {
                    if first {
                        ping.set(round);
                        pong.wait_for(round).await;
                        progress.store(round, Ordering::Relaxed);
                    } else {
                        ping.wait_for(round).await;
                        if round % 4096 == 0 {
                            // Long enough for the other worker to stop spinning and to sleep.
                            spawner.sleep(Duration::from_micros(300)).await;
                        } else if round % 4 == 0 {
                            // Delays the answer so that it also comes at every moment of the other worker's falling asleep.
                            let delay = Duration::from_nanos(round * 7919 % 40_000);
                            let began = Instant::now();
                            while began.elapsed() < delay {
                                std::hint::spin_loop();
                            }
                        }
                        pong.set(round);
                    }
                }
            };
            worker.block_on(play).expect("it runs").expect("it was not stopped");
            finished.send(()).expect("main waits");
        });
    }
    let (mut ended, mut seen) = (0, 0);
    while ended < 2 {
        match wait.recv_timeout(PATIENCE) {
            Ok(()) => ended += 1,
            Err(_) => {
                let now = progress.load(Ordering::Relaxed);
                assert!(now > seen, "stuck after {now} rounds");
                seen = now;
            }
        }
    }
}

/// A thread that never sleeps wakes the worker just as it falls asleep: the thread's delays sweep over the time for which a worker spins before that.
#[test]
fn no_wake_up_is_lost_at_the_edge_of_sleep() {
    const ROUNDS: u64 = 20_000;
    let (ball, returned) = (Arc::new(Baton::default()), Arc::new(AtomicU64::new(0)));
    let (theirs, answer) = (ball.clone(), returned.clone());
    std::thread::spawn(move || {
        let worker = worker();
        let play = async move {
            for round in 1..=ROUNDS {
                theirs.wait_for(round).await;
                answer.store(round, Ordering::Release);
            }
        };
        worker.block_on(play).expect("it runs");
    });
    for round in 1..=ROUNDS {
        ball.set(round);
        let set = Instant::now();
        while returned.load(Ordering::Acquire) < round {
            assert!(set.elapsed() < PATIENCE, "stuck in round {round}");
            // On a busy machine the worker may need the core of this thread.
            std::thread::yield_now();
        }
        let delay = Duration::from_nanos(round * 7919 % 26_000);
        let returned = Instant::now();
        while returned.elapsed() < delay {
            std::hint::spin_loop();
        }
    }
}

/// A completion queue like a software RNIC's, filled by another thread.
struct TestQueue {
    entries: Mutex<VecDeque<Completion>>,
    armed: AtomicBool,
    event: OwnedFd,
}

impl TestQueue {
    fn push(&self, completion: Completion) {
        self.entries.lock().push_back(completion);
        if self.armed.swap(false, Ordering::SeqCst) {
            rustix::io::write(&self.event, &1u64.to_ne_bytes()).expect("eventfd");
        }
    }
}

impl CompletionQueue for TestQueue {
    fn poll(&self, out: &mut Vec<Completion>, max: usize) -> usize {
        let mut entries = self.entries.lock();
        let count = max.min(entries.len());
        out.extend(entries.drain(..count));
        count
    }

    fn arm(&self) -> bool {
        self.armed.store(true, Ordering::SeqCst);
        self.entries.lock().is_empty()
    }

    fn event_fd(&self) -> BorrowedFd<'_> {
        self.event.as_fd()
    }

    fn take_event(&self) {
        let _ = rustix::io::read(&self.event, &mut [0; 8]);
    }

    fn wait(&self, _timeout: Duration) {
        unreachable!("a worker never blocks on one source");
    }
}

#[test]
fn completions_reach_the_callback_in_order_also_when_it_sleeps() {
    const COUNT: u64 = 20_000;
    let flags = rustix::event::EventfdFlags::NONBLOCK;
    let queue = Arc::new(TestQueue {
        entries: Mutex::default(),
        armed: AtomicBool::new(false),
        event: rustix::event::eventfd(0, flags).expect("eventfd"),
    });
    let (finished, wait) = mpsc::channel();
    let cq = queue.clone();
    std::thread::spawn(move || {
        let worker = Worker::new(vec![cq], None, Arc::new(SystemClock::new())).expect("a worker");
        let (handle, mut next) = (worker.handle(), 0);
        let ran = worker.run(|(_, completion)| {
            assert_eq!(completion.wr_id, WrId(next));
            next += 1;
            if next == COUNT {
                handle.stop();
            }
        });
        finished.send(ran.is_ok()).expect("main waits");
    });
    for number in 0..COUNT {
        queue.push(Completion {
            wr_id: WrId(number),
            qp: QpNumber(1),
            kind: CompletionKind::Recv,
            status: WcStatus::Success,
            byte_len: 0,
            imm: None,
            absent: false,
        });
        if number % 100 == 0 {
            // Sometimes long enough for the worker to sleep.
            std::thread::sleep(Duration::from_micros(number % 700));
        }
    }
    assert_eq!(wait.recv_timeout(PATIENCE), Ok(true));
}

#[test]
fn tasks_wait_for_the_disk_while_the_worker_sleeps() {
    let dir = tempfile::tempdir().expect("a temporary directory");
    let file = std::fs::File::create_new(dir.path().join("data")).expect("a new file");
    file.set_len(DATA_START + 64 * PAGE_SIZE as u64).expect("its length");
    drop(file);
    let options = std::fs::OpenOptions::new().read(true).write(true).clone();
    let mut files = DataFiles::new();
    files.push("data".into(), options.open(dir.path().join("data")).expect("open"), 64, false);
    let frames = Arc::new(SharedMemory::new("frames", 4 * PAGE_SIZE).expect("memfd"));
    let disk = Rc::new(UringDisk::new(Arc::new(files), frames).expect("io_uring"));
    let worker = Worker::new(Vec::new(), Some(disk.clone()), Arc::new(SystemClock::new())).expect("a worker");
    let done = Rc::new(RefCell::new(0u32));
    let spawner = worker.spawner();
    let all = async move {
        let mut tasks = Vec::new();
        for task in 0..32u64 {
            let (disk, done) = (disk.clone(), done.clone());
            tasks.extend(spawner.spawn_join(async move {
                for round in 0..50u64 {
                    let offset = (task * 2 + round % 2) * PAGE_SIZE as u64;
                    let mut buffer = AlignedBuf::zeroed(PAGE_SIZE);
                    buffer.as_mut_slice().fill((task + round) as u8);
                    let write = IoRequest { kind: IoKind::Write, offset, buffer: IoBuffer::Owned(buffer) };
                    disk.submit(vec![write]).await.remove(0).result.expect("written");
                    if round % 25 == 0 {
                        disk.sync().await.expect("synced");
                    }
                    let buffer = IoBuffer::Owned(AlignedBuf::zeroed(PAGE_SIZE));
                    let read = IoRequest { kind: IoKind::Read, offset, buffer };
                    let read = disk.submit(vec![read]).await.remove(0);
                    read.result.expect("read");
                    let IoBuffer::Owned(buffer) = read.buffer else { panic!("another buffer came back") };
                    assert!(buffer.as_slice().iter().all(|byte| *byte == (task + round) as u8));
                    *done.borrow_mut() += 1;
                }
            }));
        }
        for task in tasks {
            task.await;
        }
        *done.borrow()
    };
    let done = worker.block_on(all).expect("it runs");
    assert_eq!(done, Some(32 * 50));
}

#[test]
fn what_was_running_at_a_stop_ends_before_the_end() {
    let worker = Worker::new(Vec::new(), None, Arc::new(SystemClock::new())).expect("worker");
    let lock = Rc::new(async_lock::Mutex::new(0));
    let (holder, sleep) = (lock.clone(), worker.sleep(Duration::from_millis(30)));
    let handle = worker.handle();
    worker.spawn_local(async move {
        let mut held = holder.lock().await;
        handle.stop();
        sleep.await;
        *held = 1;
    });
    worker.run(|_| {}).expect("run");
    assert!(lock.try_lock().is_none(), "stopped with the lock held");
    let after = worker.finish(async move { *lock.lock().await });
    assert_eq!(after.expect("finish"), 1);
}

/// Without a hook that ends the process first, a panic reaches the caller that drives the worker, also from tasks that nobody awaits.
#[test]
fn a_task_that_panics_takes_its_worker_with_it() {
    let panics = || std::panic::panic_any("a broken invariant");
    let of_run = std::panic::catch_unwind(|| {
        let worker = worker();
        worker.spawn_local(async move { panics() });
        worker.run(|_| {})
    });
    assert_eq!(of_run.expect_err("it panics").downcast_ref(), Some(&"a broken invariant"));
    let of_step = std::panic::catch_unwind(|| {
        let worker = worker();
        let joined = worker.spawner().spawn_join(async move { panics() });
        drop(joined);
        worker.spawner().spawn(async move {
            futures_lite::future::yield_now().await;
            panics();
        });
        while worker.step(&mut |_| {}).expect("no ring to fail") {}
    });
    assert!(of_step.is_err());
    let asleep = std::panic::catch_unwind(|| {
        let worker = worker();
        let sleep = worker.sleep(Duration::from_millis(20));
        worker.spawn_local(async move {
            sleep.await;
            panics();
        });
        worker.run(|_| {})
    });
    assert!(asleep.is_err());
}

/// A thousand tasks of one peer are always ready. Another peer's single task runs after each poll of one of them.
#[test]
fn a_crowd_of_one_peers_tasks_keeps_others_waiting_for_one_poll() {
    let worker = worker();
    let polls = Rc::new(RefCell::new((0, 0)));
    let spawner = worker.spawner();
    for _ in 0..1000 {
        let polls = polls.clone();
        spawner.spawn_for(Payer(1), async move {
            loop {
                polls.borrow_mut().0 += 1;
                futures_lite::future::yield_now().await;
            }
        });
    }
    let seen = polls.clone();
    spawner.spawn_for(Payer(2), async move {
        for _ in 0..100 {
            seen.borrow_mut().1 += 1;
            futures_lite::future::yield_now().await;
        }
    });
    while polls.borrow().1 < 100 {
        assert!(worker.step(&mut |_| {}).expect("no ring"));
    }
    assert!(polls.borrow().0 <= 101, "{} polls of the crowd between 100 of the other", polls.borrow().0);
}

/// Tasks that are woken during a long poll of another peer's task run before that peer's next task.
#[test]
fn who_waits_for_a_long_poll_is_owed_it() {
    let worker = worker();
    let order = Rc::new(RefCell::new(Vec::new()));
    let spawner = worker.spawner();
    let note = |number| {
        let order = order.clone();
        async move { order.borrow_mut().push(number) }
    };
    let (long, late) = (worker.spawner(), [note(10), note(11), note(12)]);
    let next = note(2);
    spawner.spawn_for(Payer(1), async move {
        long.spawn_for(Payer(1), next);
        late.into_iter().for_each(|task| long.spawn_for(Payer(2), task));
        std::thread::sleep(Duration::from_millis(20));
    });
    worker.block_on(worker.sleep(Duration::from_millis(1))).expect("no ring");
    assert_eq!(*order.borrow(), [10, 11, 12, 2]);
}
