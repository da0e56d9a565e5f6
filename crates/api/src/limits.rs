//! What a VM can have at most, and at least: for requests, for hosts, and for what is found on datastores.

/// The largest disk, in bytes: 62 TiB, vSphere's limit.
pub const DISK_SIZE_MAX: u64 = 62 << 40;

/// The most virtual processors of a VM.
pub const VCPUS_MAX: u32 = 255;

/// The least memory of a VM in bytes.
pub const MEMORY_MIN: u64 = 16 << 20;

/// The most memory of a VM in bytes.
pub const MEMORY_MAX: u64 = 6 << 40;

/// The unit of a VM's memory, in bytes.
pub const MEMORY_UNIT: u64 = 1 << 20;

/// The most backups of a VM: a year of daily ones, with room for others.
pub const BACKUPS_MAX: usize = 512;

/// The most backups above one another, the full one among them: a filter opens no more files for a disk. With a backup a day, one
/// a week is full.
pub const BACKUP_CHAIN_MAX: usize = crate::filter::BACKING_MAX;

/// The most core dumps of a VM: each is as long as the guest's memory.
pub const DUMPS_MAX: usize = 16;

/// The most core dumps that a host writes of a VM by itself and keeps: the first ones of a guest that panics again and again say
/// why it does. No other is written until one of them is deleted; none is deleted without being asked for.
pub const PANIC_DUMPS_MAX: usize = 4;

/// The most snapshots of a VM: a tree that people can still read.
pub const SNAPSHOTS_MAX: usize = 64;

/// The longest description of a VM, in bytes: some paragraphs.
pub const DESCRIPTION_MAX: usize = 4096;

/// The most labels of a VM.
pub const LABELS_MAX: usize = 64;

/// The longest key or value of a label, in bytes.
pub const LABEL_MAX: usize = 63;
