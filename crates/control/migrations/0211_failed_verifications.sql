-- The last verification of a backup, where that failed and none has succeeded since: when, and why.
ALTER TABLE backups ADD COLUMN failed TEXT;
ALTER TABLE backups ADD COLUMN failure TEXT;
