-- Datastores of different hosts may have one name. SQLite drops a table's constraint with the table alone: it is made
-- again with what was in it, and disks refer to it by then. (PostgreSQL: ALTER TABLE datastores DROP CONSTRAINT.)
PRAGMA defer_foreign_keys = ON;
CREATE TABLE datastores_kept AS SELECT * FROM datastores;
DROP TABLE datastores;
CREATE TABLE datastores (
    id TEXT PRIMARY KEY,
    name TEXT NOT NULL,
    host_id TEXT NOT NULL REFERENCES hosts (id),
    location TEXT NOT NULL,
    capacity BIGINT,
    free BIGINT,
    UNIQUE (host_id, name)
);
INSERT INTO datastores (id, name, host_id, location, capacity, free)
    SELECT id, name, host_id, location, capacity, free FROM datastores_kept;
DROP TABLE datastores_kept;
