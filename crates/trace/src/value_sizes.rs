//! Sizes of values that are drawn by key, for traces that hold keys alone.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

use crate::error::{BadRecord, TraceError};
use crate::read::{Progress, Reader};
use crate::request::{Request, mix};

/// A log-normal distribution of sizes, `lognormal:MEAN:SIGMA`. A key has the same size at each of its requests, in every release.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct ValueSizes {
    mean: f64,
    sigma: f64,
}

/// A text that names no distribution.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "'{0}' is no distribution of sizes: write lognormal:MEAN or lognormal:MEAN:SIGMA, a mean of 1 to 1000000 bytes and a sigma of 0 \
     to 4 (1 when not given)"
)]
pub struct BadSizes(String);

impl FromStr for ValueSizes {
    type Err = BadSizes;

    fn from_str(text: &str) -> Result<ValueSizes, BadSizes> {
        let mut parts = text.split(':');
        let named = parts.next() == Some("lognormal");
        let mean = parts.next().and_then(|mean| mean.parse().ok());
        let sigma = parts.next().map_or(Some(1.0), |sigma| sigma.parse().ok());
        match (mean, sigma, parts.next()) {
            (Some(mean), Some(sigma), None)
                if named && (1.0..=1e6).contains(&mean) && (0.0..=4.0).contains(&sigma) =>
            {
                Ok(ValueSizes { mean, sigma })
            }
            _ => Err(BadSizes(text.to_owned())),
        }
    }
}

impl TryFrom<String> for ValueSizes {
    type Error = BadSizes;

    fn try_from(text: String) -> Result<ValueSizes, BadSizes> {
        text.parse()
    }
}

impl From<ValueSizes> for String {
    fn from(sizes: ValueSizes) -> String {
        sizes.to_string()
    }
}

impl fmt::Display for ValueSizes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "lognormal:{}:{}", self.mean, self.sigma)
    }
}

impl ValueSizes {
    /// Bytes of the value of the object `id`: 1 to 1,000,000.
    pub fn of(self, id: u64) -> u64 {
        let unit = |salt: u64| (mix(id ^ salt) >> 11) as f64 / (1u64 << 53) as f64;
        // Box and Muller's; the logarithm's argument is above 0.
        let normal = (-2.0 * (1.0 - unit(0x6c6f_676e)).ln()).sqrt()
            * (std::f64::consts::TAU * unit(0x6f72_6d61)).cos();
        let value = (self.mean.ln() - self.sigma * self.sigma / 2.0 + self.sigma * normal).exp();
        value.clamp(1.0, 1e6).round() as u64
    }
}

/// Gives objects sizes in place of the trace's own; block I/O keeps its own.
pub(crate) struct Sized {
    pub(crate) inner: Box<dyn Reader>,
    pub(crate) sizes: ValueSizes,
}

impl Iterator for Sized {
    type Item = Result<Request, TraceError>;

    fn next(&mut self) -> Option<Self::Item> {
        let mut next = self.inner.next()?;
        if let Ok(request) = &mut next
            && !request.op.is_block()
        {
            request.size = self.sizes.of(request.id);
        }
        Some(next)
    }
}

impl Reader for Sized {
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
    use crate::open::{Options, open};

    #[test]
    fn a_distribution_is_written_as_it_is_read() {
        for (text, shown) in [
            ("lognormal:300", "lognormal:300:1"),
            ("lognormal:300:0.5", "lognormal:300:0.5"),
            ("lognormal:1:0", "lognormal:1:0"),
        ] {
            assert_eq!(text.parse::<ValueSizes>().unwrap().to_string(), shown);
        }
        for text in [
            "",
            "300",
            "lognormal",
            "lognormal:",
            "lognormal:0",
            "lognormal:2e6",
            "lognormal:nan",
            "lognormal:300:5",
            "lognormal:300:-1",
            "lognormal:300:1:1",
            "normal:300",
        ] {
            let e = text.parse::<ValueSizes>().unwrap_err().to_string();
            assert!(e.contains(&format!("'{text}'")) && e.contains("lognormal:MEAN"), "{e}");
        }
    }

    /// The moments of a log-normal distribution: mean 300, median 300 / exp(1/2).
    #[test]
    fn sizes_follow_the_distribution() {
        let sizes: ValueSizes = "lognormal:300".parse().unwrap();
        let mut all: Vec<u64> = (0..200_000).map(|id| sizes.of(id)).collect();
        let mean = all.iter().sum::<u64>() as f64 / all.len() as f64;
        all.sort_unstable();
        let median = all[all.len() / 2] as f64;
        assert!((mean - 300.0).abs() < 4.0, "{mean}");
        assert!((median - 300.0 * (-0.5f64).exp()).abs() < 2.0, "{median}");
        let same: ValueSizes = "lognormal:300:0".parse().unwrap();
        assert!((0..1000).all(|id| same.of(id) == 300));
    }

    #[test]
    fn objects_are_given_sizes_and_ranges_keep_theirs() {
        let sizes = "lognormal:300".parse().unwrap();
        let options = Options { value_sizes: Some(sizes), limit: Some(5000), ..Options::default() };
        let of = |name: &str| -> Vec<Request> {
            open(name, &options).unwrap().reader.map(Result::unwrap).collect()
        };
        let objects = of("gen:zipf?objects=500&requests=9000&value=7");
        assert!(objects.len() == 5000 && objects.iter().all(|r| r.size == sizes.of(r.id)));
        let blocks = of("gen:fileserver?size=64m&set=8m&requests=5000");
        assert!(blocks.iter().all(|r| r.op.is_block() && r.size % 512 == 0));
    }
}
