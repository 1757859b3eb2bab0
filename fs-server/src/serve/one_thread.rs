//! A whole server in the calling thread: one worker, a simulated disk, any device. It moves only by `step`, so that a server and its clients can run
//! from one seed.
//!
//! Work that has a thread of its own in other servers (the syncs of metadata's log) is run by `step`, too. Random numbers decide when, so that other
//! tasks run in between, as they would beside a thread.

use super::recovery::RecoveryError;
use super::{ServeOptions, StartError, acceptor, background, build, recovery, shown_windows};
use crate::committer::Committer;
use crate::meta::Meta;
use crate::pool::{Disk, SumLayout, SummedDisk};
use crate::rnics::RnicIndex;
use crate::rpc::queues::RnicQueues;
use crate::rpc::worker::{Task, WorkerContext};
use crate::server::Server;
use crate::worker::Worker;
use cuttlefs_common::memory::SharedMemory;
use cuttlefs_common::rdma::{Device, Listener};
use cuttlefs_common::world::{Clock, Random};
use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

/// It has one RNIC.
const RNIC: RnicIndex = RnicIndex(0);
/// One in so many steps runs a sync that is waited for. If nothing else is left to do, every step does.
const COMMITS_ONE_IN: u64 = 4;

/// A server that moves only by `step`.
pub struct OneThreadServer {
    // Declared in the order in which they must be dropped: tasks before the things they use.
    worker: Worker,
    context: Rc<WorkerContext>,
    listener: Box<dyn Listener>,
    queues: RnicQueues,
    server: Arc<Server>,
    commits: Commits,
}

/// The syncs of metadata, for all waiters.
struct Commits {
    meta: Arc<Committer>,
    random: Arc<dyn Random>,
    /// Whether each sync is run before anything else.
    at_once: Cell<bool>,
}

impl Commits {
    /// Runs a sync if there is a waiter.
    fn run(&self) -> bool {
        self.meta.commits().step()
    }

    /// Runs a sync or something else, as the random numbers say; a sync if there is nothing else.
    fn run_beside(&self, other: impl FnOnce() -> bool) -> bool {
        if (self.at_once.get() || self.random.next_u64().is_multiple_of(COMMITS_ONE_IN)) && self.run() {
            return true;
        }
        other() || self.run()
    }
}

impl OneThreadServer {
    /// Builds the server. `open_disk` makes its disk over the frames' memory, with all pages of `SumLayout::new([pool_pages])`. Listens at the first
    /// endpoint of `options`. Recovery is done when this returns; `others` moves everything else in this thread meanwhile.
    ///
    /// # Errors
    /// The errors of the start of a server with threads.
    #[allow(clippy::too_many_arguments, reason = "each is one of the things a server is made of")]
    pub fn start(
        meta: Arc<Meta>,
        pool_pages: u64,
        open_disk: impl FnOnce(Arc<SharedMemory>) -> Rc<dyn Disk>,
        device: &Arc<dyn Device>,
        clock: Arc<dyn Clock>,
        random: Arc<dyn Random>,
        options: ServeOptions,
        others: &dyn Fn() -> bool,
    ) -> Result<Self, StartError> {
        let endpoint = options.listen.first().cloned();
        let endpoint = endpoint.ok_or(StartError::NoEndpoint)?;
        let committed = Committer::by_hand(meta.clone());
        let commits = Commits { meta: committed.clone(), random: random.clone(), at_once: Cell::new(false) };
        let layout = SumLayout::new([pool_pages]);
        let (scrub, trust) = (options.scrub, options.trust_clients);
        let (server, forgotten) =
            build(meta, committed, layout, None, device.clone().into(), clock.clone(), random, options)?;
        let frames = server.files.pages().frames().memory().clone();
        let disk = SummedDisk::new(open_disk(frames.clone()), frames, server.integrity.sums.clone());
        let queues = RnicQueues::new(server.rnics.get(RNIC))?;
        let worker = Worker::new(vec![queues.cq.clone()], None, clock)?;
        let (spawner, sleeper) = (worker.spawner(), worker.spawner());
        let spawn = Box::new(move |payer, task| spawner.spawn_for(payer, task));
        let sleep = Box::new(move |time| Box::pin(sleeper.sleep(time)) as Task);
        let own = std::slice::from_ref(&queues);
        let context = WorkerContext::new(server.clone(), Rc::new(disk.clone()), own, spawn, sleep)?;
        let outcome = Rc::new(RefCell::new(None));
        let (task, slot) = (context.clone(), outcome.clone());
        worker.spawn_local(async move {
            let (server, disk) = (&task.server, task.disk.as_ref());
            let done = recovery::run(server, disk).await;
            *slot.borrow_mut() = Some(done);
        });
        let step = || worker.step(&mut |_| {}).unwrap_or(false) || others();
        while outcome.borrow().is_none() && commits.run_beside(step) {}
        let done = outcome.borrow_mut().take();
        done.unwrap_or(Err(RecoveryError::Stopped))?;
        server.forget(&forgotten);
        context.start_sweeps();
        background::spawn(&worker, &context, &disk, scrub);
        shown_windows::show(&server, trust)?;
        server.sessions.begin();
        let listener = server.rnics.get(RNIC).pd.listen(&endpoint)?;
        Ok(Self { worker, context, listener, queues, server, commits })
    }

    /// The state that its tasks share.
    pub fn server(&self) -> &Arc<Server> {
        &self.server
    }

    /// Runs syncs of metadata as soon as they are asked for, from now on.
    pub fn commit_at_once(&self) {
        self.commits.at_once.set(true);
    }

    /// The time of its next timer: a simulation moves the clock there when nothing else moves.
    pub fn next_deadline(&self) -> Option<Duration> {
        self.worker.next_deadline()
    }

    /// One step: a connection, a task, a completion or a timer. `false` if there was nothing to do.
    pub fn step(&self) -> bool {
        if let Ok(incoming) = self.listener.accept() {
            if let Some(connection) = acceptor::accept(incoming, &self.server, RNIC, &self.queues) {
                self.context.adopt(connection);
            }
            return true;
        }
        self.commits.run_beside(|| {
            // Only a ring can fail, and this server has none.
            let mut on_completion = |(_, completion)| self.context.on_completion(RNIC, completion);
            self.worker.step(&mut on_completion).unwrap_or(false)
        })
    }
}
