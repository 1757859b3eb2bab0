//! `cuttlefs preload`: runs a program that reads files of mounts past FUSE, by a library that is loaded into it.
//!
//! The command finds the mounts and their servers, writes that down in the environment (`crate::preload`), and becomes the program. With `--report` it
//! stays, and tells when the program has ended what was read past FUSE, and what was left to the kernel, by the program and those that it started.

use super::run_state::{self, RunState};
use super::wrapped::{NotStarted, PRELOAD, Passed, before_others, exit_code, spawn};
use super::{figures, programs};
use crate::fuse::{MountEntry, MountTable};
use crate::preload::{Count, Counts, PLAN_VARIABLE, Plan, PlannedMount};
use anyhow::{Context, bail};
use clap::Args;
use cuttlefs_common::rdma::Endpoint;
use std::ffi::OsString;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};

/// Arguments of `preload`.
#[derive(Args)]
#[command(after_help = "Examples:
  cuttlefs preload --report dd if=/mnt/file of=/dev/null bs=64k
  cuttlefs preload --mount /mnt python3 read.py

The kernel opens, writes, maps and locks files as ever. read(2), pread(2) and their kin get their
bytes from the server where that is certain to be the same; docs/native.md says where it is.
Programs that are linked statically, and reads of stdio (fread), stay with the kernel. So do,
over tcp://, unix:// and rdma://, reads of what the kernel's page cache has: it is faster there.")]
pub(super) struct PreloadArgs {
    /// A mount whose files are read past FUSE; may be given several times [default: all mounts of yours]
    #[arg(long, value_name = "DIR")]
    mount: Vec<PathBuf>,
    /// Print at the end what was read past FUSE, and what was left to the kernel and why
    #[arg(long)]
    report: bool,
    /// Over tcp://, unix:// and rdma:// also read past FUSE what the kernel's page cache has
    #[arg(long)]
    cached: bool,
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
    plan.take_cached = args.cached;
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
    let signals = Passed::catch()?;
    plan.counts = Some(path.clone());
    command.env(PLAN_VARIABLE, serde_json::to_string(&plan)?);
    let status = spawn(&mut command, name).map(|mut program| {
        if let Err(error) = signals.on_to(&program) {
            tracing::warn!("SIGTERM is not passed on to the program: {error:#}");
        }
        program.wait().context("cannot wait for the program")
    });
    // Programs that still run have it mapped; those that start from now on count no more.
    let _ = std::fs::remove_file(&path);
    let status = status??;
    cuttlefs_common::tell!("{}", report(&counts, plan.mounts.len()));
    Ok(exit_code(status))
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
                "{} was not mounted by you with `cuttlefs mount` or `cuttlefs up`, so its server is not known here; mount it yourself, or ask its owner to run the program",
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
        is_mapped: matches!(state.source.parse(), Ok(Endpoint::Shm(_))),
        url: state.source,
        key: state.trust.key,
        server_user: state.trust.server_user,
        pool: figures::pool_of(&mount.mountpoint)?.to_string(),
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
    let is_seen =
        Count::ALL.iter().any(|(count, _)| !matches!(count, Count::Programs) && counts.get(*count) > 0);
    if counts.get(Count::Programs) == 0 {
        text += "\n  No program loaded the library: was it linked statically, or did it change its rights (set-user-ID)?";
    } else if !is_seen {
        text += "\n  No access to files of a mount was seen: what the C library reads for itself (fread, mappings of programs) is the kernel's, and not counted.";
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_report_names_what_happened() {
        let directory = tempfile::tempdir().expect("a directory");
        let counts = Counts::make(&directory.path().join("counts")).expect("counts");
        let text = report(&counts, 2);
        assert!(text.starts_with("cuttlefs preload: 2 mounts\n             0  reads taken\n"), "{text}");
        assert!(text.contains("linked statically"), "{text}");
        counts.add(Count::Programs, 1);
        let text = report(&counts, 2);
        assert!(!text.contains("linked statically") && text.contains("fread"), "{text}");
        counts.add(Count::Reads, 12);
        counts.add(Count::LeftEnd, 1);
        let text = report(&counts, 1);
        assert!(
            text.contains("12  reads taken\n             1  reads left: at the end of the file\n"),
            "{text}"
        );
    }

    #[test]
    fn a_directory_outside_of_mounts_is_told() {
        let directory = tempfile::tempdir().expect("a directory");
        let error = planned(&[directory.path().to_owned()]).expect_err("no mount").to_string();
        assert!(error.ends_with("is in no mount of cuttlefs"), "{error}");
    }
}
