-- Steps by names that never change, with what they gave; what a task waits for, what it is a part of, and when
-- it may begin.
ALTER TABLE tasks ADD COLUMN outputs TEXT NOT NULL DEFAULT '{}';
-- The step whose failure is being, or was, answered by undoing what had been done.
ALTER TABLE tasks ADD COLUMN failed_step TEXT;
ALTER TABLE tasks ADD COLUMN waiting TEXT;
ALTER TABLE tasks ADD COLUMN parent TEXT;
ALTER TABLE tasks ADD COLUMN not_before TEXT;
UPDATE tasks SET step = 'reserve' WHERE step = 'reserve the names';
UPDATE tasks SET step = 'make-key' WHERE step = 'make the key';
UPDATE tasks SET step = 'register' WHERE step = 'register on the host';
UPDATE tasks SET step = 'deliver-key' WHERE step = 'deliver the key';
UPDATE tasks SET step = 'create-disks' WHERE step = 'create the disks';
UPDATE tasks SET step = 'finish' WHERE step = 'finish';
UPDATE tasks SET step = 'prepare' WHERE step = 'register and deliver the key';
UPDATE tasks SET step = 'power-on' WHERE step = 'power on';
UPDATE tasks SET step = 'power-off' WHERE step = 'power off';
UPDATE tasks SET step = 'write-file' WHERE step = 'write the file';
UPDATE tasks SET step = 'name-file' WHERE step = 'give the file its name';
UPDATE tasks SET step = 'check-key' WHERE step = 'open every disk with the key that it has';
UPDATE tasks SET step = 'make-new-key' WHERE step = 'make the new key';
UPDATE tasks SET step = 'add-new-key' WHERE step = 'add the new key to the disks';
UPDATE tasks SET step = 'switch-key' WHERE step = 'give the VM the new key';
UPDATE tasks SET step = 'deliver-new-key' WHERE step = 'deliver the new key';
UPDATE tasks SET step = 'drop-old-key' WHERE step = 'remove the old key from the disks';
UPDATE tasks SET step = 'destroy-old-key' WHERE step = 'destroy the old key';
UPDATE tasks SET step = 'mark' WHERE step = 'mark as being deleted';
UPDATE tasks SET step = 'delete-disks' WHERE step = 'delete the disks';
UPDATE tasks SET step = 'forget' WHERE step = 'unregister from the host';
UPDATE tasks SET step = 'destroy-key' WHERE step = 'destroy the key';
UPDATE tasks SET step = 'remove-rows' WHERE step = 'remove from the inventory';
UPDATE tasks SET state = 'rolling_back' WHERE state = 'undoing';

-- What a task holds until it ends: one task has a thing at a time.
CREATE TABLE task_claims (
    kind TEXT NOT NULL,
    object TEXT NOT NULL,
    task_id TEXT NOT NULL,
    PRIMARY KEY (kind, object)
);
CREATE INDEX task_claims_by_task ON task_claims (task_id);
INSERT INTO task_claims (kind, object, task_id)
    SELECT 'vm', vm_id, id FROM tasks WHERE state IN ('running', 'rolling_back');
DROP INDEX tasks_one_per_vm;
ALTER TABLE tasks DROP COLUMN position;
CREATE INDEX tasks_by_state ON tasks (state);
CREATE INDEX tasks_by_vm ON tasks (vm_id);
CREATE INDEX tasks_by_parent ON tasks (parent);
