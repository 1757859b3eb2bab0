//! The memory that a server shows to initiators that translate addresses themselves: frames, residency table and file table.
//!
//! A client on a link that shares memory maps it read-only. Such clients are processes of root and of the server's own user on this machine. On other
//! links it is registered for READs, and clients are told the keys, only if all clients are trusted: a client that can read the frames can read every
//! file. If clients are not trusted, nothing is registered, so that there is no key to guess. Each RNIC has keys of its own.

use crate::pages::policy::Exposure;
use crate::server::Server;
use cuttlefs_common::rdma::{Access, RdmaError, WindowId};

/// Shows the windows to clients on links that share memory; with `trust` to all clients.
pub(super) fn show(server: &Server, trust: bool) -> Result<(), RdmaError> {
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
            let access = Access { remote_read: true, ..Access::NONE };
            let [frames, residency, files] =
                windows.each_ref().map(|(_, memory)| rnic.pd.register(memory.clone(), access));
            let follows = server.page_window.as_ref().filter(|_| rnic.device.capabilities().on_demand_paging);
            let pages =
                follows.map(|window| rnic.pd.register(window.memory().clone(), access)).transpose()?;
            rnic.show_windows([frames?, residency?, files?], pages);
        }
    }
    Ok(())
}
