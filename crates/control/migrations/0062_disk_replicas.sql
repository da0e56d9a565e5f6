-- Where second copies of a policy's disks are kept, as JSON; NULL is nowhere. The datastore is named, as each host has its own
-- of that name. A disk keeps what its policy said when it was made: which datastore that is on its host, and how fast it
-- is copied, in bytes a second.
ALTER TABLE policies ADD COLUMN replica TEXT;
ALTER TABLE disks ADD COLUMN replica_id TEXT REFERENCES datastores (id);
ALTER TABLE disks ADD COLUMN replica_rate INTEGER;
