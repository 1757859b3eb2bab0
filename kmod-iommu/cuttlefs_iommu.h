/* SPDX-License-Identifier: GPL-2.0 WITH Linux-syscall-note */
/*
 * The interface of /dev/cuttlefs_iommu. README.md describes windows.
 *
 * Structures have no holes, and unused fields are 0. All numbers are in this machine's byte order.
 */
#ifndef CUTTLEFS_IOMMU_H
#define CUTTLEFS_IOMMU_H

#include <linux/ioctl.h>
#include <linux/types.h>

#define CUTTLEFS_IOMMU_ABI 1

/* Bytes of a page, of the magic page, and of each step in a window's IOVAs. */
#define CUTTLEFS_IOMMU_PAGE_BYTES 4096

/* Most pages of a window, of an arena, and most entries of one POINT. */
#define CUTTLEFS_IOMMU_MAX_PAGES (1u << 20)
#define CUTTLEFS_IOMMU_MAX_ARENA_PAGES (1u << 24)
#define CUTTLEFS_IOMMU_MAX_ENTRIES (1u << 16)

/* The device can read the window but not write it; pages that are gone read as the magic page. */
#define CUTTLEFS_IOMMU_READ 0
/* The device can read and write the window; writes to a page that is gone go to a black hole of this window. */
#define CUTTLEFS_IOMMU_WRITE 1

/* Stands for the gone page in place of a page of the arena: the magic page or the black hole. */
#define CUTTLEFS_IOMMU_GONE 0xffffffffu

struct cuttlefs_iommu_create {
	__u32 abi;
	__u32 kind;
	/* The device, as in /sys/bus/pci/devices: SEGMENT:BUS:DEVICE.FUNCTION, the last two as 8 * device + function. */
	__u32 pci_segment;
	__u32 pci_bus;
	__u32 pci_devfn;
	/* Pages of the window. */
	__u32 pages;
	/* The caller's memory to which the window's pages may point: its first byte, and its pages. */
	__u64 arena;
	__u32 arena_pages;
	__u32 unused;
	/* Address of the magic page's bytes; 0 for CUTTLEFS_IOMMU_WRITE. */
	__u64 magic;
	/* Result: the IOVA of the window's first page. */
	__u64 iova;
};

struct cuttlefs_iommu_entry {
	/* A page of the window. */
	__u32 page;
	/* A page of the arena, or CUTTLEFS_IOMMU_GONE. */
	__u32 target;
};

struct cuttlefs_iommu_point {
	/* Address of `count` entries. */
	__u64 entries;
	__u32 count;
	/* Result, also if there is an error: how many entries took effect, from the first on. */
	__u32 done;
};

struct cuttlefs_iommu_status {
	__u64 iova;
	__u32 pages;
	__u32 arena_pages;
	/* Pages of the window that point into the arena now. */
	__u32 shown;
	/* Pages that the IOMMU refused to map again: a device that accesses one faults. */
	__u32 holes;
	/* Whether the device still has the same driver. */
	__u32 has_device;
	__u32 unused;
	/* Entries that took effect; pages that the kernel took; how often the kernel took some. */
	__u64 pointed;
	__u64 taken;
	__u64 invalidations;
};

/* Makes the window of this open file; a file can have one. */
#define CUTTLEFS_IOMMU_CREATE _IOWR('c', 0x90, struct cuttlefs_iommu_create)
/* Points pages, in order, up to the first entry that is refused. */
#define CUTTLEFS_IOMMU_POINT _IOWR('c', 0x91, struct cuttlefs_iommu_point)
/* Makes a dma-buf over the window's IOVAs, for the driver of the window's device only. Returns its descriptor. */
#define CUTTLEFS_IOMMU_EXPORT _IO('c', 0x92)
#define CUTTLEFS_IOMMU_STATUS _IOR('c', 0x93, struct cuttlefs_iommu_status)

#endif
