//! The reason for which a connection is ended.

use std::borrow::Cow;
use std::fmt;
use std::io;

/// A peer's breach of the protocol, or a failure of its link, that ends its connection: a sentence for the log, and for the peer if it can still be
/// told. No caller distinguishes cases of it; code that has to has an error type of its own.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Breach(Cow<'static, str>);

impl Breach {
    /// A breach with this text.
    pub const fn of(what: &'static str) -> Self {
        Self(Cow::Borrowed(what))
    }

    /// A breach with this text, which has figures in it.
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
