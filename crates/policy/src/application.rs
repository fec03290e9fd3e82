//! Applications: name spaces of keys, told apart by prefix or by listener, and their shares of the cache.

use std::collections::BTreeMap;

use larder_base::AppId;
use serde::{Deserialize, Serialize};

/// The longest prefix that names an application, bytes.
pub const MAX_PREFIX: usize = 64;
/// Slots of the look-up table: a power of two, at most half of them taken.
const SLOTS: usize = 512;
const EMPTY: u16 = u16::MAX;

/// Applications as the configuration file states them.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct ApplicationsConfig {
    /// What ends the prefix of a key: one byte, or empty to take all keys as one application. Default ":".
    pub delimiter: String,
    /// Shares of the cache, by application ("default" is the one of keys without a prefix).
    pub shares: BTreeMap<String, Share>,
}

impl Default for ApplicationsConfig {
    fn default() -> ApplicationsConfig {
        ApplicationsConfig { delimiter: ":".to_owned(), shares: BTreeMap::new() }
    }
}

/// `[applications]`: what the operator says of the key prefixes that are applications, as a server's file and an experiment
/// state it. What ends a prefix is said elsewhere.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct ApplicationsTable {
    /// `[applications.shares.NAME]`: floor and ceiling as fractions of the cache.
    pub shares: BTreeMap<String, Share>,
}

impl ApplicationsTable {
    /// The whole, with what ends a prefix.
    ///
    /// # Errors
    /// A name that no prefix can have, or shares that cannot be kept.
    pub fn resolve(&self, delimiter: u8) -> Result<ApplicationsConfig, ApplicationError> {
        let config = ApplicationsConfig {
            delimiter: char::from(delimiter).to_string(),
            shares: self.shares.clone(),
        };
        Applications::new(&config)?.shares(&config)?;
        Ok(config)
    }
}

/// An application's part of the cache, as fractions of its capacity.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Share {
    /// What other applications cannot evict it below. Default 0.
    pub floor: f64,
    /// What it cannot grow above. Default 1.
    pub ceiling: f64,
}

impl Default for Share {
    fn default() -> Share {
        Share { floor: 0.0, ceiling: 1.0 }
    }
}

/// Why applications cannot be set up.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum ApplicationError {
    /// The delimiter is not one byte.
    #[error(
        "applications.delimiter is '{0}': give one character of ASCII, or nothing to take all keys as one application"
    )]
    Delimiter(String),
    /// A name that no prefix can have.
    #[error("application '{0}': a name has 1 to 64 bytes and does not contain the delimiter")]
    Name(String),
    /// Too many named.
    #[error("application '{0}' is one too many: at most 255 beside the default can be told apart")]
    TooMany(String),
    /// A fraction out of range.
    #[error("applications.shares.{app}.{bound} is {value}: it must be between 0 and 1")]
    Fraction {
        /// Whose share.
        app: String,
        /// Floor or ceiling.
        bound: &'static str,
        /// What was given.
        value: f64,
    },
    /// The floor is above the ceiling.
    #[error("applications.shares.{app}: the floor {floor} is above the ceiling {ceiling}")]
    Crossed {
        /// Whose share.
        app: String,
        /// Its floor.
        floor: f64,
        /// Its ceiling.
        ceiling: f64,
    },
    /// The floors do not fit together.
    #[error("the floors under applications.shares add up to {0}: they can be 1 at most")]
    Floors(f64),
}

/// Maps keys to applications. Ids are given in the order in which names first appear, those of the configuration first, and
/// are written with objects on flash: keep [`Applications::names`] over a restart.
///
/// Memory is bounded: 255 names of at most 64 bytes; keys of further or longer prefixes belong to [`AppId::OTHER`].
#[derive(Clone, Debug)]
pub struct Applications {
    delimiter: Option<u8>,
    /// By id; the first is the default, whose name is empty.
    names: Vec<Box<[u8]>>,
    /// Open addressing; ids.
    table: Box<[u16; SLOTS]>,
}

/// What [`Applications::lookup`] knows of a key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Lookup {
    /// It belongs to this application.
    Known(AppId),
    /// Its prefix is new: [`Applications::assign`] gives it an id.
    New,
}

impl Applications {
    /// Applications of a configuration: the names that have shares come first, in order.
    ///
    /// # Errors
    /// A delimiter of more than one byte, or a name that cannot be a prefix.
    pub fn new(config: &ApplicationsConfig) -> Result<Applications, ApplicationError> {
        let delimiter = match config.delimiter.as_bytes() {
            [] => None,
            &[byte] if byte.is_ascii() => Some(byte),
            _ => return Err(ApplicationError::Delimiter(config.delimiter.clone())),
        };
        let mut apps = Applications {
            delimiter,
            names: vec![Box::from(&b""[..])],
            table: Box::new([EMPTY; SLOTS]),
        };
        for name in config.shares.keys() {
            if name != "default" && name != "other" {
                apps.register(name)?;
            }
        }
        Ok(apps)
    }

    /// The application of this name, made known if it is new: for listeners, which serve one application each.
    ///
    /// # Errors
    /// The name cannot be a prefix, or there are too many.
    pub fn register(&mut self, name: &str) -> Result<AppId, ApplicationError> {
        if name == "default" {
            return Ok(AppId::DEFAULT);
        }
        let bytes = name.as_bytes();
        let bad = bytes.is_empty()
            || bytes.len() > MAX_PREFIX
            || self.delimiter.is_some_and(|d| bytes.contains(&d));
        if bad {
            return Err(ApplicationError::Name(name.to_owned()));
        }
        match self.insert(bytes) {
            AppId::OTHER => Err(ApplicationError::TooMany(name.to_owned())),
            app => Ok(app),
        }
    }

    /// Makes known the names that an earlier run knew, in their order (the default's left out), so that ids keep their
    /// meaning. Names known already keep the id they have. Returns the present id of each.
    pub fn restore<'a>(&mut self, names: impl IntoIterator<Item = &'a [u8]>) -> Vec<AppId> {
        names
            .into_iter()
            .map(|n| if n.len() <= MAX_PREFIX { self.insert(n) } else { AppId::OTHER })
            .collect()
    }

    /// The prefix of a key: what comes before the first delimiter.
    fn prefix<'k>(&self, key: &'k [u8]) -> Prefix<'k> {
        let Some(delimiter) = self.delimiter else { return Prefix::None };
        match key.iter().position(|&b| b == delimiter) {
            None | Some(0) => Prefix::None,
            Some(end) if end > MAX_PREFIX => Prefix::TooLong,
            Some(end) => Prefix::Some(&key[..end]),
        }
    }

    /// The application of a key, as far as it is known. Needs no exclusive access: this is the common path.
    pub fn lookup(&self, key: &[u8]) -> Lookup {
        match self.prefix(key) {
            Prefix::None => Lookup::Known(AppId::DEFAULT),
            Prefix::TooLong => Lookup::Known(AppId::OTHER),
            Prefix::Some(name) => match self.find(name) {
                Ok(app) => Lookup::Known(app),
                Err(_) if self.is_full() => Lookup::Known(AppId::OTHER),
                Err(_) => Lookup::New,
            },
        }
    }

    /// The application of a key; a new prefix gets the next id.
    pub fn assign(&mut self, key: &[u8]) -> AppId {
        match self.prefix(key) {
            Prefix::None => AppId::DEFAULT,
            Prefix::TooLong => AppId::OTHER,
            Prefix::Some(name) => self.insert(name),
        }
    }

    fn is_full(&self) -> bool {
        self.names.len() >= usize::from(AppId::OTHER.0)
    }

    /// The id of a name, or the free slot for it.
    fn find(&self, name: &[u8]) -> Result<AppId, usize> {
        // Collisions can be chosen by clients, but only 255 names are ever in the table.
        let mut slot = name_hash(name) as usize % SLOTS;
        loop {
            match self.table[slot] {
                EMPTY => return Err(slot),
                id if *self.names[usize::from(id)] == *name => return Ok(AppId(id)),
                _ => slot = (slot + 1) % SLOTS,
            }
        }
    }

    fn insert(&mut self, name: &[u8]) -> AppId {
        if name.is_empty() {
            return AppId::DEFAULT;
        }
        match self.find(name) {
            Ok(app) => app,
            Err(_) if self.is_full() => AppId::OTHER,
            Err(slot) => {
                let id = self.names.len() as u16;
                self.names.push(name.into());
                self.table[slot] = id;
                AppId(id)
            }
        }
    }

    /// Prefixes in the order of their ids, from id 1 on.
    pub fn names(&self) -> impl Iterator<Item = &[u8]> {
        self.names[1..].iter().map(|n| &**n)
    }

    /// Applications known, the default included.
    pub fn len(&self) -> usize {
        self.names.len()
    }

    /// Never: there is always the default.
    pub fn is_empty(&self) -> bool {
        false
    }

    /// The name of an application for people: bytes that are not printable ASCII are escaped.
    pub fn name(&self, app: AppId) -> String {
        match app {
            AppId::DEFAULT => "default".to_owned(),
            AppId::OTHER => "other".to_owned(),
            AppId(id) => match self.names.get(usize::from(id)) {
                Some(name) => name.escape_ascii().to_string(),
                None => format!("application {id}"),
            },
        }
    }

    /// The shares of a configuration by id.
    ///
    /// # Errors
    /// A fraction out of range, a floor above its ceiling, floors that add up to more than 1, or an unknown name.
    pub fn shares(&self, config: &ApplicationsConfig) -> Result<Shares, ApplicationError> {
        let mut table = vec![Share::default(); AppId::COUNT].into_boxed_slice();
        let mut floors = 0.0;
        for (name, &share) in &config.shares {
            for (bound, value) in [("floor", share.floor), ("ceiling", share.ceiling)] {
                if !(0.0..=1.0).contains(&value) {
                    return Err(ApplicationError::Fraction { app: name.clone(), bound, value });
                }
            }
            if share.floor > share.ceiling {
                let Share { floor, ceiling } = share;
                return Err(ApplicationError::Crossed { app: name.clone(), floor, ceiling });
            }
            floors += share.floor;
            let app = match name.as_str() {
                "default" => AppId::DEFAULT,
                "other" => AppId::OTHER,
                name => self
                    .find(name.as_bytes())
                    .map_err(|_| ApplicationError::Name(name.to_owned()))?,
            };
            table[app.index()] = share;
        }
        // Ten floors of 0.1 add up to a little more than 1 in binary.
        if floors > 1.0 + 1e-9 {
            Err(ApplicationError::Floors(floors))
        } else {
            Ok(Shares { table })
        }
    }
}

enum Prefix<'k> {
    None,
    TooLong,
    Some(&'k [u8]),
}

/// FNV-1a, finished by a multiplication so that the low bits depend on all.
fn name_hash(name: &[u8]) -> u64 {
    let h = name
        .iter()
        .fold(0xcbf2_9ce4_8422_2325u64, |h, &b| (h ^ u64::from(b)).wrapping_mul(0x0100_0000_01b3));
    h.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 32
}

/// Floors and ceilings by application.
#[derive(Clone, Debug, PartialEq)]
pub struct Shares {
    table: Box<[Share]>,
}

impl Default for Shares {
    /// No floors, no ceilings.
    fn default() -> Shares {
        Shares { table: vec![Share::default(); AppId::COUNT].into_boxed_slice() }
    }
}

impl Shares {
    /// An application's share.
    pub fn of(&self, app: AppId) -> Share {
        self.table[app.index()]
    }

    /// Whether another application's write may evict objects of `app`, which holds `bytes` of a cache of `capacity`: it is
    /// above its floor. An application's own write may always evict its own objects, so a write always finds room: if
    /// everyone is at the floor, that is at most the capacity together.
    pub fn may_evict(&self, app: AppId, bytes: u64, capacity: u64) -> bool {
        let floor = self.of(app).floor;
        floor == 0.0 || bytes as f64 > floor * capacity as f64
    }

    /// Whether `extra` bytes more would take `app`, which holds `bytes`, above its ceiling.
    pub fn over_ceiling(&self, app: AppId, bytes: u64, extra: u64, capacity: u64) -> bool {
        let ceiling = self.of(app).ceiling;
        ceiling < 1.0 && bytes.saturating_add(extra) as f64 > ceiling * capacity as f64
    }

    /// Whether any application has a floor or a ceiling: without one nobody need look.
    pub fn any(&self) -> bool {
        self.table.iter().any(|s| *s != Share::default())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn config(delimiter: &str, shares: &[(&str, f64, f64)]) -> ApplicationsConfig {
        let shares = shares
            .iter()
            .map(|&(n, floor, ceiling)| (n.to_owned(), Share { floor, ceiling }))
            .collect();
        ApplicationsConfig { delimiter: delimiter.to_owned(), shares }
    }

    #[test]
    fn prefixes_become_applications_in_order() {
        let mut a = Applications::new(&ApplicationsConfig::default()).unwrap();
        assert_eq!(a.lookup(b"users:1"), Lookup::New);
        assert_eq!(a.assign(b"users:1"), AppId(1));
        assert_eq!(a.assign(b"pages:1:x"), AppId(2));
        assert_eq!(a.lookup(b"users:2"), Lookup::Known(AppId(1)));
        assert_eq!(a.assign(b"plain"), AppId::DEFAULT);
        assert_eq!(a.assign(b":x"), AppId::DEFAULT);
        assert_eq!(a.assign(b""), AppId::DEFAULT);
        assert_eq!(
            (a.name(AppId(2)), a.name(AppId(0)), a.name(AppId::OTHER)),
            ("pages".into(), "default".into(), "other".into())
        );
        let binary = a.assign(b"\xff\x00:x");
        assert_eq!(a.name(binary), "\\xff\\x00");
    }

    #[test]
    fn without_a_delimiter_all_are_one() {
        let mut a = Applications::new(&config("", &[])).unwrap();
        assert_eq!(a.assign(b"users:1"), AppId::DEFAULT);
        assert_eq!(a.register("sessions"), Ok(AppId(1)), "listeners still name applications");
    }

    #[test]
    fn bounded_under_any_keys() {
        let mut a = Applications::new(&ApplicationsConfig::default()).unwrap();
        for i in 0..10_000u32 {
            let app = a.assign(format!("app{i}:key").as_bytes());
            assert_eq!(app, if i < 255 { AppId(i as u16 + 1) } else { AppId::OTHER });
        }
        assert_eq!(a.len(), 256);
        assert_eq!(a.lookup(b"app99999:k"), Lookup::Known(AppId::OTHER));
        assert_eq!(a.assign(b"app7:k"), AppId(8));
        let long = [b"p".repeat(MAX_PREFIX + 1), b":k".to_vec()].concat();
        assert_eq!(a.lookup(&long), Lookup::Known(AppId::OTHER));
        assert!(matches!(a.register("one-more"), Err(ApplicationError::TooMany(_))));
    }

    #[test]
    fn ids_survive_a_restart() {
        let mut a = Applications::new(&ApplicationsConfig::default()).unwrap();
        for key in [&b"x:1"[..], b"y:1", b"z:1"] {
            a.assign(key);
        }
        let names: Vec<Vec<u8>> = a.names().map(<[u8]>::to_vec).collect();
        let mut b = Applications::new(&ApplicationsConfig::default()).unwrap();
        assert_eq!(b.restore(names.iter().map(|n| &n[..])), [AppId(1), AppId(2), AppId(3)]);
        assert_eq!(b.assign(b"z:2"), AppId(3));
        // A name that the configuration took first moves the others: the caller is told where they are.
        let mut c = Applications::new(&config(":", &[("z", 0.1, 1.0)])).unwrap();
        assert_eq!(c.restore(names.iter().map(|n| &n[..])), [AppId(2), AppId(3), AppId(1)]);
        let oversized = vec![b'q'; 1000];
        assert_eq!(c.restore([&oversized[..]]), [AppId::OTHER]);
    }

    #[test]
    fn shares_are_checked_and_applied() {
        let refused = |shares: &[(&str, f64, f64)]| {
            let c = config(":", shares);
            Applications::new(&c).and_then(|a| a.shares(&c)).unwrap_err().to_string()
        };
        assert!(refused(&[("a", 0.5, 0.4)]).contains("floor 0.5 is above the ceiling 0.4"));
        assert!(refused(&[("a", 0.6, 1.0), ("b", 0.6, 1.0)]).contains("1.2"));
        assert!(refused(&[("a", -0.1, 1.0)]).contains("a.floor is -0.1"));
        assert!(refused(&[("a", 0.0, f64::NAN)]).contains("a.ceiling"));
        assert!(refused(&[("a:b", 0.0, 1.0)]).contains("'a:b'"));
        let tenths: Vec<String> = (0..10).map(|i| format!("a{i}")).collect();
        let tenths: Vec<_> = tenths.iter().map(|n| (n.as_str(), 0.1, 1.0)).collect();
        let c = config(":", &tenths);
        Applications::new(&c).unwrap().shares(&c).unwrap();

        let c = config(":", &[("default", 0.0, 0.5), ("a", 0.25, 0.75)]);
        let apps = Applications::new(&c).unwrap();
        let s = apps.shares(&c).unwrap();
        let Lookup::Known(a) = apps.lookup(b"a:1") else {
            panic!("a is known from the configuration")
        };
        assert!(s.any() && !Shares::default().any());
        assert!(!s.may_evict(a, 25, 100) && s.may_evict(a, 26, 100));
        assert!(s.may_evict(AppId(9), 0, 100));
        assert!(!s.over_ceiling(a, 70, 5, 100) && s.over_ceiling(a, 70, 6, 100));
        assert!(
            s.over_ceiling(AppId::DEFAULT, 50, 1, 100) && !s.over_ceiling(AppId(9), 100, 100, 100)
        );
        assert!(s.over_ceiling(a, u64::MAX, 1, 100));
    }

    #[test]
    fn delimiters_are_one_byte() {
        for bad in ["::", "é"] {
            assert!(matches!(
                Applications::new(&config(bad, &[])),
                Err(ApplicationError::Delimiter(_))
            ));
        }
    }
}
