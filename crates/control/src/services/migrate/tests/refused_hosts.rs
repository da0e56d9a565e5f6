//! Hosts that lack what a VM needs: each is refused by its name, with what it lacks, and nothing is changed.

use std::collections::BTreeSet;

use vmseal_api::request::CreateVm;

use super::*;

/// What the VM's network card is connected to.
const BRIDGE: &str = "br0";

/// What the guests of all hosts but one run by.
const QEMU: &str = "9.2.0";

/// The host that lacks nothing.
const FIT: &str = "fit";

/// The host whose memory is too small.
const SMALL: &str = "small";

const NO_BRIDGE: &str = "network card 'nic0': there is no 'br0'";

/// A host, and what people are told that it lacks.
type Lacks = (&'static str, &'static str);

/// The hosts that each lack one thing.
const LACKING: [Lacks; 4] = [
    ("unconnected", NO_BRIDGE),
    ("accelerated", "its guests run by Kvm, and those of the VM's host by Tcg"),
    ("older", "its QEMU 8.2.2 is older than QEMU 9.2.0 of the VM's host"),
    (SMALL, "it has not enough free memory"),
];

/// A VM that runs on host `here`, and the other hosts, all of which have its datastore.
struct Bench {
    fixture: Fixture,
    vm: VmId,
    /// How many tasks were begun so far.
    begun: usize,
}

impl Bench {
    async fn new() -> Self {
        let fixture = Fixture::new().await;
        for name in LACKING.map(|(name, _)| name).into_iter().chain([FIT]) {
            let (host, agent) = fixture.add_host(name).await;
            fixture.share_datastore(host, name).await;
            agent.set_qemu(if name == "older" { "8.2.2" } else { QEMU });
            match name {
                "unconnected" => agent.lack_network(BRIDGE),
                "accelerated" => agent.set_accelerator(Accelerator {
                    kind: AcceleratorKind::Kvm,
                    reason: "for this test".to_owned(),
                    processor: None,
                }),
                SMALL => agent.set_memory(16 << 20),
                _ => {}
            }
            fixture.restart_agent(host, &agent).await;
        }
        fixture.agent.set_qemu(QEMU);
        fixture.restart_agent(fixture.host, &fixture.agent).await;
        let nics = vec![Fixture::card(BRIDGE)];
        let host = Some("here".to_owned());
        let request = CreateVm { host, nics, ..Fixture::request("web", "encrypted") };
        let services = fixture.services(Recipient::generate().unwrap());
        let vm = fixture.requested(&services, request).await;
        fixture.done(Operation::StartVm { vm, boot_once: None }, "web").await;
        let mut this = Self { fixture, vm, begun: 0 };
        this.begun = this.tasks().await;
        this
    }

    async fn tasks(&self) -> usize {
        self.fixture.events("task.begun").await.len()
    }

    /// Why the VM cannot go to a host, or to any where none is named: a dry run and the command say the same.
    async fn refusal(&self, host: Option<&str>) -> Problem {
        let services = self.fixture.services(Recipient::generate().unwrap());
        let request = MigrateVm { host: host.map(str::to_owned), ..MigrateVm::default() };
        let caller = Caller::administrator("me");
        let refused = migrate(&services, &caller, "web", request, false).await.unwrap_err();
        let tried = plan(&self.fixture, host, None).await.unwrap_err();
        assert_eq!((&tried.detail, tried.code), (&refused.detail, refused.code));
        assert_eq!(refused.code, ErrorCode::WrongState, "{refused}");
        refused
    }

    /// Each of these hosts is refused by name.
    async fn each_is_refused(&self, lacking: impl Iterator<Item = Lacks>) {
        for (name, lacks) in lacking {
            let refused = self.refusal(Some(name)).await;
            let expected = format!("VM 'web' cannot go to host '{name}': {lacks}");
            assert_eq!((refused.detail, refused.field.as_deref()), (expected, Some("host")));
        }
    }

    /// None of these hosts can be chosen, and of each it is said why.
    async fn none_is_chosen(&self, lacking: impl Iterator<Item = Lacks>) {
        let refused = self.refusal(None).await;
        let said = refused.detail.strip_prefix("no other host can take VM 'web'; ").unwrap();
        let said: BTreeSet<String> = said.split("; ").map(str::to_owned).collect();
        assert_eq!(said, said_of(lacking));
    }

    /// Asserts that no task has begun, that the VM stays on its host, and that no other host knows the VM.
    async fn assert_unchanged(&self) {
        assert_eq!(self.tasks().await, self.begun, "something was begun");
        assert_eq!(self.fixture.vm(self.vm).await.unwrap().host, self.fixture.host);
        for name in LACKING.map(|(name, _)| name).into_iter().chain([FIT]) {
            let agent = self.fixture.agent_of(name);
            assert_eq!(agent.registered(), [], "host '{name}' knows the VM");
            assert!(agent.disks().is_empty(), "host '{name}' has disks");
        }
    }
}

/// What is said of these hosts, each by its name.
fn said_of(lacking: impl Iterator<Item = Lacks>) -> BTreeSet<String> {
    lacking.map(|(name, lacks)| format!("host '{name}': {lacks}")).collect()
}

/// What the warnings of a plan say of hosts that are not offered. There is no other warning.
fn not_offered(plan: &Plan) -> BTreeSet<String> {
    let said = plan.warnings.iter().map(|it| it.strip_prefix("not offered: ").expect(it));
    said.map(str::to_owned).collect()
}

#[tokio::test]
async fn a_host_that_lacks_what_a_guest_needs_is_refused_and_nothing_is_changed() {
    let bench = Bench::new().await;
    bench.each_is_refused(LACKING.into_iter()).await;
    assert!(bench.fixture.agent.runs(bench.vm));
    bench.assert_unchanged().await;
}

#[tokio::test]
async fn a_host_is_chosen_that_lacks_nothing_and_of_each_other_one_it_is_said_what_it_lacks() {
    let bench = Bench::new().await;
    let told = plan(&bench.fixture, None, None).await.unwrap();
    assert!(told.steps[0].contains("choose host 'fit'"), "{told:?}");
    assert_eq!(not_offered(&told), said_of(LACKING.into_iter()));

    bench.fixture.agent_of(FIT).lack_network(BRIDGE);
    bench.none_is_chosen(LACKING.into_iter().chain([(FIT, NO_BRIDGE)])).await;
    assert!(bench.fixture.agent.runs(bench.vm));
    bench.assert_unchanged().await;
}

/// It needs its host's memory only when it is resumed.
#[tokio::test]
async fn a_suspended_vm_goes_to_no_host_where_its_guest_could_not_go_on() {
    let mut bench = Bench::new().await;
    bench.fixture.done(Operation::SuspendVm { vm: bench.vm }, "web").await;
    bench.begun = bench.tasks().await;
    let lacking = || LACKING.into_iter().filter(|(name, _)| *name != SMALL);
    bench.each_is_refused(lacking()).await;
    let told = plan(&bench.fixture, Some(SMALL), None).await.unwrap();
    let later =
        "host 'small' has 16 MiB of memory free, and the VM needs 32 MiB when it is started";
    assert_eq!(told.warnings, [later]);
    let told = plan(&bench.fixture, None, None).await.unwrap();
    assert!(told.steps[0].contains("choose host 'fit'"), "{told:?}");
    assert_eq!(not_offered(&told), said_of(lacking()));
    bench.assert_unchanged().await;
}
