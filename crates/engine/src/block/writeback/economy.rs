//! What the write budget makes of write-back: writes slow down, then their volume writes through, and back when there is budget again.
//!
//! A log cannot hold its writes back: each is charged when it leaves, and what the budget does not hold is owed. So the budget has its say
//! about what comes next:
//!
//! | the budget ([`Means`]) | volumes that write back |
//! | --- | --- |
//! | has nothing left | are answered no faster than their stores take what is dirty ([`Throttle`](super::throttle)) |
//! | is owed 60 s of its income, and 1/24 of what it can save up | besides, each goes through: drained, its marker clean, then written through [cleanfirst] |
//! | has 1/4 of what it can save up | those that went through write back again |
//!
//! Between the last two a volume stays as it is, and half of the income is kept for it, so that fills do not take all of it. With the usual burst of
//! six hours it is so written through for an hour and three quarters at least, and for three and a quarter at most, unless what cannot be held back
//! either (updates of cached lines) takes more than the other half. No write goes through while its volume has something dirty [through]. A volume that could not change over is tried again later.
//!
//! [`Economy`] is the log's, one for all volumes; [`Thrift`] is one volume's, whether it writes back or not. A host looks into both now and then
//! ([`Thrift::wants`]), and carries out the steps of the [`Holder`](super::holder::Holder); it decides nothing.

use larder_base::Nanos;
use larder_policy::budget::Means;

/// The budget is asked again after so long, though nothing is written.
pub(super) const LOOK: Nanos = Nanos::from_secs(1);
/// A volume that could not change over is tried again after so long, twice as long each time,
const FIRST_PAUSE: Nanos = Nanos::from_secs(10);
/// and at most so long.
const LONGEST_PAUSE: Nanos = Nanos::from_secs(600);

/// The budget as the log knows it.
#[derive(Clone, Copy, Debug, Default)]
pub struct Economy {
    means: Means,
    /// So much was owed that volumes write through, until there is plenty.
    spent: bool,
    /// When it was asked last.
    asked: Nanos,
}

impl Economy {
    /// The budget has this now. Returns whether that changes anything.
    pub fn hear(&mut self, now: Nanos, means: Means) -> bool {
        let before = (self.is_slow(), self.spent);
        (self.means, self.asked) = (means, now);
        self.spent = match means {
            Means::Spent => true,
            Means::Short | Means::Enough => self.spent,
            Means::Plenty => false,
        };
        before != (self.is_slow(), self.spent)
    }

    /// Volumes are answered no faster than their stores are.
    pub fn is_slow(&self) -> bool {
        self.spent || self.means <= Means::Short
    }

    /// Volumes are to be written through.
    pub fn is_spent(&self) -> bool {
        self.spent
    }

    /// When the budget is to be asked again, if it holds anything back.
    pub(super) fn looks(&self) -> Option<Nanos> {
        self.is_slow().then(|| self.asked + LOOK)
    }
}

/// What is to become of a volume.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Change {
    /// It writes back, and is to be written through.
    Through,
    /// It went through for want of budget, and is to write back again.
    Back,
}

/// A volume that wrote back when it came.
#[derive(Clone, Copy, Debug, Default)]
pub struct Thrift {
    /// It is written through for want of budget.
    through: bool,
    under_way: bool,
    /// Nothing is tried before.
    after: Nanos,
    failures: u32,
}

impl Thrift {
    /// What is to be done with the volume, which writes back now or not. What is to be done has begun then: [`Thrift::ended`] is next.
    pub fn wants(&mut self, now: Nanos, writes_back: bool, economy: &Economy) -> Option<Change> {
        if self.under_way {
            return None;
        }
        // Somebody else may have changed it over.
        self.through &= !writes_back;
        let change = match (writes_back, self.through, economy.is_spent()) {
            (true, _, true) => Change::Through,
            (false, true, false) => Change::Back,
            _ => {
                (self.after, self.failures) = (Nanos::ZERO, 0);
                return None;
            }
        };
        self.under_way = now >= self.after;
        self.under_way.then_some(change)
    }

    /// Whether what was begun is still wanted.
    pub fn goes_on(change: Change, economy: &Economy) -> bool {
        economy.is_spent() == (change == Change::Through)
    }

    /// The volume has changed over, or has not and is as it was.
    pub fn ended(&mut self, now: Nanos, change: Change, done: bool) {
        self.under_way = false;
        if done {
            self.through = change == Change::Through;
            (self.after, self.failures) = (Nanos::ZERO, 0);
        } else {
            let pause = FIRST_PAUSE.0 << self.failures.min(10);
            self.after = now + Nanos(pause.min(LONGEST_PAUSE.0));
            self.failures += 1;
        }
    }

    /// It is written through for want of budget, and writes back when there is some.
    pub fn is_through(&self) -> bool {
        self.through
    }

    /// It stays as it is: the operator has said how it is to be written.
    pub fn forget(&mut self) {
        self.through = false;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn between_a_debt_and_plenty_everything_stays_as_it_is() {
        let mut economy = Economy::default();
        let mut hear = |means| {
            economy.hear(Nanos::ZERO, means);
            (economy.is_slow(), economy.is_spent())
        };
        assert_eq!(hear(Means::Plenty), (false, false));
        assert_eq!(hear(Means::Enough), (false, false));
        assert_eq!(hear(Means::Short), (true, false));
        assert_eq!(hear(Means::Enough), (false, false));
        assert_eq!(hear(Means::Spent), (true, true));
        assert_eq!(hear(Means::Short), (true, true));
        assert_eq!(hear(Means::Enough), (true, true));
        assert_eq!(hear(Means::Plenty), (false, false));
    }

    #[test]
    fn a_volume_goes_through_once_and_comes_back_when_there_is_plenty() {
        let (mut economy, mut thrift) = (Economy::default(), Thrift::default());
        let at = Nanos::from_secs;
        assert_eq!(thrift.wants(at(0), true, &economy), None);
        economy.hear(at(1), Means::Spent);
        assert_eq!(thrift.wants(at(1), false, &economy), None, "it never wrote back");
        assert_eq!(thrift.wants(at(1), true, &economy), Some(Change::Through));
        assert_eq!(thrift.wants(at(1), true, &economy), None, "it is under way");
        // It could not: each time it waits longer.
        thrift.ended(at(2), Change::Through, false);
        assert_eq!(thrift.wants(at(11), true, &economy), None);
        assert_eq!(thrift.wants(at(12), true, &economy), Some(Change::Through));
        thrift.ended(at(12), Change::Through, false);
        assert_eq!(thrift.wants(at(31), true, &economy), None);
        assert_eq!(thrift.wants(at(32), true, &economy), Some(Change::Through));
        assert!(Thrift::goes_on(Change::Through, &economy));
        thrift.ended(at(33), Change::Through, true);
        assert!(thrift.is_through());
        economy.hear(at(40), Means::Enough);
        assert_eq!(thrift.wants(at(40), false, &economy), None);
        economy.hear(at(50), Means::Plenty);
        assert!(!Thrift::goes_on(Change::Through, &economy));
        assert_eq!(thrift.wants(at(50), false, &economy), Some(Change::Back));
        thrift.ended(at(51), Change::Back, true);
        assert_eq!((thrift.is_through(), thrift.wants(at(52), true, &economy)), (false, None));
        // The operator has it write through: it stays so.
        economy.hear(at(60), Means::Spent);
        assert_eq!(thrift.wants(at(60), true, &economy), Some(Change::Through));
        thrift.ended(at(61), Change::Through, true);
        thrift.forget();
        economy.hear(at(70), Means::Plenty);
        assert_eq!(thrift.wants(at(70), false, &economy), None);
    }
}
