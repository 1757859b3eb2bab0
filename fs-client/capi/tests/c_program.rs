//! `cuttlefs.h` and `libcuttlefs.so` together: a C program is compiled with the header, linked with the library, and run against a server over each link;
//! and a Python program with the binding.

use cuttlefs_common::rdma::soft::{SoftDevice, SoftOptions};
use cuttlefs_common::rdma::{Device, Endpoint};
use cuttlefs_common::world::SystemClock;
use cuttlefs_server::meta::{Caller, DiskOptions, DiskStore, Format, HashKey, Meta};
use cuttlefs_server::pool::{self, FormatOptions};
use cuttlefs_server::serve::{Parts, RunningServer, ServeOptions};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;

/// The directory of the library: that of this test's program, or the one above it.
fn library_directory() -> PathBuf {
    let program = std::env::current_exe().expect("this program's file");
    let found = program.ancestors().skip(1).take(2).find(|place| place.join("libcuttlefs.so").exists());
    found.expect("cargo builds the library with its tests").to_owned()
}

fn serve(directory: &Path, link: &str) -> RunningServer {
    let dir = directory.join("pool");
    pool::format(
        &FormatOptions { dir: dir.clone(), size: 16 << 20, ..FormatOptions::default() },
        &|dir, uuid| {
            let store = DiskStore::open(dir, DiskOptions::default())?;
            let format = Format {
                uuid: uuid.0,
                hash_key: HashKey([3; 16]),
                root: Caller::default(),
                root_mode: 0o755,
            };
            Ok(Meta::format(&store, &SystemClock::new(), &format)?)
        },
    )
    .expect("format");
    let opened = pool::open(&dir).expect("open");
    let store = DiskStore::open(&opened.meta_dir(), DiskOptions::default()).expect("a store");
    let meta = Meta::open(Arc::new(store), Arc::new(SystemClock::new())).expect("metadata");
    let device: Arc<dyn Device> = SoftDevice::new(SoftOptions::default());
    let parts = Parts { devices: device.into(), ..Parts::new(Arc::new(meta), opened.data_files().clone()) };
    let endpoint: Endpoint = match link {
        "tcp" => "tcp://127.0.0.1:0".to_owned(),
        link => format!("{link}://{}", directory.join("socket").display()),
    }
    .parse()
    .expect("an endpoint");
    let options = ServeOptions { workers: 2, ..ServeOptions::new(64 * 4096, vec![endpoint]) };
    RunningServer::start(parts, options).expect("served")
}

#[test]
fn a_c_program_does_all_of_it() {
    let home = Path::new(env!("CARGO_MANIFEST_DIR"));
    let libraries = library_directory();
    let work = tempfile::tempdir().expect("a directory");
    let program = work.path().join("program");
    let compiled = Command::new("cc")
        .args(["-std=c11", "-Wall", "-Wextra", "-Werror", "-o"])
        .arg(&program)
        .arg(home.join("tests/program.c"))
        .arg("-I")
        .arg(home.join("include"))
        .arg("-L")
        .arg(&libraries)
        .arg("-lcuttlefs")
        .output()
        .expect("cc, the C compiler that links Rust programs, too");
    assert!(compiled.status.success(), "{}", String::from_utf8_lossy(&compiled.stderr));
    runs_over_each_link(|url| {
        let mut command = Command::new(&program);
        command.arg(url).env("LD_LIBRARY_PATH", &libraries);
        command
    });
}

#[test]
fn a_python_program_does_all_of_it() {
    let home = Path::new(env!("CARGO_MANIFEST_DIR"));
    let library = library_directory().join("libcuttlefs.so");
    runs_over_each_link(|url| {
        let mut command = Command::new("python3");
        command.arg("-B").arg(home.join("tests/program.py")).arg(url);
        command.env("PYTHONPATH", home.join("python")).env("CUTTLEFS_LIBRARY", &library);
        command
    });
}

/// Runs a program with the URL of a server, and sees that it succeeds.
fn runs_over_each_link(command: impl Fn(&str) -> Command) {
    for link in ["shm", "unix", "tcp"] {
        let directory = tempfile::tempdir().expect("a directory");
        let server = serve(directory.path(), link);
        let ran = command(&server.endpoints()[0].to_string()).output().expect("the program runs");
        let said = String::from_utf8_lossy(&ran.stderr);
        assert!(ran.status.success(), "{link}: {}: {said}", ran.status);
        server.stop();
    }
}
