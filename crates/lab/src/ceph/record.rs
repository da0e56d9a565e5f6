//! What a cluster is, as its directory keeps it.

use std::fs;
use std::io;
use std::net::SocketAddrV4;
use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use super::arguments::{LISTEN, Messenger, OSD_GIB, OSD_MEMORY_MIB, OSDS, UpArguments};
use super::daemon::Daemon;
use super::error::CephError;
use super::layout::Layout;

/// The version of the record that this writes and reads.
const VERSION: u32 = 1;

/// What a cluster is.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Record {
    /// Of this form.
    pub version: u32,
    /// The id of the cluster.
    pub fsid: String,
    /// The monitor's address; the other daemons have the same with other ports.
    pub listen: SocketAddrV4,
    /// How connections are protected.
    pub messenger: Messenger,
    /// The size of an OSD in GiB.
    pub osd_gib: u64,
    /// The memory target of an OSD in MiB.
    pub osd_memory_mib: u64,
    /// The id of each OSD's store, by the OSD's number. It is on record before Ceph is told of it: then telling
    /// it again makes no second OSD.
    pub osds: Vec<String>,
    /// Its removal began.
    pub destroyed: bool,
    /// The OSDs' blocks are encrypted.
    #[serde(default)]
    pub osd_encryption: bool,
    /// The chroot with Ceph's programs; none: those of this machine.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub chroot: Option<PathBuf>,
}

/// A new random id.
fn uuid() -> io::Result<String> {
    Ok(fs::read_to_string("/proc/sys/kernel/random/uuid")?.trim().to_owned())
}

impl Record {
    /// The record of the cluster; none if it has none yet.
    ///
    /// # Errors
    /// It cannot be read.
    pub fn read(layout: &Layout) -> Result<Option<Self>, CephError> {
        let path = layout.record();
        let text = match fs::read_to_string(&path) {
            Ok(text) => text,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            Err(source) => return Err(CephError::File { path, source }),
        };
        let record: Self = serde_json::from_str(&text)
            .map_err(|source| CephError::Record { path: path.clone(), source })?;
        if record.version != VERSION {
            let source = serde::de::Error::custom(format!("version {}", record.version));
            return Err(CephError::Record { path, source });
        }
        Ok(Some(record))
    }

    /// The record of a cluster, and where its files are.
    ///
    /// # Errors
    /// There is none, or it cannot be read.
    pub fn open(layout: Layout) -> Result<(Layout, Self), CephError> {
        match Self::read(&layout)? {
            Some(record) => Ok((layout.with_chroot(record.chroot.is_some()), record)),
            None => Err(CephError::NoCluster { directory: layout.root().to_owned() }),
        }
    }

    /// Puts the record on disk.
    ///
    /// # Errors
    /// The file system's.
    pub fn write(&self, layout: &Layout) -> Result<(), CephError> {
        let text = serde_json::to_string_pretty(self).expect("plain fields have a form in JSON");
        layout.write(&layout.record(), &text)
    }

    /// The record of a new cluster, by the options of `up`.
    ///
    /// # Errors
    /// The kernel gives no random ids.
    pub fn new(asked: &UpArguments) -> io::Result<Self> {
        let osds = (0..asked.osds.unwrap_or(OSDS)).map(|_| uuid()).collect::<Result<_, _>>()?;
        Ok(Self {
            version: VERSION,
            fsid: uuid()?,
            listen: asked.listen.unwrap_or(LISTEN),
            messenger: asked.messenger.unwrap_or_default(),
            osd_gib: asked.osd_gib.unwrap_or(OSD_GIB),
            osd_memory_mib: asked.osd_memory_mib.unwrap_or(OSD_MEMORY_MIB),
            osds,
            destroyed: false,
            osd_encryption: asked.osd_encryption,
            chroot: asked.chroot.clone(),
        })
    }

    /// Its daemons, in the order in which they are started: a block is served before its OSD uses it.
    #[must_use]
    pub fn daemons(&self) -> Vec<Daemon> {
        let mut daemons = vec![Daemon::Monitor, Daemon::Manager];
        for id in 0..self.osds.len() {
            daemons.extend(self.osd_encryption.then_some(Daemon::Block(id)));
            daemons.push(Daemon::Osd(id));
        }
        daemons
    }

    /// The record with the options of another `up` applied. `runs` says whether a daemon of the cluster runs.
    ///
    /// # Errors
    /// An option would change what never changes, or what changes only while no daemon runs.
    pub fn changed(mut self, asked: &UpArguments, runs: bool) -> Result<Self, CephError> {
        let fixed = |option, has: String| Err(CephError::Fixed { option, has });
        if asked.listen.is_some_and(|listen| listen != self.listen) {
            return fixed("--listen", self.listen.to_string());
        }
        if asked.osd_gib.is_some_and(|size| size != self.osd_gib) {
            return fixed("--osd-gib", format!("OSDs of {} GiB", self.osd_gib));
        }
        if asked.osd_encryption && !self.osd_encryption {
            return fixed("--osd-encryption", "OSDs in the clear".to_owned());
        }
        if let Some(chroot) = asked.chroot.as_ref().filter(|it| self.chroot.as_ref() != Some(*it)) {
            let Some(has) = &self.chroot else {
                return fixed("--chroot", "the programs of this machine".to_owned());
            };
            if runs {
                let has = has.display().to_string();
                return Err(CephError::Runs { option: "--chroot", has });
            }
            self.chroot = Some(chroot.clone());
        }
        let osds = asked.osds.unwrap_or(self.osds.len());
        if osds < self.osds.len() {
            return fixed("--osds", format!("{} OSDs", self.osds.len()));
        }
        let messenger = asked.messenger.unwrap_or(self.messenger);
        if messenger != self.messenger && runs {
            let has = format!("'{}'", self.messenger.name());
            return Err(CephError::Runs { option: "--messenger", has });
        }
        let memory = asked.osd_memory_mib.unwrap_or(self.osd_memory_mib);
        if memory != self.osd_memory_mib && runs {
            let has = format!("{} MiB", self.osd_memory_mib);
            return Err(CephError::Runs { option: "--osd-memory-mib", has });
        }
        (self.messenger, self.osd_memory_mib) = (messenger, memory);
        while self.osds.len() < osds {
            let failed =
                |source| CephError::File { path: "/proc/sys/kernel/random/uuid".into(), source };
            self.osds.push(uuid().map_err(failed)?);
        }
        Ok(self)
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;

    fn small() -> Record {
        Record::new(&UpArguments { osd_gib: Some(2), ..UpArguments::default() }).unwrap()
    }

    #[test]
    fn nothing_asked_for_changes_nothing() {
        let record = small();
        assert_eq!((record.osds.len(), record.osd_gib), (3, 2));
        for runs in [false, true] {
            let changed = record.clone().changed(&UpArguments::default(), runs).unwrap();
            assert_eq!(changed, record);
        }
    }

    #[test]
    fn osds_are_added_and_the_others_stay_as_they_are() {
        let record = small();
        let asked = UpArguments { osds: Some(5), ..UpArguments::default() };
        let more = record.clone().changed(&asked, true).unwrap();
        assert_eq!(more.osds[..3], record.osds);
        let ids: std::collections::HashSet<_> = more.osds.iter().collect();
        assert_eq!(ids.len(), 5);
        let fewer = UpArguments { osds: Some(3), ..UpArguments::default() };
        let refused = more.changed(&fewer, false).unwrap_err().to_string();
        assert!(refused.contains("--osds") && refused.contains("5 OSDs"), "{refused}");
    }

    #[test]
    fn what_running_daemons_know_changes_only_without_them() {
        let asked = UpArguments { messenger: Some(Messenger::Secure), ..UpArguments::default() };
        let refused = small().changed(&asked, true).unwrap_err().to_string();
        assert!(refused.contains("--messenger") && refused.contains("'crc'"), "{refused}");
        let changed = small().changed(&asked, false).unwrap();
        assert_eq!(changed.messenger, Messenger::Secure);
        let asked = UpArguments { osd_memory_mib: Some(2048), ..UpArguments::default() };
        assert!(small().changed(&asked, true).is_err());
        assert_eq!(small().changed(&asked, false).unwrap().osd_memory_mib, 2048);
    }

    #[test]
    fn what_is_on_disk_for_good_cannot_change() {
        for asked in [
            UpArguments { osd_gib: Some(3), ..UpArguments::default() },
            UpArguments { listen: "127.0.0.2:17300".parse().ok(), ..UpArguments::default() },
        ] {
            let refused = small().changed(&asked, false).unwrap_err();
            assert!(matches!(refused, CephError::Fixed { .. }), "{refused}");
        }
    }

    #[test]
    fn a_cluster_in_the_clear_is_not_encrypted_later_and_an_encrypted_one_stays_so() {
        let asked = UpArguments { osd_encryption: true, ..UpArguments::default() };
        let refused = small().changed(&asked, false).unwrap_err().to_string();
        assert!(refused.contains("--osd-encryption"), "{refused}");
        assert!(refused.contains("OSDs in the clear"), "{refused}");
        let record = Record::new(&asked).unwrap();
        assert_eq!(record.clone().changed(&asked, true).unwrap(), record);
        let more = UpArguments { osds: Some(4), ..UpArguments::default() };
        let changed = record.changed(&more, true).unwrap();
        assert!(changed.osd_encryption && changed.daemons().contains(&Daemon::Block(3)));
    }

    #[test]
    fn blocks_are_served_before_their_osds_start() {
        let names = |record: &Record| -> Vec<String> {
            record.daemons().iter().map(ToString::to_string).collect()
        };
        let clear = small();
        assert_eq!(names(&clear), ["mon.a", "mgr.a", "osd.0", "osd.1", "osd.2"]);
        let encrypted = Record { osd_encryption: true, ..clear };
        let all = ["mon.a", "mgr.a", "block.0", "osd.0", "block.1", "osd.1", "block.2", "osd.2"];
        assert_eq!(names(&encrypted), all);
    }

    #[test]
    fn records_of_earlier_versions_are_of_osds_in_the_clear() {
        let place = tempfile::tempdir().unwrap();
        let layout = Layout::make(place.path()).unwrap();
        let record = small();
        record.write(&layout).unwrap();
        let text = fs::read_to_string(layout.record()).unwrap();
        let earlier = text.replace(",\n  \"osd_encryption\": false", "");
        assert_ne!(earlier, text);
        fs::write(layout.record(), earlier).unwrap();
        assert_eq!(Record::read(&layout).unwrap(), Some(record));
    }

    #[test]
    fn a_cluster_stays_in_a_chroot_and_gets_another_one_only_while_nothing_runs() {
        let place = tempfile::tempdir().unwrap();
        let layout = Layout::make(place.path()).unwrap();
        let asked =
            |chroot: &str| UpArguments { chroot: Some(chroot.into()), ..UpArguments::default() };
        let record = Record::new(&asked("/srv/reef")).unwrap();
        record.write(&layout).unwrap();
        let (layout, read) = Record::open(layout).unwrap();
        assert_eq!((&read, layout.chroot().is_some()), (&record, true));
        for unchanged in [UpArguments::default(), asked("/srv/reef")] {
            assert_eq!(record.clone().changed(&unchanged, true).unwrap(), record);
        }
        let refused = record.clone().changed(&asked("/srv/new"), true).unwrap_err();
        assert!(matches!(refused, CephError::Runs { option: "--chroot", .. }), "{refused}");
        let changed = record.changed(&asked("/srv/new"), false).unwrap();
        assert_eq!(changed.chroot, Some("/srv/new".into()));
    }

    #[test]
    fn a_cluster_of_this_machine_s_programs_is_of_no_chroot() {
        let place = tempfile::tempdir().unwrap();
        let layout = Layout::make(place.path()).unwrap();
        let record = small();
        record.write(&layout).unwrap();
        // Versions that know no chroots read it.
        assert!(!fs::read_to_string(layout.record()).unwrap().contains("chroot"));
        let (layout, _) = Record::open(layout).unwrap();
        assert_eq!(layout.chroot(), None);
        let asked = UpArguments { chroot: Some("/srv/reef".into()), ..UpArguments::default() };
        let refused = record.changed(&asked, false).unwrap_err();
        assert!(matches!(refused, CephError::Fixed { option: "--chroot", .. }), "{refused}");
    }

    #[test]
    fn a_record_is_read_as_it_was_written_and_another_one_is_refused() {
        let place = tempfile::tempdir().unwrap();
        let layout = Layout::make(place.path()).unwrap();
        assert_eq!(Record::read(&layout).unwrap(), None);
        let record = small();
        record.write(&layout).unwrap();
        assert_eq!(Record::read(&layout).unwrap(), Some(record));
        let path: &Path = &layout.record();
        let later = fs::read_to_string(path).unwrap().replace("\"version\": 1", "\"version\": 2");
        for text in ["{}", "", &later] {
            fs::write(path, text).unwrap();
            assert!(matches!(Record::read(&layout), Err(CephError::Record { .. })), "{text}");
        }
    }
}
