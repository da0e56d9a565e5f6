//! Commands for QEMU's guest agent, a program that runs in the guest, and its answers.

use serde::{Deserialize, Serialize};

/// The longest that a program in a guest is waited for, in seconds: below what a request may take in all.
pub const EXEC_SECONDS_MAX: u32 = 45;

/// How long it is waited for where nothing is said, in seconds.
pub const EXEC_SECONDS: u32 = 30;

/// The most arguments of a program in a guest.
pub const ARGUMENTS_MAX: usize = 256;

/// The longest that its path and arguments may be together, in bytes.
pub const COMMAND_MAX: usize = 64 * 1024;

/// The most that is kept of each output of a program, in bytes.
pub const OUTPUT_MAX: usize = 256 * 1024;

/// A command for the guest agent.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(tag = "ask", rename_all = "snake_case", deny_unknown_fields)]
pub enum GuestCommand {
    /// Whether its agent answers.
    Ping,
    /// To run a program, and wait until it ends.
    Exec {
        /// The program's path in the guest.
        path: String,
        /// Its arguments: at most 256, which have at most 64 KiB together with the path.
        #[serde(default)]
        arguments: Vec<String>,
        /// How long to wait for it, in seconds, at most 45; after that it goes on in the guest.
        #[serde(default = "usual")]
        seconds: u32,
    },
    /// To flush its file systems and write to none of them until they are thawed.
    Freeze,
    /// To go on writing.
    Thaw,
}

fn usual() -> u32 {
    EXEC_SECONDS
}

impl GuestCommand {
    /// Checks it.
    ///
    /// # Errors
    /// The field, and what is wrong with it.
    pub fn check(&self) -> Result<(), (&'static str, String)> {
        let Self::Exec { path, arguments, seconds } = self else { return Ok(()) };
        if path.is_empty() {
            return Err(("path", "is empty".to_owned()));
        }
        if !(1..=EXEC_SECONDS_MAX).contains(seconds) {
            return Err(("seconds", format!("must be 1 to {EXEC_SECONDS_MAX}")));
        }
        let length = path.len() + arguments.iter().map(String::len).sum::<usize>();
        if arguments.len() > ARGUMENTS_MAX || length > COMMAND_MAX {
            let what = format!(
                "are more than {ARGUMENTS_MAX}, or longer than {COMMAND_MAX} bytes together"
            );
            return Err(("arguments", what));
        }
        Ok(())
    }
}

/// What a guest answers.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(tag = "answer", rename_all = "snake_case")]
pub enum GuestAnswer {
    /// Its agent answers.
    Pong,
    /// The program has ended.
    Ended {
        /// Its exit status; none where a signal ended it.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        status: Option<i32>,
        /// The signal that ended it.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        signal: Option<i32>,
        /// Its standard output, in base64.
        stdout: String,
        /// Its standard error, in base64.
        stderr: String,
        /// Whether it wrote more than is kept.
        truncated: bool,
    },
    /// So many file systems are frozen now.
    Frozen {
        /// How many.
        file_systems: u64,
    },
    /// So many were thawed.
    Thawed {
        /// How many.
        file_systems: u64,
    },
}
