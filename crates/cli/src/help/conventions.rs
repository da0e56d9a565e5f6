//! Options that every verb must have, checked for the whole command line.

use clap::Command;

use super::command;

/// Verbs that change nothing.
const READING: &[&str] = &[
    "alarms",
    "backup list",
    "backup show",
    "completion",
    "datastore list",
    "datastore scan",
    "datastore show",
    "disk bitmap list",
    "disk list",
    "disk replica",
    "disk show",
    "doctor",
    "dump list",
    "dump show",
    "events",
    "host list",
    "host show",
    "image list",
    "lab ceph status",
    "lab list",
    "nic list",
    "policy list",
    "policy show",
    "provider list",
    "provider show",
    "remote check",
    "remote list",
    "remote show",
    "snapshot list",
    "snapshot show",
    "task list",
    "task show",
    "task wait",
    "task watch",
    "vm guest ping",
    "vm list",
    "vm show",
    "vm top",
];

/// Verbs that change something and have no `--dry-run`; docs/cli.md gives the reason of each.
const NO_DRY_RUN: &[&str] = &[
    "agent",
    "agent join",
    "image build",
    "lab ceph down",
    "lab ceph pool add",
    "lab ceph up",
    "lab disk",
    "lab run",
    "man",
    "provider test",
    "server",
    "vm console",
    "vm guest exec",
    "vm guest fsfreeze",
    "vm guest fsthaw",
    "vm ssh",
    "vm vnc",
    "disk expose",
    "server log-level",
    "host log-level",
];

/// Every verb, without the leading `vmseal`, with the names of its options.
fn verbs() -> Vec<(String, Vec<String>)> {
    fn below(command: &Command, typed: &str, found: &mut Vec<(String, Vec<String>)>) {
        for verb in command.get_subcommands().filter(|verb| verb.get_name() != "help") {
            let typed = format!("{typed} {}", verb.get_name()).trim().to_owned();
            if !verb.is_subcommand_required_set() {
                let options = verb.get_arguments().filter_map(|arg| arg.get_long());
                found.push((typed.clone(), options.map(str::to_owned).collect()));
            }
            below(verb, &typed, found);
        }
    }
    let mut found = Vec::new();
    below(&command(), "", &mut found);
    found
}

fn has(options: &[String], wanted: &str) -> bool {
    options.iter().any(|option| option == wanted)
}

#[test]
fn every_change_has_a_dry_run() {
    let manual = include_str!("../../../../docs/cli.md");
    for (verb, options) in verbs() {
        let listed = READING.contains(&&*verb) || NO_DRY_RUN.contains(&&*verb);
        match has(&options, "dry-run") {
            true => {
                assert!(!listed, "vmseal {verb} is listed as one without --dry-run, and has it")
            }
            false => assert!(
                listed,
                "vmseal {verb} has no --dry-run: give it one; if it changes nothing, say so in READING"
            ),
        }
    }
    for known in READING.iter().chain(NO_DRY_RUN) {
        assert!(verbs().iter().any(|(verb, _)| verb == known), "there is no vmseal {known}");
    }
    for verb in NO_DRY_RUN {
        assert!(
            manual.contains(&format!("| `{verb}` |")),
            "docs/cli.md: why has {verb} no --dry-run?"
        );
    }
}

/// An argument with the id of a global option replaces it: one of the two values would be lost silently.
#[test]
fn no_argument_has_the_id_of_a_global_option() {
    fn below(command: &Command, typed: &str, global: &[String]) {
        for verb in command.get_subcommands() {
            let typed = format!("{typed} {}", verb.get_name());
            for arg in verb.get_arguments().filter(|arg| !arg.is_global_set()) {
                let id = arg.get_id().as_str();
                assert!(!global.iter().any(|known| known == id), "{typed}: the argument '{id}'");
            }
            below(verb, &typed, global);
        }
    }
    let command = command();
    let global = command.get_arguments().filter(|arg| arg.is_global_set());
    let global: Vec<_> = global.map(|arg| arg.get_id().to_string()).collect();
    assert!(global.iter().any(|id| id == "server"), "{global:?}");
    below(&command, "vmseal", &global);
}

#[test]
fn everything_that_is_shown_can_be_watched() {
    let shown: Vec<_> = verbs().into_iter().filter(|(verb, _)| verb.ends_with(" show")).collect();
    assert!(shown.len() > 6, "{shown:?}");
    for (verb, options) in shown {
        assert!(has(&options, "watch"), "vmseal {verb} has no --watch");
    }
    let lists = |verb: &str| verb.ends_with(" list") || ["alarms", "events"].contains(&verb);
    let found: Vec<_> = verbs().into_iter().filter(|(verb, _)| lists(verb)).collect();
    assert!(found.len() > 6, "{found:?}");
    for (verb, options) in found {
        // What no server tells.
        let is_local = ["image list", "lab list"].contains(&&*verb);
        assert!(is_local || has(&options, "watch"), "vmseal {verb} has no --watch");
        assert!(has(&options, "columns"), "vmseal {verb} has no --columns");
    }
}
