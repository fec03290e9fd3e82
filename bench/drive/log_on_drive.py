#!/usr/bin/env python3
"""What a drive makes of a log that lies on it beside pages that are overwritten at random: which free segment the log fills next, and
whether the drive is told of freed ones. Writes block traces, has `larder sim ssd` run them, and prints the table of
docs/results/drive-share.md. usage: log_on_drive.py [LARDER]

The drive has 256 MiB in super-blocks of 512 KiB, the log a tenth of it in segments of 512 KiB that are written in batches of 32 KiB. A
segment is freed when so many were filled after it as the log holds. Figures are of what is written after six rounds over the drive."""
import json, os, random, subprocess, sys, tempfile
from collections import deque
from concurrent.futures import ThreadPoolExecutor

PAGES, SEGMENT, BATCH, ROUNDS = 1 << 16, 128, 8, (6, 14)
SEGMENTS = PAGES // 10 // SEGMENT
REST = PAGES - SEGMENTS * SEGMENT


def trace(out, rounds, share, held, bursts, hot, last_first, discard):
    """`share` of the bytes are the log's, which holds `held` of its segments; in bursts, a fifth of the time, four fifths."""
    rng, say = random.Random(1), lambda op, page, pages: out.write(f"/dev/a {op} {page * 4096} {pages * 4096}\n")
    out.write("fio version 2 iolog\n/dev/a add\n/dev/a open\n")
    for page in range(0, REST, 256):
        say("write", page, min(256, REST - page))
    free, live = deque(range(SEGMENTS)), deque()
    segment, at, total, others = free.popleft(), 0, 0, 0.0
    while total < rounds * PAGES:
        most = SEGMENTS * (0.8 if bursts and total / PAGES % 2 < 0.4 else held)
        say("write", REST + segment * SEGMENT + at, BATCH)
        at, total = at + BATCH, total + BATCH
        if at == SEGMENT:
            at = 0
            live.append(segment)
            while len(live) > max(1, int(most)):
                freed = live.popleft()
                free.appendleft(freed) if last_first else free.append(freed)
                if discard:
                    say("trim", REST + freed * SEGMENT, SEGMENT)
            segment = free.popleft()
        others += BATCH * (1 - share) / share
        for _ in range(int(others)):
            part = range(REST)
            if hot:
                part = range(REST // 10) if rng.random() < 0.9 else range(REST // 10, REST)
            say("write", rng.choice(part), 1)
            total += 1
        others %= 1
    out.write("/dev/a close\n")


def amplification(larder, load, way):
    files = []
    try:
        for rounds in ROUNDS:
            with tempfile.NamedTemporaryFile("w", suffix=".fio", delete=False) as out:
                files.append(out.name)
                trace(out, rounds, **load, **way)
        for spare in ("0.07", "0.15", "0.28"):
            args = ["--capacity", "256m", "--page", "4k", "--block", "512k", "--over-provisioning", spare, "--json"]
            runs = [subprocess.run([larder, "sim", "ssd", "--trace", f, *args], check=True, capture_output=True) for f in files]
            first, last = (json.loads(run.stdout)["traffic"] for run in runs)
            grown = lambda key: last[key] - first[key]
            yield 1 + grown("copied_pages") / grown("host_pages")
    finally:
        for name in files:
            os.unlink(name)


def main():
    larder = sys.argv[1] if len(sys.argv) > 1 else "larder"
    way = lambda last_first, discard: {"last_first": last_first, "discard": discard}
    ways = [("in turn", way(False, False)), ("in turn, discarded", way(False, True)),
            ("last freed first", way(True, False)), ("last freed first, discarded", way(True, True))]
    load = lambda share, held, bursts, hot: dict(share=share, held=held, bursts=bursts, hot=hot)
    loads = [("a tenth", load(0.5, 0.1, False, False)), ("a tenth, 70 % of the bytes are the log's", load(0.7, 0.1, False, False)),
             ("half", load(0.5, 0.5, False, False)), ("a tenth, bursts", load(0.5, 0.1, True, False)),
             ("a tenth, others hot and cold", load(0.5, 0.1, False, True)),
             ("a tenth, bursts, others hot and cold", load(0.5, 0.1, True, True)),
             ("a tenth, bursts, 70 %, others hot and cold", load(0.7, 0.1, True, True))]
    cases = [(of, name, l, w) for of, l in loads for name, w in ways]
    print("| held | free segments | 7 % | 15 % | 28 % |\n| --- | --- | ---: | ---: | ---: |")
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for (of, name, *_), figures in zip(cases, pool.map(lambda c: list(amplification(larder, *c[2:])), cases)):
            print(f"| {of} | {name} | {' | '.join(f'{f:.2f}' for f in figures)} |", flush=True)


main()
