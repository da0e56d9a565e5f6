//! Whether the storage of a VM is as its policy requires.

use serde::{Deserialize, Serialize};

/// Whether the storage of a VM is as its policy requires, by what is known of it now.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct Compliance {
    /// Whether it is: there are no deviations.
    pub compliant: bool,
    /// What is not, in the boot order of the disks.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub deviations: Vec<Deviation>,
}

impl Compliance {
    /// What is not as required, each once.
    #[must_use]
    pub fn lacking(&self) -> Vec<Requirement> {
        let mut lacking = Vec::new();
        for Deviation { requirement, .. } in &self.deviations {
            if !lacking.contains(requirement) {
                lacking.push(*requirement);
            }
        }
        lacking
    }
}

/// A disk, or the replica of one, that is not as the policy of its VM requires.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct Deviation {
    /// What the policy requires.
    pub requirement: Requirement,
    /// The disk, by name.
    pub disk: String,
    /// Whether it is the replica of the disk.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub replica: bool,
    /// The datastore that it is in, by name.
    pub datastore: String,
    /// What is the matter, and what may be done.
    pub detail: String,
}

/// What policies require of storage.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(rename_all = "snake_case")]
pub enum Requirement {
    /// Disks are encrypted.
    Encryption,
    /// Disks survive so many failures, in pools of this layout with so many data chunks, with copies so far apart.
    Redundancy,
    /// The OSDs of Ceph clusters are encrypted.
    OsdEncryption,
    /// Connections to Ceph clusters are encrypted.
    Messenger,
    /// Images in pools of Ceph are cut into such objects.
    ImageLayout,
    /// Something that a newer server says and this side does not know.
    #[serde(other)]
    Unknown,
}

#[cfg(test)]
mod tests {
    use serde_json::{from_value, json};

    use super::*;

    #[test]
    fn what_a_newer_server_says_is_read_and_told_once() {
        let deviation = |requirement: &str| {
            let detail = "it is not";
            json!({ "requirement": requirement, "disk": "root", "datastore": "ceph", "detail": detail })
        };
        let words = ["messenger", "redundancy", "messenger", "colour", "taste"];
        let deviations: Vec<_> = words.into_iter().map(deviation).collect();
        let read: Compliance =
            from_value(json!({ "compliant": false, "deviations": deviations })).unwrap();
        assert_eq!(
            read.lacking(),
            [Requirement::Messenger, Requirement::Redundancy, Requirement::Unknown]
        );
        let compliant = json!({ "compliant": true });
        let read: Compliance = from_value(compliant.clone()).unwrap();
        assert!(read.lacking().is_empty());
        assert_eq!(serde_json::to_value(read).unwrap(), compliant);
    }
}
