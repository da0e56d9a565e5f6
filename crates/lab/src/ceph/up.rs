//! `vmseal lab ceph up`: a cluster that runs.

use std::fs::DirBuilder;
use std::io;
use std::net::TcpListener;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};

use nix::sys::stat::{Mode, umask};
use vmseal_api::osd_encryption::OSD_KEYS;

use super::answers::{ClusterStatus, OsdDump};
use super::arguments::UpArguments;
use super::block;
use super::chroot;
use super::configuration;
use super::daemon::Daemon;
use super::error::CephError;
use super::layout::{self, Layout};
use super::pools::{self, Pool};
use super::processes;
use super::progress::Progress;
use super::record::Record;
use super::redundancy::Redundancy;
use super::room::{KEPT_FREE, OsdFiles};
use super::status::{self, Status};
use super::tools::{self, Tools};
use super::waiting::Waiting;

/// What a monitor may do, and an administrator.
const ALL: &str = "allow *";
/// What the monitors keep in place of the key of an OSD.
const KEPT_ELSEWHERE: &str = "in a file of vmseal lab";
/// Set once all other settings are: a cluster that has it has them.
const LAST_SETTING: &str = "nodeep-scrub";

/// Makes the cluster that is asked for, or starts what of it does not run, and waits until it can be used. Gives how
/// it is then.
///
/// # Errors
/// [`CephError`]. What was made stays, and the next call goes on.
pub fn up(
    arguments: &UpArguments,
    observe: &mut dyn FnMut(&Progress),
) -> Result<Status, CephError> {
    // Ceph's programs make files that everyone may read.
    umask(Mode::from_bits_truncate(0o077));
    let layout = Layout::make(&arguments.place.directory()?)?;
    let _lock = layout.lock()?;
    // What an `up` that died was making is made anew.
    processes::end(&layout, |process| process.makes, &mut |_| ())?;
    let record = settle(&layout, arguments)?;
    let layout = layout.with_chroot(record.chroot.is_some());
    layout.make_directories()?;
    layout.write(&layout.configuration(), &configuration::of(&layout, &record))?;
    if let Some(directory) = &record.chroot {
        chroot::mount(&layout, directory, !processes::running(&layout).is_empty())?;
    }
    let mut up = Up { layout: &layout, record: &record, tools: Tools { layout: &layout }, observe };
    up.monitor()?;
    up.settings()?;
    up.manager()?;
    up.osds()?;
    up.pool()?;
    status::of(&layout, &record)
}

/// Reads or makes the record of the cluster, applies the options of `up` to it, and writes it.
fn settle(layout: &Layout, arguments: &UpArguments) -> Result<Record, CephError> {
    let runs = !processes::running(layout).is_empty();
    let failed = |source| CephError::File { path: layout.root().to_owned(), source };
    let chroot = arguments.chroot.as_deref().map(|it| chroot::find(layout, it)).transpose()?;
    let asked = UpArguments { chroot, ..arguments.clone() };
    let record = match Record::read(layout)? {
        None => Record::new(&asked).map_err(failed)?,
        Some(record) if record.destroyed => {
            return Err(CephError::Destroyed { directory: layout.root().to_owned() });
        }
        Some(record) => record.changed(&asked, runs)?,
    };
    tools::check_programs(record.chroot.as_deref())?;
    if let Some(directory) = &record.chroot {
        chroot::check(directory)?;
    }
    if record.osd_encryption {
        block::check()?;
    }
    record.write(layout)?;
    Ok(record)
}

/// A cluster that is brought up.
struct Up<'a> {
    layout: &'a Layout,
    record: &'a Record,
    tools: Tools<'a>,
    observe: &'a mut dyn FnMut(&Progress),
}

/// A path as an argument; [`Layout::make`] has found that it is text.
fn text(path: &Path) -> String {
    path.display().to_string()
}

impl Up<'_> {
    fn file(path: &Path) -> impl FnOnce(io::Error) -> CephError + use<> {
        let path = path.to_owned();
        move |source| CephError::File { path, source }
    }

    /// Starts a daemon that does not run.
    fn start(&mut self, daemon: Daemon) -> Result<(), CephError> {
        if processes::running(self.layout).iter().any(|process| process.daemon == daemon) {
            return Ok(());
        }
        processes::start(self.layout, daemon)?;
        (self.observe)(&Progress::Started(daemon.to_string()));
        Ok(())
    }

    fn monitor(&mut self) -> Result<(), CephError> {
        if !self.layout.store(Daemon::Monitor).exists() {
            self.make_monitor()?;
            (self.observe)(&Progress::Made(Daemon::Monitor.to_string()));
        }
        let runs = processes::running(self.layout).iter().any(|it| it.daemon == Daemon::Monitor);
        let address = self.record.listen;
        if !runs
            && TcpListener::bind(address).is_err_and(|it| it.kind() == io::ErrorKind::AddrInUse)
        {
            return Err(CephError::InUse { address: address.to_string() });
        }
        self.start(Daemon::Monitor)?;
        let daemons = [Daemon::Monitor];
        let all = self.record.osds.len() as u64;
        let answers = |status: &ClusterStatus| (Progress::Up(status.osdmap.serving(), all), true);
        Waiting { layout: self.layout, daemons: &daemons }.until(&mut |_| (), answers)
    }

    /// Makes the keys of monitor and administrator, and the monitor's store with them.
    fn make_monitor(&mut self) -> Result<(), CephError> {
        let admin = self.layout.keyring("client.admin");
        if !admin.exists() {
            let caps = ["mon", "osd", "mgr"].map(|of| ["--cap", of, ALL]).concat();
            self.make_key("client.admin", &caps, &admin)?;
        }
        // The monitor keeps its own key in its store.
        let (boot, map) = (self.layout.keyring("mon.boot"), self.layout.keyring("mon.map"));
        self.make_key("mon.", &["--cap", "mon", ALL], &boot)?;
        let import = [&*text(&boot), "--import-keyring", &text(&admin)];
        self.tools.other("ceph-authtool", &import)?;
        let (fsid, address) = (&*self.record.fsid, configuration::monitor(self.record));
        let create =
            ["--create", "--clobber", "--fsid", fsid, "--addv", "a", &address, &text(&map)];
        self.tools.other("monmaptool", &create)?;

        let made = self.empty_store(Daemon::Monitor)?;
        let (made_text, id) = (text(&made), Daemon::Monitor.id());
        let mkfs = ["-i", &id, "--mkfs", "--mon-data", &made_text, "--fsid", fsid];
        let with = ["--monmap", &text(&map), "--keyring", &text(&boot)];
        self.tools.other(Daemon::Monitor.program(), &[&mkfs[..], &with[..]].concat())?;
        self.layout.finish(&made, &self.layout.store(Daemon::Monitor))?;
        for path in [boot, map] {
            layout::remove(&path).map_err(Self::file(&path))?;
        }
        Ok(())
    }

    /// Makes a key in a keyring of its own.
    fn make_key(&self, entity: &str, caps: &[&str], keyring: &Path) -> Result<(), CephError> {
        let new = keyring.with_extension("new");
        layout::remove(&new).map_err(Self::file(&new))?;
        let new_text = text(&new);
        let make = ["--create-keyring", &new_text, "--gen-key", "-n", entity];
        self.tools.other("ceph-authtool", &[&make[..], caps].concat())?;
        self.layout.finish(&new, keyring)
    }

    /// Has the cluster make the key of a daemon, or tell it again.
    fn get_key(&self, daemon: Daemon, caps: &[&str]) -> Result<(), CephError> {
        let (entity, keyring) = (daemon.to_string(), self.layout.keyring(&daemon.to_string()));
        if keyring.exists() {
            return Ok(());
        }
        let new = keyring.with_extension("new");
        let new_text = text(&new);
        let get = ["auth", "get-or-create", &entity];
        self.tools.ceph(&[&get[..], caps, &["-o", &new_text]].concat())?;
        self.layout.finish(&new, &keyring)
    }

    /// An empty directory for the store of a daemon.
    fn empty_store(&self, daemon: Daemon) -> Result<PathBuf, CephError> {
        let made = self.layout.unfinished(daemon);
        layout::remove(&made).map_err(Self::file(&made))?;
        DirBuilder::new().mode(0o700).create(&made).map_err(Self::file(&made))?;
        Ok(made)
    }

    /// Turns off what moves or reads data by itself.
    fn settings(&mut self) -> Result<(), CephError> {
        let dump: OsdDump = self.tools.ask(&["osd", "dump"])?;
        if dump.has(LAST_SETTING) {
            return Ok(());
        }
        for (setting, value) in
            [("mgr/devicehealth/enable_monitoring", "false"), ("mgr/balancer/active", "false")]
        {
            // The monitor knows the settings of the manager's modules only once one has run.
            self.tools.ceph(&["config", "set", "mgr", setting, value, "--force"])?;
        }
        self.tools.ceph(&["osd", "set", "noscrub"])?;
        // Otherwise Ceph reports HEALTH_WARN as long as scrubs are off.
        self.tools.ceph(&["health", "mute", "OSDMAP_FLAGS", "--sticky"])?;
        if self.record.chroot.is_some() {
            // Debian's manager of 18.2 cannot load some of its modules; images need none of these.
            self.tools.ceph(&["health", "mute", "MGR_MODULE_DEPENDENCY", "--sticky"])?;
        }
        self.tools.ceph(&["osd", "set", LAST_SETTING])
    }

    fn manager(&mut self) -> Result<(), CephError> {
        let caps = ["mon", "allow profile mgr", "osd", ALL, "mds", ALL];
        self.get_key(Daemon::Manager, &caps)?;
        self.start(Daemon::Manager)
    }

    fn osds(&mut self) -> Result<(), CephError> {
        self.say_room()?;
        for (id, uuid) in self.record.osds.iter().enumerate() {
            let daemon = Daemon::Osd(id);
            if !self.layout.store(daemon).exists() {
                self.make_osd(id, uuid)?;
                (self.observe)(&Progress::Made(daemon.to_string()));
            }
            if self.record.osd_encryption {
                self.serve_block(id)?;
            }
            self.start(daemon)?;
        }
        if self.record.osd_encryption {
            self.note_encryption()?;
        }
        let (daemons, all) = (self.record.daemons(), self.record.osds.len() as u64);
        Waiting { layout: self.layout, daemons: &daemons }.until(self.observe, |status| {
            let up = status.osdmap.serving();
            (Progress::Up(up, all), up == all && status.mgrmap.available)
        })
    }

    /// Has the monitors keep what they keep for OSDs that ceph-volume made with dm-crypt, since those here are encrypted below, too: so
    /// clients that ask find it. The keys themselves stay files: the monitor's store is on the same disk, in the clear.
    fn note_encryption(&self) -> Result<(), CephError> {
        let kept: Vec<String> = self.tools.ask(&["config-key", "ls"])?;
        for uuid in &self.record.osds {
            let key = format!("{OSD_KEYS}{uuid}/luks");
            if !kept.contains(&key) {
                self.tools.ceph(&["config-key", "set", &key, KEPT_ELSEWHERE])?;
            }
        }
        Ok(())
    }

    /// Has the block of an encrypted OSD served.
    fn serve_block(&mut self, id: usize) -> Result<(), CephError> {
        let block = Daemon::Block(id);
        let runs = processes::running(self.layout).iter().any(|it| it.daemon == block);
        // One that an `up` was starting when it died may run, and not serve yet.
        if runs && block::is_mounted(self.layout, id)? {
            return Ok(());
        }
        // What the OSD has open is of a mount that nobody serves any more.
        processes::end(self.layout, |it| it.daemon == Daemon::Osd(id), &mut |_| ())?;
        processes::end(self.layout, |it| it.daemon == block, &mut |_| ())?;
        block::make_place(self.layout, id)?;
        self.start(block)
    }

    /// Makes the encrypted file of an OSD anew, and serves it: BlueStore takes no block that was used before.
    fn make_block(&mut self, id: usize) -> Result<(), CephError> {
        processes::end(self.layout, |it| it.daemon == Daemon::Block(id), &mut |_| ())?;
        block::make(self.layout, id, self.record.osd_gib)?;
        self.serve_block(id)
    }

    fn make_osd(&mut self, id: usize, uuid: &str) -> Result<(), CephError> {
        let daemon = Daemon::Osd(id);
        let caps = ["mon", "allow profile osd", "mgr", "allow profile osd", "osd", ALL];
        self.get_key(daemon, &caps)?;
        // With the id of its store: told again, it is the same one.
        self.tools.ceph(&["osd", "new", uuid, &daemon.id()])?;
        if self.record.osd_encryption {
            self.make_block(id)?;
        }
        let made = self.empty_store(daemon)?;
        let (made_text, id) = (text(&made), daemon.id());
        let mkfs = ["-i", &id, "--mkfs", "--osd-data", &made_text, "--osd-uuid", uuid];
        self.tools.other(daemon.program(), &[&mkfs[..], &["--no-mon-config"]].concat())?;
        self.layout.finish(&made, &self.layout.store(daemon))
    }

    /// Tells when the OSDs could not all be filled.
    fn say_room(&mut self) -> Result<(), CephError> {
        let files = OsdFiles::of(self.layout, self.record)?;
        if files.growth().saturating_add(KEPT_FREE) > files.free {
            (self.observe)(&Progress::Room(files.growth(), files.free));
        }
        Ok(())
    }

    fn pool(&mut self) -> Result<(), CephError> {
        let usual = Redundancy::new(None, None, None);
        let refused = |why| CephError::Pool { pool: pools::USUAL.into(), why };
        let pool = Pool { name: pools::USUAL.into(), redundancy: usual.map_err(refused)? };
        let dump: OsdDump = self.tools.ask(&["osd", "dump"])?;
        // One that the user has changed since it was whole is the user's.
        if !dump.pools.iter().any(|it| it.pool_name == pool.name && it.is_for_rbd()) {
            pools::ensure(self.layout, &pool, self.record.osds.len(), self.observe)?;
        }
        pools::wait_clean(self.layout, &self.record.daemons(), self.observe)
    }
}
