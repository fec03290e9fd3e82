"""Caches of Linux in a guest. Its disks are two files: the cache, and the backing device. What the cache lost leaves behind is the
backing file alone, at any moment: the guest is stopped for as long as the file is copied, and at the end it is killed."""

import random
import time

import guest
import image
import said
from served import MIB, Failed

CACHE, VOLUME = 48 * MIB, 320 * MIB
# It takes no cache of less than 513 buckets, and above 40 % of use it writes through.
BCACHE = 192 * MIB
# What a superblock of bcache takes of the backing device.
BCACHE_OFFSET = 8192
# How old a synced write must be to be asked for, seconds, and how long a guest writes before the first loss.
LONG_AGO = 30
CONTROLS = ["guest-direct", "bcache-through"]

ROOT = """
mkdir -p /host
mount -t 9p -o trans=virtio,version=9p2000.L,ro,cache=loose,msize=512000 host /host
mkdir -p /dev/shm
mount -t tmpfs none /dev/shm
for i in proc sys dev tmp; do mount --rbind /$i /host/$i; done
host() { PATH=/usr/sbin:/usr/bin:/sbin:/bin LC_ALL=C chroot /host "$@"; }
# The mapper of devices without udev.
mapped() { echo "$2" | host dmsetup create --noudevsync --noudevrules $1; host dmsetup mknodes $1; }
sectors() { cat /sys/block/$1/size; }
ip link set lo up
"""
BCACHE_JOB = """
host make-bcache --bucket 128k -B /dev/vdb -C /dev/vda %s
for disk in vda vdb; do echo /dev/$disk >/sys/fs/bcache/register; done
i=0
while [ ! -b /dev/bcache0 ]; do i=$((i + 1)); [ $i -lt 100 ]; sleep 0.1; done
cat /sys/block/bcache0/bcache/cache_mode
# It would go on without.
[ "$(cat /sys/block/bcache0/bcache/state)" != "no cache" ]
# All writes to the cache, long ones too.
echo 0 >/sys/block/bcache0/bcache/sequential_cutoff
for set in /sys/fs/bcache/*-*; do echo 0 >$set/congested_write_threshold_us; done
%s
disk=/dev/bcache0
"""
BCACHE_EAGER = """
echo 0 >/sys/block/bcache0/bcache/writeback_delay
echo 0 >/sys/block/bcache0/bcache/writeback_percent
"""
DM_CACHE = """
mapped meta "0 16384 linear /dev/vda 0"
mapped fast "0 $(($(sectors vda) - 16384)) linear /dev/vda 16384"
mapped volume "0 $(sectors vdb) cache /dev/mapper/meta /dev/mapper/fast /dev/vdb 64 1 writeback smq %s"
disk=/dev/mapper/volume
"""
DM_WRITECACHE = """
mapped volume "0 $(sectors vdb) writecache s /dev/vdb /dev/vda 4096 %s"
disk=/dev/mapper/volume
"""
SETUPS = {
    ("guest-direct", "eager"): "disk=/dev/vdb\n",
    ("bcache-through", "eager"): BCACHE_JOB % ("", ""),
    ("bcache", "eager"): BCACHE_JOB % ("--writeback", BCACHE_EAGER),
    ("bcache", "default"): BCACHE_JOB % ("--writeback", ""),
    ("dm-cache", "eager"): DM_CACHE % "2 migration_threshold 204800",
    ("dm-cache", "default"): DM_CACHE % "0",
    ("dm-writecache", "eager"): DM_WRITECACHE % "8 high_watermark 1 low_watermark 0 max_age 1000 pause_writeback 0",
    ("dm-writecache", "default"): DM_WRITECACHE % "0",
}
MODULES = ["crc32c_generic", "9p", "9pnet_virtio", "virtio_console", "ext4", "bcache", "dm_cache", "dm_cache_smq", "dm_writecache"]
WRITE = """
echo "the disk is $disk"
mount -t ext4 $disk /host/mnt
host %s --at /mnt >/dev/vport1p1 2>/dev/console
"""


def status(system):
    """What the guest says of its cache from time to time."""
    if system.startswith("bcache"):
        words = "cat /sys/block/bcache0/bcache/dirty_data"
    elif system.startswith("dm-"):
        words = "host dmsetup status volume"
    else:
        return ""
    return f"(while sleep 15; do echo \"status: $({words})\"; done) &\n"


def losses(options, system, work, told):
    """Runs a guest for some minutes, and looks at what each loss left."""
    lacking = guest.missing()
    if lacking:
        raise Failed(lacking)
    folder = work / f"{system}-{options.settings}-{options.seed}"
    folder.mkdir()
    kernel = guest.Kernel(options.kernel, work)
    rng = random.Random(f"{options.seed} {system}")
    who = ["files1", "wal1", "delete1"] + (["postgres1"] if options.postgres else [])
    offset = BCACHE_OFFSET if system.startswith("bcache") else 0
    store = folder / "store"
    image.make(store, "ext4", VOLUME + offset, offset)
    with open(folder / "cache", "wb") as f:
        f.truncate(BCACHE if offset else CACHE)
    lines = said.Said(folder / "said")
    command = " ".join(writer_command(options, who))
    disks = ["-drive", f"file={folder}/cache,if=virtio,format=raw,cache=writeback",
             "-drive", f"file={store},if=virtio,format=raw,cache=writeback,throttling.iops-write={options.iops}",
             "-virtfs", "local,path=/,mount_tag=host,security_model=none,readonly=on,multidevs=remap", "-device", "virtio-serial-pci",
             "-chardev", f"file,id=said,path={folder}/said,append=on", "-device", "virtserialport,chardev=said,name=said"]
    job = ROOT + SETUPS.get((system, options.settings), SETUPS[system, "eager"]) + status(system) + WRITE % command
    taken = []
    machine = guest.Guest(kernel, folder, job, disks, modules=MODULES, memory=1024)
    try:
        with machine:
            began = until_writing(machine, lines, who)
            print(f"{system}: {kernel.release}, the writers have begun", flush=True)
            end = began + options.minutes * 60
            moments = sorted(rng.uniform(LONG_AGO + 5, options.minutes * 60) for _ in range(options.losses - 1))
            for number, moment in enumerate([*moments, None]):
                time.sleep(max(0, (began + moment if moment else end) - time.monotonic()))
                if machine.process.poll() is not None or any("the job failed" in line for line in machine.said if line):
                    raise Failed("the guest has ended:\n" + tail(machine))
                copy = folder / f"image{number}"
                if moment is None:
                    machine.process.kill()
                    machine.process.wait()
                else:
                    machine.tell("stop")
                now, count = time.monotonic(), lines.catch_up()
                image.tried(["cp", "--sparse=always", store, copy])
                if moment is not None:
                    machine.tell("cont")
                taken.append((copy, now, count))
    finally:
        lines.close()
        (folder / "console").write_text("\n".join(line for line in machine.said if line))
    out = []
    for copy, now, count in taken:
        started = time.monotonic()
        history = lines.until(count)
        image.strip(copy, offset)
        safe = len(history.lines) if system in CONTROLS else history.before(now - LONG_AGO)
        try:
            found, extent = image.examine(copy, "ext4", folder / f"look-{copy.name}", options.seed, history, safe,
                                          options.postgres and options.postgres.binaries)
        except Failed as e:
            print(f"{copy.name} is left out: {e}")
            continue
        loss = Loss(f"{system}-{options.seed}-{copy.name}", found.problems, extent, f"{system} {options.settings} ext4 {'+'.join(who)}")
        told(loss, started)
        out.append(loss)
        if not options.keep_all and copy.exists():
            copy.unlink()
    if not options.keep_all:
        for name in ("store", "cache"):
            (folder / name).unlink()
    return out


class Loss:
    def __init__(self, name, problems, extent, words):
        self.name, self.problems, self.extent, self.words = name, problems, extent, words


def writer_command(options, who):
    command = ["/usr/bin/python3", str(image.Path(__file__).resolve().parent / "writers.py"), "--seed", str(options.seed), "--who", ",".join(who)]
    if options.postgres:
        command += ["--postgres", options.postgres.given("/tmp/postgres-run")]
    return command


def tail(machine):
    return "\n".join([line for line in machine.said if line][-30:])


def until_writing(machine, lines, who):
    """Waits until every writer has begun."""
    end = time.monotonic() + 240
    while lines.count_of("C", 0) < len(who):
        if machine.process.poll() is not None or time.monotonic() > end or any("the job failed" in x for x in machine.said if x):
            raise Failed("the guest does not begin to write:\n" + tail(machine))
        time.sleep(0.2)
    return time.monotonic()
