//! `cuttlefs umount`.

use super::busy;
use super::connection::{abort, abort_file};
use super::figures::{self, Ask, MountCondition};
use super::run_state::RunState;
use crate::fuse::{MountEntry, MountTable};
use anyhow::{Context, bail};
use clap::Args;
use rustix::io::Errno;
use rustix::mount::UnmountFlags;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

/// How long the process behind a mount may take to close and write everything once the mount is gone.
const END_LIMIT: Duration = Duration::from_secs(60);

/// How long a server that is away may take to come back for changes that only the mount has.
const AWAY_LIMIT: Duration = Duration::from_secs(15);
/// How long an unmount by force lets the mount sync.
const FORCE_LIMIT: Duration = Duration::from_secs(2);
/// The pause between two questions to a mount that syncs.
const ASK_AGAIN: Duration = Duration::from_millis(10);

/// Arguments of `umount`.
#[derive(Args)]
#[command(after_help = "Examples:
  cuttlefs umount /mnt
  cuttlefs umount -f /mnt      end a mount that hangs because its server is away

What no sync has covered is synced first. If the server is away for longer than 15 s the mount
stays, because only it has those changes; -f gives them up and says how much may be lost. -f also
ends the mount's copies in other mount namespaces. A server that `cuttlefs up` has started ends
with its mount.")]
pub(super) struct UmountArgs {
    /// Where the file system is mounted
    mountpoint: PathBuf,
    /// Break off requests that wait for the server, give unsynced changes up, and unmount even if files are open
    #[arg(short, long)]
    force: bool,
}

pub(super) fn run(args: &UmountArgs) -> anyhow::Result<()> {
    let table = MountTable::read()?;
    let mountpoint = table
        .resolve(&args.mountpoint)
        .with_context(|| format!("there is no {}", args.mountpoint.display()))?;
    let state = RunState::load(&mountpoint)?;
    let mounted = match table.at(&mountpoint) {
        Some(entry) if !entry.is_cuttlefs() => {
            bail!("what is mounted at {} is {}, not cuttlefs", mountpoint.display(), entry.fs_type)
        }
        mounted => mounted,
    };
    let forcing = "cuttlefs umount -f";
    if mounted.is_some() {
        prepare(&mountpoint, state.as_ref(), args.force, forcing)?;
        unmount(&mountpoint, args.force, forcing)?;
    }
    let copies = end_copies(&mountpoint, mounted, state.as_ref(), args.force, forcing)?;
    if mounted.is_none() && copies == 0 {
        bail!("nothing is mounted at {}", mountpoint.display());
    }
    if let Some(state) = state {
        wait_for_end(&state, args.force)?;
        // The mount's process removes its state itself, unless it was killed. The state of a mount of `up` is for `down` to remove.
        if state.server.is_none() {
            state.forget();
        }
    }
    Ok(())
}

/// Lets a mount sync the changes that only it holds; with `force`, gives them up if they are not synced soon.
///
/// # Errors
/// The server is away and does not come back, or refuses the changes, so an unmount would throw them away.
pub(super) fn prepare(
    mountpoint: &Path,
    state: Option<&RunState>,
    force: bool,
    forcing: &str,
) -> anyhow::Result<()> {
    // If no process answers there is nothing to wait for: the process has died, or is another user's, and writes what it loses to its log.
    let ask = |what| figures::ask_condition(mountpoint, what).ok();
    if force {
        // The mount may not have noticed yet that the server is away.
        sync_within(&ask, |now| if now.away().is_some() { Duration::ZERO } else { FORCE_LIMIT }, |_, _| ());
        if let Some(condition) = ask(Ask::GiveUp).filter(|condition| condition.unsynced().files > 0) {
            let because = condition.away().map_or_else(
                || "the server does not answer".to_owned(),
                |because| format!("the server is away ({because})"),
            );
            cuttlefs_common::tell!("giving up {}, which may be lost: {because}", condition.unsynced());
        }
        return Ok(());
    }
    let server = state.map_or("the server", |state| &state.source);
    let limit = |now: &MountCondition| if now.away().is_some() { AWAY_LIMIT } else { END_LIMIT };
    let why = |now: &MountCondition| {
        now.away().map_or_else(|| "it does not answer".to_owned(), |because| format!("it is away: {because}"))
    };
    let mut tell_at = Duration::from_secs(1);
    let condition = sync_within(&ask, limit, |now, waited| {
        if waited > tell_at {
            tell_at = limit(now);
            cuttlefs_common::tell!(
                "waiting up to {} s for {server} ({}), which is to take {}",
                limit(now).as_secs(),
                why(now),
                now.unsynced()
            );
        }
    });
    if let Some(now) = condition.filter(|now| now.syncing || now.is_refused()) {
        let (place, unsynced) = (mountpoint.display(), now.unsynced());
        let (because, advice) = if now.is_refused() {
            let advice = "Mend what the server's log names, and start the server again";
            ("it answered with an error".to_owned(), advice.to_owned())
        } else {
            (why(&now), how_to_get_it_back(state))
        };
        bail!(
            "{place} stays mounted: only this mount has {unsynced}, and {server} did not take them ({because}). {advice}, and \
             unmount again; or give them up, so that they may be lost, with: {forcing} {place}"
        );
    }
    Ok(())
}

/// Lets a mount sync, and waits for the end of the sync for as long as `limit` says for its condition. Returns the last condition; `None` if no
/// process answers for the mount.
fn sync_within(
    ask: &impl Fn(Ask) -> Option<MountCondition>,
    limit: impl Fn(&MountCondition) -> Duration,
    mut waiting: impl FnMut(&MountCondition, Duration),
) -> Option<MountCondition> {
    let began = Instant::now();
    let mut condition = ask(Ask::Sync);
    while let Some(now) = condition.as_ref().filter(|now| now.syncing && began.elapsed() < limit(now)) {
        waiting(now, began.elapsed());
        std::thread::sleep(ASK_AGAIN);
        condition = ask(Ask::Figures);
    }
    condition
}

/// What to do about a server that is away.
fn how_to_get_it_back(state: Option<&RunState>) -> String {
    match state {
        Some(RunState { mountpoint, pool: Some(pool), .. }) => {
            format!(
                "Start the server with: cuttlefs up {} --pool {} (its log: {}/log)",
                mountpoint.display(),
                pool.display(),
                pool.display()
            )
        }
        _ => "Bring the server or the network back".to_owned(),
    }
}

/// Unmounts. If the mount is busy the error names its users, and the command that unmounts by force.
pub(super) fn unmount(mountpoint: &Path, force: bool, forcing: &str) -> anyhow::Result<()> {
    match try_unmount(mountpoint, force)? {
        Unmounted::Done => Ok(()),
        Unmounted::Busy => {
            let away = figures::ask_condition(mountpoint, Ask::Figures).ok().and_then(|now| now.away());
            let away =
                away.map_or_else(String::new, |because| format!("its server is away ({because}), and "));
            bail!("{away}{}", busy_text(mountpoint, forcing))
        }
    }
}

/// The result of an unmount.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Unmounted {
    /// The mount is gone.
    Done,
    /// The mount is in use.
    Busy,
}

pub(super) fn busy_text(mountpoint: &Path, forcing: &str) -> String {
    let users =
        busy::users(mountpoint).unwrap_or_else(|| "  a process that is just opening something there (ps shows it in state D or S), or that cannot be seen from here".to_owned());
    format!(
        "{} is in use:\n{users}\nend that and try again, or break off with: {forcing} {}",
        mountpoint.display(),
        mountpoint.display()
    )
}

pub(super) fn try_unmount(mountpoint: &Path, force: bool) -> anyhow::Result<Unmounted> {
    if force {
        // End the connection first, so that no process waits for a server any more; I/O on open files fails from then on.
        let _ = rustix::mount::unmount(mountpoint, UnmountFlags::FORCE | UnmountFlags::NOFOLLOW);
        detach(mountpoint)?;
        return Ok(Unmounted::Done);
    }
    match rustix::mount::unmount(mountpoint, UnmountFlags::NOFOLLOW) {
        // EINVAL: it is not a mount (any more).
        Ok(()) | Err(Errno::INVAL) => Ok(Unmounted::Done),
        Err(Errno::BUSY) => Ok(Unmounted::Busy),
        Err(Errno::PERM) => fusermount(mountpoint, &["-u"]),
        Err(error) => Err(error).with_context(|| format!("cannot unmount {}", mountpoint.display())),
    }
}

/// Removes a mount from the tree at once. It ends when its last user does.
pub(super) fn detach(mountpoint: &Path) -> anyhow::Result<()> {
    match rustix::mount::unmount(mountpoint, UnmountFlags::DETACH | UnmountFlags::NOFOLLOW) {
        Ok(()) | Err(Errno::INVAL) => Ok(()),
        Err(Errno::PERM) => fusermount(mountpoint, &["-u", "-z"]).map(|_| ()),
        Err(error) => Err(error).with_context(|| format!("cannot unmount {}", mountpoint.display())),
    }
}

/// Looks for copies of an unmounted mount in other mount namespaces: with the last of them the kernel ends the mount, and its process. `mounted` is
/// its entry of before the unmount. Returns how many there were.
///
/// # Errors
/// There are copies, and they are not to be ended by `force`.
pub(super) fn end_copies(
    mountpoint: &Path,
    mounted: Option<&MountEntry>,
    state: Option<&RunState>,
    force: bool,
    forcing: &str,
) -> anyhow::Result<usize> {
    let copies = match (mounted, state) {
        (Some(MountEntry { device, .. }), _) => {
            let device = device.clone();
            busy::copies(move |entry| entry.device == device)
        }
        // An earlier unmount has left them.
        (None, Some(RunState { source, mountpoint, .. })) => {
            let (source, at) = (source.clone(), mountpoint.clone());
            busy::copies(move |entry| entry.source == source && entry.mountpoint == at)
        }
        (None, None) => return Ok(0),
    };
    if !copies.is_empty() && !force {
        bail!(
            "{} is unmounted here, but the mount goes on in other mount namespaces:\n{}\nend these processes, or end the mount \
             there, too, with: {forcing} {}",
            mountpoint.display(),
            busy::copies_text(&copies),
            mountpoint.display()
        );
    }
    for copy in &copies {
        // `None`: it has ended meanwhile.
        if let Some(file) = abort_file(&copy.device)? {
            abort(file).with_context(|| format!("cannot end the connection of {}", mountpoint.display()))?;
        }
    }
    Ok(copies.len())
}

/// Unmounts by fusermount3, for users other than root.
fn fusermount(mountpoint: &Path, arguments: &[&str]) -> anyhow::Result<Unmounted> {
    let output = Command::new("fusermount3")
        .args(arguments)
        .arg("--")
        .arg(mountpoint)
        .output()
        .context("cannot run fusermount3, which users other than root need; install the package fuse3")?;
    let text = String::from_utf8_lossy(&output.stderr);
    if output.status.success() {
        Ok(Unmounted::Done)
    } else if text.contains("busy") {
        Ok(Unmounted::Busy)
    } else {
        bail!("cannot unmount {}: {}", mountpoint.display(), text.trim_end());
    }
}

/// Waits for the process of an unmounted mount, which writes back, unless it was `forced` off, and ends.
pub(super) fn wait_for_end(state: &RunState, forced: bool) -> anyhow::Result<()> {
    let Some(process) = state.mount.find()? else {
        return what_it_lost(state);
    };
    if process.wait(Duration::from_secs(1))? {
        return what_it_lost(state);
    }
    let awaited = if forced { "the mount's process to end" } else { "what is still being written" };
    cuttlefs_common::tell!("unmounted; waiting for {awaited}");
    if process.wait(END_LIMIT)? {
        return what_it_lost(state);
    }
    bail!(
        "{} is unmounted, but process {} has not ended after {} s: it waits for {}. \
         It ends when the server or the network is back; to give up on what was not written: kill {}",
        state.mountpoint.display(),
        state.mount.pid,
        END_LIMIT.as_secs(),
        state.source,
        state.mount.pid
    )
}

/// The process of a mount has ended: returns what was lost with it as an error, once.
fn what_it_lost(state: &RunState) -> anyhow::Result<()> {
    let Some(ended) = RunState::load(&state.mountpoint)?.filter(|ended| ended.mount == state.mount) else {
        return Ok(());
    };
    match &ended.lost {
        Some(lost) => {
            ended.forget();
            bail!("{} is unmounted; {lost}", state.mountpoint.display())
        }
        None => Ok(()),
    }
}
