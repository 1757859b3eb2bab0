//! What files of tests have in them.

use cuttlefs_client::file::volume::{Caller, FsError, Handle, Volume};
use cuttlefs_common::ids::TraceId;

/// Who calls.
pub const CALLER: Caller = Caller::new(0, 0, TraceId(1));

pub fn read(volume: &impl Volume, handle: Handle, offset: u64, len: u32) -> Result<Vec<u8>, FsError> {
    let mut bytes = Vec::new();
    volume.read(&CALLER, handle, offset, len, &mut |got| bytes.extend_from_slice(got))?;
    Ok(bytes)
}

pub fn pattern(len: usize, salt: u8) -> Vec<u8> {
    (0..len).map(|index| (index as u8).wrapping_mul(31) ^ (index >> 8) as u8 ^ salt).collect()
}
