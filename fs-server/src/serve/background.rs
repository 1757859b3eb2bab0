//! The server's own work as tasks of worker 0: write-back, the free page queue, eviction, promotion, scrub, leases, orphans.

use crate::files;
use crate::pages::{self, Scrub, ScrubOptions};
use crate::pool::{LocalFuture, SummedDisk};
use crate::rpc::worker::WorkerContext;
use crate::server::UNFREED_AGAIN;
use crate::timer::Timer;
use crate::worker::{Spawner, Worker};
use cuttlefs_common::panic_ends;
use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

/// How many times during a lease the leases are checked.
const LEASE_CHECKS: u32 = 4;
/// How often the end of the grace period is checked for.
const GRACE_CHECK: Duration = Duration::from_millis(100);

struct SpawnerTimer(Spawner);

impl Timer for SpawnerTimer {
    fn sleep(&self, duration: Duration) -> LocalFuture<'static, ()> {
        Box::pin(self.0.sleep(duration))
    }
}

/// Starts these tasks; they end with the worker.
pub(super) fn spawn(worker: &Worker, context: &Rc<WorkerContext>, disk: &SummedDisk, scrub: ScrubOptions) {
    let spawner = worker.spawner();
    let task = context.clone();
    let timer = SpawnerTimer(spawner.clone());
    worker.spawn_local(async move {
        let never = AtomicBool::new(false);
        files::run_write_back(&task.server.files, task.disk.as_ref(), &timer, &never).await;
    });
    let task = context.clone();
    worker.spawn_local(async move {
        let never = AtomicBool::new(false);
        files::run_free_pages(&task.server.files, task.disk.as_ref(), &never).await;
    });
    // If the policy does not move pages between tiers, none is evicted.
    if context.server.files.pages().policy().promotes {
        let task = context.clone();
        worker.spawn_local(async move {
            let never = AtomicBool::new(false);
            pages::run_eviction(task.server.files.pages(), task.disk.as_ref(), &never).await;
        });
        let task = context.clone();
        let timer = SpawnerTimer(spawner.clone());
        worker.spawn_local(async move {
            let never = AtomicBool::new(false);
            let server = &task.server;
            let period = Duration::from_millis(u64::from(server.about.sampling.period_ms));
            let (files, clock) = (&server.files, server.clock.as_ref());
            files::run_promotion(files, task.disk.as_ref(), &timer, clock, period, &never).await;
        });
    }
    let (sweeping, timer) = (disk.clone(), SpawnerTimer(spawner.clone()));
    worker.spawn_local(async move { pages::run_sweep(&sweeping, &timer, &AtomicBool::new(false)).await });
    let (task, disk, timer) = (context.clone(), disk.clone(), SpawnerTimer(spawner.clone()));
    worker.spawn_local(async move {
        let server = &task.server;
        let scrubbing = Scrub {
            pages: server.files.pages(),
            space: server.files.space(),
            disk: &disk,
            timer: &timer,
            clock: server.clock.as_ref(),
            name: &|pages| server.integrity.rotten.name(server, pages),
            figures: &server.integrity.scrub,
            keep: &|record| {
                // A failure is logged and counted there. It means that a part of a pass is read again.
                let _ = server.meta.keep_scrub(record);
            },
            seen: Cell::new(0),
            found: RefCell::default(),
        };
        pages::run_scrub(&scrubbing, scrub, &AtomicBool::new(false)).await;
    });
    let task = context.clone();
    let timer = spawner.clone();
    worker.spawn_local(async move {
        let period = task.server.sessions.lease() / LEASE_CHECKS;
        loop {
            timer.sleep(period).await;
            panic_ends::plant("leases");
            let gone = task.server.sessions.expire();
            // First of all, because other clients wait for these locks.
            gone.iter().for_each(|session| task.server.locks.end_session(session.number()));
            for session in &gone {
                task.server.revoke(session).await;
            }
            task.server.note_absent(&gone);
            task.server.closed_all(task.server.files.end_expired_regions()).await;
        }
    });
    let task = context.clone();
    worker.spawn_local(async move {
        // Frees the files that lost their last name before this server started, or while clients could still reclaim them.
        while task.server.sessions.is_grace_period() {
            spawner.sleep(GRACE_CHECK).await;
            task.server.sessions.tick();
        }
        task.server.settle_grace();
        let lost = task.server.sessions.take_lost();
        if !lost.is_empty() {
            tracing::info!(clients = lost.len(), "the grace period is over; not all clients came back");
        }
        task.server.end_sessions(lost);
        let orphans = task.server.orphans();
        if !orphans.is_empty() {
            tracing::info!(orphans = orphans.len(), "freeing unlinked files nobody has open");
        }
        for ino in orphans {
            task.server.reap(ino).await;
        }
        task.server.sessions.settled();
        loop {
            spawner.sleep(UNFREED_AGAIN).await;
            if task.server.unfreed.swap(false, Ordering::Relaxed) {
                for ino in task.server.orphans() {
                    task.server.reap(ino).await;
                }
            }
        }
    });
}
