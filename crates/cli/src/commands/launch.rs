//! `vmseal vm launch`: a VM from an image, created, started, and waited for until it is reached by SSH.

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::time::Duration;

use serde_json::Value;
use tokio::time::Instant;
use vmseal_api::client::ServerClient;
use vmseal_api::hardware::{Firmware, Hardware};
use vmseal_api::host::Power;
use vmseal_api::model::{Datastore, Host, Task, Vm};
use vmseal_api::nic::NicLink;
use vmseal_api::request::{CreateDisk, CreateVm};
use vmseal_api::size::Size;
use vmseal_api::transfer::ImageFormat;

use super::reconnect::across;
use super::ssh::{self, LogIn};
use super::{image, task};
use crate::arguments::{Launch, Output, Wait};
use crate::exit::{Ended, Exit};
use crate::images::{self, DEBIAN};
use crate::print::{self, plan};
use crate::{first_boot, nic_option};

/// The size of that image, as it is built.
const DEBIAN_SIZE: u64 = 2 << 30;

/// The card where none is given: the guest reaches out, and its SSH server is reached at a free port of loopback.
const NIC: &str = "user,forward=tcp:22";

/// How often a guest that boots is looked at.
const LOOK_EVERY: Duration = Duration::from_secs(1);

pub async fn run(server: &ServerClient, output: Output, mut options: Launch) -> anyhow::Result<()> {
    let hardware: Hardware = std::mem::take(&mut options.hardware).into();
    let cloud_init = first_boot::asked(&options.first_boot)?;
    if cloud_init.is_none() {
        let message = "nobody could log in: give --ssh-key FILE, --password or --cloud-init";
        return Err(Ended::new(Exit::Usage, message).into());
    }
    let nics = match options.nics.as_slice() {
        [] => nic_option::parse_all(&[NIC.to_owned()])?,
        given => nic_option::parse_all(given)?,
    };
    let datastore = datastore(server, options.datastore.as_deref()).await?;
    let image = image_of(&options)?;
    if image.is_none() {
        require_readable(server, &datastore, &image::place_of_debian()?).await?;
    }
    if let Some((file, ImageFormat::Raw)) = &image
        && options.image == Path::new(DEBIAN)
    {
        require_firmware(file, hardware.firmware)?;
        match file.starts_with(images::SYSTEM) {
            true => image::say_if_old(file, &images::by_root(image::REBUILD)),
            false => image::say_if_old(file, image::REBUILD),
        }
    }
    let is_there = image.is_some();
    let (image, format) = image.unzip();
    first_boot::warn_if_plain(server, &options.policy).await;
    let mut request = CreateVm {
        name: options.name.clone(),
        policy: options.policy.clone(),
        vcpus: options.vcpus,
        memory: options.memory,
        disks: vec![CreateDisk {
            name: "disk0".to_owned(),
            datastore,
            size: options.disk_size,
            image,
            format,
            force: options.force,
            // The only disk of the VM is as the policy says.
            encrypted: None,
        }],
        host: None,
        nics,
        hardware,
        description: String::new(),
        labels: Default::default(),
        autostart: false,
        migration_encryption: options.migration.mode(),
        cloud_init,
        uefi_variables: None,
        tpm_state: None,
    };
    if options.dry_run.dry_run {
        let mut plan = server.try_post("vms", &request).await?;
        if !is_there {
            image::require_packages()?;
            plan.steps.insert(0, format!("build the image '{DEBIAN}', which takes some minutes"));
        }
        let step = match request.nics.iter().any(|nic| nic.link == NicLink::Up) {
            true => "start it, and wait until its SSH server answers",
            false => "start it, and wait for nothing more, as no link of its network cards is up",
        };
        plan.steps.push(step.to_owned());
        return plan::show(output, &plan);
    }
    if !is_there {
        // What is refused is refused before the minutes that the image takes.
        server.try_post("vms", &request).await?;
        let built = image::debian()?;
        for disk in &mut request.disks {
            (disk.image, disk.format) = (Some(built.clone()), Some(ImageFormat::Raw));
        }
    }
    // Only the VM is printed as a document: one result.
    let quiet = Output::Table;
    let created: Task = server.post("vms", &request).await?;
    task::settle(server, quiet, created, &Wait::default()).await?;
    let path = format!("vms/{}", options.name);
    let vm: Vm = server.get(&path).await?;
    let log_in = LogIn {
        user: options.first_boot.user.clone(),
        identity: options.first_boot.ssh_keys.iter().find_map(|file| ssh::private_of(file)),
    };
    ssh::remember(&vm, &log_in)?;
    if let Err(error) = start(server, &path).await {
        // The same command again would be refused: the name is taken.
        print::say(format_args!(
            "VM '{0}' was created: look at it (vmseal vm show {0}), start it (vmseal vm start {0}), or delete it (vmseal vm delete {0})",
            options.name
        ));
        return Err(error);
    }
    let vm = reached(server, &options.name, options.timeout).await?;
    let cut_off = cut_off(&vm);
    if output != Output::Table {
        cut_off.iter().for_each(print::say);
        return print::one(output, &vm, &[]);
    }
    let up = || format!("{} is up; log in: vmseal vm ssh {0}", vm.name);
    print::words(&cut_off.unwrap_or_else(up))
}

async fn start(server: &ServerClient, path: &str) -> anyhow::Result<()> {
    let started: Task = server.post(&format!("{path}/start"), &Value::Null).await?;
    task::settle(server, Output::Table, started, &Wait::default()).await
}

/// Refuses an image of Debian that was built when it started with a BIOS only: the wait for the guest would be in vain.
fn require_firmware(image: &Path, firmware: Firmware) -> anyhow::Result<()> {
    if firmware == Firmware::Bios || images::has_partitions_for_uefi(image)? {
        return Ok(());
    }
    let message = format!(
        "--firmware: the image '{DEBIAN}' was built before it could start with UEFI: build it again (vmseal image build debian --force)"
    );
    Err(Ended::new(Exit::Usage, message).into())
}

/// How a datastore is named where others may have its name.
fn called(datastore: &Datastore) -> String {
    match datastore.hosts.first() {
        Some(on) => format!("{}:{}", on.host, datastore.name),
        None => datastore.name.clone(),
    }
}

/// The datastore that is meant where there is only one.
async fn datastore(server: &ServerClient, given: Option<&str>) -> anyhow::Result<String> {
    if let Some(given) = given {
        return Ok(given.to_owned());
    }
    let known: Vec<Datastore> = server.all("datastores").await?;
    match known.as_slice() {
        [one] => Ok(one.id.to_string()),
        [] => {
            let message = "there is no datastore: add one (vmseal datastore add), or set this machine up (vmseal init)";
            Err(Ended::new(Exit::NotFound, message).into())
        }
        several => {
            let mut names: Vec<_> = several.iter().map(called).collect();
            names.sort();
            let message = format!("give --datastore: there are {}", names.join(", "));
            Err(Ended::new(Exit::Usage, message).into())
        }
    }
}

/// Refuses to build an image in a directory that no host reads which could get the VM: the VM would be refused after the minutes that
/// the image takes.
async fn require_readable(
    server: &ServerClient,
    datastore: &str,
    image: &Path,
) -> anyhow::Result<()> {
    let known: Vec<Datastore> = server.all("datastores").await?;
    let hosts: Vec<Host> = server.all("hosts").await?;
    let candidates = hosts_with(&known, datastore, &hosts);
    match refusal_of_place(&candidates, image) {
        None => Ok(()),
        Some(refusal) => {
            let unread = images::known(&images::directories()?)?.unread;
            let unread: Vec<_> = unread.iter().map(|said| format!("; {said}")).collect();
            Err(Ended::new(Exit::Usage, format!("{refusal}{}", unread.concat())).into())
        }
    }
}

/// The hosts that have a datastore, which is given by its name, `HOST:NAME` or its id.
fn hosts_with<'a>(known: &[Datastore], datastore: &str, hosts: &'a [Host]) -> Vec<&'a Host> {
    let (of_host, name) = match datastore.split_once(':') {
        Some((host, name)) => (Some(host), name),
        None => (None, datastore),
    };
    let meant = |it: &Datastore| it.name == name || it.id.to_string() == name;
    let names = known.iter().filter(|it| meant(it)).flat_map(|it| it.hosts.iter());
    let names: Vec<_> = names.map(|on| on.host.as_str()).collect();
    let has = |host: &&Host| names.contains(&host.name.as_str());
    hosts.iter().filter(has).filter(|host| of_host.is_none_or(|it| it == host.name)).collect()
}

/// Why none of these hosts would read a file, as far as they have said what they read: an agent of an earlier version says nothing.
/// None where one may.
fn refusal_of_place(hosts: &[&Host], file: &Path) -> Option<String> {
    let read = |host: &Host| {
        let described = host.description.as_ref();
        described.map_or_else(Vec::new, |it| it.transfer_directories.clone())
    };
    let reads = |host: &&Host| {
        let directories = read(host);
        directories.is_empty() || directories.iter().any(|it| file.starts_with(it))
    };
    let host = hosts.first().filter(|_| !hosts.iter().any(reads))?;
    Some(format!(
        "--image: the image '{DEBIAN}' would be built as {}, which host '{}' does not read: it reads {}. Have root build it (sudo vmseal image build {DEBIAN}), and give this command again; or start the host's agent with --transfer-directory for the directory of your images, too",
        file.display(),
        host.name,
        read(host).join(", ")
    ))
}

/// The file to fill the disk from; none for Debian's where it must be built first.
fn image_of(options: &Launch) -> anyhow::Result<Option<(PathBuf, ImageFormat)>> {
    let image = &options.image;
    if !images::is_name(image) {
        let format = options.format.or_else(|| format_of(image)).ok_or_else(|| {
            let message =
                format!("give the format of {}: --format raw or --format qcow2", image.display());
            Ended::new(Exit::Usage, message)
        })?;
        return Ok(Some((std::path::absolute(image)?, format)));
    }
    let name = image.to_string_lossy();
    let directories = images::directories()?;
    let is_debian = |image: &images::Image| image.name == DEBIAN;
    if name == DEBIAN && !images::known(&directories)?.images.iter().any(is_debian) {
        if options.disk_size < DEBIAN_SIZE {
            let message = format!(
                "--disk-size: is {}, and the image '{DEBIAN}' has {}: make the disk larger",
                Size(options.disk_size),
                Size(DEBIAN_SIZE)
            );
            return Err(Ended::new(Exit::Usage, message).into());
        }
        return Ok(None);
    }
    images::find(&directories, &name).map(Some)
}

/// What a file's name says of its format; its content could be a guest's.
fn format_of(image: &Path) -> Option<ImageFormat> {
    match image.extension()?.to_str()? {
        "raw" | "img" => Some(ImageFormat::Raw),
        "qcow2" => Some(ImageFormat::Qcow2),
        _ => None,
    }
}

/// Waits until the VM's SSH server answers. Where no link of its network cards is up, it cannot: that is the end, too ([`cut_off`]).
async fn reached(server: &ServerClient, name: &str, timeout: Duration) -> anyhow::Result<Vm> {
    let begun = Instant::now();
    let path = format!("vms/{name}");
    let mut is_told = false;
    loop {
        let vm: Vm = across(server, async || server.get(&path).await).await?;
        let name = &vm.name;
        if vm.power.is_some_and(|power| power != Power::Running) {
            let why = vm.stopped.as_ref().map(|stopped| format!(" ({})", stopped.detail));
            let message = format!(
                "VM '{name}' does not run any more while it boots{}: start it again (vmseal vm start {name}) and look at its console (vmseal vm console {name})",
                why.unwrap_or_default()
            );
            return Err(Ended::new(Exit::Failed, message).into());
        }
        // Whether it runs is not known while its host does not answer.
        if vm.power.is_some() && cut_off(&vm).is_some() {
            return Ok(vm);
        }
        if !std::mem::replace(&mut is_told, true) {
            print::say(format_args!(
                "waiting for the guest's SSH server; its console, from another terminal: vmseal vm console {name}"
            ));
        }
        let places = ssh::places(ssh::plugged(&vm.nics));
        if ssh::answering(&places).await.is_some() {
            return Ok(vm);
        }
        if begun.elapsed() > timeout {
            return Err(no_answer(name, &places).into());
        }
        let interrupted = tokio::select! {
            Ok(()) = tokio::signal::ctrl_c() => true,
            () = tokio::time::sleep(LOOK_EVERY) => false,
        };
        if interrupted {
            let message = format!("interrupted; VM '{name}' goes on booting: vmseal vm ssh {name}");
            return Err(Ended::new(Exit::Interrupted, message).into());
        }
    }
}

/// The end of a wait that was too long.
fn no_answer(name: &str, places: &[SocketAddr]) -> Ended {
    let what = match places {
        [] => ssh::NOT_KNOWN.to_owned(),
        [at] => format!(
            "nothing answers as an SSH server at {at} (if its host is another machine, forward the port there to an address of its own)"
        ),
        several => {
            let all: Vec<_> = several.iter().map(ToString::to_string).collect();
            format!("nothing answers as an SSH server at any of {}", all.join(", "))
        }
    };
    let message = format!("VM '{name}' runs, but {what}; look at it: vmseal vm console {name}");
    Ended::new(Exit::NoAnswer, message)
}

/// Why the guest of a VM that runs cannot be reached by any network card, and what to do; none where a link is up.
fn cut_off(vm: &Vm) -> Option<String> {
    if ssh::plugged(&vm.nics).next().is_some() {
        return None;
    }
    let name = &vm.name;
    let why = match &vm.nics[..] {
        [] => format!(
            "it has no network card: add one (vmseal nic add {name} --nic user,forward=tcp:22)"
        ),
        [nic] => format!(
            "the link of its network card '{0}' is down: plug it in (vmseal nic set {name} {0} --link up)",
            nic.name
        ),
        [first, ..] => format!(
            "the links of all its network cards are down: plug one in (vmseal nic set {name} {} --link up)",
            first.name
        ),
    };
    Some(format!(
        "VM '{name}' runs, and nobody waits for its guest's SSH server: {why}, and log in then (vmseal vm ssh {name})"
    ))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn host(name: &str, reads: Option<&[&str]>) -> Host {
        let description = reads.map(|reads| {
            json!({
                "contract": 1, "vmseal": "1",
                "incarnation": "0190b5a0-0000-7000-8000-000000000001", "hostname": name,
                "key_box": "", "accelerator": { "kind": "tcg", "reason": "" }, "qemu": "7.2", "cpus": 1,
                "memory": 1, "aes_hardware": true, "run_dir": "/run", "weaknesses": [],
                "transfer_directories": reads
            })
        });
        let host = json!({
            "id": "0190b5a0-0000-7000-8000-000000000002", "name": name, "address": "a:1",
            "connection": "connected", "description": description
        });
        serde_json::from_value(host).unwrap()
    }

    #[test]
    fn an_image_is_not_built_where_no_host_reads_it() {
        let file = Path::new("/home/me/.cache/vmseal/images/debian.raw");
        let usual = host("one", Some(&["/var/lib/vmseal/agent/transfer", images::SYSTEM]));
        let all = host("two", Some(&["/"]));
        let told_nothing = [host("old", Some(&[])), host("away", None)];
        let refusal = refusal_of_place(&[&usual], file).unwrap();
        for told in
            ["/home/me/.cache", "host 'one'", images::SYSTEM, "sudo vmseal image build debian"]
        {
            assert!(refusal.contains(told), "{refusal}");
        }
        assert_eq!(refusal_of_place(&[&usual, &all], file), None);
        assert_eq!(refusal_of_place(&[&usual], Path::new("/var/lib/vmseal/images/a.raw")), None);
        // A directory is not the beginning of another one's name.
        assert!(refusal_of_place(&[&usual], Path::new("/var/lib/vmseal/images2/a.raw")).is_some());
        for host in &told_nothing {
            assert_eq!(refusal_of_place(&[host], file), None, "{}", host.name);
        }
        assert_eq!(refusal_of_place(&[], file), None);
    }

    #[test]
    fn a_guest_without_a_link_is_not_waited_for_and_what_to_do_is_said() {
        let with = |links: &[&str]| {
            let card = |(index, link): (usize, &&str)| {
                json!({
                    "id": format!("0190b5a0-0000-7000-8000-00000000000{index}"), "name": format!("nic{index}"),
                    "mac": "52:54:00:12:34:56", "model": "virtio", "backend": { "kind": "user" }, "link": link,
                })
            };
            let nics: Vec<_> = links.iter().enumerate().map(card).collect();
            let vm = json!({
                "id": "0190b5a0-0000-7000-8000-000000000009", "name": "web", "host": "here",
                "policy": "encrypted", "vcpus": 1, "memory": 512 << 20, "disks": [],
                "lifecycle": "ready", "power": "running", "nics": nics,
            });
            serde_json::from_value::<Vm>(vm).unwrap()
        };
        for (links, told) in [
            (&[][..], "vmseal nic add web"),
            (&["down"], "card 'nic0' is down: plug it in (vmseal nic set web nic0 --link up)"),
            (&["down", "down"], "cards are down: plug one in (vmseal nic set web nic0 --link up)"),
        ] {
            let said = cut_off(&with(links)).unwrap();
            assert!(said.starts_with("VM 'web' runs") && said.contains(told), "{said}");
        }
        assert_eq!(cut_off(&with(&["down", "up"])), None);
    }

    #[test]
    fn the_hosts_of_a_datastore_are_found_by_each_of_its_names() {
        let hosts = [host("one", None), host("two", None)];
        let id = |last: u8| format!("0190b5a0-0000-7000-8000-00000000000{last}");
        let known: Vec<Datastore> = [(3, "one"), (4, "two")]
            .into_iter()
            .map(|(last, host)| {
                let place = json!({ "host": host, "location": { "kind": "dir", "path": "/d" } });
                let known = json!({ "id": id(last), "name": "local", "hosts": [place] });
                serde_json::from_value(known).unwrap()
            })
            .collect();
        let found = |given: &str| {
            let found = hosts_with(&known, given, &hosts).into_iter();
            found.map(|host| host.name.clone()).collect::<Vec<_>>()
        };
        assert_eq!(found("local"), ["one", "two"]);
        assert_eq!(found("two:local"), ["two"]);
        assert_eq!(found(&id(3)), ["one"]);
        assert!(found("other").is_empty());
    }
}
