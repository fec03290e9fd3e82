"""Caches on this machine that can be lost: `larder block serve`, nbdkit's cache filter, and none at all as a control."""

import json
import shutil
import subprocess
import threading
import time
from pathlib import Path

import processes
import said
from served import Failed, run


class Cache:
    """A volume `uri` over the store `store`, whose cache can be taken away. `promises`: a broken image is a failure."""

    promises = False

    def __init__(self, folder, store):
        self.folder, self.store = folder, store
        self.socket = folder / "socket"
        self.process = None
        self.log = folder / "server.log"
        # What the volume's status said while it ran, as `safe_moment` takes it.
        self.samples = []

    def spawn(self, command, uri):
        self.uri = uri
        with open(self.log, "ab") as log:
            log.write(f"{' '.join(map(str, command))}\n".encode())
            log.flush()
            self.process = subprocess.Popen([str(c) for c in command], stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        end = time.monotonic() + 60
        while subprocess.run(["nbdinfo", "--size", uri], capture_output=True).returncode != 0:
            if self.process.poll() is not None or time.monotonic() > end:
                raise Failed("the server does not listen:\n" + self.log.read_text(errors="replace")[-2000:])
            time.sleep(0.03)

    def start(self):
        raise NotImplementedError

    def take_away(self):
        """It is gone in the midst of its work, with all that it had cached."""
        self.process.kill()
        self.process.wait()

    def recover(self):
        """The store as it is to be used from now on."""
        return self.store

    def safe(self, history):
        """How many of the lines were of data that must be in the store by what was promised."""
        return 0

    def close(self):
        if self.process and self.process.poll() is None:
            self.process.kill()
            self.process.wait()


class Direct(Cache):
    """No cache: nbdkit serves the store. All that was synced is there, or it is this harness that breaks images."""

    promises = True

    def start(self):
        self.spawn(["nbdkit", "-f", "-U", self.socket, "file", self.store], f"nbd+unix:///?socket={self.socket}")

    def safe(self, history):
        return len(history.lines)


class Nbdkit(Cache):
    """nbdkit's cache filter: `writeback` writes back at each flush; `unsafe` never; `small` is `writeback` with a bound."""

    def __init__(self, folder, store, mode):
        super().__init__(folder, store)
        self.mode = mode

    def start(self):
        words = {"small": ["cache=writeback", "cache-max-size=16M"]}.get(self.mode, [f"cache={self.mode}"])
        self.spawn(["nbdkit", "-f", "-U", self.socket, "--filter=cache", "file", self.store, *words],
                   f"nbd+unix:///?socket={self.socket}")

    def safe(self, history):
        return len(history.lines)


class Larder(Cache):
    """`larder block serve --write back:ORDER` with its cache in a file. `delay`: the store is an NBD server that takes that many
    milliseconds for each write, so that a loss falls between writes of one window; 0: it is the file."""

    def __init__(self, folder, store, larder, order, destage, delay=0, more=()):
        super().__init__(folder, store)
        self.larder, self.order, self.delay, self.more = larder, order, delay, list(more)
        self.mode = f"back:{order}" + (f",destage={destage}" if destage else "")
        self.cache, self.state = folder / "cache", folder / "state"
        self.promises = order.split(",")[0] != "any"
        # What `recover` says of the image.
        self.not_older_than = None
        self.over = threading.Event()
        self.looks = threading.Thread(target=self._look, daemon=True)
        self.where, self.marker, self.filer = f"file:{store}", [], None
        # Where its epochs go, if they cannot lie beside the store.
        self.journal, self.journal_filer = [], None

    def start(self):
        if self.delay:
            self.where, self.marker = f"nbd+unix:///?socket={self.folder}/filer", [f"{self.folder}/marker"]
            self._start_filer()
            if self.order.startswith("journaled"):
                self._start_journal()
        run([self.larder, "block", "format", self.cache, "--size", "256m", "--write-log", "64m", "--yes", "--discard-dirty"])
        # A bound that is reached, so that what was written long before is in the store.
        self.spawn([self.larder, "block", "serve", "--cache", self.cache, "--volume", f"disk={self.where}", "--write", self.mode,
                    "--dirty-max", "8m", *(f"--marker=disk={place}" for place in self.marker),
                    *(f"--journal=disk={place}" for place in self.journal), "--listen", f"unix:{self.socket}",
                    "--state-dir", self.state, *self.more], f"nbd+unix:///disk?socket={self.socket}")
        self.looks.start()

    def status(self):
        done = subprocess.run([self.larder, "block", "status", "--json", "--state-dir", self.state], stdin=subprocess.DEVNULL,
                              capture_output=True, text=True)
        return json.loads(done.stdout) if done.returncode == 0 else {}

    def _look(self):
        while not self.over.is_set():
            began = time.monotonic()
            try:
                one = said.sample(self.status(), "disk", began)
            except (ValueError, KeyError):
                one = None
            if one:
                self.samples.append(one)
            self.over.wait(0.2)

    def take_away(self):
        super().take_away()
        self.over.set()
        self.looks.join()
        gone = self.folder / "gone"
        gone.mkdir()
        self.cache.rename(gone / "cache")

    def recover(self):
        if self.filer and self.filer.poll() is not None:
            # nbdkit 1.32 ends now and then when a client is killed; what it had written is there.
            with open(self.log, "a") as log:
                log.write(f"nbdkit had ended with {self.filer.returncode}\n")
            self._start_filer()
        if self.journal_filer and self.journal_filer.poll() is not None:
            self._start_journal()
        # Of `ordered` and `any` it makes the marker clean; a program that cannot yet leaves the same bytes.
        if subprocess.run([self.larder, "block", "recover", "--help"], capture_output=True).returncode == 0:
            told = run([self.larder, "block", "recover", self.where, "--json", *(f"--marker={place}" for place in self.marker),
                        *(f"--journal={place}" for place in self.journal)])
            with open(self.log, "a") as log:
                log.write(f"recover: {told}")
            self.not_older_than = json.loads(told).get("not_older_than")
        self._end_filer()
        return self.store

    def _start_filer(self):
        self.filer = self._export("filer", "--filter=delay", "file", self.store, f"wdelay={self.delay}ms")

    def _start_journal(self):
        """An export of another nbdkit, which takes no time."""
        file = self.folder / "journal"
        with open(file, "ab") as f:
            f.truncate(256 << 20)
        self.journal = [f"nbd+unix:///?socket={self.folder}/journal-filer"]
        self.journal_filer = self._export("journal-filer", "file", file)

    def _export(self, name, *plugin):
        socket = self.folder / name
        socket.unlink(missing_ok=True)
        with open(self.folder / "filer.log", "ab") as log:
            filer = subprocess.Popen(["nbdkit", "-f", "-U", socket, *plugin], stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        while not socket.exists():
            if filer.poll() is not None:
                raise Failed("nbdkit ends: " + (self.folder / "filer.log").read_text(errors="replace")[-500:])
            time.sleep(0.01)
        return filer

    def _end_filer(self):
        for filer in filter(None, [self.filer, self.journal_filer]):
            filer.terminate()
            filer.wait()
        self.filer = self.journal_filer = None

    def safe(self, history):
        if not self.promises:
            return 0
        moments = [said.safe_moment(self.samples)]
        if self.not_older_than is not None:
            # Seconds since 1970, of the same clock.
            moments.append(self.not_older_than - time.time() + time.monotonic())
        return max(history.before(moment) for moment in moments if moment is not None) if any(moments) else 0

    def close(self):
        self.over.set()
        super().close()
        # Where it came to a loss, `recover` wants it still.
        if not (self.folder / "gone").exists():
            self._end_filer()


class OnHost:
    """A file system of this machine on the volume, by nbdfuse and a loop device, with the writers on it."""

    def __init__(self, cache, folder):
        self.cache, self.folder = cache, folder
        self.fuse, self.at = folder / "fuse", folder / "volume"
        self.device = self.nbdfuse = self.writers = None
        self.mounted = False

    def start(self):
        self.fuse.mkdir()
        self.at.mkdir()
        self.nbdfuse = subprocess.Popen(["nbdfuse", self.fuse / "disk", self.cache.uri], stdin=subprocess.DEVNULL,
                                        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        end = time.monotonic() + 20
        while not (self.fuse / "disk").exists():
            if self.nbdfuse.poll() is not None or time.monotonic() > end:
                raise Failed("nbdfuse does not come up")
            time.sleep(0.02)
        self.device = run(["losetup", "--find", "--show", self.fuse / "disk"]).strip()
        run(["mount", self.device, self.at])
        self.mounted = True

    def write(self, command, said_at):
        with open(said_at, "ab") as out, open(self.folder / "writers.log", "ab") as err:
            self.writers = subprocess.Popen([*command, "--at", str(self.at)], stdin=subprocess.DEVNULL, stdout=out, stderr=err,
                                            start_new_session=True)

    def abandon(self):
        """After the server has gone: the mount goes too, whatever it still wants."""
        if self.writers:
            # All of its session: the writers, and the server of the database.
            processes.end(self.writers)
        if self.mounted and subprocess.run(["umount", self.at], capture_output=True).returncode != 0:
            time.sleep(0.2)
            subprocess.run(["umount", "-l", self.at], capture_output=True)
        self.mounted = False
        if self.device:
            subprocess.run(["losetup", "--detach", self.device], capture_output=True)
            self.device = None
        if self.nbdfuse:
            subprocess.run(["fusermount3", "-u", "-z", self.fuse], capture_output=True)
            try:
                self.nbdfuse.wait(20)
            except subprocess.TimeoutExpired:
                self.nbdfuse.kill()
                self.nbdfuse.wait()
            self.nbdfuse = None


class Postgres:
    """PostgreSQL's programs, and a template of a database with checksums and small segments."""

    def __init__(self, binaries, template):
        self.binaries, self.template = binaries, template

    @staticmethod
    def binaries_here():
        found = sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb"))
        return found[-1].parent if found else None

    @classmethod
    def made(cls, folder):
        binaries = cls.binaries_here()
        if not binaries or not (binaries / "pg_amcheck").exists():
            return None
        template = folder / "postgres-template"
        if not template.exists():
            made = folder / "postgres-making"
            shutil.rmtree(made, ignore_errors=True)
            made.mkdir()
            shutil.chown(made, "postgres", "postgres")
            made.chmod(0o700)
            subprocess.run([f"{binaries}/initdb", "-D", made, "-U", "postgres", "-A", "trust", "-k", "-N", "--wal-segsize=1", "-E", "UTF8",
                            "--locale=C"], check=True, capture_output=True, cwd="/", user="postgres", group="postgres", extra_groups=[])
            with open(made / "postgresql.conf", "a") as f:
                f.write("max_wal_size=12MB\nmin_wal_size=2MB\ncheckpoint_timeout=30s\nshared_buffers=8MB\nmax_connections=20\n"
                        "autovacuum_naptime=3s\nfsync=on\nfull_page_writes=on\n")
            made.rename(template)
        return cls(binaries, template)

    def given(self, run):
        """What the writers are told."""
        return f"{self.binaries},{self.template},{run}"
