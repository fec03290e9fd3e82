//! What a drive makes of a log that lies on it beside other data: `log_on_drive`, which prints the tables of
//! `docs/results/drive-share.md`.
//!
//! The log is a ring of segments, each written once in batches of 32 KiB. The rest of the drive is overwritten in pages of 4 KiB, at random.
//! A segment is freed when the ones that were filled after it are as many as the log holds. What is compared: which free segment is
//! filled next, whether the drive is told of freed ones, and whether the log's pages go to super-blocks of their own.

use std::collections::VecDeque;

use larder_base::Rng;
use larder_sim::ssd::{Geometry, NoEviction, Ssd, VictimPolicy};

/// Pages of 4 KiB: 256 MiB, in super-blocks of 512 KiB.
const PAGES: u32 = 1 << 16;
const PER_BLOCK: u32 = 128;
/// Pages of a segment, and of a batch.
const SEGMENT: u32 = 32;
const BATCH: u32 = 8;
/// How often the drive is written, and how much of that only settles it.
const ROUNDS: (u64, u64) = (16, 6);
/// How often a burst comes, in rounds, for how much of that it lasts, and how much of the log is held in it.
const BURST: (f64, f64, f64) = (2.0, 0.2, 0.8);
const SPARE: [f64; 3] = [0.07, 0.15, 0.28];

/// What lies on the drive, and who writes how much.
#[derive(Clone, Copy)]
struct Load {
    /// Of the pages, those of the log.
    log: f64,
    /// Of the bytes written, the log's.
    share: f64,
    /// Of the log, what it holds.
    held: f64,
    /// Now and then it holds more.
    bursts: bool,
    /// Nine in ten of the other writes go to a tenth of the other pages.
    hot: bool,
}

/// What is done about freed segments.
#[derive(Clone, Copy)]
struct Means {
    /// The one that was freed last is filled first.
    last_first: bool,
    /// The drive is told.
    discard: bool,
    /// The log has a stream of its own.
    apart: bool,
}

/// Pages programmed over pages written.
fn amplification(load: Load, means: Means, spare: f64) -> f64 {
    let geometry = Geometry {
        logical_pages: PAGES,
        pages_per_block: PER_BLOCK,
        over_provisioning: spare,
        streams: if means.apart { 2 } else { 1 },
        separate_cleaning: false,
        victim: VictimPolicy::Greedy,
    };
    let mut ssd = Ssd::new(geometry, 1).unwrap_or_else(|e| panic!("{e}"));
    let mut rng = Rng::new(1);
    let segments = (f64::from(PAGES) * load.log) as u32 / SEGMENT;
    let rest = PAGES - segments * SEGMENT;
    for page in 0..rest {
        ssd.write(page, 0, &mut NoEviction);
    }
    let stream = u16::from(means.apart);
    let mut free: VecDeque<u32> = (0..segments).collect();
    let mut held = VecDeque::new();
    let (mut open, mut filled) = (free.pop_front().unwrap_or(0), 0);
    let (mut written, mut others) = (0u64, 0.0);
    let goal = u64::from(PAGES) * ROUNDS.0;
    let mut settled = false;
    while written < goal {
        let round = written as f64 / f64::from(PAGES);
        if !settled && round >= ROUNDS.1 as f64 {
            ssd.reset_traffic();
            settled = true;
        }
        let first = rest + open * SEGMENT + filled;
        for page in first..first + BATCH {
            ssd.write(page, stream, &mut NoEviction);
        }
        filled += BATCH;
        if filled == SEGMENT {
            held.push_back(open);
            filled = 0;
            let burst = load.bursts && round % BURST.0 < BURST.0 * BURST.1;
            let most = f64::from(segments) * if burst { BURST.2 } else { load.held };
            // Two are open in a log that holds all it can.
            while held.len() > (most as usize).clamp(1, segments as usize - 2) {
                let Some(freed) = held.pop_front() else { break };
                match means.last_first {
                    true => free.push_front(freed),
                    false => free.push_back(freed),
                }
                if means.discard {
                    let first = rest + freed * SEGMENT;
                    (first..first + SEGMENT).for_each(|page| ssd.trim(page));
                }
            }
            let Some(next) = free.pop_front() else { break };
            open = next;
        }
        others += f64::from(BATCH) * (1.0 - load.share) / load.share;
        written += u64::from(BATCH) + others as u64;
        let hot = rest / 10;
        for _ in 0..others as u64 {
            let page = match load.hot {
                true if rng.chance(0.9) => rng.below(u64::from(hot)),
                true => u64::from(hot) + rng.below(u64::from(rest - hot)),
                false => rng.below(u64::from(rest)),
            };
            ssd.write(page as u32, 0, &mut NoEviction);
        }
        others = others.fract();
    }
    ssd.validate();
    ssd.traffic().write_amplification()
}

fn main() {
    let means = |last_first, discard, apart| Means { last_first, discard, apart };
    let ring = ("in turn", means(false, false, false));
    let ways = [
        ring,
        ("in turn, discarded", means(false, true, false)),
        ("last freed first", means(true, false, false)),
        ("last freed first, discarded", means(true, true, false)),
        ("in turn, apart", means(false, false, true)),
        ("last freed first, apart", means(true, false, true)),
        ("in turn, apart, discarded", means(false, true, true)),
    ];
    let back = Load { log: 0.1, share: 0.5, held: 0.1, bursts: false, hot: false };
    let full = Load { log: 0.5, share: 0.5, held: 1.0, ..back };
    let loads = [
        ("a write log, a tenth of it held", back),
        ("the same, 0.7 of the writes the log's", Load { share: 0.7, ..back }),
        ("half of it held", Load { held: 0.5, ..back }),
        ("bursts", Load { bursts: true, ..back }),
        ("a tenth held, others hot and cold", Load { hot: true, ..back }),
        ("bursts, others hot and cold", Load { bursts: true, hot: true, ..back }),
        ("a log that is always full, half of the drive", full),
        ("the same, others hot and cold", Load { hot: true, ..full }),
    ];
    println!("| load | free segments | 7 % | 15 % | 28 % |");
    println!("| --- | --- | ---: | ---: | ---: |");
    for (of, load) in loads {
        for (way, means) in ways {
            let all = SPARE.map(|spare| format!("{:.2}", amplification(load, means, spare)));
            println!("| {of} | {way} | {} |", all.join(" | "));
        }
    }
}
