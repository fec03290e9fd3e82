//! Volumes that come, go and grow: of each name, and of each store, one thing at a time. What is done with one volume waits for no other's store.

use std::collections::BTreeSet;

use parking_lot::{Condvar, Mutex, MutexGuard};

use super::operators::LOOK;

/// Who does something with volumes that come, go or grow: of each name, and of each store, one at a time.
#[derive(Debug, Default)]
pub struct Changing {
    taken: Mutex<Taken>,
    over: Condvar,
}

/// What somebody has: either some of them, or all.
#[derive(Debug, Default)]
struct Taken {
    some: BTreeSet<Key>,
    all: bool,
}

#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Key {
    Volume(String),
    Store(String),
}

/// Something is done with a volume or a store, as long as this lives.
#[derive(Debug)]
pub struct One<'a> {
    changing: &'a Changing,
    key: Key,
}

impl Drop for One<'_> {
    fn drop(&mut self) {
        self.changing.taken.lock().some.remove(&self.key);
        self.changing.over.notify_all();
    }
}

/// Nothing is done with any volume, as long as this lives.
#[derive(Debug)]
pub struct All<'a>(&'a Changing);

impl Drop for All<'_> {
    fn drop(&mut self) {
        self.0.taken.lock().all = false;
        self.0.over.notify_all();
    }
}

impl Changing {
    fn take(&self, key: Key) -> One<'_> {
        let mut taken = self.taken.lock();
        while taken.all || taken.some.contains(&key) {
            self.over.wait(&mut taken);
        }
        taken.some.insert(key.clone());
        One { changing: self, key }
    }

    fn try_take(&self, key: Key) -> Option<One<'_>> {
        let mut taken = self.taken.lock();
        if taken.all || !taken.some.insert(key.clone()) {
            return None;
        }
        Some(One { changing: self, key })
    }

    /// Takes a volume, by its name, unless somebody has it.
    pub fn try_volume(&self, name: &str) -> Option<One<'_>> {
        self.try_take(Key::Volume(name.to_owned()))
    }

    /// Takes a store, whatever volume it is, unless somebody has it; behind its volume.
    pub fn try_store(&self, which: String) -> Option<One<'_>> {
        self.try_take(Key::Store(which))
    }

    /// Takes a volume, by its name, when nobody has it.
    pub fn volume(&self, name: &str) -> One<'_> {
        self.take(Key::Volume(name.to_owned()))
    }

    /// Takes a store, whatever volume it is; behind its volume.
    pub fn store(&self, which: String) -> One<'_> {
        self.take(Key::Store(which))
    }

    /// Takes all, when nobody has all. `None` if `go_on`, which is asked while somebody has, has said no.
    ///
    /// # Errors
    /// The volume or store that somebody has.
    pub fn all(&self, go_on: &mut dyn FnMut() -> bool) -> Result<Option<All<'_>>, String> {
        let mut taken = self.taken.lock();
        loop {
            if let Some(Key::Volume(which) | Key::Store(which)) = taken.some.first() {
                return Err(which.clone());
            }
            if !taken.all {
                break;
            }
            if self.over.wait_for(&mut taken, LOOK).timed_out() {
                let goes_on = MutexGuard::unlocked(&mut taken, &mut *go_on);
                if !goes_on {
                    return Ok(None);
                }
            }
        }
        taken.all = true;
        Ok(Some(All(self)))
    }

    /// Waits until nobody has any.
    pub fn settle(&self) {
        let mut taken = self.taken.lock();
        while taken.all || !taken.some.is_empty() {
            self.over.wait(&mut taken);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;

    use super::*;

    #[test]
    fn one_volume_waits_for_itself_alone() {
        let changing = Changing::default();
        let hangs = changing.volume("a");
        let _its_store = changing.store("nbd://a".to_owned());
        drop(changing.volume("b"));
        assert_eq!(changing.all(&mut || true).err(), Some("a".to_owned()));
        assert!(changing.try_volume("a").is_none());
        assert!(changing.try_store("nbd://a".to_owned()).is_none());
        assert!(changing.try_volume("b").is_some() && changing.try_store("b".to_owned()).is_some());
        let (tell, told) = mpsc::channel();
        std::thread::scope(|scope| {
            scope.spawn(|| {
                let _again = changing.volume("a");
                tell.send(()).unwrap();
            });
            assert!(told.try_recv().is_err(), "it is taken");
            drop(hangs);
            told.recv().unwrap();
        });
    }

    #[test]
    fn all_are_taken_when_none_is() {
        let changing = Changing::default();
        drop(changing.volume("a"));
        let all = changing.all(&mut || true).unwrap().unwrap();
        assert!(changing.try_volume("a").is_none());
        std::thread::scope(|scope| {
            scope.spawn(|| drop(changing.volume("a")));
            drop(all);
        });
        changing.settle();
    }
}
