//! The servers of a KMIP provider: added, removed, at another address, in another order.

use std::sync::Arc;

use axum::Json;
use axum::extract::{Path, State};
use vmseal_api::kmip::{AddKmipServer, MoveKmipServer, SetKmipServer};
use vmseal_api::model::Provider;

use super::App;
use super::auth::User;
use super::body::{self, Asked, Named};
use super::dry_run::{Intent, Outcome, ProviderOrPlan};
use super::problem::Refusal;
use super::providers::{find, shown};
use crate::providers::kmip::ServerChange;

async fn change(
    app: &App,
    name: &str,
    change: ServerChange,
    intent: Intent,
    actor: &str,
) -> Result<Outcome<Json<Provider>>, Refusal> {
    let provider = find(app, name).await?;
    if intent.dry_run {
        let step = app.providers.check_change_of_servers(&provider, &change).await?;
        return Ok(Outcome::planned("provider.servers", &provider.name, step));
    }
    app.providers.change_servers(&provider, &change, actor).await?;
    Ok(Outcome::Done(Json(shown(app, provider))))
}

/// Adds a server to a KMIP provider, as the last in the order; its certificate has to be trusted then.
#[utoipa::path(post, path = "/api/v1/providers/{provider}/servers", tag = "providers",
    params(("provider" = String, Path, description = "Its name or id"), Intent),
    request_body = AddKmipServer, responses((status = 200, body = ProviderOrPlan), Refusal))]
pub(super) async fn add(
    State(app): State<Arc<App>>,
    Named(name): Named,
    User(actor): User,
    Asked(intent): Asked<Intent>,
    body::Json(request): body::Json<AddKmipServer>,
) -> Result<Outcome<Json<Provider>>, Refusal> {
    change(&app, &name, ServerChange::Add(request), intent, &actor).await
}

/// Removes a server from a KMIP provider; its keys stay where they are.
#[utoipa::path(delete, path = "/api/v1/providers/{provider}/servers/{server}", tag = "providers",
    params(("provider" = String, Path, description = "Its name or id"),
           ("server" = String, Path, description = "The server's alias"), Intent),
    responses((status = 200, body = ProviderOrPlan), Refusal))]
pub(super) async fn remove(
    State(app): State<Arc<App>>,
    Path((name, alias)): Path<(String, String)>,
    User(actor): User,
    Asked(intent): Asked<Intent>,
) -> Result<Outcome<Json<Provider>>, Refusal> {
    change(&app, &name, ServerChange::Remove(alias), intent, &actor).await
}

/// Changes the address of a server; whom to trust for it stays as it is.
#[utoipa::path(put, path = "/api/v1/providers/{provider}/servers/{server}", tag = "providers",
    params(("provider" = String, Path, description = "Its name or id"),
           ("server" = String, Path, description = "The server's alias"), Intent),
    request_body = SetKmipServer, responses((status = 200, body = ProviderOrPlan), Refusal))]
pub(super) async fn set(
    State(app): State<Arc<App>>,
    Path((name, alias)): Path<(String, String)>,
    User(actor): User,
    Asked(intent): Asked<Intent>,
    body::Json(request): body::Json<SetKmipServer>,
) -> Result<Outcome<Json<Provider>>, Refusal> {
    let SetKmipServer { host, port } = request;
    let to = ServerChange::Set(AddKmipServer { alias, host, port });
    change(&app, &name, to, intent, &actor).await
}

/// Moves a server in the order in which servers are asked.
#[utoipa::path(post, path = "/api/v1/providers/{provider}/servers/{server}/move", tag = "providers",
    params(("provider" = String, Path, description = "Its name or id"),
           ("server" = String, Path, description = "The server's alias"), Intent),
    request_body = MoveKmipServer, responses((status = 200, body = ProviderOrPlan), Refusal))]
pub(super) async fn move_to(
    State(app): State<Arc<App>>,
    Path((name, alias)): Path<(String, String)>,
    User(actor): User,
    Asked(intent): Asked<Intent>,
    body::Json(request): body::Json<MoveKmipServer>,
) -> Result<Outcome<Json<Provider>>, Refusal> {
    change(&app, &name, ServerChange::Move(alias, request.place), intent, &actor).await
}
