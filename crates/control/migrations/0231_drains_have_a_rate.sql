-- rate: the highest rate at which each VM is sent, in bytes a second; null is no limit.
ALTER TABLE drains ADD COLUMN rate BIGINT;
