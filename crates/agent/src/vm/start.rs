//! Starting a VM: disks opened, filter, QEMU, monitor and console connected, guest let go.
//!
//! Every process is on record before it runs, and the guest goes only when all disks are connected. When
//! a step fails, or the start is cancelled, the caller sweeps the run directory and nothing is left.

use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::time::{Duration, Instant};

use serde_json::Value;
use tokio::task::spawn_blocking;
use vmseal_api::filter::DiskActivity;
use vmseal_api::host::{DiskFacts, DiskSpec, Notice, VmSpec};
use vmseal_api::id::DiskId;
use vmseal_api::problem::Problem;
use vmseal_secret::SecretBytes;

use super::running::{LastWords, Running};
use super::service::Service;
use super::{Shared, images, internal};
use crate::filter::log_level;
use crate::filter::metrics;
use crate::filter::{self, Control};
use crate::hypervisor::console::Console;
use crate::hypervisor::qemu;
use crate::hypervisor::qmp::{Event, Qmp};
use crate::process::Process;
use crate::process::run_dir::ProcessDir;
use crate::process::run_record::{Phase, Record};
use crate::process::users::Slot;
use crate::storage::disk;
use crate::storage::locked::Access;
use crate::storage::replica;

/// The longest that a disk may take to be connected once QEMU's monitor answers.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);

/// How often the filter is asked meanwhile.
const CONNECT_INTERVAL: Duration = Duration::from_millis(20);

/// QEMU's word for a guest that has not run yet.
const NOT_STARTED: &str = "prelaunch";

/// What is started.
pub struct Plan {
    pub spec: VmSpec,
    /// The disks in boot order, with what is pinned of them.
    pub disks: Vec<(DiskSpec, DiskFacts)>,
    pub kek: Option<SecretBytes>,
}

/// Starts it.
pub async fn start(
    shared: &Shared,
    directory: &ProcessDir,
    plan: Plan,
    slot: Arc<Slot>,
) -> Result<(Running, Vec<Notice>), Problem> {
    directory.renew().await.map_err(internal)?;
    directory.write(&plan.spec, slot.number(), Phase::Starting).map_err(internal)?;
    let listeners = (0..plan.disks.len())
        .map(|index| directory.listen(&socket(index)))
        .collect::<Result<Vec<_>, _>>()
        .map_err(internal)?;
    let (plan, control) = (Arc::new(plan), Control::of(directory));
    let (filter, notices) = filter(shared, directory, &plan, &slot).await?;
    let spec = &plan.spec;
    let accelerator = shared.accelerator.kind;
    let qemu = shared
        .qemu
        .start(spec, accelerator, directory, &listeners, slot.qemu())
        .map_err(|error| internal(format!("QEMU cannot be started: {error}")))?;
    drop(listeners);
    metrics::QEMU_STARTED.add();

    let (console, qmp, events) = connect(directory, &qemu, Some(&filter)).await?;
    wait_connected(&control, spec).await?;
    let running = Running {
        directory: directory.clone(),
        qemu,
        service: Service::Served(filter),
        qmp: Arc::new(qmp),
        events,
        console,
        control,
        slot,
        last_words: LastWords::default(),
        left: false,
    };
    // In this order: a VM on record as running that is found dead has no older death on record.
    shared.deaths.forget(spec.vm).map_err(internal)?;
    directory.write(spec, running.slot.number(), Phase::Running).map_err(internal)?;
    running.qmp.execute("cont", Value::Null).await.map_err(internal)?;
    Ok((running, notices))
}

/// Opens the disks and starts a filter that is connected to the sockets of the VM's QEMU, whether that is there
/// already or not. None is left running when that fails.
pub async fn filter(
    shared: &Shared,
    directory: &ProcessDir,
    plan: &Arc<Plan>,
    slot: &Slot,
) -> Result<(Process, Vec<Notice>), Problem> {
    let to_open = plan.clone();
    let opened = spawn_blocking(move || open_disks(&to_open)).await.map_err(internal)??;
    let files: Vec<_> =
        plan.disks.iter().zip(&opened).map(|((disk, _), open)| (disk, &open.file)).collect();
    images::check(directory, &files)?;
    let queues = qemu::queues(&plan.spec);
    let mut notices = Vec::new();
    let mut disks = Vec::new();
    for (index, ((disk, _), open)) in plan.disks.iter().zip(opened).enumerate() {
        notices.extend(open.notice);
        let replica = replica::for_writer(&plan.spec, disk, &open.file, open.offset).await?;
        let socket = UnixStream::connect(directory.socket(&socket(index))).map_err(internal)?;
        // A filter before this one may have had it.
        directory.forget_socket(&beside(index)).map_err(internal)?;
        let listener = directory.listen(&beside(index)).map_err(internal)?;
        disks.push(filter::Disk {
            disk: disk.disk,
            size: disk.size,
            file: open.file,
            offset: open.offset,
            key: open.key,
            keeps_room: disk::is_preallocated(disk),
            work: filter::Work::Serve { socket, queues, limits: disk.limits, cache: disk.cache },
            beside: Some(listener),
            replica,
        });
    }
    let (filter, keys) =
        filter::start(&shared.filter, plan.spec.vm, directory, disks, slot.filter())
            .map_err(|error| internal(format!("vmseal-filter cannot be started: {error}")))?;
    let ready = Control::of(directory).ready(&filter, directory).await;
    drop(keys);
    match ready {
        Ok(_) => Ok((filter, notices)),
        Err(error) => {
            filter.kill();
            filter.ended().await;
            Err(internal(error))
        }
    }
}

/// The name of a disk's socket.
fn socket(index: usize) -> String {
    format!("disk{index}")
}

/// The name of the socket of a disk's NBD, beside the guest.
pub fn beside(index: usize) -> String {
    format!("nbd{index}")
}

fn open_disks(plan: &Plan) -> Result<Vec<disk::Open>, Problem> {
    plan.disks
        .iter()
        .map(|(disk, facts)| disk::open(&plan.spec, disk, facts, plan.kek.as_ref(), Access::Write))
        .collect()
}

/// Connects console and monitor; tells what QEMU or the filter said when one of them ends instead.
async fn connect(
    directory: &ProcessDir,
    qemu: &Process,
    filter: Option<&Process>,
) -> Result<(Console, Qmp, tokio::sync::mpsc::Receiver<Event>), Problem> {
    let connecting = async {
        let earlier =
            directory.log_end(qemu::CONSOLE, crate::hypervisor::console::REPLAY_MAX as u64);
        let socket = directory.socket(qemu::CONSOLE);
        let console = Console::connect(&socket, &earlier).await.map_err(internal)?;
        let (qmp, events) =
            Qmp::connect(&directory.socket(qemu::MONITOR)).await.map_err(internal)?;
        Ok((console, qmp, events))
    };
    let filter_ended = async {
        match filter {
            Some(filter) => filter.ended().await,
            None => std::future::pending().await,
        }
    };
    let result = tokio::select! {
        exit = qemu.ended() => {
            return Err(internal(format!("QEMU {exit}, {}", directory.log_ends(qemu::NAME))));
        }
        exit = filter_ended => return Err(internal(filter::ended(exit, directory))),
        result = connecting => result,
    };
    result
}

/// Waits until every disk is connected.
pub async fn wait_connected(control: &Control, spec: &VmSpec) -> Result<(), Problem> {
    let give_up = Instant::now() + CONNECT_TIMEOUT;
    loop {
        let status = control.status().await.map_err(internal)?;
        let waiting = status.disks.iter().find(|disk| disk.state != DiskActivity::Connected);
        let Some(disk) = waiting else { return Ok(()) };
        if let DiskActivity::Failed { message } = &disk.state {
            let name = name(spec, disk.disk);
            return Err(internal(format!("disk '{name}' cannot be served: {message}")));
        }
        if Instant::now() > give_up {
            let (name, seconds) = (name(spec, disk.disk), CONNECT_TIMEOUT.as_secs());
            return Err(internal(format!(
                "QEMU has not connected to disk '{name}' within {seconds} s; try again when the host has less to do"
            )));
        }
        tokio::time::sleep(CONNECT_INTERVAL).await;
    }
}

fn name(spec: &VmSpec, disk: DiskId) -> String {
    let known = spec.disks().find(|known| known.disk == disk);
    known.map_or_else(|| disk.to_string(), |known| known.name.clone())
}

/// Why processes that live cannot be connected to.
pub enum NotConnected {
    /// The guest has not begun to run, and cannot: nothing is lost with it.
    NeverRan(Problem),
    /// Whatever else.
    Failed(Problem),
}

impl From<Problem> for NotConnected {
    fn from(problem: Problem) -> Self {
        Self::Failed(problem)
    }
}

/// Connects to the processes of a VM that an earlier agent started, and lets its guest go if that agent
/// died just before. A filter that has died meanwhile is one that is down.
pub async fn reconnect(
    directory: &ProcessDir,
    record: &Record,
    qemu: Process,
    filter: Option<Process>,
    slot: Arc<Slot>,
) -> Result<Running, NotConnected> {
    let spec = &record.spec;
    let (console, qmp, events) = connect(directory, &qemu, filter.as_ref()).await?;
    let control = Control::of(directory);
    if let Some(filter) = &filter {
        control.ready(filter, directory).await.map_err(internal)?;
        if !log_level::pass_on(&control).await {
            tracing::info!(vm = %spec.vm, "a filter of an earlier vmseal logs as before");
        }
    }
    let status = qmp.execute("query-status", Value::Null).await.map_err(internal)?;
    if status["running"] != Value::Bool(true) {
        // Without a filter this is an error: a guest that has not run yet is started anew.
        let never_ran = status["status"] == NOT_STARTED;
        wait_connected(&control, spec).await.map_err(|problem| {
            if never_ran { NotConnected::NeverRan(problem) } else { problem.into() }
        })?;
        qmp.execute("cont", Value::Null).await.map_err(internal)?;
    }
    Ok(Running {
        directory: directory.clone(),
        qemu,
        service: filter.map_or(Service::Down(None), Service::Served),
        qmp: Arc::new(qmp),
        events,
        console,
        control,
        slot,
        last_words: LastWords::default(),
        left: false,
    })
}
