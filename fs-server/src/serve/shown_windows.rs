//! The memory that a server shows to initiators that translate: frames, residency table and file table.
//!
//! A client over a link that maps memory gets them mapped, for reading; such clients are processes of root and of the server's own user on
//! this machine. Over other links they are regions for READs whose keys clients are told, only where all clients are trusted: a client that
//! can read the frames can read every file. Where clients are not trusted nothing is registered, so that there is no key to guess. Each RNIC
//! has keys of its own.

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
