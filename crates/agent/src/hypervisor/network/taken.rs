//! Whether somebody has a tap that takes one queue, told without opening it. The kernel is asked by rtnetlink(7), one message
//! each way:
//!
//! ```text
//! nlmsghdr, ifinfomsg, attributes: IFLA_CARRIER    1 while somebody has a queue
//!                                  IFLA_LINKINFO ─ IFLA_INFO_DATA ─ IFLA_TUN_MULTI_QUEUE
//! ```

use std::fs::File;
use std::io::{self, Read, Write};
use std::os::fd::FromRawFd;

use libc::c_int;

/// The sizes of `struct nlmsghdr` (linux/netlink.h), of `struct ifinfomsg` (linux/rtnetlink.h), and of both.
const HEADER: usize = 16;
const LINK: usize = 16;
const BOTH: u32 = 32;

/// A request, of an interface (linux/netlink.h, linux/rtnetlink.h), and the kind of its answer.
const NLM_F_REQUEST: u16 = 1;
const RTM_GETLINK: u16 = 18;
const RTM_NEWLINK: u16 = 16;

/// Attributes of interfaces (linux/if_link.h).
const IFLA_LINKINFO: u16 = 18;
const IFLA_CARRIER: u16 = 33;
const IFLA_INFO_DATA: u16 = 2;
const IFLA_TUN_MULTI_QUEUE: u16 = 7;

/// The size of `struct nlattr` (linux/netlink.h), to a multiple of which attributes are filled up.
const ATTRIBUTE: usize = 4;

/// What of an attribute's kind is no flag (NLA_TYPE_MASK).
const KIND: u16 = 0x3fff;

/// The longest answer. The kernel's, of one interface, have 1 to 2 KiB.
const ANSWER_MAX: usize = 32 << 10;

/// Whether the interface of this index is a tap with one queue that somebody has. One with several is free for more.
///
/// # Errors
/// Those of the socket. A kernel that does not say it is no error: then it is not told.
pub fn is_taken(index: c_int) -> io::Result<bool> {
    let mut kernel = kernel()?;
    kernel.write_all(&request(index))?;
    let mut answer = vec![0; ANSWER_MAX];
    let length = kernel.read(&mut answer)?;
    answer.truncate(length);
    Ok(says_taken(&answer))
}

/// A socket whose peer is the kernel.
fn kernel() -> io::Result<File> {
    let kind = libc::SOCK_RAW | libc::SOCK_CLOEXEC;
    // SAFETY: no pointers are passed.
    let fd = unsafe { libc::socket(libc::AF_NETLINK, kind, libc::NETLINK_ROUTE) };
    if fd < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the call has just made the descriptor; nobody else owns it.
    Ok(unsafe { File::from_raw_fd(fd) })
}

fn request(index: c_int) -> Vec<u8> {
    let mut message = Vec::with_capacity(HEADER + LINK);
    message.extend(BOTH.to_ne_bytes());
    message.extend(RTM_GETLINK.to_ne_bytes());
    message.extend(NLM_F_REQUEST.to_ne_bytes());
    // No number of its own, and to the kernel; then any family and kind of interface.
    message.extend([0; 12]);
    message.extend(index.to_ne_bytes());
    // No flags to change.
    message.extend([0; 8]);
    message
}

fn says_taken(answer: &[u8]) -> bool {
    let &[_, _, _, _, low, high, ..] = answer else { return false };
    let attributes = answer.get(HEADER + LINK..).unwrap_or_default();
    let of_tap = attribute(attributes, IFLA_LINKINFO).and_then(|it| attribute(it, IFLA_INFO_DATA));
    let several = of_tap.and_then(|it| attribute(it, IFLA_TUN_MULTI_QUEUE));
    let carrier = attribute(attributes, IFLA_CARRIER);
    u16::from_ne_bytes([low, high]) == RTM_NEWLINK
        && matches!(carrier, Some([1]))
        && matches!(several, Some([0]))
}

/// The value of the first attribute of a kind.
fn attribute(mut attributes: &[u8], wanted: u16) -> Option<&[u8]> {
    loop {
        let &[length, of_length, kind, of_kind, ..] = attributes else { return None };
        let length = usize::from(u16::from_ne_bytes([length, of_length]));
        let value = attributes.get(ATTRIBUTE..length)?;
        if u16::from_ne_bytes([kind, of_kind]) & KIND == wanted {
            return Some(value);
        }
        attributes = attributes.get(length.next_multiple_of(ATTRIBUTE)..)?;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// NLA_F_NESTED.
    const NESTED: u16 = 0x8000;

    fn with(kind: u16, value: &[u8]) -> Vec<u8> {
        let length = u16::try_from(ATTRIBUTE + value.len()).unwrap();
        let mut bytes = [length.to_ne_bytes(), kind.to_ne_bytes()].concat();
        bytes.extend(value);
        bytes.resize(bytes.len().next_multiple_of(ATTRIBUTE), 0);
        bytes
    }

    fn answer(kind: u16, carrier: u8, several: u8) -> Vec<u8> {
        let mut head = vec![0; HEADER + LINK];
        head[4..6].copy_from_slice(&kind.to_ne_bytes());
        let tap = [with(6, &[1]), with(IFLA_TUN_MULTI_QUEUE, &[several])].concat();
        let info = [with(1, b"tun\0"), with(IFLA_INFO_DATA | NESTED, &tap)].concat();
        let attributes = [with(3, b"lan0\0"), with(IFLA_CARRIER, &[carrier])];
        [head, attributes.concat(), with(IFLA_LINKINFO | NESTED, &info)].concat()
    }

    #[test]
    fn a_tap_with_one_queue_that_somebody_has_is_taken() {
        for (kind, carrier, several, taken) in [
            (RTM_NEWLINK, 1, 0, true),
            (RTM_NEWLINK, 0, 0, false),
            (RTM_NEWLINK, 1, 1, false),
            // An error (NLMSG_ERROR).
            (2, 1, 0, false),
        ] {
            let answer = answer(kind, carrier, several);
            assert_eq!(says_taken(&answer), taken, "{kind} {carrier} {several}");
            // One that is cut short says nothing.
            (0..answer.len() - 4).for_each(|length| assert!(!says_taken(&answer[..length])));
        }
    }

    #[test]
    fn attributes_of_any_length_are_read_to_their_end() {
        let nothing: &[u8] = &[];
        for length in 0..8u16 {
            let bytes = [length.to_ne_bytes(), 1u16.to_ne_bytes()].concat();
            let value = (length == 4).then_some(nothing);
            assert_eq!(attribute(&bytes, 1), value, "{length}");
            assert_eq!(attribute(&bytes, 2), None, "{length}");
        }
    }
}
