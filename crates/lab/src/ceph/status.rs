//! `vmseal lab ceph status`: how a cluster is.

use std::net::SocketAddrV4;
use std::path::{Path, PathBuf};

use serde::Serialize;

use super::answers::{ClusterStatus, Df, OsdDump, PoolEntry, PoolStats, Versions};
use super::arguments::Messenger;
use super::daemon::Daemon;
use super::error::CephError;
use super::layout::Layout;
use super::processes::{self, Process};
use super::record::Record;
use super::tools::{self, Tools};

/// How a cluster is.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Status {
    /// Where it is.
    pub directory: PathBuf,
    /// Its `ceph.conf`.
    pub configuration: PathBuf,
    /// The keyring of `client.admin`.
    pub keyring: PathBuf,
    /// Its id.
    pub fsid: String,
    /// The monitor's address.
    pub listen: SocketAddrV4,
    /// How its connections are protected.
    pub messenger: Messenger,
    /// Whether what each OSD stores is encrypted below it.
    pub osd_encryption: bool,
    /// The chroot with Ceph's programs; none: those of this machine.
    pub chroot: Option<PathBuf>,
    /// The release of the daemons that run, such as `16.2.15 (pacific)`; none if the monitor does not answer.
    pub release: Option<String>,
    /// `HEALTH_OK`, `HEALTH_WARN` or `HEALTH_ERR`, as the monitor says; none if it does not answer.
    pub health: Option<String>,
    /// What is not well: dead daemons, and what the monitor says.
    pub problems: Vec<String>,
    /// The daemons.
    pub daemons: Vec<DaemonStatus>,
    /// Bytes that are taken on all OSDs.
    pub used: Option<u64>,
    /// Bytes that all OSDs have.
    pub size: Option<u64>,
    /// The pools.
    pub pools: Vec<PoolStatus>,
}

/// How a daemon is.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct DaemonStatus {
    /// Such as `osd.0`.
    pub name: String,
    /// Its process, while it lives.
    pub pid: Option<i32>,
    /// Whether it lives.
    pub alive: bool,
    /// Whether the monitor takes the OSD for one that serves; none of other daemons, or if it does not answer.
    pub up: Option<bool>,
    /// Whether data is placed on the OSD.
    #[serde(rename = "in")]
    pub placed: Option<bool>,
}

/// How a pool is.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct PoolStatus {
    /// Its name.
    pub name: String,
    /// Copies, or data and coding chunks together.
    pub size: u32,
    /// How many must be there for I/O to go on.
    pub min_size: u32,
    /// Its profile, if it is erasure-coded.
    pub erasure: Option<String>,
    /// Placement groups.
    pub groups: u64,
    /// Bytes that clients have stored.
    pub stored: u64,
    /// Bytes that these take on all OSDs.
    pub used: u64,
    /// Bytes that clients can store more.
    pub available: u64,
}

/// How the cluster in a directory is.
///
/// # Errors
/// There is none, or its record cannot be read. That it does not answer is no error.
pub fn status(directory: &Path) -> Result<Status, CephError> {
    let (layout, record) = Record::open(Layout::find(directory)?)?;
    of(&layout, &record)
}

/// How a cluster is.
///
/// # Errors
/// Programs are missing.
pub fn of(layout: &Layout, record: &Record) -> Result<Status, CephError> {
    tools::check_programs(record.chroot.as_deref())?;
    let processes = processes::running(layout);
    let monitor_lives = processes.iter().any(|process| process.daemon == Daemon::Monitor);
    let answers = monitor_lives.then(|| Answers::ask(Tools { layout }));
    let (answers, failed) = match answers {
        None => (None, None),
        Some(Ok(answers)) => (Some(answers), None),
        Some(Err(error)) => (None, Some(error.to_string())),
    };
    let mut status = tell(layout, record, &processes, answers.as_ref());
    status.problems.extend(failed);
    Ok(status)
}

/// What the monitor answers.
struct Answers {
    status: ClusterStatus,
    dump: OsdDump,
    df: Df,
    versions: Versions,
}

impl Answers {
    fn ask(tools: Tools<'_>) -> Result<Self, CephError> {
        Ok(Self {
            status: tools.ask(&["status"])?,
            dump: tools.ask(&["osd", "dump"])?,
            df: tools.ask(&["df"])?,
            versions: tools.ask(&["versions"])?,
        })
    }
}

fn tell(
    layout: &Layout,
    record: &Record,
    processes: &[Process],
    answers: Option<&Answers>,
) -> Status {
    let daemons: Vec<_> = record
        .daemons()
        .into_iter()
        .map(|daemon| daemon_status(daemon, processes, answers))
        .collect();
    let dead = daemons.iter().filter(|it| !it.alive);
    let mut problems: Vec<String> =
        dead.map(|it| format!("{} does not run; vmseal lab ceph up starts it", it.name)).collect();
    if record.destroyed {
        problems.push("its removal has begun; vmseal lab ceph down --destroy ends it".into());
    }
    let checks = answers.iter().flat_map(|it| &it.status.health.checks);
    let loud = checks.filter(|(_, check)| !check.muted);
    problems.extend(loud.map(|(code, check)| format!("{code}: {}", check.summary.message)));
    Status {
        directory: layout.root().to_owned(),
        configuration: layout.configuration(),
        keyring: layout.keyring("client.admin"),
        fsid: record.fsid.clone(),
        listen: record.listen,
        messenger: record.messenger,
        osd_encryption: record.osd_encryption,
        chroot: record.chroot.clone(),
        release: answers.map(|it| it.versions.release()),
        health: answers.map(|it| it.status.health.status.clone()),
        problems,
        daemons,
        used: answers.map(|it| it.status.pgmap.bytes_used),
        size: answers.map(|it| it.status.pgmap.bytes_total),
        pools: answers.map(pools).unwrap_or_default(),
    }
}

fn daemon_status(daemon: Daemon, processes: &[Process], answers: Option<&Answers>) -> DaemonStatus {
    let pid = processes.iter().find(|it| it.daemon == daemon).map(|it| it.pid);
    let entry = |id| answers.and_then(|it| it.dump.osds.iter().find(|osd| osd.osd == id));
    let entry = match daemon {
        Daemon::Osd(id) => entry(id),
        Daemon::Monitor | Daemon::Manager | Daemon::Block(_) => None,
    };
    DaemonStatus {
        name: daemon.to_string(),
        pid,
        alive: pid.is_some(),
        up: entry.map(|it| it.up == 1),
        placed: entry.map(|it| it.placed == 1),
    }
}

fn pools(answers: &Answers) -> Vec<PoolStatus> {
    let one = |pool: &PoolEntry| {
        let space = answers.df.pools.iter().find(|it| it.name == pool.pool_name);
        let figure = |of: fn(&PoolStats) -> u64| space.map_or(0, |it| of(&it.stats));
        PoolStatus {
            name: pool.pool_name.clone(),
            size: pool.size,
            min_size: pool.min_size,
            erasure: pool.is_coded().then(|| pool.erasure_code_profile.clone()),
            groups: pool.pg_num,
            stored: figure(|it| it.stored),
            used: figure(|it| it.bytes_used),
            available: figure(|it| it.max_avail),
        }
    };
    answers.dump.pools.iter().map(one).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ceph::answers::recorded;
    use crate::ceph::arguments::UpArguments;

    fn recorded() -> Answers {
        Answers {
            status: serde_json::from_str(recorded::STATUS).unwrap(),
            dump: serde_json::from_str(recorded::OSD_DUMP).unwrap(),
            df: serde_json::from_str(recorded::DF).unwrap(),
            versions: serde_json::from_str(recorded::VERSIONS).unwrap(),
        }
    }

    fn told(dead: &[Daemon], answers: Option<&Answers>) -> Status {
        told_of(&UpArguments::default(), dead, answers)
    }

    fn told_of(asked: &UpArguments, dead: &[Daemon], answers: Option<&Answers>) -> Status {
        let place = tempfile::tempdir().unwrap();
        let layout = Layout::make(place.path()).unwrap();
        let mut record = Record::new(asked).unwrap();
        record.fsid = "fs".into();
        let living = record.daemons().into_iter().filter(|daemon| !dead.contains(daemon));
        let processes: Vec<_> = (100..)
            .zip(living)
            .map(|(pid, daemon)| Process { daemon, pid, makes: false })
            .collect();
        let mut status = tell(&layout, &record, &processes, answers);
        // Where it is differs from run to run.
        let root = Path::new("/cluster");
        status.directory = root.to_owned();
        status.configuration = root.join("ceph.conf");
        status.keyring = root.join("keys/client.admin.keyring");
        status
    }

    #[test]
    fn a_dead_osd_is_told() {
        let status = told(&[Daemon::Osd(1)], Some(&recorded()));
        let known: serde_json::Value =
            serde_json::from_str(include_str!("recorded/told.json")).unwrap();
        assert_eq!(serde_json::to_value(&status).unwrap(), known);
    }

    #[test]
    fn what_serves_the_block_of_an_osd_is_told_beside_it() {
        let asked = UpArguments { osd_encryption: true, ..UpArguments::default() };
        let status = told_of(&asked, &[Daemon::Block(2)], Some(&recorded()));
        assert!(status.osd_encryption);
        let blocks: Vec<_> =
            status.daemons.iter().filter(|it| it.name.starts_with("block.")).collect();
        assert_eq!(blocks.iter().map(|it| it.alive).collect::<Vec<_>>(), [true, true, false]);
        assert!(blocks.iter().all(|it| it.up.is_none() && it.placed.is_none()));
        let problem = "block.2 does not run; vmseal lab ceph up starts it";
        assert!(status.problems.iter().any(|it| it == problem), "{:?}", status.problems);
    }

    #[test]
    fn a_chroot_is_told() {
        let asked = UpArguments { chroot: Some("/srv/reef".into()), ..UpArguments::default() };
        assert_eq!(told_of(&asked, &[], None).chroot, Some("/srv/reef".into()));
    }

    #[test]
    fn a_monitor_that_is_dead_leaves_what_the_processes_tell() {
        let status = told(&[Daemon::Monitor], None);
        assert_eq!((&status.health, status.size), (&None, None));
        assert_eq!(status.release, None);
        assert_eq!(status.problems, ["mon.a does not run; vmseal lab ceph up starts it"]);
        let alive: Vec<_> = status.daemons.iter().map(|it| it.alive).collect();
        assert_eq!(alive, [false, true, true, true, true]);
        assert!(status.daemons.iter().all(|it| it.up.is_none()));
    }
}
