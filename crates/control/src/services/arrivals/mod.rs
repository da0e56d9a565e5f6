//! VMs that come from other control planes, while they run or are off: what the other one asks for ([`vmseal_api::remote`]). The work is a task
//! ([`crate::tasks::receive_vm`]).

mod checks;
mod snapshots;

use std::time::Duration;

use tokio::time::Instant;
use vmseal_api::filter::SERIAL_MAX;
use vmseal_api::host::{Arrival, HostAgent, JobSpec, JobState, MIGRATION_KEY_LEN, ReceiveJob};
use vmseal_api::id::{HostId, TaskId, VmId, check_name};
use vmseal_api::model::{Lifecycle, TaskState};
use vmseal_api::problem::{ErrorCode, Problem};
use vmseal_api::remote::{
    ArrivalAddress, ArrivalChecks, ArrivalSession, ArrivalShown, ArrivalState, ArrivingVm,
    BeginArrival, GENERATION_MAX,
};
use vmseal_api::request::{DISK_SIZE_MAX, DISKS_MAX};

use self::checks::{Chosen, look};
use super::caller::{Caller, Privilege};
use super::create_vm::provider_of;
use super::migrate::{Promised, free_memory};
use super::passphrases::open_passphrase;
use super::vm_values::{check_count, check_description, check_labels, check_memory, check_vcpus};
use super::{Services, image_layouts};
use crate::hosts::keys::{self, Purpose};
use crate::hosts::{self, is_silence};
use crate::operation::Operation;
use crate::stalls;
use crate::store::disks::Disk;
use crate::store::tasks::Task;
use crate::store::vms::Vm;
use crate::store::{
    Write, disks, hosts as store_hosts, memory_generations, nics, placements, tasks, vms,
};
use crate::tasks::Engine;
use crate::tasks::engine::TaskSchedule;
use crate::tasks::migrate_vm::{NewSession, reachable};
use crate::tasks::receive_vm;

/// How long a request waits until the arrival has reached the state that the caller asks for. It is shorter than a client's timeout, so
/// the client gets the state that the arrival is in.
const ANSWER_WAIT: Duration = Duration::from_secs(30);

/// Requires the privileges of a caller that sends a VM here, beside that of creating one.
fn require_migrate(caller: &Caller, has_key: bool) -> Result<(), Problem> {
    caller.require(Privilege::Migrate)?;
    if has_key {
        caller.require(Privilege::EncryptNew)?;
    }
    Ok(())
}

/// Says of each thing that a VM needs whether it is here. Nothing is changed.
pub async fn check(
    services: &Services,
    caller: &Caller,
    request: BeginArrival,
) -> Result<ArrivalChecks, Problem> {
    caller.require(Privilege::VmConfigure)?;
    check_vm(&request.vm)?;
    check_rest(&request)?;
    require_migrate(caller, request.vm.has_key)?;
    Ok(look(services, &request).await?.0)
}

/// Begins an arrival, and waits a while until its key is made. One that is there already is shown.
pub async fn begin(
    services: &Services,
    caller: &Caller,
    id: &str,
    request: BeginArrival,
) -> Result<ArrivalShown, Problem> {
    caller.require(Privilege::VmConfigure)?;
    check_vm(&request.vm)?;
    check_rest(&request)?;
    require_migrate(caller, request.vm.has_key)?;
    let task: TaskId =
        id.parse().map_err(|_| Problem::invalid("arrival", format!("'{id}' is not an id")))?;
    let known = tasks::get(&mut *services.store.read().await?, id).await?;
    match known {
        None => reserve(services, caller, task, request).await?,
        Some(known) if known.operation.vm() == Some(request.vm.id) => {}
        Some(_) => {
            let detail = format!("another task has the id {id}");
            return Err(Problem::new(ErrorCode::AlreadyExists, detail));
        }
    }
    services.engine.hear_source(task);
    until(services, task, |state| state != ArrivalState::Preparing).await
}

/// Takes the names, and begins the task.
async fn reserve(
    services: &Services,
    caller: &Caller,
    id: TaskId,
    request: BeginArrival,
) -> Result<(), Problem> {
    let (found, chosen) = look(services, &request).await?;
    let Some(Chosen { host, datastore, policy }) = chosen else {
        let wrong = found.checks.iter().filter(|check| !check.ok).map(ToString::to_string);
        let wrong: Vec<_> = wrong.collect();
        let detail = format!("VM '{}' cannot arrive: {}", request.vm.name, wrong.join("; "));
        return Err(Problem::new(ErrorCode::WrongState, detail));
    };
    let gone = || Problem::not_found("datastore", &datastore.name);
    let place = datastore.spec_on(host.id).ok_or_else(gone)?;
    let BeginArrival { vm: asked, generation, at_rest, suspended, .. } = request;
    let mut write = services.store.write().await?;
    let provider = provider_of(services, &mut write, &policy).await?;
    if !at_rest {
        require_room(services, &mut write, &asked, host.id).await?;
    }
    let vm = Vm {
        id: asked.id,
        name: asked.name,
        description: asked.description,
        labels: asked.labels,
        autostart: asked.autostart,
        migration_encryption: asked.migration_encryption,
        on_drain: asked.on_drain,
        template: false,
        host: host.id,
        host_name: host.name,
        policy: policy.id,
        policy_name: policy.name.clone(),
        vcpus: asked.vcpus,
        memory: asked.memory,
        hardware: asked.hardware,
        provider: provider.map(|provider| provider.id),
        key: None,
        lifecycle: Lifecycle::Creating,
        seen_power: None,
        seen_stopped: None,
    };
    vms::insert(&mut write, &vm).await?;
    placements::set_owner(&mut write, vm.id, vm.host, generation).await?;
    for (position, disk) in asked.disks.into_iter().enumerate() {
        let disk = Disk {
            id: disk.id,
            name: disk.name,
            datastore: place.clone(),
            datastore_name: datastore.name.clone(),
            size: disk.size,
            encrypted: disk.encrypted,
            role: disk.role,
            allocation: policy.allocation,
            limits: policy.limits,
            cache: policy.cache,
            replica: None,
            image: None,
            facts: None,
            deleting: false,
            detached: false,
        };
        let made = std::slice::from_ref(&disk);
        image_layouts::require(services, (vm.host, &vm.host_name), &policy, made)?;
        stalls::require(&services.hosts, (vm.host, &vm.host_name), &policy)?;
        disks::insert(&mut write, vm.id, position, &disk).await?;
    }
    for (position, nic) in asked.nics.iter().enumerate() {
        nics::insert(&mut write, vm.id, position, nic).await?;
    }
    snapshots::insert(&mut write, vm.id, asked.snapshots).await?;
    if let Some(memory) = suspended {
        memory_generations::take_over_own(&mut write, vm.id, memory.generation).await?;
    }
    let operation = Operation::ReceiveVm {
        vm: vm.id,
        host: vm.host,
        generation,
        committed: false,
        at_rest,
        suspended: suspended.is_some(),
        given_up: false,
    };
    let schedule = TaskSchedule { id: Some(id), ..TaskSchedule::default() };
    let actor = caller.name();
    let task = Engine::record_scheduled(&mut write, operation, &vm.name, actor, schedule).await?;
    write.commit().await?;
    services.engine.begin(task);
    Ok(())
}

/// Refuses a host that got too many other VMs since it was looked at.
async fn require_room(
    services: &Services,
    write: &mut Write<'_>,
    vm: &ArrivingVm,
    host: HostId,
) -> Result<(), Problem> {
    let promised = Promised::read(write).await?;
    match free_memory(services, write, host, &promised).await? {
        Some(free) if free < vm.memory => {
            let detail = format!("VM '{}' cannot arrive: its host is full now", vm.name);
            Err(Problem::new(ErrorCode::WrongState, detail))
        }
        _ => Ok(()),
    }
}

/// Checks what another control plane says of a VM, as of one that is created. Its host checks the rest when it is to receive it.
fn check_vm(vm: &ArrivingVm) -> Result<(), Problem> {
    check_name(&vm.name).map_err(|error| Problem::invalid("vm.name", error.to_string()))?;
    check_vcpus(vm.vcpus)?;
    check_memory(vm.memory)?;
    check_description(&vm.description)?;
    check_labels(vm.labels.iter().map(|(key, value)| (key.as_str(), value.as_str())))?;
    check_count(&vm.labels)?;
    super::hardware::check(&vm.hardware, vm.memory)?;
    if vm.disks.is_empty() || vm.disks.len() > DISKS_MAX {
        return Err(Problem::invalid("vm.disks", format!("a VM has 1 to {DISKS_MAX} disks")));
    }
    for disk in &vm.disks {
        check_name(&disk.name)
            .map_err(|error| Problem::invalid("vm.disks.name", error.to_string()))?;
        if disk.name.len() > SERIAL_MAX || disk.size == 0 || disk.size > DISK_SIZE_MAX {
            let detail = format!("disk '{}' has a name or a size that is not allowed", disk.name);
            return Err(Problem::invalid("vm.disks", detail));
        }
    }
    snapshots::check(vm)
}

/// Checks what another control plane says beside what the VM is.
fn check_rest(request: &BeginArrival) -> Result<(), Problem> {
    if request.generation > GENERATION_MAX {
        let what = "there cannot be a placement of this generation";
        return Err(Problem::invalid("generation", what));
    }
    let Some(memory) = &request.suspended else { return Ok(()) };
    if !request.at_rest {
        return Err(Problem::invalid(
            "suspended",
            "a VM that is suspended does not run: at_rest must be true",
        ));
    }
    if memory.generation.is_some_and(|number| number > GENERATION_MAX) {
        let what = "there cannot be a memory of this generation";
        return Err(Problem::invalid("suspended.generation", what));
    }
    Ok(())
}

/// The task of an arrival.
async fn find(services: &Services, id: &str) -> Result<(Task, VmId, HostId, u64), Problem> {
    let found = tasks::get(&mut *services.store.read().await?, id).await?;
    let task = found.ok_or_else(|| Problem::not_found("arrival", id))?;
    match task.operation {
        Operation::ReceiveVm { vm, host, generation, .. } => Ok((task, vm, host, generation)),
        _ => Err(Problem::not_found("arrival", id)),
    }
}

/// How far an arrival is. What a task that has ended says is final.
fn state(task: &Task) -> ArrivalState {
    match task.state {
        TaskState::Done => ArrivalState::Running,
        TaskState::Failed | TaskState::Cancelled => ArrivalState::Cancelled,
        TaskState::Unknown | TaskState::RollingBack => ArrivalState::Undecided,
        _ if task.operation.is_asked_to_commit() => ArrivalState::Undecided,
        _ if task.step == receive_vm::RECEIVES => ArrivalState::Prepared,
        _ => ArrivalState::Preparing,
    }
}

async fn shown(services: &Services, task: Task, host: HostId) -> Result<ArrivalShown, Problem> {
    let known = store_hosts::find(&mut *services.store.read().await?, &host.to_string()).await?;
    let host = known.map(|host| host.name).unwrap_or_default();
    let (state, placed) = (state(&task), receive_vm::placed(&task));
    Ok(ArrivalShown { id: task.id, state, host, placed, problem: task.problem })
}

/// Waits until an arrival is in such a state, but not for long.
async fn until(
    services: &Services,
    id: TaskId,
    reached: impl Fn(ArrivalState) -> bool,
) -> Result<ArrivalShown, Problem> {
    // Before the first look: no change is missed.
    let mut changes = services.store.changes();
    let deadline = Instant::now() + ANSWER_WAIT;
    loop {
        changes.borrow_and_update();
        let (task, _, host, _) = find(services, &id.to_string()).await?;
        if reached(state(&task)) {
            return shown(services, task, host).await;
        }
        let changed = tokio::time::timeout_at(deadline, changes.changed()).await;
        if !matches!(changed, Ok(Ok(()))) {
            return shown(services, task, host).await;
        }
    }
}

/// Shows an arrival. Its source is there, as it asks.
pub async fn show(services: &Services, caller: &Caller, id: &str) -> Result<ArrivalShown, Problem> {
    caller.require(Privilege::VmConfigure)?;
    let (task, vm, host, _) = find(services, id).await?;
    require_migrate(caller, false)?;
    services.engine.hear_source(task.id);
    let task_id = task.id;
    let shown = shown(services, task, host).await?;
    if shown.state != ArrivalState::Prepared || shown.problem.is_some() {
        return Ok(shown);
    }
    Ok(ArrivalShown { problem: failure(services, (task_id, vm, host)).await, ..shown })
}

/// Why the host cannot receive the VM that it was to wait for. A host that does not answer says so later.
async fn failure(services: &Services, (task, vm, host): (TaskId, VmId, HostId)) -> Option<Problem> {
    let state = services.hosts.connected(host).ok()?.state_now().await.ok()?;
    let seen = state.vms.iter().find(|seen| seen.vm == vm)?;
    match &seen.jobs.iter().find(|job| job.task == task)?.state {
        JobState::Failed { problem } => Some(problem.clone()),
        _ => None,
    }
}

/// Has the host wait for the source: one attempt. What an earlier one has left is removed.
pub async fn session(
    services: &Services,
    caller: &Caller,
    id: &str,
    request: ArrivalSession,
) -> Result<ArrivalAddress, Problem> {
    caller.require(Privilege::VmConfigure)?;
    let (task, vm, host, generation) = find(services, id).await?;
    require_migrate(caller, false)?;
    let key = open_passphrase(services, id, &request.key, "key")?;
    if key.len() != MIGRATION_KEY_LEN {
        let detail = format!("the key of a session has {MIGRATION_KEY_LEN} bytes");
        return Err(Problem::invalid("key", detail));
    }
    services.engine.hear_source(task.id);
    // The task ends what is begun here under the same lock when it is undone.
    let _unchanged = services.hosts.lock(vm).await;
    let (task, ..) = find(services, id).await?;
    if state(&task) != ArrivalState::Prepared || task.cancelled {
        let detail = format!(
            "VM '{}' cannot be sent here now: its arrival is not prepared, or given up",
            task.target
        );
        return Err(Problem::new(ErrorCode::WrongState, detail));
    }
    let agent = services.hosts.agent(host)?;
    let there = agent.describe().await?;
    let mut read = services.store.read().await?;
    let gone = || Problem::not_found("VM", vm);
    let row = vms::get(&mut read, vm).await?.ok_or_else(gone)?;
    let of_vm = disks::of_vm(&mut read, vm).await?;
    let known = store_hosts::find(&mut read, &host.to_string()).await?;
    drop(read);
    let known = known.ok_or_else(|| Problem::not_found("host", host))?;
    let to = there.migration_address.ok_or_else(|| {
        let detail = format!("host '{}' has no address for migrations", row.host_name);
        Problem::new(ErrorCode::WrongState, detail)
    })?;
    let address = reachable(to, &known.name, &known.address).await?;
    let operation = &task.operation;
    let rest = (operation.is_at_rest(), operation.is_of_suspended());
    let job = receive_vm::job(&of_vm, generation, rest);
    clear(&*agent, vm, task.id, &job).await?;
    let copies = job.copies.iter().flat_map(|copies| copies.disks.clone()).collect::<Vec<_>>();
    let spec = hosts::definition_with(&services.store, vm, host, &copies).await?;
    let spec = hosts::for_agent(spec, Some(&there));
    let kek = match &row.key {
        None => None,
        Some(reference) => {
            // New disks are made with it.
            let kek = keys::fetch(&services.providers, &row, reference, Purpose::Encrypt).await?;
            Some(keys::seal(&services.store, &there.key_box, &row, reference, kek).await?)
        }
    };
    let (migration, nonce, apart) = (request.migration, request.nonce, row.key.is_some());
    let new = NewSession { vm, migration, nonce, key, apart };
    let how = (request.encrypted, request.streams);
    let session = new.sealed(&there.key_box, &row.host_name, how)?;
    let arrival = Arrival { session, vm: spec, key: kek, generation };
    let job = ReceiveJob { begin: Some(Box::new(arrival)), ..job };
    agent.put_job(vm, task.id, JobSpec::Receive(job)).await?;
    Ok(ArrivalAddress { address })
}

/// Removes what an earlier attempt has left.
async fn clear(
    agent: &dyn HostAgent,
    vm: VmId,
    task: TaskId,
    job: &ReceiveJob,
) -> Result<(), Problem> {
    let absent = |answer: Result<(), Problem>| match answer {
        Err(problem) if problem.code == ErrorCode::NotFound => Ok(()),
        other => other,
    };
    absent(agent.cancel_job(vm, task, JobSpec::Receive(job.clone())).await)?;
    absent(agent.unregister_vm(vm).await)
}

/// Asks to let the guest go, and waits a while until it is decided whether it runs here.
pub async fn commit(
    services: &Services,
    caller: &Caller,
    id: &str,
) -> Result<ArrivalShown, Problem> {
    caller.require(Privilege::VmConfigure)?;
    let (task, ..) = find(services, id).await?;
    require_migrate(caller, false)?;
    services.engine.commit_arrival(task.id).await?;
    until(services, task.id, is_decided).await
}

/// Gives an arrival up, unless it was asked to let the guest go; waits a while until it is decided what became of it.
pub async fn cancel(
    services: &Services,
    caller: &Caller,
    id: &str,
) -> Result<ArrivalShown, Problem> {
    caller.require(Privilege::VmConfigure)?;
    let (task, ..) = find(services, id).await?;
    require_migrate(caller, false)?;
    match services.engine.cancel(id, caller.name()).await {
        // It has ended, is being undone, or was asked to commit: its state says what comes of it.
        Err(problem) if problem.code != ErrorCode::WrongState || is_silence(&problem) => {
            return Err(problem);
        }
        _ => {}
    }
    until(services, task.id, is_decided).await
}

fn is_decided(state: ArrivalState) -> bool {
    matches!(state, ArrivalState::Running | ArrivalState::Cancelled)
}
