//! The server's client of an agent: [`HostAgent`] over HTTPS with certificates on both sides.
//!
//! An agent's certificate carries its host's id as a DNS name, [`host_server_name`]. The client connects to the
//! host's address and asks TLS for that name: another host of the same CA is refused.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, PoisonError};
use std::time::Duration;

use async_trait::async_trait;
use reqwest::dns::{Addrs, Name, Resolve, Resolving};
use reqwest::{Client, Method, RequestBuilder};
use rustls::ClientConfig;
use rustls::pki_types::ServerName;
use serde::Serialize;
use serde::de::DeserializeOwned;

use super::exchange::{CONNECT_TIMEOUT, Peer};
use super::older_agents;
use super::role::{SeenCertificate, host_server_name};
use super::tls::{self, ClientIdentity, TlsError};
use super::websocket;
use crate::boot::BootDevice;
use crate::datastore::{DatastoreCondition, DatastoreContents, DatastoreLocation};
use crate::filter::{BitmapChange, BitmapStatus, ReplicaStatus};
use crate::guest::{GuestAnswer, GuestCommand};
use crate::hardware::Hardware;
use crate::host::backup::{BackupManifest, BackupPlace};
use crate::host::survey::DatastoreSurvey;
use crate::host::version::{CONTRACT, CONTRACT_HEADER, POOL_WAYS};
use crate::host::{
    ConsoleClaim, ConsoleStream, ContractRange, DatastoreSpec, DatastoreUsage, Exposing, Fence,
    GuestControl, HostAgent, HostDescription, JobSpec, JobStatus, KeptRoom, KeyReference,
    MediumFacts, NewDisk, NicSpec, OtherKey, PlacedDisk, PoolKey, PowerOff, Remount,
    STATE_WAIT_MAX, SealedKey, ShareDataKeys, Sharing, ShowsCertificate, StateChange, VmChange,
    VmSpec,
};
use crate::id::{DiskId, DumpId, HostId, Incarnation, TaskId, VmId};
use crate::log_level::LogLevel;
use crate::pace::CopyPace;
use crate::problem::{ErrorCode, Problem};
use crate::usage::HostUsage;

/// How long an agent may take to answer: a VM's processes get half a minute to exit.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(60);

/// How much longer than the given wait a long poll's answer may take.
const STATE_MARGIN: Duration = Duration::from_secs(10);

/// An agent, by its host's id and address.
pub struct HostClient {
    /// The agent, as messages name it.
    name: String,
    address: String,
    server_name: String,
    http: Client,
    tls: Arc<ClientConfig>,
    /// The versions of the contract that this side reports.
    contract: ContractRange,
    /// The agent's last certificate.
    certificate: SeenCertificate,
    /// Whether the agent has said that it knows when ways to pools were changed ([`POOL_WAYS`]).
    knows_changes: AtomicBool,
}

/// Resolves every name to the host's address: the name is only for the certificate.
struct AtAddress(Arc<str>);

impl Resolve for AtAddress {
    fn resolve(&self, _: Name) -> Resolving {
        let address = Arc::clone(&self.0);
        Box::pin(async move {
            let found: Vec<SocketAddr> = tokio::net::lookup_host(&*address).await?.collect();
            Ok(Box::new(found.into_iter()) as Addrs)
        })
    }
}

impl HostClient {
    /// The agent of `host`, which listens at `address` (`host:port`). Connects when it is first used.
    ///
    /// # Errors
    /// [`TlsError`]: the identity is not valid.
    pub fn new(
        host: HostId,
        name: &str,
        address: &str,
        identity: &ClientIdentity,
    ) -> Result<Self, TlsError> {
        let certificate = SeenCertificate::default();
        let tls = tls::identified(identity, &certificate)?;
        let http = Client::builder()
            .tls_backend_preconfigured(tls.clone())
            .dns_resolver(Arc::new(AtAddress(Arc::from(address))))
            .connect_timeout(CONNECT_TIMEOUT)
            .timeout(ANSWER_TIMEOUT)
            .redirect(reqwest::redirect::Policy::none())
            .no_proxy()
            .build()
            .map_err(|error| TlsError::Setup(rustls::Error::General(error.to_string())))?;
        Ok(Self {
            name: format!("host '{name}' at {address}"),
            address: address.to_owned(),
            server_name: host_server_name(host),
            http,
            tls: Arc::new(tls),
            contract: CONTRACT,
            certificate,
            knows_changes: AtomicBool::new(false),
        })
    }

    /// The same, reporting other versions of the contract.
    #[must_use]
    pub fn speaking(self, contract: ContractRange) -> Self {
        Self { contract, ..self }
    }

    fn peer(&self) -> Peer<'_> {
        Peer(&self.name)
    }

    fn url(&self, path: &str) -> String {
        // The port belongs to the address that the resolver returns; with it in the URL the Host header is
        // right.
        let port = self.address.rsplit_once(':').map_or("443", |(_, port)| port);
        format!("https://{}:{port}/v1/{path}", self.server_name)
    }

    /// The address of a WebSocket.
    fn socket(&self, path: &str) -> Result<websocket::Address<'_>, Problem> {
        let server_name = ServerName::try_from(self.server_name.clone())
            .map_err(|error| Problem::new(ErrorCode::Internal, error.to_string()))?;
        Ok(websocket::Address {
            peer: self.peer(),
            socket: self.address.clone(),
            server_name,
            url: self.url(path).replacen("https", "wss", 1),
            authorization: None,
            contract: Some(self.contract),
        })
    }

    fn request(&self, method: Method, path: &str) -> RequestBuilder {
        self.http.request(method, self.url(path)).header(CONTRACT_HEADER, self.contract.to_header())
    }

    /// A request with a body that may name pools. It has no more of them than the agent is known to know, as agents refuse other fields.
    fn request_with(
        &self,
        method: Method,
        path: &str,
        body: &(impl Serialize + Sync),
    ) -> RequestBuilder {
        let request = self.request(method, path);
        if self.knows_changes.load(Ordering::Relaxed) {
            return request.json(body);
        }
        match serde_json::to_value(body) {
            Ok(body) => request.json(&older_agents::without_changes(body)),
            // The request is not sent then, and its error says why.
            Err(_) => request.json(body),
        }
    }

    async fn call<T: DeserializeOwned>(&self, request: RequestBuilder) -> Result<T, Problem> {
        let body = self.peer().exchange(request).await?;
        self.peer().parse(&body)
    }

    async fn command(&self, method: Method, path: &str) -> Result<(), Problem> {
        self.peer().exchange(self.request(method, path)).await.map(drop)
    }

    async fn command_with(
        &self,
        method: Method,
        path: &str,
        body: &(impl Serialize + Sync),
    ) -> Result<(), Problem> {
        self.peer().exchange(self.request_with(method, path, body)).await.map(drop)
    }
}

impl ShowsCertificate for HostClient {
    fn certificate(&self) -> Option<Vec<u8>> {
        self.certificate.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

#[async_trait]
impl HostAgent for HostClient {
    async fn describe(&self) -> Result<HostDescription, Problem> {
        let description: HostDescription = self.call(self.request(Method::GET, "host")).await?;
        let knows_changes = description.features.iter().any(|feature| feature == POOL_WAYS);
        self.knows_changes.store(knows_changes, Ordering::Relaxed);
        Ok(description)
    }

    async fn state(
        &self,
        after: Option<(Incarnation, u64)>,
        wait: Duration,
    ) -> Result<StateChange, Problem> {
        let wait = wait.min(STATE_WAIT_MAX);
        let mut path = format!("state?wait_seconds={}", wait.as_secs());
        if let Some((incarnation, generation)) = after {
            path.push_str(&format!("&incarnation={incarnation}&after={generation}"));
        }
        self.call(self.request(Method::GET, &path).timeout(wait + STATE_MARGIN)).await
    }

    async fn probe_datastore(&self, spec: DatastoreSpec) -> Result<DatastoreUsage, Problem> {
        self.call(self.request_with(Method::POST, "datastores", &spec)).await
    }

    async fn examine_datastore(&self, spec: DatastoreSpec) -> Result<DatastoreUsage, Problem> {
        self.call(self.request_with(Method::POST, "datastores/examine", &spec)).await
    }

    async fn share_datastore(&self, sharing: Sharing) -> Result<(), Problem> {
        self.command_with(Method::POST, "datastores/share", &sharing).await
    }

    async fn offer_pool_key(&self, offered: PoolKey) -> Result<(), Problem> {
        self.command_with(Method::PUT, "datastores/key", &offered).await
    }

    async fn remount_datastore(&self, remount: Remount) -> Result<Option<String>, Problem> {
        self.call(self.request_with(Method::POST, "datastores/remount", &remount)).await
    }

    async fn fence_vm(&self, fence: Fence) -> Result<(), Problem> {
        self.command_with(Method::POST, "fence", &fence).await
    }

    async fn examine_disk(&self, disk: NewDisk) -> Result<(), Problem> {
        self.command_with(Method::POST, "datastores/examine-disk", &disk).await
    }

    async fn measure_datastore(&self, spec: DatastoreSpec) -> Result<DatastoreCondition, Problem> {
        self.call(self.request_with(Method::POST, "datastores/measure", &spec)).await
    }

    async fn examine_hardware(
        &self,
        hardware: Hardware,
        memory: Option<u64>,
    ) -> Result<(), Problem> {
        // An agent of an earlier version refuses fields that it does not know, and looks at no query.
        let query = memory.map(|bytes| format!("?memory={bytes}")).unwrap_or_default();
        let path = format!("hardware/examine{query}");
        self.command_with(Method::POST, &path, &hardware).await
    }

    async fn scan_datastore(&self, spec: DatastoreSpec) -> Result<DatastoreContents, Problem> {
        self.call(self.request_with(Method::POST, "datastores/scan", &spec)).await
    }

    async fn survey_datastore(
        &self,
        location: DatastoreLocation,
    ) -> Result<DatastoreSurvey, Problem> {
        self.call(self.request_with(Method::POST, "datastores/survey", &location)).await
    }

    async fn metrics(&self) -> Result<String, Problem> {
        let body = self.peer().exchange(self.request(Method::GET, "metrics")).await?;
        String::from_utf8(body).map_err(|error| {
            let detail = format!("{} answered with something unexpected: {error}", self.name);
            Problem::new(ErrorCode::Unreachable, detail)
        })
    }

    async fn usage(&self) -> Result<HostUsage, Problem> {
        self.call(self.request(Method::GET, "usage")).await
    }

    async fn log_level(&self) -> Result<LogLevel, Problem> {
        self.call(self.request(Method::GET, "log-level")).await
    }

    async fn set_log_level(&self, levels: String) -> Result<LogLevel, Problem> {
        self.call(self.request(Method::PUT, "log-level").json(&levels)).await
    }

    async fn register_vm(&self, spec: VmSpec) -> Result<(), Problem> {
        self.command_with(Method::PUT, &format!("vms/{}", spec.vm), &spec).await
    }

    async fn unregister_vm(&self, vm: VmId) -> Result<(), Problem> {
        self.command(Method::DELETE, &format!("vms/{vm}")).await
    }

    async fn offer_key(&self, vm: VmId, key: SealedKey) -> Result<(), Problem> {
        self.command_with(Method::PUT, &format!("vms/{vm}/key"), &key).await
    }

    async fn check_key(&self, vm: VmId, key: KeyReference) -> Result<(), Problem> {
        self.command_with(Method::POST, &format!("vms/{vm}/key/check"), &key).await
    }

    async fn add_key(&self, vm: VmId, other: OtherKey) -> Result<(), Problem> {
        self.command_with(Method::POST, &format!("vms/{vm}/key/add"), &other).await
    }

    async fn drop_other_keys(&self, vm: VmId, keep: KeyReference) -> Result<(), Problem> {
        self.command_with(Method::POST, &format!("vms/{vm}/key/drop-others"), &keep).await
    }

    async fn share_data_keys(&self, vm: VmId, shared: ShareDataKeys) -> Result<(), Problem> {
        self.command_with(Method::POST, &format!("vms/{vm}/key/share"), &shared).await
    }

    async fn measure_kept(&self, vm: VmId, disks: Vec<PlacedDisk>) -> Result<KeptRoom, Problem> {
        let path = format!("vms/{vm}/measure-kept");
        self.call(self.request_with(Method::POST, &path, &disks)).await
    }

    async fn measure_medium(&self, vm: VmId, path: PathBuf) -> Result<MediumFacts, Problem> {
        let to = format!("vms/{vm}/measure-medium");
        self.call(self.request(Method::POST, &to).json(&path)).await
    }

    async fn examine_migration_port(&self, to: SocketAddr) -> Result<(), Problem> {
        self.command_with(Method::POST, "migrations/examine-port", &to).await
    }

    async fn examine_nic(&self, vm: VmId, nic: NicSpec) -> Result<(), Problem> {
        self.command_with(Method::POST, &format!("vms/{vm}/examine-nic"), &nic).await
    }

    async fn examine_job(&self, vm: VmId, spec: JobSpec) -> Result<(), Problem> {
        self.command_with(Method::POST, &format!("vms/{vm}/examine-job"), &spec).await
    }

    async fn examine_change(&self, vm: VmId, change: VmChange) -> Result<(), Problem> {
        self.command_with(Method::POST, &format!("vms/{vm}/examine-change"), &change).await
    }

    async fn put_job(&self, vm: VmId, task: TaskId, spec: JobSpec) -> Result<(), Problem> {
        self.command_with(Method::PUT, &format!("vms/{vm}/jobs/{task}"), &spec).await
    }

    async fn job(&self, vm: VmId, task: TaskId) -> Result<JobStatus, Problem> {
        self.call(self.request(Method::GET, &format!("vms/{vm}/jobs/{task}"))).await
    }

    async fn set_pace(&self, vm: VmId, task: TaskId, pace: CopyPace) -> Result<(), Problem> {
        self.command_with(Method::PUT, &format!("vms/{vm}/jobs/{task}/pace"), &pace).await
    }

    async fn commit_job(&self, vm: VmId, task: TaskId, spec: JobSpec) -> Result<(), Problem> {
        self.command_with(Method::POST, &format!("vms/{vm}/jobs/{task}/commit"), &spec).await
    }

    async fn cancel_job(&self, vm: VmId, task: TaskId, spec: JobSpec) -> Result<(), Problem> {
        self.command_with(Method::POST, &format!("vms/{vm}/jobs/{task}/cancel"), &spec).await
    }

    async fn delete_disk(&self, vm: VmId, disk: DiskId) -> Result<(), Problem> {
        self.command(Method::DELETE, &format!("vms/{vm}/disks/{disk}")).await
    }

    async fn power_on(&self, vm: VmId) -> Result<(), Problem> {
        self.command(Method::POST, &format!("vms/{vm}/power-on")).await
    }

    async fn power_on_from(&self, vm: VmId, first: BootDevice) -> Result<(), Problem> {
        self.command_with(Method::POST, &format!("vms/{vm}/power-on-from"), &first).await
    }

    async fn power_on_with(&self, vm: VmId, generation: u64) -> Result<(), Problem> {
        self.command_with(Method::POST, &format!("vms/{vm}/power-on-with"), &generation).await
    }

    async fn suspend(&self, vm: VmId) -> Result<(), Problem> {
        self.command(Method::POST, &format!("vms/{vm}/suspend")).await
    }

    async fn suspend_as(&self, vm: VmId, generation: u64) -> Result<(), Problem> {
        self.command_with(Method::POST, &format!("vms/{vm}/suspend-as"), &generation).await
    }

    async fn discard_memory(&self, vm: VmId) -> Result<(), Problem> {
        self.command(Method::DELETE, &format!("vms/{vm}/memory")).await
    }

    async fn discard_dump(&self, vm: VmId, dump: DumpId) -> Result<(), Problem> {
        self.command(Method::DELETE, &format!("vms/{vm}/dumps/{dump}")).await
    }

    async fn read_backup(&self, place: BackupPlace) -> Result<BackupManifest, Problem> {
        self.call(self.request_with(Method::POST, "backups/read", &place)).await
    }

    async fn discard_backup(&self, place: BackupPlace) -> Result<(), Problem> {
        self.command_with(Method::POST, "backups/discard", &place).await
    }

    async fn power_off(&self, vm: VmId, how: PowerOff) -> Result<(), Problem> {
        self.command_with(Method::POST, &format!("vms/{vm}/power-off"), &how).await
    }

    async fn grow_disk(&self, vm: VmId, disk: DiskId, size: u64) -> Result<(), Problem> {
        self.command_with(Method::POST, &format!("vms/{vm}/disks/{disk}/grow"), &size).await
    }

    async fn control_guest(&self, vm: VmId, what: GuestControl) -> Result<(), Problem> {
        self.command_with(Method::POST, &format!("vms/{vm}/control"), &what).await
    }

    async fn expose_disk(
        &self,
        vm: VmId,
        disk: DiskId,
        what: Exposing,
    ) -> Result<ConsoleStream, Problem> {
        let address = self.socket(&what.path(vm, disk))?;
        websocket::open_disk(address, Arc::clone(&self.tls)).await
    }

    async fn bitmaps(&self, vm: VmId, disk: DiskId) -> Result<Vec<BitmapStatus>, Problem> {
        self.call(self.request(Method::GET, &format!("vms/{vm}/disks/{disk}/bitmaps"))).await
    }

    async fn change_bitmap(
        &self,
        vm: VmId,
        disk: DiskId,
        name: String,
        change: BitmapChange,
    ) -> Result<Vec<BitmapStatus>, Problem> {
        let path = format!("vms/{vm}/disks/{disk}/bitmaps");
        let request = self.request(Method::POST, &path).json(&(name, change));
        let body = self.peer().exchange(request).await?;
        self.peer().parse_changed(&body)
    }

    async fn replica(&self, vm: VmId, disk: DiskId) -> Result<ReplicaStatus, Problem> {
        self.call(self.request(Method::GET, &format!("vms/{vm}/disks/{disk}/replica"))).await
    }

    async fn screen(&self, vm: VmId) -> Result<ConsoleStream, Problem> {
        let address = self.socket(&format!("vms/{vm}/screen"))?;
        websocket::open_disk(address, Arc::clone(&self.tls)).await
    }

    async fn guest(&self, vm: VmId, command: GuestCommand) -> Result<GuestAnswer, Problem> {
        let request = self.request(Method::POST, &format!("vms/{vm}/guest")).json(&command);
        let body = self.peer().exchange(request).await?;
        self.peer().parse_changed(&body)
    }

    async fn console(&self, vm: VmId, claim: ConsoleClaim) -> Result<ConsoleStream, Problem> {
        let force = claim == ConsoleClaim::TakeOver;
        let address = self.socket(&format!("vms/{vm}/console?force={force}"))?;
        websocket::open(address, Arc::clone(&self.tls)).await
    }
}
