//! Requests that take effect, but whose server dies before it answers, while other clients change or remove the file or name that the request is
//! about. The client that sends its request again must get the first answer, and the request must take effect once.
//!
//! A twin of each world shows the right answer: it has the same seed, so the same inodes, times and counters, and its server does not die.

mod world;

use cuttlefs_client::file::RemoteVolume;
use cuttlefs_client::file::volume::{FsError, OpenHow, Volume};
use cuttlefs_common::attr::{Attr, FileKind, SetAttr, Timestamp};
use cuttlefs_common::ids::{FileKey, InodeNo};
use cuttlefs_common::rdma::sim::{Cut, Translation};
use cuttlefs_common::rpc::{
    Allocate, NewNode, OpenBy, Payload, RenameMode, Reply, Request, Rights, XattrMode,
};
use cuttlefs_common::status::Status;
use cuttlefs_server::server::Server;
use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::pin::pin;
use std::rc::Rc;
use std::task::{Context, Poll, Waker};
use std::time::Duration;
use world::contents::{CALLER, pattern, read};
use world::{Death, World, WorldConfig};

const ROOT: InodeNo = InodeNo::ROOT;
const READ_WRITE: OpenHow = OpenHow::READ_WRITE;
const RIGHTS: Rights = Rights { read: true, write: true };
/// The length of `f`. It is durable before the request is sent.
const LEN: usize = 5_000;

/// The parts of an answer that are compared.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Told {
    Done,
    Attr(Attr),
    Opened(Attr),
    Written { offset: u64, len: u32, size: u64, change: u64 },
    Copied { len: u64, change: u64 },
}

impl Told {
    fn of(reply: &Reply<'_>) -> Self {
        match *reply {
            Reply::Done => Self::Done,
            Reply::Attr(attr) => Self::Attr(attr),
            Reply::Opened(opened) => Self::Opened(opened.attr),
            Reply::Written { offset, len, size, change } => Self::Written { offset, len, size, change },
            Reply::Copied { len, change } => Self::Copied { len, change },
            ref other => panic!("{other:?}"),
        }
    }

    /// The answer without what differs if another server runs the request.
    fn blurred(&self) -> Self {
        let time = Timestamp::default();
        let blurred = |attr: &Attr| {
            let (ino, change) = (InodeNo(0), 0);
            Attr { ino, change, atime: time, mtime: time, ctime: time, btime: time, ..*attr }
        };
        match self.clone() {
            Self::Done => Self::Done,
            Self::Attr(attr) => Self::Attr(blurred(&attr)),
            Self::Opened(attr) => Self::Opened(blurred(&attr)),
            Self::Written { offset, len, size, .. } => Self::Written { offset, len, size, change: 0 },
            Self::Copied { len, .. } => Self::Copied { len, change: 0 },
        }
    }
}

/// The files before the request: `f` of `LEN` bytes, `source` of 3,000 bytes, `g` with an attribute, and an empty directory `d`. The keys are those
/// of `f` and `source`, which are open.
struct Site {
    f: InodeNo,
    g: InodeNo,
    f_key: FileKey,
    source_key: FileKey,
}

fn open_key(volume: &RemoteVolume, ino: InodeNo) -> Result<FileKey, FsError> {
    let open = || Request::Open { ino, rights: RIGHTS, truncate: false, by: OpenBy::Number };
    volume.session().call(&CALLER, open, |reply| match reply {
        Reply::Opened(opened) => Ok(opened.filekey),
        other => panic!("{other:?}"),
    })
}

fn create(volume: &RemoteVolume, name: &[u8], bytes: &[u8]) -> InodeNo {
    let (attr, file) = volume.create(&CALLER, ROOT, name, 0o644, true, READ_WRITE).expect("create");
    if !bytes.is_empty() {
        assert_eq!(volume.write(&CALLER, file.handle, 0, bytes), Ok(bytes.len() as u32));
    }
    volume.release(file.handle);
    attr.ino
}

impl Site {
    fn make(volume: &RemoteVolume) -> Self {
        let f = create(volume, b"f", &pattern(LEN, 0));
        let source = create(volume, b"source", &pattern(3_000, 1));
        let g = create(volume, b"g", b"");
        volume.set_xattr(&CALLER, g, b"user.a", b"1", XattrMode::Create).expect("xattr");
        volume.make(&CALLER, ROOT, b"d", NewNode::Directory, 0o755).expect("make");
        volume.session().sync_all(&CALLER).expect("sync");
        let [f_key, source_key] = [f, source].map(|ino| open_key(volume, ino).expect("open"));
        Self { f, g, f_key, source_key }
    }
}

type Others = fn(&RemoteVolume, &Site);

/// A request, and what other clients do after it took effect.
struct Case {
    name: &'static str,
    /// The request changes contents: without durable answers the next server knows that it was done only after a write-back.
    is_of_contents: bool,
    /// `f` gets bytes that are not durable before the request.
    is_unsynced: bool,
    request: fn(&Site) -> Request<'static>,
    change: Others,
    remove: Others,
}

fn unlink(volume: &RemoteVolume, name: &[u8]) {
    volume.unlink(&CALLER, ROOT, name).expect("unlink");
}

fn unlink_f(volume: &RemoteVolume, _: &Site) {
    unlink(volume, b"f");
}

fn unlink_new(volume: &RemoteVolume, _: &Site) {
    unlink(volume, b"new");
}

fn chmod_new(volume: &RemoteVolume, _: &Site) {
    let ino = volume.lookup(&CALLER, ROOT, b"new").expect("lookup").ino;
    let set = SetAttr { mode: Some(0o600), ..SetAttr::default() };
    volume.set_attr(&CALLER, ino, set).expect("chmod");
}

/// Also writes beyond the end of `f`.
fn write_f(volume: &RemoteVolume, site: &Site) {
    let file = volume.open(&CALLER, site.f, READ_WRITE).expect("open");
    for offset in [20, 1_500, 15_000] {
        volume.write(&CALLER, file.handle, offset, b"other").expect("write");
    }
    volume.release(file.handle);
}

fn append_f(volume: &RemoteVolume, site: &Site) {
    let file = volume.open(&CALLER, site.f, OpenHow { append: true, ..READ_WRITE }).expect("open");
    volume.write(&CALLER, file.handle, 0, b"other").expect("write");
    volume.release(file.handle);
}

fn cut_f(volume: &RemoteVolume, site: &Site) {
    volume.set_attr(&CALLER, site.f, SetAttr { size: Some(10), ..SetAttr::default() }).expect("cut");
}

fn nothing(_: &RemoteVolume, _: &Site) {}

fn make_new(node: NewNode<'static>) -> Request<'static> {
    Request::Make { parent: ROOT, name: b"new", node, mode: 0o755 }
}

fn set_size(site: &Site, size: u64) -> Request<'static> {
    Request::SetAttr { ino: site.f, set: SetAttr { size: Some(size), ..SetAttr::default() } }
}

fn allocate(site: &Site, offset: u64, len: u64, how: Allocate) -> Request<'static> {
    Request::Allocate { filekey: site.f_key, offset, len, how }
}

fn cases() -> Vec<Case> {
    let case = |name, request, change, remove| Case {
        name,
        is_of_contents: false,
        is_unsynced: false,
        request,
        change,
        remove,
    };
    let contents =
        |name, request, change| Case { is_of_contents: true, ..case(name, request, change, unlink_f) };
    let unsynced =
        |name, request, change| Case { is_unsynced: true, ..case(name, request, change, unlink_f) };
    vec![
        case("file", |_| make_new(NewNode::File), chmod_new, unlink_new),
        case(
            "directory",
            |_| make_new(NewNode::Directory),
            |volume, _| {
                let ino = volume.lookup(&CALLER, ROOT, b"new").expect("lookup").ino;
                volume.make(&CALLER, ino, b"below", NewNode::Directory, 0o755).expect("make");
            },
            |volume, _| volume.rmdir(&CALLER, ROOT, b"new").expect("rmdir"),
        ),
        case("symlink", |_| make_new(NewNode::Symlink(b"target")), chmod_new, unlink_new),
        case("fifo", |_| make_new(NewNode::Special { kind: FileKind::Fifo, rdev: 0 }), chmod_new, unlink_new),
        case(
            "link",
            |site| Request::Link { ino: site.f, parent: ROOT, name: b"new" },
            chmod_new,
            |volume, _| [&b"f"[..], b"new"].into_iter().for_each(|name| unlink(volume, name)),
        ),
        case(
            "unlink",
            |_| Request::Unlink { parent: ROOT, name: b"f" },
            |volume, _| {
                create(volume, b"f", b"another");
            },
            nothing,
        ),
        case(
            "rmdir",
            |_| Request::Rmdir { parent: ROOT, name: b"d" },
            |volume, _| {
                volume.make(&CALLER, ROOT, b"d", NewNode::Directory, 0o700).expect("make");
            },
            nothing,
        ),
        case(
            "rename",
            |_| Request::Rename {
                parent: ROOT,
                name: b"f",
                new_parent: ROOT,
                new_name: b"new",
                mode: RenameMode::Replace,
            },
            |volume, _| {
                create(volume, b"f", b"another");
            },
            unlink_new,
        ),
        case(
            "chmod",
            |site| Request::SetAttr { ino: site.f, set: SetAttr { mode: Some(0o640), ..SetAttr::default() } },
            |volume, site| {
                let set = SetAttr { mode: Some(0o600), ..SetAttr::default() };
                volume.set_attr(&CALLER, site.f, set).expect("chmod");
            },
            unlink_f,
        ),
        case(
            "setxattr",
            |site| Request::SetXattr { ino: site.f, name: b"user.b", value: b"1", mode: XattrMode::Create },
            |volume, site| {
                volume.set_xattr(&CALLER, site.f, b"user.b", b"2", XattrMode::Replace).expect("xattr");
            },
            unlink_f,
        ),
        case(
            "removexattr",
            |site| Request::RemoveXattr { ino: site.g, name: b"user.a" },
            |volume, site| {
                volume.set_xattr(&CALLER, site.g, b"user.a", b"2", XattrMode::Create).expect("xattr");
            },
            |volume, _| unlink(volume, b"g"),
        ),
        case(
            "create",
            |_| Request::Create { parent: ROOT, name: b"new", mode: 0o444, exclusive: true, rights: RIGHTS },
            chmod_new,
            unlink_new,
        ),
        case(
            "create nameless",
            |_| Request::CreateNameless { parent: ROOT, mode: 0o600, rights: RIGHTS },
            nothing,
            nothing,
        ),
        case(
            "open and truncate",
            |site| Request::Open {
                ino: site.f,
                rights: RIGHTS,
                truncate: true,
                by: OpenBy::Name { told: 0 },
            },
            write_f,
            unlink_f,
        ),
        case("cut", |site| set_size(site, 100), write_f, unlink_f),
        case("grow", |site| set_size(site, 9_000), cut_f, unlink_f),
        unsynced("cut of what is not durable", |site| set_size(site, 5_500), append_f),
        unsynced("growth over what is not durable", |site| set_size(site, 9_000), cut_f),
        unsynced(
            "cut and chmod of what is not durable",
            |site| Request::SetAttr {
                ino: site.f,
                set: SetAttr { size: Some(5_500), mode: Some(0o640), ..SetAttr::default() },
            },
            append_f,
        ),
        contents(
            "write",
            |site| Request::Write {
                filekey: site.f_key,
                offset: 10,
                append: false,
                payload: Payload::Inline(&[7; 100]),
            },
            write_f,
        ),
        contents(
            "write over holes and the end",
            |site| Request::Write {
                filekey: site.f_key,
                offset: 4_000,
                append: false,
                payload: Payload::Inline(&[7; 12_000]),
            },
            write_f,
        ),
        contents(
            "append",
            |site| Request::Write {
                filekey: site.f_key,
                offset: 0,
                append: true,
                payload: Payload::Inline(b"once"),
            },
            append_f,
        ),
        contents(
            "copy",
            |site| Request::CopyRange {
                from: site.source_key,
                from_offset: 1_000,
                to: site.f_key,
                to_offset: 1_000,
                len: 5_000,
            },
            write_f,
        ),
        contents("reserve", |site| allocate(site, 0, 20_000, Allocate::Reserve { keep_size: false }), cut_f),
        contents("punch", |site| allocate(site, 0, 4_096, Allocate::PunchHole), write_f),
        contents("zero", |site| allocate(site, 15, 3_000, Allocate::ZeroRange { keep_size: true }), write_f),
    ]
}

/// The action of another client between the lost message and the repeated request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Meanwhile {
    Nothing,
    Changed,
    Removed,
}

/// The time of the other client's action.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum When {
    /// Before the client of the request is back at the next server.
    Ahead,
    /// When that client is back, and before it sends its request again.
    Behind,
}

/// Which message is lost, and how the server dies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Lost {
    cut: Cut,
    death: Death,
}

/// Everything in the root directory, by name: kind, mode, links, size, contents, attributes.
type Seen = BTreeMap<Vec<u8>, (FileKind, u16, u32, u64, Vec<u8>, Vec<u8>)>;

fn look(volume: &RemoteVolume) -> Seen {
    let mut names = Vec::new();
    let mut take = |entry: &cuttlefs_common::rpc::DirEntry<'_>| {
        names.push(entry.name.to_vec());
        true
    };
    volume.read_dir(&CALLER, ROOT, 0, false, &mut take).expect("list");
    let seen = |name: &Vec<u8>| {
        let attr = volume.lookup(&CALLER, ROOT, name).expect("lookup");
        let bytes = match attr.kind {
            FileKind::File => {
                let open = OpenHow { write: false, ..READ_WRITE };
                let file = volume.open(&CALLER, attr.ino, open).expect("open");
                let bytes = read(volume, file.handle, 0, 40_000).expect("read");
                volume.release(file.handle);
                bytes
            }
            FileKind::Symlink => volume.read_link(&CALLER, attr.ino).expect("read"),
            _ => Vec::new(),
        };
        let mut xattrs = volume.list_xattr(&CALLER, attr.ino).expect("xattrs");
        for name in xattrs.clone().split(|byte| *byte == 0).filter(|name| !name.is_empty()) {
            xattrs.extend(volume.get_xattr(&CALLER, attr.ino, name).expect("xattr"));
        }
        (attr.kind, attr.mode, attr.nlink, attr.size, bytes, xattrs)
    };
    names.iter().map(|name| (name.clone(), seen(name))).collect()
}

/// Sends the request. A filekey is valid for one life of a server, so for each repetition the files are opened anew.
fn ask(volume: &RemoteVolume, case: &Case, site: &Site) -> Result<(Told, Option<FileKey>), FsError> {
    let attempts = Cell::new(0);
    let build = || {
        attempts.set(attempts.get() + 1);
        let mut request = (case.request)(site);
        if attempts.get() > 1 && case.is_of_contents {
            let source = volume.lookup(&CALLER, ROOT, b"source").expect("lookup").ino;
            let again = |ino| open_key(volume, ino).unwrap_or(site.f_key);
            let (f, source) = (again(site.f), again(source));
            match &mut request {
                Request::Write { filekey, .. } | Request::Allocate { filekey, .. } => *filekey = f,
                Request::CopyRange { from, to, .. } => (*from, *to) = (source, f),
                other => panic!("{other:?}"),
            }
        }
        request
    };
    volume.session().call(&CALLER, build, |reply| {
        let key = match &reply {
            Reply::Opened(opened) => Some(opened.filekey),
            _ => None,
        };
        Ok((Told::of(&reply), key))
    })
}

/// Uses the opened file, to show that it is open. Gives a file without a name one.
fn use_opened(volume: &RemoteVolume, told: &Told, key: Option<FileKey>) {
    let (Told::Opened(attr), Some(filekey)) = (told, key) else { return };
    let write =
        || Request::Write { filekey, offset: 100, append: false, payload: Payload::Inline(b"through it") };
    volume.session().call(&CALLER, write, |_| Ok(())).expect("it is open");
    if attr.nlink == 0 {
        volume.link(&CALLER, attr.ino, ROOT, b"named").expect("link");
    }
    volume.session().call(&CALLER, || Request::Close { filekeys: vec![filekey] }, |_| Ok(())).expect("close");
}

fn others_do(case: &Case, meanwhile: Meanwhile) -> Others {
    match meanwhile {
        Meanwhile::Nothing => nothing,
        Meanwhile::Changed => case.change,
        Meanwhile::Removed => case.remove,
    }
}

/// Returns the answer of the request, and the files in the end. Without `lost` the server does not die.
fn run(
    config: WorldConfig,
    case: &Case,
    meanwhile: Meanwhile,
    lost: Option<(Lost, When)>,
) -> Result<(Told, Seen), FsError> {
    let world = World::new(config);
    let one = world.client();
    let client = world.with_server(|server| server.server().sessions.list()[0].client());
    let other = Rc::new(world.client());
    let site = Rc::new(Site::make(&one));
    if case.is_unsynced {
        let file = one.open(&CALLER, site.f, READ_WRITE).expect("open");
        one.write(&CALLER, file.handle, LEN as u64, &pattern(1_000, 2)).expect("write");
    }
    let first = world.with_server(|server| server.server().about.epoch);
    let others = {
        let (other, site, act) = (other.clone(), site.clone(), others_do(case, meanwhile));
        move || act(&other, &site)
    };
    let others = RefCell::new(Some(others));
    if let Some((Lost { cut, death }, when)) = lost {
        let others = others.take().expect("once");
        match when {
            When::Ahead => world.behind_death(others),
            When::Behind => {
                let is_back = move |server: &Server| {
                    let is_here = server.sessions.of(client).is_some();
                    server.about.epoch != first && is_here && server.sessions.has_recovered(client)
                };
                world.meanwhile(is_back, move |_: &dyn Fn(Duration)| {
                    others();
                    None
                });
            }
        }
        world.kill_at(cut, death);
    }
    let (told, key) = ask(&one, case, &site)?;
    if lost.is_some() {
        assert!(world.has_died() && world.has_acted() && !world.network().cut_is_pending());
    }
    if let Some(others) = others.take() {
        others();
    }
    use_opened(&one, &told, key);
    Ok((told, look(&other)))
}

fn configs(durable_answers: bool) -> [WorldConfig; 2] {
    [(Translation::Target, false), (Translation::Initiator, true)].map(|(translation, deferred)| {
        WorldConfig { deferred, durable_answers, ..WorldConfig::new(3, translation, 1024, 64) }
    })
}

/// Runs each case with everything that another client may do, for all deaths after which the next server knows that the request was done.
fn done_and_not_answered(durable_answers: bool) {
    for config in configs(durable_answers) {
        for case in cases() {
            for meanwhile in [Meanwhile::Nothing, Meanwhile::Changed, Meanwhile::Removed] {
                let twin = run(config, &case, meanwhile, None).expect("nobody dies");
                let power = durable_answers.then_some(Death::PowerLost);
                for death in [Death::Sudden, Death::WrittenBack].into_iter().chain(power) {
                    for when in [When::Ahead, When::Behind] {
                        let is_sudden = !durable_answers && death == Death::Sudden;
                        // The client has unsynced bytes of the file; another client that goes ahead finds the file without them.
                        let is_ahead = when == When::Ahead && meanwhile != Meanwhile::Nothing;
                        if is_sudden && (case.is_of_contents || case.is_unsynced && is_ahead) {
                            continue;
                        }
                        let lost = Lost { cut: Cut::Reply, death };
                        let what = format!("{}: {meanwhile:?} {when:?}, {lost:?}", case.name);
                        let (told, seen) = run(config, &case, meanwhile, Some((lost, when)))
                            .unwrap_or_else(|error| panic!("{what}: {error}"));
                        assert_eq!(told, twin.0, "{what}");
                        assert!(seen == twin.1, "{what}: {seen:?}\n{:?}", twin.1);
                    }
                }
            }
        }
    }
}

#[test]
fn what_was_done_is_answered_as_it_was() {
    done_and_not_answered(false);
}

#[test]
fn what_was_done_and_is_durable_is_answered_as_it_was() {
    done_and_not_answered(true);
}

/// If the request did not take effect, it does when it is sent again, and the answer is not that of an earlier request.
#[test]
fn what_was_not_done_is_done() {
    for durable_answers in [false, true] {
        for config in configs(durable_answers) {
            for case in cases() {
                let twin = run(config, &case, Meanwhile::Nothing, None).expect("nobody dies");
                let mut losses = vec![Lost { cut: Cut::Request, death: Death::Sudden }];
                if case.is_of_contents {
                    losses.push(Lost { cut: Cut::Reply, death: Death::Sudden });
                }
                for lost in losses {
                    let what = format!("{}: {lost:?}", case.name);
                    let (told, seen) = run(config, &case, Meanwhile::Nothing, Some((lost, When::Ahead)))
                        .unwrap_or_else(|error| panic!("{what}: {error}"));
                    assert_eq!(told.blurred(), twin.0.blurred(), "{what}");
                    assert!(seen == twin.1, "{what}: {seen:?}\n{:?}", twin.1);
                }
            }
        }
    }
}

/// A refused request leaves no record, and is refused again.
#[test]
fn what_was_refused_is_refused() {
    for config in configs(true) {
        let case = Case { name: "exists", request: |_| make_refused(), ..cases().remove(0) };
        let lost = Lost { cut: Cut::Reply, death: Death::Sudden };
        let told = run(config, &case, Meanwhile::Nothing, Some((lost, When::Ahead)));
        assert_eq!(told.map(|(told, _)| told), Err(FsError::Server(Status::Exists)));
    }
}

fn make_refused() -> Request<'static> {
    Request::Make { parent: ROOT, name: b"d", node: NewNode::Directory, mode: 0o755 }
}

/// A session ends while its last answer is on the way, and another request of the same client begins a new session before the client looks at that
/// answer. Files that the old session had open are closed; a file that the new session opens is open once.
#[test]
fn an_answer_that_comes_late_opens_nothing_of_a_session_that_is_over() {
    for config in configs(false) {
        let world = Rc::new(World::new(config));
        let one = Rc::new(world.client());
        let free = one.stat_fs(&CALLER).expect("statfs");
        let (site, calls) = (world.clone(), one.clone());
        let late = move |_: &dyn Fn(Duration)| {
            // As at the end of a lease: the session ends, and its connections stand.
            site.with_server(|server| {
                let session = server.server().sessions.list().remove(0);
                server.server().sessions.end(&session);
                let revoked = pin!(server.server().revoke(&session));
                let waits_for = &mut Context::from_waker(Waker::noop());
                assert_eq!(revoked.poll(waits_for), Poll::Ready(()));
            });
            calls.session().call(&CALLER, || Request::Heartbeat, |_| Ok(())).expect("heartbeat");
            None
        };
        world.meanwhile(|server| server.meta.lookup(ROOT, b"new").is_ok(), late);
        let made = one.create(&CALLER, ROOT, b"new", 0o644, true, READ_WRITE);
        let (_, file) = made.expect("it is made");
        assert!(world.has_acted());
        assert_eq!(one.write(&CALLER, file.handle, 0, b"bytes"), Ok(5));
        assert_eq!(world.with_server(|server| server.server().files.figures().filekeys), 1);
        one.release(file.handle);
        unlink(&one, b"new");
        assert_eq!(one.stat_fs(&CALLER), Ok(free));
    }
}
