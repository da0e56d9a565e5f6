//! The filter of a VM: its disks opened, the process started, and QEMU connected to it.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::os::unix::net::UnixListener;
use std::sync::Arc;
use std::time::{Duration, Instant};

use tokio::task::spawn_blocking;
use vmseal_api::boot::BootDevice;
use vmseal_api::filter::{DiskActivity, DiskFile, DiskStatus, FilterStatus};
use vmseal_api::host::{Attachment, DiskFacts, DiskSpec, NicState, Notice, VmSpec};
use vmseal_api::id::DiskId;
use vmseal_api::problem::Problem;
use vmseal_secret::SecretBytes;

use super::arriving::Arriving;
use super::bitmap_files::BitmapFiles;
use super::queues::stays_connected;
use super::suspend::Resume;
use super::{Shared, images, internal};
use crate::filter::{self, Connection, Control, FilterError, NewLayers};
use crate::hypervisor::firmware;
use crate::process::Process;
use crate::process::live::{DiskInUse, Live};
use crate::process::run_dir::ProcessDir;
use crate::process::users::Slot;
use crate::storage::builder::is_preallocated;
use crate::storage::home::Home;
use crate::storage::layers;
use crate::storage::lease;
use crate::storage::mirror::{self, GuestDisk};
use crate::storage::placeholder;

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
    /// The disks whose data keys others may have.
    pub shared_out: BTreeSet<DiskId>,
    /// Its network cards when it ran last, as far as this agent knows.
    pub nics_before: Vec<NicState>,
    /// How QEMU has its devices, or is to have them.
    pub live: Live,
    /// The disk of its TPM, with its pinned facts. No filter serves it.
    pub tpm: Option<(DiskSpec, DiskFacts)>,
    /// What the firmware tries first this time.
    pub boot_once: Option<BootDevice>,
    /// The memory that its guest begins with.
    pub memory: Memory,
    /// Whether disks are served without their replicas, to which all of them is copied later.
    pub without_replicas: bool,
}

/// The memory that a guest begins with.
pub enum Memory {
    /// None: it boots.
    New,
    /// That which was saved when it was suspended.
    Saved(Resume),
    /// That which comes from another host, which still has the disks.
    Arriving(Arriving),
}

impl Memory {
    /// The type of the machine that the memory is of.
    pub fn machine(&self) -> Option<&str> {
        match self {
            Self::New => None,
            Self::Saved(resume) => Some(&resume.machine),
            Self::Arriving(arriving) => Some(&arriving.machine),
        }
    }

    /// Whether the guest had something else in its CD-ROM drive than it has now.
    pub fn has_other_medium(&self) -> bool {
        matches!(self, Self::Saved(resume) if resume.other_medium)
    }
}

/// Opens the disks and starts a filter that connects to the sockets of the VM's QEMU, whether QEMU runs
/// already or not. On failure no filter is left running. `variables` is the socket of the firmware's variables where
/// QEMU may be waiting at it; else one is made.
pub async fn filter(
    shared: &Shared,
    directory: &ProcessDir,
    plan: &Arc<Plan>,
    slot: &Slot,
    mut variables: Option<UnixListener>,
) -> Result<(Process, Vec<Notice>), Problem> {
    let (to_open, run, bitmaps) = (plan.clone(), directory.clone(), shared.bitmaps.clone());
    let open = move || {
        let opened = open_disks(&to_open)?;
        // Of a guest that runs already: its filter has died.
        lease::check(&to_open.spec, to_open.live.lease)?;
        if to_open.without_replicas {
            leave_replicas(&to_open)?;
        }
        let bitmaps = open_bitmaps(&bitmaps, &run, &to_open, &opened)?;
        Ok::<_, Problem>((opened, bitmaps))
    };
    let (opened, mut bitmaps) = spawn_blocking(open).await.map_err(internal)??;
    if !matches!(plan.memory, Memory::Arriving(_)) {
        note_images(directory, plan, &opened)?;
    }
    let mut notices = Vec::new();
    let mut disks = Vec::new();
    let mut connections = Vec::new();
    for ((disk, _), opened) in plan.disks.iter().zip(opened) {
        let GuestDisk { mut open, mirror, .. } = opened;
        let Some(in_use) = plan.live.disk(disk.disk) else {
            return Err(internal("a disk to be served has no socket"));
        };
        notices.extend(open.notice.take());
        let replica = match plan.memory {
            Memory::Arriving(_) => None,
            _ if plan.without_replicas => None,
            _ => mirror::replica_for_writer(&plan.spec, disk, &open.file, open.offset).await?,
        };
        // An earlier filter may have used it.
        directory.forget_socket(&beside(in_use.socket)).map_err(internal)?;
        let listener = directory.listen(&beside(in_use.socket)).map_err(internal)?;
        let sockets = (&mut variables, &mut connections);
        let mut work = work(directory, disk, in_use, slot, sockets).map_err(internal)?;
        if let filter::Work::Serve { bitmaps: of_disk, .. } = &mut work {
            *of_disk = bitmaps.remove(&disk.disk);
        }
        let mut served = open.into_disk(disk, work);
        served.shared.key |= plan.shared_out.contains(&disk.disk);
        disks.push(filter::Disk { beside: Some(listener), replica, mirror, ..served });
    }
    let (filter, keys) =
        filter::start(&shared.filter, plan.spec.vm, directory, disks, slot.filter())
            .await
            .map_err(|error| internal(format!("vmseal-filter cannot be started: {error}")))?;
    let ready = Control::of(directory).ready(&filter, directory).await;
    drop(keys);
    // Last: the filter answers QEMU from here on.
    let connected = match ready {
        Ok(_) => connections.into_iter().try_for_each(Connection::connect).map_err(internal),
        Err(error) => Err(internal(error)),
    };
    match connected {
        Ok(()) => Ok((filter, notices)),
        Err(problem) => {
            filter.kill();
            filter.ended().await;
            Err(problem)
        }
    }
}

/// How a disk is served to QEMU; takes the socket of the firmware's variables, or adds the connection that it needs for that.
fn work(
    directory: &ProcessDir,
    disk: &DiskSpec,
    in_use: &DiskInUse,
    slot: &Slot,
    (variables, connections): (&mut Option<UnixListener>, &mut Vec<Connection>),
) -> io::Result<filter::Work> {
    Ok(match disk.role.attachment() {
        Attachment::Tpm => return Err(io::Error::other("no filter serves the disk of a TPM")),
        Attachment::Disk => {
            let address = directory.socket(&socket(in_use.socket));
            let (connection, socket, connected) = Connection::new(address)?;
            connections.push(connection);
            filter::Work::Serve {
                socket,
                connected,
                queues: in_use.queues,
                read_only: !disk.role.is_data(),
                limits: disk.limits,
                cache: disk.cache,
                bitmaps: None,
            }
        }
        Attachment::Firmware => filter::Work::ServeFirmware {
            socket: match variables.take() {
                Some(listener) => listener,
                None => directory.listen_for_qemu(firmware::SOCKET, slot.qemu())?,
            },
            user: slot.qemu(),
        },
    })
}

/// The name of a disk's socket of this number.
pub fn socket(number: u32) -> String {
    format!("disk{number}")
}

/// The name of the socket of this number of a disk's NBD, beside the guest.
pub fn beside(number: u32) -> String {
    format!("nbd{number}")
}

fn open_disks(plan: &Plan) -> Result<Vec<GuestDisk>, Problem> {
    let (spec, kek) = (&plan.spec, plan.kek.as_ref());
    plan.disks
        .iter()
        .map(|(disk, facts)| match &plan.memory {
            Memory::Arriving(arriving) => match arriving.placeholder(disk.disk) {
                Some(copied) => copied,
                None => placeholder::open(spec, disk, facts, kek),
            },
            _ => mirror::open_for_guest(spec, disk, facts, kek),
        })
        .collect()
}

/// The files that keep the dirty bitmaps of disks.
fn open_bitmaps(
    kept: &BitmapFiles,
    directory: &ProcessDir,
    plan: &Plan,
    opened: &[GuestDisk],
) -> Result<BTreeMap<DiskId, File>, Problem> {
    let arrives = matches!(plan.memory, Memory::Arriving(_));
    let disks = plan.disks.iter().zip(opened).filter(|((disk, _), _)| disk.role.is_data());
    let open = |((disk, _), opened): (&(DiskSpec, DiskFacts), &GuestDisk)| {
        let file = kept.open(directory, disk.disk, &opened.open, arrives);
        file.map(|file| file.map(|file| (disk.disk, file))).transpose()
    };
    disks.filter_map(open).collect()
}

/// Opens the disks of a plan, with their locks, and has a filter serve them in place of placeholders. Blocks.
///
/// # Errors
/// Those of opening them, and the filter's.
pub fn take_over(directory: &ProcessDir, control: &Control, plan: &Plan) -> Result<(), Problem> {
    let opened = open_to_write(directory, plan)?;
    // What a filter has in place of placeholders is written without replicas.
    leave_replicas(plan)?;
    let new = plan.disks.iter().zip(opened).map(|((disk, _), GuestDisk { open, .. })| NewLayers {
        disk: disk.disk,
        channel: filter::channel_of(&open.file, &open.layers),
        file: open.file,
        layers: open.layers,
        offset: open.offset,
        keeps_room: is_preallocated(disk),
        own: open.shared.own,
    });
    replace(control, &new.collect::<Vec<_>>(), &[]).map_err(NotReplaced::into_problem)
}

/// Why disks do not have other files.
pub enum NotReplaced {
    /// They have what they had.
    AsBefore(Problem),
    /// They may have the new ones.
    Unknown(Problem),
}

impl NotReplaced {
    pub fn into_problem(self) -> Problem {
        match self {
            Self::AsBefore(problem) | Self::Unknown(problem) => problem,
        }
    }
}

/// Gives disks other files, while nothing is in flight; before, the copies are completed that other hosts get of `copied`. Blocks.
///
/// # Errors
/// [`NotReplaced`].
pub fn replace(control: &Control, new: &[NewLayers], copied: &[DiskId]) -> Result<(), NotReplaced> {
    if new.is_empty() {
        return Ok(());
    }
    let disks = new.iter().map(|new| new.disk).collect();
    let as_before = |error: FilterError| NotReplaced::AsBefore(internal(error));
    let mut waiting = control.drain(disks).map_err(as_before)?;
    if !copied.is_empty() {
        waiting.complete(copied.to_vec()).map_err(as_before)?;
    }
    waiting.replace(new).map_err(|error| match error {
        FilterError::Refused { .. } => as_before(error),
        error => NotReplaced::Unknown(internal(error)),
    })?;
    waiting.resume().map_err(|error| NotReplaced::Unknown(internal(error)))
}

/// Opens the disks of a plan with their locks, and records which files they are. Blocks.
fn open_to_write(directory: &ProcessDir, plan: &Plan) -> Result<Vec<GuestDisk>, Problem> {
    let (spec, kek) = (&plan.spec, plan.kek.as_ref());
    let open =
        |(disk, facts): &(DiskSpec, DiskFacts)| mirror::open_for_guest(spec, disk, facts, kek);
    let opened = plan.disks.iter().map(open).collect::<Result<Vec<_>, _>>()?;
    note_images(directory, plan, &opened)?;
    Ok(opened)
}

/// Has all of the disks that have replicas be copied to these later: until then they are written without them. Blocks.
fn leave_replicas(plan: &Plan) -> Result<(), Problem> {
    plan.disks.iter().try_for_each(|(disk, _)| mirror::leave_replica(plan.spec.vm, disk))
}

/// Records which files the disks are.
fn note_images(directory: &ProcessDir, plan: &Plan, opened: &[GuestDisk]) -> Result<(), Problem> {
    for ((disk, _), opened) in plan.disks.iter().zip(opened).filter(|(_, it)| it.has_pivoted) {
        images::replace(directory, disk.disk, opened.open.own())?;
    }
    let files: Vec<_> =
        plan.disks.iter().zip(opened).map(|((disk, _), it)| (disk, it.open.own())).collect();
    images::check(directory, &files)
}

/// Waits until every disk is connected of which QEMU has a device.
pub async fn wait_connected(
    control: &Control,
    spec: &VmSpec,
    has_device: impl Fn(DiskId) -> bool,
) -> Result<(), Problem> {
    let give_up = Instant::now() + CONNECT_TIMEOUT;
    loop {
        let status = control.status().await.map_err(internal)?;
        let mut awaited = status.disks.iter().filter(|disk| has_device(disk.disk));
        let waiting = awaited.find(|disk| {
            disk.state != DiskActivity::Connected
                && (stays_connected(spec, disk.disk)
                    || matches!(disk.state, DiskActivity::Failed { .. }))
        });
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

/// Whether a filter serves disks that have replicas from copies that have taken their places since it began: it writes to no replica of
/// these.
#[must_use]
pub fn leaves_replicas(spec: &VmSpec, status: &FilterStatus) -> bool {
    status.disks.iter().any(|served| {
        let has_replica = spec.disk(served.disk).is_some_and(|disk| disk.replica.is_some());
        has_replica && served.mirror.as_ref().is_some_and(|mirror| mirror.pivoted)
    })
}

/// Whether a filter serves a disk without its replica, to which all of it is to be copied ([`Plan::without_replicas`], [`take_over`]). One that
/// could not have the replica when it opened the disk has left a map. Blocks.
///
/// # Errors
/// Those of the disks' datastores.
pub fn lacks_replicas(spec: &VmSpec, status: &FilterStatus) -> Result<bool, Problem> {
    for served in status.disks.iter().filter(|served| served.replica.is_none()) {
        let Some(disk) = spec.disk(served.disk) else { continue };
        if disk.replica.is_some() && mirror::has_left_replica(spec.vm, disk)? {
            return Ok(true);
        }
    }
    Ok(false)
}

/// Whether a filter writes the layers that the notes of its disks say, and the replicas of its disks: an agent that ended may have put a
/// note, or had a disk pivot, and not replaced the filter. One that does not say what it writes got no note so. Blocks.
///
/// # Errors
/// Those of the notes.
pub fn has_stacks_of(spec: &VmSpec, status: &FilterStatus) -> Result<bool, Problem> {
    if leaves_replicas(spec, status) {
        return Ok(false);
    }
    let settled = |served: &&DiskStatus| served.mirror.as_ref().is_none_or(|it| it.pivoted);
    for served in status.disks.iter().filter(settled) {
        let (Some(disk), Some(file)) = (spec.disk(served.disk), served.file) else { continue };
        let noted = layers::written(&Home::of(&disk.datastore, spec.vm)?, disk.disk)?;
        if noted.is_some_and(|noted| noted != file) {
            return Ok(false);
        }
    }
    Ok(true)
}

/// Whether a filter serves disks from their own files, and not placeholders: an agent that handed a guest over may have ended before it
/// replaced them. All of them are replaced at once, and one that does not say what it writes has placeholders. Blocks.
///
/// # Errors
/// Those of the notes.
pub fn has_own_files(spec: &VmSpec, status: &FilterStatus) -> Result<bool, Problem> {
    for served in &status.disks {
        let known = spec.disks().find(|known| known.disk == served.disk);
        let (Some(disk), Some(file)) = (known, served.file) else { continue };
        let home = Home::of(&disk.datastore, spec.vm)?;
        let own = match layers::written(&home, disk.disk)? {
            Some(active) => Some(active),
            None => home
                .image(disk.disk)
                .metadata()
                .ok()
                .map(|image| DiskFile { device: image.dev(), inode: image.ino() }),
        };
        if own == Some(file) {
            return Ok(true);
        }
    }
    Ok(false)
}

fn name(spec: &VmSpec, disk: DiskId) -> String {
    let known = spec.disks().find(|known| known.disk == disk);
    known.map_or_else(|| disk.to_string(), |known| known.name.clone())
}
