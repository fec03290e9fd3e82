"""What the checkers under tests/soak share: processes that are killed, started and looked after, what counts as a refusal, and
devices and file systems that fail."""

import functools
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

# What was said to be left out, once each.
SAID = set()
SYSTEM = os.environ.get("PATH", "") + ":/usr/sbin:/sbin"


class Wrong(Exception):
    """A promise was broken."""


class Refused(Exception):
    """A process did not start, and said why."""


def copy(source, target):
    """Copies a file that may be mostly holes. A target that is there stays the same file: a map is known by its own."""
    subprocess.run(["cp", "--sparse=always", source, target], check=True)


def missing(what, *programs, paths=()):
    """Whether something is not there that moves need. That is said; where everything must be there it is a failure."""
    lacks = [p for p in programs if not shutil.which(p, path=SYSTEM)] + [str(p) for p in paths if not Path(p).exists()]
    if lacks:
        unable(what, ", ".join(lacks) + (" is" if len(lacks) == 1 else " are") + " missing")
    return bool(lacks)


def unable(what, why):
    if os.environ.get("LARDER_REQUIRE_FOREIGN") == "1":
        raise Wrong(f"cannot be done here: {what} ({why})")
    if what not in SAID:
        SAID.add(what)
        print(f"not done: {what} ({why})")


def is_root():
    return os.geteuid() == 0


def clock_moved(seconds):
    """Environment of a process whose clock is so far off: the one people set. The monotonic clock stays the kernel's, as it does
    when a clock is set, because deadlines are handed to the kernel in it. (The program `faketime` would be a second process to end.)"""
    return {"LD_PRELOAD": faketime(), "FAKETIME": f"{seconds:+d}s", "FAKETIME_DONT_FAKE_MONOTONIC": "1"} if seconds else {}


@functools.cache
def faketime():
    told = subprocess.run(["faketime", "-f", "+1s", "env"], capture_output=True, text=True, check=True).stdout
    return re.search(r"^LD_PRELOAD=(.*)$", told, re.M)[1]


class Processes:
    """One larder at a time and its log, for a World: it has `folder`, `story()` and `count()`."""

    def __init__(self, world):
        self.world, self.process, self.begun, self.log = world, None, 0, world.folder / "log"
        self.refusals, self.starts, self.warm, self.written = {}, 0, 0, 0
        self.mapped = set()

    def start(self, command, env=None):
        self.log.touch()
        self.begun = self.log.stat().st_size
        with open(self.log, "ab") as log:
            self.process = subprocess.Popen([str(c) for c in command], stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                                            start_new_session=True, env={**os.environ, **(env or {})})

    def said(self):
        """What this process has logged."""
        with open(self.log, "rb") as f:
            f.seek(self.begun)
            return f.read().decode(errors="replace")

    def tail(self):
        return self.said()[-1500:]

    def ended(self):
        return self.process.poll() is not None

    def wait_for(self, tried, seconds=120):
        """Until `tried` is true, or the process has ended by a refusal."""
        end = time.monotonic() + seconds
        while not tried():
            if self.ended():
                self.refused()
            if time.monotonic() > end:
                raise Wrong(f"it does not listen {self.world.story()}: {self.tail()}")
            time.sleep(0.05)
        self.starts += 1
        self.look_for_maps()
        self.warm += bool(re.search(r"\bwarm(:| from)", self.said()))

    def refused(self):
        """A start that ended: by an error that is said, or something is wrong."""
        said = self.said()
        code = self.process.wait()
        if code not in (1, 2) or "panicked" in said:
            raise Wrong(f"a start ended with {code} {self.world.story()}: {said[-1500:]}")
        lines = said.strip().splitlines()
        if not lines:
            raise Wrong(f"a start ended with {code} and said nothing {self.world.story()}")
        reason = re.sub(r"'[^']*'", "'…'", re.sub(r"^\S*Z? *(ERROR|error:?)? *", "", lines[-1]))
        reason = re.sub(r"\d+", "N", reason)[:250]
        self.refusals[reason] = self.refusals.get(reason, 0) + 1
        raise Refused(lines[-1])

    def kill(self, how):
        """Ends it, and looks at how it ended."""
        if how == signal.SIGKILL and not self.ended():
            # Stopped first: what it has written by then is all that it will have written.
            self.signal(signal.SIGSTOP)
        else:
            self.signal(how)
            end = time.monotonic() + 120
            while os.waitid(os.P_PID, self.process.pid, os.WEXITED | os.WNOWAIT | os.WNOHANG) is None:
                if time.monotonic() > end:
                    raise Wrong(f"it does not end {self.world.story()}: {self.tail()}")
                time.sleep(0.01)
        self.written += self.bytes_written()
        self.look_for_maps()
        if how == signal.SIGKILL:
            self.signal(how)
        code = self.process.wait()
        if code != (-how if how == signal.SIGKILL else 0):
            raise Wrong(f"{how.name} ended it with {code} {self.world.story()}: {self.tail()}")
        if "panicked" in self.said():
            raise Wrong(f"it panicked {self.world.story()}: {self.tail()}")

    def signal(self, how):
        try:
            os.killpg(self.process.pid, how)
        except ProcessLookupError:
            pass

    def look_for_maps(self):
        """Which files it has in shared memory. Others that run beside it have theirs there too."""
        try:
            text = Path(f"/proc/{self.process.pid}/maps").read_text()
        except OSError:
            return
        self.mapped |= {Path(path) for path in re.findall(r"/dev/shm/larder-\S+", text)}

    def maps(self):
        return sorted(path for path in self.mapped if path.exists())

    def bytes_written(self):
        """To devices, as the kernel counts it; 0 where it does not say."""
        try:
            return int(re.search(r"^write_bytes: (\d+)", Path(f"/proc/{self.process.pid}/io").read_text(), re.M)[1])
        except (OSError, TypeError):
            return 0

    def abandon(self):
        if self.process and not self.ended():
            self.signal(signal.SIGKILL)
            self.process.wait()


def ended_well(command, may=(0,)):
    """Runs a command that must end with one of these codes, and without a panic. Returns what it said."""
    done = subprocess.run([str(c) for c in command], stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace")
    if done.returncode not in may or "panicked" in done.stderr:
        raise Wrong(f"{' '.join(map(str, command[1:4]))} ended with {done.returncode}: {done.stderr.strip()[-800:]}")
    return done.returncode, done.stderr.strip() + done.stdout.strip()


class FailingDevice:
    """A file behind nbdfuse, of which reads and writes fail on command: `with FailingDevice(folder, file) as device:`."""

    READS, WRITES = "reads-fail", "writes-fail"

    @staticmethod
    def missing(what):
        return missing(what, "nbdkit", "nbdfuse", "fusermount3", paths=["/dev/fuse"])

    def __init__(self, folder, file, reads="30%", writes="100%", errno="EIO"):
        self.folder = Path(folder) / "failing"
        shutil.rmtree(self.folder, ignore_errors=True)
        self.point, self.processes = self.folder / "point", []
        self.path = self.point / "device"
        self.plugin = ["--filter=error", "file", str(file), f"error={errno}"]
        for kind, rate, trigger in [("pread", reads, self.READS), ("pwrite", writes, self.WRITES), ("zero", writes, self.WRITES)]:
            self.plugin += [f"error-{kind}-rate={rate}", f"error-{kind}-file={self.folder / trigger}"]

    def __enter__(self):
        self.point.mkdir(parents=True)
        socket, quiet = self.folder / "socket", {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        for command, until in [(["nbdkit", "-f", "--exit-with-parent", "-U", socket, *self.plugin], socket),
                               (["nbdfuse", self.path, f"nbd+unix:///?socket={socket}"], self.path)]:
            self.processes.append(subprocess.Popen(command, **quiet))
            end = time.monotonic() + 60
            while not until.exists():
                if time.monotonic() > end or self.processes[-1].poll() is not None:
                    self.__exit__()
                    raise Wrong(f"{command[0]} does not come up")
                time.sleep(0.02)
        return self

    def fail(self, *triggers):
        for trigger in triggers:
            (self.folder / trigger).touch()

    def mend(self):
        for trigger in (self.READS, self.WRITES):
            (self.folder / trigger).unlink(missing_ok=True)

    def __exit__(self, *_):
        subprocess.run(["fusermount3", "-u", "-z", self.point], capture_output=True)
        for process in reversed(self.processes):
            process.terminate()
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        shutil.rmtree(self.folder, ignore_errors=True)


class SmallFileSystem:
    """A tmpfs of so many bytes: `with SmallFileSystem(folder, size) as place:`. It needs root."""

    @staticmethod
    def missing(what):
        if not is_root():
            unable(what, "it needs root")
        return not is_root() or missing(what, "mount", "umount")

    def __init__(self, folder, size):
        self.point, self.size = Path(folder) / "small", size

    def __enter__(self):
        self.point.mkdir(exist_ok=True)
        subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={self.size}", "none", self.point], check=True)
        return self.point

    def __exit__(self, *_):
        unmount(self.point)


def unmount(point):
    for _ in range(100):
        if subprocess.run(["umount", point], capture_output=True).returncode == 0:
            return
        time.sleep(0.1)
    print(f"{point} cannot be unmounted", file=sys.stderr)
    subprocess.run(["umount", "-l", point], capture_output=True)


def told(counts):
    """Counts by reason, the most frequent first."""
    return "\n".join(f"  refused {n} times: {reason}" for reason, n in sorted(counts.items(), key=lambda c: -c[1]))
