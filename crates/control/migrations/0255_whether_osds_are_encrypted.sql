-- osds_stated: what an administrator has stated of the OSDs of a pool's cluster: 'yes' (they are encrypted) or 'no'; null has the cluster
-- asked. osds_told: what its monitors have told last (JSON), and osds_told_by: to which host; null where nobody has asked them.
ALTER TABLE datastores ADD COLUMN osds_stated TEXT;
ALTER TABLE datastores ADD COLUMN osds_told TEXT;
ALTER TABLE datastores ADD COLUMN osds_told_by TEXT;
