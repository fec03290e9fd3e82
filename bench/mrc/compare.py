#!/usr/bin/env python3
"""`larder sim mrc` beside libCacheSim, on one machine in one run.

    pip install libcachesim numpy
    cargo build --release -p larder-sim --example mrc_rate
    bench/mrc/compare.py [--requests 20000000] [--objects 5000000] [--cache 250000]

Makes a Zipf(1.0) trace in oracleGeneral form (24 bytes a request), then measures, one thread each:
requests per second of wall-clock and of processor time, reader included, peak memory, and the miss ratio; and
eight sizes at once on all cores. The two read the same file. Our example prints the rate without the reader too;
libCacheSim's reader cannot be told apart from outside, so "reader alone" is its rate for a FIFO cache of one object.
"""

import argparse
import os
import resource
import subprocess
import sys
import tempfile
import time

PEER = """
import resource, sys, time
import libcachesim as lcs
name, size, path, ignore = sys.argv[1], int(sys.argv[2]), sys.argv[3], True
reader = lcs.TraceReader(path, lcs.TraceType.ORACLE_GENERAL_TRACE, lcs.ReaderInitParam(ignore_obj_size=ignore))
cache = getattr(lcs, name)(size)
wall, cpu = time.perf_counter(), time.process_time()
miss, _ = cache.process_trace(reader)
wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
print(wall, cpu, miss, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
"""


def make_trace(path, objects, requests):
    import numpy as np

    rng = np.random.default_rng(7)
    cumulative = np.cumsum(1.0 / np.arange(1, objects + 1))
    cumulative /= cumulative[-1]
    names = rng.permutation(objects).astype(np.uint64) + 1
    with open(path, "wb") as out:
        for start in range(0, requests, 1_000_000):
            count = min(1_000_000, requests - start)
            ids = names[np.searchsorted(cumulative, rng.random(count))]
            rows = np.zeros(count, dtype=[("t", "<u4"), ("id", "<u8"), ("size", "<u4"), ("next", "<i8")])
            rows["t"] = (start + np.arange(count)) // 10_000
            rows["id"] = ids
            rows["size"] = 100 + ids % 1000
            rows["next"] = -1
            rows.tofile(out)


def peer(name, size, path, requests):
    output = subprocess.run([sys.executable, "-c", PEER, name, str(size), path], capture_output=True, text=True)
    if output.returncode != 0:
        sys.exit(f"libCacheSim failed: {output.stderr.strip()}")
    wall, cpu, miss, memory = (float(x) for x in output.stdout.split())
    print(
        f"libCacheSim {name} {size}: miss ratio {miss:.4f}, {requests / wall / 1e6:.2f} M/s "
        f"({requests / cpu / 1e6:.2f} per processor second), peak {memory / 1024:.0f} MiB (file pages included)",
        flush=True,
    )


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=20_000_000)
    parser.add_argument("--objects", type=int, default=5_000_000)
    parser.add_argument("--cache", type=int, default=250_000, help="cache size in objects")
    parser.add_argument("--trace", help="an oracleGeneral file to use (made when absent)")
    options = parser.parse_args()
    root = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..")
    target = os.environ.get("CARGO_TARGET_DIR", os.path.join(root, "target"))
    example = os.path.join(target, "release", "examples", "mrc_rate")
    if not os.path.exists(example):
        sys.exit(f"{example} is missing: cargo build --release -p larder-sim --example mrc_rate")
    with tempfile.TemporaryDirectory() as folder:
        # The name tells the format: an oracleGeneral file has no signature.
        path = options.trace or os.path.join(folder, "zipf.oracleGeneral.bin")
        if not os.path.exists(path):
            started = time.perf_counter()
            make_trace(path, options.objects, options.requests)
            print(f"made {path} in {time.perf_counter() - started:.0f} s", flush=True)
        requests = os.path.getsize(path) // 24
        # Ours first: the peak of finished children is a maximum over all of them.
        cores = str(os.cpu_count())
        subprocess.run([example, path, str(options.cache), cores, "lru", "s3fifo-2025", "sieve"], check=True)
        peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss
        print(f"larder: peak {peak / 1024:.0f} MiB over all of these", flush=True)
        peer("FIFO", 1, path, requests)
        for theirs in ("LRU", "S3FIFO", "Sieve"):
            peer(theirs, options.cache, path, requests)


if __name__ == "__main__":
    main()
