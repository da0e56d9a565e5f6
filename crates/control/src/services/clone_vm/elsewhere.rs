//! Clones for another host: whether that takes one, where its disks are to be, and by which way they get there.
//!
//! | the other host has | the clone is made | its disks |
//! |---|---|---|
//! | the datastores of the VM's disks | beside these | stay there |
//! | a datastore that the VM's host has, too | there | stay there |
//! | others alone | beside the VM's disks | are sent to one of them, sealed, and removed where they were made |

use std::sync::Arc;

use vmseal_api::datastore::DatastoreCondition;
use vmseal_api::host::version::{
    MIGRATE, MIGRATE_APART, MIGRATE_AT_REST, MIGRATE_DISKS, MIGRATE_ENCRYPTED, MIGRATE_STATE,
    MIGRATE_TPM_AT_REST,
};
use vmseal_api::host::{
    Allocation, Attachment, DatastoreSpec, DiskRole, HEADER_AREA, HostAgent, HostDescription,
    NicSpec,
};
use vmseal_api::id::DatastoreId;
use vmseal_api::migration::MigrationEncryption;
use vmseal_api::model::Plan;
use vmseal_api::problem::{ErrorCode, Problem};
use vmseal_api::request::CloneVm;
use vmseal_api::size::Size;

use super::place::of_datastore;
use crate::hosts::mounted;
use crate::hosts::osds;
use crate::operation::{Elsewhere, SentDisks};
use crate::services::caller::{Caller, Privilege};
use crate::services::migrate::{
    examine, is_encrypted, must_be_encrypted, require_reached, takes_vms,
};
use crate::services::nics::without_ports;
use crate::services::{Services, create_vm, hosts, image_layouts, redundancy, room};
use crate::store::datastores::{self, Datastore};
use crate::store::disks::Disk;
use crate::store::hosts::Host;
use crate::store::policies::{self, Policy};
use crate::store::snapshots::Snapshot;
use crate::store::{Write, nics, snapshots, vms};

/// Another host that a clone is for.
pub(super) struct Destination {
    pub host: Host,
    pub way: Way,
    /// The datastores that it has.
    datastores: Vec<Datastore>,
}

/// How a clone gets there.
pub(super) enum Way {
    /// Both hosts have the datastores of the VM's disks, and the clone's are there, too.
    Beside,
    /// It is made on this datastore, which both hosts have.
    Shared(Datastore),
    /// It is made beside the VM's disks, and its disks are sent to this datastore.
    Sent { to: Datastore, encrypted: bool },
}

/// A clone that is requested for another host, and what that host has for it.
struct Asked<'a> {
    services: &'a Services,
    origin: &'a vms::Vm,
    /// The disks of the VM that hold something for the clone.
    disks: Vec<&'a Disk>,
    policy: Policy,
    linked: bool,
    host: &'a Host,
    agent: Arc<dyn HostAgent>,
    /// What it has.
    datastores: &'a [Datastore],
}

/// The other host that the clone is for, if the request names one; it is asked whether it can have the clone.
pub(super) async fn choose(
    services: &Services,
    caller: &Caller,
    (origin, disks): (&vms::Vm, &[Disk]),
    request: &CloneVm,
) -> Result<Option<Destination>, Problem> {
    let Some(name) = &request.host else { return Ok(None) };
    let host = hosts::find(services, name).await.map_err(of_host)?;
    if host.id == origin.host {
        return Ok(None);
    }
    if origin.key.is_some() {
        caller.require(Privilege::Migrate)?;
    }
    // It makes the clone.
    hosts::find(services, &origin.host.to_string()).await?.require_active()?;
    let there = takes_vms(services, origin, &host).map_err(|why| refused(origin, &host, &why))?;
    room::check_memory(services, host.id, &host.name, origin.memory)?;
    let mut read = services.store.read().await?;
    let policy = policies::find(&mut read, &origin.policy.to_string()).await?;
    let policy = policy.ok_or_else(|| Problem::not_found("policy", &origin.policy_name))?;
    let datastores = datastores::of_host(&mut read, host.id).await?;
    let cards = nics::of_vm(&mut read, origin.id).await?;
    let snapshot = match &request.snapshot {
        Some(name) => snapshots::find(&mut read, origin.id, name).await?,
        None => None,
    };
    drop(read);
    let agent = services.hosts.connected(host.id)?;
    let cards: Vec<NicSpec> = cards.into_iter().map(without_ports).collect();
    let examined =
        examine(&*agent, origin.id, cards.iter(), (&origin.hardware, origin.memory)).await;
    examined.map_err(|why| refused(origin, &host, &why))?;
    let holds = |disk: &&Disk| !disk.detached && is_for_clone(disk, snapshot.as_ref(), request);
    let disks = disks.iter().filter(holds).collect();
    let (host, datastores, linked) = (&host, &datastores, request.linked);
    let asked = Asked { services, origin, disks, policy, linked, host, agent, datastores };
    let way = asked.way(request.datastore.as_deref()).await?;
    if let Way::Sent { .. } = way {
        asked.require_sendable(&there)?;
        let reached = require_reached(services, origin, asked.host).await;
        reached.map_err(|why| asked.refused(&why))?;
    }
    let (host, datastores) = (host.clone(), datastores.clone());
    Ok(Some(Destination { host, way, datastores }))
}

/// Whether a disk of the VM holds something for the clone. Disks that are not in the snapshot are not cloned, wherever they are.
fn is_for_clone(disk: &Disk, snapshot: Option<&Snapshot>, request: &CloneVm) -> bool {
    match disk.role {
        DiskRole::Data | DiskRole::UefiVariables => {
            snapshot.is_none_or(|snapshot| snapshot.disks.contains(&disk.id))
        }
        DiskRole::CloudInit => request.cloud_init.is_none(),
        // A TPM is a new one.
        DiskRole::Tpm => false,
    }
}

fn of_host(problem: Problem) -> Problem {
    Problem { field: Some("host".to_owned()), ..problem }
}

fn refused(origin: &vms::Vm, host: &Host, why: &str) -> Problem {
    let (vm, host) = (&origin.name, &host.name);
    let detail = format!("the clone of VM '{vm}' cannot be on host '{host}': {why}");
    of_host(Problem::new(ErrorCode::WrongState, detail))
}

/// What people should know who did not ask for that.
fn in_the_clear(vm: &vms::Vm, encrypted: bool) -> Option<String> {
    let asked = vm.migration_encryption == MigrationEncryption::Disabled;
    (!encrypted && !asked).then(|| {
        "one of the hosts cannot encrypt what is sent: the disks go over the network in the clear"
            .to_owned()
    })
}

impl Asked<'_> {
    fn refused(&self, why: &str) -> Problem {
        refused(self.origin, self.host, why)
    }

    /// Whether the other host has a datastore.
    fn has(&self, id: DatastoreId) -> bool {
        self.datastores.iter().any(|it| it.id == id)
    }

    /// By which way the clone gets there.
    async fn way(&self, named: Option<&str>) -> Result<Way, Problem> {
        let lacking = self
            .disks
            .iter()
            .flat_map(|disk| disk.datastores().map(move |place| (disk, place)))
            .find(|(_, (id, _))| !self.has(*id));
        let datastore = match (named, lacking) {
            (Some(named), _) => self.named(named).await?,
            (None, None) => {
                self.are_there().await?;
                return Ok(Way::Beside);
            }
            (None, Some((disk, (_, name)))) if self.linked => {
                return Err(self.refused(&format!(
                    "it does not have datastore '{name}', which disk '{}' is on, and a linked clone shares its files there: share the datastore (vmseal datastore share {name} --host {}), or make a full clone (without --linked)",
                    disk.name, self.host.name
                )));
            }
            (None, Some(_)) => self.roomiest().await?,
        };
        let free = self.free_on(&datastore).await?;
        if datastore.on(self.origin.host).is_some() {
            self.require_replicas()?;
            return Ok(Way::Shared(datastore));
        }
        self.require_whole(&datastore)?;
        self.require_room(&datastore, free)?;
        let encrypted = is_encrypted(self.services, self.origin, self.host);
        Ok(Way::Sent { to: datastore, encrypted })
    }

    /// The datastore of the other host that the request names.
    async fn named(&self, named: &str) -> Result<Datastore, Problem> {
        let is_it = |it: &&Datastore| it.name == named || it.id.to_string() == named;
        if let Some(found) = self.datastores.iter().find(is_it) {
            return Ok(found.clone());
        }
        let found = datastores::find(&mut *self.services.store.read().await?, named).await;
        let found = found.map_err(of_datastore)?;
        let found = found.ok_or_else(|| of_datastore(Problem::not_found("datastore", named)))?;
        if self.has(found.id) {
            return Ok(found);
        }
        let detail = format!(
            "datastore '{}' belongs to host '{}', and the clone is for host '{}': choose a datastore of that host",
            found.name,
            found.host_names(),
            self.host.name
        );
        Err(of_datastore(Problem::new(ErrorCode::WrongState, detail)))
    }

    /// The datastore of the other host that the clone gets where none is named: one that both hosts have, if there is one, and of these the
    /// one with the most free room. Those that the policy does not allow get none.
    async fn roomiest(&self) -> Result<Datastore, Problem> {
        let mut best: Option<((bool, u64), &Datastore)> = None;
        let mut why = "it has no datastore for the disks".to_owned();
        for datastore in self.datastores {
            let allowed = osds::refusal(&self.policy, datastore, self.host.id);
            if let Some(no) = allowed.or(self.policy.redundancy.lacking(&datastore.pools)) {
                why = format!("datastore '{}': {no}", datastore.name);
                continue;
            }
            match self.measured(datastore).await? {
                Ok(free) => {
                    let rank = (datastore.on(self.origin.host).is_some(), free);
                    if best.is_none_or(|(most, _)| rank > most) {
                        best = Some((rank, datastore));
                    }
                }
                Err(no) => why = no,
            }
        }
        match best {
            Some((_, datastore)) => Ok(datastore.clone()),
            None => Err(self.refused(&why)),
        }
    }

    /// What is free on a datastore of the other host; or why it is not there.
    async fn measured(&self, datastore: &Datastore) -> Result<Result<u64, String>, Problem> {
        let name = &datastore.name;
        let Some(place) = datastore.spec_on(self.host.id) else {
            return Ok(Err(format!("it does not have datastore '{name}'")));
        };
        Ok(match self.agent.measure_datastore(place).await? {
            DatastoreCondition::Available { usage, .. } => Ok(usage.free),
            DatastoreCondition::WrongMark { detail }
            | DatastoreCondition::Unavailable { detail } => {
                Err(format!("datastore '{name}' is not there: {detail}"))
            }
        })
    }

    async fn free_on(&self, datastore: &Datastore) -> Result<u64, Problem> {
        self.measured(datastore).await?.map_err(|why| of_datastore(self.refused(&why)))
    }

    /// Refuses a host where a datastore of the VM's disks is not there now.
    async fn are_there(&self) -> Result<(), Problem> {
        let is_used = |it: &&Datastore| {
            self.disks.iter().any(|disk| disk.datastores().any(|(id, _)| id == it.id))
        };
        for datastore in self.datastores.iter().filter(is_used) {
            self.measured(datastore).await?.map_err(|why| self.refused(&why))?;
        }
        Ok(())
    }

    /// Refuses a host that does not have the datastores of the replicas, which the clone has, too.
    fn require_replicas(&self) -> Result<(), Problem> {
        let lacking = self.disks.iter().find_map(|disk| {
            let (place, name) = disk.replica.as_ref()?;
            (!self.has(place.datastore.datastore)).then_some((disk, name))
        });
        let Some((disk, name)) = lacking else { return Ok(()) };
        Err(self.refused(&format!(
            "it does not have datastore '{name}', which the replica of disk '{}' is on: share that (vmseal datastore share {name} --host {})",
            disk.name, self.host.name
        )))
    }

    /// Refuses to send what does not go to another host, or would be something else there.
    fn require_whole(&self, to: &Datastore) -> Result<(), Problem> {
        let what = if self.linked {
            "a linked clone shares the files of the other VM, which that host would not have: make a full clone (without --linked), or name a datastore that both hosts have"
        } else if self.disks.iter().any(|disk| disk.replica.is_some()) {
            "its disks would be sent without their replicas, which the policy asks for: name a datastore that both hosts have, and share that of the replicas"
        } else {
            return Ok(());
        };
        let detail = format!("the other host alone has datastore '{}', and {what}", to.name);
        Err(self.refused(&detail))
    }

    /// Refuses a datastore without room for what is allocated at once.
    fn require_room(&self, to: &Datastore, free: u64) -> Result<(), Problem> {
        let all = self.disks.iter().filter(|disk| disk.allocation == Allocation::Preallocated);
        let needed = all.fold(0_u64, |sum, disk| {
            let header = if disk.encrypted { HEADER_AREA } else { 0 };
            sum.saturating_add(disk.size).saturating_add(header)
        });
        if needed <= free {
            return Ok(());
        }
        let detail = format!(
            "the preallocated disks take {} of datastore '{}' of host '{}', their headers included, and {} are free: free some room or use another datastore",
            Size(needed),
            to.name,
            self.host.name,
            Size(free)
        );
        Err(of_datastore(Problem::new(ErrorCode::NoSpace, detail)))
    }

    /// Refuses hosts whose agents cannot send the disks, or receive them.
    fn require_sendable(&self, there: &HostDescription) -> Result<(), Problem> {
        let state = self.origin.hardware.tpm
            || self.disks.iter().any(|disk| disk.role.attachment() != Attachment::Disk);
        let has_key = self.policy.encryption;
        let needed = [
            (MIGRATE, true),
            (MIGRATE_DISKS, true),
            (MIGRATE_AT_REST, true),
            (MIGRATE_STATE, state),
            (MIGRATE_ENCRYPTED, has_key || must_be_encrypted(self.origin)),
            (MIGRATE_APART, has_key),
            (MIGRATE_TPM_AT_REST, self.origin.hardware.tpm),
        ];
        for (feature, _) in needed.into_iter().filter(|(_, is_needed)| *is_needed) {
            for (id, name, does) in [
                (self.host.id, &self.host.name, "receive"),
                (self.origin.host, &self.origin.host_name, "send"),
            ] {
                if !self.services.hosts.view(id).has(feature) {
                    let detail = format!(
                        "the agent of host '{name}' cannot {does} the disks of a VM that is off ({feature}): upgrade vmseal there, or name a datastore that both hosts have"
                    );
                    return Err(of_host(Problem::new(ErrorCode::Unsupported, detail)));
                }
            }
        }
        if there.migration_address.is_none() {
            return Err(self.refused("its agent has no address for migrations"));
        }
        Ok(())
    }
}

impl Destination {
    /// As the task has it.
    pub(super) fn of(&self, origin: &vms::Vm) -> Elsewhere {
        let sent = match &self.way {
            Way::Beside | Way::Shared(_) => None,
            Way::Sent { to, encrypted } => {
                Some(SentDisks { datastore: to.id, encrypted: *encrypted })
            }
        };
        Elsewhere { from: origin.host, to: self.host.id, sent }
    }

    /// The disks as they will be on that host.
    fn placed(&self, made: &[Disk]) -> Vec<Disk> {
        let at = |place: DatastoreSpec, name: &str, disk: &Disk| Disk {
            datastore: place,
            datastore_name: name.to_owned(),
            ..disk.clone()
        };
        let one = |disk: &Disk| {
            let to = match &self.way {
                Way::Sent { to, .. } => Some(to),
                Way::Beside | Way::Shared(_) => {
                    self.datastores.iter().find(|it| it.id == disk.datastore.datastore)
                }
            };
            let place = to.and_then(|to| Some((to, to.spec_on(self.host.id)?)));
            place.map_or_else(|| disk.clone(), |(to, place)| at(place, &to.name, disk))
        };
        made.iter().map(one).collect()
    }

    /// Refuses disks that would not be there as the policy asks. The datastore of those that are made in place was asked about.
    pub(super) async fn require(
        &self,
        services: &Services,
        write: &mut Write<'_>,
        policy: &Policy,
        made: &[Disk],
    ) -> Result<(), Problem> {
        let there = self.placed(made);
        image_layouts::require(services, (self.host.id, &self.host.name), policy, &there)?;
        let open = mounted::require_messenger(write, policy, self.host.id, &there).await;
        open.map_err(of_datastore)?;
        if let Way::Sent { .. } = self.way {
            osds::require(write, policy, &there).await.map_err(of_datastore)?;
            redundancy::require(write, policy, &there).await.map_err(of_datastore)?;
        }
        Ok(())
    }

    /// Says in a plan what is made where, and asks both hosts whether there is room.
    pub(super) async fn explain(
        &self,
        services: &Services,
        (vm, policy): (&vms::Vm, &Policy),
        (made, cards): (&[Disk], &[NicSpec]),
        planned: &mut Plan,
    ) -> Result<(), Problem> {
        let (there, at) = (self.placed(made), self.at(vm));
        planned.steps.insert(0, room::understood(&at, &there));
        planned.steps.insert(1, self.understood(vm, made));
        planned.warnings.extend(room::shared(services, &at).await?);
        planned.warnings.extend(self.examine(services, vm, (made, cards)).await?);
        if let Way::Sent { encrypted, .. } = &self.way {
            planned.warnings.extend(in_the_clear(vm, *encrypted));
        }
        planned.warnings.extend(image_layouts::in_directories(policy, &there));
        Ok(())
    }

    /// Asks both hosts whether they can make the disks and have the room, and says where thin disks may not have it.
    pub(super) async fn examine(
        &self,
        services: &Services,
        vm: &vms::Vm,
        (made, cards): (&[Disk], &[NicSpec]),
    ) -> Result<Vec<String>, Problem> {
        let (there, at) = (self.placed(made), self.at(vm));
        let examined = room::examine_made(services, &at, &there).await;
        let mut warnings = examined.map_err(of_datastore)?;
        match &self.way {
            Way::Beside => {}
            Way::Shared(_) => {
                let asked = create_vm::examine_disks(services, vm, made, cards).await;
                asked.map_err(of_datastore)?;
            }
            Way::Sent { .. } => {
                let asked = create_vm::examine_disks(services, &at, &there, cards).await;
                asked.map_err(of_datastore)?;
                warnings.extend(room::examine_copies(services, vm, made).await?);
            }
        }
        Ok(warnings)
    }

    /// The clone as it will be on that host.
    fn at(&self, vm: &vms::Vm) -> vms::Vm {
        let (host, host_name) = (self.host.id, self.host.name.clone());
        vms::Vm { host, host_name, ..vm.clone() }
    }

    /// Which way it goes, for people.
    fn understood(&self, vm: &vms::Vm, made: &[Disk]) -> String {
        let here = &vm.host_name;
        match &self.way {
            Way::Beside | Way::Shared(_) => format!(
                "make it on host '{here}', which has the same datastores: nothing is sent to the other host"
            ),
            Way::Sent { encrypted, .. } => {
                let disk =
                    |disk: &Disk| format!("{} (on datastore '{}')", disk.name, disk.datastore_name);
                let disks: Vec<_> = made.iter().map(disk).collect();
                let how = if *encrypted { "encrypted" } else { "not encrypted" };
                format!(
                    "make it on host '{here}' first, disks {}: they need the same room there until they are sent; what is sent is {how}",
                    disks.join(", ")
                )
            }
        }
    }
}
