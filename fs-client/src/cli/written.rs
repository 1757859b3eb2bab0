//! A server's endpoint, as its user wrote it.

use cuttlefs_common::rdma::{Endpoint, EndpointError};
use std::str::FromStr;

/// An endpoint and its words. A mount's source is the words: mount(8) compares them with the line of fstab, so `mount -a` finds what is mounted.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Written {
    pub(super) endpoint: Endpoint,
    words: String,
}

impl FromStr for Written {
    type Err = EndpointError;

    fn from_str(words: &str) -> Result<Self, Self::Err> {
        Ok(Self { endpoint: words.parse()?, words: words.to_owned() })
    }
}

impl From<&Endpoint> for Written {
    fn from(endpoint: &Endpoint) -> Self {
        Self { endpoint: endpoint.clone(), words: endpoint.to_string() }
    }
}

impl std::fmt::Display for Written {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.words)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_words_stay_and_lead_to_the_same_place() {
        for (words, full) in [
            ("tcp://box", "tcp://box:7950"),
            ("rdma://10.9.0.1", "rdma://10.9.0.1:7950"),
            ("rdma://10.9.0.1:7950?device=rxe0", "rdma://10.9.0.1:7950?device=rxe0&port=1"),
        ] {
            let written: Written = words.parse().expect(words);
            assert_eq!((written.to_string().as_str(), written.endpoint.to_string().as_str()), (words, full));
            // As `status` and `umount` read it back.
            assert_eq!(written.to_string().parse::<Endpoint>().expect(words), written.endpoint);
        }
        assert!("box".parse::<Written>().is_err());
    }
}
