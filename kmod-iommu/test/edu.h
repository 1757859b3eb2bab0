/* SPDX-License-Identifier: GPL-2.0 */
/* What the tests of windows share: checks that are counted, windows, and QEMU's edu device, which reads and writes them. */
#ifndef EDU_H
#define EDU_H

#include <stdarg.h>
#include <sys/mman.h>

#include "edu_dma.h"
#include "window.h"

#define GONE CUTTLEFS_IOMMU_GONE
#define MAGIC 0x5a
/* The bytes of a buffer to which a transfer brought nothing, and the bytes that QEMU's device gets from a transfer that faulted. */
#define NOTHING 0xee
#define FAULTED 0
#define LEN EDU_DMA_MAX_BYTES

static int passed, failed;

static void check(int is_good, const char *what, ...)
{
	va_list arguments;

	is_good ? passed++ : failed++;
	printf(is_good ? "ok    " : "FAIL  ");
	va_start(arguments, what);
	vprintf(what, arguments);
	va_end(arguments);
	printf("\n");
	fflush(stdout);
}

/* Returns 0, or the negative errno. */
static int call(int fd, unsigned long command, void *argument)
{
	return ioctl(fd, command, argument) < 0 ? -errno : 0;
}

static unsigned char *arena(size_t pages)
{
	unsigned char *at = mmap(NULL, pages * PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);

	need(at != MAP_FAILED, "mmap");
	madvise(at, pages * PAGE, MADV_NOHUGEPAGE);
	for (size_t i = 0; i < pages; i++)
		memset(at + i * PAGE, (int)(i % 0x40) + 1, PAGE);
	return at;
}

static int window(uint32_t kind, uint32_t pages, void *at, uint32_t arena_pages)
{
	struct cuttlefs_iommu_create create = wanted(kind, pages, at, arena_pages);
	int fd = open_window();

	need(!ioctl(fd, CUTTLEFS_IOMMU_CREATE, &create), "a window");
	return fd;
}

static int point_many(int fd, const struct cuttlefs_iommu_entry *entries, uint32_t count, uint32_t *done)
{
	struct cuttlefs_iommu_point point = { .entries = (uintptr_t)entries, .count = count };
	int result = call(fd, CUTTLEFS_IOMMU_POINT, &point);

	if (done)
		*done = point.done;
	return result;
}

static int point(int fd, uint32_t page, uint32_t target)
{
	struct cuttlefs_iommu_entry entry = { page, target };

	return point_many(fd, &entry, 1, NULL);
}

static struct cuttlefs_iommu_status status(int fd)
{
	struct cuttlefs_iommu_status status = {};

	need(!ioctl(fd, CUTTLEFS_IOMMU_STATUS, &status), "a status");
	return status;
}

static int edu(void)
{
	static int fd = -1;

	if (fd < 0)
		fd = open("/dev/edu_dma", O_RDWR | O_CLOEXEC);
	need(fd >= 0, "/dev/edu_dma");
	return fd;
}

static int register_dmabuf(int dmabuf)
{
	int32_t fd = dmabuf;

	return call(edu(), EDU_DMA_REGISTER, &fd);
}

/* Registers the window once, as a NIC's driver does. */
static void register_window(int fd)
{
	int dmabuf = ioctl(fd, CUTTLEFS_IOMMU_EXPORT);

	need(dmabuf >= 0, "a dma-buf");
	need(!register_dmabuf(dmabuf), "to register the dma-buf");
	close(dmabuf);
}

static unsigned char bytes[PAGE];

/* The byte of which the page consists for the device; -1 if its bytes differ. */
static int reads(uint32_t page)
{
	struct edu_dma_transfer transfer = { .offset = (uint64_t)page * PAGE, .buffer = (uintptr_t)bytes, .len = LEN };

	memset(bytes, NOTHING, sizeof(bytes));
	need(!ioctl(edu(), EDU_DMA_READ, &transfer), "a DMA read");
	for (int i = 1; i < LEN; i++)
		if (bytes[i] != bytes[0])
			return -1;
	return bytes[0];
}

static void writes(uint32_t page, int byte)
{
	struct edu_dma_transfer transfer = { .offset = (uint64_t)page * PAGE, .buffer = (uintptr_t)bytes, .len = LEN };

	memset(bytes, byte, sizeof(bytes));
	need(!ioctl(edu(), EDU_DMA_WRITE, &transfer), "a DMA write");
}

static int is_all(const unsigned char *at, int byte)
{
	for (int i = 0; i < LEN; i++)
		if (at[i] != byte)
			return 0;
	return 1;
}

static int echo(const char *text, const char *path)
{
	int fd = open(path, O_WRONLY | O_CLOEXEC);
	ssize_t count = fd < 0 ? -1 : write(fd, text, strlen(text));

	close(fd);
	return count == (ssize_t)strlen(text);
}

#endif
