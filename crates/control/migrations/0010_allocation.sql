-- When disks take room on their datastore: 'thin' or 'preallocated'. A disk keeps what its policy said when it was made.
ALTER TABLE policies ADD COLUMN allocation TEXT NOT NULL DEFAULT 'thin';
ALTER TABLE disks ADD COLUMN allocation TEXT NOT NULL DEFAULT 'thin';
