//! Reads the details of a certificate, and writes it as PEM.

use jiff::Timestamp;
use rustls::pki_types::CertificateDer;
use rustls::pki_types::pem::PemObject;
use vmseal_api::kmip::Certificate;
use vmseal_kmip::client::Fingerprint;
use x509_parser::certificate::X509Certificate;
use x509_parser::prelude::FromDer;

/// A certificate as PEM (RFC 7468).
pub(crate) fn pem_of(der: &CertificateDer<'_>) -> String {
    let lines = pem::EncodeConfig::new().set_line_ending(pem::LineEnding::LF);
    pem::encode_config(&pem::Pem::new("CERTIFICATE", der.to_vec()), lines)
}

/// The details of a certificate (the first of a PEM).
pub(super) fn summary(pem: &str) -> Option<Certificate> {
    of_der(&CertificateDer::from_pem_slice(pem.as_bytes()).ok()?)
}

/// The details of a certificate in DER.
pub(crate) fn of_der(der: &CertificateDer<'_>) -> Option<Certificate> {
    let (_, parsed) = X509Certificate::from_der(der).ok()?;
    let shown = |name: String| name.chars().filter(|c| !c.is_control()).take(200).collect();
    Some(Certificate {
        fingerprint: Fingerprint::of(der).to_string(),
        subject: shown(parsed.subject().to_string()),
        issuer: shown(parsed.issuer().to_string()),
        not_before: Timestamp::from_second(parsed.validity().not_before.timestamp()).ok()?,
        not_after: Timestamp::from_second(parsed.validity().not_after.timestamp()).ok()?,
    })
}
