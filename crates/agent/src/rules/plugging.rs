//! Disks and network cards that a VM gets and loses, and what stands against that while its guest runs. The real host and
//! the simulated one share these rules, for the change itself as for the question whether it could be made.

use vmseal_api::filter::BitmapStatus;
use vmseal_api::host::backup::TRACKING_PREFIX;
use vmseal_api::host::{Device, DiskFacts, DiskRole, DiskSpec, KeyState, NicSpec, VmSpec};
use vmseal_api::id::{DiskId, NicId};
use vmseal_api::nic::NicLink;
use vmseal_api::problem::{ErrorCode, Problem};

use super::{check_spec, needs_key, wrong_state};

/// A VM with another disk, as if that were made.
///
/// # Errors
/// Those of [`check_spec`]; `locked` where the disk needs a key that is not here.
pub fn with_disk(spec: &VmSpec, disk: &DiskSpec, key: KeyState) -> Result<VmSpec, Problem> {
    let mut new = spec.clone();
    let made = DiskSpec { facts: Some(DiskFacts::Raw), ..disk.clone() };
    new.devices.push(Device::Disk(made));
    new.hardware.tpm |= disk.role == DiskRole::Tpm;
    check_spec(&new)?;
    needs_key(&new, disk, key)?;
    Ok(new)
}

/// A VM without one of its disks.
#[must_use]
pub fn without_disk(spec: &VmSpec, disk: &DiskSpec) -> VmSpec {
    let mut new = spec.clone();
    new.devices.retain(|it| !matches!(it, Device::Disk(known) if known.disk == disk.disk));
    new.hardware.tpm &= disk.role != DiskRole::Tpm;
    new
}

/// A VM with another network card.
///
/// # Errors
/// Those of [`check_spec`].
pub fn with_nic(spec: &VmSpec, nic: &NicSpec) -> Result<VmSpec, Problem> {
    let mut new = spec.clone();
    new.devices.push(Device::Nic(nic.clone()));
    check_spec(&new)?;
    Ok(new)
}

/// A VM without one of its network cards.
///
/// # Errors
/// `not-found`.
pub fn without_nic(spec: &VmSpec, nic: NicId) -> Result<VmSpec, Problem> {
    let mut new = spec.clone();
    new.devices.retain(|it| !matches!(it, Device::Nic(known) if known.nic == nic));
    match new.devices.len() < spec.devices.len() {
        true => Ok(new),
        false => Err(no_such_nic(spec, nic)),
    }
}

/// A VM of which a network card is plugged in or out.
///
/// # Errors
/// `not-found`.
pub fn with_link(spec: &VmSpec, nic: NicId, link: NicLink) -> Result<VmSpec, Problem> {
    let mut new = spec.clone();
    new.nic_mut(nic).ok_or_else(|| no_such_nic(spec, nic))?.link = link;
    Ok(new)
}

fn no_such_nic(spec: &VmSpec, nic: NicId) -> Problem {
    let what =
        format!("VM '{}' has no network card {nic}; register the VM with it first", spec.name);
    Problem::new(ErrorCode::NotFound, what)
}

/// The guest was started with this disk.
#[must_use]
pub fn stays_plugged(spec: &VmSpec, disk: DiskId) -> Problem {
    let what = format!(
        "was started with its disk '{}', and only a disk that was added while it runs can be unplugged from its guest. Stop it first",
        spec.disk(disk).map_or("", |disk| disk.name.as_str())
    );
    wrong_state(spec, &what)
}

/// All ports of the guest are taken, which are so many.
#[must_use]
pub fn no_free_port(spec: &VmSpec, ports: u32) -> Problem {
    let what = format!(
        "VM '{}' has no room for another device while it runs: its network cards, and disks that were added since it was started, are {ports} at most. Stop it first",
        spec.name
    );
    Problem::new(ErrorCode::LimitExceeded, what)
}

/// Checks that no disk is exposed beside a guest whose filter is to be replaced: that would end.
///
/// # Errors
/// `in-use`.
pub fn check_exposed(
    spec: &VmSpec,
    mut exposed: impl Iterator<Item = DiskId>,
) -> Result<(), Problem> {
    let Some(disk) = exposed.find_map(|disk| spec.disk(disk)) else { return Ok(()) };
    let what = format!(
        "VM '{}' has its disk '{}' exposed, which would end. End the 'vmseal disk expose' first",
        spec.name, disk.name
    );
    Err(Problem::new(ErrorCode::InUse, what))
}

/// Checks that a disk with these dirty bitmaps may grow: those of a longer disk would be others.
///
/// # Errors
/// `in-use`.
pub fn check_bitmaps(spec: &VmSpec, disk: DiskId, bitmaps: &[BitmapStatus]) -> Result<(), Problem> {
    // Those of vmseal's own are only hints.
    let of_others = |bitmap: &BitmapStatus| !bitmap.name.starts_with(TRACKING_PREFIX);
    let marked = bitmaps.iter().any(of_others);
    let Some(disk) = spec.disk(disk).filter(|_| marked) else { return Ok(()) };
    let what = format!(
        "VM '{}' has dirty bitmaps of disk '{}'; resizing the disk ends them, also while the VM is off. Make the backup and remove them first (vmseal disk bitmap remove)",
        spec.name, disk.name
    );
    Err(Problem::new(ErrorCode::InUse, what))
}

#[cfg(test)]
mod tests {
    use jiff::Timestamp;
    use vmseal_api::filter::BITMAP_GRANULE;

    use super::*;

    fn with(disks: &[DiskSpec]) -> VmSpec {
        let mut spec = crate::process::run_dir::tests::spec();
        spec.devices = disks.iter().cloned().map(Device::Disk).collect();
        spec
    }

    #[test]
    fn a_disk_that_comes_and_goes_leaves_the_vm_as_it_was() {
        let (first, second) = (super::super::tests::disk("one"), super::super::tests::disk("two"));
        let spec = with(std::slice::from_ref(&first));
        let both = with_disk(&spec, &second, KeyState::NotNeeded).unwrap();
        assert!(both.disk(second.disk).unwrap().facts.is_some(), "it is not as if it were made");
        assert_eq!(without_disk(&both, &second), spec);
        let twice = with_disk(&both, &second, KeyState::NotNeeded).unwrap_err();
        assert_eq!(twice.code, ErrorCode::InvalidRequest);
    }

    #[test]
    fn a_disk_that_needs_a_key_waits_for_it() {
        let mut spec = with(&[]);
        spec.key = Some(vmseal_api::host::KeyReference {
            provider: vmseal_api::id::ProviderId::new(),
            key_id: "7".to_owned(),
            check: String::new(),
        });
        let disk = DiskSpec { encrypted: true, ..super::super::tests::disk("one") };
        let missing = with_disk(&spec, &disk, KeyState::Missing).unwrap_err();
        assert_eq!(missing.code, ErrorCode::Locked);
        with_disk(&spec, &disk, KeyState::Held).unwrap();
    }

    #[test]
    fn exposures_keep_a_filter_and_bitmaps_of_others_a_size() {
        let disk = super::super::tests::disk("one");
        let spec = with(std::slice::from_ref(&disk));
        let named = |name: &str| BitmapStatus {
            name: name.to_owned(),
            since: Timestamp::UNIX_EPOCH,
            granularity: BITMAP_GRANULE,
            dirty_bytes: 0,
        };
        let (own, other) = ([named(&format!("{TRACKING_PREFIX}1"))], [named("sunday")]);
        check_bitmaps(&spec, disk.disk, &own).unwrap();
        let refused = check_bitmaps(&spec, disk.disk, &other).unwrap_err();
        assert_eq!(refused.code, ErrorCode::InUse);
        check_exposed(&spec, std::iter::empty()).unwrap();
        let refused = check_exposed(&spec, [disk.disk].into_iter()).unwrap_err();
        assert!(refused.code == ErrorCode::InUse && refused.detail.contains("'one'"), "{refused}");
    }
}
