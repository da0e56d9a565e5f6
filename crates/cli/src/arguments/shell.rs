//! `vmseal completion` and `vmseal man`.

use std::path::PathBuf;

use clap::{Args, ValueEnum};

#[derive(Args)]
pub struct Completion {
    /// The shell
    #[arg(value_enum)]
    pub shell: Shell,
}

/// The shells that have completion.
#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Shell {
    Bash,
    Zsh,
    Fish,
}

#[derive(Args)]
pub struct Man {
    /// The directory; it is created if it does not exist
    #[arg(long, value_name = "DIR")]
    pub dir: PathBuf,
}
