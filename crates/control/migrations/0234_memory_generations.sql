-- Generations of memories that are saved, so that an old file which somebody puts back is noticed (docs/suspend.md).
-- vms.memory_last: the highest number that was given to a memory of the VM. vms.memory_expected: which one the VM must have when it is
-- suspended; null takes any. snapshots.memory_generation: that of the memory which a snapshot keeps; null is not known.
ALTER TABLE vms ADD COLUMN memory_last BIGINT NOT NULL DEFAULT 0;
ALTER TABLE vms ADD COLUMN memory_expected BIGINT;
ALTER TABLE snapshots ADD COLUMN memory_generation BIGINT;
