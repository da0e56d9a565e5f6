//! A cluster of Ceph's own programs, by `vmseal lab ceph`.

#![allow(clippy::unwrap_used)] // a test that cannot go on ends

use std::ffi::OsStr;
use std::io::{self, BufRead, BufReader};
use std::net::{Ipv4Addr, SocketAddrV4};
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

use nix::mount::{MntFlags, umount2};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::Value;
use tempfile::TempDir;

use crate::experiment::measured;
use crate::installation::next_address;
use crate::process::{has_ended, kill_hard, using};
use crate::{eventually, program};

/// How long `ceph` tries to reach a monitor that may not answer, in seconds.
const CONNECT: &str = "30";

/// The port of the monitor.
const MONITOR_PORT: u16 = 17300;

/// A cluster's directory and address; all of its processes end with the value.
pub struct Cluster {
    home: TempDir,
    listen: SocketAddrV4,
}

impl Cluster {
    /// A directory and an address; nothing runs yet.
    #[must_use]
    pub fn new() -> Self {
        let listen = SocketAddrV4::new(next_address(), MONITOR_PORT);
        Self { home: tempfile::tempdir().unwrap(), listen }
    }

    /// Where all of its files are.
    #[must_use]
    pub fn directory(&self) -> PathBuf {
        self.home.path().join("cluster")
    }

    /// The address of all of its daemons.
    #[must_use]
    pub fn address(&self) -> Ipv4Addr {
        *self.listen.ip()
    }

    /// The monitor's address, as clients are told it.
    #[must_use]
    pub fn monitors(&self) -> String {
        format!("v2:{}/0", self.listen)
    }

    fn command(&self, words: &[&str]) -> Command {
        let mut command = Command::new(program("vmseal").unwrap());
        command.args(["lab", "ceph"]).args(words).arg("--directory").arg(self.directory());
        command.stdin(Stdio::null());
        command
    }

    /// Runs an experiment, given as its file has it, on disks in this cluster. What the report says of it.
    #[must_use]
    pub fn measured(&self, experiment: &str) -> Value {
        measured(experiment, [OsStr::new("--ceph-directory"), self.directory().as_os_str()])
    }

    /// Runs a verb.
    #[must_use]
    pub fn run(&self, words: &[&str]) -> Output {
        let output = self.command(words).output().unwrap();
        self.check_no_keys(&output);
        output
    }

    /// Runs a verb that must succeed; what it prints as JSON.
    pub fn json(&self, words: &[&str]) -> Value {
        let output = self.run(&[words, &["-o", "json"]].concat());
        assert!(output.status.success(), "{words:?}: {}", said(&output));
        serde_json::from_slice(&output.stdout).unwrap()
    }

    /// Runs a verb that must fail with this exit code; what it says.
    pub fn refused(&self, words: &[&str], code: i32) -> String {
        let output = self.run(words);
        assert_eq!(output.status.code(), Some(code), "{words:?}: {}", said(&output));
        said(&output)
    }

    /// Brings it up; its status.
    pub fn up(&self) -> Value {
        self.up_with(&[])
    }

    /// The same with more options.
    pub fn up_with(&self, more: &[&str]) -> Value {
        let listen = self.listen.to_string();
        self.json(&[&["up", "--listen", &listen, "--osd-gib", "2"], more].concat())
    }

    /// Kills an `up` with these options as soon as it says this.
    pub fn up_killed_at(&self, line: &str, more: &[&str]) {
        let listen = self.listen.to_string();
        let words = [&["up", "--listen", &listen, "--osd-gib", "2"], more].concat();
        let mut command = self.command(&words);
        let mut up = command.stderr(Stdio::piped()).stdout(Stdio::null()).spawn().unwrap();
        let lines = BufReader::new(up.stderr.take().unwrap()).lines();
        let mut lines = lines.map(Result::unwrap);
        let mut before = Vec::new();
        let found = lines.any(|said| {
            before.push(said.clone());
            said == line
        });
        up.kill().unwrap();
        up.wait().unwrap();
        assert!(found, "it never said '{line}': {before:?}");
    }

    /// Runs `rbd` as the administrator.
    #[must_use]
    pub fn rbd(&self, words: &[&str]) -> Output {
        let mut command = Command::new("rbd");
        command.arg("-c").arg(self.directory().join("ceph.conf")).args(words);
        command.output().unwrap()
    }

    /// Runs `rados` as the administrator; what it prints.
    pub fn rados(&self, words: &[&str]) -> String {
        let mut command = Command::new("rados");
        command.arg("-c").arg(self.directory().join("ceph.conf")).args(words);
        let output = command.output().unwrap();
        assert!(output.status.success(), "{words:?}: {}", said(&output));
        String::from_utf8(output.stdout).unwrap()
    }

    /// Sets an option of the daemons that `who` names.
    pub fn set(&self, who: &str, option: &str, value: &str) {
        self.ceph(&["config", "set", who, option, value]);
    }

    /// `ceph` as the administrator.
    fn ceph_command(&self, words: &[&str]) -> Command {
        let mut command = Command::new("ceph");
        command.arg("-c").arg(self.directory().join("ceph.conf")).args(words);
        command
    }

    /// Runs `ceph` as the administrator.
    pub fn ceph(&self, words: &[&str]) {
        let output = self.ceph_command(words).output().unwrap();
        assert!(output.status.success(), "{words:?}: {}", said(&output));
    }

    /// The same where a test may be failing: nothing here panics, and a monitor that does not answer is not waited for.
    pub fn try_ceph(&self, words: &[&str]) -> io::Result<Output> {
        let within = ["--connect-timeout", CONNECT];
        self.ceph_command(&[&within[..], words].concat()).output()
    }

    /// Asks the cluster as the administrator; what it answers as JSON.
    #[must_use]
    pub fn ask(&self, words: &[&str]) -> Value {
        let output = self.ceph_command(&[words, &["-f", "json"]].concat()).output().unwrap();
        assert!(output.status.success(), "{words:?}: {}", said(&output));
        serde_json::from_slice(&output.stdout).unwrap()
    }

    /// The processes of its daemons whose names begin so, such as `osd.`; of all of them with nothing.
    #[must_use]
    pub fn daemons(&self, name: &str) -> Vec<i32> {
        let status = self.json(&["status"]);
        let daemons = status["daemons"].as_array().unwrap().iter();
        let named = daemons.filter(|it| it["name"].as_str().is_some_and(|it| it.starts_with(name)));
        named.map(|it| it["pid"].as_i64().unwrap().try_into().unwrap()).collect()
    }

    /// Has these daemons stand still (SIGSTOP): the cluster takes them for alive for a while, and they answer nothing.
    #[must_use]
    pub fn stop_daemons(&self, name: &str) -> StoppedDaemons {
        StoppedDaemons::stop(self.daemons(name))
    }

    /// Kills the daemons whose names begin so, such as `osd.1`; all of them with nothing. What they had is free then for those that `up`
    /// starts in their place.
    pub fn kill_daemons(&self, name: &str) {
        let daemons = self.daemons(name);
        assert!(!daemons.is_empty(), "the cluster has no daemon '{name}'");
        daemons.iter().copied().for_each(kill_hard);
        eventually("the killed daemons have ended", || {
            daemons.iter().copied().all(has_ended).then_some(())
        })
        .unwrap();
    }

    /// The UUIDs of its OSDs.
    #[must_use]
    pub fn osd_uuids(&self) -> Vec<String> {
        let dump = self.ask(&["osd", "dump"]);
        let osds = dump["osds"].as_array().unwrap();
        osds.iter().map(|osd| osd["uuid"].as_str().unwrap().to_owned()).collect()
    }

    /// The keyring of a user, who has the rights in these pools that docs/ceph.md gives it; it is made if it is not there.
    #[must_use]
    pub fn user(&self, user: &str, pools: &[&str]) -> PathBuf {
        let keyring = self.home.path().join(format!("ceph.{user}.keyring"));
        let rights: Vec<_> = pools.iter().map(|pool| format!("profile rbd pool={pool}")).collect();
        let rights = rights.join(", ");
        let make = ["auth", "get-or-create", user, "mon", "profile rbd", "osd", &rights, "-o"];
        let output = self.ceph_command(&make).arg(&keyring).output().unwrap();
        assert!(output.status.success(), "{}", said(&output));
        keyring
    }

    /// Stores content in an image.
    pub fn import(&self, content: &[u8], image: &str, more: &[&str]) {
        let from = self.home.path().join("content");
        std::fs::write(&from, content).unwrap();
        let output = self
            .rbd(&[&["import", "--no-progress", from.to_str().unwrap(), image][..], more].concat());
        assert!(output.status.success(), "{image}: {}", said(&output));
    }

    /// Reads an image.
    pub fn export(&self, image: &str) -> Vec<u8> {
        self.export_if_there(image).unwrap_or_else(|| panic!("there is no image {image}"))
    }

    /// Reads an image; nothing if there is none of this name, or not any more.
    pub fn export_if_there(&self, image: &str) -> Option<Vec<u8>> {
        let output = self.rbd(&["export", "--no-progress", image, "-"]);
        if said(&output).contains("(2) No such file or directory") {
            return None;
        }
        assert!(output.status.success(), "{image}: {}", said(&output));
        Some(output.stdout)
    }

    /// Finds that none of the cluster's keys is in what a program said.
    fn check_no_keys(&self, output: &Output) {
        let text = [&output.stdout[..], &output.stderr].concat();
        let text = String::from_utf8_lossy(&text).into_owned();
        for path in files(&self.directory().join("keys")) {
            let Ok(keyring) = std::fs::read_to_string(&path) else { continue };
            let of_block = path.extension().is_some_and(|it| it == "luks");
            assert!(!of_block || !text.contains(&keyring), "the key of a block was printed");
            let mut keys = keyring.lines().filter_map(|line| line.trim().strip_prefix("key = "));
            assert!(!keys.any(|key| text.contains(key)), "a key was printed");
        }
    }
}

/// Daemons that stand still until this is dropped.
pub struct StoppedDaemons(Vec<i32>);

impl StoppedDaemons {
    /// Stops these processes.
    #[must_use]
    pub fn stop(daemons: Vec<i32>) -> Self {
        assert!(!daemons.is_empty(), "the cluster has no such daemon");
        let stopped = Self(daemons);
        stopped.signal(Signal::SIGSTOP);
        stopped
    }

    fn signal(&self, signal: Signal) {
        // One that has ended needs none.
        for daemon in &self.0 {
            let _ = kill(Pid::from_raw(*daemon), signal);
        }
    }
}

impl Drop for StoppedDaemons {
    fn drop(&mut self) {
        self.signal(Signal::SIGCONT);
    }
}

impl Default for Cluster {
    fn default() -> Self {
        Self::new()
    }
}

impl Drop for Cluster {
    fn drop(&mut self) {
        using(&self.directory()).into_iter().for_each(kill_hard);
        for place in mounts_below(&self.directory()) {
            let _ = umount2(&place, MntFlags::MNT_DETACH);
        }
    }
}

/// What is mounted below a directory.
#[must_use]
pub fn mounts_below(directory: &Path) -> Vec<PathBuf> {
    let text = std::fs::read_to_string("/proc/self/mountinfo").unwrap();
    let places = text.lines().filter_map(|line| line.split(' ').nth(4)).map(PathBuf::from);
    places.filter(|it| it.starts_with(directory)).collect()
}

/// Whether the blocks of OSDs can be encrypted here: it takes QEMU's programs, and root for mounts of FUSE. Without these
/// this says so.
#[must_use]
pub fn can_encrypt_osds() -> bool {
    let missing = ["qemu-storage-daemon", "qemu-img"]
        .into_iter()
        .find(|program| Command::new(program).arg("--version").output().is_err());
    let fuse = std::fs::File::options().read(true).write(true).open("/dev/fuse");
    let why = match (missing, nix::unistd::geteuid().is_root(), fuse) {
        (Some(program), ..) => {
            format!("there is no {program} (packages qemu-system-common qemu-utils)")
        }
        (None, false, _) => "it takes root".to_owned(),
        (None, true, Err(error)) => format!("/dev/fuse: {error}"),
        (None, true, Ok(_)) => return true,
    };
    crate::skipped(why);
    false
}

/// What a program has said on standard error.
#[must_use]
pub fn said(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

/// All files below a directory, also sockets; none if it is not there.
#[must_use]
pub fn files(directory: &Path) -> Vec<PathBuf> {
    let (mut found, mut left) = (Vec::new(), vec![directory.to_owned()]);
    while let Some(directory) = left.pop() {
        for entry in std::fs::read_dir(directory).into_iter().flatten().flatten() {
            match entry.file_type().unwrap().is_dir() {
                true => left.push(entry.path()),
                false => found.push(entry.path()),
            }
        }
    }
    found
}

/// The programs of Ceph are Debian's packages; without them this says so, and tests nothing.
#[must_use]
pub fn is_installed() -> bool {
    let missing = ["ceph-mon", "ceph-mgr", "ceph-osd", "ceph", "rbd"]
        .into_iter()
        .find(|program| Command::new(program).arg("--version").output().is_err());
    if let Some(program) = missing {
        crate::skipped(format_args!(
            "there is no {program} (packages ceph-mon ceph-mgr ceph-osd ceph-common)"
        ));
    }
    missing.is_none()
}
