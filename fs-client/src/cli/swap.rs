//! `cuttlefs swap`: runs a program whose memory beyond a limit lies at a memory node, by a library that is loaded into it and a swapper in this process.
//!
//! The swapper is `crate::swap`; this is the command around it: it joins the node (or starts one of its own), starts the program, and reports.

use super::connect::{Trust, device};
use super::memory_status;
use super::programs;
use super::run_state;
use super::wrapped::{PRELOAD, Passed, before_others, exit_code, spawn};
use crate::swap::wire::{PAGE, PLAN_VARIABLE, Plan};
use crate::swap::{LIMIT_LEAST, Store, Swapper, listen};
use anyhow::{Context, bail, ensure};
use clap::Args;
use cuttlefs_common::descriptors;
use cuttlefs_common::odrp::{JoinOptions, MemoryNode, NodeOptions, PAGES_MAX, RemotePages};
use cuttlefs_common::rdma::soft::{SoftDevice, SoftOptions};
use cuttlefs_common::rdma::{Device, Endpoint};
use cuttlefs_common::size::ByteSize;
use cuttlefs_common::socket_file;
use rustix::process::{Resource, getrlimit, setrlimit};
use std::ffi::OsString;
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};
use std::sync::Arc;

/// Addresses for mmap(2) in each process, for each byte that it may have here and at the node: they are free, and large mappings want them in a row.
const ARENA_FACTOR: u64 = 4;

/// Descriptors with which the command begins: some 22 are its own, each process takes two, and as many are kept for those on their way in.
const DESCRIPTORS_LEAST: u64 = 48;
/// With a node of its own: both ends of each connection are here, and the node leaves a quarter of so few to others.
const DESCRIPTORS_LEAST_WITH_NODE: u64 = 64;

/// Arguments of `swap`.
#[derive(Args)]
#[command(after_help = "Examples:
  cuttlefs swap --limit 256M --size 4G --memory tcp://box:7951 --key FILE python3 job.py
  cuttlefs swap --limit 64M --report sort -S 1G huge.txt       with a memory node of its own

What malloc(3) and mmap(2) give the program beyond the limit lies at the memory node (cuttlefsd
memory); pages come back when they are touched. Stacks, static variables and files are not swapped.
If the node has no room or is gone, the program is killed: it never sees a wrong byte. It needs root
(or CAP_SYS_PTRACE) and Linux 6.8. Programs that are linked statically are not swapped at all.
docs/odrp.md, \"Remote swap\", says more.")]
pub(super) struct SwapArgs {
    /// Memory that each process may have here
    #[arg(long, default_value = "256M", value_name = "SIZE")]
    limit: ByteSize,
    /// Memory that all processes together may have at the node and not here at one time
    #[arg(long, default_value = "1G", value_name = "SIZE")]
    size: ByteSize,
    /// The memory node: tcp://HOST:PORT, unix:///PATH, rdma://HOST:PORT or shm:///PATH [default: one of its own, in this process]
    #[arg(long, value_name = "ENDPOINT")]
    memory: Option<Endpoint>,
    /// The key to show over tcp:// and rdma:// [default: CUTTLEFS_KEY]
    #[arg(long, value_name = "FILE", requires = "memory")]
    key: Option<PathBuf>,
    /// Believe this user's node over unix://, not only root's and your own
    #[arg(long, value_name = "UID", requires = "memory")]
    server_user: Option<u32>,
    /// Print at the end what was swapped
    #[arg(long)]
    report: bool,
    /// The program, and its arguments
    #[arg(required = true, trailing_var_arg = true, allow_hyphen_values = true, value_name = "PROGRAM ARGS")]
    program: Vec<OsString>,
}

pub(super) fn run(args: SwapArgs) -> anyhow::Result<ExitCode> {
    let library = programs::swap_library()?;
    let limit_pages = args.limit.0 / PAGE as u64;
    let least = ByteSize((LIMIT_LEAST * PAGE) as u64);
    ensure!(limit_pages >= LIMIT_LEAST as u64, "--limit {} is too little; give {least} or more", args.limit);
    let pages = args.size.0 / PAGE as u64;
    ensure!(
        (1..=PAGES_MAX).contains(&pages),
        "--size {} is not between 4K and {}",
        args.size,
        ByteSize(PAGES_MAX * PAGE as u64)
    );
    let Some((name, arguments)) = args.program.split_first() else { bail!("name the program to run") };
    // Each of the program's processes takes two descriptors here, and a node of its own takes some.
    let callers_limit = getrlimit(Resource::Nofile);
    match args.memory {
        Some(_) => descriptors::raise_to_at_least(DESCRIPTORS_LEAST, "swapped programs"),
        None => descriptors::raise_to_at_least(
            DESCRIPTORS_LEAST_WITH_NODE,
            "swapped programs and a memory node in this process (--memory names one elsewhere)",
        ),
    }?;
    let Sockets { listener, socket, own } = Sockets::open(args.memory.is_none().then_some(pages))?;
    let remote = match (&own, &args.memory) {
        (Some(own), _) => join(&own.device, &own.endpoint, pages),
        (None, Some(endpoint)) => {
            let trust = Trust { key: super::key::chosen([args.key.clone()])?, server_user: args.server_user };
            join(&device(endpoint, &trust)?, endpoint, pages)
        }
        (None, None) => bail!("there is no memory node; give --memory"),
    }?;
    let bytes = limit_pages.saturating_add(pages) * PAGE as u64;
    let plan =
        Plan { heap_bytes: bytes, arena_bytes: bytes.saturating_mul(ARENA_FACTOR), socket: socket.0.clone() };
    let mut swapper = Swapper::new(Store::new(remote, pages), usize::try_from(limit_pages)?);
    let signals = Passed::catch()?;
    let mut command = Command::new(name);
    command.args(arguments).env(PRELOAD, before_others(&library)).env(PLAN_VARIABLE, plan.encode());
    // The program has its caller's limit. This process has it for that moment, in which it opens nothing.
    setrlimit(Resource::Nofile, callers_limit).context("cannot lower the limit of open files")?;
    let program = spawn(&mut command, name);
    let raised = descriptors::raise_limit();
    let mut program = program?;
    if let Err(error) = raised {
        tracing::warn!("cannot raise the limit of open files: {error}");
    }
    let watched = signals.on_to(&program)?;
    let served = swapper.serve(&listener, &watched);
    if served.is_err() {
        // It has been killed, if its memory was here; and has to end in any case.
        let _ = program.kill();
    }
    let status = program.wait().context("cannot wait for the program")?;
    let figures = swapper.figures();
    if args.report {
        cuttlefs_common::tell!("cuttlefs swap: limit {}, size {}\n{figures}", args.limit, args.size);
    }
    if let Err(error) = served {
        cuttlefs_common::tell!("cuttlefs swap: the program was ended: {error}");
    } else if figures.processes == 0 && status.success() {
        cuttlefs_common::tell!(
            "cuttlefs swap: {} was not swapped: it did not load {} (is it linked statically, or the library of another build?)",
            name.display(),
            library.display()
        );
    }
    Ok(exit_code(status))
}

fn join(device: &Arc<dyn Device>, endpoint: &Endpoint, pages: u64) -> anyhow::Result<RemotePages> {
    RemotePages::join(device, endpoint, JoinOptions { pages })
        .map_err(|error| memory_status::failed("join", endpoint, error))
}

/// What this process listens at, in the runtime directory, where nobody else can put a file of that name.
struct Sockets {
    /// For the programs.
    listener: UnixListener,
    socket: Removed,
    own: Option<OwnNode>,
}

impl Sockets {
    const EXTENSIONS: [&str; 2] = ["swap", "memory"];

    /// Listens for programs, and starts a node of its own with so many pages, if any. Removes what killed commands have left.
    fn open(pages: Option<u64>) -> anyhow::Result<Self> {
        let [of_programs, of_node] = Self::EXTENSIONS
            .map(|what| run_state::file(Path::new(&format!("swap {}", std::process::id())), what));
        let (of_programs, of_node) = (of_programs?, of_node?);
        run_state::locked(|| {
            run_state::remove_left_behind(&Self::EXTENSIONS)?;
            let listener = listen(&of_programs)
                .with_context(|| format!("cannot listen at {}", of_programs.display()))?;
            let socket = Removed(of_programs);
            let own = pages.map(|pages| OwnNode::start(&of_node, pages)).transpose()?;
            Ok(Self { listener, socket, own })
        })
    }
}

/// A file that is removed at the end.
struct Removed(PathBuf);

impl Drop for Removed {
    fn drop(&mut self) {
        // A later command removes it.
        let _ = std::fs::remove_file(&self.0);
    }
}

/// A memory node in this process, for its own user's processes only: the socket's mode and the node both see to that.
struct OwnNode {
    device: Arc<dyn Device>,
    endpoint: Endpoint,
    _node: MemoryNode,
    _socket: Removed,
}

impl OwnNode {
    fn start(socket: &Path, pages: u64) -> anyhow::Result<Self> {
        let device: Arc<dyn Device> = SoftDevice::new(SoftOptions::default());
        let at = Endpoint::Unix(socket.to_owned());
        let only_user = Some(rustix::process::geteuid().as_raw());
        let options = NodeOptions { only_user, ..NodeOptions::new(pages) };
        let node = MemoryNode::start(&device, &at, options).context("cannot start a memory node")?;
        socket_file::set_mode(socket, 0o600)
            .with_context(|| format!("cannot set the mode of {}", socket.display()))?;
        let endpoint = node.endpoint();
        Ok(Self { device, endpoint, _node: node, _socket: Removed(socket.to_owned()) })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser;
    use cuttlefs_common::rdma::QpConfig;
    use std::os::unix::fs::PermissionsExt;

    #[derive(Parser)]
    struct Alone {
        #[command(flatten)]
        args: SwapArgs,
    }

    fn refused(line: &str) -> String {
        let parsed = Alone::parse_from(line.split(' '));
        run(parsed.args).expect_err("refused").to_string()
    }

    #[test]
    fn a_node_of_its_own_is_open_to_its_own_user_only() {
        let directory = tempfile::tempdir().expect("directory");
        let socket = directory.path().join("node.memory");
        let own = OwnNode::start(&socket, 16).expect("a node");
        let mode = std::fs::metadata(&socket).expect("a socket").permissions().mode();
        assert_eq!(mode & 0o7777, 0o600);
        join(&own.device, &own.endpoint, 16).expect("its own user");
    }

    #[test]
    fn who_hangs_up_on_a_question_may_be_another_server() {
        let directory = tempfile::tempdir().expect("directory");
        let endpoint = Endpoint::Unix(directory.path().join("other"));
        let device: Arc<dyn Device> = SoftDevice::new(SoftOptions::default());
        let domain = device.alloc_pd().expect("a domain");
        let listener = domain.listen(&endpoint).expect("a listener");
        let completions = device.create_cq(16).expect("a queue");
        std::thread::scope(|scope| {
            let joining = scope.spawn(|| join(&device, &endpoint, 16).map(drop));
            let incoming = listener.accept().expect("a connection");
            drop(incoming.accept(QpConfig::new(&completions, 4, 4), Vec::new()).expect("accepted"));
            let error = joining.join().expect("no panic").expect_err("no node").to_string();
            assert!(error.contains("no `cuttlefsd memory`"), "{error}");
        });
    }

    #[test]
    fn what_cannot_be_is_refused_in_words() {
        // The library is not beside a test, so that is told first where it is missing.
        let few = refused("swap --limit 4K true");
        assert!(few.contains("give 256K or more") || few.contains("build it"), "{few}");
        let much = refused("swap --size 4T true");
        assert!(much.contains("not between 4K and 1T") || much.contains("build it"), "{much}");
    }
}
