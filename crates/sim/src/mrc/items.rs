//! What a sweep needs of a request.

use larder_trace::{Request, TraceError};

/// Bytes of a page that block I/O is split into.
pub const PAGE: u64 = 4096;

/// One access to one object.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Item {
    /// The object.
    pub id: u64,
    /// Bytes of key and value (or of the I/O); at least 1.
    pub size: u32,
    /// A delete or a trim: takes the object out, and is not counted as a request.
    pub removes: bool,
}

/// Turns requests into items: one each, or one for each 4 KiB page that a block operation touches.
///
/// A page's id is page number × 64 + device, so that volumes do not meet.
pub struct Items<R> {
    requests: R,
    pages: bool,
    /// The block operation under way: next page, pages left.
    under_way: Option<(Request, u64, u64)>,
}

impl<R> Items<R> {
    /// Items of `requests`; `pages` splits block operations.
    pub fn new(requests: R, pages: bool) -> Items<R> {
        Items { requests, pages, under_way: None }
    }

    /// The requests left.
    pub fn inner(&self) -> &R {
        &self.requests
    }
}

fn whole(request: &Request) -> Item {
    let bytes = request.size.saturating_add(u64::from(request.key_size)).max(1);
    Item {
        id: request.id,
        // Sizes over 4 GiB count as 4 GiB.
        size: u32::try_from(bytes).unwrap_or(u32::MAX),
        removes: request.op.is_removal(),
    }
}

impl<R: Iterator<Item = Result<Request, TraceError>>> Iterator for Items<R> {
    type Item = Result<Item, TraceError>;

    #[inline]
    fn next(&mut self) -> Option<Self::Item> {
        loop {
            if let Some((request, page, left)) = &mut self.under_way {
                if *left > 0 {
                    let item = Item {
                        id: page.wrapping_mul(64).wrapping_add(u64::from(request.app)),
                        size: PAGE as u32,
                        removes: request.op.is_removal(),
                    };
                    *page += 1;
                    *left -= 1;
                    return Some(Ok(item));
                }
                self.under_way = None;
            }
            let request = match self.requests.next()? {
                Ok(request) => request,
                Err(e) => return Some(Err(e)),
            };
            if !self.pages || !request.op.is_block() {
                return Some(Ok(whole(&request)));
            }
            if request.size > 0 {
                let first = request.offset / PAGE;
                let last = request.offset.saturating_add(request.size - 1) / PAGE;
                self.under_way = Some((request, first, last - first + 1));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use larder_trace::Op;

    use super::*;

    #[test]
    fn splits_into_the_pages_touched() {
        let requests = [
            Request::block(Op::Read, 3, 4095, 2),
            Request::block(Op::Write, 0, 8192, 4096),
            Request::block(Op::Read, 0, 8192, 0),
            Request::block(Op::Trim, 0, u64::MAX - 10, 100),
            Request::get(77, 0),
        ];
        let items: Vec<Item> =
            Items::new(requests.into_iter().map(Ok), true).map(|i| i.unwrap()).collect();
        let ids: Vec<(u64, bool)> = items.iter().map(|i| (i.id, i.removes)).collect();
        let last = (u64::MAX / PAGE).wrapping_mul(64);
        assert_eq!(ids, [(3, false), (67, false), (128, false), (last, true), (77, false)]);
        assert_eq!(items[4].size, 1);
    }
}
