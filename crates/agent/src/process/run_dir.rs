//! The run directory, by which a restarted agent finds processes: a directory for each VM that has processes,
//! and for each import or export.
//!
//! ```text
//! <run dir>/vms/<vm id>/         run.json, *.process, sockets, logs
//! <run dir>/imports/<disk id>/   filter.process, filter.sock, filter.log (of an export, too)
//! <run dir>/exports/             see [`crate::storage::exported`]
//! <run dir>/deaths/              see [`crate::process::died`]
//! ```
//! A directory is made before the first process of it is started and removed after the last has ended; every
//! process in it is on record (see [`crate::process`]). So sweeping a directory leaves no process behind. A
//! VM's `run.json` is a [`crate::process::run_record`].

use std::fs::{DirBuilder, File, OpenOptions};
use std::io::{self, Read, Seek, SeekFrom};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};

use vmseal_api::host::VmSpec;
use vmseal_api::id::{DiskId, VmId};

use crate::process::Process;
use crate::process::live::Live;
use crate::process::machine;
use crate::process::run_record::{self, Phase, Record, Unreadable};
use vmseal_api::atomic_file::{self, PRIVATE};

/// The longest path of a socket (sockaddr_un), in bytes, its end mark included.
const SOCKET_PATH_MAX: usize = 108;

/// The longest path below the run directory: that of a disk's socket.
const LONGEST_INSIDE: usize = "/imports/00000000-0000-0000-0000-000000000000/console.sock".len();

/// The directory, in that of a VM, of the sockets that its QEMU connects to.
const FOR_QEMU: &str = "q";

/// A longer log is truncated, in bytes.
pub const LOG_MAX: u64 = 4 << 20;

/// How much of a log's end is read, in bytes.
const LOG_TAIL: u64 = 8 * 1024;

/// How QEMU ends when it cannot take a guest's memory and devices: the line before says why.
const NOT_LOADED: &str = "load of migration failed";

/// The run directory.
#[derive(Clone, Debug)]
pub struct RunDir {
    root: PathBuf,
}

impl RunDir {
    /// Opens it; creates it when missing.
    ///
    /// # Errors
    /// Those of the file system, or when the paths of sockets in it would be too long.
    pub fn open(root: &Path) -> io::Result<Self> {
        if root.as_os_str().len() + LONGEST_INSIDE >= SOCKET_PATH_MAX {
            let message = format!(
                "{} is too long a path for sockets: at most {} bytes are possible",
                root.display(),
                SOCKET_PATH_MAX - LONGEST_INSIDE - 1
            );
            return Err(io::Error::new(io::ErrorKind::InvalidInput, message));
        }
        for directory in
            [root.to_owned(), root.join("vms"), root.join("imports"), root.join("exports")]
        {
            DirBuilder::new().recursive(true).mode(0o700).create(directory)?;
        }
        Ok(Self { root: root.to_owned() })
    }

    /// Its path.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.root
    }

    /// Where the accelerator's probe is kept.
    #[must_use]
    pub fn accelerator(&self) -> PathBuf {
        self.root.join("accelerator.json")
    }

    /// The directory of a VM.
    #[must_use]
    pub fn vm(&self, vm: VmId) -> ProcessDir {
        ProcessDir { path: self.root.join("vms").join(vm.to_string()) }
    }

    /// The directory of a disk's import.
    #[must_use]
    pub fn import(&self, disk: DiskId) -> ProcessDir {
        ProcessDir { path: self.root.join("imports").join(disk.to_string()) }
    }

    /// The directory of a disk's export.
    #[must_use]
    pub fn export(&self, disk: DiskId) -> ProcessDir {
        // A disk is filled or exported, never both at a time.
        self.import(disk)
    }

    /// The directory of records of exports.
    #[must_use]
    pub fn exports(&self) -> PathBuf {
        self.root.join("exports")
    }

    /// The record of a disk's last export.
    #[must_use]
    pub fn exported(&self, disk: DiskId) -> PathBuf {
        self.exports().join(format!("{disk}.json"))
    }

    /// The directories of VMs.
    ///
    /// # Errors
    /// Those of the file system.
    pub fn vms(&self) -> io::Result<Vec<ProcessDir>> {
        inside(&self.root.join("vms"))
    }

    /// The directories of imports.
    ///
    /// # Errors
    /// Those of the file system.
    pub fn imports(&self) -> io::Result<Vec<ProcessDir>> {
        inside(&self.root.join("imports"))
    }
}

fn inside(path: &Path) -> io::Result<Vec<ProcessDir>> {
    std::fs::read_dir(path)?.map(|entry| Ok(ProcessDir { path: entry?.path() })).collect()
}

/// The directory of processes that belong together.
#[derive(Clone, Debug)]
pub struct ProcessDir {
    path: PathBuf,
}

impl ProcessDir {
    /// Creates it again, empty; processes of an earlier one are ended.
    ///
    /// # Errors
    /// Those of the file system.
    pub async fn renew(&self) -> io::Result<()> {
        self.sweep().await?;
        DirBuilder::new().mode(0o700).create(&self.path)
    }

    /// Ends all processes in it and removes it.
    ///
    /// # Errors
    /// Those of the file system.
    pub async fn sweep(&self) -> io::Result<()> {
        let entries = match std::fs::read_dir(&self.path) {
            Ok(entries) => entries,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
            Err(error) => return Err(error),
        };
        for entry in entries {
            let path = entry?.path();
            if path.extension().is_some_and(|extension| extension == "process")
                && self.is_of_this_boot()
                && let Some(process) = Process::adopt(&path)?
            {
                process.kill();
                process.ended().await;
            }
        }
        std::fs::remove_dir_all(&self.path)
    }

    /// Process ids on record are valid only in this boot. Imports have no boot on record: there the start
    /// times must do.
    fn is_of_this_boot(&self) -> bool {
        self.read().map_or(true, |record| record.is_of_this_boot())
    }

    /// Its name: the id of the VM or disk.
    #[must_use]
    pub fn name(&self) -> String {
        self.path.file_name().unwrap_or_default().to_string_lossy().into_owned()
    }

    /// The record of the process of this name.
    #[must_use]
    pub fn process(&self, name: &str) -> PathBuf {
        self.path.join(format!("{name}.process"))
    }

    /// The socket of this name.
    #[must_use]
    pub fn socket(&self, name: &str) -> PathBuf {
        self.path.join(format!("{name}.sock"))
    }

    /// The path of something else that is to be gone with it.
    #[must_use]
    pub fn inside(&self, name: &str) -> PathBuf {
        self.path.join(name)
    }

    /// The record of which files a VM's disks are.
    #[must_use]
    pub fn images(&self) -> PathBuf {
        self.path.join("images.json")
    }

    /// Removes the socket that an ended process of this name may have left.
    ///
    /// # Errors
    /// Those of the file system.
    pub fn forget_socket(&self, name: &str) -> io::Result<()> {
        match std::fs::remove_file(self.socket(name)) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
            _ => Ok(()),
        }
    }

    /// Creates the socket of this name. Nobody else reaches it: the directory is the agent's.
    ///
    /// # Errors
    /// Those of bind.
    pub fn listen(&self, name: &str) -> io::Result<UnixListener> {
        use std::os::unix::fs::PermissionsExt;
        let path = self.socket(name);
        let listener = UnixListener::bind(&path)?;
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o600))?;
        Ok(listener)
    }

    /// The directory of the sockets that QEMU connects to, made where it is missing. QEMU finds it by this descriptor
    /// alone: it may not look into any directory above it.
    ///
    /// # Errors
    /// Those of the file system.
    pub fn sockets_for_qemu(&self) -> io::Result<File> {
        use std::os::unix::fs::PermissionsExt;
        let path = self.path.join(FOR_QEMU);
        DirBuilder::new().recursive(true).create(&path)?;
        // It may be searched and no more; the sockets in it are for one user each.
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o711))?;
        OpenOptions::new().read(true).custom_flags(libc::O_PATH | libc::O_DIRECTORY).open(path)
    }

    /// Creates a socket there, in place of one that an ended process has left, for this user alone; none is the
    /// agent's.
    ///
    /// # Errors
    /// Those of the file system.
    pub fn listen_for_qemu(&self, name: &str, user: Option<u32>) -> io::Result<UnixListener> {
        let inside = format!("{FOR_QEMU}/{name}");
        self.forget_socket(&inside)?;
        let listener = self.listen(&inside)?;
        std::os::unix::fs::chown(self.socket(&inside), user, None)?;
        Ok(listener)
    }

    /// Opens the log of this name for appending.
    ///
    /// # Errors
    /// Those of the file system.
    pub fn log(&self, name: &str) -> io::Result<File> {
        OpenOptions::new().append(true).create(true).mode(0o600).open(self.log_path(name))
    }

    fn log_path(&self, name: &str) -> PathBuf {
        self.path.join(format!("{name}.log"))
    }

    /// The end of a log, at most `most` bytes; empty when there is none.
    #[must_use]
    pub fn log_end(&self, name: &str, most: u64) -> Vec<u8> {
        let read = || {
            let mut file = File::open(self.log_path(name))?;
            let length = file.metadata()?.len();
            file.seek(SeekFrom::Start(length.saturating_sub(most)))?;
            let mut end = Vec::new();
            file.take(most).read_to_end(&mut end)?;
            io::Result::Ok(end)
        };
        read().unwrap_or_default()
    }

    /// The last line of a log with text in it, for an error message; and the one before it where that has the reason.
    #[must_use]
    pub fn last_words(&self, name: &str) -> Option<String> {
        let end = self.log_end(name, LOG_TAIL);
        let text = String::from_utf8_lossy(&end);
        let says = |line: &&str| !line.is_empty() && !line.contains(": info: ");
        let mut lines = text.lines().rev().map(str::trim).filter(says);
        let last = lines.next()?;
        let words = match lines.next() {
            Some(reason) if last.contains(NOT_LOADED) => format!("{reason}; {last}"),
            _ => last.to_owned(),
        };
        Some(words.chars().filter(|c| !c.is_control()).take(500).collect())
    }

    /// The end of a log, as a part of a sentence about its process' end.
    #[must_use]
    pub fn log_ends(&self, name: &str) -> String {
        match self.last_words(name) {
            Some(words) => format!("and its log ends '{words}'"),
            None => "and its log is empty".to_owned(),
        }
    }

    /// Truncates logs that are too long. Their writers append, so they continue at the beginning.
    pub fn bound_logs(&self) {
        for name in ["filter", "qemu", "console", "tpm"] {
            let cut = || {
                let file = OpenOptions::new().write(true).open(self.log_path(name))?;
                if file.metadata()?.len() > LOG_MAX { file.set_len(0) } else { Ok(()) }
            };
            match cut() {
                Err(error) if error.kind() != io::ErrorKind::NotFound => {
                    tracing::warn!(path = %self.log_path(name).display(), %error, "cannot truncate a log");
                }
                _ => {}
            }
        }
    }

    /// The record of the VM.
    #[must_use]
    pub fn record(&self) -> PathBuf {
        self.path.join("run.json")
    }

    /// Writes the VM's record.
    ///
    /// # Errors
    /// Those of the file system.
    pub fn write(&self, spec: &VmSpec, slot: u32, phase: Phase, live: &Live) -> io::Result<()> {
        let (spec, live) = (spec.clone(), live.clone());
        let record = Record { boot: machine::boot_id(), spec, slot, phase, live };
        atomic_file::write(&self.record(), &record.to_text()?, PRIVATE)
    }

    /// Reads the VM's record.
    ///
    /// # Errors
    /// [`Unreadable`].
    pub fn read(&self) -> Result<Record, Unreadable> {
        let file = match File::open(self.record()) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                return Err(Unreadable::Missing);
            }
            other => other?,
        };
        let mut text = Vec::new();
        file.take(run_record::LENGTH_MAX + 1).read_to_end(&mut text)?;
        if text.len() as u64 > run_record::LENGTH_MAX {
            let why = format!("it is longer than {} bytes", run_record::LENGTH_MAX);
            return Err(Unreadable::Damaged(why));
        }
        Record::parse(&text)
    }
}

impl Record {
    /// Whether its processes can still live: the machine has not rebooted since.
    #[must_use]
    pub fn is_of_this_boot(&self) -> bool {
        self.boot == machine::boot_id()
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use std::process::Stdio;

    use vmseal_api::host::{Allocation, DatastoreSpec, DiskSpec};
    use vmseal_api::id::DiskId;

    use super::*;
    use crate::process::{self, Launch};

    pub fn spec() -> VmSpec {
        VmSpec {
            vm: VmId::new(),
            name: "guest".to_owned(),
            vcpus: 2,
            memory: 64 << 20,
            policy: None,
            key: None,
            hardware: Default::default(),
            devices: vec![],
            snapshots: Vec::new(),
            images: None,
            about: None,
        }
    }

    /// An encrypted disk of 1 MiB, of which nothing is there yet.
    pub fn disk(name: &str, place: &DatastoreSpec) -> DiskSpec {
        DiskSpec {
            disk: DiskId::new(),
            name: name.to_owned(),
            datastore: place.clone(),
            size: 1 << 20,
            encrypted: true,
            allocation: Allocation::Thin,
            role: Default::default(),
            limits: Default::default(),
            cache: None,
            replica: None,
            facts: None,
        }
    }

    fn sleeper(directory: &ProcessDir) -> Process {
        process::launch(Launch {
            program: &process::open_program(Path::new("/bin/sleep")).unwrap(),
            name: "sleep",
            arguments: vec!["60".into()],
            keep: vec![],
            input: Stdio::null(),
            log: directory.log("filter").unwrap(),
            user: None,
            locks_memory: false,
            record: &directory.process("filter"),
        })
        .unwrap()
    }

    #[tokio::test]
    async fn a_sweep_ends_what_is_on_record_and_leaves_nothing() {
        let root = tempfile::tempdir().unwrap();
        let run = RunDir::open(root.path()).unwrap();
        let spec = spec();
        let directory = run.vm(spec.vm);
        directory.renew().await.unwrap();
        directory.write(&spec, 3, Phase::Starting, &Live::default()).unwrap();
        let process = sleeper(&directory);
        assert_eq!(run.vms().unwrap().len(), 1);
        let record = directory.read().unwrap();
        assert_eq!((record.slot, record.phase, &record.spec), (3, Phase::Starting, &spec));
        assert!(record.is_of_this_boot());
        directory.sweep().await.unwrap();
        directory.sweep().await.unwrap();
        assert_ne!(process.ended().await, process::Exit::Status(0));
        assert!(run.vms().unwrap().is_empty());
    }

    #[tokio::test]
    async fn a_record_from_before_a_reboot_ends_nothing() {
        let root = tempfile::tempdir().unwrap();
        let run = RunDir::open(root.path()).unwrap();
        let spec = spec();
        let directory = run.vm(spec.vm);
        directory.renew().await.unwrap();
        directory.write(&spec, 0, Phase::Running, &Live::default()).unwrap();
        let process = sleeper(&directory);
        let path = directory.path.join("run.json");
        let text = std::fs::read_to_string(&path).unwrap();
        std::fs::write(&path, text.replace(&machine::boot_id(), "another")).unwrap();
        assert!(!directory.read().unwrap().is_of_this_boot());
        directory.sweep().await.unwrap();
        let lives = tokio::time::timeout(std::time::Duration::from_millis(100), process.ended());
        assert!(lives.await.is_err(), "a process of this boot was ended");
        process.kill();
    }

    #[tokio::test]
    async fn logs_are_bounded_and_have_last_words() {
        use std::io::Write;
        let root = tempfile::tempdir().unwrap();
        let directory = RunDir::open(root.path()).unwrap().import(DiskId::new());
        directory.renew().await.unwrap();
        assert_eq!(directory.last_words("filter"), None);
        assert_eq!(directory.log_ends("filter"), "and its log is empty");
        let mut log = directory.log("filter").unwrap();
        log.write_all(&vec![b'x'; LOG_MAX as usize]).unwrap();
        log.write_all(b"\nthe reason\x1b[0m\n\nqemu: -device x: info: waiting\n").unwrap();
        assert_eq!(directory.last_words("filter").unwrap(), "the reason[0m");
        assert_eq!(directory.log_ends("filter"), "and its log ends 'the reason[0m'");
        log.write_all(b"qemu: VQ 0 is not as saved\nqemu: load of migration failed: -1\n").unwrap();
        let both = "qemu: VQ 0 is not as saved; qemu: load of migration failed: -1";
        assert_eq!(directory.last_words("filter").unwrap(), both);
        directory.bound_logs();
        log.write_all(b"more\n").unwrap();
        assert_eq!(directory.log_end("filter", 100), b"more\n");
    }

    #[test]
    fn a_path_too_long_for_sockets_is_refused_at_once() {
        let root = tempfile::tempdir().unwrap();
        let error = RunDir::open(&root.path().join("x".repeat(80))).unwrap_err();
        assert!(error.to_string().contains("too long"), "{error}");
    }
}
