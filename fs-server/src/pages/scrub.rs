//! Scrub: reads every page that holds a file's bytes now and then, to find rotten ones before they are needed.
//!
//! # How it works
//! First the zones that the last server was writing when it went down: their pages get sums of their present bytes, under their
//! block locks, and then are verified like all others. After that one pass over the pool each interval, at a bounded rate, as a
//! task of one worker. A step of a pass reads some neighbours without any lock; only a page that does not match is looked at
//! again with its lock held, so that it cannot change. A rotten page that is clean in a frame is written anew from there; reads
//! of any other rotten page fail. The files of rotten pages are looked for once a minute, for all pages found since
//! (`Scrub::name`): no record names a page's file, so that it takes a walk through all extents.
//!
//! A step gives way: as long as requests come, one is done a second, so that a server which is never idle is scrubbed
//! all the same, slowly (22 GB a day).
//!
//! # Failure
//! A page that cannot be read is counted, and the pass goes on. The place of the pass is kept in metadata once a minute, at its
//! end and at a clean stop (`ScrubRecord`), so that a pass that a restart cut off goes on from there, and the findings of the
//! last whole pass are known.

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
/// How long a step waits for requests to stop coming, at most.
const GIVE_WAY_MOST: Duration = Duration::from_secs(1);
/// How often it looks whether they have.
const GIVE_WAY_LOOK: Duration = Duration::from_millis(50);
/// How long after a start the first pass begins, or goes on, unless the interval is shorter.
const FIRST_PASS_AFTER: Duration = Duration::from_secs(600);
/// How often it is kept where a pass is.
const KEEP_INTERVAL: Duration = Duration::from_secs(60);
/// How often marks are swept; a zone is unmarked two to three of these after its last write.
pub const SWEEP_INTERVAL: Duration = Duration::from_secs(5);

/// How much a scrub may do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ScrubOptions {
    /// Bytes a second that are read at most; 0: no passes.
    pub rate_bytes: u64,
    /// From the start of one pass to the start of the next.
    pub interval: Duration,
}

impl Default for ScrubOptions {
    fn default() -> Self {
        // A terabyte takes half a day and some percents of what an SSD reads; a page is read at least once a week.
        Self { rate_bytes: 32 << 20, interval: Duration::from_secs(7 * 24 * 3600) }
    }
}

/// Where the scrub is. Written by its task, read by status.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ScrubFigures {
    /// Whether a pass is under way.
    pub is_running: bool,
    /// Whether a pass is under way or was cut off: it goes on from `position`.
    pub is_unfinished: bool,
    /// When the last pass began, seconds since the epoch; 0: there was none.
    pub began_secs: i64,
    /// The next pool page.
    pub position: u64,
    /// Passes that came to the end, since the start of the server.
    pub passes: u64,
    /// What this pass found so far.
    pub current: PassFigures,
    /// What the last whole pass found.
    pub last: Option<PassFigures>,
    /// When it ended, seconds since the epoch.
    pub last_ended_secs: i64,
}

impl ScrubFigures {
    /// What the server before this one kept, of a pool of so many pages.
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

    /// What is to be kept; `None` before the first pass.
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

/// Pages that were found at most whose files are named; further ones are in the log without.
const NAMED_MOST: usize = 1024;

/// Has the log say which files pool pages belong to; `false`: not now.
pub(super) type NameFiles<'a> = &'a dyn Fn(&[PoolPage]) -> bool;

/// What a scrub works with.
pub struct Scrub<'a> {
    /// The frames and locks.
    pub pages: &'a Pages,
    /// Which pages are a file's.
    pub space: &'a Space,
    /// The pages.
    pub disk: &'a SummedDisk,
    /// Waits.
    pub timer: &'a dyn Timer,
    /// Time.
    pub clock: &'a dyn Clock,
    /// For the log.
    pub name: NameFiles<'a>,
    /// Where it is.
    pub figures: &'a Mutex<ScrubFigures>,
    /// Keeps where it is for the next server.
    pub keep: &'a dyn Fn(&ScrubRecord),
    /// IOs of others as of the last look.
    pub seen: Cell<u64>,
    /// What was found and not named yet.
    pub found: RefCell<Vec<PoolPage>>,
}

impl Scrub<'_> {
    /// Gives pages in zones that were being written when the last server went down the sums of what they hold.
    ///
    /// # Errors
    /// The sums cannot be read; the zones stay as they are.
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

    /// One pass over the pool, or the rest of one that was cut off. Ends early if `stopped` is set.
    ///
    /// # Errors
    /// The sums cannot be read; the pass is not done.
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

    /// The pass from its position on; whether it came to the end.
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

    /// How long until the next pass: an interval after the last one began, whoever did that one.
    fn until_next(&self, interval: Duration) -> Duration {
        let figures = *self.figures.lock();
        // Not at once: a start has better things to read.
        let soonest = interval.min(FIRST_PASS_AFTER);
        if figures.is_unfinished || figures.began_secs == 0 {
            return soonest;
        }
        // A clock that was put back does not make the wait longer than an interval.
        let gone = self.clock.now().secs.saturating_sub(figures.began_secs).max(0);
        interval.saturating_sub(Duration::from_secs(gone as u64)).max(soonest)
    }

    /// Runs of pages that hold bytes.
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

    /// What was not good without a lock, with it.
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
            // It is about to be overwritten anyway.
            return Ok(());
        }
        if !self.space.is_used(page) && !entry.is_resident() {
            // It left its file.
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

/// Recovers, then scrubs once each interval; until `stopped`.
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

/// Unmarks zones that are not being written any more, until `stopped`.
pub async fn run_sweep(disk: &SummedDisk, timer: &dyn Timer, stopped: &AtomicBool) {
    while !stopped.load(Ordering::Acquire) {
        timer.sleep(SWEEP_INTERVAL).await;
        panic_ends::plant("sweep");
        if let Err(error) = disk.sweep().await {
            tracing::error!(%error, "marks of zones could not be removed; they stay");
        }
    }
}
