-- What a disk is for: 'data' is the guest's, 'cloud_init' has what cloud-init reads at the first boot.
ALTER TABLE disks ADD COLUMN role TEXT NOT NULL DEFAULT 'data';
