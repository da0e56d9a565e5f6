-- How policies have the images of disks in pools of Ceph cut into objects, and how each image was cut when it was made. Until now all
-- were cut as their cluster had it.
ALTER TABLE policies ADD COLUMN image_layout TEXT;
ALTER TABLE volumes ADD COLUMN image_layout TEXT;
UPDATE volumes SET image_layout = '{}' WHERE role = 'image' AND facts IS NOT NULL;
