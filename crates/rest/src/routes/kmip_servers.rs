//! The servers of a KMIP provider: added, removed, at another address, in another order.

use std::sync::Arc;

use axum::Json;
use axum::extract::State;
use vmseal_api::kmip::{AddKmipServer, MoveKmipServer, SetKmipServer};
use vmseal_api::model::Provider;
use vmseal_control::services::{self, Services};

use crate::answer::{Answer, ProviderOrPlan};
use crate::problem::Refusal;
use crate::request::auth::Authenticated;
use crate::request::body::{self, Named, NamedPair, QueryOf};
use crate::request::dry_run::Intent;

/// Adds a server to a KMIP provider, as the last in the order; its certificate has to be trusted then.
#[utoipa::path(post, path = "/api/v1/providers/{provider}/servers", tag = "providers",
    params(("provider" = String, Path, description = "Its name or id"), Intent),
    request_body = AddKmipServer, responses((status = 200, body = ProviderOrPlan), Refusal))]
pub(super) async fn add(
    State(control): State<Arc<Services>>,
    Authenticated(caller): Authenticated,
    Named(name): Named,
    QueryOf(intent): QueryOf<Intent>,
    body::Json(request): body::Json<AddKmipServer>,
) -> Result<Answer<Json<Provider>>, Refusal> {
    Ok(Answer(
        services::kmip::add_server(&control, &caller, &name, request, intent.dry_run)
            .await?
            .map(Json),
    ))
}

/// Removes a server from a KMIP provider; its keys stay where they are.
#[utoipa::path(delete, path = "/api/v1/providers/{provider}/servers/{server}", tag = "providers",
    params(("provider" = String, Path, description = "Its name or id"),
           ("server" = String, Path, description = "The server's alias"), Intent),
    responses((status = 200, body = ProviderOrPlan), Refusal))]
pub(super) async fn remove(
    State(control): State<Arc<Services>>,
    Authenticated(caller): Authenticated,
    NamedPair(name, alias): NamedPair,
    QueryOf(intent): QueryOf<Intent>,
) -> Result<Answer<Json<Provider>>, Refusal> {
    Ok(Answer(
        services::kmip::remove_server(&control, &caller, &name, &alias, intent.dry_run)
            .await?
            .map(Json),
    ))
}

/// Changes the address of a server; whom to trust for it stays as it is.
#[utoipa::path(put, path = "/api/v1/providers/{provider}/servers/{server}", tag = "providers",
    params(("provider" = String, Path, description = "Its name or id"),
           ("server" = String, Path, description = "The server's alias"), Intent),
    request_body = SetKmipServer, responses((status = 200, body = ProviderOrPlan), Refusal))]
pub(super) async fn set(
    State(control): State<Arc<Services>>,
    Authenticated(caller): Authenticated,
    NamedPair(name, alias): NamedPair,
    QueryOf(intent): QueryOf<Intent>,
    body::Json(request): body::Json<SetKmipServer>,
) -> Result<Answer<Json<Provider>>, Refusal> {
    Ok(Answer(
        services::kmip::set_server(&control, &caller, &name, &alias, request, intent.dry_run)
            .await?
            .map(Json),
    ))
}

/// Moves a server in the order in which servers are asked.
#[utoipa::path(post, path = "/api/v1/providers/{provider}/servers/{server}/move", tag = "providers",
    params(("provider" = String, Path, description = "Its name or id"),
           ("server" = String, Path, description = "The server's alias"), Intent),
    request_body = MoveKmipServer, responses((status = 200, body = ProviderOrPlan), Refusal))]
pub(super) async fn move_to(
    State(control): State<Arc<Services>>,
    Authenticated(caller): Authenticated,
    NamedPair(name, alias): NamedPair,
    QueryOf(intent): QueryOf<Intent>,
    body::Json(request): body::Json<MoveKmipServer>,
) -> Result<Answer<Json<Provider>>, Refusal> {
    Ok(Answer(
        services::kmip::move_server(&control, &caller, &name, &alias, request, intent.dry_run)
            .await?
            .map(Json),
    ))
}
