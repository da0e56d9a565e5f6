//! A header that has been checked and unlocked, ready to be changed.

use uuid::Uuid;
use vmseal_secret::derive::KeyContext;
use vmseal_secret::{KEK_LEN, SecretBytes};

use crate::error::{HeaderError, Refusal, quote};
use crate::facts::Facts;
use crate::layout::{AREA_LEN, Copy};
use crate::library::Device;
use crate::loaded::{Loaded, WorkingCopy};
use crate::metadata::Metadata;
use crate::store::HeaderStore;
use crate::token::{Marks, Token};
use crate::unlock::unlock;
use crate::write_back::Plan;

/// A header that is loaded in libcryptsetup and checked, to be changed.
pub(crate) struct Attached {
    pub(crate) working: WorkingCopy,
    pub(crate) device: Device,
    /// The copy to restore in the store, as it was before any change.
    repair: Option<(Copy, Vec<u8>)>,
}

impl Attached {
    pub(crate) fn new(
        store: &impl HeaderStore,
        loaded: &Loaded,
        metadata: &Metadata,
        facts: &Facts,
    ) -> Result<Self, HeaderError> {
        let working = loaded.working_copy(store, metadata)?;
        let device = Device::load(&working)?;
        working.check(facts)?;
        let repair = match loaded.to_repair() {
            Some(copy) => Some((copy, working.header(copy)?)),
            None => None,
        };
        Ok(Self { working, device, repair })
    }

    /// A plan that begins with the repair, if one is needed: the rest of every plan relies on two intact
    /// copies.
    pub(crate) fn plan(&self) -> Plan {
        let mut plan = Plan::default();
        if let Some((copy, bytes)) = &self.repair {
            plan.write(copy.offset(), bytes.clone());
        }
        plan
    }
}

/// An opened disk.
pub(crate) struct Session {
    pub(crate) loaded: Loaded,
    pub(crate) metadata: Metadata,
    /// The key slot of the given KEK.
    pub(crate) slot: u32,
    pub(crate) dek: SecretBytes,
    pub(crate) marks: Marks,
}

impl Session {
    /// Checks everything, cheap checks first, then unlocks and authenticates.
    pub(crate) fn open(
        store: &impl HeaderStore,
        expected: &Facts,
        kek: &SecretBytes,
        context: &KeyContext<'_>,
    ) -> Result<Self, HeaderError> {
        expected.check()?;
        check_len("key-encryption key", kek, KEK_LEN)?;
        check_size(store, expected)?;
        let loaded = Loaded::read(store)?;
        let metadata = Metadata::parse(loaded.json(), expected)?;
        let (slot, token) = choose_token(&metadata, expected, context)?;
        if !token.check_kek(kek, context)? {
            return Err(HeaderError::WrongKek(name(context)));
        }
        let dek = unlock_slot(store, &metadata, slot, kek)?;
        let dek = dek.ok_or_else(|| HeaderError::SlotDamaged(name(context)))?;
        token.authenticate(expected, &dek, kek, context)?;
        let marks = token.marks();
        Ok(Self { loaded, metadata, slot, dek, marks })
    }

    /// Loads its header in libcryptsetup, to be changed.
    pub(crate) fn attach(
        &self,
        store: &impl HeaderStore,
        facts: &Facts,
    ) -> Result<Attached, HeaderError> {
        Attached::new(store, &self.loaded, &self.metadata, facts)
    }

    /// Reads the header back and opens it with a key: a backend may lose writes that it reported as done, and
    /// the other key is removed because this one opens.
    pub(crate) fn prove(
        self,
        store: &impl HeaderStore,
        expected: &Facts,
        (kek, context): (&SecretBytes, &KeyContext<'_>),
    ) -> Result<(), HeaderError> {
        match Self::open(store, expected, kek, context) {
            Ok(read) if read.dek == self.dek => Ok(()),
            Err(error @ HeaderError::WrongKek(_)) => Err(error),
            _ => Err(HeaderError::ReadBackFailed(name(context))),
        }
    }
}

/// The DEK in a slot; none if the KEK does not open it.
pub(crate) fn unlock_slot(
    store: &impl HeaderStore,
    metadata: &Metadata,
    slot: u32,
    kek: &SecretBytes,
) -> Result<Option<SecretBytes>, HeaderError> {
    let Some(offset) = metadata.areas.get(&slot) else { return Ok(None) };
    let mut area = vec![0; AREA_LEN as usize];
    store.read_at(&mut area, *offset).map_err(HeaderError::Read)?;
    unlock(metadata, slot, &area, kek)
}

/// The token of the key that the context names, after checking that all tokens belong to this disk.
fn choose_token<'a>(
    metadata: &'a Metadata,
    expected: &Facts,
    context: &KeyContext<'_>,
) -> Result<(u32, &'a Token), HeaderError> {
    let vm = Uuid::from_bytes(context.vm);
    for token in metadata.tokens.values() {
        if token.disk != expected.disk {
            return Err(Refusal::OtherDisk { found: token.disk, expected: expected.disk }.into());
        }
        if token.vm != vm {
            return Err(Refusal::OtherVm { found: token.vm, expected: vm }.into());
        }
    }
    if metadata.tokens.is_empty() {
        return Err(Refusal::NoToken.into());
    }
    let found = metadata.tokens.iter().find(|(_, token)| token.is_of(context));
    found.map(|(slot, token)| (*slot, token)).ok_or_else(|| HeaderError::OtherKey {
        wanted: name(context),
        found: metadata.tokens.values().map(token_name).collect::<Vec<_>>().join(" and "),
    })
}

/// A key, for messages.
pub(crate) fn name(context: &KeyContext<'_>) -> String {
    format!("{} of provider {}", quote(context.key_id), Uuid::from_bytes(context.provider))
}

fn token_name(token: &Token) -> String {
    format!("{} of provider {}", quote(&token.key_id), token.provider)
}

pub(crate) fn check_len(
    what: &'static str,
    key: &SecretBytes,
    len: usize,
) -> Result<(), HeaderError> {
    if key.len() == len { Ok(()) } else { Err(HeaderError::KeyLength(what, key.len())) }
}

/// Whether header and data fit the store, so that a truncated image is noticed before it is used.
pub(crate) fn check_size(store: &impl HeaderStore, facts: &Facts) -> Result<(), HeaderError> {
    let found = store.size().map_err(HeaderError::Read)?;
    let needed = facts.data_offset + facts.size;
    if found < needed { Err(HeaderError::Truncated { found, needed }) } else { Ok(()) }
}
