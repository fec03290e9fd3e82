//! How many connections each address has.

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::sync::Arc;

use parking_lot::Mutex;

/// Counts connections by address. Copies count together.
#[derive(Clone, Debug, Default)]
pub(super) struct Guests(Arc<Mutex<BTreeMap<IpAddr, u64>>>);

/// A connection of an address, as long as it lives.
#[derive(Debug)]
pub(super) struct Guest {
    guests: Guests,
    who: IpAddr,
}

/// Who counts as one. A host has 64 bits of IPv6 addresses to itself.
fn who(address: IpAddr) -> IpAddr {
    match address.to_canonical() {
        IpAddr::V6(v6) => IpAddr::V6((v6.to_bits() >> 64 << 64).into()),
        v4 => v4,
    }
}

impl Guests {
    /// One more, unless its address has `most` already.
    pub(super) fn admit(&self, address: IpAddr, most: u64) -> Option<Guest> {
        let who = who(address);
        let mut counts = self.0.lock();
        let count = counts.entry(who).or_default();
        if *count >= most {
            return None;
        }
        *count += 1;
        Some(Guest { guests: self.clone(), who })
    }
}

impl Drop for Guest {
    fn drop(&mut self) {
        let mut counts = self.guests.0.lock();
        if let Some(count) = counts.get_mut(&self.who) {
            *count -= 1;
            if *count == 0 {
                counts.remove(&self.who);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_address_has_so_many_and_no_more() {
        let guests = Guests::default();
        let come = |text: &str| guests.admit(text.parse().unwrap(), 2);
        let (a, b) = (come("192.0.2.1").unwrap(), come("::ffff:192.0.2.1").unwrap());
        assert!(come("192.0.2.1").is_none());
        let others = ["192.0.2.2", "2001:db8::1", "2001:db8::2", "2001:db8:0:1::1"].map(come);
        assert!(others.iter().all(Option::is_some));
        assert!(come("2001:db8::3").is_none(), "one host");
        drop(a);
        assert!(come("192.0.2.1").is_some());
        drop((b, others));
        assert!(guests.0.lock().is_empty());
    }
}
