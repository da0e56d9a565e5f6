//! VMs that move to another host while they run: the guest goes on with all that it had in memory and on its disks.

#![allow(clippy::unwrap_used)] // a test that cannot go on ends

use vmseal_tests::counting_guest::{
    count, read_marker_of_disk, started_with_one_disk, stop_counting,
};
use vmseal_tests::installation::text;

const VM: &str = "web";

#[test]
fn a_guest_moves_to_another_host_and_back_and_loses_nothing() {
    let (mut here, mut console) = started_with_one_disk(VM, "encrypted");
    here.add_host("there").unwrap();
    let store = here.path("datastore");
    assert!(std::process::Command::new("python3").args(["-c", "import sqlite3,sys,glob\nd=sqlite3.connect(sys.argv[1])\nh=d.execute(\"select id from hosts where name='there'\").fetchone()[0]\nr=d.execute('select datastore_id,name,location from datastore_hosts').fetchone()\nd.execute('insert into datastore_hosts values (?,?,?,?)',(r[0],h,r[1],r[2]))\nd.commit()", text(&here.path("server/inventory.db")).unwrap()]).status().unwrap().success());
    let _ = store;
    count(&mut console);
    drop(console);
    for host in ["there", "here"] {
        here.vmseal(&["vm", "migrate", VM, host]).unwrap();
        let shown = here.vm(VM).unwrap();
        assert_eq!((&shown["host"], &shown["power"]), (&host.into(), &"running".into()));
    }
    let mut console = here.console(VM).unwrap();
    stop_counting(&mut console);
    read_marker_of_disk(&mut console);
}
