//! Spinning over several queue pairs.

use super::*;
use crate::rdma::verbs::{WcStatus, WrId};
use std::os::unix::net::UnixStream;
use std::sync::Weak;

/// A queue pair to which any byte that its socket gets is a completion.
struct Fake {
    number: u32,
    rings: bool,
    socket: UnixStream,
    queue: Weak<SoftCq>,
}

impl Pumped for Fake {
    fn number(&self) -> QpNumber {
        QpNumber(self.number)
    }

    fn pump_rings(&self) {}

    fn pump_socket(&self) {
        let mut byte = [0];
        let read = rustix::net::recv(&self.socket, &mut byte, rustix::net::RecvFlags::DONTWAIT);
        if let (Ok((_, 1)), Some(queue)) = (read, self.queue.upgrade()) {
            let (qp, wr_id) = (self.number(), WrId(byte[0].into()));
            let (kind, status) = (CompletionKind::Recv, WcStatus::Success);
            let slots = Arc::new(Slots::default());
            slots.receives.store(1, Ordering::Relaxed);
            queue.push(Completion { wr_id, qp, kind, status, byte_len: 1, imm: None, absent: false }, &slots);
        }
    }

    fn has_rings(&self) -> bool {
        self.rings
    }

    fn event(&self, _: epoll::EventFlags) {
        self.pump_socket();
    }
}

/// A queue with a queue pair for each of these, which have rings or not; and the other ends of their sockets.
fn queue_with(rings: &[bool]) -> (Arc<SoftCq>, Vec<UnixStream>) {
    let queue = Arc::new(SoftCq::new(16).expect("a queue"));
    let far_ends = (1..).zip(rings).map(|(number, rings)| {
        let (socket, far_end) = UnixStream::pair().expect("sockets");
        let qp = Arc::new(Fake { number, rings: *rings, socket, queue: Arc::downgrade(&queue) });
        let watched = [(qp.socket.as_fd(), epoll::EventFlags::IN)];
        queue.attach(qp.clone(), &watched).expect("attached");
        far_end
    });
    let far_ends = far_ends.collect();
    (queue, far_ends)
}

#[test]
fn one_turn_of_spinning_finds_what_came_to_any_of_several_sockets() {
    for sockets in [1, 2, 5] {
        for at in 0..sockets {
            // The budget of a new queue has one turn, however slow the machine is.
            let (queue, far_ends) = queue_with(&vec![false; sockets]);
            rustix::io::write(&far_ends[at], &[at as u8]).expect("sent");
            assert!(queue.spin(&queue.attached(), Instant::now(), Duration::from_secs(30)));
            let mut out = Vec::new();
            queue.poll(&mut out, 2);
            let found: Vec<_> = out.iter().map(|found| (found.qp.0 as usize, found.wr_id.0)).collect();
            assert_eq!(found, [(at + 1, at as u64)]);
        }
    }
}

#[test]
fn a_socket_that_always_has_something_hides_no_other() {
    let (queue, far_ends) = queue_with(&[false; 3]);
    queue.asked_over(QpNumber(2));
    rustix::io::write(&far_ends[2], &[7]).expect("sent");
    let mut out = Vec::new();
    for poll in 0..PUMPS_PER_QUESTION {
        // One for each poll: it is there before the poll.
        rustix::io::write(&far_ends[1], &[poll as u8]).expect("sent");
        queue.poll(&mut out, 1);
    }
    while queue.poll(&mut out, 1) > 0 {}
    let of = |number| out.iter().filter(move |found| found.qp == QpNumber(number)).count();
    assert_eq!((of(1), of(2), of(3)), (0, PUMPS_PER_QUESTION as usize, 1));
    // And one that has nothing hides none at all.
    rustix::io::write(&far_ends[0], &[7]).expect("sent");
    assert!(queue.spin(&queue.attached(), Instant::now(), Duration::from_secs(30)));
}

#[test]
fn several_rings_are_not_spun_over() {
    let spins = |rings: &[bool]| queue_with(rings).0.attached().is_spun_over();
    assert!(spins(&[]) && spins(&[true]) && spins(&[false]) && spins(&[false; 5]));
    assert!(!spins(&[true, true]) && !spins(&[true, false]));
}
