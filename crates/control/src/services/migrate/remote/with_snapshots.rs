//! VMs with snapshots that are to go to another control plane.

use vmseal_api::host::KeptRoom;
use vmseal_api::host::version::{MEASURE_KEPT, MIGRATE_APART_SNAPSHOTS, MIGRATE_SNAPSHOTS};
use vmseal_api::model::About;
use vmseal_api::problem::{ErrorCode, Problem};
use vmseal_api::remote::{ARRIVALS_KEPT, ARRIVING_SNAPSHOTS, BeginArrival};
use vmseal_api::request::BODY_MAX;

use crate::services::migrate::{copies, kept};
use crate::services::vms::require_no_clones;
use crate::services::{Services, features};
use crate::store::disks::Disk;
use crate::store::snapshots;
use crate::store::vms::Vm;

/// Refuses a VM whose snapshots would not go with it: linked clones stand on them, or one of both sides is of an earlier version.
pub(super) async fn require(
    services: &Services,
    vm: &Vm,
    (remote, about): (&str, &About),
) -> Result<(), Problem> {
    let mut read = services.store.read().await?;
    // Their files would be removed here.
    require_no_clones(&mut read, vm, None).await?;
    let known = snapshots::of_vm(&mut read, vm.id).await?;
    drop(read);
    if known.is_empty() {
        return Ok(());
    }
    features::require(services, vm, MIGRATE_SNAPSHOTS, "send disks with their snapshots")?;
    if vm.key.is_some() {
        let what = "send snapshots to a host that has another key of the VM";
        features::require(services, vm, MIGRATE_APART_SNAPSHOTS, what)?;
    }
    if about.features.iter().any(|it| it == ARRIVING_SNAPSHOTS) {
        return Ok(());
    }
    let detail = format!(
        "remote '{remote}' runs vmseal {}, which takes no VMs with snapshots ({ARRIVING_SNAPSHOTS}), and VM '{}' has some: upgrade it first, or delete them (vmseal snapshot list {1})",
        about.vmseal, vm.name
    );
    Err(Problem::new(ErrorCode::Unsupported, detail))
}

/// The room that is taken by what the snapshots of a VM keep, and by its memory where it is suspended, if there is any; or what people should know where that is not counted
/// there, as one of both sides is of an earlier version.
pub(super) async fn kept(
    services: &Services,
    (vm, disks): (&Vm, &[Disk]),
    told: &BeginArrival,
    about: &About,
) -> Result<Result<Option<KeptRoom>, String>, Problem> {
    if told.vm.snapshots.is_empty() && told.suspended.is_none() {
        return Ok(Ok(None));
    }
    let what = if told.suspended.is_some() { "saved memory takes" } else { "snapshots keep" };
    let uncounted =
        |who: String| format!("how much {what} is not counted in the room there: {who}");
    if !about.features.iter().any(|it| it == ARRIVALS_KEPT) {
        let who = format!(
            "the other server, vmseal {}, does not count it ({ARRIVALS_KEPT})",
            about.vmseal
        );
        return Ok(Err(uncounted(who)));
    }
    Ok(match kept::of(services, vm, disks).await? {
        Some(room) => Ok(Some(room)),
        None => {
            let host = &vm.host_name;
            Err(uncounted(format!("the agent of host '{host}' does not say it ({MEASURE_KEPT})")))
        }
    })
}

/// Refuses a VM whose snapshots have descriptions that do not fit into one request.
pub(super) fn require_short(told: &BeginArrival) -> Result<(), Problem> {
    let length = serde_json::to_vec(told).map_err(|error| crate::internal(&error))?.len();
    if length <= BODY_MAX {
        return Ok(());
    }
    let vm = &told.vm.name;
    let detail = format!(
        "VM '{vm}' and its snapshots are described by {length} bytes, and the other control plane reads {BODY_MAX} at most: delete snapshots with long descriptions first (vmseal snapshot list {vm})"
    );
    Err(Problem::new(ErrorCode::LimitExceeded, detail))
}

/// What people are told of what goes with the disks.
pub(super) fn told(told: &BeginArrival) -> String {
    let room = told.vm.kept.as_ref();
    let room = room.map(|room| format!(" ({})", copies::sizes(room))).unwrap_or_default();
    let own = if told.suspended.is_some() { " and its saved memory" } else { "" };
    match told.vm.snapshots.len() {
        0 if own.is_empty() => String::new(),
        0 => format!(",{own}{room},"),
        1 => format!(", and what a snapshot keeps{own}{room},"),
        many => format!(", and what {many} snapshots keep{own}{room},"),
    }
}
