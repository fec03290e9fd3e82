"""The part of bench/block/run that measures write-back: what a client waits for, beside write-through, a raw file behind the same face,
the store without a cache, and nbdkit's cache filter in its mode of write-back."""

import json
import os
import shlex
import statistics
import subprocess
import sys
from pathlib import Path

MIB = 1 << 20
LOG_MIB = 512
FORMAT = "{larder} block format {cache} --size {size}m --write-log {log}m --yes"
SERVE = "{larder} block serve --cache {cache} --volume disk={uri} --listen unix:{socket} --state-dir {state} --admission all"
# A store that is away for the length of a measurement is not waited for: servers are killed, and begin anew.
BACK = {"back:ordered": "back:ordered", "back:any": "back:any"}
OURS = "back:ordered"
PEERS = ["back:ordered", "back:any", "write-through", "raw file", "bare store", "nbdkit write-back"]
# What does not depend on the store is measured before the first one alone.
ONCE = {"raw file", "back:any"}
UNITS = {"flush": "ms", "seq": "MiB/s"}


class Killed:
    """A server that ends as a killed one does: what is dirty is not waited for."""

    def __init__(self, process):
        self.process = process

    def __enter__(self):
        self.process.__enter__()
        return self

    def __exit__(self, *_):
        self.process.child.kill()
        self.process.child.wait()

    def cpu_seconds(self):
        return self.process.cpu_seconds()

    def memory(self):
        """The most that it had resident, bytes."""
        for line in Path(f"/proc/{self.process.child.pid}/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
        return 0


class WriteBack:
    def __init__(self, bench, process, nbd):
        self.bench, self.process, self.nbd, self.options = bench, process, nbd, bench.options
        self.results = {}

    def path(self, name):
        return str(self.bench.folder / name)

    def store(self, delay):
        command = ["nbdkit", "-f", "-U", self.path("store"), "-t", "128", "--filter=delay", "file", str(self.bench.disk),
                   f"rdelay={delay}ms", f"wdelay={delay}ms"]
        return Killed(self.process(command, self.path("store"), self.bench.log))

    def larder(self, peer, more=()):
        words = {"larder": self.options.larder, "cache": self.path("wb-cache"), "size": 2 * LOG_MIB, "log": LOG_MIB,
                 "uri": f"nbd+unix:///?socket={self.path('store')}", "socket": self.path("wb"), "state": self.path("wb-state")}
        run = {"check": True, "stdin": subprocess.DEVNULL, "stdout": self.bench.log, "stderr": self.bench.log}
        # Its marker says that the killed one holds something.
        Path(self.path("wb-marker")).unlink(missing_ok=True)
        subprocess.run(["rm", "-rf", words["state"]], **run)
        serve = SERVE
        if peer == "raw file":
            words["uri"], words["cache"] = f"file:{self.path('raw')}", self.path("no-cache")
            serve += " --on-cache-failure serve"
        else:
            subprocess.run(shlex.split(FORMAT.format(**words)), **run)
            if peer in BACK:
                serve += f" --write {BACK[peer]} --marker disk={self.path('wb-marker')}"
        command = shlex.split(serve.format(**words)) + list(more)
        return Killed(self.process(command, words["socket"], self.bench.log)), self.nbd(words["socket"], "disk")

    def filtered(self, delay):
        command = ["nbdkit", "-f", "-U", self.path("filter"), "-t", "128", "--filter=cache", "--filter=delay", "file",
                   str(self.bench.disk), f"rdelay={delay}ms", f"wdelay={delay}ms", "cache=writeback"]
        return Killed(self.process(command, self.path("filter"), self.bench.log)), self.nbd(self.path("filter"))

    def fio(self, target, arguments):
        command = ["fio", "--name=x", "--output-format=json", "--thread=1", "--randseed=1", "--group_reporting=1",
                   f"--size={self.bench.size}", *target, *arguments]
        done = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        if done.returncode != 0:
            raise SystemExit(f"fio failed: {shlex.join(command)}\n{done.stderr}{done.stdout}")
        return json.loads(done.stdout[done.stdout.index("{"):])["jobs"][0]

    def served(self, peer, delay, f, more=()):
        """What `f` finds of a new server, given it and fio's target."""
        if peer == "raw file":
            server, target = self.larder(peer)
            with server:
                return f(server, target)
        if peer == "nbdkit write-back":
            server, target = self.filtered(delay)
            with server:
                return f(server, target)
        with self.store(delay) as store:
            if peer == "bare store":
                return f(store, self.nbd(self.path("store")))
            server, target = self.larder(peer, more)
            with server:
                return f(server, target)

    def note(self, what, peer, **values):
        self.results.setdefault(what, {}).setdefault(peer, []).append(values)
        said = ", ".join(f"{name} {value:,.1f}" for name, value in values.items())
        print(f"  {what:24} {peer:18} {said}", file=sys.stderr, flush=True)

    def one(self, what, peer, delay, arguments):
        def measure(server, target):
            before = server.cpu_seconds()
            job = self.fio(target, arguments)
            cpu = server.cpu_seconds() - before
            sides = [job["read"], job["write"]]
            count = max(1, sum(side["total_ios"] for side in sides))
            if what.startswith("flush"):
                value = job["sync"]["lat_ns"]["mean"] / 1e6
            elif what.startswith("seq"):
                value = sum(side["bw_bytes"] for side in sides) / MIB
            else:
                value = sum(side["iops"] for side in sides)
            p99 = max(side["clat_ns"].get("percentile", {}).get("99.000000", 0) for side in sides) / 1e6
            return {"value": value, "p99_ms": p99, "cpu_s_per_m": cpu / count * 1e6, "memory_mib": server.memory() / MIB}

        self.note(what, peer, **self.served(peer, delay, measure))

    def workloads(self, delay):
        seconds = ["--time_based", f"--runtime={round(self.options.back_seconds * 1000)}ms"]
        for depth in (1, 16, 64):
            yield f"rand qd{depth}", ["--rw=randwrite", "--bs=4k", f"--iodepth={depth}", *seconds]
        # Each of so many clients waits for its flush: fio does not, within one.
        for clients in (1, 16, 64):
            yield (f"fsync x{clients}",
                   ["--rw=randwrite", "--bs=4k", "--iodepth=1", f"--numjobs={clients}", "--fsync=1", *seconds])
        if delay == self.options.delays[0]:
            yield "seq 256k qd4", ["--rw=write", "--bs=256k", "--iodepth=4", *seconds]
            yield "mixed 70/30 qd16", ["--rw=randrw", "--rwmixread=70", "--bs=4k", "--iodepth=16", *seconds]
        # One flush behind 64 MiB; a few writes more, so that fio issues it.
        yield "flush of 64 MiB", ["--rw=write", "--bs=64k", "--iodepth=16", "--io_size=65m", "--fsync=1024"]

    def held(self, peer, delay):
        """A writer at depth 16 whose volume holds all that it may."""
        logs = self.path("held")
        # A small bound: it is reached before the ramp ends, whatever the drive does.
        more = ["--dirty-max", "disk=16m"] if peer in BACK else []

        def measure(server, target):
            job = self.fio(target, ["--rw=randwrite", "--bs=4k", "--iodepth=16", "--time_based", "--ramp_time=5",
                                    f"--runtime={round(self.options.held_seconds * 1000)}ms", f"--write_lat_log={logs}", "--log_avg_msec=0"])
            side = job["write"]
            with open(f"{logs}_clat.1.log") as f:
                ends = sorted(int(line.split(",", 1)[0]) for line in f)
            gap = max((b - a for a, b in zip(ends, ends[1:])), default=0)
            for path in Path(self.bench.folder).glob("held*.log"):
                path.unlink()
            return {"value": side["iops"], "p99_ms": side["clat_ns"]["percentile"]["99.000000"] / 1e6,
                    "longest_ms": side["clat_ns"]["max"] / 1e6, "gap_ms": gap, "memory_mib": server.memory() / MIB}

        self.note(f"held at the bound qd16, {delay} ms", peer, **self.served(peer, delay, measure, more))

    def run(self):
        with open(self.path("raw"), "wb") as f:
            for _ in range(self.bench.size // MIB):
                f.write(bytes(MIB))
        for pair in range(self.options.back_pairs):
            for delay in self.options.delays:
                peers = [p for p in PEERS if delay == self.options.delays[0] or p not in ONCE]
                for what, arguments in self.workloads(delay):
                    # Neighbours in time take turns in being first.
                    turned = peers[pair % len(peers):] + peers[:pair % len(peers)]
                    for peer in turned:
                        self.one(f"{what}, {delay} ms", peer, delay, arguments)
        if self.options.held_seconds > 0:
            for peer in ("back:ordered", "nbdkit write-back"):
                self.held(peer, self.options.delays[0])

    def median(self, what, peer, field):
        values = [v[field] for v in self.results[what].get(peer, []) if field in v]
        return statistics.median(values) if values else None

    def ratio(self, what, peer):
        """Of ours to the other's, so that more is better."""
        pairs = zip(self.results[what].get(OURS, []), self.results[what].get(peer, []))
        ratios = [a["value"] / b["value"] for a, b in pairs if a["value"] > 0 and b["value"] > 0]
        if not ratios:
            return None
        return 1 / statistics.median(ratios) if what.startswith("flush") else statistics.median(ratios)

    def report(self):
        """The lines for --json."""
        lines = []
        for what, by_peer in self.results.items():
            for peer, values in by_peer.items():
                line = {"measure": what, "of": peer, "ordered_to_it": self.ratio(what, peer)}
                line |= {field: self.median(what, peer, field) for field in values[0]}
                lines.append(line)
        return lines

    def markdown(self):
        def table(title, whats, cell):
            out = [f"| {title} | " + " | ".join(PEERS) + " |", "| --- |" + " ---: |" * len(PEERS)]
            for what in whats:
                cells = [cell(what, peer) if peer in self.results[what] else "–" for peer in PEERS]
                out.append(f"| {what} | " + " | ".join(cells) + " |")
            return "\n".join(out)

        def figure(what, peer):
            value = self.median(what, peer, "value")
            unit = next((f" {unit}" for name, unit in UNITS.items() if what.startswith(name)), "")
            ratio = self.ratio(what, peer)
            said = f"{value:,.0f}{unit}" if value >= 100 else f"{value:.1f}{unit}"
            return said if peer == OURS or ratio is None else f"{said} ({ratio:.2f})"

        def cost(what, peer):
            cpu, memory = self.median(what, peer, "cpu_s_per_m"), self.median(what, peer, "memory_mib")
            return f"{cpu:.0f} s, {memory:.0f} MiB"

        held = [what for what in self.results if what.startswith("held")]
        plain = [what for what in self.results if what not in held]
        out = [table("writes/s, in brackets how much better back:ordered is", plain, figure),
               table("CPU of the server for a million, memory at most", plain, cost)]
        if held:
            out.append("| held at the bound | writes/s | p99 | longest write | longest gap | memory |\n| --- |" + " ---: |" * 5)
            for what in held:
                for peer in self.results[what]:
                    of = {f: self.median(what, peer, f) for f in ("value", "p99_ms", "longest_ms", "gap_ms", "memory_mib")}
                    out[-1] += (f"\n| {peer}, {what.rsplit(', ', 1)[1]} | {of['value']:,.0f} | {of['p99_ms']:.1f} ms | "
                                f"{of['longest_ms']:.0f} ms | {of['gap_ms']:.0f} ms | {of['memory_mib']:.0f} MiB |")
        lost = []
        for what in plain:
            behind = [(peer, self.ratio(what, peer)) for peer in PEERS if peer != OURS and peer not in BACK]
            behind = [f"{peer} ({ratio:.2f})" for peer, ratio in behind if ratio is not None and ratio < 0.97]
            if behind:
                lost.append(f"- {what}: behind " + ", ".join(behind))
        out.append("Where back:ordered loses:\n\n" + ("\n".join(lost) or "- nowhere"))
        return "\n\n".join(out)
