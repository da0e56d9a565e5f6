//! `vmseal init`: a machine from nothing to encrypted VMs, also in several goes.

#![allow(clippy::unwrap_used)] // a test that cannot go on ends

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader};
use std::net::Ipv4Addr;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdout, Command, Output, Stdio};

use nix::sys::signal::{Signal, kill};
use nix::unistd::{Pid, geteuid};
use tempfile::TempDir;
use vmseal_tests::as_user::as_user;
use vmseal_tests::guest::counter_disk;
use vmseal_tests::installation::{DISK_SIZE, PASSPHRASE, next_address};
use vmseal_tests::process::{Process, using};
use vmseal_tests::terminal::at_terminal;
use vmseal_tests::{eventually, program, skipped};

const KEY: &str =
    "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIDu0bKR0wAYc5z1f3Yv0J1mZ2c9bS7mUqkq3v1Qh9w1c me\n";

/// Has a program find, in a mount namespace of its own, the test's images where those with a name are: the first argument is what is
/// at /var/lib then.
const OWN_IMAGES: &str = "mount --bind \"$0\" /var/lib && exec \"$@\"";

/// What init does, in order, as its lines begin.
const STEPS: [&str; 11] = [
    "directories",
    "server",
    "login",
    "passphrase",
    "host",
    "agent",
    "datastore",
    "key provider",
    "backup",
    "default provider",
    "policy",
];

/// A machine that init is tried on.
struct Machine {
    directory: TempDir,
    address: Ipv4Addr,
}

impl Machine {
    fn new() -> Self {
        let directory = tempfile::Builder::new().prefix("vmseal-init-").tempdir().unwrap();
        std::fs::set_permissions(directory.path(), PermissionsExt::from_mode(0o711)).unwrap();
        std::fs::create_dir(directory.path().join("home")).unwrap();
        Self { directory, address: next_address() }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }

    fn vmseal(&self) -> Command {
        let mut command = Command::new(program("vmseal").unwrap());
        command.env("HOME", self.path("home")).env_remove("XDG_CONFIG_HOME").stdin(Stdio::null());
        command
    }

    /// The same command where root's images are the test's own. It takes root.
    fn with_own_images(&self, of: &Command) -> Command {
        let mut command = Command::new("unshare");
        command.args(["--mount", "sh", "-c", OWN_IMAGES]).arg(self.path("lib"));
        command.arg(of.get_program()).args(of.get_args()).stdin(Stdio::null());
        for (name, value) in of.get_envs() {
            match value {
                Some(value) => command.env(name, value),
                None => command.env_remove(name),
            };
        }
        command
    }

    fn init(&self, more: &[&str]) -> Command {
        let mut command = self.vmseal();
        command.args(["init", "--foreground", "--accelerator", "tcg", "--host", "here"]);
        for (option, place) in [
            ("--datastore", "datastore"),
            ("--data-dir", "server"),
            ("--state-dir", "agent"),
            ("--run-dir", "run"),
            ("--config-dir", "etc"),
            ("--log-dir", "log"),
        ] {
            command.arg(option).arg(self.path(place));
        }
        command.arg("--listen").arg(format!("{}:8443", self.address));
        command.arg("--agent-listen").arg(format!("{}:8444", self.address));
        command.args(more);
        command
    }

    /// Runs a command to its end.
    fn run(&self, arguments: &[&str]) -> Output {
        self.vmseal().args(arguments).output().unwrap()
    }

    fn ok(&self, arguments: &[&str]) -> String {
        let output = self.run(arguments);
        let said = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "vmseal {arguments:?}: {said}");
        String::from_utf8(output.stdout).unwrap()
    }

    /// Every file, with what is in it.
    fn files(&self) -> BTreeMap<PathBuf, Vec<u8>> {
        let (mut found, mut todo) = (BTreeMap::new(), vec![self.directory.path().to_owned()]);
        while let Some(directory) = todo.pop() {
            found.insert(directory.clone(), Vec::new());
            for entry in std::fs::read_dir(directory).unwrap().map(Result::unwrap) {
                match entry.file_type().unwrap().is_dir() {
                    true => todo.push(entry.path()),
                    false => drop(found.insert(entry.path(), std::fs::read(entry.path()).unwrap())),
                }
            }
        }
        found
    }

    /// The server or the agent.
    fn process(&self, role: &str) -> i32 {
        let plays = |pid: &i32| {
            let line = std::fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
            line.split(|byte| *byte == 0).nth(1) == Some(role.as_bytes())
        };
        using(self.directory.path()).into_iter().find(plays).unwrap()
    }

    fn all_have_ended(&self) {
        eventually("all processes have ended", || {
            using(self.directory.path()).is_empty().then_some(())
        })
        .unwrap();
    }
}

impl Drop for Machine {
    fn drop(&mut self) {
        using(self.directory.path()).into_iter().for_each(vmseal_tests::process::kill_hard);
    }
}

/// A run, line by line; killed when dropped.
struct Run {
    child: Child,
    lines: std::io::Lines<BufReader<ChildStdout>>,
    said: tempfile::NamedTempFile,
}

impl Run {
    fn start(mut command: Command) -> Self {
        let said = tempfile::NamedTempFile::new().unwrap();
        command.stdout(Stdio::piped()).stderr(said.reopen().unwrap());
        let mut child = command.spawn().unwrap();
        let lines = BufReader::new(child.stdout.take().unwrap()).lines();
        Self { child, lines, said }
    }

    /// What is said of a step; every step before it has to be said first.
    fn step(&mut self, wanted: &str) -> String {
        let Some(line) = self.lines.next() else {
            let said = std::fs::read_to_string(&self.said).unwrap_or_default();
            panic!("it ended before {wanted}: {said}");
        };
        let line = line.unwrap();
        let told = line.strip_prefix(wanted).unwrap_or_else(|| panic!("no {wanted}: {line}"));
        told.trim_start().to_owned()
    }

    /// All steps; gives those that had something to do.
    fn steps(&mut self) -> Vec<&'static str> {
        STEPS.into_iter().filter(|step| self.step(step).starts_with("done: ")).collect()
    }

    /// Reads on until it stays in the foreground.
    fn until_it_stays(&mut self) -> String {
        let mut said = String::new();
        loop {
            let line = self.lines.next().expect("it ended").unwrap();
            said += &line;
            if line.contains("until Ctrl-C") {
                return said;
            }
        }
    }

    /// Ctrl-C.
    fn interrupt(mut self) {
        kill(Pid::from_raw(self.child.id().cast_signed()), Signal::SIGINT).unwrap();
        assert!(self.child.wait().unwrap().success());
    }
}

impl Drop for Run {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn mode(path: &Path) -> u32 {
    path.metadata().unwrap().permissions().mode() & 0o777
}

#[test]
fn one_command_makes_a_machine_that_runs_encrypted_vms_and_a_second_one_changes_nothing() {
    let here = Machine::new();
    let before = here.files();
    let tried = here.init(&["--yes", "--dry-run"]).output().unwrap();
    let told = String::from_utf8(tried.stdout).unwrap();
    assert!(tried.status.success(), "{told}");
    for step in STEPS {
        assert!(told.contains(&format!(". {step}: ")), "{step}: {told}");
    }
    assert_eq!(here.files(), before, "a dry run has changed something");

    let mut first = Run::start(here.init(&["--yes"]));
    assert_eq!(first.steps(), STEPS);
    let (kept, backup) =
        (here.path("etc/credentials/vmseal-provider-keys"), here.path("home/vmseal-keys.backup"));
    let said = first.until_it_stays();
    assert!(said.contains(backup.to_str().unwrap()) && said.contains(kept.to_str().unwrap()));
    assert_eq!((mode(&kept), mode(&backup)), (0o600, 0o600));
    // What ends by itself is started again, and said.
    for role in ["server", "agent"] {
        vmseal_tests::process::kill_hard(here.process(role));
        let told = first.lines.next().expect("it ended").unwrap();
        assert!(told.starts_with(&format!("The {role} has ended")), "{told}");
    }
    eventually("server and agent are back", || {
        let columns = ["host", "list", "-o=csv", "-c=connection", "--no-header"];
        let listed = here.run(&columns);
        (String::from_utf8_lossy(&listed.stdout).trim() == "connected").then_some(())
    })
    .unwrap();
    here.ok(&["vm", "create", "web1", "--policy=encrypted", "--disk=datastore=local,size=1MiB"]);

    // While it runs, and after it has ended.
    let files = || [&kept, &backup].map(|file| std::fs::read(file).unwrap());
    let whole = files();
    let tried = here.init(&["--yes", "--dry-run"]).output().unwrap();
    assert!(String::from_utf8(tried.stdout).unwrap().contains("nothing is to be done"));
    let mut second = Run::start(here.init(&["--yes"]));
    assert_eq!(second.steps(), [""; 0]);
    assert!(second.child.wait().unwrap().success(), "it stays with nothing of its own");
    first.interrupt();
    here.all_have_ended();
    let mut third = Run::start(here.init(&["--yes"]));
    assert_eq!(third.steps(), ["server", "agent"]);
    third.until_it_stays();
    assert_eq!(files(), whole);
    // The kept passphrase has unlocked the keys.
    here.ok(&["vm", "create", "web2", "--policy=encrypted", "--disk=datastore=local,size=1MiB"]);

    // What is missing is made again.
    std::fs::remove_dir_all(here.path("home/.config")).unwrap();
    let mut fourth = Run::start(here.init(&["--yes"]));
    assert_eq!(fourth.steps(), ["login"]);
    third.interrupt();
}

/// The second command of the README, with an image of the test's own: an agent that was told of no directories reads images with a name. A
/// user who is not root launches what root has; in a directory of the user's, which the agent does not read, none is built.
#[test]
fn the_first_vm_is_launched_from_an_image_with_a_name() {
    if !geteuid().is_root() {
        skipped("it takes root");
        return;
    }
    let here = Machine::new();
    let images = here.path("lib/vmseal/images");
    std::fs::create_dir_all(&images).unwrap();
    counter_disk(&images.join("counter.raw"), DISK_SIZE).unwrap();
    let mut run = Run::start(here.with_own_images(&here.init(&["--yes"])));
    assert_eq!(run.steps(), STEPS);
    run.until_it_stays();
    let key = here.path("home/key.pub");
    std::fs::write(&key, KEY).unwrap();
    let launch = |by: &Command, options: &[&str]| {
        let mut command = here.with_own_images(by);
        command.args(["vm", "launch", "--memory=256M", "--timeout=1s"]).args(options);
        let output = command.arg("--ssh-key").arg(&key).output().unwrap();
        (output.status.code(), String::from_utf8(output.stderr).unwrap())
    };
    // This guest has no SSH server: it runs, and the wait for it ends.
    let runs = |by: &Command, vm: &str| {
        let (code, said) = launch(by, &[vm, "--image=counter", "--disk-size=16M"]);
        assert_eq!(code, Some(6), "{said}");
        assert!(said.contains("nothing answers as an SSH server"), "{said}");
        let shown = here.ok(&["vm", "list", "-o=csv", "-c=name,power,policy", "--no-header"]);
        assert!(shown.contains(&format!("{vm},running,encrypted")), "{shown}");
        here.ok(&["vm", "stop", vm, "--force"]);
    };
    runs(&here.vmseal(), "web1");
    if let Some(user) = as_user(&here.vmseal()) {
        runs(&user, "web2");
        let (code, said) = launch(&user, &["web3", "--image=debian"]);
        assert_eq!(code, Some(2), "{said}");
        for told in ["sudo vmseal image build debian", "host 'here'", ".cache/vmseal/images"] {
            assert!(said.contains(told), "{said}");
        }
        assert!(!said.contains("building") && !here.path("home/.cache").exists(), "{said}");
    }
    run.interrupt();
}

#[test]
fn a_run_that_is_killed_after_any_step_is_gone_on_with() {
    let here = Machine::new();
    let passphrase = here.path("home/passphrase");
    std::fs::write(&passphrase, PASSPHRASE).unwrap();
    let given = ["--passphrase-file", passphrase.to_str().unwrap()];
    let backup = here.path("home/vmseal-keys.backup");
    let kept = here.path("etc/credentials/vmseal-provider-keys");
    for (number, last) in STEPS.into_iter().enumerate() {
        // Somebody types it in until it is kept, and every later run is given the same.
        let (command, _terminal) = match kept.exists() {
            true => (here.init(&given), None),
            false => {
                let typed = format!("{PASSPHRASE}\n{PASSPHRASE}\n");
                let (command, terminal) = at_terminal(&here.init(&[]), &typed).unwrap();
                (command, Some(terminal))
            }
        };
        let mut run = Run::start(command);
        // It may be a little further by then.
        STEPS[..=number].iter().for_each(|step| drop(run.step(step)));
        drop(run);
        here.all_have_ended();
        match last {
            // The server was told, and the machine has forgotten it.
            "host" => std::fs::remove_file(here.path("agent/identity.json")).unwrap(),
            // Written, and not verified.
            "key provider" if !backup.exists() => {
                std::fs::write(&backup, "no backup").unwrap();
                let refused = here.init(&given).output().unwrap();
                let said = String::from_utf8(refused.stderr).unwrap();
                assert!(!refused.status.success() && said.contains("no backup of this"), "{said}");
                here.all_have_ended();
                std::fs::remove_file(&backup).unwrap();
                write_backup(&here, &given, &backup);
            }
            _ => {}
        }
        if last == "host" {
            let mut run = Run::start(here.init(&given));
            let told: Vec<_> = STEPS[..=number].iter().map(|step| run.step(step)).collect();
            assert!(told[number].starts_with("done: "), "{told:?}");
            drop(run);
            here.all_have_ended();
        }
    }
    let mut whole = Run::start(here.init(&given));
    assert_eq!(whole.steps(), ["server", "agent"]);
    whole.until_it_stays();
    here.ok(&["vm", "create", "web1", "--policy=encrypted", "--disk=datastore=local,size=1MiB"]);
    assert_eq!(here.ok(&["host", "list", "-o=csv", "-c=name", "--no-header"]).trim(), "here");
    whole.interrupt();
}

/// What a run leaves that is killed between the backup and its verification.
fn write_backup(here: &Machine, given: &[&str], backup: &Path) {
    let mut command = here.vmseal();
    command.arg("server").arg("--data-dir").arg(here.path("server"));
    command.arg("--listen").arg(format!("{}:8443", here.address));
    command.env("CREDENTIALS_DIRECTORY", here.path("etc/credentials"));
    let server = Process::start(&mut command, &here.path("log/server.log")).unwrap();
    eventually("the server answers", || here.run(&["host", "list"]).status.success().then_some(()))
        .unwrap();
    let to = ["provider", "backup", "keys", "--to", backup.to_str().unwrap()];
    here.ok(&[&to, given].concat());
    server.kill();
}

#[test]
fn what_could_not_work_is_refused_before_anything_is_changed() {
    let here = Machine::new();
    let before = here.files();
    let short = here.path("home").join("short");
    let inside = here.path("datastore/keys.backup");
    for (more, code, why) in [
        (&["--yes", "--qemu", "/nowhere"][..], 1, "qemu"),
        (&["--yes", "--filter", "/nowhere"], 1, "filter"),
        (&[], 2, "--passphrase-file FILE, or --yes"),
        (&["--yes", "--no-keep-passphrase"], 2, "would be lost"),
        (&["--passphrase-file", short.to_str().unwrap()], 1, "short"),
        (&["--yes", "--backup", inside.to_str().unwrap()], 2, "lost with it"),
        (&["--yes", "--backup", "/nowhere/keys.backup"], 1, "--backup FILE"),
        (&["--yes", "-o", "json"], 2, "--dry-run"),
    ] {
        let output = here.init(more).output().unwrap();
        let said = String::from_utf8(output.stderr).unwrap();
        assert_eq!(output.status.code(), Some(code), "{more:?}: {said}");
        assert!(said.contains(why), "{more:?}: {said}");
        assert_eq!(here.files(), before, "{more:?}");
    }
    let _taken = std::net::TcpListener::bind((here.address, 8443)).unwrap();
    let output = here.init(&["--yes"]).output().unwrap();
    let said = String::from_utf8(output.stderr).unwrap();
    assert!(said.contains("nothing can listen") && said.contains("--listen"), "{said}");
    assert_eq!(here.files(), before);
}
