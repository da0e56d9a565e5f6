-- pools: how the cluster keeps what is stored in a pool of Ceph (JSON); null of a directory.
ALTER TABLE datastores ADD COLUMN pools TEXT;
-- redundancy: what failures disks must outlive (JSON); null asks for nothing.
ALTER TABLE policies ADD COLUMN redundancy TEXT;
