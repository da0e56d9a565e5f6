//! How much is logged, as operators write it: `info`, or `info,vmseal_agent=debug`.

use std::fmt;
use std::str::FromStr;

use tracing::level_filters::LevelFilter;
use tracing_subscriber::filter::Targets;

/// The longest text of levels, in bytes: one for each crate of vmseal and some modules.
pub const LEN_MAX: usize = 256;

/// The default level.
const USUAL: LevelFilter = LevelFilter::INFO;

/// The levels by their names, quietest first.
const NAMES: [(&str, LevelFilter); 6] = [
    ("off", LevelFilter::OFF),
    ("error", LevelFilter::ERROR),
    ("warn", LevelFilter::WARN),
    ("info", LevelFilter::INFO),
    ("debug", LevelFilter::DEBUG),
    ("trace", LevelFilter::TRACE),
];

/// Log levels: one for everything, and others for crates or modules.
///
/// As text: directives separated by commas. `LEVEL` applies to everything without a directive of its own
/// (`info` by default), `TARGET=LEVEL` to the crates and modules whose names begin with the target (`vmseal`
/// for all of vmseal's, `vmseal_agent::vm`); the longest matching target decides. The syntax is that of
/// `RUST_LOG`, without filters by spans and fields.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Levels {
    usual: LevelFilter,
    of: Vec<(String, LevelFilter)>,
}

/// Why a text is not valid log levels.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum LevelsError {
    /// Longer than [`LEN_MAX`].
    #[error("has {0} bytes, and levels have at most {LEN_MAX}")]
    TooLong(usize),
    /// Not a directive.
    #[error(
        "{0:?} is no log level: give off, error, warn, info, debug or trace, or TARGET=LEVEL as in info,vmseal_agent=debug"
    )]
    NoLevel(String),
    /// Not a name of a crate or module.
    #[error(
        "{0:?} is no crate or module: they have letters, digits, '_' and '::', as vmseal_agent::vm"
    )]
    NoTarget(String),
    /// Given twice.
    #[error("the level of {0} is given twice")]
    Twice(String),
}

impl Levels {
    pub(crate) fn targets(&self) -> Targets {
        Targets::new().with_default(self.usual).with_targets(self.of.iter().cloned())
    }
}

impl Default for Levels {
    fn default() -> Self {
        Self { usual: USUAL, of: Vec::new() }
    }
}

fn level(text: &str) -> Option<LevelFilter> {
    NAMES.iter().find(|(name, _)| name.eq_ignore_ascii_case(text)).map(|(_, level)| *level)
}

fn is_target(text: &str) -> bool {
    let part = |part: &str| {
        !part.is_empty() && part.bytes().all(|byte| byte.is_ascii_alphanumeric() || byte == b'_')
    };
    text.split("::").all(part)
}

impl FromStr for Levels {
    type Err = LevelsError;
    fn from_str(text: &str) -> Result<Self, LevelsError> {
        if text.len() > LEN_MAX {
            return Err(LevelsError::TooLong(text.len()));
        }
        let (mut usual, mut of) = (None, Vec::<(String, LevelFilter)>::new());
        for directive in text.split(',').map(str::trim) {
            let no_level = || LevelsError::NoLevel(directive.to_owned());
            match directive.split_once('=') {
                None => {
                    let level = level(directive).ok_or_else(no_level)?;
                    if usual.replace(level).is_some() {
                        return Err(LevelsError::Twice("all".to_owned()));
                    }
                }
                Some((target, _)) if !is_target(target) => {
                    return Err(LevelsError::NoTarget(target.to_owned()));
                }
                Some((target, _)) if of.iter().any(|(known, _)| known == target) => {
                    return Err(LevelsError::Twice(target.to_owned()));
                }
                Some((target, name)) => {
                    of.push((target.to_owned(), level(name).ok_or_else(no_level)?));
                }
            }
        }
        Ok(Self { usual: usual.unwrap_or(USUAL), of })
    }
}

impl fmt::Display for Levels {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.usual)?;
        self.of.iter().try_for_each(|(target, level)| write!(f, ",{target}={level}"))
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn error(text: &str) -> LevelsError {
        text.parse::<Levels>().unwrap_err()
    }

    #[test]
    fn levels_are_parsed_and_errors_say_what_is_wrong() {
        for (text, canonical) in [
            ("info", "info"),
            ("TRACE", "trace"),
            ("warn, vmseal_agent=debug", "warn,vmseal_agent=debug"),
            ("vmseal_agent::vm=trace", "info,vmseal_agent::vm=trace"),
            ("off,hyper=warn,vmseal=error", "off,hyper=warn,vmseal=error"),
        ] {
            assert_eq!(text.parse::<Levels>().unwrap().to_string(), canonical);
        }
        for text in
            ["", "debg", "info,", ",", "5", "vmseal_agent", "vmseal_agent=", "a=b=c", "in\nfo"]
        {
            assert!(matches!(error(text), LevelsError::NoLevel(_)), "{text:?}");
        }
        for text in
            ["=info", "[span]=debug", "a[{x=.*}]=info", "a:=info", "a::=info", "é=info", "a b=info"]
        {
            assert!(matches!(error(text), LevelsError::NoTarget(_)), "{text:?}");
        }
        assert_eq!(error("info,debug"), LevelsError::Twice("all".into()));
        assert_eq!(error("a=info,a=warn"), LevelsError::Twice("a".into()));
        let longest = format!("{}=info", "a".repeat(LEN_MAX - 5));
        assert!(longest.parse::<Levels>().is_ok());
        assert_eq!(error(&format!("a{longest}")), LevelsError::TooLong(LEN_MAX + 1));
        // Quoted input cannot forge a log line.
        assert!(!error("in\nfo").to_string().contains('\n'));
    }

    proptest! {
        #[test]
        fn printed_levels_parse_to_the_same(text in "[a-z_:=,]{0,40}|(off|info|trace)(,[a-z_]{1,6}(::[a-z]{1,4})?=(error|debug)){0,4}") {
            if let Ok(levels) = text.parse::<Levels>() {
                prop_assert_eq!(levels.to_string().parse::<Levels>().unwrap(), levels);
            }
        }
    }
}
