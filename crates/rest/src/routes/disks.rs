//! Disks of VMs.

use std::sync::Arc;

use axum::extract::State;
use axum::extract::ws::WebSocketUpgrade;
use axum::extract::ws::rejection::WebSocketUpgradeRejection;
use axum::response::Response;
use axum::{Extension, Json};
use serde::Deserialize;
use utoipa::IntoParams;
use vmseal_api::carry::{MESSAGE_MAX, carry};
use vmseal_api::filter::ReplicaStatus;
use vmseal_api::host::Exposing;
use vmseal_api::model::{Plan, Task};
use vmseal_api::problem::{ErrorCode, Problem};
use vmseal_api::request::ExportDisk;
use vmseal_control::services::{self, Services};

use crate::answer::{Accepted, Answer};
use crate::connections::{self, Connection};
use crate::problem::ProblemResponse;
use crate::request::auth::Authenticated;
use crate::request::body::{self, QueryOf, TwoPathSegments};
use crate::request::dry_run::DryRunQuery;

/// Writes a disk of a VM that is off to a file of its host.
#[utoipa::path(post, path = "/api/v1/vms/{vm}/disks/{disk}/export", tag = "vms",
    params(("vm" = String, Path, description = "The VM's name or id"),
           ("disk" = String, Path, description = "The disk's name within the VM, or its id"), DryRunQuery),
    request_body = ExportDisk,
    responses((status = 202, body = Task), (status = 200, body = Plan), ProblemResponse))]
pub(super) async fn export(
    State(control): State<Arc<Services>>,
    Authenticated(caller): Authenticated,
    TwoPathSegments(vm, disk): TwoPathSegments,
    QueryOf(query): QueryOf<DryRunQuery>,
    body::Json(request): body::Json<ExportDisk>,
) -> Result<Answer<Accepted>, ProblemResponse> {
    Ok(Answer(
        services::disks::export(&control, &caller, &vm, &disk, request, query.dry_run)
            .await?
            .map(Accepted),
    ))
}

/// How to open the exposure of a disk.
#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub(super) struct ExposeQuery {
    /// Open an NBD connection to a disk that is exposed already; without this, expose it.
    #[serde(default)]
    #[param(value_type = Option<bool>)]
    connect: bool,
    /// Allow writes to the disk; its VM must be off. Not with `snapshot` or `sealed`.
    #[serde(default)]
    #[param(value_type = Option<bool>)]
    writable: bool,
    /// Expose what the disk held when this snapshot was taken, by its name; the VM may run, and it is read-only.
    snapshot: Option<String>,
    /// Expose the ciphertext of an encrypted disk, with its header, as an export of the format `sealed` has it: no key is
    /// needed. Without a snapshot the VM must not run. It is read-only.
    #[serde(default)]
    #[param(value_type = Option<bool>)]
    sealed: bool,
}

/// Exposes a disk over NBD, as WebSockets of binary messages. The first one keeps it exposed: its client sends `.`
/// every 10 seconds and `q` to end, receives a text if an error occurs, and the WebSocket closes when the disk is free.
/// Each further one, with `connect`, is an NBD connection. The VM does not start while a disk of it is exposed; a disk
/// of a running VM is exposed read-only. What a snapshot keeps does not change meanwhile: the snapshot is neither deleted nor
/// reverted to. When a VM that runs stops, the exposures of its disks end.
#[utoipa::path(get, path = "/api/v1/vms/{vm}/disks/{disk}/expose", tag = "vms",
    params(("vm" = String, Path, description = "The VM's name or id"),
           ("disk" = String, Path, description = "The disk's name within the VM, or its id"), ExposeQuery),
    responses((status = 101, description = "The WebSocket is open"), ProblemResponse))]
pub(super) async fn expose(
    State(control): State<Arc<Services>>,
    TwoPathSegments(vm, disk): TwoPathSegments,
    Authenticated(caller): Authenticated,
    connection: Option<Extension<Connection>>,
    QueryOf(query): QueryOf<ExposeQuery>,
    upgrade: Result<WebSocketUpgrade, WebSocketUpgradeRejection>,
) -> Result<Response, ProblemResponse> {
    let upgrade = upgrade.map_err(|error| {
        let detail = format!("an exposed disk is a WebSocket: {}", error.body_text());
        Problem::new(ErrorCode::InvalidRequest, detail)
    })?;
    let held = connections::hold(connection.as_ref())?;
    let ExposeQuery { connect, writable, snapshot, sealed } = query;
    let what = Exposing::of_query(connect, writable, snapshot.as_deref(), sealed)?;
    // Before the upgrade, so that the client can read a refusal.
    let (stream, exposure) = services::disks::expose(&control, &caller, &vm, &disk, what).await?;
    Ok(upgrade.max_message_size(MESSAGE_MAX).max_frame_size(MESSAGE_MAX).on_upgrade(
        async move |socket| {
            let _held = (held, connection, exposure);
            carry(socket, stream).await;
        },
    ))
}

/// Shows how far the replica of a disk is behind now. Refused if the disk's policy has no replica, if its VM is off,
/// and if the disk is served without its replica.
#[utoipa::path(get, path = "/api/v1/vms/{vm}/disks/{disk}/replica", tag = "vms",
    params(("vm" = String, Path, description = "The VM's name or id"),
           ("disk" = String, Path, description = "The disk's name within the VM, or its id")),
    responses((status = 200, body = ReplicaStatus), ProblemResponse))]
pub(super) async fn replica(
    State(control): State<Arc<Services>>,
    Authenticated(caller): Authenticated,
    TwoPathSegments(vm, disk): TwoPathSegments,
) -> Result<Json<ReplicaStatus>, ProblemResponse> {
    Ok(Json(services::disks::replica(&control, &caller, &vm, &disk).await?))
}
