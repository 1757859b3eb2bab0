//! `cuttlefs.toml` as a person wrote it. Whatever parses renders as a file that parses to the same.
#![no_main]

use cuttlefs_server::config::Config;
use libfuzzer_sys::fuzz_target;
use std::path::Path;

fuzz_target!(|text: &str| {
    let path = Path::new("cuttlefs.toml");
    let Ok(config) = Config::parse(text, path) else {
        return;
    };
    let rendered = config.render().expect("what came from text can be text");
    let again = Config::parse(&rendered, path).expect("a rendered file parses");
    assert_eq!(again, config, "{rendered}");
});
