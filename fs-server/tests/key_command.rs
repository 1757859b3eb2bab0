//! Making and showing keys and giving them to a server; and a server on `tcp` without a key.

mod started;

use cuttlefs_common::cluster_key::{ClusterKey, ClusterKeys};
use cuttlefs_common::rdma::soft::{SoftDevice, SoftOptions, TcpSecurity};
use cuttlefs_common::rdma::{ConnectOptions, Device, Endpoint, QpConfig, RdmaError};
use started::until_it_serves;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::Path;
use std::process::{Child, Command, Output, Stdio};
use std::time::Duration;

fn cuttlefsd(arguments: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_cuttlefsd"));
    command.args(arguments);
    command
}

fn run(arguments: &[&str]) -> Output {
    cuttlefsd(arguments).output().expect("it runs")
}

fn says(output: &Output) -> String {
    format!("{}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr))
}

fn path(of: &Path) -> &str {
    of.to_str().expect("UTF-8")
}

#[test]
fn a_key_is_made_shown_and_never_written_over() {
    let directory = tempfile::tempdir().expect("directory");
    let file = directory.path().join("box.key");
    let made = run(&["key", "new", "--name", "box", path(&file)]);
    assert!(made.status.success(), "{}", says(&made));
    assert_eq!(file.metadata().expect("there").mode() & 0o7777, 0o600);
    let text = std::fs::read_to_string(&file).expect("read");
    let secret = text.split(' ').nth(2).expect("a secret");
    let shown = run(&["key", "show", path(&file)]);
    let fingerprint = says(&shown).trim().strip_prefix("box ").expect("its name first").to_owned();
    for words in ["the key `box`", &fingerprint, "cuttlefsd serve --key", "cuttlefs mount", "0600"] {
        assert!(says(&made).contains(words), "{}", says(&made));
    }
    assert!(!says(&shown).contains(secret) && !says(&made).contains(secret), "{}", says(&made));
    let again = run(&["key", "new", path(&file)]);
    assert!(
        !again.status.success() && says(&again).contains("is kept; choose another name"),
        "{}",
        says(&again)
    );
    assert_eq!(std::fs::read_to_string(&file).expect("read"), text);
    std::fs::set_permissions(&file, PermissionsExt::from_mode(0o644)).expect("changed");
    let open = run(&["key", "show", path(&file)]);
    assert!(!open.status.success() && says(&open).contains("chmod 600"), "{}", says(&open));
}

struct Serving {
    child: Child,
    endpoint: Endpoint,
    log: String,
}

impl Drop for Serving {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn serve(pool: &Path, arguments: &[&str]) -> Serving {
    let mut command = cuttlefsd(&["serve", "--memory", "4M", "--listen", "tcp://127.0.0.1:0", "--pool"]);
    let mut child = command.arg(pool).args(arguments).stderr(Stdio::piped()).spawn().expect("it runs");
    let (endpoint, log) = until_it_serves(&mut child);
    Serving { child, endpoint, log }
}

fn connect(serving: &Serving, tcp: TcpSecurity) -> Result<(), RdmaError> {
    let device = SoftDevice::new(SoftOptions { tcp, ..SoftOptions::default() });
    let cq = device.create_cq(16).expect("cq");
    let qp = QpConfig::new(&cq, 4, 4);
    let options = ConnectOptions { qp, receives: vec![], timeout: Duration::from_secs(20) };
    device.alloc_pd().expect("a domain").connect(&serving.endpoint, options).map(drop)
}

fn with(file: &Path) -> TcpSecurity {
    let key = ClusterKey::read_file(file).expect("a key for its owner alone");
    TcpSecurity::Keys(ClusterKeys::new(vec![key]).expect("keys"))
}

#[test]
fn tcp_is_served_to_who_has_a_key() {
    let directory = tempfile::tempdir().expect("directory");
    let pool = directory.path().join("pool");
    let made = run(&["format", "--size", "8M", "--pool", path(&pool)]);
    assert!(made.status.success(), "{}", says(&made));
    let files = ["one", "two"].map(|name| {
        let file = directory.path().join(name);
        let made = run(&["key", "new", "--name", name, path(&file)]);
        assert!(made.status.success(), "{}", says(&made));
        file
    });
    let pools_own = pool.join("key");
    {
        let serving = serve(&pool, &[]);
        assert!(serving.log.contains("made a key"), "{}", serving.log);
        connect(&serving, with(&pools_own)).expect("who may read the pool's key");
        let refused = connect(&serving, TcpSecurity::Loopback).expect_err("any local user").to_string();
        assert!(refused.contains("--key FILE"), "{refused}");
        connect(&serving, with(&files[0])).expect_err("another key");
    }
    {
        let serving = serve(&pool, &["--key", path(&files[0]), "--key", path(&files[1])]);
        files.iter().for_each(|file| connect(&serving, with(file)).expect("one of the keys"));
        connect(&serving, with(&pools_own)).expect_err("only those that were given");
    }
    {
        let config = pool.join("cuttlefs.toml");
        let text = std::fs::read_to_string(&config).expect("read");
        std::fs::write(&config, text.replace("keys = []", "keys = [\"../two\"]")).expect("written");
        let serving = serve(&pool, &[]);
        connect(&serving, with(&files[1])).expect("the configured key");
        connect(&serving, with(&files[0])).expect_err("not this one");
    }
    let serving = serve(&pool, &["--insecure"]);
    assert!(serving.log.contains("INSECURE"), "{}", serving.log);
    connect(&serving, TcpSecurity::Loopback).expect("anybody");
    let refused = connect(&serving, with(&files[0])).expect_err("a key is not for nothing").to_string();
    assert!(refused.contains("takes no keys"), "{refused}");
    drop(serving);
    let both = run(&[
        "serve",
        "--listen",
        "tcp://127.0.0.1:0",
        "--insecure",
        "--key",
        path(&files[0]),
        "--pool",
        path(&pool),
    ]);
    assert!(!both.status.success() && says(&both).contains("--insecure takes no keys"), "{}", says(&both));
}
