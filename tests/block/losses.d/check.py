"""Is what the writers left on a mounted image something that was there at one moment? And is all there that had to be?

Two bounds. What was *safe* must be there. And if any later step is in the image, all that was reported before that step began must
be there too, or the image is of no moment at all; this asks nobody but the image."""

import contextlib
import re
import shutil
import sqlite3
import subprocess
import time
from pathlib import Path

import plan
import processes


class Found:
    """What is wrong with an image, by kind: a list of (kind, words)."""

    def __init__(self):
        self.problems = []

    def add(self, kind, words):
        self.problems.append((kind, words))

    def kinds(self):
        return {kind for kind, _ in self.problems}


class Writer:
    """One writer's traces. `evidence`: the steps of which something is in the image. `check(required)`: what is missing or wrong when
    all steps up to `required` must be there."""

    evidence = ()

    def __init__(self, at, seed, who, issued):
        self.at, self.seed, self.who, self.issued = at, seed, who, issued
        # Wrong whatever was required.
        self.wrong = []


class Files(Writer):
    def __init__(self, at, seed, who, issued):
        super().__init__(at, seed, who, issued)
        self.at = at / who
        self.steps = {}
        for step in plan.file_steps(seed, who):
            if step.number > issued:
                break
            self.steps[step.number] = step
        self._histories()
        self.evidence = set()
        self._look()

    def _histories(self):
        """Each object's states: (the step that made it, the state). None: not there."""
        self.names = {name: [(0, None)] for name in range(plan.NAMES)}
        self.blocks = {number: [0] for number in range(plan.BLOCKS)}
        self.appends, self.groups = [], {}
        for number, step in self.steps.items():
            if step.kind == "put":
                self.names[step.name].append((number, (step.folder, number)))
            elif step.kind == "delete":
                self.names[step.name].append((number, None))
            elif step.kind == "move":
                self.names[step.name].append((number, (step.folder, self.names[step.name][-1][1][1])))
            elif step.kind == "append":
                self.appends.append(number)
            elif step.kind == "blocks":
                for one in step.blocks:
                    self.blocks[one].append(number)
            else:
                self.groups[number] = None
                if step.old:
                    self.groups[step.old] = number

    def _read(self, path):
        try:
            return path.read_bytes()
        except FileNotFoundError:
            return None
        except OSError as e:
            self.wrong.append(f"{path.relative_to(self.at.parent)}: {e}")
            return b""

    def _look(self):
        self.seen_names = {}
        for name in range(plan.NAMES):
            found = []
            for folder in range(plan.FOLDERS):
                data = self._read(self.at / f"s{folder}" / f"f{name}")
                if data is None:
                    continue
                head = re.match(rb"larder (\S+) (\d+) (\d+)\n", data)
                step = int(head[2]) if head and head[1].decode() == self.who else -1
                one = self.steps.get(step)
                whole = one and one.kind == "put" and one.name == name and data == plan.text(self.seed, self.who, step, one.size)
                if not whole:
                    self.wrong.append(f"{self.who}/s{folder}/f{name}: {len(data)} bytes that nobody wrote (step {step})")
                found.append((folder, step if whole else -1))
            if len(found) > 1:
                self.wrong.append(f"{self.who}: f{name} is in {len(found)} folders")
            state = found[0] if found else None
            self.seen_names[name] = state
            made = [number for number, one in self.names[name] if one == state]
            if made:
                self.evidence.add(made[0])
        self._look_blocks()
        self.log = self._read(self.at / "log")
        # Only what is whole is evidence.
        offset = 0
        self.log_holds = 0
        for number in self.appends:
            piece = plan.record(self.seed, self.who, number, self.steps[number].size)
            if (self.log or b"")[offset : offset + len(piece)] != piece:
                break
            offset += len(piece)
            self.log_holds = number
            self.evidence.add(number)
        for number in self.groups:
            if (self.at / f"g{number}").exists():
                self.evidence.add(number)

    def _look_blocks(self):
        self.sectors = {}
        data = self._read(self.at / "blocks") or b""
        if len(data) != plan.BLOCKS * plan.BLOCK:
            self.wrong.append(f"{self.who}/blocks has {len(data)} bytes")
        for number in range(plan.BLOCKS):
            here = data[number * plan.BLOCK : (number + 1) * plan.BLOCK]
            steps = []
            for i in range(plan.BLOCK // plan.SECTOR):
                sector = here[i * plan.SECTOR : (i + 1) * plan.SECTOR]
                head = re.match(rb"larder \S+ \d+ (\d+) ", sector)
                step = int(head[1]) if head else -1
                if step not in self.blocks[number] or sector != plan.block(self.who, number, step)[: plan.BLOCK][i * plan.SECTOR : (i + 1) * plan.SECTOR]:
                    self.wrong.append(f"{self.who}/blocks, block {number}, sector {i}: nobody wrote that")
                    step = -1
                else:
                    self.evidence.add(step)
                steps.append(step)
            self.sectors[number] = steps

    def check(self, required):
        out = []
        for name, history in self.names.items():
            last = max(i for i, (number, _) in enumerate(history) if number <= required)
            allowed = [state for _, state in history[last:]]
            seen = self.seen_names[name]
            if seen not in allowed and (seen is None or seen[1] != -1):
                out.append(f"{self.who}: f{name} is {seen}, and step {history[last][0]} left {history[last][1]}")
        for number, steps in self.blocks.items():
            least = max(step for step in steps if step <= required)
            old = [seen for seen in self.sectors[number] if 0 <= seen < least]
            if old:
                out.append(f"{self.who}/blocks, block {number}: of step {min(old)}, and step {least} had synced it")
        appended = max((n for n in self.appends if n <= required), default=0)
        if self.log_holds < appended:
            out.append(f"{self.who}/log holds step {self.log_holds} last, and step {appended} was synced")
        for number, removed in self.groups.items():
            group = self.at / f"g{number}"
            if removed is not None and removed <= required:
                if group.exists():
                    out.append(f"{self.who}/g{number} is there, and step {removed} had removed it")
            elif number <= required and removed is None:
                for i in range(plan.GROUP_FILES):
                    if self._read(group / f"{i}") != plan.group_file(self.seed, self.who, number, i):
                        out.append(f"{self.who}/g{number}/{i} is not what step {number} had synced")
        return out


class Database(Writer):
    """A database that holds all transactions up to one."""

    holds = 0

    def rows(self, history, accounts):
        """Looks at the rows: history is 1…n, and the accounts are what n transactions leave."""
        self.holds = len(history)
        if history != list(range(1, self.holds + 1)):
            self.wrong.append(f"{self.who}: of {self.holds} transactions some are missing between others")
        elif accounts != plan.balances(self.seed, self.who, self.holds):
            self.wrong.append(f"{self.who}: the accounts are not what {self.holds} transactions leave")
        self.evidence = {self.holds}

    def check(self, required):
        if self.holds < required:
            return [f"{self.who} holds transaction {self.holds} last, and {required} was committed"]
        return []


class Sqlite(Database):
    def __init__(self, at, seed, who, issued):
        super().__init__(at, seed, who, issued)
        path = at / f"{who}.db"
        try:
            # It would make one.
            if not path.exists():
                raise sqlite3.DatabaseError("is not there")
            with contextlib.closing(sqlite3.connect(path)) as db:
                verdict = db.execute("PRAGMA integrity_check").fetchall()
                if verdict != [("ok",)]:
                    raise sqlite3.DatabaseError(f"integrity_check: {verdict[:3]}")
                history = [step for step, in db.execute("SELECT step FROM history ORDER BY step").fetchall()]
                self.rows(history, [held for held, in db.execute("SELECT balance FROM accounts ORDER BY id").fetchall()])
        except (sqlite3.Error, OSError) as e:
            self.wrong.append(f"{who}.db: {e}")


class Postgres(Database):
    """`query`: runs SQL on the recovered server; None: it does not start."""

    def __init__(self, query, seed, who, issued):
        super().__init__(None, seed, who, issued)
        if query is None:
            self.wrong.append(f"{who}: the server does not start")
            return
        try:
            history = [int(step) for step in query(f"SELECT step FROM history_{who} ORDER BY step").split()]
            self.rows(history, [int(held) for held in query(f"SELECT balance FROM accounts_{who} ORDER BY id").split()])
        except (subprocess.CalledProcessError, ValueError) as e:
            self.wrong.append(f"{who}: {getattr(e, 'stderr', e)}")


class Server:
    """PostgreSQL on the image, to recover what it left there."""

    def __init__(self, data, binaries, run):
        self.binaries, self.run, self.trouble = binaries, run, None
        shutil.rmtree(run, ignore_errors=True)
        run.mkdir()
        shutil.chown(run, "postgres", "postgres")
        (data / "postmaster.pid").unlink(missing_ok=True)
        with open(run / "log", "wb") as log:
            self.process = subprocess.Popen([f"{binaries}/postgres", "-D", data, "-k", run, "-c", "listen_addresses="],
                                            stdin=subprocess.DEVNULL, stdout=log, stderr=log, user="postgres", group="postgres",
                                            extra_groups=[])
        end = time.monotonic() + 120
        while subprocess.run([f"{binaries}/pg_isready", "-q", "-h", run]).returncode != 0:
            if self.process.poll() is not None or time.monotonic() > end:
                self.trouble = (run / "log").read_text(errors="replace")[-600:]
                break
            time.sleep(0.05)
        if not self.trouble:
            done = subprocess.run([f"{binaries}/pg_amcheck", "-h", run, "-U", "postgres", "--all", "--heapallindexed",
                                   "--install-missing"], capture_output=True, text=True)
            if done.returncode != 0:
                self.trouble = f"pg_amcheck: {(done.stdout + done.stderr)[-600:]}"

    def query(self, text):
        return subprocess.run([f"{self.binaries}/psql", "-X", "-q", "-t", "-A", "-h", self.run, "-U", "postgres", "-d", "postgres",
                               "-c", text], capture_output=True, text=True, check=True).stdout

    def close(self):
        if self.process.poll() is None:
            # Fast shutdown.
            self.process.send_signal(2)
            try:
                self.process.wait(60)
            except subprocess.TimeoutExpired:
                processes.end(self.process)


def look(at, seed, history, safe, found, postgres=None, scratch=None):
    """Looks at a mounted image. `safe`: the number of lines of the history that were safe. `postgres`: where its programs are."""
    writers, server, trouble = [], None, None
    names = history.writers()
    try:
        if any(who.startswith("postgres") for who in names):
            try:
                server = Server(at / "pg", postgres, Path(scratch) / "run")
            except OSError as e:
                trouble = str(e)
            else:
                trouble = server.trouble
        for who in names:
            # Step 0 is what a writer begins with.
            if not any(what == "C" for _, what, one, _ in history.lines if one == who):
                continue
            issued = history.issued.get(who, 0)
            if who.startswith("files"):
                one = Files(at, seed, who, issued)
            elif who.startswith("postgres"):
                one = Postgres(server.query if server and server.process.poll() is None else None, seed, who, issued)
                if trouble:
                    one.wrong.append(f"PostgreSQL: {trouble}")
            else:
                one = Sqlite(at, seed, who, issued)
            writers.append(one)
    finally:
        if server:
            server.close()
    # What is there says how late the image is at least.
    later = max((history.began.get((one.who, step), 0) for one in writers for step in one.evidence), default=0)
    # A writer that has not begun may have left anything; so may have none of its steps.
    begun = history.done(max(safe, later))
    writers = [one for one in writers if one.who in begun]
    for one in writers:
        for words in one.wrong:
            found.add("file" if isinstance(one, Files) else "database", words)
    for kind, bound in (("missing", safe), ("order", later)):
        done = history.done(bound)
        for one in writers:
            broken = isinstance(one, Database) and one.wrong
            if one.who in done and not broken:
                for words in one.check(done[one.who]):
                    found.add(kind, words)
    return {"lines": len(history.lines), "safe": safe, "later": later}
