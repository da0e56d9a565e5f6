//! VMs that are told something at their first boot: what they are told is stored sealed alone, and it ends with the
//! agent's process that it was sealed to.

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use vmseal_api::cloud_init::CloudInit;
use vmseal_api::host::DiskRole;
use vmseal_api::id::TaskId;
use vmseal_api::model::{Plan, Task as Shown};
use vmseal_api::request::{CloneVm, CreateDisk, CreateVm};
use vmseal_secret::sealed_box::Recipient;

use super::{snapshots, *};
use crate::operation::Copies;
use crate::services::{Caller, Outcome, clone_vm, create_vm, vm_devices};

/// What nobody but the guest may read.
const MARKER: &str = "correct-horse-battery-staple";

/// Begins to create a VM that is told [`MARKER`].
pub async fn create(fixture: &Fixture, name: &str) -> (VmId, TaskId) {
    let disk = CreateDisk {
        name: "disk0".to_owned(),
        datastore: "local".to_owned(),
        size: 1 << 20,
        image: None,
        format: None,
        force: false,
        encrypted: None,
    };
    let user_data = Some(format!("#cloud-config\nwrite_files: [{{content: {MARKER}}}]\n").into());
    let request = CreateVm {
        name: name.to_owned(),
        policy: "encrypted".to_owned(),
        vcpus: 1,
        memory: 32 << 20,
        host: None,
        disks: vec![disk],
        nics: Vec::new(),
        hardware: Default::default(),
        description: String::new(),
        labels: Default::default(),
        autostart: false,
        migration_encryption: Default::default(),
        cloud_init: Some(CloudInit { user_data, ..CloudInit::default() }),
        uefi_variables: None,
        tpm_state: None,
    };
    let services = fixture.services(Recipient::generate().unwrap());
    let caller = Caller::administrator("me");
    let begun = create_vm::create(&services, &caller, request, false).await.unwrap();
    let Outcome::Done(task) = begun else { panic!("nothing was begun") };
    let vm = fixture.task(task.id).await.operation.vm().unwrap();
    (vm, task.id)
}

/// All that the server has stored.
fn stored(fixture: &Fixture) -> Vec<u8> {
    let files = std::fs::read_dir(fixture.directory.path()).unwrap();
    let files = files.map(|entry| entry.unwrap().path()).filter(|path| path.is_file());
    files.flat_map(|path| std::fs::read(path).unwrap()).collect()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_first_boot_survives_every_fault_at_every_step() {
    matrix(Kind::FirstBoot).await;
}

#[tokio::test]
async fn the_inventory_never_has_it_in_the_clear() {
    let fixture = Fixture::new().await;
    let (vm, task) = create(&fixture, "web").await;
    assert_eq!(fixture.ended(task).await.state, TaskState::Done);
    let disks = fixture.disks(vm).await;
    let roles: Vec<_> = disks.iter().map(|disk| (disk.name.as_str(), disk.role)).collect();
    assert_eq!(roles, [("disk0", DiskRole::Data), ("cloud-init", DiskRole::CloudInit)]);
    assert!(disks[1].encrypted && disks[1].replica.is_none() && disks[1].cache.is_none());
    let stored = stored(&fixture);
    let has = |text: &[u8]| stored.windows(text.len()).any(|at| at == text);
    assert!(has(b"cloud_init"), "it is looked for at the wrong place");
    // Base64 of a text that begins anywhere in it has one of three forms; its ends depend on the neighbours.
    for at in 0..3 {
        let encoded = STANDARD.encode(&MARKER.as_bytes()[at..]);
        assert!(!has(&encoded.as_bytes()[..24]), "base64 from {at} on");
    }
    assert!(!has(MARKER.as_bytes()));
    let shown = format!("{:?}", fixture.task(task).await);
    assert!(!shown.contains(MARKER), "{shown}");
}

#[tokio::test]
async fn an_agent_that_restarts_before_the_disk_is_made_ends_the_task_and_nothing_is_left() {
    let fixture = Fixture::new().await;
    fixture.agent.set_work(LONG);
    let (vm, task) = create(&fixture, "web").await;
    fixture.eventually("it works", async || (fixture.calls(Call::PutJob) > 0).then_some(())).await;
    fixture.agent.set_work(std::time::Duration::from_millis(1));
    fixture.agent.restart();
    let ended = fixture.ended(task).await;
    let problem = ended.problem.unwrap();
    assert_eq!(ended.state, TaskState::Failed, "{problem}");
    assert!(problem.detail.contains("Create the VM again"), "{problem}");
    fixture.assert_nothing_left(vm, "the agent restarted").await;
}

/// A guest whose memory a snapshot keeps goes on with all of its disks, and no snapshot keeps this one.
#[tokio::test]
async fn its_disk_stays_while_a_snapshot_keeps_memory() {
    let fixture = Fixture::new().await;
    let (vm, task) = create(&fixture, "web").await;
    fixture.ends_well(task).await;
    let (services, me) =
        (fixture.services(Recipient::generate().unwrap()), Caller::administrator("me"));
    let remove = || vm_devices::remove_disk(&services, &me, "web", "cloud-init", true);
    snapshots::noted(&fixture, vm, "disks", false).await;
    let planned = remove().await;
    assert!(matches!(planned, Ok(Outcome::Planned(_))), "{planned:?}");
    snapshots::noted(&fixture, vm, "asleep", true).await;
    let refused = remove().await.unwrap_err();
    assert_eq!(refused.code, ErrorCode::WrongState, "{refused}");
    assert!(refused.detail.contains("vmseal snapshot delete web asleep"), "{refused}");
}

/// Asks for a clone of the VM `web`.
async fn ask_for_clone(
    fixture: &Fixture,
    (name, cloud_init): (&str, Option<CloudInit>),
    linked: bool,
    dry_run: bool,
) -> Result<Outcome<Shown>, Problem> {
    let (name, quiesce) = (name.to_owned(), true);
    let (snapshot, host, datastore, rate) = (None, None, None, None);
    let request = CloneVm { name, snapshot, host, datastore, linked, cloud_init, quiesce, rate };
    let services = fixture.services(Recipient::generate().unwrap());
    clone_vm::clone(&services, &Caller::administrator("me"), "web", request, dry_run).await
}

/// A clone of the VM `web`: whether it was told something anew, and what its disks are copied from.
async fn cloned(fixture: &Fixture, asked: (&str, Option<CloudInit>)) -> (VmId, bool, Copies) {
    let begun = ask_for_clone(fixture, asked, false, false).await.unwrap();
    let Outcome::Done(task) = begun else { panic!("nothing was begun") };
    fixture.ends_well(task.id).await;
    let operation = fixture.task(task.id).await.operation;
    let Operation::CreateVm { vm, cloud_init, copies: Some(copies) } = operation else {
        panic!("it is no clone")
    };
    (vm, cloud_init.is_some(), copies)
}

async fn planned(fixture: &Fixture, name: &str) -> Plan {
    match ask_for_clone(fixture, (name, None), false, true).await.unwrap() {
        Outcome::Planned(plan) => plan,
        Outcome::Done(task) => panic!("{task:?} was begun"),
    }
}

#[tokio::test]
async fn a_clone_is_told_the_same_or_what_it_is_given_also_of_a_vm_that_runs() {
    let fixture = Fixture::new().await;
    let (origin, task) = create(&fixture, "web").await;
    fixture.ends_well(task).await;
    let given = CloudInit { user_data: Some("#!".to_owned().into()), ..CloudInit::default() };
    for (name, given, copies_disks) in [("same", None, 2), ("other", Some(given), 1)] {
        let (vm, anew, copies) = cloned(&fixture, (name, given)).await;
        let disks = fixture.disks(vm).await;
        let roles: Vec<_> = disks.iter().map(|disk| disk.role).collect();
        assert_eq!(roles, [DiskRole::Data, DiskRole::CloudInit], "{name}");
        assert_eq!((copies.disks.len(), anew), (copies_disks, copies_disks == 1), "{name}");
        assert_eq!((copies.snapshot, copies.temporary), (None, None), "{name}");
    }
    let refused = ask_for_clone(&fixture, ("none", None), true, true).await.unwrap_err();
    assert_eq!(refused.field.as_deref(), Some("snapshot"), "{refused}");
    assert!(planned(&fixture, "none").await.warnings.iter().all(|it| !it.contains("runs")));

    fixture.done(Operation::StartVm { vm: origin, boot_once: None }, "web").await;
    let plan = planned(&fixture, "none").await;
    let says = |wanted: &str| plan.warnings.iter().any(|it| it.contains(wanted));
    assert!(says("VM 'web' runs: a snapshot of it is taken") && says("an instance id"), "{plan:?}");
    assert!(plan.steps.iter().any(|step| step == "merge what was kept for it"), "{plan:?}");
    assert_eq!(super::snapshots::rows(&fixture, origin).await, []);
    let refused = ask_for_clone(&fixture, ("none", None), true, true).await.unwrap_err();
    assert!(refused.detail.contains("a linked clone shares files with a snapshot"), "{refused}");

    let (vm, _, copies) = cloned(&fixture, ("third", None)).await;
    assert!(copies.snapshot.is_some() && copies.temporary.is_some(), "{copies:?}");
    let disks = fixture.disks(vm).await;
    let of = |index: usize| copies.of(disks[index].id, disks[index].role).unwrap();
    assert_eq!((of(0).snapshot, of(1).snapshot), (copies.snapshot, None));
    assert_eq!(super::snapshots::rows(&fixture, origin).await, []);
    assert_eq!(super::snapshots::on_host(&fixture, origin).await, []);
    assert_eq!(fixture.vm(vm).await.unwrap().lifecycle, Lifecycle::Ready);
}
