//! The processes of a running VM: watching them, and ending them in the right order.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use jiff::Timestamp;
use serde_json::Value;
use tokio::sync::mpsc;
use tokio::time::timeout;
use vmseal_api::filter::FilterStatus;
use vmseal_api::host::{Notice, NoticeCode, StopReason, VmSpec};
use vmseal_api::problem::Problem;

use super::bitmap_files;
use super::guest_addresses::GuestAddresses;
use super::panicking::PanicDumping;
use super::queues::{Witness, stays_connected, unserved};
use super::sending::{Sending, SendingEvent};
use super::service::{Service, ServiceEvent, answers};
use super::stalled::{Stalled, full_pools};
use super::stream;
use super::suspend::Saving;
use super::thawing::Thawing;
use super::tpm::Tpm;
use crate::filter::{self, Control, FilterError};
use crate::hypervisor::console::Console;
use crate::hypervisor::guest_agent::GuestAgent;
use crate::hypervisor::network::addresses;
use crate::hypervisor::plug;
use crate::hypervisor::qemu;
use crate::hypervisor::qmp::{Event, Qmp, QmpError, ShutdownReason};
use crate::process::live::Live;
use crate::process::run_dir::ProcessDir;
use crate::process::run_record::Phase;
use crate::process::users::Slot;
use crate::process::{Exit, Process};
use crate::rules;

/// How long QEMU may take to exit by itself.
const QUIT_TIMEOUT: Duration = Duration::from_secs(5);

/// How long to wait for QEMU's last events when it has ended.
const LAST_EVENTS: Duration = Duration::from_secs(1);

/// How long to wait for the end of a core dump whose QEMU has ended: its file is removed then, or flushed where all of it is there. A disk
/// that spins up answers in ten seconds; where a datastore hangs, the VM does not wait for it.
const DUMP_ENDS: Duration = Duration::from_secs(20);

/// The processes, and the connections to them.
pub struct Running {
    pub directory: ProcessDir,
    pub qemu: Process,
    pub service: Service,
    pub qmp: Arc<Qmp>,
    pub events: mpsc::Receiver<Event>,
    pub console: Console,
    pub guest: GuestAgent,
    /// The addresses that its guest says it has.
    pub addresses: GuestAddresses,
    /// The thawing of what was frozen for a snapshot and is not known to be thawed.
    pub thawing: Thawing,
    pub control: Control,
    pub tpm: Tpm,
    /// Released when the processes are gone.
    pub slot: Arc<Slot>,
    /// QEMU's events about its end.
    pub qemu_end: QemuEnd,
    /// Whether QEMU was disconnected from the filter at the last check.
    pub left: bool,
    /// How QEMU has its devices, and whether its guest is paused.
    pub live: Live,
    /// The saving of the guest's memory, while the VM is being suspended.
    pub saving: Option<Saving>,
    /// The sending of the guest to another host.
    pub sending: Option<Sending>,
    /// Whether its guest has panicked and stands still.
    pub panicked: bool,
    /// Whether its guest sleeps (ACPI S3), as QEMU has said last.
    pub asleep: bool,
    /// Whether the filter that serves has begun while the guest stood still, or may have: QEMU does not know its queues
    /// ([`super::queues`]).
    pub begun_still: bool,
    /// Whether its filter, where it has none, has ended since the guest panicked, or may have.
    pub lost_still: bool,
    /// When devices have left ports of this QEMU.
    pub left_ports: BTreeMap<u32, Instant>,
    /// The writing of a core dump of a guest that has panicked.
    pub dumping: Option<PanicDumping>,
}

/// QEMU's events about its end.
#[derive(Clone, Debug, Default)]
pub struct QemuEnd {
    shutdown: Option<ShutdownReason>,
    panicked: bool,
}

impl QemuEnd {
    pub fn note(&mut self, event: Event) {
        match event {
            Event::Shutdown(reason) => self.shutdown = Some(reason),
            Event::GuestPanicked { .. } => self.panicked = true,
            Event::GuestAsleep
            | Event::GuestAwake
            | Event::Resumed
            | Event::DeviceDeleted(_)
            | Event::Other(_) => {}
        }
    }

    fn reason(&self) -> StopReason {
        match &self.shutdown {
            _ if self.panicked => StopReason::GuestPanicked,
            Some(ShutdownReason::Panic) => StopReason::GuestPanicked,
            Some(ShutdownReason::Guest) => StopReason::GuestShutdown,
            Some(ShutdownReason::Host | ShutdownReason::Other(_)) | None => StopReason::QemuDied,
        }
    }
}

/// An event of running processes.
#[derive(Debug)]
pub enum ProcessEvent {
    /// QEMU has ended.
    QemuEnded(Exit),
    /// The TPM has ended, and QEMU has not.
    TpmEnded(Exit),
    /// An event of the filter that serves the disks.
    Service(ServiceEvent),
    /// The guest's memory is in a file that has no name yet; or why it is not.
    MemorySaved(Result<(), Problem>),
    /// How far the guest is that is sent to another host.
    Sending(SendingEvent),
    /// The core dump of a guest that panicked is written or is not, for people.
    PanicDumped(String),
    /// The guest has said its addresses, or will not.
    Addresses,
    /// The guest has thawed its file systems, or has not.
    Thawed(Result<(), Problem>),
    /// QEMU reports something.
    Reported(Event),
    /// The connection to QEMU's monitor ended; QEMU ends, or must be ended.
    MonitorLost,
}

/// Waits until the guest's memory is saved. While nobody saves it, this never returns.
async fn saved(saving: &mut Option<Saving>) -> Result<(), Problem> {
    match saving {
        Some(saving) => saving.finished().await,
        None => std::future::pending().await,
    }
}

/// The next event of a guest that is sent. While nobody sends it, this never returns.
async fn sent(sending: &mut Option<Sending>) -> SendingEvent {
    match sending {
        Some(sending) => sending.next().await,
        None => std::future::pending().await,
    }
}

/// Waits until a core dump is written. While nobody writes one, this never returns.
async fn dumped(dumping: &mut Option<PanicDumping>) -> String {
    match dumping {
        Some(dumping) => dumping.finished().await,
        None => std::future::pending().await,
    }
}

/// The reason, and the text for operators.
pub type Ending = (StopReason, String);

impl Running {
    /// The next event.
    pub async fn next(&mut self) -> ProcessEvent {
        tokio::select! {
            // In this order: QEMU's events about its end come before its end.
            biased;
            event = self.events.recv() => event.map_or(ProcessEvent::MonitorLost, ProcessEvent::Reported),
            exit = self.qemu.ended() => ProcessEvent::QemuEnded(exit),
            saved = saved(&mut self.saving) => {
                self.saving = None;
                ProcessEvent::MemorySaved(saved)
            }
            event = sent(&mut self.sending) => ProcessEvent::Sending(event),
            dumped = dumped(&mut self.dumping) => {
                self.dumping = None;
                ProcessEvent::PanicDumped(dumped)
            }
            event = self.service.next() => ProcessEvent::Service(event),
            exit = self.tpm.ended() => ProcessEvent::TpmEnded(exit),
            () = self.addresses.answered() => ProcessEvent::Addresses,
            thawed = self.thawing.ended() => ProcessEvent::Thawed(thawed),
        }
    }

    /// Puts on record what runs, before it is made so.
    ///
    /// # Errors
    /// Those of the file system.
    pub fn write(&self, spec: &VmSpec) -> Result<(), Problem> {
        let slot = self.slot.number();
        self.directory.write(spec, slot, Phase::Running, &self.live).map_err(super::internal)
    }

    /// The filter that serves a guest which is about to be stopped.
    ///
    /// # Errors
    /// `internal`: there is none.
    pub fn witness(&self) -> Result<Witness, Problem> {
        let Service::Served(filter) = &self.service else {
            return Err(super::internal("its disks are not served"));
        };
        let filter = filter.observe().map_err(super::internal)?;
        Ok(Witness::new(filter, self.control.clone()))
    }

    /// Whether its guest stands still and no filter may begin: QEMU would have it work ([`super::queues`]). Where one has begun since the
    /// guest was paused, there is nothing to keep, and the next one may begin, too.
    ///
    /// A guest that has panicked needs none for its core dump. QEMU before 9.0 takes none for it, and without a filter the VM would be
    /// stopped before the core dump is whole.
    pub fn stands_still(&self) -> bool {
        self.saving.is_some() || self.panicked || self.live.paused && self.live.queues_known
    }

    /// Whether a paused guest has been saved, or all of it sent, and has not run since. QEMU does neither again before it has run: it has
    /// made its block devices inactive.
    ///
    /// # Errors
    /// QEMU's.
    pub async fn was_saved_paused(&self) -> Result<bool, QmpError> {
        if !self.live.paused {
            return Ok(false);
        }
        Ok(stream::stands_still(&self.qmp.execute("query-status", Value::Null).await?))
    }

    /// Whether QEMU takes another filter when a guest goes on that has panicked, if it needs one: before 9.0 it does not where the filter
    /// has ended meanwhile (docs/decisions/020).
    ///
    /// # Errors
    /// QEMU's.
    pub async fn may_be_served_again(&self) -> Result<bool, QmpError> {
        let lost = match &self.service {
            Service::Served(filter) => filter.has_ended(),
            Service::Down(None) => self.lost_still,
            // It ended while the guest ran.
            Service::Down(Some(_)) => false,
        };
        if !lost {
            return Ok(true);
        }
        plug::takes_filters_at_any_time(&self.qmp).await
    }

    /// The guest that had panicked goes on, or boots again.
    pub fn goes_on(&mut self) {
        self.live.panics.over();
        self.panicked = false;
        self.qemu_end.panicked = false;
    }

    /// The guest's file systems are not frozen for a snapshot any more, or it boots again. To be put on record.
    pub fn forget_freeze(&mut self) {
        self.live.frozen = None;
        self.thawing = Thawing::default();
        self.guest.reserve_freezing(false);
    }

    /// Asks the guest to shut down (ACPI).
    pub async fn ask_to_shut_down(&self) -> Result<(), crate::hypervisor::qmp::QmpError> {
        self.qmp.execute("system_powerdown", Value::Null).await.map(drop)
    }

    /// Ends everything after a process has ended by itself, and returns the reason. The VM's directory
    /// remains.
    pub async fn end_after_qemu(self, vm: &str, exit: Option<Exit>) -> Ending {
        let exit = match exit {
            Some(exit) => exit,
            None => self.qemu.end_within(QUIT_TIMEOUT).await,
        };
        self.after_qemu(vm, exit).await
    }

    /// Ends what is left when there is no filter and none will be started: the guest would wait for ever.
    pub async fn end_unserved(self, vm: &str, why: &str) -> Ending {
        self.qemu.kill();
        self.qemu.ended().await;
        self.tpm.end().await;
        if let Service::Down(Some(attempt)) = self.service {
            attempt.end().await;
        }
        let detail = format!("VM '{vm}' was stopped because {why}. {}", super::remedy(vm));
        (StopReason::FilterDied, detail)
    }

    async fn after_qemu(mut self, vm: &str, exit: Exit) -> Ending {
        let words = async {
            while let Some(event) = self.events.recv().await {
                self.qemu_end.note(event);
            }
        };
        // A monitor that stays open after its process has ended is of no use.
        let _ = timeout(LAST_EVENTS, words).await;
        let dumped = self.end_dumping().await;
        self.tpm.end().await;
        let (reason, directory) = (self.qemu_end.reason(), self.directory.clone());
        let stood_still = self.panicked;
        let flushed = self.end_filter().await;
        let remedy = super::remedy(vm);
        let mut detail = match reason {
            // Else QEMU has ended because of the panic, as it is told to.
            StopReason::GuestPanicked if stood_still => {
                let dumped = dumped.map(|dumped| format!("; {dumped}")).unwrap_or_default();
                format!(
                    "the guest of VM '{vm}' panicked and stood still{dumped}; then QEMU {exit}, {}. {remedy}",
                    directory.log_ends(qemu::NAME)
                )
            }
            StopReason::GuestShutdown => "the guest powered itself off".to_owned(),
            StopReason::GuestPanicked => {
                // Not the console's output: only users who may open the console may see that.
                format!("the guest of VM '{vm}' panicked. {remedy}")
            }
            _ => format!(
                "QEMU of VM '{vm}' {exit}, {}. {remedy}. If that repeats, the kernel's log of the host may say why",
                directory.log_ends(qemu::NAME)
            ),
        };
        if let Err(error) = flushed {
            detail = format!("{detail}. Then: {error}");
        }
        (reason, detail)
    }

    /// Waits for the end of a core dump that was being written when QEMU ended. Returns what became of it, for people.
    async fn end_dumping(&mut self) -> Option<String> {
        let mut dumping = self.dumping.take()?;
        match timeout(DUMP_ENDS, dumping.finished()).await {
            Ok(dumped) => Some(dumped),
            // What waits for the datastore may end yet.
            Err(_) => Some(
                "whether a core dump was written is not known: its datastore does not answer"
                    .to_owned(),
            ),
        }
    }

    /// Cuts the power. The VM's directory remains.
    pub async fn force_off(self) -> Ending {
        self.force_off_because("an operator cut the power").await
    }

    /// The same for this reason.
    pub async fn force_off_because(mut self, why: &str) -> Ending {
        if let Err(error) = self.qmp.execute("quit", Value::Null).await {
            tracing::info!(%error, "QEMU does not take 'quit' and is killed");
            self.qemu.kill();
        }
        self.qemu.end_within(QUIT_TIMEOUT).await;
        let dumped = self.end_dumping().await;
        self.tpm.end().await;
        let flushed = self.end_filter().await;
        let mut detail = why.to_owned();
        if let Err(error) = flushed {
            detail = format!("{detail}. Then: {error}");
        }
        if let Some(dumped) = dumped {
            detail = format!("{detail}; its guest had panicked, and {dumped}");
        }
        (StopReason::PoweredOff, detail)
    }

    /// Has the filter flush and exit. Where there is none, there is nothing to flush.
    async fn end_filter(self) -> Result<(), FilterError> {
        let filter = match self.service {
            Service::Served(filter) => filter,
            Service::Down(attempt) => {
                if let Some(attempt) = attempt {
                    attempt.end().await;
                }
                return Ok(());
            }
        };
        let result = self.control.shut_down().await;
        match &result {
            Ok(()) => {
                let ended = filter.end_within(filter::SHUTDOWN_TIMEOUT).await;
                // The host that has the guest marks elsewhere what it writes.
                if self.live.handed_over.is_none()
                    && let Err(error) = bitmap_files::note_all_marked(&self.directory)
                {
                    tracing::warn!(%error, "the dirty bitmaps of the VM are not kept");
                }
                ended
            }
            Err(error) => {
                tracing::warn!(%error, "the filter did not end cleanly");
                filter.kill();
                filter.ended().await
            }
        };
        result
    }

    /// Ends the filter that a cancelled attempt may have started. QEMU may be connecting to it until it answers; where it
    /// does not, that filter goes on.
    ///
    /// # Errors
    /// QEMU's, or those of reading the record.
    pub async fn end_filter_on_record(&mut self) -> Result<(), Problem> {
        let on_record = Process::adopt(&self.directory.process(filter::NAME));
        if let Some(filter) = on_record.map_err(super::internal)? {
            if let Err(error) = answers(&self.qmp).await {
                self.service = Service::Served(filter);
                return Err(super::internal(error));
            }
            filter.kill();
            filter.ended().await;
        }
        Ok(())
    }

    /// Begins to ask the guest for its addresses, by its agent, where it is time to.
    pub fn ask_for_addresses(&mut self, agent: GuestAgent, spec: &VmSpec) {
        let cards = addresses::cards(spec, &self.live.nics);
        // A guest that stands still does not answer.
        if !cards.is_empty() && !self.panicked && self.addresses.are_due() {
            self.addresses.ask(agent, Arc::clone(&self.qmp), cards);
        }
    }

    /// Notes the addresses of the guest that are known now.
    pub fn note_addresses(&mut self, spec: &VmSpec) {
        addresses::note(spec, &mut self.live.nics, self.addresses.said());
    }

    /// Truncates logs, looks after the TPM, and asks the filter for errors. A filter that lives but does not serve is killed, so
    /// that another one can replace it. A request of the guest may wait for storage for `stall`. `left` says that replicas may be left, as
    /// the guest is sent.
    pub async fn look_after(
        &mut self,
        spec: &VmSpec,
        (stalled, stall): (&mut Stalled, Duration),
        left: bool,
    ) -> Vec<Notice> {
        self.directory.bound_logs();
        self.note_addresses(spec);
        self.tpm.look_after(spec).await;
        let Service::Served(filter) = &self.service else { return Vec::new() };
        let Ok(status) = self.control.status().await else { return Vec::new() };
        let live = &self.live;
        let expected = |disk| live.disk(disk).is_some() && stays_connected(spec, disk);
        if let Some(what) = unserved(&status, expected, &mut self.left) {
            // QEMU may be connecting to it, and would not take another then (docs/decisions/020).
            if answers(&self.qmp).await.is_ok() {
                tracing::error!(vm = %spec.vm, what, "the filter does not serve and is ended");
                filter.kill();
            }
        }
        let mut notices = troubles(spec, &status, left);
        let full = full_pools(spec, &status, stall).await;
        notices.extend(stalled.notices(spec, (&status, &full), stall, Timestamp::now()));
        notices
    }
}

/// The notices for operators from a filter's status.
fn troubles(spec: &VmSpec, status: &FilterStatus, left: bool) -> Vec<Notice> {
    let last_error = disk_errors(spec, status);
    let behind = status.disks.iter().filter_map(|disk| {
        let known = spec.disks().find(|known| known.disk == disk.disk)?;
        let place = known.replica.as_ref()?;
        let detail = match &disk.replica {
            Some(replica) => {
                let path = place.datastore.location.path();
                let (name, path) = (&known.name, path.display());
                let is_complete = replica.lag_milliseconds.is_some() || replica.dirty_bytes == 0;
                match &replica.last_error {
                    Some(last_error) => format!(
                        "the replica of disk '{name}' is not kept up: {last_error}. Check that {path} is mounted, has room and works; the guest does not notice, and writing to the replica is tried again"
                    ),
                    None if !is_complete => format!(
                        "the disk '{name}' has no second copy yet: its replica in {path} is being copied, and is not complete (vmseal disk replica tells how far it is)"
                    ),
                    None => return None,
                }
            }
            None if left => rules::left_replica(known, place),
            None => rules::unreplicated(known, place),
        };
        Some(Notice { code: NoticeCode::ReplicaBehind, disk: Some(disk.disk), detail })
    });
    last_error.chain(behind).collect()
}

/// The disks that answer requests with errors: requests of the guest, or of a client of an exposed disk.
pub fn disk_errors<'a>(
    spec: &'a VmSpec,
    status: &'a FilterStatus,
) -> impl Iterator<Item = Notice> + 'a {
    status.disks.iter().filter_map(|disk| {
        let last_error = disk.last_error.as_ref()?;
        let known = spec.disks().find(|known| known.disk == disk.disk)?;
        let path = known.datastore.location.path();
        let detail = format!(
            "disk '{}' answers with errors: {last_error}. Check that {} is mounted, has room and works; the guest, if it runs, continues",
            known.name,
            path.display()
        );
        Some(Notice { code: NoticeCode::DiskErrors, disk: Some(disk.disk), detail })
    })
}

#[cfg(test)]
mod tests {
    use vmseal_api::filter::{DiskActivity, DiskCounters, DiskStatus};
    use vmseal_api::id::{DiskId, VmId};

    use vmseal_api::host::DatastoreLocation;

    use super::*;

    #[test]
    fn a_filter_that_does_not_serve_is_ended_and_one_that_qemu_has_just_left_is_looked_at_again() {
        let with = |state: DiskActivity| FilterStatus {
            replaces: true,
            retires: true,
            mirrors: true,
            completes: true,
            grows: true,
            channels: true,
            version: vmseal_api::filter::VERSION,
            pid: 1,
            vm: VmId::new(),
            disks: [DiskActivity::Connected, state]
                .map(|state| DiskStatus {
                    waits: None,
                    file: None,
                    disk: DiskId::new(),
                    state,
                    driver: None,
                    oldest_milliseconds: None,
                    fails: false,
                    counters: DiskCounters::default(),
                    last_error: None,
                    bitmaps: Vec::new(),
                    replica: None,
                    mirror: None,
                })
                .into(),
            confinement: None,
        };
        let unserved = |status: &FilterStatus, left: &mut bool| unserved(status, |_| true, left);
        let (mut left, well) = (false, with(DiskActivity::Connected));
        let failed = with(DiskActivity::Failed { message: "a queue's thread died".to_owned() });
        assert_eq!(unserved(&failed, &mut left).unwrap(), "a queue's thread died");
        assert_eq!(unserved(&well, &mut left), None);
        let idle = with(DiskActivity::Idle);
        assert_eq!(unserved(&idle, &mut left), None, "QEMU may be about to end");
        assert_eq!(unserved(&well, &mut left), None, "it has come back");
        assert_eq!(unserved(&idle, &mut left), None);
        assert!(unserved(&idle, &mut left).unwrap().contains("connection"));
        // A disk that has been unplugged since.
        left = true;
        assert_eq!(super::unserved(&idle, |_| false, &mut left), None);
    }

    #[test]
    fn only_a_replica_that_is_not_complete_or_not_kept_up_is_reported() {
        use vmseal_api::filter::ReplicaStatus;
        use vmseal_api::host::{DatastoreSpec, Device, DiskSpec};
        use vmseal_api::id::DatastoreId;
        use vmseal_api::replica::ReplicaPlace;
        let place = |path: &str| DatastoreSpec {
            datastore: DatastoreId::new(),
            location: DatastoreLocation::Dir { path: path.into() },
        };
        let replica = ReplicaPlace { datastore: place("/two"), bytes_per_second: 1 << 20 };
        let mut spec = crate::process::run_dir::tests::spec();
        spec.devices = vec![Device::Disk(DiskSpec {
            disk: DiskId::new(),
            name: "d".to_owned(),
            datastore: place("/one"),
            size: 4096,
            encrypted: false,
            allocation: Default::default(),
            role: Default::default(),
            limits: Default::default(),
            cache: None,
            replica: Some(replica),
            facts: None,
        })];
        let status = |replica| FilterStatus {
            replaces: true,
            retires: true,
            mirrors: true,
            completes: true,
            grows: true,
            channels: true,
            version: vmseal_api::filter::VERSION,
            pid: 1,
            vm: spec.vm,
            disks: vec![DiskStatus {
                waits: None,
                file: None,
                disk: spec.disk_at(0).unwrap().disk,
                state: DiskActivity::Connected,
                driver: None,
                oldest_milliseconds: None,
                fails: false,
                counters: DiskCounters::default(),
                last_error: None,
                bitmaps: Vec::new(),
                replica,
                mirror: None,
            }],
            confinement: None,
        };
        let with = |last_error: Option<&str>| {
            let last_error = last_error.map(str::to_owned);
            Some(ReplicaStatus { dirty_bytes: 5, lag_milliseconds: None, last_error })
        };
        let late = ReplicaStatus { dirty_bytes: 5, lag_milliseconds: Some(9), last_error: None };
        assert_eq!(troubles(&spec, &status(Some(late)), false), []);
        for (replica, left, word) in [
            (with(Some("no room")), false, "no room"),
            (with(None), true, "no second copy yet"),
            (None, false, "stop and start the VM"),
            (None, true, "sent to another host"),
        ] {
            let told = troubles(&spec, &status(replica), left);
            let [Notice { code: NoticeCode::ReplicaBehind, disk: Some(_), detail }] = &told[..]
            else {
                panic!("{told:?}")
            };
            assert!(detail.contains(word) && detail.contains("/two"), "{detail}");
        }
    }

    #[test]
    fn the_reason_is_qemus_last_one_and_a_panic_always_counts() {
        let after = |events: &[Event]| {
            let mut words = QemuEnd::default();
            events.iter().cloned().for_each(|event| words.note(event));
            words.reason()
        };
        let guest = Event::Shutdown(ShutdownReason::Guest);
        assert_eq!(after(&[]), StopReason::QemuDied);
        assert_eq!(after(&[Event::Other("RTC_CHANGE".into()), guest]), StopReason::GuestShutdown);
        let panic = Event::Shutdown(ShutdownReason::Panic);
        assert_eq!(after(&[panic]), StopReason::GuestPanicked);
        let host = Event::Shutdown(ShutdownReason::Host);
        assert_eq!(
            after(&[Event::GuestPanicked { stays: false }, host.clone()]),
            StopReason::GuestPanicked
        );
        assert_eq!(after(&[host]), StopReason::QemuDied);
    }
}
