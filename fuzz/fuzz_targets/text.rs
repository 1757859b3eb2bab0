//! What people write: endpoints and sizes. Whatever parses prints as something that parses to the same.
#![no_main]

use cuttlefs_common::rdma::Endpoint;
use cuttlefs_common::size::ByteSize;
use libfuzzer_sys::fuzz_target;

fuzz_target!(|text: &str| {
    if let Ok(endpoint) = text.parse::<Endpoint>() {
        assert_eq!(endpoint.to_string().parse::<Endpoint>().as_ref(), Ok(&endpoint));
    }
    if let Ok(size) = text.parse::<ByteSize>() {
        // Printed to one decimal, so only the magnitude must survive.
        let printed: ByteSize = size.to_string().parse().expect("a printed size parses");
        assert!(printed.0.abs_diff(size.0) <= size.0 / 16, "{text}: {size}");
    }
});
