//! Results on standard output: tables for people, CSV and the API's own documents for programs.

pub mod adoption;
pub mod migration;
pub mod plan;
pub mod rates;
pub mod scan;
mod table;

use serde::Serialize;
use vmseal_api::compliance::Deviation;
use vmseal_api::host::DiskRole;
use vmseal_api::model::{Disk, Nic, Task, Vm, Waiting, WaitingOn};
use vmseal_api::nic::{NicLink, PortForward};

pub use self::rates::VmRates;
pub use self::table::Lines;
use crate::arguments::{Columns, Output};
use crate::rows::column::Cell;
use crate::rows::{Change, Row, disk_format, word};
pub use crate::stream::{is_closed, line, print, printable, say, words};

/// Prints a list, in the order of its kind. A table without rows is a message, which is not in the way of a script
/// that reads the table.
pub fn list<T: Row>(output: Output, how: &Columns<T>, mut items: Vec<T>) -> anyhow::Result<()> {
    items.sort_by(T::order);
    match output {
        Output::Table if items.is_empty() => {
            say(format_args!("no {}", T::PLURAL));
            Ok(())
        }
        Output::Json | Output::Yaml => whole(output, &items),
        Output::Table | Output::Csv => print(&Lines::new(output, how).of(&items)?),
    }
}

/// Prints all of one resource. Tables have name and value lines, with `details` at their end.
pub fn one<T: Row>(output: Output, item: &T, details: &[(&str, String)]) -> anyhow::Result<()> {
    match output {
        Output::Json | Output::Yaml => whole(output, item),
        Output::Csv => print(&Lines::all(output).of(std::slice::from_ref(item))?),
        Output::Table => line(&table::upright(item, details)),
    }
}

/// Prints more of a list that goes on: further lines, or a document for each.
pub fn append<T: Row>(output: Output, lines: &mut Lines<T>, items: &[T]) -> anyhow::Result<()> {
    match output {
        Output::Json | Output::Yaml => items.iter().try_for_each(|item| document(output, item)),
        Output::Table | Output::Csv => print(&lines.of(items)?),
    }
}

/// Prints the changes of a list that is watched: lines or documents that begin with the kind of change.
pub fn changes<T: Row>(
    output: Output,
    lines: &mut Lines<T>,
    news: &[(Change, T)],
) -> anyhow::Result<()> {
    #[derive(Serialize)]
    struct Document<'a, T> {
        change: Change,
        item: &'a T,
    }
    match output {
        Output::Json | Output::Yaml => news
            .iter()
            .try_for_each(|(change, item)| document(output, &Document { change: *change, item })),
        Output::Table | Output::Csv => print(&lines.of_changes(news)?),
    }
}

/// Prints one document of a stream: a line of JSON, or a YAML document.
pub fn document<T: Serialize>(output: Output, item: &T) -> anyhow::Result<()> {
    match output {
        Output::Yaml => print(&format!("---\n{}", yaml(item)?)),
        _ => line(&serde_json::to_string(item)?),
    }
}

/// Prints one document of the API, as YAML or else as JSON.
pub fn whole<T: Serialize>(output: Output, item: &T) -> anyhow::Result<()> {
    match output {
        Output::Yaml => print(&yaml(item)?),
        _ => line(&serde_json::to_string_pretty(item)?),
    }
}

fn yaml<T: Serialize>(item: &T) -> anyhow::Result<String> {
    let mut text = serde_saphyr::to_string(item)?;
    if !text.ends_with('\n') {
        text.push('\n');
    }
    Ok(text)
}

/// What `task show` adds to the columns.
pub fn task_details(task: &Task) -> Vec<(&'static str, String)> {
    let mut details = migration::details(task);
    details.extend(task.former_images.iter().map(|image| ("FORMER IMAGE", image.to_string())));
    // What has the turns stands in the column of the step.
    let is_more = |it: &&Waiting| !it.detail.is_empty() && it.on != WaitingOn::Turn;
    let waiting = task.waiting.iter().filter(is_more);
    details.extend(waiting.map(|waiting| ("WAITS", waiting.detail.clone())));
    details.extend(task.problem.iter().map(|problem| ("PROBLEM CODE", word(&problem.code))));
    details
}

/// The limits, the cache and the replica of a disk, as text that follows its format.
fn limits(disk: &Disk) -> String {
    let size = |bytes| Cell::Bytes(bytes).for_people();
    let limits = &disk.limits;
    let iops = limits.iops.map(|iops| format!(", at most {iops} IOPS"));
    let bandwidth = limits.bandwidth.map(|bytes| format!(", at most {}/s", size(bytes)));
    let stall = limits.stall_timeout;
    let stall = stall.map(|seconds| format!(", fails after {seconds} s without an answer"));
    let cache = disk.cache.map(|bytes| format!(", {} of cache", size(bytes)));
    let replica = disk.replica.as_ref().map(|replica| {
        let rate = size(replica.bytes_per_second);
        format!(", replicated to {} at {rate}/s at most", replica.datastore)
    });
    [iops, bandwidth, stall, cache, replica].into_iter().flatten().collect()
}

/// A network card, with where its guest is reached.
fn nic_line(nic: &Nic) -> String {
    let (name, mac, model, backend) = (&nic.name, nic.mac, nic.model.name(), &nic.backend);
    let mut line = format!("{name} {mac} {model} on {backend}");
    if nic.link == NicLink::Down {
        line += ", link down";
    }
    if let Some(interface) = &nic.interface {
        line += &format!(", interface {interface}");
    }
    let addresses: Vec<_> = nic.addresses.iter().map(ToString::to_string).collect();
    if !addresses.is_empty() {
        line += &format!(", address {}", addresses.join(" "));
    }
    for PortForward { protocol, host_address, host_port, guest_port } in nic.ports() {
        let port = if *host_port == 0 { "any".to_owned() } else { host_port.to_string() };
        line += &format!(", {} {host_address}:{port} to {guest_port}", protocol.name());
    }
    line
}

/// What is said of a disk that is not the guest's own.
fn role(role: DiskRole) -> &'static str {
    match role {
        DiskRole::Data => "",
        DiskRole::CloudInit => ", read-only to the guest",
        DiskRole::UefiVariables => ", variables of the firmware",
        DiskRole::Tpm => ", key of the TPM",
    }
}

/// Where a disk is encrypted.
fn encrypted_at(disk: &Disk) -> String {
    disk.encrypted_at.map_or_else(String::new, |at| format!(", encrypted at: {at}"))
}

/// What of a VM is not as its policy requires.
fn not_as_policy(vm: &Vm) -> Vec<(&'static str, String)> {
    let line = |what: String| ("NOT AS POLICY", what);
    match &vm.compliance {
        Some(compliance) => {
            let told = |it: &Deviation| line(format!("{}: {}", word(&it.requirement), it.detail));
            compliance.deviations.iter().map(told).collect()
        }
        // A server of an earlier version says this alone.
        None if vm.disks_in_the_clear.is_empty() => Vec::new(),
        None => {
            let disks = vm.disks_in_the_clear.join(", ");
            vec![line(format!("disks in the clear: {disks}; policy '{}' encrypts", vm.policy))]
        }
    }
}

/// What `vm show` adds to the columns.
pub fn vm_details(vm: &Vm) -> Vec<(&'static str, String)> {
    let mut lines = Vec::new();
    if let Some(key) = &vm.key {
        lines.push(("CHECK VALUE", key.check.clone()));
    }
    for disk in &vm.disks {
        let format = disk_format(disk);
        let size = Cell::Bytes(disk.size).for_people();
        lines.push((
            "DISK",
            format!(
                "{} {size} {} on {}: {format}{}{}{} ({})",
                disk.name,
                word(&disk.allocation),
                disk.datastore,
                encrypted_at(disk),
                limits(disk),
                role(disk.role),
                disk.id
            ),
        ));
    }
    lines.extend(not_as_policy(vm));
    lines.extend(vm.nics.iter().map(|nic| ("NIC", nic_line(nic))));
    if let Some(stopped) = &vm.stopped {
        lines.push((
            "LAST STOP",
            format!("{} at {:.0}: {}", word(&stopped.reason), stopped.at, stopped.detail),
        ));
    }
    lines
}

#[cfg(test)]
mod tests {
    use clap::{Command, FromArgMatches};
    use vmseal_api::model::TaskState;

    use super::*;

    fn how(arguments: &[&str]) -> Result<Columns<Task>, clap::Error> {
        let command = <Columns<Task> as clap::Args>::augment_args(Command::new("list"));
        let arguments = std::iter::once("list").chain(arguments.iter().copied());
        Columns::from_arg_matches(&command.try_get_matches_from(arguments)?)
    }

    fn task(target: &str, percent: Option<u8>) -> Task {
        Task {
            id: "018f0000-0000-7000-8000-000000000001".parse().unwrap(),
            kind: "vm.create".into(),
            target: target.into(),
            state: TaskState::Running,
            step: "create, \"the\" disks".into(),
            percent,
            progress: None,
            bytes_per_second: None,
            seconds_left: None,
            migration: None,
            migrated: None,
            former_images: Vec::new(),
            rate: None,
            paused: false,
            created: "2026-01-02T03:04:05.678901Z".parse().unwrap(),
            ended: None,
            request_id: None,
            waiting: None,
            parent: None,
            not_before: None,
            problem: None,
        }
    }

    fn printed(output: Output, arguments: &[&str], items: &[Task]) -> String {
        Lines::new(output, &how(arguments).unwrap()).of(items).unwrap()
    }

    #[test]
    fn a_table_is_for_people() {
        let tasks = [task("a", None), task("a-long-name", Some(7))];
        let chosen = ["-c", "target,percent,created"];
        assert_eq!(
            printed(Output::Table, &chosen, &tasks),
            "TARGET       PERCENT  CREATED\n\
             a            -        2026-01-02T03:04:05Z\n\
             a-long-name  7        2026-01-02T03:04:05Z\n"
        );
        let bare = ["-c", "target", "--no-header"];
        assert_eq!(printed(Output::Table, &bare, &tasks), "a\na-long-name\n");
        assert_eq!(printed(Output::Table, &bare, &[]), "");
        assert_eq!(printed(Output::Table, &["-c", "target"], &[]), "TARGET\n");
    }

    #[test]
    fn csv_is_for_programs_and_quotes_what_needs_it() {
        let tasks = [task("a", None), task("b", Some(7))];
        assert_eq!(
            printed(Output::Csv, &["--columns", "target,percent", "-c", "created,step"], &tasks),
            "target,percent,created,step\n\
             a,,2026-01-02T03:04:05.678901Z,\"create, \"\"the\"\" disks\"\n\
             b,7,2026-01-02T03:04:05.678901Z,\"create, \"\"the\"\" disks\"\n"
        );
        assert_eq!(printed(Output::Csv, &["-c", "target", "--no-header"], &tasks), "a\nb\n");
    }

    #[test]
    fn later_lines_are_aligned_and_have_no_second_header() {
        let mut lines = Lines::new(Output::Table, &how(&["-c", "target,percent"]).unwrap());
        assert_eq!(lines.of(&[]).unwrap(), "TARGET  PERCENT\n");
        assert_eq!(lines.of(&[task("abcdefgh", None)]).unwrap(), "abcdefgh  -\n");
        assert_eq!(lines.of(&[task("b", Some(1))]).unwrap(), "b         1\n");
        assert_eq!(lines.of(&[]).unwrap(), "");
    }

    #[test]
    fn an_unknown_column_is_refused_with_the_names_of_all() {
        let error = how(&["-c", "target,colour"]).err().unwrap();
        assert_eq!(error.exit_code(), 2);
        let said = error.to_string();
        assert!(said.contains("'colour'") && said.contains("target, state, step"), "{said}");
    }

    #[test]
    fn a_queued_task_says_once_what_has_the_turns() {
        let (name, detail) = ("here".to_owned(), "4 tasks copy".to_owned());
        let waiting = Some(Waiting { on: WaitingOn::Turn, name, detail });
        let task = Task { state: TaskState::Queued, waiting, ..task("a", None) };
        let shown = table::upright(&task, &task_details(&task));
        assert_eq!(shown.matches("queued: 4 tasks copy").count(), 1, "{shown}");
        assert_eq!(shown.matches("4 tasks copy").count(), 1, "{shown}");
    }

    #[test]
    fn a_vm_says_what_of_its_storage_is_not_as_its_policy_requires() {
        let vm = |compliance: serde_json::Value| -> Vm {
            serde_json::from_value(serde_json::json!({
                "id": "11111111-1111-7111-8111-111111111111",
                "name": "web", "host": "here", "policy": "gold", "vcpus": 1, "memory": 1 << 30,
                "disks": [], "disks_in_the_clear": ["root"], "lifecycle": "ready",
                "compliance": compliance,
            }))
            .unwrap()
        };
        let shown = |compliance| {
            let vm = vm(compliance);
            table::upright(&vm, &vm_details(&vm))
        };
        let line = |shown: &str, word: &str| {
            let found = shown.lines().find(|line| line.starts_with(word));
            found.and_then(|line| line.strip_prefix(word)).map(|rest| rest.trim().to_owned())
        };
        let said = shown(serde_json::json!({ "compliant": true }));
        assert_eq!(line(&said, "COMPLIANCE:").as_deref(), Some("compliant"), "{said}");
        assert_eq!(line(&said, "NOT AS POLICY:"), None, "{said}");
        let deviation = |requirement: &str| {
            serde_json::json!({
                "requirement": requirement, "disk": "root", "datastore": "ceph", "detail": "it is so",
            })
        };
        let deviations = ["osd_encryption", "messenger", "messenger"].map(deviation);
        let said = shown(serde_json::json!({ "compliant": false, "deviations": deviations }));
        let lacking = "not compliant: osd-encryption, messenger";
        assert_eq!(line(&said, "COMPLIANCE:").as_deref(), Some(lacking), "{said}");
        assert_eq!(line(&said, "NOT AS POLICY:").as_deref(), Some("osd-encryption: it is so"));
        assert_eq!(said.matches("messenger: it is so").count(), 2, "{said}");
        // A server of an earlier version.
        let said = shown(serde_json::Value::Null);
        assert_eq!(line(&said, "COMPLIANCE:").as_deref(), Some("-"), "{said}");
        let told = "disks in the clear: root; policy 'gold' encrypts";
        assert_eq!(line(&said, "NOT AS POLICY:").as_deref(), Some(told), "{said}");
    }

    #[test]
    fn yaml_has_the_same_content_as_json() {
        let text = yaml(&[task("a: b # c", None), task("no", Some(7))]).unwrap();
        assert!(text.starts_with("- id: 018f0000-0000-7000-8000-000000000001\n"), "{text}");
        // A name that YAML would read as another type is quoted.
        assert!(text.contains("target: \"no\"\n") || text.contains("target: 'no'\n"), "{text}");
        assert!(text.contains("percent: 7\n"), "{text}");
        assert!(text.contains("a: b # c") && !text.contains("target: a: b"), "{text}");
    }
}
