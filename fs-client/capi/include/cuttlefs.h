/* Files of a cuttlefs server for C programs, without a mount: docs/native.md says what a program gets.
 *
 * Link with -lcuttlefs. Functions that return int or int64_t return 0 or a count, or a negative errno; then cuttlefs_error() has words for people.
 * Handles are opaque. They may be used by many threads at once, except queues, which belong to one thread at a time. A handle is freed once; one
 * that another handle was made of (a session, a file) may be freed before it. NULL may be freed. A fault of the library ends the process.
 *
 *     #include "cuttlefs.h"
 *     #include <fcntl.h>
 *     #include <stdio.h>
 *     #include <stdlib.h>
 *     #include <string.h>
 *
 *     int main(int argc, char **argv) {
 *         struct cuttlefs_options options = {.key = getenv("CUTTLEFS_KEY")};
 *         const char *line = "a line of C\n";
 *         cuttlefs_session *session = NULL;
 *         cuttlefs_file *log = NULL;
 *         int failed = argc != 2 || cuttlefs_connect(argv[1], &options, &session) < 0 ||
 *                      cuttlefs_open(session, "log", O_RDWR | O_CREAT, 0600, &log) < 0 ||
 *                      cuttlefs_append(log, line, strlen(line)) < 0 || cuttlefs_fsync(log) < 0;
 *         if (failed) fprintf(stderr, "%s\n", argc != 2 ? "usage: log URL" : cuttlefs_error());
 *         cuttlefs_file_free(log);
 *         cuttlefs_session_free(session);
 *         return failed;
 *     }
 */
#ifndef CUTTLEFS_H
#define CUTTLEFS_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef struct cuttlefs_session cuttlefs_session;
typedef struct cuttlefs_file cuttlefs_file;
typedef struct cuttlefs_buffer cuttlefs_buffer;
typedef struct cuttlefs_queue cuttlefs_queue;
typedef struct cuttlefs_grant cuttlefs_grant;

/* How to connect. All zero bytes are the defaults. */
struct cuttlefs_options {
    const char *key;         /* key file to show over tcp:// and rdma://; NULL: none */
    const char *label;       /* for people, in the server's status; NULL: the program's name */
    const char *subtree;     /* the directory of the export that paths begin at; NULL: the export's root */
    int64_t server_user;     /* over unix:// and shm://, the user who may serve besides root and you; 0: none */
    uint32_t threads;        /* requests that can wait for the server at once; 0: 4 */
    uint32_t deadline_ms;    /* how long a request waits for the server (then -ETIMEDOUT: it may be done nevertheless); 0: until it is back */
};

struct cuttlefs_stat {
    uint64_t ino;
    uint64_t size;
    uint64_t allocated_bytes;
    int64_t mtime_seconds;
    int64_t ctime_seconds;
    uint32_t mtime_nanoseconds;
    uint32_t ctime_nanoseconds;
    uint32_t mode;           /* type and permission bits, as st_mode */
    uint32_t nlink;
    uint32_t uid;
    uint32_t gid;
};

/* The end of a request of a queue. */
struct cuttlefs_completion {
    uint64_t token;          /* as it was posted with */
    int64_t result;          /* bytes, or a negative errno */
    uint64_t offset;         /* of a write or an append: where the bytes are; of an atomic: the word that was there */
};

/* Words for the last error of the calling thread; valid until its next call of this library. */
const char *cuttlefs_error(void);

/* A session with the server at a URL (tcp://HOST:PORT, rdma://HOST:PORT, unix:///PATH, shm:///PATH). options may be NULL. -ECONNREFUSED: the server cannot
 * be reached, has not answered within 5 s (whatever deadline_ms is), or does not take the key; or the key file cannot be read. A process that was forked
 * from one with a session gets -EOPNOTSUPP, unless it has started a program since. */
int cuttlefs_connect(const char *url, const struct cuttlefs_options *options, cuttlefs_session **session);
void cuttlefs_session_free(cuttlefs_session *session);

/* Names. Paths begin at the export's root, or at the subtree. "." and ".." are resolved by this library: docs/native.md. */
int cuttlefs_stat(cuttlefs_session *session, const char *path, struct cuttlefs_stat *stat);
int cuttlefs_mkdir(cuttlefs_session *session, const char *path, uint32_t mode);
int cuttlefs_unlink(cuttlefs_session *session, const char *path);
int cuttlefs_rmdir(cuttlefs_session *session, const char *path);
int cuttlefs_rename(cuttlefs_session *session, const char *from, const char *to);
int cuttlefs_truncate(cuttlefs_session *session, const char *path, uint64_t len);
/* Calls take for each name until it returns something else than 0, or there are no more. */
int cuttlefs_readdir(cuttlefs_session *session, const char *path,
                     int (*take)(void *context, const char *name, uint64_t ino), void *context);

/* Files. Of flags O_RDONLY, O_WRONLY, O_RDWR, O_CREAT, O_EXCL, O_TRUNC, O_SYNC, O_DSYNC and O_CLOEXEC are known, others are -EINVAL. */
int cuttlefs_open(cuttlefs_session *session, const char *path, int flags, uint32_t mode, cuttlefs_file **file);
void cuttlefs_file_free(cuttlefs_file *file);
int64_t cuttlefs_pread(cuttlefs_file *file, void *bytes, size_t len, uint64_t offset);
int64_t cuttlefs_pwrite(cuttlefs_file *file, const void *bytes, size_t len, uint64_t offset);
/* Writes at the end of the file; returns the offset of the first byte. Up to 1 MiB is one append, whoever else appends. */
int64_t cuttlefs_append(cuttlefs_file *file, const void *bytes, size_t len);
int cuttlefs_fsync(cuttlefs_file *file);
int cuttlefs_ftruncate(cuttlefs_file *file, uint64_t len);
int cuttlefs_fstat(cuttlefs_file *file, struct cuttlefs_stat *stat);

/* Places of a file's pages in the server's pool. cuttlefs_runs says in how many runs they lie, as of about now: pages that are neighbours in the file and
 * in the pool are of one run. cuttlefs_defragment_step has the server move the first pages at or behind *page that have a better place, 1 MiB at most; the
 * file may be in use, and nothing but the places of its pages changes. *page gets where the next step begins, and *moved_pages is increased. 1: there is
 * a next step; 0: there is none. Nobody needs to make it. -EBADF: the file is not open for writing, or only a part of it is; -ENOSPC: the pool has too
 * little free space to move them. An error changes neither number, so the same call tries again.
 *
 *     uint64_t page = 0, moved_pages = 0;
 *     int more;
 *     while ((more = cuttlefs_defragment_step(file, &page, &moved_pages)) > 0) {}
 */
int64_t cuttlefs_runs(cuttlefs_file *file);
int cuttlefs_defragment_step(cuttlefs_file *file, uint64_t *page, uint64_t *moved_pages);

/* Ranges of files for others. A key is a text of CUTTLEFS_KEY_TEXT - 1 characters and a NUL; who has it and can connect may open the range with the rights
 * (CUTTLEFS_READ, CUTTLEFS_WRITE), until lifetime_ms have passed (0: no such time), or the binder's file is closed: a moment after its last handle, grants
 * too, is freed. cuttlefs_unbind ends a key at once. Keys stay good over restarts of the server. A key that is over, or whose binding the server does not
 * know, is -ESTALE, as all uses of a file that it has opened are then; one whose binding it knows and whose MAC is wrong, or that is not for this session,
 * -EACCES; a text that is no key -EINVAL; bytes that it is not for are -ERANGE. */
#define CUTTLEFS_KEY_TEXT 177
enum { CUTTLEFS_READ = 1, CUTTLEFS_WRITE = 2 };
int cuttlefs_bind(cuttlefs_file *file, uint64_t offset, uint64_t len, int rights, uint64_t lifetime_ms,
                  char key[CUTTLEFS_KEY_TEXT]);
int cuttlefs_unbind(cuttlefs_file *file, const char *key);
int cuttlefs_redeem(cuttlefs_session *session, const char *key, cuttlefs_file **file);

/* Write grants. Under a grant, writes and appends of the open file go past the server's workers, by functions and queues alike, where the link has such
 * verbs (tcp://, unix://); elsewhere they go as requests. Such changes are not kept by this library: if the server is killed before a sync, the
 * next sync of the file is -EIO. -EEXIST: this open file has a grant of a part of the range. -ENFILE: the server has no memory left for grants.
 * -ENOSPC of an atomic, or of a write or append of at most 1 MiB, says that nothing was done, by whatever way it goes; a longer one is several requests,
 * of which the first ones may be done. Freeing the grant gives it back. */
int cuttlefs_grant_write(cuttlefs_file *file, uint64_t offset, uint64_t len, cuttlefs_grant **grant);
/* 1 if it stands as far as is known, else 0. docs/native.md says what ends it. Over shm:// and rdma:// it is always 0, also after a renew that returned 0:
 * there no change goes past the server's workers. */
int cuttlefs_grant_stands(cuttlefs_grant *grant);
int cuttlefs_grant_renew(cuttlefs_grant *grant);
void cuttlefs_grant_free(cuttlefs_grant *grant);
/* Atomics of a word (little-endian) at a multiple of 8, of a file that is open for reading and writing: one-sided under a grant, else by a request, with the
 * same meaning. -ENXIO behind the end of the file. -ECONNABORTED, of one-sided appends too: the connection or the server was lost, and it may be done. old
 * gets what was there; it was swapped if that is expect. As a change under a grant it is not kept by this library, and durable when a later cuttlefs_fsync
 * has returned, or at once in a file that was opened with O_SYNC. */
int cuttlefs_compare_swap(cuttlefs_file *file, uint64_t offset, uint64_t expect, uint64_t swap, uint64_t *old);
int cuttlefs_fetch_add(cuttlefs_file *file, uint64_t offset, uint64_t add, uint64_t *old);

/* Memory that is registered once, for queues. */
int cuttlefs_buffer_new(cuttlefs_session *session, size_t len, cuttlefs_buffer **buffer);
void cuttlefs_buffer_free(cuttlefs_buffer *buffer);
void *cuttlefs_buffer_data(cuttlefs_buffer *buffer);

/* Many requests under way at once, at most depth (1 to 128). A range of a buffer belongs to its request from the post to the poll of its end.
 * Requests are done in any order; a sync comes after the writes of its file that the queue was given before it. A full queue is -EAGAIN. */
int cuttlefs_queue_new(cuttlefs_session *session, size_t depth, cuttlefs_queue **queue);
void cuttlefs_queue_free(cuttlefs_queue *queue);
/* Readable when completions are there (it can be readable for nothing). Belongs to the queue. */
int cuttlefs_queue_fd(cuttlefs_queue *queue);
int cuttlefs_post_read(cuttlefs_queue *queue, uint64_t token, cuttlefs_file *file, uint64_t offset,
                       cuttlefs_buffer *buffer, size_t at, size_t len);
int cuttlefs_post_write(cuttlefs_queue *queue, uint64_t token, cuttlefs_file *file, uint64_t offset,
                        cuttlefs_buffer *buffer, size_t at, size_t len);
int cuttlefs_post_append(cuttlefs_queue *queue, uint64_t token, cuttlefs_file *file,
                         cuttlefs_buffer *buffer, size_t at, size_t len);
int cuttlefs_post_compare_swap(cuttlefs_queue *queue, uint64_t token, cuttlefs_file *file, uint64_t offset,
                               uint64_t expect, uint64_t swap);
int cuttlefs_post_fetch_add(cuttlefs_queue *queue, uint64_t token, cuttlefs_file *file, uint64_t offset, uint64_t add);
int cuttlefs_post_sync(cuttlefs_queue *queue, uint64_t token, cuttlefs_file *file);
/* Up to max completions. Returns their number. */
int cuttlefs_poll(cuttlefs_queue *queue, struct cuttlefs_completion *completions, size_t max);
/* As cuttlefs_poll, but waits for the first, no longer than timeout_ms. 0 at once if nothing is under way. */
int cuttlefs_wait(cuttlefs_queue *queue, struct cuttlefs_completion *completions, size_t max, uint32_t timeout_ms);

#ifdef __cplusplus
}
#endif
#endif
