//! Reading and checking what the process is told at its start.

use std::collections::HashSet;
use std::io::Read;

use vmseal_api::filter::{
    CRYPT_SECTOR, DISKS_MAX, DiskConfig, FilterConfig, FrontEndSpec, NBD_CONNECTIONS, QUEUES_MAX,
    SERIAL_MAX, VERSION,
};
use vmseal_api::id::DiskId;

/// The longest configuration, in bytes; [`DISKS_MAX`] disks fit well within.
pub const CONFIG_MAX: u64 = 1024 * 1024;

/// The most queues of all disks together: each has tables of about 300 KiB, and the process is to stay
/// under 32 MiB.
pub const ALL_QUEUES_MAX: usize = 64;

/// Why a configuration is refused.
#[derive(Debug, thiserror::Error)]
pub enum ConfigError {
    /// It cannot be read.
    #[error("the configuration cannot be read: {0}")]
    Read(#[from] std::io::Error),
    /// Longer than [`CONFIG_MAX`].
    #[error("the configuration is longer than {CONFIG_MAX} bytes")]
    TooLong,
    /// Not the JSON that it should be.
    #[error("the configuration is not understood: {0}")]
    Json(#[from] serde_json::Error),
    /// Of another version of the agent.
    #[error(
        "the configuration has version {0}, this program understands {VERSION}; install vmseal and vmseal-filter of one version"
    )]
    Version(u32),
    /// Something about the disks together.
    #[error("{0}")]
    Disks(String),
    /// Something about one disk.
    #[error("disk {disk}: {what}")]
    Disk {
        /// Which.
        disk: DiskId,
        /// What is wrong.
        what: String,
    },
}

/// Reads and checks a configuration.
///
/// # Errors
/// [`ConfigError`].
pub fn read(from: impl Read) -> Result<FilterConfig, ConfigError> {
    let mut text = Vec::new();
    from.take(CONFIG_MAX + 1).read_to_end(&mut text)?;
    if text.len() as u64 > CONFIG_MAX {
        return Err(ConfigError::TooLong);
    }
    let config: FilterConfig = serde_json::from_slice(&text)?;
    check(&config)?;
    Ok(config)
}

/// How many chains a disk needs: one a queue, and one for an import.
#[must_use]
pub fn queues(disk: &DiskConfig) -> usize {
    match &disk.front_end {
        Some(FrontEndSpec::VhostUserBlk { queues, .. }) => usize::from(*queues),
        Some(FrontEndSpec::Nbd { .. }) => usize::from(NBD_CONNECTIONS),
        None => 1,
    }
}

/// How many pools of buffers a disk needs: one a chain, and one for the data of each NBD connection,
/// which lies in no guest's memory.
#[must_use]
pub fn pools(disk: &DiskConfig) -> usize {
    match &disk.front_end {
        Some(FrontEndSpec::Nbd { .. }) => 2 * queues(disk),
        Some(FrontEndSpec::VhostUserBlk { .. }) | None => queues(disk),
    }
}

fn check(config: &FilterConfig) -> Result<(), ConfigError> {
    if config.version != VERSION {
        return Err(ConfigError::Version(config.version));
    }
    if config.disks.is_empty() || config.disks.len() > DISKS_MAX {
        let count = config.disks.len();
        return Err(ConfigError::Disks(format!("{count} disks; 1 to {DISKS_MAX} are possible")));
    }
    let mut seen = HashSet::new();
    if !config.disks.iter().all(|disk| seen.insert(disk.disk)) {
        return Err(ConfigError::Disks("a disk is named twice".into()));
    }
    let all: usize = config.disks.iter().map(queues).sum();
    if all > ALL_QUEUES_MAX {
        let message = format!("{all} queues in all; at most {ALL_QUEUES_MAX} are possible");
        return Err(ConfigError::Disks(message));
    }
    config.disks.iter().try_for_each(check_disk)
}

fn check_disk(disk: &DiskConfig) -> Result<(), ConfigError> {
    let refuse = |what: String| Err(ConfigError::Disk { disk: disk.disk, what });
    if disk.size == 0 || !disk.size.is_multiple_of(u64::from(CRYPT_SECTOR)) {
        return refuse(format!("its size, {}, is not a multiple of {CRYPT_SECTOR}", disk.size));
    }
    if disk.size > i64::MAX as u64 / 2 {
        return refuse(format!("its size, {}, is beyond what a file can have", disk.size));
    }
    if disk.serial.len() > SERIAL_MAX || !disk.serial.is_ascii() {
        return refuse(format!("its serial is not {SERIAL_MAX} bytes of ASCII at most"));
    }
    if disk.chain.len() > 1 {
        return refuse("it is to be encrypted more than once".into());
    }
    if !(1..=usize::from(QUEUES_MAX)).contains(&queues(disk)) {
        return refuse(format!("{} queues; 1 to {QUEUES_MAX} are possible", queues(disk)));
    }
    let export_alone = disk.read_only && disk.import.is_none() && disk.front_end.is_none();
    if disk.export.is_some() && !export_alone {
        return refuse("what is exported must be read-only, and neither filled nor served".into());
    }
    if disk.read_only && disk.import.is_some() {
        return refuse("an image cannot be imported to a read-only disk".into());
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn good() -> Value {
        json!({
            "version": 1,
            "vm": "01890a5d-ac96-774b-bcce-b302099a8057",
            "control": { "path": "/run/x" },
            "disks": [{
                "disk": "01890a5d-ac96-774b-bcce-b302099a8058",
                "size": 8192,
                "serial": "vmseal-0",
                "chain": [{ "kind": "crypt", "key": { "fd": 5 }, "holes": "zero" }],
                "export": null,
                "backend": { "kind": "file", "file": { "fd": 6 }, "offset": 16777216 },
                "front_end": { "kind": "vhost_user_blk", "listen": { "fd": 7 }, "queues": 2 }
            }]
        })
    }

    fn read_value(value: &Value) -> Result<FilterConfig, ConfigError> {
        read(value.to_string().as_bytes())
    }

    #[test]
    fn a_good_configuration_is_read() {
        assert_eq!(read_value(&good()).unwrap().disks.len(), 1);
    }

    #[test]
    fn each_nonsense_is_refused_by_name() {
        let cases: [(&str, Value, &str); 11] = [
            ("/version", json!(2), "version 2"),
            ("/disks", json!([]), "0 disks"),
            ("/disks/0/size", json!(1000), "multiple of 4096"),
            ("/disks/0/size", json!(u64::MAX - 4095), "beyond what a file"),
            ("/disks/0/serial", json!("123456789012345678901"), "serial"),
            ("/disks/0/front_end/queues", json!(0), "0 queues"),
            ("/disks/0/front_end/queues", json!(17), "17 queues"),
            ("/disks/0/backend/kind", json!("qcow2"), "qcow2"),
            ("/disks/0/chain/0/holes", json!("maybe"), "maybe"),
            ("/disks/0/disk", json!("x"), "not understood"),
            (
                "/disks/0/export",
                json!({ "target": { "fd": 8 }, "format": { "kind": "raw" } }),
                "must be read-only",
            ),
        ];
        for (pointer, value, reason) in cases {
            let mut config = good();
            *config.pointer_mut(pointer).unwrap() = value;
            let refusal = read_value(&config).unwrap_err().to_string();
            assert!(refusal.contains(reason), "{pointer}: {refusal}");
        }
        let mut config = good();
        config["surprise"] = json!(1);
        assert!(read_value(&config).unwrap_err().to_string().contains("surprise"));
        let mut config = good();
        let disk = config["disks"][0].clone();
        config["disks"] = json!([disk, disk]);
        assert!(read_value(&config).unwrap_err().to_string().contains("twice"));
        let mut config = good();
        let nbd = |number: usize| {
            let mut disk = disk.clone();
            disk["disk"] = json!(format!("01890a5d-ac96-774b-bcce-{number:012}"));
            disk["front_end"] = json!({ "kind": "nbd", "listen": { "path": "/run/y" } });
            disk
        };
        config["disks"] = (0..16).map(nbd).collect();
        assert_eq!(read_value(&config).unwrap().disks.iter().map(pools).sum::<usize>(), 128);
        config["disks"] = (0..17).map(nbd).collect();
        assert!(read_value(&config).unwrap_err().to_string().contains("68 queues in all"));
        let endless = std::io::repeat(b' ');
        assert!(matches!(read(endless), Err(ConfigError::TooLong)));
    }
}
