//! Entries as people read them, for logs and for looking at a queue.

use super::entry::{ENTRY_LEN, Element, Entry, Field, Opcode, RECEIVE_LEN, ReceiveEntry};
use super::queue::WorkQueue;
use super::view::{ChainMemory, FIRST_ADDRESS, Need, View};
use std::fmt;

/// An entry without the names of its memory.
pub struct Plain<'e>(pub &'e Entry);

impl fmt::Display for Plain<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        show(self.0, &|key, address, len| range(&format!("{key:#010x}"), address, len), f)
    }
}

fn range(name: &str, address: u64, len: u64) -> String {
    match address.checked_sub(FIRST_ADDRESS) {
        Some(offset) => format!("{name}+{offset:#x}[{len}]"),
        None if address == 0 => format!("{name}+null[{len}]"),
        None => format!("{name}@{address:#x}[{len}]"),
    }
}

fn show(entry: &Entry, name: &dyn Fn(u32, u64, u64) -> String, f: &mut fmt::Formatter<'_>) -> fmt::Result {
    let local: Vec<String> =
        entry.local().iter().map(|one| name(one.key, one.address, one.len.into())).collect();
    let local = local.join(" ");
    let peer = || format!("peer {:#010x}@{:#x}[{}]", entry.key, entry.address, entry.local_len());
    let remote = || name(entry.key, entry.address, entry.local_len());
    match entry.opcode {
        Opcode::Nop => f.write_str("NOP")?,
        Opcode::Wait => write!(f, "WAIT {}", entry.index)?,
        Opcode::Enable => write!(f, "ENABLE {}", entry.index)?,
        Opcode::Read => write!(f, "READ {} -> {local}", remote())?,
        Opcode::Write if entry.peer => write!(f, "WRITE {local} -> {}", peer())?,
        Opcode::Write => write!(f, "WRITE {local} -> {}", remote())?,
        Opcode::WriteImm => write!(f, "WRITE_IMM {:#010x} {local} -> {}", entry.imm, peer())?,
        Opcode::MaskedAdd => {
            write!(
                f,
                "MASKED_FAA {} += {} (fields to {:#x}) -> {local}",
                remote(),
                entry.operand,
                entry.mask
            )?;
        }
        Opcode::MaskedSwap => write!(
            f,
            "MASKED_CAS {} if {:#x} in {:#x} = {:#x} in {:#x} -> {local}",
            remote(),
            entry.compare,
            entry.compare_mask,
            entry.operand,
            entry.mask
        )?,
    }
    if entry.last { f.write_str(" (last)") } else { Ok(()) }
}

/// A range of a queue: a field of an entry where it is one, else the view's name and the offset.
pub fn name_entry(queue: &WorkQueue, key: u32, address: u64, len: u64) -> String {
    let name = queue.views.iter().find(|view| view.key() == key).map_or("?", View::name);
    let (first, count) = queue.entries;
    let behind = address.checked_sub(first).filter(|at| *at < u64::from(count) * ENTRY_LEN as u64);
    let Some(at) = behind.filter(|_| key == queue.key) else { return range(name, address, len) };
    let (entry, byte) = (at / ENTRY_LEN as u64, at as usize % ENTRY_LEN);
    let fields = [Field::Immediate, Field::Index, Field::Address, Field::LocalAddress];
    let field =
        fields.iter().find(|field| (field.range().0..field.range().0 + field.range().1).contains(&byte));
    match field {
        Some(field) => format!("{entry}.{field:?}+{}[{len}]", byte - field.range().0),
        None => format!("{entry}+{byte}[{len}]"),
    }
}

struct Named<'q>(&'q WorkQueue, &'q Entry);

impl fmt::Display for Named<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        show(self.1, &|key, address, len| name_entry(self.0, key, address, len), f)
    }
}

/// The first receive entries and work entries of a queue, one a line.
pub fn listing(queue: &WorkQueue, receives: u32, entries: u32) -> String {
    let views = &queue.views[..];
    let mut text = String::new();
    for index in 0..receives.min(queue.receives.1) {
        let mut bytes = [0; RECEIVE_LEN];
        let at = queue.receives.0 + u64::from(index) * RECEIVE_LEN as u64;
        let Ok(place) = views.find(queue.key, at, RECEIVE_LEN as u64, Need::Read) else { break };
        place.memory.read(place.offset, &mut bytes);
        let entry = ReceiveEntry::parse(&bytes);
        let name = |one: &Element| name_entry(queue, one.key, one.address, one.len.into());
        let parts: Vec<String> = entry.elements().iter().map(name).collect();
        text += &format!("receive {index}: {}\n", parts.join(" "));
    }
    for index in 0..entries.min(queue.entries.1) {
        let mut bytes = [0; ENTRY_LEN];
        let at = queue.entries.0 + u64::from(index) * ENTRY_LEN as u64;
        let Ok(place) = views.find(queue.key, at, ENTRY_LEN as u64, Need::Read) else { break };
        place.memory.read(place.offset, &mut bytes);
        match Entry::parse(&bytes) {
            Ok(entry) => text += &format!("{index}: {}\n", Named(queue, &entry)),
            Err(error) => text += &format!("{index}: ({error})\n"),
        }
    }
    text
}
