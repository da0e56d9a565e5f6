//! VMs that died and have not run since, on record beside the run directory's processes, so that an agent
//! that restarts raises the same alarm.
//!
//! ```text
//! <run dir>/deaths/<vm id>.json
//! ```
//! Written before what is left of the VM is removed; removed before its guest runs again. Like the run
//! directory, it is lost at a reboot; VMs that ran then are found dead where the run directory survives it.

use std::collections::BTreeMap;
use std::fs::DirBuilder;
use std::io;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use vmseal_api::host::{Stopped, VmSpec};
use vmseal_api::id::VmId;

use crate::process::run_record;
use vmseal_api::atomic_file::{self, PRIVATE};

/// The version of a record.
const VERSION: u32 = 1;

/// A VM that died.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DiedVm {
    /// The specification that it ran with.
    pub spec: VmSpec,
    /// When and why it died.
    pub stopped: Stopped,
}

/// The record.
#[derive(Serialize, Deserialize)]
struct Stored {
    version: u32,
    spec: run_record::VmOfDisks,
    stopped: Stopped,
}

/// The records of VMs that died.
#[derive(Debug)]
pub struct DiedVms {
    directory: PathBuf,
}

impl DiedVms {
    /// Opens the records in the run directory `root`; creates their directory when missing.
    ///
    /// # Errors
    /// Those of the file system.
    pub fn open(root: &Path) -> io::Result<Self> {
        let directory = root.join("deaths");
        DirBuilder::new().recursive(true).mode(0o700).create(&directory)?;
        Ok(Self { directory })
    }

    fn path(&self, vm: VmId) -> PathBuf {
        self.directory.join(format!("{vm}.json"))
    }

    /// Records that a VM died; replaces an earlier record of the VM.
    ///
    /// # Errors
    /// Those of the file system.
    pub fn record(&self, spec: &VmSpec, stopped: &Stopped) -> io::Result<()> {
        let death = Stored { version: VERSION, spec: spec.into(), stopped: stopped.clone() };
        atomic_file::write(&self.path(spec.vm), &serde_json::to_vec_pretty(&death)?, PRIVATE)
    }

    /// Removes a VM's record, if there is one.
    ///
    /// # Errors
    /// Those of the file system.
    pub fn forget(&self, vm: VmId) -> io::Result<()> {
        match std::fs::remove_file(self.path(vm)) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
            _ => Ok(()),
        }
    }

    /// All records. A record that cannot be read is logged and skipped.
    ///
    /// # Errors
    /// Those of reading the directory.
    pub fn all(&self) -> io::Result<BTreeMap<VmId, DiedVm>> {
        let mut found = BTreeMap::new();
        for entry in std::fs::read_dir(&self.directory)? {
            let path = entry?.path();
            // Other files are left from a crash while a record was written.
            if path.extension().is_none_or(|extension| extension != "json") {
                continue;
            }
            match read(&path) {
                Ok(death) => drop(found.insert(death.spec.vm, death)),
                Err(error) => {
                    tracing::warn!(path = %path.display(), %error, "a record of a VM's death is damaged");
                }
            }
        }
        Ok(found)
    }
}

fn read(path: &Path) -> io::Result<DiedVm> {
    let death: Stored = serde_json::from_slice(&std::fs::read(path)?)?;
    if death.version == VERSION {
        return Ok(DiedVm { spec: death.spec.into(), stopped: death.stopped });
    }
    Err(io::Error::other(format!("it has version {}, this agent reads {VERSION}", death.version)))
}

#[cfg(test)]
mod tests {
    use jiff::Timestamp;
    use vmseal_api::host::StopReason;

    use super::*;
    use crate::process::run_dir::tests::spec;

    fn death(reason: StopReason) -> Stopped {
        Stopped { at: Timestamp::now(), reason, detail: "it died".to_owned() }
    }

    #[test]
    fn the_last_death_of_each_vm_is_on_record_until_it_is_forgotten() {
        let root = tempfile::tempdir().unwrap();
        let died = DiedVms::open(root.path()).unwrap();
        let (one, other) = (spec(), spec());
        died.record(&one, &death(StopReason::FilterDied)).unwrap();
        died.record(&one, &death(StopReason::QemuDied)).unwrap();
        died.record(&other, &death(StopReason::FoundDead)).unwrap();
        let again = DiedVms::open(root.path()).unwrap();
        let all = again.all().unwrap();
        assert_eq!(all.len(), 2);
        assert_eq!(all[&one.vm].stopped.reason, StopReason::QemuDied);
        assert_eq!(all[&one.vm].spec, one);
        again.forget(one.vm).unwrap();
        again.forget(one.vm).unwrap();
        assert_eq!(died.all().unwrap().into_keys().collect::<Vec<_>>(), [other.vm]);
    }

    #[test]
    fn files_that_are_not_records_are_skipped() {
        let root = tempfile::tempdir().unwrap();
        let died = DiedVms::open(root.path()).unwrap();
        let (dead, newer) = (spec(), spec());
        died.record(&dead, &death(StopReason::QemuDied)).unwrap();
        died.record(&newer, &death(StopReason::QemuDied)).unwrap();
        let path = died.path(newer.vm);
        let text = std::fs::read_to_string(&path).unwrap();
        std::fs::write(&path, text.replace("\"version\": 1", "\"version\": 2")).unwrap();
        std::fs::write(died.directory.join("x.json"), "{").unwrap();
        std::fs::write(died.directory.join("y.json.new"), "{").unwrap();
        assert_eq!(died.all().unwrap().into_keys().collect::<Vec<_>>(), [dead.vm]);
    }
}
