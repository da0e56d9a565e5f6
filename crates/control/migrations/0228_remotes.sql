-- Other control planes, which VMs go to. authority: the certificate (PEM) that their servers are known by. The access token of
-- each is in a file of the data directory: no secret is in the inventory.
CREATE TABLE remotes (
    id TEXT PRIMARY KEY,
    name TEXT NOT NULL UNIQUE,
    url TEXT NOT NULL,
    authority TEXT NOT NULL
);
