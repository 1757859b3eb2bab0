//! What a link cannot do, and which tests of this suite therefore have nothing to test over it. A test that skips says so with a line, and only where this
//! table says that it may: an ability that comes or goes is a failure.

use super::*;

/// What some links lack.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Ability {
    /// Memory windows ([`cuttlefs_common::rdma::MemoryWindow`]).
    MemoryWindows,
    /// Receives that queue pairs share.
    SharedReceives,
    /// Posts that copy short requests.
    Inline,
    /// Once a region is dropped, no byte of a peer arrives there.
    EndsPeersCopies,
    /// The owner's bytes of a region are kept from peers that would change them.
    GuardsOwnBytes,
    /// Peers map exported windows.
    MapsWindows,
}

use Ability::{EndsPeersCopies, GuardsOwnBytes, Inline, MapsWindows, MemoryWindows, SharedReceives};
use LinkKind::{Rdma, Shm, Sim, Tcp, Unix};

/// What is lacked, over which links, and why. (Over shared memory the peer is its own RNIC, and maps what it reaches.)
const LACKS: [(Ability, &[LinkKind], &str); 6] = [
    (MemoryWindows, &[Shm, Tcp, Unix], "no memory windows"),
    (SharedReceives, &[Shm, Tcp, Unix], "no shared receives"),
    (Inline, &[Shm, Tcp, Unix], "no inline requests"),
    (EndsPeersCopies, &[Shm], "a peer's copy that it has begun may end later"),
    (GuardsOwnBytes, &[Shm], "a peer that maps the memory can change all of it"),
    (MapsWindows, &[Tcp, Unix, Sim, Rdma], "no windows are mapped"),
];

/// Why a link lacks an ability, if this suite expects that. Fails unless that is as it `is_there`.
fn lacked(link: LinkKind, ability: Ability, is_there: bool) -> Option<&'static str> {
    let lacked = LACKS.iter().find(|(lacked, links, _)| *lacked == ability && links.contains(&link));
    assert_eq!(is_there, lacked.is_none(), "{ability:?} over {link:?} is not as the suite's table has it");
    lacked.map(|(.., why)| *why)
}

/// Whether a test of this ability has something to test over this link, as it `is_there` or not. If not, says so with a line.
pub(super) fn has(link: LinkKind, ability: Ability, is_there: bool) -> bool {
    let Some(why) = lacked(link, ability, is_there) else { return true };
    let thread = std::thread::current();
    println!("skipped: {}: {why} over {link:?}", thread.name().unwrap_or("a test"));
    false
}

/// What a device says of itself is what the suite expects of its link.
pub(super) fn abilities_are_as_expected(link: LinkKind) {
    let pair = Pair::new(link);
    let capabilities = pair.server.device.capabilities();
    let windows = capabilities.memory_windows;
    if lacked(link, MemoryWindows, windows).is_some() {
        let refused = pair.s().create_window().err().expect("it has none");
        assert!(matches!(refused, RdmaError::Unsupported(_)), "{refused}");
    }
    if lacked(link, SharedReceives, capabilities.shared_receives).is_some() {
        let refused = pair.server.pd.create_shared_receives(4, 1).err().expect("it has none");
        assert!(matches!(refused, RdmaError::Unsupported(_)), "{refused}");
    }
    assert_eq!(capabilities.max_sges as usize, SGES_MAX);
}
