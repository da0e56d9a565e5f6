//! The real host: real QEMU, real filter processes, the contract suite, and processes that die.
//!
//! The filter program is `vmseal-filter` beside the test's target directory (`cargo build -p
//! vmseal-iofilter` makes it), or what `VMSEAL_FILTER` names. Emulation is used: no KVM is needed.

#![allow(clippy::unwrap_used)] // in tests a panic is the report

mod bench;
mod handed_over;
mod panics;

use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use vmseal_agent::contract::{self, write_image};
use vmseal_agent::{AcceleratorChoice, AgentOptions, DISK_STALL, FILTER_RESTART_TIMEOUT, RealHost};
use vmseal_api::dump::DumpFormat;
use vmseal_api::host::{
    DatastoreLocation, DatastoreSpec, DiskSpec, DumpJob, ImageSource, JobSpec, JobState,
    NoticeCode, Power, PowerOff, StopReason, VmState,
};
use vmseal_api::id::{DatastoreId, DiskId, DumpId, TaskId};
use vmseal_api::problem::ErrorCode;
use vmseal_api::replica::{REPLICA_RATE, ReplicaPlace};
use vmseal_api::transfer::ImageFormat;

use crate::bench::{
    Bench, create, filter, kill_filters, made, made_with, make, off, running, says_what_to_do,
    spec_with, start, told, wait,
};

#[tokio::test]
async fn the_real_host_keeps_the_contract() {
    let bench = Bench::new();
    contract::all_runs(bench.fixture(), || bench.agent()).await;
    bench.nothing_runs();
    let mut left = std::fs::read_dir(bench.path("store")).unwrap();
    assert!(left.all(|entry| entry.unwrap().file_name() == "vmseal-datastore.json"));
}

#[tokio::test]
async fn the_death_of_a_process_stops_its_vm_and_it_starts_again() {
    let bench = Bench::new();
    let agent = bench.agent().await;
    let vm = running(&bench, &*agent).await.vm;
    kill_filters(&bench, &*agent, vm).await;
    let why = off(&*agent, vm, StopReason::FilterDied).await;
    says_what_to_do(&why);
    assert!(why.contains("filter") && why.contains("SIGKILL") && why.contains("6th"), "{why}");
    bench.nothing_runs();
    start(&*agent, vm).await;
    bench.kill(vm, "qemu");
    let why = off(&*agent, vm, StopReason::QemuDied).await;
    says_what_to_do(&why);
    assert!(why.contains("QEMU") && why.contains("SIGKILL"), "{why}");
    bench.nothing_runs();
    start(&*agent, vm).await;
    agent.power_off(vm, PowerOff::Force).await.unwrap();
    bench.nothing_runs();
}

/// Runs a guest of a few instructions: `code`, then halt for ever.
async fn end_of(code: &[u8], reason: StopReason) {
    let bench = Bench::new();
    let mut sector = vec![0; 512];
    sector[..code.len()].copy_from_slice(code);
    sector[code.len()..code.len() + 4].copy_from_slice(&[0xfa, 0xf4, 0xeb, 0xfd]);
    sector[510..].copy_from_slice(&[0x55, 0xaa]);
    write_image(&bench.path("guest"), &sector).unwrap();
    let agent = bench.agent().await;
    let vm = made(&bench, &*agent).await.vm;
    agent.power_on(vm).await.unwrap();
    wait(&*agent, vm, |state| state.stopped.is_some()).await;
    off(&*agent, vm, reason).await;
    bench.nothing_runs();
}

#[tokio::test]
async fn a_guest_that_powers_itself_off_and_one_that_panics_are_distinguished() {
    // mov dx,604h; mov ax,2000h; out dx,ax: ACPI's sleep register, state S5
    end_of(&[0xba, 0x04, 0x06, 0xb8, 0x00, 0x20, 0xef], StopReason::GuestShutdown).await;
    // mov dx,505h; mov al,1; out dx,al: the pvpanic device
    end_of(&[0xba, 0x05, 0x05, 0xb0, 0x01, 0xee], StopReason::GuestPanicked).await;
}

#[tokio::test]
async fn a_guest_may_refuse_to_shut_down_and_can_still_be_forced() {
    let bench = Bench::new();
    let agent = bench.agent().await;
    let vm = running(&bench, &*agent).await.vm;
    agent.power_off(vm, PowerOff::Shutdown { seconds: 1 }).await.unwrap();
    wait(&*agent, vm, |state| state.power == Power::Stopping).await;
    assert_eq!(agent.power_on(vm).await.unwrap_err().code, ErrorCode::WrongState);
    wait(&*agent, vm, |state| state.power == Power::Running).await;
    agent.power_off(vm, PowerOff::Shutdown { seconds: 60 }).await.unwrap();
    agent.power_off(vm, PowerOff::Force).await.unwrap();
    off(&*agent, vm, StopReason::PoweredOff).await;
}

#[tokio::test]
async fn a_vm_that_died_while_no_agent_was_there_is_found_dead() {
    let bench = Bench::new();
    let agent = bench.agent().await;
    let vm = running(&bench, &*agent).await.vm;
    drop(agent);
    bench.kill(vm, "qemu");
    // The dead one is this test's child: only its parent can reap it.
    tokio::time::sleep(Duration::from_millis(300)).await;
    let agent = bench.agent().await;
    let why = off(&*agent, vm, StopReason::FoundDead).await;
    says_what_to_do(&why);
    assert!(why.contains("no agent"), "{why}");
    bench.nothing_runs();
    let found = wait(&*agent, vm, |state| state.died.is_some()).await;
    drop(agent);
    let agent = bench.agent().await;
    assert_eq!(wait(&*agent, vm, |_| true).await.died, found.died, "found dead only once");
    start(&*agent, vm).await;
    drop(agent);
    let agent = bench.agent().await;
    assert_eq!(wait(&*agent, vm, |_| true).await.died, None, "it runs");
    agent.power_off(vm, PowerOff::Force).await.unwrap();
    agent.unregister_vm(vm).await.unwrap();
}

/// A filter dies while no agent is there; then the agent that starts another one dies.
#[tokio::test]
async fn a_guest_whose_filter_died_while_no_agent_was_there_goes_on() {
    let bench = Bench::new();
    let mut agent = bench.mortal_agent().await;
    let vm = running(&bench, &*agent.host).await.vm;
    let (qemu, filter) = (bench.process(vm, "qemu"), bench.process(vm, "filter"));
    for milliseconds in [0, 5, 20, 80] {
        agent.dies().await;
        bench.kill(vm, "filter");
        // The dead one is this test's child: only its parent can reap it.
        tokio::time::sleep(Duration::from_millis(300)).await;
        let starts_another = bench.mortal_agent().await;
        tokio::time::sleep(Duration::from_millis(milliseconds)).await;
        starts_another.dies().await;
        agent = bench.mortal_agent().await;
        let served = |state: &VmState| told(state, NoticeCode::DisksDown).is_none();
        let state = wait(&*agent.host, vm, served).await;
        assert_eq!(state.power, Power::Running, "after {milliseconds} ms: {state:?}");
        assert_eq!(bench.process(vm, "qemu"), qemu);
        assert_ne!(bench.process(vm, "filter"), filter);
    }
    agent.host.power_off(vm, PowerOff::Force).await.unwrap();
    bench.nothing_runs();
    agent.dies().await;
}

/// The host cannot start another filter at first: the image is not there. The guest waits meanwhile, and can
/// be forced off.
#[tokio::test]
async fn a_guest_waits_for_its_disks_until_they_can_be_served() {
    let bench = Bench::new();
    let agent = bench.agent().await;
    let spec = running(&bench, &*agent).await;
    let (vm, disk) = (spec.vm, spec.disk_at(0).unwrap().disk);
    let image = bench.path("store").join(vm.to_string()).join(format!("{disk}.raw"));
    let away = bench.path("away");
    for ending in [false, true] {
        std::fs::rename(&image, &away).unwrap();
        bench.kill(vm, "filter");
        let down = wait(&*agent, vm, |state| told(state, NoticeCode::DisksDown).is_some()).await;
        assert_eq!(down.power, Power::Running);
        let lost = agent.bitmaps(vm, disk).await.unwrap_err();
        assert!(
            lost.code == ErrorCode::WrongState && lost.detail.contains("waits for another filter"),
            "{lost}"
        );
        if ending {
            agent.power_off(vm, PowerOff::Force).await.unwrap();
            bench.nothing_runs();
        }
        std::fs::rename(&away, &image).unwrap();
        if !ending {
            let up = |state: &VmState| told(state, NoticeCode::FilterRestarted).is_some();
            assert_eq!(wait(&*agent, vm, up).await.power, Power::Running);
        }
    }
    off(&*agent, vm, StopReason::PoweredOff).await;
    start(&*agent, vm).await;
    assert!(wait(&*agent, vm, |_| true).await.notices.is_empty(), "a notice of an earlier run");
    agent.power_off(vm, PowerOff::Force).await.unwrap();
}

/// An image is replaced by another file while its VM runs: the guest continues with its own file, and no
/// other filter serves it the new one.
#[tokio::test]
async fn an_image_that_was_replaced_is_reported_and_never_served() {
    let bench = Bench::new();
    let agent = bench.agent().await;
    let spec = running(&bench, &*agent).await;
    let (vm, disk) = (spec.vm, spec.disk_at(0).unwrap().disk);
    let image = bench.path("store").join(vm.to_string()).join(format!("{disk}.raw"));
    let (away, copy) = (bench.path("away"), bench.path("store/copy"));
    std::fs::copy(&image, &copy).unwrap();
    std::fs::rename(&image, &away).unwrap();
    std::fs::rename(&copy, &image).unwrap();
    let exchanged = |state: &VmState| told(state, NoticeCode::ImageExchanged).is_some();
    let seen = wait(&*agent, vm, exchanged).await;
    assert_eq!(seen.power, Power::Running, "the guest does not run on");
    // A later agent knows it, too, and that there was no filter when it started.
    drop(agent);
    bench.kill(vm, "filter");
    tokio::time::sleep(Duration::from_millis(300)).await;
    let agent = bench.agent().await;
    let waits = |state: &VmState| told(state, NoticeCode::DisksDown).is_some() && exchanged(state);
    assert_eq!(wait(&*agent, vm, waits).await.power, Power::Running);
    // After many attempts.
    tokio::time::sleep(Duration::from_secs(3)).await;
    assert!(waits(&wait(&*agent, vm, |_| true).await), "the other file is served");
    // With its own file it continues.
    std::fs::rename(&away, &image).unwrap();
    let up = |state: &VmState| told(state, NoticeCode::FilterRestarted).is_some();
    assert_eq!(wait(&*agent, vm, up).await.power, Power::Running);
    wait(&*agent, vm, |state| !exchanged(state)).await;
    agent.power_off(vm, PowerOff::Force).await.unwrap();
    bench.nothing_runs();
}

/// Where its own file does not come back, the VM is stopped, and its end is on record.
#[tokio::test]
async fn a_vm_whose_image_was_replaced_is_stopped_when_no_filter_can_serve_it() {
    let bench = Bench::new();
    let agent = bench.agent_that_retries_for(Duration::from_secs(1)).await;
    let spec = running(&bench, &*agent).await;
    let (vm, disk) = (spec.vm, spec.disk_at(0).unwrap().disk);
    let image = bench.path("store").join(vm.to_string()).join(format!("{disk}.raw"));
    let copy = bench.path("store/copy");
    std::fs::copy(&image, &copy).unwrap();
    std::fs::rename(&copy, &image).unwrap();
    bench.kill(vm, "filter");
    let off = wait(&*agent, vm, |state| state.power == Power::Off).await;
    let end = off.died.expect("the end of the VM is not on record");
    assert_eq!(end.reason, StopReason::FilterDied);
    assert!(end.detail.contains("another file"), "{}", end.detail);
    bench.nothing_runs();
}

/// The status of a replica is unavailable while no filter writes the replica.
#[tokio::test]
async fn a_replica_is_reported_while_a_filter_writes_it() {
    let bench = Bench::new();
    let agent = bench.agent().await;
    let (second, elsewhere) = (bench.path("second"), bench.path("elsewhere"));
    std::fs::create_dir(&second).unwrap();
    let location = DatastoreLocation::Dir { path: second.clone() };
    let datastore = DatastoreSpec { datastore: DatastoreId::new(), location };
    agent.probe_datastore(datastore.clone()).await.unwrap();
    let replica = ReplicaPlace { datastore, bytes_per_second: REPLICA_RATE };
    let spec = made_with(&bench, &*agent, Some(replica)).await;
    let (vm, disk) = (spec.vm, spec.disk_at(0).unwrap().disk);
    start(&*agent, vm).await;
    agent.replica(vm, disk).await.unwrap();
    let refused = async |word: &str| {
        let problem = agent.replica(vm, disk).await.unwrap_err();
        let told = problem.code == ErrorCode::WrongState && problem.detail.contains(word);
        assert!(told, "{problem}");
    };

    // No other filter can serve the disk.
    let image = bench.path("store").join(vm.to_string()).join(format!("{disk}.raw"));
    std::fs::rename(&image, bench.path("away")).unwrap();
    bench.kill(vm, "filter");
    wait(&*agent, vm, |state| told(state, NoticeCode::DisksDown).is_some()).await;
    refused("waits for another filter").await;
    agent.power_off(vm, PowerOff::Force).await.unwrap();
    std::fs::rename(bench.path("away"), &image).unwrap();
    refused("does not run").await;

    // One serves it, and has no replica.
    std::fs::rename(&second, &elsewhere).unwrap();
    start(&*agent, vm).await;
    refused("is served without its replica").await;
    agent.power_off(vm, PowerOff::Force).await.unwrap();
    bench.nothing_runs();
}

/// The agent dies between recording a death and removing the remains.
#[tokio::test]
async fn a_death_on_record_is_reported_unchanged_and_removed_with_its_vm() {
    let bench = Bench::new();
    let agent = bench.agent().await;
    let spec = running(&bench, &*agent).await;
    let (vm, of_vm) = (spec.vm, bench.path("run/vms").join(spec.vm.to_string()));
    let kept = bench.path("kept");
    std::fs::create_dir(&kept).unwrap();
    for name in ["run.json", "filter.process", "qemu.process"] {
        std::fs::copy(of_vm.join(name), kept.join(name)).unwrap();
    }
    kill_filters(&bench, &*agent, vm).await;
    off(&*agent, vm, StopReason::FilterDied).await;
    drop(agent);
    std::fs::rename(&kept, &of_vm).unwrap();
    let agent = bench.agent().await;
    off(&*agent, vm, StopReason::FilterDied).await;
    bench.nothing_runs();
    agent.unregister_vm(vm).await.unwrap();
    drop(agent);
    let agent = bench.agent().await;
    assert!(agent.state_now().await.unwrap().vms.is_empty(), "the VM is reported for ever");
}

/// The agent dies while a disk is filled: its filter continues alone.
#[tokio::test]
async fn an_import_that_an_agent_left_is_ended_and_swept_by_the_next() {
    let bench = Bench::new();
    drop(bench.agent().await);
    let import = bench.path("run/imports").join(DiskId::new().to_string());
    std::fs::create_dir(&import).unwrap();
    let log = std::fs::File::create(import.join("filter.log")).unwrap();
    let mut filter = std::process::Command::new("sleep").arg("600").stdout(log).spawn().unwrap();
    std::fs::copy(format!("/proc/{}/stat", filter.id()), import.join("filter.process")).unwrap();
    let _agent = bench.agent().await;
    // Ended and reaped, as the agent is in this process; otherwise init does that.
    let lives = Path::new("/proc").join(filter.id().to_string()).exists();
    if lives {
        filter.kill().unwrap();
    }
    // The agent may have reaped it.
    let _ = filter.wait();
    assert!(!lives, "the import's filter lives on, and holds the disk's lock");
    assert!(!import.exists(), "the import's directory is left");
}

#[tokio::test]
async fn a_half_started_vm_is_swept_and_two_agents_cannot_work_in_one_place() {
    let bench = Bench::new();
    let agent = bench.agent().await;
    let spec = running(&bench, &*agent).await;
    drop(agent);
    let record = bench.path("run/vms").join(spec.vm.to_string()).join("run.json");
    let text = std::fs::read_to_string(&record).unwrap();
    assert!(text.contains("\"running\""));
    std::fs::write(&record, text.replace("\"running\"", "\"starting\"")).unwrap();
    let agent = bench.agent().await;
    off(&*agent, spec.vm, StopReason::FoundDead).await;
    bench.nothing_runs();
    let second = RealHost::start(AgentOptions {
        run_dir: bench.path("run"),
        state_dir: bench.path("state"),
        filter: filter(),
        qemu: "qemu-system-x86_64".into(),
        transfer_directories: Vec::new(),
        firmware_directory: vmseal_agent::FIRMWARE_DIRECTORY.into(),
        swtpm: "swtpm".into(),
        uid_base: 1_900_000_000,
        accelerator: AcceleratorChoice::Tcg,
        hardening: None,
        filter_restart_timeout: FILTER_RESTART_TIMEOUT,
        disk_stall: DISK_STALL,
        migration_listen: Some(([127, 0, 0, 1], 0).into()),
        place_memory: true,
    });
    let error = second.await.err().expect("a second agent started");
    assert!(error.to_string().contains("another agent"), "{error}");
}

/// The same as a child of a killed agent between its fork and its exec of QEMU or a filter.
#[tokio::test]
async fn an_agent_waits_for_what_is_left_of_its_predecessor() {
    let bench = Bench::new();
    drop(bench.agent().await);
    let lock = std::fs::File::open(bench.path("run/lock")).unwrap();
    let held = nix::fcntl::Flock::lock(lock, nix::fcntl::FlockArg::LockExclusive).unwrap();
    let released = std::thread::spawn(move || {
        std::thread::sleep(Duration::from_millis(300));
        drop(held);
        Instant::now()
    });
    bench.agent().await;
    let started = Instant::now();
    assert!(started > released.join().unwrap(), "the agent did not wait");
}

#[tokio::test]
async fn a_start_can_be_cancelled_and_what_cannot_start_says_why() {
    let bench = Bench::new();
    let agent = bench.agent().await;
    let spec = running(&bench, &*agent).await;
    let vm = spec.vm;
    agent.power_off(vm, PowerOff::Force).await.unwrap();
    for pause in [0, 10, 50, 150, 400] {
        agent.power_on(vm).await.unwrap();
        tokio::time::sleep(Duration::from_millis(pause)).await;
        agent.power_off(vm, PowerOff::Force).await.unwrap();
        bench.nothing_runs();
    }
    let image = bench
        .path("store")
        .join(vm.to_string())
        .join(format!("{}.raw", spec.disk_at(0).unwrap().disk));
    std::fs::OpenOptions::new().write(true).open(&image).unwrap().set_len(4096).unwrap();
    agent.power_on(vm).await.unwrap();
    let why = off(&*agent, vm, StopReason::FailedToStart).await;
    assert!(why.contains("truncated"), "{why}");
    std::fs::remove_file(&image).unwrap();
    agent.power_on(vm).await.unwrap();
    let why = off(&*agent, vm, StopReason::FailedToStart).await;
    assert!(why.contains("no image"), "{why}");
}

/// Whether this is root; where it is not, says that a test is skipped, and why.
fn is_root(why: &str) -> bool {
    let root = nix::unistd::geteuid().is_root();
    if !root {
        // Not by a macro, whose output the harness hides when a test passes.
        std::io::stderr().write_all(format!("skipped: {why}\n").as_bytes()).unwrap();
    }
    root
}

/// A file system of a few megabytes, gone with the value.
struct Small(PathBuf);

impl Small {
    fn mount(path: PathBuf, size: &str) -> Self {
        std::fs::create_dir(&path).unwrap();
        let mount = std::process::Command::new("mount")
            .args(["-t", "tmpfs", "-o", size, "none"])
            .arg(&path)
            .status();
        assert!(mount.unwrap().success());
        Self(path)
    }
}

impl Drop for Small {
    fn drop(&mut self) {
        let unmounted = std::process::Command::new("umount").arg("-l").arg(&self.0).status();
        assert!(unmounted.unwrap().success());
    }
}

#[tokio::test]
async fn a_datastore_that_fills_up_while_a_disk_is_made_is_reported_and_left_clean() {
    if !is_root("only root can mount a small file system") {
        return;
    }
    let bench = Bench::new();
    let agent = bench.agent().await;
    let mut spec = running(&bench, &*agent).await;
    let (vm, disk) = (spec.vm, DiskId::new());
    agent.power_off(vm, PowerOff::Force).await.unwrap();
    let small = Small::mount(bench.path("small"), "size=4m");
    let location = DatastoreLocation::Dir { path: small.0.clone() };
    let place = DatastoreSpec { datastore: DatastoreId::new(), location };
    let usage = agent.probe_datastore(place.clone()).await.unwrap();
    assert!(usage.capacity == 4 << 20);
    let known = spec.disk_at_mut(0).unwrap();
    *known = DiskSpec { disk, datastore: place, size: 8 << 20, ..known.clone() };
    agent.register_vm(spec.clone()).await.unwrap();
    // More than fits is refused at once; what just fits is refused only when it no longer fits.
    for length in [6 << 20, (4 << 20) - 8192] {
        let path = bench.path("image");
        write_image(&path, &vec![7; length]).unwrap();
        if length < 4 << 20 {
            std::fs::write(small.0.join("other"), vec![0; 4096]).unwrap();
        }
        let source = Some(ImageSource { path, format: ImageFormat::Raw, force: false });
        create(&*agent, vm, disk, source).await;
        wait(&*agent, vm, |state| {
            match state.jobs.iter().find(|job| job.disks == [disk]).map(|job| &job.state) {
                Some(JobState::Failed { problem }) => {
                    assert_eq!(problem.code, ErrorCode::NoSpace, "{problem}");
                    true
                }
                Some(JobState::Waiting | JobState::Running) | None => false,
                other => panic!("{other:?}"),
            }
        })
        .await;
        assert!(!small.0.join(vm.to_string()).exists(), "something is left");
    }
    bench.nothing_runs();
}

#[tokio::test]
async fn a_core_dump_that_could_fill_the_datastore_is_refused_before_anything_is_written() {
    if !is_root("only root can mount a small file system") {
        return;
    }
    let bench = Bench::new();
    let agent = bench.agent().await;
    let small = Small::mount(bench.path("small"), "size=32m");
    let mut spec = spec_with(&bench, None);
    let (vm, known) = (spec.vm, spec.disk_at_mut(0).unwrap());
    known.datastore.location = DatastoreLocation::Dir { path: small.0.clone() };
    let disk = known.disk;
    make(&bench, &*agent, &spec, None).await;
    start(&*agent, vm).await;
    // Its guest has more memory than the datastore has room.
    let job = JobSpec::Dump(DumpJob { dump: DumpId::new(), disk, format: DumpFormat::Elf });
    let examined = agent.examine_job(vm, job.clone()).await.unwrap_err();
    let refused = agent.put_job(vm, TaskId::new(), job).await.unwrap_err();
    for problem in [examined, refused] {
        assert_eq!(problem.code, ErrorCode::NoSpace, "{problem}");
        for part in ["64 MiB are needed", "move disk '"] {
            assert!(problem.detail.contains(part), "{problem}");
        }
    }
    let mut files = std::fs::read_dir(small.0.join(vm.to_string())).unwrap();
    let is_core = |name: &str| name.starts_with("vm.core-");
    assert!(!files.any(|file| is_core(&file.unwrap().file_name().to_string_lossy())));
    agent.power_off(vm, PowerOff::Force).await.unwrap();
    bench.nothing_runs();
}

/// Every process of a VM runs as another user, none as root (where the tests run as root).
#[tokio::test]
async fn processes_run_under_users_of_their_own() {
    if !is_root("only root can start processes as other users") {
        return;
    }
    let bench = Bench::new();
    let agent = bench.agent().await;
    let vm = running(&bench, &*agent).await.vm;
    let users = ["filter", "qemu"].map(|name| {
        assert_eq!(bench.status(vm, name, "NoNewPrivs:"), ["1"]);
        bench.status(vm, name, "Uid:")
    });
    assert_ne!(users[0], users[1]);
    assert!(users.iter().flatten().all(|uid| uid.starts_with("19000000")), "{users:?}");
    // Threads are counted by user, so only a filter with its own user can be limited.
    let limits = format!("/proc/{}/limits", bench.process(vm, "filter"));
    let limits = std::fs::read_to_string(limits).unwrap();
    let threads = limits.lines().find_map(|line| line.strip_prefix("Max processes")).unwrap();
    assert!(threads.split_whitespace().take(2).all(|most| most == "512"), "{threads}");
    agent.power_off(vm, PowerOff::Force).await.unwrap();
    agent.unregister_vm(vm).await.unwrap();
    assert_eq!(agent.power_on(vm).await.unwrap_err().code, ErrorCode::NotFound);
}

/// A filter's memory is locked, with or without an unlimited limit; it gets no more privileges than that
/// needs.
#[tokio::test]
async fn a_filter_under_its_own_user_locks_its_memory_and_has_no_other_capability() {
    if !is_root("without root the filter is the agent's own user, and lives with its limit") {
        return;
    }
    let bench = Bench::new();
    let agent = bench.agent().await;
    let vm = running(&bench, &*agent).await.vm;
    let limit = nix::sys::resource::getrlimit(nix::sys::resource::Resource::RLIMIT_MEMLOCK);
    let unlimited = limit.unwrap().1 == nix::libc::RLIM_INFINITY;
    // Bit 14 is CAP_IPC_LOCK.
    let given = if unlimited { "0000000000000000" } else { "0000000000004000" };
    let none = "0000000000000000";
    for (set, of_filter) in
        [("CapInh:", none), ("CapPrm:", given), ("CapEff:", given), ("CapAmb:", none)]
    {
        assert_eq!(bench.status(vm, "qemu", set), [none], "QEMU's {set}");
        assert_eq!(bench.status(vm, "filter", set), [of_filter], "the filter's {set}");
    }
    let kib = |field| bench.status(vm, "filter", field)[0].parse::<u64>().unwrap();
    assert!(kib("VmLck:") >= kib("VmRSS:"), "{} of {} KiB", kib("VmLck:"), kib("VmRSS:"));
    assert_eq!(kib("VmSwap:"), 0);
    // Sums can deceive: all private memory that was written is in locked areas ("lo", proc(5)). What is
    // shared is the guest's memory and io_uring's rings, which are the kernel's.
    let maps = format!("/proc/{}/smaps", bench.process(vm, "filter"));
    let (mut area, mut written) = (String::new(), 0u64);
    for line in std::fs::read_to_string(maps).unwrap().lines() {
        let mut words = line.split_whitespace();
        match words.next().unwrap() {
            "Private_Dirty:" => written = words.next().unwrap().parse().unwrap(),
            "VmFlags:" => {
                let private = area.split(' ').nth(1).unwrap().ends_with('p');
                let locked = words.any(|flag| flag == "lo");
                assert!(locked || !private || written == 0, "{area}: {written} KiB");
            }
            first if !first.ends_with(':') => area = line.to_owned(),
            _ => {}
        }
    }
    agent.power_off(vm, PowerOff::Force).await.unwrap();
}
