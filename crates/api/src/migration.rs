//! Moving a running VM to another host: whether what is sent is encrypted, how far it is, and how it went.

use std::fmt;

use jiff::SignedDuration;
use serde::{Deserialize, Serialize};

use crate::host::{DisksSent, MigrationProgress};
pub use crate::migration_encryption::MigrationEncryption;
use crate::size::Measured;

/// A minute, in milliseconds.
const MINUTE: u64 = 60_000;

/// The longest that a guest is to stand still while the rest of its memory is sent, in milliseconds, where nothing else is
/// said: QEMU's usual limit.
pub const DOWNTIME_DEFAULT: u32 = 300;

/// The shortest that can be asked for, in milliseconds: in less not even an idle guest's rest is sent.
pub const DOWNTIME_MIN: u32 = 10;

/// The longest that can be asked for, in milliseconds: clients of the guest give up after more.
pub const DOWNTIME_MAX: u32 = 60_000;

/// Checks how long a guest is to stand still.
///
/// # Errors
/// What is wrong with it.
pub fn check_downtime(milliseconds: u32) -> Result<(), String> {
    match milliseconds {
        DOWNTIME_MIN..=DOWNTIME_MAX => Ok(()),
        _ => Err(format!("{milliseconds} ms: give {DOWNTIME_MIN} ms to {} s", DOWNTIME_MAX / 1000)),
    }
}

/// Which part of a migration is under way.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(rename_all = "snake_case")]
pub enum MigrationPhase {
    /// The hosts connect, and the destination starts QEMU.
    Connecting,
    /// Disks on datastores that the destination does not have are copied while the guest runs.
    Disks,
    /// The memory is sent while the guest runs.
    Memory,
    /// The guest stands still: the rest is sent, and the destination takes its disks.
    SwitchOver,
    /// The guest runs at the destination; what is left at the source is removed.
    Finishing,
    /// A phase of a newer server that this side does not know.
    #[serde(other)]
    Unknown,
}

impl MigrationPhase {
    /// Its name, for people.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Connecting => "connecting",
            Self::Disks => "disks",
            Self::Memory => "memory",
            Self::SwitchOver => "switch-over",
            Self::Finishing => "finishing",
            Self::Unknown => "unknown",
        }
    }
}

/// How far a VM is that is moved to another host.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct Migration {
    /// What is under way.
    pub phase: MigrationPhase,
    /// What its source has measured last; none before it sends.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub progress: Option<MigrationProgress>,
    /// Whether what is sent is encrypted; none from a server that does not tell it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub encrypted: Option<bool>,
}

/// How a migration went.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct Migrated {
    /// How long it took until the guest ran at the other host, in milliseconds.
    pub milliseconds: u64,
    /// What was sent of the memory, in bytes.
    pub sent: u64,
    /// How long the memory was sent, in milliseconds, as QEMU measured it; none where the source did not say so.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub memory_milliseconds: Option<u64>,
    /// What was sent of the disks that the other host got copies of; none if there were none, or the source did not say so.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub disks: Option<DisksSent>,
    /// How often the memory was gone through.
    pub passes: u64,
    /// How long the guest stood still while the rest of its memory was sent, in milliseconds, as QEMU measured it.
    pub downtime_milliseconds: u64,
    /// How long it stood still after that, in milliseconds, until it went on at the other host, as the hosts say. Where the source does not
    /// say it: from when the server had heard that all is sent until it had heard that the guest goes on. None where the server was
    /// restarted then.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub switch_milliseconds: Option<u64>,
    /// CPU time that the source's threads needed to read, seal and send it, in milliseconds; none where it did not say so.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub sealing_milliseconds: Option<u64>,
    /// What the destination's agent wrote into the guest's memory itself, in bytes, with what came again; none where its QEMU loaded
    /// all of it, or that is not known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub placed: Option<u64>,
    /// Whether what was sent was encrypted; none from a server that does not tell it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub encrypted: Option<bool>,
}

impl Migrated {
    /// How fast the memory was sent on average, in bytes a second; none where it took no time. Where it is not known how long the memory
    /// was sent, that is of the whole time.
    #[must_use]
    pub fn bytes_per_second(&self) -> Option<u64> {
        average(self.sent, self.memory_milliseconds.unwrap_or(self.milliseconds))
    }

    /// How long the guest stood still in all, in milliseconds, as far as that is known.
    #[must_use]
    pub fn standstill_milliseconds(&self) -> u64 {
        self.downtime_milliseconds.saturating_add(self.switch_milliseconds.unwrap_or(0))
    }
}

/// So many bytes in so many milliseconds, in bytes a second; none where it took no time.
fn average(bytes: u64, milliseconds: u64) -> Option<u64> {
    let rate = (u128::from(bytes) * 1000).checked_div(u128::from(milliseconds))?;
    u64::try_from(rate).ok()
}

impl DisksSent {
    /// How fast they were sent on average until the memory followed, in bytes a second; none where that took no time.
    #[must_use]
    pub fn bytes_per_second(&self) -> Option<u64> {
        average(self.bytes, self.milliseconds)
    }
}

/// `2.0 GiB in 14.2 s (144.2 MiB/s), and 12.0 MiB after that`.
impl fmt::Display for DisksSent {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} in {}", Measured(self.bytes), Milliseconds(self.milliseconds))?;
        if let Some(rate) = self.bytes_per_second() {
            write!(f, " ({}/s)", Measured(rate))?;
        }
        match self.later_bytes {
            0 => Ok(()),
            later => write!(f, ", and {} after that", Measured(later)),
        }
    }
}

/// Milliseconds, for people: `312 ms`, `14.2 s`, `3m 5s`.
struct Milliseconds(u64);

impl fmt::Display for Milliseconds {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            short if short < 1000 => write!(f, "{short} ms"),
            some if some < MINUTE => write!(f, "{}.{} s", some / 1000, some % 1000 / 100),
            long => {
                let seconds = i64::try_from(long / 1000).unwrap_or(i64::MAX);
                write!(f, "{:#}", SignedDuration::from_secs(seconds))
            }
        }
    }
}

/// `memory 1.2 GiB in 14.2 s (86.5 MiB/s), 3 passes; disks 2.0 GiB in 8.1 s (252.8 MiB/s); 23.4 s in all; the guest stood still for 312 ms,
/// 20 ms of that for the rest of its memory`. Of a guest without copies of disks the first word and the second part are missing.
impl fmt::Display for Migrated {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.disks.is_some() {
            f.write_str("memory ")?;
        }
        let of_memory = self.memory_milliseconds.unwrap_or(self.milliseconds);
        write!(f, "{} in {}", Measured(self.sent), Milliseconds(of_memory))?;
        if let Some(rate) = self.bytes_per_second() {
            write!(f, " ({}/s)", Measured(rate))?;
        }
        let passes = if self.passes == 1 { "pass" } else { "passes" };
        let downtime = Milliseconds(self.downtime_milliseconds);
        write!(f, ", {} {passes}", self.passes)?;
        if let Some(disks) = &self.disks {
            write!(f, "; disks {disks}")?;
        }
        if self.memory_milliseconds.is_some() {
            write!(f, "; {} in all", Milliseconds(self.milliseconds))?;
        }
        f.write_str("; the guest stood still for ")?;
        match self.switch_milliseconds {
            Some(_) => {
                let all = Milliseconds(self.standstill_milliseconds());
                write!(f, "{all}, {downtime} of that for the rest of its memory")?;
            }
            None => write!(f, "{downtime} for the rest of its memory, and for the switch")?,
        }
        match self.encrypted {
            Some(false) => f.write_str("; it was sent in the clear"),
            Some(true) | None => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_average_rate_is_of_the_time_of_the_memory_or_if_that_is_not_known_of_all() {
        let migrated = |sent, milliseconds| Migrated {
            milliseconds,
            sent,
            memory_milliseconds: None,
            disks: None,
            passes: 2,
            downtime_milliseconds: 20,
            switch_milliseconds: Some(30),
            sealing_milliseconds: None,
            placed: None,
            encrypted: Some(true),
        };
        assert_eq!(migrated(3000, 1500).bytes_per_second(), Some(2000));
        assert_eq!(migrated(3000, 0).bytes_per_second(), None);
        assert_eq!(migrated(u64::MAX, 1).bytes_per_second(), None);
        assert_eq!(migrated(1, 1).standstill_milliseconds(), 50);
        let of_memory = Migrated { memory_milliseconds: Some(500), ..migrated(3000, 1500) };
        assert_eq!(of_memory.bytes_per_second(), Some(6000));
    }

    #[test]
    fn how_it_went_is_told() {
        let migrated = Migrated {
            milliseconds: 14_250,
            sent: 5 << 28,
            memory_milliseconds: None,
            disks: None,
            passes: 3,
            downtime_milliseconds: 20,
            switch_milliseconds: Some(292),
            sealing_milliseconds: None,
            placed: None,
            encrypted: Some(true),
        };
        let told = "1.2 GiB in 14.2 s (89.8 MiB/s), 3 passes; the guest stood still for 312 ms, 20 ms of that for the rest of its memory";
        assert_eq!(migrated.to_string(), told);
        let other =
            Migrated { milliseconds: 185_000, passes: 1, switch_milliseconds: None, ..migrated };
        let told = "1.2 GiB in 3m 5s (6.9 MiB/s), 1 pass; the guest stood still for 20 ms for the rest of its memory, and for the switch";
        assert_eq!(other.to_string(), told);
        let in_the_clear = Migrated { encrypted: Some(false), ..other };
        assert_eq!(in_the_clear.to_string(), format!("{told}; it was sent in the clear"));
    }

    #[test]
    fn what_was_sent_of_disks_is_told_apart_from_the_memory() {
        let migrated = Migrated {
            milliseconds: 23_400,
            sent: 512 << 20,
            memory_milliseconds: Some(5_120),
            disks: None,
            passes: 2,
            downtime_milliseconds: 20,
            switch_milliseconds: Some(80),
            sealing_milliseconds: None,
            placed: None,
            encrypted: Some(true),
        };
        let still = "23.4 s in all; the guest stood still for 100 ms, 20 ms of that for the rest of its memory";
        let memory = "512.0 MiB in 5.1 s (100.0 MiB/s), 2 passes";
        assert_eq!(migrated.to_string(), format!("{memory}; {still}"));
        let disks = DisksSent { bytes: 2 << 30, milliseconds: 16_000, later_bytes: 0 };
        let with = |disks| Migrated { disks: Some(disks), ..migrated }.to_string();
        let told = "disks 2.0 GiB in 16.0 s (128.0 MiB/s)";
        assert_eq!(with(disks), format!("memory {memory}; {told}; {still}"));
        let written = DisksSent { later_bytes: 12 << 20, ..disks };
        assert_eq!(
            with(written),
            format!("memory {memory}; {told}, and 12.0 MiB after that; {still}")
        );
    }

    #[test]
    fn how_a_migration_went_is_read_that_an_earlier_server_has_recorded() {
        let earlier = r#"{"milliseconds":1,"sent":2,"passes":3,"downtime_milliseconds":4}"#;
        let read: Migrated = serde_json::from_str(earlier).unwrap();
        assert_eq!((read.sent, read.memory_milliseconds, read.disks), (2, None, None));
        assert_eq!(serde_json::to_string(&read).unwrap(), earlier);
    }

    #[test]
    fn a_phase_of_a_newer_server_is_read() {
        let read: Migration = serde_json::from_str(r#"{"phase": "resting"}"#).unwrap();
        assert_eq!(
            read,
            Migration { phase: MigrationPhase::Unknown, progress: None, encrypted: None }
        );
    }
}
