-- What the image is that a disk is filled from; those without were raw.
ALTER TABLE disks ADD COLUMN image_format TEXT;
