//! The PCI device of an RNIC: whose DMA an IOMMU translates.

use std::fmt;
use std::io;
use std::path::Path;
use std::str::FromStr;

/// The address of a PCI device, as in /sys/bus/pci/devices: SEGMENT:BUS:DEVICE.FUNCTION, in hexadecimal.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PciAddress {
    pub(super) segment: u32,
    pub(super) bus: u32,
    /// 8 times the device, plus the function.
    pub(super) devfn: u32,
}

/// A text that is not the address of a PCI device.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "`{0}` is no address of a PCI device; they look like 0000:03:00.0 (`ls /sys/bus/pci/devices`, `lspci -D`)"
)]
pub struct NoPciAddress(String);

impl FromStr for PciAddress {
    type Err = NoPciAddress;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let number = |text: &str, most: u32| {
            let is_plain = !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_hexdigit());
            u32::from_str_radix(text, 16).ok().filter(|number| is_plain && *number <= most)
        };
        let parse = || {
            let (segment, rest) = text.split_once(':')?;
            let (bus, rest) = rest.split_once(':')?;
            let (device, function) = rest.split_once('.')?;
            Some(Self {
                segment: number(segment, i32::MAX as u32)?,
                bus: number(bus, 0xff)?,
                devfn: 8 * number(device, 31)? + number(function, 7)?,
            })
        };
        parse().ok_or_else(|| NoPciAddress(text.to_owned()))
    }
}

impl fmt::Display for PciAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { segment, bus, devfn } = self;
        write!(f, "{segment:04x}:{bus:02x}:{:02x}.{:x}", devfn / 8, devfn % 8)
    }
}

/// An RNIC without a PCI device of its own.
#[derive(Debug, thiserror::Error)]
pub enum NoPciDevice {
    /// There is no device below it, as with soft-RoCE.
    #[error("{rnic} is no PCI device ({folder}: {source}); soft-RoCE is none: it does no DMA")]
    Software {
        /// The RNIC.
        rnic: String,
        /// Where its device would be.
        folder: String,
        /// The kernel's error.
        source: io::Error,
    },
    /// The device below it is of another bus, as a part of a PCI device (a subfunction).
    #[error("{rnic} is no PCI device of its own, but {device}")]
    Another {
        /// The RNIC.
        rnic: String,
        /// The device.
        device: String,
    },
}

/// The PCI device of an RNIC, by the kernel's name of that; `class` is /sys/class/infiniband.
///
/// # Errors
/// `NoPciDevice`.
pub fn of_rnic(class: &Path, rnic: &str) -> Result<PciAddress, NoPciDevice> {
    let folder = class.join(rnic).join("device");
    // A link to the device's folder, whose name is the address.
    let device = folder.canonicalize().map_err(|source| NoPciDevice::Software {
        rnic: rnic.to_owned(),
        folder: folder.display().to_string(),
        source,
    })?;
    let name = device.file_name().unwrap_or_default().to_string_lossy().into_owned();
    name.parse().map_err(|_| NoPciDevice::Another { rnic: rnic.to_owned(), device: name })
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;
    use std::os::unix::fs::symlink;

    #[test]
    fn addresses_round_trip_and_others_are_refused() {
        for text in ["0000:03:00.0", "0001:ff:1f.7", "10000:00:02.0"] {
            assert_eq!(text.parse::<PciAddress>().expect(text).to_string(), text);
        }
        for text in [
            "",
            "03:00.0",
            "0000:03:00",
            "0000:100:00.0",
            "0000:03:20.0",
            "0000:03:00.8",
            "0000:+3:00.0",
            "x",
        ] {
            assert_eq!(text.parse::<PciAddress>(), Err(NoPciAddress(text.to_owned())));
        }
    }

    /// Folders as the kernel has them: an RNIC of a PCI device, one of a part of such a device, and one without.
    #[test]
    fn an_rnics_device_is_the_one_that_its_folder_leads_to() {
        let root = tempfile::tempdir().expect("a folder");
        let class = root.path().join("class/infiniband");
        for (rnic, device) in [
            ("mlx5_0", Some("devices/pci0000:00/0000:00:02.0/0000:03:00.1")),
            ("mlx5_1", Some("devices/pci0000:00/0000:00:02.0/0000:03:00.1/mlx5_core.sf.4")),
            ("rxe0", None),
        ] {
            let folder = root.path().join(device.unwrap_or("devices/virtual")).join("infiniband").join(rnic);
            fs::create_dir_all(&folder).expect("folders");
            if device.is_some() {
                symlink("../..", folder.join("device")).expect("a link");
            }
            fs::create_dir_all(&class).expect("folders");
            symlink(&folder, class.join(rnic)).expect("a link");
        }
        assert_eq!(of_rnic(&class, "mlx5_0").expect("an address").to_string(), "0000:03:00.1");
        for (rnic, words) in [
            ("mlx5_1", "but mlx5_core.sf.4"),
            ("rxe0", "soft-RoCE"),
            ("rxe0", "rxe0/device"),
            ("none", "none is no PCI device"),
        ] {
            let error = of_rnic(&class, rnic).expect_err(rnic).to_string();
            assert!(error.contains(words), "{error}");
        }
    }
}
