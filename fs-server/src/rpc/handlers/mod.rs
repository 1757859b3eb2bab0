//! The handlers of requests: one short function for each kind, between admission and reply.

mod attach;
mod data;
mod files;
mod grace;
mod locks;
mod names;
mod recall;
mod regions;
mod sample;
mod status;

pub(crate) use attach::attach;
pub(crate) use status::status;

use super::admit;
use super::connection::Connection;
use super::reply::{Body, body};
use super::turns::{Claim, Turn};
use super::worker::WorkerContext;
use crate::files::Changed;
use crate::meta::RequestId;
use crate::rights::{Grant, Identity, Judge};
use crate::server::Asker;
use crate::session::Session;
use cuttlefs_common::ids::InodeNo;
use cuttlefs_common::rpc::{Reply, Request, RequestHeader, Rights};
use cuttlefs_common::status::Status;
use std::cell::Cell;
use std::rc::Rc;
use std::sync::Arc;

/// The context of a request for its handler.
pub(super) struct Call<'c> {
    pub(super) context: &'c Rc<WorkerContext>,
    pub(super) connection: &'c Arc<Connection>,
    pub(super) session: &'c Arc<Session>,
    pub(super) grant: &'c Grant,
    pub(super) who: Identity,
    /// Set if the request is not to be answered, and nothing was changed: its connection ended, or the server is going down.
    pub(super) unanswered: &'c Cell<bool>,
    pub(super) changed: &'c Changed,
}

/// The effect of a request, beside its reply.
#[derive(Default)]
pub(crate) struct Effect {
    /// Nothing was changed, and the request is not to be answered.
    pub unanswered: Cell<bool>,
    /// The changes that must be durable before the answer, if answers are.
    pub changed: Changed,
}

impl Call<'_> {
    /// Judges what the requester may do.
    pub(super) fn judge(&self) -> Judge<'_> {
        Judge { meta: &self.context.server.meta, who: &self.who }
    }

    /// Whether the session has an inode open with at least these rights.
    pub(super) fn has_open(&self, ino: InodeNo, rights: Rights) -> bool {
        self.context.server.files.has_open(self.session.number(), ino, rights)
    }

    /// The requester, for `Server`.
    fn asker(&self) -> Asker<'_> {
        Asker { who: &self.who, owner: self.session.number(), changed: self.changed }
    }

    /// The peer and session in whose name turns and buffers are taken.
    fn claim(&self) -> Claim {
        Claim::new(self.connection.peer(), self.session.number().0)
    }

    /// Called between two pieces of a long request: tasks of peers that have had less of the worker go first.
    pub(super) async fn give_way(&self) {
        futures_lite::future::yield_now().await;
    }

    /// A turn to move file bytes. A request that reads or writes the SSD takes it before any lock or buffer.
    async fn turn(&self) -> Turn {
        self.context.turns.take(&self.claim()).await
    }
}

/// Pieces of a long request that are done before other requests get their turn on the worker. A piece takes about a microsecond.
const PIECES_A_TURN: usize = 32;

fn done() -> Result<Body, Status> {
    body(&Reply::Done)
}

/// Runs an admitted request. If `effect` says that it is unanswered, the result is no answer.
///
/// # Errors
/// The status to answer with.
pub(crate) async fn run(
    context: &Rc<WorkerContext>,
    connection: &Arc<Connection>,
    session: &Arc<Session>,
    header: &RequestHeader,
    mut request: Request<'_>,
    effect: &Effect,
) -> Result<Body, Status> {
    admit::check_caller(header)?;
    admit::check(&request)?;
    let grant = connection.grant().ok_or(Status::SessionExpired)?;
    if grant.read_only && admit::is_mutation(&request) {
        return Err(Status::ReadOnly);
    }
    let id = RequestId { client: session.client(), slot: header.slot, seq: header.seq };
    let who = Identity { opens: request.opens(), ..grant.identify(header, Some(id)) };
    let call = Call {
        context,
        connection,
        session,
        grant,
        who,
        unanswered: &effect.unanswered,
        changed: &effect.changed,
    };
    grace::gathered(&call, &request).await?;
    grace::decided(&call, &mut request).await?;
    call.judge().may_ask(&request, |ino| call.has_open(ino, Rights { read: false, write: true }))?;
    match request {
        Request::Attach { .. } | Request::Status => Err(Status::Malformed),
        Request::Heartbeat => done(),
        Request::Detach => attach::detach(&call).await,
        Request::Recovered { unanswered } => attach::recovered(&call, &unanswered).await,
        Request::ShareCounters { buffer } => sample::share(&call, buffer),
        Request::Reclaim { files } => attach::reclaim(&call, &files).await,
        Request::Lookup { parent, name } => names::lookup(&call, parent, name).await,
        Request::GetAttr { ino } => names::get_attr(&call, ino),
        Request::Changes { inodes } => names::changes(&call, &inodes),
        Request::SetAttr { ino, set } => names::set_attr(&call, ino, &set).await,
        Request::Make { parent, name, node, mode } => names::make(&call, parent, name, node, mode),
        Request::Create { parent, name, mode, exclusive, rights } => {
            files::create(&call, parent, name, mode, exclusive, rights).await
        }
        Request::CreateNameless { parent, mode, rights } => {
            files::create_nameless(&call, parent, mode, rights).await
        }
        Request::Link { ino, parent, name } => names::link(&call, ino, parent, name),
        Request::Unlink { parent, name } => names::unlink(&call, parent, name).await,
        Request::Rmdir { parent, name } => names::rmdir(&call, parent, name).await,
        Request::Rename { parent, name, new_parent, new_name, mode } => {
            names::rename(&call, (parent, name), (new_parent, new_name), mode).await
        }
        Request::ReadLink { ino } => names::read_link(&call, ino),
        Request::ReadDir { ino, cookie, max_bytes, plus } => {
            names::read_dir(&call, ino, cookie, max_bytes, plus).await
        }
        Request::Open { ino, rights, truncate, by } => files::open(&call, ino, rights, truncate, by).await,
        Request::Close { filekeys } => files::close(&call, &filekeys).await,
        Request::Layout { filekey, first_page, max_extents } => {
            files::layout(&call, filekey, first_page, max_extents)
        }
        Request::Fetch { filekey, offset, len, pages, sink } => {
            let _turn = call.turn().await;
            data::fetch(&call, filekey, offset, len, &pages, sink).await
        }
        Request::Write { filekey, offset, append, payload } => {
            grace::with_space(&call, async || data::write(&call, filekey, offset, append, payload).await)
                .await
        }
        Request::Sync(scope) => {
            let _turn = call.turn().await;
            data::sync(&call, scope).await
        }
        Request::Allocate { filekey, offset, len, how } => {
            grace::with_space(&call, async || data::allocate(&call, filekey, offset, len, how).await).await
        }
        Request::Seek { filekey, offset, seek } => data::seek(&call, filekey, offset, seek).await,
        Request::CopyRange { from, from_offset, to, to_offset, len } => {
            let (from, to) = ((from, from_offset), (to, to_offset));
            grace::with_space(&call, async || data::copy_range(&call, from, to, len).await).await
        }
        Request::GetXattr { ino, name } => names::get_xattr(&call, ino, name),
        Request::ListXattr { ino } => names::list_xattr(&call, ino),
        Request::SetXattr { ino, name, value, mode } => names::set_xattr(&call, ino, name, value, mode),
        Request::RemoveXattr { ino, name } => names::remove_xattr(&call, ino, name),
        Request::StatFs => files::stat_fs(&call),
        Request::SetLock { filekey, lock, wait, blocking } => {
            locks::set(&call, filekey, &lock, wait, blocking)
        }
        Request::Unlock { ino, space, owner, range } => locks::clear(&call, ino, space, owner, range),
        Request::TestLock { filekey, lock } => locks::test(&call, filekey, &lock),
        Request::AwaitLocks { hold_ms } => locks::settled(&call, hold_ms).await,
        Request::CancelLock { wait } => locks::cancel(&call, wait),
        Request::ReclaimLocks { locks } => locks::reclaim(&call, &locks).await,
        Request::Restore { filekey, change, what } => {
            grace::with_space(&call, async || data::restore(&call, filekey, change, what).await).await
        }
        Request::Bind { filekey, offset, len, rights, lifetime_ms } => {
            regions::bind(&call, filekey, (offset, len), rights, lifetime_ms)
        }
        Request::BindAgain { filekey, key } => regions::bind_again(&call, filekey, &key).await,
        Request::Unbind { number } => regions::unbind(&call, number).await,
        Request::OpenRegion { key } => regions::open(&call, &key).await,
        Request::GrantWrite { filekey, offset, len } => {
            grace::with_space(&call, async || regions::grant(&call, filekey, (offset, len)).await).await
        }
        Request::ReturnGrant { filekey, offset, len } => {
            regions::return_grant(&call, filekey, (offset, len)).await
        }
        Request::Defragment { filekey, first_page } => {
            let _turn = call.turn().await;
            data::defragment(&call, filekey, first_page).await
        }
        Request::Atomic { filekey, offset, operation, durable } => {
            grace::with_space(&call, async || data::atomic(&call, filekey, offset, operation, durable).await)
                .await
        }
    }
}
