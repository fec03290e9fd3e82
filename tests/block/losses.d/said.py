"""What the writers have said by the moment of a loss, and which of it must be in the image."""

import threading
import time


class Said:
    """The lines of the writers, with the time at which each was seen here."""

    def __init__(self, path):
        self.path = path
        path.touch()
        self.lines, self.partial = [], b""
        self.lock, self.over = threading.Lock(), False
        self.file = open(path, "rb")
        self.thread = threading.Thread(target=self._follow, daemon=True)
        self.thread.start()

    def _follow(self):
        while not self.over:
            self.catch_up()
            time.sleep(0.01)

    def catch_up(self):
        """Takes all that is there."""
        with self.lock:
            parts = (self.partial + self.file.read()).split(b"\n")
            now = time.monotonic()
            self.partial = parts.pop()
            for line in parts:
                words = line.decode(errors="replace").split()
                if len(words) == 3 and words[0] in ("I", "C") and words[2].isdigit():
                    self.lines.append((now, words[0], words[1], int(words[2])))
            return len(self.lines)

    def count_of(self, what, step):
        self.catch_up()
        return sum(1 for _, w, _, n in self.lines if w == what and n == step)

    def until(self, count):
        """What was said up to that line."""
        return History(self.lines[:count])

    def close(self):
        self.over = True
        self.thread.join()
        self.catch_up()
        self.file.close()


class History:
    """Lines up to a moment."""

    def __init__(self, lines):
        self.lines = lines
        self.began, self.issued = {}, {}
        for i, (_, what, who, step) in enumerate(lines):
            if what == "I":
                self.began[who, step] = i
                self.issued[who] = step

    def done(self, bound):
        """The last step of each writer that was reported before line `bound`."""
        out = {}
        for _, what, who, step in self.lines[:bound]:
            if what == "C":
                out[who] = step
        return out

    def before(self, moment):
        """The lines that were there before a moment."""
        return sum(1 for seen, *_ in self.lines if seen < moment)

    def writers(self):
        return sorted({who for _, _, who, _ in self.lines})


def safe_moment(samples):
    """The last moment whose data the volume's status had shown to be destaged: all that was answered before it is in the store.
    `samples`: (before the request, acknowledged, frontier, generation), in order. None: nothing was."""
    best, frontier = None, {}
    for began, acknowledged, reached, generation in reversed(samples):
        # What any later look, or this one, has shown as destaged.
        frontier[generation] = max(frontier.get(generation, 0), reached)
        if acknowledged <= frontier[generation]:
            best = began
            break
    return best


def sample(status, volume, began):
    """What `larder block status --json` says of a volume, as `safe_moment` takes it; None: it does not write back, or is not there."""
    for one in status.get("volumes", []):
        back = one.get("write_back")
        if one.get("name") == volume and back:
            return began, back["acknowledged"], back["frontier"], back["generation"]
    return None
