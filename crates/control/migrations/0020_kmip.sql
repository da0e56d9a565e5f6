-- Key providers that are key servers over KMIP. Nothing here is secret: certificates, and names of sealed files.

-- The servers of a provider, in the order in which they are asked.
CREATE TABLE kmip_servers (
    provider_id TEXT NOT NULL REFERENCES providers (id) ON DELETE CASCADE,
    position INTEGER NOT NULL,
    alias TEXT NOT NULL,
    host TEXT NOT NULL,
    port INTEGER NOT NULL,
    -- Whose word is taken for its certificate; nothing until an operator has said so.
    trust TEXT,
    PRIMARY KEY (provider_id, position),
    UNIQUE (provider_id, alias)
);

-- What a provider shows to its servers. The key is sealed in a file of the provider's directory; another
-- key is another file, so that key and certificate change together, here.
CREATE TABLE kmip_clients (
    provider_id TEXT PRIMARY KEY REFERENCES providers (id) ON DELETE CASCADE,
    key_file TEXT NOT NULL,
    certificate TEXT
);

-- Keys that a server was asked to make and that are not in `keys` yet: noted before the question, and
-- what came of it as soon as it is known.
CREATE TABLE key_requests (
    provider_id TEXT NOT NULL,
    request TEXT NOT NULL,
    vm_id TEXT NOT NULL,
    server TEXT NOT NULL,
    -- Whether the server was asked to keep the request's id with the key.
    marked INTEGER NOT NULL,
    key_id TEXT,
    -- Nobody wants the key any more.
    abandoned INTEGER NOT NULL DEFAULT 0,
    PRIMARY KEY (provider_id, request)
);

-- Keys that are to be destroyed as soon as their provider can be asked to.
ALTER TABLE keys ADD COLUMN unwanted INTEGER NOT NULL DEFAULT 0;

-- Why a key cannot be had, where an alarm is about that.
ALTER TABLE alarms ADD COLUMN reason TEXT;
