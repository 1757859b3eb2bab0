//! Lines for people, on standard output and standard error.
//!
//! # Failure
//! The reader of these lines may be gone, or their disk may be full. Neither ends or undoes anything. `println!` would panic there, and a panic ends
//! the process (`panic_ends`): a mount would end with all changes that only it has.

use std::fmt::Arguments;
use std::io::Write;

/// Writes text and flushes it; errors are ignored.
pub fn write(mut to: impl Write, text: Arguments<'_>) {
    // In one piece, so that lines of two processes are not mixed.
    let _ = to.write_all(text.to_string().as_bytes()).and_then(|()| to.flush());
}

/// A line on standard output.
#[macro_export]
macro_rules! say {
    ($($text:tt)*) => {
        $crate::terminal::write(std::io::stdout(), format_args!("{}\n", format_args!($($text)*)))
    };
}

/// A line on standard error.
#[macro_export]
macro_rules! tell {
    ($($text:tt)*) => {
        $crate::terminal::write(std::io::stderr(), format_args!("{}\n", format_args!($($text)*)))
    };
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::{Error, ErrorKind};

    /// A full disk.
    struct Full;

    impl Write for Full {
        fn write(&mut self, _: &[u8]) -> std::io::Result<usize> {
            Err(Error::from(ErrorKind::StorageFull))
        }

        fn flush(&mut self) -> std::io::Result<()> {
            Err(Error::from(ErrorKind::StorageFull))
        }
    }

    #[test]
    fn what_cannot_be_written_ends_nothing() {
        let mut text = Vec::new();
        write(&mut text, format_args!("{} and {}\n", 1, "two"));
        assert_eq!(text, b"1 and two\n");
        write(Full, format_args!("three"));
    }
}
