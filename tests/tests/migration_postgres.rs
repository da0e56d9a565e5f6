//! PostgreSQL in a guest that moves with its disks, while pgbench runs: what it has confirmed is there, and whole, also when the
//! guest is lost after it has moved.

#![allow(clippy::unwrap_used)] // a test that cannot go on ends

use vmseal_tests::installation::Installation;
use vmseal_tests::postgres_guest::{
    bench, confirmed, has_whole_pages, is_consistent, recorded, started, stop_bench, with_database,
};
use vmseal_tests::two_hosts::{self, HERE, THERE, add_host_with_datastore};

const VM: &str = "db1";

/// How often the VM moves there and back: 10 times where all is asked for (`scripts/soak`).
fn rounds() -> usize {
    if std::env::var_os("VMSEAL_ALL").is_some() { 10 } else { 1 }
}

#[test]
fn a_database_that_works_while_its_vm_moves_loses_nothing() {
    let mut here = Installation::new().unwrap();
    add_host_with_datastore(&mut here).unwrap();
    let mut console = started(&here, VM, "encrypted", "local");
    bench(&mut console);
    for _ in 0..rounds() {
        for to in [THERE, HERE] {
            drop(console);
            here.vmseal(&["vm", "migrate", VM, to]).unwrap();
            assert_eq!(two_hosts::only_host(&here, VM).unwrap(), to);
            console = here.console(VM).unwrap();
            is_consistent(&mut console);
        }
    }
    stop_bench(&mut console);
    let all = confirmed(&mut console);
    assert_eq!(recorded(&mut console), all);
    println!("{all} transactions while it moved");

    // The host that it has moved to has the disks alone.
    bench(&mut console);
    drop(console);
    here.vmseal(&["vm", "migrate", VM, THERE]).unwrap();
    let mut console = here.console(VM).unwrap();
    let all = all + confirmed(&mut console);
    drop(console);
    two_hosts::processes(&here, THERE, two_hosts::QEMU)
        .into_iter()
        .for_each(vmseal_tests::process::kill_hard);
    here.wait_power(VM, "off").unwrap();
    here.vmseal(&["vm", "start", VM]).unwrap();
    let mut console = with_database(&here, VM);
    is_consistent(&mut console);
    let found = recorded(&mut console);
    assert!(found >= all, "{found} transactions of {all} that were confirmed");
    has_whole_pages(&mut console);
    here.vmseal(&["vm", "stop", VM, "--force"]).unwrap();
    here.vmseal(&["vm", "prove", VM]).unwrap();
}
