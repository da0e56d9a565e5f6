//! The backup of the server: inventory, authority and sealed provider files, in one file that is sealed under a
//! passphrase (docs/formats/server-backup.md).
//!
//! | module | what |
//! |---|---|
//! | [`make`] | writes one while the server runs |
//! | [`restore`] | makes a data directory of one; checks one |
//! | `frames` | the sealed content |
//! | `inventory` | the copy of the inventory, and what a restored one forgets |

mod frames;
mod inventory;
pub mod make;
pub mod restore;
#[cfg(test)]
mod tests;

use std::io::Read;

use vmseal_api::problem::{ErrorCode, Problem};
use vmseal_api::server_backup::{
    FileList, HEAD_LEN, LIST_MAX, ServerBackupError, parse_head, parse_list,
};
use vmseal_secret::SecretBytes;
use zeroize::Zeroizing;

use self::frames::FrameReader;
use crate::providers::sealed_file;

/// The purpose of the envelope.
const ASSOCIATED: &[u8] = b"vmseal server backup v1";

/// The length of the key of the frames, in bytes.
const KEY_LEN: usize = 32;

fn damaged(why: impl std::fmt::Display) -> Problem {
    Problem::new(ErrorCode::Damaged, format!("the backup cannot be restored: {why}"))
}

/// Opens a backup: its list, and its files, which follow in the order of the list.
fn open<R: Read>(
    mut from: R,
    passphrase: &SecretBytes,
) -> Result<(FileList, FrameReader<R>), Problem> {
    let mut head = [0; HEAD_LEN];
    let short = |_| damaged(ServerBackupError::NotABackup);
    from.read_exact(&mut head).map_err(short)?;
    let length = parse_head(&head).map_err(|error| {
        let code = match error {
            ServerBackupError::UnknownVersion(_) => ErrorCode::Unsupported,
            _ => ErrorCode::Damaged,
        };
        Problem::new(code, error.to_string())
    })?;
    let mut envelope = vec![0; length];
    from.read_exact(&mut envelope).map_err(short)?;
    let key = sealed_file::open(&envelope, passphrase, ASSOCIATED, "the backup")?;
    if key.len() != KEY_LEN {
        return Err(damaged("its key has another length"));
    }
    let mut frames = FrameReader::new(from, &key).map_err(damaged)?;
    let mut length = [0; 4];
    frames.read_exact(&mut length).map_err(damaged)?;
    let length = usize::try_from(u32::from_be_bytes(length)).unwrap_or(usize::MAX);
    if length > LIST_MAX {
        return Err(damaged("its list of files is too long"));
    }
    let mut list = Zeroizing::new(vec![0; length]);
    frames.read_exact(&mut list).map_err(damaged)?;
    Ok((parse_list(&list).map_err(damaged)?, frames))
}
