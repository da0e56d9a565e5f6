//! What a VM is told at its first boot: the documents of cloud-init, made from what is asked for, and sealed to the
//! agent that makes their disk. The server keeps them in no other form.

use std::fmt::Write as _;

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use vmseal_api::cloud_init::{
    CLOUD_INIT_DISK, CLOUD_INIT_DISK_SIZE, CLOUD_INIT_MAX, CloudInit, Documents, PASSWORD_HASH_MAX,
    PASSWORD_HASH_MIN, SSH_KEYS_MAX, SecretText, USER_DATA_KINDS, USER_MAX, USER_REFUSED,
    cloud_init_info, made_user_data_begin, meta_data,
};
use vmseal_api::host::version::CLOUD_INIT;
use vmseal_api::host::{Allocation, DiskLimits, DiskRole, SealedKey};
use vmseal_api::id::{DiskId, HostId, VmId};
use vmseal_api::problem::{ErrorCode, Problem};
use vmseal_secret::{SecretBytes, sealed_box};

use super::Services;
use crate::store::disks::Disk;
use crate::store::vms::Vm;

/// The documents that are asked for.
pub(super) fn documents(asked: &CloudInit, vm: VmId, name: &str) -> Result<Documents, Problem> {
    let user_data = match &asked.user_data {
        Some(given) => given_user_data(asked, given)?,
        None => made_user_data(asked, name)?,
    };
    let meta_data = asked.meta_data.clone().unwrap_or_else(|| meta_data(vm, name));
    let network_config = asked.network_config.clone();
    let documents = Documents { user_data, meta_data, network_config };
    if documents.len() > CLOUD_INIT_MAX {
        let detail = format!(
            "has {} bytes in all; at most {CLOUD_INIT_MAX} are possible. Have the guest fetch what is long (#include)",
            documents.len()
        );
        return Err(Problem::invalid("cloud_init", detail));
    }
    Ok(documents)
}

fn given_user_data(asked: &CloudInit, given: &SecretText) -> Result<SecretText, Problem> {
    let others = [
        ("user", asked.user.is_some()),
        ("ssh_keys", !asked.ssh_keys.is_empty()),
        ("password_hash", asked.password_hash.is_some()),
    ];
    if let Some((field, _)) = others.into_iter().find(|(_, is_given)| *is_given) {
        let detail = "is given together with user-data: write it into the user-data";
        return Err(Problem::invalid(format!("cloud_init.{field}"), detail));
    }
    let text = given.expose();
    if !text.is_empty() && !USER_DATA_KINDS.iter().any(|kind| text.starts_with(kind)) {
        let detail = "begins with nothing that cloud-init knows: its first line is #cloud-config, or #! and an interpreter, or another of its kinds (cloudinit.readthedocs.io, user-data formats)";
        return Err(Problem::invalid("cloud_init.user_data", detail));
    }
    Ok(given.clone())
}

fn made_user_data(asked: &CloudInit, name: &str) -> Result<SecretText, Problem> {
    let CloudInit { user, ssh_keys, password_hash, .. } = asked;
    check(user.as_deref(), ssh_keys, password_hash.as_ref())
        .map_err(|(field, what)| Problem::invalid(format!("cloud_init.{field}"), what))?;
    let hash = password_hash.as_ref().map_or("", SecretText::expose);
    let keys_length: usize = ssh_keys.iter().map(|key| key.len() + 16).sum();
    // At once as long as it gets: no copy is left behind by growing.
    let mut text = String::with_capacity(512 + hash.len() + 2 * keys_length);
    text.push_str(&made_user_data_begin(name));
    let mut line = |line: std::fmt::Arguments<'_>| {
        // Writing to a string cannot fail.
        let _ = writeln!(text, "{line}");
    };
    if let Some(user) = user {
        line(format_args!("user: {}", quoted(user)));
    }
    if !ssh_keys.is_empty() {
        line(format_args!("ssh_authorized_keys:"));
        for key in ssh_keys {
            line(format_args!("  - {}", quoted(key.trim())));
        }
    }
    if password_hash.is_some() {
        line(format_args!("password: \"{hash}\""));
        line(format_args!("chpasswd: {{expire: false}}"));
        line(format_args!("ssh_pwauth: true"));
    }
    Ok(text.into())
}

fn check(
    user: Option<&str>,
    ssh_keys: &[String],
    password_hash: Option<&SecretText>,
) -> Result<(), (String, String)> {
    if user.is_some_and(|user| !is_user(user)) {
        let what = format!(
            "must be 1 to {USER_MAX} lower-case letters, digits, dashes and underscores, and begin with no digit or dash"
        );
        return Err(("user".to_owned(), what));
    }
    if user == Some(USER_REFUSED) {
        let what = format!(
            "must be another one than {USER_REFUSED}, whom images do not let in; it may use sudo"
        );
        return Err(("user".to_owned(), what));
    }
    if ssh_keys.is_empty() && password_hash.is_none() {
        let what = "nobody could log in: give an SSH key, a password, or user-data";
        return Err(("user_data".to_owned(), what.to_owned()));
    }
    if ssh_keys.len() > SSH_KEYS_MAX {
        return Err(("ssh_keys".to_owned(), format!("at most {SSH_KEYS_MAX} are possible")));
    }
    for (index, key) in ssh_keys.iter().enumerate() {
        check_key(key).map_err(|what| (format!("ssh_keys[{index}]"), what.to_owned()))?;
    }
    if password_hash.is_some_and(|hash| !is_hash(hash.expose())) {
        let what =
            "is no hash of crypt(3), such as $6$SALT$HASH; the password itself is never given";
        return Err(("password_hash".to_owned(), what.to_owned()));
    }
    Ok(())
}

fn is_user(user: &str) -> bool {
    let begins = user.starts_with(|c: char| c.is_ascii_lowercase() || c == '_');
    let allowed = |c: u8| c.is_ascii_lowercase() || c.is_ascii_digit() || b"-_".contains(&c);
    begins && user.len() <= USER_MAX && user.bytes().all(allowed)
}

/// A line of `authorized_keys`: a type and the key in base64, with or without a comment.
fn check_key(line: &str) -> Result<(), &'static str> {
    if line.contains("PRIVATE KEY") {
        return Err("is a private key: give the public one, which is beside it as FILE.pub");
    }
    let line = line.trim();
    if line.contains(|c: char| c.is_control()) {
        return Err("is no public key: it has more than one line");
    }
    let mut words = line.split_ascii_whitespace();
    let kind = words.next().unwrap_or_default();
    let known = ["ssh-", "ecdsa-sha2-", "sk-ssh-", "sk-ecdsa-"];
    if !known.iter().any(|begin| kind.starts_with(begin)) {
        return Err("is no public key: it begins with a type such as ssh-ed25519");
    }
    let blob = words.next().and_then(|word| STANDARD.decode(word).ok());
    // What is encoded begins with the type, too.
    let names = |blob: &[u8]| blob.get(4..).is_some_and(|it| it.starts_with(kind.as_bytes()));
    if blob.is_some_and(|blob| names(&blob)) {
        return Ok(());
    }
    Err("is no public key: what follows its type is damaged")
}

/// A hash that cloud-init takes for one: anything else it would take for the password.
fn is_hash(hash: &str) -> bool {
    let kind = ["$6$", "$5$", "$2a$", "$2b$", "$2y$", "$1$"];
    let allowed = |c: u8| c.is_ascii_alphanumeric() || b"./$=".contains(&c);
    kind.iter().any(|begin| hash.starts_with(begin))
        && (PASSWORD_HASH_MIN..=PASSWORD_HASH_MAX).contains(&hash.len())
        && hash.bytes().all(allowed)
}

/// A text as a YAML scalar: in double quotes JSON is YAML.
fn quoted(text: &str) -> String {
    serde_json::Value::from(text).to_string()
}

/// The disk for the documents, on the datastore of the first disk. It is small and can be made again, so that it
/// takes no room before it has to, and nothing of it is cached or replicated. It is `encrypted` as its VM is, also where the first disk is in
/// the clear.
pub(super) fn disk(others: &[Disk], encrypted: bool) -> Option<Disk> {
    let first = others.first()?;
    Some(Disk {
        id: DiskId::new(),
        name: CLOUD_INIT_DISK.to_owned(),
        size: CLOUD_INIT_DISK_SIZE,
        encrypted,
        role: DiskRole::CloudInit,
        allocation: Allocation::Thin,
        limits: DiskLimits::default(),
        cache: None,
        replica: None,
        image: None,
        ..first.clone()
    })
}

/// The key box of a host, whose agent has to know what the documents are.
pub(super) async fn key_box(
    services: &Services,
    host: HostId,
    host_name: &str,
) -> Result<String, Problem> {
    // Asked now: what the monitor has may be of an agent that is gone.
    let host = services.hosts.connected(host)?.describe().await?;
    if host.features.iter().any(|feature| feature == CLOUD_INIT) {
        return Ok(host.key_box);
    }
    let detail = format!(
        "host '{host_name}' runs vmseal {}, which makes no disks for cloud-init: upgrade it",
        host.vmseal
    );
    Err(Problem {
        field: Some("cloud_init".to_owned()),
        ..Problem::new(ErrorCode::Unsupported, detail)
    })
}

/// Seals the documents to this key box, that of a VM's host.
pub(super) fn seal(
    key_box: String,
    vm: &Vm,
    disk: DiskId,
    documents: &Documents,
) -> Result<SealedKey, Problem> {
    let packed = SecretBytes::from_wiped(&mut documents.packed())
        .map_err(|error| crate::internal(&error))?;
    let public = crate::hosts::keys::public_key(&key_box, &vm.host_name)?;
    let sealed = sealed_box::seal(&public, &cloud_init_info(vm.id, disk), &packed)
        .map_err(|error| crate::internal(&error))?;
    Ok(SealedKey { key_box, sealed: STANDARD.encode(sealed.as_bytes()) })
}

#[cfg(test)]
mod tests {
    use super::*;

    const KEY: &str =
        "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIHJhxkLn+YHX65YPCVcGZ8RSKxoP4rmWZeb/AIWRZfne me@here";
    const HASH: &str = "$6$saltsalt$qFmFH.bQmmtXzyBY0s9v7Oicd2z4XSIecDzlB5KiA2/jctKu9YterLp8wwnSq.qc.eoxqOmSuNp2xS0ktL3nh/";

    fn vm() -> VmId {
        "0190b5a0-0000-7000-8000-000000000001".parse().unwrap()
    }

    fn text(text: &str) -> Option<SecretText> {
        Some(text.to_owned().into())
    }

    #[test]
    fn keys_and_a_password_make_the_golden_documents() {
        let asked = CloudInit {
            user: Some("admin".to_owned()),
            ssh_keys: vec![KEY.to_owned(), format!("{KEY} \"quoted\"\n")],
            password_hash: text(HASH),
            ..CloudInit::default()
        };
        let made = documents(&asked, vm(), "web1").unwrap();
        let shown: String = made.files().map(|(name, text)| format!("== {name}\n{text}")).collect();
        assert_eq!(shown, include_str!("../../tests/golden/cloud-init.txt"));
        let one = CloudInit { ssh_keys: vec![KEY.to_owned()], ..CloudInit::default() };
        let made = documents(&one, vm(), "web1").unwrap();
        let text = made.user_data.expose();
        assert!(!text.contains("user:") && !text.contains("password"), "{text}");
    }

    #[test]
    fn documents_that_are_given_are_left_as_they_are() {
        for user_data in
            ["#cloud-config\na: 1\n", "#!/bin/sh\n", "Content-Type: multipart/mixed;", ""]
        {
            let asked = CloudInit {
                user_data: text(user_data),
                meta_data: text("instance-id: mine\n"),
                network_config: text("version: 2\n"),
                ..CloudInit::default()
            };
            let made = documents(&asked, vm(), "web1").unwrap();
            assert_eq!(made.user_data.expose(), user_data);
            assert_eq!(made.meta_data.expose(), "instance-id: mine\n");
            assert_eq!(made.network_config.unwrap().expose(), "version: 2\n");
        }
    }

    #[test]
    fn what_is_wrong_is_named_and_not_repeated() {
        let keys = |keys: &[&str]| CloudInit {
            ssh_keys: keys.iter().map(|key| (*key).to_owned()).collect(),
            ..CloudInit::default()
        };
        let user = |user: &str| CloudInit { user: Some(user.to_owned()), ..keys(&[KEY]) };
        let password = |hash| CloudInit { password_hash: text(hash), ..CloudInit::default() };
        let data = |data: &str| CloudInit { user_data: text(data), ..CloudInit::default() };
        let long = format!("#cloud-config\n{}", "#".repeat(CLOUD_INIT_MAX));
        for (asked, field, what) in [
            (CloudInit::default(), "cloud_init.user_data", "nobody could log in"),
            (user("Admin"), "cloud_init.user", "lower-case"),
            (user("root"), "cloud_init.user", "root"),
            (user("a: b"), "cloud_init.user", "lower-case"),
            (keys(&["-----BEGIN OPENSSH PRIVATE KEY-----"]), "cloud_init.ssh_keys[0]", "private"),
            (keys(&[KEY, "hello"]), "cloud_init.ssh_keys[1]", "ssh-ed25519"),
            (keys(&["ssh-ed25519 AAAA"]), "cloud_init.ssh_keys[0]", "damaged"),
            (keys(&["ssh-rsa AAAAC3NzaC1lZDI1NTE5"]), "cloud_init.ssh_keys[0]", "damaged"),
            (keys(&[&format!("{KEY}\nruncmd: [x]")]), "cloud_init.ssh_keys[0]", "one line"),
            (keys(&[KEY; SSH_KEYS_MAX + 1]), "cloud_init.ssh_keys", "at most"),
            (password("swordfish"), "cloud_init.password_hash", "crypt"),
            (password("$6$salt\"\nruncmd: [x]            "), "cloud_init.password_hash", "crypt"),
            (data("swordfish: 1\n"), "cloud_init.user_data", "#cloud-config"),
            (data(&long), "cloud_init", "at most"),
            (
                CloudInit { ssh_keys: vec![KEY.to_owned()], ..data("#!") },
                "cloud_init.ssh_keys",
                "together",
            ),
        ] {
            let problem = documents(&asked, vm(), "web1").unwrap_err();
            assert_eq!(problem.field.as_deref(), Some(field), "{problem}");
            assert!(problem.detail.contains(what), "{problem}");
            assert!(!problem.detail.contains("swordfish"), "{problem}");
        }
    }
}
