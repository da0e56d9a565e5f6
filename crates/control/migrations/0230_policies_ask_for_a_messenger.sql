-- messenger: how data must go between hosts and Ceph clusters for VMs that have the policy ('secure'); null asks for nothing.
ALTER TABLE policies ADD COLUMN messenger TEXT;
