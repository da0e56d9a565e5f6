//! Whether the OSDs of the cluster are encrypted, as its monitors say.
//!
//! ```text
//!  osd dump ──> the UUID of each OSD ──> config-key exists dm-crypt/osd/UUID/luks ──there──> encrypted, for good
//!                                                        │      └─────not there────> plain
//!                                                        └─────refused──> unknown
//! ```
//! ceph-volume keeps the key of an OSD there when it makes it with dm-crypt. Only whether it is there is asked, never what it is.
//!
//! A thread of its own asks, as in a large cluster that takes long, and monitors that do not answer would keep the threads of those who ask
//! them something else.

use std::collections::BTreeSet;
use std::io;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use vmseal_api::osd_encryption::{OSD_KEYS, OsdEncryption, OsdsUnknown};

use crate::cluster::Cluster;

/// How long an answer is good. An OSD is encrypted from when it is made; others may be added. Each host asks once in that time for each
/// OSD without a key.
const KNOWN: Duration = Duration::from_secs(600);

/// How long it is good that it is not known.
const UNKNOWN: Duration = Duration::from_secs(60);

/// How long a request waits for the first answer: as one for the room of an image.
const WAIT: Duration = Duration::from_secs(1);

/// The UUID of an OSD that has no store: it is being made, or was destroyed.
const NO_UUID: &str = "00000000-0000-0000-0000-000000000000";

/// Asks a monitor: the command, and its answer.
type Ask = dyn Fn(&Value) -> io::Result<Vec<u8>> + Send + Sync;

/// What is known of the OSDs of a cluster.
pub struct Osds(Arc<Shared>);

struct Shared {
    ask: Box<Ask>,
    state: Mutex<State>,
    told: Condvar,
}

#[derive(Default)]
struct State {
    /// What was told last, and when.
    told: Option<(Instant, OsdEncryption)>,
    /// Since when a thread asks.
    asking: Option<Instant>,
    /// The OSDs for which there was a key.
    encrypted: BTreeSet<String>,
}

impl Osds {
    /// Of a cluster.
    #[must_use]
    pub fn of(cluster: Arc<Cluster>) -> Self {
        Self::asked_by(move |command| cluster.command(&command.to_string()))
    }

    fn asked_by(ask: impl Fn(&Value) -> io::Result<Vec<u8>> + Send + Sync + 'static) -> Self {
        let (ask, state, told) = (Box::new(ask), Mutex::default(), Condvar::new());
        Self(Arc::new(Shared { ask, state, told }))
    }

    /// Whether they are encrypted, as it was told last. The monitors are asked again where that was long ago.
    #[must_use]
    pub fn ask(&self) -> OsdEncryption {
        let mut state = self.0.state();
        if state.asking.is_none() && !state.is_fresh() {
            self.start(&mut state);
        }
        // From its beginning: a cluster that hangs is not waited for again and again.
        let left = state.asking.map_or(WAIT, |begun| WAIT.saturating_sub(begun.elapsed()));
        let is_first = |state: &mut State| state.asking.is_some() && state.told.is_none();
        let waited = self.0.told.wait_timeout_while(state, left, is_first);
        let (state, _) = waited.unwrap_or_else(PoisonError::into_inner);
        let no_answer = OsdEncryption::Unknown { why: OsdsUnknown::NoAnswer };
        state.told.map_or(no_answer, |(_, told)| told)
    }

    /// Starts a thread that asks.
    fn start(&self, state: &mut State) {
        let shared = Arc::clone(&self.0);
        let known = state.encrypted.clone();
        let ask = move || {
            let (told, encrypted) = encryption(&*shared.ask, known);
            let mut state = shared.state();
            (state.told, state.encrypted) = (Some((Instant::now(), told)), encrypted);
            state.asking = None;
            shared.told.notify_all();
        };
        match std::thread::Builder::new().name("osds".into()).spawn(ask) {
            Ok(_) => state.asking = Some(Instant::now()),
            Err(error) => {
                tracing::warn!(%error, "it is not asked whether OSDs are encrypted: there is no thread");
            }
        }
    }
}

impl Shared {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl State {
    fn is_fresh(&self) -> bool {
        self.told.is_some_and(|(at, told)| {
            at.elapsed() < if told.known().is_some() { KNOWN } else { UNKNOWN }
        })
    }
}

/// Asks for all OSDs but those that are known to be encrypted. Returns what that makes, and which are encrypted.
fn encryption(ask: &Ask, known: BTreeSet<String>) -> (OsdEncryption, BTreeSet<String>) {
    let osds = match ask(&json!({ "prefix": "osd dump", "format": "json" })) {
        Ok(answer) => uuids(&answer),
        Err(error) => return (unknown(&error), known),
    };
    let Some(osds) = osds else {
        tracing::warn!("the monitors do not describe the OSDs as expected");
        return (OsdEncryption::Unknown { why: OsdsUnknown::NoAnswer }, known);
    };
    let mut encrypted = BTreeSet::new();
    for osd in &osds {
        if known.contains(osd) {
            encrypted.insert(osd.clone());
            continue;
        }
        let key = format!("{OSD_KEYS}{osd}/luks");
        match ask(&json!({ "prefix": "config-key exists", "key": key })) {
            Ok(_) => {
                encrypted.insert(osd.clone());
            }
            Err(error) if error.raw_os_error() == Some(libc::ENOENT) => {}
            Err(error) => return (unknown(&error), known),
        }
    }
    (judge(osds.len(), encrypted.len()), encrypted)
}

/// What it makes that so many of the OSDs have a key.
fn judge(osds: usize, encrypted: usize) -> OsdEncryption {
    let number = |count: usize| u32::try_from(count).unwrap_or(u32::MAX);
    match (number(osds), number(osds - encrypted)) {
        (0, _) => OsdEncryption::Unknown { why: OsdsUnknown::NoOsds },
        (osds, 0) => OsdEncryption::Yes { osds },
        (osds, plain) => OsdEncryption::No { osds, plain },
    }
}

/// What it makes that the monitors have not answered a question.
fn unknown(error: &io::Error) -> OsdEncryption {
    let why = match error.raw_os_error() {
        Some(libc::EACCES | libc::EPERM) => OsdsUnknown::NotAllowed,
        _ => {
            tracing::debug!(%error, "the monitors do not say whether OSDs are encrypted");
            OsdsUnknown::NoAnswer
        }
    };
    OsdEncryption::Unknown { why }
}

/// The UUIDs of OSDs, as `osd dump` has them; none where it is not as expected.
fn uuids(dump: &[u8]) -> Option<BTreeSet<String>> {
    let dump: Value = serde_json::from_slice(dump).ok()?;
    let osds = dump["osds"].as_array()?.iter();
    let uuids: Option<BTreeSet<_>> =
        osds.map(|osd| osd["uuid"].as_str().map(str::to_owned)).collect();
    let mut uuids = uuids?;
    uuids.remove(NO_UUID);
    Some(uuids)
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;

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

    fn told(ask: impl Fn(&Value) -> io::Result<Vec<u8>> + Send + Sync + 'static) -> OsdEncryption {
        encryption(&ask, BTreeSet::new()).0
    }

    #[test]
    fn osds_are_encrypted_where_each_has_a_key() {
        assert_eq!(told(cluster(&[FIRST, SECOND])), OsdEncryption::Yes { osds: 2 });
        assert_eq!(told(cluster(&[SECOND])), OsdEncryption::No { osds: 2, plain: 1 });
        assert_eq!(told(cluster(&[])), OsdEncryption::No { osds: 2, plain: 2 });
    }

    #[test]
    fn what_the_monitors_do_not_say_is_not_guessed() {
        let unknown = |why| OsdEncryption::Unknown { why };
        let refuses = |number| {
            move |command: &Value| match command["prefix"] == "osd dump" {
                true => Ok(dump()),
                false => Err(failed(number)),
            }
        };
        assert_eq!(told(refuses(libc::EACCES)), unknown(OsdsUnknown::NotAllowed));
        assert_eq!(told(refuses(libc::EPERM)), unknown(OsdsUnknown::NotAllowed));
        assert_eq!(told(refuses(libc::ETIMEDOUT)), unknown(OsdsUnknown::NoAnswer));
        let answers = |answer: &'static str| move |_: &Value| Ok(answer.as_bytes().to_vec());
        assert_eq!(told(answers(r#"{"osds": []}"#)), unknown(OsdsUnknown::NoOsds));
        for wrong in ["", "{}", r#"{"osds": [{"osd": 0}]}"#] {
            assert_eq!(told(answers(wrong)), unknown(OsdsUnknown::NoAnswer), "{wrong}");
        }
    }

    #[test]
    fn an_osd_that_is_encrypted_is_not_asked_for_again() {
        let (first, known) = encryption(&cluster(&[FIRST]), BTreeSet::new());
        assert_eq!(first, OsdEncryption::No { osds: 2, plain: 1 });
        assert_eq!(known, BTreeSet::from([FIRST.to_owned()]));
        // Only of the second one there is a key to be asked for.
        let (second, known) = encryption(&cluster(&[SECOND]), known);
        assert_eq!(second, OsdEncryption::Yes { osds: 2 });
        // A cluster that does not answer for a moment takes nothing back.
        let silent = |_: &Value| Err(failed(libc::ETIMEDOUT));
        let (_, still) = encryption(&silent, known.clone());
        assert_eq!(still, known);
    }

    #[test]
    fn a_cluster_that_does_not_answer_is_asked_by_one_thread() {
        let (answer, answers) = mpsc::channel::<()>();
        let answers = Mutex::new(answers);
        let (asked, questions) = mpsc::channel();
        let osds = Osds::asked_by(move |command| {
            asked.send(()).unwrap();
            answers.lock().unwrap().recv().unwrap();
            cluster(&[FIRST, SECOND])(command)
        });
        let no_answer = OsdEncryption::Unknown { why: OsdsUnknown::NoAnswer };
        assert_eq!((osds.ask(), osds.ask()), (no_answer, no_answer));
        assert_eq!(questions.try_iter().count(), 1, "two threads ask");
        // The dump, and a key for each OSD.
        (0..3).for_each(|_| answer.send(()).unwrap());
        while osds.0.state().told.is_none() {
            std::thread::yield_now();
        }
        // That is good for a while.
        assert_eq!(osds.ask(), OsdEncryption::Yes { osds: 2 });
        assert_eq!(questions.try_iter().count(), 2);
    }
}
