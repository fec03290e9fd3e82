//! What keeps a line from flash whatever admission says, and what is charged to the write budget.
//!
//! The order is the same wherever lines may come to flash: reads and writes of clients, their advice, reading ahead, an
//! operator's prefetch, and an operator's question why a line is not cached.
//!
//! 1. The operator's rule: what is selected never to be cached is refused.
//! 2. No space: while the file system under the cache is full, nothing new is written.
//! 3. What is selected to be cached always is admitted. Its writes are charged all the same.
//! 4. The write budget.
//! 5. [Admission](judge), which knows what the line holds.
//!
//! What volumes may have of the cache (shares, pins) is asked later, by the shard, when the place of the line is known.
//!
//! Every byte that goes to the cache device is charged when the write leaves. Fills, lines that the cleaner moves and the map's log are
//! charged by [`charged`](super::charged), on the thread of maintenance: it writes the budget's file first where that must say more. A
//! queue pays for updates and for lines of which a part is overwritten ([`Limits::pay`]), out of what the file says already: it waits for
//! no file. Where that is used up the write waits in the queue until maintenance has had more written down. Maintenance also writes
//! more down as soon as less than half of a claim is left ([`Limits::due`]), so that hardly any write waits.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use larder_base::Nanos;
use larder_policy::block::{
    BlockAccess, BlockCandidate, BlockKind, BlockOp, LineId as PolicyLine, Observed, Reason, Rule,
    Verdict as PolicyVerdict, Victim,
};
use larder_policy::budget::{BudgetState, KeptBudget, Means, WriteBudget};

use super::backoff::Backoff;
use super::failing::Failures;
use crate::block::api::Verdict;
use crate::block::record::RecordedAdmission;

/// The write budget, and what of it is in a file.
#[derive(Debug)]
struct Ledger {
    budget: WriteBudget,
    /// `None` where nothing outlives the run.
    kept: Option<KeptBudget>,
    /// Bytes that queues wait to pay for.
    wanted: u64,
}

/// No-space pause, write budget and failures of one cache. See the [module](self).
#[derive(Debug, Default)]
pub struct Limits {
    /// The pause of a full file system.
    pub backoff: Backoff,
    /// I/Os of the device that fail.
    pub failures: Failures,
    budget: Option<Mutex<Ledger>>,
    /// Bytes of the map's log that were charged.
    log_bytes: AtomicU64,
}

impl Limits {
    /// Limits with this write budget, if there is one. `kept` is what of it lies in a file, for a cache that outlives its
    /// process.
    pub fn new(budget: Option<(WriteBudget, Option<KeptBudget>)>, backoff: Backoff) -> Limits {
        let budget = budget.filter(|b| b.0.is_on());
        let budget = budget.map(|(budget, kept)| Mutex::new(Ledger { budget, kept, wanted: 0 }));
        let (failures, log_bytes) = (Failures::default(), AtomicU64::new(0));
        Limits { backoff, failures, budget, log_bytes }
    }

    /// No operation leaves the ledger half changed, so that one of a thread that panicked is whole.
    fn ledger(&self) -> Option<MutexGuard<'_, Ledger>> {
        self.budget.as_ref().map(|ledger| ledger.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// So many bytes of lines leave for flash. Returns what must be in the budget's file before they may, if it is not there
    /// yet; then [`Limits::kept`].
    #[must_use = "it must be in the file before the bytes are written"]
    pub fn charge(&self, now: Nanos, bytes: u64) -> Option<BudgetState> {
        let ledger = &mut *self.ledger()?;
        ledger.budget.charge(now, bytes);
        // With the bytes of all that were charged, so that several threads may be here.
        ledger.kept.as_ref().and_then(|kept| kept.due(now, &ledger.budget, 0))
    }

    /// The same of lines that leave a queue, out of what the budget's file says already. Returns false, and nothing is charged, if it
    /// does not say that much: they may leave when it does, and maintenance is to be asked ([`Limits::due`]).
    #[must_use = "where it is not paid for nothing may be written"]
    pub fn pay(&self, now: Nanos, bytes: u64) -> bool {
        let Some(mut ledger) = self.ledger() else { return true };
        let ledger = &mut *ledger;
        let pays = ledger.kept.as_ref().is_none_or(|kept| kept.covers(&ledger.budget, bytes));
        if pays {
            ledger.budget.charge(now, bytes);
        } else {
            ledger.wanted = ledger.wanted.saturating_add(bytes);
        }
        pays
    }

    /// The same of bytes of the map's log.
    #[must_use = "it must be in the file before the bytes are written"]
    pub fn charge_log(&self, now: Nanos, bytes: u64) -> Option<BudgetState> {
        self.log_bytes.fetch_add(bytes, Ordering::Relaxed);
        self.charge(now, bytes)
    }

    /// Bytes of the map's log that were charged.
    pub fn log_bytes(&self) -> u64 {
        self.log_bytes.load(Ordering::Relaxed)
    }

    /// What is to be in the file soon, so that no write has to wait for it: less than half of a claim is left, or queues wait.
    pub fn due(&self, now: Nanos) -> Option<BudgetState> {
        let ledger = &mut *self.ledger()?;
        let wanted = std::mem::take(&mut ledger.wanted);
        let kept = ledger.kept.as_ref()?;
        kept.due(now, &ledger.budget, wanted.max(kept.ahead() / 2))
    }

    /// The file was to say `state`, and does if it was `written`: see [`KeptBudget::kept`].
    pub fn kept(&self, now: Nanos, state: BudgetState, written: bool) {
        if let Some(kept) = self.ledger().as_mut().and_then(|ledger| ledger.kept.as_mut()) {
            kept.kept(now, state, written);
        }
    }

    /// How often the budget's file could not be written.
    pub fn unkept(&self) -> u64 {
        self.ledger().and_then(|ledger| ledger.kept.as_ref().map(KeptBudget::failed)).unwrap_or(0)
    }

    /// What the file is to say when nothing is written any more.
    pub fn state(&self, now: Nanos) -> Option<BudgetState> {
        self.ledger().map(|mut ledger| ledger.budget.state(now))
    }

    /// The budget's rate in bytes a second and the bytes that may be written now, if there is a budget.
    pub fn budget(&self, now: Nanos) -> Option<(f64, u64)> {
        let budget = &mut self.ledger()?.budget;
        Some((budget.rate()?, budget.available(now)))
    }

    /// How much of the budget the write log has, which cannot hold its writes back.
    pub fn means(&self, now: Nanos) -> Means {
        self.ledger().map_or(Means::Plenty, |mut ledger| ledger.budget.means(now))
    }

    /// Bytes that were charged since the cache was first filled; 0 without a budget.
    pub fn spent(&self) -> u64 {
        self.ledger().map_or(0, |ledger| ledger.budget.spent())
    }

    /// Years that the drive lasts at this rate of bytes; `None` without a budget.
    pub fn life_years(&self, bytes_per_second: f64) -> Option<f64> {
        self.ledger().and_then(|ledger| ledger.budget.expected_life_years(bytes_per_second))
    }
}

/// What keeps a line from flash before admission is asked. See the [module](self).
pub trait Allows {
    /// Whether nothing new is written for want of space.
    fn is_paused(&self, now: Nanos) -> bool;
    /// Whether the budget has something for so many bytes.
    fn affords(&self, now: Nanos, bytes: u64) -> bool;

    /// What keeps `bytes` bytes of new lines, for which the operator has said `rule`, from flash now. If nothing does,
    /// admission decides of those that are `ByPolicy`. Nothing is taken out of the budget.
    fn refuses(&self, rule: Rule, now: Nanos, bytes: u64) -> Option<Reason> {
        match rule {
            Rule::Never => Some(Reason::Never),
            _ if self.is_paused(now) => Some(Reason::NoSpace),
            Rule::Always => None,
            Rule::ByPolicy if !self.affords(now, bytes) => Some(Reason::Budget),
            Rule::ByPolicy => None,
        }
    }

    /// Of `parts` of an operation that goes past admission (advice, reading ahead), keeps those that may come to flash:
    /// as far as the budget has something for all of them together. `rule` says what is selected for a part, `bytes` how
    /// long it is. Reports what is refused.
    fn keep_advised<P>(
        &self,
        now: Nanos,
        parts: &mut Vec<P>,
        bytes: impl Fn(&P) -> u64,
        rule: impl Fn(&P) -> Rule,
        mut refused: impl FnMut(Reason),
    ) {
        let mut wanted = 0;
        parts.retain(|part| {
            let (rule, bytes) = (rule(part), bytes(part));
            match self.refuses(rule, now, wanted + bytes) {
                Some(reason) => {
                    refused(reason);
                    false
                }
                None => {
                    wanted += if rule == Rule::ByPolicy { bytes } else { 0 };
                    true
                }
            }
        });
    }
}

impl Allows for Limits {
    fn is_paused(&self, now: Nanos) -> bool {
        self.backoff.left(now).is_some()
    }

    fn affords(&self, now: Nanos, bytes: u64) -> bool {
        self.ledger().is_none_or(|mut ledger| ledger.budget.affords(now, bytes))
    }
}

/// Asks something of an admission, whatever kind it is of.
pub trait Asks {
    /// What is answered.
    type Answer;
    /// Asks.
    fn ask(self, admission: &mut impl Admits) -> Self::Answer;
}

/// Admission as it is [asked](judge).
pub trait Admits {
    /// A client asks for something.
    fn observe(&mut self, access: &BlockAccess) -> Observed;
    /// Whether it wants to compare a line with the one whose place it would take.
    fn wants_victim(&self) -> bool;
    /// What a shard is told of `candidate`; `compete`: its victim is compared with it later.
    fn ask(&mut self, candidate: &BlockCandidate, compete: bool) -> Verdict;
    /// What a shard is told of lines that are read ahead of one of which it was told `said`.
    fn ahead(&self, said: Verdict) -> Verdict;
    /// Counts a verdict that was somebody else's.
    fn count(&mut self, verdict: PolicyVerdict);
}

impl Admits for RecordedAdmission {
    fn observe(&mut self, access: &BlockAccess) -> Observed {
        RecordedAdmission::observe(self, access)
    }

    fn wants_victim(&self) -> bool {
        (**self).wants_victim()
    }

    fn ask(&mut self, candidate: &BlockCandidate, compete: bool) -> Verdict {
        RecordedAdmission::ask(self, candidate, compete)
    }

    fn ahead(&self, said: Verdict) -> Verdict {
        RecordedAdmission::ahead(self, said)
    }

    fn count(&mut self, verdict: PolicyVerdict) {
        RecordedAdmission::count(self, verdict);
    }
}

/// What is said of the parts of a client's read or write.
///
/// `parts` are their first bytes in the volume, their lengths, and what they hold; within each the operator's `rule` is the same.
/// What is said goes to `out`, one for each part. Returns what holds for lines that are read ahead of the access.
pub fn judge(
    limits: &impl Allows,
    admission: &mut impl Admits,
    access: &BlockAccess,
    line_bytes: u32,
    parts: impl Iterator<Item = (u64, u32, BlockKind)>,
    rule: impl Fn(u64, u64) -> Rule,
    out: &mut Vec<Verdict>,
) -> Verdict {
    out.clear();
    let line = u64::from(line_bytes);
    let observed = admission.observe(access);
    let competes = admission.wants_victim();
    let mut ahead = Verdict::Admit;
    for (at, len, kind) in parts {
        let (len, volume) = (u64::from(len), access.volume);
        let rule = rule(at, len);
        let said = if let Some(reason) = limits.refuses(rule, access.now, len) {
            admission.count(PolicyVerdict::Reject(reason));
            Verdict::Reject
        } else if rule == Rule::Always {
            admission.count(PolicyVerdict::Admit);
            Verdict::Admit
        } else {
            let place = PolicyLine { volume, offset: at / line * line };
            let candidate =
                BlockCandidate { line: place, op: access.op, kind, observed, victim: None };
            // Metadata goes before whatever it meets at its place.
            let said = admission.ask(&candidate, competes && kind != BlockKind::Metadata);
            ahead = ahead.and(admission.ahead(said));
            out.push(said);
            continue;
        };
        ahead = ahead.and(said);
        out.push(said);
    }
    ahead
}

/// What admission would say of a read of a line that misses, in words.
pub fn explain(admission: &RecordedAdmission, line: PolicyLine, kind: BlockKind) -> String {
    let observed = Observed::default();
    admission.explain(&BlockCandidate { line, op: BlockOp::Read, kind, observed, victim: None })
}

/// Whether admission would rather have the first line cached than the second, each with what it holds.
pub fn prefer(
    admission: &mut RecordedAdmission,
    (line, kind): (PolicyLine, BlockKind),
    (victim, its_kind): (PolicyLine, BlockKind),
) -> bool {
    let candidate = BlockCandidate {
        line,
        op: BlockOp::Read,
        kind,
        observed: Default::default(),
        victim: Some(Victim { line: victim, kind: its_kind }),
    };
    admission.admit(&candidate).is_admit()
}

#[cfg(test)]
mod tests {
    use larder_base::ByteSize;
    use larder_policy::block::{BlockAdmission, BlockSetup, VolumeId};
    use larder_policy::budget::WriteBudgetConfig;

    use super::*;

    const SECOND: Nanos = Nanos::from_secs(1);

    /// A budget of about 1 MB a second, of which nothing is saved up.
    fn limited() -> Limits {
        let config = WriteBudgetConfig {
            tbw: Some(ByteSize(1_000_000 * 31_557_600)),
            years: 1.0,
            device_write_amplification: 1.0,
            first_fill: false,
            ..WriteBudgetConfig::default()
        };
        let size = ByteSize::mib(64);
        let budget = WriteBudget::new(&config, size, None, Nanos::ZERO).unwrap();
        let kept = KeptBudget::new(&budget, size, 65_536);
        Limits::new(Some((budget, Some(kept))), Backoff::default())
    }

    #[test]
    fn rule_then_space_then_budget() {
        let limits = limited();
        let said = |now, bytes| {
            [Rule::Never, Rule::Always, Rule::ByPolicy].map(|rule| limits.refuses(rule, now, bytes))
        };
        assert_eq!(said(SECOND, 4096), [Some(Reason::Never), None, None]);
        assert_eq!(said(SECOND, 2 << 20), [Some(Reason::Never), None, Some(Reason::Budget)]);
        limits.backoff.full(SECOND).unwrap();
        let full = Some(Reason::NoSpace);
        assert_eq!(said(SECOND, 2 << 20), [Some(Reason::Never), full, full]);
    }

    #[test]
    fn advice_goes_as_far_as_the_budget() {
        let limits = limited();
        let mut parts: Vec<u64> = (0..32).collect();
        let mut refused = Vec::new();
        let rule = |part: &u64| match part {
            0..4 => Rule::Never,
            4..8 => Rule::Always,
            _ => Rule::ByPolicy,
        };
        limits.keep_advised(SECOND, &mut parts, |_| 65_536, rule, |reason| refused.push(reason));
        // 1,000,000 bytes are 15 parts.
        assert_eq!(parts, (4..23).collect::<Vec<u64>>());
        assert_eq!(refused.iter().filter(|&&r| r == Reason::Never).count(), 4);
        assert_eq!(refused.iter().filter(|&&r| r == Reason::Budget).count(), 9);
    }

    #[test]
    fn what_is_charged_is_in_the_file_first() {
        let limits = limited();
        let mut file = 0;
        for i in 1..1000 {
            let now = Nanos::from_millis(i);
            let due =
                if i % 3 == 0 { limits.charge_log(now, 4096) } else { limits.charge(now, 65_536) };
            if let Some(state) = due {
                file = state.spent;
                limits.kept(now, state, true);
            }
            assert!(limits.spent() <= file, "{} {file}", limits.spent());
        }
        assert_eq!(limits.log_bytes(), 333 * 4096);
        assert_eq!(limits.spent(), 333 * 4096 + 666 * 65_536);
        assert_eq!(limits.refuses(Rule::ByPolicy, SECOND, 1), Some(Reason::Budget), "it is owed");
    }

    /// A queue pays out of what is in the file, and out of nothing else; what it waits for is claimed with the next claim.
    #[test]
    fn a_queue_pays_out_of_what_is_in_the_file() {
        let limits = limited();
        let (mut file, mut waited) = (0, 0);
        for i in 1..1000 {
            let now = Nanos::from_millis(i);
            let bytes = if i % 100 == 0 { 1 << 30 } else { 65_536 };
            let before = limits.spent();
            if limits.pay(now, bytes) {
                assert!(limits.spent() <= file, "{} {file}", limits.spent());
                continue;
            }
            waited += 1;
            assert_eq!(limits.spent(), before, "nothing is charged for what is not written");
            let state = limits.due(now).expect("somebody waits");
            file = state.spent;
            assert!(!limits.pay(now, bytes), "it is not in the file yet");
            limits.kept(now, state, true);
            assert!(limits.pay(now, bytes), "it is");
        }
        // The first, and of the nine large ones all but those for which enough was claimed when another was asked for twice.
        assert!((5..=10).contains(&waited), "{waited}");
        // Without a file, and without a budget, nothing is to be waited for.
        assert!(Limits::default().pay(SECOND, 1 << 40));
    }

    #[test]
    fn admission_is_asked_last_and_counts_everything() {
        let setup = BlockSetup { line_bytes: 4096, lines: 1024, backing_bytes: 1 << 30, seed: 1 };
        let admission = BlockAdmission::new(&"all".parse().unwrap(), &setup).unwrap();
        let mut admission = RecordedAdmission::new(admission);
        let limits = limited();
        let access = BlockAccess {
            volume: VolumeId(0),
            offset: 0,
            bytes: 3 * 65_536,
            op: BlockOp::Read,
            kind: BlockKind::Unknown,
            now: SECOND,
        };
        let rule = |at: u64, _| [Rule::Never, Rule::Always, Rule::ByPolicy][(at / 65_536) as usize];
        let parts = [(0, 65_536), (65_536, 65_536), (131_072, 65_536)];
        let mut out = Vec::new();
        let mut ask = |admission: &mut RecordedAdmission| {
            let parts = parts.into_iter().map(|(at, len)| (at, len, BlockKind::Unknown));
            judge(&limits, admission, &access, 4096, parts, rule, &mut out);
            out.clone()
        };
        assert_eq!(ask(&mut admission), [Verdict::Reject, Verdict::Admit, Verdict::Admit]);
        // Nothing depends on the file here.
        let _ = limits.charge(SECOND, 1 << 30);
        assert_eq!(ask(&mut admission), [Verdict::Reject, Verdict::Admit, Verdict::Reject]);
        let counts = admission.verdicts();
        assert_eq!(counts.admitted, 3);
        assert_eq!(counts.rejected(Reason::Never), 2);
        assert_eq!(counts.rejected(Reason::Budget), 1);
    }
}
