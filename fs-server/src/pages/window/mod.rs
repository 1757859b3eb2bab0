//! A window shows the pool's pages to an RNIC that translates: its addresses stay, while the page behind each of them changes.
//!
//! Page N of a window is pool page N: its frame if it is in one, else the magic page. So an initiator READs a page without knowing its frame, and the
//! server points the window's pages as the residency table's entries move (`following`). Without a window an RNIC has the frames themselves, pinned,
//! in their order, and initiators look up a page's frame in the table; then this module is not used.
//!
//! There are two kinds of windows: by on-demand paging (`odp`), and by the IOMMU (`iommu`, which takes the RNIC's `pci_address`). A server has one of
//! them at most (`ServedWindow`).
//!
//! # What an initiator may believe
//! The bytes that it READ are the page if the page's residency entry, READ before and after the bytes, is the same and even, **and** no 32 aligned
//! bytes are the magic pattern. The entry alone is not enough: a page is shown some time after its entry has moved, and a READ during that may get a
//! part of each (NP-RDMA section 3.1.1, "Check per DMA granularity"). The pattern alone is not enough: a write to the frame may be under way.
//! # Failure
//! A window that cannot be pointed is closed as a whole, and the server goes on with pinned frames (`following`).

mod following;
/// A window by kmod-iommu.
pub mod iommu;
mod iommu_sys;
mod odp;
/// The PCI device of an RNIC.
pub mod pci_address;
#[cfg(test)]
mod tests;

pub(super) use following::Following;

use cuttlefs_common::ids::{FrameIndex, PoolPage};
use cuttlefs_common::memory::PointedMemory;
use iommu::IommuWindow;
use serde::Deserialize;
use std::fmt::{self, Debug};
use std::sync::Arc;

/// What RNICs of trusted clients READ bytes of pages from.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize, clap::ValueEnum)]
#[serde(rename_all = "lowercase")]
pub enum WindowKind {
    /// The frames; there is no window.
    #[default]
    Pinned,
    /// A window that the RNICs follow by on-demand paging.
    Odp,
    /// A window that the IOMMU translates, by kmod-iommu.
    Iommu,
}

impl fmt::Display for WindowKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Pinned => "pinned",
            Self::Odp => "odp",
            Self::Iommu => "iommu",
        })
    }
}

/// The window that a server has. [`WindowKind::Pinned`] has none.
#[derive(Clone, Debug)]
pub enum ServedWindow {
    /// Of [`WindowKind::Odp`].
    Odp(Arc<PointedMemory>),
    /// Of [`WindowKind::Iommu`].
    Iommu(Arc<IommuWindow>),
}

impl ServedWindow {
    /// Its kind.
    pub fn kind(&self) -> WindowKind {
        match self {
            Self::Odp(_) => WindowKind::Odp,
            Self::Iommu(_) => WindowKind::Iommu,
        }
    }

    /// What points its pages.
    pub fn pointing(&self) -> Box<dyn PageWindow> {
        match self {
            Self::Odp(window) => Box::new(window.clone()),
            Self::Iommu(window) => Box::new(window.clone()),
        }
    }

    /// The number of pages that it shows now.
    pub fn shown(&self) -> usize {
        match self {
            Self::Odp(window) => window.shown(),
            Self::Iommu(window) => window.shown(),
        }
    }

    /// The number of pages that it may show at once.
    pub fn room(&self) -> usize {
        match self {
            Self::Odp(window) => window.room(),
            Self::Iommu(window) => window.room(),
        }
    }
}

/// A change of a window.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Pointed {
    /// The page, and so the place in the window.
    pub page: PoolPage,
    /// The frame that is shown from now on; `None` for the magic page.
    pub frame: Option<FrameIndex>,
}

/// Why a window is lost.
#[derive(Debug, thiserror::Error)]
#[error("the window's pages cannot be pointed: {source}; {advice}")]
pub struct WindowLost {
    /// The kernel's error.
    pub source: std::io::Error,
    /// Advice for the user.
    pub advice: &'static str,
}

/// A window, which shows pages to an RNIC.
pub trait PageWindow: Send + Sync + Debug {
    /// Points pages, in order. When it returns, no READ through the window finds the frames that its pages showed before. A page that cannot be shown
    /// may stay magic. A page that cannot be hidden is an error.
    ///
    /// # Errors
    /// `WindowLost`: it is not known which changes took effect. Close the window then.
    fn point(&self, changes: &[Pointed]) -> Result<(), WindowLost>;

    /// Closes the window. When it returns, no READ finds a frame through it.
    fn close(&self);
}
