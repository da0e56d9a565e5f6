//! The command line as scripts use it: exit codes, formats, watching, waiting, dry runs.

#![allow(clippy::unwrap_used)] // a test that cannot go on ends

use std::io::{BufRead, BufReader, Read, Write};
use std::os::fd::OwnedFd;
use std::process::{Child, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::time::Duration;

use nix::pty::Winsize;
use nix::sys::signal::{Signal, kill};
use nix::sys::termios::{LocalFlags, tcgetattr};
use nix::unistd::Pid;
use serde_json::Value;
use vmseal_tests::eventually;
use vmseal_tests::installation::{Installation, create, text};

/// How long a line that has to come may take.
const TIMEOUT: Duration = Duration::from_secs(60);

/// A command that goes on printing, read line by line.
struct Watch {
    child: Child,
    lines: Receiver<String>,
}

impl Watch {
    fn start(here: &Installation, arguments: &[&str]) -> Self {
        let mut command = here.command().unwrap();
        let mut child = command.args(arguments).stdout(Stdio::piped()).spawn().unwrap();
        let lines = read_lines(child.stdout.take().unwrap());
        Self { child, lines }
    }

    /// The next line that holds all these words.
    fn line_with(&self, words: &[&str]) -> String {
        loop {
            let line = self.lines.recv_timeout(TIMEOUT).expect("no such line came");
            if words.iter().all(|word| line.contains(word)) {
                return line;
            }
        }
    }
}

impl Drop for Watch {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn read_lines(from: impl Read + Send + 'static) -> Receiver<String> {
    let (sender, receiver) = channel();
    std::thread::spawn(move || {
        for line in BufReader::new(from).lines().map_while(Result::ok) {
            if sender.send(line).is_err() {
                break;
            }
        }
    });
    receiver
}

fn exit_code(here: &Installation, arguments: &[&str]) -> i32 {
    here.try_vmseal(arguments).unwrap().status.code().unwrap()
}

/// A terminal's size.
const SCREEN: Winsize = Winsize { ws_row: 24, ws_col: 120, ws_xpixel: 0, ws_ypixel: 0 };

const DISK: &str = "datastore=local,size=1MiB";

#[test]
fn scripts_can_tell_failures_apart_and_read_every_format() {
    let here = Installation::new().unwrap();
    let empty = here.try_vmseal(&["datastore", "scan", "local"]).unwrap();
    let said = String::from_utf8_lossy(&empty.stderr).into_owned();
    assert!(empty.stdout.is_empty() && said.starts_with("no images"), "{said}");
    here.vmseal(&create("b", "encrypted", DISK)).unwrap();
    let required = ["--migration-encryption", "required"];
    here.vmseal(&[&create("a", "plain", DISK)[..], &required].concat()).unwrap();

    let files = ["keys.backup", "passphrase"].map(|name| here.path(name));
    let [backup, passphrase] = files.each_ref().map(|path| text(path).unwrap());
    for (code, arguments) in [
        (0, &["vm", "list"][..]),
        (2, &["vm", "lisst"]),
        (2, &["vm", "list", "-c", "colour"]),
        (2, &["policy", "create", "not a name", "--encrypt"]),
        (2, &create("c", "plain", "datastore=local,size=1MiB,colour=red")),
        (2, &create("c", "plain", "datastore=local,size=1MiB,format=vmdk")),
        (3, &["vm", "show", "c"]),
        (3, &["vm", "start", "c"]),
        (3, &["disk", "show", "a", "disk9"]),
        (4, &["policy", "delete", "encrypted"]),
        (4, &["policy", "create", "encrypted", "--encrypt"]),
        (2, &["vm", "show", "a/b"]),
        (2, &["provider", "unlock", "keys"]),
        (0, &["vm", "show", "a", "--libvirt"]),
        (2, &["vm", "show", "a", "--images", "/srv/out"]),
        (2, &["vm", "show", "a", "--libvirt", "--images", "out"]),
        (2, &["vm", "show", "a", "--libvirt", "-o", "json"]),
        (2, &["vm", "encrypt"]),
        (2, &["vm", "decrypt", "b"]),
        (2, &["vm", "recrypt", "b", "--deep", "--provider", "keys"]),
        (4, &["vm", "encrypt", "a", "b"]),
        (4, &["vm", "decrypt", "a", "--yes"]),
        (4, &["provider", "trust", "keys"]),
        (4, &["provider", "backup", "keys", "--to", backup, "--passphrase-file", passphrase]),
        (5, &["vm", "list", "--token-file", "/dev/null"]),
        (6, &["vm", "list", "--server", "https://127.0.0.1:1"]),
        (1, &["vm", "list", "--ca", "/nowhere"]),
        (1, &["image", "list", "--dir", "/nowhere"]),
        (1, &["provider", "unlock", "keys", "--passphrase-file", "/nowhere"]),
        (1, &["server", "restore", "/nowhere", "--data-dir", "/nowhere"]),
        (
            1,
            &["vm", "import", "--policy", "plain", "--datastore", "local", "--libvirt", "/nowhere"],
        ),
        (2, &["image", "build", "ubuntu"]),
    ] {
        assert_eq!(exit_code(&here, arguments), code, "{arguments:?}");
    }
    for unknown in ["VMSEAL_SERVER", "VMSEAL_TOKEN_FILE"] {
        let output = here.command().unwrap().args(["vm", "list"]).env_remove(unknown).output();
        assert_eq!(output.unwrap().status.code(), Some(5), "without {unknown}");
    }

    assert_eq!(here.vmseal(&["vm", "list", "-c", "name", "--no-header"]).unwrap(), "a\nb\n");
    assert_eq!(
        here.vmseal(&["vm", "list", "-o", "csv", "-c", "name,memory,policy"]).unwrap(),
        "name,memory,policy\na,33554432,plain\nb,33554432,encrypted\n"
    );
    assert_eq!(
        here.vmseal(&["vm", "list", "-o", "csv", "-c", "name,migration-encryption"]).unwrap(),
        "name,migration-encryption\na,required\nb,opportunistic\n"
    );
    let json = here.json(&["vm", "list"]).unwrap();
    assert_eq!((&json[0]["name"], &json[1]["name"]), (&"a".into(), &"b".into()));
    let yaml = here.vmseal(&["vm", "show", "a", "-o", "yaml"]).unwrap();
    assert!(yaml.contains("\nname: a\n") && yaml.contains("\nmemory: 33554432\n"), "{yaml}");
    let all = [&["vm", "list"][..], &["vm", "--help"], &["vm", "show", "b"], &["alarms"]];
    for arguments in all {
        let printed = here.vmseal(arguments).unwrap();
        assert!(!printed.contains('\u{1b}'), "{arguments:?} prints colours to a pipe");
    }
    let events = here.json(&["events", "--kind", "vm", "--target", "a"]).unwrap();
    let kinds: Vec<_> = events.as_array().unwrap().iter().map(|it| &it["kind"]).collect();
    assert!(events.as_array().unwrap().iter().all(|it| it["target"] == "a"), "{events}");
    assert!(!kinds.is_empty());
    assert!(kinds.iter().all(|kind| kind.as_str().unwrap().starts_with("vm.")), "{kinds:?}");
    assert_eq!(
        here.json(&["events", "--since", "2999-01-01T00:00:00Z"]).unwrap(),
        Value::Array(vec![])
    );
    here.vmseal(&["--request-id", "change-7", "policy", "create", "asked-for", "--plain"]).unwrap();
    let none = here.try_vmseal(&["events", "--since", "2999-01-01T00:00:00Z"]).unwrap();
    assert!(none.stdout.is_empty() && none.stderr == b"no events\n", "{none:?}");
    let asked = here.json(&["events", "--request", "change-7"]).unwrap();
    assert_eq!((&asked[0]["kind"], asked.as_array().unwrap().len()), (&"policy.created".into(), 1));
    let all = here.json(&["events"]).unwrap();
    let last = here.json(&["events", "-n", "2"]).unwrap();
    assert_eq!(
        last.as_array().unwrap(),
        &all.as_array().unwrap()[all.as_array().unwrap().len() - 2..]
    );
    names_on_a_datastore_do_not_control_the_terminal(&here);
    a_shell_is_given_names(&here);
    the_format_of_an_image_is_asked_for(&here);
    one_command_encrypts_and_one_moves_two_vms(&here);
}

/// Each has a task of its own, and all are waited for.
fn one_command_encrypts_and_one_moves_two_vms(here: &Installation) {
    here.vmseal(&create("c", "plain", DISK)).unwrap();
    here.vmseal(&["vm", "encrypt", "a", "c", "--policy", "encrypted"]).unwrap();
    for vm in ["a", "c"] {
        let shown = here.vm(vm).unwrap();
        assert_eq!(
            (&shown["policy"], &shown["disks"][0]["encrypted"]),
            (&"encrypted".into(), &true.into())
        );
        let image = std::fs::read(&here.images(vm).unwrap()[0]).unwrap();
        assert!(image.starts_with(b"LUKS\xba\xbe"), "the image of {vm} has no header");
    }
    assert_ne!(here.vm("a").unwrap()["key"], here.vm("c").unwrap()["key"]);
    let second = here.path("second");
    std::fs::create_dir(&second).unwrap();
    let add = ["datastore", "add", "second", "--host", "here", "--path", text(&second).unwrap()];
    here.vmseal(&add).unwrap();
    here.vmseal(&["vm", "move", "c", "a", "--datastore", "second"]).unwrap();
    for vm in ["a", "c"] {
        assert_eq!(here.vm(vm).unwrap()["disks"][0]["datastore"], "second", "{vm}");
    }
    for kind in ["vm.encrypted", "vm.moved"] {
        let events = here.json(&["events", "--kind", kind]).unwrap();
        let mut targets: Vec<_> =
            events.as_array().unwrap().iter().map(|it| it["target"].as_str().unwrap()).collect();
        targets.sort_unstable();
        assert_eq!(targets, ["a", "c"], "{kind}");
    }
}

/// Anyone who may write to a datastore can choose the names of directories.
fn names_on_a_datastore_do_not_control_the_terminal(here: &Installation) {
    let deep = ["\u{1b}[2Jmine"; 8].iter().fold(here.path("datastore"), |at, name| at.join(name));
    std::fs::create_dir_all(deep).unwrap();
    let output = here.try_vmseal(&["datastore", "scan", "local"]).unwrap();
    let said = String::from_utf8_lossy(&[output.stdout, output.stderr].concat()).into_owned();
    assert!(
        said.contains("the list is incomplete: ") && said.contains("\u{fffd}[2Jmine"),
        "{said:?}"
    );
    assert!(!said.contains('\u{1b}'), "{said:?}");
    std::fs::remove_dir_all(here.path("datastore/\u{1b}[2Jmine")).unwrap();
}

/// Asks as bash does, for the last of these words.
fn completed(here: &Installation, typed: &[&str]) -> Vec<String> {
    let mut command = here.command().unwrap();
    command.arg("--").arg("vmseal").args(typed);
    command.envs([("COMPLETE", "bash"), ("_CLAP_IFS", "\n"), ("_CLAP_COMPLETE_SPACE", "true")]);
    command.env("_CLAP_COMPLETE_INDEX", typed.len().to_string());
    let output = command.output().unwrap();
    assert!(output.status.success(), "{output:?}");
    String::from_utf8(output.stdout).unwrap().lines().map(|line| line.trim().to_owned()).collect()
}

fn a_shell_is_given_names(here: &Installation) {
    let has = |typed: &[&str], name: &str| {
        let given = completed(here, typed);
        assert!(given.iter().any(|it| it == name), "{name} after {typed:?}: {given:?}");
    };
    has(&["vm", "st"], "start");
    has(&["vm", "show", ""], "a");
    has(&["disk", "list", ""], "b");
    has(&["disk", "show", "a", ""], "disk0");
    has(&["policy", "show", "enc"], "encrypted");
    has(&["vm", "import", "--datastore", ""], "local");
    has(&["vm", "clone", "a", "new", "--datastore", ""], "local");
    bash_completes_what_is_typed(here);
    // A server that does not answer says nothing that would disturb the line.
    let mut command = here.command().unwrap();
    command.args(["--", "vmseal", "vm", "show", ""]).env("VMSEAL_SERVER", "https://127.0.0.1:1");
    let output = command.env("COMPLETE", "bash").env("_CLAP_COMPLETE_INDEX", "3").output().unwrap();
    let printed = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(output.status.success() && output.stderr.is_empty(), "{output:?}");
    assert!(!printed.split_whitespace().any(|word| word == "a"), "{printed}");
}

/// The Tab key in bash itself, which splits the value of `--disk` at each `=`.
fn bash_completes_what_is_typed(here: &Installation) {
    let typed = "\
        vmseal disk add a --disk d\tl\t,s\t1MiB,na\tlogs\n\
        vmseal disk add a --disk=size=1G,fo\tq\t\n\
        vmseal disk add a --disk \"datastore=local,si\t\n\
        vmseal policy sh\tenc\t-w\n\
        exit\n";
    assert_eq!(
        run_by_bash(here, typed),
        [
            "disk add a --disk datastore=local,size=1MiB,name=logs",
            "disk add a --disk=size=1G,format=qcow2",
            "disk add a --disk datastore=local,size=",
            "policy show encrypted -w",
        ]
    );
}

/// What bash would have given to vmseal, command by command, after this was typed on its terminal.
fn run_by_bash(here: &Installation, typed: &str) -> Vec<String> {
    let (setup, given) = (here.path("setup.bash"), here.path("given"));
    let script = here.vmseal(&["completion", "bash"]).unwrap();
    let vmseal = here.command().unwrap();
    let program = vmseal.get_program().to_str().unwrap();
    // The program completes; what would be run is written down.
    let written_down = format!(
        "vmseal() {{ if [[ -n ${{COMPLETE-}} ]]; then '{program}' \"$@\"; else echo \"$*\" >> '{}'; fi; }}\n",
        given.display()
    );
    std::fs::write(&setup, written_down + &script).unwrap();

    let pair = nix::pty::openpty(&SCREEN, None).unwrap();
    let mut terminal = std::fs::File::from(pair.master);
    terminal.write_all(typed.as_bytes()).unwrap();
    // A session of its own: bash takes the terminal of the one that it is in.
    let mut bash = std::process::Command::new("setsid");
    bash.args(["--ctty", "bash", "--noprofile", "--rcfile"]).arg(&setup).arg("-i");
    bash.envs(vmseal.get_envs().filter_map(|(name, value)| Some((name, value?))));
    bash.envs([("TERM", "dumb"), ("INPUTRC", "/dev/null"), ("HISTFILE", "/dev/null")]);
    let end = || Stdio::from(pair.slave.try_clone().unwrap());
    let mut shell = bash.stdin(end()).stdout(end()).stderr(end()).spawn().unwrap();
    drop((bash, pair.slave));
    // Its end is an error of the terminal.
    let mut screen = Vec::new();
    let _ = terminal.read_to_end(&mut screen);
    shell.wait().unwrap();
    let given = std::fs::read_to_string(given);
    let given = given.unwrap_or_else(|_| panic!("{}", String::from_utf8_lossy(&screen)));
    given.lines().map(str::to_owned).collect()
}

/// The format of an image is never detected: a person is asked until it is given, a script is refused.
fn the_format_of_an_image_is_asked_for(here: &Installation) {
    let disk = format!("datastore=local,image={}", text(&here.counter_image().unwrap()).unwrap());
    let import = ["vm", "import", "asked", "--policy", "plain", "--disk", &disk];
    assert_eq!(exit_code(here, &import), 2);
    for (answer, asked) in [("vmdk\nraw\n", 2), ("raw\n", 1)] {
        let output = here.answered(&[&import[..], &["--dry-run"]].concat(), answer).unwrap();
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(output.status.code(), Some(0), "{said}");
        assert_eq!(said.matches("The format of ").count(), asked, "{said}");
        assert_eq!(said.contains("'vmdk' is not a format"), asked == 2, "{said}");
    }
    assert_eq!(exit_code(here, &["vm", "show", "asked"]), 3, "it was done");
}

#[test]
fn doctor_reports_each_problem_with_its_fix() {
    let here = Installation::new().unwrap();
    let (state, data, store) = (here.path("agent"), here.path("server"), here.path("datastore"));
    let usual = [
        "doctor",
        "--state-dir",
        text(&state).unwrap(),
        "--data-dir",
        text(&data).unwrap(),
        "--datastore",
        text(&store).unwrap(),
    ];
    let findings = here.json(&usual).unwrap();
    let result = |findings: &Value, check: &str| {
        let all = findings.as_array().unwrap();
        let found = all.iter().find(|it| it["check"].as_str().unwrap().starts_with(check));
        found.unwrap_or_else(|| panic!("no {check} in {findings}"))["result"].clone()
    };
    for check in [
        "qemu",
        "vhost-user-blk",
        "filter",
        "cores",
        "image-builder",
        "host-certificate",
        "host-authority",
        "server-certificate",
        "server-authority",
        "server",
        "agent",
    ] {
        assert_eq!(result(&findings, check), "ok", "{check}: {findings}");
    }
    for check in [
        "accelerator",
        "processor",
        "memory-lock",
        "swap",
        "clock",
        "io-uring",
        "network-cards",
        "connection-buffers",
        "confinement",
        "datastore",
    ] {
        assert_ne!(result(&findings, check), "failed", "{check}: {findings}");
    }
    let wrong = [&usual[..], &["--filter", "/bin/false", "--qemu", "/nowhere/qemu"]].concat();
    let output = here.try_vmseal(&wrong).unwrap();
    assert_eq!(output.status.code(), Some(1));
    let said = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(said.contains("failed   qemu: ") && said.contains("fix: install"), "{said}");
    assert!(said.contains("failed   filter: "), "{said}");
    assert!(said.lines().all(|line| line.starts_with(['o', 'w', 'f', ' '])), "{said}");
}

#[test]
fn waiting_for_a_task_survives_a_restart_of_the_server() {
    let mut here = Installation::new().unwrap();
    here.create_counter("vm1", "encrypted").unwrap();
    here.boot_counter("vm1").unwrap();
    // A boot sector ignores the power button: the task lasts for the grace period, and fails.
    let stop = ["vm", "stop", "vm1", "--grace-period", "8s", "--no-wait", "-o", "json"];
    let begun: Value = serde_json::from_str(&here.vmseal(&stop).unwrap()).unwrap();
    let task = begun["id"].as_str().unwrap();
    let mut command = here.command().unwrap();
    command.args(["task", "watch", task]).stdout(Stdio::null()).stderr(Stdio::piped());
    let mut child = command.spawn().unwrap();
    let lines = read_lines(child.stderr.take().unwrap());
    let mut watch = Watch { child, lines };
    watch.line_with(&["vm.stop vm1"]);
    let list = Watch::start(&here, &["policy", "list", "-w", "-c", "name"]);
    list.line_with(&["listed", "plain"]);
    let single = Watch::start(&here, &["vm", "show", "vm1", "-w", "-o", "csv"]);
    single.line_with(&["listed", "vm1"]);
    let events = Watch::start(&here, &["events", "-f", "-c", "kind,target"]);
    events.line_with(&["vm.started", "vm1"]);
    here.kill_server();
    watch.line_with(&["asking again for 2m"]);
    // A wait that begins while the server is away waits for it, too; after a timeout its outcome is unknown.
    let mut late = here.command().unwrap();
    let mut late = late.args(["task", "wait", task]).stderr(Stdio::null()).spawn().unwrap();
    here.start_server().unwrap();
    watch.line_with(&["the server answers again"]);
    here.vmseal(&["policy", "create", "later", "--plain"]).unwrap();
    list.line_with(&["added", "later"]);
    events.line_with(&["policy.created", "later"]);
    watch.line_with(&["vm.stop vm1", "failed at step"]);
    assert_eq!(watch.child.wait().unwrap().code(), Some(6), "not as the task ended");
    assert_eq!(late.wait().unwrap().code(), Some(6), "not as the task ended");
    here.vmseal(&["vm", "stop", "vm1", "--force"]).unwrap();
    single.line_with(&["changed", "off"]);
}

#[test]
fn dry_runs_change_nothing_and_watches_show_changes() {
    let here = Installation::new().unwrap();
    let list = Watch::start(&here, &["vm", "list", "-w", "-c", "name,power,lifecycle"]);
    list.line_with(&["CHANGE", "NAME", "POWER", "LIFECYCLE"]);
    let disks = Watch::start(&here, &["disk", "list", "--watch", "-c", "vm,name"]);
    disks.line_with(&["CHANGE", "VM", "NAME"]);
    let events =
        Watch::start(&here, &["events", "-f", "--kind", "vm.started", "-c", "kind,target"]);

    let tried =
        here.vmseal(&[&create("vm1", "encrypted", DISK)[..], &["--dry-run"]].concat()).unwrap();
    assert!(tried.contains("vm.create vm1") && tried.contains("make the key"), "{tried}");
    assert_eq!(exit_code(&here, &["vm", "show", "vm1"]), 3, "it was done");
    assert_eq!(here.json(&["task", "list"]).unwrap(), Value::Array(vec![]));

    here.create_counter("vm1", "encrypted").unwrap();
    nothing_comes_of_a_dry_run(&here);
    what_redundancy_risks_is_said_once(&here);
    list.line_with(&["added", "vm1"]);
    disks.line_with(&["added", "vm1", "disk0"]);
    list.line_with(&["changed", "vm1", "off", "ready"]);
    let single = Watch::start(&here, &["vm", "show", "vm1", "-w", "-o", "json"]);
    let listed: Value = serde_json::from_str(&single.line_with(&["listed"])).unwrap();
    assert_eq!(listed["item"]["name"], "vm1");
    assert_eq!(exit_code(&here, &["vm", "start", "vm1", "--dry-run"]), 0);
    here.vmseal(&["vm", "start", "vm1"]).unwrap();
    list.line_with(&["changed", "vm1", "running"]);
    single.line_with(&["changed", "\"power\":\"running\""]);
    events.line_with(&["vm.started", "vm1"]);
    consoles_put_the_terminal_back(&here, "vm1");
    assert_eq!(exit_code(&here, &["vm", "start", "vm1", "--dry-run"]), 4);
    assert_eq!(exit_code(&here, &["vm", "delete", "vm1", "--dry-run"]), 4);

    // A boot sector ignores the power button: the task goes on after the command's timeout.
    let stop = ["vm", "stop", "vm1", "--grace-period", "20s"];
    let output = here.try_vmseal(&[&stop[..], &["--timeout", "1s"]].concat()).unwrap();
    assert_eq!(output.status.code(), Some(9));
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(said.contains("vmseal task wait ") && said.contains("vmseal task cancel "), "{said}");
    let running = here.json(&["task", "list", "--state", "running"]).unwrap();
    let task = running[0]["id"].as_str().unwrap().to_owned();
    assert!(said.contains(&task), "{said}");
    // Others have ended.
    for verb in ["cancel", "pause", "wait", "watch"] {
        let mut offered = completed(&here, &["task", verb, ""]);
        offered.retain(|it| !it.starts_with('-'));
        assert_eq!(offered, [task.as_str()], "after task {verb}");
    }

    // On a terminal there is a bar for it. Ctrl-C leaves it running as well.
    let pair = nix::pty::openpty(&SCREEN, None).unwrap();
    let mut command = here.command().unwrap();
    command.args(["task", "watch"]).stdout(Stdio::null()).stderr(pair.slave);
    let mut watch = command.spawn().unwrap();
    drop(command);
    let (mut screen, mut terminal) = (String::new(), std::fs::File::from(pair.master));
    while !(screen.contains("vm.stop vm1") && screen.contains("(1s)")) {
        let mut drawn = [0; 4096];
        let length = terminal.read(&mut drawn).expect("no bar is drawn");
        screen.push_str(&String::from_utf8_lossy(&drawn[..length]));
    }
    kill(Pid::from_raw(watch.id().try_into().unwrap()), Signal::SIGINT).unwrap();
    assert_eq!(watch.wait().unwrap().code(), Some(130));
    assert_eq!(here.json(&["task", "show", &task]).unwrap()["state"], "running");

    here.vmseal(&["task", "cancel", &task]).unwrap();
    assert_eq!(exit_code(&here, &["task", "wait", &task]), 1);
    here.vmseal(&["vm", "stop", "vm1", "--force"]).unwrap();
    here.vmseal(&["vm", "delete", "vm1"]).unwrap();
    list.line_with(&["removed", "vm1"]);
    disks.line_with(&["removed", "vm1", "disk0"]);
    single.line_with(&["removed", "vm1"]);
}

/// Who chooses how many failures guests go on with is told once what they risk, on standard error.
fn what_redundancy_risks_is_said_once(here: &Installation) {
    let create = ["policy", "create", "risky", "--plain", "--failures-to-tolerate", "1"];
    let set = |failures| ["policy", "set", "risky", "--failures-to-tolerate", failures];
    for (command, dry, times) in [
        (&create[..], &["--dry-run"][..], 1),
        (&create, &[], 1),
        (&set("2"), &["--dry-run"], 1),
        (&set("2"), &[], 1),
        (&set("0"), &[], 0),
    ] {
        let output = here.try_vmseal(&[command, dry].concat()).unwrap();
        let warned = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(output.status.success(), "{warned}");
        assert_eq!(warned.matches("writes that were acknowledged").count(), times, "{warned}");
        assert!(!String::from_utf8_lossy(&output.stdout).contains("acknowledged"));
    }
    here.vmseal(&["policy", "delete", "risky"]).unwrap();
}

/// Dry runs check the machines and leave nothing on them. VM `vm1` exists.
fn nothing_comes_of_a_dry_run(here: &Installation) {
    let (place, out, backup) = (here.path("new"), here.path("out"), here.path("again.backup"));
    for directory in [&place, &out] {
        std::fs::create_dir(directory).unwrap();
    }
    let path = |path: &std::path::Path| text(path).unwrap().to_owned();
    let (image, pass) = (path(&out.join("vm1.img")), path(&here.path("passphrase")));
    let add = |place: &str| {
        exit_code(here, &["datastore", "add", "n", "--host", "here", "--path", place, "--dry-run"])
    };
    let export =
        ["disk", "export", "vm1", "disk0", "--format", "raw", "--plaintext", "--dry-run", "--to"];
    let of_provider = |verb: &str, options: &[&str]| {
        let usual = ["provider", verb, "keys", "--passphrase-file", &pass, "--dry-run"];
        exit_code(here, &[&usual[..], options].concat())
    };
    let known = path(&here.path("keys.backup"));
    let before = here.json(&["events"]).unwrap();
    assert_eq!(add(&path(&place)), 0);
    assert_eq!(add(&path(&here.path("nowhere"))), 2, "the host has not been asked");
    assert_eq!(exit_code(here, &[&export[..], &[&image]].concat()), 0);
    assert_eq!(
        exit_code(here, &[&export[..], &[&pass]].concat()),
        4,
        "the host has not been asked"
    );
    assert_eq!(of_provider("unlock", &[]), 0);
    assert_eq!(of_provider("verify", &["--from", &known]), 0);
    assert_eq!(of_provider("backup", &["--to", &path(&backup)]), 0);
    assert_eq!(of_provider("backup", &["--to", &known]), 4, "it would not be kept");
    assert_eq!(exit_code(here, &["provider", "default", "keys", "--dry-run"]), 0);
    assert_eq!(exit_code(here, &["host", "token", "--dry-run"]), 0);
    let (url, ca, token) =
        (here.url(), here.path("server/ca.pem"), here.path("server/admin.token"));
    let who = ["--server", &url, "--ca", &path(&ca), "--token-file", &path(&token)];
    assert_eq!(exit_code(here, &[&["login", "--dry-run"], &who[..]].concat()), 0);
    assert_eq!(here.json(&["events"]).unwrap(), before, "something was done");
    for empty in [place, out, here.path(".config")] {
        let left = std::fs::read_dir(&empty).map_or(0, Iterator::count);
        assert_eq!(left, 0, "something is in {}", empty.display());
    }
    assert!(!backup.exists());
}

/// A console on a terminal of its own, by its descriptors.
struct OnTerminal {
    child: Child,
    keyboard: std::fs::File,
    terminal: OwnedFd,
}

impl OnTerminal {
    fn attach(here: &Installation, vm: &str, options: &[&str]) -> Self {
        let pair = nix::pty::openpty(None, None).unwrap();
        let end = || Stdio::from(pair.slave.try_clone().unwrap());
        let mut command = here.command().unwrap();
        command.args(["vm", "console", vm]).args(options);
        let child = command.stdin(end()).stdout(end()).stderr(end()).spawn().unwrap();
        let this = Self { child, keyboard: pair.master.into(), terminal: pair.slave };
        eventually("the terminal is raw", || (!this.is_usual()).then_some(())).unwrap();
        this
    }

    /// Whether lines are edited and echoed, as a shell finds them.
    fn is_usual(&self) -> bool {
        let flags = tcgetattr(&self.terminal).unwrap().local_flags;
        flags.contains(LocalFlags::ICANON | LocalFlags::ECHO | LocalFlags::ISIG)
    }

    /// The content of the screen at the end, and the exit code.
    fn rest(mut self) -> (String, Option<i32>) {
        let code = self.child.wait().unwrap().code();
        assert!(self.is_usual(), "the terminal was left raw");
        let mut screen = vec![0; 64 * 1024];
        let length = self.keyboard.read(&mut screen).unwrap();
        (String::from_utf8_lossy(&screen[..length]).into_owned(), code)
    }

    fn code(mut self) -> Option<i32> {
        let code = self.child.wait().unwrap().code();
        assert!(self.is_usual(), "the terminal was left raw");
        code
    }
}

/// However a console ends, the terminal is as before.
fn consoles_put_the_terminal_back(here: &Installation, vm: &str) {
    let mut console = OnTerminal::attach(here, vm, &[]);
    console.keyboard.write_all(b"\x1d").unwrap();
    assert_eq!(console.code(), Some(0));

    let mut console = OnTerminal::attach(here, vm, &["--force", "--escape", "^A"]);
    console.keyboard.write_all(b"\x01").unwrap();
    assert_eq!(console.code(), Some(0));

    for end in [Signal::SIGTERM, Signal::SIGHUP] {
        let console = OnTerminal::attach(here, vm, &["--force"]);
        kill(Pid::from_raw(console.child.id().try_into().unwrap()), end).unwrap();
        assert_eq!(console.code(), Some(130), "{end}");
    }

    let first = OnTerminal::attach(here, vm, &["--force"]);
    let refused = here.try_vmseal(&["vm", "console", vm]).unwrap();
    let said = String::from_utf8_lossy(&refused.stderr).into_owned();
    assert_eq!(refused.status.code(), Some(4), "{said}");
    assert!(said.contains("in use") && said.contains("--force"), "{said}");
    let mut second = OnTerminal::attach(here, vm, &["--force"]);
    let (screen, code) = first.rest();
    assert_eq!(code, Some(4), "it was not told that it was taken over: {screen}");
    assert!(screen.contains("taken over the console"), "{screen}");
    second.keyboard.write_all(b"\x1d").unwrap();
    assert_eq!(second.code(), Some(0));

    // What a script types has an end, and so has the console.
    let mut script = here.command().unwrap();
    script.args(["vm", "console", vm, "--force"]).stdin(Stdio::null());
    let output = script.output().unwrap();
    assert_eq!(output.status.code(), Some(0), "{output:?}");
}
