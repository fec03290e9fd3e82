//! A sample of a trace that fits in memory: all requests of some of its objects.

use larder_base::Nanos;
use larder_trace::{Request, mix};

/// Groups into which the sample's objects are divided, to tell how far the estimate may be off.
pub const GROUPS: usize = 16;
const SCALE: u64 = 1 << 24;

/// The requests of a share of the objects, chosen by a hash of their ids (SHARDS, FAST '15). The share starts at one and is
/// halved whenever there are more requests than wanted, so one pass over a trace of any length is enough.
#[derive(Debug)]
pub struct Sample {
    requests: Vec<Request>,
    most: usize,
    /// Objects whose hash is below are in the sample.
    threshold: u64,
    seed: u64,
    seen: u64,
    first: Option<Nanos>,
    last: Option<Nanos>,
    untimed: bool,
}

impl Sample {
    /// An empty sample that keeps at most `most` requests (at least one).
    pub fn new(most: usize, seed: u64) -> Sample {
        Sample {
            requests: Vec::new(),
            most: most.max(1),
            threshold: SCALE,
            seed,
            seen: 0,
            first: None,
            last: None,
            untimed: false,
        }
    }

    fn place(&self, id: u64) -> u64 {
        (mix(id ^ mix(self.seed)) >> 8) & (SCALE - 1)
    }

    /// Takes in the trace's next request.
    pub fn push(&mut self, r: &Request) {
        self.seen += 1;
        match r.time {
            Some(t) => {
                self.first = Some(self.first.map_or(t, |f| f.min(t)));
                self.last = Some(self.last.map_or(t, |l| l.max(t)));
            }
            None => self.untimed = true,
        }
        if self.place(r.id) >= self.threshold {
            return;
        }
        self.requests.push(*r);
        while self.requests.len() > self.most && self.threshold > 1 {
            self.threshold /= 2;
            let (threshold, seed) = (self.threshold, self.seed);
            let mixed = mix(seed);
            self.requests.retain(|r| (mix(r.id ^ mixed) >> 8) & (SCALE - 1) < threshold);
        }
    }

    /// The sampled requests, in order.
    pub fn requests(&self) -> &[Request] {
        &self.requests
    }

    /// The share of the objects that is in the sample.
    pub fn rate(&self) -> f64 {
        self.threshold as f64 / SCALE as f64
    }

    /// Requests of the whole trace.
    pub fn seen(&self) -> u64 {
        self.seen
    }

    /// Seconds from the first request to the last; none where requests have no times, or all the same.
    pub fn seconds(&self) -> Option<f64> {
        let seconds = self.last?.saturating_sub(self.first?).as_secs_f64();
        (!self.untimed && seconds > 0.0).then_some(seconds)
    }

    /// The group of an object, by bits that did not choose it.
    pub fn group(&self, id: u64) -> usize {
        (mix(id ^ mix(!self.seed)) % GROUPS as u64) as usize
    }
}

/// Hits over reads with the standard error that sampling makes, from counts of each group: reads and hits.
pub fn ratio(groups: &[(u64, u64); GROUPS], rate: f64) -> (f64, f64) {
    let reads: u64 = groups.iter().map(|g| g.0).sum();
    let hits: u64 = groups.iter().map(|g| g.1).sum();
    if reads == 0 {
        return (0.0, 0.0);
    }
    let ratio = hits as f64 / reads as f64;
    let mean = reads as f64 / GROUPS as f64;
    let squares: f64 =
        groups.iter().map(|&(n, h)| ((h as f64 - ratio * n as f64) / mean).powi(2)).sum();
    let n = GROUPS as f64;
    // What was not left out cannot be off: the finite population's correction.
    (ratio, (squares / (n * (n - 1.0)) * (1.0 - rate)).sqrt())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn whole_objects_are_kept_and_the_share_is_known() {
        let mut sample = Sample::new(5_000, 3);
        for i in 0..100_000u64 {
            let mut r = Request::get(i % 20_000, 100);
            r.time = Some(Nanos(i * 1_000_000));
            sample.push(&r);
        }
        assert!(sample.requests().len() <= 5_000 && sample.requests().len() > 1_500);
        assert_eq!((sample.rate(), sample.seen()), (1.0 / 32.0, 100_000));
        assert!((sample.seconds().unwrap() - 99.999).abs() < 1e-9);
        let mut counts = std::collections::BTreeMap::new();
        for r in sample.requests() {
            *counts.entry(r.id).or_insert(0) += 1;
        }
        assert!(counts.values().all(|&n| n == 5), "an object is in it with all its requests");
        let share = counts.len() as f64 / 20_000.0;
        assert!((share / sample.rate() - 1.0).abs() < 0.15, "{share}");
        let groups: std::collections::BTreeSet<usize> =
            counts.keys().map(|&id| sample.group(id)).collect();
        assert_eq!(groups.len(), GROUPS);
    }

    #[test]
    fn the_error_covers_what_sampling_does() {
        // Objects that hit always or never, half each: the share of hits among sampled objects varies as a binomial.
        let (mut inside, runs) = (0, 400);
        for seed in 0..runs {
            let mut groups = [(0, 0); GROUPS];
            let sample = Sample::new(1, seed);
            for id in 0..4000u64 {
                if mix(id ^ seed << 32).is_multiple_of(8) {
                    let g = &mut groups[sample.group(id)];
                    g.0 += 10;
                    g.1 += 10 * (mix(id) & 1);
                }
            }
            let (ratio, error) = ratio(&groups, 0.125);
            let truth = (0..4000u64).filter(|&id| mix(id) & 1 == 1).count() as f64 / 4000.0;
            inside += u32::from((ratio - truth).abs() <= 1.96 * error);
        }
        let share = f64::from(inside) / runs as f64;
        assert!((0.88..=0.99).contains(&share), "{share}");
        assert_eq!(ratio(&[(0, 0); GROUPS], 0.5), (0.0, 0.0));
        assert_eq!(ratio(&[(7, 3); GROUPS], 1.0).1, 0.0);
    }

    #[test]
    fn untimed_traces_have_no_length() {
        let mut sample = Sample::new(10, 1);
        sample.push(&Request::get(1, 1));
        assert_eq!(sample.seconds(), None);
    }
}
