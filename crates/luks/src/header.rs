//! Create, open, inspect, change keys, mark, repair, adopt. Every function that changes a header can be killed at
//! any point and repeated.
//!
//! A change of KEK (shallow recrypt), as the inventory sees it:
//!
//! ```text
//!  one key ── add_kek ──▶ two keys ── the inventory names the new one ── drop_other_keks ──▶ one key
//!     ▲                      │
//!     └── drop_other_keks ───┘ (with the old key: the change is cancelled)
//! ```

use vmseal_secret::derive::KeyContext;
use vmseal_secret::{DEK_LEN, KEK_LEN, SecretBytes};

use crate::error::{CopyFault, HeaderError, Refusal};
use crate::facts::{Facts, Holes, Identity, Role};
use crate::layout::{self, COPY_LEN, Copy, HeaderNotice};
use crate::library::Device;
use crate::loaded::{Copies, Loaded, WorkingCopy};
use crate::metadata::{Metadata, SLOTS_MAX, area_offsets};
use crate::session::{Attached, Session, check_len, check_size, name, unlock_slot};
use crate::store::HeaderStore;
use crate::token::{KeyReference, Marks, Token};
use crate::write_back::Plan;

/// An opened disk.
#[derive(Debug)]
pub struct Opened {
    /// The key of its data.
    pub dek: SecretBytes,
    /// How its holes read; authenticated.
    pub holes: Holes,
    /// Whether disks of other VMs may have its key; authenticated.
    pub shared: bool,
    /// What it is for; authenticated.
    pub role: Role,
    /// Something to repair.
    pub notice: Option<HeaderNotice>,
}

/// Makes the header of a new disk of `size` bytes (a multiple of 4096) that is encrypted with `dek` (64
/// bytes) and opens with `kek` (32 bytes). The store must be as long as header and data.
///
/// The disk is finished when the returned facts are in the inventory; until then it may be made again with
/// another DEK. An intact header of another disk is never overwritten.
///
/// # Errors
/// [`HeaderError`]; nothing has been written except on [`HeaderError::Write`].
pub fn create(
    store: &mut impl HeaderStore,
    size: u64,
    dek: &SecretBytes,
    kek: &SecretBytes,
    context: &KeyContext<'_>,
    identity: Identity,
) -> Result<Facts, HeaderError> {
    let facts = Facts::new(identity.disk, size)?;
    check_len("data-encryption key", dek, DEK_LEN)?;
    check_len("key-encryption key", kek, KEK_LEN)?;
    check_size(store, &facts)?;
    let before = Copies::read(store)?;
    check_vacant(&before, &facts)?;

    let working = WorkingCopy::empty()?;
    let device = Device::format(&working, facts.disk, dek)?;
    device.add_slot(0, dek, kek)?;
    let Identity { disk: _, holes, shared, role } = identity;
    let token = Token::new(0, &facts, Marks { holes, shared, role }, dek, kek, context)?;
    device.set_token(0, &token.encode()?)?;
    drop(device);

    let mut plan = Plan::default();
    // The remains of an earlier attempt must not refer to the area that is written next.
    for copy in [Copy::Primary, Copy::Secondary] {
        if before.get(copy).iter().any(|byte| *byte != 0) {
            plan.write(copy.offset(), vec![0; COPY_LEN]);
        }
    }
    for offset in working.check(&facts)?.areas.values() {
        plan.area(&working, *offset)?;
    }
    plan.copies(&working)?;
    plan.run(store)?;
    Ok(facts)
}

/// Opens a disk. `expected` are the facts of the inventory, `context` is the context of `kek`.
///
/// # Errors
/// [`HeaderError`] says what is wrong; no key derivation beyond the limits has been run.
pub fn open(
    store: &impl HeaderStore,
    expected: &Facts,
    kek: &SecretBytes,
    context: &KeyContext<'_>,
) -> Result<Opened, HeaderError> {
    let session = Session::open(store, expected, kek, context)?;
    let Session { loaded, dek, marks: Marks { holes, shared, role }, .. } = session;
    Ok(Opened { dek, holes, shared, role, notice: loaded.notice })
}

/// The disk's id and the keys that open it, according to the header. Needs no key, and nothing of it is
/// authenticated: for listings.
///
/// # Errors
/// [`HeaderError`]: there is no header, or not one of vmseal's.
pub fn inspect(
    store: &impl HeaderStore,
) -> Result<(Vec<KeyReference>, Option<HeaderNotice>), HeaderError> {
    let loaded = Loaded::read(store)?;
    let tokens = Metadata::tokens(loaded.json())?;
    if tokens.is_empty() {
        return Err(Refusal::NoToken.into());
    }
    Ok((tokens.iter().map(Token::reference).collect(), loaded.notice))
}

/// Restores the copy of the header that [`Opened::notice`] reports. Does nothing if there is no notice.
///
/// # Errors
/// As [`open`], or [`HeaderError::Write`].
pub fn repair(
    store: &mut impl HeaderStore,
    expected: &Facts,
    kek: &SecretBytes,
    context: &KeyContext<'_>,
) -> Result<(), HeaderError> {
    let session = Session::open(store, expected, kek, context)?;
    session.attach(store, expected)?.plan().run(store)
}

/// Adds a second KEK that opens the disk (shallow recrypt, first half). Does nothing if the KEK opens it
/// already. The header is read back and opened with the second KEK.
///
/// # Errors
/// As [`open`], [`HeaderError::TwoKeys`], [`HeaderError::Write`], or [`HeaderError::ReadBackFailed`]: the
/// disk opens with the first KEK as before.
pub fn add_kek(
    store: &mut impl HeaderStore,
    expected: &Facts,
    (old, old_context): (&SecretBytes, &KeyContext<'_>),
    (new, new_context): (&SecretBytes, &KeyContext<'_>),
) -> Result<(), HeaderError> {
    check_len("key-encryption key", new, KEK_LEN)?;
    let session = Session::open(store, expected, old, old_context)?;
    let Session { metadata, dek, marks, .. } = &session;
    let attached = session.attach(store, expected)?;
    let mut plan = attached.plan();
    if metadata.tokens.values().any(|token| token.is_of(new_context)) {
        plan.run(store)?;
        return session.prove(store, expected, (new, new_context));
    }
    let areas = &metadata.areas;
    let free = (0..SLOTS_MAX as u32).find(|slot| !areas.contains_key(slot));
    let slot = free.filter(|_| areas.len() < SLOTS_MAX).ok_or(HeaderError::TwoKeys)?;
    attached.device.add_slot(slot, dek, new)?;
    let token = Token::new(slot, expected, *marks, dek, new, new_context)?;
    attached.device.set_token(slot, &token.encode()?)?;
    if let Some(area) = attached.working.check(expected)?.areas.get(&slot) {
        plan.area(&attached.working, *area)?;
    }
    plan.copies(&attached.working)?;
    drop(attached);
    plan.run(store)?;
    session.prove(store, expected, (new, new_context))
}

/// Removes all KEKs but `kek`, and overwrites their key slots (shallow recrypt, second half). Nothing is
/// written unless the disk opens with `kek`.
///
/// # Errors
/// As [`open`], [`HeaderError::Write`], or [`HeaderError::ReadBackFailed`].
pub fn drop_other_keks(
    store: &mut impl HeaderStore,
    expected: &Facts,
    kek: &SecretBytes,
    context: &KeyContext<'_>,
) -> Result<(), HeaderError> {
    let session = Session::open(store, expected, kek, context)?;
    let Session { metadata, slot, .. } = &session;
    let attached = session.attach(store, expected)?;
    let mut plan = attached.plan();
    let others: Vec<u32> = metadata.areas.keys().copied().filter(|other| other != slot).collect();
    for other in &others {
        attached.device.remove_slot(*other)?;
    }
    if !others.is_empty() {
        plan.copies(&attached.working)?;
    }
    let used = attached.working.check(expected)?.areas;
    // Also when there was nothing to remove: a power cut may have come before the wipe.
    for area in area_offsets().into_iter().filter(|area| !used.values().any(|used| used == area)) {
        plan.wipe_area(area);
    }
    drop(attached);
    plan.run(store)?;
    session.prove(store, expected, (kek, context))
}

/// Notes that disks of other VMs may have the data key: it is read through buffers from now on. Does nothing if that is noted
/// already, and cannot be taken back. The header is read back.
///
/// # Errors
/// As [`open`], [`HeaderError::TwoKeys`] while another KEK opens the disk, too, as its note cannot be made without it;
/// [`HeaderError::Write`], or [`HeaderError::ReadBackFailed`]: the disk opens as before.
pub fn mark_shared(
    store: &mut impl HeaderStore,
    expected: &Facts,
    kek: &SecretBytes,
    context: &KeyContext<'_>,
) -> Result<(), HeaderError> {
    let session = Session::open(store, expected, kek, context)?;
    let Session { metadata, slot, dek, marks, .. } = &session;
    // The token of another key would stay without the note, and be the only one when that key is.
    if metadata.tokens.values().any(|token| !token.shared && !token.is_of(context)) {
        return Err(HeaderError::TwoKeys);
    }
    let attached = session.attach(store, expected)?;
    let mut plan = attached.plan();
    if !marks.shared {
        let marked = Marks { shared: true, ..*marks };
        let token = Token::new(*slot, expected, marked, dek, kek, context)?;
        attached.device.set_token(*slot, &token.encode()?)?;
        attached.working.check(expected)?;
        plan.copies(&attached.working)?;
    }
    drop(attached);
    plan.run(store)?;
    match Session::open(store, expected, kek, context) {
        Ok(read) if read.marks.shared && read.dek == session.dek => Ok(()),
        _ => Err(HeaderError::ReadBackFailed(name(context))),
    }
}

/// Takes over a disk that cryptsetup made with vmseal's parameters (docs/formats/disk.md) and `kek` as its
/// key file: adds the token. Its holes read as ciphertext, as in dm-crypt.
///
/// # Errors
/// [`HeaderError`]; [`HeaderError::Occupied`] if it is a disk of vmseal already.
pub fn adopt(
    store: &mut impl HeaderStore,
    size: u64,
    kek: &SecretBytes,
    context: &KeyContext<'_>,
    disk: uuid::Uuid,
) -> Result<Facts, HeaderError> {
    let facts = Facts::new(disk, size)?;
    check_len("key-encryption key", kek, KEK_LEN)?;
    check_size(store, &facts)?;
    let loaded = Loaded::read(store)?;
    let metadata = Metadata::parse(loaded.json(), &facts)?;
    if let Some(token) = metadata.tokens.values().next() {
        return Err(HeaderError::Occupied(token.disk.to_string()));
    }
    let (1, Some(slot)) = (metadata.areas.len(), metadata.areas.keys().next().copied()) else {
        return Err(HeaderError::TwoKeys);
    };
    let dek = unlock_slot(store, &metadata, slot, kek)?;
    let attached = Attached::new(store, &loaded, &metadata, &facts)?;
    let dek = dek.ok_or_else(|| HeaderError::WrongKek(name(context)))?;
    let mut plan = attached.plan();
    let marks = Marks { holes: Holes::Ciphertext, shared: false, role: Role::Data };
    let token = Token::new(slot, &facts, marks, &dek, kek, context)?;
    attached.device.set_token(slot, &token.encode()?)?;
    attached.working.check(&facts)?;
    plan.copies(&attached.working)?;
    plan.run(store)?;
    Ok(facts)
}

/// Whether a new header may be written: there is none, or one of an earlier attempt at this disk.
fn check_vacant(before: &Copies, facts: &Facts) -> Result<(), HeaderError> {
    for copy in [Copy::Primary, Copy::Secondary] {
        let owner = match layout::parse(copy, before.get(copy)) {
            // Torn, or not a header at all.
            Err(CopyFault::Magic | CopyFault::Checksum) => continue,
            Err(_) => "of an unknown kind".to_owned(),
            Ok(valid) => match Metadata::tokens(valid.json).as_deref() {
                Ok([token, ..]) if token.disk == facts.disk => continue,
                Ok([token, ..]) => token.disk.to_string(),
                _ => "of another maker".to_owned(),
            },
        };
        return Err(HeaderError::Occupied(owner));
    }
    Ok(())
}
