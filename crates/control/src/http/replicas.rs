//! How far replicas of disks are behind. The filter that writes one alone knows; the inventory does not.

use std::sync::Arc;

use axum::Json;
use axum::extract::State;
use vmseal_api::filter::ReplicaStatus;

use super::App;
use super::body::NamedPair;
use super::disks::find;
use super::problem::Refusal;
use super::vms::require_ready;

/// Shows how far the replica of a disk is behind, now. Refused for a disk that its policy gave none, while its VM is
/// off, and where the disk is served without it.
#[utoipa::path(get, path = "/api/v1/vms/{vm}/disks/{disk}/replica", tag = "vms",
    params(("vm" = String, Path, description = "The VM's name or id"),
           ("disk" = String, Path, description = "The disk's name within the VM, or its id")),
    responses((status = 200, body = ReplicaStatus), Refusal))]
pub(super) async fn show(
    State(app): State<Arc<App>>,
    NamedPair(vm, disk): NamedPair,
) -> Result<Json<ReplicaStatus>, Refusal> {
    let (vm, disk) = find(&app, &vm, &disk).await?;
    require_ready(&vm)?;
    let agent = app.hosts.connected(vm.host)?;
    Ok(Json(agent.replica(vm.id, disk.id).await?))
}
