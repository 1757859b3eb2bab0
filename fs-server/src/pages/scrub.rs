//! Scrub: reads every page that has a file's bytes from time to time, to find rotten ones before they are needed.
//!
//! # How it works
//! First come the zones to which the last server was writing when it went down. Their pages get sums of their present bytes, under their block locks,
//! and are verified like all others from then on. After that there is one pass over the pool in each interval, at a bounded rate, as a task of one
//! worker. A step of a pass reads some neighbouring pages without any lock. Only a page that does not match is examined again with its lock held, so
//! that it cannot change. A rotten page that is clean in a frame is written again from there; reads of any other rotten page fail. The files of
//! rotten pages are looked up once a minute, for all pages found since (`Scrub::name`): no record says which file a page belongs to, so that takes a
//! walk through all extents.
//!
//! A step waits while requests come, for a second at most, so that a server that is never idle is scrubbed as well, slowly (22 GB a day).
//!
//! # Failure
//! A page that cannot be read is counted, and the pass goes on. The position of the pass is stored in metadata once a minute, at its end and at a
//! clean stop (`ScrubRecord`), so that a pass that was interrupted by a restart goes on from there, and the findings of the last whole pass are
//! known.

use super::Pages;
pub(super) use crate::meta::PassFigures;
use crate::meta::ScrubRecord;
use crate::pool::disk::{Disk, IoBuffer, IoKind, IoRequest};
use crate::pool::space::Space;
use crate::pool::sums::{SummedDisk, Verdict};
use crate::timer::Timer;
use cuttlefs_common::ids::{PAGE_SIZE_U64, PoolPage};
use cuttlefs_common::panic_ends;
use cuttlefs_common::world::Clock;
use parking_lot::Mutex;
use std::cell::{Cell, RefCell};
use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

/// Pages of one step: 256 KiB, one IO.
const STEP_PAGES: u64 = 64;
/// The longest time for which a step waits while requests come.
const GIVE_WAY_MOST: Duration = Duration::from_secs(1);
/// How often it checks whether requests still come.
const GIVE_WAY_LOOK: Duration = Duration::from_millis(50);
/// When the first pass after a start begins or goes on, unless the interval is shorter.
const FIRST_PASS_AFTER: Duration = Duration::from_secs(600);
/// How often the position of a pass is stored.
const KEEP_INTERVAL: Duration = Duration::from_secs(60);
/// How often marks are swept. A zone's mark is cleared two to three sweeps after the last write to the zone.
pub const SWEEP_INTERVAL: Duration = Duration::from_secs(5);

/// Rate and interval of the scrub.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ScrubOptions {
    /// Bytes a second that are read at most; 0 for no passes.
    pub rate_bytes: u64,
    /// The time from the start of one pass to the start of the next.
    pub interval: Duration,
}

impl Default for ScrubOptions {
    fn default() -> Self {
        // A terabyte takes half a day and some percent of what an SSD reads. Each page is read at least once a week.
        Self { rate_bytes: 32 << 20, interval: Duration::from_secs(7 * 24 * 3600) }
    }
}

/// The state of the scrub. Written by its task, read by status.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ScrubFigures {
    /// Whether a pass is under way.
    pub is_running: bool,
    /// Whether a pass is under way or was interrupted: it goes on from `position`.
    pub is_unfinished: bool,
    /// When the last pass began, in seconds since the epoch; 0 if there was none.
    pub began_secs: i64,
    /// The next pool page of the pass.
    pub position: u64,
    /// Passes since the start of the server that reached the end.
    pub passes: u64,
    /// The findings of this pass so far.
    pub current: PassFigures,
    /// The findings of the last whole pass.
    pub last: Option<PassFigures>,
    /// When that pass ended, in seconds since the epoch.
    pub last_ended_secs: i64,
}

impl ScrubFigures {
    /// The state that the server before stored, for a pool of `pages` pages.
    pub fn kept(record: &ScrubRecord, pages: u64) -> Self {
        let position = record.position.filter(|position| *position <= pages);
        Self {
            is_unfinished: position.is_some(),
            began_secs: record.began_secs,
            position: position.unwrap_or(0),
            current: record.current,
            last: record.last,
            last_ended_secs: record.last_ended_secs,
            ..Self::default()
        }
    }

    /// The state to store; `None` before the first pass.
    pub fn record(&self) -> Option<ScrubRecord> {
        (self.began_secs != 0).then_some(ScrubRecord {
            began_secs: self.began_secs,
            position: self.is_unfinished.then_some(self.position),
            current: self.current,
            last: self.last,
            last_ended_secs: self.last_ended_secs,
        })
    }
}

/// Most pages whose files are looked up together. Further ones are logged without their files.
const NAMED_MOST: usize = 1024;

/// Logs the files of these pool pages; `false` if that is not possible now.
pub(super) type NameFiles<'a> = &'a dyn Fn(&[PoolPage]) -> bool;

/// A scrub and what it needs.
pub struct Scrub<'a> {
    /// The frames and locks.
    pub pages: &'a Pages,
    /// The space, which tells which pages belong to files.
    pub space: &'a Space,
    /// The disk with checksums.
    pub disk: &'a SummedDisk,
    /// For waiting.
    pub timer: &'a dyn Timer,
    /// The clock.
    pub clock: &'a dyn Clock,
    /// Looks up the files of rotten pages.
    pub name: NameFiles<'a>,
    /// The state of the scrub, for status.
    pub figures: &'a Mutex<ScrubFigures>,
    /// Stores the state for the next server.
    pub keep: &'a dyn Fn(&ScrubRecord),
    /// The number of other IOs, as of the last check.
    pub seen: Cell<u64>,
    /// Rotten pages whose files were not looked up yet.
    pub found: RefCell<Vec<PoolPage>>,
}

impl Scrub<'_> {
    /// Gives sums of their present bytes to the pages in zones to which the last server was writing when it went down.
    ///
    /// # Errors
    /// If the sums cannot be read. The zones stay as they are.
    pub async fn recover(&self) -> std::io::Result<()> {
        let mut settled = 0;
        while let Some(zone) = self.disk.next_recovering() {
            for step in steps(zone.clone()) {
                self.give_way().await;
                let guards = self.pages.locks.lock_many(step.clone().map(PoolPage)).await;
                settled += self.disk.settle(step).await?;
                drop(guards);
            }
            self.disk.recovered(&zone);
        }
        if settled > 0 {
            tracing::info!(
                pages = settled,
                "pages that were being written when the last server went down have new sums"
            );
        }
        Ok(())
    }

    /// Does a pass over the pool, or the rest of one that was interrupted. Ends early if `stopped` is set.
    ///
    /// # Errors
    /// If the sums cannot be read. The pass is not finished.
    pub async fn pass(&self, rate_bytes: u64, stopped: &AtomicBool) -> std::io::Result<PassFigures> {
        {
            let figures = &mut *self.figures.lock();
            if !figures.is_unfinished {
                (figures.position, figures.current) = (0, PassFigures::default());
                figures.began_secs = self.clock.now().secs;
            }
            (figures.is_running, figures.is_unfinished) = (true, true);
        }
        let result = self.go_on(rate_bytes, stopped).await;
        {
            let figures = &mut *self.figures.lock();
            figures.is_running = false;
            if matches!(result, Ok(true)) {
                figures.is_unfinished = false;
                figures.passes += 1;
                figures.last = Some(figures.current);
                figures.last_ended_secs = self.clock.now().secs;
            }
        }
        self.note_place();
        result.map(|_| self.figures.lock().current)
    }

    /// Goes on with the pass from its position. Returns whether it reached the end.
    async fn go_on(&self, rate_bytes: u64, stopped: &AtomicBool) -> std::io::Result<bool> {
        let pages = self.disk.sums().layout().pages();
        let position = self.figures.lock().position;
        let mut kept = self.clock.monotonic();
        for step in steps(position..pages) {
            if stopped.load(Ordering::Acquire) {
                return Ok(false);
            }
            let began = self.clock.monotonic();
            let mut read = 0;
            for run in self.held(step.clone()) {
                if read == 0 {
                    self.give_way().await;
                }
                read += run.end - run.start;
                self.step(run).await?;
            }
            {
                let mut figures = self.figures.lock();
                figures.position = step.end;
                figures.current.pages += read;
            }
            if self.clock.monotonic().saturating_sub(kept) >= KEEP_INTERVAL {
                kept = self.clock.monotonic();
                self.note_place();
            }
            if read > 0 {
                let pace = Duration::from_secs_f64((read * PAGE_SIZE_U64) as f64 / rate_bytes.max(1) as f64);
                self.timer.sleep(pace.saturating_sub(self.clock.monotonic().saturating_sub(began))).await;
            }
        }
        Ok(true)
    }

    fn note_place(&self) {
        let record = self.figures.lock().record();
        record.iter().for_each(self.keep);
        let mut found = self.found.borrow_mut();
        if !found.is_empty() && (self.name)(&found) {
            found.clear();
        }
    }

    /// The time until the next pass: an interval after the beginning of the last one, also if that was an earlier server's.
    fn until_next(&self, interval: Duration) -> Duration {
        let figures = *self.figures.lock();
        // Not at once: after a start other reads are more urgent.
        let soonest = interval.min(FIRST_PASS_AFTER);
        if figures.is_unfinished || figures.began_secs == 0 {
            return soonest;
        }
        // If the clock was set back, the wait is no longer than an interval.
        let gone = self.clock.now().secs.saturating_sub(figures.began_secs).max(0);
        interval.saturating_sub(Duration::from_secs(gone as u64)).max(soonest)
    }

    /// The runs of pages that have bytes.
    fn held(&self, pages: Range<u64>) -> Vec<Range<u64>> {
        let sums = self.disk.sums();
        let mut runs: Vec<Range<u64>> = Vec::new();
        for page in pages.filter(|page| sums.is_settled(PoolPage(*page))) {
            match runs.last_mut() {
                Some(run) if run.end == page => run.end += 1,
                _ => runs.push(page..page + 1),
            }
        }
        runs
    }

    async fn step(&self, run: Range<u64>) -> std::io::Result<()> {
        let verdicts = self.disk.examine(run.clone()).await?;
        for (page, verdict) in run.zip(verdicts).filter(|(_, verdict)| *verdict != Verdict::Good) {
            self.look_again(PoolPage(page), verdict).await?;
        }
        Ok(())
    }

    /// Examines a page again with its lock held, if it did not match without.
    async fn look_again(&self, page: PoolPage, before: Verdict) -> std::io::Result<()> {
        let _guard = self.pages.locks.lock_many([page]).await;
        if !self.disk.sums().is_settled(page) {
            return Ok(());
        }
        let verdict = match before {
            Verdict::Unreadable => before,
            _ => self.disk.examine(page.0..page.0 + 1).await?[0],
        };
        match verdict {
            Verdict::Good | Verdict::InFlight => return Ok(()),
            Verdict::NoSum => {
                self.disk.settle(page.0..page.0 + 1).await?;
                return Ok(());
            }
            Verdict::Rotten | Verdict::Unreadable => {}
        }
        let entry = self.pages.residency.load(page);
        if entry.is_dirty() {
            // The page is dirty in its frame, and is about to be overwritten.
            return Ok(());
        }
        if !self.space.is_used(page) && !entry.is_resident() {
            // The page has left its file.
            return Ok(());
        }
        let mut healed = false;
        if entry.is_resident() {
            let (kind, offset) = (IoKind::Write, page.byte_offset());
            let buffer = IoBuffer::Frames(vec![entry.frame()]);
            let done = self.disk.submit(vec![IoRequest { kind, offset, buffer }]).await;
            healed = done.iter().all(|done| done.result.is_ok());
        }
        let mut figures = self.figures.lock();
        let rotten = verdict == Verdict::Rotten;
        *(if rotten { &mut figures.current.rotten } else { &mut figures.current.unreadable }) += 1;
        figures.current.healed += u64::from(healed);
        drop(figures);
        tracing::error!(pool_page = %page, healed, ?verdict, "scrub: a page on SSD is not what was written");
        let mut found = self.found.borrow_mut();
        if found.len() < NAMED_MOST {
            found.push(page);
        }
        Ok(())
    }

    /// If requests came since the last step, waits until none come, a second at most.
    async fn give_way(&self) {
        let deadline = self.clock.monotonic() + GIVE_WAY_MOST;
        loop {
            let now = self.disk.sums().foreground();
            if self.seen.replace(now) == now || self.clock.monotonic() >= deadline {
                return;
            }
            self.timer.sleep(GIVE_WAY_LOOK).await;
        }
    }
}

fn steps(pages: Range<u64>) -> impl Iterator<Item = Range<u64>> {
    let end = pages.end;
    pages.step_by(STEP_PAGES as usize).map(move |first| first..end.min(first + STEP_PAGES))
}

/// Recovers, then does a pass in each interval, until `stopped`.
pub async fn run_scrub(scrub: &Scrub<'_>, options: ScrubOptions, stopped: &AtomicBool) {
    if let Err(error) = scrub.recover().await {
        tracing::error!(%error, "what was being written when the last server went down could not be looked at");
    }
    if options.rate_bytes == 0 {
        return;
    }
    while !stopped.load(Ordering::Acquire) {
        scrub.timer.sleep(scrub.until_next(options.interval)).await;
        match scrub.pass(options.rate_bytes, stopped).await {
            Ok(PassFigures { pages, rotten, healed, unreadable }) => {
                tracing::info!(pages, rotten, healed, unreadable, "scrub: a pass is done");
            }
            Err(error) => tracing::error!(%error, "scrub: a pass could not be done"),
        }
    }
}

/// Clears the marks of zones that are no longer written to, until `stopped`.
pub async fn run_sweep(disk: &SummedDisk, timer: &dyn Timer, stopped: &AtomicBool) {
    while !stopped.load(Ordering::Acquire) {
        timer.sleep(SWEEP_INTERVAL).await;
        panic_ends::plant("sweep");
        if let Err(error) = disk.sweep().await {
            tracing::error!(%error, "marks of zones could not be removed; they stay");
        }
    }
}
