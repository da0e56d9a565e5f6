//! Fields of the API as the options that a person typed, for messages.

use clap::{Arg, ArgMatches, Command};
use vmseal_api::problem::Problem;

/// Fields whose options have other names.
const OTHER_NAMES: [(&str, &str); 8] = [
    ("directory", "to"),
    ("downtime_milliseconds", "downtime"),
    ("encryption", "encrypt"),
    ("limits.bandwidth", "bandwidth"),
    ("limits.iops", "iops"),
    ("location", "path"),
    ("replica.bytes_per_second", "replicate_rate"),
    ("replica.datastore", "replicate_to"),
];

/// Has a problem name the option of the command line in place of the API's field. A field that is no option stays, but
/// for a network card that the VM has already: the message has its name.
pub fn name_option(error: &mut anyhow::Error, command: &Command, parsed: &ArgMatches) {
    let Some(problem) = error.downcast_mut::<Problem>() else { return };
    let Some(field) = &problem.field else { return };
    if let Some(option) = option_of(leaf(command, parsed), field) {
        problem.field = Some(option);
    } else if field.starts_with("nics[") && !leaf_has(leaf(command, parsed), "nics") {
        problem.field = None;
    }
}

fn leaf_has(command: &Command, id: &str) -> bool {
    command.get_arguments().any(|argument| argument.get_id() == id)
}

/// The command that was given: the last of its words.
fn leaf<'a>(command: &'a Command, parsed: &ArgMatches) -> &'a Command {
    let deeper = parsed.subcommand();
    match deeper.and_then(|(name, parsed)| Some((command.find_subcommand(name)?, parsed))) {
        Some((command, parsed)) => leaf(command, parsed),
        None => command,
    }
}

fn option_of(command: &Command, field: &str) -> Option<String> {
    let argument = |id: &str| command.get_arguments().find(|argument| argument.get_id() == id);
    if let Some((_, other)) = OTHER_NAMES.iter().find(|(known, _)| *known == field)
        && let Some(found) = argument(other)
    {
        return Some(typed(found));
    }
    // What the machine is has options of its own.
    let field = field.strip_prefix("hardware.").unwrap_or(field);
    // What is told at the first boot has options of its own.
    let field = match field.strip_prefix("cloud_init.") {
        Some("user") => "user",
        Some("password_hash") => "password",
        Some(keys) if keys.starts_with("ssh_keys") => keys,
        _ => field,
    };
    let (head, rest) = field.split_once('.').unwrap_or((field, ""));
    let Some((list, index)) = head.split_once('[') else {
        return argument(head).map(typed).or_else(|| option_of_device(command, field));
    };
    // The API counts from 0, people from 1.
    let place = index.strip_suffix(']')?.parse::<usize>().ok()? + 1;
    // `vm launch` makes one disk, and has an option for each of its fields.
    if list == "disks" && argument(list).is_none() {
        return argument(if rest == "size" { "disk_size" } else { rest }).map(typed);
    }
    // What a network card is connected to is not a level of its own in --nic.
    let rest = if rest == "backend" { "" } else { rest };
    let rest = rest.strip_prefix("backend.").unwrap_or(rest);
    let part = if rest.is_empty() { String::new() } else { format!(", {rest}") };
    argument(list).map(|found| format!("{} ({}{part})", typed(found), ordinal(place)))
}

/// The option with a device that is added, of which a field is a part.
fn option_of_device(command: &Command, field: &str) -> Option<String> {
    let option =
        |it: &&Arg| matches!(it.get_id().as_str(), "disk" | "nic") && it.get_long().is_some();
    let found = command.get_arguments().find(option)?;
    let part = field.strip_prefix("backend.").unwrap_or(field);
    Some(format!("{} ({part})", typed(found)))
}

fn typed(argument: &Arg) -> String {
    match argument.get_long() {
        Some(long) => format!("--{long}"),
        None => match argument.get_value_names() {
            Some([name, ..]) => name.to_string(),
            _ => argument.get_id().as_str().to_uppercase(),
        },
    }
}

fn ordinal(place: usize) -> String {
    let ending = match (place % 10, place % 100) {
        (1, tens) if tens != 11 => "st",
        (2, tens) if tens != 12 => "nd",
        (3, tens) if tens != 13 => "rd",
        _ => "th",
    };
    format!("the {place}{ending}")
}

#[cfg(test)]
mod tests {
    use anyhow::Context;
    use vmseal_api::problem::ErrorCode;

    use super::*;

    fn told(line: &str, field: &str) -> String {
        let command = crate::help::command();
        let parsed = command.clone().get_matches_from(line.split(' '));
        let problem = Problem::invalid(field, "is wrong");
        let mut error = Err::<(), _>(problem).context("while creating it").unwrap_err();
        name_option(&mut error, &command, &parsed);
        let problem: &Problem = error.downcast_ref().unwrap();
        assert_eq!(problem.code, ErrorCode::InvalidRequest);
        problem.to_string()
    }

    #[test]
    fn a_message_names_what_was_typed() {
        let create = "vmseal vm create web --policy p --disk datastore=a,size=1G";
        for (field, option) in [
            ("memory", "--memory"),
            ("vcpus", "--vcpus"),
            ("name", "NAME"),
            ("policy", "--policy"),
            ("disks", "--disk"),
            ("disks[0].size", "--disk (the 1st, size)"),
            ("disks[11]", "--disk (the 12th)"),
            ("cloud_init", "--cloud-init"),
            ("cloud_init.user_data", "--cloud-init"),
            ("cloud_init.ssh_keys[1]", "--ssh-key (the 2nd)"),
            ("cloud_init.password_hash", "--password"),
            // A field that no option stands for.
            ("colour", "colour"),
            ("disks[x].size", "disks[x].size"),
        ] {
            assert_eq!(told(create, field), format!("{option}: is wrong"));
        }
        let add = "vmseal disk add web --disk datastore=a,size=1G,name=b";
        assert_eq!(told(add, "size"), "--disk (size): is wrong");
        let add = "vmseal nic add web --nic user";
        assert_eq!(told(add, "backend.forwards[0]"), "--nic (forwards[0]): is wrong");
        let set = "vmseal vm set web --vcpus 2";
        assert_eq!(told(set, "labels"), "--label: is wrong");
        assert_eq!(told("vmseal vm start web --dry-run", "nics[0].backend"), "is wrong");
        assert_eq!(told("vmseal vm cdrom insert web /a.iso", "cdrom"), "ISO: is wrong");
        let launch = "vmseal vm launch web --image debian";
        for (field, option) in [
            ("disks[0].size", "--disk-size"),
            ("disks[0].image", "--image"),
            ("disks[0].datastore", "--datastore"),
            ("nics[0].backend", "--nic (the 1st)"),
            ("policy", "--policy"),
        ] {
            assert_eq!(told(launch, field), format!("{option}: is wrong"));
        }
        let policy = "vmseal policy create p --plain";
        for (field, option) in [
            ("limits.iops", "--iops"),
            ("replica.datastore", "--replicate-to"),
            ("cache", "--cache"),
        ] {
            assert_eq!(told(policy, field), format!("{option}: is wrong"));
        }
    }
}
