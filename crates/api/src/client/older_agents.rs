//! What agents of earlier versions do not know is left out of what they are sent: they refuse a request with a field that they do not know.

use serde_json::Value;

/// A body without the times of changes of ways to pools ([`RbdPool::changed`](crate::datastore::RbdPool::changed)), wherever in it a pool is.
pub(super) fn without_changes(mut body: Value) -> Value {
    leave_changes_out(&mut body);
    body
}

/// Of a [`DatastoreLocation`](crate::datastore::DatastoreLocation) that is a pool, and of all that is within another value.
fn leave_changes_out(within: &mut Value) {
    match within {
        Value::Array(values) => values.iter_mut().for_each(leave_changes_out),
        Value::Object(fields) => {
            let is_pool = fields.get("kind").and_then(Value::as_str) == Some("rbd");
            if let Some(Value::Object(pool)) = fields.get_mut("pool").filter(|_| is_pool) {
                pool.remove("changed");
            }
            fields.values_mut().for_each(leave_changes_out);
        }
        Value::Null | Value::Bool(_) | Value::Number(_) | Value::String(_) => {}
    }
}

#[cfg(test)]
mod tests {
    use jiff::Timestamp;
    use serde_json::json;

    use super::*;
    use crate::datastore::{DatastoreLocation, DatastoreSpec, RbdPool};
    use crate::id::DatastoreId;
    use crate::rbd_pool::tests::pool;
    use crate::replica::ReplicaPlace;

    #[test]
    fn changes_of_ways_are_left_out_wherever_a_pool_is_and_nothing_else_is() {
        let datastore = DatastoreId::new();
        let spec = |changed| {
            let pool = Box::new(RbdPool { changed, ..pool() });
            let location = DatastoreLocation::Rbd { path: "/ceph".into(), pool };
            DatastoreSpec { datastore, location }
        };
        let body = |changed| {
            let replica = ReplicaPlace { datastore: spec(changed), bytes_per_second: 1 << 20 };
            json!({
                "changed": "of something else",
                "kind": "rbd",
                "pool": "a name",
                "devices": [{ "datastore": spec(changed), "replica": replica }],
                "location": spec(changed).location,
            })
        };
        let told = body(Some(Timestamp::UNIX_EPOCH));
        assert_ne!(told, body(None));
        assert_eq!(without_changes(told), body(None));
        assert_eq!(without_changes(body(None)), body(None));
        let directory = json!({ "kind": "dir", "pool": { "changed": 1 } });
        assert_eq!(without_changes(directory.clone()), directory);
    }
}
