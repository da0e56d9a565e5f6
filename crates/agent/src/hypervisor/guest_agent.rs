//! The agent in a guest (QEMU's guest agent), over a port of the guest's: one JSON object a line.
//!
//! ```text
//! connect ─► 0xFF, guest-sync-delimited(id) ─► 0xFF, id ─► command ─► return | error ─► disconnect
//! ```
//! Each command has a connection of its own, so that an answer that came too late is never taken for that of the next
//! one. What the guest sends is not trusted: lines and times are bounded, and the text is decoded as data.
//!
//! Commands are people's, and wait for each other. A question is vmseal's own: it begins only while there is no command, and
//! one that comes ends it.
//!
//! A freeze for a snapshot is vmseal's own, too, and so is its thaw. While these are not ended, freezing is reserved: an operator's
//! freeze is refused, so that vmseal never thaws what an operator has frozen.

mod interfaces;

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use serde_json::{Value, json};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::UnixStream;
use tokio::sync::{Mutex, MutexGuard, watch};
use tokio::time::{Instant, sleep, timeout};
use vmseal_api::guest::{GuestAnswer, GuestCommand, OUTPUT_MAX};
use vmseal_api::nic::MacAddress;
use vmseal_api::problem::{ErrorCode, Problem};

use super::network::addresses::Said;

/// What QEMU calls its end of the port.
pub const CHARDEV: &str = "guest";

/// The name of the port, which guests know it by.
pub const PORT: &str = "org.qemu.guest_agent.0";

/// The name of QEMU's socket for it.
pub const SOCKET: &str = "guest";

/// The longest that the agent may take to answer at all.
const SYNC_TIMEOUT: Duration = Duration::from_secs(5);

/// The longest that one of its commands may take: a freeze flushes the guest's file systems.
const COMMAND_TIMEOUT: Duration = Duration::from_secs(40);

/// The longest that it may take to say whether file systems are frozen: it looks at nothing but a note of its own for that.
const STATUS_TIMEOUT: Duration = SYNC_TIMEOUT;

/// How long a command waits for the one before it.
const TURN_TIMEOUT: Duration = Duration::from_secs(2);

/// The longest that a question may take, with the synchronisation before it.
const QUESTION_TIMEOUT: Duration = Duration::from_secs(8);

/// The pause between questions whether a program has ended.
const POLL_INTERVAL: Duration = Duration::from_millis(100);

/// The longest line that is taken from a guest, in bytes: more than both outputs in base64.
const LINE_MAX: usize = 4 * 1024 * 1024;

/// The most that is taken from a guest for a question, in bytes: it is asked again and again, and says some 600 bytes of each
/// of its interfaces, of which one with containers has hundreds.
const QUESTION_BYTES_MAX: usize = 512 * 1024;

/// What has it flush its file systems and write to none of them.
const FREEZE: &str = "guest-fsfreeze-freeze";

/// What has it write to them again.
const THAW: &str = "guest-fsfreeze-thaw";

/// What it says whether they are frozen to; it answers this also while they are.
const STATUS: &str = "guest-fsfreeze-status";

/// What begins an answer after a synchronisation, and has an agent drop half a line.
const SENTINEL: u8 = 0xff;

/// The way to a guest's agent.
#[derive(Clone, Debug)]
pub struct GuestAgent {
    vm: String,
    socket: PathBuf,
    /// One command or question at a time, as there is one port.
    turn: Arc<Mutex<()>>,
    /// How many commands are executed or wait.
    commands: Arc<watch::Sender<usize>>,
    /// Whether freezing is reserved for vmseal itself.
    reserved: Arc<AtomicBool>,
}

/// A command that is executed or waits.
struct Counted<'a>(&'a watch::Sender<usize>);

impl<'a> Counted<'a> {
    fn new(commands: &'a watch::Sender<usize>) -> Self {
        commands.send_modify(|count| *count += 1);
        Self(commands)
    }
}

impl Drop for Counted<'_> {
    fn drop(&mut self) {
        self.0.send_modify(|count| *count -= 1);
    }
}

impl GuestAgent {
    /// The agent behind this socket of QEMU's.
    #[must_use]
    pub fn at(vm: &str, socket: PathBuf) -> Self {
        let (turn, commands, reserved) = (Arc::default(), Arc::default(), Arc::default());
        Self { vm: vm.to_owned(), socket, turn, commands, reserved }
    }

    /// The same for a VM that may have got another name since it was started.
    #[must_use]
    pub fn called(self, vm: &str) -> Self {
        Self { vm: vm.to_owned(), ..self }
    }

    /// Asks it for an operator.
    ///
    /// # Errors
    /// `unreachable` where no agent answers; `limit-exceeded` where a program takes too long or says too much;
    /// `timed-out` where it is not known whether a command was done; `in-use` while another one is being executed, and for a freeze
    /// while freezing is reserved; `unsupported` for a VM that has no such port; what the agent refuses.
    pub async fn ask(&self, command: GuestCommand) -> Result<GuestAnswer, Problem> {
        let _counted = Counted::new(&self.commands);
        let _turn = self.take_turn().await?;
        // With the turn: who reserves it and then asks whether file systems are frozen hears of a freeze that was before.
        if command == GuestCommand::Freeze && self.reserved.load(Ordering::SeqCst) {
            let what = "has its file systems frozen for a snapshot, or not thawed yet after one: wait, or thaw them (vmseal vm guest fsthaw)";
            return Err(self.problem(ErrorCode::InUse, what));
        }
        let mut talk = self.connect(usize::MAX).await?;
        match command {
            GuestCommand::Ping => {
                talk.execute("guest-ping", Value::Null).await?;
                Ok(GuestAnswer::Pong)
            }
            GuestCommand::Exec { path, arguments, seconds } => {
                talk.run(&path, &arguments, Duration::from_secs(seconds.into())).await
            }
            GuestCommand::Freeze => {
                let count = talk.execute(FREEZE, Value::Null).await?;
                Ok(GuestAnswer::Frozen { file_systems: count.as_u64().unwrap_or(0) })
            }
            GuestCommand::Thaw => {
                let count = talk.execute(THAW, Value::Null).await?;
                Ok(GuestAnswer::Thawed { file_systems: count.as_u64().unwrap_or(0) })
            }
        }
    }

    /// Reserves freezing for vmseal itself, or lets operators freeze again.
    pub fn reserve_freezing(&self, reserved: bool) {
        self.reserved.store(reserved, Ordering::SeqCst);
    }

    /// Asks whether its file systems are frozen.
    ///
    /// # Errors
    /// As [`Self::ask`].
    pub async fn is_frozen(&self) -> Result<bool, Problem> {
        let _counted = Counted::new(&self.commands);
        let _turn = self.take_turn().await?;
        let mut talk = self.connect(usize::MAX).await?;
        talk.is_frozen().await
    }

    /// Freezes its file systems for vmseal itself, which has reserved that.
    ///
    /// # Errors
    /// As [`Self::ask`].
    pub async fn freeze(&self) -> Result<(), Problem> {
        let _counted = Counted::new(&self.commands);
        let _turn = self.take_turn().await?;
        let mut talk = self.connect(usize::MAX).await?;
        talk.execute(FREEZE, Value::Null).await.map(drop)
    }

    /// Thaws its file systems, if they are frozen. Returns whether they were.
    ///
    /// # Errors
    /// As [`Self::ask`].
    pub async fn thaw(&self) -> Result<bool, Problem> {
        let _counted = Counted::new(&self.commands);
        let _turn = self.take_turn().await?;
        let mut talk = self.connect(usize::MAX).await?;
        let frozen = match talk.is_frozen().await {
            // It does not tell. What is not frozen is not harmed by a thaw.
            Err(problem) if problem.code == ErrorCode::WrongState => true,
            told => told?,
        };
        if frozen {
            talk.execute(THAW, Value::Null).await?;
        }
        Ok(frozen)
    }

    /// Asks which addresses these cards of its VM have: what it says, in the order of use.
    ///
    /// # Errors
    /// `in-use` where there is a command, or one came meanwhile; `limit-exceeded` where it says too much; `timed-out` or
    /// `unreachable` where it does not answer; what it refuses.
    pub async fn addresses(&self, cards: &[MacAddress]) -> Result<Vec<Said>, Problem> {
        let Ok(_turn) = self.turn.try_lock() else { return Err(self.in_use()) };
        let question = async {
            let mut talk = self.connect(QUESTION_BYTES_MAX).await?;
            let answer = talk.execute("guest-network-get-interfaces", Value::Null).await?;
            Ok::<_, Problem>(interfaces::addresses(&answer, cards))
        };
        tokio::select! {
            // A command that waits already comes first.
            biased;
            () = self.is_commanded() => Err(self.in_use()),
            asked = timeout(QUESTION_TIMEOUT, question) => asked.unwrap_or_else(|_| {
                let what = format!("has not answered within {} s", QUESTION_TIMEOUT.as_secs());
                Err(self.problem(ErrorCode::TimedOut, &what))
            }),
        }
    }

    async fn take_turn(&self) -> Result<MutexGuard<'_, ()>, Problem> {
        timeout(TURN_TIMEOUT, self.turn.lock()).await.map_err(|_| self.in_use())
    }

    /// Waits until there is a command.
    async fn is_commanded(&self) {
        let mut commands = self.commands.subscribe();
        // The sender is there as long as this.
        let _ = commands.wait_for(|count| *count > 0).await;
    }

    fn in_use(&self) -> Problem {
        self.problem(ErrorCode::InUse, "executes another command: wait for it")
    }

    /// Connects, to take at most so many bytes.
    async fn connect(&self, left: usize) -> Result<Talk<'_>, Problem> {
        let stream = UnixStream::connect(&self.socket).await.map_err(|error| {
            tracing::debug!(%error, "the port of a guest's agent");
            let what =
                "has no port for a guest agent: an earlier vmseal started it. Stop and start it";
            self.problem(ErrorCode::Unsupported, what)
        })?;
        let mut talk = Talk { agent: self, stream, read: Vec::new(), left };
        match timeout(SYNC_TIMEOUT, talk.synchronise()).await {
            Ok(Ok(())) => Ok(talk),
            Ok(Err(problem)) => Err(problem),
            Err(_) => {
                let what = format!(
                    "has no guest agent that answers within {} s: install qemu-guest-agent in the guest, and wait until it has booted",
                    SYNC_TIMEOUT.as_secs()
                );
                Err(self.problem(ErrorCode::Unreachable, &what))
            }
        }
    }

    fn problem(&self, code: ErrorCode, what: &str) -> Problem {
        Problem::new(code, format!("the guest of VM '{}' {what}", self.vm))
    }
}

/// A connection to it.
struct Talk<'a> {
    agent: &'a GuestAgent,
    stream: UnixStream,
    /// What was read behind the last line.
    read: Vec<u8>,
    /// How many more bytes are taken.
    left: usize,
}

impl Talk<'_> {
    fn lost(&self, error: &std::io::Error) -> Problem {
        self.agent.problem(ErrorCode::Unreachable, &format!("is not reached any more: {error}"))
    }

    async fn send(
        &mut self,
        before: &[u8],
        command: &str,
        arguments: Value,
    ) -> Result<(), Problem> {
        let mut request = json!({ "execute": command });
        if !arguments.is_null() {
            request["arguments"] = arguments;
        }
        let line = [before, request.to_string().as_bytes(), b"\n"].concat();
        self.stream.write_all(&line).await.map_err(|error| self.lost(&error))
    }

    /// Drops what is left of earlier commands, on both sides.
    async fn synchronise(&mut self) -> Result<(), Problem> {
        let id = u64::from(std::process::id()) << 32 | u64::from(rand_bits());
        self.send(&[SENTINEL], "guest-sync-delimited", json!({ "id": id })).await?;
        loop {
            self.until(SENTINEL).await?;
            let answer: Option<Value> = serde_json::from_slice(&self.until(b'\n').await?).ok();
            if answer.is_some_and(|answer| answer["return"] == json!(id)) {
                return Ok(());
            }
        }
    }

    /// What comes before the next byte of this value, which is dropped.
    async fn until(&mut self, end: u8) -> Result<Vec<u8>, Problem> {
        let mut from = 0;
        loop {
            if let Some(place) = self.read[from..].iter().position(|byte| *byte == end) {
                let rest = self.read.split_off(from + place + 1);
                let mut line = std::mem::replace(&mut self.read, rest);
                line.pop();
                return Ok(line);
            }
            from = self.read.len();
            if from > LINE_MAX {
                let what = format!(
                    "answered with more than {LINE_MAX} bytes: have the program write to a file"
                );
                return Err(self.agent.problem(ErrorCode::LimitExceeded, &what));
            }
            let mut chunk = [0; 16 * 1024];
            match self.stream.read(&mut chunk).await {
                Ok(0) => return Err(self.lost(&std::io::ErrorKind::UnexpectedEof.into())),
                Ok(count) => {
                    self.left = self.left.checked_sub(count).ok_or_else(|| {
                        let what = "says more than an answer may have";
                        self.agent.problem(ErrorCode::LimitExceeded, what)
                    })?;
                    self.read.extend_from_slice(&chunk[..count]);
                }
                Err(error) => return Err(self.lost(&error)),
            }
        }
    }

    async fn execute(&mut self, command: &str, arguments: Value) -> Result<Value, Problem> {
        self.execute_within(COMMAND_TIMEOUT, command, arguments).await
    }

    /// Asks whether file systems are frozen.
    async fn is_frozen(&mut self) -> Result<bool, Problem> {
        let told = self.execute_within(STATUS_TIMEOUT, STATUS, Value::Null).await?;
        match told.as_str() {
            Some("frozen") => Ok(true),
            Some("thawed") => Ok(false),
            _ => {
                let what = "does not say whether its file systems are frozen";
                Err(self.agent.problem(ErrorCode::Unreachable, what))
            }
        }
    }

    async fn execute_within(
        &mut self,
        limit: Duration,
        command: &str,
        arguments: Value,
    ) -> Result<Value, Problem> {
        let answered = timeout(limit, async {
            self.send(&[], command, arguments).await?;
            self.until(b'\n').await
        });
        let Ok(line) = answered.await else {
            let what = format!(
                "has not answered {command} within {} s; whether it was done is not known",
                limit.as_secs()
            );
            return Err(self.agent.problem(ErrorCode::TimedOut, &what));
        };
        let answer: Value = serde_json::from_slice(&line?).map_err(|error| {
            self.agent.problem(ErrorCode::Unreachable, &format!("answered no JSON: {error}"))
        })?;
        if let Some(error) = answer.get("error") {
            let said = error["desc"].as_str().unwrap_or("without a word");
            // The text is the guest's.
            let said: String = said.chars().filter(|c| !c.is_control()).take(500).collect();
            let what = format!("refuses {command}: {said}");
            return Err(self.agent.problem(ErrorCode::WrongState, &what));
        }
        Ok(answer["return"].clone())
    }

    async fn run(
        &mut self,
        path: &str,
        arguments: &[String],
        wait: Duration,
    ) -> Result<GuestAnswer, Problem> {
        let give_up = Instant::now() + wait;
        let start = json!({ "path": path, "arg": arguments, "capture-output": true });
        let pid = self.execute("guest-exec", start).await?["pid"].clone();
        loop {
            let status = self.execute("guest-exec-status", json!({ "pid": pid })).await?;
            if status["exited"] == Value::Bool(true) {
                return Ok(ended(&status));
            }
            if Instant::now() > give_up {
                let what = format!(
                    "still runs {path} after {} s (process {pid}); it goes on, and its output is lost",
                    wait.as_secs()
                );
                return Err(self.agent.problem(ErrorCode::LimitExceeded, &what));
            }
            sleep(POLL_INTERVAL).await;
        }
    }
}

/// A number that the answer to another connection does not have.
fn rand_bits() -> u32 {
    let mut bytes = [0; 4];
    // Without random bytes the process id is left, which is enough against a mistake.
    let _ = aws_lc_rs::rand::fill(&mut bytes);
    u32::from_le_bytes(bytes)
}

fn ended(status: &Value) -> GuestAnswer {
    let mut truncated = false;
    let mut output = |name: &str, cut: &str| {
        let text = status[name].as_str().unwrap_or_default();
        let mut bytes = STANDARD.decode(text).unwrap_or_default();
        truncated |= status[cut] == Value::Bool(true) || bytes.len() > OUTPUT_MAX;
        bytes.truncate(OUTPUT_MAX);
        STANDARD.encode(bytes)
    };
    let (stdout, stderr) =
        (output("out-data", "out-truncated"), output("err-data", "err-truncated"));
    let number = |name: &str| status[name].as_i64().and_then(|it| i32::try_from(it).ok());
    GuestAnswer::Ended {
        status: number("exitcode"),
        signal: number("signal"),
        stdout,
        stderr,
        truncated,
    }
}

#[cfg(test)]
mod tests {
    use tokio::io::{AsyncBufReadExt, BufReader};
    use tokio::net::UnixListener;
    use tokio::sync::mpsc;

    use super::*;

    /// An agent that answers each command as `answer` does; none is no answer.
    fn guest(
        answer: impl Fn(&str, &Value) -> Option<String> + Send + 'static,
    ) -> (tempfile::TempDir, GuestAgent) {
        let directory = tempfile::tempdir().unwrap();
        let socket = directory.path().join("guest.sock");
        let listener = UnixListener::bind(&socket).unwrap();
        tokio::spawn(async move {
            while let Ok((stream, _)) = listener.accept().await {
                let (reader, mut writer) = stream.into_split();
                let mut lines = BufReader::new(reader).split(b'\n');
                // What an earlier command left in the port.
                let _ = writer.write_all(b"{\"return\": {\"pid\"").await;
                while let Ok(Some(line)) = lines.next_segment().await {
                    let line = line.strip_prefix(&[SENTINEL]).unwrap_or(&line);
                    let asked: Value = serde_json::from_slice(line).unwrap();
                    let command = asked["execute"].as_str().unwrap();
                    let said = if command == "guest-sync-delimited" {
                        let answer = json!({ "return": asked["arguments"]["id"] });
                        [&[SENTINEL], answer.to_string().as_bytes()].concat()
                    } else {
                        let Some(said) = answer(command, &asked["arguments"]) else { continue };
                        said.into_bytes()
                    };
                    let _ = writer.write_all(&[&said, &b"\n"[..]].concat()).await;
                }
            }
        });
        let agent = GuestAgent::at("web", socket);
        (directory, agent)
    }

    fn exec(seconds: u32) -> GuestCommand {
        GuestCommand::Exec {
            path: "/bin/true".to_owned(),
            arguments: vec!["x".to_owned()],
            seconds,
        }
    }

    #[tokio::test]
    async fn commands_are_answered_and_refusals_have_the_guests_words() {
        let (_directory, agent) = guest(|command, arguments| {
            Some(match command {
                "guest-ping" => r#"{"return": {}}"#.to_owned(),
                "guest-exec" => {
                    assert_eq!(arguments["arg"], json!(["x"]));
                    r#"{"return": {"pid": 7}}"#.to_owned()
                }
                "guest-exec-status" => {
                    assert_eq!(arguments["pid"], 7);
                    let out = STANDARD.encode(vec![b'o'; OUTPUT_MAX + 1]);
                    json!({"return": {"exited": true, "exitcode": 3, "out-data": out}}).to_string()
                }
                "guest-fsfreeze-freeze" => r#"{"return": 2}"#.to_owned(),
                _ => r#"{"error": {"class": "GenericError", "desc": "is\u001b[0m disabled"}}"#
                    .to_owned(),
            })
        });
        assert_eq!(agent.ask(GuestCommand::Ping).await.unwrap(), GuestAnswer::Pong);
        let ended = agent.ask(exec(5)).await.unwrap();
        let GuestAnswer::Ended { status, stdout, truncated, .. } = ended else {
            panic!("{ended:?}")
        };
        assert_eq!((status, truncated), (Some(3), true));
        assert_eq!(STANDARD.decode(stdout).unwrap().len(), OUTPUT_MAX);
        let frozen = agent.ask(GuestCommand::Freeze).await.unwrap();
        assert_eq!(frozen, GuestAnswer::Frozen { file_systems: 2 });
        let refused = agent.ask(GuestCommand::Thaw).await.unwrap_err();
        assert_eq!(refused.code, ErrorCode::WrongState);
        assert!(refused.detail.ends_with("is[0m disabled"), "{refused}");
    }

    #[tokio::test]
    async fn a_guest_that_does_not_answer_or_not_end_is_given_up() {
        let (_directory, agent) = guest(|command, _| {
            let running = json!({"return": {"exited": false, "pid": 7}}).to_string();
            (command != "guest-ping").then_some(running)
        });
        let late = agent.ask(exec(1)).await.unwrap_err();
        assert!(
            late.code == ErrorCode::LimitExceeded && late.detail.contains("still runs"),
            "{late}"
        );
        let directory = tempfile::tempdir().unwrap();
        let socket = directory.path().join("s");
        let agent = GuestAgent::at("web", socket.clone());
        let none = agent.ask(GuestCommand::Ping).await.unwrap_err();
        assert_eq!(none.code, ErrorCode::Unsupported);
        let _silent = UnixListener::bind(socket).unwrap();
        let silent = agent.ask(GuestCommand::Ping).await.unwrap_err();
        assert!(silent.detail.contains("qemu-guest-agent"), "{silent}");
    }

    /// An agent that has file systems, and whether they are frozen.
    fn with_file_systems() -> (tempfile::TempDir, GuestAgent, Arc<AtomicBool>) {
        let frozen = Arc::new(AtomicBool::new(false));
        let state = Arc::clone(&frozen);
        let (directory, agent) = guest(move |command, _| {
            let is_frozen = state.load(Ordering::SeqCst);
            let answer = match command {
                STATUS => json!({"return": if is_frozen { "frozen" } else { "thawed" }}),
                FREEZE if is_frozen => json!({"error": {"desc": "disabled: it is frozen"}}),
                FREEZE | THAW => {
                    state.store(command == FREEZE, Ordering::SeqCst);
                    json!({"return": 1})
                }
                _ => json!({"return": {}}),
            };
            Some(answer.to_string())
        });
        (directory, agent, frozen)
    }

    #[tokio::test]
    async fn what_is_thawed_is_what_the_guest_says_to_be_frozen() {
        let (_directory, agent, frozen) = with_file_systems();
        assert!(!agent.is_frozen().await.unwrap());
        assert!(!agent.thaw().await.unwrap(), "nothing was frozen");
        agent.freeze().await.unwrap();
        assert!(agent.is_frozen().await.unwrap());
        assert_eq!(agent.freeze().await.unwrap_err().code, ErrorCode::WrongState);
        assert!(agent.thaw().await.unwrap());
        assert!(!frozen.load(Ordering::SeqCst));

        // One that does not tell is thawed, and one that says anything else is asked again.
        let (_directory, agent) = guest(|command, _| {
            let answer = match command {
                STATUS => json!({"error": {"desc": "no such command"}}),
                _ => json!({"return": 0}),
            };
            Some(answer.to_string())
        });
        assert!(agent.thaw().await.unwrap());
        let (_directory, agent) = guest(|_, _| Some(r#"{"return": "molten"}"#.to_owned()));
        let refused = agent.thaw().await.unwrap_err();
        assert_eq!(refused.code, ErrorCode::Unreachable, "{refused}");
    }

    #[tokio::test]
    async fn an_operator_freezes_nothing_while_that_is_reserved_and_may_thaw() {
        let (_directory, agent, frozen) = with_file_systems();
        let of_operator = agent.clone().called("other");
        agent.reserve_freezing(true);
        let refused = of_operator.ask(GuestCommand::Freeze).await.unwrap_err();
        assert_eq!(refused.code, ErrorCode::InUse, "{refused}");
        assert!(!frozen.load(Ordering::SeqCst));
        agent.freeze().await.unwrap();
        let thawed = of_operator.ask(GuestCommand::Thaw).await.unwrap();
        assert_eq!(thawed, GuestAnswer::Thawed { file_systems: 1 });
        agent.reserve_freezing(false);
        of_operator.ask(GuestCommand::Freeze).await.unwrap();
        assert!(frozen.load(Ordering::SeqCst));
    }

    #[tokio::test]
    async fn a_guest_that_floods_is_cut_off() {
        let (_directory, agent) = guest(|_, _| Some("x".repeat(LINE_MAX + 64 * 1024)));
        let flood = agent.ask(GuestCommand::Ping).await.unwrap_err();
        assert_eq!(flood.code, ErrorCode::LimitExceeded, "{flood}");
    }

    fn card() -> MacAddress {
        "52:54:00:12:34:56".parse().unwrap()
    }

    #[tokio::test]
    async fn addresses_are_what_the_guest_says_within_bounds() {
        let answer = json!({"return": [{
            "hardware-address": card().to_string(),
            "ip-addresses": [{"ip-address": "192.0.2.7"}],
        }]});
        let (_directory, agent) = guest(move |_, _| Some(answer.to_string()));
        let said = agent.addresses(&[card()]).await.unwrap();
        assert_eq!(said, [Said { card: card(), address: [192, 0, 2, 7].into() }]);

        let (_directory, agent) = guest(|_, _| Some("x".repeat(QUESTION_BYTES_MAX + 64 * 1024)));
        let flood = agent.addresses(&[card()]).await.unwrap_err();
        assert_eq!(flood.code, ErrorCode::LimitExceeded, "{flood}");
    }

    #[tokio::test]
    async fn a_question_gives_way_to_a_command() {
        let (heard, mut asked) = mpsc::unbounded_channel();
        let (_directory, agent) = guest(move |command, _| {
            let _ = heard.send(command.to_owned());
            (command == "guest-ping").then(|| r#"{"return": {}}"#.to_owned())
        });
        let begun = Instant::now();
        let asks = agent.clone();
        let question = tokio::spawn(async move { asks.addresses(&[card()]).await });
        assert_eq!(asked.recv().await.as_deref(), Some("guest-network-get-interfaces"));
        assert_eq!(agent.ask(GuestCommand::Ping).await.unwrap(), GuestAnswer::Pong);
        assert_eq!(question.await.unwrap().unwrap_err().code, ErrorCode::InUse);
        assert!(begun.elapsed() < QUESTION_TIMEOUT, "the command waited for the question");
        // None begins beside a command.
        let _turn = agent.turn.lock().await;
        assert_eq!(agent.addresses(&[card()]).await.unwrap_err().code, ErrorCode::InUse);
    }
}
