-- What filters keep of a disk in memory, in bytes; NULL is nothing. A disk keeps what its policy said when it was made.
ALTER TABLE policies ADD COLUMN cache INTEGER;
ALTER TABLE disks ADD COLUMN cache INTEGER;
