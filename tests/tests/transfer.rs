//! Import of images and export of disks, through the command line, with QEMU's own tools as the judge.

#![allow(clippy::unwrap_used)] // a test that cannot go on ends

use std::fs::File;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use vmseal_tests::eventually;
use vmseal_tests::installation::{Installation, text};
use vmseal_tests::kills::has_its_turn;
use vmseal_tests::process::kill_hard;

const FILTER: &str = "vmseal-filter";

/// How large the image is whose import is interrupted: large enough for several flushes.
const LARGE: u64 = 512 << 20;

fn run(program: &str, arguments: &[&str]) -> String {
    let ran = Command::new(program).args(arguments).output().unwrap();
    let (out, error) = (String::from_utf8_lossy(&ran.stdout), String::from_utf8_lossy(&ran.stderr));
    assert!(ran.status.success(), "{program} {arguments:?}: {out}{error}");
    out.into_owned()
}

fn qemu_img(arguments: &[&str]) -> String {
    run("qemu-img", arguments)
}

/// What of a file is allocated, in bytes.
fn allocated(path: &Path) -> u64 {
    path.metadata().unwrap().blocks() * 512
}

/// A command of the CLI that makes a small VM from an image.
fn import(here: &Installation, vm: &str, policy: &str, image: &Path, format: &str) {
    let disk = format!("datastore=local,image={},format={format}", text(image).unwrap());
    here.vmseal(&["vm", "import", vm, "--policy", policy, "--memory", "32MiB", "--disk", &disk])
        .unwrap();
}

/// The counting guest as a qcow2 image of 256 MiB, all but its first sectors a hole.
fn counter_qcow2(here: &Installation) -> PathBuf {
    let image = here.path("counter.qcow2");
    let counter = here.counter_image().unwrap();
    let (from, to) = (text(&counter).unwrap(), text(&image).unwrap());
    qemu_img(&["convert", "-f", "raw", "-O", "qcow2", from, to]);
    qemu_img(&["resize", "-q", "-f", "qcow2", to, "256M"]);
    image
}

#[test]
fn a_qcow2_image_comes_in_sparse_and_boots() {
    let here = Installation::new().unwrap();
    let image = counter_qcow2(&here);
    let before = std::fs::read(&image).unwrap();
    import(&here, "sealed", "encrypted", &image, "qcow2");
    assert!(std::fs::read(&image).unwrap() == before, "the source was changed");
    let shown = here.vm("sealed").unwrap();
    assert_eq!(shown["disks"][0]["size"], 256 << 20, "the size comes from the image");
    let used = allocated(&here.images("sealed").unwrap()[0]);
    println!("{used} bytes are allocated of a disk of {}", 256 << 20);
    assert!(used < 2 << 20, "{used} bytes are allocated");
    assert_eq!(here.boot_counter("sealed").unwrap(), 1);
}

#[test]
fn what_cannot_be_imported_is_refused_and_leaves_nothing() {
    let here = Installation::new().unwrap();
    let image = counter_qcow2(&here);
    let image = text(&image).unwrap();
    let overlay = here.path("overlay.qcow2");
    qemu_img(&["create", "-q", "-f", "qcow2", "-b", image, "-F", "qcow2", text(&overlay).unwrap()]);
    let create = |options: &str| {
        let disk = format!("datastore=local,{options}");
        let arguments = ["vm", "import", "x", "--policy", "encrypted", "--disk", &disk];
        here.try_vmseal(&arguments).unwrap()
    };
    // There is no terminal here.
    let output = create(&format!("image={image}"));
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(2), "{said}");
    assert!(said.contains("give the format") && said.contains("format=qcow2"), "{said}");
    for (options, reason) in [
        (format!("image={},format=qcow2,size=256MiB", text(&overlay).unwrap()), "backing file"),
        (format!("image={image},format=qcow2,size=128MiB"), "make the disk larger"),
        (format!("image={image}.none,format=qcow2,size=1MiB"), "No such file"),
        ("image=/etc/hostname,format=qcow2,size=1MiB".to_owned(), "not a qcow2 image"),
    ] {
        let output = create(&options);
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(!output.status.success() && said.contains(reason), "{options}: {said}");
    }
    // A disk that is added later is as one that was there.
    let disk = ["--disk", "datastore=local,size=1MiB"];
    here.vmseal(&[&["vm", "create", "y", "--policy", "plain"][..], &disk].concat()).unwrap();
    let disk = format!("datastore=local,size=1MiB,name=more,image={image},format=raw");
    let add = ["disk", "add", "y", "--disk", &disk, "--dry-run"];
    for add in [&add[..], &add[..5]] {
        assert!(here.refused(add).unwrap().contains("--force"));
    }
    here.vmseal(&[&add[..], &["--force"]].concat()).unwrap();
    here.vmseal(&["vm", "delete", "y"]).unwrap();
    let writer = File::options().append(true).open(image).unwrap();
    let said = create(&format!("image={image},format=qcow2")).stderr;
    let said = String::from_utf8_lossy(&said).into_owned();
    assert!(said.contains("open for writing"), "{said}");
    drop(writer);
    assert!(here.datastore_entries(&here.path("datastore")).unwrap().is_empty());
    assert!(here.refused(&["vm", "show", "x"]).unwrap().contains("no VM"));
    let tasks = here.json(&["task", "list"]).unwrap();
    let is_done = |task: &serde_json::Value| task["state"] == "done";
    assert!(tasks.as_array().unwrap().iter().all(is_done), "a task was begun: {tasks}");
}

/// An export is slowed, paused and goes on, and the file holds what the disk does.
#[test]
fn an_export_is_slowed_and_paused_and_goes_on() {
    let here = Installation::new().unwrap();
    let (image, to) = (here.path("random.raw"), here.path("out.raw"));
    let content: Vec<u8> = std::iter::repeat_with(|| fastrand::u8(..)).take(48 << 20).collect();
    std::fs::write(&image, &content).unwrap();
    import(&here, "web", "encrypted", &image, "raw");
    let disk = here.vm("web").unwrap()["disks"][0]["name"].as_str().unwrap().to_owned();
    let export = ["disk", "export", "web", &disk, "--format", "raw", "--plaintext"];
    let slowly = ["--to", text(&to).unwrap(), "--rate", "4MiB", "--no-wait"];
    let task = here.json(&[&export[..], &slowly].concat()).unwrap();
    let id = task["id"].as_str().unwrap();
    let shown = || here.json(&["task", "show", id]).unwrap();
    eventually("it has begun", || shown()["progress"]["done"].as_u64().filter(|done| *done > 0))
        .unwrap();
    here.vmseal(&["task", "pause", id]).unwrap();
    let mut before = 0;
    eventually("it stands still", || {
        let done = shown()["progress"]["done"].as_u64()?;
        let stands = done == std::mem::replace(&mut before, done);
        std::thread::sleep(std::time::Duration::from_secs(1));
        stands.then_some(())
    })
    .unwrap();
    assert!(before < 48 << 20, "it is complete: {}", shown());
    assert_eq!((&shown()["paused"], shown()["rate"].as_u64()), (&true.into(), Some(4 << 20)));
    here.vmseal(&["task", "set", id, "--rate", "0"]).unwrap();
    assert_eq!(shown()["progress"]["done"], before, "it goes on though it is paused");
    here.vmseal(&["task", "resume", id]).unwrap();
    here.vmseal(&["task", "wait", id]).unwrap();
    assert!(std::fs::read(&to).unwrap() == content, "the file holds something else");
}

/// The half-made disk of an import that runs, and the note beside it, once there is one.
fn noted(here: &Installation) -> (PathBuf, u64) {
    eventually("an import has noted how far it is", || {
        let files = here.datastore_entries(&here.path("datastore")).ok()?;
        let note = files.iter().find(|file| file.extension().is_some_and(|e| e == "importing"))?;
        let text = std::fs::read_to_string(note).ok()?;
        let durable = serde_json::from_str::<serde_json::Value>(&text).ok()?["durable"].as_u64()?;
        Some((note.with_extension("creating"), durable))
    })
    .unwrap()
}

/// A raw image of [`LARGE`] bytes without a hole.
fn noise(here: &Installation) -> PathBuf {
    let image = here.path("large.raw");
    let file = File::create(&image).unwrap();
    let mut noise = vec![0; 1 << 20];
    for at in (0..LARGE).step_by(1 << 20) {
        noise.iter_mut().enumerate().for_each(|(i, byte)| *byte = (at >> 20) as u8 ^ i as u8 | 1);
        file.write_all_at(&noise, at).unwrap();
    }
    image
}

/// Kills the filters of guests and disks, the agent, or the server; brings back what does not come by itself.
fn kill(here: &mut Installation, victim: &str) {
    match victim {
        "filter" => here.guest_processes(FILTER).into_iter().for_each(kill_hard),
        "agent" => {
            here.kill_agent();
            here.start_agent().unwrap();
        }
        _ => {
            here.kill_server();
            here.start_server().unwrap();
            here.wait_host().unwrap();
        }
    }
}

/// Kills at a moment when a part is flushed and noted. What is changed in that part meanwhile is still
/// changed in the end: it was not written again. All else is as the image has it.
#[test]
fn an_import_goes_on_after_a_kill_of_filter_agent_and_server() {
    if !has_its_turn() {
        return;
    }
    let mut here = Installation::new().unwrap();
    let image = noise(&here);
    // One that is encrypted goes on with the key that its half-made disk was begun with.
    for (victim, policy) in [("filter", "plain"), ("agent", "encrypted"), ("server", "plain")] {
        let disk = format!("datastore=local,image={},format=raw", text(&image).unwrap());
        let mut command = here.command().unwrap();
        command.args(["vm", "import", victim, "--policy", policy, "--no-wait", "--disk", &disk]);
        let data = if policy == "encrypted" { LUKS_DATA } else { 0 };
        assert!(command.stdout(Stdio::null()).status().unwrap().success());
        let (half_made, durable) = noted(&here);
        assert!(durable < LARGE, "it was over before it could be killed");
        let mark = [0x42; 4096];
        let changed = File::options().write(true).open(&half_made).unwrap();
        changed.write_all_at(&mark, data + 8192).unwrap();
        kill(&mut here, victim);
        here.wait_made(victim).unwrap();
        let mut made = here.images(victim).unwrap().remove(0);
        if policy == "encrypted" {
            made = here.path("decrypted");
            let fixed = ["disk", "export", victim, "disk0", "--format", "raw", "--plaintext"];
            here.vmseal(&[&fixed[..], &["--to", text(&made).unwrap()]].concat()).unwrap();
        }
        let made = File::open(made).unwrap();
        let source = File::open(&image).unwrap();
        let (mut a, mut b) = (vec![0; 1 << 20], vec![0; 1 << 20]);
        for at in (0..LARGE).step_by(1 << 20) {
            made.read_exact_at(&mut a, at).unwrap();
            source.read_exact_at(&mut b, at).unwrap();
            if at == 0 {
                assert!(a[8192..12288] != b[8192..12288], "{victim}: it started again");
                b[8192..12288].copy_from_slice(&a[8192..12288]);
            }
            assert!(a == b, "{victim}: the disk differs in the MiB at {at}");
        }
        let left = here.datastore_entries(&here.path("datastore")).unwrap();
        let debris = left.iter().filter(|file| file.to_string_lossy().contains(".raw."));
        assert_eq!(debris.count(), 0, "{victim}: {left:?}");
        here.vmseal(&["vm", "delete", victim]).unwrap();
    }
}

/// A file has its name only when it is whole, and nothing half-written stays, whatever dies in the middle.
#[test]
fn an_export_that_is_killed_is_whole_or_not_there() {
    if !has_its_turn() {
        return;
    }
    let mut here = Installation::new().unwrap();
    let image = noise(&here);
    import(&here, "web", "plain", &image, "raw");
    let out = here.path("out");
    std::fs::create_dir(&out).unwrap();
    let files = || std::fs::read_dir(&out).unwrap().map(|entry| entry.unwrap().path());
    for victim in ["filter", "agent", "server"] {
        let to = out.join(victim);
        let mut command = here.command().unwrap();
        command.args(["disk", "export", "web", "disk0", "--format", "raw", "--plaintext"]);
        let begun = command.args(["--no-wait", "-o", "json", "--to", text(&to).unwrap()]).output();
        let begun = begun.unwrap();
        assert!(begun.status.success(), "{}", String::from_utf8_lossy(&begun.stderr));
        let task: serde_json::Value = serde_json::from_slice(&begun.stdout).unwrap();
        let half = eventually("an export writes", || {
            files()
                .find(|file| !to.exists() && allocated(file) > 32 << 20 && allocated(file) < LARGE)
        });
        assert_ne!(half.unwrap(), to, "half a file has the whole one's name");
        kill(&mut here, victim);
        let ended = eventually("the export ends", || {
            let task = here.json(&["task", "show", task["id"].as_str()?]).ok()?;
            Some(task).filter(|task| !task["ended"].is_null())
        });
        let ended = ended.unwrap();
        let left: Vec<PathBuf> = files().collect();
        if victim == "filter" {
            assert_eq!(
                (ended["state"].as_str(), left.len()),
                (Some("failed"), 0),
                "{ended} {left:?}"
            );
            let why = ended["problem"]["detail"].as_str().unwrap();
            assert!(why.contains("SIGKILL"), "{why}");
            continue;
        }
        assert_eq!((ended["state"].as_str(), left), (Some("done"), vec![to.clone()]), "{ended}");
        assert!(std::fs::read(&to).unwrap() == std::fs::read(&image).unwrap(), "{victim}: differs");
        std::fs::remove_file(&to).unwrap();
    }
}

/// What `cryptsetup reencrypt` makes of a file's bytes under a volume key, but for the first 4096-byte
/// sector; the data begins at 16 MiB.
fn encrypted_by_cryptsetup(here: &Installation, plain: &Path, key: &Path) -> PathBuf {
    let image = here.path("theirs.luks");
    std::fs::copy(plain, &image).unwrap();
    let length = plain.metadata().unwrap().len() + 2 * LUKS_DATA;
    let file = File::options().write(true).open(&image).unwrap();
    file.set_len(length).unwrap();
    // cryptsetup takes a boot sector's mark for a damaged header, and encrypts nothing then.
    file.write_all_at(&[0; 2], 510).unwrap();
    let fixed = "reencrypt --encrypt --force-offline-reencrypt --batch-mode --type luks2 \
        --reduce-device-size 32M --cipher aes-xts-plain64 --key-size 512 --sector-size 4096 \
        --pbkdf pbkdf2 --pbkdf-force-iterations 1000";
    let mut arguments: Vec<&str> = fixed.split_whitespace().collect();
    let (key, passphrase) = (text(key).unwrap(), here.path("passphrase"));
    arguments.extend(["--volume-key-file", key, "--key-file", text(&passphrase).unwrap()]);
    arguments.push(text(&image).unwrap());
    run("/usr/sbin/cryptsetup", &arguments);
    image
}

/// A directory that is mounted read-only until this is dropped.
struct ReadOnly(PathBuf);

impl ReadOnly {
    fn mount(directory: &Path) -> Self {
        let name = text(directory).unwrap();
        run("mount", &["--bind", name, name]);
        let mounted = Self(directory.to_owned());
        run("mount", &["-o", "remount,bind,ro", name]);
        assert!(File::create(directory.join("new")).is_err(), "{name} is not read-only");
        mounted
    }
}

impl Drop for ReadOnly {
    fn drop(&mut self) {
        // A test that failed may have a process left that uses it.
        run("umount", &["--lazy", text(&self.0).unwrap()]);
    }
}

/// Where the data of a LUKS2 volume begins, in bytes.
const LUKS_DATA: u64 = 16 << 20;

#[test]
fn a_disk_goes_out_as_it_came_in_and_opens_with_other_tools() {
    let here = Installation::new().unwrap();
    let image = counter_qcow2(&here);
    let source = text(&image).unwrap();
    import(&here, "web", "encrypted", &image, "qcow2");
    let out = |name: &str| text(&here.path(name)).unwrap().to_owned();
    let export = |format: &str, more: &[&str]| {
        let to = out(&format!("out.{format}"));
        let fixed = ["disk", "export", "web", "disk0", "--format", format, "--to", &to];
        here.try_vmseal(&[&fixed, more].concat()).unwrap()
    };
    let done = |format: &str, more: &[&str]| {
        let output = export(format, more);
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    };
    // In the clear only when that is said; with a terminal it would be asked for a passphrase.
    for (format, more) in [("raw", &[][..]), ("qcow2", &[]), ("luks2", &["--plaintext"])] {
        assert_eq!(export(format, more).status.code(), Some(2), "{format}");
    }
    for format in ["raw", "qcow2"] {
        done(format, &["--plaintext"]);
        let file = out(&format!("out.{format}"));
        qemu_img(&["compare", "-f", "qcow2", "-F", format, source, &file]);
        let used = allocated(Path::new(&file));
        println!("{format}: {used} bytes are allocated of a disk of {}", 256 << 20);
        assert!(used < 2 << 20, "{format}: {used} bytes are allocated");
        assert_eq!(Path::new(&file).metadata().unwrap().mode() & 0o777, 0o600);
    }
    assert!(qemu_img(&["check", "-f", "qcow2", &out("out.qcow2")]).contains("No errors"));
    let refused = export("raw", &["--plaintext"]);
    let said = String::from_utf8_lossy(&refused.stderr).into_owned();
    assert!(!refused.status.success() && said.contains("is there already"), "{said}");

    let passphrase = out("passphrase");
    done("luks2", &["--passphrase-file", &passphrase]);
    let volume = out("out.luks2");
    let cryptsetup = "/usr/sbin/cryptsetup";
    run(cryptsetup, &["open", "--test-passphrase", "--key-file", &passphrase, &volume]);
    let dump = run(cryptsetup, &["luksDump", &volume]);
    assert!(!dump.contains("vmseal") && dump.contains("argon2id"), "{dump}");
    let key = out("volume.key");
    let dumped = ["luksDump", "--batch-mode", "--dump-volume-key", "--volume-key-file", &key];
    run(cryptsetup, &[&dumped[..], &["--key-file", &passphrase, &volume]].concat());
    let theirs = encrypted_by_cryptsetup(&here, Path::new(&out("out.raw")), Path::new(&key));
    let (ours, theirs) = (File::open(&volume).unwrap(), File::open(theirs).unwrap());
    let (mut a, mut b) = (vec![0; 1 << 20], vec![0; 1 << 20]);
    for at in (LUKS_DATA..LUKS_DATA + (256 << 20)).step_by(1 << 20) {
        ours.read_exact_at(&mut a, at).unwrap();
        theirs.read_exact_at(&mut b, at).unwrap();
        let from = if at == LUKS_DATA { 4096 } else { 0 };
        assert!(
            a[from..] == b[from..],
            "the volume's data differs from what cryptsetup writes, at {at}"
        );
    }
    let events = here.json(&["events"]).unwrap().to_string();
    assert!(events.contains("IN THE CLEAR") && events.contains("under a passphrase"));
    let datastore = ReadOnly::mount(&here.path("datastore"));
    done("sealed", &[]);
    std::fs::remove_file(out("out.luks2")).unwrap();
    done("luks2", &["--passphrase-file", &passphrase]);
    drop(datastore);
    put_back(&here, &out("out.sealed"));
    assert_eq!(here.boot_counter("web").unwrap(), 1);
    let refused = here.refused(&[
        "disk",
        "export",
        "web",
        "disk0",
        "--format",
        "raw",
        "--to",
        "/x",
        "--plaintext",
    ]);
    assert!(refused.unwrap().contains("stop it first"));
    assert!(here.vmseal(&["disk", "list"]).unwrap().contains("LUKS2"));
}

/// A disk that is lost is put back as docs/transfer.md says; its holes stay holes.
fn put_back(here: &Installation, sealed: &str) {
    let image = here.images("web").unwrap().remove(0);
    File::options().write(true).open(&image).unwrap().set_len(0).unwrap();
    assert!(here.refused(&["vm", "start", "web"]).unwrap().contains("truncated"));
    let new = format!("{}.new", text(&image).unwrap());
    run("cp", &["--sparse=always", sealed, &new]);
    run("sync", &[&new]);
    run("mv", &[&new, text(&image).unwrap()]);
    assert!(allocated(&image) < 2 << 20, "{} bytes are allocated", allocated(&image));
}

#[test]
fn a_libvirt_domain_comes_in_and_what_runs_is_shown_as_one() {
    let here = Installation::new().unwrap();
    let image = counter_qcow2(&here);
    let second = here.path("data.img");
    File::create(&second).unwrap().set_len(4 << 20).unwrap();
    let iso = here.path("install.iso");
    std::fs::write(&iso, [7; 4096]).unwrap();
    let domain = include_str!("../../crates/cli/tests/libvirt/web.xml")
        .replace("/srv/install.iso", text(&iso).unwrap())
        .replace("/var/lib/libvirt/images/web.qcow2", text(&image).unwrap())
        .replace("/srv/data.img", text(&second).unwrap());
    let xml = here.path("web.xml");
    std::fs::write(&xml, &domain).unwrap();
    let fixed =
        ["vm", "import", "--policy", "encrypted", "--datastore", "local", "--memory", "32MiB"];
    let with_its_tpm = [&fixed[..], &["--libvirt", text(&xml).unwrap()]].concat();
    // No libvirt of this machine has it.
    let of_domain = [&with_its_tpm[..], &["--reset-tpm"]].concat();
    let planned = [&of_domain[..], &["--dry-run"]].concat();
    // A host of these tests has no bridge.
    assert!(here.refused(&planned).unwrap().contains("no bridge 'br0'"));
    let bridge = "<interface type='bridge'><source bridge='br0'/>";
    // At an address of the loopback that nothing else is at.
    let passt = "<interface type='user'><backend type='passt'/><portForward proto='tcp' address='127.77.0.1'>
                 <range start='20080' to='80'/><range start='80'/></portForward>";
    std::fs::write(&xml, domain.replace(bridge, passt)).unwrap();
    let told = here.refused(&[&with_its_tpm[..], &["--dry-run"]].concat()).unwrap();
    let missing =
        "/var/lib/libvirt/swtpm/4dea22b3-1d52-d8f3-2516-782e98ab3fa0/tpm2/tpm2-00.permall";
    for told_of in [missing, "--tpm-state", "--reset-tpm"] {
        assert!(told.contains(told_of), "{told}");
    }
    // Its second disk is an image of a Ceph cluster: a copy of that is taken.
    let (file, rbd) = ("type='file' device='disk'", "type='network' device='disk'");
    let source = format!("<source file='{}'/>", text(&second).unwrap());
    let on_ceph = domain.replace(bridge, passt).replacen(file, rbd, 1);
    let on_ceph = on_ceph.replace(&source, "<source protocol='rbd' name='vms/data'/>");
    let usual = std::fs::read(&xml).unwrap();
    std::fs::write(&xml, on_ceph).unwrap();
    let told = here.refused(&planned).unwrap();
    assert!(told.contains("(rbd export vms/data FILE)"), "{told}");
    let copy = format!("vda:{}", text(&second).unwrap());
    here.vmseal(&[&planned[..], &["--image", &copy]].concat()).unwrap();
    std::fs::write(&xml, usual).unwrap();
    let plan = here.vmseal(&planned).unwrap();
    assert!(plan.contains("uefi-variables (") && plan.contains("tpm ("), "{plan}");
    let output = here.try_vmseal(&planned).unwrap();
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(said.contains("not imported: the network card"), "{said}");
    assert!(said.contains("--network default:user"), "{said}");
    let other = [&planned[..], &["--network", "lab:user"]].concat();
    assert!(here.refused(&other).unwrap().contains("no network 'lab'"));
    // The domain has UEFI, and the guest of its disks a boot loader for BIOS.
    let more = ["--firmware", "bios", "--network", "default:user,forward=tcp:22"];
    let output = here.try_vmseal(&[&of_domain[..], &more].concat()).unwrap();
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(output.status.success() && !said.contains("'default'"), "{said}");
    assert!(said.contains("not imported: what the TPM keeps"), "{said}");
    assert!(said.contains("ports below 1024") && said.contains("<metadata>"), "{said}");
    let shown = here.vm("web").unwrap();
    let cards = shown["nics"].as_array().unwrap();
    assert_eq!(cards.len(), 2, "{shown}");
    assert_eq!(cards[0]["backend"]["forwards"][0]["guest_port"], 22, "{shown}");
    let forwards = cards[1]["backend"]["forwards"].as_array().unwrap();
    assert_eq!((forwards.len(), &forwards[0]["host_port"]), (1, &20080.into()), "{shown}");
    assert_eq!(shown["description"], "Web server: Serves the shop & its <customers>");
    let names =
        ["disks/0/name", "disks/1/name"].map(|at| shown.pointer(&format!("/{at}")).unwrap());
    assert_eq!((names[0], names[1], &shown["vcpus"]), (&"vdb".into(), &"vda".into(), &2.into()));
    let off = here.try_vmseal(&["vm", "show", "web", "--libvirt"]).unwrap();
    let said = String::from_utf8_lossy(&off.stderr).into_owned();
    assert!(said.contains("leads to tcp 22 of the guest by network card 'nic0'"), "{said}");
    let off = String::from_utf8(off.stdout).unwrap();
    assert!(off.contains("<range start='20080' to='80'/>"), "{off}");
    let listed = here.vmseal(&["nic", "list"]).unwrap();
    for port in ["tcp:127.0.0.1:any:22", "tcp:127.77.0.1:20080:80"] {
        assert!(listed.contains(port), "{listed}");
    }
    let file = "<source file='/var/lib/libvirt/images/web-vdb.qcow2'/>";
    assert!(off.contains(file) && !off.contains(".sock"), "{off}");
    assert_eq!(
        here.boot_counter("web").unwrap(),
        1,
        "it does not boot from the disk that is first"
    );

    let printed = here.vmseal(&["vm", "show", "web", "--libvirt"]).unwrap();
    // As it came: a TPM, a file in the drive, and a start from the network after the disks.
    let in_drive = format!("<source file='{}'/>", text(&iso).unwrap());
    let chosen = here.vm("web").unwrap()["nics"][0]["forwards"][0]["host_port"].as_u64().unwrap();
    let chosen = format!("<range start='{chosen}' to='22'/>");
    for taken in [
        "<tpm model='tpm-crb'>",
        &in_drive,
        "<boot order='3'/>",
        "<description>Web server: Serves the shop &amp; its &lt;customers&gt;</description>",
        &chosen,
        "<portForward proto='tcp' address='127.77.0.1'>",
        "<range start='20080' to='80'/>",
    ] {
        assert!(printed.contains(taken), "{taken}: {printed}");
    }
    let sockets =
        printed.lines().filter_map(|line| line.trim().strip_prefix("<source type='unix' path='"));
    let sockets: Vec<&str> = sockets.map(|rest| rest.split('\'').next().unwrap()).collect();
    assert_eq!(sockets.len(), 2);
    for socket in sockets {
        use std::os::unix::fs::FileTypeExt;
        let kind = Path::new(socket).metadata().unwrap().file_type();
        assert!(kind.is_socket(), "{socket} is no socket");
    }
    let file = here.path("printed.xml");
    std::fs::write(&file, printed).unwrap();
    run("virt-xml-validate", &[text(&file).unwrap(), "domain"]);
}
