//! VMs of which some disks are encrypted and others are in the clear.

use vmseal_api::cloud_init::{CLOUD_INIT_DISK, CloudInit};
use vmseal_api::hardware::{Firmware, TPM_DISK, VARIABLES_DISK};
use vmseal_api::model::Task as Shown;
use vmseal_api::request::{
    AddDisk, CloneVm, CreateDisk, CreateVm, DecryptVm, EncryptVm, RecryptVm, SetPolicy,
};
use vmseal_secret::sealed_box::Recipient;

use super::mirror::{Mirror, What, assert_agrees};
use super::{snapshots, tpm, *};
use crate::services::{
    Caller, Outcome, Services, clone_vm, create_vm, mirror, recrypt, set_policy, vm_devices,
    vms as vms_service,
};
use crate::store::{dumps, policies, vms};

fn names(disks: &[&str]) -> Vec<String> {
    disks.iter().map(|name| (*name).to_owned()).collect()
}

fn me() -> Caller {
    Caller::administrator("me")
}

/// Whether each disk is encrypted, for the inventory and on the host.
async fn encrypted(fixture: &Fixture, vm: VmId, what: &str) -> Vec<bool> {
    assert_agrees(fixture, vm, what).await;
    fixture.disks(vm).await.iter().map(|disk| disk.encrypted).collect()
}

async fn encrypts(fixture: &Fixture, services: &Services, disks: &[&str], in_place: bool) {
    let request = EncryptVm { disks: names(disks), in_place, ..EncryptVm::default() };
    let begun = mirror::encrypt(services, &me(), "web", request, false).await;
    let Ok(Outcome::Done(task)) = begun else { panic!("{begun:?}") };
    fixture.ends_well(task.id).await;
}

async fn decrypts(fixture: &Fixture, services: &Services, disks: &[&str], in_place: bool) {
    let request = DecryptVm { disks: names(disks), in_place, ..DecryptVm::default() };
    let begun = mirror::decrypt(services, &me(), "web", request, false).await;
    let Ok(Outcome::Done(task)) = begun else { panic!("{begun:?}") };
    fixture.ends_well(task.id).await;
}

/// A request for a VM with a TPM and these disks, each with whether it asks to be encrypted.
fn with_disks(policy: &str, disks: &[(&str, Option<bool>)]) -> CreateVm {
    let mut request = tpm::request(policy);
    let disk = request.disks.remove(0);
    let named = disks.iter().map(|(name, encrypted)| CreateDisk {
        name: (*name).to_owned(),
        encrypted: *encrypted,
        ..disk.clone()
    });
    request.disks = named.collect();
    request
}

/// Adds a disk.
async fn adds(
    services: &Services,
    name: &str,
    encrypted: Option<bool>,
    dry_run: bool,
) -> Result<Outcome<Shown>, Problem> {
    let (name, datastore) = (name.to_owned(), None);
    let (size, image, format, force) = (1 << 20, None, None, false);
    let request = AddDisk { name, datastore, size, image, format, force, encrypted };
    vm_devices::add_disk(services, &me(), "web", request, dry_run).await
}

/// What is the machine's own is encrypted, though the first disk is in the clear.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn each_disk_of_a_new_vm_is_as_it_asks() {
    let fixture = Fixture::new().await;
    let services = fixture.services(Recipient::generate().unwrap());
    let disks = [("scratch", Some(false)), ("root", None), ("data", Some(true))];
    let mut request = with_disks("encrypted", &disks);
    request.hardware.firmware = Firmware::Uefi;
    let user_data = Some("#cloud-config\n".to_owned().into());
    request.cloud_init = Some(CloudInit { user_data, ..CloudInit::default() });
    let planned = create_vm::create(&services, &me(), request.clone(), true).await;
    let Ok(Outcome::Planned(plan)) = planned else { panic!("{planned:?}") };
    let in_the_clear: Vec<_> = plan.steps[0].match_indices(", in the clear").collect();
    assert_eq!(in_the_clear.len(), 1, "{}", plan.steps[0]);
    let scratch = "scratch (1 MiB on datastore 'local', in the clear), root (";
    assert!(plan.steps[0].contains(scratch), "{}", plan.steps[0]);

    let begun = create_vm::create(&services, &me(), request, false).await;
    let Ok(Outcome::Done(task)) = begun else { panic!("{begun:?}") };
    fixture.ends_well(task.id).await;
    let vm = fixture.task(task.id).await.operation.vm().unwrap();
    assert_agrees(&fixture, vm, "it is made").await;
    let disks = fixture.disks(vm).await;
    let made: Vec<_> = disks.iter().map(|disk| (disk.name.as_str(), disk.encrypted)).collect();
    let own = [CLOUD_INIT_DISK, VARIABLES_DISK, TPM_DISK].map(|name| (name, true));
    assert_eq!(made[..3], [("scratch", false), ("root", true), ("data", true)]);
    assert_eq!(made[3..], own);
    let shown = vms_service::show(&services, &me(), "web").await.unwrap();
    assert_eq!(shown.disks_in_the_clear, ["scratch"]);
    let told = fixture.events("vm.created").await;
    assert!(told[0].detail.ends_with(", in the clear: disks 'scratch'"), "{told:?}");
    fixture.done(Operation::StartVm { vm, boot_once: None }, "web").await;
}

#[tokio::test]
async fn a_vm_without_a_key_gets_no_encrypted_disk() {
    let fixture = Fixture::new().await;
    let services = fixture.services(Recipient::generate().unwrap());
    let mut request = with_disks("plain", &[("root", Some(false)), ("data", Some(true))]);
    request.hardware.tpm = false;
    let refused = create_vm::create(&services, &me(), request.clone(), true).await.unwrap_err();
    assert_eq!(refused.field.as_deref(), Some("disks[1].encrypted"), "{refused}");
    assert!(refused.detail.contains("Choose a policy that encrypts"), "{refused}");
    request.disks.pop();
    let planned = create_vm::create(&services, &me(), request, true).await;
    let Ok(Outcome::Planned(plan)) = planned else { panic!("{planned:?}") };
    assert!(!plan.steps[0].contains("in the clear"), "its policy says so: {}", plan.steps[0]);

    let vm = fixture.made("web", "plain").await;
    let refused = adds(&services, "more", Some(true), true).await.unwrap_err();
    assert_eq!(refused.field.as_deref(), Some("encrypted"), "{refused}");
    assert!(refused.detail.contains("vmseal vm encrypt web --disk more"), "{refused}");
    // As is advised.
    let begun = adds(&services, "more", None, false).await;
    let Ok(Outcome::Done(task)) = begun else { panic!("{begun:?}") };
    fixture.ends_well(task.id).await;
    encrypts(&fixture, &services, &["more"], false).await;
    assert_eq!(encrypted(&fixture, vm, "as advised").await, [false, false, true]);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_disk_that_is_added_is_as_it_asks() {
    for runs in [false, true] {
        let what = format!("runs: {runs}");
        let fixture = Fixture::new().await;
        let services = fixture.services(Recipient::generate().unwrap());
        let vm = fixture.made("web", "encrypted").await;
        if runs {
            fixture.done(Operation::StartVm { vm, boot_once: None }, "web").await;
        }
        let mut expected = vec![true, true];
        for (name, asks, is) in
            [("scratch", Some(false), false), ("usual", None, true), ("data", Some(true), true)]
        {
            let Ok(Outcome::Planned(plan)) = adds(&services, name, asks, true).await else {
                panic!("{what}: {name} is not planned");
            };
            let told = format!("leave disk '{name}' in the clear, though policy 'encrypted'");
            assert_eq!(plan.steps.concat().contains(&told), !is, "{what}: {plan:?}");
            let begun = adds(&services, name, asks, false).await;
            let Ok(Outcome::Done(task)) = begun else { panic!("{what}: {begun:?}") };
            fixture.ends_well(task.id).await;
            expected.push(is);
            assert_eq!(encrypted(&fixture, vm, &what).await, expected, "{what}: {name}");
            let told = fixture.events("vm.changed").await;
            let told = &told.last().unwrap().detail;
            assert_eq!(told.ends_with(", in the clear"), !is, "{what}: {told}");
        }
        let shown = vms_service::show(&services, &me(), "web").await.unwrap();
        assert_eq!(shown.disks_in_the_clear, ["scratch"], "{what}");
        // It is as one that was decrypted.
        encrypts(&fixture, &services, &[], false).await;
        assert_eq!(encrypted(&fixture, vm, &what).await, [true; 5], "{what}");
    }
}

/// The VM gets its key with its first encrypted disk, and loses it only when it is decrypted as a whole.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn disks_are_encrypted_and_decrypted_one_by_one() {
    for (runs, in_place) in [(false, false), (true, false), (false, true)] {
        let what = format!("runs: {runs}, in place: {in_place}");
        let fixture = Fixture::new().await;
        let services = fixture.services(Recipient::generate().unwrap());
        let vm = fixture.made("web", "plain").await;
        if runs {
            fixture.done(Operation::StartVm { vm, boot_once: None }, "web").await;
        }
        let not_as_policy =
            async || vms_service::show(&services, &me(), "web").await.unwrap().disks_in_the_clear;
        encrypts(&fixture, &services, &["disk1"], in_place).await;
        assert_eq!(encrypted(&fixture, vm, &what).await, [false, true], "{what}");
        assert_eq!(not_as_policy().await, ["disk0"], "{what}");
        let row = fixture.vm(vm).await.unwrap();
        assert!(row.policy_name == "encrypted" && row.key.is_some(), "{what}");

        // What is still in the clear.
        encrypts(&fixture, &services, &[], in_place).await;
        assert_eq!(encrypted(&fixture, vm, &what).await, [true, true], "{what}");
        assert_eq!(not_as_policy().await, Vec::<String>::new(), "{what}");
        decrypts(&fixture, &services, &["disk0"], in_place).await;
        assert_eq!(encrypted(&fixture, vm, &what).await, [false, true], "{what}");
        decrypts(&fixture, &services, &["disk1"], in_place).await;
        assert_eq!(encrypted(&fixture, vm, &what).await, [false, false], "{what}");
        let last = fixture.vm(vm).await.unwrap();
        assert_eq!((last.key, last.policy), (row.key, row.policy), "{what}");
        assert!(fixture.events("key.destroyed").await.is_empty(), "{what}");

        encrypts(&fixture, &services, &["disk0"], in_place).await;
        decrypts(&fixture, &services, &[], in_place).await;
        assert_eq!(encrypted(&fixture, vm, &what).await, [false, false], "{what}");
        let row = fixture.vm(vm).await.unwrap();
        assert!(row.policy_name == "plain" && row.key.is_none(), "{what}");
        assert_eq!(fixture.events("key.destroyed").await.len(), 1, "{what}");
        assert_eq!(fixture.agent.mirrored(), (vec![], vec![]), "{what}");
    }
}

#[tokio::test]
async fn what_cannot_be_done_with_single_disks_is_refused() {
    let fixture = Fixture::new().await;
    let services = fixture.services(Recipient::generate().unwrap());
    fixture.made("web", "plain").await;
    let encrypt = async |disks: &[&str]| {
        let request = EncryptVm { disks: names(disks), ..EncryptVm::default() };
        mirror::encrypt(&services, &me(), "web", request, true).await.map(drop)
    };
    let decrypt = async |disks: &[&str], policy: Option<&str>| {
        let policy = policy.map(str::to_owned);
        let request = DecryptVm { disks: names(disks), policy, ..DecryptVm::default() };
        mirror::decrypt(&services, &me(), "web", request, true).await.map(drop)
    };
    let says = |refused: Result<(), Problem>, what: &str, field: Option<&str>| {
        let problem = refused.unwrap_err();
        assert!(problem.detail.contains(what), "{problem}");
        assert_eq!(problem.field.as_deref(), field, "{problem}");
    };
    says(encrypt(&["disk1", "none"]).await, "has no disk 'none'", Some("disks[1]"));
    says(decrypt(&["disk1"], None).await, "in the clear already", None);
    encrypts(&fixture, &services, &["disk1"], false).await;
    says(encrypt(&["disk1"]).await, "has these disks encrypted already", None);
    says(decrypt(&["disk0"], None).await, "in the clear already", None);
    says(decrypt(&["disk1"], Some("plain")).await, "keeps its policy", Some("policy"));
    let deep = RecryptVm { deep: true, disks: names(&["disk0"]), ..RecryptVm::default() };
    let deep = recrypt::recrypt(&services, &me(), "web", deep, true).await.map(drop);
    says(deep, "vmseal vm encrypt web --disk disk0", None);

    // Its key does not stay behind where its policy does not encrypt any more.
    decrypts(&fixture, &services, &["disk1"], false).await;
    let request = SetPolicy { encryption: Some(false), ..SetPolicy::default() };
    let kept = set_policy::set(&services, &me(), "encrypted", request, false).await.map(drop);
    says(kept, "cannot be changed in this way", None);
}

/// Every other operation leaves each disk as it is.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_vm_with_both_kinds_of_disks_is_used_as_others_are() {
    let fixture = Fixture::new().await;
    let services = fixture.services(Recipient::generate().unwrap());
    let vm = fixture.made("web", "plain").await;
    encrypts(&fixture, &services, &["disk1"], false).await;
    let is_as_before = async |what: &str| {
        assert_eq!(encrypted(&fixture, vm, what).await, [false, true], "{what}");
    };
    for (power, runs) in [("off", false), ("running", true)] {
        if runs {
            fixture.done(Operation::StartVm { vm, boot_once: None }, "web").await;
        }
        let snapshot = snapshots::taken(&fixture, vm, power).await;
        fixture.done(proving(vm), "web").await;
        fixture.done(fixture.recryption(vm).await, "web").await;
        is_as_before(power).await;
        fixture.done(Operation::DeleteSnapshot { vm, snapshot }, "web").await;
        let deep = Mirror { what: What::DeepRecrypt, runs, in_place: false };
        fixture.done(deep.operation(&fixture, vm).await, "web").await;
        is_as_before("deeply recrypted").await;
    }
    let moves = Mirror { what: What::Move, runs: true, in_place: false };
    fixture.done(moves.operation(&fixture, vm).await, "web").await;
    is_as_before("moved").await;
    fixture.done(Operation::SuspendVm { vm }, "web").await;
    fixture.done(Operation::StartVm { vm, boot_once: None }, "web").await;

    let request = SetPolicy { iops: Some(1000), ..SetPolicy::default() };
    let planned = set_policy::set(&services, &me(), "encrypted", request.clone(), true).await;
    let Ok(Outcome::Planned(plan)) = planned else { panic!("it is not planned") };
    let steps = plan.steps.concat();
    assert!(steps.contains("disks disk0 stay in the clear"), "{steps}");
    set_policy::set(&services, &me(), "encrypted", request, false).await.map(drop).unwrap();

    fixture.done(Operation::StopVm { vm, force: true, timeout_seconds: 5 }, "web").await;
    let request = CloneVm {
        name: "clone".to_owned(),
        snapshot: None,
        host: None,
        datastore: None,
        linked: false,
        cloud_init: None,
        quiesce: false,
        rate: None,
    };
    let begun = clone_vm::clone(&services, &me(), "web", request, false).await;
    let Ok(Outcome::Done(task)) = begun else { panic!("{begun:?}") };
    fixture.ends_well(task.id).await;
    let clone = fixture.task(task.id).await.operation.vm().unwrap();
    assert_eq!(encrypted(&fixture, clone, "the clone").await, [false, true]);
}

/// What is beside the first disk is the VM's, and is sealed and unsealed with it, though that disk stays in the clear.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_is_beside_a_disk_in_the_clear_is_as_its_vm() {
    let fixture = Fixture::new().await;
    let services = fixture.services(Recipient::generate().unwrap());
    let vm = fixture.made("web", "plain").await;
    fixture.done(Operation::StartVm { vm, boot_once: None }, "web").await;
    let dump = fixture.add_dump(vm, "first").await;
    fixture.done(Operation::DumpVm { vm, dump, to: None }, "web").await;
    let mut write = fixture.store.write().await.unwrap();
    dumps::set_encrypted(&mut write, vm, false).await.unwrap();
    write.commit().await.unwrap();
    fixture.done(Operation::SuspendVm { vm }, "web").await;
    let is_sealed = async || {
        let rows = dumps::of_vm(&mut fixture.store.read().await.unwrap(), vm).await.unwrap();
        rows[0].encrypted
    };

    let request = EncryptVm { disks: names(&["disk1"]), ..EncryptVm::default() };
    let planned = mirror::encrypt(&services, &me(), "web", request, true).await;
    let Ok(Outcome::Planned(plan)) = planned else { panic!("it is not planned") };
    let copied = "disk 'disk0', which stays in the clear, is copied as it is";
    assert!(plan.warnings.iter().any(|it| it.contains(copied)), "{plan:?}");
    encrypts(&fixture, &services, &["disk1"], false).await;
    assert_eq!(encrypted(&fixture, vm, "suspended").await, [false, true]);
    assert!(is_sealed().await);
    fixture.done(Operation::StartVm { vm, boot_once: None }, "web").await;
    let key = fixture.vm(vm).await.unwrap().key;
    assert_eq!(fixture.agent.runs_with(vm).unwrap().key, key, "its memory was not sealed");

    // The key is destroyed only where nothing is under it.
    decrypts(&fixture, &services, &[], false).await;
    assert!(!is_sealed().await);
    assert_eq!(fixture.vm(vm).await.unwrap().key, None);

    // Nor where an attempt before has given the policy, and has left the key.
    encrypts(&fixture, &services, &["disk1"], false).await;
    decrypts(&fixture, &services, &["disk1"], false).await;
    assert!(is_sealed().await);
    let row = fixture.vm(vm).await.unwrap();
    let mut write = fixture.store.write().await.unwrap();
    let plain = policies::find(&mut write, "plain").await.unwrap().unwrap();
    let row = vms::Vm { policy: plain.id, policy_name: plain.name, ..row };
    vms::set(&mut write, &row).await.unwrap();
    write.commit().await.unwrap();
    decrypts(&fixture, &services, &[], false).await;
    assert!(!is_sealed().await);
    assert_eq!(fixture.vm(vm).await.unwrap().key, None);
}

/// Who begins an operation again as its problem says does it to the disks that it was about, and to no others.
#[test]
fn what_is_to_be_begun_again_names_the_disks_that_were_named() {
    let (vm, disk) = (VmId::new(), DiskId::new());
    let (policy, disks) = (vmseal_api::id::PolicyId::new(), || vec![disk]);
    let location = vmseal_api::host::DatastoreLocation::Dir { path: "/second".into() };
    let datastore = vmseal_api::id::DatastoreId::new();
    let to = vmseal_api::host::DatastoreSpec { datastore, location };
    let moves = |disks: Vec<DiskId>, all: bool| Operation::MoveVm {
        vm,
        disks,
        all,
        from: Vec::new(),
        to: to.clone(),
    };
    let deep = |disks, in_place| Operation::DeepRecryptVm { vm, in_place, disks };
    let decrypt = |disks, in_place| Operation::DecryptVm { vm, policy, in_place, disks };
    let encrypt =
        |disks, in_place| Operation::EncryptVm { vm, policy, provider: None, in_place, disks };
    let moved = format!("(vmseal vm move web --datastore {datastore}");
    for (operation, command) in [
        (moves(disks(), false), format!("{moved} --disk {disk})")),
        (moves(disks(), true), format!("{moved})")),
        (deep(disks(), false), format!("(vmseal vm recrypt --deep web --disk {disk})")),
        (deep(disks(), true), format!("(vmseal vm recrypt --deep web --disk {disk} --in-place)")),
        (deep(Vec::new(), false), "(vmseal vm recrypt --deep web)".to_owned()),
        (encrypt(disks(), false), format!("(vmseal vm encrypt web --disk {disk})")),
        (encrypt(disks(), true), format!("(vmseal vm encrypt web --disk {disk} --in-place)")),
        (decrypt(disks(), false), format!("(vmseal vm decrypt web --disk {disk})")),
        (decrypt(disks(), true), format!("(vmseal vm decrypt web --disk {disk} --in-place)")),
    ] {
        let cause = Problem::new(ErrorCode::Unreachable, "its host is away");
        let last = steps::of(&operation).last().unwrap();
        let problem = steps::unfinished(&operation, *last, "web", &cause);
        assert!(problem.detail.contains(&command), "{problem}");
    }
}
