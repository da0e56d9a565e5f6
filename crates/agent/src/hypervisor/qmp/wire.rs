//! The content of QMP's lines, and how they are sent.

use std::io::{self, IoSlice};
use std::os::fd::{AsRawFd, BorrowedFd};

use nix::sys::socket::{ControlMessage, MsgFlags, sendmsg};
use serde::{Deserialize, Serialize};
use serde_json::Value;
use tokio::io::Interest;
use tokio::net::UnixStream;

use super::QmpError;

/// A command.
#[derive(Serialize)]
pub struct Request<'a> {
    pub execute: &'a str,
    #[serde(skip_serializing_if = "Value::is_null")]
    pub arguments: Value,
    pub id: u64,
}

impl Request<'_> {
    pub fn to_line(&self) -> Result<Vec<u8>, QmpError> {
        let mut line =
            serde_json::to_vec(self).map_err(|error| QmpError::Protocol(error.to_string()))?;
        line.push(b'\n');
        Ok(line)
    }
}

/// Why QEMU ended or stopped the guest (qapi/run-state.json, `ShutdownCause`).
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ShutdownReason {
    /// The guest powered itself off.
    Guest,
    /// The guest panicked and reported it.
    Panic,
    /// A command or signal ended QEMU.
    Host,
    /// Another one, in QEMU's words.
    Other(String),
}

/// QEMU's events.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Event {
    /// QEMU is about to end.
    Shutdown(ShutdownReason),
    /// The guest has panicked.
    GuestPanicked {
        /// Whether it stands still now; else QEMU ends.
        stays: bool,
    },
    /// The guest has fallen asleep (ACPI S3).
    GuestAsleep,
    /// The guest has been woken from that.
    GuestAwake,
    /// QEMU has the guest go on that it had stopped, or had not started yet; one that slept may sleep on.
    Resumed,
    /// The guest has let a device go, and QEMU no longer has it; by its id.
    DeviceDeleted(String),
    /// Another event, by its name.
    Other(String),
}

/// A line from QEMU.
#[derive(Debug)]
pub enum Incoming {
    Greeting,
    Answer { id: u64, result: Result<Value, (String, String)> },
    Event(Event),
}

#[derive(Deserialize)]
struct RawError {
    class: String,
    desc: String,
}

/// The members that are used; QEMU may add others.
#[derive(Deserialize)]
struct Raw {
    #[serde(rename = "QMP")]
    greeting: Option<Value>,
    id: Option<u64>,
    #[serde(rename = "return")]
    returned: Option<Value>,
    error: Option<RawError>,
    event: Option<String>,
    data: Option<Value>,
}

pub fn parse(line: &[u8]) -> Result<Incoming, QmpError> {
    let raw: Raw =
        serde_json::from_slice(line).map_err(|error| QmpError::Protocol(error.to_string()))?;
    match raw {
        Raw { greeting: Some(_), .. } => Ok(Incoming::Greeting),
        Raw { event: Some(name), data, .. } => Ok(Incoming::Event(event(name, data.as_ref()))),
        Raw { id: Some(id), error: Some(error), .. } => {
            Ok(Incoming::Answer { id, result: Err((error.class, error.desc)) })
        }
        Raw { id: Some(id), returned: Some(value), .. } => {
            Ok(Incoming::Answer { id, result: Ok(value) })
        }
        // Without an id QEMU did not understand the line at all.
        Raw { error: Some(error), .. } => Err(QmpError::Protocol(error.desc)),
        _ => Err(QmpError::Protocol("a line that is neither answer nor event".to_owned())),
    }
}

fn event(name: String, data: Option<&Value>) -> Event {
    match name.as_str() {
        "SHUTDOWN" => {
            let reason = data.and_then(|data| data["reason"].as_str()).unwrap_or("none");
            Event::Shutdown(match reason {
                "guest-shutdown" => ShutdownReason::Guest,
                "guest-panic" => ShutdownReason::Panic,
                reason if reason.starts_with("host-") => ShutdownReason::Host,
                other => ShutdownReason::Other(other.to_owned()),
            })
        }
        "GUEST_PANICKED" => {
            let action = data.and_then(|data| data["action"].as_str());
            Event::GuestPanicked { stays: action == Some("pause") }
        }
        "SUSPEND" => Event::GuestAsleep,
        "WAKEUP" => Event::GuestAwake,
        "RESUME" => Event::Resumed,
        "DEVICE_DELETED" => match data.and_then(|data| data["device"].as_str()) {
            Some(device) => Event::DeviceDeleted(device.to_owned()),
            None => Event::Other(name),
        },
        _ => Event::Other(name),
    }
}

/// Sends a line, with a descriptor at its first byte (SCM_RIGHTS).
pub async fn send(
    stream: &UnixStream,
    line: &[u8],
    fd: Option<BorrowedFd<'_>>,
) -> Result<(), QmpError> {
    let descriptors: Vec<_> = fd.iter().map(AsRawFd::as_raw_fd).collect();
    let rights = [ControlMessage::ScmRights(&descriptors)];
    let mut sent = 0;
    while sent < line.len() {
        stream.writable().await?;
        let control: &[ControlMessage<'_>] =
            if sent == 0 && !descriptors.is_empty() { &rights } else { &[] };
        let part = [IoSlice::new(&line[sent..])];
        let flags = MsgFlags::MSG_DONTWAIT | MsgFlags::MSG_NOSIGNAL;
        let result = stream.try_io(Interest::WRITABLE, || {
            sendmsg::<()>(stream.as_raw_fd(), &part, control, flags, None).map_err(io::Error::from)
        });
        match result {
            Ok(length) => sent += length,
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
            Err(error) if error.kind() == io::ErrorKind::BrokenPipe => {
                return Err(QmpError::Closed);
            }
            Err(error) => return Err(error.into()),
        }
    }
    Ok(())
}
