"""File systems of this machine on a cached volume, by nbdfuse and a loop device. It takes root."""

import hashlib
import os
import random
import shutil
import signal
import subprocess
import time
from pathlib import Path

from served import MIB, Failed, Missing, Unable, identical, run

NEEDED = {"nbdfuse": "libnbd-bin", "fusermount3": "fuse3", "losetup": "mount", "mkfs.ext4": "e2fsprogs", "mkfs.xfs": "xfsprogs",
          "xfs_repair": "xfsprogs"}
MAKE = {"ext4": ["mkfs.ext4", "-q", "-F"], "xfs": ["mkfs.xfs", "-q", "-f"]}
CHECK = {"ext4": ["e2fsck", "-fn"], "xfs": ["xfs_repair", "-n"]}
FSX_STEPS = 3000


def able(kind, with_fsx=True):
    if os.geteuid() != 0:
        raise Unable("mounting needs root")
    for device in ("/dev/fuse", "/dev/loop-control"):
        if not os.path.exists(device):
            raise Unable(f"this machine has no {device}")
    if f"\t{kind}\n" not in Path("/proc/filesystems").read_text():
        subprocess.run(["modprobe", kind], capture_output=True)
        if f"\t{kind}\n" not in Path("/proc/filesystems").read_text():
            raise Unable(f"this kernel has no {kind}")
    for program, package in NEEDED.items():
        if not shutil.which(program):
            raise Missing(f"'{program}' is missing: apt-get install {package}")
    if with_fsx and not shutil.which("fsx"):
        raise Missing("'fsx' is missing: cargo install --locked fsx")


class Loop:
    """The export as a loop device."""

    def __init__(self, served, read_only=False, direct=False):
        self.point = served.folder / "fuse"
        self.point.mkdir(exist_ok=True)
        self.process = subprocess.Popen(["nbdfuse", self.point / "disk", served.uri], stdin=subprocess.DEVNULL,
                                        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            end = time.monotonic() + 20
            while not (self.point / "disk").exists():
                if self.process.poll() is not None or time.monotonic() > end:
                    raise Failed("nbdfuse does not come up")
                time.sleep(0.02)
            more = ["--read-only"] if read_only else []
            # Without the page cache of the loop device itself.
            more += ["--direct-io=on"] if direct else []
            self.device = run(["losetup", "--find", "--show", *more, self.point / "disk"]).strip()
        except Exception:
            self.unmount_fuse()
            raise

    def close(self):
        subprocess.run(["losetup", "--detach", self.device], capture_output=True)
        self.unmount_fuse()

    def unmount_fuse(self):
        subprocess.run(["fusermount3", "-u", "-z", self.point], capture_output=True)
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


class Mounted:
    """A file system on the export. A server that was killed takes the mount with it; then it is given up."""

    def __init__(self, served, direct=False):
        self.loop = Loop(served, direct=direct)
        self.at = served.folder / "mnt"
        self.at.mkdir(exist_ok=True)
        try:
            run(["mount", self.loop.device, self.at])
        except Exception:
            self.loop.close()
            raise

    def __enter__(self):
        return self.at

    def __exit__(self, kind, *_):
        clean = subprocess.run(["umount", self.at], capture_output=True, text=True)
        if clean.returncode != 0:
            subprocess.run(["umount", "-l", self.at], capture_output=True)
        self.loop.close()
        if clean.returncode != 0 and kind is None:
            raise Failed(f"umount: {clean.stderr}")

    def abandon(self):
        subprocess.run(["umount", "-l", self.at], capture_output=True)
        self.loop.close()


def tree(at):
    """Sums of every file below."""
    out = {}
    for path in sorted(at.rglob("*")):
        if path.is_file() and not path.is_symlink():
            out[str(path.relative_to(at))] = hashlib.sha256(path.read_bytes()).hexdigest()
    return out


def source(folder):
    """A tree of files of all sizes, some MiB."""
    rng = random.Random(3)
    at = folder / "tree"
    for i in range(600):
        path = at / f"d{i % 17}" / f"e{i % 5}" / f"f{i}"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(rng.randbytes(rng.choice((0, 1, 100, 4096, 10_000, 60_000, 200_000))))
    return at


def fsck(served, kind):
    loop = Loop(served, read_only=True)
    try:
        run([*CHECK[kind], loop.device])
    finally:
        loop.close()


def file_system(served, kind):
    able(kind)
    files = source(served.folder)
    wanted = tree(files)
    loop = Loop(served)
    try:
        run([*MAKE[kind], loop.device])
    finally:
        loop.close()
    with Mounted(served) as at:
        run(["cp", "-a", files, at / "tree"])
        with open(at / "large", "wb") as f:
            f.write(random.Random(4).randbytes(20 * MIB))
    fsck(served, kind)
    with Mounted(served) as at:
        if tree(at / "tree") != wanted:
            raise Failed("the tree is another after a mount")
        run(["cp", "-a", at / "tree", served.folder / "back"])
        if tree(served.folder / "back") != wanted:
            raise Failed("the tree is another when copied out")
        fsx(served, at)
        shutil.rmtree(at / "tree" / "d0")
    wanted = {path: value for path, value in wanted.items() if not path.startswith("d0/")}
    # Somebody writes while the server is killed: what was synced before is there after the journal's replay.
    mounted = Mounted(served)
    at = mounted.at
    run(["cp", "-a", files, at / "again"])
    run(["sync", "-f", at])
    writer = subprocess.Popen(["dd", "if=/dev/urandom", f"of={at}/late", "bs=64k", "count=1000"], stdin=subprocess.DEVNULL,
                              stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    time.sleep(0.3)
    served.end(signal.SIGKILL)
    writer.kill()
    mounted.abandon()
    writer.wait()
    served.start()
    with Mounted(served) as at:
        if tree(at / "tree") != wanted or tree(at / "again") != tree(files):
            raise Failed("what was synced is another after kill -9")
        if (at / "large").read_bytes() != random.Random(4).randbytes(20 * MIB):
            raise Failed("the large file is another after kill -9")
    fsck(served, kind)
    identical(served, served.disk)


def fsx(served, at):
    """Random operations on one file, each checked against a copy in memory."""
    done = subprocess.run(["fsx", "-N", str(FSX_STEPS), "-S", "7", "-P", served.folder, at / "fsx"], capture_output=True, text=True, timeout=120)
    if done.returncode != 0:
        raise Failed(f"fsx: {done.returncode}\n{(done.stdout + done.stderr)[-2000:]}")


def mounted_ext4(served):
    file_system(served, "ext4")


def mounted_xfs(served):
    file_system(served, "xfs")


mounted_ext4.volume = 200 * MIB
# What mkfs.xfs makes at least.
mounted_xfs.volume = 320 * MIB

CASES = [mounted_ext4, mounted_xfs]
