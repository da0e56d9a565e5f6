//! The backup of a KMIP provider: its settings in the clear, and its client key sealed
//! (docs/formats/kmip-provider-backup.md). The sealed part contains a digest of everything before it, so that
//! no setting can be changed without the passphrase.
//!
//! ```text
//! "vmsealkb" (8) ‖ version (4) ‖ length of the settings (4) ‖ settings, JSON ‖ the sealed part
//! ```

use serde::{Deserialize, Serialize};

use crate::id::{ProviderId, check_name};
use crate::kmip::{PEM_MAX, SERVERS_MAX};

const MAGIC: &[u8; 8] = b"vmsealkb";
const VERSION: u32 = 1;
const HEAD_LEN: usize = 16;

/// The most bytes of settings: they fit a request of the API in base64.
pub const SETTINGS_MAX: usize = 128 * 1024;

/// The most bytes of the sealed part: a client key of at most 8 KiB with its envelope.
pub const SEALED_MAX: usize = 16 * 1024;

/// The settings of a provider.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Settings {
    /// The provider's id, by which VMs name their keys.
    pub id: ProviderId,
    /// The name that it had.
    pub name: String,
    /// Its servers, in the order in which they are asked.
    pub servers: Vec<Server>,
    /// Its client certificate (PEM); none where it had none.
    pub certificate: Option<String>,
}

/// A server.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Server {
    /// Its name within the provider.
    pub alias: String,
    /// A DNS name or an IP address.
    pub host: String,
    /// Its port.
    pub port: u16,
    /// The trust in it; none where no operator has set it.
    pub trust: Option<Trust>,
}

/// Whose word is taken for a server's certificate.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "snake_case", deny_unknown_fields)]
pub enum Trust {
    /// This certificate (PEM), which an operator has confirmed.
    Pinned {
        /// The certificate.
        certificate: String,
    },
    /// Certificates of these authorities (PEM).
    Authorities {
        /// Their certificates.
        certificates: String,
    },
}

/// Why a backup cannot be written or read.
#[derive(Debug, thiserror::Error)]
pub enum BackupError {
    /// It has another beginning, or is too short.
    #[error("this is not a backup of a KMIP provider")]
    NotABackup,
    /// A later vmseal made it.
    #[error("the backup has version {0}; this vmseal knows version {VERSION}: use a newer one")]
    UnknownVersion(u32),
    /// The settings cannot be read.
    #[error("the settings in the backup cannot be read: {0}")]
    Json(#[from] serde_json::Error),
    /// The settings are not valid for a provider.
    #[error("the settings in the backup are wrong: {0}")]
    Settings(String),
    /// The settings are too long to be written.
    #[error("the provider's settings have {0} bytes; a backup holds at most {SETTINGS_MAX}")]
    TooLong(usize),
}

/// A backup that was read. Nothing in it is authenticated before the sealed part has been opened.
#[derive(Debug)]
pub struct Parsed<'a> {
    /// The settings.
    pub settings: Settings,
    /// All before the sealed part, which contains a digest of it.
    pub head: &'a [u8],
    /// The sealed part.
    pub sealed: &'a [u8],
}

/// Whether a file begins like a backup.
#[must_use]
pub fn is_backup(bytes: &[u8]) -> bool {
    bytes.starts_with(MAGIC)
}

/// All of a backup before its sealed part.
///
/// # Errors
/// [`BackupError::TooLong`].
pub fn head(settings: &Settings) -> Result<Vec<u8>, BackupError> {
    let json = serde_json::to_vec(settings)?;
    let length = u32::try_from(json.len()).unwrap_or(u32::MAX);
    if json.len() > SETTINGS_MAX {
        return Err(BackupError::TooLong(json.len()));
    }
    let mut head = Vec::with_capacity(HEAD_LEN + json.len());
    head.extend_from_slice(MAGIC);
    head.extend_from_slice(&VERSION.to_be_bytes());
    head.extend_from_slice(&length.to_be_bytes());
    head.extend_from_slice(&json);
    Ok(head)
}

/// Reads a backup.
///
/// # Errors
/// [`BackupError`].
pub fn parse(bytes: &[u8]) -> Result<Parsed<'_>, BackupError> {
    let Some((start, rest)) = bytes.split_first_chunk::<HEAD_LEN>() else {
        return Err(BackupError::NotABackup);
    };
    let [.., v0, v1, v2, v3, l0, l1, l2, l3] = *start;
    if !is_backup(start) {
        return Err(BackupError::NotABackup);
    }
    let version = u32::from_be_bytes([v0, v1, v2, v3]);
    if version != VERSION {
        return Err(BackupError::UnknownVersion(version));
    }
    let length = usize::try_from(u32::from_be_bytes([l0, l1, l2, l3])).unwrap_or(usize::MAX);
    if length > SETTINGS_MAX {
        return Err(BackupError::NotABackup);
    }
    let Some((json, sealed)) = rest.split_at_checked(length) else {
        return Err(BackupError::NotABackup);
    };
    if sealed.is_empty() || sealed.len() > SEALED_MAX {
        return Err(BackupError::NotABackup);
    }
    let settings: Settings = serde_json::from_slice(json)?;
    settings.check()?;
    Ok(Parsed { settings, head: &bytes[..HEAD_LEN + length], sealed })
}

impl Settings {
    fn check(&self) -> Result<(), BackupError> {
        let wrong = |why: String| Err(BackupError::Settings(why));
        if self.servers.is_empty() || self.servers.len() > SERVERS_MAX {
            return wrong(format!("{} servers", self.servers.len()));
        }
        for (index, server) in self.servers.iter().enumerate() {
            if let Err(error) = check_name(&server.alias) {
                return wrong(format!("server {}: {error}", index + 1));
            }
            if server.port == 0 {
                return wrong(format!("server '{}' has port 0", server.alias));
            }
            if self.servers[..index].iter().any(|other| other.alias == server.alias) {
                return wrong(format!("two servers are called '{}'", server.alias));
            }
        }
        let trusts = self.servers.iter().filter_map(|server| match server.trust.as_ref()? {
            Trust::Pinned { certificate } => Some(certificate),
            Trust::Authorities { certificates } => Some(certificates),
        });
        if trusts.chain(&self.certificate).any(|pem| pem.len() > PEM_MAX) {
            return wrong(format!("a certificate has more than {PEM_MAX} bytes"));
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn settings() -> Settings {
        let server = |alias: &str, trust| Server {
            alias: alias.to_owned(),
            host: "kms.example.org".to_owned(),
            port: 5696,
            trust,
        };
        let trust = Trust::Pinned { certificate: "PEM".to_owned() };
        Settings {
            id: ProviderId::new(),
            name: "kms".to_owned(),
            servers: vec![server("one", Some(trust)), server("two", None)],
            certificate: Some("PEM".to_owned()),
        }
    }

    #[test]
    fn what_was_written_is_read() {
        let settings = settings();
        let head = head(&settings).unwrap();
        let backup = [&head[..], b"sealed"].concat();
        assert!(is_backup(&backup));
        let parsed = parse(&backup).unwrap();
        assert_eq!(
            (parsed.settings, parsed.head, parsed.sealed),
            (settings, &head[..], &b"sealed"[..])
        );
    }

    #[test]
    fn truncated_or_changed_backups_are_refused() {
        let backup = [&head(&settings()).unwrap()[..], b"s"].concat();
        for length in 0..backup.len() {
            assert!(parse(&backup[..length]).is_err(), "{length} bytes");
        }
        let mut later = backup.clone();
        later[11] = 2;
        assert!(matches!(parse(&later), Err(BackupError::UnknownVersion(2))));
        let long = [&backup[..], &vec![0; SEALED_MAX]].concat();
        assert!(matches!(parse(&long), Err(BackupError::NotABackup)));
        for wrong in [
            Settings { servers: Vec::new(), ..settings() },
            Settings { servers: vec![settings().servers[0].clone(); 2], ..settings() },
            Settings { certificate: Some("x".repeat(PEM_MAX + 1)), ..settings() },
        ] {
            let backup = [&head(&wrong).unwrap()[..], b"s"].concat();
            assert!(matches!(parse(&backup), Err(BackupError::Settings(_))));
        }
    }
}
