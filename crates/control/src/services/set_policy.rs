//! What users change of a storage policy, and what that means for the VMs that have it.

use std::collections::HashMap;
use std::fmt;

use vmseal_api::compliance::Requirement;
use vmseal_api::failure_domain::FailureDomain;
use vmseal_api::filter::check_caches;
use vmseal_api::hardware::check_cpu_model;
use vmseal_api::host::{Allocation, Power};
use vmseal_api::id::{DiskId, check_name};
use vmseal_api::migration::check_downtime;
use vmseal_api::model::{Plan, Policy, Replication};
use vmseal_api::problem::{ErrorCode, Problem};
use vmseal_api::redundancy::Redundancy;
use vmseal_api::replica::REPLICA_RATE;
use vmseal_api::request::SetPolicy;

use super::caller::{Caller, Privilege};
use super::hardware::warn_of_model;
use super::policies::{asked_messenger, asked_osds, check_replica, require_ungiven};
use super::{Outcome, Services, image_layouts};
use crate::compliance::{self, Datastores, Deviation};
use crate::store::disks::{DiskPart, Layouts};
use crate::store::events::NewEvent;
use crate::store::{Part, datastores, disks, policies, providers, vms};

/// What a VM needs to be as its policy says.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Need {
    /// Its disks get other limits or caches.
    Settings { runs: bool },
    /// Its disks must be encrypted, or decrypted; with this policy, where it can have that already.
    Encryption { vm: String, encrypt: bool, policy: Option<String> },
    /// These disks of it are in the clear, and stay so.
    InTheClear { vm: String, disks: Vec<String> },
    /// Its key is another provider's.
    Provider { vm: String, provider: String },
    /// Its disks take their room at another time.
    Allocation { now: Allocation },
    /// Its disks have other replicas, or none.
    Replica,
    /// It has another processor model.
    CpuModel { vm: String, now: Option<String>, wanted: String },
    /// A disk of it, or the replica of one, is not where or as the policy has it.
    Storage { vm: String, deviation: Deviation },
    /// The caches of its disks are too large together.
    Caches { why: String },
}

impl Need {
    /// Whether nobody has to do anything for it.
    pub(super) fn is_met_by_itself(&self) -> bool {
        matches!(self, Self::Settings { .. } | Self::InTheClear { .. })
    }

    /// Whether it is for what a policy requires of storage.
    pub(super) fn is_for(&self, what: Requirement) -> bool {
        matches!(self, Self::Storage { deviation, .. } if deviation.requirement == what)
    }

    /// Whether the policy of a VM may not change so.
    fn forbids(&self) -> bool {
        matches!(self, Self::Encryption { .. } | Self::Caches { .. } | Self::CpuModel { .. })
    }
}

impl fmt::Display for Need {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Settings { runs: false } => {
                f.write_str("its disks get the limits and the cache when it is started")
            }
            Self::Settings { runs: true } => {
                f.write_str("its disks get the limits and the cache at its next start")
            }
            Self::Encryption { vm, encrypt, policy } => {
                let (done, verb) =
                    if *encrypt { ("encrypted", "encrypt") } else { ("decrypted", "decrypt") };
                let policy = policy.as_deref().unwrap_or("OTHER-POLICY");
                write!(
                    f,
                    "its disks would have to be {done}, also while it runs: vmseal vm {verb} {vm} --policy {policy}"
                )
            }
            Self::InTheClear { vm, disks } => write!(
                f,
                "disks {} stay in the clear until they are encrypted, also while it runs: vmseal vm encrypt {vm}",
                disks.join(", ")
            ),
            Self::Provider { vm, provider } => write!(
                f,
                "its key stays with its provider until it is recrypted (vmseal vm recrypt {vm} --provider {provider})"
            ),
            Self::Allocation { now } => write!(
                f,
                "its disks stay {}, as they were made",
                match now {
                    Allocation::Thin => "thin",
                    Allocation::Preallocated => "preallocated",
                }
            ),
            Self::Replica => {
                f.write_str("its disks keep the replicas, or none, that they were made with")
            }
            Self::CpuModel { vm, now, wanted } => write!(
                f,
                "its processor model is {}, and would have to be {wanted}. It gets another one with another policy, while it is off: vmseal vm set {vm} --policy NAME",
                model_name(now.as_deref())
            ),
            Self::Storage { vm, deviation } => f.write_str(&of_storage(vm, deviation)),
            Self::Caches { why } => write!(f, "its disks cannot have such a cache: {why}"),
        }
    }
}

/// How the processor model of a VM is called, also where it has none by name.
pub(super) fn model_name(model: Option<&str>) -> &str {
    model.unwrap_or("the default one")
}

/// What a VM needs whose storage is not as its policy requires.
fn of_storage(vm: &str, deviation: &Deviation) -> String {
    let Deviation { requirement, part, datastore, why } = deviation;
    let what = format!("{} is in datastore '{datastore}'", part.of_vm());
    match requirement {
        Requirement::Messenger | Requirement::OsdEncryption => {
            format!("{what}, and it does not start again: {why}. {}", otherwise(part))
        }
        Requirement::Redundancy => format!(
            "{what}: {why}. It runs on there, with an alarm: move it (vmseal vm move {vm} --datastore NAME)"
        ),
        Requirement::ImageLayout => format!(
            "{what}: {why}. It stays so until its image is made anew, also while it runs: move it to another datastore (vmseal vm move {vm} --datastore NAME)"
        ),
        Requirement::Encryption | Requirement::Unknown => format!("{what}: {why}"),
    }
}

/// What may be done for a VM whose OSDs or connections stay as they are.
fn otherwise(part: &DiskPart) -> &'static str {
    match part {
        DiskPart::Image(_) => "Otherwise move the disk (vmseal vm move)",
        DiskPart::Replica(_) => {
            "Otherwise make the VM anew of a backup, with a policy that has no replicas there (vmseal backup restore --as NAME --policy POLICY)"
        }
    }
}

/// What a VM needs where its policy is `after` in place of `before`, apart from where its disks are.
pub(super) fn needs(
    before: &policies::Policy,
    after: &policies::Policy,
    vm: &vms::Vm,
    disks: &[disks::Disk],
    runs: bool,
) -> Vec<Need> {
    let data = || disks.iter().filter(|disk| disk.role.is_data());
    let mut needs = Vec::new();
    // Its key has to go with the policy, also where each of its disks was decrypted alone: what else is the VM's is under the key.
    let gives_up_key = before.encryption && !after.encryption && vm.key.is_some();
    let in_the_clear: Vec<_> = data().filter(|it| !it.encrypted).map(|it| &it.name).collect();
    if before.encryption && after.encryption && !in_the_clear.is_empty() {
        // They were decrypted alone, or not encrypted, and that is no matter of the policy.
        let disks = in_the_clear.into_iter().cloned().collect();
        needs.push(Need::InTheClear { vm: vm.name.clone(), disks });
    } else if data().any(|disk| disk.encrypted != after.encryption) || gives_up_key {
        let (encrypt, other) = (after.encryption, before.id != after.id);
        let policy = other.then(|| after.name.clone());
        needs.push(Need::Encryption { vm: vm.name.clone(), encrypt, policy });
    }
    if let (Some((id, name)), Some(known)) = (&after.provider, vm.provider)
        && *id != known
    {
        needs.push(Need::Provider { vm: vm.name.clone(), provider: name.clone() });
    }
    if let Some(disk) = data().find(|disk| disk.allocation != after.allocation) {
        needs.push(Need::Allocation { now: disk.allocation });
    }
    if before.replica != after.replica {
        needs.push(Need::Replica);
    }
    if let Some(wanted) =
        after.cpu_model.clone().filter(|_| vm.hardware.cpu_model != after.cpu_model)
    {
        let (vm, now) = (vm.name.clone(), vm.hardware.cpu_model.clone());
        needs.push(Need::CpuModel { vm, now, wanted });
    }
    let other = |disk: &disks::Disk| (disk.limits, disk.cache) != (after.limits, after.cache);
    if data().any(other) {
        let caches = disks.iter().map(|disk| match disk.role.is_data() {
            true => after.cache,
            false => disk.cache,
        });
        match check_caches(caches) {
            Ok(()) => needs.push(Need::Settings { runs }),
            Err((_, why)) => needs.push(Need::Caches { why }),
        }
    }
    needs
}

/// What a VM needs whose storage is not as its policy, `after`, requires: one of each kind. Whether disks are encrypted is not among it.
pub(super) fn needs_of_storage(
    after: &policies::Policy,
    vm: &vms::Vm,
    disks: &[disks::Disk],
    datastores: &Datastores,
    layouts: &HashMap<DiskId, Layouts>,
) -> Vec<Need> {
    let mut found = compliance::deviations(after, vm.host, disks, datastores, layouts);
    found.retain(|it| it.requirement != Requirement::Encryption);
    let first = compliance::first_of_each(found).into_iter();
    first.map(|deviation| Need::Storage { vm: vm.name.clone(), deviation }).collect()
}

/// Changes a policy, with the limits and caches of the disks of VMs that have it. A dry run says what each VM would need.
pub async fn set(
    services: &Services,
    caller: &Caller,
    name: &str,
    request: SetPolicy,
    dry_run: bool,
) -> Result<Outcome<Policy>, Problem> {
    caller.require(Privilege::ManagePolicies)?;
    // Before the transaction, which nobody may hold while a host is asked.
    let model = request.cpu_model.as_deref();
    let model = model.filter(|model| dry_run && check_cpu_model(model).is_ok());
    let mut warnings = warn_of_model(services, model).await?;
    let mut write = services.store.write().await?;
    let before = policies::find(&mut write, name).await?;
    let before = before.ok_or_else(|| Problem::not_found("policy", name))?;
    require_ungiven(&mut write, &before).await?;
    let provider = match request.provider.as_deref() {
        // There is no key that it could be of.
        None if request.encryption == Some(false) => None,
        None => before.provider.clone(),
        Some("") => None,
        Some(name) => {
            let found = providers::find(&mut write, name).await?;
            let found = found.ok_or_else(|| Problem {
                field: Some("provider".to_owned()),
                ..Problem::not_found("provider", name)
            })?;
            Some((found.id, found.name))
        }
    };
    let after = changed(&before, &request, provider)?;
    warnings.extend(request.redundancy.and(after.redundancy.risk()));
    if let Some(replica) = after.replica.as_ref().filter(|_| after.replica != before.replica) {
        check_replica(&mut write, replica, ["replicate_to", "replicate_rate"]).await?;
    }
    policies::set(&mut write, &after).await?;
    let datastores = datastores::list(&mut write, &Part::all()).await?;
    let datastores = compliance::by_id(datastores);
    let (mut steps, mut forbidden) = (Vec::new(), Vec::new());
    for vm in vms::of_policy(&mut write, before.id).await? {
        let known = disks::of_vm(&mut write, vm.id).await?;
        let view = services.hosts.view(vm.host);
        let runs = view.vm(vm.id).is_some_and(|seen| seen.power != Power::Off);
        let mut needs = needs(&before, &after, &vm, &known, runs);
        let layouts = disks::image_layouts(&mut write, vm.id, vm.id).await?;
        needs.extend(needs_of_storage(&after, &vm, &known, &datastores, &layouts));
        for need in &needs {
            steps.push(format!("VM '{}': {need}", vm.name));
        }
        if needs.iter().any(Need::forbids) {
            forbidden.push(vm.name.clone());
        }
        if needs.iter().any(Need::is_met_by_itself) {
            for disk in known.iter().filter(|disk| disk.role.is_data()) {
                disks::set_settings(&mut write, disk.id, after.limits, after.cache).await?;
            }
        }
    }
    if dry_run {
        if steps.is_empty() {
            steps.push("change the policy; no VM needs anything".to_owned());
        }
        let (kind, target) = ("policy.set".to_owned(), before.name);
        return Ok(Outcome::Planned(Plan { kind, target, steps, warnings, ..Plan::default() }));
    }
    if !forbidden.is_empty() {
        let detail = format!(
            "policy '{}' cannot be changed in this way while these VMs have it and do not comply: {}. A dry run says what each of them needs (--dry-run)",
            before.name,
            forbidden.join(", ")
        );
        return Err(Problem::new(ErrorCode::InUse, detail));
    }
    let detail = format!("for {} VMs", vms::of_policy(&mut write, before.id).await?.len());
    let (kind, target, actor) = ("policy.changed", after.name.as_str(), caller.name());
    write.event(NewEvent { kind, actor, target, detail: &detail }).await?;
    write.commit().await?;
    super::policies::show(services, caller, &before.id.to_string()).await.map(Outcome::Done)
}

fn changed(
    before: &policies::Policy,
    request: &SetPolicy,
    provider: Option<(vmseal_api::id::ProviderId, String)>,
) -> Result<policies::Policy, Problem> {
    let SetPolicy {
        name,
        encryption,
        provider: _,
        allocation,
        iops,
        bandwidth,
        stall_timeout,
        cache,
        replicate_to,
        replicate_rate,
        cpu_model,
        downtime_milliseconds,
        messenger,
        osd_encryption,
        redundancy,
        data_chunks,
        failure_domain,
        object_size: _,
        stripe_unit: _,
        stripe_count: _,
    } = request;
    // 0 is none, so that a limit can be taken away.
    let given = |new: &Option<u64>, old: Option<u64>| match new {
        None => old,
        Some(0) => None,
        some => *some,
    };
    let mut after = policies::Policy {
        name: name.clone().unwrap_or_else(|| before.name.clone()),
        encryption: encryption.unwrap_or(before.encryption),
        provider,
        allocation: allocation.unwrap_or(before.allocation),
        ..before.clone()
    };
    after.limits.iops = given(iops, before.limits.iops);
    after.limits.bandwidth = given(bandwidth, before.limits.bandwidth);
    after.limits.stall_timeout = match *stall_timeout {
        None => before.limits.stall_timeout,
        Some(0) => None,
        some => some,
    };
    after.cache = given(cache, before.cache);
    after.replica = replica(before.replica.as_ref(), replicate_to.as_deref(), *replicate_rate)?;
    after.cpu_model = match cpu_model.as_deref() {
        None => before.cpu_model.clone(),
        Some("") => None,
        Some(model) => {
            check_cpu_model(model).map_err(|what| Problem::invalid("cpu_model", what))?;
            Some(model.to_owned())
        }
    };
    after.redundancy = changed_redundancy(
        before.redundancy,
        *redundancy,
        *data_chunks,
        failure_domain.as_deref(),
    )?;
    after.image_layout = image_layouts::changed(before.image_layout, request)?;
    if messenger.is_some() {
        after.messenger = asked_messenger(*messenger);
    }
    if osd_encryption.is_some() {
        after.osd_encryption = asked_osds(*osd_encryption);
    }
    after.downtime_milliseconds = match *downtime_milliseconds {
        None => before.downtime_milliseconds,
        Some(0) => None,
        Some(downtime) => {
            check_downtime(downtime)
                .map_err(|what| Problem::invalid("downtime_milliseconds", what))?;
            Some(downtime)
        }
    };
    check_name(&after.name).map_err(|error| Problem::invalid("name", error.to_string()))?;
    after.limits.check().map_err(|(field, what)| Problem::invalid(field, what))?;
    check_caches([after.cache]).map_err(|(_, what)| Problem::invalid("cache", what))?;
    if !after.encryption && after.provider.is_some() {
        let detail = "a policy without encryption has no key provider";
        return Err(Problem::invalid("provider", detail));
    }
    Ok(after)
}

/// What redundancy a policy asks for after a change. What the change does not give stays as it was `before`.
fn changed_redundancy(
    before: Redundancy,
    redundancy: Option<Redundancy>,
    data_chunks: Option<u32>,
    failure_domain: Option<&str>,
) -> Result<Redundancy, Problem> {
    let mut after = before;
    if let Some(asked) = redundancy {
        asked
            .check()
            .map_err(|(field, what)| Problem::invalid(format!("redundancy.{field}"), what))?;
        // With another layout their number means nothing.
        let kept = before.data_chunks.filter(|_| asked.layout == before.layout);
        let data_chunks = asked.data_chunks.or(kept);
        let failure_domain = asked.failure_domain.or(before.failure_domain);
        after = Redundancy { data_chunks, failure_domain, ..asked };
    }
    if let Some(chunks) = data_chunks {
        after.data_chunks = Some(chunks).filter(|chunks| *chunks > 0);
        after.check().map_err(|(_, what)| Problem::invalid("data_chunks", what))?;
    }
    if let Some(domain) = failure_domain {
        after.failure_domain = FailureDomain::asked(domain)
            .map_err(|what| Problem::invalid("failure_domain", what))?;
    }
    Ok(after)
}

fn replica(
    before: Option<&Replication>,
    to: Option<&str>,
    rate: Option<u64>,
) -> Result<Option<Replication>, Problem> {
    let datastore = match to {
        None => before.map(|before| before.datastore.clone()),
        Some("") => None,
        Some(name) => Some(name.to_owned()),
    };
    let Some(datastore) = datastore else {
        return match rate {
            None => Ok(None),
            Some(_) => {
                let detail = "is of a policy with replicas: say where they are kept as well";
                // Whether the policy has them is not a matter of the request alone.
                let code = match to {
                    None => ErrorCode::WrongState,
                    Some(_) => ErrorCode::InvalidRequest,
                };
                let field = Some("replicate_rate".to_owned());
                Err(Problem { field, ..Problem::new(code, detail) })
            }
        };
    };
    let before = before.map(|before| before.bytes_per_second);
    let bytes_per_second = rate.or(before).unwrap_or(REPLICA_RATE);
    Ok(Some(Replication { datastore, bytes_per_second }))
}

#[cfg(test)]
mod tests;
