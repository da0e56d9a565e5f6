//! What KMIP providers have and others do not: servers to trust, a client certificate, a test.

use std::sync::Arc;

use axum::Json;
use axum::extract::{Path, State};
use axum::http::StatusCode;
use vmseal_api::kmip::{
    ClientName, KmipShown, Pem, ProviderTest, SetClientCertificate, TestProvider, TrustServer,
};
use vmseal_api::model::Provider;
use vmseal_api::problem::Problem;

use super::App;
use super::about::open_passphrase;
use super::auth::User;
use super::body::{self, Asked, Named};
use super::dry_run::{Intent, Outcome, PemOrPlan, ProviderOrPlan};
use super::problem::Refusal;
use super::providers::{find, shown};
use crate::providers::kmip::{NewCertificate, NewName};

/// Shows the certificate that a server shows now; nothing is trusted by that.
#[utoipa::path(get, path = "/api/v1/providers/{provider}/servers/{server}/certificate", tag = "providers",
    params(("provider" = String, Path, description = "Its name or id"),
           ("server" = String, Path, description = "The server's alias")),
    responses((status = 200, body = KmipShown), Refusal))]
pub(super) async fn certificate(
    State(app): State<Arc<App>>,
    Path((name, alias)): Path<(String, String)>,
) -> Result<Json<KmipShown>, Refusal> {
    let provider = find(&app, &name).await?;
    Ok(Json(app.providers.shown_certificate(&provider, &alias).await?))
}

/// Trusts a server: the certificate with a fingerprint, or what authorities sign.
#[utoipa::path(post, path = "/api/v1/providers/{provider}/servers/{server}/trust", tag = "providers",
    params(("provider" = String, Path, description = "Its name or id"),
           ("server" = String, Path, description = "The server's alias"), Intent),
    request_body = TrustServer, responses((status = 200, body = ProviderOrPlan), Refusal))]
pub(super) async fn trust(
    State(app): State<Arc<App>>,
    Path((name, alias)): Path<(String, String)>,
    User(actor): User,
    Asked(intent): Asked<Intent>,
    body::Json(request): body::Json<TrustServer>,
) -> Result<Outcome<Json<Provider>>, Refusal> {
    let provider = find(&app, &name).await?;
    let providers = &app.providers;
    let planned = |detail: String| {
        Outcome::planned("provider.trust", &provider.name, format!("trust {detail}"))
    };
    match (request.fingerprint, request.authorities) {
        (Some(fingerprint), None) if intent.dry_run => {
            let checked =
                providers.check_certificate_trust(&provider, &alias, &fingerprint).await?;
            return Ok(planned(checked.1));
        }
        (None, Some(authorities)) if intent.dry_run => {
            let checked = providers.check_authorities_trust(&provider, &alias, authorities)?;
            return Ok(planned(checked.1));
        }
        (Some(fingerprint), None) => {
            app.providers.trust_certificate(&provider, &alias, &fingerprint, &actor).await?;
        }
        (None, Some(authorities)) => {
            app.providers.trust_authorities(&provider, &alias, authorities, &actor).await?;
        }
        _ => {
            let detail = "either a fingerprint or authorities";
            return Err(Problem::invalid("fingerprint", detail).into());
        }
    }
    Ok(Outcome::Done(Json(shown(&app, provider))))
}

/// The name of a client certificate, as it was asked for, with the passphrase opened.
fn new_name(app: &App, provider: &str, request: ClientName) -> Result<NewName, Problem> {
    let ClientName { common_name, replace, passphrase, force } = request;
    let passphrase = passphrase.as_ref();
    let passphrase = passphrase
        .map(|sealed| open_passphrase(app, provider, sealed, "passphrase"))
        .transpose()?;
    Ok(NewName { common_name, replace, passphrase, force })
}

/// Makes a certificate request for the provider's client key, or for a new one, for somebody else to sign.
#[utoipa::path(post, path = "/api/v1/providers/{provider}/certificate-request", tag = "providers",
    params(("provider" = String, Path, description = "Its name or id"), Intent),
    request_body = ClientName, responses((status = 200, body = PemOrPlan), Refusal))]
pub(super) async fn request_certificate(
    State(app): State<Arc<App>>,
    Named(name): Named,
    User(actor): User,
    Asked(intent): Asked<Intent>,
    body::Json(request): body::Json<ClientName>,
) -> Result<Outcome<Json<Pem>>, Refusal> {
    let provider = find(&app, &name).await?;
    let name = new_name(&app, &provider.name, request)?;
    if intent.dry_run {
        let step = match name.replace {
            true => "make a new client key, which is used as soon as its certificate is imported",
            false => "make a certificate request; nothing is changed by that",
        };
        app.providers.check_certificate_request(&provider, name)?;
        return Ok(Outcome::planned("provider.certificate", &provider.name, step.to_owned()));
    }
    let pem = app.providers.certificate_request(&provider, name, &actor).await?;
    Ok(Outcome::Done(Json(Pem { pem })))
}

/// Makes a client certificate that nobody else signs, and uses it from now on.
#[utoipa::path(post, path = "/api/v1/providers/{provider}/self-signed-certificate", tag = "providers",
    params(("provider" = String, Path, description = "Its name or id"), Intent),
    request_body = ClientName, responses((status = 200, body = PemOrPlan), Refusal))]
pub(super) async fn self_sign(
    State(app): State<Arc<App>>,
    Named(name): Named,
    User(actor): User,
    Asked(intent): Asked<Intent>,
    body::Json(request): body::Json<ClientName>,
) -> Result<Outcome<Json<Pem>>, Refusal> {
    let provider = find(&app, &name).await?;
    let name = new_name(&app, &provider.name, request)?;
    if intent.dry_run {
        let step =
            format!("make a certificate for '{}', and show it to its servers", name.common_name);
        app.providers.check_self_sign(&provider, name).await?;
        return Ok(Outcome::planned("provider.certificate", &provider.name, step));
    }
    let pem = app.providers.self_sign(&provider, name, &actor).await?;
    Ok(Outcome::Done(Json(Pem { pem })))
}

/// Sets the client certificate: a signed one for the key that is there, or that was made for it; or one with
/// another key.
#[utoipa::path(put, path = "/api/v1/providers/{provider}/certificate", tag = "providers",
    params(("provider" = String, Path, description = "Its name or id"), Intent),
    request_body = SetClientCertificate,
    responses((status = 200, body = ProviderOrPlan), Refusal))]
pub(super) async fn set_certificate(
    State(app): State<Arc<App>>,
    Named(name): Named,
    User(actor): User,
    Asked(intent): Asked<Intent>,
    body::Json(request): body::Json<SetClientCertificate>,
) -> Result<Outcome<Json<Provider>>, Refusal> {
    let provider = find(&app, &name).await?;
    let open = |sealed: &Option<_>, field| {
        let sealed = sealed.as_ref();
        sealed.map(|sealed| open_passphrase(&app, &provider.name, sealed, field)).transpose()
    };
    let key = open(&request.private_key, "private_key")?;
    let passphrase = open(&request.passphrase, "passphrase")?;
    let SetClientCertificate { certificate, replace, force, .. } = request;
    let new = NewCertificate { certificate, key, passphrase, replace, force };
    if intent.dry_run {
        app.providers.check_certificate(&provider, new).await?;
        let step = "show this certificate to its servers".to_owned();
        return Ok(Outcome::planned("provider.certificate", &provider.name, step));
    }
    app.providers.set_certificate(&provider, new, &actor).await?;
    Ok(Outcome::Done(Json(shown(&app, provider))))
}

/// Tries every server of a provider; where that is wanted with a key, made at one and read at each.
#[utoipa::path(post, path = "/api/v1/providers/{provider}/test", tag = "providers",
    params(("provider" = String, Path, description = "Its name or id")),
    request_body = TestProvider, responses((status = 200, body = ProviderTest), Refusal))]
pub(super) async fn test(
    State(app): State<Arc<App>>,
    Named(name): Named,
    User(actor): User,
    body::Json(request): body::Json<TestProvider>,
) -> Result<(StatusCode, Json<ProviderTest>), Refusal> {
    let provider = find(&app, &name).await?;
    let tested = app.providers.test(&provider, request.key, &actor).await?;
    Ok((StatusCode::OK, Json(tested)))
}
