//! Waiting for the task that a command begins, and dry runs.

use std::time::Duration;

use clap::Args;
use jiff::{SignedDuration, Timestamp};

/// Whether to wait for the task's end.
#[derive(Args, Default)]
pub struct Wait {
    /// Wait for the end of the task (default)
    #[arg(long, overrides_with = "no_wait")]
    wait: bool,
    /// Print the task and return at once
    #[arg(long, overrides_with = "wait")]
    pub no_wait: bool,
    /// Stop waiting after this time (30s, 5m, 1h): the task goes on, the exit code is 9
    #[arg(long, value_name = "DURATION", value_parser = duration, conflicts_with = "no_wait")]
    pub timeout: Option<Duration>,
}

/// Whether the command only checks.
#[derive(Args)]
pub struct DryRun {
    /// Check everything and print what would be done, but do nothing
    #[arg(long)]
    pub dry_run: bool,
}

/// A duration: `90` seconds, `30s`, `5m`, `1h30m`.
pub fn duration(text: &str) -> Result<Duration, String> {
    let parsed = if text.bytes().all(|byte| byte.is_ascii_digit()) {
        text.parse().ok().map(Duration::from_secs)
    } else {
        text.parse::<SignedDuration>().ok().and_then(|span| Duration::try_from(span).ok())
    };
    parsed.filter(|_| !text.is_empty()).ok_or_else(|| "give it as 30s, 5m or 1h".to_owned())
}

/// A point in time: RFC 3339, or how long ago.
pub fn since(text: &str) -> Result<Timestamp, String> {
    if let Ok(at) = text.parse() {
        return Ok(at);
    }
    let ago = duration(text).ok().and_then(|ago| SignedDuration::try_from(ago).ok());
    ago.and_then(|ago| Timestamp::now().checked_sub(ago).ok())
        .ok_or_else(|| "give it as 2026-01-31T08:00:00Z, or as how long ago: 30m, 2h".to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn durations_and_times_are_parsed() {
        assert_eq!(duration("90"), Ok(Duration::from_secs(90)));
        assert_eq!(duration("1h30m"), Ok(Duration::from_secs(5400)));
        assert_eq!(duration("0.5s"), Ok(Duration::from_millis(500)));
        for bad in ["", "-5s", "soon", "5 parsecs", "99999999999999999999"] {
            assert!(duration(bad).is_err(), "{bad}");
        }
        assert_eq!(since("2026-01-31T08:00:00Z").unwrap().to_string(), "2026-01-31T08:00:00Z");
        let then = since("1h").unwrap();
        let ago = Timestamp::now().duration_since(then);
        assert!((3600..3700).contains(&ago.as_secs()), "{ago:?}");
        assert!(since("yesterday").is_err() && since("").is_err());
    }
}
