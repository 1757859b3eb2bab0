//! Targets of one-sided verbs besides registered memory: files that the target's engine reads and writes, and windows that its peers map.

use super::*;
use std::sync::Mutex;

struct OneFile;

impl FileTarget for OneFile {
    fn read_file(
        &self,
        owner: RegionOwner,
        filekey: FileKey,
        offset: u64,
        out: &mut [u8],
    ) -> Result<FileRead, WcStatus> {
        if (owner, filekey) != (RegionOwner(42), FileKey(7)) {
            return Err(WcStatus::RemoteAccess);
        }
        out.fill(0x5a);
        Ok(FileRead::Done((10_000u64.saturating_sub(offset) as usize).min(out.len())))
    }

    fn read_bitmap(
        &self,
        owner: RegionOwner,
        filekey: FileKey,
        first_page: u64,
        out: &mut [u8],
    ) -> Result<(), WcStatus> {
        if (owner, filekey) != (RegionOwner(42), FileKey(7)) {
            return Err(WcStatus::RemoteAccess);
        }
        out.fill(first_page as u8);
        Ok(())
    }
}

/// `OneFile`, whose 10,000 bytes can also be written. It notes the writes.
#[derive(Default)]
struct Written(Mutex<Vec<(u64, Vec<u8>)>>);

impl FileTarget for Written {
    fn read_file(
        &self,
        owner: RegionOwner,
        filekey: FileKey,
        offset: u64,
        out: &mut [u8],
    ) -> Result<FileRead, WcStatus> {
        OneFile.read_file(owner, filekey, offset, out)
    }

    fn write_file(
        &self,
        owner: RegionOwner,
        filekey: FileKey,
        offset: u64,
        bytes: &[u8],
    ) -> Result<FileWrite, WcStatus> {
        if (owner, filekey) != (RegionOwner(42), FileKey(7)) || offset + bytes.len() as u64 > 10_000 {
            return Err(WcStatus::RemoteAccess);
        }
        self.0.lock().expect("no panic").push((offset, bytes.to_vec()));
        Ok(FileWrite::Done)
    }

    fn read_bitmap(
        &self,
        owner: RegionOwner,
        filekey: FileKey,
        first_page: u64,
        out: &mut [u8],
    ) -> Result<(), WcStatus> {
        OneFile.read_bitmap(owner, filekey, first_page, out)
    }
}

pub(super) fn files_are_written_where_the_target_takes_it(link: LinkKind) {
    let pair_with = |target: Arc<dyn FileTarget>, owner| {
        let pair = Pair::new(link);
        pair.server.device.set_file_target(target);
        pair.s().set_region_owner(RegionOwner(owner));
        pair
    };
    let write = |pair: &Pair, filekey, offset, bytes: &[u8]| {
        let op = SendOp::Write(Remote::File { filekey: FileKey(filekey), offset });
        pair.c().post_send(&[send(1, op, pair.client.put(0, bytes))]).expect("post");
        pair.client.next()
    };
    // A target whose files can be read refuses writes, unless it implements them.
    assert_eq!(write(&pair_with(Arc::new(OneFile), 42), 7, 0, b"x").status, WcStatus::RemoteInvalid);
    if link == LinkKind::Shm {
        return;
    }
    let target = Arc::new(Written::default());
    let pair = pair_with(target.clone(), 42);
    ok(write(&pair, 7, 9_995, b"bytes"), 1, CompletionKind::Write, 5);
    ok(write(&pair, 7, 0, b""), 1, CompletionKind::Write, 0);
    // When a READ has completed, earlier WRITEs have been executed, also those without a completion.
    let mut silent = send(
        2,
        SendOp::Write(Remote::File { filekey: FileKey(7), offset: 3 }),
        pair.client.put(8, b"silent"),
    );
    silent.signaled = false;
    let read = SendOp::Read(Remote::File { filekey: FileKey(7), offset: 0 });
    pair.c().post_send(&[silent, send(3, read, pair.client.mr.sge(64, 8))]).expect("post");
    ok(pair.client.next(), 3, CompletionKind::Read, 8);
    let written = target.0.lock().expect("no panic").clone();
    assert_eq!(written, [(9_995, b"bytes".to_vec()), (0, Vec::new()), (3, b"silent".to_vec())]);
    for (filekey, offset, owner) in [(7, 9_996, 42), (8, 0, 42), (7, 0, 41), (7, 0, 0)] {
        let pair = pair_with(target.clone(), owner);
        assert_eq!(write(&pair, filekey, offset, b"bytes").status, WcStatus::RemoteAccess);
        assert_eq!(pair.c().state(), QpState::Error);
    }
    // A WRITE with immediate to a file and a WRITE to a bitmap are no valid requests.
    let file = Remote::File { filekey: FileKey(7), offset: 0 };
    let bitmap = Remote::Bitmap { filekey: FileKey(7), first_page: 0 };
    for op in [SendOp::WriteImm(file, 1), SendOp::Write(bitmap)] {
        let pair = pair_with(target.clone(), 42);
        pair.c().post_send(&[send(1, op, pair.client.put(0, b"bytes"))]).expect("post");
        assert_eq!(pair.client.next().status, WcStatus::RemoteInvalid);
    }
    assert_eq!(target.0.lock().expect("no panic").len(), 3);
}

/// A file of numbers that can be changed in place, and appended to. Operations on the last word of it, and appends of a single byte, fault first.
#[derive(Default)]
struct Numbers(Mutex<Vec<u8>>);

impl Numbers {
    const OWNER: RegionOwner = RegionOwner(42);
    const KEY: FileKey = FileKey(7);

    fn change(&self, offset: u64, operation: FileAtomic) -> Result<u64, WcStatus> {
        let mut bytes = self.0.lock().expect("no panic");
        let word = bytes.get_mut(offset as usize..offset as usize + 8).ok_or(WcStatus::RemoteAccess)?;
        let old = u64::from_le_bytes(word.try_into().expect("eight bytes"));
        word.copy_from_slice(&operation.apply(old).to_le_bytes());
        Ok(old)
    }

    fn append(&self, more: &[u8]) -> u64 {
        let mut bytes = self.0.lock().expect("no panic");
        bytes.extend_from_slice(more);
        (bytes.len() - more.len()) as u64
    }

    fn check(owner: RegionOwner, filekey: FileKey) -> Result<(), WcStatus> {
        if (owner, filekey) == (Self::OWNER, Self::KEY) { Ok(()) } else { Err(WcStatus::RemoteAccess) }
    }
}

impl FileTarget for Numbers {
    fn read_file(&self, _: RegionOwner, _: FileKey, _: u64, _: &mut [u8]) -> Result<FileRead, WcStatus> {
        Err(WcStatus::RemoteInvalid)
    }

    fn atomic_file(
        &self,
        owner: RegionOwner,
        filekey: FileKey,
        offset: u64,
        operation: FileAtomic,
    ) -> Result<FileValue, WcStatus> {
        Self::check(owner, filekey)?;
        if offset + 8 == self.0.lock().expect("no panic").len() as u64 {
            return Ok(FileValue::Faults);
        }
        self.change(offset, operation).map(FileValue::Done)
    }

    fn atomic_file_faulting(
        &self,
        _: RegionOwner,
        _: FileKey,
        offset: u64,
        operation: FileAtomic,
    ) -> Result<u64, WcStatus> {
        self.change(offset, operation)
    }

    fn append_file(&self, owner: RegionOwner, filekey: FileKey, bytes: &[u8]) -> Result<FileValue, WcStatus> {
        Self::check(owner, filekey)?;
        if bytes.len() == 1 { Ok(FileValue::Faults) } else { Ok(FileValue::Done(self.append(bytes))) }
    }

    fn append_file_faulting(&self, _: RegionOwner, _: FileKey, bytes: &[u8]) -> Result<u64, WcStatus> {
        if bytes == b"!" { Err(WcStatus::RemoteOperation) } else { Ok(self.append(bytes)) }
    }

    fn read_bitmap(&self, _: RegionOwner, _: FileKey, _: u64, _: &mut [u8]) -> Result<(), WcStatus> {
        Err(WcStatus::RemoteInvalid)
    }
}

/// Makes a request, and its local range.
type Make<'m> = &'m dyn Fn(&dyn MemoryRegion) -> (SendOp, Sge);

pub(super) fn files_are_changed_by_atomics_and_appends(link: LinkKind) {
    let target = Arc::new(Numbers::default());
    target.append(&[0; 24]);
    let new_pair = || {
        let pair = Pair::new(link);
        pair.server.device.set_file_target(target.clone());
        pair.s().set_region_owner(Numbers::OWNER);
        pair
    };
    let post = |pair: &Pair, op, local| {
        pair.c().post_send(&[send(1, op, local)]).expect("post");
        pair.client.next()
    };
    let file = |offset| Remote::File { filekey: Numbers::KEY, offset };
    let add = |offset| SendOp::FetchAdd { remote: file(offset), add: 5 };
    let swap = |offset, expect| SendOp::CompareSwap { remote: file(offset), expect, swap: 9 };
    let append = |pair: &Pair, at: u64, bytes: &[u8]| {
        let placed = pair.client.mr.sge(at, 8);
        let op = SendOp::Append { filekey: Numbers::KEY, placed };
        post(pair, op, pair.client.put(0, bytes))
    };
    let pair = new_pair();
    let word = || u64::from_le_bytes(pair.client.bytes(64, 8).try_into().expect("eight bytes"));
    if link == LinkKind::Shm {
        for op in [add(0), swap(0, 0)] {
            let pair = new_pair();
            assert_eq!(post(&pair, op, pair.client.mr.sge(64, 8)).status, WcStatus::RemoteInvalid);
        }
        assert_eq!(append(&new_pair(), 64, b"ab").status, WcStatus::RemoteInvalid);
        return;
    }
    let old = pair.client.mr.sge(64, 8);
    // The word at 16 is the last one, so these fault; the results are the same.
    for offset in [0, 16] {
        ok(post(&pair, add(offset), old), 1, CompletionKind::FetchAdd, 8);
        assert_eq!(word(), 0);
        ok(post(&pair, swap(offset, 4), old), 1, CompletionKind::CompareSwap, 8);
        assert_eq!(word(), 5);
        ok(post(&pair, swap(offset, 5), old), 1, CompletionKind::CompareSwap, 8);
        assert_eq!(word(), 5);
        ok(post(&pair, add(offset), old), 1, CompletionKind::FetchAdd, 8);
        assert_eq!(word(), 9);
    }
    // The offset lands where it is asked for, which may be in the bytes themselves.
    ok(append(&pair, 64, b"four"), 1, CompletionKind::Append, 4);
    assert_eq!(word(), 24);
    ok(append(&pair, 0, b"twelve bytes"), 1, CompletionKind::Append, 12);
    assert_eq!(pair.client.bytes(0, 12), [&28u64.to_le_bytes()[..], b"ytes"].concat());
    ok(append(&pair, 64, b"a"), 1, CompletionKind::Append, 1);
    assert_eq!(word(), 40);
    ok(append(&pair, 64, b""), 1, CompletionKind::Append, 0);
    assert_eq!(word(), 41);
    let whole = target.0.lock().expect("no panic").clone();
    assert_eq!(whole[24..], *b"fourtwelve bytesa");
    // One doorbell: an append that faults holds up the one behind it.
    let appends = [b"b".as_slice(), b"cd"].map(|bytes| {
        let at = 128 + 16 * bytes.len() as u64;
        let placed = pair.client.mr.sge(at + 8, 8);
        let op = SendOp::Append { filekey: Numbers::KEY, placed };
        send(bytes.len() as u64, op, pair.client.put(at, bytes))
    });
    pair.c().post_send(&appends).expect("post");
    ok(pair.client.next(), 1, CompletionKind::Append, 1);
    ok(pair.client.next(), 2, CompletionKind::Append, 2);
    assert_eq!(target.0.lock().expect("no panic")[41..], *b"bcd");
    let whole = target.0.lock().expect("no panic").clone();
    let refused = |make: Make<'_>, status| {
        let pair = new_pair();
        let (op, local) = make(&*pair.client.mr);
        assert_eq!(post(&pair, op, local).status, status, "{op:?}");
        assert_eq!(pair.c().state(), QpState::Error);
    };
    for op in [add(4), swap(4, 0), add(u64::MAX - 2)] {
        refused(&|mr| (op, mr.sge(64, 8)), WcStatus::RemoteInvalid);
    }
    refused(&|mr| (add(48), mr.sge(64, 8)), WcStatus::RemoteAccess);
    let foreign = Remote::File { filekey: FileKey(8), offset: 0 };
    refused(&|mr| (SendOp::FetchAdd { remote: foreign, add: 1 }, mr.sge(64, 8)), WcStatus::RemoteAccess);
    refused(&|mr| (add(0), mr.sge(64, 4)), WcStatus::LocalLength);
    let to = |filekey, placed| SendOp::Append { filekey: FileKey(filekey), placed };
    refused(&|mr| (to(8, mr.sge(64, 8)), mr.sge(0, 2)), WcStatus::RemoteAccess);
    refused(&|mr| (to(7, mr.sge(64, 7)), mr.sge(0, 2)), WcStatus::LocalLength);
    refused(&|mr| (to(7, Sge::EMPTY), mr.sge(0, 2)), WcStatus::LocalLength);
    let failing = new_pair();
    assert_eq!(append(&failing, 64, b"!").status, WcStatus::RemoteOperation);
    assert_eq!(*target.0.lock().expect("no panic"), whole, "what is refused changes nothing");
}

pub(super) fn files_are_read_by_the_engine(link: LinkKind) {
    let read = |pair: &Pair, remote, len| {
        pair.c().post_send(&[send(1, SendOp::Read(remote), pair.client.mr.sge(0, len))]).expect("post");
        pair.client.next()
    };
    let file = |filekey, offset| Remote::File { filekey: FileKey(filekey), offset };
    if link == LinkKind::Shm {
        let pair = Pair::new(link);
        assert_eq!(read(&pair, file(7, 0), 4096).status, WcStatus::RemoteInvalid);
        return;
    }
    let pair = Pair::new(link);
    pair.server.device.set_file_target(Arc::new(OneFile));
    pair.s().set_region_owner(RegionOwner(42));
    ok(read(&pair, file(7, 0), 4096), 1, CompletionKind::Read, 4096);
    assert_eq!(pair.client.bytes(0, 4096), [0x5a; 4096]);
    ok(read(&pair, file(7, 8192), 4096), 1, CompletionKind::Read, 1808);
    ok(read(&pair, file(7, 1 << 40), 4096), 1, CompletionKind::Read, 0);
    ok(read(&pair, Remote::Bitmap { filekey: FileKey(7), first_page: 16 }, 8), 1, CompletionKind::Read, 8);
    assert_eq!(pair.client.bytes(0, 8), [16; 8]);
    assert_eq!(read(&pair, file(8, 0), 4096).status, WcStatus::RemoteAccess);
    // Without a session (owner 0) every file is refused, and a bitmap must begin at a multiple of 8 pages.
    for (owner, remote, status) in [
        (0, file(7, 0), WcStatus::RemoteAccess),
        (42, Remote::Bitmap { filekey: FileKey(7), first_page: 3 }, WcStatus::RemoteInvalid),
    ] {
        let pair = Pair::new(link);
        pair.server.device.set_file_target(Arc::new(OneFile));
        pair.s().set_region_owner(RegionOwner(owner));
        assert_eq!(read(&pair, remote, 8).status, status);
    }
}

pub(super) fn windows_are_mapped_read_only(link: LinkKind) {
    let dir = tempfile::tempdir().expect("dir");
    let (client, server) = (Half::new(link, Access::ALL), Half::new(link, Access::ALL));
    let frames = Arc::new(SharedMemory::new("frames", 8192).expect("memory"));
    frames.write(0, b"frame");
    server.pd.export_window(WindowId::Frames, frames.clone());
    server.pd.export_window(WindowId::FileTable, Arc::new(SharedMemory::new("table", 4096).expect("memory")));
    let listener: Arc<dyn Listener> = Arc::from(server.pd.listen(&endpoint(link, &dir)).expect("listen"));
    let (_client_qp, _server_qp, windows) = join(&client, &server, &listener, 4, [vec![], vec![]]);
    if !has(link, Ability::MapsWindows, !windows.is_empty()) {
        return;
    }
    assert_eq!(windows.iter().map(|window| window.len()).collect::<Vec<_>>(), [8192, 4096]);
    let mapped = &windows[0];
    let mut bytes = [0; 5];
    mapped.read(0, &mut bytes);
    assert_eq!(&bytes, b"frame");
    assert!(!mapped.is_writable());
    // The descriptor itself forbids writing, whatever a client tries.
    let again = mapped.fd().try_clone_to_owned().expect("dup");
    assert!(SharedMemory::from_fd(again, 8192, true).is_err());
}
