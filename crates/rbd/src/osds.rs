//! Whether the OSDs of the cluster are encrypted, as its monitors say.
//!
//! ```text
//!  osd dump ──> the UUID of each OSD ──> config-key exists dm-crypt/osd/UUID/luks ──there──> encrypted, for good
//!                                                        │      └─────not there────> plain
//!                                                        └─────refused──> unknown
//! ```
//! ceph-volume keeps the key of an OSD there when it makes it with dm-crypt. Only whether it is there is asked, never what it is.

use std::collections::BTreeSet;
use std::io;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use serde_json::{Value, json};
use vmseal_api::osd_encryption::{OSD_KEYS, OsdEncryption, OsdsUnknown};

use crate::cluster::Cluster;
use crate::monitors::{Good, Question};

/// How long it is known. An OSD is encrypted from when it is made, and a connection keeps its rights; but OSDs may be added. Each host asks
/// once in that time for each OSD without a key.
const KNOWN: Good = Good { answer: Duration::from_secs(600), error: Duration::from_secs(60) };

/// The UUID of an OSD that has no store: it is being made, or was destroyed.
const NO_UUID: &str = "00000000-0000-0000-0000-000000000000";

/// Asks a monitor: the command, and its answer.
type Ask<'a> = dyn Fn(&Value) -> io::Result<Vec<u8>> + 'a;

/// Whether the OSDs of a cluster are encrypted.
#[must_use]
pub fn encryption(cluster: &Arc<Cluster>) -> Question<OsdEncryption> {
    let cluster = Arc::clone(cluster);
    let encrypted = Mutex::new(BTreeSet::<String>::new());
    Question::new("whether OSDs are encrypted", KNOWN, move || {
        let mut encrypted = encrypted.lock().unwrap_or_else(PoisonError::into_inner);
        judge(&|command: &Value| cluster.command(&command.to_string()), &mut encrypted)
    })
}

/// What the monitors say. `encrypted` are the OSDs that are known to be, which are not asked for again.
///
/// # Errors
/// The monitors'; not that the user may not ask, which is an answer.
fn judge(ask: &Ask<'_>, encrypted: &mut BTreeSet<String>) -> io::Result<OsdEncryption> {
    match count(ask, encrypted) {
        Ok((osds, plain)) => Ok(told(osds, plain)),
        Err(error) if matches!(error.raw_os_error(), Some(libc::EACCES | libc::EPERM)) => {
            Ok(OsdEncryption::Unknown { why: OsdsUnknown::NotAllowed })
        }
        Err(error) => Err(error),
    }
}

/// How many OSDs there are, and for how many of them there is no key.
fn count(ask: &Ask<'_>, encrypted: &mut BTreeSet<String>) -> io::Result<(usize, usize)> {
    let osds = uuids(&ask(&json!({ "prefix": "osd dump", "format": "json" }))?)?;
    encrypted.retain(|osd| osds.contains(osd));
    for osd in &osds {
        if encrypted.contains(osd) {
            continue;
        }
        let key = format!("{OSD_KEYS}{osd}/luks");
        match ask(&json!({ "prefix": "config-key exists", "key": key })) {
            Ok(_) => {
                encrypted.insert(osd.clone());
            }
            Err(error) if error.raw_os_error() == Some(libc::ENOENT) => {}
            Err(error) => return Err(error),
        }
    }
    Ok((osds.len(), osds.len() - encrypted.len()))
}

/// What it makes that there are so many OSDs, and no key for so many of them.
fn told(osds: usize, plain: usize) -> OsdEncryption {
    let number = |count: usize| u32::try_from(count).unwrap_or(u32::MAX);
    match (number(osds), number(plain)) {
        (0, _) => OsdEncryption::Unknown { why: OsdsUnknown::NoOsds },
        (osds, 0) => OsdEncryption::Yes { osds },
        (osds, plain) => OsdEncryption::No { osds, plain },
    }
}

/// The UUIDs of OSDs, as `osd dump` has them.
///
/// # Errors
/// `InvalidData` where it is not as expected.
fn uuids(dump: &[u8]) -> io::Result<BTreeSet<String>> {
    let dump: Value = serde_json::from_slice(dump)?;
    let uuid = |osd: &Value| osd["uuid"].as_str().map(str::to_owned);
    let uuids = dump["osds"].as_array().and_then(|osds| osds.iter().map(uuid).collect());
    let mut uuids: BTreeSet<String> = uuids.ok_or_else(|| {
        let what = "the monitors do not describe the OSDs as expected";
        io::Error::new(io::ErrorKind::InvalidData, what)
    })?;
    uuids.remove(NO_UUID);
    Ok(uuids)
}

#[cfg(test)]
mod tests {
    use super::*;

    const FIRST: &str = "5b7a3cf1-7a0f-4b3f-9d38-8a9a4c5d1e01";
    const SECOND: &str = "0e2f5d77-3c1b-4f6e-8a64-1d2b3c4d5e02";

    /// What a cluster of Ceph 16.2 answers, without what is not read. The third OSD was destroyed.
    fn dump() -> Vec<u8> {
        format!(
            r#"{{"epoch": 21, "osds": [
                {{"osd": 0, "uuid": "{FIRST}", "up": 1, "in": 1, "state": ["exists", "up"]}},
                {{"osd": 1, "uuid": "{SECOND}", "up": 0, "in": 1, "state": ["exists"]}},
                {{"osd": 2, "uuid": "{NO_UUID}", "up": 0, "in": 0, "state": ["destroyed", "exists"]}}]}}"#
        )
        .into_bytes()
    }

    fn failed(number: i32) -> io::Error {
        io::Error::from_raw_os_error(number)
    }

    /// A cluster that keeps keys for these OSDs. It is to be asked for nothing else.
    fn cluster(keys: &'static [&'static str]) -> impl Fn(&Value) -> io::Result<Vec<u8>> {
        move |command| match command["prefix"].as_str().unwrap() {
            "osd dump" => Ok(dump()),
            "config-key exists" => {
                let key = command["key"].as_str().unwrap();
                let of = |osd: &&&str| key == format!("dm-crypt/osd/{osd}/luks");
                keys.iter().find(of).map(|_| Vec::new()).ok_or_else(|| failed(libc::ENOENT))
            }
            other => panic!("it asks for {other}"),
        }
    }

    fn asked(ask: impl Fn(&Value) -> io::Result<Vec<u8>>) -> io::Result<OsdEncryption> {
        judge(&ask, &mut BTreeSet::new())
    }

    #[test]
    fn osds_are_encrypted_where_each_has_a_key() {
        let told = |keys| asked(cluster(keys)).unwrap();
        assert_eq!(told(&[FIRST, SECOND]), OsdEncryption::Yes { osds: 2 });
        assert_eq!(told(&[SECOND]), OsdEncryption::No { osds: 2, plain: 1 });
        assert_eq!(told(&[]), OsdEncryption::No { osds: 2, plain: 2 });
    }

    #[test]
    fn what_the_monitors_do_not_say_is_not_guessed() {
        let refuses = |number| {
            move |command: &Value| match command["prefix"] == "osd dump" {
                true => Ok(dump()),
                false => Err(failed(number)),
            }
        };
        let unknown = |why| OsdEncryption::Unknown { why };
        for number in [libc::EACCES, libc::EPERM] {
            assert_eq!(asked(refuses(number)).unwrap(), unknown(OsdsUnknown::NotAllowed));
        }
        // What was said before is told then.
        let silent = asked(refuses(libc::ETIMEDOUT)).unwrap_err();
        assert_eq!(silent.raw_os_error(), Some(libc::ETIMEDOUT));
        let answers = |answer: &'static str| move |_: &Value| Ok(answer.as_bytes().to_vec());
        assert_eq!(asked(answers(r#"{"osds": []}"#)).unwrap(), unknown(OsdsUnknown::NoOsds));
        for wrong in ["", "{}", r#"{"osds": [{"osd": 0}]}"#] {
            asked(answers(wrong)).unwrap_err();
        }
    }

    #[test]
    fn an_osd_that_is_encrypted_is_not_asked_for_again() {
        let mut known = BTreeSet::from(["of an OSD that was removed".to_owned()]);
        let first = judge(&cluster(&[FIRST]), &mut known).unwrap();
        assert_eq!(first, OsdEncryption::No { osds: 2, plain: 1 });
        assert_eq!(known, BTreeSet::from([FIRST.to_owned()]));
        // Only of the second one there is a key to be asked for.
        let second = judge(&cluster(&[SECOND]), &mut known).unwrap();
        assert_eq!(second, OsdEncryption::Yes { osds: 2 });
        // A cluster that does not answer for a moment takes nothing back.
        let before = known.clone();
        judge(&|_: &Value| Err(failed(libc::ETIMEDOUT)), &mut known).unwrap_err();
        assert_eq!(known, before);
    }
}
