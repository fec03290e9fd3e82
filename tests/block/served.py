"""A daemon with one cached volume, for the cases of tests/block/run."""

import shlex
import signal
import subprocess
import time
from pathlib import Path

MIB = 1 << 20
VOLUME = 64 * MIB
# Smaller than the volume, so that lines are evicted all the time.
CACHE = 24 * MIB
# With a write log beside the lines, where the volume writes back.
BACK_CACHE, BACK_LOG = 96 * MIB, 64 * MIB
FORMAT = "{larder} block format {cache} --size {size} --placement {placement} --yes"
SERVE = ("{larder} block serve --cache {cache} --volume disk=file:{disk} --listen unix:{socket} --listen vhost:{vhost},volume=disk"
         " --state-dir {state}")


class Failed(Exception):
    pass


class Missing(Exception):
    """A program is not there that can be had."""


class Unable(Exception):
    """This machine cannot do it."""


class Served:
    """A cached volume that can be stopped, killed and started again on the same cache."""

    def __init__(self, options, folder, size=VOLUME, record=False, placement="set:8", back=None):
        words = {"larder": options.larder, "cache": folder / "cache", "disk": folder / "disk.img", "placement": placement,
                 "size": BACK_CACHE if back else CACHE,
                 "socket": folder / "socket", "state": folder / "state", "vhost": folder / "vhost"}
        self.vhost, self.state, self.options, self.placement = words["vhost"], words["state"], options, placement
        self.disk, self.socket, self.folder = words["disk"], words["socket"], folder
        with open(self.disk, "wb") as f:
            f.truncate(size)
        if options.format:
            run(shlex.split(options.format.format(**words)) + (["--write-log", str(BACK_LOG)] if back else []))
        self.command = shlex.split(options.serve.format(**words)) + (["--write", back] if back else [])
        self.back = back
        self.record = folder / "run.rec" if record else None
        if record:
            self.command += ["--record", str(self.record)]
        self.uri = f"nbd+unix:///disk?socket={self.socket}"
        self.process = None

    def start(self):
        with open(self.folder / "log", "ab") as log:
            self.process = subprocess.Popen(self.command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        end = time.monotonic() + 60
        while True:
            # A path that a killed server has left is there, and nobody listens.
            if subprocess.run(["nbdinfo", "--size", self.uri], capture_output=True).returncode == 0:
                return
            if self.process.poll() is not None or time.monotonic() > end:
                raise Failed("the server does not listen:\n" + (self.folder / "log").read_text(errors="replace")[-2000:])
            time.sleep(0.05)

    def end(self, how):
        self.process.send_signal(how)
        code = self.process.wait(60)
        if how == signal.SIGTERM and code not in (0, -signal.SIGTERM):
            raise Failed(f"a clean stop ended with {code}")

    def __enter__(self):
        self.start()
        return self

    def __exit__(self, *_):
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()


def run(command):
    done = subprocess.run([str(c) for c in command], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                          stderr=subprocess.STDOUT, text=True, errors="replace", timeout=600)
    if done.returncode != 0:
        raise Failed(f"{shlex.join(map(str, command))}: {done.returncode}\n{done.stdout[-3000:]}")
    return done.stdout


def identical(served, path):
    """The volume is that file, which may be its store: then the store has it all."""
    if served.back:
        run([served.options.larder, "block", "flush", "--answer-within", "120", "--state-dir", served.state])
    text = run(["qemu-img", "compare", "-f", "raw", "-F", "raw", path, served.uri])
    if "identical" not in text:
        raise Failed(text)
