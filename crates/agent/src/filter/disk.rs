//! A disk as a filter gets it: open files, and what is done with it.

use std::fs::File;
use std::io::PipeReader;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::net::{UnixListener, UnixStream};

use vmseal_api::filter::{
    BackendSpec, BackingSpec, BesideSpec, Budget, CacheSpec, ConvertSpec, Direct, DiskConfig,
    ExportSpec, FilterSpec, FrontEndSpec, Handle, Holes, ImportSpec, LimitSpec, MergeSpec,
    MirrorSpec, ReplicateSpec, SERIAL_MAX, StackSpec, StallSpec, TargetFormat,
};
use vmseal_api::host::DiskLimits;
use vmseal_api::id::DiskId;
use vmseal_api::pace::CopyPace;
use vmseal_api::transfer::ImageFormat;
use vmseal_secret::SecretFd;

use super::channel::Channels;

/// An open replica, for a filter.
#[derive(Debug)]
pub struct Replica {
    /// The replica's image, as long as header and disk; its lock is held.
    pub file: File,
    /// The map of what the replica may lack; its lock is held.
    pub map: File,
    /// The highest rate of copying.
    pub bytes_per_second: u64,
}

/// The open copy of a disk, for a filter.
#[derive(Debug)]
pub struct Mirror {
    /// Where it is.
    pub to: CopyPlace,
    /// The copy's DEK as a descriptor, and what holes mean; none for a plain one.
    pub key: Option<(SecretFd, Holes)>,
    /// The map of what the copy lacks; its lock is held.
    pub map: File,
    /// How fast it is copied. Without a rate it yields to the guest by itself.
    pub pace: CopyPace,
    /// The size of the read cache that the disk has when it has pivoted, in bytes.
    pub cache: Option<u64>,
}

/// Where the copy of a disk is.
#[derive(Debug)]
pub enum CopyPlace {
    /// On this host: the disk is to pivot to it.
    Image {
        /// The copy's image; its lock is held.
        file: File,
        /// The layers above it, the active one first: below that they hold what the disk's own hold.
        layers: Vec<File>,
        /// Where the guest's first byte is in it, in bytes.
        offset: u64,
        /// Whether the copy stays allocated when the guest discards.
        keeps_room: bool,
    },
    /// On another one, whose NBD server is behind this socket: the disk stays here.
    OtherHost {
        /// The socket.
        socket: UnixStream,
        /// Whether what is below the disk's own layer is there already.
        same_below: bool,
    },
}

impl CopyPlace {
    fn descriptors(&self) -> Vec<BorrowedFd<'_>> {
        match self {
            Self::Image { file, layers, .. } => {
                std::iter::once(file).chain(layers).map(AsFd::as_fd).collect()
            }
            Self::OtherHost { socket, .. } => vec![socket.as_fd()],
        }
    }

    /// The image, where it has no layers.
    fn image(&self) -> Option<&File> {
        match self {
            Self::Image { file, layers, .. } => layers.is_empty().then_some(file),
            Self::OtherHost { .. } => None,
        }
    }

    fn backend(
        &self,
        channels: &Channels,
        mut fd: impl FnMut(BorrowedFd<'_>) -> Handle,
    ) -> BackendSpec {
        let (file, layers, offset, keeps_room) = match self {
            Self::Image { file, layers, offset, keeps_room } => {
                (file, layers, *offset, *keeps_room)
            }
            Self::OtherHost { socket, .. } => {
                let sockets = vec![fd(socket.as_fd())];
                return BackendSpec::Nbd { sockets, export: String::new(), offset: 0 };
            }
        };
        match layers.split_first() {
            None => BackendSpec::File {
                file: fd(file.as_fd()),
                offset,
                direct: Direct::Auto,
                keeps_room,
                channel: channels.beside(file).map(fd),
            },
            Some((active, below)) => {
                let active = fd(active.as_fd());
                let below = below.iter().map(|layer| (layer, ImageFormat::Qcow2));
                let below = below.chain([(file, ImageFormat::Raw)]);
                let below =
                    below.map(|(file, format)| BackingSpec { file: fd(file.as_fd()), format });
                let backing = below.collect();
                BackendSpec::Qcow2 { file: active, backing, offset, lock: None }
            }
        }
    }
}

impl Mirror {
    /// The copy's image, where it has no layers.
    pub(super) fn image(&self) -> Option<&File> {
        self.to.image()
    }

    /// As a filter gets it; `fd` says how it knows a descriptor.
    pub(super) fn spec(
        &self,
        channels: &Channels,
        mut fd: impl FnMut(BorrowedFd<'_>) -> Handle,
    ) -> MirrorSpec {
        let crypt = self.key.iter().map(|(key, holes)| (fd(key.as_fd()), *holes));
        let crypt = crypt.map(|(key, holes)| FilterSpec::Crypt { key, holes });
        let cache = self.cache.map(|bytes| FilterSpec::Cache(CacheSpec { bytes }));
        let chain = crypt.chain(cache).collect();
        let backend = self.to.backend(channels, &mut fd);
        let (map, pace) = (fd(self.map.as_fd()), self.pace);
        let (stays, same_below) = match &self.to {
            CopyPlace::Image { layers, .. } => (false, !layers.is_empty()),
            CopyPlace::OtherHost { same_below, .. } => (true, *same_below),
        };
        MirrorSpec { to: StackSpec { chain, backend }, map, pace, same_below, stays }
    }
}

/// What a disk has in common with disks of other VMs: linked clones ([`crate::storage::linking`]).
#[derive(Debug, Default)]
pub struct Shared {
    /// The file with the disk's header and lock, where its image is not that: it is kept open.
    pub own: Option<File>,
    /// Whether others have its DEK.
    pub key: bool,
}

/// A disk for a filter to serve, fill or export.
pub struct Disk {
    /// Which.
    pub disk: DiskId,
    /// The size that the guest sees, in bytes.
    pub size: u64,
    /// The image, its lock held.
    pub file: File,
    /// The layers above it, the active one first ([`crate::storage::layers`]).
    pub layers: Vec<File>,
    /// Where the guest's first byte is, in bytes.
    pub offset: u64,
    /// The DEK as a descriptor, and what holes mean; none for a plain disk.
    pub key: Option<(SecretFd, Holes)>,
    /// Where other VMs have their part in this: which file is the disk's own, and that the key is not.
    pub shared: Shared,
    /// Whether the image stays allocated when the guest discards.
    pub keeps_room: bool,
    /// The work.
    pub work: Work,
    /// The socket for clients that read the disk beside the guest.
    pub beside: Option<UnixListener>,
    /// The replica that gets a copy of each write ([`crate::storage::replica`]).
    pub replica: Option<Replica>,
    /// The copy that is to take its place ([`crate::storage::mirror`]).
    pub mirror: Option<Mirror>,
}

/// What a filter does with a disk.
pub enum Work {
    /// Serves a guest.
    Serve {
        /// The socket that [`Connection`] connects to QEMU.
        socket: OwnedFd,
        /// Closed at its other end when that is done.
        connected: PipeReader,
        /// How many queues it has.
        queues: u16,
        /// Whether the guest can only read it.
        read_only: bool,
        /// The limits of the guest's requests.
        limits: DiskLimits,
        /// The size of the read cache, in bytes.
        cache: Option<u64>,
        /// What keeps the disk's dirty bitmaps from one filter to the next; none where they end with it.
        bitmaps: Option<File>,
    },
    /// Serves a guest's firmware over NBD.
    ServeFirmware {
        /// The socket that QEMU connects to.
        socket: UnixListener,
        /// QEMU's user; none is the agent's.
        user: Option<u32>,
    },
    /// Serves tools over NBD.
    Expose {
        /// The socket that the agent connects tools to.
        socket: UnixListener,
        /// Whether they may change the disk.
        writable: bool,
    },
    /// Fills it from an image.
    Import {
        /// The image.
        source: File,
        /// Its format.
        format: ImageFormat,
        /// Where to continue, in bytes.
        from: u64,
    },
    /// Copies it to its mirror, for nobody.
    Mirror,
    /// Writes what its first layer has, or its image where it has none, to what is below that, or to the copy of that.
    Merge {
        /// What is to be written.
        lower: Lower,
        /// The lock of the merge.
        lock: File,
    },
    /// Encrypts, decrypts or re-encrypts it in its own file.
    Convert(Box<Conversion>),
    /// Writes all of it to a file.
    Export {
        /// The file, which is new.
        target: File,
        /// The format to write.
        format: Volume,
        /// The files of the sums of its blocks.
        sums: Sums,
    },
}

/// How a disk is to be in its own file.
pub struct Conversion {
    /// The disk's image once more, with the same lock.
    pub file: File,
    /// Where the guest's first byte is to be in it, in bytes.
    pub offset: u64,
    /// The DEK that it is to have, as a descriptor; none for a plain disk.
    pub key: Option<SecretFd>,
    /// The journal, which belongs to this conversion alone.
    pub journal: File,
    /// The highest rate, in bytes a second.
    pub bytes_per_second: Option<u64>,
}

impl Conversion {
    fn spec(&self, keeps_room: bool, channels: &Channels) -> ConvertSpec {
        let fd = |fd: BorrowedFd<'_>| Handle::Fd(fd.as_raw_fd());
        let crypt = |key: &SecretFd| FilterSpec::Crypt { key: fd(key.as_fd()), holes: Holes::Zero };
        ConvertSpec {
            into: StackSpec {
                chain: self.key.iter().map(crypt).collect(),
                backend: backend(&self.file, &[], self.offset, keeps_room, Direct::Auto, channels),
            },
            journal: fd(self.journal.as_fd()),
            bytes_per_second: self.bytes_per_second,
        }
    }
}

/// What a layer is written to: an image, and the layers above it, of which the first is written; the image, where there are none.
pub struct Lower {
    /// The image.
    pub file: File,
    /// The layers.
    pub layers: Vec<File>,
    /// Where the first byte is in it, in bytes.
    pub offset: u64,
    /// Its DEK as a descriptor, where it is a copy that is encrypted.
    pub key: Option<SecretFd>,
    /// Whether it is written past the page cache: not where others read through the layer above it.
    pub direct: Direct,
}

/// Files with the sums of a disk's blocks, for an export.
#[derive(Default)]
pub struct Sums {
    /// An empty file that gets them.
    pub written: Option<File>,
    /// Those of blocks that are not written.
    pub except: Option<File>,
    /// The extents that may have changed since those.
    pub changed: Option<File>,
}

/// The format of an export.
pub enum Volume {
    /// The disk's bytes.
    Raw,
    /// QEMU's format.
    Qcow2,
    /// An overlay of QEMU's format that is there.
    Overlay,
    /// Nothing but the sums.
    Sums,
    /// A disk as vmseal keeps it, which reads as zeroes.
    Disk {
        /// Its DEK, to be passed on; none for a plain one.
        key: Option<SecretFd>,
        /// Where its first byte is, in bytes.
        offset: u64,
        /// Whether it stays allocated where it is zero.
        keeps_room: bool,
    },
    /// The data of a LUKS2 volume.
    Luks2 {
        /// The volume's key, to be passed on.
        key: SecretFd,
        /// Where the data begins, in bytes.
        offset: u64,
    },
}

impl Volume {
    fn key(&self) -> Option<&SecretFd> {
        match self {
            Self::Raw | Self::Qcow2 | Self::Overlay | Self::Sums => None,
            Self::Disk { key, .. } => key.as_ref(),
            Self::Luks2 { key, .. } => Some(key),
        }
    }

    fn into_key(self) -> Option<SecretFd> {
        match self {
            Self::Raw | Self::Qcow2 | Self::Overlay | Self::Sums => None,
            Self::Disk { key, .. } => key,
            Self::Luks2 { key, .. } => Some(key),
        }
    }

    fn spec(&self) -> TargetFormat {
        match self {
            Self::Raw => TargetFormat::Raw,
            Self::Qcow2 => TargetFormat::Qcow2,
            Self::Overlay => TargetFormat::Overlay,
            Self::Sums => TargetFormat::Sums,
            Self::Disk { key, offset, keeps_room } => {
                let key = key.as_ref().map(|key| Handle::Fd(key.as_fd().as_raw_fd()));
                TargetFormat::Disk { key, offset: *offset, keeps_room: *keeps_room }
            }
            Self::Luks2 { key, offset } => {
                let key = Handle::Fd(key.as_fd().as_raw_fd());
                TargetFormat::Luks2 { key, offset: *offset }
            }
        }
    }
}

impl Work {
    /// The limits that delay requests, if there are any.
    fn limit(&self) -> Option<LimitSpec> {
        let Self::Serve { limits, .. } = self else { return None };
        if limits.iops.is_none() && limits.bandwidth.is_none() {
            return None;
        }
        let budget = |per_second: u64| Budget { per_second, burst: per_second.div_ceil(10) };
        Some(LimitSpec { requests: limits.iops.map(budget), bytes: limits.bandwidth.map(budget) })
    }

    /// What has requests fail that storage does not answer, if the disk's limits say so.
    fn stall(&self) -> Option<StallSpec> {
        let Self::Serve { limits, .. } = self else { return None };
        let seconds = limits.stall_timeout?;
        Some(StallSpec { milliseconds: u64::from(seconds) * 1000 })
    }

    /// The read cache, if there is one.
    fn cache(&self) -> Option<CacheSpec> {
        let Self::Serve { cache, .. } = self else { return None };
        cache.map(|bytes| CacheSpec { bytes })
    }

    /// The file that keeps the disk's dirty bitmaps.
    fn bitmaps(&self) -> Option<&File> {
        let Self::Serve { bitmaps, .. } = self else { return None };
        bitmaps.as_ref()
    }

    fn descriptors(&self) -> impl Iterator<Item = BorrowedFd<'_>> {
        let merge = match self {
            Self::Merge { lower, lock } => Some((lower, lock)),
            _ => None,
        };
        let merge = merge.into_iter().flat_map(|(lower, lock)| {
            let files = [&lower.file, lock].into_iter().chain(&lower.layers);
            files.map(AsFd::as_fd).chain(lower.key.as_ref().map(AsFd::as_fd))
        });
        let convert = match self {
            Self::Convert(it) => Some(it),
            _ => None,
        };
        let convert = convert.into_iter().flat_map(|it| {
            let files = [it.file.as_fd(), it.journal.as_fd()].into_iter();
            files.chain(it.key.as_ref().map(AsFd::as_fd))
        });
        let sums = match self {
            Self::Export { sums, .. } => Some(sums),
            _ => None,
        };
        let sums = sums
            .into_iter()
            .flat_map(|sums| sums.written.iter().chain(&sums.except).chain(&sums.changed));
        let (one, other) = match self {
            Self::Mirror | Self::Merge { .. } | Self::Convert(_) => (None, None),
            Self::Serve { socket, connected, .. } => {
                (Some(socket.as_fd()), Some(connected.as_fd()))
            }
            Self::Expose { socket, .. } | Self::ServeFirmware { socket, .. } => {
                (Some(socket.as_fd()), None)
            }
            Self::Import { source, .. } => (Some(source.as_fd()), None),
            Self::Export { target, format, .. } => {
                (Some(target.as_fd()), format.key().map(AsFd::as_fd))
            }
        };
        let bitmaps = self.bitmaps().map(AsFd::as_fd);
        let sums = sums.map(AsFd::as_fd);
        one.into_iter().chain(other).chain(merge).chain(convert).chain(sums).chain(bitmaps)
    }
}

impl Disk {
    /// What a filter is told of it, with these channels for its images.
    pub(super) fn config(&self, peer: u32, channels: &Channels) -> DiskConfig {
        let fd = |fd: BorrowedFd<'_>| Handle::Fd(fd.as_raw_fd());
        let crypt = |(key, holes): &(SecretFd, Holes)| FilterSpec::Crypt {
            key: fd(key.as_fd()),
            holes: *holes,
        };
        // The limit is above encryption, so that delayed requests are not encrypted yet. The cache is below
        // it, so that it holds ciphertext.
        let chain = self.work.limit().map(FilterSpec::Limit).into_iter();
        // Below the limit, as what that keeps back is not in storage.
        let chain = chain.chain(self.work.stall().map(FilterSpec::Stall));
        // Above encryption, as the copy has a key of its own or none.
        let mirror = self.mirror.as_ref();
        let mirror_stays = mirror.is_some_and(|it| matches!(it.to, CopyPlace::OtherHost { .. }));
        let mirror = mirror.map(|mirror| FilterSpec::Mirror(Box::new(mirror.spec(channels, fd))));
        let chain = chain.chain(mirror);
        // A guest could change the ciphertext before it is decrypted in its memory.
        let in_guest_memory = matches!(self.work, Work::Serve { .. });
        let bounces = self.shared.key && self.key.is_some() && in_guest_memory;
        let chain = chain.chain(bounces.then_some(FilterSpec::Bounce {}));
        let chain = chain.chain(self.key.iter().map(crypt));
        let chain = chain.chain(self.work.cache().map(FilterSpec::Cache));
        // Last, so that it copies what the image holds and takes no room in the cache.
        let replicate = |replica: &Replica| {
            let backend = BackendSpec::File {
                file: fd(replica.file.as_fd()),
                offset: self.offset,
                direct: Direct::Auto,
                keeps_room: false,
                channel: channels.beside(&replica.file).map(fd),
            };
            FilterSpec::Replicate(Box::new(ReplicateSpec {
                to: StackSpec { chain: Vec::new(), backend },
                map: fd(replica.map.as_fd()),
                bytes_per_second: replica.bytes_per_second,
            }))
        };
        let chain = chain.chain(self.replica.as_ref().map(replicate));
        DiskConfig {
            disk: self.disk,
            size: self.size,
            serial: serial(self.disk),
            read_only: match self.work {
                Work::Export { .. }
                | Work::Merge { .. }
                | Work::Expose { writable: false, .. }
                | Work::Serve { read_only: true, .. } => true,
                // Its guest may have it.
                Work::Mirror => mirror_stays,
                _ => false,
            },
            chain: chain.collect(),
            backend: match backend(
                &self.file,
                &self.layers,
                self.offset,
                self.keeps_room,
                Direct::Auto,
                channels,
            ) {
                BackendSpec::Qcow2 { file, backing, offset, .. } => {
                    let lock = self.lock().map(|file| fd(file.as_fd()));
                    BackendSpec::Qcow2 { file, backing, offset, lock }
                }
                other => other,
            },
            front_end: match &self.work {
                Work::Serve { socket, connected, queues, .. } => Some(FrontEndSpec::VhostUserBlk {
                    socket: fd(socket.as_fd()),
                    connected: Some(fd(connected.as_fd())),
                    peer_uid: None,
                    queues: *queues,
                }),
                Work::Expose { socket, .. } => {
                    Some(FrontEndSpec::Nbd { listen: fd(socket.as_fd()), peer_uid: Some(peer) })
                }
                Work::ServeFirmware { socket, user } => {
                    let peer_uid = Some(user.unwrap_or(peer));
                    Some(FrontEndSpec::Nbd { listen: fd(socket.as_fd()), peer_uid })
                }
                Work::Import { .. }
                | Work::Export { .. }
                | Work::Mirror
                | Work::Merge { .. }
                | Work::Convert(_) => None,
            },
            beside: self
                .beside
                .as_ref()
                .map(|socket| BesideSpec { listen: fd(socket.as_fd()), peer_uid: Some(peer) }),
            bitmaps: self.work.bitmaps().map(|file| fd(file.as_fd())),
            import: match &self.work {
                Work::Import { source, format, from } => {
                    Some(ImportSpec { source: fd(source.as_fd()), format: *format, from: *from })
                }
                _ => None,
            },
            export: match &self.work {
                Work::Export { target, format, sums } => {
                    let file = |file: &File| fd(file.as_fd());
                    Some(ExportSpec {
                        target: fd(target.as_fd()),
                        format: format.spec(),
                        sums: sums.written.as_ref().map(file),
                        except: sums.except.as_ref().map(file),
                        changed: sums.changed.as_ref().map(file),
                    })
                }
                _ => None,
            },
            merge: match &self.work {
                Work::Merge { lower, lock } => {
                    let key = lower.key.as_ref().map(AsFd::as_fd).map(fd);
                    let crypt = |key| FilterSpec::Crypt { key, holes: Holes::Zero };
                    Some(MergeSpec {
                        into: StackSpec {
                            chain: key.map(crypt).into_iter().collect(),
                            backend: backend(
                                &lower.file,
                                &lower.layers,
                                lower.offset,
                                self.keeps_room,
                                lower.direct,
                                channels,
                            ),
                        },
                        lock: fd(lock.as_fd()),
                    })
                }
                _ => None,
            },
            convert: match &self.work {
                Work::Convert(it) => Some(it.spec(self.keeps_room, channels)),
                _ => None,
            },
        }
    }

    /// The images that the filter reads or writes as they are, without layers above them.
    pub(super) fn images(&self) -> impl Iterator<Item = &File> {
        let own = self.layers.is_empty().then_some(&self.file);
        let worked = match &self.work {
            Work::Merge { lower, .. } => lower.layers.is_empty().then_some(&lower.file),
            Work::Convert(it) => Some(&it.file),
            _ => None,
        };
        let copy = self.mirror.as_ref().and_then(Mirror::image);
        let replica = self.replica.as_ref().map(|it| &it.file);
        own.into_iter().chain(worked).chain(copy).chain(replica)
    }

    /// The file that is kept open for its lock: one that others write only when they have that needs none.
    fn lock(&self) -> Option<&File> {
        self.shared.own.as_ref().filter(|_| !self.layers.is_empty())
    }

    /// Closes all descriptors but those of keys.
    pub(super) fn into_keys(self) -> impl Iterator<Item = SecretFd> {
        let volume = match self.work {
            Work::Export { format, .. } => format.into_key(),
            Work::Merge { lower, .. } => lower.key,
            Work::Convert(it) => it.key,
            _ => None,
        };
        let mirror = self.mirror.and_then(|mirror| mirror.key);
        self.key.into_iter().chain(mirror).map(|(key, _)| key).chain(volume)
    }

    pub(super) fn descriptors(&self) -> impl Iterator<Item = BorrowedFd<'_>> {
        let key = self.key.as_ref().map(|(key, _)| key.as_fd());
        let beside = self.beside.as_ref().map(AsFd::as_fd);
        let file = std::iter::once(&self.file).chain(&self.layers).chain(self.lock());
        let file = file.map(AsFd::as_fd);
        let replica = self.replica.iter().flat_map(|it| [it.file.as_fd(), it.map.as_fd()]);
        let mirror = self.mirror.iter().flat_map(|it| {
            let key = it.key.as_ref().map(|(key, _)| key.as_fd());
            it.to.descriptors().into_iter().chain([it.map.as_fd()]).chain(key)
        });
        file.chain(self.work.descriptors()).chain(key).chain(beside).chain(replica).chain(mirror)
    }
}

/// Where a disk is stored: in its image, or in the layers above it.
fn backend(
    file: &File,
    layers: &[File],
    offset: u64,
    keeps_room: bool,
    direct: Direct,
    channels: &Channels,
) -> BackendSpec {
    let fds: Vec<_> =
        layers.iter().chain([file]).map(|file| Handle::Fd(file.as_raw_fd())).collect();
    let channel = channels.beside(file).map(|it| Handle::Fd(it.as_raw_fd()));
    stored(&fds, offset, keeps_room, direct, None, channel)
}

/// The same in files of these numbers: the active layer's first, and the image's last. `lock` is kept open for the disk's lock,
/// where none of these has it; `channel` is for an image alone.
pub(super) fn stored(
    files: &[Handle],
    offset: u64,
    keeps_room: bool,
    direct: Direct,
    lock: Option<Handle>,
    channel: Option<Handle>,
) -> BackendSpec {
    let (file, below) = match files {
        [file] => {
            return BackendSpec::File { file: file.clone(), offset, direct, keeps_room, channel };
        }
        [active, below @ ..] => (active.clone(), below),
        [] => unreachable!("a disk has an image"),
    };
    let backing = below.iter().enumerate().map(|(index, file)| {
        let lowest = index + 1 == below.len();
        let format = if lowest { ImageFormat::Raw } else { ImageFormat::Qcow2 };
        BackingSpec { file: file.clone(), format }
    });
    BackendSpec::Qcow2 { file, backing: backing.collect(), offset, lock }
}

/// The device id that the guest sees: the last digits of the disk's id, which are random.
fn serial(disk: DiskId) -> String {
    let digits = disk.0.simple().to_string();
    digits[digits.len() - SERIAL_MAX..].to_owned()
}

#[cfg(test)]
mod tests;
