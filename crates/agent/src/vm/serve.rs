//! The filter of a VM: its disks opened, the process started, and QEMU connected to it.

use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::time::{Duration, Instant};

use tokio::task::spawn_blocking;
use vmseal_api::filter::DiskActivity;
use vmseal_api::host::{DiskFacts, DiskSpec, NicState, Notice, VmSpec};
use vmseal_api::id::DiskId;
use vmseal_api::problem::Problem;
use vmseal_secret::SecretBytes;

use super::{Shared, images, internal};
use crate::filter::{self, Control};
use crate::hypervisor::qemu;
use crate::process::Process;
use crate::process::run_dir::ProcessDir;
use crate::process::users::Slot;
use crate::storage::builder::is_preallocated;
use crate::storage::disk;
use crate::storage::locked::Access;
use crate::storage::replica;

/// The longest that connecting a disk may take once QEMU's monitor answers.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);

/// The pause between checks.
const CONNECT_INTERVAL: Duration = Duration::from_millis(20);

/// The VM to start.
pub struct Plan {
    pub spec: VmSpec,
    /// The disks in boot order, with their pinned facts.
    pub disks: Vec<(DiskSpec, DiskFacts)>,
    pub kek: Option<SecretBytes>,
    /// Its network cards when it ran last, as far as this agent knows.
    pub nics_before: Vec<NicState>,
}

/// Opens the disks and starts a filter that connects to the sockets of the VM's QEMU, whether QEMU runs
/// already or not. On failure no filter is left running.
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
        // An earlier filter may have used it.
        directory.forget_socket(&beside(index)).map_err(internal)?;
        let listener = directory.listen(&beside(index)).map_err(internal)?;
        disks.push(filter::Disk {
            disk: disk.disk,
            size: disk.size,
            file: open.file,
            offset: open.offset,
            key: open.key,
            keeps_room: is_preallocated(disk),
            work: filter::Work::Serve {
                socket,
                queues,
                read_only: !disk.role.is_data(),
                limits: disk.limits,
                cache: disk.cache,
            },
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
pub fn socket(index: usize) -> String {
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
