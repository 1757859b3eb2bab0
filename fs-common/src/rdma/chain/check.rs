//! Proves of a work queue, before it is armed, what can be proven of its bytes.
//!
//! # What is proven
//! * Every entry parses. Every range that is fixed lies in the queue's views, with the right that it needs; one whose address is filled in later names a
//!   view by a key that nothing changes. So whatever is filled in, the entry reaches that view only.
//! * What messages and entries write into the queue are immediates, indices, addresses of entries, the peer's address and key, the doorbell, and scratch
//!   memory: never an opcode, flags, a length, or a key of this side.
//! * Every place begins with its only WAIT, so there is no loop without one; a place has at most `STEPS_MAX` entries and moves at most `BYTES_MAX` bytes.
//! * Each ENABLE of a place reaches the next, and none further than into the next place: nothing is enabled behind a WAIT but one ENABLE.
//! * Between an entry and one that it changes stands an ENABLE, so that an RNIC that fetches ahead of time fetches no old bytes.

use super::entry::{ENTRY_LEN, Element, Entry, Field, Opcode, RECEIVE_LEN, ReceiveEntry};
use super::queue::{ArmError, WorkQueue};
use super::run::{BYTES_MAX, STEPS_MAX};
use super::view::{ChainMemory, Need, NotInView};

/// Something that cannot be proven.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Unproven {
    /// The queue cannot be armed at all.
    #[error("{0}")]
    Queue(#[from] ArmError),
    /// The bytes of an entry are none.
    #[error("entry {0} is none: {1}")]
    Entry(u32, super::entry::BadEntry),
    /// A range is outside.
    #[error("{0} {1}: {2}")]
    Range(&'static str, u32, NotInView),
    /// Something is written that nothing may change.
    #[error("{0} {1} writes {2} bytes at {3:#x}, which are neither scratch nor a field that may change")]
    Writes(&'static str, u32, u32, u64),
    /// A place does not begin with its only WAIT.
    #[error("entry {0}: each place begins with a WAIT, and all have as many entries")]
    Wait(u32),
    /// A place is too long.
    #[error("the place of entry {0} executes {1} entries, more than {STEPS_MAX}")]
    Steps(u32, u32),
    /// A place moves too much.
    #[error("the place of entry {0} moves {1} bytes, more than {BYTES_MAX}")]
    Bytes(u32, u64),
    /// An ENABLE does not reach the next one, or reaches too far.
    #[error("entry {0} enables up to {1}; it must reach the next ENABLE, and no further")]
    Enable(u32, u32),
    /// An entry is changed after it may have been fetched.
    #[error("entry {0} changes entry {1}, and no ENABLE stands between them")]
    Fetched(u32, u32),
}

/// Proves a queue, as it lies in memory.
///
/// # Errors
/// `Unproven`: the first thing that is wrong.
pub fn check(queue: &WorkQueue) -> Result<(), Unproven> {
    queue.look()?;
    let entries = (0..queue.entries.1).map(|index| fetch(queue, index)).collect::<Result<Vec<_>, _>>()?;
    let per_place = places(&entries)?;
    let mut filled = vec![Filled::default(); entries.len()];
    let mut changes = Vec::new();
    for index in 0..queue.receives.1 {
        let receive = fetch_receive(queue, index)?;
        for element in receive.elements() {
            match written(queue, &entries, "receive", index, element)? {
                Target::Address(entry) => filled[entry as usize].remote = true,
                Target::Local(entry) => filled[entry as usize].local = true,
                Target::Other(_) | Target::Memory => {}
            }
        }
    }
    for (index, entry) in (0u32..).zip(&entries) {
        let local = if entry.opcode.fills_local() { entry.local() } else { &[] };
        // What is filled in has been seen: an entry that changes one before it is refused below. `ranges` knows which of these may be.
        let is_fixed = !filled[index as usize].remote;
        let remote = entry.changed_remote().filter(|remote| is_fixed && remote.key == queue.key);
        for element in local.iter().chain(&remote) {
            let changed = match written(queue, &entries, "entry", index, element)? {
                Target::Memory => continue,
                Target::Address(changed) => {
                    filled[changed as usize].remote = true;
                    changed
                }
                Target::Local(changed) => {
                    filled[changed as usize].local = true;
                    changed
                }
                Target::Other(changed) => changed,
            };
            changes.push((index, changed));
        }
    }
    for (index, entry) in entries.iter().enumerate() {
        ranges(queue, index as u32, entry, filled[index])?;
    }
    enables(&entries, per_place, queue.enabled)?;
    for (changing, changed) in changes {
        let between = entries.get(changing as usize..changed as usize).unwrap_or_default();
        let same_place = changing / per_place == changed / per_place;
        if !same_place || !between.iter().any(|entry| entry.opcode == Opcode::Enable) {
            return Err(Unproven::Fetched(changing, changed));
        }
    }
    Ok(())
}

fn fetch(queue: &WorkQueue, index: u32) -> Result<Entry, Unproven> {
    let mut bytes = [0; ENTRY_LEN];
    let at = queue.entries.0 + u64::from(index) * ENTRY_LEN as u64;
    let place = queue.views[..]
        .find(queue.key, at, ENTRY_LEN as u64, Need::Read)
        .map_err(|error| Unproven::Range("entry", index, error))?;
    place.memory.read(place.offset, &mut bytes);
    Entry::parse(&bytes).map_err(|error| Unproven::Entry(index, error))
}

fn fetch_receive(queue: &WorkQueue, index: u32) -> Result<ReceiveEntry, Unproven> {
    let mut bytes = [0; RECEIVE_LEN];
    let at = queue.receives.0 + u64::from(index) * RECEIVE_LEN as u64;
    let place = queue.views[..]
        .find(queue.key, at, RECEIVE_LEN as u64, Need::Read)
        .map_err(|error| Unproven::Range("receive", index, error))?;
    place.memory.read(place.offset, &mut bytes);
    Ok(ReceiveEntry::parse(&bytes))
}

/// The number of entries of each place; checks lengths and bytes.
fn places(entries: &[Entry]) -> Result<u32, Unproven> {
    let waits: Vec<usize> = entries
        .iter()
        .enumerate()
        .filter(|(_, entry)| entry.opcode == Opcode::Wait)
        .map(|(index, _)| index)
        .collect();
    let per_place = entries.len() / waits.len().max(1);
    if waits.is_empty() || entries.len() != per_place * waits.len() {
        return Err(Unproven::Wait(0));
    }
    for (place, wait) in waits.iter().enumerate() {
        let first = place * per_place;
        if *wait != first {
            return Err(Unproven::Wait(first as u32));
        }
        let of_place = &entries[first..first + per_place];
        if per_place > STEPS_MAX as usize {
            return Err(Unproven::Steps(first as u32, per_place as u32));
        }
        let moving = of_place.iter().filter(|entry| entry.opcode.moves());
        let bytes = moving.map(Entry::local_len).sum();
        if bytes > BYTES_MAX {
            return Err(Unproven::Bytes(first as u32, bytes));
        }
    }
    Ok(per_place as u32)
}

/// Which addresses of an entry are filled in later.
#[derive(Clone, Copy, Default)]
struct Filled {
    remote: bool,
    /// Of the first local element.
    local: bool,
}

/// What an element that is written lies in.
enum Target {
    /// Scratch, the doorbell, other memory.
    Memory,
    /// The address of an entry.
    Address(u32),
    /// The address of an entry's first local element.
    Local(u32),
    /// Another field of an entry that may change.
    Other(u32),
}

fn written(
    queue: &WorkQueue,
    entries: &[Entry],
    by: &'static str,
    writer: u32,
    element: &Element,
) -> Result<Target, Unproven> {
    let len = u64::from(element.len);
    queue.views[..]
        .find(element.key, element.address, len, Need::Write)
        .map_err(|error| Unproven::Range(by, writer, error))?;
    if element.key != queue.key {
        return Ok(Target::Memory);
    }
    let refused = Unproven::Writes(by, writer, element.len, element.address);
    let end = element.address + len;
    let apart = |(first, count): (u64, u32), size: usize| {
        end <= first || element.address >= first + u64::from(count) * size as u64
    };
    if !apart(queue.receives, RECEIVE_LEN) {
        return Err(refused);
    }
    if apart(queue.entries, ENTRY_LEN) {
        return Ok(Target::Memory);
    }
    let at = element.address.checked_sub(queue.entries.0).ok_or(refused)?;
    let (index, byte) = (at / ENTRY_LEN as u64, at as usize % ENTRY_LEN);
    let entry = entries.get(index as usize).ok_or(refused)?;
    let lies_in = |field: Field| {
        let (first, field_len) = field.range();
        byte >= first && byte + element.len as usize <= first + field_len
    };
    if lies_in(Field::Address) || (entry.peer && lies_in(Field::Remote)) {
        Ok(Target::Address(index as u32))
    } else if lies_in(Field::LocalAddress) && !entry.local().is_empty() {
        Ok(Target::Local(index as u32))
    } else if lies_in(Field::Immediate)
        || (lies_in(Field::Index) && matches!(entry.opcode, Opcode::Wait | Opcode::Enable))
    {
        Ok(Target::Other(index as u32))
    } else {
        Err(refused)
    }
}

/// Checks the ranges that an entry reads, and the one at its remote end.
fn ranges(queue: &WorkQueue, index: u32, entry: &Entry, filled: Filled) -> Result<(), Unproven> {
    if !entry.opcode.moves() {
        return Ok(());
    }
    let views = &queue.views[..];
    let at = |error| Unproven::Range("entry", index, error);
    let of_key = |key: u32, need: Need| match views.iter().find(|view| view.key() == key) {
        Some(view) if view.gives(need) => Ok(()),
        Some(_) => Err(at(NotInView::Right(key, need))),
        None => Err(at(NotInView::Key(key))),
    };
    if entry.opcode.fills_local() {
        if filled.local {
            // Where its old value or bytes go must be known: they could change the queue.
            let first = entry.local()[0];
            return Err(Unproven::Writes("entry", index, first.len, first.address));
        }
    } else {
        for (number, element) in entry.local().iter().enumerate() {
            if filled.local && number == 0 {
                of_key(element.key, Need::Read)?;
                continue;
            }
            views.find(element.key, element.address, element.len.into(), Need::Read).map_err(at)?;
        }
    }
    if entry.peer {
        return Ok(());
    }
    let need = match entry.opcode {
        Opcode::Read => Need::Read,
        Opcode::Write | Opcode::WriteImm => Need::Write,
        _ => Need::Atomic,
    };
    if !filled.remote {
        let len = entry.local_len();
        return views.find(entry.key, entry.address, len, need).map(|_| ()).map_err(at);
    }
    // Wherever it will lie, it must not be the queue, whose entries it could change. Its right is looked at by an empty range, or for words at run time.
    if entry.key == queue.key && need != Need::Read {
        return Err(Unproven::Writes("entry", index, entry.local_len() as u32, entry.address));
    }
    of_key(entry.key, need)
}

/// Checks that the ENABLEs of the first lap reach from one to the next.
fn enables(entries: &[Entry], per_place: u32, enabled: u32) -> Result<(), Unproven> {
    let labels: Vec<u32> =
        (0..entries.len() as u32).filter(|index| entries[*index as usize].opcode == Opcode::Enable).collect();
    let Some(first) = labels.first().filter(|first| **first < per_place) else {
        return Err(Unproven::Enable(0, enabled));
    };
    if enabled != first + 1 {
        return Err(Unproven::Enable(0, enabled));
    }
    let around = entries.len() as u32 + first;
    for (label, next) in labels.iter().zip(labels[1..].iter().copied().chain([around])) {
        let index = entries[*label as usize].index;
        if index != next + 1 {
            return Err(Unproven::Enable(*label, index));
        }
    }
    // Each place has its own, at the same position as the first place.
    let per = labels.len() / (entries.len() / per_place as usize);
    let is_alike = labels
        .iter()
        .enumerate()
        .all(|(number, label)| per > 0 && *label == labels[number % per] + (number / per) as u32 * per_place);
    if is_alike { Ok(()) } else { Err(Unproven::Enable(0, enabled)) }
}

#[cfg(test)]
#[path = "check_tests.rs"]
mod tests;
