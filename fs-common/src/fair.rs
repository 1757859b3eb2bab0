//! Turns by time: the choice of a thread's next work when several peers have some.
//!
//! # How it works
//! Work waits in a queue for each payer, in the order it came. A payer has an account of the time that was spent on its work;
//! the next piece is that of the payer with the smallest account. So a payer with little work is served as soon as the piece in
//! hand is done, however much work of other payers waits, and payers with more work than there is time get equal parts of the
//! time. A thread with one payer does that payer's pieces in order.
//!
//! A payer that has had no work for a while starts with the account of the payer that was served last: idle time is not saved
//! up. A payer with a larger account owes the difference. Time that was spent while no other payer had work is not owed.
//!
//! # Invariants
//! * A payer is in `order` while it has work and only then.
//! * An idle payer costs nothing: an account that is ahead of no other is forgotten.
//!
//! # Bounds
//! The maker of a piece bounds it. A piece is not interrupted, so it has to be short: long work is divided into turns (a bounded number of packets in
//! the NIC engine, yields in requests).

use std::collections::{BTreeSet, HashMap, VecDeque};
use std::time::Duration;

/// In whose name work is done.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Payer(pub u64);

impl Payer {
    /// The program itself.
    pub const OWN: Self = Self(0);
}

/// The least cost of a piece: a clock may not move between two readings, and many short pieces must be paid for, too.
const LEAST_NS: u64 = 100;
/// Idle accounts that may be kept before `forget_even` looks through them.
const IDLE_MAX: usize = 64;

#[derive(Debug)]
struct Account<T> {
    spent_ns: u64,
    work: VecDeque<T>,
}

/// Work of several payers.
#[derive(Debug)]
pub struct FairQueue<T> {
    accounts: HashMap<Payer, Account<T>>,
    /// Payers with work, ordered by the time spent on them.
    order: BTreeSet<(u64, Payer)>,
    /// The account of the payer that was served last, before that piece: a new payer starts no lower.
    level_ns: u64,
    /// Idle accounts that may be kept before `forget_even` looks through them again.
    idle_max: usize,
}

impl<T> Default for FairQueue<T> {
    fn default() -> Self {
        Self { accounts: HashMap::new(), order: BTreeSet::new(), level_ns: 0, idle_max: IDLE_MAX }
    }
}

impl<T> FairQueue<T> {
    /// Whether there is no work.
    pub fn is_empty(&self) -> bool {
        self.order.is_empty()
    }

    /// Adds a piece behind the other pieces of this payer.
    pub fn push(&mut self, payer: Payer, piece: T) {
        let new = || Account { spent_ns: 0, work: VecDeque::new() };
        let account = self.accounts.entry(payer).or_insert_with(new);
        if account.work.is_empty() {
            account.spent_ns = account.spent_ns.max(self.level_ns);
            self.order.insert((account.spent_ns, payer));
        }
        account.work.push_back(piece);
    }

    /// The next piece. The caller does it, then tells its cost with [`FairQueue::charge`].
    pub fn pop(&mut self) -> Option<(Payer, T)> {
        let &(spent_ns, payer) = self.order.first()?;
        self.level_ns = spent_ns;
        let account = self.accounts.get_mut(&payer).expect("a payer in the order has an account");
        let piece = account.work.pop_front().expect("a payer in the order has work");
        if account.work.is_empty() {
            self.order.pop_first();
        }
        Some((payer, piece))
    }

    /// Adds time that was spent on the payer's work to its account.
    pub fn charge(&mut self, payer: Payer, time: Duration) {
        let Some(account) = self.accounts.get_mut(&payer) else { return };
        let before = account.spent_ns;
        let time_ns = u64::try_from(time.as_nanos()).unwrap_or(u64::MAX);
        account.spent_ns = before.saturating_add(time_ns.max(LEAST_NS));
        if !account.work.is_empty() {
            self.order.remove(&(before, payer));
            self.order.insert((account.spent_ns, payer));
        }
        if self.order.is_empty() {
            self.level_ns = self.level_ns.max(account.spent_ns);
        }
        if self.accounts.len() > self.order.len() + self.idle_max {
            self.forget_even();
        }
    }

    /// Forgets payers that have no work and are ahead of nobody. The next look is when there are twice as many as had to be kept.
    fn forget_even(&mut self) {
        let level_ns = self.order.first().map_or(self.level_ns, |(spent_ns, _)| *spent_ns);
        self.accounts.retain(|_, account| !account.work.is_empty() || account.spent_ns > level_ns);
        self.idle_max = (2 * (self.accounts.len() - self.order.len())).max(IDLE_MAX);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const GREEDY: Payer = Payer(1);
    const MODEST: Payer = Payer(2);

    fn micros(count: u64) -> Duration {
        Duration::from_micros(count)
    }

    #[test]
    fn one_payers_work_is_done_in_the_order_it_came() {
        let mut queue = FairQueue::default();
        (0..10).for_each(|piece| queue.push(GREEDY, piece));
        for piece in 0..10 {
            assert_eq!(queue.pop(), Some((GREEDY, piece)));
            queue.charge(GREEDY, micros(piece));
        }
        assert!(queue.pop().is_none() && queue.is_empty());
    }

    #[test]
    fn who_comes_with_little_is_next_whatever_waits() {
        let mut queue = FairQueue::default();
        (0..10_000).for_each(|piece| queue.push(GREEDY, piece));
        for round in 0..100 {
            let (payer, _) = queue.pop().expect("plenty");
            assert_eq!(payer, GREEDY);
            queue.push(MODEST, round);
            queue.charge(payer, micros(50));
            assert_eq!(queue.pop(), Some((MODEST, round)), "not behind what waits");
            queue.charge(MODEST, micros(10));
        }
    }

    #[test]
    fn time_is_divided_and_not_pieces() {
        let mut queue = FairQueue::default();
        let (mut long, mut short) = (0, 0);
        for piece in 0..10_000 {
            queue.push(GREEDY, piece);
            queue.push(MODEST, piece);
        }
        while long + short < 5_500 {
            match queue.pop() {
                Some((GREEDY, _)) => {
                    long += 1;
                    queue.charge(GREEDY, micros(100));
                }
                Some((MODEST, _)) => {
                    short += 1;
                    queue.charge(MODEST, micros(10));
                }
                other => panic!("{other:?}"),
            }
        }
        assert!((9 * long..=11 * long).contains(&short), "{long} long, {short} short");
    }

    #[test]
    fn idle_time_is_not_saved_up_and_what_others_waited_for_is_owed() {
        let mut queue = FairQueue::default();
        queue.push(MODEST, 0);
        queue.pop();
        queue.charge(MODEST, micros(1));
        for piece in 0..100 {
            queue.push(GREEDY, piece);
            queue.pop();
            queue.charge(GREEDY, micros(100));
        }
        // Nobody else had work then, so that time is not owed. During the next piece another payer gets work, so that piece is owed.
        queue.push(GREEDY, 0);
        assert_eq!(queue.pop(), Some((GREEDY, 0)));
        (0..50).for_each(|piece| queue.push(MODEST, piece));
        queue.push(GREEDY, 1);
        queue.charge(GREEDY, micros(100));
        for piece in 0..10 {
            assert_eq!(queue.pop(), Some((MODEST, piece)), "the greedy one owes 100 microseconds");
            queue.charge(MODEST, micros(10));
        }
        assert_eq!(queue.pop(), Some((GREEDY, 1)), "and not the whole past");
    }

    #[test]
    fn work_that_costs_nothing_by_the_clock_takes_turns() {
        let mut queue = FairQueue::default();
        for piece in 0..3 {
            queue.push(GREEDY, piece);
            queue.push(MODEST, piece);
        }
        let mut served = Vec::new();
        while let Some((payer, _)) = queue.pop() {
            served.push(payer.0);
            queue.charge(payer, Duration::ZERO);
        }
        assert_eq!(served, [1, 2, 1, 2, 1, 2]);
    }

    #[test]
    fn who_is_ahead_of_nobody_is_forgotten() {
        let mut queue = FairQueue::default();
        for number in 0..100_000 {
            queue.push(Payer(number), ());
            let (payer, ()) = queue.pop().expect("one");
            queue.charge(payer, micros(1));
        }
        assert!(queue.accounts.len() <= 2 * IDLE_MAX + 2, "{}", queue.accounts.len());
    }
}
