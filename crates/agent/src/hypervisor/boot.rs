//! What the firmware starts a guest from: the places of its devices in QEMU's order.

use vmseal_api::boot::BootDevice;
use vmseal_api::host::{DiskRole, DiskSpec, VmSpec};

/// How far the places of kinds of devices are apart: a VM has fewer of each.
const APART: usize = 100;

/// The order in which the firmware tries kinds of devices.
pub struct Order(Vec<BootDevice>);

impl Order {
    /// That of a VM, or the one of this start alone.
    #[must_use]
    pub fn of(spec: &VmSpec, once: Option<BootDevice>) -> Self {
        let usual = spec.hardware.boot_order();
        let rest = usual.into_iter().filter(|device| Some(*device) != once);
        Self(once.into_iter().chain(rest).collect())
    }

    /// Whether it has such devices.
    #[must_use]
    pub fn has(&self, device: BootDevice) -> bool {
        self.0.contains(&device)
    }

    /// The place of the `index`th of such devices, from 1.
    #[must_use]
    pub fn place(&self, device: BootDevice, index: usize) -> Option<usize> {
        let kind = self.0.iter().position(|known| *known == device)?;
        Some(kind * APART + index + 1)
    }

    /// The place of the `index`th disk that the guest sees.
    #[must_use]
    pub fn of_disk(&self, index: usize, disk: &DiskSpec) -> Option<usize> {
        match disk.role {
            DiskRole::Data => self.place(BootDevice::Disk, index),
            // The firmware tries no disk that has no place in the order.
            DiskRole::CloudInit | DiskRole::UefiVariables | DiskRole::Tpm => None,
        }
    }

    /// What QEMU is told of the `index`th disk that the guest sees.
    #[must_use]
    pub fn option_of_disk(&self, index: usize, disk: &DiskSpec) -> String {
        option(self.of_disk(index, disk))
    }

    /// What QEMU is told of the `index`th of other devices.
    #[must_use]
    pub fn option(&self, device: BootDevice, index: usize) -> String {
        option(self.place(device, index))
    }
}

fn option(place: Option<usize>) -> String {
    place.map(|place| format!(",bootindex={place}")).unwrap_or_default()
}

/// How QEMU's monitor knows the `index`th of the disks that the guest sees, where that is on the root bus.
#[must_use]
pub fn disk_id(index: usize) -> String {
    format!("first-disk{index}")
}

#[cfg(test)]
mod tests {
    use vmseal_api::boot::Cdrom;

    use super::*;

    #[test]
    fn what_is_tried_once_comes_before_the_usual_order() {
        use BootDevice::{Cdrom as Drive, Disk, Network};
        let mut spec = crate::process::run_dir::tests::spec();
        let of = |spec: &VmSpec, once| {
            let order = Order::of(spec, once);
            [Disk, Drive, Network].map(|device| order.option(device, 1))
        };
        assert_eq!(of(&spec, None), [",bootindex=2", "", ""]);
        assert_eq!(of(&spec, Some(Network)), [",bootindex=102", "", ",bootindex=2"]);
        spec.hardware.cdrom = Some(Cdrom::default());
        assert_eq!(of(&spec, None), [",bootindex=2", ",bootindex=102", ""]);
        assert_eq!(of(&spec, Some(Drive)), [",bootindex=102", ",bootindex=2", ""]);
        spec.hardware.boot = vec![Network, Drive];
        assert_eq!(of(&spec, None), ["", ",bootindex=102", ",bootindex=2"]);
        assert_eq!(of(&spec, Some(Disk)), [",bootindex=2", ",bootindex=202", ",bootindex=102"]);
    }
}
