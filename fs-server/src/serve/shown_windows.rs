//! The memory that a server shows to initiators that translate addresses themselves: frames, residency table and file table.
//!
//! A client on a link that shares memory maps it read-only. Such clients are processes of root and of the server's own user on this machine. On other
//! links it is registered for READs, and clients are told the keys, only if all clients are trusted: a client that can read the frames can read every
//! file. If clients are not trusted, nothing is registered, so that there is no key to guess. Each RNIC has keys of its own.

use super::{NoPageWindow, StartError};
use crate::pages::policy::Exposure;
use crate::pages::window::ServedWindow;
use crate::rnics::{PagesRegion, Rnic};
use crate::server::Server;
use cuttlefs_common::rdma::{Access, WindowId};
use rustix::fd::AsFd;

/// What trusted clients may do with the windows.
const READ: Access = Access { remote_read: true, ..Access::NONE };

/// Shows the windows to clients on links that share memory; with `trust` to all clients.
pub(super) fn show(server: &Server, trust: bool) -> Result<(), StartError> {
    // With this policy a NIC must take the page faults, so no client may read by itself.
    if server.files.pages().policy().exposure == Exposure::Faulting {
        return Ok(());
    }
    let windows = WindowId::ALL.map(|id| (id, server.files.window(id)));
    for rnic in server.rnics.all() {
        for (id, memory) in &windows {
            rnic.pd.export_window(*id, memory.clone());
        }
        if trust {
            let [frames, residency, files] =
                windows.each_ref().map(|(_, memory)| rnic.pd.register(memory.clone(), READ));
            let pages = server.page_window.as_ref().map(|window| pages(rnic, window)).transpose()?;
            rnic.show_windows([frames?, residency?, files?], pages.flatten());
        }
    }
    Ok(())
}

/// Registers the window of pages with an RNIC; `None`: this one translates nothing, and its clients need no window.
fn pages(rnic: &Rnic, window: &ServedWindow) -> Result<Option<PagesRegion>, StartError> {
    let can = rnic.device.capabilities();
    match window {
        ServedWindow::Odp(window) if can.on_demand_paging => {
            Ok(Some(PagesRegion::Followed(rnic.pd.register(window.memory().clone(), READ)?)))
        }
        ServedWindow::Iommu(window) if !can.file_regions && !can.windows => {
            let name = rnic.device.name();
            let no_dma_buf = |error| NoPageWindow::NoDmaBuf { rnic: name.to_owned(), error };
            let dma_buf = window.export(name).map_err(no_dma_buf)?;
            let registered = rnic.pd.register_dma_buf(dma_buf.as_fd(), window.bytes());
            Ok(Some(PagesRegion::Translated(registered.map_err(NoPageWindow::NotRegistered)?)))
        }
        ServedWindow::Odp(_) | ServedWindow::Iommu(_) => Ok(None),
    }
}
