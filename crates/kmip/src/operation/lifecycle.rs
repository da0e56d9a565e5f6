//! Activate (section 4.19), Revoke (section 4.20) and Destroy (section 4.21).
//!
//! None is repeatable: a server refuses the second request, as the first has changed the key's state.

use super::{AnswerError, KeyId, Operation};
use crate::fields::Fields;
use crate::ttlv::{Encoder, Tag};
use crate::{OperationCode, RevocationReason};

/// Makes a Pre-Active key usable.
#[derive(Clone, Debug)]
pub struct Activate {
    /// Which.
    pub id: KeyId,
}

impl Operation for Activate {
    const CODE: OperationCode = OperationCode::Activate;
    const REPEATABLE: bool = false;
    type Answer = ();

    fn encode(&self, payload: &mut Encoder) {
        self.id.encode(payload);
    }

    fn decode(&self, payload: Fields<'_, '_>) -> Result<(), AnswerError> {
        Ok(self.id.answered_by(payload)?)
    }
}

/// Takes a key out of use: it becomes Deactivated, or Compromised.
#[derive(Clone, Debug)]
pub struct Revoke {
    /// Which.
    pub id: KeyId,
    /// Why.
    pub reason: RevocationReason,
    /// When it was compromised, in seconds since 1970: sent only with
    /// [`RevocationReason::KeyCompromise`], which needs it.
    pub compromised_at: i64,
}

impl Operation for Revoke {
    const CODE: OperationCode = OperationCode::Revoke;
    const REPEATABLE: bool = false;
    type Answer = ();

    fn encode(&self, payload: &mut Encoder) {
        self.id.encode(payload);
        payload.structure(Tag::REVOCATION_REASON, |reason| {
            reason.enumeration(Tag::REVOCATION_REASON_CODE, self.reason.number());
        });
        if self.reason == RevocationReason::KeyCompromise {
            payload.date_time(Tag::COMPROMISE_OCCURRENCE_DATE, self.compromised_at);
        }
    }

    fn decode(&self, payload: Fields<'_, '_>) -> Result<(), AnswerError> {
        Ok(self.id.answered_by(payload)?)
    }
}

/// Destroys a key. Servers refuse it for an Active one.
#[derive(Clone, Debug)]
pub struct Destroy {
    /// Which.
    pub id: KeyId,
}

impl Operation for Destroy {
    const CODE: OperationCode = OperationCode::Destroy;
    const REPEATABLE: bool = false;
    type Answer = ();

    fn encode(&self, payload: &mut Encoder) {
        self.id.encode(payload);
    }

    fn decode(&self, payload: Fields<'_, '_>) -> Result<(), AnswerError> {
        Ok(self.id.answered_by(payload)?)
    }
}
