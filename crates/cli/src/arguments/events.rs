//! `vmseal events`.

use clap::Args;

#[derive(Args)]
pub struct Events {
    /// Stay and print what happens from now on, too
    #[arg(long, short)]
    pub follow: bool,
}
