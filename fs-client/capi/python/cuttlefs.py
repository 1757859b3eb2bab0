"""Files of a cuttlefs server for Python programs, without a mount: a thin layer over libcuttlefs.so (docs/native.md says what a program gets).

    import os, sys
    import cuttlefs
    session = cuttlefs.Session(sys.argv[1], key=os.environ.get("CUTTLEFS_KEY"))
    with session.open("log", os.O_RDWR | os.O_CREAT) as log, log.grant(0, 1 << 20):
        log.append(b"a line of Python\\n")
        log.sync()

The library is the one where CUTTLEFS_LIBRARY says, else the one beside this module (as in a wheel), else the one that the loader finds. Errors are OSError, with the library's words. Calls let other threads run. A child of fork(2) cannot use it behind its parent's first session: choose multiprocessing's method `spawn`.
"""

import ctypes
import os
from ctypes import POINTER, byref, c_char_p, c_int, c_int64, c_size_t, c_uint32, c_uint64, c_void_p

READ, WRITE = 1, 2
_KEY_TEXT = 177


def _library():
    beside = os.path.join(os.path.dirname(os.path.abspath(__file__)), "libcuttlefs.so")
    return os.environ.get("CUTTLEFS_LIBRARY") or (beside if os.path.exists(beside) else "libcuttlefs.so")


_lib = ctypes.CDLL(_library())


class _Options(ctypes.Structure):
    _fields_ = [
        ("key", c_char_p),
        ("label", c_char_p),
        ("subtree", c_char_p),
        ("server_user", c_int64),
        ("threads", c_uint32),
        ("deadline_ms", c_uint32),
    ]


class Stat(ctypes.Structure):
    _fields_ = [
        *((name, c_uint64) for name in ("ino", "size", "allocated_bytes")),
        *((name, c_int64) for name in ("mtime_seconds", "ctime_seconds")),
        *((name, c_uint32) for name in ("mtime_nanoseconds", "ctime_nanoseconds", "mode", "nlink", "uid", "gid")),
    ]


class Completion(ctypes.Structure):
    """The end of a request of a queue. `result` is a count of bytes or a negative errno."""

    _fields_ = [("token", c_uint64), ("result", c_int64), ("offset", c_uint64)]


def _function(name, result, *arguments):
    function = getattr(_lib, f"cuttlefs_{name}")
    function.restype, function.argtypes = result, arguments
    return function


_error = _function("error", c_char_p)
_connect = _function("connect", c_int, c_char_p, POINTER(_Options), POINTER(c_void_p))
_stat = _function("stat", c_int, c_void_p, c_char_p, POINTER(Stat))
_mkdir = _function("mkdir", c_int, c_void_p, c_char_p, c_uint32)
_names = {name: _function(name, c_int, c_void_p, c_char_p) for name in ("unlink", "rmdir")}
_rename = _function("rename", c_int, c_void_p, c_char_p, c_char_p)
_truncate = _function("truncate", c_int, c_void_p, c_char_p, c_uint64)
_take = ctypes.CFUNCTYPE(c_int, c_void_p, c_char_p, c_uint64)
_readdir = _function("readdir", c_int, c_void_p, c_char_p, _take, c_void_p)
_open = _function("open", c_int, c_void_p, c_char_p, c_int, c_uint32, POINTER(c_void_p))
_pread = _function("pread", c_int64, c_void_p, c_char_p, c_size_t, c_uint64)
_pwrite = _function("pwrite", c_int64, c_void_p, c_char_p, c_size_t, c_uint64)
_append = _function("append", c_int64, c_void_p, c_char_p, c_size_t)
_fsync = _function("fsync", c_int, c_void_p)
_ftruncate = _function("ftruncate", c_int, c_void_p, c_uint64)
_fstat = _function("fstat", c_int, c_void_p, POINTER(Stat))
_runs = _function("runs", c_int64, c_void_p)
_defragment_step = _function("defragment_step", c_int, c_void_p, POINTER(c_uint64), POINTER(c_uint64))
_bind = _function("bind", c_int, c_void_p, c_uint64, c_uint64, c_int, c_uint64, c_char_p)
_unbind = _function("unbind", c_int, c_void_p, c_char_p)
_redeem = _function("redeem", c_int, c_void_p, c_char_p, POINTER(c_void_p))
_grant_write = _function("grant_write", c_int, c_void_p, c_uint64, c_uint64, POINTER(c_void_p))
_grant_stands = _function("grant_stands", c_int, c_void_p)
_grant_renew = _function("grant_renew", c_int, c_void_p)
_compare_swap = _function("compare_swap", c_int, c_void_p, c_uint64, c_uint64, c_uint64, POINTER(c_uint64))
_fetch_add = _function("fetch_add", c_int, c_void_p, c_uint64, c_uint64, POINTER(c_uint64))
_buffer_new = _function("buffer_new", c_int, c_void_p, c_size_t, POINTER(c_void_p))
_buffer_data = _function("buffer_data", c_void_p, c_void_p)
_queue_new = _function("queue_new", c_int, c_void_p, c_size_t, POINTER(c_void_p))
_queue_fd = _function("queue_fd", c_int, c_void_p)
_range = (c_void_p, c_size_t, c_size_t)
_post_read = _function("post_read", c_int, c_void_p, c_uint64, c_void_p, c_uint64, *_range)
_post_write = _function("post_write", c_int, c_void_p, c_uint64, c_void_p, c_uint64, *_range)
_post_append = _function("post_append", c_int, c_void_p, c_uint64, c_void_p, *_range)
_post_swap = _function("post_compare_swap", c_int, c_void_p, c_uint64, c_void_p, c_uint64, c_uint64, c_uint64)
_post_add = _function("post_fetch_add", c_int, c_void_p, c_uint64, c_void_p, c_uint64, c_uint64)
_post_sync = _function("post_sync", c_int, c_void_p, c_uint64, c_void_p)
_wait = _function("wait", c_int, c_void_p, POINTER(Completion), c_size_t, c_uint32)


def _done(result):
    if result < 0:
        raise OSError(-result, _error().decode())
    return result


class _Handle:
    def __init__(self, make, *arguments):
        self.handle = c_void_p()
        _done(make(*arguments, byref(self.handle)))

    def close(self):
        if self.handle:
            _function(f"{type(self).__name__.lower()}_free", None, c_void_p)(self.handle)
            self.handle = c_void_p()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()

    def __del__(self):
        if getattr(self, "handle", None):
            self.close()


class Session(_Handle):
    def __init__(self, url, key=None, label=None, subtree=None, server_user=0, threads=0, deadline_ms=0):
        texts = (text and os.fsencode(text) for text in (key, label, subtree))
        options = _Options(*texts, server_user, threads, deadline_ms)
        super().__init__(_connect, url.encode(), byref(options))

    def open(self, path, flags=os.O_RDONLY, mode=0o644):
        return File(_open, self.handle, os.fsencode(path), flags, mode)

    def redeem(self, key):
        """Opens the range of a region key."""
        return File(_redeem, self.handle, key.encode())

    def stat(self, path):
        stat = Stat()
        _done(_stat(self.handle, os.fsencode(path), byref(stat)))
        return stat

    def mkdir(self, path, mode=0o755):
        _done(_mkdir(self.handle, os.fsencode(path), mode))

    def unlink(self, path):
        _done(_names["unlink"](self.handle, os.fsencode(path)))

    def rmdir(self, path):
        _done(_names["rmdir"](self.handle, os.fsencode(path)))

    def rename(self, path, to):
        _done(_rename(self.handle, os.fsencode(path), os.fsencode(to)))

    def truncate(self, path, length):
        _done(_truncate(self.handle, os.fsencode(path), length))

    def listdir(self, path):
        names = []
        take = _take(lambda _, name, ino: names.append(os.fsdecode(name)) or 0)
        _done(_readdir(self.handle, os.fsencode(path), take, None))
        return names


class File(_Handle):
    def read(self, offset, length):
        room = ctypes.create_string_buffer(length)
        got = _done(_pread(self.handle, room, length, offset))
        return room.raw[:got]

    def write(self, offset, data):
        """Writes all bytes of anything that has some: bytes, an array, a view of any shape."""
        data = bytes(memoryview(data))
        _done(_pwrite(self.handle, data, len(data), offset))

    def append(self, data):
        """Appends all bytes of anything that has some. Returns the offset of the first byte."""
        data = bytes(memoryview(data))
        return _done(_append(self.handle, data, len(data)))

    def sync(self):
        _done(_fsync(self.handle))

    def truncate(self, length):
        _done(_ftruncate(self.handle, length))

    def stat(self):
        stat = Stat()
        _done(_fstat(self.handle, byref(stat)))
        return stat

    def runs(self):
        """In how many runs of the server's pool the pages lie."""
        return _done(_runs(self.handle))

    def defragment(self, progress=None):
        """Has the server move the pages to fewer runs of its pool; returns how many were moved. `progress` is told that number between two steps. What it raises
        ends the moves, as Ctrl-C does; what was moved stays moved."""
        page, moved = c_uint64(), c_uint64()
        while _done(_defragment_step(self.handle, byref(page), byref(moved))):
            if progress:
                progress(moved.value)
        return moved.value

    def bind(self, offset, length, rights=READ, lifetime_ms=0):
        """A region key for the range, as text."""
        key = ctypes.create_string_buffer(_KEY_TEXT)
        _done(_bind(self.handle, offset, length, rights, lifetime_ms, key))
        return key.value.decode()

    def unbind(self, key):
        _done(_unbind(self.handle, key.encode()))

    def grant(self, offset, length):
        """A write grant of the range, until it is closed."""
        return Grant(_grant_write, self.handle, offset, length)

    def compare_swap(self, offset, expect, swap):
        """Returns the word that was there."""
        old = c_uint64()
        _done(_compare_swap(self.handle, offset, expect, swap, byref(old)))
        return old.value

    def fetch_add(self, offset, add):
        """Returns the word that was there."""
        old = c_uint64()
        _done(_fetch_add(self.handle, offset, add, byref(old)))
        return old.value


class Grant(_Handle):
    def stands(self):
        return _done(_grant_stands(self.handle)) == 1

    def renew(self):
        _done(_grant_renew(self.handle))


class Buffer(_Handle):
    """Registered memory; `view` is its bytes, and must not be used after `close`."""

    def __init__(self, session, length):
        super().__init__(_buffer_new, session.handle, length)
        self.view = memoryview((ctypes.c_char * length).from_address(_buffer_data(self.handle))).cast("B")


class Queue(_Handle):
    """Requests that are posted now and polled later. One thread at a time."""

    def __init__(self, session, depth):
        super().__init__(_queue_new, session.handle, depth)
        self._ends = (Completion * depth)()

    def fileno(self):
        return _done(_queue_fd(self.handle))

    def read(self, token, file, offset, buffer, at, length):
        _done(_post_read(self.handle, token, file.handle, offset, buffer.handle, at, length))

    def write(self, token, file, offset, buffer, at, length):
        _done(_post_write(self.handle, token, file.handle, offset, buffer.handle, at, length))

    def append(self, token, file, buffer, at, length):
        _done(_post_append(self.handle, token, file.handle, buffer.handle, at, length))

    def compare_swap(self, token, file, offset, expect, swap):
        _done(_post_swap(self.handle, token, file.handle, offset, expect, swap))

    def fetch_add(self, token, file, offset, add):
        _done(_post_add(self.handle, token, file.handle, offset, add))

    def sync(self, token, file):
        _done(_post_sync(self.handle, token, file.handle))

    def wait(self, timeout_ms=0):
        """The ends of requests: (token, result, offset) each; waits for the first, so long at most."""
        count = _done(_wait(self.handle, self._ends, len(self._ends), timeout_ms))
        return [(end.token, end.result, end.offset) for end in self._ends[:count]]
