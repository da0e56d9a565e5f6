-- Whether the memory of VMs that leave a host which is emptied is compressed where that is faster.
ALTER TABLE drains ADD COLUMN compress BOOLEAN NOT NULL DEFAULT FALSE;
