//! The walk along a path, name by name. Names are asked of the server each time: nothing is remembered.

use super::NativeError;
use crate::file::RemoteVolume;
use crate::file::volume::{Caller, FsError, Volume};
use cuttlefs_common::attr::{Attr, FileKind};
use cuttlefs_common::ids::InodeNo;
use cuttlefs_common::status::Status;

/// The most symlinks of one walk, as Linux has it (path_resolution(7)).
const LINKS_MAX: usize = 40;

/// Where the last name of a path is.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Place {
    /// Its directory.
    pub(super) parent: InodeNo,
    /// The name. Empty: the path names the directory itself.
    pub(super) name: Vec<u8>,
}

/// A walk that is under way.
struct Walk<'v> {
    volume: &'v RemoteVolume,
    caller: &'v Caller,
    /// The directories from the root to where the walk is.
    way: Vec<InodeNo>,
    links: usize,
}

impl Walk<'_> {
    fn here(&self) -> InodeNo {
        self.way.last().copied().unwrap_or_else(|| self.volume.root())
    }

    fn lookup(&self, name: &[u8]) -> Result<Attr, NativeError> {
        Ok(self.volume.lookup(self.caller, self.here(), name)?)
    }

    /// The names of a symlink's target, to walk in the place of the link.
    fn target(&mut self, link: InodeNo) -> Result<Vec<Vec<u8>>, NativeError> {
        self.links += 1;
        if self.links > LINKS_MAX {
            return Err(NativeError::LinkLoop { max: LINKS_MAX });
        }
        let target = self.volume.read_link(self.caller, link)?;
        if target.first() == Some(&b'/') {
            return Err(NativeError::AbsoluteLink);
        }
        Ok(names(&target))
    }

    /// Goes along `path` up to its last name. With `follow`, a symlink there is followed, as often as it takes; then the inode that was found comes
    /// with the place.
    fn go(&mut self, path: &[u8], follow: bool) -> Result<(Place, Option<Attr>), NativeError> {
        let needs_directory = matches!(path, [.., b'/'] | [.., b'/', b'.']);
        // The last name comes first.
        let mut left = names(path);
        left.reverse();
        while let Some(name) = left.pop() {
            match name.as_slice() {
                b"." => continue,
                b".." => {
                    self.way.pop();
                    continue;
                }
                _ => {}
            }
            let is_last = left.iter().all(|name| name == b".");
            if is_last && !follow && !needs_directory {
                return Ok((Place { parent: self.here(), name }, None));
            }
            let attr = match self.lookup(&name) {
                Err(NativeError::Server(Status::NotFound)) if is_last => {
                    return Ok((Place { parent: self.here(), name }, None));
                }
                attr => attr?,
            };
            match attr.kind {
                FileKind::Symlink if !is_last || follow => {
                    let mut target = self.target(attr.ino)?;
                    target.reverse();
                    left.extend(target);
                }
                FileKind::Directory if !is_last => self.way.push(attr.ino),
                kind if !is_last || (needs_directory && kind != FileKind::Directory) => {
                    return Err(NativeError::Server(Status::NotDirectory));
                }
                _ => return Ok((Place { parent: self.here(), name }, Some(attr))),
            }
        }
        Ok((Place { parent: self.here(), name: Vec::new() }, None))
    }
}

fn names(path: &[u8]) -> Vec<Vec<u8>> {
    path.split(|byte| *byte == b'/').filter(|name| !name.is_empty()).map(<[u8]>::to_vec).collect()
}

fn begin<'v>(volume: &'v RemoteVolume, caller: &'v Caller) -> Walk<'v> {
    Walk { volume, caller, way: Vec::new(), links: 0 }
}

/// The place of a path's last name, to make or remove it: a symlink there is not followed.
pub(super) fn place(volume: &RemoteVolume, caller: &Caller, path: &[u8]) -> Result<Place, NativeError> {
    begin(volume, caller).go(path, false).map(|(place, _)| place)
}

/// The inode of a path, and its place. `Err(place)` inside: the last name does not exist there.
pub(super) fn find(
    volume: &RemoteVolume,
    caller: &Caller,
    path: &[u8],
) -> Result<Result<Attr, Place>, NativeError> {
    if path.is_empty() {
        return Err(NativeError::Server(Status::NotFound));
    }
    let (place, attr) = begin(volume, caller).go(path, true)?;
    match attr {
        Some(attr) => Ok(Ok(attr)),
        None if place.name.is_empty() => Ok(Ok(volume.get_attr(caller, place.parent)?)),
        None => Ok(Err(place)),
    }
}

/// As `find`, for a path that must exist.
pub(super) fn existing(volume: &RemoteVolume, caller: &Caller, path: &[u8]) -> Result<Attr, NativeError> {
    find(volume, caller, path)?.map_err(|_| FsError::Server(Status::NotFound).into())
}
