//! Pools: making them, and waiting until they can be used.

use super::answers::{OsdDump, PoolEntry};
use super::arguments::PoolArguments;
use super::daemon::Daemon;
use super::error::CephError;
use super::layout::Layout;
use super::processes;
use super::progress::Progress;
use super::record::Record;
use super::redundancy::Redundancy;
use super::tools::Tools;
use super::waiting::Waiting;

/// The pool that every cluster has.
pub const USUAL: &str = "vmseal";
/// Placement groups of a pool: enough to spread over the OSDs of one machine, few enough to be quick.
const GROUPS: &str = "32";

/// A pool that is to be.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Pool {
    /// Its name.
    pub name: String,
    /// How it keeps data.
    pub redundancy: Redundancy,
}

/// Makes a pool in a cluster that runs, and waits until it can be used.
///
/// # Errors
/// [`CephError`].
pub fn add(arguments: &PoolArguments, observe: &mut dyn FnMut(&Progress)) -> Result<(), CephError> {
    let name = arguments.pool.clone();
    let refused = |why| CephError::Pool { pool: name.clone(), why };
    let redundancy = Redundancy::new(arguments.size, arguments.min_size, arguments.erasure);
    let pool = Pool { name: name.clone(), redundancy: redundancy.map_err(refused)? };
    let layout = Layout::find(&arguments.place.directory()?)?;
    let _lock = layout.lock()?;
    let (layout, record) = Record::open(layout)?;
    if !processes::running(&layout).iter().any(|it| it.daemon == Daemon::Monitor) {
        return Err(refused("the cluster does not run: start it with vmseal lab ceph up".into()));
    }
    ensure(&layout, &pool, record.osds.len(), observe)?;
    wait_clean(&layout, &record.daemons(), observe)
}

/// Makes a pool, or goes on making it; one that is whole stays as it is.
///
/// # Errors
/// The cluster has too few OSDs, or another pool of this name.
pub fn ensure(
    layout: &Layout,
    pool: &Pool,
    osds: usize,
    observe: &mut dyn FnMut(&Progress),
) -> Result<(), CephError> {
    let refused = |why| CephError::Pool { pool: pool.name.clone(), why };
    let needed = pool.redundancy.osds();
    if osds < needed as usize {
        return Err(refused(format!(
            "it needs {needed} OSDs and the cluster has {osds}: vmseal lab ceph up --osds {needed}"
        )));
    }
    let tools = Tools { layout };
    let metadata = pool.metadata();
    let dump: OsdDump = tools.ask(&["osd", "dump"])?;
    let mut made = false;
    for pool in [Some(pool), metadata.as_ref()].into_iter().flatten() {
        let there = dump.pools.iter().find(|it| it.pool_name == pool.name);
        if let Some(there) = there {
            pool.check_same(there)?;
        } else {
            pool.create(tools)?;
            made = true;
        }
    }
    // Each may be repeated: what is there may be what an earlier run left half done.
    pool.finish(tools, metadata.is_none())?;
    if let Some(metadata) = metadata {
        metadata.finish(tools, true)?;
    }
    if made {
        observe(&Progress::Pool(pool.name.clone()));
    }
    Ok(())
}

impl Pool {
    /// The pool beside one of chunks, which has the names and headers of images.
    pub(super) fn metadata(&self) -> Option<Self> {
        let redundancy = self.redundancy.of_metadata()?;
        Some(Self { name: format!("{}-metadata", self.name), redundancy })
    }

    /// The profile of its chunks.
    fn profile(&self) -> Option<String> {
        match self.redundancy {
            Redundancy::Copies { .. } => None,
            Redundancy::Chunks { erasure, .. } => {
                Some(format!("vmseal-{}-{}", erasure.data, erasure.coding))
            }
        }
    }

    /// Finds that the pool of this name is this one.
    fn check_same(&self, there: &PoolEntry) -> Result<(), CephError> {
        let profile = self.profile().unwrap_or_default();
        let (has, is_coded) = (there.size, there.is_coded());
        let same = there.erasure_code_profile == profile || !is_coded && profile.is_empty();
        if same && has == self.redundancy.osds() {
            return Ok(());
        }
        let kind = if is_coded { "chunks" } else { "copies" };
        Err(CephError::PoolExists { pool: self.name.clone(), has: format!("{has} {kind}") })
    }

    fn create(&self, tools: Tools<'_>) -> Result<(), CephError> {
        let create = ["osd", "pool", "create", &self.name, GROUPS, GROUPS];
        match (self.redundancy, self.profile()) {
            (Redundancy::Chunks { erasure, .. }, Some(profile)) => {
                let (data, coding) =
                    (format!("k={}", erasure.data), format!("m={}", erasure.coding));
                let set = ["osd", "erasure-code-profile", "set", &profile, &data, &coding];
                tools
                    .ceph(&[&set[..], &["plugin=jerasure", "crush-failure-domain=osd"]].concat())?;
                tools.ceph(&[&create[..], &["erasure", &profile]].concat())
            }
            (redundancy, _) => {
                let size = redundancy.osds().to_string();
                tools.ceph(&[&create[..], &["replicated", "--size", &size]].concat())
            }
        }
    }

    /// Sets what a pool is not made with. Images are in pools of copies; one of chunks has only their data.
    fn finish(&self, tools: Tools<'_>, has_images: bool) -> Result<(), CephError> {
        let min_size = self.redundancy.min_size().to_string();
        let set = |what, value| tools.ceph(&["osd", "pool", "set", &self.name, what, value]);
        set("min_size", &min_size)?;
        if self.profile().is_some() {
            set("allow_ec_overwrites", "true")?;
            tools.ceph(&["osd", "pool", "application", "enable", &self.name, "rbd"])?;
        }
        match has_images {
            true => tools.other("rbd", &["pool", "init", &self.name]),
            false => Ok(()),
        }
    }
}

/// Waits until every pool can be used and has all of its copies.
///
/// # Errors
/// It did not come about in time, or a daemon has ended.
pub fn wait_clean(
    layout: &Layout,
    daemons: &[Daemon],
    observe: &mut dyn FnMut(&Progress),
) -> Result<(), CephError> {
    let dump: OsdDump = Tools { layout }.ask(&["osd", "dump"])?;
    let groups: u64 = dump.pools.iter().map(|pool| pool.pg_num).sum();
    Waiting { layout, daemons }.until(observe, |status| {
        // Until the manager has told of new groups, it tells of fewer.
        let clean = status.pgmap.clean().min(groups);
        (Progress::Clean(clean, groups), clean == groups && status.pgmap.num_pgs == groups)
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ceph::answers::recorded;

    #[test]
    fn a_pool_is_the_same_only_with_the_same_redundancy() {
        let dump: OsdDump = serde_json::from_str(recorded::OSD_DUMP).unwrap();
        let checked = |name: &str, size, erasure: Option<&str>| {
            let erasure = erasure.map(|text| text.parse().unwrap());
            let redundancy = Redundancy::new(size, None, erasure).unwrap();
            let there = dump.pools.iter().find(|it| it.pool_name == name).unwrap();
            Pool { name: name.into(), redundancy }.check_same(there)
        };
        checked("vmseal", None, None).unwrap();
        checked("coded", None, Some("2+1")).unwrap();
        checked("coded-metadata", Some(2), None).unwrap();
        for (name, size, erasure) in [
            ("vmseal", Some(2), None),
            ("vmseal", None, Some("2+1")),
            ("coded", Some(3), None),
            ("coded", None, Some("3+1")),
        ] {
            let refused = checked(name, size, erasure).unwrap_err().to_string();
            assert!(refused.contains("already"), "{name} {size:?} {erasure:?}: {refused}");
        }
    }

    #[test]
    fn a_pool_that_has_too_few_osds_is_refused_before_anything_is_asked() {
        let place = tempfile::tempdir().unwrap();
        let layout = Layout::make(place.path()).unwrap();
        let redundancy = Redundancy::new(None, None, Some("4+2".parse().unwrap())).unwrap();
        let pool = Pool { name: "big".into(), redundancy };
        let refused = ensure(&layout, &pool, 3, &mut |_| ()).unwrap_err().to_string();
        assert!(refused.contains("'big'") && refused.contains("--osds 6"), "{refused}");
    }
}
