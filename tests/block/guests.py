"""Guests on a cached volume: over QEMU's NBD client, over vhost-user-blk, and with the daemon and the kernel's own client inside."""

import os
import shutil
import signal
import subprocess
import tempfile
import time
from pathlib import Path

import guest
from served import CACHE, MIB, Failed, Missing, Unable, identical, run

# What a volume grows by.
GROWTH = 32 * MIB

MAKE = """
mkfs.ext4 -q /dev/vda
mount -t ext4 /dev/vda /mnt
fill /mnt 20
umount /mnt
e2fsck -fn /dev/vda
"""
LOOK = """
mount -t ext4 /dev/vda /mnt
check /mnt
rm /mnt/copy*
fstrim /mnt
umount /mnt
e2fsck -fn /dev/vda
"""
# The disk grows twice under a writer: while it is served, and while the daemon is away.
GROW = """
mount -t ext4 /dev/vda /mnt
busy /mnt
for round in 1 2; do
    eat /mnt eaten$round
    old=$(sectors vda)
    new=$((old + %d))
    echo "growth $round: a larger disk, please"
    until_sectors vda $new
    behind vda $old $new
    resize2fs /dev/vda
    mkdir /mnt/more$round
    fill /mnt/more$round 10
done
enough
umount /mnt
mount -t ext4 /dev/vda /mnt
check /mnt/more1
check /mnt/more2
umount /mnt
e2fsck -fn /dev/vda
""" % (GROWTH // 512)
# Each file is synced before the next: what is on the console is on the disk. Three times as long as the daemon is away.
WRITE = """
mkfs.ext4 -q /dev/vda
mount -t ext4 /dev/vda /mnt
for round in 1 2 3; do
    echo "round $round"
    i=0
    while [ $i -lt 25 ]; do
        dd if=/dev/urandom of=/tmp/piece bs=64k count=8 2>/dev/null
        dd if=/tmp/piece of=/mnt/file$i bs=64k conv=fsync 2>/dev/null
        (cd /tmp && sha256sum piece | sed "s/piece/file$i/") >>/tmp/sums$round
        i=$((i + 1))
    done
    cp /tmp/sums$round /mnt/sums
    umount /mnt
    mount -t ext4 /dev/vda /mnt
    check /mnt
done
umount /mnt
e2fsck -fn /dev/vda
"""
# The daemon in the guest too, with its cache on one disk of memory and its volume on /dev/vda.
INSIDE = """
size=$(blockdev --getsize64 /dev/vda)
larder block format /tmp/cache --size %d --yes
larder block serve --cache /tmp/cache --volume disk=file:/dev/vda --listen unix:/tmp/socket --state-dir /tmp/state &
while [ ! -S /tmp/socket ]; do sleep 0.1; done
nbd-client -unix /tmp/socket -N disk -b 512 -C 2 /dev/nbd0
[ $(blockdev --getsize64 /dev/nbd0) = $size ]
mkfs.ext4 -q /dev/nbd0
mount -t ext4 /dev/nbd0 /mnt
fill /mnt 20
umount /mnt
mount -t ext4 /dev/nbd0 /mnt
check /mnt
umount /mnt
e2fsck -fn /dev/nbd0
nbd-client -d /dev/nbd0
kill %%1
wait
e2fsck -fn /dev/vda
mount -t ext4 /dev/vda /mnt
check /mnt
umount /mnt
""" % CACHE

# Disks of the guest's own kernel, by ublk; /dev/vda is the volume's store. $plain: nothing that Linux 6.0 has not. $grows: the
# kernel can give a disk another size.
UBLK = """
mkdir -p /dev/shm
mount -t tmpfs none /dev/shm
control=/tmp/state/block.sock
# The guest may be slow.
patient="--answer-within 120"
serve() {
    : >/tmp/log
    larder block serve --cache /tmp/cache --volume disk=file:/dev/vda --state-dir /tmp/state --listen $* $plain 2>>/tmp/log &
    daemon=$!
    says ready:
}
says() { # waits until the daemon has
    i=0
    while ! grep -q "$1" /tmp/log; do
        i=$((i + 1))
        if [ $i -gt 600 ]; then cat /tmp/log; echo "the daemon does not say '$1'"; return 1; fi
        sleep 0.1
    done
}
stop() { kill -$1 $daemon; wait $daemon || true; }
larger() { # asks for a larger store, and waits for it
    old=$(sectors vda)
    new=$((old + %d))
    growths=$((growths + 1))
    echo "growth $growths: a larger store, please"
    until_sectors vda $new
}
followed() { # the disk has grown with its store, or the log says why not; the file system has what is new
    if [ $grows = no ]; then
        says "ublkb3 keeps its [0-9]* sectors, and volume 'disk' has $new: this kernel cannot tell a disk a new size"
        says "detach the volume and attach it again to have the larger disk"
        [ $(sectors ublkb3) = $disk ]
        return
    fi
    until_sectors ublkb3 $new
    says "ublkb3 has grown from $old to $new sectors"
    behind ublkb3 $old $new
    eat /mnt eaten$growths
    resize2fs /dev/ublkb3
    mkdir /mnt/more$growths
    fill /mnt/more$growths 10
}
growths=0
gone() { if ls /dev/ublkb* /dev/ublkc* 2>/dev/null; then cat /tmp/log; return 1; fi; }
size=$(blockdev --getsize64 /dev/vda)
larder block format /tmp/cache --size %d --yes
serve ublk:3,volume=disk
[ $(blockdev --getsize64 /dev/ublkb3) = $size ]
[ "$(cat /sys/block/ublkb3/queue/write_cache) $(cat /sys/block/ublkb3/queue/fua)" = "write back 1" ]
[ $(ls /sys/block/ublkb3/mq | wc -l) = 2 ]
mkfs.ext4 -q /dev/ublkb3
mount -t ext4 /dev/ublkb3 /mnt
fill /mnt 20
umount /mnt

echo "killed under a writer"
mount -t ext4 /dev/ublkb3 /mnt
(
    i=0
    while [ $i -lt 30 ]; do
        dd if=/dev/urandom of=/tmp/piece bs=64k count=8 2>/dev/null
        dd if=/tmp/piece of=/mnt/file$i bs=64k conv=fsync 2>/dev/null || echo "a write failed"
        (cd /tmp && sha256sum piece | sed "s/piece/file$i/") >>/tmp/written
        i=$((i + 1))
    done
    cp /tmp/written /mnt/sums
) &
writer=$!
for round in 1 2 3; do
    sleep 0.7
    stop 9
    sleep 0.5
    # Two queues, by another number of threads each time.
    serve ublk:3,volume=disk -t $round
    says "ublkb3 is taken over"
done
wait $writer
umount /mnt
e2fsck -fn /dev/ublkb3
mount -t ext4 /dev/ublkb3 /mnt
check /mnt
rm /mnt/copy*
fstrim /mnt

echo "grown under a writer"
disk=$(sectors ublkb3)
busy /mnt
larger
larder block resize disk --control $control $patient >/tmp/answer
if [ $grows = yes ]; then grep "1 disk is told of it$" /tmp/answer; else grep "; 1 client keeps the old size" /tmp/answer; fi
followed
enough

echo "stopped while it is mounted, and grown before the next"
stop TERM
says "ublkb3 is in use: it stays"
larger
(echo 3 >/proc/sys/vm/drop_caches; check /mnt) &
reader=$!
sleep 1
# Whichever it is: it is known by its note.
serve ublk:,volume=disk
says "ublkb3 is taken over"
wait $reader
followed

echo "another daemon, a number that is taken, and disks that are only read"
dd if=/tmp/piece of=/tmp/other bs=64k count=8 2>/dev/null
larder block format /tmp/cache2 --size %d --yes
second="larder block serve --cache /tmp/cache2 --volume other=file:/tmp/other --state-dir /tmp/state2 --read-only $plain"
if $second --listen ublk:3,volume=other 2>/tmp/log2; then false; fi
grep -q "device 3 is there already, of another program or another volume" /tmp/log2
$second --listen ublk:4,volume=other --listen ublk:5,volume=other 2>/tmp/log2 &
other=$!
while ! grep -q ready: /tmp/log2; do sleep 0.1; done
[ $(cat /sys/block/ublkb4/ro) = 1 ]
if dd if=/dev/zero of=/dev/ublkb4 bs=4k count=1 conv=fsync 2>/dev/null; then false; fi
cmp /dev/ublkb5 /tmp/other
kill $other
wait $other

echo "detached and attached"
larder block detach disk --control $control $patient &
detaching=$!
sleep 1.5
[ -b /dev/ublkb3 ]
umount /mnt
wait $detaching
gone
larder block attach disk=file:/dev/vda --control $control $patient
says "ublkb[0-9]* is there"
disk=$(ls /dev/ublkb*)
[ $(sectors ${disk#/dev/}) = $(sectors vda) ]
mount -t ext4 $disk /mnt
if [ $grows = no ]; then
    resize2fs $disk
    for i in 1 2; do mkdir /mnt/more$i; fill /mnt/more$i 10; done
    sync
fi
larder block detach disk --disconnect --control $control $patient >/dev/null 2>&1
[ ! -e $disk ]
umount /mnt
e2fsck -fp /dev/vda || [ $? = 1 ]
larder block attach disk=file:/dev/vda --control $control $patient
while ! ls /dev/ublkb* 2>/dev/null; do sleep 0.1; done
disk=$(ls /dev/ublkb*)
mount -t ext4 $disk /mnt
check /mnt
umount /mnt

echo "stopped"
stop TERM
gone
if grep panicked /tmp/log /tmp/log2; then false; fi
e2fsck -fn /dev/vda
mount -t ext4 /dev/vda /mnt
check /mnt
check /mnt/more1
check /mnt/more2
umount /mnt
""" % (GROWTH // 512, CACHE, CACHE)

# With a kernel that can give a ublk disk another size, which takes Linux 6.16.
NEWER = "trixie-backports"
UPDATE_SIZE = (6, 16)

_kernels = {}
_scratch = None


def kernel(options, module=None, least=(0, 0)):
    """A kernel, fetched once: this machine's; else, where that has not the module or is too old, its release's backport, and the
    backport of the release after it. Where none is new enough, the newest that has the module."""
    global _scratch
    lacking = guest.missing()
    if lacking:
        raise Missing(lacking)
    if _scratch is None:
        _scratch = tempfile.TemporaryDirectory(prefix="larder-kernel-")
    best = None
    for suite in (None, "", NEWER):
        try:
            if suite == "":
                suite = guest.Kernel.debian()[1] + "-backports"
            if suite not in _kernels:
                _kernels[suite] = guest.Kernel(options.kernel, _scratch.name, suite)
        except guest.GuestFailed as e:
            if best:
                break
            raise Missing(str(e)) from e
        found = _kernels[suite]
        if module is None or module in found.modules:
            if best is None or found.version > best.version:
                best = found
            if best.version >= least:
                break
        if options.kernel:
            break
    if best:
        return best
    raise Unable(f"the kernel has no module {module}: give an unpacked linux-image-cloud-amd64 that has it with --kernel")


def over_nbd(served):
    return ["-drive", f"file.driver=nbd,file.server.type=unix,file.server.path={served.socket},file.export=disk,"
                      "file.reconnect-delay=60,if=virtio,format=raw,discard=unmap"]


def over_vhost(served):
    return ["-chardev", f"socket,id=disk,path={served.vhost},reconnect=1",
            "-device", "vhost-user-blk-pci,chardev=disk,num-queues=2"]


def boot(served, job, disk, module=None, least=(0, 0), **more):
    modules = [module] if module else []
    return guest.Guest(kernel(served.options, module, least), served.folder, job, disk, modules=modules, **more)


def finish(machine):
    try:
        machine.done()
    except guest.GuestFailed as e:
        raise Failed(str(e)) from e
    if not any("sums are right" in line for line in machine.said if line):
        raise Failed("the guest has not checked its sums")


def checked_outside(served):
    """What the guest left is on the volume, and the cache says the same."""
    identical(served, served.disk)
    run(["e2fsck", "-fn", served.disk])


def held(served, folders):
    """The files of those folders have their sums on the store itself, without cache and daemon."""
    for name in folders:
        run(["debugfs", "-R", f"rdump /{name} {served.folder}", served.disk])
        at = served.folder / name
        files = [line.split()[1] for line in (at / "sums").read_text().splitlines()]
        if not files:
            raise Failed(f"/{name} has no files")
        done = subprocess.run(["sha256sum", "--quiet", "-c", "sums"], cwd=at, capture_output=True, text=True)
        if done.returncode != 0:
            raise Failed(f"/{name} is another on the store: {(done.stdout + done.stderr)[-2000:]}")


def two_boots(served, disk, then=None):
    """A file system is made in one guest and looked at in the next, which has `then` done to it: a job, and what it wants."""
    job, beside = then or ("", None)
    with boot(served, MAKE, disk) as machine:
        try:
            machine.done()
        except guest.GuestFailed as e:
            raise Failed(str(e)) from e
    checked_outside(served)
    served.end(signal.SIGTERM)
    served.start()
    with boot(served, LOOK + job, disk) as machine:
        try:
            if beside:
                beside(served, machine)
        except guest.GuestFailed as e:
            raise Failed(str(e)) from e
        finish(machine)
    checked_outside(served)


def volume_grows(served, machine):
    machine.wait_for("growth 1: ")
    size = served.disk.stat().st_size + GROWTH
    told = run([served.options.larder, "block", "resize", "disk", str(size), "--answer-within", "120", "--state-dir", served.state])
    if "1 disk is told of it" not in told or "keep" in told:
        raise Failed(f"resize: {told}")
    machine.wait_for("growth 2: ")
    served.end(signal.SIGKILL)
    os.truncate(served.disk, size + GROWTH)
    served.start()


def killed(served, disk):
    with boot(served, WRITE, disk) as machine:
        try:
            for number in (1, 2, 3):
                machine.wait_for(f"round {number}")
                time.sleep(0.3)
                served.end(signal.SIGKILL)
                time.sleep(0.5)
                served.start()
        except guest.GuestFailed as e:
            raise Failed(str(e)) from e
        finish(machine)
    checked_outside(served)


def guest_nbd(served):
    two_boots(served, over_nbd(served))


def guest_vhost(served):
    two_boots(served, over_vhost(served), (GROW, volume_grows))
    held(served, ["more1", "more2"])


def guest_nbd_killed(served):
    killed(served, over_nbd(served))


def guest_vhost_killed(served):
    killed(served, over_vhost(served))


def guest_with_nbd_client(served):
    client = shutil.which("nbd-client", path="/usr/sbin:/sbin:/usr/bin:/bin")
    if not client:
        raise Missing("'nbd-client' is missing: apt-get install nbd-client")
    inside(served, INSIDE, "nbd", [client], memory=512)


def inside(served, job, module, programs=(), memory=768, least=(0, 0), beside=None):
    """The daemon in the guest, and outside only what it has left on the volume."""
    kernel(served.options, module, least)
    served.end(signal.SIGTERM)
    disk = ["-drive", f"file={served.disk},if=virtio,id=store,format=raw"]
    program = Path(served.folder) / "larder"
    shutil.copy(served.options.larder, program)
    run(["strip", "-g", program])
    with boot(served, job, disk, module, least, programs=[str(program), *programs], memory=memory) as machine:
        try:
            if beside:
                beside(served, machine)
        except guest.GuestFailed as e:
            raise Failed(str(e)) from e
        finish(machine)
    served.start()
    checked_outside(served)


def store_grows(served, machine):
    for n in (1, 2):
        machine.wait_for(f"growth {n}: ")
        machine.tell("block_resize", device="store", size=served.disk.stat().st_size + GROWTH)


def ublk(served, plain, least):
    can = not plain and kernel(served.options, "ublk_drv", least).version >= UPDATE_SIZE
    job = f"plain={plain}\ngrows={'yes' if can else 'no'}\n" + UBLK
    inside(served, job, "ublk_drv", least=least, beside=store_grows)
    held(served, ["more1", "more2"])


def guest_ublk(served):
    ublk(served, "", UPDATE_SIZE)


def guest_ublk_plain(served):
    ublk(served, "--ublk-plain", (0, 0))


CASES = [guest_nbd, guest_vhost, guest_nbd_killed, guest_vhost_killed, guest_with_nbd_client, guest_ublk, guest_ublk_plain]
