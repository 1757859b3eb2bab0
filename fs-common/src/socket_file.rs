//! The files of Unix sockets.

use rustix::fd::AsRawFd;
use rustix::fs::{FileType, Mode, OFlags};
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};
use std::io;
use std::os::unix::fs::FileTypeExt;
use std::path::Path;

/// Sets the mode of a socket. Not by its path: whoever may write to the folder could put a link to another file there meanwhile.
///
/// # Errors
/// There is something else.
pub fn set_mode(socket: &Path, mode: u32) -> io::Result<()> {
    let place = rustix::fs::open(socket, OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC, Mode::empty())?;
    if FileType::from_raw_mode(rustix::fs::fstat(&place)?.st_mode) != FileType::Socket {
        return Err(io::Error::other(
            "something else has taken the socket's place; let only this user write to the folder",
        ));
    }
    // A descriptor that opens nothing has no other way to its file.
    rustix::fs::chmod(format!("/proc/self/fd/{}", place.as_raw_fd()), Mode::from_raw_mode(mode))?;
    Ok(())
}

/// Whether this is the file of a socket that no process has any more: its process was killed.
///
/// # Errors
/// It cannot be looked at.
pub fn is_left_behind(path: &Path) -> io::Result<bool> {
    if !std::fs::symlink_metadata(path)?.file_type().is_socket() {
        return Ok(false);
    }
    // It never gets through to a stream or a sequence of packets, so whoever listens there is not disturbed; and one that is about to listen is told from
    // none.
    let asking =
        rustix::net::socket_with(AddressFamily::UNIX, SocketType::DGRAM, SocketFlags::CLOEXEC, None)?;
    Ok(rustix::net::connect(&asking, &SocketAddrUnix::new(path)?) == Err(Errno::CONNREFUSED))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::PermissionsExt;
    use std::os::unix::net::UnixListener;

    #[test]
    fn no_file_that_a_link_in_the_sockets_place_names_gets_its_mode() {
        let folder = tempfile::tempdir().expect("a folder");
        let [file, place] = ["file", "place"].map(|name| folder.path().join(name));
        std::fs::write(&file, "").expect("made");
        std::fs::set_permissions(&file, PermissionsExt::from_mode(0o600)).expect("set");
        let mode = |path: &Path| std::fs::metadata(path).expect("there").permissions().mode() & 0o777;
        std::os::unix::fs::symlink(&file, &place).expect("linked");
        set_mode(&place, 0o666).expect_err("a link");
        set_mode(&file, 0o666).expect_err("a file");
        assert_eq!(mode(&file), 0o600);
        std::fs::remove_file(&place).expect("gone");
        let _socket = UnixListener::bind(&place).expect("bound");
        set_mode(&place, 0o640).expect("a socket");
        assert_eq!(mode(&place), 0o640);
    }

    #[test]
    fn a_socket_is_left_behind_when_its_process_has_closed_it() {
        let folder = tempfile::tempdir().expect("a folder");
        let [file, stream, packets] = ["file", "stream", "packets"].map(|name| folder.path().join(name));
        std::fs::write(&file, "").expect("made");
        let listener = UnixListener::bind(&stream).expect("bound");
        listener.set_nonblocking(true).expect("set");
        // It does not listen yet.
        let kind = SocketType::SEQPACKET;
        let bound = rustix::net::socket_with(AddressFamily::UNIX, kind, SocketFlags::CLOEXEC, None);
        let bound = bound.expect("a socket");
        rustix::net::bind(&bound, &SocketAddrUnix::new(&packets).expect("an address")).expect("bound");
        let found = || [&file, &stream, &packets].map(|path| is_left_behind(path).expect("looked at"));
        assert_eq!(found(), [false; 3]);
        assert!(listener.accept().is_err(), "nobody has come");
        drop((listener, bound));
        assert_eq!(found(), [false, true, true]);
        is_left_behind(&folder.path().join("none")).expect_err("nothing is there");
    }
}
