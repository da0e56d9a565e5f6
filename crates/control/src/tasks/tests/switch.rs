//! The other host of a migration falls silent at the switch. Whether it runs the guest nobody else knows: the guest goes on nowhere until that
//! host answers, or an operator says that it is gone for good. One that has rebooted after it ran the guest answers, and decides nothing.

use std::time::Duration;

use vmseal_agent::simulated::SimulatedHost;
use vmseal_api::host::StopReason;
use vmseal_api::id::{HostId, TaskId};
use vmseal_secret::sealed_box::Recipient;

use super::migrate::{Disks, OTHER_HOST, files, other};
use super::*;
use crate::services::{self, Caller};
use crate::store::{hosts, placements};

/// Much longer than a step is retried here.
const AWAY: Duration = Duration::from_millis(300);

/// More calls than a host gets in a test.
const CALLS: u32 = 5000;

/// All calls of this kind fail from now on.
fn always(agent: &SimulatedHost, call: Call, fault: HostFault) {
    (1..=CALLS).for_each(|nth| agent.inject(call, nth, fault));
}

/// When the other host falls silent.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Silent {
    /// It has not been asked to let the guest go.
    Before,
    /// It has let the guest go, and its answer is lost.
    After,
}

impl Silent {
    const BOTH: [Self; 2] = [Self::Before, Self::After];
}

/// A migration that waits at the switch for its other host.
struct Bench {
    fixture: Fixture,
    there: SimulatedHost,
    to: HostId,
    vm: VmId,
    task: TaskId,
    when: Silent,
    what: String,
}

impl Bench {
    async fn new(disks: Disks, when: Silent, what: &str) -> Self {
        let what = format!("{disks:?} {when:?} {what}");
        let mut fixture = Fixture::new().await;
        let vm = disks.before(&fixture).await;
        let (there, to) = (fixture.agent_of(OTHER_HOST), other(&fixture).await);
        match when {
            Silent::After => there.inject(Call::CommitJob, 1, HostFault::FallSilentAfter),
            Silent::Before => {
                let (host, times) = (there.clone(), AtomicU32::new(0));
                let at_switch = ("switch", TaskState::Running, FaultPoint::Before);
                let faults: Faults = Arc::new(move |step, state, point| {
                    let here = (step, state, point) == at_switch;
                    if here && times.fetch_add(1, Ordering::SeqCst) == 0 {
                        host.set_reachable(false);
                    }
                    Fault::None
                });
                fixture
                    .restart(|engine: &mut Engine| engine.environment.faults = Some(faults))
                    .await;
            }
        }
        let task = fixture.begin(disks.operation(&fixture, vm).await, "web").await;
        let this = Self { fixture, there, to, vm, task, when, what };
        this.waits("let the guest go on").await;
        this
    }

    fn id(&self) -> String {
        self.task.to_string()
    }

    /// The task shows that it waits for the other host, and what can be done; nobody lets the guest go on, however long that is.
    async fn waits(&self, at: &str) {
        let what = &self.what;
        let waiting = async || {
            let shown = self.fixture.engine.shown(&self.fixture.task(self.task).await);
            let waits = shown.at().starts_with(at)
                && shown.at().ends_with(&format!("waiting for host '{OTHER_HOST}'"));
            shown.waiting.filter(|_| waits)
        };
        let waiting = self.fixture.eventually("it waits for the other host", waiting).await;
        let advice = format!("vmseal task cancel {} --force", self.task);
        assert!(waiting.detail.contains(&advice), "{what}: {waiting:?}");
        tokio::time::sleep(AWAY).await;
        assert!(self.fixture.task(self.task).await.ended.is_none(), "{what}: it was given up");
        assert!(!self.fixture.agent.runs(self.vm), "{what}: it goes on at the first host");
        assert_eq!(self.there.runs(self.vm), self.when == Silent::After, "{what}");
    }

    async fn cancel(&self) {
        self.fixture.engine.cancel(&self.id(), "me").await.unwrap();
        self.waits("rolling back: let the guest go on").await;
    }

    /// The server restarts, and waits as before.
    async fn restart(&mut self, at: &str) {
        self.fixture.restart(|_| {}).await;
        self.waits(at).await;
    }

    /// The other host answers again, and the server notices at once.
    async fn come_back(&self) {
        self.there.set_reachable(true);
        let found = hosts::find(&mut self.fixture.store.read().await.unwrap(), OTHER_HOST).await;
        self.fixture.hosts.add(&found.unwrap().unwrap()).unwrap();
    }

    /// What the task shows while its other host answers and does not run the guest.
    async fn says_restarted(&self) -> Option<String> {
        let shown = self.fixture.engine.shown(&self.fixture.task(self.task).await);
        let waiting = shown.waiting?;
        let known = waiting.name == OTHER_HOST
            && waiting.detail.contains("does not run it: the host or its agent has restarted");
        known.then_some(waiting.detail)
    }

    async fn generation(&self) -> u64 {
        let mut read = self.fixture.store.read().await.unwrap();
        placements::generation(&mut read, self.vm).await.unwrap()
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_switch_waits_for_the_other_host_however_long_that_is() {
    for disks in [Disks::Shared, Disks::Copied] {
        for when in Silent::BOTH {
            for restarts in [false, true] {
                let mut bench = Bench::new(disks, when, &format!("restarts: {restarts}")).await;
                if restarts {
                    bench.restart("let the guest go on").await;
                }
                bench.come_back().await;
                bench.fixture.ends_well(bench.task).await;
                disks.assert_done(&bench.fixture, bench.vm, &bench.what).await;
                assert_eq!(bench.fixture.events("vm.migrated").await.len(), 1, "{}", bench.what);
            }
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_switch_that_is_cancelled_is_undone_only_when_the_other_host_has_answered() {
    for disks in [Disks::Shared, Disks::Copied] {
        for when in Silent::BOTH {
            for restarts in [false, true] {
                let what = format!("cancelled, restarts: {restarts}");
                let mut bench = Bench::new(disks, when, &what).await;
                bench.cancel().await;
                if restarts {
                    bench.restart("rolling back: let the guest go on").await;
                }
                bench.come_back().await;
                let ended = bench.fixture.ended(bench.task).await;
                let (fixture, vm, what) = (&bench.fixture, bench.vm, &bench.what);
                match when {
                    Silent::Before => {
                        assert_eq!(
                            ended.state,
                            TaskState::Cancelled,
                            "{what}: {:?}",
                            ended.problem
                        );
                        disks.assert_undone(fixture, vm, what).await;
                    }
                    Silent::After => {
                        assert_eq!(ended.state, TaskState::Unknown, "{what}: {:?}", ended.problem);
                        let problem = ended.problem.unwrap();
                        disks.assert_unfinished(fixture, vm, &problem, what).await;
                    }
                }
            }
        }
    }
}

/// Without the operator's word nothing but the other host decides, where that has copies of the disks.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_operator_gives_up_a_host_that_is_gone_for_good_and_the_guest_goes_on_where_it_was() {
    for when in Silent::BOTH {
        for (cancelled, stopped) in [(false, false), (false, true), (true, false), (true, true)] {
            let what = format!("given up, cancelled before: {cancelled}, stopped: {stopped}");
            let mut bench = Bench::new(Disks::Copied, when, &what).await;
            let noticed = async || bench.fixture.hosts.connected(bench.to).is_err().then_some(());
            bench.fixture.eventually("the server notices", noticed).await;
            let generation = bench.generation().await;
            if cancelled {
                bench.cancel().await;
            }
            if stopped {
                // What the operator has said outlives the server.
                bench.fixture.engine.stop();
            }
            bench.fixture.engine.give_up(&bench.id(), "me").await.unwrap();
            if stopped {
                bench.fixture.restart(|_| {}).await;
            }
            let ended = bench.fixture.ended(bench.task).await;
            let (fixture, vm, what) = (&bench.fixture, bench.vm, &bench.what);
            assert_eq!(ended.state, TaskState::Cancelled, "{what}: {:?}", ended.problem);
            assert!(fixture.agent.runs(vm), "{what}: it stands still");
            assert_eq!(fixture.vm(vm).await.unwrap().host, fixture.host, "{what}");
            // That of the destination, which may have run, is the next one.
            assert!(bench.generation().await > generation + 1, "{what}: a lease may be as late");

            bench.come_back().await;
            let gone = async || {
                let there = &bench.there;
                let gone = !there.runs(vm) && !there.registered().contains(&vm);
                (gone && files(there, vm).is_empty()).then_some(())
            };
            fixture.eventually("the other host ends and forgets it", gone).await;
            let told = async || (fixture.events("vm.forgotten").await.len() == 1).then_some(());
            fixture.eventually("that is told", told).await;
            fixture.assert_whole(vm, Power::Running, what).await;
            fixture.done(Disks::Copied.operation(fixture, vm).await, "web").await;
            Disks::Copied.assert_done(fixture, vm, what).await;
        }
    }
}

/// A server that has recorded it ends. The other host is back when the next one goes on, and says that the guest runs there; it is to end it.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_host_that_was_given_up_decides_nothing_after_a_crash() {
    let mut bench = Bench::new(Disks::Copied, Silent::After, "the server ends").await;
    let (faults, done) = at("switch", TaskState::RollingBack, FaultPoint::After, Fault::Crash, 1);
    bench.fixture.restart(|engine: &mut Engine| engine.environment.faults = Some(faults)).await;
    bench.waits("let the guest go on").await;
    let noticed = async || bench.fixture.hosts.connected(bench.to).is_err().then_some(());
    bench.fixture.eventually("the server notices", noticed).await;
    bench.fixture.engine.give_up(&bench.id(), "me").await.unwrap();
    let crashed = async || (done.load(Ordering::SeqCst) > 0).then_some(());
    bench.fixture.eventually("the server ends", crashed).await;
    // Its guest is not ended before the task goes on.
    always(&bench.there, Call::PowerOff, HostFault::Refuse(ErrorCode::Internal));
    bench.there.set_reachable(true);
    bench.fixture.restart(|_| {}).await;
    let ended = bench.fixture.ended(bench.task).await;
    let (fixture, there, vm) = (&bench.fixture, &bench.there, bench.vm);
    assert_eq!(ended.state, TaskState::Cancelled, "{:?}", ended.problem);
    assert_eq!(fixture.vm(vm).await.unwrap().host, fixture.host);
    assert!(fixture.agent.runs(vm), "it stands still");
    there.forget_faults();
    bench.come_back().await;
    let gone = async || (!there.runs(vm) && files(there, vm).is_empty()).then_some(());
    fixture.eventually("the other host ends and forgets it", gone).await;
    fixture.assert_whole(vm, Power::Running, "given up before a crash").await;
}

/// It has restarted, does not have the VM, and cannot say more: as one without the datastore of its copies.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_host_that_answers_and_cannot_decide_is_given_up_by_an_operator() {
    let bench = Bench::new(Disks::Copied, Silent::Before, "it cannot decide").await;
    bench.cancel().await;
    bench.there.restart();
    always(&bench.there, Call::CancelJob, HostFault::Refuse(ErrorCode::WrongState));
    bench.come_back().await;
    let (fixture, vm) = (&bench.fixture, bench.vm);
    let answers = async || fixture.hosts.connected(bench.to).is_ok().then_some(());
    fixture.eventually("it answers", answers).await;
    tokio::time::sleep(AWAY).await;
    assert!(fixture.task(bench.task).await.ended.is_none(), "that was taken for an answer");
    assert!(!fixture.agent.runs(vm), "it goes on at the first host");
    fixture.engine.give_up(&bench.id(), "me").await.unwrap();
    let ended = fixture.ended(bench.task).await;
    assert_eq!(ended.state, TaskState::Cancelled, "{:?}", ended.problem);
    assert_eq!(fixture.vm(vm).await.unwrap().host, fixture.host);
    assert!(fixture.agent.runs(vm), "it stands still");
}

/// The guest has gone on there, and written to its copies. The lease beside them is all that is left of that: neither host runs the guest by
/// itself, and an operator has it go on as it was when it was sent.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_host_that_reboots_after_the_guest_ran_there_leaves_the_decision_to_an_operator() {
    for (cancelled, restarts) in [(false, false), (false, true), (true, false), (true, true)] {
        let what = format!("rebooted, cancelled before: {cancelled}, restarts: {restarts}");
        let mut bench = Bench::new(Disks::Copied, Silent::After, &what).await;
        if cancelled {
            bench.cancel().await;
        }
        bench.there.reboot();
        bench.come_back().await;
        let told = async || bench.says_restarted().await;
        let told = bench.fixture.eventually("it says what is known", told).await;
        let advice = format!("vmseal task cancel {} --force", bench.task);
        assert!(told.contains(&advice), "{}: {told}", bench.what);
        if restarts {
            bench.fixture.restart(|_| {}).await;
            let told = async || bench.says_restarted().await;
            bench.fixture.eventually("it waits still", told).await;
        }
        tokio::time::sleep(AWAY).await;
        let (fixture, vm, what) = (&bench.fixture, bench.vm, &bench.what);
        assert!(
            fixture.task(bench.task).await.ended.is_none(),
            "{what}: that was taken for an answer"
        );
        assert!(!fixture.agent.runs(vm), "{what}: what it has done there is lost");
        fixture.engine.give_up(&bench.id(), "me").await.unwrap();
        let ended = fixture.ended(bench.task).await;
        let undone = [TaskState::Cancelled, TaskState::Failed];
        assert!(undone.contains(&ended.state), "{what}: {:?} {:?}", ended.state, ended.problem);
        assert_eq!(fixture.vm(vm).await.unwrap().host, fixture.host, "{what}");
        assert!(fixture.agent.runs(vm), "{what}: it stands still");
        assert!(!files(&bench.there, vm).is_empty(), "{what}: what it has done there is removed");
    }
}

/// Its agent knows of the guest's end alone, and not any more what was made of the disks for it.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_host_where_the_guest_ended_before_its_agent_restarted_leaves_the_decision_to_an_operator()
 {
    for cancelled in [false, true] {
        let what = format!("the guest ended, cancelled before: {cancelled}");
        let bench = Bench::new(Disks::Copied, Silent::After, &what).await;
        if cancelled {
            bench.cancel().await;
        }
        bench.there.stop_guest(bench.vm, StopReason::QemuDied);
        bench.there.restart();
        assert!(bench.there.registered().contains(&bench.vm), "its agent does not know of the end");
        bench.come_back().await;
        let told = async || bench.says_restarted().await;
        let told = bench.fixture.eventually("it says what is known", told).await;
        assert!(told.contains(&format!("vmseal task cancel {} --force", bench.task)), "{told}");
        tokio::time::sleep(AWAY).await;
        let (fixture, vm, what) = (&bench.fixture, bench.vm, &bench.what);
        assert!(fixture.task(bench.task).await.ended.is_none(), "{what}: it was decided");
        assert!(!fixture.agent.runs(vm), "{what}: what it has done there is lost");
        fixture.engine.give_up(&bench.id(), "me").await.unwrap();
        let ended = fixture.ended(bench.task).await;
        assert_eq!(ended.state, TaskState::Cancelled, "{what}: {:?}", ended.problem);
        assert_eq!(fixture.vm(vm).await.unwrap().host, fixture.host, "{what}");
        assert!(fixture.agent.runs(vm), "{what}: it stands still");
    }
}

/// The lease is taken when the host is asked, and not before: no operator is needed.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_host_that_reboots_before_it_was_asked_says_that_the_guest_does_not_run_there() {
    for cancelled in [false, true] {
        let what = format!("rebooted, cancelled before: {cancelled}");
        let bench = Bench::new(Disks::Copied, Silent::Before, &what).await;
        if cancelled {
            bench.cancel().await;
        }
        bench.there.reboot();
        bench.come_back().await;
        let ended = bench.fixture.ended(bench.task).await;
        let expected = if cancelled { TaskState::Cancelled } else { TaskState::Failed };
        assert_eq!(ended.state, expected, "{}: {:?}", bench.what, ended.problem);
        Disks::Copied.assert_undone(&bench.fixture, bench.vm, &bench.what).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn only_a_switch_whose_host_does_not_answer_is_given_up() {
    let fixture = Fixture::new().await;
    let vm = Disks::Copied.before(&fixture).await;
    let there = fixture.agent_of(OTHER_HOST);
    let refused = async |task: TaskId| {
        let refused = fixture.engine.give_up(&task.to_string(), "me").await.unwrap_err();
        assert_eq!(refused.code, ErrorCode::WrongState, "{refused}");
        refused.detail
    };
    // Before the switch.
    fixture.agent.set_work(LONG);
    let task = fixture.begin(Disks::Copied.operation(&fixture, vm).await, "web").await;
    let sends = async || fixture.agent.departure(vm, task).map(drop);
    fixture.eventually("it is sent", sends).await;
    assert!(refused(task).await.contains("cancel the task without --force"));
    fixture.engine.cancel(&task.to_string(), "me").await.unwrap();
    assert_eq!(fixture.ended(task).await.state, TaskState::Cancelled);
    assert!(refused(task).await.contains("has ended"));
    // At the switch, while the host is there.
    fixture.agent.set_work(Duration::ZERO);
    always(&there, Call::CommitJob, HostFault::LoseRequest);
    let task = fixture.begin(Disks::Copied.operation(&fixture, vm).await, "web").await;
    let at_switch = async || (fixture.task(task).await.step == "switch").then_some(());
    fixture.eventually("it is at the switch", at_switch).await;
    assert!(refused(task).await.contains("answers, and knows"));
    let services = fixture.services(Recipient::generate().unwrap());
    let me = Caller::administrator("me");
    let removed = services::hosts::remove(&services, &me, OTHER_HOST, true).await;
    let Err(problem) = removed else { panic!("the host that decides may be removed") };
    assert_eq!(problem.code, ErrorCode::InUse, "{problem}");
    assert!(problem.detail.contains("on its way"), "{problem}");
    there.forget_faults();
    fixture.ends_well(task).await;
    assert!(refused(task).await.contains("has ended"));
    // Another task.
    let stop = Operation::StopVm { vm, force: true, timeout_seconds: 1 };
    let task = fixture.begin(stop, "web").await;
    fixture.ended(task).await;
    assert!(refused(task).await.contains("only a migration"));
}

/// A VM, and the task that was to send it: a defect has ended that while it asked.
async fn never_decided() -> (Fixture, VmId, TaskId) {
    let mut fixture = Fixture::new().await;
    let vm = Disks::Copied.before(&fixture).await;
    let faults: Faults = Arc::new(|step, state, point| match (step, state, point) {
        ("switch", TaskState::Running, FaultPoint::Before) => Fault::Fail(refused()),
        ("switch", TaskState::RollingBack, FaultPoint::Before) => Fault::Panic,
        _ => Fault::None,
    });
    fixture.restart(|engine: &mut Engine| engine.environment.faults = Some(faults)).await;
    let task = fixture.begin(Disks::Copied.operation(&fixture, vm).await, "web").await;
    assert_eq!(fixture.ended(task).await.state, TaskState::Unknown);
    assert!(fixture.alarms().await.contains(&"task-unfinished web".to_owned()));
    (fixture, vm, task)
}

/// The monitor of the first host knows no more than the task.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_guest_whose_switch_was_never_decided_goes_on_only_when_an_operator_has_resolved_that() {
    let (mut fixture, vm, task) = never_decided().await;
    // Once the host is connected, its monitor has dealt with what is left there.
    fixture.restart(|_| {}).await;
    assert!(fixture.agent.running().contains(&vm), "it was ended");
    assert!(!fixture.agent.runs(vm), "its monitor lets it go on");
    fixture.engine.resolve(&task.to_string(), "me").await.unwrap();
    let goes_on = async || fixture.agent.runs(vm).then_some(());
    fixture.eventually("it goes on", goes_on).await;
    Disks::Copied.assert_undone(&fixture, vm, "resolved").await;
}

/// Its QEMU has died as well: the VM is off at the first host, and may run at the other one all the same.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_vm_whose_switch_was_never_decided_is_started_only_when_an_operator_has_resolved_that() {
    let (fixture, vm, task) = never_decided().await;
    fixture.agent.stop_guest(vm, StopReason::QemuDied);
    let start = || Operation::StartVm { vm, boot_once: None };
    let ended = fixture.ended(fixture.begin(start(), "web").await).await;
    assert_eq!(ended.state, TaskState::Failed);
    let why = ended.problem.unwrap().detail;
    assert!(why.contains(&format!("vmseal task resolve {task}")), "{why}");
    assert!(!fixture.agent.running().contains(&vm), "it was started");
    fixture.engine.resolve(&task.to_string(), "me").await.unwrap();
    fixture.done(start(), "web").await;
    assert!(fixture.agent.runs(vm), "it does not run");
}
