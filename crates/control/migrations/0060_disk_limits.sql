-- What guests may use of a disk, as JSON; '{}' is all. A disk keeps what its policy said when it was made.
ALTER TABLE policies ADD COLUMN limits TEXT NOT NULL DEFAULT '{}';
ALTER TABLE disks ADD COLUMN limits TEXT NOT NULL DEFAULT '{}';
