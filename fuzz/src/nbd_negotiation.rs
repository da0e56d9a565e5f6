//! What an NBD client sends before its first request. Every option is answered in the form that the
//! protocol has, and only our export is served.

use std::io::{Read, Write};
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::sync::Arc;

use vmseal_api::filter::BitmapChange;
use vmseal_iofilter::front_ends::nbd::context::CONTEXTS_MAX;
use vmseal_iofilter::front_ends::nbd::negotiation;
use vmseal_iofilter::front_ends::nbd::option::{Export, OPTIONS_MAX, greeting};
use vmseal_iofilter::nbd::{OPTION_REPLY_MAGIC, option, option_reply};
use vmseal_iofilter::stack::dirty::Bitmaps;
use vmseal_iofilter::stack::stop::Stop;

use crate::INPUT_MAX;

const SIZE: u64 = 1 << 20;

/// The answers to options at the beginning of `bytes`, as option and kind; and what is behind them.
fn answers(mut bytes: &[u8]) -> (Vec<(u32, u32)>, &[u8]) {
    let number = |bytes: &[u8]| u32::from_be_bytes(bytes.try_into().unwrap());
    let mut answers = Vec::new();
    while let Some((header, rest)) = bytes.split_first_chunk::<20>()
        && header[..8] == OPTION_REPLY_MAGIC.to_be_bytes()
    {
        answers.push((number(&header[8..12]), number(&header[12..16])));
        bytes = &rest[number(&header[16..]) as usize..];
    }
    (answers, bytes)
}

/// See the module.
pub fn run(data: &[u8]) {
    let (server, mut client) = UnixStream::pair().unwrap();
    client.write_all(&data[..data.len().min(INPUT_MAX)]).unwrap();
    client.shutdown(Shutdown::Write).unwrap();
    let bitmaps = Arc::new(Bitmaps::new(SIZE));
    bitmaps.change("b1", BitmapChange::Start).unwrap();
    let bitmaps = Some(bitmaps);
    let export = Export { name: "a-disk".into(), size: SIZE, read_only: false, bitmaps };
    let outcome = negotiation::run(&server, &export, &Stop::new().unwrap());
    server.shutdown(Shutdown::Write).unwrap();
    let mut said = Vec::new();
    client.read_to_end(&mut said).unwrap();
    let (answers, rest) = answers(said.strip_prefix(&greeting()).unwrap());
    let last = |kind| answers.iter().filter(|answer| answer.1 == kind).count();
    let errors = answers.iter().filter(|answer| answer.1 >= 1 << 31).count();
    assert!(last(option_reply::ACK) + errors <= OPTIONS_MAX, "more answers than options");
    let acknowledged = |option| answers.contains(&(option, option_reply::ACK));
    if let Ok(Some(agreed)) = outcome {
        assert_eq!(agreed.structured, acknowledged(option::STRUCTURED_REPLY));
        assert!(agreed.contexts.len() <= CONTEXTS_MAX);
        let asked = agreed.structured && acknowledged(option::SET_META_CONTEXT);
        assert!(agreed.contexts.is_empty() || asked, "contexts that nobody asked for");
        let by_go = answers.last() == Some(&(option::GO, option_reply::ACK)) && rest.is_empty();
        let by_name = [10, 134].contains(&rest.len()) && rest[..8] == SIZE.to_be_bytes();
        assert!(by_go || by_name, "served without saying so: {answers:?} {rest:?}");
    } else {
        assert!(rest.is_empty(), "something that is no answer: {rest:?}");
        assert!(!acknowledged(option::GO));
    }
}
