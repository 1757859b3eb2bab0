//! Programs under the library do what they do without it, where no file is a mount's: with no plan, and with a plan whose mounts are not there. What it
//! does in mounts is tested by the suite `preload`.

use std::path::PathBuf;
use std::process::{Command, Output};

fn library() -> PathBuf {
    let program = std::env::current_exe().expect("this program's file");
    let places = program.ancestors().skip(1).take(2).map(|place| place.join("libcuttlefs_preload.so"));
    places.into_iter().find(|library| library.exists()).expect("cargo builds the library with its tests")
}

/// Runs a script of the shell under the library.
fn run(script: &str, plan: Option<&str>) -> Output {
    let mut command = Command::new("/bin/sh");
    command.arg("-c").arg(script).env("LD_PRELOAD", library()).env_remove("CUTTLEFS_PRELOAD");
    if let Some(plan) = plan {
        command.env("CUTTLEFS_PRELOAD", plan);
    }
    command.output().expect("a shell")
}

#[test]
fn programs_elsewhere_are_not_changed() {
    let directory = tempfile::tempdir().expect("a directory");
    let file = directory.path().join("file");
    let bytes: Vec<u8> = (0..300_000u32).flat_map(u32::to_le_bytes).collect();
    std::fs::write(&file, &bytes).expect("written");
    // No mount has this device.
    let nowhere = r#"{"version":4,"mounts":[{"major":4000,"minor":4000,"url":"tcp://127.0.0.1:1","is_mapped":false,"key":null,"server_user":null,"pool":"67e55044-10b1-426f-9247-bb680e5fe0c8","subtree":[]}],"uid":0,"take_cached":false,"counts":null}"#;
    let path = file.display();
    let script = format!(
        "cat '{path}' | dd bs=1000 2>/dev/null; dd if='{path}' bs=4096 count=3 skip=1 2>/dev/null; exec 3<'{path}'; head -c 5 <&3 >/dev/null; echo $?; \
         cat /nowhere; read line <'{path}.none' || echo failed"
    );
    let plain = Command::new("/bin/sh").arg("-c").arg(&script).output().expect("a shell");
    for plan in [None, Some(nowhere)] {
        let under = run(&script, plan);
        assert!(under.stdout == plain.stdout, "{plan:?}: other output");
        assert_eq!(
            (String::from_utf8_lossy(&under.stderr), under.status),
            (String::from_utf8_lossy(&plain.stderr), plain.status)
        );
    }
}

#[test]
fn a_library_of_another_build_than_the_command_says_so() {
    for plan in [
        "no plan at all",
        r#"{"version":999,"mounts":[],"uid":0,"take_cached":false,"counts":null}"#,
        r#"{"mounts":[],"uid":0,"counts":null}"#,
    ] {
        let under = run("true", Some(plan));
        let said = String::from_utf8_lossy(&under.stderr).into_owned();
        assert_eq!(under.status.code(), Some(127), "{said}");
        assert!(
            said.starts_with("cuttlefs preload: libcuttlefs_preload.so") && said.contains("different builds"),
            "{said}"
        );
    }
}
