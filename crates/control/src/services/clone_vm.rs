//! Clones VMs: a new VM with disks of its own that hold what another one's hold, now or at a snapshot, under keys of its own.

use std::collections::{BTreeMap, BTreeSet};

use vmseal_api::host::version::{COPIES, LINKED_CLONES};
use vmseal_api::host::{Allocation, DiskRole, Power};
use vmseal_api::id::{DiskId, VmId, check_name};
use vmseal_api::model::{Lifecycle, Plan, Task};
use vmseal_api::nic::NicBackend;
use vmseal_api::problem::{ErrorCode, Problem};
use vmseal_api::request::{CloneVm, CreateNic};

use super::caller::{Caller, Privilege};
use super::create_vm::provider_of;
use super::vms::{begin_paced, find, plan, power, require_ready, word};
use super::{Outcome, Services, cloud_init, features, hardware, room};
use crate::operation::{Copies, Operation};
use crate::store::disks::{self, Disk};
use crate::store::links::{self, Link};
use crate::store::snapshots::Snapshot;
use crate::store::{nics, policies, vms};
use crate::tasks::Engine;

/// Clones a VM.
pub async fn clone(
    services: &Services,
    caller: &Caller,
    from: &str,
    request: CloneVm,
    dry_run: bool,
) -> Result<Outcome<Task>, Problem> {
    caller.require(Privilege::VmConfigure)?;
    check_name(&request.name).map_err(|error| Problem::invalid("name", error.to_string()))?;
    let (origin, _) = find(services, from).await?;
    require_ready(&origin)?;
    if origin.key.is_some() {
        caller.require(Privilege::Clone)?;
    }
    features::require(services, &origin, COPIES, "clone disks")?;
    let (id, name) = (VmId::new(), request.name.clone());
    let documents =
        request.cloud_init.as_ref().map(|asked| cloud_init::documents(asked, id, &name));
    let documents = documents.transpose()?;
    let key_box = match &documents {
        Some(_) => Some(cloud_init::key_box(services, origin.host, &origin.host_name).await?),
        None => None,
    };
    if request.linked {
        features::require(services, &origin, LINKED_CLONES, "make linked clones")?;
    }
    let pace = super::tasks::work_pace(services, &origin, request.rate)?;
    if request.snapshot.is_none() {
        if request.linked {
            return Err(Problem::invalid("snapshot", needs_snapshot(&origin)));
        }
        require_off(services, &origin).await?;
    }
    let mut write = services.store.write().await?;
    let known = disks::of_vm(&mut write, origin.id).await?;
    let snapshot =
        super::snapshots::chosen(&mut write, &origin, request.snapshot.as_deref()).await?;
    let policy = policies::find(&mut write, &origin.policy.to_string()).await?;
    let policy = policy.ok_or_else(|| Problem::not_found("policy", &origin.policy_name))?;
    let provider = provider_of(services, &mut write, &policy).await?;
    room::check_memory(services, origin.host, &origin.host_name, origin.memory)?;
    let (mut made, mut copies) = copied(&origin, &known, snapshot.as_ref())?;
    let link = match (&snapshot, request.linked) {
        (Some(snapshot), true) => Some(linked(&origin, snapshot, &made, &mut copies)?),
        _ => None,
    };
    if documents.is_some() {
        made.extend(cloud_init::disk(&made));
    }
    let for_cloud_init = made.iter().find(|disk| disk.role == DiskRole::CloudInit).map(|it| it.id);
    made.extend(hardware::tpm(&origin.hardware, &made));
    let cards: Vec<_> = nics::of_vm(&mut write, origin.id).await?.into_iter().map(card).collect();
    let cards = super::nics::place(&mut write, &cards).await?;
    let vm = vms::Vm {
        id,
        name,
        provider: provider.map(|provider| provider.id),
        key: None,
        autostart: false,
        template: false,
        lifecycle: Lifecycle::Creating,
        seen_power: None,
        seen_stopped: None,
        ..origin.clone()
    };
    vms::insert(&mut write, &vm).await?;
    for (position, disk) in made.iter().enumerate() {
        disks::insert(&mut write, vm.id, position, disk).await?;
    }
    if let Some(link) = &link {
        for disk in &copies.linked {
            links::insert(&mut write, *disk, link).await?;
        }
    }
    for (position, nic) in cards.iter().enumerate() {
        nics::insert(&mut write, vm.id, position, nic).await?;
    }
    let sealed = match (documents, for_cloud_init, key_box) {
        (Some(documents), Some(disk), Some(key_box)) => {
            Some(cloud_init::seal(key_box, &vm, disk, &documents)?)
        }
        _ => None,
    };
    let cloud_init = sealed.is_some();
    let operation = Operation::CreateVm { vm: vm.id, cloud_init: sealed, copies: Some(copies) };
    if dry_run {
        let task = Engine::record(&mut write, operation, &vm.name, caller.name()).await?;
        // No transaction is held during a call to a host.
        drop(write);
        let mut planned =
            Plan { warnings: room::examine(services, &vm, &made).await?, ..plan(&task, &vm) };
        planned.steps.insert(0, room::understood(&vm, &made));
        if let Some(link) = &link {
            planned.warnings.push(shares(&origin, link));
        }
        if !cloud_init {
            planned.warnings.push(SAME_GUEST.to_owned());
        }
        return Ok(Outcome::Planned(planned));
    }
    begin_paced(services, write, operation, &vm, caller, (pace, dry_run)).await
}

/// Why there is no linked clone of what a VM holds now.
fn needs_snapshot(origin: &vms::Vm) -> String {
    format!(
        "is needed: a linked clone stands on what a snapshot keeps, which nobody writes (vmseal snapshot create {} NAME, then --snapshot NAME)",
        origin.name
    )
}

/// What a linked clone shares.
fn shares(origin: &vms::Vm, link: &Link) -> String {
    let key = if origin.key.is_some() { "the data key and " } else { "" };
    format!(
        "the clone shares {key}the data of VM '{}', snapshot '{}'",
        link.vm_name, link.snapshot_name
    )
}

/// Has the data disks of a clone stand on what a snapshot keeps, instead of being copied. Others are small, and are copied.
fn linked(
    origin: &vms::Vm,
    snapshot: &Snapshot,
    made: &[Disk],
    copies: &mut Copies,
) -> Result<Link, Problem> {
    for disk in made.iter().filter(|disk| disk.role == DiskRole::Data) {
        if disk.allocation == Allocation::Preallocated {
            let detail = format!(
                "disk '{}' of VM '{}' has all of its room allocated, as its policy asks for, and that of a linked clone has not: make a full clone",
                disk.name, origin.name
            );
            return Err(Problem::new(ErrorCode::WrongState, detail));
        }
        copies.linked.insert(disk.id);
    }
    Ok(Link {
        vm: origin.id,
        vm_name: origin.name.clone(),
        snapshot: snapshot.id,
        snapshot_name: snapshot.name.clone(),
    })
}

/// What a clone without data for cloud-init is.
const SAME_GUEST: &str = "the guest keeps its host name, SSH host keys and machine id: give data for cloud-init (--ssh-key, --cloud-init), which makes new ones in images that use it, or change them in the guest";

/// What a running guest's disks hold changes while it is copied.
async fn require_off(services: &Services, vm: &vms::Vm) -> Result<(), Problem> {
    match power(services, vm).await? {
        None | Some(Power::Off) => Ok(()),
        Some(now) => {
            let detail = format!(
                "VM '{0}' is {1}: clone a snapshot of it (vmseal snapshot create {0} NAME, then --snapshot NAME), or stop it first",
                vm.name,
                word(now)
            );
            Err(Problem::new(ErrorCode::WrongState, detail))
        }
    }
}

/// The disks of the clone, and what each is copied from.
fn copied(
    origin: &vms::Vm,
    known: &[Disk],
    snapshot: Option<&Snapshot>,
) -> Result<(Vec<Disk>, Copies), Problem> {
    let is_copied = |disk: &&Disk| {
        let kept = snapshot.is_none_or(|snapshot| snapshot.disks.contains(&disk.id));
        matches!(disk.role, DiskRole::Data | DiskRole::UefiVariables) && !disk.detached && kept
    };
    let mut of = BTreeMap::new();
    let made = known.iter().filter(is_copied).map(|disk| {
        let id = DiskId::new();
        of.insert(id, disk.id);
        Disk { id, facts: None, image: None, deleting: false, ..disk.clone() }
    });
    let made: Vec<Disk> = made.collect();
    if made.is_empty() {
        let detail = format!("VM '{}' has no disk to clone", origin.name);
        return Err(Problem::new(ErrorCode::WrongState, detail));
    }
    let snapshot = snapshot.map(|snapshot| snapshot.id);
    Ok((made, Copies { vm: origin.id, snapshot, disks: of, linked: BTreeSet::new() }))
}

/// A card like another one: with an address of its own, and ports of the host that are chosen when it starts.
fn card(of: vmseal_api::host::NicSpec) -> CreateNic {
    let backend = match of.backend {
        NicBackend::User { mut forwards } => {
            forwards.iter_mut().for_each(|forward| forward.host_port = 0);
            NicBackend::User { forwards }
        }
        other => other,
    };
    CreateNic { name: Some(of.name), mac: None, model: of.model, backend, link: of.link }
}
