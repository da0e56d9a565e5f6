//! `vmseal vm prove`.

use super::{DryRun, Wait};

#[derive(clap::Args)]
pub struct Prove {
    /// The VM's name or id
    pub vm: String,
    /// Read every byte; else a sample of 64 MiB of each file, spread evenly
    #[arg(long, conflicts_with_all = ["last", "report"])]
    pub all: bool,
    /// Read the same sample as a proof that printed this number
    #[arg(long, value_name = "NUMBER", conflicts_with_all = ["all", "last", "report"])]
    pub seed: Option<u32>,
    /// Show the last proof, and make no new one
    #[arg(long, conflicts_with_all = ["dry_run", "no_wait"])]
    pub last: bool,
    /// Show this proof, and make no new one: the digest that it printed, as its event has it, or the id of its task
    #[arg(long, value_name = "DIGEST", value_parser = digest_or_task, conflicts_with_all = ["last", "dry_run", "no_wait"])]
    pub report: Option<String>,
    #[command(flatten)]
    pub dry_run: DryRun,
    #[command(flatten)]
    pub wait: Wait,
}

/// The digest of a report, or the id of a task: what may stand in a URL as it is.
fn digest_or_task(text: &str) -> Result<String, String> {
    let known = |byte: u8| byte.is_ascii_hexdigit() || byte == b'-';
    if text.is_empty() || !text.bytes().all(known) {
        return Err("must be a digest in hexadecimal, or the id of a task".to_owned());
    }
    Ok(text.to_ascii_lowercase())
}
