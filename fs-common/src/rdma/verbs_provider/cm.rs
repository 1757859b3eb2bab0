//! Events of connections, and who they are for: one thread of a device takes them from librdmacm and hands each to whoever sets a
//! connection up, listens, or has the queue pair. It never waits for any of them. Every two seconds it has each queue pair look whether its
//! peer is still there, and looks at the port itself: so nobody else waits for the driver's figures.

use super::ends::{ENDING_PAUSE, Ending};
use super::listen::Shared as ListenerShared;
use super::port::LastLook;
use super::queue::VerbsQp;
use super::sys::{Channel, Event, Happened};
use crate::rdma::sys::{new_eventfd, ring_eventfd, timespec};
use parking_lot::{Condvar, Mutex};
use rustix::event::{PollFd, PollFlags};
use rustix::fd::OwnedFd;
use std::collections::{HashMap, VecDeque};
use std::io;
use std::sync::atomic::{AtomicU32, AtomicU64};
use std::sync::{Arc, Weak};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// Interval of the checks of peers, for queue pairs that only wait. A lost peer is noticed after this time and the RNIC's retries.
const PROBE_INTERVAL: Duration = Duration::from_secs(2);

/// How long the last user of a device waits for the ends of its connections. They take a millisecond each, or for ever if the kernel hangs.
const END_WAIT: Duration = Duration::from_secs(1);

/// Events of one connection that is being set up.
#[derive(Default)]
pub(super) struct Setup {
    events: Mutex<VecDeque<Event>>,
    came: Condvar,
}

impl Setup {
    /// The next event; `None`: none came until the deadline.
    pub(super) fn next(&self, deadline: Instant) -> Option<Event> {
        let mut events = self.events.lock();
        loop {
            if let Some(event) = events.pop_front() {
                return Some(event);
            }
            if self.came.wait_until(&mut events, deadline).timed_out() {
                return events.pop_front();
            }
        }
    }
}

/// The receiver of an identifier's events.
enum Ear {
    Setup(Arc<Setup>),
    Listener(Weak<ListenerShared>),
    Connected(Weak<VerbsQp>),
}

type Ears = Mutex<HashMap<usize, Ear>>;

/// The thread that takes events, and their receivers. See the module.
pub(super) struct Events {
    channel: Arc<Channel>,
    ears: Arc<Ears>,
    stop: Arc<OwnedFd>,
    thread: Option<JoinHandle<()>>,
    /// Identifiers that the device's channels have not come to an end with.
    ending: Arc<Ending>,
    pub(super) port: Arc<LastLook>,
    /// That there are. Relaxed, as the next: figures.
    pub(super) queue_pairs: AtomicU64,
    /// The path MTU of the connection that was made last; 0: not known.
    pub(super) path_mtu_bytes: AtomicU32,
}

impl Events {
    /// `ending` and `port`: see [`Channel::new`]. The port is looked at, too.
    pub(super) fn start(ending: &Arc<Ending>, port: &Arc<LastLook>) -> io::Result<Arc<Self>> {
        let channel = Channel::new(ending, port)?;
        let ears: Arc<Ears> = Arc::default();
        let stop = Arc::new(new_eventfd()?);
        let thread = {
            let (channel, ears, stop) = (channel.clone(), ears.clone(), stop.clone());
            let (ending, port) = (ending.clone(), port.clone());
            std::thread::Builder::new()
                .name("rdma-events".to_owned())
                .spawn(move || run(&channel, &ears, &stop, &ending, &port))?
        };
        Ok(Arc::new(Self {
            channel,
            ears,
            stop,
            thread: Some(thread),
            ending: ending.clone(),
            port: port.clone(),
            queue_pairs: AtomicU64::new(0),
            path_mtu_bytes: AtomicU32::new(0),
        }))
    }

    /// The channel for which identifiers are made.
    pub(super) fn channel(&self) -> &Arc<Channel> {
        &self.channel
    }

    /// Collects the events of this identifier until they are taken.
    pub(super) fn set_up(&self, id: usize) -> Arc<Setup> {
        let setup = Arc::new(Setup::default());
        self.ears.lock().insert(id, Ear::Setup(setup.clone()));
        setup
    }

    /// Passes the events of this identifier to a listener.
    pub(super) fn listens(&self, id: usize, listener: &Arc<ListenerShared>) {
        self.ears.lock().insert(id, Ear::Listener(Arc::downgrade(listener)));
    }

    /// From now on passes the events of this identifier to a queue pair, beginning with those that have come already.
    pub(super) fn connected(&self, id: usize, qp: &Arc<VerbsQp>) {
        let before = self.ears.lock().insert(id, Ear::Connected(Arc::downgrade(qp)));
        if let Some(Ear::Setup(setup)) = before {
            for event in setup.events.lock().drain(..) {
                tell(qp, &event);
            }
        }
    }

    /// Passes the events of this identifier to nobody any more.
    pub(super) fn forget(&self, id: usize) {
        self.ears.lock().remove(&id);
    }
}

impl Drop for Events {
    fn drop(&mut self) {
        ring_eventfd(&self.stop);
        if let Some(thread) = self.thread.take()
            // An event may have dropped the last queue pair, so that this runs on the thread itself.
            && thread.thread().id() != std::thread::current().id()
            && thread.join().is_err()
        {
            tracing::error!("the thread for events of RDMA connections panicked");
        }
        // The process may be about to end, and librdmacm with it.
        let until = Instant::now() + END_WAIT;
        while self.ending.count() > 0 && Instant::now() < until {
            std::thread::sleep(Duration::from_millis(1));
        }
    }
}

fn tell(qp: &VerbsQp, event: &Event) {
    if matches!(event.what, Happened::Disconnected | Happened::Rejected | Happened::Failed(_)) {
        qp.fail();
    }
}

/// Lets queue pairs that only wait check whether their peers are still there: an RNIC notices that only when it sends.
fn probe_all(ears: &Ears) {
    let connected = |ear: &Ear| match ear {
        Ear::Connected(qp) => qp.upgrade(),
        _ => None,
    };
    // Without the lock: a last reference may be dropped here, which locks it to forget the identifier.
    let all: Vec<_> = ears.lock().values().filter_map(connected).collect();
    for qp in all {
        qp.probe();
    }
}

fn run(channel: &Arc<Channel>, ears: &Ears, stop: &OwnedFd, ending: &Ending, port: &LastLook) {
    let mut probed = Instant::now();
    loop {
        if probed.elapsed() >= PROBE_INTERVAL {
            probe_all(ears);
            port.again();
            probed = Instant::now();
        }
        let is_behind = ending.is_full();
        let listened = if is_behind { PollFlags::empty() } else { PollFlags::IN };
        let mut fds =
            [PollFd::from_borrowed_fd(channel.event_fd(), listened), PollFd::new(stop, PollFlags::IN)];
        let left = PROBE_INTERVAL.saturating_sub(probed.elapsed());
        let left = timespec(if is_behind { left.min(ENDING_PAUSE) } else { left });
        if rustix::event::poll(&mut fds, Some(&left)).is_err_and(|error| error != rustix::io::Errno::INTR) {
            tracing::error!("events of RDMA connections cannot be waited for any more");
            return;
        }
        if !fds[1].revents().is_empty() {
            return;
        }
        take_events(ending, || channel.next(), |event| hand_on(ears, event));
    }
}

/// Takes events while few connections that are over are left to the kernel: peers that ask faster than those come to an end wait in the kernel, whose
/// backlog is bounded.
fn take_events<T>(ending: &Ending, mut next: impl FnMut() -> Option<T>, mut hand_on: impl FnMut(T)) {
    while !ending.is_full()
        && let Some(event) = next()
    {
        hand_on(event);
    }
}

fn hand_on(ears: &Ears, event: Event) {
    let known = ears.lock();
    match known.get(&event.id) {
        Some(Ear::Setup(setup)) => {
            setup.events.lock().push_back(event);
            setup.came.notify_all();
        }
        // Neither receiver is called with the lock held: they may drop identifiers, which locks it to forget them.
        Some(Ear::Listener(listener)) => {
            let listener = listener.upgrade();
            drop(known);
            if let Some(listener) = listener {
                listener.asked(event);
            }
        }
        Some(Ear::Connected(qp)) => {
            let qp = qp.upgrade();
            drop(known);
            if let Some(qp) = qp {
                tell(&qp, &event);
            }
        }
        // The listener is gone: destroying the identifier refuses the client.
        None => drop(known),
    }
}

#[cfg(test)]
mod tests {
    use super::super::ends::ENDING_MAX;
    use super::*;

    #[test]
    fn events_wait_while_many_connections_come_to_no_end() {
        let ending = Ending::default();
        // Peers that are refused: the end of each waits for the kernel.
        let (mut asking, mut heard) = (0..3 * ENDING_MAX, 0);
        let mut take = || {
            take_events(
                &ending,
                || asking.next(),
                |_| {
                    heard += 1;
                    ending.begin();
                },
            );
            heard
        };
        assert_eq!(take(), ENDING_MAX);
        assert_eq!(take(), ENDING_MAX, "the kernel has let go of none");
        ending.end();
        ending.end();
        assert_eq!(take(), ENDING_MAX + 2);
        (0..ENDING_MAX).for_each(|_| ending.end());
        assert_eq!(take(), 2 * ENDING_MAX + 2);
        (0..ENDING_MAX).for_each(|_| ending.end());
        assert_eq!(take(), 3 * ENDING_MAX, "nobody else asks");
    }
}
