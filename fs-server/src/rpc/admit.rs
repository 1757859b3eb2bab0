//! The checks of a request before it is run: sizes and names are within POSIX's limits, and the export allows it, whatever the client's kernel has
//! checked.

use cuttlefs_common::ids::{MAX_FILE_SIZE, SYMLINK_MAX};
use cuttlefs_common::locks::{LockRange, LockSpace};
use cuttlefs_common::name;
use cuttlefs_common::rpc::{
    CHANGES_MAX, MAX_INLINE_BYTES, MAX_TRANSFER_BYTES, NewNode, Payload, RECLAIM_FILES_MAX,
    RECLAIM_LOCKS_MAX, Request, RequestHeader, Restored, SLOTS_PER_SESSION, XATTR_NAME_MAX, XATTR_VALUE_MAX,
};
use cuttlefs_common::status::Status;

/// Files that one request may close. More do not fit into a message anyway.
const CLOSES_MAX: usize = 8192;

/// Whether the request changes the file system. An `Open` does only if it truncates.
pub(crate) fn is_mutation(request: &Request<'_>) -> bool {
    match request {
        Request::SetAttr { .. }
        | Request::Make { .. }
        | Request::Create { .. }
        | Request::CreateNameless { .. }
        | Request::Link { .. }
        | Request::Unlink { .. }
        | Request::Rmdir { .. }
        | Request::Rename { .. }
        | Request::Write { .. }
        | Request::Allocate { .. }
        | Request::Restore { .. }
        | Request::CopyRange { .. }
        | Request::SetXattr { .. }
        | Request::RemoveXattr { .. }
        | Request::Defragment { .. }
        | Request::Atomic { .. }
        | Request::GrantWrite { .. } => true,
        Request::OpenRegion { key } => key.rights.write,
        Request::Open { truncate, rights, .. } => *truncate || rights.write,
        _ => false,
    }
}

/// Whether a second run of the same request could have another answer, so that the first answer must be kept.
pub(crate) fn must_run_once(request: &Request<'_>) -> bool {
    // A second open would make a filekey that nobody knows. A second restore finds the change in place.
    is_mutation(request) && !matches!(request, Request::Restore { .. })
        || matches!(
            request,
            Request::Open { .. }
                | Request::Close { .. }
                | Request::Reclaim { .. }
                | Request::Bind { .. }
                | Request::OpenRegion { .. }
                | Request::SetLock { .. }
                | Request::Unlock { .. }
                | Request::AwaitLocks { .. }
                | Request::CancelLock { .. }
        )
}

/// The id that chown(2) takes to mean no change: no user or group has it.
const NOBODY: u32 = u32::MAX;

/// Checks the user and group that a request names.
///
/// # Errors
/// `Invalid`.
pub(crate) fn check_caller(header: &RequestHeader) -> Result<(), Status> {
    if header.uid == NOBODY || header.gid == NOBODY { Err(Status::Invalid) } else { Ok(()) }
}

/// Checks names, sizes, owners and offsets.
///
/// # Errors
/// The status that POSIX gives for the first fault.
pub(crate) fn check(request: &Request<'_>) -> Result<(), Status> {
    match request {
        // `..` asks for a directory's parent, and `.` is no name to look up.
        Request::Lookup { name: b"..", .. } => {}
        Request::Lookup { name, .. }
        | Request::Make { name, .. }
        | Request::Create { name, .. }
        | Request::Link { name, .. }
        | Request::Unlink { name, .. }
        | Request::Rmdir { name, .. } => name::check(name)?,
        Request::Rename { name, new_name, .. } => {
            name::check(name)?;
            name::check(new_name)?;
        }
        Request::GetXattr { name, .. } | Request::RemoveXattr { name, .. } => check_xattr_name(name)?,
        Request::SetXattr { name, value, .. } => {
            check_xattr_name(name)?;
            if value.len() > XATTR_VALUE_MAX {
                return Err(Status::ValueTooLarge);
            }
        }
        Request::Fetch { offset, len, pages, .. } => {
            check_range(*offset, u64::from(*len))?;
            if *len > MAX_TRANSFER_BYTES {
                return Err(Status::Invalid);
            }
            let spanned = cuttlefs_common::region::divide(*offset, *len as usize).len();
            if !pages.fits(spanned) {
                return Err(Status::Malformed);
            }
        }
        Request::Write { offset, payload, append, .. } => {
            check_range(if *append { 0 } else { *offset }, payload_len(payload)?)?;
        }
        Request::Atomic { offset, .. } => {
            if !offset.is_multiple_of(8) {
                return Err(Status::Invalid);
            }
            check_range(*offset, 8)?;
        }
        Request::Allocate { offset, len, .. } => {
            if *len == 0 {
                return Err(Status::Invalid);
            }
            check_range(*offset, *len)?;
        }
        // No change counter reaches this number, and the server uses it for changes that clients made at this server (`files::newer`).
        Request::Restore { change: u64::MAX, .. } => return Err(Status::Invalid),
        Request::Restore { what, .. } => match *what {
            Restored::Bytes { offset, bytes } => match payload_len(&bytes)? {
                0 => return Err(Status::Invalid),
                len => check_range(offset, len)?,
            },
            Restored::Allocate { len: 0, .. } => return Err(Status::Invalid),
            Restored::Allocate { offset, len, .. } => check_range(offset, len)?,
            Restored::End(size) => check_range(0, size)?,
        },
        Request::CopyRange { from_offset, to_offset, len, .. } => {
            check_range(*from_offset, (*len).min(MAX_FILE_SIZE - (*from_offset).min(MAX_FILE_SIZE)))?;
            check_range(*to_offset, *len)?;
        }
        Request::Bind { offset, len, rights, .. } => {
            if *len == 0 || !(rights.read || rights.write) {
                return Err(Status::Invalid);
            }
            check_range(*offset, *len)?;
        }
        Request::GrantWrite { offset, len, .. } | Request::ReturnGrant { offset, len, .. } => {
            check_range(*offset, *len)?;
        }
        Request::Seek { offset, .. } if *offset > MAX_FILE_SIZE => return Err(Status::NoSuchOffset),
        Request::SetAttr { set, .. } if set.size.is_some_and(|size| size > MAX_FILE_SIZE) => {
            return Err(Status::TooLarge);
        }
        Request::SetAttr { set, .. } if set.uid == Some(NOBODY) || set.gid == Some(NOBODY) => {
            return Err(Status::Invalid);
        }
        Request::Close { filekeys } if filekeys.len() > CLOSES_MAX => return Err(Status::Invalid),
        Request::SetLock { lock, .. } | Request::TestLock { lock, .. } => {
            check_lock(lock.space, lock.range)?;
        }
        Request::Unlock { space, range, .. } => check_lock(*space, *range)?,
        Request::ReclaimLocks { locks } => {
            if locks.len() > RECLAIM_LOCKS_MAX {
                return Err(Status::Invalid);
            }
            locks.iter().try_for_each(|held| check_lock(held.lock.space, held.lock.range))?;
        }
        Request::Changes { inodes } if inodes.len() > CHANGES_MAX => return Err(Status::Invalid),
        Request::Reclaim { files } if files.len() > RECLAIM_FILES_MAX => return Err(Status::Invalid),
        Request::Recovered { unanswered } => {
            let fits = unanswered.len() <= usize::from(SLOTS_PER_SESSION)
                && unanswered.iter().all(|request| request.slot.0 < SLOTS_PER_SESSION);
            if !fits {
                return Err(Status::Invalid);
            }
        }
        _ => {}
    }
    if let Request::Make { node: NewNode::Symlink(target), .. } = request {
        if target.is_empty() {
            return Err(Status::NotFound);
        }
        if target.len() > SYMLINK_MAX {
            return Err(Status::NameTooLong);
        }
        if target.contains(&0) {
            return Err(Status::Invalid);
        }
    }
    Ok(())
}

fn check_lock(space: LockSpace, range: LockRange) -> Result<(), Status> {
    let whole = space == LockSpace::Ranges || range == LockRange::WHOLE;
    if range.is_valid() && whole { Ok(()) } else { Err(Status::Invalid) }
}

/// The length of a request's payload in bytes.
fn payload_len(payload: &Payload<'_>) -> Result<u64, Status> {
    match payload {
        Payload::Inline(bytes) if bytes.len() > MAX_INLINE_BYTES => Err(Status::Invalid),
        Payload::Inline(bytes) => Ok(bytes.len() as u64),
        Payload::Pull(buffer) if buffer.len > MAX_TRANSFER_BYTES => Err(Status::Invalid),
        Payload::Pull(buffer) => Ok(u64::from(buffer.len)),
    }
}

fn check_range(offset: u64, len: u64) -> Result<(), Status> {
    match offset.checked_add(len) {
        Some(end) if end <= MAX_FILE_SIZE => Ok(()),
        _ => Err(Status::TooLarge),
    }
}

fn check_xattr_name(name: &[u8]) -> Result<(), Status> {
    if name.is_empty() || name.len() > XATTR_NAME_MAX {
        return Err(Status::ValueTooLarge);
    }
    if name.contains(&0) {
        return Err(Status::Invalid);
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use cuttlefs_common::attr::SetAttr;
    use cuttlefs_common::ids::{FileKey, InodeNo, SlotIndex, TraceId};
    use cuttlefs_common::locks::{LOCK_END, Lock, LockMode, LockOwner, WaitId};
    use cuttlefs_common::rdma::FileAtomic;
    use cuttlefs_common::region::PageSet;
    use cuttlefs_common::rpc::{Allocate, ReclaimLock, Sink, Unanswered};

    fn lookup(name: &[u8]) -> Result<(), Status> {
        check(&Request::Lookup { parent: InodeNo::ROOT, name })
    }

    #[test]
    fn names() {
        assert_eq!(lookup(b"fine"), Ok(()));
        assert_eq!(lookup(&[b'a'; 255]), Ok(()));
        assert_eq!(lookup(&[b'a'; 256]), Err(Status::NameTooLong));
        for bad in [&b"."[..], b"a/b", b"a\0b"] {
            assert_eq!(lookup(bad), Err(Status::Invalid));
        }
        assert_eq!(lookup(b".."), Ok(()));
        assert_eq!(check(&Request::Unlink { parent: InodeNo::ROOT, name: b".." }), Err(Status::Invalid));
        assert_eq!(lookup(b""), Err(Status::NotFound));
    }

    #[test]
    fn offsets_past_2_63() {
        let write = |offset, len| {
            check(&Request::Write {
                filekey: FileKey(1),
                offset,
                append: false,
                payload: Payload::Inline(&vec![0; len]),
            })
        };
        assert_eq!(write(MAX_FILE_SIZE - 1, 1), Ok(()));
        assert_eq!(write(MAX_FILE_SIZE, 1), Err(Status::TooLarge));
        assert_eq!(write(u64::MAX, 1), Err(Status::TooLarge));
        let set = SetAttr { size: Some(1 << 63), ..SetAttr::default() };
        assert_eq!(check(&Request::SetAttr { ino: InodeNo::ROOT, set }), Err(Status::TooLarge));
        let punch = Request::Allocate { filekey: FileKey(1), offset: 0, len: 0, how: Allocate::PunchHole };
        assert_eq!(check(&punch), Err(Status::Invalid));
    }

    #[test]
    fn an_atomic_is_of_a_word_at_its_place() {
        let atomic = |offset| {
            let operation = FileAtomic::FetchAdd { add: 1 };
            check(&Request::Atomic { filekey: FileKey(1), offset, operation, durable: false })
        };
        assert_eq!((atomic(0), atomic(MAX_FILE_SIZE & !7)), (Ok(()), Err(Status::TooLarge)));
        assert_eq!([1, 4, 9, u64::MAX].map(atomic), [Err(Status::Invalid); 4]);
        assert_eq!(atomic(u64::MAX - 7), Err(Status::TooLarge));
    }

    /// Once, a peer that restored a change with the largest number stopped a server with overflow checks.
    #[test]
    fn no_change_is_restored_as_the_last_there_can_be() {
        let restore = |change| {
            let how = Allocate::Reserve { keep_size: false };
            let what = Restored::Allocate { offset: 0, len: 1, how };
            check(&Request::Restore { filekey: FileKey(1), change, what })
        };
        assert_eq!(restore(u64::MAX - 1), Ok(()));
        assert_eq!(restore(u64::MAX), Err(Status::Invalid));
    }

    #[test]
    fn nobody_owns_nothing() {
        let set = |uid, gid| {
            check(&Request::SetAttr { ino: InodeNo(5), set: SetAttr { uid, gid, ..SetAttr::default() } })
        };
        assert_eq!(set(Some(u32::MAX - 1), Some(0)), Ok(()));
        assert_eq!(set(Some(u32::MAX), None), Err(Status::Invalid));
        assert_eq!(set(None, Some(u32::MAX)), Err(Status::Invalid));
        let caller = |uid, gid| {
            let (slot, trace) = (SlotIndex(0), TraceId(0));
            check_caller(&RequestHeader { slot, seq: 1, trace, uid, gid, umask: 0, drops_privileges: false })
        };
        assert_eq!(caller(u32::MAX - 1, 0), Ok(()));
        assert_eq!((caller(u32::MAX, 0), caller(0, u32::MAX)), (Err(Status::Invalid), Err(Status::Invalid)));
    }

    #[test]
    fn locks_are_of_bytes_that_there_can_be() {
        let lock = |space, first, last| {
            let range = LockRange { first, last };
            let lock = Lock { space, owner: LockOwner(1), range, mode: LockMode::Shared, pid: 1 };
            let set = Request::SetLock { filekey: FileKey(1), lock, wait: WaitId(1), blocking: true };
            let clear = Request::Unlock { ino: InodeNo(1), space, owner: LockOwner(1), range };
            let again = Request::ReclaimLocks { locks: vec![ReclaimLock { ino: InodeNo(1), lock }] };
            let test = Request::TestLock { filekey: FileKey(1), lock };
            let results = [set, clear, again, test].map(|request| check(&request));
            assert!(results.windows(2).all(|pair| pair[0] == pair[1]));
            results[0]
        };
        assert_eq!(lock(LockSpace::Ranges, 0, LOCK_END), Ok(()));
        assert_eq!(lock(LockSpace::Ranges, LOCK_END, LOCK_END), Ok(()));
        assert_eq!(lock(LockSpace::Whole, 0, LOCK_END), Ok(()));
        for (space, first, last) in [
            (LockSpace::Ranges, 1, 0),
            (LockSpace::Ranges, 0, LOCK_END + 1),
            (LockSpace::Ranges, u64::MAX, u64::MAX),
            (LockSpace::Whole, 0, 1),
            (LockSpace::Whole, 1, LOCK_END),
        ] {
            assert_eq!(lock(space, first, last), Err(Status::Invalid), "{space:?} {first} {last}");
        }
        let range = LockRange::WHOLE;
        let lock =
            Lock { space: LockSpace::Whole, owner: LockOwner(1), range, mode: LockMode::Shared, pid: 1 };
        let many = vec![ReclaimLock { ino: InodeNo(1), lock }; RECLAIM_LOCKS_MAX + 1];
        assert_eq!(check(&Request::ReclaimLocks { locks: many }), Err(Status::Invalid));
    }

    #[test]
    fn what_is_asked_again_is_asked_in_slots_that_there_are() {
        let recovered = |slots: &[u16]| {
            let unanswered = slots.iter().map(|slot| Unanswered { slot: SlotIndex(*slot), seq: 1 }).collect();
            check(&Request::Recovered { unanswered })
        };
        let all: Vec<u16> = (0..SLOTS_PER_SESSION).collect();
        assert_eq!(recovered(&[]), Ok(()));
        assert_eq!(recovered(&all), Ok(()));
        assert_eq!(recovered(&[SLOTS_PER_SESSION]), Err(Status::Invalid));
        assert_eq!(recovered(&[all, vec![0]].concat()), Err(Status::Invalid), "one of each");
    }

    #[test]
    fn a_page_set_must_fit_its_request() {
        let fetch = |pages| {
            check(&Request::Fetch { filekey: FileKey(1), offset: 4000, len: 200, pages, sink: Sink::Inline })
        };
        assert_eq!(fetch(PageSet::all(2)), Ok(()));
        assert_eq!(fetch(PageSet::all(3)), Err(Status::Malformed));
        assert_eq!(fetch(PageSet::all(1000)), Err(Status::Malformed));
    }
}
