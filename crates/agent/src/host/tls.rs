//! Whom TLS lets in: an agent is called by the server of its control plane and by nobody else, not even
//! by another host of it.

use std::sync::Arc;

use rustls::client::danger::HandshakeSignatureValid;
use rustls::crypto::CryptoProvider;
use rustls::pki_types::{CertificateDer, UnixTime};
use rustls::server::WebPkiClientVerifier;
use rustls::server::danger::{ClientCertVerified, ClientCertVerifier};
use rustls::{DigitallySignedStruct, DistinguishedName, RootCertStore, SignatureScheme};
use vmseal_api::client::role::{Role, check};

pub use vmseal_api::client::role::SERVER_ROLE;

/// Accepts client certificates of one authority that carry [`SERVER_ROLE`].
#[derive(Debug)]
pub struct ServerRole(Arc<dyn ClientCertVerifier>);

impl ServerRole {
    /// Certificates of this authority.
    ///
    /// # Errors
    /// What is wrong with the authority's certificate.
    pub fn new(
        authority: CertificateDer<'static>,
        provider: Arc<CryptoProvider>,
    ) -> Result<Self, String> {
        let mut roots = RootCertStore::empty();
        roots.add(authority).map_err(|error| error.to_string())?;
        WebPkiClientVerifier::builder_with_provider(Arc::new(roots), provider)
            .build()
            .map(Self)
            .map_err(|error| error.to_string())
    }
}

impl ClientCertVerifier for ServerRole {
    fn root_hint_subjects(&self) -> &[DistinguishedName] {
        self.0.root_hint_subjects()
    }

    fn verify_client_cert(
        &self,
        end_entity: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        now: UnixTime,
    ) -> Result<ClientCertVerified, rustls::Error> {
        let verified = self.0.verify_client_cert(end_entity, intermediates, now)?;
        check(end_entity, Role::Server).map(|()| verified).inspect_err(|_| {
            tracing::warn!(
                "a certificate of this control plane that is not its server's was refused"
            );
        })
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        self.0.verify_tls12_signature(message, certificate, signature)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        self.0.verify_tls13_signature(message, certificate, signature)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.0.supported_verify_schemes()
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use rcgen::{BasicConstraints, CertificateParams, IsCa, Issuer, KeyPair, SanType};
    use vmseal_api::client::host_server_name;
    use vmseal_api::client::role::HOST_ROLE;
    use vmseal_api::id::HostId;
    use zeroize::Zeroizing;

    use super::*;
    use crate::host::identity::Identity;

    /// A control plane's authority, for tests.
    pub struct Authority {
        pub certificate: rcgen::Certificate,
        issuer: Issuer<'static, KeyPair>,
    }

    impl Authority {
        pub fn new() -> Self {
            let key = KeyPair::generate().unwrap();
            let mut params = CertificateParams::default();
            params.is_ca = IsCa::Ca(BasicConstraints::Constrained(0));
            let certificate = params.self_signed(&key).unwrap();
            Self { certificate, issuer: Issuer::new(params, key) }
        }

        pub fn sign(&self, names: Vec<SanType>) -> (rcgen::Certificate, KeyPair) {
            let key = KeyPair::generate().unwrap();
            let mut params = CertificateParams::default();
            params.subject_alt_names = names;
            (params.signed_by(&key, &self.issuer).unwrap(), key)
        }

        pub fn sign_request(&self, pem: &str) -> rcgen::Certificate {
            let request = rcgen::CertificateSigningRequestParams::from_pem(pem).unwrap();
            request.signed_by(&self.issuer).unwrap()
        }

        pub fn host(&self) -> Identity {
            let host = HostId::new();
            let name = SanType::DnsName(host_server_name(host).try_into().unwrap());
            let (certificate, key) = self.sign(vec![name]);
            Identity {
                host,
                name: "here".to_owned(),
                address: "127.0.0.1:0".to_owned(),
                server: "https://127.0.0.1:1".to_owned(),
                certificate: certificate.pem(),
                authority: self.certificate.pem(),
                key: Zeroizing::new(key.serialize_pem()),
            }
        }
    }

    #[test]
    fn the_servers_certificate_is_accepted_and_a_hosts_or_strangers_is_not() {
        let provider = Arc::new(rustls::crypto::aws_lc_rs::default_provider());
        let authority = Authority::new();
        let role = ServerRole::new(authority.certificate.der().clone(), provider).unwrap();
        let accepted = |certificate: &rcgen::Certificate| {
            role.verify_client_cert(certificate.der(), &[], UnixTime::now()).is_ok()
        };
        let uri = |uri: &str| vec![SanType::URI(uri.try_into().unwrap())];
        let dns = |name: &str| vec![SanType::DnsName(name.try_into().unwrap())];
        assert!(accepted(&authority.sign(uri(SERVER_ROLE)).0));
        assert!(!accepted(&authority.sign(uri("urn:vmseal:server2")).0));
        assert!(!accepted(&authority.sign(dns("urn:vmseal:server")).0));
        assert!(!accepted(&authority.sign(vec![]).0));
        let both = [uri(SERVER_ROLE), uri(HOST_ROLE)].concat();
        assert!(!accepted(&authority.sign(both).0));
        assert!(!accepted(&Authority::new().sign(uri(SERVER_ROLE)).0));
    }
}
