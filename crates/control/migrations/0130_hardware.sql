-- What the machine of a VM is, as JSON: firmware, model of the processor, memory. '{}' is what every VM has.
ALTER TABLE vms ADD COLUMN hardware TEXT NOT NULL DEFAULT '{}';
