//! The threads of a target: one that polls, which also serves what needs no device, and some that wait for the device; one more for each listener.
//!
//! The paper has one polling thread a process (section 3.2). Major faults block the thread that serves them, so they go to threads of their own, and
//! many are under way at once: that is where an RNIC that faults itself is slow (section 5.3).

use super::region::NpRegion;
use super::target::{Job, NpTarget, TargetFigures};
use crate::rdma::{Device, Endpoint, Listener, PagedAccess, RdmaError};
use crossbeam::channel::{Receiver, Sender, unbounded};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

/// Threads that wait for the device: commodity drives reach their full rate at some 32 requests, and a region has at least as many frames.
const FAULT_THREADS: usize = 16;
/// How often threads look whether they are to end.
const TICK: Duration = Duration::from_millis(100);

/// A region that is served by threads until this is dropped.
pub struct NpServer {
    target: Arc<NpTarget>,
    listeners: Vec<Arc<dyn Listener>>,
    stopping: Arc<AtomicBool>,
    threads: Vec<JoinHandle<()>>,
}

impl NpServer {
    /// Serves a region at an endpoint.
    ///
    /// # Errors
    /// `RdmaError`, with advice.
    pub fn start(
        device: &Arc<dyn Device>,
        region: Arc<NpRegion>,
        access: PagedAccess,
        endpoint: &Endpoint,
    ) -> Result<Self, RdmaError> {
        let target = NpTarget::new(device, region, access)?;
        let listener: Arc<dyn Listener> = Arc::from(target.domain().listen(endpoint)?);
        let mut server =
            Self { target, listeners: vec![listener.clone()], stopping: Arc::default(), threads: Vec::new() };
        // The threads that were started end if one cannot be.
        let (jobs, taken) = unbounded::<Job>();
        for number in 0..FAULT_THREADS {
            let (target, taken) = (server.target.clone(), taken.clone());
            server.spawn(format!("np-fault-{number}"), move |_| fault(&target, &taken))?;
        }
        let target = server.target.clone();
        server.spawn("np-target".to_owned(), move |stopping| poll(&target, &jobs, stopping))?;
        let target = server.target.clone();
        server.spawn("np-acceptor".to_owned(), move |_| accept(&target, &*listener))?;
        Ok(server)
    }

    fn spawn(
        &mut self,
        name: String,
        run: impl FnOnce(&AtomicBool) + Send + 'static,
    ) -> Result<(), RdmaError> {
        let stopping = self.stopping.clone();
        let body = move || run(&stopping);
        let thread = std::thread::Builder::new().name(name).spawn(body).map_err(|source| RdmaError::Io {
            action: "start a thread for",
            endpoint: "a memory region".into(),
            source,
        })?;
        self.threads.push(thread);
        Ok(())
    }

    /// Where peers connect, with the port that the system chose if none was given.
    pub fn endpoint(&self) -> Endpoint {
        self.listeners[0].endpoint()
    }

    /// What happened so far.
    pub fn figures(&self) -> TargetFigures {
        self.target.figures()
    }
}

impl Drop for NpServer {
    fn drop(&mut self) {
        self.stopping.store(true, Ordering::Release);
        self.listeners.iter().for_each(|listener| listener.close());
        self.target.close();
        for thread in self.threads.drain(..) {
            if thread.join().is_err() {
                tracing::error!("a thread of a memory region panicked");
            }
        }
    }
}

fn accept(target: &NpTarget, listener: &dyn Listener) {
    while let Ok(incoming) = listener.accept() {
        if let Err(error) = target.accept(incoming) {
            tracing::warn!(%error, "a peer of a memory region went away");
        }
    }
    target.close();
}

fn poll(target: &NpTarget, jobs: &Sender<Job>, stopping: &AtomicBool) {
    let give = |job: Job| {
        if target.is_quick(&job) {
            return target.perform(job);
        }
        if let Err(unsent) = jobs.send(job) {
            target.perform(unsent.0);
        }
    };
    while !stopping.load(Ordering::Acquire) {
        if !target.step_with(&give) {
            target.wait(TICK);
        }
    }
}

fn fault(target: &NpTarget, jobs: &Receiver<Job>) {
    // Ends with the thread that sends.
    while let Ok(job) = jobs.recv() {
        target.perform(job);
    }
}
