//! [`Client`]: the operations on keys at one server.

use std::fmt;
use std::sync::atomic::{AtomicI64, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Instant, SystemTime, UNIX_EPOCH};

use vmseal_secret::SecretBytes;

use super::connection::Peer;
use super::error::Error;
use super::observer::{Ended, Observer};
use super::pool::{Pool, Unanswered};
use super::settings::{Endpoint, Settings};
use super::tls::{self, SetupError};
use crate::fields::Violation;
use crate::message::{BATCH_MAX, Outcome, Refusal, request, responses};
use crate::operation::{
    Activate, AddAttribute, Create, Destroy, DiscoverVersions, Get, GetState, KeyId, Locate,
    Operation, Query, Revoke, ServerDescription, Text,
};
use crate::{ProtocolVersion, ResultReason, RevocationReason, State};

/// The versions of the DiscoverVersions requests: first the one that nearly all servers speak, then the
/// later ones.
const ASKED_IN: [ProtocolVersion; 4] =
    [ProtocolVersion::V1_1, ProtocolVersion::V1_4, ProtocolVersion::V1_3, ProtocolVersion::V1_2];

/// The versions of a server.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Versions {
    /// The version in use.
    pub spoken: ProtocolVersion,
    /// All versions that it names; a KMIP 1.0 server names none.
    pub offered: Vec<ProtocolVersion>,
}

/// A key to create. The default is a key like vCenter's, without attributes.
#[derive(Clone, Debug, Default)]
pub struct NewKey {
    /// The key.
    pub create: Create,
    /// Attributes by which an operator finds it at the server, sent as `x-NAME`; the server may refuse them.
    pub attributes: Vec<(Text, Text)>,
}

/// A key that was created and activated.
#[derive(Debug)]
pub struct CreatedKey {
    /// Its id.
    pub id: KeyId,
    /// The outcomes of adding the attributes. The key is usable without them.
    pub attributes: Result<Vec<Outcome<()>>, Error>,
}

/// A client of one server. Cheap to share by reference; many tasks may call every method at once, and
/// every call may be cancelled.
///
/// A request that changes something and gets no answer is [`Error::OutcomeUnknown`]: check the key's
/// state before sending it again.
pub struct Client {
    pool: Arc<Pool>,
    allowed: Vec<ProtocolVersion>,
    spoken: Mutex<Option<ProtocolVersion>>,
    next_batch_item: AtomicU64,
    observer: Option<Arc<dyn Observer>>,
}

impl fmt::Debug for Client {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Client").field("endpoint", self.endpoint()).finish_non_exhaustive()
    }
}

impl Client {
    /// Makes a client; does not connect yet.
    ///
    /// # Errors
    /// [`SetupError`].
    pub fn new(settings: Settings) -> Result<Self, SetupError> {
        let Settings { endpoint, trust, identity, timeouts, limits, versions, observer } = settings;
        let mut allowed = ProtocolVersion::SPOKEN.to_vec();
        allowed.retain(|version| versions.contains(version));
        if allowed.is_empty() {
            return Err(SetupError::NoVersion);
        }
        if limits.connections == 0 {
            return Err(SetupError::NoConnection);
        }
        let tls = Arc::new(tls::config(&trust, &identity)?);
        let certificate_ends = AtomicI64::new(0);
        let pool = Pool::new(Peer { endpoint, tls, identity, timeouts, certificate_ends }, limits);
        let (spoken, next_batch_item) = (Mutex::default(), AtomicU64::new(1));
        Ok(Self { pool, allowed, spoken, next_batch_item, observer })
    }

    /// The server.
    #[must_use]
    pub fn endpoint(&self) -> &Endpoint {
        &self.pool.peer.endpoint
    }

    /// The number of idle connections.
    #[must_use]
    pub fn idle_connections(&self) -> usize {
        self.pool.idle_count()
    }

    /// When the certificate that the server sent on its last connection expires, in seconds since 1970;
    /// `None` before the first connection.
    #[must_use]
    pub fn certificate_ends(&self) -> Option<i64> {
        Some(self.pool.peer.certificate_ends.load(Ordering::Relaxed)).filter(|ends| *ends != 0)
    }

    /// Asks which versions the server speaks, and uses the latest common one from then on. The first
    /// operation does so too. A server may be upgraded later: call this now and then, as vCenter does every
    /// five minutes.
    ///
    /// # Errors
    /// [`Error`]; [`Error::VersionNotSupported`] if there is no common one.
    pub async fn discover(&self) -> Result<Versions, Error> {
        let versions = self.negotiate().await?;
        *self.spoken() = Some(versions.spoken);
        Ok(versions)
    }

    /// Asks what the server is and which operations it offers.
    ///
    /// # Errors
    /// [`Error`].
    pub async fn query(&self) -> Result<ServerDescription, Error> {
        self.one(Query).await
    }

    /// Creates a key in state Pre-Active. Separate from [`Client::create_key`] for callers that record the
    /// id before anything else happens.
    ///
    /// # Errors
    /// [`Error`].
    pub async fn create(&self, create: Create) -> Result<KeyId, Error> {
        self.one(create).await
    }

    /// Creates a key and activates it, then adds its attributes, which may fail. vCenter does the same.
    ///
    /// # Errors
    /// [`Error`]; [`Error::NotActivated`] names the key if it was created.
    pub async fn create_key(&self, new: NewKey) -> Result<CreatedKey, Error> {
        let id = self.create(new.create).await?;
        if let Err(error) = self.activate(&id).await {
            return Err(Error::NotActivated { id, source: Box::new(error) });
        }
        let attributes = self.add_attributes(&id, new.attributes).await;
        Ok(CreatedKey { id, attributes })
    }

    /// Activates a Pre-Active key.
    ///
    /// # Errors
    /// [`Error`]; servers refuse it for a key in another state, even one that is active already.
    pub async fn activate(&self, id: &KeyId) -> Result<(), Error> {
        self.one(Activate { id: id.clone() }).await
    }

    /// Reads the bytes of a key, whatever its state.
    ///
    /// # Errors
    /// [`Error`]; [`Error::UnusableKey`] if the object is not an AES-256 key that the server releases.
    pub async fn get_key(&self, id: &KeyId) -> Result<SecretBytes, Error> {
        self.one(Get { id: id.clone() }).await
    }

    /// Reads the state of a key.
    ///
    /// # Errors
    /// [`Error`]; many servers answer [`ResultReason::ItemNotFound`] for a destroyed key.
    pub async fn key_state(&self, id: &KeyId) -> Result<State, Error> {
        self.one(GetState { id: id.clone() }).await
    }

    /// Reads the states of many keys, in batches; one result for each, in their order.
    ///
    /// # Errors
    /// [`Error`], if the request as a whole fails.
    pub async fn key_states(&self, ids: &[KeyId]) -> Result<Vec<Result<State, Error>>, Error> {
        let mut states = Vec::with_capacity(ids.len());
        for ids in ids.chunks(BATCH_MAX) {
            let wanted: Vec<_> = ids.iter().map(|id| GetState { id: id.clone() }).collect();
            for (outcome, wanted) in self.batch(&wanted).await?.into_iter().zip(wanted) {
                states.push(match outcome {
                    // Some servers stop at the first item that they refuse, although asked to go on.
                    Outcome::NotAttempted => self.one(wanted).await,
                    outcome => self.done::<GetState>(outcome),
                });
            }
        }
        Ok(states)
    }

    /// Finds keys.
    ///
    /// # Errors
    /// [`Error`].
    pub async fn locate(&self, what: Locate) -> Result<Vec<KeyId>, Error> {
        self.one(what).await
    }

    /// Adds text attributes, in one batch. Servers without the operation refuse it; the outcomes say so,
    /// and that is not an error.
    ///
    /// # Errors
    /// [`Error`].
    pub async fn add_attributes(
        &self,
        id: &KeyId,
        attributes: Vec<(Text, Text)>,
    ) -> Result<Vec<Outcome<()>>, Error> {
        let add = |(name, value)| AddAttribute { id: id.clone(), name, value };
        let attributes: Vec<_> = attributes.into_iter().map(add).collect();
        if attributes.is_empty() {
            return Ok(Vec::new());
        }
        self.batch(&attributes).await
    }

    /// Takes a key out of use. A compromised key is reported as compromised from now on.
    ///
    /// # Errors
    /// [`Error`].
    pub async fn revoke(&self, id: &KeyId, reason: RevocationReason) -> Result<(), Error> {
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs();
        let compromised_at = i64::try_from(now).unwrap_or(i64::MAX);
        self.one(Revoke { id: id.clone(), reason, compromised_at }).await
    }

    /// Destroys a key permanently.
    ///
    /// # Errors
    /// [`Error`]; servers refuse it for an Active key.
    pub async fn destroy(&self, id: &KeyId) -> Result<(), Error> {
        self.one(Destroy { id: id.clone() }).await
    }

    async fn one<O: Operation>(&self, operation: O) -> Result<O::Answer, Error> {
        let outcomes = self.batch(std::slice::from_ref(&operation)).await?;
        self.single::<O>(outcomes)
    }

    async fn batch<O: Operation>(
        &self,
        operations: &[O],
    ) -> Result<Vec<Outcome<O::Answer>>, Error> {
        let version = self.version().await?;
        self.exchange(version, operations).await
    }

    async fn exchange<O: Operation>(
        &self,
        version: ProtocolVersion,
        operations: &[O],
    ) -> Result<Vec<Outcome<O::Answer>>, Error> {
        let began = Instant::now();
        let ended = self.exchange_unobserved(version, operations).await;
        if let Some(observer) = &self.observer {
            let how = match &ended {
                Err(_) => Ended::Failed,
                Ok(all) if all.iter().all(|one| matches!(one, Outcome::Done(_))) => Ended::Done,
                Ok(_) => Ended::Refused,
            };
            observer.ended(O::CODE, began.elapsed(), how);
        }
        ended
    }

    async fn exchange_unobserved<O: Operation>(
        &self,
        version: ProtocolVersion,
        operations: &[O],
    ) -> Result<Vec<Outcome<O::Answer>>, Error> {
        let count = operations.len() as u64;
        let first_id = self.next_batch_item.fetch_add(count, Ordering::Relaxed);
        let request = request(version, first_id, operations)?;
        let read = |answer: &SecretBytes| {
            responses(operations, first_id, answer.expose())
                .map_err(|error| Error::answer(self.endpoint(), error))
        };
        match self.pool.exchange(&request, O::REPEATABLE, read).await {
            Ok(outcomes) => Ok(outcomes),
            Err(Unanswered { error, sent: true }) if !O::REPEATABLE => {
                Err(Error::OutcomeUnknown { operation: O::CODE, source: Box::new(error) })
            }
            Err(Unanswered { error, .. }) => Err(error),
        }
    }

    fn single<O: Operation>(&self, outcomes: Vec<Outcome<O::Answer>>) -> Result<O::Answer, Error> {
        match outcomes.into_iter().next() {
            Some(outcome) => self.done::<O>(outcome),
            None => Err(self.no_result()),
        }
    }

    fn done<O: Operation>(&self, outcome: Outcome<O::Answer>) -> Result<O::Answer, Error> {
        match outcome {
            Outcome::Done(answer) => Ok(answer),
            Outcome::Refused(refusal) => Err(self.refused::<O>(refusal)),
            Outcome::NotAttempted => Err(self.no_result()),
        }
    }

    fn no_result(&self) -> Error {
        Error::Violation { server: self.endpoint().clone(), source: Violation::NoResult }
    }

    fn refused<O: Operation>(&self, refusal: Refusal) -> Error {
        Error::Refused { server: self.endpoint().clone(), operation: O::CODE, refusal }
    }

    fn spoken(&self) -> MutexGuard<'_, Option<ProtocolVersion>> {
        self.spoken.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The version in use; negotiated if it has not been. No request waits for the negotiation of another,
    /// which may hang: each of the first requests does its own.
    async fn version(&self) -> Result<ProtocolVersion, Error> {
        let known = *self.spoken();
        match known {
            Some(version) => Ok(version),
            None => Ok(self.discover().await?.spoken),
        }
    }

    /// Asks in each version that has DiscoverVersions, as a server may know only one of them; then tries
    /// 1.0, which does not have it.
    async fn negotiate(&self) -> Result<Versions, Error> {
        let mut named = Vec::new();
        for version in ASKED_IN {
            let offered = match self.exchange(version, &[DiscoverVersions]).await {
                Ok(outcomes) => self.single::<DiscoverVersions>(outcomes),
                Err(error) => Err(error),
            };
            match offered {
                Ok(offered) => return self.choose(offered),
                Err(error) if is_not_understood(&error) => {}
                // It answers in a version that this side does not speak.
                Err(Error::Violation { source: Violation::Version(other), .. }) => {
                    if !named.contains(&other) {
                        named.push(other);
                    }
                }
                Err(error) => return Err(error),
            }
        }
        let outcomes = match self.exchange(ProtocolVersion::V1_0, &[Query]).await {
            Err(Error::Violation { source: Violation::Version(_), .. }) => {
                return Err(self.not_supported(named));
            }
            outcomes => outcomes?,
        };
        match self.single::<Query>(outcomes) {
            Ok(_) if self.allowed.contains(&ProtocolVersion::V1_0) => {
                Ok(Versions { spoken: ProtocolVersion::V1_0, offered: Vec::new() })
            }
            Ok(_) => Err(self.not_supported(vec![ProtocolVersion::V1_0])),
            Err(error) if is_not_understood(&error) => Err(self.not_supported(named)),
            Err(error) => Err(error),
        }
    }

    fn choose(&self, offered: Vec<ProtocolVersion>) -> Result<Versions, Error> {
        match self.allowed.iter().find(|version| offered.contains(version)) {
            Some(&spoken) => Ok(Versions { spoken, offered }),
            None => Err(self.not_supported(offered)),
        }
    }

    fn not_supported(&self, offered: Vec<ProtocolVersion>) -> Error {
        let (server, allowed) = (self.endpoint().clone(), self.allowed.clone());
        Error::VersionNotSupported { server, allowed, offered }
    }
}

/// Whether a refusal says that the server does not know the version or the operation (section 11.1).
fn is_not_understood(error: &Error) -> bool {
    matches!(
        error.refusal(),
        Some(
            ResultReason::InvalidMessage
                | ResultReason::OperationNotSupported
                | ResultReason::FeatureNotSupported
                | ResultReason::InvalidField
                | ResultReason::GeneralFailure
        )
    )
}
