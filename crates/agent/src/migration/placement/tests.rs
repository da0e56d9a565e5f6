//! Streams as QEMU writes them, and what it would load of them.

use std::collections::BTreeMap;
use std::fs::File;
use std::os::unix::fs::FileExt;

use proptest::prelude::*;

use super::guest_memory::tests::file;
use super::page_stream::{PAGE, What, Write};
use super::*;

const PAGE_LEN: usize = PAGE as usize;
const SIZE: u64 = 16 * PAGE;
const SECTION: u32 = 2;

/// What comes after the memory: it looks like the beginning of anything.
const DEVICES: &[u8] = b"\x04\x00\x00\x00\x07\x03cpu and what else there is \x02\x01\x7e\x00QEVM";

/// A stream as QEMU writes it.
#[derive(Clone)]
pub struct Stream(pub Vec<u8>);

impl Stream {
    pub fn new() -> Self {
        let mut this = Self(b"QEVM\x00\x00\x00\x03\x07".to_vec());
        this.0.extend(10u32.to_be_bytes());
        this.0.extend(b"pc-q35-7.2");
        this
    }

    fn add(mut self, bytes: impl AsRef<[u8]>) -> Self {
        self.0.extend(bytes.as_ref());
        self
    }

    fn command(self, command: u16, data: &[u8]) -> Self {
        let length = u16::try_from(data.len()).unwrap();
        self.add([8]).add(command.to_be_bytes()).add(length.to_be_bytes()).add(data)
    }

    fn start(self, name: &str, version: u32) -> Self {
        let this = self.add([1]).add(SECTION.to_be_bytes()).name(name);
        this.add(0u32.to_be_bytes()).add(version.to_be_bytes())
    }

    fn name(self, name: &str) -> Self {
        self.add([name.len() as u8]).add(name)
    }

    fn blocks(mut self, blocks: &[(&str, u64)]) -> Self {
        let total: u64 = blocks.iter().map(|(_, length)| length).sum();
        self = self.add((total | 4).to_be_bytes());
        for (name, length) in blocks {
            self = self.name(name).add(length.to_be_bytes());
        }
        self
    }

    /// The section that begins, with the blocks.
    pub fn begun(self) -> Self {
        let this = self.start("ram", 4);
        this.blocks(&[("ram", SIZE), ("vga.vram", 4 * PAGE)]).eos()
    }

    pub fn part(self) -> Self {
        self.add([2]).add(SECTION.to_be_bytes())
    }

    fn last(self) -> Self {
        self.add([3]).add(SECTION.to_be_bytes())
    }

    fn eos(self) -> Self {
        self.add(16u64.to_be_bytes()).add([0x7e]).add(SECTION.to_be_bytes())
    }

    /// A page of a block, or of the same as before.
    fn page(self, block: Option<&str>, number: u64, content: &[u8]) -> Self {
        self.record(block, (number * PAGE) | 8).add(content)
    }

    pub fn filled(self, block: Option<&str>, number: u64, byte: u8) -> Self {
        self.record(block, (number * PAGE) | 2).add([byte])
    }

    pub fn record(self, block: Option<&str>, word: u64) -> Self {
        match block {
            Some(name) => self.add(word.to_be_bytes()).name(name),
            None => self.add((word | 0x20).to_be_bytes()),
        }
    }

    /// All that there can be.
    pub fn usual() -> Self {
        let page = |byte: u8| (0..PAGE_LEN).map(|at| byte ^ at as u8).collect::<Vec<_>>();
        let this = Self::new().command(1, b"").command(2, &7u32.to_be_bytes()).begun();
        let this = this.part().page(Some("ram"), 3, &page(1)).page(None, 4, &page(2));
        let this = this.filled(None, 5, 0).page(Some("vga.vram"), 1, &page(3)).filled(None, 2, 0);
        let this = this.filled(Some("ram"), 4, 0).page(None, 15, &page(4)).eos();
        let this = this.part().page(None, 3, &page(5)).filled(None, 6, 0xab).eos();
        this.command(11, b"").last().page(Some("ram"), 0, &page(6)).eos().add(DEVICES)
    }
}

/// What QEMU has after it has loaded a stream: its blocks, and what follows the memory. By migration/ram.c, as `ram_load_precopy`.
fn loaded(stream: &[u8]) -> (BTreeMap<String, Vec<u8>>, Vec<u8>) {
    fn take<'a>(stream: &mut &'a [u8], length: usize) -> &'a [u8] {
        let (taken, rest) = stream.split_at(length);
        *stream = rest;
        taken
    }
    fn number(stream: &mut &[u8], length: usize) -> u64 {
        take(stream, length).iter().fold(0, |sum, byte| (sum << 8) | u64::from(*byte))
    }
    fn name(stream: &mut &[u8]) -> String {
        let length = number(stream, 1) as usize;
        String::from_utf8(take(stream, length).to_vec()).unwrap()
    }
    let (mut blocks, mut current) = (BTreeMap::new(), String::new());
    let mut rest = &stream[9 + 4 + 10..];
    loop {
        let kind = number(&mut rest, 1);
        if kind == 8 {
            take(&mut rest, 2);
            let length = number(&mut rest, 2) as usize;
            take(&mut rest, length);
            continue;
        }
        take(&mut rest, 4);
        if kind == 1 {
            name(&mut rest);
            take(&mut rest, 8);
        }
        loop {
            let word = number(&mut rest, 8);
            let (at, flags) = ((word & !0xfff) as usize, word & 0xfff);
            if flags & 0x20 == 0 && flags & 0xa != 0 {
                current = name(&mut rest);
            }
            match flags & !0x20 {
                4 => {
                    let mut left = at as u64;
                    while left > 0 {
                        let name = name(&mut rest);
                        let length = number(&mut rest, 8);
                        blocks.insert(name, vec![0; length as usize]);
                        left -= length;
                    }
                }
                8 => {
                    let page = take(&mut rest, PAGE_LEN);
                    blocks.get_mut(&current).unwrap()[at..at + PAGE_LEN].copy_from_slice(page);
                }
                2 => {
                    let byte = number(&mut rest, 1) as u8;
                    blocks.get_mut(&current).unwrap()[at..at + PAGE_LEN].fill(byte);
                }
                _ => break,
            }
        }
        take(&mut rest, 5);
        if kind == 3 {
            return (blocks, rest.to_vec());
        }
    }
}

/// One for a guest of 16 pages, and its memory.
pub fn placement() -> (Placement, File) {
    let file = file(SIZE);
    let memory = GuestMemory::new(file.try_clone().unwrap(), SIZE).unwrap();
    (Placement::new("ram", memory), file)
}

/// Gives a stream in these pieces. What QEMU got, what is in memory, and how it ended.
fn placed<'a>(
    pieces: impl IntoIterator<Item = &'a [u8]>,
) -> (Vec<u8>, Vec<u8>, Result<Option<Placed>, PlacementError>) {
    let ((mut placement, file), mut got) = (placement(), Vec::new());
    let given = || {
        for piece in pieces {
            got.extend_from_slice(placement.take(piece)?);
        }
        placement.end()
    };
    let ended = given();
    (got, all_of(&file), ended)
}

/// What is in a memory.
pub fn all_of(file: &File) -> Vec<u8> {
    let mut memory = vec![0; SIZE as usize];
    file.read_exact_at(&mut memory, 0).unwrap();
    memory
}

/// QEMU and the agent together have what QEMU alone would have.
pub fn assert_same(stream: &[u8], got: &[u8], memory: &[u8]) {
    let ((mut alone, devices), (mut together, rest)) = (loaded(stream), loaded(got));
    let before = together.insert("ram".to_owned(), memory.to_vec()).unwrap();
    assert!(before.iter().all(|byte| *byte == 0), "QEMU has got a page of the guest's memory");
    assert!(rest == devices, "what follows the memory");
    for (name, block) in &mut alone {
        let other = &together[name];
        let differs = |page: &usize| {
            block[page * PAGE_LEN..][..PAGE_LEN] != other[page * PAGE_LEN..][..PAGE_LEN]
        };
        let pages: Vec<_> = (0..block.len() / PAGE_LEN).filter(differs).collect();
        assert!(pages.is_empty(), "pages of {name} differ: {pages:?}");
    }
}

#[test]
fn a_stream_that_is_cut_anywhere_fills_the_memory_and_leaves_the_rest_to_qemu() {
    let stream = Stream::usual().0;
    let (expected, filled, _) = placed([&stream[..]]);
    assert_same(&stream, &expected, &filled);
    assert!(expected.len() < stream.len() - 4 * PAGE_LEN);
    for at in 0..=stream.len() {
        let (one, other) = stream.split_at(at);
        let (got, memory, ended) = placed([one, other]);
        let written = Placed { bytes: 7 * PAGE, holes: 1 };
        assert_eq!(ended.unwrap(), Some(written), "cut at {at}");
        assert!(got == expected && memory == filled, "cut at {at}");
    }
}

#[test]
fn a_stream_in_single_bytes_and_odd_pieces_is_the_same() {
    let stream = Stream::usual().0;
    for length in [1, 2, 3, 7, 4095, 4097, 4104] {
        let (got, memory, ended) = placed(stream.chunks(length));
        assert!(ended.unwrap().is_some());
        assert_same(&stream, &got, &memory);
    }
}

#[test]
fn a_page_is_in_memory_before_what_comes_after_it_is_for_qemu() {
    let stream = Stream::usual().0;
    let mut pages = page_stream::PageStream::new("ram", SIZE);
    let (mut pending, mut seen) = (None, 0);
    for byte in stream.chunks(1) {
        let mut parts = Parts::default();
        pages.take(byte, &mut parts).unwrap();
        for write in &parts.writes {
            match write {
                Write::Bytes { at, bytes } => {
                    pending = Some(!(at + bytes.len() as u64).is_multiple_of(PAGE));
                }
                Write::Fill { .. } => pending = Some(false),
            }
        }
        assert!(parts.for_qemu.is_empty() || pending != Some(true), "in the middle of a page");
        seen += parts.for_qemu.len();
    }
    assert!(seen > 0 && pending == Some(false));
}

#[test]
fn what_is_not_known_is_left_to_qemu_as_long_as_no_page_is_placed() {
    let begun = || Stream::new().begun();
    let started = |blocks: &[(&str, u64)]| Stream::new().start("ram", 4).blocks(blocks);
    let given_up = [
        (Stream(b"QEVN".to_vec()), What::Begin),
        (Stream(b"QEVM\x00\x00\x00\x02\x07".to_vec()), What::Begin),
        (Stream(b"QEVM\x00\x00\x00\x03\x01".to_vec()), What::Begin),
        // A subsection of the configuration, as that of x-ignore-shared.
        (Stream::new().add(b"\x05\x1aconfiguration/capabilities"), What::Section(5)),
        (Stream::new().add([4]), What::Section(4)),
        (Stream::new().command(3, b""), What::Command(3)),
        (Stream::new().start("block", 4), What::NotMemory),
        (Stream::new().start("ram", 5), What::NotMemory),
        (Stream::new().part(), What::OutOfPlace),
        (begun().start("ram", 4), What::OutOfPlace),
        (started(&[("ram", SIZE + PAGE)]), What::Blocks),
        (started(&[("ram", SIZE), ("ram", SIZE)]), What::Blocks),
        (started(&[("vga.vram", SIZE)]), What::Blocks),
        (Stream::new().start("ram", 4).blocks(&[]), What::Blocks),
        (Stream::new().start("ram", 4).filled(Some("ram"), 0, 0), What::Blocks),
        (begun().part().blocks(&[("ram", SIZE)]), What::Blocks),
        (begun().part().filled(None, 0, 0), What::NoBlock),
        (begun().part().filled(Some("ram"), 16, 0), What::Outside(SIZE)),
        (begun().part().record(Some("ram"), 0x40), What::Record(0x40)),
        (begun().part().record(None, 0x100), What::Record(0x120)),
        (begun().part().record(None, 0x200), What::Record(0x220)),
        (Stream::new().start("ram", 4).add(16u64.to_be_bytes()).add([2]), What::OutOfPlace),
        (begun().add([4]), What::Section(4)),
    ];
    for (stream, expected) in given_up {
        let stream = stream.add(DEVICES).add([0x55; PAGE_LEN]).0;
        for length in [1, 5, stream.len()] {
            let (got, memory, ended) = placed(stream.chunks(length));
            assert!(matches!(ended, Ok(None)), "{expected}: {ended:?}");
            assert!(got == stream, "{expected}");
            assert!(memory.iter().all(|byte| *byte == 0), "{expected}");
        }
        let mut pages = page_stream::PageStream::new("ram", SIZE);
        pages.take(&stream, &mut Parts::default()).unwrap();
        assert_eq!(pages.gave_up().map(|unexpected| unexpected.what), Some(expected));
    }
}

#[test]
fn what_is_not_known_after_pages_were_placed_is_an_error() {
    let begun = || Stream::new().begun().part().filled(Some("ram"), 1, 7);
    let failed = [
        (begun().record(None, 0x40), What::Record(0x60)),
        (begun().filled(None, u64::MAX / PAGE, 0), What::Outside(u64::MAX - PAGE + 1)),
        (begun().add((SIZE | 4).to_be_bytes()), What::Blocks),
        (begun().eos().add([4]), What::Section(4)),
        (begun().eos().command(7, b""), What::Command(7)),
        (begun().eos().add([2]).add(3u32.to_be_bytes()), What::OutOfPlace),
    ];
    for (stream, expected) in failed {
        for length in [1, stream.0.len()] {
            match placed(stream.0.chunks(length)).2 {
                Err(PlacementError::Stream(Unexpected { what, at })) => {
                    assert_eq!((what, at), (expected, stream.0.len() as u64));
                }
                other => panic!("{expected}: {other:?}"),
            }
        }
    }
}

#[test]
fn a_stream_that_ends_before_the_memory_is_there_has_failed() {
    let stream = Stream::usual().0;
    let devices = stream.len() - DEVICES.len();
    for length in [0, 3, 30, devices - PAGE_LEN, devices - 1] {
        assert!(matches!(placed([&stream[..length]]).2, Err(PlacementError::Cut)), "{length}");
    }
    assert!(placed([&stream[..devices]]).2.is_ok());
}

/// A record of one of two blocks: its page, and what is in it (a page where there is nothing, else one byte repeated).
fn record() -> impl Strategy<Value = (bool, bool, u64, Option<u8>)> {
    (any::<bool>(), any::<bool>(), 0..4u64, any::<Option<u8>>())
}

proptest! {
    #[test]
    fn any_records_in_any_pieces_fill_the_memory_as_qemu_would(
        sections in proptest::collection::vec(proptest::collection::vec(record(), 0..8), 1..4),
        cuts in proptest::collection::vec(1..9000usize, 1..20),
    ) {
        let (mut stream, mut before) = (Stream::new().begun(), None);
        let last = sections.len() - 1;
        for (index, records) in sections.into_iter().enumerate() {
            stream = if index == last { stream.last() } else { stream.part() };
            for (count, (ours, again, number, byte)) in (0u8..).zip(records) {
                let block = if ours { "ram" } else { "vga.vram" };
                let named = if again && before == Some(block) { None } else { Some(block) };
                before = Some(block);
                stream = match byte {
                    Some(byte) => stream.filled(named, number, byte),
                    None => stream.page(named, number, &[count ^ 0x5a; PAGE_LEN]),
                };
            }
            stream = stream.eos();
        }
        let stream = stream.add(DEVICES).0;
        let (mut pieces, mut rest) = (Vec::new(), &stream[..]);
        for cut in cuts.into_iter().cycle() {
            let (piece, other) = rest.split_at(cut.min(rest.len()));
            pieces.push(piece);
            rest = other;
            if rest.is_empty() {
                break;
            }
        }
        let (got, memory, ended) = placed(pieces);
        prop_assert!(matches!(ended, Ok(Some(_))));
        assert_same(&stream, &got, &memory);
    }
}
