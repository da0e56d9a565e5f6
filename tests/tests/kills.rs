//! Kills of server, agent, filter and QEMU, at moments spread over every operation. Afterwards the state shown
//! is correct, the operation's task has ended, a retry works, and in the end nothing is left.
//!
//! Every exact step is interrupted in the control plane's own tests; here the moments are measured, so that
//! moments between the steps are hit as well. Each prints which moment it was.

#![allow(clippy::unwrap_used)] // a test that cannot go on ends

use std::path::Path;
use std::process::{Child, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, ensure};
use serde_json::Value;
use vmseal_tests::guest::{Console, counter_disk};
use vmseal_tests::installation::{Installation, create, text};
use vmseal_tests::kills::some_of;
use vmseal_tests::process::kill_hard;
use vmseal_tests::{eventually, header};

/// Longer than it takes until an operation has a process of its own, on a busy machine.
const BEGINS_WITHIN: Duration = Duration::from_secs(60);

/// How many moments an operation has.
const POINTS: u32 = 6;

/// How large the disk is that is made while something dies: large enough for the import to be hit.
const HEAVY_DISK: u64 = 64 << 20;

const FILTER: &str = "vmseal-filter";
const QEMU: &str = "qemu-system-x86_64";

#[derive(Clone, Copy, Debug, PartialEq)]
enum Operation {
    Create,
    PowerOn,
    PowerOff,
    Delete,
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum Victim {
    Server,
    Agent,
    Filter,
    Qemu,
}

/// A sweep over one operation.
struct Sweep {
    here: Installation,
    operation: Operation,
    disk: String,
}

impl Sweep {
    fn new(operation: Operation) -> Self {
        let here = Installation::new().unwrap();
        let image = if operation == Operation::Create {
            let image = here.path("heavy.raw");
            heavy_disk(&image);
            image
        } else {
            here.counter_image().unwrap()
        };
        let disk = format!("datastore=local,format=raw,image={}", text(&image).unwrap());
        Self { here, operation, disk }
    }

    /// Brings the VM into the state in which the operation begins.
    fn prepare(&self, vm: &str) {
        if self.operation != Operation::Create {
            self.here.create_counter(vm, "encrypted").unwrap();
        }
        if self.operation == Operation::PowerOff {
            self.here.vmseal(&["vm", "start", vm]).unwrap();
        }
    }

    fn arguments<'a>(&'a self, vm: &'a str) -> Vec<&'a str> {
        match self.operation {
            Operation::Create => create(vm, "encrypted", &self.disk).to_vec(),
            Operation::PowerOn => vec!["vm", "start", vm],
            Operation::PowerOff => vec!["vm", "stop", vm, "--force"],
            Operation::Delete => vec!["vm", "delete", vm],
        }
    }

    /// Whether the operation has had its effect.
    fn is_done(&self, vm: &str) -> bool {
        let shown = shown(&self.here, vm).unwrap();
        match self.operation {
            Operation::Create => shown.is_some(),
            Operation::PowerOn => shown.is_some_and(|vm| vm["power"] == "running"),
            Operation::PowerOff => shown.is_some_and(|vm| vm["power"] == "off"),
            Operation::Delete => shown.is_none(),
        }
    }

    /// How long it takes undisturbed.
    fn rehearse(&self) -> Duration {
        self.prepare("rehearsal");
        let begun = Instant::now();
        self.here.vmseal(&self.arguments("rehearsal")).unwrap();
        let duration = begun.elapsed();
        assert!(self.is_done("rehearsal"));
        self.remove("rehearsal");
        duration
    }

    /// Begins it without waiting for its end. It may well fail: the server dies under it.
    fn begin(&self, vm: &str) -> Child {
        let mut command = self.here.command().unwrap();
        command.args(self.arguments(vm)).arg("--no-wait");
        command.stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap()
    }

    fn retry(&self, vm: &str) {
        if !self.is_done(vm) {
            self.here.vmseal(&self.arguments(vm)).unwrap();
        }
        assert!(self.is_done(vm), "{vm}: the retry said that it worked");
    }

    /// Deletes the VM; nothing of it may be left.
    fn remove(&self, vm: &str) {
        if let Some(shown) = shown(&self.here, vm).unwrap() {
            if shown["power"] != "off" {
                self.here.vmseal(&["vm", "stop", vm, "--force"]).unwrap();
            }
            self.here.vmseal(&["vm", "delete", vm]).unwrap();
        }
        truth(&self.here, vm);
    }

    /// Disturbs it once: after a delay, or where none is given, as soon as there is something to be killed. Returns whether there was.
    fn disturb(&mut self, victim: Victim, vm: &str, delay: Option<Duration>) -> bool {
        self.prepare(vm);
        let begun = Instant::now();
        let mut command = self.begin(vm);
        let hit = match delay {
            Some(delay) => {
                std::thread::sleep(delay.saturating_sub(begun.elapsed()));
                victim.kill(&mut self.here)
            }
            None => {
                // Without a pause: it may live for some milliseconds.
                let mut hit = victim.kill(&mut self.here);
                while !hit && begun.elapsed() < BEGINS_WITHIN {
                    hit = victim.kill(&mut self.here);
                }
                hit
            }
        };
        println!("{:?}: {victim:?} killed after {delay:?}: {hit}", self.operation);
        command.wait().unwrap();
        victim.restart(&mut self.here);
        settle(&self.here);
        truth(&self.here, vm);
        self.retry(vm);
        truth(&self.here, vm);
        self.remove(vm);
        hit
    }

    fn run(mut self, victim: Victim) {
        let duration = self.rehearse();
        let points: Vec<u32> = (0..POINTS).collect();
        let mut hits = 0;
        for point in some_of(&points) {
            let delay = duration * point / (POINTS - 1);
            hits += u32::from(self.disturb(victim, &format!("vm{point}"), Some(delay)));
        }
        // Some processes live for a moment only.
        assert!(hits > 0 || self.disturb(victim, "last", None), "there never was a {victim:?}");
    }
}

impl Victim {
    /// Kills it; false if there is none at this moment.
    fn kill(self, here: &mut Installation) -> bool {
        let name = match self {
            Self::Server => {
                here.kill_server();
                return true;
            }
            Self::Agent => {
                here.kill_agent();
                return true;
            }
            Self::Filter => FILTER,
            Self::Qemu => QEMU,
        };
        let found = here.guest_processes(name);
        found.iter().copied().for_each(kill_hard);
        !found.is_empty()
    }

    fn restart(self, here: &mut Installation) {
        match self {
            Self::Server => {
                here.start_server().unwrap();
                here.wait_host().unwrap();
            }
            Self::Agent => here.start_agent().unwrap(),
            Self::Filter | Self::Qemu => {}
        }
    }
}

/// A counting guest's disk that is full of data.
fn heavy_disk(path: &Path) {
    counter_disk(path, HEAVY_DISK).unwrap();
    let mut noise = vec![0x5a; HEAVY_DISK as usize - 4096];
    for (at, byte) in noise.iter_mut().enumerate() {
        *byte ^= (at.wrapping_mul(0x9e37_79b9) >> 13) as u8;
    }
    use std::os::unix::fs::FileExt;
    std::fs::File::options().write(true).open(path).unwrap().write_all_at(&noise, 4096).unwrap();
}

/// The VM, if the server shows it.
fn shown(here: &Installation, vm: &str) -> anyhow::Result<Option<Value>> {
    let list = here.json(&["vm", "list"])?;
    Ok(list.as_array().context("no list")?.iter().find(|shown| shown["name"] == vm).cloned())
}

/// Waits until every task has ended; none may end as unknown.
fn settle(here: &Installation) {
    let ended = ["done", "failed", "cancelled", "unknown"];
    let open = |task: &Value| !ended.iter().any(|state| task["state"] == *state);
    let tasks = eventually("every task has ended", || {
        let tasks = here.json(&["task", "list"]).ok()?;
        (!tasks.as_array()?.iter().any(open)).then_some(tasks)
    })
    .unwrap();
    for task in tasks.as_array().unwrap() {
        assert!(task["state"] == "done" || task["state"] == "failed", "{task}");
    }
}

/// Checks that the state shown of a VM matches its files and its processes.
fn truth(here: &Installation, vm: &str) {
    let mut last = None;
    let found = eventually("what is shown is the truth", || {
        last = compare(here, vm).err();
        last.is_none().then_some(())
    });
    assert!(found.is_ok(), "{vm}: {last:?}");
}

fn compare(here: &Installation, vm: &str) -> anyhow::Result<()> {
    let (filters, qemus) = (here.guest_processes(FILTER).len(), here.guest_processes(QEMU).len());
    let files = here.datastore_entries(&here.path("datastore"))?;
    let Some(shown) = shown(here, vm)? else {
        let left = here.all_guest_processes();
        ensure!(left.is_empty(), "it is not shown, and there are processes {left:?}");
        ensure!(files.is_empty(), "it is not shown, and there are files {files:?}");
        return Ok(());
    };
    ensure!(shown["lifecycle"] == "ready", "no task works on it, and it is {}", shown["lifecycle"]);
    ensure!(!files.iter().any(|file| is_half_made(file)), "half-made files: {files:?}");
    for image in here.images(vm)? {
        let length = std::fs::metadata(&image)?.len();
        let wanted = shown["disks"][0]["size"].as_u64().unwrap_or(0) + header::HEAD as u64;
        ensure!(length == wanted, "its image has {length} bytes, not {wanted}");
    }
    let expected = match shown["power"].as_str() {
        Some("running") => 1,
        Some("off") => 0,
        other => anyhow::bail!("its power is {other:?}"),
    };
    ensure!(
        (filters, qemus) == (expected, expected),
        "it is {} with {filters} filters and {qemus} QEMUs",
        shown["power"]
    );
    Ok(())
}

fn is_half_made(path: &Path) -> bool {
    path.extension().is_some_and(|extension| extension == "creating")
}

macro_rules! sweeps {
    ($($name:ident: $operation:ident, $victim:ident;)*) => {$(
        #[test]
        fn $name() {
            Sweep::new(Operation::$operation).run(Victim::$victim);
        }
    )*};
}

sweeps! {
    create_and_the_server_dies: Create, Server;
    create_and_the_agent_dies: Create, Agent;
    create_and_the_filter_dies: Create, Filter;
    power_on_and_the_server_dies: PowerOn, Server;
    power_on_and_the_agent_dies: PowerOn, Agent;
    power_on_and_the_filter_dies: PowerOn, Filter;
    power_on_and_qemu_dies: PowerOn, Qemu;
    power_off_and_the_server_dies: PowerOff, Server;
    power_off_and_the_agent_dies: PowerOff, Agent;
    power_off_and_the_filter_dies: PowerOff, Filter;
    power_off_and_qemu_dies: PowerOff, Qemu;
    delete_and_the_server_dies: Delete, Server;
    delete_and_the_agent_dies: Delete, Agent;
}

/// Both processes of a running VM.
fn processes(here: &Installation, vm: &str) -> (i32, i32) {
    let one = |name| {
        let found = here.processes_of(vm, name).unwrap();
        assert_eq!(found.len(), 1, "{vm}: {name}: {found:?}");
        found[0]
    };
    (one(FILTER), one(QEMU))
}

/// Two VMs run, one is killed by what `kill` does to its filter and QEMU: that one stops, and says why; the
/// other does not notice.
fn one_dies_alone(kill: fn(&Installation), reason: &str, alarm: &str) {
    let here = Installation::new().unwrap();
    for vm in ["victim", "bystander"] {
        here.create_counter(vm, "encrypted").unwrap();
        assert_eq!(here.boot_counter(vm).unwrap(), 1);
    }
    let bystander = processes(&here, "bystander");
    kill(&here);

    let stopped = here.wait_power("victim", "off").unwrap();
    assert_eq!(stopped["stopped"]["reason"], reason);
    let detail = here.wait_alarm("victim", alarm).unwrap();
    println!("the alarm says: {detail}");
    truth_of_processes(&here, "victim", 0);

    assert_eq!(processes(&here, "bystander"), bystander);
    let mut console = here.console("bystander").unwrap();
    console.type_text("r").unwrap();
    // What the console replays may begin with the first count.
    eventually("the bystander counts on", || (console.next_count().ok()? == 2).then_some(()))
        .unwrap();
    assert!(here.alarms("bystander").unwrap().is_empty());

    assert!(here.boot_counter("victim").unwrap() > 1, "what the guest wrote before is gone");
    here.wait_no_alarm("victim", alarm).unwrap();
}

fn truth_of_processes(here: &Installation, vm: &str, expected: usize) {
    eventually("its processes are as many as they should be", || {
        [FILTER, QEMU]
            .iter()
            .all(|name| here.processes_of(vm, name).is_ok_and(|found| found.len() == expected))
            .then_some(())
    })
    .unwrap();
}

/// The guest counts on with each new filter, until there have been too many.
fn kill_filters(here: &Installation) {
    let (mut filter, qemu) = processes(here, "victim");
    let mut console = here.console("victim").unwrap();
    let mut count = 1;
    for _ in 0..5 {
        kill_hard(filter);
        let next = eventually("another filter serves the guest", || {
            let found = here.processes_of("victim", FILTER).ok()?;
            found.first().copied().filter(|next| *next != filter)
        });
        filter = next.unwrap();
        let detail = here.wait_alarm("victim", "filter-restarted").unwrap();
        println!("the alarm says: {detail}");
        assert!(detail.contains("lost nothing"), "{detail}");
        // Written and flushed by the guest before it is shown.
        count = count_on(&mut console, count);
        assert_eq!(processes(here, "victim").1, qemu, "it runs on");
    }
    println!("the guest has counted to {count}");
    kill_hard(filter);
}

#[test]
fn filters_that_die_again_and_again_stop_their_vm_alone_and_say_so() {
    one_dies_alone(kill_filters, "filter_died", "filter-died");
}

#[test]
fn a_dead_qemu_stops_its_vm_alone_and_says_so() {
    one_dies_alone(|here| kill_hard(processes(here, "victim").1), "qemu_died", "qemu-died");
}

/// Types at the guest and waits for a count that is higher than `before`; gives it.
fn count_on(console: &mut Console, before: u32) -> u32 {
    console.type_text("r").unwrap();
    loop {
        let count = console.next_count().unwrap();
        if count > before {
            return count;
        }
    }
}

/// A VM runs while a process of the control plane dies and comes back: it goes on, and is controlled again.
fn it_runs_on(kill: fn(&mut Installation), restart: fn(&mut Installation)) {
    let mut here = Installation::new().unwrap();
    here.create_counter("steady", "encrypted").unwrap();
    assert_eq!(here.boot_counter("steady").unwrap(), 1);
    let before = processes(&here, "steady");

    kill(&mut here);
    std::thread::sleep(Duration::from_secs(1));
    assert_eq!(
        (here.guest_processes(FILTER), here.guest_processes(QEMU)),
        (vec![before.0], vec![before.1])
    );
    restart(&mut here);

    here.wait_power("steady", "running").unwrap();
    let held = eventually("the key is on the host again", || {
        here.vm("steady").ok().filter(|vm| vm["key_state"] == "held")
    });
    held.unwrap();
    assert_eq!(processes(&here, "steady"), before);
    let mut console = here.console("steady").unwrap();
    let count = count_on(&mut console, 1);
    assert!(here.alarms("steady").unwrap().is_empty());

    here.vmseal(&["vm", "stop", "steady", "--force"]).unwrap();
    truth_of_processes(&here, "steady", 0);
    assert_eq!(here.boot_counter("steady").unwrap(), count + 1);
}

#[test]
fn a_vm_outlives_the_agent_and_the_next_one_adopts_it() {
    it_runs_on(Installation::kill_agent, |here| here.start_agent().unwrap());
}

#[test]
fn a_vm_outlives_the_server() {
    it_runs_on(Installation::kill_server, |here| {
        here.start_server().unwrap();
        here.wait_host().unwrap();
    });
}

#[test]
fn a_vm_outlives_server_and_agent_at_once() {
    it_runs_on(
        |here| {
            here.kill_agent();
            here.kill_server();
        },
        |here| {
            here.start_server().unwrap();
            here.start_agent().unwrap();
        },
    );
}

#[test]
fn while_the_host_is_away_nothing_is_claimed_of_its_vms() {
    let mut here = Installation::new().unwrap();
    here.create_counter("unseen", "encrypted").unwrap();
    here.vmseal(&["vm", "start", "unseen"]).unwrap();
    here.kill_agent();
    here.wait_alarm("here", "host-disconnected").unwrap();
    let unseen = here.vm("unseen").unwrap();
    assert!(unseen["power"].is_null() && unseen["key_state"].is_null(), "{unseen}");
    here.guest_processes(QEMU).into_iter().for_each(kill_hard);
    here.start_agent().unwrap();
    let stopped = here.wait_power("unseen", "off").unwrap();
    assert_eq!(stopped["stopped"]["reason"], "found_dead", "{stopped}");
    truth(&here, "unseen");
    here.wait_no_alarm("here", "host-disconnected").unwrap();
    here.vmseal(&["vm", "start", "unseen"]).unwrap();
}

#[test]
fn a_host_that_restarts_while_the_provider_is_sealed_has_locked_vms_until_it_is_unlocked() {
    let mut here = Installation::new().unwrap();
    for vm in ["running", "resting"] {
        here.create_counter(vm, "encrypted").unwrap();
    }
    assert_eq!(here.boot_counter("running").unwrap(), 1);
    let before = processes(&here, "running");

    here.kill_agent();
    here.kill_server();
    here.withhold_passphrase();
    here.start_server().unwrap();
    here.start_agent().unwrap();
    assert_eq!(here.json(&["provider", "show", "keys"]).unwrap()["status"], "sealed");

    for vm in ["running", "resting"] {
        let said = here.wait_alarm(vm, "vm-locked").unwrap();
        assert!(said.contains("vmseal provider unlock"), "it does not say what to do: {said}");
        assert_eq!(here.vm(vm).unwrap()["key_state"], "missing");
    }
    // A VM that runs has its disk's key in its filter: it goes on.
    assert_eq!(here.vm("running").unwrap()["power"], "running");
    assert_eq!(processes(&here, "running"), before);
    let said = here.refused(&["vm", "start", "resting"]).unwrap();
    assert!(said.contains("sealed") && said.contains("vmseal provider unlock"), "{said}");
    let tasks = here.json(&["task", "list"]).unwrap();
    let last = tasks.as_array().unwrap().last().unwrap();
    assert_eq!(last["problem"]["code"], "locked", "{last}");
    assert_eq!(here.vm("resting").unwrap()["power"], "off");

    let wrong = here.path("wrong-passphrase");
    std::fs::write(&wrong, "wrong horse").unwrap();
    let said = here
        .refused(&["provider", "unlock", "keys", "--passphrase-file", text(&wrong).unwrap()])
        .unwrap();
    assert!(said.contains("passphrase"), "{said}");
    assert_eq!(here.vm("resting").unwrap()["key_state"], "missing");

    let right = here.path("passphrase");
    here.vmseal(&["provider", "unlock", "keys", "--passphrase-file", text(&right).unwrap()])
        .unwrap();
    for vm in ["running", "resting"] {
        here.wait_no_alarm(vm, "vm-locked").unwrap();
        assert_eq!(here.vm(vm).unwrap()["key_state"], "held");
    }
    assert_eq!(here.boot_counter("resting").unwrap(), 1);
    assert_eq!(processes(&here, "running"), before);
}
