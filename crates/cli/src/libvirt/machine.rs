//! The machine of a libvirt domain: its firmware, processor model, kind of memory, TPM and CD-ROM drive, and what it starts
//! from.

use std::path::PathBuf;

use anyhow::{Context, bail, ensure};
use roxmltree::Node;
use vmseal_api::boot::{BootDevice, Cdrom, check_medium};
use vmseal_api::hardware::{Firmware, Hardware, MemoryBacking, OnCrash, check_cpu_model};

use super::node::{child, text_of, unknown};

/// Elements of a CD-ROM drive that are read, or that a VM has its own of.
const KNOWN_OF_DRIVE: [&str; 8] =
    ["driver", "source", "target", "backingStore", "readonly", "boot", "alias", "address"];

/// Reads it from a domain with these devices.
pub fn machine(
    domain: Node<'_, '_>,
    os: Node<'_, '_>,
    devices: Node<'_, '_>,
    warnings: &mut Vec<String>,
) -> anyhow::Result<Hardware> {
    let firmware = firmware(os);
    let tpm = tpm(devices, warnings)?;
    let drives = media(devices, "cdrom");
    let cdrom = drives.first().map(|drive| Cdrom { medium: medium(*drive, warnings) });
    for other in drives.iter().skip(1) {
        warnings.push(format!("the cdrom '{}': a VM has one drive", target(*other)));
    }
    for floppy in media(devices, "floppy") {
        warnings.push(format!("the floppy '{}'", target(floppy)));
    }
    let drive = drives.first().copied();
    let (cpu_model, memory_backing) = (cpu_model(domain, warnings), backing(domain, warnings));
    let on_crash = on_crash(domain, warnings);
    let hardware = Hardware {
        firmware,
        cpu_model,
        memory_backing,
        tpm,
        cdrom,
        on_crash,
        ..Default::default()
    };
    let boot = boot(os, devices, drive, warnings)?;
    // An order that is the usual one need not be said, and is one that hosts of every version have.
    let boot = if boot == hardware.boot_order() { Vec::new() } else { boot };
    Ok(Hardware { boot, ..hardware })
}

/// The firmware that a domain asks for, or names the file of: without secure boot unless it says so.
fn firmware(os: Node<'_, '_>) -> Firmware {
    let loader = child(os, "loader");
    // A loader of type `rom` is a BIOS.
    let is_flash = loader.is_some_and(|it| it.attribute("type") == Some("pflash"));
    if os.attribute("firmware") != Some("efi") && !is_flash {
        return Firmware::Bios;
    }
    let features = child(os, "firmware").into_iter().flat_map(|of| of.children());
    let secure_boot = features
        .filter(|feature| feature.attribute("name") == Some("secure-boot"))
        .any(|feature| feature.attribute("enabled") == Some("yes"));
    let secure_loader = loader.is_some_and(|it| it.attribute("secure") == Some("yes"));
    if secure_boot || secure_loader { Firmware::UefiSecureBoot } else { Firmware::Uefi }
}

/// Where a domain keeps the variables of its firmware.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Variables {
    /// In a raw file of its host.
    File(PathBuf),
    /// Elsewhere, or otherwise: what is said of them.
    Other(String),
    /// It does not say where.
    Unknown,
}

/// Where the variables of the firmware are; none where it has none.
pub fn variables(os: Node<'_, '_>) -> Option<Variables> {
    if !firmware(os).has_variables() {
        return None;
    }
    let Some(nvram) = child(os, "nvram") else { return Some(Variables::Unknown) };
    let kind = nvram.attribute("type").unwrap_or("file");
    if kind != "file" {
        return Some(Variables::Other(format!("are of type '{kind}'")));
    }
    let format = nvram.attribute("format").unwrap_or("raw");
    if format != "raw" {
        return Some(Variables::Other(format!("are of format '{format}'")));
    }
    // In the element itself, or in one of its own since a domain may have them elsewhere than in a file.
    let in_source = child(nvram, "source").and_then(|source| source.attribute("file"));
    let file = in_source.or_else(|| text_of(os, "nvram"));
    Some(file.map_or(Variables::Unknown, |file| Variables::File(file.into())))
}

/// The processor's model, where a VM has it too. None is what the host has.
fn cpu_model(domain: Node<'_, '_>, warnings: &mut Vec<String>) -> Option<String> {
    let cpu = child(domain, "cpu")?;
    for (element, count) in unknown(cpu, &["model", "vendor"]) {
        warnings.push(match element.as_str() {
            "feature" => format!("of the processor: {count} features that it has or lacks"),
            "topology" => "of the processor: how many sockets, cores and threads it has".to_owned(),
            other => format!("of the processor: <{other}>"),
        });
    }
    let model = text_of(cpu, "model");
    match (cpu.attribute("mode").unwrap_or("custom"), model) {
        ("custom", None) | ("host-passthrough", _) => None,
        ("custom", Some(model)) if check_cpu_model(model).is_ok() => Some(model.to_owned()),
        ("maximum", _) => Some("max".to_owned()),
        (mode, model) => {
            let named = model.unwrap_or(mode);
            warnings.push(format!(
                "the model of the processor, {named}: the VM sees what its host has, or its policy's model"
            ));
            None
        }
    }
}

/// What is done when the guest panics.
fn on_crash(domain: Node<'_, '_>, warnings: &mut Vec<String>) -> OnCrash {
    let Some(asked) = text_of(domain, "on_crash") else { return OnCrash::default() };
    let known = OnCrash::NAMES.into_iter().find(|(name, _)| *name == asked);
    known.map_or_else(
        || {
            warnings.push(format!("what is done on a crash, {asked}: the VM is stopped then"));
            OnCrash::default()
        },
        |(_, on_crash)| on_crash,
    )
}

/// What the memory is made of.
fn backing(domain: Node<'_, '_>, warnings: &mut Vec<String>) -> MemoryBacking {
    let huge = child(domain, "memoryBacking").and_then(|backing| child(backing, "hugepages"));
    let Some(huge) = huge else { return MemoryBacking::Pages };
    for page in huge.children().filter(|child| child.has_tag_name("page")) {
        let (size, unit) = (page.attribute("size"), page.attribute("unit").unwrap_or("KiB"));
        if !matches!((size, unit), (Some("2048"), "KiB" | "k") | (Some("2"), "MiB" | "M")) {
            warnings.push(format!(
                "the size of the huge pages, {} {unit}: the VM's are 2 MiB, which the host must have set aside",
                size.unwrap_or_default()
            ));
        }
    }
    MemoryBacking::Hugepages
}

/// Whether it has a TPM that a VM can have too.
fn tpm(devices: Node<'_, '_>, warnings: &mut Vec<String>) -> anyhow::Result<bool> {
    let Some(tpm) = child(devices, "tpm") else { return Ok(false) };
    let instead = "have the guest unseal what it has sealed to it, and remove <tpm>; --tpm gives the VM a TPM 2.0 that is empty";
    let model = tpm.attribute("model").unwrap_or("tpm-tis");
    ensure!(
        ["tpm-crb", "tpm-tis"].contains(&model),
        "its TPM is a {model}, which a VM cannot have: {instead}"
    );
    let backend = child(tpm, "backend").context("its TPM has no backend")?;
    match backend.attribute("type").unwrap_or("passthrough") {
        "emulator" => {}
        "passthrough" => {
            bail!("its TPM is the host's own, which is not passed through to a VM: {instead}")
        }
        other => bail!("its TPM is of type '{other}', which a VM cannot have: {instead}"),
    }
    match backend.attribute("version") {
        Some("2.0") => {}
        // This model has no other version.
        None if model == "tpm-crb" => {}
        Some(other) => bail!("its TPM is one of version {other}, and a VM's is 2.0: {instead}"),
        None => bail!("the version of its TPM is not said (<backend version='2.0'/>): {instead}"),
    }
    if model != "tpm-crb" {
        warnings.push(format!("the model of the TPM, {model}: it will be a tpm-crb"));
    }
    Ok(true)
}

/// The drives for media of this kind, in the order of the domain.
fn media<'a>(devices: Node<'a, 'a>, kind: &str) -> Vec<Node<'a, 'a>> {
    let disks = devices.children().filter(|child| child.has_tag_name("disk"));
    disks.filter(|disk| disk.attribute("device") == Some(kind)).collect()
}

fn target<'a>(drive: Node<'a, 'a>) -> &'a str {
    child(drive, "target").and_then(|target| target.attribute("dev")).unwrap_or_default()
}

/// The file in a CD-ROM drive. A drive with something else in it becomes an empty one.
fn medium(drive: Node<'_, '_>, warnings: &mut Vec<String>) -> Option<PathBuf> {
    let name = target(drive);
    for (element, _) in unknown(drive, &KNOWN_OF_DRIVE) {
        warnings.push(format!("of the cdrom '{name}': <{element}>"));
    }
    let source = child(drive, "source")?;
    let mut left = |what: String| {
        warnings.push(format!(
            "what is in the cdrom '{name}': {what}; the drive is empty, and --cdrom ISO puts a file into it"
        ));
        None
    };
    let kind = drive.attribute("type").unwrap_or("file");
    let Some(file) = source.attribute("file").filter(|_| kind == "file") else {
        return left(format!("it is of type '{kind}'"));
    };
    let format = child(drive, "driver").and_then(|driver| driver.attribute("type"));
    if let Some(format) = format.filter(|format| *format != "raw") {
        return left(format!("it is of format '{format}', and a medium is read as it is"));
    }
    let encrypted = [drive, source].into_iter().any(|at| child(at, "encryption").is_some());
    let part = child(source, "slices").is_some();
    if encrypted || part {
        return left("it is encrypted by QEMU, or a part of a file".to_owned());
    }
    let path = PathBuf::from(file);
    match check_medium(&path) {
        Ok(()) => Some(path),
        Err(what) => left(format!("its path {what}")),
    }
}

/// What it starts from, by kinds of devices: those that have a place in the order, or else those that the system names.
fn boot(
    os: Node<'_, '_>,
    devices: Node<'_, '_>,
    drive: Option<Node<'_, '_>>,
    warnings: &mut Vec<String>,
) -> anyhow::Result<Vec<BootDevice>> {
    let mut places = Vec::new();
    for device in devices.children().filter(Node::is_element) {
        let Some(order) = child(device, "boot").and_then(|boot| boot.attribute("order")) else {
            continue;
        };
        let order: u32 = order
            .parse()
            .with_context(|| format!("the boot order of a device, '{order}', is not a number"))?;
        match kind_of(device, drive) {
            Some(kind) => places.push((order, kind)),
            None => warnings.push(format!(
                "place {order} of the boot order: a VM does not start from such a <{}>",
                device.tag_name().name()
            )),
        }
    }
    places.sort_by_key(|(order, _)| *order);
    let mut kinds: Vec<_> = places.into_iter().map(|(_, kind)| kind).collect();
    if kinds.is_empty() {
        for named in os.children().filter(|child| child.has_tag_name("boot")) {
            match named.attribute("dev").unwrap_or_default() {
                "hd" => kinds.push(BootDevice::Disk),
                "cdrom" if drive.is_some() => kinds.push(BootDevice::Cdrom),
                "network" => kinds.push(BootDevice::Network),
                other => warnings.push(format!("'{other}' of the boot order")),
            }
        }
    }
    // Devices of one kind are tried together.
    kinds.dedup();
    let mut order = Vec::new();
    for kind in &kinds {
        if !order.contains(kind) {
            order.push(*kind);
        }
    }
    if order.len() < kinds.len() {
        let names: Vec<_> = order.iter().map(|kind| kind.name()).collect();
        warnings.push(format!(
            "the boot order of single devices: a VM tries all of a kind together ({})",
            names.join(", ")
        ));
    }
    // That of a libvirt domain that says nothing.
    Ok(if order.is_empty() { vec![BootDevice::Disk] } else { order })
}

fn kind_of(device: Node<'_, '_>, drive: Option<Node<'_, '_>>) -> Option<BootDevice> {
    match (device.tag_name().name(), device.attribute("device").unwrap_or("disk")) {
        ("disk", "disk") => Some(BootDevice::Disk),
        ("disk", "cdrom") if Some(device) == drive => Some(BootDevice::Cdrom),
        ("interface", _) => Some(BootDevice::Network),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use roxmltree::Document;

    use super::*;

    fn read(os: &str, devices: &str) -> (anyhow::Result<Hardware>, String) {
        read_with("", os, devices)
    }

    fn read_with(more: &str, os: &str, devices: &str) -> (anyhow::Result<Hardware>, String) {
        let text = format!("<domain>{more}<os>{os}</os><devices>{devices}</devices></domain>");
        let document = Document::parse(&text).unwrap();
        let domain = document.root_element();
        let mut warnings = Vec::new();
        let (os, devices) = (child(domain, "os").unwrap(), child(domain, "devices").unwrap());
        (machine(domain, os, devices, &mut warnings), warnings.join("\n"))
    }

    const DISK: &str = "<disk type='file' device='disk'><source file='/d'/><target dev='vda'/>";

    #[test]
    fn a_processor_model_comes_along_where_it_has_a_name() {
        let named = |model: &str| Some(model.to_owned());
        for (cpu, model, told) in [
            ("", None, ""),
            ("<cpu mode='host-passthrough' check='none' migratable='on'/>", None, ""),
            ("<cpu mode='maximum'/>", named("max"), ""),
            (
                "<cpu mode='custom' match='exact'><model fallback='forbid'>EPYC-Milan</model><vendor>AMD</vendor></cpu>",
                named("EPYC-Milan"),
                "",
            ),
            ("<cpu><model>Nehalem</model></cpu>", named("Nehalem"), ""),
            ("<cpu><topology sockets='1'/></cpu>", None, "sockets, cores and threads"),
            ("<cpu mode='host-model'/>", None, "the model of the processor, host-model"),
            (
                "<cpu mode='custom'><model>a,b</model></cpu>",
                None,
                "the model of the processor, a,b",
            ),
            (
                "<cpu><model>Nehalem</model><feature name='vmx'/><feature name='x'/></cpu>",
                named("Nehalem"),
                "2 features",
            ),
        ] {
            let (machine, said) = read_with(cpu, "", "");
            assert_eq!(machine.unwrap().cpu_model, model, "{cpu}");
            assert!(said.contains(told) && said.is_empty() == told.is_empty(), "{cpu}: {said}");
        }
    }

    #[test]
    fn huge_pages_come_along_and_other_sizes_are_said() {
        for (inside, expected, told) in [
            ("", MemoryBacking::Pages, ""),
            ("<source type='memfd'/>", MemoryBacking::Pages, ""),
            ("<hugepages/>", MemoryBacking::Hugepages, ""),
            ("<hugepages><page size='2048' unit='KiB'/></hugepages>", MemoryBacking::Hugepages, ""),
            ("<hugepages><page size='2' unit='M'/></hugepages>", MemoryBacking::Hugepages, ""),
            (
                "<hugepages><page size='1' unit='G'/></hugepages>",
                MemoryBacking::Hugepages,
                "huge pages, 1 G: the VM's are 2 MiB",
            ),
        ] {
            let more = format!("<memoryBacking>{inside}</memoryBacking>");
            let (machine, said) = read_with(&more, "", "");
            assert_eq!(machine.unwrap().memory_backing, expected, "{inside}");
            assert!(said.contains(told) && said.is_empty() == told.is_empty(), "{inside}: {said}");
        }
    }

    #[test]
    fn a_tpm_becomes_one_of_the_vm_s_model() {
        for tpm in [
            "<tpm model='tpm-crb'><backend type='emulator' version='2.0'/></tpm>",
            "<tpm model='tpm-tis'><backend type='emulator' version='2.0'><active_pcr_banks/></backend></tpm>",
            "<tpm model='tpm-crb'><backend type='emulator'/></tpm>",
        ] {
            let (machine, said) = read("", tpm);
            assert!(machine.unwrap().tpm, "{tpm}");
            let other = tpm.contains("tis");
            assert_eq!(said.contains("will be a tpm-crb"), other, "{said}");
            assert_eq!(said.is_empty(), !other, "{said}");
        }
        let (machine, said) = read("", "");
        assert!(!machine.unwrap().tpm && said.is_empty(), "{said}");
    }

    #[test]
    fn a_tpm_that_a_vm_cannot_have_is_refused() {
        for (tpm, reason) in [
            (
                "<tpm model='tpm-tis'><backend type='passthrough'><device path='/dev/tpm0'/></backend></tpm>",
                "the host's own",
            ),
            ("<tpm model='tpm-tis'><backend type='emulator' version='1.2'/></tpm>", "version 1.2"),
            ("<tpm><backend type='emulator'/></tpm>", "version of its TPM is not said"),
            ("<tpm model='tpm-crb'><backend type='external'/></tpm>", "'external'"),
            ("<tpm model='tpm-spapr'><backend type='emulator'/></tpm>", "tpm-spapr"),
            ("<tpm model='tpm-crb'/>", "no backend"),
        ] {
            let refusal = format!("{:#}", read("", tpm).0.unwrap_err());
            assert!(refusal.contains(reason), "{tpm}: {refusal}");
        }
    }

    #[test]
    fn the_variables_of_uefi_are_where_the_domain_says() {
        let of = |attributes: &str, inside: &str| {
            let text = format!("<os {attributes}>{inside}</os>");
            let document = Document::parse(&text).unwrap();
            variables(document.root_element())
        };
        let file = Some(Variables::File("/nvram/web_VARS.fd".into()));
        let efi = "firmware='efi'";
        let flash = "<loader type='pflash'>/usr/share/OVMF/OVMF_CODE_4M.fd</loader>";
        let named = "<nvram template='/t.fd'>/nvram/web_VARS.fd</nvram>";
        let source = "<nvram type='file'><source file='/nvram/web_VARS.fd'/></nvram>";
        for (attributes, inside, expected) in [
            ("", named.to_owned(), None),
            ("", flash.to_owned() + named, file.clone()),
            (efi, named.to_owned(), file.clone()),
            (efi, source.to_owned(), file),
            (efi, String::new(), Some(Variables::Unknown)),
            (efi, "<nvram template='/t.fd'/>".to_owned(), Some(Variables::Unknown)),
            (
                efi,
                "<nvram type='network'><source protocol='iscsi'/></nvram>".to_owned(),
                Some(Variables::Other("are of type 'network'".to_owned())),
            ),
            (
                efi,
                named.replace("template=", "format='qcow2' template="),
                Some(Variables::Other("are of format 'qcow2'".to_owned())),
            ),
        ] {
            assert_eq!(of(attributes, &inside), expected, "{attributes} {inside}");
        }
    }

    #[test]
    fn a_drive_comes_with_its_file_or_empty() {
        let drive = |kind: &str, inside: &str| {
            let text =
                format!("<disk type='{kind}' device='cdrom'>{inside}<target dev='sda'/></disk>");
            let (machine, said) = read("", &text);
            (machine.unwrap().cdrom.unwrap().medium, said)
        };
        let iso = Some(PathBuf::from("/srv/a.iso"));
        let raw = "<driver name='qemu' type='raw'/><source file='/srv/a.iso'/><readonly/>";
        assert_eq!(drive("file", raw), (iso.clone(), String::new()));
        assert_eq!(drive("file", "<readonly/>"), (None, String::new()));
        for (kind, inside, told) in [
            ("block", "<source dev='/dev/sr0'/>", "type 'block'"),
            ("network", "<source protocol='http'/>", "type 'network'"),
            ("file", "<driver type='qcow2'/><source file='/a'/>", "format 'qcow2'"),
            ("file", "<source file='a.iso'/>", "not absolute"),
            ("file", "<source file='/a'><encryption/></source>", "encrypted"),
            ("file", "<source file='/a'><slices/></source>", "a part of a file"),
        ] {
            let (medium, said) = drive(kind, inside);
            assert!(medium.is_none() && said.contains(told), "{inside}: {said}");
            assert!(said.contains("the drive is empty"), "{said}");
        }
        let (medium, said) = drive("file", "<source file='/srv/a.iso'/><iotune/>");
        assert!(medium == iso && said.contains("of the cdrom 'sda': <iotune>"), "{said}");
        let two = "<disk device='cdrom'><target dev='sda'/></disk><disk device='cdrom'><target dev='sdb'/></disk>
                   <disk device='floppy'><target dev='fda'/></disk>";
        let (machine, said) = read("", two);
        assert!(machine.unwrap().cdrom.is_some());
        assert!(said.contains("'sdb': a VM has one drive") && said.contains("floppy 'fda'"));
    }

    #[test]
    fn the_boot_order_is_that_of_the_devices_or_of_the_system() {
        use BootDevice::{Cdrom as Drive, Disk, Network};
        let drive = |order: &str| {
            format!("<disk type='file' device='cdrom'><target dev='sda'/>{order}</disk>")
        };
        let disk = |order: u32| format!("{DISK}<boot order='{order}'/></disk>");
        let card = "<interface type='user'><boot order='3'/></interface>";
        let bare = drive("");
        let (second, third) = (drive("<boot order='2'/>"), drive("<boot order='4'/>"));
        for (os, devices, order, told) in [
            ("", DISK.to_owned() + "</disk>", vec![], ""),
            ("<boot dev='hd'/>", disk(1), vec![], ""),
            ("<boot dev='hd'/><boot dev='cdrom'/>", bare.clone(), vec![], ""),
            ("<boot dev='hd'/>", bare.clone(), vec![Disk], ""),
            ("<boot dev='cdrom'/><boot dev='hd'/>", bare.clone(), vec![Drive, Disk], ""),
            ("<boot dev='network'/><boot dev='fd'/>", bare.clone(), vec![Network], "'fd'"),
            ("<boot dev='cdrom'/>", String::new(), vec![], "'cdrom' of the boot order"),
            ("", disk(1) + &second, vec![], ""),
            ("", disk(5) + &third + card, vec![Network, Drive, Disk], ""),
            (
                "",
                disk(1) + &second + &disk(3),
                vec![],
                "tries all of a kind together (disk, cdrom)",
            ),
            ("", disk(1) + "<hostdev><boot order='2'/></hostdev>", vec![], "such a <hostdev>"),
        ] {
            let (machine, said) = read(os, &devices);
            assert_eq!(machine.unwrap().boot, order, "{os} {devices}");
            assert!(said.contains(told) && said.is_empty() == told.is_empty(), "{told}: {said}");
        }
        let bad = disk(1).replace("'1'", "'first'");
        assert!(format!("{:#}", read("", &bad).0.unwrap_err()).contains("'first'"));
    }
}
