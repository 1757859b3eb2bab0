//! The request by which a client gives the address of its counters of one-sided reads.

use super::{Body, Call, done};
use crate::rpc::sampling::{self, SharedCounters};
use cuttlefs_common::region::CountersShape;
use cuttlefs_common::rpc::RemoteBuffer;
use cuttlefs_common::status::Status;
use std::sync::Arc;
use std::time::Duration;

/// Pulls the counters over the connection on which they were shared, once a period, until it ends. One table for each connection.
pub(super) fn share(call: &Call<'_>, buffer: RemoteBuffer) -> Result<Body, Status> {
    let server = &call.context.server;
    let shape = CountersShape::of(&server.about.sampling).ok_or(Status::Unsupported)?;
    let is_large_enough = buffer.len as usize >= shape.len_bytes();
    if !is_large_enough || buffer.offset.checked_add(u64::from(buffer.len)).is_none() {
        return Err(Status::Invalid);
    }
    if !server.files.pages().policy().promotes {
        return done();
    }
    if !call.connection.begin_sampling() {
        return Err(Status::Invalid);
    }
    call.session.closed_keys().begin();
    let counters = SharedCounters { buffer, shape, session: call.session.clone() };
    let period = Duration::from_millis(u64::from(server.about.sampling.period_ms));
    let (connection, payer) = (Arc::downgrade(call.connection), call.connection.peer().payer());
    call.context.spawn_for(payer, sampling::run(call.context.clone(), connection, counters, period));
    done()
}
