//! The calls of a simulated host.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

use async_trait::async_trait;
use vmseal_api::boot::BootDevice;
use vmseal_api::datastore::{
    Claim, DatastoreCondition, DatastoreContents, FoundImage, ImageContent, NamedImage,
};
use vmseal_api::filter::{BitmapChange, BitmapStatus, ReplicaStatus};
use vmseal_api::guest::{GuestAnswer, GuestCommand};
use vmseal_api::hardware::{HUGE_PAGE, Hardware, MemoryBacking};
use vmseal_api::host::backup::{BackupManifest, BackupPlace};
use vmseal_api::host::survey::DatastoreSurvey;
use vmseal_api::host::{
    Allocation, ConsoleClaim, ConsoleStream, DatastoreLocation, DatastoreSpec, DatastoreUsage,
    DiskFacts, DiskSpec, Exposing, Fence, GuestControl, HostAgent, HostDescription, JobSpec,
    JobStatus, KeptRoom, KeyReference, MediumFacts, NewDisk, NicSpec, OtherKey, PlacedDisk,
    PoolKey, Power, PowerOff, Remount, SealedKey, ShareDataKeys, Sharing, ShowsCertificate,
    StateChange, VmChange, VmSpec,
};
use vmseal_api::id::{DiskId, DumpId, Incarnation, TaskId, VmId};
use vmseal_api::log_level::LogLevel;
use vmseal_api::pace::CopyPace;
use vmseal_api::problem::{ErrorCode, Problem};
use vmseal_api::size::Size;
use vmseal_api::usage::HostUsage;
use vmseal_luks::Facts;

use super::running::open_medium;
use super::storage::Left;
use super::{CAPACITY, Call, Fault, Inside, SimulatedDisk, SimulatedHost, Work, gone, lost};
use crate::filter::log_level;
use crate::rules;
use crate::rules::exclusion::Action;
use crate::storage::facts::{role_of, told_role};
use crate::storage::image::Image;
use crate::storage::medium;
use crate::storage::memory::NOT_COUNTED;
use crate::storage::tpm_import;
use crate::storage::transfer::TransferDirectories;
use crate::storage::variables;

/// Work that continues after a call has been answered.
pub type Later = Option<(VmId, Work, u64, Duration)>;

impl SimulatedHost {
    /// Executes a call, with the fault that is planned for it.
    fn call<T>(
        &self,
        call: Call,
        work: impl FnOnce(&mut Inside) -> Result<T, Problem>,
    ) -> Result<T, Problem> {
        let mut inside = self.inside();
        if !inside.reachable {
            return Err(gone());
        }
        match inside.faults.count(call) {
            None => work(&mut inside),
            Some(Fault::Refuse(code)) => Err(Problem::new(code, "an injected refusal")),
            Some(Fault::LoseRequest) => Err(lost()),
            Some(Fault::LoseAnswer) => {
                // The real answer is lost, whatever it is.
                let _ = work(&mut inside);
                let problem = Problem::new(ErrorCode::TimedOut, "an injected time-out");
                Err(Problem { in_doubt: true, ..problem })
            }
            Some(Fault::Crash) => {
                inside.restart();
                Err(lost())
            }
            Some(Fault::CrashHalfway) => {
                inside.halfway = true;
                let _ = work(&mut inside);
                inside.halfway = false;
                inside.restart();
                Err(lost())
            }
            Some(Fault::CrashAfter) => {
                let _ = work(&mut inside);
                inside.restart();
                Err(lost())
            }
            Some(Fault::FallSilentAfter) => {
                let _ = work(&mut inside);
                inside.set_reachable(false);
                Err(lost())
            }
        }
    }

    /// A call that begins work which ends later; the work continues even when the answer is lost.
    fn begin(
        &self,
        call: Call,
        work: impl FnOnce(&mut Inside) -> Result<Later, Problem>,
        end: fn(&mut Inside, VmId, Work),
    ) -> Result<(), Problem> {
        self.call(call, |inside| {
            let Some((vm, work, number, duration)) = work(inside)? else { return Ok(()) };
            let host = self.clone();
            let incarnation = inside.agent.states.incarnation();
            tokio::spawn(async move {
                tokio::time::sleep(duration).await;
                let mut inside = host.inside();
                let current = inside.agent.vms.get(&vm).and_then(|known| known.work.get(&work));
                if inside.agent.states.incarnation() == incarnation && current == Some(&number) {
                    if let Ok(known) = inside.known(vm) {
                        known.work.remove(&work);
                    }
                    end(&mut inside, vm, work);
                    inside.agent.publish(vm);
                }
            });
            Ok(())
        })
    }
}

impl Inside {
    pub fn numbered(&mut self, vm: VmId, work: Work, duration: Duration) -> Result<Later, Problem> {
        self.agent.works += 1;
        let number = self.agent.works;
        self.known(vm)?.work.insert(work, number);
        self.agent.publish(vm);
        Ok(Some((vm, work, number, duration)))
    }

    fn probe(&mut self, spec: &DatastoreSpec) -> Result<DatastoreUsage, Problem> {
        let path = spec.location.path();
        self.examine(spec)?;
        self.persisted.storage.put_mark(path, spec.datastore);
        Ok(self.usage())
    }

    fn examine(&self, spec: &DatastoreSpec) -> Result<DatastoreUsage, Problem> {
        self.may_mount(&spec.location)?;
        let path = spec.location.path();
        if !path.is_absolute() || path.ends_with("missing") {
            return Err(Problem::invalid("location.path", "is no directory on this host"));
        }
        if let Some(mark) = self.persisted.storage.mark(path).filter(|mark| *mark != spec.datastore)
        {
            let what = format!("{} holds datastore {mark}", path.display());
            return Err(Problem::new(ErrorCode::WrongState, what));
        }
        Ok(self.usage())
    }

    fn examine_disk(&self, new_disk: &NewDisk) -> Result<(), Problem> {
        let NewDisk { disk, source, .. } = new_disk;
        self.check_place(&disk.datastore)?;
        if let Some(replica) = &disk.replica {
            self.check_place(&replica.datastore)?;
        }
        if let Some((path, firmware)) = new_disk.taken_variables() {
            variables::read(path, firmware, &TransferDirectories::anywhere())?;
        } else if let Some(path) = new_disk.taken_tpm_state() {
            tpm_import::read(path, &TransferDirectories::anywhere())?;
        } else if let Some(source) = source {
            Image::open(source, disk, &TransferDirectories::anywhere())?;
        }
        if disk.allocation == Allocation::Preallocated && (self.full || disk.size > CAPACITY) {
            return Err(Problem::new(ErrorCode::NoSpace, "the simulated datastore is full"));
        }
        Ok(())
    }

    fn usage(&self) -> DatastoreUsage {
        DatastoreUsage { capacity: CAPACITY, free: if self.full { 0 } else { CAPACITY } }
    }

    fn condition(&mut self, spec: &DatastoreSpec) -> DatastoreCondition {
        let pools = spec.location.pool().map_or_else(Vec::new, |_| self.pools.clone());
        let mounted_key = self.mounted_key(&spec.location);
        let mount = self.mount(&spec.location);
        let osds = spec.location.pool().and(self.osds);
        let fencing = spec.location.pool().and(self.fencing);
        let available = |free| {
            let usage = DatastoreUsage { capacity: CAPACITY, free };
            DatastoreCondition::Available { usage, pools, mounted_key, mount, osds, fencing }
        };
        if let Some(free) = self.free {
            return available(free);
        }
        match self.check_place(spec) {
            Ok(()) => available(self.usage().free),
            Err(problem) => DatastoreCondition::WrongMark { detail: problem.detail },
        }
    }

    /// The disks that a real host would find there.
    fn contents(&self, spec: &DatastoreSpec) -> Result<DatastoreContents, Problem> {
        self.check_place(spec)?;
        let here = self.persisted.disks.iter().filter(|(_, it)| it.datastore == spec.datastore);
        let image = |(disk, it): (&DiskId, &SimulatedDisk)| FoundImage {
            path: format!("{}/{disk}.raw", it.vm),
            named: Some(NamedImage { vm: it.vm, disk: *disk, half_made: false, replica: false }),
            size: it.length,
            allocated: 0,
            modified: None,
            content: match &it.keys[..] {
                [] => ImageContent::Raw,
                keys => {
                    let claim = |key: &KeyReference| Claim {
                        vm: it.vm,
                        disk: *disk,
                        provider: key.provider,
                        key_id: key.key_id.clone(),
                        role: it.role,
                    };
                    ImageContent::Vmseal { claims: keys.iter().map(claim).collect() }
                }
            },
            kept_until: None,
            misnoted: None,
        };
        Ok(DatastoreContents { images: here.map(image).collect(), ..Default::default() })
    }

    pub(super) fn check_place(&self, spec: &DatastoreSpec) -> Result<(), Problem> {
        self.check_mounted_messenger(&spec.location)?;
        self.persisted.storage.check_place(spec)
    }

    fn log_level(&self) -> LogLevel {
        LogLevel { levels: self.agent.log_levels.to_string(), silent: Vec::new() }
    }

    fn register(&mut self, spec: VmSpec) -> Result<(), Problem> {
        rules::check_spec(&spec)?;
        let vm = spec.vm;
        if let Some(known) = self.agent.vms.get(&vm) {
            // Repeating the same is always allowed.
            if known.registered() == &spec {
                return Ok(());
            }
            if known.spec.key.is_some() && spec.key.is_none() {
                self.require_nothing_sealed(vm)?;
            }
            if self.persisted.guests.contains_key(&vm) {
                self.set_running(spec)?;
                self.describe_on_datastores(vm)?;
                self.agent.publish(vm);
                return Ok(());
            }
            self.may_register(&spec)?;
            let known = self.known(vm)?;
            if known.spec.key != spec.key {
                known.key_held = false;
                known.kek = None;
            }
            known.made.retain(|disk, _| spec.disk(*disk).is_some());
            known.jobs.keep_disks_of(&spec);
            known.spec = spec;
        } else {
            let left = self.persisted.storage.take(vm);
            for (disk, of) in left.disks {
                self.persisted.disks.entry(disk).or_insert(of);
            }
            self.persisted.suspended.extend(left.suspended.map(|guest| (vm, guest)));
            let mut known = super::Known::new(spec);
            if self.persisted.suspended.contains_key(&vm) {
                known.power = Power::Suspended;
            }
            self.agent.vms.insert(vm, known);
            self.list_panic_dumps(vm);
        }
        self.describe_on_datastores(vm)?;
        self.agent.publish(vm);
        Ok(())
    }

    /// Checks that a VM that does not run may be registered anew.
    pub(super) fn may_register(&mut self, spec: &VmSpec) -> Result<(), Problem> {
        self.situation(spec.vm)?.may(Action::Register, None)?;
        let known = self.known(spec.vm)?;
        match known.power {
            Power::Suspended => rules::check_devices_stay(&known.spec, spec),
            _ => Ok(()),
        }
    }

    fn unregister(&mut self, vm: VmId) -> Result<(), Problem> {
        if self.agent.vms.contains_key(&vm) {
            self.situation(vm)?.may(Action::Unregister, None)?;
            if let Some(known) = self.agent.vms.remove(&vm).filter(|known| known.receiving) {
                known.made.keys().for_each(|disk| drop(self.persisted.disks.remove(disk)));
            }
            self.agent.publish(vm);
        }
        self.leave(vm);
        self.persisted.bitmaps.remove(&vm);
        Ok(())
    }

    /// Leaves what a VM has on datastores to the host that gets it, also where this agent has restarted and does not know it.
    pub(super) fn leave(&mut self, vm: VmId) {
        let disks = self.persisted.disks.iter().filter(|(_, disk)| disk.vm == vm);
        let disks: std::collections::BTreeMap<_, _> =
            disks.map(|(id, disk)| (*id, disk.clone())).collect();
        let suspended = self.persisted.suspended.remove(&vm);
        if !disks.is_empty() || suspended.is_some() {
            self.persisted.storage.leave(vm, Left { disks, suspended });
        }
    }

    fn offer_key(&mut self, vm: VmId, offered: &SealedKey) -> Result<(), Problem> {
        let key_box = self.agent.key_box.clone();
        let known = self.known(vm)?;
        let Some(reference) = &known.spec.key else {
            return Err(rules::wrong_state(&known.spec, "has no key"));
        };
        known.kek = Some(key_box.open(vm, reference, offered)?);
        known.key_held = true;
        self.describe_on_datastores(vm)?;
        self.agent.publish(vm);
        Ok(())
    }

    pub(super) fn make_disk(&mut self, vm: VmId, disk: DiskId) -> Result<DiskFacts, Problem> {
        let known = self.known(vm)?;
        let spec = rules::find_disk(&known.spec, disk)?.clone();
        let role = told_role(role_of(&known.spec, &spec));
        let reference = known.spec.key.as_ref().filter(|_| spec.encrypted);
        let check = reference.map(|reference| reference.check.clone());
        let keys = reference.cloned().into_iter().collect();
        self.check_place(&spec.datastore)?;
        if let Some(replica) = &spec.replica {
            self.check_place(&replica.datastore)?;
        }
        if let Some(there) = self.persisted.disks.get(&disk) {
            check_key(&spec, there, check.as_deref())?;
            return Ok(there.facts.clone());
        }
        if self.fail_disks.remove(&disk) {
            return Err(Problem::new(ErrorCode::Internal, "an injected failure"));
        }
        if self.full || spec.allocation == Allocation::Preallocated && spec.size > CAPACITY {
            return Err(Problem::new(ErrorCode::NoSpace, "the simulated datastore is full"));
        }
        let facts = facts(&spec)?;
        let (datastore, checks) = (spec.datastore.datastore, check.into_iter().collect());
        let offset = match &facts {
            DiskFacts::Raw => 0,
            DiskFacts::Luks2 { data_offset, .. } => *data_offset,
        };
        let length = spec.size + offset;
        let (written, shared) = (facts.clone(), false);
        let made =
            SimulatedDisk { vm, datastore, facts: written, checks, keys, shared, role, length };
        self.persisted.disks.insert(disk, made);
        Ok(facts)
    }

    fn delete_disk(&mut self, vm: VmId, disk: DiskId) -> Result<(), Problem> {
        let spec = rules::find_disk(&self.known(vm)?.spec, disk)?.clone();
        self.situation(vm)?.may(Action::DeleteDisk, Some(&spec))?;
        self.check_place(&spec.datastore)?;
        let known = self.known(vm)?;
        known.jobs.remove_disk(disk);
        known.made.remove(&disk);
        self.persisted.disks.remove(&disk);
        self.forget_copies(disk);
        self.forget_snapshots(disk);
        self.forget_bitmaps(vm, disk);
        self.unlink(disk);
        if !self.persisted.disks.values().any(|other| other.vm == vm) {
            self.persisted.descriptors.retain(|(_, of), _| *of != vm);
        }
        self.agent.publish(vm);
        Ok(())
    }

    fn expose(&mut self, vm: VmId, disk: DiskId, what: Exposing) -> Result<ConsoleStream, Problem> {
        let known = self.known(vm)?;
        let (spec, power, unused) = (known.spec.clone(), known.power, known.unused());
        let key = rules::key_state(&spec, known.key_held);
        let disk = rules::find_disk(&spec, disk)?;
        let made = known.has_made(disk);
        match what {
            Exposing::Connect => {
                let connected = self.agent.exposed.connect(disk.disk);
                connected.ok_or_else(|| rules::not_exposed(&spec, disk))
            }
            held => {
                rules::holds_data(&spec, disk)?;
                self.situation(vm)?.may(rules::exposing(held), Some(disk))?;
                let kept = match held {
                    Exposing::HoldKept { snapshot, .. } => Some(snapshot),
                    _ => None,
                };
                if kept.is_none() && unused.contains(&disk.disk) {
                    return Err(rules::not_in_guest(&spec, disk));
                }
                let beside = matches!(held, Exposing::Hold { .. });
                if power == Power::Off || !beside {
                    rules::check_exposure(&spec, disk, key, made, held)?;
                }
                if let Some(snapshot) = kept.filter(|kept| !self.keeps(disk.disk, *kept)) {
                    return Err(rules::no_snapshot(&spec.name, disk, snapshot));
                }
                if held == (Exposing::Hold { writable: true }) {
                    self.forget_bitmaps(vm, disk.disk);
                }
                Ok(self.agent.exposed.hold(disk.disk, beside))
            }
        }
    }

    fn console(
        &mut self,
        vm: VmId,
        claim: ConsoleClaim,
        panic: impl Fn() + Send + 'static,
    ) -> Result<ConsoleStream, Problem> {
        self.situation(vm)?.may(Action::Console, None)?;
        let spec = self.known(vm)?.spec.clone();
        match self.persisted.guests.get(&vm) {
            Some(guest) => {
                let console = guest.guest.console(claim, panic);
                console.ok_or_else(|| rules::console_in_use(&spec))
            }
            None => Err(rules::wrong_state(&spec, "does not run: it has no console")),
        }
    }
}

/// The facts that the real host would return.
pub(super) fn facts(disk: &DiskSpec) -> Result<DiskFacts, Problem> {
    if !disk.encrypted {
        return Ok(DiskFacts::Raw);
    }
    let facts = Facts::new(disk.disk.0, disk.size)
        .map_err(|error| Problem::new(ErrorCode::Internal, error.to_string()))?;
    Ok(crate::storage::facts::to_api(&facts))
}

pub(super) fn check_key(
    disk: &DiskSpec,
    there: &SimulatedDisk,
    check: Option<&str>,
) -> Result<(), Problem> {
    if check.map_or(there.checks.is_empty(), |check| there.checks.contains(check)) {
        return Ok(());
    }
    let what = format!("disk '{}' is encrypted under another key", disk.name);
    Err(Problem::new(ErrorCode::KeyMismatch, what))
}

impl ShowsCertificate for SimulatedHost {}

#[async_trait]
impl HostAgent for SimulatedHost {
    async fn describe(&self) -> Result<HostDescription, Problem> {
        self.call(Call::Describe, |inside| Ok(inside.describe()))
    }

    async fn state(
        &self,
        after: Option<(Incarnation, u64)>,
        wait: Duration,
    ) -> Result<StateChange, Problem> {
        let (states, mut ended) = self.call(Call::State, |inside| {
            Ok((inside.agent.states.clone(), inside.agent.ended.subscribe()))
        })?;
        tokio::select! {
            state = states.state(after, wait) => Ok(state),
            _ = ended.wait_for(|ended| *ended) => Err(gone()),
        }
    }

    async fn probe_datastore(&self, spec: DatastoreSpec) -> Result<DatastoreUsage, Problem> {
        self.call(Call::ProbeDatastore, |inside| inside.probe(&spec))
    }

    async fn examine_datastore(&self, spec: DatastoreSpec) -> Result<DatastoreUsage, Problem> {
        self.call(Call::ExamineDatastore, |inside| inside.examine(&spec))
    }

    async fn share_datastore(&self, sharing: Sharing) -> Result<(), Problem> {
        self.call(Call::ShareDatastore, |inside| inside.persisted.storage.share(&sharing))
    }

    async fn offer_pool_key(&self, offered: PoolKey) -> Result<(), Problem> {
        self.call(Call::OfferPoolKey, |inside| inside.hold_pool_key(offered))
    }

    async fn remount_datastore(&self, remount: Remount) -> Result<Option<String>, Problem> {
        self.call(Call::RemountDatastore, |inside| inside.remount(&remount))
    }

    async fn fence_vm(&self, fence: Fence) -> Result<(), Problem> {
        self.call(Call::FenceVm, |inside| inside.fence(&fence))
    }

    async fn examine_disk(&self, disk: NewDisk) -> Result<(), Problem> {
        self.call(Call::ExamineDisk, |inside| inside.examine_disk(&disk))
    }

    async fn measure_datastore(&self, spec: DatastoreSpec) -> Result<DatastoreCondition, Problem> {
        self.call(Call::MeasureDatastore, |inside| Ok(inside.condition(&spec)))
    }

    async fn examine_hardware(
        &self,
        hardware: Hardware,
        memory: Option<u64>,
    ) -> Result<(), Problem> {
        let huge = match hardware.memory_backing {
            MemoryBacking::Pages => 0,
            MemoryBacking::Hugepages => memory.unwrap_or(HUGE_PAGE),
        };
        self.call(Call::ExamineHardware, |inside| match &hardware.cpu_model {
            _ if hardware.tpm && inside.lacks_swtpm => {
                let what = "swtpm: not found. VMs get their TPMs from swtpm: install it";
                let field = Some("tpm".to_owned());
                Err(Problem { field, ..Problem::new(ErrorCode::Unsupported, what) })
            }
            _ if huge > inside.huge_pages => {
                let what = format!("there are {} of huge pages in all", Size(inside.huge_pages));
                let field = Some("memory_backing".to_owned());
                Err(Problem { field, ..Problem::new(ErrorCode::Unsupported, what) })
            }
            Some(model) if model.starts_with("missing") => {
                let what = format!("there is no processor model '{model}'");
                Err(Problem::new(ErrorCode::Unsupported, what))
            }
            _ => open_medium(&hardware),
        })
    }

    async fn scan_datastore(&self, spec: DatastoreSpec) -> Result<DatastoreContents, Problem> {
        self.call(Call::ScanDatastore, |inside| inside.contents(&spec))
    }

    async fn survey_datastore(
        &self,
        location: DatastoreLocation,
    ) -> Result<DatastoreSurvey, Problem> {
        self.call(Call::SurveyDatastore, |inside| inside.survey(&location))
    }

    async fn metrics(&self) -> Result<String, Problem> {
        self.call(Call::Metrics, |_| Ok("# EOF\n".to_owned()))
    }

    async fn usage(&self) -> Result<HostUsage, Problem> {
        self.call(Call::Usage, |inside| Ok(inside.used()))
    }

    async fn log_level(&self) -> Result<LogLevel, Problem> {
        self.call(Call::LogLevel, |inside| Ok(inside.log_level()))
    }

    async fn set_log_level(&self, levels: String) -> Result<LogLevel, Problem> {
        self.call(Call::SetLogLevel, |inside| {
            inside.agent.log_levels = log_level::parse(&levels)?;
            Ok(inside.log_level())
        })
    }

    async fn register_vm(&self, spec: VmSpec) -> Result<(), Problem> {
        self.call(Call::RegisterVm, |inside| inside.register(spec))
    }

    async fn unregister_vm(&self, vm: VmId) -> Result<(), Problem> {
        self.call(Call::UnregisterVm, |inside| inside.unregister(vm))
    }

    async fn offer_key(&self, vm: VmId, key: SealedKey) -> Result<(), Problem> {
        self.call(Call::OfferKey, |inside| inside.offer_key(vm, &key))
    }

    async fn check_key(&self, vm: VmId, key: KeyReference) -> Result<(), Problem> {
        self.call(Call::CheckKey, |inside| inside.key_opens(vm, &key).map(drop))
    }

    async fn add_key(&self, vm: VmId, other: OtherKey) -> Result<(), Problem> {
        self.call(Call::AddKey, |inside| inside.add_key(vm, &other))
    }

    async fn drop_other_keys(&self, vm: VmId, keep: KeyReference) -> Result<(), Problem> {
        self.call(Call::DropOtherKeys, |inside| inside.drop_other_keys(vm, &keep))
    }

    async fn share_data_keys(&self, vm: VmId, shared: ShareDataKeys) -> Result<(), Problem> {
        self.call(Call::ShareDataKeys, |inside| inside.share_data_keys(vm, &shared))
    }

    async fn measure_kept(&self, _: VmId, disks: Vec<PlacedDisk>) -> Result<KeptRoom, Problem> {
        self.call(Call::MeasureKept, |inside| Ok(inside.kept_room(&disks)))
    }

    async fn measure_medium(&self, _: VmId, path: PathBuf) -> Result<MediumFacts, Problem> {
        self.call(Call::MeasureMedium, |inside| {
            let file = medium::open_file(&path, &TransferDirectories::anywhere())?;
            let mut facts = medium::measure(&path, &file)?;
            if inside.other_media {
                facts.ends.insert_str(0, "other ");
            }
            Ok(facts)
        })
    }

    async fn examine_nic(&self, _: VmId, nic: NicSpec) -> Result<(), Problem> {
        self.call(Call::ExamineNic, |inside| inside.may_connect(&nic))
    }

    async fn examine_migration_port(&self, to: SocketAddr) -> Result<(), Problem> {
        self.call(Call::ExamineMigrationPort, |inside| inside.reaches(to))
    }

    async fn examine_job(&self, vm: VmId, spec: JobSpec) -> Result<(), Problem> {
        self.call(Call::ExamineJob, |inside| inside.ready(vm, TaskId::new(), &spec))
    }

    async fn examine_change(&self, vm: VmId, change: VmChange) -> Result<(), Problem> {
        self.call(Call::ExamineChange, |inside| inside.examine_change(vm, &change))
    }

    async fn put_job(&self, vm: VmId, task: TaskId, spec: JobSpec) -> Result<(), Problem> {
        let begin = |inside: &mut Inside| inside.put_job(vm, task, spec);
        self.begin(Call::PutJob, begin, Inside::worked)
    }

    async fn job(&self, vm: VmId, task: TaskId) -> Result<JobStatus, Problem> {
        self.call(Call::Job, |inside| inside.known(vm)?.jobs.status(task))
    }

    async fn set_pace(&self, vm: VmId, task: TaskId, pace: CopyPace) -> Result<(), Problem> {
        self.begin(Call::SetPace, |inside| inside.set_work_pace(vm, task, pace), Inside::worked)
    }

    async fn commit_job(&self, vm: VmId, task: TaskId, spec: JobSpec) -> Result<(), Problem> {
        let begin = |inside: &mut Inside| inside.commit_job(vm, task, spec);
        self.begin(Call::CommitJob, begin, Inside::worked)
    }

    async fn cancel_job(&self, vm: VmId, task: TaskId, spec: JobSpec) -> Result<(), Problem> {
        self.call(Call::CancelJob, |inside| inside.cancel_job(vm, task, spec))
    }

    async fn delete_disk(&self, vm: VmId, disk: DiskId) -> Result<(), Problem> {
        self.call(Call::DeleteDisk, |inside| inside.delete_disk(vm, disk))
    }

    async fn expose_disk(
        &self,
        vm: VmId,
        disk: DiskId,
        what: Exposing,
    ) -> Result<ConsoleStream, Problem> {
        self.call(Call::ExposeDisk, |inside| inside.expose(vm, disk, what))
    }

    async fn bitmaps(&self, vm: VmId, disk: DiskId) -> Result<Vec<BitmapStatus>, Problem> {
        self.call(Call::Bitmaps, |inside| inside.bitmaps(vm, disk, None))
    }

    async fn change_bitmap(
        &self,
        vm: VmId,
        disk: DiskId,
        name: String,
        change: BitmapChange,
    ) -> Result<Vec<BitmapStatus>, Problem> {
        self.call(Call::ChangeBitmap, |inside| inside.bitmaps(vm, disk, Some((name, change))))
    }

    async fn replica(&self, vm: VmId, disk: DiskId) -> Result<ReplicaStatus, Problem> {
        self.call(Call::Replica, |inside| inside.replica(vm, disk))
    }

    async fn power_on(&self, vm: VmId) -> Result<(), Problem> {
        self.begin(Call::PowerOn, |inside| inside.power_on(vm, None, None), Inside::started)
    }

    async fn power_on_with(&self, vm: VmId, generation: u64) -> Result<(), Problem> {
        let begin = |inside: &mut Inside| inside.power_on(vm, None, Some(generation));
        self.begin(Call::PowerOn, begin, Inside::started)
    }

    async fn power_on_from(&self, vm: VmId, first: BootDevice) -> Result<(), Problem> {
        let begin = |inside: &mut Inside| inside.power_on(vm, Some(first), None);
        self.begin(Call::PowerOn, begin, Inside::started)
    }

    async fn power_off(&self, vm: VmId, how: PowerOff) -> Result<(), Problem> {
        self.begin(Call::PowerOff, |inside| inside.power_off(vm, how), Inside::shut_down)
    }

    async fn suspend(&self, vm: VmId) -> Result<(), Problem> {
        self.suspend_as(vm, NOT_COUNTED).await
    }

    async fn suspend_as(&self, vm: VmId, generation: u64) -> Result<(), Problem> {
        self.begin(Call::Suspend, |inside| inside.suspend(vm, generation), Inside::suspended)
    }

    async fn discard_memory(&self, vm: VmId) -> Result<(), Problem> {
        self.call(Call::DiscardMemory, |inside| inside.discard_memory(vm))
    }

    async fn discard_dump(&self, vm: VmId, dump: DumpId) -> Result<(), Problem> {
        self.call(Call::DiscardDump, |inside| {
            inside.known(vm)?;
            inside.persisted.dumps.remove(&dump);
            inside.persisted.panic_dumps.retain(|(_, known)| known.dump != dump);
            inside.list_panic_dumps(vm);
            inside.agent.publish(vm);
            Ok(())
        })
    }

    async fn read_backup(&self, place: BackupPlace) -> Result<BackupManifest, Problem> {
        self.call(Call::ReadBackup, |inside| inside.read_backup(&place))
    }

    async fn discard_backup(&self, place: BackupPlace) -> Result<(), Problem> {
        self.call(Call::DiscardBackup, |inside| inside.discard_backup(&place))
    }

    async fn control_guest(&self, vm: VmId, what: GuestControl) -> Result<(), Problem> {
        self.call(Call::ControlGuest, |inside| inside.control_guest(vm, what))
    }

    async fn grow_disk(&self, vm: VmId, disk: DiskId, size: u64) -> Result<(), Problem> {
        self.call(Call::GrowDisk, |inside| inside.grow_disk(vm, disk, size))
    }

    async fn screen(&self, vm: VmId) -> Result<ConsoleStream, Problem> {
        self.call(Call::Screen, |inside| {
            inside.situation(vm)?.may(Action::Screen, None)?;
            Ok(super::console::screen())
        })
    }

    async fn guest(&self, vm: VmId, command: GuestCommand) -> Result<GuestAnswer, Problem> {
        rules::check_guest_command(&command)?;
        self.call(Call::Guest, |inside| {
            inside.situation(vm)?.may(Action::Guest, None)?;
            Ok(super::console::answer(command))
        })
    }

    async fn console(&self, vm: VmId, claim: ConsoleClaim) -> Result<ConsoleStream, Problem> {
        let host = self.clone();
        let panic = move || host.panic_guest(vm);
        self.call(Call::Console, |inside| inside.console(vm, claim, panic))
    }
}
