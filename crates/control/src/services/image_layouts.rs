//! How the images of disks in pools of Ceph are cut into objects: what policies ask for, and what there is.

use std::collections::HashMap;

use vmseal_api::host::version::IMAGE_LAYOUTS;
use vmseal_api::host::{ArrivingCopy, DatastoreSpec, HEADER_AREA, VmSpec};
use vmseal_api::id::{DiskId, HostId};
use vmseal_api::image_layout::ImageLayout;
use vmseal_api::model::Vm;
use vmseal_api::problem::{ErrorCode, Problem};
use vmseal_api::request::SetPolicy;

use super::Services;
use crate::store::disks::{Disk, Layouts};
use crate::store::policies::Policy;

/// Refuses images that the host's agent, or the cluster, cannot make as the policy has it. Of disks in directories it asks nothing.
pub(super) fn require(
    services: &Services,
    (host, name): (HostId, &str),
    policy: &Policy,
    disks: &[Disk],
) -> Result<(), Problem> {
    let mut in_pools = disks.iter().filter(|it| it.datastore.location.pool().is_some()).peekable();
    if policy.image_layout.is_usual() || in_pools.peek().is_none() {
        return Ok(());
    }
    for disk in in_pools {
        let length = disk.size.saturating_add(HEADER_AREA);
        policy.image_layout.check_length(length).map_err(|why| {
            let what = format!("policy '{}', disk '{}': {why}", policy.name, disk.name);
            Problem::new(ErrorCode::WrongState, what)
        })?;
    }
    if services.hosts.view(host).has(IMAGE_LAYOUTS) {
        return Ok(());
    }
    services.hosts.connected(host)?;
    let detail = format!(
        "the agent of host '{name}' cannot cut images into objects as policy '{}' asks: upgrade vmseal there",
        policy.name
    );
    Err(Problem::new(ErrorCode::Unsupported, detail))
}

/// Whether a host makes disks of such sizes on a datastore as a policy has it, where they arrive; says why not, for people.
pub(super) fn takes(
    knows: bool,
    policy: &Policy,
    place: &DatastoreSpec,
    mut sizes: impl Iterator<Item = u64>,
) -> Result<(), String> {
    if policy.image_layout.is_usual() || place.location.pool().is_none() {
        return Ok(());
    }
    if !knows {
        return Err(format!(
            "its agent cannot cut images into objects as policy '{}' asks: upgrade vmseal there",
            policy.name
        ));
    }
    sizes.try_for_each(|size| policy.image_layout.check_length(size.saturating_add(HEADER_AREA)))
}

/// Warns of disks in directories, where a policy that asks for objects asks for nothing.
pub(super) fn in_directories(policy: &Policy, made: &[Disk]) -> Option<String> {
    let in_directory = |disk: &&Disk| disk.datastore.location.pool().is_none();
    let disk = made.iter().filter(|disk| disk.role.is_data()).find(in_directory)?;
    (!policy.image_layout.is_usual()).then(|| {
        format!(
            "policy '{}' has images in {}, which means nothing for disk '{}': datastore '{}' is a directory",
            policy.name, policy.image_layout, disk.name, disk.datastore_name
        )
    })
}

/// Refuses copies in pools of a host whose agent cannot cut them as the VM's policy has it; says why, for people.
pub(super) fn fits(knows: bool, spec: &VmSpec, copies: &[ArrivingCopy]) -> Result<(), String> {
    let asks = spec.images.is_some_and(|layout| !layout.is_usual());
    let mut in_pools = copies.iter().filter(|it| it.datastore.location.pool().is_some());
    if knows || !asks || in_pools.next().is_none() {
        return Ok(());
    }
    let why =
        "its agent cannot cut images into objects as the VM's policy asks: upgrade vmseal there";
    Err(why.to_owned())
}

/// What a policy asks for after a change of parts of it; 0 gives a part back to the cluster.
pub(super) fn changed(before: ImageLayout, request: &SetPolicy) -> Result<ImageLayout, Problem> {
    let mut after = before;
    if let Some(size) = request.object_size {
        after.object_size = Some(size).filter(|size| *size > 0);
    }
    if request.stripe_unit == Some(0) || request.stripe_count == Some(0) {
        // One without the other means nothing.
        (after.stripe_unit, after.stripe_count) = (None, None);
    } else {
        after.stripe_unit = request.stripe_unit.or(after.stripe_unit);
        after.stripe_count = request.stripe_count.or(after.stripe_count);
    }
    after.check().map_err(|(field, what)| Problem::invalid(field, what))?;
    Ok(after)
}

/// Says of each disk of a VM how its image is cut, and how its policy would have it, where that is another way.
pub(super) fn tell(vm: &mut Vm, in_pools: &[DiskId], layouts: &HashMap<DiskId, Layouts>) {
    for disk in vm.disks.iter_mut().filter(|disk| in_pools.contains(&disk.id)) {
        let Some(Layouts { image: Some(image), policy }) = layouts.get(&disk.id) else { continue };
        disk.image_layout = Some(*image);
        disk.wanted_image_layout =
            Some(*policy).filter(|wanted| wanted != image && disk.role.is_data());
    }
}

/// The disks that are in pools.
pub(super) fn in_pools(disks: &[Disk]) -> Vec<DiskId> {
    let in_pools = disks.iter().filter(|disk| disk.datastore.location.pool().is_some());
    in_pools.map(|disk| disk.id).collect()
}

#[cfg(test)]
mod tests;
