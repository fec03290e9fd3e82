//! A block workload in the manner of TPC-C (Azor: 155 GB, "highly concurrent"), from the transactions of the
//! specification (revision 5.11): their mix (§5.2.3), the rows they touch (§2), NURand's skew (§2.1.6) and the sizes of
//! tables (§4.3). It is what reaches storage below a buffer that holds the small hot tables (warehouse, district, item);
//! a page that was changed reaches it with the chance that it is not changed again first.

use std::collections::VecDeque;

use larder_base::Rng;

use super::Draw;
use super::blocks::{bytes, scaled};
use super::spec::Spec;
use crate::error::TraceError;
use crate::request::{Class, Op, Request};

const PAGE: u64 = 8192;
/// Pages of a warehouse's tables: 100,000 stock rows of 320 B, 30,000 customers of 680 B, 300,000 order lines of 64 B
/// and their like again for new ones, orders, history.
const STOCK: u64 = 4000;
const CUSTOMER: u64 = 2500;
const LINES: u64 = 4800;
const ORDERS: u64 = 240;
const HISTORY: u64 = 420;
const WAREHOUSE: u64 = STOCK + CUSTOMER + LINES + ORDERS + HISTORY;
/// Transactions under way at once.
const TERMINALS: usize = 64;

/// What a transaction has yet to do.
type Steps = VecDeque<Step>;

#[derive(Clone, Copy)]
enum Step {
    Read(u64),
    Write(u64),
    /// Bytes at the end of the log, wherever that is by then.
    Commit(u64),
}

struct TpcC {
    warehouses: u64,
    /// Chance that a changed page is written before it is changed again.
    written: f64,
    log: (u64, u64),
    log_at: u64,
    /// How many orders each warehouse has had.
    orders: Vec<u32>,
    terminals: Vec<Steps>,
    /// NURand's constants.
    c: [u64; 2],
}

/// `tpcc`: warehouses of 92 MiB each, and a log of a fiftieth, fill the volume.
pub(crate) fn build(spec: &mut Spec) -> Result<(u64, Box<dyn Draw>), TraceError> {
    let scale = spec.float("scale", 1.0, 1e-6..=1.0)?;
    let default = format!("{}", scaled(155 << 30, scale).max(256 << 20));
    let size = bytes(spec, "size", &default, 128 << 20)?;
    let written = spec.float("written", 0.5, 0.0..=1.0)?;
    let requests = spec.number("requests", scaled(40_000_000, scale).max(10_000), 1..=1 << 50)?;
    let seed = spec.number("seed", 1, 0..=u64::MAX)?;
    let log = (size / 50).next_multiple_of(PAGE);
    let warehouses = (size - log) / (WAREHOUSE * PAGE);
    if warehouses > 1 << 24 {
        return Err(spec.error("size is more than 2^24 warehouses of 92 MiB"));
    }
    let mut rng = Rng::new(seed ^ 0x7470_6363);
    let generator = TpcC {
        warehouses,
        written,
        log: (warehouses * WAREHOUSE * PAGE, log),
        log_at: 0,
        orders: vec![0; warehouses as usize],
        terminals: vec![Steps::new(); TERMINALS],
        c: [rng.below(1024), rng.below(8192)],
    };
    Ok((requests, Box::new(generator)))
}

impl TpcC {
    /// NURand(a, 0, n − 1) of §2.1.6.
    fn nurand(&self, a: u64, n: u64, rng: &mut Rng) -> u64 {
        let c = self.c[usize::from(a > 1023)];
        ((rng.below(a + 1) | rng.below(n)) + c) % n
    }

    fn customer(&self, base: u64, rng: &mut Rng) -> u64 {
        base + STOCK + self.nurand(1023, 30_000, rng) * CUSTOMER / 30_000
    }

    fn stock(&self, base: u64, rng: &mut Rng) -> u64 {
        base + self.nurand(8191, 100_000, rng) * STOCK / 100_000
    }

    /// Pages of order lines and of orders for the order that came `back` orders ago.
    fn order(&self, warehouse: u64, back: u64) -> (u64, u64) {
        let base = warehouse * WAREHOUSE + STOCK + CUSTOMER;
        // Ten lines of 64 B: a page holds 12 orders' lines, or 256 orders; the oldest are overwritten.
        let number = (25_000 + u64::from(self.orders[warehouse as usize])).saturating_sub(back);
        (base + number / 12 % LINES, base + LINES + number / 256 % ORDERS)
    }

    fn change(&self, queue: &mut Steps, number: u64, rng: &mut Rng) {
        if rng.chance(self.written) {
            queue.push_back(Step::Write(number));
        }
    }

    fn request(&mut self, step: Step) -> Request {
        let (op, offset, len) = match step {
            Step::Read(page) => (Op::Read, page * PAGE, PAGE),
            Step::Write(page) => (Op::Write, page * PAGE, PAGE),
            Step::Commit(len) => {
                let (start, bytes) = self.log;
                let at = self.log_at;
                let len = len.min(bytes - at);
                self.log_at = (at + len) % bytes;
                (Op::Write, start + at, len)
            }
        };
        Request { class: Class::Data, ..Request::block(op, 0, offset, len) }
    }

    fn transaction(&mut self, queue: &mut Steps, rng: &mut Rng) {
        let warehouse = rng.below(self.warehouses);
        let base = warehouse * WAREHOUSE;
        let read = |queue: &mut Steps, number| queue.push_back(Step::Read(number));
        match rng.below(100) {
            // New-order: 5 to 15 items.
            0..45 => {
                read(queue, self.customer(base, rng));
                for _ in 0..rng.range(5, 15) {
                    // One item in a hundred comes from another warehouse.
                    let from =
                        if rng.chance(0.01) { rng.below(self.warehouses) } else { warehouse };
                    let stock = self.stock(from * WAREHOUSE, rng);
                    read(queue, stock);
                    self.change(queue, stock, rng);
                }
                self.orders[warehouse as usize] = self.orders[warehouse as usize].wrapping_add(1);
                let (lines, orders) = self.order(warehouse, 0);
                self.change(queue, lines, rng);
                self.change(queue, orders, rng);
                queue.push_back(Step::Commit(4096));
            }
            // Payment.
            45..88 => {
                let customer = self.customer(base, rng);
                read(queue, customer);
                self.change(queue, customer, rng);
                let history = u64::from(self.orders[warehouse as usize]) / 146 % HISTORY;
                self.change(queue, base + WAREHOUSE - HISTORY + history, rng);
                queue.push_back(Step::Commit(2048));
            }
            // Order-status.
            88..92 => {
                read(queue, self.customer(base, rng));
                let (lines, orders) = self.order(warehouse, rng.below(10_000));
                read(queue, orders);
                read(queue, lines);
            }
            // Delivery: the oldest undelivered order of each of ten districts.
            92..96 => {
                for district in 0..10 {
                    let (lines, orders) = self.order(warehouse, 9000 - district * 10);
                    let customer = self.customer(base, rng);
                    for number in [orders, lines, customer] {
                        read(queue, number);
                        self.change(queue, number, rng);
                    }
                }
                queue.push_back(Step::Commit(8192));
            }
            // Stock-level: the lines of the last 20 orders, and the stock of some of their items.
            _ => {
                for back in [20, 10, 0] {
                    let (lines, _) = self.order(warehouse, back);
                    read(queue, lines);
                }
                for _ in 0..20 {
                    read(queue, self.stock(base, rng));
                }
            }
        }
    }
}

impl Draw for TpcC {
    fn draw(&mut self, _index: u64, rng: &mut Rng) -> Request {
        let at = rng.below(TERMINALS as u64) as usize;
        loop {
            if let Some(step) = self.terminals[at].pop_front() {
                return self.request(step);
            }
            let mut queue = std::mem::take(&mut self.terminals[at]);
            self.transaction(&mut queue, rng);
            self.terminals[at] = queue;
        }
    }
}

#[cfg(test)]
mod tests {
    use crate::generate::parse;
    use crate::stats::Collector;

    #[test]
    fn tpcc_in_its_proportions() {
        let mut all = Collector::new();
        let size = 2u64 << 30;
        for request in parse("tpcc?size=2g&requests=600000&seed=4").unwrap() {
            let r = request.unwrap();
            assert!(r.offset + r.size <= size && r.size > 0, "{r:?}");
            all.add(&r);
        }
        let s = all.finish();
        let b = s.block.unwrap();
        // Half of the changed pages reach storage: about two reads for a write.
        assert!((0.6..0.7).contains(&s.read_share), "{}", s.read_share);
        assert!(b.unique_bytes < size && b.unique_bytes > size / 4, "{b:?}");
        // Only the log is sequential.
        assert!((0.03..0.12).contains(&b.sequential_share), "{b:?}");
        // NURand: popular pages, but far from a small hot set.
        assert!((2.0..20.0).contains(&s.requests_per_object), "{}", s.requests_per_object);
        assert!(parse("tpcc?size=10m").is_err());
        let all_written = parse("tpcc?size=2g&requests=50000&written=1").unwrap();
        let writes = all_written.filter(|r| r.as_ref().unwrap().op.is_write()).count();
        assert!(writes > 22_000, "{writes}");
    }
}
