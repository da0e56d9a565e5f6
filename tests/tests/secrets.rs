//! The key scan: searches for known keys, in every form in which programs leak them, in all that an
//! installation leaves on disk, in the arguments and environments of its processes, in their memory, and in
//! what a crash of each leaves.
//!
//! | process | may hold in ordinary memory | may not |
//! |---|---|---|
//! | server | | any KEK, DEK, key-derivation key, passphrase |
//! | agent | | any KEK or DEK, passphrase |
//! | filter | DEKs: its ciphers' key schedules begin with them, in memory that is locked and not dumped | any KEK |
//! | QEMU | | any of them |
//!
//! Server, agent and filter log all that they can ([`LOUDEST`]) while the installation is used.
//!
//! `memfd_secret`, where keys are meant to be, cannot be read from outside, not even by root.

#![allow(clippy::unwrap_used)] // a test that cannot go on ends

use std::fs::File;
use std::io::Write;
use std::os::fd::AsFd;
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use aws_lc_rs::hkdf::{HKDF_SHA256, KeyType, Salt};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use uuid::Uuid;
use vmseal_luks::Facts;
use vmseal_secret::derive::{KeyContext, check_value};
use vmseal_secret::passphrase::open_with_passphrase;
use vmseal_secret::{Backing, KEK_LEN, SecretBytes};
use vmseal_tests::eventually;
use vmseal_tests::installation::{Installation, LOUDEST, PASSPHRASE};
use vmseal_tests::rest::keep_metrics;
use vmseal_tests::scan::{Find, Needle, Scanner, forms};
use vmseal_tests::skipped;

/// The keys of an installation with one encrypted VM, got without asking any of its processes.
struct Keys {
    root: Vec<u8>,
    kek: Vec<u8>,
    dek: Vec<u8>,
}

impl Keys {
    /// Opens the provider's backup with its passphrase, derives the KEK as docs/formats says, and opens the
    /// disk with it.
    fn of(here: &Installation, vm: &str) -> Self {
        let shown = here.vm(vm).unwrap();
        let id = |value: &serde_json::Value| Uuid::parse_str(value.as_str().unwrap()).unwrap();
        let key_id = shown["key"]["key_id"].as_str().unwrap();
        let provider = id(&shown["key"]["provider"]);
        let root = root_key(&here.path("keys.backup"));
        assert_eq!(root.expose()[..16], *provider.as_bytes(), "the backup is another provider's");
        let kek = derive_kek(&root, key_id);

        let context = KeyContext {
            vm: id(&shown["id"]).into_bytes(),
            provider: provider.into_bytes(),
            key_id,
        };
        let check = check_value(&kek, &context).unwrap().to_string();
        assert_eq!(shown["key"]["check"], check, "this is not the VM's KEK");
        let disk = &shown["disks"][0];
        let facts = Facts::new(id(&disk["id"]), disk["size"].as_u64().unwrap()).unwrap();
        let image = File::open(&here.images(vm).unwrap()[0]).unwrap();
        let opened = vmseal_luks::open(&image, &facts, &kek, &context).unwrap();
        Self {
            root: root.expose()[16..].to_vec(),
            kek: kek.expose().to_vec(),
            dek: opened.dek.expose().to_vec(),
        }
    }

    fn kek_forms(&self) -> Vec<Needle> {
        let passphrase =
            Needle { name: "the passphrase".to_owned(), bytes: PASSPHRASE.as_bytes().to_vec() };
        let mut needles = forms("the KEK", &self.kek);
        needles.extend(forms("the key-derivation key", &self.root));
        needles.push(passphrase);
        needles
    }

    fn forms(&self) -> Vec<Needle> {
        [self.kek_forms(), forms("the DEK", &self.dek)].concat()
    }
}

/// docs/formats/native-key-file.md: the provider's id and its key-derivation key, under the passphrase.
fn root_key(backup: &Path) -> SecretBytes {
    let mut passphrase = PASSPHRASE.as_bytes().to_vec();
    let passphrase = SecretBytes::from_wiped(&mut passphrase).unwrap();
    let sealed = std::fs::read(backup).unwrap();
    let root =
        open_with_passphrase(&sealed, &passphrase, b"vmseal native provider backup v1").unwrap();
    assert_eq!(root.len(), 16 + 32);
    root
}

struct Kek;
impl KeyType for Kek {
    fn len(&self) -> usize {
        KEK_LEN
    }
}

fn derive_kek(root: &SecretBytes, key_id: &str) -> SecretBytes {
    let (provider, derivation_key) = root.expose().split_at(16);
    let info = [b"vmseal native provider KEK v1\0", provider, key_id.as_bytes()];
    let mut kek = [0; KEK_LEN];
    let derived = Salt::new(HKDF_SHA256, &[]).extract(derivation_key);
    derived.expand(&info, Kek).unwrap().fill(&mut kek).unwrap();
    SecretBytes::from_wiped(&mut kek).unwrap()
}

/// What is typed at a guest; without the letters that its guest takes for commands.
const TYPED: &str = "A-SECRET-ONLY-THE-GUEST-MAY-HEAR-4711";

/// Create, start, stop, start; restarts of agent and server while the VM runs; again a stop and a start.
/// In the end the VM runs.
fn used_installation() -> Installation {
    let mut here = Installation::logging(LOUDEST).unwrap();
    here.create_counter("sealed", "encrypted").unwrap();
    assert_eq!(here.boot_counter("sealed").unwrap(), 1);
    here.vmseal(&["vm", "stop", "sealed", "--force"]).unwrap();
    assert_eq!(here.boot_counter("sealed").unwrap(), 2);
    here.kill_agent();
    here.start_agent().unwrap();
    here.kill_server();
    here.start_server().unwrap();
    here.wait_host().unwrap();
    wait_held(&here);
    here.vmseal(&["vm", "stop", "sealed", "--force"]).unwrap();
    assert_eq!(here.boot_counter("sealed").unwrap(), 3);
    here
}

fn wait_held(here: &Installation) {
    let held = eventually("the key is on the host", || {
        here.vm("sealed").ok().filter(|vm| vm["key_state"] == "held")
    });
    held.unwrap();
}

/// The files that hold a secret because that is their purpose: the passphrase that the tests give, the
/// credential in place of systemd's.
fn passphrase_files(here: &Installation) -> Vec<PathBuf> {
    vec![here.path("passphrase"), here.path("credentials/vmseal-provider-keys")]
}

fn nothing(found: Vec<Find>) {
    assert!(found.is_empty(), "secrets were found: {found:#?}");
}

fn one(found: Vec<i32>) -> i32 {
    assert_eq!(found.len(), 1, "{found:?}");
    found[0]
}

struct Processes {
    server: i32,
    agent: i32,
    filter: i32,
    qemu: i32,
}

impl Processes {
    fn of(here: &Installation) -> Self {
        let own = here.own_processes();
        Self {
            server: own[0],
            agent: own[1],
            filter: one(here.processes_of("sealed", "vmseal-filter").unwrap()),
            qemu: one(here.processes_of("sealed", "qemu-system-x86_64").unwrap()),
        }
    }

    fn all(&self) -> [(&'static str, i32); 4] {
        let Self { server, agent, filter, qemu } = *self;
        [("server", server), ("agent", agent), ("filter", filter), ("QEMU", qemu)]
    }
}

fn is_root() -> bool {
    let root = nix::unistd::Uid::effective().is_root();
    if !root {
        skipped("the memory of processes that are not dumpable can be read by root alone");
    }
    root
}

#[test]
fn no_key_is_in_files_arguments_environments_or_memory() {
    let here = used_installation();
    let keys = Keys::of(&here, "sealed");
    let scanner = Scanner::new(keys.forms()).unwrap();
    let processes = Processes::of(&here);

    keep_metrics(&here).unwrap();
    all_is_logged(&here);
    nothing(scanner.directory(&here.path(""), &passphrase_files(&here)).unwrap());
    for (_, pid) in processes.all() {
        nothing(scanner.arguments_and_environment(pid).unwrap());
    }
    if !is_root() {
        return;
    }
    nothing(scanner.memory(processes.server).unwrap());
    nothing(scanner.memory(processes.qemu).unwrap());
    nothing(scanner.memory(processes.agent).unwrap());
    nothing(Scanner::new(keys.kek_forms()).unwrap().memory(processes.filter).unwrap());

    // The search reaches what these processes hold: the filter's key schedules are there to be found,
    // and in locked memory.
    let found = scanner.memory(processes.filter).unwrap();
    assert!(
        found.iter().any(|find| find.needle.contains("half, raw")),
        "no DEK where one must be: the search does not work"
    );
    for (what, pid) in &processes.all()[..3] {
        let locked = status(*pid, "VmLck:") >= status(*pid, "RssAnon:");
        // Where the agent may not raise the limit for a filter's user, this is said.
        let told = *what == "filter" && here.weakness("filter processes may not lock").unwrap();
        assert!(locked != told, "the {what}'s memory: locked {locked}, told not to be {told}");
        assert_eq!(status(*pid, "VmSwap:"), 0, "{what}");
    }
}

/// A field of `/proc/PID/status`, in KiB.
fn status(pid: i32, field: &str) -> u64 {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
    let line = status.lines().find(|line| line.starts_with(field)).unwrap();
    line.split_whitespace().nth(1).unwrap().parse().unwrap()
}

#[test]
fn tokens_are_in_no_log_database_argument_or_environment() {
    let here = used_installation();
    let admin = std::fs::read_to_string(here.path("server/admin.token")).unwrap();
    let join = std::fs::read_to_string(here.path("join.token")).unwrap();
    // What follows the dot is the authority's fingerprint, which is public.
    let join = join.split('.').next().unwrap();
    let needles = [("the administrator's token", admin.trim()), ("the join token", join)]
        .map(|(name, token)| Needle { name: name.to_owned(), bytes: token.as_bytes().to_vec() });
    let scanner = Scanner::new(needles.to_vec()).unwrap();
    let own_files = [here.path("server/admin.token"), here.path("join.token")];
    keep_metrics(&here).unwrap();
    nothing(scanner.directory(&here.path(""), &own_files).unwrap());
    for (_, pid) in Processes::of(&here).all() {
        nothing(scanner.arguments_and_environment(pid).unwrap());
    }
    // The log is not empty: there was something to search.
    assert!(std::fs::metadata(here.path("server/inventory.db")).unwrap().len() > 0);
    all_is_logged(&here);
}

/// Server, agent and filter have logged at the lowest levels.
fn all_is_logged(here: &Installation) {
    for log in ["server.log", "agent.log"] {
        let text = std::fs::read_to_string(here.path(log)).unwrap();
        assert!(text.contains("DEBUG request{request_id="), "{log} is not loud: {text}");
    }
    let filter = std::fs::read_to_string(run_directory(here).join("filter.log")).unwrap();
    assert!(filter.contains(&format!("logging={LOUDEST}")), "{filter}");
}

/// Where the agent keeps the logs of the VM.
fn run_directory(here: &Installation) -> PathBuf {
    here.path("run/vms").join(here.vm("sealed").unwrap()["id"].as_str().unwrap())
}

#[test]
fn what_is_typed_at_a_console_is_in_no_log() {
    let here = used_installation();
    let mut console = here.console("sealed").unwrap();
    assert_eq!(console.next_count().unwrap(), 3);
    console.type_text(TYPED).unwrap();
    // The guest echoes what it can keep up with: what was typed has gone all the way.
    console.expect("-", 0).unwrap();
    let scanner = Scanner::new(forms("what was typed", TYPED.as_bytes())).unwrap();
    // QEMU records what the guest answers, for whoever opens the console later.
    let recorded = run_directory(&here).join("console.log");
    assert!(recorded.exists());
    keep_metrics(&here).unwrap();
    nothing(scanner.directory(&here.path(""), &[recorded]).unwrap());
    all_is_logged(&here);
}

/// `Max core file size` of a process, in bytes, soft and hard.
fn core_limits(pid: i32) -> (String, String) {
    let limits = std::fs::read_to_string(format!("/proc/{pid}/limits")).unwrap();
    let line = limits.lines().find(|line| line.starts_with("Max core file size")).unwrap();
    let mut fields = line["Max core file size".len()..].split_whitespace();
    (fields.next().unwrap().to_owned(), fields.next().unwrap().to_owned())
}

/// Sends it twice: Rust's own handler of SIGSEGV takes the first one, finds no stack overflow, and removes
/// itself.
fn send(pid: i32, signal: Signal) {
    kill(Pid::from_raw(pid), signal).unwrap();
    std::thread::sleep(Duration::from_millis(50));
    let _ = kill(Pid::from_raw(pid), signal);
}

/// Whether a file below the directory looks like a core: an ELF file of type 4.
fn cores(directory: &Path) -> Vec<PathBuf> {
    let mut files = vmseal_tests::scan::regular_files(directory).unwrap();
    files.retain(|path| {
        let mut head = [0; 18];
        let read =
            File::open(path).and_then(|mut file| std::io::Read::read_exact(&mut file, &mut head));
        read.is_ok() && head.starts_with(b"\x7fELF") && head[16..18] == 4u16.to_le_bytes()
    });
    files
}

/// Where a process would leave a core of that name pattern: its own directory.
fn working_directory(pid: i32) -> PathBuf {
    std::fs::read_link(format!("/proc/{pid}/cwd")).unwrap()
}

#[test]
fn a_crash_of_any_process_leaves_no_core_and_no_key() {
    for signal in [Signal::SIGABRT, Signal::SIGSEGV] {
        let mut here = used_installation();
        let keys = Keys::of(&here, "sealed");
        let scanner = Scanner::new(keys.forms()).unwrap();
        let processes = Processes::of(&here);
        let mut places: Vec<PathBuf> = Vec::new();
        for (what, pid) in processes.all() {
            // A limit of 1 forbids a file and a pipe to a crash handler alike.
            assert_eq!(core_limits(pid), ("1".to_owned(), "1".to_owned()), "{what}");
            places.push(working_directory(pid));
        }
        let before: Vec<_> = places.iter().map(|place| listing(place)).collect();

        // The filter first: its guest gets another one only while the agent runs.
        send(processes.filter, signal);
        here.wait_alarm("sealed", "filter-restarted").unwrap();
        send(one(here.processes_of("sealed", "qemu-system-x86_64").unwrap()), signal);
        here.wait_power("sealed", "off").unwrap();
        here.vmseal(&["vm", "start", "sealed"]).unwrap();
        send(processes.agent, signal);
        send(processes.server, signal);
        for status in here.wait_for_ends().unwrap() {
            assert_eq!(status.signal(), Some(signal as i32), "{status:?}");
            assert!(!status.core_dumped(), "it dumped its core");
        }

        for (place, before) in places.iter().zip(before) {
            let mut left = listing(place);
            left.retain(|name| !before.contains(name) && name.contains("core"));
            assert!(left.is_empty(), "{}: {left:?}", place.display());
        }
        assert!(cores(&here.path("")).is_empty(), "{:?}", cores(&here.path("")));
        nothing(scanner.directory(&here.path(""), &passphrase_files(&here)).unwrap());
        here.start_server().unwrap();
        here.start_agent().unwrap();
        here.wait_power("sealed", "running").unwrap();
    }
}

fn listing(directory: &Path) -> Vec<String> {
    let entries = std::fs::read_dir(directory).unwrap();
    entries.flatten().map(|entry| entry.file_name().to_string_lossy().into_owned()).collect()
}

/// A process that holds these bytes in its memory, and in its arguments or environment on request.
struct Holder(Child);

impl Holder {
    fn start(memory: &[u8], argument: &str, environment: &str) -> Self {
        let mut child = Command::new("python3")
            .args(["-c", "import sys; b = sys.stdin.buffer; held = b.read(int(sys.argv[1])); print('ready', flush=True); b.read()"])
            .arg(memory.len().to_string())
            .arg(argument)
            .env("HELD", environment)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        child.stdin.as_mut().unwrap().write_all(memory).unwrap();
        let mut ready = [0; 6];
        std::io::Read::read_exact(child.stdout.as_mut().unwrap(), &mut ready).unwrap();
        Self(child)
    }
}

impl Drop for Holder {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// The search finds every form, in files and in memory: otherwise the tests above would prove nothing.
#[test]
fn a_planted_secret_is_found_in_every_form_and_place() {
    use base64::Engine;
    let secret: Vec<u8> = (0..32u8).map(|byte| byte.wrapping_mul(37) ^ 0xa5).collect();
    let scanner = Scanner::new(forms("the secret", &secret)).unwrap();
    let hex: String = secret.iter().map(|byte| format!("{byte:02x}")).collect();
    let encode = |before: &[u8], after: &[u8]| {
        let engine = base64::engine::general_purpose::STANDARD;
        engine.encode([before, &secret, after].concat()).into_bytes()
    };
    // Each made in another way than the scanner makes its needles.
    let planted: Vec<(&str, Vec<u8>)> = vec![
        ("raw", secret.clone()),
        ("hexadecimal", hex.clone().into_bytes()),
        ("upper-case hexadecimal", hex.to_uppercase().into_bytes()),
        ("base64 at 0", encode(b"", b"!")),
        ("base64 at 1", encode(b"x", b"yz")),
        ("base64 at 2", encode(b"xy", b"")),
        ("base64 at 0", encode(b"xyz", b"abc")),
        ("as numbers", format!("{secret:?}").into_bytes()),
        ("as JSON", serde_json::to_vec(&secret).unwrap()),
        ("first half, raw", [b"ab", &secret[..16], b"cd"].concat()),
        ("second half, raw", [b"ab", &secret[16..], b"cd"].concat()),
        ("second half, hexadecimal", [b"ab", &hex.as_bytes()[32..], b"cd"].concat()),
    ];
    let directory = tempfile::tempdir().unwrap();
    for (form, bytes) in &planted {
        // Across the border between two pieces of a large file.
        for offset in [0, 1, (4 << 20) - 5, 9 << 20] {
            let path = directory.path().join("planted");
            let mut content = vec![0; 10 << 20];
            content[offset..offset + bytes.len()].copy_from_slice(bytes);
            std::fs::write(&path, content).unwrap();
            let found = scanner.directory(directory.path(), &[]).unwrap();
            assert!(
                found.iter().any(|find| find.needle.ends_with(form)),
                "{form} at {offset}: {found:?}"
            );
            assert!(scanner.directory(directory.path(), &[path]).unwrap().is_empty());
        }
        if is_root() {
            let holder = Holder::start(bytes, "nothing", "nothing");
            let pid = holder.0.id().cast_signed();
            let found = scanner.memory(pid).unwrap();
            assert!(
                found.iter().any(|find| find.needle.ends_with(form)),
                "{form} in memory: {found:?}"
            );
            nothing(scanner.arguments_and_environment(pid).unwrap());
        }
    }
    for (argument, environment) in [(&*hex, "nothing"), ("nothing", &*hex)] {
        let holder = Holder::start(b"x", argument, environment);
        let pid = holder.0.id().cast_signed();
        assert!(!scanner.arguments_and_environment(pid).unwrap().is_empty());
    }
}

/// What the tests above count on: root cannot read `memfd_secret` through `/proc/PID/mem`.
#[test]
fn secret_memory_is_out_of_reach() {
    let secret = SecretBytes::random(KEK_LEN).unwrap();
    if !is_root() {
        return;
    }
    if secret.backing() != Backing::SecretMemory {
        skipped("the kernel has no memfd_secret");
        return;
    }
    let mut child = Command::new("python3")
        .args(["-c", "import mmap, time; m = mmap.mmap(0, 0); m[0]; print('ready', flush=True); time.sleep(60)"])
        .stdin(Stdio::from(secret.to_memfd().unwrap().as_fd().try_clone_to_owned().unwrap()))
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    std::io::Read::read_exact(child.stdout.as_mut().unwrap(), &mut [0; 6]).unwrap();
    let holder = Holder(child);
    let pid = holder.0.id().cast_signed();
    let maps = std::fs::read_to_string(format!("/proc/{pid}/maps")).unwrap();
    assert!(maps.contains("secretmem"), "{maps}");
    let needle = Needle { name: "the secret".to_owned(), bytes: secret.expose().to_vec() };
    nothing(Scanner::new(vec![needle]).unwrap().memory(pid).unwrap());
}
