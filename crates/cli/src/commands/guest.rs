//! `vmseal vm guest`: sends requests to the guest agent and prints its answers.

use std::io::Write;

use anyhow::Context;
use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use vmseal_api::client::ServerClient;
use vmseal_api::guest::{GuestAnswer, GuestCommand};

use crate::arguments::Guest;
use crate::exit::{Ended, Exit};
use crate::print;

pub async fn run(server: &ServerClient, verb: Guest) -> anyhow::Result<()> {
    let (name, command) = match verb {
        Guest::Ping { name } => (name, GuestCommand::Ping),
        Guest::Exec { name, seconds, command } => {
            let (path, arguments) = command.split_first().context("no program is given")?;
            let (path, arguments) = (path.clone(), arguments.to_vec());
            (name, GuestCommand::Exec { path, arguments, seconds })
        }
        Guest::Fsfreeze { name } => (name, GuestCommand::Freeze),
        Guest::Fsthaw { name } => (name, GuestCommand::Thaw),
    };
    match server.post(&format!("vms/{name}/guest"), &command).await? {
        GuestAnswer::Pong => print::line(&format!("the guest agent of {name} answers")),
        GuestAnswer::Frozen { file_systems } => print::line(&format!(
            "file systems of {name} that are frozen: {file_systems}; to go on: vmseal vm guest fsthaw {name}"
        )),
        GuestAnswer::Thawed { file_systems } => {
            print::line(&format!("file systems of {name} that were thawed: {file_systems}"))
        }
        GuestAnswer::Ended { status, signal, stdout, stderr, truncated } => {
            std::io::stdout().write_all(&STANDARD.decode(stdout)?)?;
            std::io::stdout().flush()?;
            std::io::stderr().write_all(&STANDARD.decode(stderr)?)?;
            if truncated {
                print::say("the output is cut off: have the program write to a file in the guest");
            }
            ended(status, signal)
        }
    }
}

/// A program that did not end well is an error; its status is in the message.
fn ended(status: Option<i32>, signal: Option<i32>) -> anyhow::Result<()> {
    match (status, signal) {
        (Some(0), _) => Ok(()),
        (Some(status), _) => {
            let message = format!("the program in the guest ended with status {status}");
            Err(Ended::new(Exit::Failed, message).into())
        }
        (None, signal) => {
            let signal = signal.map_or_else(|| "a signal".to_owned(), |it| format!("signal {it}"));
            anyhow::bail!("the program in the guest was ended by {signal}")
        }
    }
}
