-- Snapshots of VMs, as trees. disks: the ids of the disks that a snapshot keeps, as JSON.
-- is_current: what the VM's disks hold now began with this one; at most one for each VM.
CREATE TABLE snapshots (
    id TEXT PRIMARY KEY,
    vm_id TEXT NOT NULL REFERENCES vms (id) ON DELETE CASCADE,
    name TEXT NOT NULL,
    description TEXT NOT NULL,
    parent_id TEXT,
    created TEXT NOT NULL,
    state TEXT NOT NULL,
    quiesced BOOLEAN,
    is_current BOOLEAN NOT NULL,
    disks TEXT NOT NULL,
    UNIQUE (vm_id, name)
);
