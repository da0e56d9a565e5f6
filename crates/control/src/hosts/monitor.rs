//! One host's monitor: keeps the host's VMs registered and their keys delivered, and follows its state.
//!
//! ```text
//!              describe fails, or no common contract
//!             ┌──────────────┐
//!             ▼              │
//!      ┌─► Connecting ───────┘
//!      │      │ describe: a run of the agent, and its key box
//!      │      ▼
//!      │   Settling      read the state, register the VMs, deliver the keys that come at once
//!      │      │ done: the host is connected from here on
//!      │      ▼
//!      └── Watching ◄─┐  long poll; publish a new state, its events and alarms
//!  no answer,   │     │
//!  or a new     └─────┘  a provider was unlocked, or a retry is due: deliver the keys that could not
//!  run                   be delivered
//! ```
//!
//! The monitor handles complete VMs. A VM that a task creates or removes is the task's. Keys are delivered
//! concurrently: a KMS that hangs does not block the monitor.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::time::{Duration, Instant};

use jiff::Timestamp;
use tokio::sync::{Notify, watch};
use vmseal_api::host::version::CONTRACT;
use vmseal_api::host::{
    HostAgent, HostDescription, HostState, KeyState, Power, STATE_WAIT_MAX, Stopped, VmState,
};
use vmseal_api::id::{HostId, VmId};
use vmseal_api::key_fault::KeyFault;
use vmseal_api::model::{Connection, Lifecycle};
use vmseal_api::problem::Problem;
use vmseal_api::request_id::{self, RequestId};

use super::alarms;
use super::card_links::CardLinks;
use super::earlier_agents::for_agent;
use super::evacuated;
use super::key_delivery::{Delivery, KeyDeliveries};
use super::keys::Purpose;
use super::left;
use super::panics;
use super::pool_keys;
use super::{HostView, is_silence, registration, restored};
use crate::locks::Locks;
use crate::operation::Operation;
use crate::providers::Providers;
use crate::setup::expiry;
use crate::store::changes::Kinds;
use crate::store::evacuations;
use crate::store::events::NewEvent;
use crate::store::hosts::Host;
use crate::store::vms::Vm;
use crate::store::{self, Store, StoreError, Write};

/// The pause before a host that does not answer is asked again, at first and at most: an agent that restarts is
/// noticed at once, and one that stays away costs little.
const RECONNECT: (Duration, Duration) = (Duration::from_millis(250), Duration::from_secs(5));

/// The pause before a VM is compared with its descriptors again that may know more: a datastore that did not answer does, or an operator
/// has looked at it. What the server itself changes is seen at once.
const COMPARE_AGAIN: Duration = Duration::from_secs(30);

/// A monitor's state.
enum Phase {
    /// The host does not answer; the number of failures in a row.
    Connecting { failures: u32 },
    /// It answers: this run of its agent must get its VMs and keys.
    Settling(Box<HostDescription>),
    /// It has them, and its state is followed.
    Watching(Box<HostDescription>, Box<HostState>),
}

pub(super) struct Monitor {
    id: HostId,
    name: String,
    store: Arc<Store>,
    providers: Arc<Providers>,
    agent: Arc<dyn HostAgent>,
    locks: Arc<Locks<VmId>>,
    view: watch::Sender<HostView>,
    /// Delivers keys in this run of the agent.
    deliveries: KeyDeliveries,
    /// VMs of which their descriptors know more than the inventory, which was restored from a backup, or may do, as one cannot be
    /// looked at; why, and when the host was asked.
    older: HashMap<VmId, (Problem, Instant)>,
    /// Has guests that run get the links of their network cards that were set while the host was away.
    links: CardLinks,
    /// Rung when the inventory's VMs of the host have changed.
    wake: Arc<Notify>,
}

impl Monitor {
    pub(super) fn new(
        host: &Host,
        store: Arc<Store>,
        providers: Arc<Providers>,
        agent: Arc<dyn HostAgent>,
        locks: Arc<Locks<VmId>>,
        view: watch::Sender<HostView>,
        wake: Arc<Notify>,
    ) -> Self {
        let (id, name) = (host.id, host.name.clone());
        let deliveries = KeyDeliveries::default();
        let (older, links) = (HashMap::new(), CardLinks::default());
        Self { id, name, store, providers, agent, locks, view, deliveries, older, links, wake }
    }

    /// Runs until it is dropped.
    pub(super) async fn run(mut self) {
        let mut unlocks = self.providers.unlocks();
        let mut phase = Phase::Connecting { failures: 0 };
        loop {
            phase = match phase {
                Phase::Connecting { failures } => self.connect(failures).await,
                Phase::Settling(description) => self.settle(description).await,
                Phase::Watching(description, state) => {
                    self.watch(description, state, &mut unlocks).await
                }
            };
        }
    }

    async fn connect(&mut self, failures: u32) -> Phase {
        let problem = match self.agent.describe().await {
            Ok(description) => {
                let agent =
                    format!("the agent of host '{}' (vmseal {})", self.name, description.vmseal);
                match CONTRACT.agree(description.contract, &agent) {
                    Ok(version) => {
                        tracing::debug!(host = self.name, version, "the contract with its agent");
                        return Phase::Settling(Box::new(description));
                    }
                    Err(problem) => problem,
                }
            }
            Err(problem) => problem,
        };
        self.lost(&problem).await;
        let pause = RECONNECT.0.saturating_mul(1 << failures.min(10)).min(RECONNECT.1);
        tokio::time::sleep(pause).await;
        Phase::Connecting { failures: failures.saturating_add(1) }
    }

    /// Publishes that the host does not answer.
    async fn lost(&mut self, why: &Problem) {
        let lost = self.view.send_if_modified(|view| {
            let changed = view.connection == Connection::Connected;
            view.connection = Connection::Disconnected;
            if changed {
                view.silent_since = Some(Instant::now());
            }
            changed
        });
        if lost {
            self.store.note_change(Kinds::OF_HOST);
        }
        let alarm = alarms::disconnected(&self.name, why);
        let told = async {
            let mut write = self.store.write().await?;
            store::alarms::raise(&mut write, &self.id.to_string(), &alarm).await?;
            write.commit().await
        };
        self.note(told.await);
    }

    /// Logs a failure of the inventory: the monitor cannot repair it, and the host runs on.
    fn note(&self, outcome: Result<(), StoreError>) {
        if let Err(error) = outcome {
            tracing::error!(host = self.name, %error, "the inventory could not be written");
        }
    }

    async fn settle(&mut self, description: Box<HostDescription>) -> Phase {
        self.deliveries = KeyDeliveries::default();
        // All are compared again: this run may see a datastore that the earlier one did not.
        self.older.clear();
        self.links = CardLinks::default();
        let settled = async {
            let state = self.agent.state_now().await?;
            if state.incarnation != description.incarnation {
                return Ok(None);
            }
            // Before VMs: their disks may be on these pools.
            let data_dir = self.providers.data_dir();
            let here = (self.id, &*description);
            pool_keys::give_all(&self.store, data_dir, &*self.agent, here).await?;
            self.supply(&description, &state).await?;
            self.deliveries.settle().await?;
            // Read again, now that the VMs are registered.
            let state = self.agent.state_now().await?;
            Ok((state.incarnation == description.incarnation).then_some(state))
        };
        match settled.await {
            Ok(Some(state)) => {
                let noted = async {
                    let mut write = self.store.write().await?;
                    if self.has_rebooted(&mut write, &description).await? {
                        store::vms::set_starts_due(&mut write, self.id).await?;
                    }
                    store::hosts::set_description(&mut write, self.id, &description).await?;
                    write.commit().await
                };
                self.note(noted.await);
                self.show(&description, &state).await;
                Phase::Watching(description, Box::new(state))
            }
            // The agent restarted meanwhile.
            Ok(None) => Phase::Connecting { failures: 0 },
            Err(problem) => self.failed(problem).await,
        }
    }

    /// Whether the machine has rebooted since it was described last, as far as both descriptions tell.
    async fn has_rebooted(
        &self,
        write: &mut Write<'_>,
        description: &HostDescription,
    ) -> Result<bool, StoreError> {
        let known = store::hosts::find(write, &self.id.to_string()).await?;
        let before = known.and_then(|host| host.description).and_then(|it| it.boot);
        Ok(before.is_some() && description.boot.is_some() && before != description.boot)
    }

    async fn failed(&mut self, problem: Problem) -> Phase {
        self.lost(&problem).await;
        tokio::time::sleep(RECONNECT.0).await;
        Phase::Connecting { failures: 1 }
    }

    async fn watch(
        &mut self,
        description: Box<HostDescription>,
        state: Box<HostState>,
        unlocks: &mut watch::Receiver<u64>,
    ) -> Phase {
        let news = tokio::select! {
            news = self.agent.state_after(Some(&state), STATE_WAIT_MAX) => news,
            Ok(()) = unlocks.changed() => {
                self.deliveries.try_all_again();
                Ok(*state)
            }
            () = self.wake.notified() => Ok(*state),
            // A delivery succeeded or failed, or a retry is due.
            brought = self.deliveries.next() => match brought {
                Ok(()) => self.agent.state_now().await,
                Err(problem) => Err(problem),
            },
        };
        let supplied = match news {
            Ok(state) if state.incarnation != description.incarnation => {
                return Phase::Connecting { failures: 0 };
            }
            Ok(state) => match self.supply(&description, &state).await {
                Ok(()) => self.settled(&state).await.map(|now| (state, now)),
                Err(problem) => Err(problem),
            },
            Err(problem) => Err(problem),
        };
        match supplied {
            Ok((_, now)) if now.incarnation != description.incarnation => {
                Phase::Connecting { failures: 0 }
            }
            Ok((supplied, now)) => {
                self.show(&description, &now).await;
                // What has changed since comes next.
                Phase::Watching(description, Box::new(supplied))
            }
            Err(problem) => self.failed(problem).await,
        }
    }

    /// A host's state once it has the keys that come at once. As it was before, a VM would be shown as locked that is not, as when a
    /// task gives it another key.
    async fn settled(&mut self, state: &HostState) -> Result<HostState, Problem> {
        if self.deliveries.are_done() {
            return Ok(state.clone());
        }
        self.deliveries.settle().await?;
        self.agent.state_now().await
    }

    /// Registers the VMs that the host does not know, starts the delivery of keys that it lacks, has guests get the links that their cards
    /// are to have, and unregisters VMs that the inventory does not have. Fails only if the host does not answer.
    async fn supply(
        &mut self,
        description: &HostDescription,
        state: &HostState,
    ) -> Result<(), Problem> {
        let vms = store::vms::on_host(&mut *self.store.read().await?, self.id).await?;
        self.compare(description).await?;
        let seen = |vm: VmId| state.vms.iter().find(|seen| seen.vm == vm);
        for vm in vms.iter().filter(|vm| vm.lifecycle == Lifecycle::Ready) {
            if seen(vm.id).is_some_and(|seen| {
                seen.power == Power::Off && seen.key == KeyState::Held && self.is_revoked(vm)
            }) {
                self.lock_up(vm.id, description).await?;
            }
        }
        let lacking: HashSet<_> = vms
            .iter()
            .filter(|vm| vm.lifecycle == Lifecycle::Ready)
            .filter(|vm| seen(vm.id).is_none_or(|seen| seen.key == KeyState::Missing))
            .map(|vm| vm.id)
            .collect();
        self.deliveries.keep_only(&lacking);
        for vm in lacking {
            if !self.deliveries.may_begin(vm) {
                continue;
            }
            let is_off = seen(vm).is_none_or(|seen| seen.power == Power::Off);
            let registered = match self.older.get(&vm).filter(|_| is_off) {
                // It was asked just now.
                Some((problem, _)) => Err(problem.clone()),
                None => self.register(vm, seen(vm), description).await,
            };
            match registered {
                Ok(true) => self.deliveries.begin(Delivery {
                    vm,
                    // A running VM runs on, whatever the state of its key.
                    purpose: match seen(vm).map(|seen| seen.power) {
                        None | Some(Power::Off) => Purpose::Encrypt,
                        Some(_) => Purpose::Open,
                    },
                    key_box: description.key_box.clone(),
                    store: Arc::clone(&self.store),
                    providers: Arc::clone(&self.providers),
                    agent: Arc::clone(&self.agent),
                    locks: Arc::clone(&self.locks),
                }),
                Ok(false) => {}
                Err(problem) if is_silence(&problem) => return Err(problem),
                Err(problem) => self.deliveries.failed(vm, problem),
            }
        }
        let (store, agent) = (&self.store, &*self.agent);
        let here = (self.id, description);
        self.links.set(store, agent, &self.locks, here, state).await?;
        // Read after the state: what is in it and was forgotten since has no row any more.
        let taken_away = evacuations::of_host(&mut *self.store.read().await?, self.id).await?;
        for seen in &state.vms {
            let is_here = vms.iter().any(|vm| vm.id == seen.vm);
            if !is_here && taken_away.contains(&seen.vm) {
                let (store, agent) = (&self.store, &*self.agent);
                evacuated::end(store, agent, &self.locks, (&*self.name, self.id, seen)).await?;
            } else if left::may_be(seen, is_here) {
                let (store, agent) = (&self.store, &*self.agent);
                left::deal_with(store, agent, &self.locks, (self.id, seen)).await?;
            }
        }
        let gone = taken_away.into_iter().filter(|vm| seen(*vm).is_none()).collect();
        Ok(evacuated::forget(&self.store, (&*self.name, self.id), gone).await?)
    }

    /// Compares VMs of an inventory that was restored with their descriptors: all that are uncertain when the agent has been reached, and
    /// then those that were not compared yet, and from time to time those of which more is there. Fails only if the host does not answer.
    async fn compare(&mut self, description: &HostDescription) -> Result<(), Problem> {
        let uncertain = restored::uncertain_on(&mut *self.store.read().await?, self.id).await?;
        let settled = self.older.keys().copied().filter(|vm| !uncertain.contains(vm));
        for vm in settled.collect::<Vec<_>>() {
            self.set_settled(vm);
        }
        let mut surveys = restored::Surveys::default();
        for id in uncertain {
            if self.older.get(&id).is_some_and(|(_, at)| at.elapsed() < COMPARE_AGAIN) {
                continue;
            }
            let _unchanged = self.locks.lock(id).await;
            let Some((vm, spec)) = registration::read(&self.store, id).await? else { continue };
            if vm.host != self.id {
                continue;
            }
            let (known, agent) = ((&vm, &spec), &*self.agent);
            let description = Some(description);
            let compared =
                restored::settle_with(&self.store, agent, description, known, &mut surveys).await;
            match compared {
                Ok(_) => self.set_settled(id),
                Err(problem) if is_silence(&problem) => return Err(problem),
                Err(problem) => {
                    if self.older.get(&id).is_none_or(|(known, _)| *known != problem) {
                        tracing::warn!(vm = vm.name, %problem, "its host is not told of it");
                    }
                    self.older.insert(id, (problem, Instant::now()));
                }
            }
        }
        Ok(())
    }

    /// Nothing of a VM is newer any more: its host may be told of it now, however long ago that was refused.
    fn set_settled(&mut self, vm: VmId) {
        self.older.remove(&vm);
        self.deliveries.try_again(vm);
        self.links.try_again(vm);
    }

    /// Registers a VM; false if a task has begun to remove it since, or another host has it since.
    async fn register(
        &self,
        vm: VmId,
        seen: Option<&VmState>,
        description: &HostDescription,
    ) -> Result<bool, Problem> {
        let _unchanged = self.locks.lock(vm).await;
        let Some((vm, spec)) = registration::read(&self.store, vm).await? else { return Ok(false) };
        if vm.lifecycle != Lifecycle::Ready || vm.host != self.id {
            return Ok(false);
        }
        // The agent has adopted a running VM with its whole definition.
        if seen.is_none_or(|seen| seen.power == Power::Off) {
            let known = (&vm, &spec);
            restored::settle(&self.store, &*self.agent, Some(description), known).await?;
            self.agent.register_vm(for_agent(spec, Some(description))).await?;
        }
        Ok(true)
    }

    /// Whether a VM's key must encrypt nothing new.
    fn is_revoked(&self, vm: &Vm) -> bool {
        let reason = self.fault_of_key(vm).and_then(|fault| fault.reason);
        matches!(reason, Some(KeyFault::KeyDeactivated | KeyFault::KeyCompromised))
    }

    fn fault_of_key(&self, vm: &Vm) -> Option<Problem> {
        let key = vm.key.as_ref()?;
        self.providers.get(key.provider).ok()?.known_fault_of(&key.key_id)
    }

    /// Why providers no longer have keys that this host still holds.
    fn last_copies(&self, vms: &[Vm], state: &HostState) -> HashMap<VmId, Problem> {
        let held =
            |vm: VmId| state.vms.iter().any(|seen| seen.vm == vm && seen.key == KeyState::Held);
        let lost = |fault: &Problem| {
            matches!(fault.reason, Some(KeyFault::KeyDestroyed | KeyFault::KeyMissing))
        };
        vms.iter()
            .filter(|vm| held(vm.id))
            .filter_map(|vm| Some((vm.id, self.fault_of_key(vm).filter(lost)?)))
            .collect()
    }

    /// Removes from the host the key of a VM that is off and may not be started with it; a task that replaces the
    /// key keeps it meanwhile.
    async fn lock_up(&self, vm: VmId, description: &HostDescription) -> Result<(), Problem> {
        let _unchanged = self.locks.lock(vm).await;
        let mut read = self.store.read().await?;
        let working = store::tasks::holding(&mut read, vm).await?;
        drop(read);
        let leads_away = |operation: &Operation| {
            matches!(
                operation,
                Operation::RecryptVm { .. }
                    | Operation::DecryptVm { .. }
                    | Operation::ExportDisk { .. }
            )
        };
        if working.is_some_and(|task| leads_away(&task.operation)) {
            return Ok(());
        }
        let Some((vm, spec)) = registration::read(&self.store, vm).await? else { return Ok(()) };
        if vm.lifecycle != Lifecycle::Ready || vm.host != self.id {
            return Ok(());
        }
        let again = async {
            let known = (&vm, &spec);
            restored::settle(&self.store, &*self.agent, Some(description), known).await?;
            self.agent.unregister_vm(vm.id).await?;
            let spec = for_agent(spec, Some(description));
            self.agent.register_vm(spec).await
        };
        match again.await {
            Err(problem) if is_silence(&problem) => Err(problem),
            // It has been started since, or a disk is in use: checked again later.
            Err(problem) => {
                tracing::warn!(vm = vm.name, %problem, "it keeps a key that encrypts nothing new");
                Ok(())
            }
            Ok(()) => Ok(()),
        }
    }

    /// Publishes the host's state, and writes events about its changes.
    async fn show(&self, description: &HostDescription, state: &HostState) {
        let told = self.tell(description, state).await;
        self.note(told);
        self.tell_panics(state).await;
        let before = self.view.send_replace(HostView {
            connection: Connection::Connected,
            description: Some(Arc::new(description.clone())),
            state: Some(Arc::new(state.clone())),
            silent_since: None,
        });
        if before.connection == Connection::Disconnected
            || before.state.as_deref().map(HostState::known) != Some(state.known())
        {
            self.store.note_change(Kinds::OF_HOST);
        }
    }

    /// Tells of the panics of guests.
    async fn tell_panics(&self, state: &HostState) {
        for seen in state.vms.iter().filter(|seen| panics::has_any(seen)) {
            let _unchanged = match panics::is_told(&self.store, seen).await {
                Ok(true) => continue,
                Ok(false) => self.locks.lock(seen.vm).await,
                Err(error) => {
                    self.note(Err(error));
                    continue;
                }
            };
            // Asked again: a core dump may have been deleted since.
            let Ok(state) = self.agent.state_now().await else { return };
            if let Some(seen) = state.vms.iter().find(|now| now.vm == seen.vm) {
                self.note(panics::tell(&self.store, seen).await);
            }
        }
    }

    async fn tell(
        &self,
        description: &HostDescription,
        state: &HostState,
    ) -> Result<(), StoreError> {
        let source = self.id.to_string();
        let mut read = self.store.read().await?;
        let vms = store::vms::on_host(&mut read, self.id).await?;
        let about_disks = |vm: &VmState| vm.notices.iter().any(|notice| notice.disk.is_some());
        let disks = match state.vms.iter().any(about_disks) {
            true => store::disks::names_on_host(&mut read, self.id).await?,
            false => HashMap::new(),
        };
        let problems = self.deliveries.problems();
        let mut raised = alarms::of_host(&self.name, description, state, &vms, &disks, &problems);
        let certificate = self.agent.certificate();
        let lost = self.last_copies(&vms, state);
        raised.extend(alarms::last_copies(&self.name, description, &vms, &lost));
        let older = |vm: &Vm| Some(alarms::older(vm, &self.older.get(&vm.id)?.0));
        raised.extend(vms.iter().filter_map(older));
        raised.extend(expiry::of_host(&self.name, certificate.as_deref(), Timestamp::now()));
        let new_alarms = store::alarms::differ(&mut read, &source, &raised).await?;
        drop(read);
        let changed: Vec<_> = vms
            .iter()
            .filter_map(|vm| Some((vm, state.vms.iter().find(|seen| seen.vm == vm.id)?)))
            .filter(|(vm, seen)| {
                vm.seen_power != Some(seen.power) || vm.seen_stopped != seen.stopped
            })
            .collect();
        if changed.is_empty() && !new_alarms {
            return Ok(());
        }
        let mut write = self.store.write().await?;
        for (vm, seen) in changed {
            let request = RequestId::sent(seen.request_id.as_deref().map(str::as_bytes));
            request_id::during(request, tell_power(&mut write, vm, seen)).await?;
            let stopped = seen.stopped.as_ref();
            store::vms::set_seen(&mut write, vm.id, seen.power, stopped).await?;
        }
        store::alarms::replace(&mut write, &source, &raised).await?;
        write.commit().await
    }
}

async fn tell_power(write: &mut Write<'_>, vm: &Vm, seen: &VmState) -> Result<(), StoreError> {
    let (actor, target) = (crate::SELF, vm.name.as_str());
    if let Some(Stopped { detail, .. }) = &seen.stopped
        && vm.seen_stopped != seen.stopped
    {
        write.event(NewEvent { kind: "vm.stopped", actor, target, detail }).await?;
    }
    // A guest that goes on after a pause has not been started.
    let ran = matches!(vm.seen_power, Some(Power::Running | Power::Paused));
    if seen.power == Power::Running && !ran {
        let detail = format!("on host '{}'", vm.host_name);
        write.event(NewEvent { kind: "vm.started", actor, target, detail: &detail }).await?;
    }
    Ok(())
}
