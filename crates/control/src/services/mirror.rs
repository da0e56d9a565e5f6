//! Encrypts and decrypts VMs that are there, or single disks of theirs, gives their disks new keys (deep recrypt), and moves these. The VM may run, be off or be suspended; its
//! disks are copied, and the copies used ([`crate::tasks`]).

mod parents;
mod replicas;

use std::collections::HashMap;

use vmseal_api::compliance::Requirement;
use vmseal_api::host::version::{
    IN_PLACE, MIRROR, MIRROR_BESIDE, MIRROR_LAYERS, MIRROR_MEMORY, MIRROR_TPM, MOVE, PACE,
};
use vmseal_api::host::{DiskRole, Power};
use vmseal_api::id::{DiskId, ProviderId};
use vmseal_api::model::Task;
use vmseal_api::problem::{ErrorCode, Problem};
use vmseal_api::request::{DecryptVm, EncryptVm, MoveVm, RecryptVm};
use vmseal_api::size::Size;

use self::single_disks::{copied_as_it_is, kept_policy, require_of_guest};
use super::caller::{Caller, Privilege};
use super::providers::usable;
use super::set_policy::{Need, needs, needs_of_storage};
use super::vm_key::require_available;
use super::vms::{find, plan, power, require_ready, word};
use super::{Outcome, Services, features, image_layouts, redundancy, room};
use crate::compliance;
use crate::hosts::mounted;
use crate::hosts::osds;
use crate::operation::Operation;
use crate::stalls;
use crate::store::disks::Disk;
use crate::store::policies::{self, Policy};
use crate::store::tasks as store_tasks;
use crate::store::vms::{self, Vm};
use crate::store::{Part, alarms, datastores, providers, snapshots};
use crate::tasks::mirror_vm::in_place;
use crate::tasks::{Engine, mirror_vm};

mod single_disks;

/// Encrypts the disks of a VM, and gives it a policy that encrypts.
pub async fn encrypt(
    services: &Services,
    caller: &Caller,
    name: &str,
    request: EncryptVm,
    dry_run: bool,
) -> Result<Outcome<Task>, Problem> {
    caller.require(Privilege::Encrypt)?;
    let (vm, known) = find(services, name).await?;
    require_ready(&vm)?;
    let policy = policy_for(services, &vm, &known, request.policy.as_deref(), true).await?;
    let provider = provider_for(services, &vm, &policy, request.provider.as_deref()).await?;
    let EncryptVm { rate, in_place, .. } = request;
    let disks = disks_by_name(&vm, &known, &request.disks, Some("is encrypted in any case"))?;
    let operation =
        Operation::EncryptVm { vm: vm.id, policy: policy.id, provider, in_place, disks };
    let (policy, place, as_it_is, at_rest) = (Some(policy), None, None, true);
    let wanted = Wanted { vm, known, operation, policy, place, rate, as_it_is, at_rest };
    begin(services, caller, wanted, dry_run).await
}

/// Decrypts the disks of a VM, gives it a policy that does not encrypt, and destroys its key; or decrypts some of its disks.
pub async fn decrypt(
    services: &Services,
    caller: &Caller,
    name: &str,
    request: DecryptVm,
    dry_run: bool,
) -> Result<Outcome<Task>, Problem> {
    caller.require(Privilege::Decrypt)?;
    let (vm, known) = find(services, name).await?;
    require_ready(&vm)?;
    let policy = match request.disks.is_empty() {
        true => policy_for(services, &vm, &known, request.policy.as_deref(), false).await?,
        false => kept_policy(services, &vm, &request).await?,
    };
    let DecryptVm { rate, in_place, .. } = request;
    let disks = disks_by_name(&vm, &known, &request.disks, Some("is encrypted in any case"))?;
    require_of_guest(&vm, &known, &disks)?;
    let operation = Operation::DecryptVm { vm: vm.id, policy: policy.id, in_place, disks };
    let (policy, place, as_it_is, at_rest) = (Some(policy), None, None, true);
    let wanted = Wanted { vm, known, operation, policy, place, rate, as_it_is, at_rest };
    begin(services, caller, wanted, dry_run).await
}

/// Gives disks of a VM, all or some, new data keys, under the key-encryption key that it has. The caller has been checked.
pub(super) async fn recrypt_deep(
    services: &Services,
    caller: &Caller,
    name: &str,
    request: &RecryptVm,
    dry_run: bool,
) -> Result<Outcome<Task>, Problem> {
    let (vm, known) = find(services, name).await?;
    require_ready(&vm)?;
    let RecryptVm { rate, in_place, .. } = *request;
    let at_rest = tpm_is_at_rest(services, &vm, &known).await?;
    let of_tpm = match (in_place, at_rest) {
        (true, _) => Some("is not encrypted again in place: leave out --in-place"),
        (false, false) => Some(IN_USE),
        (false, true) => None,
    };
    let disks = disks_by_name(&vm, &known, &request.disks, of_tpm)?;
    let is_plain = |disk: &&Disk| disks.contains(&disk.id) && !disk.encrypted;
    if let Some(disk) = known.iter().find(is_plain) {
        let detail = format!(
            "disk '{0}' of VM '{1}' is not encrypted: encrypt it (vmseal vm encrypt {1} --disk {0})",
            disk.name, vm.name
        );
        return Err(Problem::new(ErrorCode::WrongState, detail));
    }
    let operation = Operation::DeepRecryptVm { vm: vm.id, in_place, disks };
    let (policy, place, as_it_is) = (None, None, None);
    let wanted = Wanted { vm, known, operation, policy, place, rate, as_it_is, at_rest };
    begin(services, caller, wanted, dry_run).await
}

/// Moves disks of a VM, all or some, to another datastore of its host.
pub async fn move_disks(
    services: &Services,
    caller: &Caller,
    name: &str,
    request: MoveVm,
    dry_run: bool,
) -> Result<Outcome<Task>, Problem> {
    caller.require(Privilege::VmConfigure)?;
    let (vm, known) = find(services, name).await?;
    require_ready(&vm)?;
    if vm.key.is_some() {
        caller.require(Privilege::Migrate)?;
    }
    let mut read = services.store.read().await?;
    let of_datastore = |problem| Problem { field: Some("datastore".to_owned()), ..problem };
    let to = datastores::find(&mut read, &request.datastore).await?;
    let to = to.ok_or_else(|| of_datastore(Problem::not_found("datastore", &request.datastore)))?;
    drop(read);
    let Some(spec) = to.spec_on(vm.host) else {
        let detail = format!(
            "datastore '{}' belongs to host '{}', and VM '{}' is on host '{}': choose a datastore of that host",
            to.name,
            to.host_names(),
            vm.name,
            vm.host_name
        );
        return Err(of_datastore(Problem::new(ErrorCode::WrongState, detail)));
    };
    features::require(services, &vm, MOVE, "move disks to another datastore")?;
    let at_rest = tpm_is_at_rest(services, &vm, &known).await?;
    let all = request.disks.is_empty();
    let disks = match all {
        true => known.iter().filter(|disk| !disk.detached).map(|disk| disk.id).collect(),
        false => disks_by_name(&vm, &known, &request.disks, (!at_rest).then_some(IN_USE))?,
    };
    let from = |disk: &Disk| disks.contains(&disk.id).then_some(disk.datastore.datastore);
    let mut from: Vec<_> = known.iter().filter_map(from).collect();
    from.dedup();
    let (place, to) = (Some(to.name), spec);
    let operation = Operation::MoveVm { vm: vm.id, disks, all, from, to };
    let rate = request.rate;
    let (policy, as_it_is) = (None, None);
    let wanted = Wanted { vm, known, operation, policy, place, rate, as_it_is, at_rest };
    begin(services, caller, wanted, dry_run).await
}

/// Why the disk of a TPM is not copied whose guest runs.
const IN_USE: &str = "its guest uses: stop the VM first, or leave this disk out";

/// Whether a VM's TPM, if it has one, is used by no guest.
async fn tpm_is_at_rest(services: &Services, vm: &Vm, known: &[Disk]) -> Result<bool, Problem> {
    if known.iter().all(|disk| disk.role != DiskRole::Tpm) {
        return Ok(true);
    }
    Ok(mirror_vm::is_at_rest(power(services, vm).await?))
}

/// The disks that were named. Where that of a TPM is refused, `of_tpm` says why.
fn disks_by_name(
    vm: &Vm,
    known: &[Disk],
    asked: &[String],
    of_tpm: Option<&str>,
) -> Result<Vec<DiskId>, Problem> {
    let mut disks = Vec::new();
    for (index, name) in asked.iter().enumerate() {
        let field = Some(format!("disks[{index}]"));
        let is_it = |disk: &&Disk| disk.name == *name || disk.id.to_string() == *name;
        let Some(disk) = known.iter().filter(|disk| !disk.detached).find(is_it) else {
            let detail = format!("VM '{}' has no disk '{name}'", vm.name);
            return Err(Problem { field, ..Problem::new(ErrorCode::NotFound, detail) });
        };
        if let Some(of_tpm) = of_tpm.filter(|_| disk.role == DiskRole::Tpm) {
            let detail =
                format!("disk '{name}' of VM '{}' is that of its TPM, which {of_tpm}", vm.name);
            return Err(Problem { field, ..Problem::new(ErrorCode::WrongState, detail) });
        }
        if !disks.contains(&disk.id) {
            disks.push(disk.id);
        }
    }
    Ok(disks)
}

/// What is to be done with which VM.
struct Wanted {
    vm: Vm,
    known: Vec<Disk>,
    operation: Operation,
    /// The VM's policy after it, where that may be another one.
    policy: Option<Policy>,
    /// The name of the datastore that disks go to, where that is another one.
    place: Option<String>,
    /// The highest rate that was asked for, in bytes a second; 0 is none.
    rate: Option<u64>,
    /// The disk that is copied as it is, where what is beside it is to be sealed or in the clear.
    as_it_is: Option<DiskId>,
    /// Whether its TPM, if it has one, is used by no guest.
    at_rest: bool,
}

impl Wanted {
    /// The disks that are copied.
    fn disks(&self) -> impl Iterator<Item = &Disk> {
        self.known.iter().filter(|disk| self.copies(disk))
    }

    fn copies(&self, disk: &Disk) -> bool {
        let concerned = mirror_vm::concerns(&self.operation, disk);
        (concerned && mirror_vm::is_free(disk, self.at_rest)) || self.as_it_is == Some(disk.id)
    }

    /// Whether what the VM's TPM keeps is copied.
    fn copies_tpm(&self) -> bool {
        self.disks().any(|disk| disk.role == DiskRole::Tpm)
    }

    /// The disks that the request is about by their names; none where it is about all.
    fn named(&self) -> &[DiskId] {
        match &self.operation {
            Operation::EncryptVm { disks, .. } | Operation::DecryptVm { disks, .. } => disks,
            _ => &[],
        }
    }

    /// What is to be done, with the policy and the disks as they were chosen.
    fn understood(&self) -> String {
        let disks: Vec<_> = self
            .disks()
            .map(|disk| {
                let (name, size, datastore) = (&disk.name, Size(disk.size), &disk.datastore_name);
                format!("{name} ({size} on datastore '{datastore}')")
            })
            .collect();
        let disks = match &disks[..] {
            [] => "no disk has to be copied".to_owned(),
            disks => format!("disks {}", disks.join(", ")),
        };
        let disks = match &self.place {
            Some(place) => format!("{disks}, to go to datastore '{place}'"),
            None => disks,
        };
        let disks = match self.operation.is_in_place() {
            true => format!("{disks}, each in its own file"),
            false => disks,
        };
        let disks = match self.rate.filter(|rate| *rate > 0) {
            Some(rate) => format!("{disks}, each copied at {} a second at most", Size(rate)),
            None => disks,
        };
        let disks = match self.copies_tpm() {
            true => format!("{disks}; what the VM's TPM keeps goes along, encrypted anew"),
            false => disks,
        };
        match self.policy.as_ref().filter(|policy| policy.id != self.vm.policy) {
            Some(policy) => {
                let (after, before) = (&policy.name, &self.vm.policy_name);
                format!("choose policy '{after}' in place of '{before}'; {disks}")
            }
            None => format!("choose {disks}"),
        }
    }

    /// The copy of a disk, as it is to be.
    fn copy(&self, disk: &Disk) -> Disk {
        let encrypted = mirror_vm::encrypts(&self.operation, disk);
        let to = mirror_vm::target(&self.operation).unwrap_or(&disk.datastore).clone();
        let datastore_name = self.place.clone().unwrap_or_else(|| disk.datastore_name.clone());
        Disk { encrypted, datastore: to, datastore_name, ..disk.clone() }
    }

    /// Whether core dumps, which are beside the VM's first disk, follow: that moves, or is encrypted or decrypted.
    fn takes_dumps_along(&self) -> bool {
        let first = self.known.iter().find(|disk| disk.facts.is_some() && !disk.detached);
        let changes = self.place.is_some() || self.policy.is_some();
        changes && first.is_some_and(|disk| self.copies(disk))
    }

    /// Whether the VM gets its key, or gives it up: core dumps are to be sealed, or in the clear.
    fn changes_key(&self) -> bool {
        match &self.operation {
            Operation::EncryptVm { policy, .. } => *policy != self.vm.policy && !self.has_tpm(),
            operation => operation.gives_up_key() && !self.has_tpm(),
        }
    }

    /// What is said of the disks that stay in the clear in a VM that is encrypted.
    fn stays_in_the_clear(&self) -> Option<String> {
        let is_left = |disk: &&Disk| {
            disk.role.is_data() && !disk.detached && !mirror_vm::encrypts(&self.operation, disk)
        };
        let left: Vec<_> = self.known.iter().filter(is_left).map(|disk| &*disk.name).collect();
        (!left.is_empty()).then(|| format!("disks {} stay in the clear", left.join(", ")))
    }

    /// What stays as it is of a VM whose other disks move, or get other keys.
    fn stays(&self) -> Option<String> {
        let tpm = self.known.iter().find(|disk| disk.role == DiskRole::Tpm)?;
        let (vm, disk) = (&self.vm.name, &tpm.name);
        let (stays, then) = match (mirror_vm::target(&self.operation), &self.place) {
            (Some(to), _) if tpm.datastore.datastore == to.datastore => return None,
            (Some(_), Some(place)) => (
                format!("stays on datastore '{}'", tpm.datastore_name),
                format!(
                    "move it when the VM is off (vmseal vm move {vm} --datastore {place} --disk {disk})"
                ),
            ),
            _ => (
                "stays under the data key that it has".to_owned(),
                format!(
                    "give it another when the VM is off (vmseal vm recrypt {vm} --deep --disk {disk})"
                ),
            ),
        };
        let why = match (self.copies_tpm(), mirror_vm::concerns(&self.operation, tpm)) {
            (true, _) => return None,
            (false, true) => format!(", as its guest runs: {then}"),
            (false, false) => String::new(),
        };
        Some(format!("what the VM's TPM keeps {stays}{why}"))
    }

    /// Whether the VM has a TPM, for which it needs a key in any case.
    fn has_tpm(&self) -> bool {
        self.known.iter().any(|disk| disk.role == DiskRole::Tpm)
    }
}

/// Begins the task, or says what it would do.
async fn begin(
    services: &Services,
    caller: &Caller,
    mut wanted: Wanted,
    dry_run: bool,
) -> Result<Outcome<Task>, Problem> {
    let mut kept = require_snapshots_follow(services, &wanted).await?;
    kept.suspended = require_power(services, &wanted).await?;
    wanted.as_it_is = copied_as_it_is(services, &wanted, &kept).await?;
    let keeps = parents::examine(services, &wanted).await?;
    kept.dumps = require_dumps_follow(services, &wanted).await?;
    require_places(services, &wanted).await?;
    features::require(services, &wanted.vm, MIRROR, "encrypt or decrypt disks that are there")?;
    if wanted.copies_tpm() {
        features::require(services, &wanted.vm, MIRROR_TPM, "copy what a VM's TPM keeps")?;
    }
    let pace = super::tasks::pace_of(wanted.rate)?;
    if wanted.operation.is_in_place() {
        features::require(services, &wanted.vm, IN_PLACE, "convert disks in their own files")?;
    } else if !pace.is_free() {
        features::require(services, &wanted.vm, PACE, super::tasks::CANNOT_PACE)?;
    }
    require_work(services, &wanted).await?;
    let mut warnings = examine(services, &wanted, dry_run).await?;
    warnings.extend(kept.warnings(&wanted));
    warnings.extend(keeps);
    let mut write = services.store.write().await?;
    // Read again: a task may have ended since.
    let vm = vms::get(&mut write, wanted.vm.id).await?;
    let vm = vm.ok_or_else(|| Problem::not_found("VM", &wanted.vm.name))?;
    if (vm.policy, &vm.key) != (wanted.vm.policy, &wanted.vm.key) {
        let detail = format!("VM '{}' has just been changed: try again", vm.name);
        return Err(Problem::new(ErrorCode::WrongState, detail));
    }
    let operation = wanted.operation.clone();
    let recorded = Engine::record(&mut write, operation, &vm.name, caller.name()).await?;
    let task = store_tasks::Task { pace, ..recorded };
    store_tasks::set_pace(&mut write, &task).await?;
    if dry_run {
        let mut plan = plan(&task, &vm);
        plan.steps.insert(0, wanted.understood());
        plan.warnings = warnings;
        return Ok(Outcome::Planned(plan));
    }
    write.commit().await?;
    let shown = services.engine.shown(&task);
    services.engine.begin(task);
    Ok(Outcome::Done(shown))
}

/// What a VM has beside its disks, which is copied with them.
#[derive(Default)]
struct Kept {
    snapshots: usize,
    with_memory: usize,
    dumps: usize,
    suspended: bool,
}

impl Kept {
    /// What is to be considered.
    fn warnings(&self, wanted: &Wanted) -> Vec<String> {
        let Self { snapshots, with_memory, dumps, suspended } = self;
        let mut warnings = Vec::new();
        if *snapshots > 0 {
            warnings.push(format!("what its {snapshots} snapshots keep is copied as well"));
        }
        if *dumps > 0 {
            warnings.push(format!("its {dumps} core dumps are copied as well"));
        }
        if let Some(id) = wanted.as_it_is {
            let of = |disk: &&Disk| disk.id == id;
            let name = wanted.known.iter().find(of).map(|disk| &*disk.name).unwrap_or_default();
            warnings.push(format!("disk '{name}', which stays in the clear, is copied as it is, for what is beside it: core dumps, the memory of snapshots and of a suspended VM"));
        }
        if !wanted.operation.gives_up_key() || wanted.known.iter().any(mirror_vm::stays_encrypted) {
            return warnings;
        }
        let in_the_clear = [
            (*with_memory > 0, "the memory that its snapshots keep"),
            (*dumps > 0, "what its core dumps hold"),
            (*suspended, "the saved memory of its guest"),
        ];
        for (_, what) in in_the_clear.into_iter().filter(|(there, _)| *there) {
            warnings.push(format!("{what} will be on the datastore in the clear"));
        }
        warnings
    }
}

/// Refuses what would leave a snapshot behind that cannot be reverted to, or is not encrypted as the VM is. Returns the
/// snapshots that the VM has.
async fn require_snapshots_follow(services: &Services, wanted: &Wanted) -> Result<Kept, Problem> {
    let vm = &wanted.vm;
    let known = snapshots::of_vm(&mut *services.store.read().await?, vm.id).await?;
    if known.is_empty() {
        return Ok(Kept::default());
    }
    if wanted.operation.is_in_place() {
        let detail = format!(
            "VM '{0}' has snapshots: its disks are not converted in place. Leave out --in-place, and they are copied as well, where there is room; or delete them first (vmseal snapshot list {0})",
            vm.name
        );
        return Err(Problem::new(ErrorCode::WrongState, detail));
    }
    features::require(services, vm, MIRROR_LAYERS, "copy disks that have snapshots")?;
    let with_memory = known.iter().filter(|known| known.memory).count();
    if with_memory > 0 {
        features::require(services, vm, MIRROR_MEMORY, "copy the memory that snapshots keep")?;
    }
    Ok(Kept { snapshots: known.len(), with_memory, ..Kept::default() })
}

/// Refuses what would leave core dumps behind that no key opens, or that are not as the VM is. Returns how many follow.
async fn require_dumps_follow(services: &Services, wanted: &Wanted) -> Result<usize, Problem> {
    if wanted.operation.is_in_place() {
        // Where the VM's key stays as it is core dumps do, too.
        if wanted.changes_key() {
            let what = "they would not be encrypted as the VM is: leave out --in-place, and they are copied as well, where there is room";
            super::dumps::require_none(services, &wanted.vm, what).await?;
        }
        return Ok(0);
    }
    if !wanted.takes_dumps_along() {
        return Ok(0);
    }
    let count = super::dumps::count(services, &wanted.vm).await?;
    if count > 0 {
        features::require(services, &wanted.vm, MIRROR_BESIDE, "copy core dumps")?;
    }
    Ok(count)
}

/// Refuses copies in places that are not as the VM's policy has them: pools of Ceph with open connections, without encrypted OSDs,
/// or with less redundancy.
async fn require_places(services: &Services, wanted: &Wanted) -> Result<(), Problem> {
    let copies: Vec<Disk> = wanted.disks().map(|disk| wanted.copy(disk)).collect();
    let mut read = services.store.read().await?;
    let policy = match &wanted.policy {
        Some(policy) => Some(policy.clone()),
        None => policies::find(&mut read, &wanted.vm.policy.to_string()).await?,
    };
    let Some(policy) = policy else { return Ok(()) };
    mounted::require_messenger(&mut read, &policy, wanted.vm.host, &copies).await?;
    osds::require(&mut read, &policy, &copies).await?;
    let host = (wanted.vm.host, wanted.vm.host_name.as_str());
    stalls::require(&services.hosts, host, &policy)?;
    if !wanted.operation.is_in_place() {
        image_layouts::require(services, host, &policy, &copies)?;
    }
    redundancy::require(&mut read, &policy, &copies).await
}

/// A VM that is on its way from one state to another is not copied. Returns whether it is suspended.
async fn require_power(services: &Services, wanted: &Wanted) -> Result<bool, Problem> {
    let vm = &wanted.vm;
    match power(services, vm).await? {
        None | Some(Power::Off) => Ok(false),
        Some(Power::Suspended) if wanted.operation.is_in_place() => {
            Err(super::saved_memory::refusal(vm))
        }
        Some(_) if wanted.operation.is_in_place() => Err(in_place::is_not_off(&vm.name)),
        Some(Power::Running | Power::Paused) => Ok(false),
        Some(Power::Suspended) => {
            features::require(services, vm, MIRROR_BESIDE, "copy the memory of a suspended VM")?;
            Ok(true)
        }
        Some(power) => {
            let detail = format!(
                "VM '{}' is {}: its disks are copied while it runs, is paused, suspended or off",
                vm.name,
                word(power)
            );
            Err(Problem::new(ErrorCode::WrongState, detail))
        }
    }
}

/// Refuses where nothing is to be done. What an earlier attempt has left, and a key that nothing needs, is something.
async fn require_work(services: &Services, wanted: &Wanted) -> Result<(), Problem> {
    let Wanted { vm, operation, .. } = wanted;
    if wanted.disks().next().is_some() {
        return Ok(());
    }
    let (finishes, why) = match operation {
        Operation::EncryptVm { policy, disks, .. } => {
            let why = match disks.is_empty() {
                true => "is encrypted already",
                false => "has these disks encrypted already",
            };
            (*policy != vm.policy, why)
        }
        Operation::DecryptVm { disks, .. } if !disks.is_empty() => {
            (false, "has these disks in the clear already")
        }
        Operation::DecryptVm { policy, .. } => {
            let key = vm.key.is_some() && !wanted.has_tpm();
            (*policy != vm.policy || key, "is not encrypted")
        }
        Operation::MoveVm { .. } => (false, "has these disks on that datastore already"),
        _ if !wanted.at_rest => (false, "has no other disk that is encrypted"),
        _ => (false, "has no disk that is encrypted"),
    };
    let raised = alarms::list(&mut *services.store.read().await?).await?;
    let left = |alarm: &vmseal_api::model::Alarm| {
        alarm.code == "task-unfinished" && alarm.target == vm.name
    };
    if finishes || raised.iter().any(left) {
        return Ok(());
    }
    let of_tpm = match operation {
        Operation::MoveVm { .. } | Operation::DeepRecryptVm { .. } if !wanted.at_rest => {
            wanted.stays()
        }
        _ => None,
    };
    let of_tpm = of_tpm.map(|stays| format!(", and {stays}")).unwrap_or_default();
    Err(Problem::new(ErrorCode::WrongState, format!("VM '{}' {why}{of_tpm}", vm.name)))
}

/// Asks the VM's host, and compares the room of its datastores with what the copies take. Returns what is to be
/// considered. A VM without a key gets it as a part of the task: its host cannot be asked before.
async fn examine(
    services: &Services,
    wanted: &Wanted,
    dry_run: bool,
) -> Result<Vec<String>, Problem> {
    let Wanted { vm, operation, .. } = wanted;
    let copied: Vec<&Disk> = wanted.disks().collect();
    replicas::require(services, wanted)?;
    let mut warnings = examine_room(services, wanted, &copied).await?;
    warnings.extend(replicas::warning(services, wanted));
    let asks = vm.key.is_some() || wanted.place.is_some();
    if asks && !copied.is_empty() {
        if dry_run && vm.key.is_some() {
            require_available(services, vm, mirror_vm::purpose(operation)).await?;
        }
        let ids: Vec<_> = copied.iter().map(|disk| disk.id).collect();
        let agent = services.hosts.connected(vm.host)?;
        let job = match operation.is_in_place() {
            true => in_place::job(operation, &ids, &wanted.known, None),
            false => mirror_vm::mirror(operation, &ids, &wanted.known),
        };
        match agent.examine_job(vm.id, job).await {
            // Its agent has just restarted: the task gives it the VM and the key.
            Err(problem) if matches!(problem.code, ErrorCode::NotFound | ErrorCode::Locked) => {}
            other => other?,
        }
    }
    match operation {
        Operation::EncryptVm { .. } => warnings.extend(wanted.stays_in_the_clear()),
        Operation::DecryptVm { .. } if !wanted.named().is_empty() => {
            warnings.push(
                "the data of these disks will be on the datastore in the clear; the VM keeps its key and its policy".to_owned(),
            );
        }
        Operation::DecryptVm { .. } => {
            warnings.push("the data of the disks will be on the datastore in the clear".to_owned());
            if wanted.has_tpm() {
                warnings.push("the VM keeps its key, under which is what its TPM keeps".to_owned());
            }
        }
        Operation::DeepRecryptVm { .. } | Operation::MoveVm { .. } => {
            warnings.extend(wanted.stays());
        }
        _ => {}
    }
    Ok(warnings)
}

/// Compares the room of the VM's datastores with what the copies take, or with what is needed in place.
async fn examine_room(
    services: &Services,
    wanted: &Wanted,
    copied: &[&Disk],
) -> Result<Vec<String>, Problem> {
    let Wanted { vm, operation, .. } = wanted;
    if operation.is_in_place() {
        room::examine_in_place(services, vm, copied).await?;
        return Ok(vec![
            "once it has begun it goes forward only, and the VM cannot start before the end; it goes on after the death of any process, and after a power cut".to_owned(),
            "a backup of the disks is the only way back if the storage itself fails meanwhile".to_owned(),
        ]);
    }
    let made = copied.iter().map(|disk| wanted.copy(disk));
    let made: Vec<Disk> = made.chain(replicas::replicated_copies(wanted)).collect();
    let examined = room::examine_copies(services, vm, &made).await;
    // In place is no way for a move, nor for a disk with a replica.
    let replicated = copied.iter().any(|disk| disk.replica.is_some());
    if replicated || matches!(operation, Operation::MoveVm { .. }) {
        return examined;
    }
    let hint = "where there is no room for copies, the disks of a VM that is off can be converted in place (--in-place)";
    match examined {
        Ok(mut warnings) => {
            if !warnings.is_empty() {
                warnings.push(hint.to_owned());
            }
            Ok(warnings)
        }
        Err(problem) if problem.code == ErrorCode::NoSpace => {
            Err(Problem { detail: format!("{}; {hint}", problem.detail), ..problem })
        }
        Err(problem) => Err(problem),
    }
}

/// The policy of a VM after it is encrypted or decrypted: the one that was named; else the one that it has, or the only
/// other one that fits.
async fn policy_for(
    services: &Services,
    vm: &Vm,
    known: &[Disk],
    asked: Option<&str>,
    encrypts: bool,
) -> Result<Policy, Problem> {
    let mut read = services.store.read().await?;
    let of_policy = |problem| Problem { field: Some("policy".to_owned()), ..problem };
    let before = policies::find(&mut read, &vm.policy.to_string()).await?;
    let before = before.ok_or_else(|| Problem::not_found("policy", &vm.policy_name))?;
    let runs = services.hosts.view(vm.host).vm(vm.id).is_some_and(|it| it.power != Power::Off);
    let places = compliance::by_id(datastores::of_host(&mut read, vm.host).await?);
    let layouts = HashMap::new();
    let misfit = |after: &Policy| {
        if after.id == before.id {
            return None;
        }
        let of_storage = needs_of_storage(after, vm, known, &places, &layouts).into_iter();
        let of_messenger = of_storage.filter(|need| need.is_for(Requirement::Messenger));
        let mut needs = needs(&before, after, vm, known, runs).into_iter().chain(of_messenger);
        needs.find(|need| !need.is_met_by_itself() && !matches!(need, Need::Encryption { .. }))
    };
    if let Some(asked) = asked {
        let policy = policies::find(&mut read, asked).await?;
        let policy = policy.ok_or_else(|| of_policy(Problem::not_found("policy", asked)))?;
        let why = match (policy.encryption == encrypts, misfit(&policy)) {
            (true, None) => return Ok(policy),
            (true, Some(need)) => format!("asks for something else as well: {need}"),
            (false, _) if encrypts => "does not encrypt: name one that does".to_owned(),
            (false, _) => "encrypts: name one that does not".to_owned(),
        };
        let detail = format!("policy '{}' {why}", policy.name);
        return Err(of_policy(Problem::new(ErrorCode::WrongState, detail)));
    }
    if before.encryption == encrypts {
        return Ok(before);
    }
    let mut fit = policies::list(&mut read, &Part::all()).await?;
    fit.retain(|policy| policy.encryption == encrypts && misfit(policy).is_none());
    if fit.len() == 1 {
        return Ok(fit.swap_remove(0));
    }
    let detail = undecided(vm, encrypts, &fit);
    Err(of_policy(Problem::new(ErrorCode::WrongState, detail)))
}

/// Why no policy is chosen for a VM, out of those that fit.
fn undecided(vm: &Vm, encrypts: bool, fit: &[Policy]) -> String {
    let (does, option, verb) = match encrypts {
        true => ("encrypts", "--encrypt", "encrypt"),
        false => ("does not encrypt", "--plain", "decrypt"),
    };
    let (name, own) = (&vm.name, &vm.policy_name);
    if fit.is_empty() {
        return format!(
            "there is no policy that {does} and is otherwise as '{own}', the one of VM '{name}': create it first (vmseal policy create NAME {option})"
        );
    }
    let names: Vec<_> = fit.iter().map(|policy| format!("'{}'", policy.name)).collect();
    format!(
        "several policies would do for VM '{name}': {}. Name one: vmseal vm {verb} {name} --policy NAME",
        names.join(", ")
    )
}

/// The provider that makes the key of a VM without one; none for a VM with a key.
async fn provider_for(
    services: &Services,
    vm: &Vm,
    policy: &Policy,
    asked: Option<&str>,
) -> Result<Option<ProviderId>, Problem> {
    let mut read = services.store.read().await?;
    let of_provider = |problem| Problem { field: Some("provider".to_owned()), ..problem };
    let named = match asked {
        None => None,
        Some(name) => {
            let found = providers::find(&mut read, name).await?;
            Some(found.ok_or_else(|| of_provider(Problem::not_found("provider", name)))?)
        }
    };
    if let Some(key) = &vm.key {
        if named.is_none_or(|named| named.id == key.provider) {
            return Ok(None);
        }
        let detail = format!(
            "VM '{0}' has a key of another provider, and is encrypted with that: give it another key first (vmseal vm recrypt {0} --provider NAME), or after",
            vm.name
        );
        return Err(of_provider(Problem::new(ErrorCode::WrongState, detail)));
    }
    let provider = match (named, &policy.provider) {
        (Some(named), _) => Some(named),
        (None, Some((id, _))) => providers::find(&mut read, &id.to_string()).await?,
        (None, None) => providers::default(&mut read).await?,
    };
    drop(read);
    let Some(provider) = provider else {
        let detail = format!(
            "policy '{}' encrypts, and there is no default key provider (vmseal provider default NAME)",
            policy.name
        );
        return Err(Problem::new(ErrorCode::WrongState, detail));
    };
    usable(services, provider).map(|provider| Some(provider.id))
}
