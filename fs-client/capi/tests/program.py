"""A Python program of the API: tests/c_program.rs runs it with the URL of a server, PYTHONPATH at the binding and CUTTLEFS_LIBRARY at the library."""

import array
import errno
import os
import select
import sys
import time

import cuttlefs

PAGE = 4096
HAS_VERBS = not sys.argv[1].startswith("shm")


def refused(number, work, *arguments):
    try:
        work(*arguments)
    except OSError as error:
        assert error.errno == number and str(error), error
    else:
        sys.exit(f"not refused: {work} {arguments}")


refused(errno.EINVAL, cuttlefs.Session, "nowhere")
with cuttlefs.Session(sys.argv[1], label="a Python program", threads=2) as session:
    session.mkdir("python")
    assert session.listdir("python") == []
    file = session.open("python/file", os.O_RDWR | os.O_CREAT)
    data = bytes(range(256)) * 64
    file.write(0, data)
    assert file.append(b"tail") == len(data) and file.read(len(data) - 2, 100) == data[-2:] + b"tail"
    file.sync()
    assert file.stat().size == session.stat("python/file").size == len(data) + 4
    file.truncate(len(data))
    # Elements of more than a byte, and more dimensions than one: all bytes count. A number is no bytes.
    words = array.array("I", [1, 2, 3])
    file.write(0, words)
    assert file.append(memoryview(data)[:64].cast("B", (8, 8))) == len(data)
    assert file.read(0, 12) == words.tobytes() and file.read(len(data), 100) == data[:64]
    for write in (lambda: file.write(0, 5), lambda: file.append(5)):
        try:
            write()
            sys.exit("a number was written")
        except TypeError:
            pass
    file.write(0, data[:12])
    file.truncate(len(data))
    assert cuttlefs.Stat(mtime_seconds=-100).mtime_seconds == -100

    other = cuttlefs.Session(sys.argv[1])
    key = file.bind(0, PAGE, cuttlefs.READ | cuttlefs.WRITE)
    part = other.redeem(key)
    assert part.read(10, 20) == data[10:30]
    refused(errno.ERANGE, part.read, PAGE, 1)
    with part.grant(0, PAGE) as grant:
        assert grant.stands() == HAS_VERBS
        grant.renew()
        part.write(0, bytes(8))
        assert (part.fetch_add(0, 3), part.compare_swap(0, 3, 2**64 - 1), part.fetch_add(0, 1)) == (0, 3, 2**64 - 1)
    # Without a grant, by a request.
    assert (file.fetch_add(0, 4), file.compare_swap(0, 4, 0)) == (0, 4)
    file.unbind(key)
    refused(errno.ESTALE, part.read, 0, 1)

    # Two files that are written in turns lie in pieces. 300 pages are moved in two steps.
    pieces, between, filler = (session.open(name, os.O_RDWR | os.O_CREAT) for name in ("pieces", "between", "filler"))
    pages = [bytes([number % 256]) * PAGE for number in range(300)]
    for number, page in enumerate(pages):
        pieces.write(number * PAGE, page)
        between.write(number * PAGE, page)
    pieces.sync()
    assert pieces.runs() > 150
    with session.open("pieces") as reading:
        assert reading.runs() == pieces.runs()
        refused(errno.EBADF, reading.defragment)
    refused(errno.EINVAL, reading.defragment)
    refused(errno.EINVAL, reading.runs)
    for length in (64 * PAGE, PAGE):
        try:
            while True:
                filler.append(bytes(length))
        except OSError as error:
            assert error.errno == errno.ENOSPC, error
    refused(errno.ENOSPC, pieces.defragment)
    filler.truncate(0)
    steps = []

    def interrupted(moved):
        steps.append(moved)
        raise KeyboardInterrupt

    # What was cut off is free a moment later.
    for _ in range(6000):
        try:
            pieces.defragment(interrupted)
            sys.exit("the moves were not ended")
        except KeyboardInterrupt:
            break
        except OSError as error:
            assert error.errno == errno.ENOSPC, error
            time.sleep(0.01)
    assert len(steps) == 1 and 0 < steps[0] < 300 and pieces.runs() > 1, steps
    assert steps[0] + pieces.defragment(steps.append) == 300 and len(steps) == 2, steps
    assert pieces.runs() == 1 and pieces.defragment() == 0 and pieces.read(0, 301 * PAGE) == b"".join(pages)
    for name in ("pieces", "between", "filler"):
        session.unlink(name)

    queue, buffer = cuttlefs.Queue(session, 4), cuttlefs.Buffer(session, PAGE)
    buffer.view[:6] = b"posted"
    queue.write(1, file, 100, buffer, 0, 6)
    queue.append(2, file, buffer, 0, 6)
    queue.sync(3, file)
    ends = []
    while len(ends) < 3:
        select.select([queue], [], [], 60)
        ends += queue.wait()
    assert sorted(ends) == [(1, 6, 100), (2, 6, len(data)), (3, 0, 0)], ends
    queue.read(4, file, 98, buffer, 1000, 10)
    assert queue.wait(60000) == [(4, 10, 0)] and buffer.view[1000:1010] == data[98:100] + b"posted" + data[106:108]
    session.rename("python/file", "moved")
    session.rmdir("python")
    session.truncate("moved", 5)
    assert session.stat("moved").size == 5
    session.unlink("moved")
    # A forked child has the library's locks as they were, maybe held: it hung, once in a hundred.
    child = os.fork()
    if child == 0:
        try:
            refused(errno.EOPNOTSUPP, cuttlefs.Session, sys.argv[1])
            refused(errno.EOPNOTSUPP, session.stat, "moved")
            refused(errno.EOPNOTSUPP, file.read, 0, 10)
            refused(errno.EOPNOTSUPP, file.append, b"more")
            for handle in (queue, buffer, file, session):
                handle.close()
            os._exit(0)
        finally:
            os._exit(1)
    assert os.waitpid(child, 0)[1] == 0, "a child of fork(2) had a session"
    for handle in (queue, buffer, part, other, file, pieces, between, filler):
        handle.close()
print("all of it")
