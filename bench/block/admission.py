#!/usr/bin/env python3
"""What each parameter of block admission does to hits and to the bytes written to flash: the table of docs/block-admission.md.

    bench/block/admission.py --larder BIN [--traces DIR]

Each parameter is varied alone around its default, the others as they are by default, by `larder sim block` (LRU, full
placement, lines of 4 KiB, write-through with allocation). Two of the workloads are real traces, read from DIR
(`../shared/traces` beside the checkout unless told otherwise) and left out where they are not there; two are generators.
Hits are those behind the warm-up, bytes those of the whole trace.
"""

import argparse
import json
import os
import subprocess
import sys

# Name, trace (with a slash first: below the directory of traces), cache, requests that warm up.
WORKLOADS = [
    ("CloudPhysics VM, 128 MiB", "/cloudphysics/cloudPhysicsIO.vscsi.zst", "128m", 30000),
    ("Tencent cut 211, 16 MiB", "/tencent/tencent.cut.per_50k.rw_65_35.211.trace.zst", "16m", 15000),
    ("OLTP and backup, 102 MiB", "gen:oltp-backup?scale=0.001", "102m", 0),
    ("file server, 48 MiB", "gen:specsfs?scale=0.001", "48m", 0),
]

# Policy, parameter, values; the one in the middle, or the first of two, is the default.
PARAMETERS = [
    ("sseqr", "window", ["8", "32", "128"]),
    ("sseqr", "gap", ["0", "16k", "64k"]),
    ("sseqr", "run", ["2", "4", "8"]),
    ("sseqr", "length", ["1m", "4m", "16m"]),
    ("touch_count", "segment", ["16k", "64k", "256k"]),
    ("touch_count", "bits", ["1", "2", "4"]),
    ("touch_count", "threshold", ["1", "2", "3"]),
    ("touch_count", "bitmaps", ["2", "4", "8"]),
    ("touch_count", "rotation", ["cache:1", "cache:2", "cache:4"]),
    ("two_lbs", "bits", ["4", "8"]),
    ("two_lbs", "ageing", ["4", "16", "64"]),
    ("two_lbs", "writes", ["admit", "compare", "reject"]),
]


def short(size):
    """As the tables beside it have bytes: of 2^30 or 2^20."""
    return f"{size / 2**30:.1f} G" if size >= 2**30 else f"{size / 2**20:.0f} M"


def simulate(larder, trace, size, warmup, policies):
    """Rows of `larder sim block`, in the order of `policies`."""
    command = [larder, "sim", "block", trace, "--sizes", size, "--warmup", str(warmup), "--json"]
    for policy in policies:
        command += ["--admission", policy]
    rows = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)
    if len(rows) != len(policies):
        sys.exit(f"{len(policies)} policies were asked for, {len(rows)} simulated")
    return rows


def main():
    beside = os.path.join(os.path.dirname(os.path.abspath(__file__)), "../../../shared/traces")
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--larder", default="larder", help="the binary to be asked")
    parser.add_argument("--traces", default=os.path.normpath(beside), help="where real traces are")
    args = parser.parse_args()

    rows = []
    for policy, name, values in PARAMETERS:
        default = values[0] if len(values) == 2 else values[1]
        rows += [(policy, name, value, value == default) for value in values]
    # What is the default of several parameters is simulated once.
    asked = {row: row[0] if row[3] else f"{row[0]}({row[1]}={row[2]})" for row in rows}
    policies = ["all"] + list(dict.fromkeys(asked.values()))

    columns = []
    for title, trace, size, warmup in WORKLOADS:
        if trace.startswith("/"):
            trace = args.traces + trace
            if not os.path.exists(trace):
                print(f"'{trace}' is not there: left out", file=sys.stderr)
                continue
        cold = simulate(args.larder, trace, size, 0, policies)
        warm = simulate(args.larder, trace, size, warmup, policies) if warmup else cold
        cells = {
            policy: f"{100 * hits['line_hit_ratio']:.1f} %, {short(written['flash_bytes'])}"
            for policy, hits, written in zip(policies, warm, cold)
        }
        columns.append((title, cells))

    print("| | " + " | ".join(title for title, _ in columns) + " |")
    print("| --- |" + " --- |" * len(columns))
    print("| `all` | " + " | ".join(cells["all"] for _, cells in columns) + " |")
    shown = None
    for row in rows:
        policy, name, value, default = row
        if policy != shown:
            print(f"| `{policy}` | " + " | ".join(cells[policy] for _, cells in columns) + " |")
            shown = policy
        if not default:
            found = " | ".join(cells[asked[row]] for _, cells in columns)
            print(f"| `{name}={value}` | {found} |")


if __name__ == "__main__":
    main()
