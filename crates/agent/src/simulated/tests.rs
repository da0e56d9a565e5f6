use std::sync::Arc;

use vmseal_api::datastore::DatastoreCondition;
use vmseal_api::filter::BitmapChange;
use vmseal_api::host::{
    CreateJob, DatastoreLocation, DatastoreSpec, Device, DiskSpec, DiskToCreate, HostAgent,
    JobSpec, JobState, PowerOff, Remount,
};

use super::*;
use crate::contract::{self, Fixture};

fn fixture(directory: &tempfile::TempDir, host: &SimulatedHost) -> Fixture {
    let image = directory.path().join("guest");
    contract::write_guest(&image).unwrap();
    let victims = host.clone();
    Fixture {
        datastore: directory.path().to_owned(),
        image,
        timeout: Duration::from_secs(10),
        kill_filter: Box::new(move |vm| victims.kill_filter(vm)),
    }
}

#[tokio::test]
async fn the_simulated_host_keeps_the_contract() {
    let directory = tempfile::tempdir().unwrap();
    let host = SimulatedHost::new();
    let mut first = true;
    host.set_heeds_shutdown(false);
    contract::all_runs(fixture(&directory, &host), || {
        if !std::mem::take(&mut first) {
            host.restart();
        }
        std::future::ready(Arc::new(host.clone()) as Arc<dyn HostAgent>)
    })
    .await;
    assert!(host.disks().is_empty() && host.running().is_empty() && host.registered().is_empty());
}

#[tokio::test]
async fn a_pool_that_was_mounted_in_the_clear_is_wrong_until_it_is_mounted_anew() {
    let host = SimulatedHost::new();
    let path = std::path::Path::new("/ceph");
    let pool = Box::new(crate::storage::pool::tests::pool());
    let location = DatastoreLocation::Rbd { path: path.to_owned(), pool };
    let datastore = DatastoreSpec { datastore: DatastoreId::new(), location };
    host.probe_datastore(datastore.clone()).await.unwrap();
    let measured = async || host.measure_datastore(datastore.clone()).await.unwrap();
    assert!(matches!(measured().await, DatastoreCondition::Available { .. }));
    host.set_mounted_messenger(path, Messenger::Crc);
    let DatastoreCondition::WrongMark { detail } = measured().await else {
        panic!("it is taken");
    };
    assert!(detail.contains("messenger 'crc'"), "{detail}");
    let remount =
        |only_try| Remount { datastore: datastore.clone(), only_try, key: None, cluster: None };
    host.remount_datastore(remount(true)).await.unwrap();
    assert!(matches!(measured().await, DatastoreCondition::WrongMark { .. }));
    host.remount_datastore(remount(false)).await.unwrap();
    assert!(matches!(measured().await, DatastoreCondition::Available { .. }));
}

/// A host with a plain VM whose disk is made.
async fn with_vm() -> (SimulatedHost, VmSpec) {
    let host = SimulatedHost::new();
    let location = DatastoreLocation::Dir { path: "/simulated".into() };
    let place = DatastoreSpec { datastore: DatastoreId::new(), location };
    let mut spec = crate::process::run_dir::tests::spec();
    spec.devices.push(Device::Disk(DiskSpec {
        disk: DiskId::new(),
        name: "d".to_owned(),
        datastore: place.clone(),
        size: 1 << 20,
        encrypted: false,
        allocation: Default::default(),
        role: Default::default(),
        limits: Default::default(),
        cache: None,
        replica: None,
        facts: Some(DiskFacts::Raw),
    }));
    host.probe_datastore(place).await.unwrap();
    host.register_vm(spec.clone()).await.unwrap();
    create(&host, spec.vm, spec.disk_at(0).unwrap().disk).await;
    wait(&host, |state| !state.disks.is_empty()).await;
    (host, spec)
}

/// Begins to make an empty disk.
async fn create(host: &SimulatedHost, vm: VmId, disk: DiskId) -> TaskId {
    let task = TaskId::new();
    let job = JobSpec::Create(CreateJob {
        disks: vec![DiskToCreate { disk, source: None, cloud_init: None, copy_of: None }],
    });
    host.put_job(vm, task, job).await.unwrap();
    task
}

async fn wait(host: &SimulatedHost, wanted: impl Fn(&VmState) -> bool) -> VmState {
    let mut last = None;
    for _ in 0..100 {
        let state = host.state_after(last.as_ref(), Duration::from_secs(1)).await.unwrap();
        if let Some(vm) = state.vms.iter().find(|vm| wanted(vm)) {
            return vm.clone();
        }
        last = Some(state);
    }
    panic!("timed out");
}

#[tokio::test]
async fn faults_occur_once_and_where_they_are_planned() {
    let (host, spec) = with_vm().await;
    let vm = spec.vm;
    let code = |result: Result<(), Problem>| result.unwrap_err().code;
    host.inject(Call::PowerOn, 2, Fault::Refuse(ErrorCode::Internal));
    host.inject(Call::PowerOff, 1, Fault::LoseRequest);
    host.power_on(vm).await.unwrap();
    assert_eq!(code(host.power_on(vm).await), ErrorCode::Internal);
    host.power_on(vm).await.unwrap();
    wait(&host, |state| state.power == Power::Running).await;
    assert_eq!(code(host.power_off(vm, PowerOff::Force).await), ErrorCode::Unreachable);
    assert_eq!(host.running(), [vm], "the lost request was done");
    host.inject(Call::PowerOff, 1, Fault::LoseAnswer);
    assert_eq!(code(host.power_off(vm, PowerOff::Force).await), ErrorCode::TimedOut);
    assert!(host.running().is_empty(), "the request whose answer was lost was not done");
    host.inject(Call::RegisterVm, 1, Fault::CrashAfter);
    assert_eq!(code(host.register_vm(spec).await), ErrorCode::Unreachable);
    assert!(host.registered().is_empty() && host.disks().len() == 1);
    let last = &host.calls()[host.calls().len() - 2..];
    assert_eq!(last, [Call::PowerOff, Call::RegisterVm]);
}

#[tokio::test]
async fn bitmaps_outlive_a_stop_and_end_where_a_disk_changes_meanwhile() {
    let (host, spec) = with_vm().await;
    let (vm, disk) = (spec.vm, spec.disk_at(0).unwrap());
    host.power_on(vm).await.unwrap();
    wait(&host, |state| state.power == Power::Running).await;
    let started = host.change_bitmap(vm, disk.disk, "b".to_owned(), BitmapChange::Start).await;
    assert_eq!(started.unwrap().len(), 1);
    for (size, left) in [(disk.size, 1), (2 * disk.size, 0)] {
        host.power_off(vm, PowerOff::Force).await.unwrap();
        host.grow_disk(vm, disk.disk, size).await.unwrap();
        host.power_on(vm).await.unwrap();
        wait(&host, |state| state.power == Power::Running).await;
        assert_eq!(host.bitmaps(vm, disk.disk).await.unwrap().len(), left, "{size}");
    }
}

#[tokio::test]
async fn a_crash_cancels_work_in_progress_and_ends_long_polls() {
    let (host, spec) = with_vm().await;
    host.set_work(Duration::from_millis(50));
    host.power_on(spec.vm).await.unwrap();
    let before = host.state_now().await.unwrap();
    let seen = Some(before.known());
    let restart = async {
        tokio::time::sleep(Duration::from_millis(10)).await;
        host.restart();
    };
    let (poll, ()) = tokio::join!(host.state(seen, Duration::from_secs(20)), restart);
    assert_eq!(poll.unwrap_err().code, ErrorCode::Unreachable);
    let found = wait(&host, |state| state.power == Power::Off).await;
    assert_eq!(found.stopped.unwrap().reason, StopReason::FoundDead);
    tokio::time::sleep(Duration::from_millis(80)).await;
    assert!(host.running().is_empty(), "work of an earlier agent continued");
}

#[tokio::test]
async fn guests_stop_or_ignore_the_button_and_hosts_vanish() {
    let (host, spec) = with_vm().await;
    let vm = spec.vm;
    host.power_on(vm).await.unwrap();
    wait(&host, |state| state.power == Power::Running).await;
    host.set_heeds_shutdown(false);
    let press = PowerOff::Shutdown { seconds: 60 };
    host.power_off(vm, press).await.unwrap();
    let stopping = host.power_on(vm).await.unwrap_err();
    assert_eq!(stopping.code, ErrorCode::WrongState);
    host.set_heeds_shutdown(true);
    host.power_off(vm, press).await.unwrap();
    let off = wait(&host, |state| state.power == Power::Off).await;
    assert_eq!(off.stopped.unwrap().reason, StopReason::GuestShutdown);
    host.power_on(vm).await.unwrap();
    wait(&host, |state| state.power == Power::Running).await;
    host.stop_guest(vm, StopReason::FilterDied);
    let off = wait(&host, |state| state.power == Power::Off).await;
    assert_eq!(off.stopped.unwrap().reason, StopReason::FilterDied);
    host.set_reachable(false);
    assert_eq!(host.describe().await.unwrap_err().code, ErrorCode::Unreachable);
    host.set_reachable(true);
    assert_eq!(host.registered(), [vm]);
}

#[tokio::test]
async fn a_full_datastore_and_an_injected_failure_leave_no_disk() {
    let (host, mut spec) = with_vm().await;
    spec.disk_at_mut(0).unwrap().disk = DiskId::new();
    let disk = spec.disk_at(0).unwrap().disk;
    host.register_vm(spec.clone()).await.unwrap();
    host.set_full(true);
    for code in [ErrorCode::NoSpace, ErrorCode::Internal] {
        let task = create(&host, spec.vm, disk).await;
        let failed = wait(&host, |state| {
            state.jobs.iter().any(|job| {
                job.task == task
                    && matches!(&job.state, JobState::Failed { problem } if problem.code == code)
            })
        });
        failed.await;
        assert!(!host.disks().contains_key(&disk));
        host.set_full(false);
        host.fail_disk(disk);
    }
}
