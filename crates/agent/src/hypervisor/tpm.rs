//! The TPM of a VM: a process of swtpm's, beside QEMU, and the socket by which QEMU controls it.
//!
//! ```text
//! agent: opens the state, derives its key ─► swtpm ─► state loaded, or refused ─► QEMU gets the socket
//!                                                     swtpm ends when QEMU closes it
//! ```
//! swtpm gets its key through a pipe, and all else as descriptors. It answers the agent before QEMU is started, so
//! that a guest never finds a TPM that cannot read what it keeps.

mod permanent;

pub use self::permanent::Permanent;

use std::ffi::OsString;
use std::fs::File;
use std::io::{self, Read, Write};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::process::Stdio;
use std::time::Duration;

use vmseal_api::problem::{ErrorCode, Problem};
use vmseal_secret::SecretBytes;

use crate::process::run_dir::ProcessDir;
use crate::process::{self, Launch, Process, User};

/// The program, as it is found in PATH.
pub const PROGRAM: &str = "swtpm";

/// Debian's package that has it.
const PACKAGE: &str = "swtpm";

/// The name of the process in its directory.
pub const NAME: &str = "tpm";

/// How long it may take to load its state, or to make one with all of its keys: a second, on a busy machine more.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(20);

/// How long it may take to end when its QEMU has ended.
pub const END_TIMEOUT: Duration = Duration::from_secs(5);

/// The commands of swtpm's control socket that are used here (swtpm's tpm_ioctl.h), and the answer to a success.
const INIT: u32 = 2;
const SHUTDOWN: u32 = 3;
const STOP: u32 = 14;
const SUCCESS: u32 = 0;

/// swtpm on this host.
#[derive(Clone, Debug)]
pub struct Swtpm {
    name: PathBuf,
}

/// What swtpm is given.
pub struct State<'a> {
    /// The directory of what it keeps.
    pub directory: &'a File,
    /// The image whose lock says that the directory is taken; it is held as long as swtpm lives.
    pub lock: &'a File,
    /// The key under which that is encrypted.
    pub key: &'a SecretBytes,
    /// Its user; none is the agent's.
    pub user: Option<u32>,
}

/// A TPM that has loaded what it keeps.
#[derive(Debug)]
pub struct Started {
    /// The process.
    pub process: Process,
    /// The socket by which QEMU controls it.
    pub control: UnixStream,
}

impl Swtpm {
    /// The program of this path or name. It is looked for when it is needed.
    #[must_use]
    pub fn of(name: PathBuf) -> Self {
        Self { name }
    }

    /// Checks that it is there.
    ///
    /// # Errors
    /// `unsupported`, with the package that has it.
    pub fn examine(&self) -> Result<(), Problem> {
        self.open().map(drop)
    }

    fn open(&self) -> Result<File, Problem> {
        let path = process::find_program(&self.name);
        process::open_program(&path).map_err(|error| {
            let what = format!(
                "{}: {error}. VMs get their TPMs from swtpm: install Debian's package {PACKAGE} on this host, or give the agent --swtpm",
                path.display()
            );
            Problem::new(ErrorCode::Unsupported, what)
        })
    }

    /// Starts it, and waits until it has loaded what it keeps, or made that where there is none. Blocks.
    ///
    /// # Errors
    /// `unsupported` without the program; `damaged` when what it keeps is damaged, or of another key. The process is
    /// on record, and is ended with the directory.
    pub fn start(&self, directory: &ProcessDir, state: &State<'_>) -> Result<Started, Problem> {
        let mut started = self.launch(directory, state)?;
        let control = &mut started.control;
        // It takes flags after the command; none is needed.
        let loaded = ask(control, &[INIT, 0]).and_then(|answer| match answer {
            SUCCESS => ask(control, &[STOP]),
            refused => Ok(refused),
        });
        started.if_done(directory, loaded)
    }

    /// Starts it, and has it load nothing yet.
    fn launch(&self, directory: &ProcessDir, state: &State<'_>) -> Result<Started, Problem> {
        let program = self.open()?;
        let failed = |error: io::Error| {
            let what = format!("swtpm cannot be started: {error}");
            Problem::new(ErrorCode::Internal, what)
        };
        let (control, theirs) = UnixStream::pair().map_err(failed)?;
        let key = key_to_read(state.key).map_err(failed)?;
        let process = process::launch(Launch {
            program: &program,
            name: "swtpm",
            arguments: arguments(state.directory.as_fd(), theirs.as_fd(), key.as_fd()),
            keep: vec![state.directory.as_fd(), state.lock.as_fd(), theirs.as_fd(), key.as_fd()],
            input: Stdio::null(),
            log: directory.log(NAME).map_err(failed)?,
            user: state.user.map(|id| User { id, group: None }),
            locks_memory: false,
            record: &directory.process(NAME),
        });
        let process = process.map_err(failed)?;
        drop((theirs, key));
        Ok(Started { process, control })
    }
}

impl Started {
    /// It, where it has loaded what it keeps; else it is ended. `loaded` is its answer.
    fn if_done(self, directory: &ProcessDir, loaded: io::Result<u32>) -> Result<Self, Problem> {
        if !matches!(loaded, Ok(SUCCESS)) {
            // It holds the lock of what it keeps.
            self.process.kill();
        }
        match loaded {
            Ok(SUCCESS) => Ok(self),
            Ok(code) => {
                let what = format!(
                    "the VM's TPM cannot load what it keeps (code {code:#x}), {}: that is damaged, or of another time than the VM's disk 'tpm'. Restore both from one backup",
                    directory.log_ends(NAME)
                );
                Err(Problem::new(ErrorCode::Damaged, what))
            }
            Err(error) => {
                let said = directory.log_ends(NAME);
                let what = format!(
                    "swtpm does not answer: {error}, {said}. If it may not read the datastore (AppArmor), allow it"
                );
                Err(Problem::new(ErrorCode::Internal, what))
            }
        }
    }

    /// Has it end, where no guest is to use it. Blocks.
    ///
    /// # Errors
    /// It does not answer.
    pub fn shut_down(mut self) -> io::Result<Process> {
        ask(&mut self.control, &[SHUTDOWN])?;
        Ok(self.process)
    }
}

/// QEMU's options for a TPM that is controlled by this descriptor.
#[must_use]
pub fn options(control: i32) -> [[String; 2]; 3] {
    let option = |name: &str, value: &str| [name.to_owned(), value.to_owned()];
    [
        option("-chardev", &format!("socket,id=tpm,fd={control}")),
        option("-tpmdev", "emulator,id=tpm0,chardev=tpm"),
        // Both OVMF and SeaBIOS measure into this one.
        option("-device", "tpm-crb,tpmdev=tpm0"),
    ]
}

fn arguments(state: BorrowedFd<'_>, control: BorrowedFd<'_>, key: BorrowedFd<'_>) -> Vec<OsString> {
    let (state, control, key) = (state.as_raw_fd(), control.as_raw_fd(), key.as_raw_fd());
    let all = [
        "socket".to_owned(),
        "--tpm2".to_owned(),
        "--tpmstate".to_owned(),
        // By the directory, which its user could not get to by its path.
        format!("dir=/proc/self/fd/{state},mode=0600"),
        "--ctrl".to_owned(),
        format!("type=unixio,clientfd={control}"),
        "--key".to_owned(),
        format!("fd={key},format=binary,mode=aes-256-cbc"),
        "--terminate".to_owned(),
    ];
    all.map(OsString::from).to_vec()
}

/// The key, to be read once: the end of a pipe that holds it and nothing more.
fn key_to_read(key: &SecretBytes) -> io::Result<io::PipeReader> {
    let (reader, mut writer) = io::pipe()?;
    writer.write_all(key.expose())?;
    Ok(reader)
}

/// Sends a command with its arguments; returns the code of its result.
fn ask(control: &mut UnixStream, words: &[u32]) -> io::Result<u32> {
    control.set_read_timeout(Some(ANSWER_TIMEOUT))?;
    let command: Vec<u8> = words.iter().flat_map(|word| word.to_be_bytes()).collect();
    control.write_all(&command)?;
    let mut answer = [0; 4];
    control.read_exact(&mut answer)?;
    // It is QEMU's from here on, or is asked again.
    control.set_read_timeout(None)?;
    Ok(u32::from_be_bytes(answer))
}

#[cfg(test)]
mod tests {
    use vmseal_api::id::DiskId;
    use vmseal_secret::derive::DERIVED_LEN;

    use super::*;
    use crate::process::run_dir::RunDir;
    use crate::storage::tpm_state;

    #[test]
    fn a_missing_program_is_refused_with_its_package() {
        let refused = Swtpm::of("/nowhere/swtpm".into()).examine().unwrap_err();
        assert_eq!(refused.code, ErrorCode::Unsupported);
        assert!(refused.detail.contains("package swtpm"), "{refused}");
        Swtpm::of(PROGRAM.into()).examine().unwrap();
    }

    #[tokio::test]
    async fn what_it_keeps_opens_with_its_own_key_alone() {
        let place = tempfile::tempdir().unwrap();
        let directory = RunDir::open(place.path()).unwrap().import(DiskId::new());
        directory.renew().await.unwrap();
        let path = place.path().join("state");
        let lock = tempfile::tempfile().unwrap();
        let kept = tpm_state::make(&path, None).unwrap();
        let [right, wrong] = [(); 2].map(|()| SecretBytes::random(DERIVED_LEN).unwrap());
        let swtpm = Swtpm::of(PROGRAM.into());
        let start = |key: &SecretBytes| {
            let state = State { directory: &kept, lock: &lock, key, user: None };
            swtpm.start(&directory, &state)
        };
        let end = async |started: Started| {
            let process = started.shut_down().unwrap();
            process.end_within(ANSWER_TIMEOUT).await
        };
        end(start(&right).unwrap()).await;
        tpm_state::flush(&path, &kept).unwrap();
        let refused = start(&wrong).unwrap_err();
        assert_eq!(refused.code, ErrorCode::Damaged, "{refused}");
        // Its process has ended when this has.
        directory.renew().await.unwrap();
        end(start(&right).unwrap()).await;
        directory.sweep().await.unwrap();
    }
}
