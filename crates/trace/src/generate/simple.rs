//! Fill, uniform, Zipf, scan and hot/cold over one key space.

use larder_base::Rng;

use super::spec::Spec;
use super::{Draw, Zipf};
use crate::error::TraceError;
use crate::request::{Op, Request, mix};

/// How values' sizes are given: `257`, or `64..4096` (drawn per object, log-uniform, the same for an object at every
/// request until it is rewritten).
#[derive(Clone, Copy, Debug)]
pub(crate) enum Sizes {
    Fixed(u64),
    LogUniform(f64, f64),
}

impl Sizes {
    pub(crate) fn take(spec: &mut Spec, name: &str, default: u64) -> Result<Sizes, TraceError> {
        let Some(text) = spec.text(name) else { return Ok(Sizes::Fixed(default)) };
        let size = |t: &str| {
            t.parse::<larder_base::ByteSize>().ok().map(|b| b.0).filter(|&b| b <= 1 << 30)
        };
        let found = match text.split_once("..") {
            None => size(&text).map(Sizes::Fixed),
            Some((low, high)) => match (size(low), size(high)) {
                (Some(l), Some(h)) if l >= 1 && l <= h => {
                    Some(Sizes::LogUniform(l as f64, h as f64))
                }
                _ => None,
            },
        };
        found.ok_or_else(|| {
            spec.error(format!(
                "{name}='{text}' is neither a size (257, 4k) nor a range (64..4096)"
            ))
        })
    }

    /// The size of an object.
    pub(crate) fn of(self, id: u64) -> u64 {
        match self {
            Sizes::Fixed(n) => n,
            Sizes::LogUniform(low, high) => {
                let u = (mix(id ^ 0x5157) >> 11) as f64 / (1u64 << 53) as f64;
                (low.ln() + u * (high.ln() - low.ln())).exp().round() as u64
            }
        }
    }
}

enum Pick {
    Sequence,
    Uniform,
    Zipf(Zipf),
    Hot { objects: u64, share: f64 },
}

struct Simple {
    pick: Pick,
    fill: bool,
    first: u64,
    objects: u64,
    sizes: Sizes,
    key_size: u32,
    ttl: u32,
    app: u32,
    writes: f64,
    deletes: f64,
    /// Spreads popular ranks over the ids, so that neighbours in popularity are no neighbours in id.
    scramble: bool,
}

pub(crate) fn build(spec: &mut Spec) -> Result<(u64, Box<dyn Draw>), TraceError> {
    let kind = spec.kind().to_owned();
    let fill = kind == "fill";
    let objects = spec.number("objects", 1_000_000, 1..=1 << 40)?;
    let requests = if fill { objects } else { spec.number("requests", objects, 1..=1 << 50)? };
    let sizes = Sizes::take(spec, "value", 257)?;
    let first = spec.number("first", 0, 0..=1 << 48)?;
    let key_size = spec.number("key", 0, 0..=250)? as u32;
    let ttl = spec.number("ttl", 0, 0..=u64::from(u32::MAX))? as u32;
    let app = spec.number("app", 0, 0..=u64::from(u32::MAX))? as u32;
    let (mut writes, mut deletes) = (0.0, 0.0);
    if !fill {
        writes = spec.float("writes", 0.0, 0.0..=1.0)?;
        deletes = spec.float("deletes", 0.0, 0.0..=1.0)?;
        if writes + deletes > 1.0 {
            return Err(spec.error("writes and deletes together are more than 1"));
        }
    }
    let pick = match kind.as_str() {
        "zipf" => Pick::Zipf(Zipf::new(objects, spec.float("skew", 0.9, 0.0..=10.0)?)),
        "uniform" => Pick::Uniform,
        "hotcold" => {
            let hot = spec.float("hot", 0.1, 0.0..=1.0)?;
            let share = spec.float("hot-requests", 0.9, 0.0..=1.0)?;
            Pick::Hot { objects: ((objects as f64 * hot) as u64).clamp(1, objects), share }
        }
        _ => Pick::Sequence,
    };
    let scramble = matches!(pick, Pick::Zipf(_));
    let simple =
        Simple { pick, fill, first, objects, sizes, key_size, ttl, app, writes, deletes, scramble };
    Ok((requests, Box::new(simple)))
}

impl Draw for Simple {
    fn draw(&mut self, index: u64, rng: &mut Rng) -> Request {
        let rank = match &self.pick {
            Pick::Sequence => index % self.objects,
            Pick::Uniform => rng.below(self.objects),
            Pick::Zipf(zipf) => zipf.draw(rng),
            Pick::Hot { objects, share } => {
                let cold = self.objects - objects;
                if cold == 0 || rng.chance(*share) {
                    rng.below(*objects)
                } else {
                    objects + rng.below(cold)
                }
            }
        };
        let id = self.first + if self.scramble { permute(rank, self.objects) } else { rank };
        let op = if self.fill {
            Op::Set
        } else if self.writes + self.deletes > 0.0 {
            let u = rng.unit();
            if u < self.writes {
                Op::Set
            } else if u < self.writes + self.deletes {
                Op::Delete
            } else {
                Op::Get
            }
        } else {
            Op::Get
        };
        Request {
            op,
            key_size: self.key_size,
            ttl: self.ttl,
            app: self.app,
            ..Request::get(id, self.sizes.of(id))
        }
    }
}

/// A fixed permutation of `0..n`: a four-round Feistel network over the next power of four, walked until it falls inside.
pub(crate) fn permute(x: u64, n: u64) -> u64 {
    if n <= 2 {
        return x;
    }
    let half = (64 - (n - 1).leading_zeros()).div_ceil(2);
    let mask = (1u64 << half) - 1;
    let mut x = x;
    loop {
        let (mut left, mut right) = (x >> half, x & mask);
        for round in 0..4u64 {
            (left, right) = (right, left ^ (mix(right ^ (round << 56)) & mask));
        }
        x = left << half | right;
        if x < n {
            return x;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn permute_is_a_permutation() {
        for n in [1u64, 2, 3, 5, 16, 17, 1000] {
            let mut seen: Vec<u64> = (0..n).map(|x| permute(x, n)).collect();
            seen.sort_unstable();
            assert_eq!(seen, (0..n).collect::<Vec<_>>());
        }
    }
}
