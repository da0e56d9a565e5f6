//! `vmseal events`.

use clap::Args;
use jiff::Timestamp;
use vmseal_api::model::Event;

use super::List;
use super::wait::since;

#[derive(Args)]
pub struct Events {
    /// Stay and print what happens from now on, too
    #[arg(long, short)]
    pub follow: bool,
    /// Only those of this kind (vm.started), or of all kinds that begin so (vm)
    #[arg(long)]
    pub kind: Option<String>,
    /// Only those about the resource of this name
    #[arg(long, value_name = "NAME")]
    pub target: Option<String>,
    /// Only those since then: a time (2026-01-31T08:00:00Z), or how long ago (30m, 2h)
    #[arg(long, value_name = "TIME", value_parser = since)]
    pub since: Option<Timestamp>,
    #[command(flatten)]
    pub list: List<Event>,
}
