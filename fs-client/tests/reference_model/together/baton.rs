//! Several blocking calls under way at once, in an order that the caller chooses.
//!
//! A client's call blocks its thread: it waits for its link, and in a simulation this wait drives the world. So each of several calls gets a thread
//! of its own, and all threads share one baton: only the thread that has the baton runs. A job gives the baton back where it would drive the world
//! (`sim::set_pump`), and at its end. Then `choose` decides which job has it next. So everything happens in one order, as in one thread, and the
//! caller decides the order.
//!
//! # Failure
//! If a job panics, `run` panics with the same payload, and the other jobs unwind where they wait. If `choose` panics, all jobs unwind so.

use cuttlefs_common::rdma::sim;
use std::panic::resume_unwind;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread::{self, ScopedJoinHandle};

/// One call, or several in a row.
pub type Job<'j, T> = Box<dyn FnOnce() -> T + Send + 'j>;

/// The payload with which a job unwinds that will not get the baton any more.
struct Forsaken;

/// A job under way.
struct Player<'s, T> {
    /// Gives the baton to the job.
    turn: Sender<()>,
    /// A message here gives the baton back. The channel closes when the job has ended.
    back: Receiver<()>,
    thread: Option<ScopedJoinHandle<'s, T>>,
    result: Option<T>,
}

/// Runs `jobs` until all have ended, and returns their results. `choose` gets the indices of the jobs that have not ended, and returns the one that
/// has the baton next; or `None`, after it has done something else itself.
pub fn run<T: Send>(jobs: Vec<Job<'_, T>>, mut choose: impl FnMut(&[usize]) -> Option<usize>) -> Vec<T> {
    thread::scope(|scope| {
        // Dropped before the scope waits for its threads, also when this thread unwinds. Then the jobs lose their channels and unwind, too.
        let mut players: Vec<Player<'_, T>> = Vec::new();
        for job in jobs {
            let ((turn, my_turn), (give, back)) = (channel(), channel());
            let thread = Some(scope.spawn(move || play(job, my_turn, give)));
            players.push(Player { turn, back, thread, result: None });
        }
        loop {
            let open: Vec<usize> = (0..players.len()).filter(|job| players[*job].result.is_none()).collect();
            if open.is_empty() {
                return players.into_iter().filter_map(|player| player.result).collect();
            }
            let Some(next) = choose(&open) else { continue };
            let player = &mut players[next];
            // If either fails the thread has ended, and joining it gives its result or its panic.
            if player.turn.send(()).is_ok() && player.back.recv().is_ok() {
                continue;
            }
            let thread = player.thread.take().expect("a job ends once");
            player.result = Some(thread.join().unwrap_or_else(|payload| resume_unwind(payload)));
        }
    })
}

fn play<T>(job: Job<'_, T>, my_turn: Receiver<()>, give: Sender<()>) -> T {
    let wait = move || {
        if my_turn.recv().is_err() {
            resume_unwind(Box::new(Forsaken));
        }
    };
    wait();
    sim::set_pump(move || {
        // If this fails, `wait` fails too.
        let _ = give.send(());
        wait();
        true
    });
    let result = job();
    sim::clear_pump();
    result
}

#[test]
fn one_runs_at_a_time_in_the_order_that_was_chosen() {
    use std::sync::Mutex;
    let log = Mutex::new(Vec::new());
    let job = |name: usize| -> Job<'_, usize> {
        let log = &log;
        Box::new(move || {
            for step in 0..3 {
                log.lock().expect("no panics").push((name, step));
                sim::pump();
            }
            name
        })
    };
    let mut order = [1, 1, 0, 1, 0, 1, 0, 0].into_iter();
    let results = run(vec![job(0), job(1)], |open| {
        let next = order.next().expect("as many turns as the jobs take");
        assert!(open.contains(&next));
        Some(next)
    });
    assert_eq!(results, [0, 1]);
    let expected = [(1, 0), (1, 1), (0, 0), (1, 2), (0, 1), (0, 2)];
    assert_eq!(*log.lock().expect("no panics"), expected);
}

#[test]
fn who_panics_ends_the_others_where_they_wait() {
    use std::panic::{AssertUnwindSafe, catch_unwind};
    use std::sync::atomic::{AtomicBool, Ordering};
    struct Dropped<'d>(&'d AtomicBool);
    impl Drop for Dropped<'_> {
        fn drop(&mut self) {
            self.0.store(true, Ordering::SeqCst);
        }
    }
    let dropped = AtomicBool::new(false);
    let waits: Job<'_, ()> = Box::new(|| {
        let _it = Dropped(&dropped);
        loop {
            sim::pump();
        }
    });
    let panics: Job<'_, ()> = Box::new(|| resume_unwind(Box::new("it")));
    let mut order = [0, 0, 1].into_iter();
    let ran = catch_unwind(AssertUnwindSafe(|| run(vec![waits, panics], |_| order.next())));
    assert_eq!(ran.expect_err("it panicked").downcast_ref::<&str>(), Some(&"it"));
    assert!(dropped.load(Ordering::SeqCst));
}
