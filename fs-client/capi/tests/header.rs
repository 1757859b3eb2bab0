//! `cuttlefs.h` beside the functions of the library: cbindgen writes a prototype of each, and the C compiler compares them with the header's. The header is
//! written by hand for its comments, and cannot differ.

use std::collections::BTreeSet;
use std::path::Path;
use std::process::Command;

/// Types of other crates and structures, which the header defines, by their names in C. `program.c` compares the structures.
const TYPES: [(&str, &str); 8] = [
    ("Session", "cuttlefs_session"),
    ("File", "cuttlefs_file"),
    ("Buffer", "cuttlefs_buffer"),
    ("Queue", "cuttlefs_queue"),
    ("Grant", "cuttlefs_grant"),
    ("Options", "struct cuttlefs_options"),
    ("Stat", "struct cuttlefs_stat"),
    ("Completion", "struct cuttlefs_completion"),
];

fn prototypes(home: &Path) -> String {
    let mut config =
        cbindgen::Config { language: cbindgen::Language::C, no_includes: true, ..Default::default() };
    for (name, in_c) in TYPES {
        config.export.rename.insert(name.into(), in_c.into());
        config.export.exclude.push(name.into());
    }
    let builder = cbindgen::Builder::new().with_config(config).with_src(home.join("src/lib.rs"));
    let mut text = Vec::new();
    builder.generate().expect("prototypes").write(&mut text);
    // A handle is nothing that C code could change, so the header calls none constant.
    String::from_utf8(text).expect("text").replace("const cuttlefs_", "cuttlefs_")
}

fn functions(text: &str) -> BTreeSet<&str> {
    text.split(|char: char| !(char.is_ascii_alphanumeric() || "_(".contains(char)))
        .filter_map(|word| Some(word.split_once('(')?.0))
        .filter(|name| name.starts_with("cuttlefs_"))
        .collect()
}

#[test]
fn the_header_declares_each_function_as_it_is() {
    let home = Path::new(env!("CARGO_MANIFEST_DIR"));
    let header = std::fs::read_to_string(home.join("include/cuttlefs.h")).expect("the header");
    let prototypes = prototypes(home);
    assert_eq!(functions(&header), functions(&prototypes));
    let work = tempfile::tempdir().expect("a directory");
    let both = work.path().join("both.c");
    std::fs::write(&both, format!("#include \"cuttlefs.h\"\n{prototypes}")).expect("written");
    let compiled = Command::new("cc")
        // The header says how long an array has to be, which a prototype of Rust's cannot.
        .args(["-std=c11", "-Wall", "-Wextra", "-Werror", "-Wno-array-parameter", "-fsyntax-only", "-I"])
        .arg(home.join("include"))
        .arg(&both)
        .output()
        .expect("cc, the C compiler that links Rust programs, too");
    assert!(compiled.status.success(), "{}", String::from_utf8_lossy(&compiled.stderr));
}
