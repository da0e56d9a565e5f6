//! The definition of a VM for an agent of an earlier vmseal.

use vmseal_api::host::version::{
    ABOUT, DESCRIPTORS, IMAGE_LAYOUTS, PANIC, SNAPSHOTS, STALLS, TREATMENT,
};
use vmseal_api::host::{AboutVm, Device, HostDescription, VmSpec};

/// A definition without what the host's agent does not know. When ways to pools were changed, which is in more than definitions, is left out
/// by [`HostClient`](vmseal_api::client::HostClient).
#[must_use]
pub fn for_agent(spec: VmSpec, description: Option<&HostDescription>) -> VmSpec {
    let knows = |feature: &str| {
        let features = description.map_or(&[][..], |host| &host.features);
        features.iter().any(|it| it == feature)
    };
    let policy = spec.policy.filter(|_| knows(DESCRIPTORS));
    let mut snapshots = if knows(SNAPSHOTS) { spec.snapshots } else { Vec::new() };
    let images = spec.images.filter(|_| knows(IMAGE_LAYOUTS));
    let hardware = if knows(PANIC) { spec.hardware } else { spec.hardware.without_crash() };
    let mut about = spec.about.filter(|_| knows(ABOUT));
    if !knows(TREATMENT) {
        about = about.map(AboutVm::without_treatment);
        snapshots.iter_mut().for_each(|snapshot| snapshot.description.clear());
    }
    let mut devices = spec.devices;
    // Its start is refused there, as its guest would wait.
    for device in devices.iter_mut().filter(|_| !knows(STALLS)) {
        if let Device::Disk(disk) = device {
            disk.limits.stall_timeout = None;
        }
    }
    VmSpec { policy, snapshots, hardware, images, about, devices, ..spec }
}
