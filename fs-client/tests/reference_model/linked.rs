//! Walks over the real links in one process: a server with threads on a pool in a temporary directory, with io_uring and metadata on a disk, and two
//! clients. All restarts are clean.

use super::chaos::BadLink;
use super::serving::{self, Serve};
use super::site::Site;
use super::step::{Step, step};
use super::walk::walk;
use super::world::Death;
use cuttlefs_client::file::RemoteVolume;
use cuttlefs_client::file::volume::Volume;
use cuttlefs_common::attr::Timestamp;
use cuttlefs_common::rdma::Endpoint;
use cuttlefs_common::rdma::sim::Cut;
use cuttlefs_common::world::{Clock, Random, SystemClock, SystemRandom};
use cuttlefs_server::pages::Hotspots;
use cuttlefs_server::pages::policy::RegionPolicy;
use cuttlefs_server::pages::window::WindowKind;
use cuttlefs_server::pool::FormatOptions;
use cuttlefs_server::serve::RunningServer;
use proptest::prelude::*;
use std::path::Path;
use std::time::Duration;
use tempfile::TempDir;

/// The smallest pool that can be made; it has some 250 pages.
const POOL_BYTES: u64 = 1 << 20;
/// Far fewer frames than the pool has pages.
const FRAMES: u64 = 16;
/// On a bad link one in this many pieces of the stream has a fault.
const FAULT_ONE_IN: u64 = 30;

struct Linked {
    clients: Vec<RemoteVolume>,
    /// A link with faults through which the clients connect, instead of directly to the server.
    link: Option<BadLink>,
    // Dropped, and so stopped, before its directory.
    running: Option<RunningServer>,
    endpoint: Endpoint,
    pool_pages: u64,
    window: WindowKind,
    directory: TempDir,
}

fn make_pool(directory: &Path, size: u64) -> u64 {
    let options = FormatOptions { dir: directory.to_owned(), size, ..FormatOptions::default() };
    let mut key = [0; 16];
    SystemRandom.fill(&mut key);
    serving::make_pool(&options, key)
}

fn serve(directory: &Path, listen: Endpoint, window: WindowKind) -> RunningServer {
    let with = Serve {
        frames: FRAMES,
        listen: vec![listen],
        policy: RegionPolicy::default(),
        hotspots: Hotspots::Pages,
        durable_answers: false,
    };
    serving::serve_windowed(directory, with, window).expect("start")
}

impl Linked {
    fn new(scheme: &str) -> Self {
        Self::windowed(scheme, WindowKind::Pinned)
    }

    /// A site whose clients read pages from such a window, if they READ the tables.
    fn windowed(scheme: &str, window: WindowKind) -> Self {
        let directory = tempfile::tempdir().expect("directory");
        let pool = directory.path().join("pool");
        let pool_pages = make_pool(&pool, POOL_BYTES);
        let listen = match scheme {
            "tcp" => "tcp://127.0.0.1:0".to_owned(),
            #[cfg(feature = "verbs")]
            "rdma" => serving::rdma_endpoint().to_string(),
            _ => format!("{scheme}://{}", directory.path().join("socket").display()),
        };
        let running = serve(&pool, listen.parse().expect("an endpoint"), window);
        let endpoint = running.endpoints().remove(0);
        let clients = Vec::new();
        let running = Some(running);
        let mut site = Self { clients, link: None, running, endpoint, pool_pages, window, directory };
        site.clients = (0..2).map(|_| site.connect()).collect();
        site
    }

    /// A site over tcp whose link has faults.
    fn over_bad_link(seed: u64) -> Self {
        let mut site = Self::new("tcp");
        site.clients.iter().for_each(RemoteVolume::shut_down);
        let link = site.link.insert(BadLink::to(&site.endpoint, seed));
        let endpoint = link.endpoint();
        site.clients = (0..2).map(|_| serving::connect(&endpoint, "model", 2, false)).collect();
        link.set_faults(FAULT_ONE_IN);
        site
    }

    fn connect(&self) -> RemoteVolume {
        // Without a control thread, closes take effect at once, so free space can be compared exactly.
        serving::connect(&self.endpoint, "model", 2, false)
    }
}

impl Drop for Linked {
    fn drop(&mut self) {
        if let Some(link) = &self.link {
            link.set_faults(0);
            println!("{:?}", link.figures());
        }
        for client in &self.clients {
            client.shut_down();
        }
        if let Some(running) = self.running.take() {
            running.stop();
        }
    }
}

impl Site for Linked {
    fn client(&self, index: usize) -> &RemoteVolume {
        &self.clients[index]
    }

    fn now(&self) -> Timestamp {
        SystemClock::new().now()
    }

    fn pass(&self, _time: Duration) {}

    fn restart(&mut self) {
        self.running.take().expect("it runs").stop();
        let pool = self.directory.path().join("pool");
        self.running = Some(serve(&pool, self.endpoint.clone(), self.window));
    }

    fn kill_at(&self, _cut: Cut, _death: Death) {}

    fn has_died(&self) -> bool {
        false
    }

    fn cut(&self, _cut: Cut, _pass: u32) {}

    fn pool_pages(&self) -> u64 {
        self.pool_pages
    }

    fn check_inside(&self) {
        let server = self.running.as_ref().expect("it runs").server();
        assert_eq!(server.meta.damage_count(), 0);
        assert_eq!(server.files.pages().figures().leaked_frames, 0);
    }
}

fn steps() -> impl Strategy<Value = Vec<(usize, Step)>> {
    prop::collection::vec(step(), 1..150)
}

proptest! {
    #![proptest_config(super::cases(4))]

    #[test]
    fn shared_memory_behaves_as_the_model(steps in steps()) {
        walk(Linked::new("shm"), &steps);
    }

    #[test]
    fn tcp_behaves_as_the_model(steps in steps()) {
        walk(Linked::new("tcp"), &steps);
    }

    #[test]
    fn a_bad_link_behaves_as_the_model(seed in any::<u64>(), steps in steps()) {
        walk(Linked::over_bad_link(seed), &steps);
    }

    #[test]
    fn unix_sockets_behave_as_the_model(steps in steps()) {
        walk(Linked::new("unix"), &steps);
    }
}

#[cfg(feature = "verbs")]
mod rdma {
    use super::*;

    proptest! {
        #![proptest_config(crate::cases(4))]

        #[test]
        #[ignore = "wants an RNIC"]
        fn rdma_behaves_as_the_model(steps in steps()) {
            walk(Linked::new("rdma"), &steps);
        }
    }
}

/// Apart from `rdma`, whose tests run on any RNIC.
#[cfg(feature = "verbs")]
mod odp {
    use super::*;

    proptest! {
        #![proptest_config(crate::cases(4))]

        #[test]
        #[ignore = "wants an RNIC with on-demand paging"]
        fn a_window_behaves_as_the_model(steps in steps()) {
            walk(Linked::windowed("rdma", WindowKind::Odp), &steps);
        }
    }
}
