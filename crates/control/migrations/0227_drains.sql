-- on_drain: what happens to a VM that runs when its host is emptied.
ALTER TABLE vms ADD COLUMN on_drain TEXT NOT NULL DEFAULT 'migrate';

-- Hosts that are emptied, or empty: no VM is placed there. A host without a row is active. migrate_encrypted: the user who
-- began it may move VMs that have a key.
CREATE TABLE drains (
    host_id TEXT PRIMARY KEY REFERENCES hosts (id) ON DELETE CASCADE,
    state TEXT NOT NULL,
    actor TEXT NOT NULL,
    migrate_encrypted BOOLEAN NOT NULL,
    parallel BIGINT NOT NULL,
    stop_others BOOLEAN NOT NULL,
    begun TEXT NOT NULL,
    request_id TEXT
);
CREATE INDEX drains_by_state ON drains (state);

-- How far each VM is. attempts: how often a task of this kind was begun; task_id: the last one.
CREATE TABLE drained_vms (
    host_id TEXT NOT NULL REFERENCES drains (host_id) ON DELETE CASCADE,
    vm_id TEXT NOT NULL REFERENCES vms (id) ON DELETE CASCADE,
    state TEXT NOT NULL,
    attempts BIGINT NOT NULL,
    task_id TEXT,
    detail TEXT NOT NULL,
    PRIMARY KEY (host_id, vm_id)
);
CREATE INDEX drained_vms_by_vm ON drained_vms (vm_id);
