//! What a disk image looks like, by its head: whether it has a LUKS header, and what that says of its keys. Nothing of it is
//! authenticated.

use std::fs::{File, Metadata, OpenOptions};
use std::io;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::Path;

use vmseal_api::datastore::{Claim, ImageContent};
use vmseal_api::id::{DiskId, ProviderId, VmId};
use vmseal_luks::KeyReference;

use crate::storage::facts::told_role;

/// The longest key id that is reported, in bytes; real ones are UUIDs or short numbers.
const KEY_ID_MAX: usize = 256;

/// The most tokens that are listed of one image; a header of vmseal's has one, or two for a while.
const CLAIMS_MAX: usize = 4;

/// The magic numbers of the two copies of a LUKS header, and their places.
const MAGICS: [(&[u8; 6], u64); 2] = [(b"LUKS\xba\xbe", 0), (b"SKUL\xba\xbe", 16 * 1024)];

/// Reads the head of a file; none when it is not a regular file after all.
pub fn look(at: &Path) -> io::Result<Option<(Metadata, ImageContent)>> {
    let file = OpenOptions::new()
        .read(true)
        .custom_flags(libc::O_NOFOLLOW | libc::O_NONBLOCK | libc::O_NOCTTY)
        .open(at)?;
    let metadata = file.metadata()?;
    if !metadata.is_file() {
        return Ok(None);
    }
    let content = content(&file)?;
    Ok(Some((metadata, content)))
}

fn content(file: &File) -> io::Result<ImageContent> {
    let mut luks = false;
    for (magic, offset) in MAGICS {
        let mut begins = [0; 6];
        luks |= file.read_at(&mut begins, offset)? == begins.len() && begins == *magic;
    }
    if !luks {
        return Ok(ImageContent::Raw);
    }
    Ok(match vmseal_luks::inspect(file) {
        Ok((references, _)) => claims(&references),
        Err(error) => ImageContent::ForeignLuks { detail: error.to_string() },
    })
}

fn claims(references: &[KeyReference]) -> ImageContent {
    if references.len() > CLAIMS_MAX || references.iter().any(|of| of.key_id.len() > KEY_ID_MAX) {
        let detail = "its tokens are longer, or more, than vmseal writes".to_owned();
        return ImageContent::ForeignLuks { detail };
    }
    let claim = |of: &KeyReference| Claim {
        vm: VmId(of.vm),
        disk: DiskId(of.disk),
        provider: ProviderId(of.provider),
        key_id: of.key_id.clone(),
        role: told_role(of.role),
    };
    ImageContent::Vmseal { claims: references.iter().map(claim).collect() }
}
