//! `cuttlefs status`: the figures of a server, and, asked for a mount, those of the mount's process too.
//!
//! The mount's part comes under `mount`, beside the server's. It is shown even while the server is away.

use super::connect::{Backend, Trust};
use super::figures::{self, Ask};
use super::key;
use super::memory_status;
use super::run_state::{self, RunState};
use super::summary::{PARTS, summary};
use crate::fuse::MountTable;
use anyhow::{Context, anyhow, bail};
use clap::Args;
use cuttlefs_common::explain::explain;
use cuttlefs_common::rdma::Endpoint;
use serde_json::{Map, Value, json};
use std::io::{ErrorKind, Write};
use std::path::{Path, PathBuf};

/// The most mounts that an error names.
const NAMED_MOUNTS: usize = 8;

/// Arguments of `status`.
#[derive(Args)]
#[command(after_help = "Examples:
  cuttlefs status /mnt
  cuttlefs status tcp://box:7950 --key /etc/cuttlefs/key --json | jq .sessions
  cuttlefs status --memory tcp://box:7951 --key FILE      of what cuttlefsd memory lends

Shows what a person needs, and under `problems` what is to be looked after. Of a mount it also shows
whether its server is away and why, what is not synced, and its log. It fails if the server does not
answer or the mount's process has died. docs/operations.md says which figures to watch.")]
pub(super) struct StatusArgs {
    /// A server's endpoint, or a path in a mount of it
    server_or_mount: String,
    /// The endpoint is a memory node's (cuttlefsd memory), not a server's
    #[arg(long)]
    memory: bool,
    /// The key to show over tcp:// and rdma:// [default: the mount's]
    #[arg(long, value_name = "FILE")]
    key: Option<PathBuf>,
    /// Believe this user's server over unix:// and shm://, not only root's and your own [default: the mount's]
    #[arg(long, value_name = "UID")]
    server_user: Option<u32>,
    /// Print every figure
    #[arg(long)]
    all: bool,
    /// Print every figure as JSON
    #[arg(long, conflicts_with = "all")]
    json: bool,
}

pub(super) fn run(backend: &dyn Backend, args: &StatusArgs) -> anyhow::Result<()> {
    if args.memory {
        return of_memory(args);
    }
    let asked = Asked::parse(&args.server_or_mount)?;
    let state = match &asked.mountpoint {
        Some(mountpoint) => RunState::load(mountpoint)?,
        None => None,
    };
    let of_mount = state.as_ref().map(|state| state.trust.clone()).unwrap_or_default();
    let trust = Trust {
        key: key::chosen([args.key.clone(), of_mount.key])?,
        server_user: args.server_user.or(of_mount.server_user),
    };
    let answer = backend.server_status(&asked.server, &trust).and_then(|text| {
        serde_json::from_str::<Map<String, Value>>(&text).context("the server's status is not a JSON object")
    });
    let mut status = answer.as_ref().cloned().unwrap_or_default();
    let death = match &state {
        Some(state) if state.mount.find()?.is_none() => Some(died(state)?),
        _ => None,
    };
    if let Some(mountpoint) = &asked.mountpoint {
        let mount = match &death {
            Some(death) => json!({ "death": death.to_string() }),
            None => figures::ask(mountpoint, Ask::Figures)
                .unwrap_or_else(|error| json!({ "error": format!("{error:#}") })),
        };
        status.insert("mount".to_owned(), mount);
        if let Err(error) = &answer {
            status.insert("server_error".to_owned(), json!(explain(error.as_ref())));
        }
    }
    // What the status of a mount tells is not told again behind it, with all its advice.
    let answer = if asked.mountpoint.is_some() { answer.map_err(|error| in_short(&error)) } else { answer };
    // If the mount's process has died, that is the error, whatever the server answers.
    let answer = match (death, &state) {
        (Some(death), _) => Err(death),
        (None, Some(RunState { mountpoint, pool: Some(pool), .. })) => answer.map_err(|error| {
            let (place, pool) = (mountpoint.display(), pool.display());
            anyhow!("{error}; if it has died, start it again with: cuttlefs up {place} --pool {pool}")
        }),
        _ => answer,
    };
    // Without the server's status there is still that of the mount; the error then follows it.
    if !status.is_empty() {
        let mut of =
            asked.mountpoint.as_ref().map_or_else(|| asked.server.to_string(), |at| at.display().to_string());
        if let Some(key) = &args.key {
            of += &format!(" --key {}", key.display());
        }
        print_status(&asked.server, &of, status, args)?;
    }
    answer.map(|_| ())
}

/// Prints the figures of a memory node.
fn of_memory(args: &StatusArgs) -> anyhow::Result<()> {
    let node = args.server_or_mount.parse()?;
    let trust = Trust { key: key::chosen([args.key.clone()])?, server_user: args.server_user };
    let figures = memory_status::ask(&node, &trust)?;
    if args.json || args.all {
        return print(&written(&node, &memory_status::json(&figures), args)?);
    }
    print(&memory_status::lines(&node, &figures))
}

/// An error that the status shows already, without its advice.
fn in_short(error: &anyhow::Error) -> anyhow::Error {
    let text = explain(error.as_ref());
    anyhow!("{}", text.split(PARTS).next().unwrap_or_default())
}

fn died(state: &RunState) -> anyhow::Result<anyhow::Error> {
    let (place, log) = (state.mountpoint.display(), run_state::file(&state.mountpoint, "log")?);
    let advice = if state.server.is_some() {
        format!(
            "end what is left with `cuttlefs down {place}`, and start it again with `cuttlefs up {place}` and its options"
        )
    } else {
        format!("take the mount away with `cuttlefs umount {place}`, and mount it again")
    };
    Ok(anyhow!(
        "the process behind the mount {place} has died (its log, if it ran in the background: {}); {advice}",
        log.display()
    ))
}

/// Prints the status of a server; `of` is by which arguments it was asked.
fn print_status(
    server: &Endpoint,
    of: &str,
    status: Map<String, Value>,
    args: &StatusArgs,
) -> anyhow::Result<()> {
    let status = Value::Object(status);
    if args.json || args.all {
        return print(&written(server, &status, args)?);
    }
    let hint = format!("every figure: cuttlefs status {of} --all, or --json for programs");
    print(&format!("server      {server}\n{}{hint}\n", summary(&status)))
}

/// Every figure: as JSON, or as lines.
fn written(server: &Endpoint, status: &Value, args: &StatusArgs) -> anyhow::Result<String> {
    if args.json {
        return Ok(serde_json::to_string_pretty(status).context("cannot print the status")? + "\n");
    }
    let mut text = format!("server: {server}\n");
    print_value(&mut text, status, 0);
    Ok(text)
}

fn print(text: &str) -> anyhow::Result<()> {
    // Not print!, which panics when a reader such as `head` has had enough.
    match std::io::stdout().lock().write_all(text.as_bytes()) {
        Err(error) if error.kind() != ErrorKind::BrokenPipe => Err(error).context("cannot print the status"),
        _ => Ok(()),
    }
}

/// The subject of a status.
#[derive(Debug)]
struct Asked {
    server: Endpoint,
    /// The mount that was named, if one was.
    mountpoint: Option<PathBuf>,
}

impl Asked {
    /// The server that is meant, named by its endpoint or by a path in a mount.
    fn parse(server_or_mount: &str) -> anyhow::Result<Self> {
        if server_or_mount.contains("://") {
            return Ok(Self { server: server_or_mount.parse()?, mountpoint: None });
        }
        let missing = || format!("there is no {server_or_mount}; write a mounted path or tcp://HOST:PORT");
        let table = MountTable::read()?;
        let path = table.resolve(Path::new(server_or_mount)).with_context(missing)?;
        match table.containing(&path) {
            Some(entry) if entry.is_cuttlefs() => {
                let server = entry.source.parse().with_context(|| {
                    format!("{} does not say which server it is of", entry.mountpoint.display())
                })?;
                Ok(Self { server, mountpoint: Some(entry.mountpoint.clone()) })
            }
            _ if is_missing(&path) => bail!("{}", missing()),
            _ => {
                let mounts = table.cuttlefs().map(|entry| entry.mountpoint.display().to_string());
                let mounts = named(&mounts.collect::<Vec<_>>());
                bail!(
                    "{server_or_mount} is not in a cuttlefs mount ({mounts}); write one, or tcp://HOST:PORT"
                )
            }
        }
    }
}

/// Whether nothing is at a path. Not for a path in a mount, which may hang.
fn is_missing(path: &Path) -> bool {
    std::fs::symlink_metadata(path).is_err_and(|error| error.kind() == ErrorKind::NotFound)
}

/// The first mounts by name, and how many more there are.
fn named(mounts: &[String]) -> String {
    if mounts.is_empty() {
        return "there are none".to_owned();
    }
    let names = mounts.iter().take(NAMED_MOUNTS).cloned().collect::<Vec<_>>().join(", ");
    match mounts.len().saturating_sub(NAMED_MOUNTS) {
        0 => names,
        more => format!("{names}, and {more} more"),
    }
}

/// JSON as indented lines.
fn print_value(out: &mut String, value: &Value, depth: usize) {
    let indent = "  ".repeat(depth);
    let mut line = |key: &str, value: &Value| match value {
        Value::Object(_) | Value::Array(_) => {
            out.push_str(&format!("{indent}{key}:\n"));
            print_value(out, value, depth + 1);
        }
        Value::String(text) => out.push_str(&format!("{indent}{key}: {text}\n")),
        other => out.push_str(&format!("{indent}{key}: {other}\n")),
    };
    match value {
        Value::Object(fields) => fields.iter().for_each(|(key, value)| line(&key.replace('_', " "), value)),
        Value::Array(items) => {
            items.iter().enumerate().for_each(|(index, item)| line(&index.to_string(), item))
        }
        other => out.push_str(&format!("{indent}{other}\n")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn json_becomes_lines() {
        let mut out = String::new();
        let value =
            serde_json::json!({"version": "0.1", "pool": {"free_pages": 3}, "sessions": [{"id": "a"}]});
        print_value(&mut out, &value, 0);
        for line in ["version: 0.1\n", "pool:\n  free pages: 3\n", "sessions:\n  0:\n    id: a\n"] {
            assert!(out.contains(line), "{out}");
        }
    }

    #[test]
    fn an_error_in_short_has_no_advice() {
        assert_eq!(in_short(&anyhow!("no answer; look there; call")).to_string(), "no answer");
        assert_eq!(in_short(&anyhow!("refused")).to_string(), "refused");
    }

    #[test]
    fn what_is_no_server_is_explained() {
        let server = Asked::parse("tcp://a:5").expect("endpoint");
        assert_eq!((server.server.to_string().as_str(), server.mountpoint), ("tcp://a:5", None));
        let error = Asked::parse("/").expect_err("no mount").to_string();
        assert!(error.contains("not in a cuttlefs mount"), "{error}");
        for missing in ["/nonexistent", "/nonexistent/a/b"] {
            let error = Asked::parse(missing).expect_err("not there").to_string();
            assert!(error.starts_with(&format!("there is no {missing};")), "{error}");
        }
        let mounts: Vec<_> = (0..10).map(|number| format!("/m{number}")).collect();
        assert_eq!(named(&[]), "there are none");
        assert_eq!(named(&mounts[..2]), "/m0, /m1");
        assert!(named(&mounts).ends_with("/m7, and 2 more"), "{}", named(&mounts));
    }
}
