//! Key providers.

use std::sync::Arc;

use axum::Json;
use axum::extract::State;
use axum::http::StatusCode;
use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use vmseal_api::id::check_name;
use vmseal_api::model::{Page, Plan, Provider};
use vmseal_api::problem::Problem;
use vmseal_api::request::{AddProvider, Backup, ChangePassphrase, GivePassphrase, VerifyBackup};

use super::about::open_passphrase;
use super::auth::User;
use super::body::{self, Asked, Named, Nothing, OptionalJson};
use super::dry_run::{BackupOrPlan, Intent, Outcome, ProviderOrPlan};
use super::problem::Refusal;
use super::{App, PageQuery, page};
use crate::providers::{Providers, Restore};
use crate::store::events::NewEvent;
use crate::store::providers;

pub(super) fn shown(app: &App, provider: providers::Provider) -> Provider {
    let status = app.providers.status(&provider);
    let kmip = app.providers.kmip_details(&provider);
    Provider {
        id: provider.id,
        name: provider.name,
        kind: provider.kind,
        default: provider.default,
        status,
        kmip,
    }
}

pub(super) async fn find(app: &App, name: &str) -> Result<providers::Provider, Refusal> {
    let found = providers::find(&mut *app.store.read().await?, name).await?;
    Ok(found.ok_or_else(|| Problem::not_found("provider", name))?)
}

fn decode(backup: &str) -> Result<Vec<u8>, Problem> {
    STANDARD.decode(backup).map_err(|_| Problem::invalid("backup", "it is not base64"))
}

/// Lists the key providers.
#[utoipa::path(get, path = "/api/v1/providers", tag = "providers", params(PageQuery),
    responses((status = 200, body = Page<Provider>), Refusal))]
pub(super) async fn list(
    State(app): State<Arc<App>>,
    Asked(query): Asked<PageQuery>,
) -> Result<Json<Page<Provider>>, Refusal> {
    let part = query.part();
    let found = providers::list(&mut *app.store.read().await?, &part).await?;
    let items = found.into_iter().map(|provider| shown(&app, provider)).collect();
    Ok(Json(page(items, part.limit, |it: &Provider| it.id.to_string())))
}

/// Adds a key provider: a native one, with a new key or from a backup, or one over KMIP.
#[utoipa::path(post, path = "/api/v1/providers", tag = "providers", params(Intent),
    request_body = AddProvider,
    responses((status = 201, body = Provider), (status = 200, body = Plan), Refusal))]
pub(super) async fn add(
    State(app): State<Arc<App>>,
    User(actor): User,
    Asked(intent): Asked<Intent>,
    body::Json(request): body::Json<AddProvider>,
) -> Result<Outcome<(StatusCode, Json<Provider>)>, Refusal> {
    let name = &request.name;
    check_name(name).map_err(|error| Problem::invalid("name", error.to_string()))?;
    let passphrase = match &request.passphrase {
        Some(sealed) => Some(open_passphrase(&app, name, sealed, "passphrase")?),
        None => None,
    };
    if let Some(kmip) = &request.kmip {
        if request.backup.is_some() || request.backup_passphrase.is_some() {
            let detail = "a KMIP provider is not restored from a backup: its KMS keeps the keys";
            return Err(Problem::invalid("backup", detail).into());
        }
        if intent.dry_run {
            app.providers.check_new_kmip(name, &kmip.servers, passphrase).await?;
            return Ok(Outcome::planned("provider.add", name, "make its client key".to_owned()));
        }
        let provider = app.providers.add_kmip(name, &kmip.servers, passphrase, &actor).await?;
        return Ok(Outcome::Done((StatusCode::CREATED, Json(shown(&app, provider)))));
    }
    let restore = match (&request.backup, &request.backup_passphrase) {
        (Some(backup), Some(sealed)) => Some(Restore {
            backup: decode(backup)?,
            passphrase: open_passphrase(&app, name, sealed, "backup_passphrase")?,
        }),
        (None, None) => None,
        (Some(_), None) => {
            let detail = "the backup's passphrase is needed with the backup";
            return Err(Problem::invalid("backup_passphrase", detail).into());
        }
        (None, Some(_)) => {
            return Err(Problem::invalid("backup", "a passphrase came without a backup").into());
        }
    };
    if intent.dry_run {
        let step =
            if restore.is_some() { "restore its key from the backup" } else { "make its key" };
        app.providers.check_new(name, passphrase, restore).await?;
        return Ok(Outcome::planned("provider.add", name, step.to_owned()));
    }
    let provider = app.providers.add(name, passphrase, restore, &actor).await?;
    Ok(Outcome::Done((StatusCode::CREATED, Json(shown(&app, provider)))))
}

/// Shows a key provider.
#[utoipa::path(get, path = "/api/v1/providers/{provider}", tag = "providers",
    params(("provider" = String, Path, description = "Its name or id")),
    responses((status = 200, body = Provider), Refusal))]
pub(super) async fn show(
    State(app): State<Arc<App>>,
    Named(name): Named,
) -> Result<Json<Provider>, Refusal> {
    let provider = find(&app, &name).await?;
    Ok(Json(shown(&app, provider)))
}

/// Removes a key provider that nothing uses, with its key.
#[utoipa::path(delete, path = "/api/v1/providers/{provider}", tag = "providers",
    params(("provider" = String, Path, description = "Its name or id"), Intent),
    responses((status = 204, description = "It is removed"), (status = 200, body = Plan), Refusal))]
pub(super) async fn remove(
    State(app): State<Arc<App>>,
    Named(name): Named,
    User(actor): User,
    Asked(intent): Asked<Intent>,
) -> Result<Outcome<StatusCode>, Refusal> {
    let provider = find(&app, &name).await?;
    if intent.dry_run {
        Providers::check_unused(&mut *app.store.read().await?, &provider).await?;
        let step = "remove it with its key; nothing uses it".to_owned();
        return Ok(Outcome::planned("provider.remove", &provider.name, step));
    }
    app.providers.remove(&provider, &actor).await?;
    Ok(Outcome::Done(StatusCode::NO_CONTENT))
}

/// Gives a provider's passphrase, after a start of the server.
#[utoipa::path(post, path = "/api/v1/providers/{provider}/unlock", tag = "providers",
    params(("provider" = String, Path, description = "Its name or id"), Intent),
    request_body = GivePassphrase, responses((status = 200, body = ProviderOrPlan), Refusal))]
pub(super) async fn unlock(
    State(app): State<Arc<App>>,
    Named(name): Named,
    User(actor): User,
    Asked(intent): Asked<Intent>,
    body::Json(request): body::Json<GivePassphrase>,
) -> Result<Outcome<Json<Provider>>, Refusal> {
    let provider = find(&app, &name).await?;
    let passphrase = open_passphrase(&app, &provider.name, &request.passphrase, "passphrase")?;
    if intent.dry_run {
        app.providers.check_unlock(&provider, passphrase).await?;
        let step = "unlock it; the passphrase is the right one".to_owned();
        return Ok(Outcome::planned("provider.unlock", &provider.name, step));
    }
    app.providers.unlock(&provider, passphrase, &actor).await?;
    Ok(Outcome::Done(Json(shown(&app, provider))))
}

/// Changes a provider's passphrase.
#[utoipa::path(post, path = "/api/v1/providers/{provider}/passphrase", tag = "providers",
    params(("provider" = String, Path, description = "Its name or id"), Intent),
    request_body = ChangePassphrase, responses((status = 200, body = ProviderOrPlan), Refusal))]
pub(super) async fn change_passphrase(
    State(app): State<Arc<App>>,
    Named(name): Named,
    User(actor): User,
    Asked(intent): Asked<Intent>,
    body::Json(request): body::Json<ChangePassphrase>,
) -> Result<Outcome<Json<Provider>>, Refusal> {
    let provider = find(&app, &name).await?;
    let old = request.old.as_ref();
    let old = old.map(|old| open_passphrase(&app, &provider.name, old, "old")).transpose()?;
    let new = open_passphrase(&app, &provider.name, &request.new, "new")?;
    if intent.dry_run {
        app.providers.check_change_passphrase(&provider, old, &new).await?;
        let step = "seal its key under the new passphrase; the old one is right".to_owned();
        return Ok(Outcome::planned("provider.passphrase", &provider.name, step));
    }
    app.providers.change_passphrase(&provider, old, new, &actor).await?;
    Ok(Outcome::Done(Json(shown(&app, provider))))
}

/// Gives a backup of the provider's key, and of the settings of a KMIP provider, sealed under the passphrase of
/// the request.
#[utoipa::path(post, path = "/api/v1/providers/{provider}/backup", tag = "providers",
    params(("provider" = String, Path, description = "Its name or id"), Intent),
    request_body = GivePassphrase, responses((status = 200, body = BackupOrPlan), Refusal))]
pub(super) async fn backup(
    State(app): State<Arc<App>>,
    Named(name): Named,
    User(actor): User,
    Asked(intent): Asked<Intent>,
    body::Json(request): body::Json<GivePassphrase>,
) -> Result<Outcome<Json<Backup>>, Refusal> {
    let provider = find(&app, &name).await?;
    let passphrase = open_passphrase(&app, &provider.name, &request.passphrase, "passphrase")?;
    if intent.dry_run {
        app.providers.check_backup(&provider, &passphrase)?;
        let step = "seal its key under the passphrase, as a backup".to_owned();
        return Ok(Outcome::planned("provider.backup", &provider.name, step));
    }
    let backup = app.providers.backup(&provider, passphrase, &actor).await?;
    Ok(Outcome::Done(Json(Backup { backup: STANDARD.encode(backup) })))
}

/// Verifies a backup; the provider makes keys from the first success on.
#[utoipa::path(post, path = "/api/v1/providers/{provider}/verify", tag = "providers",
    params(("provider" = String, Path, description = "Its name or id"), Intent),
    request_body = VerifyBackup, responses((status = 200, body = ProviderOrPlan), Refusal))]
pub(super) async fn verify(
    State(app): State<Arc<App>>,
    Named(name): Named,
    User(actor): User,
    Asked(intent): Asked<Intent>,
    body::Json(request): body::Json<VerifyBackup>,
) -> Result<Outcome<Json<Provider>>, Refusal> {
    let provider = find(&app, &name).await?;
    let restore = Restore {
        backup: decode(&request.backup)?,
        passphrase: open_passphrase(&app, &provider.name, &request.passphrase, "passphrase")?,
    };
    if intent.dry_run {
        app.providers.check_verify(&provider, restore).await?;
        let step = "have it make keys from now on; the backup opens and holds its key".to_owned();
        return Ok(Outcome::planned("provider.verify", &provider.name, step));
    }
    app.providers.verify(&provider, restore, &actor).await?;
    Ok(Outcome::Done(Json(shown(&app, find(&app, &name).await?))))
}

/// Makes a provider the default one.
#[utoipa::path(post, path = "/api/v1/providers/{provider}/default", tag = "providers",
    params(("provider" = String, Path, description = "Its name or id"), Intent),
    responses((status = 200, body = ProviderOrPlan), Refusal))]
pub(super) async fn make_default(
    State(app): State<Arc<App>>,
    Named(name): Named,
    User(actor): User,
    Asked(intent): Asked<Intent>,
    OptionalJson(Nothing {}): OptionalJson<Nothing>,
) -> Result<Outcome<Json<Provider>>, Refusal> {
    let provider = find(&app, &name).await?;
    if intent.dry_run {
        let known = providers::default(&mut *app.store.read().await?).await?;
        let step = match known.filter(|known| known.id != provider.id) {
            Some(known) => {
                format!("have policies that name none use it, in place of '{}'", known.name)
            }
            None => "have policies that name none use it".to_owned(),
        };
        return Ok(Outcome::planned("provider.default", &provider.name, step));
    }
    let mut write = app.store.write().await?;
    providers::set_default(&mut write, provider.id).await?;
    let (kind, target) = ("provider.made-default", provider.name.as_str());
    let detail = "policies that name none use it";
    write.event(NewEvent { kind, actor: &actor, target, detail }).await?;
    write.commit().await?;
    app.providers.default_changed().await?;
    Ok(Outcome::Done(Json(shown(&app, find(&app, &name).await?))))
}
