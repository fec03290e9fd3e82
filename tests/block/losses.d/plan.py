"""What each writer writes, step by step. The writer and the check of an image both ask here, so nothing but the seed passes between
them. A step ends with an fsync (or COMMIT); the next one begins after it has returned."""

import random

NAMES, FOLDERS, BLOCKS, BLOCK, SECTOR = 12, 3, 48, 4096, 512
GROUP_FILES = 10
ACCOUNTS, BALANCE = 60, 1000
# So many transactions later the padding of a row is dropped, so that pages become free.
KEPT = 40


def rng(seed, who, step):
    return random.Random(f"{seed} {who} {step}")


def text(seed, who, step, size):
    """The bytes of a file: a line that says which, and random bytes that anybody can make again."""
    return f"larder {who} {step} {size}\n".encode() + random.Random(f"{seed} {who} {step} bytes").randbytes(size)


def record(seed, who, step, size):
    """A piece of the file that is appended to."""
    return text(seed, who, step, size) + b"\n"


def block(who, number, step):
    """4 KiB of the file that is overwritten in place; each sector says which write it is of."""
    return b"".join(f"larder {who} {number} {step} {i} ".encode().ljust(SECTOR, b".") for i in range(BLOCK // SECTOR))


def group_file(seed, who, step, i):
    return text(seed, who, f"{step}.{i}", rng(seed, who, f"{step}.{i}").choice((0, 100, 5000, 20_000)))


class Step:
    """One step of a writer of files: `kind` and what it needs."""

    def __init__(self, number, kind, **what):
        self.number, self.kind = number, kind
        self.__dict__.update(what)


def file_steps(seed, who):
    """The steps of a writer of files, without end. Step 0 makes the folders and the file of blocks."""
    places, group = {}, None
    number = 0
    while True:
        number += 1
        r = rng(seed, who, number)
        roll, name = r.random(), r.randrange(NAMES)
        if roll < 0.35 or roll < 0.6 and name not in places:
            folder = places.get(name, r.randrange(FOLDERS))
            places[name] = folder
            size = r.choice((0, 1, 700, 4096, 9000, 30_000, 30_000, 150_000))
            yield Step(number, "put", name=name, folder=folder, size=size)
        elif roll < 0.45:
            yield Step(number, "delete", name=name, folder=places.pop(name))
        elif roll < 0.6:
            old = places[name]
            places[name] = (old + r.randrange(1, FOLDERS)) % FOLDERS
            yield Step(number, "move", name=name, old=old, folder=places[name])
        elif roll < 0.75:
            yield Step(number, "append", size=r.choice((10, 300, 3000, 12_000)))
        elif roll < 0.95:
            yield Step(number, "blocks", blocks=r.sample(range(BLOCKS), r.choice((1, 1, 2, 6))))
        else:
            yield Step(number, "group", old=group)
            group = number


class Transfer:
    """One transaction of a writer to a database: an amount from one account to another, and a row that says so."""

    def __init__(self, seed, who, number):
        r = rng(seed, who, number)
        self.number = number
        self.source, self.target = r.sample(range(ACCOUNTS), 2)
        self.amount = r.randrange(1, 50)
        self.padding = random.Random(f"{seed} {who} {number} bytes").randbytes(r.choice((0, 20, 400, 3000))).hex()


def balances(seed, who, transactions):
    """What the accounts hold after so many."""
    held = [BALANCE] * ACCOUNTS
    for number in range(1, transactions + 1):
        one = Transfer(seed, who, number)
        held[one.source] -= one.amount
        held[one.target] += one.amount
    return held
