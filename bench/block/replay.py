#!/usr/bin/env python3
"""Block traces through larder's block cache and, beside it, through the bare store.

    bench/block/replay.py --larder BIN TRACE… [--warm 0.5] [--connections 4] [--depth 4] [--delay-ms 1] [--write MODE]… [--json FILE]

The store is a file behind nbdkit's delay filter, which counts what reaches it. `larder replay` sends a trace's requests in a
closed loop; its first part warms the cache and is not counted. Printed for each trace, with and without the cache: mean and
p99 service time of reads, writes and all, the share of reads that the cache served and the share of all requests that
still reached the store. With --write the cache is measured once more in each such mode (back:journaled and others; the journal lies beside the
store, behind the same delay, the marker beside the cache): then a trace also says what was still dirty behind its last request. Needs nbdkit: apt-get install nbdkit.
"""

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

MIB = 1 << 20


def output(command):
    done = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    if done.returncode != 0:
        raise SystemExit(f"failed: {' '.join(map(str, command))}\n{done.stderr[-2000:]}")
    return done.stdout


class Server:
    """A program that makes a socket, until the end of the block."""

    def __init__(self, command, socket, log):
        self.command, self.socket, self.log = command, Path(socket), log

    def __enter__(self):
        self.socket.unlink(missing_ok=True)
        self.child = subprocess.Popen(self.command, stdin=subprocess.DEVNULL, stdout=self.log, stderr=self.log)
        end = time.monotonic() + 60
        while not self.socket.exists():
            if self.child.poll() is not None or time.monotonic() > end:
                raise SystemExit(f"does not listen: {' '.join(map(str, self.command))}; see {self.log.name}")
            time.sleep(0.02)
        return self

    def __exit__(self, *_):
        self.child.terminate()
        try:
            self.child.wait(30)
        except subprocess.TimeoutExpired:
            self.child.kill()
            self.child.wait()


class Bench:
    def __init__(self, options, folder):
        self.options, self.folder = options, folder
        self.log = open(folder / "log", "w")
        self.disk = folder / "disk.img"
        with open(self.disk, "wb") as f:
            f.truncate(options.size_mib * MIB)

    def path(self, name):
        return str(self.folder / name)

    def journal(self):
        journal = self.path("journal.img")
        with open(journal, "wb") as f:
            f.truncate(256 * MIB)
        delay = self.options.delay_ms
        return Server(["nbdkit", "-f", "-U", self.path("journal"), "-t", "64", "--filter=delay", "file", journal,
                       f"rdelay={delay}ms", f"wdelay={delay}ms"], self.path("journal"), self.log)

    def store(self):
        delay = self.options.delay_ms
        # The log filter is the outermost: one line for each request that reaches the store.
        command = ["nbdkit", "-f", "-U", self.path("store"), "-t", "64", "--filter=log", "--filter=delay", "file", str(self.disk),
                   f"rdelay={delay}ms", f"wdelay={delay}ms", f"logfile={self.path('requests')}"]
        return Server(command, self.path("store"), self.log)

    def reached(self):
        """Reads and writes that have reached the store."""
        reads = writes = 0
        with open(self.path("requests"), errors="replace") as lines:
            for line in lines:
                reads += " Read id=" in line
                writes += " Write id=" in line
        return reads, writes

    def replay(self, trace, requests, warm, socket, export):
        common = [self.options.larder, "replay", trace, "--to", f"nbd+unix:///{export}?socket={socket}", "--json",
                  "-c", str(self.options.connections), "--depth", str(self.options.depth)]
        if self.options.speed:
            common += ["--timed", "--speed", str(self.options.speed)]
        first = int(requests * warm)
        output([*common, "--limit", str(first)])
        time.sleep(1)
        before = self.reached()
        report = json.loads(output([*common, "--skip", str(first)]))
        time.sleep(0.5)
        after = self.reached()
        return report, (after[0] - before[0], after[1] - before[1])

    def run(self, trace):
        stats = json.loads(output([self.options.larder, "trace", "stats", trace, "--json"]))
        requests = int(stats["requests"])
        found = {"trace": Path(trace).name, "requests": requests}
        for name in ("no cache", "larder", *self.options.write):
            with self.store(), self.journal():
                if name == "no cache":
                    report, reached = self.replay(trace, requests, self.options.warm, self.path("store"), "")
                else:
                    with self.larder(*([] if name == "larder" else [name])):
                        report, reached = self.replay(trace, requests, self.options.warm, self.path("larder"), "disk")
                        dirty = self.dirty()
            by_op = {op["op"]: op for op in report["operations"]}
            found[name] = {op: {"count": by_op[op]["count"], "mean_us": by_op[op]["service_us"]["mean"],
                                "p50_us": by_op[op]["service_us"]["p50"], "p99_us": by_op[op]["service_us"]["p99"]}
                           for op in by_op}
            found[name]["reached"] = {"reads": reached[0], "writes": reached[1]}
            found[name]["seconds"] = report["seconds"]
            if name in self.options.write:
                found[name]["dirty_mib"] = dirty / MIB
        return found

    def dirty(self):
        """Bytes that the store does not have yet."""
        status = json.loads(output([self.options.larder, "block", "status", "--state-dir", self.path("state"), "--json"]))
        back = status["volumes"][0].get("write_back") or {}
        return back.get("dirty_bytes", 0)

    def larder(self, mode=None):
        cache = Path(self.path("cache"))
        for old in ("cache", "marker"):
            Path(self.path(old)).unlink(missing_ok=True)
        shutil.rmtree(self.path("state"), ignore_errors=True)
        output([self.options.larder, "block", "format", str(cache), "--size", f"{self.options.cache_mib}m",
                *(["--write-log", f"{self.options.log_mib}m"] if mode else []), "--yes"])
        back = []
        if mode:
            back = ["--write", mode, "--marker", f"disk={self.path('marker')}"]
            if mode.startswith("back:journaled"):
                back += ["--journal", f"disk=nbd+unix:///?socket={self.path('journal')}"]
        command = [self.options.larder, "block", "serve", "--cache", str(cache), "--volume",
                   f"disk=nbd+unix:///?socket={self.path('store')}", "--listen", f"unix:{self.path('larder')}",
                   "--state-dir", self.path("state"),
                   *([] if any(flag.startswith("--admission") for flag in self.options.serve) else ["--admission", "all"]),
                   *back, *self.options.serve]
        return Server(command, self.path("larder"), self.log)


def show(found, modes):
    bare, through = found["no cache"], found["larder"]
    print(f"\n{found['trace']}: {found['requests']} requests, counted after the warm-up {through['all']['count']}")
    table(bare, through, "larder")
    for mode in modes:
        writes = bare["write"]["mean_us"] * bare["write"]["count"] if "write" in bare else 0
        share = writes / (bare["all"]["mean_us"] * bare["all"]["count"])
        print(f"  {mode}: writes take {100 * share:.0f} % of the service time without a cache")
        table(bare, found[mode], "larder")
        print(f"  dirty behind the last request: {found[mode]['dirty_mib']:.1f} MiB")


def table(bare, ours, name):
    print(f"  {'':8} {'mean µs':>22} {'p99 µs':>22}")
    print(f"  {'':8} {'no cache':>10} {name:>10}  {'no cache':>10} {name:>10}   mean")
    for op in ("read", "write", "all"):
        if op in bare and op in ours:
            a, b = bare[op], ours[op]
            change = 100 * (b["mean_us"] / a["mean_us"] - 1)
            print(f"  {op:8} {a['mean_us']:10.0f} {b['mean_us']:10.0f}  {a['p99_us']:10.0f} {b['p99_us']:10.0f}  {change:+5.0f} %")
    reads = ours["reached"]["reads"] / max(1, bare["reached"]["reads"])
    both = sum(ours["reached"].values()) / max(1, sum(bare["reached"].values()))
    print(f"  of the requests that reach the store without a cache: {100 * reads:.1f} % of reads, {100 * both:.1f} % of all")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("traces", nargs="+", metavar="TRACE", help="block traces, as `larder replay` takes them")
    parser.add_argument("--larder", default="target/release/larder", help="the program (default: %(default)s)")
    parser.add_argument("--warm", type=float, default=0.5, help="share of a trace that warms the cache (default: %(default)s)")
    parser.add_argument("--connections", type=int, default=4, help="of the client (default: %(default)s)")
    parser.add_argument("--depth", type=int, default=4, help="requests under way on each (default: %(default)s)")
    parser.add_argument("--write", action="append", default=[], metavar="MODE", help="another mode of writing, measured beside write-through")
    parser.add_argument("--speed", type=float, help="at the recorded times divided by this, instead of a closed loop")
    parser.add_argument("--delay-ms", type=int, default=1, help="of the store (default: %(default)s)")
    parser.add_argument("--size-mib", type=int, default=16384, help="of the volume, sparse (default: %(default)s)")
    parser.add_argument("--cache-mib", type=int, default=2048, help="of the cache device (default: %(default)s)")
    parser.add_argument("--log-mib", type=int, default=512, help="of the write log, of a cache device that has one (default: %(default)s)")
    parser.add_argument("--serve", action="append", default=[], help="another flag for `larder block serve`")
    parser.add_argument("--folder", help="where the files lie (default: a new one under TMPDIR)")
    parser.add_argument("--json", help="write the results there too")
    options = parser.parse_args()
    if not shutil.which("nbdkit"):
        raise SystemExit("'nbdkit' is missing: apt-get install nbdkit")
    if options.folder and not Path(options.folder).is_dir():
        raise SystemExit(f"--folder {options.folder}: there is no such directory: make it, or leave the flag out")
    if options.json and not Path(options.json).absolute().parent.is_dir():
        raise SystemExit(f"--json {options.json}: its directory is missing")
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        bench = Bench(options, Path(folder))
        results = []
        for trace in options.traces:
            results.append(bench.run(trace))
            show(results[-1], options.write)
            sys.stdout.flush()
    if options.json:
        Path(options.json).write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
