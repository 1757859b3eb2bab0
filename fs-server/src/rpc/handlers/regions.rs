//! Requests about file regions: ranges that are bound for others, and write grants (docs/file-regions.md).

use super::files::check_marks;
use super::{Body, Call, body, done, grace};
use crate::files::{self, Grantee, RegionFacts};
use crate::shares::{Resource, Taken};
use cuttlefs_common::attr::FileKind;
use cuttlefs_common::ids::{FileKey, InodeNo, PAGE_SIZE_U64};
use cuttlefs_common::rpc::{OpenTicket, Opened, RegionKey, Reply, Rights};
use cuttlefs_common::status::Status;

impl Call<'_> {
    fn take(&self, resource: Resource) -> Result<Taken, Status> {
        self.connection.peer().take(resource).map_err(|full| {
            tracing::debug!(%full, "a region is refused");
            Status::Busy
        })
    }

    fn bind_key(&self, filekey: FileKey, key: &RegionKey, ino: InodeNo) -> Result<Body, Status> {
        let facts = RegionFacts { ino, root: self.grant.root };
        let place = self.take(Resource::Regions)?;
        let files = &self.context.server.files;
        files.bind_region(self.session.number(), filekey, key, facts, Some(place))?;
        body(&Reply::Bound(*key))
    }

    /// The inode of a filekey of a whole file.
    fn whole_file(&self, filekey: FileKey) -> Result<InodeNo, Status> {
        let (file, _) = self.context.server.files.resolve(self.session.number(), filekey)?;
        if file.is_directory() { Err(Status::IsDirectory) } else { Ok(file.ino()) }
    }
}

pub(super) fn bind(
    call: &Call<'_>,
    filekey: FileKey,
    (offset, len): (u64, u64),
    rights: Rights,
    lifetime_ms: u64,
) -> Result<Body, Status> {
    let server = &call.context.server;
    let ino = call.whole_file(filekey)?;
    let (number, now_ms) = server.files.new_region();
    let expiry_ms = (lifetime_ms > 0).then(|| now_ms.saturating_add(lifetime_ms));
    let client = call.session.client();
    let unsigned = RegionKey { pool: [0; 16], client, number, offset, len, rights, expiry_ms, mac: [0; 16] };
    call.bind_key(filekey, &server.admission.region_macs.sign(unsigned, ino), ino)
}

/// Binds a range again that this client had bound when the server before was killed. What was opened by an earlier attempt ends.
pub(super) async fn bind_again(call: &Call<'_>, filekey: FileKey, key: &RegionKey) -> Result<Body, Status> {
    let server = &call.context.server;
    let ino = call.whole_file(filekey)?;
    if key.client != call.session.client() || !server.admission.region_macs.is_good(key, ino) {
        return Err(Status::Denied);
    }
    let is_over = key.expiry_ms.is_some_and(|expiry_ms| server.files.new_region().1 >= expiry_ms);
    if is_over || !server.sessions.may_reclaim(key.client) {
        return Err(Status::Stale);
    }
    server.closed_all(server.files.unbind_region(key.client, key.number)).await;
    call.bind_key(filekey, key, ino)
}

pub(super) async fn unbind(call: &Call<'_>, number: u64) -> Result<Body, Status> {
    let server = &call.context.server;
    server.closed_all(server.files.unbind_region(call.session.client(), number)).await;
    done()
}

/// Opens the range of a key. A key narrows what its holder may do and never widens it: a session that the server checks needs the permissions of an
/// open as well, and a session that sees one directory can open what another session of that directory has bound.
pub(super) async fn open(call: &Call<'_>, key: &RegionKey) -> Result<Body, Status> {
    let server = &call.context.server;
    grace::bound(call, key).await?;
    let RegionFacts { ino, root } = server.files.region(key)?;
    let sees_it = call.grant.root == InodeNo::ROOT || call.grant.root == root;
    if !sees_it || !server.admission.region_macs.is_good(key, ino) {
        return Err(Status::Denied);
    }
    let attr = server.meta.attr(ino)?;
    if attr.kind != FileKind::File {
        return Err(Status::Invalid);
    }
    call.judge().check_rights(&attr, key.rights)?;
    check_marks(&attr, key.rights, false)?;
    server.files.check_contents(ino)?;
    let place = call.take(Resource::Filekeys)?;
    let opened = server.files.open_region(call.session.number(), key, Some(place))?;
    // No ticket: what a key opened is not reclaimed, but opened again by the key.
    let opened = Opened { filekey: opened.filekey, slot: opened.slot, attr, ticket: OpenTicket(0) };
    body(&Reply::Opened(call.load(opened, key.rights).await?))
}

pub(super) async fn grant(
    call: &Call<'_>,
    filekey: FileKey,
    (offset, len): (u64, u64),
) -> Result<Body, Status> {
    let server = &call.context.server;
    let keyed = call.keyed_to_write(filekey)?;
    let end = offset.saturating_add(len);
    if keyed.file.is_directory() || !keyed.holds(offset, end) {
        return Err(Status::Denied);
    }
    // Space is taken and not more than that: whoever may append may have it.
    call.check_marks(&keyed.file, true)?;
    call.take_privileges(keyed.file.ino())?;
    let pages = end.div_ceil(PAGE_SIZE_U64) - offset / PAGE_SIZE_U64;
    let pages = server.files.take_grant_pages(call.connection.peer(), pages)?;
    let grantee = Grantee { owner: call.session.number(), filekey };
    let disk = call.context.disk.as_ref();
    let granted = files::grant_write(&server.files, disk, &keyed.file, grantee, (offset, len), pages);
    body(&Reply::Attr(granted.await?))
}

pub(super) async fn return_grant(
    call: &Call<'_>,
    filekey: FileKey,
    (offset, len): (u64, u64),
) -> Result<Body, Status> {
    let keyed = call.keyed_to_write(filekey)?;
    files::return_grant(&keyed.file, filekey, offset, len).await;
    done()
}
