-- Core dumps of VMs. bytes: the length of the file, once it is whole. encrypted: the VM had a key.
CREATE TABLE dumps (
    id TEXT PRIMARY KEY,
    vm_id TEXT NOT NULL REFERENCES vms (id) ON DELETE CASCADE,
    name TEXT NOT NULL,
    format TEXT NOT NULL,
    created TEXT NOT NULL,
    bytes BIGINT,
    encrypted BOOLEAN NOT NULL,
    UNIQUE (vm_id, name)
);
