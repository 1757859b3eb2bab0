//! The client's modules form layers: a module names only modules below it. See `docs/ARCHITECTURE.md`, "The tree".

mod imports;

use imports::{Named, named, out_of_order, rust_files};
use std::fs;
use std::path::Path;

/// The modules, the lowest first.
const ORDER: [&str; 14] = [
    "descriptors",
    "threads",
    "signals",
    "swap",
    "deadline",
    "transport",
    "session",
    "reach",
    "read",
    "file",
    "native",
    "preload",
    "fuse",
    "cli",
];

#[test]
fn no_module_names_one_above_it() {
    let sources = Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
    let wrong = out_of_order(&sources, &ORDER);
    assert!(wrong.is_empty(), "the order is {ORDER:?}:\n{}", wrong.join("\n"));
    // The check would pass if it read no files, so see that each module is found.
    for module in ORDER {
        assert!(
            rust_files(&sources).iter().any(|file| file.starts_with(sources.join(module))
                || file == &sources.join(module).with_extension("rs")),
            "{module} is gone"
        );
    }
    let session = fs::read_to_string(sources.join("session/mod.rs")).expect("a source");
    assert!(names(&session, "session").iter().any(|(_, module)| module == "transport"));
}

fn names(source: &str, module: &str) -> Vec<(usize, String)> {
    let path: Vec<String> = module.split("::").map(str::to_owned).collect();
    named(source, &path).into_iter().map(|Named { line, module }| (line, module)).collect()
}

fn modules(source: &str, module: &str) -> Vec<String> {
    names(source, module).into_iter().map(|(_, module)| module).collect()
}

#[test]
fn a_planted_import_is_found() {
    let directory = tempfile::tempdir().expect("a directory");
    let write = |name: &str, source: &str| {
        let path = directory.path().join(name);
        fs::create_dir_all(path.parent().expect("a parent")).expect("a directory");
        fs::write(path, source).expect("a source");
    };
    write("lib.rs", "pub use crate::file::Volume;");
    write(
        "session/mod.rs",
        "use crate::transport::Lane;\n\nuse crate::{\n    deadline,\n    file::{Volume, volume},\n};\n",
    );
    write("session/locks/table.rs", "fn look() {\n    super::super::super::read::look()\n}\n");
    write("attic.rs", "");
    let wrong = out_of_order(directory.path(), &ORDER);
    assert_eq!(
        wrong,
        [
            "attic.rs: the order does not say where attic stands",
            "session/locks/table.rs:2: session names read",
            "session/mod.rs:5: session names file",
        ]
    );
}

#[test]
fn every_way_to_name_a_module_is_read() {
    assert_eq!(modules("use crate::{a::{x, y::z}, b, c as d};", "m"), ["a", "b", "c"]);
    assert_eq!(
        modules("pub(in crate::a) fn f(x: &crate::b::X) -> $crate::c::Y { crate :: d :: z() }", "m"),
        ["a", "b", "c", "d"]
    );
    assert_eq!(modules("use super::{x, super::{a, b::c}};", "m::n"), ["a", "b"]);
    assert_eq!(modules("use super::x; use self::y; use self::super::super::a;", "m::n"), ["a"]);
    assert_eq!(
        modules("mod t { use super::super::a; mod u { use super::x; } } use super::b;", "m"),
        ["a", "b"]
    );
    assert_eq!(modules("use crate::*; use crate as all; use super::*;", "m"), ["*", "*", "*"]);
    assert_eq!(
        modules("pub(crate) fn f(self) { Self::new(super::super::x) } pub(super) struct S;", "m::n"),
        ["x"]
    );
}

#[test]
fn what_is_no_code_is_passed_over() {
    let source = r####"
        /// crate::a
        /* crate::b /* crate::c */ crate::d */
        const TEXT: &str = "crate::e \" crate::f";
        const RAW: &str = r##"crate::g " "# crate::h"##;
        const QUOTES: [char; 3] = ['"', '\'', '\u{22}'];
        fn look<'a>(_: &'a str) -> crate::i::X<'a> { b"crate::j" }
    "####;
    assert_eq!(names(source, "m"), [(7, "i".to_owned())]);
}
