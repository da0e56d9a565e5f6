//! `vmseal-rbd` on a real Ceph cluster: the files of a pool are files, two hosts see each other's changes and locks, and never write
//! one image.

#![allow(clippy::unwrap_used)] // a test that cannot go on ends

use std::ffi::CString;
use std::fs::{File, OpenOptions};
use std::io::{ErrorKind, Read, Seek, SeekFrom, Write};
use std::os::unix::fs::{FileExt, MetadataExt, chown};
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{self, Receiver};
use std::time::{Duration, Instant};

use nix::fcntl::{FallocateFlags, FcntlArg, fallocate, fcntl};
use nix::mount::{MntFlags, umount2};
use nix::sys::signal::{Signal, kill};
use nix::sys::statvfs::statvfs;
use nix::unistd::{Pid, Whence, lseek};
use vmseal_api::rbd::{FENCING_ATTRIBUTE, POOLS_ATTRIBUTE, STATE_ATTRIBUTE};
use vmseal_tests::ceph::{Cluster, is_installed, said};
use vmseal_tests::ceph_pool::Pool;
use vmseal_tests::{eventually, program};

/// More than a file that is an object can have.
const LONG: u64 = 8 << 20;

/// How many ask what only monitors know: several times as many as there are threads of the mount that take requests.
const ASKERS: usize = 24;

/// How long they ask again and again: longer than the mount takes the monitors' last answer for good.
const ASKING: Duration = Duration::from_secs(8);

/// Within what time each question and each write is over, on a machine that is busy: without monitors they hung until these went on.
const ANSWERED: Duration = Duration::from_secs(60);

/// How a host gets to a pool.
struct Access {
    monitors: String,
    pool: String,
    user: String,
    keyring: PathBuf,
}

/// A mount of a pool, as one host has it.
pub(crate) struct Mount {
    directory: tempfile::TempDir,
    process: Child,
    access: Access,
}

impl Access {
    fn serve(&self, directory: &Path) -> Child {
        let mut command = Command::new(program("vmseal-rbd").unwrap());
        command.args(["--monitors", &self.monitors, "--user", &self.user, "--keyring"]);
        command.arg(&self.keyring).args(["--pool", &self.pool, "--messenger", "crc"]);
        command.arg("--run-dir").arg(directory.join("run")).arg(directory.join("pool"));
        let log = OpenOptions::new().create(true).append(true).open(directory.join("log")).unwrap();
        command.stdin(Stdio::null()).stdout(log.try_clone().unwrap()).stderr(log);
        command.spawn().unwrap()
    }
}

impl Mount {
    pub(crate) fn new(pool: &Pool) -> Self {
        Self::of_user(pool, &pool.user, pool.keyring())
    }

    fn of_user(pool: &Pool, user: &str, keyring: PathBuf) -> Self {
        let directory = tempfile::tempdir().unwrap();
        std::fs::create_dir(directory.path().join("pool")).unwrap();
        let (monitors, user) = (pool.cluster.monitors(), user.to_owned());
        let access = Access { monitors, pool: pool.name.clone(), user, keyring };
        let process = access.serve(directory.path());
        let mount = Self { directory, process, access };
        mount.wait();
        mount
    }

    fn wait(&self) {
        eventually("the pool is mounted", || {
            let there = self.path("").metadata().ok()?.dev();
            (there != self.directory.path().metadata().unwrap().dev()).then_some(())
        })
        .unwrap_or_else(|error| panic!("{error}: {}", self.log()));
    }

    pub(crate) fn log(&self) -> String {
        std::fs::read_to_string(self.directory.path().join("log")).unwrap_or_default()
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.directory.path().join("pool").join(name)
    }

    fn signal(&self, signal: Signal) {
        kill(Pid::from_raw(self.process.id().cast_signed()), signal).unwrap();
    }

    /// Stops it, and waits until none of its threads does anything: one tells the others when it gets a processor.
    fn stop(&self) {
        self.signal(Signal::SIGSTOP);
        let stands_still = |task: &Path| {
            let stat = std::fs::read_to_string(task.join("stat")).unwrap_or_default();
            stat.rsplit_once(") ").is_none_or(|(_, rest)| rest.starts_with('T'))
        };
        eventually("every thread has stopped", || {
            let tasks = std::fs::read_dir(format!("/proc/{}/task", self.process.id())).unwrap();
            tasks.flatten().all(|task| stands_still(&task.path())).then_some(())
        })
        .unwrap();
    }

    /// It dies, and another process serves the same mount.
    pub(crate) fn dies(&mut self) {
        self.process.kill().unwrap();
        self.process.wait().unwrap();
        self.process = self.access.serve(self.directory.path());
        self.wait();
    }

    /// Its connection to the kernel ends while files are open, and the process ends: whether it has closed their images. It says so where its
    /// cluster is too slow for that.
    pub(crate) fn is_forced_off(&mut self) -> bool {
        let before = self.log().len();
        // The connection ends first. The mount stays, as it is busy.
        let unmounted = umount2(&self.path(""), MntFlags::MNT_FORCE);
        assert!(matches!(unmounted, Ok(()) | Err(nix::errno::Errno::EBUSY)), "{unmounted:?}");
        let ended = eventually("the process ends", || self.process.try_wait().unwrap());
        let log = self.log();
        let status = ended.unwrap_or_else(|error| panic!("{error}: {log}"));
        let says_so = log[before..].contains("requests have not ended");
        assert!(status.success() || (status.code() == Some(1) && says_so), "{status}: {log}");
        status.success()
    }

    fn unmount(&mut self) {
        let status = Command::new("umount").arg(self.path("")).status().unwrap();
        assert!(status.success());
        assert!(self.process.wait().unwrap().success(), "{}", self.log());
    }
}

impl Drop for Mount {
    fn drop(&mut self) {
        // Each process that has served it mounted it again, above the mount of the one before.
        while umount2(&self.path(""), MntFlags::MNT_DETACH).is_ok() {}
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

pub(crate) fn open(path: &Path) -> std::io::Result<File> {
    File::options().read(true).write(true).open(path)
}

pub(crate) fn make(path: &Path) -> std::io::Result<File> {
    File::options().read(true).write(true).create_new(true).open(path)
}

/// Tries to lock a whole file.
pub(crate) fn lock(file: &File, kind: i32) -> bool {
    let whole = libc::flock {
        l_type: kind as libc::c_short,
        l_whence: libc::SEEK_SET as libc::c_short,
        l_start: 0,
        l_len: 0,
        l_pid: 0,
    };
    match fcntl(file, FcntlArg::F_OFD_SETLK(&whole)) {
        Ok(_) => true,
        Err(nix::errno::Errno::EAGAIN) => false,
        Err(error) => panic!("{error}"),
    }
}

fn names(directory: &Path) -> Vec<String> {
    let entries = std::fs::read_dir(directory).unwrap();
    let mut names: Vec<_> =
        entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    names
}

fn images(cluster: &Cluster) -> usize {
    let listed = cluster.rbd(&["ls", "vmseal"]);
    assert!(listed.status.success(), "{}", said(&listed));
    String::from_utf8(listed.stdout).unwrap().lines().count()
}

pub(crate) fn random(length: u64) -> Vec<u8> {
    std::iter::repeat_with(|| fastrand::u8(..)).take(length as usize).collect()
}

#[test]
fn a_pool_is_a_directory_tree_that_hosts_share() {
    if !is_installed() {
        return;
    }
    let pool = Pool::of_own_cluster("crc", false);
    let cluster = &*pool.cluster;
    // How long the cluster takes a client for alive that says nothing: 30 seconds, usually.
    cluster.set("osd", "osd_client_watch_timeout", "12");
    let (mut here, mut there) = (Mount::new(&pool), Mount::new(&pool));
    confined(&here);
    short_files(&here, &there);
    owners(&here, &there);
    long_files(cluster, &here, &there);
    striped_files(&here);
    notes_of_images(cluster, &here, &there);
    states_of_images(cluster, &here, &there);
    rights_to_fence(&pool, &here);
    removals(cluster, &mut here);
    locks(&mut here, &there);
    one_writer(&mut here, &there);
    lengths_of_writers(&here, &there);
    monitors_that_stand_still(cluster, &here);
    a_paused_owner(&here, &there);
    there.unmount();
    trials(cluster);
}

/// Whether the user may have other hosts kept from the pool is known before it is to be done. Nobody is on the blocklist for that.
fn rights_to_fence(pool: &Pool, here: &Mount) {
    let cluster = &*pool.cluster;
    let said = |mount: &Mount| attribute(&mount.path(""), FENCING_ATTRIBUTE).unwrap();
    let told = |mount: &Mount, rights: &str| (said(mount) == rights).then_some(());
    // The first question waits for a second alone.
    eventually("this user may fence", || told(here, "\"allowed\"")).unwrap();
    let (user, keyring) = ("client.alone", cluster.directory().join("client.alone.keyring"));
    let caps =
        ["mon", "allow r", "osd", "profile rbd pool=vmseal", "-o", keyring.to_str().unwrap()];
    cluster.ceph(&[&["auth", "get-or-create", user], &caps[..]].concat());
    let mut other = Mount::of_user(pool, user, keyring);
    eventually("that user may not", || told(&other, "\"not_allowed\"")).unwrap();
    other.unmount();
}

/// Has `vmseal-rbd` try a user of the cluster with these rights in its pools; what it says, where it finds that the user may not mount them.
fn tried(cluster: &Cluster, user: &str, rights: &str) -> Result<(), String> {
    let keyring = cluster.directory().join(format!("{user}.keyring"));
    let caps = ["mon", "profile rbd", "osd", rights, "-o", keyring.to_str().unwrap()];
    cluster.ceph(&[&["auth", "get-or-create", user], &caps[..]].concat());
    let mut command = Command::new(program("vmseal-rbd").unwrap());
    command.args(["--check", "--monitors", &cluster.monitors(), "--user", user, "--keyring"]);
    command.arg(keyring).args(["--pool", "vmseal", "--data-pool", "coded", "--messenger", "crc"]);
    command.arg("/nowhere").stdin(Stdio::null());
    // Where the cluster does not answer it in time it ends itself, without a word.
    let answered = || {
        let output = command.output().unwrap();
        (output.status.signal() != Some(libc::SIGALRM)).then_some(output)
    };
    let output = eventually("a trial is answered in time", answered).unwrap();
    let text = [&output.stdout[..], &output.stderr].concat();
    let text = String::from_utf8_lossy(&text).into_owned();
    if output.status.success() { Ok(()) } else { Err(text) }
}

/// A user who may not do what a mount does is found out, in each pool, and nothing stays of the trial.
fn trials(cluster: &Cluster) {
    let added = cluster.run(&["pool", "add", "coded", "--erasure", "2+1"]);
    assert!(added.status.success(), "{}", said(&added));
    // One that died has left its object in both.
    for pool in ["vmseal", "coded"] {
        cluster.rados(&["-p", pool, "create", "vmseal.trial"]);
    }
    let coded = "profile rbd pool=coded";
    tried(cluster, "client.good", &format!("profile rbd pool=vmseal, {coded}")).unwrap();
    let left = |pool: &str| {
        let objects = cluster.rados(&["-p", pool, "--all", "ls"]);
        objects.contains("vmseal.trial")
    };
    assert!(!left("vmseal") && !left("coded"));
    for (user, rights, refused_in) in [
        ("client.reader", format!("profile rbd-read-only pool=vmseal, {coded}"), "vmseal"),
        ("client.plain", format!("allow rw pool=vmseal, {coded}"), "vmseal"),
        ("client.half", "profile rbd pool=vmseal, allow r pool=coded".to_owned(), "coded"),
    ] {
        let refused = tried(cluster, user, &rights).unwrap_err();
        let said = format!("the pool '{refused_in}' cannot be written to");
        assert!(refused.contains(&said) && refused.contains(user), "{user}: {refused}");
        assert!(!left("vmseal") && !left("coded"), "{user}");
    }
}

/// The process has no capabilities, in any of its threads, has its system calls filtered and its memory limited, and cannot be looked into.
fn confined(here: &Mount) {
    let process = format!("/proc/{}", here.process.id());
    // The thread that has mounted confines itself last.
    eventually("all threads are confined", || {
        let tasks = std::fs::read_dir(format!("{process}/task")).unwrap().flatten();
        let statuses: Vec<_> = tasks
            .filter_map(|task| std::fs::read_to_string(task.path().join("status")).ok())
            .collect();
        let confined = statuses.iter().all(|status| is_confined(status));
        // The main thread, the serving one, and those of librados.
        (confined && statuses.len() > 3).then_some(())
    })
    .unwrap();
    let limits = std::fs::read_to_string(format!("{process}/limits")).unwrap();
    let data = limits.lines().find(|line| line.starts_with("Max data size")).unwrap();
    let limit = (2304_u64 << 20).to_string();
    assert!(data.split_whitespace().skip(3).take(2).all(|value| value == limit), "{data}");
    let mut other = without_capabilities("sleep").arg("60").spawn().unwrap();
    eventually("another process can be looked into", || is_open(other.id()).then_some(())).unwrap();
    other.kill().unwrap();
    other.wait().unwrap();
    assert!(!is_open(here.process.id()), "a process of the same user can read its memory");
}

/// Whether a thread has no capabilities, gets none by starting a program, and has its system calls filtered (`SECCOMP_MODE_FILTER`).
fn is_confined(status: &str) -> bool {
    let is = |name: &str, wanted: u64| {
        let line = status.lines().find_map(|line| line.strip_prefix(name));
        let value = line.and_then(|value| u64::from_str_radix(value.trim(), 16).ok());
        value == Some(wanted)
    };
    ["CapInh:", "CapPrm:", "CapEff:", "CapAmb:"].iter().all(|set| is(set, 0))
        && is("NoNewPrivs:", 1)
        && is("Seccomp:", 2)
}

/// A program of the same user without capabilities: CAP_SYS_PTRACE and, in later kernels, CAP_PERFMON let root look into any process.
fn without_capabilities(program: &str) -> Command {
    let mut command = Command::new("setpriv");
    command.args(["--bounding-set", "-all", program]);
    command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
    command
}

/// Whether such a program can look into a process: into one that may be dumped it can.
fn is_open(process: u32) -> bool {
    without_capabilities("cat").arg(format!("/proc/{process}/environ")).status().unwrap().success()
}

/// A user that nothing else here has.
const OTHER_USER: u32 = 1_900_000_001;

/// Has a program of that user replace a file as a whole in a directory that it has open, and read it again, as swtpm does; whether it can.
fn replaces_a_file(directory: &Path, content: &str) -> bool {
    let user = OTHER_USER.to_string();
    let script = "cd /proc/self/fd/0 && echo \"$0\" >new && mv -f new state && cat state";
    let mut command = Command::new("setpriv");
    command.args(["--reuid", &user, "--regid", &user, "--clear-groups", "sh", "-c", script]);
    let output = command.arg(content).stdin(File::open(directory).unwrap()).output().unwrap();
    output.status.success() && output.stdout == format!("{content}\n").as_bytes()
}

/// A directory that is given to another user is that user's with the files in it, on the host where it was given away; a file that has a name
/// elsewhere is not.
fn owners(here: &Mount, there: &Mount) {
    let directory = here.path("given");
    std::fs::create_dir(&directory).unwrap();
    assert!(!replaces_a_file(&directory, "first"), "anybody can write there");
    chown(&directory, Some(OTHER_USER), Some(OTHER_USER)).unwrap();
    assert!(replaces_a_file(&directory, "first"));
    assert!(replaces_a_file(&directory, "second"));
    let user = |path: &Path| path.metadata().unwrap().uid();
    let state = directory.join("state");
    assert_eq!((user(&directory), user(&state)), (OTHER_USER, OTHER_USER));
    assert_eq!(std::fs::read(&state).unwrap(), b"second\n");
    assert_eq!((user(&there.path("given")), user(&there.path("given/state"))), (0, 0));
    make(&here.path("elsewhere")).unwrap();
    std::fs::hard_link(here.path("elsewhere"), directory.join("linked")).unwrap();
    assert_eq!(user(&directory.join("linked")), 0, "a file of another place was given away");
    chown(&directory, Some(0), Some(0)).unwrap();
    assert_eq!((user(&directory), user(&state)), (0, 0));
    std::fs::remove_dir_all(&directory).unwrap();
    std::fs::remove_file(here.path("elsewhere")).unwrap();
}

/// Names and short files, as both hosts see them.
fn short_files(here: &Mount, there: &Mount) {
    std::fs::create_dir(here.path("vm")).unwrap();
    make(&here.path("vm/note")).unwrap().write_all(b"first").unwrap();
    assert_eq!(std::fs::read(there.path("vm/note")).unwrap(), b"first");
    assert_eq!(make(&there.path("vm/note")).unwrap_err().kind(), ErrorKind::AlreadyExists);
    // Replaced as a whole.
    std::fs::write(there.path("vm/note.new"), "second").unwrap();
    std::fs::rename(there.path("vm/note.new"), there.path("vm/note")).unwrap();
    assert_eq!(std::fs::read(here.path("vm/note")).unwrap(), b"second");
    assert_eq!(names(&here.path("vm")), ["note"]);
    std::fs::hard_link(here.path("vm/note"), here.path("vm/other")).unwrap();
    assert_eq!(there.path("vm/other").metadata().unwrap().nlink(), 2);
    std::fs::remove_file(there.path("vm/note")).unwrap();
    assert_eq!(std::fs::read(here.path("vm/other")).unwrap(), b"second");
    assert_eq!(
        std::fs::remove_dir(here.path("vm")).unwrap_err().kind(),
        ErrorKind::DirectoryNotEmpty
    );
    std::fs::remove_file(here.path("vm/other")).unwrap();
    std::fs::remove_dir(there.path("vm")).unwrap();
    assert_eq!(here.path("vm").metadata().unwrap_err().kind(), ErrorKind::NotFound);
    let many: Vec<_> = (0..700).map(|number| format!("n{number:04}")).collect();
    std::fs::create_dir(here.path("many")).unwrap();
    many.iter().for_each(|name| drop(make(&here.path("many").join(name)).unwrap()));
    assert_eq!(names(&there.path("many")), many);
    std::fs::remove_dir_all(there.path("many")).unwrap();
}

/// Files that grow beyond an object: images, with holes.
fn long_files(cluster: &Cluster, here: &Mount, there: &Mount) {
    let (before, path) = (images(cluster), here.path("disk"));
    let mut file = make(&path).unwrap();
    file.write_all(b"begins short").unwrap();
    assert_eq!(images(cluster), before, "a short file is an image");
    let content = random(LONG);
    file.write_all_at(&content, 3 << 20).unwrap();
    assert_eq!(images(cluster), before + 1);
    let whole = (3 << 20) + LONG;
    assert_eq!(file.metadata().unwrap().len(), whole);
    file.sync_all().unwrap();
    assert_eq!(there.path("disk").metadata().unwrap().len(), whole);
    let mut read = vec![0; LONG as usize];
    file.read_exact_at(&mut read, 3 << 20).unwrap();
    assert!(read == content);
    let mut begins = [0; 12];
    file.read_exact_at(&mut begins, 0).unwrap();
    assert_eq!(&begins, b"begins short");
    // Beyond its end there is nothing.
    assert_eq!(file.read_at(&mut read, whole).unwrap(), 0);
    assert_eq!(file.read_at(&mut read, whole - 5).unwrap(), 5);
    // What is punched reads as zeroes, to the byte.
    let punch = FallocateFlags::FALLOC_FL_PUNCH_HOLE | FallocateFlags::FALLOC_FL_KEEP_SIZE;
    fallocate(&file, punch, (3 << 20) + 100, 5 << 20).unwrap();
    file.read_exact_at(&mut read, 3 << 20).unwrap();
    let mut expected = content.clone();
    expected[100..100 + (5 << 20)].fill(0);
    assert!(read == expected);
    // Cut, and made longer again.
    file.set_len(4 << 20).unwrap();
    file.set_len(LONG).unwrap();
    file.read_exact_at(&mut read[..4 << 20], 4 << 20).unwrap();
    assert!(read[..4 << 20].iter().all(|byte| *byte == 0));
    // A long one that has little in it.
    let sparse = make(&here.path("sparse")).unwrap();
    sparse.set_len(1 << 40).unwrap();
    sparse.write_all_at(b"far", 1 << 39).unwrap();
    let at = |whence, from| lseek(&sparse, from, whence).map(|at| at as u64);
    assert_eq!(at(Whence::SeekData, 0), Ok(1 << 39));
    let hole = at(Whence::SeekHole, 1 << 39).unwrap();
    assert!(hole > 1 << 39 && hole <= (1 << 39) + (4 << 20), "{hole}");
    assert_eq!(at(Whence::SeekData, hole as i64), Err(nix::errno::Errno::ENXIO));
    // The same from within the object that has it.
    let within = hole - (1 << 20);
    let both = (at(Whence::SeekData, within as i64), at(Whence::SeekHole, within as i64));
    assert_eq!(both, (Ok(within), Ok(hole)));
    file.seek(SeekFrom::Start(0)).unwrap();
    file.read_exact(&mut begins).unwrap();
    // It takes the room of one object, and the other host sees that too.
    for host in [here, there] {
        let room = || host.path("sparse").metadata().unwrap().blocks() * 512;
        let little = || (1..=4 << 20).contains(&room()).then_some(());
        eventually("a sparse file takes little room", little).unwrap();
    }
    drop((file, sparse));
    std::fs::remove_file(&path).unwrap();
    std::fs::remove_file(here.path("sparse")).unwrap();
    assert_eq!(images(cluster), before);
}

fn set_attribute(of: &Path, name: &str, value: &str) -> nix::Result<()> {
    let path = CString::new(of.to_str().unwrap()).unwrap();
    let name = CString::new(name).unwrap();
    let (start, length) = (value.as_ptr().cast(), value.len());
    // SAFETY: the texts outlive the call.
    let set = unsafe { libc::setxattr(path.as_ptr(), name.as_ptr(), start, length, 0) };
    nix::errno::Errno::result(set).map(drop)
}

pub(crate) fn attribute(of: &Path, name: &str) -> nix::Result<String> {
    let path = CString::new(of.to_str().unwrap()).unwrap();
    let name = CString::new(name).unwrap();
    let mut value = vec![0_u8; 4096];
    let start = value.as_mut_ptr().cast();
    // SAFETY: the texts and the buffer outlive the call.
    let got = unsafe { libc::getxattr(path.as_ptr(), name.as_ptr(), start, value.len()) };
    value.truncate(nix::errno::Errno::result(got)? as usize);
    Ok(String::from_utf8(value).unwrap())
}

/// What an image says of itself is metadata that Ceph's own tools show: on both hosts, and whether it is open or not.
fn notes_of_images(cluster: &Cluster, here: &Mount, there: &Mount) {
    use nix::errno::Errno;
    let (path, kek) = (here.path("noted"), "user.vmseal.kek");
    let file = make(&path).unwrap();
    assert_eq!(set_attribute(&path, kek, "p/k1"), Err(Errno::EOPNOTSUPP), "it is no image yet");
    file.set_len(LONG).unwrap();
    assert_eq!(attribute(&path, kek), Err(Errno::ENODATA));
    set_attribute(&path, kek, "p/k1,p/k2").unwrap();
    set_attribute(&path, kek, "p/k2").unwrap();
    for (name, value, error) in [
        ("user.vmseal.path", "elsewhere", Errno::EOPNOTSUPP),
        ("user.vmseal.other", "o", Errno::EOPNOTSUPP),
        (kek, "two\nlines", Errno::EINVAL),
        (kek, "", Errno::EINVAL),
    ] {
        assert_eq!(set_attribute(&path, name, value), Err(error), "{name}");
    }
    let listed = cluster.rbd(&["ls", "vmseal"]);
    let listed = String::from_utf8(listed.stdout).unwrap();
    let noted = listed.lines().find_map(|image| {
        let noted = cluster.rbd(&["image-meta", "list", &format!("vmseal/{image}")]);
        let noted = String::from_utf8(noted.stdout).unwrap();
        noted.contains("noted").then_some(noted)
    });
    let noted = noted.unwrap();
    assert!(noted.contains("vmseal.kek") && noted.contains("p/k2"), "{noted}");
    assert_eq!(attribute(&there.path("noted"), kek).as_deref(), Ok("p/k2"));
    assert_eq!(set_attribute(&there.path("noted"), kek, "q"), Err(Errno::EBUSY), "it has no lock");
    drop(file);
    eventually("an image that is not open is noted", || {
        set_attribute(&there.path("noted"), kek, "p/k3").ok()
    })
    .unwrap();
    assert_eq!(attribute(&path, kek).as_deref(), Ok("p/k3"));
    let (of, name) = (CString::new(path.to_str().unwrap()).unwrap(), CString::new(kek).unwrap());
    // SAFETY: the texts outlive the call.
    let remove = || Errno::result(unsafe { libc::removexattr(of.as_ptr(), name.as_ptr()) });
    assert_eq!(remove(), Ok(0));
    assert_eq!(remove(), Err(Errno::ENODATA));
    std::fs::remove_file(&path).unwrap();
}

/// An image is in another state once anybody has had it open to be written, with whatever program. Who opens it can still tell.
fn states_of_images(cluster: &Cluster, here: &Mount, there: &Mount) {
    use nix::errno::Errno;
    let (path, elsewhere) = (here.path("state"), there.path("state"));
    let state = |of: &Path| attribute(of, STATE_ATTRIBUTE);
    let at_rest = || eventually("nobody has the image open", || state(&path).ok()).unwrap();
    let file = make(&path).unwrap();
    assert_eq!(state(&path), Err(Errno::EOPNOTSUPP), "it is no image yet");
    file.set_len(LONG).unwrap();
    assert_eq!(state(&path), Err(Errno::EBUSY), "it is written here");
    assert_eq!(state(&elsewhere), Err(Errno::EBUSY), "it is written on another host");
    drop(file);
    let first = at_rest();

    assert_eq!(std::fs::read(&elsewhere).unwrap().len() as u64, LONG);
    assert_eq!(state(&elsewhere), Ok(first.clone()), "it was only read");
    let file = OpenOptions::new().read(true).write(true).open(&elsewhere).unwrap();
    assert_eq!(state(&elsewhere), Ok(first.clone()), "as it was found");
    assert_eq!(state(&path), Err(Errno::EBUSY));
    file.write_all_at(b"b", 0).unwrap();
    assert_eq!(state(&elsewhere), Err(Errno::EBUSY), "it was written since");
    drop(file);
    let second = at_rest();
    assert_ne!(second, first);

    let image = format!("vmseal/vmseal.{:016x}", path.metadata().unwrap().ino());
    let set = cluster.rbd(&["image-meta", "set", &image, "a", "b"]);
    assert!(set.status.success(), "{}", said(&set));
    assert_ne!(at_rest(), second, "another program had it");

    // Who has it open may take its lock just before it is opened here, and gives it away then.
    let mut other = Command::new("rbd");
    other.arg("-c").arg(cluster.directory().join("ceph.conf")).args(["watch", &image]);
    let mut other = other.stdin(Stdio::piped()).stdout(Stdio::null()).spawn().unwrap();
    let has_it = || {
        let status = String::from_utf8(cluster.rbd(&["status", &image]).stdout).unwrap();
        status.contains("watcher=").then_some(())
    };
    eventually("another program has the image open", has_it).unwrap();
    let file = OpenOptions::new().read(true).write(true).open(&path).unwrap();
    assert_eq!(state(&path), Err(Errno::EBUSY), "another program may have written");
    drop((file, other.stdin.take()));
    other.wait().unwrap();
    std::fs::remove_file(&path).unwrap();
}

/// Images are cut into objects as their directory says when they are made, and holes of striped ones are where they are.
fn striped_files(here: &Mount) {
    let directory = here.path("striped");
    std::fs::create_dir(&directory).unwrap();
    let set = |value: &str| set_attribute(&directory, "user.vmseal.image-layout", value);
    set(r#"{"object_size":3}"#).unwrap_err();
    set(r#"{"object_size":1048576,"stripe_unit":65536,"stripe_count":4}"#).unwrap();
    let path = directory.join("image");
    let mut file = make(&path).unwrap();
    file.set_len(4 * LONG).unwrap();
    // Within the second period of four objects, so that the bytes are in several of them.
    let (at, data) = ((4 << 20) + (192 << 10), random(300 << 10));
    file.write_all_at(&data, at).unwrap();
    file.sync_all().unwrap();
    let seek = |from: u64, whence| lseek(&file, from as i64, whence).map(|at| at as u64);
    // An object may show as data up to what was written to it last.
    let begins = seek(0, Whence::SeekData).unwrap();
    assert!((4 << 20..=at).contains(&begins), "{begins}");
    let ends = seek(at, Whence::SeekHole).unwrap();
    assert!((at + data.len() as u64..=8 << 20).contains(&ends), "{ends}");
    // Each object of a striped image is asked: no question looks through all of a long hole, or of much data.
    let long = make(&directory.join("long")).unwrap();
    long.set_len(1 << 36).unwrap();
    let looked = lseek(&long, 0, Whence::SeekData).unwrap();
    assert!((1 << 20..=1 << 30).contains(&looked), "{looked}");
    assert_eq!(lseek(&long, looked, Whence::SeekHole), Ok(looked), "data that is none is a hole");
    drop(long);
    std::fs::remove_file(directory.join("long")).unwrap();
    let mut whole = Vec::new();
    file.seek(SeekFrom::Start(0)).unwrap();
    file.read_to_end(&mut whole).unwrap();
    let (before, rest) = whole.split_at(at as usize);
    assert!(rest.starts_with(&data) && before.iter().all(|byte| *byte == 0));
    drop(file);
    std::fs::remove_file(&path).unwrap();
    std::fs::remove_dir(&directory).unwrap();
}

/// A file that is open goes when it is closed, also where the process that was to remove it dies.
fn removals(cluster: &Cluster, here: &mut Mount) {
    let before = images(cluster);
    let file = make(&here.path("open")).unwrap();
    file.set_len(LONG).unwrap();
    std::fs::remove_file(here.path("open")).unwrap();
    file.write_all_at(b"still there", 5).unwrap();
    let mut read = [0; 11];
    file.read_exact_at(&mut read, 5).unwrap();
    assert_eq!(&read, b"still there");
    drop(file);
    eventually("the image of a removed file is gone", || (images(cluster) == before).then_some(()))
        .unwrap();
    let file = make(&here.path("open")).unwrap();
    file.set_len(LONG).unwrap();
    std::fs::remove_file(here.path("open")).unwrap();
    assert_eq!(images(cluster), before + 1);
    here.dies();
    let failed = file.write_all_at(b"lost", 0).unwrap_err();
    assert_eq!(failed.raw_os_error(), Some(libc::ENOTCONN), "{failed}");
    drop(file);
    // The cluster takes a while to see that the dead one does not have it open any more.
    let give_up = Instant::now() + Duration::from_secs(90);
    while images(cluster) > before {
        assert!(Instant::now() < give_up, "the image of a removed file stays: {}", here.log());
        std::thread::sleep(Duration::from_secs(5));
        here.dies();
    }
}

/// Locks reach from one host to the other, and do not outlive the process that serves them.
fn locks(here: &mut Mount, there: &Mount) {
    let path = |mount: &Mount| mount.path("locked");
    let one = make(&path(here)).unwrap();
    let (second, other) = (open(&path(here)).unwrap(), open(&path(there)).unwrap());
    assert!(lock(&one, libc::F_WRLCK));
    assert!(!lock(&second, libc::F_RDLCK) && !lock(&other, libc::F_RDLCK));
    assert!(lock(&one, libc::F_RDLCK), "its own lock cannot be changed");
    assert!(lock(&second, libc::F_RDLCK) && lock(&other, libc::F_RDLCK));
    assert!(!lock(&one, libc::F_WRLCK), "others read");
    drop((one, second));
    eventually("the locks of closed files are free", || lock(&other, libc::F_WRLCK).then_some(()))
        .unwrap();
    assert!(lock(&other, libc::F_UNLCK));
    let one = open(&path(here)).unwrap();
    assert!(lock(&one, libc::F_WRLCK) && !lock(&other, libc::F_WRLCK));
    here.dies();
    let again = open(&path(here)).unwrap();
    assert!(lock(&again, libc::F_WRLCK), "the lock of a dead process stays");
    drop((again, one, other));
    std::fs::remove_file(path(here)).unwrap();
}

/// An image has one writer, and a successor does not wait for its dead predecessor's lock.
fn one_writer(here: &mut Mount, there: &Mount) {
    let path = |mount: &Mount| mount.path("image");
    let file = make(&path(here)).unwrap();
    file.set_len(LONG).unwrap();
    file.write_all_at(b"here", 0).unwrap();
    let refused = open(&path(there)).unwrap_err();
    assert_eq!(refused.raw_os_error(), Some(libc::EBUSY), "{refused}");
    let mut read = [0; 4];
    File::open(path(there)).unwrap().read_exact_at(&mut read, 0).unwrap();
    assert_eq!(&read, b"here");
    let since = Instant::now();
    here.dies();
    let again = open(&path(here)).unwrap();
    assert!(since.elapsed() < Duration::from_secs(20), "it has waited: {:?}", since.elapsed());
    again.write_all_at(b"more", 4).unwrap();
    drop((file, again));
    let other = eventually("the other host may write", || open(&path(there)).ok()).unwrap();
    let mut read = [0; 8];
    other.read_exact_at(&mut read, 0).unwrap();
    assert_eq!(&read, b"heremore");
}

/// Who gets to write an image knows how long the host that had its lock before has made it, also where it has the file open since before
/// that.
fn lengths_of_writers(here: &Mount, there: &Mount) {
    let path = |mount: &Mount| mount.path("grows");
    let file = make(&path(here)).unwrap();
    file.set_len(LONG).unwrap();
    let reader = File::open(path(there)).unwrap();
    assert_eq!(reader.metadata().unwrap().len(), LONG);
    // Beyond the image, which grows, and not flushed.
    file.write_all_at(b"end", 10 * LONG).unwrap();
    drop(file);
    let writer = eventually("the other host may write", || open(&path(there)).ok()).unwrap();
    assert_eq!(writer.metadata().unwrap().len(), 10 * LONG + 3);
    let mut read = [0; 3];
    writer.read_exact_at(&mut read, 10 * LONG).unwrap();
    assert_eq!(&read, b"end");
    drop((reader, writer));
    std::fs::remove_file(path(there)).unwrap();
}

/// While the monitors stand still, the room of the pool is told as it was known, and files are found, read and written: OSDs do that.
fn monitors_that_stand_still(cluster: &Cluster, here: &Mount) {
    let path = here.path("served");
    let file = make(&path).unwrap();
    file.set_len(LONG).unwrap();
    let root = here.path("");
    eventually("the room is known", || statvfs(&root).ok()).unwrap();
    let stopped = cluster.stop_daemons("mon.");
    let (tell, asked) = mpsc::channel();
    for asker in 0..ASKERS {
        let (root, path, tell) = (root.clone(), path.clone(), tell.clone());
        std::thread::spawn(move || {
            let begun = Instant::now();
            while begun.elapsed() < ASKING {
                match asker % 4 {
                    0 | 1 => assert!(statvfs(&root).unwrap().blocks() > 0),
                    2 => assert_eq!(path.metadata().unwrap().len() % LONG, 0),
                    // It may have been told of late; else it is an error.
                    _ => drop(attribute(&root, POOLS_ATTRIBUTE)),
                }
            }
            tell.send(()).unwrap();
        });
    }
    drop(tell);
    let ended = Arc::new(AtomicBool::new(false));
    let written = writes_until(file, Arc::clone(&ended));
    // Waits for each asker; one that panicked sends nothing, and this fails.
    (0..ASKERS).for_each(|_| asked.recv_timeout(ASKING + ANSWERED).unwrap());
    ended.store(true, Ordering::Relaxed);
    let rounds = written.recv_timeout(ANSWERED).unwrap();
    assert!(rounds > 1, "nothing was written meanwhile");
    drop(stopped);
    eventually("the monitors answer again", || attribute(&root, POOLS_ATTRIBUTE).ok()).unwrap();
    std::fs::remove_file(&path).unwrap();
}

/// Has a thread write to a file, flush it and read it, and make it longer each time; it tells how often it has, in the end.
fn writes_until(file: File, ended: Arc<AtomicBool>) -> Receiver<u64> {
    let (tell, told) = mpsc::channel();
    std::thread::spawn(move || {
        let mut rounds = 0;
        while !ended.load(Ordering::Relaxed) {
            // So far that its image gets longer several times, and no further than that takes a moment.
            let end = LONG * (2 + rounds.min(30));
            let data = random(4096);
            file.write_all_at(&data, end - 4096).unwrap();
            file.sync_all().unwrap();
            let mut read = vec![0; 4096];
            file.read_exact_at(&mut read, end - 4096).unwrap();
            assert!(read == data);
            rounds += 1;
        }
        drop(file);
        tell.send(rounds).unwrap();
    });
    told
}

/// A host that stops for so long that another one takes its image over cannot write there when it wakes up.
fn a_paused_owner(here: &Mount, there: &Mount) {
    let path = |mount: &Mount| mount.path("image");
    let owner = eventually("this host may write again", || open(&path(here)).ok()).unwrap();
    owner.write_all_at(b"OWNER", 0).unwrap();
    here.stop();
    let late = std::thread::spawn(move || {
        // Asked for while nobody serves it.
        let written = owner.write_all_at(b"STALE", 0);
        (owner, written)
    });
    let give_up = Instant::now() + Duration::from_secs(120);
    let heir = loop {
        match open(&path(there)) {
            Ok(heir) => break heir,
            Err(error) => assert!(Instant::now() < give_up, "the image is not given up: {error}"),
        }
        std::thread::sleep(Duration::from_secs(1));
    };
    heir.write_all_at(b"HEIR!", 0).unwrap();
    here.signal(Signal::SIGCONT);
    let (owner, written) = late.join().unwrap();
    assert!(written.is_err(), "a write of the former owner was taken");
    assert!(owner.write_all_at(b"STALE", 0).is_err(), "the former owner can write");
    let mut read = [0; 5];
    heir.read_exact_at(&mut read, 0).unwrap();
    assert_eq!(&read, b"HEIR!");
}
