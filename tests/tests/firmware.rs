//! Guests that start by UEFI: their variables outlive them, kills of all that serves them, and a change of the key,
//! and are ciphertext on the datastore. The guest is the firmware's own shell, on the serial console. And what else a
//! machine is made of that a host may not have.

#![allow(clippy::unwrap_used)] // a test that cannot go on ends

use std::fs::File;
use std::path::Path;

use serde_json::Value;
use vmseal_tests::eventually;
use vmseal_tests::firmware_shell::{self, has_variable, set_variable};
use vmseal_tests::huge_pages;
use vmseal_tests::installation::{self, Installation, text};
use vmseal_tests::kills::has_its_turn;
use vmseal_tests::process::kill_hard;
use vmseal_tests::scan::contains;

/// What only such a variable's name holds.
const NAME: &str = "VmsealMarker";

/// The disk of the test's VMs: the firmware finds nothing on it, and starts its shell.
const EMPTY: [&str; 2] = ["--disk", "datastore=local,size=1MiB"];

fn create(here: &Installation, vm: &str, policy: &str, more: &[&str]) {
    let create = ["vm", "create", vm, "--policy", policy, "--memory", "128MiB"];
    here.vmseal(&[&create[..], &EMPTY, more].concat()).unwrap();
}

/// The huge pages of a VM of 32 MiB.
const HUGE_PAGES_OF_VM: u64 = 16;

fn set_aside(pages: u64) -> std::io::Result<()> {
    std::fs::write(format!("{}/nr_hugepages", huge_pages::DIRECTORY), pages.to_string())
}

/// Huge pages for one VM, beside those that this machine had, until it is dropped.
struct SetAside {
    before: u64,
}

impl SetAside {
    /// None where this machine does not let it.
    fn new() -> Option<Self> {
        let this = Self { before: huge_pages::count("nr_hugepages") };
        let wanted = this.before + HUGE_PAGES_OF_VM;
        set_aside(wanted).ok()?;
        (huge_pages::count("nr_hugepages") == wanted).then_some(this)
    }
}

impl Drop for SetAside {
    fn drop(&mut self) {
        let _ = set_aside(self.before);
    }
}

/// The memory of a guest is in huge pages, all of it from the start on, and is given back when it ends. A guest for which there are
/// none left does not start.
fn runs_on_huge_pages(here: &Installation) {
    let _turn = huge_pages::turn();
    let Some(pages) = SetAside::new() else {
        vmseal_tests::skipped("no guest runs on huge pages: this machine sets none aside");
        return;
    };
    let image = here.counter_image().unwrap();
    let disk = format!("datastore=local,format=raw,image={}", text(&image).unwrap());
    for vm in ["first", "second"] {
        let create = installation::create(vm, "encrypted", &disk);
        here.vmseal(&[&create[..], &["--memory-backing", "hugepages"]].concat()).unwrap();
    }
    let free = huge_pages::count("free_hugepages");
    assert_eq!(here.boot_counter("first").unwrap(), 1);
    assert_eq!(huge_pages::count("free_hugepages"), free - HUGE_PAGES_OF_VM);
    let qemu = here.processes_of("first", "qemu-system-x86_64").unwrap()[0];
    assert_eq!(huge_pages::mapped(qemu).unwrap(), "32768 kB");
    // Another filter reads and writes that memory, too.
    kill_hard(here.processes_of("first", "vmseal-filter").unwrap()[0]);
    here.wait_alarm("first", "filter-restarted").unwrap();
    let mut console = here.console("first").unwrap();
    console.type_text("r").unwrap();
    while console.next_count().unwrap() != 2 {}
    // Unless the machine had some before.
    if pages.before == 0 {
        for dry in [&["--dry-run"][..], &[]] {
            let said = here.refused(&[&["vm", "start", "second"], dry].concat()).unwrap();
            assert!(
                said.contains("needed: 16; those that are free on this host now: 0."),
                "{said}"
            );
        }
    }
    here.vmseal(&["vm", "stop", "first", "--force"]).unwrap();
    eventually("the huge pages are free", || {
        (huge_pages::count("free_hugepages") == free).then_some(())
    })
    .unwrap();
}

/// Whether the image of a VM's variables holds the name of the test's in the clear.
fn is_readable(here: &Installation, vm: &str) -> bool {
    let image = std::fs::read(&here.images(vm).unwrap()[1]).unwrap();
    let name: Vec<u8> = NAME.encode_utf16().flat_map(u16::to_le_bytes).collect();
    contains(&image, name)
}

#[test]
fn variables_outlive_guests_and_kills_and_are_ciphertext() {
    let mut here = Installation::new().unwrap();
    create(&here, "web", "encrypted", &["--firmware", "uefi"]);
    let shown = here.vm("web").unwrap();
    let disk = &shown["disks"][1];
    assert_eq!(
        (&disk["name"], &disk["role"]),
        (&"uefi-variables".into(), &"uefi_variables".into())
    );
    assert_eq!(disk["encrypted"], true);
    assert_eq!(shown["hardware"]["firmware"], "uefi");

    here.vmseal(&["vm", "start", "web"]).unwrap();
    let mut guest = firmware_shell::open(&here, "web");
    set_variable(&mut guest, NAME, "112233");
    has_variable(&mut guest, NAME, "11 22 33");

    let filter = here.processes_of("web", "vmseal-filter").unwrap()[0];
    kill_hard(filter);
    here.wait_alarm("web", "filter-restarted").unwrap();
    set_variable(&mut guest, "SecondOne", "44556677");
    drop(guest);
    here.kill_agent();
    here.start_agent().unwrap();
    here.wait_host().unwrap();
    let mut guest = here.console("web").unwrap();
    has_variable(&mut guest, "SecondOne", "44 55 66 77");
    for qemu in here.processes_of("web", "qemu-system-x86_64").unwrap() {
        kill_hard(qemu);
    }
    here.wait_power("web", "off").unwrap();
    drop(guest);

    here.vmseal(&["vm", "recrypt", "web"]).unwrap();
    here.vmseal(&["vm", "start", "web"]).unwrap();
    let mut guest = firmware_shell::open(&here, "web");
    has_variable(&mut guest, NAME, "11 22 33");
    has_variable(&mut guest, "SecondOne", "44 55 66 77");
    drop(guest);
    here.vmseal(&["vm", "stop", "web", "--force"]).unwrap();
    assert!(!is_readable(&here, "web"), "the variables are in the clear on the datastore");

    create(&here, "open", "plain", &["--firmware", "uefi"]);
    here.vmseal(&["vm", "start", "open"]).unwrap();
    set_variable(&mut firmware_shell::open(&here, "open"), NAME, "112233");
    here.vmseal(&["vm", "stop", "open", "--force"]).unwrap();
    assert!(is_readable(&here, "open"), "the search does not find what is there");
    let images = here.images("web").unwrap();
    here.vmseal(&["vm", "delete", "web"]).unwrap();
    assert!(images.iter().all(|image| !image.exists()), "a disk is left");
}

#[test]
fn secure_boot_starts_nothing_that_is_not_signed() {
    let here = Installation::new().unwrap();
    create(&here, "safe", "encrypted", &["--firmware", "uefi-secure-boot", "--tpm"]);
    here.vmseal(&["vm", "start", "safe"]).unwrap();
    here.console("safe").unwrap().expect("Security Violation", 0).unwrap();
    // This firmware goes on with a TPM, and does not end it.
    assert_eq!(here.processes_of("safe", "swtpm").unwrap().len(), 1);
}

#[test]
fn what_a_host_does_not_have_is_refused_and_nothing_is_made() {
    let here = Installation::new().unwrap();
    for (more, said) in [
        (&["--cpu-model", "host"][..], "--cpu-model: 'host' is this host's own processor"),
        (&["--cpu-model", "i860"], "no processor model 'i860'"),
        (&["--cpu-model", "max,+vmx"], "--cpu-model: is no name"),
        (&["--memory-backing", "hugepages"], "sysctl vm.nr_hugepages"),
        (&["--memory-backing", "hugepages", "--memory", "65MiB"], "--memory-backing"),
        (&["--firmware", "openfirmware"], "uefi-secure-boot"),
    ] {
        let create = ["vm", "create", "web", "--policy", "encrypted"];
        for dry in [&[][..], &["--dry-run"]] {
            let message = here.refused(&[&create[..], &EMPTY, more, dry].concat()).unwrap();
            assert!(message.contains(said), "{more:?}: {message}");
        }
    }
    // A model that nobody typed is the policy's.
    let old = ["policy", "create", "old", "--encrypt", "--cpu-model", "i860"];
    for dry in [&["--dry-run"][..], &[]] {
        let made = here.try_vmseal(&[&old[..], dry].concat()).unwrap();
        let warned = String::from_utf8_lossy(&made.stderr).into_owned();
        assert!(made.status.success(), "{warned}");
        assert!(warned.contains("warning: host 'here'") && warned.contains("'i860'"), "{warned}");
    }
    let create = ["vm", "create", "web", "--policy", "old"];
    let message = here.refused(&[&create[..], &EMPTY].concat()).unwrap();
    assert!(message.contains("--policy: 'old' gives VMs the processor model 'i860'"), "{message}");
    let named = "datastore=local,size=1MiB,name=uefi-variables";
    let create =
        ["vm", "create", "web", "--policy", "plain", "--firmware", "uefi", "--disk", named];
    let message = here.refused(&create).unwrap();
    assert!(message.contains("name of the disk"), "{message}");
    assert_eq!(here.json(&["vm", "list"]).unwrap(), Value::Array(Vec::new()));
    // Not beside the rest, which needs a machine without huge pages.
    runs_on_huge_pages(&here);
}

/// A domain of libvirt's whose disk is this image, and whose variables this file.
fn domain(image: &Path, nvram: &Path) -> String {
    format!(
        "<domain type='kvm'><name>web</name><memory unit='MiB'>128</memory><vcpu>1</vcpu>
         <os firmware='efi'><type arch='x86_64'>hvm</type><nvram>{}</nvram></os>
         <devices><disk type='file' device='disk'><driver name='qemu' type='raw'/>
         <source file='{}'/><target dev='vda' bus='virtio'/></disk></devices></domain>",
        text(nvram).unwrap(),
        text(image).unwrap()
    )
}

/// What libvirt keeps of a guest's variables becomes the VM's, as ciphertext; what the VM's firmware does not read is refused.
#[test]
fn variables_of_a_libvirt_domain_come_with_it() {
    let here = Installation::new().unwrap();
    create(&here, "old", "encrypted", &["--firmware", "uefi"]);
    here.vmseal(&["vm", "start", "old"]).unwrap();
    set_variable(&mut firmware_shell::open(&here, "old"), NAME, "112233");
    here.vmseal(&["vm", "stop", "old", "--force"]).unwrap();
    // A raw file of them, as libvirt has.
    let nvram = here.path("web_VARS.fd");
    let to = ["--format", "raw", "--to", text(&nvram).unwrap(), "--plaintext"];
    let export = ["disk", "export", "old", "uefi-variables"];
    here.vmseal(&[&export[..], &to].concat()).unwrap();
    let (image, xml, short) = (here.path("web.img"), here.path("web.xml"), here.path("2M_VARS.fd"));
    File::create(&image).unwrap().set_len(1 << 20).unwrap();
    File::create(&short).unwrap().set_len(128 << 10).unwrap();
    std::fs::write(&xml, domain(&image, &nvram)).unwrap();
    let import = ["vm", "import", "--libvirt", text(&xml).unwrap(), "--policy", "encrypted"];
    let import = [&import[..], &["--datastore", "local"]].concat();
    for (more, said) in [
        (&["--firmware", "uefi-secure-boot"][..], "no keys of secure boot"),
        (&["--nvram", text(&short).unwrap()], "OVMF's 2M build"),
        (&["--firmware", "bios", "--nvram", text(&nvram).unwrap()], "a BIOS has no variables"),
    ] {
        for dry in [&["--dry-run"][..], &[]] {
            let message = here.refused(&[&import[..], more, dry].concat()).unwrap();
            assert!(message.contains("--nvram: ") && message.contains(said), "{message}");
        }
    }
    let plan = [&import[..], &["--reset-nvram", "--dry-run"]].concat();
    assert!(here.vmseal(&plan).unwrap().contains("uefi-variables ("));

    here.vmseal(&import).unwrap();
    here.vmseal(&["vm", "start", "web"]).unwrap();
    has_variable(&mut firmware_shell::open(&here, "web"), NAME, "11 22 33");
    here.vmseal(&["vm", "stop", "web", "--force"]).unwrap();
    assert!(!is_readable(&here, "web"), "the variables are in the clear on the datastore");
    let file = std::fs::read(&nvram).unwrap();
    let name: Vec<u8> = NAME.encode_utf16().flat_map(u16::to_le_bytes).collect();
    assert!(contains(&file, name), "the search does not find what is there");
}

/// A VM leaves as a libvirt domain that names the file of its variables, and comes back with them.
#[test]
fn variables_leave_with_their_vm_and_come_back() {
    let here = Installation::new().unwrap();
    create(&here, "web", "encrypted", &["--firmware", "uefi"]);
    here.vmseal(&["vm", "start", "web"]).unwrap();
    set_variable(&mut firmware_shell::open(&here, "web"), NAME, "112233");
    here.vmseal(&["vm", "stop", "web", "--force"]).unwrap();
    let (out, xml) = (here.path("out"), here.path("web.xml"));
    std::fs::create_dir(&out).unwrap();
    let shown = ["vm", "show", "web", "--libvirt", "--images", text(&out).unwrap()];
    let shown = here.try_vmseal(&shown).unwrap();
    let said = String::from_utf8_lossy(&shown.stderr).into_owned();
    let exports: Vec<_> =
        said.lines().filter_map(|line| line.trim().strip_prefix("vmseal ")).collect();
    assert_eq!(exports.len(), 2, "{said}");
    for export in exports {
        here.vmseal(&export.split_whitespace().collect::<Vec<_>>()).unwrap();
    }
    std::fs::write(&xml, &shown.stdout).unwrap();
    here.vmseal(&["vm", "delete", "web"]).unwrap();
    let import = ["vm", "import", "--libvirt", text(&xml).unwrap(), "--policy", "encrypted"];
    here.vmseal(&[&import[..], &["--datastore", "local"]].concat()).unwrap();
    assert_eq!(here.vm("web").unwrap()["hardware"]["firmware"], "uefi");
    here.vmseal(&["vm", "start", "web"]).unwrap();
    has_variable(&mut firmware_shell::open(&here, "web"), NAME, "11 22 33");
    here.vmseal(&["vm", "stop", "web", "--force"]).unwrap();
}

/// Variables are a disk in layers, too: these follow while the firmware has them, and each snapshot brings its own back.
#[test]
fn variables_follow_with_their_snapshots() {
    if !has_its_turn() {
        return;
    }
    let here = Installation::new().unwrap();
    create(&here, "web", "plain", &["--firmware", "uefi"]);
    here.vmseal(&["vm", "start", "web"]).unwrap();
    let mut guest = firmware_shell::open(&here, "web");
    set_variable(&mut guest, NAME, "112233");
    here.vmseal(&["snapshot", "create", "web", "one"]).unwrap();
    set_variable(&mut guest, "SecondOne", "44556677");
    here.vmseal(&["snapshot", "create", "web", "two"]).unwrap();
    set_variable(&mut guest, "ThirdOne", "8899");
    for operation in [
        &["vm", "encrypt", "web", "--policy", "encrypted"][..],
        &["vm", "recrypt", "web", "--deep"],
    ] {
        here.vmseal(operation).unwrap();
        assert!(!is_readable(&here, "web"), "{operation:?}");
        here.vmseal(&["vm", "prove", "web", "--all"]).unwrap();
        set_variable(&mut guest, "FourthOne", "aabbcc");
        has_variable(&mut guest, "ThirdOne", "88 99");
    }
    drop(guest);
    for (snapshot, second) in [("two", "44 55 66 77"), ("one", "Unable to get")] {
        here.vmseal(&["vm", "stop", "web", "--force"]).unwrap();
        here.vmseal(&["snapshot", "revert", "web", snapshot]).unwrap();
        here.vmseal(&["vm", "start", "web"]).unwrap();
        let mut guest = firmware_shell::open(&here, "web");
        has_variable(&mut guest, NAME, "11 22 33");
        has_variable(&mut guest, "SecondOne", second);
    }
}
