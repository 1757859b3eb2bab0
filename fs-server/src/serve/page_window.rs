//! The switch `--page-window`: what RNICs of trusted clients READ bytes of pages from.
//!
//! With `pinned` they READ the frames, whose numbers are in the residency table. With `odp` and `iommu` they READ a window in which pool page N is at
//! N pages: its frame, or the magic page (`pages/window`). With `odp` the RNICs follow the window by on-demand paging, so each of them must have that.
//! With `iommu` each of them must be a PCI device behind an IOMMU, for which kmod-iommu makes a window, and register that as a dma-buf.
//!
//! # Failure
//! What cannot be had is an error of the start, not another window than the one that was asked for. A window that is lost while it is served is
//! closed: from then on connections are told of the frames.

use crate::pages::Frames;
use crate::pages::policy::{Exposure, RegionPolicy};
use crate::pages::window::iommu::{IommuWindow, NoWindow};
use crate::pages::window::pci_address::{self, NoPciDevice};
use crate::pages::window::{ServedWindow, WindowKind};
use cuttlefs_common::ids::{FrameIndex, PAGE_SIZE};
use cuttlefs_common::memory::PointedMemory;
use cuttlefs_common::rdma::{Device, Devices, RdmaError};
use std::path::Path;
use std::sync::Arc;

/// Mappings that the kernel allows each process, and where.
const SYSCTL: &str = "vm.max_map_count";
/// The kernel's folder of RDMA devices.
const CLASS: &str = "/sys/class/infiniband";

/// Why there is no such window.
#[derive(Debug, thiserror::Error)]
pub enum NoPageWindow {
    /// Clients are not trusted, so they READ nothing.
    #[error(
        "--page-window {0} is for clients that READ this server's memory, which takes --trust-clients; give that, too, or leave --page-window out"
    )]
    NoTrust(WindowKind),
    /// No RNIC is listened on.
    #[error(
        "--page-window {0} is for RNICs, and no endpoint is one's; give --listen rdma://HOST:PORT, or leave --page-window out"
    )]
    NoRnic(WindowKind),
    /// The policy serves pages in another way.
    #[error(
        "--page-window {kind} goes with --region term, not with {policy}: only there do pages move between memory and SSD"
    )]
    Policy {
        /// The window.
        kind: WindowKind,
        /// The policy.
        policy: RegionPolicy,
    },
    /// An RNIC cannot follow the window.
    #[error(
        "--page-window odp takes on-demand paging, which {0} lacks (`ibv_devinfo -v` lists it under odp_caps; soft-RoCE of Linux 7.2 has it); \
         take --page-window pinned"
    )]
    NoOnDemandPaging(String),
    /// The process may not have the mappings.
    #[error(
        "a window of {pages} pages takes more mappings than a process may have{}; set {SYSCTL} to {wanted} (sysctl -w), or take --page-window pinned",
        source.as_ref().map(|source| format!(" ({source})")).unwrap_or_default()
    )]
    Mappings {
        /// Pages of the pool.
        pages: u64,
        /// A limit at which all frames can be shown.
        wanted: u64,
        /// The kernel's error, if it was asked.
        source: Option<std::io::Error>,
    },
    /// An RNIC does no DMA that an IOMMU could translate.
    #[error("--page-window iommu takes RNICs that are PCI devices: {0}. Take --page-window pinned")]
    NoPciDevice(NoPciDevice),
    /// kmod-iommu makes no window.
    #[error("--page-window iommu takes a window of kmod-iommu: {0}. Or take --page-window pinned")]
    NoWindow(NoWindow),
    /// The module gives no dma-buf.
    #[error(
        "--page-window iommu takes a dma-buf of the window of {rnic}: {error} (`dmesg` may say more). Or take --page-window pinned"
    )]
    NoDmaBuf {
        /// The RNIC.
        rnic: String,
        /// The kernel's error.
        error: std::io::Error,
    },
    /// The RNIC does not register the window's dma-buf.
    #[error(
        "--page-window iommu takes RNICs that register the window: {0}. Take --page-window pinned (docs/kmod-iommu.md names drivers that have the call)"
    )]
    NotRegistered(RdmaError),
}

/// Makes the window; `None` for `pinned`, which needs none.
///
/// # Errors
/// `NoPageWindow`, which says what to do.
pub(super) fn make(
    kind: WindowKind,
    trusted: bool,
    policy: RegionPolicy,
    devices: &Devices,
    pool_pages: u64,
    frames: &Arc<Frames>,
) -> Result<Option<ServedWindow>, NoPageWindow> {
    if kind == WindowKind::Pinned {
        return Ok(None);
    }
    if !trusted {
        return Err(NoPageWindow::NoTrust(kind));
    }
    if policy.exposure != Exposure::Magic {
        return Err(NoPageWindow::Policy { kind, policy });
    }
    // Clients of the others map the tables, or leave the translation to the target.
    let is_rnic = |device: &&Arc<dyn Device>| {
        let can = device.capabilities();
        !can.file_regions && !can.windows
    };
    let rnics: Vec<_> = devices.all().iter().filter(is_rnic).collect();
    if rnics.is_empty() {
        return Err(NoPageWindow::NoRnic(kind));
    }
    Ok(Some(match kind {
        WindowKind::Iommu => {
            let names: Vec<_> = rnics.iter().map(|rnic| rnic.name()).collect();
            ServedWindow::Iommu(Arc::new(translated(Path::new(CLASS), &names, pool_pages, frames)?))
        }
        _ => ServedWindow::Odp(Arc::new(followed(&rnics, pool_pages, frames)?)),
    }))
}

/// The window by the IOMMU, of RNICs with these names below `class`.
fn translated(
    class: &Path,
    rnics: &[&str],
    pool_pages: u64,
    frames: &Arc<Frames>,
) -> Result<IommuWindow, NoPageWindow> {
    let device = |name: &&str| Ok(((*name).to_owned(), pci_address::of_rnic(class, name)?));
    let devices = rnics.iter().map(device).collect::<Result<Vec<_>, _>>();
    let devices = devices.map_err(NoPageWindow::NoPciDevice)?;
    IommuWindow::new(&devices, pool_pages, frames).map_err(NoPageWindow::NoWindow)
}

/// The window by on-demand paging.
fn followed(
    rnics: &[&Arc<dyn Device>],
    pool_pages: u64,
    frames: &Frames,
) -> Result<PointedMemory, NoPageWindow> {
    if let Some(device) = rnics.iter().find(|device| !device.capabilities().on_demand_paging) {
        return Err(NoPageWindow::NoOnDemandPaging(device.name().to_owned()));
    }
    let wanted = PointedMemory::mappings(pool_pages, u64::from(frames.usable()));
    let refused = |source| NoPageWindow::Mappings { pages: pool_pages, wanted, source };
    let mut magic = [0; PAGE_SIZE];
    frames.memory().read(Frames::offset(FrameIndex::MAGIC), &mut magic);
    let pages = usize::try_from(pool_pages).map_err(|_| refused(None))?;
    let window = PointedMemory::new(frames.memory().clone(), pages, &magic);
    let window = window.map_err(|source| refused(Some(source)))?;
    match window.room() {
        0 => return Err(refused(None)),
        room if (room as u64) < u64::from(frames.usable()) => tracing::warn!(
            room,
            frames = frames.usable(),
            "the window can show fewer pages than there are frames, and the others are fetched by requests; set {SYSCTL} to {wanted} for all"
        ),
        _ => {}
    }
    Ok(window)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::pages::policy::PolicyName;
    use crate::pages::window::iommu::DEVICE;
    use cuttlefs_common::rdma::soft::{SoftDevice, SoftOptions};
    use cuttlefs_common::region::MagicPattern;
    use std::fs;
    use std::os::unix::fs::symlink;

    fn frames() -> Arc<Frames> {
        Arc::new(Frames::new(7, &MagicPattern::new([0x5a; 32])).expect("frames"))
    }

    fn made(
        kind: WindowKind,
        trusted: bool,
        policy: PolicyName,
    ) -> Result<Option<ServedWindow>, NoPageWindow> {
        let device: Arc<dyn Device> = SoftDevice::new(SoftOptions::default());
        make(kind, trusted, RegionPolicy::of(policy), &device.into(), 600, &frames())
    }

    #[test]
    fn what_cannot_be_had_is_an_error_that_says_what_to_do() {
        use PolicyName::{Pin, Term};
        assert!(made(WindowKind::Pinned, false, Pin).is_ok_and(|window| window.is_none()));
        for kind in [WindowKind::Odp, WindowKind::Iommu] {
            for (trusted, policy, words) in
                [(false, Term, "--trust-clients"), (true, Pin, "--region term"), (true, Term, "rdma://")]
            {
                let error = made(kind, trusted, policy).expect_err(words).to_string();
                assert!(error.contains(words) && error.contains(&format!("--page-window {kind}")), "{error}");
            }
        }
    }

    #[test]
    fn each_lack_of_a_window_by_the_iommu_says_what_to_do() {
        let root = tempfile::tempdir().expect("a folder");
        let class = root.path().join("class");
        for (rnic, device) in [("mlx5_0", "0000:03:00.0"), ("mlx5_1", "0000:03:00.1")] {
            let below = root.path().join(device);
            fs::create_dir_all(&below).expect("folders");
            fs::create_dir_all(class.join(rnic)).expect("folders");
            symlink(&below, class.join(rnic).join("device")).expect("a link");
        }
        fs::create_dir_all(class.join("rxe0")).expect("folders");
        let refused = |rnics: &[&str], pages| {
            translated(&class, rnics, pages, &frames()).expect_err("no window").to_string()
        };
        for (rnics, pages, words) in [
            (&["rxe0"][..], 600, "rxe0 is no PCI device"),
            (&["mlx5_0", "rxe0"], 600, "rxe0 is no PCI device"),
            (&["mlx5_0", "mlx5_1"], (1 << 20) + 1, "4G of a pool at most"),
        ] {
            let error = refused(rnics, pages);
            assert!(error.contains(words) && error.contains("ake --page-window pinned"), "{error}");
        }
        if !Path::new(DEVICE).exists() {
            let error = refused(&["mlx5_0"], 600);
            assert!(error.contains("insmod") && error.contains("modprobe cuttlefs_iommu"), "{error}");
        }
    }
}
