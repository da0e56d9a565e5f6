//! The log of a process: on standard error, as much of it as its [`Levels`] say, which can be changed while
//! it runs.
//!
//! ```text
//! event ─► levels (reload) ─► cap: what libraries say below info is dropped ─► standard error
//! ```
//! The cap is no matter of levels. Libraries write what they carry into their debug and trace messages:
//! tungstenite every frame of a console, requests with their `Authorization`; rustls handshakes; hyper
//! buffers. What of it is secret changes with each of their versions; so none of it is logged, whatever
//! anybody asks for, and a library that is new is capped as the others are. Our own messages hold no secret
//! at any level, which a whole-system test searches for keys.

mod levels;

use std::io::IsTerminal;
use std::sync::{Mutex, MutexGuard, PoisonError};

use tracing::{Level, Metadata, Subscriber};
use tracing_log::{LogTracer, log};
use tracing_subscriber::filter::{Targets, filter_fn};
use tracing_subscriber::fmt::MakeWriter;
use tracing_subscriber::layer::SubscriberExt;
use tracing_subscriber::{Registry, reload};

pub use levels::{LEN_MAX, Levels, LevelsError};

/// The environment variable with the levels at the start.
const VARIABLE: &str = "RUST_LOG";

/// What libraries say is logged up to this level; [`LIBRARIES_LOG_MAX`] is the same for those that speak
/// through the crate `log`.
const LIBRARIES_MAX: Level = Level::INFO;

/// See [`LIBRARIES_MAX`].
const LIBRARIES_LOG_MAX: log::LevelFilter = log::LevelFilter::Info;

type Change = reload::Handle<Targets, Registry>;

/// What this process logs now.
struct Current {
    levels: Option<Levels>,
    /// None before [`start`], and where somebody else's subscriber was there first.
    change: Option<Change>,
}

static CURRENT: Mutex<Current> = Mutex::new(Current { levels: None, change: None });

fn current() -> MutexGuard<'static, Current> {
    CURRENT.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Starts the log of this process with the levels of `RUST_LOG`. Colours only for a person who wants them.
pub fn start() {
    let colours = std::io::stderr().is_terminal() && std::env::var_os("NO_COLOR").is_none();
    let text = std::env::var(VARIABLE).unwrap_or_default();
    let parsed = text.parse::<Levels>();
    let levels = parsed.clone().unwrap_or_default();
    let (subscriber, change) = subscriber(&levels, std::io::stderr, colours);
    // A test's own may be there; then that one decides.
    let change = tracing::subscriber::set_global_default(subscriber).is_ok().then_some(change);
    *current() = Current { levels: Some(levels), change };
    // Another one may be installed; then its messages are its own business.
    let _ = LogTracer::init_with_filter(LIBRARIES_LOG_MAX);
    if let Err(error) = parsed
        && !text.is_empty()
    {
        tracing::warn!(%error, "{VARIABLE} is not understood: logging at the usual levels");
    }
}

/// What this process logs now.
#[must_use]
pub fn levels() -> Levels {
    current().levels.clone().unwrap_or_default()
}

/// Changes what this process logs, until it is changed again or the process ends.
pub fn set_levels(levels: Levels) {
    let mut current = current();
    if let Some(change) = &current.change {
        // It fails only when the subscriber is gone, which is global.
        let _ = change.reload(levels.targets());
    }
    current.levels = Some(levels);
}

/// Whether a message may be logged at all: ours, or a library's that says no more than it may.
fn may_be_logged(message: &Metadata<'_>) -> bool {
    *message.level() <= LIBRARIES_MAX || is_ours(message.target())
}

/// Our crates are `vmseal` and those that begin with `vmseal_`.
fn is_ours(target: &str) -> bool {
    let name = target.split("::").next().unwrap_or_default();
    name == "vmseal" || name.starts_with("vmseal_")
}

fn subscriber<W>(
    levels: &Levels,
    writer: W,
    colours: bool,
) -> (impl Subscriber + Send + Sync, Change)
where
    W: for<'a> MakeWriter<'a> + Send + Sync + 'static,
{
    let (chosen, change) = reload::Layer::new(levels.targets());
    let lines = tracing_subscriber::fmt::layer().with_ansi(colours).with_writer(writer);
    (tracing_subscriber::registry().with(chosen).with(filter_fn(may_be_logged)).with(lines), change)
}

#[cfg(test)]
mod tests;
