//! Which RNIC an endpoint is of.

use super::soft::{SoftDevice, SoftOptions};
use super::url::Endpoint;
use super::verbs::{Device, RdmaError};
use std::sync::Arc;

/// What a program of this build says of itself: its version, and whether it knows RDMA hardware.
#[cfg(feature = "verbs")]
pub const VERSION: &str = concat!(env!("CARGO_PKG_VERSION"), "\nRDMA hardware (rdma://): yes");
/// What a program of this build says of itself: its version, and whether it knows RDMA hardware.
#[cfg(not(feature = "verbs"))]
pub const VERSION: &str = concat!(
    env!("CARGO_PKG_VERSION"),
    "\nRDMA hardware (rdma://): no; for it install libibverbs-dev, librdmacm-dev and libclang-dev, and build again (scripts/up.sh, or cargo with\n",
    "--features cuttlefs-server/verbs,cuttlefs-client/verbs)"
);

/// An RNIC that can connect to this endpoint.
///
/// # Errors
/// There is none for it, or this build knows none of its kind.
pub fn open_to_connect(endpoint: &Endpoint, options: SoftOptions) -> Result<Arc<dyn Device>, RdmaError> {
    match endpoint {
        Endpoint::Rdma { .. } => hardware(endpoint, options, false),
        Endpoint::Tcp { .. } | Endpoint::Unix(_) | Endpoint::Shm(_) => Ok(SoftDevice::new(options)),
    }
}

/// An RNIC that can listen on all of these endpoints.
///
/// # Errors
/// There is none for them, or this build knows none of their kind.
pub fn open_to_listen(endpoints: &[Endpoint], options: SoftOptions) -> Result<Arc<dyn Device>, RdmaError> {
    let is_hardware = |endpoint: &&Endpoint| matches!(endpoint, Endpoint::Rdma { .. });
    match endpoints.iter().find(is_hardware) {
        None => Ok(SoftDevice::new(options)),
        Some(endpoint) if endpoints.iter().all(|endpoint| is_hardware(&endpoint)) => {
            hardware(endpoint, options, true)
        }
        Some(endpoint) => Err(RdmaError::Unsupported(format!(
            "{endpoint} cannot be served together with endpoints of other kinds yet; give one or the others"
        ))),
    }
}

#[cfg(feature = "verbs")]
fn hardware(endpoint: &Endpoint, options: SoftOptions, listens: bool) -> Result<Arc<dyn Device>, RdmaError> {
    use super::verbs_provider::VerbsDevice;
    let open = if listens { VerbsDevice::to_listen } else { VerbsDevice::to_connect };
    Ok(open(endpoint, options.tcp)?)
}

#[cfg(not(feature = "verbs"))]
fn hardware(
    endpoint: &Endpoint,
    _options: SoftOptions,
    _listens: bool,
) -> Result<Arc<dyn Device>, RdmaError> {
    Err(RdmaError::Unsupported(format!(
        "{endpoint}: this program was built without RDMA hardware; install libibverbs-dev, librdmacm-dev and libclang-dev, and build it \
         again (scripts/up.sh, or cargo with --features cuttlefs-server/verbs,cuttlefs-client/verbs)"
    )))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn endpoints_of_two_kinds_are_not_served_together() {
        let endpoints =
            ["rdma://10.9.0.1", "tcp://127.0.0.1:0"].map(|text| text.parse().expect("an endpoint"));
        let error = open_to_listen(&endpoints, SoftOptions::default()).err().expect("refused").to_string();
        assert!(error.contains("rdma://10.9.0.1:7950"), "{error}");
        assert!(open_to_listen(&endpoints[1..], SoftOptions::default()).is_ok());
    }

    #[cfg(not(feature = "verbs"))]
    #[test]
    fn a_build_without_hardware_says_what_to_install() {
        let endpoint = "rdma://10.9.0.1".parse().expect("an endpoint");
        let error = open_to_connect(&endpoint, SoftOptions::default()).err().expect("refused").to_string();
        assert!(error.contains("librdmacm-dev"), "{error}");
    }
}
