//! Hosts.

use std::sync::Arc;

use axum::extract::State;
use axum::http::StatusCode;
use axum::{Extension, Json};
use vmseal_api::model::{Host, JoinToken, Page, Plan};
use vmseal_api::problem::{ErrorCode, Problem};
use vmseal_api::request::{ChangeHost, JoinHost, Joined};

use super::auth::User;
use super::body::{self, Asked, Named, Nothing, OptionalJson};
use super::dry_run::{HostOrPlan, Intent, Outcome};
use super::problem::Refusal;
use super::{App, PageQuery, page};
use crate::connections::Connection;
use crate::hosts::join as joining;
use crate::store::events::NewEvent;
use crate::store::hosts;

fn shown(app: &App, host: hosts::Host) -> Host {
    let view = app.hosts.view(host.id);
    Host {
        id: host.id,
        name: host.name,
        address: host.address,
        connection: view.connection,
        description: view.description.or(host.description),
    }
}

pub(super) async fn find(app: &App, name: &str) -> Result<hosts::Host, Refusal> {
    let found = hosts::find(&mut *app.store.read().await?, name).await?;
    Ok(found.ok_or_else(|| Problem::not_found("host", name))?)
}

/// Lists the hosts.
#[utoipa::path(get, path = "/api/v1/hosts", tag = "hosts", params(PageQuery),
    responses((status = 200, body = Page<Host>), Refusal))]
pub(super) async fn list(
    State(app): State<Arc<App>>,
    Asked(query): Asked<PageQuery>,
) -> Result<Json<Page<Host>>, Refusal> {
    let part = query.part();
    let found = hosts::list(&mut *app.store.read().await?, &part).await?;
    let items = found.into_iter().map(|host| shown(&app, host)).collect();
    Ok(Json(page(items, part.limit, |host: &Host| host.id.to_string())))
}

/// Shows a host.
#[utoipa::path(get, path = "/api/v1/hosts/{host}", tag = "hosts",
    params(("host" = String, Path, description = "Its name or id")),
    responses((status = 200, body = Host), Refusal))]
pub(super) async fn show(
    State(app): State<Arc<App>>,
    Named(name): Named,
) -> Result<Json<Host>, Refusal> {
    Ok(Json(shown(&app, find(&app, &name).await?)))
}

/// Changes where a host's agent is called. What its certificate says stays: another machine is not taken for it.
#[utoipa::path(patch, path = "/api/v1/hosts/{host}", tag = "hosts",
    params(("host" = String, Path, description = "Its name or id"), Intent), request_body = ChangeHost,
    responses((status = 200, body = HostOrPlan), Refusal))]
pub(super) async fn change(
    State(app): State<Arc<App>>,
    Named(name): Named,
    User(actor): User,
    Asked(intent): Asked<Intent>,
    body::Json(request): body::Json<ChangeHost>,
) -> Result<Outcome<Json<Host>>, Refusal> {
    let host = find(&app, &name).await?;
    let mut write = app.store.write().await?;
    let host = joining::change_address(&mut write, &actor, host, &request.address).await?;
    if intent.dry_run {
        let step = format!("call its agent at {} from now on", host.address);
        return Ok(Outcome::planned("host.set", &host.name, step));
    }
    write.commit().await?;
    // The monitor of the old address ends.
    app.hosts.add(&host)?;
    Ok(Outcome::Done(Json(shown(&app, host))))
}

/// Removes a host that has neither datastores nor VMs.
#[utoipa::path(delete, path = "/api/v1/hosts/{host}", tag = "hosts",
    params(("host" = String, Path, description = "Its name or id"), Intent),
    responses((status = 204, description = "It is removed"), (status = 200, body = Plan), Refusal))]
pub(super) async fn remove(
    State(app): State<Arc<App>>,
    Named(name): Named,
    User(actor): User,
    Asked(intent): Asked<Intent>,
) -> Result<Outcome<StatusCode>, Refusal> {
    let host = find(&app, &name).await?;
    let mut write = app.store.write().await?;
    let (datastores, vms) = hosts::uses(&mut write, host.id).await?;
    if datastores + vms > 0 {
        let detail = format!(
            "host '{}' is in use (datastores: {datastores}, VMs: {vms}): remove them first",
            host.name
        );
        return Err(Problem::new(ErrorCode::InUse, detail).into());
    }
    hosts::delete(&mut write, host.id).await?;
    let (kind, target, detail) = ("host.removed", host.name.as_str(), host.address.as_str());
    write.event(NewEvent { kind, actor: &actor, target, detail }).await?;
    if intent.dry_run {
        let step = "remove it; it has neither datastores nor VMs".to_owned();
        return Ok(Outcome::planned("host.remove", target, step));
    }
    write.commit().await?;
    app.hosts.remove(host.id);
    Ok(Outcome::Done(StatusCode::NO_CONTENT))
}

/// Makes a one-time token that lets a machine join as a host.
#[utoipa::path(post, path = "/api/v1/hosts/tokens", tag = "hosts", params(Intent),
    responses((status = 201, body = JoinToken), (status = 200, body = Plan), Refusal))]
pub(super) async fn make_token(
    State(app): State<Arc<App>>,
    User(actor): User,
    Asked(intent): Asked<Intent>,
    OptionalJson(Nothing {}): OptionalJson<Nothing>,
) -> Result<Outcome<(StatusCode, Json<JoinToken>)>, Refusal> {
    if intent.dry_run {
        let minutes = joining::TOKEN_VALID.as_secs() / 60;
        let step = format!("make a token with which one machine may join within {minutes} minutes");
        return Ok(Outcome::planned("host.token", "", step));
    }
    let token = joining::make_token(&app.store, &app.authority, &actor).await?;
    Ok(Outcome::Done((StatusCode::CREATED, Json(token))))
}

/// Joins as a host; the token in the request is what authorizes it.
#[utoipa::path(post, path = "/api/v1/hosts/join", tag = "hosts", security(()),
    request_body = JoinHost, responses((status = 201, body = Joined), Refusal))]
pub(super) async fn join(
    State(app): State<Arc<App>>,
    peer: Option<Extension<Connection>>,
    body::Json(request): body::Json<JoinHost>,
) -> Result<(StatusCode, Json<Joined>), Refusal> {
    let source = peer.map(|Extension(connection)| connection.source());
    let (host, joined) = joining::join(&app.store, &app.authority, request, source).await?;
    app.hosts.add(&host)?;
    Ok((StatusCode::CREATED, Json(joined)))
}
