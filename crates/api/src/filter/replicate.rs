//! A replica, and how it is copied.

use serde::{Deserialize, Serialize};

use super::{BackendSpec, Direct, Handle, StackSpec};
use crate::pace;

/// The lowest rate of a replica, in bytes a second.
pub const REPLICATE_RATE_MIN: u64 = pace::RATE_MIN;

/// A replica, and how it is copied.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "ReplicateDocument")]
pub struct ReplicateSpec {
    /// What the disk is copied to: storage of the disk's size, which nobody else uses. A raw file is not longer than that,
    /// its lock held; an NBD server needs one connection.
    pub to: StackSpec,
    /// The map of what the replica lacks: a regular file beside the disk's own image, not beside the replica;
    /// open for reading and writing, its lock held. Empty for a new replica.
    pub map: Handle,
    /// The highest rate of copying; at least [`REPLICATE_RATE_MIN`].
    pub bytes_per_second: u64,
}

/// A [`ReplicateSpec`] as it is written, by this and by earlier versions.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct ReplicateDocument {
    #[serde(default)]
    to: Option<StackSpec>,
    /// Before there was `to`: a raw file, or a device.
    #[serde(default)]
    replica: Option<Handle>,
    /// The offset of the disk's first byte in `replica`, in bytes.
    #[serde(default)]
    offset: Option<u64>,
    map: Handle,
    bytes_per_second: u64,
}

impl TryFrom<ReplicateDocument> for ReplicateSpec {
    type Error = &'static str;

    fn try_from(document: ReplicateDocument) -> Result<Self, Self::Error> {
        let ReplicateDocument { to, replica, offset, map, bytes_per_second } = document;
        let to = match (to, replica, offset) {
            (Some(to), None, None) => to,
            (None, Some(file), offset) => {
                let (offset, direct) = (offset.unwrap_or(0), Direct::Auto);
                let (keeps_room, channel) = (false, None);
                let backend = BackendSpec::File { file, offset, direct, keeps_room, channel };
                StackSpec { chain: Vec::new(), backend }
            }
            (None, None, _) => return Err("a replica has no place: give `to`"),
            (Some(_), _, _) => {
                return Err("a replica has two places: with `to`, give no `replica` or `offset`");
            }
        };
        Ok(Self { to, map, bytes_per_second })
    }
}

/// How a replica stands.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct ReplicaStatus {
    /// How much may differ from the disk, in bytes, in whole chunks. At 0 they are equal.
    pub dirty_bytes: u64,
    /// All that was done on the disk so long ago is in the replica, durably; none if it was never complete.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub lag_milliseconds: Option<u64>,
    /// What keeps it from being copied, or its map from being kept, at present.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub last_error: Option<String>,
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;
    use crate::filter::FilterSpec;

    fn read(document: Value) -> Result<ReplicateSpec, String> {
        match serde_json::from_value(document).map_err(|error| error.to_string())? {
            FilterSpec::Replicate(spec) => Ok(*spec),
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn a_replica_in_a_file_is_read_as_earlier_versions_wrote_it_and_written_as_a_stack() {
        let earlier = json!({
            "kind": "replicate", "replica": { "fd": 10 }, "offset": 4096, "map": { "fd": 11 },
            "bytes_per_second": 5 << 20
        });
        let spec = read(earlier.clone()).unwrap();
        assert_eq!((&spec.map, spec.bytes_per_second), (&Handle::Fd(11), 5 << 20));
        let written = serde_json::to_value(FilterSpec::Replicate(Box::new(spec.clone()))).unwrap();
        let file = json!({
            "kind": "file", "file": { "fd": 10 }, "offset": 4096, "direct": "auto",
            "keeps_room": false
        });
        assert_eq!(written["to"], json!({ "chain": [], "backend": file }));
        assert_eq!(written.get("replica"), None);
        assert_eq!(read(written), Ok(spec));
        let mut from_the_start = earlier;
        from_the_start.as_object_mut().unwrap().remove("offset");
        let BackendSpec::File { offset, .. } = read(from_the_start).unwrap().to.backend else {
            panic!("it is another place")
        };
        assert_eq!(offset, 0);
    }

    #[test]
    fn a_replica_has_one_place() {
        let with = |fields: Value| {
            let mut document =
                json!({ "kind": "replicate", "map": { "fd": 11 }, "bytes_per_second": 5 << 20 });
            document.as_object_mut().unwrap().extend(fields.as_object().unwrap().clone());
            read(document).unwrap_err()
        };
        let to = json!({ "chain": [], "backend": { "kind": "nbd", "sockets": [{ "fd": 12 }] } });
        for (fields, reason) in [
            (json!({}), "has no place"),
            (json!({ "offset": 0 }), "has no place"),
            (json!({ "to": to, "replica": { "fd": 10 } }), "two places"),
            (json!({ "to": to, "offset": 0 }), "two places"),
            (json!({ "to": to, "surprise": 1 }), "surprise"),
        ] {
            let refused = with(fields.clone());
            assert!(refused.contains(reason), "{fields}: {refused}");
        }
    }
}
