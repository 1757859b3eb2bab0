//! Calls that may never return, such as a look at a path of a file system whose server is away.

use crate::threads::NO_THREAD;
use anyhow::Context;
use std::sync::mpsc;
use std::time::Duration;

/// Runs `work` in a thread of its own. `None` if it takes longer than `limit`: then the thread goes on by itself, and ends with the process at the
/// latest.
///
/// # Errors
/// No thread can be started.
pub fn within<T: Send + 'static>(
    limit: Duration,
    work: impl FnOnce() -> T + Send + 'static,
) -> anyhow::Result<Option<T>> {
    let (done, answer) = mpsc::sync_channel(1);
    std::thread::Builder::new()
        .name("deadline".to_owned())
        .spawn(move || {
            // If it was late nobody receives this.
            let _ = done.send(work());
        })
        .context(NO_THREAD)?;
    Ok(answer.recv_timeout(limit).ok())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_takes_too_long_is_given_up() {
        assert_eq!(within(Duration::from_secs(60), || 7).expect("a thread"), Some(7));
        let (keep, never) = mpsc::channel::<()>();
        let hung = within(Duration::from_millis(10), move || never.recv().is_ok()).expect("a thread");
        assert_eq!(hung, None);
        drop(keep);
    }
}
