//! The streams of a migration: one connection between two hosts each, with a handshake and frames. docs/formats/migration-wire.md
//!
//! ```text
//!  connecting end                                accepting end
//!  Connecting ── hello ────────────────────────►  Hello::decode: which migration?
//!             ◄─ hello and proof of its spec ──  Accepting
//!  Proving    ── proof of its spec ────────────►  Accepted: this stream is taken, once
//!             ◄─ first frame: accepted ────────
//!  Ends       ◄═ frames, either way, up to an end each ═►  Ends
//! ```
//! Both ends have the same spec. The keys of the frames follow from its key, both hellos and the direction: where the ends disagree
//! about anything that the hellos say, nothing opens. A handshake is used up by its next step, so it makes one pair of ends at most.

mod hello;

use uuid::Uuid;
use vmseal_secret::SecretBytes;
use vmseal_secret::derive::{DERIVED_LEN, DeriveError, migration_proof_key};

pub use hello::{
    ACCEPTED_LEN, ANSWER_LEN, Accepted, Accepting, Connecting, HELLO_LEN, Hello, PROOF_LEN, Proving,
};

use crate::frame::{FrameError, Kind, Opener, Sealer};

/// The version of the protocol.
pub const VERSION: u16 = 1;

/// The most streams of a migration: beyond a dozen connections more are slower, not faster.
pub const STREAMS_MAX: u16 = 64;

/// The frame by which the accepting end says that it has taken the stream. It is empty.
pub const ACCEPTED: Kind = Kind::new(2);

/// What protects the frames. The spec says it on both ends; a connection that says otherwise is refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Cipher {
    /// AES-256-GCM.
    Aes256Gcm,
    /// Nothing. Both ends prove that they have the spec; an attacker between them can read and change the frames.
    None,
}

impl Cipher {
    fn number(self) -> u8 {
        match self {
            Self::Aes256Gcm => 1,
            Self::None => 2,
        }
    }
}

/// What the control plane tells both ends of a migration. It serves one session.
#[derive(Debug)]
pub struct Spec {
    migration: Uuid,
    key: SecretBytes,
    proof_key: SecretBytes,
    nonce: u64,
    streams: u16,
    cipher: Cipher,
}

impl Spec {
    /// A spec with a key of 32 bytes and this many streams, at least one.
    ///
    /// # Errors
    /// [`HelloError::Spec`], [`HelloError::StreamCount`].
    pub fn new(
        migration: Uuid,
        key: SecretBytes,
        nonce: u64,
        streams: u16,
        cipher: Cipher,
    ) -> Result<Self, HelloError> {
        if !(1..=STREAMS_MAX).contains(&streams) {
            return Err(HelloError::StreamCount(streams));
        }
        let proof_key = migration_proof_key(&key, nonce, *migration.as_bytes())?;
        assert_eq!(key.len(), DERIVED_LEN, "the derivation takes no other length");
        Ok(Self { migration, key, proof_key, nonce, streams, cipher })
    }

    /// The migration's id.
    #[must_use]
    pub fn migration(&self) -> Uuid {
        self.migration
    }

    /// How many streams it has: they are numbered from 0.
    #[must_use]
    pub fn streams(&self) -> u16 {
        self.streams
    }

    /// What protects its frames.
    #[must_use]
    pub fn cipher(&self) -> Cipher {
        self.cipher
    }
}

/// Which end of a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Role {
    /// The one that connects.
    Connecting,
    /// The one that listens.
    Accepting,
}

impl Role {
    fn number(self) -> u8 {
        match self {
            Self::Connecting => 1,
            Self::Accepting => 2,
        }
    }

    /// The direction in which this end sends.
    fn direction(self) -> &'static str {
        match self {
            Self::Connecting => "to the accepting end",
            Self::Accepting => "to the connecting end",
        }
    }

    fn other(self) -> Self {
        match self {
            Self::Connecting => Self::Accepting,
            Self::Accepting => Self::Connecting,
        }
    }
}

/// What one end of a connection has after the handshake.
pub struct Ends {
    /// Seals what it sends.
    pub sealer: Sealer,
    /// Opens what it gets.
    pub opener: Opener,
}

/// Why a connection did not become a stream.
#[derive(Debug, thiserror::Error)]
pub enum HelloError {
    /// Something else speaks.
    #[error("what it said is no hello of a migration")]
    NotAHello,
    /// Another version.
    #[error("it speaks version {0} of the migration protocol; this host speaks version {VERSION}")]
    Version(u16),
    /// A hello with numbers that none has.
    #[error("its hello is damaged")]
    Damaged,
    /// A hello of our own, sent back.
    #[error("it takes the same side of the connection as this host")]
    SameRole,
    /// Another migration's.
    #[error("it speaks of migration {0}, which is not this one")]
    OtherMigration(Uuid),
    /// Another stream's.
    #[error("it speaks of stream {found}, not of stream {expected}")]
    OtherStream {
        /// The stream of this connection.
        expected: u16,
        /// What it said.
        found: u16,
    },
    /// A stream that the spec does not have.
    #[error("it asked for stream {stream} of {streams}, counted from 0")]
    NoSuchStream {
        /// The stream.
        stream: u16,
        /// How many the spec has.
        streams: u16,
    },
    /// The specs differ.
    #[error("it counts {found} streams, this host {expected}")]
    OtherCount {
        /// How many this host's spec has.
        expected: u16,
        /// What it said.
        found: u16,
    },
    /// The specs differ.
    #[error("it wants {found:?} as cipher; the spec of this host says {expected:?}")]
    OtherCipher {
        /// What the spec of this host says.
        expected: Cipher,
        /// What it said.
        found: Cipher,
    },
    /// It does not have the spec's key or nonce, or somebody changed what was said.
    #[error("it did not prove that it has the key of the migration")]
    WrongProof,
    /// The first frame is not the one that says that the stream was taken.
    #[error("it did not confirm the stream")]
    NotConfirmed,
    /// The first frame does not open.
    #[error("its first frame: {0}")]
    Frame(#[from] FrameError),
    /// The spec has too few or too many streams.
    #[error("a migration has 1 to {STREAMS_MAX} streams; this one has {0}")]
    StreamCount(u16),
    /// No key could be derived.
    #[error(transparent)]
    Spec(#[from] DeriveError),
    /// AWS-LC gave no random bytes.
    #[error("the random generator of AWS-LC failed")]
    Random,
}

#[cfg(test)]
mod tests;
