-- What lies where has tables of its own: a disk has volumes, a VM has placements, a datastore has hosts, each with a
-- role and a generation, so that migration and shared storage need rows, not columns. Columns that hold a truth value say
-- so: PostgreSQL, unlike SQLite, tells them from numbers. SQLite changes neither types nor references of a table
-- that is there, so the tables are made again. Children are dropped first, or their rows would go with their parents.
PRAGMA defer_foreign_keys = ON;

CREATE TABLE kmip_clients_kept AS SELECT * FROM kmip_clients;
CREATE TABLE kmip_servers_kept AS SELECT * FROM kmip_servers;
CREATE TABLE key_requests_kept AS SELECT * FROM key_requests;
CREATE TABLE keys_kept AS SELECT * FROM keys;
CREATE TABLE disks_kept AS SELECT * FROM disks;
CREATE TABLE vms_kept AS SELECT * FROM vms;
CREATE TABLE policies_kept AS SELECT * FROM policies;
CREATE TABLE datastores_kept AS SELECT * FROM datastores;
CREATE TABLE providers_kept AS SELECT * FROM providers;
CREATE TABLE tasks_kept AS SELECT * FROM tasks;
DROP TABLE kmip_clients;
DROP TABLE kmip_servers;
DROP TABLE key_requests;
DROP TABLE keys;
DROP TABLE disks;
DROP TABLE vms;
DROP TABLE policies;
DROP TABLE datastores;
DROP TABLE providers;
DROP TABLE tasks;

CREATE TABLE providers (
    id TEXT PRIMARY KEY,
    name TEXT NOT NULL UNIQUE,
    kind TEXT NOT NULL,
    is_default BOOLEAN NOT NULL DEFAULT FALSE,
    verified BOOLEAN NOT NULL DEFAULT FALSE
);
CREATE UNIQUE INDEX providers_one_default ON providers (is_default) WHERE is_default;

CREATE TABLE kmip_servers (
    provider_id TEXT NOT NULL REFERENCES providers (id) ON DELETE CASCADE,
    position INTEGER NOT NULL,
    alias TEXT NOT NULL,
    host TEXT NOT NULL,
    port INTEGER NOT NULL,
    -- Which certificates are trusted; nothing until an operator has confirmed one.
    trust TEXT,
    PRIMARY KEY (provider_id, position),
    UNIQUE (provider_id, alias)
);

CREATE TABLE kmip_clients (
    provider_id TEXT PRIMARY KEY REFERENCES providers (id) ON DELETE CASCADE,
    key_file TEXT NOT NULL,
    certificate TEXT,
    next_key_file TEXT
);

CREATE TABLE keys (
    provider_id TEXT NOT NULL,
    key_id TEXT NOT NULL,
    vm_id TEXT NOT NULL,
    check_value TEXT NOT NULL,
    destroyed BOOLEAN NOT NULL DEFAULT FALSE,
    -- No VM uses the key; it is still to be destroyed at its provider.
    unwanted BOOLEAN NOT NULL DEFAULT FALSE,
    task_id TEXT,
    PRIMARY KEY (provider_id, key_id)
);
CREATE INDEX keys_by_vm ON keys (vm_id);
CREATE INDEX keys_by_task ON keys (task_id);

CREATE TABLE key_requests (
    provider_id TEXT NOT NULL,
    request TEXT NOT NULL,
    vm_id TEXT NOT NULL,
    server TEXT NOT NULL,
    -- Whether the server was asked to keep the request's id with the key.
    marked BOOLEAN NOT NULL,
    key_id TEXT,
    abandoned BOOLEAN NOT NULL DEFAULT FALSE,
    mark TEXT NOT NULL,
    sent_at TEXT NOT NULL,
    PRIMARY KEY (provider_id, request)
);

CREATE TABLE policies (
    id TEXT PRIMARY KEY,
    name TEXT NOT NULL UNIQUE,
    encryption BOOLEAN NOT NULL,
    provider_id TEXT REFERENCES providers (id),
    allocation TEXT NOT NULL,
    limits TEXT NOT NULL,
    cache BIGINT,
    replica TEXT
);
CREATE INDEX policies_by_provider ON policies (provider_id);

CREATE TABLE datastores (
    id TEXT PRIMARY KEY,
    name TEXT NOT NULL,
    capacity BIGINT,
    free BIGINT,
    UNIQUE (id, name)
);
CREATE INDEX datastores_by_name ON datastores (name);

-- Which hosts reach a datastore, and where it is on each. A name is unique on a host.
CREATE TABLE datastore_hosts (
    datastore_id TEXT NOT NULL,
    host_id TEXT NOT NULL REFERENCES hosts (id),
    name TEXT NOT NULL,
    location TEXT NOT NULL,
    PRIMARY KEY (datastore_id, host_id),
    UNIQUE (host_id, name),
    FOREIGN KEY (datastore_id, name) REFERENCES datastores (id, name) ON DELETE CASCADE ON UPDATE CASCADE
);

CREATE TABLE vms (
    id TEXT PRIMARY KEY,
    name TEXT NOT NULL UNIQUE,
    policy_id TEXT NOT NULL REFERENCES policies (id),
    vcpus INTEGER NOT NULL,
    memory BIGINT NOT NULL,
    -- Chosen when the VM is; the key's id and check value follow when the key is made.
    provider_id TEXT REFERENCES providers (id),
    key_id TEXT,
    key_check TEXT,
    lifecycle TEXT NOT NULL,
    -- Power, and why it stopped, as its host last said: tells news from what is known.
    seen_power TEXT,
    seen_stopped TEXT
);
CREATE INDEX vms_by_policy ON vms (policy_id);
CREATE INDEX vms_by_provider ON vms (provider_id);

-- Which hosts have a part in a VM: its owner runs it. The generation grows when a role moves to another host.
CREATE TABLE placements (
    vm_id TEXT NOT NULL REFERENCES vms (id) ON DELETE CASCADE,
    role TEXT NOT NULL,
    host_id TEXT NOT NULL REFERENCES hosts (id),
    generation BIGINT NOT NULL,
    PRIMARY KEY (vm_id, role)
);
CREATE INDEX placements_by_host ON placements (host_id);

CREATE TABLE disks (
    id TEXT PRIMARY KEY,
    vm_id TEXT NOT NULL REFERENCES vms (id),
    position INTEGER NOT NULL,
    name TEXT NOT NULL,
    size BIGINT NOT NULL,
    encrypted BOOLEAN NOT NULL,
    image TEXT,
    image_format TEXT,
    -- Set before its host is asked to delete it: from then on it may be gone.
    deleting BOOLEAN NOT NULL DEFAULT FALSE,
    allocation TEXT NOT NULL,
    limits TEXT NOT NULL,
    cache BIGINT,
    replica_rate BIGINT,
    UNIQUE (vm_id, position),
    UNIQUE (vm_id, name)
);

-- Where the bytes of a disk lie: its image, and its replica where it has one. Facts are what is pinned of a volume
-- when it is made. The generation grows when a role moves to another datastore.
CREATE TABLE volumes (
    disk_id TEXT NOT NULL REFERENCES disks (id) ON DELETE CASCADE,
    role TEXT NOT NULL,
    datastore_id TEXT NOT NULL REFERENCES datastores (id),
    generation BIGINT NOT NULL,
    facts TEXT,
    PRIMARY KEY (disk_id, role)
);
CREATE INDEX volumes_by_datastore ON volumes (datastore_id);

CREATE TABLE tasks (
    id TEXT PRIMARY KEY,
    kind TEXT NOT NULL,
    target TEXT NOT NULL,
    vm_id TEXT NOT NULL,
    actor TEXT NOT NULL,
    operation TEXT NOT NULL,
    state TEXT NOT NULL,
    step TEXT NOT NULL,
    cancelled BOOLEAN NOT NULL DEFAULT FALSE,
    created TEXT NOT NULL,
    ended TEXT,
    problem TEXT,
    request_id TEXT,
    outputs TEXT NOT NULL DEFAULT '{}',
    failed_step TEXT,
    waiting TEXT,
    parent TEXT,
    not_before TEXT
);
CREATE INDEX tasks_by_state ON tasks (state);
CREATE INDEX tasks_by_vm ON tasks (vm_id);
CREATE INDEX tasks_by_parent ON tasks (parent);
CREATE INDEX tasks_open ON tasks (id) WHERE ended IS NULL;
CREATE INDEX tasks_ended ON tasks (id) WHERE ended IS NOT NULL;

INSERT INTO providers (id, name, kind, is_default, verified)
    SELECT id, name, kind, is_default, verified FROM providers_kept;
INSERT INTO kmip_servers (provider_id, position, alias, host, port, trust)
    SELECT provider_id, position, alias, host, port, trust FROM kmip_servers_kept;
INSERT INTO kmip_clients (provider_id, key_file, certificate, next_key_file)
    SELECT provider_id, key_file, certificate, next_key_file FROM kmip_clients_kept;
INSERT INTO keys (provider_id, key_id, vm_id, check_value, destroyed, unwanted, task_id)
    SELECT provider_id, key_id, vm_id, check_value, destroyed, unwanted, task_id FROM keys_kept;
INSERT INTO key_requests (provider_id, request, vm_id, server, marked, key_id, abandoned, mark, sent_at)
    SELECT provider_id, request, vm_id, server, marked, key_id, abandoned, mark, sent_at FROM key_requests_kept;
INSERT INTO policies (id, name, encryption, provider_id, allocation, limits, cache, replica)
    SELECT id, name, encryption, provider_id, allocation, limits, cache, replica FROM policies_kept;
INSERT INTO datastores (id, name, capacity, free) SELECT id, name, capacity, free FROM datastores_kept;
INSERT INTO datastore_hosts (datastore_id, host_id, name, location)
    SELECT id, host_id, name, location FROM datastores_kept;
INSERT INTO vms (id, name, policy_id, vcpus, memory, provider_id, key_id, key_check, lifecycle, seen_power,
                 seen_stopped)
    SELECT id, name, policy_id, vcpus, memory, provider_id, key_id, key_check, lifecycle, seen_power, seen_stopped
    FROM vms_kept;
INSERT INTO placements (vm_id, role, host_id, generation) SELECT id, 'owner', host_id, 1 FROM vms_kept;
INSERT INTO disks (id, vm_id, position, name, size, encrypted, image, image_format, deleting, allocation, limits,
                   cache, replica_rate)
    SELECT id, vm_id, position, name, size, encrypted, image, image_format, deleting, allocation, limits, cache,
           replica_rate
    FROM disks_kept;
INSERT INTO volumes (disk_id, role, datastore_id, generation, facts)
    SELECT id, 'image', datastore_id, 1, facts FROM disks_kept;
INSERT INTO volumes (disk_id, role, datastore_id, generation)
    SELECT id, 'replica', replica_id, 1 FROM disks_kept WHERE replica_id IS NOT NULL;
INSERT INTO tasks (id, kind, target, vm_id, actor, operation, state, step, cancelled, created, ended, problem,
                   request_id, outputs, failed_step, waiting, parent, not_before)
    SELECT id, kind, target, vm_id, actor, operation, state, step, cancelled, created, ended, problem, request_id,
           outputs, failed_step, waiting, parent, not_before
    FROM tasks_kept;

DROP TABLE kmip_clients_kept;
DROP TABLE kmip_servers_kept;
DROP TABLE key_requests_kept;
DROP TABLE keys_kept;
DROP TABLE disks_kept;
DROP TABLE vms_kept;
DROP TABLE policies_kept;
DROP TABLE datastores_kept;
DROP TABLE providers_kept;
DROP TABLE tasks_kept;

CREATE INDEX events_by_target ON events (target, sequence);
CREATE INDEX events_by_request ON events (request_id);
CREATE INDEX alarms_by_target ON alarms (target);
