-- role: what a user may do. Those that were there may do everything.
ALTER TABLE users ADD COLUMN role TEXT NOT NULL DEFAULT 'administrator';
