-- Templates: VMs that are cloned, and neither started nor changed.
ALTER TABLE vms ADD COLUMN template BOOLEAN NOT NULL DEFAULT FALSE;
