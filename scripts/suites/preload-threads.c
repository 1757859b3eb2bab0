/* What threads and signals may do with read(2), while `cuttlefs preload` reads past FUSE beside it.
 *
 * usage: preload-threads FILE TAIL     FILE has words of eight bytes, each its own number; TAIL is made
 * Prints each part that is as it should be; ends with 1 at the first that is not. */
#define _GNU_SOURCE
#include <fcntl.h>
#include <pthread.h>
#include <setjmp.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

static int file;
static uint64_t words;
static volatile sig_atomic_t handled, jumps_wanted, bad;
static sigjmp_buf place;

static double now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec + t.tv_nsec / 1e9;
}

static void expect(int holds, const char *what)
{
    if (holds) return;
    printf("%s\n", what);
    exit(1);
}

static int is_right(uint64_t first, uint64_t count)
{
    uint64_t got[1024];
    if (pread(file, got, count * 8, first * 8) != (ssize_t)(count * 8)) return 0;
    for (uint64_t at = 0; at < count; at++)
        if (got[at] != first + at) return 0;
    return 1;
}

static void handler(int signal)
{
    (void)signal;
    handled++;
    if (!is_right((uint64_t)handled * 7919 % (words - 16), 16)) bad = 1;
    if (jumps_wanted && handled % 50 == 0) siglongjmp(place, 1);
}

/* Handlers read in the middle of reads, and leave some for good, as less(1) does at ^C. */
static void signals(void)
{
    struct sigaction action = {.sa_handler = handler, .sa_flags = SA_RESTART};
    struct itimerval often = {{0, 700}, {0, 700}}, never = {{0, 0}, {0, 0}};
    volatile uint64_t reads = 0;
    sigaction(SIGALRM, &action, NULL);
    setitimer(ITIMER_REAL, &often, NULL);
    for (volatile int jumps = 0; jumps < 2; jumps++) {
        double until = now() + 2;
        sigsetjmp(place, 1);
        jumps_wanted = jumps;
        for (; now() < until || handled < 200 * (jumps + 1); reads++)
            expect(is_right(reads * 104729 % (words - 512), 512), "a read beside signals");
        jumps_wanted = 0;
    }
    setitimer(ITIMER_REAL, &never, NULL);
    expect(!bad, "a read of a handler");
    printf("signals as it should be: %d handlers\n", (int)handled);
}

static volatile uint64_t cancelled_reads;

static void *reads_for_ever(void *nothing)
{
    for (uint64_t at = 0;; at++) {
        if (!is_right(at * 104729 % (words - 512), 512)) bad = 1;
        cancelled_reads++;
    }
    return nothing;
}

static int waits[2];

static void *waits_for_ever(void *nothing)
{
    char byte;
    cancelled_reads += read(waits[0], &byte, 1) == 1 ? 1 : 0;
    return nothing;
}

/* A thread can be cancelled in a read, of a file and of a pipe. */
static void cancellation(void)
{
    void *result;
    pthread_t thread;
    expect(pthread_create(&thread, NULL, reads_for_ever, NULL) == 0, "a thread");
    while (cancelled_reads < 100) usleep(1000);
    pthread_cancel(thread);
    pthread_join(thread, &result);
    expect(result == PTHREAD_CANCELED && !bad, "a thread that reads is cancelled");
    expect(pipe(waits) == 0 && pthread_create(&thread, NULL, waits_for_ever, NULL) == 0, "a thread");
    usleep(20000);
    pthread_cancel(thread);
    pthread_join(thread, &result);
    expect(result == PTHREAD_CANCELED, "a thread that waits in a pipe is cancelled");
    printf("cancellation as it should be\n");
}

#define RECORDS 20000
static int tail;
static volatile int written_all;
static unsigned char seen[RECORDS];

static void *takes_records(void *nothing)
{
    for (;;) {
        int was_all = written_all;
        uint64_t record[8];
        ssize_t got = read(tail, record, sizeof record);
        if (got == 0 && was_all) return nothing;
        if (got == 0) continue;
        if (got != sizeof record || record[0] >= RECORDS || record[7] != record[0]) bad = 1;
        else __atomic_add_fetch(&seen[record[0]], 1, __ATOMIC_RELAXED);
    }
}

/* Threads that share the offset of a file that grows get each record once. */
static void shared_offset(const char *path)
{
    pthread_t threads[3];
    int writing = open(path, O_WRONLY | O_CREAT | O_TRUNC | O_APPEND, 0600);
    tail = open(path, O_RDONLY);
    expect(writing >= 0 && tail >= 0, "the file that grows");
    for (int at = 0; at < 3; at++) expect(pthread_create(&threads[at], NULL, takes_records, NULL) == 0, "a thread");
    for (uint64_t number = 0; number < RECORDS; number++) {
        uint64_t record[8] = {number, 0, 0, 0, 0, 0, 0, number};
        expect(write(writing, record, sizeof record) == sizeof record, "an append");
    }
    written_all = 1;
    for (int at = 0; at < 3; at++) pthread_join(threads[at], NULL);
    for (int number = 0; number < RECORDS; number++)
        if (seen[number] != 1) {
            printf("record %d came %d times\n", number, seen[number]);
            exit(1);
        }
    expect(!bad, "a record in parts");
    printf("shared offset as it should be\n");
}

int main(int count, char **arguments)
{
    setvbuf(stdout, NULL, _IOLBF, 0);
    if (count != 3) return 2;
    file = open(arguments[1], O_RDONLY);
    words = lseek(file, 0, SEEK_END) / 8;
    expect(file >= 0 && words > 4096, "the file");
    signals();
    cancellation();
    shared_offset(arguments[2]);
    return 0;
}
