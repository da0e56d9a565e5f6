//! A VM that runs, as a libvirt domain: its disks are the sockets where QEMU and its running filter meet.

use std::fmt::Write;

use vmseal_api::boot::{BootDevice, Cdrom};
use vmseal_api::hardware::{Firmware, HUGE_PAGE, MemoryBacking};
use vmseal_api::host::{AcceleratorKind, Attachment, DiskRole, HostDescription};
use vmseal_api::model::{Disk, Nic, Vm};
use vmseal_api::nic::{NicBackend, NicLink, PortForward};

use super::forwards;

/// The comment above the domain: what it can be used for.
const NOTE: &str = "
  What vmseal runs, as a libvirt domain. The disks' sockets are where its QEMU and the running
  vmseal-filter meet. libvirt cannot start it as it is: vmseal's QEMU listens there and the agent connects
  the filter, so that a guest outlives its filter, where libvirt's would connect; a filter serves one QEMU
  at a time; and the sockets go when the VM stops. A TPM that libvirt makes is empty: what the VM's own
  keeps is encrypted, and opens with the VM's key alone.
";

/// The domain of a VM that runs on the described host.
pub fn domain(vm: &Vm, host: &HostDescription) -> String {
    let (kind, usual) = match host.accelerator.kind {
        AcceleratorKind::Kvm => ("kvm", "host"),
        // Emulation runs anywhere.
        AcceleratorKind::Tcg | AcceleratorKind::Unknown => ("qemu", "max"),
    };
    let mut xml = format!("<!--{NOTE}-->\n");
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
    line("  <memoryBacking>".to_owned());
    if vm.hardware.memory_backing == MemoryBacking::Hugepages {
        let (size, unit) = (HUGE_PAGE >> 10, "KiB");
        line(format!("    <hugepages><page size='{size}' unit='{unit}'/></hugepages>"));
    }
    line("    <source type='memfd'/>".to_owned());
    line("    <access mode='shared'/>".to_owned());
    line("  </memoryBacking>".to_owned());
    line(format!("  <vcpu>{}</vcpu>", vm.vcpus));
    match vm.hardware.firmware {
        Firmware::Bios => line("  <os>".to_owned()),
        Firmware::Uefi | Firmware::UefiSecureBoot => line("  <os firmware='efi'>".to_owned()),
    }
    line("    <type arch='x86_64' machine='q35'>hvm</type>".to_owned());
    if vm.hardware.firmware == Firmware::UefiSecureBoot {
        line("    <firmware><feature enabled='yes' name='secure-boot'/></firmware>".to_owned());
    }
    line("  </os>".to_owned());
    line("  <features><acpi/></features>".to_owned());
    line(cpu(vm.hardware.cpu_model.as_deref().unwrap_or(usual)));
    line("  <clock offset='utc'/>".to_owned());
    line(format!("  <on_crash>{}</on_crash>", vm.hardware.on_crash.name()));
    line("  <devices>".to_owned());
    let order = Order::of(vm);
    for (index, disk) in seen(vm) {
        let path = format!("{}/vms/{}/disk{index}.sock", host.run_dir, vm.id);
        line("    <disk type='vhostuser' device='disk'>".to_owned());
        line("      <driver name='qemu' type='raw'/>".to_owned());
        line(format!("      <source type='unix' path='{}'/>", escaped(&path)));
        line(format!("      <target dev='{}' bus='virtio'/>", target(index)));
        match disk.role {
            DiskRole::Data => {
                order.of_device(BootDevice::Disk, index).into_iter().for_each(&mut line)
            }
            DiskRole::CloudInit | DiskRole::UefiVariables | DiskRole::Tpm => {
                line("      <readonly/>".to_owned())
            }
        }
        line("    </disk>".to_owned());
    }
    vm.hardware.cdrom.iter().flat_map(|it| drive(it, &order)).for_each(&mut line);
    let cards = vm.nics.iter().enumerate();
    cards.flat_map(|(index, nic)| interface(nic, index, &order)).for_each(&mut line);
    if vm.hardware.tpm {
        line("    <tpm model='tpm-crb'>".to_owned());
        line("      <backend type='emulator' version='2.0'/>".to_owned());
        line("    </tpm>".to_owned());
    }
    line("    <serial type='pty'/>".to_owned());
    line("    <rng model='virtio'><backend model='builtin'/></rng>".to_owned());
    line("  </devices>".to_owned());
    line("</domain>".to_owned());
    xml
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

/// The ports that lead into the guest by a card, as they are in force. libvirt has no port that is still to be chosen.
fn forwards_of(nic: &Nic) -> Vec<PortForward> {
    let asked = nic.backend.forwards();
    let all = if nic.forwards.is_empty() { asked } else { &nic.forwards[..] };
    all.iter().filter(|forward| forward.host_port != 0).cloned().collect()
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

    use super::*;

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
    fn the_firmware_is_said() {
        let secure = "<firmware><feature enabled='yes' name='secure-boot'/></firmware>";
        for (firmware, os, is_secure) in [
            (Firmware::Bios, "<os>", false),
            (Firmware::Uefi, "<os firmware='efi'>", false),
            (Firmware::UefiSecureBoot, "<os firmware='efi'>", true),
        ] {
            let mut vm = vm(1);
            vm.hardware.firmware = firmware;
            let xml = domain(&vm, &host("/run/vmseal"));
            validate(&xml);
            assert!(xml.lines().any(|line| line.trim() == os), "{firmware:?}: {xml}");
            assert_eq!(xml.contains(secure), is_secure, "{firmware:?}: {xml}");
        }
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
        vm.nics[2].forwards =
            vec![forward("tcp:127.0.0.1:61234:22"), forward("udp:0.0.0.0:5353:53")];
        let first = "<portForward proto='tcp' address='127.0.0.1'><range start='61234' to='22'/></portForward>";
        let xml = said(&vm);
        assert!(xml.contains(&(first.to_owned() + second)), "{xml}");
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
