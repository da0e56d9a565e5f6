//! A disk that is exposed to an operator's tools: NBD connections, each carried as a stream of bytes from the
//! tool through the server to the agent, and one more stream that keeps the exposure open.

use std::fmt;
use std::time::Duration;

use url::form_urlencoded;

use crate::id::SnapshotId;
use crate::problem::Problem;

/// The client that holds a disk exposed sends this every [`HOLD_INTERVAL`].
pub const HOLD: u8 = b'.';

/// It sends this to end the exposure, and then reads until the end.
pub const LET_GO: u8 = b'q';

/// How often [`HOLD`] is sent.
pub const HOLD_INTERVAL: Duration = Duration::from_secs(10);

/// An agent that has not received it for so long takes the client for gone, and ends the exposure.
pub const HOLD_TIMEOUT: Duration = Duration::from_secs(45);

/// The kinds of stream of an exposure. `S` is what names a snapshot: its id to a host, its name to a server.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Exposing<S = SnapshotId> {
    /// The exposure itself. It ends with this stream, or with [`LET_GO`]; [`HOLD`] keeps it open. The stream
    /// ends when everything is flushed and the disk is free; it carries the error text, if there was an
    /// error.
    Hold {
        /// Whether the disk may be changed.
        writable: bool,
    },
    /// The same of what a snapshot keeps of the disk, which nobody changes. For hosts with
    /// [`EXPOSE_KEPT`](crate::host::version::EXPOSE_KEPT).
    HoldKept {
        /// The snapshot.
        snapshot: S,
        /// Whether it is the ciphertext, with the disk's header: what
        /// [`ExportFormat::Sealed`](crate::transfer::ExportFormat::Sealed) writes.
        sealed: bool,
    },
    /// The same of the ciphertext of a disk that no guest writes, with its header. For the same hosts.
    HoldSealed,
    /// A connection to the exposed disk: the filter's NBD.
    Connect,
}

impl<S> Exposing<S> {
    /// What the parameters of a request ask for.
    ///
    /// # Errors
    /// `invalid-request` for what is only read, and is to be changed.
    pub fn of_query(
        connect: bool,
        writable: bool,
        snapshot: Option<S>,
        sealed: bool,
    ) -> Result<Self, Problem> {
        Ok(match (snapshot, sealed) {
            _ if connect => Self::Connect,
            (None, false) => Self::Hold { writable },
            _ if writable => {
                let what = "is not for what a snapshot keeps, nor for ciphertext: both are exposed read-only";
                return Err(Problem::invalid("writable", what));
            }
            (Some(snapshot), sealed) => Self::HoldKept { snapshot, sealed },
            (None, true) => Self::HoldSealed,
        })
    }

    /// Whether it is ciphertext, which is read without a key.
    #[must_use]
    pub fn is_sealed(&self) -> bool {
        matches!(self, Self::HoldSealed | Self::HoldKept { sealed: true, .. })
    }
}

impl<S: fmt::Display> Exposing<S> {
    /// Its path below the API's root.
    pub(crate) fn path(&self, vm: impl fmt::Display, disk: impl fmt::Display) -> String {
        let query = match self {
            Self::Hold { writable } => format!("connect=false&writable={writable}"),
            Self::HoldKept { snapshot, sealed } => {
                let name = snapshot.to_string();
                let name: String = form_urlencoded::byte_serialize(name.as_bytes()).collect();
                format!("snapshot={name}&sealed={sealed}")
            }
            Self::HoldSealed => "sealed=true".to_owned(),
            Self::Connect => "connect=true&writable=false".to_owned(),
        };
        format!("vms/{vm}/disks/{disk}/expose?{query}")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_only_read_cannot_be_asked_for_to_be_changed() {
        let of = |writable, snapshot, sealed| Exposing::of_query(false, writable, snapshot, sealed);
        assert_eq!(of(true, None, false), Ok(Exposing::Hold { writable: true }));
        assert_eq!(of(false, None, true), Ok(Exposing::HoldSealed));
        for sealed in [false, true] {
            let kept = Exposing::HoldKept { snapshot: "one", sealed };
            assert_eq!(of(false, Some("one"), sealed), Ok(kept));
            let refused = of(true, Some("one"), sealed).unwrap_err();
            assert_eq!(refused.field.as_deref(), Some("writable"));
        }
        assert!(of(true, None, true).is_err());
        assert_eq!(Exposing::of_query(true, false, Some("one"), true), Ok(Exposing::Connect));
    }

    #[test]
    fn a_name_of_a_snapshot_stays_one_value_of_the_query() {
        let kept = Exposing::HoldKept { snapshot: "a b&sealed=x", sealed: true };
        assert_eq!(
            kept.path("web", "disk0"),
            "vms/web/disks/disk0/expose?snapshot=a+b%26sealed%3Dx&sealed=true"
        );
        let hold: Exposing = Exposing::Hold { writable: true };
        // Hosts of earlier versions know these two.
        assert_eq!(
            hold.path("web", "disk0"),
            "vms/web/disks/disk0/expose?connect=false&writable=true"
        );
    }
}
