-- cpu_model: the processor model that the VMs of a policy have; null leaves it to each VM.
ALTER TABLE policies ADD COLUMN cpu_model TEXT;
