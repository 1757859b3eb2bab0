//! Open files stay open with their rights over restarts of the server, and nobody gets a file that he had not opened.

use super::cuttle::{Cuttle, Site, errno};
use super::hostile::RawPeer;
use super::is_root;
use super::people::{self, Person};
use cuttlefs_client::file::volume::{Handle, OpenHow, Volume};
use cuttlefs_common::attr::SetAttr;
use cuttlefs_common::rpc::{OpenBy, OpenTicket, Opened, Reclaim, Reply, Request, Rights, SessionSecret};
use cuttlefs_common::status::Status;
use cuttlefs_server::rights::ExportRule;

const READ_WRITE: OpenHow = OpenHow::READ_WRITE;

fn read(cuttle: &Cuttle, handle: Handle) -> Result<Vec<u8>, i32> {
    let mut bytes = Vec::new();
    cuttle.volume.read(&cuttle.caller(), handle, 0, 16, &mut |read| bytes = read.to_vec()).map_err(errno)?;
    Ok(bytes)
}

fn set(by: &Cuttle, path: &str, set: SetAttr) {
    let ino = by.walk(path).expect("it is there").ino;
    by.volume.set_attr(&by.caller(), ino, set).expect("root may");
}

#[test]
fn a_handle_keeps_its_rights_whatever_becomes_of_the_file_and_the_server() {
    if !is_root() {
        return;
    }
    let mut site = Site::new(vec![ExportRule::default()]);
    let (root, owner) = (Person::new(people::ROOT), Person::new(people::OWNER));
    let by_root = site.volume(&root);
    root.does(|| set(&by_root, "", SetAttr { mode: Some(0o777), ..SetAttr::default() }));
    let by_owner = site.volume(&owner);
    let handle = owner.does(|| {
        let caller = by_owner.caller();
        let (_, opened) = by_owner
            .volume
            .create(&caller, by_owner.volume.root(), b"f", 0o600, true, READ_WRITE)
            .expect("anybody may");
        by_owner.volume.write(&caller, opened.handle, 0, b"first").expect("it is open");
        opened.handle
    });
    root.does(|| {
        set(&by_root, "f", SetAttr { uid: Some(0), gid: Some(0), ..SetAttr::default() });
        set(&by_root, "f", SetAttr { mode: Some(0), ..SetAttr::default() });
    });
    site.restart(None);
    owner.does(|| {
        let caller = by_owner.caller();
        assert_eq!(read(&by_owner, handle), Ok(b"first".to_vec()));
        by_owner.volume.write(&caller, handle, 0, b"again").expect("it is open");
        let ino = by_owner.walk("f").expect("the directory may be searched").ino;
        let cut = SetAttr { size: Some(2), ..SetAttr::default() };
        by_owner.volume.set_attr(&caller, ino, cut).expect("it is open for writing");
        assert_eq!(read(&by_owner, handle), Ok(b"ag".to_vec()));
        let anew = by_owner.volume.open(&caller, ino, READ_WRITE).map(|_| ()).map_err(errno);
        assert_eq!(anew, Err(libc::EACCES));
        by_owner.volume.release(handle);
    });
}

/// A client claims at a new server to have had files open: only files that it did have open are reclaimed.
#[test]
fn only_what_was_open_is_reclaimed() {
    if !is_root() {
        return;
    }
    let mut site = Site::new(vec![ExportRule::default()]);
    let (root, owner) = (Person::new(people::ROOT), Person::new(people::OWNER));
    let by_root = site.volume(&root);
    root.does(|| {
        let caller = by_root.caller();
        let top = by_root.volume.root();
        for (name, mode) in [(&b"secret"[..], 0o600), (b"shown", 0o644)] {
            by_root.volume.create(&caller, top, name, mode, true, READ_WRITE).expect("root may");
        }
    });
    let (read_only, read_write) = (Rights { read: true, write: false }, Rights { read: true, write: true });
    let endpoint = site.endpoint();
    let id = SessionSecret([77; 16]);
    let lookup = |peer: &mut RawPeer, name: &'static [u8]| {
        peer.attr(&Request::Lookup { parent: peer.root, name }).expect("searchable").ino
    };
    let opened = |reply: Reply<'_>| match reply {
        Reply::Opened(opened) => opened,
        other => panic!("{other:?}"),
    };
    let (secret, shown): (_, Opened) = owner.does(|| {
        let mut peer = RawPeer::attach(&endpoint, id).expect("attached");
        let (secret, shown) = (lookup(&mut peer, b"secret"), lookup(&mut peer, b"shown"));
        let open = |ino, rights| Request::Open { ino, rights, truncate: false, by: OpenBy::Name { told: 0 } };
        assert_eq!(peer.call(&open(secret, read_only), opened), Err(Status::Denied));
        (secret, peer.call(&open(shown, read_only), opened).expect("everybody may read it"))
    });
    // From now on only root may read it.
    root.does(|| set(&by_root, "shown", SetAttr { mode: Some(0o600), ..SetAttr::default() }));
    site.restart(None);
    let shown_ino = shown.attr.ino;
    let mut used = 0;
    let mut reclaim = |id, ino, rights, ticket| {
        used += 1;
        owner.does(|| {
            let mut peer = RawPeer::attach(&endpoint, id).expect("attached");
            // A number that was used before would get the answer of before.
            peer.seq = used;
            let files = vec![Reclaim { ino, rights, ticket }];
            peer.call(&Request::Reclaim { files }, |reply| match reply {
                Reply::Reclaimed(files) => files[0].is_some(),
                other => panic!("{other:?}"),
            })
            .expect("answered")
        })
    };
    let good = Some(shown.ticket);
    assert!(reclaim(id, shown_ino, read_only, good), "it was open");
    assert!(!reclaim(id, shown_ino, read_only, None), "without a ticket it is opened anew, and may not be");
    assert!(!reclaim(id, shown_ino, read_write, good), "it was not open for writing");
    assert!(!reclaim(id, secret, read_only, good), "another file");
    for guess in [0, 1, shown.ticket.0 ^ 1, shown.ticket.0.swap_bytes()] {
        assert!(!reclaim(id, secret, read_only, Some(OpenTicket(guess))));
    }
    // This comes last, because request numbers count for each client.
    assert!(!reclaim(SessionSecret([78; 16]), shown_ino, read_only, good), "another client's");
}

/// A user's inode number is of no use to another user, even for a file that he may open. A read-only export gives no handle for writing.
#[test]
fn a_number_is_of_use_to_its_own_user_and_a_read_only_export_gives_no_handle_to_write() {
    if !is_root() {
        return;
    }
    let mut site = Site::new(vec![ExportRule::default()]);
    let (root, owner) = (Person::new(people::ROOT), Person::new(people::OWNER));
    let stranger = Person::new(people::STRANGER);
    let by_root = site.volume(&root);
    root.does(|| {
        let top = by_root.volume.root();
        by_root.volume.create(&by_root.caller(), top, b"f", 0o666, true, READ_WRITE).expect("root may");
        set(&by_root, "f", SetAttr { mode: Some(0o6777), ..SetAttr::default() });
    });
    let endpoint = site.endpoint();
    let number = |person: &Person, id| {
        person.does(|| {
            let mut peer = RawPeer::attach(&endpoint, SessionSecret([id; 16])).expect("attached");
            peer.attr(&Request::Lookup { parent: peer.root, name: b"f" }).expect("searchable").ino
        })
    };
    let told = number(&owner, 1);
    assert_eq!(told, number(&owner, 2), "they stay");
    let (read_only, read_write) = (Rights { read: true, write: false }, Rights { read: true, write: true });
    stranger.does(|| {
        let mut peer = RawPeer::attach(&endpoint, SessionSecret([3; 16])).expect("attached");
        let own = peer.attr(&Request::Lookup { parent: peer.root, name: b"f" }).expect("searchable").ino;
        assert_ne!(own, told);
        assert_eq!(peer.attr(&Request::GetAttr { ino: told }).map(|_| ()), Err(Status::Stale));
        let open =
            |ino, truncate| Request::Open { ino, rights: read_write, truncate, by: OpenBy::Name { told: 0 } };
        assert_eq!(peer.call(&open(told, false), |_| ()), Err(Status::Stale));
        // Truncating a file, even an empty one, takes its set-id bits.
        assert_eq!(peer.call(&open(own, true), |_| ()), Ok(()));
        assert_eq!(peer.attr(&Request::GetAttr { ino: own }).expect("it is there").mode, 0o777);
    });
    site.restart(Some(vec![ExportRule { read_only: true, ..ExportRule::default() }]));
    owner.does(|| {
        let mut peer = RawPeer::attach(&endpoint, SessionSecret([4; 16])).expect("attached");
        for (rights, is_given) in [(read_write, false), (read_only, true)] {
            let files = vec![Reclaim { ino: told, rights, ticket: None }];
            let given = peer.call(&Request::Reclaim { files }, |reply| match reply {
                Reply::Reclaimed(files) => files[0].is_some(),
                other => panic!("{other:?}"),
            });
            assert_eq!(given, Ok(is_given));
        }
    });
}

/// The next server answers a request that the one before did with a new answer. A different request under the same number must be checked for its own
/// rights.
#[test]
fn a_number_of_another_request_opens_nothing() {
    if !is_root() {
        return;
    }
    let mut site = Site::new(vec![ExportRule::default()]);
    let (root, owner) = (Person::new(people::ROOT), Person::new(people::OWNER));
    let by_root = site.volume(&root);
    root.does(|| {
        let top = by_root.volume.root();
        by_root.volume.create(&by_root.caller(), top, b"f", 0o622, true, READ_WRITE).expect("root may");
    });
    let (endpoint, id) = (site.endpoint(), SessionSecret([99; 16]));
    let rights = Rights { read: true, write: false };
    let used = owner.does(|| {
        let mut peer = RawPeer::attach(&endpoint, id).expect("attached");
        let ino = peer.attr(&Request::Lookup { parent: peer.root, name: b"f" }).expect("searchable").ino;
        let denied =
            peer.call(&Request::Open { ino, rights, truncate: false, by: OpenBy::Name { told: 0 } }, |_| ());
        assert_eq!(denied, Err(Status::Denied), "it may be written and not read");
        let set = SetAttr { size: Some(0), ..SetAttr::default() };
        peer.attr(&Request::SetAttr { ino, set }).expect("it may be written");
        peer.seq
    });
    site.restart(None);
    owner.does(|| {
        let mut peer = RawPeer::attach(&endpoint, id).expect("attached");
        peer.seq = used - 1;
        let parent = peer.root;
        let create = Request::Create { parent, name: b"x", mode: 0o600, exclusive: true, rights };
        assert_eq!(peer.call(&create, |_| ()), Err(Status::Denied));
    });
}
