//! The manual pages: one for every command, made from what `--help` says and the sections that it has not.

use std::fmt::Write as _;
use std::path::Path;

use anyhow::Context;
use clap::{Command, CommandFactory};
use clap_mangen::Man;

use crate::arguments::Arguments;
use crate::exit;

/// Files, by page: where, and what it is.
const FILES: &[(&str, &str, &str)] = &[
    (
        "vmseal",
        "~/.config/vmseal/client.toml",
        "what vmseal login saves: the server, its authority, and where the token is",
    ),
    (
        "vmseal-login",
        "~/.config/vmseal/client.toml",
        "what is saved: the server, its authority, and where the token is",
    ),
    (
        "vmseal-server",
        "/var/lib/vmseal/server/ca.pem",
        "the certificate of the authority: what clients need",
    ),
    (
        "vmseal-server",
        "/var/lib/vmseal/server/ca.key",
        "its key: whoever has it can be a server or a host",
    ),
    (
        "vmseal-server",
        "/var/lib/vmseal/server/admin.token",
        "the administrator's access token, written at the first start: store it elsewhere and remove it",
    ),
    ("vmseal-server", "/var/lib/vmseal/server/inventory.db", "the inventory: no key is in it"),
    ("vmseal-server", "/var/lib/vmseal/server/providers/", "the native providers' sealed keys"),
    (
        "vmseal-agent",
        "/var/lib/vmseal/agent/identity.json",
        "who this host is: its certificate and key",
    ),
    ("vmseal-agent", "/run/vmseal/", "sockets, process ids and logs of running VMs"),
    (
        "vmseal-agent",
        "/run/vmseal/vms/ID/",
        "those of one VM, with the logs of its QEMU and its filter",
    ),
];

/// Environment variables, by page.
const ENVIRONMENT: &[(&str, &str, &str)] = &[
    ("vmseal", "VMSEAL_SERVER, VMSEAL_CA, VMSEAL_TOKEN_FILE", "as --server, --ca and --token-file"),
    ("vmseal", "VMSEAL_REQUEST_ID", "as --request-id"),
    (
        "vmseal",
        "NO_COLOR",
        "set to anything: no colours; there are none anyway where no terminal is",
    ),
    (
        "vmseal-server",
        "RUST_LOG",
        "how much is logged to standard error at first: warn, info (so it is without), debug, or as vmseal_control=debug",
    ),
    (
        "vmseal-server",
        "CREDENTIALS_DIRECTORY",
        "where systemd puts credentials: vmseal-provider-NAME unlocks the native provider NAME at the start",
    ),
    (
        "vmseal-agent",
        "RUST_LOG",
        "how much is logged to standard error at first: warn, info (so it is without), debug, or as vmseal_agent=debug",
    ),
];

/// Examples, by page.
const EXAMPLES: &[(&str, &str, &str)] = &[
    (
        "vmseal",
        "Is anything wrong, and what is under way?",
        "vmseal alarms; vmseal task list --state running",
    ),
    ("vmseal", "What every list can do:", "vmseal vm list -o csv -c name,power,host --no-header"),
    (
        "vmseal-server",
        "A control plane that hosts and people reach by name:",
        "vmseal server --listen 192.0.2.10:8443 --name control.example.org",
    ),
    (
        "vmseal-agent",
        "Become a host, then be one:",
        "vmseal agent join --to https://192.0.2.10:8443 --name host1 --address 192.0.2.21:8444 < token; vmseal agent",
    ),
    (
        "vmseal-login",
        "Save whom to talk to:",
        "vmseal --server https://192.0.2.10:8443 --ca ca.pem --token-file admin.token login",
    ),
    (
        "vmseal-vm-create",
        "An encrypted VM from a raw image:",
        "vmseal vm create web1 --policy encrypted --vcpus 2 --memory 2GiB --disk datastore=local,size=20GiB,image=/root/debian.raw",
    ),
    (
        "vmseal-vm-create",
        "Would it work?",
        "vmseal vm create web1 --policy encrypted --disk datastore=local,size=20GiB --dry-run",
    ),
    ("vmseal-vm-list", "Follow the power of all VMs:", "vmseal vm list -w -c name,power,host"),
    (
        "vmseal-vm-stop",
        "Give the guest five minutes, but return after one:",
        "vmseal vm stop web1 --grace-period 5m --timeout 1m || [ $? -eq 9 ]",
    ),
    ("vmseal-vm-console", "With another escape than Ctrl-]:", "vmseal vm console web1 --escape ^A"),
    (
        "vmseal-server-log-level",
        "See all requests for a while:",
        "vmseal server log-level info,vmseal_control=debug; sleep 60; vmseal server log-level info",
    ),
    (
        "vmseal-host-log-level",
        "Have one host's agent and filters say more:",
        "vmseal host log-level host1 info,vmseal=debug",
    ),
    ("vmseal-events", "Every use of a key from now on:", "vmseal events --kind key --since 0s -f"),
    (
        "vmseal-task-watch",
        "A bar for each of several tasks:",
        "for vm in a b c; do vmseal vm start $vm --no-wait; done; vmseal task watch",
    ),
    (
        "vmseal-policy-add",
        "What is encrypted with keys of another provider than the default:",
        "vmseal policy add secret --encrypt --provider keys2",
    ),
    (
        "vmseal-doctor",
        "What is to be mended on this host, for a program:",
        "vmseal doctor -o json | jq '.[] | select(.result != \"ok\")'",
    ),
    (
        "vmseal-completion",
        "For this shell, and for all later ones:",
        "source <(vmseal completion bash); vmseal completion bash > /etc/bash_completion.d/vmseal",
    ),
];

/// Writes a page for every command.
pub fn write(directory: &Path) -> anyhow::Result<()> {
    std::fs::create_dir_all(directory)
        .with_context(|| format!("cannot make {}", directory.display()))?;
    let mut command = Arguments::command().disable_help_subcommand(true).after_long_help(None);
    command.build();
    for (name, page) in pages(&command, "vmseal") {
        let path = directory.join(format!("{name}.1"));
        std::fs::write(&path, page).with_context(|| format!("cannot write {}", path.display()))?;
    }
    Ok(())
}

fn pages(command: &Command, name: &str) -> Vec<(String, Vec<u8>)> {
    let mut made = vec![(name.to_owned(), page(command, name))];
    for verb in command.get_subcommands().filter(|verb| !verb.is_hide_set()) {
        made.extend(pages(verb, &format!("{name}-{}", verb.get_name())));
    }
    made
}

fn page(command: &Command, name: &str) -> Vec<u8> {
    let man = Man::new(command.clone()).title(name.to_uppercase()).manual("vmseal");
    let mut page = Vec::new();
    // Writing to memory does not fail.
    let _ = man.render_title(&mut page);
    let _ = man.render_name_section(&mut page);
    let _ = man.render_synopsis_section(&mut page);
    let _ = man.render_description_section(&mut page);
    let _ = man.render_options_section(&mut page);
    if command.has_subcommands() {
        let _ = man.render_subcommands_section(&mut page);
    }
    page.extend(sections(name).into_bytes());
    page
}

fn sections(name: &str) -> String {
    let mut text = String::new();
    let codes: Vec<_> =
        exit::ALL.iter().map(|(exit, meaning)| ((*exit as u8).to_string(), *meaning)).collect();
    section(&mut text, "EXIT STATUS", codes.iter().map(|(code, it)| (code.as_str(), *it)));
    let of = |table: &'static [(&str, &'static str, &'static str)]| {
        table.iter().filter(move |(page, ..)| *page == name).map(|(_, term, said)| (*term, *said))
    };
    section(&mut text, "FILES", of(FILES));
    section(&mut text, "ENVIRONMENT", of(ENVIRONMENT));
    section(&mut text, "EXAMPLES", of(EXAMPLES));
    if name != "vmseal" {
        text.push_str(".SH \"SEE ALSO\"\n\\fBvmseal\\fR(1)\n");
    }
    text
}

fn section<'a>(text: &mut String, head: &str, items: impl Iterator<Item = (&'a str, &'a str)>) {
    let mut items = items.peekable();
    if items.peek().is_none() {
        return;
    }
    // Writing to memory does not fail.
    let _ = writeln!(text, ".SH \"{head}\"");
    for (term, said) in items {
        let _ = writeln!(text, ".TP\n\\fB{}\\fR\n{}", escaped(term), escaped(said));
    }
}

/// What roff would take for its own, it does not get: backslashes, hyphens, and dots and quotes that begin a line.
fn escaped(text: &str) -> String {
    let text = text.replace('\\', "\\e").replace('-', "\\-");
    if text.starts_with(['.', '\'']) { format!("\\&{text}") } else { text }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_command_has_a_page_and_every_extra_section_a_command() {
        let directory = tempfile::tempdir().unwrap();
        write(directory.path()).unwrap();
        let read = |name: &str| std::fs::read_to_string(directory.path().join(format!("{name}.1")));
        for name in
            ["vmseal", "vmseal-vm", "vmseal-vm-create", "vmseal-agent-join", "vmseal-doctor"]
        {
            let page = read(name).unwrap();
            assert!(page.contains(".SH NAME") && page.contains("EXIT STATUS"), "{page}");
        }
        assert!(read("vmseal-man").is_err(), "a hidden command has a page");
        for (name, term, _) in [FILES, ENVIRONMENT, EXAMPLES].concat() {
            let page = read(name).unwrap_or_else(|_| panic!("there is no page {name}"));
            assert!(page.contains(&escaped(term)), "{name}: {term}");
        }
    }

    #[test]
    fn what_roff_would_take_for_its_own_is_escaped() {
        assert_eq!(escaped(r".a\b-c"), r"\&.a\eb\-c");
    }
}
