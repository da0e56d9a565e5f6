//! The hosts: one monitor each, their last known states, and the connections to their agents.

pub mod alarms;
mod card_links;
pub mod connector;
#[cfg(test)]
mod connector_tests;
mod copies;
mod datastores;
mod definition;
mod differing;
mod earlier_agents;
mod evacuated;
pub mod join;
mod key_delivery;
pub mod keys;
mod left;
pub(crate) mod may_fence;
mod monitor;
pub(crate) mod mounted;
pub(crate) mod osds;
mod panics;
pub(crate) mod pool_keys;
mod preparing;
mod registration;
pub mod reports;
pub(crate) mod restored;
#[cfg(test)]
mod tests;

use std::collections::{HashMap, HashSet};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use tokio::sync::{Notify, OwnedMutexGuard, watch};
use tokio::task::JoinHandle;
use vmseal_api::host::{HostAgent, HostDescription, HostState, KeyState, VmState};
use vmseal_api::id::{HostId, VmId};
use vmseal_api::model::Connection;
use vmseal_api::problem::{ErrorCode, Problem};

use self::connector::HostConnector;
use self::datastores::DatastoreMonitor;
pub use self::definition::{about, spec_of, spec_of_disk};
pub(crate) use self::differing::differing;
pub use self::earlier_agents::for_agent;
use self::keys::Purpose;
pub(crate) use self::left::undecided_switch;
use self::monitor::Monitor;
pub use self::registration::{
    definition_at, definition_with, has_devices, read as definition, register, register_locked,
    register_with, register_without_key,
};
use crate::locks::Locks;
use crate::providers::Providers;
use crate::store::hosts::Host;
use crate::store::vms::Vm;
use crate::store::{Part, Store, StoreError, hosts};

/// The timeout of [`Hosts::until_shown`]; a monitor's round takes milliseconds.
const SHOWN_TIMEOUT: Duration = Duration::from_secs(3);

/// The current view of a host.
#[derive(Clone, Debug)]
pub struct HostView {
    /// Whether it answers and its VMs are registered.
    pub connection: Connection,
    /// Its description; the key box in it belongs to the same run of the agent as `state`.
    pub description: Option<Arc<HostDescription>>,
    /// Its state; the last known one while it does not answer. Shared, as it grows with the number of VMs.
    pub state: Option<Arc<HostState>>,
    /// Since when it does not answer, as far as this run of the server knows; none while it does.
    pub silent_since: Option<Instant>,
}

impl HostView {
    const NOTHING: Self = Self {
        connection: Connection::Disconnected,
        description: None,
        state: None,
        silent_since: None,
    };

    /// For how long it has not answered; none of one that answers.
    #[must_use]
    pub fn silence(&self) -> Option<Duration> {
        let silent = self.connection == Connection::Disconnected;
        silent.then(|| self.silent_since.map_or(Duration::ZERO, |since| since.elapsed()))
    }

    /// Whether its agent has a feature.
    #[must_use]
    pub fn has(&self, feature: &str) -> bool {
        let features = self.description.iter().flat_map(|description| &description.features);
        features.into_iter().any(|known| known == feature)
    }

    /// A connected host's VMs.
    #[must_use]
    pub fn vms(&self) -> &[VmState] {
        match &self.state {
            Some(state) if self.connection != Connection::Disconnected => &state.vms,
            _ => &[],
        }
    }

    /// A connected host's status of a VM.
    #[must_use]
    pub fn vm(&self, vm: VmId) -> Option<&VmState> {
        self.vms().iter().find(|state| state.vm == vm)
    }
}

/// A host with its monitor, which ends when this is dropped.
struct Entry {
    name: String,
    agent: Arc<dyn HostAgent>,
    view: watch::Receiver<HostView>,
    wake: Arc<Notify>,
    monitor: JoinHandle<()>,
    datastores: JoinHandle<()>,
}

impl Drop for Entry {
    fn drop(&mut self) {
        self.monitor.abort();
        self.datastores.abort();
    }
}

/// The hosts of this server.
pub struct Hosts {
    store: Arc<Store>,
    providers: Arc<Providers>,
    connector: Arc<dyn HostConnector>,
    entries: Mutex<HashMap<HostId, Entry>>,
    locks: Arc<Locks<VmId>>,
}

impl Hosts {
    /// Starts to monitor the hosts of the inventory.
    ///
    /// # Errors
    /// [`StoreError`].
    pub async fn start(
        store: Arc<Store>,
        providers: Arc<Providers>,
        connector: Arc<dyn HostConnector>,
    ) -> Result<Self, StoreError> {
        let known = hosts::list(&mut *store.read().await?, &Part::all()).await?;
        let locks = Arc::new(Locks::default());
        let this = Self { store, providers, connector, entries: Mutex::default(), locks };
        for host in known {
            if let Err(problem) = this.add(&host) {
                tracing::error!(host = host.name, %problem, "it cannot be monitored");
            }
        }
        Ok(this)
    }

    fn entries(&self) -> MutexGuard<'_, HashMap<HostId, Entry>> {
        self.entries.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Starts to monitor a host.
    ///
    /// # Errors
    /// The connector's.
    pub fn add(&self, host: &Host) -> Result<(), Problem> {
        let agent = self.connector.connect(host)?;
        let silent_since = Some(Instant::now());
        let (view, seen) = watch::channel(HostView { silent_since, ..HostView::NOTHING });
        let wake = Arc::new(Notify::new());
        let monitor = Monitor::new(
            host,
            Arc::clone(&self.store),
            Arc::clone(&self.providers),
            Arc::clone(&agent),
            Arc::clone(&self.locks),
            view,
            Arc::clone(&wake),
        );
        let datastores = DatastoreMonitor {
            host: host.id,
            store: Arc::clone(&self.store),
            agent: Arc::clone(&agent),
            view: seen.clone(),
            full: HashSet::new(),
        };
        let entry = Entry {
            name: host.name.clone(),
            agent,
            view: seen,
            wake,
            monitor: tokio::spawn(monitor.run()),
            datastores: tokio::spawn(datastores.run()),
        };
        self.entries().insert(host.id, entry);
        Ok(())
    }

    /// Ends the monitoring of a host.
    pub fn remove(&self, host: HostId) {
        self.entries().remove(&host);
    }

    /// Has a host's monitor compare the host with the inventory now.
    pub fn look_again(&self, host: HostId) {
        if let Some(entry) = self.entries().get(&host) {
            entry.wake.notify_one();
        }
    }

    /// The current view of a host.
    #[must_use]
    pub fn view(&self, host: HostId) -> HostView {
        self.entries().get(&host).map_or(HostView::NOTHING, |entry| entry.view.borrow().clone())
    }

    /// The agent of a host, whether it answers or not.
    ///
    /// # Errors
    /// `not-found`.
    pub fn agent(&self, host: HostId) -> Result<Arc<dyn HostAgent>, Problem> {
        let entries = self.entries();
        let entry = entries.get(&host).ok_or_else(|| Problem::not_found("host", host))?;
        Ok(Arc::clone(&entry.agent))
    }

    /// The agent of a host that answers.
    ///
    /// # Errors
    /// `unreachable`.
    pub fn connected(&self, host: HostId) -> Result<Arc<dyn HostAgent>, Problem> {
        let entries = self.entries();
        let entry = entries.get(&host).ok_or_else(|| Problem::not_found("host", host))?;
        if entry.view.borrow().connection == Connection::Disconnected {
            let detail = format!(
                "host '{}' is unreachable; check that its agent is running (vmseal host show {})",
                entry.name, entry.name
            );
            return Err(Problem::new(ErrorCode::Unreachable, detail));
        }
        Ok(Arc::clone(&entry.agent))
    }

    /// Waits until a host's monitor has a newer state than one that was read from the host. The caller sets the
    /// timeout: the host may not answer, or its monitor may be busy.
    ///
    /// # Errors
    /// `not-found`: it was removed.
    pub async fn newer_state(
        &self,
        host: HostId,
        than: &HostState,
    ) -> Result<Arc<HostState>, Problem> {
        let gone = || Problem::not_found("host", host);
        let mut view =
            self.entries().get(&host).map(|entry| entry.view.clone()).ok_or_else(gone)?;
        let newer = |state: &Arc<HostState>| {
            state.incarnation != than.incarnation || state.generation > than.generation
        };
        let seen = view.wait_for(|view| {
            view.connection == Connection::Connected && view.state.as_ref().is_some_and(newer)
        });
        seen.await.map_err(|_| gone())?.state.clone().ok_or_else(gone)
    }

    /// Waits until the view of a host is at least as new as a state that was read from it, so that a client that
    /// waited for a task sees its effect. Does not wait long for a busy monitor.
    pub async fn until_shown(&self, host: HostId, read: &HostState) {
        let Some(mut view) = self.entries().get(&host).map(|entry| entry.view.clone()) else {
            return;
        };
        let shown = view.wait_for(|view| {
            view.state.as_ref().is_some_and(|shown| {
                shown.incarnation != read.incarnation || shown.generation >= read.generation
            })
        });
        // Not an error if it takes longer: the view follows.
        let _ = tokio::time::timeout(SHOWN_TIMEOUT, shown).await;
    }

    /// Ensures that a VM is registered on its host and that the host has its key: the provider's or, if the provider
    /// gives none, the one that the host holds.
    ///
    /// # Errors
    /// The host's or the provider's.
    pub async fn prepare(&self, vm: VmId, purpose: Purpose) -> Result<(), Problem> {
        let vm = register(&self.store, self, vm).await?;
        let delivered = self.deliver_unless_held(&vm, purpose).await;
        self.or_held(&vm, purpose, delivered).await
    }

    /// Gives a VM's key to its host; an error where the host has it and its provider is known to give none.
    async fn deliver_unless_held(&self, vm: &Vm, purpose: Purpose) -> Result<(), Problem> {
        match self.known_fault(vm) {
            // Do not wait for a provider that is known to give nothing if the host has the key.
            Some(fault) if self.holds_key(vm).await? => Err(fault),
            _ => self.deliver(vm, purpose).await,
        }
    }

    /// Uses the key that the host holds where none was delivered, if it may be used.
    async fn or_held(
        &self,
        vm: &Vm,
        purpose: Purpose,
        delivered: Result<(), Problem>,
    ) -> Result<(), Problem> {
        match delivered {
            Err(problem) if keys::may_use_held(&problem, purpose) && self.holds_key(vm).await? => {
                keys::tell_held(&self.store, vm, &problem).await
            }
            other => other,
        }
    }

    /// Why the provider of a VM's key gives none, as far as is known without a request.
    fn known_fault(&self, vm: &Vm) -> Option<Problem> {
        let key = vm.key.as_ref()?;
        self.providers.get(key.provider).ok()?.known_fault()
    }

    /// Whether a VM's host holds the key of the inventory: the VM is registered with it.
    async fn holds_key(&self, vm: &Vm) -> Result<bool, Problem> {
        let state = self.agent(vm.host)?.state_now().await?;
        Ok(state.vms.iter().any(|seen| seen.vm == vm.id && seen.key == KeyState::Held))
    }

    /// Gives a VM's key to its host.
    ///
    /// # Errors
    /// The host's or the provider's.
    pub async fn deliver(&self, vm: &Vm, purpose: Purpose) -> Result<(), Problem> {
        let Some(key) = &vm.key else { return Ok(()) };
        let agent = self.agent(vm.host)?;
        let kek = keys::fetch(&self.providers, vm, key, purpose).await?;
        // Asked again: the key box in the view may be that of an earlier run of the agent.
        let key_box = agent.describe().await?.key_box;
        keys::hand_over(&self.store, &*agent, &key_box, vm, key, kek).await
    }

    /// Locks a VM's registration: its registration on the host, and its lifecycle in the inventory, change only
    /// under this lock.
    pub async fn lock(&self, vm: VmId) -> OwnedMutexGuard<()> {
        self.locks.lock(vm).await
    }
}

/// Whether a request got no answer.
pub(crate) fn is_silence(problem: &Problem) -> bool {
    matches!(problem.code, ErrorCode::Unreachable | ErrorCode::TimedOut)
}
