//! The handshake before the first request: the server's side of fixed newstyle negotiation, without
//! any I/O.
//!
//! ```text
//!   Greeting --client's flags--> Options --EXPORT_NAME | GO, of our disk--> Serve
//!                                   |  ↺ INFO, LIST, structured replies, contexts, refusals
//!                                   └──ABORT | EXPORT_NAME of another disk--> End
//!   not an option, too long, or one option too many: Hostile, and the connection ends
//! ```

use std::sync::Arc;

use crate::front_ends::nbd::context::{self, Context, QUERIES_MAX, Refusal};
use crate::nbd::{
    BLOCK_MAX, BLOCK_MIN, BLOCK_PREFERRED, NBD_MAGIC, OPTION_MAGIC, OPTION_REPLY_MAGIC, field,
    handshake, info, option, option_reply, transmission,
};
use crate::stack::dirty::Bitmaps;

/// The longest option, in bytes: several strings of 4096 bytes, which the protocol allows. It applies to unknown
/// options, too (nbdkit takes as much).
pub const OPTION_MAX: usize = 4 * 4096;

/// The most options of one connection: more than any client needs.
pub const OPTIONS_MAX: usize = 64;

/// The length of the header before an option's data.
pub const HEADER_LENGTH: usize = 16;

/// The zeroes that older clients expect after the answer to `EXPORT_NAME`.
const ZEROES: usize = 124;

/// The answer to a client that names another export.
const NO_EXPORT: &str = "there is no such export; the disk's id is the only name";

/// Input of a client that cannot be answered.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Hostile {
    /// Flags that we did not offer.
    #[error("the client's flags, {0:#x}, are not among those offered")]
    Flags(u32),
    /// Not the beginning of an option.
    #[error("what the client sent is not an option")]
    Magic,
    /// Longer than [`OPTION_MAX`].
    #[error("an option has {0} bytes, at most {OPTION_MAX} are possible")]
    Length(u32),
    /// More than [`OPTIONS_MAX`].
    #[error("the client sent more than {OPTIONS_MAX} options")]
    Endless,
}

/// The disk as clients see it.
#[derive(Clone, Debug)]
pub struct Export {
    /// Its name; the empty name works, too.
    pub name: String,
    /// Its size in bytes.
    pub size: u64,
    /// Whether it is read-only.
    pub read_only: bool,
    /// Its dirty bitmaps, where there can be any.
    pub bitmaps: Option<Arc<Bitmaps>>,
}

/// The result of the negotiation.
#[derive(Debug, Default)]
pub struct Agreed {
    /// Whether reads are answered in chunks, and errors with messages.
    pub structured: bool,
    /// The contexts of block status requests; empty if there must be no such requests.
    pub contexts: Vec<Context>,
}

impl Export {
    /// The transmission flags, for a client with or without structured replies.
    #[must_use]
    pub fn flags(&self, structured: bool) -> u16 {
        let changes = if self.read_only {
            transmission::READ_ONLY
        } else {
            let zeroes = transmission::SEND_WRITE_ZEROES | transmission::SEND_FAST_ZERO;
            transmission::SEND_FUA | transmission::SEND_TRIM | zeroes
        };
        // All connections have chains of one disk over one open file: sectors that two of them change
        // are locked across chains, nothing is cached, and fdatasync is for the file.
        let shared = transmission::CAN_MULTI_CONN;
        let fragments = if structured { transmission::SEND_DF } else { 0 };
        transmission::HAS_FLAGS | transmission::SEND_FLUSH | shared | changes | fragments
    }

    fn is_called(&self, name: &[u8]) -> bool {
        name.is_empty() || name == self.name.as_bytes()
    }
}

/// The next input after an option.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Next {
    /// Another option.
    Option,
    /// Requests.
    Serve,
    /// Nothing: the connection ends once the answer is sent.
    End,
}

/// The header of an option, checked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Header {
    /// The [`option`].
    pub option: u32,
    /// The length of its data, at most [`OPTION_MAX`].
    pub length: usize,
}

impl Header {
    /// Parses one.
    ///
    /// # Errors
    /// [`Hostile`].
    pub fn decode(bytes: &[u8; HEADER_LENGTH]) -> Result<Self, Hostile> {
        if u64::from_be_bytes(field(bytes, 0)) != OPTION_MAGIC {
            return Err(Hostile::Magic);
        }
        let length = u32::from_be_bytes(field(bytes, 12));
        if length as usize > OPTION_MAX {
            return Err(Hostile::Length(length));
        }
        Ok(Self { option: u32::from_be_bytes(field(bytes, 8)), length: length as usize })
    }
}

/// A negotiation whose client has sent its flags.
#[derive(Debug)]
pub struct Options<'a> {
    export: &'a Export,
    no_zeroes: bool,
    seen: usize,
    agreed: Agreed,
}

/// The server's greeting.
#[must_use]
pub fn greeting() -> [u8; 18] {
    let mut bytes = [0; 18];
    bytes[..8].copy_from_slice(&NBD_MAGIC.to_be_bytes());
    bytes[8..16].copy_from_slice(&OPTION_MAGIC.to_be_bytes());
    bytes[16..].copy_from_slice(&(handshake::FIXED_NEWSTYLE | handshake::NO_ZEROES).to_be_bytes());
    bytes
}

impl<'a> Options<'a> {
    /// Handles the client's flags.
    ///
    /// # Errors
    /// [`Hostile`].
    pub fn new(export: &'a Export, flags: [u8; 4]) -> Result<Self, Hostile> {
        let flags = u32::from_be_bytes(flags);
        if flags & !u32::from(handshake::FIXED_NEWSTYLE | handshake::NO_ZEROES) != 0 {
            return Err(Hostile::Flags(flags));
        }
        let no_zeroes = flags & u32::from(handshake::NO_ZEROES) != 0;
        Ok(Self { export, no_zeroes, seen: 0, agreed: Agreed::default() })
    }

    /// The result, once requests come next.
    #[must_use]
    pub fn agreed(self) -> Agreed {
        self.agreed
    }

    /// Adds the answer to an option to `answer`.
    ///
    /// # Errors
    /// [`Hostile`].
    pub fn answer(
        &mut self,
        option: u32,
        data: &[u8],
        answer: &mut Vec<u8>,
    ) -> Result<Next, Hostile> {
        self.seen += 1;
        if self.seen > OPTIONS_MAX {
            return Err(Hostile::Endless);
        }
        match option {
            option::EXPORT_NAME => return Ok(self.export_name(data, answer)),
            option::ABORT => {
                add(answer, option, option_reply::ACK, &[]);
                return Ok(Next::End);
            }
            option::LIST if data.is_empty() => {
                let name = self.export.name.as_bytes();
                let server = [&(name.len() as u32).to_be_bytes(), name].concat();
                add(answer, option, option_reply::SERVER, &server);
                add(answer, option, option_reply::ACK, &[]);
            }
            option::LIST => refuse(answer, option, option_reply::ERROR_INVALID, "LIST has no data"),
            option::INFO | option::GO => return Ok(self.info(option, data, answer)),
            option::STRUCTURED_REPLY if data.is_empty() && !self.agreed.structured => {
                self.agreed.structured = true;
                add(answer, option, option_reply::ACK, &[]);
            }
            option::STRUCTURED_REPLY => {
                let why = "structured replies are asked for once, without data";
                refuse(answer, option, option_reply::ERROR_INVALID, why);
            }
            option::LIST_META_CONTEXT | option::SET_META_CONTEXT => {
                self.contexts(option, data, answer);
            }
            _ => {
                let why = "this option is not known here";
                refuse(answer, option, option_reply::ERROR_UNSUPPORTED, why);
            }
        }
        Ok(Next::Option)
    }

    fn export_name(&self, name: &[u8], answer: &mut Vec<u8>) -> Next {
        if !self.export.is_called(name) {
            return Next::End;
        }
        answer.extend(self.export.size.to_be_bytes());
        answer.extend(self.export.flags(self.agreed.structured).to_be_bytes());
        if !self.no_zeroes {
            answer.extend([0; ZEROES]);
        }
        Next::Serve
    }

    fn info(&self, option: u32, data: &[u8], answer: &mut Vec<u8>) -> Next {
        let Some((name, mut wanted)) = name_and_wishes(data) else {
            let why = "the data is not a name and a list";
            refuse(answer, option, option_reply::ERROR_INVALID, why);
            return Next::Option;
        };
        if !self.export.is_called(name) {
            refuse(answer, option, option_reply::ERROR_UNKNOWN, NO_EXPORT);
            return Next::Option;
        }
        let mut tell = |kind: u16, fields: &[&[u8]]| {
            let data = [&kind.to_be_bytes()[..], &fields.concat()].concat();
            add(answer, option, option_reply::INFO, &data);
        };
        let flags = self.export.flags(self.agreed.structured).to_be_bytes();
        let size = self.export.size.to_be_bytes();
        tell(info::EXPORT, &[&size, &flags]);
        let sizes = [BLOCK_MIN, BLOCK_PREFERRED, BLOCK_MAX].map(u32::to_be_bytes);
        tell(info::BLOCK_SIZE, &[&sizes[0], &sizes[1], &sizes[2]]);
        if wanted.any(|kind| kind == info::NAME) {
            tell(info::NAME, &[self.export.name.as_bytes()]);
        }
        add(answer, option, option_reply::ACK, &[]);
        if option == option::GO { Next::Serve } else { Next::Option }
    }
}

impl Options<'_> {
    fn contexts(&mut self, option: u32, data: &[u8], answer: &mut Vec<u8>) {
        let sets = option == option::SET_META_CONTEXT;
        if sets {
            self.agreed.contexts.clear();
        }
        if !self.agreed.structured {
            let why = "contexts need structured replies; ask for these first";
            return refuse(answer, option, option_reply::ERROR_INVALID, why);
        }
        let (export, queries) = match context::queries(data) {
            Ok(asked) => asked,
            Err(Refusal::Malformed) => {
                let why = "the data is not a name and queries";
                return refuse(answer, option, option_reply::ERROR_INVALID, why);
            }
            Err(Refusal::TooMany) => {
                let why = format!("at most {QUERIES_MAX} contexts can be asked for");
                return refuse(answer, option, option_reply::ERROR_TOO_BIG, &why);
            }
        };
        if !self.export.is_called(export) {
            return refuse(answer, option, option_reply::ERROR_UNKNOWN, NO_EXPORT);
        }
        let bitmaps = self.export.bitmaps.as_ref();
        let mut tell = |number: u32, name: &str| {
            let context = [&number.to_be_bytes(), name.as_bytes()].concat();
            add(answer, option, option_reply::META_CONTEXT, &context);
        };
        if sets {
            for (number, (name, context)) in (0..).zip(context::chosen(bitmaps, &queries)) {
                tell(number, &name);
                self.agreed.contexts.push(context);
            }
        } else {
            context::listed(bitmaps, &queries).iter().for_each(|name| tell(0, name));
        }
        add(answer, option, option_reply::ACK, &[]);
    }
}

/// The data of `INFO` and `GO`: length and name, count and kinds of information.
fn name_and_wishes(data: &[u8]) -> Option<(&[u8], impl Iterator<Item = u16>)> {
    let (length, rest) = data.split_first_chunk::<4>()?;
    let (name, rest) = rest.split_at_checked(u32::from_be_bytes(*length) as usize)?;
    let (count, kinds) = rest.split_first_chunk::<2>()?;
    let (kinds, odd) = kinds.as_chunks::<2>();
    let whole = odd.is_empty() && kinds.len() == usize::from(u16::from_be_bytes(*count));
    whole.then(|| (name, kinds.iter().map(|kind| u16::from_be_bytes(*kind))))
}

fn add(answer: &mut Vec<u8>, option: u32, kind: u32, data: &[u8]) {
    answer.extend(OPTION_REPLY_MAGIC.to_be_bytes());
    answer.extend(option.to_be_bytes());
    answer.extend(kind.to_be_bytes());
    answer.extend((data.len() as u32).to_be_bytes());
    answer.extend(data);
}

fn refuse(answer: &mut Vec<u8>, option: u32, kind: u32, why: &str) {
    add(answer, option, kind, why.as_bytes());
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn export() -> Export {
        Export { name: "a-disk".into(), size: 1 << 20, read_only: false, bitmaps: None }
    }

    fn ask(option: u32, data: &[u8]) -> (Next, Vec<u8>) {
        let (export, mut answer) = (export(), Vec::new());
        let mut options = Options::new(&export, [0, 0, 0, 3]).unwrap();
        (options.answer(option, data, &mut answer).unwrap(), answer)
    }

    /// The kinds and data of the answers to an option.
    fn replies(option: u32, mut answer: &[u8]) -> Vec<(u32, Vec<u8>)> {
        let mut replies = Vec::new();
        while let Some((header, rest)) = answer.split_first_chunk::<20>() {
            assert_eq!(header[..8], OPTION_REPLY_MAGIC.to_be_bytes());
            assert_eq!(u32::from_be_bytes(field(header, 8)), option);
            let (data, rest) = rest.split_at(u32::from_be_bytes(field(header, 16)) as usize);
            replies.push((u32::from_be_bytes(field(header, 12)), data.to_vec()));
            answer = rest;
        }
        assert!(answer.is_empty());
        replies
    }

    fn go(name: &[u8], kinds: &[u16]) -> Vec<u8> {
        let kinds: Vec<u8> = kinds.iter().flat_map(|kind| kind.to_be_bytes()).collect();
        let (length, count) = (name.len() as u32, (kinds.len() / 2) as u16);
        [&length.to_be_bytes(), name, &count.to_be_bytes(), &kinds].concat()
    }

    #[test]
    fn go_tells_size_flags_and_blocks_and_then_serves() {
        for name in [&b""[..], b"a-disk"] {
            let (next, answer) = ask(option::GO, &go(name, &[info::BLOCK_SIZE]));
            assert_eq!(next, Next::Serve);
            let replies = replies(option::GO, &answer);
            let kinds: Vec<u32> = replies.iter().map(|reply| reply.0).collect();
            assert_eq!(kinds, [option_reply::INFO, option_reply::INFO, option_reply::ACK]);
            assert_eq!(replies[0].1, [0, 0, 0, 0, 0, 0, 0, 16, 0, 0, 0b1001, 0b0110_1101]);
            assert_eq!(replies[1].1, [0, 3, 0, 0, 2, 0, 0, 0, 16, 0, 2, 0, 0, 0]);
        }
        let (next, answer) = ask(option::INFO, &go(b"", &[info::NAME]));
        assert_eq!(next, Next::Option, "INFO does not go on");
        assert_eq!(replies(option::INFO, &answer)[2].1, b"\0\x01a-disk");
    }

    #[test]
    fn other_names_are_refused_and_old_clients_are_ended() {
        let (next, answer) = ask(option::GO, &go(b"b-disk", &[]));
        assert_eq!(next, Next::Option);
        assert_eq!(replies(option::GO, &answer)[0].0, option_reply::ERROR_UNKNOWN);
        assert_eq!(ask(option::EXPORT_NAME, b"b-disk"), (Next::End, Vec::new()));
        let (next, answer) = ask(option::EXPORT_NAME, b"a-disk");
        assert_eq!(
            (next, answer),
            (Next::Serve, vec![0, 0, 0, 0, 0, 16, 0, 0, 0b1001, 0b0110_1101])
        );
        let (export, mut answer) = (export(), Vec::new());
        let mut old = Options::new(&export, [0, 0, 0, 1]).unwrap();
        assert_eq!(old.answer(option::EXPORT_NAME, b"", &mut answer), Ok(Next::Serve));
        assert_eq!(answer.len(), 10 + ZEROES);
    }

    #[test]
    fn the_list_has_one_name_and_abort_is_answered() {
        let (next, answer) = ask(option::LIST, b"");
        assert_eq!(next, Next::Option);
        assert_eq!(replies(option::LIST, &answer)[0], (2, b"\0\0\0\x06a-disk".to_vec()));
        let (_, answer) = ask(option::LIST, b"x");
        assert_eq!(replies(option::LIST, &answer)[0].0, option_reply::ERROR_INVALID);
        let (next, answer) = ask(option::ABORT, b"");
        assert_eq!((next, replies(option::ABORT, &answer)[0].0), (Next::End, option_reply::ACK));
    }

    #[test]
    fn unknown_malformed_and_excessive_options_are_refused() {
        for unknown in [0, 5, 11, u32::MAX] {
            let (next, answer) = ask(unknown, b"data");
            assert_eq!(next, Next::Option);
            assert_eq!(replies(unknown, &answer)[0].0, option_reply::ERROR_UNSUPPORTED);
        }
        let good = go(b"a-disk", &[3]);
        let long = [&good[..], b"x"].concat();
        for bad in [&good[..good.len() - 1], &long, b"", &[0xff; 20]] {
            let (_, answer) = ask(option::GO, bad);
            assert_eq!(replies(option::GO, &answer)[0].0, option_reply::ERROR_INVALID);
        }
        let (export, mut answer) = (export(), Vec::new());
        assert_eq!(Options::new(&export, [1, 0, 0, 1]).unwrap_err(), Hostile::Flags(0x100_0001));
        let mut options = Options::new(&export, [0, 0, 0, 1]).unwrap();
        for _ in 0..OPTIONS_MAX {
            assert_eq!(options.answer(option::LIST, b"", &mut answer), Ok(Next::Option));
        }
        assert_eq!(options.answer(option::LIST, b"", &mut answer), Err(Hostile::Endless));
    }

    #[test]
    fn headers_are_limited() {
        let header = |magic: u64, length: usize| {
            let mut bytes = [0; HEADER_LENGTH];
            bytes[..8].copy_from_slice(&magic.to_be_bytes());
            bytes[12..].copy_from_slice(&(length as u32).to_be_bytes());
            Header::decode(&bytes)
        };
        assert_eq!(header(OPTION_MAGIC, OPTION_MAX), Ok(Header { option: 0, length: OPTION_MAX }));
        assert_eq!(
            header(OPTION_MAGIC, OPTION_MAX + 1),
            Err(Hostile::Length(OPTION_MAX as u32 + 1))
        );
        assert_eq!(header(OPTION_MAGIC - 1, 0), Err(Hostile::Magic));
    }

    #[test]
    fn a_read_only_disk_offers_nothing_that_changes_it() {
        let flags = |structured| Export { read_only: true, ..export() }.flags(structured);
        assert_eq!((flags(false), flags(true)), (0b1_0000_0111, 0b1_1000_0111));
    }

    #[test]
    fn contexts_can_be_chosen_once_replies_are_structured() {
        let bitmaps = Arc::new(Bitmaps::new(1 << 20));
        bitmaps.change("b1", vmseal_api::filter::BitmapChange::Start).unwrap();
        let export = Export { bitmaps: Some(bitmaps), ..export() };
        let mut options = Options::new(&export, [0, 0, 0, 3]).unwrap();
        let mut ask = |option, data: &[u8]| {
            let mut answer = Vec::new();
            assert_eq!(options.answer(option, data, &mut answer), Ok(Next::Option));
            replies(option, &answer)
        };
        let string =
            |string: &str| [&(string.len() as u32).to_be_bytes(), string.as_bytes()].concat();
        let of = |export: &str, names: &[&str]| {
            let names = names.iter().map(|name| string(name)).collect::<Vec<_>>();
            [string(export), (names.len() as u32).to_be_bytes().to_vec(), names.concat()].concat()
        };
        let (set, list) = (option::SET_META_CONTEXT, option::LIST_META_CONTEXT);
        let (base, dirty) = ("base:allocation", "qemu:dirty-bitmap:b1");
        assert_eq!(ask(set, &of("", &[base]))[0].0, option_reply::ERROR_INVALID);
        assert_eq!(ask(option::STRUCTURED_REPLY, b""), [(option_reply::ACK, vec![])]);
        assert_eq!(ask(option::STRUCTURED_REPLY, b"")[0].0, option_reply::ERROR_INVALID);
        let context = |number: u8, name: &str| {
            (option_reply::META_CONTEXT, [&[0, 0, 0, number], name.as_bytes()].concat())
        };
        let done = || (option_reply::ACK, vec![]);
        let all = [context(0, base), context(0, dirty), done()];
        assert_eq!(ask(list, &of("a-disk", &[])), all);
        assert_eq!(
            ask(set, &of("", &[dirty, "x:y", base])),
            [context(0, dirty), context(1, base), done()]
        );
        assert_eq!(ask(set, &of("b-disk", &[base]))[0].0, option_reply::ERROR_UNKNOWN);
        let many = vec![base; QUERIES_MAX + 1];
        assert_eq!(ask(set, &of("", &many))[0].0, option_reply::ERROR_TOO_BIG);
        assert_eq!(ask(set, b"what")[0].0, option_reply::ERROR_INVALID);
        assert_eq!(ask(set, &of("", &[base])), [context(0, base), done()]);
        let agreed = options.agreed();
        assert!(agreed.structured && matches!(agreed.contexts[..], [Context::Allocation]));
    }

    proptest! {
        #[test]
        fn no_data_is_too_odd(option in 0u32..12, data in prop::collection::vec(any::<u8>(), 0..64)) {
            let (next, answer) = ask(option, &data);
            if option != option::EXPORT_NAME {
                prop_assert!(!replies(option, &answer).is_empty());
            }
            let named = match option {
                option::EXPORT_NAME => data.is_empty(),
                option::GO => data.len() >= 6 && data[..4] == [0; 4],
                _ => false,
            };
            prop_assert!(next != Next::Serve || named);
        }
    }
}
