"""Ends a process with all that it has started."""

import os
import signal
from pathlib import Path


def descendants(process):
    """The processes that it has started, and theirs, by what /proc says now."""
    children = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            # The name, in brackets, may have spaces.
            parent = int(stat.read_text().rpartition(")")[2].split()[1])
        except (OSError, ValueError, IndexError):
            continue
        children.setdefault(parent, []).append(int(stat.parent.name))
    out, left = [], [process]
    while left:
        below = children.get(left.pop(), [])
        out += below
        left += below
    return out


def end(process):
    """Kills a process that was started here, and its descendants: the backends of a database have sessions of their own, and may
    outlive its server."""
    for one in [*descendants(process.pid), process.pid]:
        try:
            os.kill(one, signal.SIGKILL)
        except ProcessLookupError:
            pass
    process.wait()
