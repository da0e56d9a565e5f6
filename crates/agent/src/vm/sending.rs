//! Sending a running guest's memory to another host. See [`super::migration`].
//!
//! ```text
//! connect ─► Machine ─► (its disks are copied) ─► Ready ─► QEMU's stream, while the guest runs ─► the guest stands still, the rest ─►
//! all of its memory is sent
//! ```
//! Dropped before that, the guest goes on. Then its owner completes the copies of its disks.

use std::num::NonZeroU64;
use std::sync::Arc;
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use tokio::sync::watch;
use tokio::task::JoinHandle;
use vmseal_api::host::MigrationProgress;
use vmseal_api::id::MigrationId;
use vmseal_api::problem::Problem;

use super::departing_disks::DepartingDisks;
use super::departing_parts;
use super::disks_meter::DisksMeter;
use super::internal;
use super::migration::{
    Link, Message, PREPARE_TIMEOUT, lost, machine_of, progress_of, refused, set_capabilities,
    unexpected, why_failed,
};
use super::standstill::{StandStill, until_held};
use super::stream::{BANDWIDTH_MAX, completed, pass, sockets, stands_still, take_back};
use super::to_copy::ToCopy;
use crate::hypervisor::qmp::{COMMAND_TIMEOUT, Qmp, QmpError};
use crate::migration::figures;
use crate::migration::transport::{self, Compressed, Handle, Spec};
use crate::process::run_record::Record;

/// The least time between two reports of how far it is: each goes to the server.
const REPORT_INTERVAL: Duration = Duration::from_millis(100);

/// The least that the destination may take to load what it has got, while the guest stands still.
const LOADED_TIMEOUT: Duration = Duration::from_secs(20);

/// The sending of a guest to another host. Dropped, it ends.
pub struct Sending {
    work: JoinHandle<Result<Sent, Problem>>,
    progress: watch::Receiver<MigrationProgress>,
    /// The highest rate, in bytes a second.
    rate: watch::Sender<Option<u64>>,
}

/// What has become of it.
#[derive(Debug)]
pub enum SendingEvent {
    /// It is so far.
    Progress(MigrationProgress),
    /// All of its memory is sent, and the guest stands still; or why not.
    Ended(Result<Sent, Problem>),
}

/// The connection to the other host when the memory is sent.
pub struct Sent {
    link: Link,
    /// The disks that are copied.
    pub disks: Option<Box<DepartingDisks>>,
    /// When QEMU had sent all of the memory; none where it does not say how long that took.
    pub all_sent: Option<Instant>,
    /// How far it was when all of the memory was sent, and what counts the disks; none where none are copied.
    counted: Option<Box<(MigrationProgress, DisksMeter)>>,
    /// How long its guest may stand still.
    still: StandStill,
}

impl std::fmt::Debug for Sent {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.debug_struct("Sent").finish_non_exhaustive()
    }
}

impl Sent {
    /// The guest stands still: waits until its disks' copies lack little, and copies what is copied then.
    ///
    /// # Errors
    /// Those of the connection and the filters.
    pub async fn copy_still(&mut self) -> Result<(), Problem> {
        if let Some(disks) = &self.disks {
            disks.until_complete_soon(&self.still).await?;
        }
        let Some(disks) = self.disks.as_mut().filter(|disks| disks.has_still()) else {
            return Ok(());
        };
        match self.link.receive(self.still.limit(LOADED_TIMEOUT, 0)).await? {
            Message::Loaded => disks.copy_still(&self.still).await,
            Message::Refused { why } => Err(refused(&why)),
            _ => Err(unexpected()),
        }
    }

    /// The guest's filter has let its disks go. Returns how far it was, with all that was sent of disks, where some were copied.
    ///
    /// # Errors
    /// Those of the connection: the other host may not have all of the copied disks.
    pub async fn end(self) -> Result<Option<MigrationProgress>, Problem> {
        if let Some(disks) = self.disks {
            disks.end(&self.still).await?;
        }
        let progress = self.counted.map(|counted| {
            let (progress, meter) = *counted;
            MigrationProgress { disks: Some(meter.sent()), ..progress }
        });
        self.link.finish().await;
        Ok(progress)
    }
}

/// What is sent.
pub struct ToSend {
    pub session: Spec,
    pub to: std::net::SocketAddr,
    pub bytes_per_second: Option<u64>,
    pub guest: GuestToSend,
}

/// The guest that is sent.
pub struct GuestToSend {
    /// The longest that it is to stand still while the rest of its memory is sent.
    pub downtime_milliseconds: u32,
    /// Whether what QEMU sends is compressed where that is faster.
    pub compresses: bool,
    pub record: Record,
    pub qmp: Arc<Qmp>,
    pub migration: MigrationId,
    /// The disks that the other host gets copies of; none without any.
    pub copies: Option<ToCopy>,
}

impl Sending {
    /// Begins.
    pub fn begin(what: ToSend) -> Self {
        let (report, progress) = watch::channel(MigrationProgress::default());
        let (rate, rates) = watch::channel(what.bytes_per_second);
        let work = tokio::spawn(vmseal_api::request_id::inherit(send(what, rates, report)));
        Self { work, progress, rate }
    }

    /// Sends at most so many bytes a second from now on.
    pub fn set_rate(&self, bytes_per_second: Option<u64>) {
        self.rate.send_replace(bytes_per_second);
    }

    /// The next event.
    pub async fn next(&mut self) -> SendingEvent {
        tokio::select! {
            // What was sent last is told before the end.
            biased;
            Ok(()) = self.progress.changed() => {
                SendingEvent::Progress(*self.progress.borrow_and_update())
            }
            ended = &mut self.work => {
                SendingEvent::Ended(ended.unwrap_or_else(|error| Err(internal(error))))
            }
        }
    }
}

impl Drop for Sending {
    fn drop(&mut self) {
        self.work.abort();
    }
}

/// Why QEMU does not send.
fn refuses(error: QmpError) -> Problem {
    internal(format!("QEMU does not send its guest: {error}"))
}

async fn send(
    what: ToSend,
    rates: watch::Receiver<Option<u64>>,
    report: watch::Sender<MigrationProgress>,
) -> Result<Sent, Problem> {
    let _counted = figures::OUT.begin();
    let machine = machine_of(&what.guest.qmp).await.map_err(refuses)?;
    let session = transport::connect(what.session, what.to).await.map_err(lost)?;
    let link = Link::of(session)?;
    let handle = link.handle();
    let paced = keep_rate(rates, &handle, &what.guest);
    let sent = tokio::select! {
        sent = send_over(link, &what.guest, machine, report) => sent?,
        failed = paced => return Err(refuses(failed)),
    };
    // The guest stands still, and waits for what is copied from now on.
    handle.set_rate(None);
    Ok(sent)
}

/// Has the session and QEMU send at the rate of now; ends when QEMU refuses one.
async fn keep_rate(
    mut rates: watch::Receiver<Option<u64>>,
    session: &Handle,
    guest: &GuestToSend,
) -> QmpError {
    loop {
        let rate = *rates.borrow_and_update();
        session.set_rate(rate.and_then(NonZeroU64::new));
        // Else QEMU would count on more when it estimates how long the guest would stand still. Of what is compressed it may send
        // more than the rate.
        let of_qemu = rate.filter(|_| !guest.compresses).unwrap_or(BANDWIDTH_MAX);
        let parameters = json!({"max-bandwidth": of_qemu});
        let limit = silence(&StandStill::of(guest.downtime_milliseconds));
        let set = guest.qmp.execute_within("migrate-set-parameters", parameters, limit);
        if let Err(error) = set.await {
            return error;
        }
        if rates.changed().await.is_err() {
            // Who would change it is gone.
            std::future::pending::<()>().await;
        }
    }
}

async fn send_over(
    mut link: Link,
    guest: &GuestToSend,
    machine: String,
    report: watch::Sender<MigrationProgress>,
) -> Result<Sent, Problem> {
    let qmp = &guest.qmp;
    let copied = guest.copies.as_ref().map(ToCopy::told).unwrap_or_default();
    let still_for = guest.downtime_milliseconds;
    link.send(&Message::machine(machine, &guest.record, copied, still_for)?).await?;
    let (disks, meter) = match &guest.copies {
        Some(copies) => {
            let mut meter = link.disks_meter();
            let disks = copy_disks(copies, guest.migration, &mut link, (&report, &meter)).await?;
            // The disks' time ends here: the start of QEMU at the other host does not count.
            meter.memory_follows();
            (Some(Box::new(disks)), Some(meter))
        }
        None => (None, None),
    };
    match link.receive(PREPARE_TIMEOUT).await? {
        Message::Ready => {}
        Message::Refused { why } => return Err(refused(&why)),
        _ => return Err(unexpected()),
    }
    set_capabilities(qmp).await.map_err(refuses)?;
    let parameters = json!({"downtime-limit": guest.downtime_milliseconds});
    qmp.execute("migrate-set-parameters", parameters).await.map_err(refuses)?;
    let (theirs, ours) = sockets()?;
    let name = pass(qmp, "migration", theirs).await.map_err(refuses)?;
    let compression = if guest.compresses { Compressed::Sent } else { Compressed::Never };
    let carried = link.carry_memory(ours, compression, None)?;
    let began = Instant::now();
    if let Err(error) = qmp.execute("migrate", json!({"uri": format!("fd:{name}")})).await {
        take_back(qmp, &name).await;
        return Err(refuses(error));
    }
    let (mut sealing, mut told) = (link.sealing_meter(), None::<Instant>);
    let (mut still, mut rate) = (StandStill::of(guest.downtime_milliseconds), 0);
    let (mut took, mut all_sent) = (None, None);
    let tell = |state: &Value| {
        let progress = progress_of(state);
        all_sent = sent_at(&progress, began);
        // Not each answer has one, nor a time.
        rate = if progress.rate > 0 { progress.rate } else { rate };
        took = progress.memory_milliseconds.or(took);
        if !progress.all_sent && told.is_some_and(|told| told.elapsed() < REPORT_INTERVAL) {
            return;
        }
        told = Some(Instant::now());
        report.send_replace(MigrationProgress {
            sealing: Some(sealing.read()),
            memory_milliseconds: took,
            disks: meter.as_ref().map(DisksMeter::sent),
            ..progress
        });
    };
    // First what the connection says: QEMU only finds its socket closed. When it has closed its end, what it wrote is sealed, sent
    // and ended.
    let moved = async {
        let carried = async { carried.done().await.map_err(lost) };
        tokio::try_join!(carried, completed(qmp, silence(&still), tell)).map(drop)
    };
    let session = link.handle();
    tokio::select! {
        biased;
        moved = moved => moved.map_err(|said| why_failed(&session, said))?,
        problem = held(qmp, &still) => return Err(problem),
    }
    still.all_sent(rate);
    let counted = meter.map(|meter| Box::new((*report.borrow(), meter)));
    Ok(Sent { link, disks, all_sent, counted, still })
}

/// When QEMU had sent all of the memory, if it has and says how long that took; its downtime ends then. It is asked at intervals, and so
/// says it later. QEMU has begun a moment after `began`, when it had the command: the time that is returned is rather too early than
/// too late.
fn sent_at(progress: &MigrationProgress, began: Instant) -> Option<Instant> {
    let took = progress.memory_milliseconds.filter(|_| progress.all_sent)?;
    began.checked_add(Duration::from_millis(took))
}

/// How long QEMU may answer nothing: it does not while it sends the rest of the memory. A guest that is held is noticed before.
fn silence(still: &StandStill) -> Duration {
    still.longest().saturating_add(COMMAND_TIMEOUT)
}

/// Waits until the guest has stood still for longer than it may.
async fn held(qmp: &Qmp, still: &StandStill) -> Problem {
    let ask = || async {
        let state = qmp.execute_within("query-status", Value::Null, silence(still)).await;
        state.ok().map(|state| stands_still(&state))
    };
    until_held(still.longest(), ask).await
}

/// Has the disks copied until the copies lack little.
async fn copy_disks(
    copies: &ToCopy,
    migration: MigrationId,
    link: &mut Link,
    (report, meter): (&watch::Sender<MigrationProgress>, &DisksMeter),
) -> Result<DepartingDisks, Problem> {
    let tell = |progress| {
        report.send_replace(meter.measured(progress));
    };
    let failed = link.failed();
    let copied = async {
        let keys = departing_parts::send(copies, migration, link, tell).await?;
        let disks = DepartingDisks::begin(copies, migration, &keys, link).await?;
        disks.until_small(tell).await?;
        Ok(disks)
    };
    // What the connection says is why the filter cannot copy.
    let disks = tokio::select! {
        biased;
        lost = failed => return Err(lost),
        disks = copied => disks?,
    };
    link.send(&Message::Copied).await?;
    Ok(disks)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_is_sent_when_qemu_says_so_and_not_when_it_is_asked() {
        let began = Instant::now();
        let told = |status: &str, took: u64| {
            let progress = progress_of(&json!({"status": status, "total-time": took}));
            sent_at(&progress, began)
        };
        assert_eq!(told("active", 1500), None);
        assert_eq!(told("completed", 0), None, "it has not measured it yet");
        assert_eq!(told("completed", 1500), Some(began + Duration::from_millis(1500)));
    }
}
