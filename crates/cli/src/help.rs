//! The command line with the rest of its help: examples and exit codes.

use std::fmt::Write;

use clap::{Arg, Command, CommandFactory};

use crate::arguments::Arguments;
use crate::{examples, exit};

/// Exit codes that differ from those of every other command, by page.
const EXITS: &[(&str, &str)] =
    &[("vmseal-doctor", "The exit code is 1 when something has failed, and 0 with warnings only.")];

/// Shown in the help of every command in place of the global options.
const GLOBAL_OPTIONS: &str =
    "Global options: --server, --ca, --token-file, --request-id, -o/--output; see `vmseal --help`.";

/// The command line as it is parsed and explained.
pub fn command() -> Command {
    let mut command = explained(Arguments::command(), "vmseal");
    // Subcommands have the global options only after this.
    command.build();
    without_global_options(command)
}

/// Hides the global options in the help of subcommands, where they would be most of the text.
fn without_global_options(command: Command) -> Command {
    command.mut_subcommands(|verb| {
        without_global_options(verb.mut_args(|arg| {
            let hidden = arg.is_global_set() || arg.is_hide_set();
            arg.hide(hidden)
        }))
    })
}

/// The arguments that become a part of a request's path.
const IN_PATHS: [&str; 11] =
    ["name", "vm", "vms", "disk", "nic", "snapshot", "dump", "bitmap", "policy", "tasks", "kms"];

/// Whether an argument is one of these; the options of a device that is added have the name of a device, too.
fn is_in_path(arg: &Arg) -> bool {
    let options = arg.get_value_names().is_some_and(|names| names.iter().any(|it| it == "OPTIONS"));
    IN_PATHS.contains(&arg.get_id().as_str()) && !options
}

/// Refuses names that would change the path of a request.
fn one_name(typed: &str) -> Result<String, String> {
    if matches!(typed, "" | "." | "..") || typed.contains(['/', '?']) {
        return Err("this is neither a name nor an id: they hold no '/' and no '?', and are not '.' or '..'".to_owned());
    }
    Ok(typed.to_owned())
}

fn explained(command: Command, page: &str) -> Command {
    let command = command.mut_args(|arg| match is_in_path(&arg) {
        true => arg.value_parser(one_name),
        false => arg,
    });
    let ends = ending(page);
    command.after_long_help(ends).mut_subcommands(|verb| {
        let page = format!("{page}-{}", verb.get_name());
        explained(verb, &page)
    })
}

/// The end of the long help.
fn ending(page: &str) -> String {
    let mut text = String::new();
    for (index, (what, typed)) in examples::of(page).enumerate() {
        let head = if index == 0 { "Examples:\n" } else { "" };
        let what = if what.is_empty() { String::new() } else { format!("  {what}\n") };
        // Writing to memory does not fail.
        let _ = writeln!(text, "{head}{what}    {typed}");
    }
    if !text.is_empty() {
        text.push('\n');
    }
    if page == "vmseal" {
        return text + &exit::help();
    }
    if let Some((_, said)) = EXITS.iter().find(|(of, _)| *of == page) {
        text.push_str(said);
        text.push('\n');
    }
    text + GLOBAL_OPTIONS
}

#[cfg(test)]
mod conventions;

#[cfg(test)]
mod documents;

#[cfg(test)]
mod tests {
    use std::path::PathBuf;

    use super::*;

    /// As wide as help is where there is no terminal.
    const WIDTH: usize = 100;

    /// The help texts of a command and of all below it.
    fn texts(command: &mut Command, typed: &str) -> String {
        let mut text = format!("$ {typed} --help\n{}\n", command.render_long_help());
        for verb in command.get_subcommands_mut().filter(|verb| verb.get_name() != "help") {
            let typed = format!("{typed} {}", verb.get_name());
            text.push_str(&texts(verb, &typed));
        }
        // Editors and reviewers strip them.
        text.lines().map(|line| format!("{}\n", line.trim_end())).collect()
    }

    /// `UPDATE_HELP=1 cargo test -p vmseal help` rewrites the files: read them, then commit them.
    #[test]
    fn every_help_text_matches_its_file() {
        let directory = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/help");
        let mut command = command().term_width(WIDTH);
        let mut wanted = vec![(
            "vmseal.txt".to_owned(),
            format!("$ vmseal --help\n{}\n", command.render_long_help()),
        )];
        for noun in command.get_subcommands_mut().filter(|noun| noun.get_name() != "help") {
            let name = noun.get_name().to_owned();
            wanted.push((format!("{name}.txt"), texts(noun, &format!("vmseal {name}"))));
        }
        for (_, text) in &mut wanted {
            *text = text.lines().map(|line| format!("{}\n", line.trim_end())).collect();
        }
        if std::env::var_os("UPDATE_HELP").is_some() {
            std::fs::create_dir_all(&directory).unwrap();
            for entry in std::fs::read_dir(&directory).unwrap() {
                std::fs::remove_file(entry.unwrap().path()).unwrap();
            }
            for (name, text) in &wanted {
                std::fs::write(directory.join(name), text).unwrap();
            }
        }
        for (name, text) in &wanted {
            let known = std::fs::read_to_string(directory.join(name)).unwrap_or_default();
            let first = known.lines().zip(text.lines()).find(|(known, now)| known != now);
            assert!(
                known == *text,
                "{name} is not what --help says: {first:?}. UPDATE_HELP=1 rewrites it; read it then"
            );
        }
        let mut files: Vec<_> = std::fs::read_dir(&directory)
            .unwrap()
            .map(|entry| entry.unwrap().file_name().into_string().unwrap())
            .collect();
        let mut names: Vec<_> = wanted.into_iter().map(|(name, _)| name).collect();
        files.sort();
        names.sort();
        assert_eq!(files, names, "a file for a noun that no longer exists");
    }

    /// No argument can change the path of a request, whatever its verb calls it.
    #[test]
    fn names_that_would_change_the_path_are_refused() {
        for typed in ["a/b", "a?b", "..", ".", ""] {
            for before in [
                &["vm", "show"][..],
                &["vm", "start"],
                &["vm", "console"],
                &["vm", "delete"],
                &["disk", "list"],
                &["disk", "show", "vm"],
                &["disk", "show"],
                &["disk", "bitmap", "list", "vm"],
                &["disk", "replica", "vm"],
                &["disk", "bitmap", "remove", "vm", "disk"],
                &["task", "wait"],
                &["task", "cancel"],
                &["provider", "trust", "kms", "--kms"],
                &["provider", "remove"],
                &["host", "log-level"],
                &["datastore", "scan"],
                &["policy", "show"],
                &["policy", "set", "--iops", "1"],
                &["nic", "remove", "vm"],
                &["snapshot", "delete", "vm"],
                &["dump", "delete", "vm"],
                &["vm", "encrypt"],
            ] {
                let typed = [&["vmseal"], before, &[typed]].concat();
                let refused = command().try_get_matches_from(&typed).err();
                let refused = refused.unwrap_or_else(|| panic!("{typed:?} is accepted"));
                assert_eq!(refused.exit_code(), 2);
                assert!(refused.to_string().contains("neither a name nor an id"), "{refused}");
            }
        }
        let usual = ["vmseal", "datastore", "show", "host1:local"];
        assert!(command().try_get_matches_from(usual).is_ok());
        let disk = "datastore=local,name=more,image=/srv/a.raw,format=raw";
        let added = ["vmseal", "disk", "add", "web", "--disk", disk];
        assert!(command().try_get_matches_from(added).is_ok());
    }

    /// Every text begins with a capital letter, ends without a full stop, and is not empty.
    #[test]
    fn every_command_and_option_is_explained_in_one_style() {
        fn check(command: &Command, typed: &str) {
            let about = command.get_about().map(ToString::to_string).unwrap_or_default();
            style(&about, typed);
            for arg in command.get_arguments() {
                let typed = format!("{typed} {}", arg.get_id());
                let said = arg.get_long_help().or(arg.get_help()).map(ToString::to_string);
                style(&said.unwrap_or_default(), &typed);
            }
            for verb in command.get_subcommands() {
                check(verb, &format!("{typed} {}", verb.get_name()));
            }
        }
        fn style(text: &str, of: &str) {
            assert!(text.len() >= 6, "{of} is not explained: {text:?}");
            assert!(!text.starts_with(|c: char| c.is_lowercase()), "{of}: {text}");
            assert!(!text.ends_with('.'), "{of}: {text}");
        }
        for noun in command().get_subcommands() {
            check(noun, noun.get_name());
        }
    }
}
