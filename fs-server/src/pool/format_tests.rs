//! Formats and opens real directories.

use super::*;
use crate::pool::{PoolDirectory, open};
use std::cell::Cell;
use std::process::Command;
use std::time::Duration;

const SIZE: u64 = 8 << 20;
/// Length of a data file: the superblock, the pages and two blocks of sums.
const FILE_BYTES: u64 = DATA_START + SIZE + 2 * PAGE_SIZE_U64;

fn options(dir: &Path) -> FormatOptions {
    FormatOptions { dir: dir.join("pool"), size: SIZE, ..FormatOptions::default() }
}

/// Formats a pool, with a small file as its metadata.
fn format(options: &FormatOptions) -> Result<FormatReport, PoolError> {
    super::format(options, &metadata)
}

fn metadata(dir: &Path, uuid: PoolUuid) -> Result<(), Box<dyn std::error::Error + Send + Sync>> {
    Ok(fs::write(dir.join("records"), uuid.to_string())?)
}

fn temporary() -> tempfile::TempDir {
    tempfile::tempdir().expect("a temporary directory")
}

fn patch(path: &Path, at: u64, bytes: &[u8]) {
    let file = OpenOptions::new().write(true).open(path).expect("open");
    file.write_all_at(bytes, at).expect("write");
}

/// Everything in the pool's directory but the lock, as bytes.
fn snapshot(dir: &Path) -> Vec<(PathBuf, Vec<u8>)> {
    let mut files = Vec::new();
    for entry in fs::read_dir(dir).expect("list") {
        let path = entry.expect("entry").path();
        if path.is_dir() {
            files.extend(snapshot(&path));
        } else if !path.ends_with("lock") {
            files.push((path.clone(), fs::read(&path).expect("read")));
        }
    }
    files.sort();
    files
}

fn open_error(dir: &Path) -> PoolError {
    open(&dir.join("pool")).expect_err("it must not open")
}

#[test]
fn a_pool_is_made_and_opened() {
    let dir = temporary();
    let options = options(dir.path());
    let report = format(&options).expect("formatted");
    assert_eq!((report.pages, report.replaced), (SIZE / PAGE_SIZE_U64, false));
    let pool: PoolDirectory = open(&options.dir).expect("opened");
    assert_eq!((pool.pages(), pool.uuid()), (report.pages, report.uuid));
    assert_eq!(pool.config().pool.data, [PathBuf::from("data")]);
    assert!(pool.meta_dir().is_dir());
    let data = fs::metadata(options.dir.join("data")).expect("there");
    assert_eq!(data.len(), FILE_BYTES);
    use std::os::unix::fs::MetadataExt;
    assert!(data.blocks() * 512 >= SIZE, "space is reserved");
    assert_eq!(data.mode() & 0o077, 0, "others cannot read the data");
    drop(pool);
    // The directory can move: the data file is named relative to it.
    let moved = dir.path().join("moved");
    fs::rename(&options.dir, &moved).expect("renamed");
    open(&moved).expect("opened at its new place");
}

#[test]
fn a_pool_behind_a_link_names_its_data_file_relative_to_itself() {
    let dir = temporary();
    fs::create_dir(dir.path().join("real")).expect("made");
    std::os::unix::fs::symlink(dir.path().join("real"), dir.path().join("link")).expect("linked");
    let options = options(&dir.path().join("link"));
    format(&options).expect("formatted");
    let pool = open(&options.dir).expect("opened");
    assert_eq!(pool.config().pool.data, [PathBuf::from("data")]);
    drop(pool);
    // A data file that cannot be made is noticed before the old pool is destroyed.
    let before = snapshot(&options.dir);
    let data = vec![dir.path().join("nowhere/data")];
    let forced = FormatOptions { data, force: true, ..options.clone() };
    assert!(matches!(format(&forced), Err(PoolError::Io { .. })));
    assert_eq!(snapshot(&options.dir), before);
}

#[test]
fn what_is_no_file_in_the_place_of_one_is_refused_at_once() {
    use crate::pool::{Intent, open_to};
    let dir = temporary();
    let options = options(dir.path());
    format(&options).expect("formatted");
    let foreign = dir.path().join("foreign");
    fs::write(&foreign, "foreign").expect("written");
    for name in [CONFIG_FILE, LOCK_FILE] {
        let (path, aside) = (options.dir.join(name), dir.path().join("aside"));
        fs::rename(&path, &aside).expect("moved");
        let mode = rustix::fs::Mode::RUSR | rustix::fs::Mode::WUSR;
        rustix::fs::mknodat(rustix::fs::CWD, &path, rustix::fs::FileType::Fifo, mode, 0).expect("a pipe");
        open_error(dir.path());
        // A pipe as the lock harms nobody who only looks.
        let looked = open_to(&options.dir, Intent::Look);
        assert!(looked.is_err() || name == LOCK_FILE);
        fs::remove_file(&path).expect("removed");
        let target = if name == LOCK_FILE { foreign.as_path() } else { Path::new("/dev/zero") };
        std::os::unix::fs::symlink(target, &path).expect("linked");
        open_error(dir.path());
        assert!(open_to(&options.dir, Intent::Look).is_err());
        fs::remove_file(&path).expect("removed");
        fs::rename(&aside, &path).expect("back");
    }
    open(&options.dir).expect("opened");
    assert_eq!(fs::read_to_string(&foreign).expect("read"), "foreign");
}

#[test]
fn several_data_files_follow_one_another() {
    let dir = temporary();
    let data: Vec<PathBuf> = (0..3).map(|index| dir.path().join(format!("disk{index}"))).collect();
    // The second file exists and is empty, the third is full of zeros.
    File::create(&data[1]).expect("made");
    fs::write(&data[2], vec![0; 300_000]).expect("made");
    let options = FormatOptions { size: SIZE + 4096, data: data.clone(), ..options(dir.path()) };
    let report = format(&options).expect("formatted");
    let pages: Vec<u64> = report.data.iter().map(|(_, pages)| *pages).collect();
    assert_eq!((pages, report.pages), (vec![683, 683, 683], 2049));
    let pool = open(&options.dir).expect("opened");
    let files = pool.data_files();
    assert_eq!(files.files()[2].first_page(), 1366);
    assert_eq!(files.locate(1366 * 4096).map(|place| (place.file, place.file_offset)), Some((2, DATA_START)));
    drop(pool);

    // A data file may be missing, swapped with another, or of another pool.
    fs::rename(&data[1], dir.path().join("away")).expect("renamed");
    let error = open_error(dir.path());
    assert!(matches!(&error, PoolError::MissingDevice { index: 1, path } if *path == data[1]), "{error}");
    fs::copy(&data[0], &data[1]).expect("copied");
    assert!(matches!(open_error(dir.path()), PoolError::WrongDataFile { index: 1, .. }));
    let other = FormatOptions { dir: dir.path().join("other"), size: SIZE, ..FormatOptions::default() };
    format(&other).expect("formatted");
    fs::copy(other.dir.join("data"), &data[1]).expect("copied");
    let error = open_error(dir.path()).to_string();
    assert!(error.contains("belongs to pool") && error.contains("disk1"), "{error}");
    fs::rename(dir.path().join("away"), &data[1]).expect("renamed");
    open(&options.dir).expect("whole again");

    let twice = FormatOptions { data: vec![data[0].clone(), data[0].clone()], force: true, ..options };
    assert!(matches!(format(&twice), Err(PoolError::NamedTwice(_) | PoolError::InUse { .. })));
}

#[test]
fn a_pool_is_not_destroyed_without_force() {
    let dir = temporary();
    let mut options = options(dir.path());
    let first = format(&options).expect("formatted");
    fs::write(options.dir.join("meta/tree"), b"precious").expect("written");
    let before = snapshot(&options.dir);
    let error = format(&options).expect_err("a pool is there");
    assert!(matches!(error, PoolError::AlreadyThere { .. }));
    assert!(error.to_string().contains("a pool is already there"), "{error}");
    // The data file is recognized from another pool directory as well.
    let data = vec![options.dir.join("data")];
    let elsewhere = FormatOptions { dir: dir.path().join("b"), data, ..options.clone() };
    let error = format(&elsewhere).expect_err("the data file is another pool's");
    assert!(error.to_string().contains(&first.uuid.to_string()), "{error}");
    assert_eq!(snapshot(&options.dir), before, "what was refused was not changed");

    options.force = true;
    let open_pool = open(&options.dir).expect("opened");
    assert!(matches!(format(&options), Err(PoolError::InUse { .. })), "not even with force");
    drop(open_pool);
    let second = format(&options).expect("forced");
    assert!(second.replaced && second.uuid != first.uuid);
    assert!(!options.dir.join("meta/tree").exists());
    open(&options.dir).expect("opened");
}

#[test]
fn other_peoples_files_are_not_destroyed() {
    let dir = temporary();
    let image = dir.path().join("image");
    let mut bytes = vec![0; 200_000];
    bytes[1080..1082].copy_from_slice(&[0x53, 0xef]);
    fs::write(&image, &bytes).expect("written");
    let mut with_image = FormatOptions { data: vec![image.clone()], ..options(dir.path()) };
    let error = format(&with_image).expect_err("a file system is there").to_string();
    assert!(error.contains("ext4") && error.contains("--force"), "{error}");
    fs::write(&image, b"a letter").expect("written");
    assert!(matches!(format(&with_image), Err(PoolError::Occupied { .. })));
    assert_eq!(fs::read(&image).expect("read"), b"a letter");
    with_image.force = true;
    format(&with_image).expect("forced");

    // A `meta` directory without a pool is somebody's own: format leaves it alone even with `force`.
    let mut var = FormatOptions { dir: dir.path().join("var"), force: true, ..options(dir.path()) };
    fs::create_dir_all(var.dir.join("meta")).expect("made");
    fs::write(var.dir.join("meta/letter"), b"x").expect("written");
    assert!(matches!(format(&var), Err(PoolError::ForeignDirectory(_))));
    assert!(var.dir.join("meta/letter").exists());
    var.dir = dir.path().to_owned();
    var.data = vec![dir.path().join("var")];
    let directory = format(&var).expect_err("a directory").to_string();
    assert!(directory.contains("name a file in it") && directory.ends_with("var/data"), "{directory}");
    var.data = vec!["/dev/null".into()];
    assert!(matches!(format(&var), Err(PoolError::WrongKind(_))));
    let on_a_file = FormatOptions { dir: image.clone(), ..var };
    let refused = format(&on_a_file).expect_err("a file").to_string();
    assert!(refused.contains("is a file; a pool is a directory"), "{refused}");
}

#[test]
fn sizes_that_cannot_be_are_refused() {
    let dir = temporary();
    for size in [0, 4096, LEAST_FILE_BYTES - 1, u64::MAX, i64::MAX as u64, (64 << 40) + 4096] {
        let options = FormatOptions { size, ..options(dir.path()) };
        assert!(matches!(format(&options), Err(PoolError::Size(_))), "{size}");
        assert!(!options.dir.join("data").exists());
    }
    let huge = FormatOptions { size: 64 << 40, ..options(dir.path()) };
    let error = format(&huge).expect_err("no disk here has so much");
    assert!(matches!(error, PoolError::NoRoom { .. }), "{error}");
    assert!(!huge.dir.join("data").exists(), "half a file is not left behind");
    format(&options(dir.path())).expect("smaller, and no force needed");
    open(&options(dir.path()).dir).expect("opened");
}

/// Names of all that is in a directory and below.
fn names(dir: &Path) -> Vec<PathBuf> {
    let mut all = Vec::new();
    for entry in fs::read_dir(dir).expect("list") {
        let path = entry.expect("entry").path();
        if path.is_dir() {
            all.extend(names(&path));
        }
        all.push(path);
    }
    all.sort();
    all
}

#[test]
fn a_refused_format_leaves_nothing_behind() {
    let dir = temporary();
    let occupied = dir.path().join("letter");
    fs::write(&occupied, b"a letter").expect("written");
    let foreign = dir.path().join("foreign");
    fs::create_dir_all(foreign.join("meta")).expect("made");
    fs::write(foreign.join("meta/letter"), b"x").expect("written");
    let other = FormatOptions { dir: dir.path().join("other"), ..options(dir.path()) };
    format(&other).expect("a pool");
    let before = names(dir.path());
    let new = FormatOptions { dir: dir.path().join("a/b/pool"), size: SIZE, ..FormatOptions::default() };
    let data = |files: &[&Path]| files.iter().map(|file| dir.path().join(file)).collect::<Vec<_>>();
    let refused = [
        FormatOptions { size: 0, ..new.clone() },
        FormatOptions { size: LEAST_FILE_BYTES - 1, ..new.clone() },
        FormatOptions { size: u64::MAX, ..new.clone() },
        FormatOptions { size: 64 << 40, ..new.clone() },
        FormatOptions { data: vec![occupied], ..new.clone() },
        FormatOptions { data: data(&["foreign".as_ref()]), ..new.clone() },
        FormatOptions { data: data(&["nowhere/data".as_ref()]), ..new.clone() },
        FormatOptions { data: data(&["one".as_ref(), "one".as_ref()]), ..new.clone() },
        FormatOptions { data: data(&["other/data".as_ref()]), ..new.clone() },
        FormatOptions { data: vec!["/dev/null".into()], ..new.clone() },
        // A directory that is there, and one that cannot be made.
        FormatOptions { dir: foreign, ..new.clone() },
        FormatOptions { dir: dir.path().join("letter/pool"), ..new.clone() },
        FormatOptions { dir: dir.path().join("letter"), ..new.clone() },
        other.clone(),
    ];
    for options in refused {
        let error = format(&options).expect_err("it cannot be");
        assert_eq!(names(dir.path()), before, "{error}");
    }
    open(&other.dir).expect("as it was");
    format(&new).expect("and it can be made");
    open(&new.dir).expect("opened");
}

/// A refused format takes its lock file away. Who waited for that lock gets the lock of the file that is there.
#[test]
fn a_lock_is_of_the_file_that_is_there() {
    let dir = temporary();
    let options = options(dir.path());
    format(&options).expect("formatted");
    let path = options.dir.join("lock");
    let opened = loop {
        let held = OpenOptions::new().write(true).create(true).truncate(true).open(&path).expect("opened");
        rustix::fs::flock(&held, rustix::fs::FlockOperation::LockExclusive).expect("locked");
        let opened = std::thread::scope(|scope| {
            let waiting = scope.spawn(|| open(&options.dir));
            // So that it waits by now, most likely.
            std::thread::sleep(Duration::from_millis(20));
            fs::remove_file(&path).expect("removed");
            drop(held);
            waiting.join().expect("no panic")
        });
        match opened {
            // Its patience was over before: this machine is busy.
            Err(PoolError::InUse { .. }) => {}
            opened => break opened.expect("opened"),
        }
    };
    assert!(matches!(open(&options.dir), Err(PoolError::InUse { .. })), "the lock is held");
    drop(opened);
}

#[test]
fn what_does_not_fit_destroys_nothing() {
    let dir = temporary();
    let made = options(dir.path());
    format(&made).expect("a pool");
    let huge = FormatOptions { size: 64 << 40, force: true, ..made.clone() };
    let error = format(&huge).expect_err("no disk here has so much").to_string();
    assert!(error.contains("takes 64") && error.contains("free for it"), "{error}");
    open(&made.dir).expect("the pool is there as it was");
}

#[test]
fn a_format_that_was_cut_off_is_seen_and_can_be_done_again() {
    let dir = temporary();
    let options = options(dir.path());
    let first = format(&options).expect("formatted");
    let marker = options.dir.join(UNFINISHED_FILE);
    let config = options.dir.join(CONFIG_FILE);

    // The state before step 7, the state between steps 4 and 6, and one with half-made metadata.
    fs::write(&marker, first.uuid.to_string()).expect("written");
    assert!(matches!(open_error(dir.path()), PoolError::Unfinished(_)));
    fs::remove_file(&config).expect("removed");
    assert!(matches!(open_error(dir.path()), PoolError::Unfinished(_)));
    fs::write(options.dir.join("meta/half"), b"x").expect("written");
    let again = format(&options).expect("no force needed");
    assert_eq!(again.uuid, first.uuid);
    assert!(!options.dir.join("meta/half").exists());
    open(&options.dir).expect("opened");

    // Without the marker, metadata or a data file without cuttlefs.toml may be a pool that somebody wants back.
    fs::remove_file(&config).expect("removed");
    assert!(matches!(open_error(dir.path()), PoolError::NoPool(_)));
    assert!(matches!(format(&options), Err(PoolError::ForeignDirectory(_))));
    fs::remove_file(options.dir.join("meta/records")).expect("removed");
    assert!(matches!(format(&options), Err(PoolError::Occupied { .. })));
    fs::write(&marker, b"").expect("written");
    assert!(matches!(format(&options), Err(PoolError::Occupied { .. })));
    format(&FormatOptions { force: true, ..options.clone() }).expect("forced");
    open(&options.dir).expect("opened");
}

/// Stops a format after `steps` steps. Returns whether it was stopped, and did not end before.
fn cut_after(options: &FormatOptions, steps: usize) -> bool {
    let left = Cell::new(steps);
    let cut = format_in_steps(options, &metadata, &mut || {
        let now = left.get();
        left.set(now.wrapping_sub(1));
        if now == 0 { Err(PoolError::Size("cut".to_owned())) } else { Ok(()) }
    });
    match cut {
        Ok(_) => false,
        Err(PoolError::Size(why)) if why == "cut" => true,
        Err(error) => panic!("{error}"),
    }
}

fn assert_whole(options: &FormatOptions, uuid: PoolUuid) {
    let pool = open(&options.dir).expect("opened");
    assert_eq!(pool.uuid(), uuid);
    let records = fs::read_to_string(pool.meta_dir().join("records")).expect("metadata");
    assert_eq!(records, uuid.to_string());
}

#[test]
fn a_format_that_is_cut_off_at_any_step_is_run_again() {
    // The steps: the marker, the directory, two data files, the metadata, the configuration.
    const STEPS: usize = 6;
    for steps in 0..=STEPS {
        let dir = temporary();
        let data = vec![dir.path().join("first"), dir.path().join("second")];
        let options = FormatOptions { data, ..options(dir.path()) };
        assert_eq!(cut_after(&options, steps), steps < STEPS);
        if steps < STEPS {
            let error = open_error(dir.path());
            assert!(matches!(error, PoolError::Unfinished(_)), "after step {steps}: {error}");
            assert!(error.to_string().contains("cuttlefsd format"), "{error}");
            // The next format may be cut off as well.
            assert!(cut_after(&options, steps / 2));
            let report = format(&options).expect("no force needed");
            assert!(report.was_cut_off);
            assert_whole(&options, report.uuid);
        }
        assert!(matches!(format(&options), Err(PoolError::AlreadyThere { .. })));
    }
}

#[test]
fn a_forced_format_that_is_cut_off_at_any_step_is_run_again() {
    // As above, with one data file, and a step that removes the old pool's configuration.
    const STEPS: usize = 6;
    for steps in 0..STEPS {
        let dir = temporary();
        let options = options(dir.path());
        let before = format(&options).expect("formatted");
        let forced = FormatOptions { force: true, ..options.clone() };
        assert!(cut_after(&forced, steps));
        assert!(matches!(open_error(dir.path()), PoolError::Unfinished(_)), "after step {steps}");
        let is_laid_out = steps >= 3;
        let report = match format(&options) {
            Ok(report) => report,
            // The old pool's data is still there.
            Err(PoolError::Occupied { .. }) if !is_laid_out => format(&forced).expect("the same again"),
            Err(error) => panic!("after step {steps}: {error}"),
        };
        assert!(report.was_cut_off && report.uuid != before.uuid);
        assert_whole(&options, report.uuid);
    }
}

#[test]
fn metadata_that_cannot_be_made_leaves_no_pool() {
    let dir = temporary();
    let options = options(dir.path());
    let fails: MakeMetadata<'_> = &|dir, uuid| {
        metadata(dir, uuid)?;
        Err("half of it".into())
    };
    let error = super::format(&options, fails).expect_err("not made").to_string();
    assert!(error.contains("half of it") && error.contains("again"), "{error}");
    assert!(matches!(open_error(dir.path()), PoolError::Unfinished(_)));
    assert_whole(&options, format(&options).expect("no force needed").uuid);
}

#[test]
fn what_is_wrong_with_a_pool_is_said() {
    let dir = temporary();
    let options = options(dir.path());
    let nothing = open_error(dir.path()).to_string();
    assert!(nothing.contains("cuttlefsd format"), "{nothing}");
    let report = format(&options).expect("formatted");
    let data = options.dir.join("data");
    let head = fs::read(&data).expect("read")[..SUPERBLOCK_BYTES].to_vec();
    let says = |words: &[&str]| {
        let error = open_error(dir.path()).to_string();
        assert!(words.iter().all(|word| error.contains(word)), "{error}");
    };

    patch(&data, 8, &[9]);
    says(&["version 9", "newer release"]);
    patch(&data, 0, &head);
    patch(&data, 500, &[1]);
    says(&["damaged", "data"]);
    patch(&data, 0, &[0; SUPERBLOCK_BYTES]);
    says(&["no cuttlefs superblock"]);
    patch(&data, 0, &head);

    let file = OpenOptions::new().write(true).open(&data).expect("open");
    file.set_len(FILE_BYTES - 1).expect("cut");
    assert!(matches!(open_error(dir.path()), PoolError::Shrunk { .. }));
    file.set_len(100).expect("cut");
    says(&["damaged"]);
    file.set_len(0).expect("cut");
    says(&["no cuttlefs superblock"]);
    file.set_len(FILE_BYTES).expect("extended");
    patch(&data, 0, &head);

    let config = options.dir.join(CONFIG_FILE);
    let text = fs::read_to_string(&config).expect("read");
    fs::write(&config, text.replace("\"8M\"", "\"9M\"")).expect("written");
    says(&["pool.size"]);
    fs::write(&config, text.replace("read_only", "readonly")).expect("written");
    says(&["readonly"]);
    fs::write(&config, &text).expect("written");

    fs::rename(options.dir.join("meta"), options.dir.join("m")).expect("renamed");
    assert!(matches!(open_error(dir.path()), PoolError::MissingDirectory(_)));
    fs::rename(options.dir.join("m"), options.dir.join("meta")).expect("renamed");
    assert_eq!(open(&options.dir).expect("whole again").uuid(), report.uuid);
}

#[test]
fn a_pool_is_open_once_and_the_holder_is_named() {
    let dir = temporary();
    let options = options(dir.path());
    format(&options).expect("formatted");
    let pool = open(&options.dir).expect("opened");
    let error = open_error(dir.path());
    assert!(matches!(error, PoolError::InUse { pid: Some(pid), .. } if pid == std::process::id()));
    let words = format!("in use by process {}", std::process::id());
    assert!(error.to_string().contains(&words), "{error}");
    // A copy of the directory that names the same data file does not get it either.
    let copy = dir.path().join("copy");
    fs::create_dir_all(copy.join("meta")).expect("made");
    let text = fs::read_to_string(options.dir.join(CONFIG_FILE)).expect("read");
    let data = options.dir.join("data");
    let text = text.replace("[\"data\"]", &format!("[{:?}]", data.to_str().expect("UTF-8")));
    fs::write(copy.join(CONFIG_FILE), text).expect("written");
    assert!(matches!(open(&copy), Err(PoolError::InUse { path, .. }) if path == data));
    drop(pool);
    open(&copy).expect("now it does");
}

/// A loop device, detached when dropped.
struct LoopDevice(PathBuf);

impl LoopDevice {
    /// `None` if the machine has no free loop device.
    fn new(image: &Path) -> Option<Self> {
        let output = Command::new("losetup").args(["--find", "--show"]).arg(image).output().ok()?;
        let name = String::from_utf8(output.stdout).ok()?;
        (output.status.success() && !name.trim().is_empty()).then(|| Self(name.trim().into()))
    }
}

impl Drop for LoopDevice {
    fn drop(&mut self) {
        let _ = Command::new("losetup").arg("--detach").arg(&self.0).status();
    }
}

#[test]
fn block_devices_give_all_they_have_and_are_held_alone() {
    let dir = temporary();
    let image = dir.path().join("image");
    File::create(&image).and_then(|file| file.set_len(4 << 20)).expect("made");
    let Some(device) = LoopDevice::new(&image) else {
        eprintln!("skipped: no loop device to be had (needs root and the loop driver)");
        return;
    };
    let file = dir.path().join("file");
    let options = FormatOptions { data: vec![device.0.clone(), file], ..options(dir.path()) };
    let report = format(&options).expect("formatted");
    // One block of the device is for sums.
    let device_pages = ((4 << 20) - DATA_START) / PAGE_SIZE_U64 - 1;
    assert_eq!((report.data[0].1, report.data[1].1), (device_pages, SIZE / PAGE_SIZE_U64));
    let pool = open(&options.dir).expect("opened");
    let other = FormatOptions { dir: dir.path().join("other"), force: true, ..options.clone() };
    assert!(matches!(format(&other), Err(PoolError::DeviceBusy(_))), "not even with force");
    // The old process's io_uring closes the device only after the process has ended.
    let last = std::thread::spawn(move || {
        std::thread::sleep(Duration::from_millis(300));
        drop(pool);
    });
    let error = format(&FormatOptions { force: false, ..other }).expect_err("a pool's");
    assert!(matches!(error, PoolError::Occupied { .. }), "{error}");
    last.join().expect("dropped");
    open(&options.dir).expect("untouched");
}
