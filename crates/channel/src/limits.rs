//! How much of each there may be: a filter that asks for more is refused, as the other side's memory and descriptors serve all filters.

/// The regions of a queue: the storage's own buffers, those of the cipher, and a few of stacks that come later.
pub const REGIONS_MAX: usize = 8;

/// The bytes of a region: twice what a queue's buffers take.
pub const REGION_BYTES_MAX: usize = 64 << 20;

/// The queues of a connection: a disk has at most as many as its VM has processors that are worth a queue each.
pub const QUEUES_MAX: usize = 64;

/// The connections of a mount: a disk has one, so this is as many disks as a host has.
pub const CONNECTIONS_MAX: usize = 1024;

/// The bytes of a read or write: as many as a region has. Those of filters are 4 MiB at most, what a cipher seals at a time.
pub const REQUEST_BYTES_MAX: u64 = 64 << 20;

/// The bytes of a request for zeroes, as a filter asks for at most: a guest's discard has 1 GiB (`DISCARD_SECTORS_MAX`), and copies, replicas
/// and clients of NBD have less in one request.
pub const ZEROES_BYTES_MAX: u64 = 1 << 30;
