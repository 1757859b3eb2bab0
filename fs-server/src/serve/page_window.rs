//! The switch `--page-window`: what RNICs of trusted clients READ bytes of pages from.
//!
//! With `pinned` they READ the frames, whose numbers are in the residency table. With `odp` they READ a window in which pool page N is at N pages: its
//! frame, or the magic page (`pages/window`). The RNICs follow the window by on-demand paging, so each of them must have that.
//!
//! # Failure
//! What cannot be had is an error of the start, not another window than the one that was asked for. A window that is lost while it is served is
//! closed: from then on connections are told of the frames.

use crate::pages::Frames;
use crate::pages::policy::{Exposure, RegionPolicy};
use crate::pages::window::WindowKind;
use cuttlefs_common::ids::{FrameIndex, PAGE_SIZE};
use cuttlefs_common::memory::PointedMemory;
use cuttlefs_common::rdma::Devices;
use std::sync::Arc;

/// Mappings that the kernel allows each process, and where.
const SYSCTL: &str = "vm.max_map_count";

/// Why there is no such window.
#[derive(Debug, thiserror::Error)]
pub enum NoPageWindow {
    /// Clients are not trusted, so they READ nothing.
    #[error(
        "--page-window odp is for clients that READ this server's memory, which takes --trust-clients; give that, too, or leave --page-window out"
    )]
    NoTrust,
    /// No RNIC is listened on.
    #[error(
        "--page-window odp is for RNICs, and no endpoint is one's; give --listen rdma://HOST:PORT, or leave --page-window out"
    )]
    NoRnic,
    /// An RNIC cannot follow the window.
    #[error(
        "--page-window odp takes on-demand paging, which {0} lacks (`ibv_devinfo -v` lists it under odp_caps; soft-RoCE of Linux 7.2 has it); \
         take --page-window pinned"
    )]
    NoOnDemandPaging(String),
    /// The policy serves pages in another way.
    #[error(
        "--page-window odp goes with --region term, not with {0}: only there do pages move between memory and SSD"
    )]
    Policy(RegionPolicy),
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
    frames: &Frames,
) -> Result<Option<Arc<PointedMemory>>, NoPageWindow> {
    if kind == WindowKind::Pinned {
        return Ok(None);
    }
    if !trusted {
        return Err(NoPageWindow::NoTrust);
    }
    if policy.exposure != Exposure::Magic {
        return Err(NoPageWindow::Policy(policy));
    }
    // Clients of the others map the tables, or leave the translation to the target.
    let devices = devices.all().iter().map(|device| (device, device.capabilities()));
    let rnics: Vec<_> = devices.filter(|(_, can)| !can.file_regions && !can.windows).collect();
    if rnics.is_empty() {
        return Err(NoPageWindow::NoRnic);
    }
    if let Some((device, _)) = rnics.iter().find(|(_, can)| !can.on_demand_paging) {
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
    Ok(Some(Arc::new(window)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::pages::policy::PolicyName;
    use cuttlefs_common::rdma::Device;
    use cuttlefs_common::rdma::soft::{SoftDevice, SoftOptions};
    use cuttlefs_common::region::MagicPattern;

    fn made(
        kind: WindowKind,
        trusted: bool,
        policy: PolicyName,
    ) -> Result<Option<Arc<PointedMemory>>, NoPageWindow> {
        let frames = Frames::new(7, &MagicPattern::new([0x5a; 32])).expect("frames");
        let device: Arc<dyn Device> = SoftDevice::new(SoftOptions::default());
        make(kind, trusted, RegionPolicy::of(policy), &device.into(), 600, &frames)
    }

    #[test]
    fn what_cannot_be_had_is_an_error_that_says_what_to_do() {
        use PolicyName::{Pin, Term};
        assert!(made(WindowKind::Pinned, false, Pin).is_ok_and(|window| window.is_none()));
        for (trusted, policy, words) in
            [(false, Term, "--trust-clients"), (true, Pin, "--region term"), (true, Term, "rdma://")]
        {
            let error = made(WindowKind::Odp, trusted, policy).expect_err(words).to_string();
            assert!(error.contains(words), "{error}");
        }
    }
}
