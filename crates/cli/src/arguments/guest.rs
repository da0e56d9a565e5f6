//! `vmseal vm vnc` and `vmseal vm guest`.

use clap::{Args, Subcommand};
use vmseal_api::guest::EXEC_SECONDS;

#[derive(Args)]
pub struct Vnc {
    /// Name or id
    pub name: String,
    /// The port of 127.0.0.1 to listen on [default: any that is free]
    #[arg(long, value_name = "PORT", default_value_t = 0, hide_default_value = true)]
    pub port: u16,
}

#[derive(Subcommand)]
pub enum Guest {
    /// Ask whether the agent in a guest answers
    Ping {
        /// Name or id
        name: String,
    },
    /// Run a program in a guest, and show its output; the exit code is 1 if it does not end with status 0
    Exec {
        /// Name or id
        name: String,
        /// How long to wait for it, in seconds, 45 at most; after that it goes on in the guest
        #[arg(long, value_name = "SECONDS", default_value_t = EXEC_SECONDS)]
        seconds: u32,
        /// The program's path in the guest, and its arguments. No shell reads them
        #[arg(last = true, required = true, value_name = "COMMAND")]
        command: Vec<String>,
    },
    /// Flush a guest's file systems, and have it write to none of them until `fsthaw`
    Fsfreeze {
        /// Name or id
        name: String,
    },
    /// Have a guest write to its file systems again
    Fsthaw {
        /// Name or id
        name: String,
    },
}
