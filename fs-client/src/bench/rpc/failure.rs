//! Figure 12: the receiver dies again and again; who has a log goes on, who has none sends again.
//!
//! The receiver is ended at once, stays away for `DOWN`, and is started again. A sender notices by its broken connection
//! and tries again each `RETRY` (the paper: 300 ms and 100 ms; a thirtieth here, so that a run stays short). The other systems
//! send the request they were in once more; durable ones come back to a ring whose records have been executed.

use super::durable::DurableCaller;
use super::load::Caller;
use super::site::RpcSite;
use crate::bench::region::{Positions, check_interrupt};
use parking_lot::RwLock;
use rand::rngs::Xoshiro256PlusPlus;
use rand::{RngExt as _, SeedableRng as _};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// How long a receiver is away.
const DOWN: Duration = Duration::from_millis(10);
/// How long a sender waits before it tries again.
const RETRY: Duration = Duration::from_millis(3);
/// A run ends with an error after that.
const LONGEST: Duration = Duration::from_secs(60);

/// What came of it.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Survived {
    pub(super) seconds: f64,
    pub(super) failures: u64,
    /// Requests the receiver had, which were not sent again.
    pub(super) kept: u64,
    /// Requests that were sent again.
    pub(super) resent: u64,
}

enum Sending {
    Durable(Box<DurableCaller>),
    Other(Option<Box<dyn Caller>>),
}

/// Does so many operations while the receiver is up only `availability` of the time.
pub(super) fn run(
    site: &mut RpcSite,
    objects: u32,
    operations: u64,
    write_percent: u32,
    availability: f64,
    seed: u64,
) -> anyhow::Result<Survived> {
    let up = DOWN.mul_f64(availability / (1.0 - availability));
    let mut sending = match site.system.kind() {
        Some(_) => Sending::Durable(Box::new(site.durable(0)?)),
        None => Sending::Other(Some(site.caller(0)?)),
    };
    let site = RwLock::new(site);
    let over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let killing = scope.spawn(|| kill(&site, &over, up));
        let done = send(&mut sending, &site, objects, operations, write_percent, seed);
        over.store(true, Ordering::Release);
        let failures = killing.join().map_err(|_| anyhow::anyhow!("the killer panicked"))??;
        let survived = done?;
        Ok(Survived { failures, ..survived })
    })
}

fn kill(site: &RwLock<&mut RpcSite>, over: &AtomicBool, up: Duration) -> anyhow::Result<u64> {
    let mut failures = 0;
    loop {
        let until = Instant::now() + up;
        while Instant::now() < until {
            if over.load(Ordering::Acquire) {
                return Ok(failures);
            }
            std::thread::sleep(Duration::from_millis(1).min(up));
        }
        let mut site = site.write();
        site.stop();
        std::thread::sleep(DOWN);
        site.restart()?;
        failures += 1;
    }
}

fn send(
    sending: &mut Sending,
    site: &RwLock<&mut RpcSite>,
    objects: u32,
    operations: u64,
    write_percent: u32,
    seed: u64,
) -> anyhow::Result<Survived> {
    let mut random = Xoshiro256PlusPlus::seed_from_u64(seed);
    let positions = Positions::new(objects.into(), 0.99, 1, seed)?;
    let mut survived = Survived::default();
    let start = Instant::now();
    for _ in 0..operations {
        check_interrupt()?;
        let writes = random.random_range(0..100) < write_percent;
        let key = positions.draw(&mut random) as u32;
        loop {
            let done = match sending {
                Sending::Durable(caller) => Some(attempt(&mut **caller, key, writes)),
                Sending::Other(caller) => caller.as_mut().map(|caller| attempt(&mut **caller, key, writes)),
            };
            if matches!(done, Some(Ok(()))) {
                break;
            }
            anyhow::ensure!(start.elapsed() < LONGEST, "the receiver did not come back");
            if done.is_some() && matches!(sending, Sending::Other(_)) {
                survived.resent += 1;
            }
            let persisted = reconnect(sending, site, start)?;
            // A durable write whose record got there has been executed.
            if persisted && writes {
                break;
            }
        }
    }
    survived.seconds = start.elapsed().as_secs_f64();
    if let Sending::Durable(caller) = sending {
        (survived.kept, survived.resent) = caller.kept_and_resent();
    }
    Ok(survived)
}

fn attempt(caller: &mut dyn Caller, key: u32, writes: bool) -> anyhow::Result<()> {
    if writes { caller.write(&[key]) } else { caller.read(key, 1) }
}

/// Comes back; whether what was under way needs no sending again by the caller.
fn reconnect(sending: &mut Sending, site: &RwLock<&mut RpcSite>, start: Instant) -> anyhow::Result<bool> {
    loop {
        std::thread::sleep(RETRY);
        anyhow::ensure!(start.elapsed() < LONGEST, "the receiver did not come back");
        let Some(site) = site.try_read() else { continue };
        let Ok(endpoint) = site.endpoint() else { continue };
        match sending {
            Sending::Durable(caller) => {
                if caller.resume(&endpoint).is_ok() {
                    return Ok(true);
                }
            }
            Sending::Other(caller) => {
                if let Ok(again) = site.caller(0) {
                    *caller = Some(again);
                    return Ok(false);
                }
            }
        }
    }
}
