//! An error and its causes as one line for people.

use std::error::Error;

/// The text of the error, then the texts of its causes, each behind a colon. A cause is left out if the text before it already ends with it: some
/// errors show their cause themselves, because they are logged without their chain.
pub fn explain(error: &(dyn Error + 'static)) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(next) = cause {
        let said = next.to_string();
        if !text.ends_with(&said) {
            text.push_str(": ");
            text.push_str(&said);
        }
        cause = next.source();
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rdma::RdmaError;

    #[derive(Debug, thiserror::Error)]
    #[error("cannot mount")]
    struct Outer(#[source] RdmaError);

    #[test]
    fn every_cause_once() {
        let source = std::io::Error::other("nobody is there");
        let inner = RdmaError::Io { action: "connect to", endpoint: "tcp://a:1".to_owned(), source };
        assert_eq!(explain(&inner), "connect to tcp://a:1: nobody is there");
        assert_eq!(explain(&Outer(inner)), "cannot mount: connect to tcp://a:1: nobody is there");
    }
}
