//! The state of an image, by which who remembers it can tell whether anybody may have written to the image since.
//!
//! ```text
//!  state A ──a vmseal-rbd opens it to write: the lock, then another number──> it writes ──closes it: the lock goes──> state B
//!          ──another program takes its lock──> it writes ──gives it up──> state C
//! ```
//! It is two things, each of which changes before anything is written, and never comes back:
//!
//! - the version of the image's header: nobody writes without the lock that is there. It says so of every program, but is read a moment
//!   before the lock is taken here: taking it changes the version, and the cluster does not say what it was. So it counts only where nobody
//!   else had the image open to be written, neither at that moment nor when the lock is had;
//! - a number in an attribute of the file, which is read and replaced with the lock held. It says so of all of this program's processes, at
//!   any instant.
//!
//! Who reads leaves both as they are.

use std::io;

use crate::cluster::Pool;
use crate::image::{Header, Image};
use crate::inode::{Inode, OPENED};
use crate::library::OPERATION_FULL_TRY;

/// The digits of a number.
const DIGITS: usize = 32;

/// The state of an image that nobody has open to be written.
///
/// # Errors
/// `ResourceBusy` while somebody has it open to be written; `ENODATA` where it is not known, as it was only ever written by earlier versions;
/// `Unsupported`; the cluster's.
pub fn at_rest(pool: &Pool, inode: Inode, image: &Image) -> io::Result<String> {
    let header = image.header_at_rest()?;
    let opening = opening(pool, inode)?;
    let opening = opening.ok_or_else(|| io::Error::from_raw_os_error(libc::ENODATA))?;
    Ok(told(&opening, &header))
}

/// Has an image that is locked here be in another state, durably, before anything is written; returns that in which it was found, where that is
/// known.
///
/// # Errors
/// The cluster's.
pub fn begin(pool: &Pool, inode: Inode, image: &Image) -> io::Result<Option<String>> {
    let before = opening(pool, inode)?;
    let number = format!("{:0DIGITS$x}", fastrand::u128(..));
    // Also in a pool that is full: the object is there, and takes no more room.
    let object = inode.object();
    pool.set_attribute_with(&object, (OPENED, &number), OPERATION_FULL_TRY)?;
    Ok(before.zip(image.found()).map(|(opening, header)| told(&opening, header)))
}

/// The number of the last opening, where there was one.
fn opening(pool: &Pool, inode: Inode) -> io::Result<Option<String>> {
    Ok(pool.attribute(&inode.object(), OPENED)?.filter(|number| is_number(number)))
}

/// Every user of the pool can write the attribute.
fn is_number(text: &str) -> bool {
    text.len() == DIGITS && text.bytes().all(|byte| byte.is_ascii_hexdigit())
}

fn told(opening: &str, header: &Header) -> String {
    format!("{opening} {header}")
}

#[cfg(test)]
mod tests {
    use vmseal_api::rbd::STATE_MAX;

    use super::*;

    #[test]
    fn a_state_is_another_one_after_each_change_and_fits() {
        let (number, other) = ("0".repeat(DIGITS), "1".repeat(DIGITS));
        let header = |version| Header { object: "rbd_header.1048c8ed80ef".to_owned(), version };
        let states = [
            told(&number, &header(7)),
            told(&number, &header(8)),
            told(&other, &header(7)),
            told(&number, &Header { object: "rbd_header.2".to_owned(), version: 7 }),
        ];
        for (index, state) in states.iter().enumerate() {
            assert!(state.len() <= STATE_MAX);
            assert!(!states[..index].contains(state), "{state}");
        }
        let long = Header { object: format!("rbd_header.{}", "f".repeat(128)), version: u64::MAX };
        assert!(told(&number, &long).len() <= STATE_MAX);
    }

    #[test]
    fn only_what_this_program_writes_is_a_number_of_an_opening() {
        assert!(is_number(&format!("{:0DIGITS$x}", 5_u128)));
        assert!(is_number(&format!("{:0DIGITS$x}", u128::MAX)));
        for wrong in ["", "5", &"g".repeat(DIGITS), &"0".repeat(DIGITS + 1)] {
            assert!(!is_number(wrong), "{wrong}");
        }
    }
}
