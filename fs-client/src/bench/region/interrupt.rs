//! Ctrl-C and SIGTERM end a benchmark at its next step, so that servers are stopped and directories removed.
//!
//! A step that has not ended after `STEP_WAIT` may wait for a server that died: the sessions are ended then, whose calls fail.
//! A second signal ends the process at once, for when the first is waited for in vain.

use crate::file::volume::Volume;
use anyhow::Context as _;
use parking_lot::Mutex;
use signal_hook::consts::{SIGINT, SIGTERM};
use signal_hook::iterator::Signals;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock, Weak};
use std::time::Duration;

/// How long steps may take to end by themselves: longer than any takes whose server answers.
const STEP_WAIT: Duration = Duration::from_secs(2);
/// How often it is looked for sessions that began meanwhile.
const LOOK: Duration = Duration::from_millis(100);

/// Written by the signal handler, read by every loop here; it guards nothing but itself.
static ASKED: OnceLock<Arc<AtomicBool>> = OnceLock::new();
/// What calls wait in. Those that are gone are dropped when another comes.
static SESSIONS: Mutex<Vec<Weak<dyn Volume>>> = Mutex::new(Vec::new());

/// From now on signals are noted.
///
/// # Errors
/// If the handlers cannot be installed.
pub(in crate::bench) fn watch() -> anyhow::Result<()> {
    let asked = ASKED.get_or_init(Arc::default);
    for signal in [SIGINT, SIGTERM] {
        // In this order: the first signal finds the flag clear and only sets it.
        signal_hook::flag::register_conditional_shutdown(signal, 130, asked.clone())
            .and_then(|_| signal_hook::flag::register(signal, asked.clone()))
            .context("cannot catch signals")?;
    }
    let mut signals = Signals::new([SIGINT, SIGTERM]).context("cannot catch signals")?;
    let end = move || {
        if signals.forever().next().is_some() {
            end_waits();
        }
    };
    std::thread::Builder::new().name("interrupt".to_owned()).spawn(end).context("cannot start a thread")?;
    Ok(())
}

/// A session whose calls are not to outlast a signal for long.
pub(super) fn ends(session: &Arc<dyn Volume>) {
    let mut sessions = SESSIONS.lock();
    sessions.retain(|session| session.strong_count() > 0);
    sessions.push(Arc::downgrade(session));
}

/// Ends with the process.
fn end_waits() -> ! {
    cuttlefs_common::tell!("interrupted: ending; a second signal ends this at once and cleans nothing up");
    std::thread::sleep(STEP_WAIT);
    loop {
        let sessions = SESSIONS.lock().clone();
        sessions.iter().filter_map(Weak::upgrade).for_each(|session| session.shut_down());
        std::thread::sleep(LOOK);
    }
}

/// Whether to end.
pub(super) fn asked() -> bool {
    ASKED.get().is_some_and(|asked| asked.load(Ordering::Relaxed))
}

/// # Errors
/// If a signal came.
pub(in crate::bench) fn check() -> anyhow::Result<()> {
    anyhow::ensure!(!asked(), "interrupted; what was measured so far is dropped");
    Ok(())
}
