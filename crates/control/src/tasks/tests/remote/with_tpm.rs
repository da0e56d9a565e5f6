//! VMs with a TPM that are off or suspended and go to another control plane, and VMs of which something does not go.

use vmseal_api::host::DiskRole;
use vmseal_api::host::version::MIGRATE_TPM_AT_REST;
use vmseal_api::remote::ARRIVALS_TPM_AT_REST;

use super::*;
use crate::tasks::tests::changes::reserve_tpm;

/// How many disks it has, with that of its TPM.
const DISKS: usize = 3;

/// A VM with a TPM at the first control plane, off or suspended.
async fn with_tpm(power: Power) -> Two {
    let two = Two::new().await;
    let vm = two.vm;
    two.west.done(Operation::StopVm { vm, force: true, timeout_seconds: 1 }, "web").await;
    let disk = reserve_tpm(&two.west, vm).await;
    two.west.done(Operation::AddTpm { vm, disk }, "web").await;
    if power == Power::Suspended {
        two.west.done(Operation::StartVm { vm, boot_once: None }, "web").await;
        two.west.done(Operation::SuspendVm { vm }, "web").await;
        two.east.agent.will_receive_memory(vm, two.west.agent.memory_generation(vm).unwrap());
    }
    two
}

impl Two {
    /// Why it would not be sent.
    async fn refused(&self) -> Option<String> {
        let request = MigrateVm { remote: Some("east".to_owned()), ..MigrateVm::default() };
        let me = Caller::administrator("me");
        let planned = migrate::migrate(&self.services(), &me, "web", request, true).await;
        planned.map(drop).map_err(|problem| problem.detail).err()
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_vm_with_a_tpm_goes_there_off_or_suspended_and_starts_there() {
    for power in [Power::Off, Power::Suspended] {
        let two = with_tpm(power).await;
        let (task, arrival) = two.begin().await;
        two.west.ends_well(task).await;
        two.east.ends_well(arrival).await;
        let what = format!("{power:?}");
        two.east.assert_whole_with(two.vm, power, DISKS, &what).await;
        two.west.assert_nothing_left(two.vm, &what).await;
        let there = two.east.vm(two.vm).await.unwrap();
        let of_tpm = |disk: &&crate::store::disks::Disk| disk.role == DiskRole::Tpm;
        let disks = two.east.disks(two.vm).await;
        assert!(there.hardware.tpm && disks.iter().filter(of_tpm).count() == 1, "{what}");
        two.east.done(Operation::StartVm { vm: two.vm, boot_once: None }, "web").await;
        two.east.assert_whole_with(two.vm, Power::Running, DISKS, &what).await;
    }
}

#[tokio::test]
async fn who_cannot_send_or_take_what_a_tpm_keeps_is_named_before() {
    let two = with_tpm(Power::Off).await;
    assert_eq!(two.refused().await, None);
    two.west.plane.lack_features(&[ARRIVALS_TPM_AT_REST]);
    let told = two.refused().await.unwrap();
    assert!(told.contains("(arrivals-tpm-at-rest): upgrade it, or start the VM first"), "{told}");
    two.west.plane.lack_features(&[]);
    two.east.agent.lack_features(&[MIGRATE_TPM_AT_REST]);
    two.east.agent.restart();
    let named = async || two.refused().await?.contains("(job-migrate-tpm-at-rest)").then_some(());
    two.east.eventually("the other control plane sees its older agent", named).await;
    two.west.agent.lack_features(&[MIGRATE_TPM_AT_REST]);
    two.west.agent.restart();
    let named = async || two.refused().await?.contains("cannot send what the TPM").then_some(());
    two.west.eventually("the first one sees its older agent", named).await;
}

#[tokio::test]
async fn all_core_dumps_are_named_before_anything_begins() {
    let two = Two::new().await;
    assert_eq!(two.refused().await, None);
    two.west.add_dump(two.vm, "first").await;
    two.west.add_dump(two.vm, "panic-1").await;
    let told = two.refused().await.unwrap();
    assert!(told.contains("core dumps ('first', 'panic-1')"), "{told}");
    assert!(told.contains("vmseal dump delete web first"), "{told}");
}
