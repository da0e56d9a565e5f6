//! Exchanges raw bytes with a server, to record the answers of real servers.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::sync::Arc;

use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, PrivatePkcs8KeyDer};
use rustls::{ClientConfig, ClientConnection, RootCertStore, StreamOwned};

use super::certificates::{Authority, Issued};
use crate::client::Endpoint;
use crate::ttlv::{HEADER_LEN, Tag, message_len};

/// A connection that reads only the length of a KMIP message. Its answers are in ordinary memory.
pub struct RawConnection(StreamOwned<ClientConnection, TcpStream>);

impl RawConnection {
    /// Connects.
    #[must_use]
    pub fn open(endpoint: &Endpoint, authority: &Authority, identity: &Issued) -> Self {
        let der = |pem: &str| CertificateDer::from_pem_slice(pem.as_bytes()).expect("PEM");
        let mut roots = RootCertStore::empty();
        roots.add(der(authority.certificate())).expect("an authority");
        let key = PrivatePkcs8KeyDer::from(identity.private_key().expose().to_vec());
        let provider = Arc::new(rustls::crypto::aws_lc_rs::default_provider());
        let config = ClientConfig::builder_with_provider(provider)
            .with_safe_default_protocol_versions()
            .expect("TLS 1.2 and 1.3")
            .with_root_certificates(roots)
            .with_client_auth_cert(vec![der(&identity.certificate)], PrivateKeyDer::Pkcs8(key))
            .expect("a certificate with its key");
        let name = endpoint.name();
        let session = ClientConnection::new(Arc::new(config), name).expect("a session");
        let socket = TcpStream::connect((endpoint.host(), endpoint.port())).expect("a server");
        Self(StreamOwned::new(session, socket))
    }

    /// Sends a request and returns its answer.
    pub fn exchange(&mut self, request: &[u8]) -> Vec<u8> {
        self.0.write_all(request).expect("the server listens");
        let mut answer = vec![0; HEADER_LEN];
        self.0.read_exact(&mut answer).expect("the server answers");
        let header = *answer.first_chunk().expect("a header");
        let len = message_len(header, Tag::RESPONSE_MESSAGE).expect("a response");
        answer.resize(len, 0);
        self.0.read_exact(&mut answer[HEADER_LEN..]).expect("the server answers");
        answer
    }
}
