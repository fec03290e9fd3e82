//! Which state of a place may be overwritten by which marker, whatever it lies on.

use larder_format::block::marker::{self, COPY_BYTES, MAX_HOST, Marker, MarkerError};
use larder_format::block::write_log::record::MAX_MARK;

use super::{Found, MarkerIoError, MarkerPlace, NamedPlace};

/// Both copies, bytes.
pub(super) const PLACE_BYTES: usize = 2 * COPY_BYTES;
/// Copies that are both damaged are looked at so often: whoever looks while another writes may see a half of each.
const LOOKS: u32 = 3;
/// Between two looks.
const BETWEEN: std::time::Duration = std::time::Duration::from_millis(10);

/// What a marker lies on.
pub(super) trait Medium: Send {
    /// What is there, once what was written before is durable (or else a power cut could take what was believed): both copies, or
    /// what there is of them. `None`: nothing.
    fn load(&mut self) -> Result<Option<[Vec<u8>; 2]>, MarkerIoError>;

    /// The same of what is there now, durable or not.
    fn glance(&mut self) -> Result<Option<[Vec<u8>; 2]>, MarkerIoError> {
        self.load()
    }

    /// Where nothing was found: both copies, the one of that number first. Durable when it returns.
    fn create(&mut self, first: usize, bytes: &[u8]) -> Result<(), MarkerIoError>;

    /// Over what [`Medium::load`] has found: both copies, the one of that number first. Durable when it returns.
    fn replace(&mut self, first: usize, bytes: &[u8]) -> Result<(), MarkerIoError>;

    /// It is gone, and nothing says that it was there.
    fn clear(&mut self) -> Result<(), MarkerIoError>;

    /// Something says that there was one.
    fn was(&mut self) -> Result<bool, MarkerIoError>;

    /// One is there: something is to say so, as well as it can.
    fn keep(&mut self);

    /// What was found is no marker: it is not kept from anybody.
    fn let_go(&mut self) {}

    /// It is to be read only.
    fn is_looked_at(&self) -> bool;

    /// See [`MarkerPlace::is_fenced`].
    fn is_fenced(&self) -> bool;

    /// The place's name in messages.
    fn name(&self) -> String;

    /// See [`MarkerPlace::named_by_store`].
    fn named_by_store(&self) -> Option<NamedPlace> {
        None
    }
}

#[derive(Clone, Debug, PartialEq, Eq)]
enum State {
    Absent,
    Damaged,
    There(Box<Marker>),
}

impl State {
    fn in_words(&self) -> String {
        match self {
            State::Absent => "it is gone".into(),
            State::Damaged => "both copies are damaged".into(),
            State::There(marker) => format!(
                "it has number {} now, of cache {} on host '{}'",
                marker.number, marker.cache, marker.host
            ),
        }
    }
}

struct Looked {
    state: State,
    /// The copy that the next write begins with; `None`: it is by the marker's number.
    first: Option<usize>,
    /// There is something to be overwritten.
    is_there: bool,
}

/// A place on one medium.
pub(super) struct Place<M> {
    medium: M,
    /// What was last read or written.
    seen: Option<State>,
    /// A marker whose write failed: it may be there.
    tried: Option<Box<Marker>>,
}

impl<M: Medium> Place<M> {
    pub(super) fn new(medium: M) -> Place<M> {
        Place { medium, seen: None, tried: None }
    }

    #[cfg(test)]
    pub(super) fn medium(&mut self) -> &mut M {
        &mut self.medium
    }

    fn look_by(
        &mut self,
        load: impl Fn(&mut M) -> Result<Option<[Vec<u8>; 2]>, MarkerIoError>,
    ) -> Result<Looked, MarkerIoError> {
        let mut looks = 0;
        loop {
            let Some([a, b]) = load(&mut self.medium)? else {
                return Ok(Looked { state: State::Absent, first: None, is_there: false });
            };
            let (state, first) = match marker::choose(&a, &b) {
                Ok(chosen) => {
                    // The ruling one is overwritten last, unless the other says the same.
                    let first = (a != b).then_some(1 - chosen.copy);
                    (State::There(Box::new(chosen.marker)), first)
                }
                Err(MarkerError::Damaged) => (State::Damaged, None),
                Err(MarkerError::None) => {
                    self.medium.let_go();
                    let place = self.medium.name();
                    let reason = match a.is_empty() && b.is_empty() {
                        true => "is empty".to_owned(),
                        false => "is there, and is no marker".to_owned(),
                    };
                    return Err(MarkerIoError::NotAMarker { place, reason });
                }
                Err(why) => {
                    return Err(MarkerIoError::Unusable { place: self.medium.name(), why });
                }
            };
            looks += 1;
            if state == State::Damaged && looks < LOOKS {
                std::thread::sleep(BETWEEN);
                continue;
            }
            return Ok(Looked { state, first, is_there: true });
        }
    }

    fn found(&mut self, state: &State) -> Result<Found, MarkerIoError> {
        Ok(match state {
            State::Absent => Found::Absent { was: self.medium.was()? },
            State::Damaged => Found::Damaged,
            State::There(marker) => Found::There(marker.clone()),
        })
    }

    /// Looks again, and whether that is what a write may follow.
    fn look_again(&mut self) -> Result<Looked, MarkerIoError> {
        let place = || self.medium.name();
        if self.medium.is_looked_at() {
            return Err(MarkerIoError::LookOnly { place: place() });
        }
        let Some(seen) = self.seen.clone() else {
            return Err(MarkerIoError::Unread { place: place() });
        };
        let looked = self.look_by(M::load)?;
        let is_tried =
            matches!(&looked.state, State::There(there) if self.tried.as_ref() == Some(there));
        if looked.state != seen && !is_tried {
            let now = looked.state.in_words();
            return Err(MarkerIoError::Changed { place: self.medium.name(), now });
        }
        self.seen = Some(looked.state.clone());
        Ok(looked)
    }
}

impl<M: Medium> MarkerPlace for Place<M> {
    fn read(&mut self) -> Result<Found, MarkerIoError> {
        self.seen = None;
        let looked = self.look_by(M::load)?;
        self.tried = None;
        let found = self.found(&looked.state)?;
        self.seen = Some(looked.state);
        Ok(found)
    }

    fn look(&mut self) -> Result<Found, MarkerIoError> {
        let looked = self.look_by(M::glance)?;
        self.found(&looked.state)
    }

    fn write(&mut self, marker: &Marker) -> Result<(), MarkerIoError> {
        let mark = marker.mark.as_ref().map(String::len);
        if marker.host.len() > MAX_HOST || mark.is_some_and(|len| len == 0 || len > MAX_MARK) {
            let reason = "a name in the marker is empty or too long".to_owned();
            return Err(MarkerIoError::Failed { place: self.medium.name(), reason });
        }
        let looked = self.look_again()?;
        if let State::There(there) = &looked.state
            && **there != *marker
            && marker.number <= there.number
        {
            return Err(MarkerIoError::Number {
                place: self.medium.name(),
                there: there.number,
                wanted: marker.number,
            });
        }
        self.tried = Some(Box::new(marker.clone()));
        let first = looked.first.unwrap_or(marker.copy());
        let bytes = marker.encode();
        match looked.is_there {
            true => self.medium.replace(first, &bytes)?,
            false => self.medium.create(first, &bytes)?,
        }
        self.medium.keep();
        self.seen = self.tried.take().map(State::There);
        Ok(())
    }

    fn remove(&mut self) -> Result<(), MarkerIoError> {
        self.look_again()?;
        self.medium.clear()?;
        (self.seen, self.tried) = (Some(State::Absent), None);
        Ok(())
    }

    fn is_fenced(&self) -> bool {
        self.medium.is_fenced()
    }

    fn describe(&self) -> String {
        self.medium.name()
    }

    fn named_by_store(&self) -> Option<NamedPlace> {
        self.medium.named_by_store()
    }
}

/// Where copy 0 or 1 lies.
pub(super) fn copy_at(copy: usize) -> u64 {
    (copy % 2 * COPY_BYTES) as u64
}

/// The copies of what was read from the start.
pub(super) fn split(bytes: &[u8]) -> [Vec<u8>; 2] {
    let (a, b) = bytes.split_at(bytes.len().min(COPY_BYTES));
    [a.to_vec(), b.to_vec()]
}
