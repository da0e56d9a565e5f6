//! Routes of KMIP providers only: trust in servers, a client certificate, a test.

use std::sync::Arc;

use axum::Json;
use axum::extract::State;
use vmseal_api::kmip::{
    ClientName, KmipShown, Pem, ProviderTest, SetClientCertificate, TestProvider, TrustServer,
};
use vmseal_api::model::Provider;
use vmseal_control::services::{self, Services};

use crate::answer::{Answer, PemOrPlan, ProviderOrPlan};
use crate::problem::ProblemResponse;
use crate::request::auth::Authenticated;
use crate::request::body::{self, PathSegment, QueryOf, TwoPathSegments};
use crate::request::dry_run::DryRunQuery;

/// Shows the current certificate of a server, without trusting it.
#[utoipa::path(get, path = "/api/v1/providers/{provider}/servers/{server}/certificate", tag = "providers",
    params(("provider" = String, Path, description = "Its name or id"),
           ("server" = String, Path, description = "The server's alias")),
    responses((status = 200, body = KmipShown), ProblemResponse))]
pub(super) async fn certificate(
    State(control): State<Arc<Services>>,
    Authenticated(caller): Authenticated,
    TwoPathSegments(name, alias): TwoPathSegments,
) -> Result<Json<KmipShown>, ProblemResponse> {
    Ok(Json(services::kmip::certificate(&control, &caller, &name, &alias).await?))
}

/// Trusts a server: the certificate with a fingerprint, or certificates that given authorities sign.
#[utoipa::path(post, path = "/api/v1/providers/{provider}/servers/{server}/trust", tag = "providers",
    params(("provider" = String, Path, description = "Its name or id"),
           ("server" = String, Path, description = "The server's alias"), DryRunQuery),
    request_body = TrustServer, responses((status = 200, body = ProviderOrPlan), ProblemResponse))]
pub(super) async fn trust(
    State(control): State<Arc<Services>>,
    Authenticated(caller): Authenticated,
    TwoPathSegments(name, alias): TwoPathSegments,
    QueryOf(query): QueryOf<DryRunQuery>,
    body::Json(request): body::Json<TrustServer>,
) -> Result<Answer<Json<Provider>>, ProblemResponse> {
    Ok(Answer(
        services::kmip::trust(&control, &caller, &name, &alias, request, query.dry_run)
            .await?
            .map(Json),
    ))
}

/// Makes a certificate request for the provider's client key or for a new one, for an authority to sign.
#[utoipa::path(post, path = "/api/v1/providers/{provider}/certificate-request", tag = "providers",
    params(("provider" = String, Path, description = "Its name or id"), DryRunQuery),
    request_body = ClientName, responses((status = 200, body = PemOrPlan), ProblemResponse))]
pub(super) async fn request_certificate(
    State(control): State<Arc<Services>>,
    Authenticated(caller): Authenticated,
    PathSegment(name): PathSegment,
    QueryOf(query): QueryOf<DryRunQuery>,
    body::Json(request): body::Json<ClientName>,
) -> Result<Answer<Json<Pem>>, ProblemResponse> {
    Ok(Answer(
        services::kmip::request_certificate(&control, &caller, &name, request, query.dry_run)
            .await?
            .map(Json),
    ))
}

/// Makes a self-signed client certificate, and uses it from now on.
#[utoipa::path(post, path = "/api/v1/providers/{provider}/self-signed-certificate", tag = "providers",
    params(("provider" = String, Path, description = "Its name or id"), DryRunQuery),
    request_body = ClientName, responses((status = 200, body = PemOrPlan), ProblemResponse))]
pub(super) async fn self_sign(
    State(control): State<Arc<Services>>,
    Authenticated(caller): Authenticated,
    PathSegment(name): PathSegment,
    QueryOf(query): QueryOf<DryRunQuery>,
    body::Json(request): body::Json<ClientName>,
) -> Result<Answer<Json<Pem>>, ProblemResponse> {
    Ok(Answer(
        services::kmip::self_sign(&control, &caller, &name, request, query.dry_run)
            .await?
            .map(Json),
    ))
}

/// Sets the client certificate: a signed one for the provider's key or for the key of its certificate request; or one
/// with another key.
#[utoipa::path(put, path = "/api/v1/providers/{provider}/certificate", tag = "providers",
    params(("provider" = String, Path, description = "Its name or id"), DryRunQuery),
    request_body = SetClientCertificate,
    responses((status = 200, body = ProviderOrPlan), ProblemResponse))]
pub(super) async fn set_certificate(
    State(control): State<Arc<Services>>,
    Authenticated(caller): Authenticated,
    PathSegment(name): PathSegment,
    QueryOf(query): QueryOf<DryRunQuery>,
    body::Json(request): body::Json<SetClientCertificate>,
) -> Result<Answer<Json<Provider>>, ProblemResponse> {
    Ok(Answer(
        services::kmip::set_certificate(&control, &caller, &name, request, query.dry_run)
            .await?
            .map(Json),
    ))
}

/// Tests every server of a provider; on request also creates a key at one and reads it at each.
#[utoipa::path(post, path = "/api/v1/providers/{provider}/test", tag = "providers",
    params(("provider" = String, Path, description = "Its name or id")),
    request_body = TestProvider, responses((status = 200, body = ProviderTest), ProblemResponse))]
pub(super) async fn test(
    State(control): State<Arc<Services>>,
    Authenticated(caller): Authenticated,
    PathSegment(name): PathSegment,
    body::Json(request): body::Json<TestProvider>,
) -> Result<Json<ProviderTest>, ProblemResponse> {
    Ok(Json(services::kmip::test(&control, &caller, &name, request).await?))
}
