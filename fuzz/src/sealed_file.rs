//! A sealed file: the input is a header, slots and frames of any kind. What opens was sealed with the key in hand; a header that is
//! read is written the same.

use std::io::Read;
use std::sync::LazyLock;

use uuid::Uuid;
use vmseal_seal::file::{HEADER_LEN, Header, Kind, open};
use vmseal_seal::slot::VmKey;
use vmseal_secret::SecretBytes;
use vmseal_secret::derive::KeyContext;

use crate::secret;

const VM: Uuid = Uuid::from_bytes([0x11; 16]);
const CONTEXT: KeyContext<'static> =
    KeyContext { vm: [0x11; 16], provider: [0x22; 16], key_id: "key-7" };

static KEK: LazyLock<SecretBytes> = LazyLock::new(|| secret((0..32).collect()));

/// See the module.
pub fn run(data: &[u8]) {
    let key = VmKey { kek: &KEK, context: CONTEXT };
    if let Some(bytes) = data.first_chunk::<HEADER_LEN>()
        && let Ok(header) = Header::decode(bytes)
    {
        assert!(header.encode() == *bytes, "a header is written as it was read");
    }
    for key in [Some(&key), None] {
        let mut content = Vec::new();
        let read = open(data, VM, Kind::Memory, key)
            .and_then(|mut reader| Ok(reader.read_to_end(&mut content)?));
        match read {
            // Nothing else was ever sealed under this key.
            Ok(_) if key.is_some() => assert_eq!(content, b"memory of a guest"),
            Ok(_) => {}
            Err(why) => assert!(!why.to_string().is_empty()),
        }
    }
}
