//! VMs that a lost inventory had are adopted; what is wrong with them, or was done to them, is refused and changes
//! nothing.

use std::collections::HashSet;

use vmseal_api::adopt::{AdoptStatus, AdoptVms, AdoptedVm, Rename};
use vmseal_api::drain::OnDrain;
use vmseal_api::hardware::Firmware;
use vmseal_api::host::descriptor::{VmDescriptor, WITHOUT_SNAPSHOTS, WITHOUT_TREATMENT};
use vmseal_api::host::survey::FoundDescriptor;
use vmseal_api::host::version::{ABOUT, DESCRIPTORS, SURVEY_MEMORIES, TREATMENT, USAGE};
use vmseal_api::host::{Allocation, BODY_MAX, DatastoreLocation, HostAgent};
use vmseal_api::id::{DatastoreId, PolicyId, SnapshotId, TaskId};
use vmseal_api::limits::{DESCRIPTION_MAX, SNAPSHOTS_MAX};
use vmseal_api::migration::MigrationEncryption;
use vmseal_api::request::SetVm;
use vmseal_secret::sealed_box::Recipient;

use super::super::adopt_vm;
use super::{mirror, snapshots, *};
use crate::services::{Caller, Outcome, adopt, create_vm, set_vm};
use crate::store::{keys, memory_generations, policies, vms};

pub fn steps() -> Vec<&'static str> {
    adopt_vm::STEPS.iter().map(|step| step.name()).collect()
}

/// The inventory loses a VM, as if another one had taken its place.
async fn lose(fixture: &Fixture, vm: VmId) {
    let known = fixture.vm(vm).await.unwrap();
    let mut write = fixture.store.write().await.unwrap();
    vms::delete(&mut write, vm).await.unwrap();
    if let Some(key) = &known.key {
        keys::forget(&mut write, vm, key).await.unwrap();
    }
    write.commit().await.unwrap();
    assert!(keys::of_vm(&mut fixture.store.read().await.unwrap(), vm).await.unwrap().is_empty());
}

/// A VM that is on the datastore and not in the inventory.
pub async fn lost(fixture: &Fixture, name: &str) -> VmId {
    let vm = fixture.made(name, "encrypted").await;
    lose(fixture, vm).await;
    vm
}

/// The directory of the datastore.
fn location() -> DatastoreLocation {
    DatastoreLocation::Dir { path: "/store".into() }
}

/// What a request to adopt answers.
pub async fn asked(fixture: &Fixture, request: AdoptVms, dry_run: bool) -> Vec<AdoptedVm> {
    let services = fixture.services(Recipient::generate().unwrap());
    let me = Caller::administrator("me");
    adopt::adopt(&services, &me, "local", request, dry_run).await.unwrap().vms
}

/// Begins to adopt the only VM.
pub async fn begin(fixture: &Fixture) -> TaskId {
    let told = asked(fixture, AdoptVms::default(), false).await;
    assert_eq!((told.len(), told[0].status), (1, AdoptStatus::Begun), "{told:?}");
    told[0].task.unwrap()
}

/// The inventory does not have it, and its disks and its key are as they were.
async fn assert_as_it_was(fixture: &Fixture, vm: VmId, what: &str) {
    assert!(fixture.vm(vm).await.is_none(), "{what}: it is in the inventory");
    assert!(fixture.disks(vm).await.is_empty(), "{what}: rows of its disks are left");
    let disks = fixture.agent.disks();
    assert_eq!(disks.values().filter(|disk| disk.vm == vm).count(), 2, "{what}: a disk is gone");
    assert!(fixture.events("key.destroyed").await.is_empty(), "{what}: its key was destroyed");
    let mut read = fixture.store.read().await.unwrap();
    assert!(keys::of_vm(&mut read, vm).await.unwrap().is_empty(), "{what}: a key is left");
}

/// The same, and its host has forgotten it.
pub async fn assert_undone(fixture: &Fixture, vm: VmId, what: &str) {
    assert_as_it_was(fixture, vm, what).await;
    fixture
        .eventually("its host has forgotten it", async || {
            (!fixture.agent.registered().contains(&vm)).then_some(())
        })
        .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn adoption_survives_every_fault_at_every_step() {
    matrix(Kind::Adopt).await;
}

#[tokio::test]
async fn an_adopted_vm_is_what_it_was_and_starts() {
    let fixture = Fixture::new().await;
    let vm = fixture.made("web", "encrypted").await;
    let (before, disks) = (fixture.vm(vm).await.unwrap(), fixture.disks(vm).await);
    lose(&fixture, vm).await;
    // Nothing is done by a dry run.
    let told = asked(&fixture, AdoptVms::default(), true).await;
    assert_eq!((told[0].status, told[0].task), (AdoptStatus::Possible, None), "{told:?}");
    assert!(fixture.vm(vm).await.is_none());
    let task = begin(&fixture).await;
    assert_eq!(fixture.ended(task).await.state, TaskState::Done);
    fixture.assert_whole(vm, Power::Off, "adopted").await;
    let after = fixture.vm(vm).await.unwrap();
    let facts = |vm: &crate::store::vms::Vm| {
        (vm.name.clone(), vm.vcpus, vm.memory, vm.key.clone(), vm.policy, vm.provider)
    };
    assert_eq!(facts(&before), facts(&after));
    let of = |disks: &[crate::store::disks::Disk]| format!("{disks:?}");
    assert_eq!(of(&disks), of(&fixture.disks(vm).await));
    assert_eq!(fixture.events("vm.adopted").await.len(), 1);
    let start = fixture.begin(Operation::StartVm { vm, boot_once: None }, "web").await;
    assert_eq!(fixture.ended(start).await.state, TaskState::Done);
    // A second time it is known.
    let told = asked(&fixture, AdoptVms::default(), false).await;
    assert_eq!(told[0].status, AdoptStatus::Known, "{told:?}");
}

/// A VM that is off, with a snapshot that keeps memory, and one that does not. Its first disk is on the second datastore, or with the others.
async fn with_memory(fixture: &Fixture, elsewhere: bool) -> (VmId, [SnapshotId; 2]) {
    let vm = fixture.running("web").await;
    let asleep = snapshots::taken_with(fixture, vm, "asleep", true).await;
    let disks = snapshots::taken(fixture, vm, "disks").await;
    let stop = Operation::StopVm { vm, force: true, timeout_seconds: 1 };
    fixture.done(stop, "web").await;
    if elsewhere {
        let (first, to) = (fixture.disks(vm).await.remove(0), mirror::second(fixture).await);
        let moves = Operation::MoveVm {
            vm,
            disks: vec![first.id],
            all: false,
            from: vec![first.datastore.datastore],
            to: to.spec_on(fixture.host).unwrap(),
        };
        fixture.done(moves, "web").await;
    }
    (vm, [asleep, disks])
}

/// The only VM is not adopted, as its host does not see what memory its snapshots keep. What is said.
async fn memory_unseen(fixture: &Fixture, vm: VmId) -> String {
    let told = asked(fixture, AdoptVms::default(), false).await;
    assert_eq!((told.len(), told[0].status), (1, AdoptStatus::Refused), "{told:?}");
    assert_eq!((told[0].vm, told[0].task), (vm, None), "{told:?}");
    assert!(fixture.vm(vm).await.is_none());
    told[0].detail.clone()
}

/// Its descriptor does not say which of its snapshots keep memory: the files beside its first disk do, on whatever datastore that is.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_adopted_vm_has_the_memory_that_its_snapshots_keep() {
    for elsewhere in [false, true] {
        let fixture = Fixture::new().await;
        let (vm, [asleep, disks]) = with_memory(&fixture, elsewhere).await;
        let generation = async || {
            let mut read = fixture.store.read().await.unwrap();
            memory_generations::of_snapshot(&mut read, asleep).await.unwrap()
        };
        let before = generation().await;
        assert!(before.is_some(), "{elsewhere}: it has no generation");
        lose(&fixture, vm).await;
        if elsewhere {
            // The other datastore does not answer: nobody knows of the memory, which the adoption would lose.
            let silent = HostFault::Refuse(ErrorCode::TimedOut);
            fixture.agent.inject(Call::SurveyDatastore, 2, silent);
            let said = memory_unseen(&fixture, vm).await;
            assert!(said.contains("/second") && said.contains("memory"), "{said}");
        }
        // The file is there, and cannot be read now.
        fixture.agent.spoil_memory(asleep, "an input/output error");
        let said = memory_unseen(&fixture, vm).await;
        let home = format!("{}/{vm} ", if elsewhere { "/second" } else { "/store" });
        for part in [home.as_str(), "snapshot 'asleep', an input/output error"] {
            assert!(said.contains(part), "{elsewhere}: {said}");
        }
        assert!(!said.contains("'disks'"), "{elsewhere}: {said}");
        fixture.agent.mend_memory(asleep);
        let told = asked(&fixture, AdoptVms::default(), true).await;
        assert_eq!(told[0].status, AdoptStatus::Possible, "{elsewhere}: {told:?}");
        assert!(told[0].warnings.is_empty(), "{elsewhere}: {told:?}");
        let ended = fixture.ended(begin(&fixture).await).await;
        assert_eq!(ended.state, TaskState::Done, "{elsewhere}: {:?}", ended.problem);
        let rows = snapshots::rows(&fixture, vm).await;
        let kept: Vec<_> = rows.iter().map(|row| (row.id, row.memory)).collect();
        assert_eq!(kept, [(asleep, true), (disks, false)], "{elsewhere}");
        assert_eq!(generation().await, before, "{elsewhere}");

        let (running, discard_memory) = (false, false);
        let revert = Operation::RevertSnapshot { vm, snapshot: asleep, running, discard_memory };
        fixture.done(revert, "web").await;
        fixture.assert_whole(vm, Power::Suspended, "reverted").await;
        fixture.done(Operation::StartVm { vm, boot_once: None }, "web").await;
        fixture.assert_whole(vm, Power::Running, "it goes on").await;
    }
}

/// Which files beside its first disk are memory of its snapshots, its host knows by the descriptor there.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn without_the_descriptor_beside_its_first_disk_a_vm_is_not_adopted_without_memory() {
    let fixture = Fixture::new().await;
    let (vm, _) = with_memory(&fixture, true).await;
    let second = fixture.disks(vm).await.remove(0).datastore.datastore;
    lose(&fixture, vm).await;
    fixture.agent.lose_descriptor_on(second, vm);
    let said = memory_unseen(&fixture, vm).await;
    assert!(said.contains("/second") && said.contains("vm.json"), "{said}");
}

/// It does not look for memory: its snapshots come back without, which is said before and while they do.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn that_an_older_agent_does_not_tell_which_snapshots_keep_memory_is_said() {
    let fixture = Fixture::new().await;
    fixture.restart_agent_without(&[SURVEY_MEMORIES]).await;
    let (vm, [asleep, disks]) = with_memory(&fixture, false).await;
    let without_snapshots = fixture.made("plain", "encrypted").await;
    lose(&fixture, vm).await;
    lose(&fixture, without_snapshots).await;
    let mut tasks = Vec::new();
    for dry_run in [true, false] {
        let told = asked(&fixture, AdoptVms::default(), dry_run).await;
        let line = |vm: VmId| told.iter().find(|it| it.vm == vm).unwrap();
        let expected = if dry_run { AdoptStatus::Possible } else { AdoptStatus::Begun };
        assert_eq!(line(vm).status, expected, "{told:?}");
        let [warning] = &line(vm).warnings[..] else { panic!("{told:?}") };
        assert!(warning.contains("keep memory"), "{warning}");
        assert!(warning.contains("upgrade vmseal there before"), "{warning}");
        assert_eq!(line(without_snapshots).status, expected, "{told:?}");
        assert!(line(without_snapshots).warnings.is_empty(), "{told:?}");
        tasks.extend(told.iter().filter_map(|it| it.task));
    }
    assert_eq!(tasks.len(), 2);
    for task in tasks {
        let ended = fixture.ended(task).await;
        assert_eq!(ended.state, TaskState::Done, "{:?}", ended.problem);
    }
    let rows = snapshots::rows(&fixture, vm).await;
    let kept: Vec<_> = rows.iter().map(|row| (row.id, row.memory)).collect();
    assert_eq!(kept, [(asleep, false), (disks, false)]);
}

/// What its users say of it is in its descriptors: of one that is off, of one that runs, and after it has run on.
#[tokio::test]
async fn an_adopted_vm_has_what_its_users_said_of_it() {
    for runs in [false, true] {
        let fixture = Fixture::new().await;
        let vm = match runs {
            true => fixture.running("web").await,
            false => fixture.made("web", "encrypted").await,
        };
        let services = fixture.services(Recipient::generate().unwrap());
        let me = Caller::administrator("me");
        let request = SetVm {
            description: Some("the shop".to_owned()),
            labels: [("tier".to_owned(), Some("gold".to_owned()))].into(),
            autostart: Some(true),
            migration_encryption: Some(MigrationEncryption::Required),
            on_drain: Some(OnDrain::Leave),
            template: (!runs).then_some(true),
            ..SetVm::default()
        };
        set_vm::set(&services, &me, "web", request, false).await.unwrap();
        lose(&fixture, vm).await;
        if runs {
            // The agent of a host that has joined another server is another run.
            fixture.agent.restart();
            fixture
                .eventually("it is an alarm", async || {
                    fixture.alarms().await.contains(&format!("vm-unknown {vm}")).then_some(())
                })
                .await;
            fixture.connected().await;
        }
        let ended = fixture.ended(begin(&fixture).await).await;
        assert_eq!(ended.state, TaskState::Done, "{runs}: {:?}", ended.problem);
        let after = fixture.vm(vm).await.unwrap();
        assert_eq!((after.description.as_str(), after.autostart), ("the shop", true), "{runs}");
        assert_eq!(after.labels.get("tier").map(String::as_str), Some("gold"), "{runs}");
        assert_eq!(after.migration_encryption, MigrationEncryption::Required, "{runs}");
        assert_eq!((after.on_drain, after.template), (OnDrain::Leave, !runs));
    }
}

/// An agent of an earlier version is not told what it would refuse, and writes descriptors without it.
#[tokio::test]
async fn an_older_agent_is_not_told_what_users_say_of_a_vm() {
    let fixture = Fixture::new().await;
    fixture.restart_agent_without(&[ABOUT]).await;
    let vm = fixture.made("web", "encrypted").await;
    let services = fixture.services(Recipient::generate().unwrap());
    let me = Caller::administrator("me");
    let request = SetVm { autostart: Some(true), ..SetVm::default() };
    set_vm::set(&services, &me, "web", request, false).await.unwrap();
    assert_eq!(fixture.agent.registered_as(vm).unwrap().about, None);
    let found = fixture.agent.survey_datastore(location()).await.unwrap().vms.remove(0);
    let FoundDescriptor::Read { descriptor, .. } = found.descriptor else { panic!("{found:?}") };
    assert_eq!(descriptor.version, WITHOUT_SNAPSHOTS);
    lose(&fixture, vm).await;
    assert_eq!(fixture.ended(begin(&fixture).await).await.state, TaskState::Done);
    assert!(!fixture.vm(vm).await.unwrap().autostart);
}

/// One that knows what is said of a VM, and not how it is treated.
#[tokio::test]
async fn an_older_agent_is_told_what_users_say_without_what_it_does_not_know() {
    let fixture = Fixture::new().await;
    fixture.restart_agent_without(&[TREATMENT]).await;
    let vm = fixture.made("web", "encrypted").await;
    describe_snapshot(&fixture, vm).await;
    let services = fixture.services(Recipient::generate().unwrap());
    let me = Caller::administrator("me");
    let request = SetVm {
        autostart: Some(true),
        on_drain: Some(OnDrain::Stop),
        template: Some(true),
        ..SetVm::default()
    };
    set_vm::set(&services, &me, "web", request, false).await.unwrap();
    let told = fixture.agent.registered_as(vm).unwrap();
    assert!(told.about.is_some_and(|about| about.autostart && !about.has_treatment()));
    assert_eq!((told.snapshots.len(), told.snapshots[0].description.as_str()), (1, ""));
    let found = fixture.agent.survey_datastore(location()).await.unwrap().vms.remove(0);
    let FoundDescriptor::Read { descriptor, .. } = found.descriptor else { panic!("{found:?}") };
    assert_eq!(descriptor.version, WITHOUT_TREATMENT);
}

/// A VM gets a snapshot of which something is said; its host is told.
pub async fn describe_snapshot(fixture: &Fixture, vm: VmId) -> SnapshotId {
    let snapshot = snapshots::taken(fixture, vm, "kept").await;
    let mut write = fixture.store.write().await.unwrap();
    sqlx::query("UPDATE snapshots SET description = 'before 2.0' WHERE vm_id = $1")
        .bind(vm.to_string())
        .execute(&mut *write)
        .await
        .unwrap();
    write.commit().await.unwrap();
    crate::hosts::register(&fixture.store, &fixture.hosts, vm).await.unwrap();
    snapshot
}

/// Otherwise its host would refuse it, and it could not be started.
#[tokio::test]
async fn a_vm_of_which_the_most_is_said_has_a_definition_that_hosts_read() {
    let fixture = Fixture::new().await;
    let vm = fixture.made("web", "encrypted").await;
    for index in 0..SNAPSHOTS_MAX {
        snapshots::noted(&fixture, vm, &format!("s{index}"), false).await;
    }
    // Six bytes of JSON each.
    let long = "\u{1}".repeat(DESCRIPTION_MAX);
    let mut write = fixture.store.write().await.unwrap();
    sqlx::query("UPDATE snapshots SET description = $1 WHERE vm_id = $2")
        .bind(&long)
        .bind(vm.to_string())
        .execute(&mut *write)
        .await
        .unwrap();
    write.commit().await.unwrap();
    let (_, spec) = crate::hosts::definition(&fixture.store, vm).await.unwrap().unwrap();
    let length = serde_json::to_vec(&spec).unwrap().len();
    assert!(length < BODY_MAX, "{length} bytes");
    assert_eq!(spec.snapshots.len(), SNAPSHOTS_MAX);
    assert_eq!(spec.snapshots[0].description, long);
}

#[tokio::test]
async fn a_snapshot_of_an_adopted_vm_has_its_description() {
    let fixture = Fixture::new().await;
    let vm = fixture.made("web", "encrypted").await;
    let snapshot = describe_snapshot(&fixture, vm).await;
    lose(&fixture, vm).await;
    let ended = fixture.ended(begin(&fixture).await).await;
    assert_eq!(ended.state, TaskState::Done, "{:?}", ended.problem);
    let rows = snapshots::rows(&fixture, vm).await;
    let said: Vec<_> = rows.iter().map(|row| (row.id, row.description.as_str())).collect();
    assert_eq!(said, [(snapshot, "before 2.0")]);
}

#[tokio::test]
async fn a_vm_that_runs_is_adopted_and_runs_on() {
    let fixture = Fixture::new().await;
    let vm = fixture.running("web").await;
    lose(&fixture, vm).await;
    // The agent of a host that has joined another server is another run.
    fixture.agent.restart();
    fixture
        .eventually("it is an alarm, and not ended", async || {
            fixture.alarms().await.contains(&format!("vm-unknown {vm}")).then_some(())
        })
        .await;
    fixture.assert_runs(vm).await;
    // The alarm may be of before the restart.
    fixture.connected().await;
    let task = begin(&fixture).await;
    let ended = fixture.ended(task).await;
    assert_eq!(ended.state, TaskState::Done, "{:?}", ended.problem);
    fixture.assert_whole(vm, Power::Running, "adopted").await;
    fixture.eventually("no alarm", async || fixture.alarms().await.is_empty().then_some(())).await;
}

#[tokio::test]
async fn two_vms_of_one_name_need_another_one() {
    let fixture = Fixture::new().await;
    let vm = lost(&fixture, "web").await;
    let other = fixture.made("web", "encrypted").await;
    let told = asked(&fixture, AdoptVms::default(), false).await;
    let line = |vm: VmId| told.iter().find(|it| it.vm == vm).unwrap();
    assert_eq!(line(other).status, AdoptStatus::Known);
    assert_eq!(line(vm).status, AdoptStatus::Refused);
    assert!(line(vm).detail.contains("--rename"), "{told:?}");
    let rename = vec![Rename { vm: vm.to_string(), name: "web2".to_owned() }];
    let told = asked(&fixture, AdoptVms { rename, ..AdoptVms::default() }, false).await;
    let task = told.iter().find(|it| it.vm == vm).unwrap().task.unwrap();
    assert_eq!(fixture.ended(task).await.state, TaskState::Done);
    assert_eq!(fixture.vm(vm).await.unwrap().name, "web2");
}

/// Whoever writes to the datastore changes the descriptor.
#[tokio::test]
async fn what_is_wrong_with_a_vm_is_refused_and_said() {
    type Change = Box<dyn Fn(&mut VmDescriptor)>;
    let cases: [(&str, Change); 9] = [
        ("was changed by somebody", Box::new(|it| it.memory = Some(64 << 20))),
        ("was changed by somebody", Box::new(|it| it.name = "other".to_owned())),
        ("is not authenticated", Box::new(|it| it.mac = None)),
        ("another VM", Box::new(|it| it.vm = VmId::new())),
        ("names no disk", Box::new(|it| it.disks.clear())),
        ("--vcpus and --memory", Box::new(|it| it.vcpus = None)),
        ("add it first", Box::new(|it| it.disks[1].datastore = Some(DatastoreId::new()))),
        (
            "names another disk or key",
            Box::new(|it| {
                it.key.as_mut().unwrap().key_id = "another".to_owned();
            }),
        ),
        ("there is no policy 'gone'", Box::new(|it| it.policy = Some("gone".to_owned()))),
    ];
    for (said, change) in cases {
        let fixture = Fixture::new().await;
        let vm = lost(&fixture, "web").await;
        fixture.agent.change_descriptors(vm, change);
        let told = asked(&fixture, AdoptVms::default(), false).await;
        assert_eq!((told.len(), told[0].status), (1, AdoptStatus::Refused), "{said}: {told:?}");
        assert!(told[0].detail.contains(said), "{said}: {}", told[0].detail);
        assert_as_it_was(&fixture, vm, said).await;
        assert!(fixture.events("vm.adopted").await.is_empty());
    }
}

/// The header says what it should, and the data is under another key.
#[tokio::test]
async fn a_disk_that_does_not_open_with_its_key_keeps_its_vm_out() {
    let fixture = Fixture::new().await;
    let vm = fixture.made("web", "encrypted").await;
    let disk = fixture.disks(vm).await[1].id;
    lose(&fixture, vm).await;
    fixture.agent.exchange_image(disk);
    fixture.agent.change_descriptors(vm, |it| it.mac = None);
    let request = AdoptVms { unauthenticated: true, ..AdoptVms::default() };
    let told = asked(&fixture, request, false).await;
    let ended = fixture.ended(told[0].task.unwrap()).await;
    assert_eq!(ended.state, TaskState::Failed);
    assert_eq!(ended.problem.unwrap().code, ErrorCode::KeyMismatch);
    assert_undone(&fixture, vm, "another key").await;
    // Nobody has said with the key that the descriptor is right.
    let found = fixture.agent.survey_datastore(location()).await.unwrap().vms.remove(0);
    let FoundDescriptor::Read { descriptor, .. } = found.descriptor else { panic!("{found:?}") };
    assert_eq!(descriptor.mac, None, "it was authenticated before its disks were opened");
    assert_eq!(fixture.events("key.read").await.len(), 1);
}

/// The inventory is older than a disk, and than the growth of another.
#[tokio::test]
async fn what_a_known_vm_has_got_since_the_backup_is_said() {
    let fixture = Fixture::new().await;
    let vm = fixture.made("web", "encrypted").await;
    let told = asked(&fixture, AdoptVms::default(), true).await;
    assert_eq!((told[0].status, told[0].newer.len()), (AdoptStatus::Known, 0), "{told:?}");
    let disks = fixture.disks(vm).await;
    let (grown, added) = (&disks[0], &disks[1]);
    let mut write = fixture.store.write().await.unwrap();
    crate::store::disks::delete(&mut write, added.id).await.unwrap();
    crate::store::disks::set_size(&mut write, grown.id, grown.size / 2).await.unwrap();
    write.commit().await.unwrap();
    let told = asked(&fixture, AdoptVms::default(), true).await;
    let newer = &told[0].newer;
    assert_eq!(newer.len(), 2, "{told:?}");
    let of = |disk: &crate::store::disks::Disk| {
        newer.iter().find(|it| it.contains(&format!("'{}'", disk.name))).unwrap()
    };
    assert!(of(grown).contains("it grew since"), "{newer:?}");
    assert!(of(added).contains("not in the inventory"), "{newer:?}");
    assert!(of(added).contains(&added.id.to_string()), "{newer:?}");
}

#[tokio::test]
async fn an_unauthenticated_descriptor_is_taken_where_that_is_asked_for() {
    let fixture = Fixture::new().await;
    let vm = lost(&fixture, "web").await;
    fixture.agent.change_descriptors(vm, |it| it.mac = None);
    let request = AdoptVms { unauthenticated: true, ..AdoptVms::default() };
    let told = asked(&fixture, request, false).await;
    assert_eq!(told[0].detail, "its descriptor is not authenticated");
    assert_eq!(fixture.ended(told[0].task.unwrap()).await.state, TaskState::Done);
    fixture.assert_whole(vm, Power::Off, "adopted").await;
}

#[tokio::test]
async fn a_policy_must_do_what_the_disks_are() {
    let fixture = Fixture::new().await;
    let vm = lost(&fixture, "web").await;
    let with = |policy: &str| AdoptVms { policy: Some(policy.to_owned()), ..AdoptVms::default() };
    let told = asked(&fixture, with("plain"), false).await;
    assert!(told[0].detail.contains("policy 'plain' does not encrypt"), "{told:?}");
    let policy = policies::Policy {
        id: PolicyId::new(),
        name: "gold".to_owned(),
        encryption: true,
        provider: None,
        allocation: Allocation::Preallocated,
        limits: Default::default(),
        cache: None,
        replica: None,
        cpu_model: None,
        downtime_milliseconds: None,
        messenger: None,
        osd_encryption: None,
        redundancy: Default::default(),
        image_layout: Default::default(),
    };
    let mut write = fixture.store.write().await.unwrap();
    policies::insert(&mut write, &policy).await.unwrap();
    write.commit().await.unwrap();
    let told = asked(&fixture, with("gold"), false).await;
    assert_eq!(fixture.ended(told[0].task.unwrap()).await.state, TaskState::Done);
    assert_eq!(fixture.vm(vm).await.unwrap().policy, policy.id);
    // A disk stays what it was made as.
    assert_eq!(fixture.disks(vm).await[0].allocation, Allocation::Thin);
}

#[tokio::test]
async fn without_its_provider_or_with_a_sealed_one_nothing_is_adopted() {
    let mut fixture = Fixture::new().await;
    let vm = lost(&fixture, "web").await;
    fixture.restart_sealed().await;
    let told = asked(&fixture, AdoptVms::default(), false).await;
    assert!(told[0].detail.contains("sealed"), "{told:?}");
    fixture.unlock("keys").await;
    let other = vmseal_api::id::ProviderId::new();
    fixture.agent.change_descriptors(vm, |it| it.key.as_mut().unwrap().provider = other);
    let told = asked(&fixture, AdoptVms::default(), false).await;
    assert!(told[0].detail.contains("--restore"), "{told:?}");
    assert_as_it_was(&fixture, vm, "no provider").await;
}

/// An agent of an earlier version knows neither surveys nor policies.
#[tokio::test]
async fn an_older_agent_is_told_no_policy_and_is_not_asked_for_a_survey() {
    let fixture = Fixture::new().await;
    fixture.restart_agent_without(&[DESCRIPTORS, USAGE]).await;
    let vm = fixture.made("web", "encrypted").await;
    let known = fixture.agent.survey_datastore(location()).await.unwrap();
    let descriptor = match &known.vms[0].descriptor {
        FoundDescriptor::Read { descriptor, .. } => descriptor,
        other => panic!("{other:?}"),
    };
    assert_eq!((known.vms[0].vm, &descriptor.policy), (vm, &None), "it was told a policy");
    let before = fixture.calls(Call::SurveyDatastore);
    let services = fixture.services(Recipient::generate().unwrap());
    let me = Caller::administrator("me");
    let refused = adopt::adopt(&services, &me, "local", AdoptVms::default(), false).await;
    let refused = refused.unwrap_err();
    assert_eq!(refused.code, ErrorCode::Unsupported);
    assert!(refused.detail.contains("upgrade vmseal there"), "{refused}");
    assert_eq!(fixture.calls(Call::SurveyDatastore), before);
    let start = fixture.begin(Operation::StartVm { vm, boot_once: None }, "web").await;
    assert_eq!(fixture.ended(start).await.state, TaskState::Done);
    let used = crate::services::usage::of_vms(&services, &me, None).await.unwrap();
    assert!(used.vms.is_empty() && used.missing[0].contains("upgrade vmseal there"), "{used:?}");
}

/// The inventory is older than the last recryption.
#[tokio::test]
async fn a_vm_that_has_got_another_key_since_the_backup_gets_it_in_the_inventory_too() {
    let fixture = Fixture::new().await;
    let vm = fixture.made("web", "encrypted").await;
    let old = fixture.vm(vm).await.unwrap().key.unwrap();
    let task = fixture.begin(fixture.recryption(vm).await, "web").await;
    assert_eq!(fixture.ended(task).await.state, TaskState::Done);
    let new = fixture.vm(vm).await.unwrap().key.unwrap();
    // As the backup has it: with the old key, of which it does not know that it is destroyed.
    let mut write = fixture.store.write().await.unwrap();
    vms::set_key(&mut write, vm, &old).await.unwrap();
    write.commit().await.unwrap();
    let told = asked(&fixture, AdoptVms::default(), true).await;
    assert_eq!(told[0].status, AdoptStatus::Possible, "{told:?}");
    assert!(told[0].detail.contains(&old.key_id), "{told:?}");
    assert_eq!(fixture.vm(vm).await.unwrap().key, Some(old.clone()));
    // A key that does not open the disks is not taken, and the VM stays as it was.
    let disk = fixture.disks(vm).await[0].id;
    fixture.agent.exchange_image(disk);
    let ended = fixture.ended(begin(&fixture).await).await;
    assert_eq!(ended.problem.unwrap().code, ErrorCode::KeyMismatch);
    assert_eq!(fixture.vm(vm).await.unwrap().key, Some(old.clone()));
    fixture.agent.exchange_image_for(disk, &new.check);
    let ended = fixture.ended(begin(&fixture).await).await;
    assert_eq!(ended.state, TaskState::Done, "{:?}", ended.problem);
    assert_eq!(fixture.vm(vm).await.unwrap().key, Some(new));
    fixture.assert_whole(vm, Power::Off, "with its key").await;
    assert_eq!(fixture.events("vm.key-adopted").await.len(), 1);
    let told = asked(&fixture, AdoptVms::default(), false).await;
    assert_eq!(told[0].status, AdoptStatus::Known, "{told:?}");
}

/// The headers say which disks are a TPM's and a firmware's.
#[tokio::test]
async fn a_vm_that_is_known_by_its_headers_alone_has_its_tpm_and_its_firmware() {
    for firmware in [Firmware::Uefi, Firmware::UefiSecureBoot] {
        let fixture = Fixture::new().await;
        let services = fixture.services(Recipient::generate().unwrap());
        let me = Caller::administrator("me");
        let mut create = super::tpm::request("encrypted");
        create.hardware.firmware = firmware;
        let begun = create_vm::create(&services, &me, create, false).await.unwrap();
        let Outcome::Done(task) = begun else { panic!("nothing was begun") };
        let vm = fixture.task(task.id).await.operation.vm().unwrap();
        assert_eq!(fixture.ended(task.id).await.state, TaskState::Done);
        let roles = async || {
            let disks = fixture.disks(vm).await;
            disks.iter().map(|disk| (disk.id, disk.name.clone(), disk.role)).collect::<HashSet<_>>()
        };
        let (before, hardware) = (roles().await, fixture.vm(vm).await.unwrap().hardware);
        lose(&fixture, vm).await;
        fixture.agent.lose_descriptors(vm);
        let request = AdoptVms {
            rename: vec![Rename { vm: vm.to_string(), name: "again".to_owned() }],
            vcpus: Some(1),
            memory: Some(64 << 20),
            policy: Some("encrypted".to_owned()),
            unauthenticated: true,
            ..AdoptVms::default()
        };
        let told = asked(&fixture, request, false).await;
        let ended = fixture.ended(told[0].task.unwrap_or_else(|| panic!("{told:?}"))).await;
        assert_eq!(ended.state, TaskState::Done, "{:?}", ended.problem);
        assert_eq!(fixture.vm(vm).await.unwrap().hardware, hardware);
        assert_eq!(roles().await, before, "{firmware:?}");
    }
}

/// Its descriptor says what the inventory does, as an earlier vmseal has overwritten it, and the headers name another key.
#[tokio::test]
async fn a_vm_whose_disks_alone_name_its_key_gets_that_in_the_inventory_too() {
    let fixture = Fixture::new().await;
    let vm = fixture.made("web", "encrypted").await;
    let old = fixture.vm(vm).await.unwrap().key.unwrap();
    let task = fixture.begin(fixture.recryption(vm).await, "web").await;
    assert_eq!(fixture.ended(task).await.state, TaskState::Done);
    let new = fixture.vm(vm).await.unwrap().key.unwrap();
    let mut write = fixture.store.write().await.unwrap();
    vms::set_key(&mut write, vm, &old).await.unwrap();
    write.commit().await.unwrap();
    // Who can write to the datastore gets no other VM's key.
    let other = fixture.made("other", "encrypted").await;
    let mut write = fixture.store.write().await.unwrap();
    keys::forget(&mut write, vm, &new).await.unwrap();
    keys::insert(&mut write, other, &new).await.unwrap();
    write.commit().await.unwrap();
    // After what the host was told of the new key during the recryption has come: it has the descriptor written.
    fixture.agent.change_descriptors(vm, |it| (it.key, it.mac) = (Some(old.clone()), None));
    let told = asked(&fixture, AdoptVms::default(), true).await;
    let line = |told: &[AdoptedVm]| told.iter().find(|it| it.vm == vm).unwrap().clone();
    assert_eq!(line(&told).status, AdoptStatus::Refused, "{told:?}");
    assert!(line(&told).detail.contains(&format!("the key of VM {other}")), "{told:?}");
    let mut write = fixture.store.write().await.unwrap();
    keys::forget(&mut write, other, &new).await.unwrap();
    write.commit().await.unwrap();
    let told = asked(&fixture, AdoptVms::default(), false).await;
    let ended = fixture.ended(line(&told).task.unwrap()).await;
    assert_eq!(ended.state, TaskState::Done, "{:?}", ended.problem);
    assert_eq!(fixture.vm(vm).await.unwrap().key, Some(new));
    fixture.assert_whole(vm, Power::Off, "with its key").await;
    let told = asked(&fixture, AdoptVms::default(), false).await;
    assert_eq!(line(&told).status, AdoptStatus::Known, "{told:?}");
}

/// Only the images are left: what they do not say is given.
#[tokio::test]
async fn a_vm_whose_descriptor_is_gone_is_adopted_by_the_headers_of_its_disks() {
    let fixture = Fixture::new().await;
    let vm = fixture.made("web", "encrypted").await;
    let before = fixture.vm(vm).await.unwrap();
    lose(&fixture, vm).await;
    fixture.agent.lose_descriptors(vm);
    let told = asked(&fixture, AdoptVms::default(), false).await;
    assert_eq!(told[0].status, AdoptStatus::Refused);
    assert!(told[0].detail.contains("--rename"), "{told:?}");
    let mut request = AdoptVms {
        rename: vec![Rename { vm: vm.to_string(), name: "again".to_owned() }],
        ..AdoptVms::default()
    };
    let told = asked(&fixture, request.clone(), false).await;
    assert!(told[0].detail.contains("--vcpus and --memory"), "{told:?}");
    request = AdoptVms { vcpus: Some(2), memory: Some(64 << 20), ..request };
    let told = asked(&fixture, request.clone(), false).await;
    assert!(told[0].detail.contains("--policy"), "{told:?}");
    request.policy = Some("encrypted".to_owned());
    let told = asked(&fixture, request.clone(), false).await;
    assert!(told[0].detail.contains("--unauthenticated"), "{told:?}");
    assert_as_it_was(&fixture, vm, "not asked for").await;
    request.unauthenticated = true;
    let told = asked(&fixture, request, false).await;
    let ended = fixture.ended(told[0].task.unwrap()).await;
    assert_eq!(ended.state, TaskState::Done, "{:?}", ended.problem);
    fixture.assert_whole(vm, Power::Off, "by its headers").await;
    let after = fixture.vm(vm).await.unwrap();
    assert_eq!((after.name.as_str(), after.vcpus, after.key), ("again", 2, before.key));
}
