//! The flash of a replay: what the log wrote, with runs of zeros left out, since values are recorded by their length and are
//! zeros here. Bytes are gone through a page at a time.
//!
//! ```text
//! page    (u16 zeros, u16 literal bytes, the bytes) …, until 4,096 bytes are told of
//! ```

const PAGE: usize = 4096;
/// Shorter runs of zeros are literal: a token costs four bytes.
const MIN_RUN: usize = 12;

#[derive(Clone, Debug, Default)]
struct Packed {
    /// Where each page begins in `bytes`, and the end.
    starts: Vec<u32>,
    bytes: Vec<u8>,
}

impl Packed {
    fn memory_bytes(&self) -> u64 {
        (self.bytes.capacity() + self.starts.capacity() * 4) as u64
    }
}

/// Segments by number; see the [module](self).
#[derive(Debug)]
pub(super) struct ReplayFlash {
    segments: Vec<Packed>,
    segment_bytes: usize,
    held: u64,
}

fn zeros(bytes: &[u8]) -> usize {
    bytes.iter().take_while(|&&b| b == 0).count()
}

fn pack_page(page: &[u8], out: &mut Vec<u8>) {
    let mut at = 0;
    while at < page.len() {
        let run = zeros(&page[at..]);
        let start = at + run;
        let mut end = start;
        while end < page.len() {
            let run = zeros(&page[end..]);
            if run >= MIN_RUN || run > 0 && end + run == page.len() {
                break;
            }
            end += run.max(1);
        }
        out.extend_from_slice(&(run as u16).to_le_bytes());
        out.extend_from_slice(&((end - start) as u16).to_le_bytes());
        out.extend_from_slice(&page[start..end]);
        at = end;
    }
}

fn unpack_page(packed: &[u8], page: &mut [u8]) {
    page.fill(0);
    let (mut from, mut at) = (0, 0);
    while from + 4 <= packed.len() {
        let run = usize::from(u16::from_le_bytes([packed[from], packed[from + 1]]));
        let len = usize::from(u16::from_le_bytes([packed[from + 2], packed[from + 3]]));
        at += run;
        from += 4;
        page[at..at + len].copy_from_slice(&packed[from..from + len]);
        (at, from) = (at + len, from + len);
    }
}

impl ReplayFlash {
    pub(super) fn new(segments: u16, segment_bytes: u32) -> ReplayFlash {
        ReplayFlash {
            segments: vec![Packed::default(); usize::from(segments) + 1],
            segment_bytes: segment_bytes as usize,
            held: 0,
        }
    }

    /// Holds what the log wrote; `false` for what is no whole segment.
    pub(super) fn write(&mut self, segment: u16, bytes: &[u8]) -> bool {
        let Some(packed) = self.segments.get_mut(usize::from(segment)) else { return false };
        if bytes.len() != self.segment_bytes {
            return false;
        }
        self.held -= packed.memory_bytes();
        packed.starts.clear();
        packed.bytes.clear();
        for page in bytes.chunks(PAGE) {
            packed.starts.push(packed.bytes.len() as u32);
            pack_page(page, &mut packed.bytes);
        }
        packed.starts.push(packed.bytes.len() as u32);
        packed.bytes.shrink_to_fit();
        self.held += packed.memory_bytes();
        true
    }

    /// Reads a stretch, which may run on into the segments that follow, into `out`; zeros where nothing was ever written.
    pub(super) fn read(&self, segment: u16, offset: u32, len: u32, out: &mut Vec<u8>) {
        // A read is of one page or one extent; a record may say anything.
        let behind = self.segments.len().saturating_sub(usize::from(segment));
        let len = (len as usize).min(behind * self.segment_bytes);
        out.clear();
        out.resize(len, 0);
        let (mut segment, mut at) = (usize::from(segment), offset as usize);
        let mut rest = &mut out[..];
        while !rest.is_empty() && segment < self.segments.len() {
            let here = rest.len().min(self.segment_bytes.saturating_sub(at));
            let (out, behind) = rest.split_at_mut(here);
            self.read_in(segment, at, out);
            (segment, at, rest) = (segment + 1, 0, behind);
        }
    }

    /// Reads a stretch of one segment.
    fn read_in(&self, segment: usize, start: usize, out: &mut [u8]) {
        let Some(packed) = self.segments.get(segment) else { return };
        let mut page = [0; PAGE];
        let end = start + out.len();
        for i in start / PAGE..end.div_ceil(PAGE) {
            let Some(&[from, to]) = packed.starts.get(i..i + 2).and_then(|s| s.first_chunk::<2>())
            else {
                return;
            };
            unpack_page(&packed.bytes[from as usize..to as usize], &mut page);
            let (first, last) = (start.max(i * PAGE), end.min((i + 1) * PAGE));
            out[first - start..last - start]
                .copy_from_slice(&page[first - i * PAGE..last - i * PAGE]);
        }
    }

    /// Reads a whole segment.
    pub(super) fn read_segment(&self, segment: u16, out: &mut [u8]) -> bool {
        let Some(packed) = self.segments.get(usize::from(segment)) else { return false };
        if packed.starts.is_empty() || out.len() != self.segment_bytes {
            return false;
        }
        for (ends, page) in packed.starts.windows(2).zip(out.chunks_mut(PAGE)) {
            unpack_page(&packed.bytes[ends[0] as usize..ends[1] as usize], page);
        }
        true
    }

    /// Bytes of memory that segments take.
    pub(super) fn memory_bytes(&self) -> u64 {
        self.held
    }
}

#[cfg(test)]
mod tests {
    use larder_base::Rng;

    use super::*;

    #[test]
    fn segments_come_back_and_zeros_cost_little() {
        let mut rng = Rng::new(3);
        for share in [0.0, 0.02, 0.5, 1.0] {
            let bytes: Vec<u8> = (0..4 * PAGE)
                .map(|_| if rng.chance(share) { rng.next_u64() as u8 } else { 0 })
                .collect();
            let mut flash = ReplayFlash::new(4, 4 * PAGE as u32);
            assert!(flash.write(2, &bytes) && !flash.write(9, &bytes) && !flash.write(1, &[1]));
            let mut whole = vec![1; 4 * PAGE];
            assert!(flash.read_segment(2, &mut whole) && whole == bytes);
            assert!(!flash.read_segment(3, &mut whole));
            let mut part = Vec::new();
            for _ in 0..200 {
                let offset = rng.below(4 * PAGE as u64 - 1) as usize;
                let len = 1 + rng.below((4 * PAGE - offset) as u64) as usize;
                flash.read(2, offset as u32, len as u32, &mut part);
                assert_eq!(part, bytes[offset..offset + len]);
            }
            let counted: u64 = flash.segments.iter().map(Packed::memory_bytes).sum();
            assert_eq!(flash.memory_bytes(), counted);
            assert!(share > 0.0 || flash.memory_bytes() < 200, "{}", flash.memory_bytes());
        }
    }

    #[test]
    fn places_that_are_not_read_as_zeros() {
        let flash = ReplayFlash::new(2, 8192);
        let mut out = vec![1];
        flash.read(77, u32::MAX, u32::MAX, &mut out);
        assert!(out.is_empty());
        flash.read(2, u32::MAX, u32::MAX, &mut out);
        assert_eq!(out, vec![0; 8192]);
    }

    #[test]
    fn a_read_runs_on_into_the_next_segment() {
        let mut rng = Rng::new(4);
        let mut bytes = vec![0; 3 * 2 * PAGE];
        rng.fill(&mut bytes);
        let mut flash = ReplayFlash::new(3, 2 * PAGE as u32);
        for (segment, bytes) in bytes.chunks(2 * PAGE).enumerate() {
            assert!(flash.write(segment as u16 + 1, bytes));
        }
        let mut part = Vec::new();
        for (segment, offset, len) in [(1, 64, 3 * PAGE), (2, 5000, 2 * PAGE), (1, 0, 6 * PAGE)] {
            flash.read(segment, offset, len as u32, &mut part);
            let at = (usize::from(segment) - 1) * 2 * PAGE + offset as usize;
            assert_eq!(part, bytes[at..at + len], "{segment} {offset} {len}");
        }
    }
}
