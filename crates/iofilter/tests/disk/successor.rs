//! A filter as the agent starts it in place of one that died: its image opened and locked again, its VMM connected.

use std::fs::File;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use serde_json::{Value, json};

/// How long the lock of a dead filter may remain, and how long a filter may take to end.
const TIMEOUT: Duration = Duration::from_secs(30);

/// Killed when dropped.
pub struct Filter(Child);

impl Filter {
    /// Serves the image `disk` in this directory, which holds `size` bytes, with this `backend` (except for its
    /// file); also returns the VMM's end of the connection. Its log is `log`.
    pub fn start(
        directory: &Path,
        backend: &Value,
        size: u64,
        chain: &Value,
    ) -> (Self, UnixStream) {
        Self::start_on(directory, "disk", backend, size, chain)
    }

    /// The same on an image of another name.
    pub fn start_on(
        directory: &Path,
        image: &str,
        backend: &Value,
        size: u64,
        chain: &Value,
    ) -> (Self, UnixStream) {
        let image = locked(&directory.join(image));
        let (socket, of_vmm) = UnixStream::pair().unwrap();
        let path = |name: &str| directory.join(name);
        let mut backend = backend.clone();
        backend["file"] = json!({ "fd": image.as_raw_fd() });
        let config = json!({
            "version": 1,
            "vm": "01890a5d-ac96-774b-bcce-b302099a8057",
            "control": { "path": path("control") },
            "disks": [{
                "disk": "01890a5d-ac96-774b-bcce-b302099a8058",
                "size": size,
                "serial": "vmseal-0",
                "chain": chain,
                "backend": backend,
                "front_end": {
                    "kind": "vhost_user_blk", "socket": { "fd": socket.as_raw_fd() }, "queues": 1
                }
            }]
        });
        std::fs::write(path("config"), config.to_string()).unwrap();
        let log = File::options().create(true).append(true).open(path("log")).unwrap();
        let inherited = [image.as_raw_fd(), socket.as_raw_fd()];
        let mut command = Command::new(env!("CARGO_BIN_EXE_vmseal-filter"));
        command.arg("--config").arg(path("config")).stderr(Stdio::from(log));
        // SAFETY: fcntl is async-signal-safe, and nothing is allocated.
        unsafe {
            command.pre_exec(move || {
                for fd in inherited {
                    libc::fcntl(fd, libc::F_SETFD, 0);
                }
                Ok(())
            });
        }
        (Self(command.spawn().unwrap()), of_vmm)
    }

    /// Kills it at once.
    pub fn kill(&mut self) {
        self.0.kill().unwrap();
        self.0.wait().unwrap();
    }

    /// Waits until it ends by itself; returns how it ended.
    pub fn ended(&mut self) -> ExitStatus {
        let until = Instant::now() + TIMEOUT;
        loop {
            if let Some(ended) = self.0.try_wait().unwrap() {
                return ended;
            }
            assert!(Instant::now() < until, "the filter does not end");
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    /// Ends it in order, as the agent does; returns how it ended.
    pub fn end(mut self) -> ExitStatus {
        let pid = nix::unistd::Pid::from_raw(self.0.id() as i32);
        nix::sys::signal::kill(pid, nix::sys::signal::Signal::SIGTERM).unwrap();
        self.ended()
    }
}

impl Drop for Filter {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Opens the image again and takes its lock: not before the kernel has finished all requests of the last
/// filter.
fn locked(path: &Path) -> OwnedFd {
    let file = File::options().read(true).write(true).open(path).unwrap();
    let whole = libc::flock {
        l_type: libc::F_WRLCK as i16,
        l_whence: libc::SEEK_SET as i16,
        l_start: 0,
        l_len: 0,
        l_pid: 0,
    };
    let until = Instant::now() + TIMEOUT;
    while nix::fcntl::fcntl(&file, nix::fcntl::FcntlArg::F_OFD_SETLK(&whole)).is_err() {
        assert!(Instant::now() < until, "the dead filter's lock lingers");
        std::thread::sleep(Duration::from_millis(1));
    }
    file.into()
}
