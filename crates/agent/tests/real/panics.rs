//! Guests that panic, and lose their filter, or their QEMU as well, while their core dump is written: the core dump is whole or not there,
//! and the VM is in the state that is asked for.

use std::path::{Path, PathBuf};
use std::time::Duration;

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use tokio::time::{Instant, sleep};
use vmseal_agent::contract::{reference_of, write_image};
use vmseal_api::dump::{DumpFormat, PanicDump};
use vmseal_api::hardware::{Hardware, OnCrash};
use vmseal_api::host::{
    DecryptDumpJob, HostAgent, JobSpec, JobState, NoticeCode, Power, StopReason, VmSpec,
};
use vmseal_api::id::{TaskId, VmId};
use vmseal_secret::{KEK_LEN, SecretBytes};

use crate::bench::{Bench, TIMEOUT, make, off, says_what_to_do, spec_with, told, wait};

/// Enough that its core dump is not whole before QEMU is stopped.
const MEMORY: u64 = 256 << 20;

/// The first major version of QEMU that takes another filter for a guest that has stood still.
const TAKES_FILTERS: u32 = 9;

/// An encrypted VM whose guest panics as soon as it boots, started.
async fn started(bench: &Bench, agent: &dyn HostAgent, on_crash: OnCrash) -> VmSpec {
    let mut sector = vec![0; 512];
    // mov dx,505h; mov al,1; out dx,al: the pvpanic device; cli; hlt; jmp back to hlt
    let code = [0xba, 0x05, 0x05, 0xb0, 0x01, 0xee, 0xfa, 0xf4, 0xeb, 0xfd];
    sector[..code.len()].copy_from_slice(&code);
    sector[510..].copy_from_slice(&[0x55, 0xaa]);
    write_image(&bench.path("guest"), &sector).unwrap();
    let kek = SecretBytes::random(KEK_LEN).unwrap();
    let mut spec = spec_with(bench, None);
    spec.memory = MEMORY;
    spec.key = Some(reference_of(&kek, spec.vm, "key"));
    let crash_dump_format = Some(DumpFormat::Elf);
    spec.hardware = Hardware { on_crash, crash_dump_format, ..Default::default() };
    let disk = spec.disk_at_mut(0).unwrap();
    (disk.encrypted, disk.facts) = (true, None);
    make(bench, agent, &spec, Some(&kek)).await;
    agent.power_on(spec.vm).await.unwrap();
    spec
}

/// The files of core dumps, whole or not.
fn cores(bench: &Bench, vm: VmId) -> Vec<PathBuf> {
    let home = bench.path("store").join(vm.to_string());
    let files = std::fs::read_dir(home).unwrap().map(|entry| entry.unwrap().path());
    let is_core =
        |file: &PathBuf| file.file_name().unwrap().to_string_lossy().starts_with("vm.core-");
    files.filter(is_core).collect()
}

fn is_half(core: &Path) -> bool {
    core.extension().is_some_and(|ending| ending == "creating")
}

/// QEMU stands still in the middle of a core dump.
async fn stopped_while_it_dumps(bench: &Bench, vm: VmId) -> Pid {
    let give_up = Instant::now() + TIMEOUT;
    while cores(bench, vm).is_empty() {
        assert!(Instant::now() < give_up, "no core dump begins");
        sleep(Duration::from_millis(1)).await;
    }
    let qemu = Pid::from_raw(bench.process(vm, "qemu"));
    kill(qemu, Signal::SIGSTOP).unwrap();
    assert!(
        cores(bench, vm).iter().all(|core| is_half(core)),
        "it was whole before QEMU was stopped"
    );
    qemu
}

/// The filter dies in the middle of a core dump, and its agent has seen that.
async fn loses_its_filter(bench: &Bench, agent: &dyn HostAgent, vm: VmId) -> Pid {
    let qemu = stopped_while_it_dumps(bench, vm).await;
    bench.kill(vm, "filter");
    let down = wait(agent, vm, |state| told(state, NoticeCode::DisksDown).is_some()).await;
    let why = told(&down, NoticeCode::DisksDown).unwrap();
    assert!(why.contains("which stands still"), "{why}");
    assert_eq!(down.power, Power::Running, "{down:?}");
    qemu
}

/// The one core dump that is there: whole, encrypted, and what it was made of.
async fn is_whole(bench: &Bench, agent: &dyn HostAgent, spec: &VmSpec) {
    let (vm, disk) = (spec.vm, spec.disk_at(0).unwrap().disk);
    let state = wait(agent, vm, |_| true).await;
    let [PanicDump { dump, encrypted: true, .. }] = &state.panic_dumps[..] else {
        panic!("{:?}", state.panic_dumps)
    };
    let [core] = &cores(bench, vm)[..] else { panic!("{:?}", cores(bench, vm)) };
    assert!(!is_half(core), "{core:?}");
    let to = bench.path("clear");
    let (task, job) = (TaskId::new(), DecryptDumpJob { dump: *dump, disk, to: to.clone() });
    let job = JobSpec::DecryptDump(job);
    agent.put_job(vm, task, job.clone()).await.unwrap();
    wait(agent, vm, |state| {
        let job = state.jobs.iter().find(|job| job.task == task).map(|job| &job.state);
        assert!(!matches!(job, Some(JobState::Failed { .. })), "{job:?}");
        job == Some(&JobState::ReadyToCommit)
    })
    .await;
    agent.commit_job(vm, task, job).await.unwrap();
    let clear = std::fs::read(&to).unwrap();
    // All of the memory but for holes that a PC has.
    assert!(clear.starts_with(b"\x7fELF") && clear.len() as u64 > MEMORY / 2, "{}", clear.len());
}

#[tokio::test]
async fn a_core_dump_is_finished_when_the_filter_dies_and_the_vm_is_stopped_as_it_should_be() {
    let bench = Bench::new();
    let agent = bench.agent().await;
    let spec = started(&bench, &*agent, OnCrash::CoredumpDestroy).await;
    let qemu = loses_its_filter(&bench, &*agent, spec.vm).await;
    kill(qemu, Signal::SIGCONT).unwrap();
    let why = off(&*agent, spec.vm, StopReason::GuestPanicked).await;
    says_what_to_do(&why);
    assert!(why.contains("a core dump of ") && why.contains("encrypted"), "{why}");
    bench.nothing_runs();
    is_whole(&bench, &*agent, &spec).await;
}

/// It panics at each boot: where its QEMU takes another filter it is restarted as often as is allowed, and boots from its disk each time.
#[tokio::test]
async fn a_guest_whose_filter_died_while_its_core_dump_was_written_boots_again_with_another() {
    let bench = Bench::new();
    let agent = bench.agent().await;
    let version = agent.describe().await.unwrap().qemu;
    let major = version.split('.').next().and_then(|major| major.parse::<u32>().ok()).unwrap();
    let spec = started(&bench, &*agent, OnCrash::CoredumpRestart).await;
    let qemu = loses_its_filter(&bench, &*agent, spec.vm).await;
    kill(qemu, Signal::SIGCONT).unwrap();
    let why = off(&*agent, spec.vm, StopReason::GuestPanicked).await;
    says_what_to_do(&why);
    let expected = if major >= TAKES_FILTERS {
        "is not restarted any more"
    } else {
        "could not be restarted: its filter has ended, and its QEMU, older than 9.0,"
    };
    assert!(why.contains(expected), "QEMU {version}: {why}");
    bench.nothing_runs();
    is_whole(&bench, &*agent, &spec).await;
}

#[tokio::test]
async fn nothing_is_left_of_a_core_dump_whose_qemu_dies_or_is_forced_off_after_its_filter() {
    for forced in [false, true] {
        let bench = Bench::new();
        let agent = bench.agent().await;
        let vm = started(&bench, &*agent, OnCrash::CoredumpRestart).await.vm;
        let qemu = loses_its_filter(&bench, &*agent, vm).await;
        let reason = if forced {
            // It dumps on while it is asked to end.
            kill(qemu, Signal::SIGCONT).unwrap();
            agent.power_off(vm, vmseal_api::host::PowerOff::Force).await.unwrap();
            None
        } else {
            kill(qemu, Signal::SIGKILL).unwrap();
            Some(StopReason::GuestPanicked)
        };
        let state = wait(&*agent, vm, |state| state.power == Power::Off).await;
        let stopped = state.stopped.unwrap();
        assert!(reason.is_none_or(|reason| reason == stopped.reason), "{stopped:?}");
        bench.nothing_runs();
        // Where it is forced off, it may have been whole by then.
        let whole = cores(&bench, vm);
        assert!(whole.iter().all(|core| !is_half(core)), "{whole:?}");
        assert_eq!(state.panic_dumps.len(), whole.len(), "{stopped:?}");
        if !forced {
            assert!(stopped.detail.contains("no core dump was written"), "{stopped:?}");
            assert!(whole.is_empty(), "{whole:?}");
        }
    }
}
