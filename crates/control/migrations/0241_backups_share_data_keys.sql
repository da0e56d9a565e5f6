-- Backups whose data keys other VMs have, as these were made of backups of the same VM: what is restored of them is marked. Which
-- VMs were made before this is not known.
ALTER TABLE backups ADD COLUMN shared BOOLEAN NOT NULL DEFAULT FALSE;
