//! Which of QEMU's ports devices are plugged into: a guest lets go only what is in a port, and QEMU gets its ports when it starts.
//!
//! ```text
//! port    0  1  2  3 │ 4  5  6  7      functions of one slot, each a bus of its own; in the guest port 0 is bus 1
//!         cards ──►  │ disks ──►
//!                ◄── │                 a disk that is plugged in when the others are taken
//! ```
//! A guest names a card by its bus (`enp1s0`), and its disks in the order of their places: those on the root bus first, then those in
//! ports. So the disks in ports are the last ones of the VM, in their order, and its first disk is always on the root bus.
//!
//! The ports are the same eight in every QEMU, and each device that is in one is on record with it. So a guest that was saved, or comes from
//! another host, has the places that it had, whichever version of vmseal started it; one that receives it needs to know no more.

use vmseal_api::host::{Attachment, DiskSpec, VmSpec};
use vmseal_api::id::DiskId;

/// The ports of each QEMU.
pub const PORTS: u32 = 8;

/// The first port of disks: VMs seldom have more network cards than come before it, and one that gets another card keeps the
/// places of its disks.
const DISKS_FROM: u32 = 4;

/// The ports that are free when a guest starts, at least: for a card and a disk that it gets while it runs.
const LEFT_FREE: u32 = 2;

/// The ports of the disks of a VM that starts. A disk that the guest sees and that has none is on the root bus, and stays until the
/// VM is off: the first disk, a disk for cloud-init that no disk with a port comes before, and those that no port is left for.
#[must_use]
pub fn of_disks(spec: &VmSpec) -> Vec<(DiskId, u32)> {
    let cards = u32::try_from(spec.nics().count()).unwrap_or(PORTS).min(PORTS);
    let from = cards.max(DISKS_FROM);
    let room = (PORTS - from).min(PORTS.saturating_sub(cards + LEFT_FREE));
    let is_data = |disk: &&DiskSpec| disk.role.is_data();
    let seen = spec.disks().filter(|disk| disk.role.attachment() == Attachment::Disk);
    let others: Vec<_> = seen.skip_while(|disk| !is_data(disk)).skip(1).collect();
    let on_root = others.len().saturating_sub(room as usize);
    // A disk for cloud-init is not removed while its guest runs: it has a port only where its place in the order needs one.
    let in_ports = others.into_iter().skip(on_root).skip_while(|disk| !is_data(disk));
    in_ports.map(|disk| disk.disk).zip(from..).collect()
}

/// The ports that a disk may be plugged into while its guest runs, the best one first, where `last` is the last one that has
/// a disk: the guest finds its disks in the order in which they came, also when it boots again.
pub fn for_another_disk(last: Option<u32>) -> impl Iterator<Item = u32> {
    let behind = last.map_or(DISKS_FROM, |last| DISKS_FROM.max(last.saturating_add(1)));
    // Those of cards last, and from the other end.
    (behind..PORTS).chain(DISKS_FROM..PORTS).chain((0..DISKS_FROM).rev())
}

/// The ports that a network card may be plugged into, the best one first.
pub fn for_another_card() -> impl Iterator<Item = u32> {
    0..PORTS
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use vmseal_api::host::{Device, DiskRole, NicSpec};
    use vmseal_api::id::NicId;
    use vmseal_api::nic::NicBackend;

    use super::*;
    use crate::process::run_dir::tests::spec;
    use crate::rules::tests::disk;

    fn card(number: usize) -> Device {
        Device::Nic(NicSpec {
            nic: NicId::new(),
            name: format!("nic{number}"),
            mac: "02:00:00:00:00:01".parse().unwrap(),
            model: Default::default(),
            backend: NicBackend::User { forwards: vec![] },
            link: Default::default(),
        })
    }

    /// The ports of the disks of a VM with so many cards, in the order of its disks.
    fn ports(cards: usize, disks: &[DiskRole]) -> Vec<Option<u32>> {
        let mut of = spec();
        let disks = disks.iter().map(|role| DiskSpec { role: *role, ..disk("disk") });
        of.devices = disks.map(Device::Disk).chain((0..cards).map(card)).collect();
        let found = of_disks(&of);
        let port_of = |disk: &DiskSpec| found.iter().find(|(known, _)| *known == disk.disk);
        of.disks().map(|disk| port_of(disk).map(|(_, port)| *port)).collect()
    }

    #[test]
    fn disks_behind_the_first_are_in_ports_in_their_order() {
        use DiskRole::{CloudInit, Data, Tpm, UefiVariables};
        assert!(ports(1, &[]).is_empty());
        assert_eq!(ports(1, &[Data]), [None]);
        assert_eq!(ports(1, &[Data, Data, Data]), [None, Some(4), Some(5)]);
        // The firmware's and the TPM's are on no bus.
        let machine = [UefiVariables, Data, Data, Tpm];
        assert_eq!(ports(1, &machine), [None, None, Some(4), None]);
        assert_eq!(ports(1, &[Data, CloudInit]), [None, None]);
        assert_eq!(ports(1, &[Data, CloudInit, Data]), [None, None, Some(4)]);
        assert_eq!(ports(1, &[Data, Data, CloudInit]), [None, Some(4), Some(5)]);
        // More than ports: the guest finds those on the root bus first.
        let many = ports(1, &[Data; 7]);
        assert_eq!(many, [None, None, None, Some(4), Some(5), Some(6), Some(7)]);
    }

    #[test]
    fn cards_keep_their_ports_and_some_stay_free() {
        let in_ports = |cards: usize| ports(cards, &[DiskRole::Data; 9]).into_iter().flatten();
        let counts = [4, 4, 4, 3, 2, 1, 0, 0, 0];
        for (cards, count) in counts.into_iter().enumerate() {
            let found: Vec<_> = in_ports(cards).collect();
            assert_eq!(found.len(), count, "{cards} cards");
            let apart = |port: &u32| (cards..PORTS as usize).contains(&(*port as usize));
            assert!(found.iter().all(apart), "{cards} cards: {found:?}");
            let free = PORTS as usize - cards - count;
            assert!(free >= LEFT_FREE as usize || count == 0, "{cards} cards: {free} are free");
        }
    }

    #[test]
    fn a_disk_that_comes_later_is_behind_those_that_are_there() {
        assert_eq!(for_another_disk(None).next(), Some(4));
        // Not where one was that is gone, as long as there is another.
        assert_eq!(for_another_disk(Some(6)).next(), Some(7));
        assert!(for_another_disk(Some(7)).eq([4, 5, 6, 7, 3, 2, 1, 0]));
        for last in [None, Some(2), Some(5)] {
            let every: BTreeSet<_> = for_another_disk(last).collect();
            assert!(every.into_iter().eq(for_another_card()), "behind {last:?} a port is left out");
        }
    }
}
