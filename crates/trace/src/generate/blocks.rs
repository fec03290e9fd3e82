//! Holland's file server.

use larder_base::{ByteSize, Rng};

use super::Draw;
use super::simple::permute;
use super::spec::Spec;
use crate::error::TraceError;
use crate::request::{Op, Request};

/// Files lie in extents of this size, the working set's scattered over the volume.
const EXTENT: u64 = 1 << 20;
const PAGE: u64 = 4096;
/// Mean pages of an I/O: 1, 2, 4, 8 and 16 with chances 1/2, 1/4, 1/8, 1/16 and 1/16.
const MEAN_PAGES: u64 = 3;

/// `share` of `n`, rounded.
pub(crate) fn scaled(n: u64, share: f64) -> u64 {
    (n as f64 * share).round() as u64
}

/// A size in bytes, at least `least`.
pub(crate) fn bytes(
    spec: &mut Spec,
    name: &str,
    default: &str,
    least: u64,
) -> Result<u64, TraceError> {
    let text = spec.text(name).unwrap_or_else(|| default.to_owned());
    match text.parse::<ByteSize>() {
        Ok(size) if (least..=1 << 50).contains(&size.0) => Ok(size.0),
        _ => Err(spec
            .error(format!("{name}='{text}' is not a size from {} to 1024 TiB", ByteSize(least)))),
    }
}

struct FileServer {
    extents: u64,
    /// Extents of a working set, and how many sets there are.
    working: u64,
    sets: u64,
    hosts: u64,
    outside: f64,
    writes: f64,
}

/// Holland, Angelino, Wald and Seltzer, "Flash Caching on the Storage Client" (USENIX ATC '13): a file server of 1 TB, a
/// working set of 60 GB shared by all hosts or one for each, a fifth of the I/O outside of it, 30 % writes, the total
/// volume pegged to the working sets. How long the I/Os are (4 to 64 KiB) is ours.
pub(crate) fn file_server(spec: &mut Spec) -> Result<(u64, Box<dyn Draw>), TraceError> {
    let scale = spec.float("scale", 1.0, 1e-6..=1.0)?;
    let least = |full: u64, least: u64| format!("{}", scaled(full, scale).max(least));
    let size = bytes(spec, "size", &least(1 << 40, 16 << 20), 16 << 20)?;
    let set = bytes(spec, "set", &least(60 << 30, EXTENT), EXTENT)?;
    let hosts = spec.number("hosts", 1, 1..=1024)?;
    let shared = spec.number("shared", 1, 0..=1)? == 1;
    let sets = if shared { 1 } else { hosts };
    if set.saturating_mul(sets) > size {
        let named = |name: &str| spec.given(name);
        let remedy = match (named("scale"), named("set"), named("size")) {
            (true, true, false) => {
                "; scale does not apply to a set that is given: give size too, or leave set out"
            }
            (true, false, true) => {
                "; scale does not apply to a size that is given: give set too, or leave size out"
            }
            _ => "; give a larger size or a smaller set",
        };
        return Err(spec.error(format!(
            "{sets} working sets of {} are larger than size, {}: they are parts of the volume{remedy}",
            ByteSize(set),
            ByteSize(size)
        )));
    }
    let volume = spec.float("volume", 4.0, 0.001..=1e6)?;
    let extents = size / EXTENT;
    let working = (set / EXTENT).clamp(1, extents / sets);
    let generator = FileServer {
        extents,
        working,
        sets,
        hosts,
        outside: spec.float("outside", 0.2, 0.0..=1.0)?,
        writes: spec.float("writes", 0.3, 0.0..=1.0)?,
    };
    let requests = scaled(sets * working * (EXTENT / PAGE) / MEAN_PAGES, volume).max(1);
    Ok((spec.number("requests", requests, 1..=1 << 50)?, Box::new(generator)))
}

impl Draw for FileServer {
    fn draw(&mut self, _index: u64, rng: &mut Rng) -> Request {
        let host = rng.below(self.hosts);
        let inside = self.working * self.sets;
        let rest = self.extents - inside;
        let rank = if rest > 0 && rng.chance(self.outside) {
            inside + rng.below(rest)
        } else {
            host % self.sets * self.working + rng.below(self.working)
        };
        let extent = permute(rank, self.extents);
        // One to sixteen pages, half as often for each doubling.
        let pages = 1 << rng.next_u64().trailing_ones().min(4);
        let first = rng.below(EXTENT / PAGE - pages + 1);
        let op = if rng.chance(self.writes) { Op::Write } else { Op::Read };
        let request = Request::block(op, 0, extent * EXTENT + first * PAGE, pages * PAGE);
        Request { host: host as u16, ..request }
    }
}

#[cfg(test)]
mod tests {
    use crate::generate::parse;
    use crate::request::{Op, Request};

    fn all(spec: &str) -> Vec<Request> {
        parse(spec).unwrap().map(|r| r.unwrap()).collect()
    }

    #[test]
    fn the_file_server_keeps_to_its_working_set() {
        let made = all("fileserver?size=10g&set=512m&requests=40000&outside=0.2&writes=0.3");
        let share = |n: usize| n as f64 / made.len() as f64;
        assert!((share(made.iter().filter(|r| r.op == Op::Write).count()) - 0.3).abs() < 0.01);
        let working: std::collections::HashSet<u64> =
            (0..512).map(|e| super::permute(e, 10 * 1024)).collect();
        let outside =
            made.iter().filter(|r| !working.contains(&(r.offset / super::EXTENT))).count();
        assert!((share(outside) - 0.2).abs() < 0.01);
        assert!(made.iter().all(|r| r.offset + r.size <= 10 << 30 && r.size.is_multiple_of(4096)));
        assert!(parse("fileserver?size=1g&set=2g").is_err());
    }

    #[test]
    fn hosts_have_their_own_sets_or_share_one() {
        for (shared, sets) in [(0, 4), (1, 1)] {
            let made = all(&format!(
                "fileserver?size=10g&set=256m&hosts=4&shared={shared}&outside=0&requests=40000"
            ));
            let mut seen = vec![std::collections::BTreeSet::new(); 4];
            for r in &made {
                seen[usize::from(r.host)].insert(r.offset / super::EXTENT);
            }
            assert!(seen.iter().all(|s| s.len() == 256), "every host uses its set");
            let together: std::collections::BTreeSet<&u64> = seen.iter().flatten().collect();
            assert_eq!(together.len(), 256 * sets);
            let even = made.iter().filter(|r| r.host == 3).count() as f64 / made.len() as f64;
            assert!((even - 0.25).abs() < 0.01, "{even}");
        }
        assert!(parse("fileserver?size=1g&set=512m&hosts=3&shared=0").is_err());
        assert!(parse("fileserver?size=1g&set=512m&hosts=3").is_ok());
    }

    /// The volume of I/O is pegged to the working sets: four times by default.
    #[test]
    fn the_volume_is_pegged_to_the_working_set() {
        let made = all("fileserver?size=1g&set=64m");
        let bytes: u64 = made.iter().map(|r| r.size).sum();
        let ratio = bytes as f64 / f64::from(64 << 20);
        assert!((ratio - 4.0).abs() < 0.15, "{ratio}");
        let scaled = all("fileserver?scale=0.0001&volume=2");
        assert!(scaled.iter().all(|r| r.offset + r.size <= 105 << 20));
    }
}
