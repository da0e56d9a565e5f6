//! A host for tests: its directories, agents that die, and VMs of one disk.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use tokio::io::AsyncReadExt;
use tokio::runtime::Runtime;
use tokio::task::spawn_blocking;
use vmseal_agent::contract::{self, BANNER, Fixture, seal_for};
use vmseal_agent::{AcceleratorChoice, AgentOptions, DISK_STALL, FILTER_RESTART_TIMEOUT, RealHost};
use vmseal_api::host::{
    Allocation, CreateJob, DatastoreLocation, DatastoreSpec, Device, DiskFacts, DiskSpec,
    DiskToCreate, HostAgent, ImageSource, JobSpec, JobState, NoticeCode, Power, StopReason, VmSpec,
    VmState,
};
use vmseal_api::id::{DatastoreId, DiskId, TaskId, VmId};
use vmseal_api::replica::ReplicaPlace;
use vmseal_api::transfer::ImageFormat;
use vmseal_secret::SecretBytes;

/// Two cores, emulation, and other tests beside: nothing here takes that long by itself.
pub const TIMEOUT: Duration = Duration::from_secs(90);

pub fn filter() -> PathBuf {
    if let Some(path) = std::env::var_os("VMSEAL_FILTER") {
        return path.into();
    }
    // target/PROFILE/deps/real-HASH
    let test = std::env::current_exe().unwrap();
    let path = test.ancestors().nth(2).unwrap().join("vmseal-filter");
    assert!(path.exists(), "{} is missing: cargo build -p vmseal-iofilter", path.display());
    path
}

/// An agent with threads of its own. Those of another one would go on with what it had begun.
pub struct MortalAgent {
    pub host: Arc<dyn HostAgent>,
    runtime: Option<Runtime>,
}

impl MortalAgent {
    /// Nothing of it is at work any more when this returns.
    pub async fn dies(mut self) {
        let runtime = self.runtime.take();
        // It waits for its threads, which an asynchronous task must not.
        spawn_blocking(move || drop(runtime)).await.unwrap();
    }
}

impl Drop for MortalAgent {
    /// Where a test fails.
    fn drop(&mut self) {
        if let Some(runtime) = self.runtime.take() {
            runtime.shutdown_background();
        }
    }
}

/// Directories of a host, and agents on it. Dropping an agent leaves its VMs running, as a crash does.
pub struct Bench {
    directory: tempfile::TempDir,
}

impl Bench {
    pub fn new() -> Self {
        let directory = tempfile::tempdir().unwrap();
        std::fs::create_dir(directory.path().join("store")).unwrap();
        contract::write_guest(&directory.path().join("guest")).unwrap();
        Self { directory }
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }

    pub async fn agent(&self) -> Arc<dyn HostAgent> {
        self.agent_that_retries_for(FILTER_RESTART_TIMEOUT).await
    }

    pub async fn agent_that_retries_for(
        &self,
        filter_restart_timeout: Duration,
    ) -> Arc<dyn HostAgent> {
        let options = self.options(filter_restart_timeout);
        Arc::new(RealHost::start(options).await.unwrap())
    }

    /// An agent that can die as a process does, in the middle of anything.
    pub async fn mortal_agent(&self) -> MortalAgent {
        let runtime = Runtime::new().unwrap();
        let started = runtime.spawn(RealHost::start(self.options(FILTER_RESTART_TIMEOUT)));
        let host = Arc::new(started.await.unwrap().unwrap());
        MortalAgent { host, runtime: Some(runtime) }
    }

    pub fn options(&self, filter_restart_timeout: Duration) -> AgentOptions {
        AgentOptions {
            run_dir: self.path("run"),
            state_dir: self.path("state"),
            filter: filter(),
            qemu: "qemu-system-x86_64".into(),
            transfer_directories: vec![self.directory.path().to_owned()],
            firmware_directory: vmseal_agent::FIRMWARE_DIRECTORY.into(),
            swtpm: "swtpm".into(),
            uid_base: 1_900_000_000,
            accelerator: AcceleratorChoice::Tcg,
            hardening: None,
            filter_restart_timeout,
            disk_stall: DISK_STALL,
            migration_listen: Some(([127, 0, 0, 1], 0).into()),
            place_memory: true,
        }
    }

    pub fn fixture(&self) -> Fixture {
        let run = self.path("run");
        Fixture {
            datastore: self.path("store"),
            image: self.path("guest"),
            timeout: TIMEOUT,
            kill_filter: Box::new(move |vm| kill(process(&run, vm, "filter"))),
        }
    }

    /// The process of this name of a VM.
    pub fn process(&self, vm: VmId, name: &str) -> i32 {
        process(&self.path("run"), vm, name)
    }

    pub fn kill(&self, vm: VmId, name: &str) {
        kill(self.process(vm, name));
    }

    /// A field of `/proc/PID/status` of a VM's process, as words.
    pub fn status(&self, vm: VmId, process: &str, field: &str) -> Vec<String> {
        let status = format!("/proc/{}/status", self.process(vm, process));
        let status = std::fs::read_to_string(status).unwrap();
        let line = status.lines().find_map(|line| line.strip_prefix(field)).unwrap();
        line.split_whitespace().map(str::to_owned).collect()
    }

    /// Other processes that have a file of this bench open.
    pub fn users(&self) -> Vec<i32> {
        let mark = self.directory.path().display().to_string();
        let pids = std::fs::read_dir("/proc")
            .unwrap()
            .filter_map(|entry| entry.unwrap().file_name().to_string_lossy().parse::<i32>().ok());
        let uses = |pid: &i32| {
            let files = std::fs::read_dir(format!("/proc/{pid}/fd")).into_iter().flatten();
            files
                .filter_map(|file| std::fs::read_link(file.ok()?.path()).ok())
                .any(|target| target.display().to_string().contains(&mark))
        };
        pids.filter(|pid| *pid != std::process::id() as i32).filter(uses).collect()
    }

    pub fn nothing_runs(&self) {
        let left = std::fs::read_dir(self.path("run/vms")).unwrap().count();
        assert_eq!(left, 0, "a run directory is left");
        // Between fork and exec, a process of another test has all our files open.
        let give_up = std::time::Instant::now() + Duration::from_secs(2);
        while !self.users().is_empty() {
            assert!(std::time::Instant::now() < give_up, "left: {:?}", self.users());
            std::thread::sleep(Duration::from_millis(20));
        }
    }
}

impl Drop for Bench {
    /// A failed test leaves nothing running.
    fn drop(&mut self) {
        let users = self.users();
        if !users.is_empty() {
            // Between fork and exec, a process of another test has all our files open: that one must live.
            std::thread::sleep(Duration::from_millis(300));
            let still = self.users();
            users.into_iter().filter(|pid| still.contains(pid)).for_each(kill);
        }
    }
}

/// The process of this name of a VM, from the record of it in the run directory.
pub fn process(run: &Path, vm: VmId, name: &str) -> i32 {
    let record = run.join("vms").join(vm.to_string()).join(format!("{name}.process"));
    let stat = std::fs::read_to_string(record).unwrap();
    stat.split(' ').next().unwrap().parse().unwrap()
}

pub fn kill(pid: i32) {
    // It may just have ended.
    let pid = nix::unistd::Pid::from_raw(pid);
    let _ = nix::sys::signal::kill(pid, nix::sys::signal::Signal::SIGKILL);
}

pub async fn wait(agent: &dyn HostAgent, vm: VmId, wanted: impl Fn(&VmState) -> bool) -> VmState {
    let give_up = tokio::time::Instant::now() + TIMEOUT;
    let mut last = None;
    loop {
        let state = agent.state_after(last.as_ref(), Duration::from_secs(5)).await.unwrap();
        let found = state.vms.iter().find(|state| state.vm == vm).cloned();
        last = Some(state);
        if let Some(state) = found.clone().filter(&wanted) {
            return state;
        }
        assert!(tokio::time::Instant::now() < give_up, "timed out: {found:?}");
    }
}

/// The notice of a VM with this code.
pub fn told(state: &VmState, code: NoticeCode) -> Option<String> {
    let notice = state.notices.iter().find(|notice| notice.code == code);
    notice.map(|notice| notice.detail.clone())
}

/// Kills the filters of a VM until it is off.
pub async fn kill_filters(bench: &Bench, agent: &dyn HostAgent, vm: VmId) {
    let mut before = None;
    loop {
        bench.kill(vm, "filter");
        let now = wait(agent, vm, |state| {
            let now = told(state, NoticeCode::FilterRestarted);
            state.power == Power::Off || (now.is_some() && now != before)
        });
        let now = now.await;
        if now.power == Power::Off {
            return;
        }
        before = told(&now, NoticeCode::FilterRestarted);
    }
}

pub async fn off(agent: &dyn HostAgent, vm: VmId, reason: StopReason) -> String {
    let state = wait(agent, vm, |state| state.power == Power::Off).await;
    let stopped = state.stopped.unwrap();
    assert_eq!(stopped.reason, reason, "{}", stopped.detail);
    stopped.detail
}

/// The report of a VM's death contains its name and the remedy.
pub fn says_what_to_do(why: &str) {
    assert!(why.contains("VM 'victim'") && why.contains("vmseal vm start victim"), "{why}");
}

/// Begins to make a disk.
pub async fn create(agent: &dyn HostAgent, vm: VmId, disk: DiskId, source: Option<ImageSource>) {
    let job = JobSpec::Create(CreateJob {
        disks: vec![DiskToCreate { disk, source, cloud_init: None, copy_of: None }],
    });
    agent.put_job(vm, TaskId::new(), job).await.unwrap();
}

/// A VM with a plain disk that holds the suite's guest, running.
pub async fn running(bench: &Bench, agent: &dyn HostAgent) -> VmSpec {
    let spec = made(bench, agent).await;
    start(agent, spec.vm).await;
    spec
}

/// A VM with a plain disk that holds the contents of the file `guest`.
pub async fn made(bench: &Bench, agent: &dyn HostAgent) -> VmSpec {
    made_with(bench, agent, None).await
}

/// The same, with a replica of the disk there.
pub async fn made_with(
    bench: &Bench,
    agent: &dyn HostAgent,
    replica: Option<ReplicaPlace>,
) -> VmSpec {
    let spec = spec_with(bench, replica);
    make(bench, agent, &spec, None).await;
    spec
}

/// A VM with a plain disk, of which nothing is made.
pub fn spec_with(bench: &Bench, replica: Option<ReplicaPlace>) -> VmSpec {
    let location = DatastoreLocation::Dir { path: bench.path("store") };
    let place = DatastoreSpec { datastore: DatastoreId::new(), location };
    let disk = DiskSpec {
        disk: DiskId::new(),
        name: "system".to_owned(),
        datastore: place,
        size: 1 << 20,
        encrypted: false,
        allocation: Allocation::Thin,
        role: Default::default(),
        limits: Default::default(),
        cache: None,
        replica,
        facts: Some(DiskFacts::Raw),
    };
    VmSpec {
        vm: VmId::new(),
        name: "victim".to_owned(),
        vcpus: 1,
        memory: 64 << 20,
        policy: None,
        key: None,
        hardware: Default::default(),
        devices: vec![Device::Disk(disk)],
        snapshots: Vec::new(),
        images: None,
        about: None,
    }
}

/// Makes a VM whose disk holds the contents of the file `guest`, with its key if it has one.
pub async fn make(bench: &Bench, agent: &dyn HostAgent, spec: &VmSpec, kek: Option<&SecretBytes>) {
    let vm = spec.vm;
    let disk = spec.disk_at(0).unwrap();
    agent.probe_datastore(disk.datastore.clone()).await.unwrap();
    agent.register_vm(spec.clone()).await.unwrap();
    if let (Some(reference), Some(kek)) = (&spec.key, kek) {
        let key_box = agent.describe().await.unwrap().key_box;
        agent.offer_key(vm, seal_for(&key_box, vm, reference, kek)).await.unwrap();
    }
    let source =
        Some(ImageSource { path: bench.path("guest"), format: ImageFormat::Raw, force: false });
    create(agent, vm, disk.disk, source).await;
    wait(agent, vm, |state| {
        let job = state.jobs.first().map(|job| job.state.clone());
        assert!(!matches!(job, Some(JobState::Failed { .. })), "{job:?}");
        job == Some(JobState::Done)
    })
    .await;
}

pub async fn start(agent: &dyn HostAgent, vm: VmId) {
    agent.power_on(vm).await.unwrap();
    wait(agent, vm, |state| {
        assert!(state.power != Power::Off, "it does not start: {:?}", state.stopped);
        state.power == Power::Running
    })
    .await;
    let mut console = agent.console(vm, vmseal_api::console::ConsoleClaim::IfFree).await.unwrap();
    let mut seen = Vec::new();
    let shown = async {
        while !String::from_utf8_lossy(&seen).contains(BANNER) {
            let mut chunk = [0; 1024];
            let length = console.read(&mut chunk).await.unwrap();
            assert!(length > 0, "the console ended");
            seen.extend_from_slice(&chunk[..length]);
        }
    };
    tokio::time::timeout(TIMEOUT, shown).await.expect("the guest says nothing");
}
