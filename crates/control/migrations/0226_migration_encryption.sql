-- migration_encryption: whether what a VM is sent with to another host is encrypted; that of a VM with a key always is.
ALTER TABLE vms ADD COLUMN migration_encryption TEXT NOT NULL DEFAULT 'opportunistic';
