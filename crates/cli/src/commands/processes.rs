//! The roles: `vmseal server`, `vmseal agent`.

use std::io::Read;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, ensure};
use tokio::signal::unix::{SignalKind, signal};
use vmseal_agent::{
    AcceleratorChoice as Choice, AgentOptions, FILTER_RESTART_TIMEOUT, JoinOptions,
};
use vmseal_rest::ServerOptions;
use vmseal_secret::process::{Hardening, MemoryLock};
use zeroize::Zeroizing;

use crate::arguments::{Accelerator, Agent, AgentCommand, JoinAgent, OnOff, RunAgent, RunServer};
use crate::{images, print};

/// The longest join token that is read, in bytes; a real one has 108.
const TOKEN_MAX: u64 = 1024;

pub async fn server(options: RunServer, hardening: Hardening) -> anyhow::Result<()> {
    vmseal_log::start();
    report(hardening);
    let credentials_dir = std::env::var_os("CREDENTIALS_DIRECTORY").map(PathBuf::from);
    let RunServer { data_dir, listen, names, keep_events, parent, hold_steps } = options;
    end_with(parent)?;
    vmseal_rest::serve(ServerOptions {
        data_dir,
        listen,
        names,
        credentials_dir,
        keep_events_days: keep_events,
        hold_steps,
    })
    .await?;
    Ok(())
}

pub async fn agent(options: Agent, hardening: Hardening) -> anyhow::Result<()> {
    match options.command {
        Some(AgentCommand::Join(join)) => join_host(join).await,
        None => run_agent(options.run, hardening).await,
    }
}

async fn run_agent(options: RunAgent, hardening: Hardening) -> anyhow::Result<()> {
    vmseal_log::start();
    report(hardening);
    end_with(options.parent)?;
    let filter = match options.filter {
        Some(filter) => filter,
        None => {
            let filter = beside_this_program("vmseal-filter")?;
            ensure!(filter.exists(), "there is no {}: give --filter FILE", filter.display());
            filter
        }
    };
    let host = AgentOptions {
        run_dir: options.run_dir,
        state_dir: options.state_dir.clone(),
        filter,
        qemu: options.qemu,
        firmware_directory: options.firmware_directory,
        swtpm: options.swtpm,
        transfer_directories: transfer_directories(
            &options.state_dir,
            options.transfer_directories,
        )?,
        uid_base: options.uid_base,
        accelerator: match options.accelerator {
            Accelerator::Auto => Choice::Auto,
            Accelerator::Kvm => Choice::Kvm,
            Accelerator::Tcg => Choice::Tcg,
        },
        hardening: Some(hardening),
        filter_restart_timeout: FILTER_RESTART_TIMEOUT,
        disk_stall: Duration::from_secs(options.disk_stall),
        migration_listen: options.migration_listen,
        place_memory: options.place_memory == OnOff::On,
    };
    let mut terminate = signal(SignalKind::terminate())?;
    let mut interrupt = signal(SignalKind::interrupt())?;
    let end = async move {
        tokio::select! {
            _ = terminate.recv() => {}
            _ = interrupt.recv() => {}
        }
    };
    vmseal_agent::run(options.state_dir, options.listen, host, end).await?;
    Ok(())
}

/// The given directories, else the default one and that of images with a name.
fn transfer_directories(state_dir: &Path, given: Vec<PathBuf>) -> anyhow::Result<Vec<PathBuf>> {
    use std::os::unix::fs::DirBuilderExt;
    if !given.is_empty() {
        return Ok(given);
    }
    let own = std::path::absolute(state_dir)?.join("transfer");
    let made = std::fs::DirBuilder::new().recursive(true).mode(0o700).create(&own);
    made.with_context(|| format!("the transfer directory {}", own.display()))?;
    Ok(vec![own, PathBuf::from(images::SYSTEM)])
}

/// The path of a program that is installed beside this one.
pub(super) fn beside_this_program(name: &str) -> anyhow::Result<PathBuf> {
    let own = std::env::current_exe().context("the path of this program is not known")?;
    Ok(own.with_file_name(name))
}

/// Has this process told to end when the one that started it has ended, however that was.
fn end_with(parent: Option<i32>) -> anyhow::Result<()> {
    let Some(parent) = parent else { return Ok(()) };
    nix::sys::prctl::set_pdeathsig(Some(nix::sys::signal::Signal::SIGTERM))?;
    // It may have ended before this was set.
    ensure!(nix::unistd::getppid().as_raw() == parent, "process {parent} did not start this one");
    Ok(())
}

async fn join_host(options: JoinAgent) -> anyhow::Result<()> {
    let token = read_token(&options.join_token_file)?;
    let joined = vmseal_agent::join(JoinOptions {
        server: options.to,
        token,
        name: options.name.clone(),
        address: options.address,
        state_dir: options.state_dir,
        replace: options.replace,
    })
    .await?;
    print::say(format_args!(
        "joined as host '{}' ({}), which the server calls at {}; now run `vmseal agent`",
        options.name, joined.host, joined.address
    ));
    Ok(())
}

fn read_token(file: &Path) -> anyhow::Result<Zeroizing<String>> {
    let mut token = Zeroizing::new(String::with_capacity(TOKEN_MAX as usize));
    let read = if file == Path::new("-") {
        std::io::stdin().lock().take(TOKEN_MAX).read_to_string(&mut token)
    } else {
        std::fs::File::open(file).and_then(|open| open.take(TOKEN_MAX).read_to_string(&mut token))
    };
    read.with_context(|| format!("cannot read the join token from {}", file.display()))?;
    Ok(Zeroizing::new(token.trim().to_owned()))
}

fn report(hardening: Hardening) {
    if hardening.memory != MemoryLock::Locked {
        tracing::warn!(
            memory = ?hardening.memory,
            "memory is not locked: only keys are kept out of swap; run as root or with LimitMEMLOCK=infinity"
        );
    }
    if !hardening.not_dumpable || !hardening.no_core {
        tracing::warn!("core dumps of this process could not be disabled");
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    /// Images with a name are read by an agent that nobody has told where: `vmseal vm launch --image debian` after `vmseal init`.
    #[test]
    fn an_agent_that_is_told_nothing_reads_its_own_directory_and_that_of_named_images() {
        let directory = tempfile::tempdir().unwrap();
        let state = directory.path().join("agent");
        let own = state.join("transfer");
        let found = transfer_directories(&state, Vec::new()).unwrap();
        assert_eq!(found, [own.clone(), PathBuf::from(images::SYSTEM)]);
        assert_eq!(own.metadata().unwrap().permissions().mode() & 0o777, 0o700);
        let given = vec![PathBuf::from("/srv/in"), PathBuf::from("/srv/out")];
        assert_eq!(transfer_directories(&state, given.clone()).unwrap(), given);
    }
}
