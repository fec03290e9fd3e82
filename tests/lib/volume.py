"""The history of a volume that several connections change at once, sector by sector, and a small NBD client."""

import random
import socket
import struct
import threading
import time

from chaos import Wrong

SECTOR = 512
ZEROES = bytes(SECTOR)


class Gone(Exception):
    """The connection ended."""


def content(sector, write):
    """512 bytes that name a sector and the write they are of; of write 0, zeroes."""
    return ZEROES if write == 0 else struct.pack("<QQ", sector, write) * (SECTOR // 16)


def pieces(found):
    """A sector that is no write's, as runs of one write each: from which byte, whose sector, which write."""
    runs = []
    for at, (name, number) in enumerate(struct.iter_unpack("<QQ", found)):
        if not runs or runs[-1][1:] != (name, number):
            runs.append((at * 16, name, number))
    return ", ".join(f"from byte {at} sector {name} of write {number}" for at, name, number in runs)


class Write:
    """A change: when it began and when it was over (None: not known yet, so that it may be there or not)."""

    __slots__ = ("number", "begun", "acknowledged", "zero")

    def __init__(self, number, begun, zero):
        self.number, self.begun, self.acknowledged, self.zero = number, begun, None, zero


class Model:
    """For each sector the writes that may be there; times are of one counter under one lock."""

    def __init__(self, sectors):
        self.lock = threading.Lock()
        self.clock, self.next, self.sectors = 0, 1, sectors
        self.writes, self.open, self.readers = {}, {}, {}
        self.maybe = [[0] for _ in range(sectors)]
        # sector: [(when, write)]: replaced while somebody read, who may still return it.
        self.replaced = {}
        # Of a store that forgets, sector: {write: when it was replaced}, since the last flush that succeeded.
        self.flushed = None
        self.forget({0})

    def forget(self, numbers):
        """Only these writes are still anywhere, and they are long over."""
        self.writes = {n: Write(n, 0, n == 0) for n in numbers | {0}}
        for write in self.writes.values():
            write.acknowledged = 0
        self.open.clear()

    def tick(self):
        self.clock += 1
        return self.clock

    def begin(self, reader=None):
        with self.lock:
            now = self.tick()
            if reader is not None:
                self.readers[reader] = now
            return now

    def end(self, reader):
        with self.lock:
            self.readers.pop(reader, None)
            if not self.readers:
                self.replaced.clear()

    def begin_write(self, first, count, zero=False):
        with self.lock:
            write = Write(self.next, self.tick(), zero)
            self.next += 1
            self.writes[write.number] = self.open[write.number] = write
            for sector in range(first, first + count):
                self.maybe[sector].append(write.number)
            return write

    def acknowledge(self, write, first, count, sure=True):
        """It was carried out; where that is not `sure` (a trim) what was there before may be there still."""
        with self.lock:
            now = write.acknowledged = self.tick()
            self.open.pop(write.number, None)
            if not sure:
                return
            for sector in range(first, first + count):
                keep = []
                for number in self.maybe[sector]:
                    other = self.writes[number]
                    # Replaced: what was over, in whatever way, before this write began.
                    over = other.acknowledged is not None and other.acknowledged < write.begun
                    (self.retire(sector, number, now) if over and number != write.number else keep.append(number))
                self.maybe[sector] = keep

    def retire(self, sector, number, now):
        if self.flushed is not None:
            self.flushed.setdefault(sector, {})[number] = now
        if self.readers:
            oldest = min(self.readers.values())
            kept = [(at, n) for at, n in self.replaced.get(sector, ()) if at >= oldest]
            self.replaced[sector] = kept + [(now, number)]

    def settle(self):
        """The daemon has ended: what was not acknowledged by now is done or will never be."""
        with self.lock:
            now = self.tick()
            for write in self.open.values():
                write.acknowledged = now
            self.open.clear()

    def check(self, first, data, begun, where):
        """What was read between `begun` and now."""
        with self.lock:
            now = self.tick()
            for i in range(len(data) // SECTOR):
                sector, found = first + i, data[i * SECTOR:(i + 1) * SECTOR]
                name, number = struct.unpack_from("<QQ", found)
                maybe, late = self.maybe[sector], self.replaced.get(sector, ())
                if found == ZEROES:
                    if not any(self.writes[n].zero for n in maybe) and not any(at >= begun and self.writes[n].zero for at, n in late):
                        raise Wrong(f"{where}: sector {sector} is zeroes, which were replaced by {maybe} before")
                    continue
                if found != content(name, number) or not 0 < number < self.next:
                    raise Wrong(f"{where}: sector {sector} is mixed or damaged: {pieces(found)}, where writes {maybe} may be")
                if name != sector:
                    raise Wrong(f"{where}: sector {sector} has the bytes of sector {name}")
                if number not in maybe:
                    if not any(at >= begun and n == number for at, n in late):
                        raise Wrong(f"{where}: sector {sector} has write {number}, which was replaced by {maybe} before")
                elif len(maybe) > 1 and self.flushed is None:
                    self.pin(sector, number, begun, now)

    def pin(self, sector, number, begun, now):
        """Of writes that ran at the same time one is the last. Once that was read, no other comes back."""
        over = [n for n in self.maybe[sector] if self.writes[n].acknowledged is not None and self.writes[n].acknowledged < begun]
        if number in over:
            for other in over:
                if other != number:
                    self.maybe[sector].remove(other)
                    self.retire(sector, other, now)

    def know(self, data, checked=True):
        """What is there now, once and for all: nobody is at work, and the store was read."""
        if checked:
            self.check(0, data, self.begin(), "the store")
        with self.lock:
            numbers = [n for _, n in struct.iter_unpack("<QQ496x", data)]
            self.maybe = [[n] for n in numbers]
            self.replaced.clear()
            self.forget(set(numbers))
            if self.flushed is not None:
                self.flushed.clear()

    # Stores that forget what was not flushed.

    def flush_ended(self, begun):
        """A flush that began then has succeeded: what was over before it is durable, and what that replaced is gone for good."""
        with self.lock:
            for sector, numbers in list(self.flushed.items()):
                left = {n: at for n, at in numbers.items() if at >= begun}
                if left:
                    self.flushed[sector] = left
                else:
                    del self.flushed[sector]

    def forgotten(self):
        """The store may have lost any of what was not flushed."""
        with self.lock:
            for sector, numbers in self.flushed.items():
                self.maybe[sector] += [n for n in numbers if n not in self.maybe[sector]]


class Nbd:
    """One request at a time, simple replies."""

    READ, WRITE, FLUSH, TRIM, ZEROES = 0, 1, 3, 4, 6
    FUA, NO_HOLE = 1, 2

    def __init__(self, path, export=b"disk", timeout=60):
        self.s = socket.socket(socket.AF_UNIX)
        self.s.settimeout(timeout)
        self.s.connect(str(path))
        magic = self.take(18)
        if magic[:16] != b"NBDMAGICIHAVEOPT":
            raise Gone("no NBD server")
        # Fixed newstyle, no zeroes; NBD_OPT_GO.
        self.s.sendall(struct.pack(">I", 3) + b"IHAVEOPT" + struct.pack(">II", 7, 4 + len(export) + 2) +
                       struct.pack(">I", len(export)) + export + struct.pack(">H", 0))
        while True:
            _, _, kind, length = struct.unpack(">QIII", self.take(20))
            body = self.take(length)
            if kind == 1:
                break
            if kind & 0x80000000:
                raise Gone(f"the export is refused: {body!r}")
            if kind == 3 and body[:2] == b"\0\0":
                self.size = struct.unpack(">Q", body[2:10])[0]
        self.handle = 0

    def take(self, length):
        got = bytearray()
        while len(got) < length:
            more = self.s.recv(length - len(got))
            if not more:
                raise Gone("cut")
            got += more
        return bytes(got)

    def ask(self, kind, offset=0, length=0, data=b"", flags=0):
        """The error number, and what was read."""
        self.handle += 1
        self.s.sendall(struct.pack(">IHHQQI", 0x25609513, flags, kind, self.handle, offset, length) + data)
        magic, error, handle = struct.unpack(">IIQ", self.take(16))
        if magic != 0x67446698 or handle != self.handle:
            raise Wrong(f"a reply that is none: {magic:x}, {handle}")
        return error, self.take(length) if kind == Nbd.READ and not error else b""

    def whole(self, sectors, at_once=2000):
        """All of the volume."""
        out = bytearray()
        for first in range(0, sectors, at_once):
            error, data = self.ask(Nbd.READ, first * SECTOR, min(at_once, sectors - first) * SECTOR)
            if error:
                raise Wrong(f"a read at sector {first} failed with {error}")
            out += data
        return bytes(out)


class Client(threading.Thread):
    """One connection after the other, that reads, writes, zeroes, trims and flushes, and looks at what it is told."""

    def __init__(self, world, number):
        super().__init__(daemon=True)
        self.world, self.number, self.rng = world, number, random.Random(f"{world.seed} client {number}")
        # How often the store had lost something when this connection began, and when it last was told; how often it was told.
        self.since, self.told, self.errors = 0, 0, 0

    def run(self):
        world = self.world
        try:
            while not world.over:
                if not world.running.wait(0.2):
                    continue
                with world.at_work:
                    world.busy += 1
                nbd = None
                try:
                    losses = world.losses
                    nbd = Nbd(world.socket)
                    self.since, self.told, self.errors = losses, losses, 0
                    while world.running.is_set() and not world.over:
                        self.one(nbd)
                        world.hold(self.number)
                except (OSError, Gone, struct.error):
                    time.sleep(0.05)
                finally:
                    if nbd:
                        nbd.s.close()
                    world.model.end(self.number)
                    with world.at_work:
                        world.busy -= 1
        except Wrong as e:
            world.fail(str(e))
        except Exception as e:  # noqa: BLE001: any end of a client is a failure of the run
            world.fail(f"a client: {e!r}")

    def place(self):
        """Where and how long: hot places, the uneven end, anywhere; aligned or not; and streams."""
        rng, sectors = self.rng, self.world.sectors
        roll = rng.random()
        if roll < 0.25:
            first, count = sectors - rng.randrange(1, 60), rng.randrange(1, 40)
        elif roll < 0.6:
            first, count = rng.randrange(2000), rng.choice([1, 3, 8, 8, 8, 16, 40])
        else:
            first, count = rng.randrange(sectors), rng.choice([1, 8, 8, 24, 128, 300])
        if rng.random() < 0.5:
            first &= ~7
        return first, min(count, sectors - first)

    def one(self, nbd):
        world, rng, model = self.world, self.rng, self.world.model
        first, count = self.place()
        roll = rng.random()
        if roll < 0.52:
            begun = model.begin(self.number)
            error, data = nbd.ask(Nbd.READ, first * SECTOR, count * SECTOR)
            self.well(error, f"a read of {count} sectors at {first}")
            model.check(first, data, begun, f"a read {world.story()}")
            model.end(self.number)
            world.count("sectors read", count)
        elif roll < 0.85:
            write = model.begin_write(first, count)
            data = b"".join(content(sector, write.number) for sector in range(first, first + count))
            flags = rng.choice([0, 0, 0, Nbd.FUA])
            error, _ = nbd.ask(Nbd.WRITE, first * SECTOR, count * SECTOR, data, flags=flags)
            if not self.is_told(error, flags & Nbd.FUA, f"a write of {count} sectors at {first}"):
                model.acknowledge(write, first, count)
                self.acknowledged(write, flags & Nbd.FUA)
            world.count("writes")
        elif roll < 0.93:
            kind = rng.choice([Nbd.ZEROES, Nbd.TRIM])
            write = model.begin_write(first, count, zero=True)
            flags = rng.choice([0, 0, Nbd.FUA]) | (rng.choice([0, Nbd.NO_HOLE]) if kind == Nbd.ZEROES else 0)
            error, _ = nbd.ask(kind, first * SECTOR, count * SECTOR, flags=flags)
            what = f"a {'trim' if kind == Nbd.TRIM else 'write of zeroes'} of {count} sectors at {first}"
            if not self.is_told(error, flags & Nbd.FUA, what):
                model.acknowledge(write, first, count, sure=kind == Nbd.ZEROES)
                self.acknowledged(write, flags & Nbd.FUA)
            world.count("zeroes and trims")
        else:
            self.flush(nbd)

    def acknowledged(self, write, durable):
        """For checkers that ask more of what is durable."""

    def well(self, error, what):
        if error:
            raise Wrong(f"{what} failed with {error} {self.world.story()}")

    def flush(self, nbd):
        world, before, certain = self.world, self.world.losses, self.world.certain
        begun = world.model.begin()
        error, _ = nbd.ask(Nbd.FLUSH)
        world.count("flushes")
        if self.is_told(error, True, "a flush"):
            return None
        if self.told < certain:
            raise Wrong(f"a flush succeeded, and nobody told this connection that the store had lost writes {world.story()}")
        if world.store == "nbd" and before == world.losses:
            world.model.flush_ended(begun)
        return None

    def is_told(self, error, durable, what):
        """Whether this error tells of a loss that the connection met, as a flush does, also one that comes with a write."""
        world = self.world
        if not error:
            return False
        if world.store != "nbd" or not durable:
            self.well(error, what)
        # A store that is killed can take a flush that is under way with it beside what was answered: that is two losses and more.
        self.errors += 1
        if self.errors > 3 * (world.losses - self.since):
            raise Wrong(f"{what} failed with {error}, and the store had lost nothing that was not told {world.story()}")
        self.told = world.losses
        world.count("losses told")
        return True
