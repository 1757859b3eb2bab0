//! The four chains of a client (ODRP section 4.3, Figure 6, as they are in `docs/odrp.md`), and the messages that start them.

use super::pages::PAGE_LEN;
use crate::rdma::chain::{Assembled, Assembler, Bytes, FIRST_ADDRESS, Field, Label, MessageShape};
use serde::{Deserialize, Serialize};

/// Places of a queue; half of them may be outstanding.
pub const PLACES: u32 = 32;

/// What a chain does, and so which queue pair it has.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum Kind {
    /// Brings a page.
    Load,
    /// Overwrites a page.
    MappedStore,
    /// Takes a free page, fills and maps it.
    UnmappedStore,
    /// Unmaps a page and frees it.
    Invalidate,
}

impl Kind {
    /// All kinds.
    pub const ALL: [Self; 4] = [Self::Load, Self::MappedStore, Self::UnmappedStore, Self::Invalidate];

    /// Its place in tables of all kinds.
    pub const fn index(self) -> usize {
        self as usize
    }

    /// Its name.
    pub const fn label(self) -> &'static str {
        match self {
            Self::Load => "load",
            Self::MappedStore => "mapped store",
            Self::UnmappedStore => "unmapped store",
            Self::Invalidate => "invalidate",
        }
    }

    /// Whether its message brings a page.
    pub const fn brings(self) -> bool {
        matches!(self, Self::MappedStore | Self::UnmappedStore)
    }

    /// Whether its chain uses the free page queue.
    pub const fn changes_queue(self) -> bool {
        matches!(self, Self::UnmappedStore | Self::Invalidate)
    }
}

/// The keys of the memory that a chain reaches.
#[derive(Clone, Copy, Debug)]
pub struct Keys {
    /// Of the work queue.
    pub queue: u32,
    /// Of the pages.
    pub pool: u32,
    /// Of the free page queue.
    pub free: u32,
    /// Of the client's translation table.
    pub table: u32,
}

/// The words of the free page queue that chains add to, and the top bit of the ring's addresses.
#[derive(Clone, Copy, Debug)]
pub struct Ring {
    /// Offset of the head.
    pub head_at: u64,
    /// Offset of the tail.
    pub tail_at: u64,
    /// The highest bit in which two addresses of the ring differ.
    pub top: u64,
}

/// Bytes of one address.
const WORD: u32 = 8;

/// The work queue of a kind.
pub fn assemble(kind: Kind, keys: Keys, ring: Ring) -> Assembled {
    let mut a = Assembler::new(keys.queue);
    let table = Bytes::Filled { key: keys.table };
    let pool = Bytes::Filled { key: keys.pool };
    let free = Bytes::Filled { key: keys.free };
    let word = |at: u64| Bytes::At { key: keys.free, address: FIRST_ADDRESS + at, len: WORD };
    match kind {
        Kind::Load => {
            a.wait();
            a.enable();
            let look_up = a.read(table, &[Bytes::Of(Label(4), Field::LocalAddress)]);
            a.enable();
            let tell = a.tell_peer(&[Bytes::At { key: keys.pool, address: 0, len: PAGE_LEN }]);
            a.argument(Bytes::Of(look_up, Field::Address));
            a.argument(Bytes::Of(tell, Field::Immediate));
            a.argument(Bytes::Of(tell, Field::Remote));
        }
        Kind::MappedStore => {
            let page = a.scratch(PAGE_LEN);
            a.wait();
            a.enable();
            let look_up = a.read(table, &[Bytes::Of(Label(4), Field::Address)]);
            a.enable();
            a.write(pool, &[page]);
            let tell = a.tell_peer(&[]);
            a.argument(Bytes::Of(look_up, Field::Address));
            a.argument(Bytes::Of(tell, Field::Immediate));
            a.payload(page);
        }
        Kind::UnmappedStore => {
            let (page, old_head) = (a.scratch(PAGE_LEN), a.scratch(WORD));
            a.wait();
            a.enable();
            a.add(word(ring.head_at), WORD.into(), ring.top, old_head);
            a.turn(old_head, Label(5), Field::Address);
            a.enable();
            a.take(free, Bytes::Of(Label(7), Field::Address));
            a.enable();
            // Faults here if the queue is empty: before the table has changed, and the table gets the page only when it has its bytes.
            let fill = a.write(pool, &[page]);
            let map = a.write(table, &[Bytes::Of(fill, Field::Address)]);
            let tell = a.tell_peer(&[]);
            a.argument(Bytes::Of(map, Field::Address));
            a.argument(Bytes::Of(tell, Field::Immediate));
            a.payload(page);
        }
        Kind::Invalidate => {
            let (probe, old_tail) = (a.scratch(WORD), a.scratch(WORD));
            a.wait();
            a.enable();
            let unmap = a.take(table, Bytes::Of(Label(4), Field::Address));
            a.enable();
            // Faults here if nothing was mapped.
            let prove = a.read(pool, &[probe]);
            a.add(word(ring.tail_at), WORD.into(), ring.top, old_tail);
            a.turn(old_tail, Label(8), Field::Address);
            a.enable();
            a.write(free, &[Bytes::Of(prove, Field::Address)]);
            let tell = a.tell_peer(&[]);
            a.argument(Bytes::Of(unmap, Field::Address));
            a.argument(Bytes::Of(tell, Field::Immediate));
        }
    }
    a.finish(PLACES)
}

/// What a kind's messages look like; it depends on no keys.
pub fn shape(kind: Kind) -> MessageShape {
    let keys = Keys { queue: 1, pool: 2, free: 3, table: 4 };
    assemble(kind, keys, Ring { head_at: 0, tail_at: 8, top: 1 }).shape
}

/// The arguments of one message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Arguments {
    /// The page in the client's swap space: its entry in the table.
    pub page: u64,
    /// Comes back as the immediate.
    pub tag: u32,
    /// For a load: key and offset of the client's memory.
    pub to: (u32, u64),
}

/// Writes message `number` of a queue, but for its payload.
pub fn put_message(kind: Kind, shape: &MessageShape, number: u64, arguments: Arguments, message: &mut [u8]) {
    let entry = FIRST_ADDRESS.wrapping_add(arguments.page.wrapping_mul(WORD.into()));
    message[shape.argument(0)].copy_from_slice(&entry.to_be_bytes());
    message[shape.argument(1)].copy_from_slice(&arguments.tag.to_be_bytes());
    if kind == Kind::Load {
        let remote = &mut message[shape.argument(2)];
        remote[..8].copy_from_slice(&arguments.to.1.to_be_bytes());
        remote[8..].copy_from_slice(&arguments.to.0.to_be_bytes());
    }
    shape.put_indices(number, message);
}
