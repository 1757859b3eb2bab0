//! Requests that move file bytes.

use super::{Body, Call, body, done};
use crate::files::{self, FileRegion, KeyedFile, Word, WordChanged, WriteAt};
use crate::meta::ClientChange;
use crate::pages;
use crate::rpc::bounce::Bounce;
use crate::rpc::reply::FetchedBody;
use crate::rpc::transfer::Direction;
use cuttlefs_common::attr::{FileKind, InodeFlags};
use cuttlefs_common::ids::{FileKey, FilePage, InodeNo};
use cuttlefs_common::rdma::{FileAtomic, WcStatus};
use cuttlefs_common::region::{PageSet, divide};
use cuttlefs_common::rpc::{Allocate, MAX_INLINE_BYTES, Payload, Reply, Restored, SeekFor, Sink, SyncScope};
use cuttlefs_common::status::Status;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::Ordering;

impl Call<'_> {
    /// The status for a failed transfer, which ends the connection. If the connection itself failed, the client sends the request again on its next
    /// one: all transfers of a request come before its effect.
    fn transfer_failed(&self, status: WcStatus) -> Status {
        match status {
            WcStatus::Disconnected | WcStatus::Flushed => {
                self.unanswered.set(true);
                Status::Io
            }
            _ => Status::Malformed,
        }
    }

    fn note_fetched(&self, bytes: usize) {
        self.context.server.counters.fetched_bytes.fetch_add(bytes as u64, Ordering::Relaxed);
    }

    /// Takes the privileges from a file that a change of its contents by this user must take.
    pub(super) fn take_privileges(&self, ino: InodeNo) -> Result<(), Status> {
        self.context.server.take_privileges(self.asker(), ino)
    }

    /// The file of a filekey that may read these bytes: an offset, and a length.
    fn readable(&self, filekey: FileKey, (offset, len): (u64, u64)) -> Result<Arc<FileRegion>, Status> {
        let keyed = self.context.server.files.keyed(self.session.number(), filekey)?;
        let may = keyed.rights.read && keyed.holds(offset, offset.saturating_add(len));
        if may { Ok(keyed.file) } else { Err(Status::Denied) }
    }

    /// Checks that a file's chattr marks allow a change other than by write(2).
    pub(super) fn check_marks(&self, file: &FileRegion, adds: bool) -> Result<(), Status> {
        let flags = self.context.server.meta.attr(file.ino())?.flags;
        let fixed = flags.has(InodeFlags::IMMUTABLE) || (!adds && flags.has(InodeFlags::APPEND_ONLY));
        if fixed { Err(Status::NotPermitted) } else { Ok(()) }
    }

    /// The file of a filekey that may write somewhere.
    pub(super) fn keyed_to_write(&self, filekey: FileKey) -> Result<KeyedFile, Status> {
        let keyed = self.context.server.files.keyed(self.session.number(), filekey)?;
        if keyed.rights.write { Ok(keyed) } else { Err(Status::Denied) }
    }

    /// Begins a change by a filekey. One that has ended since it was looked up changes nothing: who ends it waits for the changes that have begun
    /// ([`files::settle`]).
    async fn begin_change<'c>(
        &'c self,
        filekey: FileKey,
        file: &'c Arc<FileRegion>,
    ) -> Result<files::Changing<'c>, Status> {
        let files = &self.context.server.files;
        let changing = files::begin_change(files, file, self.changed).await?;
        files.keyed(self.session.number(), filekey)?;
        Ok(changing)
    }

    /// The file of a filekey that may write these bytes.
    fn writable(&self, filekey: FileKey, (offset, len): (u64, u64)) -> Result<Arc<FileRegion>, Status> {
        let keyed = self.keyed_to_write(filekey)?;
        if keyed.holds(offset, offset.saturating_add(len)) { Ok(keyed.file) } else { Err(Status::Denied) }
    }
}

pub(super) async fn fetch(
    call: &Call<'_>,
    filekey: FileKey,
    offset: u64,
    len: u32,
    pages: &PageSet,
    sink: Sink,
) -> Result<Body, Status> {
    let server = &call.context.server;
    let file = call.readable(filekey, (offset, len.into()))?;
    let disk = call.context.disk.as_ref();
    let len = len as usize;
    let valid_len = match sink {
        Sink::Inline => {
            if len > MAX_INLINE_BYTES {
                return Err(Status::Invalid);
            }
            let Some(reply) = FetchedBody::begin(call.connection) else {
                return fetch_aside(call, &file, offset, len, pages).await;
            };
            let (memory, at) = reply.place();
            let target = pages::Sink::Memory { memory, offset: at };
            let valid_len = files::fetch(&server.files, disk, &file, offset, len, pages, target).await?;
            let runs = runs(offset, valid_len as usize, pages);
            call.note_fetched(runs.iter().map(|(_, run)| run).sum());
            return Ok(reply.finish(valid_len, &runs));
        }
        Sink::Push(buffer) => {
            let bounce = Rc::new(call.context.bounce.lend(&call.claim()).await);
            let target = pages::Sink::Memory { memory: bounce.memory(), offset: bounce.offset() };
            let valid_len = files::fetch(&server.files, disk, &file, offset, len, pages, target).await?;
            let mut fetched = 0;
            for (start, run) in runs(offset, valid_len as usize, pages) {
                call.context
                    .transfers
                    .run(call.connection, Direction::Push, &bounce, &buffer, start, run)
                    .await
                    .map_err(|status| call.transfer_failed(status))?;
                fetched += run;
            }
            call.note_fetched(fetched);
            valid_len
        }
    };
    body(&Reply::Fetched { valid_len, inline: &[] })
}

/// A short fetch into memory of its own, while all reply buffers of the connection are in flight because its client takes its replies slowly.
async fn fetch_aside(
    call: &Call<'_>,
    file: &FileRegion,
    offset: u64,
    len: usize,
    pages: &PageSet,
) -> Result<Body, Status> {
    let files = &call.context.server.files;
    call.context.server.counters.fetched_aside.fetch_add(1, Ordering::Relaxed);
    let mut bytes = vec![0; len];
    let target = pages::Sink::Bytes(&mut bytes);
    let valid_len = files::fetch(files, call.context.disk.as_ref(), file, offset, len, pages, target).await?;
    let mut wanted_len = 0;
    for (start, run) in runs(offset, valid_len as usize, pages) {
        bytes.copy_within(start..start + run, wanted_len);
        wanted_len += run;
    }
    call.note_fetched(wanted_len);
    body(&Reply::Fetched { valid_len, inline: &bytes[..wanted_len] })
}

/// Runs of wanted pages as (offset in the request, length). Each is one RDMA WRITE.
fn runs(offset: u64, valid_len: usize, pages: &PageSet) -> Vec<(usize, usize)> {
    let mut runs: Vec<(usize, usize)> = Vec::new();
    for (index, part) in divide(offset, valid_len).enumerate() {
        if !pages.contains(index) {
            continue;
        }
        match runs.last_mut() {
            Some((start, run)) if *start + *run == part.offset_in_request => *run += part.len,
            _ => runs.push((part.offset_in_request, part.len)),
        }
    }
    runs
}

/// The bytes of a write, as a source. Bytes that are not in the message are pulled into a bounce buffer, which `bounce` keeps.
async fn gather<'b>(
    call: &Call<'_>,
    payload: Payload<'b>,
    bounce: &'b mut Option<Rc<Bounce>>,
) -> Result<pages::Source<'b>, Status> {
    let buffer = match payload {
        Payload::Inline(bytes) => return Ok(pages::Source::Bytes(bytes)),
        Payload::Pull(buffer) => buffer,
    };
    let len = buffer.len as usize;
    let bounce = &*bounce.insert(Rc::new(call.context.bounce.lend(&call.claim()).await));
    call.context
        .transfers
        .run(call.connection, Direction::Pull, bounce, &buffer, 0, len)
        .await
        .map_err(|status| call.transfer_failed(status))?;
    Ok(pages::Source::Memory { memory: bounce.memory(), offset: bounce.offset(), len })
}

pub(super) async fn write(
    call: &Call<'_>,
    filekey: FileKey,
    offset: u64,
    append: bool,
    payload: Payload<'_>,
) -> Result<Body, Status> {
    let server = &call.context.server;
    let keyed = call.keyed_to_write(filekey)?;
    let file = keyed.file.clone();
    file.check_marks(append)?;
    call.take_privileges(file.ino())?;
    let at = if append { WriteAt::End } else { WriteAt::Offset(offset) };
    let disk = call.context.disk.as_ref();
    let asked: Option<files::Asked<'_>> =
        call.who.request.map(|request| (request, &files::Written::answer as _));
    let mut bounce = None;
    let source = gather(call, payload, &mut bounce).await?;
    // All bytes are here now, so that a client that restores changes of this file does not wait for this peer.
    let changing = call.begin_change(filekey, &file).await?;
    // Under the file's order: the marks may have been set since.
    let may = |start, end| {
        file.check_marks(append)?;
        if keyed.holds(start, end) { Ok(()) } else { Err(Status::Denied) }
    };
    let writer = files::Writer::Request(asked);
    // In a full pool a grant's pages are there for its holder's requests, too.
    let granted = (&file, filekey);
    let written = files::write_granted(&server.files, disk, granted, at, source, writer, &may).await?;
    changing.done(written.attr.change, written.offset..written.offset + u64::from(written.len));
    server.counters.written_bytes.fetch_add(u64::from(written.len), Ordering::Relaxed);
    // While others sync, the disk is busy, and a sync that is asked for after theirs is shared by many.
    if file.rhythm.wrote() && !server.about.durable_answers && !server.files.is_flushing() {
        begin_sync(call, file);
    }
    body(&Reply::Written {
        offset: written.offset,
        len: written.len,
        size: written.attr.size,
        change: written.attr.change,
    })
}

pub(super) async fn atomic(
    call: &Call<'_>,
    filekey: FileKey,
    offset: u64,
    operation: FileAtomic,
    durable: bool,
) -> Result<Body, Status> {
    let server = &call.context.server;
    let keyed = call.keyed_to_write(filekey)?;
    // It tells the word that was there.
    if !keyed.rights.read {
        return Err(Status::Denied);
    }
    let file = &keyed.file;
    file.check_marks(false)?;
    call.take_privileges(file.ino())?;
    let changing = call.begin_change(filekey, file).await?;
    // Under the file's order: marks and length may have changed since.
    let may = |start, end| {
        file.check_marks(false)?;
        match keyed.holds(start, end) {
            false => Err(Status::Denied),
            true if end > file.size() => Err(Status::NoSuchOffset),
            true => Ok(()),
        }
    };
    let disk = call.context.disk.as_ref();
    let word = Word { offset, operation };
    let WordChanged { old, change } =
        files::change_word(&server.files, disk, (file, filekey), word, &may).await?;
    if let Some(change) = change {
        changing.done(change, word.bytes());
        if durable {
            call.changed.note_wanted_durable();
        }
    }
    body(&Reply::Old(old))
}

/// Begins a sync that the client will probably ask for, while it gets the answer to its write.
fn begin_sync(call: &Call<'_>, file: Arc<FileRegion>) {
    let (context, claim) = (call.context.clone(), call.claim());
    context.server.counters.syncs_ahead.fetch_add(1, Ordering::Relaxed);
    call.context.spawn_for(call.connection.peer().payer(), async move {
        if context.server.drain.begin() {
            let turn = context.turns.take(&claim).await;
            let is_little = files::begin_sync(&context.server.files, &file).await;
            drop(turn);
            if is_little {
                let _told_to_who_asks = files::release_space(&context.server.files).await;
            }
            context.server.drain.end();
        }
    });
}

pub(super) async fn sync(call: &Call<'_>, scope: SyncScope) -> Result<Body, Status> {
    let server = &call.context.server;
    let disk = call.context.disk.as_ref();
    match scope {
        SyncScope::All => files::write_back_all(&server.files, disk).await?,
        SyncScope::Inode(ino) | SyncScope::InodeContents(ino) => match file_of(call, ino)? {
            Some(file) => {
                file.rhythm.synced();
                files::sync(&server.files, disk, &file).await?;
            }
            // All changes of other inodes are in batches already.
            None => files::release_space(&server.files).await?,
        },
    }
    done()
}

fn file_of(call: &Call<'_>, ino: InodeNo) -> Result<Option<Arc<FileRegion>>, Status> {
    let server = &call.context.server;
    match server.meta.attr(ino)?.kind {
        FileKind::File => server.files.file(ino).map(Some),
        _ => Ok(None),
    }
}

pub(super) async fn allocate(
    call: &Call<'_>,
    filekey: FileKey,
    offset: u64,
    len: u64,
    how: Allocate,
) -> Result<Body, Status> {
    let file = call.writable(filekey, (offset, len))?;
    let adds = matches!(how, Allocate::Reserve { .. });
    call.check_marks(&file, adds)?;
    call.take_privileges(file.ino())?;
    let disk = call.context.disk.as_ref();
    let (files, request) = (&call.context.server.files, call.who.request);
    let changing = call.begin_change(filekey, &file).await?;
    let attr = files::allocate_for(files, disk, &file, (offset, len), how, request).await?;
    let end = offset.saturating_add(len);
    let changed_bytes = match how {
        Allocate::Reserve { keep_size: true } => offset..offset,
        Allocate::Reserve { keep_size: false } => end..end,
        Allocate::PunchHole | Allocate::ZeroRange { .. } => offset..end,
    };
    changing.done(attr.change, changed_bytes);
    body(&Reply::Attr(attr))
}

/// Changes no contents, so it needs no mark, and takes no privileges.
pub(super) async fn defragment(
    call: &Call<'_>,
    filekey: FileKey,
    first_page: FilePage,
) -> Result<Body, Status> {
    let files = &call.context.server.files;
    let (file, rights) = files.resolve(call.session.number(), filekey)?;
    if file.is_directory() {
        return Err(Status::IsDirectory);
    }
    if !rights.write {
        return Err(Status::Denied);
    }
    let moved = files::defragment(files, call.context.disk.as_ref(), &file, first_page).await?;
    body(&Reply::Moved { pages: moved.pages, next: moved.next })
}

pub(super) async fn restore(
    call: &Call<'_>,
    filekey: FileKey,
    change: u64,
    what: Restored<Payload<'_>>,
) -> Result<Body, Status> {
    let range = match what {
        Restored::Bytes { offset, bytes: Payload::Inline(bytes) } => (offset, bytes.len() as u64),
        Restored::Bytes { offset, bytes: Payload::Pull(buffer) } => (offset, buffer.len.into()),
        Restored::Allocate { offset, len, .. } => (offset, len),
        // All behind the end.
        Restored::End(size) => (size, u64::MAX),
    };
    let file = call.writable(filekey, range)?;
    call.take_privileges(file.ino())?;
    let by = (ClientChange { client: call.session.client(), change }, call.session.peer().key());
    // All bytes are here before another request waits for this one.
    let mut bounce = None;
    let source = match what {
        Restored::Bytes { bytes, .. } => gather(call, bytes, &mut bounce).await?,
        _ => pages::Source::Bytes(&[]),
    };
    let what = what.map(|_| source);
    let disk = call.context.disk.as_ref();
    let lost = call.context.server.restore(disk, call.asker(), &file, by, what).await?;
    body(&Reply::Restored { lost })
}

pub(super) async fn seek(
    call: &Call<'_>,
    filekey: FileKey,
    offset: u64,
    seek: SeekFor,
) -> Result<Body, Status> {
    let (file, _) = call.context.server.files.resolve(call.session.number(), filekey)?;
    body(&Reply::Offset(files::seek(&file, offset, seek).await?))
}

pub(super) async fn copy_range(
    call: &Call<'_>,
    (from, from_offset): (FileKey, u64),
    (to, to_offset): (FileKey, u64),
    len: u64,
) -> Result<Body, Status> {
    let to_key = to;
    let (from, to) = (call.readable(from, (from_offset, len))?, call.writable(to, (to_offset, len))?);
    call.check_marks(&to, false)?;
    call.take_privileges(to.ino())?;
    let disk = call.context.disk.as_ref();
    let (files, request) = (&call.context.server.files, call.who.request);
    let (from, to) = ((&from, from_offset), (&to, to_offset));
    let changing = call.begin_change(to_key, to.0).await?;
    let files::Copied { len, change } = files::copy_range(files, disk, from, to, len, request).await?;
    changing.done(change, to_offset..to_offset.saturating_add(len));
    body(&Reply::Copied { len, change })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn wanted_neighbours_are_one_transfer() {
        let mut pages = PageSet::none(4);
        for index in [0, 1, 3] {
            pages.insert(index);
        }
        assert_eq!(runs(100, 4 * 4096 - 100, &pages), [(0, 2 * 4096 - 100), (3 * 4096 - 100, 4096)]);
        assert_eq!(runs(0, 5000, &pages), [(0, 5000)], "nothing past the end of the file");
    }
}
