//! The doctor: what an operator has to fix on a host. It looks and tries instead of asking an agent, so it
//! works before a machine has joined and when the agent does not start.

mod buffers;
mod certificates;
mod kernel;
mod memory;
mod network;
mod processor;
mod programs;
mod storage;

use std::path::PathBuf;

use serde::{Deserialize, Serialize};
use vmseal_secret::process::Hardening;

use crate::host::identity::{Identity, IdentityError};

/// What to check.
#[derive(Clone, Debug)]
pub struct Options {
    /// Where the agent keeps its certificate.
    pub state_dir: PathBuf,
    /// Where a server on this machine keeps its data.
    pub data_dir: PathBuf,
    /// The QEMU program, by path or name.
    pub qemu: PathBuf,
    /// The `vmseal-filter` program.
    pub filter: PathBuf,
    /// The swtpm program, by path or name.
    pub swtpm: PathBuf,
    /// Where OVMF is.
    pub firmware_directory: PathBuf,
    /// Directories that are or will be datastores.
    pub datastores: Vec<PathBuf>,
    /// What [`vmseal_secret::process::harden`] achieved in this process.
    pub hardening: Hardening,
}

/// The result of a check.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Verdict {
    /// As it should be.
    Ok,
    /// vmseal works, less well or less safely than it could.
    Warning,
    /// VMs will not run, or not encrypted, until it is fixed.
    Failed,
}

/// The finding of one check.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Finding {
    /// The name of the check; it stays the same from version to version.
    pub check: String,
    /// The result.
    pub result: Verdict,
    /// What was found, and what it means.
    pub found: String,
    /// How to fix it; none where nothing is wrong.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub remedy: Option<String>,
}

impl Finding {
    fn ok(check: &str, found: impl Into<String>) -> Self {
        Self { check: check.to_owned(), result: Verdict::Ok, found: found.into(), remedy: None }
    }

    fn warning(check: &str, found: impl Into<String>, remedy: &str) -> Self {
        let remedy = Some(remedy.to_owned());
        Self { result: Verdict::Warning, remedy, ..Self::ok(check, found) }
    }

    fn failed(check: &str, found: impl Into<String>, remedy: &str) -> Self {
        Self { result: Verdict::Failed, ..Self::warning(check, found, remedy) }
    }
}

/// Runs all checks. Takes some seconds, as a guest is run to try KVM.
pub async fn examine(options: &Options) -> Vec<Finding> {
    let mut findings = vec![processor::instructions()];
    findings.extend(programs::qemu(&options.qemu));
    findings.push(processor::accelerator(&options.qemu).await);
    findings.push(programs::filter(&options.filter));
    findings.push(programs::swtpm(&options.swtpm));
    findings.push(programs::ovmf(&options.firmware_directory));
    findings.extend(memory::all(options.hardening));
    findings.push(kernel::io_uring());
    findings.push(kernel::confinement());
    findings.push(kernel::clock());
    findings.push(network::cards());
    findings.push(buffers::connections());
    for directory in &options.datastores {
        findings.push(storage::datastore(directory));
    }
    findings.extend(certificates::of_server(&options.data_dir));
    match Identity::load(&options.state_dir) {
        Ok(identity) => {
            findings.extend(certificates::of_host(&identity));
            findings.extend(network::of_host(&identity));
        }
        Err(IdentityError::None(_)) => findings.push(Finding::warning(
            "host-certificate",
            format!(
                "this machine is not a host yet: there is no identity in {}",
                options.state_dir.display()
            ),
            "to make it one, join a server: vmseal agent join",
        )),
        Err(error) => findings.push(Finding::failed(
            "host-certificate",
            error.to_string(),
            "join the server again: vmseal agent join",
        )),
    }
    findings
}
