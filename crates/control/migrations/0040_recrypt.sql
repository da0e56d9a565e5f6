-- The task that had a key made which its VM is to be given in place of the one that it has.
ALTER TABLE keys ADD COLUMN task_id TEXT;
