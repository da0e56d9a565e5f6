-- The id of the request that asked for a task, or caused an event: none before this version, and none for
-- what the server does of itself.
ALTER TABLE tasks ADD COLUMN request_id TEXT;
ALTER TABLE events ADD COLUMN request_id TEXT;
