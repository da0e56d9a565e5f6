//! Shell completion. The shell calls this program, which knows its options and asks the server for names.

use std::ffi::OsStr;
use std::path::Path;
use std::time::Duration;

use clap::{Arg, Command, CommandFactory};
use clap_complete::engine::{ArgValueCandidates, ArgValueCompleter, CompletionCandidate};
use clap_complete::env::{CompleteEnv, EnvCompleter, Fish};
use serde::Deserialize;
use serde_json::Value;
use vmseal_api::model::TaskState;
use vmseal_api::transfer::ImageFormat;

use crate::arguments::{Arguments, Global, Shell};
use crate::disk_option::{DISK_KEYS, YES_NO};
use crate::{connection, libvirt};

/// The variable by which a shell asks for completions.
const VARIABLE: &str = "COMPLETE";

/// The script for bash. clap's own hands over the words as bash splits them, at `=` too, and so knows nothing of the
/// values of `--disk`. The variables are those of clap, which answers.
const BASH: &str = include_str!("completion/vmseal.bash");

/// The script for zsh. clap's own puts a space after a key of `--disk`, and answers nothing the first time.
const ZSH: &str = include_str!("completion/vmseal.zsh");

/// The longest time to wait for names.
const NAMES_TIMEOUT: Duration = Duration::from_secs(2);

/// The nouns whose verbs take a name, and the lists that have the names.
const NOUNS: [(&str, &str); 11] = [
    ("host", "hosts"),
    ("datastore", "datastores"),
    ("provider", "providers"),
    ("policy", "policies"),
    ("vm", "vms"),
    ("disk", "vms"),
    ("nic", "vms"),
    ("snapshot", "vms"),
    ("dump", "vms"),
    ("backup", "vms"),
    ("task", "tasks"),
];

/// The verbs about tasks that have not ended.
const UNFINISHED: [&str; 6] = ["cancel", "pause", "resume", "set", "wait", "watch"];

/// The verbs that take a new name.
const NEW: [&str; 6] = ["add", "clone", "create", "dump", "import", "launch"];

/// What a network of a libvirt domain may become.
const NETWORK_KINDS: [&str; 3] = ["bridge=", "tap=", "user"];

/// If a shell asks for completions, answers and ends the program.
pub fn answer() {
    CompleteEnv::with_factory(command).var(VARIABLE).complete();
}

/// The script that a shell loads.
pub fn script(shell: Shell) -> anyhow::Result<String> {
    match shell {
        Shell::Bash => Ok(BASH.to_owned()),
        Shell::Zsh => Ok(ZSH.to_owned()),
        Shell::Fish => {
            let mut script = Vec::new();
            Fish.write_registration(VARIABLE, "vmseal", "vmseal", "vmseal", &mut script)?;
            Ok(String::from_utf8(script)?)
        }
    }
}

/// The command line, with completion of names.
fn command() -> Command {
    NOUNS.into_iter().fold(Arguments::command(), |command, (noun, list)| {
        command.mut_subcommand(noun, |noun| noun.mut_subcommands(|verb| with_names(verb, list)))
    })
}

fn with_names(verb: Command, list: &'static str) -> Command {
    let takes_new = NEW.contains(&verb.get_name());
    let unfinished = list == "tasks" && UNFINISHED.contains(&verb.get_name());
    let verb = verb.mut_subcommands(|verb| with_names(verb, list));
    verb.mut_args(move |arg| match arg.get_id().as_str() {
        "name" | "tasks" if unfinished => arg.add(ArgValueCandidates::new(unfinished_tasks)),
        "name" if !takes_new => named(arg, list),
        "tasks" => named(arg, "tasks"),
        "policy" | "create_for_policy" => named(arg, "policies"),
        "provider" => named(arg, "providers"),
        "host" => named(arg, "hosts"),
        "vm" | "vms" => named(arg, "vms"),
        "disk" | "disks" if takes_new => arg.add(ArgValueCompleter::new(disk_option)),
        "disk" | "disks" => arg.add(ArgValueCandidates::new(|| of_vms("disks"))),
        "snapshot" => arg.add(ArgValueCandidates::new(|| kept_of_vm("snapshots"))),
        "backup" => arg.add(ArgValueCandidates::new(|| kept_of_vm("backups"))),
        "dump" => arg.add(ArgValueCandidates::new(|| kept_of_vm("dumps"))),
        "nic" if !takes_new => arg.add(ArgValueCandidates::new(|| of_vms("nics"))),
        "datastore" | "replicate_to" => named(arg, "datastores"),
        "networks" => arg.add(ArgValueCompleter::new(network_option)),
        _ => arg,
    })
}

fn named(arg: Arg, list: &'static str) -> Arg {
    arg.add(ArgValueCandidates::new(move || names(list)))
}

/// The names of the disks, or network cards, of the VM that is already typed; of all VMs while none is.
fn of_vms(what: &str) -> Vec<CompletionCandidate> {
    candidates(names_of(&fetched("vms"), what, &typed_words()))
}

/// The names of the snapshots, backups or core dumps of the VM that is already typed.
fn kept_of_vm(what: &str) -> Vec<CompletionCandidate> {
    let typed = typed_words();
    let vms = fetched("vms");
    let is_typed =
        |vm: &&Value| typed.iter().any(|word| vm["name"] == **word || vm["id"] == **word);
    let Some(id) = vms.iter().find(is_typed).and_then(|vm| vm["id"].as_str()) else {
        return Vec::new();
    };
    let known = fetched(&format!("vms/{id}/{what}"));
    let names = known.iter().filter_map(|it| Some(it["name"].as_str()?.to_owned()));
    candidates(names.collect())
}

fn names_of(vms: &[Value], what: &str, typed: &[String]) -> Vec<String> {
    let is_typed = |vm: &&Value| {
        ["name", "id"]
            .iter()
            .any(|key| vm[*key].as_str().is_some_and(|it| typed.iter().any(|word| word == it)))
    };
    let chosen: Vec<&Value> = vms.iter().filter(is_typed).collect();
    let of = if chosen.is_empty() { vms.iter().collect() } else { chosen };
    let all = of.into_iter().filter_map(|vm| vm.get(what)?.as_array()).flatten();
    let mut names: Vec<String> =
        all.filter_map(|it| Some(it.get("name")?.as_str()?.to_owned())).collect();
    names.sort_unstable();
    names.dedup();
    names
}

/// The words of the line that is being completed: the shell gives them after `--`.
fn typed_words() -> Vec<String> {
    std::env::args().skip_while(|word| word != "--").skip(1).collect()
}

/// The ids of the tasks that have not ended.
fn unfinished_tasks() -> Vec<CompletionCandidate> {
    fetched("tasks").iter().filter(|task| is_unfinished(task)).filter_map(of_task).collect()
}

fn is_unfinished(task: &Value) -> bool {
    TaskState::deserialize(&task["state"]).is_ok_and(TaskState::is_open)
}

/// A task's id, and what the task is.
fn of_task(task: &Value) -> Option<CompletionCandidate> {
    let help = format!("{} {}", task["kind"].as_str()?, task["target"].as_str()?);
    Some(CompletionCandidate::new(task["id"].as_str()?).help(Some(help.into())))
}

/// The next part of the value of `--disk`.
fn disk_option(current: &OsStr) -> Vec<CompletionCandidate> {
    let Some(current) = current.to_str() else { return Vec::new() };
    candidates(disk_option_parts(current, || {
        let datastores = fetched("datastores");
        datastores.iter().filter_map(|it| Some(it["name"].as_str()?.to_owned())).collect()
    }))
}

fn disk_option_parts(current: &str, datastores: impl FnOnce() -> Vec<String>) -> Vec<String> {
    let (before, part) = match current.rfind(',') {
        Some(comma) => current.split_at(comma + 1),
        None => ("", current),
    };
    let parts: Vec<String> = match part.split_once('=') {
        Some(("datastore", _)) => {
            datastores().into_iter().map(|name| format!("datastore={name}")).collect()
        }
        Some(("format", _)) => {
            ImageFormat::ALL.iter().map(|format| format!("format={}", format.name())).collect()
        }
        Some(("encrypted", _)) => {
            YES_NO.iter().map(|(word, _)| format!("encrypted={word}")).collect()
        }
        Some(_) => Vec::new(),
        None => {
            let given =
                |key: &&&str| before.split(',').any(|part| part.starts_with(&format!("{key}=")));
            DISK_KEYS.iter().filter(|key| !given(key)).map(|key| format!("{key}=")).collect()
        }
    };
    let fits = parts.into_iter().filter(|it| it.starts_with(part));
    fits.map(|part| format!("{before}{part}")).collect()
}

/// The next part of the value of `--network`, of the domain that is already typed.
fn network_option(current: &OsStr) -> Vec<CompletionCandidate> {
    let Some(current) = current.to_str() else { return Vec::new() };
    candidates(network_option_parts(current, || {
        // One that cannot be read is no reason to disturb the line.
        let file = value_of("--libvirt", &typed_words());
        file.and_then(|file| libvirt::networks_in(Path::new(&file)).ok()).unwrap_or_default()
    }))
}

fn network_option_parts(current: &str, networks: impl FnOnce() -> Vec<String>) -> Vec<String> {
    let parts: Vec<String> = match current.split_once(':') {
        Some((network, _)) => {
            NETWORK_KINDS.iter().map(|kind| format!("{network}:{kind}")).collect()
        }
        None => networks().into_iter().map(|network| format!("{network}:")).collect(),
    };
    parts.into_iter().filter(|it| it.starts_with(current)).collect()
}

/// The value of an option of the line, as `OPTION VALUE` or `OPTION=VALUE`.
fn value_of(option: &str, typed: &[String]) -> Option<String> {
    let mut words = typed.iter();
    while let Some(word) = words.next() {
        if word == option {
            return words.next().cloned();
        }
        if let Some(value) = word.strip_prefix(option).and_then(|rest| rest.strip_prefix('=')) {
            return Some(value.to_owned());
        }
    }
    None
}

fn candidates(texts: Vec<String>) -> Vec<CompletionCandidate> {
    texts.into_iter().map(CompletionCandidate::new).collect()
}

/// The names of a list.
fn names(list: &str) -> Vec<CompletionCandidate> {
    let name = |item: &Value| {
        let name = item.get("name").or_else(|| item.get("id"))?;
        name.as_str().map(CompletionCandidate::new)
    };
    fetched(list).iter().filter_map(name).collect()
}

/// The items of a list; none if the server does not answer, as an error would disturb the line being typed.
fn fetched(list: &str) -> Vec<Value> {
    let fetch = || -> anyhow::Result<Vec<Value>> {
        let server = connection::connect(&Global::from_environment())?;
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        Ok(runtime.block_on(async {
            tokio::time::timeout(NAMES_TIMEOUT, server.all::<Value>(list)).await
        })??)
    };
    fetch().unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn existing_names_are_completed_and_new_ones_are_not() {
        let command = command();
        let asks = |noun: &str, verb: &str, arg: &str| {
            let verb = command.find_subcommand(noun).unwrap().find_subcommand(verb).unwrap();
            let arg = verb.get_arguments().find(|it| it.get_id() == arg).unwrap();
            arg.get::<ArgValueCandidates>().is_some()
        };
        assert!(asks("vm", "start", "name") && asks("vm", "show", "name"));
        assert!(asks("vm", "create", "policy") && asks("task", "wait", "tasks"));
        assert!(asks("vm", "encrypt", "vms") && asks("vm", "decrypt", "vms"));
        assert!(asks("vm", "move", "vms") && asks("vm", "move", "datastore"));
        assert!(asks("vm", "move", "disks") && asks("vm", "recrypt", "disks"));
        assert!(asks("vm", "encrypt", "disks") && asks("vm", "decrypt", "disks"));
        assert!(!asks("vm", "create", "disks") && !asks("disk", "add", "disk"));
        assert!(asks("disk", "list", "vm") && asks("disk", "show", "disk"));
        assert!(asks("disk", "replica", "vm") && asks("disk", "replica", "disk"));
        assert!(asks("vm", "import", "datastore"));
        assert!(asks("datastore", "add", "create_for_policy"));
        let bitmap = command.find_subcommand("disk").unwrap().find_subcommand("bitmap").unwrap();
        let clear = bitmap.find_subcommand("clear").unwrap();
        let mut names = clear.get_arguments().filter(|it| it.get::<ArgValueCandidates>().is_some());
        assert!(["vm", "disk"].into_iter().eq(names.by_ref().map(|it| it.get_id().as_str())));
        assert!(!asks("vm", "create", "name") && !asks("policy", "create", "name"));
        assert!(!asks("vm", "launch", "name") && !asks("vm", "dump", "name"));
        assert!(asks("nic", "remove", "nic") && !asks("nic", "add", "nic"));
    }

    #[test]
    fn disks_are_those_of_the_vm_that_is_typed() {
        let vms = [
            serde_json::json!({"name": "web", "id": "1", "disks": [{"name": "root"}, {"name": "log"}]}),
            serde_json::json!({"name": "db", "id": "2", "disks": [{"name": "root"}, {"name": "data"}]}),
        ];
        let typed = |line: &str| line.split(' ').map(str::to_owned).collect::<Vec<_>>();
        let names = |line| names_of(&vms, "disks", &typed(line));
        assert_eq!(names("vmseal disk show db "), ["data", "root"]);
        assert_eq!(names("vmseal disk show 1 l"), ["log", "root"]);
        assert_eq!(names("vmseal disk show new "), ["data", "log", "root"]);
    }

    #[test]
    fn the_parts_of_a_disk_are_completed_one_by_one() {
        let parts = |current| disk_option_parts(current, || vec!["fast".into(), "bulk".into()]);
        assert_eq!(parts("d"), ["datastore="]);
        assert_eq!(parts("datastore="), ["datastore=fast", "datastore=bulk"]);
        assert_eq!(parts("datastore=f"), ["datastore=fast"]);
        let more = ["size=", "name=", "image=", "format=", "encrypted="]
            .map(|key| format!("datastore=fast,{key}"));
        assert_eq!(parts("datastore=fast,"), more);
        assert_eq!(parts("size=1G,format=q"), ["size=1G,format=qcow2"]);
        assert_eq!(parts("size=1G,encrypted="), ["size=1G,encrypted=yes", "size=1G,encrypted=no"]);
        assert!(parts("size=1").is_empty());
    }

    #[test]
    fn networks_are_those_of_the_domain_that_is_typed() {
        let parts =
            |current| network_option_parts(current, || vec!["default".into(), "lab".into()]);
        assert_eq!(parts(""), ["default:", "lab:"]);
        assert_eq!(parts("la"), ["lab:"]);
        assert_eq!(parts("lab:"), ["lab:bridge=", "lab:tap=", "lab:user"]);
        assert_eq!(parts("lab:u"), ["lab:user"]);
        let words = |line: &str| line.split(' ').map(str::to_owned).collect::<Vec<_>>();
        let file = |line: &str| value_of("--libvirt", &words(line));
        assert_eq!(file("vmseal vm import --libvirt web.xml --network").unwrap(), "web.xml");
        assert_eq!(file("vmseal vm import --libvirt=web.xml --network").unwrap(), "web.xml");
        assert_eq!(file("vmseal vm import --network"), None);
    }

    /// What bash asks of the program, and what it then offers, once it has split the line so. The cursor is at its end;
    /// `replaced` is what bash is going to replace.
    fn in_bash(line: &str, split: &[&str], replaced: &str, answers: &[&str]) -> Vec<String> {
        // A function stands for the program.
        const COMPLETE: &str = r#"
            vmseal() {
                printf '%s|' "$@" >&3
                echo "$COMPLETE $_CLAP_COMPLETE_INDEX" >&3
                printf '%s' "$answers"
            }
            exec 3>&1
            eval "$script"
            registered=$(complete -p vmseal)
            name=${registered##*-F }
            COMP_LINE=$1 COMP_POINT=${#1} replaced=$2
            shift 2
            COMP_WORDS=("$@") COMP_CWORD=$(($# - 1))
            "${name% *}" vmseal "$replaced" "${COMP_WORDS[COMP_CWORD - 1]}"
            printf '%s\n' "${COMPREPLY[@]}"
        "#;
        let mut bash = std::process::Command::new("bash");
        bash.args(["--norc", "-c", COMPLETE, "bash", line, replaced]).args(split);
        bash.env("script", script(Shell::Bash).unwrap()).env("answers", answers.join("\n"));
        let output = bash.output().unwrap();
        assert!(output.stderr.is_empty(), "{}", String::from_utf8_lossy(&output.stderr));
        String::from_utf8(output.stdout).unwrap().lines().map(str::to_owned).collect()
    }

    /// As bash 5.2 splits with its usual `COMP_WORDBREAKS`.
    #[test]
    fn bash_asks_for_the_word_that_was_typed_and_replaces_its_end() {
        let add = ["vmseal", "disk", "add", "web"];
        let of = |typed: &str, split: &[&str], replaced: &str, answers: &[&str]| {
            let line = format!("vmseal disk add web {typed}");
            in_bash(&line, &[&add[..], split].concat(), replaced, answers)
        };
        assert_eq!(
            of("--disk d", &["--disk", "d"], "d", &["datastore="]),
            ["--|vmseal|disk|add|web|--disk|d|bash 5", "datastore="]
        );
        let names = ["datastore=fast", "datastore=bulk"];
        assert_eq!(
            of("--disk datastore=", &["--disk", "datastore", "="], "", &names),
            ["--|vmseal|disk|add|web|--disk|datastore=|bash 5", "fast", "bulk"]
        );
        let split = ["--disk", "datastore", "=", "local,si"];
        assert_eq!(
            of("--disk datastore=local,si", &split, "local,si", &["datastore=local,size="]),
            ["--|vmseal|disk|add|web|--disk|datastore=local,si|bash 5", "local,size="]
        );
        let split = ["--disk", "size", "=", "1G,format", "=", "q"];
        assert_eq!(
            of("--disk  size=1G,format=q", &split, "q", &["size=1G,format=qcow2"]),
            ["--|vmseal|disk|add|web|--disk|size=1G,format=q|bash 5", "qcow2"]
        );
        let split = ["--disk", "=", "size", "=", "1G,fo"];
        assert_eq!(
            of("--disk=size=1G,fo", &split, "1G,fo", &["--disk=size=1G,format="]),
            ["--|vmseal|disk|add|web|--disk=size=1G,fo|bash 4", "1G,format="]
        );
        // Quotes that are still open: bash replaces all that is in them.
        assert_eq!(
            of(
                "--disk \"size=1G,fo",
                &["--disk", "\"size=1G,fo"],
                "size=1G,fo",
                &["size=1G,format="]
            ),
            ["--|vmseal|disk|add|web|--disk|size=1G,fo|bash 5", "size=1G,format="]
        );
        // Another word begins after a blank.
        assert_eq!(
            of("--disk datastore= ", &["--disk", "datastore", "=", ""], "", &["--nic"]),
            ["--|vmseal|disk|add|web|--disk|datastore=||bash 6", "--nic"]
        );
        // Colons split words too.
        assert_eq!(
            of("--to host:84", &["--to", "host", ":", "84"], "84", &["host:8443"]),
            ["--|vmseal|disk|add|web|--to|host:84|bash 5", "8443"]
        );
    }

    #[test]
    fn tasks_that_have_ended_are_not_offered_to_those_who_want_to_change_them() {
        let offered = |state: &str| is_unfinished(&serde_json::json!({"state": state}));
        for state in ["queued", "running", "waiting", "rolling_back"] {
            assert!(offered(state), "{state}");
        }
        for state in ["done", "failed", "cancelled", "unknown", "of a newer server"] {
            assert!(!offered(state), "{state}");
        }
        let task = serde_json::json!({"id": "7", "kind": "vm.stop", "target": "web"});
        let offered = of_task(&task).unwrap();
        assert_eq!(offered.get_value(), "7");
        assert_eq!(offered.get_help().unwrap().to_string(), "vm.stop web");
    }

    #[test]
    fn every_shell_gets_a_script_that_calls_this_program() {
        for (shell, program) in [(Shell::Bash, "bash"), (Shell::Zsh, "zsh"), (Shell::Fish, "fish")]
        {
            let script = script(shell).unwrap();
            assert!(script.contains("COMPLETE") && script.contains("vmseal"), "{script}");
            // The shell reads it, where there is such a shell.
            let file = tempfile::NamedTempFile::new().unwrap();
            std::fs::write(file.path(), script).unwrap();
            match std::process::Command::new(program).arg("-n").arg(file.path()).output() {
                Ok(read) => assert!(read.status.success(), "{read:?}"),
                Err(error) => assert_eq!(error.kind(), std::io::ErrorKind::NotFound, "{error}"),
            }
        }
    }
}
