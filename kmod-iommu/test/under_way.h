/* SPDX-License-Identifier: GPL-2.0 */
/*
 * Pages that change while the device reads, and an initiator that repeats a transfer that met a hole, so that no fault reaches whoever asked for it.
 *
 * What the initiator stands for: with RDMA such a transfer completes with an error and breaks its queue pair, and the requester connects again and
 * asks again; a device's driver hears of the fault, and repeats the transfer. QEMU's edu says nothing. So here a transfer has failed if bytes came
 * that no page has. There are TRIES tries at most, and those that failed are counted.
 */
#ifndef UNDER_WAY_H
#define UNDER_WAY_H

#include <pthread.h>
#include <stdatomic.h>

#include "edu.h"

/*
 * QEMU's device reads under the lock that the flush of an entry takes, too, so it often reads within a hole: nine tries of ten failed on a busy
 * machine where entries changed without a pause. Holes of 2 ms, with pauses twice as long, are met by a third of the transfers, and by twice as many
 * where the machine stands still in the wrong moment: two thirds to the power of 48 is 4e-9.
 */
#define TRIES 48
/* More transfers than that end a test, even if it has not seen all that it must. */
#define MOST_TRANSFERS 400
#define LEAST_TURNS 10000

#define WORDS (LEN / 8)
/* 32 aligned bytes are of one page: who reads a page tells by them whether it is magic. */
#define UNIT_WORDS 4
#define ALL(byte) (0x0101010101010101ull * (byte))
/* What is in the arena before it is filled. No device may see it. */
#define UNFILLED 0x33
/* The words of a page that is filled in this turn. */
#define OF_TURN(turn) (0x1100000000000000ull | (turn))

static atomic_int is_over;
static atomic_uint turns;

/* How pages change. */
struct changing {
	const char *how;
	void *(*thread)(void *);
	/* Whether a word may be in a page that is shown between these two turns. */
	int (*is_of_a_page)(uint64_t word, uint64_t first_turn, uint64_t last_turn);
	/* Holes of this length, made on purpose; NULL: as they are. */
	const char *hole_us;
	/* How long it waits in each turn. */
	useconds_t pause_us;
	int transfers;
	int fd;
	unsigned char *at;
};

/* What transfers brought. */
struct found {
	/* Words of no page, and units of more than one. */
	int foreign, torn;
	/* Transfers that ended well and brought the page, or magic. */
	int shown, gone;
};

/* usleep(0) sleeps, too. */
static void pause_for(useconds_t us)
{
	if (us)
		usleep(us);
}

/* Points to page 0, page 1, gone, page 0, and so on. */
static void *flip(void *argument)
{
	struct changing *changing = argument;

	while (!atomic_load(&is_over)) {
		uint32_t turn = atomic_fetch_add(&turns, 1);

		if (point(changing->fd, 0, turn % 3 == 2 ? GONE : turn % 3))
			return argument;
		pause_for(changing->pause_us);
	}
	return NULL;
}

static int is_flipped(uint64_t word, uint64_t first_turn, uint64_t last_turn)
{
	(void)first_turn;
	(void)last_turn;
	return word == ALL(1) || word == ALL(2);
}

/* Lets the kernel take the page, fills what is there then with words of this turn, and shows it. */
static void *take_and_show(void *argument)
{
	struct changing *changing = argument;

	while (!atomic_load(&is_over)) {
		uint64_t turn, word;

		madvise(changing->at, PAGE, MADV_DONTNEED);
		turn = atomic_fetch_add(&turns, 1) + 1;
		word = OF_TURN(turn);
		for (int i = 0; i < PAGE; i += 8)
			memcpy(changing->at + i, &word, 8);
		pause_for(changing->pause_us / 2);
		if (point(changing->fd, 0, 0))
			return argument;
		pause_for(changing->pause_us / 2);
	}
	return NULL;
}

static int is_of_turns(uint64_t word, uint64_t first_turn, uint64_t last_turn)
{
	return word >= OF_TURN(first_turn) && word <= OF_TURN(last_turn);
}

/*
 * Whether a transfer failed at this word, or at a half of it: QEMU asks the IOMMU again for each four bytes that it refuses, so a transfer may fail up
 * to the middle of a page, where the entry is there again. No half of a page's words is such.
 */
static int is_nothing(uint64_t word)
{
	uint32_t halves[2] = { (uint32_t)word, (uint32_t)(word >> 32) };

	for (int i = 0; i < 2; i++)
		if (halves[i] == (uint32_t)ALL(NOTHING) || halves[i] == (uint32_t)ALL(FAULTED))
			return 1;
	return 0;
}

/* One try of a transfer. Returns whether it ended well; what a failed one brought is looked at, too. */
static int ends_well(const struct changing *changing, struct found *found)
{
	uint64_t first_turn = atomic_load(&turns), last_turn, words[WORDS];
	int is_whole = 1, has_page = 0, has_magic = 0;

	reads(0);
	last_turn = atomic_load(&turns);
	memcpy(words, bytes, sizeof(words));
	for (int i = 0; i < WORDS; i++) {
		if (is_nothing(words[i])) {
			is_whole = 0;
			continue;
		}
		if (words[i] == ALL(MAGIC))
			has_magic = 1;
		else if (changing->is_of_a_page(words[i], first_turn, last_turn))
			has_page = 1;
		else
			found->foreign++;
		if (i % UNIT_WORDS && words[i] != words[i - 1] && !is_nothing(words[i - 1]))
			found->torn++;
	}
	if (is_whole) {
		found->shown += has_page;
		found->gone += has_magic;
	}
	return is_whole;
}

/* Private memory: what the kernel takes comes back as it is in the file. */
static unsigned char *unfilled_arena(size_t pages)
{
	int file = memfd_create("unfilled", MFD_CLOEXEC);
	unsigned char fill[PAGE], *at;

	memset(fill, UNFILLED, PAGE);
	for (size_t i = 0; i < pages; i++)
		need(write(file, fill, PAGE) == PAGE, "a file");
	at = mmap(NULL, pages * PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE, file, 0);
	need(at != MAP_FAILED, "mmap");
	close(file);
	return at;
}

static void pages_change(struct changing *changing)
{
	int transfers = 0, met = 0, faults = 0, most_tries = 0, unended = 0;
	struct found found = {};
	unsigned int changed;
	pthread_t thread;
	void *refused;

	changing->at = unfilled_arena(2);
	changing->fd = window(CUTTLEFS_IOMMU_READ, 2, changing->at, 2);
	if (changing->thread == flip) {
		memset(changing->at, 1, PAGE);
		memset(changing->at + PAGE, 2, PAGE);
	}
	need(echo(changing->hole_us ? changing->hole_us : "0", "/sys/module/cuttlefs_iommu/parameters/hole_us"), "hole_us");
	register_window(changing->fd);
	atomic_store(&is_over, 0);
	atomic_store(&turns, 0);
	need(!pthread_create(&thread, NULL, changing->thread, changing), "a thread");
	while (transfers < MOST_TRANSFERS &&
	       (transfers < changing->transfers || !found.shown || !found.gone ||
		(changing->hole_us ? !faults : atomic_load(&turns) < LEAST_TURNS))) {
		int tries = 0, is_well;

		do {
			is_well = ends_well(changing, &found);
			tries++;
		} while (!is_well && tries < TRIES);
		transfers++;
		faults += tries - is_well;
		met += tries > is_well;
		unended += !is_well;
		most_tries = tries > most_tries ? tries : most_tries;
	}
	changed = atomic_load(&turns);
	atomic_store(&is_over, 1);
	pthread_join(thread, &refused);
	need(echo("0", "/sys/module/cuttlefs_iommu/parameters/hole_us"), "hole_us");

	printf("      %s: %d transfers while pages changed %u times; the page in %d, magic in %d; %d met a hole, %d tries failed, "
	       "at most %d tries a transfer\n",
	       changing->how, transfers, changed, found.shown, found.gone, met, faults, most_tries);
	check(!unended, "%s: every transfer ended well (%d did not)", changing->how, unended);
	check(!found.foreign && !found.torn, "with no byte of another page (%d words), and no 32 bytes of two (%d)", found.foreign, found.torn);
	check(found.shown && found.gone, "some found the page, and some magic");
	if (changing->hole_us)
		check(faults > 0, "a hole was met, and the transfer repeated");
	else
		check(changed >= LEAST_TURNS, "pages changed %d times or more", LEAST_TURNS);
	check(!refused && reads(1) == MAGIC && !status(changing->fd).holes, "no change was refused, and no hole stays");
	close(changing->fd);
	register_dmabuf(-1);
	munmap(changing->at, 2 * PAGE);
}

static void pages_change_under_way(void)
{
	struct changing ways[] = {
		{ .how = "pointed again and again", .thread = flip, .is_of_a_page = is_flipped, .transfers = 40, .pause_us = 50 },
		{ .how = "the same with holes of 2 ms", .thread = flip, .is_of_a_page = is_flipped, .transfers = 20, .hole_us = "2000", .pause_us = 4000 },
		{ .how = "the kernel takes and gives", .thread = take_and_show, .is_of_a_page = is_of_turns, .transfers = 40 },
		{ .how = "the same with holes of 2 ms", .thread = take_and_show, .is_of_a_page = is_of_turns, .transfers = 20, .hole_us = "2000",
		  .pause_us = 8000 },
	};

	for (size_t i = 0; i < sizeof(ways) / sizeof(ways[0]); i++)
		pages_change(&ways[i]);
}

#endif
