//! Key providers.

use std::sync::Arc;

use axum::Json;
use axum::extract::State;
use axum::http::StatusCode;
use vmseal_api::model::{Page, Plan, Provider};
use vmseal_api::request::{AddProvider, Backup, ChangePassphrase, GivePassphrase, VerifyBackup};
use vmseal_control::services::{self, Services};

use crate::answer::{Answer, BackupOrPlan, ProviderOrPlan, created, no_content};
use crate::problem::ProblemResponse;
use crate::request::auth::Authenticated;
use crate::request::body::{self, EmptyBody, OptionalJson, PathSegment, QueryOf};
use crate::request::dry_run::DryRunQuery;
use crate::request::page::PageQuery;

/// Lists the key providers.
#[utoipa::path(get, path = "/api/v1/providers", tag = "providers", params(PageQuery),
    responses((status = 200, body = Page<Provider>), ProblemResponse))]
pub(super) async fn list(
    State(control): State<Arc<Services>>,
    Authenticated(caller): Authenticated,
    QueryOf(query): QueryOf<PageQuery>,
) -> Result<Json<Page<Provider>>, ProblemResponse> {
    Ok(Json(services::providers::list(&control, &caller, query.into()).await?))
}

/// Adds a key provider: a native one, with a new key or from a backup, or one over KMIP.
#[utoipa::path(post, path = "/api/v1/providers", tag = "providers", params(DryRunQuery),
    request_body = AddProvider,
    responses((status = 201, body = Provider), (status = 200, body = Plan), ProblemResponse))]
pub(super) async fn add(
    State(control): State<Arc<Services>>,
    Authenticated(caller): Authenticated,
    QueryOf(query): QueryOf<DryRunQuery>,
    body::Json(request): body::Json<AddProvider>,
) -> Result<Answer<(StatusCode, Json<Provider>)>, ProblemResponse> {
    Ok(Answer(
        services::providers::add(&control, &caller, request, query.dry_run).await?.map(created),
    ))
}

/// Shows a key provider.
#[utoipa::path(get, path = "/api/v1/providers/{provider}", tag = "providers",
    params(("provider" = String, Path, description = "Its name or id")),
    responses((status = 200, body = Provider), ProblemResponse))]
pub(super) async fn show(
    State(control): State<Arc<Services>>,
    Authenticated(caller): Authenticated,
    PathSegment(name): PathSegment,
) -> Result<Json<Provider>, ProblemResponse> {
    Ok(Json(services::providers::show(&control, &caller, &name).await?))
}

/// Removes a key provider that is not in use, with its key.
#[utoipa::path(delete, path = "/api/v1/providers/{provider}", tag = "providers",
    params(("provider" = String, Path, description = "Its name or id"), DryRunQuery),
    responses((status = 204, description = "It is removed"), (status = 200, body = Plan), ProblemResponse))]
pub(super) async fn remove(
    State(control): State<Arc<Services>>,
    Authenticated(caller): Authenticated,
    PathSegment(name): PathSegment,
    QueryOf(query): QueryOf<DryRunQuery>,
) -> Result<Answer<StatusCode>, ProblemResponse> {
    Ok(Answer(
        services::providers::remove(&control, &caller, &name, query.dry_run).await?.map(no_content),
    ))
}

/// Unlocks a provider with its passphrase, after a start of the server.
#[utoipa::path(post, path = "/api/v1/providers/{provider}/unlock", tag = "providers",
    params(("provider" = String, Path, description = "Its name or id"), DryRunQuery),
    request_body = GivePassphrase, responses((status = 200, body = ProviderOrPlan), ProblemResponse))]
pub(super) async fn unlock(
    State(control): State<Arc<Services>>,
    Authenticated(caller): Authenticated,
    PathSegment(name): PathSegment,
    QueryOf(query): QueryOf<DryRunQuery>,
    body::Json(request): body::Json<GivePassphrase>,
) -> Result<Answer<Json<Provider>>, ProblemResponse> {
    Ok(Answer(
        services::providers::unlock(&control, &caller, &name, request, query.dry_run)
            .await?
            .map(Json),
    ))
}

/// Changes a provider's passphrase.
#[utoipa::path(post, path = "/api/v1/providers/{provider}/passphrase", tag = "providers",
    params(("provider" = String, Path, description = "Its name or id"), DryRunQuery),
    request_body = ChangePassphrase, responses((status = 200, body = ProviderOrPlan), ProblemResponse))]
pub(super) async fn change_passphrase(
    State(control): State<Arc<Services>>,
    Authenticated(caller): Authenticated,
    PathSegment(name): PathSegment,
    QueryOf(query): QueryOf<DryRunQuery>,
    body::Json(request): body::Json<ChangePassphrase>,
) -> Result<Answer<Json<Provider>>, ProblemResponse> {
    Ok(Answer(
        services::providers::change_passphrase(&control, &caller, &name, request, query.dry_run)
            .await?
            .map(Json),
    ))
}

/// Returns a backup of the provider's key, and of the settings of a KMIP provider, sealed under the passphrase of
/// the request.
#[utoipa::path(post, path = "/api/v1/providers/{provider}/backup", tag = "providers",
    params(("provider" = String, Path, description = "Its name or id"), DryRunQuery),
    request_body = GivePassphrase, responses((status = 200, body = BackupOrPlan), ProblemResponse))]
pub(super) async fn backup(
    State(control): State<Arc<Services>>,
    Authenticated(caller): Authenticated,
    PathSegment(name): PathSegment,
    QueryOf(query): QueryOf<DryRunQuery>,
    body::Json(request): body::Json<GivePassphrase>,
) -> Result<Answer<Json<Backup>>, ProblemResponse> {
    Ok(Answer(
        services::providers::backup(&control, &caller, &name, request, query.dry_run)
            .await?
            .map(Json),
    ))
}

/// Verifies a backup; the provider creates keys from the first success on.
#[utoipa::path(post, path = "/api/v1/providers/{provider}/verify", tag = "providers",
    params(("provider" = String, Path, description = "Its name or id"), DryRunQuery),
    request_body = VerifyBackup, responses((status = 200, body = ProviderOrPlan), ProblemResponse))]
pub(super) async fn verify(
    State(control): State<Arc<Services>>,
    Authenticated(caller): Authenticated,
    PathSegment(name): PathSegment,
    QueryOf(query): QueryOf<DryRunQuery>,
    body::Json(request): body::Json<VerifyBackup>,
) -> Result<Answer<Json<Provider>>, ProblemResponse> {
    Ok(Answer(
        services::providers::verify(&control, &caller, &name, request, query.dry_run)
            .await?
            .map(Json),
    ))
}

/// Makes a provider the default one.
#[utoipa::path(post, path = "/api/v1/providers/{provider}/default", tag = "providers",
    params(("provider" = String, Path, description = "Its name or id"), DryRunQuery),
    responses((status = 200, body = ProviderOrPlan), ProblemResponse))]
pub(super) async fn make_default(
    State(control): State<Arc<Services>>,
    Authenticated(caller): Authenticated,
    PathSegment(name): PathSegment,
    QueryOf(query): QueryOf<DryRunQuery>,
    OptionalJson(EmptyBody {}): OptionalJson<EmptyBody>,
) -> Result<Answer<Json<Provider>>, ProblemResponse> {
    Ok(Answer(
        services::providers::make_default(&control, &caller, &name, query.dry_run).await?.map(Json),
    ))
}
