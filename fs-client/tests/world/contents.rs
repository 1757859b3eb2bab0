//! Helpers for the contents of files in tests.

use cuttlefs_client::file::volume::{Caller, FsError, Handle, Volume};
use cuttlefs_common::ids::TraceId;
use cuttlefs_common::rpc::MAX_TRANSFER_BYTES;

/// The caller of all requests: root.
pub const CALLER: Caller = Caller::new(0, 0, TraceId(1));

pub fn read(volume: &impl Volume, handle: Handle, offset: u64, len: u32) -> Result<Vec<u8>, FsError> {
    let mut bytes = Vec::new();
    while bytes.len() < len as usize {
        let (at, before) = (offset + bytes.len() as u64, bytes.len());
        let part = (len - before as u32).min(MAX_TRANSFER_BYTES);
        volume.read(&CALLER, handle, at, part, &mut |got| bytes.extend_from_slice(got))?;
        if bytes.len() < before + part as usize {
            break;
        }
    }
    Ok(bytes)
}

pub fn pattern(len: usize, salt: u8) -> Vec<u8> {
    (0..len).map(|index| (index as u8).wrapping_mul(31) ^ (index >> 8) as u8 ^ salt).collect()
}
