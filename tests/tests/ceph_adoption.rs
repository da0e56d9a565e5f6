//! VMs on a pool of a real Ceph cluster come into an inventory that does not have them: the domain of libvirt whose disk is an image of the
//! cluster, and, when the server is lost, all of them. A guest that runs then runs on.

#![allow(clippy::unwrap_used)] // a test that cannot go on ends

use serde_json::Value;
use vmseal_tests::ceph::{is_installed, said};
use vmseal_tests::ceph_datastore::{CephInstallation, Options};
use vmseal_tests::installation::{create, text};
use vmseal_tests::two_hosts::QEMU;

use crate::total_loss::{keys_and_policies, line, stop};

/// A domain of libvirt whose only disk is the image `IMAGE` of a Ceph cluster.
const DOMAIN: &str = "<domain type='kvm'>
  <name>old</name>
  <memory unit='MiB'>32</memory>
  <vcpu>1</vcpu>
  <os><type arch='x86_64' machine='pc-q35-7.2'>hvm</type></os>
  <features><acpi/><apic/></features>
  <devices>
    <disk type='network' device='disk'>
      <driver name='qemu' type='raw'/>
      <source protocol='rbd' name='IMAGE'/>
      <target dev='vda' bus='virtio'/>
    </disk>
  </devices>
</domain>
";

#[test]
fn a_new_server_adopts_the_vms_of_a_pool_and_they_have_their_data() {
    if !is_installed() {
        return;
    }
    let options = Options { messenger: "crc", erasure_coded: false, key_at_server: true };
    let mut bench = CephInstallation::shared("adoption", options);
    let counter = bench.here.counter_image().unwrap();
    let disk = format!("datastore=ceph,format=raw,image={}", text(&counter).unwrap());
    bench.here.vmseal(&create("web", "encrypted", &disk)).unwrap();
    assert_eq!(bench.here.boot_counter("web").unwrap(), 1);
    comes_from_libvirt(&bench);
    // What it holds then is the count of one boot.
    bench.here.vmseal(&["snapshot", "create", "old", "first"]).unwrap();
    let before = ["web", "old"].map(|vm| bench.here.vm(vm).unwrap());
    let guests = bench.here.guest_processes(QEMU);
    assert_eq!(guests.len(), 1);
    let server = bench.server();

    bench.here.lose_server().unwrap();
    bench.here.start_server().unwrap();
    bench.here.join_again().unwrap();
    let here = &bench.here;
    let add = bench.adding(options);
    let add: Vec<_> = add.iter().map(String::as_str).collect();
    let refused = here.refused(&add).unwrap();
    assert!(refused.contains("with VMs on it: 2") && refused.contains("--existing"), "{refused}");
    here.vmseal(&[&add[..], &["--existing"]].concat()).unwrap();
    let adopt = ["datastore", "adopt", "ceph"];
    let refused = here.refused(&adopt).unwrap();
    assert!(refused.contains("cannot be adopted as things are: 2"), "{refused}");
    keys_and_policies(here);
    assert_eq!(statuses(&bench), ["orphan"; 2]);
    let found = here.json(&adopt).unwrap();
    for vm in ["web", "old"] {
        assert_eq!(line(&found, vm)["status"], "begun", "{found}");
    }
    here.wait_power("web", "running").unwrap();
    assert_eq!(here.guest_processes(QEMU), guests, "the guest was ended");
    assert_eq!(bench.server(), server, "the pool was mounted anew");
    assert_eq!(statuses(&bench), ["in_use"; 2]);
    for before in before {
        let after = here.vm(before["name"].as_str().unwrap()).unwrap();
        for field in ["id", "memory", "key", "host"] {
            assert_eq!(before[field], after[field], "{field}");
        }
        for field in ["id", "name", "size", "encrypted", "datastore"] {
            assert_eq!(before["disks"][0][field], after["disks"][0][field], "{field}");
        }
    }
    have_their_data(&bench);
}

/// The counting guest, as it was in a domain of libvirt, is imported by way of a file, as its refusal says, and boots.
fn comes_from_libvirt(bench: &CephInstallation) {
    let (here, image) = (&bench.here, format!("{}/former", bench.pool.name));
    let content = std::fs::read(here.counter_image().unwrap()).unwrap();
    bench.cluster.import(&content, &image, &[]);
    let (domain, copy) = (here.path("old.xml"), here.path("former.raw"));
    std::fs::write(&domain, DOMAIN.replace("IMAGE", &image)).unwrap();
    let import = ["vm", "import", "--policy", "encrypted", "--datastore", "ceph", "--libvirt"];
    let import = [&import[..], &[text(&domain).unwrap()]].concat();
    let refused = here.refused(&import).unwrap();
    assert!(refused.contains(&format!("(rbd export {image} FILE)")), "{refused}");
    let copy = text(&copy).unwrap();
    for words in [&["export", "--no-progress", &image, copy][..], &["rm", "--no-progress", &image]]
    {
        let output = bench.cluster.rbd(words);
        assert!(output.status.success(), "{words:?}: {}", said(&output));
    }
    let given = format!("vda:{copy}");
    here.vmseal(&[&import[..], &["--image", &given]].concat()).unwrap();
    assert_eq!(here.vm("old").unwrap()["disks"][0]["datastore"], "ceph");
    assert_eq!(here.boot_counter("old").unwrap(), 1);
    stop(here, "old");
}

/// The statuses of what a scan finds that are disks of VMs.
fn statuses(bench: &CephInstallation) -> Vec<Value> {
    let scan = bench.here.json(&["datastore", "scan", "ceph"]).unwrap();
    let images = scan["images"].as_array().unwrap().iter();
    let disks = images.filter(|it| {
        let path = it["found"]["path"].as_str();
        path.is_some_and(|path| path.ends_with(".raw"))
    });
    disks.map(|it| it["status"].clone()).collect()
}

/// They are VMs like all others: they boot with what their guests wrote, also before a snapshot, and go.
fn have_their_data(bench: &CephInstallation) {
    let here = &bench.here;
    stop(here, "web");
    for vm in ["web", "old"] {
        assert_eq!(here.boot_counter(vm).unwrap(), 2, "{vm}: what its guest wrote is gone");
        stop(here, vm);
    }
    here.vmseal(&["snapshot", "revert", "old", "first"]).unwrap();
    assert_eq!(here.boot_counter("old").unwrap(), 2, "it was not reverted");
    stop(here, "old");
    here.vmseal(&["snapshot", "delete", "old", "first"]).unwrap();
    for vm in ["web", "old"] {
        here.vmseal(&["vm", "delete", vm]).unwrap();
    }
    bench.is_empty();
}
