//! What the session knows of the server it is attached to, and the server's tables, where the link maps them.

use super::Session;
use arc_swap::ArcSwapOption;
use cuttlefs_common::memory::SharedMemory;
use cuttlefs_common::rdma::RemoteWindow;
use cuttlefs_common::region::{AccessCounters, FileTable, ResidencyTable};
use cuttlefs_common::rpc::Attached;
use parking_lot::Mutex;
use std::sync::{Arc, OnceLock};

/// The server's tables, mapped: what initiator translation reads.
pub(crate) struct Windows {
    /// The frames.
    pub(crate) frames: Arc<SharedMemory>,
    /// The residency table.
    pub(crate) residency: ResidencyTable,
    /// The file table.
    pub(crate) files: FileTable,
}

/// What the session knows of the server it is attached to.
#[derive(Clone)]
pub(crate) struct Attachment {
    pub(crate) attached: Attached,
    /// The link maps the server's tables: this side translates. Stays true when the windows are dropped.
    pub(crate) initiator_translates: bool,
    pub(crate) windows: Option<Arc<Windows>>,
    /// Where one-sided reads are counted, once the server has been told. Stays when the windows are dropped.
    pub(crate) counting: Arc<OnceLock<AccessCounters>>,
}

/// The current attachment, for the time of a read.
pub(crate) struct AttachmentGuard(arc_swap::Guard<Option<Arc<Attachment>>>);

impl std::ops::Deref for AttachmentGuard {
    type Target = Attachment;

    fn deref(&self) -> &Attachment {
        self.0.as_deref().expect("a guard is made of an attachment that is there")
    }
}

/// The attachment of a session that has one.
#[derive(Default)]
pub(super) struct CurrentAttachment {
    /// Read by every one-sided read, on both cores at once: no reader writes to a line they share.
    current: ArcSwapOption<Attachment>,
    /// Held to change it.
    changing: Mutex<()>,
}

impl CurrentAttachment {
    /// A connection was attached, and brought `windows`. What is known of the same session already stays.
    pub(super) fn attached(&self, attached: Attached, windows: &[Arc<dyn RemoteWindow>]) {
        let _alone = self.changing.lock();
        let known = self.current.load().as_ref().is_some_and(|known| {
            known.attached.session == attached.session && (known.windows.is_some() || windows.is_empty())
        });
        if !known {
            self.current.store(Some(Arc::new(Attachment {
                attached,
                initiator_translates: !windows.is_empty(),
                windows: map(windows).map(Arc::new),
                counting: Arc::default(),
            })));
        }
    }

    /// The connection that brought the windows is gone: nobody may read them any more.
    pub(super) fn drop_windows(&self) {
        let _alone = self.changing.lock();
        if let Some(current) = self.current.load().as_ref()
            && current.windows.is_some()
        {
            let without = Attachment { windows: None, ..current.as_ref().clone() };
            self.current.store(Some(Arc::new(without)));
        }
    }
}

fn map(windows: &[Arc<dyn RemoteWindow>]) -> Option<Windows> {
    let [frames, residency, files] = windows else {
        return None;
    };
    Some(Windows {
        frames: frames.mapped()?.clone(),
        residency: ResidencyTable::over(residency.mapped()?.clone()),
        files: FileTable::over(files.mapped()?.clone()),
    })
}

impl Session {
    /// The current attachment, looked at once for all a read wants of it: no reference is counted.
    pub(crate) fn look(&self) -> Option<AttachmentGuard> {
        let attachment = self.attachment.current.load();
        attachment.is_some().then_some(AttachmentGuard(attachment))
    }

    /// The same, to be kept.
    pub(crate) fn attachment(&self) -> Option<Arc<Attachment>> {
        self.attachment.current.load_full()
    }

    /// Whether the target translates file addresses on this link.
    pub(crate) fn target_translates(&self) -> bool {
        self.look().is_some_and(|attachment| self.target_translates_for(&attachment))
    }

    /// The same of an attachment.
    pub(crate) fn target_translates_for(&self, attachment: &Attachment) -> bool {
        self.link.has_file_regions() && !attachment.initiator_translates
    }
}
