//! The stream of another host's QEMU, of which the agent takes the pages of a guest's memory. The first byte says into which pieces
//! it is cut: that changes nothing. Pages are within the memory, and what is not known is left to QEMU as it came.

use vmseal_agent::migration::placement::page_stream::{PAGE, PageStream, Parts, Unexpected, Write};

const SIZE: u64 = 16 * PAGE;

/// What has become of a stream.
#[derive(PartialEq)]
struct Outcome {
    for_qemu: Vec<u8>,
    memory: Vec<u8>,
    gave_up: Option<Unexpected>,
    ended: Result<(), Unexpected>,
}

/// See the module.
pub fn run(data: &[u8]) {
    let Some((length, stream)) = data.split_first() else { return };
    let (whole, cut) = (taken(stream, usize::MAX), taken(stream, usize::from(*length) + 1));
    assert!(whole == cut, "the pieces make a difference");
    assert!(whole.for_qemu.len() <= stream.len());
    if whole.gave_up.is_some() {
        assert!(whole.for_qemu == stream && whole.ended.is_ok(), "not as it came");
        assert!(whole.memory.iter().all(|byte| *byte == 0), "a page was taken out");
    }
}

fn taken(stream: &[u8], length: usize) -> Outcome {
    let mut pages = PageStream::new("ram", SIZE);
    let (mut for_qemu, mut memory) = (Vec::new(), vec![0; SIZE as usize]);
    let mut take = || {
        for piece in stream.chunks(length) {
            let mut parts = Parts::default();
            let taken = pages.take(piece, &mut parts);
            for_qemu.extend_from_slice(&parts.for_qemu);
            parts.writes.iter().for_each(|write| apply(write, &mut memory));
            taken?;
        }
        Ok(())
    };
    let ended = take();
    Outcome { for_qemu, memory, gave_up: pages.gave_up(), ended }
}

fn apply(write: &Write<'_>, memory: &mut [u8]) {
    match *write {
        Write::Bytes { at, bytes } => memory[at as usize..][..bytes.len()].copy_from_slice(bytes),
        Write::Fill { at, byte } => memory[at as usize..][..PAGE as usize].fill(byte),
    }
}
