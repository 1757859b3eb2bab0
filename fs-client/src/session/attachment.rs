//! The session's knowledge of the server it is attached to, and the server's tables, where this side maps them.
//!
//! The keys of tables that are READ are no part of it: a key is good at the RNIC that gave it, and the connections of a session may lead to
//! several of the server's RNICs (a host name with several addresses). Each connection keeps its own ([`RemoteWindows`]).

use super::Session;
use crate::transport::RemoteWindows;
use arc_swap::ArcSwapOption;
use cuttlefs_common::memory::SharedMemory;
use cuttlefs_common::region::{AccessCounters, FileTable, ResidencyTable};
use cuttlefs_common::rpc::Attached;
use parking_lot::Mutex;
use std::sync::{Arc, OnceLock};

/// The server's tables, which an initiator reads to translate.
#[derive(Clone)]
pub(crate) enum Windows {
    /// Read with loads.
    Mapped(Arc<MappedWindows>),
    /// With READs, by the keys of the connection that they go over.
    Remote,
}

/// The server's tables, mapped.
pub(crate) struct MappedWindows {
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
    /// Whether this side translates. It stays true when the windows are dropped.
    pub(crate) initiator_translates: bool,
    pub(crate) windows: Option<Windows>,
    /// The counters of one-sided reads, once the server was told where they are. They stay when the windows are dropped.
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

/// The attachment of a session, once there is one.
///
/// An attachment of before is dropped by a thread of the session's, and never by the thread that looked at it last: that may be a program's, whose
/// descriptors are others ("a descriptor table of its own" in the preload library), and the memory has descriptors to close.
#[derive(Default)]
pub(super) struct CurrentAttachment {
    /// Read by every one-sided read, on all cores at once: no reader writes to a shared cache line.
    current: ArcSwapOption<Attachment>,
    /// Those of before that may be looked at. Held for a change of `current`.
    before: Mutex<Vec<Arc<Attachment>>>,
}

impl CurrentAttachment {
    fn replace(&self, before: &mut Vec<Arc<Attachment>>, attachment: Attachment) {
        before.extend(self.current.swap(Some(Arc::new(attachment))));
        drop_unread(before);
    }

    /// Drops the attachments of before that nobody looks at any more. Called by a thread of the session's, from time to time.
    pub(super) fn drop_unread(&self) {
        drop_unread(&mut self.before.lock());
    }

    /// A connection was attached, and maps `mapped`. `reads_tables`: the server's tables are read where they are not mapped and the
    /// server told where they are; gives where that is for this connection. What is known of the same session already stays.
    pub(super) fn attached(
        &self,
        attached: Attached,
        mapped: &[Arc<SharedMemory>],
        reads_tables: bool,
    ) -> Option<RemoteWindows> {
        let mut before = self.before.lock();
        let told = RemoteWindows::told(&attached).filter(|_| reads_tables);
        let windows = Windows::mapped(mapped).or(told.map(|_| Windows::Remote));
        let known = self.current.load().as_ref().is_some_and(|known| {
            known.attached.session == attached.session && (known.windows.is_some() || windows.is_none())
        });
        if !known {
            let initiator_translates = windows.is_some();
            let new = Attachment { attached, initiator_translates, windows, counting: Arc::default() };
            self.replace(&mut before, new);
        }
        told
    }

    /// The connection that brought the windows is gone, so nobody may read them any more.
    pub(super) fn drop_windows(&self) {
        let mut before = self.before.lock();
        let with_windows = self.current.load_full().filter(|current| current.windows.is_some());
        if let Some(current) = with_windows {
            let without = Attachment { windows: None, ..Attachment::clone(&current) };
            drop(current);
            self.replace(&mut before, without);
        }
    }
}

/// Nobody who looks for the attachment can find one of before, so one that is held here only stays so.
fn drop_unread(before: &mut Vec<Arc<Attachment>>) {
    before.retain(|attachment| Arc::strong_count(attachment) > 1);
}

impl Windows {
    fn mapped(windows: &[Arc<SharedMemory>]) -> Option<Self> {
        let [frames, residency, files] = windows else {
            return None;
        };
        Some(Self::Mapped(Arc::new(MappedWindows {
            frames: frames.clone(),
            residency: ResidencyTable::over(residency.clone()),
            files: FileTable::over(files.clone()),
        })))
    }
}

impl Session {
    /// The current attachment, for all that one read needs of it. Counts no reference.
    pub(crate) fn look(&self) -> Option<AttachmentGuard> {
        let attachment = self.attachment.current.load();
        attachment.is_some().then_some(AttachmentGuard(attachment))
    }

    /// As `look`, but to be kept.
    pub(crate) fn attachment(&self) -> Option<Arc<Attachment>> {
        self.attachment.current.load_full()
    }

    /// Whether this side reads tables that are not mapped: where the target does not translate, or if the options say so.
    pub(super) fn reads_tables(&self) -> bool {
        self.options.initiator_translates || !self.link.has_file_regions()
    }

    /// Whether the server's tables are READ.
    pub(crate) fn reads_remote_tables(&self) -> bool {
        self.look().is_some_and(|attachment| matches!(attachment.windows, Some(Windows::Remote)))
    }

    /// Whether the target translates file addresses on this link.
    pub(crate) fn target_translates(&self) -> bool {
        self.look().is_some_and(|attachment| self.target_translates_for(&attachment))
    }

    /// Whether the target translates file addresses under this attachment.
    pub(crate) fn target_translates_for(&self, attachment: &Attachment) -> bool {
        self.link.has_file_regions() && !attachment.initiator_translates
    }
}
