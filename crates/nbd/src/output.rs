//! What is to be sent.

use std::collections::VecDeque;
use std::io::IoSlice;

use larder_runtime::AlignedBuf;

use larder_runtime::Payload;

/// Payloads up to this length are copied behind their header; longer ones are sent from where they are.
const COPY: usize = 4096;
/// With so many bytes copied and not sent, no more payloads are copied: memory that is no buffer of the pool stays small.
const COPIED: usize = 64 << 10;
/// Most slices offered for one write.
const SLICES: usize = 64;

/// A part of the queue.
#[derive(Debug)]
enum Part {
    /// This many bytes of `bytes`.
    Copied(usize),
    /// A part of a buffer.
    Buffer { buf: AlignedBuf, start: usize, len: usize },
    /// A part of a buffer that others have too, and a buffer that comes back once it is sent.
    Shared(Payload, Option<AlignedBuf>),
}

impl Part {
    fn into_buffer(self) -> Option<AlignedBuf> {
        match self {
            Part::Buffer { buf, .. } | Part::Shared(_, Some(buf)) => Some(buf),
            Part::Copied(_) | Part::Shared(_, None) => None,
        }
    }
}

/// A queue of bytes to send: short messages one behind the other, large payloads by their buffers, which come back by
/// [`Output::recycle`] once sent.
#[derive(Debug, Default)]
pub struct Output {
    parts: VecDeque<Part>,
    bytes: Vec<u8>,
    /// Of `bytes`, sent already.
    consumed: usize,
    /// Of the front part, sent already.
    sent: usize,
    len: usize,
    /// Bytes of the buffers that wait with them.
    held: usize,
    /// The peer takes nothing: what waits is not copied.
    stuck: bool,
    spent: Vec<AlignedBuf>,
}

impl Output {
    /// Bytes that wait to be sent.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Bytes of the buffers that come back by [`Output::recycle`] once they are sent.
    pub fn held(&self) -> usize {
        self.held
    }

    /// Whether the peer takes something.
    pub fn set_stuck(&mut self, stuck: bool) {
        self.stuck = stuck;
    }

    /// Bytes that were copied and wait to be sent.
    pub fn copied(&self) -> usize {
        self.bytes.len() - self.consumed
    }

    /// Bytes of memory that the queue takes beside its buffers.
    pub fn own(&self) -> usize {
        self.bytes.capacity() + self.parts.capacity() * size_of::<Part>()
    }

    /// Lets go of memory for what has been sent.
    pub fn shrink(&mut self) {
        self.bytes.drain(..self.consumed);
        self.consumed = 0;
        self.bytes.shrink_to_fit();
        self.parts.shrink_to_fit();
        self.spent.shrink_to_fit();
    }

    /// Nothing waits.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Appends a copy.
    pub fn push(&mut self, bytes: &[u8]) {
        if bytes.is_empty() {
            return;
        }
        self.bytes.extend_from_slice(bytes);
        self.len += bytes.len();
        match self.parts.back_mut() {
            Some(Part::Copied(n)) => *n += bytes.len(),
            _ => self.parts.push_back(Part::Copied(bytes.len())),
        }
    }

    /// Appends `buf[start..start + len]`.
    ///
    /// # Panics
    /// If the buffer is shorter.
    pub fn push_buffer(&mut self, buf: AlignedBuf, start: usize, len: usize) {
        if len <= COPY && !self.stuck && self.copied() < COPIED {
            self.push(&buf[start..start + len]);
            self.spent.push(buf);
            return;
        }
        assert!(start + len <= buf.len());
        self.len += len;
        self.held += buf.capacity();
        self.parts.push_back(Part::Buffer { buf, start, len });
    }

    /// Appends bytes that others have too.
    pub fn push_shared(&mut self, payload: &Payload) {
        if payload.len() <= COPY {
            self.push(payload);
            return;
        }
        self.len += payload.len();
        self.parts.push_back(Part::Shared(payload.clone(), None));
    }

    /// Appends all of `buf`, or `lent` in its place if there is any: then it comes back when they are sent.
    pub fn push_read(&mut self, buf: AlignedBuf, lent: Vec<Payload>) {
        let len = buf.len();
        let mut lent = lent.into_iter().filter(|p| !p.is_empty()).peekable();
        if lent.peek().is_none() {
            return self.push_buffer(buf, 0, len);
        }
        self.held += buf.capacity();
        let mut buf = Some(buf);
        while let Some(payload) = lent.next() {
            self.len += payload.len();
            let with = if lent.peek().is_none() { buf.take() } else { None };
            self.parts.push_back(Part::Shared(payload, with));
        }
    }

    /// What may be sent now, in order, for one gathered write.
    pub fn slices(&self) -> Vec<IoSlice<'_>> {
        let mut out = Vec::with_capacity(self.parts.len().min(SLICES));
        let mut copied = self.consumed;
        let mut skip = self.sent;
        for part in self.parts.iter().take(SLICES) {
            match part {
                Part::Copied(n) => {
                    // `consumed` is past what the front part has sent.
                    let rest = n - skip;
                    out.push(IoSlice::new(&self.bytes[copied..copied + rest]));
                    copied += rest;
                }
                Part::Buffer { buf, start, len } => {
                    out.push(IoSlice::new(&buf[start + skip..start + len]));
                }
                Part::Shared(payload, _) => out.push(IoSlice::new(&payload[skip..])),
            }
            skip = 0;
        }
        out
    }

    /// The first of [`Output::slices`], empty when nothing waits.
    pub fn first(&self) -> &[u8] {
        match self.parts.front() {
            None => &[],
            Some(Part::Copied(n)) => &self.bytes[self.consumed..self.consumed + n - self.sent],
            Some(Part::Buffer { buf, start, len }) => &buf[start + self.sent..start + len],
            Some(Part::Shared(payload, _)) => &payload[self.sent..],
        }
    }

    /// How many slices a write would gather, at most.
    pub fn parts(&self) -> usize {
        self.parts.len()
    }

    /// The first `n` bytes have been sent.
    ///
    /// # Panics
    /// If there are not so many.
    pub fn sent(&mut self, mut n: usize) {
        self.len -= n;
        while n > 0 {
            let front = self.parts.front().expect("no more is sent than was offered");
            let total = match front {
                Part::Copied(total) => *total,
                Part::Buffer { len, .. } => *len,
                Part::Shared(payload, _) => payload.len(),
            };
            let now = n.min(total - self.sent);
            if matches!(front, Part::Copied(_)) {
                self.consumed += now;
            }
            self.sent += now;
            n -= now;
            if self.sent == total {
                self.sent = 0;
                if let Some(buf) = self.parts.pop_front().and_then(Part::into_buffer) {
                    self.held -= buf.capacity();
                    self.spent.push(buf);
                }
            }
        }
        if self.consumed == self.bytes.len() {
            self.bytes.clear();
            self.consumed = 0;
        } else if self.consumed >= 64 << 10 {
            self.bytes.drain(..self.consumed);
            self.consumed = 0;
        }
    }

    /// Hands back a buffer that is no longer needed.
    pub fn recycle(&mut self) -> Option<AlignedBuf> {
        self.spent.pop()
    }

    /// Takes a buffer that was never sent, to hand it back.
    pub fn spend(&mut self, buf: AlignedBuf) {
        self.spent.push(buf);
    }

    /// Drops what waits; its buffers come back by [`Output::recycle`].
    pub fn clear(&mut self) {
        self.spent.extend(self.parts.drain(..).filter_map(Part::into_buffer));
        self.bytes.clear();
        (self.consumed, self.sent, self.len, self.held) = (0, 0, 0, 0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use larder_base::Rng;

    /// Random pushes and partial sends: the stream is what was pushed, every buffer comes back once.
    #[test]
    fn the_stream_is_what_was_pushed() {
        let mut rng = Rng::new(7);
        let (mut out, mut expected, mut got) = (Output::default(), Vec::new(), Vec::new());
        let (mut buffers, mut back) = (0, 0);
        for round in 0..3000u32 {
            if rng.chance(0.5) {
                let bytes: Vec<u8> =
                    (0..rng.range(0, 300)).map(|i| (i as u32 ^ round) as u8).collect();
                out.push(&bytes);
                expected.extend_from_slice(&bytes);
            } else if rng.chance(0.5) {
                let len = rng.range(1, 12_000) as usize;
                let start = rng.below(100) as usize;
                let mut buf = AlignedBuf::zeroed(start + len);
                buf.iter_mut().enumerate().for_each(|(i, b)| *b = (i as u32 * 31 + round) as u8);
                expected.extend_from_slice(&buf[start..]);
                if rng.chance(0.3) {
                    out.push_shared(&Payload::new(buf).part(start, len));
                } else if rng.chance(0.4) {
                    let cut = rng.below(len as u64 + 1) as usize;
                    let whole = Payload::new(buf);
                    let lent = vec![whole.part(start, cut), whole.part(start + cut, len - cut)];
                    out.push_read(AlignedBuf::zeroed(len), lent);
                    buffers += 1;
                } else {
                    out.push_buffer(buf, start, len);
                    buffers += 1;
                }
            } else {
                let slices = out.slices();
                let offered: usize = slices.iter().map(|s| s.len()).sum();
                assert_eq!(out.first(), slices.first().map_or(&[][..], |s| s));
                let take = rng.below(offered as u64 + 1) as usize;
                let all: Vec<u8> = slices.iter().flat_map(|s| s.iter().copied()).collect();
                got.extend_from_slice(&all[..take]);
                out.sent(take);
            }
            while out.recycle().is_some() {
                back += 1;
            }
            assert_eq!(out.len(), expected.len() - got.len());
            assert_eq!(
                out.held() > 0,
                out.parts
                    .iter()
                    .any(|p| matches!(p, Part::Buffer { .. } | Part::Shared(_, Some(_))))
            );
            if rng.chance(0.1) {
                out.shrink();
            }
        }
        while !out.is_empty() {
            let first = out.first().to_vec();
            got.extend_from_slice(&first);
            out.sent(first.len());
        }
        while out.recycle().is_some() {
            back += 1;
        }
        assert!(got == expected);
        assert_eq!(buffers, back);
        assert!(buffers > 100);
        assert_eq!(out.held(), 0);
    }

    /// Whoever reads nothing makes no memory grow but that of the buffers.
    #[test]
    fn little_is_copied() {
        let mut out = Output::default();
        for _ in 0..10_000 {
            out.push(&[0; 32]);
            out.push_buffer(AlignedBuf::zeroed(4096), 0, 4096);
        }
        let whole = out.held() + out.spent.len() * 4096;
        assert_eq!((out.len(), whole), (10_000 * 4128, 10_000 * 4096));
        assert!(out.copied() < COPIED + 10_000 * 32 + 4096);
    }

    #[test]
    fn clearing_gives_buffers_back() {
        let mut out = Output::default();
        out.push(b"head");
        out.push_buffer(AlignedBuf::zeroed(8192), 0, 8192);
        out.clear();
        assert!(out.is_empty() && out.slices().is_empty() && out.first().is_empty());
        assert!(out.recycle().is_some() && out.recycle().is_none());
    }
}
