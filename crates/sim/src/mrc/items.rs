//! What a sweep needs of a request.

use larder_trace::{Op, Request, TraceError};

/// What an item's size says of the object.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Said {
    /// The object has it, as far as the trace knows.
    #[default]
    Asked,
    /// The object has it from now on: a store.
    Stored,
    /// Nothing: a read whose source does not know the size, such as a captured get that missed.
    Nothing,
}

/// One access to one object.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Item {
    /// The object.
    pub id: u64,
    /// Bytes of key and value (or of the I/O); at least 1, and 4 GiB − 1 where it is more.
    pub size: u32,
    /// A delete or a trim: takes the object out, and is not counted as a request.
    pub removes: bool,
    /// What `size` says.
    pub said: Said,
}

impl Item {
    /// A read of so many bytes.
    pub fn get(id: u64, size: u32) -> Item {
        Item { id, size, removes: false, said: Said::Asked }
    }
}

impl From<&Request> for Item {
    #[inline]
    fn from(request: &Request) -> Item {
        let bytes = request.size.saturating_add(u64::from(request.key_size)).max(1);
        let said = match request.op {
            Op::Set | Op::Add | Op::Replace | Op::Cas => Said::Stored,
            Op::Get if request.size == 0 => Said::Nothing,
            _ => Said::Asked,
        };
        Item {
            id: request.id,
            size: u32::try_from(bytes).unwrap_or(u32::MAX),
            removes: request.op.is_removal(),
            said,
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
    use super::*;

    #[test]
    fn sizes_and_removals() {
        let mut request = Request::get(7, 0);
        assert_eq!(Item::from(&request), Item { said: Said::Nothing, ..Item::get(7, 1) });
        request.key_size = 10;
        request.size = 20;
        request.op = Op::Delete;
        assert_eq!(Item::from(&request), Item { removes: true, ..Item::get(7, 30) });
        request.op = Op::Set;
        assert_eq!(Item::from(&request).said, Said::Stored);
        request.size = u64::MAX;
        assert_eq!(Item::from(&request).size, u32::MAX);
    }
}
