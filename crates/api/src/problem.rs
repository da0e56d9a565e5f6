//! Errors as they cross a process boundary: RFC 9457 problem details.

use std::fmt;

use serde::{Deserialize, Serialize};

use crate::key_fault::KeyFault;

/// What kind of error it is; stable, for programs. The HTTP status follows from it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(rename_all = "kebab-case")]
pub enum ErrorCode {
    /// The request does not have the form that the API describes.
    InvalidRequest,
    /// The request body or header is larger than the server takes.
    TooLarge,
    /// No credentials, or wrong ones.
    Unauthenticated,
    /// The credentials do not allow this.
    Forbidden,
    /// No such resource.
    NotFound,
    /// The name or id is taken.
    AlreadyExists,
    /// The resource is in a state in which this cannot be done.
    WrongState,
    /// Something else uses the resource.
    InUse,
    /// The same id was used for something else.
    Conflict,
    /// The key of this VM is not available on its host.
    Locked,
    /// A stored key, header or backup does not match what the inventory has.
    KeyMismatch,
    /// A disk, header or file is damaged, forged or of an unknown version.
    Damaged,
    /// The datastore has no room.
    NoSpace,
    /// A limit of vmseal is reached.
    LimitExceeded,
    /// A host, provider or process does not answer.
    Unreachable,
    /// It took longer than its time-out; whether it was done is not known.
    TimedOut,
    /// The server has too much to do at the moment: the same request may succeed soon.
    Busy,
    /// The operation was cancelled.
    Cancelled,
    /// This host cannot do what was asked (missing program or kernel feature).
    Unsupported,
    /// A defect of vmseal, or an error that it has no name for: of a newer peer, too.
    #[serde(other)]
    Internal,
}

impl ErrorCode {
    /// The HTTP status that carries this error.
    #[must_use]
    pub fn status(self) -> u16 {
        match self {
            Self::InvalidRequest => 400,
            Self::Unauthenticated => 401,
            Self::Forbidden => 403,
            Self::NotFound => 404,
            Self::AlreadyExists
            | Self::WrongState
            | Self::InUse
            | Self::Conflict
            | Self::Cancelled => 409,
            Self::TooLarge => 413,
            Self::KeyMismatch | Self::Damaged | Self::Unsupported => 422,
            Self::Locked => 423,
            Self::LimitExceeded => 429,
            Self::Internal => 500,
            Self::Unreachable => 502,
            Self::Busy => 503,
            Self::TimedOut => 504,
            Self::NoSpace => 507,
        }
    }

    /// A few words for people, the same for every occurrence (RFC 9457 `title`).
    #[must_use]
    pub fn title(self) -> &'static str {
        match self {
            Self::InvalidRequest => "the request is not valid",
            Self::TooLarge => "the request is too large",
            Self::Unauthenticated => "credentials are missing or wrong",
            Self::Forbidden => "not permitted",
            Self::NotFound => "not found",
            Self::AlreadyExists => "already exists",
            Self::WrongState => "not possible in this state",
            Self::InUse => "in use",
            Self::Conflict => "in conflict with an earlier request",
            Self::Locked => "the VM is locked: its key is not available",
            Self::KeyMismatch => "the key does not match",
            Self::Damaged => "damaged or forged",
            Self::NoSpace => "no space left",
            Self::LimitExceeded => "limit exceeded",
            Self::Unreachable => "no answer",
            Self::TimedOut => "timed out",
            Self::Busy => "busy: try again",
            Self::Cancelled => "cancelled",
            Self::Unsupported => "not supported on this host",
            Self::Internal => "internal error",
        }
    }
}

/// An error with all that a person or program needs (RFC 9457, `application/problem+json`).
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct Problem {
    /// `urn:vmseal:problem:` and the code.
    #[serde(rename = "type")]
    pub kind: String,
    /// A few words, the same for every occurrence.
    pub title: String,
    /// The HTTP status.
    pub status: u16,
    /// What happened, to which object, and what to do.
    pub detail: String,
    /// The same as the end of `type`, for programs.
    pub code: ErrorCode,
    /// The field of the request that is at fault, as a path (`disks[0].size`).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub field: Option<String>,
    /// Why a key is unavailable, where it is about that.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reason: Option<KeyFault>,
    /// The id of the request that failed: what its lines in all logs carry.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "openapi", schema(value_type = Option<String>))]
    pub request_id: Option<Box<str>>,
    /// Of a migration: whether the host says with it only that the other host has given up, or that the connection to it was
    /// lost. Why that is, the other host says.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub of_other_host: bool,
    /// Whether nobody knows if the request was carried out: it was sent, and its answer was lost. A client's own
    /// finding, which is in no document.
    #[serde(skip)]
    pub in_doubt: bool,
    /// The server's own inventory failed in a way that may pass (its disk is full): nothing is wrong with
    /// what was asked. The server's own finding, which is in no document.
    #[serde(skip)]
    pub inventory: bool,
}

impl Problem {
    /// An error of this kind; `detail` says what happened, to which object, and what to do.
    #[must_use]
    pub fn new(code: ErrorCode, detail: impl Into<String>) -> Self {
        let name = serde_json::to_value(code)
            .ok()
            .and_then(|value| value.as_str().map(str::to_owned))
            .unwrap_or_default();
        Self {
            kind: format!("urn:vmseal:problem:{name}"),
            title: code.title().to_owned(),
            status: code.status(),
            detail: detail.into(),
            code,
            field: None,
            reason: None,
            request_id: None,
            of_other_host: false,
            in_doubt: false,
            inventory: false,
        }
    }

    /// A request that does not have the right form, with the field at fault.
    #[must_use]
    pub fn invalid(field: impl Into<String>, detail: impl Into<String>) -> Self {
        Self { field: Some(field.into()), ..Self::new(ErrorCode::InvalidRequest, detail) }
    }

    /// The same, because of this fault of a key or of its provider.
    #[must_use]
    pub fn because(self, fault: KeyFault) -> Self {
        Self { reason: Some(fault), ..self }
    }

    /// No such resource.
    #[must_use]
    pub fn not_found(kind: &str, name: impl fmt::Display) -> Self {
        Self::new(ErrorCode::NotFound, format!("there is no {kind} '{name}'"))
    }
}

impl fmt::Display for Problem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.field {
            Some(field) => write!(f, "{field}: {}", self.detail),
            None => f.write_str(&self.detail),
        }
    }
}

impl std::error::Error for Problem {}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_problem_has_the_members_of_rfc_9457() {
        let problem = Problem::invalid("disks[0].size", "must be a multiple of 4096");
        let json = serde_json::to_value(&problem).unwrap();
        assert_eq!(json["type"], "urn:vmseal:problem:invalid-request");
        assert_eq!(json["status"], 400);
        assert_eq!(json["field"], "disks[0].size");
        assert_eq!(json.get("of_other_host"), None, "an earlier version would not say it");
        assert_eq!(serde_json::from_value::<Problem>(json).unwrap(), problem);
    }
}
