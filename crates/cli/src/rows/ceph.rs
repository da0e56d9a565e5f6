//! The laboratory's Ceph cluster as a row, and what is shown besides.

use vmseal_lab::ceph::Status;
use vmseal_lab::ceph::status::{DaemonStatus, PoolStatus};

use super::column::{Cell, Column, usual};
use super::{Row, word};

impl Row for Status {
    const PLURAL: &'static str = "clusters";
    const COLUMNS: &'static [Column<Self>] = &[
        usual("health", |it| it.health.clone().into()),
        usual("directory", |it| it.directory.display().to_string().into()),
        usual("configuration", |it| it.configuration.display().to_string().into()),
        usual("keyring", |it| it.keyring.display().to_string().into()),
        usual("fsid", |it| (&it.fsid).into()),
        usual("listen", |it| it.listen.to_string().into()),
        usual("messenger", |it| word(&it.messenger).into()),
        usual("osd-encryption", |it| Cell::YesNo(it.osd_encryption)),
        usual("chroot", |it| it.chroot.as_ref().map(|path| path.display().to_string()).into()),
        usual("release", |it| it.release.clone().into()),
        usual("used", |it| it.used.map(Cell::Bytes).into()),
        usual("size", |it| it.size.map(Cell::Bytes).into()),
    ];
    fn identity(&self) -> String {
        self.fsid.clone()
    }
}

/// What the columns do not have: problems, daemons and pools.
pub fn details(status: &Status) -> Vec<(&'static str, String)> {
    let problems = status.problems.iter().map(|problem| ("PROBLEM", problem.clone()));
    let daemons = status.daemons.iter().map(|it| ("DAEMON", daemon(it)));
    let pools = status.pools.iter().map(|it| ("POOL", pool(it)));
    problems.chain(daemons).chain(pools).collect()
}

fn daemon(it: &DaemonStatus) -> String {
    let process = match it.pid {
        Some(pid) => format!("process {pid}"),
        None => "dead".to_owned(),
    };
    let of = |state: Option<bool>, yes, no| state.map(|it| if it { yes } else { no });
    let states = [of(it.up, ", up", ", down"), of(it.placed, ", in", ", out")];
    format!("{} {process}{}", it.name, states.into_iter().flatten().collect::<String>())
}

fn pool(it: &PoolStatus) -> String {
    let size = |bytes| Cell::Bytes(bytes).for_people();
    let PoolStatus { name, size: kept, min_size, erasure, groups, stored, used, available } = it;
    let kind = match erasure {
        Some(profile) => format!("{kept} chunks ({profile})"),
        None => format!("{kept} copies"),
    };
    format!(
        "{name} {kind}, {min_size} needed, {groups} groups: {} stored, {} used, {} available",
        size(*stored),
        size(*used),
        size(*available)
    )
}
