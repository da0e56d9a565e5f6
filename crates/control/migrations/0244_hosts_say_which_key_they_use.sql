-- fingerprint: which key of a pool's user it is (hexadecimal digits); null of one that an earlier version kept, until it is given to a host.
ALTER TABLE datastore_keys ADD COLUMN fingerprint TEXT;
-- mounted_key: the fingerprint of the key that the host's mount of a pool uses, as the host said it last; null where it has not.
ALTER TABLE datastore_hosts ADD COLUMN mounted_key TEXT;
