//! Ctrl-C and SIGTERM end a benchmark at its next step, so that servers are stopped and directories removed.
//!
//! A second one ends the process at once, for when the first is waited for in vain.

use anyhow::Context as _;
use signal_hook::consts::{SIGINT, SIGTERM};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};

/// Written by the signal handler, read by every loop here; it guards nothing but itself.
static ASKED: OnceLock<Arc<AtomicBool>> = OnceLock::new();

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
    Ok(())
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
