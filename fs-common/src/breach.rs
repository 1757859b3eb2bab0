//! The reasons for which a connection is ended.

use std::borrow::Cow;
use std::fmt;
use std::io;

/// What a peer did against the protocol, or what failed on the way to it, so that its connection is ended: a sentence for the log, and for the
/// peer where it can still hear it. Nobody goes on from it in one way or another: whoever tells cases apart has an error of his own.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Breach(Cow<'static, str>);

impl Breach {
    /// In these words.
    pub const fn of(what: &'static str) -> Self {
        Self(Cow::Borrowed(what))
    }

    /// In these words, with figures in them.
    pub fn new(what: fmt::Arguments<'_>) -> Self {
        Self(Cow::Owned(what.to_string()))
    }
}

impl fmt::Display for Breach {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl<E: std::error::Error> From<E> for Breach {
    fn from(error: E) -> Self {
        Self(Cow::Owned(error.to_string()))
    }
}

impl From<Breach> for io::Error {
    fn from(breach: Breach) -> Self {
        Self::other(breach.to_string())
    }
}
