#!/usr/bin/env python3
"""Block admission at equal flash writes: the table of docs/block-admission.md.

    bench/block/equal_writes.py --larder BIN [--traces DIR] [--only NAME,…] [--but NAME,…] [--json FILE]

Each policy is run over a grid of its settings by `larder sim block` (LRU, full placement, lines of 4 KiB, write-through with
allocation). A trace's first third warms up; hits and bytes are those behind it. A budget is a share of what `all` writes. A policy's
figure is the most hits that the upper hull of its points (and of the origin: no cache) has at 1.02 × the budget; so what is compared
is settings between which one may mix, and nobody gains by a setting that happens to lie near a budget. The grid of settings is
the same in each cell. Real traces are read from DIR (`../shared/traces` beside the checkout unless told otherwise) and left out
where they are not there. Traces of keys (ARC's) are read as reads of a line each. Cells in which nothing is read again are left out.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile

# Name, trace (with a slash first: below the directory of traces). Settings and defaults of expected_reads were chosen on those of the first list.
CHOSEN_ON = [
    ("CloudPhysics VM", "/cloudphysics/cloudPhysicsIO.vscsi.zst"),
    ("MSR cut 105", "/msr/msr.cut.per_10k.rw_20_80.105.trace.zst"),
    ("Tencent cut 211", "/tencent/tencent.cut.per_50k.rw_65_35.211.trace.zst"),
    ("HP workstation", "/disksim/ajw.1week.srt.zst"),
    ("ARC's OLTP", "/arc/OLTP.lis.zst"),
    ("OLTP and backup", "gen:oltp-backup?scale=0.001"),
    ("data warehouse", "gen:tpch?scale=0.005"),
]
HELD_OUT = [
    ("MSR traceB", "/msr/traceB.trace.zst"),
    ("Tencent cut 222", "/tencent/tencent.cut.per_50k.most_size_thpt.222.trace.zst"),
    ("Tencent cut 490", "/tencent/tencent.cut.per_50k.rw_60_40.490.trace.zst"),
    ("YCSB on RocksDB", "/blkparse/ycsb_rocksdb_ext4.blkparse.txt.zst"),
    ("web search (MQSim)", "/mqsim/wsrch-small.trace.zst"),
    ("ARC's P3", "/arc/P3.lis.zst"),
    ("file server", "gen:specsfs?scale=0.001"),
    ("order entry", "gen:tpcc?scale=0.001"),
]
SIZES = [0.1, 0.3]
BUDGETS = [1.0, 0.3, 0.1]

LENGTHS = ["64k", "256k", "1m", "4m", "16m"]
TOUCHES = [
    f"(segment={segment},threshold={threshold})"
    for segment in ["4k", "16k", "64k", "256k"]
    for threshold in [2, 3, 4, 6]
]
POLICIES = {
    "all": ["all"],
    "seqr": [f"seqr{free}" for free in ["", "(free=on)"]],
    "sseqr": [f"sseqr(length={n}{free})" for n in LENGTHS for free in ["", ",free=on"]],
    "tc": [f"touch_count{t}" for t in TOUCHES],
    "seqr+tc": [f"seqr+tc{t}" for t in TOUCHES],
    "sseqr+tc": [f"sseqr+tc{t}" for t in TOUCHES],
    "two_lbs": [
        f"two_lbs(ageing={a},writes={w})" for a in [4, 16, 64] for w in ["compare", "admit", "reject"]
    ],
    "sseqr+two_lbs": [
        f"sseqr+two_lbs(ageing={a},writes={w})" for a in [4, 16, 64] for w in ["compare", "admit", "reject"]
    ],
    "expected_reads": ["expected_reads(least=0,price=0)"]
    + [f"expected_reads(least={n})" for n in [0, 0.02, 0.05, 0.075, 0.1, 0.15, 0.2, 0.35, 0.5, 0.75, 1, 1.5, 2, 3, 5]],
}


def hull_at(points, budget):
    """The most hits that mixtures of points with (bytes, hits) have within a budget of bytes."""
    points = sorted(set(points) | {(0, 0.0)})
    best = 0.0
    for i, (x, y) in enumerate(points):
        if x <= budget:
            best = max(best, y)
        for other_x, other_y in points[i + 1 :]:
            if x <= budget < other_x:
                best = max(best, y + (other_y - y) * (budget - x) / (other_x - x))
    return best


def spans(larder, trace):
    """Requests of a trace and bytes of the lines that it touches."""
    touched, requests = set(), 0
    rows = subprocess.Popen([larder, "trace", "convert", trace, "-", "--to", "csv"], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    next(rows.stdout)
    for row in rows.stdout:
        _, op, _, offset, size, _, _, app, *_ = row.split(",")
        requests += 1
        if op != "trim" and int(size):
            touched.update((app, n) for n in range(int(offset) >> 12, (int(offset) + int(size) - 1 >> 12) + 1))
    return requests, len(touched) * 4096


def as_block_io(larder, trace, out):
    """A trace of keys as reads of a line each."""
    rows = subprocess.Popen([larder, "trace", "convert", trace, "-", "--to", "csv"], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    next(rows.stdout)
    with open(out, "w") as file:
        for n, row in enumerate(rows.stdout):
            file.write(f"0,R,{int(row.split(',')[2]) * 4096},4096,{n}\n")


def main():
    beside = os.path.join(os.path.dirname(os.path.abspath(__file__)), "../../../shared/traces")
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--larder", default="larder", help="the binary to be asked")
    parser.add_argument("--traces", default=os.path.normpath(beside), help="where real traces are")
    parser.add_argument("--only", help="names of traces, separated by commas")
    parser.add_argument("--but", default="", help="names of traces to leave out, separated by commas")
    parser.add_argument("--json", help="write all points to this file as well")
    args = parser.parse_args()

    names = [name for name in POLICIES]
    print(f"| trace | cache | writes / `all` | {' | '.join(f'`{name}`' for name in names)} |")
    print(f"| --- | ---: | ---: | {' | '.join('---:' for _ in names)} |")
    behind, found = [], []
    for name, source in CHOSEN_ON + HELD_OUT:
        if (args.only and name not in args.only.split(",")) or name in args.but.split(","):
            continue
        trace = args.traces + source if source.startswith("/") else source
        if source.startswith("/") and not os.path.exists(trace):
            print(f"'{trace}' is not there: left out", file=sys.stderr)
            continue
        with tempfile.TemporaryDirectory() as directory:
            extra = []
            if ".lis" in source:
                as_block_io(args.larder, trace, os.path.join(directory, "trace.csv"))
                trace, extra = os.path.join(directory, "trace.csv"), ["--format", "alibaba"]
            requests, touched = spans(args.larder, trace) if not extra else spans_of_csv(trace)
            for size in SIZES:
                command = [args.larder, "sim", "block", trace, *extra, "--json", "--warmup", str(requests // 3)]
                command += ["--sizes", str(int(touched * size))]
                asked = [(name, setting) for name, settings in POLICIES.items() for setting in settings]
                for _, setting in asked:
                    command += ["--admission", setting]
                rows = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL).stdout)
                if len(rows) != len(asked):
                    sys.exit(f"{len(asked)} settings were asked for, {len(rows)} simulated")
                points = {}
                for (policy, setting), row in zip(asked, rows):
                    points.setdefault(policy, []).append((row["flash_bytes"], 100 * row["line_hit_ratio"]))
                    found.append({"trace": name, "size": size, "policy": policy, "setting": setting, "row": row})
                everything = points["all"][0][0]
                for budget in BUDGETS:
                    hits = {policy: hull_at(points[policy], 1.02 * budget * everything) for policy in names}
                    most = max(hits.values())
                    rivals = max(hit for policy, hit in hits.items() if policy != "expected_reads")
                    if most < 0.05:
                        continue  # Nothing is read again: no cell.
                    behind.append((name in [n for n, _ in HELD_OUT], hits["expected_reads"] - rivals))
                    cells = [f"**{hits[n]:.1f}**" if hits[n] > most - 0.05 else f"{hits[n]:.1f}" for n in names]
                    print(f"| {name} | {100 * size:.0f} % | {budget:.2f} | {' | '.join(cells)} |", flush=True)
    for held, title in [(False, "settings chosen on"), (True, "held out")]:
        cells = [ahead for is_held, ahead in behind if is_held == held]
        if cells:
            near = sum(ahead >= -0.5 for ahead in cells)
            print(
                f"{title}: expected_reads first or within half a point in {near} of {len(cells)} cells; "
                f"ahead of the best other by {sum(cells) / len(cells):.2f} points in the mean, at worst {min(cells):.2f}"
            )
    if args.json:
        with open(args.json, "w") as file:
            json.dump(found, file)


def spans_of_csv(path):
    """The same as `spans`, of what `as_block_io` wrote."""
    touched, requests = set(), 0
    with open(path) as file:
        for row in file:
            touched.add(row.split(",")[2])
            requests += 1
    return requests, len(touched) * 4096


if __name__ == "__main__":
    main()
