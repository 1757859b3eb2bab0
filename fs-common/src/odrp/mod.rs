//! Remote memory by pages, which the memory node's RNIC allocates, finds, fills and frees: chains of work requests do it, and no thread of the node
//! (Wang et al., ODRP, NSDI '25). `docs/odrp.md` says what holds and why.
//!
//! # The parts
//! `chains` the four chains and their messages; `pages` pool, free page queue, translation tables; `figures` what a node says of itself; `wire` control messages; `node` the memory node;
//! `client` who keeps pages there. Node and client need the verbs API and nothing of the file system.

mod chains;
mod client;
mod figures;
mod node;
mod pages;
mod wire;

pub use chains::{Arguments, Kind, PLACES, put_message, shape};
pub use client::{Done, JoinOptions, RemoteError, RemotePages, Ticket, node_figures};
pub use figures::NodeFigures;
pub use node::{CLIENTS_MAX, MemoryNode, NodeError, NodeOptions};
pub use pages::PAGES_MAX;
pub use wire::{Answer, BadMessage, MAPPED_PER_ANSWER, MESSAGE_MAX, Question, Why, encode, parse};

#[cfg(test)]
mod model_tests;
