"""A `larder kv` of one's own, for the scripts under tests/ and bench/: on a free port, in a folder that goes with it."""

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent


def find_larder(given=None):
    """The binary: as given, else the release build, else the debug build."""
    target = Path(os.environ.get("CARGO_TARGET_DIR", ROOT / "target"))
    candidates = [Path(given)] if given else [target / kind / "larder" for kind in ("release", "debug")]
    for candidate in candidates:
        if candidate.exists():
            return candidate.resolve()
    sys.exit(f"no {candidates[0]}: cargo build --release")


def free_port():
    """A TCP port of the loopback that nobody listens on."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


class LarderServer:
    """`with LarderServer(binary, [options]) as server:` runs until the block ends; `port`, `pid` and `folder` are its."""

    def __init__(self, larder, options=(), folder=None):
        self.larder = larder
        self.options = list(options)
        self.given_folder = folder

    def __enter__(self):
        self.folder = Path(self.given_folder or tempfile.mkdtemp(prefix="larder-"))
        self.port = free_port()
        self.log = self.folder / "log"
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [self.larder, "kv", "-p", str(self.port), "-l", "127.0.0.1", "--http", "off", "--data-dir",
                 self.folder / "data", *self.options], stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        self.pid = self.process.pid
        for _ in range(300):
            if self.process.poll() is not None:
                break
            try:
                socket.create_connection(("127.0.0.1", self.port), timeout=1).close()
                return self
            except OSError:
                time.sleep(0.1)
        text = self.log.read_text(errors="replace").strip()
        self.__exit__(None, None, None)
        sys.exit(f"larder kv did not start: {text[-1000:]}")

    def __exit__(self, *_):
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(30)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
        if self.given_folder is None:
            shutil.rmtree(self.folder, ignore_errors=True)

    def stats(self, kind=""):
        """The answer to `stats`, name to value."""
        with socket.create_connection(("127.0.0.1", self.port), timeout=30) as s:
            s.sendall(f"stats {kind}".strip().encode() + b"\r\n")
            text = b""
            while not text.endswith(b"END\r\n"):
                more = s.recv(65536)
                if not more:
                    break
                text += more
        return dict(re.findall(r"^STAT (\S+) (.*?)\r$", text.decode(errors="replace"), re.M))

    def resident(self):
        """Bytes of resident memory, without what is shared with files (the flash index on tmpfs is counted)."""
        status = Path(f"/proc/{self.pid}/status").read_text()
        sizes = dict(re.findall(r"^(\w+):\s+(\d+) kB$", status, re.M))
        return 1024 * (int(sizes["RssAnon"]) + int(sizes["RssShmem"]))

    def descriptors(self):
        """How many file descriptors are open."""
        return len(os.listdir(f"/proc/{self.pid}/fd"))
