//! What may be done with a VM when. The real host and the simulated one ask here, so that they cannot
//! come to differ.

use std::time::Duration;

use vmseal_api::bitmap;
use vmseal_api::filter::{CRYPT_SECTOR, DISKS_MAX, check_caches};
use vmseal_api::host::{
    DatastoreLocation, DiskPhase, DiskSpec, ExportSpec, KeyReference, KeyState, Power,
    SHUTDOWN_SECONDS_MAX, VmSpec,
};
use vmseal_api::id::DiskId;
use vmseal_api::problem::{ErrorCode, Problem};
use vmseal_api::replica::ReplicaPlace;
use vmseal_api::request::{DISK_SIZE_MAX, MEMORY_MAX, MEMORY_MIN, VCPUS_MAX};
use vmseal_api::transfer::ExportFormat;

/// The unit of a VM's memory, in bytes.
const MEMORY_UNIT: u64 = 1 << 20;

/// Checks a specification on its own. The server has checked what users typed; this is for what would
/// hurt this host.
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
            format!("must be a multiple of 1 MiB from {MEMORY_MIN} to {MEMORY_MAX} bytes"),
        ));
    }
    if spec.disks.len() > DISKS_MAX {
        return Err(Problem::invalid("disks", format!("at most {DISKS_MAX} are possible")));
    }
    check_caches(spec.disks.iter().map(|disk| disk.cache))
        .map_err(|(index, what)| Problem::invalid(format!("disks[{index}].cache"), what))?;
    spec.disks.iter().enumerate().try_for_each(|(index, disk)| {
        let field = |name: &str| format!("disks[{index}].{name}");
        if disk.size == 0
            || disk.size > DISK_SIZE_MAX
            || !disk.size.is_multiple_of(u64::from(CRYPT_SECTOR))
        {
            return Err(Problem::invalid(
                field("size"),
                format!("must be a multiple of {CRYPT_SECTOR} up to {DISK_SIZE_MAX} bytes"),
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
        if spec.disks[..index].iter().any(|other| other.disk == disk.disk) {
            return Err(Problem::invalid(field("disk"), "is given twice"));
        }
        Ok(())
    })
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

/// Whether a registered VM's specification may be replaced. Repeating the same is always allowed.
///
/// # Errors
/// `wrong-state` while it is not off.
pub fn may_register(old: &VmSpec, new: &VmSpec, power: Power) -> Result<(), Problem> {
    if power == Power::Off || old == new {
        return Ok(());
    }
    Err(wrong_state(old, "is not off: what is known of it cannot be replaced. Stop it first"))
}

/// Whether a VM may be forgotten.
///
/// # Errors
/// `wrong-state` while it is not off.
pub fn may_unregister(spec: &VmSpec, power: Power) -> Result<(), Problem> {
    if power == Power::Off {
        return Ok(());
    }
    Err(wrong_state(spec, "is not off. Stop it first"))
}

/// The disk of this id in a specification.
///
/// # Errors
/// `not-found`.
pub fn find_disk(spec: &VmSpec, disk: DiskId) -> Result<&DiskSpec, Problem> {
    spec.disks.iter().find(|spec| spec.disk == disk).ok_or_else(|| {
        Problem::new(
            ErrorCode::NotFound,
            format!("VM '{}' has no disk {disk}; register the VM with it first", spec.name),
        )
    })
}

/// Whether a disk may be made now.
///
/// # Errors
/// `locked` when it needs a key that is not here; `in-use` while the VM runs.
pub fn may_create_disk(
    spec: &VmSpec,
    disk: &DiskSpec,
    power: Power,
    key: KeyState,
) -> Result<(), Problem> {
    if power != Power::Off {
        return Err(in_use(spec, disk));
    }
    if disk.encrypted && key != KeyState::Held {
        return Err(locked(spec));
    }
    Ok(())
}

/// Whether a disk may be removed now.
///
/// # Errors
/// `in-use` while the VM runs.
pub fn may_delete_disk(spec: &VmSpec, disk: &DiskSpec, power: Power) -> Result<(), Problem> {
    if power == Power::Off { Ok(()) } else { Err(in_use(spec, disk)) }
}

/// Whether a disk may be read for an export now.
///
/// # Errors
/// `in-use` while the VM runs; `locked` without its key, where that is needed; `wrong-state` before it is
/// made; `invalid-request` for the ciphertext of a disk that has none.
pub fn may_export(
    spec: &VmSpec,
    disk: &DiskSpec,
    format: ExportFormat,
    power: Power,
    key: KeyState,
    made: bool,
) -> Result<(), Problem> {
    if power != Power::Off {
        return Err(in_use(spec, disk));
    }
    if !made {
        let what = format!("has not made its disk '{}' yet", disk.name);
        return Err(wrong_state(spec, &what));
    }
    let sealed = format == ExportFormat::Sealed;
    if sealed && !disk.encrypted {
        let what = format!("disk '{}' is not encrypted: export it as raw", disk.name);
        return Err(Problem::invalid("format", what));
    }
    if disk.encrypted && !sealed && key != KeyState::Held {
        return Err(locked(spec));
    }
    Ok(())
}

/// Whether a disk may be exposed now.
///
/// # Errors
/// `in-use` to change it while the VM is not off, or to read it while the VM is starting; `locked` without
/// its key; `wrong-state` before it is made.
pub fn may_expose(
    spec: &VmSpec,
    disk: &DiskSpec,
    writable: bool,
    power: Power,
    key: KeyState,
    made: bool,
) -> Result<(), Problem> {
    match power {
        // Its filter has what it needs.
        Power::Running | Power::Stopping if !writable => return Ok(()),
        Power::Off => {}
        _ => return Err(in_use(spec, disk)),
    }
    if !made {
        let what = format!("has not made its disk '{}' yet", disk.name);
        return Err(wrong_state(spec, &what));
    }
    if disk.encrypted && key != KeyState::Held {
        return Err(locked(spec));
    }
    Ok(())
}

/// Somebody has the disk exposed.
#[must_use]
pub fn exposed(disk: &str) -> Problem {
    let what =
        format!("disk '{disk}' is exposed: end the 'vmseal disk expose' that exposes it first");
    Problem::new(ErrorCode::InUse, what)
}

/// Nobody has the disk exposed.
#[must_use]
pub fn not_exposed(spec: &VmSpec, disk: &DiskSpec) -> Problem {
    wrong_state(spec, &format!("has its disk '{}' not exposed, or not any more", disk.name))
}

/// Whether this can be the name of a dirty bitmap.
///
/// # Errors
/// `invalid-request`.
pub fn check_bitmap(name: &str) -> Result<(), Problem> {
    bitmap::check_name(name).map_err(|error| Problem::invalid("name", error.to_string()))
}

/// Nobody keeps dirty bitmaps of a VM that does not run.
#[must_use]
pub fn no_bitmaps(spec: &VmSpec) -> Problem {
    let what = "does not run: its disks have no dirty bitmaps, which end with the filter that serves its guest. Start it, make a full backup, and start bitmaps";
    wrong_state(spec, what)
}

/// The filter has died that kept them, and no other one serves yet.
#[must_use]
pub fn bitmaps_lost(spec: &VmSpec) -> Problem {
    let what = "waits for another filter (alarm 'disks-down'): the dirty bitmaps of its disks are lost with the last one";
    wrong_state(spec, what)
}

/// A disk that has a replica by policy, and where that is.
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

/// Nobody copies anything to the replicas of a VM that does not run.
#[must_use]
pub fn replica_rests(spec: &VmSpec) -> Problem {
    let what = "does not run: nothing is copied to a replica while its VM is off; it stays as it was when that stopped. Start the VM, and ask again";
    wrong_state(spec, what)
}

/// The filter has died that wrote the replica, and no other one serves yet.
#[must_use]
pub fn replica_waits(spec: &VmSpec) -> Problem {
    let what = "waits for another filter (alarm 'disks-down'): nothing is copied to the replicas of its disks until there is one";
    wrong_state(spec, what)
}

/// What an operator is told of a disk whose filter has no replica to write.
#[must_use]
pub fn unreplicated(disk: &DiskSpec, place: &ReplicaPlace) -> String {
    let DatastoreLocation::Dir { path } = &place.datastore.location;
    format!(
        "disk '{}' is served without its replica: {}, or the replica's map beside the disk, could not be used when it was opened. See that both datastores are there, have room and work, then stop and start the VM: the replica is copied anew",
        disk.name,
        path.display()
    )
}

/// A disk, as messages name it.
#[must_use]
pub fn disk_of(spec: &VmSpec, disk: &DiskSpec) -> String {
    format!("disk '{}' of VM '{}'", disk.name, spec.name)
}

/// Whether a disk may be exported so.
///
/// # Errors
/// `invalid-request`.
pub fn check_export(export: &ExportSpec) -> Result<(), Problem> {
    if !export.to.is_absolute() || export.to.file_name().is_none() {
        return Err(Problem::invalid("to", "must be an absolute path that ends with a name"));
    }
    match (export.format.has_passphrase(), &export.passphrase) {
        (false, Some(_)) => Err(Problem::invalid("passphrase", "is for luks2 alone")),
        (true, None) => Err(Problem::invalid("passphrase", "is needed for luks2")),
        _ => Ok(()),
    }
}

/// A file that is to be removed while it has no name has got one.
#[must_use]
pub fn has_its_name(to: &std::path::Path) -> Problem {
    let what = format!("{} is whole: remove it if it is not wanted", to.display());
    Problem::new(ErrorCode::AlreadyExists, what)
}

/// Whether the keys of a VM's disks may be looked at or changed now; `registered` is the key that the server
/// takes it to be registered with.
///
/// # Errors
/// `wrong-state` while it is not off, or registered with another key; `locked` when its key is not here.
pub fn may_change_keys(
    spec: &VmSpec,
    power: Power,
    key: KeyState,
    registered: &KeyReference,
) -> Result<(), Problem> {
    if power != Power::Off {
        let what = "is not off: the keys of its disks cannot be changed. Stop it first";
        return Err(wrong_state(spec, what));
    }
    if spec.key.as_ref() != Some(registered) {
        return Err(wrong_state(spec, "is registered with another key; register it again"));
    }
    if key != KeyState::Held {
        return Err(locked(spec));
    }
    Ok(())
}

/// What [`may_power_on`] allows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PowerOn {
    /// To begin.
    Start,
    /// Nothing: it runs, or is about to.
    Already,
}

/// Whether a VM may be started now.
///
/// # Errors
/// `wrong-state` while it is stopping or a disk is not whole; `locked` when a disk needs a key that
/// is not here.
pub fn may_power_on(
    spec: &VmSpec,
    power: Power,
    key: KeyState,
    phase: impl Fn(DiskId) -> Option<DiskPhase>,
) -> Result<PowerOn, Problem> {
    match power {
        Power::Running | Power::Starting => return Ok(PowerOn::Already),
        Power::Stopping => return Err(wrong_state(spec, "is stopping. Wait until it is off")),
        Power::Off => {}
    }
    if spec.disks.is_empty() {
        return Err(wrong_state(spec, "has no disk to start from"));
    }
    for disk in &spec.disks {
        let made = match phase(disk.disk) {
            Some(DiskPhase::Creating { .. } | DiskPhase::Failed { .. }) => false,
            Some(DiskPhase::Ready { .. }) => true,
            None => disk.facts.is_some(),
        };
        if !made {
            let what = format!("cannot start: its disk '{}' has not been made", disk.name);
            return Err(wrong_state(spec, &what));
        }
    }
    if key == KeyState::Missing && spec.disks.iter().any(|disk| disk.encrypted) {
        return Err(locked(spec));
    }
    Ok(PowerOn::Start)
}

/// How long a guest that is asked to shut down counts as stopping.
///
/// # Errors
/// `invalid-request` for none at all and for too long.
pub fn patience(seconds: u32) -> Result<Duration, Problem> {
    if (1..=SHUTDOWN_SECONDS_MAX).contains(&seconds) {
        return Ok(Duration::from_secs(seconds.into()));
    }
    Err(Problem::invalid("seconds", format!("must be 1 to {SHUTDOWN_SECONDS_MAX}")))
}

/// The VM is not known here.
#[must_use]
pub fn unknown(vm: impl std::fmt::Display) -> Problem {
    Problem::not_found("VM on this host", vm)
}

/// Something that the VM's state does not allow.
#[must_use]
pub fn wrong_state(spec: &VmSpec, what: &str) -> Problem {
    Problem::new(ErrorCode::WrongState, format!("VM '{}' {what}", spec.name))
}

fn locked(spec: &VmSpec) -> Problem {
    Problem::new(
        ErrorCode::Locked,
        format!(
            "VM '{}' is locked: its key has not been given to this host. The alarm 'vm-locked' says why",
            spec.name
        ),
    )
}

/// Somebody has the console.
pub fn console_in_use(spec: &VmSpec) -> Problem {
    let name = &spec.name;
    let what = format!(
        "the console of VM '{name}' is in use: somebody has it open. To take it over: vmseal vm console {name} --force"
    );
    Problem::new(ErrorCode::InUse, what)
}

fn in_use(spec: &VmSpec, disk: &DiskSpec) -> Problem {
    Problem::new(
        ErrorCode::InUse,
        format!("disk '{}' is in use: VM '{}' is not off. Stop it first", disk.name, spec.name),
    )
}
