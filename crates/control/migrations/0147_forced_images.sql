-- image_forced: the disk is filled from a raw image byte by byte even if that begins as an image of another format does.
ALTER TABLE disks ADD COLUMN image_forced BOOLEAN NOT NULL DEFAULT FALSE;
