"""Guests on a cached volume: over QEMU's NBD client, over vhost-user-blk, and with the kernel's NBD client inside."""

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

_kernel = None
_scratch = None


def kernel(options):
    """The kernel, fetched once."""
    global _kernel, _scratch
    lacking = guest.missing()
    if lacking:
        raise Missing(lacking)
    if _kernel is None:
        _scratch = tempfile.TemporaryDirectory(prefix="larder-kernel-")
        try:
            _kernel = guest.Kernel(options.kernel, _scratch.name)
        except guest.GuestFailed as e:
            raise Missing(str(e)) from e
    return _kernel


def over_nbd(served):
    return ["-drive", f"file.driver=nbd,file.server.type=unix,file.server.path={served.socket},file.export=disk,"
                      "file.reconnect-delay=60,if=virtio,format=raw,discard=unmap"]


def over_vhost(served):
    return ["-chardev", f"socket,id=disk,path={served.vhost},reconnect=1",
            "-device", "vhost-user-blk-pci,chardev=disk,num-queues=2"]


def boot(served, job, disk, **more):
    return guest.Guest(kernel(served.options), served.folder, job, disk, **more)


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
    if "nbd" not in kernel(served.options).modules:
        raise Unable("the kernel has no module nbd: give an unpacked linux-image-cloud-amd64 with --kernel")
    served.end(signal.SIGTERM)
    disk = ["-drive", f"file={served.disk},if=virtio,format=raw"]
    program = Path(served.folder) / "larder"
    shutil.copy(served.options.larder, program)
    run(["strip", "-g", program])
    with boot(served, INSIDE, disk, programs=[str(program), client], modules=["nbd"], memory=512) as machine:
        finish(machine)
    served.start()
    checked_outside(served)


CASES = [guest_nbd, guest_vhost, guest_nbd_killed, guest_vhost_killed, guest_with_nbd_client]
