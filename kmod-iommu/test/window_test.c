// SPDX-License-Identifier: GPL-2.0
/*
 * Tests of cuttlefs_iommu with a device that does DMA: QEMU's edu behind an emulated IOMMU, with the driver edu_dma.c. What the tests share is in
 * edu.h; under_way.h has those in which pages change while the device reads. Run as root by scripts/vm/kmod-test.sh.
 * usage: window_test [SEED]       exit status 1 if a check failed
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "edu.h"
#include "under_way.h"
#include "window.h"

static void pages_come_and_go(void)
{
	unsigned char *at = arena(4);
	int fd = window(CUTTLEFS_IOMMU_READ, 8, at, 4);
	struct cuttlefs_iommu_status now;

	register_window(fd);
	check(reads(0) == MAGIC && reads(7) == MAGIC, "a new window is magic, from its first page to its last");
	check(!point(fd, 5, 2) && reads(5) == 3, "the device reads the page that is shown");
	memset(at + 2 * PAGE, 0x77, PAGE);
	check(reads(5) == 0x77, "and what the processor has written since");
	check(reads(4) == MAGIC && reads(6) == MAGIC, "its neighbours are magic");
	check(!point(fd, 5, 3) && reads(5) == 4, "the same address shows another page");
	check(!point(fd, 5, GONE) && reads(5) == MAGIC, "a page that is gone is magic");
	check(!point(fd, 5, GONE) && reads(5) == MAGIC, "gone twice is gone");
	check(!point(fd, 7, 0) && !point(fd, 7, 0) && reads(7) == 1, "shown twice is shown");
	now = status(fd);
	check(now.pages == 8 && now.arena_pages == 4 && now.shown == 1 && !now.holes && now.has_device && now.pointed == 6,
	      "the status counts: %u shown, %llu pointed", now.shown, (unsigned long long)now.pointed);
	writes(7, 0x99);
	check(is_all(at, 1), "a window for reading refuses the device's writes");
	check(reads(7) == 1, "and can be read afterwards");
	writes(6, 0x99);
	check(reads(6) == MAGIC, "nobody writes over the magic page");
	munmap(at, 4 * PAGE);
	close(fd);
}

static void what_is_written(void)
{
	unsigned char *at = arena(2), *other = arena(1);
	int fd = window(CUTTLEFS_IOMMU_WRITE, 4, at, 2), second;

	register_window(fd);
	check(!point(fd, 1, 0), "a page is shown for writing");
	writes(1, 0x42);
	check(is_all(at, 0x42) && is_all(at + PAGE, 2), "the device's write is in the page, and in no other");
	check(!point(fd, 1, GONE), "it goes");
	writes(1, 0x43);
	check(is_all(at, 0x42), "what is written then falls into the black hole");
	check(!point(fd, 1, 0) && reads(1) == 0x42, "the page comes back as it was");
	second = window(CUTTLEFS_IOMMU_WRITE, 1, other, 1);
	register_window(second);
	check(reads(0) != 0x43, "a window's black hole is its own");
	close(second);
	close(fd);
	munmap(at, 2 * PAGE);
	munmap(other, PAGE);
}

static int is_resident(void *at)
{
	unsigned char vector = 0;

	mincore(at, PAGE, &vector);
	return vector & 1;
}

/* Pages that another processor has in a batch of its own are on no list from which they could be taken. This empties the batches. */
static void drain(void)
{
	int fd = open("/proc/sys/vm/drop_caches", O_WRONLY);

	if (fd < 0)
		return;
	if (write(fd, "1", 1) != 1)
		perror("drop_caches");
	close(fd);
}

/* Makes the kernel take the page out of memory; returns whether it did. It tries repeatedly: a page stays if it is accessed just then. */
static int page_out(void *at)
{
	for (int i = 0; i < 3000 && is_resident(at); i++) {
		if (i % 50 == 49)
			drain();
		madvise(at, PAGE, MADV_PAGEOUT);
		usleep(10000);
	}
	return !is_resident(at);
}

static void the_kernel_takes_pages(void)
{
	unsigned char *at = arena(16), *moved;
	int fd = window(CUTTLEFS_IOMMU_READ, 16, at, 16), child, state;

	register_window(fd);
	for (uint32_t i = 0; i < 16; i++)
		need(!point(fd, i, i), "to point");
	check(page_out(at), "a page that is shown can be swapped out: it is not pinned");
	check(reads(0) == MAGIC && status(fd).shown == 15, "then the device reads magic");
	check(at[0] == 1 && reads(0) == MAGIC, "the processor's access brings the page back, and does not show it");
	check(page_out(at) && !point(fd, 0, 0) && reads(0) == 1, "pointing brings it back from swap, and shows it");

	madvise(at + PAGE, PAGE, MADV_DONTNEED);
	check(reads(1) == MAGIC, "after MADV_DONTNEED it is magic");
	memset(at + PAGE, 0x21, PAGE);
	check(reads(1) == MAGIC && !point(fd, 1, 1) && reads(1) == 0x21, "the new page is shown when it is pointed to");

	mprotect(at + 2 * PAGE, PAGE, PROT_READ);
	check(reads(2) == MAGIC, "after mprotect it is magic");
	check(!point(fd, 2, 2) && reads(2) == 3, "a page that is only readable can be shown to a reader");
	mprotect(at + 2 * PAGE, PAGE, PROT_NONE);
	check(reads(2) == MAGIC && point(fd, 2, 2) == -EFAULT, "one that is not even readable cannot");

	/* The child stays alive, so that the page is copied when one of the two writes. */
	int hold[2];
	need(!pipe(hold), "pipe");
	child = fork();
	if (!child) {
		char byte;

		close(hold[1]);
		if (read(hold[0], &byte, 1)) {}
		_exit(0);
	}
	close(hold[0]);
	memset(at + 3 * PAGE, 0x66, PAGE);
	check(reads(3) == MAGIC || reads(3) == 0x66, "after fork and a write nobody sees the child's page");
	check(!point(fd, 3, 3) && reads(3) == 0x66, "the copy is shown when it is pointed to");
	close(hold[1]);
	waitpid(child, &state, 0);
	check(status(fd).shown == 1, "a fork takes all: both processes' pages are the same until one writes");
	for (uint32_t i = 4; i < 16; i++)
		need(!point(fd, i, i), "to point");

	moved = mmap(NULL, PAGE, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	need(mremap(at + 4 * PAGE, PAGE, PAGE, MREMAP_MAYMOVE | MREMAP_FIXED, moved) == moved, "mremap");
	check(reads(4) == MAGIC && point(fd, 4, 4) == -EFAULT, "after mremap it is magic");
	check(moved[0] == 5, "its bytes have moved");

	munmap(at + 5 * PAGE, 2 * PAGE);
	check(reads(5) == MAGIC && reads(6) == MAGIC && reads(7) == 8, "after munmap both are magic, and the next is not");
	check(point(fd, 5, 5) == -EFAULT, "what is not there cannot be shown");
	need(mmap(at + 5 * PAGE, PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0) == at + 5 * PAGE, "mmap");
	memset(at + 5 * PAGE, 0x31, PAGE);
	check(reads(5) == MAGIC && !point(fd, 5, 5) && reads(5) == 0x31, "new memory at the address is shown when it is pointed to");

	check(!madvise(at + 8 * PAGE, PAGE, MADV_COLD) && reads(8) == 9, "what only looks at a page leaves it shown");
	need(!munmap(at, 16 * PAGE), "munmap");
	check(status(fd).shown == 0 && reads(15) == MAGIC, "when the arena is unmapped, all is magic (%llu taken)",
	      (unsigned long long)status(fd).taken);
	close(fd);
	munmap(moved, PAGE);
}

/* Memory of the same kind as cuttlefs's: a memfd, mapped shared. */
static void shared_memory(void)
{
	int memory = memfd_create("frames", MFD_CLOEXEC), fd;
	unsigned char *at;

	need(memory >= 0 && !ftruncate(memory, 4 * PAGE), "memfd");
	at = mmap(NULL, 4 * PAGE, PROT_READ | PROT_WRITE, MAP_SHARED, memory, 0);
	need(at != MAP_FAILED, "mmap");
	memset(at, 0x18, 4 * PAGE);
	fd = window(CUTTLEFS_IOMMU_READ, 4, at, 4);
	register_window(fd);
	check(!point(fd, 0, 1) && !point(fd, 1, 2) && reads(0) == 0x18, "a memfd's page is shown");
	memset(at + PAGE, 0x19, PAGE);
	check(reads(0) == 0x19, "and what is written to it");
	check(page_out(at + PAGE) && reads(0) == MAGIC, "it can be swapped out");
	check(!point(fd, 0, 1) && reads(0) == 0x19, "and shown again");
	need(!fallocate(memory, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, 2 * PAGE, PAGE), "punch");
	check(reads(1) == MAGIC, "a page whose block of the file is punched is magic");
	need(!ftruncate(memory, PAGE), "truncate");
	check(reads(0) == MAGIC && point(fd, 0, 1) == -EFAULT, "behind the end of the file is nothing to show");
	close(fd);
	munmap(at, 4 * PAGE);
	close(memory);
}

static void many_at_once(void)
{
	const uint32_t pages = 4096;
	unsigned char *at = arena(pages);
	int fd = window(CUTTLEFS_IOMMU_READ, pages, at, pages);
	struct cuttlefs_iommu_entry *entries = calloc(CUTTLEFS_IOMMU_MAX_ENTRIES + 1, sizeof(*entries));
	struct timespec begin, end;
	uint32_t done;

	register_window(fd);
	for (uint32_t i = 0; i < pages; i++)
		entries[i] = (struct cuttlefs_iommu_entry){ i, pages - 1 - i };
	clock_gettime(CLOCK_MONOTONIC, &begin);
	check(!point_many(fd, entries, pages, &done) && done == pages && status(fd).shown == pages, "4096 pages in one call");
	clock_gettime(CLOCK_MONOTONIC, &end);
	printf("      %.2f us a page\n",
	       ((double)(end.tv_sec - begin.tv_sec) * 1e6 + (double)(end.tv_nsec - begin.tv_nsec) / 1e3) / pages);
	check(reads(0) == 0x40 && reads(4095) == 1 && reads(100) == (4095 - 100) % 0x40 + 1, "each is its own");

	/* A later entry can use a page that an earlier one releases. */
	struct cuttlefs_iommu_entry move[] = { { 0, GONE }, { 1, pages - 1 }, { 0, pages - 2 } };
	check(!point_many(fd, move, 3, &done) && done == 3 && reads(1) == 0x40 && reads(0) == 0x3f, "entries take effect in order");
	struct cuttlefs_iommu_entry stuck[] = { { 2, GONE }, { 3, 0 }, { 4, GONE } };
	check(point_many(fd, stuck, 3, &done) == -EEXIST && done == 1 && reads(2) == MAGIC && reads(3) != MAGIC && reads(4) != MAGIC,
	      "one page of the arena is shown at one place: the call ends there, and says how far it came (%u)", done);
	for (uint32_t i = 0; i < pages; i++)
		entries[i] = (struct cuttlefs_iommu_entry){ i, GONE };
	entries[2000].page = pages;
	check(point_many(fd, entries, pages, &done) == -EINVAL && done == 2000, "and at an entry that is wrong (%u)", done);
	check(point_many(fd, entries, CUTTLEFS_IOMMU_MAX_ENTRIES + 1, &done) == -EINVAL, "too many entries are refused");
	check(point_many(fd, NULL, 1, &done) == -EFAULT && done == 0, "entries that are nowhere are refused");
	check(!point_many(fd, NULL, 0, &done), "no entries are no error");

	munmap(at, (size_t)pages * PAGE / 2);
	check(status(fd).shown <= pages / 2, "half of the arena is unmapped: %u stay", status(fd).shown);
	close(fd);
	munmap(at + (size_t)pages * PAGE / 2, (size_t)pages * PAGE / 2);
	free(entries);
}

static void refused(const char *what, int expected, struct cuttlefs_iommu_create create)
{
	int fd = open_window(), result = call(fd, CUTTLEFS_IOMMU_CREATE, &create);

	check(result == expected, "refused: %s (%d)", what, result);
	close(fd);
}

static void hostile_arguments(void)
{
	unsigned char *at = arena(2);
	struct cuttlefs_iommu_create good = wanted(CUTTLEFS_IOMMU_READ, 2, at, 2), bad;
	int fd = open_window(), second, dmabuf;

#define BAD(what, expected, change) do { bad = good; change; refused(what, expected, bad); } while (0)
	BAD("another ABI", -EPROTONOSUPPORT, bad.abi = 99);
	BAD("a kind that is none", -EINVAL, bad.kind = 2);
	BAD("no pages", -EINVAL, bad.pages = 0);
	BAD("too many pages", -EINVAL, bad.pages = CUTTLEFS_IOMMU_MAX_PAGES + 1);
	BAD("no arena", -EINVAL, bad.arena_pages = 0);
	BAD("too large an arena", -EINVAL, bad.arena_pages = CUTTLEFS_IOMMU_MAX_ARENA_PAGES + 1);
	BAD("an arena between pages", -EINVAL, bad.arena += 8);
	BAD("an arena in the kernel", -EINVAL, bad.arena = 0xffff888000000000ull);
	BAD("an arena that reaches into the kernel", -EINVAL, bad.arena = 0xfffffffffff000ull);
	BAD("an arena around the end of all addresses", -EINVAL, bad.arena = 0xfffffffffffff000ull);
	BAD("a magic page that is nowhere", -EFAULT, bad.magic = 8);
	BAD("a magic page in the kernel", -EFAULT, bad.magic = 0xffff888000000000ull);
	BAD("a field that is not used", -EINVAL, bad.unused = 1);
	BAD("a black hole with contents", -EINVAL, bad.kind = CUTTLEFS_IOMMU_WRITE);
	BAD("no such device", -ENODEV, bad.pci_devfn ^= 0x55);
	BAD("no such bus", -ENODEV, bad.pci_bus = 0xfff);
	BAD("no such segment", -ENODEV, bad.pci_segment = 0xffffffff);
	/* Device 0 is the host bridge, which has no driver. */
	BAD("a device without a driver", -ENODEV, bad.pci_devfn = 0);

	check(point(fd, 0, 0) == -ENXIO && ioctl(fd, CUTTLEFS_IOMMU_EXPORT) < 0, "a file without a window points nothing and exports nothing");
	check(call(fd, CUTTLEFS_IOMMU_CREATE, (void *)8) == -EFAULT, "refused: a request that is nowhere");
	check(call(fd, _IO('c', 0x77), NULL) < 0 && call(fd, 0x5401, NULL) < 0, "refused: commands that are none");
	check(!call(fd, CUTTLEFS_IOMMU_CREATE, &good), "and after all that a good one is taken");
	check(call(fd, CUTTLEFS_IOMMU_CREATE, &good) == -EBUSY, "refused: a second window of one file");
	check(point(fd, 2, 0) == -EINVAL && point(fd, 0, 2) == -EINVAL && point(fd, 0, 0xfffffffe) == -EINVAL && point(fd, GONE, GONE) == -EINVAL,
	      "refused: pages that are none");
	check(call(fd, CUTTLEFS_IOMMU_POINT, (void *)8) == -EFAULT && call(fd, CUTTLEFS_IOMMU_STATUS, (void *)8) == -EFAULT,
	      "refused: answers that have no place");
	check(mmap(NULL, PAGE, PROT_READ, MAP_SHARED, fd, 0) == MAP_FAILED, "a window cannot be mapped");
	dmabuf = ioctl(fd, CUTTLEFS_IOMMU_EXPORT);
	check(dmabuf >= 0 && mmap(NULL, PAGE, PROT_READ, MAP_SHARED, dmabuf, 0) == MAP_FAILED, "nor its dma-buf");
	close(dmabuf);

	second = fork();
	if (!second) {
		/* Here the same address is other memory. */
		_exit(point(fd, 0, 0) == -EXDEV ? 0 : 1);
	}
	int state = 1;
	waitpid(second, &state, 0);
	check(state == 0, "refused: a child that points its parent's window");
	close(fd);
	munmap(at, 2 * PAGE);
}

static void the_end_of_a_window(void)
{
	unsigned char *at = arena(2);
	int fd = window(CUTTLEFS_IOMMU_READ, 2, at, 2), child, state, ready[2];
	char byte;

	register_window(fd);
	need(!point(fd, 0, 0), "to point");
	close(fd);
	check(reads(0) == MAGIC, "the file is closed: what the device has registered is magic");
	check(!register_dmabuf(-1), "the device lets go");

	need(!pipe(ready), "pipe");
	child = fork();
	if (!child) {
		fd = window(CUTTLEFS_IOMMU_READ, 2, at, 2);
		register_window(fd);
		need(!point(fd, 0, 1), "to point");
		byte = reads(0) == 2 ? 'y' : 'n';
		need(write(ready[1], &byte, 1) == 1, "write");
		pause();
	}
	need(read(ready[0], &byte, 1) == 1, "the child");
	check(byte == 'y', "a child shows its page");
	kill(child, SIGKILL);
	waitpid(child, &state, 0);
	check(reads(0) == MAGIC, "it is killed: what the device has registered is magic");
	register_dmabuf(-1);

	/* A child with the file keeps it open, but the memory belongs to its parent. */
	int hold[2];
	need(!pipe(hold), "pipe");
	child = fork();
	if (!child) {
		fd = window(CUTTLEFS_IOMMU_READ, 2, at, 2);
		register_window(fd);
		need(!point(fd, 0, 1), "to point");
		if (!fork()) {
			close(hold[1]);
			if (read(hold[0], &byte, 1)) {}
			_exit(0);
		}
		_exit(0);
	}
	waitpid(child, &state, 0);
	close(hold[0]);
	check(reads(0) == MAGIC, "a process ends whose child has the file: its memory is gone, and magic");
	close(hold[1]);
	register_dmabuf(-1);
	munmap(at, 2 * PAGE);
	close(ready[0]);
	close(ready[1]);
}

static void the_driver_goes(void)
{
	unsigned char *at = arena(2);
	int fd = window(CUTTLEFS_IOMMU_READ, 2, at, 2), next, dmabuf;

	register_window(fd);
	need(!point(fd, 0, 0), "to point");
	need(echo(pci_name, "/sys/bus/pci/drivers/edu_dma/unbind"), "to unbind");
	check(!status(fd).has_device && !status(fd).shown, "the driver is unbound: the window has no device");
	check(point(fd, 0, 0) == -ENODEV, "and points nothing");
	next = open_window();
	struct cuttlefs_iommu_create create = wanted(CUTTLEFS_IOMMU_READ, 2, at, 2);
	check(call(next, CUTTLEFS_IOMMU_CREATE, &create) == -ENODEV, "a new window is refused");
	need(echo(pci_name, "/sys/bus/pci/drivers/edu_dma/bind"), "to bind");
	dmabuf = ioctl(fd, CUTTLEFS_IOMMU_EXPORT);
	check(dmabuf >= 0 && register_dmabuf(dmabuf) == -EXDEV, "the old window cannot be registered with the new driver");
	close(dmabuf);
	check(!call(next, CUTTLEFS_IOMMU_CREATE, &create), "a new window can be made");
	register_window(next);
	check(!point(next, 0, 1) && reads(0) == 2, "and works");
	close(fd);
	check(reads(0) == 2, "the end of the old one leaves it alone");
	close(next);
	register_dmabuf(-1);
	munmap(at, 2 * PAGE);
}

static void two_windows(void)
{
	unsigned char *at = arena(2);
	int first = window(CUTTLEFS_IOMMU_READ, 2, at, 2), second = window(CUTTLEFS_IOMMU_READ, 2, at, 2);

	check(!point(first, 0, 0) && !point(second, 0, 0), "two windows show one page");
	register_window(second);
	close(first);
	check(reads(0) == 1 && reads(1) == MAGIC, "the end of one leaves the other alone");
	madvise(at, PAGE, MADV_DONTNEED);
	check(reads(0) == MAGIC, "and the kernel takes the page from it");
	close(second);
	register_dmabuf(-1);
	munmap(at, 2 * PAGE);
}

static void random_requests(unsigned int seed)
{
	unsigned char *at = arena(64);
	int fds[3] = { window(CUTTLEFS_IOMMU_READ, 64, at, 64), window(CUTTLEFS_IOMMU_WRITE, 16, at, 64), -1 };
	uint32_t shows[2][64];
	int wrong = 0;

	printf("      seed %u\n", seed);
	srandom(seed);
	memset(shows, 0xff, sizeof(shows));
	for (int i = 0; i < 20000; i++) {
		int which = (int)(random() % 2);
		uint32_t pages = which ? 16 : 64, page = (uint32_t)random() % (pages + 2);
		uint32_t target = random() % 4 ? (uint32_t)random() % 66 : GONE;
		int expected = 0, result;

		if (random() % 64 == 0) {
			/* The kernel takes a page from both windows. */
			uint32_t taken = (uint32_t)random() % 64;

			madvise(at + (size_t)taken * PAGE, PAGE, MADV_DONTNEED);
			/* Written, since the zero page would be taken from this window by the first write of the other. */
			at[(size_t)taken * PAGE] = 1;
			for (int w = 0; w < 2; w++)
				for (int p = 0; p < 64; p++)
					if (shows[w][p] == taken)
						shows[w][p] = GONE;
			continue;
		}
		if (page >= pages || (target != GONE && target >= 64))
			expected = -EINVAL;
		for (uint32_t p = 0; p < pages && !expected && target != GONE; p++)
			if (shows[which][p] == target && p != page)
				expected = -EEXIST;
		result = point(fds[which], page, target);
		wrong += result != expected;
		if (!result)
			shows[which][page] = target;
	}
	for (int w = 0; w < 2; w++) {
		uint32_t shown = 0;

		for (int p = 0; p < 64; p++)
			shown += shows[w][p] != GONE;
		wrong += status(fds[w]).shown != shown;
		close(fds[w]);
	}
	check(!wrong, "20,000 requests and takings at random, as a model says (%d differ)", wrong);
	munmap(at, 64 * PAGE);
}

int main(int count, char **arguments)
{
	find_edu();
	memset(magic, MAGIC, sizeof(magic));

	pages_come_and_go();
	what_is_written();
	the_kernel_takes_pages();
	shared_memory();
	many_at_once();
	hostile_arguments();
	the_end_of_a_window();
	two_windows();
	the_driver_goes();
	pages_change_under_way();
	random_requests(count > 1 ? (unsigned int)strtoul(arguments[1], NULL, 10) : (unsigned int)time(NULL));
	printf("%d passed, %d failed\n", passed, failed);
	return failed != 0;
}
