//! The bytes of a server's frames: as many as asked for, or as its region policy needs.

use super::StartError;
use crate::pages::MIN_FRAMES;
use crate::pages::policy::{Exposure, RegionPolicy};
use cuttlefs_common::ids::{FrameIndex, PAGE_SIZE_U64};
use cuttlefs_common::size::ByteSize;

/// The file in which Linux says how much memory is available without swapping.
const MEMINFO: &str = "/proc/meminfo";

/// The bytes of the frames for a pool under a policy.
///
/// # Errors
/// If the policy keeps all of the pool in memory, and the machine has too little.
pub(super) fn frame_bytes(policy: &RegionPolicy, asked: u64, pool_pages: u64) -> Result<u64, StartError> {
    if policy.exposure == Exposure::Pinned {
        let bytes = (pool_pages + u64::from(FrameIndex::FIRST_USABLE.0)) * PAGE_SIZE_U64;
        let meminfo = std::fs::read_to_string(MEMINFO)
            .map_err(|source| StartError::System { action: "read /proc/meminfo", source })?;
        let available = available_bytes(&meminfo).unwrap_or(0);
        if bytes > available || bytes / PAGE_SIZE_U64 > u64::from(u32::MAX) {
            return Err(StartError::PinnedPool { needed: ByteSize(bytes), available: ByteSize(available) });
        }
        tracing::info!(memory = %ByteSize(bytes), "all of the pool is kept in memory; --memory does not count");
        return Ok(bytes);
    }
    if !policy.uses_frames() {
        // No frame is ever filled, and registering them with io_uring would pin memory that the page cache needs.
        return Ok(u64::from(MIN_FRAMES) * PAGE_SIZE_U64);
    }
    Ok(asked)
}

/// `MemAvailable` of `/proc/meminfo`.
fn available_bytes(meminfo: &str) -> Option<u64> {
    let line = meminfo.lines().find_map(|line| line.strip_prefix("MemAvailable:"))?;
    line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok()?.checked_mul(1024)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::pages::policy::PolicyName;

    #[test]
    fn the_kernel_says_what_is_available() {
        let text = "MemTotal:       24684084 kB\nMemFree: 5 kB\nMemAvailable:   23933792 kB\n";
        assert_eq!(available_bytes(text), Some(23_933_792 << 10));
        assert_eq!(available_bytes("MemTotal: 5 kB\n"), None);
    }

    #[test]
    fn each_policy_takes_what_it_uses() {
        let bytes = |name, pool_pages| frame_bytes(&RegionPolicy::of(name), 1 << 30, pool_pages);
        assert_eq!(bytes(PolicyName::Term, 100).ok(), Some(1 << 30));
        assert_eq!(bytes(PolicyName::Pin, 100).ok(), Some(103 * PAGE_SIZE_U64));
        for name in [PolicyName::Odp, PolicyName::Rpc, PolicyName::RpcBuffer, PolicyName::RpcDirect] {
            assert_eq!(bytes(name, 100).ok(), Some(4 * PAGE_SIZE_U64));
        }
        let error = bytes(PolicyName::Pin, 1 << 50).expect_err("no machine has that").to_string();
        assert!(error.contains("--region pin"), "{error}");
    }
}
