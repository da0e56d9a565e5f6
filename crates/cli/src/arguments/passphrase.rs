//! `--passphrase-file`.

use std::path::PathBuf;

use clap::Args;

/// A passphrase: from a file, or asked for at the terminal.
#[derive(Args)]
#[group(skip)]
pub struct Passphrase {
    /// The file with the passphrase, without its final newline [default: ask]
    #[arg(long, value_name = "FILE")]
    pub passphrase_file: Option<PathBuf>,
}
