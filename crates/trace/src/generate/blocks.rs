//! Block workloads: Holland's file server, and OLTP with a backup scanning through.

use larder_base::{ByteSize, Rng};

use super::simple::permute;
use super::spec::Spec;
use super::{Draw, Zipf};
use crate::error::TraceError;
use crate::request::{Op, Request};

/// Files lie in extents of this size, the working set's scattered over the volume.
const EXTENT: u64 = 1 << 20;
const PAGE: u64 = 4096;
/// A database page.
const DB_PAGE: u64 = 8192;
/// A backup reads so much at a time.
const SCAN: u64 = 256 << 10;

fn bytes(spec: &mut Spec, name: &str, default: &str, least: u64) -> Result<u64, TraceError> {
    let text = spec.text(name).unwrap_or_else(|| default.to_owned());
    match text.parse::<ByteSize>() {
        Ok(size) if (least..=1 << 50).contains(&size.0) => Ok(size.0),
        _ => Err(spec
            .error(format!("{name}='{text}' is not a size from {} to 1024 TiB", ByteSize(least)))),
    }
}

struct FileServer {
    extents: u64,
    working: u64,
    outside: f64,
    writes: f64,
}

/// Holland and others, "Flash caching on the storage client" (2013): a file server of 1 TB, a working set of 60 GB, a
/// fifth of the I/O outside it, 30 % writes. How long the I/Os are (4 to 64 KiB) is ours.
pub(crate) fn file_server(spec: &mut Spec) -> Result<(u64, Box<dyn Draw>), TraceError> {
    let size = bytes(spec, "size", "1t", 16 << 20)?;
    let set = bytes(spec, "set", "60g", EXTENT)?;
    if set > size {
        return Err(spec.error("set is larger than size: the working set is a part of the volume"));
    }
    let extents = size / EXTENT;
    let generator = FileServer {
        extents,
        working: (set / EXTENT).clamp(1, extents),
        outside: spec.float("outside", 0.2, 0.0..=1.0)?,
        writes: spec.float("writes", 0.3, 0.0..=1.0)?,
    };
    Ok((spec.number("requests", 10_000_000, 1..=1 << 50)?, Box::new(generator)))
}

impl Draw for FileServer {
    fn draw(&mut self, _index: u64, rng: &mut Rng) -> Request {
        let rest = self.extents - self.working;
        let rank = if rest > 0 && rng.chance(self.outside) {
            self.working + rng.below(rest)
        } else {
            rng.below(self.working)
        };
        let extent = permute(rank, self.extents);
        // One to sixteen pages, half as often for each doubling.
        let pages = 1 << rng.next_u64().trailing_ones().min(4);
        let first = rng.below(EXTENT / PAGE - pages + 1);
        let op = if rng.chance(self.writes) { Op::Write } else { Op::Read };
        Request::block(op, 0, extent * EXTENT + first * PAGE, pages * PAGE)
    }
}

struct Oltp {
    pages: u64,
    zipf: Zipf,
    writes: f64,
    backup_from: u64,
    backup_share: f64,
    scanned: u64,
    scan_end: u64,
}

/// OLTP on 8 KiB pages by Zipf's law, 84.5 % reads as Fusion-io measured of TPC-E; from `backup-from` of the run on, a
/// share `backup` of the requests reads the volume from its start to its end in 256 KiB steps.
pub(crate) fn oltp(spec: &mut Spec) -> Result<(u64, Box<dyn Draw>), TraceError> {
    let size = bytes(spec, "size", "127g", 16 << 20)?;
    let requests = spec.number("requests", 10_000_000, 1..=1 << 50)?;
    let pages = size / DB_PAGE;
    let from = spec.float("backup-from", 0.5, 0.0..=1.0)?;
    let generator = Oltp {
        pages,
        zipf: Zipf::new(pages, spec.float("skew", 0.9, 0.0..=10.0)?),
        writes: spec.float("writes", 0.155, 0.0..=1.0)?,
        backup_from: (requests as f64 * from) as u64,
        backup_share: spec.float("backup", 0.0, 0.0..=1.0)?,
        scanned: 0,
        scan_end: pages * DB_PAGE,
    };
    Ok((requests, Box::new(generator)))
}

impl Draw for Oltp {
    fn draw(&mut self, index: u64, rng: &mut Rng) -> Request {
        if index >= self.backup_from
            && self.scanned < self.scan_end
            && rng.chance(self.backup_share)
        {
            let at = self.scanned;
            let len = SCAN.min(self.scan_end - at);
            self.scanned += len;
            return Request::block(Op::Read, 0, at, len);
        }
        let page = permute(self.zipf.draw(rng), self.pages);
        let op = if rng.chance(self.writes) { Op::Write } else { Op::Read };
        Request::block(op, 0, page * DB_PAGE, DB_PAGE)
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
    fn the_backup_reads_the_volume_once() {
        let made = all("oltp?size=64m&requests=20000&backup=0.5&backup-from=0.25");
        let scan: Vec<&Request> = made.iter().filter(|r| r.size == super::SCAN).collect();
        assert_eq!(scan.len(), 256);
        assert!(scan.windows(2).all(|w| w[1].offset == w[0].offset + super::SCAN));
        assert!(made[..5000].iter().all(|r| r.size == super::DB_PAGE));
        let writes = made.iter().filter(|r| r.op == Op::Write).count() as f64
            / (made.len() - scan.len()) as f64;
        assert!((writes - 0.155).abs() < 0.01, "{writes}");
    }
}
