//! How pages of the pool are shown to an RNIC that translates: a window, whose addresses stay while the page behind each of them changes.
//!
//! Page N of a window is pool page N: its frame, while it is in one, else the magic page. So an initiator READs a page without knowing its frame, and
//! the server points the window's pages as the residency table's entries move (`following`). Without a window an RNIC has the frames themselves, pinned
//! and as they lie, and initiators look for a page's frame in the table; then nothing here runs.
//!
//! Two windows can be had: by on-demand paging (`odp`), and by the IOMMU (`iommu`).
//!
//! # What an initiator may believe
//! What it READ is the page if the page's residency entry, READ before and behind the bytes, is one and even, **and** no 32 aligned bytes of it are the
//! magic pattern. The entry alone does not do: a page is shown a while after its entry has moved, and while it is being shown a READ brings some of
//! both (NP-RDMA section 3.1.1, "Check per DMA granularity"). The pattern alone does not do: a write to the frame may be under way.
//!
//! # Failure
//! A window that cannot be pointed is taken away as a whole, and the server goes on over pinned frames (`following`).

mod following;
/// A window by kmod-iommu.
pub mod iommu;
mod iommu_sys;
mod odp;
#[cfg(test)]
mod tests;

pub(super) use following::Following;

use cuttlefs_common::ids::{FrameIndex, PoolPage};
use std::fmt::Debug;

/// A change of what a window shows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Pointed {
    /// Whose place in the window.
    pub page: PoolPage,
    /// What is there from now on; `None`: the magic page.
    pub frame: Option<FrameIndex>,
}

/// Why a window is gone.
#[derive(Debug, thiserror::Error)]
#[error("the window's pages cannot be pointed: {source}; {advice}")]
pub struct WindowLost {
    /// What the kernel said.
    pub source: std::io::Error,
    /// What the user can do.
    pub advice: &'static str,
}

/// What shows pages to an RNIC.
pub trait PageWindow: Send + Sync + Debug {
    /// Points pages, in order. When it returns, no READ through the window finds what its pages showed before. A page that cannot be shown may stay
    /// the magic page; one that cannot be hidden is an error.
    ///
    /// # Errors
    /// `WindowLost`: what took effect is not known; close it.
    fn point(&self, changes: &[Pointed]) -> Result<(), WindowLost>;

    /// Takes the window away. When it returns, no READ finds a frame through it.
    fn close(&self);
}
