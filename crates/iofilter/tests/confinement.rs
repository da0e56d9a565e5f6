//! The limits of a filter once it serves: tried by processes that are confined in the same way, and
//! checked in the program itself.

#![allow(clippy::unwrap_used)] // a test

use std::collections::HashMap;
use std::ffi::CStr;
use std::io::{BufRead, BufReader, Read, Seek, Write};
use std::net::{TcpListener, TcpStream};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixStream;
use std::os::unix::process::ExitStatusExt;
use std::path::Path;
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use vm_memory::{Bytes, GuestAddress};
use vmseal_api::filter::{Confinement, ControlReply, FilesConfined};
use vmseal_initiator::driver::{BASE, Driver, INDIRECT, NEXT, WRITE};
use vmseal_iofilter::process::config::read;
use vmseal_iofilter::process::confinement::{confine_files, confine_system_calls, enter};

const TIMEOUT: Duration = Duration::from_secs(30);

/// Names the probe that this program must run, instead of a test.
const PROBE: &str = "VMSEAL_TEST_PROBE";

/// The outcome for a process that tries.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Fate {
    /// It is ended by SIGSYS.
    Ended,
    /// It gets this error.
    Error(i32),
    /// It succeeds.
    Done,
}

/// Makes a system call; the error number, or 0.
fn call(number: i64, arguments: [i64; 5]) -> i32 {
    let [a, b, c, d, e] = arguments;
    // SAFETY: the probes pass numbers, null and static strings: what the kernel may read is there, and
    // what it could write to is refused before that or is this process's own.
    let result = unsafe { libc::syscall(number, a, b, c, d, e, 0_i64) };
    if result < 0 { nix::errno::Errno::last_raw() } else { 0 }
}

fn text(text: &'static CStr) -> i64 {
    text.as_ptr() as i64
}

type Probe = (&'static str, Fate, fn() -> i32);

/// Tried with the filter of system calls alone, as Landlock would answer some of them first.
const SYSTEM_CALLS: &[Probe] = {
    use Fate::{Done, Ended, Error};
    &[
        ("socket", Ended, || call(libc::SYS_socket, [libc::AF_INET.into(), 1, 0, 0, 0])),
        ("unix-socket", Ended, || call(libc::SYS_socket, [libc::AF_UNIX.into(), 1, 0, 0, 0])),
        ("inet-pair", Ended, || call(libc::SYS_socketpair, [libc::AF_INET.into(), 5, 0, 0, 0])),
        // Allowed, and there is no place for the two.
        ("unix-pair", Error(libc::EFAULT), || {
            call(libc::SYS_socketpair, [libc::AF_UNIX.into(), 5, 0, 0, 0])
        }),
        ("ticket", Error(libc::ENOTTY), || {
            call(libc::SYS_ioctl, [0, vmseal_api::rbd::ASK_TICKET.into(), 0, 0, 0])
        }),
        ("connect", Ended, || call(libc::SYS_connect, [0; 5])),
        ("bind", Ended, || call(libc::SYS_bind, [0; 5])),
        ("execve", Ended, || call(libc::SYS_execve, [text(c"/bin/true"), 0, 0, 0, 0])),
        ("fork", Ended, || call(libc::SYS_clone, [libc::SIGCHLD.into(), 0, 0, 0, 0])),
        ("user-namespace", Ended, || {
            let flags = libc::CLONE_VM | libc::CLONE_SIGHAND | libc::CLONE_THREAD;
            call(libc::SYS_clone, [(flags | libc::CLONE_NEWUSER).into(), 0, 0, 0, 0])
        }),
        ("unshare", Ended, || call(libc::SYS_unshare, [libc::CLONE_NEWUSER.into(), 0, 0, 0, 0])),
        ("kill", Ended, || call(libc::SYS_kill, [parent(), 0, 0, 0, 0])),
        ("tgkill", Ended, || call(libc::SYS_tgkill, [parent(), parent(), 0, 0, 0])),
        ("ptrace", Ended, || call(libc::SYS_ptrace, [16, parent(), 0, 0, 0])),
        ("read-other", Ended, || call(libc::SYS_process_vm_readv, [parent(), 0, 0, 0, 0])),
        ("new-ring", Ended, || call(libc::SYS_io_uring_setup, [1, 0, 0, 0, 0])),
        ("ring-files", Ended, || call(libc::SYS_io_uring_register, [0; 5])),
        ("file-of-a-ring", Error(libc::EINVAL), || {
            call(libc::SYS_io_uring_register, [-1, 6, 0, 0, 0])
        }),
        ("bpf", Ended, || call(libc::SYS_bpf, [0; 5])),
        ("setuid", Ended, || call(libc::SYS_setuid, [0; 5])),
        ("capset", Ended, || call(libc::SYS_capset, [0; 5])),
        ("mount", Ended, || call(libc::SYS_mount, [0; 5])),
        ("unlink", Ended, || call(libc::SYS_unlinkat, [-1, text(c"/nothing"), 0, 0, 0])),
        ("code", Ended, || map(libc::PROT_READ | libc::PROT_EXEC)),
        ("code-later", Ended, || call(libc::SYS_mprotect, [0, 4096, libc::PROT_EXEC.into(), 0, 0])),
        ("owner-of-signals", Ended, || {
            call(libc::SYS_fcntl, [0, libc::F_SETOWN.into(), parent(), 0, 0])
        }),
        ("type-ahead", Ended, || call(libc::SYS_ioctl, [0, libc::TIOCSTI as i64, 0, 0, 0])),
        ("limits-of-others", Ended, || call(libc::SYS_prlimit64, [parent(), 0, 0, 0, 0])),
        ("stat-by-path", Ended, || call(libc::SYS_newfstatat, [-1, text(c"/etc/passwd"), 0, 0, 0])),
        ("unknown", Ended, || call(4000, [0; 5])),
        ("open", Error(libc::ENOSYS), || {
            call(libc::SYS_openat, [-100, text(c"/etc/passwd"), 0, 0, 0])
        }),
        ("dumpable", Error(libc::ENOSYS), || {
            call(libc::SYS_prctl, [libc::PR_SET_DUMPABLE.into(), 1, 0, 0, 0])
        }),
        ("data", Done, || map(libc::PROT_READ | libc::PROT_WRITE)),
        ("everyday", Done, everyday),
    ]
};

/// Tried with Landlock alone.
const FILES: &[Probe] = {
    use Fate::Error;
    let denied = Error(libc::EACCES);
    &[
        ("read", denied, || error_of(std::fs::File::open("/etc/passwd"))),
        ("list", denied, || error_of(std::fs::read_dir("/"))),
        ("make", denied, || error_of(std::fs::write("/tmp/vmseal-confinement", "x"))),
        ("execute", denied, || error_of(Command::new("/bin/true").status())),
        ("tcp", denied, || error_of(TcpStream::connect("127.0.0.1:9"))),
        ("listen", denied, || error_of(TcpListener::bind("127.0.0.1:0"))),
        ("signal", Error(libc::EPERM), || call(libc::SYS_kill, [parent(), 0, 0, 0, 0])),
    ]
};

/// Tried with everything, in a process that was about to serve one disk.
const ALL: &[Probe] = {
    use Fate::{Done, Ended, Error};
    &[
        ("little-memory", Done, || map_bytes(8 << 20, libc::PROT_READ | libc::PROT_WRITE)),
        ("much-memory", Error(libc::ENOMEM), || {
            map_bytes(256 << 20, libc::PROT_READ | libc::PROT_WRITE)
        }),
        ("capabilities", Ended, || call(libc::SYS_capset, [0; 5])),
        ("everyday-confined", Done, everyday),
    ]
};

fn parent() -> i64 {
    std::os::unix::process::parent_id().into()
}

fn map(protection: i32) -> i32 {
    map_bytes(4096, protection)
}

fn map_bytes(length: i64, protection: i32) -> i32 {
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
    call(libc::SYS_mmap, [0, length, protection.into(), flags.into(), -1])
}

fn error_of<T>(result: std::io::Result<T>) -> i32 {
    result.err().and_then(|error| error.raw_os_error()).unwrap_or(0)
}

/// The system calls of a filter in normal work, with any C library: they must not end it.
fn everyday() -> i32 {
    let threads: Vec<_> = (0..4)
        .map(|number| {
            std::thread::Builder::new()
                .name(format!("queue{number}"))
                .spawn(|| {
                    std::thread::sleep(Duration::from_millis(1));
                    std::thread::yield_now();
                    HashMap::from([(vec![1_u8; 8 << 20], Instant::now())]).len()
                })
                .unwrap()
        })
        .collect();
    let joined: usize = threads.into_iter().map(|thread| thread.join().unwrap()).sum();
    let clocks = [libc::SYS_clock_gettime, libc::SYS_clock_getres];
    let mut time = [0_i64; 2];
    let mut failed = clocks.map(|clock| call(clock, [0, time.as_mut_ptr() as i64, 0, 0, 0]));
    failed[0] |= call(libc::SYS_membarrier, [0; 5]);
    failed[1] |= call(libc::SYS_lseek, [0, 0, libc::SEEK_DATA.into(), 0, 0]);
    let mut input = std::io::stdin().lock();
    let read = input.read(&mut [0; 8]).unwrap();
    if joined == 4 && read == 8 { failed[0] | failed[1] } else { 1 }
}

/// Not a test: the code that this program runs when it is started as a probe.
#[test]
fn probe() {
    let Ok(name) = std::env::var(PROBE) else { return };
    let find = |probes: &[Probe]| probes.iter().find(|probe| probe.0 == name).map(|probe| probe.2);
    let error = if let Some(attempt) = find(SYSTEM_CALLS) {
        nix::sys::resource::setrlimit(nix::sys::resource::Resource::RLIMIT_CORE, 1, 1).unwrap();
        confine_system_calls().unwrap();
        attempt()
    } else if let Some(attempt) = find(FILES) {
        assert_eq!(confine_files(), FilesConfined::Fully);
        attempt()
    } else if let Some(attempt) = find(ALL) {
        let config = config(Path::new("/nowhere")).to_string();
        enter(&read(config.as_bytes()).unwrap()).unwrap();
        attempt()
    } else {
        confine_system_calls().unwrap();
        std::panic::set_hook(Box::new(|_| std::process::abort()));
        panic!("a defect");
    };
    // SAFETY: no pointers are passed; nothing is left to be done.
    unsafe { libc::_exit(error) }
}

fn run(probe: &str) -> Output {
    let mut image = tempfile::tempfile().unwrap();
    image.write_all(&[1; 8]).unwrap();
    image.rewind().unwrap();
    Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "probe", "--nocapture", "--test-threads=1"])
        .env(PROBE, probe)
        .env_remove("RUST_BACKTRACE")
        .stdin(image)
        .output()
        .unwrap()
}

fn fate(probe: &str) -> Fate {
    let output = run(probe);
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    match (output.status.code(), output.status.signal()) {
        (Some(0), _) => Fate::Done,
        (Some(error), _) => Fate::Error(error),
        (_, Some(libc::SIGSYS)) => {
            assert!(said.contains("is not allowed to it"), "{probe}: {said}");
            Fate::Ended
        }
        (_, signal) => panic!("{probe}: signal {signal:?}: {said}"),
    }
}

#[test]
fn a_confined_process_makes_the_system_calls_of_a_filter_and_is_ended_by_others() {
    for (name, expected, _) in SYSTEM_CALLS {
        assert_eq!(fate(name), *expected, "{name}");
    }
    let said = String::from_utf8(run("unknown").stderr).unwrap();
    assert!(said.contains("system call  4000 is"), "{said}");
}

#[test]
fn a_process_confined_in_all_ways_has_its_memory_and_no_more() {
    for (name, expected, _) in ALL {
        assert_eq!(fate(name), *expected, "{name}");
    }
}

#[test]
fn a_confined_process_reaches_no_path_port_or_process() {
    if confine_on_a_thread() != FilesConfined::Fully {
        // Not by a macro, whose output the harness hides when a test passes.
        let message = b"skipped: this kernel's Landlock does not know all that is asked of it\n";
        return std::io::stderr().write_all(message).unwrap();
    }
    for (name, expected, _) in FILES {
        assert_eq!(fate(name), *expected, "{name}");
    }
}

/// Landlock holds for the calling thread, so this one ends with its confinement.
fn confine_on_a_thread() -> FilesConfined {
    let confine = || {
        nix::sys::prctl::set_no_new_privs().unwrap();
        confine_files()
    };
    std::thread::spawn(confine).join().unwrap()
}

#[test]
fn a_confined_process_that_panics_aborts() {
    let output = run("panics");
    assert_eq!(output.status.signal(), Some(libc::SIGABRT), "{output:?}");
}

/// The program, serving one disk.
struct Filter {
    child: Child,
    directory: tempfile::TempDir,
}

const SIZE: u64 = 128 << 20;

/// One disk, and its files in this directory.
fn config(directory: &Path) -> Value {
    let path = |name: &str| directory.join(name);
    json!({
        "version": 1,
        "vm": "01890a5d-ac96-774b-bcce-b302099a8057",
        "control": { "path": path("control") },
        "disks": [{
            "disk": "01890a5d-ac96-774b-bcce-b302099a8058",
            "size": SIZE,
            "serial": "vmseal-0",
            "chain": [{ "kind": "crypt", "key": { "path": path("key") }, "holes": "zero" }],
            "backend": { "kind": "file", "file": { "path": path("disk") }, "offset": 0 },
            "front_end": {
                "kind": "vhost_user_blk", "socket": { "path": path("vhost") }, "queues": 1
            }
        }]
    })
}

impl Filter {
    fn start(place: &Path) -> Self {
        Self::start_with(place, |_| ())
    }

    /// A filter with something else in its configuration.
    fn start_with(place: &Path, change: impl FnOnce(&mut Value)) -> Self {
        let directory = tempfile::tempdir_in(place).unwrap();
        let path = |name: &str| directory.path().join(name);
        std::fs::write(path("key"), (0..64u8).collect::<Vec<_>>()).unwrap();
        std::fs::set_permissions(path("key"), PermissionsExt::from_mode(0o600)).unwrap();
        std::fs::File::create(path("disk")).unwrap().set_len(SIZE).unwrap();
        let mut config = config(directory.path());
        change(&mut config);
        std::fs::write(path("config"), config.to_string()).unwrap();
        let mut command = Command::new(env!("CARGO_BIN_EXE_vmseal-filter"));
        command.arg("--config").arg(path("config")).stderr(Stdio::inherit());
        Self { child: command.spawn().unwrap(), directory }
    }

    fn connect(&self, name: &str) -> UnixStream {
        let until = Instant::now() + TIMEOUT;
        loop {
            match UnixStream::connect(self.directory.path().join(name)) {
                Ok(stream) => return stream,
                Err(error) => assert!(Instant::now() < until, "no socket: {error}"),
            }
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    fn confinement(&self) -> Confinement {
        let mut stream = self.connect("control");
        stream.write_all(b"{\"do\":\"status\"}\n").unwrap();
        let mut answer = String::new();
        BufReader::new(stream).read_line(&mut answer).unwrap();
        let ControlReply::Status(status) = serde_json::from_str(&answer).unwrap() else {
            panic!("not a status")
        };
        status.confinement.unwrap()
    }

    /// A line of its `/proc/PID/status`.
    fn status(&self, name: &str) -> String {
        let text = std::fs::read_to_string(format!("/proc/{}/status", self.child.id())).unwrap();
        let line = text.lines().find_map(|line| line.strip_prefix(&format!("{name}:")));
        line.unwrap().trim().to_owned()
    }

    fn resident(&self) -> u64 {
        self.status("RssAnon").trim_end_matches(" kB").parse::<u64>().unwrap() * 1024
    }
}

impl Drop for Filter {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

#[test]
fn the_program_serves_confined_and_says_how() {
    let filter = Filter::start(Path::new(env!("CARGO_TARGET_TMPDIR")));
    let confinement = filter.confinement();
    assert_eq!(confinement.files, confine_on_a_thread());
    assert_eq!((filter.status("Seccomp"), filter.status("NoNewPrivs")), ("2".into(), "1".into()));
    let locks = 1_u64 << 14;
    for set in ["CapEff", "CapPrm", "CapInh", "CapAmb"] {
        let has = u64::from_str_radix(&filter.status(set), 16).unwrap();
        assert_eq!(has & !locks, 0, "{set}");
    }
    let limits = std::fs::read_to_string(format!("/proc/{}/limits", filter.child.id())).unwrap();
    let data = limits.lines().find(|line| line.starts_with("Max data size")).unwrap();
    let limit = confinement.memory_bytes.to_string();
    assert!(data.split_whitespace().skip(3).take(2).all(|value| value == limit), "{data}");
    // A copy of the disk, which may begin at any time and when the disk has grown, included.
    assert!(confinement.memory_bytes <= 166 << 20, "{limit}");
}

const DEPTH: u16 = 128;
const LENGTH: u32 = 512 << 10;
/// The places of the requests' headers, tables and data.
const HEADERS: u64 = BASE + 0x10000;
const TABLES: u64 = BASE + 0x20000;
const BUFFERS: u64 = BASE + 0x10_0000;

/// Keeps `DEPTH` requests of `length` bytes, at most `LENGTH`, in flight, `rounds` times over; `kind` is
/// virtio-blk's number.
fn load(guest: &mut Driver, kind: u32, length: u32, rounds: u32, mut watch: impl FnMut()) {
    let mut asked = 0_u64;
    let mut ask = |guest: &mut Driver, head: u16| {
        let (slot, place) = (u64::from(head), asked * u64::from(length) % SIZE);
        asked += 1;
        let (header, table) = (HEADERS + slot * 32, TABLES + slot * 64);
        let put = |bytes: &[u8], at| guest.memory.write_slice(bytes, GuestAddress(at)).unwrap();
        put(&kind.to_le_bytes(), header);
        put(&(place / 512).to_le_bytes(), header + 8);
        put(&[0xff], header + 16);
        let direction = if kind == 0 { WRITE } else { 0 };
        guest.describe_at(table, (header, 16, NEXT, 1));
        let data = BUFFERS + slot * u64::from(LENGTH);
        guest.describe_at(table + 16, (data, length, NEXT | direction, 2));
        guest.describe_at(table + 32, (header + 16, 1, WRITE, 0));
        guest.describe(head, (table, 48, INDIRECT, 0));
        guest.offer(head);
    };
    (0..DEPTH).for_each(|head| ask(guest, head));
    guest.kick();
    for round in 0..u32::from(DEPTH) * rounds {
        let (head, _) = guest.answer(TIMEOUT).expect("an answer");
        let status = HEADERS + u64::from(head) * 32 + 16;
        assert_eq!(guest.memory.read_obj::<u8>(GuestAddress(status)).unwrap(), 0);
        if round < u32::from(DEPTH) * (rounds - 1) {
            ask(guest, head as u16);
            guest.kick();
        }
        watch();
    }
}

#[test]
fn a_filter_at_its_busiest_stays_within_its_memory() {
    for place in [env!("CARGO_TARGET_TMPDIR"), "/dev/shm"] {
        let filter = Filter::start(Path::new(place));
        let memory = (1 << 20) + u64::from(DEPTH) * u64::from(LENGTH);
        let mut guest = Driver::connect_sized(filter.connect("vhost"), DEPTH, memory);
        let idle = filter.resident();
        let mut most = 0;
        for kind in [1, 0, 1] {
            load(&mut guest, kind, LENGTH, 4, || most = most.max(filter.resident()));
        }
        let limit = filter.confinement().memory_bytes;
        println!("{place}: RssAnon {idle} idle, {most} at depth {DEPTH} x {LENGTH}; limit {limit}");
        assert!(most <= 32 << 20, "{place}: {most} bytes of its own");
    }
}

#[test]
fn a_cache_takes_what_it_was_given_and_no_more() {
    const CACHE: u64 = 32 << 20;
    let filter = Filter::start_with(Path::new("/dev/shm"), |config| {
        let chain = config["disks"][0]["chain"].as_array_mut().unwrap();
        chain.push(json!({ "kind": "cache", "bytes": CACHE }));
    });
    let memory = (1 << 20) + u64::from(DEPTH) * u64::from(LENGTH);
    let mut guest = Driver::connect_sized(filter.connect("vhost"), DEPTH, memory);
    let idle = filter.resident();
    // The whole disk, four times as long as the cache.
    load(&mut guest, 0, 4096, 256, || ());
    let (full, limit) = (filter.resident(), filter.confinement().memory_bytes);
    println!("RssAnon {idle} idle, {full} after reading four times as much; limit {limit}");
    assert!(idle <= 32 << 20, "{idle} bytes before anything was read");
    assert!(full >= CACHE, "{full} bytes: it is not full, and the test proves nothing");
    assert!(full <= (32 << 20) + CACHE, "{full} bytes of its own");
    // A copy of the disk, which may begin at any time and when the disk has grown, gets a cache of the same size.
    assert!(((165 << 20) + 2 * CACHE..=(170 << 20) + 2 * CACHE).contains(&limit), "{limit}");
}
