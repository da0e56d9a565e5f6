-- The inventory. Portable between SQLite and PostgreSQL: ids and times are text (UUID, RFC 3339), structures
-- are JSON text, truth values are 0 and 1. Nothing here is secret: tokens as SHA-256, keys as ids.

CREATE TABLE users (
    name TEXT PRIMARY KEY,
    token_sha256 TEXT NOT NULL UNIQUE
);

CREATE TABLE join_tokens (
    sha256 TEXT PRIMARY KEY,
    expires TEXT NOT NULL
);

CREATE TABLE hosts (
    id TEXT PRIMARY KEY,
    name TEXT NOT NULL UNIQUE,
    address TEXT NOT NULL,
    description TEXT
);

CREATE TABLE datastores (
    id TEXT PRIMARY KEY,
    name TEXT NOT NULL UNIQUE,
    host_id TEXT NOT NULL REFERENCES hosts (id),
    location TEXT NOT NULL,
    capacity BIGINT,
    free BIGINT
);

CREATE TABLE providers (
    id TEXT PRIMARY KEY,
    name TEXT NOT NULL UNIQUE,
    kind TEXT NOT NULL,
    is_default INTEGER NOT NULL DEFAULT 0,
    verified INTEGER NOT NULL DEFAULT 0
);

CREATE UNIQUE INDEX providers_one_default ON providers (is_default) WHERE is_default = 1;

-- Every key that was ever made. A destroyed one stays as its tombstone.
CREATE TABLE keys (
    provider_id TEXT NOT NULL,
    key_id TEXT NOT NULL,
    vm_id TEXT NOT NULL,
    check_value TEXT NOT NULL,
    destroyed INTEGER NOT NULL DEFAULT 0,
    PRIMARY KEY (provider_id, key_id)
);

CREATE TABLE policies (
    id TEXT PRIMARY KEY,
    name TEXT NOT NULL UNIQUE,
    encryption INTEGER NOT NULL,
    provider_id TEXT REFERENCES providers (id)
);

CREATE TABLE vms (
    id TEXT PRIMARY KEY,
    name TEXT NOT NULL UNIQUE,
    host_id TEXT NOT NULL REFERENCES hosts (id),
    policy_id TEXT NOT NULL REFERENCES policies (id),
    vcpus INTEGER NOT NULL,
    memory BIGINT NOT NULL,
    -- Chosen when the VM is; the key's id and check value follow when the key is made.
    provider_id TEXT REFERENCES providers (id),
    key_id TEXT,
    key_check TEXT,
    lifecycle TEXT NOT NULL,
    -- What the host last said: power, and why it stopped. For telling news from what is known.
    seen_power TEXT,
    seen_stopped TEXT
);

CREATE TABLE disks (
    id TEXT PRIMARY KEY,
    vm_id TEXT NOT NULL REFERENCES vms (id),
    position INTEGER NOT NULL,
    name TEXT NOT NULL,
    datastore_id TEXT NOT NULL REFERENCES datastores (id),
    size BIGINT NOT NULL,
    encrypted INTEGER NOT NULL,
    image TEXT,
    facts TEXT,
    -- Set before its host is asked to delete it: from then on it may be gone.
    deleting INTEGER NOT NULL DEFAULT 0,
    UNIQUE (vm_id, position),
    UNIQUE (vm_id, name)
);

CREATE TABLE tasks (
    id TEXT PRIMARY KEY,
    kind TEXT NOT NULL,
    target TEXT NOT NULL,
    vm_id TEXT NOT NULL,
    actor TEXT NOT NULL,
    operation TEXT NOT NULL,
    state TEXT NOT NULL,
    -- The step that is being done or undone.
    position INTEGER NOT NULL,
    step TEXT NOT NULL,
    cancelled INTEGER NOT NULL DEFAULT 0,
    created TEXT NOT NULL,
    ended TEXT,
    problem TEXT
);

-- One task per VM at a time.
CREATE UNIQUE INDEX tasks_one_per_vm ON tasks (vm_id) WHERE state IN ('running', 'undoing');

CREATE TABLE events (
    sequence INTEGER PRIMARY KEY AUTOINCREMENT,
    at TEXT NOT NULL,
    kind TEXT NOT NULL,
    actor TEXT NOT NULL,
    target TEXT NOT NULL,
    detail TEXT NOT NULL
);

-- What stands now, per source (a host's monitor): a source replaces all that it said before.
CREATE TABLE alarms (
    source TEXT NOT NULL,
    code TEXT NOT NULL,
    target TEXT NOT NULL,
    since TEXT NOT NULL,
    detail TEXT NOT NULL,
    PRIMARY KEY (source, code, target)
);
