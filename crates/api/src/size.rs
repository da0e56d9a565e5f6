//! Sizes for people.

use std::fmt;

/// A size in bytes, shown in the largest binary unit that says it in two decimals: `10 GiB`, `1.5 GiB`. One that none
/// does is shown in bytes, and about.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Size(pub u64);

/// The units, largest first, as powers of two.
const UNITS: [(u32, &str); 5] = [(50, "PiB"), (40, "TiB"), (30, "GiB"), (20, "MiB"), (10, "KiB")];

impl fmt::Display for Size {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self(bytes) = *self;
        let fits = UNITS.iter().find(|(power, _)| bytes >= 1 << power);
        let Some((power, name)) = fits else { return write!(f, "{bytes} bytes") };
        let unit = 1u128 << power;
        let hundredths = u128::from(bytes) * 100;
        let (whole, part) = (hundredths / unit / 100, hundredths / unit % 100);
        let decimals = match part {
            0 => String::new(),
            part if part % 10 == 0 => format!(".{}", part / 10),
            part => format!(".{part:02}"),
        };
        if hundredths.is_multiple_of(unit) {
            return write!(f, "{whole}{decimals} {name}");
        }
        write!(f, "{bytes} bytes (about {whole}{decimals} {name})")
    }
}

/// A size in bytes as people measure, to one decimal: `1.2 GiB`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Measured(pub u64);

impl fmt::Display for Measured {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self(bytes) = *self;
        match UNITS.iter().find(|(power, _)| bytes >= 1 << power) {
            None => write!(f, "{bytes} bytes"),
            Some((power, name)) => {
                let tenths = (u128::from(bytes) * 10) >> power;
                write!(f, "{}.{} {name}", tenths / 10, tenths % 10)
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_measured_is_said_to_one_decimal() {
        for (bytes, said) in [
            (0, "0 bytes"),
            (1023, "1023 bytes"),
            (1024, "1.0 KiB"),
            ((5 << 28) + 1, "1.2 GiB"),
            (u64::MAX, "16383.9 PiB"),
        ] {
            assert_eq!(Measured(bytes).to_string(), said, "{bytes}");
        }
    }

    #[test]
    fn sizes_are_said_exactly_in_units_that_people_use() {
        for (bytes, said) in [
            (0, "0 bytes"),
            (512, "512 bytes"),
            (4096, "4 KiB"),
            (10 << 30, "10 GiB"),
            (3 << 29, "1.5 GiB"),
            (5 << 28, "1.25 GiB"),
            (1 << 40, "1 TiB"),
            ((1 << 30) + 1, "1073741825 bytes (about 1 GiB)"),
            (1_044_480, "1020 KiB"),
            (u64::MAX, "18446744073709551615 bytes (about 16383.99 PiB)"),
        ] {
            assert_eq!(Size(bytes).to_string(), said);
        }
    }
}
