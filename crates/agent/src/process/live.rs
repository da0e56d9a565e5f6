//! What a VM has only while its processes live: how QEMU has its devices, and whether its guest is paused. It is on
//! record with the processes, for an agent that adopts them.

use std::collections::BTreeMap;

use jiff::Timestamp;
use vmseal_api::host::{Attachment, Device, NicSpec, NicState, VmSpec};
use vmseal_api::id::{DiskId, NicId};

use super::panics::Panics;
use super::ports;

/// The most request queues of a disk: more gain nothing measurable for one guest.
const QUEUES_MAX: u16 = 4;

/// The most queues of all disks of a VM: what one filter process serves.
pub const DISK_QUEUES_MAX: u16 = 64;

/// See the module.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Live {
    /// Whether an operator has paused the guest.
    pub paused: bool,
    /// Whether QEMU knows how far each queue of the disks of the paused guest is: what it saves of that is whole. False while the guest
    /// runs, and where a filter has begun while it was paused.
    pub queues_known: bool,
    /// Its network cards: what they are connected to.
    pub nics: Vec<NicState>,
    /// The port that each network card is plugged into.
    pub nic_ports: BTreeMap<NicId, u32>,
    /// The disks that the guest has, in the order in which they were plugged in.
    pub disks: Vec<DiskInUse>,
    /// Whether QEMU was started with all ports, and not with those of its network cards alone.
    pub spare_ports: bool,
    /// The panics of the guest.
    pub panics: Panics,
    /// The generation of the placement that it was received with from another host; none where it was started here.
    pub received: Option<u64>,
    /// The generation that its disks had when it was handed over to another host, which may have changed them since; none
    /// while it is here.
    pub handed_over: Option<u64>,
    /// The generation that the lease of its disks had when the guest began to run here ([`crate::storage::lease`]): with a later one it has run
    /// elsewhere since. It is raised where the first disk is moved to a datastore with a later one. None where an earlier version began it.
    pub lease: Option<u64>,
    /// How much more memory its machine has than the VM is given, in bytes: see
    /// [`EMULATED_PADDING`](crate::hypervisor::qemu::EMULATED_PADDING).
    pub memory_padding: u64,
    /// Whether its network cards have ROMs though its boot order has no network: it was started so once. QEMU takes no memory of such a
    /// guest where the cards have none.
    pub card_roms: bool,
    /// Since when the guest's file systems may be frozen for a snapshot: on record before the guest is asked for that, and until it has
    /// thawed them. What an operator freezes is not on record.
    pub frozen: Option<Timestamp>,
}

/// How QEMU has a disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DiskInUse {
    /// Which disk.
    pub disk: DiskId,
    /// The number of its sockets; no two disks of a run have the same.
    pub socket: u32,
    /// Its request queues.
    pub queues: u16,
    /// The port that it is plugged into; none where it is on the root bus, or on none, and stays until the guest is off.
    pub port: Option<u32>,
    /// Whether it has grown, and QEMU has not looked at its size since.
    pub grown: bool,
}

/// How many queues each disk of a VM has that starts.
#[must_use]
pub fn queues(spec: &VmSpec) -> u16 {
    let share = usize::from(DISK_QUEUES_MAX) / spec.disks().count().max(1);
    let cpus = u16::try_from(spec.vcpus).unwrap_or(u16::MAX);
    cpus.min(QUEUES_MAX).min(u16::try_from(share).unwrap_or(QUEUES_MAX)).max(1)
}

impl Live {
    /// For a VM that starts.
    #[must_use]
    pub fn at_start(spec: &VmSpec) -> Self {
        let mut live = Self { spare_ports: true, ..Self::of_earlier_record(spec, Vec::new()) };
        for (disk, port) in ports::of_disks(spec) {
            let known = live.disks.iter_mut().filter(|known| known.disk == disk);
            known.for_each(|known| known.port = Some(port));
        }
        live
    }

    /// Of a VM whose record, of an earlier version, does not say it: every device has the place of its order.
    #[must_use]
    pub fn of_earlier_record(spec: &VmSpec, nics: Vec<NicState>) -> Self {
        let queues = queues(spec);
        // Disks that QEMU is started with are numbered as it finds them; what its firmware has comes after.
        let (seen, firmware): (Vec<_>, Vec<_>) =
            spec.disks().partition(|disk| disk.role.attachment() == Attachment::Disk);
        let disks = seen.into_iter().chain(firmware).zip(0..).map(|(disk, socket)| DiskInUse {
            disk: disk.disk,
            socket,
            queues,
            port: None,
            grown: false,
        });
        Self {
            paused: false,
            queues_known: false,
            nics,
            nic_ports: spec.nics().map(|nic| nic.nic).zip(0..).collect(),
            disks: disks.collect(),
            spare_ports: false,
            panics: Panics::default(),
            received: None,
            handed_over: None,
            lease: None,
            memory_padding: 0,
            card_roms: false,
            frozen: None,
        }
    }

    /// The same for another run of the guest, here or elsewhere, and for agents of other versions: that has a lease of its own, and a QEMU that
    /// knows its queues by what it loads.
    #[must_use]
    pub fn without_lease(&self) -> Self {
        Self { lease: None, queues_known: false, ..self.clone() }
    }

    /// Whether the guest has a device.
    #[must_use]
    pub fn has(&self, device: &Device) -> bool {
        match device {
            Device::Disk(disk) => self.disk(disk.disk).is_some(),
            Device::Nic(nic) => self.nic_ports.contains_key(&nic.nic),
        }
    }

    /// Notes that QEMU has plugged a network card in or out, as it is to be.
    pub fn note_link(&mut self, nic: &NicSpec) {
        for card in self.nics.iter_mut().filter(|card| card.nic == nic.nic) {
            card.link = Some(nic.link);
        }
    }

    /// Whether QEMU has a network card plugged in that is to be out, or the other way round.
    #[must_use]
    pub fn has_other_link(&self, nic: &NicSpec) -> bool {
        let mut links = self.nics.iter().filter(|card| card.nic == nic.nic).map(|card| card.link);
        links.any(|link| link.is_some_and(|link| link != nic.link))
    }

    /// How QEMU has a disk; none where the guest does not have it.
    #[must_use]
    pub fn disk(&self, disk: DiskId) -> Option<&DiskInUse> {
        self.disks.iter().find(|known| known.disk == disk)
    }
}
