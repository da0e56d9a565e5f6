//! `vmseal events`.

use clap::Args;
use vmseal_api::model::Event;

use super::List;

#[derive(Args)]
pub struct Events {
    /// Stay and print what happens from now on, too
    #[arg(long, short)]
    pub follow: bool,
    #[command(flatten)]
    pub list: List<Event>,
}
