//! The panics of a guest, as the record of a running VM has them.

use jiff::Timestamp;
use serde::{Deserialize, Serialize};
use vmseal_api::dump::Panic;
use vmseal_api::id::DumpId;

use crate::process::panics::PanicNow;

/// A panic of the guest.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct StoredPanic {
    at: Timestamp,
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    restarted: bool,
    detail: String,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct StoredPanicNow {
    at: Timestamp,
    dump: DumpId,
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    kept: bool,
}

impl From<&Panic> for StoredPanic {
    fn from(Panic { at, restarted, detail }: &Panic) -> Self {
        Self { at: *at, restarted: *restarted, detail: detail.clone() }
    }
}

impl From<StoredPanic> for Panic {
    fn from(StoredPanic { at, restarted, detail }: StoredPanic) -> Self {
        Self { at, restarted, detail }
    }
}

impl From<&PanicNow> for StoredPanicNow {
    fn from(PanicNow { at, dump, kept }: &PanicNow) -> Self {
        Self { at: *at, dump: *dump, kept: *kept }
    }
}

impl From<StoredPanicNow> for PanicNow {
    fn from(StoredPanicNow { at, dump, kept }: StoredPanicNow) -> Self {
        Self { at, dump, kept }
    }
}
