//! Hosts that are emptied: VMs that move, stop and stay, hosts that fail, and a server that ends in the middle.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::Mutex;
use vmseal_agent::simulated::{Call, Fault, SimulatedHost};
use vmseal_api::boot::Cdrom;
use vmseal_api::drain::PlannedAction;
use vmseal_api::host::GuestControl;
use vmseal_api::host::version::MIGRATE_COMPRESSED;
use vmseal_api::id::VmId;
use vmseal_api::model::{Lifecycle, TaskState};
use vmseal_api::problem::ErrorCode;
use vmseal_api::request::{MigrateVm, StartVm, UndrainHost};
use vmseal_api::request_id::RequestId;
use vmseal_secret::sealed_box::Recipient;

use super::look::{ATTEMPTS, Pace};
use super::run::Drainer;
use super::*;
use crate::operation::Operation;
use crate::services::{Privileges, guests, migrate, vms as vm_services};
use crate::store::tasks::Task;
use crate::store::{hosts as host_rows, tasks};
use crate::tasks::autostart;
use crate::testing::Fixture;

const AT_ONCE: Pace = Pace { before_retry: Duration::ZERO, before_stop: Duration::ZERO };

/// Longer than any test.
const LONG: Duration = Duration::from_secs(600);

/// The simulated hosts have 64 GiB: one of these fits, and not two.
const LARGE: u64 = 40 << 30;

/// A file of its host, which keeps a VM there.
fn insert_medium(vm: &mut Vm) {
    vm.hardware.cdrom = Some(Cdrom { medium: Some("/images/tools.iso".into()) });
}

/// Host `here`, host `there`, which has its datastore, and services that look at once.
struct Bench {
    fixture: Fixture,
    services: Arc<Services>,
    caller: Caller,
    drainer: Mutex<Drainer>,
    there: SimulatedHost,
}

impl Bench {
    async fn new() -> Self {
        let fixture = Fixture::new().await;
        let there = with_datastore(&fixture, "there").await;
        let services = Arc::new(fixture.services(Recipient::generate().unwrap()));
        let drainer = Mutex::new(Drainer::new(Arc::clone(&services), AT_ONCE));
        Self { fixture, services, caller: Caller::administrator("me"), drainer, there }
    }

    async fn with_pace(pace: Pace) -> Self {
        let this = Self::new().await;
        *this.drainer.lock().await = Drainer::new(Arc::clone(&this.services), pace);
        this
    }

    /// The server's process ends, and another begins.
    async fn restart(&mut self) {
        self.fixture.restart(|_| {}).await;
        self.connect().await;
    }

    /// The same, and no provider is unlocked.
    async fn restart_sealed(&mut self) {
        self.fixture.restart_sealed().await;
        self.connect().await;
    }

    async fn connect(&mut self) {
        self.services = Arc::new(self.fixture.services(Recipient::generate().unwrap()));
        self.drainer = Mutex::new(Drainer::new(Arc::clone(&self.services), AT_ONCE));
        let there = self.host("there").await.id;
        self.fixture
            .eventually("the other host is connected", async || {
                self.services.hosts.connected(there).is_ok().then_some(())
            })
            .await;
    }

    /// A VM that runs, changed so.
    async fn running(&self, name: &str, change: impl FnOnce(&mut Vm)) -> VmId {
        let vm = self.fixture.running(name).await;
        self.change(vm, change).await;
        vm
    }

    async fn change(&self, vm: VmId, change: impl FnOnce(&mut Vm)) {
        let mut row = self.fixture.vm(vm).await.unwrap();
        change(&mut row);
        let mut write = self.services.store.write().await.unwrap();
        vms::set(&mut write, &row).await.unwrap();
        write.commit().await.unwrap();
    }

    async fn host(&self, name: &str) -> host_rows::Host {
        hosts::find(&self.services, name).await.unwrap()
    }

    async fn drain(&self, request: DrainHost) {
        let asked = drain(&self.services, &self.caller, "here", request, false);
        let Outcome::Done(host) = asked.await.unwrap() else { panic!("it is only planned") };
        assert_eq!(host.maintenance, Maintenance::Draining);
    }

    async fn undrain(&self, cancel: bool) -> Maintenance {
        let request = UndrainHost { cancel };
        let asked = undrain(&self.services, &self.caller, "here", request, false);
        let Outcome::Done(host) = asked.await.unwrap() else { panic!("it is only planned") };
        host.maintenance
    }

    async fn look(&self) {
        self.drainer.lock().await.look().await.unwrap();
    }

    /// Looks as often as it takes until the host is so, and its VMs are.
    async fn until(&self, what: &str, test: impl Fn(&Host) -> bool) -> Host {
        self.fixture
            .eventually(what, async || {
                self.look().await;
                Some(self.shown().await).filter(|host| test(host))
            })
            .await
    }

    async fn drained(&self) -> Host {
        self.until("the host is empty", |host| host.maintenance == Maintenance::Drained).await
    }

    async fn stuck(&self) -> Host {
        let stuck =
            |host: &Host| host.drain.as_ref().is_some_and(vmseal_api::drain::Drain::is_stuck);
        self.until("some VMs stay", stuck).await
    }

    async fn shown(&self) -> Host {
        hosts::show(&self.services, &self.caller, "here").await.unwrap()
    }

    /// The migrations that go on.
    async fn under_way(&self) -> Vec<Task> {
        let mut open = tasks::open(&mut self.services.store.read().await.unwrap()).await.unwrap();
        open.retain(|task| matches!(task.operation, Operation::MigrateVm { .. }));
        open
    }

    async fn host_of(&self, vm: VmId) -> String {
        self.fixture.vm(vm).await.unwrap().host_name
    }
}

/// Another host with the datastore of the first.
async fn with_datastore(fixture: &Fixture, name: &str) -> SimulatedHost {
    let (host, agent) = fixture.add_host(name).await;
    fixture.share_datastore(host, name).await;
    agent
}

/// How far a VM is, and why.
fn of<'a>(host: &'a Host, vm: &str) -> (DrainState, &'a str) {
    let vms = &host.drain.as_ref().unwrap().vms;
    let line = vms.iter().find(|line| line.vm == vm).unwrap();
    (line.state, &line.detail)
}

#[tokio::test]
async fn each_vm_moves_stops_or_stays_as_it_says_and_then_the_host_is_drained() {
    let bench = Bench::new().await;
    let moves = bench.running("moves", |_| {}).await;
    let stops = bench.running("stops", |vm| vm.on_drain = OnDrain::Stop).await;
    let left = bench.running("left", |vm| vm.on_drain = OnDrain::Leave).await;
    let off = bench.fixture.made("off", "encrypted").await;
    let request = RequestId::new();
    request_id::during(Some(request.clone()), bench.drain(DrainHost::default())).await;
    let host = bench.drained().await;

    assert_eq!(bench.host_of(moves).await, "there");
    assert!(bench.there.runs(moves) && !bench.fixture.agent.runs(moves));
    assert!(!bench.fixture.agent.runs(stops) && bench.fixture.agent.runs(left));
    for vm in [stops, left, off] {
        assert_eq!(bench.host_of(vm).await, "here");
    }
    assert_eq!(of(&host, "moves"), (DrainState::Done, "it is on host 'there'"));
    assert_eq!(of(&host, "stops"), (DrainState::Done, "it is off"));
    assert!(host.drain.as_ref().unwrap().vms.iter().all(|vm| vm.vm != "off"));
    for (kind, times) in [("host.draining", 1), ("vm.draining", 2), ("host.drained", 1)] {
        let events = bench.fixture.events(kind).await;
        assert_eq!(events.len(), times, "{kind}");
        let asked = |event: &vmseal_api::model::Event| event.request_id.clone();
        assert!(events.iter().all(|it| asked(it) == Some(request.to_string())), "{kind}");
    }
    let drain = host.drain.unwrap();
    for task in drain.vms.iter().filter_map(|vm| vm.task) {
        let task = bench.fixture.task(task).await;
        assert_eq!((task.request_id.as_ref(), task.actor.as_str()), (Some(&request), "me"));
    }
}

#[tokio::test]
async fn no_vm_is_placed_on_a_host_until_it_is_undrained() {
    let bench = Bench::new().await;
    let off = bench.fixture.made("off", "encrypted").await;
    let waits = bench.fixture.made("waits", "encrypted").await;
    let elsewhere = bench.running("elsewhere", |_| {}).await;
    bench.drain(DrainHost::default()).await;
    bench.drained().await;
    assert_eq!(bench.host_of(elsewhere).await, "there");

    let (services, me) = (&bench.services, &bench.caller);
    let start =
        async || vm_services::start(services, me, "off", StartVm::default(), false).await.map(drop);
    let back = async || {
        let request = MigrateVm { host: Some("here".to_owned()), ..MigrateVm::default() };
        migrate::migrate(services, me, "elsewhere", request, true).await.map(drop)
    };
    let records = async |operation: Operation| {
        let mut write = services.store.write().await.unwrap();
        Engine::record(&mut write, operation, "off", "me").await.map(drop)
    };
    let create = Operation::CreateVm { vm: off, cloud_init: None, copies: None };
    let refused = [start().await, back().await, records(create).await];
    for refusal in refused {
        let problem = refusal.unwrap_err();
        assert_eq!(problem.code, ErrorCode::WrongState);
        assert!(problem.detail.contains("vmseal host undrain here"), "{problem}");
    }
    // A start that is due after a reboot of the host waits.
    bench.change(waits, |vm| vm.autostart = true).await;
    let mut write = services.store.write().await.unwrap();
    vms::set_starts_due(&mut write, bench.fixture.host).await.unwrap();
    write.commit().await.unwrap();
    autostart::begin_due(&services.engine).await.unwrap();
    assert!(!bench.fixture.agent.runs(waits));

    assert_eq!(bench.undrain(false).await, Maintenance::No);
    assert_eq!(bench.host_of(elsewhere).await, "there", "VMs are not moved back");
    autostart::begin_due(&services.engine).await.unwrap();
    bench
        .fixture
        .eventually("it starts", async || bench.fixture.agent.runs(waits).then_some(()))
        .await;
    start().await.unwrap();
    back().await.unwrap();
}

#[tokio::test]
async fn a_vm_that_cannot_move_stays_or_is_shut_down_where_that_is_asked() {
    let bench = Bench::new().await;
    let with_medium = bench.running("with-medium", insert_medium).await;
    let small = bench.running("small", |_| {}).await;
    bench.drain(DrainHost::default()).await;
    let host = bench.stuck().await;
    assert_eq!(host.maintenance, Maintenance::Draining);
    let (state, why) = of(&host, "with-medium");
    assert!(state == DrainState::Stays && why.contains("in its CD-ROM drive"), "{why}");
    assert_eq!(bench.host_of(small).await, "there");
    assert!(bench.fixture.agent.runs(with_medium));

    bench.drain(DrainHost { stop_others: true, ..DrainHost::default() }).await;
    bench.drained().await;
    assert!(!bench.fixture.agent.runs(with_medium));
    assert_eq!(bench.host_of(with_medium).await, "here");
}

#[tokio::test]
async fn a_guest_that_cannot_shut_down_stays_until_it_can() {
    let bench = Bench::new().await;
    let vm = bench.running("web", |vm| vm.on_drain = OnDrain::Stop).await;
    let control = async |what: GuestControl| {
        guests::control(&bench.services, &bench.caller, "web", what, false).await.unwrap();
    };
    control(GuestControl::Pause).await;
    bench.drain(DrainHost::default()).await;
    let host = bench.stuck().await;
    assert!(of(&host, "web").1.contains("is paused"), "{host:?}");
    assert_eq!(bench.fixture.calls(Call::PowerOff), 0);
    control(GuestControl::Unpause).await;
    bench.drained().await;
    assert!(!bench.fixture.agent.runs(vm));
}

#[tokio::test]
async fn a_host_that_is_removed_or_a_vm_that_is_deleted_leaves_nothing_of_a_drain() {
    let bench = Bench::new().await;
    bench.fixture.add_host("empty").await;
    let (services, me) = (&bench.services, &bench.caller);
    drain(services, me, "empty", DrainHost::default(), false).await.unwrap();
    hosts::remove(services, me, "empty", false).await.unwrap();
    let vm = bench.running("web", |vm| vm.on_drain = OnDrain::Stop).await;
    bench.drain(DrainHost::default()).await;
    bench.drained().await;
    bench.fixture.done(Operation::DeleteVm { vm, was: Lifecycle::Ready }, "web").await;
    assert!(bench.shown().await.drain.unwrap().vms.is_empty());
}

#[tokio::test]
async fn a_vm_that_no_host_can_take_stays_until_one_can() {
    let bench = Bench::new().await;
    for name in ["one", "two"] {
        bench.running(name, |vm| vm.memory = LARGE).await;
    }
    bench.drain(DrainHost { parallel: Some(2), ..DrainHost::default() }).await;
    let host = bench.stuck().await;
    let (state, why) = of(&host, "two");
    assert!(state == DrainState::Stays && why.contains("not enough free memory"), "{why}");
    with_datastore(&bench.fixture, "third").await;
    bench.drained().await;
}

#[tokio::test]
async fn the_port_of_a_host_is_tried_once_for_all_vms_and_none_goes_where_it_is_not_reached() {
    let bench = Bench::new().await;
    for name in ["one", "two", "three"] {
        bench.running(name, |_| {}).await;
    }
    let tried = || bench.fixture.calls(Call::ExamineMigrationPort);
    let planned = async |action: PlannedAction, why: &str| {
        let request = DrainHost::default();
        let asked = drain(&bench.services, &bench.caller, "here", request, true).await;
        let Outcome::Planned(plan) = asked.unwrap() else { panic!("it is done") };
        let is_so = plan.vms.iter().all(|line| line.action == action && line.why.contains(why));
        assert!(is_so && plan.vms.len() == 3, "{:?}", plan.vms);
    };
    planned(PlannedAction::Migrate, "").await;
    assert_eq!(tried(), 1);
    // Where all simulated hosts wait.
    bench.fixture.agent.cut_off_from(SocketAddr::from(([127, 0, 0, 1], 8445)));
    planned(PlannedAction::Stay, "is not reached from the VM's host 'here'").await;
    assert_eq!(tried(), 2, "what an earlier plan has found is not kept");
}

#[tokio::test]
async fn a_vm_whose_key_no_provider_gives_stays_until_one_does() {
    // It is not shut down either: nobody could start it then.
    for stop_others in [false, true] {
        let request = || DrainHost { stop_others, ..DrainHost::default() };
        let mut bench = Bench::new().await;
        let vm = bench.running("web", |_| {}).await;
        bench.restart_sealed().await;
        let asked = drain(&bench.services, &bench.caller, "here", request(), true).await;
        let Outcome::Planned(plan) = asked.unwrap() else { panic!("it is done") };
        let line = &plan.vms[0];
        assert_eq!(line.action, PlannedAction::Stay, "{line:?}");
        assert!(line.why.contains("which does not give it now"), "{line:?}");

        bench.drain(request()).await;
        let host = bench.stuck().await;
        let (state, why) = of(&host, "web");
        assert!(state == DrainState::Stays && why.contains("which does not give it now"), "{why}");
        assert!(bench.fixture.events("vm.draining").await.is_empty(), "something was begun");
        bench.fixture.unlock("keys").await;
        bench.drained().await;
        assert!(bench.there.runs(vm), "stop_others: {stop_others}");
    }
}

/// Neither can it move: what keeps it here would have it shut down, if it could be started again.
#[tokio::test]
async fn a_vm_that_cannot_move_is_not_shut_down_while_its_key_is_not_given() {
    let request = || DrainHost { stop_others: true, ..DrainHost::default() };
    let mut bench = Bench::new().await;
    let vm = bench.running("web", insert_medium).await;
    bench.restart_sealed().await;
    let is_named = |why: &str| {
        assert!(why.contains("in its CD-ROM drive"), "{why}");
        assert!(why.contains("it is not shut down"), "{why}");
        assert!(why.contains("does not give its key now"), "{why}");
    };
    let asked = drain(&bench.services, &bench.caller, "here", request(), true).await;
    let Outcome::Planned(plan) = asked.unwrap() else { panic!("it is done") };
    let line = &plan.vms[0];
    assert_eq!(line.action, PlannedAction::Stay, "{line:?}");
    is_named(&line.why);

    bench.drain(request()).await;
    let host = bench.stuck().await;
    let (state, why) = of(&host, "web");
    assert_eq!(state, DrainState::Stays, "{why}");
    is_named(why);
    assert!(bench.fixture.agent.runs(vm) && bench.fixture.calls(Call::PowerOff) == 0);
    // With its key it can be started again, so it is shut down.
    bench.fixture.unlock("keys").await;
    bench.drained().await;
    assert!(!bench.fixture.agent.runs(vm));
}

/// The provider gives the key whenever the drain asks, and each migration fails for want of it all the same.
#[tokio::test]
async fn a_vm_whose_moves_fail_for_want_of_its_key_is_not_shut_down() {
    let request = || DrainHost { stop_others: true, ..DrainHost::default() };
    for code in [ErrorCode::Locked, ErrorCode::KeyMismatch] {
        let bench = Bench::new().await;
        let vm = bench.running("web", |_| {}).await;
        receives_nothing_for(&bench.there, code);
        bench.drain(request()).await;
        let host = bench.stuck().await;
        let (state, why) = of(&host, "web");
        assert_eq!(state, DrainState::Stays, "{why}");
        assert!(why.contains("vm.migrate failed 3 times"), "{why}");
        bench.look().await;
        assert!(bench.fixture.agent.runs(vm) && bench.fixture.calls(Call::PowerOff) == 0);
        assert_eq!(bench.fixture.events("vm.draining").await.len(), ATTEMPTS as usize);

        // For another reason it is shut down when it has failed as often.
        bench.there.forget_faults();
        receives_nothing(&bench.there);
        bench.drain(request()).await;
        bench.drained().await;
        assert!(!bench.fixture.agent.runs(vm), "{code:?}");
    }
}

#[tokio::test]
async fn memory_that_a_migration_was_promised_is_not_promised_again() {
    let bench = Bench::new().await;
    bench.there.set_work(LONG);
    let one = bench.running("one", |vm| vm.memory = LARGE).await;
    let two = bench.running("two", |vm| vm.memory = LARGE).await;
    let to = || MigrateVm { host: Some("there".to_owned()), ..MigrateVm::default() };
    let (services, me) = (&bench.services, &bench.caller);
    migrate::migrate(services, me, "one", to(), false).await.unwrap();
    let refused = migrate::migrate(services, me, "two", to(), false).await.unwrap_err();
    assert!(refused.detail.contains("not enough free memory"), "{refused}");
    assert_eq!(
        (bench.host_of(one).await, bench.host_of(two).await),
        ("here".into(), "here".into())
    );
}

#[tokio::test]
async fn a_vm_is_shut_down_only_when_no_host_could_take_it_for_a_while() {
    let patient = Pace { before_stop: LONG, ..AT_ONCE };
    let bench = Bench::with_pace(patient).await;
    let vm = bench.running("web", |_| {}).await;
    bench.there.lack_features(&[vmseal_api::host::version::MIGRATE]);
    bench.there.restart();
    let there = bench.host("there").await.id;
    bench
        .fixture
        .eventually("the server sees it", async || {
            let view = bench.services.hosts.view(there);
            let connected = view.connection == vmseal_api::model::Connection::Connected;
            (connected && !view.has(vmseal_api::host::version::MIGRATE)).then_some(())
        })
        .await;
    bench.drain(DrainHost { stop_others: true, ..DrainHost::default() }).await;
    for _ in 0..3 {
        bench.look().await;
    }
    let host = bench.shown().await;
    let (state, why) = of(&host, "web");
    assert!(state == DrainState::Waiting && why.contains("if that stays so"), "{why}");
    assert!(bench.fixture.agent.runs(vm) && bench.fixture.calls(Call::PowerOff) == 0);
    *bench.drainer.lock().await = Drainer::new(Arc::clone(&bench.services), AT_ONCE);
    bench.drained().await;
    assert!(!bench.fixture.agent.runs(vm));
}

#[tokio::test]
async fn only_so_many_move_at_a_time() {
    let bench = Bench::new().await;
    for name in ["a", "b", "c", "d", "e"] {
        bench.running(name, |_| {}).await;
    }
    bench.there.set_work(LONG);
    bench.drain(DrainHost { parallel: Some(2), ..DrainHost::default() }).await;
    for _ in 0..3 {
        bench.look().await;
        assert_eq!(bench.under_way().await.len(), 2);
    }
    let waiting = |host: &Host| {
        let vms = &host.drain.as_ref().unwrap().vms;
        vms.iter().filter(|vm| vm.state == DrainState::Waiting).count()
    };
    assert_eq!(waiting(&bench.shown().await), 3);
    // One ends: another begins.
    bench.there.set_work(Duration::ZERO);
    let first = bench.under_way().await.remove(0);
    bench.services.engine.cancel(&first.id.to_string(), "me").await.unwrap();
    bench.fixture.ended(first.id).await;
    let host = bench.until("the others move", |host| waiting(host) == 0).await;
    let cancelled: Vec<_> =
        host.drain.unwrap().vms.into_iter().filter(|vm| vm.task == Some(first.id)).collect();
    assert_eq!(cancelled[0].state, DrainState::Stays, "what was cancelled is not begun again");
    assert!(cancelled[0].detail.contains("was cancelled"), "{}", cancelled[0].detail);
}

#[tokio::test]
async fn a_server_that_ends_in_the_middle_goes_on_and_begins_nothing_twice() {
    let mut bench = Bench::new().await;
    let mut moving = Vec::new();
    for name in ["a", "b", "c"] {
        moving.push(bench.running(name, |_| {}).await);
    }
    let stops = bench.running("stops", |vm| vm.on_drain = OnDrain::Stop).await;
    bench.there.set_work(LONG);
    bench.drain(DrainHost::default()).await;
    // Before anything is begun, while two VMs move, and after that.
    bench.restart().await;
    bench.look().await;
    bench.restart().await;
    bench.look().await;
    let begun = bench.fixture.events("vm.draining").await.len();
    assert_eq!(begun, 3, "two move, and one stops");
    bench.there.set_work(Duration::ZERO);
    bench.restart().await;
    bench.drained().await;
    for vm in moving {
        assert_eq!(bench.host_of(vm).await, "there");
        assert!(bench.there.runs(vm) && !bench.fixture.agent.runs(vm));
    }
    assert!(!bench.fixture.agent.runs(stops));
    assert_eq!(bench.fixture.events("vm.draining").await.len(), 4);
    assert_eq!(bench.fixture.events("host.drained").await.len(), 1);
}

/// Every call that has a host receive a VM fails.
fn receives_nothing(agent: &SimulatedHost) {
    receives_nothing_for(agent, ErrorCode::NoSpace);
}

/// The same, for this reason.
fn receives_nothing_for(agent: &SimulatedHost, code: ErrorCode) {
    for nth in 1..=20 {
        agent.inject(Call::PutJob, nth, Fault::Refuse(code));
    }
}

#[tokio::test]
async fn a_vm_that_a_host_does_not_receive_goes_to_another() {
    let bench = Bench::new().await;
    let vm = bench.running("web", |_| {}).await;
    receives_nothing(&bench.there);
    // Of two that have as much memory left, the first is chosen.
    with_datastore(&bench.fixture, "third").await;
    bench.drain(DrainHost::default()).await;
    bench.drained().await;
    assert_eq!(bench.host_of(vm).await, "third");
    let began = bench.fixture.events("vm.draining").await;
    assert!(
        began[0].detail.contains("'there'") && began[1].detail.contains("'third'"),
        "{began:?}"
    );
    assert_eq!(began.len(), 2);
}

#[tokio::test]
async fn a_vm_whose_moves_fail_stays_until_the_drain_is_asked_again() {
    let bench = Bench::new().await;
    let vm = bench.running("web", |_| {}).await;
    receives_nothing(&bench.there);
    bench.drain(DrainHost::default()).await;
    let host = bench.stuck().await;
    let (_, why) = of(&host, "web");
    assert!(why.contains("failed 3 times"), "{why}");
    bench.look().await;
    assert_eq!(bench.fixture.events("vm.draining").await.len(), ATTEMPTS as usize);
    assert!(bench.fixture.agent.runs(vm));
    bench.there.forget_faults();
    bench.drain(DrainHost::default()).await;
    bench.drained().await;
    assert!(bench.there.runs(vm));
}

#[tokio::test]
async fn a_failed_move_waits_before_it_is_tried_again() {
    let bench = Bench::with_pace(Pace { before_retry: LONG, ..AT_ONCE }).await;
    bench.running("web", |_| {}).await;
    receives_nothing(&bench.there);
    bench.drain(DrainHost::default()).await;
    let waits = |host: &Host| {
        let (state, why) = of(host, "web");
        state == DrainState::Waiting && why.contains("is tried again")
    };
    bench.until("it waits", waits).await;
    bench.look().await;
    assert_eq!(bench.fixture.events("vm.draining").await.len(), 1);
}

#[tokio::test]
async fn vms_are_sent_as_fast_as_the_drain_says() {
    let bench = Bench::new().await;
    bench.running("web", |_| {}).await;
    bench.there.set_work(LONG);
    let too_slow = DrainHost { rate: Some(1000), ..DrainHost::default() };
    let refused = drain(&bench.services, &bench.caller, "here", too_slow, false).await;
    assert_eq!(refused.map(drop).unwrap_err().field.as_deref(), Some("rate"));
    bench.drain(DrainHost { rate: Some(2 << 20), ..DrainHost::default() }).await;
    assert_eq!(bench.shown().await.drain.unwrap().rate, Some(2 << 20));
    bench.look().await;
    let task = bench.under_way().await.remove(0);
    assert_eq!(task.pace.bytes_per_second, Some(2 << 20));
    let id = task.id.to_string();
    let kept = tasks::get(&mut bench.services.store.read().await.unwrap(), &id).await;
    assert_eq!(kept.unwrap().unwrap().pace, task.pace);
}

#[tokio::test]
async fn memory_is_compressed_where_the_drain_says_so_and_both_agents_can() {
    let compressed = || DrainHost { compress: true, ..DrainHost::default() };
    let bench = Bench::new().await;
    bench.running("web", |_| {}).await;
    bench.there.set_work(LONG);
    bench.drain(compressed()).await;
    assert!(bench.shown().await.drain.unwrap().compress);
    bench.look().await;
    let task = bench.under_way().await.remove(0);
    let Operation::MigrateVm { compresses, .. } = task.operation else { panic!("{task:?}") };
    assert!(compresses);

    let bench = Bench::new().await;
    let vm = bench.running("web", |_| {}).await;
    bench.there.lack_features(&[MIGRATE_COMPRESSED]);
    bench.there.restart();
    let there = bench.host("there").await.id;
    bench
        .fixture
        .eventually("the server sees it", async || {
            let view = bench.services.hosts.view(there);
            let connected = view.connection == vmseal_api::model::Connection::Connected;
            (connected && !view.has(MIGRATE_COMPRESSED)).then_some(())
        })
        .await;
    bench.drain(compressed()).await;
    let host = bench.stuck().await;
    assert!(of(&host, "web").1.contains("reads nothing that is compressed"), "{host:?}");
    bench.drain(DrainHost::default()).await;
    bench.drained().await;
    assert!(bench.there.runs(vm));
}

#[tokio::test]
async fn undraining_begins_nothing_more_and_cancels_only_where_that_is_asked() {
    for cancel in [false, true] {
        let bench = Bench::new().await;
        let vm = bench.running("web", |_| {}).await;
        bench.running("other", |_| {}).await;
        bench.there.set_work(LONG);
        bench.drain(DrainHost { parallel: Some(1), ..DrainHost::default() }).await;
        bench.look().await;
        let task = bench.under_way().await.remove(0);
        assert!(task.pace.is_free());
        assert_eq!(bench.undrain(cancel).await, Maintenance::No);
        bench.look().await;
        if cancel {
            assert_eq!(bench.fixture.ended(task.id).await.state, TaskState::Cancelled);
            assert!(bench.fixture.agent.runs(vm));
        } else {
            assert!(!bench.fixture.task(task.id).await.cancelled);
        }
        assert_eq!(bench.fixture.events("vm.draining").await.len(), 1);
        assert_eq!(bench.fixture.events("host.undrained").await.len(), 1);
        assert_eq!(bench.undrain(cancel).await, Maintenance::No, "again");
        assert_eq!(bench.fixture.events("host.undrained").await.len(), 1);
    }
}

#[tokio::test]
async fn a_vm_that_comes_while_the_host_is_emptied_leaves_again() {
    let mut bench = Bench::new().await;
    let vm = bench.running("web", |_| {}).await;
    let to = MigrateVm { host: Some("there".to_owned()), ..MigrateVm::default() };
    bench.there.set_work(LONG);
    let begun = migrate::migrate(&bench.services, &bench.caller, "web", to, false).await.unwrap();
    let Outcome::Done(task) = begun else { panic!("it is only planned") };
    // `there` is emptied while the VM is on its way to it.
    let request = DrainHost::default();
    drain(&bench.services, &bench.caller, "there", request, false).await.unwrap();
    bench.look().await;
    let shown =
        async |bench: &Bench| hosts::show(&bench.services, &bench.caller, "there").await.unwrap();
    assert_eq!(of(&shown(&bench).await, "web").0, DrainState::Waiting);
    // Another server has it sent again.
    bench.there.set_work(Duration::ZERO);
    bench.restart().await;
    bench.fixture.ends_well(task.id).await;
    bench
        .fixture
        .eventually("it is empty", async || {
            bench.look().await;
            (shown(&bench).await.maintenance == Maintenance::Drained).then_some(())
        })
        .await;
    assert_eq!(bench.host_of(vm).await, "here");
}

#[tokio::test]
async fn a_dry_run_says_what_would_happen_to_each_vm_and_changes_nothing() {
    let bench = Bench::new().await;
    bench.running("one", |vm| vm.memory = LARGE).await;
    bench.running("two", |vm| vm.memory = LARGE).await;
    bench.running("stops", |vm| vm.on_drain = OnDrain::Stop).await;
    bench.running("left", |vm| vm.on_drain = OnDrain::Leave).await;
    bench.running("medium", insert_medium).await;
    bench.fixture.made("off", "encrypted").await;
    let before = bench.fixture.events("host.draining").await.len();
    use PlannedAction::{Migrate, Stay, Stop};
    for (stop_others, other) in [(false, Stay), (true, Stop)] {
        let request = DrainHost { stop_others, ..DrainHost::default() };
        let asked = drain(&bench.services, &bench.caller, "here", request, true).await.unwrap();
        let Outcome::Planned(plan) = asked else { panic!("it is done") };
        let mut found: Vec<_> =
            plan.vms.iter().map(|it| (it.vm.as_str(), it.action, it.host.as_deref())).collect();
        found.sort_by_key(|(vm, ..)| *vm);
        let expected = [
            ("left", Stay, None),
            ("medium", other, None),
            ("off", Stay, None),
            ("one", Migrate, Some("there")),
            ("stops", Stop, None),
            ("two", other, None),
        ];
        assert_eq!(found, expected);
        let why = plan.vms.iter().find(|it| it.vm == "two").unwrap();
        assert!(why.why.contains("not enough free memory"), "{}", why.why);
    }
    assert_eq!(bench.shown().await.maintenance, Maintenance::No);
    assert_eq!(bench.fixture.events("host.draining").await.len(), before);
}

#[tokio::test]
async fn moving_vms_that_have_a_key_needs_the_privilege_to_migrate() {
    let bench = Bench::new().await;
    let vm = bench.running("web", |_| {}).await;
    let only = |privileges: &[Privilege]| {
        Caller::new("you", privileges.iter().copied().collect::<Privileges>())
    };
    let ask = async |caller: Caller| {
        drain(&bench.services, &caller, "here", DrainHost::default(), false).await.map(drop)
    };
    for lacks in [only(&[Privilege::Migrate]), only(&[Privilege::RegisterHost])] {
        let refused = ask(lacks).await.unwrap_err();
        assert_eq!(refused.code, ErrorCode::Forbidden);
        assert_eq!(bench.shown().await.maintenance, Maintenance::No);
    }
    // One that moves only since the drain was begun.
    bench.change(vm, |vm| vm.on_drain = OnDrain::Leave).await;
    ask(only(&[Privilege::RegisterHost])).await.unwrap();
    bench.change(vm, |vm| vm.on_drain = OnDrain::Migrate).await;
    let host = bench.stuck().await;
    assert!(of(&host, "web").1.contains("lacks the privilege 'migrate'"), "{host:?}");
    ask(only(&[Privilege::RegisterHost, Privilege::Migrate])).await.unwrap();
    bench.drained().await;
}
