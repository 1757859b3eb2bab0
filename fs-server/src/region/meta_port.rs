//! The narrow trait through which file regions reach metadata.
//!
//! Regions own what is live (size, mapping, dirtiness); metadata owns what is durable and every other attribute.
//! Calls do not block on a disk but `flush`, which is awaited. `memory_meta` is the in-memory twin.

use crate::pool::disk::LocalFuture;
use cuttlefs_common::attr::Attr;
use cuttlefs_common::ids::InodeNo;
use cuttlefs_common::region::Extent;
use cuttlefs_common::status::Status;

pub use crate::meta::{
    Answer, ClientChange, Covers, CutStep, DataCommit, DoneRequest, Images, NoteData, PageImage, RangeUpdate,
    RequestId, Verdict, Written,
};

/// Metadata as file regions see it.
pub trait MetaPort: Send + Sync {
    /// Live attributes.
    ///
    /// # Errors
    /// `NotFound`, or `Io` if the store fails.
    fn attr(&self, ino: InodeNo) -> Result<Attr, Status>;
    /// What of a file's contents is durable.
    ///
    /// # Errors
    /// As `attr`.
    fn written(&self, ino: InodeNo) -> Result<Written, Status>;
    /// The durable mapping, in file order.
    ///
    /// # Errors
    /// As `attr`.
    fn extents(&self, ino: InodeNo) -> Result<Vec<Extent>, Status>;
    /// Moves live attributes; nothing becomes durable.
    ///
    /// # Errors
    /// As `attr`.
    fn note_data(&self, ino: InodeNo, note: NoteData) -> Result<Attr, Status>;
    /// Puts all commits in one atomic batch, durable with the next flush. The data they name is on SSD, or in their images.
    /// An inode that is gone meanwhile is skipped: its pages are on their way out.
    ///
    /// # Errors
    /// `Io` if the store fails; then nothing was changed.
    fn commit_data(&self, commits: &[DataCommit]) -> Result<(), Status>;
    /// Whether there is room for what maps further pages.
    fn has_room(&self) -> bool;
    /// Whether images of pages may be put now: they take room, and memory until the next checkpoint.
    fn takes_images(&self) -> bool;
    /// Whether a flush is under way; a guess, for who can do without.
    fn is_flushing(&self) -> bool;
    /// Makes every batch so far durable.
    fn flush(&self) -> LocalFuture<'static, Result<(), Status>>;
}
