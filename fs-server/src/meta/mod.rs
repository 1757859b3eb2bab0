//! Metadata: names, inodes, extents, attributes, orphans and sessions, as records of one ordered store.
//!
//! * `store` the trait; `disk_store` and `memory_store` implement it
//! * `key`, `record`, `name` the formats
//! * `operation` the set of operations; `apply` from one operation to one batch, without side effects
//! * `answer` the answer to a request, as its slot's record keeps it
//! * `climbs` the check whether a directory lies below another, where that takes long
//! * `view`, `draft`, `extent_edit` the state that `apply` reads, edits and turns into a batch
//! * `live` inodes whose data changed and is not durable yet
//! * `metadata`, `lookups`, `file_data` the façade `Meta` that the RPC layer and the file regions call
//! * `images` contents that a sync covers and that are not in their places yet
//! * `page_map` the map of the pool pages that extents have, kept beside the records
//! * `survey` the check whether a store's records agree with each other; `problem` its findings; `repair` their repairs
//!
//! # Invariants
//! * One operation is one batch, and the store never has a part of one (invariant 5 depends on that).
//! * An inode record's size and extents cover only bytes that are durable ("What is durable when").
//! * Inode numbers are never given out twice, also not after a crash: only numbers below a durable bound are used, and a server's start begins behind
//!   it.
//! * Each entry names an inode; each inode has as many names as it counts, or is an orphan.
//!
//! # On failure
//! A refusal is a `Status`. Damage and a failing store are logged with what to do, counted, and answered with `Status::Io`. Nothing is guessed, or
//! repaired on the side.

mod answer;
mod apply;
mod climbs;
mod disk_store;
mod draft;
mod error;
mod extent_edit;
mod file_data;
mod images;
mod key;
mod live;
mod lookups;
mod marks;
mod memory_store;
mod metadata;
mod name;
mod operation;
mod page_map;
mod paths;
mod problem;
mod record;
mod repair;
mod store;
mod survey;
mod view;
mod written;

#[cfg(test)]
mod tests;

pub use answer::Answer;
pub use apply::apply;
pub use climbs::{Climb, Climbs, LEVELS_MAX};
pub use disk_store::{DiskOptions, DiskStore};
pub use draft::Applied;
pub use error::MetaError;
pub(crate) use file_data::KeptInode;
pub use images::{StoredImage, image_count};
pub use live::NoteData;
pub use marks::StoredMarks;
pub use memory_store::{MemoryStore, StoreLie};
pub use metadata::{DirectFlush, FlushStep, Format, Meta};
pub use name::{Cookie, HashKey};
pub use operation::{
    ApplyContext, Caller, Covers, CutStep, DataCommit, DataStamp, DoneRequest, Images, LINK_MAX, Operation,
    Outcome, PageImage, REAP_BATCH_EXTENTS, RangeUpdate, RequestId, XATTRS_PER_INODE_MAX,
};
pub use page_map::{PART_PAGES, PartBits, PartKey, PartVisitor, Plane};
pub use paths::paths;
pub use problem::{Detail, Problem, ProblemKind};
pub use record::{
    ClientRecord, FORMAT_VERSION, InodeRecord, PassFigures, RecordError, ScrubRecord, SlotRecord,
};
pub use repair::repair;

pub use store::{
    Batch, DirectSync, Direction, Store, StoreError, StoreFigures, SyncStep, VALUE_MAX_BYTES, Visitor,
};
pub use survey::{Survey, check};
pub use view::{EntryVisitor, Found, RecordVisitor, View};
pub use written::{ClientChange, Cut, Verdict, Written};
