//! Whether the user of a pool of Ceph may have the cluster take nothing more from another process: what keeps a host that does not answer from
//! the disks of a VM that is given to another one.

use serde::{Deserialize, Serialize};

use crate::osd_encryption::OSD_KEYS_CAPABILITY;
use crate::rbd_pool::RbdPool;

/// Whether the monitors let a pool's user put addresses on the cluster's blocklist.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Fencing {
    /// They do.
    Allowed,
    /// They do not.
    NotAllowed,
    /// They have not answered, or not as expected.
    Unknown,
}

impl Fencing {
    /// Why a host cannot keep others from disks in a pool, and what may be done; none where it can, or where that is not known. `asks_osds`:
    /// the user may ask whether OSDs are encrypted, and is to keep that right.
    #[must_use]
    pub fn lacking(
        self,
        datastore: &str,
        host: &str,
        pool: &RbdPool,
        asks_osds: bool,
    ) -> Option<String> {
        match self {
            Self::Allowed | Self::Unknown => None,
            Self::NotAllowed => Some(format!(
                "user '{}' of datastore '{datastore}' may not put other hosts on the cluster's blocklist (osd blocklist), so nothing would keep them from the VM's disks. Allow it, with what else the user may do ({}), and have that host mount the pool anew (vmseal datastore remount {datastore} --host {host})",
                pool.user,
                pool.caps_command(asks_osds.then_some(OSD_KEYS_CAPABILITY))
            )),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rbd_pool::tests::pool;

    #[test]
    fn only_a_right_that_is_missing_is_lacking_and_the_command_gives_it() {
        for may in [Fencing::Allowed, Fencing::Unknown] {
            assert_eq!(may.lacking("ceph", "h2", &pool(), false), None);
        }
        let told = Fencing::NotAllowed.lacking("ceph", "h2", &pool(), false).unwrap();
        let command = "(ceph auth caps client.vmseal mon 'profile rbd' osd 'profile rbd pool=vms')";
        assert!(told.contains(command), "{told}");
        assert!(told.contains("vmseal datastore remount ceph --host h2"), "{told}");
    }

    /// `ceph auth caps` replaces all that a user may do.
    #[test]
    fn who_may_ask_for_keys_of_osds_keeps_that_right() {
        let coded = RbdPool { data_pool: Some("ec".to_owned()), ..pool() };
        let told = Fencing::NotAllowed.lacking("ceph", "h2", &coded, true).unwrap();
        let command = "ceph auth caps client.vmseal mon 'profile rbd, allow command \"config-key exists\" with key prefix \"dm-crypt/osd/\"' osd 'profile rbd pool=vms, profile rbd pool=ec'";
        assert!(told.contains(command), "{told}");
    }

    #[test]
    fn it_is_written_and_read() {
        for (fencing, written) in [
            (Fencing::Allowed, "\"allowed\""),
            (Fencing::NotAllowed, "\"not_allowed\""),
            (Fencing::Unknown, "\"unknown\""),
        ] {
            assert_eq!(serde_json::to_string(&fencing).unwrap(), written);
            assert_eq!(serde_json::from_str::<Fencing>(written).unwrap(), fencing);
        }
    }
}
