-- downtime: how long guests of VMs that have the policy are to stand still when they move to another host, in milliseconds; null is
-- the usual limit.
ALTER TABLE policies ADD COLUMN downtime INTEGER;
