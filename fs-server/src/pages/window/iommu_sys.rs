//! The calls of `/dev/cuttlefs_iommu` (kmod-iommu/cuttlefs_iommu.h), with owned descriptors and errors. All unsafe code of these windows is here.

use super::pci_address::PciAddress;
use rustix::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::io;

/// Most pages of a window.
pub(super) const MAX_PAGES: u64 = 1 << 20;
/// Most pages of an arena.
pub(super) const MAX_ARENA_PAGES: u64 = 1 << 24;
/// Stands for no page of the arena.
pub(super) const GONE: u32 = u32::MAX;

const ABI: u32 = 1;
const KIND_READ: u32 = 0;

/// `struct cuttlefs_iommu_create`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
struct Create {
    abi: u32,
    kind: u32,
    pci_segment: u32,
    pci_bus: u32,
    pci_devfn: u32,
    pages: u32,
    arena: u64,
    arena_pages: u32,
    unused: u32,
    magic: u64,
    iova: u64,
}
const _: () = assert!(size_of::<Create>() == 56);

/// `struct cuttlefs_iommu_entry`.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Entry {
    pub(super) page: u32,
    pub(super) target: u32,
}
const _: () = assert!(size_of::<Entry>() == 8);

/// `struct cuttlefs_iommu_point`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
struct Point {
    entries: u64,
    count: u32,
    done: u32,
}
const _: () = assert!(size_of::<Point>() == 16);

/// `struct cuttlefs_iommu_status`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
struct Status {
    iova: u64,
    pages: u32,
    arena_pages: u32,
    shown: u32,
    holes: u32,
    has_device: u32,
    unused: u32,
    pointed: u64,
    taken: u64,
    invalidations: u64,
}
const _: () = assert!(size_of::<Status>() == 56);

/// `_IOC` of the kernel's `asm-generic/ioctl.h`, with type 'c'.
const fn command(direction: u64, number: u64, size: usize) -> u64 {
    direction << 30 | (size as u64) << 16 | (b'c' as u64) << 8 | number
}
const READ: u64 = 2;
const WRITE_READ: u64 = 3;
const CREATE: u64 = command(WRITE_READ, 0x90, size_of::<Create>());
const POINT: u64 = command(WRITE_READ, 0x91, size_of::<Point>());
const EXPORT: u64 = command(0, 0x92, 0);
const STATUS: u64 = command(READ, 0x93, size_of::<Status>());

/// The memory whose pages windows show.
#[derive(Clone, Copy, Debug)]
pub(super) struct Arena {
    pub(super) base: usize,
    pub(super) pages: u32,
}

fn call(file: BorrowedFd<'_>, command: u64, argument: *mut libc::c_void) -> io::Result<i32> {
    // SAFETY: the callers give a command and the structure that belongs to it, which lives, and is written to by nobody else, until this returns.
    // Addresses in it the kernel checks itself.
    let result = unsafe { libc::ioctl(file.as_raw_fd(), command as libc::Ioctl, argument) };
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(result) }
}

/// Makes the window of an open file: a device reads its pages, which are pages of the arena, or magic. The kernel keeps no page of the arena: it
/// follows the mapping.
pub(super) fn create(
    file: BorrowedFd<'_>,
    device: PciAddress,
    pages: u32,
    arena: Arena,
    magic: &[u8; 4096],
) -> io::Result<()> {
    let mut create = Create {
        abi: ABI,
        kind: KIND_READ,
        pci_segment: device.segment,
        pci_bus: device.bus,
        pci_devfn: device.devfn,
        pages,
        arena: arena.base as u64,
        arena_pages: arena.pages,
        magic: magic.as_ptr() as u64,
        ..Create::default()
    };
    call(file, CREATE, (&raw mut create).cast()).map(|_| ())
}

/// Points pages, in order. An error if it did not point all of them.
pub(super) fn point(file: BorrowedFd<'_>, entries: &[Entry]) -> io::Result<()> {
    let count = u32::try_from(entries.len()).map_err(|_| io::ErrorKind::InvalidInput)?;
    let mut point = Point { entries: entries.as_ptr() as u64, count, done: 0 };
    call(file, POINT, (&raw mut point).cast())?;
    if point.done == count { Ok(()) } else { Err(io::ErrorKind::WriteZero.into()) }
}

/// Makes a dma-buf over the window's addresses, for the device's driver.
pub(super) fn export(file: BorrowedFd<'_>) -> io::Result<OwnedFd> {
    let fd = call(file, EXPORT, std::ptr::null_mut())?;
    // SAFETY: the call made the descriptor for its caller, and nobody else knows it.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

/// How many pages of the window show a page of the arena.
pub(super) fn shown(file: BorrowedFd<'_>) -> io::Result<u32> {
    let mut status = Status::default();
    call(file, STATUS, (&raw mut status).cast())?;
    Ok(status.shown)
}
