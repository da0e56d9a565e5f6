//! The power is cut after every step of every change, and in the middle of writes: any subset of the
//! 4096-byte blocks written since the last flush may have reached the store.

#![allow(clippy::unwrap_used, reason = "a test")]

mod disk;

use disk::*;
use vmseal_luks::{HeaderError, HeaderStore};
use vmseal_secret::SecretBytes;
use vmseal_secret::derive::KeyContext;

/// Random subsets tried for each epoch between two flushes, besides none and each prefix of the writes.
const TEARS: usize = 12;

/// A generator whose seed is printed by the assertion that fails (splitmix64).
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }
}

/// Every state that a power cut during `journal` can leave, and some thousand subsets of blocks. Each comes
/// with the number of flushes before it.
fn states(before: &[u8], journal: &[Event]) -> Vec<(usize, u64, MemoryStore)> {
    let mut found = Vec::new();
    let mut durable = before.to_vec();
    let epochs: Vec<&[Event]> = journal.split(|event| *event == Event::Flush).collect();
    for (flushes, epoch) in epochs.iter().enumerate() {
        let blocks: Vec<(usize, &[u8])> = epoch
            .iter()
            .flat_map(|event| match event {
                Event::Write(offset, bytes) => bytes
                    .chunks(4096)
                    .enumerate()
                    .map(|(number, block)| (*offset as usize + number * 4096, block))
                    .collect::<Vec<_>>(),
                Event::Flush => unreachable!("split at flushes"),
            })
            .collect();
        let apply = |state: &mut Vec<u8>, chosen: &mut dyn FnMut(usize) -> bool| {
            for (number, (at, block)) in blocks.iter().enumerate() {
                if chosen(number) {
                    state[*at..at + block.len()].copy_from_slice(block);
                }
            }
        };
        for seed in 0..TEARS as u64 {
            let mut random = Random(seed << 32 | flushes as u64);
            let mut state = durable.clone();
            match seed {
                0 => {}
                1 => apply(&mut state, &mut |number| number == 0),
                2 => apply(&mut state, &mut |number| number + 1 != blocks.len()),
                _ => apply(&mut state, &mut |_| random.next() & 1 == 1),
            }
            found.push((flushes, seed, MemoryStore::with_head(&state)));
        }
        apply(&mut durable, &mut |_| true);
    }
    found.push((epochs.len(), 0, MemoryStore::with_head(&durable)));
    found
}

/// Which of the two keys open the disk; a DEK that comes out must be the disk's.
fn opens(store: &MemoryStore, dek: &SecretBytes) -> (bool, bool) {
    let with = |kek: &SecretBytes, context: &KeyContext<'_>| match vmseal_luks::open(
        store,
        &facts(),
        kek,
        context,
    ) {
        Ok(opened) => {
            assert_eq!(&opened.dek, dek);
            true
        }
        Err(_) => false,
    };
    (with(&kek(), &CONTEXT), with(&new_kek(), &NEW_CONTEXT))
}

fn add(store: &mut MemoryStore) -> Result<(), HeaderError> {
    let (kek, new_kek) = (kek(), new_kek());
    vmseal_luks::add_kek(store, &facts(), (&kek, &CONTEXT), (&new_kek, &NEW_CONTEXT))
}

fn drop_old(store: &mut MemoryStore) -> Result<(), HeaderError> {
    vmseal_luks::drop_other_keks(store, &facts(), &new_kek(), &NEW_CONTEXT)
}

#[test]
fn while_a_key_is_added_the_old_one_always_opens_and_the_step_can_be_repeated() {
    let mut store = created();
    store.journal.clear();
    let before = store.head.clone();
    add(&mut store).unwrap();
    assert_eq!(opens(&store, &dek()), (true, true));
    let all = states(&before, &store.journal);
    assert!(all.len() > 3 * TEARS);
    for (number, (flushes, seed, mut state)) in all.into_iter().enumerate() {
        let (old, _) = opens(&state, &dek());
        assert!(old, "after {flushes} flushes, seed {seed}");
        if number % 5 == 0 {
            add(&mut state).unwrap();
            assert_eq!(opens(&state, &dek()), (true, true), "after {flushes} flushes, seed {seed}");
        }
    }
}

#[test]
fn while_the_old_key_is_dropped_the_new_one_always_opens_and_the_step_can_be_repeated() {
    let mut store = created();
    add(&mut store).unwrap();
    store.journal.clear();
    let before = store.head.clone();
    drop_old(&mut store).unwrap();
    assert_eq!(opens(&store, &dek()), (false, true));
    for (number, (flushes, seed, mut state)) in
        states(&before, &store.journal).into_iter().enumerate()
    {
        let (_, new) = opens(&state, &dek());
        assert!(new, "after {flushes} flushes, seed {seed}");
        if number % 5 == 0 {
            drop_old(&mut state).unwrap();
            assert_eq!(
                opens(&state, &dek()),
                (false, true),
                "after {flushes} flushes, seed {seed}"
            );
            let old_area = &state.head[2 * COPY..2 * COPY + AREA];
            assert!(old_area.iter().all(|byte| *byte == 0), "the old slot's area is wiped");
        }
    }
}

/// A copy is damaged before a change begins: the only intact one is never written first.
#[test]
fn a_damaged_copy_is_restored_before_anything_else() {
    for damaged in [100, COPY + 100] {
        let mut store = created();
        store.head[damaged] ^= 1;
        store.journal.clear();
        let before = store.head.clone();
        add(&mut store).unwrap();
        for (flushes, seed, state) in states(&before, &store.journal) {
            assert!(opens(&state, &dek()).0, "after {flushes} flushes, seed {seed}");
        }
    }
}

#[test]
fn a_disk_under_creation_opens_whole_or_not_at_all() {
    let old_dek = SecretBytes::random(64).unwrap();
    for remade in [false, true] {
        let mut store = MemoryStore::new();
        if remade {
            vmseal_luks::create(&mut store, SIZE, &old_dek, &kek(), &CONTEXT, identity()).unwrap();
        }
        store.journal.clear();
        let before = store.head.clone();
        vmseal_luks::create(&mut store, SIZE, &dek(), &kek(), &CONTEXT, identity()).unwrap();
        let all = states(&before, &store.journal);
        let mut seen_new = false;
        for (number, (flushes, seed, mut state)) in all.into_iter().enumerate() {
            if let Ok(opened) = open(&state) {
                let new = opened.dek == dek();
                assert!(new || remade && opened.dek == old_dek && !seen_new);
                seen_new |= new;
            }
            if number % 5 == 0 {
                let again = SecretBytes::random(64).unwrap();
                vmseal_luks::create(&mut state, SIZE, &again, &kek(), &CONTEXT, identity())
                    .unwrap();
                assert_eq!(open(&state).unwrap().dek, again, "{flushes} flushes, seed {seed}");
            }
        }
        assert!(seen_new);
    }
}

#[test]
fn keys_are_changed_again_and_again() {
    let mut store = created();
    let keys = [(kek(), CONTEXT), (new_kek(), NEW_CONTEXT)];
    for round in 0..6 {
        let ((old, old_context), (new, new_context)) = (&keys[round % 2], &keys[(round + 1) % 2]);
        vmseal_luks::add_kek(&mut store, &facts(), (old, old_context), (new, new_context)).unwrap();
        assert_eq!(opens(&store, &dek()), (true, true));
        vmseal_luks::drop_other_keks(&mut store, &facts(), new, new_context).unwrap();
        assert_eq!(opens(&store, &dek()), (round % 2 == 1, round % 2 == 0));
    }
}

#[test]
fn a_third_key_waits_and_a_change_can_be_cancelled() {
    let mut store = created();
    add(&mut store).unwrap();
    let (third, context) = (secret(3, 32), KeyContext { key_id: "key-3", ..CONTEXT });
    let refused =
        vmseal_luks::add_kek(&mut store, &facts(), (&kek(), &CONTEXT), (&third, &context));
    assert!(matches!(refused, Err(HeaderError::TwoKeys)));
    vmseal_luks::drop_other_keks(&mut store, &facts(), &kek(), &CONTEXT).unwrap();
    assert_eq!(opens(&store, &dek()), (true, false));
    vmseal_luks::add_kek(&mut store, &facts(), (&kek(), &CONTEXT), (&third, &context)).unwrap();
}

/// A store whose writes fail from some point on.
struct Failing {
    inner: MemoryStore,
    left: usize,
}

impl HeaderStore for Failing {
    fn size(&self) -> std::io::Result<u64> {
        self.inner.size()
    }

    fn read_at(&self, buffer: &mut [u8], offset: u64) -> std::io::Result<()> {
        self.inner.read_at(buffer, offset)
    }

    fn write_at(&mut self, bytes: &[u8], offset: u64) -> std::io::Result<()> {
        self.left = self.left.checked_sub(1).ok_or(std::io::ErrorKind::StorageFull)?;
        self.inner.write_at(bytes, offset)
    }

    fn flush(&mut self) -> std::io::Result<()> {
        self.left = self.left.checked_sub(1).ok_or(std::io::ErrorKind::StorageFull)?;
        self.inner.flush()
    }
}

#[test]
fn a_full_datastore_ends_the_change_and_leaves_a_disk_that_opens() {
    let keys = (kek(), new_kek());
    for left in 0.. {
        let mut store = Failing { inner: created(), left };
        let done = vmseal_luks::add_kek(
            &mut store,
            &facts(),
            (&keys.0, &CONTEXT),
            (&keys.1, &NEW_CONTEXT),
        );
        assert!(opens(&store.inner, &dek()).0);
        match done {
            Ok(()) => {
                assert_eq!(left, 6);
                return;
            }
            Err(error) => assert!(matches!(error, HeaderError::Write(_)), "{error}"),
        }
    }
}

/// A store that reports a write of a range as done, and loses it.
struct Forgetful {
    inner: MemoryStore,
    lost: std::ops::Range<u64>,
}

impl HeaderStore for Forgetful {
    fn size(&self) -> std::io::Result<u64> {
        self.inner.size()
    }

    fn read_at(&self, buffer: &mut [u8], offset: u64) -> std::io::Result<()> {
        self.inner.read_at(buffer, offset)
    }

    fn write_at(&mut self, bytes: &[u8], offset: u64) -> std::io::Result<()> {
        if self.lost.contains(&offset) { Ok(()) } else { self.inner.write_at(bytes, offset) }
    }

    fn flush(&mut self) -> std::io::Result<()> {
        self.inner.flush()
    }
}

#[test]
fn a_key_that_the_store_lost_is_an_error() {
    let keys = (kek(), new_kek());
    let (copies, areas) = (0..2 * COPY as u64, 2 * COPY as u64..u64::MAX);
    for lost in [areas, copies] {
        let mut store = Forgetful { inner: created(), lost: lost.clone() };
        let (old, new) = ((&keys.0, &CONTEXT), (&keys.1, &NEW_CONTEXT));
        let added = vmseal_luks::add_kek(&mut store, &facts(), old, new);
        assert!(matches!(added, Err(HeaderError::ReadBackFailed(_))), "{lost:?}: {added:?}");
        assert!(opens(&store.inner, &dek()).0, "{lost:?}");
    }
}
