-- Why a core dump was written: somebody asked for it ('request'), or the guest panicked ('panic').
ALTER TABLE dumps ADD COLUMN reason TEXT NOT NULL DEFAULT 'request';

-- told: the time of the last panic of a VM's guest of which there is an event.
CREATE TABLE panics (
    vm_id TEXT PRIMARY KEY REFERENCES vms (id) ON DELETE CASCADE,
    told TEXT NOT NULL
);
