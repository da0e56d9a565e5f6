//! The output of a log at different levels.

use std::io;
use std::sync::{Arc, Once};

use tracing::subscriber::with_default;

use super::*;

/// The captured output.
#[derive(Clone, Default)]
struct Paper(Arc<Mutex<Vec<u8>>>);

impl Paper {
    fn take(&self) -> String {
        String::from_utf8(std::mem::take(&mut *self.0.lock().unwrap())).unwrap()
    }
}

impl io::Write for Paper {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.lock().unwrap().extend_from_slice(bytes);
        Ok(bytes.len())
    }
    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl MakeWriter<'_> for Paper {
    type Writer = Self;
    fn make_writer(&self) -> Self {
        self.clone()
    }
}

/// Without the second guard, messages of libraries that use `log` get only this far.
fn hear_log() {
    static HEARD: Once = Once::new();
    HEARD.call_once(|| LogTracer::init_with_filter(log::LevelFilter::Trace).unwrap());
}

/// Logs what libraries log.
fn libraries_speak() {
    tracing::trace!(target: "sqlx::query", "a secret");
    tracing::debug!(target: "hyper_util::client", "a secret");
    tracing::debug!(target: "vmsealed", "a secret");
    tracing::trace_span!(target: "h2::codec", "frame", bytes = "a secret").in_scope(|| {
        tracing::info!(target: "sqlx::pool", "harmless");
    });
    log::trace!(target: "tungstenite::protocol", "a secret");
    log::debug!(target: "rustls::client", "a secret");
    log::warn!(target: "rustls::check", "harmless");
}

fn we_speak() {
    tracing::error!(target: "vmseal_agent", "ours 1");
    tracing::info!(target: "vmseal_agent::vm", "ours 3");
    tracing::debug!(target: "vmseal", "ours 4");
    tracing::trace!(target: "vmseal_control::http", "ours 5");
}

#[test]
fn libraries_are_not_logged_below_info_at_any_level() {
    hear_log();
    let paper = Paper::default();
    let (subscriber, change) = subscriber(&Levels::default(), paper.clone(), false);
    with_default(subscriber, || {
        for text in [
            "trace",
            "info,hyper_util=trace,sqlx=trace,h2=trace,tungstenite=trace,rustls=trace,vmsealed=trace",
            "off,tungstenite::protocol=trace,rustls::client=debug,rustls=info,sqlx=debug",
        ] {
            change.reload(text.parse::<Levels>().unwrap().targets()).unwrap();
            libraries_speak();
            let heard = paper.take();
            assert!(!heard.contains("a secret"), "at {text}: {heard}");
            assert_eq!(heard.matches("harmless").count(), 2, "at {text}: {heard}");
        }
    });
}

#[test]
fn levels_hold_from_the_moment_they_are_changed() {
    hear_log();
    let paper = Paper::default();
    let (subscriber, change) = subscriber(&Levels::default(), paper.clone(), false);
    with_default(subscriber, || {
        for (text, count) in [
            ("info", 2),
            ("trace", 4),
            ("off", 0),
            ("warn,vmseal_agent::vm=trace", 2),
            ("error,vmseal=debug", 3),
            ("error,vmseal=debug,vmseal_agent::vm=warn", 2),
            ("vmseal_control=trace", 3),
        ] {
            change.reload(text.parse::<Levels>().unwrap().targets()).unwrap();
            we_speak();
            let heard = paper.take();
            assert_eq!(heard.matches("ours").count(), count, "at {text}: {heard}");
        }
    });
}

#[test]
fn a_process_remembers_its_levels() {
    assert_eq!(levels(), Levels::default());
    set_levels("warn,vmseal_agent=trace".parse().unwrap());
    assert_eq!(levels().to_string(), "warn,vmseal_agent=trace");
}
