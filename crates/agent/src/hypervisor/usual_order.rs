//! The boot order of a QEMU that runs.
//!
//! QEMU gives the order to the firmware when the machine is reset, its start included. An order for one start alone is
//! that of the command line; the usual one is set before the guest runs, and holds from the first reset on.

use serde_json::json;
use vmseal_api::boot::BootDevice;
use vmseal_api::host::{Attachment, VmSpec};

use super::boot::{Order, disk_id};
use super::cdrom;
use super::plug;
use super::qemu::{card_id, disk_device};
use super::qmp::{Qmp, QmpError};

/// What QEMU takes for no place in the order.
const NONE: i64 = -1;

/// The devices that may have a place, as QEMU knows them, with the places of an order.
fn places(spec: &VmSpec, order: &Order) -> Vec<(String, Option<usize>)> {
    let seen = spec.disks().filter(|disk| disk.role.attachment() == Attachment::Disk);
    // By either name: on the root bus, or in a port.
    let disks = seen.enumerate().flat_map(|(index, it)| {
        [disk_id(index), disk_device(it.disk)].map(|id| (id, order.of_disk(index, it)))
    });
    let nics = spec.nics().enumerate();
    let nics = nics.map(|(index, it)| (card_id(it.nic), order.place(BootDevice::Network, index)));
    let drive = (cdrom::DRIVE.to_owned(), order.place(BootDevice::Cdrom, 0));
    disks.chain([drive]).chain(nics).collect()
}

/// Sets the usual order, which holds from the next reset on. QEMU of an earlier vmseal, whose disks it does not know by
/// name, keeps what it has.
///
/// # Errors
/// QEMU's.
pub async fn restore(qmp: &Qmp, spec: &VmSpec) -> Result<(), QmpError> {
    let known = plug::devices(qmp).await?;
    if !known.contains(&disk_id(0)) {
        return Ok(());
    }
    let mut places = places(spec, &Order::of(spec, None));
    places.retain(|(device, _)| known.contains(device));
    // No two devices have the same place, also in between.
    for (device, _) in &places {
        set(qmp, device, NONE).await?;
    }
    for (device, place) in places {
        if let Some(place) = place.and_then(|place| i64::try_from(place).ok()) {
            set(qmp, &device, place).await?;
        }
    }
    Ok(())
}

async fn set(qmp: &Qmp, device: &str, place: i64) -> Result<(), QmpError> {
    let path = format!("{}/{device}", plug::DEVICES);
    let arguments = json!({"path": path, "property": "bootindex", "value": place});
    qmp.execute("qom-set", arguments).await.map(drop)
}
