//! Reading responses.

use std::fmt;

use super::request::batch_item_ids;
use crate::enumeration::{STATUS_FAILED, STATUS_PENDING, STATUS_SUCCESS, STATUS_UNDONE};
use crate::fields::{Fields, Violation};
use crate::operation::{AnswerError, Operation};
use crate::ttlv::{Tag, decode};
use crate::{OperationCode, ProtocolVersion, ResultReason};

/// The maximum length of a refusal's text, in characters: it goes to logs and alarms.
pub const REFUSAL_TEXT_MAX: usize = 300;

/// A refusal of a server.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Refusal {
    /// The reason.
    pub reason: ResultReason,
    /// The server's text; without control characters, and truncated to [`REFUSAL_TEXT_MAX`].
    pub text: String,
}

impl Refusal {
    fn new(reason: ResultReason, text: &str) -> Self {
        let printable = |c: char| if c.is_control() { ' ' } else { c };
        Self { reason, text: text.chars().map(printable).take(REFUSAL_TEXT_MAX).collect() }
    }
}

impl fmt::Display for Refusal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.reason)?;
        if self.text.is_empty() { Ok(()) } else { write!(f, " ({})", self.text) }
    }
}

/// The outcome of one item of a request.
#[derive(Debug)]
pub enum Outcome<A> {
    /// It was done.
    Done(A),
    /// It was refused, and nothing changed.
    Refused(Refusal),
    /// The server stopped at an earlier item that it refused.
    NotAttempted,
}

/// The outcomes of `operations`, in their order, from the response to [`super::request()`] with the same
/// operations and `first_id`. A server that does not understand a request refuses it as a whole: then
/// every operation has that refusal.
///
/// # Errors
/// [`AnswerError`]: the response violates the protocol, or a key in it cannot be used.
pub fn responses<O: Operation>(
    operations: &[O],
    first_id: u64,
    message: &[u8],
) -> Result<Vec<Outcome<O::Answer>>, AnswerError> {
    let message = decode(message).map_err(Violation::from)?;
    let items = batch_items(&message, operations.len())?;
    if let [item] = items[..]
        && let Some(refusal) = whole_refusal(item)?
    {
        return Ok(operations.iter().map(|_| Outcome::Refused(refusal.clone())).collect());
    }
    let ids: Vec<[u8; 8]> = batch_item_ids(first_id).take(operations.len()).collect();
    let mut outcomes: Vec<Option<Outcome<O::Answer>>> = operations.iter().map(|_| None).collect();
    for item in items {
        let place = place(item, &ids)?;
        let (Some(operation), Some(outcome)) = (operations.get(place), outcomes.get_mut(place))
        else {
            return Err(Violation::WrongBatchItem.into());
        };
        if outcome.is_some() {
            return Err(Violation::WrongBatchItem.into());
        }
        *outcome = Some(read(operation, item)?);
    }
    let stopped = outcomes.iter().flatten().any(|outcome| matches!(outcome, Outcome::Refused(_)));
    outcomes
        .into_iter()
        .map(|outcome| match outcome {
            Some(outcome) => Ok(outcome),
            None if stopped => Ok(Outcome::NotAttempted),
            None => Err(Violation::NoResult.into()),
        })
        .collect()
}

/// Checks the header, and returns the batch items.
fn batch_items<'m, 'a>(
    message: &'m crate::ttlv::Item<'a>,
    asked: usize,
) -> Result<Vec<Fields<'m, 'a>>, Violation> {
    if message.tag != Tag::RESPONSE_MESSAGE {
        return Err(Violation::WrongValue(message.tag));
    }
    let fields = Fields::of(message).ok_or(Violation::WrongValue(message.tag))?;
    let header = fields.structure(Tag::RESPONSE_HEADER)?;
    let version = header.structure(Tag::PROTOCOL_VERSION)?.version()?;
    // Another minor version is tolerated: servers refuse in 1.0 what they do not understand, and the
    // answers read here are the same in all of them.
    if version.major != ProtocolVersion::V1_0.major {
        return Err(Violation::Version(version));
    }
    let announced = header.integer(Tag::BATCH_COUNT)?;
    let items = fields.structures(Tag::BATCH_ITEM).collect::<Result<Vec<_>, _>>()?;
    let found = items.len();
    if usize::try_from(announced) != Ok(found) || found > asked {
        return Err(Violation::BatchCount { announced, found, asked });
    }
    Ok(items)
}

/// The refusal of a whole request: an item that names neither operation nor id (section 11.1).
fn whole_refusal(item: Fields<'_, '_>) -> Result<Option<Refusal>, Violation> {
    let names_item = item.optional(Tag::OPERATION)?.is_some()
        || item.optional(Tag::UNIQUE_BATCH_ITEM_ID)?.is_some();
    if names_item || item.enumeration(Tag::RESULT_STATUS)? == STATUS_SUCCESS {
        return Ok(None);
    }
    refusal(item).map(Some)
}

/// The item of the request that a result belongs to.
fn place(item: Fields<'_, '_>, ids: &[[u8; 8]]) -> Result<usize, Violation> {
    match item.optional(Tag::UNIQUE_BATCH_ITEM_ID)? {
        // A single item needs no id (section 6.4).
        None if ids.len() == 1 => Ok(0),
        None => Err(Violation::WrongBatchItem),
        Some(_) => {
            let id = item.bytes(Tag::UNIQUE_BATCH_ITEM_ID)?;
            ids.iter().position(|ours| ours == id).ok_or(Violation::WrongBatchItem)
        }
    }
}

fn read<O: Operation>(
    operation: &O,
    item: Fields<'_, '_>,
) -> Result<Outcome<O::Answer>, AnswerError> {
    if let Some(code) = item.optional_enumeration(Tag::OPERATION)? {
        let answered = OperationCode::from_number(code);
        if answered != O::CODE {
            return Err(Violation::WrongOperation { asked: O::CODE, answered }.into());
        }
    }
    match item.enumeration(Tag::RESULT_STATUS)? {
        STATUS_SUCCESS => {
            // Some payloads are empty, and may then be left out.
            let payload = item.optional_structure(Tag::RESPONSE_PAYLOAD)?;
            let payload = payload.unwrap_or(Fields::empty(Tag::RESPONSE_PAYLOAD));
            operation.decode(payload).map(Outcome::Done)
        }
        STATUS_FAILED | STATUS_UNDONE => Ok(Outcome::Refused(refusal(item)?)),
        STATUS_PENDING => Err(Violation::Pending.into()),
        _ => Err(Violation::WrongValue(Tag::RESULT_STATUS).into()),
    }
}

fn refusal(item: Fields<'_, '_>) -> Result<Refusal, Violation> {
    let reason = item.optional_enumeration(Tag::RESULT_REASON)?;
    let reason = reason.map_or(ResultReason::GeneralFailure, ResultReason::from_number);
    let text = item.optional_text(Tag::RESULT_MESSAGE)?.unwrap_or_default();
    Ok(Refusal::new(reason, text))
}
