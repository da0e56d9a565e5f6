//! The log of a process on standard error. Its [`Levels`] can be changed while it runs.
//!
//! ```text
//! event ─► levels (reload) ─► cap: messages of libraries below info are dropped ─► standard error
//! ```
//! The cap does not depend on the levels. Libraries write the data that they carry into their debug and trace
//! messages: tungstenite every frame of a console and requests with their `Authorization`, rustls handshakes,
//! hyper buffers. Which of it is secret changes from version to version, so none of it is logged at any
//! level, and a new library is capped like the others. vmseal's own messages contain no secret at any level;
//! a whole-system test searches them for keys.

mod levels;
mod seldom;

use std::io::IsTerminal;
use std::sync::{Mutex, MutexGuard, PoisonError};

use tracing::{Level, Metadata, Subscriber};
use tracing_log::{LogTracer, log};
use tracing_subscriber::filter::{Targets, filter_fn};
use tracing_subscriber::fmt::MakeWriter;
use tracing_subscriber::layer::SubscriberExt;
use tracing_subscriber::{Registry, reload};

pub use levels::{LEN_MAX, Levels, LevelsError};
pub use seldom::Seldom;

/// The environment variable with the initial levels.
const VARIABLE: &str = "RUST_LOG";

/// Messages of libraries are logged up to this level; [`LIBRARIES_LOG_MAX`] is the same for libraries that
/// log through the crate `log`.
const LIBRARIES_MAX: Level = Level::INFO;

/// See [`LIBRARIES_MAX`].
const LIBRARIES_LOG_MAX: log::LevelFilter = log::LevelFilter::Info;

type Change = reload::Handle<Targets, Registry>;

/// The current levels.
struct Current {
    levels: Option<Levels>,
    /// None before [`start`], and where another subscriber was installed first.
    change: Option<Change>,
}

static CURRENT: Mutex<Current> = Mutex::new(Current { levels: None, change: None });

fn current() -> MutexGuard<'static, Current> {
    CURRENT.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Starts the log of this process with the levels of `RUST_LOG`. Colours are used on a terminal only.
pub fn start() {
    let colours = std::io::stderr().is_terminal() && std::env::var_os("NO_COLOR").is_none();
    let text = std::env::var(VARIABLE).unwrap_or_default();
    let parsed = text.parse::<Levels>();
    let levels = parsed.clone().unwrap_or_default();
    let (subscriber, change) = subscriber(&levels, std::io::stderr, colours);
    // A test may have installed its own subscriber, which then decides.
    let change = tracing::subscriber::set_global_default(subscriber).is_ok().then_some(change);
    *current() = Current { levels: Some(levels), change };
    // Another logger may be installed, which then handles its own messages.
    let _ = LogTracer::init_with_filter(LIBRARIES_LOG_MAX);
    if let Err(error) = parsed
        && !text.is_empty()
    {
        tracing::warn!(%error, "{VARIABLE} cannot be parsed: using the default log levels");
    }
}

/// The current levels of this process.
#[must_use]
pub fn levels() -> Levels {
    current().levels.clone().unwrap_or_default()
}

/// Changes the levels of this process, until they are changed again or the process ends.
pub fn set_levels(levels: Levels) {
    let mut current = current();
    if let Some(change) = &current.change {
        // It fails only when the subscriber is gone, which is global.
        let _ = change.reload(levels.targets());
    }
    current.levels = Some(levels);
}

/// Whether a message may be logged at all: one of vmseal's, or a library's that is not above the cap.
fn may_be_logged(message: &Metadata<'_>) -> bool {
    *message.level() <= LIBRARIES_MAX || is_ours(message.target())
}

/// vmseal's crates are `vmseal` and those that begin with `vmseal_`.
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
