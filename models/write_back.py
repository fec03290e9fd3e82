#!/usr/bin/env python3
"""Executable model of write-back: any, ordered, journaled. No dependencies. The machines that follow it are in
crates/engine/src/block/writeback.

A sector holds the number of the write that filled it last, so every check is exact. Six parts:

World   one volume, in one order. Clients on several connections, overlapping writes that wait for one another, delayed
        acknowledgements, FLUSH, reads and fills of clean slots; windows or epochs; a journal device that crashes apart from the
        store; a log that fails or is switched off while it is dirty; writes around the log in `any`.
          cache log : a record is 0 under way, 1 completed (volatile), 2 durable. Power cut: any subset of 0 and 1 survives.
          devices   : durable blocks + unflushed writes. A crash leaves each block at its old value or any unflushed one.
Chain   one log of few segments for two volumes: reuse, frontiers, parking, runs, rot, volumes that are attached anew. Destaging
        is one step here.
Marker  attach, detach, carrying, epochs, recover: every crash point, exhaustively.
Setback an older marker or an older image of the cache is put back while the daemon is down, exhaustively.
Shards  writes of several parts over two shards, a log with little room, destaging beside fetches and fills: everything ends.
pace    not a promise but a rate: where the acknowledged position is raised, and what it costs.

A rule is switched off by its name; then some history must break a promise, in every order that names the rule. A failed or closed log, or a
write around the log, ends a history at the next start, where only what was promised is compared.
Not modelled: time, bounds and the throttle's formula; TRIM and ZERO; torn sectors (a sector is the unit); errors of single ranges; segment
footers, filled-up parked segments, windows on two volumes; markers that are absent or unreachable; leases, a live second holder;
switching back after through.
The run exits 0 if all rules together break nothing and each rule alone is needed.
usage: write_back.py [histories] [steps]"""
import random, sys

SECTORS, CONNECTIONS = 6, 3
ORDERS = {'a': 'any', 'o': 'ordered, completion', 'f': 'ordered, flush', 'j': 'journaled'}
RULES = {  # name: (orders that need it, what it says)
 'wal':       ('aofj', 'a record is destaged only when it is durable on the cache'),
 'dep':       ('of',   'a window holds only records whose dependency is at or below the frontier'),
 'global':    ('o',    'the dependency counts completions on every connection, not only one\'s own'),
 'depnow':    ('o',    'the dependency is read when the sequence is assigned, not when the request is read'),
 'barrier':   ('of',   'the store is flushed between two windows'),
 'free':      ('aofj', 'log space is freed only after the store was flushed'),
 'frontier':  ('of',   'the frontier is durable on the cache before the next window is issued'),
 'rewrite':   ('aofj', 'a failed store flush rewrites the whole window, a second flush proves nothing'),
 'lives':     ('a',    'every flusher learns that the store lost writes, not only the first to flush'),
 'ackorder':  ('aofj', 'writes are acknowledged in log order'),
 'prefix':    ('aofj', 'recovery stops at the first hole of the tail'),
 'visible':   ('o',    'a write is visible to reads when it is acknowledged, not before'),
 'flushlog':  ('aofj', 'FLUSH waits for a flush of the cache that began after its writes completed'),
 'startflush': ('aofj', 'a start flushes the log before it counts what it recovered as durable'),
 'around':    ('a',    'a write goes around the log only where no record lies behind the durable frontier'),
 'closed':    ('aofj', 'a log that failed has its frontier in the marker'),
 'cleanfirst': ('aj',  'no write goes through before the marker is clean'),
 'through':   ('ofj',  'no write goes around the log while anything is dirty'),
 'jcommit':   ('j',    'the journal is durable before the first write in place'),
 'jsum':      ('j',    'the commit record covers the checksum of every piece'),
 'jlast':     ('j',    'a start takes the last sequence of the epoch that it replayed as its frontier'),
 'jflush':    ('j',    'who replays a journal makes it durable before reading it'),
 'jafter':    ('j',    'who replayed a journal flushes the store before giving the journal up'),
 'jhome':     ('j',    'writes in place are flushed before the journal is reused'),
 'jstart':    ('j',    'a start replays a committed journal before it reuses it'),
 'jslots':    ('j',    'a replay drops the clean slots under what it writes'),
 'atomic':    ('j',    'an epoch is applied through the journal, not in place'),
 'cut':       ('j',    'an epoch ends at a flush point, not in the middle of the log at will'),
 'fillbehind': ('aofj', 'a fill takes its bytes from below the overlay, or from its own window'),
 'closedslots': ('aofj', 'a start behind a log that failed drops every slot of the volume'),
 'fence':     ('aofj', 'dirty data of an older generation than the marker\'s is never destaged, nor its journal replayed'),
 'coalesce':  ('o',    'at completion grain, versions of different windows are not merged'),
}

class Broken(Exception): pass

class Write:
    def __init__(s, sectors, connection, known, dep):
        s.sectors, s.connection, s.known, s.dep = sectors, connection, known, dep
        s.id, s.state, s.acked = 0, 0, False
        s.direct, s.life, s.settled, s.lost = False, 0, False, set()      # of a write that went to the store itself

class Device:
    """The store or the journal's device. `lives` counts the crashes that may have lost something."""
    def __init__(s, rng, told_once): s.rng, s.told_once, s.durable, s.pending, s.lives, s.doubt = rng, told_once, {}, [], 0, False
    def write(s, k, v): s.pending.append((k, v))
    def see(s, k):
        for kk, v in reversed(s.pending):
            if kk == k: return v
        return s.durable.get(k, 0)
    def flush(s, since):
        """True if everything written since life `since` is durable. `told_once`: the error goes to whoever flushes first."""
        if s.told_once and s.doubt: s.doubt = False; return False
        if not s.told_once and since != s.lives: return False
        s.durable.update(s.pending); s.pending = []; return True
    def crash(s):
        if not s.pending: return
        s.lives += 1; s.doubt = True
        for k in sorted({k for k, _ in s.pending}, key=str):
            s.durable[k] = s.rng.choice([s.durable.get(k, 0)] + [v for kk, v in s.pending if kk == k])
        s.pending = []

class World:
    def __init__(s, seed, order, off=None):
        s.rng = random.Random(seed); s.order, s.off, s.over = order, off, False
        s.store, s.journal = Device(s.rng, off == 'lives'), Device(s.rng, False)
        s.log, s.waiting, s.slots, s.next = [], [], {}, 1   # log: all writes in sequence; those before F are freed
        s.F = s.P = s.sent = 0              # frontier; the frontier that a start would find; how far windows were sent
        s.promised = s.base = s.trust = 0   # covered by an answered FLUSH; counts as such for dep; believed durable
        s.ackpos, s.flushes, s.known, s.cuts = 0, [], set(), {0}
        s.epoch, s.gen, s.marker = 0, 1, 'dirty'
        s.closing, s.passing = '', False    # '' | 'switch' | 'failed'; writes go through
        s.may_close = s.rng.random() < (.9 if off == 'closed' else .25)
        s.may_bypass = not s.on('through') or (order == 'a' and s.rng.random() < .4)
        s.dest = s.destager()
    def on(s, rule): return s.off != rule
    def overlay(s, k, since, end=None): return [w.id for w in s.log[since:end] if k in w.sectors and not w.direct]
    def clean(s, k):
        """What lies below the overlay. Behind a log that failed the slots are given up: their lines cannot be distrusted on flash any more."""
        return s.store.see(k) if s.closing == 'failed' else s.slots.get(k, s.store.see(k))
    def last(s, k, writes): return max([w.id for w in writes if k in w.sectors], default=0)
    # ---- what the clients do ----
    def issue(s):
        if s.closing and not s.passing: return                            # clients wait
        first = s.rng.randrange(SECTORS)
        sectors = set(range(first, min(SECTORS, first + s.rng.choice([1, 1, 2, 3])))); c = s.rng.randrange(CONNECTIONS)
        s.waiting.append(Write(sectors, c, frozenset(s.known), s.dependency(c)))
    def dependency(s, c):
        if s.order == 'o':
            return s.ackpos if s.on('global') else max([i + 1 for i, w in enumerate(s.log) if w.acked and w.connection == c], default=0)
        return max(s.promised, s.base) if s.order == 'f' else 0
    def admit(s):
        for i, w in enumerate(s.waiting):
            if any(v.sectors & w.sectors for v in s.waiting[:i] + [v for v in s.log if not v.acked]): continue
            if s.closing and not s.passing: return
            del s.waiting[i]; w.id = s.next; s.next += 1
            if s.on('depnow'): w.dep = s.dependency(w.connection)
            if s.passing or s.may_bypass and s.rng.random() < .3 and s.may_go_around(w):
                w.direct, w.state, w.acked, w.life = True, 2, True, s.store.lives
                for k in w.sectors: s.engine(k, w.id)
                if s.order == 'o': s.known |= {w.id}
            s.log.append(w); return
    def may_go_around(s, w):
        behind = s.P if s.order == 'a' and s.on('around') else s.F
        return s.F < len(s.log) and not any(v.sectors & w.sectors for v in s.log[behind:])
    def complete(s):
        todo = [w for w in s.log if w.state == 0]
        if todo: s.rng.choice(todo).state = 1
    def ack(s):
        """Throttled: any time after completion. Overlay, position and answer change together."""
        for w in s.log:
            if w.acked: continue
            if w.state >= 1 and (s.on('ackorder') or s.rng.random() < .5):
                w.acked = True; s.known |= {w.id} if s.order == 'o' else set()
                if s.rng.random() < .3: break
            elif s.on('ackorder'): break
        s.ackpos = next((i for i, w in enumerate(s.log) if not w.acked), len(s.log))
    def flush(s): s.flushes.append(s.ackpos)
    def devflush(s):
        """A flush of the cache device ends; FLUSH is answered."""
        need = 2 if s.on('flushlog') else 1
        if s.on('flushlog') and s.closing != 'failed':
            for w in s.log: w.state = 2 if w.state else 0
        durable = next((i for i, w in enumerate(s.log) if w.state < need), len(s.log))
        if s.closing == 'failed':                                        # then the store answers
            if s.on('closed') and s.flushes: s.P = max(s.P, s.F)
            durable = max(durable, s.P if s.on('closed') else s.F)
        for p in [p for p in s.flushes if p <= durable]:
            s.flushes.remove(p)
            if not s.flush_direct(p): continue                           # FLUSH fails, the client knows
            s.promised = max(s.promised, p); s.cuts.add(p)
            if s.order != 'o': s.known |= {w.id for w in s.log[:p]}
    def flush_direct(s, p):
        loose = [w for w in s.log[:p] if w.direct and not w.settled]
        ok = not loose or s.store.flush(min(w.life for w in loose))
        for w in loose:
            if ok: w.settled = True
            elif w.life != s.store.lives: w.settled, w.sectors = True, w.sectors - w.lost      # this much the client was told
        return ok
    def read(s):
        k = s.rng.randrange(SECTORS)
        over = [w.id for w in s.log[s.F:] if k in w.sectors and not w.direct and (w.acked or not s.on('visible'))]
        seen = max(over, default=s.clean(k))
        fresh = max([w.id for w in s.log if k in w.sectors - w.lost and w.acked], default=0)
        if seen < fresh: raise Broken(f'read of sector {k} gives {seen}, acknowledged {fresh}')
        if s.order == 'o' and seen: s.known.add(seen)
        if s.closing != 'failed' and s.rng.random() < .5: s.slots[k] = s.clean(k) if s.on('fillbehind') else seen
    # ---- destaging: a generator, one step a time; a crash drops it ----
    def engine(s, k, v):
        """An ordinary write-through change: the slot is distrusted, then the store written, then perhaps the slot."""
        if s.closing == 'failed': return s.store.write(k, v)              # the cache device takes nothing more
        s.slots.pop(k, None); s.store.write(k, v)
        if s.rng.random() < .3: s.slots[k] = v
    def destager(s):
        s.sent, todo, since = 0, [], s.store.lives; yield
        if s.order == 'j' and s.on('jstart'):
            since, end = s.store.lives, s.replay(); yield
            while s.on('jafter') and not s.store.flush(since): since = s.store.lives; s.replay(); yield
            s.F = s.P = max(s.F, min(end, len(s.log)))
        while True:
            top = s.may_destage()
            if s.closing and s.F == len(s.log):
                if not s.passing and s.rng.random() < .2:                               # the marker may be slow
                    s.passing = True
                    if s.on('cleanfirst'): s.marker = 'clean'
                yield; continue
            if s.passing: s.F = len(s.log); yield; continue
            if s.order == 'j':
                w = top
                if s.on('cut') and not s.closing:
                    w = max([c for c in s.cuts if c <= top], default=0)
                    if w <= s.F and top - s.F > 6: w = top                              # nobody flushes: cut by size
                if s.on('cut'): s.cuts.add(w)
                yield from s.epoch_to(w) if w > s.F else (None,)
                continue
            base = w = max(s.F, s.sent)                 # `sent` runs ahead of the frontier only where barriers are left out
            while w < top and (s.log[w].dep <= base or not s.on('dep')): w += 1
            if not s.on('coalesce') and w > base: w = top
            if not todo: since = s.store.lives
            window = s.window(base, w); todo += window
            yield from s.put(window); s.sent = w
            if not s.on('free'): s.F = s.P = w; yield
            if w > s.F and (s.on('barrier') or w == top or s.rng.random() < .3): yield from s.settle(todo, since); s.advance(w); todo = []
            yield
    def may_destage(s):
        if s.closing == 'failed': return s.ackpos                                       # from memory
        need = 2 if s.on('wal') else 1
        return next((i for i, w in enumerate(s.log) if w.state < need and i >= s.trust), len(s.log))
    def window(s, base, end):
        writes = [(k, w.id) for w in s.log[base:end] if not w.direct for k in sorted(w.sectors)]
        return writes if s.order == 'o' and s.on('coalesce') else sorted(dict(writes).items())   # the last version
    def put(s, pairs, device=None):
        for k, v in s.rng.sample(pairs, len(pairs)):
            if device: device.write(k, v)
            else: s.engine(k, v)
            yield
    def settle(s, pairs, since, device=None):
        d = device or s.store
        while not d.flush(since):
            since = d.lives
            yield from s.put(pairs, device) if s.on('rewrite') else (None,)
        yield
    def epoch_to(s, w):
        last = s.window(s.F, w); s.epoch += 1
        if s.on('atomic'):
            since = s.journal.lives
            pieces = [(('j', i), (s.gen, s.epoch, k, v)) for i, (k, v) in enumerate(last)]
            pieces += [(('j', 'commit'), (s.gen, s.epoch, len(last), hash(tuple(last)), w))]
            yield from s.put(pieces, s.journal)
            if s.on('jcommit'): yield from s.settle(pieces, since, s.journal)
        since = s.store.lives
        yield from s.put(last)
        if not s.on('free'): s.F = s.P = w; yield
        if s.on('jhome') or s.rng.random() < .3: yield from s.settle(last, since)
        s.advance(w); yield
    def advance(s, w):
        s.F = w
        at_once = s.order in 'of' and s.on('frontier') or s.order == 'j' and s.closing == 'failed'
        if s.closing != 'failed' or s.on('closed'):
            if at_once or s.rng.random() < .4: s.P = w
    def replay(s):
        """What `recover` and a start do with the journal. Answers the last sequence of the epoch."""
        if s.on('jflush'): s.journal.flush(s.journal.lives)
        c = s.journal.see(('j', 'commit'))
        if not c or (c[0] != s.gen and s.on('fence')): return 0
        got = [s.journal.see(('j', i)) for i in range(c[2])]
        last = sorted({p[2]: p[3] for p in got if p}.items())
        if s.on('jsum') and (not all(p and p[:2] == c[:2] for p in got) or hash(tuple(last)) != c[3]): return 0
        for k, v in s.rng.sample(last, len(last)):
            s.store.write(k, v)
            if s.on('jslots'): s.slots.pop(k, None)
        return c[4] if s.on('jlast') else 0
    # ---- failures ----
    def close(s):
        if s.may_close and not s.closing: s.closing = s.rng.choice(['switch', 'failed', 'failed'])
    def crash_store(s):
        s.store.crash()
        for w in s.log:
            if w.direct and not w.settled:
                w.lost |= {k for k in w.sectors if s.store.see(k) < w.id}
                for k in w.lost: s.slots.pop(k, None)
    def power(s):
        if s.rng.random() < .5: s.crash_store()
        if s.rng.random() < .5: s.journal.crash()
    def survivors(s, power):
        alive = [w.direct or w.state == 2 or (w.state == 1 and not power) or s.rng.random() < .5 for w in s.log]
        end = alive.index(False) if False in alive and s.on('prefix') else len(alive)
        return [w for w, a in zip(s.log[:end], alive) if a]
    def restart(s, power):
        if power: s.power()
        s.waiting = []
        if s.closing or s.may_bypass: return s.last_start(power)
        must = {w.id for i, w in enumerate(s.log) if i < s.promised or (w.acked and not power)}
        issued, s.log = s.log, s.survivors(power)
        for w in s.log: w.acked = True; w.state = 2 if power else max(w.state, 1)
        kept = {w.id for w in s.log}; n = len(s.log)
        if must - kept: raise Broken(f'{"power cut" if power else "kill"}: promised {sorted(must - kept)} lost')
        if s.log != issued[:n]: raise Broken('after recovery the image is no prefix of what was issued')
        s.F = s.P = min(s.P, n)
        for k in range(SECTORS):
            seen, want = max(s.overlay(k, s.F), default=s.clean(k)), s.last(k, s.log)
            if seen != want: raise Broken(f'after recovery sector {k} holds {seen}, the prefix has {want}')
        s.flushes = []; s.ackpos = n; s.trust = 0
        if s.on('startflush'):
            for w in s.log: w.state = 2
            s.promised = n
        else: s.trust, s.promised = n, n if power else min(s.promised, n)
        s.base = n                                                            # everything recovered counts as promised
        s.cuts = {c for c in s.cuts if c <= n} | {n}
        s.known = (s.known & kept) | (kept if s.order == 'o' else {w.id for w in s.log[:s.promised]})
        s.epoch += 1; s.dest = s.destager()
    def last_start(s, power):
        """The log failed, was switched off, or was gone around: what was promised is there. The history ends here."""
        weak = power or s.closing == 'failed'           # of a failed device, unflushed records may be gone at any start
        must = [(w, w.sectors if i < s.promised else w.sectors - w.lost) for i, w in enumerate(s.log) if i < s.promised or (w.acked and not weak)]
        log, frontier = s.survivors(weak), s.P
        if s.marker == 'clean': log = []
        elif s.order == 'j': frontier = max(frontier, s.replay())
        served = set(w.id for w in s.log[frontier:]) & set(w.id for w in log if not w.direct)
        if s.closing == 'failed' and s.on('closedslots'): s.slots = {}
        view = {k: max([i for i in s.overlay(k, frontier) if i in served], default=s.slots.get(k, s.store.see(k))) for k in range(SECTORS)}
        for w, sectors in must:
            for k in sectors:
                if view[k] < w.id: raise Broken(f'{"power cut" if power else "kill"}, log given up: sector {k} holds {view[k]}, promised {w.id}')
        if s.order in 'of' and s.on('through'): s.check_order(view, 'log given up')
        if s.order == 'j' and s.on('through') and not s.passing and not any(
                all(view[k] == s.last(k, s.log[:n]) for k in view) for n in range(len(s.log) + 1)):
            raise Broken('log given up: the image is no prefix of what was issued')
        s.over = True
    def check_order(s, image, when):
        by = {w.id: w for w in s.log}
        for v in set(image.values()) - {0}:
            if v not in by: raise Broken(f'{when}: an image with a write that never was')
            if by[v].direct and s.passing: continue
            for u in by[v].known:
                for k in by[u].sectors - by[u].lost:
                    if image[k] < u: raise Broken(f'{when}: {v} is there, {u}, complete before {v} was issued, is not')
    def lose_cache(s):
        s.power()
        if s.order == 'j' and s.marker != 'clean':
            for _ in range(s.rng.choice([1, 1, 2, 3])):           # recover, cut short by crashes, again
                s.replay(); s.power()
            s.replay()
            if not s.on('jafter'): s.crash_store()
        s.store.doubt = False; s.store.flush(s.store.lives)
        image = {k: s.store.see(k) for k in range(SECTORS)}
        if s.passing:
            for w in s.log[:s.promised]:
                for k in w.sectors:
                    if image[k] < w.id: raise Broken('cache lost behind a clean marker: a flushed write is gone')
        elif s.order == 'j':
            fits = [c for c in s.cuts if all(image[k] == s.last(k, s.log[:c]) for k in image)]
            if not fits: raise Broken('cache lost: the recovered image is no epoch boundary')
            if max(fits) < s.F: raise Broken('cache lost: older than what status called safe')
        elif s.order != 'a':                                      # `any` promises nothing here
            s.check_order(image, 'cache lost')
            for w in s.log[:s.F]:
                for k in w.sectors - w.lost:
                    if image[k] < w.id: raise Broken('cache lost: older than what status called safe')
        # the volume goes on elsewhere; then the cache comes back, or recover runs again
        direct = {k: s.next for k in range(SECTORS) if s.rng.random() < .5}
        for k, v in direct.items(): s.store.write(k, v)
        s.store.flush(s.store.lives); mine, marker = s.gen, s.gen + 1
        if mine < marker and not s.on('fence'):
            s.replay()
            for w in s.log[s.F:]:
                for k in w.sectors: s.store.write(k, w.id)
        for k, v in direct.items():
            if s.store.see(k) != v: raise Broken('the cache came back and overwrote what was written since')
    def play(s, steps):
        acts = [(s.issue, 5), (s.admit, 6), (s.complete, 6), (s.ack, 5), (s.devflush, 2), (s.flush, 1), (s.read, 3), (lambda: next(s.dest), 12),
                (s.close, .2), (s.crash_store, .15), (s.journal.crash, .1),
                (lambda: s.restart(False), .12), (lambda: s.restart(True), 1 if s.off == 'frontier' else .12)]     # (rare without)
        acts, weights = zip(*acts)
        for act in s.rng.choices(acts, weights, k=steps):
            act()
            if s.over: return
        s.lose_cache()

# ---- one log for two volumes: which segments, frontiers and batches count ----
SEGMENTS, BATCHES, VOLUMES, BLOCKS = 7, 3, 2, 3
STRICTNESS = {'skip': 'log, skips (any)', 'stop': 'log, stops (others)'}
CHAIN = {
 'repeat':    ('skip stop', 'every segment begins with a FRONTIER of all volumes'),
 'oldest':    ('skip stop', 'the chain starts at the oldest live segment that the newest FRONTIER names'),
 'fifo':      ('skip stop', 'segments are freed oldest first'),
 'saidfree':  ('skip stop', 'a segment is reused only when a durable FRONTIER no longer counts it as live'),
 'parked':    ('skip stop', 'a parked copy is durable before its original is freed'),
 'run':       ('skip stop', 'a batch is linked to its predecessor\'s run, and a later run voids what lies behind its beginning'),
 'damage':    ('skip stop', 'a hole below the position known durable is damage, not the end'),
 'gap':       ('skip stop', 'a volume with a gap in its sequences behind its frontier is damaged'),
 'bad':       ('skip',      'an unreadable record that was skipped stays unreadable until it is overwritten'),
 'reserve':   ('skip stop', 'client writes leave segments for FRONTIER and parking'),
 'parkbad':   ('skip stop', 'a record that cannot be read is parked as unreadable, with its sequence'),
 'number':    ('skip stop', 'a volume that is attached anew has a number that no record and no frontier of the log knows'),
}

class Batch:
    """One write to the log. records: (volume, sequence, block, id or None if unreadable, attachment number).
    front: volume -> (F, last, unreadable, attachment number)."""
    def __init__(s, **parts): s.__dict__.update(parts)

class Chain:
    def __init__(s, seed, kind, off=None):
        s.rng = random.Random(seed); s.kind, s.off, s.over, s.next = kind, off, False, 1
        V = range(VOLUMES)
        s.truth, s.store = [[] for v in V], [dict.fromkeys(range(BLOCKS), 0) for v in V]  # truth[v][i]: (block, id) of sequence i+1
        s.F, s.promised, s.away = [0] * VOLUMES, [0] * VOLUMES, [False] * VOLUMES
        s.number = [0] * VOLUMES                                        # attachment numbers, in the superblock
        s.bad = [{} for v in V]                                         # block -> sequence of the record that was skipped
        s.place = {}                                                    # (volume, sequence) -> where it can be read
        s.medium = [[[None, None, ''] for _ in range(BATCHES)] for _ in range(SEGMENTS)]   # durable, written, rot
        # The segment freed last is filled next.
        s.free, s.live, s.retired, s.parked = list(range(SEGMENTS)), [], [], []   # live, oldest first: [generation, segment, used, first batch]
        s.gen, s.run, s.no, s.link, s.durable = 0, 1, 0, (1, 0), 0
        s.told, s.rots = ({}, 0), 0                                        # the last FRONTIER written; rotten places
    def on(s, rule): return s.off != rule
    # ---- appending ----
    def append(s, records=(), front=None, spare=3):
        full = not s.live or s.live[-1][2] == BATCHES
        if s.on('reserve') and len(s.free) < (spare if full else spare - 1): return False
        if full:
            if not s.free: return False
            s.gen += 1; s.live.append([s.gen, s.free.pop(0), 0, s.no + 1])
            if s.on('repeat'): front = s.frontiers()
        if front is not None and not s.on('repeat'): front = {v: f for v, f in front.items() if f != s.told[0].get(v)}
        seg = s.live[-1]; s.no += 1
        b = Batch(no=s.no, run=s.run, link=s.link, gen=seg[0], records=list(records), front=front, known=s.durable, volume=None)
        b.oldest = (s.live[0][0], s.live[0][3])
        s.medium[seg[1]][seg[2]][1] = b
        for r in b.records: s.place[r[:2]] = (seg[1], seg[2], s.no)
        seg[2] += 1; s.link = (s.run, s.no)
        if front is not None: s.told = ({**s.told[0], **front}, s.live[0][0])
        return True
    def frontiers(s): return {v: (s.F[v], len(s.truth[v]), dict(s.bad[v]), s.number[v]) for v in range(VOLUMES)}
    def write(s):
        records = []
        for _ in range(s.rng.choice([1, 2])):
            v, k = s.rng.randrange(VOLUMES), s.rng.randrange(BLOCKS)
            seq = len(s.truth[v]) + 1 + sum(r[0] == v for r in records)
            records.append((v, seq, k, s.next, s.number[v])); s.next += 1
        if s.append(records):
            for v, _, k, i, _ in records: s.truth[v].append((k, i))
    def frontier(s):
        news = (s.frontiers(), s.live[0][0] if s.live else 0)
        frees = s.told[1] != news[1] or any(p[3][-1] <= s.F[p[2]] for p in s.parked)
        if s.live and news != s.told: s.append(front=news[0], spare=1 if frees else 3)
    def devflush(s):
        for slot in (slot for seg in s.medium for slot in seg):
            if slot[1]: slot[:] = [slot[1], None, '']
        s.durable = s.no; s.promised = [len(t) for t in s.truth]
        for p in s.parked: p[4] = True
        said = [seg for seg in s.retired if seg[0] < s.told[1] or not s.on('fifo')]   # the newest FRONTIER is durable now
        s.free[:0] = [seg[1] for seg in said][::-1]; s.retired = [seg for seg in s.retired if seg not in said]
        gone = [p for p in s.parked if p[3][-1] <= s.told[0].get(p[2], (0,))[0]]
        s.free[:0] = [p[1] for p in gone][::-1]; s.parked = [p for p in s.parked if p not in gone]
    # ---- destaging, freeing, parking ----
    def readable(s, v, seq):
        p, i, _ = s.place[v, seq]; durable, written, rot = s.medium[p][i]
        return not rot and any(r[:2] == (v, seq) and r[3] for r in (written or durable).records)
    def destage(s):
        v = s.rng.randrange(VOLUMES); seq = s.F[v] + 1
        if s.away[v] or seq > len(s.truth[v]) or s.place[v, seq][2] > s.durable: return
        k, i = s.truth[v][seq - 1]
        if s.readable(v, seq): s.store[v][k] = i; s.bad[v].pop(k, None)
        elif s.kind == 'stop': return
        elif s.on('bad'): s.bad[v][k] = seq
        s.F[v] = seq
    def holds(s, seg): return [(v, q) for (v, q), (p, i, n) in s.place.items() if p == seg[1] and q > s.F[v]]
    def retire(s):
        for seg in (s.live[:1] if s.on('fifo') else s.rng.sample(s.live, len(s.live))):
            if seg is s.live[-1] or s.holds(seg): continue
            s.live.remove(seg)
            if s.on('saidfree'): return s.retired.append(seg)
            return s.free.insert(0, seg[1])
    def park(s):
        """The oldest segment's records of a volume whose store is away go to a segment of their own."""
        if len(s.live) < 2: return
        for v in range(VOLUMES):
            seqs = sorted(q for u, q in s.holds(s.live[0]) if u == v)
            if not s.away[v] or not seqs or any(s.place[v, q][2] > s.durable for q in seqs) or len(s.free) < 2: continue
            if any(p[2] == v and p[3] == seqs for p in s.parked): continue
            s.gen += 1; seg = s.free.pop(0); s.parked.append([s.gen, seg, v, seqs, False])
            unread = None if s.on('parkbad') else -1                        # -1: what rotted, under a fresh checksum
            records = [(v, q, s.truth[v][q - 1][0], s.truth[v][q - 1][1] if s.readable(v, q) else unread, s.number[v]) for q in seqs]
            for i in range(0, len(records), 2):
                s.medium[seg][i // 2][1] = Batch(no=0, run=s.run, gen=s.gen, records=records[i:i + 2], front=None, known=0, volume=v)
    def let_go(s):
        """A parked copy takes its original's place."""
        for p in s.parked:
            if p[4] or not s.on('parked'):
                for i, q in enumerate(p[3]):
                    if q > s.F[p[2]] and s.place[p[2], q][0] != p[1]: s.place[p[2], q] = (p[1], i // 2, 0)
    def leave(s): v = s.rng.randrange(VOLUMES); s.away[v] = not s.away[v]
    def attach_anew(s):
        """The operator forgets a volume, dirty or not, and another comes in its place. The superblock, durable here, has its number."""
        v = s.rng.randrange(VOLUMES)
        s.truth[v], s.store[v], s.bad[v], s.F[v], s.promised[v] = [], dict.fromkeys(range(BLOCKS), 0), {}, 0, 0
        if s.on('number'): s.number[v] += 1
        s.place = {vq: p for vq, p in s.place.items() if vq[0] != v}
        s.free[:0] = [p[1] for p in s.parked if p[2] == v][::-1]; s.parked = [p for p in s.parked if p[2] != v]
    def rot(s):
        """In what a later durable batch knows durable, or in a parked copy: other rot looks like a torn tail."""
        known = max([b.known for seg in s.medium for b, w, r in seg if b and not r], default=0)
        inuse = [seg[1] for seg in s.live] + [p[1] for p in s.parked if p[4]]
        places = [slot for p in inuse for slot in s.medium[p] if slot[0] and not slot[1] and not slot[2] and slot[0].no <= known]
        if places and s.rots < 2: s.rng.choice(places)[2] = s.rng.choice(['payload', 'header']); s.rots += 1
    # ---- recovery ----
    def power_cut(s):
        for slot in (slot for seg in s.medium for slot in seg):
            if slot[1]: slot[:] = s.rng.choice([[slot[1], None, ''], [slot[1], None, ''], [slot[0], None, slot[2]], [None, None, '']])
        found = [(b, rot, (p, i)) for p, seg in enumerate(s.medium) for i, (b, w, rot) in enumerate(seg) if b and rot != 'header']
        main = [f for f in found if f[0].volume is None]
        fronts = [f[0] for f in main if f[0].front is not None and not f[1]]
        oldest = max(fronts, key=lambda b: (b.run, b.no), default=Batch(oldest=(0, 1))).oldest
        front = {v: max([(b.front[v][0], b.run, b.no, b.front[v][2]) for b in fronts if v in b.front and b.front[v][3] == s.number[v]], key=lambda x: x[:3], default=None) for v in range(VOLUMES)}
        chain, first = s.batches(main, oldest)
        records, holes, link, n = {}, [], None, first
        known = max([f[0].known for f in main], default=0) if s.on('damage') else 0
        while True:
            f, after = chain.get(n), chain.get(n + 1)
            linked = f and (n == first or f[0].link == link or not s.on('run') and link)
            if n > known and not linked: break
            if f and s.on('run') and n < known and after and after[0].link != (f[0].run, n): f = None      # its successor contradicts it
            link = (f[0].run, n) if f else None
            if not f: holes.append(n)
            for v, q, k, i, a in f[0].records if f else ():
                if a == s.number[v]: records[v, q] = (k, None if f[1] else i, f[2] + (n,))
            n += 1
        end = n - 1
        for f in found:                                                 # parked copies
            for v, q, k, i, a in f[0].records if f[0].volume is not None else ():
                if a == s.number[v] and (v, q) not in records: records[v, q] = (k, None if f[1] else i, f[2] + (0,))
        F = [front[v][0] if front[v] else 0 if s.number[v] else min([q for u, q in records if u == v], default=s.F[v] + 1) - 1 for v in range(VOLUMES)]
        for v in range(VOLUMES): s.check(v, F[v], front[v][3] if front[v] else {}, records, holes, chain, end)
        if s.over: return
        s.resume(F, front, records, chain, first, end, link, found)
    def batches(s, main, oldest):
        """Batch number -> what counts as that batch; and the number at which the chain starts."""
        chain = {}
        for f in sorted(main, key=lambda f: (f[0].run, f[0].gen) if s.on('run') else (-f[0].run, f[0].gen)):
            b = f[0]
            if s.on('oldest') and b.gen < oldest[0]: continue
            if s.on('run') and any(g[0].run > b.run and g[0].no <= b.no and g[0].gen >= oldest[0] for g in main): continue
            chain[b.no] = f
        return chain, oldest[1] if s.on('oldest') else min(chain, default=1)
    def check(s, v, F, bad, records, holes, chain, end):
        have, top = sorted(q for u, q in records if u == v and q > F), F
        while (v, top + 1) in records: top += 1
        said = [f[0].front[v][1] for n, f in chain.items() if f[0].front and v in f[0].front and f[0].front[v][3] == s.number[v] and not f[1] and holes and holes[-1] < n <= end]
        seen = [q for n, f in chain.items() if holes and holes[-1] < n <= end for u, q, k, i, a in f[0].records if u == v and a == s.number[v]]
        gap = bool(have) and top < have[-1]
        unknown = bool(holes) and top < max(said + seen, default=top + 1)
        if s.on('gap') and (gap or unknown):
            if not s.rots: raise Broken(f'volume {v} is called damaged, and nothing rotted')
            s.over = True; return                                       # refuses to read: the operator decides
        if top < s.promised[v]: raise Broken(f'volume {v}: promised {s.promised[v]}, found {top}')
        for k in range(BLOCKS):
            want = max([i for kk, i in s.truth[v][:top] if kk == k], default=0)
            over = max([(q, records[v, q][1]) for q in range(F + 1, top + 1) if records[v, q][0] == k], key=lambda x: x[0], default=None)
            got = over[1] if over else None if k in bad else s.store[v][k]
            if got is None and not s.rots: raise Broken(f'volume {v}, block {k}: unreadable, and nothing rotted')
            if got is not None and got != want: raise Broken(f'volume {v}, block {k}: holds {got}, the prefix has {want}')
    def resume(s, F, front, records, chain, first, end, link, found):
        s.F, s.place = F, {}
        s.bad = [dict(front[v][3]) if front[v] else {} for v in range(VOLUMES)]
        for v in range(VOLUMES):
            top = F[v]
            while (v, top + 1) in records: top += 1; s.place[v, top] = records[v, top][2]
            s.truth[v] = s.truth[v][:top]; s.promised[v] = top
        segs = {}
        for n in range(first, end + 1):
            if n in chain: b, _, (p, i) = chain[n]; segs.setdefault(b.gen, [b.gen, p, 0, n - i]); segs[b.gen][2] = i + 1
        s.live, s.retired, s.parked = [segs[g] for g in sorted(segs)], [], []
        for b, rot, (p, i) in found:
            mine = sorted(q for v, q, k, j, a in b.records if b.volume is not None and a == s.number[v] and s.place.get((v, q), (None,))[0] == p)
            if mine:
                old = next((x for x in s.parked if x[1] == p), None)
                if old: old[3] = sorted(old[3] + mine)
                else: s.parked.append([b.gen, p, b.volume, mine, True])
        s.told = ({v: (F[v], 0, {}, s.number[v]) for v in range(VOLUMES)}, s.live[0][0] if s.live else 0)
        used = {seg[1] for seg in s.live} | {p[1] for p in s.parked}
        s.free = [p for p in range(SEGMENTS) if p not in used]
        s.gen = max([s.gen] + [f[0].gen for f in found]); s.run += 1; s.no = s.durable = end; s.link = link or (s.run - 1, end)
    def drain(s):
        """Both stores are back: everything is destaged, and the log empties."""
        s.away = [False] * VOLUMES
        for _ in range(60):
            for _ in range(8): s.destage()
            s.let_go(); s.retire(); s.frontier(); s.devflush()
        if not s.rots and (any(s.F[v] < len(s.truth[v]) for v in range(VOLUMES)) or len(s.free) < 3): raise Broken('a full log hangs')
    def play(s, steps):
        acts = [(s.write, 7), (s.devflush, 3), (s.destage, 6), (s.frontier, 2), (s.retire, 3), (s.park, 2), (s.let_go, 1.5), (s.leave, .6), (s.rot, .1), (s.power_cut, .3), (s.attach_anew, .2)]
        acts, weights = zip(*acts)
        for act in s.rng.choices(acts, weights, k=steps):
            act()
            if s.over: return
        s.drain()

# ---- the marker beside the store and the cache's superblock: every crash point, exhaustively ----
MARK = {'cachefirst': 'attach writes the cache\'s superblock before the marker',
        'markfirst': 'the marker is durable before the first write is acknowledged',
        'cleanlast': 'detach makes the cache clean before the marker',
        'drain': 'the marker is cleared only when the store has everything',
        'bump': 'recover raises the generation', 'gencheck': 'a start believes the marker, not the cache alone',
        'refuse': 'a dirty marker keeps everybody else out',
        'recarry': 'taking up a carried volume raises the generation, so that a copy of the cache is void',
        'takereplay': 'taking up a carried volume replays a journal of its generation before the marker has the next'}
HARMLESS = {'cleanlast', 'bump'}   # found by the model: the marker alone decides, so neither order nor number matters here
def marker_states(off=None):
    """A state: marker (state, generation), cache (state, generation, version it holds), version in the store, newest version,
    a copy of the carried cache (generation, version) on another host, and the generation and version of an epoch that is
    committed and not yet applied: until then the store holds a part of it."""
    on = lambda r: off != r
    def attach(m):
        g = m[1] + 1
        steps = [lambda w: {**w, 'c': ('open', g, None)}, lambda w: {**w, 'm': ('dirty', g)}]
        if not on('cachefirst'): steps.reverse()
        ack = lambda w: {**w, 'c': (w['c'][0], w['c'][1], w['new'] + 1), 'new': w['new'] + 1}
        if not on('markfirst'): steps.insert(1, ack)
        return steps + [ack]
    def detach(w):
        a = lambda w: {**w, 'st': max(w['st'], w['c'][2] or 0)}
        b = lambda w: {**w, 'c': ('clean', w['c'][1], None)}
        d = lambda w: {**w, 'm': ('clean', w['m'][1])}
        out = [a, b, d] if on('cleanlast') else [a, d, b]
        return out if on('drain') else [d, a, b]
    applied = lambda w: {**w, 'st': w['j'][1], 'j': None} if w['j'] else w
    w0 = {'m': ('clean', 0), 'c': ('none', 0, None), 'st': 0, 'new': 0, 'copy': None, 'j': None}
    seen, todo = set(), [(w0, ())]
    while todo:
        w, how = todo.pop()
        key = tuple(w.values())
        if key in seen or w['new'] > 3 or w['m'][1] > 4: continue
        seen.add(key); m, c = w['m'], w['c']
        def go(steps, name):
            cur = w
            for i, f in enumerate(steps): cur = f(cur); todo.append((cur, how + (f'{name}.{i + 1}',)))
        # host A, with the cache
        known = c[0] in ('open', 'carried') and (c[1] == m[1] or not on('gencheck'))
        if m[0] == 'dirty' and known:
            if c[2] is not None and c[2] < w['st']: raise Broken(f'older dirty data over newer: {how}')
            if (c[2] or w['st']) < w['new']: raise Broken(f'serves an image that lacks acknowledged writes: {how}')
            if w['j'] and w['j'][0] == m[1]: go([applied], 'replay')
            if w['j'] is None or not on('drain'): go(detach(w), 'detach')
            if w['j'] is None and (c[2] or 0) > w['st']: go([lambda w: {**w, 'j': (m[1], c[2])}, applied], 'epoch')
            go([lambda w: {**w, 'c': ('carried', c[1], c[2])}, lambda w: {**w, 'm': ('carried', m[1])}], 'carry')
        elif m[0] == 'carried' and c[0] in ('open', 'carried') and c[1] in (m[1], m[1] + 1):      # taken up again, perhaps for the second time
            g = m[1] + on('recarry')
            replayed = [applied] if on('takereplay') else []
            go([lambda w: {**w, 'c': ('open', g, c[2])}, *replayed, lambda w: {**w, 'm': ('dirty', g)},
                lambda w: {**w, 'c': ('open', g, w['new'] + 1), 'new': w['new'] + 1}], 'take')
            if w['copy'] is None and c[0] == 'carried': go([lambda w: {**w, 'copy': (c[1], c[2])}], 'copy')
        elif m[0] == 'dirty' and c[0] == 'clean' and c[1] == m[1]: go([lambda w: {**w, 'm': ('clean', m[1])}], 'tidy')
        elif m[0] == 'dirty' and c[0] == 'none': raise Broken(f'this cache is named dirty and knows nothing of it: {how}')
        elif m[0] == 'clean':
            if c[0] == 'open' and not on('gencheck') and c[2] is not None and c[2] < w['st']: raise Broken(f'older dirty data over newer: {how}')
            go(attach(m), 'attach')
        if m[0] == 'dirty' and w['copy'] and w['copy'][0] == m[1] and max(w['copy'][1] or 0, w['st']) < w['new']:
            raise Broken(f'a copy of the cache serves old data: {how}')
        # host B, without the cache: writes through, which needs a clean marker
        if m[0] == 'clean' or not on('refuse'):
            if w['st'] < w['new']: raise Broken(f'served around its cache: {how}')
            go([lambda w: {**w, 'st': w['new'] + 1, 'new': w['new'] + 1, 'm': ('clean', w['m'][1] + 1)}], 'elsewhere')
        if m[0] == 'clean': go([lambda w: {**w, 'st': w['new'] + 1, 'new': w['new'] + 1}], 'raw')   # somebody without Larder
        if m[0] != 'clean':   # the operator gives the cache up: what it had is forgiven
            if w['j'] and w['j'][0] != m[1]: raise Broken(f'cache lost: the store holds a part of an epoch whose journal counts no more: {how}')
            go([applied, lambda w: {**w, 'new': w['st'], 'm': ('clean', w['m'][1] + (1 if on('bump') else 0))}], 'recover')
    return len(seen)

SETBACK = {'setback': 'a marker with a lower number than the cache knows, or of a later run than the cache\'s, is refused',
           'runfirst': 'a start raises the cache\'s run before the marker has it',
           'runkept': 'a start that does not see the marker leaves the run that the cache has of the volume'}
def setback_states(off=None):
    """Somebody puts back an older marker, or an older image of the cache, while the daemon is down; the store stays. Only where it
    can be seen: what both sides agree on looks like what was. A state: marker (state, generation, number, run), cache (state,
    generation, version, number it knows, run of its marker), store, newest version, whether the daemon runs, a copy taken earlier, whether it was put back."""
    on = lambda r: off != r
    w0 = {'m': ('clean', 0, 0, 0), 'c': ('none', 0, None, 0, 0), 'st': 0, 'new': 0, 'up': False, 'copy': None, 'back': False}
    mark = lambda state, g: lambda w: {**w, 'm': (state, g, w['m'][2] + 1, w['c'][4])}
    learn = lambda w: {**w, 'c': w['c'][:3] + (w['m'][2], w['c'][4])}
    seen, todo = set(), [(w0, ())]
    while todo:
        w, how = todo.pop(); key = tuple(w.values())
        if key in seen or w['new'] > 2 or w['m'][1] > 2 or w['c'][4] > 3 or w['m'][2] > 6: continue
        seen.add(key); m, c = w['m'], w['c']
        def go(steps, name):                                            # a crash behind each step: the daemon is down
            cur = w
            for i, f in enumerate(steps):
                cur = f(cur); todo.append(({**cur, 'up': False}, how + (f'{name}.{i + 1}',)))
            todo.append((cur, how + (name,)))
        if w['up']:
            go([lambda w: {**w, 'c': (c[0], c[1], w['new'] + 1) + c[3:], 'new': w['new'] + 1}], 'write')
            go([lambda w: {**w, 'st': max(w['st'], c[2] or 0)}, lambda w: {**w, 'c': ('clean', c[1], None) + w['c'][3:]}, mark('clean', m[1]), learn,
                lambda w: {**w, 'up': False}], 'detach')
            go([lambda w: {**w, 'up': False}], 'kill')
            continue
        if w['copy'] is None: go([lambda w: {**w, 'copy': ('m', m)}], 'keep marker'); go([lambda w: {**w, 'copy': ('c', c)}], 'keep cache')
        elif not w['back']:
            part, old = w['copy']; n = {**w, part: old, 'back': True}
            if n['m'][2] < n['c'][3] or n['m'][3] > n['c'][4]: todo.append((n, how + ('put back',)))
        # The store is away: it is judged by the next start, as if this had not been.
        if not on('runkept'): go([lambda w: {**w, 'c': c[:4] + (c[4] + 1,)}], 'away')
        if m[2] < c[3] or m[3] > c[4]:
            if not w['back']: raise Broken(f'refused, and nobody put anything back: {how}')
            if on('setback'): continue                                  # the operator decides: recover or discard
        begin = [lambda w: {**w, 'c': w['c'][:4] + (w['c'][4] + 1,)}]
        up = [lambda w: {**w, 'up': True}]
        if m[0] == 'clean':
            if w['st'] < w['new']: raise Broken(f'serves a store that lacks acknowledged writes: {how}')
            steps = begin + [lambda w: {**w, 'c': ('open', m[1] + 1, None) + w['c'][3:]}, mark('dirty', m[1] + 1)]
            go(steps + [learn] + up, 'attach')
        elif c[0] == 'open' and c[1] == m[1]:
            if max(c[2] or 0, w['st']) < w['new']: raise Broken(f'serves an image that lacks acknowledged writes: {how}')
            steps = begin + [mark('dirty', m[1])]
            if not on('runfirst'): steps = [lambda w: {**w, 'm': ('dirty', m[1], m[2] + 1, w['c'][4] + 1)}] + begin
            go(steps + [learn] + up, 'start')
        elif c[0] == 'clean' and c[1] == m[1]: go([mark('clean', m[1]), learn], 'tidy')
    return len(seen)

# ---- shards: parts of writes, the log's room, destaging beside fetches and fills ----
LINES, STRIPES, ROOM = 4, 2, 3
SHARDS = {
 'twoqueues': 'a destage waits for fetches, fills and destages of its line, never for a part that waits for the log',
 'parts':     'a part waits for no other part of its write',
 'fetch':     'a destage waits for a fetch of its line',
 'uncover':   'a destage drops or fills the clean slot of its line',
}
class Part:
    def __init__(s, line): s.line, s.state, s.id = line, 'new', 0                    # new, admitted, written, acked, sent

class Shards:
    """Writes of one or two parts, cut at lines; line l is in shard l % 2. The log has room for a few records. Reads fetch from the
    store and fill. At the end everything that began must end."""
    def __init__(s, seed, kind, off=None):
        s.rng, s.off, s.over, s.next, s.writes = random.Random(seed), off, False, 1, 0
        s.coming, s.queues, s.log, s.fetches = [], [[] for _ in range(STRIPES)], [], {}
        s.store, s.slots, s.acked = [0] * LINES, {}, [0] * LINES
    def on(s, rule): return s.off != rule
    def write(s):
        """The parts of a write reach their shards in any order, and other writes' parts come between."""
        parts = [Part(l) for l in s.rng.sample(range(LINES), s.rng.choice([1, 2]))]; s.writes += 1; s.coming += parts
        for p in parts: p.all = parts
    def arrive(s):
        if s.coming: p = s.coming.pop(s.rng.randrange(len(s.coming))); s.queues[p.line % STRIPES].append(p)
    def admit(s):
        for q in s.queues:
            for i, p in enumerate(q):
                if p.state == 'new' and all(o.line != p.line for o in q[:i]): p.state = 'admitted'
    def append(s):
        ready = [p for q in s.queues for p in q if p.state == 'admitted' and (s.on('parts') or all(o.state != 'new' for o in p.all))]
        if not ready or len(s.log) >= ROOM: return
        p = s.rng.choice(ready); p.id, s.next, p.state = s.next, s.next + 1, 'written'; s.log.append(p)
    def ack(s):
        for p in s.log:
            if p.state == 'written':
                p.state = 'acked'; s.acked[p.line] = p.id; s.queues[p.line % STRIPES].remove(p); return
    def destage(s):
        for i, p in enumerate(s.log):
            if p.state == 'written': return
            if p.state != 'acked' or any(o.line == p.line for o in s.log[:i]): continue
            if s.on('fetch') and p.line in s.fetches: continue
            if not s.on('twoqueues') and any(o.line == p.line for q in s.queues for o in q): continue
            if s.on('uncover'): s.slots.pop(p.line, None)
            s.store[p.line], p.state = p.id, 'sent'
            if s.rng.random() < .3: s.slots[p.line] = p.id
            return
    def free(s):
        if s.log and s.log[0].state == 'sent': s.log.pop(0)
    def fetch(s):
        l = s.rng.randrange(LINES)
        if l not in s.fetches and l not in s.slots: s.fetches[l] = s.store[l]
    def fetched(s):
        if s.fetches: l = s.rng.choice(sorted(s.fetches)); s.slots[l] = s.fetches.pop(l)
    def read(s):
        l = s.rng.randrange(LINES); over = [p.id for p in s.log if p.line == l and p.state != 'written']
        seen = over[-1] if over else s.slots.get(l, s.store[l])
        if seen < s.acked[l]: raise Broken(f'read of line {l} gives {seen}, acknowledged {s.acked[l]}')
    def play(s, steps):
        acts = [(s.write, 2), (s.arrive, 4), (s.admit, 4), (s.append, 4), (s.ack, 4), (s.destage, 4), (s.free, 3), (s.fetch, 2), (s.fetched, 2), (s.read, 3)]
        acts, weights = zip(*acts)
        for act in s.rng.choices(acts, weights, k=steps): act()
        for _ in range(40 * (s.writes + 2)):
            for act in (s.arrive, s.admit, s.append, s.ack, s.fetched, s.destage, s.free): act()
        if s.log or s.coming or any(s.queues): raise Broken('everything waits: a full log, or two writes for each other')
        for l in range(LINES):
            if s.slots.get(l, s.store[l]) != s.acked[l]: raise Broken(f'line {l}: holds {s.slots.get(l, s.store[l])}, acknowledged {s.acked[l]}')

# ---- the rate of `ordered,grain=completion` while acknowledgements are delayed ----
def pace(raised_at_ack, clients=16, bound=200, window=.002, seconds=10):
    """Writes a second. A write is acknowledged when it is less than `bound` ahead of the frontier; the client writes again at once."""
    dep, acked, frontier, t = [0] * clients, 0, 0, 0
    while t < seconds:
        while acked < len(dep) and acked < frontier + bound: acked += 1; dep.append(acked if raised_at_ack else len(dep))
        end = frontier
        while end < len(dep) and dep[end] <= frontier: end += 1
        frontier = end; t += window
    return round(frontier / t)

def hunt(make, seeds, steps):
    for seed in range(seeds):
        try: make(seed).play(steps)
        except Broken as e: return seed, str(e)
    return None, f'{seeds} histories, nothing broken'

def main():
    seeds, steps = [int(a) for a in sys.argv[1:]] + [4000, 120][len(sys.argv) - 1:]
    names, bad = {**ORDERS, **STRICTNESS, 'shards': 'shards'}, 0
    part = lambda kind: World if kind in ORDERS else Chain if kind in STRICTNESS else Shards
    make = lambda kind, off=None: (lambda seed: part(kind)(seed, kind, off))
    for kind, name in names.items():
        seed, why = hunt(make(kind), seeds, steps); bad += seed is not None
        print(f'{name:20} all rules    : {why}' + (f' (seed {seed})' if seed is not None else ''), flush=True)
    print(f'marker               all rules    : {marker_states()} states, nothing broken')
    print(f'marker put back      all rules    : {setback_states()} states, nothing broken')
    rules = [(r, list(kinds)) for r, (kinds, _) in RULES.items()] + [(r, kinds.split()) for r, (kinds, _) in CHAIN.items()] + [(r, ['shards']) for r in SHARDS]
    for r, kinds in rules:
        for kind in kinds:
            seed, why = hunt(make(kind, r), max(10000, 3 * seeds), 120); bad += seed is None
            print(f'{names[kind]:20} without {r:10}: ' + (f'seed {seed}: {why}' if seed is not None else 'NOT CAUGHT'), flush=True)
    for r in MARK:
        try:
            marker_states(r); bad += r not in HARMLESS
            print(f'marker               without {r:10}: ' + ('harmless' if r in HARMLESS else 'NOT CAUGHT'))
        except Broken as e: print(f'marker               without {r:10}: {e}')
    for r in SETBACK:
        try: setback_states(r); bad += 1; print(f'marker put back      without {r:10}: NOT CAUGHT')
        except Broken as e: print(f'marker put back      without {r:10}: {e}')
    late, early = pace(True), pace(False); bad += late < 10 * early
    print(f'pace                 position raised at the acknowledgement: {late}/s; when written: {early}/s')
    return bad

if __name__ == '__main__': sys.exit(1 if main() else 0)
