//! A host in memory, with a real agent's rules as far as a control plane can see them, real key boxes
//! and check values, and failures on demand.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use async_trait::async_trait;
use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use jiff::Timestamp;
use tokio::sync::watch;
use vmseal_api::host::*;
use vmseal_api::id::{DiskId, HostId, Incarnation, VmId};
use vmseal_api::problem::{ErrorCode, Problem};
use vmseal_secret::derive::{KeyContext, check_value};
use vmseal_secret::sealed_box::{Recipient, SealedBox};

use crate::hosts::connector::HostConnector;
use crate::store::hosts::Host;

/// How a call fails.
#[derive(Clone, Debug)]
pub enum Failure {
    /// It is refused, and not done.
    Refused(Problem),
    /// It is done, and the answer is lost.
    Unanswered,
    /// It is lost on its way.
    Unheard,
}

struct Known {
    spec: VmSpec,
    power: Power,
    key_held: bool,
    stopped: Option<Stopped>,
    disks: HashMap<DiskId, DiskPhase>,
    notices: Vec<Notice>,
}

struct Inner {
    incarnation: Incarnation,
    recipient: Recipient,
    vms: HashMap<VmId, Known>,
    /// What is on the datastores.
    files: HashMap<DiskId, DiskFacts>,
    /// Calls by name that are to fail, each with how often.
    failures: HashMap<&'static str, (Failure, u32)>,
    calls: Vec<&'static str>,
    /// Disks stay half-made until this is false.
    slow: bool,
    /// Guests do not hear the power button.
    stubborn: bool,
    down: bool,
}

/// A host; its clone is the same host.
#[derive(Clone)]
pub struct FakeHost {
    inner: Arc<Mutex<Inner>>,
    version: Arc<watch::Sender<u64>>,
}

impl HostConnector for FakeHost {
    fn connect(&self, _: &Host) -> Result<Arc<dyn HostAgent>, Problem> {
        Ok(Arc::new(self.clone()))
    }
}

impl FakeHost {
    pub fn new() -> Self {
        let inner = Inner {
            incarnation: Incarnation::new(),
            recipient: Recipient::generate().unwrap(),
            vms: HashMap::new(),
            files: HashMap::new(),
            failures: HashMap::new(),
            calls: Vec::new(),
            slow: false,
            stubborn: false,
            down: false,
        };
        Self { inner: Arc::new(Mutex::new(inner)), version: Arc::new(watch::Sender::new(1)) }
    }

    fn inner(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap()
    }

    fn changed(&self) {
        self.version.send_modify(|version| *version += 1);
    }

    /// The next `times` calls of this name fail.
    pub fn fail(&self, call: &'static str, failure: Failure, times: u32) {
        self.inner().failures.insert(call, (failure, times));
    }

    /// The agent restarts: keys and what is off are forgotten, guests run on.
    pub fn restart(&self) {
        let mut inner = self.inner();
        inner.incarnation = Incarnation::new();
        inner.recipient = Recipient::generate().unwrap();
        inner.vms.retain(|_, known| known.power == Power::Running);
        for known in inner.vms.values_mut() {
            known.key_held = false;
        }
        drop(inner);
        self.changed();
    }

    pub fn set_down(&self, down: bool) {
        self.inner().down = down;
        self.changed();
    }

    pub fn set_slow(&self, slow: bool) {
        let mut inner = self.inner();
        inner.slow = slow;
        drop(inner);
        self.changed();
    }

    pub fn set_stubborn(&self, stubborn: bool) {
        self.inner().stubborn = stubborn;
    }

    /// A filter dies, as the agent would report it.
    pub fn kill_filter(&self, vm: VmId) {
        self.stop(vm, StopReason::FilterDied, "the filter process died");
    }

    /// One header copy is found to be damaged.
    pub fn notice(&self, vm: VmId) {
        let detail = "the first header copy is damaged".to_owned();
        let notice = Notice { code: NoticeCode::HeaderCopyDamaged, disk: None, detail };
        self.inner().vms.get_mut(&vm).unwrap().notices.push(notice);
        self.changed();
    }

    fn stop(&self, vm: VmId, reason: StopReason, detail: &str) {
        let mut inner = self.inner();
        let known = inner.vms.get_mut(&vm).unwrap();
        known.power = Power::Off;
        known.stopped = Some(Stopped { at: Timestamp::now(), reason, detail: detail.to_owned() });
        drop(inner);
        self.changed();
    }

    pub fn calls(&self, call: &str) -> usize {
        self.inner().calls.iter().filter(|made| **made == call).count()
    }

    pub fn files(&self) -> usize {
        self.inner().files.len()
    }

    pub fn has_file(&self, disk: DiskId) -> bool {
        self.inner().files.contains_key(&disk)
    }

    /// Whether it knows a VM, and has its key.
    pub fn knows(&self, vm: VmId) -> Option<KeyState> {
        self.inner().vms.get(&vm).map(key_state)
    }

    pub fn power(&self, vm: VmId) -> Option<Power> {
        self.inner().vms.get(&vm).map(|known| known.power)
    }

    /// What a registered VM is known as.
    pub fn spec(&self, vm: VmId) -> Option<VmSpec> {
        self.inner().vms.get(&vm).map(|known| known.spec.clone())
    }

    /// A VM that somebody else registered.
    pub fn plant_debris(&self, spec: VmSpec) {
        self.inner().vms.insert(spec.vm, known(spec));
        self.changed();
    }

    /// Does a call, or fails as it was told to.
    fn call<T>(
        &self,
        name: &'static str,
        work: impl FnOnce(&mut Inner) -> Result<T, Problem>,
    ) -> Result<T, Problem> {
        let mut inner = self.inner();
        inner.calls.push(name);
        let silence = || Err(Problem::new(ErrorCode::Unreachable, "no answer"));
        if inner.down {
            return silence();
        }
        let failure = match inner.failures.get_mut(name) {
            Some((failure, times)) if *times > 0 => {
                *times -= 1;
                Some(failure.clone())
            }
            _ => None,
        };
        match failure {
            Some(Failure::Refused(problem)) => return Err(problem),
            Some(Failure::Unheard) => return silence(),
            _ => {}
        }
        let answer = work(&mut inner);
        drop(inner);
        self.changed();
        match failure {
            Some(Failure::Unanswered) => silence(),
            _ => answer,
        }
    }
}

fn known(spec: VmSpec) -> Known {
    Known {
        spec,
        power: Power::Off,
        key_held: false,
        stopped: None,
        disks: HashMap::new(),
        notices: Vec::new(),
    }
}

fn key_state(known: &Known) -> KeyState {
    match (&known.spec.key, known.key_held) {
        (None, _) => KeyState::NotNeeded,
        (Some(_), true) => KeyState::Held,
        (Some(_), false) => KeyState::Missing,
    }
}

fn find(inner: &mut Inner, vm: VmId) -> Result<&mut Known, Problem> {
    inner.vms.get_mut(&vm).ok_or_else(|| Problem::not_found("VM", vm))
}

fn facts(encrypted: bool) -> DiskFacts {
    if !encrypted {
        return DiskFacts::Raw;
    }
    DiskFacts::Luks2 {
        version: 1,
        cipher: "aes-xts-plain64".to_owned(),
        key_bits: 512,
        sector_size: 4096,
        data_offset: 16 << 20,
    }
}

#[async_trait]
impl HostAgent for FakeHost {
    async fn describe(&self) -> Result<HostDescription, Problem> {
        self.call("describe", |inner| {
            Ok(HostDescription {
                contract: VERSION,
                vmseal: "0".to_owned(),
                incarnation: inner.incarnation,
                hostname: "fake".to_owned(),
                key_box: STANDARD.encode(inner.recipient.public_key()),
                accelerator: Accelerator { kind: AcceleratorKind::Tcg, reason: String::new() },
                qemu: "none".to_owned(),
                cpus: 1,
                memory: 1 << 30,
                aes_hardware: true,
                weaknesses: Vec::new(),
            })
        })
    }

    async fn state(
        &self,
        after: Option<(Incarnation, u64)>,
        wait: Duration,
    ) -> Result<HostState, Problem> {
        let mut version = self.version.subscribe();
        let deadline = tokio::time::Instant::now() + wait;
        loop {
            let current = *version.borrow_and_update();
            let (incarnation, down) = {
                let inner = self.inner();
                (inner.incarnation, inner.down)
            };
            if down {
                return Err(Problem::new(ErrorCode::Unreachable, "no answer"));
            }
            let old = after.is_some_and(|(life, seen)| life == incarnation && seen >= current);
            if !old || tokio::time::timeout_at(deadline, version.changed()).await.is_err() {
                break;
            }
        }
        let mut inner = self.inner();
        let slow = inner.slow;
        let mut finished = Vec::new();
        for known in inner.vms.values_mut() {
            for disk in known.spec.disks.iter().filter(|_| !slow) {
                if let Some(phase @ DiskPhase::Creating { .. }) = known.disks.get_mut(&disk.disk) {
                    *phase = DiskPhase::Ready { facts: facts(disk.encrypted) };
                    finished.push((disk.disk, facts(disk.encrypted)));
                }
            }
        }
        inner.files.extend(finished);
        let vms = inner.vms.iter().map(|(vm, known)| VmState {
            vm: *vm,
            power: known.power,
            key: key_state(known),
            stopped: known.stopped.clone(),
            disks: known
                .disks
                .iter()
                .map(|(disk, phase)| DiskState { disk: *disk, phase: phase.clone() })
                .collect(),
            notices: known.notices.clone(),
        });
        Ok(HostState {
            incarnation: inner.incarnation,
            version: *self.version.borrow(),
            vms: vms.collect(),
        })
    }

    async fn probe_datastore(&self, _: DatastoreSpec) -> Result<DatastoreUsage, Problem> {
        self.call("probe_datastore", |_| Ok(DatastoreUsage { capacity: 1 << 40, free: 1 << 39 }))
    }

    async fn register_vm(&self, spec: VmSpec) -> Result<(), Problem> {
        self.call("register_vm", |inner| {
            match inner.vms.get_mut(&spec.vm) {
                Some(known) if known.power != Power::Off => {
                    return Err(Problem::new(ErrorCode::WrongState, "it runs"));
                }
                Some(known) => known.spec = spec,
                None => {
                    inner.vms.insert(spec.vm, known(spec));
                }
            }
            Ok(())
        })
    }

    async fn unregister_vm(&self, vm: VmId) -> Result<(), Problem> {
        self.call("unregister_vm", |inner| {
            if find(inner, vm)?.power != Power::Off {
                return Err(Problem::new(ErrorCode::WrongState, "it runs"));
            }
            inner.vms.remove(&vm);
            Ok(())
        })
    }

    async fn offer_key(&self, vm: VmId, key: SealedKey) -> Result<(), Problem> {
        self.call("offer_key", |inner| {
            let ours = STANDARD.encode(inner.recipient.public_key());
            if key.key_box != ours {
                return Err(Problem::new(ErrorCode::WrongState, "an earlier life's key box"));
            }
            let reference = find(inner, vm)?.spec.key.clone().unwrap();
            let sealed = SealedBox::from_bytes(STANDARD.decode(&key.sealed).unwrap()).unwrap();
            let kek = inner.recipient.open(&sealed, &key_info(vm, &reference)).unwrap();
            let context = KeyContext {
                vm: vm.0.into_bytes(),
                provider: reference.provider.0.into_bytes(),
                key_id: &reference.key_id,
            };
            if check_value(&kek, &context).unwrap().to_string() != reference.check {
                return Err(Problem::new(ErrorCode::KeyMismatch, "another key"));
            }
            find(inner, vm)?.key_held = true;
            Ok(())
        })
    }

    async fn create_disk(
        &self,
        vm: VmId,
        disk: DiskId,
        _: Option<ImageSource>,
    ) -> Result<(), Problem> {
        self.call("create_disk", |inner| {
            let made = inner.files.get(&disk).cloned();
            let known = find(inner, vm)?;
            let spec = known.spec.disks.iter().find(|spec| spec.disk == disk);
            let spec = spec.ok_or_else(|| Problem::not_found("disk", disk))?;
            if spec.encrypted && !known.key_held {
                return Err(Problem::new(ErrorCode::Locked, "no key"));
            }
            let phase = match made {
                Some(facts) => DiskPhase::Ready { facts },
                None => DiskPhase::Creating { done: 1, total: 4 },
            };
            known.disks.insert(disk, phase);
            Ok(())
        })
    }

    async fn delete_disk(&self, vm: VmId, disk: DiskId) -> Result<(), Problem> {
        self.call("delete_disk", |inner| {
            let known = find(inner, vm)?;
            if known.power != Power::Off {
                return Err(Problem::new(ErrorCode::InUse, "it runs"));
            }
            known.disks.remove(&disk);
            inner.files.remove(&disk);
            Ok(())
        })
    }

    async fn power_on(&self, vm: VmId) -> Result<(), Problem> {
        self.call("power_on", |inner| {
            let known = find(inner, vm)?;
            if key_state(known) == KeyState::Missing {
                return Err(Problem::new(ErrorCode::Locked, "no key"));
            }
            known.power = Power::Running;
            known.stopped = None;
            Ok(())
        })
    }

    async fn power_off(&self, vm: VmId, how: PowerOff) -> Result<(), Problem> {
        self.call("power_off", |inner| {
            let stubborn = inner.stubborn;
            let known = find(inner, vm)?;
            let reason = match how {
                PowerOff::Force => StopReason::PoweredOff,
                PowerOff::Shutdown if stubborn => return Ok(()),
                PowerOff::Shutdown => StopReason::GuestShutdown,
            };
            if known.power != Power::Off {
                known.power = Power::Off;
                known.stopped =
                    Some(Stopped { at: Timestamp::now(), reason, detail: "as asked".to_owned() });
            }
            Ok(())
        })
    }

    async fn console(&self, vm: VmId) -> Result<ConsoleStream, Problem> {
        self.call("console", |inner| find(inner, vm).map(drop))?;
        let (ours, theirs) = tokio::io::duplex(1024);
        tokio::spawn(async move {
            let (mut read, mut write) = tokio::io::split(theirs);
            let _ = tokio::io::copy(&mut read, &mut write).await;
        });
        Ok(Box::new(ours))
    }
}

/// Where the datastore of a test is.
pub fn host(id: HostId) -> Host {
    Host { id, name: "here".to_owned(), address: "127.0.0.1:1".to_owned(), description: None }
}
