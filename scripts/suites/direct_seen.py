"""What is written with O_DIRECT is what a read through the page cache gives, also where others read the file meanwhile.

Written by asynchronous IO, behind which the kernel takes what it knows of the file for good.

usage: direct_seen.py FILE ROUNDS
"""
import ctypes
import mmap
import os
import signal
import struct
import sys

LENGTH = 256 * 1024
# x86-64 and aarch64 (asm-generic) numbers of io_setup, io_submit, io_getevents.
SETUP, SUBMIT, GETEVENTS = (206, 209, 208) if os.uname().machine == "x86_64" else (0, 2, 4)
PWRITE = 1
libc = ctypes.CDLL(None, use_errno=True)


def call(number, *arguments):
    result = libc.syscall(ctypes.c_long(number), *arguments)
    if result < 0:
        sys.exit(f"system call {number}: {os.strerror(ctypes.get_errno())}")
    return result


context = ctypes.c_ulong(0)
call(SETUP, ctypes.c_ulong(8), ctypes.byref(context))


def write_asynchronously(file, memory):
    """struct iocb of linux/aio_abi.h."""
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    block = struct.pack("=QIIHhIQQqQII", 0, 0, 0, PWRITE, 0, file, address, len(memory), 0, 0, 0, 0)
    block = ctypes.create_string_buffer(block, 64)
    blocks = (ctypes.c_void_p * 1)(ctypes.addressof(block))
    call(SUBMIT, context, ctypes.c_long(1), blocks)
    event = (ctypes.c_ulonglong * 4)()
    call(GETEVENTS, context, ctypes.c_long(1), ctypes.c_long(1), event, None)
    if event[2] != len(memory):
        sys.exit(f"wrote {ctypes.c_longlong(event[2]).value} bytes of {len(memory)}")


path, rounds = sys.argv[1], int(sys.argv[2])
with open(path, "wb") as file:
    file.write(bytes(LENGTH))
direct = os.open(path, os.O_WRONLY | os.O_DIRECT)


def read_all():
    """As programs do it that know nothing of each other: nobody has the file open all the time."""
    cached = os.open(path, os.O_RDONLY)
    seen = os.pread(cached, LENGTH, 0)
    os.close(cached)
    return seen


# In processes, so that nothing in this process delays them.
readers = []
for _ in range(3):
    pid = os.fork()
    if pid == 0:
        while True:
            read_all()
    readers.append(pid)
stale = 0
# Aligned, as O_DIRECT requires.
page = mmap.mmap(-1, LENGTH)
for number in range(1, rounds + 1):
    pattern = bytes([number % 251 + 1])
    page[:] = pattern * LENGTH
    write_asynchronously(direct, page)
    stale += read_all() != pattern * LENGTH
for pid in readers:
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
if stale:
    sys.exit(f"{stale} of {rounds} reads behind a write gave bytes from before it")
