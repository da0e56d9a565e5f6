use std::fs::OpenOptions;
use std::os::unix::fs::{FileExt, MetadataExt};

use vmseal_api::hardware::{TPM_DISK_SIZE, VARIABLES_SIZE};
use vmseal_api::host::{Allocation, DatastoreLocation, DatastoreSpec, Device, NoticeCode};
use vmseal_api::id::{DatastoreId, DiskId};
use vmseal_api::transfer::ImageFormat;
use vmseal_secret::KEK_LEN;

use super::*;
use crate::hypervisor::tpm::PROGRAM;
use crate::process::run_dir;
use crate::process::users::Users;
use crate::storage::datastore;
use crate::storage::locked::Access;
use crate::storage::opening::{Open, open};
use crate::storage::tpm_import::tests::plain;

struct Bench {
    _directory: tempfile::TempDir,
    builder: DiskBuilder,
    spec: VmSpec,
    kek: SecretBytes,
}

/// A VM with an encrypted and a plain disk; no filter program is needed as nothing is imported.
fn bench() -> Bench {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("store");
    std::fs::create_dir(&path).unwrap();
    let location = DatastoreLocation::Dir { path };
    let place = DatastoreSpec { datastore: DatastoreId::new(), location };
    datastore::probe(&place).unwrap();
    let kek = SecretBytes::random(KEK_LEN).unwrap();
    let mut spec = run_dir::tests::spec();
    spec.key = Some(keys::reference_of(&kek, spec.vm, "k"));
    spec.devices = [true, false]
        .map(|encrypted| Device::Disk(DiskSpec { encrypted, ..run_dir::tests::disk("d", &place) }))
        .into();
    let run = run_dir::RunDir::open(&directory.path().join("run")).unwrap();
    let builder = DiskBuilder {
        filter: Arc::new(File::open("/bin/false").unwrap()),
        users: Users::new(None),
        directory: run.import(DiskId::new()),
        transfer: TransferDirectories::anywhere(),
        gate: Arc::new(crate::storage::gate::Gate::new(Default::default())),
    };
    Bench { _directory: directory, builder, spec, kek }
}

impl Bench {
    async fn create(&self, index: usize) -> Result<DiskFacts, Problem> {
        self.create_from(index, None).await
    }

    async fn create_from(
        &self,
        index: usize,
        source: Option<ImageSource>,
    ) -> Result<DiskFacts, Problem> {
        self.create_of(index, source.map(Source::Image)).await
    }

    async fn create_of(&self, index: usize, source: Option<Source>) -> Result<DiskFacts, Problem> {
        let kek = Some(self.kek.try_clone().unwrap());
        let disk = self.spec.disk_at(index).unwrap().clone();
        let new_disk = NewDisk { spec: self.spec.clone(), disk, kek, source };
        let (_running, cancelled) = oneshot::channel();
        create(new_disk, &self.builder, |_, _| {}, cancelled).await
    }

    fn open(&self, index: usize, facts: &DiskFacts) -> Result<Open, Problem> {
        open(&self.spec, self.spec.disk_at(index).unwrap(), facts, Some(&self.kek), Access::Write)
    }

    fn image(&self, index: usize) -> File {
        let disk = self.spec.disk_at(index).unwrap();
        let path = Home::of(&disk.datastore, self.spec.vm).unwrap().image(disk.disk);
        OpenOptions::new().read(true).write(true).open(path).unwrap()
    }
}

#[tokio::test]
async fn a_disk_is_made_once_found_made_again_and_opens_with_its_key() {
    let bench = bench();
    let facts = bench.create(0).await.unwrap();
    assert!(matches!(facts, DiskFacts::Luks2 { sector_size: 4096, .. }));
    assert_eq!(bench.create(0).await.unwrap(), facts);
    let opened = bench.open(0, &facts).unwrap();
    assert!(opened.notice.is_none() && opened.offset == vmseal_luks::DATA_OFFSET);
    let key = opened.key.as_ref().unwrap();
    let dek = SecretBytes::from_memfd(&key.0, DEK_LEN).unwrap();
    assert_eq!(bench.open(0, &facts).unwrap_err().code, ErrorCode::InUse);
    drop(opened);
    let again = bench.open(0, &facts).unwrap();
    assert_eq!(SecretBytes::from_memfd(&again.key.unwrap().0, DEK_LEN).unwrap(), dek);
    assert_eq!(bench.create(1).await.unwrap(), DiskFacts::Raw);
    assert!(bench.open(1, &DiskFacts::Raw).unwrap().key.is_none());
}

#[tokio::test]
async fn a_preallocated_disk_has_all_its_room_and_one_that_does_not_fit_leaves_nothing() {
    let mut bench = bench();
    for (index, header) in [(0, vmseal_luks::DATA_OFFSET), (1, 0)] {
        let disk = bench.spec.disk_at_mut(index).unwrap();
        disk.allocation = Allocation::Preallocated;
        disk.size = 8 << 20;
        bench.create(index).await.unwrap();
        let metadata = bench.image(index).metadata().unwrap();
        assert_eq!(metadata.len(), header + (8 << 20));
        assert!(metadata.blocks() * 512 >= metadata.len(), "{} blocks", metadata.blocks());
        let home = Home::of(&bench.spec.disk_at(index).unwrap().datastore, bench.spec.vm).unwrap();
        home.delete(bench.spec.disk_at(index).unwrap().disk).unwrap();

        bench.spec.disk_at_mut(index).unwrap().size = 1 << 60;
        let problem = bench.create(index).await.unwrap_err();
        assert_eq!(problem.code, ErrorCode::NoSpace, "{problem}");
        assert!(!home.image(bench.spec.disk_at(index).unwrap().disk).parent().unwrap().exists());
    }
    // The same with thin allocation: the room is not required.
    bench.spec.disk_at_mut(1).unwrap().allocation = Allocation::Thin;
    bench.spec.disk_at_mut(1).unwrap().size = 1 << 40;
    bench.create(1).await.unwrap();
    assert!(bench.image(1).metadata().unwrap().blocks() < 100);
}

#[tokio::test]
async fn the_making_of_a_preallocated_disk_shows_how_far_it_is_and_can_be_ended() {
    let bench = bench();
    let home = Home::of(&bench.spec.disk_at(1).unwrap().datastore, bench.spec.vm).unwrap();
    let disk = bench.spec.disk_at(1).unwrap();
    let length = ALLOCATION_STEP + 4096;
    let file = home.begin(&bench.spec, disk, length).unwrap();
    let seen = std::sync::Mutex::new(Vec::new());
    let progress = |done, total| seen.lock().unwrap().push((done, total));
    let (_running, mut cancelled) = oneshot::channel();
    let copy = file.try_clone().unwrap();
    take_room(&home, disk.disk, copy, &progress, &mut cancelled).await.unwrap();
    assert_eq!(*seen.lock().unwrap(), [(ALLOCATION_STEP, length), (length, length)]);
    let (cancel, mut cancelled) = oneshot::channel();
    cancel.send(()).unwrap();
    let ended = take_room(&home, disk.disk, file, &progress, &mut cancelled).await;
    assert_eq!(ended.unwrap_err().code, ErrorCode::Cancelled);
}

#[test]
fn a_disk_that_will_be_written_has_no_more_room_ahead_on_a_pool_than_its_header() {
    const SIZE: u64 = 8 << 20;
    // File systems count some blocks of their own.
    const SLACK: u64 = 1 << 20;
    let bench = bench();
    let directory = bench.spec.disk_at(0).unwrap().datastore.location.clone();
    let path = directory.path().to_owned();
    let pool = Box::new(crate::storage::pool::tests::pool());
    let ceph = DatastoreLocation::Rbd { path, pool };
    let begun = |index, role, size, location: &DatastoreLocation| {
        let known = bench.spec.disk_at(index).unwrap();
        let home = Home::of(&known.datastore, bench.spec.vm).unwrap();
        let datastore = DatastoreSpec { location: location.clone(), ..known.datastore.clone() };
        let (disk, allocation) = (DiskId::new(), Allocation::Preallocated);
        let disk = DiskSpec { disk, datastore, allocation, role, size, ..known.clone() };
        let (file, ..) = begin_empty(&bench.spec, &disk, Some(&bench.kek), &home).unwrap();
        file.sync_all().unwrap();
        file.metadata().unwrap().blocks() * 512
    };
    for (index, header) in [(0, vmseal_luks::DATA_OFFSET), (1, 0)] {
        let taken = begun(index, DiskRole::Data, SIZE, &directory);
        assert!(taken >= header + SIZE, "{taken} in a directory");
        let taken = begun(index, DiskRole::Data, SIZE, &ceph);
        assert!((header..header + SLACK).contains(&taken), "{taken} on a pool");
    }
    // Nothing is written to that of a TPM.
    let taken = begun(0, DiskRole::Tpm, TPM_DISK_SIZE, &ceph);
    assert!(taken >= vmseal_luks::DATA_OFFSET + TPM_DISK_SIZE, "{taken} of a TPM");
}

#[tokio::test]
async fn a_defect_of_a_disk_is_reported_and_nothing_is_written() {
    let mut bench = bench();
    let facts = bench.create(0).await.unwrap();
    assert_eq!(bench.open(0, &DiskFacts::Raw).unwrap_err().code, ErrorCode::Damaged);

    let right = std::mem::replace(&mut bench.kek, SecretBytes::random(KEK_LEN).unwrap());
    assert_eq!(bench.open(0, &facts).unwrap_err().code, ErrorCode::KeyMismatch);
    assert_eq!(bench.create(0).await.unwrap_err().code, ErrorCode::KeyMismatch);
    bench.kek = right;

    let image = bench.image(0);
    let mut first = vec![0; 4096];
    image.read_exact_at(&mut first, 0).unwrap();
    image.write_all_at(&[0; 4096], 0).unwrap();
    let notice = bench.open(0, &facts).unwrap().notice.unwrap();
    assert_eq!(notice.code, NoticeCode::HeaderCopyDamaged);
    assert!(notice.detail.contains("vmseal vm recrypt"), "{}", notice.detail);
    image.write_all_at(&first, 0).unwrap();
    assert!(bench.open(0, &facts).unwrap().notice.is_none());

    image.set_len(vmseal_luks::DATA_OFFSET + 4096).unwrap();
    let problem = bench.open(0, &facts).unwrap_err();
    assert_eq!(problem.code, ErrorCode::Damaged);
    assert!(problem.detail.contains("truncated"), "{problem}");

    image.set_len(vmseal_luks::DATA_OFFSET + (1 << 20)).unwrap();
    image.write_all_at(&vec![0; 16 << 20], 0).unwrap();
    assert_eq!(bench.open(0, &facts).unwrap_err().code, ErrorCode::Damaged);
    assert_eq!(bench.open(1, &DiskFacts::Raw).unwrap_err().code, ErrorCode::NotFound);
}

#[tokio::test]
async fn whether_a_disk_could_be_made_is_known_before_it_is() {
    let (bench, anywhere) = (bench(), &TransferDirectories::anywhere());
    let directory = tempfile::tempdir().unwrap();
    let whole = directory.path().join("whole");
    std::fs::write(&whole, [1; 4096]).unwrap();
    // A header of version 2 that names a backing file, and nothing else.
    let overlay = directory.path().join("overlay");
    let mut header = vec![0; 4096];
    header[..8].copy_from_slice(b"QFI\xfb\0\0\0\x02");
    header[8..20].copy_from_slice(&[0, 0, 0, 0, 0, 0, 8, 0, 0, 0, 0, 4]);
    header[20..24].copy_from_slice(&16_u32.to_be_bytes());
    std::fs::write(&overlay, header).unwrap();
    let from = |path: &std::path::Path, format| {
        Some(ImageSource { path: path.to_owned(), format, force: false })
    };
    let disk = bench.spec.disk_at(1).unwrap();
    let home = Home::of(&disk.datastore, bench.spec.vm).unwrap();
    for source in [None, from(&whole, ImageFormat::Raw)] {
        examine(disk.clone(), source, anywhere).await.unwrap();
    }
    for (source, why) in [
        (from(&directory.path().join("none"), ImageFormat::Raw), "No such file"),
        (from(&whole, ImageFormat::Qcow2), "not a qcow2 image"),
        (from(&overlay, ImageFormat::Qcow2), "backing file"),
    ] {
        let refused = examine(disk.clone(), source, anywhere).await.unwrap_err();
        assert_eq!(refused.code, ErrorCode::InvalidRequest, "{refused}");
        assert!(refused.detail.contains(why), "{refused}");
    }
    let (allocation, size) = (Allocation::Preallocated, 1 << 60);
    let huge = DiskSpec { allocation, size, ..disk.clone() };
    assert_eq!(examine(huge, None, anywhere).await.unwrap_err().code, ErrorCode::NoSpace);
    let mut elsewhere = disk.clone();
    elsewhere.datastore.datastore = DatastoreId::new();
    assert_eq!(examine(elsewhere, None, anywhere).await.unwrap_err().code, ErrorCode::WrongState);
    assert_eq!(std::fs::read_dir(home.datastore()).unwrap().count(), 1, "something was made");
}

#[tokio::test]
async fn a_source_that_cannot_be_imported_leaves_nothing() {
    let bench = bench();
    let directory = tempfile::tempdir().unwrap();
    let large = directory.path().join("large");
    File::create(&large).unwrap().set_len((1 << 20) + 1).unwrap();
    let good = directory.path().join("good");
    std::fs::write(&good, [1; 4096]).unwrap();
    for (path, code) in [
        (large, ErrorCode::InvalidRequest),
        (directory.path().to_owned(), ErrorCode::InvalidRequest),
        (directory.path().join("none"), ErrorCode::InvalidRequest),
        ("relative".into(), ErrorCode::InvalidRequest),
        // The filter of this test ends at once.
        (good, ErrorCode::Internal),
    ] {
        let problem = bench
            .create_from(0, Some(ImageSource { path, format: ImageFormat::Raw, force: false }))
            .await
            .unwrap_err();
        assert_eq!(problem.code, code, "{problem}");
        let home = Home::of(&bench.spec.disk_at(0).unwrap().datastore, bench.spec.vm).unwrap();
        let left = home.image(bench.spec.disk_at(0).unwrap().disk);
        assert!(!left.parent().unwrap().exists(), "{problem}");
    }
}

#[tokio::test]
async fn variables_that_cannot_be_taken_leave_nothing_and_a_disk_that_is_made_needs_none() {
    let mut bench = bench();
    let disk = bench.spec.disk_at_mut(0).unwrap();
    (disk.role, disk.size) = (DiskRole::UefiVariables, VARIABLES_SIZE);
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("web_VARS.fd");
    std::fs::write(&path, [0; 4096]).unwrap();
    let taken = || {
        let source = ImageSource { path: path.clone(), format: ImageFormat::Raw, force: false };
        Some(Source::TakenVariables(source, Firmware::Uefi))
    };
    let refused = bench.create_of(0, taken()).await.unwrap_err();
    assert_eq!(refused.field.as_deref(), Some("uefi_variables"), "{refused}");
    assert!(refused.detail.contains("has 4096 bytes"), "{refused}");
    let home = Home::of(&bench.spec.disk_at(0).unwrap().datastore, bench.spec.vm).unwrap();
    let left = home.image(bench.spec.disk_at(0).unwrap().disk);
    assert!(!left.parent().unwrap().exists(), "something was left");
    let facts = bench.create(0).await.unwrap();
    std::fs::remove_file(&path).unwrap();
    assert_eq!(bench.create_of(0, taken()).await.unwrap(), facts);
}

#[tokio::test]
async fn a_tpm_that_a_file_does_not_fill_leaves_nothing_and_one_that_is_made_needs_none() {
    let mut bench = bench();
    let disk = bench.spec.disk_at_mut(0).unwrap();
    (disk.role, disk.size) = (DiskRole::Tpm, TPM_DISK_SIZE);
    let directory = tempfile::tempdir().unwrap();
    let path = plain(directory.path());
    let whole = std::fs::read(&path).unwrap();
    let taken = || {
        let source = ImageSource { path: path.clone(), format: ImageFormat::Raw, force: false };
        Some(Source::Tpm(Swtpm::of(PROGRAM.into()), Some(source)))
    };
    let mut damaged = whole.clone();
    damaged[64..].fill(0);
    let home = Home::of(&bench.spec.disk_at(0).unwrap().datastore, bench.spec.vm).unwrap();
    let image = home.image(bench.spec.disk_at(0).unwrap().disk);
    for (content, told) in
        [(&whole[1..], "no state of a TPM 2.0"), (&damaged[..], "swtpm does not load it")]
    {
        std::fs::write(&path, content).unwrap();
        let refused = bench.create_of(0, taken()).await.unwrap_err();
        assert_eq!(refused.field.as_deref(), Some("tpm_state"), "{refused}");
        assert!(refused.detail.contains(told), "{refused}");
        assert!(!image.parent().unwrap().exists(), "something was left: {told}");
    }
    std::fs::write(&path, &whole).unwrap();
    let facts = bench.create_of(0, taken()).await.unwrap();
    std::fs::remove_file(&path).unwrap();
    assert_eq!(bench.create_of(0, taken()).await.unwrap(), facts);
}
