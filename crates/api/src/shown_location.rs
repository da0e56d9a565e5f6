//! Where datastores are, as clients read it in a server's answers: what a later server says in addition is passed over. In requests, and on the way
//! to agents, a field that is not known is an error.

use std::path::PathBuf;

use jiff::Timestamp;
use serde::{Deserialize, Deserializer};

use crate::datastore::DatastoreLocation;
use crate::new_pools::NewPools;
use crate::rbd_pool::{Messenger, RbdPool};

/// The fields of [`DatastoreLocation`].
#[derive(Deserialize)]
#[serde(remote = "DatastoreLocation", tag = "kind", rename_all = "snake_case")]
enum Shown {
    Dir {
        path: PathBuf,
    },
    Rbd {
        path: PathBuf,
        #[serde(deserialize_with = "pool")]
        pool: Box<RbdPool>,
    },
}

/// The fields of [`RbdPool`].
#[derive(Deserialize)]
#[serde(remote = "RbdPool")]
struct ShownPool {
    monitors: String,
    user: String,
    #[serde(default)]
    keyring: Option<PathBuf>,
    pool: String,
    #[serde(default)]
    namespace: Option<String>,
    #[serde(default)]
    data_pool: Option<String>,
    #[serde(default)]
    messenger: Messenger,
    #[serde(default)]
    create: Option<NewPools>,
    #[serde(default)]
    changed: Option<Timestamp>,
}

fn pool<'de, D: Deserializer<'de>>(from: D) -> Result<Box<RbdPool>, D::Error> {
    ShownPool::deserialize(from).map(Box::new)
}

/// Reads where a datastore is, whatever else is said of it.
pub(crate) fn location<'de, D: Deserializer<'de>>(from: D) -> Result<DatastoreLocation, D::Error> {
    Shown::deserialize(from)
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;
    use crate::datastore::DatastoreHost;
    use crate::rbd_pool::tests::pool;

    fn on_host(location: DatastoreLocation) -> DatastoreHost {
        DatastoreHost { host: "h1".to_owned(), location, mounted_key: None, mounted: None }
    }

    #[test]
    fn what_a_later_server_says_in_addition_is_passed_over() {
        let every = RbdPool {
            namespace: Some("space".to_owned()),
            data_pool: Some("ec".to_owned()),
            messenger: Messenger::Secure,
            changed: Some(Timestamp::UNIX_EPOCH),
            ..pool()
        };
        let none = RbdPool { keyring: None, ..pool() };
        for pool in [every, none] {
            let pool = Box::new(pool);
            let known = on_host(DatastoreLocation::Rbd { path: "/ceph".into(), pool });
            let mut said = serde_json::to_value(&known).unwrap();
            assert_eq!(serde_json::from_value::<DatastoreHost>(said.clone()).unwrap(), known);
            said["location"]["later"] = json!({ "of": "a place" });
            said["location"]["pool"]["later"] = json!(["of", "a pool"]);
            assert_eq!(serde_json::from_value::<DatastoreHost>(said).unwrap(), known);
        }
        let known = on_host(DatastoreLocation::Dir { path: "/store".into() });
        let mut said = serde_json::to_value(&known).unwrap();
        said["location"]["later"] = Value::Null;
        assert_eq!(serde_json::from_value::<DatastoreHost>(said).unwrap(), known);
    }

    /// A typing error in a request is not passed over.
    #[test]
    fn a_location_that_is_asked_for_has_no_other_fields() {
        let location = DatastoreLocation::Rbd { path: "/ceph".into(), pool: Box::new(pool()) };
        let mut asked = serde_json::to_value(location).unwrap();
        asked["pool"]["later"] = json!(1);
        serde_json::from_value::<DatastoreLocation>(asked).unwrap_err();
    }
}
