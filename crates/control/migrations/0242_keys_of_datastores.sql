-- The keys (cephx) of pools of Ceph that the server holds, base64: each wrapped under a key that follows from the authority's private
-- key, which is in no inventory.
CREATE TABLE datastore_keys (
    datastore_id TEXT PRIMARY KEY REFERENCES datastores (id) ON DELETE CASCADE,
    wrapped TEXT NOT NULL
);
