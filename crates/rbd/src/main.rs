//! `vmseal-rbd`: mounts a Ceph pool as a datastore.
//!
//! ```text
//!  main                                     serving
//!  locks the mount's record
//!  starts ────────────────────────────────> confines itself, connects, ends what a predecessor has begun
//!  mounts          <──────────── connected ┘
//!  gives it the mount ────────────────────> serves until it is unmounted
//!  confines itself too, and waits
//! ```
//! The library's threads descend from the confined one.

use std::fs::File;
use std::os::fd::{AsRawFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::mpsc::{self, Receiver, Sender};
use std::time::Duration;

use anyhow::{Context, anyhow, bail};
use clap::Parser;
use fuser::{Config, Session, SessionACL};
use nix::errno::Errno;
use nix::mount::{MntFlags, MsFlags, mount, umount2};
use vmseal_api::compression::Compression;
use vmseal_api::datastore::{Messenger, way_of};
use vmseal_api::new_pools::NewPools;
use vmseal_api::rbd::Mounted;
use vmseal_rbd::channel::listener::Listener;
use vmseal_rbd::cluster::{Access, Cluster, Pool};
use vmseal_rbd::confinement;
use vmseal_rbd::create::create;
use vmseal_rbd::directory::Directories;
use vmseal_rbd::file_system::{FileSystem, Requests};
use vmseal_rbd::image::Layout;
use vmseal_rbd::inode::Inode;
use vmseal_rbd::library;
use vmseal_rbd::locks::Locks;
use vmseal_rbd::open_file::Store;
use vmseal_rbd::predecessors::Predecessors;
use vmseal_rbd::trial::{self, Use};
use vmseal_secret::cephx::CephxKey;
use vmseal_secret::derive::pool_key_fingerprint;

/// How long `--check` may take, in seconds. The agent waits for less, and cannot end one that systemd has started.
const CHECK_SECONDS: u32 = 15;

/// How many threads take requests. They wait for nothing: others ask the cluster ([`Requests`]).
const THREADS: usize = 4;

/// How long it is waited for requests that are under way when the mount has ended, of filters too: as long as several requests to a cluster
/// that answers. Files that are being closed are waited for without limit, and after this time the log says so: their lengths are noted then,
/// and what was written beyond a length that is not noted is lost.
const REQUESTS_END: Duration = Duration::from_secs(10);

/// Mounts a pool of a Ceph cluster as a datastore: long files are RBD images, short ones objects. It serves until the directory is
/// unmounted (umount DIRECTORY).
#[derive(Debug, Parser)]
#[command(name = "vmseal-rbd", version)]
struct Options {
    /// The monitors' addresses, as in mon_host: v2:10.0.0.1:3300,v2:10.0.0.2:3300
    #[arg(long, value_name = "ADDRESSES")]
    monitors: String,
    /// The Ceph user
    #[arg(long, value_name = "client.NAME", default_value = "client.vmseal")]
    user: String,
    /// The file with the user's key
    #[arg(long, value_name = "FILE", required_unless_present = "key_on_stdin")]
    keyring: Option<PathBuf>,
    /// The user's key comes on standard input: it is in no file
    #[arg(long, conflicts_with = "keyring")]
    key_on_stdin: bool,
    /// The pool of names, headers and, unless --data-pool is given, of data: a replicated one
    #[arg(long)]
    pool: String,
    /// The namespace within the pool
    #[arg(long, default_value = "")]
    namespace: String,
    /// The pool of the data of images: it may be erasure-coded
    #[arg(long, value_name = "POOL")]
    data_pool: Option<String>,
    /// The size of the objects of new images, as a power of two: 22 is 4 MiB
    #[arg(long, value_name = "ORDER", value_parser = clap::value_parser!(u8).range(12..=25))]
    object_order: Option<u8>,
    /// Make the pools, unless they are there, so that they outlive so many failures: 1, or 1,mirroring, or 2,erasure-coding; each
    /// copy in another of what is said behind that: 1,rack. It takes a user that may
    #[arg(long, value_name = "NUMBER[,LAYOUT][,DOMAIN]")]
    create: Option<NewPools>,
    /// The data chunks (k) of an erasure-coded pool that is made, 2 to 32 [default: 2 for one failure, 4 for more]
    #[arg(long, value_name = "NUMBER", requires = "create")]
    data_chunks: Option<u32>,
    /// How OSDs compress what they store of the pool of data that is made: none, passive, aggressive or force [default: as the cluster
    /// has it]
    #[arg(long, value_name = "MODE", requires = "create")]
    compression: Option<Compression>,
    /// How data goes over the network: encrypted (secure), or with checksums (crc)
    #[arg(long, value_name = "MODE", default_value = "secure")]
    messenger: Messenger,
    /// Only connect, read what the root directory has, and write an object to each pool, which is removed again: nothing is mounted. It
    /// says whether the key and the addresses are good, and whether the user may do what a mount does
    #[arg(long, conflicts_with = "create")]
    check: bool,
    /// The cluster, by its fsid, that it must be: another one is refused
    #[arg(long, value_name = "FSID", requires = "check")]
    cluster: Option<String>,
    /// Where the process notes its address in the cluster
    #[arg(long, value_name = "DIRECTORY", default_value = "/run/vmseal-rbd")]
    run_dir: PathBuf,
    /// Where the pool is mounted
    directory: PathBuf,
}

fn main() -> ExitCode {
    vmseal_log::start();
    match run(Options::parse()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            tracing::error!("{error:#}");
            ExitCode::FAILURE
        }
    }
}

fn run(options: Options) -> anyhow::Result<()> {
    nix::sys::prctl::set_dumpable(false).context("the process cannot be kept from being dumped")?;
    library::load()?;
    if options.check {
        return check(&options);
    }
    let directory = options.directory.canonicalize_even_if_dead()?;
    let place = record_of(&options.run_dir, &directory)?;
    let mut record = lock_record(&place, &directory)?;
    // Nobody else serves it, as the record is locked; and later it could not be made, as the process is confined.
    let listener = listen_beside(&place);
    let (connected, connection) = mpsc::channel();
    let (mounted, mount) = mpsc::channel();
    let predecessors = record.addresses().to_vec();
    let serving = std::thread::Builder::new()
        .name("serving".into())
        .spawn(move || serve(&options, predecessors, listener, &connected, &mount))?;
    // Its error says more than that it is gone.
    if let Ok(address) = connection.recv() {
        record.note(&address).context("the address in the cluster cannot be noted")?;
        let fuse = mount_at(&directory)?;
        if mounted.send(fuse).is_err() {
            let _ = umount2(&directory, MntFlags::MNT_DETACH);
        }
        drop(mounted);
        confinement::enter().context("the process cannot be confined")?;
    }
    let served = serving.join();
    served.map_err(|_| anyhow!("the file system ended by a defect"))?
}

/// Connects as a mount would, reads the root directory, and writes to each pool. Nobody else is disturbed: what it writes and locks is an
/// object that nothing else uses.
fn check(options: &Options) -> anyhow::Result<()> {
    // Ends the process: a call of the library that waits for the cluster cannot be given up.
    nix::unistd::alarm::set(CHECK_SECONDS);
    let (cluster, _) = connect(options)?;
    if let Some(expected) = &options.cluster {
        require_cluster(expected, &cluster.fsid()?)?;
    }
    let pool = Arc::new(Pool::open(&cluster, &options.pool, &options.namespace)?);
    Directories::new(Arc::clone(&pool))
        .list(Inode::ROOT)
        .with_context(|| format!("the pool '{}' cannot be read", options.pool))?;
    let cannot = |pool: &str| {
        let user = &options.user;
        format!(
            "the pool '{pool}' cannot be written to: does user {user} have 'profile rbd' for it (ceph auth get {user})?"
        )
    };
    trial::write(&pool, Use::Names).with_context(|| cannot(&options.pool))?;
    if let Some(name) = &options.data_pool {
        // Data of images is in the namespace that their headers are in.
        let pool = Pool::open(&cluster, name, &options.namespace)?;
        trial::write(&pool, Use::Data).with_context(|| cannot(name))?;
    }
    tracing::info!(pool = options.pool, "the key is good");
    Ok(())
}

/// Refuses another cluster than the one that a datastore is in, though it may have a pool of the name.
fn require_cluster(expected: &str, found: &str) -> anyhow::Result<()> {
    if found == expected {
        return Ok(());
    }
    bail!(
        "this is another cluster: the monitors are of the one with fsid {found}, and the datastore is in the one with fsid {expected}"
    )
}

/// Where the record of the mount's processes is; its directory is made.
fn record_of(run_dir: &Path, directory: &Path) -> anyhow::Result<PathBuf> {
    let at = || format!("{} cannot be made", run_dir.display());
    let run_dir = std::path::absolute(run_dir).with_context(at)?;
    vmseal_api::atomic_file::private_directory(&run_dir).with_context(at)?;
    let name = directory.to_string_lossy().trim_start_matches('/').replace('/', "-");
    Ok(run_dir.join(name))
}

/// The socket for filters, beside the record. Without it they use the mount alone.
fn listen_beside(record: &Path) -> Option<Listener> {
    let mut path = record.as_os_str().to_owned();
    path.push(".sock");
    let path = Path::new(&path);
    Listener::bind(path)
        .inspect_err(|error| {
            tracing::warn!(path = %path.display(), %error, "there is no socket for filters: they read and write by the mount alone");
        })
        .ok()
}

/// Locks the record of the mount's processes.
fn lock_record(record: &Path, directory: &Path) -> anyhow::Result<Predecessors> {
    match Predecessors::lock(record) {
        Ok(record) => Ok(record),
        Err(error) if error.kind() == std::io::ErrorKind::ResourceBusy => {
            bail!("another vmseal-rbd serves {}", directory.display())
        }
        Err(error) => Err(error).context("the record of the mount cannot be read"),
    }
}

/// Mounts, and returns the connection to the kernel.
fn mount_at(directory: &Path) -> anyhow::Result<OwnedFd> {
    let fuse =
        File::options().read(true).write(true).open("/dev/fuse").context(
            "/dev/fuse cannot be opened: the kernel needs FUSE, and the process the device",
        )?;
    let (user, group) = (nix::unistd::geteuid(), nix::unistd::getegid());
    // Others have files of it open: filters, under users of their own. The modes keep them from opening one.
    let data = format!(
        "fd={},rootmode=40700,user_id={user},group_id={group},default_permissions,allow_other",
        fuse.as_raw_fd()
    );
    let flags = MsFlags::MS_NODEV | MsFlags::MS_NOSUID | MsFlags::MS_NOEXEC | MsFlags::MS_NOATIME;
    mount(Some("vmseal-rbd"), directory, Some("fuse.vmseal-rbd"), flags, Some(data.as_str()))
        .with_context(|| format!("{} cannot be mounted", directory.display()))?;
    Ok(fuse.into())
}

/// Reads the key, confines the thread and connects; says which key it is, by its fingerprint.
fn connect(options: &Options) -> anyhow::Result<(Arc<Cluster>, String)> {
    let key = match &options.keyring {
        // Not by the library, which does not say what it has read, and reads once it is confined.
        Some(file) => File::open(file)
            .and_then(|keyring| CephxKey::read_of(keyring, &options.user))
            .with_context(|| format!("the keyring {}", file.display()))?,
        None => CephxKey::read(std::io::stdin()).context("the user's key on standard input")?,
    };
    let fingerprint = pool_key_fingerprint(&key.to_secret()?)?;
    confinement::enter().context("the process cannot be confined")?;
    let access = Access {
        monitors: options.monitors.clone(),
        user: options.user.clone(),
        key,
        messenger: options.messenger,
    };
    // The library has a copy of the key for as long as it is connected.
    Ok((Cluster::connect(&access)?, fingerprint))
}

/// Connects, and serves what is mounted then.
fn serve(
    options: &Options,
    predecessors: Vec<String>,
    listener: Option<Listener>,
    connected: &Sender<String>,
    mount: &Receiver<OwnedFd>,
) -> anyhow::Result<()> {
    let (cluster, key) = connect(options)?;
    if let Some(asked) = options.create {
        let Options { data_chunks, compression, .. } = *options;
        let asked = NewPools { data_chunks, compression, ..asked };
        create(&cluster, &options.pool, options.data_pool.as_deref(), asked)
            .with_context(|| format!("while making the pool '{}'", options.pool))?;
    }
    let pool = Arc::new(Pool::open(&cluster, &options.pool, &options.namespace)?);
    Directories::new(Arc::clone(&pool))
        .end_removals()
        .with_context(|| format!("the pool '{}' cannot be used", options.pool))?;
    let address = cluster.address().context("the address in the cluster is not known")?;
    let layout = Layout {
        data_pool: options.data_pool.clone(),
        object_order: options.object_order,
        striping: None,
    };
    let mut pools = vec![options.pool.clone()];
    pools.extend(layout.data_pool.clone());
    let locks = Locks::new(Arc::clone(&pool) as _, predecessors.clone());
    locks.keep()?;
    let store = Store { pool, layout, predecessors };
    let channel = listener.as_ref().map(|listener| listener.path().to_owned());
    let messenger = cluster.messenger().context("the messenger's mode is not known")?;
    // It is only shown: a mount does without.
    let between_osds = cluster.between_osds().inspect_err(|error| {
        tracing::warn!(%error, "it is not known how OSDs connect to each other");
    });
    let fsid = cluster.fsid().context("the cluster does not say which one it is")?;
    let mounted = Mounted {
        process: std::process::id(),
        key: Some(key),
        channel,
        messenger: Some(messenger),
        way: Some(way_of(&options.monitors, &options.user, options.messenger)),
        cluster: Some(fsid),
        between_osds: between_osds.ok(),
    };
    let file_system = FileSystem::new(cluster, (pools, mounted), store, locks);
    if let Some(listener) = listener {
        listener.serve(file_system.service()).context("filters are not served: no thread")?;
    }
    let (releases, served) = (file_system.releases(), file_system.served());
    let requests = Requests::of(file_system).context("requests are not served: no thread")?;
    tracing::info!(pool = options.pool, %address, "connected");
    let _ = connected.send(address);
    let Ok(fuse) = mount.recv() else { return Ok(()) };
    let mut config = Config::default();
    (config.n_threads, config.clone_fd) = (Some(THREADS), true);
    let session = Session::from_fd(requests, fuse, SessionACL::All, config)
        .context("the kernel's FUSE does not answer")?;
    tracing::info!(directory = %options.directory.display(), "mounted");
    let ended = session.run().context("the file system ended");
    if !releases.wait_for(REQUESTS_END) {
        tracing::warn!(
            seconds = REQUESTS_END.as_secs(),
            "files are still being closed: the process waits until the cluster has answered, without limit"
        );
        releases.wait();
    }
    if !served.wait_for(REQUESTS_END) {
        end_at_once(&ended);
    }
    ended?;
    tracing::info!("unmounted");
    Ok(())
}

/// Ends the process without cleaning up: a thread is still in the library.
fn end_at_once(ended: &anyhow::Result<()>) -> ! {
    if let Err(error) = ended {
        tracing::error!("{error:#}");
    }
    tracing::error!(
        seconds = REQUESTS_END.as_secs(),
        "requests have not ended: the process ends without closing their images"
    );
    // SAFETY: it only ends the process.
    unsafe { libc::_exit(libc::EXIT_FAILURE) }
}

/// The mount point, also where a process that served it has died.
trait MountPoint {
    fn canonicalize_even_if_dead(&self) -> anyhow::Result<PathBuf>;
}

impl MountPoint for PathBuf {
    fn canonicalize_even_if_dead(&self) -> anyhow::Result<PathBuf> {
        let at = || format!("{}", self.display());
        match self.canonicalize() {
            Err(error) if error.raw_os_error() == Some(Errno::ENOTCONN as i32) => {
                umount2(self, MntFlags::MNT_DETACH).with_context(at)?;
                self.canonicalize().with_context(at)
            }
            found => found.with_context(at),
        }
    }
}
