//! Import of VMs from images, or from a libvirt domain.

use std::path::Path;

use vmseal_api::client::ServerClient;
use vmseal_api::hardware::Hardware;
use vmseal_api::request::{CreateDisk, CreateVm};

use super::task;
use crate::arguments::{Import, Output};
use crate::exit::{Ended, Exit};
use crate::images::size_of_image;
use crate::{disk_option, libvirt, nic_option, print};

/// The default memory of a VM, in bytes.
const MEMORY: u64 = 512 << 20;

pub async fn run(server: &ServerClient, output: Output, options: Import) -> anyhow::Result<()> {
    let vcpus = options.vcpus;
    let memory = options.memory;
    let nics = nic_option::parse_all(&options.nics)?;
    let mut request = match &options.libvirt {
        Some(file) => {
            let datastore = options.datastore.unwrap_or_default();
            let mut request = from_domain(file, &datastore, options.policy)?;
            request.name = options.name.unwrap_or(request.name);
            request.vcpus = vcpus.unwrap_or(request.vcpus);
            request.memory = memory.unwrap_or(request.memory);
            request
        }
        None => CreateVm {
            name: options.name.unwrap_or_default(),
            policy: options.policy,
            vcpus: vcpus.unwrap_or(1),
            memory: memory.unwrap_or(MEMORY),
            disks: images(&options.disks)?,
            nics: Vec::new(),
            hardware: Hardware::default(),
            description: String::new(),
            labels: Default::default(),
            autostart: false,
            cloud_init: None,
        },
    };
    request.nics.extend(nics);
    request.disks.iter_mut().for_each(|disk| disk.force = options.force);
    let of_domain = request.hardware.firmware;
    let asked = options.hardware.firmware.is_some();
    request.hardware = options.hardware.into();
    if !asked {
        request.hardware.firmware = of_domain;
    }
    task::begin(server, output, "vms", &request, &options.dry_run, &options.wait).await
}

/// What to do if the image of a domain cannot be read.
fn by_hand(disk: &libvirt::Disk) -> String {
    let (image, format) = (disk.image.display(), disk.format.name());
    format!(
        "a domain does not say how large its disks are: run this on the datastore's host, as a user who may read the image; or leave out --libvirt and give the disk as --disk datastore=NAME,image={image},format={format},size=SIZE"
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
fn from_domain(file: &Path, datastore: &str, policy: String) -> anyhow::Result<CreateVm> {
    let domain = libvirt::read(file)?;
    for warning in &domain.warnings {
        print::say(format_args!("not imported: {warning}"));
    }
    let disk = |disk: &libvirt::Disk| {
        Ok(CreateDisk {
            name: disk.name.clone(),
            datastore: datastore.to_owned(),
            size: size_of_image(&disk.image, disk.format).map_err(|error| match error
                .downcast_ref::<std::io::Error>()
            {
                Some(_) => error.context(by_hand(disk)),
                None => error,
            })?,
            image: Some(disk.image.clone()),
            format: Some(disk.format),
            force: false,
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
        nics,
        hardware: Hardware { firmware: domain.firmware, ..Hardware::default() },
        description: String::new(),
        labels: Default::default(),
        autostart: false,
        cloud_init: None,
    })
}
