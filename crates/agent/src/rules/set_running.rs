//! What of a VM may be registered anew while it runs. The real host and the simulated one share these rules.
//!
//! | what | when |
//! |---|---|
//! | its name, the links of its network cards, what is in its CD-ROM drive | at once |
//! | its key, while none of its disks is encrypted, or all can be opened with the new one too | at once |
//! | a disk or network card more or less | at once: it is plugged in or out |
//! | processors, memory, boot order, limits and caches of disks | at its next start |
//! | anything else | refused |

use vmseal_api::host::{Device, DiskSpec, NicSpec, VmSpec};
use vmseal_api::id::{DiskId, NicId};
use vmseal_api::problem::Problem;

use super::wrong_state;

/// What a new specification changes of a VM that runs.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Difference {
    /// The network cards whose links change.
    pub links: Vec<NicSpec>,
    /// The network cards to plug in.
    pub new_nics: Vec<NicSpec>,
    /// The network cards to plug out.
    pub gone_nics: Vec<NicId>,
    /// The disks to plug in: they are made, and the guest does not have them.
    pub new_disks: Vec<DiskSpec>,
    /// The disks to plug out.
    pub gone_disks: Vec<DiskId>,
    /// Whether something else is in its CD-ROM drive.
    pub medium: bool,
}

/// Whether the new key must open all encrypted disks already: a key that opens nothing yet, or no longer, is no more than a word.
#[must_use]
pub fn needs_both_keys(known: &VmSpec, new: &VmSpec) -> bool {
    let encrypted = |spec: &VmSpec| spec.disks().any(|disk| disk.encrypted);
    known.key != new.key && (encrypted(known) || encrypted(new))
}

/// The difference of what a VM runs with and a new specification. `in_use` says whether the guest has a disk,
/// `opens_with_both` whether all encrypted disks can be opened with the new key, too.
///
/// # Errors
/// `wrong-state` for a difference that is not possible while it runs.
pub fn difference(
    known: &VmSpec,
    new: &VmSpec,
    in_use: impl Fn(DiskId) -> bool,
    opens_with_both: bool,
) -> Result<Difference, Problem> {
    let refused = |what: String| {
        let what = format!("is not off, and {what} cannot change while it runs. Stop it first");
        Err(wrong_state(known, &what))
    };
    if known.vm != new.vm || (needs_both_keys(known, new) && !opens_with_both) {
        return refused("its key".to_owned());
    }
    if known.hardware.cdrom.is_some() != new.hardware.cdrom.is_some() {
        return refused("its CD-ROM drive".to_owned());
    }
    // The guest has found the one that it started with; and a host that it goes to is to give it the same.
    if known.hardware.cpu_model != new.hardware.cpu_model {
        return refused("its processor model".to_owned());
    }
    // Its disk would be plugged in as one of the guest's.
    if known.hardware.tpm != new.hardware.tpm {
        return refused("its TPM".to_owned());
    }
    let medium = known.hardware.cdrom != new.hardware.cdrom;
    let mut found = Difference { medium, ..Difference::default() };
    for disk in new.disks() {
        let used = in_use(disk.disk);
        if let Some(before) = known.disk(disk.disk).filter(|_| used) {
            let facts = disk.facts.clone().or_else(|| before.facts.clone());
            let (limits, cache) = (before.limits, before.cache);
            if *before != (DiskSpec { limits, cache, facts, ..disk.clone() }) {
                return refused(format!("disk '{}'", disk.name));
            }
        }
        match (used, disk.facts.is_some()) {
            // It was made, and is no longer to be had.
            (true, false) if known.disk(disk.disk).is_some_and(|disk| disk.facts.is_some()) => {
                found.gone_disks.push(disk.disk);
            }
            (false, true) => found.new_disks.push(disk.clone()),
            _ => {}
        }
    }
    let gone = known.disks().filter(|disk| in_use(disk.disk) && new.disk(disk.disk).is_none());
    found.gone_disks.extend(gone.map(|disk| disk.disk));
    for nic in new.nics() {
        match known.nics().find(|before| before.nic == nic.nic) {
            None => found.new_nics.push(nic.clone()),
            Some(before) if *before == (NicSpec { link: before.link, ..nic.clone() }) => {
                if before.link != nic.link {
                    found.links.push(nic.clone());
                }
            }
            Some(_) => return refused(format!("network card '{}'", nic.name)),
        }
    }
    let gone = known.nics().filter(|nic| new.nics().all(|kept| kept.nic != nic.nic));
    found.gone_nics.extend(gone.map(|nic| nic.nic));
    Ok(found)
}

/// What the VM runs with once the difference is made: what takes effect at the next start is as it was.
#[must_use]
pub fn until_next_start(known: &VmSpec, new: &VmSpec) -> VmSpec {
    let mut spec = VmSpec { vcpus: known.vcpus, memory: known.memory, ..new.clone() };
    spec.hardware.boot.clone_from(&known.hardware.boot);
    for disk in spec.disks_mut() {
        if let Some(before) = known.disk(disk.disk) {
            (disk.limits, disk.cache) = (before.limits, before.cache);
        }
    }
    spec
}

/// The specification of a VM that runs, before anything is plugged in or out: its name, its links, and the disks
/// that the guest does not have, are the new ones.
#[must_use]
pub fn before_plugging(known: &VmSpec, new: &VmSpec, in_use: impl Fn(DiskId) -> bool) -> VmSpec {
    let mut devices: Vec<Device> = Vec::new();
    for device in &known.devices {
        match device {
            Device::Disk(disk) if !in_use(disk.disk) => {}
            Device::Disk(disk) => devices.push(Device::Disk(disk.clone())),
            Device::Nic(nic) => {
                let link = new.nics().find(|it| it.nic == nic.nic).map_or(nic.link, |it| it.link);
                devices.push(Device::Nic(NicSpec { link, ..nic.clone() }));
            }
        }
    }
    let unused = new.disks().filter(|disk| !in_use(disk.disk));
    devices.extend(unused.cloned().map(Device::Disk));
    let (name, key, snapshots) = (new.name.clone(), new.key.clone(), new.snapshots.clone());
    VmSpec { name, key, devices, snapshots, ..known.clone() }
}

#[cfg(test)]
mod tests {
    use vmseal_api::boot::{BootDevice, Cdrom};
    use vmseal_api::host::DiskFacts;
    use vmseal_api::nic::{NicBackend, NicLink};

    use super::*;

    fn nic(name: &str) -> NicSpec {
        NicSpec {
            nic: NicId::new(),
            name: name.to_owned(),
            mac: "02:00:00:00:00:01".parse().unwrap(),
            model: Default::default(),
            backend: NicBackend::User { forwards: vec![] },
            link: NicLink::Up,
        }
    }

    fn running() -> (VmSpec, impl Fn(DiskId) -> bool + Clone) {
        let mut spec = crate::process::run_dir::tests::spec();
        let mut disk = super::super::tests::disk("system");
        disk.facts = Some(DiskFacts::Raw);
        let id = disk.disk;
        spec.devices = vec![Device::Disk(disk), Device::Nic(nic("nic0"))];
        (spec, move |disk| disk == id)
    }

    #[test]
    fn what_waits_for_the_next_start_is_no_difference_until_then() {
        let (known, in_use) = running();
        let mut new = VmSpec { vcpus: 9, memory: 128 << 20, name: "other".into(), ..known.clone() };
        new.disk_at_mut(0).unwrap().cache = Some(1 << 20);
        assert_eq!(difference(&known, &new, in_use, false), Ok(Difference::default()));
        let until = until_next_start(&known, &new);
        assert_eq!(until, VmSpec { name: "other".into(), ..known });
    }

    #[test]
    fn what_is_in_a_drive_changes_at_once_and_the_drive_itself_does_not() {
        let (mut known, in_use) = running();
        let drive = |medium: Option<&str>| Some(Cdrom { medium: medium.map(Into::into) });
        let without = known.clone();
        known.hardware.cdrom = drive(Some("/a.iso"));
        let mut new = known.clone();
        new.hardware.boot = vec![BootDevice::Cdrom];
        assert_eq!(difference(&known, &new, in_use.clone(), false), Ok(Difference::default()));
        assert_eq!(until_next_start(&known, &new), known);
        new.hardware.cdrom = drive(None);
        assert!(difference(&known, &new, in_use.clone(), false).unwrap().medium);
        assert_eq!(until_next_start(&known, &new).hardware.cdrom, drive(None));
        for (known, new) in [(&known, &without), (&without, &known)] {
            let refusal = difference(known, new, in_use.clone(), false).unwrap_err();
            assert!(refusal.detail.contains("CD-ROM drive"), "{refusal}");
        }
    }

    #[test]
    fn devices_are_plugged_in_and_out() {
        let (known, in_use) = running();
        let mut new = known.clone();
        let (card, mut disk) = (nic("nic1"), super::super::tests::disk("data"));
        new.devices.push(Device::Nic(card.clone()));
        new.devices.push(Device::Disk(disk.clone()));
        // A disk that is not made yet is known, and not the guest's.
        let found = difference(&known, &new, in_use.clone(), false).unwrap();
        assert_eq!((found.new_nics, found.new_disks.len()), (vec![card.clone()], 0));
        assert_eq!(before_plugging(&known, &new, in_use.clone()).disks().count(), 2);
        disk.facts = Some(DiskFacts::Raw);
        *new.disk_at_mut(1).unwrap() = disk.clone();
        assert_eq!(difference(&known, &new, in_use.clone(), false).unwrap().new_disks, [disk]);
        let none = VmSpec { devices: vec![], ..known.clone() };
        let found = difference(&known, &none, in_use, false).unwrap();
        assert_eq!((found.gone_disks.len(), found.gone_nics.len()), (1, 1));
    }

    #[test]
    fn what_cannot_change_while_it_runs_is_refused() {
        let (mut known, in_use) = running();
        known.disk_at_mut(0).unwrap().encrypted = true;
        let mut size = known.clone();
        size.disk_at_mut(0).unwrap().size += 4096;
        let mut mac = known.clone();
        let id = known.nics().next().unwrap().nic;
        mac.nic_mut(id).unwrap().mac = "02:00:00:00:00:02".parse().unwrap();
        let key = vmseal_api::host::KeyReference {
            provider: vmseal_api::id::ProviderId::new(),
            key_id: "7".to_owned(),
            check: String::new(),
        };
        let mut key = VmSpec { key: Some(key), ..known.clone() };
        let mut tpm = known.clone();
        tpm.hardware.tpm = true;
        let mut of_tpm = super::super::tests::disk("tpm");
        (of_tpm.role, of_tpm.facts) = (vmseal_api::host::DiskRole::Tpm, Some(DiskFacts::Raw));
        tpm.devices.push(Device::Disk(of_tpm));
        let keyed = key.clone();
        let mut model = known.clone();
        model.hardware.cpu_model = Some("max".to_owned());
        for (new, what) in [
            (size, "disk 'system'"),
            (mac, "card 'nic0'"),
            (keyed, "its key"),
            (tpm, "its TPM"),
            (model, "its processor model"),
        ] {
            let refusal = difference(&known, &new, in_use.clone(), false).unwrap_err();
            assert!(refusal.detail.contains(what), "{refusal}");
        }
        let mut link = known.clone();
        link.nic_mut(id).unwrap().link = NicLink::Down;
        assert_eq!(difference(&known, &link, in_use.clone(), false).unwrap().links.len(), 1);
        // A key that opens nothing yet.
        known.disk_at_mut(0).unwrap().encrypted = false;
        key.disk_at_mut(0).unwrap().encrypted = false;
        assert_eq!(difference(&known, &key, &in_use, false).unwrap(), Difference::default());
        assert_eq!(before_plugging(&known, &key, &in_use).key, key.key);
        key.disk_at_mut(0).unwrap().encrypted = true;
        difference(&known, &key, &in_use, false).unwrap_err();
    }
}
