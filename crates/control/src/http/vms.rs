//! Virtual machines.

use std::collections::HashSet;
use std::sync::Arc;

use axum::Json;
use axum::extract::State;
use sqlx::SqliteConnection;
use vmseal_api::filter::{CRYPT_SECTOR, SERIAL_MAX, check_caches};
use vmseal_api::host::{DatastoreSpec, ImageSource, KeyState, NewDisk, Power};
use vmseal_api::id::{DiskId, VmId, check_name};
use vmseal_api::model::{self, Disk, Lifecycle, Page, Plan, ProviderStatus, Replication, Vm};
use vmseal_api::problem::{ErrorCode, Problem};
use vmseal_api::replica::ReplicaPlace;
use vmseal_api::request::{
    CreateDisk, CreateVm, DISK_SIZE_MAX, DISK_SIZE_MIN, DISKS_MAX, MEMORY_MAX, MEMORY_MIN, StopVm,
    VCPUS_MAX,
};

use super::auth::User;
use super::body::{self, Asked, Named, Nothing, OptionalJson};
use super::dry_run::{Intent, Outcome};
use super::problem::Refusal;
use super::tasks::Accepted;
use super::{App, PageQuery, page};
use crate::store::policies::Policy;
use crate::store::tasks::Task;
use crate::store::{StoreError, Write, datastores, disks, policies, providers, vms};
use crate::tasks::{Engine, Operation};

/// How long a guest may take to shut down where nobody says otherwise, in seconds.
const SHUTDOWN_DEFAULT: u32 = 120;

/// The longest that a guest may be given, in seconds.
const SHUTDOWN_MAX: u32 = vmseal_api::host::SHUTDOWN_SECONDS_MAX;

/// The unit of a VM's memory, in bytes.
const MEMORY_UNIT: u64 = 1 << 20;

fn shown(app: &App, vm: vms::Vm, disks: Vec<disks::Disk>, provider: Option<String>) -> Vm {
    let view = app.hosts.view(vm.host);
    let seen = view.vm(vm.id);
    let disks = disks.into_iter().map(|disk| Disk {
        id: disk.id,
        name: disk.name,
        datastore: disk.datastore_name,
        size: disk.size,
        encrypted: disk.encrypted,
        allocation: disk.allocation,
        limits: disk.limits,
        cache: disk.cache,
        replica: disk.replica.map(|(place, datastore)| Replication {
            datastore,
            bytes_per_second: place.bytes_per_second,
        }),
        facts: disk.facts,
    });
    Vm {
        id: vm.id,
        name: vm.name,
        host: vm.host_name,
        policy: vm.policy_name,
        vcpus: vm.vcpus,
        memory: vm.memory,
        key: vm.key,
        provider,
        disks: disks.collect(),
        lifecycle: vm.lifecycle,
        power: seen.map(|seen| seen.power),
        key_state: seen.map(|seen| seen.key),
        stopped: seen.and_then(|seen| seen.stopped.clone()).or(vm.seen_stopped),
    }
}

async fn provider_name(
    from: &mut SqliteConnection,
    vm: &vms::Vm,
) -> Result<Option<String>, StoreError> {
    let Some(key) = &vm.key else { return Ok(None) };
    let found = providers::find(from, &key.provider.to_string()).await?;
    Ok(found.map(|provider| provider.name))
}

pub(super) async fn find(app: &App, name: &str) -> Result<(vms::Vm, Vec<disks::Disk>), Refusal> {
    let mut read = app.store.read().await?;
    let vm = vms::find(&mut read, name).await?.ok_or_else(|| Problem::not_found("VM", name))?;
    let disks = disks::of_vm(&mut read, vm.id).await?;
    Ok((vm, disks))
}

/// Lists the VMs.
#[utoipa::path(get, path = "/api/v1/vms", tag = "vms", params(PageQuery),
    responses((status = 200, body = Page<Vm>), Refusal))]
pub(super) async fn list(
    State(app): State<Arc<App>>,
    Asked(query): Asked<PageQuery>,
) -> Result<Json<Page<Vm>>, Refusal> {
    let part = query.part();
    let mut read = app.store.read().await?;
    let mut items = Vec::new();
    for vm in vms::list(&mut read, &part).await? {
        let disks = disks::of_vm(&mut read, vm.id).await?;
        let provider = provider_name(&mut read, &vm).await?;
        items.push(shown(&app, vm, disks, provider));
    }
    Ok(Json(page(items, part.limit, |it: &Vm| it.id.to_string())))
}

/// Shows a VM.
#[utoipa::path(get, path = "/api/v1/vms/{vm}", tag = "vms",
    params(("vm" = String, Path, description = "Its name or id")),
    responses((status = 200, body = Vm), Refusal))]
pub(super) async fn show(
    State(app): State<Arc<App>>,
    Named(name): Named,
) -> Result<Json<Vm>, Refusal> {
    let (vm, disks) = find(&app, &name).await?;
    let provider = provider_name(&mut *app.store.read().await?, &vm).await?;
    Ok(Json(shown(&app, vm, disks, provider)))
}

/// Makes a VM.
#[utoipa::path(post, path = "/api/v1/vms", tag = "vms", params(Intent), request_body = CreateVm,
    responses((status = 202, body = model::Task), (status = 200, body = Plan), Refusal))]
pub(super) async fn create(
    State(app): State<Arc<App>>,
    User(actor): User,
    Asked(intent): Asked<Intent>,
    body::Json(request): body::Json<CreateVm>,
) -> Result<Outcome<Accepted>, Refusal> {
    check(&request)?;
    let mut write = app.store.write().await?;
    let policy = policies::find(&mut write, &request.policy).await?.ok_or_else(|| Problem {
        field: Some("policy".to_owned()),
        ..Problem::not_found("policy", &request.policy)
    })?;
    let provider = provider_of(&app, &mut write, &policy).await?;
    let (host, made) = place(&mut write, &request.disks, &policy).await?;
    app.hosts.connected(host.id)?;
    let vm = vms::Vm {
        id: VmId::new(),
        name: request.name,
        host: host.id,
        host_name: host.name,
        policy: policy.id,
        policy_name: policy.name,
        vcpus: request.vcpus,
        memory: request.memory,
        provider: provider.map(|provider| provider.id),
        key: None,
        lifecycle: Lifecycle::Creating,
        seen_power: None,
        seen_stopped: None,
    };
    vms::insert(&mut write, &vm).await?;
    for (position, disk) in made.iter().enumerate() {
        disks::insert(&mut write, vm.id, position, disk).await?;
    }
    let operation = Operation::CreateVm { vm: vm.id };
    if intent.dry_run {
        let task = Engine::record(&mut write, operation, &vm.name, &actor).await?;
        // The inventory is not kept waiting for a host.
        drop(write);
        examine(&app, &vm, &made).await?;
        return Ok(Outcome::Planned(plan(&task, &vm)));
    }
    begin(&app, write, operation, &vm, Caller { actor: &actor, intent }).await
}

/// Has the host look whether the disks could be made.
async fn examine(app: &App, vm: &vms::Vm, made: &[disks::Disk]) -> Result<(), Problem> {
    let agent = app.hosts.connected(vm.host)?;
    let spec = crate::hosts::spec_of(vm, made);
    for (index, (disk, made)) in spec.disks().zip(made).enumerate() {
        let (disk, source) = (disk.clone(), made.image.clone());
        agent.examine_disk(NewDisk { disk, source }).await.map_err(|problem| Problem {
            field: problem.field.map(|field| format!("disks[{index}].{field}")),
            ..problem
        })?;
    }
    Ok(())
}

/// Who asks, and whether it is meant.
pub(super) struct Caller<'a> {
    pub(super) actor: &'a str,
    pub(super) intent: Intent,
}

/// Commits what is written together with a task, and begins the task; or only says what it would do.
pub(super) async fn begin(
    app: &App,
    mut write: Write<'_>,
    operation: Operation,
    vm: &vms::Vm,
    caller: Caller<'_>,
) -> Result<Outcome<Accepted>, Refusal> {
    let task = Engine::record(&mut write, operation, &vm.name, caller.actor).await?;
    if caller.intent.dry_run {
        return Ok(Outcome::Planned(plan(&task, vm)));
    }
    write.commit().await?;
    let shown = app.engine.shown(&task);
    app.engine.begin(task);
    Ok(Outcome::Done(Accepted(shown)))
}

/// What a task would do.
pub(super) fn plan(task: &Task, vm: &vms::Vm) -> Plan {
    let keyless = vm.provider.is_none();
    let steps = task.operation.steps().iter().filter(|step| !(keyless && step.needs_key()));
    Plan {
        kind: task.operation.kind().to_owned(),
        target: vm.name.clone(),
        steps: steps.map(|step| step.title().to_owned()).collect(),
    }
}

fn check(request: &CreateVm) -> Result<(), Problem> {
    check_name(&request.name).map_err(|error| Problem::invalid("name", error.to_string()))?;
    if !(1..=VCPUS_MAX).contains(&request.vcpus) {
        return Err(Problem::invalid("vcpus", format!("must be 1 to {VCPUS_MAX}")));
    }
    let memory = request.memory;
    if !(MEMORY_MIN..=MEMORY_MAX).contains(&memory) || !memory.is_multiple_of(MEMORY_UNIT) {
        let detail = format!("must be {MEMORY_MIN} to {MEMORY_MAX}, a multiple of {MEMORY_UNIT}");
        return Err(Problem::invalid("memory", detail));
    }
    if request.disks.is_empty() || request.disks.len() > DISKS_MAX {
        return Err(Problem::invalid("disks", format!("a VM has 1 to {DISKS_MAX} disks")));
    }
    let mut names = HashSet::new();
    for (index, disk) in request.disks.iter().enumerate() {
        check_disk(disk).map_err(|(field, detail)| {
            Problem::invalid(format!("disks[{index}].{field}"), detail)
        })?;
        if !names.insert(&disk.name) {
            let detail = format!("'{}' is the name of another disk of this VM", disk.name);
            return Err(Problem::invalid(format!("disks[{index}].name"), detail));
        }
    }
    Ok(())
}

fn check_disk(disk: &CreateDisk) -> Result<(), (&'static str, String)> {
    check_name(&disk.name).map_err(|error| ("name", error.to_string()))?;
    if disk.name.len() > SERIAL_MAX {
        // The guest sees it as the disk's serial number.
        return Err(("name", format!("a disk's name has at most {SERIAL_MAX} bytes")));
    }
    let sized = (DISK_SIZE_MIN..=DISK_SIZE_MAX).contains(&disk.size);
    if !sized || !disk.size.is_multiple_of(CRYPT_SECTOR.into()) {
        let detail =
            format!("must be {DISK_SIZE_MIN} to {DISK_SIZE_MAX}, a multiple of {CRYPT_SECTOR}");
        return Err(("size", detail));
    }
    match (&disk.image, disk.format) {
        (Some(path), _) if !path.is_absolute() => {
            Err(("image", "must be an absolute path".to_owned()))
        }
        (Some(_), None) => {
            Err(("format", "is needed with an image: raw or qcow2. It is never guessed".to_owned()))
        }
        (None, Some(_)) => Err(("format", "is an image's, and none is given".to_owned())),
        _ => Ok(()),
    }
}

fn source_of(disk: &CreateDisk) -> Option<ImageSource> {
    Some(ImageSource { path: disk.image.clone()?, format: disk.format? })
}

/// The provider of the keys that a policy wants; it must be able to make one.
async fn provider_of(
    app: &App,
    write: &mut Write<'_>,
    policy: &Policy,
) -> Result<Option<providers::Provider>, Problem> {
    if !policy.encryption {
        return Ok(None);
    }
    let provider = match &policy.provider {
        Some((id, _)) => providers::find(write, &id.to_string()).await?,
        None => providers::default(write).await?,
    };
    let wrong = |detail: String| Err(Problem::new(ErrorCode::WrongState, detail));
    let Some(provider) = provider else {
        return wrong(format!(
            "policy '{}' encrypts, and there is no default key provider (vmseal provider default NAME)",
            policy.name
        ));
    };
    usable(app, provider).map(Some)
}

/// A provider, if it can make keys now.
pub(super) fn usable(
    app: &App,
    provider: providers::Provider,
) -> Result<providers::Provider, Problem> {
    let wrong = |detail: String| Err(Problem::new(ErrorCode::WrongState, detail));
    let name = &provider.name;
    match app.providers.status(&provider) {
        // Asking it will tell.
        ProviderStatus::Normal | ProviderStatus::Degraded | ProviderStatus::Untried => Ok(provider),
        ProviderStatus::Sealed => wrong(format!(
            "key provider '{name}' is sealed: unlock it (vmseal provider unlock {name})"
        )),
        ProviderStatus::NeedsTrust => wrong(format!(
            "nobody has trusted a server of key provider '{name}' yet (vmseal provider trust {name})"
        )),
        ProviderStatus::NeedsCertificate => wrong(format!(
            "key provider '{name}' has no client certificate yet (vmseal provider certificate {name})"
        )),
        ProviderStatus::Failing => {
            let fault = app.providers.get(provider.id)?.known_fault();
            Err(fault.unwrap_or_else(|| {
                let detail = format!("key provider '{name}' does not answer");
                Problem::new(ErrorCode::Unreachable, detail)
            }))
        }
        ProviderStatus::NeedsBackup => wrong(format!(
            "key provider '{name}' makes no keys before its backup is verified (vmseal provider backup {name}, then verify)"
        )),
    }
}

struct OnHost {
    id: vmseal_api::id::HostId,
    name: String,
}

/// Where the disks go: datastores that exist, all of one host.
async fn place(
    write: &mut Write<'_>,
    wanted: &[CreateDisk],
    policy: &Policy,
) -> Result<(OnHost, Vec<disks::Disk>), Problem> {
    let mut host: Option<OnHost> = None;
    let mut made = Vec::new();
    for (index, disk) in wanted.iter().enumerate() {
        let field = || Some(format!("disks[{index}].datastore"));
        let found = datastores::find(write, &disk.datastore).await;
        let found = found
            .and_then(|it| it.ok_or_else(|| Problem::not_found("datastore", &disk.datastore)))
            .map_err(|problem| Problem { field: field(), ..problem })?;
        let on = host.get_or_insert(OnHost { id: found.host, name: found.host_name.clone() });
        if on.id != found.host {
            let detail = format!(
                "datastore '{}' belongs to host '{}', the first disk's to '{}'",
                found.name, found.host_name, on.name
            );
            return Err(Problem { field: field(), ..Problem::invalid("", detail) });
        }
        let datastore = DatastoreSpec { datastore: found.id, location: found.location };
        let replica = replica(write, policy, on, &datastore)
            .await
            .map_err(|detail| Problem { field: Some(format!("disks[{index}]")), ..detail })?;
        made.push(disks::Disk {
            id: DiskId::new(),
            name: disk.name.clone(),
            datastore,
            datastore_name: found.name,
            size: disk.size,
            encrypted: policy.encryption,
            allocation: policy.allocation,
            limits: policy.limits,
            cache: policy.cache,
            replica,
            image: source_of(disk),
            facts: None,
            deleting: false,
        });
    }
    let host = host.ok_or_else(|| Problem::invalid("disks", "a VM has at least one disk"))?;
    check_caches(made.iter().map(|disk| disk.cache)).map_err(|(index, what)| {
        let detail = format!("policy '{}' gives each disk a cache: {what}", policy.name);
        Problem::invalid(format!("disks[{index}]"), detail)
    })?;
    Ok((host, made))
}

/// Where the replica of a disk on `image` goes: to the datastore of this host that the policy names.
async fn replica(
    write: &mut Write<'_>,
    policy: &Policy,
    host: &OnHost,
    image: &DatastoreSpec,
) -> Result<Option<(ReplicaPlace, String)>, Problem> {
    let Some(wanted) = &policy.replica else { return Ok(None) };
    let refused = |why: String| {
        let (policy, datastore) = (&policy.name, &wanted.datastore);
        let detail =
            format!("policy '{policy}' has disks replicated to '{datastore}', which {why}");
        Problem::invalid("", detail)
    };
    let called = datastores::called(write, &wanted.datastore).await?;
    let found = called
        .into_iter()
        .find(|it| it.host == host.id)
        .ok_or_else(|| refused(format!("host '{}' does not have", host.name)))?;
    let datastore = DatastoreSpec { datastore: found.id, location: found.location };
    let place = ReplicaPlace { datastore, bytes_per_second: wanted.bytes_per_second };
    place.check(image).map_err(|(_, what)| refused(what))?;
    Ok(Some((place, found.name)))
}

/// The power of a VM, asked of its host: what is shown may be a moment old.
pub(super) async fn power(app: &App, vm: &vms::Vm) -> Result<Option<Power>, Problem> {
    let state = app.hosts.connected(vm.host)?.state_now().await?;
    Ok(state.vms.iter().find(|seen| seen.vm == vm.id).map(|seen| seen.power))
}

pub(super) fn require_ready(vm: &vms::Vm) -> Result<(), Problem> {
    let why = match vm.lifecycle {
        Lifecycle::Ready => return Ok(()),
        Lifecycle::Creating => "is not made yet",
        Lifecycle::Deleting => "is being deleted",
    };
    Err(Problem::new(ErrorCode::WrongState, format!("VM '{}' {why}", vm.name)))
}

/// Starts a VM that is off.
#[utoipa::path(post, path = "/api/v1/vms/{vm}/start", tag = "vms",
    params(("vm" = String, Path, description = "Its name or id"), Intent),
    responses((status = 202, body = model::Task), (status = 200, body = Plan), Refusal))]
pub(super) async fn start(
    State(app): State<Arc<App>>,
    Named(name): Named,
    User(actor): User,
    Asked(intent): Asked<Intent>,
    OptionalJson(Nothing {}): OptionalJson<Nothing>,
) -> Result<Outcome<Accepted>, Refusal> {
    let (vm, _) = find(&app, &name).await?;
    require_ready(&vm)?;
    if let Some(power) = power(&app, &vm).await?
        && power != Power::Off
    {
        let detail = format!("VM '{}' is not off: it is {}", vm.name, word(power));
        return Err(Problem::new(ErrorCode::WrongState, detail).into());
    }
    if intent.dry_run {
        check_key(&app, &vm)?;
    }
    let write = app.store.write().await?;
    let operation = Operation::StartVm { vm: vm.id };
    begin(&app, write, operation, &vm, Caller { actor: &actor, intent }).await
}

/// A key that the monitor could not deliver so far: a start would try again, and most likely fail.
pub(super) fn check_key(app: &App, vm: &vms::Vm) -> Result<(), Problem> {
    let missing =
        app.hosts.view(vm.host).vm(vm.id).is_some_and(|seen| seen.key == KeyState::Missing);
    if !missing {
        return Ok(());
    }
    let detail = format!("the key of VM '{}' is not on its host (vmseal alarms says why)", vm.name);
    Err(Problem::new(ErrorCode::Locked, detail))
}

pub(super) fn word(power: Power) -> &'static str {
    match power {
        Power::Off => "off",
        Power::Starting => "starting",
        Power::Running => "running",
        Power::Stopping => "stopping",
        Power::Unknown => "in a state that this server does not know",
    }
}

/// Stops a VM; one that is off stays off. With `force`, a task that waits for the guest to shut down cuts its power
/// instead, and is the task that is answered.
#[utoipa::path(post, path = "/api/v1/vms/{vm}/stop", tag = "vms",
    params(("vm" = String, Path, description = "Its name or id"), Intent),
    request_body = Option<StopVm>, responses((status = 202, body = model::Task), (status = 200, body = Plan), Refusal))]
pub(super) async fn stop(
    State(app): State<Arc<App>>,
    Named(name): Named,
    User(actor): User,
    Asked(intent): Asked<Intent>,
    OptionalJson(request): OptionalJson<StopVm>,
) -> Result<Outcome<Accepted>, Refusal> {
    let timeout_seconds = request.timeout_seconds.unwrap_or(SHUTDOWN_DEFAULT);
    if !(1..=SHUTDOWN_MAX).contains(&timeout_seconds) {
        return Err(
            Problem::invalid("timeout_seconds", format!("must be 1 to {SHUTDOWN_MAX}")).into()
        );
    }
    let (vm, _) = find(&app, &name).await?;
    require_ready(&vm)?;
    power(&app, &vm).await?;
    if request.force && intent.dry_run {
        if let Some(task) = app.engine.check_force_stop(vm.id).await? {
            let step = format!("cut the power now, as task {}", task.id);
            return Ok(Outcome::planned("vm.stop", &vm.name, step));
        }
    } else if request.force
        && let Some(task) = app.engine.force_stop(vm.id, &actor).await?
    {
        return Ok(Outcome::Done(Accepted(app.engine.shown(&task))));
    }
    let write = app.store.write().await?;
    let operation = Operation::StopVm { vm: vm.id, force: request.force, timeout_seconds };
    begin(&app, write, operation, &vm, Caller { actor: &actor, intent }).await
}

/// Deletes a VM that is off, with its disks and its key; also what is left of one.
#[utoipa::path(delete, path = "/api/v1/vms/{vm}", tag = "vms",
    params(("vm" = String, Path, description = "Its name or id"), Intent),
    responses((status = 202, body = model::Task), (status = 200, body = Plan), Refusal))]
pub(super) async fn delete(
    State(app): State<Arc<App>>,
    Named(name): Named,
    User(actor): User,
    Asked(intent): Asked<Intent>,
) -> Result<Outcome<Accepted>, Refusal> {
    let (vm, _) = find(&app, &name).await?;
    if let Some(power) = power(&app, &vm).await?
        && power != Power::Off
    {
        let detail = format!(
            "VM '{}' is {}: stop it first (vmseal vm stop {})",
            vm.name,
            word(power),
            vm.name
        );
        return Err(Problem::new(ErrorCode::WrongState, detail).into());
    }
    let _unchanged = app.hosts.lock(vm.id).await;
    let mut write = app.store.write().await?;
    // As it is now: a task may have ended since.
    let now = vms::get(&mut write, vm.id).await?.ok_or_else(|| Problem::not_found("VM", &name))?;
    vms::set_lifecycle(&mut write, vm.id, Lifecycle::Deleting).await?;
    let operation = Operation::DeleteVm { vm: vm.id, was: now.lifecycle };
    begin(&app, write, operation, &vm, Caller { actor: &actor, intent }).await
}
