//! The log levels of server and hosts.

use vmseal_api::client::ServerClient;
use vmseal_api::log_level::LogLevel;
use vmseal_api::request::SetLogLevel;
use vmseal_log::Levels;

use crate::arguments::Output;
use crate::print;

/// Shows the levels of the process at `path`, or changes them.
pub async fn run(
    server: &ServerClient,
    output: Output,
    path: &str,
    levels: Option<Levels>,
) -> anyhow::Result<()> {
    let level: LogLevel = match levels {
        None => server.get(path).await?,
        Some(levels) => server.put(path, &SetLogLevel { levels: levels.to_string() }).await?,
    };
    for vm in &level.silent {
        print::say(format_args!("the filter of VM {vm} has not answered; it logs as before"));
    }
    print::one(output, &level, &[])
}
