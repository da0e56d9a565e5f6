-- VMs that were given to other hosts while their host did not answer, until that one has ended and forgotten them. A VM may be deleted
-- before that. generation: that of the placement which took the VM away.
CREATE TABLE evacuations (
    host_id TEXT NOT NULL REFERENCES hosts (id) ON DELETE CASCADE,
    vm_id TEXT NOT NULL,
    generation BIGINT NOT NULL,
    PRIMARY KEY (host_id, vm_id)
);
CREATE INDEX evacuations_by_vm ON evacuations (vm_id);
