//! The log levels of the server and its hosts.

use vmseal_api::log_level::LogLevel;
use vmseal_api::problem::Problem;
use vmseal_api::request::SetLogLevel;
use vmseal_log::{Levels, LevelsError};

use super::caller::{Caller, Privilege};
use super::{Services, hosts};
use crate::store::events::NewEvent;

fn shown() -> LogLevel {
    LogLevel { levels: vmseal_log::levels().to_string(), silent: Vec::new() }
}

fn parse(request: &SetLogLevel) -> Result<Levels, Problem> {
    let invalid = |error: LevelsError| Problem::invalid("levels", error.to_string());
    request.levels.parse().map_err(invalid)
}

/// Shows the log levels of the server.
pub async fn show(_: &Services, caller: &Caller) -> Result<LogLevel, Problem> {
    caller.require(Privilege::Read)?;
    Ok(shown())
}

/// Changes the log levels of the server, until its process ends.
pub async fn set(
    services: &Services,
    caller: &Caller,
    request: SetLogLevel,
) -> Result<LogLevel, Problem> {
    caller.require(Privilege::Diagnostics)?;
    let levels = parse(&request)?;
    tell(services, "server.log-level-set", caller.name(), "server", &levels).await?;
    vmseal_log::set_levels(levels);
    Ok(shown())
}

/// Shows the log levels of a host's agent.
pub async fn show_host(
    services: &Services,
    caller: &Caller,
    name: &str,
) -> Result<LogLevel, Problem> {
    caller.require(Privilege::Read)?;
    let host = hosts::find(services, name).await?;
    services.hosts.connected(host.id)?.log_level().await
}

/// Changes the log levels of a host's agent and of the filters of its VMs, until the agent's process ends.
pub async fn set_host(
    services: &Services,
    caller: &Caller,
    name: &str,
    request: SetLogLevel,
) -> Result<LogLevel, Problem> {
    caller.require(Privilege::Diagnostics)?;
    let levels = parse(&request)?;
    let host = hosts::find(services, name).await?;
    let level = services.hosts.connected(host.id)?.set_log_level(levels.to_string()).await?;
    tell(services, "host.log-level-set", caller.name(), &host.name, &levels).await?;
    Ok(level)
}

async fn tell(
    services: &Services,
    kind: &str,
    actor: &str,
    target: &str,
    levels: &Levels,
) -> Result<(), Problem> {
    let mut write = services.store.write().await?;
    write.event(NewEvent { kind, actor, target, detail: &levels.to_string() }).await?;
    Ok(write.commit().await?)
}
