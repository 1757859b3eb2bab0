//! What a server shows of its memory: frames, residency table and file table, to initiators that translate.
//!
//! Whoever connects over a link that maps memory gets them mapped, for reading; those are root's and the server's own user's processes on this
//! machine. Over other links they are regions that may be READ, and clients are told their keys, only where all clients are trusted: who can
//! read the frames can read every file. Where they are not trusted nothing is registered, so that there is no key to guess. Each RNIC has keys of
//! its own.

use crate::pages::policy::Exposure;
use crate::server::Server;
use cuttlefs_common::rdma::{Access, RdmaError, WindowId};

/// Shows the windows to who connects to listeners of the server's domains; with `trust` to everybody.
pub(super) fn show(server: &Server, trust: bool) -> Result<(), RdmaError> {
    // What the NIC must fault for, nobody is to read by himself.
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
            rnic.show_windows([frames?, residency?, files?]);
        }
    }
    Ok(())
}
