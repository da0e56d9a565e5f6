//! PostgreSQL in the guest of [`shell_guest`](crate::shell_guest), on a disk of its own (`scripts/build-postgres-disk`), with pgbench,
//! whose tables tell whether a transaction is there in part, and how many are there.

#![allow(clippy::unwrap_used)] // a test that cannot go on ends

use std::sync::atomic::{AtomicU32, Ordering};

use crate::guest::{Console, built};
use crate::installation::Installation;
use crate::shell_guest::{self, booted, holds, run};

/// Where the guest notes what pgbench says.
const BENCH: &str = "/bench";

/// What it notes of a run of pgbench that has done something.
const DONE: &str = "actually processed: [1-9]";

/// How many rows [`keep`] makes.
pub const KEPT: u64 = 1000;

/// The digits of a number that the guest says.
const DIGITS: usize = 8;

/// A VM with this guest, started, and its database, whose disk is on this datastore.
#[must_use]
pub fn started(here: &Installation, vm: &str, policy: &str, datastore: &str) -> Console {
    let image = built("build-postgres-disk", &[]).unwrap();
    let disk = format!("datastore={datastore},format=raw,image={},size=384MiB", image.display());
    shell_guest::start(here, vm, policy, &["--disk", &disk]).unwrap();
    with_database(here, vm)
}

/// The console of a guest that boots, when its database is there.
#[must_use]
pub fn with_database(here: &Installation, vm: &str) -> Console {
    let mut console = booted(here, vm).unwrap();
    let mount = "mkdir -p /mnt && mount /dev/vdb /mnt && chroot /mnt /postgres start";
    run(&mut console, &format!("{mount} && echo DATABASE-$((6 * 7))"), "DATABASE-42").unwrap();
    console
}

/// pgbench runs from now on, two seconds at a time, and has done something.
pub fn bench(console: &mut Console) {
    let all =
        format!("(while [ ! -e /stop ]; do chroot /mnt /postgres bench 2 >>{BENCH} 2>&1; done) &");
    run(console, &format!("rm -f /stop {BENCH}; {all} echo BEGUN-$((6 * 7))"), "BEGUN-42").unwrap();
    holds(console, &format!("grep -q '{DONE}' {BENCH}")).unwrap();
}

/// pgbench goes on: a run of it that begins after this call does something, too.
pub fn goes_on(console: &mut Console) {
    let runs = format!("grep -c '{DONE}' {BENCH}");
    // The next one that ends may have done all that it did before.
    let enough = number(console, &runs) + 2;
    holds(console, &format!("[ \"$({runs})\" -ge {enough} ]")).unwrap();
}

/// How many lines of pgbench tell of errors.
pub fn errors(console: &mut Console) -> u64 {
    number(console, &format!("grep -ciE 'error|fatal|panic|aborted' {BENCH}"))
}

/// pgbench has ended.
pub fn stop_bench(console: &mut Console) {
    run(console, "touch /stop; wait; echo ENDED-$((6 * 7))", "ENDED-42").unwrap();
}

/// How many transactions the database has confirmed.
pub fn confirmed(console: &mut Console) -> u64 {
    let sum = format!("awk '/actually processed/ {{ s += $NF }} END {{ print s + 0 }}' {BENCH}");
    number(console, &sum)
}

/// How many transactions are in the database.
pub fn recorded(console: &mut Console) -> u64 {
    number(console, "chroot /mnt /postgres query 'select count(*) from pgbench_history'")
}

/// Has the database keep rows with a mark, which is in its log and in its table as it is.
pub fn keep(console: &mut Console, mark: &str) {
    let rows =
        format!("create table kept as select '{mark}' as mark from generate_series(1, {KEPT})");
    let make = format!("chroot /mnt /postgres query \"{rows}\" && echo KEPT-$((6 * 7))");
    run(console, &make, "KEPT-42").unwrap();
}

/// How many rows with the mark are in the database.
pub fn kept(console: &mut Console, mark: &str) -> u64 {
    let count = format!("select count(*) from kept where mark = '{mark}'");
    number(console, &format!("chroot /mnt /postgres query \"{count}\""))
}

/// Each transaction changes three balances by what it records: no part of one is missing.
pub fn is_consistent(console: &mut Console) {
    let sum = |table: &str, column: &str| format!("(select sum({column}) from pgbench_{table})");
    let recorded = sum("history", "delta");
    let balances = [("accounts", "abalance"), ("tellers", "tbalance"), ("branches", "bbalance")];
    let equal = balances.map(|(table, column)| format!("{} = {recorded}", sum(table, column)));
    let query = format!("select {}", equal.join(" and "));
    let number = unique();
    let say = format!("echo CONSISTENT-{number}-$(chroot /mnt /postgres query '{query}')-");
    run(console, &say, &format!("CONSISTENT-{number}-t-")).unwrap();
}

/// Ends the database, and reads all of its pages: their checksums are right.
pub fn has_whole_pages(console: &mut Console) {
    let check = "chroot /mnt /postgres stop && chroot /mnt /postgres checksums";
    run(console, &format!("{check} && echo WHOLE-$((6 * 7))"), "WHOLE-42").unwrap();
}

/// The number that a command in the guest prints.
fn number(console: &mut Console, command: &str) -> u64 {
    let number = unique();
    let print = format!("printf 'NUMBER-{number}-%0{DIGITS}d-\\n' \"$({command})\"\n");
    console.type_text(&print).unwrap();
    console.expect(&format!("NUMBER-{number}-"), DIGITS).unwrap().parse().unwrap()
}

/// Tells an answer from earlier ones, which a console that has just been opened shows again.
fn unique() -> u32 {
    static ASKED: AtomicU32 = AtomicU32::new(0);
    ASKED.fetch_add(1, Ordering::Relaxed)
}
