-- mount: how the host's mount of a pool gets to the cluster, as the host said it last (JSON); null where it has not.
ALTER TABLE datastore_hosts ADD COLUMN mount TEXT;
