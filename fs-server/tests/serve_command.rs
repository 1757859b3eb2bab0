//! Runs the real `cuttlefsd serve`: what ends the server, and what does not.

use std::io::{BufRead, BufReader};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

/// Longer than a start or a stop takes on any machine.
const PATIENCE: Duration = Duration::from_secs(60);

/// A server process that is killed when the test drops it.
struct Server(Child);

fn serve(pool: &Path, socket: &Path) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_cuttlefsd"));
    command.arg("serve").arg("--pool").arg(pool).args(["--memory", "4M", "--listen"]);
    command.arg(format!("unix://{}", socket.display())).stdin(Stdio::piped());
    command
}

impl Server {
    fn start(pool: &Path, socket: &Path, more: &[&str]) -> Self {
        let child = serve(pool, socket).args(more).stderr(Stdio::piped()).spawn().expect("it runs");
        let mut server = Self(child);
        let log = BufReader::new(server.0.stderr.take().expect("piped"));
        let mut lines = log.lines().map_while(Result::ok);
        assert!(lines.any(|line| line.contains("serving")), "it ended before it served");
        // A thread must read the server's messages, or the full pipe makes the server wait.
        std::thread::spawn(move || lines.for_each(drop));
        server
    }

    fn wait(&mut self) -> Option<ExitStatus> {
        let deadline = Instant::now() + PATIENCE;
        while Instant::now() < deadline {
            if let Some(status) = self.0.try_wait().expect("ours") {
                return Some(status);
            }
            std::thread::sleep(Duration::from_millis(10));
        }
        None
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn make_pool(dir: &Path) {
    let made = Command::new(env!("CARGO_BIN_EXE_cuttlefsd"))
        .args(["format", "--size", "8M", "--pool"])
        .arg(dir)
        .output()
        .expect("it runs");
    assert!(made.status.success(), "{}", String::from_utf8_lossy(&made.stderr));
}

#[test]
fn a_server_whose_starter_is_killed_stops_cleanly() {
    let base = tempfile::tempdir_in("/var/tmp").expect("a directory");
    let (pool, socket) = (base.path().join("pool"), base.path().join("s"));
    make_pool(&pool);
    let mut server = Server::start(&pool, &socket, &["--until-stdin-ends"]);
    // The kernel closes the pipe of a killed starter just like this.
    drop(server.0.stdin.take());
    let status = server.wait().expect("it stops");
    assert!(status.success(), "{status}");
    // Without the option the end of its input does not stop the server.
    let mut server = Server::start(&pool, &socket, &[]);
    drop(server.0.stdin.take());
    std::thread::sleep(Duration::from_millis(300));
    assert_eq!(server.0.try_wait().expect("ours"), None);
}

/// Messages that go to a full disk, or to a pipe without a reader, are lost, and the server goes on.
#[test]
fn a_server_whose_log_cannot_be_written_serves_on() {
    let base = tempfile::tempdir_in("/var/tmp").expect("a directory");
    let (pool, socket) = (base.path().join("pool"), base.path().join("s"));
    make_pool(&pool);
    let full = std::fs::File::options().write(true).open("/dev/full").expect("a full device");
    let child = serve(&pool, &socket).arg("--until-stdin-ends").stderr(full).spawn().expect("it runs");
    let mut server = Server(child);
    let deadline = Instant::now() + PATIENCE;
    while UnixStream::connect(&socket).is_err() {
        assert_eq!(server.0.try_wait().expect("ours"), None, "it ended before it served");
        assert!(Instant::now() < deadline, "it does not serve");
        std::thread::sleep(Duration::from_millis(10));
    }
    // The server has tried to write a line about the connection by now, and tries to write some about its end.
    drop(server.0.stdin.take());
    let status = server.wait().expect("it stops");
    assert!(status.success(), "{status}");
}

/// The message of a `cuttlefsd` that ends with an error.
fn refuses(arguments: &[&str]) -> String {
    let output = Command::new(env!("CARGO_BIN_EXE_cuttlefsd")).args(arguments).output().expect("it runs");
    assert!(!output.status.success(), "{arguments:?} succeeded");
    String::from_utf8_lossy(&output.stderr).into_owned()
}

#[test]
fn refusals_say_what_to_do() {
    let dir = tempfile::tempdir().expect("directory");
    let pool = dir.path().join("pool");
    let pool_text = pool.to_str().expect("UTF-8");
    let no_size = refuses(&["format", "--pool", pool_text]);
    assert!(no_size.contains("--size is missing, or 0") && no_size.contains("--size 8G"), "{no_size}");
    let too_large = refuses(&["format", "--pool", pool_text, "--size", "1000T"]);
    assert!(too_large.contains("there is no room") || too_large.contains("at most"), "{too_large}");
    make_pool(&pool);
    let serve = |more: &[&str]| refuses(&[&["serve", "--pool", pool_text, "--memory", "4M"], more].concat());
    let nowhere = serve(&[]);
    assert!(
        nowhere.contains("--listen tcp://127.0.0.1:7950") && nowhere.contains("cuttlefs.toml"),
        "{nowhere}"
    );
    let trusting = serve(&["--listen", "unix:///nowhere/socket", "--trust-clients"]);
    assert!(
        trusting.contains("no endpoint is one") && trusting.contains("--listen rdma://HOST:PORT"),
        "{trusting}"
    );
    let taken = std::net::TcpListener::bind("127.0.0.1:0").expect("a port");
    let port = taken.local_addr().expect("its address").port();
    let in_use = serve(&["--listen", &format!("tcp://127.0.0.1:{port}")]);
    assert!(in_use.contains("another program listens") && in_use.contains("choose another port"), "{in_use}");
    let unknown = serve(&["--listen", "tcp://no-such-host.invalid:1"]);
    assert!(
        unknown.contains("no-such-host.invalid") && unknown.contains("check how it is written"),
        "{unknown}"
    );
    let foreign = serve(&["--listen", "tcp://192.0.2.1:0"]);
    assert!(foreign.contains("no such address") && foreign.contains("0.0.0.0"), "{foreign}");
    let memory =
        refuses(&["serve", "--pool", pool_text, "--memory", "900T", "--listen", "tcp://127.0.0.1:0"]);
    assert!(memory.contains("--memory 900T is more than there is"), "{memory}");
}

/// Names of all that is in a directory and below, but for the files of metadata: servers rename these.
fn names(dir: &Path) -> Vec<PathBuf> {
    let mut all = Vec::new();
    for entry in std::fs::read_dir(dir).expect("a directory") {
        let path = entry.expect("an entry").path();
        if path.is_dir() && !path.ends_with("meta") {
            all.extend(names(&path));
        }
        all.push(path);
    }
    all.sort();
    all
}

#[test]
fn what_is_refused_leaves_nothing_behind() {
    let dir = tempfile::tempdir().expect("directory");
    let path = |name: &str| dir.path().join(name).to_str().expect("UTF-8").to_owned();
    let (pool, new, no_key, no_folder) = (path("pool"), path("a/new"), path("no-key"), path("nowhere/data"));
    make_pool(Path::new(&pool));
    let before = names(dir.path());
    let listening = std::net::TcpListener::bind("127.0.0.1:0").expect("a port");
    let taken = format!("tcp://{}", listening.local_addr().expect("its address"));
    let (socket, tcp) = (format!("unix://{}", path("socket")), "tcp://127.0.0.1:0");
    let format = |more: &[&str]| refuses(&[&["format", "--pool", &new], more].concat());
    let serve = |more: &[&str]| refuses(&[&["serve", "--pool", &pool, "--listen"], more].concat());
    let unchanged = |said: String| assert_eq!(names(dir.path()), before, "{said}");
    unchanged(format(&[]));
    unchanged(format(&["--size", "4K"]));
    unchanged(format(&["--size", "1000T"]));
    unchanged(format(&["--size", "8M", "--data", &no_folder]));
    unchanged(format(&["--size", "8M", "--no-such-option"]));
    unchanged(refuses(&["format", "--pool", &pool, "--size", "8M"]));
    unchanged(refuses(&["serve", "--pool", &new, "--listen", tcp]));
    unchanged(serve(&[tcp, "--memory", "4K"]));
    unchanged(serve(&[tcp, "--memory", "4M", "--workers", "0"]));
    unchanged(serve(&[tcp, "--memory", "4M", "--sample-unit", "3M"]));
    unchanged(serve(&[tcp, "--memory", "4M", "--key", &no_key]));
    // The first endpoint and the key are made before the second one is found to be taken.
    unchanged(serve(&[&socket, "--listen", &taken, "--memory", "4M"]));
}
