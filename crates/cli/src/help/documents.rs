//! The commands that README and `docs/` show: the command line takes them.

use std::path::{Path, PathBuf};

use clap::Command;

use super::command;

/// A command in a document.
struct Shown {
    /// The document, and in it the line or the words.
    place: String,
    /// The words after `vmseal`.
    words: Vec<String>,
    /// Whether it can be typed as it stands: a line of an example, with nothing left out.
    whole: bool,
}

/// README and all of `docs/`.
fn documents() -> Vec<PathBuf> {
    fn below(directory: &Path, found: &mut Vec<PathBuf>) {
        for entry in std::fs::read_dir(directory).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                below(&path, found);
            } else if path.extension().is_some_and(|extension| extension == "md") {
                found.push(path);
            }
        }
    }
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let mut found = vec![root.join("README.md")];
    below(&root.join("docs"), &mut found);
    found
}

/// The words of a command up to where a shell would end it; quotes hold words together.
fn words(typed: &str) -> Vec<String> {
    let mut words = Vec::new();
    let mut rest = typed.trim_start();
    while !rest.is_empty() {
        let (word, after) = match rest.strip_prefix('"').and_then(|quoted| quoted.split_once('"')) {
            Some(both) => both,
            None => rest.split_once(char::is_whitespace).unwrap_or((rest, "")),
        };
        if ["#", "|", "||", "&", "&&", ">", "<"].contains(&word) {
            break;
        }
        words.push(word.trim_end_matches(';').to_owned());
        rest = after.trim_start();
    }
    words
}

/// Whether this is a noun of the command line and more, as in `vm create`, where `vmseal` is left out.
fn is_verb(code: &str) -> bool {
    let command = command();
    let noun = code.split_once(' ').and_then(|(noun, _)| command.find_subcommand(noun));
    noun.is_some_and(Command::is_subcommand_required_set)
}

/// Whether this is what bytes are said to be for, such as `vmseal native provider key v1`, and no command.
fn is_label(code: &str) -> bool {
    let version = code.rsplit_once(" v").map(|(_, version)| version);
    version.is_some_and(|version| version.parse::<u32>().is_ok())
}

/// The commands of one document.
fn shown_in(path: &Path) -> Vec<Shown> {
    let text = std::fs::read_to_string(path).unwrap();
    let name = path.file_name().unwrap().to_string_lossy().into_owned();
    let mut found = Vec::new();
    let mut note = |place: String, typed: &str, is_line: bool| {
        let whole = is_line && !typed.contains(['…', '[']);
        found.push(Shown { place, words: words(typed), whole });
    };

    let mut fence = None;
    let (mut prose, mut begun) = (String::new(), String::new());
    for (index, line) in text.lines().enumerate() {
        if let Some((indent, _)) = line.split_once("```") {
            fence = fence.is_none().then_some(indent.len());
            continue;
        }
        let Some(indent) = fence else {
            prose = prose + line + "\n";
            continue;
        };
        let line = begun.clone() + line.get(indent..).unwrap_or_default();
        if let Some(first) = line.strip_suffix('\\') {
            begun = first.to_owned();
            continue;
        }
        begun.clear();
        let typed = line.trim_start().strip_prefix("$ ").unwrap_or(&line);
        if let Some(typed) = typed.strip_prefix("vmseal ") {
            note(format!("{name}:{}", index + 1), typed, true);
        }
    }
    for paragraph in prose.split("\n\n") {
        for code in paragraph.split('`').skip(1).step_by(2) {
            let code = code.split_whitespace().collect::<Vec<_>>().join(" ");
            let typed = code.strip_prefix("vmseal ").or_else(|| is_verb(&code).then_some(&*code));
            if let Some(typed) = typed.filter(|_| !is_label(&code)) {
                note(format!("{name}: `{code}`"), typed, false);
            }
        }
    }
    found
}

/// Checks the verb and the names of the options, and not what is left out or stands for something.
fn check_names(mut verb: &Command, words: &[String]) -> Result<(), String> {
    for word in words.iter().take_while(|word| *word != "--") {
        let name = word.trim_start_matches('[').trim_end_matches([']', ',', '…']);
        if let Some(option) = name.strip_prefix("--") {
            let option = option.split_once('=').map_or(option, |(option, _)| option);
            if !verb.get_arguments().any(|arg| arg.get_long() == Some(option)) {
                return Err(format!("'{}' has no option --{option}", verb.get_name()));
            }
        } else if verb.has_subcommands() && name.starts_with(|first: char| first.is_lowercase()) {
            match verb.find_subcommand(name) {
                Some(found) => verb = found,
                // `vmseal server` and `vmseal agent` run; what they take begins with an option.
                None => return Err(format!("'{}' has no verb '{name}'", verb.get_name())),
            }
        }
    }
    Ok(())
}

#[test]
fn documents_show_only_commands_that_exist() {
    let command = command();
    let (mut lines, mut wrong) = (0, Vec::new());
    for shown in documents().iter().flat_map(|path| shown_in(path)) {
        lines += usize::from(shown.whole);
        let checked = match shown.whole {
            true => {
                let words = ["vmseal"].into_iter().chain(shown.words.iter().map(String::as_str));
                let parsed = command.clone().try_get_matches_from(words);
                parsed.map(drop).map_err(|error| error.to_string())
            }
            false => check_names(&command, &shown.words),
        };
        wrong.extend(checked.err().map(|error| format!("{}: {error}", shown.place)));
    }
    assert!(lines > 80, "only {lines} commands were found");
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

#[test]
fn a_command_that_does_not_exist_is_found() {
    let checked = |typed: &str| check_names(&command(), &words(typed));
    checked("vm set web [--tpm on] …").unwrap();
    checked("server --listen … --name … & # runs").unwrap();
    assert!(checked("vm burn web").unwrap_err().contains("burn"));
    assert!(checked("vm set web --ghost=1").unwrap_err().contains("--ghost"));
}
