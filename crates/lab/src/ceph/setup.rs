//! How a cluster is set up: experiments choose clusters by it.

use std::fmt;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use super::arguments::Messenger;
use super::error::CephError;
use super::layout::Layout;
use super::own_pool;
use super::record::Record;

/// What of a cluster is encrypted. Each cluster is set up in one of these ways.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Setup {
    /// Nothing: the messenger has checksums.
    Crc,
    /// What is sent.
    Secure,
    /// What the OSDs store.
    Osd,
    /// What is sent, and what the OSDs store.
    OsdSecure,
}

impl Setup {
    /// How the cluster of a record is set up.
    #[must_use]
    pub fn of(record: &Record) -> Self {
        match (record.messenger, record.osd_encryption) {
            (Messenger::Crc, false) => Self::Crc,
            (Messenger::Secure, false) => Self::Secure,
            (Messenger::Crc, true) => Self::Osd,
            (Messenger::Secure, true) => Self::OsdSecure,
        }
    }

    /// How the cluster in a directory is set up.
    fn of_directory(directory: &Path) -> Result<Self, CephError> {
        let (_, record) = Record::open(Layout::find(directory)?)?;
        Ok(Self::of(&record))
    }

    /// Its name in files and results.
    #[must_use]
    pub fn id(self) -> &'static str {
        match self {
            Self::Crc => "crc",
            Self::Secure => "secure",
            Self::Osd => "osd",
            Self::OsdSecure => "osd-secure",
        }
    }

    /// The command that makes such a cluster. Their ports are far enough apart for all of them to run at once.
    fn command(self) -> String {
        let options = match self {
            Self::Crc => "--listen 127.0.0.1:17300",
            Self::Secure => "--listen 127.0.0.1:17700 --messenger secure",
            Self::Osd => "--listen 127.0.0.1:18100 --osd-encryption",
            Self::OsdSecure => "--listen 127.0.0.1:18500 --messenger secure --osd-encryption",
        };
        format!("vmseal lab ceph up --directory DIR {options}")
    }
}

impl fmt::Display for Setup {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.id())
    }
}

/// The first directory, of those that are given, whose cluster is set up so and can be measured on; else why an
/// experiment, which was named so, cannot be measured on such a cluster.
///
/// # Errors
/// The reason, and what to do.
pub fn usable<'a>(
    directories: &'a [PathBuf],
    setup: Setup,
    experiment: &str,
) -> Result<&'a Path, String> {
    let (found, mut why) = fitting(directories, setup);
    if found.is_empty() {
        why.insert(0, none_is_given(setup, experiment));
    }
    for directory in found {
        match own_pool::usable(Some(directory), experiment) {
            Ok(directory) => return Ok(directory),
            Err(refused) => why.push(refused),
        }
    }
    Err(why.join("; "))
}

/// The directories whose clusters are set up so, and what is wrong with those of which it cannot be told.
fn fitting(directories: &[PathBuf], setup: Setup) -> (Vec<&Path>, Vec<String>) {
    let (mut found, mut unread) = (Vec::new(), Vec::new());
    for directory in directories {
        match Setup::of_directory(directory) {
            Ok(other) if other == setup => found.push(directory.as_path()),
            Ok(_) => {}
            Err(error) => unread.push(error.to_string()),
        }
    }
    (found, unread)
}

fn none_is_given(setup: Setup, experiment: &str) -> String {
    let command = setup.command();
    format!(
        "it needs a Ceph cluster set up as `{setup}`, and none is given: make one with `{command}`, then measure with \
         `vmseal lab run {experiment} --ceph-directory DIR`, with --ceph-directory once for each cluster"
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ceph::arguments::UpArguments;

    const ALL: [Setup; 4] = [Setup::Crc, Setup::Secure, Setup::Osd, Setup::OsdSecure];

    /// The directory of a cluster that does not run.
    fn cluster(within: &Path, name: &str, messenger: Messenger, osd_encryption: bool) -> PathBuf {
        let directory = within.join(name);
        let record = Record::new(&UpArguments::default()).unwrap();
        let record = Record { messenger, osd_encryption, ..record };
        record.write(&Layout::make(&directory).unwrap()).unwrap();
        directory
    }

    #[test]
    fn each_setup_has_the_clusters_that_fit_it() {
        let place = tempfile::tempdir().unwrap();
        let made = |name, messenger, osd| cluster(place.path(), name, messenger, osd);
        let directories = [
            made("osd", Messenger::Crc, true),
            made("crc", Messenger::Crc, false),
            place.path().join("nothing"),
            made("osd-secure", Messenger::Secure, true),
            made("secure", Messenger::Secure, false),
            made("crc-2", Messenger::Crc, false),
        ];
        for (setup, expected) in ALL.into_iter().zip([vec![1_usize, 5], vec![4], vec![0], vec![3]])
        {
            let (found, unread) = fitting(&directories, setup);
            let expected: Vec<&Path> = expected.iter().map(|at| &*directories[*at]).collect();
            assert_eq!(found, expected, "{setup}");
            assert!(matches!(&unread[..], [why] if why.contains("nothing")), "{unread:?}");
        }
    }

    #[test]
    fn a_cluster_that_is_not_given_is_told_with_the_command_that_makes_it() {
        let place = tempfile::tempdir().unwrap();
        let crc = [cluster(place.path(), "crc", Messenger::Crc, false)];
        for (setup, options) in [
            (Setup::Secure, "127.0.0.1:17700 --messenger secure`"),
            (Setup::Osd, "127.0.0.1:18100 --osd-encryption`"),
            (Setup::OsdSecure, "127.0.0.1:18500 --messenger secure --osd-encryption`"),
        ] {
            let told = usable(&crc, setup, "mine.toml").unwrap_err();
            let make = format!("`vmseal lab ceph up --directory DIR --listen {options}");
            for part in [&*make, "`vmseal lab run mine.toml --ceph-directory DIR`", setup.id()] {
                assert!(told.contains(part), "{told}\nnot: {part}");
            }
        }
        // One that is given is not asked for again, whatever is wrong with it: here it does not run, or Ceph's
        // programs are missing.
        let told = usable(&crc, Setup::Crc, "mine.toml").unwrap_err();
        assert!(!told.contains("none is given"), "{told}");
    }

    #[test]
    fn names_are_those_of_files() {
        for setup in ALL {
            let name = serde_json::to_value(setup).unwrap();
            assert_eq!(name, setup.id());
        }
    }
}
