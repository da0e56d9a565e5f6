-- What is in a backup, and what its VM had that is not, as JSON; none where an earlier version has made it.
ALTER TABLE backups ADD COLUMN contents TEXT;
