//! A window by kmod-iommu: addresses of PCI devices that stay, while the IOMMU's entry behind each of them changes.
//!
//! # How it works
//! Each device has a window of its own over all of the pool, an open `/dev/cuttlefs_iommu`. The arena of all is the frames' memory.
//! `IommuWindow::export` gives a dma-buf over the addresses, which the device's driver registers once. A change is made in each of them.
//!
//! A window of the module has at most 2^20 pages, so a pool of more than 4 GiB has none.
//!
//! The kernel may take a page from its frame (swap, migration). Then the module shows magic there until the page is shown again.
//!
//! # Failure
//! An error of the module (a device lost its driver, the IOMMU refused an entry) ends all windows: closing the files hides all pages, whatever state
//! they are in.

use super::iommu_sys::{self, Arena, Entry, GONE, MAX_ARENA_PAGES, MAX_PAGES};
use super::pci_address::PciAddress;
use super::{PageWindow, Pointed, WindowLost};
use crate::pages::frames::Frames;
use cuttlefs_common::ids::{FrameIndex, PAGE_SIZE, PAGE_SIZE_U64};
use cuttlefs_common::size::ByteSize;
use parking_lot::Mutex;
use rustix::fd::{AsFd, OwnedFd};
use rustix::fs::{Mode, OFlags};
use std::io::{self, ErrorKind};
use std::path::Path;
use std::sync::Arc;

/// Path of the module's device.
pub const DEVICE: &str = "/dev/cuttlefs_iommu";

/// Why a window could not be made.
#[derive(Debug, thiserror::Error)]
pub enum NoWindow {
    /// The module's device cannot be opened.
    #[error("{device}: {source}; {}", how_to_open(.source), device = DEVICE)]
    NoModule {
        /// The kernel's error.
        source: io::Error,
    },
    /// The module refused.
    #[error("the module makes no window for {rnic} ({device}): {source}; {}", advice(.source))]
    Refused {
        /// The RNIC.
        rnic: String,
        /// The PCI device.
        device: PciAddress,
        /// The module's error.
        source: io::Error,
    },
    /// The pool is larger than a window can be.
    #[error(
        "a window shows {} of a pool at most, and this one has {}; serve a smaller pool",
        ByteSize(MAX_PAGES * PAGE_SIZE_U64),
        ByteSize(.pages * PAGE_SIZE_U64)
    )]
    LargePool {
        /// Pages of the pool.
        pages: u64,
    },
    /// There are more frames than a window can show.
    #[error(
        "a window shows frames of {} at most, and this server has {}; give it less --memory",
        ByteSize(MAX_ARENA_PAGES * PAGE_SIZE_U64),
        ByteSize(.frames * PAGE_SIZE_U64)
    )]
    ManyFrames {
        /// Frames of the memory.
        frames: u64,
    },
}

fn how_to_open(source: &io::Error) -> &'static str {
    match source.kind() {
        ErrorKind::PermissionDenied => "run the server as root",
        _ => {
            "load the module: `modprobe cuttlefs_iommu` where it is installed, else `insmod kmod-iommu/cuttlefs_iommu.ko` (kmod-iommu/README.md builds it)"
        }
    }
}

fn advice(source: &io::Error) -> &'static str {
    match source.raw_os_error() {
        Some(libc::ENODEV) => "there is no such device, or it has no driver of the kernel's (`lspci -k`)",
        Some(libc::EOPNOTSUPP) => {
            "its DMA does not go through an IOMMU that can change a page at a time: boot with intel_iommu=on, or for AMD without iommu=pt"
        }
        Some(libc::EPROTONOSUPPORT) => "the module is of another version: load the one of this release",
        Some(libc::ENOMEM | libc::ENOSPC) => {
            "the kernel has no memory for it (36 bytes a page of the pool, and 4 a frame), or the device no addresses"
        }
        _ => "the kernel's log may say more (`dmesg`)",
    }
}

/// A window of one device.
#[derive(Debug)]
struct OfDevice {
    rnic: String,
    file: OwnedFd,
}

/// The window of a pool (see the module).
#[derive(Debug)]
pub struct IommuWindow {
    /// Each device's; none once it is closed.
    of_devices: Mutex<Vec<OfDevice>>,
    bytes: u64,
    /// Keeps the memory of the arena.
    frames: Arc<Frames>,
}

impl IommuWindow {
    /// Makes the window of these RNICs over all pages of a pool. It shows no page yet.
    ///
    /// # Errors
    /// `NoWindow`, which says what to do.
    pub fn new(
        rnics: &[(String, PciAddress)],
        pool_pages: u64,
        frames: &Arc<Frames>,
    ) -> Result<Self, NoWindow> {
        let memory = frames.memory();
        let frame_count = (memory.len() / PAGE_SIZE) as u64;
        let Some(pages) = u32::try_from(pool_pages).ok().filter(|_| pool_pages <= MAX_PAGES) else {
            return Err(NoWindow::LargePool { pages: pool_pages });
        };
        let Some(arena_pages) = u32::try_from(frame_count).ok().filter(|_| frame_count <= MAX_ARENA_PAGES)
        else {
            return Err(NoWindow::ManyFrames { frames: frame_count });
        };
        let arena = Arena { base: memory.base_address().as_ptr() as usize, pages: arena_pages };
        let mut magic = [0; PAGE_SIZE];
        memory.read(Frames::offset(FrameIndex::MAGIC), &mut magic);
        let of_device = |(rnic, device): &(String, PciAddress)| {
            let flags = OFlags::RDWR | OFlags::CLOEXEC;
            let file = rustix::fs::open(Path::new(DEVICE), flags, Mode::empty());
            let file = file.map_err(|errno| NoWindow::NoModule { source: errno.into() })?;
            let refused = |source| NoWindow::Refused { rnic: rnic.clone(), device: *device, source };
            iommu_sys::create(file.as_fd(), *device, pages, arena, &magic).map_err(refused)?;
            Ok(OfDevice { rnic: rnic.clone(), file })
        };
        let of_devices = rnics.iter().map(of_device).collect::<Result<_, _>>()?;
        let bytes = pool_pages * PAGE_SIZE_U64;
        Ok(Self { of_devices: Mutex::new(of_devices), bytes, frames: frames.clone() })
    }

    /// The addresses of an RNIC's window as a dma-buf of [`Self::bytes`], for its driver to register.
    ///
    /// # Errors
    /// The kernel's error; `NotFound`: the window is not of that RNIC, or is closed.
    pub fn export(&self, rnic: &str) -> io::Result<OwnedFd> {
        let of_devices = self.of_devices.lock();
        let found = of_devices.iter().find(|of_device| of_device.rnic == rnic);
        iommu_sys::export(found.ok_or(ErrorKind::NotFound)?.file.as_fd())
    }

    /// The length of the window.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// The number of pages that are shown now; where RNICs differ, since the kernel took pages meanwhile, the fewest.
    pub fn shown(&self) -> usize {
        let of_devices = self.of_devices.lock();
        let shown = of_devices.iter().map(|of_device| iommu_sys::shown(of_device.file.as_fd()).unwrap_or(0));
        shown.min().unwrap_or(0) as usize
    }

    /// The number of pages that may be shown at once.
    pub fn room(&self) -> usize {
        self.frames.usable() as usize
    }
}

/// Changes in the form in which the module takes them. Every page is of the window: so it was made.
fn entries(changes: &[Pointed]) -> Vec<Entry> {
    let entry = |change: &Pointed| Entry {
        page: change.page.0 as u32,
        target: change.frame.map_or(GONE, |frame| frame.0),
    };
    changes.iter().map(entry).collect()
}

impl PageWindow for Arc<IommuWindow> {
    fn point(&self, changes: &[Pointed]) -> Result<(), WindowLost> {
        let entries = entries(changes);
        let of_devices = self.of_devices.lock();
        for of_device in of_devices.iter() {
            let pointed = iommu_sys::point(of_device.file.as_fd(), &entries);
            pointed.map_err(|source| WindowLost { advice: advice(&source), source })?;
        }
        Ok(())
    }

    fn close(&self) {
        for of_device in self.of_devices.lock().drain(..) {
            tracing::info!(rnic = %of_device.rnic, "the window of an RNIC is closed");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use cuttlefs_common::ids::PoolPage;
    use cuttlefs_common::region::MagicPattern;

    #[test]
    fn changes_are_given_to_the_module_in_order() {
        let change =
            |page, frame: Option<u32>| Pointed { page: PoolPage(page), frame: frame.map(FrameIndex) };
        let changes = [change(5, Some(9)), change(MAX_PAGES - 1, None), change(5, None), change(0, Some(7))];
        let entry = |page, target| Entry { page, target };
        assert_eq!(
            entries(&changes),
            [entry(5, 9), entry(MAX_PAGES as u32 - 1, GONE), entry(5, GONE), entry(0, 7)]
        );
    }

    #[test]
    fn without_the_module_or_with_too_large_a_pool_it_says_what_to_do() {
        let frames = Arc::new(Frames::new(5, &MagicPattern::new([7; 32])).expect("frames"));
        let rnics = [("rnic0".to_owned(), "0000:00:1f.7".parse().expect("an address"))];
        let error = |pages| IommuWindow::new(&rnics, pages, &frames).expect_err("no window").to_string();
        if !Path::new(DEVICE).exists() {
            let error = error(MAX_PAGES);
            assert!(error.contains("insmod kmod-iommu/cuttlefs_iommu.ko"), "{error}");
        }
        let error = error(MAX_PAGES + 1);
        assert!(error.contains("4G of a pool at most"), "{error}");
    }

    #[test]
    fn each_refusal_of_the_module_has_its_advice() {
        for (errno, words) in [
            (libc::ENODEV, "lspci -k"),
            (libc::EOPNOTSUPP, "intel_iommu=on"),
            (libc::EPROTONOSUPPORT, "another version"),
            (libc::ENOMEM, "36 bytes"),
            (libc::EIO, "dmesg"),
        ] {
            let source = io::Error::from_raw_os_error(errno);
            let device = "0000:03:00.0".parse().expect("an address");
            let error = NoWindow::Refused { rnic: "mlx5_0".to_owned(), device, source }.to_string();
            assert!(error.contains(words) && error.contains("mlx5_0 (0000:03:00.0)"), "{error}");
        }
        let source = || io::Error::from_raw_os_error(libc::EACCES);
        assert!(NoWindow::NoModule { source: source() }.to_string().contains("as root"));
    }
}
