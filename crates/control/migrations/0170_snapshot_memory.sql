-- Whether a snapshot keeps the memory of the guest.
ALTER TABLE snapshots ADD COLUMN memory BOOLEAN NOT NULL DEFAULT FALSE;
