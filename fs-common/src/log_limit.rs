//! Messages that no peer can make endless: a bounded number of lines of each kind a minute, then one line with the number left out.
//!
//! A *kind* is a place in the code: a peer can bring the process past few of those. Lines below `INFO` appear only on request
//! and are not limited. A kind whose minute is over tells how many lines were left out with the next line of any kind.

use parking_lot::Mutex;
use std::collections::HashMap;
use std::fmt;
use std::time::{Duration, Instant};
use tracing::callsite::Identifier;
use tracing::{Event, Level, Metadata, Subscriber};
use tracing_subscriber::fmt::format::{Format, Writer};
use tracing_subscriber::fmt::{FmtContext, FormatEvent, FormatFields};
use tracing_subscriber::registry::LookupSpan;

/// Lines of one kind in a minute. Ten kinds that a peer can trigger then make some 100 MB a day.
pub const LINES_A_MINUTE: u32 = 30;
const MINUTE: Duration = Duration::from_secs(60);

/// The lines of one kind in its minute.
struct Kind {
    began: Instant,
    lines: u32,
    left_out: u64,
    place: String,
}

/// Kinds by their places in the code: at most as many as the program has places that log.
#[derive(Default)]
struct Kinds(HashMap<Identifier, Kind>);

impl Kinds {
    /// Whether a line may be written. Counts it.
    fn admit(&mut self, metadata: &Metadata<'_>, now: Instant) -> bool {
        if *metadata.level() > Level::INFO {
            return true;
        }
        let kind = self.0.entry(metadata.callsite()).or_insert_with(|| Kind {
            began: now,
            lines: 0,
            left_out: 0,
            place: format!("{}:{}", metadata.target(), metadata.line().unwrap_or(0)),
        });
        if now - kind.began >= MINUTE {
            (kind.began, kind.lines) = (now, 0);
        }
        let is_written = kind.lines < LINES_A_MINUTE;
        kind.lines += u32::from(is_written);
        kind.left_out += u64::from(!is_written);
        is_written
    }

    /// The places whose minute is over, each with the number of lines that were left out.
    fn left_out(&mut self, now: Instant) -> Vec<(String, u64)> {
        let over = self.0.values_mut().filter(|kind| kind.left_out > 0 && now - kind.began >= MINUTE);
        over.map(|kind| (kind.place.clone(), std::mem::take(&mut kind.left_out))).collect()
    }
}

/// Writes lines as `Format` does, but bounds those of one kind.
#[derive(Default)]
pub struct Limited {
    format: Format,
    kinds: Mutex<Kinds>,
}

impl<S, N> FormatEvent<S, N> for Limited
where
    S: Subscriber + for<'a> LookupSpan<'a>,
    N: for<'a> FormatFields<'a> + 'static,
{
    fn format_event(
        &self,
        context: &FmtContext<'_, S, N>,
        mut writer: Writer<'_>,
        event: &Event<'_>,
    ) -> fmt::Result {
        let now = Instant::now();
        let (left_out, is_written) = {
            let mut kinds = self.kinds.lock();
            (kinds.left_out(now), kinds.admit(event.metadata(), now))
        };
        for (place, lines) in left_out {
            writeln!(writer, "({lines} more lines of {place} were left out)")?;
        }
        if is_written { self.format.format_event(context, writer, event) } else { Ok(()) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::{self, Write};
    use std::sync::Arc;

    #[derive(Clone, Default)]
    struct Lines(Arc<Mutex<Vec<u8>>>);

    impl Write for Lines {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            self.0.lock().write(bytes)
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    #[test]
    fn a_kind_is_limited_and_others_are_not() {
        let lines = Lines::default();
        let writer = lines.clone();
        let subscriber = tracing_subscriber::fmt()
            .with_max_level(Level::TRACE)
            .with_ansi(false)
            .with_writer(move || writer.clone())
            .event_format(Limited::default())
            .finish();
        tracing::subscriber::with_default(subscriber, || {
            for number in 0..10 * LINES_A_MINUTE {
                tracing::warn!(number, "flood");
                tracing::debug!(number, "detail");
            }
            tracing::error!("something else");
        });
        let text = String::from_utf8(lines.0.lock().clone()).expect("text");
        let count = |what| text.lines().filter(|line| line.contains(what)).count();
        assert_eq!(count("flood"), LINES_A_MINUTE as usize);
        assert_eq!(count("detail"), 10 * LINES_A_MINUTE as usize);
        assert_eq!(count("something else"), 1);
    }

    #[test]
    fn what_was_left_out_is_told_when_the_minute_is_over() {
        struct Site;
        impl tracing::callsite::Callsite for Site {
            fn set_interest(&self, _: tracing::subscriber::Interest) {}
            fn metadata(&self) -> &Metadata<'_> {
                &METADATA
            }
        }
        static SITE: Site = Site;
        static METADATA: Metadata<'static> = tracing::metadata! {
            name: "a line",
            target: "here",
            level: Level::WARN,
            fields: &[],
            callsite: &SITE,
            kind: tracing::metadata::Kind::EVENT,
        };
        let mut kinds = Kinds::default();
        let began = Instant::now();
        let written = (0..100).filter(|_| kinds.admit(&METADATA, began)).count();
        assert_eq!(written, LINES_A_MINUTE as usize);
        assert_eq!(kinds.left_out(began + MINUTE / 2), []);
        let told = kinds.left_out(began + MINUTE);
        assert_eq!(
            told.iter().map(|(_, lines)| *lines).collect::<Vec<_>>(),
            [100 - u64::from(LINES_A_MINUTE)]
        );
        assert!(told[0].0.starts_with("here:"));
        assert_eq!(kinds.left_out(began + MINUTE), [], "once");
        assert!(kinds.admit(&METADATA, began + MINUTE), "a new minute");
    }
}
