-- What a key is found by again, another one for every time that it is asked for: two that one question made could not
-- be told apart. And when it was asked for, so that a server which finds nothing is not believed too soon; those that
-- are here already were sent before this server was started.
ALTER TABLE key_requests ADD COLUMN mark TEXT NOT NULL DEFAULT '';
UPDATE key_requests SET mark = request;
ALTER TABLE key_requests ADD COLUMN sent_at TEXT NOT NULL DEFAULT '1970-01-01T00:00:00Z';
