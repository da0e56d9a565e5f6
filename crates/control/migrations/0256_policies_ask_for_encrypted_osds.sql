-- osd_encryption: what the OSDs of Ceph clusters must be for VMs that have the policy ('required': encrypted); null asks for nothing.
ALTER TABLE policies ADD COLUMN osd_encryption TEXT;
