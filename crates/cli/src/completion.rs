//! Shell completion. The shell calls this program, which knows its options and asks the server for names.

use std::time::Duration;

use clap::{Arg, Command, CommandFactory};
use clap_complete::engine::{ArgValueCandidates, CompletionCandidate};
use clap_complete::env::{CompleteEnv, Shells};
use serde_json::Value;

use crate::arguments::{Arguments, Global, Shell};
use crate::connection;

/// The variable by which a shell asks for completions.
const VARIABLE: &str = "COMPLETE";

/// How long a person waits for names at most.
const PATIENCE: Duration = Duration::from_secs(2);

/// The nouns whose verbs take a name, and the lists that have the names.
const NOUNS: [(&str, &str); 8] = [
    ("host", "hosts"),
    ("datastore", "datastores"),
    ("provider", "providers"),
    ("policy", "policies"),
    ("vm", "vms"),
    ("disk", "vms"),
    ("nic", "vms"),
    ("task", "tasks"),
];

/// The verbs whose name is a new one.
const NEW: [&str; 3] = ["add", "create", "import"];

/// Answers a shell and ends the program, where it is a shell that asks.
pub fn answer() {
    CompleteEnv::with_factory(command).var(VARIABLE).complete();
}

/// The script that a shell is to read once.
pub fn script(shell: Shell) -> anyhow::Result<String> {
    let name = match shell {
        Shell::Bash => "bash",
        Shell::Zsh => "zsh",
        Shell::Fish => "fish",
    };
    let shells = Shells::builtins();
    let mut script = Vec::new();
    if let Some(completer) = shells.completer(name) {
        completer.write_registration(VARIABLE, "vmseal", "vmseal", "vmseal", &mut script)?;
    }
    Ok(String::from_utf8(script)?)
}

/// The command line, with names wherever one is to be typed.
fn command() -> Command {
    NOUNS.into_iter().fold(Arguments::command(), |command, (noun, list)| {
        command.mut_subcommand(noun, |noun| noun.mut_subcommands(|verb| with_names(verb, list)))
    })
}

fn with_names(verb: Command, list: &'static str) -> Command {
    let takes_new = NEW.contains(&verb.get_name());
    let verb = verb.mut_subcommands(|verb| with_names(verb, list));
    verb.mut_args(move |arg| match arg.get_id().as_str() {
        "name" if !takes_new => named(arg, list),
        "tasks" => named(arg, "tasks"),
        "policy" => named(arg, "policies"),
        "provider" => named(arg, "providers"),
        "host" => named(arg, "hosts"),
        "vm" => named(arg, "vms"),
        "disk" => arg.add(ArgValueCandidates::new(|| of_vms("disks"))),
        "nic" => arg.add(ArgValueCandidates::new(|| of_vms("nics"))),
        "datastore" | "replicate_to" => named(arg, "datastores"),
        _ => arg,
    })
}

fn named(arg: Arg, list: &'static str) -> Arg {
    arg.add(ArgValueCandidates::new(move || names(list)))
}

/// The names that disks, or network cards, have.
fn of_vms(what: &str) -> Vec<CompletionCandidate> {
    let vms = asked("vms");
    let all = vms.iter().filter_map(|vm| vm.get(what)?.as_array()).flatten();
    let mut names: Vec<_> = all.filter_map(|it| it.get("name")?.as_str()).collect();
    names.sort_unstable();
    names.dedup();
    names.into_iter().map(CompletionCandidate::new).collect()
}

/// The names of a list.
fn names(list: &str) -> Vec<CompletionCandidate> {
    let name = |item: &Value| {
        let name = item.get("name").or_else(|| item.get("id"))?;
        name.as_str().map(CompletionCandidate::new)
    };
    asked(list).iter().filter_map(name).collect()
}

/// What is in a list; nothing where the server cannot be asked, as nothing may disturb the line that is typed.
fn asked(list: &str) -> Vec<Value> {
    let asked = || -> anyhow::Result<Vec<Value>> {
        let server = connection::connect(&Global::from_environment())?;
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        Ok(runtime.block_on(async {
            tokio::time::timeout(PATIENCE, server.all::<Value>(list)).await
        })??)
    };
    asked().unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_asked_for_where_one_of_what_is_there_is_to_be_typed() {
        let command = command();
        let asks = |noun: &str, verb: &str, arg: &str| {
            let verb = command.find_subcommand(noun).unwrap().find_subcommand(verb).unwrap();
            let arg = verb.get_arguments().find(|it| it.get_id() == arg).unwrap();
            arg.get::<ArgValueCandidates>().is_some()
        };
        assert!(asks("vm", "start", "name") && asks("vm", "show", "name"));
        assert!(asks("vm", "create", "policy") && asks("task", "wait", "tasks"));
        assert!(asks("disk", "list", "vm") && asks("disk", "show", "disk"));
        assert!(asks("disk", "replica", "vm") && asks("disk", "replica", "disk"));
        assert!(asks("vm", "import", "datastore"));
        let bitmap = command.find_subcommand("disk").unwrap().find_subcommand("bitmap").unwrap();
        let clear = bitmap.find_subcommand("clear").unwrap();
        let mut names = clear.get_arguments().filter(|it| it.get::<ArgValueCandidates>().is_some());
        assert!(["vm", "disk"].into_iter().eq(names.by_ref().map(|it| it.get_id().as_str())));
        assert!(!asks("vm", "create", "name") && !asks("policy", "create", "name"));
    }

    #[test]
    fn every_shell_gets_a_script_that_calls_this_program() {
        for shell in [Shell::Bash, Shell::Zsh, Shell::Fish] {
            let script = script(shell).unwrap();
            assert!(script.contains("COMPLETE") && script.contains("vmseal"), "{script}");
        }
    }
}
