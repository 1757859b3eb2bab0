#!/usr/bin/env python3
"""Names through a mount while its server is killed again and again: each operation succeeds at once and once.

usage: once.py work DIRECTORY STATE STOP SEED [appends]   works until STOP is there, then writes to STATE what must be there
       once.py look DIRECTORY STATE                        compares that with what is there

Any error ends it: an exclusive create, a link or a mkdir done twice would say EEXIST, an unlink, a rename or an rmdir
done twice ENOENT, an append done twice is one line too many.
"""
import json
import os
import random
import sys

# Names that a worker has at a time.
MOST_NAMES = 40


class Worker:
    def __init__(self, directory, seed, appends):
        self.at = directory
        self.random = random.Random(seed)
        self.appends = appends
        self.made = 0
        # Maps a name to [number of the file, its number of lines]; a directory to None.
        self.names = {}
        self.lines = {}
        self.operations = 0

    def path(self, name):
        return os.path.join(self.at, name)

    def fresh(self):
        self.made += 1
        return f"name-{self.made}"

    def files(self):
        return [name for name, number in self.names.items() if number is not None]

    def create(self):
        name = self.fresh()
        os.close(os.open(self.path(name), os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644))
        self.names[name] = self.made
        self.lines[str(self.made)] = 0

    def mkdir(self):
        name = self.fresh()
        os.mkdir(self.path(name))
        self.names[name] = None

    def link(self):
        name, new = self.random.choice(self.files()), self.fresh()
        os.link(self.path(name), self.path(new))
        self.names[new] = self.names[name]

    def rename(self):
        name, new = self.random.choice(list(self.names)), self.fresh()
        os.rename(self.path(name), self.path(new))
        self.names[new] = self.names.pop(name)

    def replace(self):
        name, new = self.random.sample(self.files(), 2)
        if self.names[name] == self.names[new]:
            return  # POSIX: both names of one file stay.
        os.rename(self.path(name), self.path(new))
        self.names[new] = self.names.pop(name)

    def remove(self):
        name = self.random.choice(list(self.names))
        if self.names.pop(name) is None:
            os.rmdir(self.path(name))
        else:
            os.unlink(self.path(name))

    def append(self):
        name = self.random.choice(self.files())
        number = str(self.names[name])
        with open(self.path(name), "ab", buffering=0) as file:
            for _ in range(self.random.randrange(1, 5)):
                self.lines[number] += 1
                file.write(f"{self.lines[number]}\n".encode())

    def step(self):
        kinds = [self.create] * 3
        if self.names:
            kinds += [self.rename] * 3 + [self.remove] * 2
        if len(self.files()) >= 2:
            kinds += [self.link] * 2 + [self.replace] + [self.append] * (3 if self.appends else 0)
        if len(self.names) >= MOST_NAMES:
            kinds = [self.remove]
        elif self.random.randrange(10) == 0:
            kinds = [self.mkdir]
        self.random.choice(kinds)()
        self.operations += 1


def look(directory, state):
    """What is wrong with what is there, in lines."""
    names, lines = state["names"], state["lines"]
    found = sorted(os.listdir(directory))
    wrong = [f"{name} is missing" for name in names if name not in found]
    wrong += [f"{name} should not be there" for name in found if name not in names]
    inodes = {}
    for name in set(found) & set(names):
        status = os.stat(os.path.join(directory, name))
        number = names[name]
        if number is None:
            continue
        if inodes.setdefault(number, status.st_ino) != status.st_ino:
            wrong.append(f"{name} is another file")
        links = sum(1 for other in names.values() if other == number)
        if status.st_nlink != links:
            wrong.append(f"{name} has {status.st_nlink} links and should have {links}")
        body = open(os.path.join(directory, name), "rb").read()
        expected = b"".join(f"{line + 1}\n".encode() for line in range(lines[str(number)]))
        if body != expected:
            wrong.append(f"{name} has {len(body)} bytes and should have {len(expected)}: ...{body[-60:]!r}")
    return wrong


def main():
    kind, directory, state_path = sys.argv[1:4]
    if kind == "work":
        stop, seed = sys.argv[4:6]
        worker = Worker(directory, int(seed), "appends" in sys.argv[6:])
        while not os.path.exists(stop):
            worker.step()
        state = {"names": worker.names, "lines": worker.lines}
        with open(state_path, "w") as file:
            json.dump(state, file)
        print(f"{worker.operations} operations")
    else:
        with open(state_path) as file:
            state = json.load(file)
    wrong = look(directory, state)
    print("\n".join(wrong))
    sys.exit(bool(wrong))


main()
