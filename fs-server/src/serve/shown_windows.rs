//! The memory that a server shows to initiators that translate: frames, residency table and file table.
//!
//! A client over a link that maps memory gets them mapped, for reading; such clients are processes of root and of the server's own user on
//! this machine. Over other links they are regions for READs whose keys clients are told, only where all clients are trusted: a client that
//! can read the frames can read every file. Where clients are not trusted nothing is registered, so that there is no key to guess.

use crate::pages::policy::Exposure;
use crate::server::Server;
use cuttlefs_common::rdma::{Access, MemoryRegion, ProtectionDomain, RdmaError, RemoteRange, WindowId};
use std::sync::Arc;

/// The windows as regions, for as long as they are to be read.
pub struct ShownWindows([Arc<dyn MemoryRegion>; 3]);

impl ShownWindows {
    /// What clients are told, in `WindowId::ALL` order.
    pub(crate) fn ranges(&self) -> [RemoteRange; 3] {
        self.0.each_ref().map(|region| RemoteRange { rkey: region.rkey(), len: region.memory().len() as u64 })
    }
}

/// Shows the windows to who connects to listeners of this domain; with `trust` to everybody.
pub(super) fn show(server: &Server, pd: &dyn ProtectionDomain, trust: bool) -> Result<(), RdmaError> {
    // What the NIC must fault for, nobody is to read by himself.
    if server.files.pages().policy().exposure == Exposure::Faulting {
        return Ok(());
    }
    let windows = WindowId::ALL.map(|id| (id, server.files.window(id)));
    for (id, memory) in &windows {
        pd.export_window(*id, memory.clone());
    }
    if trust {
        let access = Access { remote_read: true, ..Access::NONE };
        let [frames, residency, files] = windows.map(|(_, memory)| pd.register(memory, access));
        // A server is shown once.
        let _ = server.admission.windows.set(ShownWindows([frames?, residency?, files?]));
    }
    Ok(())
}
