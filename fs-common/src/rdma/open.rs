//! The choice of an RNIC for an endpoint.

use super::soft::{SoftDevice, SoftOptions};
use super::url::Endpoint;
use super::verbs::{Device, RdmaError};
use std::collections::HashMap;
use std::sync::Arc;

/// What makes a build with RDMA hardware. A macro, since `concat!` takes only literals.
macro_rules! how_to_have_hardware {
    () => {
        "install libibverbs-dev, librdmacm-dev and libclang-dev, and build again (scripts/up.sh, or cargo with \
         --features cuttlefs-server/verbs,cuttlefs-client/verbs)"
    };
}

const WITH_HARDWARE: &str = concat!(env!("CARGO_PKG_VERSION"), "\nRDMA hardware (rdma://): yes");
const WITHOUT_HARDWARE: &str =
    concat!(env!("CARGO_PKG_VERSION"), "\nRDMA hardware (rdma://): no; for it ", how_to_have_hardware!());

/// The version text of programs of this build: the version, and whether RDMA hardware is supported.
pub const VERSION: &str = if cfg!(feature = "verbs") { WITH_HARDWARE } else { WITHOUT_HARDWARE };

/// An RNIC that can connect to this endpoint.
///
/// # Errors
/// There is no such RNIC, or this build has no provider for it.
pub fn open_to_connect(endpoint: &Endpoint, options: SoftOptions) -> Result<Arc<dyn Device>, RdmaError> {
    match endpoint {
        Endpoint::Rdma { .. } => hardware(endpoint, options, false),
        Endpoint::Tcp { .. } | Endpoint::Unix(_) | Endpoint::Shm(_) => Ok(SoftDevice::new(options)),
    }
}

/// RNICs that can listen on these endpoints: one software RNIC for all endpoints that it can serve, and one device for each piece of hardware.
///
/// # Errors
/// One of the RNICs does not exist, or this build has no provider for it.
pub fn open_to_listen(endpoints: &[Endpoint], options: SoftOptions) -> Result<Devices, RdmaError> {
    let is_hardware = |endpoint: &&Endpoint| matches!(endpoint, Endpoint::Rdma { .. });
    let (hard, soft): (Vec<&Endpoint>, Vec<&Endpoint>) = endpoints.iter().partition(is_hardware);
    let mut devices: Vec<(Arc<dyn Device>, Vec<Endpoint>)> = Vec::new();
    if !soft.is_empty() {
        devices.push((SoftDevice::new(options.clone()), soft.into_iter().cloned().collect()));
    }
    for endpoint in hard {
        let device = hardware(endpoint, options.clone(), true)?;
        // If another endpoint opened the same hardware before, that device serves both, and this one is dropped.
        match devices
            .iter_mut()
            .find(|(known, _)| known.hardware().is_some() && known.name() == device.name())
        {
            Some((_, listens)) => listens.push(endpoint.clone()),
            None => devices.push((device, vec![endpoint.clone()])),
        }
    }
    Devices::new(devices)
}

/// RNICs that listen together, and the endpoints of each.
pub struct Devices {
    all: Vec<Arc<dyn Device>>,
    /// Index of each endpoint's device among all devices.
    of_endpoint: HashMap<Endpoint, usize>,
}

impl Devices {
    /// These devices, each with the endpoints that it listens on.
    ///
    /// # Errors
    /// There is no device.
    pub fn new(devices: Vec<(Arc<dyn Device>, Vec<Endpoint>)>) -> Result<Self, RdmaError> {
        if devices.is_empty() {
            return Err(RdmaError::Unsupported(
                "there is no endpoint, so no RNIC, to listen with".to_owned(),
            ));
        }
        let mut of_endpoint = HashMap::new();
        for (place, (_, endpoints)) in devices.iter().enumerate() {
            of_endpoint.extend(endpoints.iter().map(|endpoint| (endpoint.clone(), place)));
        }
        Ok(Self { all: devices.into_iter().map(|(device, _)| device).collect(), of_endpoint })
    }

    /// All devices, in the order of their indices.
    pub fn all(&self) -> &[Arc<dyn Device>] {
        &self.all
    }

    /// The index of the device that listens on this endpoint. Endpoints that no device was given belong to the first.
    pub fn place_of(&self, endpoint: &Endpoint) -> usize {
        self.of_endpoint.get(endpoint).copied().unwrap_or(0)
    }
}

/// One device for all endpoints.
impl From<Arc<dyn Device>> for Devices {
    fn from(device: Arc<dyn Device>) -> Self {
        Self { all: vec![device], of_endpoint: HashMap::new() }
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
    Err(lacks_hardware(endpoint))
}

/// The error of a build without RDMA hardware. Compiled in both builds' tests, since continuous integration runs those of the build that has it.
#[cfg(any(test, not(feature = "verbs")))]
fn lacks_hardware(endpoint: &Endpoint) -> RdmaError {
    let how = how_to_have_hardware!();
    RdmaError::Unsupported(format!("{endpoint}: this program was built without RDMA hardware; {how}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn endpoint(text: &str) -> Endpoint {
        text.parse().expect("an endpoint")
    }

    #[test]
    fn one_device_serves_all_links_of_the_software_rnic() {
        let endpoints = ["tcp://127.0.0.1:0", "shm:///a", "unix:///b"].map(endpoint);
        let devices = open_to_listen(&endpoints, SoftOptions::default()).expect("devices");
        assert_eq!(devices.all().len(), 1);
        assert!(open_to_listen(&[], SoftOptions::default()).is_err());
    }

    #[test]
    fn each_device_has_its_endpoints() {
        let soft = || -> Arc<dyn Device> { SoftDevice::new(SoftOptions::default()) };
        let [tcp, shm, other] = ["tcp://127.0.0.1:0", "shm:///a", "unix:///b"].map(endpoint);
        let devices = Devices::new(vec![(soft(), vec![tcp.clone()]), (soft(), vec![shm.clone()])]);
        let devices = devices.expect("two devices");
        assert_eq!([&tcp, &shm, &other].map(|endpoint| devices.place_of(endpoint)), [0, 1, 0]);
    }

    #[test]
    fn a_build_without_hardware_says_what_to_install() {
        let error = lacks_hardware(&endpoint("rdma://10.9.0.1")).to_string();
        for text in [&error, WITHOUT_HARDWARE] {
            for part in [
                "libibverbs-dev",
                "librdmacm-dev",
                "libclang-dev",
                "cuttlefs-server/verbs,cuttlefs-client/verbs",
            ] {
                assert!(text.contains(part), "{text}");
            }
        }
        assert!(error.contains("rdma://10.9.0.1"), "{error}");
        assert_eq!(VERSION == WITHOUT_HARDWARE, cfg!(not(feature = "verbs")));
    }

    #[cfg(not(feature = "verbs"))]
    #[test]
    fn a_build_without_hardware_refuses_it() {
        let endpoint = endpoint("rdma://10.9.0.1");
        let error = open_to_connect(&endpoint, SoftOptions::default()).err().expect("refused").to_string();
        assert!(error.contains("librdmacm-dev"), "{error}");
        let both = [endpoint, "tcp://127.0.0.1:0".parse().expect("an endpoint")];
        assert!(open_to_listen(&both, SoftOptions::default()).is_err());
    }
}
