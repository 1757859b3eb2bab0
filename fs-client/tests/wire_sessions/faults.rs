//! Faults that end a run: a panic in any thread, of the server or of the test, and an error that the server logs. For both the output has the line
//! that runs the episode again.

use std::fmt::{self, Write};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use tracing::field::{Field, Visit};
use tracing::{Event, Level, Subscriber};
use tracing_subscriber::layer::{Context, Layer, SubscriberExt};

/// The errors that were logged, and the line that runs the current episode again.
#[derive(Clone, Default)]
pub struct Faults(Arc<Mutex<Seen>>);

#[derive(Default)]
struct Seen {
    errors: Vec<String>,
    /// How to run the episode again.
    replay: String,
}

impl Faults {
    /// Sets the line that runs the current episode again, at its beginning.
    pub fn say(&self, replay: &str) {
        self.seen().replay = replay.to_owned();
    }

    fn seen(&self) -> MutexGuard<'_, Seen> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// # Panics
    /// An error was logged.
    pub fn check(&self) {
        let errors = self.seen().errors.clone();
        assert!(errors.is_empty(), "the server logs faults of its own: {errors:#?}");
    }
}

impl<S: Subscriber> Layer<S> for Faults {
    fn on_event(&self, event: &Event<'_>, _context: Context<'_, S>) {
        if *event.metadata().level() == Level::ERROR {
            let mut line = Line(event.metadata().target().to_owned());
            event.record(&mut line);
            self.seen().errors.push(line.0);
        }
    }
}

struct Line(String);

impl Visit for Line {
    fn record_debug(&mut self, field: &Field, value: &dyn fmt::Debug) {
        let _ = write!(self.0, " {field}={value:?}");
    }
}

/// Begins to watch panics and logged errors of all threads of this process.
pub fn watch() -> Faults {
    let faults = Faults::default();
    if tracing::subscriber::set_global_default(tracing_subscriber::registry().with(faults.clone())).is_err() {
        eprintln!("another test of this process watches the log");
    }
    let (tell, seen) = (std::panic::take_hook(), faults.clone());
    std::panic::set_hook(Box::new(move |panic| {
        tell(panic);
        eprintln!("run it again: {}", seen.seen().replay);
        // The panic may be in any thread, so the test cannot go on from here.
        std::process::abort();
    }));
    faults
}
