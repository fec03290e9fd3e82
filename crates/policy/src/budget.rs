//! The write budget: from a drive's endurance and the wanted life to bytes that may be written now.

use std::fmt;

use larder_base::{ByteSize, Nanos};
use serde::{Deserialize, Serialize};

/// Seconds of a year of 365.25 days.
pub const YEAR_SECONDS: f64 = 365.25 * 86_400.0;

/// The write budget as the configuration file states it. Without `tbw` and `dwpd` there is no budget.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct WriteBudgetConfig {
    /// Endurance of the drive as bytes that may be written to it in its life (TBW).
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tbw: Option<ByteSize>,
    /// Endurance as drive writes per day over the warranty; instead of `tbw`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub dwpd: Option<f64>,
    /// Years of warranty that `dwpd` is stated for. Default 5.
    pub warranty_years: f64,
    /// Capacity of the whole drive, which `dwpd` refers to. Default 0: the flash given to the cache.
    pub drive_capacity: ByteSize,
    /// Years that the drive is to last. Default 5.
    pub years: f64,
    /// Bytes that the drive is expected to program for each byte written to it. Segments are written whole and in order, so
    /// this is near 1. Default 1.1.
    pub device_write_amplification: f64,
    /// Hours of budget that may be saved up for a burst. Default 6.
    pub burst_hours: f64,
    /// Whether an empty cache may be filled once ahead of the budget. Default true.
    pub first_fill: bool,
}

impl Default for WriteBudgetConfig {
    fn default() -> WriteBudgetConfig {
        WriteBudgetConfig {
            tbw: None,
            dwpd: None,
            warranty_years: 5.0,
            drive_capacity: ByteSize(0),
            years: 5.0,
            device_write_amplification: 1.1,
            burst_hours: 6.0,
            first_fill: true,
        }
    }
}

/// Why a write budget cannot be set up.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum BudgetError {
    /// A parameter is out of its range.
    #[error("write_budget.{name} is {value}: it must be {must}")]
    Parameter {
        /// Which.
        name: &'static str,
        /// What was given.
        value: String,
        /// What it must be.
        must: &'static str,
    },
    /// Endurance was given twice.
    #[error(
        "write_budget.tbw and write_budget.dwpd both state the drive's endurance: give one of them"
    )]
    Both,
    /// So little that nothing could ever be written.
    #[error(
        "the write budget comes to {rate:.3} bytes per second (endurance {endurance} over {years} years): less than one. \
         Check the endurance and the years"
    )]
    Nothing {
        /// Bytes per second.
        rate: f64,
        /// Bytes over the drive's life.
        endurance: ByteSize,
        /// Wanted life.
        years: f64,
    },
}

impl WriteBudgetConfig {
    /// Bytes that may be written to the drive in its life; `None` if no endurance is given.
    pub fn endurance(&self, flash: ByteSize) -> Option<ByteSize> {
        self.tbw.or_else(|| {
            let capacity = if self.drive_capacity.0 > 0 { self.drive_capacity } else { flash };
            let days = self.warranty_years * 365.25;
            self.dwpd.map(|dwpd| ByteSize((dwpd * days * capacity.0 as f64) as u64))
        })
    }

    fn validate(&self) -> Result<(), BudgetError> {
        let check = |ok: bool, name: &'static str, value: f64, must: &'static str| {
            if ok {
                Ok(())
            } else {
                Err(BudgetError::Parameter { name, value: value.to_string(), must })
            }
        };
        // Written so that NaN fails every one of them.
        let years = "above 0 and at most 100";
        check(self.years > 0.0 && self.years <= 100.0, "years", self.years, years)?;
        let w = self.warranty_years;
        check(w > 0.0 && w <= 100.0, "warranty_years", w, years)?;
        let d = self.device_write_amplification;
        check((1.0..=100.0).contains(&d), "device_write_amplification", d, "between 1 and 100")?;
        let h = self.burst_hours;
        check((0.01..=720.0).contains(&h), "burst_hours", h, "between 0.01 and 720")?;
        if let Some(d) = self.dwpd {
            check(d > 0.0 && d <= 1000.0, "dwpd", d, "above 0 and at most 1000")?;
        }
        if self.tbw.is_some() && self.dwpd.is_some() { Err(BudgetError::Both) } else { Ok(()) }
    }
}

/// Part of the income that pays back the loan of the first fill: one over this.
const REPAYMENT: u64 = 20;
/// Tokens are counted in this part of a byte: nanoseconds at a rate in micro-bytes per second.
const TOKEN: u128 = 1_000_000_000_000_000;

/// A token bucket that holds the bytes written to flash to the rate at which the drive lasts the wanted years.
///
/// The bucket holds some hours of the rate, so that a busy hour may borrow from the quiet one before it. An empty cache may
/// be filled ahead of the budget: one capacity of the flash is lent once, and a twentieth of the income pays it back. So at any
/// time t after the start
///
/// ```text
/// spent(t) <= rate * t + burst + capacity,
/// ```
/// and in the long run the mean is at most the rate. What cannot be held back is [charged](WriteBudget::charge): it may go
/// beyond the bound by itself, is owed then, and nothing is granted until it is paid. From the moment that [`WriteBudget::means`] says
/// [`Means::Spent`] until it says [`Means::Plenty`], half of the income is kept for the writer that has stopped, and is granted to nobody. Without an
/// endurance the budget is off and grants everything.
#[derive(Clone, Debug)]
pub struct WriteBudget {
    limit: Option<Limit>,
    spent: u64,
}

#[derive(Clone, Debug)]
struct Limit {
    endurance: ByteSize,
    years: f64,
    amplification: f64,
    /// Micro-bytes per second.
    rate: u64,
    /// Tokens that the bucket can hold, and holds, in units of 1/[`TOKEN`] bytes.
    burst: u128,
    tokens: u128,
    /// What may still be borrowed, and what is owed, in bytes.
    loan: u64,
    debt: u64,
    /// Part of a byte of debt that is paid already.
    paid: u128,
    /// Bytes that were charged and not granted yet.
    owed: u64,
    /// Tokens that are kept for a writer that has stopped, which nothing is granted of: part of `tokens`.
    kept: Option<u128>,
    at: Nanos,
}

/// What a [`WriteBudget`] must remember over a restart, so that restarting earns nothing.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct BudgetState {
    /// Bytes in the bucket.
    pub saved: u64,
    /// Bytes of the first fill that may still be borrowed.
    pub loan: u64,
    /// Bytes of the first fill that are not paid back.
    pub debt: u64,
    /// Bytes written so far.
    pub spent: u64,
    /// Bytes of these that were written though the budget had nothing for them, and are paid first.
    #[serde(default)]
    pub owed: u64,
}

/// How much of the budget a writer still has that cannot hold its writes back, such as a log of clients' writes. Ascending.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub enum Means {
    /// So much is owed that it must stop writing to this drive: the income of [`SPENT_SECONDS`], or [`SPENT_PART`] of what can be saved
    /// up where that is more.
    Spent,
    /// Something is owed: it is to write less. (That nothing is left is no reason: what can be held back, such as fills, may have had it.)
    Short,
    /// Nothing is owed.
    Enough,
    /// [`PLENTY_PART`] of what can be saved up is, or as much of the first fill: who has stopped may write again.
    #[default]
    Plenty,
}

/// Seconds of income that are owed, at least, before a writer is to stop.
pub const SPENT_SECONDS: u64 = 60;
/// One over the part of what can be saved up that is owed, at least, before a writer is to stop: 15 minutes' income of 6 hours'.
pub const SPENT_PART: u64 = 24;
/// One over the part of what can be saved up that is there before a writer that has stopped writes again.
pub const PLENTY_PART: u64 = 4;
/// One over the part of the income that is kept for it until then: what can be held back, such as fills, would else take all of it.
pub const KEPT_PART: u64 = 2;

impl WriteBudget {
    /// A budget for a cache on `flash` bytes. `state`: what [`WriteBudget::state`] gave at the last stop; without it the
    /// bucket starts empty, and the flash is taken to be empty too.
    ///
    /// # Errors
    /// A parameter out of range, endurance given twice, or a rate below one byte per second.
    pub fn new(
        config: &WriteBudgetConfig,
        flash: ByteSize,
        state: Option<BudgetState>,
        now: Nanos,
    ) -> Result<WriteBudget, BudgetError> {
        config.validate()?;
        let spent = state.map_or(0, |s| s.spent);
        let Some(endurance) = config.endurance(flash) else {
            return Ok(WriteBudget { limit: None, spent });
        };
        let rate =
            endurance.0 as f64 / config.device_write_amplification / (config.years * YEAR_SECONDS);
        if rate < 1.0 {
            return Err(BudgetError::Nothing { rate, endurance, years: config.years });
        }
        let first_fill = if config.first_fill { flash.0 } else { 0 };
        let state = state.unwrap_or(BudgetState { loan: first_fill, ..BudgetState::default() });
        // u64 endurance over at least 1 and at most 100 years: micro-bytes fit by construction (2^64 B in a year is 6e17
        // micro-bytes per second), and the cast saturates for lives of less.
        let rate = (rate * 1e6) as u64;
        let burst = u128::from(rate) * (config.burst_hours * 3.6e12) as u128;
        let limit = Limit {
            endurance,
            years: config.years,
            amplification: config.device_write_amplification,
            rate,
            burst,
            tokens: (u128::from(state.saved) * TOKEN).min(burst),
            loan: state.loan.min(flash.0),
            debt: state.debt.min(flash.0),
            paid: 0,
            owed: state.owed,
            kept: None,
            at: now,
        };
        Ok(WriteBudget { limit: Some(limit), spent })
    }

    /// Whether there is a limit.
    pub fn is_on(&self) -> bool {
        self.limit.is_some()
    }

    /// Bytes per second, if there is a limit.
    pub fn rate(&self) -> Option<f64> {
        self.limit.as_ref().map(|l| l.rate as f64 / 1e6)
    }

    /// Takes up to `wanted` bytes out of the bucket and says how many it gave. What is not written goes back by
    /// [`WriteBudget::refund`].
    pub fn grant(&mut self, now: Nanos, wanted: u64) -> u64 {
        let granted = match &mut self.limit {
            None => wanted,
            Some(limit) => limit.grant(now, wanted),
        };
        self.spent = self.spent.saturating_add(granted);
        granted
    }

    /// So many bytes are written, whether they are afforded or not. What the bucket does not hold is owed.
    pub fn charge(&mut self, now: Nanos, bytes: u64) {
        self.spent = self.spent.saturating_add(bytes);
        if let Some(limit) = &mut self.limit {
            limit.owed = limit.owed.saturating_add(bytes);
            limit.settle(now);
        }
    }

    /// Whether so many bytes may be written now. Nothing is taken out of the budget.
    ///
    /// For a writer that cannot hold everything back, such as the block cache: new lines ask; updates of cached lines, lines
    /// that its cleaner moves, and the map's log do not, and all of them are [charged](WriteBudget::charge).
    pub fn affords(&mut self, now: Nanos, bytes: u64) -> bool {
        self.available(now) >= bytes && self.limit.as_ref().is_none_or(|l| l.owed == 0)
    }

    /// Whether nothing is held back for the first fill of the flash: there is no limit, or part of the loan is left.
    pub fn lends(&self) -> bool {
        self.limit.as_ref().is_none_or(|l| l.loan > 0 && l.owed == 0)
    }

    /// How much is left, for a writer that cannot hold its writes back. If it is to stop, half of the income is kept for it until there is plenty.
    pub fn means(&mut self, now: Nanos) -> Means {
        let Some(limit) = &mut self.limit else { return Means::Plenty };
        limit.settle(now);
        let means = limit.means();
        limit.kept = match means {
            Means::Spent => limit.kept.or(Some(0)),
            Means::Short | Means::Enough => limit.kept,
            Means::Plenty => None,
        };
        means
    }

    /// What [`WriteBudget::grant`] would give now at most.
    pub fn available(&mut self, now: Nanos) -> u64 {
        match &mut self.limit {
            None => u64::MAX,
            Some(limit) => {
                limit.settle(now);
                // As long as anything is owed there is nothing.
                limit.available()
            }
        }
    }

    /// What [`WriteBudget::grant`] would give now at most, and what can be saved up at most; `None` without a limit.
    pub fn saved(&mut self, now: Nanos) -> Option<(u64, u64)> {
        let most = self.limit.as_ref()?.burst / TOKEN;
        Some((self.available(now), u64::try_from(most).unwrap_or(u64::MAX)))
    }

    /// Gives back bytes that were granted and not written (at most what was granted).
    pub fn refund(&mut self, bytes: u64) {
        let bytes = bytes.min(self.spent);
        self.spent -= bytes;
        if let Some(l) = &mut self.limit {
            // First undo borrowing, then refill the bucket.
            let borrowed = bytes.min(l.debt);
            l.debt -= borrowed;
            l.loan += borrowed;
            l.tokens = (l.tokens + u128::from(bytes - borrowed) * TOKEN).min(l.burst);
        }
    }

    /// Bytes granted and not given back, and charged, since the cache was first filled.
    pub fn spent(&self) -> u64 {
        self.spent
    }

    /// Years that a new drive lasts at this rate of bytes written to it; `None` without an endurance, infinite if nothing
    /// is written.
    pub fn expected_life_years(&self, bytes_per_second: f64) -> Option<f64> {
        self.years_left(bytes_per_second, 0.0)
    }

    /// The same for a drive of whose endurance this share is used up (what the drive reports as percentage used, / 100).
    pub fn years_left(&self, bytes_per_second: f64, used: f64) -> Option<f64> {
        self.limit.as_ref().map(|l| {
            let left = l.endurance.0 as f64 * (1.0 - used).max(0.0);
            left / (bytes_per_second.max(0.0) * l.amplification * YEAR_SECONDS)
        })
    }

    /// What to keep over a restart.
    pub fn state(&mut self, now: Nanos) -> BudgetState {
        match &mut self.limit {
            None => BudgetState { spent: self.spent, ..BudgetState::default() },
            Some(l) => {
                l.settle(now);
                BudgetState {
                    saved: l.whole_tokens(),
                    loan: l.loan,
                    debt: l.debt,
                    spent: self.spent,
                    owed: l.owed,
                }
            }
        }
    }
}

/// What of a [`WriteBudget`] lies in a file, so that a process that is killed has gained nothing by it.
///
/// The file is always *ahead*: it says that more has been written than has, and before the budget gets there it is written
/// anew. A kill so loses what was claimed ahead and not used, about a minute's income; a clean stop writes down what is.
#[derive(Clone, Debug)]
pub struct KeptBudget {
    /// Bytes that a claim goes ahead.
    ahead: u64,
    /// What was last written down, and when.
    last: Option<(BudgetState, Nanos)>,
    /// How often it could not be.
    failed: u64,
}

/// A claim is of the income of so many seconds, and as often what was earned since is written down.
const CLAIM_SECONDS: u64 = 60;

impl KeptBudget {
    /// Nothing is in the file yet. `unit`: bytes that are written at once.
    pub fn new(budget: &WriteBudget, flash: ByteSize, unit: u64) -> KeptBudget {
        let income = budget.rate().map_or(0, |rate| (rate * CLAIM_SECONDS as f64) as u64);
        // The part of the flash: a first fill is not to be held up by the file.
        KeptBudget {
            ahead: income.max(flash.0 / 1024).max(unit.saturating_mul(4)),
            last: None,
            failed: 0,
        }
    }

    /// The same where claims go `ahead` bytes ahead, whatever the income.
    #[must_use]
    pub fn with_ahead(self, ahead: u64) -> KeptBudget {
        KeptBudget { ahead, ..self }
    }

    /// What must be in the file before `next` more bytes are written; `None` if what is there is enough.
    pub fn due(&self, now: Nanos, budget: &WriteBudget, next: u64) -> Option<BudgetState> {
        if let Some((last, at)) = &self.last {
            let claimed = budget.spent().saturating_add(next) <= last.spent;
            let recent = now.saturating_sub(*at) < Nanos::from_secs(CLAIM_SECONDS);
            if !budget.is_on() || claimed && recent {
                return None;
            }
        }
        let mut claim = budget.clone();
        if budget.is_on() {
            claim.charge(now, self.ahead.saturating_add(next));
        }
        let state = claim.state(now);
        // Of an idle cache with a full bucket there is nothing new to say.
        self.last.is_none_or(|(last, _)| last != state).then_some(state)
    }

    /// Whether the file knows of `next` more bytes already.
    pub fn covers(&self, budget: &WriteBudget, next: u64) -> bool {
        let claimed = self.last.is_some_and(|l| budget.spent().saturating_add(next) <= l.0.spent);
        claimed || !budget.is_on()
    }

    /// The file was to say `state`, and does if it was `written`. If not, nobody waits for it: clients do not wait for a directory that
    /// is full for days. What was claimed may be written all the same, the next claim tries again, and a kill before that forgets so
    /// much of what was spent.
    pub fn kept(&mut self, now: Nanos, state: BudgetState, written: bool) {
        self.last = Some((state, now));
        self.failed += u64::from(!written);
    }

    /// How often the file could not be written.
    pub fn failed(&self) -> u64 {
        self.failed
    }

    /// Bytes that a claim goes ahead.
    pub fn ahead(&self) -> u64 {
        self.ahead
    }
}

impl Limit {
    fn whole_tokens(&self) -> u64 {
        u64::try_from(self.tokens / TOKEN).unwrap_or(u64::MAX)
    }

    /// What is granted at most: all but what is kept.
    fn available(&self) -> u64 {
        let free = self.tokens.saturating_sub(self.kept.unwrap_or(0)) / TOKEN;
        u64::try_from(free).unwrap_or(u64::MAX).saturating_add(self.loan)
    }

    /// How much is left, kept or not.
    fn means(&self) -> Means {
        let second = u128::from(self.rate) / 1_000_000;
        let burst = self.burst / TOKEN;
        let spent = (second * u128::from(SPENT_SECONDS)).max(burst / u128::from(SPENT_PART)).max(1);
        let left = u128::from(self.whole_tokens().saturating_add(self.loan));
        match (u128::from(self.owed), left) {
            (owed, _) if owed >= spent => Means::Spent,
            (1.., _) => Means::Short,
            (0, left) if left >= burst / u128::from(PLENTY_PART) => Means::Plenty,
            _ => Means::Enough,
        }
    }

    /// Takes in what was earned since the last time.
    fn earn(&mut self, now: Nanos) {
        let elapsed = now - self.at;
        self.at = self.at.max(now);
        // 64 bits times 64 bits.
        let mut income = u128::from(elapsed.0) * u128::from(self.rate);
        if self.debt > 0 {
            let part = (income / u128::from(REPAYMENT)).min(u128::from(self.debt) * TOKEN);
            income -= part;
            self.paid += part;
            let bytes = (self.paid / TOKEN).min(u128::from(self.debt));
            self.paid -= bytes * TOKEN;
            self.debt -= bytes as u64;
        }
        self.tokens = self.tokens.saturating_add(income).min(self.burst);
        if let Some(kept) = &mut self.kept {
            let most = self.burst / u128::from(PLENTY_PART);
            *kept = kept.saturating_add(income / u128::from(KEPT_PART)).min(most);
        }
    }

    /// Earns, and pays what is owed.
    fn settle(&mut self, now: Nanos) {
        self.earn(now);
        if self.owed > 0 {
            self.owed -= self.take(self.owed);
        }
        // What cannot be held back is paid first.
        self.kept = self.kept.map(|kept| kept.min(self.tokens));
    }

    fn grant(&mut self, now: Nanos, wanted: u64) -> u64 {
        self.settle(now);
        self.take(wanted.min(self.available()))
    }

    /// Takes up to `wanted` bytes out of the bucket, and borrows what it does not hold.
    fn take(&mut self, wanted: u64) -> u64 {
        let saved = self.whole_tokens().min(wanted);
        self.tokens -= u128::from(saved) * TOKEN;
        let borrowed = (wanted - saved).min(self.loan);
        self.loan -= borrowed;
        self.debt += borrowed;
        saved + borrowed
    }
}

impl fmt::Display for WriteBudget {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.limit {
            None => f.write_str(
                "write budget off: the drive's endurance is not known (give write_budget.tbw or write_budget.dwpd)",
            ),
            Some(l) => write!(
                f,
                "write budget {}/s: {} in {} years at a device write amplification of {}",
                ByteSize(l.rate / 1_000_000),
                l.endurance,
                l.years,
                l.amplification
            ),
        }
    }
}

#[cfg(test)]
mod tests {
    use larder_base::Rng;
    use proptest::prelude::*;

    use super::*;

    fn secs(s: u64) -> Nanos {
        Nanos::from_secs(s)
    }

    /// 1000 bytes per second, for an hour's burst.
    fn thousand(first_fill: bool) -> WriteBudgetConfig {
        WriteBudgetConfig {
            tbw: Some(ByteSize((1000.0 * YEAR_SECONDS) as u64)),
            years: 1.0,
            device_write_amplification: 1.0,
            burst_hours: 1.0,
            first_fill,
            ..WriteBudgetConfig::default()
        }
    }

    #[test]
    fn rates_follow_from_endurance() {
        let config = WriteBudgetConfig {
            dwpd: Some(1.0),
            device_write_amplification: 1.0,
            ..WriteBudgetConfig::default()
        };
        let b = WriteBudget::new(&config, ByteSize(4_000_000_000), None, Nanos::ZERO).unwrap();
        assert!((b.rate().unwrap() - 46_296.3).abs() < 0.1, "1 DWPD on 4 GB: {:?}", b.rate());
        assert!((b.expected_life_years(46_296.3).unwrap() - 5.0).abs() < 1e-3);
        assert!((b.years_left(46_296.3, 0.4).unwrap() - 3.0).abs() < 1e-3);
        assert_eq!(b.expected_life_years(0.0), Some(f64::INFINITY));
    }

    #[test]
    fn off_without_endurance_and_says_so() {
        let mut b =
            WriteBudget::new(&WriteBudgetConfig::default(), ByteSize::gib(1), None, Nanos::ZERO)
                .unwrap();
        assert!(!b.is_on() && b.expected_life_years(1.0).is_none());
        assert_eq!(b.grant(Nanos::ZERO, 1 << 40), 1 << 40);
        assert_eq!(b.spent(), 1 << 40);
        assert!(b.to_string().contains("off") && b.to_string().contains("tbw"));
    }

    #[test]
    fn bursts_are_saved_up_and_bounded() {
        let mut b =
            WriteBudget::new(&thousand(false), ByteSize::gib(1), None, Nanos::ZERO).unwrap();
        assert_eq!(b.grant(Nanos::ZERO, 10), 0, "starts empty");
        assert_eq!(b.grant(secs(10), 1 << 40), 10_000);
        assert_eq!(
            b.available(secs(86_400)),
            3_600_000,
            "an hour's worth, however long it was quiet"
        );
        assert_eq!(b.grant(secs(86_400), 100), 100);
        b.refund(100);
        assert_eq!(b.available(secs(86_400)), 3_600_000);
        assert_eq!(b.spent(), 10_000);
    }

    #[test]
    fn the_first_fill_is_lent_once() {
        let mut b = WriteBudget::new(&thousand(true), ByteSize(50_000), None, Nanos::ZERO).unwrap();
        assert_eq!(b.grant(Nanos::ZERO, 60_000), 50_000);
        // A twentieth of 1000 B/s pays it back: 1000 seconds.
        assert_eq!(b.grant(secs(100), u64::MAX), 95_000);
        assert_eq!(b.grant(secs(1000), u64::MAX), 855_000);
        assert_eq!(b.state(secs(1000)).debt, 0);
        assert_eq!(b.grant(secs(1100), u64::MAX), 100_000);
        assert_eq!(b.grant(secs(1100), 1), 0, "it is not lent again");
    }

    #[test]
    fn what_is_saved_is_what_would_be_granted() {
        let mut b = WriteBudget::new(&thousand(true), ByteSize(50_000), None, Nanos::ZERO).unwrap();
        assert_eq!(b.saved(secs(10)), Some((60_000, 3_600_000)));
        b.charge(secs(10), 70_000);
        assert_eq!(b.saved(secs(15)), Some((0, 3_600_000)), "something is owed");
        let config = WriteBudgetConfig::default();
        let mut off = WriteBudget::new(&config, ByteSize(50_000), None, Nanos::ZERO).unwrap();
        assert_eq!(off.saved(secs(10)), None);
    }

    #[test]
    fn what_cannot_wait_is_owed() {
        let of = |first_fill| {
            WriteBudget::new(&thousand(first_fill), ByteSize(50_000), None, Nanos::ZERO).unwrap()
        };
        let mut b = of(false);
        assert!(b.affords(secs(10), 10_000) && !b.affords(secs(10), 10_001));
        b.charge(secs(10), 12_000);
        assert_eq!(b.available(secs(10)), 0);
        assert!(!b.affords(secs(11), 0), "1,000 are owed still");
        assert!(b.affords(secs(12), 0) && !b.affords(secs(12), 1));
        assert!(b.affords(secs(13), 1000) && !b.affords(secs(13), 1001));
        assert_eq!(b.available(secs(14)), 2000);
        assert_eq!(b.state(secs(14)).spent, 12_000);
    }

    #[test]
    fn a_writer_stops_at_a_debt_and_goes_on_when_a_quarter_is_saved_up() {
        // An hour's burst is 3,600,000 bytes, its 24th 150,000: 150 seconds.
        let mut b =
            WriteBudget::new(&thousand(false), ByteSize(50_000), None, Nanos::ZERO).unwrap();
        assert_eq!(b.means(Nanos::ZERO), Means::Enough, "it starts empty, and owes nothing");
        assert_eq!(b.means(secs(10)), Means::Enough);
        b.charge(secs(10), 10_000 + 149_999);
        assert_eq!(b.means(secs(10)), Means::Short);
        b.charge(secs(10), 1);
        assert_eq!(b.means(secs(10)), Means::Spent);
        assert_eq!(b.means(secs(11)), Means::Short);
        assert_eq!(b.means(secs(161)), Means::Enough);
        assert_eq!(b.means(secs(160 + 899)), Means::Enough);
        assert_eq!(b.means(secs(160 + 900)), Means::Plenty);
        // While part of the first fill is left there is no lack.
        let mut b = WriteBudget::new(&thousand(true), ByteSize::mib(4), None, Nanos::ZERO).unwrap();
        assert_eq!(b.means(Nanos::ZERO), Means::Plenty);
        b.charge(Nanos::ZERO, 4 << 20);
        assert_eq!(b.means(Nanos::ZERO), Means::Enough);
        b.charge(Nanos::ZERO, 1);
        assert_eq!(b.means(Nanos::ZERO), Means::Short);
        // Without an endurance there is always enough.
        let config = WriteBudgetConfig::default();
        let mut off = WriteBudget::new(&config, ByteSize(50_000), None, Nanos::ZERO).unwrap();
        off.charge(Nanos::ZERO, 1 << 60);
        assert_eq!(off.means(Nanos::ZERO), Means::Plenty);
    }

    /// Fills take whatever they may: half of the income is there all the same when the writer's debt is paid, and no more than that is kept.
    #[test]
    fn a_writer_that_has_stopped_goes_on_though_others_take_all_that_they_may() {
        let mut b =
            WriteBudget::new(&thousand(false), ByteSize(50_000), None, Nanos::ZERO).unwrap();
        b.charge(Nanos::ZERO, 150_000);
        assert_eq!(b.means(Nanos::ZERO), Means::Spent);
        let mut taken = 0;
        let mut take = |b: &mut WriteBudget, second| {
            while b.affords(secs(second), 100) {
                b.charge(secs(second), 100);
                taken += 100;
            }
            taken
        };
        let (mut back, mut taken) = (0, 0);
        for second in 1..=4000 {
            taken = take(&mut b, second);
            if b.means(secs(second)) == Means::Plenty {
                back = second;
                break;
            }
        }
        // The debt takes 150 seconds, a quarter of an hour's income twice as long as alone.
        assert!((150 + 1790..150 + 1810).contains(&back), "{back}");
        assert!((890_000..910_000).contains(&taken), "{taken}");
        // Nothing is kept any more.
        assert_eq!(b.available(secs(back)), 900_000);
        assert_eq!(b.grant(secs(back), u64::MAX), 900_000);
    }

    #[test]
    fn a_restart_earns_nothing() {
        let mut b = WriteBudget::new(&thousand(true), ByteSize(50_000), None, Nanos::ZERO).unwrap();
        b.grant(secs(0), 40_000);
        let state = b.state(secs(10));
        let mut again =
            WriteBudget::new(&thousand(true), ByteSize(50_000), Some(state), Nanos::ZERO).unwrap();
        assert_eq!(again.available(Nanos::ZERO), b.available(secs(10)));
        assert_eq!(again.state(Nanos::ZERO), state);
    }

    /// The next process has only what was in the file when this one was killed.
    #[test]
    fn a_kill_earns_nothing() {
        let mut rng = Rng::new(7);
        for first_fill in [false, true] {
            let config = thousand(first_fill);
            let (flash, unit) = (ByteSize(1 << 20), 4096);
            let lent = if first_fill { flash.0 } else { 0 };
            let (mut file, mut now, mut written) = (None, Nanos::ZERO, 0u64);
            for _ in 0..40 {
                let mut b = WriteBudget::new(&config, flash, file, now).unwrap();
                let mut kept = KeptBudget::new(&b, flash, unit);
                for _ in 0..rng.below(400) {
                    now = now + Nanos(rng.below(300_000_000));
                    if let Some(state) = kept.due(now, &b, 2 * unit) {
                        file = Some(state);
                        kept.kept(now, state, true);
                    }
                    let wanted = rng.below(unit);
                    written += b.grant(now, wanted);
                    if rng.chance(0.1) {
                        // More than it has, perhaps.
                        b.charge(now, wanted);
                        written += wanted;
                    }
                    let bound = now.as_millis() + lent + b.state(now).owed;
                    assert!(written <= bound, "{written} > {bound}");
                    assert!(file.unwrap().spent >= b.spent(), "the file is ahead");
                }
            }
            let first = WriteBudget::new(&config, flash, file, now).unwrap();
            assert!(first.spent() >= written, "every byte is remembered");
            assert!(first.spent() < 2 * written + 40 * (60_000 + 6 * unit), "and few others");
        }
    }

    /// Whoever writes is not stopped by a file that cannot be written, and it is not written at every turn.
    #[test]
    fn a_claim_that_cannot_be_written_down_holds_nothing_up() {
        let flash = ByteSize(1 << 20);
        let mut b = WriteBudget::new(&thousand(false), flash, None, Nanos::ZERO).unwrap();
        let mut kept = KeptBudget::new(&b, flash, 4096);
        assert!(!kept.covers(&b, 4096), "nothing has been tried yet");
        let state = kept.due(Nanos::ZERO, &b, 4096).unwrap();
        kept.kept(Nanos::ZERO, state, false);
        assert!(kept.covers(&b, 4096) && kept.failed() == 1);
        assert_eq!(kept.due(Nanos::ZERO, &b, 4096), None);
        b.charge(Nanos::ZERO, state.spent);
        let state = kept.due(Nanos::ZERO, &b, 4096).expect("the next claim tries again");
        kept.kept(Nanos::ZERO, state, true);
        assert_eq!(kept.failed(), 1);
    }

    #[test]
    fn nonsense_is_refused() {
        let base =
            WriteBudgetConfig { tbw: Some(ByteSize(1 << 50)), ..WriteBudgetConfig::default() };
        let refused = |c: WriteBudgetConfig| {
            WriteBudget::new(&c, ByteSize::gib(1), None, Nanos::ZERO)
                .expect_err("refused")
                .to_string()
        };
        assert!(refused(WriteBudgetConfig { years: 0.0, ..base.clone() }).contains("years is 0"));
        assert!(refused(WriteBudgetConfig { years: f64::NAN, ..base.clone() }).contains("NaN"));
        assert!(refused(WriteBudgetConfig { dwpd: Some(1.0), ..base.clone() }).contains("both"));
        assert!(
            refused(WriteBudgetConfig { device_write_amplification: 0.5, ..base.clone() })
                .contains("0.5")
        );
        assert!(
            refused(WriteBudgetConfig { tbw: Some(ByteSize(1000)), ..base })
                .contains("less than one")
        );
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]

        #[test]
        fn never_more_than_the_integral(
            tbw in 1u64 << 36..1 << 60, years in 0.1f64..20.0, flash in 0u64..1 << 32, seed: u64, first_fill: bool,
        ) {
            let config = WriteBudgetConfig {
                tbw: Some(ByteSize(tbw)), years, first_fill, ..WriteBudgetConfig::default()
            };
            let mut b = WriteBudget::new(&config, ByteSize(flash), None, Nanos::ZERO).unwrap();
            let rate = b.rate().unwrap();
            let burst = rate * 6.0 * 3600.0;
            let lent = if first_fill { flash } else { 0 };
            let mut rng = Rng::new(seed);
            let mut now = Nanos::ZERO;
            let mut written = 0u64;
            for _ in 0..300 {
                let scale = (rng.range(10, 46), rng.range(1, 45));
                now = now + Nanos(rng.below(1 << scale.0));
                let wanted = rng.below(1 << scale.1);
                let granted = b.grant(now, wanted);
                prop_assert!(granted <= wanted);
                let back = if rng.chance(0.2) { rng.below(granted + 1) } else { 0 };
                b.refund(back);
                written += granted - back;
                prop_assert_eq!(b.spent(), written);
                let bound = rate * now.as_secs_f64() + lent as f64 + 1.0;
                prop_assert!(written as f64 <= bound * (1.0 + 1e-9), "{} > {}", written, bound);
            }
            // Whatever was saved up, the next moment grants no more than bucket and loan.
            let granted = b.grant(now, u64::MAX);
            prop_assert!(granted as f64 <= burst + lent as f64 + 1.0);
        }
    }
}
