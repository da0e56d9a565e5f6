//! The panics of a VM's guest, as its owner handles them: [`crate::process::panics`] says what is done when.

use std::time::Duration;

use jiff::Timestamp;
use tokio::time::Instant;
use vmseal_api::dump::{Panic, PanicDump};
use vmseal_api::host::{Notice, StopReason, VmSpec};
use vmseal_api::id::DumpId;
use vmseal_api::problem::Problem;

use super::{Owner, State};
use crate::hypervisor::qmp::Event;
use crate::process::panics::{Outcome, outcome};
use crate::rules;
use crate::storage::core_file::{of_panics, sweep_panics};
use crate::timed;
use crate::vm::panicking::{self, ToDump};
use crate::vm::running::Running;

/// How long a guest that has panicked stands still for a key that is not on the host, for its core dump: an agent that starts gets
/// its keys within seconds.
const KEY_WAIT: Duration = Duration::from_secs(60);

/// What is known of the panics of a VM, also while it is off.
#[derive(Default)]
pub struct Known {
    /// The last ones after which the guest was restarted or left as it is.
    pub past: Vec<Panic>,
    /// The core dumps that the host has written by itself.
    pub dumps: Vec<PanicDump>,
    /// When the wait for what a core dump needs ends.
    wait_until: Option<Instant>,
}

impl Owner {
    /// An earlier agent may have left half of a core dump, or a guest that has panicked.
    pub(super) async fn find_panics(&mut self) {
        // Beside the disks of a guest that is handed over, what is half may be of the host that has it.
        if !self.is_handed_over() {
            self.sweep_panic_dumps().await;
        }
        self.list_panic_dumps().await;
        let found = self.running().map(|running| (running.live.panics.clone(), running.panicked));
        let Some((panics, panicked)) = found else { return };
        self.panics.past = panics.past;
        if panicked {
            self.guest_panicked().await;
        }
    }

    /// The guest has panicked, and stands still.
    pub(super) async fn guest_panicked(&mut self) {
        let spec = self.spec.clone();
        let Some(running) = self.running() else { return };
        running.panicked = true;
        // An agent that starts has not got QEMU's event.
        running.qemu_end.note(Event::GuestPanicked { stays: true });
        let now = running.live.panics.begin(Timestamp::now());
        if now.kept {
            return;
        }
        // It may have panicked in the instant before it was paused: then what is done about that is done.
        running.live.paused = false;
        running.live.queues_known = false;
        note(running, &spec);
        tracing::error!(vm = %spec.vm, on_crash = spec.hardware.on_crash.name(), "the guest panicked");
        self.panicked_while_saved().await;
        self.panicked_while_sent().await;
        match spec.hardware.on_crash.dumps() {
            true => self.dump_panic(now.dump),
            false => self.after_panic(None).await,
        }
    }

    /// Begins to write its core dump, or waits for what that needs.
    fn dump_panic(&mut self, dump: DumpId) {
        let needs_key = self.spec.key.is_some() && self.kek.is_none();
        if needs_key || self.changing_keys.is_some() {
            self.panics.wait_until.get_or_insert_with(|| Instant::now() + KEY_WAIT);
            return;
        }
        self.panics.wait_until = None;
        let (spec, kek) = (self.spec.clone(), self.clone_kek().ok().flatten());
        if let Some(running) = self.running() {
            let qmp = running.qmp.clone();
            running.dumping = Some(panicking::begin(ToDump { spec, kek, qmp, dump }));
        }
    }

    /// Goes on with a core dump that waits for a key, or gives it up.
    pub(super) async fn dump_waiting_panic(&mut self) {
        let Some(until) = self.panics.wait_until else { return };
        let dump = self.running().and_then(|it| it.live.panics.now.as_ref().map(|now| now.dump));
        match dump {
            None => self.panics.wait_until = None,
            Some(_) if Instant::now() >= until => {
                let why = format!(
                    "no core dump was written, as the VM's key did not come within {} s",
                    KEY_WAIT.as_secs()
                );
                self.after_panic(Some(&why)).await;
            }
            Some(dump) => self.dump_panic(dump),
        }
    }

    /// The core dump is written, or is not.
    pub(super) async fn panic_dumped(&mut self, dumped: String) {
        self.list_panic_dumps().await;
        self.after_panic(Some(&dumped)).await;
    }

    /// Restarts the guest, stops its VM, or leaves it as it is.
    async fn after_panic(&mut self, dumped: Option<&str>) {
        self.panics.wait_until = None;
        let stopping = matches!(self.state, State::Stopping { .. });
        let (spec, on_crash) = (self.spec.clone(), self.spec.hardware.on_crash);
        let Some(running) = self.running() else { return };
        let panics = &mut running.live.panics;
        let failure = match outcome(on_crash, stopping, panics.may_restart(Timestamp::now())) {
            Outcome::Off => None,
            Outcome::Keep => {
                panics.done(false, dumped);
                running.live.paused = true;
                // QEMU has stopped it by itself when it panicked.
                let silent = match running.witness() {
                    Ok(filter) => filter.silent(&spec, &running.live).await.is_some(),
                    Err(_) => true,
                };
                running.live.queues_known = !silent && !running.begun_still;
                note(running, &spec);
                self.panics.past = self.past_panics();
                return;
            }
            Outcome::Restart => match restart(running, &spec, dumped).await {
                Ok(()) => {
                    self.panics.past = self.past_panics();
                    // Where its filter has ended since it panicked: the next one begins when the guest runs.
                    self.serve_again();
                    return;
                }
                Err(why) => Some(why),
            },
        };
        let mut why = running.live.panics.why_off(&spec.name, on_crash, dumped);
        if let Some(failure) = failure {
            why = format!("{why}, and could not be restarted: {failure}");
        }
        self.request = None;
        if let Some(running) = self.take_running() {
            let (_, ended) = running.force_off_because(&why).await;
            let detail = format!("{ended}. {}", crate::vm::remedy(&spec.name));
            self.went_off((StopReason::GuestPanicked, detail)).await;
        }
    }

    fn past_panics(&mut self) -> Vec<Panic> {
        self.running().map_or_else(Vec::new, |running| running.live.panics.past.clone())
    }

    /// Refuses what would disturb a guest whose panic is being handled.
    pub(super) fn require_no_panic(&self) -> Result<(), Problem> {
        let (State::Running(running) | State::Stopping { running, .. }) = &self.state else {
            return Ok(());
        };
        match &running.live.panics.now {
            Some(now) if !now.kept => {
                let what = "has a guest that panicked, and its core dump is being written. Wait a moment, or force it off";
                Err(rules::wrong_state(&self.spec, what))
            }
            _ => Ok(()),
        }
    }

    /// What operators should know of its panics.
    pub(super) fn notice_of_panics(&self) -> Option<Notice> {
        match &self.state {
            State::Running(running) | State::Stopping { running, .. } => {
                running.live.panics.notice(&self.spec, Timestamp::now())
            }
            State::Off | State::Starting { .. } => None,
        }
    }

    /// Finds which core dumps the host has written by itself; what is known stays where a datastore does not answer.
    pub(super) async fn list_panic_dumps(&mut self) {
        if let Some(dumps) = self.with_panic_dumps(of_panics).await {
            self.panics.dumps = dumps;
        }
    }

    /// Removes what was begun: its QEMU has ended.
    pub(super) async fn sweep_panic_dumps(&mut self) {
        self.panics.wait_until = None;
        self.with_panic_dumps(sweep_panics).await;
    }

    /// Whether what another filter could not be started for has panicked: it needs none before it boots again, and a core dump that is being
    /// written is finished first.
    pub(super) fn panicked_unserved(&mut self, problem: &Problem) -> bool {
        let Some(running) = self.running().filter(|running| running.panicked) else { return false };
        running.lost_still = true;
        tracing::warn!(vm = %self.spec.vm, %problem, "a guest that panicked has no filter, and needs none now");
        true
    }

    async fn with_panic_dumps<T: Send + 'static>(
        &self,
        work: impl FnOnce(&VmSpec) -> Result<T, Problem> + Send + 'static,
    ) -> Option<T> {
        let spec = self.spec.clone();
        let path = spec.disks().next()?.datastore.location.path().to_owned();
        let worked = timed::quick_call(&path, move || work(&spec)).await;
        worked.inspect_err(|problem| tracing::debug!(%problem, "core dumps are not known")).ok()
    }
}

/// Has a guest that has panicked boot again.
///
/// # Errors
/// Why it cannot, for people.
async fn restart(running: &mut Running, spec: &VmSpec, dumped: Option<&str>) -> Result<(), String> {
    if !running.may_be_served_again().await.map_err(|error| error.to_string())? {
        return Err("its filter has ended, and its QEMU, older than 9.0, takes no other one for a guest that has stood still".to_owned());
    }
    // QEMU ends at a reset if the TPM does not start again.
    running.tpm.look_after(spec).await;
    if running.tpm.is_lost() {
        return Err("it has lost its TPM".to_owned());
    }
    // On record first: it counts, whatever happens to this agent.
    running.live.panics.done(true, dumped);
    note(running, spec);
    panicking::restart(&running.qmp).await.map_err(|error| error.to_string())?;
    running.goes_on();
    running.forget_freeze();
    note(running, spec);
    Ok(())
}

/// Puts on record what is known of a panic. Where that fails, an agent that starts handles it once more.
fn note(running: &Running, spec: &VmSpec) {
    if let Err(problem) = running.write(spec) {
        tracing::warn!(vm = %spec.vm, %problem, "a panic of the guest is not on record");
    }
}
