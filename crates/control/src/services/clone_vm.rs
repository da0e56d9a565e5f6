//! Clones VMs: a new VM with disks of its own that hold what another one's hold, now or at a snapshot, under keys of its own, on the same
//! datastores or all on another one, on the same host or for another one. Of one that runs or is suspended the task takes a snapshot, and
//! drops it.

mod elsewhere;
mod place;

use std::collections::{BTreeMap, BTreeSet};

use vmseal_api::cloud_init::Documents;
use vmseal_api::host::version::{
    CLOUD_INIT_COPIES, COPIES, LINKED_CLONES, SNAPSHOTS, SUSPENDED_SNAPSHOTS,
};
use vmseal_api::host::{Allocation, DiskRole, NicSpec, Power};
use vmseal_api::id::{DiskId, VmId, check_name};
use vmseal_api::model::{Lifecycle, Plan, Task};
use vmseal_api::problem::{ErrorCode, Problem};
use vmseal_api::request::CloneVm;

use self::elsewhere::{Destination, Way};
use super::caller::{Caller, Privilege};
use super::create_vm::provider_of;
use super::snapshots::{OF_REPLICATED, chosen, keepable};
use super::vms::{begin_paced, find, plan, power, require_ready, word};
use super::{
    Outcome, Services, cloud_init, features, hardware, image_layouts, room, temporary_snapshot,
};
use crate::operation::{Copies, Operation, Temporary};
use crate::stalls;
use crate::store::disks::{self, Disk};
use crate::store::links::{self, Link};
use crate::store::snapshots::Snapshot;
use crate::store::{Write, nics, policies, vms};
use crate::tasks::Engine;
use crate::tasks::temporary_snapshot::Purpose;

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
    if request.linked && request.snapshot.is_none() {
        return Err(Problem::invalid("snapshot", needs_snapshot(from)));
    }
    let (origin, disks) = find(services, from).await?;
    require_ready(&origin)?;
    if origin.key.is_some() {
        caller.require(Privilege::Clone)?;
    }
    features::require(services, &origin, COPIES, "clone disks")?;
    let destination = elsewhere::choose(services, caller, (&origin, &disks), &request).await?;
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
    let temporary = match &request.snapshot {
        Some(_) => None,
        None => kept_meanwhile(services, &origin, request.quiesce).await?,
    };
    let wanted = Wanted {
        services,
        caller,
        origin: &origin,
        request: &request,
        id,
        destination: destination.as_ref(),
        documents: documents.as_ref().zip(key_box.as_deref()),
        temporary,
    };
    if dry_run {
        return Ok(Outcome::Planned(wanted.planned().await?));
    }
    // A clone for another host takes room at both. They are asked before the task: what the second one lacks would be found only when all was
    // made at the first.
    if let Some(there) = &destination {
        wanted.require_room(there).await?;
    }
    let mut write = services.store.write().await?;
    let Reserved { vm, operation, .. } = wanted.reserve(&mut write).await?;
    begin_paced(services, write, operation, &vm, caller, (pace, false)).await
}

/// The request for a clone, and what was found out about it before the transaction begins.
struct Wanted<'a> {
    services: &'a Services,
    caller: &'a Caller,
    origin: &'a vms::Vm,
    request: &'a CloneVm,
    /// The id of the clone.
    id: VmId,
    /// The other host that it is for.
    destination: Option<&'a Destination>,
    /// What cloud-init in it is told anew, and the key box of the host that makes it.
    documents: Option<(&'a Documents, &'a str)>,
    /// The snapshot that is taken of a VM that is not off.
    temporary: Option<Temporary>,
}

/// A clone whose rows are in a transaction.
struct Reserved {
    vm: vms::Vm,
    policy: policies::Policy,
    made: Vec<Disk>,
    cards: Vec<NicSpec>,
    link: Option<Link>,
    for_cloud_init: Option<DiskId>,
    operation: Operation,
}

impl Wanted<'_> {
    fn told(&self) -> Told {
        if self.documents.is_some() { Told::Anew } else { Told::TheSame }
    }

    /// Checks the clone against the inventory, and reserves its names and rows.
    async fn reserve(&self, write: &mut Write<'_>) -> Result<Reserved, Problem> {
        let Self { services, origin, request, .. } = *self;
        let known = disks::of_vm(write, origin.id).await?;
        let snapshot = match self.temporary {
            Some(_) => Some(kept_for_it(services, write, origin, &known).await?),
            None => chosen(write, origin, request.snapshot.as_deref()).await?,
        };
        let policy = policies::find(write, &origin.policy.to_string()).await?;
        let policy = policy.ok_or_else(|| Problem::not_found("policy", &origin.policy_name))?;
        require_key_for_tpm(origin, &policy)?;
        let provider = provider_of(services, write, &policy).await?;
        if self.destination.is_none() {
            room::check_memory(services, origin.host, &origin.host_name, origin.memory)?;
        }
        let (mut made, mut copies) = copied(origin, &known, snapshot.as_ref(), self.told())?;
        self.place(write, &policy, &mut made).await?;
        copies.temporary = self.temporary;
        if made.iter().any(is_for_cloud_init) {
            let cannot = "copy data for cloud-init, which the clone is then to be given (--ssh-key, --cloud-init)";
            features::require(services, origin, CLOUD_INIT_COPIES, cannot)?;
        }
        let link = match (&snapshot, request.linked) {
            (Some(snapshot), true) => Some(linked(origin, snapshot, &made, &mut copies)?),
            _ => None,
        };
        if self.documents.is_some() {
            made.extend(cloud_init::disk(&made, policy.encryption));
        }
        let for_cloud_init = made.iter().find(|disk| is_for_cloud_init(disk)).map(|it| it.id);
        made.extend(hardware::tpm(&origin.hardware, &made, None));
        image_layouts::require(services, (origin.host, &origin.host_name), &policy, &made)?;
        if let Some(destination) = self.destination {
            destination.require(services, write, &policy, &made).await?;
            let there = (destination.host.id, &*destination.host.name);
            stalls::require(&services.hosts, there, &policy)?;
            copies.elsewhere = Some(destination.of(origin));
        }
        stalls::require(&services.hosts, (origin.host, &origin.host_name), &policy)?;
        let cards = nics::of_vm(write, origin.id).await?;
        let cards = super::nics::place_alike(write, cards).await?;
        let vm = vms::Vm {
            id: self.id,
            name: request.name.clone(),
            provider: provider.map(|provider| provider.id),
            key: None,
            autostart: false,
            template: false,
            lifecycle: Lifecycle::Creating,
            seen_power: None,
            seen_stopped: None,
            ..origin.clone()
        };
        insert(write, &vm, (&made[..], &cards[..]), link.as_ref().map(|link| (link, &copies)))
            .await?;
        let cloud_init = match (self.documents, for_cloud_init) {
            (Some((documents, key_box)), Some(disk)) => {
                Some(cloud_init::seal(key_box.to_owned(), &vm, disk, documents)?)
            }
            _ => None,
        };
        let operation = Operation::CreateVm { vm: vm.id, cloud_init, copies: Some(copies) };
        Ok(Reserved { vm, policy, made, cards, link, for_cloud_init, operation })
    }

    /// Has the disks be where they are made. What is made beside its first disk is there as well.
    async fn place(
        &self,
        write: &mut Write<'_>,
        policy: &policies::Policy,
        made: &mut [Disk],
    ) -> Result<(), Problem> {
        let place = match self.destination {
            None => place::named(write, self.request).await?,
            Some(Destination { way: Way::Shared(found), .. }) => Some(found.clone()),
            Some(_) => None,
        };
        match &place {
            Some(found) => {
                place::put(write, self.origin, policy, (found, self.request.linked), made).await
            }
            None => Ok(()),
        }
    }

    /// Refuses a clone for another host that the two have no room for. What a dry run warns of besides is not looked for.
    async fn require_room(&self, there: &Destination) -> Result<(), Problem> {
        let mut write = self.services.store.write().await?;
        let Reserved { vm, made, cards, .. } = self.reserve(&mut write).await?;
        // No transaction is held during a call to a host.
        drop(write);
        there.examine(self.services, &vm, (&made[..], &cards[..])).await.map(drop)
    }

    /// What would be done. The hosts are asked whether they have the room and whatever else it takes, and nothing is changed.
    async fn planned(&self) -> Result<Plan, Problem> {
        let Self { services, origin, request, .. } = *self;
        let mut write = services.store.write().await?;
        let reserved = self.reserve(&mut write).await?;
        let Reserved { vm, policy, made, cards, link, for_cloud_init, operation } = reserved;
        let task = Engine::record(&mut write, operation, &vm.name, self.caller.name()).await?;
        // No transaction is held during a call to a host.
        drop(write);
        let mut planned = plan(&task, &vm);
        let of = (&made[..], &cards[..]);
        match self.destination {
            Some(there) => there.explain(services, (&vm, &policy), of, &mut planned).await?,
            None => explain(services, (&vm, &policy), request, of, &mut planned).await?,
        }
        if let Some(link) = &link {
            planned.warnings.push(shares(&made, link));
        }
        planned.warnings.extend(self.temporary.map(|taken| takes_snapshot(origin, taken)));
        planned.warnings.extend(of_guest(origin, for_cloud_init, self.told()));
        Ok(planned)
    }
}

/// Inserts the rows of a clone, and what it stands on if it is linked.
async fn insert(
    write: &mut Write<'_>,
    vm: &vms::Vm,
    (made, cards): (&[Disk], &[NicSpec]),
    link: Option<(&Link, &Copies)>,
) -> Result<(), Problem> {
    vms::insert(write, vm).await?;
    for (position, disk) in made.iter().enumerate() {
        disks::insert(write, vm.id, position, disk).await?;
    }
    if let Some((link, copies)) = link {
        for disk in &copies.linked {
            links::insert(write, *disk, link, copies.disks.get(disk).copied()).await?;
        }
    }
    for (position, nic) in cards.iter().enumerate() {
        nics::insert(write, vm.id, position, nic).await?;
    }
    Ok(())
}

/// Says in a plan what is made on the host of the other VM, and asks that host whether there is room.
async fn explain(
    services: &Services,
    (vm, policy): (&vms::Vm, &policies::Policy),
    request: &CloneVm,
    (made, cards): (&[Disk], &[NicSpec]),
    planned: &mut Plan,
) -> Result<(), Problem> {
    let of_place = place::examine(services, vm, policy, request, (made, cards)).await?;
    planned.warnings.extend(room::examine(services, vm, made).await?);
    planned.warnings.extend(of_place);
    planned.steps.insert(0, room::understood(vm, made));
    Ok(())
}

/// Refuses a clone that would have a TPM and no key. A VM with a TPM that was decrypted has its key still, and a policy that gives none.
fn require_key_for_tpm(origin: &vms::Vm, policy: &policies::Policy) -> Result<(), Problem> {
    if hardware::check_tpm(&origin.hardware, policy).is_ok() {
        return Ok(());
    }
    let detail = format!(
        "VM '{0}' has a TPM, and its clone would have one and no key for what that keeps: policy '{1}' does not encrypt. Encrypt VM '{0}' first (vmseal vm encrypt {0}), or take its TPM from it (vmseal vm set {0} --tpm off)",
        origin.name, policy.name
    );
    Err(Problem::new(ErrorCode::WrongState, detail))
}

/// Why there is no linked clone of what a VM holds now.
fn needs_snapshot(origin: &str) -> String {
    format!(
        "is needed: a linked clone shares files with a snapshot, which has to stay as long as the clone. Take one (vmseal snapshot create {origin} NAME), then give --snapshot NAME"
    )
}

/// What a linked clone shares.
fn shares(made: &[Disk], link: &Link) -> String {
    let shares_key = made.iter().any(|disk| disk.role.is_data() && disk.encrypted);
    let key = if shares_key { "the data key and " } else { "" };
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
                "disk '{}' of VM '{}' is preallocated, as its policy asks, and a disk of a linked clone cannot be: make a full clone (without --linked)",
                disk.name, origin.name
            );
            return Err(Problem::new(ErrorCode::WrongState, detail));
        }
        if disk.replica.is_some() {
            let detail = format!(
                "disk '{}' of VM '{}' has a replica, and a disk of a linked clone cannot have one: make a full clone (without --linked)",
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

/// That a VM runs or is suspended, and what is done about it.
fn takes_snapshot(origin: &vms::Vm, taken: Temporary) -> String {
    let name = &origin.name;
    if taken.suspended {
        return format!(
            "VM '{name}' is suspended: a snapshot of its disks is taken, copied and dropped; the saved memory of its guest is not in the clone, which starts as after a power cut"
        );
    }
    let frozen = match taken.quiesce {
        true => "its guest's file systems are frozen for a moment, if its agent answers",
        false => "its guest's file systems are not frozen",
    };
    format!("VM '{name}' runs: a snapshot of it is taken, copied and dropped; {frozen}")
}

/// What cloud-init in a clone is told.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Told {
    /// What the request has.
    Anew,
    /// What the other VM's is, if that is told anything.
    TheSame,
}

/// What a clone without data for cloud-init is.
const SAME_GUEST: &str = "the guest keeps its host name, SSH host keys and machine id: give data for cloud-init (--ssh-key, --cloud-init), which sets a new host name and makes new SSH host keys in images that use it, or change them in the guest";

fn is_for_cloud_init(disk: &Disk) -> bool {
    disk.role == DiskRole::CloudInit
}

/// What the guest of a clone is, where the request has nothing for cloud-init.
fn of_guest(origin: &vms::Vm, for_cloud_init: Option<DiskId>, told: Told) -> Option<String> {
    match (for_cloud_init, told) {
        (_, Told::Anew) => None,
        (None, Told::TheSame) => Some(SAME_GUEST.to_owned()),
        (Some(_), Told::TheSame) => Some(format!(
            "cloud-init in the clone is told what it is told in VM '{}', with an instance id of the clone's: it sets the guest up anew, as at a first boot",
            origin.name
        )),
    }
}

/// The snapshot that the task takes of a VM. What the disks of one that runs hold changes while they are copied, and hosts lend no disk itself
/// of one that is suspended.
async fn kept_meanwhile(
    services: &Services,
    vm: &vms::Vm,
    quiesce: bool,
) -> Result<Option<Temporary>, Problem> {
    match power(services, vm).await? {
        None | Some(Power::Off) => Ok(None),
        Some(Power::Running | Power::Paused) => Ok(Some(Temporary { quiesce, suspended: false })),
        Some(Power::Suspended) => {
            let cannot = "clone VMs that are suspended";
            features::require(services, vm, SUSPENDED_SNAPSHOTS, cannot)?;
            Ok(Some(Temporary { quiesce, suspended: true }))
        }
        Some(now) => {
            let detail = format!(
                "VM '{}' is {}: wait until it runs, is suspended or off, or clone a snapshot of it (--snapshot NAME)",
                vm.name,
                word(now)
            );
            Err(Problem::new(ErrorCode::WrongState, detail))
        }
    }
}

/// The row of the snapshot that the task takes.
async fn kept_for_it(
    services: &Services,
    write: &mut Write<'_>,
    origin: &vms::Vm,
    known: &[Disk],
) -> Result<Snapshot, Problem> {
    features::require(services, origin, SNAPSHOTS, "take snapshots")?;
    let kept = keepable(services, origin, known, OF_REPLICATED)?;
    temporary_snapshot::reserve(write, origin, Purpose::Clone, kept).await
}

/// The disks of the clone, and what each is copied from.
fn copied(
    origin: &vms::Vm,
    known: &[Disk],
    snapshot: Option<&Snapshot>,
    told: Told,
) -> Result<(Vec<Disk>, Copies), Problem> {
    let is_copied = |disk: &&Disk| {
        let kept = snapshot.is_none_or(|snapshot| snapshot.disks.contains(&disk.id));
        let holds = match disk.role {
            DiskRole::Data | DiskRole::UefiVariables => kept,
            DiskRole::CloudInit => told == Told::TheSame,
            DiskRole::Tpm => false,
        };
        holds && !disk.detached
    };
    let mut of = BTreeMap::new();
    let made = known.iter().filter(is_copied).map(|disk| {
        let id = DiskId::new();
        of.insert(id, disk.id);
        Disk { id, facts: None, image: None, deleting: false, ..disk.clone() }
    });
    let made: Vec<Disk> = made.collect();
    if made.iter().all(is_for_cloud_init) {
        let detail = format!("VM '{}' has no disk to clone", origin.name);
        return Err(Problem::new(ErrorCode::WrongState, detail));
    }
    let snapshot = snapshot.map(|snapshot| snapshot.id);
    let (vm, linked, temporary, elsewhere) = (origin.id, BTreeSet::new(), None, None);
    Ok((made, Copies { vm, snapshot, temporary, disks: of, linked, elsewhere }))
}
