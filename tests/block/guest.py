"""Small guests for the tests: Debian's cloud kernel, busybox, and a job in an initramfs, under QEMU.

A guest says on its serial console what it does; a job ends with a line of its own if all of it went well. The kernel is taken
from --kernel, from /boot, or from the package archive by `apt-get download`; nothing is installed.
"""

import json
import lzma
import os
import re
import shutil
import socket
import subprocess
import tempfile
import threading
import time
from pathlib import Path

PACKAGES = {"qemu-system-x86_64": "qemu-system-x86", "busybox": "busybox-static", "mkfs.ext4": "e2fsprogs",
            "e2fsck": "e2fsprogs", "resize2fs": "e2fsprogs", "dpkg-deb": "dpkg"}
KERNEL_PACKAGE = "linux-image-cloud-amd64"
MODULES = ["virtio_pci", "virtio_blk"]
END = "the job is done"
# Without KVM: what a nested one can do differs from machine to machine, and these guests boot in three seconds. QEMU 7.2
# trips over cmpxchg16b, which Linux 6.12 uses where it is.
ACCELERATION = ["-accel", "tcg", "-cpu", "max,cx16=off"]
PATIENCE = 300

INIT = """#!/bin/busybox sh
/bin/busybox --install -s /bin
mount -t proc none /proc; mount -t sysfs none /sys; mount -t devtmpfs none /dev; mount -t tmpfs none /tmp
for module in $(cat /modules); do insmod /$module || echo "insmod $module failed"; done
if sh -eu /job; then echo "%s"; else echo "the job failed"; fi
sync
poweroff -f
""" % END

# What the jobs share: a file system with files whose sums are known, and its check.
FILES = """
fill() { # directory, number: files of random bytes and a copy of each
    i=0
    while [ $i -lt $2 ]; do
        dd if=/dev/urandom of=$1/file$i bs=64k count=$((i % 7 + 1)) 2>/dev/null
        cp $1/file$i $1/copy$i
        i=$((i + 1))
    done
    (cd $1 && sha256sum file* >/tmp/sums && sed s/file/copy/ /tmp/sums | cat /tmp/sums - >sums)
}
check() { (cd $1 && sha256sum -c sums >/dev/null) && echo "sums are right"; }
"""
# A disk that grows while it is mounted, and what lies behind its old end.
GROWTH = """
sectors() { cat /sys/block/$1/size; }
eat() { # directory, name: all room but a little, so that what comes later lies behind the old end
    fallocate -l $(($(df -k $1 | tail -1 | awk '{print $4}') - 1024))k $1/$2
}
busy() { # directory: somebody writes all the time
    rm -f /tmp/enough
    while [ ! -e /tmp/enough ]; do
        dd if=/dev/zero of=$1/busy bs=64k count=4 conv=fsync 2>/dev/null || echo "a write failed"
        sleep 0.05
    done &
    writer=$!
}
enough() { touch /tmp/enough; wait $writer; }
until_sectors() { # disk, sectors
    i=0
    while [ $(sectors $1) != $2 ]; do
        i=$((i + 1))
        if [ $i -gt 600 ]; then echo "$1 has $(sectors $1) sectors, not $2"; return 1; fi
        sleep 0.1
    done
}
behind() { # disk, its old end in sectors, its sectors: the ends of what is new, past the page cache
    dmesg | grep -q "$1: detected capacity change from $2 to $3"
    dd if=/dev/urandom of=/tmp/new bs=4k count=16 2>/dev/null
    for at in $(($2 / 8)) $(($3 / 8 - 16)); do
        dd if=/tmp/new of=/dev/$1 bs=4k seek=$at conv=fsync 2>/dev/null
        echo 3 >/proc/sys/vm/drop_caches
        dd if=/dev/$1 of=/tmp/back bs=4k skip=$at count=16 2>/dev/null
        cmp /tmp/new /tmp/back
    done
    if dd if=/dev/$1 bs=512 skip=$3 count=1 2>/dev/null | grep -q .; then return 1; fi
}
"""


class GuestFailed(Exception):
    pass


def missing():
    """What is not there, in words, or nothing."""
    for program, package in PACKAGES.items():
        if not shutil.which(program):
            return f"'{program}' is missing: apt-get install {package}"
    return None


class Kernel:
    """A kernel and its modules, unpacked. `suite`: one of Debian's whose kernel it is, whatever is installed."""

    def __init__(self, given, scratch, suite=None):
        scratch = Path(scratch)
        if given:
            root = Path(given)
        elif suite:
            root = self._downloaded(scratch / suite, self._apt(scratch / f"apt-{suite}", suite))
        else:
            root = self._installed() or self._downloaded(scratch / "kernel", [])
        # Where Debian 14 has it, and its backports.
        inside = [path for lib in ("lib", "usr/lib") for path in root.glob(f"{lib}/modules/*/vmlinuz")]
        images = sorted([*root.glob("boot/vmlinuz-*"), *inside])
        if not images:
            raise GuestFailed(f"no boot/vmlinuz-* in {root}: give an unpacked {KERNEL_PACKAGE} with --kernel")
        self.image = images[-1]
        self.release = self.image.parent.name if self.image in inside else self.image.name.removeprefix("vmlinuz-")
        self.version = tuple(int(n) for n in re.match(r"(\d+)\.(\d+)", self.release).groups())
        self.modules = {}
        for path in [p for lib in ("lib", "usr/lib") for p in (root / lib / "modules" / self.release).rglob("*.ko*")]:
            name, dot, packed = path.name.partition(".ko")
            if packed in ("", ".xz"):
                self.modules[name.replace("-", "_")] = path

    def module(self, path):
        """A module's bytes, as a guest can load them."""
        return lzma.decompress(path.read_bytes()) if path.suffix == ".xz" else path.read_bytes()

    @staticmethod
    def _installed():
        for image in sorted(Path("/boot").glob("vmlinuz-*"), reverse=True):
            release = image.name.removeprefix("vmlinuz-")
            # Compressed modules would need a program in the guest for each way to compress.
            if os.access(image, os.R_OK) and any((Path("/lib/modules") / release).rglob("virtio_blk.ko")):
                return Path("/")
        return None

    @staticmethod
    def debian():
        """Where this machine has its packages from, and Debian's name for its release."""
        lines = subprocess.run(["apt-get", "indextargets", "--format", "$(REPO_URI) $(CODENAME)", "Created-By: Packages",
                                "Origin: Debian", "Component: main"], capture_output=True, text=True).stdout
        found = re.search(r"^(\S+) ([a-z]+)$", lines, re.MULTILINE)
        if not found:
            raise GuestFailed("apt has no source of Debian's whose backports could be asked")
        return found.groups()

    @staticmethod
    def _apt(folder, suite):
        """Options by which apt knows that suite, beside whatever it is set up for."""
        uri, _ = Kernel.debian()
        keys = "/usr/share/keyrings/debian-archive-keyring.gpg"
        (folder / "lists" / "partial").mkdir(parents=True)
        (folder / "sources.list").write_text(f"deb [signed-by={keys}] {uri} {suite} main\n")
        options = ["-o", f"Dir::Etc::SourceList={folder}/sources.list", "-o", "Dir::Etc::SourceParts=/dev/null",
                   "-o", f"Dir::State::Lists={folder}/lists", "-o", f"Dir::Cache={folder}", "-o", "APT::Sandbox::User=root"]
        done = subprocess.run(["apt-get", *options, "update"], capture_output=True, text=True)
        if done.returncode != 0:
            raise GuestFailed(f"apt-get update for {suite}: {done.stderr[-500:]}")
        return options

    @staticmethod
    def _downloaded(folder, options):
        def needs(package, parts):
            text = subprocess.run(["apt-cache", *options, "depends", package], capture_output=True, text=True).stdout
            return re.findall(rf"Depends: (linux-(?:{parts})-\d\S+)", text)

        images = needs(KERNEL_PACKAGE, "image")
        if not images:
            raise GuestFailed(f"apt knows no {KERNEL_PACKAGE}: run apt-get update, or give one, unpacked, with --kernel")
        # Newer ones have both in packages of their own.
        wanted = [images[0], *needs(images[0], "binary|modules")]
        folder.mkdir()
        done = subprocess.run(["apt-get", *options, "-o", "APT::Sandbox::User=root", "download", *wanted], cwd=folder,
                              capture_output=True, text=True)
        packages = list(folder.glob("*.deb"))
        if done.returncode != 0 or not packages:
            raise GuestFailed(f"apt-get download {' '.join(wanted)}: {done.stderr[-500:]}; or give it, unpacked, with --kernel")
        for package in packages:
            subprocess.run(["dpkg-deb", "-x", package, folder / "root"], check=True)
            package.unlink()
        return folder / "root"

    def with_needed(self, names):
        """Modules in the order in which they can be loaded. What the kernel has built in is none."""
        order = []

        def visit(name):
            path = self.modules.get(name)
            if path is None or path in order:
                return
            found = re.search(rb"\0depends=([^\0]*)\0", b"\0" + self.module(path))
            for needed in found.group(1).decode().split(",") if found else []:
                visit(needed.replace("-", "_"))
            if path not in order:
                order.append(path)

        for name in names:
            visit(name)
        return order


def libraries(program):
    """A program's shared libraries and its loader."""
    text = subprocess.run(["ldd", program], capture_output=True, text=True).stdout
    return re.findall(r"(/\S+) \(0x", text)


def archive(entries):
    """An initramfs (cpio, newc): path -> (mode, bytes); directories are made as needed."""
    out = bytearray()
    seen = set()

    def put(path, mode, data):
        name = path.encode() + b"\0"
        fields = [len(seen) + 1, mode, 0, 0, 1, 0, len(data), 0, 0, 0, 0, len(name), 0]
        head = b"070701" + b"".join(b"%08X" % f for f in fields) + name
        out.extend(head + b"\0" * (-len(head) % 4) + data + b"\0" * (-len(data) % 4))
        seen.add(path)

    for path, (mode, data) in entries.items():
        parts = path.split("/")[:-1]
        for i in range(1, len(parts) + 1):
            folder = "/".join(parts[:i])
            if folder not in seen:
                put(folder, 0o040755, b"")
        put(path, mode, data)
    put("TRAILER!!!", 0, b"")
    return bytes(out)


def initramfs(kernel, job, programs=(), modules=()):
    entries = {folder: (0o040755, b"") for folder in ("proc", "sys", "dev", "tmp", "mnt", "run", "etc")}
    entries["init"] = (0o100755, INIT.encode())
    entries["job"] = (0o100644, (FILES + GROWTH + job).encode())
    entries["etc/mtab"] = (0o100644, b"")
    entries["etc/passwd"] = (0o100644, b"root:x:0:0::/:/bin/sh\n")
    entries["bin/busybox"] = (0o100755, Path(shutil.which("busybox")).read_bytes())
    wanted = [Path(shutil.which(p) or p) for p in ("mkfs.ext4", "e2fsck", "resize2fs", *programs)]
    for program in wanted:
        entries[f"usr/bin/{program.name}"] = (0o100755, program.read_bytes())
        for library in libraries(program):
            entries[library.lstrip("/")] = (0o100755, Path(library).read_bytes())
    names = []
    for path in kernel.with_needed([*MODULES, *modules]):
        name = path.name.removesuffix(".xz")
        entries[name] = (0o100644, kernel.module(path))
        names.append(name)
    entries["modules"] = (0o100644, "\n".join(names).encode())
    return archive(entries)


class Guest:
    """A guest that runs a job and powers itself off."""

    def __init__(self, kernel, folder, job, disk, programs=(), modules=(), memory=256):
        with tempfile.NamedTemporaryFile(dir=folder, suffix=".cpio", delete=False) as f:
            f.write(initramfs(kernel, job, programs, modules))
        self.monitor = Path(f.name + ".monitor")
        memfd = f"memory-backend-memfd,id=memory,size={memory}M,share=on"
        self.command = ["qemu-system-x86_64", "-M", "q35,memory-backend=memory", "-object", memfd, "-m", str(memory),
                        *ACCELERATION, "-smp", "2", "-nodefaults", "-no-reboot",
                        "-display", "none", "-serial", "stdio", "-qmp", f"unix:{self.monitor},server=on,wait=off",
                        "-kernel", str(kernel.image), "-initrd", f.name,
                        "-append", "console=ttyS0 quiet panic=-1 no_timer_check", *disk]
        self.said = []
        self.lock = threading.Condition()
        self.process = None

    def __enter__(self):
        self.process = subprocess.Popen(self.command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                                        stderr=subprocess.STDOUT)
        threading.Thread(target=self._listen, daemon=True).start()
        return self

    def __exit__(self, *_):
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()

    def _listen(self):
        for line in self.process.stdout:
            with self.lock:
                self.said.append(line.decode(errors="replace").rstrip())
                self.lock.notify_all()
        with self.lock:
            self.said.append(None)
            self.lock.notify_all()

    def wait_for(self, text, count=1):
        """Waits until the guest has said that, so many times."""
        end = time.monotonic() + PATIENCE
        with self.lock:
            while True:
                found = sum(1 for line in self.said if line is not None and text in line)
                if found >= count:
                    return
                left = end - time.monotonic()
                if None in self.said or left <= 0:
                    tail = "\n".join(line for line in self.said[-30:] if line is not None)
                    why = "ended" if None in self.said else f"says nothing more after {PATIENCE} s"
                    raise GuestFailed(f"the guest {why} without '{text}':\n{tail}")
                self.lock.wait(left)

    def tell(self, command, **arguments):
        """A command to the machine itself, by QEMU's monitor."""
        with socket.socket(socket.AF_UNIX) as s, s.makefile("rw") as stream:
            s.settimeout(PATIENCE)
            s.connect(str(self.monitor))
            for line in ({"execute": "qmp_capabilities"}, {"execute": command, "arguments": arguments}):
                print(json.dumps(line), file=stream, flush=True)
            answers = 0
            while answers < 2:
                said = json.loads(stream.readline())
                if "error" in said:
                    raise GuestFailed(f"QEMU refuses {command} {arguments}: {said['error']}")
                answers += "return" in said

    def done(self):
        """Waits until it has done its job and has gone."""
        self.wait_for(END)
        self.process.wait(PATIENCE)
