//! Following the drain of a host.

use std::time::Duration;

use bytesize::ByteSize;
use vmseal_api::client::ServerClient;
use vmseal_api::drain::{Drain, DrainState, DrainedVm, Maintenance};
use vmseal_api::model::{Host, Task};
use vmseal_api::problem::{ErrorCode, Problem};

use super::follow::Changes;
use super::progress::Progress;
use super::reconnect::across;
use crate::arguments::Output;
use crate::exit::{Ended, Exit};
use crate::print;
use crate::rows::word;

/// What changes while a host is emptied: what is noted of its VMs, and the tasks.
const KINDS: &str = "host,task";

/// Waits until a host whose drain has begun is empty, or nothing more happens. Ctrl-C and the timeout end the wait, not the drain.
pub async fn wait(
    server: &ServerClient,
    output: Output,
    begun: Host,
    timeout: Option<Duration>,
) -> anyhow::Result<()> {
    let name = begun.name.clone();
    let (exit, why) = tokio::select! {
        ended = follow(server, begun) => return end(output, &ended?),
        () = elapsed(timeout) => (Exit::GoesOn, "--timeout has passed"),
        Ok(()) = tokio::signal::ctrl_c() => (Exit::Interrupted, "interrupted"),
    };
    let message = format!(
        "{why}; the drain goes on. To see how far it is: vmseal host show {name}. To end it: vmseal host undrain {name}"
    );
    Err(Ended::new(exit, message).into())
}

async fn elapsed(timeout: Option<Duration>) {
    match timeout {
        Some(timeout) => tokio::time::sleep(timeout).await,
        None => std::future::pending().await,
    }
}

/// Follows a drain until the host is empty, or nothing more happens.
async fn follow(server: &ServerClient, begun: Host) -> Result<Host, Problem> {
    let path = format!("hosts/{}", begun.id);
    let mut progress = Progress::quiet();
    let mut changes = across(server, async || Changes::begin(server, KINDS).await).await?;
    loop {
        let host: Host = across(server, async || server.get(&path).await).await?;
        let mut tasks: Vec<Task> = Vec::new();
        for task in host.drain.iter().flat_map(|drain| &drain.vms).filter_map(|vm| vm.task) {
            match across(server, async || server.get(&format!("tasks/{task}")).await).await {
                Ok(task) => tasks.push(task),
                // It ended so long ago that it is not kept any more.
                Err(problem) if problem.code == ErrorCode::NotFound => {}
                Err(problem) => return Err(problem),
            }
        }
        let output = |error: anyhow::Error| Problem::new(ErrorCode::Internal, error.to_string());
        progress.show(&tasks).map_err(output)?;
        let stuck = host.drain.as_ref().is_none_or(Drain::is_stuck);
        if host.maintenance != Maintenance::Draining || stuck {
            return Ok(host);
        }
        across(server, async || changes.next().await).await?;
    }
}

/// How the program ends.
fn end(output: Output, host: &Host) -> anyhow::Result<()> {
    if output != Output::Table {
        print::one(output, host, &[])?;
    }
    let name = &host.name;
    let message = match host.maintenance {
        Maintenance::Drained => {
            print::say(format_args!(
                "host '{name}' is empty: no VM runs there but those that are left"
            ));
            return Ok(());
        }
        Maintenance::No => format!("host '{name}' has been undrained meanwhile"),
        Maintenance::Draining => stuck(name, host.drain.as_ref()),
    };
    Err(Ended::new(Exit::Conflict, message).into())
}

/// Why a host is not empty.
fn stuck(name: &str, drain: Option<&Drain>) -> String {
    let stay = drain.iter().flat_map(|drain| &drain.vms);
    let stay = stay.filter(|vm| vm.state == DrainState::Stays);
    let lines: Vec<_> = stay.map(|vm| format!("  {}: {}", vm.vm, vm.detail)).collect();
    format!(
        "VMs stay on host '{name}':\n{}\nNo VM is placed there. Move or stop these, or try again (vmseal host drain {name}, with --stop-others to shut them down); to end it: vmseal host undrain {name}",
        lines.join("\n")
    )
}

/// What `host show` says of a drain.
pub fn details(drain: &Drain) -> Vec<(&'static str, String)> {
    let others = if drain.stop_others { ", others are shut down" } else { "" };
    let rate = drain.rate.map_or_else(String::new, |rate| {
        format!(", each at most {}/s", ByteSize(rate).display().iec())
    });
    let compressed = if drain.compress { ", memory compressed" } else { "" };
    let how = format!(
        "begun by {} at {:.0}, {} VMs at a time{rate}{compressed}{others}",
        drain.actor, drain.begun, drain.parallel
    );
    let line = |vm: &DrainedVm| {
        let detail = if vm.detail.is_empty() { String::new() } else { format!(": {}", vm.detail) };
        ("VM", format!("{} {}{detail}", vm.vm, word(&vm.state)))
    };
    std::iter::once(("DRAIN", how)).chain(drain.vms.iter().map(line)).collect()
}

#[cfg(test)]
mod tests {
    use vmseal_api::model::Connection;

    use super::*;

    fn host(maintenance: Maintenance, states: &[DrainState]) -> Host {
        let vms = states.iter().enumerate().map(|(number, state)| DrainedVm {
            vm: format!("vm{number}"),
            state: *state,
            task: None,
            detail: format!("because of {number}"),
        });
        let drain = Drain {
            actor: "me".to_owned(),
            begun: jiff::Timestamp::UNIX_EPOCH,
            request_id: None,
            parallel: 2,
            stop_others: false,
            rate: None,
            compress: false,
            vms: vms.collect(),
        };
        Host {
            id: vmseal_api::id::HostId::new(),
            name: "a".to_owned(),
            address: "127.0.0.1:1".to_owned(),
            connection: Connection::Connected,
            maintenance,
            drain: Some(drain),
            description: None,
            room: None,
        }
    }

    #[test]
    fn a_host_that_is_not_empty_is_an_error_that_names_what_stays_and_why() {
        let emptied = host(Maintenance::Drained, &[DrainState::Done]);
        assert!(end(Output::Table, &emptied).is_ok());
        let left = host(Maintenance::Draining, &[DrainState::Done, DrainState::Stays]);
        let error = end(Output::Table, &left).unwrap_err();
        assert_eq!(Exit::of(&error), Exit::Conflict);
        let said = error.to_string();
        assert!(said.contains("vm1: because of 1") && !said.contains("vm0"), "{said}");
        let undrained = host(Maintenance::No, &[]);
        assert_eq!(Exit::of(&end(Output::Table, &undrained).unwrap_err()), Exit::Conflict);
    }

    #[test]
    fn a_host_shows_how_far_each_of_its_vms_is() {
        let shown =
            details(host(Maintenance::Draining, &[DrainState::UnderWay]).drain.as_ref().unwrap());
        assert_eq!(shown[1], ("VM", "vm0 under-way: because of 0".to_owned()));
    }
}
