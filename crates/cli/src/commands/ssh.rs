//! `vmseal vm ssh`: the system's own ssh, told where a VM is reached, as whom, and with which key.
//!
//! The keys of guests are known by the VM's id, in a file for each VM beside what `vmseal login` saves: addresses and
//! forwarded ports are used again by other VMs, and the user's own `known_hosts` is left alone.

use std::ffi::OsString;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::Context;
use serde::{Deserialize, Serialize};
use tokio::io::AsyncReadExt;
use tokio::net::TcpStream;
use tokio::task::JoinSet;
use tokio::time::timeout;
use vmseal_api::atomic_file::{self, PRIVATE};
use vmseal_api::client::ServerClient;
use vmseal_api::host::Power;
use vmseal_api::id::VmId;
use vmseal_api::model::{Nic, Vm};
use vmseal_api::nic::{NicLink, Protocol};

use crate::arguments::Ssh;
use crate::connection;
use crate::exit::{Ended, Exit};
use crate::rows::word;

/// The port of SSH servers.
pub const SSH_PORT: u16 = 22;

/// The user of the image that `vmseal image build debian` builds.
pub const USER: &str = "debian";

/// How long a guest may take to answer one connection.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(5);

/// What is said where no place is known, with where places come from.
pub const NOT_KNOWN: &str = "no address of it is known (on a bridge or a tap qemu-guest-agent in the guest says it; a card 'user' needs forward=tcp:22)";

/// The most addresses of a VM that are tried: a guest can say any, and they are connected to from here.
const PLACES_MAX: usize = 8;

/// What SSH servers say first (RFC 4253).
const BANNER: &[u8; 4] = b"SSH-";

/// Who logs in to a VM, as `vm launch` was told.
#[derive(Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LogIn {
    pub user: Option<String>,
    /// The file with the private key.
    pub identity: Option<PathBuf>,
}

pub async fn run(server: &ServerClient, options: Ssh) -> anyhow::Result<()> {
    let vm: Vm = server.get(&format!("vms/{}", options.name)).await?;
    let (address, port) = match &options.address {
        Some(address) => (address.clone(), options.port),
        None => {
            let found = endpoint(&vm).await?;
            (found.ip().to_string(), found.port())
        }
    };
    let directory = directory()?;
    atomic_file::private_directory(&directory)
        .with_context(|| format!("cannot make {}", directory.display()))?;
    let known = known(&vm)?;
    let log_in = LogIn {
        user: options.user.or(known.user),
        identity: options.identity.or(known.identity.filter(|file| file.exists())),
    };
    let arguments = arguments(&vm, &directory, &address, port, log_in, options.command);
    // Replaces this process: the exit code, the terminal and signals are ssh's own.
    let error = Command::new("ssh").args(arguments).exec();
    Err(error).context("cannot run ssh: install openssh-client")
}

fn arguments(
    vm: &Vm,
    directory: &Path,
    address: &str,
    port: u16,
    log_in: LogIn,
    command: Vec<String>,
) -> Vec<OsString> {
    let mut known_hosts = OsString::from("UserKnownHostsFile=\"");
    known_hosts.push(directory.join(format!("{}.known_hosts", vm.id)));
    known_hosts.push("\"");
    let mut all: Vec<OsString> = vec!["-o".into(), known_hosts];
    for option in [
        "GlobalKnownHostsFile=/dev/null".to_owned(),
        "StrictHostKeyChecking=accept-new".to_owned(),
        format!("HostKeyAlias={}", vm.id),
        // Without it each new VM would be a warning.
        "LogLevel=ERROR".to_owned(),
    ] {
        all.extend(["-o".into(), option.into()]);
    }
    if let Some(identity) = log_in.identity {
        all.extend(["-i".into(), identity.into()]);
    }
    all.extend(["-p".into(), port.to_string().into()]);
    all.extend(["-l".into(), log_in.user.unwrap_or_else(|| USER.to_owned()).into()]);
    all.extend(["--".into(), address.into()]);
    all.extend(command.into_iter().map(OsString::from));
    all
}

/// Where the SSH server of a running VM is reached: at a forwarded port, else at an address of its own.
async fn endpoint(vm: &Vm) -> anyhow::Result<SocketAddr> {
    require_running(vm)?;
    require_link(vm)?;
    let places = places(plugged(&vm.nics));
    match places[..] {
        [] => {
            let message = if vm.nics.is_empty() {
                format!("VM '{}' has no network card: use vmseal vm console {0}", vm.name)
            } else {
                format!("VM '{}': {NOT_KNOWN}; wait for it, or give --address", vm.name)
            };
            Err(Ended::new(Exit::NoAnswer, message).into())
        }
        // ssh says itself why it does not get there.
        [one] => Ok(one),
        [first, ..] => Ok(answering(&places).await.unwrap_or(first)),
    }
}

/// Refuses a VM whose guest cannot answer, with what to do.
fn require_running(vm: &Vm) -> anyhow::Result<()> {
    let name = &vm.name;
    let (exit, message) = match vm.power {
        Some(Power::Running) => return Ok(()),
        Some(Power::Paused) => (
            Exit::Conflict,
            format!("VM '{name}' is paused: let it go on (vmseal vm unpause {name})"),
        ),
        Some(Power::Suspended) => (
            Exit::Conflict,
            format!("VM '{name}' is suspended: have it go on (vmseal vm resume {name})"),
        ),
        None => (
            Exit::NoAnswer,
            format!(
                "whether VM '{name}' runs is not known, as its host '{}' is unreachable; check that its agent is running, or give --address",
                vm.host
            ),
        ),
        Some(Power::Off) => {
            (Exit::Conflict, format!("VM '{name}' does not run: start it (vmseal vm start {name})"))
        }
        Some(between) => (
            Exit::Conflict,
            format!(
                "VM '{name}' is {}: wait until it runs (vmseal vm show {name})",
                word(&between)
            ),
        ),
    };
    Err(Ended::new(exit, message).into())
}

/// The cards whose links are up.
pub fn plugged(nics: &[Nic]) -> impl Iterator<Item = &Nic> + Clone {
    nics.iter().filter(|nic| nic.link == NicLink::Up)
}

/// Refuses a VM that would be reached by a card whose link is down, with what to do. A forwarded port takes connections all the same,
/// and they wait for the guest.
fn require_link(vm: &Vm) -> anyhow::Result<()> {
    if !places(plugged(&vm.nics)).is_empty() {
        return Ok(());
    }
    let mut pulled = vm.nics.iter().filter(|nic| nic.link == NicLink::Down);
    let leading = pulled.clone().find(|nic| !places(std::iter::once(*nic)).is_empty());
    // An address of one that is pulled may not be known yet.
    let only = || pulled.next().filter(|_| plugged(&vm.nics).next().is_none());
    let Some(nic) = leading.or_else(only) else { return Ok(()) };
    let (name, card) = (&vm.name, &nic.name);
    let message = format!(
        "VM '{name}' is not reached: the link of its network card '{card}' is down; plug it in (vmseal nic set {name} {card} --link up)"
    );
    Err(Ended::new(Exit::Conflict, message).into())
}

/// Where the SSH server of a VM may be: at a forwarded port, else at the addresses of its own, in their order.
pub fn places<'a>(nics: impl IntoIterator<Item = &'a Nic> + Clone) -> Vec<SocketAddr> {
    let forwards = nics.clone().into_iter().flat_map(|nic| &nic.forwards);
    let mut to_ssh =
        forwards.filter(|it| it.protocol == Protocol::Tcp && it.guest_port == SSH_PORT);
    if let Some(forward) = to_ssh.find(|it| it.host_port != 0) {
        let address = match IpAddr::from(forward.host_address) {
            IpAddr::V4(any) if any.is_unspecified() => Ipv4Addr::LOCALHOST.into(),
            IpAddr::V6(any) if any.is_unspecified() => Ipv6Addr::LOCALHOST.into(),
            one => one,
        };
        return vec![SocketAddr::new(address, forward.host_port)];
    }
    let addresses = nics.into_iter().flat_map(|nic| &nic.addresses);
    // Which of this machine's links an address of IPv6 for a link is on, nobody knows.
    let reached = addresses.filter(|address| match address {
        IpAddr::V4(_) => true,
        IpAddr::V6(address) => !address.is_unicast_link_local(),
    });
    reached.map(|address| SocketAddr::new(*address, SSH_PORT)).take(PLACES_MAX).collect()
}

/// The first of these places at which an SSH server answers.
pub async fn answering(places: &[SocketAddr]) -> Option<SocketAddr> {
    let mut asked = JoinSet::new();
    for &at in places {
        asked.spawn(async move { answers(at).await.then_some(at) });
    }
    while let Some(answer) = asked.join_next().await {
        if let Ok(Some(at)) = answer {
            return Some(at);
        }
    }
    None
}

/// Whether an SSH server answers there. A forwarded port takes connections before there is one.
async fn answers(at: SocketAddr) -> bool {
    let begins = async {
        let mut stream = timeout(ANSWER_TIMEOUT, TcpStream::connect(at)).await??;
        let mut first = [0; BANNER.len()];
        timeout(ANSWER_TIMEOUT, stream.read_exact(&mut first)).await??;
        Ok::<_, std::io::Error>(first == *BANNER)
    };
    begins.await.unwrap_or(false)
}

/// Where the keys of guests are, and who logs in to them.
fn directory() -> anyhow::Result<PathBuf> {
    let login = connection::saved_path().context("there is no home directory: set HOME")?;
    Ok(login.with_file_name("ssh"))
}

fn file_of(vm: &Vm) -> anyhow::Result<PathBuf> {
    Ok(directory()?.join(format!("{}.toml", vm.id)))
}

/// Who logs in to a VM, as far as it was launched from here.
fn known(vm: &Vm) -> anyhow::Result<LogIn> {
    let file = file_of(vm)?;
    match std::fs::read_to_string(&file) {
        Ok(text) => toml::from_str(&text)
            .with_context(|| format!("{} is damaged: remove it", file.display())),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(LogIn::default()),
        Err(error) => Err(error).with_context(|| format!("cannot read {}", file.display())),
    }
}

/// Remembers who logs in to a VM.
pub fn remember(vm: &Vm, log_in: &LogIn) -> anyhow::Result<()> {
    let file = file_of(vm)?;
    let text = toml::to_string(log_in)?;
    atomic_file::private_directory(&directory()?)
        .and_then(|()| atomic_file::write(&file, text.as_bytes(), PRIVATE))
        .with_context(|| format!("cannot write {}", file.display()))
}

/// Forgets who logs in to a VM that is deleted, and the keys by which its guest was known.
pub fn forget(vm: &Vm) -> anyhow::Result<()> {
    // Without a home directory nothing was remembered.
    let Ok(directory) = directory() else { return Ok(()) };
    forget_in(&directory, vm.id)
}

fn forget_in(directory: &Path, vm: VmId) -> anyhow::Result<()> {
    // ssh keeps the last state of a file that it changes as `.old`.
    for end in ["toml", "known_hosts", "known_hosts.old"] {
        let file = directory.join(format!("{vm}.{end}"));
        match std::fs::remove_file(&file) {
            Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
                return Err(error).with_context(|| format!("cannot remove {}", file.display()));
            }
            _ => {}
        }
    }
    Ok(())
}

/// The private key that belongs to a public one, where it lies beside it.
pub fn private_of(public: &Path) -> Option<PathBuf> {
    let private = public.with_extension("");
    let is_public = public.extension().is_some_and(|extension| extension == "pub");
    (is_public && private.is_file()).then(|| std::path::absolute(private).ok())?
}

#[cfg(test)]
mod tests {
    use std::io::Write;
    use std::net::TcpListener;

    use serde_json::{from_value, json};
    use vmseal_api::id::NicId;
    use vmseal_api::nic::{NicBackend, NicModel, PortForward};

    use super::*;

    #[test]
    fn a_vm_that_is_deleted_is_forgotten_and_no_other() {
        let directory = tempfile::tempdir().unwrap();
        let (gone, stays) = (VmId::new(), VmId::new());
        let files = |vm| ["toml", "known_hosts"].map(|end| format!("{vm}.{end}"));
        for name in files(gone).iter().chain(&files(stays)) {
            std::fs::write(directory.path().join(name), "").unwrap();
        }
        for _ in 0..2 {
            forget_in(directory.path(), gone).unwrap();
        }
        let left = |name: &String| directory.path().join(name).exists();
        assert_eq!(files(gone).each_ref().map(left), [false, false]);
        assert_eq!(files(stays).each_ref().map(left), [true, true]);
    }

    #[tokio::test]
    async fn a_server_is_there_when_it_says_so_and_not_when_it_takes_connections() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let at = listener.local_addr().unwrap();
        let said = std::thread::spawn(move || {
            for text in ["", "HTTP/1.1 400", "SSH-2.0-OpenSSH_9.2\r\n"] {
                listener.accept().unwrap().0.write_all(text.as_bytes()).unwrap();
            }
        });
        let answered = [answers(at).await, answers(at).await, answers(at).await];
        assert_eq!(answered, [false, false, true]);
        said.join().unwrap();
        assert!(!answers(at).await, "nobody listens any more");
    }

    #[tokio::test]
    async fn of_several_addresses_the_one_is_taken_that_answers() {
        let [silent, speaks] = [(); 2].map(|()| TcpListener::bind("127.0.0.1:0").unwrap());
        let places = [&silent, &speaks].map(|listener| listener.local_addr().unwrap());
        let said = std::thread::spawn(move || {
            speaks.accept().unwrap().0.write_all(b"SSH-2.0-x\r\n").unwrap();
        });
        assert_eq!(answering(&places).await, Some(places[1]));
        said.join().unwrap();
        assert_eq!(answering(&[]).await, None);
    }

    #[test]
    fn a_vm_whose_guest_cannot_answer_is_refused_with_what_to_do() {
        for (power, exit, told) in [
            (json!("paused"), Exit::Conflict, "vmseal vm unpause web"),
            (json!("suspended"), Exit::Conflict, "vmseal vm resume web"),
            (json!("off"), Exit::Conflict, "vmseal vm start web"),
            (json!("migrating"), Exit::Conflict, "is migrating: wait"),
            (json!(null), Exit::NoAnswer, "host 'here' is unreachable"),
        ] {
            let vm: Vm = from_value(json!({
                "id": "11111111-1111-7111-8111-111111111111", "name": "web", "host": "here",
                "policy": "encrypted", "vcpus": 1, "memory": 512 << 20, "disks": [],
                "lifecycle": "ready", "power": power,
            }))
            .unwrap();
            let refused = require_running(&vm).unwrap_err();
            assert!(refused.to_string().contains(told), "{refused}");
            assert_eq!(Exit::of(&refused), exit, "{refused}");
        }
    }

    /// Name, link, the forwarded ports in force, and the guest's addresses.
    type Card<'a> = (&'a str, &'a str, &'a [&'a str], &'a [&'a str]);

    fn with_cards(cards: &[Card<'_>]) -> Vm {
        let card = |(name, link, forwards, addresses): &Card<'_>| {
            let forwards = forwards.iter().map(|it| it.parse::<PortForward>().unwrap());
            json!({
                "id": NicId::new(), "name": name, "mac": "52:54:00:12:34:56", "model": "virtio",
                "backend": { "kind": "user" }, "link": link, "addresses": addresses,
                "forwards": forwards.collect::<Vec<_>>(),
            })
        };
        from_value(json!({
            "id": "11111111-1111-7111-8111-111111111111", "name": "web", "host": "here",
            "policy": "encrypted", "vcpus": 1, "memory": 512 << 20, "disks": [],
            "lifecycle": "ready", "power": "running", "nics": cards.iter().map(card).collect::<Vec<_>>(),
        }))
        .unwrap()
    }

    #[tokio::test]
    async fn a_card_that_is_pulled_is_said_at_once_and_another_one_is_taken() {
        let (ssh, lan) = (&["tcp:2222:22"][..], &["10.0.0.7"][..]);
        let (none, to_ssh, to_lan): (&[&str], _, _) = (&[], "127.0.0.1:2222", "10.0.0.7:22");
        for (cards, reached) in [
            (&[("a", "up", ssh, none), ("b", "down", none, lan)][..], Ok(to_ssh)),
            (&[("a", "down", ssh, none), ("b", "up", none, lan)], Ok(to_lan)),
            (&[("a", "down", ssh, none)], Err("vmseal nic set web a --link up")),
            (&[("a", "down", none, none)], Err("vmseal nic set web a --link up")),
            (&[("a", "down", none, none), ("b", "down", none, lan)], Err("set web b --link up")),
            (&[("a", "up", none, none), ("b", "down", ssh, none)], Err("set web b --link up")),
            // Neither is known to lead there.
            (&[("a", "up", none, none), ("b", "down", none, none)], Err("no address of it")),
        ] {
            match (endpoint(&with_cards(cards)).await, reached) {
                (Ok(at), Ok(expected)) => assert_eq!(at.to_string(), expected),
                (Err(refused), Err(told)) => {
                    assert!(refused.to_string().contains(told), "{told}: {refused}");
                }
                (at, expected) => panic!("{at:?}, not {expected:?}"),
            }
        }
    }

    #[test]
    fn places_are_a_forwarded_port_or_addresses_of_either_kind() {
        let mut nic = Nic {
            id: NicId::new(),
            name: "lan".to_owned(),
            mac: "52:54:00:12:34:56".parse().unwrap(),
            model: NicModel::Virtio,
            backend: NicBackend::Bridge { bridge: "br0".to_owned() },
            link: NicLink::Up,
            forwards: Vec::new(),
            interface: Some("vmseal0".to_owned()),
            addresses: Vec::new(),
        };
        let shown = |nic: &Nic| {
            let places = places(std::slice::from_ref(nic));
            places.iter().map(ToString::to_string).collect::<Vec<_>>()
        };
        assert_eq!(shown(&nic), [""; 0]);
        nic.addresses = ["fe80::1", "10.0.0.7", "fd00::7"].map(|it| it.parse().unwrap()).to_vec();
        assert_eq!(shown(&nic), ["10.0.0.7:22", "[fd00::7]:22"]);
        nic.addresses = (0..99).map(|last| IpAddr::from([10, 0, 0, last])).collect();
        assert_eq!(shown(&nic).len(), PLACES_MAX);
        nic.forwards = vec![PortForward {
            protocol: Protocol::Tcp,
            host_address: Ipv4Addr::UNSPECIFIED,
            host_port: 2222,
            guest_port: SSH_PORT,
        }];
        assert_eq!(shown(&nic), ["127.0.0.1:2222"]);
    }

    #[test]
    fn the_private_key_is_the_one_beside_the_public() {
        let directory = tempfile::tempdir().unwrap();
        let public = directory.path().join("id_ed25519.pub");
        assert_eq!(private_of(&public), None);
        std::fs::write(directory.path().join("id_ed25519"), "").unwrap();
        assert_eq!(private_of(&public), Some(directory.path().join("id_ed25519")));
        assert_eq!(private_of(&directory.path().join("id_ed25519")), None);
    }
}
