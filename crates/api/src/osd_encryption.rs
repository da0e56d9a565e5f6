//! Where a disk in a pool of Ceph is encrypted: by vmseal before it gets to the pool, by dm-crypt below the cluster's OSDs, or by both.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

use crate::rbd_pool::RbdPool;

/// What the monitors' keys are called that ceph-volume makes for an OSD with dm-crypt: `dm-crypt/osd/UUID/luks`.
pub const OSD_KEYS: &str = "dm-crypt/osd/";

/// What a user's capabilities at the monitors must have, so that it is known whether OSDs are encrypted. It allows no reading of keys.
pub const OSD_KEYS_CAPABILITY: &str =
    "allow command \"config-key exists\" with key prefix \"dm-crypt/osd/\"";

/// What the monitors of a cluster say of all its OSDs, those of other pools included. For an OSD that ceph-volume made with dm-crypt they
/// keep a key.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(tag = "is", rename_all = "snake_case")]
pub enum OsdEncryption {
    /// They keep a key for each.
    Yes {
        /// How many OSDs there are.
        osds: u32,
    },
    /// They keep none for some.
    No {
        /// How many OSDs there are.
        osds: u32,
        /// For how many of them there is no key.
        plain: u32,
    },
    /// It is not known.
    Unknown {
        /// Why.
        why: OsdsUnknown,
    },
}

/// Why it is not known whether OSDs are encrypted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(rename_all = "snake_case")]
pub enum OsdsUnknown {
    /// The pool's user may not ask the monitors for that.
    NotAllowed,
    /// The monitors have not answered, or not as expected.
    NoAnswer,
    /// What serves the pool on the host is of an earlier version, and does not ask.
    EarlierVersion,
    /// The cluster has no OSD.
    NoOsds,
}

impl OsdEncryption {
    /// Whether the OSDs are encrypted; none where that is not known.
    #[must_use]
    pub fn known(self) -> Option<bool> {
        match self {
            Self::Yes { .. } => Some(true),
            Self::No { .. } => Some(false),
            Self::Unknown { .. } => None,
        }
    }
}

impl fmt::Display for OsdEncryption {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Yes { osds: 1 } => {
                f.write_str("encrypted: the monitors keep a key of dm-crypt for the one OSD")
            }
            Self::Yes { osds } => {
                write!(f, "encrypted: the monitors keep a key of dm-crypt for each of {osds} OSDs")
            }
            Self::No { osds, plain } => write!(
                f,
                "not encrypted: the monitors keep no key of dm-crypt for {plain} of {osds} OSDs"
            ),
            Self::Unknown { why } => {
                let why = match why {
                    OsdsUnknown::NotAllowed => "the pool's user may not ask the monitors",
                    OsdsUnknown::NoAnswer => "the monitors have not answered",
                    OsdsUnknown::EarlierVersion => {
                        "the vmseal-rbd that serves the pool is of an earlier version"
                    }
                    OsdsUnknown::NoOsds => "the cluster has no OSD",
                };
                write!(f, "not known to be encrypted: {why}")
            }
        }
    }
}

/// Whether the OSDs of a pool's cluster are encrypted.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct OsdFacts {
    /// What an administrator has stated, which counts then; none where the cluster is asked.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub stated: Option<bool>,
    /// What the monitors have told last; none where no host has asked them yet.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub told: Option<OsdEncryption>,
}

impl OsdFacts {
    /// Whether the OSDs are encrypted; none where that is not known.
    #[must_use]
    pub fn known(&self) -> Option<bool> {
        self.stated.or_else(|| self.told.and_then(OsdEncryption::known))
    }

    /// Why disks that need encrypted OSDs cannot be there, and what may be done; none where they can.
    #[must_use]
    pub fn lacking(&self, datastore: &str, pool: &RbdPool) -> Option<String> {
        if self.known() == Some(true) {
            return None;
        }
        let advice = match (self.stated, self.told) {
            (Some(_), _) => {
                format!(
                    ". Have the cluster asked: vmseal datastore set {datastore} --osd-encryption ask"
                )
            }
            (None, Some(OsdEncryption::No { .. })) => format!(
                ". If they are encrypted in another way than by ceph-volume, state it: vmseal datastore set {datastore} --osd-encryption yes"
            ),
            (None, Some(OsdEncryption::Unknown { why: OsdsUnknown::NotAllowed })) => format!(
                ". Allow it, with what else the user may do ({}), and have a host mount the pool anew (vmseal datastore remount {datastore} --host HOST); or state it: vmseal datastore set {datastore} --osd-encryption yes",
                pool.caps_command(Some(OSD_KEYS_CAPABILITY))
            ),
            (None, Some(OsdEncryption::Unknown { why: OsdsUnknown::EarlierVersion })) => {
                format!(
                    ". Have a host mount the pool anew: vmseal datastore remount {datastore} --host HOST"
                )
            }
            (None, None) => format!(
                ". Ask again in a minute, or, where agents are of an earlier version, upgrade vmseal on a host that has it; or state it: vmseal datastore set {datastore} --osd-encryption yes"
            ),
            _ => format!(
                ". Ask again in a minute, or state it: vmseal datastore set {datastore} --osd-encryption yes"
            ),
        };
        Some(format!("the OSDs of its cluster are {self}{advice}"))
    }
}

impl fmt::Display for OsdFacts {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match (self.stated, self.told) {
            (None, None) => {
                f.write_str("not known to be encrypted: the monitors were not asked yet")
            }
            (None, Some(told)) => write!(f, "{told}"),
            (Some(stated), told) => {
                let is = if stated { "encrypted" } else { "not encrypted" };
                write!(f, "{is}, as an administrator has stated")?;
                match told {
                    Some(told) if told.known() == Some(!stated) => {
                        write!(f, "; without that it is shown as {told}")
                    }
                    _ => Ok(()),
                }
            }
        }
    }
}

/// What an administrator states of the OSDs of a pool's cluster.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(rename_all = "snake_case")]
pub enum StatedOsds {
    /// They are encrypted.
    Yes,
    /// They are not.
    No,
    /// Nothing: what the monitors say counts.
    Ask,
}

impl StatedOsds {
    /// Whether they are encrypted; none where the monitors are asked.
    #[must_use]
    pub fn stated(self) -> Option<bool> {
        match self {
            Self::Yes => Some(true),
            Self::No => Some(false),
            Self::Ask => None,
        }
    }
}

impl FromStr for StatedOsds {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "yes" => Ok(Self::Yes),
            "no" => Ok(Self::No),
            "ask" => Ok(Self::Ask),
            _ => Err("it is 'yes', 'no' or 'ask'".to_owned()),
        }
    }
}

/// What a policy asks of the OSDs of clusters that its disks are in.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(rename_all = "snake_case")]
pub enum AskedOsds {
    /// They must be encrypted.
    Required,
    /// Nothing.
    Any,
}

impl AskedOsds {
    /// Its name, as options have it.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Required => "required",
            Self::Any => "any",
        }
    }
}

impl FromStr for AskedOsds {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        [Self::Required, Self::Any]
            .into_iter()
            .find(|asked| asked.name() == text)
            .ok_or_else(|| "it is 'required' or 'any'".to_owned())
    }
}

/// Where a disk is encrypted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(rename_all = "snake_case")]
pub enum EncryptionPlace {
    /// Nowhere. What is below a directory of a host, vmseal does not know.
    None,
    /// By vmseal on the host, before it gets to the datastore.
    Client,
    /// Below the OSDs of the cluster.
    Osd,
    /// By vmseal, and below the OSDs.
    Both,
    /// By vmseal; of the OSDs it is not known.
    ClientOsdUnknown,
    /// Not by vmseal; of the OSDs it is not known.
    NoneOsdUnknown,
}

impl EncryptionPlace {
    /// Where a disk is encrypted that vmseal encrypts, or not, and whose OSDs are encrypted, or not; none where that is not known.
    #[must_use]
    pub fn of(by_client: bool, osds: Option<bool>) -> Self {
        match (by_client, osds) {
            (false, Some(false)) => Self::None,
            (true, Some(false)) => Self::Client,
            (false, Some(true)) => Self::Osd,
            (true, Some(true)) => Self::Both,
            (true, None) => Self::ClientOsdUnknown,
            (false, None) => Self::NoneOsdUnknown,
        }
    }
}

impl fmt::Display for EncryptionPlace {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::None => "none",
            Self::Client => "client",
            Self::Osd => "osd",
            Self::Both => "both",
            Self::ClientOsdUnknown => "client (osd unknown)",
            Self::NoneOsdUnknown => "none (osd unknown)",
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rbd_pool::Messenger;

    fn pool() -> RbdPool {
        RbdPool {
            monitors: "v2:10.0.0.1:3300".to_owned(),
            user: "client.vmseal".to_owned(),
            keyring: None,
            pool: "vms".to_owned(),
            namespace: None,
            data_pool: Some("ec".to_owned()),
            messenger: Messenger::Secure,
            create: None,
            changed: None,
        }
    }

    const UNKNOWN: OsdEncryption = OsdEncryption::Unknown { why: OsdsUnknown::NotAllowed };

    #[test]
    fn what_is_stated_counts_before_what_the_monitors_tell() {
        let known = |stated, told| OsdFacts { stated, told }.known();
        let (yes, no) =
            (Some(OsdEncryption::Yes { osds: 3 }), Some(OsdEncryption::No { osds: 3, plain: 1 }));
        assert_eq!((known(None, yes), known(None, no)), (Some(true), Some(false)));
        assert_eq!((known(None, None), known(None, Some(UNKNOWN))), (None, None));
        assert_eq!((known(Some(true), no), known(Some(false), yes)), (Some(true), Some(false)));
        let stated = OsdFacts { stated: Some(true), told: no };
        assert_eq!(
            stated.to_string(),
            "encrypted, as an administrator has stated; without that it is shown as not encrypted: the monitors keep no key of dm-crypt for 1 of 3 OSDs"
        );
    }

    #[test]
    fn what_is_not_known_to_be_encrypted_is_lacking_with_what_to_do() {
        let lacking = |stated, told| OsdFacts { stated, told }.lacking("ceph", &pool());
        assert_eq!(lacking(None, Some(OsdEncryption::Yes { osds: 3 })), None);
        assert_eq!(lacking(Some(true), Some(UNKNOWN)), None);
        let refused = lacking(None, Some(UNKNOWN)).unwrap();
        let command = "ceph auth caps client.vmseal mon 'profile rbd, allow command \"config-key exists\" with key prefix \"dm-crypt/osd/\"' osd 'profile rbd pool=vms, profile rbd pool=ec'";
        assert!(refused.contains("not known") && refused.contains(command), "{refused}");
        let refused = lacking(None, Some(OsdEncryption::No { osds: 3, plain: 2 })).unwrap();
        assert!(refused.contains("for 2 of 3 OSDs"), "{refused}");
        assert!(refused.contains("vmseal datastore set ceph --osd-encryption yes"), "{refused}");
        let refused = lacking(Some(false), Some(OsdEncryption::Yes { osds: 3 })).unwrap();
        assert!(refused.contains("--osd-encryption ask"), "{refused}");
        let earlier = OsdEncryption::Unknown { why: OsdsUnknown::EarlierVersion };
        let refused = lacking(None, Some(earlier)).unwrap();
        assert!(refused.contains("vmseal datastore remount ceph --host"), "{refused}");
        assert!(lacking(None, None).unwrap().contains("not asked yet"));
    }

    #[test]
    fn the_place_follows_from_both() {
        let shown = |client, osds| EncryptionPlace::of(client, osds).to_string();
        assert_eq!(shown(false, Some(false)), "none");
        assert_eq!(shown(true, Some(false)), "client");
        assert_eq!(shown(false, Some(true)), "osd");
        assert_eq!(shown(true, Some(true)), "both");
        assert_eq!(shown(true, None), "client (osd unknown)");
        assert_eq!(shown(false, None), "none (osd unknown)");
        let json = serde_json::to_string(&EncryptionPlace::ClientOsdUnknown).unwrap();
        assert_eq!(json, "\"client_osd_unknown\"");
    }

    #[test]
    fn what_monitors_tell_is_written_and_read() {
        for (told, written) in [
            (OsdEncryption::Yes { osds: 3 }, r#"{"is":"yes","osds":3}"#),
            (OsdEncryption::No { osds: 3, plain: 1 }, r#"{"is":"no","osds":3,"plain":1}"#),
            (UNKNOWN, r#"{"is":"unknown","why":"not_allowed"}"#),
        ] {
            assert_eq!(serde_json::to_string(&told).unwrap(), written);
            assert_eq!(serde_json::from_str::<OsdEncryption>(written).unwrap(), told);
        }
    }
}
