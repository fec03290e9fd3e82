//! Numbers in messages.

use std::fmt;

/// A number for people, as short as it can be told: 1e300 where `Display` of `f64` has three hundred digits.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Short(pub f64);

impl fmt::Display for Short {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let size = self.0.abs();
        // NaN and infinities have short names.
        let plain = size == 0.0 || (1e-6..1e15).contains(&size) || !size.is_finite();
        if plain { write!(f, "{}", self.0) } else { write!(f, "{:e}", self.0) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_number_is_long() {
        for (number, text) in [
            (0.0, "0"),
            (0.07, "0.07"),
            (-1.0, "-1"),
            (7_952.5, "7952.5"),
            (1e300, "1e300"),
            (-1.5e21, "-1.5e21"),
            (5e-324, "5e-324"),
            (f64::NAN, "NaN"),
            (f64::NEG_INFINITY, "-inf"),
        ] {
            assert_eq!(Short(number).to_string(), text);
        }
        assert!(Short(1.0 / 3.0 * 1e-300).to_string().len() < 30);
    }
}
