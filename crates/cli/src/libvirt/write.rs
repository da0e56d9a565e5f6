//! A VM as a libvirt domain. The disks of one that runs are the sockets where QEMU and its running filter meet; those of one that
//! moves to libvirt are files, which exports of its disks write.

use std::fmt::Write;
use std::path::{Path, PathBuf};

use vmseal_api::boot::{BootDevice, Cdrom};
use vmseal_api::hardware::{Firmware, HUGE_PAGE, MemoryBacking};
use vmseal_api::host::{AcceleratorKind, Attachment, DiskRole, HostDescription};
use vmseal_api::model::{Disk, Nic, Vm};
use vmseal_api::nic::{NicBackend, NicLink, PortForward};

use super::tpm_state::{FILE as TPM_STATE, file_of};
use super::{forwards, shell};

/// The comment above the domain: what it can be used for.
const NOTE: &str = "
  What vmseal runs, as a libvirt domain. The disks' sockets are where its QEMU and the running
  vmseal-filter meet. libvirt cannot start it as it is: vmseal's QEMU listens there and the agent connects
  the filter, so that a guest outlives its filter, where libvirt's would connect; a filter serves one QEMU
  at a time; and the sockets go when the VM stops. A TPM that libvirt makes is empty: what the VM's own
  keeps is encrypted, and opens with the VM's key alone.
";

/// The comment above a domain whose disks are in files. XML allows no two dashes in it.
const NOTE_OF_FILES: &str = "
  A VM of vmseal, as a libvirt domain. Its disks and the variables of its firmware are in files that
  `vmseal disk export` writes, in the clear, while the VM is off. What its TPM keeps is exported, too, and
  put where libvirt has it, before the domain starts for the first time. Start one of both alone, here or
  there: they have the same network addresses, and the same TPM.
";

/// Where libvirt has images, unless one says otherwise.
const IMAGES: &str = "/var/lib/libvirt/images";

/// Where libvirt has the variables of UEFI, unless one says otherwise.
const NVRAM: &str = "/var/lib/libvirt/qemu/nvram";

/// The files of a VM that moves to libvirt.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Files {
    images: PathBuf,
    nvram: PathBuf,
    /// Where what a TPM keeps is exported to; none is where libvirt has it.
    tpm: Option<PathBuf>,
}

impl Files {
    /// All in one directory; none is those where libvirt has them. The domain has what its TPM keeps where libvirt has it in any
    /// case: earlier versions look nowhere else.
    pub fn within(directory: Option<&Path>) -> Self {
        let of = |usual: &str| directory.map_or_else(|| usual.into(), Path::to_owned);
        Self { images: of(IMAGES), nvram: of(NVRAM), tpm: directory.map(Path::to_owned) }
    }

    /// That of a disk that the guest sees.
    fn image(&self, vm: &Vm, disk: &Disk) -> PathBuf {
        self.images.join(format!("{}-{}.qcow2", vm.name, disk.name))
    }

    /// That of the firmware's variables.
    fn variables(&self, vm: &Vm) -> PathBuf {
        self.nvram.join(format!("{}_VARS.fd", vm.name))
    }

    /// That with what the TPM keeps, as it is exported.
    fn tpm_state(&self, vm: &Vm) -> PathBuf {
        match &self.tpm {
            Some(directory) => directory.join(format!("{}-{TPM_STATE}", vm.name)),
            None => file_of(&vm.id.to_string()),
        }
    }

    /// The command that puts what the TPM keeps from where it is exported to where libvirt has it, for a shell; none where that is one
    /// place, and where there is no TPM.
    pub fn placing_of_tpm(&self, vm: &Vm) -> Option<String> {
        let (exported, wanted) = (self.tpm_state(vm), file_of(&vm.id.to_string()));
        let is_elsewhere = vm.hardware.tpm && exported != wanted;
        is_elsewhere
            .then(|| format!("install -D -m 600 {} {}", as_word(&exported), as_word(&wanted)))
    }

    /// The commands that write them, for a shell.
    pub fn exports(&self, vm: &Vm) -> Vec<String> {
        let export = |disk: &Disk| {
            let (format, to) = match disk.role {
                DiskRole::Data | DiskRole::CloudInit => ("qcow2", self.image(vm, disk)),
                DiskRole::UefiVariables => ("raw", self.variables(vm)),
                DiskRole::Tpm => ("raw", self.tpm_state(vm)),
            };
            let (vm, disk, to) = (&vm.name, &disk.name, as_word(&to));
            format!("vmseal disk export {vm} {disk} --format {format} --plaintext --to {to}")
        };
        vm.disks.iter().map(export).collect()
    }
}

/// A path as one word of a command for a shell.
fn as_word(path: &Path) -> String {
    shell::word(&path.display().to_string())
}

/// Where the disks of a domain are.
#[derive(Clone, Copy)]
enum Place<'a> {
    /// In the sockets of the VM's running filter, in this directory.
    Sockets(&'a str),
    Files(&'a Files),
}

/// The domain of a VM that runs on the described host.
pub fn domain(vm: &Vm, host: &HostDescription) -> String {
    written(vm, host.accelerator.kind, Place::Sockets(&host.run_dir))
}

/// The domain of a VM whose disks are in files.
pub fn domain_of_files(vm: &Vm, accelerator: AcceleratorKind, files: &Files) -> String {
    written(vm, accelerator, Place::Files(files))
}

fn written(vm: &Vm, accelerator: AcceleratorKind, place: Place<'_>) -> String {
    let (kind, usual) = match accelerator {
        AcceleratorKind::Kvm => ("kvm", "host"),
        // Emulation runs anywhere.
        AcceleratorKind::Tcg | AcceleratorKind::Unknown => ("qemu", "max"),
    };
    let note = match place {
        Place::Sockets(_) => NOTE,
        Place::Files(_) => NOTE_OF_FILES,
    };
    let mut xml = format!("<!--{note}-->\n");
    let mut line = |text: String| {
        // Writing to a string cannot fail.
        let _ = writeln!(xml, "{text}");
    };
    line(format!("<domain type='{kind}'>"));
    line(format!("  <name>{}</name>", escaped(&vm.name)));
    line(format!("  <uuid>{}</uuid>", vm.id));
    if !vm.description.is_empty() {
        line(format!("  <description>{}</description>", escaped(&vm.description)));
    }
    line(format!("  <memory unit='b'>{}</memory>", vm.memory));
    memory_backing(vm, place).into_iter().for_each(&mut line);
    line(format!("  <vcpu>{}</vcpu>", vm.vcpus));
    system(vm, place).into_iter().for_each(&mut line);
    line(cpu(vm.hardware.cpu_model.as_deref().unwrap_or(usual)));
    line("  <clock offset='utc'/>".to_owned());
    line(format!("  <on_crash>{}</on_crash>", vm.hardware.on_crash.name()));
    line("  <devices>".to_owned());
    devices(vm, place).into_iter().for_each(&mut line);
    line("  </devices>".to_owned());
    line("</domain>".to_owned());
    xml
}

/// What the memory is made of: filters map it.
fn memory_backing(vm: &Vm, place: Place<'_>) -> Vec<String> {
    let mut inside = Vec::new();
    if vm.hardware.memory_backing == MemoryBacking::Hugepages {
        let (size, unit) = (HUGE_PAGE >> 10, "KiB");
        inside.push(format!("    <hugepages><page size='{size}' unit='{unit}'/></hugepages>"));
    }
    if let Place::Sockets(_) = place {
        inside.push("    <source type='memfd'/>".to_owned());
        inside.push("    <access mode='shared'/>".to_owned());
    }
    if inside.is_empty() {
        return inside;
    }
    inside.insert(0, "  <memoryBacking>".to_owned());
    inside.push("  </memoryBacking>".to_owned());
    inside
}

/// The firmware, its variables, and what it needs of the machine. libvirt chooses the file of the firmware, as its names differ from
/// system to system.
fn system(vm: &Vm, place: Place<'_>) -> Vec<String> {
    let firmware = vm.hardware.firmware;
    let (begin, features): (&str, &[(&str, &str)]) = match firmware {
        Firmware::Bios => ("  <os>", &[]),
        // Otherwise libvirt may choose one with secure boot.
        Firmware::Uefi => ("  <os firmware='efi'>", &[("no", "secure-boot")]),
        // Variables that libvirt would make must have keys: without them all is started.
        Firmware::UefiSecureBoot => {
            ("  <os firmware='efi'>", &[("yes", "enrolled-keys"), ("yes", "secure-boot")])
        }
    };
    let mut lines = vec![begin.to_owned()];
    lines.push("    <type arch='x86_64' machine='q35'>hvm</type>".to_owned());
    if firmware.has_variables() {
        lines.push("    <firmware>".to_owned());
        lines.extend(
            features.iter().map(|(enabled, name)| {
                format!("      <feature enabled='{enabled}' name='{name}'/>")
            }),
        );
        lines.push("    </firmware>".to_owned());
    }
    let is_secure = firmware == Firmware::UefiSecureBoot;
    if is_secure {
        lines.push("    <loader secure='yes'/>".to_owned());
    }
    if firmware.has_variables() {
        let file = match place {
            Place::Sockets(_) => Files::within(None).variables(vm),
            Place::Files(files) => files.variables(vm),
        };
        lines.push(format!("    <nvram>{}</nvram>", escaped(&file.display().to_string())));
    }
    lines.push("  </os>".to_owned());
    // Firmware with secure boot runs in system management mode.
    let more = if is_secure { "<smm state='on'/>" } else { "" };
    lines.push(format!("  <features><acpi/>{more}</features>"));
    lines
}

fn devices(vm: &Vm, place: Place<'_>) -> Vec<String> {
    let (mut lines, order) = (Vec::new(), Order::of(vm));
    for (index, disk) in seen(vm) {
        lines.extend(image(vm, (index, disk), place));
        match disk.role {
            DiskRole::Data => lines.extend(order.of_device(BootDevice::Disk, index)),
            DiskRole::CloudInit | DiskRole::UefiVariables | DiskRole::Tpm => {
                lines.push("      <readonly/>".to_owned());
            }
        }
        lines.push("    </disk>".to_owned());
    }
    lines.extend(vm.hardware.cdrom.iter().flat_map(|it| drive(it, &order)));
    let cards = vm.nics.iter().enumerate();
    lines.extend(cards.flat_map(|(index, nic)| interface(nic, index, &order)));
    if vm.hardware.tpm {
        lines.push("    <tpm model='tpm-crb'>".to_owned());
        lines.push("      <backend type='emulator' version='2.0'/>".to_owned());
        lines.push("    </tpm>".to_owned());
    }
    lines.push("    <serial type='pty'/>".to_owned());
    if let Place::Files(_) = place {
        // What every VM has, and libvirt adds to no domain.
        lines.push("    <channel type='unix'><target type='virtio' name='org.qemu.guest_agent.0'/></channel>".to_owned());
        lines.push("    <graphics type='vnc'/>".to_owned());
        lines.push("    <video><model type='vga'/></video>".to_owned());
    }
    lines.push("    <rng model='virtio'><backend model='builtin'/></rng>".to_owned());
    lines
}

/// The beginning of a disk: where it is, and what the guest sees it as.
fn image(vm: &Vm, (index, disk): (usize, &Disk), place: Place<'_>) -> [String; 4] {
    let (kind, format, source) = match place {
        Place::Sockets(run_dir) => {
            let path = escaped(&format!("{run_dir}/vms/{}/disk{index}.sock", vm.id));
            ("vhostuser", "raw", format!("type='unix' path='{path}'"))
        }
        Place::Files(files) => {
            let path = escaped(&files.image(vm, disk).display().to_string());
            ("file", "qcow2", format!("file='{path}'"))
        }
    };
    [
        format!("    <disk type='{kind}' device='disk'>"),
        format!("      <driver name='qemu' type='{format}'/>"),
        format!("      <source {source}/>"),
        format!("      <target dev='{}' bus='virtio'/>", target(index)),
    ]
}

/// The disks that the guest sees, as they are numbered when it starts. The firmware's variables are served to vmseal's own QEMU alone, and that
/// of a TPM to nobody.
fn seen(vm: &Vm) -> impl Iterator<Item = (usize, &Disk)> {
    vm.disks.iter().filter(|disk| disk.role.attachment() == Attachment::Disk).enumerate()
}

/// The processor's model. A guest does not start where libvirt knows no such model, as it does not with vmseal.
fn cpu(model: &str) -> String {
    match model {
        "host" => "  <cpu mode='host-passthrough'/>".to_owned(),
        "max" => "  <cpu mode='maximum'/>".to_owned(),
        named => format!(
            "  <cpu mode='custom' match='exact'><model fallback='forbid'>{}</model></cpu>",
            escaped(named)
        ),
    }
}

/// The places of a VM's devices in the order in which its firmware tries them.
struct Order(Vec<(BootDevice, usize)>);

impl Order {
    fn of(vm: &Vm) -> Self {
        let disks = seen(vm).filter(|(_, disk)| disk.role == DiskRole::Data);
        let disks: Vec<_> = disks.map(|(index, _)| (BootDevice::Disk, index)).collect();
        let of_kind = |kind| match kind {
            BootDevice::Disk => disks.clone(),
            BootDevice::Cdrom => vec![(kind, 0)],
            BootDevice::Network => (0..vm.nics.len()).map(|index| (kind, index)).collect(),
        };
        Self(vm.hardware.boot_order().into_iter().flat_map(of_kind).collect())
    }

    /// What is said of the place of a device, if it has one.
    fn of_device(&self, kind: BootDevice, index: usize) -> Option<String> {
        let place = self.0.iter().position(|device| *device == (kind, index))? + 1;
        Some(format!("      <boot order='{place}'/>"))
    }
}

/// The CD-ROM drive.
fn drive(cdrom: &Cdrom, order: &Order) -> Vec<String> {
    let mut lines = vec![
        "    <disk type='file' device='cdrom'>".to_owned(),
        "      <driver name='qemu' type='raw'/>".to_owned(),
    ];
    if let Some(medium) = &cdrom.medium {
        lines.push(format!("      <source file='{}'/>", escaped(&medium.display().to_string())));
    }
    lines.push("      <target dev='sda' bus='sata'/>".to_owned());
    lines.push("      <readonly/>".to_owned());
    lines.extend(order.of_device(BootDevice::Cdrom, 0));
    lines.push("    </disk>".to_owned());
    lines
}

/// The ports that lead into the guest by a card. libvirt has no port that is still to be chosen.
fn forwards_of(nic: &Nic) -> Vec<PortForward> {
    nic.ports().iter().filter(|forward| forward.host_port != 0).cloned().collect()
}

/// What a VM has and its domain has not.
pub fn left_out(vm: &Vm) -> Vec<String> {
    let ports = vm.nics.iter().flat_map(|nic| nic.ports().iter().map(move |port| (nic, port)));
    let open = ports.filter(|(_, port)| port.host_port == 0);
    open.map(|(nic, port)| {
        let (name, protocol, guest_port) = (&nic.name, port.protocol.name(), port.guest_port);
        format!(
            "the host's port that leads to {protocol} {guest_port} of the guest by network card '{name}': it is chosen when the VM starts. Print the domain while the VM runs (with --images DIR its disks are files then, too), or write a port into this one (<portForward>)"
        )
    })
    .collect()
}

/// A network card. One with forwarded ports is of passt, as libvirt has these with nothing else.
fn interface(nic: &Nic, index: usize, order: &Order) -> Vec<String> {
    let (kind, connected) = match &nic.backend {
        NicBackend::User { .. } => ("user", None),
        NicBackend::Bridge { bridge } => {
            ("bridge", Some(format!("      <source bridge='{}'/>", escaped(bridge))))
        }
        NicBackend::Tap { tap } => {
            let tap = escaped(tap);
            ("ethernet", Some(format!("      <target dev='{tap}' managed='no'/>")))
        }
    };
    let mut lines = vec![
        format!("    <interface type='{kind}'>"),
        format!("      <mac address='{}'/>", nic.mac),
    ];
    lines.extend(connected);
    let forwards = forwards_of(nic);
    if !forwards.is_empty() {
        lines.push("      <backend type='passt'/>".to_owned());
    }
    lines.push(format!("      <model type='{}'/>", nic.model.name()));
    if nic.link == NicLink::Down {
        lines.push("      <link state='down'/>".to_owned());
    }
    lines.extend(order.of_device(BootDevice::Network, index));
    lines.extend(forwards::lines(&forwards));
    lines.push("    </interface>".to_owned());
    lines
}

/// `vda` to `vdz`, then `vdaa`: a VM has at most 28 disks.
fn target(index: usize) -> String {
    let letter = |at: usize| char::from(b'a' + u8::try_from(at % 26).unwrap_or(0));
    match index / 26 {
        0 => format!("vd{}", letter(index)),
        more => format!("vd{}{}", letter(more - 1), letter(index)),
    }
}

fn escaped(text: &str) -> String {
    let mut safe = String::with_capacity(text.len());
    for c in text.chars() {
        match c {
            '&' => safe.push_str("&amp;"),
            '<' => safe.push_str("&lt;"),
            '>' => safe.push_str("&gt;"),
            '\'' => safe.push_str("&apos;"),
            '"' => safe.push_str("&quot;"),
            '\n' | '\t' => safe.push(c),
            // Otherwise it would be read as a new line.
            '\r' => safe.push_str("&#13;"),
            // XML cannot have it.
            c if c.is_control() || matches!(c, '\u{fffe}' | '\u{ffff}') => safe.push('\u{fffd}'),
            c => safe.push(c),
        }
    }
    safe
}

#[cfg(test)]
mod tests {
    use std::process::Command;

    use serde_json::{from_value, json};
    use vmseal_api::transfer::ImageFormat;

    use super::*;
    use crate::libvirt::{Images, Networks, TpmState, Variables};

    const GOLDEN: &str = include_str!("../../tests/libvirt/sealed.xml");

    fn vm(disks: usize) -> Vm {
        let disk = |index: usize| {
            json!({
                "id": format!("00000000-0000-7000-8000-0000000000{index:02}"),
                "name": format!("disk{index}"), "datastore": "local", "size": 1 << 30,
                "encrypted": true,
            })
        };
        let nic = |index: usize, backend, link: &str| {
            json!({
                "id": format!("00000000-0000-7000-8000-0000000001{index:02}"),
                "name": format!("nic{index}"), "mac": format!("52:54:00:00:00:0{index}"),
                "model": "virtio", "backend": backend, "link": link,
            })
        };
        from_value(json!({
            "id": "11111111-1111-7111-8111-111111111111",
            "name": "sealed", "host": "here", "policy": "encrypted", "vcpus": 2,
            "memory": 512 << 20, "disks": (0..disks).map(disk).collect::<Vec<_>>(),
            "lifecycle": "ready", "power": "running",
            "nics": [
                nic(1, json!({"kind": "bridge", "bridge": "br0"}), "up"),
                nic(2, json!({"kind": "tap", "tap": "tap0"}), "down"),
                nic(3, json!({"kind": "user"}), "up"),
            ],
        }))
        .unwrap()
    }

    fn host(run_dir: &str) -> HostDescription {
        from_value(json!({
            "contract": 1, "vmseal": "0", "incarnation": "22222222-2222-7222-8222-222222222222",
            "hostname": "here", "key_box": "", "accelerator": { "kind": "kvm", "reason": "" },
            "qemu": "7.2", "cpus": 2, "memory": 1 << 30, "aes_hardware": true,
            "run_dir": run_dir, "transfer_directories": [], "weaknesses": [],
        }))
        .unwrap()
    }

    /// Checks the domain against libvirt's own schema.
    fn validate(xml: &str) {
        let file = tempfile::NamedTempFile::with_suffix(".xml").unwrap();
        std::fs::write(file.path(), xml).unwrap();
        let judged = Command::new("virt-xml-validate")
            .arg(file.path())
            .arg("domain")
            .output()
            .expect("virt-xml-validate is installed (scripts/prerequisites)");
        let said = String::from_utf8_lossy(&judged.stderr).into_owned();
        assert!(judged.status.success(), "{said}\n{xml}");
    }

    #[test]
    fn drive_tpm_and_boot_order_are_said() {
        let mut vm = vm(2);
        vm.disks[0].role = DiskRole::CloudInit;
        vm.hardware.tpm = true;
        vm.hardware.cdrom = Some(Cdrom { medium: Some("/srv/a & b.iso".into()) });
        let said = |vm: &Vm| {
            let xml = domain(vm, &host("/run/vmseal"));
            validate(&xml);
            xml.lines().map(str::trim).collect::<Vec<_>>().join("")
        };
        let xml = said(&vm);
        let tpm = "<tpm model='tpm-crb'><backend type='emulator' version='2.0'/></tpm>";
        assert!(xml.contains(tpm), "{xml}");
        let drive = "<source file='/srv/a &amp; b.iso'/><target dev='sda' bus='sata'/><readonly/><boot order='2'/></disk>";
        assert!(xml.contains(drive), "{xml}");
        // The disk with the cloud-init data has no place.
        assert!(xml.contains("<target dev='vdb' bus='virtio'/><boot order='1'/>"), "{xml}");
        vm.hardware.cdrom = Some(Cdrom::default());
        vm.hardware.boot = vec![BootDevice::Network, BootDevice::Disk];
        let xml = said(&vm);
        assert!(
            xml.contains(
                "<driver name='qemu' type='raw'/><target dev='sda' bus='sata'/><readonly/></disk>"
            ),
            "{xml}"
        );
        for place in
            ["<model type='virtio'/><boot order='1'/>", "<link state='down'/><boot order='2'/>"]
        {
            assert!(xml.contains(place), "{place}: {xml}");
        }
        assert!(xml.contains("<target dev='vdb' bus='virtio'/><boot order='4'/>"), "{xml}");
    }

    /// Sockets have the numbers of the disks that the guest sees, as the host gives them, wherever a disk of the machine's own is.
    #[test]
    fn disks_that_the_guest_does_not_see_have_no_number() {
        let mut vm = vm(4);
        (vm.disks[1].role, vm.disks[2].role) = (DiskRole::UefiVariables, DiskRole::Tpm);
        let xml = domain(&vm, &host("/run/vmseal"));
        validate(&xml);
        for part in ["/disk0.sock", "/disk1.sock", "dev='vda'", "dev='vdb'", "<boot order='2'/>"] {
            assert_eq!(xml.matches(part).count(), 1, "{part}: {xml}");
        }
        assert_eq!(xml.matches(".sock'").count(), 2, "{xml}");
    }

    #[test]
    fn the_firmware_is_said_with_the_file_of_its_variables() {
        let nvram = "<nvram>/var/lib/libvirt/qemu/nvram/sealed_VARS.fd</nvram>";
        let uefi = ["<os firmware='efi'>", "<feature enabled='no' name='secure-boot'/>", nvram];
        let secure = [
            "<feature enabled='yes' name='enrolled-keys'/>",
            "<feature enabled='yes' name='secure-boot'/>",
            "<loader secure='yes'/>",
            "<features><acpi/><smm state='on'/></features>",
            nvram,
        ];
        for (firmware, said, is_without) in [
            (Firmware::Bios, &["<os>", "<features><acpi/></features>"][..], "nvram"),
            (Firmware::Uefi, &uefi, "='yes'"),
            (Firmware::UefiSecureBoot, &secure, "='no'"),
        ] {
            let mut vm = vm(1);
            vm.hardware.firmware = firmware;
            for xml in [domain(&vm, &host("/run/vmseal")), of_files(&vm, None)] {
                validate(&xml);
                for line in said {
                    assert!(xml.lines().any(|it| it.trim() == *line), "{line}: {xml}");
                }
                let os = xml.split("</os>").next().unwrap_or_default();
                assert!(!os.contains(is_without), "{firmware:?}: {xml}");
            }
        }
    }

    fn of_files(vm: &Vm, directory: Option<&Path>) -> String {
        domain_of_files(vm, AcceleratorKind::Kvm, &Files::within(directory))
    }

    /// Where the commands write is where the domain has it, and an import finds all of it.
    #[test]
    fn what_is_exported_is_what_the_domain_names_and_an_import_takes() {
        let mut vm = vm(4);
        (vm.disks[1].role, vm.disks[2].role) = (DiskRole::UefiVariables, DiskRole::Tpm);
        (vm.hardware.firmware, vm.hardware.tpm) = (Firmware::UefiSecureBoot, true);
        let directory = Path::new("/srv/<o> & 'ut'");
        let xml = of_files(&vm, Some(directory));
        validate(&xml);
        assert!(!xml.contains(".sock") && !xml.contains("<memoryBacking>"), "{xml}");
        let file = tempfile::NamedTempFile::with_suffix(".xml").unwrap();
        std::fs::write(file.path(), &xml).unwrap();
        let networks = Networks::parse(&[], &[]).unwrap();
        let read = crate::libvirt::read(file.path(), &networks, &Images::default()).unwrap();
        assert_eq!((read.hardware.firmware, read.hardware.tpm), (Firmware::UefiSecureBoot, true));
        assert_eq!(read.nics.len(), 3);
        let images: Vec<_> =
            read.disks.iter().map(|disk| (disk.image.clone(), disk.format)).collect();
        let at = |name: &str| directory.join(name);
        let qcow2 = ["sealed-disk0.qcow2", "sealed-disk3.qcow2"];
        assert_eq!(images, qcow2.map(|name| (at(name), ImageFormat::Qcow2)));
        assert_eq!(read.variables, Some(Variables::File(at("sealed_VARS.fd"))));
        let of_tpm =
            "/var/lib/libvirt/swtpm/11111111-1111-7111-8111-111111111111/tpm2/tpm2-00.permall";
        assert_eq!(read.tpm_state, Some(TpmState::File(of_tpm.into())));

        let exports = Files::within(Some(directory)).exports(&vm);
        let told = |disk: &str, format: &str, to: &str| {
            format!("vmseal disk export sealed {disk} --format {format} --plaintext --to {to}")
        };
        let quoted = |name: &str| shell::word(&format!("/srv/<o> & 'ut'/{name}"));
        assert_eq!(
            exports,
            [
                told("disk0", "qcow2", &quoted("sealed-disk0.qcow2")),
                told("disk1", "raw", &quoted("sealed_VARS.fd")),
                told("disk2", "raw", &quoted("sealed-tpm2-00.permall")),
                told("disk3", "qcow2", &quoted("sealed-disk3.qcow2")),
            ]
        );
        // Where libvirt has it an agent writes nothing: it is put there afterwards.
        let exported = quoted("sealed-tpm2-00.permall");
        let placing = Files::within(Some(directory)).placing_of_tpm(&vm);
        assert_eq!(placing, Some(format!("install -D -m 600 {exported} {of_tpm}")));
        let usual = Files::within(None);
        assert_eq!(usual.placing_of_tpm(&vm), None);
        assert!(usual.exports(&vm).contains(&told("disk2", "raw", of_tpm)));
        vm.hardware.tpm = false;
        assert_eq!(Files::within(Some(directory)).placing_of_tpm(&vm), None);
        let usual = of_files(&vm, None);
        assert!(usual.contains("file='/var/lib/libvirt/images/sealed-disk3.qcow2'"), "{usual}");
    }

    #[test]
    fn forwarded_ports_are_said_as_they_are_in_force() {
        let forward = |text: &str| text.parse::<PortForward>().unwrap();
        let mut vm = vm(1);
        let asked = vec![forward("tcp:22"), forward("udp:0.0.0.0:5353:53")];
        vm.nics[2].backend = NicBackend::User { forwards: asked };
        let said = |vm: &Vm| {
            let xml = domain(vm, &host("/run/vmseal"));
            validate(&xml);
            xml.lines().map(str::trim).collect::<Vec<_>>().join("")
        };
        let second = "<portForward proto='udp' address='0.0.0.0'><range start='5353' to='53'/></portForward>";
        let xml = said(&vm);
        assert!(xml.contains(second) && xml.contains("<backend type='passt'/>"), "{xml}");
        assert!(!xml.contains("proto='tcp'"), "a port that nobody has chosen: {xml}");
        let left = left_out(&vm);
        let [left] = &left[..] else { panic!("one port is not in it: {left:?}") };
        assert!(left.contains("tcp 22 of the guest by network card 'nic3'"), "{left}");
        vm.nics[2].forwards =
            vec![forward("tcp:127.0.0.1:61234:22"), forward("udp:0.0.0.0:5353:53")];
        let first = "<portForward proto='tcp' address='127.0.0.1'><range start='61234' to='22'/></portForward>";
        let xml = said(&vm);
        assert!(xml.contains(&(first.to_owned() + second)), "{xml}");
        assert_eq!(left_out(&vm), [""; 0]);
        assert_eq!(xml.matches("type='passt'").count(), 1, "{xml}");
    }

    #[test]
    fn the_description_is_said_whatever_is_in_it() {
        let mut vm = vm(1);
        vm.description = "A <shop> & \u{1b}[2J\nits \u{ffff} customers".to_owned();
        let xml = domain(&vm, &host("/run/vmseal"));
        validate(&xml);
        let read = roxmltree::Document::parse(&xml).unwrap();
        let description = read.descendants().find(|it| it.has_tag_name("description")).unwrap();
        assert_eq!(description.text(), Some("A <shop> & \u{fffd}[2J\nits \u{fffd} customers"));
        vm.description = "one\r\ntwo".to_owned();
        let xml = domain(&vm, &host("/run/vmseal"));
        assert!(xml.contains("<description>one&#13;\ntwo</description>"), "{xml}");
    }

    #[test]
    fn processor_model_and_huge_pages_are_said() {
        for (model, said) in [
            (None, "<cpu mode='host-passthrough'/>"),
            (Some("host"), "<cpu mode='host-passthrough'/>"),
            (Some("max"), "<cpu mode='maximum'/>"),
            (
                Some("EPYC-Milan-v2"),
                "<cpu mode='custom' match='exact'><model fallback='forbid'>EPYC-Milan-v2</model></cpu>",
            ),
        ] {
            let mut vm = vm(1);
            vm.hardware.cpu_model = model.map(str::to_owned);
            vm.hardware.memory_backing = MemoryBacking::Hugepages;
            let xml = domain(&vm, &host("/run/vmseal"));
            validate(&xml);
            assert!(xml.contains(said), "{model:?}: {xml}");
            assert!(xml.contains("<hugepages><page size='2048' unit='KiB'/></hugepages>"), "{xml}");
        }
    }

    #[test]
    fn the_domain_matches_its_file_and_the_schema() {
        let xml = domain(&vm(2), &host("/run/vmseal"));
        assert_eq!(xml, GOLDEN);
        validate(&xml);
        // The most disks that there can be, and a directory whose name must be escaped.
        validate(&domain(&vm(28), &host("/run/<&'\">")));
        assert_eq!(
            (target(0), target(25), target(27)),
            ("vda".into(), "vdz".into(), "vdab".into())
        );
    }
}
