#!/usr/bin/env python3
"""A peer that does not keep to the protocol, for attack.sh.

usage: hostile.py KIND ADDRESS NAME SECONDS

Connects to a server's unix:// socket as a user that is neither root nor the server's, or without a key to its tcp:// HOST:PORT,
does one kind of harm for so many seconds, and ends. NAME is a file in the root directory that anybody may read and write; kinds of
expensive requests want what `hostile.py prepare FILE` makes beside it, through a mount. It speaks the wire in its own words: packets
(fs-common/src/rdma/soft/tcp/packet.rs) and requests in postcard (fs-common/src/rpc/request.rs). `hostile.py list` prints the kinds,
and which of them come without a key or send what is no request.
"""
import collections
import os
import random
import select
import socket
import ssl
import struct
import sys
import time

STRANGER = 61234
RPC_VERSION, PACKET_VERSION = 14, 5
FRAME_LEN, HEADER_LEN = 64, 48
HELLO, WELCOME, SEND, WRITE, READ_MEMORY, READ_FILE = 1, 2, 4, 5, 6, 7
WRITE_ACK, WRITE_FILE, FETCH_ADD_FILE, APPEND = 13, 17, 19, 20
MIB = 1 << 20


# ---- bytes -------------------------------------------------------------------------------------------------------------

CRC_TABLE = []
for value in range(256):
    for _ in range(8):
        value = (value >> 1) ^ 0x82F63B78 if value & 1 else value >> 1
    CRC_TABLE.append(value)


def crc32c(data):
    crc = 0xFFFFFFFF
    for byte in data:
        crc = CRC_TABLE[(crc ^ byte) & 255] ^ (crc >> 8)
    return crc ^ 0xFFFFFFFF


def frame(kind, sequence, payload=b"", key=0, offset=0, first=0, wanted=0, flags=0, payload_len=None, payload_crc=None):
    payload_len = len(payload) if payload_len is None else payload_len
    payload_crc = crc32c(payload) if payload_crc is None else payload_crc
    head = struct.pack(
        "<4sBBHIIQQQQQI", b"CFNF", PACKET_VERSION, kind, flags, payload_len, payload_crc, sequence, key, offset, first, 0, wanted
    )
    return head + struct.pack("<I", crc32c(head)) + payload


HELLO_FRAME = frame(HELLO, 0, struct.pack("<II8x", 68 * 1024, MIB))


def varint(value):
    out = bytearray()
    while value > 127:
        out.append(value & 127 | 128)
        value >>= 7
    return bytes(out) + bytes([value])


def counted(data):
    return varint(len(data)) + data


def take_varint(data, at):
    value = shift = 0
    while True:
        byte = data[at]
        at += 1
        value |= (byte & 127) << shift
        shift += 7
        if byte < 128:
            return value, at


# ---- requests: their number among `Request`, then their fields ---------------------------------------------------------


def attach(secret, label=b"hostile"):
    return b"\x00" + secret + counted(label) + counted(b"")


def lookup(parent, name):
    return b"\x04" + varint(parent) + counted(name)


def get_attr(ino):
    return b"\x05" + varint(ino)


def read_dir(ino):
    return b"\x0e" + varint(ino) + varint(0) + varint(60000) + b"\x01"


def open_file(ino):
    return b"\x0f" + varint(ino) + b"\x01\x01\x00\x00"


def pushed_fetch(filekey):
    words = [0x5555555555555555] * 4
    pages = varint(4) + b"".join(varint(word) for word in words)
    return b"\x12" + varint(filekey) + varint(0) + varint(MIB) + pages + b"\x01" + varint(1234) + varint(0) + varint(MIB)


def inline_fetch(filekey):
    return b"\x12" + varint(filekey) + varint(0) + varint(16384) + varint(1) + varint(15) + b"\x00"


def pulled_write(filekey):
    return b"\x13" + varint(filekey) + varint(0) + b"\x00" + b"\x01" + varint(1234) + varint(0) + varint(MIB)


def reclaim(ino, count):
    return b"\x03" + varint(count) + (varint(ino) + b"\x01\x01\x00") * count


def share_counters():
    return b"\x1f" + varint(77) + varint(0) + varint(4 * MIB)


def set_lock(filekey, number, wait):
    at = varint(2 * number)
    return b"\x20" + varint(filekey) + b"\x00" + varint(1) + at + at + b"\x01" + varint(1) + varint(wait) + b"\x01"


def list_xattr(ino):
    return b"\x19" + varint(ino)


def seek_hole(filekey):
    return b"\x16" + varint(filekey) + varint(0) + b"\x01"


def copy_range(source, target, length):
    return b"\x17" + varint(source) + varint(0) + varint(target) + varint(0) + varint(length)


def status_text():
    return b"\x1d"


def await_locks(hold_ms):
    return b"\x23" + varint(hold_ms)


def grant_write(filekey, length):
    return b"\x2c" + varint(filekey) + varint(0) + varint(length)


# ---- connections -------------------------------------------------------------------------------------------------------


class Refused(Exception):
    pass


class Peer:
    def __init__(self, path, hello=True, timeout=20):
        self.socket = socket.socket(socket.AF_UNIX)
        self.socket.settimeout(timeout)
        self.socket.connect(path)
        self.sequence = 0
        self.seqs = {}
        self.received = b""
        if hello:
            self.socket.sendall(HELLO_FRAME)
            if self.frame()[0] != WELCOME:
                raise Refused

    def close(self):
        self.socket.close()

    def exactly(self, count):
        while len(self.received) < count:
            more = self.socket.recv(MIB)
            if not more:
                raise EOFError
            self.received += more
        taken, self.received = self.received[:count], self.received[count:]
        return taken

    def frame(self):
        fields = struct.unpack("<4sBBHIIQQQQQII", self.exactly(FRAME_LEN))
        return fields[2], fields[6], fields[3], self.exactly(fields[4])

    def put(self, kind, **fields):
        self.sequence += 1
        self.socket.sendall(frame(kind, self.sequence, **fields))

    def post(self, body, slot=0):
        seq = self.seqs.get(slot, 0) + 1
        self.seqs[slot] = seq
        head = struct.pack("<4sHHIIQQIIQ", b"CFRQ", RPC_VERSION, slot, len(body), 0, seq, 1, STRANGER, STRANGER, 0)
        self.put(SEND, payload=head + body)

    def reply(self):
        while True:
            kind, _, _, payload = self.frame()
            if kind == SEND:
                return payload

    def answer(self):
        payload = self.reply()
        return struct.unpack_from("<I", payload, 12)[0], payload[HEADER_LEN:]

    def call(self, body, slot=0):
        self.post(body, slot)
        return self.answer()

    def attach(self, secret, label=b"hostile"):
        status, reply = self.call(attach(secret, label))
        if status:
            raise Refused
        self.seqs[0] = 0
        # The server's epoch, and its pool's UUID.
        _, at = take_varint(reply, 1)
        at += 16
        # Its session, lease, slots and root.
        for _ in range(4):
            self.root, at = take_varint(reply, at)
        return self


def new_client():
    return os.urandom(16)

# Status of an answer: this peer has used its whole share.
BUSY = 16


class Attack:
    def __init__(self, path, name, seconds):
        self.path, self.name = path, name
        self.end = time.monotonic() + seconds
        self.client = new_client()
        self.slot = 0
        self.peers = []

    def goes_on(self):
        return time.monotonic() < self.end

    def rest(self):
        time.sleep(max(0, min(0.05, self.end - time.monotonic())))

    def attached(self):
        return Peer(self.path).attach(self.client)

    # An attack in a language that the server does not speak would be none: it has to answer once.
    def introduce(self):
        while True:
            try:
                peer = Peer(self.path).attach(new_client())
                status, _ = peer.call(get_attr(peer.root))
                assert status == 0, f"attributes of the root: {status}"
                return peer.close()
            except (EOFError, OSError, Refused):
                # What an earlier attack holds goes with its leases.
                assert self.goes_on(), "the server does not understand this program: are its versions those of fs-common?"
                self.rest()

    # A connection to a HOST:PORT.
    def stranger(self):
        host, port = self.path.rsplit(":", 1)
        stranger = socket.socket()
        stranger.settimeout(5)
        # In bytes: for text Python imports a module, which another user may not be able to read.
        stranger.connect((host.encode(), int(port)))
        return stranger

    def file(self, peer, suffix=b""):
        status, reply = peer.call(lookup(peer.root, self.name + suffix))
        assert status == 0, f"lookup: {status}"
        ino, _ = take_varint(reply, 1)
        # An earlier attack holds filekeys until the leases of its sessions end.
        for _ in range(300):
            status, reply = peer.call(open_file(ino))
            if status != BUSY:
                break
            time.sleep(0.1)
        assert status == 0, f"open: {status}"
        return ino, take_varint(reply, 1)[0]

    # Sends one-sided changes of a granted file without end, on some connections, and takes what comes. `fields` are those of each.
    def pump(self, suffix, granted, kind, at_once, **fields):
        owner = self.attached()
        _, filekey = self.file(owner, suffix)
        status, _ = owner.call(grant_write(filekey, granted))
        assert status == 0, f"grant: {status}"
        if "payload" in fields:
            fields["payload_crc"] = crc32c(fields["payload"])
        sockets, left = select.poll(), {}
        for peer in [self.attached() for _ in range(4)]:
            peer.socket.setblocking(False)
            sockets.register(peer.socket, select.POLLIN | select.POLLOUT)
            left[peer.socket.fileno()] = [peer, memoryview(b"")]
        while self.goes_on():
            for fd, events in sockets.poll(100):
                peer, unsent = left[fd]
                if events & ~select.POLLOUT and not peer.socket.recv(MIB):
                    raise EOFError
                if events & select.POLLOUT:
                    if not unsent:
                        numbers = range(peer.sequence + 1, peer.sequence + 1 + at_once)
                        unsent = memoryview(b"".join(frame(kind, number, key=filekey, **fields) for number in numbers))
                        peer.sequence += at_once
                    left[fd][1] = unsent[peer.socket.send(unsent):]

    def next_slot(self):
        self.slot = self.slot % 62 + 1
        return self.slot

    # Keeps all 64 slots of one session busy with a request.
    def keep_asking(self, peer, body):
        for slot in range(64):
            peer.post(body, slot)
        while self.goes_on():
            reply = peer.reply()
            assert struct.unpack_from("<I", reply, 12)[0] == 0, "an expensive request is refused"
            peer.post(body, struct.unpack_from("<H", reply, 6)[0])

    # Keeps at most `most` peers of `make`, and makes another one whenever there is room.
    def keep(self, most, make):
        while self.goes_on():
            if len(self.peers) < most:
                try:
                    self.peers.append(make())
                    continue
                except (Refused, EOFError, OSError):
                    pass
            self.rest()
            self.drop_ended()

    def drop_ended(self):
        by_socket = {peer.socket: peer for peer in self.peers}
        readable = select.poll()
        for sock in by_socket:
            readable.register(sock, select.POLLRDHUP)
        ended = {fd for fd, _ in readable.poll(0)}
        for peer in [peer for peer in self.peers if peer.socket.fileno() in ended]:
            peer.close()
            self.peers.remove(peer)


def garbage(attack):
    """messages that do not parse, as many as there are receives, then the end"""
    while attack.goes_on():
        peer = Peer(attack.path)
        peer.put(SEND, payload=b"x")
        peer.put(SEND, payload=b"x")
        peer.close()


def half_hello(attack):
    """half a hello, and nothing more"""

    def make():
        peer = Peer(attack.path, hello=False)
        peer.socket.sendall(HELLO_FRAME[:30])
        return peer

    attack.keep(300, make)


def no_session(attack):
    """connections that never attach"""
    attack.keep(600, lambda: Peer(attack.path))


def sessions(attack):
    """as many sessions as can be had, with labels of control characters"""
    attack.keep(2000, lambda: Peer(attack.path).attach(new_client(), b"\x01\x1b[2J" * 40))


def cut_transfers(attack):
    """connections that end in the midst of a fetch"""
    first = attack.attached()
    _, filekey = attack.file(first)
    while attack.goes_on():
        peer = attack.attached()
        peer.post(pushed_fetch(filekey), slot=attack.next_slot())
        try:
            for _ in range(random.randrange(40)):
                kind, sequence, flags, _ = peer.frame()
                if kind == WRITE and flags & 2:
                    peer.socket.sendall(frame(WRITE_ACK, sequence))
        except (EOFError, OSError):
            pass
        peer.close()


def mute_transfers(attack):
    """writes and fetches whose transfers are never answered"""
    _, filekey = attack.file(attack.attached())

    def make():
        peer = Peer(attack.path).attach(new_client())
        _, filekey = attack.file(peer)
        for slot in (1, 2):
            peer.post(pulled_write(filekey) if slot == 1 else pushed_fetch(filekey), slot=slot)
        return peer

    attack.keep(60, make)


def unread_reads(attack):
    """one-sided reads of 1 MiB that are never taken"""
    owner = attack.attached()
    _, filekey = attack.file(owner)

    def make():
        peer = attack.attached()
        for _ in range(8):
            peer.put(READ_FILE, key=filekey, wanted=MIB)
        return peer

    attack.keep(200, make)


def unread_replies(attack):
    """requests whose replies are never taken"""
    _, filekey = attack.file(attack.attached())

    def make():
        peer = Peer(attack.path).attach(new_client())
        _, filekey = attack.file(peer)
        for slot in range(1, 60):
            peer.post(inline_fetch(filekey), slot=slot)
        return peer

    attack.keep(50, make)


def parked(attack):
    """messages without a receive: those are with requests that wait"""
    payload = bytes(65000)
    crc = crc32c(payload)

    def make():
        peer = attack.attached()
        for _ in range(2):
            peer.post(await_locks(10_000), slot=attack.next_slot())
        for _ in range(120):
            peer.put(SEND, payload=payload, payload_crc=crc)
        return peer

    attack.keep(100, make)


def slow_frames(attack):
    """frames of 1 MiB, a byte at a time"""
    head = frame(WRITE, 1, key=1, payload_len=MIB, payload_crc=0)

    def make():
        peer = Peer(attack.path)
        peer.socket.sendall(head + bytes(1000))
        return peer

    def trickle():
        for peer in attack.peers:
            try:
                peer.socket.send(b"\0")
            except OSError:
                pass
        return make()

    attack.keep(600, trickle)


def locks(attack):
    """locks of every other byte, and waits for them"""
    while attack.goes_on():
        holder, waiter = (Peer(attack.path).attach(new_client()) for _ in range(2))
        peers = [(holder, attack.file(holder)[1]), (waiter, attack.file(waiter)[1])]
        for number in range(20_000):
            for peer, filekey in peers:
                status, _ = peer.call(set_lock(filekey, number, number + 1))
                if not attack.goes_on():
                    return
            if status:
                break


def filekeys(attack):
    """opens without end"""
    peer = attack.attached()
    ino, _ = attack.file(peer)
    while attack.goes_on():
        peer.call(open_file(ino))


def reclaims(attack):
    """long lists of files to reclaim, and whole directories"""
    peer = attack.attached()
    ino, _ = attack.file(peer)
    while attack.goes_on():
        peer.call(reclaim(ino, 256))
        peer.call(read_dir(peer.root))


def counters(attack):
    """counters to be pulled from nowhere"""
    _, filekey = attack.file(attack.attached())

    def make():
        peer = attack.attached()
        peer.call(share_counters(), slot=attack.next_slot())
        return peer

    attack.keep(60, make)


def keyless(attack):
    """connections to where a key is needed: silence, half a hello of TLS, a hello in plain, noise"""
    first_words = [b"", b"\x16\x03\x01\x02\x00\x01", HELLO_FRAME, os.urandom(400)]
    peers = []
    while attack.goes_on():
        peer = attack.stranger()
        try:
            peer.sendall(first_words[len(peers) % len(first_words)])
        except OSError:
            pass
        peers.append(peer)
        if len(peers) == 300:
            for peer in peers:
                peer.close()
            peers = []


def crowd(attack):
    """connections from as many addresses as there are, as fast as they can be made, that say nothing"""
    host, port = attack.path.rsplit(":", 1)
    peers, number = collections.deque(), 0
    while attack.goes_on():
        peer = socket.socket()
        peer.setblocking(False)
        number += 1
        peer.bind((b"127.%d.%d.%d" % (3 + number // 62500 % 100, number // 250 % 250, number % 250 + 1), 0))
        try:
            peer.connect((host.encode(), int(port)))
        except OSError:
            pass
        peers.append(peer)
        if len(peers) > 500:
            peers.popleft().close()


def handshakes(attack):
    """handshakes of TLS that prove nothing, one after the other"""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    while attack.goes_on():
        try:
            context.wrap_socket(attack.stranger()).close()
        except OSError:
            pass


def flood(attack):
    """requests as fast as they are answered, on many connections"""
    peers = [attack.attached() for _ in range(40)]
    while attack.goes_on():
        for slot, peer in enumerate(peers, 1):
            peer.post(get_attr(peer.root), slot=slot)
        for peer in peers:
            peer.answer()


def name_lists(attack):
    """64 lists of 1,000 extended attributes at once"""
    peer = attack.attached()
    attack.keep_asking(peer, list_xattr(attack.file(peer, NAMES)[0]))


def copies(attack):
    """64 copies of 4 MiB on the server at once"""
    peer = attack.attached()
    source, target = (attack.file(peer, suffix)[1] for suffix in (SOURCE, TARGET))
    attack.keep_asking(peer, copy_range(source, target, COPY_LEN))


def holes(attack):
    """64 searches at once for a hole in a file of many extents"""
    peer = attack.attached()
    attack.keep_asking(peer, seek_hole(attack.file(peer, PIECES)[1]))


def statuses(attack):
    """64 status texts at once"""
    attack.keep_asking(attack.attached(), status_text())


def words(attack):
    """two peers that add to one word of a file one-sidedly, without end"""
    attack.pump(WORDS, 4096, FETCH_ADD_FILE, 2000, first=1)


def records(attack):
    """two peers that append eight bytes one-sidedly, without end"""
    attack.pump(RECORDS, 4 * MIB, APPEND, 2000, payload=b"12345678")


def long_writes(attack):
    """two peers that write 1 MiB one-sidedly, without end"""
    attack.pump(TARGET, MIB, WRITE_FILE, 1, payload=bytes(MIB), flags=2)


# The files that expensive requests and one-sided changes work on, beside NAME.
NAMES, SOURCE, TARGET, PIECES, WORDS, RECORDS = b".names", b".source", b".target", b".pieces", b".words", b".records"
COPY_LEN = 4 * MIB
NAMES_COUNT, PIECES_COUNT = 1000, 20_000


def prepare(path):
    path = os.fsencode(path)
    for suffix, length in [(NAMES, 0), (SOURCE, COPY_LEN), (TARGET, COPY_LEN), (PIECES, 0), (WORDS, 4096), (RECORDS, 0)]:
        with open(path + suffix, "wb") as file:
            file.write(os.urandom(length))
        os.chmod(path + suffix, 0o666)
    for number in range(NAMES_COUNT):
        os.setxattr(path + NAMES, b"user.%04d" % number + b"n" * 50, b"v")
    # Every other page first, so that neighbouring pages of the file are not neighbours in the pool.
    with open(path + PIECES, "r+b", buffering=0) as file:
        for page in [*range(0, PIECES_COUNT, 2), *range(1, PIECES_COUNT, 2)]:
            os.pwrite(file.fileno(), bytes([page % 251]) * 4096, page * 4096)
        os.fsync(file.fileno())


KINDS = [
    garbage, half_hello, no_session, sessions, cut_transfers, mute_transfers, unread_reads, unread_replies, parked,
    slow_frames, locks, filekeys, reclaims, counters, flood, name_lists, copies, holes, statuses, words, records, long_writes, keyless, crowd, handshakes,
]
KEYLESS = [keyless, crowd, handshakes]
# These send messages that are no requests. Those of all others have to be, or they would be no attack: attack.sh looks at the server's count.
MALFORMED = [garbage, parked]
# These come as two users at once; over tcp these are one peer, for they have one key.
BY_TWO = [words, records, long_writes]


def main():
    if sys.argv[1:] == ["list"]:
        for kind in KINDS:
            trait = "keyless" if kind in KEYLESS else "malformed" if kind in MALFORMED else ""
            print(f"{kind.__name__}\t{trait}\t{kind.__doc__}")
        return
    if sys.argv[1] == "prepare":
        return prepare(sys.argv[2])
    kind, path, name, seconds = sys.argv[1:]
    run = next(run for run in KINDS if run.__name__ == kind)
    other = os.fork() if run in BY_TWO else None
    user = STRANGER + (other == 0)
    if os.geteuid() == 0:
        os.setgroups([])
        os.setresgid(user, user, user)
        os.setresuid(user, user, user)
    attack = Attack(path, name.encode(), float(seconds))
    if run not in KEYLESS:
        attack.introduce()
    # The server may throw this peer out: it connects again until its time is over.
    while attack.goes_on():
        try:
            run(attack)
        except (EOFError, OSError, Refused):
            attack.client = new_client()
            attack.rest()
    if other:
        _, status = os.waitpid(other, 0)
        sys.exit(os.waitstatus_to_exitcode(status))


main()
