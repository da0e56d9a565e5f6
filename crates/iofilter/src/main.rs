//! `vmseal-filter --config FILE|-|fd:N`: serves the disks of one VM.
//!
//! It reads its configuration ([`vmseal_api::filter::FilterConfig`]) once, takes the keys from
//! inherited descriptors, and serves until SIGTERM or a shutdown over its control socket; then it
//! finishes the requests in flight, flushes, and exits with 0.

use std::fs::File;
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::mpsc::{self, Receiver, Sender};
use std::time::Duration;

use anyhow::{Context, bail};
use nix::sys::signal::{SigSet, Signal};
use vmseal_api::filter::{ControlReply, FilesConfined, FilterConfig};
use vmseal_api::problem::ErrorCode;
use vmseal_api::request_id::RequestId;
use vmseal_iofilter::handle::Handles;
use vmseal_iofilter::process::config;
use vmseal_iofilter::process::confinement;
use vmseal_iofilter::process::control::{self, Control, Event};
use vmseal_iofilter::process::slice;
use vmseal_iofilter::process::{Opened, Running};
use vmseal_secret::process::{Hardening, MemoryLock, harden};

const USAGE: &str = "usage: vmseal-filter --config FILE|-|fd:N | --version

Serves the disks of one VM as its JSON configuration says, which is read from a file, from standard
input (-) or from an inherited descriptor (fd:N). Logs go to standard error; its log_levels,
or else RUST_LOG, say how much.";

/// How long to wait until the outcome of a shutdown has been sent to the client that asked for it.
const LAST_WORDS: Duration = Duration::from_secs(2);

/// The stack size of the two small threads.
const STACK: usize = 256 * 1024;

fn main() -> ExitCode {
    if std::env::args_os().skip(1).eq(["--version"]) {
        println!("vmseal-filter {}", env!("CARGO_PKG_VERSION"));
        return ExitCode::SUCCESS;
    }
    // First of all: before there are threads, keys or anything else that must not be in a core dump.
    let hardening = harden();
    // Its agent starts it by descriptor, from which the kernel makes a name like "11".
    let named = nix::sys::prctl::set_name(c"vmseal-filter");
    let privileges = nix::sys::prctl::set_no_new_privs();
    log();
    report(&hardening);
    if let Err(error) = privileges {
        tracing::warn!(%error, "new privileges could not be forbidden");
    }
    if let Err(error) = named {
        tracing::warn!(%error, "the process keeps another name");
    }
    if run() { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

fn log() {
    vmseal_log::start();
    std::panic::set_hook(Box::new(|panic| {
        if vmseal_iofilter::stack::contained::is_contained() {
            return tracing::error!(%panic, "a defect of a library; the operation fails");
        }
        tracing::error!(%panic, "a defect; the process ends");
        std::process::abort();
    }));
}

fn report(hardening: &Hardening) {
    match hardening.memory {
        MemoryLock::Locked => {}
        MemoryLock::LimitTooLow(limit) => {
            tracing::warn!(limit, "memory is not locked: RLIMIT_MEMLOCK is too low");
        }
        MemoryLock::Refused(error) => tracing::warn!(%error, "memory is not locked"),
    }
    if !hardening.not_dumpable || !hardening.no_core {
        tracing::warn!("the process could be dumped");
    }
}

/// Serves until asked to stop; true if everything went well.
fn run() -> bool {
    let mut handles = Handles::default();
    let Ok(config) = read_config(&mut handles).inspect_err(tell) else { return false };
    if let Some(levels) = &config.log_levels {
        match levels.parse() {
            Ok(levels) => vmseal_log::set_levels(levels),
            Err(error) => {
                tracing::warn!(%error, "the configuration's log_levels are not understood")
            }
        }
    }
    let begun = request_span(&config).in_scope(|| begin(&config, &mut handles).inspect_err(tell));
    begun.is_ok_and(|(running, asked)| end(running, &asked))
}

fn tell(error: &anyhow::Error) {
    tracing::error!("{error:#}");
}

/// The request id that the process was started with. When it was started by hand, this may be any text.
fn request_span(config: &FilterConfig) -> tracing::Span {
    match RequestId::sent(config.request_id.as_deref().map(str::as_bytes)) {
        Some(id) => tracing::error_span!("request", request_id = %id),
        None => tracing::Span::none(),
    }
}

fn begin(
    config: &FilterConfig,
    handles: &mut Handles,
) -> anyhow::Result<(Running, Receiver<Event>)> {
    // Blocked before there are threads, so that only the waiting one gets them.
    let signals = SigSet::from_iter([Signal::SIGTERM, Signal::SIGINT]);
    signals.thread_block().context("signals cannot be blocked")?;
    let listener = handles.listener(&config.control).context("the control socket")?;
    if let Err(error) = slice::shorten() {
        tracing::info!(%error, "the scheduler's slices stay as they are");
    }
    let opened = Opened::open(config, handles)?;
    let confinement = confinement::enter(config)?;
    if confinement.files != FilesConfined::Fully {
        tracing::warn!(enforced = ?confinement.files, "Landlock does not keep the process from all paths");
    }
    let running = Running::start(opened)?;
    let (events, asked) = mpsc::channel();
    let control = Arc::new(Control {
        vm: config.vm,
        uid: config.control_uid.unwrap_or(nix::unistd::geteuid().as_raw()),
        disks: running.disks().to_vec(),
        confinement,
        events: events.clone(),
    });
    // Before a control client can change the log levels.
    let levels = vmseal_log::levels();
    tracing::info!(vm = %config.vm, disks = config.disks.len(), logging = %levels, memory = confinement.memory_bytes, "serving");
    std::thread::Builder::new()
        .name("control".into())
        .stack_size(STACK)
        .spawn(move || control::serve(&listener, &control))?;
    std::thread::Builder::new()
        .name("signals".into())
        .stack_size(STACK)
        .spawn(move || on_signal(&signals, &events))?;
    Ok((running, asked))
}

fn on_signal(signals: &SigSet, events: &Sender<Event>) {
    if let Ok(signal) = signals.wait() {
        tracing::info!(%signal, "asked to end");
        let _ = events.send(Event::Shutdown { reply: None, sent: None });
    }
}

/// Waits for a shutdown and does it; true if everything went well.
fn end(running: Running, asked: &Receiver<Event>) -> bool {
    let Ok(Event::Shutdown { reply, sent }) = asked.recv() else { return false };
    let well = running.shut_down();
    let outcome = if well {
        tracing::info!("everything is finished and flushed");
        ControlReply::Done
    } else {
        let message = "a disk could not be finished or flushed; the filter's log says which".into();
        ControlReply::Error { code: ErrorCode::Internal, message }
    };
    if let (Some(reply), Some(sent)) = (reply, sent) {
        let _ = reply.send(outcome);
        let _ = sent.recv_timeout(LAST_WORDS);
    }
    well
}

fn read_config(handles: &mut Handles) -> anyhow::Result<FilterConfig> {
    let mut arguments = std::env::args().skip(1);
    let (Some("--config"), Some(from), None) =
        (arguments.next().as_deref(), arguments.next(), arguments.next())
    else {
        bail!("{USAGE}");
    };
    if from == "-" {
        return Ok(config::read(std::io::stdin().lock())?);
    }
    if let Some(number) = from.strip_prefix("fd:") {
        let fd: i32 = number.parse().with_context(|| format!("{number} is not a descriptor"))?;
        return Ok(config::read(File::from(handles.inherited(fd)?))?);
    }
    let file = File::open(&from).with_context(|| format!("cannot open {from}"))?;
    Ok(config::read(file)?)
}
