-- How fast a task copies disks, where it does: at most so many bytes a second (none: no limit), or not at all for now.
ALTER TABLE tasks ADD COLUMN rate INTEGER;
ALTER TABLE tasks ADD COLUMN paused BOOLEAN NOT NULL DEFAULT FALSE;
