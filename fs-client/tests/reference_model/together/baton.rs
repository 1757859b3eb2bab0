//! Several blocking calls under way at once, in an order that the caller chooses.
//!
//! A client's call blocks its thread: it waits for its link, and in a simulation the waiting drives the world. For several calls
//! to be under way each gets a thread of its own, and all of them one baton: exactly one thread runs, the one that has it.
//! A job gives it back where it would drive the world (`sim::set_pump`), and when it is done; who has it next is for `choose` to
//! say. So there is one order of everything, as if it were one thread, and it is the caller's.
//!
//! # Failure
//! A job that panics makes `run` panic with the same payload, and the other jobs unwind where they wait. The same happens to
//! all of them when `choose` panics.

use cuttlefs_common::rdma::sim;
use std::panic::resume_unwind;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread::{self, ScopedJoinHandle};

/// A call, or several after each other.
pub type Job<'j, T> = Box<dyn FnOnce() -> T + Send + 'j>;

/// What unwinds out of a job that nobody will give the baton to any more.
struct Forsaken;

/// A job under way, as seen by whoever gives it the baton.
struct Player<'s, T> {
    /// Gives it the baton.
    turn: Sender<()>,
    /// It gives the baton back; it is done when this ends.
    back: Receiver<()>,
    thread: Option<ScopedJoinHandle<'s, T>>,
    result: Option<T>,
}

/// Runs `jobs` until all are done. `choose` is told which are not, and says which of them has the baton next; or none, after
/// it did something else itself.
pub fn run<T: Send>(jobs: Vec<Job<'_, T>>, mut choose: impl FnMut(&[usize]) -> Option<usize>) -> Vec<T> {
    thread::scope(|scope| {
        // Dropped before the scope waits for its threads, also when this unwinds: they unwind then, too.
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
            // An error of either: its thread has ended, and joining it says how.
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
        // If it fails the turn does, too.
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
