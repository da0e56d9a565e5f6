//! Fields of the API as the options that a person typed, for messages.

use clap::parser::ValueSource;
use clap::{Arg, ArgMatches, Command};
use vmseal_api::problem::Problem;

use crate::disk_option::DISK_KEYS;
use crate::exit::FailedTasks;

/// Fields whose options have other names: the options' ids. Of several it is the one that was typed, else the first that
/// the command has.
const OTHER_NAMES: &[(&str, &[&str])] = &[
    ("alias", &["address"]),
    ("arguments", &["command"]),
    ("authorities", &["authority"]),
    ("backup", &["restore", "from"]),
    ("certificate", &["import"]),
    ("create.data_chunks", &["data_chunks"]),
    ("directory", &["to"]),
    ("disks", &["disks", "disk", "datastore"]),
    ("downtime_milliseconds", &["downtime"]),
    ("encryption", &["encrypt", "plain"]),
    ("image_layout.object_size", &["object_size"]),
    ("image_layout.stripe_count", &["stripe_count"]),
    ("image_layout.stripe_unit", &["stripe_unit"]),
    ("key", &["key_file"]),
    ("limits.bandwidth", &["bandwidth"]),
    ("limits.iops", &["iops"]),
    ("limits.stall_timeout", &["on_stall"]),
    ("location", &["path"]),
    ("location.path", &["path"]),
    ("name", &["name", "bitmap"]),
    ("namespace", &["pool"]),
    ("nics", &["nics", "nic"]),
    ("password_hash", &["password", "password_file"]),
    ("path", &["path", "command"]),
    ("place", &["to"]),
    ("private_key", &["key"]),
    ("redundancy", &["failures_to_tolerate"]),
    ("redundancy.data_chunks", &["data_chunks"]),
    ("redundancy.failures", &["failures_to_tolerate"]),
    ("replica.bytes_per_second", &["replicate_rate"]),
    ("replica.datastore", &["replicate_to"]),
    ("size", &["size", "disk_size"]),
    ("timeout_seconds", &["grace_period"]),
    ("to", &["to", "decrypt_to"]),
    ("uefi_variables", &["nvram"]),
];

/// Fields with passphrases, the ids of their options, and what they are called where they were asked for.
const PASSPHRASES: [(&str, &str, &str); 4] = [
    ("backup_passphrase", "backup_passphrase_file", "passphrase of the backup"),
    ("new", "passphrase_file", "new passphrase"),
    ("old", "old_passphrase_file", "current passphrase"),
    ("passphrase", "passphrase_file", "passphrase"),
];

/// The fields of a network card that `--nic` has.
const NIC_FIELDS: [&str; 5] = ["backend", "link", "mac", "model", "name"];

/// Has a problem, of a request or of tasks that failed, name the option of the command line in place of the API's field. A
/// field that is no option stays, but for a network card that the VM has already: the message has its name.
pub fn name_option(error: &mut anyhow::Error, command: &Command, parsed: &ArgMatches) {
    let given = Given::leaf(command, parsed);
    each_problem(error, |problem| given.name_option(problem));
}

fn each_problem(error: &mut anyhow::Error, change: impl Fn(&mut Problem)) {
    if let Some(problem) = error.downcast_mut::<Problem>() {
        change(problem);
    } else if let Some(failed) = error.downcast_mut::<FailedTasks>() {
        failed.problems().for_each(change);
    }
}

/// Has a problem with a network card name the interface of the libvirt domain that it is. The cards of these interfaces are the
/// first ones of the request; those of options come after them, and are counted from 0 again.
pub fn name_interface(error: &mut anyhow::Error, interfaces: &[String]) {
    each_problem(error, |problem| {
        let named = problem.field.as_deref().and_then(|field| of_interface(field, interfaces));
        if named.is_some() {
            problem.field = named;
        }
    });
}

fn of_interface(field: &str, interfaces: &[String]) -> Option<String> {
    let (head, part) = field.split_once('.').unwrap_or((field, ""));
    let (list, place) = element(head)?;
    let index = place.checked_sub(1).filter(|_| list == "nics")?;
    if let Some(interface) = interfaces.get(index) {
        let part = part_of_nic(part);
        let part = if part.is_empty() { part } else { format!(", {part}") };
        return Some(format!("--libvirt ({interface}{part})"));
    }
    let own = index.checked_sub(interfaces.len())?;
    Some(format!("nics[{own}]{}", field.strip_prefix(head)?))
}

/// The command that was given, the last of its words, and what it was given with.
struct Given<'a> {
    command: &'a Command,
    parsed: &'a ArgMatches,
}

impl<'a> Given<'a> {
    fn leaf(command: &'a Command, parsed: &'a ArgMatches) -> Self {
        let deeper = parsed.subcommand();
        match deeper.and_then(|(name, parsed)| Some((command.find_subcommand(name)?, parsed))) {
            Some((command, parsed)) => Self::leaf(command, parsed),
            None => Self { command, parsed },
        }
    }

    fn name_option(&self, problem: &mut Problem) {
        let Some(field) = &problem.field else { return };
        if let Some(option) = self.option_of(field) {
            problem.field = Some(option);
        } else if field.starts_with("nics[") && self.argument("nics").is_none() {
            problem.field = None;
        }
    }

    fn argument(&self, id: &str) -> Option<&'a Arg> {
        self.command.get_arguments().find(|argument| argument.get_id() == id)
    }

    fn is_typed(&self, argument: &Arg) -> bool {
        let source = self.parsed.value_source(argument.get_id().as_str());
        source == Some(ValueSource::CommandLine)
    }

    /// The argument that was typed of those with these ids, else the first of them.
    fn one_of(&self, ids: &[&str]) -> Option<&'a Arg> {
        let known: Vec<&Arg> = ids.iter().filter_map(|id| self.argument(id)).collect();
        let typed = known.iter().find(|argument| self.is_typed(argument));
        typed.or(known.first()).copied()
    }

    fn option_of(&self, field: &str) -> Option<String> {
        let field = within(field);
        if let Some((_, option, asked)) = PASSPHRASES.iter().find(|(known, ..)| *known == field)
            && let Some(option) = self.argument(option)
        {
            return Some(if self.is_typed(option) { typed(option) } else { (*asked).to_owned() });
        }
        if let Some((_, others)) = OTHER_NAMES.iter().find(|(known, _)| *known == field)
            && let Some(found) = self.one_of(others)
        {
            return Some(typed(found));
        }
        let (head, rest) = field.split_once('.').unwrap_or((field, ""));
        let Some((list, place)) = element(head) else {
            return self.argument(head).map(typed).or_else(|| self.option_of_device(field));
        };
        let Some(found) = self.argument(list) else { return self.option_of_only(list, rest) };
        let rest = if list == "nics" { part_of_nic(rest) } else { rest.to_owned() };
        let part = if rest.is_empty() { rest } else { format!(", {rest}") };
        Some(format!("{} ({}{part})", typed(found), ordinal(place)))
    }

    /// The same where the command has one of what the API has a list of.
    fn option_of_only(&self, list: &str, part: &str) -> Option<String> {
        match (list, part) {
            ("disks", "") => self.one_of(&["disk"]).map(typed),
            // `vm launch` makes one disk, and has an option for each of its fields.
            ("disks", "size") => self.argument("disk_size").map(typed),
            ("disks", _) => self.argument(part).map(typed),
            ("servers", _) => Some(format!("{} ({part})", typed(self.argument("address")?))),
            _ => None,
        }
    }

    /// The option with a device that is added, of which a field is a part.
    fn option_of_device(&self, field: &str) -> Option<String> {
        // Other options of these ids take names.
        let option = |ids: [&str; 2]| {
            let mut all = self.command.get_arguments().filter(|it| it.get_long().is_some());
            all.find(|it| ids.contains(&it.get_id().as_str()) && value_name(it) == Some("OPTIONS"))
        };
        if let Some(disk) = option(["disk", "disks"])
            && DISK_KEYS.contains(&field)
        {
            return Some(format!("{} ({field})", typed(disk)));
        }
        let head = field.split('.').next()?;
        let nic = option(["nic", "nics"]).filter(|_| NIC_FIELDS.contains(&head))?;
        Some(match part_of_nic(field) {
            part if part.is_empty() => typed(nic),
            part => format!("{} ({part})", typed(nic)),
        })
    }
}

/// A field, without the groups of the API that the command line does not have.
fn within(field: &str) -> &str {
    // How a secret is sealed is not a matter of who types it.
    let sealed = field.strip_suffix(".sealed").or_else(|| field.strip_suffix(".passphrase_box"));
    let field = sealed.unwrap_or(field);
    if let Some(part) = field.strip_prefix("cloud_init.") {
        let has_option = ["user", "password_hash"].contains(&part) || part.starts_with("ssh_keys");
        return if has_option { part } else { "cloud_init" };
    }
    let groups = ["hardware.", "kmip.", "location.pool."];
    groups.iter().find_map(|group| field.strip_prefix(group)).unwrap_or(field)
}

/// The list and the place in it of `list[index]`. The API counts from 0, people from 1.
fn element(field: &str) -> Option<(&str, usize)> {
    let (list, index) = field.strip_suffix(']')?.split_once('[')?;
    Some((list, index.parse::<usize>().ok()?.checked_add(1)?))
}

/// A field of a network card as `--nic` has it: what the card is connected to is not a level of its own there.
fn part_of_nic(field: &str) -> String {
    let field = field.strip_prefix("backend.").unwrap_or(field);
    let (head, rest) = field.split_once('.').unwrap_or((field, ""));
    match (head, element(head)) {
        ("backend", _) => String::new(),
        ("forwards", _) => "forward".to_owned(),
        (_, Some(("forwards", place))) if rest.is_empty() => format!("{} forward", ordinal(place)),
        (_, Some(("forwards", place))) => {
            format!("{} forward, {}", ordinal(place), rest.replace('_', " "))
        }
        _ => field.to_owned(),
    }
}

fn value_name(argument: &Arg) -> Option<&str> {
    argument.get_value_names()?.first().map(|name| name.as_str())
}

fn typed(argument: &Arg) -> String {
    match (argument.get_long(), value_name(argument)) {
        (Some(long), _) => format!("--{long}"),
        (None, Some(name)) => name.to_owned(),
        (None, None) => argument.get_id().as_str().to_uppercase(),
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
    use std::collections::BTreeSet;
    use std::path::PathBuf;

    use anyhow::Context;
    use vmseal_api::problem::ErrorCode;

    use super::*;
    use crate::exit::{Exit, FailedTask};

    const CREATE: &str = "vmseal vm create web --policy p --disk datastore=a,size=1G";
    const EXPORT: &str = "vmseal disk export web a --to /f --format luks2";
    const POOL: &str = "vmseal datastore add d --host h --pool a/b --monitors m";
    const POOL_WITH_KEYRING: &str =
        "vmseal datastore add d --host h --pool a --monitors m --keyring /k";
    const POOL_WITH_CHUNKS: &str = "vmseal datastore add d --host h --pool a --monitors m --data-pool b --create 2,erasure-coding --data-chunks 8";
    const POOL_FOR_POLICY: &str = "vmseal datastore add d --host h --pool a --monitors m --data-pool b --messenger secure --create-for-policy p";
    const IMPORT: &str = "vmseal provider certificate k --import f --key g";
    const RESTORE: &str = "vmseal provider add k --restore f";
    const KMS: &str = "vmseal provider add k --kms one=h";

    /// The fields that checks name, commands that they are of, and what people are told.
    const TOLD: &[(&str, &str, &str)] = &[
        ("address", "vmseal host set h --address a:1", "--address"),
        ("alias", "vmseal provider server add k two=h", "ALIAS=HOST[:PORT]"),
        ("arguments", "vmseal vm guest exec web -- ls", "COMMAND"),
        ("authorities", "vmseal provider trust k --authority f", "--authority"),
        ("backup", RESTORE, "--restore"),
        ("new_vm", "vmseal backup restore web b --as w", "--as"),
        ("backup", "vmseal provider verify k --from f", "--from"),
        ("backup_passphrase", RESTORE, "passphrase of the backup"),
        ("boot", "vmseal vm set web --boot disk", "--boot"),
        ("boot_once", "vmseal vm start web --boot-once cdrom", "--boot-once"),
        ("cache", "vmseal policy create p --plain --cache 1M", "--cache"),
        // It is the policy's.
        ("cache", "vmseal disk add web --disk datastore=a,size=1G,name=b", "cache"),
        ("cdrom", "vmseal vm cdrom insert web /a.iso", "ISO"),
        ("cdrom.medium", "vmseal vm cdrom insert web /a.iso", "ISO"),
        ("certificate", IMPORT, "--import"),
        ("cloud_init", CREATE, "--cloud-init"),
        ("cloud_init.user_data", CREATE, "--cloud-init"),
        ("common_name", "vmseal provider certificate k --csr", "--common-name"),
        ("compress", "vmseal vm migrate web --compress", "--compress"),
        ("cpu_model", "vmseal policy create p --plain", "--cpu-model"),
        ("data_chunks", "vmseal policy set p --data-chunks 4", "--data-chunks"),
        ("datastore", "vmseal vm move web --datastore d", "--datastore"),
        ("datastore", "vmseal vm clone web new --datastore d", "--datastore"),
        ("disks", "vmseal vm clone web new --datastore d", "--datastore"),
        ("description", "vmseal snapshot create web", "--description"),
        ("directory", "vmseal backup create web", "--to"),
        ("discard_newer", "vmseal datastore adopt d --vm a --discard-newer", "--discard-newer"),
        ("disks", CREATE, "--disk"),
        ("disks", "vmseal vm recrypt web --deep --disk a", "--disk"),
        ("disks[0]", CREATE, "--disk (the 1st)"),
        ("disks[0]", "vmseal disk add web --disk datastore=a,size=1G,name=b", "--disk"),
        ("disks[0].datastore", CREATE, "--disk (the 1st, datastore)"),
        ("disks[0].encrypted", CREATE, "--disk (the 1st, encrypted)"),
        ("disks[0].name", CREATE, "--disk (the 1st, name)"),
        ("downtime_milliseconds", "vmseal vm migrate web --downtime 1h", "--downtime"),
        ("downtime_milliseconds", "vmseal policy set p --downtime 1h", "--downtime"),
        (
            "encrypted",
            "vmseal disk add web --disk datastore=a,size=1G,name=b,encrypted=yes",
            "--disk (encrypted)",
        ),
        ("failure_domain", "vmseal policy set p --failure-domain rack", "--failure-domain"),
        ("fingerprint", "vmseal remote add r https://h:1", "--fingerprint"),
        ("format", EXPORT, "--format"),
        ("hardware.boot", CREATE, "--boot"),
        ("hardware.cdrom", CREATE, "--cdrom"),
        ("hardware.cpu_model", CREATE, "--cpu-model"),
        ("hardware.on_crash", CREATE, "--on-crash"),
        ("hardware.tpm", CREATE, "--tpm"),
        ("host", "vmseal datastore add d --host h --path /p", "--host"),
        ("host", "vmseal vm clone web new --host h", "--host"),
        ("host", "vmseal vm migrate web h", "HOST"),
        ("host", "vmseal vm evacuate web --host h", "--host"),
        ("in_place", "vmseal vm recrypt web --deep --in-place", "--in-place"),
        ("kmip.servers", KMS, "--kms"),
        ("kmip.servers[0].host", KMS, "--kms (the 1st, host)"),
        ("kmip.servers[0].host", "vmseal provider server set k one=h", "ALIAS=HOST[:PORT] (host)"),
        ("label", "vmseal vm list --label a", "--label"),
        ("labels", "vmseal vm set web --label a=b", "--label"),
        ("levels", "vmseal host log-level h debug", "LEVEL|TARGET=LEVEL,..."),
        ("location.path", "vmseal datastore add d --host h --path p", "--path"),
        (
            "key",
            "vmseal datastore add d --host h --pool a --monitors m --key-file /k",
            "--key-file",
        ),
        ("key.sealed", "vmseal datastore set d --key-file /k", "--key-file"),
        ("keyring", "vmseal datastore set d --keyring /k", "--keyring"),
        ("monitors", "vmseal datastore set d --monitors m", "--monitors"),
        ("user", "vmseal datastore set d --user client.x", "--user"),
        ("location.pool.create", POOL_WITH_CHUNKS, "--create"),
        ("location.pool.create.data_chunks", POOL_WITH_CHUNKS, "--data-chunks"),
        ("create_for_policy", POOL_FOR_POLICY, "--create-for-policy"),
        ("location.pool.data_pool", POOL_FOR_POLICY, "--data-pool"),
        ("location.pool.pool", POOL_FOR_POLICY, "--pool"),
        ("location.pool.messenger", POOL_FOR_POLICY, "--messenger"),
        ("location.pool.keyring", POOL_WITH_KEYRING, "--keyring"),
        ("location.pool.monitors", POOL, "--monitors"),
        ("location.pool.namespace", POOL, "--pool"),
        ("memory", CREATE, "--memory"),
        ("name", CREATE, "NAME"),
        ("name", "vmseal vm set web --name b", "--name"),
        ("name", "vmseal disk bitmap add web a b", "NAME"),
        ("new", "vmseal provider passphrase k", "new passphrase"),
        ("new", "vmseal provider passphrase k --passphrase-file f", "--passphrase-file"),
        ("nics", CREATE, "--nic"),
        ("nics", "vmseal nic add web --nic user", "--nic"),
        ("nics[0].backend", CREATE, "--nic (the 1st)"),
        (
            "nics[0].backend.forwards[1].host_port",
            CREATE,
            "--nic (the 1st, the 2nd forward, host port)",
        ),
        ("nics[0].mac", CREATE, "--nic (the 1st, mac)"),
        ("old", "vmseal provider passphrase k", "current passphrase"),
        (
            "old.sealed",
            "vmseal provider passphrase k --old-passphrase-file f",
            "--old-passphrase-file",
        ),
        ("parallel", "vmseal host drain h", "--parallel"),
        ("osd_encryption", "vmseal datastore set d --osd-encryption yes", "--osd-encryption"),
        ("passphrase", EXPORT, "passphrase"),
        ("passphrase", "vmseal provider unlock k --passphrase-file f", "--passphrase-file"),
        ("path", "vmseal vm guest exec web -- ls", "COMMAND"),
        ("place", "vmseal provider server move k one --to 9", "--to"),
        ("plaintext", EXPORT, "--plaintext"),
        ("policy", CREATE, "--policy"),
        ("policy", "vmseal vm migrate web --remote r --policy p", "--policy"),
        ("private_key", IMPORT, "--key"),
        ("provider", "vmseal policy create p --encrypt --provider k", "--provider"),
        ("provider", "vmseal vm recrypt web --provider k", "--provider"),
        ("rate", "vmseal host drain h --rate 1", "--rate"),
        ("redundancy.data_chunks", "vmseal policy create p --plain", "--data-chunks"),
        ("redundancy.failures", "vmseal policy create p --plain", "--failures-to-tolerate"),
        ("remote", "vmseal vm migrate web --remote r", "--remote"),
        ("rename", "vmseal datastore adopt d --rename a=b", "--rename"),
        ("replica.bytes_per_second", "vmseal policy create p --plain", "--replicate-rate"),
        ("replicate_rate", "vmseal policy set p --replicate-rate 1", "--replicate-rate"),
        ("replicate_to", "vmseal policy set p --replicate-to d", "--replicate-to"),
        ("sealed", "vmseal disk expose web a --socket /s --sealed", "--sealed"),
        ("seconds", "vmseal vm guest exec web --seconds 0 -- ls", "--seconds"),
        ("size", "vmseal disk resize web a --size 1", "--size"),
        ("snapshot", "vmseal vm clone web new --snapshot s", "--snapshot"),
        ("snapshot", "vmseal snapshot revert web s", "SNAPSHOT"),
        ("timeout_seconds", "vmseal vm stop web --grace-period 2h", "--grace-period"),
        ("timeout_seconds", "vmseal vm reboot web --grace-period 2h", "--grace-period"),
        ("to", EXPORT, "--to"),
        ("to", "vmseal vm dump web --decrypt-to f", "--decrypt-to"),
        ("token", "vmseal remote add r https://h:1", "--remote-token-file"),
        (
            "tpm_state",
            "vmseal vm import --libvirt f --policy p --datastore d --tpm-state /f",
            "--tpm-state",
        ),
        ("tpm_state", "vmseal vm import web --policy p --disk d --tpm-state /f", "--tpm-state"),
        (
            "uefi_variables",
            "vmseal vm import --libvirt f --policy p --datastore d --nvram /f",
            "--nvram",
        ),
        ("url", "vmseal remote add r https://h:1", "URL"),
        ("vcpus", CREATE, "--vcpus"),
        ("vms", "vmseal datastore adopt d --vm a", "--vm"),
    ];

    /// Fields that no command has an option for.
    const UNTOLD: [&str; 11] = [
        // The caller of the check adds the field.
        "",
        // The host is too old for a device: the message names the device.
        "hardware",
        // The agent sends it when its machine joins.
        "certificate_request",
        // Another control plane sends these with a VM.
        "arrival",
        "generation",
        "suspended",
        "suspended.generation",
        "vm.disks",
        "vm.disks.name",
        "vm.name",
        "vm.snapshots",
    ];

    /// What checks name by more than a text. `TOLD` has some of what comes of each.
    const PUT_TOGETHER: [&str; 15] = [
        // Of two commands that change policies: replica.datastore or replicate_to, and so on.
        "datastore",
        "rate",
        // A parameter, or what a check of the API's crate says.
        "field",
        "field(\"alias\")",
        "field(\"host\")",
        "field(\"port\")",
        "field(name)",
        "field.strip_prefix(&mine).map_or(field.clone(),str::to_owned)",
        "cloud_init.{field}",
        "disks[0].{field}",
        "image_layout.{field}",
        "location.pool.{field}",
        "redundancy.{field}",
        "{field}.passphrase_box",
        "{field}.sealed",
    ];

    fn renamed(line: &str, mut error: anyhow::Error) -> anyhow::Error {
        let command = crate::help::command();
        let parsed = command.clone().try_get_matches_from(line.split(' '));
        let parsed = parsed.unwrap_or_else(|refused| panic!("{line}: {refused}"));
        name_option(&mut error, &command, &parsed);
        error
    }

    fn told(line: &str, field: &str) -> String {
        let problem = Problem::invalid(field, "is wrong");
        let error = Err::<(), _>(problem).context("while creating it").unwrap_err();
        let error = renamed(line, error);
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
        assert_eq!(told(add, "backend.forwards[0]"), "--nic (the 1st forward): is wrong");
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
            ("limits.stall_timeout", "--on-stall"),
            ("replica.datastore", "--replicate-to"),
            ("cache", "--cache"),
        ] {
            assert_eq!(told(policy, field), format!("{option}: is wrong"));
        }
    }

    #[test]
    fn each_field_that_a_check_names_is_told_as_the_option_that_was_typed() {
        for (field, line, option) in TOLD {
            assert_eq!(told(line, field), format!("{option}: is wrong"), "{field} of {line}");
        }
        let known: BTreeSet<&str> = TOLD.iter().map(|(field, ..)| *field).collect();
        let mut unknown = named_by_checks();
        unknown.retain(|field| {
            let field = field.as_str();
            !known.contains(field) && !UNTOLD.contains(&field) && !PUT_TOGETHER.contains(&field)
        });
        assert!(unknown.is_empty(), "what are they told as on the command line? {unknown:?}");
    }

    /// What the server's checks call the fields at fault.
    fn named_by_checks() -> BTreeSet<String> {
        let mut paths = vec![PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/../control/src"))];
        let mut named = BTreeSet::new();
        while let Some(path) = paths.pop() {
            let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
            if path.is_dir() && name != "tests" {
                let inside = std::fs::read_dir(&path).unwrap();
                paths.extend(inside.map(|entry| entry.unwrap().path()));
            } else if path.is_file() && name.ends_with(".rs") && name != "tests.rs" {
                let source = std::fs::read_to_string(&path).unwrap();
                let source = source.split("#[cfg(test)]\nmod tests {").next().unwrap();
                for before in ["Problem::invalid(", "field: Some(", "field = Some("] {
                    named.extend(source.split(before).skip(1).map(first_argument));
                }
            }
        }
        assert!(named.contains("timeout_seconds"), "the checks are not found: {named:?}");
        named
    }

    /// The text, or the expression, with which this source begins.
    fn first_argument(source: &str) -> String {
        let (mut depth, mut quoted) = (0, false);
        let end = source.find(|character: char| {
            match character {
                '"' => quoted = !quoted,
                '(' | '[' | '{' if !quoted => depth += 1,
                ')' | ']' | '}' if !quoted => depth -= 1,
                _ => {}
            }
            !quoted && (depth < 0 || (depth == 0 && character == ','))
        });
        let expression: String = source[..end.unwrap_or(source.len())].split_whitespace().collect();
        let expression = expression.trim_end_matches(".to_owned()");
        let formatted = expression.strip_prefix("format!(").and_then(|it| it.strip_suffix(')'));
        let text = formatted.unwrap_or(expression);
        let text = text.strip_prefix('"').and_then(|it| it.strip_suffix('"')).unwrap_or(text);
        text.replace("[{index}]", "[0]")
    }

    #[test]
    fn a_card_of_a_domain_is_told_as_its_interface_and_one_of_an_option_as_that() {
        let line = "vmseal vm import --libvirt f --policy p --datastore d --nic user";
        let interfaces = ["interface 52:54:00:12:34:56", "interface 2"].map(str::to_owned);
        for (field, named) in [
            ("nics[0].mac", "--libvirt (interface 52:54:00:12:34:56, mac)"),
            ("nics[1].backend", "--libvirt (interface 2)"),
            ("nics[1].backend.forwards[0]", "--libvirt (interface 2, the 1st forward)"),
            ("nics[2].mac", "--nic (the 1st, mac)"),
            ("memory", "--memory"),
        ] {
            let mut error = anyhow::Error::from(Problem::invalid(field, "is wrong"));
            name_interface(&mut error, &interfaces);
            assert_eq!(renamed(line, error).to_string(), format!("{named}: is wrong"));
        }
        // No interface of a domain: nothing else is told.
        let mut error = anyhow::Error::from(Problem::invalid("nics[0].mac", "is wrong"));
        name_interface(&mut error, &[]);
        let told = renamed(CREATE, error).to_string();
        assert_eq!(told, "--nic (the 1st, mac): is wrong");
    }

    #[test]
    fn tasks_that_failed_name_options_too() {
        let failed = |field: &str| FailedTask {
            exit: Exit::Usage,
            what: "vm.create web failed at step 'fill'".to_owned(),
            problem: Some(Problem::invalid(field, "is wrong")),
            trace: String::new(),
        };
        let failed = FailedTasks::new(vec![failed("image"), failed("colour")]).unwrap();
        let error = renamed(CREATE, anyhow::Error::from(failed).context("while creating it"));
        assert_eq!(Exit::of(&error), Exit::Usage);
        assert_eq!(
            crate::exit::text(&error),
            "while creating it: vm.create web failed at step 'fill': --disk (image): is wrong\n\
             vm.create web failed at step 'fill': colour: is wrong"
        );
    }
}
