//! Block operations split into the pages they touch.

use crate::error::{BadRecord, TraceError};
use crate::read::{Progress, Reader};
use crate::request::{Request, mix};

/// Splits reads, writes and trims into one request for each page touched, in rising order; other requests pass as they
/// are. The page's id is `page number × 64 + volume`; volumes from 64 on are told apart by their hash in the id's upper
/// 16 bits too.
pub struct Pages {
    inner: Box<dyn Reader>,
    page: u64,
    current: Option<Request>,
    left: u64,
}

impl Pages {
    /// Splits into pages of `page` bytes (at least one).
    pub fn new(inner: Box<dyn Reader>, page: u32) -> Pages {
        Pages { inner, page: u64::from(page.max(1)), current: None, left: 0 }
    }

    fn page(&self, from: &Request) -> Request {
        let number = from.offset / self.page;
        let volume = u64::from(from.app);
        let mut id = number.wrapping_mul(64).wrapping_add(volume % 64);
        if volume >= 64 {
            id ^= mix(volume) & 0xffff_0000_0000_0000;
        }
        Request { id, offset: number * self.page, size: self.page, ..*from }
    }
}

impl Iterator for Pages {
    type Item = Result<Request, TraceError>;

    #[inline]
    fn next(&mut self) -> Option<Self::Item> {
        loop {
            if let Some(current) = &mut self.current
                && self.left > 0
            {
                self.left -= 1;
                let at = *current;
                current.offset = (current.offset / self.page + 1).saturating_mul(self.page);
                return Some(Ok(self.page(&at)));
            }
            match self.inner.next()? {
                Ok(r) if r.op.is_block() => {
                    // An operation of no bytes touches no page.
                    if r.size > 0 {
                        let last = r.offset.saturating_add(r.size - 1) / self.page;
                        self.left = last - r.offset / self.page + 1;
                        self.current = Some(r);
                    }
                }
                other => return Some(other),
            }
        }
    }
}

impl Reader for Pages {
    fn skipped(&self) -> u64 {
        self.inner.skipped()
    }
    fn first_skipped(&self) -> Option<&BadRecord> {
        self.inner.first_skipped()
    }
    fn progress(&self) -> Progress {
        self.inner.progress()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::request::Op;

    struct Few(std::vec::IntoIter<Request>);

    impl Iterator for Few {
        type Item = Result<Request, TraceError>;
        fn next(&mut self) -> Option<Self::Item> {
            self.0.next().map(Ok)
        }
    }

    impl Reader for Few {
        fn progress(&self) -> Progress {
            Progress::default()
        }
    }

    #[test]
    fn pages_touched() {
        let requests = vec![
            Request::block(Op::Read, 3, 4095, 2),
            Request::block(Op::Write, 0, 8192, 4096),
            Request::block(Op::Read, 0, 5, 0),
            Request::get(7, 100),
            Request::block(Op::Trim, 1, u64::MAX - 10, 100),
        ];
        let pages: Vec<Request> =
            Pages::new(Box::new(Few(requests.into_iter())), 4096).map(|r| r.unwrap()).collect();
        let ids: Vec<u64> = pages[..4].iter().map(|r| r.id).collect();
        assert_eq!(ids, [3, 64 + 3, 2 * 64, 7]);
        assert_eq!((pages[1].offset, pages[1].size, pages[1].op), (4096, 4096, Op::Read));
        assert_eq!(pages[3].size, 100);
        assert_eq!(pages.len(), 5, "a range past the end of the address space ends there");
    }
}
