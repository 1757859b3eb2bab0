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
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Weak};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// How often peers of queue pairs that only wait are looked for. What is lost is found out this much and the RNIC's retries later.
const PROBE_INTERVAL: Duration = Duration::from_secs(2);

/// How long the last user of a device waits for the ends of its connections, which take a millisecond each or, where the kernel hangs, for ever.
const END_WAIT: Duration = Duration::from_secs(1);

/// Events of a connection that is being set up.
#[derive(Default)]
pub(super) struct Setup {
    events: Mutex<VecDeque<Event>>,
    came: Condvar,
}

impl Setup {
    /// The next one; `None`: none came in time.
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

/// Who hears of an identifier.
enum Ear {
    Setup(Arc<Setup>),
    Listener(Weak<ListenerShared>),
    Connected(Weak<VerbsQp>),
}

type Ears = Mutex<HashMap<usize, Ear>>;

/// See the module.
pub(super) struct Events {
    channel: Arc<Channel>,
    ears: Arc<Ears>,
    stop: Arc<OwnedFd>,
    thread: Option<JoinHandle<()>>,
    /// Identifiers that the device's channels have not come to an end with.
    ending: Arc<Ending>,
    /// That there are. Relaxed, as the next: figures.
    pub(super) queue_pairs: AtomicU64,
    /// Of the connection that was made last; 0: not known.
    pub(super) path_mtu_bytes: AtomicU32,
}

impl Events {
    /// `ending`: see [`Channel::new`]. `port` is looked at.
    pub(super) fn start(ending: &Arc<Ending>, port: &Arc<LastLook>) -> io::Result<Arc<Self>> {
        let channel = Channel::new(ending)?;
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
            queue_pairs: AtomicU64::new(0),
            path_mtu_bytes: AtomicU32::new(0),
        }))
    }

    /// Where identifiers are made for.
    pub(super) fn channel(&self) -> &Arc<Channel> {
        &self.channel
    }

    /// Events of this identifier wait to be asked for.
    pub(super) fn set_up(&self, id: usize) -> Arc<Setup> {
        let setup = Arc::new(Setup::default());
        self.ears.lock().insert(id, Ear::Setup(setup.clone()));
        setup
    }

    /// Events of this identifier are this listener's.
    pub(super) fn listens(&self, id: usize, listener: &Arc<ListenerShared>) {
        self.ears.lock().insert(id, Ear::Listener(Arc::downgrade(listener)));
    }

    /// Events of this identifier are this queue pair's from now on; what came before is looked at.
    pub(super) fn connected(&self, id: usize, qp: &Arc<VerbsQp>) {
        let before = self.ears.lock().insert(id, Ear::Connected(Arc::downgrade(qp)));
        if let Some(Ear::Setup(setup)) = before {
            for event in setup.events.lock().drain(..) {
                tell(qp, &event);
            }
        }
    }

    /// Nobody hears of this identifier any more.
    pub(super) fn forget(&self, id: usize) {
        self.ears.lock().remove(&id);
    }
}

impl Drop for Events {
    fn drop(&mut self) {
        ring_eventfd(&self.stop);
        if let Some(thread) = self.thread.take()
            // The last queue pair may have gone with an event.
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

/// Looks whether the peers of queue pairs that only wait are still there: an RNIC notices only for what it sends.
fn probe_all(ears: &Ears) {
    let connected = |ear: &Ear| match ear {
        Ear::Connected(qp) => qp.upgrade(),
        _ => None,
    };
    // Not with the lock: the last reference may end here, and asks to be forgotten.
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
        // Neither is told with the lock: what they do ends with identifiers that are forgotten here.
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
        // Who asks a listener that is gone is refused by its identifier's end.
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
