//! POSIX access control lists, as Linux keeps them in extended attributes: parsed, checked, and kept beside mode bits.
//!
//! The rules are those of acl(5) and of the kernel's `fs/posix_acl.c`, so that a kernel and a server that check permissions
//! by a stored list come to the same answer.
//!
//! # Bytes
//! Little-endian: a version (4 bytes, 2), then eight bytes an entry: tag (2), permissions (2), user or group (4).
//!
//! # Invariants
//! An `Acl` is valid: entries in the order of their tags, one each for the owner, the owning group and others, one mask if
//! there are entries for named users or groups.

use cuttlefs_common::status::Status;

const VERSION: u32 = 2;
const HEAD_LEN: usize = 4;
const ENTRY_LEN: usize = 8;
/// The id of an entry that names no user or group.
const NOBODY: u32 = u32::MAX;
/// Permission bits of a mode.
const PERMISSIONS: u16 = 0o777;

/// The class of users that an entry is for; the numbers are the format's.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
#[repr(u16)]
enum Tag {
    Owner = 1,
    User = 2,
    OwningGroup = 4,
    Group = 8,
    Mask = 0x10,
    Others = 0x20,
}

impl Tag {
    fn parse(number: u16) -> Option<Self> {
        [Self::Owner, Self::User, Self::OwningGroup, Self::Group, Self::Mask, Self::Others]
            .into_iter()
            .find(|tag| *tag as u16 == number)
    }

    fn is_named(self) -> bool {
        matches!(self, Self::User | Self::Group)
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Entry {
    tag: Tag,
    /// Read 4, write 2, execute 1.
    permissions: u16,
    id: u32,
}

/// A valid list.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Acl {
    entries: Vec<Entry>,
}

impl Acl {
    /// Parses an attribute's value. A list without entries is `None`: setting it removes the list.
    ///
    /// # Errors
    /// `Unsupported` for another version, `Invalid` for a list that breaks the rules.
    pub(crate) fn parse(value: &[u8]) -> Result<Option<Self>, Status> {
        let (head, rest) = value.split_first_chunk::<HEAD_LEN>().ok_or(Status::Invalid)?;
        if u32::from_le_bytes(*head) != VERSION {
            return Err(Status::Unsupported);
        }
        let (entries, []) = rest.as_chunks::<ENTRY_LEN>() else {
            return Err(Status::Invalid);
        };
        if entries.is_empty() {
            return Ok(None);
        }
        let entries = entries.iter().map(parse_entry).collect::<Result<Vec<_>, _>>()?;
        let acl = Self { entries };
        if acl.is_valid() { Ok(Some(acl)) } else { Err(Status::Invalid) }
    }

    /// The attribute's value.
    pub(crate) fn encode(&self) -> Vec<u8> {
        let mut value = VERSION.to_le_bytes().to_vec();
        for entry in &self.entries {
            value.extend_from_slice(&(entry.tag as u16).to_le_bytes());
            value.extend_from_slice(&entry.permissions.to_le_bytes());
            value.extend_from_slice(&entry.id.to_le_bytes());
        }
        value
    }

    fn is_valid(&self) -> bool {
        let count = |tag| self.entries.iter().filter(|entry| entry.tag == tag).count();
        let named = self.entries.iter().any(|entry| entry.tag.is_named());
        self.entries.is_sorted_by_key(|entry| entry.tag)
            && [Tag::Owner, Tag::OwningGroup, Tag::Others].into_iter().all(|tag| count(tag) == 1)
            && if named { count(Tag::Mask) == 1 } else { count(Tag::Mask) <= 1 }
    }

    fn permissions(&self, tag: Tag) -> Option<u16> {
        self.entries.iter().find(|entry| entry.tag == tag).map(|entry| entry.permissions)
    }

    fn set_permissions(&mut self, tag: Tag, permissions: u16) {
        if let Some(entry) = self.entries.iter_mut().find(|entry| entry.tag == tag) {
            entry.permissions = permissions & 7;
        }
    }

    /// The class whose entry the group bits of a mode stand for.
    fn group_class(&self) -> Tag {
        if self.permissions(Tag::Mask).is_some() { Tag::Mask } else { Tag::OwningGroup }
    }

    /// Whether a mode can express the list.
    pub(crate) fn is_minimal(&self) -> bool {
        self.entries.len() == 3
    }

    /// The mode bits that the list stands for.
    pub(crate) fn mode(&self) -> u16 {
        let of = |tag| self.permissions(tag).unwrap_or(0);
        of(Tag::Owner) << 6 | of(self.group_class()) << 3 | of(Tag::Others)
    }

    /// Changes the list as chmod(2) of its file does.
    pub(crate) fn set_mode(&mut self, mode: u16) {
        self.set_permissions(Tag::Owner, mode >> 6);
        self.set_permissions(self.group_class(), mode >> 3);
        self.set_permissions(Tag::Others, mode);
    }

    /// Applies a directory's default list to a new file: its access list and mode, if it is made with `mode`. A permission is in the result only if
    /// both the list and `mode` have it.
    #[must_use]
    pub(crate) fn inherit(&self, mode: u16) -> (Self, u16) {
        let both = self.mode() & mode;
        let mut inherited = self.clone();
        inherited.set_mode(both);
        (inherited, mode & !PERMISSIONS | both)
    }

    /// Whether the list grants all of `wanted` (read 4, write 2, execute 1) on a file with this owner and group.
    pub(crate) fn permits(
        &self,
        (owner, owning_group): (u32, u32),
        uid: u32,
        is_in_group: impl Fn(u32) -> bool,
        wanted: u16,
    ) -> bool {
        let mask = self.permissions(Tag::Mask).unwrap_or(7);
        let grants = |permissions: u16| permissions & wanted == wanted;
        let mut is_in_some_group = false;
        for entry in &self.entries {
            match entry.tag {
                Tag::Owner if uid == owner => return grants(entry.permissions),
                Tag::User if uid == entry.id => return grants(entry.permissions & mask),
                Tag::OwningGroup | Tag::Group => {
                    let group = if entry.tag == Tag::Group { entry.id } else { owning_group };
                    if is_in_group(group) {
                        is_in_some_group = true;
                        if grants(entry.permissions) {
                            return grants(mask);
                        }
                    }
                }
                Tag::Others => return !is_in_some_group && grants(entry.permissions),
                _ => {}
            }
        }
        false
    }
}

fn parse_entry(bytes: &[u8; ENTRY_LEN]) -> Result<Entry, Status> {
    let [t0, t1, p0, p1, i0, i1, i2, i3] = *bytes;
    let tag = Tag::parse(u16::from_le_bytes([t0, t1])).ok_or(Status::Invalid)?;
    let permissions = u16::from_le_bytes([p0, p1]);
    let id = u32::from_le_bytes([i0, i1, i2, i3]);
    if permissions > 7 || (tag.is_named() && id == NOBODY) {
        return Err(Status::Invalid);
    }
    // An id that has no meaning gets the same value in all lists.
    Ok(Entry { tag, permissions, id: if tag.is_named() { id } else { NOBODY } })
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use proptest::prelude::*;

    /// An attribute's value with entries of (tag, permissions, id).
    pub(crate) fn value(entries: &[(u16, u16, u32)]) -> Vec<u8> {
        let mut value = vec![2, 0, 0, 0];
        for (tag, permissions, id) in entries {
            value.extend_from_slice(&tag.to_le_bytes());
            value.extend_from_slice(&permissions.to_le_bytes());
            value.extend_from_slice(&id.to_le_bytes());
        }
        value
    }

    const NO: u32 = u32::MAX;
    /// The list `u::rwx,u:1000:rw,g::rx,g:50:w,m::rw,o::r`.
    const FULL: [(u16, u16, u32); 6] =
        [(1, 7, NO), (2, 6, 1000), (4, 5, NO), (8, 2, 50), (0x10, 6, NO), (0x20, 4, NO)];

    #[test]
    fn golden_bytes() {
        let bytes = [
            2, 0, 0, 0, // version
            1, 0, 7, 0, 0xff, 0xff, 0xff, 0xff, // owner: rwx
            2, 0, 6, 0, 0xe8, 3, 0, 0, // user 1000: rw
            4, 0, 5, 0, 0xff, 0xff, 0xff, 0xff, // owning group: rx
            8, 0, 2, 0, 50, 0, 0, 0, // group 50: w
            0x10, 0, 6, 0, 0xff, 0xff, 0xff, 0xff, // mask: rw
            0x20, 0, 4, 0, 0xff, 0xff, 0xff, 0xff, // others: r
        ];
        let acl = Acl::parse(&bytes).expect("valid").expect("a list");
        assert_eq!(acl.encode(), bytes);
        assert_eq!(value(&FULL), bytes);
        assert_eq!((acl.mode(), acl.is_minimal()), (0o764, false));
        assert_eq!(Acl::parse(&bytes[..4]), Ok(None));
    }

    #[test]
    fn what_is_no_list_is_refused() {
        let minimal = [(1, 6, NO), (4, 4, NO), (0x20, 4, NO)];
        assert!(Acl::parse(&value(&minimal)).is_ok_and(|acl| acl.is_some_and(|acl| acl.is_minimal())));
        for bad in [
            vec![(1, 6, NO), (4, 4, NO)],
            vec![(4, 4, NO), (1, 6, NO), (0x20, 4, NO)],
            vec![(1, 6, NO), (1, 6, NO), (4, 4, NO), (0x20, 4, NO)],
            vec![(1, 6, NO), (2, 6, 5), (4, 4, NO), (0x20, 4, NO)],
            vec![(1, 6, NO), (4, 4, NO), (0x10, 4, NO), (0x10, 4, NO), (0x20, 4, NO)],
            vec![(1, 8, NO), (4, 4, NO), (0x20, 4, NO)],
            vec![(1, 6, NO), (2, 6, NO), (4, 4, NO), (0x10, 7, NO), (0x20, 4, NO)],
            vec![(1, 6, NO), (3, 6, NO), (4, 4, NO), (0x20, 4, NO)],
        ] {
            assert_eq!(Acl::parse(&value(&bad)), Err(Status::Invalid), "{bad:?}");
        }
        for len in [0, 3, 5, 11, 27] {
            assert_eq!(Acl::parse(&value(&minimal)[..len]), Err(Status::Invalid), "{len} bytes");
        }
        assert_eq!(Acl::parse(&[1, 0, 0, 0]), Err(Status::Unsupported));
    }

    #[test]
    fn modes_go_to_the_mask() {
        let mut acl = Acl::parse(&value(&FULL)).expect("valid").expect("a list");
        acl.set_mode(0o4751);
        assert_eq!(acl.mode(), 0o751);
        assert_eq!(acl.permissions(Tag::OwningGroup), Some(5), "the mask has the group's bits");
        let (inherited, mode) = acl.inherit(0o2660);
        assert_eq!((inherited.mode(), mode), (0o640, 0o2640));
        let mut minimal =
            Acl::parse(&value(&[(1, 7, NO), (4, 7, NO), (0x20, 7, NO)])).expect("valid").expect("a list");
        minimal.set_mode(0o640);
        assert_eq!((minimal.mode(), minimal.permissions(Tag::OwningGroup)), (0o640, Some(4)));
    }

    #[test]
    fn who_may_do_what() {
        let acl = Acl::parse(&value(&FULL)).expect("valid").expect("a list");
        let may =
            |uid, groups: &[u32], wanted| acl.permits((1, 10), uid, |group| groups.contains(&group), wanted);
        assert!(may(1, &[], 7) && may(1, &[50], 7), "the owner, whatever the mask");
        assert!(may(1000, &[], 6) && !may(1000, &[10], 1), "a named user, within the mask");
        assert!(may(5, &[10], 4) && !may(5, &[10], 1), "the owning group, within the mask");
        assert!(may(5, &[50], 2) && may(5, &[10, 50], 2));
        assert!(!may(5, &[10, 50], 6), "one of the groups must grant all of it");
        assert!(may(5, &[9], 4) && !may(5, &[9], 2), "others");
        assert!(!may(5, &[50], 4), "who is in a group is no other");
    }

    proptest! {
        #[test]
        fn parsing_never_panics_and_gives_itself_back(bytes in proptest::collection::vec(any::<u8>(), 0..100)) {
            if let Ok(Some(acl)) = Acl::parse(&bytes) {
                prop_assert_eq!(Acl::parse(&acl.encode()), Ok(Some(acl)));
            }
        }
    }
}
