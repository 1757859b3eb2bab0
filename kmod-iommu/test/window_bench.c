// SPDX-License-Identifier: GPL-2.0
/*
 * The costs of windows: making one, pointing its pages, and the kernel taking pages. Each is the median of five rounds, with the least and the most;
 * what is compared is measured in turn. Run as root by scripts/vm/measure-iommu.sh, with swap.
 */
#define _GNU_SOURCE
#include <sys/mman.h>
#include <time.h>

#include "window.h"

#define GONE CUTTLEFS_IOMMU_GONE
#define ROUNDS 5
/* 1 GiB. */
#define LARGE_PAGES (1u << 18)
#define PAGES 4096u
#define SWAPPED 512u

static double now_us(void)
{
	struct timespec at;

	clock_gettime(CLOCK_MONOTONIC, &at);
	return (double)at.tv_sec * 1e6 + (double)at.tv_nsec / 1e3;
}

static int by_size(const void *a, const void *b)
{
	double x = *(const double *)a, y = *(const double *)b;

	return (x > y) - (x < y);
}

static void report(const char *what, const char *unit, double *times)
{
	qsort(times, ROUNDS, sizeof(*times), by_size);
	printf("%-62s %10.2f %s (%.2f to %.2f)\n", what, times[ROUNDS / 2], unit, times[0], times[ROUNDS - 1]);
	fflush(stdout);
}

static unsigned char *arena(size_t pages)
{
	unsigned char *at = mmap(NULL, pages * PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);

	need(at != MAP_FAILED, "mmap");
	madvise(at, pages * PAGE, MADV_NOHUGEPAGE);
	for (size_t i = 0; i < pages; i++)
		at[i * PAGE] = (unsigned char)i;
	return at;
}

static int window(uint32_t pages, void *at, uint32_t arena_pages)
{
	struct cuttlefs_iommu_create create = wanted(CUTTLEFS_IOMMU_READ, pages, at, arena_pages);
	int fd = open_window();

	need(!ioctl(fd, CUTTLEFS_IOMMU_CREATE, &create), "a window");
	return fd;
}

static void making(void)
{
	unsigned char *at = arena(LARGE_PAGES);
	double one[ROUNDS], large[ROUNDS], locked[ROUNDS], closed[ROUNDS], begin;
	int fd;

	for (int i = 0; i < ROUNDS; i++) {
		begin = now_us();
		fd = window(1, at, 1);
		one[i] = now_us() - begin;
		close(fd);
		begin = now_us();
		fd = window(LARGE_PAGES, at, LARGE_PAGES);
		large[i] = (now_us() - begin) / 1e3;
		begin = now_us();
		close(fd);
		closed[i] = (now_us() - begin) / 1e3;
		begin = now_us();
		need(!mlock(at, (size_t)LARGE_PAGES * PAGE), "mlock");
		locked[i] = (now_us() - begin) / 1e3;
		munlock(at, (size_t)LARGE_PAGES * PAGE);
	}
	report("make a window of one page", "us", one);
	report("make a window of 1 GiB (262,144 pages, all gone)", "ms", large);
	report("close it", "ms", closed);
	report("mlock 1 GiB whose pages are there, to compare", "ms", locked);
	munmap(at, (size_t)LARGE_PAGES * PAGE);
}

static double point(int fd, uint32_t a_call, int is_shown)
{
	static struct cuttlefs_iommu_entry entries[PAGES];
	double begin;

	for (uint32_t i = 0; i < PAGES; i++)
		entries[i] = (struct cuttlefs_iommu_entry){ i, is_shown ? PAGES - 1 - i : GONE };
	begin = now_us();
	for (uint32_t i = 0; i < PAGES; i += a_call) {
		struct cuttlefs_iommu_point many = { .entries = (uintptr_t)&entries[i], .count = a_call };

		need(!ioctl(fd, CUTTLEFS_IOMMU_POINT, &many), "to point");
	}
	return (now_us() - begin) / PAGES;
}

static void pointing(void)
{
	static const uint32_t a_call[] = { 1, 16, PAGES };
	unsigned char *at = arena(PAGES);
	int fd = window(PAGES, at, PAGES);
	double shown[3][ROUNDS], gone[3][ROUNDS];
	char what[80];

	for (int i = 0; i < ROUNDS; i++)
		for (int k = 0; k < 3; k++) {
			shown[k][i] = point(fd, a_call[k], 1);
			gone[k][i] = point(fd, a_call[k], 0);
		}
	for (int k = 0; k < 3; k++) {
		snprintf(what, sizeof(what), "show a page, %u a call", a_call[k]);
		report(what, "us", shown[k]);
		snprintf(what, sizeof(what), "hide a page, %u a call", a_call[k]);
		report(what, "us", gone[k]);
	}
	close(fd);
	munmap(at, PAGES * PAGE);
}

/* Microseconds for each page that the kernel takes. */
static double page_out(unsigned char *at)
{
	double begin = now_us();

	for (uint32_t i = 0; i < SWAPPED; i++)
		madvise(at + (size_t)i * PAGE, PAGE, MADV_PAGEOUT);
	return (now_us() - begin) / SWAPPED;
}

static void swapping(void)
{
	unsigned char *alone = arena(SWAPPED), *shown = arena(SWAPPED);
	int fd = window(SWAPPED, shown, SWAPPED);
	double times[2][ROUNDS];
	struct cuttlefs_iommu_status status;

	for (int i = 0; i < ROUNDS; i++) {
		for (uint32_t k = 0; k < SWAPPED; k++) {
			struct cuttlefs_iommu_entry entry = { k, k };
			struct cuttlefs_iommu_point one = { .entries = (uintptr_t)&entry, .count = 1 };

			alone[(size_t)k * PAGE]++;
			shown[(size_t)k * PAGE]++;
			need(!ioctl(fd, CUTTLEFS_IOMMU_POINT, &one), "to point");
		}
		times[0][i] = page_out(alone);
		times[1][i] = page_out(shown);
	}
	need(!ioctl(fd, CUTTLEFS_IOMMU_STATUS, &status), "a status");
	report("swap a page out (to zram), no window", "us", times[0]);
	report("swap a page out that a window shows", "us", times[1]);
	printf("      %llu of %u pages were taken from the window\n", (unsigned long long)status.taken, ROUNDS * SWAPPED);
	close(fd);
}

int main(void)
{
	find_edu();
	making();
	pointing();
	swapping();
	return 0;
}
