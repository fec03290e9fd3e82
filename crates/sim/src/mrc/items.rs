//! What a sweep needs of a request.

use larder_trace::{Request, TraceError};

/// One access to one object.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Item {
    /// The object.
    pub id: u64,
    /// Bytes of key and value (or of the I/O); at least 1, and 4 GiB − 1 where it is more.
    pub size: u32,
    /// A delete or a trim: takes the object out, and is not counted as a request.
    pub removes: bool,
}

impl From<&Request> for Item {
    #[inline]
    fn from(request: &Request) -> Item {
        let bytes = request.size.saturating_add(u64::from(request.key_size)).max(1);
        Item {
            id: request.id,
            size: u32::try_from(bytes).unwrap_or(u32::MAX),
            removes: request.op.is_removal(),
        }
    }
}

/// Turns requests into items.
pub struct Items<R> {
    requests: R,
    blocks: bool,
}

impl<R> Items<R> {
    /// Items of `requests`.
    pub fn new(requests: R) -> Items<R> {
        Items { requests, blocks: false }
    }

    /// Whether there was block I/O among them so far.
    pub fn has_blocks(&self) -> bool {
        self.blocks
    }

    /// The requests left.
    pub fn inner(&self) -> &R {
        &self.requests
    }
}

impl<R: Iterator<Item = Result<Request, TraceError>>> Iterator for Items<R> {
    type Item = Result<Item, TraceError>;

    #[inline]
    fn next(&mut self) -> Option<Self::Item> {
        let next = self.requests.next()?;
        Some(next.map(|request| {
            self.blocks |= request.op.is_block();
            Item::from(&request)
        }))
    }
}

#[cfg(test)]
mod tests {
    use larder_trace::Op;

    use super::*;

    #[test]
    fn sizes_and_removals() {
        let mut request = Request::get(7, 0);
        assert_eq!(Item::from(&request), Item { id: 7, size: 1, removes: false });
        request.key_size = 10;
        request.size = 20;
        request.op = Op::Delete;
        assert_eq!(Item::from(&request), Item { id: 7, size: 30, removes: true });
        request.size = u64::MAX;
        assert_eq!(Item::from(&request).size, u32::MAX);
    }
}
