"""Guests on a cached volume: over QEMU's NBD client, over vhost-user-blk, and with the daemon and the kernel's own client inside."""

import shutil
import signal
import tempfile
import time
from pathlib import Path

import guest
from served import CACHE, Failed, Missing, Unable, identical, run

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

# Disks of the guest's own kernel, by ublk; /dev/vda is the volume's store. $plain: nothing that Linux 6.0 has not.
UBLK = """
mkdir -p /dev/shm
mount -t tmpfs none /dev/shm
control=/tmp/state/block.sock
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

echo "stopped while it is mounted"
stop TERM
says "ublkb3 is in use: it stays"
(echo 3 >/proc/sys/vm/drop_caches; check /mnt) &
reader=$!
sleep 1
# Whichever it is: it is known by its note.
serve ublk:,volume=disk
says "ublkb3 is taken over"
wait $reader

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
larder block detach disk --control $control &
detaching=$!
sleep 1.5
[ -b /dev/ublkb3 ]
umount /mnt
wait $detaching
gone
larder block attach disk=file:/dev/vda --control $control
says "ublkb[0-9]* is there"
disk=$(ls /dev/ublkb*)
mount -t ext4 $disk /mnt
larder block detach disk --disconnect --control $control >/dev/null 2>&1
[ ! -e $disk ]
umount /mnt
e2fsck -fp /dev/vda || [ $? = 1 ]
larder block attach disk=file:/dev/vda --control $control
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
umount /mnt
""" % (CACHE, CACHE)

_kernels = {}
_scratch = None


def kernel(options, module=None):
    """The kernel, fetched once; where it has not that module, the archive's newer one."""
    global _scratch
    lacking = guest.missing()
    if lacking:
        raise Missing(lacking)
    if _scratch is None:
        _scratch = tempfile.TemporaryDirectory(prefix="larder-kernel-")
    for backports in (False, True):
        if backports not in _kernels:
            try:
                _kernels[backports] = guest.Kernel(options.kernel, _scratch.name, backports)
            except guest.GuestFailed as e:
                raise Missing(str(e)) from e
        if module is None or module in _kernels[backports].modules:
            return _kernels[backports]
    raise Unable(f"the kernel has no module {module}: give an unpacked linux-image-cloud-amd64 that has it with --kernel")


def over_nbd(served):
    return ["-drive", f"file.driver=nbd,file.server.type=unix,file.server.path={served.socket},file.export=disk,"
                      "file.reconnect-delay=60,if=virtio,format=raw,discard=unmap"]


def over_vhost(served):
    return ["-chardev", f"socket,id=disk,path={served.vhost},reconnect=1",
            "-device", "vhost-user-blk-pci,chardev=disk,num-queues=2"]


def boot(served, job, disk, module=None, **more):
    modules = [module] if module else []
    return guest.Guest(kernel(served.options, module), served.folder, job, disk, modules=modules, **more)


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


def two_boots(served, disk):
    with boot(served, MAKE, disk) as machine:
        try:
            machine.done()
        except guest.GuestFailed as e:
            raise Failed(str(e)) from e
    checked_outside(served)
    served.end(signal.SIGTERM)
    served.start()
    with boot(served, LOOK, disk) as machine:
        finish(machine)
    checked_outside(served)


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
    two_boots(served, over_vhost(served))


def guest_nbd_killed(served):
    killed(served, over_nbd(served))


def guest_vhost_killed(served):
    killed(served, over_vhost(served))


def guest_with_nbd_client(served):
    client = shutil.which("nbd-client", path="/usr/sbin:/sbin:/usr/bin:/bin")
    if not client:
        raise Missing("'nbd-client' is missing: apt-get install nbd-client")
    inside(served, INSIDE, "nbd", [client], memory=512)


def inside(served, job, module, programs=(), memory=768):
    """The daemon in the guest, and outside only what it has left on the volume."""
    kernel(served.options, module)
    served.end(signal.SIGTERM)
    disk = ["-drive", f"file={served.disk},if=virtio,format=raw"]
    program = Path(served.folder) / "larder"
    shutil.copy(served.options.larder, program)
    run(["strip", "-g", program])
    with boot(served, job, disk, module, programs=[str(program), *programs], memory=memory) as machine:
        finish(machine)
    served.start()
    checked_outside(served)


def guest_ublk(served):
    inside(served, "plain=\n" + UBLK, "ublk_drv")


def guest_ublk_plain(served):
    inside(served, "plain=--ublk-plain\n" + UBLK, "ublk_drv")


CASES = [guest_nbd, guest_vhost, guest_nbd_killed, guest_vhost_killed, guest_with_nbd_client, guest_ublk, guest_ublk_plain]
