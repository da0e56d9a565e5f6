//! Key providers.

use std::sync::Arc;

use axum::Json;
use axum::extract::State;
use axum::http::StatusCode;
use vmseal_api::model::{Page, Plan, Provider};
use vmseal_api::request::{AddProvider, Backup, ChangePassphrase, GivePassphrase, VerifyBackup};
use vmseal_control::services::{self, Services};

use crate::answer::{Answer, BackupOrPlan, ProviderOrPlan, created, no_content};
use crate::problem::Refusal;
use crate::request::auth::Authenticated;
use crate::request::body::{self, Named, Nothing, OptionalJson, QueryOf};
use crate::request::dry_run::Intent;
use crate::request::page::PageQuery;

/// Lists the key providers.
#[utoipa::path(get, path = "/api/v1/providers", tag = "providers", params(PageQuery),
    responses((status = 200, body = Page<Provider>), Refusal))]
pub(super) async fn list(
    State(control): State<Arc<Services>>,
    Authenticated(caller): Authenticated,
    QueryOf(query): QueryOf<PageQuery>,
) -> Result<Json<Page<Provider>>, Refusal> {
    Ok(Json(services::providers::list(&control, &caller, query.into()).await?))
}

/// Adds a key provider: a native one, with a new key or from a backup, or one over KMIP.
#[utoipa::path(post, path = "/api/v1/providers", tag = "providers", params(Intent),
    request_body = AddProvider,
    responses((status = 201, body = Provider), (status = 200, body = Plan), Refusal))]
pub(super) async fn add(
    State(control): State<Arc<Services>>,
    Authenticated(caller): Authenticated,
    QueryOf(intent): QueryOf<Intent>,
    body::Json(request): body::Json<AddProvider>,
) -> Result<Answer<(StatusCode, Json<Provider>)>, Refusal> {
    Ok(Answer(
        services::providers::add(&control, &caller, request, intent.dry_run).await?.map(created),
    ))
}

/// Shows a key provider.
#[utoipa::path(get, path = "/api/v1/providers/{provider}", tag = "providers",
    params(("provider" = String, Path, description = "Its name or id")),
    responses((status = 200, body = Provider), Refusal))]
pub(super) async fn show(
    State(control): State<Arc<Services>>,
    Authenticated(caller): Authenticated,
    Named(name): Named,
) -> Result<Json<Provider>, Refusal> {
    Ok(Json(services::providers::show(&control, &caller, &name).await?))
}

/// Removes a key provider that nothing uses, with its key.
#[utoipa::path(delete, path = "/api/v1/providers/{provider}", tag = "providers",
    params(("provider" = String, Path, description = "Its name or id"), Intent),
    responses((status = 204, description = "It is removed"), (status = 200, body = Plan), Refusal))]
pub(super) async fn remove(
    State(control): State<Arc<Services>>,
    Authenticated(caller): Authenticated,
    Named(name): Named,
    QueryOf(intent): QueryOf<Intent>,
) -> Result<Answer<StatusCode>, Refusal> {
    Ok(Answer(
        services::providers::remove(&control, &caller, &name, intent.dry_run)
            .await?
            .map(no_content),
    ))
}

/// Gives a provider's passphrase, after a start of the server.
#[utoipa::path(post, path = "/api/v1/providers/{provider}/unlock", tag = "providers",
    params(("provider" = String, Path, description = "Its name or id"), Intent),
    request_body = GivePassphrase, responses((status = 200, body = ProviderOrPlan), Refusal))]
pub(super) async fn unlock(
    State(control): State<Arc<Services>>,
    Authenticated(caller): Authenticated,
    Named(name): Named,
    QueryOf(intent): QueryOf<Intent>,
    body::Json(request): body::Json<GivePassphrase>,
) -> Result<Answer<Json<Provider>>, Refusal> {
    Ok(Answer(
        services::providers::unlock(&control, &caller, &name, request, intent.dry_run)
            .await?
            .map(Json),
    ))
}

/// Changes a provider's passphrase.
#[utoipa::path(post, path = "/api/v1/providers/{provider}/passphrase", tag = "providers",
    params(("provider" = String, Path, description = "Its name or id"), Intent),
    request_body = ChangePassphrase, responses((status = 200, body = ProviderOrPlan), Refusal))]
pub(super) async fn change_passphrase(
    State(control): State<Arc<Services>>,
    Authenticated(caller): Authenticated,
    Named(name): Named,
    QueryOf(intent): QueryOf<Intent>,
    body::Json(request): body::Json<ChangePassphrase>,
) -> Result<Answer<Json<Provider>>, Refusal> {
    Ok(Answer(
        services::providers::change_passphrase(&control, &caller, &name, request, intent.dry_run)
            .await?
            .map(Json),
    ))
}

/// Gives a backup of the provider's key, and of the settings of a KMIP provider, sealed under the passphrase of
/// the request.
#[utoipa::path(post, path = "/api/v1/providers/{provider}/backup", tag = "providers",
    params(("provider" = String, Path, description = "Its name or id"), Intent),
    request_body = GivePassphrase, responses((status = 200, body = BackupOrPlan), Refusal))]
pub(super) async fn backup(
    State(control): State<Arc<Services>>,
    Authenticated(caller): Authenticated,
    Named(name): Named,
    QueryOf(intent): QueryOf<Intent>,
    body::Json(request): body::Json<GivePassphrase>,
) -> Result<Answer<Json<Backup>>, Refusal> {
    Ok(Answer(
        services::providers::backup(&control, &caller, &name, request, intent.dry_run)
            .await?
            .map(Json),
    ))
}

/// Verifies a backup; the provider makes keys from the first success on.
#[utoipa::path(post, path = "/api/v1/providers/{provider}/verify", tag = "providers",
    params(("provider" = String, Path, description = "Its name or id"), Intent),
    request_body = VerifyBackup, responses((status = 200, body = ProviderOrPlan), Refusal))]
pub(super) async fn verify(
    State(control): State<Arc<Services>>,
    Authenticated(caller): Authenticated,
    Named(name): Named,
    QueryOf(intent): QueryOf<Intent>,
    body::Json(request): body::Json<VerifyBackup>,
) -> Result<Answer<Json<Provider>>, Refusal> {
    Ok(Answer(
        services::providers::verify(&control, &caller, &name, request, intent.dry_run)
            .await?
            .map(Json),
    ))
}

/// Makes a provider the default one.
#[utoipa::path(post, path = "/api/v1/providers/{provider}/default", tag = "providers",
    params(("provider" = String, Path, description = "Its name or id"), Intent),
    responses((status = 200, body = ProviderOrPlan), Refusal))]
pub(super) async fn make_default(
    State(control): State<Arc<Services>>,
    Authenticated(caller): Authenticated,
    Named(name): Named,
    QueryOf(intent): QueryOf<Intent>,
    OptionalJson(Nothing {}): OptionalJson<Nothing>,
) -> Result<Answer<Json<Provider>>, Refusal> {
    Ok(Answer(
        services::providers::make_default(&control, &caller, &name, intent.dry_run)
            .await?
            .map(Json),
    ))
}
