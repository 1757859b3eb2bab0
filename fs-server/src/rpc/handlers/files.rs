//! Requests about open files: filekeys begin and end here.

use super::{Body, Call, PIECES_A_TURN, body, done};
use crate::files::{self, KeyedFile};
use crate::meta::Operation;
use crate::pages::policy::Exposure;
use crate::shares::Resource;
use cuttlefs_common::attr::{Attr, FileKind, InodeFlags, SetAttr};
use cuttlefs_common::ids::{FileKey, FilePage, InodeNo, PAGE_SIZE_U64, PoolPage};
use cuttlefs_common::region::Extent;
use cuttlefs_common::rpc::{OpenBy, Opened, Reply, Rights, Space};
use cuttlefs_common::status::Status;

/// Most extents in one layout reply: as many as fit a message with the largest varints.
const MAX_LAYOUT_EXTENTS: usize = 2048;

/// Checks that a file's chattr marks allow an open; they bind every user. Writes to an append-only file are checked one by one to be at its end.
pub(super) fn check_marks(attr: &Attr, rights: Rights, truncate: bool) -> Result<(), Status> {
    let changes = rights.write || truncate;
    let forbidden = (changes && attr.flags.has(InodeFlags::IMMUTABLE))
        || (truncate && attr.flags.has(InodeFlags::APPEND_ONLY));
    if forbidden { Err(Status::NotPermitted) } else { Ok(()) }
}

impl Call<'_> {
    /// Makes a filekey; `attr` has the file's attributes as of now. The filekey may be used after `load`.
    pub(super) fn bind(&self, attr: &Attr, rights: Rights) -> Result<Opened, Status> {
        match attr.kind {
            FileKind::File => {}
            // Opened to keep the directory in existence, and for nothing else.
            FileKind::Directory if rights == Rights::default() => {}
            FileKind::Directory => return Err(Status::IsDirectory),
            _ => return Err(Status::Invalid),
        }
        let server = &self.context.server;
        let place = self.connection.peer().take(Resource::Filekeys).map_err(|full| {
            tracing::debug!(%full, "an open is refused");
            Status::Busy
        })?;
        let opened = server.files.open_with(self.session.number(), attr.ino, rights, Some(place))?;
        let ticket = server.admission.tickets.issue(self.session.client(), attr.ino, rights);
        Ok(Opened { filekey: opened.filekey, slot: opened.slot, attr: *attr, ticket })
    }

    /// Reads a file into memory that was just opened for reading, if the policy wants all of it there. Closes it if that fails, or its session has
    /// ended.
    pub(super) async fn load(&self, opened: Opened, rights: Rights) -> Result<Opened, Status> {
        let server = &self.context.server;
        // The end of a session closes its filekeys, and may have missed this one, which was made meanwhile.
        if self.session.is_ended() {
            server.close(self.session.number(), &[opened.filekey]).await;
            return Err(Status::SessionExpired);
        }
        if server.files.pages().policy().exposure != Exposure::Pinned || !rights.read {
            return Ok(opened);
        }
        let loaded = match server.files.keyed(self.session.number(), opened.filekey) {
            Ok(keyed) => files::load(&server.files, self.context.disk.as_ref(), &keyed.file).await,
            Err(status) => Err(status),
        };
        if let Err(status) = loaded {
            server.close(self.session.number(), &[opened.filekey]).await;
            return Err(status);
        }
        Ok(opened)
    }
}

pub(super) async fn create(
    call: &Call<'_>,
    parent: InodeNo,
    name: &[u8],
    mode: u16,
    exclusive: bool,
    rights: Rights,
) -> Result<Body, Status> {
    let server = &call.context.server;
    let outcome = call.execute(&Operation::Create { parent, name, mode, exclusive })?;
    let attr = outcome.attr.ok_or(Status::Io)?;
    if !outcome.created {
        call.judge().check_rights(&attr, rights)?;
        check_marks(&attr, rights, false)?;
        server.files.check_contents(attr.ino)?;
    }
    body(&Reply::Opened(call.load(call.bind(&attr, rights)?, rights).await?))
}

pub(super) async fn create_nameless(
    call: &Call<'_>,
    parent: InodeNo,
    mode: u16,
    rights: Rights,
) -> Result<Body, Status> {
    let server = &call.context.server;
    let (ino, opened) = {
        let _not_looked_for = server.opens_nameless.read();
        let attr = call.execute(&Operation::CreateNameless { parent, mode })?.attr.ok_or(Status::Io)?;
        (attr.ino, call.bind(&attr, rights))
    };
    match opened {
        Ok(opened) => body(&Reply::Opened(call.load(opened, rights).await?)),
        Err(status) => {
            server.reap(ino).await;
            Err(status)
        }
    }
}

pub(super) async fn open(
    call: &Call<'_>,
    ino: InodeNo,
    rights: Rights,
    truncate: bool,
    by: OpenBy,
) -> Result<Body, Status> {
    let server = &call.context.server;
    let attr = server.meta.attr(ino)?;
    if let OpenBy::Name { told } = by
        && (attr.nlink == 0 || told != 0 && server.meta.has_lost_a_name(ino, told)?)
    {
        return Err(Status::Stale);
    }
    check_marks(&attr, rights, truncate)?;
    // The check also keeps a client from serving the file out of its cache.
    server.files.check_contents(ino)?;
    let mut opened = call.bind(&attr, rights)?;
    if truncate {
        // Also for an empty file: the truncation takes its privileges, and changes its times and change counter.
        let set = SetAttr { size: Some(0), ..SetAttr::default() };
        let disk = call.context.disk.as_ref();
        match server.truncate(disk, call.asker(), ino, 0, &set).await {
            Ok(attr) => opened.attr = attr,
            Err(status) => {
                server.close(call.session.number(), &[opened.filekey]).await;
                return Err(status);
            }
        }
    }
    body(&Reply::Opened(call.load(opened, rights).await?))
}

pub(super) async fn close(call: &Call<'_>, filekeys: &[FileKey]) -> Result<Body, Status> {
    for (number, some) in filekeys.chunks(PIECES_A_TURN).enumerate() {
        if number > 0 {
            call.give_way().await;
        }
        let (server, owner) = (&call.context.server, call.session.number());
        // Before they end: the pull of the client's counts knows each key as open or as closed.
        call.session.closed_keys().note(|| {
            some.iter().filter_map(move |key| Some((*key, server.files.readable(owner, *key)?.ino())))
        });
        server.close(owner, some).await;
    }
    done()
}

pub(super) fn layout(
    call: &Call<'_>,
    filekey: FileKey,
    first_page: FilePage,
    max_extents: u32,
) -> Result<Body, Status> {
    let server = &call.context.server;
    let KeyedFile { file, rights, part } = server.files.keyed(call.session.number(), filekey)?;
    if !rights.read {
        return Err(Status::Denied);
    }
    file.usable()?;
    let max_extents = (max_extents as usize).min(MAX_LAYOUT_EXTENTS);
    let mut layout = server.files.layout(&file, first_page, max_extents);
    if let Some(part) = part {
        let (first, end) = (part.start / PAGE_SIZE_U64, part.end.div_ceil(PAGE_SIZE_U64));
        layout.extents = layout.extents.iter().filter_map(|extent| clip(extent, first, end)).collect();
    }
    body(&Reply::Layout(layout))
}

/// The part of an extent that is in the file pages `[first, end)`.
fn clip(extent: &Extent, first: u64, end: u64) -> Option<Extent> {
    let from = extent.file_page.0.max(first);
    let to = extent.file_end().0.min(end);
    let skipped = from - extent.file_page.0;
    let (file_page, pool_page) = (FilePage(from), PoolPage(extent.pool_page.0 + skipped));
    (from < to).then(|| Extent { file_page, pool_page, len_pages: to - from, state: extent.state })
}

pub(super) fn stat_fs(call: &Call<'_>) -> Result<Body, Status> {
    let server = &call.context.server;
    let figures = server.files.space_figures();
    body(&Reply::Space(Space {
        pool_pages: figures.pages,
        // Pages in quarantine belong to no file, and are free after the next flush.
        free_pages: figures.free + figures.quarantined,
        inodes: server.meta.inode_count(),
        free_inodes: server.meta.room_inodes(),
    }))
}
