//! `cuttlefs preload`: runs a program that reads files of mounts past FUSE, by a library that is loaded into it.
//!
//! The command finds the mounts and their servers, writes that down in the environment (`crate::preload`), and becomes the program. With `--report` it
//! stays, and tells when the program has ended what was read past FUSE, and what was left to the kernel, by the program and those that it started.

use super::programs;
use super::run_state::{self, RunState};
use crate::fuse::{MountEntry, MountTable};
use crate::preload::{Count, Counts, PLAN_VARIABLE, Plan, PlannedMount};
use anyhow::{Context, bail};
use clap::Args;
use rustix::io::Errno;
use signal_hook::consts::{SIGINT, SIGQUIT};
use signal_hook::flag;
use std::ffi::{OsStr, OsString};
use std::fs::File;
use std::io::{ErrorKind, Read};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitCode, ExitStatus};
use std::sync::Arc;

/// The loader's variable (ld.so(8)).
const PRELOAD: &str = "LD_PRELOAD";
/// The exit code of a program that a signal has ended, as shells have it: this and the signal's number.
const SIGNALLED: i32 = 128;

/// What the kernel reads of a script to find its interpreter (`BINPRM_BUF_SIZE`).
const INTERPRETER_MAX: u64 = 256;

/// Arguments of `preload`.
#[derive(Args)]
#[command(after_help = "Examples:
  cuttlefs preload --report dd if=/mnt/file of=/dev/null bs=64k
  cuttlefs preload --mount /mnt python3 read.py

The kernel opens, writes, maps and locks files as ever. read(2), pread(2) and their kin get their
bytes from the server where that is certain to be the same; docs/native.md says where it is.
Programs that are linked statically, and reads of stdio (fread), stay with the kernel.")]
pub(super) struct PreloadArgs {
    /// A mount whose files are read past FUSE; may be given several times [default: all mounts of yours]
    #[arg(long, value_name = "DIR")]
    mount: Vec<PathBuf>,
    /// Print at the end what was read past FUSE, and what was left to the kernel and why
    #[arg(long)]
    report: bool,
    /// The program, and its arguments
    #[arg(required = true, trailing_var_arg = true, allow_hyphen_values = true, value_name = "PROGRAM ARGS")]
    program: Vec<OsString>,
}

pub(super) fn run(args: PreloadArgs) -> anyhow::Result<ExitCode> {
    let library = programs::preload_library()?;
    let mounts = planned(&args.mount)?;
    let Some((name, arguments)) = args.program.split_first() else { bail!("name the program to run") };
    let mut command = Command::new(name);
    command.args(arguments).env(PRELOAD, before_others(&library));
    let mut plan = Plan::new(mounts, rustix::process::geteuid().as_raw());
    if !args.report {
        command.env(PLAN_VARIABLE, serde_json::to_string(&plan)?);
        return Err(NotStarted::new(command.exec(), name).into());
    }
    // In the runtime directory, where nobody else can put a file of that name.
    let path = run_state::file(Path::new(&format!("preload {}", std::process::id())), "counts")?;
    // Of a process that had this id before, and was killed.
    let _ = std::fs::remove_file(&path);
    let counts =
        Counts::make(&path).with_context(|| format!("cannot make {} for the report", path.display()))?;
    // The terminal's signals are the program's: this process has to stay for the report.
    for signal in [SIGINT, SIGQUIT] {
        flag::register(signal, Arc::default()).context("cannot catch signals")?;
    }
    plan.counts = Some(path.clone());
    command.env(PLAN_VARIABLE, serde_json::to_string(&plan)?);
    let status = spawn(&mut command, name).map(|mut program| program.wait());
    // Programs that still run have it mapped; those that start from now on count no more.
    let _ = std::fs::remove_file(&path);
    let status = status?.context("cannot wait for the program")?;
    cuttlefs_common::tell!("{}", report(&counts, plan.mounts.len()));
    Ok(exit_code(status))
}

/// Starts a program. What the kernel knows no way to execute is a script for the shell, as it is for execvp(3), which posix_spawn(3) does not follow.
pub(super) fn spawn(command: &mut Command, name: &OsStr) -> Result<Child, NotStarted> {
    let mut started = command.spawn();
    let is_for_shell = |error: &std::io::Error| Errno::from_io_error(error) == Some(Errno::NOEXEC);
    if started.as_ref().is_err_and(is_for_shell)
        && let Some(script) = find(name)
    {
        let mut shell = Command::new("/bin/sh");
        shell.arg(script).args(command.get_args());
        for (variable, value) in command.get_envs() {
            match value {
                Some(value) => shell.env(variable, value),
                None => shell.env_remove(variable),
            };
        }
        started = shell.spawn();
    }
    started.map_err(|error| NotStarted::new(error, name))
}

/// A program did not start. The command's exit code says so as that of env(1) and of shells does.
#[derive(Debug, thiserror::Error)]
#[error("cannot run {}{}", .name.display(), .missing.as_deref().unwrap_or_default())]
pub(super) struct NotStarted {
    name: OsString,
    /// What is not there.
    missing: Option<String>,
    /// Why not, if all is there.
    #[source]
    why: Option<std::io::Error>,
}

impl NotStarted {
    const NO_SUCH_PROGRAM: u8 = 127;
    const NOT_RUN: u8 = 126;

    pub(super) fn new(error: std::io::Error, name: &OsStr) -> Self {
        let name = name.to_owned();
        if error.kind() != ErrorKind::NotFound {
            return Self { name, missing: None, why: Some(error) };
        }
        // The kernel says the same of a program that is there, if what is to run it is not.
        let missing = match find(&name).map(|path| interpreter(&path)) {
            None => ": there is no such program".to_owned(),
            Some(Some(interpreter)) => {
                format!(": it is a script, and its interpreter {interpreter} is not there")
            }
            Some(None) => {
                ": it is there, but the loader that it names is not (file(1) shows which)".to_owned()
            }
        };
        Self { name, missing: Some(missing), why: None }
    }

    pub(super) fn exit_code(&self) -> ExitCode {
        if self.missing.is_some() { Self::NO_SUCH_PROGRAM } else { Self::NOT_RUN }.into()
    }
}

/// The file of a program, as execvp(3) finds it.
fn find(name: &OsStr) -> Option<PathBuf> {
    if name.as_bytes().contains(&b'/') {
        return Some(PathBuf::from(name)).filter(|path| path.is_file());
    }
    let path = std::env::var_os("PATH")?;
    std::env::split_paths(&path).map(|directory| directory.join(name)).find(|path| path.is_file())
}

/// The interpreter that a script names in its first line, in a form that shows a carriage return, too.
fn interpreter(script: &Path) -> Option<String> {
    let mut line = Vec::new();
    File::open(script).ok()?.take(INTERPRETER_MAX).read_to_end(&mut line).ok()?;
    let named = line.strip_prefix(b"#!")?.split(|byte| *byte == b'\n').next()?.trim_ascii_start();
    let named = named.split(|byte| matches!(byte, b' ' | b'\t')).next()?;
    Some(String::from_utf8_lossy(named).escape_debug().to_string())
}

/// The program's own exit code.
pub(super) fn exit_code(status: ExitStatus) -> ExitCode {
    let code = status.code().or_else(|| status.signal().map(|signal| SIGNALLED + signal));
    code.and_then(|code| u8::try_from(code).ok()).map_or(ExitCode::FAILURE, ExitCode::from)
}

/// The library, and those that the loader is told of already.
pub(super) fn before_others(library: &Path) -> OsString {
    let mut all = library.as_os_str().to_owned();
    if let Some(others) = std::env::var_os(PRELOAD).filter(|others| !others.is_empty()) {
        all.push(":");
        all.push(others);
    }
    all
}

/// The mounts at these directories; all that this user has made, if none is named.
fn planned(named: &[PathBuf]) -> anyhow::Result<Vec<PlannedMount>> {
    let table = MountTable::read().context("cannot read the mount table")?;
    if named.is_empty() {
        // A mount of another user is left to the kernel, as its state is not told.
        let mounts: Vec<_> = table.cuttlefs().filter_map(|mount| plan(mount).ok().flatten()).collect();
        if mounts.is_empty() {
            bail!("there is no mount of yours; mount first, or name one with --mount DIR");
        }
        return Ok(mounts);
    }
    let one = |directory: &PathBuf| {
        let path =
            table.resolve(directory).with_context(|| format!("cannot look up {}", directory.display()))?;
        let mount = table.containing(&path).filter(|mount| mount.is_cuttlefs());
        let mount = mount.with_context(|| format!("{} is in no mount of cuttlefs", directory.display()))?;
        plan(mount)?.with_context(|| {
            format!(
                "{} was not mounted by you with `cuttlefs mount` or `cuttlefs up`, so its server is not known here",
                mount.mountpoint.display()
            )
        })
    };
    named.iter().map(one).collect()
}

/// `None`: the mount's process has not written down its state for this user.
fn plan(mount: &MountEntry) -> anyhow::Result<Option<PlannedMount>> {
    let Some(state) = RunState::load(&mount.mountpoint)?.filter(|state| state.source == mount.source) else {
        return Ok(None);
    };
    let device = mount
        .device
        .split_once(':')
        .and_then(|(major, minor)| Some((major.parse().ok()?, minor.parse().ok()?)));
    let (major, minor) = device.with_context(|| format!("{} is no device", mount.device))?;
    Ok(Some(PlannedMount {
        major,
        minor,
        url: state.source,
        key: state.trust.key,
        server_user: state.trust.server_user,
        subtree: state.subtree,
    }))
}

fn report(counts: &Counts, mounts: usize) -> String {
    let mut text = format!("cuttlefs preload: {mounts} mount{}", if mounts == 1 { "" } else { "s" });
    for (count, name) in Count::ALL {
        let number = counts.get(count);
        if number > 0 || matches!(count, Count::Reads) {
            text.push_str(&format!("\n  {number:>12}  {name}"));
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;
    use cuttlefs_common::explain::explain;
    use std::os::unix::fs::PermissionsExt;

    #[test]
    fn the_report_names_what_happened() {
        let directory = tempfile::tempdir().expect("a directory");
        let counts = Counts::make(&directory.path().join("counts")).expect("counts");
        assert_eq!(report(&counts, 2), "cuttlefs preload: 2 mounts\n             0  reads taken");
        counts.add(Count::Reads, 12);
        counts.add(Count::LeftEnd, 1);
        let text = report(&counts, 1);
        assert!(
            text.ends_with("12  reads taken\n             1  reads left: at the end of the file"),
            "{text}"
        );
    }

    #[test]
    fn a_program_ends_with_its_own_code() {
        let code = |status| exit_code(ExitStatus::from_raw(status));
        assert_eq!(format!("{:?}", code(3 << 8)), format!("{:?}", ExitCode::from(3)));
        assert_eq!(format!("{:?}", code(9)), format!("{:?}", ExitCode::from(137)));
    }

    #[test]
    fn a_program_that_does_not_start_is_told_by_the_code_too() {
        let not_started = |path: &str| {
            NotStarted::new(Command::new(path).spawn().expect_err("it does not start"), OsStr::new(path))
        };
        let code = |error: &NotStarted| format!("{:?}", error.exit_code());
        let missing = not_started("/no/such");
        assert_eq!(missing.to_string(), "cannot run /no/such: there is no such program");
        assert_eq!(code(&missing), format!("{:?}", ExitCode::from(127)));
        let scripts = tempfile::tempdir().expect("a directory");
        for (line, named) in [("#!/no/such -x\necho", "/no/such"), ("#! /bin/sh\r\necho", "/bin/sh\\r")] {
            let script = scripts.path().join("script");
            std::fs::write(&script, line).expect("written");
            let script = NotStarted::new(ErrorKind::NotFound.into(), script.as_os_str());
            let said = script.to_string();
            assert!(said.ends_with(&format!("its interpreter {named} is not there")), "{said}");
            assert_eq!(code(&script), format!("{:?}", ExitCode::from(127)));
        }
        let directory = not_started("/");
        assert_eq!(explain(&directory), "cannot run /: Permission denied (os error 13)");
        assert_eq!(code(&directory), format!("{:?}", ExitCode::from(126)));
    }

    #[test]
    fn a_script_that_names_no_interpreter_is_the_shells() {
        let scripts = tempfile::tempdir().expect("a directory");
        let script = scripts.path().join("script");
        std::fs::write(&script, "exit $(($1 + $TWO))").expect("written");
        std::fs::set_permissions(&script, std::fs::Permissions::from_mode(0o755)).expect("executable");
        let mut command = Command::new(&script);
        let status = spawn(command.arg("5").env("TWO", "2"), script.as_os_str()).expect("started").wait();
        assert_eq!(status.expect("it ended").code(), Some(7));
    }

    #[test]
    fn a_directory_outside_of_mounts_is_told() {
        let directory = tempfile::tempdir().expect("a directory");
        let error = planned(&[directory.path().to_owned()]).expect_err("no mount").to_string();
        assert!(error.ends_with("is in no mount of cuttlefs"), "{error}");
    }
}
