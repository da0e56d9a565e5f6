-- How much of the disks was read for a backup, where its host says that.
ALTER TABLE backups ADD COLUMN read_bytes BIGINT;
