//! Memory of programs beyond a limit, at a memory node (`cuttlefs_common::odrp`): what `cuttlefs swap` does. `docs/odrp.md`, "Remote swap", says what
//! programs can rely on.
//!
//! # The parts
//! `wire` what this process and the library in the programs (`fs-client/swapped`) tell each other; `sys` userfaultfd(2) and another process's memory;
//! `remote` where its pages lie; `store` the swap space there; `process` what is known of a process's pages; `places` which pages give their place there up for
//! others; `swapper` serves faults and has pages leave; `messages` what the kernel tells; `hello` takes new processes in; `spares` keeps descriptors for them; `figures` the report.

mod figures;
mod hello;
mod messages;
mod places;
mod process;
mod remote;
mod spares;
mod store;
mod swapper;
pub mod sys;
pub mod wire;

pub use figures::Figures;
pub use hello::{listen, receive_with, send_with};
pub use remote::Remote;
pub use store::{Bytes, Slot, Store, StoreError, StoreFigures};
pub use swapper::{LIMIT_LEAST, SwapError, Swapper};
