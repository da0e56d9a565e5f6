-- What users say of their VMs, and whether one starts after its host has rebooted. start_due: its host has rebooted, and
-- its start has not been recorded as a task yet.
ALTER TABLE vms ADD COLUMN description TEXT NOT NULL DEFAULT '';
ALTER TABLE vms ADD COLUMN labels TEXT NOT NULL DEFAULT '{}';
ALTER TABLE vms ADD COLUMN autostart BOOLEAN NOT NULL DEFAULT FALSE;
ALTER TABLE vms ADD COLUMN start_due BOOLEAN NOT NULL DEFAULT FALSE;
CREATE INDEX vms_start_due ON vms (start_due);

-- detached: a task adds or removes the disk, and its VM does not have it.
ALTER TABLE disks ADD COLUMN detached BOOLEAN NOT NULL DEFAULT FALSE;
