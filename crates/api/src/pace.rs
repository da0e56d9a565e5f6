//! How fast the copy of a disk goes, and whether it goes at all.

use serde::{Deserialize, Serialize};

use crate::size::Size;

/// The lowest rate of a copy, in bytes a second: less than one chunk of its map a second would only fall further behind.
pub const RATE_MIN: u64 = 1 << 20;

/// The highest rate that can be asked for, in bytes a second: no storage is as fast, and the inventory's numbers are signed.
pub const RATE_MAX: u64 = 1 << 40;

/// What a copy may do beside its guest. It holds until the guest waits for the last of the copy, which is copied as fast as
/// storage allows.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct CopyPace {
    /// The highest rate, from [`RATE_MIN`] to [`RATE_MAX`]. None: as fast as storage allows.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub bytes_per_second: Option<u64>,
    /// Whether nothing is copied. What the guest changes meanwhile is noted, and copied later.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub paused: bool,
}

impl CopyPace {
    /// Whether nothing holds the copy back.
    #[must_use]
    pub fn is_free(&self) -> bool {
        *self == Self::default()
    }

    /// Checks the rate.
    ///
    /// # Errors
    /// What is wrong with it.
    pub fn check(&self) -> Result<(), String> {
        match self.bytes_per_second {
            Some(rate) if rate < RATE_MIN => {
                let least = Size(RATE_MIN);
                Err(format!("{} a second: give at least {least}, or none for no limit", Size(rate)))
            }
            Some(rate) if rate > RATE_MAX => {
                let most = Size(RATE_MAX);
                Err(format!("{} a second: give at most {most}, or none for no limit", Size(rate)))
            }
            _ => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_rate_below_the_least_or_above_the_most_is_refused_and_none_is_no_limit() {
        let pace = |bytes_per_second| CopyPace { bytes_per_second, paused: true };
        assert_eq!(pace(None).check(), Ok(()));
        assert_eq!(pace(Some(RATE_MIN)).check(), Ok(()));
        let refused = pace(Some(RATE_MIN - 1)).check().unwrap_err();
        assert!(refused.contains("give at least 1 MiB"), "{refused}");
        assert_eq!(pace(Some(RATE_MAX)).check(), Ok(()));
        for rate in [RATE_MAX + 1, u64::MAX] {
            let refused = pace(Some(rate)).check().unwrap_err();
            assert!(refused.contains("give at most 1 TiB"), "{refused}");
        }
        assert!(CopyPace::default().is_free() && !pace(None).is_free());
        assert_eq!(serde_json::to_string(&CopyPace::default()).unwrap(), "{}");
    }
}
