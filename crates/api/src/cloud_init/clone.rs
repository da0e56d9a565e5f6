//! What names a VM in its documents, and the same of its clone. Texts are made at once as long as they get: no copy is left behind
//! by growing.

use super::SecretText;
use crate::id::VmId;

/// The keys of meta-data that name a VM.
const OWN_KEYS: [&str; 2] = ["instance-id", "local-hostname"];

/// How user-data begins that vmseal makes, before the host name.
const MADE_BEFORE: &str = "#cloud-config\nhostname: ";

/// The same, behind it.
const MADE_BEHIND: &str = "\nmanage_etc_hosts: true\n";

/// The meta-data of a VM that is given none.
#[must_use]
pub fn meta_data(vm: VmId, name: &str) -> SecretText {
    own_lines(vm, name).into()
}

fn own_lines(vm: VmId, name: &str) -> String {
    format!("instance-id: {vm}\nlocal-hostname: {}\n", quoted_host_name(name))
}

/// How the user-data of a VM begins for which vmseal makes it.
#[must_use]
pub fn made_user_data_begin(name: &str) -> String {
    format!("{MADE_BEFORE}{}{MADE_BEHIND}", quoted_host_name(name))
}

/// The host name that a guest gets, as a YAML scalar: its VM's, but for underscores, which host names do not have. In double
/// quotes JSON is YAML.
fn quoted_host_name(vm: &str) -> String {
    serde_json::Value::from(vm.replace('_', "-")).to_string()
}

/// The user-data of a clone with this name.
pub(super) fn user_data(of: &str, name: &str) -> SecretText {
    let behind = of.strip_prefix(MADE_BEFORE).and_then(|rest| rest.split_once(MADE_BEHIND));
    let Some((_, rest)) = behind.filter(|(host, _)| !host.contains('\n')) else {
        return of.to_owned().into();
    };
    joined(&made_user_data_begin(name), rest)
}

/// The meta-data of a clone with this id and name.
pub(super) fn meta_data_of(of: &str, vm: VmId, name: &str) -> SecretText {
    let own = own_lines(vm, name);
    match without_own_keys(of) {
        Some(others) => joined(others.expose(), &own),
        None => own.into(),
    }
}

fn joined(one: &str, other: &str) -> SecretText {
    let mut text = String::with_capacity(one.len() + other.len());
    text.push_str(one);
    text.push_str(other);
    text.into()
}

/// A line of a YAML mapping that is written as one `key: value` below the other.
enum Line<'a> {
    /// Nothing, or a comment.
    Empty,
    /// A key, with the beginning of its value.
    Key(&'a str),
    /// More of the value before.
    More,
    /// Anything else.
    Other,
}

impl<'a> Line<'a> {
    fn of(line: &'a str) -> Self {
        let line = line.trim_end();
        if line.is_empty() || line.starts_with('#') {
            return Self::Empty;
        }
        if line.starts_with([' ', '\t']) || line == "-" || line.starts_with("- ") {
            return Self::More;
        }
        let Some((key, value)) = line.split_once(':') else { return Self::Other };
        let key = key.trim_end().trim_matches(['"', '\'']);
        let is_plain = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.');
        let is_key = !key.is_empty() && key.chars().all(is_plain);
        let ends = value.is_empty() || value.starts_with([' ', '\t']);
        if is_key && ends { Self::Key(key) } else { Self::Other }
    }
}

/// The lines of meta-data without those of [`OWN_KEYS`]; none where it is of another form.
fn without_own_keys(of: &str) -> Option<SecretText> {
    let (mut kept, mut keeps, mut begun) = (String::with_capacity(of.len() + 1), true, false);
    for line in of.split_inclusive('\n') {
        match Line::of(line) {
            Line::Empty => {}
            Line::More if begun => {}
            Line::Key(key) => (keeps, begun) = (!OWN_KEYS.contains(&key), true),
            Line::Other if !begun && line.trim_end() == "---" => {}
            Line::More | Line::Other => {
                drop(SecretText::from(kept));
                return None;
            }
        }
        if keeps {
            kept.push_str(line);
        }
    }
    if !kept.is_empty() && !kept.ends_with('\n') {
        kept.push('\n');
    }
    Some(kept.into())
}

#[cfg(test)]
mod tests {
    use super::super::Documents;
    use super::*;

    fn vm() -> VmId {
        "0190b5a0-0000-7000-8000-000000000001".parse().unwrap()
    }

    fn cloned(user_data: &str, meta_data: &str) -> Documents {
        let documents = Documents {
            user_data: user_data.to_owned().into(),
            meta_data: meta_data.to_owned().into(),
            network_config: Some("version: 2\n".to_owned().into()),
        };
        documents.for_clone(vm(), "my_copy")
    }

    const OWN: &str =
        "instance-id: 0190b5a0-0000-7000-8000-000000000001\nlocal-hostname: \"my-copy\"\n";

    #[test]
    fn a_clone_has_an_instance_id_and_a_host_name_of_its_own_and_keeps_the_rest() {
        let made = meta_data(VmId::new(), "web");
        for (of, before) in [
            (made.expose(), ""),
            ("", ""),
            ("---\ninstance-id: i-1\n", "---\n"),
            (
                "# mine\nkeys:\n- a\n  b\ninstance-id: >-\n  i\n\n  j\nx: {y: 1}",
                "# mine\nkeys:\n- a\n  b\nx: {y: 1}\n",
            ),
            ("'instance-id' : i\n\"local-hostname\": h\ndsmode: local\n", "dsmode: local\n"),
            // Of another form: nothing of it is kept, rather than two instance ids.
            ("{\"instance-id\": \"i\", \"a\": 1}\n", ""),
            ("a: 1\n---\ninstance-id: i\n", ""),
            ("a: 1\n...\n", ""),
            ("  instance-id: i\n", ""),
            ("? instance-id\n: i\n", ""),
            ("%YAML 1.2\n---\na: 1\n", ""),
        ] {
            let now = cloned("", of);
            assert_eq!(now.meta_data.expose(), format!("{before}{OWN}"), "{of}");
            assert_eq!(now.network_config.unwrap().expose(), "version: 2\n");
        }
    }

    #[test]
    fn the_host_name_is_the_clones_where_vmseal_has_written_it() {
        let made = format!("{}user: \"me\"\n", made_user_data_begin("web"));
        let expected =
            "#cloud-config\nhostname: \"my-copy\"\nmanage_etc_hosts: true\nuser: \"me\"\n";
        assert_eq!(cloned(&made, "").user_data.expose(), expected);
        for given in [
            "",
            "#!/bin/sh\nhostname web\n",
            "#cloud-config\nhostname: web\n",
            "#cloud-config\nhostname: web\nfqdn: web.here\nmanage_etc_hosts: true\n",
            "# \n#cloud-config\nhostname: web\nmanage_etc_hosts: true\n",
        ] {
            assert_eq!(cloned(given, "").user_data.expose(), given);
        }
    }
}
