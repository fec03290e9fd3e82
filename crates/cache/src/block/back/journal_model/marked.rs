//! A marker's place whose power goes with that of the rest.

use larder_base::Rng;
use larder_format::block::marker::Marker;
use larder_volume::marker::memory::{MemoryMarker, Unflushed};
use larder_volume::marker::{Found, MarkerIoError, MarkerPlace};

use super::disk::{Current, Power};

pub(super) struct Marked {
    pub(super) inner: Box<dyn MarkerPlace>,
    pub(super) memory: MemoryMarker,
    pub(super) power: Power,
    pub(super) rng: Rng,
    /// The share of writes that fails.
    pub(super) fails: f64,
}

impl Marked {
    fn off(&self) -> MarkerIoError {
        MarkerIoError::Unreachable { place: self.inner.describe(), reason: "no power".into() }
    }
}

impl MarkerPlace for Marked {
    fn read(&mut self) -> Result<Found, MarkerIoError> {
        match self.power.io() {
            Current::On => self.inner.read(),
            _ => Err(self.off()),
        }
    }
    fn look(&mut self) -> Result<Found, MarkerIoError> {
        match self.power.io() {
            Current::On => self.inner.look(),
            _ => Err(self.off()),
        }
    }
    fn write(&mut self, marker: &Marker) -> Result<(), MarkerIoError> {
        match self.power.io() {
            Current::On if self.rng.chance(self.fails) => {
                self.memory.fail_after(self.rng.below(4));
                self.inner.write(marker)
            }
            Current::On => self.inner.write(marker),
            Current::Goes => {
                let unflushed = match self.rng.below(3) {
                    0 => Unflushed::Lost,
                    1 => Unflushed::Kept,
                    _ => Unflushed::Torn(self.rng.below(8) as usize),
                };
                self.memory.cut_after(self.rng.below(6), unflushed);
                let done = self.inner.write(marker);
                self.memory.set_power(false);
                done.and_then(|()| Err(self.off()))
            }
            Current::Off => Err(self.off()),
        }
    }
    fn remove(&mut self) -> Result<(), MarkerIoError> {
        self.inner.remove()
    }
    fn is_fenced(&self) -> bool {
        self.inner.is_fenced()
    }
    fn describe(&self) -> String {
        self.inner.describe()
    }
}
