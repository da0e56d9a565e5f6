-- Network cards of VMs, in the order in which guests find them. No two of an inventory have one address.
CREATE TABLE nics (
    id TEXT PRIMARY KEY,
    vm_id TEXT NOT NULL REFERENCES vms (id) ON DELETE CASCADE,
    position INTEGER NOT NULL,
    name TEXT NOT NULL,
    mac TEXT NOT NULL UNIQUE,
    model TEXT NOT NULL,
    backend TEXT NOT NULL,
    link TEXT NOT NULL,
    UNIQUE (vm_id, position),
    UNIQUE (vm_id, name)
);

-- The first half of the addresses that are made up: chosen at the first use, one row.
CREATE TABLE mac_prefix (
    id INTEGER PRIMARY KEY CHECK (id = 1),
    prefix TEXT NOT NULL
);
