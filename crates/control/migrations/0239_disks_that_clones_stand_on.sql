-- Which disk of the other VM each disk of a linked clone stands on: the other VM's disks are copied to other files one by one, and what has
-- been copied is shared no more. The disks of a clone have the names of those that they were made of. None where that one is gone.
ALTER TABLE linked_disks ADD COLUMN source_disk TEXT;
UPDATE linked_disks SET source_disk = (
    SELECT source.id FROM disks source JOIN disks own ON own.name = source.name
    WHERE own.id = linked_disks.disk_id AND source.vm_id = linked_disks.source_vm
);
