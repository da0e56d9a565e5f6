//! The LUKS2 token `vmseal`: the disk and its VM, which key opens which slot, and the MAC that authenticates
//! the header's parameters. One per key slot; described in docs/formats/disk.md.

use serde::{Deserialize, Serialize};
use uuid::Uuid;
use vmseal_secret::derive::{CheckValue, KeyContext, Purpose, derive};
use vmseal_secret::mac::{self, MAC_LEN};
use vmseal_secret::{DEK_LEN, SecretBytes};

use crate::error::{HeaderError, Refusal, json};
use crate::facts::{FORMAT_VERSION, Facts, Holes, ROLE_VERSION, Role, SHARED_VERSION};

/// The token's type.
pub(crate) const TYPE: &str = "vmseal";

/// The MAC's first field.
const LABEL: &[u8] = b"vmseal disk header v1";

/// A field of the MAC where others may have the data key.
const SHARED: &[u8] = b"shared";

/// What a header says about the key that opens it; readable without any key and not authenticated.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct KeyReference {
    /// The key provider.
    pub provider: Uuid,
    /// The key's id there.
    pub key_id: String,
    /// The key's check value, in hex.
    pub check: String,
    /// The VM that the key belongs to.
    pub vm: Uuid,
    /// The disk.
    pub disk: Uuid,
    /// How holes read.
    pub holes: Holes,
    /// What the disk is for.
    #[serde(default, skip_serializing_if = "Role::is_data")]
    pub role: Role,
}

/// What a token says of a disk beside its facts and its key; authenticated.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Marks {
    pub(crate) holes: Holes,
    /// Whether others may have the data key.
    pub(crate) shared: bool,
    pub(crate) role: Role,
}

impl Marks {
    /// The version of a token that says it: the oldest that can.
    fn version(self) -> u32 {
        match (self.role, self.shared) {
            (Role::Data, false) => FORMAT_VERSION,
            (Role::Data, true) => SHARED_VERSION,
            _ => ROLE_VERSION,
        }
    }
}

/// The token's JSON.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Token {
    #[serde(rename = "type")]
    pub(crate) kind: String,
    pub(crate) keyslots: Vec<String>,
    pub(crate) version: u64,
    pub(crate) provider: Uuid,
    pub(crate) key_id: String,
    pub(crate) check: String,
    pub(crate) vm: Uuid,
    pub(crate) disk: Uuid,
    pub(crate) holes: Holes,
    /// Whether others may have the data key.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub(crate) shared: bool,
    /// What the disk is for.
    #[serde(default, skip_serializing_if = "Role::is_data")]
    pub(crate) role: Role,
    pub(crate) mac: String,
}

impl Token {
    /// The token for one key slot.
    pub(crate) fn new(
        slot: u32,
        facts: &Facts,
        marks: Marks,
        dek: &SecretBytes,
        kek: &SecretBytes,
        context: &KeyContext<'_>,
    ) -> Result<Self, HeaderError> {
        let code = header_mac(facts, marks, dek, kek, context)?;
        let Marks { holes, shared, role } = marks;
        Ok(Self {
            kind: TYPE.to_owned(),
            keyslots: vec![slot.to_string()],
            version: marks.version().into(),
            provider: Uuid::from_bytes(context.provider),
            key_id: context.key_id.to_owned(),
            check: vmseal_secret::derive::check_value(kek, context)?.to_string(),
            vm: Uuid::from_bytes(context.vm),
            disk: facts.disk,
            holes,
            shared,
            role,
            mac: code.iter().map(|byte| format!("{byte:02x}")).collect(),
        })
    }

    pub(crate) fn encode(&self) -> Result<String, HeaderError> {
        Ok(serde_json::to_string(self).map_err(|error| json(&error))?)
    }

    pub(crate) fn reference(&self) -> KeyReference {
        KeyReference {
            provider: self.provider,
            key_id: self.key_id.clone(),
            check: self.check.clone(),
            vm: self.vm,
            disk: self.disk,
            holes: self.holes,
            role: self.role,
        }
    }

    pub(crate) fn marks(&self) -> Marks {
        Marks { holes: self.holes, shared: self.shared, role: self.role }
    }

    /// The version of a token that says what this one does.
    pub(crate) fn right_version(&self) -> u32 {
        self.marks().version()
    }

    /// Whether this token belongs to the key that the context names.
    pub(crate) fn is_of(&self, context: &KeyContext<'_>) -> bool {
        self.provider.as_bytes() == &context.provider && self.key_id == context.key_id
    }

    /// Whether the KEK has this token's check value.
    pub(crate) fn check_kek(
        &self,
        kek: &SecretBytes,
        context: &KeyContext<'_>,
    ) -> Result<bool, HeaderError> {
        let expected: CheckValue = self.check.parse().map_err(|_| Refusal::Field {
            field: "token.check",
            found: crate::error::quote(&self.check),
            expected: "32 hexadecimal digits".to_owned(),
        })?;
        Ok(vmseal_secret::derive::check_value(kek, context)? == expected)
    }

    /// Checks the MAC: only a holder of the KEK can have made this header for this DEK.
    pub(crate) fn authenticate(
        &self,
        facts: &Facts,
        dek: &SecretBytes,
        kek: &SecretBytes,
        context: &KeyContext<'_>,
    ) -> Result<(), HeaderError> {
        let found = unhex(&self.mac).ok_or(Refusal::Mac)?;
        let key = derive(kek, context, Purpose::Header)?;
        with_message(facts, self.marks(), dek, |parts| mac::verify(&key, parts, &found))
            .map_err(|_| Refusal::Mac)?;
        Ok(())
    }
}

fn header_mac(
    facts: &Facts,
    marks: Marks,
    dek: &SecretBytes,
    kek: &SecretBytes,
    context: &KeyContext<'_>,
) -> Result<[u8; MAC_LEN], HeaderError> {
    let key = derive(kek, context, Purpose::Header)?;
    Ok(with_message(facts, marks, dek, |parts| mac::mac(&key, parts)))
}

/// The message of the MAC. VM, provider and key id are in the MAC's key; the disk's size may change.
fn with_message<T>(
    facts: &Facts,
    Marks { holes, shared, role }: Marks,
    dek: &SecretBytes,
    use_it: impl FnOnce(&[&[u8]]) -> T,
) -> T {
    let holes: &[u8] = match holes {
        Holes::Zero => b"zero",
        Holes::Ciphertext => b"ciphertext",
    };
    let mut public = Vec::with_capacity(128);
    let fields: [&[u8]; 7] = [
        LABEL,
        facts.disk.as_bytes(),
        facts.cipher.as_bytes(),
        &facts.key_bits.to_be_bytes(),
        &facts.sector_size.to_be_bytes(),
        &facts.data_offset.to_be_bytes(),
        holes,
    ];
    for field in fields.into_iter().chain(shared.then_some(SHARED)).chain(role.field()) {
        // The longest field is the cipher's name, which has been compared with the known one.
        public.extend_from_slice(&(field.len() as u16).to_be_bytes());
        public.extend_from_slice(field);
    }
    public.extend_from_slice(&(DEK_LEN as u16).to_be_bytes());
    use_it(&[&public, dek.expose()])
}

fn unhex(digits: &str) -> Option<[u8; MAC_LEN]> {
    let mut bytes = [0; MAC_LEN];
    if digits.len() != MAC_LEN * 2
        || !digits.bytes().all(|c| matches!(c, b'0'..=b'9' | b'a'..=b'f'))
    {
        return None;
    }
    for (at, byte) in bytes.iter_mut().enumerate() {
        *byte = u8::from_str_radix(&digits[at * 2..at * 2 + 2], 16).ok()?;
    }
    Some(bytes)
}
