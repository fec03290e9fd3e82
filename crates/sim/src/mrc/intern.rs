//! Ids of objects as dense 32-bit tags.

use larder_base::prefetch;

const EMPTY: u32 = u32::MAX;

#[derive(Clone, Copy)]
#[repr(C, packed(4))]
struct Place {
    id: u64,
    tag: u32,
}

/// Gives each new 64-bit id the next tag, from 0. Open addressing with linear probing; 12 bytes a place, filled to at
/// most 85 %, growing by half.
pub struct Interner {
    places: Vec<Place>,
    len: u32,
    /// Number of ids at which the table grows.
    limit: usize,
}

const START: usize = 1 << 10;

fn spread(id: u64) -> u64 {
    // Two multiply-xorshift rounds: ids are often consecutive, or multiples of a page size.
    let x = (id ^ (id >> 32)).wrapping_mul(0x9fb2_1c65_1e98_df25);
    (x ^ (x >> 29)).wrapping_mul(0x9e37_79b9_7f4a_7c15)
}

fn home(id: u64, len: usize) -> usize {
    ((u128::from(spread(id)) * len as u128) >> 64) as usize
}

impl Default for Interner {
    fn default() -> Interner {
        Interner::new()
    }
}

impl Interner {
    /// No ids yet.
    pub fn new() -> Interner {
        Interner { places: Self::table(START), len: 0, limit: START * 85 / 100 }
    }

    fn table(len: usize) -> Vec<Place> {
        vec![Place { id: 0, tag: EMPTY }; len]
    }

    /// Ids seen.
    pub fn len(&self) -> usize {
        self.len as usize
    }

    /// Whether no id was seen.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// A hint that `id` comes soon.
    pub fn prefetch(&self, id: u64) {
        prefetch(&self.places, home(id, self.places.len()));
    }

    /// The tag of `id`; `None` once 2^32 − 1 ids are known.
    pub fn intern(&mut self, id: u64) -> Option<u32> {
        let len = self.places.len();
        let mut at = home(id, len);
        loop {
            let place = self.places[at];
            if place.tag == EMPTY {
                break;
            }
            if place.id == id {
                return Some(place.tag);
            }
            at += 1;
            if at == len {
                at = 0;
            }
        }
        if self.len == EMPTY {
            return None;
        }
        let tag = self.len;
        self.places[at] = Place { id, tag };
        self.len += 1;
        if self.len as usize > self.limit {
            self.grow();
        }
        Some(tag)
    }

    fn grow(&mut self) {
        let len = self.places.len() + self.places.len() / 2;
        let mut table = Self::table(len);
        for place in &self.places {
            if place.tag != EMPTY {
                let mut at = home(place.id, len);
                while table[at].tag != EMPTY {
                    at += 1;
                    if at == len {
                        at = 0;
                    }
                }
                table[at] = *place;
            }
        }
        self.places = table;
        self.limit = len * 85 / 100;
    }

    /// Bytes of memory held.
    pub fn memory_bytes(&self) -> usize {
        self.places.capacity() * size_of::<Place>()
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use larder_base::Rng;

    use super::*;

    #[test]
    fn agrees_with_a_map() {
        let mut rng = Rng::new(11);
        let mut interner = Interner::new();
        let mut model = BTreeMap::new();
        for _ in 0..200_000 {
            let id = match rng.below(3) {
                0 => rng.below(50_000),
                1 => rng.below(30_000) << 20,
                _ => rng.next_u64(),
            };
            let next = model.len() as u32;
            assert_eq!(interner.intern(id), Some(*model.entry(id).or_insert(next)));
        }
        assert_eq!(interner.len(), model.len());
        assert!(interner.memory_bytes() < 27 * model.len());
    }
}
