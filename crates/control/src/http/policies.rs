//! Storage policies.

use std::sync::Arc;

use axum::Json;
use axum::extract::State;
use axum::http::StatusCode;
use vmseal_api::filter::check_caches;
use vmseal_api::id::{PolicyId, check_name};
use vmseal_api::model::{Page, Plan, Policy, Replication};
use vmseal_api::problem::{ErrorCode, Problem};
use vmseal_api::replica::check_replica_rate;
use vmseal_api::request::AddPolicy;

use super::auth::User;
use super::body::{self, Asked, Named};
use super::dry_run::{Intent, Outcome};
use super::problem::Refusal;
use super::{App, PageQuery, page};
use crate::store::events::NewEvent;
use crate::store::{Write, datastores, policies, providers};

fn shown(policy: policies::Policy) -> Policy {
    Policy {
        id: policy.id,
        name: policy.name,
        encryption: policy.encryption,
        provider: policy.provider.map(|(_, name)| name),
        allocation: policy.allocation,
        limits: policy.limits,
        cache: policy.cache,
        replica: policy.replica,
    }
}

async fn find(app: &App, name: &str) -> Result<policies::Policy, Refusal> {
    let found = policies::find(&mut *app.store.read().await?, name).await?;
    Ok(found.ok_or_else(|| Problem::not_found("policy", name))?)
}

/// Which host's it is to be is seen when a VM is made; that nobody has it can be told now.
async fn check_replica(write: &mut Write<'_>, replica: &Replication) -> Result<(), Problem> {
    check_replica_rate(replica.bytes_per_second)
        .map_err(|what| Problem::invalid("replica.bytes_per_second", what))?;
    if !datastores::called(write, &replica.datastore).await?.is_empty() {
        return Ok(());
    }
    Err(Problem {
        field: Some("replica.datastore".to_owned()),
        ..Problem::not_found("datastore", &replica.datastore)
    })
}

/// Lists the storage policies.
#[utoipa::path(get, path = "/api/v1/policies", tag = "policies", params(PageQuery),
    responses((status = 200, body = Page<Policy>), Refusal))]
pub(super) async fn list(
    State(app): State<Arc<App>>,
    Asked(query): Asked<PageQuery>,
) -> Result<Json<Page<Policy>>, Refusal> {
    let part = query.part();
    let found = policies::list(&mut *app.store.read().await?, &part).await?;
    let items = found.into_iter().map(shown).collect();
    Ok(Json(page(items, part.limit, |it: &Policy| it.id.to_string())))
}

/// Adds a storage policy.
#[utoipa::path(post, path = "/api/v1/policies", tag = "policies", params(Intent),
    request_body = AddPolicy,
    responses((status = 201, body = Policy), (status = 200, body = Plan), Refusal))]
pub(super) async fn add(
    State(app): State<Arc<App>>,
    User(actor): User,
    Asked(intent): Asked<Intent>,
    body::Json(request): body::Json<AddPolicy>,
) -> Result<Outcome<(StatusCode, Json<Policy>)>, Refusal> {
    check_name(&request.name).map_err(|error| Problem::invalid("name", error.to_string()))?;
    request.limits.check().map_err(|(field, what)| Problem::invalid(field, what))?;
    check_caches([request.cache]).map_err(|(_, what)| Problem::invalid("cache", what))?;
    let mut write = app.store.write().await?;
    if let Some(replica) = &request.replica {
        check_replica(&mut write, replica).await?;
    }
    let provider = match &request.provider {
        None => None,
        Some(_) if !request.encryption => {
            let detail = "a policy without encryption has no key provider";
            return Err(Problem::invalid("provider", detail).into());
        }
        Some(name) => {
            let found = providers::find(&mut write, name).await?;
            let found = found.ok_or_else(|| Problem {
                field: Some("provider".to_owned()),
                ..Problem::not_found("provider", name)
            })?;
            Some((found.id, found.name))
        }
    };
    let policy = policies::Policy {
        id: PolicyId::new(),
        name: request.name,
        encryption: request.encryption,
        provider,
        allocation: request.allocation,
        limits: request.limits,
        cache: request.cache,
        replica: request.replica,
    };
    policies::insert(&mut write, &policy).await?;
    let detail = if policy.encryption { "encrypts" } else { "does not encrypt" };
    let (kind, target) = ("policy.added", policy.name.as_str());
    write.event(NewEvent { kind, actor: &actor, target, detail }).await?;
    if intent.dry_run {
        let step = format!("add a policy that {detail}");
        return Ok(Outcome::planned("policy.add", target, step));
    }
    write.commit().await?;
    Ok(Outcome::Done((StatusCode::CREATED, Json(shown(policy)))))
}

/// Shows a storage policy.
#[utoipa::path(get, path = "/api/v1/policies/{policy}", tag = "policies",
    params(("policy" = String, Path, description = "Its name or id")),
    responses((status = 200, body = Policy), Refusal))]
pub(super) async fn show(
    State(app): State<Arc<App>>,
    Named(name): Named,
) -> Result<Json<Policy>, Refusal> {
    Ok(Json(shown(find(&app, &name).await?)))
}

/// Removes a storage policy that no VM has.
#[utoipa::path(delete, path = "/api/v1/policies/{policy}", tag = "policies",
    params(("policy" = String, Path, description = "Its name or id"), Intent),
    responses((status = 204, description = "It is removed"), (status = 200, body = Plan), Refusal))]
pub(super) async fn remove(
    State(app): State<Arc<App>>,
    Named(name): Named,
    User(actor): User,
    Asked(intent): Asked<Intent>,
) -> Result<Outcome<StatusCode>, Refusal> {
    let policy = find(&app, &name).await?;
    let mut write = app.store.write().await?;
    let vms = policies::uses(&mut write, policy.id).await?;
    if vms > 0 {
        let detail = format!("policy '{}' is in use (VMs: {vms}): delete them first", policy.name);
        return Err(Problem::new(ErrorCode::InUse, detail).into());
    }
    policies::delete(&mut write, policy.id).await?;
    let (kind, target) = ("policy.removed", policy.name.as_str());
    write.event(NewEvent { kind, actor: &actor, target, detail: "" }).await?;
    if intent.dry_run {
        let step = "remove it; no VM has it".to_owned();
        return Ok(Outcome::planned("policy.remove", target, step));
    }
    write.commit().await?;
    Ok(Outcome::Done(StatusCode::NO_CONTENT))
}
