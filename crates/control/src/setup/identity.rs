//! The server's own certificate: kept in `server.pem`, renewed when it nears its end or the server's
//! names change, and used for both sides of TLS.

use std::path::{Path, PathBuf};
use std::sync::{Arc, PoisonError, RwLock};
use std::time::Duration;

use jiff::Timestamp;
use rustls::SignatureScheme;
use rustls::client::ResolvesClientCert;
use rustls::crypto::aws_lc_rs::sign::any_supported_type;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::server::{ClientHello, ResolvesServerCert};
use rustls::sign::CertifiedKey;
use x509_parser::prelude::{FromDer, GeneralName, X509Certificate};
use zeroize::Zeroizing;

use crate::setup::authority::{Authority, AuthorityError, SERVER_ROLE};
use vmseal_api::atomic_file;

/// How long before its expiry a certificate is renewed: enough to notice that a renewal fails.
const RENEW_BEFORE: Duration = Duration::from_secs(90 * 24 * 3600);

/// The server's certificate and key as TLS uses them now.
pub struct Identity {
    file: PathBuf,
    names: Vec<String>,
    current: RwLock<Arc<CertifiedKey>>,
}

impl std::fmt::Debug for Identity {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Identity").field("names", &self.names).finish_non_exhaustive()
    }
}

impl Identity {
    /// The certificate in the data directory, or a new one if there is no usable one.
    ///
    /// # Errors
    /// [`AuthorityError`].
    pub fn open(
        data_dir: &Path,
        authority: &Authority,
        names: Vec<String>,
    ) -> Result<Self, AuthorityError> {
        let file = data_dir.join("server.pem");
        let stored = match std::fs::read_to_string(&file) {
            Ok(text) => certified(&Zeroizing::new(text), authority)
                .filter(|certified| will_do(certified, authority, &names)),
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => None,
            Err(source) => {
                return Err(AuthorityError::File { path: file.display().to_string(), source });
            }
        };
        let certified = match stored {
            Some(certified) => certified,
            None => issue(&file, authority, &names)?,
        };
        Ok(Self { file, names, current: RwLock::new(Arc::new(certified)) })
    }

    /// Renews the certificate if it is due; open connections keep the old one.
    ///
    /// # Errors
    /// [`AuthorityError`]; the old certificate stays in use.
    pub fn renew(&self, authority: &Authority) -> Result<(), AuthorityError> {
        if !will_do(&self.current(), authority, &self.names) {
            let certified = issue(&self.file, authority, &self.names)?;
            *self.current.write().unwrap_or_else(PoisonError::into_inner) = Arc::new(certified);
        }
        Ok(())
    }

    /// The certificate in use, DER.
    #[must_use]
    pub fn der(&self) -> Vec<u8> {
        self.current().cert.first().map(|der| der.to_vec()).unwrap_or_default()
    }

    fn current(&self) -> Arc<CertifiedKey> {
        Arc::clone(&self.current.read().unwrap_or_else(PoisonError::into_inner))
    }
}

fn issue(
    file: &Path,
    authority: &Authority,
    names: &[String],
) -> Result<CertifiedKey, AuthorityError> {
    let pem = authority.server_certificate(names)?;
    atomic_file::write(file, pem.as_bytes(), atomic_file::PRIVATE)
        .map_err(|source| AuthorityError::File { path: file.display().to_string(), source })?;
    certified(&pem, authority).ok_or_else(|| AuthorityError::Damaged {
        path: file.display().to_string(),
        why: "it does not read back".to_owned(),
    })
}

/// Key and chain as TLS needs them. The chain includes the CA's certificate: a joining host knows only its
/// fingerprint.
fn certified(pem: &str, authority: &Authority) -> Option<CertifiedKey> {
    let key = PrivateKeyDer::from_pem_slice(pem.as_bytes()).ok()?;
    let certificate = CertificateDer::from_pem_slice(pem.as_bytes()).ok()?;
    let key = any_supported_type(&key).ok()?;
    let certified = CertifiedKey::new(vec![certificate, authority.der().clone()], key);
    certified.keys_match().ok()?;
    Some(certified)
}

/// Whether a certificate is of this authority, for these names, and does not expire soon.
fn will_do(certified: &CertifiedKey, authority: &Authority, names: &[String]) -> bool {
    let Some(Ok((_, certificate))) =
        certified.cert.first().map(|der| X509Certificate::from_der(der))
    else {
        return false;
    };
    let Ok((_, ca)) = X509Certificate::from_der(authority.der()) else { return false };
    let deadline = Timestamp::now() + RENEW_BEFORE;
    certificate.verify_signature(Some(ca.public_key())).is_ok()
        && certificate.validity().not_after.timestamp() > deadline.as_second()
        && names_of(&certificate) == wanted(names)
}

fn wanted(names: &[String]) -> Vec<String> {
    let mut wanted: Vec<String> = names.iter().cloned().chain([SERVER_ROLE.to_owned()]).collect();
    wanted.sort();
    wanted
}

fn names_of(certificate: &X509Certificate<'_>) -> Vec<String> {
    let Ok(Some(names)) = certificate.subject_alternative_name() else { return Vec::new() };
    let text = |name: &GeneralName<'_>| match name {
        GeneralName::DNSName(name) | GeneralName::URI(name) => Some((*name).to_owned()),
        GeneralName::IPAddress(bytes) => match bytes.len() {
            4 => Some(std::net::Ipv4Addr::from(<[u8; 4]>::try_from(*bytes).ok()?).to_string()),
            _ => Some(std::net::Ipv6Addr::from(<[u8; 16]>::try_from(*bytes).ok()?).to_string()),
        },
        _ => None,
    };
    let mut found: Vec<String> = names.value.general_names.iter().filter_map(text).collect();
    found.sort();
    found
}

impl ResolvesServerCert for Identity {
    fn resolve(&self, _: ClientHello<'_>) -> Option<Arc<CertifiedKey>> {
        Some(self.current())
    }
}

impl ResolvesClientCert for Identity {
    fn resolve(&self, _: &[&[u8]], _: &[SignatureScheme]) -> Option<Arc<CertifiedKey>> {
        Some(self.current())
    }

    fn has_certs(&self) -> bool {
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_is_kept_until_the_names_change_or_it_is_damaged() {
        let directory = tempfile::tempdir().unwrap();
        let authority = Authority::open(directory.path()).unwrap();
        let leaf = |names: &[&str]| {
            let names = names.iter().map(|name| (*name).to_owned()).collect();
            let identity = Identity::open(directory.path(), &authority, names).unwrap();
            identity.renew(&authority).unwrap();
            identity.current().cert.clone()
        };
        let first = leaf(&["127.0.0.1", "localhost", "::1"]);
        assert_eq!(first.len(), 2, "the chain carries the CA");
        assert_eq!(leaf(&["localhost", "127.0.0.1", "::1"]), first);
        let second = leaf(&["vmseal.example"]);
        assert_ne!(second, first);
        let file = directory.path().join("server.pem");
        let text = std::fs::read_to_string(&file).unwrap();
        std::fs::write(&file, &text[..text.len() / 2]).unwrap();
        let third = leaf(&["vmseal.example"]);
        assert_ne!(third, second);
        assert_eq!(leaf(&["vmseal.example"]), third);
    }

    #[test]
    fn one_of_another_authority_is_replaced() {
        let (here, there) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let (ours, theirs) =
            (Authority::open(here.path()).unwrap(), Authority::open(there.path()).unwrap());
        let names = vec!["localhost".to_owned()];
        let foreign = Identity::open(there.path(), &theirs, names.clone()).unwrap();
        std::fs::copy(there.path().join("server.pem"), here.path().join("server.pem")).unwrap();
        let own = Identity::open(here.path(), &ours, names).unwrap();
        assert_ne!(own.current().cert[0], foreign.current().cert[0]);
    }
}
