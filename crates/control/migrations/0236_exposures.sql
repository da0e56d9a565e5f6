-- Disks that are exposed, by the names that the event of the begin has: where the server ends first, the next one records the end.
CREATE TABLE exposures (
    id TEXT PRIMARY KEY,
    vm TEXT NOT NULL,
    disk TEXT NOT NULL,
    actor TEXT NOT NULL
);
