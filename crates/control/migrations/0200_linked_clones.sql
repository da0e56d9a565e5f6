-- Disks of linked clones, which stand on what a snapshot of another VM's disk keeps and have its data key. That VM and its
-- snapshot may be gone; their names are those of then.
CREATE TABLE linked_disks (
    disk_id TEXT PRIMARY KEY REFERENCES disks (id) ON DELETE CASCADE,
    source_vm TEXT NOT NULL,
    source_name TEXT NOT NULL,
    snapshot_id TEXT NOT NULL,
    snapshot_name TEXT NOT NULL
);
CREATE INDEX linked_disks_by_source ON linked_disks (source_vm);
