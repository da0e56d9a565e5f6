use std::path::PathBuf;

use super::*;
use crate::filter::Connection;
use crate::filter::channel::tests::beside;

#[test]
fn limits_are_above_encryption_and_the_cache_is_below() {
    let (_to_qemu, socket, connected) = Connection::new(PathBuf::new()).unwrap();
    let limits = DiskLimits { iops: Some(100), bandwidth: None, stall_timeout: Some(60) };
    let key = vmseal_secret::SecretBytes::random(vmseal_secret::DEK_LEN).unwrap();
    let mut disk = Disk {
        disk: DiskId::new(),
        size: 4096,
        file: tempfile::tempfile().unwrap(),
        layers: Vec::new(),
        offset: 0,
        key: Some((key.to_memfd().unwrap(), Holes::Zero)),
        shared: Shared::default(),
        keeps_room: false,
        work: Work::Serve {
            socket,
            connected,
            queues: 1,
            read_only: false,
            limits,
            cache: Some(1 << 20),
            bitmaps: Some(tempfile::tempfile().unwrap()),
        },
        beside: None,
        replica: Some(Replica {
            file: tempfile::tempfile().unwrap(),
            map: tempfile::tempfile().unwrap(),
            bytes_per_second: 5 << 20,
        }),
        mirror: None,
    };
    assert_eq!(disk.descriptors().count(), 7, "the filter lacks a descriptor of its configuration");
    let none = Channels::default();
    let chain = disk.config(0, &none).chain;
    let [
        FilterSpec::Limit(_),
        FilterSpec::Stall(StallSpec { milliseconds: 60_000 }),
        FilterSpec::Crypt { .. },
        FilterSpec::Cache(cache),
        FilterSpec::Replicate(replicate),
    ] = &chain[..]
    else {
        panic!("{chain:?}")
    };
    assert_eq!((cache.bytes, replicate.bytes_per_second), (1 << 20, 5 << 20));
    disk.shared.key = true;
    let chain = disk.config(0, &none).chain;
    let is_above = matches!(&chain[2..4], [FilterSpec::Bounce {}, FilterSpec::Crypt { .. }]);
    assert!(is_above, "others have its key, and it is decrypted in its guest's memory: {chain:?}");
    disk.shared.key = false;
    let replica = disk.replica.as_ref().unwrap().file.as_raw_fd();
    let BackendSpec::File { file, .. } = &replicate.to.backend else {
        panic!("{:?}", replicate.to)
    };
    assert_eq!(*file, Handle::Fd(replica));
    assert_eq!(channel_of(&disk.config(0, &none).backend), None);
    assert_eq!(disk.images().count(), 2, "one has no channel");
    let channels = beside(&disk.file);
    let passed = channels.descriptors().next().map(|it| Handle::Fd(it.as_raw_fd()));
    assert_eq!(channel_of(&disk.config(0, &channels).backend), passed);
    disk.layers = (0..2).map(|_| tempfile::tempfile().unwrap()).collect();
    assert_eq!(disk.descriptors().count(), 9, "the filter lacks a layer");
    let BackendSpec::Qcow2 { file, backing, .. } = disk.config(0, &none).backend else {
        panic!("the layers are not used")
    };
    let fd = |file: &File| Handle::Fd(file.as_raw_fd());
    let formats: Vec<_> = backing.iter().map(|file| file.format).collect();
    assert_eq!(formats, [ImageFormat::Qcow2, ImageFormat::Raw]);
    assert_eq!((file, &backing[1].file), (fd(&disk.layers[0]), &fd(&disk.file)));
    assert_eq!(disk.images().count(), 1, "only the replica has no layers");
    disk.layers.clear();
    disk.replica = None;
    let source = tempfile::tempfile().unwrap();
    disk.work = Work::Import { source, format: ImageFormat::Raw, from: 0 };
    assert_eq!(disk.config(0, &none).chain.len(), 1, "a filter that fills a disk has a cache");
}

/// The channel of an image.
fn channel_of(backend: &BackendSpec) -> Option<Handle> {
    let BackendSpec::File { channel, .. } = backend else { panic!("{backend:?}") };
    channel.clone()
}

#[test]
fn what_is_copied_and_converted_has_a_channel_where_it_is_an_image_alone() {
    let file = || tempfile::tempfile().unwrap();
    let to = CopyPlace::Image { file: file(), layers: Vec::new(), offset: 0, keeps_room: false };
    let mut mirror = Mirror { to, key: None, map: file(), pace: CopyPace::default(), cache: None };
    let passed = |channels: &Channels, mirror: &Mirror| {
        let mut passed = Vec::new();
        let spec = mirror.spec(channels, |fd| {
            passed.push(fd.as_raw_fd());
            Handle::Fd(fd.as_raw_fd())
        });
        (passed.len(), spec.to.backend)
    };
    let channels = beside(mirror.image().unwrap());
    let (count, backend) = passed(&channels, &mirror);
    assert_eq!((count, channel_of(&backend).is_some()), (3, true));
    if let CopyPlace::Image { layers, .. } = &mut mirror.to {
        layers.push(file());
    }
    assert!(mirror.image().is_none());
    let (count, backend) = passed(&channels, &mirror);
    assert!(count == 3 && matches!(backend, BackendSpec::Qcow2 { .. }), "{backend:?}");

    let conversion = Conversion {
        file: file(),
        offset: 4096,
        key: None,
        journal: file(),
        bytes_per_second: None,
    };
    let channels = beside(&conversion.file);
    assert!(channel_of(&conversion.spec(false, &channels).into.backend).is_some());
}

#[test]
fn a_serial_is_as_long_as_virtio_allows_and_tells_disks_apart() {
    let (one, two) = (serial(DiskId::new()), serial(DiskId::new()));
    assert_eq!(one.len(), SERIAL_MAX);
    assert_ne!(one, two);
}
