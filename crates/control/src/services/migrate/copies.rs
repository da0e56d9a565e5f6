//! The disks that a VM takes along to a host that does not have their datastores.

use vmseal_api::datastore::DatastoreCondition;
use vmseal_api::host::version::{
    MIGRATE_DISKS, MIGRATE_SHARED_TPM, MIGRATE_SNAPSHOTS, MIGRATE_STATE,
};
use vmseal_api::host::{Allocation, ArrivingCopy, Attachment, CopyRoom, DiskRole, KeptRoom};
use vmseal_api::id::DatastoreId;
use vmseal_api::problem::Problem;
use vmseal_api::size::Size;

use super::kept;
use crate::hosts::osds;
use crate::services::Services;
use crate::services::dumps::deletion;
use crate::services::vms::require_no_clones;
use crate::store::datastores::{self, Datastore};
use crate::store::disks::Disk;
use crate::store::dumps;
use crate::store::hosts::Host;
use crate::store::links;
use crate::store::policies::{self, Policy};
use crate::store::snapshots;
use crate::store::vms::Vm;
use crate::tasks::migrate_vm::tpm_stays;

/// The copies that a host gets.
pub(super) struct Copies {
    pub datastore: Datastore,
    pub disks: Vec<Disk>,
    /// How many snapshots go with them.
    snapshots: usize,
    /// What these keep, and what the disks of a linked clone stand on; none where the VM's host does not say it.
    kept: Option<KeptRoom>,
    /// Whether they are a linked clone's.
    linked: bool,
    /// The room that the datastore has.
    room: u64,
}

impl Copies {
    /// As the host is told of them.
    pub(super) fn on(&self, host: &Host) -> Vec<ArrivingCopy> {
        let Some(datastore) = self.datastore.spec_on(host.id) else { return Vec::new() };
        let copy = |disk: &Disk| ArrivingCopy { disk: disk.id, datastore: datastore.clone() };
        self.disks.iter().map(copy).collect()
    }

    /// What people are told of what goes with the disks.
    pub(super) fn with(&self) -> String {
        let kept = match self.snapshots {
            0 => return String::new(),
            1 => ", and what a snapshot keeps".to_owned(),
            many => format!(", and what {many} snapshots keep"),
        };
        match &self.kept {
            Some(room) => format!("{kept} ({})", sizes(room)),
            None => kept,
        }
    }

    /// What people should know of a linked clone.
    pub(super) fn linked(&self) -> Option<String> {
        self.linked.then(|| {
            format!(
                "the disks of a linked clone become disks of their own on datastore '{}': what they share with other VMs is copied as well",
                self.datastore.name
            )
        })
    }

    /// What people should know of disks that may not fit when they are full.
    pub(super) fn little_room(&self) -> Option<String> {
        let CopyRoom { at_most, .. } = needed(&self.disks, self.kept.as_ref());
        let (place, room) = (&self.datastore.name, Size(self.room));
        let kept = match (&self.kept, self.snapshots) {
            (Some(_), 0) => "",
            (Some(_), _) => " with what snapshots keep",
            (None, _) => {
                return Some(format!(
                    "datastore '{place}' has {room} free, and how much snapshots keep, or a linked clone shares, is not counted: the agent of the VM's host is of an earlier version"
                ));
            }
        };
        (at_most > self.room).then(|| {
            let all = Size(at_most);
            format!("the disks that are copied have {all} in all{kept}, and datastore '{place}' has {room} free")
        })
    }
}

/// What snapshots keep, for people: of disks, and of the guest's memory, if any.
pub(in crate::services) fn sizes(kept: &KeptRoom) -> String {
    match kept.memories {
        0 => Size(kept.of_disks()).to_string(),
        memories => format!("{}, and {} of memory", Size(kept.of_disks()), Size(memories)),
    }
}

/// The room that copies of these disks need.
fn needed(disks: &[Disk], kept: Option<&KeptRoom>) -> CopyRoom {
    let none = KeptRoom::default();
    let each =
        disks.iter().map(|disk| (disk.id, disk.size, disk.allocation == Allocation::Preallocated));
    kept.unwrap_or(&none).copies(each)
}

/// The copies that a host gets of a VM's disks, and where; none where it has all of their datastores. Or why it cannot get them.
pub(super) async fn of(
    services: &Services,
    vm: &Vm,
    disks: &[Disk],
    host: &Host,
    place: Option<&str>,
) -> Result<Option<Copies>, String> {
    let failed = |problem: Problem| problem.detail;
    let mut read = services.store.read().await.map_err(|error| failed(error.into()))?;
    let there = datastores::of_host(&mut read, host.id).await;
    let there = there.map_err(|error| failed(error.into()))?;
    let is_there = |disk: &Disk| there.iter().any(|it| it.id == disk.datastore.datastore);
    let has_named = |disk: &Disk| {
        let at = disk.datastore.datastore.to_string();
        place.is_some_and(|place| place == disk.datastore_name || place == at)
    };
    let knows = |host| services.hosts.view(host).has(MIGRATE_SHARED_TPM);
    let stays = |tpm: &Disk| {
        let is_named = place.is_some() && !has_named(tpm);
        tpm_stays(knows(host.id) && knows(vm.host), is_named, disks.iter().all(is_there))
    };
    let is_copied = |disk: &&Disk| !is_there(disk) || (disk.role == DiskRole::Tpm && !stays(disk));
    let copied: Vec<Disk> = disks.iter().filter(is_copied).cloned().collect();
    if copied.is_empty() {
        return match place {
            Some(_) => Err("it has the datastores of all disks, and they stay there: a datastore is named for copies of others (vmseal vm move moves disks)".to_owned()),
            None => Ok(None),
        };
    }
    let (mut snapshots, mut linked) = (0, false);
    // Snapshots keep nothing of a TPM's disk.
    if copied.iter().any(|disk| disk.role != DiskRole::Tpm) {
        let known = snapshots::of_vm(&mut read, vm.id).await;
        snapshots = known.map_err(|error| failed(error.into()))?.len();
        let link = links::of_vm(&mut read, vm.id).await;
        linked = link.map_err(|error| failed(error.into()))?.is_some();
        require_no_clones(&mut read, vm, None).await.map_err(failed)?;
    }
    // Core dumps are beside the first disk, and do not go with its copy.
    let first = disks.iter().find(|disk| disk.facts.is_some() && !disk.detached);
    if first.is_some_and(|first| copied.iter().any(|disk| disk.id == first.id)) {
        let dumps = dumps::of_vm(&mut read, vm.id).await.map_err(|error| failed(error.into()))?;
        if let Some(dump) = dumps.first() {
            return Err(format!(
                "the VM has core dumps, '{}' for one, which are beside its first disk and would stay behind: {}",
                dump.name,
                deletion(vm, dump)
            ));
        }
        if services.hosts.view(vm.host).vm(vm.id).is_some_and(|seen| !seen.panic_dumps.is_empty()) {
            return Err(format!(
                "the VM's guest has panicked, and its host has just written a core dump beside its first disk, which would stay behind: wait until it is listed (vmseal dump list {}), decrypt it if it is needed, and delete it first",
                vm.name
            ));
        }
    }
    let policy = policies::find(&mut read, &vm.policy.to_string()).await;
    let policy = policy.map_err(|error| failed(error.into()))?;
    drop(read);
    let has_layers = snapshots > 0 || linked;
    may_be_copied(services, vm, &copied, host, has_layers).map_err(|why| {
        match copied.iter().find(|disk| !is_there(disk)) {
            Some(disk) => format!("it does not have datastore '{}', {why}", disk.datastore_name),
            None => format!("the disk of the VM's TPM is to be copied, {why}"),
        }
    })?;
    let tpm = copied.iter().find(|disk| disk.role == DiskRole::Tpm);
    let (datastore, room) = roomiest(services, &there, host, (place, tpm), policy.as_ref()).await?;
    let kept = match has_layers {
        true => kept::of(services, vm, &copied).await.map_err(failed)?,
        false => Some(KeptRoom::default()),
    };
    let CopyRoom { at_least, .. } = needed(&copied, kept.as_ref());
    if at_least > room {
        let with = if snapshots > 0 { " with what snapshots keep" } else { "" };
        return Err(format!(
            "its datastore '{}' has {} free, and {} are needed{with}",
            datastore.name,
            Size(room),
            Size(at_least)
        ));
    }
    Ok(Some(Copies { datastore, disks: copied, snapshots, kept, linked, room }))
}

/// Whether disks can be copied to a host while their VM runs; or why not.
fn may_be_copied(
    services: &Services,
    vm: &Vm,
    disks: &[Disk],
    host: &Host,
    has_layers: bool,
) -> Result<(), String> {
    if !services.hosts.view(host.id).has(MIGRATE_DISKS) {
        return Err("and its agent receives no disks: upgrade vmseal there".to_owned());
    }
    if !services.hosts.view(vm.host).has(MIGRATE_DISKS) {
        return Err(
            "and the agent of the VM's host sends no disks: upgrade vmseal there".to_owned()
        );
    }
    let lacking = |feature| {
        let lacks = |host| !services.hosts.view(host).has(feature);
        match (lacks(host.id), lacks(vm.host)) {
            (false, false) => None,
            (true, _) => Some("there"),
            (false, true) => Some("on the VM's host"),
        }
    };
    if let Some(which) = lacking(MIGRATE_SNAPSHOTS).filter(|_| has_layers) {
        return Err(format!(
            "and disks with snapshots and those of linked clones are copied by a newer agent: upgrade vmseal {which}, or share the datastore with that host (vmseal datastore share)"
        ));
    }
    let state = disks.iter().find(|disk| disk.role.attachment() != Attachment::Disk);
    match state.zip(lacking(MIGRATE_STATE)) {
        Some((disk, which)) => {
            Err(format!("and disk '{}' needs a newer agent: upgrade vmseal {which}", disk.name))
        }
        None => Ok(()),
    }
}

/// The datastore of a host that was named, or the one with the most free room; and its room. The disk of a TPM goes to another one
/// than it is on, and pools that the VM's policy does not allow get none.
async fn roomiest(
    services: &Services,
    there: &[Datastore],
    host: &Host,
    (place, tpm): (Option<&str>, Option<&Disk>),
    policy: Option<&Policy>,
) -> Result<(Datastore, u64), String> {
    let agent = services.hosts.connected(host.id).map_err(|problem| problem.detail)?;
    let named =
        |it: &&Datastore| place.is_none_or(|place| it.name == place || it.id.to_string() == place);
    let mut best: Option<(Datastore, u64)> = None;
    let mut why = match place {
        Some(place) => format!("it has no datastore '{place}'"),
        None => "it has no datastore for copies of the disks".to_owned(),
    };
    let of_tpm: Option<DatastoreId> = tpm.map(|tpm| tpm.datastore.datastore);
    for datastore in there.iter().filter(named) {
        if of_tpm == Some(datastore.id) {
            why = format!(
                "the disk of the VM's TPM is on datastore '{}', and moves only to another one where one of both agents is of an earlier version: upgrade vmseal on both hosts, name a datastore for its copy, or add one to that host",
                datastore.name
            );
            continue;
        }
        let Some(spec) = datastore.spec_on(host.id) else { continue };
        if let Some(refused) = policy.and_then(|policy| osds::refusal(policy, datastore, host.id)) {
            why = format!("datastore '{}': {refused}", datastore.name);
            continue;
        }
        match agent.measure_datastore(spec).await.map_err(|problem| problem.detail)? {
            DatastoreCondition::Available { usage, .. } => {
                if best.as_ref().is_none_or(|(_, most)| usage.free > *most) {
                    best = Some((datastore.clone(), usage.free));
                }
            }
            DatastoreCondition::WrongMark { detail }
            | DatastoreCondition::Unavailable { detail } => {
                why = format!("datastore '{}' is not there: {detail}", datastore.name);
            }
        }
    }
    best.ok_or(why)
}

#[cfg(test)]
mod tests {
    use vmseal_agent::simulated::SNAPSHOT_ROOM;
    use vmseal_api::hardware::{Firmware, Hardware};
    use vmseal_api::host::version::{MEASURE_KEPT, MIGRATE_COMPRESSED};
    use vmseal_api::request::{CreateDisk, CreateVm, MigrateVm, TakeSnapshot};
    use vmseal_secret::sealed_box::Recipient;

    use super::*;
    use crate::operation::Operation;
    use crate::services::Outcome;
    use crate::services::caller::Caller;
    use crate::services::create_vm::create;
    use crate::services::migrate::migrate;
    use crate::services::migrate::tests::planned;
    use crate::services::snapshots::take;
    use crate::testing::Fixture;

    #[tokio::test]
    async fn a_host_that_has_the_disks_is_preferred_and_the_others_get_copies() {
        let fixture = Fixture::new().await;
        let (far, _) = fixture.add_host("far").await;
        fixture.running("web").await;
        let told = planned(&fixture, None, None).await;
        assert!(told.contains("has no datastore for copies"), "{told}");
        fixture.add_datastore(far, "far", "own").await;
        for datastore in [None, Some("own")] {
            let told = planned(&fixture, Some("far"), datastore).await;
            assert!(told.contains("copies of disks") && told.contains("datastore 'own'"), "{told}");
        }
        let told = planned(&fixture, Some("far"), Some("other")).await;
        assert!(told.contains("has no datastore 'other'"), "{told}");

        let (near, _) = fixture.add_host("near").await;
        fixture.share_datastore(near, "near").await;
        let told = planned(&fixture, None, None).await;
        assert!(told.contains("host 'near'") && !told.contains("copies"), "{told}");
        let told = planned(&fixture, Some("near"), Some("own")).await;
        assert!(told.contains("it has the datastores of all disks"), "{told}");
        let told = planned(&fixture, None, Some("own")).await;
        assert!(told.contains("host 'far', with copies"), "{told}");
    }

    /// What a dry run says of a VM with a snapshot that gets copies, and the warnings.
    async fn with_snapshot(fixture: &Fixture) -> String {
        let services = fixture.services(Recipient::generate().unwrap());
        let caller = Caller::administrator("me");
        match migrate(&services, &caller, "web", MigrateVm::default(), true).await {
            Ok(Outcome::Planned(plan)) => {
                format!("{} {}", plan.steps.join("; "), plan.warnings.join("; "))
            }
            Ok(_) => panic!("it was begun"),
            Err(problem) => problem.detail,
        }
    }

    #[tokio::test]
    async fn what_snapshots_keep_is_counted_and_named() {
        let fixture = Fixture::new().await;
        let (far, agent) = fixture.add_host("far").await;
        fixture.add_datastore(far, "far", "own").await;
        let vm = fixture.running("web").await;
        let disks = fixture.disks(vm).await;
        let all = disks.iter().map(|disk| disk.size).sum::<u64>();
        let told = with_snapshot(&fixture).await;
        assert!(!told.contains("keep"), "{told}");
        let (services, me) =
            (fixture.services(Recipient::generate().unwrap()), Caller::administrator("me"));
        let asked = TakeSnapshot { name: None, description: None, quiesce: false, memory: false };
        let taken = take(&services, &me, "web", asked, false).await;
        let Ok(Outcome::Done(task)) = taken else { panic!("no snapshot is taken") };
        fixture.ends_well(task.id).await;
        let kept = SNAPSHOT_ROOM * u64::try_from(disks.len()).unwrap();
        let told = with_snapshot(&fixture).await;
        let named = format!("and what a snapshot keeps ({})", Size(kept));
        assert!(told.contains(&named) && !told.contains("in all"), "{told}");

        // There is room for the disks, and not for what they and the snapshot may come to.
        agent.set_free(all + kept - 1);
        let told = with_snapshot(&fixture).await;
        assert!(told.contains("in all with what snapshots keep"), "{told}");
        // Not even for what the snapshot keeps now.
        agent.set_free(kept - 1);
        let told = with_snapshot(&fixture).await;
        assert!(told.contains("are needed with what snapshots keep"), "{told}");
        agent.set_free(kept);
        let told = with_snapshot(&fixture).await;
        assert!(told.contains("choose host 'far'"), "{told}");

        fixture.agent.lack_features(&[MEASURE_KEPT]);
        fixture.agent.restart();
        let unknown = async || {
            let told = with_snapshot(&fixture).await;
            told.contains("is not counted: the agent").then_some(())
        };
        fixture.eventually("the server sees an earlier agent", unknown).await;
    }

    #[tokio::test]
    async fn core_dumps_do_not_stay_behind() {
        let fixture = Fixture::new().await;
        let (far, _) = fixture.add_host("far").await;
        fixture.add_datastore(far, "far", "own").await;
        let (near, _) = fixture.add_host("near").await;
        fixture.share_datastore(near, "near").await;
        let vm = fixture.running("web").await;
        fixture.add_dump(vm, "first").await;
        let told = planned(&fixture, Some("far"), None).await;
        assert!(told.contains("core dumps, 'first' for one"), "{told}");
        // Decrypting alone would leave it there.
        assert!(told.contains("delete all of them (vmseal dump delete web first)"), "{told}");
        assert!(told.contains("(vmseal dump decrypt web first --to FILE)"), "{told}");
        let told = planned(&fixture, Some("near"), None).await;
        assert!(told.contains("choose host 'near'"), "{told}");
    }

    /// A VM that runs, with UEFI and a TPM.
    async fn with_firmware(fixture: &Fixture) {
        let services = fixture.services(Recipient::generate().unwrap());
        let disk = CreateDisk {
            force: false,
            name: "disk0".to_owned(),
            datastore: "local".to_owned(),
            size: 1 << 20,
            image: None,
            format: None,
            encrypted: None,
        };
        let request = CreateVm {
            description: String::new(),
            labels: Default::default(),
            autostart: false,
            migration_encryption: Default::default(),
            name: "web".to_owned(),
            policy: "encrypted".to_owned(),
            vcpus: 1,
            memory: 32 << 20,
            host: None,
            disks: vec![disk],
            nics: Vec::new(),
            hardware: Hardware { tpm: true, firmware: Firmware::Uefi, ..Hardware::default() },
            cloud_init: None,
            uefi_variables: None,
            tpm_state: None,
        };
        let caller = Caller::administrator("me");
        let Ok(Outcome::Done(task)) = create(&services, &caller, request, false).await else {
            panic!("nothing was begun")
        };
        fixture.ends_well(task.id).await;
        let vm = fixture.task(task.id).await.operation.vm().unwrap();
        fixture.done(Operation::StartVm { vm, boot_once: None }, "web").await;
    }

    #[tokio::test]
    async fn what_a_tpm_keeps_stays_where_the_host_has_its_datastore() {
        let fixture = Fixture::new().await;
        let (near, _) = fixture.add_host("near").await;
        fixture.share_datastore(near, "near").await;
        with_firmware(&fixture).await;
        let told = planned(&fixture, Some("near"), None).await;
        assert!(told.contains("choose host 'near'; memory"), "{told}");
        let told = planned(&fixture, Some("near"), Some("local")).await;
        assert!(told.contains("it has the datastores of all disks"), "{told}");
        // One that is named is for a copy of it, as no other disk needs one.
        fixture.add_datastore(near, "near", "own").await;
        let told = planned(&fixture, Some("near"), Some("own")).await;
        assert!(told.contains("copies of disks tpm (") && told.contains("'own'"), "{told}");
        let told = planned(&fixture, Some("near"), None).await;
        assert!(told.contains("choose host 'near'; memory"), "{told}");
    }

    #[tokio::test]
    async fn what_a_tpm_keeps_goes_to_another_datastore_where_an_agent_is_of_an_earlier_version() {
        let fixture = Fixture::new().await;
        let (near, agent) = fixture.add_host("near").await;
        fixture.share_datastore(near, "near").await;
        with_firmware(&fixture).await;
        agent.lack_features(&[MIGRATE_SHARED_TPM]);
        agent.restart();
        let seen = async || {
            let told = planned(&fixture, Some("near"), None).await;
            told.contains("'local', and moves only to another one").then_some(())
        };
        fixture.eventually("the server sees an earlier agent", seen).await;
        let told = planned(&fixture, Some("near"), Some("local")).await;
        assert!(told.contains("'local', and moves only to another one"), "{told}");
        fixture.add_datastore(near, "near", "own").await;
        let told = planned(&fixture, Some("near"), None).await;
        assert!(told.contains("copies of disks tpm (") && told.contains("'own'"), "{told}");
        assert!(!told.contains("disk0") && !told.contains("uefi-variables"), "{told}");
    }

    #[tokio::test]
    async fn what_firmware_and_tpm_keep_is_copied_by_agents_that_know_how() {
        let fixture = Fixture::new().await;
        let (far, agent) = fixture.add_host("far").await;
        fixture.add_datastore(far, "far", "own").await;
        with_firmware(&fixture).await;
        let told = planned(&fixture, Some("far"), None).await;
        assert!(told.contains("uefi-variables (") && told.contains("tpm ("), "{told}");
        agent.lack_features(&[MIGRATE_STATE]);
        agent.restart();
        let told = fixture.eventually("the server sees it", async || {
            let told = planned(&fixture, Some("far"), None).await;
            told.contains("upgrade vmseal there").then_some(told)
        });
        assert!(told.await.contains("disk 'uefi-variables' needs a newer agent"));
    }

    #[tokio::test]
    async fn an_agent_of_an_earlier_version_gets_nothing_compressed() {
        let fixture = Fixture::new().await;
        let (there, agent) = fixture.add_host("there").await;
        fixture.share_datastore(there, "there").await;
        fixture.running("web").await;
        let compress = async |compress| {
            let services = fixture.services(Recipient::generate().unwrap());
            let request = MigrateVm { compress, ..MigrateVm::default() };
            let caller = Caller::administrator("me");
            let planned = migrate(&services, &caller, "web", request, true).await;
            planned.map(drop).map_err(|problem| problem.detail)
        };
        compress(true).await.unwrap();
        agent.lack_features(&[MIGRATE_COMPRESSED]);
        agent.restart();
        let told = fixture.eventually("the server sees it", async || {
            let why = compress(true).await.err()?;
            why.contains("reads nothing that is compressed").then_some(())
        });
        told.await;
        compress(false).await.unwrap();
    }

    #[tokio::test]
    async fn an_agent_of_an_earlier_version_gets_no_disks() {
        let fixture = Fixture::new().await;
        let (far, agent) = fixture.add_host("far").await;
        fixture.add_datastore(far, "far", "own").await;
        fixture.running("web").await;
        agent.lack_features(&[MIGRATE_DISKS]);
        agent.restart();
        let told = fixture.eventually("the server sees it", async || {
            let told = planned(&fixture, Some("far"), None).await;
            told.contains("its agent receives no disks").then_some(told)
        });
        assert!(told.await.contains("datastore 'local'"));
    }
}
