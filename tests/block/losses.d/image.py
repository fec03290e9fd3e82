"""A raw image as a loss left it: is its file system one, and what is in it?"""

import json
import subprocess
import time
from pathlib import Path

import check
from served import Failed

# Exit codes of e2fsck: 1 is "corrected", which is what a journal's replay may be.
UNCORRECTED = ~1


def tried(command):
    done = subprocess.run([str(c) for c in command], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                          text=True, errors="replace", timeout=600)
    return done.returncode, done.stdout


class Mount:
    """An image on a loop device, mounted: its journal is replayed by the kernel."""

    def __init__(self, image, at):
        at.mkdir(exist_ok=True)
        self.at = at
        code, text = tried(["mount", "-o", "loop,nodev,nosuid", image, at])
        self.trouble = text.strip() if code else None

    def __enter__(self):
        return self

    def __exit__(self, *_):
        if self.trouble is None:
            end = time.monotonic() + 30
            while True:
                code, text = tried(["umount", self.at])
                if not code:
                    return
                if time.monotonic() > end:
                    tried(["umount", "-l", self.at])
                    raise Failed(f"umount {self.at}: {text}")
                time.sleep(0.2)


def examine(image, kind, folder, seed, history, safe, postgres=None):
    """Everything wrong with the image, and how late it is. The image is changed: its journal is replayed."""
    found = check.Found()
    folder.mkdir(exist_ok=True)
    at = folder / "mnt"
    if kind == "ext4":
        # First on a copy, by a program: no kernel should have to take what nobody has looked at.
        copy = folder / "copy"
        tried(["cp", "--sparse=always", image, copy])
        code, text = tried(["e2fsck", "-p", copy])
        if not code & UNCORRECTED:
            code, text = tried(["e2fsck", "-fn", copy])
        if code & UNCORRECTED or code:
            found.add("fsck", text.strip()[-1500:])
            # What is left of it.
            tried(["e2fsck", "-fy", image])
            tried(["e2fsck", "-fy", image])
        copy.unlink()
    extent = {"lines": len(history.lines), "safe": safe, "later": 0}
    with Mount(image, at) as mount:
        if mount.trouble:
            found.add("fsck", f"it cannot be mounted: {mount.trouble}")
    if not mount.trouble:
        if not found.problems:
            code, text = tried({"ext4": ["e2fsck", "-fn", image], "xfs": ["xfs_repair", "-n", "-f", image]}[kind])
            if code:
                found.add("fsck", text.strip()[-1500:])
        with Mount(image, at) as mount:
            if mount.trouble:
                found.add("fsck", f"it cannot be mounted again: {mount.trouble}")
            else:
                extent = check.look(at, seed, history, safe, found, postgres, folder)
    (folder / "verdict.json").write_text(json.dumps({"problems": found.problems, **extent}, indent=1))
    return found, extent


def make(path, kind, size, offset=0):
    """A file with a file system that is complete: nothing of it is written later."""
    with open(path, "wb") as f:
        f.truncate(size)
    if kind == "ext4":
        command = ["mkfs.ext4", "-q", "-F", "-b", "4096", "-E", f"lazy_itable_init=0,lazy_journal_init=0,offset={offset}", path, f"{(size - offset) // 4096}"]
    else:
        assert offset == 0
        command = ["mkfs.xfs", "-q", "-f", path]
    code, text = tried(command)
    if code:
        raise Failed(f"{command}: {text}")


def strip(image, offset):
    """The image without its first bytes."""
    if offset:
        bare = Path(f"{image}.bare")
        code, text = tried(["dd", f"if={image}", f"of={bare}", "bs=1M", f"skip={offset}", "iflag=skip_bytes", "conv=sparse", "status=none"])
        if code:
            raise Failed(text)
        bare.rename(image)
