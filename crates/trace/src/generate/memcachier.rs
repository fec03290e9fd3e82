//! A mix of applications with the statistics that the Flashield paper gives of a week of Memcachier (its Table 2 and
//! Figure 2): mean object 257 B, 80.67 % under 1 KB; reads 90 %, writes 9.5 %, updates 0.5 %; 60.6 % of writes never
//! read. The applications differ widely in all of these and in popularity; the table below is ours, the totals are the
//! paper's and hold whatever the number of applications.

use std::collections::{BTreeMap, VecDeque};

use larder_base::{Rng, prefetch};

use super::simple::permute;
use super::spec::Spec;
use super::{Draw, Zipf};
use crate::error::TraceError;
use crate::request::{Op, Request, mix};

/// What sets an application apart, before the totals are brought to the wanted ones.
struct Kind {
    /// Share of all requests.
    requests: f64,
    /// Share of all live objects.
    objects: f64,
    skew: f64,
    writes: f64,
    updates: f64,
    unread: f64,
    /// Share of its objects that are 1 KB or more.
    large: f64,
    /// Mean of the others, in bytes.
    small: f64,
    /// Seconds; 0 is none.
    ttl: u32,
    key: u32,
}

#[rustfmt::skip]
const KINDS: [Kind; 8] = [
    // A large catalogue with a long tail; much is written in vain.
    Kind { requests: 0.28, objects: 0.40, skew: 0.70, writes: 0.16, updates: 0.002, unread: 0.75, large: 0.05, small: 60.0, ttl: 0, key: 32 },
    // Sessions: written often, updated, short-lived.
    Kind { requests: 0.16, objects: 0.10, skew: 0.80, writes: 0.12, updates: 0.020, unread: 0.55, large: 0.00, small: 90.0, ttl: 1800, key: 40 },
    // A small hot set, hardly ever written.
    Kind { requests: 0.20, objects: 0.01, skew: 1.10, writes: 0.005, updates: 0.001, unread: 0.10, large: 0.02, small: 30.0, ttl: 0, key: 20 },
    // Rendered fragments: large, read a few times.
    Kind { requests: 0.10, objects: 0.15, skew: 0.85, writes: 0.10, updates: 0.001, unread: 0.40, large: 0.95, small: 200.0, ttl: 86_400, key: 48 },
    // Counters and flags.
    Kind { requests: 0.10, objects: 0.04, skew: 1.00, writes: 0.02, updates: 0.010, unread: 0.20, large: 0.00, small: 16.0, ttl: 0, key: 24 },
    // Query results: written on a schedule, most never asked for.
    Kind { requests: 0.06, objects: 0.15, skew: 0.60, writes: 0.25, updates: 0.003, unread: 0.90, large: 0.60, small: 120.0, ttl: 3600, key: 64 },
    // A feed: new objects are read at once and then forgotten.
    Kind { requests: 0.06, objects: 0.10, skew: 0.90, writes: 0.18, updates: 0.002, unread: 0.30, large: 0.10, small: 80.0, ttl: 7200, key: 28 },
    // Configuration: a handful of objects, always read.
    Kind { requests: 0.04, objects: 0.05, skew: 1.20, writes: 0.001, updates: 0.001, unread: 0.05, large: 0.70, small: 150.0, ttl: 0, key: 16 },
];

/// The paper's totals.
const WRITES: f64 = 0.095;
const UPDATES: f64 = 0.005;
const UNREAD: f64 = 0.606;
const MEAN: f64 = 257.0;
const UNDER_1K: f64 = 0.8067;
/// Mean of the exponential part above 1,024 of large objects: with 19.33 % of them large the mean of 257 leaves no more.
const LARGE_TAIL: f64 = 90.0;

struct App {
    number: u32,
    zipf: Zipf,
    writes: f64,
    updates: f64,
    unread: f64,
    large: f64,
    small: f64,
    ttl: u32,
    key: u32,
    slots: u64,
    generations: Generations,
    unread_ids: u64,
    /// Objects just written whose first read is due: (request number of the application, slot).
    pending: VecDeque<(u64, u64)>,
    requests: u64,
}

/// How many objects have lived in each slot: most numbers are small, and a table that is looked up at random is the faster
/// the smaller it is.
struct Generations {
    /// [`Generations::MANY`] where the number is kept apart.
    few: Vec<u8>,
    many: BTreeMap<u64, u32>,
}

impl Generations {
    const MANY: u8 = u8::MAX;

    fn new(slots: u64) -> Generations {
        Generations { few: vec![0; slots as usize], many: BTreeMap::new() }
    }

    fn of(&self, slot: u64) -> u32 {
        match self.few[slot as usize] {
            Self::MANY => self.many.get(&slot).copied().unwrap_or_default(),
            few => u32::from(few),
        }
    }

    fn add(&mut self, slot: u64) {
        let few = &mut self.few[slot as usize];
        if *few == Self::MANY {
            let many = self.many.entry(slot).or_default();
            *many = many.wrapping_add(1);
            return;
        }
        *few += 1;
        if *few == Self::MANY {
            self.many.insert(slot, u32::from(Self::MANY));
        }
    }
}

/// The object of a request that has been drawn.
#[derive(Clone, Copy)]
enum Drawn {
    /// One of no slot.
    Id(u64),
    /// The next that lives in this slot.
    Next(u64),
    /// The one that lives in this slot.
    Slot(u64),
}

/// Requests that are drawn before the one that is given out. What lives in a slot is known only when its turn comes, but
/// where that stands in memory is known as soon as the slot has been drawn.
const AHEAD: usize = 8;

struct Memcachier {
    /// The next requests: application, operation and object.
    coming: VecDeque<(usize, Op, Drawn)>,
    apps: Vec<App>,
    /// Cumulative shares of requests.
    shares: Vec<f64>,
    salt: u64,
}

/// Scales `values` so that Σ weight × value = `target`, keeping every value at most `ceiling`.
fn scale(weights: &[f64], values: &mut [f64], target: f64, ceiling: f64) {
    for _ in 0..64 {
        let total: f64 = weights.iter().zip(values.iter()).map(|(w, v)| w * v).sum();
        if total <= 0.0 {
            return;
        }
        for v in values.iter_mut() {
            *v = (*v * target / total).min(ceiling);
        }
    }
}

pub(crate) fn build(spec: &mut Spec) -> Result<(u64, Box<dyn Draw>), TraceError> {
    let apps = spec.number("apps", 8, 1..=64)? as usize;
    let objects = spec.number("objects", 1_000_000, 1000..=1 << 28)?;
    let requests = spec.number("requests", objects.saturating_mul(10), 1..=1 << 50)?;
    let writes = spec.float("writes", WRITES, 0.0..=0.5)?;
    let updates = spec.float("updates", UPDATES, 0.0..=0.4)?;
    let unread = spec.float("unread", UNREAD, 0.0..=0.9)?;
    let seed = spec.number("seed", 1, 0..=u64::MAX)?;
    let mut rng = Rng::new(seed ^ 0x6d65_6d63);
    let kinds: Vec<&Kind> = (0..apps).map(|i| &KINDS[i % KINDS.len()]).collect();
    // Beyond the first eight, applications repeat the kinds at other sizes.
    let vary: Vec<f64> =
        (0..apps).map(|i| if i < KINDS.len() { 1.0 } else { 0.3 + 1.4 * rng.unit() }).collect();
    let normal = |of: fn(&Kind) -> f64| -> Vec<f64> {
        let raw: Vec<f64> = kinds.iter().zip(&vary).map(|(k, v)| of(k) * v).collect();
        let sum: f64 = raw.iter().sum();
        raw.into_iter().map(|x| x / sum).collect()
    };
    let share = normal(|k| k.requests);
    let object_share = normal(|k| k.objects);
    let plain = |of: fn(&Kind) -> f64| -> Vec<f64> { kinds.iter().map(|k| of(k)).collect() };
    let mut write = plain(|k| k.writes);
    scale(&share, &mut write, writes, 0.6);
    let mut update = plain(|k| k.updates);
    scale(&share, &mut update, updates, 0.4);
    let write_weight: Vec<f64> = share.iter().zip(&write).map(|(s, w)| s * w).collect();
    let mut never = plain(|k| k.unread);
    scale(&write_weight, &mut never, unread * writes, 0.97);
    let mut large = plain(|k| k.large);
    scale(&share, &mut large, 1.0 - UNDER_1K, 1.0);
    let small_weight: Vec<f64> = share.iter().zip(&large).map(|(s, l)| s * (1.0 - l)).collect();
    let mut small = plain(|k| k.small);
    scale(&small_weight, &mut small, MEAN - (1.0 - UNDER_1K) * (1024.0 + LARGE_TAIL), 400.0);
    let mut total = 0.0;
    let shares = share
        .iter()
        .map(|s| {
            total += s;
            total
        })
        .collect();
    let apps = kinds
        .iter()
        .enumerate()
        .map(|(i, k)| {
            let slots = ((objects as f64 * object_share[i]) as u64).max(16);
            App {
                number: i as u32 + 1,
                zipf: Zipf::new(slots, k.skew),
                writes: write[i],
                updates: update[i],
                unread: never[i],
                large: large[i],
                small: small[i],
                ttl: k.ttl,
                key: k.key,
                slots,
                generations: Generations::new(slots),
                unread_ids: 0,
                pending: VecDeque::new(),
                requests: 0,
            }
        })
        .collect();
    let coming = VecDeque::with_capacity(AHEAD + 1);
    Ok((requests, Box::new(Memcachier { coming, apps, shares, salt: mix(seed) })))
}

impl App {
    fn live(&self, slot: u64) -> u64 {
        // application 8 bits, generation 20, slot 36.
        u64::from(self.number) << 56 | u64::from(self.generations.of(slot) & 0xf_ffff) << 32 | slot
    }

    fn popular(&self, rng: &mut Rng) -> u64 {
        permute(self.zipf.draw(rng), self.slots)
    }

    /// The size of an object, always the same: exponential below and above 1,024.
    fn size(&self, id: u64, salt: u64) -> u64 {
        let h = mix(id ^ salt);
        let unit = |bits: u64| (bits >> 11) as f64 / (1u64 << 53) as f64;
        let tail = -(1.0 - unit(mix(h))).ln();
        if unit(h) < self.large {
            1024 + (tail * LARGE_TAIL) as u64
        } else {
            ((tail * self.small) as u64).clamp(1, 1023)
        }
    }

    fn draw(&mut self, rng: &mut Rng) -> (Op, Drawn) {
        self.requests += 1;
        let u = rng.unit();
        if u < self.writes {
            if rng.chance(self.unread) {
                self.unread_ids += 1;
                let id = u64::from(self.number) << 56 | 1 << 55 | self.unread_ids;
                return (Op::Set, Drawn::Id(id));
            }
            // A new object takes a slot, and is read within a few hundred requests of its application.
            let slot = rng.below(self.slots);
            let after = (-(1.0 - rng.unit()).ln() * 100.0) as u64;
            self.pending.push_back((self.requests + after, slot));
            return (Op::Set, Drawn::Next(slot));
        }
        if u < self.writes + self.updates {
            return (Op::Set, Drawn::Slot(self.popular(rng)));
        }
        // Reads due come in the order in which their objects were written, so one may wait for the one before it.
        if let Some(&(due, slot)) = self.pending.front()
            && due <= self.requests
        {
            self.pending.pop_front();
            return (Op::Get, Drawn::Slot(slot));
        }
        (Op::Get, Drawn::Slot(self.popular(rng)))
    }

    /// Asks for what [`App::id`] will look at.
    fn warm(&self, drawn: Drawn) {
        if let Drawn::Next(slot) | Drawn::Slot(slot) = drawn {
            prefetch(&self.generations.few, slot as usize);
        }
    }

    /// The id of what was drawn, when its turn has come.
    fn id(&mut self, drawn: Drawn) -> u64 {
        match drawn {
            Drawn::Id(id) => id,
            Drawn::Slot(slot) => self.live(slot),
            Drawn::Next(slot) => {
                self.generations.add(slot);
                self.live(slot)
            }
        }
    }
}

impl Memcachier {
    fn look_ahead(&mut self, rng: &mut Rng) -> (usize, Op, Drawn) {
        let u = rng.unit();
        let at = self.shares.partition_point(|&s| s <= u).min(self.apps.len() - 1);
        let app = &mut self.apps[at];
        let (op, drawn) = app.draw(rng);
        app.warm(drawn);
        (at, op, drawn)
    }
}

impl Draw for Memcachier {
    fn draw(&mut self, _index: u64, rng: &mut Rng) -> Request {
        // What a draw says does not depend on what lives in any slot: the same are drawn, only sooner.
        while self.coming.len() < AHEAD {
            let next = self.look_ahead(rng);
            self.coming.push_back(next);
        }
        let last = self.look_ahead(rng);
        let (at, op, drawn) = self.coming.pop_front().unwrap_or(last);
        self.coming.push_back(last);
        let app = &mut self.apps[at];
        let id = app.id(drawn);
        Request {
            op,
            key_size: app.key,
            ttl: app.ttl,
            app: app.number,
            ..Request::get(id, app.size(id, self.salt))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::Generations;
    use crate::generate::parse;
    use crate::stats::Collector;

    #[test]
    fn generations_are_counted_past_a_byte() {
        let mut g = Generations::new(3);
        for n in 0..1000 {
            assert_eq!((g.of(0), g.of(1), g.of(2)), (0, n, n / 2));
            g.add(1);
            if n % 2 == 1 {
                g.add(2);
            }
        }
        assert_eq!(g.many.len(), 2);
    }

    #[test]
    fn totals_are_the_papers() {
        for (apps, seed) in [(8, 1), (20, 7)] {
            let spec = format!(
                "memcachier?apps={apps}&objects=50000&requests=600000&seed={seed}&rate=10000"
            );
            let mut all = Collector::new();
            for request in parse(&spec).unwrap() {
                all.add(&request.unwrap());
            }
            let s = all.finish();
            let near = |got: f64, want: f64, within: f64, what: &str| {
                assert!(
                    (got - want).abs() <= within * want,
                    "{what}: {got}, not {want} (apps {apps}, seed {seed})"
                );
            };
            near(s.mean_size, 257.0, 0.08, "mean size");
            near(s.under_1k, 0.8067, 0.03, "share under 1 KB");
            near(s.write_share, 0.1, 0.02, "writes and updates");
            // 60.6 % of 9.5 % of requests, over all stores.
            near(s.unread_write_share, 0.606 * 0.095 / 0.1, 0.06, "unread writes");
            near(s.requests_per_second, 10_000.0, 0.02, "rate");
            assert_eq!(s.applications, apps);
        }
    }
}
