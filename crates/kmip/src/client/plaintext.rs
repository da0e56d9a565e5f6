//! Decrypts what a server sends into secret memory and nowhere else.
//!
//! rustls decrypts records into its own buffers, which are ordinary memory and are not wiped: a key
//! would stay in them, and in freed memory. So rustls gets AWS-LC's cipher suites with a different last
//! step: application data is decrypted into the [`Plaintext`] of its connection, and rustls gets as many
//! zeroes instead.
//!
//! ```text
//!   socket --ciphertext--> rustls --record--> Decrypter --bytes--> Plaintext --+
//!                            ^                    |                            +--> the answer
//!                            +------- zeroes -----+--- their count ------------+
//! ```
//! A decrypter does not know its connection: the code that polls a connection lends its `Plaintext` to
//! the thread during the poll. Alerts and handshake messages take the usual path; application data
//! outside of such a poll, which a server sends unasked, is an error.

use std::cell::RefCell;
use std::io;
use std::sync::{Arc, LazyLock};

use rustls::crypto::cipher::{
    AeadKey, InboundOpaqueMessage, InboundPlainMessage, Iv, KeyBlockShape, MessageDecrypter,
    MessageEncrypter, Tls12AeadAlgorithm, Tls13AeadAlgorithm, UnsupportedOperationError,
};
use rustls::crypto::{CipherSuiteCommon, CryptoProvider, aws_lc_rs};
use rustls::{
    ConnectionTrafficSecrets, ContentType, Error, SupportedCipherSuite, Tls12CipherSuite,
    Tls13CipherSuite,
};
use vmseal_secret::{MemoryError, SecretBytes};

/// The longest record, in bytes: 2^14 of content and 2^11 of what TLS 1.2 may add (RFC 5246 section 6.2.3).
const RECORD_MAX: usize = (1 << 14) + (1 << 11);

/// The most bytes that are read at once.
pub(super) const READ_MAX: usize = 4096;

/// How many decrypted bytes are unread at most: those of one read, and those of the last records that
/// rustls took from the socket for it: either one of full length, or those that came with a shorter one.
const WAITING_MAX: usize = READ_MAX + RECORD_MAX;

thread_local! {
    /// The plaintext of the connection that this thread is polling.
    static LENT: RefCell<Option<Plaintext>> = const { RefCell::new(None) };
}

/// Decrypted application data of one connection.
pub(super) struct Plaintext {
    /// [`RECORD_MAX`] bytes to decrypt a record in, then [`WAITING_MAX`] bytes for unread data.
    memory: SecretBytes,
    /// The range of the unread data within the second part.
    waiting: std::ops::Range<usize>,
}

impl Plaintext {
    pub(super) fn new() -> Result<Self, MemoryError> {
        Ok(Self { memory: SecretBytes::zeroed(RECORD_MAX + WAITING_MAX)?, waiting: 0..0 })
    }

    /// Lends `place` to this thread while `poll` polls its connection.
    pub(super) fn lend<T>(place: &mut Option<Self>, poll: impl FnOnce() -> T) -> T {
        LENT.set(place.take());
        let polled = poll();
        *place = LENT.take();
        polled
    }

    /// Takes the bytes for which rustls has delivered zeroes.
    pub(super) fn take(&mut self, into: &mut [u8]) -> io::Result<()> {
        if into.len() > self.waiting.len() {
            return Err(io::Error::other("TLS delivers more bytes than were decrypted"));
        }
        let until = self.waiting.start + into.len();
        let waiting = &mut self.memory.expose_mut()[RECORD_MAX..];
        let taken = &mut waiting[self.waiting.start..until];
        into.copy_from_slice(taken);
        taken.fill(0);
        self.waiting.start = until;
        Ok(())
    }

    /// Decrypts a record into this buffer. The message for rustls has zeroes as application data.
    fn decrypt<'a>(
        &mut self,
        decrypter: &mut dyn MessageDecrypter,
        mut message: InboundOpaqueMessage<'a>,
        sequence: u64,
    ) -> Result<InboundPlainMessage<'a>, Error> {
        let (record, waiting) = self.memory.expose_mut().split_at_mut(RECORD_MAX);
        let record =
            record.get_mut(..message.payload.len()).ok_or(Error::PeerSentOversizedRecord)?;
        record.copy_from_slice(&message.payload);
        let plain = InboundOpaqueMessage::new(message.typ, message.version, record);
        let plain = decrypter.decrypt(plain, sequence)?;
        (message.typ, message.version) = (plain.typ, plain.version);
        message.payload.truncate(plain.payload.len());
        if plain.typ == ContentType::ApplicationData {
            waiting.copy_within(self.waiting.clone(), 0);
            self.waiting = 0..self.waiting.len();
            let end = self.waiting.end + plain.payload.len();
            let room = waiting.get_mut(self.waiting.end..end).ok_or_else(unasked)?;
            room.copy_from_slice(plain.payload);
            self.waiting.end = end;
            message.payload.fill(0);
        } else {
            message.payload.copy_from_slice(plain.payload);
        }
        Ok(message.into_plain_message())
    }
}

fn unasked() -> Error {
    Error::General("the server sends more than it was asked for".to_owned())
}

/// AWS-LC's decrypter, writing to [`Plaintext`].
struct Decrypter(Box<dyn MessageDecrypter>);

impl MessageDecrypter for Decrypter {
    fn decrypt<'a>(
        &mut self,
        message: InboundOpaqueMessage<'a>,
        sequence: u64,
    ) -> Result<InboundPlainMessage<'a>, Error> {
        LENT.with_borrow_mut(|lent| match lent {
            Some(plaintext) => plaintext.decrypt(&mut *self.0, message, sequence),
            None => match self.0.decrypt(message, sequence)? {
                plain if plain.typ == ContentType::ApplicationData => Err(unasked()),
                plain => Ok(plain),
            },
        })
    }
}

/// AES-GCM or ChaCha20-Poly1305 in TLS 1.2, with [`Decrypter`].
struct Tls12(&'static dyn Tls12AeadAlgorithm);

impl Tls12AeadAlgorithm for Tls12 {
    fn encrypter(&self, key: AeadKey, iv: &[u8], extra: &[u8]) -> Box<dyn MessageEncrypter> {
        self.0.encrypter(key, iv, extra)
    }

    fn decrypter(&self, key: AeadKey, iv: &[u8]) -> Box<dyn MessageDecrypter> {
        Box::new(Decrypter(self.0.decrypter(key, iv)))
    }

    fn key_block_shape(&self) -> KeyBlockShape {
        self.0.key_block_shape()
    }

    fn extract_keys(
        &self,
        key: AeadKey,
        iv: &[u8],
        explicit: &[u8],
    ) -> Result<ConnectionTrafficSecrets, UnsupportedOperationError> {
        self.0.extract_keys(key, iv, explicit)
    }
}

/// The same in TLS 1.3.
struct Tls13(&'static dyn Tls13AeadAlgorithm);

impl Tls13AeadAlgorithm for Tls13 {
    fn encrypter(&self, key: AeadKey, iv: Iv) -> Box<dyn MessageEncrypter> {
        self.0.encrypter(key, iv)
    }

    fn decrypter(&self, key: AeadKey, iv: Iv) -> Box<dyn MessageDecrypter> {
        Box::new(Decrypter(self.0.decrypter(key, iv)))
    }

    fn key_len(&self) -> usize {
        self.0.key_len()
    }

    fn extract_keys(
        &self,
        key: AeadKey,
        iv: Iv,
    ) -> Result<ConnectionTrafficSecrets, UnsupportedOperationError> {
        self.0.extract_keys(key, iv)
    }
}

fn common(of: &CipherSuiteCommon) -> CipherSuiteCommon {
    CipherSuiteCommon {
        suite: of.suite,
        hash_provider: of.hash_provider,
        confidentiality_limit: of.confidentiality_limit,
    }
}

/// AWS-LC's suite, with [`Decrypter`]. rustls needs suites that live as long as the process.
fn guarded(suite: SupportedCipherSuite) -> SupportedCipherSuite {
    match suite {
        SupportedCipherSuite::Tls12(suite) => {
            SupportedCipherSuite::Tls12(Box::leak(Box::new(Tls12CipherSuite {
                common: common(&suite.common),
                prf_provider: suite.prf_provider,
                kx: suite.kx,
                sign: suite.sign,
                aead_alg: Box::leak(Box::new(Tls12(suite.aead_alg))),
            })))
        }
        SupportedCipherSuite::Tls13(suite) => {
            SupportedCipherSuite::Tls13(Box::leak(Box::new(Tls13CipherSuite {
                common: common(&suite.common),
                hkdf_provider: suite.hkdf_provider,
                aead_alg: Box::leak(Box::new(Tls13(suite.aead_alg))),
                quic: None,
            })))
        }
    }
}

/// AWS-LC for TLS whose application data goes to [`Plaintext`].
pub(super) fn provider() -> Arc<CryptoProvider> {
    static SUITES: LazyLock<Vec<SupportedCipherSuite>> = LazyLock::new(|| {
        aws_lc_rs::default_provider().cipher_suites.into_iter().map(guarded).collect()
    });
    Arc::new(CryptoProvider { cipher_suites: SUITES.clone(), ..aws_lc_rs::default_provider() })
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};

    use rustls::pki_types::ServerName;
    use rustls::{ClientConnection, ServerConnection, SupportedProtocolVersion, version};

    use super::*;
    use crate::client::tls;
    use crate::testing::{Authority, Validity, server_config};

    /// A client and a server that have done their handshake.
    fn connected(
        version: &'static SupportedProtocolVersion,
    ) -> (ClientConnection, ServerConnection) {
        let authority = Authority::new("kms");
        let certificate = authority.server(&["kms"], Validity::Now);
        let server = server_config(&certificate, None, &[version]);
        let identity = authority.client("vmseal", Validity::Now).identity();
        let client = Arc::new(tls::config(&authority.trust(), &identity).unwrap());
        let name = ServerName::try_from("kms").unwrap();
        let mut client = ClientConnection::new(client, name).unwrap();
        let mut server = ServerConnection::new(Arc::new(server)).unwrap();
        while client.is_handshaking() || server.is_handshaking() || client.wants_write() {
            let mut wire = Vec::new();
            client.write_tls(&mut wire).unwrap();
            server.read_tls(&mut &wire[..]).unwrap();
            server.process_new_packets().unwrap();
            deliver(&mut server, &mut client).unwrap();
        }
        assert_eq!(client.protocol_version(), Some(version.version));
        (client, server)
    }

    fn deliver(server: &mut ServerConnection, client: &mut ClientConnection) -> Result<(), Error> {
        let mut wire = Vec::new();
        while server.wants_write() {
            server.write_tls(&mut wire).unwrap();
        }
        let mut wire = &wire[..];
        while !wire.is_empty() {
            client.read_tls(&mut wire).unwrap();
            client.process_new_packets()?;
        }
        Ok(())
    }

    #[test]
    fn rustls_sees_zeroes_where_the_plaintext_has_what_was_sent() {
        for version in [&version::TLS12, &version::TLS13] {
            let (mut client, mut server) = connected(version);
            let mut place = Some(Plaintext::new().unwrap());
            for round in 0..20u8 {
                // Two records, read in two parts whose boundary is not that of the records.
                let sent: Vec<u8> = (0..200).map(|at| round ^ at).collect();
                server.writer().write_all(&sent[..150]).unwrap();
                server.writer().write_all(&sent[150..]).unwrap();
                Plaintext::lend(&mut place, || deliver(&mut server, &mut client)).unwrap();
                let mut seen = [1; 200];
                client.reader().read_exact(&mut seen).unwrap();
                assert_eq!(seen, [0; 200]);
                let mut taken = [0; 200];
                let (first, second) = taken.split_at_mut(80);
                let plaintext = place.as_mut().unwrap();
                plaintext.take(first).unwrap();
                plaintext.take(second).unwrap();
                assert_eq!(taken[..], sent);
                assert!(plaintext.take(&mut [0]).is_err(), "no more than was sent");
            }
        }
    }

    #[test]
    fn unread_or_unrequested_data_is_an_error() {
        for version in [&version::TLS12, &version::TLS13] {
            let (mut client, mut server) = connected(version);
            server.writer().write_all(b"unasked").unwrap();
            assert_eq!(deliver(&mut server, &mut client), Err(unasked()));

            let (mut client, mut server) = connected(version);
            let mut place = Some(Plaintext::new().unwrap());
            for _ in 0..WAITING_MAX / 2048 {
                server.writer().write_all(&[7; 2048]).unwrap();
                Plaintext::lend(&mut place, || deliver(&mut server, &mut client)).unwrap();
                client.reader().read_exact(&mut [0; 2048]).unwrap();
            }
            server.writer().write_all(&[7]).unwrap();
            let more = Plaintext::lend(&mut place, || deliver(&mut server, &mut client));
            assert_eq!(more, Err(unasked()));
        }
    }
}
