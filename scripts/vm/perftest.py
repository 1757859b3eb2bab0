"""In the guest, for perftest.sh: runs perftest's programs and rnic_perf in turn, and compares.

usage: perftest.py RNIC_PERF ROUNDS
"""
import math
import statistics
import subprocess
import sys
import time

PROGRAM, ROUNDS = sys.argv[1], int(sys.argv[2])
ADDRESS, PORT = "10.9.0.1", 7950
# Iterations that soft-RoCE does in some seconds without KVM. READs take the most: where the guest's kernel has its workers changes within a second, and
# makes a READ of 64 B twice as fast or slow, so in a shorter time chance decides between the two programs.
ITERATIONS = {
    "bw": {64: 20000, 4096: 10000, 1 << 20: 100},
    "lat": {64: 20000, 4096: 10000, 1 << 20: 100},
    "read lat": {64: 100000, 4096: 40000, 1 << 20: 200},
}
SIZES = [64, 4096, 1 << 20]
# The aims: at least this part of perftest's bandwidth, at most this multiple of its median latency.
LEAST_BANDWIDTH, MOST_LATENCY = 0.8, 1.25


def iterations(verb, what, size):
    return str(ITERATIONS.get(f"{verb} {what}", ITERATIONS[what])[size])


def perftest(verb, what, size):
    """Bandwidth in MiB a second, or median and 99th and 99.9th percentile in microseconds."""
    tool = [f"ib_{verb}_{what}", "-d", "rxe0", "-x", "1", "-F", "-s", str(size), "-n", iterations(verb, what, size)]
    server = subprocess.Popen(tool, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        for _ in range(100):
            client = subprocess.run(tool + [ADDRESS], capture_output=True, text=True, timeout=300)
            if client.returncode == 0:
                break
            # The other side does not listen yet.
            time.sleep(0.05)
        for line in client.stdout.splitlines():
            words = line.split()
            if words and words[0] == str(size):
                numbers = [float(word) for word in words[1:]]
                found = [numbers[2]] if what == "bw" else [numbers[3], numbers[6], numbers[7]]
                # perftest measures the processor's frequency, and sometimes finds none in a virtual machine.
                return found if all(0 < number < math.inf for number in found) else perftest(verb, what, size)
        raise SystemExit(f"{' '.join(tool)}:\n{client.stdout}{client.stderr}")
    finally:
        try:
            server.communicate(timeout=60)
        except subprocess.TimeoutExpired:
            server.kill()


def ours(verb, what, size):
    # A server of its own, as perftest's: the scheduler takes one that has slept for long for a light load, and has the kernel's workers run beside it.
    endpoint = f"rdma://{ADDRESS}:{PORT}"
    server = subprocess.Popen([PROGRAM, "serve", endpoint], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert server.stdout.readline() == "ready\n"
        command = [PROGRAM, f"{verb}_{what}", str(size), iterations(verb, what, size), endpoint]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300)
        if done.returncode != 0:
            raise SystemExit(f"{' '.join(command)}:\n{done.stdout}{done.stderr}")
        return [float(word) for word in done.stdout.split()]
    finally:
        server.stdin.close()
        server.wait(60)


def spread(values):
    return f"{min(values):.1f} to {max(values):.1f}"


def main():
    tests = [(verb, what, size) for what in ("bw", "lat") for verb in ("read", "write", "send") for size in SIZES]
    found = {test: ([], []) for test in tests}
    for round_ in range(ROUNDS):
        for test in tests:
            # The first one may have a warm or a cold cache, so they alternate.
            runs = [(0, perftest), (1, ours)]
            for who, run in runs if round_ % 2 == 0 else reversed(runs):
                found[test][who].append(run(*test))
            last = [runs[-1][0] for runs in found[test]]
            print(f"round {round_ + 1}: {' '.join(map(str, test))}: {last[0]} {last[1]}", file=sys.stderr, flush=True)
    missed = 0
    for what, unit in (("bw", "MiB/s"), ("lat", "us")):
        print(f"\n{'bandwidth' if what == 'bw' else 'latency'}, {unit}: median of {ROUNDS} rounds (from to)")
        print(f"{'':>14} {'perftest':>28} {'cuttlefs':>28} {'ratio':>7}")
        for test in tests:
            if test[1] != what:
                continue
            theirs, own = ([run[0] for run in runs] for runs in found[test])
            middle = [statistics.median(values) for values in (theirs, own)]
            ratio = middle[1] / middle[0]
            is_missed = ratio < LEAST_BANDWIDTH if what == "bw" else ratio > MOST_LATENCY
            missed += is_missed
            size = f"{test[2]} B" if test[2] < 1024 else f"{test[2] >> 10} KiB"
            columns = [f"{middle[who]:.1f} ({spread(values)})" for who, values in ((0, theirs), (1, own))]
            print(f"{test[0].upper() + ' ' + size:>14} {columns[0]:>28} {columns[1]:>28} {ratio:7.2f}{'  missed' if is_missed else ''}")
            if what == "lat":
                for index, name in ((1, "99 %"), (2, "99.9 %")):
                    tails = [statistics.median([run[index] for run in runs]) for runs in found[test]]
                    print(f"{name:>14} {tails[0]:28.1f} {tails[1]:28.1f}")
    print(f"\n{len(tests) - missed} passed, {missed} failed")
    sys.exit(missed > 0)


main()
