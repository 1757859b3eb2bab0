//! A program that a command runs and waits for (`preload`, `swap`): its start, signals on their way to it, and its exit code.

use crate::threads::NO_THREAD;
use anyhow::Context;
use rustix::io::Errno;
use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};
use signal_hook::consts::{SIGINT, SIGQUIT, SIGTERM};
use signal_hook::flag;
use signal_hook::iterator::Signals;
use std::ffi::{OsStr, OsString};
use std::fs::File;
use std::io::{ErrorKind, Read};
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitCode, ExitStatus};
use std::sync::Arc;

/// The loader's variable (ld.so(8)).
pub(super) const PRELOAD: &str = "LD_PRELOAD";
/// The exit code of a program that a signal has ended, as shells have it: this and the signal's number.
const SIGNALLED: i32 = 128;

/// What the kernel reads of a script to find its interpreter (`BINPRM_BUF_SIZE`).
const INTERPRETER_MAX: u64 = 256;

/// Signals that are meant for the program: this process has to stay as long as it does, for its report. The terminal sends its own to the program, too;
/// one that says to end comes to this process alone, and is passed on.
pub(super) struct Passed(Signals);

impl Passed {
    /// Catches them, before the program is there.
    ///
    /// # Errors
    /// The kernel has none of what that takes.
    pub(super) fn catch() -> anyhow::Result<Self> {
        for signal in [SIGINT, SIGQUIT] {
            flag::register(signal, Arc::default()).context("cannot catch signals")?;
        }
        Ok(Self(Signals::new([SIGTERM]).context("cannot catch signals")?))
    }

    /// Passes them on to the program from now on. Returns a descriptor of it.
    ///
    /// # Errors
    /// The process has no descriptor or thread left.
    pub(super) fn on_to(mut self, program: &Child) -> anyhow::Result<Arc<OwnedFd>> {
        let pid = Pid::from_raw(i32::try_from(program.id())?).context("the program has no process id")?;
        let program = Arc::new(pidfd_open(pid, PidfdFlags::empty()).context("cannot watch the program")?);
        let to = program.clone();
        let pass_on = move || {
            for _ in self.0.forever() {
                // A program that has ended needs none.
                let _ = pidfd_send_signal(&to, Signal::TERM);
            }
        };
        std::thread::Builder::new().name("signals".to_owned()).spawn(pass_on).context(NO_THREAD)?;
        Ok(program)
    }
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

#[cfg(test)]
mod tests {
    use super::*;
    use cuttlefs_common::explain::explain;
    use std::os::unix::fs::PermissionsExt;

    #[test]
    fn who_says_that_the_command_is_to_end_means_the_program() {
        let signals = Passed::catch().expect("caught");
        let mut program = Command::new("sleep").arg("600").spawn().expect("sleep");
        signals.on_to(&program).expect("passed on");
        rustix::process::kill_process(rustix::process::getpid(), Signal::TERM).expect("sent");
        assert_eq!(program.wait().expect("it ended").signal(), Some(SIGTERM));
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
}
