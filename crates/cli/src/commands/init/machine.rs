//! What has to be right with this machine and the options, before anything is changed.

use std::net::{SocketAddr, TcpListener};
use std::path::Path;

use anyhow::Context;
use nix::unistd::{AccessFlags, access};
use vmseal_agent::host::doctor::{self, Finding, Verdict};
use vmseal_api::model::Connection;
use vmseal_secret::process::Hardening;

use super::super::doctor::{examine, report};
use super::super::processes::beside_this_program;
use super::{Init, keys};
use crate::exit::{Ended, Exit};
use crate::print;

/// What `vmseal doctor` says of a host that has joined: here that is seen step by step.
const OF_A_JOINED_HOST: [&str; 6] = [
    "server",
    "agent",
    "host-certificate",
    "host-authority",
    "server-certificate",
    "server-authority",
];

/// Refuses a machine that could not run VMs, and options that could not work.
pub(super) async fn check(init: &Init, hardening: Hardening) -> anyhow::Result<()> {
    check_options(init)?;
    if !nix::unistd::geteuid().is_root() {
        let message = "init makes services and gives each guest a user of its own: run it as root (sudo vmseal init)";
        return Err(Ended::new(Exit::NotPermitted, message).into());
    }
    if !init.has_data() {
        if init.backup.symlink_metadata().is_ok() {
            let message = format!(
                "{} is there already, of another server: move it away, or give --backup FILE",
                init.backup.display()
            );
            return Err(Ended::new(Exit::Conflict, message).into());
        }
        if !keys::kept_in(&init.options.places.config_dir).exists() {
            keys::check_can_be_had(&init.options)?;
        }
    }
    check_addresses(init).await?;
    let findings = look(init, hardening).await?;
    for finding in findings.iter().filter(|it| it.result == Verdict::Warning) {
        print::say(report(finding));
    }
    let failed: Vec<_> = findings.iter().filter(|it| it.result == Verdict::Failed).collect();
    if failed.is_empty() {
        return Ok(());
    }
    for finding in &failed {
        print::say(report(finding));
    }
    let message = "this machine cannot run VMs yet: see above. Nothing was changed";
    Err(Ended::new(Exit::Failed, message).into())
}

async fn look(init: &Init, hardening: Hardening) -> anyhow::Result<Vec<Finding>> {
    let places = &init.options.places;
    let filter = match &places.filter {
        Some(filter) => filter.clone(),
        None => beside_this_program("vmseal-filter")?,
    };
    let datastore = init.options.datastore.clone();
    let options = doctor::Options {
        state_dir: places.state_dir.clone(),
        data_dir: places.data_dir.clone(),
        qemu: places.qemu.clone(),
        filter,
        // The agent that is started has them there.
        swtpm: vmseal_agent::SWTPM.into(),
        firmware_directory: vmseal_agent::FIRMWARE_DIRECTORY.into(),
        // One that is not there yet is made.
        datastores: if datastore.exists() { vec![datastore] } else { Vec::new() },
        hardening,
    };
    let mut findings = examine(&options).await;
    findings.retain(|it| !OF_A_JOINED_HOST.contains(&it.check.as_str()));
    Ok(findings)
}

fn check_options(init: &Init) -> anyhow::Result<()> {
    let usage = |message: String| Err(Ended::new(Exit::Usage, message).into());
    for (option, address) in
        [("--listen", init.options.listen), ("--agent-listen", init.options.agent_listen)]
    {
        if address.ip().is_unspecified() || address.port() == 0 {
            return usage(format!(
                "{option}: {address} is no address that a machine is reached at: give one of this machine's, and a port"
            ));
        }
    }
    let (places, backup) = (&init.options.places, &init.backup);
    for beside in [&places.data_dir, &init.options.datastore] {
        if backup.starts_with(beside) {
            return usage(format!(
                "--backup: {} is in {}: a backup that lies beside the data is lost with it, give another place",
                backup.display(),
                beside.display()
            ));
        }
        if places.config_dir.starts_with(beside) {
            return usage(format!(
                "--config-dir: {} is in {}: the passphrase must not lie beside the data, give another place",
                places.config_dir.display(),
                beside.display()
            ));
        }
    }
    let directory = backup.parent().unwrap_or(Path::new("/"));
    access(directory, AccessFlags::W_OK | AccessFlags::X_OK).with_context(|| {
        format!("no backup can be written to {}: give --backup FILE", backup.display())
    })
}

/// Refuses an address at which something else listens.
async fn check_addresses(init: &Init) -> anyhow::Result<()> {
    if init.server.is_none() {
        free("--listen", init.options.listen)?;
    }
    let connected = match &init.server {
        Some(_) => init.own_host().await?.is_some_and(|it| it.connection == Connection::Connected),
        None => false,
    };
    // An agent that runs while its server does not holds its address itself.
    if !connected && !init.has_data() {
        free("--agent-listen", init.options.agent_listen)?;
    }
    Ok(())
}

fn free(option: &str, address: SocketAddr) -> anyhow::Result<()> {
    match TcpListener::bind(address) {
        Ok(_) => Ok(()),
        Err(error) => {
            let message =
                format!("nothing can listen at {address}: {error}. Give another {option}");
            Err(Ended::new(Exit::Conflict, message).into())
        }
    }
}
