//! That a pool of a Ceph cluster has little room left, or no room, as the monitors have marked it.

use serde::{Deserialize, Serialize};

/// The mark of a pool that lacks room.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(rename_all = "snake_case")]
pub enum PoolFullness {
    /// An OSD that has data of the pool has little room left (`nearfull`, `backfillfull`). The cluster takes writes.
    NearlyFull,
    /// An OSD that has data of the pool has no room left. Writes to the pool wait until there is room.
    Full,
    /// The quota of the pool is used up. Writes to the pool wait until it is raised, or data is gone.
    QuotaUsedUp,
}

impl PoolFullness {
    /// Whether writes to the pool wait.
    #[must_use]
    pub fn stops_writes(self) -> bool {
        self != Self::NearlyFull
    }

    /// What is the matter with a pool of this name that is marked so, and what may be done, for people.
    #[must_use]
    pub fn told(self, pool: &str) -> String {
        match self {
            Self::NearlyFull => format!(
                "pool '{pool}' is nearly full: an OSD that has data of it has little room left (ceph osd df). Add OSDs, or make room"
            ),
            Self::Full => format!(
                "pool '{pool}' is full: an OSD that has data of it has no room left (ceph osd df). Add OSDs, or raise the full ratio for a while (ceph osd set-full-ratio) and make room"
            ),
            Self::QuotaUsedUp => format!(
                "pool '{pool}' is full: its quota is used up (ceph osd pool get-quota {pool}). Raise it (ceph osd pool set-quota {pool} max_bytes BYTES, or max_objects NUMBER)"
            ),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_pool_that_is_full_stops_writes_and_each_says_what_to_do() {
        for (fullness, stops, advice, written) in [
            (PoolFullness::NearlyFull, false, "ceph osd df", r#""nearly_full""#),
            (PoolFullness::Full, true, "ceph osd set-full-ratio", r#""full""#),
            (PoolFullness::QuotaUsedUp, true, "set-quota vms max_bytes", r#""quota_used_up""#),
        ] {
            assert_eq!(fullness.stops_writes(), stops, "{fullness:?}");
            let told = fullness.told("vms");
            assert!(told.starts_with("pool 'vms' is ") && told.contains(advice), "{told}");
            assert_eq!(serde_json::to_string(&fullness).unwrap(), written);
        }
    }
}
