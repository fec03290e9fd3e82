"""Every command and flag of NBD by libnbd, against an export 'disk' of 64 MiB: python3 every_command.py SOCKET"""

import errno
import random
import sys

import nbd

SIZE = 64 << 20
socket = sys.argv[1]


def connect(prepare=lambda h: None, name="disk"):
    h = nbd.NBD()
    h.set_export_name(name)
    h.add_meta_context(nbd.CONTEXT_BASE_ALLOCATION)
    prepare(h)
    h.connect_unix(socket)
    return h


def fails(what, code):
    try:
        what()
    except nbd.Error as e:
        assert e.errnum == code, f"{e}: errno {e.errnum}, expected {code}"
        return
    raise AssertionError(f"no error, expected {errno.errorcode[code]}")


# The handshake, option by option.
h = nbd.NBD()
h.set_opt_mode(True)
h.set_full_info(True)
h.connect_unix(socket)
names = []
h.opt_list(lambda name, description: names.append(name))
assert names == ["disk"], names
h.set_export_name("disk")
h.opt_info()
assert h.get_size() == SIZE
assert h.get_canonical_export_name() == "disk"
contexts = []
h.opt_list_meta_context(contexts.append)
assert contexts == ["base:allocation"], contexts
h.add_meta_context("base:")
contexts = []
h.opt_list_meta_context(contexts.append)
assert contexts == ["base:allocation"], contexts
h.clear_meta_contexts()
h.add_meta_context("x-nothing:at-all")
contexts = []
h.opt_list_meta_context(contexts.append)
assert contexts == [], contexts
h.set_export_name("nothing")
fails(h.opt_info, errno.ENOENT)
fails(h.opt_go, errno.ENOENT)
h.clear_meta_contexts()
h.set_export_name("disk")
h.opt_go()
assert not h.can_meta_context("base:allocation")
assert h.pread(4, 0) is not None
h.shutdown()
h = nbd.NBD()
h.set_opt_mode(True)
h.connect_unix(socket)
h.opt_abort()

# What is offered.
h = connect()
assert h.get_size() == SIZE and not h.is_read_only()
for can in ["flush", "fua", "trim", "zero", "fast_zero", "df", "multi_conn"]:
    assert getattr(h, "can_" + can)(), can
assert h.get_structured_replies_negotiated() and h.can_meta_context("base:allocation")
assert h.get_block_size(nbd.SIZE_MINIMUM) == 1
assert h.get_block_size(nbd.SIZE_PREFERRED) == 4096
assert h.get_block_size(nbd.SIZE_MAXIMUM) == 32 << 20

# Every command with every flag that belongs to it.
data = random.Random(1).randbytes(100_000)
h.pwrite(data, 12345)
assert h.pread(len(data), 12345) == data
h.pwrite(data[::-1], 12345, nbd.CMD_FLAG_FUA)
whole = []
h.pread_structured(len(data), 12345, lambda buf, at, status, err: whole.append(bytes(buf)), nbd.CMD_FLAG_DF)
assert whole == [data[::-1]], "one piece"
pieces = []
h.pread_structured(len(data), 12345, lambda buf, at, status, err: pieces.append((at, bytes(buf), status)))
assert b"".join(p[1] for p in sorted(pieces)) == data[::-1], "pieces"
zeroes = []
h.pread_structured(1 << 20, 32 << 20, lambda buf, at, status, err: zeroes.append(status))
assert zeroes == [nbd.READ_HOLE], zeroes
h.flush()
h.zero(1000, 20_001)
assert h.pread(1002, 20_000) == bytes([data[::-1][20_000 - 12345]]) + bytes(1000) + bytes([data[::-1][21_001 - 12345]])
h.zero(1000, 30_001, nbd.CMD_FLAG_NO_HOLE | nbd.CMD_FLAG_FUA)
assert h.pread(1000, 30_001) == bytes(1000)
try:
    h.zero(4096, 40_960, nbd.CMD_FLAG_FAST_ZERO)
    assert h.pread(4096, 40_960) == bytes(4096)
except nbd.Error as e:
    assert e.errnum == errno.EOPNOTSUPP, e
h.trim(65536, 65536)
h.trim(65536, 65536, nbd.CMD_FLAG_FUA)
if h.can_cache():
    h.cache(1 << 20, 0)


def status(count, offset, flags=0):
    found = []
    h.block_status(count, offset, lambda context, at, entries, err: found.extend(entries), flags)
    return list(zip(found[::2], found[1::2]))


h.pwrite(bytes([7]) * (1 << 20), 16 << 20)
assert status(1 << 20, 16 << 20) == [(1 << 20, 0)]
assert status(1 << 20, 48 << 20) == [(1 << 20, nbd.STATE_HOLE | nbd.STATE_ZERO)]
assert len(status(2 << 20, 15 << 20)) == 2
assert len(status(2 << 20, 15 << 20, nbd.CMD_FLAG_REQ_ONE)) == 1

# Large, and many at once, out of order.
big = random.Random(2).randbytes(32 << 20)
h.pwrite(big, 7)
assert h.pread(len(big), 7) == big
model = bytearray(big[:1 << 20])
h.pwrite(bytes(model), 0)
jobs = []
for i in range(200):
    at = i * 5000
    piece = random.Random(i).randbytes(4999)
    model[at:at + 4999] = piece
    jobs.append(h.aio_pwrite(nbd.Buffer.from_bytearray(bytearray(piece)), at))
while jobs:
    h.poll(-1)
    jobs = [j for j in jobs if not h.aio_command_completed(j)]
assert h.pread(1 << 20, 0) == bytes(model)

# What is refused; the connection goes on.
h.set_strict_mode(0)
fails(lambda: h.pread(2, SIZE - 1), errno.EINVAL)
fails(lambda: h.pwrite(b"xx", SIZE - 1), errno.ENOSPC)
fails(lambda: h.zero(2, SIZE - 1), errno.ENOSPC)
fails(lambda: h.trim(2, SIZE - 1), errno.EINVAL)
fails(lambda: h.block_status(2, SIZE - 1, lambda *a: 0), errno.EINVAL)
fails(lambda: h.pwrite(b"xx", 0, nbd.CMD_FLAG_DF), errno.EINVAL)
fails(lambda: h.pread(2, 0, nbd.CMD_FLAG_REQ_ONE), errno.EINVAL)
fails(lambda: h.flush(nbd.CMD_FLAG_NO_HOLE), errno.EINVAL)
assert h.pread(1 << 20, 0) == bytes(model)

# Several connections: what one has written and flushed, the other reads.
other = connect()
h.pwrite(b"milk", 999)
h.flush()
assert other.pread(4, 999) == b"milk"
other.shutdown()
h.shutdown()

# Simple replies, and the old way to an export.
h = connect(lambda h: h.set_request_structured_replies(False))
assert not h.get_structured_replies_negotiated() and not h.can_df()
assert h.pread(4, 999) == b"milk"
h.set_strict_mode(0)
fails(lambda: h.pread(2, SIZE - 1), errno.EINVAL)
assert h.pread(4, 999) == b"milk"
h.shutdown()
h = connect(lambda h: h.set_handshake_flags(0))
assert h.get_size() == SIZE and h.pread(4, 999) == b"milk"
h.shutdown()
h = connect(lambda h: h.set_handshake_flags(nbd.HANDSHAKE_FLAG_FIXED_NEWSTYLE))
assert h.pread(4, 999) == b"milk"
h.shutdown()
print("every command: ok")
