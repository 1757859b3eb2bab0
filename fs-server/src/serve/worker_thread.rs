//! One worker thread: its queues (one for each RNIC), ring, context and tasks, from start to stop.

use super::recovery::RecoveryError;
use super::{Door, StartError, Storage, background, held_memory, join, recovery};
use crate::files;
use crate::pages::ScrubOptions;
use crate::pool::{CachedDisk, Disk, OwnRing, SummedDisk, UringDisk};
use crate::rnics::RnicIndex;
use crate::rpc::queues::RnicQueues;
use crate::rpc::worker::{Task, WorkerContext};
use crate::server::Server;
use crate::worker::{Worker, WorkerHandle};
use std::rc::Rc;
use std::sync::{Arc, mpsc};
use std::thread::JoinHandle;

/// Accepted connections a worker has not adopted yet.
const MAX_UNADOPTED: usize = 1024;

/// A running worker thread.
pub(super) struct WorkerThread {
    door: Door,
    thread: JoinHandle<()>,
}

impl WorkerThread {
    /// Starts worker `index` and waits until it serves. Worker 0 recovers first, and also does the background work.
    pub(super) fn start(
        index: usize,
        server: &Arc<Server>,
        storage: &Storage,
        scrub: ScrubOptions,
    ) -> Result<Self, StartError> {
        let queues: Vec<_> = server.rnics.all().iter().map(RnicQueues::new).collect::<Result<_, _>>()?;
        let (sender, connections) = async_channel::bounded(MAX_UNADOPTED);
        let (started, wait) = mpsc::channel::<Result<WorkerHandle, StartError>>();
        let (server, storage, own) = (server.clone(), storage.clone(), queues.clone());
        let body = move || {
            let built = build(&server, &storage, &own);
            let (worker, context, disk, _own_ring) = match built {
                Ok(built) => built,
                Err(reason) => {
                    let _ = started.send(Err(reason));
                    return;
                }
            };
            if index == 0
                && let Err(reason) = recover(&worker, &context)
            {
                let _ = started.send(Err(reason));
                return;
            }
            context.start_sweeps();
            let adopting = context.clone();
            worker.spawn_local(async move {
                while let Ok(connection) = connections.recv().await {
                    adopting.adopt(connection);
                }
            });
            let (faulting, jobs) = (context.clone(), server.files.fault_jobs());
            worker.spawn_local(async move {
                while let Ok(job) = jobs.recv().await {
                    faulting.run_fault(job);
                }
            });
            if index == 0 {
                background::spawn(&worker, &context, &disk, scrub);
                let (server, timer) = (server.clone(), worker.spawner());
                worker.spawn_local(async move { held_memory::give_back(&server, &timer).await });
            }
            if started.send(Ok(worker.handle())).is_err() {
                return;
            }
            let on_completion = |(place, completion)| context.on_completion(RnicIndex(place), completion);
            if let Err(error) = worker.run(on_completion) {
                // The worker's tasks hold locks, slots and pages taken for write-back, so that nothing could go on: as with any panic.
                panic!("worker {index}: {error}");
            }
            if index == 0 {
                finish(&worker, &context, disk);
            }
        };
        let thread = std::thread::Builder::new()
            .name(format!("worker-{index}"))
            .spawn(body)
            .map_err(|source| StartError::System { action: "start a worker", source })?;
        match wait.recv() {
            Ok(Ok(handle)) => {
                let door = Door { handle, connections: sender, queues };
                Ok(Self { door, thread })
            }
            Ok(Err(error)) => Err(error),
            Err(_) => Err(StartError::WorkerEnded),
        }
    }

    pub(super) fn door(&self) -> Door {
        self.door.clone()
    }

    pub(super) fn stop(self) {
        self.door.handle.stop();
        join(self.thread, "worker");
    }
}

fn recover(worker: &Worker, context: &Rc<WorkerContext>) -> Result<(), StartError> {
    let task = context.clone();
    let all = async move { recovery::run(&task.server, task.disk.as_ref()).await };
    Ok(worker.block_on(all)?.unwrap_or(Err(RecoveryError::Stopped))?)
}

fn build(
    server: &Arc<Server>,
    storage: &Storage,
    queues: &[RnicQueues],
) -> Result<(Worker, Rc<WorkerContext>, SummedDisk, Option<OwnRing>), StartError> {
    let (disk, ring): (Rc<dyn Disk>, _) = match &storage.cached {
        Some(cached) => (Rc::new(CachedDisk::new(cached.clone())), None),
        None => {
            let ring = open_ring(server, storage)?;
            (ring.clone(), Some(ring))
        }
    };
    let frames = server.files.pages().frames().memory().clone();
    let disk = SummedDisk::new(disk, frames, server.integrity.sums.clone());
    let own_ring = ring.as_ref().map(OwnRing::set);
    let cqs = queues.iter().map(|queues| queues.cq.clone()).collect();
    let worker = Worker::new(cqs, ring, server.clock.clone())?;
    let (spawner, sleeper) = (worker.spawner(), worker.spawner());
    let spawn = Box::new(move |payer, task| spawner.spawn_for(payer, task));
    let sleep = Box::new(move |time| Box::pin(sleeper.sleep(time)) as Task);
    let context = WorkerContext::new(server.clone(), Rc::new(disk.clone()), queues, spawn, sleep);
    Ok((worker, context?, disk, own_ring))
}

fn open_ring(server: &Server, storage: &Storage) -> Result<Rc<UringDisk>, StartError> {
    let frames = server.files.pages().frames().memory().clone();
    let action = "use io_uring (kernel 5.10 or newer with io_uring enabled is needed)";
    let opened = UringDisk::new(storage.data.clone(), frames);
    opened.map(Rc::new).map_err(|source| StartError::System { action, source })
}

/// The clean end of worker 0: makes all acknowledged changes durable. This runs on the worker itself, because a write-back or an eviction that was
/// interrupted holds locks, and can end only there.
fn finish(worker: &Worker, context: &Rc<WorkerContext>, disk: SummedDisk) {
    let task = context.clone();
    let all = async move {
        let written = files::write_back_all(&task.server.files, task.disk.as_ref()).await;
        written.map_err(|status| status.to_string())?;
        disk.finish().await.map_err(|error| error.to_string())
    };
    let flushed = match worker.finish(all) {
        Ok(flushed) => flushed,
        Err(error) => Err(error.to_string()),
    };
    match flushed {
        Ok(()) => tracing::info!("everything is on disk"),
        Err(reason) => {
            tracing::error!(%reason, "the last write-back failed; what was not fsynced may be lost")
        }
    }
}
