//! The real host behind [`HostAgent`]: QEMU, filter processes, files.

pub mod doctor;
pub mod http;
pub mod identity;
pub mod join;
#[cfg(test)]
pub(crate) mod peer_tests;

use std::fs::DirBuilder;
use std::io;
use std::net::SocketAddr;
use std::os::unix::fs::DirBuilderExt;
use std::path::PathBuf;
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use async_trait::async_trait;
use tokio::task::spawn_blocking;
use vmseal_api::boot::BootDevice;
use vmseal_api::datastore::{DatastoreCondition, DatastoreContents};
use vmseal_api::filter::{BitmapChange, BitmapStatus, ReplicaStatus};
use vmseal_api::guest::{GuestAnswer, GuestCommand};
use vmseal_api::hardware::Hardware;
use vmseal_api::host::backup::{BackupManifest, BackupPlace};
use vmseal_api::host::survey::DatastoreSurvey;
use vmseal_api::host::version::{CONTRACT, FEATURES};
use vmseal_api::host::{
    ConsoleClaim, ConsoleStream, DatastoreLocation, DatastoreSpec, DatastoreUsage, Exposing, Fence,
    GuestControl, HostAgent, HostDescription, JobSpec, JobStatus, KeptRoom, KeyReference,
    MediumFacts, NewDisk, NicSpec, OtherKey, PlacedDisk, PoolKey, PowerOff, ReceiveJob, Remount,
    SealedKey, ShareDataKeys, Sharing, ShowsCertificate, StateChange, VmChange, VmSpec,
};
use vmseal_api::id::{DiskId, DumpId, Incarnation, TaskId, VmId};
use vmseal_api::log_level::LogLevel;
use vmseal_api::pace::CopyPace;
use vmseal_api::problem::{ErrorCode, Problem};
use vmseal_api::usage::HostUsage;
use vmseal_secret::process::Hardening;

use crate::filter::log_level;
use crate::filter::metrics;
use crate::hypervisor::accelerator::{self, Choice};
use crate::hypervisor::firmware::FirmwareFiles;
use crate::hypervisor::hardware;
use crate::hypervisor::network;
use crate::hypervisor::qemu::{self, Qemu};
use crate::hypervisor::tpm::Swtpm;
use crate::keys::KeyBox;
use crate::migration::transport::{self, Listener};
use crate::process;
use crate::process::died::DiedVms;
use crate::process::machine::{self, Machine};
use crate::process::run_dir::RunDir;
use crate::process::users::Users;
use crate::rules;
use crate::signer::Signer;
use crate::storage::backup;
use crate::storage::contents::Scanning;
use crate::storage::datastore;
use crate::storage::disk;
use crate::storage::exported;
use crate::storage::fence;
use crate::storage::kept_room;
use crate::storage::measure::{Measuring, Sweeping};
use crate::storage::medium;
use crate::storage::pool;
use crate::storage::pool_keys;
use crate::storage::remount;
use crate::storage::restored;
use crate::storage::shared;
use crate::storage::survey;
use crate::storage::tpm_import;
use crate::storage::transfer::TransferDirectories;
use crate::storage::variables;
use crate::timed;
use crate::vm::state_store::StateStore;
use crate::vm::vms::Vms;
use crate::vm::{self, BitmapFiles, Call, Change, Initial, Shared, Vm};

/// The settings of an agent.
#[derive(Clone, Debug)]
pub struct AgentOptions {
    /// Where sockets and process records are; emptied by a reboot.
    pub run_dir: PathBuf,
    /// Where is what outlives a reboot.
    pub state_dir: PathBuf,
    /// The `vmseal-filter` program.
    pub filter: PathBuf,
    /// The QEMU program, by path or name.
    pub qemu: PathBuf,
    /// The directory of the UEFI firmware (OVMF).
    pub firmware_directory: PathBuf,
    /// The swtpm program, by path or name.
    pub swtpm: PathBuf,
    /// The first of the user ids that processes run under; used as root only.
    pub uid_base: u32,
    /// Where images may be imported from and exported to.
    pub transfer_directories: Vec<PathBuf>,
    /// KVM or emulation.
    pub accelerator: Choice,
    /// What [`vmseal_secret::process::harden`] achieved; none when it was not called.
    pub hardening: Option<Hardening>,
    /// How long starting another filter for a running VM is retried before the VM is stopped.
    pub filter_restart_timeout: Duration,
    /// How long a request of a guest may wait for storage before that is reported.
    pub disk_stall: Duration,
    /// Where other hosts connect to send running VMs; none where this one receives none.
    pub migration_listen: Option<SocketAddr>,
    /// Whether the agent places the memory of VMs that it receives itself.
    pub place_memory: bool,
}

/// Why an agent does not start.
#[derive(Debug, thiserror::Error)]
pub enum StartError {
    /// The run directory.
    #[error("the run directory {path}: {error}")]
    RunDir {
        /// Which.
        path: PathBuf,
        /// What is wrong.
        error: io::Error,
    },
    /// Another agent works in the run directory.
    #[error("another agent works in {0}: stop it, or give another --run-dir")]
    Running(PathBuf),
    /// QEMU.
    #[error("QEMU: {0}")]
    Qemu(io::Error),
    /// The filter program.
    #[error("the filter program {path}: {error}. Give --filter")]
    Filter {
        /// Which.
        path: PathBuf,
        /// What is wrong.
        error: io::Error,
    },
    /// A directory for transfers.
    #[error("{0} is no absolute path: give --transfer-directory from the root on")]
    Transfer(PathBuf),
    /// No memory that can be locked.
    #[error("the key pair that keys are sealed to: {0}")]
    KeyBox(#[from] vmseal_secret::sealed_box::BoxError),
}

/// This machine.
pub struct RealHost {
    shared: Arc<Shared>,
    description: HostDescription,
    vms: Arc<Vms>,
    measuring: Measuring,
    scanning: Scanning,
    sweeping: Sweeping,
    sharing: shared::SharingChecks,
    /// Keeps other agents out of the run directory.
    _lock: nix::fcntl::Flock<std::fs::File>,
}

impl RealHost {
    /// Signs its reports with the key of this identity from now on.
    ///
    /// # Errors
    /// [`identity::IdentityError`]: it is not a key as joining makes it.
    pub fn signs_as(&self, identity: &identity::Identity) -> Result<(), identity::IdentityError> {
        // The first one stays: an agent has one identity.
        let signer = Signer::of(identity.host, &identity.certificate, &identity.key)
            .map_err(|error| identity::IdentityError::Certificate(error.to_string()))?;
        let _ = self.shared.signer.set(signer);
        Ok(())
    }

    /// Takes over the machine: adopts the VMs that run, removes what others have left.
    ///
    /// # Errors
    /// [`StartError`].
    pub async fn start(options: AgentOptions) -> Result<Self, StartError> {
        let run_error = |error| StartError::RunDir { path: options.run_dir.clone(), error };
        let lock = lock_run_dir(&options).await?;
        let run_dir = RunDir::open(&options.run_dir).map_err(run_error)?;
        let died = DiedVms::open(&options.run_dir).map_err(run_error)?;
        let transfer =
            TransferDirectories::new(options.transfer_directories).map_err(StartError::Transfer)?;
        let qemu = Qemu::find(&options.qemu).map_err(StartError::Qemu)?;
        let filter = process::open_program(&options.filter)
            .map_err(|error| StartError::Filter { path: options.filter.clone(), error })?;
        pool::set_program(options.filter.with_file_name("vmseal-rbd"), options.run_dir.clone());
        let accelerator = accelerator::choose(
            options.accelerator,
            qemu.path(),
            qemu.version(),
            &run_dir.accelerator(),
        )
        .await;
        tracing::info!(kind = ?accelerator.kind, reason = accelerator.reason, "guests are run by");
        let root = nix::unistd::geteuid().is_root();
        let migrations = match options.migration_listen {
            Some(address) => listen_for_migrations(address).await,
            None => None,
        };
        let shared = Arc::new(Shared {
            states: StateStore::new(Incarnation::new()),
            key_box: KeyBox::new()?,
            run_dir,
            died,
            bitmaps: BitmapFiles::in_state_directory(&options.state_dir),
            transfer,
            users: Users::new(root.then_some(options.uid_base)),
            filter: Arc::new(filter),
            qemu,
            firmware: FirmwareFiles::of(options.firmware_directory),
            swtpm: Swtpm::of(options.swtpm),
            accelerator,
            filter_restart_timeout: options.filter_restart_timeout,
            disk_stall: options.disk_stall,
            signer: OnceLock::new(),
            migrations,
            place_memory: options.place_memory,
        });
        let vms = vm::adopt(&shared).await.map_err(run_error)?;
        let records = shared.run_dir.exports();
        let sweeping = timed::call(&options.run_dir, move || {
            exported::sweep(&records);
            Ok(())
        });
        if let Err(problem) = sweeping.await {
            tracing::warn!(%problem, "unfinished exports may be left");
        }
        let weaknesses = machine::weaknesses(options.hardening, root);
        let description = describe(&shared, weaknesses);
        Ok(Self {
            shared,
            description,
            vms: Arc::new(Vms::of(vms)),
            measuring: Measuring::default(),
            scanning: Scanning::default(),
            sweeping: Sweeping::default(),
            sharing: shared::SharingChecks::default(),
            _lock: lock,
        })
    }

    async fn vm(&self, vm: VmId) -> Result<Vm, Problem> {
        self.vms.get(vm)
    }

    async fn change_keys(
        &self,
        vm: VmId,
        registered: KeyReference,
        change: Change,
    ) -> Result<(), Problem> {
        let call = |reply| Call::ChangeKeys(registered, Box::new(change), reply);
        self.vm(vm).await?.ask(vm, call).await
    }
}

/// How long the run directory may be locked by another process. A child that a killed agent was about to start
/// holds the lock until it executes its program. By then it is on record, and this agent finds it there.
const LOCK_TIMEOUT: Duration = Duration::from_secs(5);

/// The pause between attempts.
const LOCK_INTERVAL: Duration = Duration::from_millis(20);

/// Waits for VMs that other hosts send. A host where that is not possible does all else.
async fn listen_for_migrations(address: SocketAddr) -> Option<Listener> {
    match Listener::bind(address).await {
        Ok(listener) => {
            tracing::info!(address = %listener.address(), "running VMs of other hosts are received at");
            Some(listener)
        }
        Err(error) => {
            tracing::warn!(%address, %error, "no running VMs of other hosts are received: give --migration-listen");
            None
        }
    }
}

async fn lock_run_dir(
    options: &AgentOptions,
) -> Result<nix::fcntl::Flock<std::fs::File>, StartError> {
    let run_error = |error| StartError::RunDir { path: options.run_dir.clone(), error };
    DirBuilder::new().recursive(true).mode(0o700).create(&options.run_dir).map_err(run_error)?;
    let mut file = std::fs::File::create(options.run_dir.join("lock")).map_err(run_error)?;
    let begin = Instant::now();
    loop {
        match nix::fcntl::Flock::lock(file, nix::fcntl::FlockArg::LockExclusiveNonblock) {
            Ok(lock) => return Ok(lock),
            Err((_, nix::errno::Errno::EWOULDBLOCK)) if begin.elapsed() > LOCK_TIMEOUT => {
                return Err(StartError::Running(options.run_dir.clone()));
            }
            Err((same, nix::errno::Errno::EWOULDBLOCK)) => file = same,
            Err((_, error)) => return Err(run_error(error.into())),
        }
        tokio::time::sleep(LOCK_INTERVAL).await;
    }
}

fn describe(shared: &Shared, weaknesses: Vec<String>) -> HostDescription {
    let machine = Machine::this();
    HostDescription {
        contract: CONTRACT,
        features: FEATURES.map(str::to_owned).to_vec(),
        vmseal: env!("CARGO_PKG_VERSION").to_owned(),
        boot: Some(machine::boot_id()),
        incarnation: shared.states.incarnation(),
        hostname: machine.hostname,
        key_box: shared.key_box.public(),
        accelerator: shared.accelerator.clone(),
        qemu: shared.qemu.version().to_owned(),
        cpus: machine.cpus,
        memory: machine.memory,
        aes_hardware: machine.aes_hardware,
        run_dir: shared.run_dir.path().display().to_string(),
        transfer_directories: shared.transfer.shown(),
        migration_address: shared.migrations.as_ref().map(Listener::address),
        weaknesses,
    }
}

impl ShowsCertificate for RealHost {}

#[async_trait]
impl HostAgent for RealHost {
    async fn describe(&self) -> Result<HostDescription, Problem> {
        Ok(self.description.clone())
    }

    async fn state(
        &self,
        after: Option<(Incarnation, u64)>,
        wait: Duration,
    ) -> Result<StateChange, Problem> {
        Ok(self.shared.states.state(after, wait).await)
    }

    async fn probe_datastore(&self, spec: DatastoreSpec) -> Result<DatastoreUsage, Problem> {
        let place = spec.clone();
        let usage = spawn_blocking(move || datastore::probe(&place))
            .await
            .map_err(|error| Problem::new(ErrorCode::Internal, error.to_string()))??;
        self.sweeping.when_due(spec, self.vms.is_known());
        Ok(usage)
    }

    async fn examine_datastore(&self, spec: DatastoreSpec) -> Result<DatastoreUsage, Problem> {
        spawn_blocking(move || datastore::examine(&spec))
            .await
            .map_err(|error| Problem::new(ErrorCode::Internal, error.to_string()))?
    }

    async fn share_datastore(&self, sharing: Sharing) -> Result<(), Problem> {
        self.sharing.step(sharing).await
    }

    async fn offer_pool_key(&self, offered: PoolKey) -> Result<(), Problem> {
        let key = self.shared.key_box.open_pool_key(&offered)?;
        if key.is_none() {
            // The host does not have the pool any more.
            pool::forget_way(&offered.path);
        }
        pool_keys::hold(offered.path, key);
        Ok(())
    }

    async fn remount_datastore(&self, remount: Remount) -> Result<Option<String>, Problem> {
        let key = remount::key_to_try(&self.shared.key_box, &remount)?;
        let Remount { datastore, only_try, cluster, .. } = remount;
        spawn_blocking(move || match (&key, &cluster) {
            (None, None) => remount::remount(&datastore.location, only_try),
            (key, cluster) => {
                remount::try_way(&datastore.location, key.as_ref(), cluster.as_deref())
                    .map(|()| None)
            }
        })
        .await
        .map_err(|error| Problem::new(ErrorCode::Internal, error.to_string()))?
    }

    async fn fence_vm(&self, fence: Fence) -> Result<(), Problem> {
        let Some(first) = fence.vm.disks().next() else { return Ok(()) };
        // The server asks until there is an answer: a cluster that gives none holds up one thread for each VM, here and in vmseal-rbd. What
        // is done late is done again after that.
        let place = first.datastore.location.path().join(fence.vm.vm.to_string());
        timed::call(&place, move || fence::fence(&fence)).await
    }

    async fn examine_disk(&self, new_disk: NewDisk) -> Result<(), Problem> {
        let (transfer, taken) = (&self.shared.transfer, new_disk.taken_variables());
        if let Some((path, firmware)) = taken {
            variables::take(path.to_owned(), firmware, transfer).await?;
            return disk::examine(new_disk.disk, None, transfer).await;
        }
        if let Some(path) = new_disk.taken_tpm_state() {
            tpm_import::take(path.to_owned(), transfer).await?;
            return disk::examine(new_disk.disk, None, transfer).await;
        }
        disk::examine(new_disk.disk, new_disk.source, transfer).await
    }

    async fn measure_datastore(&self, spec: DatastoreSpec) -> Result<DatastoreCondition, Problem> {
        let condition = self.measuring.measure(spec.clone()).await;
        if matches!(condition, DatastoreCondition::Available { .. }) {
            self.sweeping.when_due(spec, self.vms.is_known());
        }
        Ok(condition)
    }

    async fn examine_hardware(
        &self,
        hardware: Hardware,
        memory: Option<u64>,
    ) -> Result<(), Problem> {
        let Shared { qemu, firmware, swtpm, accelerator, .. } = &*self.shared;
        hardware::examine(&hardware, memory, qemu, firmware, swtpm, accelerator.kind)?;
        medium::open(&hardware, &self.shared.transfer).await.map(drop)
    }

    async fn examine_migration_port(&self, to: SocketAddr) -> Result<(), Problem> {
        let tried = transport::examine(to).await;
        tried.map_err(|error| Problem::new(ErrorCode::WrongState, error.to_string()))
    }

    async fn scan_datastore(&self, spec: DatastoreSpec) -> Result<DatastoreContents, Problem> {
        self.scanning.scan(spec).await
    }

    async fn survey_datastore(
        &self,
        location: DatastoreLocation,
    ) -> Result<DatastoreSurvey, Problem> {
        let path = location.path().to_owned();
        timed::call(&path, move || survey::survey(&location)).await
    }

    async fn metrics(&self) -> Result<String, Problem> {
        let state = self.shared.states.now();
        let refused = self.shared.migrations.as_ref().map(Listener::refused).unwrap_or_default();
        metrics::exposition(&self.shared.run_dir, state, refused).await
    }

    async fn usage(&self) -> Result<HostUsage, Problem> {
        Ok(vm::usage::of_host(&self.shared.run_dir, self.shared.states.now()).await)
    }

    async fn log_level(&self) -> Result<LogLevel, Problem> {
        Ok(log_level::shown())
    }

    async fn set_log_level(&self, levels: String) -> Result<LogLevel, Problem> {
        let state = self.shared.states.now();
        log_level::set(&self.shared.run_dir, state, &levels).await
    }

    async fn register_vm(&self, spec: VmSpec) -> Result<(), Problem> {
        rules::check_spec(&spec)?;
        let vm = spec.vm;
        let initial = match vm::is_suspended(&spec).await {
            Some(true) => Initial::Suspended,
            Some(false) | None => Initial::New,
        };
        let own = |spec| Vm::own(self.shared.clone(), spec, initial);
        self.vms.register(vm, spec, own).await
    }

    async fn unregister_vm(&self, vm: VmId) -> Result<(), Problem> {
        self.vms.forget(vm).await
    }

    async fn offer_key(&self, vm: VmId, key: SealedKey) -> Result<(), Problem> {
        self.vm(vm).await?.ask(vm, |reply| Call::OfferKey(key, reply)).await
    }

    async fn check_key(&self, vm: VmId, key: KeyReference) -> Result<(), Problem> {
        self.change_keys(vm, key, Change::None).await
    }

    async fn add_key(&self, vm: VmId, other: OtherKey) -> Result<(), Problem> {
        let OtherKey { beside, key, sealed } = other;
        self.change_keys(vm, beside, Change::Add(key, sealed)).await
    }

    async fn drop_other_keys(&self, vm: VmId, keep: KeyReference) -> Result<(), Problem> {
        self.change_keys(vm, keep, Change::DropOthers).await
    }

    async fn share_data_keys(&self, vm: VmId, shared: ShareDataKeys) -> Result<(), Problem> {
        let ShareDataKeys { key, disks } = shared;
        self.change_keys(vm, key, Change::Share(disks)).await
    }

    async fn measure_kept(&self, vm: VmId, disks: Vec<PlacedDisk>) -> Result<KeptRoom, Problem> {
        let Some(first) = disks.first() else { return Ok(KeptRoom::default()) };
        let place = first.datastore.location.path().to_owned();
        timed::call(&place, move || kept_room::measure(vm, &disks)).await
    }

    async fn measure_medium(&self, vm: VmId, path: PathBuf) -> Result<MediumFacts, Problem> {
        let qemu = self.shared.run_dir.vm(vm).process(qemu::NAME);
        let transfer = self.shared.transfer.clone();
        timed::call(&path.clone(), move || {
            let file = medium::open_file(&path, &transfer)?;
            medium::require_in_use(&path, &file, &qemu)?;
            medium::measure(&path, &file)
        })
        .await
    }

    async fn examine_nic(&self, vm: VmId, nic: NicSpec) -> Result<(), Problem> {
        let own_user = nix::unistd::geteuid().is_root();
        spawn_blocking(move || network::examine(vm, &nic, own_user))
            .await
            .map_err(|error| Problem::new(ErrorCode::Internal, error.to_string()))?
    }

    async fn examine_job(&self, vm: VmId, spec: JobSpec) -> Result<(), Problem> {
        self.vm(vm).await?.ask(vm, |reply| Call::ExamineJob(spec, reply)).await
    }

    async fn examine_change(&self, vm: VmId, change: VmChange) -> Result<(), Problem> {
        // The server asks before it registers the VM. So the VM may be unknown here, and its datastores alone are compared.
        if let VmChange::Restored { spec } = &change {
            return restored::examine(spec).await;
        }
        self.vm(vm).await?.ask(vm, |reply| Call::ExamineChange(change, reply)).await
    }

    async fn put_job(&self, vm: VmId, task: TaskId, spec: JobSpec) -> Result<(), Problem> {
        let mut lent = Vec::new();
        if let JobSpec::Create(create) = &spec {
            for of in create.disks.iter().filter_map(|disk| disk.copy_of) {
                let owner = self.vm(of.vm).await?;
                lent.push(owner.ask(of.vm, |reply| Call::Lend(of, reply)).await?);
            }
        }
        if let JobSpec::Receive(_) = &spec
            && self.vms.get(vm).is_err()
        {
            let expected = vm::expect(&self.shared, task, spec)?;
            return self.vms.receive(vm, expected, &self.shared).await;
        }
        self.vm(vm).await?.ask(vm, |reply| Call::PutJob(task, spec, lent, reply)).await
    }

    async fn job(&self, vm: VmId, task: TaskId) -> Result<JobStatus, Problem> {
        self.vm(vm).await?.ask(vm, |reply| Call::Job(task, reply)).await
    }

    async fn set_pace(&self, vm: VmId, task: TaskId, pace: CopyPace) -> Result<(), Problem> {
        self.vm(vm).await?.ask(vm, |reply| Call::SetPace(task, pace, reply)).await
    }

    async fn commit_job(&self, vm: VmId, task: TaskId, spec: JobSpec) -> Result<(), Problem> {
        self.vm(vm).await?.ask(vm, |reply| Call::CommitJob(task, spec, reply)).await
    }

    async fn cancel_job(&self, vm: VmId, task: TaskId, spec: JobSpec) -> Result<(), Problem> {
        if let JobSpec::Receive(ReceiveJob { copies: Some(copies), .. }) = &spec
            && self.vms.get(vm).is_err()
        {
            // An earlier agent may have left them.
            return vm::give_up_copies(&self.shared, vm, copies).await;
        }
        self.vm(vm).await?.ask(vm, |reply| Call::CancelJob(task, spec, reply)).await
    }

    async fn delete_disk(&self, vm: VmId, disk: DiskId) -> Result<(), Problem> {
        self.vm(vm).await?.ask(vm, |reply| Call::DeleteDisk(disk, reply)).await
    }

    async fn expose_disk(
        &self,
        vm: VmId,
        disk: DiskId,
        what: Exposing,
    ) -> Result<ConsoleStream, Problem> {
        self.vm(vm).await?.ask(vm, |reply| Call::Expose(disk, what, reply)).await
    }

    async fn bitmaps(&self, vm: VmId, disk: DiskId) -> Result<Vec<BitmapStatus>, Problem> {
        self.vm(vm).await?.ask(vm, |reply| Call::Bitmaps(disk, None, reply)).await
    }

    async fn change_bitmap(
        &self,
        vm: VmId,
        disk: DiskId,
        name: String,
        change: BitmapChange,
    ) -> Result<Vec<BitmapStatus>, Problem> {
        let change = Some((name, change));
        self.vm(vm).await?.ask(vm, |reply| Call::Bitmaps(disk, change, reply)).await
    }

    async fn replica(&self, vm: VmId, disk: DiskId) -> Result<ReplicaStatus, Problem> {
        self.vm(vm).await?.ask(vm, |reply| Call::Replica(disk, reply)).await
    }

    async fn power_on(&self, vm: VmId) -> Result<(), Problem> {
        self.vm(vm).await?.ask(vm, |to| Call::PowerOn(None, None, to)).await
    }

    async fn power_on_from(&self, vm: VmId, first: BootDevice) -> Result<(), Problem> {
        self.vm(vm).await?.ask(vm, |to| Call::PowerOn(Some(first), None, to)).await
    }

    async fn power_on_with(&self, vm: VmId, generation: u64) -> Result<(), Problem> {
        self.vm(vm).await?.ask(vm, |to| Call::PowerOn(None, Some(generation), to)).await
    }

    async fn suspend(&self, vm: VmId) -> Result<(), Problem> {
        self.vm(vm).await?.ask(vm, |to| Call::Suspend(None, to)).await
    }

    async fn suspend_as(&self, vm: VmId, generation: u64) -> Result<(), Problem> {
        self.vm(vm).await?.ask(vm, |to| Call::Suspend(Some(generation), to)).await
    }

    async fn discard_memory(&self, vm: VmId) -> Result<(), Problem> {
        self.vm(vm).await?.ask(vm, Call::DiscardMemory).await
    }

    async fn discard_dump(&self, vm: VmId, dump: DumpId) -> Result<(), Problem> {
        self.vm(vm).await?.ask(vm, |reply| Call::DiscardDump(dump, reply)).await
    }

    async fn read_backup(&self, place: BackupPlace) -> Result<BackupManifest, Problem> {
        let (allowed, directory) = (self.shared.transfer.clone(), place.directory.clone());
        timed::call(&directory, move || backup::read(&place, &allowed)).await
    }

    async fn discard_backup(&self, place: BackupPlace) -> Result<(), Problem> {
        let allowed = self.shared.transfer.clone();
        let removed = tokio::task::spawn_blocking(move || backup::discard(&place, &allowed));
        removed.await.map_err(|error| Problem::new(ErrorCode::Internal, error.to_string()))?
    }

    async fn power_off(&self, vm: VmId, how: PowerOff) -> Result<(), Problem> {
        self.vm(vm).await?.ask(vm, |reply| Call::PowerOff(how, reply)).await
    }

    async fn control_guest(&self, vm: VmId, what: GuestControl) -> Result<(), Problem> {
        self.vm(vm).await?.ask(vm, |reply| Call::ControlGuest(what, reply)).await
    }

    async fn grow_disk(&self, vm: VmId, disk: DiskId, size: u64) -> Result<(), Problem> {
        self.vm(vm).await?.ask(vm, |reply| Call::GrowDisk(disk, size, reply)).await
    }

    async fn screen(&self, vm: VmId) -> Result<ConsoleStream, Problem> {
        self.vm(vm).await?.ask(vm, Call::Screen).await
    }

    async fn guest(&self, vm: VmId, command: GuestCommand) -> Result<GuestAnswer, Problem> {
        rules::check_guest_command(&command)?;
        // The guest may take its time: the VM's owner does not wait for it.
        self.vm(vm).await?.ask(vm, Call::Guest).await?.ask(command).await
    }

    async fn console(&self, vm: VmId, claim: ConsoleClaim) -> Result<ConsoleStream, Problem> {
        self.vm(vm).await?.ask(vm, |reply| Call::Console(claim, reply)).await
    }
}
