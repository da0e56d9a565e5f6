//! How much all filters together may have in flight by channels. The channel keeps to it, and the connection to the cluster has room for
//! it.

/// The most bytes in flight of all filters together: so much that a disk which is busy alone has 128 MiB under way, 32 requests of 4 MiB.
/// With those of FUSE and of the library it stays far below the limit of the process's memory.
pub const BYTES_IN_FLIGHT: u64 = 512 << 20;

/// What a request counts for at least, in bytes, for each object that it is in: librbd makes a request to each of them, and the library
/// has a limit for their number, too.
pub const OF_OBJECT: u64 = 32 << 10;

/// The most requests to objects in flight of all filters together, but for those for zeroes that are in very many.
pub const REQUESTS_IN_FLIGHT: u64 = BYTES_IN_FLIGHT / OF_OBJECT;
