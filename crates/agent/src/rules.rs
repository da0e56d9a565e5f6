//! What may be done with a VM when. The real host and the simulated one share these rules. The table of what
//! excludes what is [`exclusion`].

pub mod boot;
pub mod exclusion;
mod jobs;
pub mod plugging;
pub mod restored;
pub mod set_running;

pub use self::jobs::{
    check_copied, check_copy, check_job, check_not_sent, check_pace, check_revert,
    check_sent_memory, check_session, check_tpm_at_rest, lending,
};

use std::collections::BTreeSet;
use std::time::Duration;

use vmseal_api::bitmap;
use vmseal_api::boot::BootDevice;
use vmseal_api::filter::{BitmapChange, CRYPT_SECTOR, DISKS_MAX, check_caches};
use vmseal_api::guest::GuestCommand;
use vmseal_api::hardware::{Firmware, TPM_DISK_SIZE, VARIABLES_SIZE};
use vmseal_api::host::backup::TRACKING_PREFIX;
use vmseal_api::host::{
    DiskRole, DiskSpec, ExportJob, Exposing, KeyReference, KeyState, SHUTDOWN_SECONDS_MAX, VmSpec,
};
use vmseal_api::id::{DiskId, SnapshotId, TaskId};
use vmseal_api::nic::{NicToCheck, check_nics};
use vmseal_api::problem::{ErrorCode, Problem};
use vmseal_api::replica::ReplicaPlace;
use vmseal_api::request::{DISK_SIZE_MAX, MEMORY_MAX, MEMORY_MIN, MEMORY_UNIT, VCPUS_MAX};
use vmseal_api::size::Size;

use self::exclusion::Action;

/// Checks a specification on its own. The server has checked the user's input; these checks protect this
/// host.
///
/// # Errors
/// `invalid-request`, with the field.
pub fn check_spec(spec: &VmSpec) -> Result<(), Problem> {
    vmseal_api::id::check_name(&spec.name)
        .map_err(|error| Problem::invalid("name", error.to_string()))?;
    if spec.vcpus == 0 || spec.vcpus > VCPUS_MAX {
        return Err(Problem::invalid("vcpus", format!("must be 1 to {VCPUS_MAX}")));
    }
    if !(MEMORY_MIN..=MEMORY_MAX).contains(&spec.memory) || !spec.memory.is_multiple_of(MEMORY_UNIT)
    {
        return Err(Problem::invalid(
            "memory",
            format!(
                "must be a multiple of 1 MiB from {} to {}",
                Size(MEMORY_MIN),
                Size(MEMORY_MAX)
            ),
        ));
    }
    spec.hardware
        .check(spec.memory)
        .map_err(|(name, what)| Problem::invalid(format!("hardware.{name}"), what))?;
    let disks: Vec<_> = spec.disks().collect();
    check_variables(spec.hardware.firmware, &disks)?;
    check_tpm(spec.hardware.tpm, &disks)?;
    if disks.len() > DISKS_MAX {
        return Err(Problem::invalid("devices", format!("at most {DISKS_MAX} disks are possible")));
    }
    let nics = spec.nics();
    let nics =
        nics.map(|it| NicToCheck { name: &it.name, mac: Some(it.mac), backend: &it.backend });
    check_nics(&nics.collect::<Vec<_>>()).map_err(|(field, what)| Problem::invalid(field, what))?;
    check_caches(disks.iter().map(|disk| disk.cache))
        .map_err(|(index, what)| Problem::invalid(format!("disks[{index}].cache"), what))?;
    disks.iter().enumerate().try_for_each(|(index, disk)| {
        let field = |name: &str| format!("disks[{index}].{name}");
        if disk.size == 0
            || disk.size > DISK_SIZE_MAX
            || !disk.size.is_multiple_of(u64::from(CRYPT_SECTOR))
        {
            return Err(Problem::invalid(
                field("size"),
                format!(
                    "must be a multiple of {} up to {}",
                    Size(CRYPT_SECTOR.into()),
                    Size(DISK_SIZE_MAX)
                ),
            ));
        }
        disk.limits.check().map_err(|(name, what)| Problem::invalid(field(name), what))?;
        if let Some(replica) = &disk.replica {
            replica
                .check(&disk.datastore)
                .map_err(|(name, what)| Problem::invalid(field(name), what))?;
        }
        if disk.encrypted && spec.key.is_none() {
            return Err(Problem::invalid(field("encrypted"), "the VM has no key"));
        }
        if disks[..index].iter().any(|other| other.disk == disk.disk) {
            return Err(Problem::invalid(field("disk"), "is given twice"));
        }
        Ok(())
    })
}

/// A firmware that keeps variables has one disk for them, and another one has none.
fn check_variables(firmware: Firmware, disks: &[&DiskSpec]) -> Result<(), Problem> {
    let of_variables = disks.iter().filter(|disk| disk.role == DiskRole::UefiVariables);
    let sizes: Vec<u64> = of_variables.map(|disk| disk.size).collect();
    let expected: &[u64] = if firmware.has_variables() { &[VARIABLES_SIZE] } else { &[] };
    if sizes == expected {
        return Ok(());
    }
    let what = format!(
        "UEFI has one disk for its variables, of {VARIABLES_SIZE} bytes, and a BIOS has none; the VM has {}",
        sizes.len()
    );
    Err(Problem::invalid("hardware.firmware", what))
}

/// A TPM has one disk, whose key is that of what it keeps.
fn check_tpm(tpm: bool, disks: &[&DiskSpec]) -> Result<(), Problem> {
    let of_tpm: Vec<_> = disks.iter().filter(|disk| disk.role == DiskRole::Tpm).collect();
    let fits = |disk: &DiskSpec| disk.encrypted && disk.size == TPM_DISK_SIZE;
    if of_tpm.len() == usize::from(tpm) && of_tpm.iter().all(|disk| fits(disk)) {
        return Ok(());
    }
    let what = format!(
        "a VM with a TPM has one encrypted disk of {} for its key, and a VM without a TPM has none; this VM has {}",
        Size(TPM_DISK_SIZE),
        of_tpm.len()
    );
    Err(Problem::invalid("hardware.tpm", what))
}

/// Checks that the memory of a VM's guest can be saved.
///
/// # Errors
/// `locked` without its key; `wrong-state` where it has no disk.
pub fn check_suspend(spec: &VmSpec, locked: bool) -> Result<(), Problem> {
    if locked {
        let what = format!(
            "VM '{}' is locked: its memory is saved under its key, which is not on the host",
            spec.name
        );
        return Err(Problem::new(ErrorCode::Locked, what));
    }
    match spec.disks().next() {
        Some(_) => Ok(()),
        None => Err(wrong_state(spec, "has no disk, and its memory would be saved beside one")),
    }
}

/// Checks that a suspended VM, which is registered anew, has the devices that its guest knows. Its key may change, which opens the saved
/// memory then; the rest takes effect when its guest boots.
///
/// # Errors
/// `wrong-state`.
pub fn check_devices_stay(known: &VmSpec, new: &VmSpec) -> Result<(), Problem> {
    let disks = |spec: &VmSpec| spec.disks().map(|disk| disk.disk).collect::<BTreeSet<_>>();
    let nics = |spec: &VmSpec| spec.nics().map(|nic| nic.nic).collect::<BTreeSet<_>>();
    let same = disks(known) == disks(new) && nics(known) == nics(new);
    if same { Ok(()) } else { Err(suspended(known)) }
}

/// Checks that a suspended VM can be started so.
///
/// # Errors
/// `wrong-state` where another device is to be tried first: its guest does not boot.
pub fn check_resume(spec: &VmSpec, first: Option<BootDevice>) -> Result<(), Problem> {
    match first {
        None => Ok(()),
        Some(_) => Err(suspended(spec)),
    }
}

/// The VM is suspended: what would boot it or cut its power loses its memory.
#[must_use]
pub fn suspended(spec: &VmSpec) -> Problem {
    let name = &spec.name;
    let what = format!(
        "is suspended, and its memory is saved. Resume it (vmseal vm resume {name}), or give the saved memory up and boot from its disks (vmseal vm start {name} --discard-memory)"
    );
    wrong_state(spec, &what)
}

/// A snapshot is to keep the memory of a VM that has none now.
#[must_use]
pub fn has_no_memory(spec: &VmSpec) -> Problem {
    let what =
        "neither runs nor is paused or suspended, and has no memory that a snapshot could keep";
    wrong_state(spec, what)
}

/// A guest has been saved, or sent, while it was paused, and has not run since.
#[must_use]
pub fn saved_while_paused(spec: &VmSpec) -> Problem {
    let what = format!(
        "is paused, and QEMU has saved or sent its memory since, or has tried to. It can do that only once until the guest has run. Unpause it (vmseal vm unpause {}), pause it again if you want, and try again",
        spec.name
    );
    wrong_state(spec, &what)
}

/// A VM that is to lose its key has a file that only the key opens.
#[must_use]
pub fn needs_its_key(spec: &VmSpec, file: &str) -> Problem {
    let name = &spec.name;
    let what = format!(
        "cannot give up its key: {file} is encrypted under it. Resume the VM if it is suspended (vmseal vm resume {name}), delete its core dumps (vmseal dump list {name}) and its snapshots with memory (vmseal snapshot list {name}), then try again"
    );
    wrong_state(spec, &what)
}

/// A core dump was written beside the first disk of a VM since its copy was begun, and does not follow.
#[must_use]
pub fn leaves_core(spec: &VmSpec, file: &str) -> Problem {
    let name = &spec.name;
    let what = format!(
        "has a core dump, {file}, that was written while its first disk was copied. It was not copied with it: begin the operation again, which copies it, or delete it (vmseal dump list {name})"
    );
    wrong_state(spec, &what)
}

/// The guest of a VM has panicked while it was sent to another host.
#[must_use]
pub fn panicked_while_sent(spec: &VmSpec) -> Problem {
    let name = &spec.name;
    let what = format!(
        "has a guest that panicked while it was sent: it stays on its host, which does what is to be done about that. If a core dump is written, decrypt it if it is needed, and delete it (vmseal dump list {name}); then begin the migration again"
    );
    wrong_state(spec, &what)
}

/// The guest of a VM has ended while it was sent to another host. `why` is what is known of its end.
#[must_use]
pub fn ended_while_sent(spec: &VmSpec, why: &str) -> Problem {
    wrong_state(spec, &format!("ended while it was sent, and is off on its host: {why}"))
}

/// The guest of a VM sleeps, and its QEMU would not keep it so. `what` says what is not done.
#[must_use]
pub fn sleeps(spec: &VmSpec, what: &str) -> Problem {
    let name = &spec.name;
    let what = format!(
        "{what}: its guest sleeps (ACPI S3), and QEMU before 9.0 neither stops such a guest nor saves or sends it as it is. Wake it first (vmseal vm wakeup {name}), or try again when it is awake, as an alarm of its clock wakes it (rtcwake); or have it boot again, which loses what it has in memory (vmseal vm reset {name})"
    );
    wrong_state(spec, &what)
}

/// The guest of a VM is to be woken, and is awake.
#[must_use]
pub fn not_asleep(spec: &VmSpec) -> Problem {
    let what =
        "is not suspended to RAM (ACPI S3): its guest is awake, and there is nothing to wake";
    wrong_state(spec, what)
}

/// The guest of a VM was to be woken, and QEMU has not said that it is. `why` says how that is known.
#[must_use]
pub fn may_be_awake(spec: &VmSpec, why: &str) -> Problem {
    let name = &spec.name;
    let what = format!(
        "whether the guest of VM '{name}' has woken is not known: {why}. See whether it is suspended to RAM (vmseal vm show {name}), and wake it again if it is"
    );
    Problem::new(ErrorCode::TimedOut, what)
}

/// The memory of a suspended VM does not follow a copy that was begun before it was suspended.
#[must_use]
pub fn leaves_memory(spec: &VmSpec) -> Problem {
    let name = &spec.name;
    let what = format!(
        "was suspended while its first disk was copied, and its memory is not: resume it (vmseal vm resume {name})"
    );
    wrong_state(spec, &what)
}

/// The VM's power was to be cut while it was being resumed, and its guest has gone on already.
#[must_use]
pub fn resumed(spec: &VmSpec) -> Problem {
    let what = "has been resumed: its guest runs, and its saved memory is used up. Stop it once more to cut its power";
    wrong_state(spec, what)
}

/// A start was to be cancelled, and is over.
#[must_use]
pub fn has_started(spec: &VmSpec) -> Problem {
    wrong_state(spec, "has started: its guest runs. Stop it to cut its power")
}

/// The VM's key state, given whether its KEK is here.
#[must_use]
pub fn key_state(spec: &VmSpec, held: bool) -> KeyState {
    match (&spec.key, held) {
        (None, _) => KeyState::NotNeeded,
        (Some(_), true) => KeyState::Held,
        (Some(_), false) => KeyState::Missing,
    }
}

/// The disk of this id in a specification.
///
/// # Errors
/// `not-found`.
pub fn find_disk(spec: &VmSpec, disk: DiskId) -> Result<&DiskSpec, Problem> {
    spec.disk(disk).ok_or_else(|| {
        Problem::new(
            ErrorCode::NotFound,
            format!("VM '{}' has no disk {disk}; register the VM with it first", spec.name),
        )
    })
}

/// A disk does not have this snapshot.
#[must_use]
pub fn no_snapshot(vm: &str, disk: &DiskSpec, snapshot: SnapshotId) -> Problem {
    let what = format!("disk '{}' of VM '{vm}' has no snapshot {snapshot}", disk.name);
    Problem::new(ErrorCode::NotFound, what)
}

/// A disk with layers is not converted in its file.
#[must_use]
pub fn no_layers_in_place(spec: &VmSpec, disk: &DiskSpec) -> Problem {
    let what = format!(
        "has snapshots of its disk '{}', or layers of deleted ones: without --in-place these are copied as well; or delete all of them first (vmseal snapshot list {})",
        disk.name, spec.name
    );
    wrong_state(spec, &what)
}

/// What is about to be done with a disk cannot be, as it has snapshots, or layers that are not merged.
#[must_use]
pub fn has_snapshots(spec: &VmSpec, disk: &DiskSpec) -> Problem {
    let what = format!(
        "has snapshots of its disk '{}', or layers of deleted ones: delete all of them first (vmseal snapshot list {})",
        disk.name, spec.name
    );
    wrong_state(spec, &what)
}

/// What is about to be done with a disk cannot be, as it stands on files of another VM.
#[must_use]
pub fn is_linked(spec: &VmSpec, disk: &DiskSpec) -> Problem {
    let what = format!(
        "is a linked clone, and its disk '{}' stands on files of another VM: make it a VM of its own first (vmseal vm recrypt {} --deep, vmseal vm move), or make a full clone of it (vmseal vm clone)",
        disk.name, spec.name
    );
    wrong_state(spec, &what)
}

fn needs_key(spec: &VmSpec, disk: &DiskSpec, key: KeyState) -> Result<(), Problem> {
    if disk.encrypted && key != KeyState::Held { Err(locked(spec)) } else { Ok(()) }
}

fn needs_to_be_made(spec: &VmSpec, disk: &DiskSpec, made: bool) -> Result<(), Problem> {
    if made {
        return Ok(());
    }
    Err(wrong_state(spec, &format!("has not made its disk '{}' yet", disk.name)))
}

/// Whether a disk holds anything that could be exposed, copied or kept by a snapshot.
///
/// # Errors
/// `wrong-state` for that of a TPM.
pub fn holds_data(spec: &VmSpec, disk: &DiskSpec) -> Result<(), Problem> {
    if disk.role != DiskRole::Tpm {
        return Ok(());
    }
    let what = format!(
        "has nothing on its disk '{}': its key is that of what the VM's TPM keeps, in the directory {}.tpm beside it",
        disk.name, disk.disk
    );
    Err(wrong_state(spec, &what))
}

/// What it is to hold a disk exposed so.
#[must_use]
pub fn exposing(what: Exposing) -> Action {
    match what {
        Exposing::Hold { writable: true } => Action::ExposeToWrite,
        Exposing::Hold { writable: false } | Exposing::Connect => Action::ExposeToRead,
        Exposing::HoldKept { .. } => Action::ExposeKept,
        Exposing::HoldSealed => Action::ExposeSealed,
    }
}

/// The preconditions of exposing a disk with a filter of its own, besides [`exclusion`].
///
/// # Errors
/// `locked` without its key, where that is needed; `wrong-state` before it is made; `invalid-request` for the ciphertext of
/// a disk that has none.
pub fn check_exposure(
    spec: &VmSpec,
    disk: &DiskSpec,
    key: KeyState,
    made: bool,
    what: Exposing,
) -> Result<(), Problem> {
    needs_to_be_made(spec, disk, made)?;
    match (what.is_sealed(), disk.encrypted) {
        (false, _) => needs_key(spec, disk, key),
        (true, true) => Ok(()),
        (true, false) => {
            let what = format!("disk '{}' is not encrypted: expose it as it is", disk.name);
            Err(Problem::invalid("sealed", what))
        }
    }
}

/// The preconditions of making a disk longer, besides [`exclusion`].
///
/// # Errors
/// `invalid-request` for a size that it cannot get; `wrong-state` before it is made.
pub fn check_growth(spec: &VmSpec, disk: &DiskSpec, made: bool, size: u64) -> Result<(), Problem> {
    needs_to_be_made(spec, disk, made)?;
    if !disk.role.is_data() && size != disk.size {
        return Err(wrong_state(spec, &format!("has a disk '{}' of a fixed size", disk.name)));
    }
    if size < disk.size {
        let what = format!("disk '{}' has {}, and does not shrink", disk.name, Size(disk.size));
        return Err(Problem::invalid("size", what));
    }
    if size > DISK_SIZE_MAX || !size.is_multiple_of(u64::from(CRYPT_SECTOR)) {
        let what = format!(
            "must be a multiple of {} up to {}",
            Size(CRYPT_SECTOR.into()),
            Size(DISK_SIZE_MAX)
        );
        return Err(Problem::invalid("size", what));
    }
    Ok(())
}

/// The guest runs, and gets this disk when it is started next.
pub fn not_in_guest(spec: &VmSpec, disk: &DiskSpec) -> Problem {
    let what = format!(
        "runs without its disk '{}', which it gets at its next start. Stop it to expose the disk",
        disk.name
    );
    wrong_state(spec, &what)
}

/// The disk is not exposed.
#[must_use]
pub fn not_exposed(spec: &VmSpec, disk: &DiskSpec) -> Problem {
    wrong_state(spec, &format!("does not have its disk '{}' exposed, or no longer", disk.name))
}

/// Whether this is a valid name of a dirty bitmap.
///
/// # Errors
/// `invalid-request`.
pub fn check_bitmap(name: &str, change: BitmapChange) -> Result<(), Problem> {
    bitmap::check_name(name).map_err(|error| Problem::invalid("name", error.to_string()))?;
    // What they say is believed by the next backup.
    if name.starts_with(TRACKING_PREFIX) && change != BitmapChange::Remove {
        let what = format!(
            "begins with '{TRACKING_PREFIX}', as the bitmaps that vmseal starts do: choose another one"
        );
        return Err(Problem::invalid("name", what));
    }
    Ok(())
}

/// Checks a command for a guest's agent.
///
/// # Errors
/// `invalid-request`.
pub fn check_guest_command(command: &GuestCommand) -> Result<(), Problem> {
    command.check().map_err(|(field, what)| Problem::invalid(field, what))
}

/// The filter that kept the bitmaps has died, and no other one serves yet.
#[must_use]
pub fn bitmaps_wait(spec: &VmSpec) -> Problem {
    let what = "waits for another filter (alarm 'disks-down'). Its dirty bitmaps can be used again when that filter serves its disks";
    wrong_state(spec, what)
}

/// A disk that has a replica by policy, and the replica's place.
///
/// # Errors
/// `not-found`; `wrong-state` where it has none.
pub fn find_replica(spec: &VmSpec, disk: DiskId) -> Result<(&DiskSpec, &ReplicaPlace), Problem> {
    let disk = find_disk(spec, disk)?;
    let place = disk.replica.as_ref().ok_or_else(|| {
        let what = disk_of(spec, disk);
        let detail = format!("{what} has no replica: its policy did not name one when it was made");
        Problem::new(ErrorCode::WrongState, detail)
    })?;
    Ok((disk, place))
}

/// The filter that wrote the replica has died, and no other one serves yet.
#[must_use]
pub fn replica_waits(spec: &VmSpec) -> Problem {
    let what = "waits for another filter (alarm 'disks-down'): nothing is copied to the replicas of its disks until it runs";
    wrong_state(spec, what)
}

/// The notice for operators about a disk whose filter has no replica to write.
#[must_use]
pub fn unreplicated(disk: &DiskSpec, place: &ReplicaPlace) -> String {
    let path = place.datastore.location.path();
    format!(
        "disk '{}' is served without its replica: {}, or the replica's map beside the disk, could not be used when it was opened. Check that both datastores are mounted, have room and work, then stop and start the VM: the whole replica is copied again",
        disk.name,
        path.display()
    )
}

/// The same of one that is served so because its VM is sent to another host, or was (docs/decisions/325).
#[must_use]
pub fn left_replica(disk: &DiskSpec, place: &ReplicaPlace) -> String {
    format!(
        "disk '{}' is served without its replica in {}: its VM is being sent to another host, or was. All of the disk is copied again when the guest goes on, as soon as its filter can be replaced: not while it is paused, or a disk is exposed",
        disk.name,
        place.datastore.location.path().display()
    )
}

/// A disk, as messages name it.
#[must_use]
pub fn disk_of(spec: &VmSpec, disk: &DiskSpec) -> String {
    format!("disk '{}' of VM '{}'", disk.name, spec.name)
}

/// Whether a disk may be exported like this.
///
/// # Errors
/// `invalid-request`.
pub fn check_export(export: &ExportJob) -> Result<(), Problem> {
    if !export.to.is_absolute() || export.to.file_name().is_none() {
        return Err(Problem::invalid("to", "must be an absolute path that ends with a name"));
    }
    match (export.format.has_passphrase(), &export.passphrase) {
        (false, Some(_)) => Err(Problem::invalid("passphrase", "is for luks2 alone")),
        (true, None) => Err(Problem::invalid("passphrase", "is needed for luks2")),
        _ => Ok(()),
    }
}

/// Why a job cannot be committed yet.
pub const NOT_READY_TO_COMMIT: &str =
    "is still being worked on by this job: it cannot be committed yet";

/// There is nothing to commit.
#[must_use]
pub fn nothing_to_commit(task: TaskId) -> Problem {
    Problem::not_found("job to commit on this host", task)
}

/// A disk that is to be copied has a copy of another task, or still its former image.
#[must_use]
pub fn other_mirror(disk: &DiskSpec, task: TaskId) -> Problem {
    let what = format!(
        "task {task} has copied disk '{}', or still does: wait for that task (vmseal task wait {task}), or cancel it",
        disk.name
    );
    Problem::new(ErrorCode::WrongState, what)
}

/// A task whose copies are paused is to use them.
#[must_use]
pub fn copies_are_paused(spec: &VmSpec, task: TaskId) -> Problem {
    let what = format!(
        "has copies of its disks that are paused: have task {task} go on first (vmseal task resume {task})"
    );
    wrong_state(spec, &what)
}

/// A VM that is starting or stopping is to use the copies of its disks.
#[must_use]
pub fn switched_later(spec: &VmSpec) -> Problem {
    let what = format!(
        "VM '{}' is starting or stopping: its disks are switched when it runs or is off",
        spec.name
    );
    Problem::new(ErrorCode::TimedOut, what)
}

/// What a cancelled mirror job would take back is in use: the copies are the disks' images.
#[must_use]
pub fn is_mirrored(spec: &VmSpec) -> Problem {
    let what = format!("VM '{}' uses the copies of its disks already", spec.name);
    Problem::new(ErrorCode::AlreadyExists, what)
}

/// Data of a disk that is converted in its file has moved: that does not go back.
#[must_use]
pub fn is_converted(spec: &VmSpec) -> Problem {
    let what = format!(
        "data of a disk of VM '{}' has moved in its file already: that goes on, and does not go back",
        spec.name
    );
    Problem::new(ErrorCode::AlreadyExists, what)
}

/// The file of an export that should be removed as uncommitted is committed already.
#[must_use]
pub fn has_its_name(to: &std::path::Path) -> Problem {
    let what = format!("{} is whole: remove it if it is not wanted", to.display());
    Problem::new(ErrorCode::AlreadyExists, what)
}

/// The preconditions of checking or changing the keys of a VM's disks, besides [`exclusion`]; `registered` is
/// the key that the server expects it to be registered with.
///
/// # Errors
/// `wrong-state` when it is registered with another key; `locked` when its key is not here.
pub fn check_key_change(
    spec: &VmSpec,
    key: KeyState,
    registered: &KeyReference,
) -> Result<(), Problem> {
    if spec.key.as_ref() != Some(registered) {
        return Err(wrong_state(spec, "is registered with another key; register it again"));
    }
    if key != KeyState::Held {
        return Err(locked(spec));
    }
    Ok(())
}

/// The preconditions of starting a VM, besides [`exclusion`]. `made` says whether a disk is made.
///
/// # Errors
/// `wrong-state` without a disk, or before all are made; `locked` when a disk needs a key that is not here.
pub fn check_start(
    spec: &VmSpec,
    key: KeyState,
    made: impl Fn(&DiskSpec) -> bool,
) -> Result<(), Problem> {
    if spec.disks().next().is_none() {
        return Err(wrong_state(spec, "has no disk to start from"));
    }
    if let Some(disk) = spec.disks().find(|disk| !made(disk)) {
        let what = format!("cannot start: its disk '{}' has not been made", disk.name);
        return Err(wrong_state(spec, &what));
    }
    spec.disks().try_for_each(|disk| needs_key(spec, disk, key))
}

/// How long a guest that is asked to shut down counts as stopping.
///
/// # Errors
/// `invalid-request` for zero and for too long.
pub fn shutdown_time(seconds: u32) -> Result<Duration, Problem> {
    if (1..=SHUTDOWN_SECONDS_MAX).contains(&seconds) {
        return Ok(Duration::from_secs(seconds.into()));
    }
    Err(Problem::invalid("seconds", format!("must be 1 to {SHUTDOWN_SECONDS_MAX}")))
}

/// The VM is unknown here.
#[must_use]
pub fn unknown(vm: impl std::fmt::Display) -> Problem {
    Problem::not_found("VM on this host", vm)
}

/// The VM's state does not allow something.
#[must_use]
pub fn wrong_state(spec: &VmSpec, what: &str) -> Problem {
    Problem::new(ErrorCode::WrongState, format!("VM '{}' {what}", spec.name))
}

/// The VM's key is not here.
#[must_use]
pub fn locked(spec: &VmSpec) -> Problem {
    Problem::new(
        ErrorCode::Locked,
        format!(
            "VM '{}' is locked: its key has not been given to this host. The alarm 'vm-locked' says why",
            spec.name
        ),
    )
}

/// Another client has the console.
pub fn console_in_use(spec: &VmSpec) -> Problem {
    let name = &spec.name;
    let what = format!(
        "the console of VM '{name}' is in use: somebody has it open. To take it over: vmseal vm console {name} --force"
    );
    Problem::new(ErrorCode::InUse, what)
}

#[cfg(test)]
pub(crate) mod tests {
    use vmseal_api::host::DatastoreSpec;
    use vmseal_api::id::DatastoreId;

    use vmseal_api::host::DatastoreLocation;

    use super::*;

    /// A plain disk of 1 MiB.
    pub fn disk(name: &str) -> DiskSpec {
        let location = DatastoreLocation::Dir { path: "/nowhere".into() };
        DiskSpec {
            disk: DiskId::new(),
            name: name.to_owned(),
            datastore: DatastoreSpec { datastore: DatastoreId::new(), location },
            size: 1 << 20,
            encrypted: false,
            allocation: Default::default(),
            role: Default::default(),
            limits: Default::default(),
            cache: None,
            replica: None,
            facts: None,
        }
    }
}
