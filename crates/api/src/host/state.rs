//! The state of a host and its VMs, and its changes.

use jiff::Timestamp;
use serde::{Deserialize, Serialize};

use super::disk::{DiskFacts, DiskLimits};
use super::job::JobStatus;
use crate::boot::BootDevice;
use crate::dump::{Panic, PanicDump};
use crate::id::{DatastoreId, DiskId, Incarnation, VmId};
use crate::nic::NicState;

/// The state of a host. The server compares it with what it wants.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct HostState {
    /// The life of the agent.
    pub incarnation: Incarnation,
    /// Grows with every change within one incarnation.
    pub generation: u64,
    /// The registered VMs, and those found running.
    pub vms: Vec<VmState>,
}

/// The changes on a host since a generation that the reader knows.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct StateChange {
    /// The life of the agent.
    pub incarnation: Incarnation,
    /// The generation after these changes.
    pub generation: u64,
    /// The generation before them; none where this is the full state, because the agent has restarted since
    /// or the generation is too old.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub since: Option<u64>,
    /// The VMs that have changed; all of them where `since` is none.
    pub vms: Vec<VmState>,
    /// The VMs that are no longer known.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub gone: Vec<VmId>,
}

impl HostState {
    /// The state after `change` is applied to the last state that was read. None where the change is based on
    /// another state: the reader must ask for the full one.
    #[must_use]
    pub fn changed(before: Option<&Self>, change: StateChange) -> Option<Self> {
        let StateChange { incarnation, generation, since, mut vms, gone } = change;
        if let Some(since) = since {
            let before = before
                .filter(|before| (before.incarnation, before.generation) == (incarnation, since))?;
            let told = |vm: &VmId| gone.contains(vm) || vms.iter().any(|new| new.vm == *vm);
            let same: Vec<_> = before.vms.iter().filter(|old| !told(&old.vm)).cloned().collect();
            vms.extend(same);
        }
        vms.sort_by_key(|state| state.vm);
        Some(Self { incarnation, generation, vms })
    }

    /// The known state, as [`HostAgent::state`](super::HostAgent::state) takes it.
    #[must_use]
    pub fn known(&self) -> (Incarnation, u64) {
        (self.incarnation, self.generation)
    }
}

/// The state of a VM on its host.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct VmState {
    /// Which VM.
    pub vm: VmId,
    /// Whether it runs.
    pub power: Power,
    /// Whether its key is there.
    pub key: KeyState,
    /// Why it last stopped, or could not start; none until then.
    pub stopped: Option<Stopped>,
    /// Its last unexpected end ([`StopReason::is_death`]), until it runs again: an alarm. The host keeps it
    /// across restarts of the agent.
    #[serde(default)]
    pub died: Option<Stopped>,
    /// The disks that this agent has made, or found made when it was asked to make them.
    pub disks: Vec<DiskState>,
    /// Conditions that an operator should know and that do not stop the VM.
    pub notices: Vec<Notice>,
    /// The last job of each disk that this agent was asked for.
    #[serde(default)]
    pub jobs: Vec<JobStatus>,
    /// Its network cards, while it runs.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub nics: Vec<NicState>,
    /// What its guest was started with, while it runs; none from an agent without feature
    /// [`SET_RUNNING`](super::version::SET_RUNNING).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub started_with: Option<StartedWith>,
    /// Whether its guest is suspended to RAM (ACPI S3), while it runs; not said by an agent without feature
    /// [`WAKEUP`](super::version::WAKEUP).
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub suspended_to_ram: bool,
    /// Why the last attempt to suspend it failed; none until then, and when another one begins.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub not_suspended: Option<String>,
    /// The last panics of its guest after which it was restarted or left as it is, oldest first; until it is started.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub panics: Vec<Panic>,
    /// The core dumps that the host has written by itself.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub panic_dumps: Vec<PanicDump>,
    /// The id of the request that it was last started or stopped for; none when it stopped by itself.
    #[serde(default)]
    pub request_id: Option<String>,
}

impl VmState {
    /// Of a VM of which there is nothing else to say.
    #[must_use]
    pub fn new(vm: VmId, power: Power, key: KeyState) -> Self {
        Self {
            vm,
            power,
            key,
            stopped: None,
            died: None,
            disks: Vec::new(),
            notices: Vec::new(),
            jobs: Vec::new(),
            nics: Vec::new(),
            started_with: None,
            suspended_to_ram: false,
            not_suspended: None,
            panics: Vec::new(),
            panic_dumps: Vec::new(),
            request_id: None,
        }
    }
}

/// What a guest was started with that cannot change while it runs.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct StartedWith {
    /// Virtual processors.
    pub vcpus: u32,
    /// Memory in bytes.
    pub memory: u64,
    /// The disks that the guest has, with the settings that its filter has of each.
    pub disks: Vec<DiskSettings>,
    /// The boot order; empty for the usual one.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub boot: Vec<BootDevice>,
}

/// The settings of a disk in use.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct DiskSettings {
    /// Which disk.
    pub disk: DiskId,
    /// What its guest may use of it.
    pub limits: DiskLimits,
    /// The size of its filter's cache, in bytes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cache: Option<u64>,
}

/// A complete disk.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct DiskState {
    /// Which disk.
    pub disk: DiskId,
    /// The facts for the inventory to pin.
    pub facts: DiskFacts,
    /// The datastore that it is on; none from agents without the feature [`MOVE`](super::version::MOVE).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub datastore: Option<DatastoreId>,
}

/// Whether a VM runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(rename_all = "snake_case")]
pub enum Power {
    /// No process of it lives.
    Off,
    /// Its processes are being started.
    Starting,
    /// The guest runs.
    Running,
    /// It has been asked to stop.
    Stopping,
    /// Its processors stand still until an operator lets them go on; its memory and disks are kept.
    Paused,
    /// The memory of its guest is being saved; the guest stands still.
    Suspending,
    /// The memory of its guest is saved beside its disks, and no process of it lives.
    Suspended,
    /// It is between two hosts and its guest stands still: its memory is at the other host, or has come from there.
    Migrating,
    /// Something that a newer agent says and this side does not know: it is not off.
    #[serde(other)]
    Unknown,
}

/// Whether a VM's KEK is on its host.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(rename_all = "snake_case")]
pub enum KeyState {
    /// Nothing of the VM is encrypted.
    NotNeeded,
    /// It is there, and it is the right one.
    Held,
    /// It is not there: the VM is locked.
    Missing,
    /// Something that a newer agent says and this side does not know.
    #[serde(other)]
    Unknown,
}

/// Why a VM stopped.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct Stopped {
    /// When.
    #[cfg_attr(feature = "openapi", schema(value_type = String, format = DateTime))]
    pub at: Timestamp,
    /// Why.
    pub reason: StopReason,
    /// The same for people, with what to do where something is to be done.
    pub detail: String,
}

/// The kinds of end.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(rename_all = "snake_case")]
pub enum StopReason {
    /// The guest powered itself off, by its own or an operator's wish.
    GuestShutdown,
    /// An operator cut the power.
    PoweredOff,
    /// The guest's firmware or kernel asked QEMU to end in an abnormal way.
    GuestPanicked,
    /// The filter process died; the VM was stopped so that it writes nothing it believes written.
    FilterDied,
    /// QEMU died.
    QemuDied,
    /// It could not be started.
    FailedToStart,
    /// It was suspended: the memory of its guest is saved.
    Suspended,
    /// It runs on another host.
    Migrated,
    /// The agent restarted and found the VM half-started or gone.
    FoundDead,
    /// Something that a newer agent says and this side does not know; its detail tells it.
    #[serde(other)]
    Unknown,
}

impl StopReason {
    /// Whether it is the death of one of the VM's processes, not an end that the guest or an operator caused.
    #[must_use]
    pub fn is_death(self) -> bool {
        match self {
            Self::FilterDied | Self::QemuDied | Self::FoundDead => true,
            Self::GuestShutdown
            | Self::PoweredOff
            | Self::GuestPanicked
            | Self::FailedToStart
            | Self::Suspended
            | Self::Migrated
            | Self::Unknown => false,
        }
    }
}

/// A condition that an operator should know.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Notice {
    /// Its kind.
    pub code: NoticeCode,
    /// The disk, where it is about one.
    pub disk: Option<DiskId>,
    /// What happened and what to do.
    pub detail: String,
}

/// The kinds of notice.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(rename_all = "snake_case")]
pub enum NoticeCode {
    /// One copy of a disk's header is damaged; the other one serves.
    HeaderCopyDamaged,
    /// The name of a disk's image leads to another file than the VM uses, or to none.
    ImageExchanged,
    /// A disk answers errors.
    DiskErrors,
    /// A disk's datastore does not end what the guest asks; the guest waits.
    DiskStalled,
    /// Its disks have another key than it is registered with; its descriptors stay as they are.
    KeyDiffers,
    /// A disk's second copy is not kept up, or cannot be.
    ReplicaBehind,
    /// The VM's filter process died; its guest waits for another one.
    DisksDown,
    /// The VM's filter process died and another one serves its disks; nothing is lost.
    FilterRestarted,
    /// The process that is the VM's TPM ended, or the process that served its directory; its guest goes on without a TPM that works.
    TpmDied,
    /// Its guest has panicked, and was restarted or stands still.
    GuestPanicked,
    /// Its guest's file systems may be frozen, for a snapshot, and could not be thawed.
    GuestFrozen,
    /// The VM runs, and the agent that was started meanwhile cannot take it over.
    NotAdopted,
    /// Something that a newer agent says and this side does not know; its detail tells it.
    #[serde(other)]
    Unknown,
}

#[cfg(test)]
mod tests {
    use super::*;

    fn vm(power: Power) -> VmState {
        VmState::new(VmId::new(), power, KeyState::NotNeeded)
    }

    #[test]
    fn a_change_is_applied_to_the_state_that_it_follows_and_to_no_other() {
        let incarnation = Incarnation::new();
        let (kept, changed, gone) = (vm(Power::Off), vm(Power::Off), vm(Power::Off));
        let all = |vms| StateChange { incarnation, generation: 3, since: None, vms, gone: vec![] };
        let first =
            HostState::changed(None, all(vec![kept.clone(), changed.clone(), gone.clone()]))
                .unwrap();
        assert_eq!(first.vms.len(), 3);
        let running = VmState { power: Power::Running, ..changed };
        let change = StateChange {
            incarnation,
            generation: 5,
            since: Some(3),
            vms: vec![running.clone()],
            gone: vec![gone.vm],
        };
        let second = HostState::changed(Some(&first), change.clone()).unwrap();
        let mut expected = vec![kept, running];
        expected.sort_by_key(|state| state.vm);
        assert_eq!((second.generation, &second.vms), (5, &expected));
        assert_eq!(HostState::changed(None, change.clone()), None);
        assert_eq!(
            HostState::changed(Some(&second), change.clone()),
            None,
            "a change of another state was applied"
        );
        let restarted = StateChange { incarnation: Incarnation::new(), ..change };
        assert_eq!(HostState::changed(Some(&first), restarted), None);
    }

    #[test]
    fn what_a_newer_agent_says_is_read_as_unknown() {
        let mut state = serde_json::to_value(vm(Power::Off)).unwrap();
        state["power"] = "hibernated".into();
        state["key"] = "shared".into();
        state["stopped"] =
            serde_json::json!({"at": "2026-01-01T00:00:00Z", "reason": "evicted", "detail": "so"});
        state["notices"] = serde_json::json!([{"code": "clock-skew", "disk": null, "detail": "d"}]);
        state["jobs"] = serde_json::json!([{
            "task": crate::id::TaskId::new(), "kind": "defragment", "disks": [], "more": 1,
            "state": {"is": "paused", "until": "noon"}, "progress": {"done": 1, "total": 2}
        }]);
        state["mood"] = "fine".into();
        let read: VmState = serde_json::from_value(state).unwrap();
        assert_eq!((read.power, read.key), (Power::Unknown, KeyState::Unknown));
        assert_eq!(read.stopped.unwrap().reason, StopReason::Unknown);
        assert_eq!(read.notices[0].code, NoticeCode::Unknown);
        let job = &read.jobs[0];
        assert_eq!(job.kind, super::super::job::JobKind::Unknown);
        assert_eq!(job.state, super::super::job::JobState::Unknown);
        assert_eq!(job.progress.total, 2);
        let described = serde_json::json!({
            "contract": {"min": 2, "max": 9}, "vmseal": "9", "incarnation": Incarnation::new(), "hostname": "h",
            "key_box": "", "accelerator": {"kind": "mshv", "reason": "so"}, "qemu": "99", "cpus": 1, "memory": 2,
            "aes_hardware": true, "run_dir": "/run", "weaknesses": [], "colour": "red"
        });
        let read: super::super::HostDescription = serde_json::from_value(described).unwrap();
        assert_eq!(serde_json::to_value(read.accelerator.kind).unwrap(), "unknown");
        assert_eq!(read.accelerator.reason, "so");
    }
}
