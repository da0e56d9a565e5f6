//! What the two hosts of a migration say to each other, and what both ask of QEMU.
//!
//! ```text
//! source                                       destination
//!   ├─ Machine: what the guest runs as ─────────►│  makes the disks that are copied
//!   │◄──────────────────── Made (or Refused) ────┤  where disks have layers, or snapshots keep memory
//!   │◄──────────────────────────────── Part ─────┤  a file that nobody writes can be written
//!   ├─ NBD, or what is sealed, a part of the ───►│  writes it; the next Part, until all are there
//!   │  disk's connection                         │
//!   │◄───────────────── Prepared (or Refused) ───┤
//!   ├─ NBD, a connection for each of them ──────►│  writes them
//!   ├─ Copied: the copies lack little ──────────►│  starts QEMU, which waits
//!   │◄─────────────────── Ready (or Refused) ────┤
//!   ├─ QEMU's stream, a connection ─────────────►│  loads it
//!   │◄──────────────────────────────── Loaded ───┤  where disks are copied when the guest stands still
//!   ├─ NBD, a connection for each of those ─────►│  writes them
//!   ├─ the ends of NBD: the copies are complete ►│
//! ```
//! Where no disk is copied, nothing is said of that.
//!
//! Of a VM that is off all disks are copied, one after the other, and that is all:
//!
//! ```text
//!   ├─ AtRest: its disks ───────────────────────►│  makes them; Made and Part as above
//!   │◄─────────────────── Prepared (or Refused) ─┤
//!   │◄──────────────────────────────── Part ─────┤  a disk can be written
//!   ├─ NBD, the disk's connection, to its end ──►│  writes it; the next Part, until all are there
//! ```
//! From then on each host waits for the control plane ([`vmseal_api::host::SendJob`], [`vmseal_api::host::ReceiveJob`]).

use std::collections::BTreeMap;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::time::Duration;

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;
use serde_json::{Value, json};
use vmseal_api::host::{MigrationProgress, MigrationSession, migration_info};
use vmseal_api::id::{DiskId, MigrationId, SnapshotId, VmId};
use vmseal_api::migration::DOWNTIME_MAX;
use vmseal_api::problem::{ErrorCode, Problem};
use vmseal_secret::derive::migrated_disk_key;
use vmseal_secret::wrap::{unwrap, wrap};
use vmseal_secret::{DEK_LEN, SecretBytes};

use super::disks_meter::DisksMeter;
use super::sealing_meter::SealingMeter;
use super::{Shared, internal};
use crate::hypervisor::qmp::{Qmp, QmpError};
use crate::migration::placement::Placement;
use crate::migration::transport::{
    Bridge, Carrier, Cipher, Compressed, Control, Handle, Part, Session, Spec, TransportError,
};
use crate::process::run_record::Record;
use crate::storage::home::Beside;
use crate::storage::layers::Tree;
use crate::storage::memory_transit::MemoryTransit;

/// How long the destination may take to start QEMU, which may have to wait for other VMs that start.
pub const PREPARE_TIMEOUT: Duration = Duration::from_secs(120);

/// How long a message may take that the other host's kernel does not take at once.
const SEND_TIMEOUT: Duration = Duration::from_secs(10);

/// The connection that is the control channel.
const CONTROL_STREAM: u16 = 0;

/// The connection that carries QEMU's stream.
const MEMORY_STREAM: u16 = 1;

/// The connection of the first disk that is copied; one for each follows.
const DISK_STREAM: u16 = 2;

/// How long the end of what is sent may take when the guest stands still, beyond what the guest is to: more than the source allows
/// itself for it ([`super::standstill`], 40 s in which its filter finishes, 30 s for the ends of the connections). Without it an attacker
/// between the hosts could hold back that end alone, and with it the guest.
const END_TIMEOUT: Duration = Duration::from_secs(150);

/// The longest refusal that is read, in characters.
const REFUSAL_MAX: usize = 2000;

/// A message on the control channel of a session.
#[derive(Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Message {
    /// What the guest runs as.
    Machine {
        /// The type of the machine, with its version: `pc-q35-7.2`.
        machine: String,
        /// What it is, and how QEMU has its devices, as a run record.
        record: Box<RawValue>,
        /// The disks that are copied, in the order of their connections.
        #[serde(default)]
        copies: Vec<DiskId>,
        /// What goes before the disks, in the same order; none where nothing does.
        #[serde(default, skip_serializing_if = "Vec::is_empty")]
        before: Vec<SentBefore>,
        /// How long the guest is to stand still at most; 0 of an earlier agent, which does not say it.
        #[serde(default)]
        downtime_milliseconds: u32,
    },
    /// The VM is off, and all of its disks are copied.
    AtRest {
        /// They, in the order of their connections.
        copies: Vec<DiskId>,
        /// What goes before the disks, in the same order; none where nothing does.
        #[serde(default, skip_serializing_if = "Vec::is_empty")]
        before: Vec<SentBefore>,
    },
    /// The disks are made, and what goes before them can be written, part by part.
    Made {
        /// As those of `Prepared`.
        keys: Vec<Option<String>>,
    },
    /// The next part can be written, or the next disk of a VM that is off.
    Part,
    /// The disks that are copied can be written.
    Prepared {
        /// The DEK of each, in the same order ([`wrap_dek`]); none for a plain one.
        keys: Vec<Option<String>>,
    },
    /// The copies lack little.
    Copied,
    /// QEMU waits for its stream.
    Ready,
    /// The memory is loaded, and the disks can be written that are copied when the guest stands still.
    Loaded,
    /// It cannot be received.
    Refused {
        /// Why.
        why: String,
    },
}

/// What goes before a disk that is copied, on the same connection: nobody writes it.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SentBefore {
    /// The memory that these snapshots keep beside it, one part each.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub memories: Vec<SnapshotId>,
    /// Whether the memory of the VM, which is suspended, follows these.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub own_memory: bool,
    /// Whether what the VM's TPM keeps follows, whose key the disk has: of a VM that is off or suspended, to a host that has another key
    /// of it. Else it comes with the guest's memory.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub tpm: bool,
    /// Its layers: the image is a part, and each layer that nobody writes. The active one is copied as the disk.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tree: Option<Tree>,
}

impl SentBefore {
    /// Whether that is nothing.
    pub fn is_nothing(&self) -> bool {
        self.memories.is_empty() && !self.own_memory && !self.tpm && self.tree.is_none()
    }

    /// The memories that go before it, in their order: one part each.
    pub fn beside(&self) -> impl Iterator<Item = Beside> + use<'_> {
        let of_snapshots = self.memories.iter().copied().map(Beside::SnapshotMemory);
        of_snapshots.chain(self.own_memory.then_some(Beside::Memory))
    }
}

impl Message {
    /// What the guest of a record runs as.
    ///
    /// # Errors
    /// `internal`: a path that is not UTF-8.
    pub fn machine(
        machine: String,
        record: &Record,
        (copies, before): (Vec<DiskId>, Vec<SentBefore>),
        downtime_milliseconds: u32,
    ) -> Result<Self, Problem> {
        let text = record.to_text().map_err(internal)?;
        let text = String::from_utf8(text).map_err(internal)?;
        let record = RawValue::from_string(text).map_err(internal)?;
        Ok(Self::Machine { machine, record, copies, before, downtime_milliseconds })
    }
}

/// The DEK of a disk's copy as the hosts tell it to each other: under a key that both derive from what [`copy_secret`] gives.
///
/// # Errors
/// `internal`.
pub fn wrap_dek(
    kek: &SecretBytes,
    migration: MigrationId,
    disk: DiskId,
    dek: &SecretBytes,
) -> Result<String, Problem> {
    let key = migrated_disk_key(kek, *migration.0.as_bytes(), *disk.0.as_bytes());
    let wrapped = wrap(&key.map_err(internal)?, dek).map_err(internal)?;
    Ok(STANDARD.encode(wrapped))
}

/// What [`wrap_dek`] has wrapped.
///
/// # Errors
/// `internal`: the other host has another secret.
pub fn unwrap_dek(
    kek: &SecretBytes,
    migration: MigrationId,
    disk: DiskId,
    wrapped: &str,
) -> Result<SecretBytes, Problem> {
    let key = migrated_disk_key(kek, *migration.0.as_bytes(), *disk.0.as_bytes());
    let wrapped = STANDARD.decode(wrapped).map_err(internal)?;
    let dek = unwrap(&key.map_err(internal)?, &wrapped).map_err(internal)?;
    if dek.len() == DEK_LEN { Ok(dek) } else { Err(unexpected()) }
}

/// What the other host should not have said.
pub fn unexpected() -> Problem {
    internal("the other host of the migration says something unexpected: is its vmseal newer?")
}

/// The other host's refusal, for people. That host says the same to its server, with its code.
pub fn refused(why: &str) -> Problem {
    let why: String = why.chars().filter(|c| !c.is_control()).take(REFUSAL_MAX).collect();
    let detail = format!("the other host cannot receive it: {why}");
    Problem { of_other_host: true, ..Problem::new(ErrorCode::WrongState, detail) }
}

/// What the transport is told of a session.
///
/// # Errors
/// `wrong-state` where its key was sealed to an earlier run of this agent; `invalid-request`.
pub fn session_of(shared: &Shared, vm: VmId, session: &MigrationSession) -> Result<Spec, Problem> {
    let info = migration_info(vm, session.migration);
    let key: SecretBytes = shared.key_box.open_migration(&info, &session.key)?;
    let cipher = if session.encrypted { Cipher::Aes256Gcm } else { Cipher::None };
    Spec::new(session.migration.0, key, session.nonce, session.streams, cipher).map_err(internal)
}

/// What the keys of the copies are wrapped under a key of, as the hosts tell them to each other: the VM's KEK, or the key of the session
/// where the hosts have different KEKs; none for a VM that has no key.
///
/// # Errors
/// As [`session_of`]; `invalid-request` for a session that is not encrypted.
pub fn copy_secret(
    shared: &Shared,
    vm: VmId,
    session: &MigrationSession,
    kek: Option<&SecretBytes>,
) -> Result<Option<SecretBytes>, Problem> {
    let Some(kek) = kek else { return Ok(None) };
    if !session.apart {
        return kek.try_clone().map(Some).map_err(internal);
    }
    if !session.encrypted {
        let what = "must be true where the hosts have different keys";
        return Err(Problem::invalid("begin.session.encrypted", what));
    }
    let info = migration_info(vm, session.migration);
    shared.key_box.open_migration(&info, &session.key).map(Some)
}

/// What the memory of snapshots is sealed under on its way, where the hosts have different KEKs; `told_under` is what [`copy_secret`] gives.
///
/// # Errors
/// `internal`: there is no memory for it.
pub fn memory_transit(
    session: &MigrationSession,
    told_under: Option<&SecretBytes>,
) -> Result<Option<Arc<MemoryTransit>>, Problem> {
    let Some(secret) = told_under.filter(|_| session.apart) else { return Ok(None) };
    let secret = secret.try_clone().map_err(internal)?;
    Ok(Some(Arc::new(MemoryTransit::new(secret, session.migration))))
}

/// A session, with its first stream as the control channel. Dropped, it ends.
pub struct Link {
    session: Session,
    control: Control,
    /// The connections that have carried parts, by number.
    carriers: BTreeMap<u16, Carrier>,
}

impl Link {
    /// Of a session whose streams are all there.
    ///
    /// # Errors
    /// `internal`: it has failed.
    pub fn of(mut session: Session) -> Result<Self, Problem> {
        let first = session.take(CONTROL_STREAM).ok_or_else(|| internal("no control channel"))?;
        let control = Control::new(first).map_err(lost)?;
        Ok(Self { session, control, carriers: BTreeMap::new() })
    }

    /// Tells the other host something.
    ///
    /// # Errors
    /// Those of the connection.
    pub async fn send(&mut self, message: &Message) -> Result<(), Problem> {
        self.control.send(message, SEND_TIMEOUT).await.map_err(lost)
    }

    /// Hears what the other host says.
    ///
    /// # Errors
    /// Those of the connection, also where it says nothing for so long.
    pub async fn receive(&mut self, within: Duration) -> Result<Message, Problem> {
        self.control.receive(within).await.map_err(lost)
    }

    /// Carries QEMU's stream, of which this may be compressed. What of it comes is placed in memory, if that can be.
    ///
    /// # Errors
    /// Those of the connection.
    pub fn carry_memory(
        &mut self,
        local: UnixStream,
        compression: Compressed,
        placement: Option<Placement>,
    ) -> Result<Bridge, Problem> {
        let carrier = self.carrier(MEMORY_STREAM)?.compressing(compression);
        carrier.placing(placement).last(local).map_err(lost)
    }

    /// Carries NBD of the disk with this place in the order of those that are copied.
    ///
    /// # Errors
    /// Those of the connection.
    pub fn carry_disk(&mut self, place: usize, local: UnixStream) -> Result<Bridge, Problem> {
        self.carrier(disk_stream(place)?)?.last(local).map_err(lost)
    }

    /// Carries a part that goes before the disk with this place, on the disk's connection. It is given back ([`Link::carried`])
    /// when that has ended.
    ///
    /// # Errors
    /// Those of the connection.
    pub fn carry_part(&mut self, place: usize, local: UnixStream) -> Result<Part, Problem> {
        self.carrier(disk_stream(place)?)?.part(local).map_err(lost)
    }

    /// Waits until a part has ended.
    ///
    /// # Errors
    /// Those of the connection.
    pub async fn carried(&mut self, place: usize, part: Part) -> Result<(), Problem> {
        let carrier = part.done().await.map_err(lost)?;
        self.carriers.insert(disk_stream(place)?, carrier);
        Ok(())
    }

    fn carrier(&mut self, stream: u16) -> Result<Carrier, Problem> {
        if let Some(carrier) = self.carriers.remove(&stream) {
            return Ok(carrier);
        }
        let taken = self.session.take(stream);
        let taken = taken.ok_or_else(|| internal(format!("there is no connection {stream}")))?;
        Carrier::new(taken).map_err(lost)
    }

    /// Waits until the session has failed.
    pub fn failed(&self) -> impl Future<Output = Problem> + use<> {
        let handle = self.session.handle();
        async move { lost(handle.failed().await) }
    }

    /// What steers the session.
    pub fn handle(&self) -> Handle {
        self.session.handle()
    }

    /// What measures the work of its threads.
    pub fn sealing_meter(&self) -> SealingMeter {
        SealingMeter::new(self.session.handle())
    }

    /// What measures how its disks are sent, from now on.
    pub fn disks_meter(&self) -> DisksMeter {
        DisksMeter::begin(self.session.handle(), usize::from(DISK_STREAM))
    }

    /// Ends the control channel. All has been carried.
    pub async fn finish(self) {
        // Nothing depends on this end: the end of the memory's stream says that all of it has come.
        if let Err(error) = self.control.finish(SEND_TIMEOUT).await {
            tracing::debug!(%error, "the control channel of a migration has not ended as it should");
        }
    }
}

/// The connection of the disk with this place in the order of those that are copied.
fn disk_stream(place: usize) -> Result<u16, Problem> {
    let place = u16::try_from(place).map_err(internal)?;
    Ok(DISK_STREAM.saturating_add(place))
}

/// How long the end of what is sent may take, where the source says that its guest is to stand still for so long at most. Nobody can ask
/// for more than [`DOWNTIME_MAX`], and a source that says so is not believed.
pub fn end_timeout(downtime_milliseconds: u32) -> Duration {
    END_TIMEOUT + Duration::from_millis(downtime_milliseconds.min(DOWNTIME_MAX).into())
}

/// What comes at the end of what is sent, while the guest stands still.
///
/// # Errors
/// Its own; `internal`: it does not come.
pub async fn in_time<T>(
    limit: Duration,
    end: impl Future<Output = Result<T, Problem>>,
) -> Result<T, Problem> {
    let late = || {
        let seconds = limit.as_secs();
        internal(format!(
            "the connection to the other host: the end of what it sends has not come within {seconds} s"
        ))
    };
    tokio::time::timeout(limit, end).await.unwrap_or_else(|_| Err(late()))
}

/// The problem of a connection between two hosts.
pub fn lost(error: TransportError) -> Problem {
    let of_other_host = error.is_of_other_host();
    let problem = internal(format!("the connection to the other host: {error}"));
    Problem { of_other_host, ..problem }
}

/// Why QEMU's stream has failed: QEMU only finds its socket closed where the session has failed before.
pub fn why_failed(session: &Handle, said: Problem) -> Problem {
    match session.failure() {
        Some(error) if !error.is_of_this_end() => lost(error),
        _ => said,
    }
}

/// The type of a QEMU's machine, with its version.
///
/// # Errors
/// QEMU's.
pub async fn machine_of(qmp: &Qmp) -> Result<String, QmpError> {
    let question = json!({"path": "/machine", "property": "type"});
    let machine = qmp.execute("qom-get", question).await?;
    Ok(machine.as_str().unwrap_or_default().trim_end_matches("-machine").to_owned())
}

/// Sets what both QEMUs must agree on. Guests are slowed down where they change memory faster than it can be sent.
///
/// # Errors
/// QEMU's.
pub async fn set_capabilities(qmp: &Qmp) -> Result<(), QmpError> {
    let on = |name: &str| json!({"capability": name, "state": true});
    let arguments = json!({"capabilities": [on("events"), on("auto-converge")]});
    qmp.execute("migrate-set-capabilities", arguments).await.map(drop)
}

/// How far a QEMU is that sends.
pub fn progress_of(state: &Value) -> MigrationProgress {
    let number = |value: &Value| value.as_f64().map_or(0, |number| number as u64);
    let ram = &state["ram"];
    let page = number(&ram["page-size"]).max(1);
    let downtime =
        if state["downtime"].is_null() { &state["expected-downtime"] } else { &state["downtime"] };
    MigrationProgress {
        passes: number(&ram["dirty-sync-count"]),
        remaining: number(&ram["remaining"]),
        sent: number(&ram["transferred"]),
        dirty_rate: number(&ram["dirty-pages-rate"]).saturating_mul(page),
        rate: ram["mbps"].as_f64().map_or(0, |mbps| (mbps * 1e6 / 8.0) as u64),
        downtime_milliseconds: number(downtime),
        throttle: number(&state["cpu-throttle-percentage"]),
        all_sent: state["status"] == "completed",
        sealing: None,
        // 0 for a moment when all is sent.
        memory_milliseconds: Some(number(&state["total-time"])).filter(|time| *time > 0),
        disks: None,
        placed: None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::hypervisor::qmp::recording;

    #[tokio::test]
    async fn qemu_is_told_to_slow_guests_down_that_change_memory_faster_than_it_is_sent() {
        let (qmp, monitor) = recording::connect().await;
        set_capabilities(&qmp).await.unwrap();
        drop(qmp);
        let taken = monitor.await.unwrap();
        let sets = |it: &&Value| it["execute"] == "migrate-set-capabilities";
        let set: Vec<_> = taken.iter().filter(sets).collect();
        let [set] = &set[..] else { panic!("{taken:?}") };
        let on = json!({"capability": "auto-converge", "state": true});
        let capabilities = set["arguments"]["capabilities"].as_array().unwrap();
        assert!(capabilities.contains(&on), "{set}");
    }

    #[test]
    fn a_data_key_is_told_under_the_vms_key_for_one_disk_of_one_migration() {
        let random = |length| SecretBytes::random(length).unwrap();
        let (kek, dek) = (random(vmseal_secret::KEK_LEN), random(DEK_LEN));
        let (migration, disk) = (MigrationId::new(), DiskId::new());
        let told = wrap_dek(&kek, migration, disk, &dek).unwrap();
        assert_eq!(unwrap_dek(&kek, migration, disk, &told).unwrap(), dek);
        let other = random(vmseal_secret::KEK_LEN);
        assert!(unwrap_dek(&other, migration, disk, &told).is_err());
        assert!(unwrap_dek(&kek, MigrationId::new(), disk, &told).is_err());
        assert!(unwrap_dek(&kek, migration, DiskId::new(), &told).is_err());
        let short = wrap_dek(&kek, migration, disk, &random(32)).unwrap();
        assert!(unwrap_dek(&kek, migration, disk, &short).is_err());
        assert!(unwrap_dek(&kek, migration, disk, "no base64!").is_err());
    }

    #[test]
    fn the_end_may_take_longer_where_the_guest_may_stand_still_for_longer() {
        assert_eq!(end_timeout(0), END_TIMEOUT);
        assert_eq!(end_timeout(2_000), END_TIMEOUT + Duration::from_secs(2));
        let most = Duration::from_millis(DOWNTIME_MAX.into());
        assert_eq!(end_timeout(u32::MAX), END_TIMEOUT + most, "it is not believed");
        let earlier = json!({"machine": {"machine": "pc-q35-7.2", "record": {}}});
        let read: Message = serde_json::from_str(&earlier.to_string()).unwrap();
        assert!(matches!(read, Message::Machine { downtime_milliseconds: 0, .. }));
    }

    #[test]
    fn how_far_a_migration_is_is_read_from_what_qemu_says() {
        let state = json!({
            "status": "active", "expected-downtime": 300, "cpu-throttle-percentage": 20,
            "total-time": 1500,
            "ram": {"remaining": 5, "transferred": 7, "dirty-sync-count": 2, "dirty-pages-rate": 3,
                    "page-size": 4096, "mbps": 8.0}
        });
        let expected = MigrationProgress {
            passes: 2,
            remaining: 5,
            sent: 7,
            dirty_rate: 12288,
            rate: 1_000_000,
            downtime_milliseconds: 300,
            throttle: 20,
            all_sent: false,
            sealing: None,
            memory_milliseconds: Some(1500),
            disks: None,
            placed: None,
        };
        assert_eq!(progress_of(&state), expected);
        assert_eq!(progress_of(&json!({"status": "setup"})), MigrationProgress::default());
        let done = json!({"status": "completed", "downtime": 12, "expected-downtime": 300, "total-time": 0});
        let done = progress_of(&done);
        assert_eq!((done.downtime_milliseconds, done.all_sent), (12, true));
        assert_eq!(done.memory_milliseconds, None, "it has not measured it yet");
    }
}
