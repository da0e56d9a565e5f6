//! Writing requests.

use crate::ProtocolVersion;
use crate::enumeration::BATCH_CONTINUE;
use crate::operation::Operation;
use crate::ttlv::{Encoder, MESSAGE_LEN_MAX, Tag, TooLong};

/// How many items one request has at most: their answers must fit one message too.
pub const BATCH_MAX: usize = 64;

/// A request for one or more operations of one kind. Their batch item ids count from `first_id`.
///
/// # Errors
/// [`TooLong`], also for more than [`BATCH_MAX`] operations.
pub fn request<O: Operation>(
    version: ProtocolVersion,
    first_id: u64,
    operations: &[O],
) -> Result<Vec<u8>, TooLong> {
    if operations.len() > BATCH_MAX {
        return Err(TooLong);
    }
    let mut encoder = Encoder::new();
    encoder.structure(Tag::REQUEST_MESSAGE, |message| {
        message.structure(Tag::REQUEST_HEADER, |header| {
            version.encode(header);
            header.integer(Tag::MAXIMUM_RESPONSE_SIZE, MESSAGE_LEN_MAX as i32); // 2^16
            if operations.len() > 1 {
                header.enumeration(Tag::BATCH_ERROR_CONTINUATION_OPTION, BATCH_CONTINUE);
            }
            header.integer(Tag::BATCH_COUNT, operations.len() as i32); // at most BATCH_MAX
        });
        for (id, operation) in batch_item_ids(first_id).zip(operations) {
            message.structure(Tag::BATCH_ITEM, |item| {
                item.enumeration(Tag::OPERATION, O::CODE.number());
                item.bytes(Tag::UNIQUE_BATCH_ITEM_ID, &id);
                item.structure(Tag::REQUEST_PAYLOAD, |payload| operation.encode(payload));
            });
        }
    });
    encoder.finish()
}

/// The ids of a request's items, in their order.
pub(super) fn batch_item_ids(first: u64) -> impl Iterator<Item = [u8; 8]> {
    (0..).map(move |index: u64| first.wrapping_add(index).to_be_bytes())
}
