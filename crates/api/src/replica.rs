//! Where a disk's replica is kept, and how fast it is copied, for inventory and agents. The filter's side is
//! [`crate::filter::ReplicateSpec`].

use serde::{Deserialize, Serialize};

use crate::datastore::{DatastoreSpec, LIMIT_MAX};
use crate::filter::REPLICATE_RATE_MIN;
use crate::size::Size;

/// The default rate of copying a replica, in bytes a second: a first copy of 1 TiB takes three hours and uses
/// a tenth of a network of 10 Gbit/s.
pub const REPLICA_RATE: u64 = 100 << 20;

/// Where a disk's replica is kept.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ReplicaPlace {
    /// A datastore of the same host, other than the disk's own.
    pub datastore: DatastoreSpec,
    /// The highest rate of copying, from [`REPLICATE_RATE_MIN`] to [`LIMIT_MAX`].
    pub bytes_per_second: u64,
}

impl ReplicaPlace {
    /// Checks it as the replica of a disk on `image`.
    ///
    /// # Errors
    /// The field that is wrong, and what is allowed.
    pub fn check(&self, image: &DatastoreSpec) -> Result<(), (&'static str, String)> {
        let same = self.datastore.datastore == image.datastore
            || self.datastore.location == image.location;
        if same {
            let what =
                "is the disk's own datastore: a replica protects against its loss, so name another";
            return Err(("replica.datastore", what.to_owned()));
        }
        check_replica_rate(self.bytes_per_second).map_err(|what| ("replica.bytes_per_second", what))
    }
}

/// Checks the rate of copying a replica, in bytes a second.
///
/// # Errors
/// What is allowed.
pub fn check_replica_rate(bytes_per_second: u64) -> Result<(), String> {
    if (REPLICATE_RATE_MIN..=LIMIT_MAX).contains(&bytes_per_second) {
        return Ok(());
    }
    Err(format!(
        "is {} a second: it must be {} to {}",
        Size(bytes_per_second),
        Size(REPLICATE_RATE_MIN),
        Size(LIMIT_MAX)
    ))
}

#[cfg(test)]
mod tests {
    use crate::datastore::DatastoreLocation;
    use crate::id::DatastoreId;

    use super::*;

    #[test]
    fn a_replica_is_elsewhere_and_has_a_rate() {
        let place = |path: &str| DatastoreSpec {
            datastore: DatastoreId::new(),
            location: DatastoreLocation::Dir { path: path.into() },
        };
        let image = place("/one");
        let check = |datastore, bytes_per_second| {
            ReplicaPlace { datastore, bytes_per_second }.check(&image).map_err(|(field, _)| field)
        };
        assert_eq!(check(place("/two"), REPLICA_RATE), Ok(()));
        assert_eq!(check(place("/one"), REPLICA_RATE), Err("replica.datastore"));
        let moved = DatastoreSpec { datastore: image.datastore, ..place("/two") };
        assert_eq!(check(moved, REPLICA_RATE), Err("replica.datastore"));
        for rate in [0, REPLICATE_RATE_MIN - 1, LIMIT_MAX + 1] {
            assert_eq!(check(place("/two"), rate), Err("replica.bytes_per_second"));
        }
        let said = check_replica_rate(4096).unwrap_err();
        assert_eq!(said, "is 4 KiB a second: it must be 1 MiB to 1 TiB");
    }
}
