//! VMs of an inventory that was restored from a backup, of which their descriptors may know more (docs/decisions/287).
//!
//! ```text
//!   server.restored ─► uncertain ── the host finds nothing newer ─────────────► vm.compared: as any other VM. What differs is in the event
//!                        │  ▲
//!                        │  └── something is newer, or cannot be looked at: the host is not told of the VM, no task changes it,
//!                        │      and it is an alarm
//!                        └── datastore adopt: compared again, and equal; with --discard-newer: vm.kept
//! ```
//! A host writes descriptors of what a VM is registered as. So a VM is compared before it is registered. An adoption that is undone makes
//! its VM uncertain again. The events that say all this stay as long as one VM is uncertain ([`needed_since`]).

use std::collections::HashMap;
use std::collections::hash_map::Entry;

use sqlx::SqliteConnection;
use vmseal_api::host::descriptor::VmDescriptor;
use vmseal_api::host::survey::{DatastoreSurvey, FoundDescriptor};
use vmseal_api::host::version::COMPARE_RESTORED;
use vmseal_api::host::{DatastoreSpec, HostAgent, HostDescription, SnapshotSpec, VmChange, VmSpec};
use vmseal_api::id::{DatastoreId, HostId, VmId};
use vmseal_api::model::Lifecycle;
use vmseal_api::problem::{ErrorCode, Problem};

use super::definition::spec_of_snapshot;
use super::differing::differing;
use super::earlier_agents::for_agent;
use crate::operation::Operation;
use crate::store::events::{self, Filter, NewEvent};
use crate::store::snapshots::{self, Snapshot};
use crate::store::vms::{self, Vm};
use crate::store::{Store, StoreError, disks, uncertain};

/// The kind of the event that the inventory was restored, and what that is about.
const RESTORED: (&str, &str) = ("server.restored", "server");

/// The kind of the event that nothing that a VM could get is newer on its datastores.
pub(crate) const COMPARED: &str = "vm.compared";

/// The kind of the event that says what the descriptor of a VM said otherwise than the inventory before it gave the VM something.
pub(crate) const DIFFERED: &str = "vm.differed";

/// The kind of the event that an operator has kept a VM as the inventory has it.
pub(crate) const KEPT: &str = "vm.kept";

/// The kind of the event that the adoption of what is newer was undone: the VM is uncertain again.
pub(crate) const UNDONE: &str = "vm.adoption-undone";

/// The events after which the inventory knows a VM better than descriptors from before, and what each means, for people. A VM that came
/// after the server was restored is not in the backup: nothing of it can be newer than the inventory. [`uncertain`] has the same kinds.
pub(crate) const KNOWN_SINCE: [(&str, &str); 7] = [
    ("vm.changed", "the VM was changed here since the server was restored"),
    ("vm.created", "the VM was created here since the server was restored"),
    ("vm.adopted", "the VM was adopted here since the server was restored"),
    ("vm.arrived", "the VM came here from another control plane since the server was restored"),
    ("vm.encrypted", "the VM was encrypted here since the server was restored"),
    (
        "backup.restored",
        "the VM was restored from a backup of its own since the server was restored",
    ),
    (KEPT, "the VM was kept as the inventory has it since the server was restored"),
];

/// The number of the newest event of a kind about a resource.
pub(crate) async fn last_event(
    from: &mut SqliteConnection,
    kind: &str,
    target: &str,
) -> Result<Option<i64>, StoreError> {
    let (kind, target) = (Some(kind.to_owned()), Some(target.to_owned()));
    let filter = Filter { kind, target, ..Filter::default() };
    Ok(events::last_of(from, 1, &filter).await?.first().map(|event| event.sequence))
}

/// The number of the event that the inventory was restored; none where it never was.
pub(crate) async fn restored(from: &mut SqliteConnection) -> Result<Option<i64>, StoreError> {
    let (kind, target) = RESTORED;
    last_event(from, kind, target).await
}

/// Whether the descriptors of a VM may know more of it than the inventory. Of one that is not encrypted nothing could be taken from there.
pub(crate) async fn is_uncertain(from: &mut SqliteConnection, vm: &Vm) -> Result<bool, StoreError> {
    if vm.key.is_none() || vm.lifecycle != Lifecycle::Ready {
        return Ok(false);
    }
    match restored(from).await? {
        Some(restored) => uncertain::is_one(from, restored, vm.id).await,
        None => Ok(false),
    }
}

/// The VMs of a host of which their descriptors may know more.
pub(super) async fn uncertain_on(
    from: &mut SqliteConnection,
    host: HostId,
) -> Result<Vec<VmId>, StoreError> {
    match restored(from).await? {
        Some(restored) => uncertain::on_host(from, restored, host).await,
        None => Ok(Vec::new()),
    }
}

/// The first of the events that say which VMs are uncertain; none where no VM is.
pub(crate) async fn needed_since(from: &mut SqliteConnection) -> Result<Option<i64>, StoreError> {
    let Some(restored) = restored(from).await? else { return Ok(None) };
    Ok(uncertain::is_any(from, restored).await?.then_some(restored))
}

/// Refuses to change a VM of which a descriptor may know more.
///
/// # Errors
/// `wrong-state`; the inventory's.
pub(crate) async fn require_certain(from: &mut SqliteConnection, vm: &Vm) -> Result<(), Problem> {
    if !is_uncertain(from, vm).await? {
        return Ok(());
    }
    let way_out = way_out(from, vm).await?;
    let what = format!(
        "the server was restored from a backup, and VM '{}' is newer on its datastore (vmseal alarms), or host '{}' has not compared it yet. {way_out}",
        vm.name, vm.host_name
    );
    Err(Problem::new(ErrorCode::WrongState, what))
}

/// The same for the VM of a task, and for the one that it clones, whose clone would lack a disk that was added.
///
/// # Errors
/// As [`require_certain`].
pub(crate) async fn require_for_task(
    from: &mut SqliteConnection,
    operation: &Operation,
) -> Result<(), Problem> {
    let cloned = match operation {
        Operation::CreateVm { copies: Some(copies), .. } => Some(copies.vm),
        _ => None,
    };
    for vm in operation.vm().filter(|_| needs_certainty(operation)).into_iter().chain(cloned) {
        if let Some(vm) = vms::get(from, vm).await? {
            require_certain(from, &vm).await?;
        }
    }
    Ok(())
}

/// Whether a task may begin only on a VM that its host is told of. What a VM needs to be adopted may begin on any, and so may what deletes
/// something. A host that gets a VM from one that does not answer compares it before it is registered there.
fn needs_certainty(operation: &Operation) -> bool {
    !matches!(
        operation,
        Operation::StopVm { .. }
            | Operation::SuspendVm { .. }
            | Operation::AdoptVm { .. }
            | Operation::EvacuateVm { .. }
            | Operation::DeleteVm { .. }
            | Operation::DeleteBackup { .. }
            | Operation::DeleteDump { .. }
    )
}

/// What an operator can do, for people. Hosts have datastores of the same name, and of those that share one it is the VM's that adopts.
async fn way_out(from: &mut SqliteConnection, vm: &Vm) -> Result<String, StoreError> {
    let disks = disks::of_vm(from, vm.id).await?;
    let datastore = disks.first().map_or("DATASTORE", |disk| &*disk.datastore_name);
    // Its descriptor may have another name.
    let command = format!("vmseal datastore adopt {}:{datastore} --vm {}", vm.host_name, vm.id);
    Ok(format!(
        "Take over what is newer while the VM is off or suspended ({command}), or keep the VM as the inventory has it, without the disks, sizes, network cards and snapshots that are only on the datastore ({command} --discard-newer)"
    ))
}

/// What the datastores of a host have of VMs that are compared one after the other: each datastore is looked at once.
#[derive(Default)]
pub(super) struct Surveys(HashMap<DatastoreId, Result<DatastoreSurvey, Problem>>);

impl Surveys {
    /// The descriptor of a VM there; none where it has none, or where that cannot be read.
    async fn descriptor(
        &mut self,
        agent: &dyn HostAgent,
        place: &DatastoreSpec,
        vm: VmId,
    ) -> Result<Option<&VmDescriptor>, Problem> {
        let survey = match self.0.entry(place.datastore) {
            Entry::Occupied(entry) => entry.into_mut(),
            Entry::Vacant(entry) => {
                entry.insert(agent.survey_datastore(place.location.clone()).await)
            }
        };
        let survey = survey.as_ref().map_err(Clone::clone)?;
        let is_its = survey.mark == Some(place.datastore);
        match survey.vms.iter().find(|found| is_its && found.vm == vm).map(|it| &it.descriptor) {
            Some(FoundDescriptor::Read { descriptor, .. }) => Ok(Some(&**descriptor)),
            Some(_) => Ok(None),
            None => match &survey.incomplete {
                Some(why) => Err(Problem::new(ErrorCode::Damaged, why.clone())),
                None => Ok(None),
            },
        }
    }
}

/// Compares a VM with its descriptors before its host is told of it, if they may know more. Returns whether it was compared just now, and
/// nothing is newer.
///
/// # Errors
/// `wrong-state`: something is newer, or cannot be looked at. The host's and the inventory's.
pub(crate) async fn settle(
    store: &Store,
    agent: &dyn HostAgent,
    description: Option<&HostDescription>,
    known: (&Vm, &VmSpec),
) -> Result<bool, Problem> {
    settle_with(store, agent, description, known, &mut Surveys::default()).await
}

/// The same, for several VMs of a host.
///
/// # Errors
/// As [`settle`].
pub(super) async fn settle_with(
    store: &Store,
    agent: &dyn HostAgent,
    description: Option<&HostDescription>,
    (vm, spec): (&Vm, &VmSpec),
    surveys: &mut Surveys,
) -> Result<bool, Problem> {
    let mut read = store.read().await?;
    if !is_uncertain(&mut read, vm).await? {
        return Ok(false);
    }
    let way_out = way_out(&mut read, vm).await?;
    let known = snapshots::of_vm(&mut read, vm.id).await?;
    drop(read);
    let place = spec.disks().next().map(|disk| disk.datastore.clone());
    let Some(description) = description else {
        let what = format!("host '{}' has not answered yet", vm.host_name);
        return Err(Problem::new(ErrorCode::Unreachable, what));
    };
    let detail = if description.features.iter().any(|it| it == COMPARE_RESTORED) {
        // One that was being taken or deleted at the backup is not one that the inventory does not know.
        let whole = known.iter().cloned().map(spec_of_snapshot);
        // What is said of them is not compared, and may be too long for a request.
        let brief = whole.map(|of| SnapshotSpec { description: String::new(), ..of });
        let snapshots = brief.collect();
        let all = VmSpec { snapshots, ..spec.clone() };
        let spec = Box::new(for_agent(all, Some(description)));
        let compared = agent.examine_change(vm.id, VmChange::Restored { spec }).await;
        compared.map_err(|problem| match problem.code {
            ErrorCode::WrongState => {
                let detail = format!("{}. {way_out}", problem.detail);
                Problem { detail, ..problem }
            }
            _ => problem,
        })?;
        compared_with(agent, (vm, &*known), place, surveys).await?
    } else {
        format!(
            "not compared with its datastores after the server was restored: the agent of host '{}' is of an earlier vmseal",
            vm.host_name
        )
    };
    let mut write = store.write().await?;
    let (kind, actor, target) = (COMPARED, crate::SELF, vm.name.as_str());
    write.event(NewEvent { kind, actor, target, detail: &detail }).await?;
    write.commit().await?;
    Ok(true)
}

/// What is found of a VM of which nothing that it could get is newer, for people. Its host writes over what its descriptor says otherwise,
/// so that is said here.
async fn compared_with(
    agent: &dyn HostAgent,
    (vm, snapshots): (&Vm, &[Snapshot]),
    place: Option<DatastoreSpec>,
    surveys: &mut Surveys,
) -> Result<String, Problem> {
    const SAME: &str = "is newer than the inventory, which was restored from a backup";
    let nothing = || format!("nothing on its datastores {SAME}");
    let Some(place) = place else { return Ok(nothing()) };
    match surveys.descriptor(agent, &place, vm.id).await {
        Ok(there) => {
            let said = there.map_or_else(Vec::new, |there| differing(vm, snapshots, there));
            if said.is_empty() {
                return Ok(nothing());
            }
            Ok(format!(
                "its descriptor says otherwise than the inventory, which was restored from a backup, and is written anew as the inventory has it. {}",
                said.join(". ")
            ))
        }
        Err(problem) if problem.code == ErrorCode::Unreachable => Err(problem),
        Err(problem) => Ok(format!(
            "no disk, network card or snapshot on its datastores {SAME}. What its descriptor says otherwise was not seen: {problem}"
        )),
    }
}
