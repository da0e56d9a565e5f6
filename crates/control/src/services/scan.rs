//! Compares a host's scan of a datastore with the inventory: a pure function.

use std::collections::{HashMap, HashSet};

use vmseal_api::datastore::{
    DatastoreContents, DatastoreScan, FoundImage, ImageContent, ImageStatus, NamedImage,
    ScannedImage,
};
use vmseal_api::size::Size;

use crate::store::datastores::Datastore;
use crate::store::disks::Placed;

/// Compares with the inventory before and after the scan: an orphan is in neither, a missing image is expected
/// by both.
#[must_use]
pub fn compare(
    datastore: &Datastore,
    contents: DatastoreContents,
    before: &[Placed],
    after: &[Placed],
) -> DatastoreScan {
    // If both have a disk, the newer one counts.
    let both = before.iter().chain(after);
    let by_id: HashMap<&str, &Placed> = both.map(|disk| (disk.id.as_str(), disk)).collect();
    let here = datastore.id.to_string();
    let expected = |disk: &&Placed| disk.datastore_id == here && disk.whole;
    let since_before: HashSet<&str> =
        before.iter().filter(expected).map(|disk| disk.id.as_str()).collect();
    let mut seen = HashSet::new();
    let mut images = Vec::new();
    for found in contents.images {
        let image = judge(&here, datastore.hosts.len() > 1, found, &by_id);
        if matches!(image.status, ImageStatus::InUse | ImageStatus::Truncated)
            && let Some(name) = image.found.as_ref().and_then(|found| found.named)
            && !name.replica
        {
            seen.insert(name.disk.to_string());
        }
        images.push(image);
    }
    if contents.incomplete.is_none() {
        let missing = after
            .iter()
            .filter(expected)
            .filter(|disk| since_before.contains(disk.id.as_str()) && !seen.contains(&disk.id));
        images.extend(missing.map(|disk| ScannedImage {
            status: ImageStatus::Missing,
            vm: Some(disk.vm_name.clone()),
            disk: Some(disk.name.clone()),
            found: None,
            detail: format!(
                "{}/{}.raw is not there: restore it from a backup. If the VM or the disk was deleted after the backup from which this server was restored, delete it again (vmseal vm delete {vm}, or vmseal disk remove {vm} {})",
                disk.vm_id,
                disk.id,
                disk.name,
                vm = disk.vm_name
            ),
        }));
    }
    DatastoreScan {
        datastore: datastore.name.clone(),
        images,
        others: contents.others,
        datastores: contents.datastores,
        incomplete: contents.incomplete,
    }
}

fn judge(
    here: &str,
    shared: bool,
    found: FoundImage,
    known: &HashMap<&str, &Placed>,
) -> ScannedImage {
    let disk = found.named.and_then(|name| known.get(name.disk.to_string().as_str()).copied());
    let disk =
        disk.filter(|disk| found.named.is_some_and(|name| disk.vm_id == name.vm.to_string()));
    let (status, detail) = match (found.named, disk) {
        (Some(NamedImage { half_made: true, .. }), _) => {
            let what = match found.kept_until {
                Some(until) => {
                    let day = until.strftime("%Y-%m-%d");
                    format!("being imported, or an interrupted import, kept until {day}")
                }
                None if shared && disk.is_none() => {
                    "debris of a VM that the inventory does not have, which no host of a shared datastore removes: remove it, if no other server works here".to_owned()
                }
                None => "being made, or debris, which the host removes within a day".to_owned(),
            };
            (ImageStatus::HalfMade, what)
        }
        (Some(NamedImage { replica: true, .. }), disk) => match disk {
            Some(disk) if disk.replica_id.as_deref() == Some(here) => {
                if let Some(what) = truncated(disk, &found) {
                    let what =
                        format!("{what}; the next start of its VM copies the whole disk again");
                    return scanned(ImageStatus::Truncated, Some(disk), found, what);
                }
                let what = format!("the replica of a disk on datastore '{}'", disk.datastore_name);
                (ImageStatus::InUse, what)
            }
            _ => {
                (ImageStatus::Orphan, "a replica that no disk of the inventory has here".to_owned())
            }
        },
        (Some(_), Some(disk)) if disk.datastore_id == here => {
            if let Some(what) = truncated(disk, &found) {
                let what = format!("{what}: restore it from a backup");
                return scanned(ImageStatus::Truncated, Some(disk), found, what);
            }
            (ImageStatus::InUse, against_inventory(disk, &found))
        }
        (Some(_), Some(disk)) => {
            let place = &disk.datastore_name;
            (
                ImageStatus::Orphan,
                format!("a copy: the inventory has this disk on datastore '{place}'"),
            )
        }
        (Some(_), None) => (
            ImageStatus::Orphan,
            "no VM of the inventory has this disk: vmseal datastore adopt takes its VM in"
                .to_owned(),
        ),
        (None, _) => match &found.content {
            ImageContent::Vmseal { .. } => {
                let what = "a disk of vmseal under a name that is not its own: a copy, or moved";
                (ImageStatus::Orphan, what.to_owned())
            }
            _ => (ImageStatus::Foreign, "not made by vmseal".to_owned()),
        },
    };
    scanned(status, disk, found, detail)
}

fn scanned(
    status: ImageStatus,
    disk: Option<&Placed>,
    found: FoundImage,
    detail: String,
) -> ScannedImage {
    ScannedImage {
        status,
        vm: disk.map(|disk| disk.vm_name.clone()),
        disk: disk.map(|disk| disk.name.clone()),
        found: Some(found),
        detail,
    }
}

/// Says that an image is truncated, if it is. The length of one that cannot be read is unknown.
fn truncated(disk: &Placed, found: &FoundImage) -> Option<String> {
    let needed = disk.image_length()?;
    let known = !matches!(found.content, ImageContent::Unreadable { .. });
    (known && found.size < needed).then(|| {
        let (has, needed) = (Size(found.size), Size(needed));
        format!("its file has {has} and needs {needed}: it was truncated")
    })
}

/// How an image differs from the inventory; empty if it does not. The final check is the start of the
/// VM: only that has the key.
fn against_inventory(disk: &Placed, found: &FoundImage) -> String {
    match &found.content {
        ImageContent::Vmseal { claims } if disk.encrypted => {
            let its_own = claims.iter().any(|claim| {
                claim.disk.to_string() == disk.id && claim.vm.to_string() == disk.vm_id
            });
            match &found.misnoted {
                _ if !its_own => "its header claims to be another disk".to_owned(),
                Some(said) => format!(
                    "its metadata in the pool names other keys ({said}) than its header, which counts; the next start of the VM puts that right"
                ),
                None => String::new(),
            }
        }
        ImageContent::Raw if disk.encrypted => {
            "it should be encrypted, and has no header".to_owned()
        }
        ImageContent::ForeignLuks { detail } if disk.encrypted => detail.clone(),
        ImageContent::Unreadable { detail } => detail.clone(),
        // A guest may write anything on a plaintext disk.
        _ => String::new(),
    }
}

#[cfg(test)]
mod tests {
    use vmseal_api::datastore::Claim;
    use vmseal_api::host::DatastoreLocation;
    use vmseal_api::id::{DatastoreId, DiskId, HostId, ProviderId, VmId};

    use super::*;
    use crate::store::datastores::OnHost;

    fn datastore() -> Datastore {
        Datastore {
            id: DatastoreId::new(),
            name: "local".to_owned(),
            hosts: vec![OnHost {
                host: HostId::new(),
                host_name: "here".to_owned(),
                location: DatastoreLocation::Dir { path: "/store".into() },
                mounted_key: None,
                mount: None,
            }],
            usage: None,
            pools: Vec::new(),
            key: None,
            osds: Default::default(),
        }
    }

    fn placed(on: &Datastore, vm: VmId, disk: DiskId, name: &str) -> Placed {
        Placed {
            id: disk.to_string(),
            name: name.to_owned(),
            vm_id: vm.to_string(),
            vm_name: "web".to_owned(),
            datastore_id: on.id.to_string(),
            datastore_name: on.name.clone(),
            replica_id: None,
            encrypted: true,
            size: 1 << 20,
            facts: Some(r#"{"format":"raw"}"#.to_owned()),
            whole: true,
        }
    }

    fn found(path: &str, named: Option<NamedImage>, content: ImageContent) -> FoundImage {
        let (modified, kept_until, misnoted) = (None, None, None);
        let (path, size, allocated) = (path.to_owned(), 1 << 20, 1);
        FoundImage { path, named, size, allocated, modified, content, kept_until, misnoted }
    }

    fn claims(vm: VmId, disk: DiskId) -> ImageContent {
        let provider = ProviderId::new();
        let (key_id, role) = ("k".to_owned(), Default::default());
        ImageContent::Vmseal { claims: vec![Claim { vm, disk, provider, key_id, role }] }
    }

    #[test]
    fn each_image_is_classified_by_the_inventory() {
        let (here, there) = (datastore(), Datastore { name: "other".to_owned(), ..datastore() });
        let (vm, stranger) = (VmId::new(), VmId::new());
        let [whole, bare, forged, copy, gone] = std::array::from_fn(|_| DiskId::new());
        let known = [
            placed(&here, vm, whole, "whole"),
            placed(&here, vm, bare, "bare"),
            placed(&here, vm, forged, "forged"),
            placed(&there, vm, copy, "copy"),
            placed(&here, vm, gone, "gone"),
            Placed { whole: false, ..placed(&here, vm, DiskId::new(), "not made yet") },
        ];
        let name = |vm, disk| Some(NamedImage { vm, disk, half_made: false, replica: false });
        let half = Some(NamedImage { vm, disk: gone, half_made: true, replica: false });
        let foreign = ImageContent::ForeignLuks { detail: "no token".to_owned() };
        let images = vec![
            FoundImage {
                misnoted: Some("p/former".to_owned()),
                ..found("whole", name(vm, whole), claims(vm, whole))
            },
            found("bare", name(vm, bare), ImageContent::Raw),
            found("forged", name(vm, forged), claims(vm, whole)),
            found("copy", name(vm, copy), claims(vm, copy)),
            found("stolen", name(stranger, whole), claims(vm, whole)),
            found("stranger", name(stranger, DiskId::new()), ImageContent::Raw),
            FoundImage {
                kept_until: Some("2026-11-28T10:00:00Z".parse().unwrap()),
                ..found("half", half, ImageContent::Raw)
            },
            found("renamed", None, claims(vm, whole)),
            found("foreign", None, foreign),
        ];
        let within = vec!["inner".to_owned()];
        let contents =
            DatastoreContents { images, others: 3, datastores: within.clone(), incomplete: None };
        let scan = compare(&here, contents.clone(), &known, &known);
        let told: Vec<_> = scan
            .images
            .iter()
            .map(|it| (it.found.as_ref().map_or("-", |found| found.path.as_str()), it.status))
            .collect();
        assert_eq!(
            told,
            [
                ("whole", ImageStatus::InUse),
                ("bare", ImageStatus::InUse),
                ("forged", ImageStatus::InUse),
                ("copy", ImageStatus::Orphan),
                ("stolen", ImageStatus::Orphan),
                ("stranger", ImageStatus::Orphan),
                ("half", ImageStatus::HalfMade),
                ("renamed", ImageStatus::Orphan),
                ("foreign", ImageStatus::Foreign),
                ("-", ImageStatus::Missing),
            ]
        );
        let said = &scan.images[0].detail;
        assert!(said.contains("other keys (p/former)"), "{said}");
        assert!(scan.images[6].detail.contains("kept until 2026-11-28"), "{:?}", scan.images[6]);
        assert!(scan.images[1].detail.contains("has no header"));
        assert!(scan.images[2].detail.contains("another disk"));
        assert!(scan.images[3].detail.contains("'other'"));
        assert_eq!(scan.images[9].disk.as_deref(), Some("gone"));
        assert_eq!((scan.others, &scan.datastores), (3, &within));
        // An incomplete list does not prove that an image is missing.
        let part = DatastoreContents { incomplete: Some("too many".to_owned()), ..contents };
        let scan = compare(&here, part, &known, &known);
        assert!(scan.images.iter().all(|image| image.status != ImageStatus::Missing));
    }

    #[test]
    fn a_replica_is_in_use_where_the_inventory_has_it_and_no_image_of_its_disk() {
        let (here, there) = (datastore(), datastore());
        let (vm, disk) = (VmId::new(), DiskId::new());
        let known =
            [Placed { replica_id: Some(here.id.to_string()), ..placed(&there, vm, disk, "d") }];
        let name = Some(NamedImage { vm, disk, half_made: false, replica: true });
        let images = vec![found("replica", name, claims(vm, disk))];
        let contents = DatastoreContents { images, ..DatastoreContents::default() };
        let standings = |of: &Datastore| {
            let scan = compare(of, contents.clone(), &known, &known);
            scan.images.iter().map(|it| it.status).collect::<Vec<_>>()
        };
        assert_eq!(standings(&here), [ImageStatus::InUse]);
        assert_eq!(standings(&there), [ImageStatus::Orphan, ImageStatus::Missing]);
    }

    #[test]
    fn debris_that_no_host_removes_is_called_so() {
        let one = datastore();
        let hosts = [one.hosts.clone(), datastore().hosts].concat();
        let shared = Datastore { hosts, ..one.clone() };
        let (vm, disk) = (VmId::new(), DiskId::new());
        let known = [Placed { whole: false, ..placed(&one, vm, disk, "d") }];
        let half = |vm, disk| Some(NamedImage { vm, disk, half_made: true, replica: false });
        let images = vec![
            found("begun", half(vm, disk), ImageContent::Raw),
            found("left", half(VmId::new(), DiskId::new()), ImageContent::Raw),
        ];
        let contents = DatastoreContents { images, ..DatastoreContents::default() };
        let details = |of: &Datastore| {
            let scan = compare(of, contents.clone(), &known, &known);
            scan.images.into_iter().map(|it| it.detail).collect::<Vec<_>>()
        };
        assert!(details(&one).iter().all(|detail| detail.contains("within a day")));
        let [begun, left] = details(&shared).try_into().unwrap();
        assert!(begun.contains("within a day"), "{begun}");
        assert!(left.contains("no host of a shared datastore"), "{left}");
    }

    #[test]
    fn an_image_that_was_truncated_is_called_so_and_is_not_missing() {
        let (here, there) = (datastore(), datastore());
        let (vm, disk, copied) = (VmId::new(), DiskId::new(), DiskId::new());
        let known = [
            placed(&here, vm, disk, "d"),
            Placed { replica_id: Some(here.id.to_string()), ..placed(&there, vm, copied, "e") },
        ];
        let of = |disk, replica| {
            let name = Some(NamedImage { vm, disk, half_made: false, replica });
            FoundImage { size: (1 << 20) - 4096, ..found("x", name, claims(vm, disk)) }
        };
        let images = vec![of(disk, false), of(copied, true)];
        let contents = DatastoreContents { images, ..DatastoreContents::default() };
        let scan = compare(&here, contents, &known, &known);
        let told: Vec<_> = scan.images.iter().map(|it| it.status).collect();
        assert_eq!(told, [ImageStatus::Truncated, ImageStatus::Truncated]);
        let (first, second) = (&scan.images[0].detail, &scan.images[1].detail);
        assert!(first.contains("has 1020 KiB and needs 1 MiB"), "{first}");
        assert!(first.contains("restore") && second.contains("copies the whole"), "{second}");
    }

    #[test]
    fn what_is_made_or_deleted_meanwhile_is_neither_missing_nor_an_orphan() {
        let (here, vm) = (datastore(), VmId::new());
        let [made, begun, deleted, gone] = std::array::from_fn(|_| DiskId::new());
        let whole = |disk| placed(&here, vm, disk, "d");
        let before = [Placed { whole: false, ..whole(begun) }, whole(deleted), whole(gone)];
        let after = [whole(made), whole(begun), whole(gone)];
        let name = |disk| Some(NamedImage { vm, disk, half_made: false, replica: false });
        // The host saw the one that was deleted meanwhile, and none of those that were created.
        let images = vec![found("deleted", name(deleted), claims(vm, deleted))];
        let contents = DatastoreContents { images, ..DatastoreContents::default() };
        let scan = compare(&here, contents, &before, &after);
        let told: Vec<_> = scan.images.iter().map(|it| it.status).collect();
        assert_eq!(told, [ImageStatus::InUse, ImageStatus::Missing]);
        let said = &scan.images[1].detail;
        assert!(said.contains(&gone.to_string()), "{said}");
        assert!(said.contains("vmseal vm delete web"), "{said}");
    }
}
