//! The manual pages: one for every command, made from its help and from sections that the help lacks.

use std::fmt::Write as _;
use std::path::Path;

use anyhow::Context;
use clap::Command;
use clap_mangen::Man;

use crate::{examples, exit, help};

/// Files, by page: path and content.
const FILES: &[(&str, &str, &str)] = &[
    (
        "vmseal",
        "~/.config/vmseal/client.toml",
        "saved by vmseal login: the server, its authority, and the path of the token",
    ),
    (
        "vmseal-login",
        "~/.config/vmseal/client.toml",
        "the server, its authority, and the path of the token",
    ),
    (
        "vmseal-server",
        "/var/lib/vmseal/server/ca.pem",
        "the certificate of the authority: what clients need",
    ),
    ("vmseal-server", "/var/lib/vmseal/server/ca.key", "its private key: keep it secret"),
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
        "this host's identity: certificate and key",
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
    ("vmseal", "NO_COLOR", "set to anything: no colours (none are used without a terminal)"),
    (
        "vmseal-server",
        "RUST_LOG",
        "the log level for standard error at start: warn, info (default), debug, or as vmseal_control=debug",
    ),
    (
        "vmseal-server",
        "CREDENTIALS_DIRECTORY",
        "where systemd puts credentials: vmseal-provider-NAME unlocks the native provider NAME at the start",
    ),
    (
        "vmseal-agent",
        "RUST_LOG",
        "the log level for standard error at start: warn, info (default), debug, or as vmseal_agent=debug",
    ),
];

/// Writes a page for every command.
pub fn write(directory: &Path) -> anyhow::Result<()> {
    std::fs::create_dir_all(directory)
        .with_context(|| format!("cannot create {}", directory.display()))?;
    let command = help::command();
    for (name, page) in pages(&command, "vmseal") {
        let path = directory.join(format!("{name}.1"));
        std::fs::write(&path, page).with_context(|| format!("cannot write {}", path.display()))?;
    }
    Ok(())
}

fn pages(command: &Command, name: &str) -> Vec<(String, Vec<u8>)> {
    let mut made = vec![(name.to_owned(), page(command, name))];
    for verb in
        command.get_subcommands().filter(|verb| !verb.is_hide_set() && verb.get_name() != "help")
    {
        made.extend(pages(verb, &format!("{name}-{}", verb.get_name())));
    }
    made
}

fn page(command: &Command, name: &str) -> Vec<u8> {
    let source = concat!("vmseal ", env!("CARGO_PKG_VERSION"));
    let man = Man::new(command.clone()).title(name.to_uppercase()).manual("vmseal").source(source);
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
    examples_of(&mut text, name);
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

/// The purpose of an example as text, its command verbatim.
fn examples_of(text: &mut String, page: &str) {
    for (index, (what, typed)) in examples::of(page).enumerate() {
        if index == 0 {
            text.push_str(".SH \"EXAMPLES\"\n");
        }
        // Writing to memory does not fail.
        let _ =
            writeln!(text, ".PP\n{}\n.PP\n.RS 4\n.nf\n{}\n.fi\n.RE", escaped(what), escaped(typed));
    }
}

/// Escapes what roff would interpret: backslashes, hyphens, and dots and quotes at the start of a line.
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
        for (name, term, _) in [FILES, ENVIRONMENT].concat() {
            let page = read(name).unwrap_or_else(|_| panic!("there is no page {name}"));
            assert!(page.contains(&escaped(term)), "{name}: {term}");
        }
        for (name, _, typed) in examples::EXAMPLES {
            let page = read(name).unwrap_or_else(|_| panic!("there is no page {name}"));
            assert!(page.contains(&escaped(typed)), "{name}: {typed}");
        }
    }

    #[test]
    fn what_roff_would_interpret_is_escaped() {
        assert_eq!(escaped(r".a\b-c"), r"\&.a\eb\-c");
    }
}
