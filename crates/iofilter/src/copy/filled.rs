//! The memory of a piece that is copied.

/// The alignment of a buffer: what any device takes without a copy.
pub const PAGE: usize = 4096;

/// Memory for a piece.
pub struct Buffer {
    bytes: Vec<u8>,
    start: usize,
}

impl Buffer {
    /// For pieces of at most this length.
    pub fn new(length: usize) -> Self {
        let bytes = vec![0; length + PAGE];
        let start = bytes.as_ptr().align_offset(PAGE).min(PAGE);
        Self { bytes, start }
    }

    /// Its first bytes.
    pub fn first(&mut self, length: usize) -> &mut [u8] {
        &mut self.bytes[self.start..self.start + length]
    }

    fn filled(&self, length: usize) -> &[u8] {
        &self.bytes[self.start..self.start + length]
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        // It may have been in the clear.
        self.bytes.fill(0);
        std::hint::black_box(&self.bytes);
    }
}

/// A piece that was read, with its memory. Who has it may have requests in flight that use the memory, and keeps it until these have ended.
/// To move it does not move the memory.
pub struct Filled {
    buffer: Buffer,
    at: u64,
    length: usize,
}

impl Filled {
    /// The first bytes of this buffer are those at `at` of the disk.
    pub fn new(buffer: Buffer, at: u64, length: usize) -> Self {
        Self { buffer, at, length }
    }

    /// Where it is on the disk.
    pub fn at(&self) -> u64 {
        self.at
    }

    /// What was read.
    pub fn bytes(&self) -> &[u8] {
        self.buffer.filled(self.length)
    }

    /// The same, for a sink that changes it.
    pub fn bytes_mut(&mut self) -> &mut [u8] {
        self.buffer.first(self.length)
    }

    /// The memory, for another piece.
    pub fn into_buffer(self) -> Buffer {
        self.buffer
    }
}
