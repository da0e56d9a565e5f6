//! VMs of which some disks are in the clear: each goes as it is.

use vmseal_api::host::DiskFacts;
use vmseal_api::request::DecryptVm;

use super::*;
use crate::services::mirror;

/// What a dry run of the VM's migration says: its steps, or why it is refused.
async fn planned(two: &Two, vm: &str) -> Result<String, String> {
    let request = MigrateVm { remote: Some("east".to_owned()), ..MigrateVm::default() };
    let me = Caller::administrator("me");
    match migrate::migrate(&two.services(), &me, vm, request, true).await {
        Ok(Outcome::Planned(plan)) => Ok(plan.steps.join("; ")),
        Ok(Outcome::Done(task)) => panic!("it is not only planned: {task:?}"),
        Err(problem) => Err(problem.detail),
    }
}

async fn decrypts(two: &Two, disk: &str) {
    let request = DecryptVm { disks: vec![disk.to_owned()], ..DecryptVm::default() };
    let me = Caller::administrator("me");
    let begun = mirror::decrypt(&two.services(), &me, "web", request, false).await;
    let Ok(Outcome::Done(task)) = begun else { panic!("{begun:?}") };
    two.west.ends_well(task.id).await;
}

/// Records that a disk of a VM is another one than it is.
async fn record(two: &Two, vm: VmId, disk: &str, what: &str) {
    let mut write = two.west.store.write().await.unwrap();
    let update = format!("UPDATE disks SET {what} WHERE name = $1 AND vm_id = $2");
    let done = sqlx::query(sqlx::AssertSqlSafe(update))
        .bind(disk)
        .bind(vm.to_string())
        .execute(&mut *write)
        .await
        .unwrap();
    assert_eq!(done.rows_affected(), 1);
    write.commit().await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_disk_in_the_clear_goes_there_as_it_is() {
    let two = Two::new().await;
    let told = planned(&two, "web").await.unwrap();
    assert!(!told.contains("in the clear"), "{told}");
    decrypts(&two, "disk1").await;
    let told = planned(&two, "web").await.unwrap();
    assert!(told.contains("in the clear, as they are: disks 'disk1'"), "{told}");
    let (task, arrival) = two.begin().await;
    two.west.ends_well(task).await;
    two.east.ends_well(arrival).await;
    two.assert_gone("it is done").await;
    let disks = two.east.disks(two.vm).await;
    let are: Vec<_> = disks
        .iter()
        .map(|disk| (disk.encrypted, disk.facts.as_ref() == Some(&DiskFacts::Raw)))
        .collect();
    assert_eq!(are, [(true, false), (false, true)]);
    let key = two.east.vm(two.vm).await.unwrap().key.unwrap();
    let images = two.east.agent.disks();
    assert_eq!(images[&disks[0].id].checks, [key.check].into());
    assert!(images[&disks[1].id].checks.is_empty(), "it is under a key");
}

/// One of which every disk is in the clear has its key still.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_vm_with_a_key_and_no_encrypted_disk_has_a_key_there() {
    let two = Two::new().await;
    decrypts(&two, "disk0").await;
    decrypts(&two, "disk1").await;
    let (task, arrival) = two.begin().await;
    two.west.ends_well(task).await;
    two.east.ends_well(arrival).await;
    two.assert_gone("it is done").await;
    assert!(two.east.disks(two.vm).await.iter().all(|disk| !disk.encrypted));
    assert!(two.east.vm(two.vm).await.unwrap().key.is_some());
}

#[tokio::test]
async fn a_disk_that_is_not_as_its_vm_allows_is_refused() {
    let two = Two::new().await;
    decrypts(&two, "disk1").await;
    record(&two, two.vm, "disk1", "role = 'cloud_init'").await;
    let told = planned(&two, "web").await.unwrap_err();
    assert!(told.contains("disk 'disk1' is in the clear, which is the machine's own"), "{told}");
    let plain = two.west.made("old", "plain").await;
    let told = planned(&two, "old").await.unwrap();
    assert!(told.contains("'plain', no key"), "{told}");
    record(&two, plain, "disk0", "encrypted = TRUE").await;
    let told = planned(&two, "old").await.unwrap_err();
    assert!(told.contains("disk 'disk0' is encrypted, and the VM has no key"), "{told}");
}
