//! Clients whose rights the server checks have no rings: what is in a ring is executed by number, without a look at rights.

use super::client::Client;
use super::server::Site;
use cuttlefs_common::persist::LogDeviceKind;
use cuttlefs_common::rdma::LinkKind;
use rustix::fs::{Gid, Uid};

const NOBODY: u32 = 65_534;

#[test]
fn who_is_one_user_among_others_gets_no_ring() {
    if !rustix::process::geteuid().is_root() {
        eprintln!("skipped: only root can be somebody else");
        return;
    }
    let site = Site::new(LinkKind::Unix, LogDeviceKind::PmemEmulated);
    let place = site.pool().parent().expect("it lies in one").to_owned();
    rustix::fs::chmod(&place, 0o711.into()).expect("for everybody");
    let running = site.start();
    let trusted = Client::new(&running.endpoint);
    let offer = trusted.offer.expect("root may do everything");
    let door = offer.door.endpoint(&running.endpoint).expect("beside it");
    if let cuttlefs_common::rdma::Endpoint::Unix(path) = &door {
        rustix::fs::chmod(path, 0o666.into()).expect("for everybody");
    }
    let endpoint = running.endpoint.clone();
    let other = std::thread::spawn(move || {
        rustix::thread::set_thread_groups(&[]).expect("groups");
        let gid = Gid::from_raw(NOBODY);
        rustix::thread::set_thread_res_gid(gid, gid, gid).expect("group");
        let uid = Uid::from_raw(NOBODY);
        rustix::thread::set_thread_res_uid(uid, uid, uid).expect("user");
        let mut checked = Client::new(&endpoint);
        assert!(checked.offer.is_none(), "nothing is offered");
        // It asks all the same.
        checked.offer = Some(offer);
        assert!(checked.ring(0, 0).is_err(), "it is not welcomed");
    });
    other.join().expect("it was refused");
    trusted.ring(0, 0).expect("it may still have one");
    running.stop();
}
