//! Disks and network cards that a VM gets and loses, and what stands against that while its guest runs. The real host and
//! the simulated one share these rules, for the change itself as for the question whether it could be made.

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

/// Checks that a disk can be unplugged from a guest that runs: it is one of data, and in a port.
///
/// # Errors
/// `wrong-state`, with what keeps the disk.
pub fn check_unplugged(spec: &VmSpec, disk: DiskId, in_port: bool) -> Result<(), Problem> {
    let (name, is_data) = match spec.disk(disk) {
        Some(known) => (known.name.as_str(), known.role.is_data()),
        None => ("", true),
    };
    let first = spec.disks().find(|known| known.role.is_data());
    let what = match (is_data, in_port) {
        (true, true) => return Ok(()),
        (false, _) => format!("has its disk '{name}' for as long as it runs"),
        (true, false) if first.is_some_and(|first| first.disk == disk) => {
            format!("runs from its disk '{name}', the first one")
        }
        (true, false) => format!(
            "was started with its disk '{name}' on a bus from which no guest can let it go: no port was left for it, or an earlier vmseal has started the VM"
        ),
    };
    Err(wrong_state(spec, &format!("{what}. Stop it first")))
}

/// All ports of the guest are taken, which are so many.
#[must_use]
pub fn no_free_port(spec: &VmSpec, ports: u32) -> Problem {
    let what = format!(
        "VM '{}' has no PCI port for another device while it runs: its {ports} ports have network cards and disks that can be unplugged. Stop it first",
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

#[cfg(test)]
mod tests {
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
    fn a_disk_that_stays_says_why() {
        let [first, second, mut told] = ["one", "two", "told"].map(super::super::tests::disk);
        told.role = DiskRole::CloudInit;
        let spec = with(&[first.clone(), second.clone(), told.clone()]);
        check_unplugged(&spec, second.disk, true).unwrap();
        for (disk, in_port, why) in [
            (&first, false, "runs from its disk 'one', the first one"),
            (&second, false, "disk 'two' on a bus from which no guest can let it go"),
            (&told, true, "its disk 'told' for as long as it runs"),
            (&told, false, "its disk 'told' for as long as it runs"),
        ] {
            let refused = check_unplugged(&spec, disk.disk, in_port).unwrap_err();
            assert_eq!(refused.code, ErrorCode::WrongState);
            assert!(refused.detail.contains(why), "{refused}");
            assert!(refused.detail.ends_with("Stop it first"), "{refused}");
        }
    }

    #[test]
    fn exposures_keep_a_filter() {
        let disk = super::super::tests::disk("one");
        let spec = with(std::slice::from_ref(&disk));
        check_exposed(&spec, std::iter::empty()).unwrap();
        let refused = check_exposed(&spec, [disk.disk].into_iter()).unwrap_err();
        assert!(refused.code == ErrorCode::InUse && refused.detail.contains("'one'"), "{refused}");
    }
}
