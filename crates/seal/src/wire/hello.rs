//! The handshake of a connection, step by step, without a socket.
//!
//! ```text
//! hello (48): "VMSEALMG" (8) ‖ version (2) ‖ role (1) ‖ cipher (1) ‖ stream (2) ‖ streams (2) ‖ migration (16) ‖ random (16)
//! answer (80): hello of the accepting end ‖ its proof
//! proof (32): HMAC-SHA256 under the spec's proof key of role ‖ hello of the connecting end ‖ hello of the accepting end
//! ```

use uuid::Uuid;
use vmseal_secret::derive::{MIGRATION_SALT_LEN, MigrationStream, migration_frames_key};
use vmseal_secret::mac::{MAC_LEN, mac, verify};

use super::{ACCEPTED, Cipher, Ends, HelloError, Role, Spec, VERSION};
use crate::frame::{Content, FrameError, HEAD_LEN, Kind, Opener, Sealer, TAG_LEN};

/// The length of a hello, in bytes.
pub const HELLO_LEN: usize = 48;

/// The length of a proof, in bytes.
pub const PROOF_LEN: usize = MAC_LEN;

/// The length of the accepting end's answer, in bytes.
pub const ANSWER_LEN: usize = HELLO_LEN + PROOF_LEN;

/// The length of the frame that confirms a stream, in bytes.
pub const ACCEPTED_LEN: usize = HEAD_LEN + TAG_LEN;

const MAGIC: &[u8; 8] = b"VMSEALMG";

/// The length of what each end contributes to the keys, in bytes.
const RANDOM_LEN: usize = 16;

/// The first thing that an end says. It proves nothing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Hello {
    role: Role,
    cipher: Cipher,
    stream: u16,
    streams: u16,
    migration: Uuid,
    random: [u8; RANDOM_LEN],
}

impl Hello {
    fn new(spec: &Spec, role: Role, stream: u16) -> Result<Self, HelloError> {
        if stream >= spec.streams {
            return Err(HelloError::NoSuchStream { stream, streams: spec.streams });
        }
        let mut random = [0; RANDOM_LEN];
        aws_lc_rs::rand::fill(&mut random).map_err(|_| HelloError::Random)?;
        let (migration, cipher, streams) = (spec.migration, spec.cipher, spec.streams);
        Ok(Self { role, cipher, stream, streams, migration, random })
    }

    /// Its bytes.
    #[must_use]
    pub fn encode(&self) -> [u8; HELLO_LEN] {
        let mut bytes = [0; HELLO_LEN];
        bytes[..8].copy_from_slice(MAGIC);
        bytes[8..10].copy_from_slice(&VERSION.to_be_bytes());
        bytes[10] = self.role.number();
        bytes[11] = self.cipher.number();
        bytes[12..14].copy_from_slice(&self.stream.to_be_bytes());
        bytes[14..16].copy_from_slice(&self.streams.to_be_bytes());
        bytes[16..32].copy_from_slice(self.migration.as_bytes());
        bytes[32..].copy_from_slice(&self.random);
        bytes
    }

    /// The hello that these bytes are.
    ///
    /// # Errors
    /// [`HelloError::NotAHello`], [`HelloError::Version`], [`HelloError::Damaged`].
    pub fn decode(bytes: &[u8; HELLO_LEN]) -> Result<Self, HelloError> {
        if &bytes[..8] != MAGIC {
            return Err(HelloError::NotAHello);
        }
        let number = |at: usize| u16::from_be_bytes([bytes[at], bytes[at + 1]]);
        if number(8) != VERSION {
            return Err(HelloError::Version(number(8)));
        }
        let role = match bytes[10] {
            1 => Role::Connecting,
            2 => Role::Accepting,
            _ => return Err(HelloError::Damaged),
        };
        let cipher = match bytes[11] {
            1 => Cipher::Aes256Gcm,
            2 => Cipher::None,
            _ => return Err(HelloError::Damaged),
        };
        let (mut migration, mut random) = ([0; 16], [0; RANDOM_LEN]);
        migration.copy_from_slice(&bytes[16..32]);
        random.copy_from_slice(&bytes[32..]);
        let (stream, streams, migration) = (number(12), number(14), Uuid::from_bytes(migration));
        Ok(Self { role, cipher, stream, streams, migration, random })
    }

    /// The migration that it speaks of.
    #[must_use]
    pub fn migration(&self) -> Uuid {
        self.migration
    }

    /// The stream that it speaks of.
    #[must_use]
    pub fn stream(&self) -> u16 {
        self.stream
    }

    /// Whether it is one of the other end and agrees with the spec.
    fn check(&self, spec: &Spec, role: Role) -> Result<(), HelloError> {
        if self.role != role {
            return Err(HelloError::SameRole);
        }
        if self.migration != spec.migration {
            return Err(HelloError::OtherMigration(self.migration));
        }
        if self.streams != spec.streams {
            return Err(HelloError::OtherCount { expected: spec.streams, found: self.streams });
        }
        if self.cipher != spec.cipher {
            return Err(HelloError::OtherCipher { expected: spec.cipher, found: self.cipher });
        }
        Ok(())
    }
}

/// What both ends have said.
struct Said {
    connecting: Hello,
    accepting: Hello,
}

impl Said {
    fn parts(&self, role: Role) -> ([u8; 1], [u8; HELLO_LEN], [u8; HELLO_LEN]) {
        ([role.number()], self.connecting.encode(), self.accepting.encode())
    }

    /// The proof of the end with this role.
    fn proof(&self, spec: &Spec, role: Role) -> [u8; PROOF_LEN] {
        let (role, connecting, accepting) = self.parts(role);
        mac(&spec.proof_key, &[&role, &connecting, &accepting])
    }

    fn check_proof(&self, spec: &Spec, role: Role, proof: &[u8]) -> Result<(), HelloError> {
        let (role, connecting, accepting) = self.parts(role);
        verify(&spec.proof_key, &[&role, &connecting, &accepting], proof)
            .map_err(|_| HelloError::WrongProof)
    }

    /// Sealer and opener of the end with this role. It takes what was said: no second pair follows from it.
    fn ends(self, spec: &Spec, role: Role) -> Result<Ends, HelloError> {
        if spec.cipher == Cipher::None {
            return Ok(Ends { sealer: Sealer::plain(), opener: Opener::plain() });
        }
        let mut salt = [0; MIGRATION_SALT_LEN];
        salt[..8].copy_from_slice(&spec.nonce.to_be_bytes());
        salt[8..24].copy_from_slice(&self.connecting.random);
        salt[24..].copy_from_slice(&self.accepting.random);
        let key = |from: Role| {
            let of = MigrationStream {
                version: VERSION,
                migration: *spec.migration.as_bytes(),
                direction: from.direction(),
                cipher: spec.cipher.number(),
                stream: self.connecting.stream,
                streams: spec.streams,
            };
            migration_frames_key(&spec.key, &salt, &of)
        };
        let sealer = Sealer::new(&key(role)?)?;
        let opener = Opener::of_wire(&key(role.other())?)?;
        Ok(Ends { sealer, opener })
    }
}

/// The connecting end, which has said hello.
pub struct Connecting<'a> {
    spec: &'a Spec,
    hello: Hello,
}

impl<'a> Connecting<'a> {
    /// The beginning of a connection for this stream, and the hello to send.
    ///
    /// # Errors
    /// [`HelloError::NoSuchStream`], [`HelloError::Random`].
    pub fn new(spec: &'a Spec, stream: u16) -> Result<(Self, [u8; HELLO_LEN]), HelloError> {
        let hello = Hello::new(spec, Role::Connecting, stream)?;
        Ok(Self::with(spec, hello))
    }

    pub(super) fn with(spec: &'a Spec, hello: Hello) -> (Self, [u8; HELLO_LEN]) {
        (Self { spec, hello }, hello.encode())
    }

    /// Checks what the other end has answered: it has the same spec. The proof to send.
    ///
    /// # Errors
    /// [`HelloError`]: the connection is of no use.
    pub fn answered(
        self,
        answer: &[u8; ANSWER_LEN],
    ) -> Result<(Proving, [u8; PROOF_LEN]), HelloError> {
        let Some((hello, proof)) = answer.split_first_chunk() else {
            return Err(HelloError::NotAHello);
        };
        let accepting = Hello::decode(hello)?;
        accepting.check(self.spec, Role::Accepting)?;
        if accepting.stream != self.hello.stream {
            let (expected, found) = (self.hello.stream, accepting.stream);
            return Err(HelloError::OtherStream { expected, found });
        }
        let said = Said { connecting: self.hello, accepting };
        said.check_proof(self.spec, Role::Accepting, proof)?;
        let own = said.proof(self.spec, Role::Connecting);
        Ok((Proving { ends: said.ends(self.spec, Role::Connecting)? }, own))
    }
}

/// The connecting end, which has sent its proof.
pub struct Proving {
    ends: Ends,
}

impl Proving {
    /// Opens the first frame, which confirms the stream.
    ///
    /// # Errors
    /// [`HelloError::Frame`], [`HelloError::NotConfirmed`].
    pub fn accepted(mut self, frame: [u8; ACCEPTED_LEN]) -> Result<Ends, HelloError> {
        let Some((head, rest)) = frame.split_first_chunk() else {
            return Err(HelloError::NotConfirmed);
        };
        let head = self.ends.opener.head(*head)?;
        let mut rest = rest.to_vec();
        match self.ends.opener.open(&head, &mut rest) {
            Ok(Content::Data(ACCEPTED, [])) => Ok(self.ends),
            Ok(_) => Err(HelloError::NotConfirmed),
            Err(error) => Err(error.into()),
        }
    }
}

/// The accepting end, which has answered.
pub struct Accepting<'a> {
    spec: &'a Spec,
    said: Said,
}

impl<'a> Accepting<'a> {
    /// The answer to a hello that speaks of this spec's migration.
    ///
    /// # Errors
    /// [`HelloError`]: it does not agree with the spec.
    pub fn new(spec: &'a Spec, hello: Hello) -> Result<(Self, [u8; ANSWER_LEN]), HelloError> {
        hello.check(spec, Role::Connecting)?;
        Ok(Self::with(spec, hello, Hello::new(spec, Role::Accepting, hello.stream)?))
    }

    pub(super) fn with(
        spec: &'a Spec,
        connecting: Hello,
        accepting: Hello,
    ) -> (Self, [u8; ANSWER_LEN]) {
        let said = Said { connecting, accepting };
        let mut answer = [0; ANSWER_LEN];
        answer[..HELLO_LEN].copy_from_slice(&accepting.encode());
        answer[HELLO_LEN..].copy_from_slice(&said.proof(spec, Role::Accepting));
        (Self { spec, said }, answer)
    }

    /// Checks the other end's proof. Only then keys are derived.
    ///
    /// # Errors
    /// [`HelloError::WrongProof`], [`HelloError::Spec`].
    pub fn proven(self, proof: &[u8; PROOF_LEN]) -> Result<Accepted, HelloError> {
        self.said.check_proof(self.spec, Role::Connecting, proof)?;
        let stream = self.said.connecting.stream;
        Ok(Accepted { stream, ends: self.said.ends(self.spec, Role::Accepting)? })
    }
}

/// The accepting end of a connection whose other end has the spec. Its owner makes sure that each stream is taken once.
pub struct Accepted {
    stream: u16,
    ends: Ends,
}

impl Accepted {
    /// The stream that it is.
    #[must_use]
    pub fn stream(&self) -> u16 {
        self.stream
    }

    /// Takes the stream: what to send first, and the ends.
    ///
    /// # Errors
    /// [`FrameError::Cipher`].
    pub fn take(mut self) -> Result<(Ends, [u8; ACCEPTED_LEN]), FrameError> {
        let frame = self.say(ACCEPTED)?;
        Ok((self.ends, frame))
    }

    pub(super) fn say(&mut self, kind: Kind) -> Result<[u8; ACCEPTED_LEN], FrameError> {
        let mut frame = [0; ACCEPTED_LEN];
        self.ends.sealer.seal(kind, &mut frame)?;
        Ok(frame)
    }
}

#[cfg(test)]
impl Hello {
    /// One with a given random, for what has to be the same each time.
    pub(super) fn given(spec: &Spec, role: Role, stream: u16, random: [u8; 16]) -> Self {
        Self { random, ..Self::new(spec, role, stream).unwrap() }
    }
}
