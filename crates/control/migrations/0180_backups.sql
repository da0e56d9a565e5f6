-- Backups of VMs, which outlive their VMs. created: the instant that the disks are of, once that is known. parent_id: the
-- backup that this one is above; while it is made, the one that it is to be above. bytes: the room of its files, once it is
-- whole. provider_id, key_id, check_value: the key that opens it, which is not destroyed while it is needed.
CREATE TABLE backups (
    id TEXT PRIMARY KEY,
    vm_id TEXT NOT NULL,
    vm_name TEXT NOT NULL,
    host_id TEXT NOT NULL,
    host_name TEXT NOT NULL,
    name TEXT NOT NULL,
    directory TEXT NOT NULL,
    created TEXT NOT NULL,
    state TEXT NOT NULL,
    parent_id TEXT,
    quiesced BOOLEAN,
    bytes BIGINT,
    verified TEXT,
    provider_id TEXT,
    key_id TEXT,
    check_value TEXT,
    UNIQUE (vm_id, name)
);
CREATE INDEX backups_by_host ON backups (host_id);
CREATE INDEX backups_by_vm_name ON backups (vm_name);
