#!/usr/bin/env python3
"""Writers on a mounted file system, each a process that never pauses: files, SQLite, PostgreSQL. Each says `I WHO STEP` before a step
and `C WHO STEP` when its fsync or COMMIT has returned, a line each, on the same standard output. A writer ends at the first error.

    writers.py --at DIR --seed N --who files1,wal1,delete1,postgres1 [--postgres BIN,TEMPLATE,RUN]
"""

import argparse
import os
import shutil
import signal
import sqlite3
import subprocess
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
import plan  # noqa: E402


def say(what, who, step):
    os.write(1, f"{what} {who} {step}\n".encode())


def synced(path, data=None, flags=os.O_RDONLY, only_data=False):
    fd = os.open(path, flags, 0o644)
    try:
        if data is not None:
            left = memoryview(data)
            while left:
                left = left[os.write(fd, left):]
        (os.fdatasync if only_data else os.fsync)(fd)
    finally:
        os.close(fd)


def all_synced(at):
    """`sync` tells nobody of errors; the fsync behind it does."""
    os.sync()
    synced(at)


def files(at, seed, who):
    at.mkdir()
    for folder in range(plan.FOLDERS):
        (at / f"s{folder}").mkdir()
    create = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
    synced(at / "blocks", b"".join(plan.block(who, i, 0) for i in range(plan.BLOCKS)), create)
    synced(at / "log", b"", create)
    all_synced(at)
    say("C", who, 0)
    blocks = os.open(at / "blocks", os.O_WRONLY)
    noise = os.open(at / "noise", create)
    for step in plan.file_steps(seed, who):
        say("I", who, step.number)
        os.pwrite(noise, bytes(8192), step.number * 7919 % 256 * 4096)
        if step.kind == "put":
            fresh = at / f"fresh{step.number}"
            synced(fresh, plan.text(seed, who, step.number, step.size), create)
            os.rename(fresh, at / f"s{step.folder}" / f"f{step.name}")
            synced(at / f"s{step.folder}")
            synced(at)
        elif step.kind == "delete":
            os.unlink(at / f"s{step.folder}" / f"f{step.name}")
            synced(at / f"s{step.folder}")
        elif step.kind == "move":
            new = at / f"s{step.folder}" / f"f{step.name}"
            os.rename(at / f"s{step.old}" / f"f{step.name}", new)
            synced(new)
            synced(at / f"s{step.folder}")
            synced(at / f"s{step.old}")
        elif step.kind == "append":
            synced(at / "log", plan.record(seed, who, step.number, step.size), os.O_WRONLY | os.O_APPEND)
        elif step.kind == "blocks":
            for number in step.blocks:
                os.pwrite(blocks, plan.block(who, number, step.number), number * plan.BLOCK)
            os.fdatasync(blocks)
        else:
            group = at / f"g{step.number}"
            group.mkdir()
            for i in range(plan.GROUP_FILES):
                (group / f"{i}").write_bytes(plan.group_file(seed, who, step.number, i))
            if step.old:
                shutil.rmtree(at / f"g{step.old}")
            all_synced(at)
        say("C", who, step.number)


def sqlite(at, seed, who):
    # Autocommit, so that BEGIN and COMMIT are where they are written.
    db = sqlite3.connect(at.with_name(f"{who}.db"), isolation_level=None)
    wal = who.startswith("wal")
    db.execute(f"PRAGMA journal_mode={'WAL' if wal else 'DELETE'}")
    # EXTRA: with DELETE, FULL does not sync the folder of the journal that was removed.
    db.execute(f"PRAGMA synchronous={'FULL' if wal else 'EXTRA'}")
    db.execute("PRAGMA wal_autocheckpoint=100")
    db.execute("BEGIN")
    db.execute("CREATE TABLE accounts(id INTEGER PRIMARY KEY, balance INTEGER)")
    db.execute("CREATE TABLE history(step INTEGER PRIMARY KEY, source INTEGER, target INTEGER, amount INTEGER, padding TEXT)")
    db.execute("CREATE INDEX by_padding ON history(padding)")
    db.executemany("INSERT INTO accounts VALUES(?, ?)", [(i, plan.BALANCE) for i in range(plan.ACCOUNTS)])
    db.execute("COMMIT")
    all_synced(at.parent)
    say("C", who, 0)
    step = 0
    while True:
        step += 1
        one = plan.Transfer(seed, who, step)
        say("I", who, step)
        db.execute("BEGIN IMMEDIATE")
        db.execute("UPDATE accounts SET balance = balance - ? WHERE id = ?", (one.amount, one.source))
        db.execute("UPDATE accounts SET balance = balance + ? WHERE id = ?", (one.amount, one.target))
        db.execute("INSERT INTO history VALUES(?, ?, ?, ?, ?)", (step, one.source, one.target, one.amount, one.padding))
        db.execute("UPDATE history SET padding = '' WHERE step = ?", (step - plan.KEPT,))
        db.execute("COMMIT")
        say("C", who, step)


def postgres(binaries, run, seed, who):
    session = subprocess.Popen([f"{binaries}/psql", "-X", "-h", run, "-U", "postgres", "-v", "ON_ERROR_STOP=1", "-d", "postgres"],
                               stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1)

    def execute(text):
        session.stdin.write(text + "\n")
        session.stdin.flush()
        while True:
            line = session.stdout.readline()
            if not line:
                raise SystemExit(f"{who}: the session has ended")
            if line.strip() == "COMMIT":
                return

    execute(f"BEGIN; CREATE TABLE accounts_{who}(id int PRIMARY KEY, balance bigint); "
            f"CREATE TABLE history_{who}(step int PRIMARY KEY, source int, target int, amount int, padding text); "
            f"CREATE INDEX ON history_{who}(left(padding, 40)); "
            f"INSERT INTO accounts_{who} SELECT i, {plan.BALANCE} FROM generate_series(0, {plan.ACCOUNTS - 1}) i; COMMIT;")
    say("C", who, 0)
    step = 0
    while True:
        step += 1
        one = plan.Transfer(seed, who, step)
        say("I", who, step)
        execute(f"BEGIN; UPDATE accounts_{who} SET balance = balance - {one.amount} WHERE id = {one.source}; "
                f"UPDATE accounts_{who} SET balance = balance + {one.amount} WHERE id = {one.target}; "
                f"INSERT INTO history_{who} VALUES({step}, {one.source}, {one.target}, {one.amount}, '{one.padding}'); "
                f"UPDATE history_{who} SET padding = '' WHERE step = {step - plan.KEPT}; COMMIT;")
        say("C", who, step)


def start_postgres(at, given):
    """A server on a copy of the template, on the file system; its socket is elsewhere."""
    binaries, template, run = given.split(",")
    os.makedirs(run, exist_ok=True)
    shutil.chown(run, "postgres", "postgres")
    subprocess.run(["cp", "-a", template, at / "pg"], check=True)
    os.sync()
    os.chmod(at, 0o755)
    # Not to the writers' output.
    log = open(Path(run) / "log", "wb")
    server = subprocess.Popen([f"{binaries}/postgres", "-D", at / "pg", "-k", run, "-c", "listen_addresses="], stdin=subprocess.DEVNULL,
                              stdout=log, stderr=log, user="postgres", group="postgres", extra_groups=[])
    while server.poll() is None:
        if subprocess.run([f"{binaries}/pg_isready", "-q", "-h", run]).returncode == 0:
            return run
        time.sleep(0.1)
    raise SystemExit("PostgreSQL does not come up: " + (Path(run) / "log").read_text()[-1000:])


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--at", type=Path, required=True)
    parser.add_argument("--seed", required=True)
    parser.add_argument("--who", required=True)
    parser.add_argument("--postgres")
    options = parser.parse_args()
    who = options.who.split(",")
    run = None
    if any(one.startswith("postgres") for one in who):
        run = start_postgres(options.at, options.postgres)
    children = []
    for one in who:
        child = os.fork()
        if child == 0:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            try:
                if one.startswith("files"):
                    files(options.at / one, options.seed, one)
                elif one.startswith("postgres"):
                    postgres(options.postgres.split(",")[0], run, options.seed, one)
                else:
                    sqlite(options.at / one, options.seed, one)
            except BaseException as e:  # noqa: BLE001: whatever it was, it is over
                print(f"{one}: {e!r}", file=sys.stderr, flush=True)
            finally:
                os._exit(1)
        children.append(child)
    for child in children:
        os.waitpid(child, 0)


if __name__ == "__main__":
    main()
