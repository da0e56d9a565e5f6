//! Bounce buffers: a fixed arena of page-aligned blocks, owned by one queue.
//!
//! A buffer is 1, 2, 4, 8 or 16 blocks of 4096 bytes. The arena is mapped once and never grows: a caller that
//! finds it empty waits until a buffer comes back, which bounds the process's memory. A large one uses huge
//! pages where the kernel has them: a device then gets a long write in few segments (docs/decisions/047).

use std::io;
use std::num::NonZeroUsize;
use std::ptr::NonNull;
use std::sync::Arc;

use nix::sys::mman::{MapFlags, MmapAdvise, ProtFlags, madvise, mmap_anonymous, munmap};
use vmseal_channel::SharedMemory;

use crate::stack::memory::{Arena, Segment};

/// The unit of allocation, in bytes.
pub const BLOCK: usize = 4096;

/// The most blocks of a buffer: 64 KiB stay in the second-level cache between encryption and write.
pub const BLOCKS_MAX: usize = 16;

/// The size of a huge page, with base pages of 4096 bytes.
const HUGE_PAGE: usize = 2 * 1024 * 1024;

/// Blocks that one bitmap word stands for.
const WORD: usize = 64;

/// A buffer in use; it is given back with [`Pool::give`].
#[derive(Debug)]
#[must_use = "a buffer that is dropped is lost to its pool"]
pub struct Buffer {
    first: usize,
    blocks: usize,
}

impl Buffer {
    /// Its length in bytes.
    #[must_use]
    pub fn len(&self) -> usize {
        self.blocks * BLOCK
    }

    /// Where it begins in its arena, in bytes.
    pub(crate) fn place(&self) -> usize {
        self.first * BLOCK
    }

    /// Whether it is empty: never.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.blocks == 0
    }
}

/// The arena and its free blocks. Requests that use its buffers keep the arena alive after the pool is dropped.
#[derive(Debug)]
pub struct Pool {
    arena: Arc<Arena>,
    free: Vec<u64>,
}

impl Pool {
    /// Maps an arena of at least `bytes` (and at least one block). Pages become resident when first used.
    ///
    /// # Errors
    /// The error of `mmap`: out of memory, or above the limit of locked memory.
    pub fn new(bytes: usize) -> io::Result<Self> {
        let blocks = bytes.div_ceil(BLOCK).max(1);
        let length = NonZeroUsize::MIN.saturating_add(blocks * BLOCK - 1);
        let small = length.get() < HUGE_PAGE || page_size() != Some(BLOCK as i64);
        let base = if small { map(length)? } else { map_huge(length)? };
        // SAFETY: just mapped, and known to nobody else.
        Ok(Self::over(unsafe { Arena::new(base, length) }))
    }

    /// The same in memory that another process gets, too. What that must not know is never in a buffer.
    ///
    /// # Errors
    /// Those of making and mapping a memfd.
    pub fn shared(bytes: usize) -> io::Result<Self> {
        let blocks = bytes.div_ceil(BLOCK).max(1);
        Ok(Self::over(Arena::shared(SharedMemory::create(blocks * BLOCK)?)))
    }

    fn over(arena: Arena) -> Self {
        let blocks = arena.len() / BLOCK;
        let mut free = vec![u64::MAX; blocks.div_ceil(WORD)];
        let rest = blocks % WORD;
        if rest != 0 {
            let last = free.len() - 1;
            free[last] = (1 << rest) - 1;
        }
        Self { arena: Arc::new(arena), free }
    }

    /// How many blocks the arena has.
    #[must_use]
    pub fn blocks(&self) -> usize {
        self.arena.len() / BLOCK
    }

    /// Takes a buffer for `bytes`, or a smaller one if there is no other; none if all are in use.
    pub fn take(&mut self, bytes: usize) -> Option<Buffer> {
        let wanted = bytes.div_ceil(BLOCK).clamp(1, BLOCKS_MAX);
        let mut blocks = if bytes.div_ceil(BLOCK) >= BLOCKS_MAX {
            BLOCKS_MAX
        } else {
            wanted.next_power_of_two()
        };
        loop {
            if let Some(first) = self.claim(blocks) {
                return Some(Buffer { first, blocks });
            }
            if blocks == 1 {
                return None;
            }
            blocks /= 2;
        }
    }

    /// Gives a buffer back.
    pub fn give(&mut self, buffer: Buffer) {
        let mask = mask(buffer.blocks) << (buffer.first % WORD);
        debug_assert_eq!(self.free[buffer.first / WORD] & mask, 0, "given back twice");
        self.free[buffer.first / WORD] |= mask;
    }

    /// The memory of the pool's buffers.
    pub(crate) fn arena(&self) -> &Arc<Arena> {
        &self.arena
    }

    /// The memory of a buffer; valid as long as the arena.
    #[must_use]
    pub(crate) fn segment(&self, buffer: &Buffer) -> Segment {
        let base = self.arena.base().wrapping_add(buffer.first * BLOCK);
        // SAFETY: inside the arena, which lives as long as the pool and every request that the buffer is in, and
        // which the holder of the buffer uses alone.
        unsafe { Segment::new(base, buffer.len()) }
    }

    fn claim(&mut self, blocks: usize) -> Option<usize> {
        for (index, word) in self.free.iter_mut().enumerate() {
            let starts = runs(*word, blocks);
            if starts != 0 {
                let bit = starts.trailing_zeros() as usize;
                *word &= !(mask(blocks) << bit);
                return Some(index * WORD + bit);
            }
        }
        None
    }
}

fn page_size() -> Option<i64> {
    nix::unistd::sysconf(nix::unistd::SysconfVar::PAGE_SIZE).ok().flatten()
}

fn map(length: NonZeroUsize) -> io::Result<NonNull<libc::c_void>> {
    let (protection, flags) = (
        ProtFlags::PROT_READ | ProtFlags::PROT_WRITE,
        MapFlags::MAP_PRIVATE | MapFlags::MAP_NORESERVE,
    );
    // SAFETY: a new private anonymous mapping at an address of the kernel's choice.
    Ok(unsafe { mmap_anonymous(None, length, protection, flags) }?)
}

/// Maps `length` bytes where a huge page can begin.
fn map_huge(length: NonZeroUsize) -> io::Result<NonNull<libc::c_void>> {
    let longer = map(length.saturating_add(HUGE_PAGE))?;
    let before = longer.cast::<u8>().align_offset(HUGE_PAGE);
    for (at, surplus) in [(0, before), (before + length.get(), HUGE_PAGE - before)] {
        if surplus > 0 {
            // SAFETY: of the new mapping, the part outside the arena, which nobody has seen.
            unsafe { munmap(longer.byte_add(at), surplus) }?;
        }
    }
    // SAFETY: inside the new mapping.
    let base = unsafe { longer.byte_add(before) };
    // A kernel without huge pages refuses: the arena serves with small ones.
    // SAFETY: the arena, in which nothing is yet.
    let _ = unsafe { madvise(base, length.get(), MmapAdvise::MADV_HUGEPAGE) };
    Ok(base)
}

fn mask(blocks: usize) -> u64 {
    (1 << blocks) - 1
}

/// The bits of `word` at which an aligned run of `blocks` (a power of two) free blocks starts.
fn runs(word: u64, blocks: usize) -> u64 {
    let (mut starts, mut reach) = (word, 1);
    while reach < blocks {
        starts &= starts >> reach;
        reach *= 2;
    }
    let aligned = match blocks {
        1 => u64::MAX,
        2 => 0x5555_5555_5555_5555,
        4 => 0x1111_1111_1111_1111,
        8 => 0x0101_0101_0101_0101,
        _ => 0x0001_0001_0001_0001,
    };
    starts & aligned
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn buffers_never_overlap_and_all_come_back() {
        let mut pool = Pool::new(70 * BLOCK).unwrap();
        let mut held = Vec::new();
        let mut owned = [false; 70];
        for size in [1, 3, 16, 5, 2, 40, 1, 16, 9, 7, 1].into_iter().cycle() {
            let Some(buffer) = pool.take(size * BLOCK) else { break };
            for block in &mut owned[buffer.first..buffer.first + buffer.blocks] {
                assert!(!*block, "handed out twice");
                *block = true;
            }
            held.push(buffer);
        }
        assert!(owned.iter().all(|&taken| taken), "all 70 blocks are used before it says none");
        for buffer in held {
            pool.give(buffer);
        }
        assert_eq!(pool.take(BLOCKS_MAX * BLOCK).map(|buffer| buffer.blocks), Some(BLOCKS_MAX));
    }

    /// The flags of the mapping that `address` is in.
    fn flags(address: usize) -> String {
        let maps = std::fs::read_to_string("/proc/self/smaps").unwrap();
        let mut lines = maps.lines().skip_while(|line| {
            let ends = line.split(' ').next().and_then(|range| range.split_once('-'));
            let end = ends.and_then(|(_, end)| usize::from_str_radix(end, 16).ok());
            end.is_none_or(|end| end <= address)
        });
        lines.find(|line| line.starts_with("VmFlags:")).unwrap().into()
    }

    #[test]
    fn a_large_arena_begins_where_a_huge_page_does_and_asks_for_them() {
        let pool = Pool::new(HUGE_PAGE + 3 * BLOCK).unwrap();
        let base = pool.arena.base() as usize;
        assert!(base.is_multiple_of(HUGE_PAGE), "{base:#x}");
        let flags = flags(base);
        let has_them = std::fs::exists("/sys/kernel/mm/transparent_hugepage").unwrap();
        assert_eq!(flags.split_whitespace().any(|flag| flag == "hg"), has_them, "{flags}");
    }

    #[test]
    fn the_memory_of_a_buffer_outlives_its_pool_in_requests_that_have_it() {
        let mut pool = Pool::new(BLOCK).unwrap();
        let buffer = pool.take(BLOCK).unwrap();
        let (arena, mut list) =
            (Arc::downgrade(pool.arena()), crate::stack::memory::Segments::default());
        list.push_of(pool.arena(), pool.segment(&buffer));
        pool.give(buffer);
        drop(pool);
        list.as_slice()[0].copy_from(&[7; BLOCK]);
        assert!(arena.upgrade().is_some());
        drop(list);
        assert!(arena.upgrade().is_none(), "it is never unmapped");
    }

    #[test]
    fn buffers_in_shared_memory_are_where_another_process_finds_them() {
        let mut pool = Pool::shared(3 * BLOCK).unwrap();
        assert_eq!(pool.blocks(), 3);
        let first = pool.take(BLOCK).unwrap();
        let second = pool.take(BLOCK).unwrap();
        pool.segment(&second).copy_from(&[7; BLOCK]);
        let memory = pool.arena().shared_memory().unwrap();
        let file = std::fs::File::from(memory.fd().try_clone_to_owned().unwrap());
        let mut read = [0; BLOCK];
        let place = second.place() as u64;
        std::os::unix::fs::FileExt::read_exact_at(&file, &mut read, place).unwrap();
        assert_eq!(read, [7; BLOCK]);
        assert_eq!(pool.arena().place_of(&pool.segment(&second)), Some(second.place()));
        pool.give(first);
        pool.give(second);
    }

    #[test]
    fn a_smaller_buffer_is_given_where_the_wanted_one_is_not_free() {
        let mut pool = Pool::new(3 * BLOCK).unwrap();
        let first = pool.take(16 * BLOCK).unwrap();
        assert_eq!(first.blocks, 2);
        let second = pool.take(2 * BLOCK).unwrap();
        assert_eq!(second.blocks, 1);
        assert!(pool.take(1).is_none());
        pool.give(first);
        assert!(pool.take(1).is_some());
        pool.give(second);
    }
}
