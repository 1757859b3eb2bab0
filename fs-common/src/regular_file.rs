//! Files that others may have put where one is expected: a pipe there would be waited for, and a device may have no end.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

/// Opens a regular file by `options`, and nothing else; never waits for the other end of a pipe.
///
/// # Errors
/// Those of open(2); "it is no regular file". The opened file is checked, since the path may name another one by then.
pub fn open_by(options: &OpenOptions, path: &Path) -> io::Result<File> {
    let file = options.clone().custom_flags(libc::O_NONBLOCK).open(path)?;
    if file.metadata()?.is_file() { Ok(file) } else { Err(io::Error::other("it is no regular file")) }
}

/// Opens a regular file to read it; as [`open_by`].
///
/// # Errors
/// As [`open_by`].
pub fn open(path: &Path) -> io::Result<File> {
    open_by(OpenOptions::new().read(true), path)
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::fs::{CWD, FileType, Mode, mknodat};

    #[test]
    fn only_regular_files_are_opened() {
        let directory = tempfile::tempdir().expect("directory");
        let [file, pipe] = ["file", "pipe"].map(|name| directory.path().join(name));
        std::fs::write(&file, b"text").expect("written");
        mknodat(CWD, &pipe, FileType::Fifo, Mode::RWXU, 0).expect("a pipe");
        assert!(open(&file).is_ok());
        for other in [&pipe, Path::new("/dev/zero"), directory.path()] {
            assert!(open(other).expect_err("no file").to_string().contains("no regular file"), "{other:?}");
        }
        // Nobody reads from it.
        assert!(open_by(OpenOptions::new().append(true), &pipe).is_err());
    }
}
