-- The last proof of each VM: the report as its host made it, and its signature, as JSON.
CREATE TABLE proofs (
    vm_id TEXT PRIMARY KEY REFERENCES vms (id) ON DELETE CASCADE,
    task_id TEXT NOT NULL,
    signed TEXT NOT NULL
);
