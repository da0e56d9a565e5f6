//! QEMU's migration stream, as far as it must be known to take the pages of one block of memory out of it. What is left is a
//! stream that QEMU loads as well: it never counts which pages have come.
//!
//! ```text
//! stream:   magic, version ─► configuration ─► sections
//! section:  START | PART | END of `ram` ─► records ─► EOS ─► footer      until END; what follows is QEMU's alone
//!           command (return path, ping)
//! record:   the list of blocks | a page: address, block or "as before", 4096 bytes | the same, of one byte repeated
//! ```
//! Devices' state can only be read by who knows the devices, so there must be none before the memory's END. Whatever else this does not know
//! makes it give up: while no page was taken out, all passes as it came, and QEMU judges it. Later that is an error, as QEMU would count a page
//! "as before" to another block.
//!
//! Pieces of any length come in; nothing of a page is kept, and of what precedes one at most [`HEAD_MAX`] bytes.

use zeroize::Zeroizing;

/// The bytes of a page in the stream: those of the smallest page of the guest's processor, x86's.
pub const PAGE: u64 = 4096;

/// The longest head: that of a section that begins (type, id, a name of at most 255 bytes, instance, version).
pub const HEAD_MAX: usize = 1 + 4 + 1 + 255 + 4 + 4;

const MAGIC: u32 = u32::from_be_bytes(*b"QEVM");
const VERSION: u32 = 3;

// Types of sections (QEMU_VM_* in QEMU's migration/savevm.h).
const START: u8 = 0x01;
const PART: u8 = 0x02;
const END: u8 = 0x03;
const CONFIGURATION: u8 = 0x07;
const COMMAND: u8 = 0x08;
const FOOTER: u8 = 0x7e;

/// Commands after which the stream goes on as before: open the return path, ping, and that the switch-over begins.
const COMMANDS: [u16; 3] = [1, 2, 11];

/// The name and the version of the sections with the memory.
const MEMORY: (&[u8], u32) = (b"ram", 4);

// Flags of records (RAM_SAVE_FLAG_* in QEMU's migration/ram.c); they are in the bits that are zero in a page's address.
const FLAGS: u64 = PAGE - 1;
const FILLED: u64 = 0x02;
const BLOCKS: u64 = 0x04;
const WHOLE: u64 = 0x08;
const EOS: u64 = 0x10;
/// Of the same block as the page before.
const CONTINUE: u64 = 0x20;

/// What this does not know.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum What {
    /// Another magic, version or configuration.
    #[error("the beginning of another format")]
    Begin,
    /// A section.
    #[error("a section of the type {0:#04x}")]
    Section(u8),
    /// A section that begins and is not the memory's, or of another version.
    #[error("a section of something else than the memory")]
    NotMemory,
    /// A section that goes on and has not begun, or that does not end as it should.
    #[error("a section out of place")]
    OutOfPlace,
    /// A command.
    #[error("the command {0}")]
    Command(u16),
    /// A record.
    #[error("a record with the flags {0:#x}")]
    Record(u64),
    /// A list of blocks without the guest's memory, or with another length of it; or pages before the list.
    #[error("a list of memory other than the guest's")]
    Blocks,
    /// A page "as before" where there was none.
    #[error("a page of no block")]
    NoBlock,
    /// A page that is not in the memory.
    #[error("a page at {0:#x}, outside of the guest's memory")]
    Outside(u64),
}

/// Why no page can be taken out any more.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{what}, near byte {at} of QEMU's stream")]
pub struct Unexpected {
    /// What came.
    pub what: What,
    /// Where.
    pub at: u64,
}

/// What is to be written into the memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Write<'a> {
    /// These bytes, a page or a part of one.
    Bytes {
        /// Where, in bytes.
        at: u64,
        /// What.
        bytes: &'a [u8],
    },
    /// A page of one byte repeated.
    Fill {
        /// Where, in bytes.
        at: u64,
        /// What.
        byte: u8,
    },
}

/// What a piece of the stream holds.
#[derive(Debug, Default)]
pub struct Parts<'a> {
    /// What QEMU is to load. No more than was given, and [`HEAD_MAX`].
    pub for_qemu: Zeroizing<Vec<u8>>,
    /// What is to be in memory before QEMU gets that, in this order.
    pub writes: Vec<Write<'a>>,
}

/// Where in the stream it is: what the next head is of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Place {
    Begin,
    Section,
    Record,
    /// In the list of blocks, whose lengths are so much together, without those before.
    Block {
        left: u64,
    },
    Footer,
    /// What is QEMU's alone.
    Rest,
}

/// What follows a head and is not looked at.
#[derive(Clone, Copy, Debug)]
enum Body {
    ForQemu { left: u64 },
    Page { at: u64, left: u64 },
}

/// Which block a page is of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Of {
    SameAsBefore,
    /// One with a name, and whether that is the block's.
    Named(bool),
}

/// What comes before pages, names and the like.
#[derive(Debug)]
enum Head {
    /// Of the stream; the name of the machine follows.
    Begin {
        name: u32,
    },
    Start {
        section: u32,
    },
    More {
        section: u32,
        last: bool,
    },
    Command {
        length: u16,
    },
    Blocks {
        total: u64,
    },
    Block {
        ours: bool,
        length: u64,
    },
    Page {
        of: Of,
        at: u64,
    },
    Filled {
        of: Of,
        at: u64,
        byte: u8,
    },
    Eos,
    Footer {
        section: u32,
    },
}

/// Why a head is none yet.
enum Stop {
    /// It needs so many bytes in all, or more.
    Needs(usize),
    Unexpected(What),
}

/// Reads a head.
struct Reader<'h> {
    head: &'h [u8],
    at: usize,
}

impl<'h> Reader<'h> {
    fn bytes(&mut self, length: usize) -> Result<&'h [u8], Stop> {
        let end = self.at + length;
        let bytes = self.head.get(self.at..end).ok_or(Stop::Needs(end))?;
        self.at = end;
        Ok(bytes)
    }

    fn array<const N: usize>(&mut self) -> Result<[u8; N], Stop> {
        let mut array = [0; N];
        array.copy_from_slice(self.bytes(N)?);
        Ok(array)
    }

    fn u8(&mut self) -> Result<u8, Stop> {
        self.array().map(|[byte]| byte)
    }

    fn u16(&mut self) -> Result<u16, Stop> {
        self.array().map(u16::from_be_bytes)
    }

    fn u32(&mut self) -> Result<u32, Stop> {
        self.array().map(u32::from_be_bytes)
    }

    fn u64(&mut self) -> Result<u64, Stop> {
        self.array().map(u64::from_be_bytes)
    }

    fn name(&mut self) -> Result<&'h [u8], Stop> {
        let length = self.u8()?;
        self.bytes(usize::from(length))
    }
}

/// See the module.
#[derive(Debug)]
pub struct PageStream {
    /// The block whose pages are taken out, and its length in bytes.
    block: &'static str,
    size: u64,
    place: Place,
    body: Option<Body>,
    /// What has come of the next head.
    head: Zeroizing<Vec<u8>>,
    /// How many bytes have come.
    at: u64,
    /// The number of the memory's sections, and whether this is the last one.
    section: Option<u32>,
    last: bool,
    /// Whether the list of blocks has come.
    listed: bool,
    /// Whether the page before was of the block.
    current: Option<bool>,
    taken_out: bool,
    gave_up: Option<Unexpected>,
}

impl PageStream {
    /// Of which the pages of this block are taken out.
    #[must_use]
    pub fn new(block: &'static str, size: u64) -> Self {
        Self {
            block,
            size,
            place: Place::Begin,
            body: None,
            head: Zeroizing::new(Vec::with_capacity(HEAD_MAX)),
            at: 0,
            section: None,
            last: false,
            listed: false,
            current: None,
            taken_out: false,
            gave_up: None,
        }
    }

    /// Whether all that comes from now on is for QEMU, as it is.
    #[must_use]
    pub fn is_at_rest(&self) -> bool {
        self.place == Place::Rest
    }

    /// Why it has given up before a page was taken out; none where it has not.
    #[must_use]
    pub fn gave_up(&self) -> Option<Unexpected> {
        self.gave_up
    }

    /// Takes the next piece, and adds what it holds.
    ///
    /// # Errors
    /// [`Unexpected`]: pages were taken out, and this cannot follow them. It is of no use any more.
    pub fn take<'a>(
        &mut self,
        mut piece: &'a [u8],
        parts: &mut Parts<'a>,
    ) -> Result<(), Unexpected> {
        while !piece.is_empty() {
            let used = match self.body {
                Some(body) => self.body(body, piece, parts),
                None if self.is_at_rest() => {
                    parts.for_qemu.extend_from_slice(piece);
                    piece.len()
                }
                None => self.head(piece, parts)?,
            };
            self.at += used as u64;
            piece = &piece[used..];
        }
        Ok(())
    }

    /// Takes what there is of a body. How much that was.
    fn body<'a>(&mut self, body: Body, piece: &'a [u8], parts: &mut Parts<'a>) -> usize {
        let (Body::ForQemu { left } | Body::Page { left, .. }) = body;
        let used = usize::try_from(left).unwrap_or(usize::MAX).min(piece.len());
        let (bytes, left) = (&piece[..used], left - used as u64);
        self.body = match body {
            Body::ForQemu { .. } => {
                parts.for_qemu.extend_from_slice(bytes);
                Some(Body::ForQemu { left })
            }
            Body::Page { at, .. } => {
                parts.writes.push(Write::Bytes { at, bytes });
                Some(Body::Page { at: at + used as u64, left })
            }
        }
        .filter(|_| left > 0);
        used
    }

    /// Takes what there is of a head. How much that was.
    fn head<'a>(&mut self, piece: &'a [u8], parts: &mut Parts<'a>) -> Result<usize, Unexpected> {
        let mut used = 0;
        let what = loop {
            match self.read_head() {
                Ok(head) => match self.follow(&head, parts) {
                    Ok(()) => {
                        self.head.clear();
                        return Ok(used);
                    }
                    Err(what) => break what,
                },
                Err(Stop::Unexpected(what)) => break what,
                Err(Stop::Needs(length)) => {
                    let more = (length - self.head.len()).min(piece.len() - used);
                    if more == 0 {
                        return Ok(used);
                    }
                    self.head.extend_from_slice(&piece[used..used + more]);
                    used += more;
                }
            }
        };
        self.give_up(what, used, parts)?;
        Ok(used)
    }

    /// Leaves all from this head on to QEMU, where that can be.
    fn give_up(
        &mut self,
        what: What,
        used: usize,
        parts: &mut Parts<'_>,
    ) -> Result<(), Unexpected> {
        let unexpected = Unexpected { what, at: self.at + used as u64 };
        if self.taken_out {
            return Err(unexpected);
        }
        parts.for_qemu.extend_from_slice(&self.head);
        self.head.clear();
        (self.place, self.gave_up) = (Place::Rest, Some(unexpected));
        Ok(())
    }

    fn read_head(&self) -> Result<Head, Stop> {
        let mut head = Reader { head: &self.head, at: 0 };
        match self.place {
            Place::Begin => {
                if head.u32()? != MAGIC || head.u32()? != VERSION || head.u8()? != CONFIGURATION {
                    return Err(Stop::Unexpected(What::Begin));
                }
                Ok(Head::Begin { name: head.u32()? })
            }
            Place::Section => section(&mut head),
            Place::Record => self.record(&mut head),
            Place::Block { .. } => {
                let ours = head.name()? == self.block.as_bytes();
                Ok(Head::Block { ours, length: head.u64()? })
            }
            Place::Footer => match head.u8()? {
                FOOTER => Ok(Head::Footer { section: head.u32()? }),
                _ => Err(Stop::Unexpected(What::OutOfPlace)),
            },
            // Nothing is read there.
            Place::Rest => Err(Stop::Unexpected(What::OutOfPlace)),
        }
    }

    fn record(&self, head: &mut Reader<'_>) -> Result<Head, Stop> {
        let word = head.u64()?;
        let (at, flags) = (word & !FLAGS, word & FLAGS);
        let mut of = || match flags & CONTINUE {
            0 => Ok(Of::Named(head.name()? == self.block.as_bytes())),
            _ => Ok(Of::SameAsBefore),
        };
        match flags & !CONTINUE {
            BLOCKS => Ok(Head::Blocks { total: at }),
            WHOLE => Ok(Head::Page { of: of()?, at }),
            FILLED => Ok(Head::Filled { of: of()?, at, byte: head.u8()? }),
            EOS => Ok(Head::Eos),
            _ => Err(Stop::Unexpected(What::Record(flags))),
        }
    }

    /// Goes on after a head. Nothing has changed where that is an error.
    fn follow(&mut self, head: &Head, parts: &mut Parts<'_>) -> Result<(), What> {
        let mut ours = false;
        match *head {
            Head::Begin { name } => self.passing(u64::from(name), Place::Section),
            Head::Start { section } if self.section.is_none() => {
                (self.section, self.place) = (Some(section), Place::Record);
            }
            Head::More { section, last } if self.section == Some(section) => {
                (self.last, self.place) = (last, Place::Record);
            }
            Head::Start { .. } | Head::More { .. } => return Err(What::OutOfPlace),
            Head::Command { length } => self.passing(u64::from(length), Place::Section),
            Head::Blocks { total } if total == 0 || self.listed => return Err(What::Blocks),
            Head::Blocks { total } => self.place = Place::Block { left: total },
            Head::Block { ours, length } => self.place = self.after_block(ours, length)?,
            Head::Page { of, at } => {
                ours = self.page_of(of, at)?;
                self.body = Some(match ours {
                    true => Body::Page { at, left: PAGE },
                    false => Body::ForQemu { left: PAGE },
                });
            }
            Head::Filled { of, at, byte } => {
                ours = self.page_of(of, at)?;
                if ours {
                    parts.writes.push(Write::Fill { at, byte });
                }
            }
            Head::Eos => self.place = Place::Footer,
            Head::Footer { section } if self.section == Some(section) => {
                self.place = if self.last { Place::Rest } else { Place::Section };
            }
            Head::Footer { .. } => return Err(What::OutOfPlace),
        }
        if ours {
            self.taken_out = true;
        } else {
            parts.for_qemu.extend_from_slice(&self.head);
        }
        Ok(())
    }

    fn passing(&mut self, left: u64, then: Place) {
        self.place = then;
        self.body = Some(Body::ForQemu { left }).filter(|_| left > 0);
    }

    /// Where it is after one of the list's blocks.
    fn after_block(&mut self, ours: bool, length: u64) -> Result<Place, What> {
        let Place::Block { left } = self.place else { return Err(What::Blocks) };
        let left = left.checked_sub(length).ok_or(What::Blocks)?;
        let listed = self.listed || ours;
        if ours && (length != self.size || self.listed) || left == 0 && !listed {
            return Err(What::Blocks);
        }
        self.listed = listed;
        Ok(if left == 0 { Place::Record } else { Place::Block { left } })
    }

    /// Whether a page is the block's.
    fn page_of(&mut self, of: Of, at: u64) -> Result<bool, What> {
        if !self.listed {
            return Err(What::Blocks);
        }
        let ours = match of {
            Of::SameAsBefore => self.current.ok_or(What::NoBlock)?,
            Of::Named(ours) => ours,
        };
        if ours && at.checked_add(PAGE).is_none_or(|end| end > self.size) {
            return Err(What::Outside(at));
        }
        self.current = Some(ours);
        Ok(ours)
    }
}

fn section(head: &mut Reader<'_>) -> Result<Head, Stop> {
    match head.u8()? {
        START => {
            let (section, name) = (head.u32()?, head.name()?);
            let (_instance, version) = (head.u32()?, head.u32()?);
            match (name, version) == MEMORY {
                true => Ok(Head::Start { section }),
                false => Err(Stop::Unexpected(What::NotMemory)),
            }
        }
        PART => Ok(Head::More { section: head.u32()?, last: false }),
        END => Ok(Head::More { section: head.u32()?, last: true }),
        COMMAND => {
            let (command, length) = (head.u16()?, head.u16()?);
            match COMMANDS.contains(&command) {
                true => Ok(Head::Command { length }),
                false => Err(Stop::Unexpected(What::Command(command))),
            }
        }
        other => Err(Stop::Unexpected(What::Section(other))),
    }
}
