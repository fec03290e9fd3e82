//! Block workloads in the manner of those that Azor was measured with (Klonatos et al., "Azor: Using Two-level Block
//! Selection to Improve SSD-based I/O caches", NAS 2011): a file server after SPECsfs2008 and a data warehouse after TPC-H.
//! What the authors state is kept (sizes of the file sets; "write-dominated"; "only 30% accessed"; metadata 50–80 % of the
//! accesses, after Roselli and Anderson, USENIX '00; TPC-H "read only"); how files and queries look is ours.

use larder_base::Rng;

use super::Draw;
use super::blocks::{bytes, scaled};
use super::spec::Spec;
use super::touch::{Deck, Touch};
use crate::error::TraceError;
use crate::request::{Class, Op, Request};

const PAGE: u64 = 4096;
/// Files are cut into pieces of this size, which is also the longest I/O.
const PIECE: u64 = 64 << 10;
/// One part in so many of a file system is metadata.
const METADATA: u64 = 32;

struct Sfs {
    /// Metadata read, metadata written, data read, data written.
    deck: Deck<4>,
    metadata: Touch,
    data: Touch,
    data_from: u64,
}

/// `specsfs`: inodes, directories and journals in the first 32nd of the volume, 4 KiB at a time; files behind, in pieces
/// of 64 KiB, of which the first access takes the whole and later ones a part. The set of both that is in use grows
/// through the run until it is the stated share of the volume.
pub(crate) fn spec_sfs(spec: &mut Spec) -> Result<(u64, Box<dyn Draw>), TraceError> {
    let scale = spec.float("scale", 1.0, 1e-6..=1.0)?;
    let default = format!("{}", scaled(2 << 40, scale).max(32 << 20));
    let size = bytes(spec, "size", &default, 4 << 20)?;
    let touched = spec.float("touched", 0.3, 0.0..=1.0)?;
    let metadata = spec.float("metadata", 0.65, 0.0..=1.0)?;
    let writes = spec.float("writes", 0.6, 0.0..=1.0)?;
    let skew = spec.float("skew", 0.8, 0.0..=10.0)?;
    let requests = spec.number("requests", scaled(40_000_000, scale).max(1000), 1..=1 << 50)?;
    let data_from = (size / METADATA).div_ceil(PIECE) * PIECE;
    let (metadata_pages, pieces) = (data_from / PAGE, (size - data_from) / PIECE);
    let of_metadata = scaled(requests, metadata);
    let of_data = requests - of_metadata;
    let (written_metadata, written) = (scaled(of_metadata, writes), scaled(of_data, writes));
    let generator = Sfs {
        deck: Deck::new([
            of_metadata - written_metadata,
            written_metadata,
            of_data - written,
            written,
        ]),
        metadata: Touch::new(metadata_pages, scaled(metadata_pages, touched), of_metadata, skew),
        data: Touch::new(pieces, scaled(pieces, touched), of_data, skew),
        data_from,
    };
    Ok((requests, Box::new(generator)))
}

impl Draw for Sfs {
    fn draw(&mut self, _index: u64, rng: &mut Rng) -> Request {
        let kind = self.deck.draw(rng);
        let op = if kind == 0 || kind == 2 { Op::Read } else { Op::Write };
        if kind < 2 {
            let (page, _) = self.metadata.draw(rng);
            return Request { class: Class::Metadata, ..Request::block(op, 0, page * PAGE, PAGE) };
        }
        let (piece, first) = self.data.draw(rng);
        let at = self.data_from + piece * PIECE;
        // One page to all sixteen, half as often for each doubling.
        let pages = if first { PIECE / PAGE } else { 1 << rng.next_u64().trailing_ones().min(4) };
        let page = rng.below(PIECE / PAGE - pages + 1);
        Request { class: Class::Data, ..Request::block(op, 0, at + page * PAGE, pages * PAGE) }
    }
}

/// A database page of the warehouse.
const DB_PAGE: u64 = 8192;
/// A table scan reads so much at a time.
const SCAN: u64 = 128 << 10;
/// Shares of the tables' bytes, largest first (lineitem, orders, partsupp, part and customer, the rest), as the TPC-H
/// specification's row counts and widths make them (§4.2.5).
const TABLES: [f64; 5] = [0.70, 0.155, 0.105, 0.035, 0.005];
/// How often the 22 queries scan each, in twenty scans.
const SCANNED: [u64; 5] = [7, 5, 2, 4, 2];

enum Query {
    Scan {
        at: u64,
        end: u64,
    },
    /// Look-ups left; `Some` when an index page was read and its row is next.
    Lookups {
        left: u64,
        row: Option<u64>,
    },
}

struct TpcH {
    /// (start, end) of each table; the indices lie behind.
    tables: Vec<(u64, u64)>,
    index: (u64, u64),
    /// Pages of the indices: all, in the end, where there are look-ups enough.
    popular: Touch,
    scans: Deck<5>,
    lookups: f64,
    burst: u64,
    query: Query,
    done: u64,
    looked_up: u64,
}

/// `tpch`: one query at a time: scans of whole tables, or bursts of index look-ups, each a page of an index (popular
/// ones by Zipf's law, in the end all) and the row's page in one of the two largest tables.
pub(crate) fn tpc_h(spec: &mut Spec) -> Result<(u64, Box<dyn Draw>), TraceError> {
    let scale = spec.float("scale", 1.0, 1e-6..=1.0)?;
    let size =
        bytes(spec, "size", &format!("{}", scaled(28 << 30, scale).max(64 << 20)), 64 << 20)?;
    let index = spec.float("index", 0.2, 0.001..=0.9)?;
    let lookups = spec.float("lookups", 0.5, 0.0..=1.0)?;
    let skew = spec.float("skew", 0.8, 0.0..=10.0)?;
    let requests = spec.number("requests", scaled(4_000_000, scale).max(10_000), 1..=1 << 50)?;
    let of_tables = scaled(size, 1.0 - index) / SCAN * SCAN;
    let mut tables = Vec::new();
    let mut at = 0;
    for (i, share) in TABLES.iter().enumerate() {
        let end = if i + 1 == TABLES.len() {
            of_tables
        } else {
            (at + scaled(of_tables, *share) / SCAN * SCAN).min(of_tables)
        };
        tables.push((at, end));
        at = end;
    }
    let index = (of_tables, (size - of_tables) / DB_PAGE * DB_PAGE);
    let generator = TpcH {
        tables,
        index,
        popular: Touch::new(
            index.1 / DB_PAGE,
            index.1 / DB_PAGE,
            scaled(requests, lookups / 2.0),
            skew,
        ),
        scans: Deck::new(SCANNED),
        lookups,
        burst: (requests / 500).max(64),
        query: Query::Lookups { left: 0, row: None },
        done: 0,
        looked_up: 0,
    };
    Ok((requests, Box::new(generator)))
}

impl TpcH {
    /// What brings the share of look-ups nearer to the wanted one.
    fn next_query(&mut self, rng: &mut Rng) {
        let wanted = self.lookups * (self.done + self.burst / 2) as f64;
        if self.lookups > 0.0 && (self.looked_up as f64) < wanted || self.lookups >= 1.0 {
            self.query = Query::Lookups { left: self.burst / 2, row: None };
            return;
        }
        if self.scans.is_empty() {
            self.scans = Deck::new(SCANNED);
        }
        let table = self.scans.draw(rng);
        let (at, end) = self.tables[table];
        self.query = Query::Scan { at, end };
    }
}

impl Draw for TpcH {
    fn draw(&mut self, _index: u64, rng: &mut Rng) -> Request {
        while match self.query {
            Query::Scan { at, end } => at >= end,
            Query::Lookups { left, row } => left == 0 && row.is_none(),
        } {
            self.next_query(rng);
        }
        self.done += 1;
        let (offset, len) = match &mut self.query {
            Query::Scan { at, end } => {
                let from = *at;
                *at = (from + SCAN).min(*end);
                (from, *at - from)
            }
            Query::Lookups { left, row } => {
                self.looked_up += 1;
                match row.take() {
                    Some(row) => (row, DB_PAGE),
                    None => {
                        *left -= 1;
                        let (page, _) = self.popular.draw(rng);
                        let (start, end) = self.tables[usize::from(rng.chance(0.3))];
                        *row = Some(start + rng.below(((end - start) / DB_PAGE).max(1)) * DB_PAGE);
                        (self.index.0 + page * DB_PAGE, DB_PAGE)
                    }
                }
            }
        };
        Request { class: Class::Data, ..Request::block(Op::Read, 0, offset, len) }
    }
}

#[cfg(test)]
mod tests {
    use crate::generate::parse;
    use crate::stats::{Collector, Stats};

    fn stats(spec: &str) -> Stats {
        let mut all = Collector::new();
        parse(spec).unwrap().for_each(|r| all.add(&r.unwrap()));
        all.finish()
    }

    #[test]
    fn specsfs_as_stated() {
        for (metadata, seed) in [(0.5, 1), (0.65, 2), (0.8, 3)] {
            let s = stats(&format!("specsfs?scale=0.002&metadata={metadata}&seed={seed}"));
            let b = s.block.unwrap();
            assert!((b.metadata_share.unwrap() - metadata).abs() < 0.001, "{b:?}");
            assert!((s.write_share - 0.6).abs() < 0.001, "{}", s.write_share);
            let share = b.unique_bytes as f64 / (0.002 * (2u64 << 40) as f64);
            // With much metadata there are too few accesses to data for the whole of the 30 %.
            let expected = if metadata > 0.7 { 0.24..0.3 } else { 0.298..0.302 };
            assert!(expected.contains(&share), "{share}");
        }
    }

    #[test]
    fn tpch_as_stated() {
        let s = stats("tpch?scale=0.05&requests=400000");
        let b = s.block.unwrap();
        assert_eq!(s.read_share, 1.0);
        let size = 0.05 * (28u64 << 30) as f64;
        assert!((0.998..=1.0).contains(&(b.unique_bytes as f64 / size)), "{b:?}");
        // Half of the requests are scans, in long runs, which bring nearly all bytes.
        assert!((b.sequential_share - 0.5).abs() < 0.03, "{b:?}");
        assert!(b.sequential_byte_share > 0.9, "{b:?}");
        let scans = stats("tpch?size=1g&lookups=0&requests=30000").block.unwrap();
        assert!(scans.sequential_share > 0.99, "{scans:?}");
        let lookups = stats("tpch?size=1g&lookups=1&requests=30000").block.unwrap();
        assert!(lookups.sequential_share < 0.01, "{lookups:?}");
    }
}
