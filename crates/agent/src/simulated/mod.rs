//! A host without processes behind the same contract: the same [`rules`], the same [`StateStore`], real
//! cryptography (key boxes, check values), disks as records. For tests of the control plane.
//!
//! ```text
//! SimulatedHost ─► AgentState  lost with the agent: incarnation, key box, registered VMs, keys
//!              └─► Persisted   outlives the agent: datastores, disks, running guests
//! ```
//! [`SimulatedHost::restart`] and [`Fault::Crash`] end one agent and start the next. Faults are injected at
//! the n-th call of a kind ([`SimulatedHost::inject`]); a lost answer after the work was done is one of them.

mod backups;
mod bitmaps;
mod calls;
mod cards;
mod console;
mod convert;
mod examine;
mod exposed;
mod faults;
mod jobs;
mod keys;
mod memories;
mod migration;
mod mirror;
mod panics;
mod pool_keys;
mod proofs;
mod replica;
mod running;
mod snapshots;
mod starting;
mod stopping;
mod storage;
mod survey;

use std::collections::{BTreeMap, BTreeSet};
use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use jiff::Timestamp;
use tokio::sync::watch;
use vmseal_api::boot::BootDevice;
use vmseal_api::datastore::{HeaderRole, Messenger, MountFacts};
use vmseal_api::dump::PanicDump;
use vmseal_api::fencing::Fencing;
use vmseal_api::filter::BitmapStatus;
use vmseal_api::host::descriptor::VmDescriptor;
use vmseal_api::host::version::{CONTRACT, FEATURES};
use vmseal_api::host::{
    Accelerator, AcceleratorKind, ContractRange, DiskFacts, DiskSpec, DiskState, HostDescription,
    JobKind, KeyReference, NicSpec, NicState, Notice, NoticeCode, Power, StopReason, Stopped,
    VmSpec, VmState,
};
use vmseal_api::id::{DatastoreId, DiskId, DumpId, Incarnation, SnapshotId, TaskId, VmId};
use vmseal_api::nic::NicBackend;
use vmseal_api::osd_encryption::OsdEncryption;
use vmseal_api::problem::{ErrorCode, Problem};
use vmseal_api::redundancy::PoolFacts;
use vmseal_api::request_id::RequestId;
use vmseal_log::Levels;
use vmseal_secret::SecretBytes;

use crate::hypervisor::network;
use crate::jobs::Jobs;
use crate::keys::KeyBox;
use crate::process::panics::Panics;
use crate::process::restarts::{Restarts, Waits};
use crate::rules;
use crate::rules::exclusion::{Activity, Situation};
use crate::vm::state_store::StateStore;

use backups::Backups;
use convert::Conversions;
use exposed::Exposed;
use faults::Faults;
pub use faults::{Call, Fault};
use jobs::Exports;
use memories::SnapshotMemory;
use mirror::Copies;
use running::RunningGuest;
pub use snapshots::SNAPSHOT_ROOM;
use snapshots::{Links, Snapshots};
use storage::Storage;

/// The default duration of simulated work: long enough for a caller to see it begin.
const WORK: Duration = Duration::from_millis(5);

/// The memory of a simulated host, in bytes, unless a test sets another one.
const MEMORY: u64 = 64 << 30;

/// The room of a simulated datastore, in bytes.
const CAPACITY: u64 = 1 << 40;

/// A disk.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SimulatedDisk {
    /// Its VM.
    pub vm: VmId,
    /// Its datastore.
    pub datastore: DatastoreId,
    /// Its facts.
    pub facts: DiskFacts,
    /// The check values of the keys that open it.
    pub checks: BTreeSet<String>,
    /// The keys that its header names; none where it is not encrypted.
    pub keys: Vec<KeyReference>,
    /// Whether its header says that others may have its data key.
    pub shared: bool,
    /// What its header says that it is for.
    pub role: HeaderRole,
    /// The length of its image, in bytes.
    pub length: u64,
}

/// The state that outlives an agent.
#[derive(Default)]
struct Persisted {
    storage: Storage,
    /// The descriptors of VMs on datastores.
    descriptors: BTreeMap<(DatastoreId, VmId), VmDescriptor>,
    disks: BTreeMap<DiskId, SimulatedDisk>,
    guests: BTreeMap<VmId, RunningGuest>,
    /// The generations of the placements that VMs have come with whose disks were copied.
    leases: BTreeMap<VmId, u64>,
    /// The guests whose memory is saved.
    suspended: BTreeMap<VmId, RunningGuest>,
    /// The memories that snapshots keep.
    kept_memories: BTreeMap<SnapshotId, SnapshotMemory>,
    /// The memories that snapshots keep and whose files cannot be used, and why.
    unusable_memories: BTreeMap<SnapshotId, String>,
    /// The generations of the memories of suspended VMs that other hosts will send.
    coming_memories: BTreeMap<VmId, u64>,
    /// The core dumps that were asked for: whose they are, and whether they are under its key.
    dumps: BTreeMap<DumpId, (VmId, bool)>,
    /// The core dumps that it has written by itself, and whose they are.
    panic_dumps: Vec<(VmId, PanicDump)>,
    /// The bitmaps of disks.
    bitmaps: BTreeMap<VmId, BTreeMap<DiskId, Vec<BitmapStatus>>>,
    exports: Exports,
    copies: Copies,
    conversions: Conversions,
    snapshots: Snapshots,
    links: Links,
    backups: Backups,
}

/// A registered VM.
struct Known {
    spec: VmSpec,
    /// What it is registered as, where a part of that takes effect only at its next start.
    next: Option<VmSpec>,
    /// The disks that its guest has.
    in_use: BTreeSet<DiskId>,
    /// What its firmware tries first this time.
    boot_once: Option<BootDevice>,
    power: Power,
    /// Whether it comes from another host, and has not run here.
    receiving: bool,
    /// The check value stands for the key, which was opened and checked: its bytes are not used here.
    key_held: bool,
    /// The key itself, for the descriptors alone.
    kek: Option<SecretBytes>,
    stopped: Option<Stopped>,
    died: Option<Stopped>,
    /// Why its guest goes on that was to be suspended.
    not_suspended: Option<String>,
    /// The disks that are made.
    made: BTreeMap<DiskId, DiskFacts>,
    jobs: Jobs,
    notices: Vec<Notice>,
    /// The filters that have died under the running guest.
    restarts: Restarts,
    /// Whether its guest sleeps, while it runs.
    asleep: bool,
    /// The panics of its guest.
    panics: Panics,
    /// The core dumps that the host has written by itself.
    panic_dumps: Vec<PanicDump>,
    /// The request that it was started or stopped for.
    request: Option<RequestId>,
    /// The number of the latest work that may still change the VM; work with an older number is ignored.
    work: BTreeMap<Work, u64>,
}

/// Kinds of work in progress.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Work {
    Power,
    /// The time that a guest has to shut down.
    ShutdownTimeout,
    Job(TaskId),
}

impl Known {
    fn new(spec: VmSpec) -> Self {
        Self {
            spec,
            next: None,
            in_use: BTreeSet::new(),
            power: Power::Off,
            receiving: false,
            key_held: false,
            kek: None,
            stopped: None,
            died: None,
            not_suspended: None,
            made: BTreeMap::new(),
            jobs: Jobs::default(),
            notices: Vec::new(),
            boot_once: None,
            restarts: Restarts::default(),
            asleep: false,
            panics: Panics::default(),
            panic_dumps: Vec::new(),
            request: None,
            work: BTreeMap::new(),
        }
    }

    fn state(&self) -> VmState {
        let disk = |(disk, facts): (&DiskId, &DiskFacts)| DiskState {
            disk: *disk,
            facts: facts.clone(),
            datastore: self.spec.disk(*disk).map(|disk| disk.datastore.datastore),
        };
        VmState {
            vm: self.spec.vm,
            power: self.power,
            key: rules::key_state(&self.spec, self.key_held),
            stopped: self.stopped.clone(),
            died: self.died.clone(),
            disks: self.made.iter().map(disk).collect(),
            notices: self
                .notices
                .iter()
                .cloned()
                .chain(self.restarts.notice(&self.spec, Waits::Not))
                .chain(self.notice_of_panics())
                .collect(),
            jobs: self.jobs.statuses(),
            nics: self.nics(),
            started_with: self.started_with(),
            suspended_to_ram: self.asleep,
            not_suspended: self.not_suspended.clone(),
            panics: self.panics.past.clone(),
            panic_dumps: self.panic_dumps.clone(),
            request_id: self.request.as_ref().map(ToString::to_string),
        }
    }

    /// Its network cards, while it runs.
    fn nics(&self) -> Vec<NicState> {
        let spec = &self.spec;
        let nic = |nic: &NicSpec| NicState {
            nic: nic.nic,
            forwards: network::preferred(spec.vm, nic),
            interface: match &nic.backend {
                NicBackend::User { .. } => None,
                NicBackend::Tap { tap } => Some(tap.clone()),
                NicBackend::Bridge { .. } => Some("vmseal0".to_owned()),
            },
            addresses: Vec::new(),
            link: Some(nic.link),
        };
        match self.power {
            Power::Running | Power::Stopping | Power::Paused => spec.nics().map(nic).collect(),
            Power::Suspending | Power::Migrating => spec.nics().map(nic).collect(),
            Power::Off | Power::Starting | Power::Suspended | Power::Unknown => Vec::new(),
        }
    }

    /// What it is registered as.
    fn registered(&self) -> &VmSpec {
        self.next.as_ref().unwrap_or(&self.spec)
    }

    /// Whether a disk is made.
    fn has_made(&self, disk: &DiskSpec) -> bool {
        disk.facts.is_some() || self.made.contains_key(&disk.disk)
    }

    fn stop(&mut self, reason: StopReason, detail: &str) {
        self.power = Power::Off;
        self.asleep = false;
        self.in_use.clear();
        if let Some(next) = self.next.take() {
            self.spec = next;
        }
        self.work.retain(|work, _| matches!(work, Work::Job(_)));
        self.ended_while_sent(detail);
        let stopped = Stopped { at: Timestamp::now(), reason, detail: detail.to_owned() };
        if reason.is_death() {
            self.died = Some(stopped.clone());
        }
        self.stopped = Some(stopped);
        self.restarts = Restarts::default();
    }
}

/// The state that is lost when an agent ends.
struct AgentState {
    key_box: Arc<KeyBox>,
    states: Arc<StateStore>,
    vms: BTreeMap<VmId, Known>,
    log_levels: Levels,
    exposed: Exposed,
    /// The keys of pools, by where these are mounted.
    pool_keys: BTreeMap<PathBuf, SecretBytes>,
    works: u64,
    /// VMs whose guests run just before the call that ends their start.
    starts_first: BTreeSet<VmId>,
    /// Turns true when the agent ends: calls that wait then fail.
    ended: watch::Sender<bool>,
}

impl AgentState {
    fn new() -> Self {
        Self {
            key_box: Arc::new(KeyBox::new().expect("locked memory for a key box")),
            states: Arc::new(StateStore::new(Incarnation::new())),
            vms: BTreeMap::new(),
            log_levels: Levels::default(),
            exposed: Exposed::default(),
            pool_keys: BTreeMap::new(),
            works: 0,
            starts_first: BTreeSet::new(),
            ended: watch::Sender::new(false),
        }
    }

    fn publish(&self, vm: VmId) {
        self.states.publish(vm, self.vms.get(&vm).map(Known::state));
    }
}

struct Inside {
    agent: AgentState,
    persisted: Persisted,
    faults: Faults,
    work: Duration,
    /// How long jobs of one kind take, where a test sets that.
    work_of: Option<(JobKind, Duration)>,
    heeds_shutdown: bool,
    reachable: bool,
    full: bool,
    /// Whether there is no swtpm.
    lacks_swtpm: bool,
    /// How much memory is set aside as huge pages, in bytes.
    huge_pages: u64,
    /// How much memory it reports, in bytes.
    memory: u64,
    /// The bridges and taps that it lacks, beside those that every simulated host lacks.
    lacks_networks: BTreeSet<String>,
    /// Whether guests do not let devices go.
    keeps_devices: bool,
    /// How often the machine was rebooted.
    boots: u32,
    /// The result of measuring a datastore, where a test sets it.
    free: Option<u64>,
    /// How a cluster keeps what is stored in its pools.
    pools: Vec<PoolFacts>,
    /// The fingerprints of the keys that mounts of pools use, by their places: these outlive agents.
    mounted_keys: BTreeMap<PathBuf, String>,
    /// How pools are mounted, by their places: this outlives agents, too.
    mounts: BTreeMap<PathBuf, MountFacts>,
    /// With which messenger somebody has mounted pools by hand, by their places.
    mounted_messengers: BTreeMap<PathBuf, Messenger>,
    /// What the monitors of a cluster say of its OSDs.
    osds: Option<OsdEncryption>,
    /// Whether the users of pools may have other hosts kept from them.
    fencing: Option<Fencing>,
    /// The keys of pools that their cluster refuses.
    refused_keys: Vec<Vec<u8>>,
    /// The monitors that are of another cluster, and its fsid.
    other_clusters: BTreeMap<String, String>,
    fail_disks: BTreeSet<DiskId>,
    /// The versions of the contract that it reports.
    contract: ContractRange,
    /// The features that it reports.
    features: Vec<String>,
    accelerator: Accelerator,
    /// Media have other content than their files.
    other_media: bool,
    /// The version of QEMU that it reports.
    qemu: String,
    /// Where it waits for VMs.
    migration_address: SocketAddr,
    /// The ports of other hosts that it cannot connect to.
    cut_off: BTreeSet<SocketAddr>,
    /// How long guests have stood still when all of their memory is sent, as this host says.
    stood_still: Duration,
    /// The agent dies after it has written to one disk.
    halfway: bool,
}

/// A simulated host. Clones are the same host.
#[derive(Clone)]
pub struct SimulatedHost(Arc<Mutex<Inside>>);

impl Default for SimulatedHost {
    fn default() -> Self {
        Self::new()
    }
}

impl SimulatedHost {
    /// A new, empty host.
    ///
    /// # Panics
    /// When memory cannot be locked.
    #[must_use]
    pub fn new() -> Self {
        Self(Arc::new(Mutex::new(Inside {
            agent: AgentState::new(),
            persisted: Persisted::default(),
            faults: Faults::default(),
            work: WORK,
            work_of: None,
            heeds_shutdown: true,
            reachable: true,
            full: false,
            lacks_swtpm: false,
            huge_pages: u64::MAX,
            memory: MEMORY,
            lacks_networks: BTreeSet::new(),
            keeps_devices: false,
            boots: 0,
            free: None,
            pools: Vec::new(),
            mounted_keys: BTreeMap::new(),
            mounts: BTreeMap::new(),
            mounted_messengers: BTreeMap::new(),
            osds: None,
            fencing: None,
            refused_keys: Vec::new(),
            other_clusters: BTreeMap::new(),
            fail_disks: BTreeSet::new(),
            contract: CONTRACT,
            features: FEATURES.map(str::to_owned).to_vec(),
            accelerator: Accelerator {
                kind: AcceleratorKind::Tcg,
                reason: "nothing runs on a simulated host".to_owned(),
                processor: None,
            },
            other_media: false,
            qemu: "simulated".to_owned(),
            migration_address: SocketAddr::from(([127, 0, 0, 1], 8445)),
            cut_off: BTreeSet::new(),
            stood_still: Duration::ZERO,
            halfway: false,
        })))
    }

    fn inside(&self) -> MutexGuard<'_, Inside> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Ends this run of the agent and begins the next: keys, registrations and work in progress are lost,
    /// running guests are adopted, half-started ones are found dead, and deaths are reported as before.
    pub fn restart(&self) {
        self.inside().restart();
    }

    /// Injects a fault at the `nth` call of a kind from now on (1 is the next).
    pub fn inject(&self, call: Call, nth: u32, fault: Fault) {
        self.inside().faults.inject(call, nth, fault);
    }

    /// Removes the faults that have not occurred yet.
    pub fn forget_faults(&self) {
        self.inside().faults.forget();
    }

    /// The calls so far, in order.
    #[must_use]
    pub fn calls(&self) -> Vec<Call> {
        self.inside().faults.calls().iter().map(|(call, _)| *call).collect()
    }

    /// The requests that calls of one kind were made for, in order.
    #[must_use]
    pub fn requests(&self, kind: Call) -> Vec<Option<RequestId>> {
        let inside = self.inside();
        let of_kind = inside.faults.calls().iter().filter(|(call, _)| *call == kind);
        of_kind.map(|(_, request)| request.clone()).collect()
    }

    /// Disconnects the host from the network, or connects it again.
    pub fn set_reachable(&self, reachable: bool) {
        self.inside().set_reachable(reachable);
    }

    /// Sets the versions of the contract that it reports.
    pub fn set_contract(&self, contract: ContractRange) {
        self.inside().contract = contract;
    }

    /// Takes features from it, as an agent of an earlier version lacks them.
    pub fn lack_features(&self, features: &[&str]) {
        self.inside().features.retain(|known| !features.contains(&known.as_str()));
    }

    /// Sets how its guests are run.
    pub fn set_accelerator(&self, accelerator: Accelerator) {
        self.inside().accelerator = accelerator;
    }

    /// Sets the version of QEMU that its guests run by.
    pub fn set_qemu(&self, version: &str) {
        version.clone_into(&mut self.inside().qemu);
    }

    /// Sets how long making a disk, starting and shutting down take.
    pub fn set_work(&self, work: Duration) {
        let mut inside = self.inside();
        (inside.work, inside.work_of) = (work, None);
    }

    /// Sets how long jobs of one kind take that are put from now on, until [`Self::set_work`].
    pub fn set_work_of(&self, kind: JobKind, work: Duration) {
        self.inside().work_of = Some((kind, work));
    }

    /// Sets whether guests obey the power button.
    pub fn set_heeds_shutdown(&self, heeds: bool) {
        self.inside().heeds_shutdown = heeds;
    }

    /// Sets whether the datastores are full.
    pub fn set_full(&self, full: bool) {
        self.inside().full = full;
    }

    /// Gives media other content than their files have, which all simulated hosts see: those of another host.
    pub fn set_other_media(&self, other: bool) {
        self.inside().other_media = other;
    }

    /// Takes swtpm from the host, which TPMs of VMs come from.
    pub fn lack_swtpm(&self) {
        self.inside().lacks_swtpm = true;
    }

    /// Sets how much memory it reports, in bytes.
    pub fn set_memory(&self, bytes: u64) {
        self.inside().memory = bytes;
    }

    /// Sets how much memory is set aside as huge pages, in bytes.
    pub fn set_huge_pages(&self, bytes: u64) {
        self.inside().huge_pages = bytes;
    }

    /// Sets how a cluster keeps what is stored in its pools.
    pub fn set_pools(&self, pools: Vec<PoolFacts>) {
        self.inside().pools = pools;
    }

    /// Sets what the monitors of a cluster say of its OSDs; none is a host of an earlier version, which does not say it.
    pub fn set_osds(&self, osds: Option<OsdEncryption>) {
        self.inside().osds = osds;
    }

    /// Sets whether the users of pools may have other hosts kept from them; none is a `vmseal-rbd` of an earlier version, which does not say it.
    pub fn set_fencing(&self, fencing: Option<Fencing>) {
        self.inside().fencing = fencing;
    }

    /// Sets how much room the datastores have, in bytes.
    pub fn set_free(&self, free: u64) {
        self.inside().free = Some(free);
    }

    /// Makes the creation of this disk fail after it has begun, once; or the use of its copy, until it is mended.
    pub fn fail_disk(&self, disk: DiskId) {
        self.inside().fail_disks.insert(disk);
    }

    /// Lets the disks that were to fail succeed.
    pub fn mend_disks(&self) {
        self.inside().fail_disks.clear();
    }

    /// The filter of a running VM dies: a new one replaces it, or the VM stops when too many have died.
    pub fn kill_filter(&self, vm: VmId) {
        let now = Instant::now();
        let mut inside = self.inside();
        let Some(known) = inside.agent.vms.get_mut(&vm) else { return };
        if known.restarts.died("the simulated filter was killed".to_owned(), now) {
            known.restarts.served(now);
            return inside.agent.publish(vm);
        }
        // Nobody knows what the last one had begun.
        inside.persisted.bitmaps.remove(&vm);
        drop(inside);
        self.stop_guest(vm, StopReason::FilterDied);
    }

    /// Stops a running VM for this reason.
    pub fn stop_guest(&self, vm: VmId, reason: StopReason) {
        let mut inside = self.inside();
        if inside.persisted.guests.remove(&vm).is_some()
            && let Some(known) = inside.agent.vms.get_mut(&vm)
        {
            known.request = None;
            known.stop(reason, "the simulated guest has stopped");
            inside.agent.publish(vm);
        }
    }

    /// Adds a notice to a VM.
    pub fn notice(&self, vm: VmId, notice: Notice) {
        let mut inside = self.inside();
        if let Some(known) = inside.agent.vms.get_mut(&vm) {
            known.notices.push(notice);
            inside.agent.publish(vm);
        }
    }

    /// Takes the notices of this kind from a VM.
    pub fn withdraw(&self, vm: VmId, code: NoticeCode) {
        let mut inside = self.inside();
        if let Some(known) = inside.agent.vms.get_mut(&vm) {
            known.notices.retain(|notice| notice.code != code);
            inside.agent.publish(vm);
        }
    }

    /// The disks on the host: tests check that none is left over or lost.
    #[must_use]
    pub fn disks(&self) -> BTreeMap<DiskId, SimulatedDisk> {
        self.inside().persisted.disks.clone()
    }

    /// The files of exports: the committed ones, and the number of those that are not.
    #[must_use]
    pub fn exports(&self) -> (Vec<PathBuf>, usize) {
        self.inside().persisted.exports.files()
    }

    /// The core dumps that it has.
    #[must_use]
    pub fn dumps(&self) -> Vec<DumpId> {
        let inside = self.inside();
        let own = inside.persisted.panic_dumps.iter().map(|(_, known)| known.dump);
        inside.persisted.dumps.keys().copied().chain(own).collect()
    }

    /// The running guests.
    #[must_use]
    pub fn running(&self) -> Vec<VmId> {
        self.inside().persisted.guests.keys().copied().collect()
    }

    /// The VMs that are registered.
    #[must_use]
    pub fn registered(&self) -> Vec<VmId> {
        self.inside().agent.vms.keys().copied().collect()
    }

    /// What a VM is registered as.
    #[must_use]
    pub fn registered_as(&self, vm: VmId) -> Option<VmSpec> {
        let inside = self.inside();
        inside.agent.vms.get(&vm).map(|known| known.registered().clone())
    }

    /// The VMs whose key is held.
    #[must_use]
    pub fn keys_held(&self) -> Vec<VmId> {
        let inside = self.inside();
        let held = inside.agent.vms.iter().filter(|(_, known)| known.key_held);
        held.map(|(vm, _)| *vm).collect()
    }
}

fn gone() -> Problem {
    Problem::new(ErrorCode::Unreachable, "the simulated host cannot be reached")
}

/// The host was reached and its answer was lost: the caller cannot know whether the request was executed.
fn lost() -> Problem {
    Problem { in_doubt: true, ..gone() }
}

impl Inside {
    fn set_reachable(&mut self, reachable: bool) {
        self.reachable = reachable;
        if !reachable {
            // Long polls end as connections do.
            self.agent.ended.send_replace(true);
            self.agent.ended = watch::Sender::new(false);
        }
    }

    fn restart(&mut self) {
        let before = std::mem::replace(&mut self.agent, AgentState::new());
        before.ended.send_replace(true);
        self.persisted.storage.lose_locks();
        for (vm, guest) in &self.persisted.guests {
            let (power, in_use) = (guest.power(), guest.disks.clone());
            let (asleep, panics) = (guest.asleep, guest.panics.clone());
            let known = Known { power, in_use, asleep, panics, ..Known::new(guest.spec.clone()) };
            self.agent.vms.insert(*vm, known);
        }
        for (vm, guest) in &self.persisted.suspended {
            let known = Known { power: Power::Suspended, ..Known::new(guest.spec.clone()) };
            self.agent.vms.insert(*vm, known);
        }
        for (vm, before) in before.vms {
            if self.persisted.suspended.contains_key(&vm) {
                continue;
            }
            if before.power == Power::Starting {
                let mut known = Known::new(before.spec);
                known.stop(StopReason::FoundDead, "the agent ended while the VM was being started");
                self.agent.vms.insert(vm, known);
            } else if let Some(died) = before.died {
                let (stopped, died) = (Some(died.clone()), Some(died));
                let known = Known { stopped, died, ..Known::new(before.spec) };
                self.agent.vms.insert(vm, known);
            }
        }
        let vms: Vec<VmId> = self.agent.vms.keys().copied().collect();
        for vm in vms {
            self.list_panic_dumps(vm);
            self.agent.publish(vm);
        }
    }

    fn describe(&self) -> HostDescription {
        HostDescription {
            contract: self.contract,
            features: self.features.clone(),
            vmseal: env!("CARGO_PKG_VERSION").to_owned(),
            boot: Some(format!("boot {}", self.boots)),
            incarnation: self.agent.states.incarnation(),
            hostname: "simulated".to_owned(),
            key_box: self.agent.key_box.public(),
            accelerator: self.accelerator.clone(),
            qemu: self.qemu.clone(),
            cpus: 8,
            memory: self.memory,
            aes_hardware: true,
            run_dir: "/run/vmseal".to_owned(),
            transfer_directories: vec!["/".to_owned()],
            migration_address: Some(self.migration_address),
            weaknesses: Vec::new(),
        }
    }

    /// The state of a VM, and the work in progress on it.
    fn situation(&self, vm: VmId) -> Result<Situation<'_>, Problem> {
        let known = self.agent.vms.get(&vm).ok_or_else(|| rules::unknown(vm))?;
        let disks = known.spec.disks().map(|disk| disk.disk);
        let exposed = disks.filter(|disk| self.agent.exposed.has(*disk));
        Ok(Situation {
            spec: &known.spec,
            power: known.power,
            // Key changes take no time here.
            changing_keys: false,
            disks: known
                .jobs
                .activities()
                .chain(exposed.map(|disk| (disk, Activity::Exposed)))
                .collect(),
            unused: known.unused(),
        })
    }

    fn known(&mut self, vm: VmId) -> Result<&mut Known, Problem> {
        self.agent.vms.get_mut(&vm).ok_or_else(|| rules::unknown(vm))
    }
}

#[cfg(test)]
mod tests;
