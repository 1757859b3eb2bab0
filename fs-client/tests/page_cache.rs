//! How the kernel's page cache and writes that bypass it affect each other, on real mounts of the in-memory volume. The tests check that one write(2)
//! reaches the volume as one write, and that reads after a direct write return the bytes of that write.
//!
//! The tests need root and `/dev/fuse`: see `mount_memory`.

// Each test program uses a part of this module.
#[allow(dead_code)]
mod memory_volume;

use cuttlefs_client::fuse::FuseSettings;
use memory_volume::mount::Mount;
use rustix::fs::OFlags;
use std::fs::{self, File, OpenOptions};
use std::io::{IoSlice, Write};
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

const PAGE: usize = 4096;
/// How often a file is cut on another mount, and on the mount that reads it.
const ROUNDS: usize = 20;
const CUTS: usize = 60;
/// How long a test waits for an operation that it has started to reach the volume.
const PATIENCE: Duration = Duration::from_secs(20);

/// More threads than there are processors, until this is dropped: what waits for one may have to wait for long.
struct Busy(Arc<AtomicBool>);

impl Busy {
    fn new() -> Self {
        let is_over = Arc::new(AtomicBool::new(false));
        for _ in 0..4 {
            let is_over = is_over.clone();
            std::thread::spawn(move || {
                while !is_over.load(Ordering::Relaxed) {
                    std::hint::spin_loop();
                }
            });
        }
        Self(is_over)
    }
}

impl Drop for Busy {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

fn wait_for(what: &str, mut done: impl FnMut() -> bool) {
    let begun = Instant::now();
    while !done() {
        assert!(begun.elapsed() < PATIENCE, "{what}");
        std::thread::sleep(Duration::from_millis(2));
    }
}

#[test]
fn one_write_that_appends_is_one_write() {
    let Some(m) = Mount::new(FuseSettings::default()) else {
        return;
    };
    let path = m.path("log");
    let flags = [
        OpenOptions::new().append(true).create(true).clone(),
        OpenOptions::new().append(true).read(true).clone(),
    ];
    for options in flags {
        let mut log = options.open(&path).expect("open");
        // The file's last page is not cached: a write through the cache would send the part of the record in that page by itself.
        for len in [1, 100, PAGE - 1, PAGE, PAGE + 1, 10_000, 65_537, 300_001, (1 << 20) - PAGE] {
            // The source buffer does not start at a page boundary either.
            let memory = vec![7; len + 1];
            let before = m.volume.calls("write");
            assert_eq!(log.write(&memory[1..]).expect("append"), len);
            assert_eq!(m.volume.calls("write") - before, 1, "{len} bytes came in parts");
        }
        let part = [8; 100];
        let parts = vec![IoSlice::new(&part); 100];
        let before = m.volume.calls("write");
        assert_eq!(log.write_vectored(&parts).expect("writev"), 10_000);
        assert_eq!(m.volume.calls("write") - before, 1, "a record of many parts came in parts");
    }
    m.end();
}

#[test]
fn what_is_open_to_append_is_read_and_mapped_like_others() {
    let Some(m) = Mount::new(FuseSettings::default()) else {
        return;
    };
    fs::write(m.path("f"), vec![1; 3 * PAGE]).expect("write");
    let cached = File::open(m.path("f")).expect("open");
    let mut both = OpenOptions::new().append(true).read(true).open(m.path("f")).expect("open");
    let mut bytes = vec![0; 3 * PAGE + 5];
    assert_eq!(cached.read_at(&mut bytes, 0).expect("read"), 3 * PAGE);
    both.write_all(b"after").expect("append");
    assert_eq!(cached.read_at(&mut bytes, 0).expect("read"), 3 * PAGE + 5);
    assert_eq!(&bytes[3 * PAGE..], b"after");
    bytes.fill(0);
    assert_eq!(both.read_at(&mut bytes, 0).expect("read"), 3 * PAGE + 5);
    assert_eq!((&bytes[3 * PAGE..], bytes[0]), (&b"after"[..], 1));
    drop((cached, both));
    m.end();
}

/// Asynchronous IO by `linux/aio_abi.h`.
struct Aio(libc::c_ulong);

/// A page of memory, aligned as O_DIRECT requires.
#[repr(align(4096))]
struct Page([u8; PAGE]);

impl Aio {
    fn new() -> Self {
        let mut context: libc::c_ulong = 0;
        // SAFETY: the kernel writes the context.
        let result = unsafe { libc::syscall(libc::SYS_io_setup, 8, &raw mut context) };
        assert_eq!(result, 0, "io_setup");
        Self(context)
    }

    /// Submits a write of a page. The page must live until `wait` returns.
    fn write(&self, file: &File, page: &Page, offset: u64) {
        const IOCB_CMD_PWRITE: u64 = 1;
        let descriptor = u64::from(file.as_raw_fd().cast_unsigned()) << 32;
        // data; key, rw_flags; opcode, priority, descriptor; buffer; bytes; offset; reserved; flags, resfd.
        let block: [u64; 8] =
            [0, 0, IOCB_CMD_PWRITE | descriptor, page.0.as_ptr().addr() as u64, PAGE as u64, offset, 0, 0];
        let blocks = [&raw const block];
        // SAFETY: one whole request, whose memory stays until it is done.
        let result = unsafe { libc::syscall(libc::SYS_io_submit, self.0, 1, blocks.as_ptr()) };
        assert_eq!(result, 1, "io_submit");
    }

    /// Waits for the end of one write.
    fn wait(&self) {
        let mut event = [0u64; 4];
        let no_limit = std::ptr::null_mut::<libc::timespec>();
        // SAFETY: the kernel writes one event.
        let result =
            unsafe { libc::syscall(libc::SYS_io_getevents, self.0, 1, 1, event.as_mut_ptr(), no_limit) };
        assert_eq!((result, event[2]), (1, PAGE as u64), "io_getevents");
    }
}

impl Drop for Aio {
    fn drop(&mut self) {
        // SAFETY: nobody uses the context after this.
        unsafe { libc::syscall(libc::SYS_io_destroy, self.0) };
    }
}

/// How the file is read while a write to it is under way.
#[derive(Clone, Copy, Debug)]
enum Look {
    /// Opens the file, reads and closes it.
    OpenReadClose,
    /// Reads through a descriptor that was open before the write.
    Read,
    /// Reads through a mapping of a descriptor that is open with O_DIRECT.
    DirectMapping,
}

/// How the writer's descriptor became one that bypasses the cache.
#[derive(Clone, Copy, Debug)]
enum Direct {
    /// Opened with O_DIRECT.
    Opened,
    /// O_DIRECT was set by fcntl(2).
    Changed,
}

fn first_byte(file: &File) -> u8 {
    let mut byte = [0];
    file.read_exact_at(&mut byte, 0).expect("read");
    byte[0]
}

#[test]
fn regression_a_page_read_while_an_asynchronous_direct_write_is_under_way_is_not_kept() {
    use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};
    let Some(m) = Mount::new(FuseSettings::default()) else {
        return;
    };
    let path = m.path("f");
    fs::write(&path, vec![1; PAGE]).expect("write");
    let aio = Aio::new();
    for direct in [Direct::Opened, Direct::Changed] {
        for look in [Look::OpenReadClose, Look::Read, Look::DirectMapping] {
            let mut options = OpenOptions::new();
            options.read(true).write(true);
            let writer = match direct {
                Direct::Opened => options.custom_flags(libc::O_DIRECT).open(&path).expect("O_DIRECT"),
                Direct::Changed => {
                    let writer = options.open(&path).expect("open");
                    rustix::fs::fcntl_setfl(&writer, OFlags::DIRECT).expect("F_SETFL");
                    writer
                }
            };
            let mut options = OpenOptions::new();
            let mapped =
                options.read(true).write(true).custom_flags(libc::O_DIRECT).open(&path).expect("open");
            let open = matches!(look, Look::Read).then(|| File::open(&path).expect("open"));
            for value in 2..5u8 {
                let page = Box::new(Page([value; PAGE]));
                m.volume.hold(Some("write"));
                let writes = m.volume.calls("write");
                aio.write(&writer, &page, 0);
                wait_for("the write arrives", || m.volume.calls("write") > writes);
                // A read during the write may return old or new bytes, but the kernel must not keep the old ones.
                match look {
                    Look::OpenReadClose => {
                        first_byte(&File::open(&path).expect("open"));
                    }
                    Look::Read => {
                        open.as_ref().map(first_byte);
                    }
                    Look::DirectMapping => {
                        let protection = ProtFlags::READ | ProtFlags::WRITE;
                        // SAFETY: a fresh mapping of a file that nobody truncates.
                        unsafe {
                            let map =
                                mmap(std::ptr::null_mut(), PAGE, protection, MapFlags::SHARED, &mapped, 0)
                                    .expect("mmap");
                            map.cast::<u8>().read_volatile();
                            munmap(map, PAGE).expect("munmap");
                        }
                    }
                }
                m.volume.hold(None);
                aio.wait();
                for file in open.iter().chain([&File::open(&path).expect("open")]) {
                    assert_eq!(first_byte(file), value, "{look:?} beside a writer that is {direct:?}");
                }
            }
        }
    }
    m.end();
}

#[test]
fn direct_writes_without_cached_readers_are_answered_at_once_and_readers_are_noticed_again() {
    let Some(m) = Mount::new(FuseSettings::default()) else {
        return;
    };
    let path = m.path("f");
    fs::write(&path, vec![1; PAGE]).expect("write");
    let writer = OpenOptions::new().write(true).custom_flags(libc::O_DIRECT).open(&path).expect("O_DIRECT");
    // In each round more writes than the mount sees before it forgets the file as a whole.
    for round in 0..5u8 {
        for value in 0..40u8 {
            writer.write_all_at(&Box::new(Page([value ^ round; PAGE])).0, 0).expect("write");
        }
        assert_eq!(first_byte(&File::open(&path).expect("open")), 39 ^ round);
        assert_eq!(first_byte(&File::open(&path).expect("open")), 39 ^ round);
    }
    drop(writer);
    m.end();
}

/// Reads a file on in parts of 128 KiB; returns the place of the first zero.
fn first_zero(file: &File, mut offset: u64) -> Option<u64> {
    let mut part = vec![0; 128 << 10];
    loop {
        let len = file.read_at(&mut part, offset).expect("read");
        if len == 0 {
            return None;
        }
        if let Some(at) = part[..len].iter().position(|byte| *byte == 0) {
            return Some(offset + at as u64);
        }
        offset += len as u64;
    }
}

#[test]
fn a_file_that_was_made_shorter_elsewhere_reads_no_zeros() {
    let settings = FuseSettings { readahead_bytes: 128 << 10, ..FuseSettings::default() };
    let Some(reader) = Mount::new(settings.clone()) else {
        return;
    };
    let writer = Mount::of(Arc::clone(&reader.volume), settings);
    reader.volume.tell_ends_late();
    let mut zeros = Vec::new();
    for round in 0..ROUNDS {
        let name = format!("f{round}");
        fs::write(writer.path(&name), vec![7; 1 << 20]).expect("write");
        let file = File::open(reader.path(&name)).expect("open");
        file.read_exact_at(&mut [0; PAGE], 0).expect("the first page");
        OpenOptions::new().write(true).open(writer.path(&name)).expect("open").set_len(300_000).expect("cut");
        zeros.extend(first_zero(&file, PAGE as u64));
    }
    assert!(zeros.is_empty(), "zeros in {} of {ROUNDS} rounds, at {zeros:?}", zeros.len());
    reader.end();
    writer.end();
}

#[test]
fn a_file_that_is_being_cut_reads_no_zeros() {
    let Some(m) = Mount::new(FuseSettings { readahead_bytes: 128 << 10, ..FuseSettings::default() }) else {
        return;
    };
    // The kernel itself zeroes the rest of the last page beside its readers, so the file is cut between two pages.
    const CUT: u64 = 73 * PAGE as u64;
    let file = OpenOptions::new().read(true).write(true).create_new(true).open(m.path("f")).expect("create");
    file.write_all_at(&vec![1; 1 << 20], 0).expect("write");
    m.volume.tell_ends_late();
    let is_done = AtomicBool::new(false);
    let mut zeros = Vec::new();
    let mut passes = 0;
    std::thread::scope(|scope| {
        let cutter = scope.spawn(|| {
            for round in 0..CUTS {
                file.set_len(CUT).expect("cut");
                file.write_all_at(&vec![1 + (round % 255) as u8; 1 << 20], 0).expect("write");
            }
            is_done.store(true, Ordering::Release);
        });
        let reader = File::open(m.path("f")).expect("open");
        while !is_done.load(Ordering::Acquire) {
            // Otherwise it would read what the cutter has written, out of the page cache.
            rustix::fs::fadvise(&reader, 0, None, rustix::fs::Advice::DontNeed).expect("forget pages");
            zeros.extend(first_zero(&reader, 0));
            passes += 1;
        }
        cutter.join().expect("the cutter");
    });
    assert!(zeros.is_empty(), "zeros in {} of {passes} passes, at {zeros:?}", zeros.len());
    drop(file);
    m.end();
}

fn settings_with(attr_cache: Duration) -> FuseSettings {
    FuseSettings { attr_cache, ..FuseSettings::default() }
}

/// Two mounts of one volume.
fn two(attr_cache: Duration) -> Option<(Mount, Mount)> {
    let one = Mount::new(settings_with(attr_cache))?;
    let two = Mount::of(Arc::clone(&one.volume), settings_with(attr_cache));
    Some((one, two))
}

fn overwrite(path: impl AsRef<std::path::Path>, value: u8) {
    OpenOptions::new().write(true).open(path).expect("open").write_all_at(&[value; PAGE], 0).expect("write");
}

#[test]
fn a_mount_s_own_changes_cost_no_pages() {
    const PAGES: usize = 16;
    let Some(m) = Mount::new(FuseSettings { readahead_bytes: 0, ..FuseSettings::default() }) else {
        return;
    };
    fs::write(m.path("f"), vec![1; PAGES * PAGE]).expect("write");
    let file = OpenOptions::new().read(true).write(true).open(m.path("f")).expect("open");
    let mut bytes = vec![0; PAGES * PAGE];
    file.read_exact_at(&mut bytes, 0).expect("read");
    let reads = m.volume.calls("read");
    for round in 0..60u8 {
        let page = usize::from(round) % PAGES;
        file.write_all_at(&[round; PAGE], (page * PAGE) as u64).expect("write");
        if round % 10 == 0 {
            file.set_permissions(std::os::unix::fs::PermissionsExt::from_mode(0o600 + u32::from(round % 7)))
                .expect("chmod");
            fs::rename(m.path("f"), m.path("g")).expect("rename");
            fs::rename(m.path("g"), m.path("f")).expect("rename");
        }
        let again = File::open(m.path("f")).expect("open");
        for file in [&file, &again] {
            file.metadata().expect("stat");
            file.read_exact_at(&mut bytes, 0).expect("read");
            assert_eq!(bytes[page * PAGE], round);
        }
    }
    assert_eq!(m.volume.calls("read"), reads, "all of it was in the page cache");
    drop(file);
    m.end();
}

#[test]
fn a_file_that_stays_open_shows_changes_of_other_mounts() {
    let Some((reader, writer)) = two(Duration::from_millis(100)) else {
        return;
    };
    fs::write(reader.path("f"), [1; PAGE]).expect("write");
    let file = File::open(reader.path("f")).expect("open");
    for value in 2..8 {
        first_byte(&file);
        overwrite(writer.path("f"), value);
        wait_for("the change shows", || first_byte(&file) == value);
    }
    drop(file);
    reader.end();
    writer.end();
}

#[test]
fn bytes_are_no_older_than_the_attributes_before() {
    let Some((reader, writer)) = two(Duration::from_millis(100)) else {
        return;
    };
    fs::write(reader.path("f"), [1; PAGE]).expect("write");
    let file = File::open(reader.path("f")).expect("open");
    let changed = |metadata: fs::Metadata| metadata.modified().expect("a time");
    for value in 2..20 {
        first_byte(&file);
        let before = changed(file.metadata().expect("stat"));
        overwrite(writer.path("f"), value);
        // By the descriptor, and by the name.
        let look = || if value % 2 == 0 { file.metadata() } else { fs::metadata(reader.path("f")) };
        wait_for("the time shows", || changed(look().expect("stat")) != before);
        assert_eq!(first_byte(&file), value);
    }
    drop(file);
    reader.end();
    writer.end();
}

#[test]
fn all_who_open_a_file_at_a_time_see_what_was_closed_before() {
    let Some((reader, writer)) = two(Duration::from_secs(1)) else {
        return;
    };
    fs::write(reader.path("f"), [1; PAGE]).expect("write");
    let pages = File::open(reader.path("f")).expect("open");
    for round in 0..300u32 {
        let value = (round % 250) as u8 + 2;
        // So that there are pages to forget.
        first_byte(&pages);
        overwrite(writer.path("f"), value);
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    let file = File::open(reader.path("f")).expect("open");
                    assert_eq!(first_byte(&file), value, "round {round}");
                });
            }
        });
    }
    drop(pages);
    reader.end();
    writer.end();
}

#[test]
fn without_cached_attributes_each_read_asks() {
    let Some((reader, writer)) = two(Duration::ZERO) else {
        return;
    };
    fs::write(reader.path("f"), [1; PAGE]).expect("write");
    let file = File::open(reader.path("f")).expect("open");
    for round in 2..1000u32 {
        let value = (round % 250) as u8;
        overwrite(writer.path("f"), value);
        assert_eq!(first_byte(&file), value, "round {round}");
    }
    drop(file);
    reader.end();
    writer.end();
}

/// How long programs race.
const RACE: Duration = Duration::from_secs(4);

/// Writers read the page that they have just written, while others read and open the file, and look at it: each sees its own writes, at once and at the end.
#[test]
fn a_program_reads_what_it_has_written() {
    const WRITERS: usize = 3;
    let Some(m) = Mount::new(FuseSettings::default()) else {
        return;
    };
    let another = Mount::of(Arc::clone(&m.volume), FuseSettings::default());
    fs::write(m.path("f"), vec![0; (WRITERS + 1) * PAGE]).expect("write");
    let is_done = AtomicBool::new(false);
    let written: Vec<(u64, u64)> = std::thread::scope(|scope| {
        let writers: Vec<_> = (0..WRITERS)
            .map(|writer| {
                let file = OpenOptions::new().read(true).write(true).open(m.path("f")).expect("open");
                let at = (writer * PAGE) as u64;
                let is_done = &is_done;
                scope.spawn(move || {
                    let (mut count, mut stale, mut bytes) = (0u64, 0, [0; 8]);
                    while !is_done.load(Ordering::Acquire) {
                        count += 1;
                        file.write_all_at(&count.to_ne_bytes(), at + (count % 500) * 8).expect("write");
                        file.read_exact_at(&mut bytes, at + (count % 500) * 8).expect("read");
                        stale += u64::from(u64::from_ne_bytes(bytes) != count);
                    }
                    (count, stale)
                })
            })
            .collect();
        scope.spawn(|| {
            let mut bytes = vec![0; (WRITERS + 1) * PAGE];
            while !is_done.load(Ordering::Acquire) {
                let file = File::open(m.path("f")).expect("open");
                file.read_exact_at(&mut bytes, 0).expect("read");
                file.metadata().expect("stat");
            }
        });
        scope.spawn(|| {
            // Another mount changes the file now and then, so that pages are forgotten.
            while !is_done.load(Ordering::Acquire) {
                let file = OpenOptions::new().write(true).open(another.path("f")).expect("open");
                file.write_all_at(&[1; PAGE], (WRITERS * PAGE) as u64).expect("write");
                std::thread::sleep(Duration::from_millis(10));
            }
        });
        std::thread::sleep(RACE);
        is_done.store(true, Ordering::Release);
        writers.into_iter().map(|writer| writer.join().expect("the writer")).collect()
    });
    let stale: u64 = written.iter().map(|(_, stale)| stale).sum();
    assert_eq!(stale, 0, "stale reads, of {written:?} writes");
    // What the kernel keeps is what the volume has.
    let kept = File::open(m.path("f")).expect("open");
    let mut bytes = [[0; PAGE]; 2];
    for page in 0..WRITERS {
        kept.read_exact_at(&mut bytes[0], (page * PAGE) as u64).expect("read");
        let there = File::open(another.path("f")).expect("open");
        there.read_exact_at(&mut bytes[1], (page * PAGE) as u64).expect("read");
        assert!(bytes[0] == bytes[1], "page {page} of the file is another one in the page cache");
    }
    drop(kept);
    m.end();
    another.end();
}

/// The length of a file. The kernel asks for it now.
fn asked_len(file: &File) -> u64 {
    use rustix::fs::{AtFlags, StatxFlags, statx};
    let flags = AtFlags::EMPTY_PATH | AtFlags::STATX_FORCE_SYNC;
    statx(file, "", flags, StatxFlags::SIZE).expect("statx").stx_size
}

/// The kernel takes no attributes when pages were forgotten meanwhile: it would have the old length, and a mapping up to the told one would fault.
#[test]
fn regression_a_length_that_another_mount_has_made_is_the_kernel_s_when_it_is_told() {
    use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap, munmap};
    // No look at open files comes in between, which forgets pages, too.
    let Some((reader, writer)) = two(Duration::from_secs(3600)) else {
        return;
    };
    fs::write(writer.path("f"), [1; 100]).expect("write");
    let file = File::open(reader.path("f")).expect("open");
    let mut known = asked_len(&file);
    let log = OpenOptions::new().write(true).open(writer.path("f")).expect("open");
    let _busy = Busy::new();
    for round in 0..300 {
        // So that there are pages to forget.
        first_byte(&file);
        log.write_all_at(&[1; 5000], known).expect("write");
        known += 5000;
        assert_eq!(asked_len(&file), known);
        let page = (known - 1) / PAGE as u64 * PAGE as u64;
        // SAFETY: a fresh mapping of a file that nobody makes shorter, read within its length.
        let byte = unsafe {
            let map = mmap(std::ptr::null_mut(), PAGE, ProtFlags::READ, MapFlags::SHARED, &file, page)
                .expect("mmap");
            madvise(map, PAGE, Advice::LinuxPopulateRead).unwrap_or_else(|error| {
                panic!("round {round}: a read of the mapping would have been a fault: {error}")
            });
            let byte = map.cast::<u8>().add(((known - 1) % PAGE as u64) as usize).read_volatile();
            munmap(map, PAGE).expect("munmap");
            byte
        };
        assert_eq!(byte, 1, "round {round}");
    }
    drop((file, log));
    reader.end();
    writer.end();
}

/// The thread that is told a length may have to wait for a processor. If pages are forgotten meanwhile, the kernel does not take the length, and would
/// read what it has up to the old one.
#[test]
fn regression_behind_a_shorter_length_there_is_nothing_to_read() {
    const LEN: usize = 4 << 20;
    let Some((reader, writer)) = two(Duration::from_secs(1)) else {
        return;
    };
    let _busy = Busy::new();
    for round in 0..200 {
        let name = format!("f{round}");
        fs::write(reader.path(&name), vec![1; LEN]).expect("write");
        let file = File::open(reader.path(&name)).expect("open");
        let cut = OpenOptions::new().write(true).open(writer.path(&name)).expect("open");
        cut.set_len(LEN as u64 / 2).expect("cut");
        assert_eq!(asked_len(&file), LEN as u64 / 2);
        assert_eq!(file.read_at(&mut [0; 100], LEN as u64 / 2).expect("read"), 0, "round {round}");
        fs::remove_file(reader.path(&name)).expect("remove");
    }
    reader.end();
    writer.end();
}

/// A sparse copy asks where the data is.
#[test]
fn what_is_stored_through_a_mapping_is_data_before_it_is_written_back() {
    use rustix::fs::SeekFrom;
    use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};
    const PAGES: u64 = 16;
    let Some(m) = Mount::new(FuseSettings::default()) else {
        return;
    };
    let file = OpenOptions::new().read(true).write(true).create_new(true).open(m.path("f")).expect("create");
    file.set_len(PAGES * PAGE as u64).expect("longer");
    let stored = 5 * PAGE as u64;
    // SAFETY: a fresh mapping of a page of a file that nobody makes shorter.
    unsafe {
        let protection = ProtFlags::READ | ProtFlags::WRITE;
        let map =
            mmap(std::ptr::null_mut(), PAGE, protection, MapFlags::SHARED, &file, stored).expect("mmap");
        map.cast::<u8>().write_volatile(7);
        let found = rustix::fs::seek(File::open(m.path("f")).expect("open"), SeekFrom::Data(0));
        assert_eq!(found, Ok(stored));
        munmap(map, PAGE).expect("munmap");
    }
    drop(file);
    m.end();
}
