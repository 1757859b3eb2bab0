//! Pages that are evicted, rewritten, moved, cut off and given to other files while clients read them: translated by the target, by loads, and by READs of
//! the tables at once. No client may see a torn, foreign or old page, the magic pattern instead of data, or data instead of the pattern.
//!
//! The server has far fewer frames than the files have pages, and the pool hardly more pages than the files, so everything moves all the time.
//! `CUTTLEFS_STRESS_SEED` repeats the random numbers, but not the schedule of the threads; `CUTTLEFS_STRESS_SECONDS` sets the time of a long run.
//! Over an RNIC all clients read the tables, and the target does not translate.
//! One writer is a native program over tcp with write grants, which holes end; over an RNIC, which has no such verbs, it is one as the others.

#[path = "../running/mod.rs"]
mod running;

mod actors;
mod churn;
mod native_writer;
mod pattern;
mod words;

use actors::World;
use cuttlefs_client::file::volume::Volume;
use cuttlefs_common::world::{Random, SystemRandom};
use cuttlefs_server::pages::Hotspots;
use cuttlefs_server::pages::window::WindowKind;
use native_writer::NativeWriter;
use running::{Site, Sizes, figure};
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

/// Some 500 pages.
const POOL_BYTES: u64 = 2 << 20;
const FRAMES: u64 = 96;

/// The links between clients and server.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Links {
    Software,
    #[cfg(feature = "verbs")]
    Rnic,
    /// An RNIC that follows a window of pages.
    #[cfg(feature = "verbs")]
    RnicWithWindow,
}

fn race(hotspots: Hotspots, links: Links) {
    let variable = |name: &str| std::env::var(name).ok().and_then(|value| value.parse::<u64>().ok());
    let seed = variable("CUTTLEFS_STRESS_SEED").unwrap_or_else(|| SystemRandom.next_u64());
    println!("CUTTLEFS_STRESS_SEED={seed}");
    let until =
        variable("CUTTLEFS_STRESS_SECONDS").map(|seconds| Instant::now() + Duration::from_secs(seconds));
    let window = match links {
        #[cfg(feature = "verbs")]
        Links::RnicWithWindow => WindowKind::Odp,
        _ => WindowKind::Pinned,
    };
    let sizes = Sizes { pool_bytes: POOL_BYTES, frames: FRAMES, hotspots, window };
    let (site, schemes) = match links {
        Links::Software => (Site::new(sizes), ["tcp", "shm", "tables", "shm"]),
        #[cfg(feature = "verbs")]
        Links::Rnic | Links::RnicWithWindow => {
            (Site::over(sizes, running::serving::rdma_endpoint(), false), ["rdma"; 4])
        }
    };
    let magic = site.files().pages().magic();
    let connect = |scheme| match scheme {
        "tables" => site.connect("tables", 8, true),
        scheme => site.connect(scheme, 8, true),
    };
    let clients = schemes.map(connect);
    let plain = (links == Links::Software).then(|| site.connect("tcp", 2, false));
    let native = (links == Links::Software).then(|| NativeWriter::connect(site.network()));
    let clients_of_world = [&clients[0], &clients[1], &clients[2], &clients[3]];
    let world = World::new(clients_of_world, native.as_ref(), seed, until);
    std::thread::scope(|scope| {
        let (world, plain) = (&world, plain.as_ref());
        let bounded = [
            scope.spawn(move || world.bounded(|| world.writer(0))),
            scope.spawn(move || world.bounded(|| world.writer(1))),
            scope.spawn(move || world.bounded(|| world.writer(2))),
            scope.spawn(move || world.bounded(|| world.churner())),
            scope.spawn(move || world.bounded(|| world.pattern_writer(&magic, plain))),
        ];
        scope.spawn(move || world.bounded(|| world.mover()));
        for reader in 0..4 {
            scope.spawn(move || world.bounded(|| world.reader(reader)));
        }
        for reader in 0..3 {
            scope.spawn(move || world.bounded(|| world.churn_reader(reader)));
        }
        // If a thread panics, `bounded` ends all others.
        let ended = bounded.into_iter().map(|thread| thread.join()).filter(Result::is_err).count();
        world.stop();
        assert_eq!(ended, 0, "somebody saw what must not be; see above");
    });
    world.finish();
    if let Some(native) = &native {
        native.close();
    }
    if let Some(plain) = &plain {
        plain.shut_down();
    }
    let figures = site.files().pages().figures();
    println!("{figures:?}");
    for client in &clients {
        println!("{:?}", client.figures());
    }
    // Without these events nothing raced, and the run would have tested nothing.
    let counts = figures.counts;
    let everywhere = [
        ("evicted", counts.evicted),
        ("promoted", counts.promoted + counts.promoted_ahead),
        ("fetched from frames", counts.fetch_hits),
        ("fetched from SSD", counts.fetch_misses),
        ("churned reads", world.churned_reads()),
        ("moved", world.moved.load(Ordering::Relaxed)),
    ];
    let where_the_target_translates = [
        ("read by the NIC from frames", counts.target_hits),
        ("answered with the pattern", counts.target_magic),
        ("counted by clients", counts.counted),
        ("written under grants", counts.target_writes),
    ];
    let by_the_window =
        [("read through the window", clients.iter().map(|client| figure(client, "window_pages")).sum())];
    let by_the_window = by_the_window.into_iter().filter(|_| window == WindowKind::Odp);
    let of_software = where_the_target_translates.into_iter().filter(|_| links == Links::Software);
    for (what, count) in everywhere.into_iter().chain(of_software).chain(by_the_window) {
        assert!(count > 50, "{what}: {count}");
    }
    for client in &clients {
        for what in ["onesided_reads", "magic_hits", "sparse_fetches"] {
            assert!(figure(client, what) > 50, "{what} of a client: {}", figure(client, what));
        }
        assert_eq!(figure(client, "reconnects"), 0);
        client.shut_down();
    }
    site.check();
}

#[test]
fn no_reader_sees_what_moved_where_pages_are_promoted() {
    race(Hotspots::Pages, Links::Software);
}

#[test]
fn no_reader_sees_what_moved_where_units_are_promoted() {
    race(Hotspots::Units, Links::Software);
}

#[cfg(feature = "verbs")]
mod rdma {
    use super::{Hotspots, Links, race};

    #[test]
    #[ignore = "wants an RNIC"]
    fn no_reader_sees_what_moved_where_pages_are_promoted() {
        race(Hotspots::Pages, Links::Rnic);
    }

    #[test]
    #[ignore = "wants an RNIC"]
    fn no_reader_sees_what_moved_where_units_are_promoted() {
        race(Hotspots::Units, Links::Rnic);
    }
}

/// Apart from `rdma`, whose tests run on any RNIC.
#[cfg(feature = "verbs")]
mod odp {
    use super::{Hotspots, Links, race};

    #[test]
    #[ignore = "wants an RNIC with on-demand paging"]
    fn no_reader_sees_what_moved_through_a_window() {
        race(Hotspots::Pages, Links::RnicWithWindow);
    }
}
