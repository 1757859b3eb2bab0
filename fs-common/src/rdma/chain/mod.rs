//! Chains of work requests: a work queue in registered memory, whose entries a message changes and starts (RedN, NSDI '22; ODRP, NSDI '25).
//!
//! # The parts
//! `entry` the bytes of a queue; `view` the memory that a chain reaches; `queue` what is armed: where it lies, its gate, its counters; `run` executes
//! entries; `assemble` writes a queue, `check` proves what can be proven of one before it is armed, `disassemble` shows one.
//!
//! # Invariants
//! * A chain reads and changes only what the views of its queue open, and the peer of its own queue pair.
//! * A message executes at most `STEPS_MAX` entries and moves at most `BYTES_MAX` bytes, whatever is in the queue.
//! * An entry is copied out of memory before it is looked at. What is executed is the copy.
//! * Nothing is executed behind a fault.
//!
//! No link is named here: the NIC engine of `tcp` and `unix` calls `run` when a message comes to an armed queue pair. `docs/odrp.md` has the
//! semantics.

mod assemble;
mod check;
mod disassemble;
mod entry;
mod queue;
mod run;
mod view;

pub use assemble::{Assembled, Assembler, Bytes, Geometry, Label, MessageShape};
pub use check::{Unproven, check};
pub use disassemble::{listing, name_entry};
pub use entry::{
    BadEntry, ELEMENT_LEN, ELEMENTS_MAX, ENTRY_LEN, Element, Entry, Field, Opcode, RECEIVE_LEN, ReceiveEntry,
};
pub use queue::{ArmError, ChainFigures, ENTRIES_MAX, Gate, RECEIVES_MAX, Started, WorkQueue};
pub use run::{BYTES_MAX, Chain, ChainPeer, Fault, FaultKind, PeerGone, STEPS_MAX, Step};
pub use view::{ChainMemory, FIRST_ADDRESS, Need, NotInView, Place, VIEWS_MAX, View};
