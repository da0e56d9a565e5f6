//! Pools of Ceph clusters that are datastores: `vmseal-rbd` mounts each, in a process of its own that outlives the agent.
//!
//! ```text
//!  not mounted ──somebody needs it──> vmseal-rbd is started ──> mounted ──its process dies──> not mounted
//! ```
//! Where systemd runs, it starts the process, as a unit of its own: the agent's own mounts are not those of the host.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::fs::{DirBuilder, File, OpenOptions};
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use vmseal_api::datastore::{DatastoreLocation, Messenger, RbdPool};
use vmseal_api::fencing::Fencing;
use vmseal_api::osd_encryption::{OsdEncryption, OsdsUnknown};
use vmseal_api::problem::{ErrorCode, Problem};
use vmseal_api::rbd::{
    FENCING_ATTRIBUTE, FENCING_MAX, Mounted, OSDS_ATTRIBUTE, OSDS_MAX, POOLS_ATTRIBUTE, POOLS_MAX,
};
use vmseal_api::redundancy::PoolFacts;
use vmseal_secret::SecretBytes;

use crate::mounts::{POOL, file_system, served_by, served_by_now};
use crate::storage::{mount_files, pool_keys, pool_ways};
use crate::timed::{SHORT_TIMEOUT, Silent, answer_within};

/// How long mounting may take: `vmseal-rbd` itself gives up connecting after 30 seconds. A remount may have less left.
pub(super) const MOUNT_TIMEOUT: Duration = Duration::from_secs(38);

/// The pause between checks.
const MOUNT_INTERVAL: Duration = Duration::from_millis(20);

/// How long a process that is killed may take to end: the kernel frees its memory.
pub(super) const DEATH_TIMEOUT: Duration = Duration::from_secs(3);

/// The name of the program, as the kernel has it of its processes (`comm`).
pub(super) const PROGRAM_NAME: &str = "vmseal-rbd";

/// The most bytes of a process's log that an error has: its last lines.
const LOG_MAX: usize = 1024;

/// The program, and where it keeps records and logs.
static PROGRAM: OnceLock<(PathBuf, PathBuf)> = OnceLock::new();

/// One lock per mount point, so that one process is started.
static MOUNTING: Mutex<BTreeMap<PathBuf, Arc<Mutex<()>>>> = Mutex::new(BTreeMap::new());

/// Says which program mounts pools, and where it keeps its records. The first word counts.
pub fn set_program(program: PathBuf, run_dir: PathBuf) {
    let _ = PROGRAM.set((program, run_dir));
}

/// Mounts a pool, unless it is mounted. Blocks.
///
/// # Errors
/// `invalid-request` where the place cannot be mounted at; `unreachable` with what `vmseal-rbd` says; `wrong-state` where somebody else has
/// mounted it over connections that are not encrypted, and they are to be.
pub fn mount(path: &Path, pool: &RbdPool) -> Result<(), Problem> {
    let pool = &latest(path, pool);
    if is_mounted(path) {
        return check_messenger(path, pool, served_by(path).and_then(|it| it.messenger));
    }
    let mounting = mounting(path);
    let _mounting = mounting.lock().unwrap_or_else(PoisonError::into_inner);
    // Others may have tried a former way for long meanwhile.
    let pool = &latest(path, pool);
    if is_mounted_now(path).map_err(|Silent| hung(path))? {
        let served = served_by_now(path).map_err(|Silent| hung(path))?;
        return check_messenger(path, pool, served.and_then(|it| it.messenger));
    }
    let (program, run_dir) = program_for(path, pool)?;
    let key = key_for(path, pool)?;
    start_and_wait((program, run_dir), path, pool, key.as_deref(), MOUNT_TIMEOUT)
}

/// A pool by the latest way that this host was told.
pub(super) fn latest(path: &Path, pool: &RbdPool) -> RbdPool {
    let records = PROGRAM.get().map(|(_, run_dir)| run_dir.join("rbd"));
    pool_ways::latest(records.as_deref(), path, pool)
}

/// Notes by which way a pool is to be mounted, where that is news.
pub(super) fn note_way(location: &DatastoreLocation) {
    if let DatastoreLocation::Rbd { path, pool } = location {
        latest(path, pool);
    }
}

/// Forgets by which way the pool that was mounted there was reached: another one may be mounted there.
pub fn forget_way(path: &Path) {
    let records = PROGRAM.get().map(|(_, run_dir)| run_dir.join("rbd"));
    pool_ways::forget(records.as_deref(), path);
}

/// Refuses a mount whose connections are not encrypted where the datastore says that they are: an administrator may have mounted it by hand.
/// A `vmseal-rbd` of an earlier version does not say how it is connected; the agent started it as the datastore says. Where the way to the pool
/// was changed since it was added, the mount may be by a former one until it is made anew, and guests go on meanwhile.
pub(crate) fn check_messenger(
    path: &Path,
    pool: &RbdPool,
    in_force: Option<Messenger>,
) -> Result<(), Problem> {
    if pool.changed.is_some()
        || (pool.messenger, in_force) != (Messenger::Secure, Some(Messenger::Crc))
    {
        return Ok(());
    }
    let (path, pool) = (path.display(), &pool.pool);
    let what = format!(
        "the pool '{pool}' is mounted at {path} over connections that are not encrypted (messenger 'crc'), and the datastore has 'secure': somebody has mounted it by hand. Have it mounted anew (vmseal datastore remount --host), or unmount it (umount {path})"
    );
    Err(Problem::new(ErrorCode::WrongState, what))
}

/// The lock of a mount point. Its holder may mount a pool there, or end the process that serves it. Starts of VMs wait for the lock, so each
/// wait of the holder has a timeout.
pub(super) fn mounting(path: &Path) -> Arc<Mutex<()>> {
    let mut all = MOUNTING.lock().unwrap_or_else(PoisonError::into_inner);
    Arc::clone(all.entry(path.to_owned()).or_default())
}

/// The program for a pool that may be mounted there, and where it keeps its records.
pub(super) fn program_for(
    path: &Path,
    pool: &RbdPool,
) -> Result<(&'static Path, &'static Path), Problem> {
    if !path.is_absolute() {
        return Err(Problem::invalid("location.path", "must be an absolute path"));
    }
    pool.check()
        .map_err(|(field, what)| Problem::invalid(format!("location.pool.{field}"), what))?;
    let Some((program, run_dir)) = PROGRAM.get() else {
        let what = "this agent cannot mount pools of Ceph";
        return Err(Problem::new(ErrorCode::Unsupported, what));
    };
    Ok((program.as_path(), run_dir.as_path()))
}

/// The key to mount a pool with; none where it is in a keyring.
pub(super) fn key_for(path: &Path, pool: &RbdPool) -> Result<Option<Arc<SecretBytes>>, Problem> {
    match pool.keyring {
        Some(_) => Ok(None),
        None => pool_keys::of(path).map(Some).ok_or_else(|| without_key(pool)),
    }
}

/// The server holds the key of this pool, and has not given it.
pub(crate) fn without_key(pool: &RbdPool) -> Problem {
    let what = format!(
        "the pool '{}' is not mounted: its key is held by the server, which has not given it to this agent yet",
        pool.pool
    );
    Problem::new(ErrorCode::Unreachable, what)
}

/// Mounts a pool by this program, which keeps its records there, within this time. One that has not mounted it by then is killed, which takes
/// up to [`DEATH_TIMEOUT`] more.
pub(super) fn start_and_wait(
    (program, run_dir): (&Path, &Path),
    path: &Path,
    pool: &RbdPool,
    key: Option<&SecretBytes>,
    limit: Duration,
) -> Result<(), Problem> {
    let place = |error: io::Error| {
        Problem::invalid("location.path", format!("{}: {error}", path.display()))
    };
    // One that is dead is there, too, and cannot be made.
    match DirBuilder::new().recursive(true).mode(0o700).create(path) {
        Err(error) if error.kind() != io::ErrorKind::AlreadyExists => return Err(place(error)),
        _ => {}
    }
    let failed = |what: String| {
        let pool = &pool.pool;
        Problem::new(ErrorCode::Unreachable, format!("the pool '{pool}' is not mounted: {what}"))
    };
    let records = run_dir.join("rbd");
    let log_path = mount_files::log(&records, path);
    let started = vmseal_api::atomic_file::private_directory(&records)
        .and_then(|()| OpenOptions::new().create(true).append(true).mode(0o600).open(&log_path))
        .and_then(|log| {
            let from = log.metadata()?.len();
            let arguments = arguments(&records, path, pool);
            Ok((start(program, &arguments, pool, key, &log)?, from))
        });
    let (mut child, log_from) = started.map_err(|error| failed(not_started(program, &error)))?;
    let give_up = Instant::now() + limit;
    while Instant::now() < give_up {
        if is_mounted_now(path) == Ok(true) {
            // It ends when it is unmounted; somebody has to take note of that.
            std::thread::spawn(move || child.wait());
            tracing::info!(path = %path.display(), pool = pool.pool, "a pool is mounted");
            return Ok(());
        }
        match child.try_wait() {
            Ok(Some(status)) if !status.success() => {
                return Err(failed(last_lines(&log_path, log_from)));
            }
            Ok(_) => std::thread::sleep(MOUNT_INTERVAL),
            Err(error) => return Err(failed(error.to_string())),
        }
    }
    give_up_on(child);
    let seconds = limit.as_secs();
    Err(failed(format!(
        "vmseal-rbd has not mounted it within {seconds} s, see {}",
        log_path.display()
    )))
}

/// Whether a process has ended well within this time; none where it has not ended.
pub(super) fn ended_within(child: &mut Child, limit: Duration) -> io::Result<Option<bool>> {
    let give_up = Instant::now() + limit;
    loop {
        if let Some(status) = child.try_wait()? {
            return Ok(Some(status.success()));
        }
        if Instant::now() >= give_up {
            return Ok(None);
        }
        std::thread::sleep(MOUNT_INTERVAL);
    }
}

/// Kills a process that has not done its work in time. One that does not even end then is left behind.
pub(super) fn give_up_on(mut child: Child) {
    let _ = child.kill();
    if !matches!(ended_within(&mut child, DEATH_TIMEOUT), Ok(Some(_))) {
        // Somebody has to take note of its end.
        std::thread::spawn(move || child.wait());
    }
}

/// Why `vmseal-rbd` was not started.
pub(super) fn not_started(program: &Path, error: &io::Error) -> String {
    match error.kind() {
        io::ErrorKind::NotFound => format!(
            "{} is not there: install vmseal-rbd beside vmseal, of the same version",
            program.display()
        ),
        _ => format!("vmseal-rbd cannot be started: {error}"),
    }
}

/// Starts `vmseal-rbd`, by systemd where that runs.
pub(super) fn start(
    program: &Path,
    arguments: &[OsString],
    pool: &RbdPool,
    key: Option<&SecretBytes>,
    log: &File,
) -> io::Result<Child> {
    program.metadata()?;
    let mut command = if Path::new("/run/systemd/system").is_dir() {
        let mut command = Command::new("systemd-run");
        // `--wait`: its end is the end of the command, so it is seen here.
        command.args(["--quiet", "--collect", "--wait", "--pipe", "--service-type=exec"]);
        command.arg("--description").arg(format!("vmseal: Ceph pool {}", pool.pool));
        command.arg("--").arg(program);
        command
    } else {
        Command::new(program)
    };
    command.args(arguments);
    // Not as an argument, in the environment or in a file: others of the host could read it there.
    let stdin = match key {
        Some(key) => Stdio::from(pool_keys::piped(key)?),
        None => Stdio::null(),
    };
    command.stdin(stdin).stdout(log.try_clone()?).stderr(log.try_clone()?);
    command.current_dir("/");
    // It goes on when the agent ends, also by a signal to its group.
    command.process_group(0);
    command.spawn()
}

/// What `vmseal-rbd` is told to mount a pool.
pub(super) fn arguments(records: &Path, path: &Path, pool: &RbdPool) -> Vec<OsString> {
    let mut arguments: Vec<OsString> = vec![
        "--monitors".into(),
        (&pool.monitors).into(),
        "--user".into(),
        (&pool.user).into(),
        "--pool".into(),
        (&pool.pool).into(),
        "--messenger".into(),
        pool.messenger.name().into(),
        "--run-dir".into(),
        records.into(),
    ];
    match &pool.keyring {
        Some(keyring) => arguments.extend(["--keyring".into(), keyring.into()]),
        None => arguments.push("--key-on-stdin".into()),
    }
    for (option, value) in [("--namespace", &pool.namespace), ("--data-pool", &pool.data_pool)] {
        if let Some(value) = value {
            arguments.extend([option.into(), value.into()]);
        }
    }
    if let Some(asked) = pool.create {
        arguments.extend(["--create".into(), asked.to_option().into()]);
        if let Some(chunks) = asked.data_chunks {
            arguments.extend(["--data-chunks".into(), chunks.to_string().into()]);
        }
        if let Some(mode) = asked.compression {
            arguments.extend(["--compression".into(), mode.name().into()]);
        }
    }
    arguments.push(path.into());
    arguments
}

/// How the cluster keeps what is stored in a datastore; nothing of a directory, or where that cannot be told. Blocks.
#[must_use]
pub fn facts(of: &DatastoreLocation) -> Vec<PoolFacts> {
    let DatastoreLocation::Rbd { path, .. } = of else { return Vec::new() };
    let mut told = vec![0; POOLS_MAX];
    let facts = rustix::fs::getxattr(path, POOLS_ATTRIBUTE, &mut told[..])
        .map_err(io::Error::from)
        .and_then(|length| Ok(serde_json::from_slice(&told[..length])?));
    facts.unwrap_or_else(|error| {
        tracing::debug!(path = %path.display(), %error, "the cluster does not say how it keeps data");
        Vec::new()
    })
}

/// Whether the OSDs of a datastore's cluster are encrypted; none of a directory. Blocks.
#[must_use]
pub fn osds(of: &DatastoreLocation) -> Option<OsdEncryption> {
    let DatastoreLocation::Rbd { path, .. } = of else { return None };
    let mut told = vec![0; OSDS_MAX];
    let why = match rustix::fs::getxattr(path, OSDS_ATTRIBUTE, &mut told[..]) {
        Ok(length) => match serde_json::from_slice(&told[..length]) {
            Ok(told) => return Some(told),
            Err(_) => OsdsUnknown::NoAnswer,
        },
        Err(rustix::io::Errno::OPNOTSUPP) => OsdsUnknown::EarlierVersion,
        Err(_) => OsdsUnknown::NoAnswer,
    };
    Some(OsdEncryption::Unknown { why })
}

/// Whether a datastore's user may have the cluster take nothing more from other hosts; none of a directory, or where an earlier version serves
/// the pool. Blocks.
#[must_use]
pub fn fencing(of: &DatastoreLocation) -> Option<Fencing> {
    let DatastoreLocation::Rbd { path, .. } = of else { return None };
    let mut told = [0; FENCING_MAX];
    match rustix::fs::getxattr(path, FENCING_ATTRIBUTE, &mut told[..]) {
        Ok(length) => Some(serde_json::from_slice(&told[..length]).unwrap_or(Fencing::Unknown)),
        Err(rustix::io::Errno::OPNOTSUPP) => None,
        Err(_) => Some(Fencing::Unknown),
    }
}

/// What the mount of a datastore says of itself; none of a directory, or where an earlier version serves the pool. Blocks.
///
/// # Errors
/// `unreachable` where nobody serves the pool any more: what served it may have ended since it was mounted.
pub fn mounted(of: &DatastoreLocation) -> Result<Option<Mounted>, Problem> {
    let DatastoreLocation::Rbd { path, .. } = of else { return Ok(None) };
    if let Some(told) = served_by(path) {
        return Ok(Some(told));
    }
    if is_mounted(path) {
        // Asked again: another process may have mounted it since.
        return Ok(served_by(path));
    }
    let what = format!(
        "the vmseal-rbd that served {} has ended: the pool is mounted by another one when it is needed next",
        path.display()
    );
    Err(Problem::new(ErrorCode::Unreachable, what))
}

/// Whether `vmseal-rbd` has mounted something there, and serves it. Another file system would take the disks as well. Blocks, for as long
/// as what is mounted there hangs.
fn is_mounted(path: &Path) -> bool {
    file_system(path).is_ok_and(|kind| kind.as_deref() == Some(POOL))
}

/// The same for those who cannot wait for one that hangs.
pub(super) fn is_mounted_now(path: &Path) -> Result<bool, Silent> {
    let asked = path.to_owned();
    answer_within(path, SHORT_TIMEOUT, move || is_mounted(&asked))
}

/// What is mounted there does not answer.
pub(super) fn hung(path: &Path) -> Problem {
    silent(path, |kill| {
        format!(
            "it hangs, as one does that waits for its cluster. Check that this host reaches the monitors and OSDs, and ask again. If it goes on hanging when they answer, end it ({kill})"
        )
    })
}

/// The same where the cluster has just answered another process of this host.
pub(super) fn hung_beside_others(path: &Path) -> Problem {
    silent(path, |kill| {
        format!(
            "it hangs, while the cluster answers a new connection from this host. End it ({kill})"
        )
    })
}

/// What is mounted there does not answer; `advice` is also told how its process is killed.
fn silent(path: &Path, advice: impl FnOnce(&str) -> String) -> Problem {
    let (who, kill) = match process_of(path) {
        Some(process) => (format!(" (process {process})"), format!("kill -9 {process}")),
        None => (String::new(), "kill -9".to_owned()),
    };
    let what = format!(
        "the vmseal-rbd that serves {}{who} does not answer: {}: the pool is mounted by another one when it is needed next",
        path.display(),
        advice(&kill)
    );
    Problem::new(ErrorCode::TimedOut, what)
}

/// The process that was started to serve a mount, by its command line. For people: what it was told is no proof that it is the one.
fn process_of(path: &Path) -> Option<u32> {
    let is_it = |process: &u32| {
        let of = |file: &str| std::fs::read(format!("/proc/{process}/{file}")).unwrap_or_default();
        // Command lines of others are not read: that may hang, too, where these wait for a page of a file on the mount.
        if of("comm").trim_ascii_end() != PROGRAM_NAME.as_bytes() {
            return false;
        }
        let line = of("cmdline");
        let words: Vec<&[u8]> =
            line.split(|byte| *byte == 0).filter(|word| !word.is_empty()).collect();
        words.last() == Some(&path.as_os_str().as_bytes()) && !words.contains(&&b"--check"[..])
    };
    let processes = std::fs::read_dir("/proc").ok()?.flatten();
    let mut numbers = processes.filter_map(|entry| entry.file_name().to_str()?.parse().ok());
    numbers.find(is_it)
}

/// The last lines that a process has written.
pub(super) fn last_lines(log: &Path, from: u64) -> String {
    let written = std::fs::read(log).unwrap_or_default();
    let from = usize::try_from(from).unwrap_or(usize::MAX).min(written.len());
    let from = from.max(written.len().saturating_sub(LOG_MAX));
    let text = String::from_utf8_lossy(&written[from..]).trim().replace('\n', "; ");
    if text.is_empty() { "vmseal-rbd has ended without a word".to_owned() } else { text }
}

#[cfg(test)]
pub(crate) mod tests {
    use vmseal_api::compression::Compression;
    use vmseal_api::failure_domain::FailureDomain;
    use vmseal_api::new_pools::NewPools;
    use vmseal_api::redundancy::Layout;

    use super::*;
    use crate::skipped::starts_by_systemd;

    /// A pool of Ceph with nothing behind it.
    pub(crate) fn pool() -> RbdPool {
        RbdPool {
            monitors: "v2:10.0.0.1:3300".to_owned(),
            user: "client.vmseal".to_owned(),
            keyring: Some("/etc/ceph/keyring".into()),
            pool: "vms".to_owned(),
            namespace: None,
            data_pool: Some("ec".to_owned()),
            messenger: Messenger::Secure,
            create: None,
            changed: None,
        }
    }

    /// Makes a script. Another process writes it: if this one did, a child that another test starts meanwhile would have it open for writing,
    /// too, and nobody could run it (`ETXTBSY`).
    pub(crate) fn write_script(program: &Path, text: &str) {
        let mut shell = Command::new("/bin/sh");
        shell.args(["-c", r#"printf %s "$1" >"$0" && chmod 700 "$0""#]).arg(program).arg(text);
        assert!(shell.status().unwrap().success(), "{} is not written", program.display());
    }

    #[test]
    fn arguments_are_those_of_vmseal_rbd() {
        let arguments = arguments(Path::new("/run/v/rbd"), Path::new("/srv/ceph"), &pool());
        let arguments: Vec<_> = arguments.iter().map(|it| it.to_string_lossy()).collect();
        assert_eq!(
            arguments.join(" "),
            "--monitors v2:10.0.0.1:3300 --user client.vmseal --pool vms --messenger secure --run-dir /run/v/rbd --keyring /etc/ceph/keyring --data-pool ec /srv/ceph"
        );
    }

    #[test]
    fn a_mount_in_the_clear_is_refused_where_connections_are_to_be_encrypted() {
        let place = Path::new("/srv/ceph");
        let check = |asked, in_force| {
            check_messenger(place, &RbdPool { messenger: asked, ..pool() }, in_force)
        };
        let refused = check(Messenger::Secure, Some(Messenger::Crc)).unwrap_err();
        assert_eq!(refused.code, ErrorCode::WrongState);
        assert!(refused.detail.contains("umount /srv/ceph"), "{refused}");
        for in_force in [None, Some(Messenger::Secure)] {
            check(Messenger::Secure, in_force).unwrap();
        }
        for in_force in [None, Some(Messenger::Secure), Some(Messenger::Crc)] {
            check(Messenger::Crc, in_force).unwrap();
        }
        // It may be mounted by the former way yet.
        let changed = RbdPool { changed: Some(jiff::Timestamp::UNIX_EPOCH), ..pool() };
        check_messenger(place, &changed, Some(Messenger::Crc)).unwrap();
    }

    #[test]
    fn the_process_of_a_mount_is_told_by_its_command_line() {
        let directory = tempfile::tempdir().unwrap();
        let (program, place) = (directory.path().join(PROGRAM_NAME), directory.path().join("pool"));
        std::os::unix::fs::symlink("/bin/sh", &program).unwrap();
        let start = |option: &str, place: &Path| {
            let mut command = Command::new(&program);
            command.args(["-c", "read nothing", option]).arg(place).stdin(Stdio::piped());
            let child = command.spawn().unwrap();
            // A spawn may return before the new program has its name and its command line.
            let line = format!("/proc/{}/cmdline", child.id());
            let last = [place.as_os_str().as_bytes(), b"\0"].concat();
            let give_up = Instant::now() + MOUNT_TIMEOUT;
            while !std::fs::read(&line).unwrap().ends_with(&last) {
                assert!(Instant::now() < give_up, "{line} is not what was started");
                std::thread::sleep(MOUNT_INTERVAL);
            }
            child
        };
        let mut others =
            [start("--check", &place), start("--run-dir", &directory.path().join("other"))];
        assert_eq!(process_of(&place), None);
        let mut serving = start("--run-dir", &place);
        assert_eq!(process_of(&place), Some(serving.id()));
        let told = hung(&place);
        assert_eq!(told.code, ErrorCode::TimedOut);
        assert!(told.detail.contains(&format!("(kill -9 {})", serving.id())), "{told}");
        serving.kill().unwrap();
        serving.wait().unwrap();
        for other in &mut others {
            other.kill().unwrap();
            other.wait().unwrap();
        }
    }

    #[test]
    fn pools_are_made_where_that_is_asked() {
        let failure_domain = Some(FailureDomain::Rack);
        let layout = Some(Layout::ErasureCoding);
        let asked = NewPools { failures: 1, layout, failure_domain, ..NewPools::default() };
        let told = |asked| {
            let pool = RbdPool { create: Some(asked), ..pool() };
            let arguments = arguments(Path::new("/run/v/rbd"), Path::new("/srv/ceph"), &pool);
            let arguments: Vec<_> = arguments.iter().map(|it| it.to_string_lossy()).collect();
            arguments.join(" ")
        };
        assert!(told(asked).ends_with("--create 1,erasure-coding,rack /srv/ceph"));
        let chunks = NewPools { data_chunks: Some(8), ..asked };
        let with_chunks = "--create 1,erasure-coding,rack --data-chunks 8 /srv/ceph";
        assert!(told(chunks).ends_with(with_chunks), "{}", told(chunks));
        let compressed = NewPools { compression: Some(Compression::Force), ..asked };
        let with_mode = "--create 1,erasure-coding,rack --compression force /srv/ceph";
        assert!(told(compressed).ends_with(with_mode), "{}", told(compressed));
    }

    #[test]
    fn a_program_that_fails_says_why_and_nothing_is_mounted() {
        let directory = tempfile::tempdir().unwrap();
        let program = directory.path().join("vmseal-rbd");
        let run_dir = directory.path().join("run");
        let place = directory.path().join("mount");
        let start = |pool: &RbdPool, key: Option<&SecretBytes>| {
            let by = (program.as_path(), run_dir.as_path());
            start_and_wait(by, &place, pool, key, MOUNT_TIMEOUT).unwrap_err()
        };
        let missing = start(&pool(), None);
        assert!(missing.detail.contains("install vmseal-rbd"), "{missing}");
        write_script(&program, "#!/bin/sh\necho no monitor answers >&2\nexit 1\n");
        if starts_by_systemd() {
            return;
        }
        for _ in 0..2 {
            let refused = start(&pool(), None);
            assert_eq!(refused.code, ErrorCode::Unreachable);
            let said = refused.detail.matches("no monitor answers").count();
            assert_eq!(said, 1, "{refused}");
        }
        // A key that the server holds is on its standard input alone.
        let said = "#!/bin/sh\necho \"$(cat) $*\" >&2\nexit 1\n";
        write_script(&program, said);
        let key = SecretBytes::from_wiped(&mut b"AQ-the-key".to_vec()).unwrap();
        let held = RbdPool { keyring: None, ..pool() };
        let refused = start(&held, Some(&key));
        assert!(refused.detail.contains("AQ-the-key --monitors"), "{refused}");
        assert_eq!(refused.detail.matches("AQ-the-key").count(), 1, "{refused}");
        assert!(!is_mounted(&place));
        assert!(!is_mounted(Path::new("/proc")), "something else is mounted there");
    }

    #[test]
    fn a_pool_that_nobody_serves_any_more_is_not_taken_for_one_of_an_earlier_version() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().to_owned();
        let ended = mounted(&DatastoreLocation::Rbd { path: path.clone(), pool: Box::new(pool()) });
        assert_eq!(ended.unwrap_err().code, ErrorCode::Unreachable);
        assert_eq!(mounted(&DatastoreLocation::Dir { path }).unwrap(), None);
    }
}
