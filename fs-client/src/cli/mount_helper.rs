//! The call by mount(8): `mount.fuse.cuttlefs SPEC DIR [-sfnv] [-N NAMESPACE] [-o OPTIONS] [-t TYPE]`.
//!
//! A machine that boots tries each mount once, and goes on without a mount that failed (`nofail`). So the helper waits for a server or a network that
//! is not there yet, as mount.nfs(8) does.

use super::mount::{self, MountArgs};
use super::remount;
use super::written::Written;
use anyhow::Context;
use clap::Args;
use std::path::PathBuf;

/// How long the helper waits for the server, unless the options say otherwise. systemd gives a mount 90 s.
const RETRY: &str = "retry=30";

/// Arguments of the helper, as in mount(8), "External helpers".
#[derive(Args)]
pub(super) struct HelperArgs {
    /// What: the server's endpoint; fstab may write it as `cuttlefs#tcp://...`
    spec: String,
    /// Where
    mountpoint: PathBuf,
    /// Options
    #[arg(short = 'o')]
    options: Vec<String>,
    /// Tolerate unknown options: they are reported nevertheless
    #[arg(short = 's')]
    sloppy: bool,
    /// Do everything but mount
    #[arg(short = 'f')]
    fake: bool,
    /// Do not write /etc/mtab: there is none
    #[arg(short = 'n')]
    no_mtab: bool,
    /// Say more
    #[arg(short = 'v')]
    verbose: bool,
    /// Mount namespace: mount(8) has switched to it already
    #[arg(short = 'N')]
    namespace: Option<String>,
    /// Type with its subtype: we know who we are
    #[arg(short = 't')]
    fs_type: Option<String>,
}

pub(super) fn run(args: &HelperArgs) -> anyhow::Result<()> {
    let spec = args.spec.strip_prefix("cuttlefs#").unwrap_or(&args.spec);
    let server: Written = spec.parse().with_context(|| format!("cannot mount {}", args.spec))?;
    if args.verbose {
        cuttlefs_common::tell!("mounting {server} at {} with {:?}", args.mountpoint.display(), args.options);
    }
    if args.fake {
        mount::parse_options(&args.options)?;
        return Ok(());
    }
    let mount_args = MountArgs {
        server,
        mountpoint: args.mountpoint.clone(),
        // If an option is given twice, the last one counts.
        options: std::iter::once(RETRY.to_owned()).chain(args.options.iter().cloned()).collect(),
        key: None,
        server_user: None,
        foreground: false,
        detached: false,
    };
    if remount::is_wanted(&args.options) {
        return remount::run(&args.mountpoint, &args.options);
    }
    // mount(8) prints nothing if it worked, and its caller may take any output for a warning.
    let mounted = mount::in_background(mount_args)?;
    if args.verbose {
        cuttlefs_common::tell!("{mounted}");
    }
    Ok(())
}
