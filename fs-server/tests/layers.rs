//! The order of the folders of `src`: imports go downwards only, by the table `ORDER`.
//!
//! The test reads `src` as text: a line that contains `crate::X` is an import of `X`. It ignores comments and tests, which may import what they like.
//! A folder may always import from itself.

use std::fs;
use std::path::{Path, PathBuf};

/// The folders and files of `src`, the lowest row first. Those of one row do not import each other.
const ORDER: &[&[&str]] = &[
    &["acl", "bits", "export", "group_sync", "placement", "rnics", "sync"],
    &["shares"],
    &["pool"],
    &["group_commit", "timer", "worker"],
    &["meta"],
    &["committer", "session"],
    &["fsck", "pages", "locks"],
    &["files", "veil"],
    &["rights"],
    &["config"],
    &["counters"],
    &["server"],
    &["rpc"],
    &["serve"],
    &["cli"],
];

/// Imports from a higher row that are allowed: the importing folder, the imported one, and why the import is still there.
const EXCEPTIONS: &[(&str, &str, &str)] = &[
    ("pool", "config", "format writes the pool's configuration file, and the lock of its directory reads it"),
    ("counters", "rpc", "it takes the figures of turns as those are"),
    ("server", "rpc", "it keeps the connections of clients"),
    (
        "server",
        "serve",
        "it keeps what the threads share: whether the server goes down, and the pages that rotted",
    ),
    ("veil", "rpc", "it puts its replies together as the handlers do"),
];

fn rank(folder: &str) -> Option<usize> {
    ORDER.iter().position(|row| row.contains(&folder))
}

/// The imports of a file's code: the number of the line, from 1, and the imported folder.
fn named(source: &str) -> Vec<(usize, String)> {
    let mut found = Vec::new();
    // The code behind this line is the file's own tests.
    let code = source.split("\n#[cfg(test)]\nmod ").next().unwrap_or_default();
    for (index, line) in code.lines().enumerate() {
        let line = line.split("//").next().unwrap_or_default();
        for behind in line.split("crate::").skip(1) {
            let end = behind.find(|c: char| !(c.is_ascii_lowercase() || c == '_')).unwrap_or(behind.len());
            found.push((index + 1, behind[..end].to_owned()));
        }
    }
    found
}

/// The faults of one file of a folder: one line each.
fn faults(folder: &str, file: &str, source: &str) -> Vec<String> {
    let Some(own) = rank(folder) else {
        return vec![format!("{file}: `{folder}` has no place in the order")];
    };
    let is_fault = |named: &str| {
        let is_excepted = EXCEPTIONS.iter().any(|(from, to, _)| (*from, *to) == (folder, named));
        named != folder && !is_excepted && rank(named).is_none_or(|rank| rank >= own)
    };
    let faults = named(source).into_iter().filter(|(_, named)| is_fault(named));
    faults
        .map(|(line, named)| format!("{file}:{line}: `{folder}` names `{named}`, which is not below it"))
        .collect()
}

fn sources(at: &Path, into: &mut Vec<PathBuf>) {
    for entry in fs::read_dir(at).expect("a folder").map(|entry| entry.expect("an entry").path()) {
        if entry.is_dir() {
            sources(&entry, into);
        } else if entry.extension().is_some_and(|extension| extension == "rs") {
            into.push(entry);
        }
    }
}

/// Whether the path is of a test: `tests.rs`, `x_tests.rs`, or anything in a folder `tests`.
fn is_test(path: &Path) -> bool {
    path.components().any(|part| {
        let part = part.as_os_str().to_string_lossy();
        let name = part.strip_suffix(".rs").unwrap_or(&part);
        name == "tests" || name.ends_with("_tests")
    })
}

#[test]
fn imports_go_downwards() {
    let src = Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
    let mut paths = Vec::new();
    sources(&src, &mut paths);
    assert!(paths.len() > 100, "the sources are there");
    let mut all = Vec::new();
    for path in paths {
        let inside = path.strip_prefix(&src).expect("it is in there").to_owned();
        let first = inside.components().next().expect("a name").as_os_str().to_string_lossy().into_owned();
        let folder = first.strip_suffix(".rs").unwrap_or(&first);
        if matches!(folder, "lib" | "main") || is_test(&inside) {
            continue;
        }
        let source = fs::read_to_string(&path).expect("text");
        all.extend(faults(folder, &inside.display().to_string(), &source));
    }
    assert!(all.is_empty(), "imports that go upwards:\n{}", all.join("\n"));
}

#[test]
fn an_import_that_goes_upwards_is_found_with_file_and_line() {
    let planted = "//! Not this: crate::files.\nuse crate::pool::Disk;\nuse crate::files::Files;\n";
    let expected = ["pages/x.rs:3: `pages` names `files`, which is not below it"];
    assert_eq!(faults("pages", "pages/x.rs", planted), expected);
    assert_eq!(faults("files", "files/x.rs", "let held = crate::serve::Drain::default();\n").len(), 1);
    assert_eq!(
        faults("meta", "meta/x.rs", "use crate::session::Session;\n").len(),
        1,
        "neither may rows change"
    );
    assert_eq!(faults("nowhere", "nowhere.rs", "").len(), 1);
    assert_eq!(
        faults("files", "files/x.rs", "use crate::pages::Pages;\nuse crate::files::Files;\n"),
        [""; 0]
    );
    let tests = "use crate::pool::Disk;\n\n#[cfg(test)]\nmod tests {\n    use crate::files::Files;\n}\n";
    assert_eq!(faults("pages", "pages/x.rs", tests), [""; 0]);
}

#[test]
fn every_exception_is_needed() {
    let src = Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
    for (from, to, reason) in EXCEPTIONS {
        let (mut paths, file) = (Vec::new(), src.join(format!("{from}.rs")));
        if file.exists() {
            paths.push(file);
        } else {
            sources(&src.join(from), &mut paths);
        }
        let names = |path: &PathBuf| {
            let source = fs::read_to_string(path).expect("text");
            named(&source).iter().any(|(_, named)| named == to)
        };
        assert!(paths.iter().any(names), "`{from}` does not name `{to}` any more ({reason}): strike it off");
    }
}
