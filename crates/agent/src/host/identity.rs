//! The identity of this host: its certificate and key, the authority that it trusts, and its address. One
//! file, so that it is either complete or missing.

use std::io;
use std::path::Path;
use std::sync::Arc;

use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use serde::{Deserialize, Serialize};
use vmseal_api::client::verifier::Verifier;
use vmseal_api::id::HostId;
use zeroize::Zeroizing;

use vmseal_api::atomic_file::{self, PRIVATE};

/// The file in the state directory.
const FILE: &str = "identity.json";

/// The version of the file.
const VERSION: u32 = 1;

/// The longest file, in bytes.
const FILE_MAX: u64 = 64 * 1024;

/// Why there is no identity.
#[derive(Debug, thiserror::Error)]
pub enum IdentityError {
    /// The machine has not joined.
    #[error("{0} has no identity: join a server first (vmseal agent join)")]
    None(String),
    /// The file system.
    #[error("{path}: {error}")]
    File {
        /// Which file.
        path: String,
        /// What is wrong.
        error: io::Error,
    },
    /// It cannot be used.
    #[error("{path} is damaged: {why}. Join the server again")]
    Damaged {
        /// Which file.
        path: String,
        /// What is wrong.
        why: String,
    },
    /// Certificate, key and authority do not belong together.
    #[error("the host's certificate cannot be used: {0}")]
    Certificate(String),
}

/// Who this host is.
pub struct Identity {
    /// Its id.
    pub host: HostId,
    /// Its name.
    pub name: String,
    /// Where it listens (`host:port`).
    pub address: String,
    /// The server that it joined.
    pub server: String,
    /// Its certificate, PEM.
    pub certificate: String,
    /// The control plane's authority, PEM: the only one it trusts.
    pub authority: String,
    /// Its private key, PEM.
    pub key: Zeroizing<String>,
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Stored<'a> {
    version: u32,
    host: HostId,
    name: String,
    address: String,
    server: String,
    certificate: String,
    authority: String,
    /// Borrowed, so that no copy is left in memory. JSON strings with escapes cannot be borrowed, so line
    /// ends are stored as `|`, which PEM does not contain.
    key: &'a str,
}

impl Identity {
    /// Reads it.
    ///
    /// # Errors
    /// [`IdentityError`].
    pub fn load(state_dir: &Path) -> Result<Self, IdentityError> {
        use std::io::Read;
        let path = state_dir.join(FILE);
        let shown = path.display().to_string();
        let mut text = Zeroizing::new(Vec::with_capacity(FILE_MAX as usize));
        match std::fs::File::open(&path).and_then(|file| file.take(FILE_MAX).read_to_end(&mut text))
        {
            Ok(_) => {}
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                return Err(IdentityError::None(state_dir.display().to_string()));
            }
            Err(error) => return Err(IdentityError::File { path: shown, error }),
        }
        let damaged = |why: String| IdentityError::Damaged { path: shown.clone(), why };
        let stored: Stored<'_> =
            serde_json::from_slice(&text).map_err(|error| damaged(error.to_string()))?;
        if stored.version != VERSION {
            return Err(damaged(format!("its version is {}", stored.version)));
        }
        Ok(Self {
            host: stored.host,
            name: stored.name,
            address: stored.address,
            server: stored.server,
            certificate: stored.certificate,
            authority: stored.authority,
            key: Zeroizing::new(stored.key.replace('|', "\n")),
        })
    }

    /// Writes it completely or not at all.
    ///
    /// # Errors
    /// [`IdentityError::File`].
    pub fn store(&self, state_dir: &Path) -> Result<(), IdentityError> {
        use std::os::unix::fs::DirBuilderExt;
        let path = state_dir.join(FILE);
        let key = Zeroizing::new(self.key.replace('\n', "|"));
        let stored = Stored {
            version: VERSION,
            host: self.host,
            name: self.name.clone(),
            address: self.address.clone(),
            server: self.server.clone(),
            certificate: self.certificate.clone(),
            authority: self.authority.clone(),
            key: &key,
        };
        let mut text = Zeroizing::new(Vec::with_capacity(FILE_MAX as usize));
        serde_json::to_writer_pretty(&mut *text, &stored)
            .map_err(io::Error::from)
            .and_then(|()| std::fs::DirBuilder::new().recursive(true).mode(0o700).create(state_dir))
            .and_then(|()| atomic_file::write(&path, &text, PRIVATE))
            .map_err(|error| IdentityError::File { path: path.display().to_string(), error })
    }

    /// The TLS settings of the agent's listener: it presents its certificate and accepts the server alone.
    ///
    /// # Errors
    /// [`IdentityError::Certificate`] when certificate, key and authority do not belong together.
    pub fn tls(&self) -> Result<Arc<rustls::ServerConfig>, IdentityError> {
        let wrong = |error: &dyn std::fmt::Display| IdentityError::Certificate(error.to_string());
        let certificate = CertificateDer::from_pem_slice(self.certificate.as_bytes())
            .map_err(|error| wrong(&error))?;
        let authority = CertificateDer::from_pem_slice(self.authority.as_bytes())
            .map_err(|error| wrong(&error))?;
        let key =
            PrivateKeyDer::from_pem_slice(self.key.as_bytes()).map_err(|error| wrong(&error))?;
        let provider = Arc::new(rustls::crypto::aws_lc_rs::default_provider());
        let verifier = Verifier::server_as_client(authority, provider.clone())
            .map_err(|error| wrong(&error))?;
        rustls::ServerConfig::builder_with_provider(provider)
            .with_protocol_versions(&[&rustls::version::TLS13])
            .map_err(|error| wrong(&error))?
            .with_client_cert_verifier(Arc::new(verifier))
            .with_single_cert(vec![certificate], key)
            .map(Arc::new)
            .map_err(|error| wrong(&error))
    }
}

impl std::fmt::Debug for Identity {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Identity").field("host", &self.host).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;
    use crate::host::peer_tests::Authority;

    #[test]
    fn an_identity_is_private_and_survives() {
        let directory = tempfile::tempdir().unwrap();
        let state = directory.path().join("state");
        let error = Identity::load(&state).unwrap_err();
        assert!(error.to_string().contains("join"), "{error}");
        let identity = Authority::new().host();
        identity.store(&state).unwrap();
        let mode = state.join(FILE).metadata().unwrap().permissions().mode();
        assert_eq!(mode & 0o777, 0o600);
        let loaded = Identity::load(&state).unwrap();
        assert_eq!((loaded.host, &*loaded.key), (identity.host, &*identity.key));
        loaded.tls().unwrap();
        assert!(!format!("{loaded:?}").contains("PRIVATE"));
        std::fs::write(state.join(FILE), "{}").unwrap();
        assert!(matches!(Identity::load(&state), Err(IdentityError::Damaged { .. })));
    }

    #[test]
    fn a_key_that_is_not_the_certificates_is_refused() {
        let authority = Authority::new();
        let identity = Identity { key: authority.host().key, ..authority.host() };
        assert!(matches!(identity.tls(), Err(IdentityError::Certificate(_))));
    }
}
