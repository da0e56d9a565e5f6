//! The commands that README and `docs/` show: the command line takes them.

use std::path::{Path, PathBuf};

use clap::Command;
use clap::error::{ContextKind, ErrorKind};

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

/// What can stand before a command in a line: the end of another one, or what runs it.
const BEFORE: [&str; 6] = ["&& ", "; ", "| ", "or: ", "(", "sudo "];

/// What follows `vmseal` in each command of a line, to the end of the line.
fn commands_in(line: &str) -> impl Iterator<Item = &str> {
    line.match_indices("vmseal ").filter_map(move |(at, program)| {
        let (before, typed) = line.split_at(at);
        let begins = before.is_empty() || BEFORE.iter().any(|end| before.ends_with(end));
        begins.then(|| &typed[program.len()..])
    })
}

/// The words of a command up to where a shell would end it; quotes hold words together.
fn words(typed: &str) -> Vec<String> {
    let mut words = Vec::new();
    let mut rest = typed.trim_start();
    while !rest.is_empty() {
        let quoted =
            ['"', '\''].into_iter().find_map(|quote| rest.strip_prefix(quote)?.split_once(quote));
        let (word, after) =
            quoted.unwrap_or_else(|| rest.split_once(char::is_whitespace).unwrap_or((rest, "")));
        if ["#", "|", "||", "&", "&&", ">", "<"].contains(&word) {
            break;
        }
        // The command ends with this word, or with the parentheses around it.
        let ends = quoted.is_none() && !word.contains('(') && word.ends_with([';', ')']);
        let inner = if ends { word.trim_end_matches([';', ')']) } else { word };
        words.push(inner.to_owned());
        if ends {
            break;
        }
        rest = after.trim_start();
    }
    words
}

/// Whether this is a noun of the command line and more, as in `vm create`, where `vmseal` is left out.
fn is_verb(command: &Command, code: &str) -> bool {
    let Some((noun, verb)) = code.split_once(' ') else { return false };
    let noun = command.find_subcommand(noun);
    verb.starts_with(|first: char| first.is_lowercase())
        && noun.is_some_and(Command::is_subcommand_required_set)
}

/// Whether this is what bytes are said to be for, such as `vmseal native provider key v1`, and no command.
fn is_label(code: &str) -> bool {
    let version = code.rsplit_once(" v").map(|(_, version)| version);
    version.is_some_and(|version| version.parse::<u32>().is_ok())
}

/// The commands of one document.
fn shown_in(command: &Command, path: &Path) -> Vec<Shown> {
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
        let begins = typed.starts_with("vmseal ");
        for (nth, typed) in commands_in(typed).enumerate() {
            // What stands in a comment, or in what is printed, may leave parts out.
            note(format!("{name}:{}", index + 1), typed, begins && nth == 0);
        }
    }
    for paragraph in prose.split("\n\n") {
        for code in paragraph.split('`').skip(1).step_by(2) {
            let code = code.split_whitespace().collect::<Vec<_>>().join(" ");
            if is_label(&code) {
                continue;
            }
            let place = format!("{name}: `{code}`");
            if is_verb(command, &code) {
                note(place.clone(), &code, false);
            }
            for typed in commands_in(&code) {
                note(place.clone(), typed, false);
            }
        }
    }
    found
}

/// A word without the brackets and dots that say that it can be left out, or that more follows.
fn bare(word: &str) -> &str {
    word.trim_start_matches('[').trim_end_matches([']', ',', '…'])
}

/// Whether a refused value is none: left out, or in its place a name such as `FILE`, or alternatives.
fn stands_for_a_value(refused: &clap::Error) -> bool {
    let value = refused.get(ContextKind::InvalidValue).map(ToString::to_string).unwrap_or_default();
    value.is_empty()
        || value.contains(|c: char| c.is_uppercase() || ['…', '|', '[', '<'].contains(&c))
}

/// Whether a refused verb is none, but a name such as `VERB` in its place.
fn stands_for_a_verb(refused: &clap::Error) -> bool {
    let verb = refused.get(ContextKind::InvalidSubcommand).map(ToString::to_string);
    verb.is_some_and(|verb| verb.starts_with(|first: char| first.is_uppercase()))
}

/// Checks a command of which parts may be left out, or stand for something: the names of verbs and
/// options, the number of arguments, and the values that are given.
fn check_part(command: &Command, words: &[String]) -> Result<(), String> {
    check_names(command, words)?;
    let given = words.iter().map(|word| bare(word)).filter(|word| !word.is_empty());
    let Err(refused) = command.clone().try_get_matches_from(["vmseal"].into_iter().chain(given))
    else {
        return Ok(());
    };
    match refused.kind() {
        ErrorKind::InvalidSubcommand if stands_for_a_verb(&refused) => Ok(()),
        ErrorKind::UnknownArgument
        | ErrorKind::InvalidSubcommand
        | ErrorKind::TooManyValues
        | ErrorKind::WrongNumberOfValues => Err(refused.to_string()),
        ErrorKind::InvalidValue | ErrorKind::ValueValidation if !stands_for_a_value(&refused) => {
            Err(refused.to_string())
        }
        // Among these are arguments that are left out, and options of which one is to be chosen.
        _ => Ok(()),
    }
}

/// Checks the verb and the names of the options, and not what is left out or stands for something.
fn check_names(mut verb: &Command, words: &[String]) -> Result<(), String> {
    for word in words.iter().take_while(|word| *word != "--") {
        let name = bare(word);
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
    for shown in documents().iter().flat_map(|path| shown_in(&command, path)) {
        lines += usize::from(shown.whole);
        let checked = match shown.whole {
            true => {
                let words = ["vmseal"].into_iter().chain(shown.words.iter().map(String::as_str));
                let parsed = command.clone().try_get_matches_from(words);
                parsed.map(drop).map_err(|error| error.to_string())
            }
            false => check_part(&command, &shown.words),
        };
        wrong.extend(checked.err().map(|error| format!("{}: {error}", shown.place)));
    }
    assert!(lines > 80, "only {lines} commands were found");
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

#[test]
fn a_command_that_does_not_exist_is_found() {
    let command = command();
    let checked = |typed: &str| check_part(&command, &words(typed));
    for right in [
        "vm set web [--tpm on] …",
        "server --listen … --name … & # runs",
        "vm set --vcpus",
        "vm show VM",
        "task wait ID…",
        "datastore set ceph --osd-encryption yes|no|ask",
    ] {
        checked(right).unwrap();
    }
    for (wrong, of) in [
        ("vm burn web", "burn"),
        ("vm set web --ghost=1", "--ghost"),
        ("vm show web db", "db"),
        ("vm set web -z", "-z"),
        ("vm set web --on-drain burn", "burn"),
        ("nic remove web lan wan", "wan"),
    ] {
        let said = checked(wrong).unwrap_err();
        assert!(said.contains(of), "{wrong}: {said}");
    }
}

#[test]
fn every_command_of_a_line_is_found() {
    let found = |line: &str| {
        let typed = commands_in(line).map(|typed| words(typed).join(" "));
        typed.collect::<Vec<_>>()
    };
    assert_eq!(found("vmseal vm stop a && vmseal vm start a"), ["vm stop a", "vm start a"]);
    assert_eq!(
        found("cat key | vmseal datastore add b --key-file -"),
        ["datastore add b --key-file -"]
    );
    assert_eq!(found("vmseal vm list   # all; vmseal vm show a"), ["vm list", "vm show a"]);
    assert_eq!(found("source <(vmseal completion bash)"), ["completion bash"]);
    assert_eq!(found("sudo vmseal image build debian; ls"), ["image build debian"]);
    assert_eq!(
        found("vmseal vm set a --description 'the shop'"),
        ["vm set a --description the shop"]
    );
    assert_eq!(found(" vmseal server   inventory, tasks"), [""; 0]);
}
