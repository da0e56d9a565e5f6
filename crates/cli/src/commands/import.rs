//! Import of VMs from images, or from a libvirt domain.

use std::path::PathBuf;

use vmseal_api::boot::BootDevice;
use vmseal_api::client::ServerClient;
use vmseal_api::hardware::Hardware;
use vmseal_api::request::{CreateDisk, CreateNic, CreateVm};

use super::task;
use crate::arguments::{HardwareOptions, Import, Output};
use crate::exit::{Ended, Exit};
use crate::images::{size_of_image, with_remedy};
use crate::libvirt::{TpmState, Variables};
use crate::{disk_option, field, libvirt, nic_option, print};

/// The default memory of a VM, in bytes.
const MEMORY: u64 = 512 << 20;

pub async fn run(server: &ServerClient, output: Output, options: Import) -> anyhow::Result<()> {
    let vcpus = options.vcpus;
    let memory = options.memory;
    let nics = nic_option::parse_all(&options.nics)?;
    let (mut request, kept, of_tpm) = match &options.libvirt {
        Some(file) => {
            let datastore = options.datastore.unwrap_or_default();
            let networks = libvirt::Networks::parse(&options.networks, &options.bridges)?;
            let given = libvirt::Images::parse(&options.images)?;
            let mut domain = libvirt::read(file, &networks, &given)?;
            let (kept, of_tpm) = (domain.variables.take(), domain.tpm_state.take());
            let mut request = from_domain(domain, &datastore, options.policy)?;
            request.name = options.name.unwrap_or(request.name);
            request.vcpus = vcpus.unwrap_or(request.vcpus);
            request.memory = memory.unwrap_or(request.memory);
            (request, kept, of_tpm)
        }
        None => {
            let request = CreateVm {
                name: options.name.unwrap_or_default(),
                policy: options.policy,
                vcpus: vcpus.unwrap_or(1),
                memory: memory.unwrap_or(MEMORY),
                disks: images(&options.disks)?,
                host: None,
                nics: Vec::new(),
                hardware: Hardware::default(),
                description: String::new(),
                labels: Default::default(),
                autostart: false,
                migration_encryption: Default::default(),
                cloud_init: None,
                uefi_variables: None,
                tpm_state: None,
            };
            (request, None, None)
        }
    };
    let interfaces = interfaces(&request.nics);
    request.nics.extend(nics);
    request.disks.iter_mut().for_each(|disk| disk.force = options.force);
    let of_domain = without_network(request.hardware, request.nics.len());
    request.hardware = machine(of_domain, options.hardware);
    let kept = kept.filter(|_| request.hardware.firmware.has_variables() && !options.reset_nvram);
    request.uefi_variables = match options.nvram {
        None => kept.map(file_of_domain).transpose()?.flatten(),
        asked => asked,
    };
    request.tpm_state = match (options.tpm_state, of_tpm) {
        (None, Some(of_tpm)) => state_of_domain(of_tpm, options.reset_tpm)?,
        (asked, _) => asked,
    };
    let begun = task::begin(server, output, "vms", &request, &options.dry_run, &options.wait).await;
    begun.map_err(|mut error| {
        field::name_interface(&mut error, &interfaces);
        error
    })
}

/// What the interfaces of a domain are called that its cards were: by their addresses, else by their places among the cards.
fn interfaces(cards: &[CreateNic]) -> Vec<String> {
    let called = |(index, card): (usize, &CreateNic)| match card.mac {
        Some(mac) => format!("interface {mac}"),
        None => format!("network card {}", index + 1),
    };
    cards.iter().enumerate().map(called).collect()
}

/// The file with the variables of the firmware of a domain; none where it names none, which is said.
fn file_of_domain(kept: Variables) -> anyhow::Result<Option<PathBuf>> {
    match kept {
        Variables::File(file) => Ok(Some(file)),
        Variables::Unknown => {
            print::say(
                "not imported: the variables of its UEFI firmware, of which it names no file (<nvram>): the guest's boot entries are gone, and it starts from the loader at \\EFI\\BOOT of its disk; --nvram FILE takes them",
            );
            Ok(None)
        }
        Variables::Other(what) => {
            let message = format!(
                "--libvirt: the variables of its UEFI firmware {what}, and are taken from a raw file alone: make one of them (qemu-img convert -O raw) and give it (--nvram FILE), or begin with new ones (--reset-nvram)"
            );
            Err(Ended::new(Exit::Usage, message).into())
        }
    }
}

/// The file with what the TPM of a domain keeps; none where the VM's is to be empty, which is said.
fn state_of_domain(kept: TpmState, reset: bool) -> anyhow::Result<Option<PathBuf>> {
    if reset {
        print::say(
            "not imported: what the TPM keeps, and which of its banks of PCRs are active: the VM's TPM is new and empty, and what the guest has sealed to the old one stays closed. BitLocker asks for its recovery key, and LUKS that a TPM opens for its passphrase: have them before the first start, and enrol the new TPM then",
        );
        return Ok(None);
    }
    let what = match kept {
        TpmState::File(file) => return Ok(Some(file)),
        TpmState::Unknown => {
            "is in a directory that has the domain's UUID, which it does not say".to_owned()
        }
        TpmState::Other(what) => what,
    };
    let message = format!(
        "--libvirt: what its TPM keeps {what}. Give the file (--tpm-state FILE), or begin with an empty TPM (--reset-tpm): what the guest has sealed to the old one stays closed then"
    );
    Err(Ended::new(Exit::Usage, message).into())
}

/// The machine of a domain whose VM has so many network cards: without one it does not start from the network.
fn without_network(mut of_domain: Hardware, cards: usize) -> Hardware {
    if cards == 0 && of_domain.boot.contains(&BootDevice::Network) {
        print::say(format_args!(
            "not imported: 'network' of the boot order: the VM has no network card"
        ));
        of_domain.boot.retain(|device| *device != BootDevice::Network);
    }
    of_domain
}

/// The machine of a libvirt domain; options of the command replace its values.
fn machine(of_domain: Hardware, options: HardwareOptions) -> Hardware {
    let (asked_firmware, asked_backing) =
        (options.firmware.is_some(), options.memory_backing.is_some());
    let asked_crash = options.on_crash.is_some();
    let asked = Hardware::from(options);
    Hardware {
        firmware: if asked_firmware { asked.firmware } else { of_domain.firmware },
        tpm: asked.tpm || of_domain.tpm,
        cdrom: asked.cdrom.or(of_domain.cdrom),
        boot: if asked.boot.is_empty() { of_domain.boot } else { asked.boot },
        cpu_model: asked.cpu_model.or(of_domain.cpu_model),
        memory_backing: if asked_backing { asked.memory_backing } else { of_domain.memory_backing },
        on_crash: if asked_crash { asked.on_crash } else { of_domain.on_crash },
        crash_dump_format: asked.crash_dump_format.or(of_domain.crash_dump_format),
    }
}

/// What to do if the image of a domain cannot be read.
fn by_hand(disk: &libvirt::Disk) -> String {
    let (target, image, format) = (&disk.name, disk.image.display(), disk.format.name());
    format!(
        "a domain does not say how large its disks are, so run this on the datastore's host, as a user who may read the image, or name another file (--image {target}:FILE). Or leave out --libvirt and give the disk as --disk datastore=NAME,image={image},format={format},size=SIZE"
    )
}

fn images(options: &[String]) -> anyhow::Result<Vec<CreateDisk>> {
    let disks = disk_option::parse_all(options)?;
    if disks.iter().all(|disk| disk.image.is_none()) {
        let message = "no disk has an image to import: add image=FILE,format=FORMAT, or make an empty VM with vmseal vm create";
        return Err(Ended::new(Exit::Usage, message).into());
    }
    Ok(disks)
}

/// The request for a VM like the domain; reports what is not imported.
fn from_domain(
    domain: libvirt::Domain,
    datastore: &str,
    policy: String,
) -> anyhow::Result<CreateVm> {
    for warning in &domain.warnings {
        print::say(format_args!("not imported: {warning}"));
    }
    let disk = |disk: &libvirt::Disk| {
        Ok(CreateDisk {
            name: disk.name.clone(),
            datastore: datastore.to_owned(),
            size: size_of_image(&disk.image, disk.format)
                .map_err(|error| with_remedy(error, &by_hand(disk)))?,
            image: Some(disk.image.clone()),
            format: Some(disk.format),
            force: false,
            encrypted: None,
        })
    };
    let disks = domain.disks.iter().map(disk).collect::<anyhow::Result<_>>()?;
    let (name, vcpus, memory, nics) = (domain.name, domain.vcpus, domain.memory, domain.nics);
    Ok(CreateVm {
        name,
        policy,
        vcpus,
        memory,
        disks,
        host: None,
        nics,
        hardware: domain.hardware,
        description: domain.description,
        labels: Default::default(),
        autostart: false,
        migration_encryption: Default::default(),
        cloud_init: None,
        uefi_variables: None,
        tpm_state: None,
    })
}

#[cfg(test)]
mod tests {
    use vmseal_api::boot::Cdrom;
    use vmseal_api::hardware::{Firmware, MemoryBacking, OnCrash};

    use super::*;

    #[test]
    fn variables_come_from_a_raw_file_or_what_to_do_is_said() {
        let file = PathBuf::from("/nvram/web_VARS.fd");
        assert_eq!(file_of_domain(Variables::File(file.clone())).unwrap(), Some(file));
        assert_eq!(file_of_domain(Variables::Unknown).unwrap(), None);
        let other = Variables::Other("are of format 'qcow2'".to_owned());
        let refused = file_of_domain(other).unwrap_err();
        assert_eq!(Exit::of(&refused), Exit::Usage);
        for told in ["'qcow2'", "--nvram FILE", "--reset-nvram"] {
            assert!(refused.to_string().contains(told), "{refused}");
        }
    }

    #[test]
    fn what_a_tpm_keeps_comes_from_a_file_or_is_left_behind_by_an_option_alone() {
        let file = PathBuf::from("/swtpm/tpm2-00.permall");
        let of = |kept: &TpmState, reset| state_of_domain(kept.clone(), reset);
        let other = TpmState::Other("is encrypted".to_owned());
        let known = TpmState::File(file.clone());
        assert_eq!(of(&known, false).unwrap(), Some(file));
        for (kept, told) in
            [(TpmState::Unknown, "the domain's UUID"), (other, "is encrypted"), (known, "")]
        {
            assert_eq!(of(&kept, true).unwrap(), None, "{told}");
            if told.is_empty() {
                continue;
            }
            let refused = of(&kept, false).unwrap_err();
            assert_eq!(Exit::of(&refused), Exit::Usage);
            for told in [told, "--tpm-state FILE", "--reset-tpm"] {
                assert!(refused.to_string().contains(told), "{refused}");
            }
        }
    }

    #[test]
    fn an_interface_is_called_by_its_address_where_it_has_one() {
        let card = |option: &str| nic_option::parse(option).unwrap();
        let cards = [card("user"), card("bridge=br0,mac=52:54:00:12:34:56")];
        assert_eq!(interfaces(&cards), ["network card 1", "interface 52:54:00:12:34:56"]);
    }

    #[test]
    fn what_is_asked_for_is_in_place_of_the_domains() {
        let drive = |iso: &str| Some(Cdrom { medium: Some(iso.into()) });
        let of_domain = Hardware {
            firmware: Firmware::Uefi,
            tpm: true,
            cdrom: drive("/old.iso"),
            boot: vec![BootDevice::Cdrom, BootDevice::Network],
            cpu_model: Some("EPYC".to_owned()),
            memory_backing: MemoryBacking::Hugepages,
            on_crash: OnCrash::CoredumpRestart,
            crash_dump_format: None,
        };
        let usual = machine(of_domain.clone(), HardwareOptions::default());
        assert_eq!(usual, of_domain);
        let asked = || HardwareOptions {
            firmware: clap::ValueEnum::from_str("bios", true).ok(),
            cdrom: Some("/new.iso".into()),
            boot: vec![crate::arguments::BootDevice(BootDevice::Disk)],
            cpu_model: Some("max".to_owned()),
            memory_backing: clap::ValueEnum::from_str("pages", true).ok(),
            tpm: false,
            on_crash: clap::ValueEnum::from_str("destroy", true).ok(),
            crash_dump_format: None,
        };
        let expected = Hardware { tpm: true, ..Hardware::from(asked()) };
        assert_eq!(expected.firmware, Firmware::Bios);
        assert_eq!(machine(of_domain.clone(), asked()), expected);
        let with_tpm = HardwareOptions { tpm: true, ..HardwareOptions::default() };
        assert!(machine(Hardware::default(), with_tpm).tpm);
        assert_eq!(without_network(of_domain.clone(), 0).boot, [BootDevice::Cdrom]);
        assert_eq!(without_network(of_domain.clone(), 1), of_domain);
    }
}
