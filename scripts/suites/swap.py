"""Jobs for the suite `swap`. Each prints what it has found; `wrong` is printed if a byte is not what was written."""

import mmap
import os
import random
import sys
import threading


def same(value, wanted, what):
    if value != wanted:
        print(f"wrong: {what}", flush=True)
        sys.exit(1)


def dictionary():
    count = 15000
    source = random.Random(7)
    values = {number: "%x" % source.getrandbits(1200) for number in range(count)}
    order = list(range(count))
    source.shuffle(order)
    total = 0
    for number in order:
        total += int(values[number], 16) % 1000003
    again = random.Random(7)
    for number in range(count):
        same(values[number], "%x" % again.getrandbits(1200), number)
    print(total)


def quicksort():
    source = random.Random(9)
    words = [source.getrandbits(60) for _ in range(20000)]
    total = sum(words)
    ranges = [(0, len(words) - 1)]
    while ranges:
        low, high = ranges.pop()
        if low >= high:
            continue
        pivot, left, right = words[(low + high) // 2], low, high
        while left <= right:
            while words[left] < pivot:
                left += 1
            while words[right] > pivot:
                right -= 1
            if left <= right:
                words[left], words[right] = words[right], words[left]
                left, right = left + 1, right - 1
        ranges += [(low, right), (left, high)]
    same(all(one <= other for one, other in zip(words, words[1:])), True, "the order")
    same(sum(words), total, "the sum")
    print(words[0], words[-1], total)


def forks():
    size = 8 << 20
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    blocks = [bytearray(bytes([number]) * 65536) for number in range(128)]
    for at in range(0, size, 4096):
        memory[at : at + 4] = at.to_bytes(4, "little")

    def look(salt):
        for at in range(0, size, 4096):
            same(memory[at : at + 4], (at + salt).to_bytes(4, "little"), f"page {at}")

    for round_ in range(2):
        child = os.fork()
        if child == 0:
            look(round_)
            for at in range(0, size, 4096):
                memory[at : at + 4] = (at + 100).to_bytes(4, "little")
            look(100)
            os._exit(0)
        for at in range(0, size, 4096):
            memory[at : at + 4] = (at + round_ + 1).to_bytes(4, "little")
        same(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), 0, "a child")
        look(round_ + 1)

    def work(first):
        for _ in range(3):
            for number in range(first, 128, 4):
                block = blocks[number]
                same(block[::4096], bytes([number]) * 16, f"block {number}")
                block[::4096] = bytes([number]) * 16

    threads = [threading.Thread(target=work, args=(first,)) for first in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    memory.close()
    print("done")


def crowd():
    blocks = [bytes([number]) * 65536 for number in range(128)]

    def fork(depth):
        children = []
        for _ in range(5):
            child = os.fork()
            if child == 0:
                if depth > 0:
                    fork(depth - 1)
                for number in range(0, 128, 8):
                    same(blocks[number].count(number), 65536, f"block {number}")
                os._exit(0)
            children.append(child)
        for child in children:
            same(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), 0, "a child")

    for _ in range(3):
        fork(1)
    print("done")


def endless(begun):
    blocks = [bytes([number]) * 65536 for number in range(256)]
    source = random.Random(3)
    count = 0
    while True:
        number = source.randrange(256)
        same(blocks[number].count(number), 65536, f"block {number}")
        count += 1
        if count == 300:
            open(begun, "w").close()


if __name__ == "__main__":
    jobs = {"dictionary": dictionary, "quicksort": quicksort, "forks": forks, "crowd": crowd, "endless": endless}
    jobs[sys.argv[1]](*sys.argv[2:])
