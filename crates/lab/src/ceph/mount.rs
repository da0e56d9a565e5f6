//! A pool as files: `vmseal-rbd` serves it, as it does for an agent.

use std::ffi::OsString;
use std::fs::{self, DirBuilder, File};
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{DirBuilderExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use nix::mount::{MntFlags, umount2};
use tempfile::TempDir;
use vmseal_api::datastore::RbdPool;
use vmseal_api::rbd::{MOUNTED_ATTRIBUTE, MOUNTED_MAX, Mounted};

use super::error::CephError;
use super::tools;
use crate::children;
use crate::stop::{self, Left, Serves};

/// The program.
const PROGRAM: &str = "vmseal-rbd";
/// How long mounting may take, as for an agent: the program itself gives up connecting after 30 seconds.
const START: Duration = Duration::from_secs(40);
/// How long the program may take to end once nothing is mounted: it closes images, and leaves the cluster.
const STOP: Duration = Duration::from_secs(10);
/// The same once a signal has asked for the end: where the cluster does not answer it never closes them.
const STOP_AT_THE_END: Duration = Duration::from_secs(2);
/// How long a killed one may take.
const KILLED: Duration = Duration::from_secs(10);
/// How often it is looked whether it has.
const LOOK_EVERY: Duration = Duration::from_millis(20);

/// A mounted pool. It is unmounted when this is dropped.
#[derive(Debug)]
pub struct Mount {
    process: Child,
    directory: PathBuf,
    channel: PathBuf,
    _serves: Serves,
    _left: Left,
    /// With its log and the record of its process.
    _home: TempDir,
}

impl Mount {
    /// Mounts a pool in a directory of its own.
    ///
    /// # Errors
    /// The program cannot be run, or does not mount it in time; what it said is in the error.
    pub fn new(program: &Path, pool: &RbdPool) -> Result<Self, CephError> {
        let temporary = std::env::temp_dir();
        let home = tempfile::Builder::new().prefix("vmseal-lab-").tempdir_in(&temporary);
        let home = home.map_err(|source| CephError::File { path: temporary, source })?;
        let (directory, log) = (home.path().join("pool"), home.path().join("log"));
        let made = DirBuilder::new().mode(0o700).create(&directory);
        made.map_err(|source| CephError::File { path: directory.clone(), source })?;
        let mut command = Command::new(program);
        command.args(arguments(&home.path().join("run"), pool)).arg(&directory);
        let opened = File::create(&log).and_then(|file| Ok((file.try_clone()?, file)));
        let (output, errors) =
            opened.map_err(|source| CephError::File { path: log.clone(), source })?;
        command.stdin(Stdio::null()).stdout(output).stderr(errors);
        let process = command.spawn().map_err(|source| {
            let program = program.display().to_string();
            CephError::Program { program, source }
        })?;
        let at = directory.display();
        let left = Left::new(format!("the mount of a pool: umount -l {at}"));
        let serves = Serves::new(process.id());
        let mut mount = Self {
            process,
            directory,
            channel: PathBuf::new(),
            _serves: serves,
            _left: left,
            _home: home,
        };
        let mounted = mount.until_mounted().and_then(|()| channel(&mount.directory));
        mount.channel = mounted.map_err(|what| {
            let said = tools::end_of(&log);
            CephError::Mount { pool: pool.pool.clone(), why: format!("{what}: {said}") }
        })?;
        Ok(mount)
    }

    fn until_mounted(&mut self) -> Result<(), String> {
        let failed = |error: io::Error| error.to_string();
        let below = self.directory.parent().unwrap_or(&self.directory).to_owned();
        let outside = fs::metadata(below).map_err(failed)?.dev();
        let begun = Instant::now();
        while fs::metadata(&self.directory).map_err(failed)?.dev() == outside {
            if let Some(status) = self.process.try_wait().map_err(failed)? {
                return Err(format!("{PROGRAM} ended with {status}"));
            }
            stop::check().map_err(|stopped| stopped.to_string())?;
            if begun.elapsed() > START {
                return Err(format!("{PROGRAM} has not mounted it within {} s", START.as_secs()));
            }
            std::thread::sleep(LOOK_EVERY);
        }
        Ok(())
    }

    /// Where it is mounted.
    #[must_use]
    pub fn directory(&self) -> &Path {
        &self.directory
    }

    /// The socket by which filters get to its images without its files.
    #[must_use]
    pub fn channel(&self) -> &Path {
        &self.channel
    }

    /// The process that serves it.
    #[must_use]
    pub fn process(&self) -> u32 {
        self.process.id()
    }
}

impl Drop for Mount {
    fn drop(&mut self) {
        end(&self.directory);
        children::end(&mut self.process);
    }
}

/// The socket that a mount says. What is measured is to go by it, so another `vmseal-rbd`, which has none, is refused.
fn channel(mounted: &Path) -> Result<PathBuf, String> {
    let mut told = vec![0; MOUNTED_MAX];
    let length = rustix::fs::getxattr(mounted, MOUNTED_ATTRIBUTE, &mut told[..]);
    let length = length.map_err(|error| format!("{PROGRAM} does not say who it is: {error}"))?;
    let mounted: Mounted = serde_json::from_slice(&told[..length])
        .map_err(|error| format!("{PROGRAM} says something else: {error}"))?;
    let none = || format!("{PROGRAM} has no socket for filters: it is of an earlier version");
    mounted.channel.map(PathBuf::from).ok_or_else(none)
}

/// The arguments of the program, but for where the pool is mounted.
fn arguments(records: &Path, pool: &RbdPool) -> Vec<OsString> {
    let keyring = pool.keyring.iter().flat_map(|file| [OsString::from("--keyring"), file.into()]);
    let data = pool.data_pool.iter().flat_map(|name| [OsString::from("--data-pool"), name.into()]);
    let arguments: [OsString; 10] = [
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
    keyring.chain(data).chain(arguments).collect()
}

/// Unmounts what `vmseal-rbd` has mounted at a place, and waits until it has ended; else it is killed.
pub fn end(place: &Path) {
    // Where nothing is mounted, that is as it should be.
    let _ = umount2(place, MntFlags::MNT_DETACH);
    let begun = Instant::now();
    while let Some(pid) = serving(place) {
        let stop = if stop::asked() { STOP_AT_THE_END } else { STOP };
        if begun.elapsed() > stop + KILLED {
            return;
        }
        if begun.elapsed() > stop {
            children::kill_hard(pid);
        }
        std::thread::sleep(LOOK_EVERY);
    }
}

/// The process that serves a place.
fn serving(place: &Path) -> Option<i32> {
    let entries = fs::read_dir("/proc").ok()?.flatten();
    let mut pids = entries.filter_map(|entry| entry.file_name().to_str()?.parse().ok());
    pids.find(|pid| {
        // Empty for one that has ended.
        serves(&fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default(), place)
    })
}

/// Whether a command line is that of the process which serves a place.
fn serves(line: &[u8], place: &Path) -> bool {
    let mut words = line.split(|byte| *byte == 0).filter(|word| !word.is_empty());
    let program = words.next().and_then(|word| word.rsplit(|byte| *byte == b'/').next());
    program == Some(PROGRAM.as_bytes()) && words.next_back() == Some(place.as_os_str().as_bytes())
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use vmseal_api::datastore::Messenger;

    use super::*;

    fn pool() -> RbdPool {
        RbdPool { messenger: Messenger::Crc, ..crate::ceph::client::tests::pool() }
    }

    #[test]
    fn only_what_serves_the_place_is_ended() {
        let place = Path::new("/tmp/a/pool");
        let serves = |line: &str| serves(line.replace(' ', "\0").as_bytes(), place);
        assert!(serves("vmseal-rbd --pool some /tmp/a/pool "));
        assert!(serves("/usr/bin/vmseal-rbd --pool some /tmp/a/pool "));
        for line in [
            "",
            "vmseal-rbd --pool some /tmp/b/pool ",
            "vmseal-rbd --run-dir /tmp/a/pool /tmp/b ",
            "systemd-run -- vmseal-rbd /tmp/a/pool ",
            "not-vmseal-rbd /tmp/a/pool ",
        ] {
            assert!(!serves(line), "{line}");
        }
    }

    #[test]
    fn data_of_chunks_has_a_pool_of_its_own() {
        let of = |pool: &RbdPool| {
            let words = arguments(Path::new("/run"), pool).into_iter();
            words.map(|it| it.into_string().unwrap()).collect::<Vec<_>>().join(" ")
        };
        assert!(!of(&pool()).contains("--data-pool"));
        let coded = RbdPool { data_pool: Some("chunks".to_owned()), ..pool() };
        assert!(of(&coded).contains("--data-pool chunks --monitors"), "{}", of(&coded));
    }

    #[test]
    fn a_program_that_mounts_nothing_says_why() {
        let place = tempfile::tempdir().unwrap();
        let program = place.path().join("program");
        let missing = Mount::new(&program, &pool()).unwrap_err().to_string();
        assert!(missing.contains("cannot be run"), "{missing}");
        fs::write(&program, "#!/bin/sh\necho \"$@\" >&2\nexit 1\n").unwrap();
        fs::set_permissions(&program, PermissionsExt::from_mode(0o700)).unwrap();
        let refused = Mount::new(&program, &pool()).unwrap_err().to_string();
        for said in
            ["'some' is not mounted", "exit status: 1", "--keyring /x/keyring", "--messenger crc"]
        {
            assert!(refused.contains(said), "{said}: {refused}");
        }
    }
}
