//! Storage policies.

use vmseal_api::datastore::Messenger;
use vmseal_api::filter::check_caches;
use vmseal_api::hardware::check_cpu_model;
use vmseal_api::id::{PolicyId, check_name};
use vmseal_api::migration::check_downtime;
use vmseal_api::model::{Page, Plan, Policy, Replication};
use vmseal_api::osd_encryption::AskedOsds;
use vmseal_api::problem::{ErrorCode, Problem};
use vmseal_api::replica::check_replica_rate;
use vmseal_api::request::AddPolicy;

use super::caller::{Caller, Privilege};
use super::hardware::warn_of_model;
use super::{Outcome, PageRequest, Services, page_of};
use crate::store::events::NewEvent;
use crate::store::{Write, datastores, policies, providers, tasks};

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
        cpu_model: policy.cpu_model,
        downtime_milliseconds: policy.downtime_milliseconds,
        messenger: policy.messenger,
        osd_encryption: policy.osd_encryption,
        redundancy: policy.redundancy,
        image_layout: policy.image_layout,
    }
}

async fn find(services: &Services, name: &str) -> Result<policies::Policy, Problem> {
    let found = policies::find(&mut *services.store.read().await?, name).await?;
    found.ok_or_else(|| Problem::not_found("policy", name))
}

/// The host is known only when a VM is created; but a datastore that no host has is refused now. What is wrong is said of
/// the fields with these names.
pub(super) async fn check_replica(
    write: &mut Write<'_>,
    replica: &Replication,
    [datastore, rate]: [&str; 2],
) -> Result<(), Problem> {
    check_replica_rate(replica.bytes_per_second).map_err(|what| Problem::invalid(rate, what))?;
    if !datastores::called(write, &replica.datastore).await?.is_empty() {
        return Ok(());
    }
    Err(Problem {
        field: Some(datastore.to_owned()),
        ..Problem::not_found("datastore", &replica.datastore)
    })
}

/// Lists the storage policies.
pub async fn list(
    services: &Services,
    caller: &Caller,
    request: PageRequest,
) -> Result<Page<Policy>, Problem> {
    caller.require(Privilege::Read)?;
    let part = request.part();
    let found = policies::list(&mut *services.store.read().await?, &part).await?;
    let items = found.into_iter().map(shown).collect();
    Ok(page_of(items, part.limit, |it: &Policy| it.id.to_string()))
}

/// What a policy asks of a messenger: `crc` is nothing.
pub(super) fn asked_messenger(asked: Option<Messenger>) -> Option<Messenger> {
    asked.filter(|asked| *asked == Messenger::Secure)
}

/// What a policy asks of OSDs: `any` is nothing.
pub(super) fn asked_osds(asked: Option<AskedOsds>) -> Option<AskedOsds> {
    asked.filter(|asked| *asked == AskedOsds::Required)
}

/// Adds a storage policy.
pub async fn add(
    services: &Services,
    caller: &Caller,
    request: AddPolicy,
    dry_run: bool,
) -> Result<Outcome<Policy>, Problem> {
    caller.require(Privilege::ManagePolicies)?;
    check_name(&request.name).map_err(|error| Problem::invalid("name", error.to_string()))?;
    request.limits.check().map_err(|(field, what)| Problem::invalid(field, what))?;
    check_caches([request.cache]).map_err(|(_, what)| Problem::invalid("cache", what))?;
    let redundancy = request.redundancy;
    redundancy
        .check()
        .map_err(|(field, what)| Problem::invalid(format!("redundancy.{field}"), what))?;
    let layout = request.image_layout;
    layout
        .check()
        .map_err(|(field, what)| Problem::invalid(format!("image_layout.{field}"), what))?;
    if let Some(model) = &request.cpu_model {
        check_cpu_model(model).map_err(|what| Problem::invalid("cpu_model", what))?;
    }
    if let Some(downtime) = request.downtime_milliseconds {
        check_downtime(downtime).map_err(|what| Problem::invalid("downtime_milliseconds", what))?;
    }
    // Before the transaction, which nobody may hold while a host is asked.
    let mut warnings = match dry_run {
        true => warn_of_model(services, request.cpu_model.as_deref()).await?,
        false => Vec::new(),
    };
    warnings.extend(redundancy.risk());
    let mut write = services.store.write().await?;
    if let Some(replica) = &request.replica {
        check_replica(&mut write, replica, ["replica.datastore", "replica.bytes_per_second"])
            .await?;
    }
    let provider = match &request.provider {
        None => None,
        Some(_) if !request.encryption => {
            let detail = "a policy without encryption has no key provider";
            return Err(Problem::invalid("provider", detail));
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
        cpu_model: request.cpu_model,
        downtime_milliseconds: request.downtime_milliseconds,
        messenger: asked_messenger(request.messenger),
        osd_encryption: asked_osds(request.osd_encryption),
        redundancy,
        image_layout: layout,
    };
    policies::insert(&mut write, &policy).await?;
    let detail = if policy.encryption { "encrypts" } else { "does not encrypt" };
    let (kind, target) = ("policy.created", policy.name.as_str());
    write.event(NewEvent { kind, actor: caller.name(), target, detail }).await?;
    if dry_run {
        let (kind, target) = ("policy.create".to_owned(), target.to_owned());
        let steps = vec![format!("add a policy that {detail}")];
        return Ok(Outcome::Planned(Plan { kind, target, steps, warnings, ..Plan::default() }));
    }
    write.commit().await?;
    Ok(Outcome::Done(shown(policy)))
}

/// Shows a storage policy.
pub async fn show(services: &Services, caller: &Caller, name: &str) -> Result<Policy, Problem> {
    caller.require(Privilege::Read)?;
    Ok(shown(find(services, name).await?))
}

/// Refuses while a task is about to give the policy to a VM: what the task has begun with would change.
pub(super) async fn require_ungiven(
    write: &mut Write<'_>,
    policy: &policies::Policy,
) -> Result<(), Problem> {
    let open = tasks::open(write).await?;
    let Some(task) = open.iter().find(|it| it.operation.next_policy() == Some(policy.id)) else {
        return Ok(());
    };
    let detail = format!(
        "task {} ({}) gives policy '{}' to VM '{}': wait for it (vmseal task wait {}) or cancel it",
        task.id,
        task.operation.kind(),
        policy.name,
        task.target,
        task.id
    );
    Err(Problem::new(ErrorCode::InUse, detail))
}

/// Removes a storage policy that no VM has.
pub async fn remove(
    services: &Services,
    caller: &Caller,
    name: &str,
    dry_run: bool,
) -> Result<Outcome<()>, Problem> {
    caller.require(Privilege::ManagePolicies)?;
    let policy = find(services, name).await?;
    let mut write = services.store.write().await?;
    require_ungiven(&mut write, &policy).await?;
    let vms = policies::uses(&mut write, policy.id).await?;
    if vms > 0 {
        let detail = format!(
            "policy '{}' is in use (VMs: {vms}): give them another policy (vmseal vm set VM --policy NAME), or delete them first",
            policy.name
        );
        return Err(Problem::new(ErrorCode::InUse, detail));
    }
    policies::delete(&mut write, policy.id).await?;
    let (kind, target) = ("policy.deleted", policy.name.as_str());
    write.event(NewEvent { kind, actor: caller.name(), target, detail: "" }).await?;
    if dry_run {
        let step = "remove it; no VM has it".to_owned();
        return Ok(Outcome::planned("policy.delete", target, step));
    }
    write.commit().await?;
    Ok(Outcome::Done(()))
}
