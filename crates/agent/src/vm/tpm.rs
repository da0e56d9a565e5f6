//! The TPM of a running VM: started before QEMU, watched, and waited for when QEMU has ended.

use std::ffi::OsStr;
use std::fs::{self, File};
use std::io;
use std::os::unix::net::UnixStream;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use tokio::task::spawn_blocking;
use tokio::time::Instant;
use vmseal_api::host::{DiskRole, DiskSpec, Notice, NoticeCode, VmSpec};
use vmseal_api::problem::Problem;

use super::arriving::NewTpm;
use super::serve::{Memory, Plan};
use super::{Shared, internal};
use crate::hypervisor::tpm::{self, Started, State};
use crate::process::run_dir::ProcessDir;
use crate::process::users::Slot;
use crate::process::{Exit, Process};
use crate::storage::home::Home;
use crate::storage::locked::{Access, share_lock};
use crate::storage::mirror;
use crate::storage::opening;
use crate::storage::tpm_disk::{self, OpenTpm};
use crate::storage::tpm_place;

/// How long after its TPM QEMU may be seen to end: it closes their socket first.
const QEMU_ENDS_WITHIN: Duration = Duration::from_secs(2);

/// The TPM of a running VM.
#[derive(Debug)]
pub enum Tpm {
    /// It has none.
    None,
    /// Its process, and when this agent first saw that it has ended.
    Lives(Process, OnceLock<Instant>),
    /// It ended under its guest: how.
    Ended(String),
}

/// The disk whose key is the TPM's.
pub fn disk_of(spec: &VmSpec) -> Option<&DiskSpec> {
    spec.disks().find(|disk| disk.role == DiskRole::Tpm)
}

/// Starts the TPM of a VM that has one. Returns the socket by which QEMU controls it.
///
/// # Errors
/// Those of opening what it keeps, and of starting it. The process is on record, and is ended with the directory.
pub async fn start(
    shared: &Shared,
    directory: &ProcessDir,
    plan: &Arc<Plan>,
    slot: &Arc<Slot>,
) -> Result<(Tpm, Option<UnixStream>, Option<Notice>), Problem> {
    if plan.tpm.is_none() {
        return Ok((Tpm::None, None, None));
    }
    let (plan, swtpm, directory) = (plan.clone(), shared.swtpm.clone(), directory.clone());
    // Kept until this has ended, also if the start is cancelled: no other VM has its user meanwhile.
    let slot = slot.clone();
    let wanted = Arc::new(());
    let still_wanted = Arc::downgrade(&wanted);
    let begin = move || {
        let user = slot.tpm();
        let Opened { open, lock, notice } = open(&plan, user)?;
        // The TPM of a host that the guest moves to has it as well, until this one has ended.
        share_lock(&lock).map_err(internal)?;
        let state = State { directory: &open.directory, lock: &lock, key: &open.key, user };
        let started = swtpm.start(&directory, &state)?;
        if still_wanted.strong_count() == 0 {
            started.process.kill();
        }
        Ok((started, notice))
    };
    let (Started { process, control }, notice) =
        spawn_blocking(begin).await.map_err(internal)??;
    Ok((Tpm::Lives(process, OnceLock::new()), Some(control), notice))
}

/// What a TPM keeps, for its start.
struct Opened {
    open: OpenTpm,
    /// The image of its disk, with its lock.
    lock: File,
    notice: Option<Notice>,
}

/// Opens what a TPM keeps, or makes room for what QEMU is about to load into it. Blocks.
fn open(plan: &Plan, user: Option<u32>) -> Result<Opened, Problem> {
    let Some((disk, facts)) = &plan.tpm else { return Err(internal("a TPM without its disk")) };
    let vm = plan.spec.vm;
    if let Memory::Arriving(arriving) = &plan.memory {
        let home = Home::of(&disk.datastore, vm)?;
        if let Some(NewTpm { file, dek }) = arriving.tpm(disk.disk)? {
            let open = tpm_disk::empty(&home.tpm_state(disk.disk), disk.disk, &dek, user)?;
            return Ok(Opened { open, lock: file, notice: None });
        }
        // The source's TPM has what it keeps until the guest has moved.
        let unlocked = opening::open_for_key_beside(&plan.spec, disk, facts, plan.kek.as_ref())?;
        let path = home.arriving_tpm(disk.disk, arriving.migration);
        let open = tpm_disk::empty(&path, disk.disk, &unlocked.dek, user)?;
        return Ok(Opened { open, lock: unlocked.file, notice: unlocked.notice });
    }
    // As long as a copy of the disk has not pivoted, what the TPM keeps is where it was, and is copied when the VM is at rest again.
    let (disk, facts) = mirror::as_it_is(&plan.spec, disk, facts, Access::Read)?;
    let unlocked = opening::open_for_key(&plan.spec, &disk, &facts, plan.kek.as_ref())?;
    tpm_place::settle(&plan.spec, &disk)?;
    let open = tpm_disk::open(vm, &disk, &unlocked.dek, user)?;
    Ok(Opened { open, lock: unlocked.file, notice: unlocked.notice })
}

impl Tpm {
    /// The TPM of a VM that an earlier agent started.
    ///
    /// # Errors
    /// Those of reading the record.
    pub fn adopt(directory: &ProcessDir, spec: &VmSpec) -> std::io::Result<Self> {
        if disk_of(spec).is_none() {
            return Ok(Self::None);
        }
        Ok(match Process::adopt(&directory.process(tpm::NAME))? {
            Some(process) => Self::Lives(process, OnceLock::new()),
            None => Self::Ended("ended while no agent was there".to_owned()),
        })
    }

    /// Copies of its descriptors of files with this name.
    ///
    /// # Errors
    /// Those of the system, such as that this process may not have them.
    pub fn descriptors(&self, name: &OsStr) -> io::Result<Vec<File>> {
        let Self::Lives(process, _) = self else { return Ok(Vec::new()) };
        let mut found = Vec::new();
        for entry in fs::read_dir(format!("/proc/{}/fd", process.pid()))? {
            let entry = entry?;
            // It may have closed it meanwhile.
            let Ok(target) = fs::read_link(entry.path()) else { continue };
            let number = entry.file_name().to_str().and_then(|number| number.parse().ok());
            let Some(number) = number.filter(|_| target.file_name() == Some(name)) else {
                continue;
            };
            match process.descriptor(number) {
                Err(error) if error.raw_os_error() == Some(libc::EBADF) => {}
                copy => found.push(File::from(copy?)),
            }
        }
        Ok(found)
    }

    /// Whether it has ended under its guest.
    pub fn has_ended(&self) -> bool {
        matches!(self, Self::Ended(_))
    }

    /// Waits until it has ended and QEMU has not.
    pub async fn ended(&self) -> Exit {
        let Self::Lives(process, seen) = self else { return std::future::pending().await };
        let exit = process.ended().await;
        // Each call to the VM cancels this wait and starts it again; the time that it ends does not change.
        let seen = *seen.get_or_init(Instant::now);
        tokio::time::sleep_until(seen + QEMU_ENDS_WITHIN).await;
        exit
    }

    /// Notes that it has ended.
    pub fn note_end(&mut self, exit: Exit, directory: &ProcessDir) {
        *self = Self::Ended(format!("{exit}, {}", directory.log_ends(tpm::NAME)));
    }

    /// Waits until it has ended with its QEMU, so that what it keeps is free for the next start.
    pub async fn end(&self) {
        if let Self::Lives(process, _) = self {
            process.end_within(tpm::END_TIMEOUT).await;
        }
    }

    /// What operators are told of one that ended.
    pub fn notice(&self, spec: &VmSpec) -> Option<Notice> {
        let Self::Ended(how) = self else { return None };
        let detail = format!(
            "the TPM of VM '{0}' (swtpm) {how}. The guest goes on, and what it asks of its TPM fails until it is stopped and started: vmseal vm stop {0}, vmseal vm start {0}. What the TPM keeps is on the datastore",
            spec.name
        );
        Some(Notice { code: NoticeCode::TpmDied, disk: None, detail })
    }
}
