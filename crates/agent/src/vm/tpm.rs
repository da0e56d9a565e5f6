//! The TPM of a running VM: started before QEMU, watched, and waited for when QEMU has ended.
//!
//! ```text
//!  lives ──what serves its directory ends──> lives, cut off ──┐
//!    └──────────────it ends──────────────────────────────────>┴──> lost, until the VM is stopped and started
//! ```
//! A pool is served to it by the `vmseal-rbd` that was there when it began, and by no later one (docs/decisions/342).

use std::ffi::OsStr;
use std::fs::{self, File};
use std::io;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use tokio::task::spawn_blocking;
use tokio::time::Instant;
use vmseal_api::host::{DiskRole, DiskSpec, Notice, NoticeCode, VmSpec};
use vmseal_api::id::DiskId;
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
use crate::timed;

/// How long after its TPM QEMU may be seen to end: it closes their socket first.
const QEMU_ENDS_WITHIN: Duration = Duration::from_secs(2);

/// The TPM of a running VM.
#[derive(Debug)]
pub enum Tpm {
    /// It has none.
    None,
    /// Its process has not ended, as far as is known.
    Lives(Living),
    /// It ended under its guest: how.
    Ended(String),
}

/// A TPM whose process lives.
#[derive(Debug)]
pub struct Living {
    process: Process,
    /// When this agent first saw that it has ended.
    seen: OnceLock<Instant>,
    /// Whether what served its directory has ended.
    cut_off: bool,
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
    Ok((Tpm::of(process), Some(control), notice))
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
    /// The TPM that is this process.
    fn of(process: Process) -> Self {
        Self::Lives(Living { process, seen: OnceLock::new(), cut_off: false })
    }

    /// The TPM of a VM that an earlier agent started.
    ///
    /// # Errors
    /// Those of reading the record.
    pub fn adopt(directory: &ProcessDir, spec: &VmSpec) -> std::io::Result<Self> {
        if disk_of(spec).is_none() {
            return Ok(Self::None);
        }
        Ok(match Process::adopt(&directory.process(tpm::NAME))? {
            Some(process) => Self::of(process),
            None => Self::Ended("ended while no agent was there".to_owned()),
        })
    }

    /// Copies of its descriptors of files with this name.
    ///
    /// # Errors
    /// Those of the system, such as that this process may not have them.
    pub fn descriptors(&self, name: &OsStr) -> io::Result<Vec<File>> {
        let Self::Lives(living) = self else { return Ok(Vec::new()) };
        let process = &living.process;
        let mut found = Vec::new();
        for entry in fs::read_dir(descriptors_of(process))? {
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

    /// Looks whether what it keeps is still served to it.
    pub async fn look_after(&mut self, spec: &VmSpec) {
        let (Self::Lives(living), Some(disk)) = (self, disk_of(spec)) else { return };
        // Only a pool is served by a `vmseal-rbd`. A directory may be of any other FUSE.
        if living.cut_off || disk.datastore.location.pool().is_none() {
            return;
        }
        let (descriptors, disk) = (descriptors_of(&living.process), disk.disk);
        let place = descriptors.clone();
        // Where there is no answer in time, its file system hangs, and may go on.
        let looked = timed::quick_call(&place, move || Ok(is_cut_off(&descriptors, disk))).await;
        living.cut_off = looked.unwrap_or(false);
        if living.cut_off {
            tracing::error!(vm = %spec.vm, "what served a pool to the TPM has ended, and the guest goes on");
        }
    }

    /// Whether its guest has lost it: it has ended, or what served its directory has.
    pub fn is_lost(&self) -> bool {
        match self {
            Self::None => false,
            Self::Lives(living) => living.cut_off,
            Self::Ended(_) => true,
        }
    }

    /// Waits until it has ended and QEMU has not.
    pub async fn ended(&self) -> Exit {
        let Self::Lives(living) = self else { return std::future::pending().await };
        let exit = living.process.ended().await;
        // Each call to the VM cancels this wait and starts it again; the time that it ends does not change.
        let seen = *living.seen.get_or_init(Instant::now);
        tokio::time::sleep_until(seen + QEMU_ENDS_WITHIN).await;
        exit
    }

    /// Notes that it has ended.
    pub fn note_end(&mut self, exit: Exit, directory: &ProcessDir) {
        *self = Self::Ended(format!("{exit}, {}", directory.log_ends(tpm::NAME)));
    }

    /// Waits until it has ended with its QEMU, so that what it keeps is free for the next start.
    pub async fn end(&self) {
        if let Self::Lives(living) = self {
            living.process.end_within(tpm::END_TIMEOUT).await;
        }
    }

    /// What operators are told of one that its guest has lost.
    pub fn notice(&self, spec: &VmSpec) -> Option<Notice> {
        let (how, what_fails) = match self {
            Self::Ended(how) => (how.as_str(), "what it asks of its TPM fails"),
            Self::Lives(living) if living.cut_off => (
                "has lost its pool: the vmseal-rbd that served it has ended, and another one serves it to other processes only",
                "its TPM stores nothing more, and then answers only errors,",
            ),
            Self::None | Self::Lives(_) => return None,
        };
        let detail = format!(
            "the TPM of VM '{0}' (swtpm) {how}. The guest goes on, and {what_fails} until it is stopped and started: vmseal vm stop {0}, vmseal vm start {0}. What the TPM keeps is on the datastore",
            spec.name
        );
        Some(Notice { code: NoticeCode::TpmDied, disk: None, detail })
    }
}

/// The list of a process's descriptors, proc_pid_fd(5).
fn descriptors_of(process: &Process) -> PathBuf {
    format!("/proc/{}/fd", process.pid()).into()
}

/// Whether a process has what a TPM keeps open, or the image of its disk, by a mount that nobody serves any more. Blocks.
fn is_cut_off(descriptors: &Path, disk: DiskId) -> bool {
    let Ok(entries) = fs::read_dir(descriptors) else { return false };
    // The directory may have another name while its guest moves.
    let beginning = format!("{disk}.");
    let is_of_disk = |target: &Path| {
        let name = target.file_name().and_then(OsStr::to_str);
        name.is_some_and(|name| name.starts_with(&beginning))
    };
    let descriptors = entries.flatten().map(|entry| entry.path());
    let mut own =
        descriptors.filter(|path| fs::read_link(path).is_ok_and(|target| is_of_disk(&target)));
    own.any(|path| fs::metadata(path).is_err_and(|error| is_of_dead_mount(&error)))
}

/// Whether this is what a mount answers whose server has ended: to later requests, or to those that it had under way.
fn is_of_dead_mount(error: &io::Error) -> bool {
    matches!(error.raw_os_error(), Some(libc::ENOTCONN | libc::ECONNABORTED))
}

#[cfg(test)]
mod tests {
    use std::fs::OpenOptions;
    use std::os::fd::AsFd;
    use std::os::unix::fs::OpenOptionsExt;
    use std::process::Stdio;

    use vmseal_api::host::{DatastoreLocation, DatastoreSpec, Device};
    use vmseal_api::id::DatastoreId;

    use super::*;
    use crate::process::run_dir::RunDir;
    use crate::process::run_dir::tests::{disk, spec};
    use crate::process::{self, Launch};
    use crate::storage::pool::tests::pool;
    use crate::storage::remount::tests::Hung;

    /// How long a request to a mount that has ended may take to fail on a busy machine.
    const FAILS_WITHIN: Duration = Duration::from_secs(20);

    /// The pause between looks.
    const PAUSE: Duration = Duration::from_millis(20);

    /// A directory, by which nothing is asked of its file system.
    fn open(path: &Path) -> File {
        OpenOptions::new().read(true).custom_flags(libc::O_PATH).open(path).unwrap()
    }

    /// A VM with the disk of a TPM at this place, whose id is returned as well.
    fn vm_with_tpm(location: DatastoreLocation) -> (VmSpec, DiskId) {
        let place = DatastoreSpec { datastore: DatastoreId::new(), location };
        let kept = DiskSpec { role: DiskRole::Tpm, ..disk("tpm", &place) };
        let (mut vm, id) = (spec(), kept.disk);
        vm.devices.push(Device::Disk(kept));
        (vm, id)
    }

    /// A process in place of swtpm, which has this open.
    fn swtpm(directory: &ProcessDir, state: &Path) -> Tpm {
        let state = open(state);
        let process = process::launch(Launch {
            program: &process::open_program(Path::new("/bin/sleep")).unwrap(),
            name: "sleep",
            arguments: vec!["60".into()],
            keep: vec![state.as_fd()],
            input: Stdio::null(),
            log: directory.log(tpm::NAME).unwrap(),
            user: None,
            locks_memory: false,
            record: &directory.process(tpm::NAME),
        });
        Tpm::of(process.unwrap())
    }

    #[tokio::test]
    async fn a_tpm_on_a_pool_is_lost_when_its_mount_has_ended_and_not_while_that_hangs() {
        let location = DatastoreLocation::Rbd { path: "/store".into(), pool: Box::new(pool()) };
        let (vm, disk) = vm_with_tpm(location);
        let Some(mut hung) = Hung::called(&format!("{disk}.tpm")) else { return };
        let root = tempfile::tempdir().unwrap();
        let directory = RunDir::open(root.path()).unwrap().vm(vm.vm);
        directory.renew().await.unwrap();
        let mut found = swtpm(&directory, &hung.place());
        found.look_after(&vm).await;
        assert!(!found.is_lost() && found.notice(&vm).is_none(), "it hangs, and may go on");

        hung.end();
        let give_up = Instant::now() + FAILS_WITHIN;
        while !found.is_lost() {
            assert!(Instant::now() < give_up, "it counts as served");
            tokio::time::sleep(PAUSE).await;
            found.look_after(&vm).await;
        }
        let told = found.notice(&vm).unwrap();
        assert_eq!(told.code, NoticeCode::TpmDied);
        for part in ["has lost its pool", "stores nothing more", "vmseal vm start guest"] {
            assert!(told.detail.contains(part), "'{part}' is missing in: {}", told.detail);
        }
        // Nor is it served again by a later one.
        found.look_after(&vm).await;
        assert!(found.is_lost());
        directory.sweep().await.unwrap();
    }

    #[tokio::test]
    async fn a_tpm_in_a_directory_is_not_lost_with_a_mount() {
        let (vm, disk) = vm_with_tpm(DatastoreLocation::Dir { path: "/store".into() });
        let Some(mut hung) = Hung::called(&format!("{disk}.tpm")) else { return };
        let root = tempfile::tempdir().unwrap();
        let directory = RunDir::open(root.path()).unwrap().vm(vm.vm);
        directory.renew().await.unwrap();
        let mut found = swtpm(&directory, &hung.place());
        hung.end();
        let Tpm::Lives(living) = &found else { panic!("it has ended") };
        assert!(is_cut_off(&descriptors_of(&living.process), disk), "its mount has not ended");
        found.look_after(&vm).await;
        assert!(!found.is_lost() && found.notice(&vm).is_none());
        directory.sweep().await.unwrap();
    }

    #[test]
    fn only_a_mount_of_its_own_that_has_ended_counts() {
        let [served, ended, not_open] = [(); 3].map(|()| DiskId::new());
        let root = tempfile::tempdir().unwrap();
        let place = root.path().join(format!("{served}.tpm"));
        fs::create_dir(&place).unwrap();
        let _served = open(&place);
        let Some(mut hung) = Hung::called(&format!("{ended}.tpm")) else { return };
        let _ended = open(&hung.place());
        hung.end();
        let found =
            [served, ended, not_open].map(|disk| is_cut_off(Path::new("/proc/self/fd"), disk));
        assert_eq!(found, [false, true, false]);
        let other = io::Error::from_raw_os_error(libc::EIO);
        assert!(!is_of_dead_mount(&other), "a disk that fails is no mount that has ended");
    }
}
