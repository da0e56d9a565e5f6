//! The private key with which a provider authenticates to its KMS, and its certificate.
//!
//! The key rests in a file of the provider's directory, sealed under the provider's passphrase with
//! the associated data "vmseal kmip client key v1" (docs/formats/kmip-client-key.md):
//!
//! ```text
//! provider id (16) ‖ private key, PKCS #8 DER
//! ```

use std::path::Path;

use rcgen::{CertificateParams, ExtendedKeyUsagePurpose, IsCa, KeyPair, KeyUsagePurpose};
use rustls::pki_types::PrivatePkcs8KeyDer;
use uuid::Uuid;
use vmseal_api::id::ProviderId;
use vmseal_api::kmip::check_common_name;
use vmseal_api::problem::{ErrorCode, Problem};
use vmseal_kmip::client::Identity;
use vmseal_secret::SecretBytes;
use zeroize::Zeroizing;

use crate::providers::sealed_file;
use crate::setup::authority::valid_for;

const ASSOCIATED: &[u8] = b"vmseal kmip client key v1";

const ID_LEN: usize = 16;

/// The maximum length of a private key, in bytes of PKCS #8 DER: RSA with 8192 bits has less than 5 KiB.
const KEY_MAX: usize = 8 * 1024;

/// The validity of a self-signed certificate, in days: as vCenter's.
const SELF_SIGNED_DAYS: i32 = 3650;

/// A client's private key.
pub(in crate::providers) struct ClientKey(SecretBytes);

impl ClientKey {
    /// A new one, for P-256: every KMS and every TLS library supports it.
    pub(super) fn generate() -> Result<Self, Problem> {
        let key = KeyPair::generate().map_err(|error| crate::internal(&error))?;
        let mut der = Zeroizing::new(key.serialize_der());
        SecretBytes::from_wiped(&mut der).map(Self).map_err(|error| crate::internal(&error))
    }

    /// A key from an operator, for the certificate that comes with it.
    pub(super) fn given(key: SecretBytes) -> Result<Self, Problem> {
        if key.len() > KEY_MAX {
            let detail = format!("a private key has at most {KEY_MAX} bytes");
            return Err(Problem::invalid("private_key", detail));
        }
        Ok(Self(key))
    }

    /// PKCS #8, DER.
    pub(super) fn der(&self) -> &SecretBytes {
        &self.0
    }

    /// Seals it into a file of the provider's directory; returns the file's name, which is new.
    pub(super) fn write(
        &self,
        directory: &Path,
        provider: ProviderId,
        passphrase: &SecretBytes,
    ) -> Result<String, Problem> {
        let mut content =
            SecretBytes::zeroed(ID_LEN + self.0.len()).map_err(|error| crate::internal(&error))?;
        content.expose_mut()[..ID_LEN].copy_from_slice(provider.0.as_bytes());
        content.expose_mut()[ID_LEN..].copy_from_slice(self.0.expose());
        let name = format!("client-{}.key", Uuid::now_v7().hyphenated());
        let sealed = sealed_file::seal(&content, passphrase, ASSOCIATED)?;
        sealed_file::write(directory, &name, &sealed)?;
        Ok(name)
    }

    /// Opens the file of a provider.
    pub(super) fn read(
        path: &Path,
        provider: ProviderId,
        name: &str,
        passphrase: &SecretBytes,
    ) -> Result<Self, Problem> {
        let what = format!("the client key of provider '{name}'");
        let damaged = |why: String| {
            let detail = format!(
                "{what}, {}, {why}. Restore it from a backup of the data directory, or make a new one (vmseal provider certificate {name} --replace)",
                path.display()
            );
            Problem::new(ErrorCode::Damaged, detail)
        };
        let sealed =
            std::fs::read(path).map_err(|error| damaged(format!("cannot be read: {error}")))?;
        Self::open(&sealed, provider, passphrase, &what, damaged)
    }

    fn open(
        sealed: &[u8],
        provider: ProviderId,
        passphrase: &SecretBytes,
        what: &str,
        damaged: impl Fn(String) -> Problem,
    ) -> Result<Self, Problem> {
        let content = sealed_file::open(sealed, passphrase, ASSOCIATED, what)?;
        let Some((id, key)) = content.expose().split_at_checked(ID_LEN) else {
            return Err(damaged("is too short".to_owned()));
        };
        if id != provider.0.as_bytes() {
            let detail = format!("{what} is that of another provider");
            return Err(Problem::new(ErrorCode::KeyMismatch, detail));
        }
        let mut copy = SecretBytes::zeroed(key.len()).map_err(|error| crate::internal(&error))?;
        copy.expose_mut().copy_from_slice(key);
        Ok(Self(copy))
    }

    /// The TLS identity with this key.
    pub(super) fn identity(&self, certificate: &str) -> Result<Identity, Problem> {
        Identity::new(certificate, &self.0)
            .map_err(|error| Problem::invalid("certificate", error.to_string()))
    }

    fn pair(&self) -> Result<KeyPair, Problem> {
        KeyPair::try_from(&PrivatePkcs8KeyDer::from(self.0.expose())).map_err(|error| {
            let detail = format!("certificates cannot be made for this kind of key: {error}");
            Problem::new(ErrorCode::Unsupported, detail)
        })
    }

    /// A request for a certificate (PKCS #10), PEM.
    pub(super) fn request(&self, common_name: &str) -> Result<String, Problem> {
        // The issuer chooses the serial number.
        let mut params = params(common_name)?;
        params.serial_number = None;
        let request = params.serialize_request(&self.pair()?);
        request.and_then(|request| request.pem()).map_err(|error| crate::internal(&error))
    }

    /// A self-signed certificate, PEM.
    pub(super) fn self_signed(&self, common_name: &str) -> Result<String, Problem> {
        let signed = params(common_name)?.self_signed(&self.pair()?);
        Ok(signed.map_err(|error| crate::internal(&error))?.pem())
    }
}

/// A client's certificate. PyKMIP and others insist on the usage.
fn params(common_name: &str) -> Result<CertificateParams, Problem> {
    check_common_name(common_name).map_err(|what| Problem::invalid("common_name", what))?;
    let mut params =
        valid_for(common_name, SELF_SIGNED_DAYS).map_err(|error| crate::internal(&error))?;
    params.is_ca = IsCa::NoCa;
    params.key_usages = vec![KeyUsagePurpose::DigitalSignature];
    params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ClientAuth];
    Ok(params)
}

#[cfg(test)]
mod tests {
    use x509_parser::prelude::{FromDer, X509Certificate, X509CertificationRequest};

    use super::*;

    fn der(pem: &str) -> Vec<u8> {
        x509_parser::pem::parse_x509_pem(pem.as_bytes()).unwrap().1.contents
    }

    fn passphrase() -> SecretBytes {
        SecretBytes::from_wiped(&mut b"correct horse".to_vec()).unwrap()
    }

    #[test]
    fn its_certificates_are_for_clients_and_for_its_key() {
        let key = ClientKey::generate().unwrap();
        let pem = key.self_signed("vmseal").unwrap();
        key.identity(&pem).unwrap();
        let refused = ClientKey::generate().unwrap().identity(&pem).unwrap_err();
        assert_eq!(refused.field.as_deref(), Some("certificate"));
        let der_of_it = der(&pem);
        let (_, certificate) = X509Certificate::from_der(&der_of_it).unwrap();
        assert_eq!(certificate.subject().to_string(), "CN=vmseal");
        assert!(certificate.validity().is_valid());
        let usage = certificate.extended_key_usage().unwrap().unwrap().value;
        assert!(usage.client_auth && !usage.server_auth);

        let request = der(&key.request("vmseal").unwrap());
        let (_, request) = X509CertificationRequest::from_der(&request).unwrap();
        request.verify_signature().unwrap();
        let info = &request.certification_request_info;
        assert_eq!(info.subject.to_string(), "CN=vmseal");
        assert_eq!(info.subject_pki.raw, certificate.public_key().raw);
        for bad in ["", "a\nb", &"x".repeat(65)] {
            assert_eq!(key.request(bad).unwrap_err().field.as_deref(), Some("common_name"));
        }
    }

    #[test]
    fn a_sealed_key_opens_for_its_provider_alone() {
        let directory = tempfile::tempdir().unwrap();
        let (id, key) = (ProviderId::new(), ClientKey::generate().unwrap());
        let name = key.write(directory.path(), id, &passphrase()).unwrap();
        let path = directory.path().join(&name);
        assert!(ClientKey::read(&path, id, "kms", &passphrase()).unwrap().0 == key.0);
        let right = passphrase();
        let wrong = SecretBytes::from_wiped(&mut b"wrong".to_vec()).unwrap();
        let code =
            |id, passphrase| ClientKey::read(&path, id, "kms", passphrase).err().unwrap().code;
        assert_eq!(code(id, &wrong), ErrorCode::KeyMismatch);
        assert_eq!(code(ProviderId::new(), &right), ErrorCode::KeyMismatch);
        std::fs::write(&path, b"no key").unwrap();
        assert_eq!(code(id, &right), ErrorCode::Damaged);
        std::fs::remove_file(&path).unwrap();
        assert_eq!(code(id, &right), ErrorCode::Damaged);
        assert_ne!(key.write(directory.path(), id, &passphrase()).unwrap(), name);
    }

    /// Made from the written format by another implementation (argon2-cffi and pyca/cryptography): it has to
    /// open forever.
    #[test]
    fn the_golden_file_opens() {
        let golden = include_bytes!("../../../tests/golden/kmip-client-key-v1.bin");
        let id = ProviderId(Uuid::from_bytes(std::array::from_fn(|index| index as u8)));
        let damaged = |why| Problem::new(ErrorCode::Damaged, why);
        let key = ClientKey::open(golden, id, &passphrase(), "it", damaged).unwrap();
        let pem = include_str!("../../../tests/golden/kmip-client-key-v1.pem");
        key.identity(pem).unwrap();
    }
}
