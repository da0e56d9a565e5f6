//! `vmseal lab ceph`: a Ceph cluster on this machine. No server is asked.

use std::path::Path;

use vmseal_lab::ceph::layout::Layout;
use vmseal_lab::ceph::{self, CephError, Status, UpArguments, narrate};

use crate::arguments::{Ceph, CephDown, CephPool, Output};
use crate::exit::{Ended, Exit, text};
use crate::print;
use crate::rows::ceph::details;

/// Carries out a verb; Ctrl-C ends it.
pub async fn run(output: Output, verb: Ceph) -> anyhow::Result<()> {
    let again = match &verb {
        Ceph::Up(_) => "what was made and started stays: vmseal lab ceph up goes on",
        Ceph::Pool(_) | Ceph::Down(_) => "what was done stays: the same command goes on",
        Ceph::Status(_) => "",
    };
    let work = tokio::task::spawn_blocking(move || carry_out(output, verb));
    tokio::select! {
        done = work => done?,
        Ok(()) = tokio::signal::ctrl_c() => {
            let message = format!("interrupted; {again}");
            let message = message.trim_end_matches("; ").to_owned();
            Err(Ended::new(Exit::Interrupted, message).into())
        }
    }
}

fn carry_out(output: Output, verb: Ceph) -> anyhow::Result<()> {
    match verb {
        Ceph::Up(options) => up(output, &options),
        Ceph::Down(options) => down(&options),
        Ceph::Status(place) => {
            let directory = place.directory().map_err(ended)?;
            show(output, &ceph::status::status(&directory).map_err(ended)?)
        }
        Ceph::Pool(CephPool::Add(options)) => {
            ceph::pools::add(&options, &mut narrate).map_err(ended)
        }
    }
}

fn up(output: Output, options: &UpArguments) -> anyhow::Result<()> {
    let status = ceph::up::up(options, &mut narrate).map_err(ended)?;
    show(output, &status)?;
    let configuration = status.configuration.display();
    print::say(format_args!(
        "use it: rbd -c {configuration} create {}/test --size 1G",
        ceph::pools::USUAL
    ));
    Ok(())
}

fn show(output: Output, status: &Status) -> anyhow::Result<()> {
    print::one(output, status, &details(status))
}

fn down(options: &CephDown) -> anyhow::Result<()> {
    let directory = options.place.directory().map_err(ended)?;
    if options.destroy && !options.yes {
        // What is not there is not asked about.
        confirm(Layout::find(&directory).map_err(ended)?.root())?;
    }
    ceph::down::down(&directory, options.destroy, &mut narrate).map_err(ended)
}

/// Asks whether the cluster may be removed.
fn confirm(directory: &Path) -> anyhow::Result<()> {
    let directory = print::printable(&directory.display().to_string());
    let lost = format!("The Ceph cluster in {directory} is removed, with all that is stored in it");
    super::confirm::removal(&lost, "Go on")
}

/// The error with its exit code.
fn ended(error: CephError) -> anyhow::Error {
    let exit = match &error {
        CephError::NoCluster { .. } => Exit::NotFound,
        CephError::Busy { .. }
        | CephError::Destroyed { .. }
        | CephError::Fixed { .. }
        | CephError::InUse { .. }
        | CephError::PoolExists { .. }
        | CephError::Runs { .. } => Exit::Conflict,
        CephError::Directory { .. } | CephError::NoHome | CephError::Pool { .. } => Exit::Usage,
        CephError::NoAnswer { .. } | CephError::Never { .. } => Exit::NoAnswer,
        _ => Exit::Failed,
    };
    Ended::new(exit, text(&error.into())).into()
}
