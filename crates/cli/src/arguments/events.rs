//! `vmseal events`.

use clap::Args;
use jiff::Timestamp;
use vmseal_api::model::Event;

use super::List;
use super::wait::since;

#[derive(Args)]
pub struct Events {
    /// Print the last 10 events (or as --last and --since say), then new ones until Ctrl-C
    #[arg(long, short)]
    pub follow: bool,
    /// Only events of this kind (`vm.started`), or of all kinds of a noun (`vm`)
    #[arg(long)]
    pub kind: Option<String>,
    /// Only events about the resource with this name
    #[arg(long, value_name = "NAME")]
    pub target: Option<String>,
    /// Only events since a time (2026-01-31T08:00:00Z), or within a duration (30m, 2h)
    #[arg(long, value_name = "TIME", value_parser = since)]
    pub since: Option<Timestamp>,
    /// Only the last N events, at most 1000
    #[arg(long, short = 'n', value_name = "N", value_parser = clap::value_parser!(u32).range(1..=1000))]
    pub last: Option<u32>,
    /// Only events of the request with this id, and of its task
    #[arg(id = "request", long = "request", value_name = "ID")]
    pub request: Option<String>,
    #[command(flatten)]
    pub list: List<Event>,
}
