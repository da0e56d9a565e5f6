//! Whether a report is its host's: it is signed with the key of the certificate that the host's agent shows, and unchanged.

use aws_lc_rs::signature::{ECDSA_P256_SHA256_ASN1, UnparsedPublicKey};
use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use rustls::pki_types::CertificateDer;
use rustls::pki_types::pem::PemObject;
use vmseal_api::proof::SignedReport;

/// Why a report is not taken for its host's.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum NotSigned {
    /// It has no signature.
    #[error("it has no signature")]
    Missing,
    /// The certificate beside the signature is not the agent's.
    #[error("it has another certificate than the one that the host's agent shows")]
    Certificate,
    /// The signature was not made with this key, or not of this text.
    #[error("its signature is not of its text and of the host's key")]
    Signature,
}

/// Checks that a report is signed with the key of this certificate (DER), which the agent has shown on its connection: by that
/// it is of this host, and of the control plane's authority.
///
/// # Errors
/// [`NotSigned`].
pub fn check(signed: &SignedReport, shown: &[u8]) -> Result<(), NotSigned> {
    let signature = signed.signature.as_ref().ok_or(NotSigned::Missing)?;
    let beside = CertificateDer::from_pem_slice(signature.certificate.as_bytes());
    if !beside.is_ok_and(|beside| *beside == *shown) {
        return Err(NotSigned::Certificate);
    }
    let (_, certificate) =
        x509_parser::parse_x509_certificate(shown).map_err(|_| NotSigned::Certificate)?;
    let key = certificate.public_key().subject_public_key.data.to_vec();
    let value = STANDARD.decode(&signature.value).map_err(|_| NotSigned::Signature)?;
    UnparsedPublicKey::new(&ECDSA_P256_SHA256_ASN1, key)
        .verify(signed.report.as_bytes(), &value)
        .map_err(|_| NotSigned::Signature)
}

#[cfg(test)]
mod tests {
    use aws_lc_rs::rand::SystemRandom;
    use aws_lc_rs::signature::{ECDSA_P256_SHA256_ASN1_SIGNING, EcdsaKeyPair};
    use vmseal_api::proof::ReportSignature;

    use super::*;

    /// A report that a host with a certificate has signed, and the certificate (DER).
    fn signed(report: &str) -> (SignedReport, Vec<u8>) {
        let key = rcgen::KeyPair::generate().unwrap();
        let certificate = rcgen::CertificateParams::default().self_signed(&key).unwrap();
        let pkcs8 = key.serialize_der();
        let key = EcdsaKeyPair::from_pkcs8(&ECDSA_P256_SHA256_ASN1_SIGNING, &pkcs8).unwrap();
        let value = key.sign(&SystemRandom::new(), report.as_bytes()).unwrap();
        let (certificate, der) = (certificate.pem(), certificate.der().to_vec());
        let signature = Some(ReportSignature { certificate, value: STANDARD.encode(value) });
        (SignedReport { report: report.to_owned(), signature }, der)
    }

    #[test]
    fn a_report_is_its_hosts_only_as_the_host_has_signed_it() {
        let (good, shown) = signed("a report");
        check(&good, &shown).unwrap();
        let unsigned = SignedReport { signature: None, ..good.clone() };
        assert_eq!(check(&unsigned, &shown), Err(NotSigned::Missing));
        let changed = SignedReport { report: "another report".to_owned(), ..good.clone() };
        assert_eq!(check(&changed, &shown), Err(NotSigned::Signature));
        let (other, shown_by_another) = signed("a report");
        assert_eq!(check(&other, &shown), Err(NotSigned::Certificate));
        assert_eq!(check(&good, &shown_by_another), Err(NotSigned::Certificate));
        // The certificate of this host beside the signature of another.
        let certificate = good.signature.clone().unwrap().certificate;
        let value = other.signature.unwrap().value;
        for value in [value, "no base64".to_owned(), String::new()] {
            let signature = Some(ReportSignature { certificate: certificate.clone(), value });
            let mixed = SignedReport { signature, ..good.clone() };
            assert_eq!(check(&mixed, &shown), Err(NotSigned::Signature));
        }
    }
}
