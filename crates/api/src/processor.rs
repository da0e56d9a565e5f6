//! What guests get of a host's own processor.

use std::collections::BTreeSet;

use serde::{Deserialize, Serialize};

/// How many features are named in a message.
const NAMED: usize = 6;

/// The processor that guests of the model `host` get: it depends on the machine, its kernel and QEMU.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct Processor {
    /// Its vendor, as CPUID has it: `GenuineIntel`, `AuthenticAMD`.
    pub vendor: String,
    /// What it can, by QEMU's names.
    #[cfg_attr(feature = "openapi", schema(value_type = Vec<String>))]
    pub features: BTreeSet<String>,
}

impl Processor {
    /// Why a guest that has run on this processor cannot go on on another one; none where it can.
    #[must_use]
    pub fn missing_on(&self, other: &Self) -> Option<String> {
        if self.vendor != other.vendor {
            return Some(format!(
                "its processor is of another vendor ({}, and that of the VM's host {})",
                other.vendor, self.vendor
            ));
        }
        let missing: Vec<&str> =
            self.features.difference(&other.features).map(String::as_str).collect();
        let named = missing.iter().take(NAMED).copied().collect::<Vec<_>>().join(", ");
        match missing.len() {
            0 => None,
            count if count > NAMED => Some(format!(
                "its processor lacks what the guest may use: {named}, and {} more",
                count - NAMED
            )),
            _ => Some(format!("its processor lacks what the guest may use: {named}")),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn processor(vendor: &str, features: &[&str]) -> Processor {
        let features = features.iter().map(|&name| name.to_owned()).collect();
        Processor { vendor: vendor.to_owned(), features }
    }

    #[test]
    fn a_guest_goes_on_where_its_processor_can_all_that_it_could() {
        let small = processor("GenuineIntel", &["aes", "avx"]);
        let large = processor("GenuineIntel", &["aes", "avx", "avx512f"]);
        assert_eq!(small.missing_on(&large), None);
        assert_eq!(small.missing_on(&small), None);
        let why = large.missing_on(&small).unwrap();
        assert!(why.ends_with(": avx512f"), "{why}");
        let other = processor("AuthenticAMD", &["aes", "avx"]);
        assert!(small.missing_on(&other).unwrap().contains("another vendor (AuthenticAMD"));
        let many = processor("GenuineIntel", &["a", "b", "c", "d", "e", "f", "g", "h"]);
        let why = many.missing_on(&processor("GenuineIntel", &[])).unwrap();
        assert!(why.ends_with(": a, b, c, d, e, f, and 2 more"), "{why}");
    }
}
