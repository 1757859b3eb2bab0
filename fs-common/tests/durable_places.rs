//! Places for connections at a durable receiver: only clients that its service admits get one, and only clients that say hello keep it.

use cuttlefs_common::breach::Breach;
use cuttlefs_common::ids::ClientId;
use cuttlefs_common::persist::LogDeviceKind;
use cuttlefs_common::rdma::soft::{SoftDevice, SoftOptions};
use cuttlefs_common::rdma::{
    ConnectOptions, Device as _, Endpoint, LinkKind, PeerIdentity, QpConfig, QpState,
};
use cuttlefs_common::rpc::durable::{
    CONNECTIONS_MAX, CONNECTIONS_OF_PEER, Kind, Receiver, ReceiverOptions, Request, RingStore, Sender,
    SenderError, Service, Settings, Wants,
};
use std::sync::Arc;
use std::time::{Duration, Instant};

const CLIENT: ClientId = ClientId(0xbeef);
const PATIENCE: Duration = Duration::from_secs(30);

/// A service that admits one client, and answers every request with 7.
struct Choosy;

impl Service for Choosy {
    fn lane(&self, _: &[u8]) -> u64 {
        0
    }

    fn execute(&self, _: &Request<'_>, _: &mut Vec<u8>) -> u32 {
        7
    }

    fn admit(&self, client: ClientId, _: &PeerIdentity) -> Result<(), Breach> {
        if client == CLIENT { Ok(()) } else { Err(Breach::of("nobody knows it")) }
    }
}

struct Site {
    receiver: Receiver,
    _device: Arc<SoftDevice>,
    _dir: tempfile::TempDir,
}

impl Site {
    fn new(link: LinkKind) -> Self {
        let dir = tempfile::Builder::new().prefix("choosy").tempdir_in("/var/tmp").expect("dir");
        let endpoint = match link {
            LinkKind::Shm => Endpoint::Shm(dir.path().join("shm")),
            _ => Endpoint::Tcp { host: "127.0.0.1".into(), port: 0 },
        };
        let device = SoftDevice::new(SoftOptions::default());
        let rings =
            RingStore::new(&dir.path().join("rings"), Some(LogDeviceKind::PmemEmulated)).expect("store");
        let options = ReceiverOptions::default();
        let receiver =
            Receiver::start(&*device, &endpoint, rings, Arc::new(Choosy), options).expect("started");
        Self { receiver, _device: device, _dir: dir }
    }

    fn connect(&self, client: ClientId, kind: Kind) -> Result<Sender, SenderError> {
        let settings = Settings { depth: 64, answers: 64, ..Settings::new(kind, 1000, 1000) };
        Sender::connect(SoftDevice::new(SoftOptions::default()), &self.receiver.endpoint(), client, settings)
    }
}

fn is_served(sender: &mut Sender) -> bool {
    let ticket = sender.post(b"one", Wants::Answer).expect("posted");
    matches!(sender.wait_answer(ticket, &mut Vec::new()), Ok(7))
}

fn wait_until(what: &str, mut is_so: impl FnMut() -> bool) {
    let begun = Instant::now();
    while !is_so() {
        assert!(begun.elapsed() < PATIENCE, "{what}");
        std::thread::sleep(Duration::from_millis(5));
    }
}

#[test]
fn strangers_are_turned_away_and_harm_nobody() {
    for link in [LinkKind::Shm, LinkKind::Tcp] {
        let site = Site::new(link);
        for kind in Kind::ALL {
            let mut sender = site.connect(CLIENT, kind).expect("connected");
            assert!(matches!(site.connect(ClientId(1), kind).err(), Some(SenderError::Refused)));
            assert!(is_served(&mut sender), "{kind:?}");
        }
    }
}

/// Peers take all places by connecting, and never say hello: the receiver closes them, and a client that says hello gets a place.
#[test]
fn who_says_nothing_keeps_no_place() {
    for link in [LinkKind::Shm, LinkKind::Tcp] {
        let site = Site::new(link);
        let device = SoftDevice::new(SoftOptions::default());
        let (pd, cq) = (device.alloc_pd().expect("a domain"), device.create_cq(4096).expect("a queue"));
        let connect = || {
            let qp = QpConfig::new(&cq, 4, 4);
            let options = ConnectOptions { qp, receives: Vec::new(), timeout: PATIENCE };
            pd.connect(&site.receiver.endpoint(), options).map(|connected| connected.qp)
        };
        let mut mute = Vec::new();
        // Enough attempts even if the receiver closes some of the connections meanwhile.
        while mute.len() < 4 * CONNECTIONS_MAX
            && let Ok(qp) = connect()
        {
            mute.push(qp);
        }
        assert!(mute.len() >= CONNECTIONS_OF_PEER, "{} places", mute.len());
        let mut sender = None;
        wait_until("a place for who speaks", || {
            sender = site.connect(CLIENT, Kind::WFlush).ok();
            sender.is_some()
        });
        wait_until("those who say nothing are closed", || {
            site.receiver.figures().silent == mute.len() as u64
        });
        wait_until("they see it", || {
            // Over shared memory an end that never polls does not learn that the other end has closed.
            cq.poll(&mut Vec::new(), 64);
            mute.iter().all(|qp| qp.state() != QpState::ReadyToSend)
        });
        assert!(is_served(&mut sender.expect("connected")), "who spoke stays");
    }
}
