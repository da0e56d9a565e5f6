-- leaving: a task takes the card from its VM. The host is told of the VM without it; its name and address are taken until the guest has let it go.
ALTER TABLE nics ADD COLUMN leaving BOOLEAN NOT NULL DEFAULT FALSE;
