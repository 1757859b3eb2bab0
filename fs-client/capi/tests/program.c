/* A C program of the API: tests/c_program.rs compiles and runs it, with the URL of a server. Each failure names its line. */
#define _GNU_SOURCE

#include "cuttlefs.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>

_Static_assert(sizeof(struct cuttlefs_options) == 40, "options");
_Static_assert(offsetof(struct cuttlefs_options, threads) == 32, "options");
_Static_assert(sizeof(struct cuttlefs_stat) == 64, "stat");
_Static_assert(offsetof(struct cuttlefs_stat, mode) == 48, "stat");
_Static_assert(sizeof(struct cuttlefs_completion) == 24, "completion");

#define CHECK(holds)                                                                                  \
    do {                                                                                              \
        if (!(holds)) {                                                                               \
            fprintf(stderr, "line %d: %s; the last error: %s\n", __LINE__, #holds, cuttlefs_error()); \
            return 1;                                                                                 \
        }                                                                                             \
    } while (0)

enum { PAGE = 4096, PAGES = 64, DEPTH = 16 };

static int count_name(void *context, const char *name, uint64_t ino) {
    int *counts = context;
    counts[strcmp(name, "file") == 0 && ino != 0]++;
    return 0;
}

/* Waits with poll(2), as an event loop does. */
static int next_end(cuttlefs_queue *queue, struct cuttlefs_completion *end) {
    for (;;) {
        int got = cuttlefs_poll(queue, end, 1);
        if (got != 0) return got;
        struct pollfd waited = {.fd = cuttlefs_queue_fd(queue), .events = POLLIN};
        if (poll(&waited, 1, 60000) != 1) return -ETIMEDOUT;
    }
}

/* Two files of as many pages, written in turns: so that no two pages of a file are neighbours in the pool. */
static int write_in_turns(cuttlefs_file *one, cuttlefs_file *other, uint64_t pages) {
    static unsigned char bytes[PAGE];
    for (uint64_t page = 0; page < pages; page++) {
        memset(bytes, (int)page, sizeof bytes);
        int64_t done = cuttlefs_pwrite(one, bytes, sizeof bytes, page * PAGE);
        if (done == PAGE) done = cuttlefs_pwrite(other, bytes, sizeof bytes, page * PAGE);
        if (done != PAGE) return 0;
    }
    return cuttlefs_fsync(one) == 0;
}

static int has_its_pages(cuttlefs_file *file, uint64_t pages) {
    static unsigned char bytes[PAGE], expected[PAGE];
    for (uint64_t page = 0; page < pages; page++) {
        memset(expected, (int)page, sizeof expected);
        if (cuttlefs_pread(file, bytes, sizeof bytes, page * PAGE) != PAGE || memcmp(bytes, expected, PAGE) != 0) return 0;
    }
    return 1;
}

/* Takes all free space of the pool. Returns the error at the end. */
static int64_t fill(cuttlefs_file *file) {
    static unsigned char bytes[64 * PAGE];
    int64_t done = 0;
    for (size_t len = sizeof bytes; len >= PAGE; len /= 2)
        while ((done = cuttlefs_append(file, bytes, len)) >= 0) {}
    return done;
}

/* Moves of a file's pages: 300 are two steps. */
enum { MOVED_PAGES = 300 };
static int moves(cuttlefs_session *session) {
    cuttlefs_file *file = NULL, *between = NULL, *filler = NULL, *reading = NULL, *writing = NULL, *part = NULL;
    CHECK(cuttlefs_open(session, "pieces", O_RDWR | O_CREAT, 0600, &file) == 0);
    CHECK(cuttlefs_open(session, "pieces", O_RDONLY, 0, &reading) == 0 && cuttlefs_open(session, "pieces", O_WRONLY, 0, &writing) == 0);
    CHECK(cuttlefs_open(session, "between", O_RDWR | O_CREAT, 0600, &between) == 0);
    CHECK(cuttlefs_open(session, "filler", O_RDWR | O_CREAT, 0600, &filler) == 0);
    CHECK(cuttlefs_runs(file) == 0);
    CHECK(write_in_turns(file, between, MOVED_PAGES));
    CHECK(cuttlefs_runs(file) > MOVED_PAGES / 2 && cuttlefs_runs(reading) == cuttlefs_runs(file));

    uint64_t page = 0, moved = 5;
    CHECK(cuttlefs_runs(NULL) == -EINVAL && cuttlefs_defragment_step(NULL, &page, &moved) == -EINVAL);
    CHECK(cuttlefs_defragment_step(file, NULL, &moved) == -EINVAL && cuttlefs_defragment_step(file, &page, NULL) == -EINVAL);
    CHECK(cuttlefs_runs(writing) == -EBADF && strstr(cuttlefs_error(), "reading"));
    CHECK(cuttlefs_defragment_step(reading, &page, &moved) == -EBADF && strstr(cuttlefs_error(), "writing"));
    char key[CUTTLEFS_KEY_TEXT];
    CHECK(cuttlefs_bind(file, 0, PAGE, CUTTLEFS_READ | CUTTLEFS_WRITE, 0, key) == 0 && cuttlefs_redeem(session, key, &part) == 0);
    CHECK(cuttlefs_defragment_step(part, &page, &moved) == -EBADF && strstr(cuttlefs_error(), "moves"));
    CHECK(cuttlefs_runs(part) == 1 && page == 0 && moved == 5);
    CHECK(fill(filler) == -ENOSPC);
    CHECK(cuttlefs_defragment_step(file, &page, &moved) == -ENOSPC && strstr(cuttlefs_error(), "space"));
    CHECK(page == 0 && moved == 5 && has_its_pages(file, MOVED_PAGES));

    /* What was cut off is free a moment later. */
    CHECK(cuttlefs_ftruncate(filler, 0) == 0);
    int more = -ENOSPC;
    for (int tries = 0; tries < 6000 && more == -ENOSPC; tries++) {
        more = cuttlefs_defragment_step(writing, &page, &moved);
        if (more == -ENOSPC) nanosleep(&(struct timespec){.tv_nsec = 10000000}, NULL);
    }
    CHECK(more == 1 && page > 0 && page < MOVED_PAGES && moved == 5 + page);
    while ((more = cuttlefs_defragment_step(file, &page, &moved)) > 0) CHECK(page <= MOVED_PAGES);
    CHECK(more == 0 && moved == 5 + MOVED_PAGES && cuttlefs_runs(file) == 1);
    CHECK(has_its_pages(file, MOVED_PAGES) && has_its_pages(between, MOVED_PAGES));
    page = moved = 0;
    while ((more = cuttlefs_defragment_step(file, &page, &moved)) > 0) {}
    CHECK(more == 0 && moved == 0);
    CHECK(cuttlefs_unlink(session, "pieces") == 0 && cuttlefs_unlink(session, "between") == 0 && cuttlefs_unlink(session, "filler") == 0);
    cuttlefs_file *all[] = {file, between, filler, reading, writing, part};
    for (size_t at = 0; at < sizeof all / sizeof *all; at++) cuttlefs_file_free(all[at]);
    return 0;
}

int main(int argc, char **argv) {
    CHECK(argc == 2);
    cuttlefs_session *session = NULL;
    CHECK(cuttlefs_connect("nowhere", NULL, &session) == -EINVAL && strstr(cuttlefs_error(), "tcp://HOST:PORT"));
    CHECK(cuttlefs_connect("tcp://127.0.0.1:1", NULL, &session) == -ECONNREFUSED && session == NULL);
    struct cuttlefs_options options = {.label = "a C program", .threads = 2, .deadline_ms = 60000};
    CHECK(cuttlefs_connect(argv[1], &options, &session) == 0 && session != NULL);

    CHECK(cuttlefs_mkdir(session, "directory", 0755) == 0);
    CHECK(cuttlefs_mkdir(session, "directory", 0755) == -EEXIST);
    cuttlefs_file *file = NULL;
    CHECK(cuttlefs_open(session, "directory/file", O_RDWR, 0, &file) == -ENOENT && file == NULL);
    CHECK(cuttlefs_open(session, "directory/file", O_RDWR | O_APPEND, 0, &file) == -EINVAL);
    CHECK(cuttlefs_open(session, "directory/file", O_RDWR | O_CREAT | O_EXCL, 0640, &file) == 0);
    int counts[2] = {0, 0};
    CHECK(cuttlefs_readdir(session, "directory", count_name, counts) == 0 && counts[0] == 0 && counts[1] == 1);

    static unsigned char bytes[PAGES * PAGE];
    for (size_t at = 0; at < sizeof bytes; at++) bytes[at] = (unsigned char)(at / PAGE + at);
    CHECK(cuttlefs_pwrite(file, bytes, sizeof bytes, 0) == (int64_t)sizeof bytes);
    CHECK(cuttlefs_append(file, "tail", 4) == (int64_t)sizeof bytes);
    CHECK(cuttlefs_fsync(file) == 0);
    unsigned char tail[10];
    CHECK(cuttlefs_pread(file, tail, sizeof tail, sizeof bytes) == 4 && memcmp(tail, "tail", 4) == 0);
    CHECK(cuttlefs_pread(file, tail, 0, 0) == 0 && cuttlefs_pread(file, NULL, 1, 0) == -EINVAL);
    struct cuttlefs_stat stat;
    CHECK(cuttlefs_fstat(file, &stat) == 0 && stat.size == sizeof bytes + 4);
    CHECK(stat.mode == (S_IFREG | 0640) && stat.nlink == 1 && stat.mtime_seconds > 0);
    CHECK(cuttlefs_ftruncate(file, sizeof bytes) == 0);

    cuttlefs_queue *queue = NULL;
    cuttlefs_buffer *buffer = NULL;
    CHECK(cuttlefs_queue_new(session, 0, &queue) == -EINVAL && queue == NULL);
    CHECK(cuttlefs_queue_new(session, DEPTH, &queue) == 0);
    CHECK(cuttlefs_buffer_new(session, DEPTH * PAGE, &buffer) == 0);
    unsigned char *data = cuttlefs_buffer_data(buffer);
    CHECK(data != NULL && cuttlefs_buffer_data(NULL) == NULL);
    CHECK(cuttlefs_post_read(queue, 0, file, 0, buffer, 1, DEPTH * PAGE) == -EINVAL);
    CHECK(cuttlefs_post_read(queue, 0, file, 0, NULL, 0, PAGE) == -EINVAL);
    for (uint64_t page = 0; page < PAGES;) {
        uint64_t first = page;
        for (; page - first < DEPTH; page++)
            CHECK(cuttlefs_post_read(queue, page, file, page * PAGE, buffer, page % DEPTH * PAGE, PAGE) == 0);
        CHECK(cuttlefs_post_sync(queue, 999, file) == -EAGAIN);
        for (int left = DEPTH; left > 0; left--) {
            struct cuttlefs_completion end;
            CHECK(next_end(queue, &end) == 1 && end.result == PAGE);
            CHECK(memcmp(data + end.token % DEPTH * PAGE, bytes + end.token * PAGE, PAGE) == 0);
        }
    }
    memcpy(data, "posted", 6);
    CHECK(cuttlefs_post_write(queue, 1, file, 100, buffer, 0, 6) == 0);
    CHECK(cuttlefs_post_append(queue, 2, file, buffer, 0, 6) == 0);
    CHECK(cuttlefs_post_sync(queue, 3, file) == 0);
    int seen = 0;
    for (int left = 3; left > 0; left--) {
        struct cuttlefs_completion end;
        CHECK(cuttlefs_wait(queue, &end, 1, 60000) == 1 && end.result == (end.token == 3 ? 0 : 6));
        CHECK(end.token == 3 || end.offset == (end.token == 1 ? 100 : sizeof bytes));
        seen |= 1 << end.token;
    }
    CHECK(seen == 14 && cuttlefs_poll(queue, NULL, 0) == 0);
    CHECK(cuttlefs_pread(file, tail, 6, 100) == 6 && memcmp(tail, "posted", 6) == 0);

    /* Keys: another session opens a part of the file. */
    int has_verbs = strncmp(argv[1], "shm", 3) != 0;
    char key[CUTTLEFS_KEY_TEXT];
    cuttlefs_session *other = NULL;
    cuttlefs_file *part = NULL;
    CHECK(cuttlefs_connect(argv[1], &options, &other) == 0);
    CHECK(cuttlefs_bind(file, 0, PAGE, 4, 0, key) == -EINVAL && cuttlefs_bind(file, 0, PAGE, CUTTLEFS_READ, 0, NULL) == -EINVAL);
    CHECK(cuttlefs_bind(file, 0, PAGE, CUTTLEFS_READ | CUTTLEFS_WRITE, 0, key) == 0 && strlen(key) == CUTTLEFS_KEY_TEXT - 1);
    CHECK(cuttlefs_redeem(other, "no key", &part) == -EINVAL && cuttlefs_redeem(other, key, NULL) == -EINVAL);
    CHECK(cuttlefs_redeem(other, key, &part) == 0);
    CHECK(cuttlefs_pread(part, tail, 6, 100) == 6 && memcmp(tail, "posted", 6) == 0);
    CHECK(cuttlefs_pread(part, tail, 1, PAGE) == -ERANGE && cuttlefs_pwrite(part, "no", 2, PAGE - 1) == -ERANGE);

    /* Grants: past the server's workers where the link has such verbs. */
    cuttlefs_grant *grant = NULL, *none = NULL;
    uint64_t old = 1, zero = 0;
    CHECK(cuttlefs_grant_write(part, 0, PAGE + 1, &grant) == -ERANGE && cuttlefs_grant_write(part, 0, 0, &grant) == -EINVAL);
    CHECK(cuttlefs_grant_write(part, 0, PAGE, &grant) == 0 && cuttlefs_grant_stands(grant) == has_verbs);
    CHECK(cuttlefs_grant_write(part, 8, 8, &none) == (has_verbs ? -EEXIST : 0));
    cuttlefs_grant_free(none);
    CHECK(cuttlefs_pwrite(part, &zero, 8, 8) == 8);
    CHECK(cuttlefs_fetch_add(part, 8, 5, &old) == 0 && old == 0);
    CHECK(cuttlefs_compare_swap(part, 8, 1, 7, &old) == 0 && old == 5);
    CHECK(cuttlefs_compare_swap(part, 8, 5, 7, &old) == 0 && old == 5);
    CHECK(cuttlefs_fetch_add(part, 9, 5, &old) == -EINVAL && cuttlefs_fetch_add(part, 8, 5, NULL) == -EINVAL);
    CHECK(cuttlefs_fetch_add(part, PAGE, 5, &old) == -ERANGE);
    /* Without a grant, by a request. */
    CHECK(cuttlefs_fetch_add(file, 8, 2, &old) == 0 && old == 7 && cuttlefs_fetch_add(file, 8, -2, &old) == 0 && old == 9);
    CHECK(cuttlefs_fetch_add(file, 1 << 30, 5, &old) == -ENXIO);
    cuttlefs_queue *words = NULL;
    CHECK(cuttlefs_queue_new(other, 2, &words) == 0);
    CHECK(cuttlefs_post_fetch_add(words, 1, part, 8, 1) == 0);
    struct cuttlefs_completion end;
    CHECK(cuttlefs_wait(words, &end, 1, 60000) == 1 && end.token == 1 && end.result == 8 && end.offset == 7);
    CHECK(cuttlefs_post_compare_swap(words, 2, part, 8, 8, 9) == 0);
    CHECK(cuttlefs_wait(words, &end, 1, 60000) == 1 && end.token == 2 && end.result == 8 && end.offset == 8);
    CHECK(cuttlefs_pread(file, &old, 8, 8) == 8 && old == 9);
    cuttlefs_queue_free(words);
    CHECK(cuttlefs_fsync(part) == 0 && cuttlefs_grant_renew(grant) == 0);
    cuttlefs_grant_free(grant);
    cuttlefs_grant_free(NULL);
    CHECK(cuttlefs_unbind(file, key) == 0 && cuttlefs_unbind(file, key) == -ESTALE);
    CHECK(cuttlefs_pread(part, tail, 1, 0) == -ESTALE && strstr(cuttlefs_error(), "new key"));
    cuttlefs_file_free(part);
    CHECK(cuttlefs_redeem(other, key, &part) == -ESTALE);
    cuttlefs_session_free(other);

    CHECK(moves(session) == 0);

    /* A file outlives the handle of its session. */
    CHECK(cuttlefs_rename(session, "directory/file", "moved") == 0 && cuttlefs_rmdir(session, "directory") == 0);
    CHECK(cuttlefs_stat(session, "moved", &stat) == 0 && stat.size == sizeof bytes + 6);
    CHECK(cuttlefs_truncate(session, "moved", sizeof bytes) == 0 && cuttlefs_truncate(session, "directory", 0) == -ENOENT);
    CHECK(cuttlefs_fstat(file, &stat) == 0 && stat.size == sizeof bytes);
    CHECK(cuttlefs_stat(session, "directory", &stat) == -ENOENT && cuttlefs_stat(NULL, "moved", &stat) == -EINVAL);
    CHECK(cuttlefs_unlink(session, "moved") == 0);
    cuttlefs_queue_free(queue);
    cuttlefs_buffer_free(buffer);
    cuttlefs_session_free(session);
    CHECK(cuttlefs_pread(file, tail, 6, 100) == 6);
    cuttlefs_file_free(file);
    cuttlefs_file_free(NULL);
    puts("all of it");
    return 0;
}
