//! A running VM that this agent cannot take over: its record cannot be read (it may be a newer agent's), or
//! its processes do not answer. It is left running, with an alarm; its processes are ended only when an
//! operator forces it off.
//!
//! ```text
//!                 ┌── the record can be read: tried again ──► connected ──► owned as running
//!    Left running ┤
//!                 └── its QEMU ended, or was forced off ──► cleared away ──► owned as off
//! ```

use std::sync::Arc;
use std::time::Duration;

use jiff::Timestamp;
use serde_json::Value;
use tokio::sync::mpsc;
use tokio::task::JoinHandle;
use tokio::time::{MissedTickBehavior, timeout};
use vmseal_api::host::{
    Notice, NoticeCode, Power, PowerOff, SealedKey, StopReason, Stopped, VmSpec, VmState,
};
use vmseal_api::id::VmId;
use vmseal_api::problem::{ErrorCode, Problem};
use vmseal_api::request_id;
use vmseal_secret::SecretBytes;

use super::owner::Owner;
use super::reconnect::{self, Reconnected};
use super::running::Running;
use super::{Call, Initial, Request, Shared, internal};
use crate::filter::metrics;
use crate::hypervisor::qemu;
use crate::hypervisor::qmp::Qmp;
use crate::process::Process;
use crate::process::run_dir::ProcessDir;
use crate::process::run_record::{Record, Unreadable};
use crate::process::users::Slot;
use crate::rules;
use crate::rules::exclusion::{Action, Situation};

/// How often connecting is tried again, or its process is looked for.
const INTERVAL: Duration = Duration::from_secs(10);

/// The longest that its monitor may take to press the power button.
const BUTTON_TIMEOUT: Duration = Duration::from_secs(10);

/// Why it is left running.
pub enum Why {
    /// Its record cannot be read.
    Record(Unreadable),
    /// Its processes cannot be connected to; this is tried again with the record.
    Processes(Box<Record>, Problem),
}

/// See the module.
pub struct LeftRunning {
    shared: Arc<Shared>,
    directory: ProcessDir,
    spec: VmSpec,
    why: Why,
    /// Its QEMU; none while it cannot be determined.
    qemu: Option<Process>,
    /// Its users, so that no other VM gets them; none where they are unknown.
    slot: Option<Arc<Slot>>,
    kek: Option<SecretBytes>,
    /// It was asked to shut down: its end is not reported as a death.
    asked_to_shut_down: bool,
    reconnecting: Option<JoinHandle<Reconnected>>,
}

/// How the time as a VM left running ends.
enum End {
    /// Its processes are connected.
    Connected(Box<Running>),
    /// It has no live QEMU.
    Off(StopReason, String),
    /// The agent is ending.
    Agent,
}

impl LeftRunning {
    /// Leaves it running. `qemu` is none where it could not be determined whether one lives.
    pub fn new(
        shared: Arc<Shared>,
        directory: ProcessDir,
        vm: VmId,
        why: Why,
        qemu: Option<Process>,
    ) -> Self {
        let (spec, slot) = match &why {
            Why::Processes(record, _) => {
                (record.spec.clone(), Some(shared.users.take_again(record.slot)))
            }
            Why::Record(_) => {
                let user = qemu.as_ref().and_then(Process::user);
                (unknown_spec(vm), user.and_then(|user| shared.users.take_of_qemu(user)))
            }
        };
        let slot = slot.map(Arc::new);
        let (kek, asked_to_shut_down, reconnecting) = (None, false, None);
        Self { shared, directory, spec, why, qemu, slot, kek, asked_to_shut_down, reconnecting }
    }

    /// Publishes its state.
    pub fn publish(&self) {
        let detail = self.detail();
        let key = rules::key_state(&self.spec, self.kek.is_some());
        let notices = vec![Notice { code: NoticeCode::NotAdopted, disk: None, detail }];
        let state = VmState { notices, ..VmState::new(self.spec.vm, Power::Running, key) };
        self.shared.states.publish(self.spec.vm, Some(state));
    }

    /// The reason and the remedy, as text.
    fn detail(&self) -> String {
        let (name, record) = (&self.spec.name, self.directory.record());
        let end = format!(
            "or shut its guest down (vmseal vm stop {name}) and start it again. Do not remove its record"
        );
        match &self.why {
            Why::Record(why) => format!(
                "VM '{name}' is left running, and this agent cannot manage it: its record {} {why}. Restart the agent in the version that started the VM, {end}",
                record.display()
            ),
            Why::Processes(_, why) => format!(
                "VM '{name}' is left running, and this agent cannot manage it: its processes (record {}) cannot be connected to: {why}. The agent tries again every {} s. Run the agent in the version that started the VM, {end}",
                record.display(),
                INTERVAL.as_secs()
            ),
        }
    }

    /// Answers calls until the VM ends, then becomes its owner.
    pub async fn run(mut self, mut calls: mpsc::Receiver<Request>) {
        tracing::error!(vm = %self.spec.vm, detail = self.detail(), "a VM is left running");
        let end = self.until_end(&mut calls).await;
        let owner = match end {
            End::Agent => return,
            End::Connected(running) => {
                tracing::info!(vm = %self.spec.vm, "adopted a VM that was left running");
                Owner::new(self.shared, self.spec, Initial::Alive(running))
            }
            End::Off(reason, detail) => {
                let stopped = self.clear_away(reason, detail).await;
                Owner::new(self.shared, self.spec, Initial::Stopped(stopped))
            }
        };
        let owner = owner.with_key(self.kek);
        owner.publish();
        owner.run(calls).await;
    }

    async fn until_end(&mut self, calls: &mut mpsc::Receiver<Request>) -> End {
        let mut care = tokio::time::interval(INTERVAL);
        care.set_missed_tick_behavior(MissedTickBehavior::Delay);
        // The first tick comes at once, and the agent has just tried.
        care.tick().await;
        loop {
            let ended = tokio::select! {
                call = calls.recv() => match call {
                    None => return End::Agent,
                    Some((request, call)) => {
                        let ended = request_id::during(request, self.answer(call)).await;
                        self.publish();
                        ended
                    }
                },
                () = ended(self.qemu.as_ref()) => Some(self.ended_by_itself()),
                reconnected = reconnected(&mut self.reconnecting) => {
                    let ended = self.reconnected(reconnected);
                    self.publish();
                    ended
                }
                _ = care.tick() => self.look_after(),
            };
            if let Some(end) = ended {
                return end;
            }
        }
    }

    /// Answers a call; returns an end if an operator forced one.
    async fn answer(&mut self, call: Call) -> Option<End> {
        // The caller may have gone.
        match call {
            Call::Register(spec, to) => drop(to.send(self.register(spec))),
            Call::Unregister(to) => {
                drop(to.send(self.situation().may(Action::Unregister, None).map(drop)));
            }
            Call::OfferKey(key, to) => drop(to.send(self.offer_key(&key))),
            // It runs.
            Call::PowerOn(_, _, to) => drop(to.send(Ok(()))),
            Call::PowerOff(PowerOff::Shutdown { .. }, to) => {
                drop(to.send(self.ask_to_shut_down().await));
            }
            Call::PowerOff(PowerOff::Force, to) => {
                let result = self.force_off().await;
                let done = result.is_ok();
                let _ = to.send(result);
                return done.then(|| {
                    End::Off(StopReason::PoweredOff, "an operator forced it off".to_owned())
                });
            }
            Call::PowerOff(PowerOff::CancelStart, to) => {
                drop(to.send(Err(rules::has_started(&self.spec))));
            }
            Call::ChangeKeys(_, _, to) => drop(to.send(Err(self.refusal()))),
            Call::DeleteDisk(_, to)
            | Call::ExamineJob(_, to)
            | Call::ExamineChange(_, to)
            | Call::PutJob(_, _, _, to)
            | Call::SetPace(_, _, to)
            | Call::CommitJob(_, _, to)
            | Call::CancelJob(_, _, to) => drop(to.send(Err(self.refusal()))),
            Call::ControlGuest(_, to) | Call::GrowDisk(_, _, to) => {
                drop(to.send(Err(self.refusal())));
            }
            Call::Job(_, to) => drop(to.send(Err(self.refusal()))),
            Call::Console(_, to) | Call::Expose(_, _, to) | Call::Screen(to) => {
                drop(to.send(Err(self.refusal())))
            }
            Call::Suspend(_, to) | Call::DiscardMemory(to) => drop(to.send(Err(self.refusal()))),
            Call::DiscardDump(_, to) => drop(to.send(Err(self.refusal()))),
            Call::Guest(to) => drop(to.send(Err(self.refusal()))),
            Call::Lend(_, to) => drop(to.send(Err(self.refusal()))),
            Call::Bitmaps(_, _, to) => drop(to.send(Err(self.refusal()))),
            Call::Replica(_, to) => drop(to.send(Err(self.refusal()))),
        }
        None
    }

    fn situation(&self) -> Situation<'_> {
        let (power, changing_keys, disks) = (Power::Running, false, Vec::new());
        Situation { spec: &self.spec, power, changing_keys, disks, unused: Vec::new() }
    }

    fn refusal(&self) -> Problem {
        Problem::new(ErrorCode::WrongState, self.detail())
    }

    /// Takes the specification from the server, which an unreadable record does not give.
    fn register(&mut self, spec: VmSpec) -> Result<(), Problem> {
        // What is not on record is told again, and changes nothing that runs.
        let about = spec.about.clone();
        let known = VmSpec { images: spec.images, about, ..self.spec.clone() };
        if matches!(self.why, Why::Processes(..)) && known != spec {
            self.situation().may(Action::Register, None)?;
        }
        if self.spec.key != spec.key {
            self.kek = None;
        }
        self.spec = spec;
        Ok(())
    }

    /// Keeps the key for the owner that this becomes.
    fn offer_key(&mut self, offered: &SealedKey) -> Result<(), Problem> {
        let Some(reference) = &self.spec.key else {
            return Err(rules::wrong_state(&self.spec, "has no key"));
        };
        let opened = self.shared.key_box.open(self.spec.vm, reference, offered);
        if opened.is_ok() { &metrics::KEYS_TAKEN } else { &metrics::KEYS_REFUSED }.add();
        self.kek = Some(opened?);
        Ok(())
    }

    /// Presses the power button (ACPI): QEMU's monitor is the same in all versions.
    async fn ask_to_shut_down(&mut self) -> Result<(), Problem> {
        let socket = self.directory.socket(qemu::MONITOR);
        let press = async {
            let (monitor, _events) = Qmp::connect(&socket).await?;
            monitor.execute("system_powerdown", Value::Null).await.map(drop)
        };
        let pressed = timeout(BUTTON_TIMEOUT, press).await;
        let why = match pressed {
            Ok(Ok(())) => {
                self.asked_to_shut_down = true;
                return Ok(());
            }
            Ok(Err(error)) => error.to_string(),
            Err(_) => format!("no answer within {} s", BUTTON_TIMEOUT.as_secs()),
        };
        let what = format!(
            "cannot be asked to shut down: {why}. Shut it down from inside the guest, or force it off (vmseal vm stop {} --force)",
            self.spec.name
        );
        Err(rules::wrong_state(&self.spec, &what))
    }

    async fn force_off(&self) -> Result<(), Problem> {
        let Some(qemu) = &self.qemu else {
            let what = "cannot be forced off: the process of its QEMU cannot be determined";
            return Err(rules::wrong_state(&self.spec, what));
        };
        qemu.kill();
        qemu.ended().await;
        Ok(())
    }

    fn ended_by_itself(&self) -> End {
        let name = &self.spec.name;
        if self.asked_to_shut_down {
            let detail = "its guest shut down, as it was asked to".to_owned();
            return End::Off(StopReason::GuestShutdown, detail);
        }
        let detail = format!(
            "VM '{name}' stopped while this agent could not manage it: its guest may have shut down, or QEMU died. If it should run, start it again (vmseal vm start {name})"
        );
        End::Off(StopReason::FoundDead, detail)
    }

    /// Looks for its QEMU where that is unknown, and begins to connect to it again where that can help.
    fn look_after(&mut self) -> Option<End> {
        if self.qemu.is_none() {
            match Process::adopt(&self.directory.process(qemu::NAME)) {
                Ok(None) => return Some(self.ended_by_itself()),
                Ok(found) => self.qemu = found,
                Err(_) => {}
            }
        }
        if let (Why::Processes(record, _), None, Some(slot)) =
            (&self.why, &self.reconnecting, &self.slot)
        {
            let (directory, record, slot) = (self.directory.clone(), record.clone(), slot.clone());
            let work = async move { reconnect::reconnect(&directory, &record, slot).await };
            self.reconnecting = Some(tokio::spawn(work));
        }
        None
    }

    fn reconnected(&mut self, result: Reconnected) -> Option<End> {
        self.reconnecting = None;
        match result {
            Reconnected::Alive(running) => return Some(End::Connected(running)),
            Reconnected::Silent(_, problem) => {
                if let Why::Processes(_, why) = &mut self.why {
                    *why = problem;
                }
            }
            // Its QEMU has ended, which is noticed elsewhere, or its guest has never run: then an operator
            // must force it off.
            Reconnected::Dead(why) => tracing::info!(vm = %self.spec.vm, why, "cannot be adopted"),
        }
        None
    }

    /// Ends what is left of it and records the death.
    async fn clear_away(&mut self, reason: StopReason, detail: String) -> Stopped {
        if let Some(reconnecting) = self.reconnecting.take() {
            reconnecting.abort();
            let _ = reconnecting.await;
        }
        let vm = self.spec.vm;
        tracing::warn!(%vm, ?reason, detail, "a VM that was left running is off");
        metrics::vm_ended(reason);
        let stopped = Stopped { at: Timestamp::now(), reason, detail };
        if reason.is_death()
            && let Err(error) = self.shared.died.record(&self.spec, &stopped)
        {
            tracing::warn!(%vm, %error, "cannot record the death of a VM");
        }
        if let Err(error) = reconnect::clear_away(&self.directory).await {
            tracing::warn!(%vm, %error, "cannot remove the run directory of a VM");
        }
        stopped
    }
}

/// A placeholder for the specification of a VM whose record cannot be read, until the server registers it.
pub fn unknown_spec(vm: VmId) -> VmSpec {
    VmSpec {
        vm,
        name: vm.to_string(),
        vcpus: 1,
        memory: 0,
        policy: None,
        key: None,
        hardware: Default::default(),
        devices: Vec::new(),
        snapshots: Vec::new(),
        images: None,
        about: None,
    }
}

async fn ended(qemu: Option<&Process>) {
    match qemu {
        Some(qemu) => drop(qemu.ended().await),
        None => std::future::pending().await,
    }
}

async fn reconnected(reconnecting: &mut Option<JoinHandle<Reconnected>>) -> Reconnected {
    match reconnecting {
        Some(task) => match task.await {
            Ok(result) => result,
            Err(error) => Reconnected::Silent(None, internal(error)),
        },
        None => std::future::pending().await,
    }
}
