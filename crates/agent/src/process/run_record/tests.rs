//! Records of all versions.

use vmseal_api::boot::BootDevice;
use vmseal_api::hardware::{Firmware, MemoryBacking, OnCrash};
use vmseal_api::nic::{NicLink, NicModel};

use super::*;

const GOLDEN_1: &str = include_str!("../../../tests/golden/run-record-1.json");
const GOLDEN_2: &str = include_str!("../../../tests/golden/run-record-2.json");
const GOLDEN_3: &str = include_str!("../../../tests/golden/run-record-3.json");
const GOLDEN_4: &str = include_str!("../../../tests/golden/run-record-4.json");
const GOLDEN_5: &str = include_str!("../../../tests/golden/run-record-5.json");

#[test]
fn golden_records_of_all_versions_are_read_and_the_newest_is_written() {
    let first = Record::parse(GOLDEN_1.as_bytes()).unwrap();
    let second = Record::parse(GOLDEN_2.as_bytes()).unwrap();
    assert_eq!(first, second);
    assert_eq!(first, Record::parse(GOLDEN_3.as_bytes()).unwrap());
    assert_eq!((first.slot, first.phase), (3, Phase::Running));
    let disks: Vec<_> = first.spec.disks().collect();
    assert_eq!((disks.len(), disks[1].limits.iops, disks[1].cache), (2, Some(500), Some(1 << 20)));
    assert_eq!(disks[1].replica.as_ref().unwrap().bytes_per_second, 104_857_600);
    assert!(matches!(disks[0].facts, Some(DiskFacts::Luks2 { key_bits: 512, .. })));
    assert!(first.live.nics.is_empty());
    let fourth = Record::parse(GOLDEN_4.as_bytes()).unwrap();
    let roles: Vec<_> = fourth.spec.disks().map(|disk| disk.role).collect();
    assert_eq!(roles, [DiskRole::Data, DiskRole::Data, DiskRole::CloudInit]);
    assert!(fourth.spec.disks().take(2).eq(first.spec.disks()));
    let nics: Vec<_> = fourth.spec.nics().collect();
    assert_eq!((nics.len(), nics[1].model, nics[1].link), (3, NicModel::E1000e, NicLink::Down));
    let live = &fourth.live;
    assert_eq!(live.nics[0].forwards[0].host_port, 61_022);
    assert_eq!(live.nics[1].interface.as_deref(), Some("vmseal0"));
    // Devices have the places of their order, and no port is known to be spare.
    let places: Vec<_> = live.disks.iter().map(|disk| (disk.socket, disk.port)).collect();
    assert_eq!(places, [(0, None), (1, None), (2, None)]);
    assert_eq!(live.nic_ports.values().copied().collect::<Vec<_>>(), [0, 1, 2]);
    assert!(!live.paused && !live.spare_ports);
    let fifth = Record::parse(GOLDEN_5.as_bytes()).unwrap();
    assert_eq!((&fourth.spec.policy, fifth.spec.policy.as_deref()), (&None, Some("encrypted")));
    let hardware = &fifth.spec.hardware;
    assert!(fourth.spec.hardware.is_usual());
    assert_eq!(hardware.firmware, Firmware::UefiSecureBoot);
    assert_eq!(hardware.cpu_model.as_deref(), Some("EPYC-Milan"));
    assert_eq!(hardware.memory_backing, MemoryBacking::Hugepages);
    assert!(hardware.tpm);
    assert_eq!(hardware.medium().unwrap().to_str(), Some("/srv/iso/debian.iso"));
    assert_eq!(hardware.boot, [BootDevice::Cdrom, BootDevice::Disk]);
    let roles: Vec<_> = fifth.spec.disks().skip(3).map(|disk| disk.role).collect();
    assert_eq!(roles, [DiskRole::UefiVariables, DiskRole::Tpm]);
    assert!(fifth.spec.disks().take(3).eq(fourth.spec.disks()));
    assert!(fifth.spec.nics().eq(fourth.spec.nics()));
    assert!(fifth.live.paused && fifth.live.spare_ports);
    assert_eq!(fifth.live.disks[2].port, Some(7));
    let format = Some(vmseal_api::dump::DumpFormat::Elf);
    assert_eq!((hardware.on_crash, hardware.crash_dump_format), (OnCrash::CoredumpRestart, format));
    let panics = &fifth.live.panics;
    assert!(panics.past[0].restarted && panics.now.as_ref().unwrap().kept, "{panics:?}");
    let written = String::from_utf8(fifth.to_text().unwrap()).unwrap();
    let this = format!("\"written_by\": \"{}\"", env!("CARGO_PKG_VERSION"));
    assert_eq!(written, GOLDEN_5.trim_end().replace("\"written_by\": \"0.1.0\"", &this));
}

#[test]
fn whether_the_queues_of_a_paused_guest_are_known_is_on_record_and_not_told_to_others() {
    let mut record = Record::parse(GOLDEN_5.as_bytes()).unwrap();
    assert!(record.live.paused && !record.live.queues_known, "an earlier version did not know it");
    record.live.queues_known = true;
    let again = Record::parse(&record.to_text().unwrap()).unwrap();
    assert_eq!(again, record);
    assert!(!record.live.without_lease().queues_known, "an earlier version could not read it");
}

#[test]
fn that_cards_have_roms_is_on_record_and_told_to_the_host_that_a_guest_goes_to() {
    let mut record = Record::parse(GOLDEN_5.as_bytes()).unwrap();
    assert!(!record.live.card_roms);
    record.live.card_roms = true;
    let again = Record::parse(&record.to_text().unwrap()).unwrap();
    assert!(again.live.card_roms && again.live.without_lease().card_roms);
}

#[test]
fn that_file_systems_may_be_frozen_is_on_record_and_goes_with_the_guest() {
    let mut record = Record::parse(GOLDEN_5.as_bytes()).unwrap();
    assert_eq!(record.live.frozen, None, "an earlier version did not note it");
    record.live.frozen = Some(Timestamp::UNIX_EPOCH);
    let again = Record::parse(&record.to_text().unwrap()).unwrap();
    assert_eq!(again, record);
    // Its memory has it, wherever it goes on.
    assert_eq!(again.live.without_lease().frozen, record.live.frozen);
}

#[test]
fn a_record_from_before_disks_had_limits_is_read() {
    let mut old: serde_json::Value = serde_json::from_str(GOLDEN_1).unwrap();
    for field in ["limits", "cache", "replica", "allocation"] {
        old["spec"]["disks"][1].as_object_mut().unwrap().remove(field);
    }
    let record = Record::parse(old.to_string().as_bytes()).unwrap();
    let disk = record.spec.disk_at(1).unwrap();
    assert_eq!((disk.limits, disk.cache), (DiskLimits::default(), None));
}

#[test]
fn what_cannot_be_read_says_why() {
    let why = |text: &str| Record::parse(text.as_bytes()).unwrap_err().to_string();
    let newer = GOLDEN_5.replacen("\"version\": 5", "\"version\": 6", 1);
    let newer = newer.replace("\"written_by\": \"0.1.0\"", "\"written_by\": \"9.0\"");
    let told = why(&newer);
    assert!(told.starts_with("has version 6 (written by vmseal 9.0)"), "{told}");
    assert!(told.contains("reads versions 1 to 5"), "{told}");
    // The version is reported, whatever else a newer record holds.
    assert!(why(r#"{"version": 9, "written_by": 7, "vm": []}"#).starts_with("has version 9,"));
    assert!(why(r#"{"version": 0}"#).starts_with("has version 0,"));
    for damaged in ["", "{", "[]", "null", r#"{"version": "4"}"#, r#"{"version": 4}"#] {
        assert!(why(damaged).starts_with("is damaged: "), "{damaged}");
    }
    let more = GOLDEN_5.replacen("\"slot\"", "\"more\": 1, \"slot\"", 1);
    assert!(why(&more).contains("more"), "an unknown field is accepted");
    let device = GOLDEN_5.replacen("\"device\": \"disk\"", "\"device\": \"tpm\"", 1);
    assert!(why(&device).contains("unknown variant `tpm`"), "{}", why(&device));
}
