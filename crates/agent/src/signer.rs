//! Signs what the agent reports, with the key of the host's certificate.

use aws_lc_rs::rand::SystemRandom;
use aws_lc_rs::signature::{ECDSA_P256_SHA256_ASN1_SIGNING, EcdsaKeyPair};
use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use rustls::pki_types::PrivateKeyDer;
use rustls::pki_types::pem::PemObject;
use vmseal_api::id::HostId;
use vmseal_api::problem::{ErrorCode, Problem};
use vmseal_api::proof::ReportSignature;

/// The key cannot be used.
#[derive(Debug, thiserror::Error)]
#[error("the host's key cannot sign reports: {0}")]
pub struct NoSigner(String);

/// The key of a host.
pub struct Signer {
    /// The host.
    pub host: HostId,
    certificate: String,
    key: EcdsaKeyPair,
}

impl Signer {
    /// The key of this host; certificate and key are in PEM.
    ///
    /// # Errors
    /// [`NoSigner`]: it is not a key as joining makes it.
    pub fn of(host: HostId, certificate: &str, key: &str) -> Result<Self, NoSigner> {
        let wrong = |error: &dyn std::fmt::Display| NoSigner(error.to_string());
        let key = PrivateKeyDer::from_pem_slice(key.as_bytes()).map_err(|error| wrong(&error))?;
        let key = EcdsaKeyPair::from_pkcs8(&ECDSA_P256_SHA256_ASN1_SIGNING, key.secret_der())
            .map_err(|error| wrong(&error))?;
        Ok(Self { host, certificate: certificate.to_owned(), key })
    }

    /// Signs a text.
    ///
    /// # Errors
    /// `internal`: the library failed.
    pub fn sign(&self, text: &[u8]) -> Result<ReportSignature, Problem> {
        let signature = self.key.sign(&SystemRandom::new(), text).map_err(|_| {
            Problem::new(ErrorCode::Internal, "the report could not be signed: the library failed")
        })?;
        let value = STANDARD.encode(signature.as_ref());
        Ok(ReportSignature { certificate: self.certificate.clone(), value })
    }
}

#[cfg(test)]
mod tests {
    use aws_lc_rs::signature::{ECDSA_P256_SHA256_ASN1, UnparsedPublicKey};
    use rustls::pki_types::CertificateDer;
    use x509_parser::prelude::{FromDer, X509Certificate};

    use super::*;
    use crate::host::peer_tests::Authority;

    #[test]
    fn a_signature_is_that_of_the_certificates_key_and_of_the_text() {
        let signer = {
            let identity = Authority::new().host();
            Signer::of(identity.host, &identity.certificate, &identity.key).unwrap()
        };
        let signed = signer.sign(b"a report").unwrap();
        let certificate = CertificateDer::from_pem_slice(signed.certificate.as_bytes()).unwrap();
        let (_, certificate) = X509Certificate::from_der(&certificate).unwrap();
        let key = certificate.public_key().subject_public_key.data.to_vec();
        let key = UnparsedPublicKey::new(&ECDSA_P256_SHA256_ASN1, key);
        let value = STANDARD.decode(signed.value).unwrap();
        key.verify(b"a report", &value).unwrap();
        assert!(key.verify(b"another report", &value).is_err());
    }
}
