//! A starting agent and its run directory: records of older and newer agents, damaged ones, and all of them
//! together. Sleeping processes stand in for QEMU: an agent identifies it by process id and start time alone.

#![allow(clippy::unwrap_used)] // in tests a panic is the report

use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use serde_json::{Value, json};
use tokio::io::{AsyncBufReadExt, AsyncWriteExt, BufReader};
use tokio::net::UnixListener;
use vmseal_agent::{AcceleratorChoice, AgentOptions, DISK_STALL, FILTER_RESTART_TIMEOUT, RealHost};
use vmseal_api::host::{HostAgent, NoticeCode, Power, PowerOff, StopReason, VmSpec, VmState};
use vmseal_api::id::VmId;
use vmseal_api::nic::NicLink;
use vmseal_api::problem::ErrorCode;

const RECORD_1: &str = include_str!("golden/run-record-1.json");
const RECORD_2: &str = include_str!("golden/run-record-2.json");
const RECORD_3: &str = include_str!("golden/run-record-3.json");
const RECORD_4: &str = include_str!("golden/run-record-4.json");
const RECORD_5: &str = include_str!("golden/run-record-5.json");

/// The VM and the boot in the records above.
const GOLDEN_VM: &str = "0198a000-0000-7000-8000-000000000001";
const GOLDEN_BOOT: &str = "0f0e0d0c-0000-4000-8000-000000000000";

/// On a busy machine; nothing here takes that long by itself.
const TIMEOUT: Duration = Duration::from_secs(60);

/// A run directory. Its processes are killed when the test ends.
struct Host {
    directory: tempfile::TempDir,
    processes: Vec<Child>,
}

/// The record of a VM of this boot, made from a golden one.
fn record(golden: &str, vm: VmId) -> String {
    let boot = std::fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap();
    golden.replace(GOLDEN_VM, &vm.to_string()).replace(GOLDEN_BOOT, boot.trim())
}

fn newer(vm: VmId) -> String {
    let text = record(RECORD_2, vm).replace("\"version\": 2", "\"version\": 7");
    text.replace("\"written_by\": \"0.1.0\"", "\"written_by\": \"9.1.0\"")
}

impl Host {
    fn new() -> Self {
        let directory = tempfile::tempdir().unwrap();
        std::fs::create_dir_all(directory.path().join("run/vms")).unwrap();
        // Only its version is asked for: no guest is started here.
        let qemu = directory.path().join("qemu");
        // Another process writes it: a child that another test starts meanwhile would have it open for writing, too, and nobody could run it.
        let script =
            r#"printf '#!/bin/sh\necho QEMU emulator version 9.0.0\n' >"$0" && chmod 755 "$0""#;
        assert!(Command::new("sh").args(["-c", script]).arg(&qemu).status().unwrap().success());
        Self { directory, processes: Vec::new() }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }

    fn of(&self, vm: VmId) -> PathBuf {
        self.path("run/vms").join(vm.to_string())
    }

    /// A VM with this record, whose QEMU lives.
    fn vm(&mut self, record: impl FnOnce(VmId) -> String) -> VmId {
        let vm = VmId::new();
        std::fs::create_dir(self.of(vm)).unwrap();
        std::fs::write(self.of(vm).join("run.json"), record(vm)).unwrap();
        let mut qemu = Command::new("sleep");
        let qemu = qemu.arg("600").stdin(Stdio::null()).spawn().unwrap();
        let stat = format!("/proc/{}/stat", qemu.id());
        std::fs::copy(stat, self.of(vm).join("qemu.process")).unwrap();
        self.processes.push(qemu);
        vm
    }

    /// Whether the QEMU of the VM that was made at this index lives.
    fn lives(&mut self, index: usize) -> bool {
        self.processes[index].try_wait().unwrap().is_none()
    }

    async fn agent(&self) -> RealHost {
        let options = AgentOptions {
            run_dir: self.path("run"),
            state_dir: self.path("state"),
            filter: "/bin/true".into(),
            qemu: self.path("qemu"),
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
        };
        RealHost::start(options).await.unwrap()
    }

    /// Answers as QEMU's monitor and console do while the guest runs. What the monitor was asked is in the list.
    fn answer_as_qemu(&self, vm: VmId) -> Arc<Mutex<Vec<Value>>> {
        self.answer_as_qemu_whose_guest(vm, "running")
    }

    /// The same where the guest has this status.
    fn answer_as_qemu_whose_guest(&self, vm: VmId, status: &'static str) -> Arc<Mutex<Vec<Value>>> {
        let asked = Arc::<Mutex<Vec<Value>>>::default();
        let list = Arc::clone(&asked);
        let console = UnixListener::bind(self.of(vm).join("console.sock")).unwrap();
        let monitor = UnixListener::bind(self.of(vm).join("qmp.sock")).unwrap();
        tokio::spawn(async move {
            let mut kept = Vec::new();
            while let Ok((stream, _)) = console.accept().await {
                kept.push(stream);
            }
        });
        tokio::spawn(async move {
            while let Ok((stream, _)) = monitor.accept().await {
                let (reader, mut writer) = stream.into_split();
                let version = r#"{"QMP": {"version": {}, "capabilities": []}}"#;
                writer.write_all(format!("{version}\r\n").as_bytes()).await.unwrap();
                let mut lines = BufReader::new(reader).lines();
                while let Ok(Some(line)) = lines.next_line().await {
                    let request: Value = serde_json::from_str(&line).unwrap();
                    let answer = match request["execute"].as_str() {
                        Some("query-status") => {
                            json!({ "running": status == "running", "status": status })
                        }
                        Some("qom-list") => devices(),
                        _ => json!({}),
                    };
                    let answer = json!({ "return": answer, "id": request["id"] });
                    list.lock().unwrap().push(request);
                    let answer = format!("{answer}\r\n");
                    if writer.write_all(answer.as_bytes()).await.is_err() {
                        break;
                    }
                }
            }
        });
        asked
    }
}

impl Drop for Host {
    fn drop(&mut self) {
        for process in &mut self.processes {
            let _ = process.kill();
            let _ = process.wait();
        }
    }
}

async fn state(agent: &RealHost, vm: VmId) -> Option<VmState> {
    let state = agent.state_now().await.unwrap();
    state.vms.into_iter().find(|state| state.vm == vm)
}

async fn wait(agent: &RealHost, vm: VmId, wanted: impl Fn(&VmState) -> bool) -> VmState {
    let give_up = tokio::time::Instant::now() + TIMEOUT;
    loop {
        let found = state(agent, vm).await;
        if let Some(state) = found.clone().filter(&wanted) {
            return state;
        }
        assert!(tokio::time::Instant::now() < give_up, "timed out: {found:?}");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

/// The devices of the VMs of the records, as QEMU lists them.
fn devices() -> Value {
    let record: Value = serde_json::from_str(RECORD_5).unwrap();
    let names = record["nics"].as_array().unwrap().iter();
    let names = names.map(|nic| format!("nic-{}", nic["nic"].as_str().unwrap()));
    Value::from_iter(names.map(|name| json!({"name": name, "type": "child<x>"})))
}

/// The alarm text of a VM that is left running.
async fn left_running(agent: &RealHost, vm: VmId) -> String {
    let state = state(agent, vm).await.expect("the VM is not reported");
    assert_eq!((state.power, &state.died), (Power::Running, &None));
    let [notice] = state.notices.as_slice() else { panic!("{:?}", state.notices) };
    assert_eq!(notice.code, NoticeCode::NotAdopted);
    notice.detail.clone()
}

fn spec(vm: VmId) -> VmSpec {
    VmSpec {
        vm,
        name: "web".to_owned(),
        vcpus: 1,
        memory: 1 << 28,
        policy: None,
        key: None,
        hardware: Default::default(),
        devices: vec![],
        snapshots: Vec::new(),
        images: None,
        about: None,
    }
}

/// It has no filter here, and that is reported about an adopted VM.
async fn adopted(agent: &RealHost, vm: VmId) {
    let found = wait(agent, vm, |state| {
        let codes: Vec<_> = state.notices.iter().map(|notice| notice.code).collect();
        codes == [NoticeCode::DisksDown]
    });
    let found = found.await;
    assert_eq!((found.power, found.died), (Power::Running, None));
}

async fn is_adopted(golden: &str) {
    let mut host = Host::new();
    let vm = host.vm(|vm| record(golden, vm));
    host.answer_as_qemu(vm);
    let agent = host.agent().await;
    adopted(&agent, vm).await;
    assert!(host.lives(0));
}

#[tokio::test]
async fn the_record_of_an_older_agent_is_adopted() {
    is_adopted(RECORD_1).await;
}

#[tokio::test]
async fn the_record_of_an_agent_before_network_cards_is_adopted() {
    is_adopted(RECORD_3).await;
}

/// An agent may have ended after it had put on record that a cable is out, and before it told QEMU.
#[tokio::test]
async fn the_record_of_an_agent_before_devices_came_and_went_is_adopted() {
    let mut host = Host::new();
    let vm = host.vm(|vm| record(RECORD_4, vm));
    let asked = host.answer_as_qemu(vm);
    let agent = host.agent().await;
    let found = state(&agent, vm).await.unwrap();
    assert_eq!(found.power, Power::Running);
    let links: Vec<_> = found.nics.iter().map(|nic| nic.link).collect();
    assert_eq!(links, [Some(NicLink::Up), Some(NicLink::Down), Some(NicLink::Up)]);
    let with = found.started_with.unwrap();
    assert_eq!((with.vcpus, with.disks.len()), (2, 3));
    let asked = asked.lock().unwrap().clone();
    let links = asked.iter().filter(|it| it["execute"] == "set_link");
    let links: Vec<_> = links.map(|it| it["arguments"]["up"].as_bool()).take(3).collect();
    assert_eq!(links, [Some(true), Some(false), Some(true)], "{asked:?}");
    assert!(host.lives(0));
}

/// The record of a guest that runs and has not panicked, and is to be left as it is when it does.
fn preserved(vm: VmId) -> String {
    let mut golden: Value = serde_json::from_str(RECORD_5).unwrap();
    for field in ["paused", "panics", "panic"] {
        golden.as_object_mut().unwrap().remove(field);
    }
    golden["hardware"]["on_crash"] = json!("preserve");
    record(&golden.to_string(), vm)
}

/// Nobody was there to hear of it from QEMU: the agent that starts finds the guest so.
#[tokio::test]
async fn a_guest_that_panicked_while_no_agent_was_there_is_found_so() {
    for (status, panicked) in [("running", false), ("guest-panicked", true)] {
        let mut host = Host::new();
        let vm = host.vm(preserved);
        let asked = host.answer_as_qemu_whose_guest(vm, status);
        let agent = host.agent().await;
        let power = if panicked { Power::Paused } else { Power::Running };
        let found = wait(&agent, vm, |state| state.power == power).await;
        let told = found.notices.iter().find(|it| it.code == NoticeCode::GuestPanicked);
        assert_eq!((told.is_some(), found.panics.len()), (panicked, usize::from(panicked)));
        let asked = asked.lock().unwrap().clone();
        let goes_on = asked.iter().any(|it| it["execute"] == "cont" || it["execute"] == "quit");
        assert!(!goes_on, "{status}: {asked:?}");
        assert!(host.lives(0));
        // An agent that starts later reads it from the record.
        let noted = std::fs::read_to_string(host.of(vm).join("run.json")).unwrap();
        let noted: Value = serde_json::from_str(&noted).unwrap();
        assert_eq!(noted["panic"]["kept"].as_bool(), panicked.then_some(true), "{noted}");
    }
}

/// A guest that an operator has paused stays so; a disk that was on record and never came to be is forgotten.
#[tokio::test]
async fn a_record_of_this_version_is_adopted() {
    is_adopted(RECORD_2).await;
    let mut host = Host::new();
    let vm = host.vm(|vm| record(RECORD_5, vm));
    let asked = host.answer_as_qemu(vm);
    let agent = host.agent().await;
    let found = state(&agent, vm).await.unwrap();
    assert_eq!((found.power, found.nics.len()), (Power::Paused, 3));
    // QEMU says that its guest runs.
    let asked = asked.lock().unwrap().clone();
    assert!(asked.iter().any(|command| command["execute"] == "stop"), "{asked:?}");
    // Two disks, the firmware's variables and the TPM's; the third was plugged in.
    assert_eq!(found.started_with.unwrap().disks.len(), 4);
    // Nothing is on record as its TPM.
    let told = found.notices.iter().find(|notice| notice.code == NoticeCode::TpmDied).unwrap();
    assert!(told.detail.contains("ended while no agent was there"), "{}", told.detail);
}

#[tokio::test]
async fn what_a_newer_agent_started_is_left_running_with_an_alarm() {
    let mut host = Host::new();
    let vm = host.vm(newer);
    let before = std::fs::read(host.of(vm).join("run.json")).unwrap();
    let agent = host.agent().await;
    let told = left_running(&agent, vm).await;
    let path = host.of(vm).join("run.json").display().to_string();
    for part in [&path, "version 7", "written by vmseal 9.1.0", "Restart the agent", "vm stop"] {
        assert!(told.contains(part), "'{part}' is missing in: {told}");
    }
    // The server registers it with its name; calls that need the processes are refused with the same text.
    agent.register_vm(spec(vm)).await.unwrap();
    assert!(left_running(&agent, vm).await.contains("VM 'web'"));
    agent.power_on(vm).await.unwrap();
    let refused = agent.unregister_vm(vm).await.unwrap_err();
    assert_eq!(refused.code, ErrorCode::WrongState);
    let disk = vmseal_api::id::DiskId::new();
    assert_eq!(agent.bitmaps(vm, disk).await.unwrap_err().code, ErrorCode::WrongState);
    // There is no monitor to send the power button to.
    let button = agent.power_off(vm, PowerOff::Shutdown { seconds: 1 }).await.unwrap_err();
    assert!(button.detail.contains("--force"), "{button}");
    // Nothing of it is changed, so that the agent that started it can adopt it.
    assert!(host.lives(0));
    assert_eq!(std::fs::read(host.of(vm).join("run.json")).unwrap(), before);
    let boot = agent.describe().await.unwrap().boot;
    drop(agent);
    std::fs::write(host.of(vm).join("run.json"), record(RECORD_2, vm)).unwrap();
    host.answer_as_qemu(vm);
    let agent = host.agent().await;
    adopted(&agent, vm).await;
    // The host has not booted: to the server, which starts VMs when it has, it is the same boot.
    assert!(boot.is_some() && agent.describe().await.unwrap().boot == boot);
}

#[tokio::test]
async fn a_damaged_record_ends_nothing_until_an_operator_does() {
    let mut host = Host::new();
    let damaged = host.vm(|_| "{\"version\": 1, garbage".to_owned());
    let of_another = host.vm(|_| record(RECORD_2, VmId::new()));
    let missing = host.vm(|_| String::new());
    std::fs::remove_file(host.of(missing).join("run.json")).unwrap();
    let agent = host.agent().await;
    for (vm, word) in
        [(damaged, "is damaged"), (of_another, "it is of VM"), (missing, "is missing")]
    {
        let told = left_running(&agent, vm).await;
        assert!(told.contains(word), "{told}");
    }
    assert!((0..3).all(|index| host.lives(index)));

    // Forced off: cleared away, and then a VM like any other.
    agent.power_off(damaged, PowerOff::Force).await.unwrap();
    let off = wait(&agent, damaged, |state| state.power == Power::Off).await;
    assert_eq!((off.stopped.unwrap().reason, off.died), (StopReason::PoweredOff, None));
    assert!(!host.of(damaged).exists());
    agent.unregister_vm(damaged).await.unwrap();
    // It ends by itself: the reason is unknown, which raises an alarm.
    host.processes[1].kill().unwrap();
    let off = wait(&agent, of_another, |state| state.power == Power::Off).await;
    assert_eq!(off.died.unwrap().reason, StopReason::FoundDead);
    assert!(host.lives(2));
}

#[tokio::test]
async fn a_damaged_record_of_a_vm_that_is_gone_is_reported_and_removed() {
    let mut host = Host::new();
    let vm = host.vm(newer);
    host.processes[0].kill().unwrap();
    host.processes[0].wait().unwrap();
    let agent = host.agent().await;
    let found = state(&agent, vm).await.unwrap();
    assert_eq!(found.power, Power::Off);
    let died = found.died.unwrap();
    assert_eq!(died.reason, StopReason::FoundDead);
    assert!(died.detail.contains("version 7"), "{}", died.detail);
    assert!(!host.of(vm).exists());
}

#[tokio::test]
async fn a_vm_that_cannot_be_adopted_stops_neither_others_nor_the_agent() {
    let mut host = Host::new();
    let good = host.vm(|vm| record(RECORD_1, vm));
    host.answer_as_qemu(good);
    let unreadable = host.vm(newer);
    // Its record is a directory, and so is its QEMU's record.
    let odd = host.vm(newer);
    for name in ["run.json", "qemu.process"] {
        std::fs::remove_file(host.of(odd).join(name)).unwrap();
        std::fs::create_dir(host.of(odd).join(name)).unwrap();
    }
    // Its monitor does not answer.
    let silent = host.vm(|vm| record(RECORD_2, vm));
    std::fs::create_dir(host.path("run/vms/no-vm")).unwrap();
    std::fs::create_dir(host.path("run/imports")).unwrap();
    std::fs::write(host.path("run/imports/no-directory"), "").unwrap();
    let agent = host.agent().await;
    adopted(&agent, good).await;
    left_running(&agent, unreadable).await;
    left_running(&agent, odd).await;
    assert!(left_running(&agent, silent).await.contains("cannot be connected to"));
    assert!((0..4).all(|index| host.lives(index)));
    assert!(Path::new(&host.path("run/vms/no-vm")).exists());
    let refused = agent.power_off(odd, PowerOff::Force).await.unwrap_err();
    assert!(refused.detail.contains("cannot be determined"), "{refused}");

    // The silent one is tried again, and adopted once it answers.
    host.answer_as_qemu(silent);
    wait(&agent, silent, |state| {
        state.notices.iter().all(|notice| notice.code != NoticeCode::NotAdopted)
    })
    .await;
}
