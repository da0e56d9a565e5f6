//! Virtual machines.

use std::path::Path;
use std::time::Duration;

use serde_json::Value;
use vmseal_api::client::ServerClient;
use vmseal_api::host::{AcceleratorKind, DiskRole, Power};
use vmseal_api::model::{Host, Vm};
use vmseal_api::request::{
    CloneVm, CreateVm, DecryptVm, EncryptVm, EvacuateVm, MigrateVm, MoveVm, RebootVm, RecryptVm,
    ResumeVm, SetVm, StartVm, StopVm,
};

use super::several::each_once;
use super::{cdrom, console, evacuate, guest, import, launch, list, mirror, ssh, task, top, vnc};
use crate::arguments::{self, DryRun, OnOff, Output, Wait};
use crate::exit::{Ended, Exit};
use crate::print::{self, plan};
use crate::stream::say;
use crate::{disk_option, first_boot, libvirt, nic_option};

/// What a clone is that has no data for cloud-init.
const SAME_GUEST: &str = "Its guest has the host name, SSH host keys and machine id of the other one. Data for cloud-init (--ssh-key, --cloud-init) sets a new host name and makes new SSH host keys in images that use it. Change the machine id in the guest.";

/// What a clone is that has the data for cloud-init of the other VM.
const TOLD_THE_SAME: &str = "Cloud-init in it is told what it is told in the other VM, with another instance id: it sets the guest up anew, as at a first boot. If that is not wanted, remove the disk before the clone starts (vmseal disk remove VM cloud-init).";

/// What the guest of a clone is, for which nothing was given to cloud-init; none where the server does not say.
async fn of_guest(server: &ServerClient, clone: &str) -> Option<&'static str> {
    let shown: Vm = server.get(&format!("vms/{clone}")).await.ok()?;
    let is_told = shown.disks.iter().any(|disk| disk.role == DiskRole::CloudInit);
    Some(if is_told { TOLD_THE_SAME } else { SAME_GUEST })
}

pub async fn run(server: ServerClient, output: Output, verb: arguments::Vm) -> anyhow::Result<()> {
    if let arguments::Vm::Vnc(options) = &verb {
        return vnc::run(server, options).await;
    }
    let server = &server;
    match verb {
        arguments::Vm::List(list) => {
            let path = match &list.label {
                Some(label) => format!("vms?label={}", in_query(label)),
                None => "vms".to_owned(),
            };
            list::run(server, output, &list.how, &path).await
        }
        arguments::Vm::Set(options) => set(server, output, options).await,
        arguments::Vm::Reboot { name, grace_period, dry_run, wait } => {
            let request = RebootVm { timeout_seconds: grace_period.map(seconds) };
            task::begin(server, output, &format!("vms/{name}/reboot"), &request, &dry_run, &wait)
                .await
        }
        arguments::Vm::Reset { name, dry_run } => {
            control(server, output, &name, "reset", &dry_run).await
        }
        arguments::Vm::Pause { name, dry_run } => {
            control(server, output, &name, "pause", &dry_run).await
        }
        arguments::Vm::Unpause { name, dry_run } => {
            control(server, output, &name, "unpause", &dry_run).await
        }
        arguments::Vm::Wakeup { vms, dry_run } => {
            wake(server, output, &each_once(server, vms).await?, &dry_run).await
        }
        arguments::Vm::Show(how) if how.libvirt => {
            require_no_format(output)?;
            let vm: Vm = server.get(&format!("vms/{}", how.of.name)).await?;
            show_domain(server, &vm, how.images.as_deref()).await
        }
        arguments::Vm::Top(options) => top::run(server, output, options).await,
        arguments::Vm::Show(how) if output == Output::Table && !how.of.watch => {
            let vm: Vm = server.get(&format!("vms/{}", how.of.name)).await?;
            let mut details = print::vm_details(&vm);
            if vm.power == Some(Power::Running) {
                details.extend(top::of_one(server, &vm.id.to_string()).await);
            }
            print::one(output, &vm, &details)
        }
        arguments::Vm::Show(how) => {
            list::one::<Vm>(server, output, &how.of, "vms", print::vm_details).await
        }
        arguments::Vm::Create {
            name,
            policy,
            vcpus,
            memory,
            host,
            disks,
            nics,
            force,
            hardware,
            about,
            migration,
            first_boot,
            dry_run,
            wait,
        } => {
            let mut disks = disk_option::parse_all(&disks)?;
            disks.iter_mut().for_each(|disk| disk.force = force);
            let nics = nic_option::parse_all(&nics)?;
            let cloud_init = first_boot::asked(&first_boot)?;
            if cloud_init.is_some() {
                first_boot::warn_if_plain(server, &policy).await;
            }
            let request = CreateVm {
                name,
                policy,
                vcpus,
                memory,
                disks,
                host,
                nics,
                hardware: hardware.into(),
                description: about.description.unwrap_or_default(),
                labels: about.labels.into_iter().collect(),
                autostart: about.autostart == Some(OnOff::On),
                migration_encryption: migration.mode(),
                cloud_init,
                uefi_variables: None,
                tpm_state: None,
            };
            task::begin(server, output, "vms", &request, &dry_run, &wait).await
        }
        arguments::Vm::Import(options) => import::run(server, output, options).await,
        arguments::Vm::Start { name, boot_once, discard_memory, dry_run, wait } => {
            let path = format!("vms/{name}/start");
            let request = StartVm { boot_once: boot_once.map(|device| device.0), discard_memory };
            task::begin(server, output, &path, &request, &dry_run, &wait).await
        }
        arguments::Vm::Stop { name, force, grace_period, dry_run, wait } => {
            let timeout_seconds = grace_period.map(seconds);
            let request = StopVm { force, timeout_seconds };
            task::begin(server, output, &format!("vms/{name}/stop"), &request, &dry_run, &wait)
                .await
        }
        arguments::Vm::Clone {
            vm,
            name,
            snapshot,
            host,
            datastore,
            no_quiesce,
            linked,
            first_boot,
            rate,
            dry_run,
            wait,
        } => {
            let cloud_init = first_boot::asked(&first_boot)?;
            let of = snapshot.clone().filter(|_| linked && !dry_run.dry_run);
            let shares = of.map(|of| {
                format!(
                    "'{name}' shares the data, and the data key of what is encrypted, of VM '{vm}', snapshot '{of}'"
                )
            });
            let is_given_none = cloud_init.is_none() && !dry_run.dry_run;
            let (quiesce, rate, clone) = (!no_quiesce, rate.rate, name.clone());
            let request =
                CloneVm { name, snapshot, host, datastore, linked, cloud_init, quiesce, rate };
            let path = format!("vms/{vm}/clone");
            task::begin(server, output, &path, &request, &dry_run, &wait).await?;
            shares.into_iter().for_each(say);
            if is_given_none {
                of_guest(server, &clone).await.into_iter().for_each(say);
            }
            Ok(())
        }
        arguments::Vm::Suspend { name, dry_run, wait } => {
            let path = format!("vms/{name}/suspend");
            task::begin(server, output, &path, &serde_json::json!({}), &dry_run, &wait).await
        }
        arguments::Vm::Resume { name, accept_memory, dry_run, wait } => {
            let (path, request) = (format!("vms/{name}/resume"), ResumeVm { accept_memory });
            task::begin(server, output, &path, &request, &dry_run, &wait).await
        }
        arguments::Vm::Encrypt { vms, policy, provider, disks, in_place, rate, dry_run, wait } => {
            let vms = each_once(server, vms).await?;
            let request = EncryptVm { policy, provider, rate: rate.rate, in_place, disks };
            mirror::encrypt(server, output, &vms, &request, &dry_run, &wait).await
        }
        arguments::Vm::Decrypt { vms, policy, disks, yes, in_place, rate, dry_run, wait } => {
            let vms = each_once(server, vms).await?;
            let request = DecryptVm { policy, rate: rate.rate, in_place, disks };
            mirror::decrypt(server, output, &vms, &request, yes, &dry_run, &wait).await
        }
        arguments::Vm::Move { vms, datastore, disks, rate, dry_run, wait } => {
            let vms = each_once(server, vms).await?;
            let request = MoveVm { datastore, disks, rate: rate.rate };
            mirror::move_disks(server, output, &vms, &request, &dry_run, &wait).await
        }
        arguments::Vm::Migrate {
            name,
            host,
            remote,
            policy,
            datastore,
            rate,
            downtime,
            compress,
            watch,
            dry_run,
            wait,
        } => {
            let path = format!("vms/{name}/migrate");
            let downtime_milliseconds =
                downtime.map(|it| u32::try_from(it.as_millis()).unwrap_or(u32::MAX));
            let request = MigrateVm {
                host,
                remote,
                policy,
                datastore,
                rate,
                downtime_milliseconds,
                compress,
            };
            if watch {
                return task::begin_and_watch(server, output, &path, &request, wait.timeout).await;
            }
            task::begin(server, output, &path, &request, &dry_run, &wait).await
        }
        arguments::Vm::Evacuate { name, host, no_start, yes, dry_run, wait } => {
            let request = EvacuateVm { host, no_start };
            evacuate::vm(server, output, &name, &request, yes, &dry_run, &wait).await
        }
        arguments::Vm::Recrypt { vms, provider, deep, in_place, disks, rate, dry_run, wait } => {
            let vms = each_once(server, vms).await?;
            let request = RecryptVm { provider, deep, rate, in_place, disks };
            mirror::recrypt(server, output, &vms, &request, &dry_run, &wait).await
        }
        arguments::Vm::Prove(prove) => super::prove::run(server, output, prove).await,
        arguments::Vm::Dump(options) => super::dump::take(server, output, options).await,
        arguments::Vm::Launch(options) => launch::run(server, output, options).await,
        arguments::Vm::Ssh(options) => ssh::run(server, options).await,
        // Above.
        arguments::Vm::Vnc(_) => Ok(()),
        arguments::Vm::Cdrom(verb) => cdrom::run(server, output, verb).await,
        arguments::Vm::Guest(verb) => guest::run(server, verb).await,
        arguments::Vm::Console(options) => console::attach(server, &options).await,
        arguments::Vm::Delete { name, dry_run, wait } => {
            let path = format!("vms/{name}");
            let vm = server.get::<Vm>(&path).await.ok();
            task::begin_deletion(server, output, &path, &dry_run, &wait).await?;
            match vm {
                Some(vm) if !dry_run.dry_run => ssh::forget(&vm),
                _ => Ok(()),
            }
        }
    }
}

fn seconds(period: Duration) -> u32 {
    u32::try_from(period.as_secs()).unwrap_or(u32::MAX)
}

/// A text as a part of a query.
fn in_query(text: &str) -> String {
    let plain = |byte: &u8| byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'.' | b'_');
    let encoded = text.bytes().map(|byte| match plain(&byte) {
        true => char::from(byte).to_string(),
        false => format!("%{byte:02X}"),
    });
    encoded.collect()
}

/// Has a guest controlled, and shows its VM.
async fn control(
    server: &ServerClient,
    output: Output,
    name: &str,
    what: &str,
    dry_run: &DryRun,
) -> anyhow::Result<()> {
    let path = format!("vms/{name}/{what}");
    if dry_run.dry_run {
        return plan::show(output, &server.try_post(&path, &Value::Null).await?);
    }
    let vm: Vm = server.post(&path, &Value::Null).await?;
    print::one(output, &vm, &print::vm_details(&vm))
}

/// Wakes guests, and shows their VMs. Of several, none is woken where the server would refuse one.
async fn wake(
    server: &ServerClient,
    output: Output,
    vms: &[String],
    dry_run: &DryRun,
) -> anyhow::Result<()> {
    if let [vm] = vms {
        return control(server, output, vm, "wakeup", dry_run).await;
    }
    let paths: Vec<_> = vms.iter().map(|vm| format!("vms/{vm}/wakeup")).collect();
    for path in &paths {
        let plan = server.try_post(path, &Value::Null).await?;
        if dry_run.dry_run {
            plan::show(output, &plan)?;
        }
    }
    if dry_run.dry_run {
        return Ok(());
    }
    let mut woken: Vec<Vm> = Vec::new();
    for path in &paths {
        match server.post(path, &Value::Null).await {
            Ok(vm) => woken.push(vm),
            Err(problem) if woken.is_empty() => return Err(problem.into()),
            Err(problem) => {
                let names: Vec<_> = woken.iter().map(|vm| vm.name.as_str()).collect();
                let others = format!("not all were woken; these were: {}", names.join(", "));
                return Err(anyhow::Error::from(problem).context(others));
            }
        }
    }
    print::list(output, &arguments::Columns::usual(), woken)
}

async fn set(
    server: &ServerClient,
    output: Output,
    options: arguments::SetVm,
) -> anyhow::Result<()> {
    if let Some(wanted) = options.tpm {
        return set_tpm(server, output, &options, wanted).await;
    }
    let set = options.labels.into_iter().map(|(key, value)| (key, Some(value)));
    let removed = options.remove_labels.into_iter().map(|key| (key, None));
    let request = SetVm {
        name: options.name,
        vcpus: options.vcpus,
        memory: options.memory,
        description: options.description,
        labels: removed.chain(set).collect(),
        autostart: options.autostart.map(|wanted| wanted == OnOff::On),
        migration_encryption: options.migration_encryption.map(Into::into),
        on_drain: options.on_drain.map(Into::into),
        template: options.template.map(|wanted| wanted == OnOff::On),
        policy: options.policy,
        cdrom: None,
        boot: Some(options.boot)
            .filter(|order| !order.is_empty())
            .map(|order| order.into_iter().map(|device| device.0).collect()),
        on_crash: options.on_crash.map(|wanted| wanted.0),
        crash_dump_format: options.crash_dump_format.map(Into::into),
    };
    let path = format!("vms/{}", options.vm);
    if options.dry_run.dry_run {
        return plan::show(output, &server.try_patch(&path, &request).await?);
    }
    let vm: Vm = server.patch(&path, &request).await?;
    if !vm.at_next_start.is_empty() {
        say(format!("takes effect at the next start: {}", vm.at_next_start.join(", ")));
    }
    print::one(output, &vm, &print::vm_details(&vm))
}

async fn set_tpm(
    server: &ServerClient,
    output: Output,
    options: &arguments::SetVm,
    wanted: OnOff,
) -> anyhow::Result<()> {
    let (path, dry_run, wait) =
        (format!("vms/{}/tpm", options.vm), &options.dry_run, Wait::default());
    if wanted == OnOff::On {
        return task::begin(server, output, &path, &Value::Null, dry_run, &wait).await;
    }
    if !options.yes && !dry_run.dry_run {
        confirm_loss(&options.vm)?;
    }
    task::begin_deletion(server, output, &path, dry_run, &wait).await
}

/// Asks whether what a TPM keeps is to be destroyed.
fn confirm_loss(vm: &str) -> anyhow::Result<()> {
    let lost = format!(
        "What the TPM of VM '{vm}' keeps is destroyed with it: what the guest has sealed to it, such as keys of LUKS and BitLocker, stays closed for good"
    );
    super::confirm::removal(&lost, "Remove it")
}

/// A domain is XML, whatever is asked for.
fn require_no_format(output: Output) -> anyhow::Result<()> {
    if output == Output::Table {
        return Ok(());
    }
    let message = "--libvirt prints a domain as XML, and in no other format: leave out -o/--output";
    Err(Ended::new(Exit::Usage, message).into())
}

/// Prints a VM as a libvirt domain: one that runs with the sockets of its filter, unless its files are to be named.
async fn show_domain(server: &ServerClient, vm: &Vm, images: Option<&Path>) -> anyhow::Result<()> {
    let host: Host = server.get(&format!("hosts/{}", vm.host)).await?;
    libvirt::left_out(vm).into_iter().for_each(|what| say(format!("not in the domain: {what}")));
    if images.is_some() || vm.power != Some(Power::Running) {
        // A host that is away has not said what it has.
        let accelerator =
            host.description.map_or(AcceleratorKind::Kvm, |host| host.accelerator.kind);
        let files = libvirt::Files::within(images);
        say_exports(vm, &files);
        return print::line(libvirt::domain_of_files(vm, accelerator, &files).trim_end());
    }
    let silent = || {
        Ended::new(
            Exit::NoAnswer,
            format!("host '{}' is unreachable; check that its agent is running", vm.host),
        )
    };
    let description = host.description.ok_or_else(silent)?;
    print::line(libvirt::domain(vm, &description).trim_end())
}

/// Says how the files of a domain are made.
fn say_exports(vm: &Vm, files: &libvirt::Files) {
    say(format!(
        "The domain names files. These commands write them, in the clear, while VM '{}' is off; a path outside of the transfer directories of host '{}' is refused: name one there, and copy the file.",
        vm.name, vm.host
    ));
    files.exports(vm).into_iter().for_each(|command| say(format!("  {command}")));
    if let Some(command) = files.placing_of_tpm(vm) {
        say(
            "libvirt looks for what the TPM keeps in a directory of its own. Before the domain starts for the first time, put it there, as root:",
        );
        say(format!("  {command}"));
    }
    if vm.hardware.tpm {
        say(
            "What the TPM keeps is a secret: leave no copy of its file. The file, and the directory that it is in, must belong to the user that libvirt runs swtpm as (swtpm_user in /etc/libvirt/qemu.conf).",
        );
    }
}
