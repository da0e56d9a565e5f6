//! VMs that are encrypted, decrypted, and given new data keys, off and running: at every point the VM is whole, the
//! inventory says what its host has, and at the end no copy, no former image and no key is left. Those that run have snapshots.

use vmseal_api::host::{DatastoreLocation, DatastoreSpec, DiskFacts, GuestControl, HostAgent};
use vmseal_api::request::{DecryptVm, EncryptVm, MoveVm, RecryptVm};
use vmseal_secret::sealed_box::Recipient;

use super::{snapshots, *};
use crate::services::{Caller, Outcome, mirror, recrypt};
use crate::store::snapshots::Snapshot;
use crate::store::{datastores, keys, policies};

/// What is done, and whether the VM runs meanwhile.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Mirror {
    pub(super) what: What,
    pub(super) runs: bool,
    /// Whether the disks are converted in their files.
    pub(super) in_place: bool,
}

#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum What {
    Encrypt,
    Decrypt,
    DeepRecrypt,
    Move,
}

const ALL: [Mirror; 8] = [
    Mirror { what: What::Encrypt, runs: false, in_place: false },
    Mirror { what: What::Encrypt, runs: true, in_place: false },
    Mirror { what: What::Decrypt, runs: false, in_place: false },
    Mirror { what: What::Decrypt, runs: true, in_place: false },
    Mirror { what: What::DeepRecrypt, runs: false, in_place: false },
    Mirror { what: What::DeepRecrypt, runs: true, in_place: false },
    Mirror { what: What::Move, runs: false, in_place: false },
    Mirror { what: What::Move, runs: true, in_place: false },
];

/// The datastore that disks are moved to, or a VM is cloned to, beside that of the fixture.
pub(super) async fn second(fixture: &Fixture) -> datastores::Datastore {
    let mut write = fixture.store.write().await.unwrap();
    if let Some(known) = datastores::find(&mut write, "second").await.unwrap() {
        return known;
    }
    let local = datastores::find(&mut write, "local").await.unwrap().unwrap();
    let location = DatastoreLocation::Dir { path: "/second".into() };
    let (id, name) = (vmseal_api::id::DatastoreId::new(), "second".to_owned());
    let spec = DatastoreSpec { datastore: id, location: location.clone() };
    fixture.agent.probe_datastore(spec).await.unwrap();
    let on = datastores::OnHost { location, ..local.hosts[0].clone() };
    let second = datastores::Datastore { id, name, hosts: vec![on], ..local };
    datastores::insert(&mut write, &second).await.unwrap();
    write.commit().await.unwrap();
    second
}

/// The same in the disks' own files.
const IN_PLACE: [Mirror; 3] = [
    Mirror { what: What::Encrypt, runs: false, in_place: true },
    Mirror { what: What::Decrypt, runs: false, in_place: true },
    Mirror { what: What::DeepRecrypt, runs: false, in_place: true },
];

/// What is done, of a VM that is off or of one that runs; both where all is tried.
fn kinds(part: &mut Part) -> Vec<Mirror> {
    ALL.chunks(2).flat_map(|both| part.of(both)).collect()
}

async fn policy(fixture: &Fixture, name: &str) -> vmseal_api::id::PolicyId {
    let mut read = fixture.store.read().await.unwrap();
    policies::find(&mut read, name).await.unwrap().unwrap().id
}

impl Mirror {
    /// The commit step.
    fn commit(self) -> &'static str {
        if self.in_place { "begin" } else { "switch" }
    }

    fn power(self) -> Power {
        if self.runs { Power::Running } else { Power::Off }
    }

    pub(super) async fn before(self, fixture: &Fixture) -> VmId {
        let policy = if self.what == What::Encrypt { "plain" } else { "encrypted" };
        let vm = fixture.made("web", policy).await;
        if self.runs {
            done(fixture, Operation::StartVm { vm, boot_once: None }).await;
            snapshots::taken(fixture, vm, "first").await;
            snapshots::taken(fixture, vm, "second").await;
        }
        vm
    }

    pub(super) async fn operation(self, fixture: &Fixture, vm: VmId) -> Operation {
        let in_place = self.in_place;
        match self.what {
            What::Encrypt => {
                let has_key = fixture.vm(vm).await.unwrap().key.is_some();
                let provider = (!has_key).then_some(fixture.provider());
                let policy = policy(fixture, "encrypted").await;
                Operation::EncryptVm { vm, policy, provider, in_place, disks: vec![] }
            }
            What::Decrypt => {
                let policy = policy(fixture, "plain").await;
                Operation::DecryptVm { vm, policy, in_place, disks: vec![] }
            }
            What::DeepRecrypt => Operation::DeepRecryptVm { vm, in_place, disks: vec![] },
            What::Move => {
                let (disks, to) = (fixture.disks(vm).await, second(fixture).await);
                Operation::MoveVm {
                    vm,
                    from: vec![disks[0].datastore.datastore],
                    disks: disks.iter().map(|disk| disk.id).collect(),
                    all: true,
                    to: to.spec_on(fixture.host).unwrap(),
                }
            }
        }
    }

    fn any(self) -> Operation {
        let (vm, policy) = (VmId::new(), vmseal_api::id::PolicyId::new());
        let in_place = self.in_place;
        match self.what {
            What::Encrypt => {
                let provider = Some(vmseal_api::id::ProviderId::new());
                Operation::EncryptVm { vm, policy, provider, in_place, disks: vec![] }
            }
            What::Decrypt => Operation::DecryptVm { vm, policy, in_place, disks: vec![] },
            What::DeepRecrypt => Operation::DeepRecryptVm { vm, in_place, disks: vec![] },
            What::Move => {
                let location = DatastoreLocation::Dir { path: "/second".into() };
                let to = DatastoreSpec { datastore: vmseal_api::id::DatastoreId::new(), location };
                Operation::MoveVm { vm, disks: vec![], all: true, from: vec![], to }
            }
        }
    }

    pub(super) fn steps(self) -> Vec<&'static str> {
        steps::of(&self.any()).iter().map(|step| step.name()).collect()
    }

    /// The steps that can be undone: up to the commit step.
    fn undone_steps(self) -> Vec<&'static str> {
        let mut steps = self.steps();
        let commit = steps.iter().position(|step| *step == self.commit()).unwrap();
        steps.truncate(commit + 1);
        steps
    }

    pub(super) fn is_past_commit(self, step: &str) -> bool {
        !self.undone_steps().contains(&step)
    }

    async fn begin(self, fixture: &Fixture, vm: VmId) -> vmseal_api::id::TaskId {
        let operation = self.operation(fixture, vm).await;
        fixture.begin(operation, "web").await
    }

    /// The VM is whole and encrypted, or not, in the inventory and on its host, and nothing else is left of it.
    async fn assert_is(self, fixture: &Fixture, vm: VmId, encrypted: bool, what: &str) {
        fixture.assert_whole(vm, self.power(), what).await;
        assert_agrees(fixture, vm, what).await;
        let row = fixture.vm(vm).await.unwrap();
        let policy = if encrypted { "encrypted" } else { "plain" };
        assert_eq!((row.policy_name.as_str(), row.key.is_some()), (policy, encrypted), "{what}");
        for disk in fixture.disks(vm).await {
            assert_eq!(disk.encrypted, encrypted, "{what}: {disk:?}");
        }
        assert_eq!(fixture.agent.mirrored(), (vec![], vec![]), "{what}: images are left");
        assert_eq!(fixture.agent.converted(), (vec![], vec![]), "{what}: disks have no name");
        let kept: Vec<_> = snapshots::rows(fixture, vm).await.iter().map(|row| row.id).collect();
        assert_eq!(snapshots::on_host(fixture, vm).await, kept, "{what}: its snapshots");
        let known = keys::of_vm(&mut fixture.store.read().await.unwrap(), vm).await.unwrap();
        assert_eq!(known, row.key.clone().into_iter().collect::<Vec<_>>(), "{what}: other keys");
        assert_eq!(fixture.agent.keys_held().contains(&vm), encrypted, "{what}: a key is held");
        if self.runs {
            let runs_with = fixture.agent.runs_with(vm).unwrap();
            assert_eq!(runs_with.key, row.key, "{what}: its guest runs with another key");
        }
    }

    pub(super) async fn assert_done(self, fixture: &Fixture, vm: VmId, what: &str) {
        self.assert_is(fixture, vm, self.what != What::Decrypt, what).await;
        let (kind, made, destroyed) = match self.what {
            What::Encrypt => ("vm.encrypted", 1, 0),
            What::Decrypt => ("vm.decrypted", 1, 1),
            What::DeepRecrypt => ("vm.deep-recrypted", 1, 0),
            What::Move => ("vm.moved", 1, 0),
        };
        let place = if self.what == What::Move { "second" } else { "local" };
        assert_on(fixture, vm, place, what).await;
        assert_eq!(fixture.events(kind).await.len(), 1, "{what}");
        assert_eq!(fixture.events("key.created").await.len(), made, "{what}");
        assert_eq!(fixture.events("key.destroyed").await.len(), destroyed, "{what}");
    }

    pub(super) async fn assert_undone(self, fixture: &Fixture, vm: VmId, what: &str) {
        self.assert_is(fixture, vm, self.what != What::Encrypt, what).await;
        assert_on(fixture, vm, "local", what).await;
        let (created, destroyed) =
            (fixture.events("key.created").await, fixture.events("key.destroyed").await);
        let left = usize::from(self.what != What::Encrypt);
        assert_eq!(created.len() - destroyed.len(), left, "{what}: {created:?} {destroyed:?}");
    }

    /// The VM is whole and uses its copies: the problem says so, an alarm is active, and the same again finishes it.
    pub(super) async fn assert_unfinished(
        self,
        fixture: &mut Fixture,
        vm: VmId,
        problem: &Problem,
        what: &str,
    ) {
        let lost = if self.in_place { "nothing is lost" } else { "is whole" };
        let told = problem.detail.contains(lost) && problem.detail.contains("begin it again");
        assert!(told, "{what}: {problem}");
        let alarm = "task-unfinished web".to_owned();
        assert!(fixture.alarms().await.contains(&alarm), "{what}");
        if !self.in_place {
            assert_agrees(fixture, vm, what).await;
        }
        fixture.restart(|engine| engine.environment.faults = None).await;
        let task = self.begin(fixture, vm).await;
        let ended = fixture.ended(task).await;
        assert_eq!(ended.state, TaskState::Done, "{what}: {:?}", ended.problem);
        self.assert_is(fixture, vm, self.what != What::Decrypt, what).await;
        assert!(!fixture.alarms().await.contains(&alarm), "{what}: the alarm is still active");
    }
}

/// All disks are on this datastore, for the inventory and for the guest that runs.
async fn assert_on(fixture: &Fixture, vm: VmId, datastore: &str, what: &str) {
    let disks = fixture.disks(vm).await;
    for disk in &disks {
        assert_eq!(disk.datastore_name, datastore, "{what}: {disk:?}");
    }
    let Some(runs_with) = fixture.agent.runs_with(vm) else { return };
    for disk in &disks {
        let served = runs_with.disk(disk.id).map(|served| &served.datastore);
        assert_eq!(served, Some(&disk.datastore), "{what}: its guest has it elsewhere");
    }
}

pub(super) async fn done(fixture: &Fixture, operation: Operation) {
    let task = fixture.begin(operation, "web").await;
    let ended = fixture.ended(task).await;
    assert_eq!(ended.state, TaskState::Done, "{:?}", ended.problem);
}

/// Each image is as the inventory has its disk, and opens with the VM's key.
pub(super) async fn assert_agrees(fixture: &Fixture, vm: VmId, what: &str) {
    let (row, images) = (fixture.vm(vm).await.unwrap(), fixture.agent.disks());
    for disk in fixture.disks(vm).await {
        let image = &images[&disk.id];
        let is_encrypted = matches!(image.facts, DiskFacts::Luks2 { .. });
        assert_eq!(disk.encrypted, is_encrypted, "{what}: {disk:?} {image:?}");
        assert_eq!(disk.facts.as_ref(), Some(&image.facts), "{what}");
        let key = row.key.as_ref().filter(|_| is_encrypted).map(|key| key.check.clone());
        assert_eq!(image.checks, key.into_iter().collect(), "{what}: it opens with another key");
    }
}

/// What may happen at each step of one of these; of all where all is tried.
pub(super) async fn one_of<T: Copy + std::fmt::Debug>(those: &[T], kind: impl Fn(T) -> Kind) {
    for it in Part::of_run().of(those) {
        println!("{it:?}");
        matrix(kind(it)).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn encryption_survives_every_fault_at_every_step() {
    one_of(&ALL[0..=1], Kind::Mirror).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn decryption_survives_every_fault_at_every_step() {
    one_of(&ALL[2..=3], Kind::Mirror).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn deep_recryption_survives_every_fault_at_every_step() {
    one_of(&ALL[4..=5], Kind::Mirror).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_move_survives_every_fault_at_every_step() {
    one_of(&ALL[6..=7], Kind::Mirror).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_conversion_in_place_survives_every_fault_at_every_step() {
    one_of(&IN_PLACE, Kind::Mirror).await;
}

/// A move of one disk leaves the others where they are, and what cannot be moved is refused.
#[tokio::test]
async fn the_disks_that_are_named_move_and_others_stay() {
    let fixture = Fixture::new().await;
    let services = fixture.services(Recipient::generate().unwrap());
    let vm = fixture.made("web", "encrypted").await;
    second(&fixture).await;
    let me = Caller::administrator("me");
    let name = fixture.disks(vm).await[1].name.clone();
    let request = |datastore: &str, disk: &str| MoveVm {
        datastore: datastore.to_owned(),
        disks: vec![disk.to_owned()],
        rate: None,
    };
    for (asked, code, field) in [
        (request("nowhere", &name), ErrorCode::NotFound, Some("datastore")),
        (request("second", "nothing"), ErrorCode::NotFound, Some("disks[0]")),
        (request("local", &name), ErrorCode::WrongState, None),
    ] {
        let refused = mirror::move_disks(&services, &me, "web", asked, true).await.unwrap_err();
        assert_eq!((refused.code, refused.field.as_deref()), (code, field), "{refused}");
    }
    let begun = mirror::move_disks(&services, &me, "web", request("second", &name), false).await;
    let Ok(Outcome::Done(task)) = begun else { panic!("{begun:?}") };
    let ended = fixture.ended(task.id).await;
    assert_eq!(ended.state, TaskState::Done, "{:?}", ended.problem);
    let disks = fixture.disks(vm).await;
    let places: Vec<_> = disks.iter().map(|disk| disk.datastore_name.as_str()).collect();
    assert_eq!(places, ["local", "second"]);
}

/// A deep recryption may be of one disk alone, also where the guest is paused.
#[tokio::test]
async fn only_the_disks_that_are_named_are_recrypted_also_while_the_guest_is_paused() {
    let fixture = Fixture::new().await;
    let services = fixture.services(Recipient::generate().unwrap());
    let vm = fixture.running("web").await;
    fixture.agent.control_guest(vm, GuestControl::Pause).await.unwrap();
    let me = Caller::administrator("me");
    let before = fixture.disks(vm).await;
    let deep =
        |disk: &str| RecryptVm { deep: true, disks: vec![disk.to_owned()], ..Default::default() };
    let refused = recrypt::recrypt(&services, &me, "web", deep("nothing"), true).await.unwrap_err();
    let named = (refused.code, refused.field.as_deref());
    assert_eq!(named, (ErrorCode::NotFound, Some("disks[0]")), "{refused}");
    let shallow = RecryptVm { deep: false, ..deep("nothing") };
    let refused = recrypt::recrypt(&services, &me, "web", shallow, true).await.unwrap_err();
    assert_eq!(refused.field.as_deref(), Some("disks"), "{refused}");
    let planned = recrypt::recrypt(&services, &me, "web", deep(&before[1].name), true).await;
    let Ok(Outcome::Planned(plan)) = planned else { panic!("{planned:?}") };
    let named = |disk: usize| plan.steps[0].contains(&format!("{} (", before[disk].name));
    assert!(named(1) && !named(0), "{plan:?}");
    let begun = recrypt::recrypt(&services, &me, "web", deep(&before[1].name), false).await;
    let Ok(Outcome::Done(task)) = begun else { panic!("{begun:?}") };
    let ended = fixture.ended(task.id).await;
    assert_eq!(ended.state, TaskState::Done, "{:?}", ended.problem);
}

/// Fails before the host is asked to use the copies, and injects a fault into the undoing of every step.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn undoing_survives_every_fault_at_every_step() {
    let mut part = Part::of_run();
    for kind in kinds(&mut part).into_iter().chain(IN_PLACE) {
        for step in kind.undone_steps() {
            for (point, fault) in [
                (FaultPoint::Before, Fault::Crash),
                (FaultPoint::After, Fault::Crash),
                (FaultPoint::Before, Fault::Fail(silent())),
                (FaultPoint::After, Fault::Fail(silent())),
                (FaultPoint::After, Fault::Twice),
            ] {
                if !part.has_next() {
                    continue;
                }
                let what = format!("{kind:?}, {fault:?} {point:?} undoing {step:?}");
                let crashes = matches!(fault, Fault::Crash);
                let (undoing, done) = at(step, TaskState::RollingBack, point, fault, 1);
                let both = failing_and(kind.commit(), undoing);
                let (fixture, vm, task) = carry_out(Kind::Mirror(kind), both, &done, crashes).await;
                let ended = fixture.task(task).await;
                assert_eq!(ended.state, TaskState::Failed, "{what}: {:?}", ended.problem);
                kind.assert_undone(&fixture, vm, &what).await;
            }
        }
    }
}

/// Fails the commit step before it does anything, and has other faults beside.
fn failing_and(commit: &'static str, others: Faults) -> Faults {
    let (failing, _) =
        at(commit, TaskState::Running, FaultPoint::Before, Fault::Fail(refused()), 1);
    Arc::new(move |step, state, point| match failing(step, state, point) {
        Fault::None => others(step, state, point),
        fault => fault,
    })
}

/// What can be neither finished nor undone leaves a whole VM, and any of the operations removes what it has left.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_is_stuck_leaves_a_whole_vm_and_is_cleared_by_the_next() {
    let mut part = Part::of_run();
    for kind in ALL.into_iter().chain(IN_PLACE) {
        for step in kind.undone_steps() {
            if !part.has_next() {
                continue;
            }
            let what = format!("{kind:?}, undoing {step:?} fails for good");
            let mut fixture = Fixture::new().await;
            let vm = kind.before(&fixture).await;
            let (stuck, _) = at(
                step,
                TaskState::RollingBack,
                FaultPoint::Before,
                Fault::Fail(refused()),
                u32::MAX,
            );
            let both = failing_and(kind.commit(), stuck);
            fixture.restart(|engine| engine.environment.faults = Some(both)).await;
            let task = kind.begin(&fixture, vm).await;
            assert_eq!(fixture.ended(task).await.state, TaskState::Unknown, "{what}");
            assert_agrees(&fixture, vm, &what).await;
            fixture.restart(|engine| engine.environment.faults = None).await;
            done(&fixture, kind.operation(&fixture, vm).await).await;
            kind.assert_is(&fixture, vm, kind.what != What::Decrypt, &what).await;
            assert!(fixture.alarms().await.is_empty(), "{what}: {:?}", fixture.alarms().await);
        }
    }
}

/// The host refuses for good to remove the former images of a VM that was encrypted; it is decrypted then.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn former_images_that_stay_are_removed_before_the_next_copy() {
    for runs in [false, true] {
        let fixture = Fixture::new().await;
        let encrypt = Mirror { what: What::Encrypt, runs, in_place: false };
        let vm = encrypt.before(&fixture).await;
        // To clear, to copy, to remove.
        fixture.agent.inject(Call::PutJob, 3, HostFault::Refuse(ErrorCode::Damaged));
        let task = encrypt.begin(&fixture, vm).await;
        let ended = fixture.ended(task).await;
        assert_eq!(ended.state, TaskState::Unknown);
        let problem = ended.problem.unwrap();
        assert!(problem.detail.contains("vmseal vm encrypt web"), "{problem}");
        assert_eq!(fixture.agent.mirrored().1.len(), 2, "the former images are gone");
        assert_agrees(&fixture, vm, "encrypted").await;
        let decrypt = Mirror { what: What::Decrypt, runs, in_place: false };
        done(&fixture, decrypt.operation(&fixture, vm).await).await;
        decrypt.assert_is(&fixture, vm, false, "decrypted after").await;
        assert!(fixture.alarms().await.is_empty());
    }
}

/// Lost calls to the host, lost answers, and restarts of the agent, also between two disks. Which of a call's repetitions it is
/// differs from run to run, as all of them take minutes: `VMSEAL_SEED=N` repeats a run, and `VMSEAL_ALL=1` tries all.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn lost_calls_and_restarts_of_the_agent_do_not_matter() {
    let mut part = Part::of_run();
    for kind in kinds(&mut part) {
        for call in
            [Call::RegisterVm, Call::OfferKey, Call::PutJob, Call::CommitJob, Call::Describe]
        {
            for fault in [
                HostFault::LoseRequest,
                HostFault::LoseAnswer,
                HostFault::Crash,
                HostFault::CrashHalfway,
                HostFault::CrashAfter,
            ] {
                for nth in part.of(&[1, 2, 3]) {
                    let what = format!("{kind:?}: {call:?} {fault:?}, the {nth}th time");
                    let fixture = Fixture::new().await;
                    let vm = kind.before(&fixture).await;
                    fixture.agent.inject(call, nth, fault);
                    let task = kind.begin(&fixture, vm).await;
                    let ended = fixture.ended(task).await;
                    assert_eq!(ended.state, TaskState::Done, "{what} {:?}", ended.problem);
                    kind.assert_done(&fixture, vm, &what).await;
                }
            }
        }
    }
}

/// One disk of two uses its copy, and the other one cannot: the inventory says what each disk is, and the same again
/// finishes it.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_switch_that_ends_between_two_disks_is_on_record_disk_by_disk() {
    for kind in ALL {
        let what = format!("{kind:?}");
        let mut fixture = Fixture::new().await;
        let vm = kind.before(&fixture).await;
        let second = fixture.disks(vm).await[1].id;
        fixture.agent.fail_disk(second);
        let task = kind.begin(&fixture, vm).await;
        let ended = fixture.ended(task).await;
        assert_eq!(ended.state, TaskState::Unknown, "{what}: {:?}", ended.problem);
        assert_agrees(&fixture, vm, &what).await;
        let encrypted: Vec<_> = fixture.disks(vm).await.iter().map(|it| it.encrypted).collect();
        let expected = match kind.what {
            What::Encrypt => [true, false],
            What::Decrypt => [false, true],
            What::DeepRecrypt | What::Move => [true, true],
        };
        assert_eq!(encrypted, expected, "{what}");
        assert!(fixture.events("key.destroyed").await.is_empty(), "{what}: a key is needed still");
        // The next ones deal with it as soon as that is possible, and do not go round it.
        let again = kind.begin(&fixture, vm).await;
        let ended = fixture.ended(again).await;
        assert_eq!(ended.state, TaskState::Failed, "{what}: {:?}", ended.problem);
        assert_agrees(&fixture, vm, &what).await;
        fixture.agent.mend_disks();
        fixture.restart(|_| {}).await;
        done(&fixture, kind.operation(&fixture, vm).await).await;
        kind.assert_is(&fixture, vm, kind.what != What::Decrypt, &what).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn it_can_be_cancelled_until_the_host_uses_the_copies() {
    for kind in ALL {
        for step in kind.steps() {
            let what = format!("{kind:?}, cancelled at {step:?}");
            let mut fixture = Fixture::new().await;
            let vm = kind.before(&fixture).await;
            let (faults, done) = at(step, TaskState::Running, FaultPoint::Before, Fault::Crash, 1);
            fixture.restart(|engine| engine.environment.faults = Some(faults)).await;
            let task = kind.begin(&fixture, vm).await;
            let crashed = async || (done.load(Ordering::SeqCst) > 0).then_some(());
            fixture.eventually("it crashes", crashed).await;
            let cancelled = fixture.engine.cancel(&task.to_string(), "me").await;
            fixture.restart(|_| {}).await;
            let ended = fixture.ended(task).await;
            if kind.is_past_commit(step) {
                assert_eq!(cancelled.unwrap_err().code, ErrorCode::WrongState, "{what}");
                assert_eq!(ended.state, TaskState::Done, "{what}: {:?}", ended.problem);
                kind.assert_done(&fixture, vm, &what).await;
                continue;
            }
            assert_eq!(ended.state, TaskState::Cancelled, "{what}: {:?}", ended.problem);
            kind.assert_undone(&fixture, vm, &what).await;
        }
    }
}

/// While it copies: the VM is held, its progress is shown, and it can be cancelled.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_copy_in_progress_holds_its_vm_and_can_be_cancelled() {
    for kind in ALL {
        let fixture = Fixture::new().await;
        let vm = kind.before(&fixture).await;
        let puts = fixture.calls(Call::PutJob);
        fixture.agent.set_work(std::time::Duration::from_millis(100));
        let task = kind.begin(&fixture, vm).await;
        fixture
            .eventually("it clears", async || (fixture.calls(Call::PutJob) > puts).then_some(()))
            .await;
        fixture.agent.set_work(LONG);
        let shown = async || {
            let shown = fixture.engine.shown(&fixture.task(task).await);
            (shown.step == "copy the disks").then_some(shown.progress?)
        };
        let progress = fixture.eventually("it copies", shown).await;
        assert_eq!(progress.total, 2 << 20);
        // Its power is another matter (`beside`).
        let second = Operation::SuspendVm { vm };
        let mut write = fixture.store.write().await.unwrap();
        let second = Engine::record(&mut write, second, "web", "me").await.unwrap_err();
        assert_eq!(second.code, ErrorCode::WrongState);
        drop(write);
        fixture.engine.cancel(&task.to_string(), "me").await.unwrap();
        let ended = fixture.ended(task).await;
        assert_eq!(ended.state, TaskState::Cancelled, "{kind:?} {:?}", ended.problem);
        kind.assert_undone(&fixture, vm, &format!("{kind:?}")).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_full_datastore_leaves_the_vm_as_it_was() {
    for kind in ALL {
        let fixture = Fixture::new().await;
        let vm = kind.before(&fixture).await;
        fixture.agent.set_full(true);
        let task = kind.begin(&fixture, vm).await;
        let ended = fixture.ended(task).await;
        assert_eq!(ended.state, TaskState::Failed);
        assert_eq!(ended.problem.unwrap().code, ErrorCode::NoSpace);
        kind.assert_undone(&fixture, vm, &format!("{kind:?}")).await;
    }
}

/// A provider that gives no keys is waited for, and does not matter where the host has the key already.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_sealed_provider_is_waited_for() {
    for kind in ALL {
        let mut fixture = Fixture::new().await;
        let vm = kind.before(&fixture).await;
        let waits = !matches!(kind.what, What::DeepRecrypt | What::Move);
        fixture.restart_sealed().await;
        let task = kind.begin(&fixture, vm).await;
        if waits {
            fixture
                .eventually("it waits", async || {
                    let task = fixture.task(task).await;
                    let ended = task.ended.is_some();
                    (task.state == TaskState::Waiting || ended).then_some(())
                })
                .await;
            fixture.unlock("keys").await;
        }
        let ended = fixture.ended(task).await;
        assert_eq!(ended.state, TaskState::Done, "{kind:?} {:?}", ended.problem);
        if !waits {
            fixture.unlock("keys").await;
        }
        kind.assert_done(&fixture, vm, &format!("{kind:?}")).await;
    }
}

/// The VM can be stopped and started after it.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_was_changed_starts_and_stops_as_before() {
    for kind in ALL {
        let fixture = Fixture::new().await;
        let vm = kind.before(&fixture).await;
        done(&fixture, kind.operation(&fixture, vm).await).await;
        if kind.runs {
            done(&fixture, Operation::StopVm { vm, force: true, timeout_seconds: 1 }).await;
        }
        done(&fixture, Operation::StartVm { vm, boot_once: None }).await;
        let running = Mirror { runs: true, ..kind };
        running.assert_done(&fixture, vm, &format!("{kind:?}")).await;
    }
}

/// What snapshots keep follows, but memory, which belongs to disks that are encrypted as they are now, and are where they are.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn snapshots_follow_and_the_memory_that_they_keep() {
    let fixture = Fixture::new().await;
    let services = fixture.services(Recipient::generate().unwrap());
    let vm = fixture.made("web", "encrypted").await;
    second(&fixture).await;
    snapshots::taken(&fixture, vm, "first").await;
    let me = Caller::administrator("me");
    let decrypt = || mirror::decrypt(&services, &me, "web", DecryptVm::default(), true);
    let Ok(Outcome::Planned(plan)) = decrypt().await else { panic!("it is not planned") };
    assert!(plan.warnings.iter().any(|it| it.contains("its 1 snapshots")), "{plan:?}");
    let first = snapshots::rows(&fixture, vm).await.remove(0);
    let (id, name) = (vmseal_api::id::SnapshotId::new(), "asleep".to_owned());
    let with_memory = Snapshot { id, name, memory: true, current: false, ..first };
    let mut write = fixture.store.write().await.unwrap();
    crate::store::snapshots::insert(&mut write, &with_memory).await.unwrap();
    write.commit().await.unwrap();
    let Ok(Outcome::Planned(plan)) = decrypt().await else { panic!("it is not planned") };
    let in_the_clear = "will be on the datastore in the clear";
    assert!(plan.warnings.iter().any(|it| it.contains(in_the_clear)), "{plan:?}");
    let to = || MoveVm { datastore: "second".to_owned(), disks: vec![], rate: None };
    let moved = mirror::move_disks(&services, &me, "web", to(), true).await;
    assert!(matches!(moved, Ok(Outcome::Planned(_))), "{moved:?}");
    let deep = RecryptVm { deep: true, ..Default::default() };
    let deep = recrypt::recrypt(&services, &me, "web", deep, true).await;
    assert!(matches!(deep, Ok(Outcome::Planned(_))), "{deep:?}");
    // An agent of before would leave the memory behind.
    fixture.agent.lack_features(&[vmseal_api::host::version::MIRROR_MEMORY]);
    fixture.agent.restart();
    let lacks = async || {
        let moved = mirror::move_disks(&services, &me, "web", to(), true).await;
        moved.err().filter(|it| it.code == ErrorCode::Unsupported)
    };
    fixture.eventually("its agent cannot", lacks).await;
}

/// An encrypted VM that another provider has the key of is not encrypted with a second one.
#[tokio::test]
async fn a_vm_that_has_a_key_keeps_it() {
    let fixture = Fixture::new().await;
    let services = fixture.services(Recipient::generate().unwrap());
    let vm = fixture.made("web", "encrypted").await;
    fixture.recryption(vm).await;
    let request = EncryptVm { provider: Some("other".to_owned()), ..EncryptVm::default() };
    let me = Caller::administrator("me");
    let refused = mirror::encrypt(&services, &me, "web", request, true).await.unwrap_err();
    assert_eq!(refused.field.as_deref(), Some("provider"), "{refused}");
}
