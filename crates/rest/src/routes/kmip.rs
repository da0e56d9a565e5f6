//! What KMIP providers have and others do not: servers to trust, a client certificate, a test.

use std::sync::Arc;

use axum::Json;
use axum::extract::State;
use vmseal_api::kmip::{
    ClientName, KmipShown, Pem, ProviderTest, SetClientCertificate, TestProvider, TrustServer,
};
use vmseal_api::model::Provider;
use vmseal_control::services::{self, Services};

use crate::answer::{Answer, PemOrPlan, ProviderOrPlan};
use crate::problem::Refusal;
use crate::request::auth::Authenticated;
use crate::request::body::{self, Named, NamedPair, QueryOf};
use crate::request::dry_run::Intent;

/// Shows the certificate that a server shows now; nothing is trusted by that.
#[utoipa::path(get, path = "/api/v1/providers/{provider}/servers/{server}/certificate", tag = "providers",
    params(("provider" = String, Path, description = "Its name or id"),
           ("server" = String, Path, description = "The server's alias")),
    responses((status = 200, body = KmipShown), Refusal))]
pub(super) async fn certificate(
    State(control): State<Arc<Services>>,
    Authenticated(caller): Authenticated,
    NamedPair(name, alias): NamedPair,
) -> Result<Json<KmipShown>, Refusal> {
    Ok(Json(services::kmip::certificate(&control, &caller, &name, &alias).await?))
}

/// Trusts a server: the certificate with a fingerprint, or what authorities sign.
#[utoipa::path(post, path = "/api/v1/providers/{provider}/servers/{server}/trust", tag = "providers",
    params(("provider" = String, Path, description = "Its name or id"),
           ("server" = String, Path, description = "The server's alias"), Intent),
    request_body = TrustServer, responses((status = 200, body = ProviderOrPlan), Refusal))]
pub(super) async fn trust(
    State(control): State<Arc<Services>>,
    Authenticated(caller): Authenticated,
    NamedPair(name, alias): NamedPair,
    QueryOf(intent): QueryOf<Intent>,
    body::Json(request): body::Json<TrustServer>,
) -> Result<Answer<Json<Provider>>, Refusal> {
    Ok(Answer(
        services::kmip::trust(&control, &caller, &name, &alias, request, intent.dry_run)
            .await?
            .map(Json),
    ))
}

/// Makes a certificate request for the provider's client key, or for a new one, for somebody else to sign.
#[utoipa::path(post, path = "/api/v1/providers/{provider}/certificate-request", tag = "providers",
    params(("provider" = String, Path, description = "Its name or id"), Intent),
    request_body = ClientName, responses((status = 200, body = PemOrPlan), Refusal))]
pub(super) async fn request_certificate(
    State(control): State<Arc<Services>>,
    Authenticated(caller): Authenticated,
    Named(name): Named,
    QueryOf(intent): QueryOf<Intent>,
    body::Json(request): body::Json<ClientName>,
) -> Result<Answer<Json<Pem>>, Refusal> {
    Ok(Answer(
        services::kmip::request_certificate(&control, &caller, &name, request, intent.dry_run)
            .await?
            .map(Json),
    ))
}

/// Makes a client certificate that nobody else signs, and uses it from now on.
#[utoipa::path(post, path = "/api/v1/providers/{provider}/self-signed-certificate", tag = "providers",
    params(("provider" = String, Path, description = "Its name or id"), Intent),
    request_body = ClientName, responses((status = 200, body = PemOrPlan), Refusal))]
pub(super) async fn self_sign(
    State(control): State<Arc<Services>>,
    Authenticated(caller): Authenticated,
    Named(name): Named,
    QueryOf(intent): QueryOf<Intent>,
    body::Json(request): body::Json<ClientName>,
) -> Result<Answer<Json<Pem>>, Refusal> {
    Ok(Answer(
        services::kmip::self_sign(&control, &caller, &name, request, intent.dry_run)
            .await?
            .map(Json),
    ))
}

/// Sets the client certificate: a signed one for the key that is there, or that was made for it; or one with
/// another key.
#[utoipa::path(put, path = "/api/v1/providers/{provider}/certificate", tag = "providers",
    params(("provider" = String, Path, description = "Its name or id"), Intent),
    request_body = SetClientCertificate,
    responses((status = 200, body = ProviderOrPlan), Refusal))]
pub(super) async fn set_certificate(
    State(control): State<Arc<Services>>,
    Authenticated(caller): Authenticated,
    Named(name): Named,
    QueryOf(intent): QueryOf<Intent>,
    body::Json(request): body::Json<SetClientCertificate>,
) -> Result<Answer<Json<Provider>>, Refusal> {
    Ok(Answer(
        services::kmip::set_certificate(&control, &caller, &name, request, intent.dry_run)
            .await?
            .map(Json),
    ))
}

/// Tries every server of a provider; where that is wanted with a key, made at one and read at each.
#[utoipa::path(post, path = "/api/v1/providers/{provider}/test", tag = "providers",
    params(("provider" = String, Path, description = "Its name or id")),
    request_body = TestProvider, responses((status = 200, body = ProviderTest), Refusal))]
pub(super) async fn test(
    State(control): State<Arc<Services>>,
    Authenticated(caller): Authenticated,
    Named(name): Named,
    body::Json(request): body::Json<TestProvider>,
) -> Result<Json<ProviderTest>, Refusal> {
    Ok(Json(services::kmip::test(&control, &caller, &name, request).await?))
}
