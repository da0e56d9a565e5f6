//! Guests with a TPM: what it keeps outlives them, kills of all that serves it, a change of the VM's key and of its disk's, and a move; it is
//! ciphertext on the datastore, and is used with its own disk alone.

#![allow(clippy::unwrap_used)] // a test that cannot go on ends

use std::io::{Read, Write};
use std::os::unix::fs::MetadataExt;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use serde_json::Value;
use vmseal_tests::eventually;
use vmseal_tests::guest::Console;
use vmseal_tests::installation::{Installation, text};
use vmseal_tests::process::kill_hard;
use vmseal_tests::scan::contains;
use vmseal_tests::shell_guest;
use vmseal_tests::tpm_guest::{
    DONE, MARKER, ask, create, define, extend, has_tpm, hex, keeps, measured, read, start,
    undefine, write,
};

/// The user that a process runs as.
fn user(pid: i32) -> String {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
    let users = status.lines().find_map(|line| line.strip_prefix("Uid:")).unwrap();
    users.split_whitespace().next().unwrap().to_owned()
}

/// The directory of what a VM's TPM keeps.
fn state(here: &Installation, vm: &str) -> PathBuf {
    here.images(vm).unwrap()[1].with_extension("tpm")
}

/// Whether the marker is in the clear in a directory.
fn is_readable(directory: &Path) -> bool {
    let files: Vec<_> = std::fs::read_dir(directory).unwrap().map(|it| it.unwrap()).collect();
    assert!(!files.is_empty(), "nothing is kept");
    files.iter().any(|file| {
        let content = std::fs::read(file.path()).unwrap();
        contains(&content, MARKER)
    })
}

/// Has a TPM that does not encrypt keep the marker, in this directory.
fn keep_in_the_clear(directory: &Path) {
    std::fs::create_dir(directory).unwrap();
    for answer in ask_in_the_clear(directory, &[define(), write()]) {
        assert!(answer.starts_with(DONE), "{answer}");
    }
}

/// What a TPM that does not encrypt answers to commands, in hexadecimal. What it keeps is in this directory.
fn ask_in_the_clear(directory: &Path, commands: &[Vec<u8>]) -> Vec<String> {
    let socket = directory.with_extension("sock");
    let mut swtpm = Command::new("swtpm");
    swtpm.args(["socket", "--tpm2", "--flags", "not-need-init,startup-clear", "--terminate"]);
    swtpm.args(["--tpmstate", &format!("dir={}", directory.display())]);
    swtpm.args(["--server", &format!("type=unixio,path={}", socket.display())]);
    let mut swtpm = swtpm.stdin(Stdio::null()).spawn().unwrap();
    let mut stream = eventually("swtpm listens", || UnixStream::connect(&socket).ok()).unwrap();
    let mut answers = Vec::new();
    for command in commands {
        stream.write_all(command).unwrap();
        let mut answer = [0; 4096];
        let length = stream.read(&mut answer).unwrap();
        answers.push(hex(&answer[..length]));
    }
    drop(stream);
    swtpm.wait().unwrap();
    answers
}

#[test]
fn what_a_tpm_keeps_outlives_guests_and_kills_and_is_ciphertext() {
    let mut here = Installation::new().unwrap();
    create(&here, "web", &[]);
    let shown = here.vm("web").unwrap();
    assert_eq!(shown["hardware"]["tpm"], true);
    let disk = &shown["disks"][1];
    assert_eq!(
        (&disk["name"], &disk["role"], &disk["encrypted"]),
        (&"tpm".into(), &"tpm".into(), &true.into())
    );
    let kept = state(&here, "web");
    let at_first = std::fs::read(kept.join("tpm2-00.permall")).unwrap();

    let mut guest = start(&here, "web");
    guest.type_text("echo \"V\"\"ERSION=$(cat /sys/class/tpm/tpm0/tpm_version_major)\"\r").unwrap();
    assert_eq!(guest.expect("VERSION=", 1).unwrap(), "2");
    // The firmware has measured itself into the first register.
    guest.type_text("echo \"P\"\"CR=$(cat /sys/class/tpm/tpm0/pcr-sha256/0)\"\r").unwrap();
    let measured = guest.expect("PCR=", 64).unwrap();
    assert!(measured.bytes().all(|it| it.is_ascii_hexdigit()), "{measured}");
    assert_ne!(measured, "0".repeat(64));
    assert_eq!(ask(&mut guest, &define(), 20), DONE);
    assert_eq!(ask(&mut guest, &write(), 20), DONE);
    keeps(&mut guest);
    assert!(std::fs::read(kept.join("tpm2-00.permall")).unwrap() != at_first);

    // It is no concern of agents and filters.
    drop(guest);
    here.kill_agent();
    for filter in here.processes_of("web", "vmseal-filter").unwrap() {
        kill_hard(filter);
    }
    here.start_agent().unwrap();
    here.wait_host().unwrap();
    let mut guest = here.console("web").unwrap();
    keeps(&mut guest);

    // The guest goes on without it, and has it again at its next start.
    let swtpm = here.processes_of("web", "swtpm").unwrap();
    assert_eq!(swtpm.len(), 1);
    if nix::unistd::geteuid().is_root() {
        let others = ["vmseal-filter", "qemu-system-x86_64"]
            .map(|name| user(here.processes_of("web", name).unwrap()[0]));
        assert!(user(swtpm[0]) != "0" && !others.contains(&user(swtpm[0])), "{others:?}");
    }
    kill_hard(swtpm[0]);
    let told = here.wait_alarm("web", "tpm-died").unwrap();
    assert!(told.contains("vmseal vm start web"), "{told}");
    for needs_it in ["suspend", "reset"] {
        let told = here.refused(&["vm", needs_it, "web"]).unwrap();
        assert!(told.contains("has lost its TPM"), "{needs_it}: {told}");
    }
    guest.type_text("echo \"still\"\" there\"\r").unwrap();
    guest.expect("still there", 0).unwrap();
    drop(guest);
    here.vmseal(&["vm", "stop", "web", "--force"]).unwrap();
    here.wait_no_alarm("web", "tpm-died").unwrap();
    keeps(&mut start(&here, "web"));

    // It does not follow under its guest.
    let second = here.path("second");
    std::fs::create_dir(&second).unwrap();
    let add = ["datastore", "add", "second", "--host", "here", "--path", text(&second).unwrap()];
    here.vmseal(&add).unwrap();
    let to_second = ["vm", "move", "web", "--datastore", "second"];
    let planned = here.try_vmseal(&[&to_second[..], &["--dry-run"]].concat()).unwrap();
    let warned = String::from_utf8_lossy(&planned.stderr).into_owned();
    assert!(warned.contains("stays on datastore 'local', as its guest runs"), "{warned}");
    let told = here.refused(&[&to_second[..], &["--disk", "tpm"]].concat()).unwrap();
    assert!(told.contains("stop the VM first"), "{told}");

    for qemu in here.processes_of("web", "qemu-system-x86_64").unwrap() {
        kill_hard(qemu);
    }
    here.wait_power("web", "off").unwrap();
    here.vmseal(&["vm", "recrypt", "web"]).unwrap();
    // Another data key, and another datastore: the former ones open nothing of it any more, and have nothing of it.
    let of_former_key = std::fs::read(kept.join("tpm2-00.permall")).unwrap();
    here.vmseal(&["vm", "recrypt", "web", "--deep", "--disk", "tpm"]).unwrap();
    assert!(std::fs::read(kept.join("tpm2-00.permall")).unwrap() != of_former_key);
    let home = kept.parent().unwrap().to_owned();
    assert_eq!(kept_in(&home), 1, "what the TPM kept under the former key is left");
    here.vmseal(&to_second).unwrap();
    assert!(!home.exists(), "something of the VM is left on the former datastore");
    let kept = second.join(home.file_name().unwrap()).join(kept.file_name().unwrap());
    keeps(&mut start(&here, "web"));
    here.vmseal(&["vm", "stop", "web", "--force"]).unwrap();
    assert!(here.guest_processes("swtpm").is_empty(), "a TPM goes on without its guest");

    assert!(!is_readable(&kept), "what the TPM keeps is in the clear on the datastore");
    let clear = here.path("clear");
    keep_in_the_clear(&clear);
    assert!(is_readable(&clear), "the search does not find what is there");
    let found = here.json(&["datastore", "scan", "second"]).unwrap();
    assert_eq!(found["others"], 0, "{found}");
    here.vmseal(&["vm", "delete", "web"]).unwrap();
    assert!(!kept.exists(), "what a TPM kept is left");
}

/// Whether the guest's TPM keeps the marker no longer: it answers the question for it with an error.
fn has_forgotten(guest: &mut Console) -> bool {
    // The tag of an answer without a session, which only errors have here.
    ask(guest, &read(), 4) == "8001"
}

/// QEMU saves what the TPM holds with the guest's memory, and loads it into the TPM when the guest goes on.
#[test]
fn a_revert_takes_the_tpm_back_with_memory_and_leaves_it_as_it_is_without() {
    let here = Installation::new().unwrap();
    create(&here, "web", &[]);
    let mut guest = start(&here, "web");
    // QEMU before 9.0 loses a disk that its guest does not use.
    shell_guest::run(&mut guest, "insmod /virtio_blk.ko; echo DRIVER-$((6 * 7))", "DRIVER-42")
        .unwrap();
    assert_eq!(ask(&mut guest, &define(), DONE.len()), DONE);
    assert_eq!(ask(&mut guest, &write(), DONE.len()), DONE);
    here.vmseal(&["snapshot", "create", "web", "disks"]).unwrap();
    let register = measured(&mut guest);
    here.vmseal(&["snapshot", "create", "web", "asleep", "--memory"]).unwrap();
    assert_eq!(ask(&mut guest, &extend(), DONE.len()), DONE);
    assert_ne!(measured(&mut guest), register);
    assert_eq!(ask(&mut guest, &undefine(), DONE.len()), DONE);
    assert!(has_forgotten(&mut guest));
    drop(guest);

    // With memory: what it has measured, and what it keeps, also at the next start.
    here.vmseal(&["snapshot", "revert", "web", "asleep", "--running"]).unwrap();
    let mut guest = here.console("web").unwrap();
    keeps(&mut guest);
    assert_eq!(measured(&mut guest), register);
    drop(guest);
    here.vmseal(&["vm", "stop", "web", "--force"]).unwrap();
    let mut guest = start(&here, "web");
    keeps(&mut guest);

    // Without: what was done to it since stays done. So it does where the memory is given up.
    assert_eq!(ask(&mut guest, &undefine(), DONE.len()), DONE);
    drop(guest);
    here.vmseal(&["vm", "stop", "web", "--force"]).unwrap();
    here.vmseal(&["snapshot", "revert", "web", "disks"]).unwrap();
    assert!(has_forgotten(&mut start(&here, "web")));
    here.vmseal(&["vm", "stop", "web", "--force"]).unwrap();
    here.vmseal(&["snapshot", "revert", "web", "asleep"]).unwrap();
    here.vmseal(&["vm", "start", "web", "--discard-memory"]).unwrap();
    let mut guest = here.console("web").unwrap();
    guest.expect("VMSEAL-NET eth0", 0).unwrap();
    assert!(has_forgotten(&mut guest));
    drop(guest);
    here.vmseal(&["vm", "stop", "web", "--force"]).unwrap();
}

#[test]
fn a_tpm_is_refused_without_encryption_program_or_what_it_keeps() {
    let mut here = Installation::new().unwrap();
    let with = |policy| {
        let disk = "datastore=local,size=1MiB";
        ["vm", "create", "web", "--policy", policy, "--memory", "32MiB", "--disk", disk, "--tpm"]
    };
    for dry in [&[][..], &["--dry-run"]] {
        let told = here.refused(&[&with("plain")[..], dry].concat()).unwrap();
        assert!(told.contains("--tpm") && told.contains("policy that encrypts"), "{told}");
    }
    here.kill_agent();
    // Nor has this host OVMF.
    let empty = here.path("no-firmware");
    std::fs::create_dir(&empty).unwrap();
    let nowhere = ["--swtpm", "/nowhere/swtpm", "--firmware-directory", text(&empty).unwrap()];
    here.start_agent_with(&nowhere).unwrap();
    here.wait_host().unwrap();
    for (more, option, package) in [
        (&["--firmware", "uefi"][..], "--firmware", "package ovmf"),
        (&[], "--tpm", "package swtpm"),
    ] {
        for dry in [&[][..], &["--dry-run"]] {
            let told = here.refused(&[&with("encrypted")[..], more, dry].concat()).unwrap();
            assert!(told.contains(option) && told.contains(package), "{told}");
        }
    }
    assert_eq!(here.json(&["vm", "list"]).unwrap(), Value::Array(Vec::new()));
    here.kill_agent();
    here.start_agent().unwrap();
    here.wait_host().unwrap();

    here.vmseal(&with("encrypted")).unwrap();
    let mut other = with("encrypted");
    other[2] = "other";
    here.vmseal(&other).unwrap();
    let told = here.refused(&["disk", "remove", "web", "tpm"]).unwrap();
    assert!(told.contains("the key of VM 'web''s TPM"), "{told}");
    let target = here.path("tpm.img");
    let export = ["disk", "export", "web", "tpm", "--format", "sealed", "--to"];
    let told = here.refused(&[&export[..], &[text(&target).unwrap()]].concat()).unwrap();
    assert!(told.contains("as raw alone"), "{told}");
    let (kept, others) = (state(&here, "web"), state(&here, "other"));
    let aside = here.path("aside");
    std::fs::rename(&kept, &aside).unwrap();
    for dry in [&["--dry-run"][..], &[]] {
        let told = here.refused(&[&["vm", "start", "web"], dry].concat()).unwrap();
        assert!(told.contains("what the VM's TPM keeps is not there"), "{told}");
    }
    // That of another VM is of another key.
    std::fs::rename(&others, &kept).unwrap();
    let told = here.refused(&["vm", "start", "web"]).unwrap();
    assert!(told.contains("cannot load what it keeps"), "{told}");
    assert!(here.guest_processes("swtpm").is_empty(), "a TPM is left that no guest uses");
    std::fs::rename(&kept, &others).unwrap();
    std::fs::rename(&aside, &kept).unwrap();
    here.vmseal(&["vm", "start", "web"]).unwrap();
    here.vmseal(&["vm", "stop", "web", "--force"]).unwrap();
}

/// A domain of libvirt's with the guest of these tests, and a TPM with this backend.
fn domain(backend: &str) -> String {
    format!(
        "<domain type='kvm'><name>web</name><memory unit='MiB'>192</memory><vcpu>1</vcpu>
         <os><type arch='x86_64'>hvm</type></os>
         <devices><disk type='file' device='disk'><driver name='qemu' type='raw'/>
         <source file='{}'/><target dev='vda' bus='virtio'/></disk>
         <tpm model='tpm-crb'><backend type='emulator' version='2.0'>{backend}</backend></tpm>
         </devices></domain>",
        text(&shell_guest::image().unwrap()).unwrap()
    )
}

/// What libvirt's TPM keeps in the clear becomes what the VM's keeps, as ciphertext; what is no state of a TPM is refused, and nothing is left.
#[test]
fn what_the_tpm_of_a_libvirt_domain_keeps_comes_with_it() {
    let here = Installation::new().unwrap();
    let (clear, xml) = (here.path("swtpm"), here.path("web.xml"));
    keep_in_the_clear(&clear);
    let file = clear.join("tpm2-00.permall");
    let at_first = std::fs::read(&file).unwrap();
    let import = ["vm", "import", "--libvirt", text(&xml).unwrap(), "--policy", "encrypted"];
    let import = [&import[..], &["--datastore", "local", "--nic", "user"]].concat();
    let planned = [&import[..], &["--dry-run"]].concat();

    // It is not known where it is, or it is libvirt's secret: neither is left behind unless somebody says so.
    for (backend, said) in
        [("", "the domain's UUID"), ("<encryption secret='x'/>", "under a secret of libvirt's")]
    {
        std::fs::write(&xml, domain(backend)).unwrap();
        let message = here.refused(&import).unwrap();
        for said in [said, "--tpm-state FILE", "--reset-tpm"] {
            assert!(message.contains(said), "{message}");
        }
        let plan = here.try_vmseal(&[&planned[..], &["--reset-tpm"]].concat()).unwrap();
        let said = String::from_utf8_lossy(&plan.stderr).into_owned();
        assert!(plan.status.success() && said.contains("recovery key"), "{said}");
    }
    let other = here.path("other");
    let named = ["--tpm-state", text(&other).unwrap()];
    let mut encrypted = at_first.clone();
    encrypted[5] = 9;
    for (content, said) in [
        (Some(&at_first[1..]), "no state of a TPM 2.0"),
        (Some(&encrypted[..]), "is encrypted"),
        (None, "No such file"),
    ] {
        match content {
            Some(content) => std::fs::write(&other, content).unwrap(),
            None => std::fs::remove_file(&other).unwrap(),
        }
        for how in [&planned, &import] {
            let message = here.refused(&[&how[..], &named].concat()).unwrap();
            assert!(message.contains("--tpm-state: ") && message.contains(said), "{message}");
        }
    }
    // What only swtpm can tell is refused when the disk is made.
    let mut damaged = at_first.clone();
    damaged[64..].fill(0);
    std::fs::write(&other, &damaged).unwrap();
    let message = here.refused(&[&import[..], &named].concat()).unwrap();
    assert!(message.contains("swtpm does not load it"), "{message}");
    assert_eq!(here.json(&["vm", "list"]).unwrap(), Value::Array(Vec::new()));
    assert_eq!(kept_on(&here), 0, "what a TPM was to keep is left");

    let source = format!("<source type='dir' path='{}'/>", text(&clear).unwrap());
    std::fs::write(&xml, domain(&source)).unwrap();
    here.vmseal(&import).unwrap();
    keeps(&mut start(&here, "web"));
    here.vmseal(&["vm", "stop", "web", "--force"]).unwrap();
    let kept = state(&here, "web");
    assert!(!is_readable(&kept), "what the TPM keeps is in the clear on the datastore");
    assert!(is_readable(&clear), "the search does not find what is there");
    assert!(std::fs::read(&file).unwrap() == at_first, "the domain's own was changed");
    // It goes on as any other TPM.
    here.vmseal(&["vm", "recrypt", "web"]).unwrap();
    keeps(&mut start(&here, "web"));
    here.vmseal(&["vm", "stop", "web", "--force"]).unwrap();
    // An empty one does not keep it.
    here.vmseal(&["vm", "delete", "web"]).unwrap();
    here.vmseal(&[&import[..], &["--reset-tpm"]].concat()).unwrap();
    assert!(has_forgotten(&mut start(&here, "web")));
    here.vmseal(&["vm", "stop", "web", "--force"]).unwrap();

    // It comes with images alone as well, for a VM that is given a TPM.
    here.vmseal(&["vm", "delete", "web"]).unwrap();
    let disk =
        format!("datastore=local,format=raw,image={}", shell_guest::image().unwrap().display());
    let import = ["vm", "import", "web", "--policy", "encrypted", "--memory", "192MiB", "--disk"];
    let import = [&import[..], &[disk.as_str(), "--tpm-state", text(&file).unwrap()]].concat();
    let message = here.refused(&import).unwrap();
    assert!(message.contains("--tpm-state: is for a VM with a TPM"), "{message}");
    here.vmseal(&[&import[..], &["--tpm", "--nic", "user"]].concat()).unwrap();
    keeps(&mut start(&here, "web"));
    here.vmseal(&["vm", "stop", "web", "--force"]).unwrap();
}

/// What a VM's TPM keeps goes out as the file that libvirt's swtpm has, in the clear and on record, and comes in again with its VM.
#[test]
fn what_a_tpm_keeps_leaves_with_its_vm_and_comes_back() {
    let here = Installation::new().unwrap();
    create(&here, "web", &[]);
    let (out, xml) = (here.path("out"), here.path("web.xml"));
    std::fs::create_dir(&out).unwrap();
    let file = out.join("tpm2-00.permall");
    let export = ["disk", "export", "web", "tpm", "--to", text(&file).unwrap(), "--format"];
    let raw = [&export[..], &["raw", "--plaintext"]].concat();
    let mut guest = start(&here, "web");
    for command in [define(), write()] {
        assert_eq!(ask(&mut guest, &command, DONE.len()), DONE);
    }
    drop(guest);
    assert!(here.refused(&raw).unwrap().contains("stop it first"));
    here.vmseal(&["vm", "stop", "web", "--force"]).unwrap();
    for (how, said) in [
        (&["qcow2", "--plaintext"][..], "as raw alone"),
        (&["sealed"], "as raw alone"),
        (&["raw"], "--plaintext"),
    ] {
        let told = here.refused(&[&export[..], how].concat()).unwrap();
        assert!(told.contains(said), "{how:?}: {told}");
    }
    here.vmseal(&[&raw[..], &["--dry-run"]].concat()).unwrap();
    assert_eq!(std::fs::read_dir(&out).unwrap().count(), 0);

    here.vmseal(&raw).unwrap();
    assert!(here.guest_processes("swtpm").is_empty(), "a TPM is left that no guest uses");
    let told = "what the TPM keeps, of disk 'tpm' to";
    let events = here.json(&["events"]).unwrap().to_string();
    assert!(events.contains(told) && events.contains("IN THE CLEAR"), "{events}");
    assert!(is_readable(&out), "it is not in the clear");
    assert_eq!(file.metadata().unwrap().mode() & 0o777, 0o600);
    assert!(!is_readable(&state(&here, "web")), "it is in the clear on the datastore");
    assert!(here.refused(&raw).unwrap().contains("is there already"));
    // The VM has it still.
    keeps(&mut start(&here, "web"));
    here.vmseal(&["vm", "stop", "web", "--force"]).unwrap();

    let shown = ["vm", "show", "web", "--libvirt", "--images", text(&out).unwrap()];
    let shown = here.try_vmseal(&shown).unwrap();
    let said = String::from_utf8_lossy(&shown.stderr).into_owned();
    // The commands that it says do what it says; what is for root puts the file where libvirt of this machine would have it.
    for disk in ["disk0", "tpm"] {
        let begin = format!("vmseal disk export web {disk} ");
        let command = said.lines().find_map(|it| it.trim().strip_prefix(&begin)).unwrap();
        let command: Vec<_> = command.split_whitespace().collect();
        here.vmseal(&[&["disk", "export", "web", disk][..], &command[..]].concat()).unwrap();
    }
    let exported = out.join("web-tpm2-00.permall");
    let placed = format!("install -D -m 600 {} /var/lib/libvirt/swtpm/", text(&exported).unwrap());
    assert!(said.contains(&placed), "{said}");
    std::fs::write(&xml, &shown.stdout).unwrap();
    here.vmseal(&["vm", "delete", "web"]).unwrap();

    // A swtpm without a key, as libvirt's, loads it and goes on with it.
    let swtpm = here.path("swtpm");
    std::fs::create_dir(&swtpm).unwrap();
    let kept = swtpm.join("tpm2-00.permall");
    std::fs::copy(&file, &kept).unwrap();
    let answers = ask_in_the_clear(&swtpm, &[read()]);
    assert!(answers[0].contains(&format!("0010{}", hex(MARKER))), "{answers:?}");
    for state in [&exported, &kept] {
        let import = ["vm", "import", "--libvirt", text(&xml).unwrap(), "--policy", "encrypted"];
        let more = ["--datastore", "local", "--tpm-state", text(state).unwrap()];
        here.vmseal(&[&import[..], &more].concat()).unwrap();
        keeps(&mut start(&here, "web"));
        here.vmseal(&["vm", "stop", "web", "--force"]).unwrap();
        here.vmseal(&["vm", "delete", "web"]).unwrap();
    }
}

/// The directories of TPMs on the datastore.
fn kept_on(here: &Installation) -> usize {
    let vms = std::fs::read_dir(here.path("datastore")).unwrap().map(|it| it.unwrap().path());
    vms.filter(|it| it.is_dir()).map(|home| kept_in(&home)).sum()
}

/// The directories in that of a VM, which has none but those of its TPM.
fn kept_in(home: &Path) -> usize {
    let entries = std::fs::read_dir(home).unwrap().map(|it| it.unwrap().path());
    entries.filter(|path| path.is_dir()).count()
}

#[test]
fn a_vm_gets_a_tpm_and_loses_it_with_what_it_keeps() {
    let here = Installation::new().unwrap();
    let disk =
        format!("datastore=local,format=raw,image={}", shell_guest::image().unwrap().display());
    let create = ["vm", "create", "web", "--policy", "encrypted", "--disk", &disk];
    here.vmseal(&[&create[..], &["--nic", "user", "--memory", "192MiB"]].concat()).unwrap();
    let (on, off) = (["vm", "set", "web", "--tpm", "on"], ["vm", "set", "web", "--tpm", "off"]);

    let mut guest = start(&here, "web");
    assert!(!has_tpm(&mut guest));
    let told = here.refused(&on).unwrap();
    assert!(told.contains("stop it first"), "{told}");
    drop(guest);
    here.vmseal(&["vm", "stop", "web", "--force"]).unwrap();
    let together = here.refused(&[&on[..], &["--vcpus", "2"]].concat()).unwrap();
    assert!(together.contains("cannot be used with"), "{together}");
    let planned = here.vmseal(&[&on[..], &["--dry-run"]].concat()).unwrap();
    assert!(planned.contains("create the disk"), "{planned}");
    assert_eq!((kept_on(&here), here.images("web").unwrap().len()), (0, 1));

    here.vmseal(&on).unwrap();
    assert_eq!(here.vm("web").unwrap()["hardware"]["tpm"], true);
    assert_eq!((kept_on(&here), here.images("web").unwrap().len()), (1, 2));
    let mut guest = start(&here, "web");
    assert!(has_tpm(&mut guest));
    assert_eq!(ask(&mut guest, &define(), DONE.len()), DONE);
    assert_eq!(ask(&mut guest, &write(), DONE.len()), DONE);
    let told = here.refused(&[&off[..], &["--yes"]].concat()).unwrap();
    assert!(told.contains("stop it first"), "{told}");
    drop(guest);
    here.vmseal(&["vm", "stop", "web", "--force"]).unwrap();
    keeps(&mut start(&here, "web"));
    here.vmseal(&["vm", "stop", "web", "--force"]).unwrap();

    // What it keeps is destroyed only when somebody has said so.
    let told = here.refused(&off).unwrap();
    assert!(told.contains("stays closed for good") && told.contains("--yes"), "{told}");
    assert!(!here.answered(&off, "no\n").unwrap().status.success());
    here.vmseal(&[&off[..], &["--dry-run"]].concat()).unwrap();
    assert_eq!(kept_on(&here), 1);
    let said = here.answered(&off, "yes\n").unwrap();
    assert!(said.status.success(), "{said:?}");
    assert_eq!((kept_on(&here), here.images("web").unwrap().len()), (0, 1));
    assert!(here.vm("web").unwrap()["hardware"].get("tpm").is_none());
    let told = here.refused(&[&off[..], &["--yes"]].concat()).unwrap();
    assert!(told.contains("has no TPM"), "{told}");
    assert!(!has_tpm(&mut start(&here, "web")));
    here.vmseal(&["vm", "stop", "web", "--force"]).unwrap();

    // Another one is a new one.
    here.vmseal(&on).unwrap();
    let mut guest = start(&here, "web");
    assert!(ask(&mut guest, &read(), DONE.len()) != DONE && has_tpm(&mut guest));
    drop(guest);
    here.vmseal(&["vm", "stop", "web", "--force"]).unwrap();
    here.vmseal(&[&off[..], &["--yes"]].concat()).unwrap();
}
