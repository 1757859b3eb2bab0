//! `cuttlefs status --memory`: what a memory node (`cuttlefsd memory`) says of itself.

use super::connect::{Trust, device};
use cuttlefs_common::ids::PAGE_SIZE_U64;
use cuttlefs_common::odrp::{Kind, NodeFigures, RemoteError, node_figures};
use cuttlefs_common::rdma::{Endpoint, RdmaError};
use cuttlefs_common::size::ByteSize;
use serde_json::{Value, json};
use std::io::ErrorKind;

/// Asks the node.
pub(super) fn ask(node: &Endpoint, trust: &Trust) -> anyhow::Result<NodeFigures> {
    node_figures(&device(node, trust)?, node).map_err(|error| failed("ask", node, error))
}

/// The error of a command that cannot do something with a node, and what may be done about it.
pub(super) fn failed(action: &str, node: &Endpoint, error: RemoteError) -> anyhow::Error {
    let advice = match &error {
        RemoteError::Rdma(RdmaError::Handshake { .. } | RdmaError::Closed) => {
            "; what listens there is no `cuttlefsd memory` of this version, hangs, or is stopping"
        }
        RemoteError::Rdma(RdmaError::Io { source, .. })
            if matches!(source.kind(), ErrorKind::ConnectionRefused | ErrorKind::NotFound) =>
        {
            "; nobody listens there: start a memory node with `cuttlefsd memory`, or write the address of one"
        }
        _ => "",
    };
    anyhow::Error::new(error).context(format!("cannot {action} the memory node at {node}{advice}"))
}

/// The figures as lines for people.
pub(super) fn lines(node: &Endpoint, figures: &NodeFigures) -> String {
    let size = |pages: u64| ByteSize(pages.saturating_mul(PAGE_SIZE_U64));
    let [loads, mapped, unmapped, invalidates] = Kind::ALL.map(|kind| figures.chains[kind.index()]);
    format!(
        "memory node {node}\n\
         memory      {} to lend, {} free\n\
         clients     {} of {} at most have {}; each may have {}\n\
         operations  {loads} loads, {} stores ({unmapped} of new pages), {invalidates} pages given back, by its {}\n\
         ended       {} clients have left, or were silent or cut off; {} operations were stopped\n",
        size(figures.pages),
        size(figures.free),
        figures.clients,
        figures.clients_max,
        size(figures.mapped),
        size(figures.budget),
        mapped.saturating_add(unmapped),
        if figures.by_processor { "processor: no RNIC there can" } else { "RNIC" },
        figures.gone,
        figures.faults,
    )
}

/// The figures for programs.
pub(super) fn json(figures: &NodeFigures) -> Value {
    let [load, mapped_store, unmapped_store, invalidate] = Kind::ALL.map(|kind| figures.chains[kind.index()]);
    json!({
        "page_bytes": PAGE_SIZE_U64,
        "pages": figures.pages,
        "free_pages": figures.free,
        "mapped_pages": figures.mapped,
        "budget_pages": figures.budget,
        "clients": figures.clients,
        "clients_max": figures.clients_max,
        "clients_gone": figures.gone,
        "chains": {
            "load": load, "mapped_store": mapped_store, "unmapped_store": unmapped_store, "invalidate": invalidate,
        },
        "entries": figures.entries,
        "by_processor": figures.by_processor,
        "control_messages": figures.control_messages,
        "faults": figures.faults,
        "queue_set_right": figures.set_right,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use cuttlefs_common::odrp::{JoinOptions, MemoryNode, NodeOptions, RemotePages};

    #[test]
    fn a_node_tells_its_figures_to_whoever_may_connect() {
        let directory = tempfile::tempdir().expect("a directory");
        let at = Endpoint::Unix(directory.path().join("node.sock"));
        let trust = Trust::default();
        assert!(format!("{:#}", ask(&at, &trust).expect_err("none")).contains("start a memory node"));
        let device = device(&at, &trust).expect("a device");
        let options = NodeOptions { budget: 512, ..NodeOptions::new(1024) };
        let node = MemoryNode::start(&device, &at, options).expect("a node");
        let mut pages = RemotePages::join(&device, &at, JoinOptions { pages: 100 }).expect("a client");
        pages.store(3, b"new").expect("a store");
        pages.store(3, b"other").expect("a store");
        pages.load(3, &mut [0; 8]).expect("a load");
        let figures = ask(&at, &trust).expect("figures");
        assert_eq!((figures.clients, figures.pages, figures.budget, figures.mapped), (1, 1024, 512, 1));
        assert_eq!(figures.chains, [1, 1, 1, 0]);
        assert_eq!(
            lines(&at, &figures),
            format!(
                "memory node {at}\n\
                 memory      4M to lend, {} free\n\
                 clients     1 of 64 at most have 4K; each may have 2M\n\
                 operations  1 loads, 2 stores (1 of new pages), 0 pages given back, by its RNIC\n\
                 ended       0 clients have left, or were silent or cut off; 0 operations were stopped\n",
                ByteSize(figures.free * PAGE_SIZE_U64)
            )
        );
        assert_eq!(json(&figures)["chains"]["mapped_store"], 1);
        drop(node);
    }
}
