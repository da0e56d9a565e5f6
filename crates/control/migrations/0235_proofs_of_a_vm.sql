-- The last proofs of each VM, in place of the last one: the report as its host made it, and its signature, as JSON. number grows
-- with every proof. digest: the SHA-256 of the report's text, in hexadecimal, which the event of the proof has too; none where an
-- earlier version has kept it.
CREATE TABLE proofs_kept AS SELECT * FROM proofs;
DROP TABLE proofs;
CREATE TABLE proofs (
    number INTEGER PRIMARY KEY,
    vm_id TEXT NOT NULL REFERENCES vms (id) ON DELETE CASCADE,
    task_id TEXT NOT NULL,
    digest TEXT,
    signed TEXT NOT NULL,
    UNIQUE (vm_id, task_id)
);
INSERT INTO proofs (vm_id, task_id, signed) SELECT vm_id, task_id, signed FROM proofs_kept;
DROP TABLE proofs_kept;
