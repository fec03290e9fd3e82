"""The part of bench/block/run that measures write-back: what a client waits for, beside write-through, a raw file behind the same face,
the store without a cache, and nbdkit's cache filter in its mode of write-back."""

import json
import os
import shlex
import statistics
import subprocess
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent / "tests" / "lib"))
from volume import Nbd  # noqa: E402

MIB = 1 << 20
# What a client writes in a second stays below half of the bound, where answers begin to be delayed.
LOG_MIB = 6144
FORMAT = "{larder} block format {cache} --size {size}m --write-log {log}m --yes"
SERVE = "{larder} block serve --cache {cache} --volume disk={uri} --listen unix:{socket} --state-dir {state} --admission all"
# A store that is away for the length of a measurement is not waited for: servers are killed, and begin anew.
BACK = {"back:ordered": "back:ordered", "back:journaled": "back:journaled", "back:any": "back:any",
        "back:ordered,grain=completion": "back:ordered,grain=completion"}
OURS = "back:ordered"
PEERS = ["back:ordered", "back:journaled", "back:any", "write-through", "raw file", "bare store", "nbdkit write-back"]
# What does not depend on the store is measured before the first one alone.
ONCE = {"raw file", "back:any"}
# Of --start-gib, what a start finds dirty.
STARTS = {"in order, 256 KiB": ["--rw=write", "--bs=256k", "--iodepth=16"],
          "at random, 4 KiB": ["--rw=randwrite", "--bs=4k", "--iodepth=64", "--norandommap"]}
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

    def journal(self, delay):
        """Where epochs go first: as far away as the store."""
        with open(self.path("journal.img"), "wb") as f:
            f.truncate(256 * MIB)
        command = ["nbdkit", "-f", "-U", self.path("journal"), "-t", "128", "--filter=delay", "file", self.path("journal.img"),
                   f"rdelay={delay}ms", f"wdelay={delay}ms"]
        return Killed(self.process(command, self.path("journal"), self.bench.log))

    def larder(self, peer, more=()):
        words = {"larder": self.options.larder, "cache": self.path("wb-cache"), "size": LOG_MIB + 1024, "log": LOG_MIB,
                 "uri": f"nbd+unix:///?socket={self.path('store')}", "socket": self.path("wb"), "state": self.path("wb-state")}
        run = {"check": True, "stdin": subprocess.DEVNULL, "stdout": self.bench.log, "stderr": self.bench.log}
        # Cache and marker say that the killed one holds something.
        for name in ("wb-marker", "wb-cache"):
            Path(self.path(name)).unlink(missing_ok=True)
        subprocess.run(["rm", "-rf", words["state"]], **run)
        serve = SERVE
        if peer == "raw file":
            words["uri"], words["cache"] = f"file:{self.path('raw')}", self.path("no-cache")
            serve += " --on-cache-failure serve"
        else:
            subprocess.run(shlex.split(FORMAT.format(**words)), **run)
            if peer in BACK:
                serve += f" --write {BACK[peer]} --marker disk={self.path('wb-marker')}"
                if peer == "back:journaled":
                    serve += f" --journal disk=nbd+unix:///?socket={self.path('journal')}"
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
            with self.journal(delay):
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

    def held(self, peer, delay, depth, seconds):
        """A writer whose volume holds all that it may: what it is answered then is what the store gets."""
        logs = self.path("held")
        # A small bound: it is reached before the ramp ends, whatever the drive does.
        more = ["--dirty-max", "disk=16m"] if peer in BACK else []

        def measure(server, target):
            before = self.flash(peer)
            job = self.fio(target, ["--rw=randwrite", "--bs=4k", f"--iodepth={depth}", "--time_based", "--ramp_time=5",
                                    f"--runtime={round(seconds * 1000)}ms", f"--write_lat_log={logs}", "--log_avg_msec=0"])
            after = self.flash(peer)
            side = job["write"]
            with open(f"{logs}_clat.1.log") as f:
                ends = sorted(int(line.split(",", 1)[0]) for line in f)
            gap = max((b - a for a, b in zip(ends, ends[1:])), default=0)
            for path in Path(self.bench.folder).glob("held*.log"):
                path.unlink()
            out = {"value": side["iops"], "p99_ms": side["clat_ns"]["percentile"]["99.000000"] / 1e6,
                   "longest_ms": side["clat_ns"]["max"] / 1e6, "gap_ms": gap, "memory_mib": server.memory() / MIB,
                   "formula": self.formula(peer, depth, delay)}
            if before and after and after[1] > before[1]:
                out["flash_per_byte"] = (after[0] - before[0]) / (after[1] - before[1])
            return out

        self.note(f"held at the bound qd{depth}, {delay} ms", peer, **self.served(peer, delay, measure, more))

    def formula(self, peer, depth, delay):
        """Writes/s of the design, by what the store without a cache was measured to take: a window of grain=completion is as wide as the client's
        queue, and waits for one write and one flush; else 64 writes are on their way at once, and write-through has the client's queue there."""
        what, times = {"back:ordered,grain=completion": ("fsync x1", depth), "write-through": (f"rand qd{depth}", 1)}.get(peer, ("rand qd64", 1))
        return self.median(f"{what}, {delay} ms", "bare store", "value") * times

    def flash(self, peer):
        """Bytes written to flash and by clients so far."""
        if peer not in BACK:
            return None
        flash = self.status()["flash"]
        return flash["bytes_written"], flash["client_bytes"]

    def start(self, name, arguments):
        """How long a start takes, until the first read is answered, that finds so much dirty: below half of the bound nothing is destaged."""
        gib = self.options.start_gib
        image = self.path("large.img")
        with open(image, "wb") as f:
            f.truncate(gib * 1024 * MIB)
        words = {"larder": self.options.larder, "cache": self.path("start-cache"), "size": (3 * gib + 1) * 1024,
                 "log": (2 * gib + gib // 2 + 1) * 1024, "uri": f"file:{image}", "socket": self.path("wb"), "state": self.path("wb-state")}
        run = {"check": True, "stdin": subprocess.DEVNULL, "stdout": self.bench.log, "stderr": self.bench.log}
        subprocess.run(["rm", "-rf", words["state"], image + ".larder"], **run)
        subprocess.run(shlex.split(FORMAT.format(**words)), **run)
        serve = shlex.split(SERVE.format(**words) + f" --write back:ordered,destage=none --dirty-max disk={2 * gib}g")
        with Killed(self.process(serve, words["socket"], self.bench.log)) as server:
            target = self.nbd(words["socket"], "disk")
            self.fio(target, [*arguments, f"--size={gib}g", f"--io_size={gib}g", "--end_fsync=1"])
            dirty = self.status()["volumes"][0]["write_back"]["dirty_bytes"]
            memory = server.memory()
        # As after a power cut: nothing of it is in the page cache.
        descriptor = os.open(words["cache"], os.O_RDONLY)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)
        began = time.monotonic()
        with Killed(self.process(serve, words["socket"], self.bench.log)) as server:
            Nbd(words["socket"]).ask(0, 0, 4096)
            took = time.monotonic() - began
            again = self.status()["volumes"][0]["write_back"]["dirty_bytes"]
            self.note(f"start, {gib} GiB {name}", OURS, value=took, dirty_gib=dirty / MIB / 1024, found_gib=again / MIB / 1024,
                      memory_mib=memory / MIB, memory_then_mib=server.memory() / MIB)
        for path in (words["cache"], image, image + ".larder"):
            Path(path).unlink(missing_ok=True)

    def status(self):
        command = [self.options.larder, "block", "status", "--state-dir", self.path("wb-state"), "--json"]
        # The operator's socket is there a little later than that of clients.
        end = time.monotonic() + 10
        while True:
            done = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=self.bench.log)
            if done.returncode == 0 or time.monotonic() > end:
                return json.loads(done.stdout)
            time.sleep(0.05)

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
        seconds = self.options.held_seconds
        if seconds > 0:
            delay = self.options.delays[0]
            for peer in ("back:ordered", "nbdkit write-back"):
                self.held(peer, delay, 16, seconds)
            for peer in ("back:ordered,grain=completion", "back:journaled", "back:any", "write-through"):
                self.held(peer, delay, 16, seconds / 4)
        if self.options.start_gib > 0:
            for name, arguments in STARTS.items():
                self.start(name, arguments)

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
        starts = [what for what in self.results if what.startswith("start")]
        plain = [what for what in self.results if what not in held and what not in starts]
        out = [table("writes/s, in brackets how much better back:ordered is", plain, figure),
               table("CPU of the server for a million, memory at most", plain, cost)]
        if held:
            out.append("| held at the bound | writes/s | of the formula | p99 | longest write | longest gap | memory | flash bytes a byte |\n"
                       "| --- |" + " ---: |" * 7)
            for what in held:
                for peer in self.results[what]:
                    of = {f: self.median(what, peer, f) for f in ("value", "formula", "p99_ms", "longest_ms", "gap_ms", "memory_mib", "flash_per_byte")}
                    flash = f"{of['flash_per_byte']:.2f}" if of["flash_per_byte"] else "–"
                    out[-1] += (f"\n| {peer}, {what.rsplit(', ', 1)[1]} | {of['value']:,.0f} | {of['value'] / of['formula']:.2f} | "
                                f"{of['p99_ms']:.1f} ms | {of['longest_ms']:.0f} ms | {of['gap_ms']:.0f} ms | "
                                f"{of['memory_mib']:.0f} MiB | {flash} |")
        if starts:
            out.append("| a start that finds | first read after | dirty | memory while it was written, then |\n| --- |" + " ---: |" * 3)
            for what in starts:
                of = {f: self.median(what, OURS, f) for f in ("value", "found_gib", "memory_mib", "memory_then_mib")}
                out[-1] += (f"\n| {what.removeprefix('start, ')} | {of['value']:.2f} s | {of['found_gib']:.2f} GiB | "
                            f"{of['memory_mib']:.0f}, {of['memory_then_mib']:.0f} MiB |")
        lost = []
        for what in plain:
            behind = [(peer, self.ratio(what, peer)) for peer in PEERS if peer != OURS and peer not in BACK]
            behind = [f"{peer} ({ratio:.2f})" for peer, ratio in behind if ratio is not None and ratio < 0.97]
            if behind:
                lost.append(f"- {what}: behind " + ", ".join(behind))
        out.append("Where back:ordered loses:\n\n" + ("\n".join(lost) or "- nowhere"))
        return "\n\n".join(out)
