//! The control plane's own certificate authority: it signs the certificates of the server and of hosts, and
//! they trust nothing else.
//!
//! | certificate | common name | subject alternative names | usage |
//! |---|---|---|---|
//! | authority | `vmseal authority` | | signs certificates, path length 0 |
//! | server | `vmseal-server` | its names, `urn:vmseal:server` | server and client |
//! | host | the host's id | `ID.host.vmseal.internal`, `urn:vmseal:host` | server |
//!
//! A certificate contains nothing that a host chooses: neither its name nor its address.

use std::net::IpAddr;
use std::path::Path;

use aws_lc_rs::digest::{SHA256, digest};
use jiff::civil::Date;
use jiff::{ToSpan, Zoned};
use rcgen::{
    BasicConstraints, Certificate, CertificateParams, CertificateSigningRequestParams, DnType,
    ExtendedKeyUsagePurpose, IsCa, Issuer, KeyPair, KeyUsagePurpose, SanType, SerialNumber,
};
use rustls::pki_types::CertificateDer;
use rustls::pki_types::pem::PemObject;
use vmseal_api::client::host_server_name;
use vmseal_api::id::HostId;
use zeroize::Zeroizing;

use vmseal_api::atomic_file;

pub use vmseal_api::client::role::{HOST_ROLE, SERVER_ROLE};

/// The validity of an authority, in years: as long as an installation may last.
const AUTHORITY_YEARS: i32 = 30;

/// The validity of a host's certificate, in years. Joining again renews it. A host that was removed from the
/// inventory is no longer called, even if its certificate is valid.
const HOST_YEARS: i32 = 10;

/// The validity of the server's certificate, in days; the server renews it itself.
const SERVER_DAYS: i32 = 365;

/// How far the clocks of hosts may be behind, in days.
const CLOCK_SKEW_DAYS: i32 = 1;

/// The maximum length of a certificate request, in bytes.
pub const REQUEST_MAX: usize = 16 * 1024;

/// Why the authority or a certificate is unavailable.
#[derive(Debug, thiserror::Error)]
pub enum AuthorityError {
    /// A file of the data directory.
    #[error("{path}: {source}")]
    File {
        /// Which one.
        path: String,
        /// What the file system says.
        source: std::io::Error,
    },
    /// An existing key or certificate cannot be used.
    #[error("{path} is damaged: {why}. Restore it from a backup of the data directory")]
    Damaged {
        /// Which file.
        path: String,
        /// What is wrong.
        why: String,
    },
    /// The certificate request of a host.
    #[error("the certificate request cannot be signed: {0}")]
    Request(rcgen::Error),
    /// AWS-LC or rcgen refused.
    #[error("a certificate could not be made: {0}")]
    Certificate(#[from] rcgen::Error),
}

fn file_error(path: &Path) -> impl FnOnce(std::io::Error) -> AuthorityError {
    let path = path.display().to_string();
    move |source| AuthorityError::File { path, source }
}

fn read(path: &Path) -> Result<Option<Zeroizing<String>>, AuthorityError> {
    match std::fs::read_to_string(path) {
        Ok(text) => Ok(Some(Zeroizing::new(text))),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(file_error(path)(error)),
    }
}

/// The authority, with its private key: in the memory of this process, which is locked and not dumpable.
pub struct Authority {
    issuer: Issuer<'static, KeyPair>,
    pem: String,
    der: CertificateDer<'static>,
}

impl Authority {
    /// Opens the authority of a data directory, or makes one: first `ca.key`, then `ca.pem`. A crash between the two
    /// leaves a key without a certificate.
    ///
    /// # Errors
    /// [`AuthorityError`].
    pub fn open(data_dir: &Path) -> Result<Self, AuthorityError> {
        let (key_path, pem_path) = (data_dir.join("ca.key"), data_dir.join("ca.pem"));
        let damaged = |path: &Path, why: String| AuthorityError::Damaged {
            path: path.display().to_string(),
            why,
        };
        let key = match (read(&key_path)?, read(&pem_path)?) {
            (Some(text), _) => {
                KeyPair::from_pem(&text).map_err(|error| damaged(&key_path, error.to_string()))?
            }
            (None, Some(_)) => {
                return Err(damaged(&key_path, "it is missing beside ca.pem".to_owned()));
            }
            (None, None) => {
                let key = KeyPair::generate()?;
                let text = Zeroizing::new(key.serialize_pem());
                atomic_file::write(&key_path, text.as_bytes(), atomic_file::PRIVATE)
                    .map_err(file_error(&key_path))?;
                key
            }
        };
        let pem = match read(&pem_path)? {
            Some(text) => text.to_string(),
            None => {
                let pem = authority_certificate(&key)?.pem();
                atomic_file::write(&pem_path, pem.as_bytes(), atomic_file::PUBLIC)
                    .map_err(file_error(&pem_path))?;
                pem
            }
        };
        let der = CertificateDer::from_pem_slice(pem.as_bytes())
            .map_err(|error| damaged(&pem_path, error.to_string()))?;
        if !holds_key(&der, &key) {
            return Err(damaged(&pem_path, "it is not the certificate of ca.key".to_owned()));
        }
        let issuer = Issuer::from_ca_cert_der(&der, key)
            .map_err(|error| damaged(&pem_path, error.to_string()))?;
        Ok(Self { issuer, pem, der })
    }

    /// The certificate, PEM.
    #[must_use]
    pub fn pem(&self) -> &str {
        &self.pem
    }

    /// The certificate, DER.
    #[must_use]
    pub fn der(&self) -> &CertificateDer<'static> {
        &self.der
    }

    /// SHA-256 of the certificate, which is part of a join token.
    #[must_use]
    pub fn fingerprint(&self) -> [u8; 32] {
        let mut fingerprint = [0; 32];
        fingerprint.copy_from_slice(digest(&SHA256, &self.der).as_ref());
        fingerprint
    }

    /// A new key and certificate for the server: PEM, the key first, then the certificate.
    ///
    /// # Errors
    /// [`AuthorityError::Certificate`]: an invalid name.
    pub fn server_certificate(
        &self,
        names: &[String],
    ) -> Result<Zeroizing<String>, AuthorityError> {
        let key = KeyPair::generate()?;
        let usages = vec![ExtendedKeyUsagePurpose::ServerAuth, ExtendedKeyUsagePurpose::ClientAuth];
        let mut params = leaf("vmseal-server", SERVER_DAYS, usages)?;
        params.subject_alt_names = alternative_names(names)?;
        params.subject_alt_names.push(SanType::URI(SERVER_ROLE.try_into()?));
        let certificate = params.signed_by(&key, &self.issuer)?;
        let key = Zeroizing::new(key.serialize_pem());
        Ok(Zeroizing::new(format!("{}{}", key.as_str(), certificate.pem())))
    }

    /// Signs a host's certificate request. Takes only the public key from it, after its signature has proved that the
    /// host has the private one; everything else comes from the inventory.
    ///
    /// # Errors
    /// [`AuthorityError::Request`]: it is not a request, or its signature is wrong.
    pub fn host_certificate(&self, request: &str, host: HostId) -> Result<String, AuthorityError> {
        let mut request =
            CertificateSigningRequestParams::from_pem(request).map_err(AuthorityError::Request)?;
        let usages = vec![ExtendedKeyUsagePurpose::ServerAuth];
        request.params = leaf(&host.to_string(), HOST_YEARS * 365, usages)?;
        request.params.subject_alt_names = alternative_names(&[host_server_name(host)])?;
        request.params.subject_alt_names.push(SanType::URI(HOST_ROLE.try_into()?));
        Ok(request.signed_by(&self.issuer)?.pem())
    }
}

fn alternative_names(names: &[String]) -> Result<Vec<SanType>, AuthorityError> {
    names
        .iter()
        .map(|name| match name.parse::<IpAddr>() {
            Ok(address) => Ok(SanType::IpAddress(address)),
            Err(_) => Ok(SanType::DnsName(name.as_str().try_into()?)),
        })
        .collect()
}

fn holds_key(certificate: &CertificateDer<'_>, key: &KeyPair) -> bool {
    x509_parser::parse_x509_certificate(certificate).is_ok_and(|(_, certificate)| {
        certificate.public_key().subject_public_key.data == key.public_key_raw()
    })
}

fn authority_certificate(key: &KeyPair) -> Result<Certificate, AuthorityError> {
    let mut params = valid_for("vmseal authority", AUTHORITY_YEARS * 365)?;
    params.is_ca = IsCa::Ca(BasicConstraints::Constrained(0));
    params.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::DigitalSignature];
    Ok(params.self_signed(key)?)
}

/// The parameters of a certificate that is not an authority's.
fn leaf(
    common_name: &str,
    days: i32,
    usages: Vec<ExtendedKeyUsagePurpose>,
) -> Result<CertificateParams, AuthorityError> {
    let mut params = valid_for(common_name, days)?;
    params.is_ca = IsCa::ExplicitNoCa;
    params.key_usages = vec![KeyUsagePurpose::DigitalSignature];
    params.extended_key_usages = usages;
    params.use_authority_key_identifier_extension = true;
    Ok(params)
}

/// The parameters of a certificate with this name, valid from yesterday, with a random serial number.
pub(crate) fn valid_for(common_name: &str, days: i32) -> Result<CertificateParams, AuthorityError> {
    let mut params = CertificateParams::default();
    params.distinguished_name = rcgen::DistinguishedName::new();
    params.distinguished_name.push(DnType::CommonName, common_name);
    let mut serial = [0; 16];
    aws_lc_rs::rand::fill(&mut serial).map_err(|_| rcgen::Error::RingUnspecified)?;
    serial[0] &= 0x7f; // a positive integer (RFC 5280 section 4.1.2.2)
    params.serial_number = Some(SerialNumber::from_slice(&serial));
    let today = Zoned::now().with_time_zone(jiff::tz::TimeZone::UTC).date();
    let on = |date: Date| {
        let (month, day) = (date.month().unsigned_abs(), date.day().unsigned_abs());
        rcgen::date_time_ymd(date.year().into(), month, day)
    };
    params.not_before = on(today.saturating_sub(CLOCK_SKEW_DAYS.days()));
    params.not_after = on(today.saturating_add(days.days()));
    Ok(params)
}

#[cfg(test)]
mod tests {
    use x509_parser::prelude::{FromDer, GeneralName, X509Certificate};

    use super::*;

    fn request(ask: impl FnOnce(&mut CertificateParams)) -> (KeyPair, String) {
        let key = KeyPair::generate().unwrap();
        let mut params = CertificateParams::default();
        ask(&mut params);
        let pem = params.serialize_request(&key).unwrap().pem().unwrap();
        (key, pem)
    }

    fn names(certificate: &X509Certificate<'_>) -> Vec<String> {
        let names = certificate.subject_alternative_name().unwrap().unwrap();
        let text = |name: &GeneralName<'_>| match name {
            GeneralName::DNSName(name) | GeneralName::URI(name) => (*name).to_owned(),
            GeneralName::IPAddress(bytes) => format!("{bytes:?}"),
            other => panic!("{other:?}"),
        };
        names.value.general_names.iter().map(text).collect()
    }

    #[test]
    fn a_host_gets_what_the_inventory_says_and_nothing_it_asked_for() {
        let directory = tempfile::tempdir().unwrap();
        let authority = Authority::open(directory.path()).unwrap();
        let (key, pem) = request(|params| {
            params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
            params.subject_alt_names = vec![SanType::URI(SERVER_ROLE.try_into().unwrap())];
        });
        let host = HostId::new();
        let pem = authority.host_certificate(&pem, host).unwrap();
        let der = CertificateDer::from_pem_slice(pem.as_bytes()).unwrap();
        let (_, certificate) = X509Certificate::from_der(&der).unwrap();
        assert_eq!(names(&certificate), [host_server_name(host), HOST_ROLE.to_owned()]);
        let usage = certificate.extended_key_usage().unwrap().unwrap().value;
        assert!(usage.server_auth && !usage.client_auth);
        assert!(!certificate.is_ca());
        assert!(holds_key(&der, &key));
        let common_name = certificate.subject().iter_common_name().next().unwrap();
        assert_eq!(common_name.as_str().unwrap(), host.to_string());
        let (_, ca) = X509Certificate::from_der(authority.der()).unwrap();
        certificate.verify_signature(Some(ca.public_key())).unwrap();
    }

    #[test]
    fn a_request_that_its_key_did_not_sign_is_refused() {
        let directory = tempfile::tempdir().unwrap();
        let authority = Authority::open(directory.path()).unwrap();
        let (_, pem) = request(|_| {});
        let der = rustls::pki_types::CertificateSigningRequestDer::from_pem_slice(pem.as_bytes());
        let mut der = der.unwrap().to_vec();
        *der.last_mut().unwrap() ^= 1;
        use base64::Engine;
        let forged = format!(
            "-----BEGIN CERTIFICATE REQUEST-----\n{}\n-----END CERTIFICATE REQUEST-----\n",
            base64::engine::general_purpose::STANDARD.encode(der)
        );
        for bad in [forged.as_str(), "", "nonsense"] {
            let refused = authority.host_certificate(bad, HostId::new());
            assert!(matches!(refused, Err(AuthorityError::Request(_))), "{bad}");
        }
    }

    #[test]
    fn a_crash_between_key_and_certificate_is_repaired_and_a_wrong_pair_refused() {
        let directory = tempfile::tempdir().unwrap();
        let first = Authority::open(directory.path()).unwrap();
        assert_eq!(Authority::open(directory.path()).unwrap().pem(), first.pem());
        let key = std::fs::read(directory.path().join("ca.key")).unwrap();
        std::fs::remove_file(directory.path().join("ca.pem")).unwrap();
        Authority::open(directory.path()).unwrap();
        assert_eq!(std::fs::read(directory.path().join("ca.key")).unwrap(), key);

        let other = tempfile::tempdir().unwrap();
        Authority::open(other.path()).unwrap();
        std::fs::copy(other.path().join("ca.pem"), directory.path().join("ca.pem")).unwrap();
        let refused = Authority::open(directory.path());
        assert!(matches!(refused, Err(AuthorityError::Damaged { .. })));
        std::fs::remove_file(directory.path().join("ca.key")).unwrap();
        let refused = Authority::open(directory.path());
        assert!(matches!(refused, Err(AuthorityError::Damaged { .. })));
    }
}
