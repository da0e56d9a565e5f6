//! The preconditions of jobs.

use vmseal_api::host::{
    DiskRole, DiskSpec, DiskToCreate, DiskToMirror, DropSnapshotJob, DropSourcesJob, DumpJob,
    ExportJob, JobSpec, KeyState, MigrationSession, MirrorJob, Power, RestoreBackupJob, RevertJob,
    SendJob, SnapshotJob, VmSpec,
};
use vmseal_api::id::DiskId;
use vmseal_api::pace::CopyPace;
use vmseal_api::problem::{ErrorCode, Problem};
use vmseal_api::transfer::{ExportFormat, ImageFormat};
use vmseal_seal::wire::STREAMS_MAX;

use super::exclusion::Action;
use super::{
    check_export, find_disk, holds_data, locked, needs_key, needs_to_be_made, wrong_state,
};

/// The preconditions of a job besides [`exclusion`]: the job is valid, and what it needs of the VM is there.
/// `made` says whether a disk is made.
///
/// # Errors
/// `not-found` for a disk that the VM does not have; `invalid-request`; `locked` without its key, where that is
/// needed; `wrong-state` for an export before its disk is made.
pub fn check_job(
    spec: &VmSpec,
    job: &JobSpec,
    key: KeyState,
    made: impl Fn(&DiskSpec) -> bool,
) -> Result<(), Problem> {
    match job {
        JobSpec::Create(create) => {
            each_once(create.disks.iter().map(|disk| disk.disk))?;
            for (index, wanted) in create.disks.iter().enumerate() {
                let disk = find_disk(spec, wanted.disk)?;
                check_source(disk, wanted)
                    .map_err(|what| Problem::invalid(format!("disks[{index}].cloud_init"), what))?;
                needs_key(spec, disk, key)?;
            }
            Ok(())
        }
        JobSpec::Export(export) => {
            let disk = find_disk(spec, export.disk)?;
            check_exported(spec, disk, export)?;
            check_export(export)?;
            needs_to_be_made(spec, disk, made(disk))?;
            let sealed = export.format == ExportFormat::Sealed;
            if sealed && !disk.encrypted {
                let what = format!("disk '{}' is not encrypted: export it as raw", disk.name);
                return Err(Problem::invalid("format", what));
            }
            if sealed { Ok(()) } else { needs_key(spec, disk, key) }
        }
        JobSpec::Mirror(mirror) => {
            each_once(mirror.disks.iter().map(|disk| disk.disk))?;
            check_pace(mirror.pace)?;
            mirror.disks.iter().enumerate().try_for_each(|(index, wanted)| {
                let disk = find_disk(spec, wanted.disk)?;
                needs_to_be_made(spec, disk, made(disk))?;
                check_mirror(spec, disk, wanted, key)
                    .map_err(|problem| Problem { field: field_of(index, &problem), ..problem })
            })
        }
        JobSpec::Convert(job) => {
            each_once(job.disks.iter().map(|disk| disk.disk))?;
            if job.bytes_per_second == Some(0) {
                return Err(Problem::invalid("bytes_per_second", "is 0: such a job has no end"));
            }
            job.disks.iter().enumerate().try_for_each(|(index, wanted)| {
                let disk = find_disk(spec, wanted.disk)?;
                needs_to_be_made(spec, disk, made(disk))?;
                holds_data(spec, disk)?;
                let (disk_, encrypted) = (wanted.disk, wanted.encrypted);
                let as_copy = DiskToMirror { disk: disk_, encrypted, datastore: None };
                // A disk that was decrypted, and is not known to be, is as it is to be.
                let again = !disk.encrypted && !encrypted;
                if disk.replica.is_some() && !again {
                    let what = format!(
                        "has a replica of its disk '{}', which would stay as it is: have the disk copied instead",
                        disk.name
                    );
                    return Err(wrong_state(spec, &what));
                }
                match check_mirror(spec, disk, &as_copy, key) {
                    Err(problem) if !again => {
                        Err(Problem { field: field_of(index, &problem), ..problem })
                    }
                    _ => Ok(()),
                }
            })
        }
        JobSpec::Prove(job) => {
            each_once(job.disks.iter().copied())?;
            job.disks.iter().try_for_each(|disk| {
                let disk = find_disk(spec, *disk)?;
                needs_to_be_made(spec, disk, made(disk))?;
                needs_key(spec, disk, key)
            })
        }
        JobSpec::Dump(DumpJob { disk, .. }) => {
            find_disk(spec, *disk)?;
            if key == KeyState::Missing { Err(locked(spec)) } else { Ok(()) }
        }
        JobSpec::DecryptDump(job) => {
            find_disk(spec, job.disk)?;
            if let Some(export) = JobSpec::DecryptDump(job.clone()).exported() {
                check_export(&export)?;
            }
            if key == KeyState::Missing { Err(locked(spec)) } else { Ok(()) }
        }
        JobSpec::Backup(job) => {
            each_once(job.all_disks())?;
            vmseal_api::id::check_name(&job.name)
                .map_err(|error| Problem::invalid("name", error.to_string()))?;
            if spec.key.is_some() && key == KeyState::Missing {
                return Err(locked(spec));
            }
            job.all_disks().try_for_each(|disk| {
                let disk = find_disk(spec, disk)?;
                needs_to_be_made(spec, disk, made(disk))
            })?;
            job.disks.iter().try_for_each(|disk| holds_data(spec, find_disk(spec, *disk)?))?;
            job.beside.iter().try_for_each(|disk| is_not_written(find_disk(spec, *disk)?))
        }
        JobSpec::VerifyBackup(job) => {
            find_disk(spec, job.disk)?;
            if job.key.is_none() && key == KeyState::Missing { Err(locked(spec)) } else { Ok(()) }
        }
        JobSpec::RestoreBackup(job) => {
            each_once(job.disks.iter().copied())?;
            job.disks.iter().try_for_each(|disk| {
                let disk = find_disk(spec, *disk)?;
                check_restored_from(spec, disk, job)?;
                needs_key(spec, disk, key)
            })
        }
        JobSpec::Send(job) => check_send(spec, job, key),
        // Its VM is not registered here.
        JobSpec::Receive(_) => Err(wrong_state(spec, "is on this host already")),
        JobSpec::DropSources(DropSourcesJob { disks })
        | JobSpec::DropSnapshot(DropSnapshotJob { disks, .. }) => {
            each_once(disks.iter().copied())?;
            disks.iter().try_for_each(|disk| find_disk(spec, *disk).map(drop))
        }
        JobSpec::Snapshot(SnapshotJob { disks, .. }) | JobSpec::Revert(RevertJob { disks, .. }) => {
            each_once(disks.iter().copied())?;
            disks.iter().try_for_each(|disk| {
                let disk = find_disk(spec, *disk)?;
                needs_to_be_made(spec, disk, made(disk))?;
                holds_data(spec, disk)
            })
        }
    }
}

/// Whether there is something to export of a disk. In place of that of a TPM, what the TPM keeps now is: as swtpm's file, which is raw.
fn check_exported(spec: &VmSpec, disk: &DiskSpec, export: &ExportJob) -> Result<(), Problem> {
    if disk.role != DiskRole::Tpm {
        return Ok(());
    }
    if export.snapshot.is_some() {
        return holds_data(spec, disk);
    }
    if export.format == ExportFormat::Raw {
        return Ok(());
    }
    let what = format!(
        "disk '{}' holds nothing: in its place, what the VM's TPM keeps is exported, and that as raw alone",
        disk.name
    );
    Err(Problem::invalid("format", what))
}

/// What a VM needs that is sent to another host.
fn check_send(spec: &VmSpec, job: &SendJob, key: KeyState) -> Result<(), Problem> {
    let all: Vec<_> = spec.disks().map(|disk| disk.disk).collect();
    if all.len() != job.disks.len() || !all.iter().all(|disk| job.disks.contains(disk)) {
        return Err(Problem::invalid("disks", "is not all disks of the VM, each once"));
    }
    if !job.copies.is_empty() {
        each_once(job.copies.iter().copied())?;
    }
    job.copies.iter().try_for_each(|disk| find_disk(spec, *disk).map(drop))?;
    let Some(begin) = &job.begin else {
        return Err(Problem::invalid("begin", "is needed to begin"));
    };
    check_session(&begin.session)?;
    if begin.at_rest {
        check_send_at_rest(spec, job, &begin.session)?;
    }
    let is_copied = |disk: &&DiskSpec| disk.replica.is_some() && job.copies.contains(&disk.disk);
    if let Some(disk) = spec.disks().find(is_copied) {
        let what = format!(
            "has a replica of its disk '{}', which would stay behind: share the datastores of both with the other host, so that the disk is not copied",
            disk.name
        );
        return Err(wrong_state(spec, &what));
    }
    if key == KeyState::Missing { Err(locked(spec)) } else { Ok(()) }
}

/// Refuses a VM that is off and would leave something behind: its new host has only what is copied.
fn check_send_at_rest(
    spec: &VmSpec,
    job: &SendJob,
    session: &MigrationSession,
) -> Result<(), Problem> {
    if job.copies.is_empty() || job.copies.len() != job.disks.len() {
        return Err(Problem::invalid("copies", "is not all disks of the VM, which is off"));
    }
    if spec.disks().any(|disk| disk.role == DiskRole::Tpm) && !session.apart {
        let what = "has a TPM: what that keeps is sent to hosts that have another key of the VM, or while it runs. Start it first";
        return Err(wrong_state(spec, what));
    }
    Ok(())
}

/// Refuses to send a VM that is off, or suspended, where the server has taken it for the other: its memory would stay, or come
/// unexpected.
///
/// # Errors
/// `wrong-state`.
pub fn check_sent_memory(spec: &VmSpec, suspended: bool, told: bool) -> Result<(), Problem> {
    match (suspended, told) {
        (true, false) => Err(wrong_state(spec, "is suspended now. Begin the migration again")),
        (false, true) => {
            Err(wrong_state(spec, "is not suspended any more. Begin the migration again"))
        }
        _ => Ok(()),
    }
}

/// Refuses to revert a VM that is suspended where nobody has said that its memory is given up: with the disks of a snapshot it must not be
/// used any more.
///
/// # Errors
/// `wrong-state`.
pub fn check_revert(spec: &VmSpec, job: &RevertJob, power: Power) -> Result<(), Problem> {
    if power != Power::Suspended || job.discard_memory {
        return Ok(());
    }
    let what = format!(
        "is suspended, and a revert loses the memory that is saved: have it given up (vmseal snapshot revert {} {} --discard-memory)",
        spec.name, job.snapshot
    );
    Err(wrong_state(spec, &what))
}

/// Refuses to start a VM that is off and is sent to another host, which may have it already.
///
/// # Errors
/// `in-use`.
pub fn check_not_sent(spec: &VmSpec, is_sent: bool) -> Result<(), Problem> {
    if !is_sent {
        return Ok(());
    }
    let what =
        "is being sent to another host: it starts when that has ended. Wait, or cancel the task";
    Err(Problem::new(ErrorCode::InUse, format!("VM '{}' {what}", spec.name)))
}

/// What hosts are told of a migration.
///
/// # Errors
/// `invalid-request`.
pub fn check_session(session: &MigrationSession) -> Result<(), Problem> {
    if session.streams == 0 || session.streams > STREAMS_MAX {
        let what = format!("is not from 1 to {STREAMS_MAX}");
        return Err(Problem::invalid("begin.session.streams", what));
    }
    Ok(())
}

/// What a disk needs that another one is filled from, besides [`exclusion`].
///
/// # Errors
/// `wrong-state` before it is made, and for that of a TPM; `locked` without its key.
pub fn check_copied(
    spec: &VmSpec,
    disk: &DiskSpec,
    key: KeyState,
    made: bool,
) -> Result<(), Problem> {
    needs_to_be_made(spec, disk, made)?;
    holds_data(spec, disk)?;
    needs_key(spec, disk, key)
}

/// What it is to lend a disk as it is now, so that another one is filled from it: [`exclusion`] says when that may be.
#[must_use]
pub fn lending(disk: &DiskSpec) -> Action {
    match disk.role {
        // No guest writes to it: its file is only read, whatever its VM does.
        DiskRole::CloudInit => Action::Prove,
        DiskRole::Data | DiskRole::UefiVariables | DiskRole::Tpm => Action::ExportDisk,
    }
}

/// Whether a disk may be filled from another one: those for cloud-init have documents, which are read.
///
/// # Errors
/// `invalid-request`.
pub fn check_copy(disk: &DiskSpec, of: &DiskSpec) -> Result<(), Problem> {
    let is_told = |disk: &DiskSpec| disk.role == DiskRole::CloudInit;
    if is_told(disk) == is_told(of) {
        return Ok(());
    }
    let what = format!(
        "disk '{}' or disk '{}' is for cloud-init, but not both: such a disk is filled only from another such disk",
        disk.name, of.name
    );
    Err(Problem::invalid("copy_of", what))
}

/// Whether a disk is one that no guest writes to, which is backed up without a snapshot.
fn is_not_written(disk: &DiskSpec) -> Result<(), Problem> {
    if matches!(disk.role, DiskRole::CloudInit | DiskRole::Tpm) {
        return Ok(());
    }
    let what = format!("disk '{}' is written by the guest, and needs a snapshot", disk.name);
    Err(Problem::invalid("beside", what))
}

/// Whether a disk can be restored from what another VM's had, where it is.
fn check_restored_from(
    spec: &VmSpec,
    disk: &DiskSpec,
    job: &RestoreBackupJob,
) -> Result<(), Problem> {
    let Some(from) = &job.from else { return Ok(()) };
    let wrong = |what: &str| {
        let what = format!("disk '{}' {what}", disk.name);
        Err(Problem::invalid("from.disks", what))
    };
    if from.vm == spec.vm {
        return Err(Problem::invalid("from.vm", "is the VM itself"));
    }
    if !from.disks.contains_key(&disk.disk) {
        return wrong("is to hold what another VM's disk held, and which one is not said");
    }
    if disk.role == DiskRole::Tpm {
        return wrong(
            "is that of a TPM: what another VM's TPM kept opens with that VM's disk alone",
        );
    }
    Ok(())
}

fn field_of(index: usize, problem: &Problem) -> Option<String> {
    problem.field.as_ref().map(|field| format!("disks[{index}].{field}"))
}

/// A job names at least one disk, and each once.
fn each_once(disks: impl Iterator<Item = DiskId>) -> Result<(), Problem> {
    let disks: Vec<_> = disks.collect();
    if disks.is_empty() {
        return Err(Problem::invalid("disks", "none is named"));
    }
    match (1..disks.len()).find(|index| disks[..*index].contains(&disks[*index])) {
        Some(index) => Err(Problem::invalid(format!("disks[{index}].disk"), "is given twice")),
        None => Ok(()),
    }
}

/// How fast disks are copied.
///
/// # Errors
/// `invalid-request`.
pub fn check_pace(pace: CopyPace) -> Result<(), Problem> {
    pace.check().map_err(|wrong| Problem::invalid("pace.bytes_per_second", wrong))
}

/// What a disk that is copied to another image needs.
fn check_mirror(
    spec: &VmSpec,
    disk: &DiskSpec,
    wanted: &DiskToMirror,
    key: KeyState,
) -> Result<(), Problem> {
    if disk.role == DiskRole::Tpm && !wanted.encrypted {
        let what = format!("disk '{}' has the key of what the VM's TPM keeps", disk.name);
        return Err(Problem::invalid("encrypted", what));
    }
    if wanted.datastore.as_ref().is_some_and(|to| to.datastore == disk.datastore.datastore) {
        let what = format!("has disk '{}' already", disk.name);
        return Err(Problem::invalid("datastore", what));
    }
    // With what is beside it, which is sealed then, or in the clear.
    let as_it_is = spec.key.is_some() && spec.disks().next().is_some_and(|it| it.disk == disk.disk);
    if !disk.encrypted && !wanted.encrypted && wanted.datastore.is_none() && !as_it_is {
        let what = format!("disk '{}' is not encrypted already", disk.name);
        return Err(Problem::invalid("encrypted", what));
    }
    if wanted.encrypted && spec.key.is_none() {
        return Err(Problem::invalid("encrypted", "the VM has no key"));
    }
    let to = wanted.datastore.as_ref().map(|to| to.datastore);
    if to.is_some() && to == disk.replica.as_ref().map(|replica| replica.datastore.datastore) {
        let what = format!("has the replica of disk '{}', which is to be elsewhere", disk.name);
        return Err(Problem::invalid("datastore", what));
    }
    // A disk that stays in the clear needs none.
    match key {
        KeyState::Held | KeyState::NotNeeded => Ok(()),
        KeyState::Missing | KeyState::Unknown => Err(locked(spec)),
    }
}

/// What a TPM keeps is copied of a VM that is at rest: swtpm has its directory and its key for as long as its guest runs.
///
/// # Errors
/// `wrong-state`.
pub fn check_tpm_at_rest(spec: &VmSpec, job: &MirrorJob, power: Power) -> Result<(), Problem> {
    let of_tpm = |disk: &&DiskSpec| {
        disk.role == DiskRole::Tpm && job.disks.iter().any(|wanted| wanted.disk == disk.disk)
    };
    let Some(disk) = spec.disks().find(of_tpm) else { return Ok(()) };
    if matches!(power, Power::Off | Power::Suspended) {
        return Ok(());
    }
    let what = format!(
        "is not off, and its guest uses its TPM, whose key disk '{}' has: stop it first, or leave this disk out",
        disk.name
    );
    Err(wrong_state(spec, &what))
}

/// A disk for cloud-init is made of its documents, and no other one is.
fn check_source(disk: &DiskSpec, wanted: &DiskToCreate) -> Result<(), &'static str> {
    if let Some(of) = wanted.copy_of {
        if of.linked
            && (of.snapshot.is_none() || disk.role != DiskRole::Data || disk.replica.is_some())
        {
            return Err(
                "is not what a linked clone is of: that is a snapshot of data, without a replica",
            );
        }
        let alone = wanted.source.is_none() && wanted.cloud_init.is_none();
        return if alone && disk.role != DiskRole::Tpm {
            Ok(())
        } else {
            Err("is not given together with another disk")
        };
    }
    match (disk.role, &wanted.cloud_init, &wanted.source) {
        (DiskRole::CloudInit, Some(_), None)
        | (DiskRole::Data, None, _)
        | (DiskRole::UefiVariables | DiskRole::Tpm, None, None) => Ok(()),
        (DiskRole::UefiVariables | DiskRole::Tpm, None, Some(source)) => match source.format {
            ImageFormat::Raw => Ok(()),
            ImageFormat::Qcow2 => {
                Err("is not needed, and what firmware and TPMs keep is taken raw")
            }
        },
        (DiskRole::CloudInit, None, _) => Err("is needed for a disk of this role"),
        (DiskRole::CloudInit, Some(_), Some(_)) => Err("is not given together with an image"),
        (DiskRole::Data | DiskRole::UefiVariables | DiskRole::Tpm, Some(_), _) => {
            Err("is for a disk of another role")
        }
    }
}

#[cfg(test)]
mod tests {
    use vmseal_api::host::{DatastoreLocation, DatastoreSpec, Departure, Device, SealedKey};
    use vmseal_api::id::{DatastoreId, MigrationId};
    use vmseal_api::replica::ReplicaPlace;

    use super::*;

    #[test]
    fn a_disk_with_a_replica_is_sent_only_where_it_stays_in_its_place() {
        let mut spec = crate::process::run_dir::tests::spec();
        let location = DatastoreLocation::Dir { path: "/second".into() };
        let second = DatastoreSpec { datastore: DatastoreId::new(), location };
        let replicated = DiskSpec {
            replica: Some(ReplicaPlace { datastore: second, bytes_per_second: 1 << 20 }),
            ..super::super::tests::disk("one")
        };
        let (one, two) = (replicated, super::super::tests::disk("two"));
        let disks = vec![one.disk, two.disk];
        spec.devices = vec![Device::Disk(one.clone()), Device::Disk(two.clone())];
        let key = SealedKey { key_box: String::new(), sealed: String::new() };
        let (migration, nonce, streams) = (MigrationId::new(), 1, 1);
        let (encrypted, apart) = (true, false);
        let session = MigrationSession { migration, nonce, key, streams, encrypted, apart };
        let begin = Departure {
            session,
            to: ([127, 0, 0, 1], 1).into(),
            downtime_milliseconds: 300,
            bytes_per_second: None,
            compresses: false,
            at_rest: false,
            suspended: false,
        };
        let sent = |copies: Vec<DiskId>| {
            let begin = Some(Box::new(begin.clone()));
            check_send(&spec, &SendJob { disks: disks.clone(), copies, begin }, KeyState::NotNeeded)
        };
        sent(Vec::new()).unwrap();
        sent(vec![two.disk]).unwrap();
        let refused = sent(vec![two.disk, one.disk]).unwrap_err();
        assert!(refused.detail.contains("replica of its disk 'one'"), "{refused}");
    }
}
