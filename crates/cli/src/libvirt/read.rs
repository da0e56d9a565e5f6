//! Reads from a libvirt domain (<https://libvirt.org/formatdomain.html>) what becomes a VM: name, description, processors,
//! memory, disks with their formats, network cards and machine. The rest is reported as not imported; a domain that would
//! lose data is refused.

use std::fs::File;
use std::io::Read;
use std::path::{Path, PathBuf};

use anyhow::{Context, bail, ensure};
use roxmltree::{Document, Node, ParsingOptions};
use vmseal_api::hardware::{HUGE_PAGE, Hardware, MemoryBacking};
use vmseal_api::limits::DESCRIPTION_MAX;
use vmseal_api::request::CreateNic;
use vmseal_api::transfer::ImageFormat;

use super::images::{self, Images};
use super::interfaces;
use super::machine::{Variables, machine, variables};
use super::networks::{self, Networks};
use super::node::{child, text_of, unknown};
use super::tpm_state::{TpmState, tpm_state};

/// The longest domain, in bytes; libvirt's own have some ten thousand.
const XML_MAX: u64 = 1024 * 1024;

/// The most nodes of a domain.
const NODES_MAX: u32 = 100_000;

/// The unit of a VM's memory, in bytes.
const MEMORY_UNIT: u64 = 1 << 20;

/// The port of the guest's agent, which every VM has.
const GUEST_AGENT: &str = "org.qemu.guest_agent.0";

/// The parts of a VM, and what is not imported.
#[derive(Debug, PartialEq, Eq)]
pub struct Domain {
    /// The domain's name.
    pub name: String,
    /// What it is for: its title and its description.
    pub description: String,
    /// Virtual processors.
    pub vcpus: u32,
    /// Memory, in bytes, rounded up to a whole MiB, or to whole huge pages where it is of these.
    pub memory: u64,
    /// The disks, in boot order.
    pub disks: Vec<Disk>,
    /// The network cards.
    pub nics: Vec<CreateNic>,
    /// Firmware, processor model, kind of memory, TPM, CD-ROM drive, and what it starts from.
    pub hardware: Hardware,
    /// Where the variables of its firmware are; none where that has none.
    pub variables: Option<Variables>,
    /// Where what its TPM keeps is; none where it has none.
    pub tpm_state: Option<TpmState>,
    /// What is not imported.
    pub warnings: Vec<String>,
}

/// A disk of a domain.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Disk {
    /// The target's name (`vda`).
    pub name: String,
    /// The image.
    pub image: PathBuf,
    /// The image's format.
    pub format: ImageFormat,
    boot: Option<u32>,
}

/// Elements of a domain that are read, or that a VM has its own of.
const KNOWN: [&str; 21] = [
    "name",
    "uuid",
    "title",
    "description",
    "memory",
    "currentMemory",
    "vcpu",
    "os",
    "devices",
    "on_poweroff",
    "on_reboot",
    "on_crash",
    "pm",
    "clock",
    "features",
    "resource",
    "genid",
    "seclabel",
    "memoryBacking",
    "cpu",
    "maxMemory",
];

/// Devices that are read, or that a VM has its own of, or needs none of.
const OWN_DEVICES: [&str; 12] = [
    "disk",
    "tpm",
    "interface",
    "emulator",
    "controller",
    "input",
    "memballoon",
    "rng",
    "serial",
    "console",
    "channel",
    "panic",
];

/// Elements of a disk that are read or refused, or that a VM has its own of.
const KNOWN_OF_DISK: [&str; 10] = [
    "driver",
    "auth",
    "source",
    "target",
    "backingStore",
    "mirror",
    "encryption",
    "boot",
    "alias",
    "address",
];

/// The same of its source.
const KNOWN_OF_SOURCE: [&str; 3] = ["encryption", "seclabel", "slices"];

/// Elements of a disk that are not imported, and what that means.
const LEFT_OF_DISK: [(&str, &str); 7] = [
    ("readonly", "it was read-only and will be writable"),
    ("shareable", "it was shared with other domains"),
    ("transient", "its changes were discarded at every stop, and will be kept"),
    ("iotune", "its limits"),
    ("serial", "its serial number: the guest will not find the disk by it (/dev/disk/by-id)"),
    ("wwn", "its WWN: the guest will not find the disk by it (/dev/disk/by-id)"),
    ("blockio", "the sizes of blocks that it reported"),
];

/// The size of a disk's logical block as every guest of vmseal sees it, in bytes.
const LOGICAL_BLOCK: &str = "512";

/// Reads a domain from a file; its cards are connected as `mapped` says, and `given` is in place of images of its disks.
pub fn read(file: &Path, mapped: &Networks, given: &Images) -> anyhow::Result<Domain> {
    parse(&text_in(file)?, mapped, given)
        .with_context(|| format!("--libvirt: the domain in {} cannot be imported", file.display()))
}

/// The names of the networks on which cards of the domain in a file are.
pub fn networks_in(file: &Path) -> anyhow::Result<Vec<String>> {
    let text = text_in(file)?;
    let document = document(&text)?;
    let devices = child(document.root_element(), "devices");
    Ok(devices.map(networks::networks_of).unwrap_or_default())
}

fn text_in(file: &Path) -> anyhow::Result<String> {
    let mut text = String::new();
    File::open(file)
        .and_then(|open| open.take(XML_MAX + 1).read_to_string(&mut text))
        .with_context(|| format!("--libvirt: cannot read {}", file.display()))?;
    ensure!(text.len() as u64 <= XML_MAX, "{} is longer than {XML_MAX} bytes", file.display());
    Ok(text)
}

fn document(text: &str) -> anyhow::Result<Document<'_>> {
    let options = ParsingOptions { nodes_limit: NODES_MAX, ..ParsingOptions::default() };
    Document::parse_with_options(text, options).context("it is not XML")
}

fn parse(text: &str, mapped: &Networks, given: &Images) -> anyhow::Result<Domain> {
    let document = document(text)?;
    let domain = document.root_element();
    ensure!(domain.tag_name().name() == "domain", "it is not a libvirt domain");
    let mut warnings = Vec::new();
    let os = check_system(domain, &mut warnings)?;
    let name = text_of(domain, "name").context("it has no name")?.to_owned();
    let description = description(domain, &mut warnings);
    let vcpus = text_of(domain, "vcpu").unwrap_or("1");
    let vcpus =
        vcpus.parse().with_context(|| format!("'{vcpus}' is not a number of processors"))?;
    let memory = memory(child(domain, "memory").context("it names no memory")?)?;
    let devices = child(domain, "devices").context("it has no devices")?;
    let disks = disks(devices, given, &mut warnings)?;
    let hardware = machine(domain, os, devices, &mut warnings)?;
    let memory = match hardware.memory_backing {
        MemoryBacking::Pages => Some(memory),
        MemoryBacking::Hugepages => memory.checked_next_multiple_of(HUGE_PAGE),
    };
    let memory = memory.context("it has too much memory")?;
    let nics = interfaces::nics(devices, mapped, &mut warnings)?;
    left_behind(domain, devices, &mut warnings);
    let (variables, tpm_state) = (variables(os), tpm_state(domain, devices));
    Ok(Domain {
        name,
        description,
        vcpus,
        memory,
        disks,
        nics,
        hardware,
        variables,
        tpm_state,
        warnings,
    })
}

/// The title, if there is one, and the description; what a VM's has no room for is reported.
fn description(domain: Node<'_, '_>, warnings: &mut Vec<String>) -> String {
    let (title, text) = (text_of(domain, "title"), text_of(domain, "description"));
    let whole = [title, text].into_iter().flatten().collect::<Vec<_>>().join(": ");
    if whole.len() <= DESCRIPTION_MAX {
        return whole;
    }
    if let (Some(title), Some(_)) = (title, text) {
        warnings.push(format!(
            "the title, '{title}': with the description it has more than {DESCRIPTION_MAX} bytes, the most of a VM's description"
        ));
    }
    let text = text.or(title).unwrap_or_default();
    if text.len() <= DESCRIPTION_MAX {
        return text.to_owned();
    }
    let end = (0..=DESCRIPTION_MAX).rev().find(|at| text.is_char_boundary(*at)).unwrap_or_default();
    warnings.push(format!(
        "the end of the description, after {end} bytes: a VM's has at most {DESCRIPTION_MAX}"
    ));
    text.get(..end).unwrap_or_default().to_owned()
}

/// Checks that such a system can run.
fn check_system<'a>(
    domain: Node<'a, 'a>,
    warnings: &mut Vec<String>,
) -> anyhow::Result<Node<'a, 'a>> {
    let os = child(domain, "os").context("it names no operating system")?;
    let kind = child(os, "type").context("it names no type of operating system")?;
    let name = kind.text().unwrap_or_default().trim();
    ensure!(name == "hvm", "it is of type '{name}'; only fully virtualized ones (hvm) can run");
    if let Some(arch) = kind.attribute("arch") {
        ensure!(arch == "x86_64", "it is for {arch} processors; only x86_64 can run");
    }
    let devices = child(domain, "devices");
    let has = |device| devices.is_some_and(|devices| child(devices, device).is_some());
    ensure!(
        !has("nvram") && !has("shmem"),
        "it has memory devices (nvram, shmem), whose content is not imported: remove them first"
    );
    if child(os, "kernel").is_some() {
        warnings.push("a kernel outside of the disks: a VM boots from its disks".to_owned());
    }
    Ok(os)
}

/// An amount of memory (`<memory unit='KiB'>`), in bytes.
fn memory(node: Node<'_, '_>) -> anyhow::Result<u64> {
    let text = node.text().unwrap_or_default().trim();
    let amount: u64 =
        text.parse().with_context(|| format!("'{text}' is not an amount of memory"))?;
    let unit = match node.attribute("unit").unwrap_or("KiB") {
        "b" | "bytes" => 1,
        "KB" => 1000,
        "k" | "KiB" => 1 << 10,
        "MB" => 1_000_000,
        "M" | "MiB" => 1 << 20,
        "GB" => 1_000_000_000,
        "G" | "GiB" => 1 << 30,
        "TB" => 1_000_000_000_000,
        "T" | "TiB" => 1 << 40,
        other => bail!("'{other}' is not a unit of memory"),
    };
    let bytes = amount.checked_mul(unit).and_then(|it| it.checked_next_multiple_of(MEMORY_UNIT));
    bytes.with_context(|| format!("{amount} is too much memory"))
}

/// The disks; those with a place in the boot order first.
fn disks(
    devices: Node<'_, '_>,
    given: &Images,
    warnings: &mut Vec<String>,
) -> anyhow::Result<Vec<Disk>> {
    given.check(devices)?;
    let mut found = Vec::new();
    for node in devices.children().filter(|child| child.has_tag_name("disk")) {
        let target = child(node, "target").and_then(|target| target.attribute("dev"));
        let target = target.context("a disk has no target")?;
        match node.attribute("device").unwrap_or("disk") {
            "disk" => {
                let disk = disk(node, target, given.get(target), warnings);
                found.push(disk.with_context(|| format!("disk '{target}'"))?);
            }
            // Of the machine: no disks of the VM.
            "cdrom" | "floppy" => {}
            other => bail!("disk '{target}' is a {other}, which cannot be imported"),
        }
    }
    ensure!(!found.is_empty(), "it has no disk");
    // Stable: the others stay in the order of the domain.
    found.sort_by_key(|disk| disk.boot.unwrap_or(u32::MAX));
    Ok(found)
}

/// A disk, with its own image or the one that is given in its place.
fn disk(
    node: Node<'_, '_>,
    name: &str,
    given: Option<&Path>,
    warnings: &mut Vec<String>,
) -> anyhow::Result<Disk> {
    let source = child(node, "source").context("it has no source")?;
    ensure!(
        child(node, "mirror").is_none(),
        "it is being copied by libvirt: end that first (virsh blockjob)"
    );
    let image = match given {
        Some(file) => file.to_owned(),
        None => images::in_domain(node, source, name)?,
    };
    let format = child(node, "driver").and_then(|driver| driver.attribute("type"));
    let format = format.context(
        "it names no format (<driver type='raw'/> or 'qcow2'), and formats are not detected",
    )?;
    let format = ImageFormat::ALL.into_iter().find(|known| known.name() == format).with_context(
        || format!("its format is '{format}'; raw and qcow2 can be imported: convert it first (qemu-img convert)"),
    )?;
    let block = child(node, "blockio").and_then(|blockio| blockio.attribute("logical_block_size"));
    ensure!(
        block.is_none_or(|block| block == LOGICAL_BLOCK),
        "it has logical blocks of {} bytes, and its VM would see {LOGICAL_BLOCK}: the guest would not find its partition table",
        block.unwrap_or_default()
    );
    left_of_disk(node, given.is_none().then_some(source), name, warnings);
    let boot = child(node, "boot").and_then(|boot| boot.attribute("order"));
    let boot = boot.map(str::parse).transpose().context("its boot order is not a number")?;
    Ok(Disk { name: name.to_owned(), image, format, boot })
}

/// Reports what of a disk is not imported, and of the source that its image comes from.
fn left_of_disk(
    node: Node<'_, '_>,
    source: Option<Node<'_, '_>>,
    name: &str,
    warnings: &mut Vec<String>,
) {
    let bus = child(node, "target").and_then(|target| target.attribute("bus"));
    if let Some(bus) = bus.filter(|bus| *bus != "virtio") {
        warnings.push(format!(
            "of disk '{name}': its bus, {bus}: it will be virtio, for which the guest needs a driver, and where the disk has another name"
        ));
    }
    for (element, _) in unknown(node, &KNOWN_OF_DISK) {
        let known = LEFT_OF_DISK.iter().find(|(left, _)| *left == element);
        let what = known.map_or_else(|| format!("<{element}>"), |(_, what)| (*what).to_owned());
        warnings.push(format!("of disk '{name}': {what}"));
    }
    let of_source = source.map(|source| unknown(source, &KNOWN_OF_SOURCE)).unwrap_or_default();
    for (element, _) in of_source {
        warnings.push(format!("of disk '{name}': <{element}> of its source"));
    }
}

/// Reports what is not imported.
fn left_behind(domain: Node<'_, '_>, devices: Node<'_, '_>, warnings: &mut Vec<String>) {
    for (device, count) in unknown(devices, &OWN_DEVICES) {
        warnings.push(match device.as_str() {
            "hostdev" => format!("{count} devices of the host that were passed through"),
            "filesystem" => format!("{count} shared directories of the host"),
            "graphics" => "graphics: a VM's screen is shown by VNC alone, without a port or a password of its own (vmseal vm vnc)".to_owned(),
            "video" => "video: a VM has a video card of its own, a VGA".to_owned(),
            "watchdog" => "the watchdog: nothing restarts a guest that hangs".to_owned(),
            other => format!("{count} devices <{other}>"),
        });
    }
    for channel in devices.children().filter(|child| child.has_tag_name("channel")) {
        match child(channel, "target").and_then(|target| target.attribute("name")) {
            Some(GUEST_AGENT) => {}
            Some(name) => warnings.push(format!("the channel '{name}'")),
            None => warnings.push("a channel without a name".to_owned()),
        }
    }
    for (element, _) in unknown(domain, &KNOWN) {
        warnings.push(match element.as_str() {
            "metadata" => "<metadata>, what other programs keep there".to_owned(),
            other => format!("the settings <{other}>"),
        });
    }
    let clock = child(domain, "clock").and_then(|clock| clock.attribute("offset"));
    if let Some(offset) = clock.filter(|offset| *offset != "utc") {
        warnings.push(format!("the clock's offset, {offset}: a VM's clock shows UTC"));
    }
}

#[cfg(test)]
mod tests {
    use vmseal_api::boot::{BootDevice, Cdrom};
    use vmseal_api::hardware::Firmware;

    use super::*;

    /// A domain as virt-install makes it, shortened.
    const DOMAIN: &str = include_str!("../../tests/libvirt/web.xml");

    fn parse(text: &str) -> anyhow::Result<Domain> {
        super::parse(text, &Networks::default(), &Images::default())
    }

    fn changed(from: &str, to: &str) -> String {
        assert!(DOMAIN.contains(from), "{from}");
        format!("{:#}", parse(&DOMAIN.replacen(from, to, 1)).unwrap_err())
    }

    #[test]
    fn a_domain_becomes_a_vm_and_the_rest_is_reported() {
        let domain = parse(DOMAIN).unwrap();
        assert_eq!((domain.name.as_str(), domain.vcpus, domain.memory), ("web", 2, 2 << 30));
        let disk = |name: &str, image: &str, format, boot| Disk {
            name: name.to_owned(),
            image: image.into(),
            format,
            boot,
        };
        let system = disk("vdb", "/var/lib/libvirt/images/web.qcow2", ImageFormat::Qcow2, Some(1));
        let data = disk("vda", "/srv/data.img", ImageFormat::Raw, None);
        assert_eq!(domain.disks, [system, data], "not in boot order");
        let nics: Vec<_> = domain.nics.iter().map(|nic| nic.backend.to_string()).collect();
        assert_eq!(nics, ["bridge br0"]);
        let said = domain.warnings.join("\n");
        for left in [
            "--network default:bridge=NAME",
            "its model, none",
            "1 devices of the host",
            "<cputune>",
            "read-only",
            "(vmseal vm vnc)",
            "a VGA",
            "<metadata>",
            "the channel 'com.redhat.spice.0'",
        ] {
            assert!(said.contains(left), "{left}: {said}");
        }
        assert_eq!(domain.description, "Web server: Serves the shop & its <customers>");
        // Every VM has the port of the guest's agent.
        assert!(!said.contains("guest_agent") && !said.contains("description"), "{said}");
        let machine = Hardware {
            firmware: Firmware::Uefi,
            tpm: true,
            cdrom: Some(Cdrom { medium: Some("/srv/install.iso".into()) }),
            boot: vec![BootDevice::Disk, BootDevice::Network],
            ..Hardware::default()
        };
        assert_eq!((domain.hardware, domain.variables), (machine, Some(Variables::Unknown)));
        let Some(TpmState::File(state)) = domain.tpm_state else { panic!("its TPM keeps nothing") };
        assert!(state.ends_with("tpm2/tpm2-00.permall"), "{}", state.display());
        // Elements of every domain are not reported.
        assert!(!said.contains("memballoon") && !said.contains("<uuid>"), "{said}");
    }

    #[test]
    fn a_description_is_cut_where_a_vm_has_no_room_for_it() {
        let read = |title: &str, text: &str| {
            let text = format!("<domain>{title}<description>{text}</description></domain>");
            let document = Document::parse(&text).unwrap();
            let mut warnings = Vec::new();
            let read = description(document.root_element(), &mut warnings);
            (read, warnings.join("\n"))
        };
        assert_eq!(read("", ""), (String::new(), String::new()));
        assert_eq!(read("<title>Web</title>", ""), ("Web".to_owned(), String::new()));
        assert_eq!(read("", "\n shop\n "), ("shop".to_owned(), String::new()));
        let long = "x".repeat(DESCRIPTION_MAX - 5);
        let (whole, said) = read("<title>Web</title>", &long);
        assert_eq!((whole.len(), said.as_str()), (DESCRIPTION_MAX, ""));
        let (alone, said) = read("<title>Webs</title>", &long);
        assert!(alone == long && said.contains("the title, 'Webs'"), "{said}");
        // Two bytes each: the last one does not fit.
        let (cut, said) = read("", &("x".to_owned() + &"ä".repeat(DESCRIPTION_MAX)));
        assert!(cut.len() == DESCRIPTION_MAX - 1 && cut.ends_with('ä'), "{}", cut.len());
        assert!(said.contains("after 4095 bytes") && !said.contains("title"), "{said}");
    }

    #[test]
    fn a_network_that_was_said_to_be_a_bridge_is_one() {
        let option = ["default:bridge=virbr0".to_owned()];
        let parse = |mapped: &Networks| super::parse(DOMAIN, mapped, &Images::default());
        let domain = parse(&Networks::parse(&option, &[]).unwrap()).unwrap();
        let nics: Vec<_> = domain.nics.iter().map(|nic| nic.backend.to_string()).collect();
        assert_eq!(nics, ["bridge virbr0", "bridge br0"]);
        assert!(!domain.warnings.join("\n").contains("'default'"), "{:?}", domain.warnings);
        let option = ["lab:user".to_owned()];
        let refused = parse(&Networks::parse(&option, &[]).unwrap()).unwrap_err();
        assert!(refused.to_string().contains("no network 'lab'"), "{refused}");
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), DOMAIN).unwrap();
        assert_eq!(networks_in(file.path()).unwrap(), ["default"]);
    }

    #[test]
    fn memory_of_huge_pages_is_whole_ones() {
        let memory = |backing: &str| {
            let odd = "<memory unit='MiB'>2049</memory>".to_owned() + backing;
            let text = DOMAIN.replacen("<memory unit='KiB'>2097152</memory>", &odd, 1);
            parse(&text).unwrap().memory
        };
        assert_eq!(memory(""), 2049 << 20);
        assert_eq!(memory("<memoryBacking><hugepages/></memoryBacking>"), 2050 << 20);
    }

    #[test]
    fn every_part_of_a_disk_that_is_not_imported_is_reported() {
        let source = "<source file='/srv/data.img'/>";
        assert!(DOMAIN.contains(source) && DOMAIN.contains("<devices>"));
        let said = |of_disk: &str, of_devices: &str| {
            let text = DOMAIN.replacen(source, of_disk, 1);
            let text = text.replacen("<devices>", of_devices, 1);
            parse(&text).unwrap().warnings.join("\n")
        };
        let usual = said(source, "<devices>");
        for (of_disk, told) in [
            ("<source file='/x'/><serial>S1</serial>", "serial number"),
            ("<source file='/x'/><wwn>5000c50015ea71aa</wwn>", "WWN"),
            ("<source file='/x'/><blockio physical_block_size='4096'/>", "sizes of blocks"),
            ("<source file='/x'/><geometry cyls='1'/>", "<geometry>"),
            ("<source file='/x'><reservations managed='yes'/></source>", "<reservations> of its"),
        ] {
            let said = said(of_disk, "<devices>");
            assert!(said.contains(told) && !usual.contains(told), "{told}: {said}");
        }
        let other = said(source, "<devices><watchdog model='i6300esb'/>");
        assert!(other.contains("the watchdog") && !usual.contains("watchdog"), "{other}");
        let local = parse(&DOMAIN.replace("offset='utc'", "offset='localtime'")).unwrap();
        let clock = local.warnings.join("\n");
        assert!(clock.contains("clock's offset, localtime") && !usual.contains("clock"), "{clock}");
        let sata = parse(&DOMAIN.replace("bus='virtio'", "bus='sata'")).unwrap();
        assert!(sata.warnings.join("\n").contains("its bus, sata"), "{:?}", sata.warnings);
    }

    #[test]
    fn a_file_that_is_given_is_in_place_of_an_image_that_is_in_none() {
        let rbd = "<auth username='web'/><source protocol='rbd' name='vms/data'><host name='ceph1'/></source>";
        let text = DOMAIN
            .replacen("type='file' device='disk'", "type='network' device='disk'", 1)
            .replace("<source file='/srv/data.img'/>", rbd);
        assert!(text.contains("'network' device") && text.contains(rbd), "{text}");
        let refused = format!("{:#}", parse(&text).unwrap_err());
        let told = "(rbd --id web -m ceph1 export vms/data FILE)";
        assert!(refused.contains("disk 'vda'") && refused.contains(told), "{refused}");
        let given = Images::parse(&["vda:/srv/copy.raw".to_owned()]).unwrap();
        let domain = super::parse(&text, &Networks::default(), &given).unwrap();
        let data = domain.disks.iter().find(|disk| disk.name == "vda").unwrap();
        assert_eq!(data.image, PathBuf::from("/srv/copy.raw"));
        assert_eq!(data.format, ImageFormat::Raw);
        // Nothing of a source is left behind that is not looked at.
        let said = domain.warnings.join("\n");
        assert!(!said.contains("of its source") && !said.contains("<auth>"), "{said}");
    }

    #[test]
    fn domains_that_would_lose_data_or_cannot_run_are_refused() {
        let source = "<source file='/srv/data.img'/>";
        for (from, to, reason) in [
            ("type='raw'", "type='vmdk'", "'vmdk'"),
            ("<driver name='qemu' type='raw'/>", "", "names no format"),
            ("type='file' device='disk'", "type='block' device='disk'", "type 'block'"),
            ("type='file' device='disk'", "type='network' device='disk'", "type 'network'"),
            (source, "<source dev='/dev/sdb'/>", "names no file"),
            (
                source,
                "<source file='/x'><encryption format='luks'/></source>",
                "encrypted by libvirt",
            ),
            (source, "<source file='/x'/><mirror type='file'/>", "blockjob"),
            (
                source,
                "<source file='/x'/><backingStore type='file'><source file='/b'/></backingStore>",
                "snapshot over",
            ),
            (
                source,
                "<source file='/x'><slices><slice type='storage' offset='1' size='2'/></slices></source>",
                "<slices>",
            ),
            (source, "<source file='/x'/><blockio logical_block_size='4096'/>", "of 4096 bytes"),
            ("device='disk'", "device='lun'", "is a lun"),
            ("version='2.0'", "version='1.2'", "version 1.2"),
            ("arch='x86_64'", "arch='aarch64'", "aarch64"),
            (">hvm<", ">exe<", "'exe'"),
            ("unit='KiB'>2097152", "unit='furlong'>2097152", "'furlong'"),
            (">2097152<", ">99999999999999999<", "too much"),
            ("<vcpu placement='static'>2<", "<vcpu placement='static'>two<", "'two'"),
            (
                "<domain type='kvm'>",
                "<!DOCTYPE domain [<!ENTITY a 'b'>]><domain type='kvm'>",
                "not XML",
            ),
            ("</domain>", "", "not XML"),
        ] {
            let refusal = changed(from, to);
            assert!(refusal.contains(reason), "{to}: {refusal}");
        }
        let network = "<network><name>x</name></network>";
        assert!(format!("{:#}", parse(network).unwrap_err()).contains("not a libvirt domain"));
    }
}
