//! VMs that linked clones stand on are copied: the clones keep what they share, and neither is the other's any more.

use vmseal_api::former_image::{FormerFate, FormerImage};
use vmseal_api::host::version::MIRROR_PARENTS;
use vmseal_api::id::SnapshotId;
use vmseal_api::request::{EncryptVm, RecryptVm};
use vmseal_secret::sealed_box::Recipient;

use super::clones::Cloned;
use super::*;
use crate::services::{Caller, Outcome, mirror, recrypt, vms};
use crate::store::links::{self, Link};

/// The VM `origin`, off, with a snapshot on which the VM `web` stands; the VMs and the snapshot.
async fn parent(fixture: &Fixture, policy: &str) -> (VmId, VmId, SnapshotId) {
    let origin = fixture.made("origin", policy).await;
    let base = snapshots::taken(fixture, origin, "base").await;
    let (clone, made) = Cloned::Linked.begin(fixture).await;
    fixture.ends_well(made).await;
    (origin, clone, base)
}

#[tokio::test]
async fn a_vm_that_clones_stand_on_gets_new_keys_disk_by_disk_and_then_shares_nothing() {
    let fixture = Fixture::new().await;
    let (origin, clone, base) = parent(&fixture, "encrypted").await;
    let (services, me) =
        (fixture.services(Recipient::generate().unwrap()), Caller::administrator("me"));
    let clones = async || {
        links::clones_of(&mut fixture.store.read().await.unwrap(), origin, Some(base))
            .await
            .unwrap()
    };
    let deep = |disks| RecryptVm { deep: true, disks, ..Default::default() };
    let planned = recrypt::recrypt(&services, &me, "origin", deep(vec![]), true).await;
    let Ok(Outcome::Planned(plan)) = planned else { panic!("{planned:?}") };
    let keeps = "linked clones 'web' keep what they share with it, under the former data key";
    assert!(plan.warnings.iter().any(|it| it.contains(keeps)), "{plan:?}");
    for disk in fixture.disks(origin).await {
        assert_eq!(clones().await, ["web"], "before {}", disk.name);
        let begun = recrypt::recrypt(&services, &me, "origin", deep(vec![disk.name]), false).await;
        let Ok(Outcome::Done(task)) = begun else { panic!("{begun:?}") };
        fixture.ends_well(task.id).await;
    }
    assert_eq!(clones().await, [""; 0]);
    assert_eq!(vms::show(&services, &me, "origin").await.unwrap().clones, [""; 0]);
    assert_eq!(vms::show(&services, &me, "web").await.unwrap().linked, None);
    let told = fixture.events("vm.deep-recrypted").await;
    assert!(told.iter().all(|it| it.detail.contains("; linked clones web keep")), "{told:?}");
    fixture.done(Operation::DeleteSnapshot { vm: origin, snapshot: base }, "origin").await;
    fixture.done(Operation::StartVm { vm: clone, boot_once: None }, "web").await;
}

/// The host says what has become of each former image, and task and event say it.
#[tokio::test]
async fn of_former_images_that_clones_keep_nobody_says_that_they_were_overwritten() {
    let fixture = Fixture::new().await;
    let (origin, clone, _) = parent(&fixture, "encrypted").await;
    // When the other VM is a copy nobody shares anything with the clone.
    for (vm, name, shares) in [(origin, "origin", true), (clone, "web", false)] {
        let operation = Operation::DeepRecryptVm { vm, in_place: false, disks: vec![] };
        let task = fixture.begin(operation, name).await;
        fixture.ends_well(task).await;
        let former = fixture.engine.shown(&fixture.task(task).await).former_images;
        let shared =
            |it: &&FormerImage| matches!(it.fate, FormerFate::Shared { in_the_clear: false, .. });
        assert_eq!(former.iter().any(|it| shared(&it)), shares, "{name}: {former:?}");
        let others: Vec<_> = former.iter().filter(|it| !shared(it)).collect();
        assert!(others.iter().all(|it| it.is_overwritten()), "{name}: {former:?}");
        let disks = fixture.disks(vm).await;
        assert!(
            disks.iter().all(|disk| former.iter().any(|it| it.name == disk.name)),
            "{former:?}"
        );
        let told = fixture.events("vm.former-images-removed").await;
        let told: Vec<_> = told.iter().filter(|event| event.target == name).collect();
        assert_eq!(told.len(), 1, "{told:?}");
        assert_eq!(told[0].detail.contains("was not overwritten"), shares, "{told:?}");
    }
}

/// What stands on a clone that gets copies stands on what the clone stood on.
#[tokio::test]
async fn a_clone_of_a_clone_that_is_copied_stands_on_what_that_stood_on() {
    let fixture = Fixture::new().await;
    let (origin, clone, base) = parent(&fixture, "encrypted").await;
    let deeper = fixture.made("deeper", "encrypted").await;
    let (of_clone, of_deeper) = (fixture.disks(clone).await, fixture.disks(deeper).await);
    let mut write = fixture.store.write().await.unwrap();
    let (vm_name, snapshot_name) = ("web".to_owned(), "again".to_owned());
    let link = Link { vm: clone, vm_name, snapshot: SnapshotId::new(), snapshot_name };
    for (disk, on) in of_deeper.iter().zip(&of_clone) {
        links::insert(&mut write, disk.id, &link, Some(on.id)).await.unwrap();
    }
    write.commit().await.unwrap();
    let operation = Operation::DeepRecryptVm { vm: clone, in_place: false, disks: vec![] };
    fixture.done(operation, "web").await;
    let mut read = fixture.store.read().await.unwrap();
    assert_eq!(links::of_vm(&mut read, clone).await.unwrap(), None);
    let link = links::of_vm(&mut read, deeper).await.unwrap().unwrap();
    assert_eq!((link.vm, link.snapshot, link.vm_name.as_str()), (origin, base, "origin"));
    drop(read);
    for disk in fixture.disks(origin).await {
        let mut read = fixture.store.read().await.unwrap();
        let clones = links::clones_of_disks(&mut read, origin, &[disk.id]).await.unwrap();
        assert_eq!(clones, ["deeper"], "{}", disk.name);
    }
}

#[tokio::test]
async fn what_stays_in_the_clear_is_told_and_an_agent_of_before_is_refused() {
    let fixture = Fixture::new().await;
    parent(&fixture, "plain").await;
    let (services, me) =
        (fixture.services(Recipient::generate().unwrap()), Caller::administrator("me"));
    let request = || EncryptVm { policy: Some("encrypted".to_owned()), ..EncryptVm::default() };
    let encrypt = async || mirror::encrypt(&services, &me, "origin", request(), true).await;
    let planned = encrypt().await;
    let Ok(Outcome::Planned(plan)) = planned else { panic!("{planned:?}") };
    let keeps = "linked clones 'web' keep what they share with it, in the clear: encrypt them";
    assert!(plan.warnings.iter().any(|it| it.contains(keeps)), "{plan:?}");
    fixture.agent.lack_features(&[MIRROR_PARENTS]);
    fixture.agent.restart();
    let lacks = async || {
        let refused = encrypt().await.err().filter(|it| it.code == ErrorCode::Unsupported)?;
        refused.detail.contains("disks that linked clones stand on").then_some(())
    };
    fixture.eventually("its agent cannot", lacks).await;
}
