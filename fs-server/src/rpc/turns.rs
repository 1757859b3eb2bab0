//! Turns: they decide which request runs next on a worker, and which gets the next bounce buffer.
//!
//! There is a number of turns. A request that moves bytes takes one before it takes any lock or buffer, and gives it back when it is answered. When
//! all are taken, requests wait, each session's in a queue of its own. Peers take turns, and so do the sessions of a peer: a client with sixty lanes
//! gets as much of a busy SSD as one with a single lane, and so does a peer with a hundred sessions.
//!
//! # Invariants
//! * A peer that is not an administrator has at most `of_peer` turns: while its requests wait, others go on.
//! * A request that holds a lock or a buffer holds a turn, so a request that waits for a turn holds up no other.
//! * The number of waiting requests is at most that of posted receives: a client whose request waits can send no other on
//!   that lane. That is the back-pressure.
//! * A peer in `order` has a waiter and may have a turn. So `order` is empty while turns are free.
//!
//! Requests that move no bytes (names, heartbeats) take no turn: a slow SSD does not cost a client its lease.

use crate::shares::Peer;
use cuttlefs_common::rdma::PeerKey;
use std::cell::RefCell;
use std::collections::{HashMap, VecDeque};
use std::future::poll_fn;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::task::{Poll, Waker};

/// Requests for file bytes of one peer that run at once on one worker: enough to keep a fast SSD busy, and so few that another peer's request waits
/// only for a few.
pub(crate) const PEER_RUNNING: usize = 64;
/// Requests for file bytes that run at once on one worker.
pub(crate) const MOST_RUNNING: usize = 2 * PEER_RUNNING;

/// Turns of all workers as of about now, for `status`. Relaxed.
#[derive(Debug, Default)]
pub struct TurnFigures {
    running: AtomicUsize,
    waiting: AtomicUsize,
}

impl TurnFigures {
    /// Turns that are taken.
    pub fn running(&self) -> usize {
        self.running.load(Ordering::Relaxed)
    }

    /// Requests that wait for a turn.
    pub fn waiting(&self) -> usize {
        self.waiting.load(Ordering::Relaxed)
    }
}

/// The peer and session in whose name a turn is taken.
#[derive(Clone, Debug)]
pub(crate) struct Claim {
    peer: PeerKey,
    is_administrator: bool,
    session: u64,
}

impl Claim {
    /// The claim of a session of a peer.
    pub(crate) fn new(peer: &Peer, session: u64) -> Self {
        Self { peer: peer.key().clone(), is_administrator: peer.is_administrator(), session }
    }
}

#[derive(Default)]
struct Waiter {
    granted: bool,
    waker: Option<Waker>,
}

/// A peer that has turns, or waits for some.
struct OfPeer {
    /// The most turns it may have.
    most: usize,
    running: usize,
    /// Sessions with waiters, the next one in front.
    order: VecDeque<u64>,
    queues: HashMap<u64, VecDeque<Rc<RefCell<Waiter>>>>,
}

impl OfPeer {
    fn may_have_more(&self) -> bool {
        self.running < self.most
    }

    fn waits(&self) -> bool {
        !self.order.is_empty()
    }

    fn enqueue(&mut self, session: u64) -> Rc<RefCell<Waiter>> {
        let waiter = Rc::new(RefCell::new(Waiter::default()));
        let queue = self.queues.entry(session).or_default();
        queue.push_back(waiter.clone());
        if queue.len() == 1 {
            self.order.push_back(session);
        }
        waiter
    }

    /// Takes the oldest waiter of the next session out of the queue.
    fn dequeue(&mut self) -> Rc<RefCell<Waiter>> {
        let session = self.order.pop_front().expect("a peer in the order has waiters");
        let queue = self.queues.get_mut(&session).expect("a session in the order has waiters");
        let waiter = queue.pop_front().expect("a session in the order has waiters");
        if queue.is_empty() {
            self.queues.remove(&session);
        } else {
            self.order.push_back(session);
        }
        waiter
    }
}

struct State {
    free: usize,
    of_peer: usize,
    /// Peers that have waiters and may have a turn, the next one in front.
    order: VecDeque<PeerKey>,
    peers: HashMap<PeerKey, OfPeer>,
    figures: Arc<TurnFigures>,
}

impl State {
    fn of(&mut self, claim: &Claim) -> &mut OfPeer {
        let most = if claim.is_administrator { usize::MAX } else { self.of_peer };
        self.peers.entry(claim.peer.clone()).or_insert_with(|| OfPeer {
            most,
            running: 0,
            order: VecDeque::new(),
            queues: HashMap::new(),
        })
    }

    /// Begins a turn of this peer.
    fn begin(&mut self, claim: &Claim) {
        self.free -= 1;
        self.of(claim).running += 1;
        self.figures.running.fetch_add(1, Ordering::Relaxed);
    }

    /// Ends a turn of this peer.
    fn end(&mut self, claim: &Claim) {
        self.free += 1;
        self.figures.running.fetch_sub(1, Ordering::Relaxed);
        let of = self.of(claim);
        let stood_in_order = of.waits() && of.may_have_more();
        of.running -= 1;
        if of.waits() && !stood_in_order {
            self.order.push_back(claim.peer.clone());
        }
        self.forget_idle(&claim.peer);
    }

    /// Gives a turn to the next waiter of the next peer, if one is free.
    fn grant(&mut self) -> Option<Rc<RefCell<Waiter>>> {
        if self.free == 0 {
            return None;
        }
        let peer = self.order.pop_front()?;
        let of = self.peers.get_mut(&peer).expect("a peer in the order is known");
        let waiter = of.dequeue();
        of.running += 1;
        if of.waits() && of.may_have_more() {
            self.order.push_back(peer);
        }
        self.free -= 1;
        self.figures.running.fetch_add(1, Ordering::Relaxed);
        self.figures.waiting.fetch_sub(1, Ordering::Relaxed);
        Some(waiter)
    }

    /// Removes a waiter that gives up.
    fn leave(&mut self, claim: &Claim, waiter: &Rc<RefCell<Waiter>>) {
        let of = self.of(claim);
        let Some(queue) = of.queues.get_mut(&claim.session) else { return };
        let before = queue.len();
        queue.retain(|other| !Rc::ptr_eq(other, waiter));
        let left = before - queue.len();
        if queue.is_empty() {
            of.queues.remove(&claim.session);
            of.order.retain(|other| *other != claim.session);
        }
        if !of.waits() {
            self.order.retain(|other| *other != claim.peer);
        }
        self.figures.waiting.fetch_sub(left, Ordering::Relaxed);
        self.forget_idle(&claim.peer);
    }

    fn forget_idle(&mut self, peer: &PeerKey) {
        if self.peers.get(peer).is_some_and(|of| of.running == 0 && !of.waits()) {
            self.peers.remove(peer);
        }
    }
}

/// The turns of one worker.
#[derive(Clone)]
pub(crate) struct Turns(Rc<RefCell<State>>);

impl Turns {
    /// A number of turns, of which one peer may have `of_peer`. They are counted in `figures`.
    pub(crate) fn new(turns: usize, of_peer: usize, figures: Arc<TurnFigures>) -> Self {
        let (order, peers) = (VecDeque::new(), HashMap::new());
        Self(Rc::new(RefCell::new(State { free: turns, of_peer, order, peers, figures })))
    }

    /// Waits for a turn.
    pub(crate) async fn take(&self, claim: &Claim) -> Turn {
        let waiter = {
            let mut state = self.0.borrow_mut();
            let of = state.of(claim);
            let (waits, may_have) = (of.waits(), of.may_have_more());
            // Waiting requests come first, or a steady stream of new ones would starve them.
            if state.free > 0 && !waits && may_have {
                state.begin(claim);
                return Turn { turns: self.clone(), claim: claim.clone() };
            }
            let waiter = state.of(claim).enqueue(claim.session);
            if !waits && may_have {
                state.order.push_back(claim.peer.clone());
            }
            state.figures.waiting.fetch_add(1, Ordering::Relaxed);
            waiter
        };
        let mut place = Place { turns: self, claim, waiter, taken: false };
        poll_fn(|context| {
            let mut waiter = place.waiter.borrow_mut();
            if waiter.granted {
                return Poll::Ready(());
            }
            waiter.waker = Some(context.waker().clone());
            Poll::Pending
        })
        .await;
        place.taken = true;
        Turn { turns: self.clone(), claim: claim.clone() }
    }

    /// Takes a turn back, and gives it to the next in line.
    fn give_back(&self, claim: &Claim) {
        let granted = {
            let mut state = self.0.borrow_mut();
            state.end(claim);
            state.grant()
        };
        let Some(waiter) = granted else { return };
        let mut waiter = waiter.borrow_mut();
        waiter.granted = true;
        if let Some(waker) = waiter.waker.take() {
            waker.wake();
        }
    }
}

/// A place in line, which is given up if the request is dropped.
struct Place<'t> {
    turns: &'t Turns,
    claim: &'t Claim,
    waiter: Rc<RefCell<Waiter>>,
    taken: bool,
}

impl Drop for Place<'_> {
    fn drop(&mut self) {
        if self.taken {
            return;
        }
        if self.waiter.borrow().granted {
            self.turns.give_back(self.claim);
        } else {
            self.turns.0.borrow_mut().leave(self.claim, &self.waiter);
        }
    }
}

/// A turn; given back when dropped.
pub(crate) struct Turn {
    turns: Turns,
    claim: Claim,
}

impl Drop for Turn {
    fn drop(&mut self) {
        self.turns.give_back(&self.claim);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use futures_lite::future::{block_on, poll_once};
    use std::pin::{Pin, pin};

    type Taking<'t> = Pin<Box<dyn std::future::Future<Output = Turn> + 't>>;

    fn is_ready(taking: &mut Taking<'_>) -> Option<Turn> {
        block_on(poll_once(taking))
    }

    /// A session of peer 1.
    fn of(session: u64) -> Claim {
        by(1, session)
    }

    fn by(uid: u32, session: u64) -> Claim {
        Claim { peer: PeerKey::User(uid), is_administrator: uid == 0, session }
    }

    fn turns(most: usize) -> Turns {
        Turns::new(most, most, Arc::default())
    }

    #[test]
    fn sessions_take_turns_whatever_they_ask_for() {
        let (turns, one, two) = (turns(1), of(1), of(2));
        let running = block_on(turns.take(&one));
        let mut greedy: Vec<Taking<'_>> = (0..4).map(|_| Box::pin(turns.take(&one)) as Taking<'_>).collect();
        greedy.iter_mut().for_each(|taking| assert!(is_ready(taking).is_none()));
        let mut modest: Taking<'_> = Box::pin(turns.take(&two));
        assert!(is_ready(&mut modest).is_none());
        drop(running);
        // The greedy session came first; its second request comes after the modest session's.
        let first = is_ready(&mut greedy[0]).expect("the first in line");
        assert!(is_ready(&mut modest).is_none() && is_ready(&mut greedy[1]).is_none());
        drop(first);
        assert!(is_ready(&mut greedy[1]).is_none());
        let second = is_ready(&mut modest).expect("the other session's turn");
        drop(second);
        let third = is_ready(&mut greedy[1]).expect("and the first one's again");
        drop(third);
        drop(is_ready(&mut greedy[2]).expect("its third"));
        drop(is_ready(&mut greedy[3]).expect("its last"));
        assert_eq!(turns.0.borrow().free, 1);
        assert!(turns.0.borrow().peers.is_empty() && turns.0.borrow().order.is_empty());
    }

    #[test]
    fn who_leaves_the_line_takes_nothing_along() {
        let figures = Arc::new(TurnFigures::default());
        let turns = Turns::new(1, 1, figures.clone());
        let claims: Vec<Claim> = (0..6).map(of).collect();
        let running = block_on(turns.take(&claims[1]));
        let mut waits: Taking<'_> = Box::pin(turns.take(&claims[2]));
        let mut leaves: Taking<'_> = Box::pin(turns.take(&claims[3]));
        let mut granted: Taking<'_> = Box::pin(turns.take(&claims[4]));
        assert!(is_ready(&mut waits).is_none() && is_ready(&mut leaves).is_none());
        assert!(is_ready(&mut granted).is_none());
        assert_eq!((figures.running(), figures.waiting()), (1, 3));
        drop(leaves);
        assert_eq!((figures.running(), figures.waiting()), (1, 2));
        drop(running);
        assert_eq!((figures.running(), figures.waiting()), (1, 1));
        drop(is_ready(&mut waits).expect("its turn"));
        // Its turn was granted, and it is dropped before it sees that.
        drop(granted);
        assert_eq!(turns.0.borrow().free, 1);
        assert!(turns.0.borrow().peers.is_empty() && turns.0.borrow().order.is_empty());
        assert_eq!((figures.running(), figures.waiting()), (0, 0));
        let again = pin!(turns.take(&claims[5]));
        drop(block_on(again));
    }

    #[test]
    fn newcomers_do_not_overtake() {
        let (turns, one, two) = (turns(2), of(1), of(2));
        let (a, b) = (block_on(turns.take(&one)), block_on(turns.take(&one)));
        let mut waits: Taking<'_> = Box::pin(turns.take(&two));
        assert!(is_ready(&mut waits).is_none());
        drop((a, b));
        let mut late: Taking<'_> = Box::pin(turns.take(&two));
        let late = is_ready(&mut late).expect("one turn is granted to who waited, one is free");
        let waited = is_ready(&mut waits).expect("granted");
        drop((late, waited));
        assert_eq!(turns.0.borrow().free, 2);
    }

    #[test]
    fn a_peer_has_its_share_and_no_more() {
        let turns = Turns::new(4, 2, Arc::default());
        let (greedy, other, root) = (by(1, 1), by(2, 1), by(0, 1));
        let held = [block_on(turns.take(&greedy)), block_on(turns.take(&greedy))];
        let mut third: Taking<'_> = Box::pin(turns.take(&greedy));
        assert!(is_ready(&mut third).is_none(), "it has its share");
        let mine = block_on(turns.take(&other));
        drop(mine);
        assert!(is_ready(&mut third).is_none(), "another peer's turn is none of its own");
        let [first, second] = held;
        drop(first);
        let third = is_ready(&mut third).expect("its own came back");
        // Root may have all turns, and waits like others while none is free.
        let of_root = [block_on(turns.take(&root)), block_on(turns.take(&root))];
        let mut more: Taking<'_> = Box::pin(turns.take(&root));
        assert!(is_ready(&mut more).is_none());
        drop((second, third));
        let of_root = (of_root, is_ready(&mut more).expect("free"), block_on(turns.take(&root)));
        assert_eq!(turns.0.borrow().free, 0);
        drop(of_root);
        assert!(turns.0.borrow().peers.is_empty() && turns.0.borrow().order.is_empty());
    }

    #[test]
    fn a_peer_with_many_sessions_gets_no_more_than_one_with_a_single_one() {
        let turns = Turns::new(1, 1, Arc::default());
        let many: Vec<Claim> = (0..3).map(|session| by(1, session)).collect();
        let single = by(2, 9);
        let running = block_on(turns.take(&many[0]));
        let mut of_many: Vec<Taking<'_>> =
            many.iter().map(|claim| Box::pin(turns.take(claim)) as Taking<'_>).collect();
        of_many.iter_mut().for_each(|taking| assert!(is_ready(taking).is_none()));
        let mut of_single: Vec<Taking<'_>> =
            (0..2).map(|_| Box::pin(turns.take(&single)) as Taking<'_>).collect();
        of_single.iter_mut().for_each(|taking| assert!(is_ready(taking).is_none()));
        drop(running);
        let mut of_many = of_many.into_iter();
        for mut mine in of_single {
            drop(is_ready(&mut mine).expect("every other turn"));
            drop(is_ready(&mut of_many.next().expect("three")).expect("the turns between"));
        }
        drop(is_ready(&mut of_many.next().expect("three")).expect("the last"));
        assert_eq!(turns.0.borrow().free, 1);
    }

    proptest::proptest! {
        /// Whatever is taken, waited for, given up and given back: no peer exceeds its share, no turn is lost, and no turn is free while a request
        /// waits that may have it.
        #[test]
        fn no_turn_is_lost(steps in proptest::collection::vec((0u8..3, 0u32..4, 0u64..3, 0usize..8), 0..120)) {
            let figures = Arc::new(TurnFigures::default());
            let turns = Turns::new(4, 2, figures.clone());
            let claims: Vec<Claim> =
                (0..4).flat_map(|uid| (0..3).map(move |session| by(uid, session))).collect();
            let mut waiting: Vec<(usize, Taking<'_>)> = Vec::new();
            let mut held: Vec<(usize, Turn)> = Vec::new();
            for (what, uid, session, which) in steps {
                match what {
                    0 => {
                        let at = (uid as usize) * 3 + session as usize;
                        waiting.push((at, Box::pin(turns.take(&claims[at]))));
                    }
                    1 if !held.is_empty() => drop(held.swap_remove(which % held.len())),
                    2 if !waiting.is_empty() => drop(waiting.swap_remove(which % waiting.len())),
                    _ => {}
                }
                let (mut ready, mut rest) = (Vec::new(), Vec::new());
                for (at, mut taking) in std::mem::take(&mut waiting) {
                    match is_ready(&mut taking) {
                        Some(turn) => ready.push((at, turn)),
                        None => rest.push((at, taking)),
                    }
                }
                held.extend(ready);
                waiting = rest;
                proptest::prop_assert_eq!(figures.running(), held.len());
                proptest::prop_assert_eq!(figures.waiting(), waiting.len());
                proptest::prop_assert_eq!(turns.0.borrow().free, 4 - held.len());
                let of = |uid: u32| held.iter().filter(|(at, _)| claims[*at].peer == PeerKey::User(uid)).count();
                for uid in 1..4 {
                    proptest::prop_assert!(of(uid) <= 2);
                }
                if held.len() < 4 {
                    for (at, _) in &waiting {
                        let PeerKey::User(uid) = claims[*at].peer else { unreachable!("users only") };
                        proptest::prop_assert!(uid != 0 && of(uid) == 2, "{uid} waits for what is free");
                    }
                }
            }
            drop((held, waiting));
            proptest::prop_assert!(turns.0.borrow().peers.is_empty() && turns.0.borrow().order.is_empty());
        }
    }
}
