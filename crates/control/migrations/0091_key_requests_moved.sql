-- The server's address has changed since it was asked: the key is known there by the mark alone.
ALTER TABLE key_requests ADD COLUMN moved BOOLEAN NOT NULL DEFAULT FALSE;
