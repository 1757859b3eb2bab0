//! Windows by kmod-iommu: addresses of one PCI device that stay, while the IOMMU's entry behind each of them changes.
//!
//! # How it works
//! A window of the module has at most 2^20 pages, so a pool has one window for each 4 GiB, each of which is an open `/dev/cuttlefs_iommu`. The arena
//! of all windows is the frames' memory. `IommuWindow::export` returns their dma-bufs, which the device's driver registers once.
//!
//! The kernel may take a page from its frame (swap, migration). Then the module shows magic there until the page is shown again.
//!
//! # Failure
//! An error of the module (the device lost its driver, the IOMMU refused an entry) ends the windows: closing the files hides all pages, whatever
//! state they are in.

use super::iommu_sys::{self, Arena, Entry, GONE, MAX_ARENA_PAGES, MAX_PAGES, Place};
use super::{PageWindow, Pointed, WindowLost};
use crate::pages::frames::Frames;
use cuttlefs_common::ids::{FrameIndex, PAGE_SIZE};
use parking_lot::Mutex;
use rustix::fd::{AsFd, OwnedFd};
use rustix::fs::{Mode, OFlags};
use std::fmt;
use std::io;
use std::path::Path;
use std::str::FromStr;
use std::sync::Arc;

/// Path of the module's device.
pub const DEVICE: &str = "/dev/cuttlefs_iommu";
/// Most windows of a pool: for 1 TiB. Each takes 4 bytes for each frame and 36 bytes for each of its pages.
const MAX_WINDOWS: u64 = 256;

/// The address of a PCI device, as in /sys/bus/pci/devices: SEGMENT:BUS:DEVICE.FUNCTION, in hexadecimal.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PciAddress(Place);

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
            Some(Place {
                segment: number(segment, i32::MAX as u32)?,
                bus: number(bus, 0xff)?,
                devfn: 8 * number(device, 31)? + number(function, 7)?,
            })
        };
        parse().map(Self).ok_or_else(|| NoPciAddress(text.to_owned()))
    }
}

impl fmt::Display for PciAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Place { segment, bus, devfn } = self.0;
        write!(f, "{segment:04x}:{bus:02x}:{:02x}.{:x}", devfn / 8, devfn % 8)
    }
}

/// Why a window could not be made.
#[derive(Debug, thiserror::Error)]
pub enum NoWindow {
    /// The module's device cannot be opened.
    #[error("{device}: {0}; it takes root and `insmod cuttlefs_iommu.ko` (kmod-iommu/README.md)", device = DEVICE)]
    NoModule(io::Error),
    /// The module refused.
    #[error("{device}: {source}; {}", advice(.source))]
    Refused {
        /// The PCI device.
        device: PciAddress,
        /// The module's error.
        source: io::Error,
    },
    /// The pool or the memory is larger than windows can be.
    #[error("a pool of {pages} pages with {frames} frames is more than windows can show")]
    TooLarge {
        /// Pages of the pool.
        pages: u64,
        /// Frames of the memory.
        frames: u64,
    },
}

fn advice(source: &io::Error) -> &'static str {
    match source.raw_os_error() {
        Some(libc::ENODEV) => "there is no such device, or it has no driver of the kernel's (`lspci -k`)",
        Some(libc::EOPNOTSUPP) => {
            "its DMA does not go through an IOMMU that can change a page at a time: boot with intel_iommu=on, or for AMD without iommu=pt"
        }
        Some(libc::EPROTONOSUPPORT) => "the module is of another version: load the one of this release",
        _ => "the kernel's log may say more (`dmesg`)",
    }
}

/// The windows of a pool (see the module).
#[derive(Debug)]
pub struct IommuWindow {
    device: PciAddress,
    /// The windows, in the order of the pool; empty once it is closed.
    files: Mutex<Vec<OwnedFd>>,
    /// Keeps the memory of the arena.
    _frames: Arc<Frames>,
}

impl IommuWindow {
    /// Makes windows of a device over all pages of a pool. They show no page yet.
    ///
    /// # Errors
    /// `NoWindow`, which says what to do.
    pub fn new(device: PciAddress, pool_pages: u64, frames: &Arc<Frames>) -> Result<Self, NoWindow> {
        let memory = frames.memory();
        let frame_count = (memory.len() / PAGE_SIZE) as u64;
        if pool_pages == 0 || pool_pages > MAX_PAGES * MAX_WINDOWS || frame_count > MAX_ARENA_PAGES {
            return Err(NoWindow::TooLarge { pages: pool_pages, frames: frame_count });
        }
        let arena = Arena { base: memory.base_address().as_ptr() as usize, pages: frame_count as u32 };
        let mut magic = [0; PAGE_SIZE];
        memory.read(Frames::offset(FrameIndex::MAGIC), &mut magic);
        let mut files = Vec::new();
        let mut first = 0;
        while first < pool_pages {
            let pages = MAX_PAGES.min(pool_pages - first);
            let flags = OFlags::RDWR | OFlags::CLOEXEC;
            let file = rustix::fs::open(Path::new(DEVICE), flags, Mode::empty());
            let file = file.map_err(|errno| NoWindow::NoModule(errno.into()))?;
            iommu_sys::create(file.as_fd(), device.0, pages as u32, arena, &magic)
                .map_err(|source| NoWindow::Refused { device, source })?;
            files.push(file);
            first += pages;
        }
        Ok(Self { device, files: Mutex::new(files), _frames: frames.clone() })
    }

    /// The windows' addresses as dma-bufs, in the order of the pool, for the device's driver to register.
    ///
    /// # Errors
    /// The kernel's error.
    pub fn export(&self) -> io::Result<Vec<OwnedFd>> {
        self.files.lock().iter().map(|file| iommu_sys::export(file.as_fd())).collect()
    }
}

/// Groups consecutive changes of the same window: the index of the window, and the changes in the form in which the module takes them.
fn runs(changes: &[Pointed]) -> impl Iterator<Item = (usize, Vec<Entry>)> {
    changes.chunk_by(|one, next| one.page.0 / MAX_PAGES == next.page.0 / MAX_PAGES).map(|run| {
        let entries = run.iter().map(|change| Entry {
            page: (change.page.0 % MAX_PAGES) as u32,
            target: change.frame.map_or(GONE, |frame| frame.0),
        });
        ((run[0].page.0 / MAX_PAGES) as usize, entries.collect())
    })
}

impl PageWindow for IommuWindow {
    fn point(&self, changes: &[Pointed]) -> Result<(), WindowLost> {
        let files = self.files.lock();
        for (window, entries) in runs(changes) {
            let pointed = match files.get(window) {
                Some(file) => iommu_sys::point(file.as_fd(), &entries),
                None => Err(io::ErrorKind::NotConnected.into()),
            };
            pointed.map_err(|source| WindowLost { advice: advice(&source), source })?;
        }
        Ok(())
    }

    fn close(&self) {
        tracing::info!(device = %self.device, "windows of a device are closed");
        self.files.lock().clear();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use cuttlefs_common::ids::PoolPage;
    use cuttlefs_common::region::MagicPattern;

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

    #[test]
    fn changes_go_to_the_window_of_their_page_in_order() {
        let change =
            |page, frame: Option<u32>| Pointed { page: PoolPage(page), frame: frame.map(FrameIndex) };
        let changes = [
            change(5, Some(9)),
            change(MAX_PAGES - 1, None),
            change(MAX_PAGES, Some(7)),
            change(2 * MAX_PAGES + 3, None),
            change(5, None),
        ];
        let entry = |page, target| Entry { page, target };
        let expected = vec![
            (0, vec![entry(5, 9), entry(MAX_PAGES as u32 - 1, GONE)]),
            (1, vec![entry(0, 7)]),
            (2, vec![entry(3, GONE)]),
            (0, vec![entry(5, GONE)]),
        ];
        assert_eq!(runs(&changes).collect::<Vec<_>>(), expected);
    }

    #[test]
    fn without_the_module_or_with_too_large_a_pool_it_says_so() {
        let frames = Arc::new(Frames::new(5, &MagicPattern::new([7; 32])).expect("frames"));
        let device: PciAddress = "0000:00:1f.7".parse().expect("an address");
        if !Path::new(DEVICE).exists() {
            let error = IommuWindow::new(device, 10, &frames).expect_err("no module").to_string();
            assert!(error.contains("insmod"), "{error}");
        }
        let error = IommuWindow::new(device, MAX_PAGES * MAX_WINDOWS + 1, &frames).expect_err("too large");
        assert!(matches!(error, NoWindow::TooLarge { .. }), "{error}");
    }
}
