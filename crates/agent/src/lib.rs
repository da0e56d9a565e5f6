//! The host: runs VMs for a control plane.
//!
//! ```text
//!  server ── HTTPS, client certificate ──► http ─► HostAgent ─┬─ host ─► vm (one task per VM)
//!                                                             │            ├─ QEMU       (qmp, console)
//!                                                             │            └─ vmseal-filter (control)
//!                                                             └─ simulated: the same rules, no processes
//! ```
//! | module | subject |
//! |---|---|
//! | [`host`] | the real host behind [`vmseal_api::host::HostAgent`]; joining, being called, the doctor |
//! | `vm` | the state machine of a VM and its owner; start, watch, end, adopt; the VMs of the host |
//! | `storage` | datastores and what is on them: disks, homes, replicas, images, exports |
//! | `filter` | `vmseal-filter`: its configuration, its control socket, what it measures and logs |
//! | [`hypervisor`] | QEMU: its command line, QMP, the serial console, what accelerates it here |
//! | [`process`] | processes that outlive the agent, on record, under users of their own; what this machine is |
//! | [`migration`] | what goes from host to host when a VM moves |
//! | `mounts` | what is mounted where, and who serves it |
//! | `timed` | calls on file systems that may hang |
//! | `keys` | KEKs: in locked memory, checked against what the inventory means |
//! | `rules` | what may be done with a VM when |
//! | `signer` | the key that reports are signed with |
//! | [`simulated`] | a simulated host with failure injection, for tests of the control plane |
//! | `contract` | the suite that both hosts pass (feature `contract-suite`) |

#[cfg(any(test, feature = "contract-suite"))]
pub mod contract;
mod filter;
pub mod host;
pub mod hypervisor;
mod jobs;
mod keys;
pub mod migration;
mod mounts;
pub mod process;
mod rules;
mod signer;
pub mod simulated;
#[cfg(test)]
mod skipped;
mod storage;
mod timed;
mod vm;

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::path::PathBuf;
use std::sync::Arc;

pub use host::join::{JoinError, JoinOptions, JoinedAs, join};
pub use host::{AgentOptions, RealHost};
pub use hypervisor::accelerator::Choice as AcceleratorChoice;
pub use hypervisor::firmware::DIRECTORY as FIRMWARE_DIRECTORY;
pub use hypervisor::tpm::PROGRAM as SWTPM;
pub use vm::{DISK_STALL, FILTER_RESTART_TIMEOUT};

/// Why an agent ended.
#[derive(Debug, thiserror::Error)]
pub enum AgentError {
    /// It has no identity, or a damaged one.
    #[error(transparent)]
    Identity(#[from] host::identity::IdentityError),
    /// It did not start.
    #[error(transparent)]
    Start(#[from] host::StartError),
    /// It could not listen.
    #[error(transparent)]
    Listen(#[from] host::http::ListenError),
    /// Its listening socket failed.
    #[error("the listening socket: {0}")]
    Serve(#[from] std::io::Error),
}

/// Runs this machine as a host until `shutdown`. VMs run on when it ends; the next agent adopts them. It listens
/// at `listen` where that is given, else at the address that it joined with.
///
/// # Errors
/// [`AgentError`].
pub async fn run(
    state_dir: PathBuf,
    listen: Option<String>,
    mut options: AgentOptions,
    shutdown: impl Future<Output = ()> + Send + 'static,
) -> Result<(), AgentError> {
    let mut identity = host::identity::Identity::load(&state_dir)?;
    identity.address = listen.unwrap_or(identity.address);
    if options.migration_listen.is_none() {
        options.migration_listen = Some(migration_address(&identity.address).await);
    }
    let host = RealHost::start(options).await?;
    host.signs_as(&identity)?;
    let endpoint = host::http::Endpoint::bind(&identity).await?;
    tracing::info!(host = %identity.host, address = %endpoint.address(), "serving");
    endpoint.serve(Arc::new(host), shutdown).await?;
    Ok(())
}

/// The usual port at which running VMs of other hosts are received.
const MIGRATION_PORT: u16 = 8446;

/// Where running VMs of other hosts are received, unless an operator says otherwise: at the address of the agent. If that is a name, at
/// all addresses: on this machine the name may stand for another address (127.0.1.1, for example) than on the server, which resolves it
/// for the source.
async fn migration_address(agent: &str) -> SocketAddr {
    let ip = match agent.parse::<SocketAddr>() {
        Ok(address) => address.ip(),
        Err(_) => {
            // A name that is not resolved is told when the agent listens.
            let found = tokio::net::lookup_host(agent).await;
            all_of(found.into_iter().flatten().map(|address| address.ip()))
        }
    };
    SocketAddr::new(ip, MIGRATION_PORT)
}

/// All addresses of the kind that a name has: of IPv6 only if it has no other ones, as a machine may have none of these.
fn all_of(found: impl Iterator<Item = IpAddr>) -> IpAddr {
    let found: Vec<IpAddr> = found.collect();
    match !found.is_empty() && found.iter().all(IpAddr::is_ipv6) {
        true => Ipv6Addr::UNSPECIFIED.into(),
        false => Ipv4Addr::UNSPECIFIED.into(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn vms_are_received_at_the_address_of_the_agent_or_at_all_of_a_name() {
        // The resolver takes an address in fewer than four parts for a name, and asks nobody for it.
        for (agent, expected) in [
            ("10.0.0.1:8444", "10.0.0.1:8446"),
            ("[fd00::1]:1", "[fd00::1]:8446"),
            ("192.0.513:8444", "0.0.0.0:8446"),
        ] {
            assert_eq!(
                migration_address(agent).await,
                expected.parse::<SocketAddr>().unwrap(),
                "{agent}"
            );
        }
    }

    #[test]
    fn a_name_of_ipv6_alone_is_all_addresses_of_ipv6() {
        let all = |found: &[&str]| all_of(found.iter().map(|ip| ip.parse().unwrap())).to_string();
        assert_eq!(all(&["fd00::1", "fd00::2"]), "::");
        assert_eq!(all(&["fd00::1", "10.0.0.1"]), "0.0.0.0");
        assert_eq!(all(&[]), "0.0.0.0");
    }
}
