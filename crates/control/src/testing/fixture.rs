//! A control plane without HTTP with simulated hosts: it can crash, and start again from its inventory.

use std::net::{Ipv4Addr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;

use jiff::Timestamp;
use vmseal_api::datastore::{Messenger, RbdPool};
use vmseal_api::dump::{DumpFormat, DumpReason};
use vmseal_api::host::{DatastoreLocation, DatastoreSpec, Power};
use vmseal_api::id::{DatastoreId, DiskId, DumpId, HostId, ProviderId, TaskId, VmId};
use vmseal_api::key_fault::KeyFault;
use vmseal_api::model::{Alarm, Lifecycle, TaskState};
use vmseal_api::nic::{NicBackend, NicLink, NicModel};
use vmseal_api::redundancy::PoolFacts;
use vmseal_api::request::{CreateDisk, CreateNic, CreateVm, MoveVm};
use vmseal_secret::sealed_box::Recipient;

use vmseal_agent::simulated::{Call, Fault, SimulatedHost};
use vmseal_api::host::HostAgent;

use super::ToSimulated;
use super::nearby::NearbyRemotes;
use super::template::{Template, location, passphrase};
use crate::hosts::Hosts;
use crate::operation::Operation;
use crate::providers::Providers;
use crate::remotes::Remotes;
use crate::services::caller::Caller;
use crate::services::{Outcome, Services, create_vm, mirror};
use crate::setup::authority::Authority;
use crate::store::tasks::Task;
use crate::store::users::Role;
use crate::store::vms::Vm;
use crate::store::{
    Store, alarms, datastores, disks, dumps, events, hosts, policies, providers, tasks, users, vms,
};
use crate::tasks::{Engine, Retry};

/// How long anything may take in a test.
const TIMEOUT: Duration = Duration::from_secs(20);

/// How often a step is tried.
pub const ATTEMPTS: u32 = 3;

/// Short, as nothing in a test needs time to recover.
const RETRY: Retry = Retry {
    attempts: ATTEMPTS,
    first_pause: Duration::from_millis(2),
    longest_pause: Duration::from_millis(10),
    store_pause: Duration::from_millis(5),
};

pub struct Fixture {
    pub directory: tempfile::TempDir,
    pub agent: SimulatedHost,
    pub store: Arc<Store>,
    pub providers: Arc<Providers>,
    pub hosts: Arc<Hosts>,
    pub remotes: Arc<Remotes>,
    pub engine: Arc<Engine>,
    pub host: HostId,
    connector: ToSimulated,
    /// The other control plane.
    pub plane: NearbyRemotes,
    provider: ProviderId,
    datastore: DatastoreSpec,
}

/// A directory in memory, where there is one: no test cuts the power, so nothing is gained by waiting for a disk.
fn in_memory() -> tempfile::TempDir {
    tempfile::tempdir_in("/dev/shm").or_else(|_| tempfile::tempdir()).unwrap()
}

impl Fixture {
    pub async fn new() -> Self {
        let template = Template::get().await;
        let directory = in_memory();
        let store = Arc::new(template.copy(directory.path()).await);
        let providers =
            Arc::new(Providers::open(Arc::clone(&store), directory.path(), None).await.unwrap());
        let known = providers::find(&mut store.read().await.unwrap(), "keys").await.unwrap();
        providers.unlock(&known.unwrap(), passphrase(), "me").await.unwrap();
        let agent = SimulatedHost::new();
        let datastore = DatastoreSpec { datastore: template.datastore, location: location() };
        agent.probe_datastore(datastore.clone()).await.unwrap();
        let connector = ToSimulated { first: agent.clone(), others: Arc::default() };
        let plane = NearbyRemotes::default();
        let remotes = Remotes::new(Arc::clone(&store), directory.path(), Arc::new(plane.clone()));
        let remotes = Arc::new(remotes);
        let (hosts, engine) = begin(&store, &providers, &connector, &remotes, RETRY).await;
        let this = Self {
            directory,
            agent,
            store,
            providers,
            hosts,
            remotes,
            engine,
            host: template.host.id,
            connector,
            plane,
            provider: template.provider,
            datastore,
        };
        this.connected().await;
        this
    }

    /// The services, with passphrases sealed to `recipient`.
    pub fn services(&self, recipient: Recipient) -> Services {
        Services {
            store: Arc::clone(&self.store),
            providers: Arc::clone(&self.providers),
            hosts: Arc::clone(&self.hosts),
            remotes: Arc::clone(&self.remotes),
            engine: Arc::clone(&self.engine),
            authority: Arc::new(Authority::open(self.directory.path()).unwrap()),
            recipient,
            data_dir: self.directory.path().to_owned(),
        }
    }

    /// Another host, which sees the directories of the first one, and has no datastore yet; its agent, when it is connected.
    pub async fn add_host(&self, name: &str) -> (HostId, SimulatedHost) {
        let agent = self.agent.beside();
        self.connector.others.lock().unwrap().insert(name.to_owned(), agent.clone());
        let host = hosts::Host {
            id: HostId::new(),
            name: name.to_owned(),
            address: "127.0.0.1:1".to_owned(),
            description: None,
            maintenance: Default::default(),
        };
        let mut write = self.store.write().await.unwrap();
        hosts::insert(&mut write, &host).await.unwrap();
        write.commit().await.unwrap();
        self.hosts.add(&host).unwrap();
        self.eventually("the other host is connected", async || {
            self.hosts.connected(host.id).is_ok().then_some(())
        })
        .await;
        (host.id, agent)
    }

    /// The agent of a host that was added.
    pub fn agent_of(&self, name: &str) -> SimulatedHost {
        self.connector.others.lock().unwrap()[name].clone()
    }

    /// Has the server call a host by a name, and the agent there wait for VMs at all of its addresses. Returns where they are sent to.
    ///
    /// The resolver takes an address in fewer than four parts for a name, and asks nobody for it.
    pub async fn call_by_name(&self, host: HostId, agent: &SimulatedHost) -> SocketAddr {
        const PORT: u16 = 8446;
        let mut write = self.store.write().await.unwrap();
        hosts::set_address(&mut write, host, "192.0.513:8444").await.unwrap();
        write.commit().await.unwrap();
        agent.set_migration_address((Ipv4Addr::UNSPECIFIED, PORT).into());
        (Ipv4Addr::new(192, 0, 2, 1), PORT).into()
    }

    /// Gives a host that was added the datastore of the first one.
    pub async fn share_datastore(&self, with: HostId, name: &str) {
        let mut write = self.store.write().await.unwrap();
        let local = datastores::find(&mut write, "local").await.unwrap().unwrap();
        let on = datastores::OnHost {
            host: with,
            host_name: name.to_owned(),
            location: local.hosts[0].location.clone(),
            mounted_key: None,
            mount: None,
        };
        datastores::insert_host(&mut write, &local, &on).await.unwrap();
        write.commit().await.unwrap();
    }

    /// Gives a host that was added a datastore of its own.
    pub async fn add_datastore(&self, to: HostId, host: &str, name: &str) -> DatastoreId {
        let location = DatastoreLocation::Dir { path: format!("/{name}").into() };
        let spec = DatastoreSpec { datastore: DatastoreId::new(), location };
        self.agent_of(host).probe_datastore(spec.clone()).await.unwrap();
        let (id, location) = (spec.datastore, spec.location);
        let host_name = host.to_owned();
        let (mounted_key, mount) = (None, None);
        let on = datastores::OnHost { host: to, host_name, location, mounted_key, mount };
        let own = datastores::Datastore {
            id,
            name: name.to_owned(),
            hosts: vec![on],
            usage: None,
            pools: Vec::new(),
            key: None,
            osds: Default::default(),
        };
        let mut write = self.store.write().await.unwrap();
        datastores::insert(&mut write, &own).await.unwrap();
        write.commit().await.unwrap();
        id
    }

    /// Gives the first host a pool of Ceph, whose connections are in the clear, as a datastore.
    pub async fn add_pool(&self, name: &str, pools: Vec<PoolFacts>) {
        let pool = RbdPool {
            monitors: "v2:10.0.0.1:3300".to_owned(),
            user: "client.vmseal".to_owned(),
            keyring: Some("/etc/ceph/keyring".into()),
            pool: "vms".to_owned(),
            namespace: None,
            data_pool: None,
            messenger: Messenger::Crc,
            create: None,
            changed: None,
        };
        let location = DatastoreLocation::Rbd { path: "/ceph".into(), pool: Box::new(pool) };
        let spec = DatastoreSpec { datastore: DatastoreId::new(), location };
        self.agent.probe_datastore(spec.clone()).await.unwrap();
        let mut write = self.store.write().await.unwrap();
        let local = datastores::find(&mut write, "local").await.unwrap().unwrap();
        let on = datastores::OnHost { location: spec.location, ..local.hosts[0].clone() };
        let (id, name) = (spec.datastore, name.to_owned());
        let (hosts, usage) = (vec![on], local.usage);
        let osds = Default::default();
        let added = datastores::Datastore { id, name, hosts, usage, pools, key: None, osds };
        datastores::insert(&mut write, &added).await.unwrap();
        write.commit().await.unwrap();
    }

    /// The row of a core dump that is asked for.
    pub async fn add_dump(&self, vm: VmId, name: &str) -> DumpId {
        let dump = dumps::Dump {
            id: DumpId::new(),
            vm,
            name: name.to_owned(),
            format: DumpFormat::Elf,
            reason: DumpReason::Request,
            created: Timestamp::now(),
            bytes: None,
            encrypted: true,
        };
        let mut write = self.store.write().await.unwrap();
        dumps::insert(&mut write, &dump).await.unwrap();
        write.commit().await.unwrap();
        dump.id
    }

    /// Adds a user.
    pub async fn add_user(&self, name: &str, token: &str, role: Role) {
        let mut write = self.store.write().await.unwrap();
        users::insert(&mut write, name, &crate::sha256_hex(token.as_bytes()), role).await.unwrap();
        write.commit().await.unwrap();
    }

    /// The hosts as a server has them that has just started.
    pub async fn hosts_of_another_server(&self) -> Arc<Hosts> {
        let hosts = Hosts::start(
            Arc::clone(&self.store),
            Arc::clone(&self.providers),
            Arc::new(self.connector.clone()),
        );
        Arc::new(hosts.await.unwrap())
    }

    /// The server's process ends at once, and another one starts; `prepare` gets the new engine before it resumes its
    /// tasks.
    pub async fn restart(&mut self, prepare: impl FnOnce(&mut Engine)) {
        self.engine.stop();
        self.hosts = self.hosts_of_another_server().await;
        let mut engine = Engine::new(
            Arc::clone(&self.store),
            Arc::clone(&self.providers),
            Arc::clone(&self.hosts),
            Arc::clone(&self.remotes),
            RETRY,
        );
        prepare(&mut engine);
        self.engine = Arc::new(engine);
        self.connected().await;
        self.engine.resume().await.unwrap();
    }

    /// The same, with the providers still sealed.
    pub async fn restart_sealed(&mut self) {
        self.engine.stop();
        let providers = Providers::open(Arc::clone(&self.store), self.directory.path(), None).await;
        self.providers = Arc::new(providers.unwrap());
        self.restart(|_| {}).await;
    }

    /// Gives the passphrase of a provider.
    pub async fn unlock(&self, name: &str) {
        let found = providers::find(&mut self.store.read().await.unwrap(), name).await.unwrap();
        self.providers.unlock(&found.unwrap(), passphrase(), "me").await.unwrap();
    }

    /// The next `times` calls of this kind fail.
    pub fn inject(&self, call: Call, fault: Fault, times: u32) {
        (1..=times).for_each(|nth| self.agent.inject(call, nth, fault));
    }

    /// How many calls of this kind the host got.
    pub fn calls(&self, call: Call) -> usize {
        self.agent.calls().iter().filter(|made| **made == call).count()
    }

    /// The host's agent restarts as one of an earlier version, without these features.
    pub async fn restart_agent_without(&self, features: &[&'static str]) {
        self.agent.lack_features(features);
        self.agent.restart();
        self.eventually("the server knows what the agent lacks", async || {
            let view = self.hosts.view(self.host);
            let lacks = |feature: &&'static str| !view.has(feature);
            (view.description.is_some() && features.iter().all(lacks)).then_some(())
        })
        .await;
        self.connected().await;
    }

    /// The agent of a host restarts, and the server has seen what it says of its host now.
    pub async fn restart_agent(&self, host: HostId, agent: &SimulatedHost) {
        agent.restart();
        let now = agent.describe().await.unwrap().incarnation;
        self.eventually("the server sees the agent's new run", async || {
            let view = self.hosts.view(host);
            let is_seen = view.description.is_some_and(|it| it.incarnation == now);
            (is_seen && self.hosts.connected(host).is_ok()).then_some(())
        })
        .await;
    }

    pub async fn connected(&self) {
        self.eventually("the host is connected", async || {
            self.hosts.connected(self.host).is_ok().then_some(())
        })
        .await;
    }

    pub async fn eventually<T>(&self, what: &str, test: impl AsyncFn() -> Option<T>) -> T {
        let begun = std::time::Instant::now();
        loop {
            if let Some(found) = test().await {
                return found;
            }
            if begun.elapsed() > TIMEOUT {
                panic!("not so after {TIMEOUT:?}: {what}; alarms: {:?}", self.alarms().await);
            }
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
    }

    /// Begins to create a VM with two disks; returns it and the task.
    pub async fn create(&self, name: &str, policy: &str) -> (VmId, TaskId) {
        let mut write = self.store.write().await.unwrap();
        let policy = policies::find(&mut write, policy).await.unwrap().unwrap();
        let vm = Vm {
            id: VmId::new(),
            name: name.to_owned(),
            description: String::new(),
            labels: Default::default(),
            autostart: false,
            migration_encryption: Default::default(),
            on_drain: Default::default(),
            template: false,
            host: self.host,
            host_name: "here".to_owned(),
            policy: policy.id,
            policy_name: policy.name,
            vcpus: 1,
            memory: 32 << 20,
            hardware: Default::default(),
            provider: policy.encryption.then_some(self.provider),
            key: None,
            lifecycle: Lifecycle::Creating,
            seen_power: None,
            seen_stopped: None,
        };
        vms::insert(&mut write, &vm).await.unwrap();
        for position in 0..2 {
            let disk = disks::Disk {
                id: DiskId::new(),
                name: format!("disk{position}"),
                datastore: self.datastore.clone(),
                datastore_name: "local".to_owned(),
                size: 1 << 20,
                encrypted: policy.encryption,
                role: Default::default(),
                allocation: policy.allocation,
                limits: policy.limits,
                cache: policy.cache,
                replica: None,
                image: None,
                facts: None,
                deleting: false,
                detached: false,
            };
            disks::insert(&mut write, vm.id, position, &disk).await.unwrap();
        }
        write.commit().await.unwrap();
        (
            vm.id,
            self.begin(Operation::CreateVm { vm: vm.id, cloud_init: None, copies: None }, name)
                .await,
        )
    }

    pub async fn begin(&self, operation: Operation, target: &str) -> TaskId {
        let mut write = self.store.write().await.unwrap();
        if let Operation::DeleteVm { vm, .. } = operation {
            vms::set_lifecycle(&mut write, vm, Lifecycle::Deleting).await.unwrap();
        }
        let task = Engine::record(&mut write, operation, target, "me").await.unwrap();
        write.commit().await.unwrap();
        let id = task.id;
        self.engine.begin(task);
        id
    }

    /// The same, and it is done.
    pub async fn done(&self, operation: Operation, target: &str) {
        self.ends_well(self.begin(operation, target).await).await;
    }

    /// A task that is done.
    pub async fn ends_well(&self, task: TaskId) {
        let ended = self.ended(task).await;
        assert_eq!(ended.state, TaskState::Done, "{:?}", ended.problem);
    }

    /// A complete VM.
    pub async fn made(&self, name: &str, policy: &str) -> VmId {
        let (vm, task) = self.create(name, policy).await;
        self.ends_well(task).await;
        vm
    }

    /// A new card on a bridge of the VM's host.
    pub fn card(bridge: &str) -> CreateNic {
        let (model, link) = (NicModel::default(), NicLink::default());
        let backend = NicBackend::Bridge { bridge: bridge.to_owned() };
        CreateNic { name: None, mac: None, model, backend, link }
    }

    /// A request for a VM as [`Self::made`] makes it.
    pub fn request(name: &str, policy: &str) -> CreateVm {
        let disk = |position| CreateDisk {
            force: false,
            name: format!("disk{position}"),
            datastore: "local".to_owned(),
            size: 1 << 20,
            image: None,
            format: None,
            encrypted: None,
        };
        CreateVm {
            description: String::new(),
            labels: Default::default(),
            autostart: false,
            migration_encryption: Default::default(),
            name: name.to_owned(),
            policy: policy.to_owned(),
            vcpus: 1,
            memory: 32 << 20,
            host: None,
            disks: (0..2).map(disk).collect(),
            nics: Vec::new(),
            hardware: Default::default(),
            cloud_init: None,
            uefi_variables: None,
            tpm_state: None,
        }
    }

    /// The VM of a request: its disks have the replicas that its policy asks for.
    pub async fn requested(&self, services: &Services, request: CreateVm) -> VmId {
        let me = Caller::administrator("me");
        let begun = create_vm::create(services, &me, request, false).await;
        let Ok(Outcome::Done(task)) = begun else { panic!("{begun:?}") };
        self.ends_well(task.id).await;
        self.task(task.id).await.operation.vm().unwrap()
    }

    /// Has all disks of a VM moved to another datastore.
    pub async fn move_disks(&self, services: &Services, vm: &str, datastore: &str) {
        let request = MoveVm { datastore: datastore.to_owned(), disks: Vec::new(), rate: None };
        let me = Caller::administrator("me");
        let begun = mirror::move_disks(services, &me, vm, request, false).await;
        let Ok(Outcome::Done(task)) = begun else { panic!("{begun:?}") };
        self.ends_well(task.id).await;
    }

    /// The provider of new VMs.
    pub fn provider(&self) -> ProviderId {
        self.provider
    }

    /// From now on new VMs get their keys from another provider.
    pub fn use_provider(&mut self, provider: ProviderId) {
        self.provider = provider;
    }

    /// The recryption of a VM with a key of another provider.
    pub async fn recryption(&self, vm: VmId) -> Operation {
        let other = providers::find(&mut self.store.read().await.unwrap(), "other").await.unwrap();
        let other = match other {
            Some(other) => other,
            None => self.providers.add("other", Some(passphrase()), None, "me").await.unwrap(),
        };
        let old = self.vm(vm).await.unwrap().key.unwrap();
        Operation::RecryptVm { vm, old, provider: other.id }
    }

    /// A VM that runs.
    pub async fn running(&self, name: &str) -> VmId {
        let vm = self.made(name, "encrypted").await;
        let task = self.begin(Operation::StartVm { vm, boot_once: None }, name).await;
        assert_eq!(self.ended(task).await.state, TaskState::Done);
        vm
    }

    pub async fn task(&self, task: TaskId) -> Task {
        self.find_task(task).await.unwrap()
    }

    /// A task that another control plane may have begun here.
    pub async fn find_task(&self, task: TaskId) -> Option<Task> {
        let mut read = self.store.read().await.unwrap();
        tasks::get(&mut read, &task.to_string()).await.unwrap()
    }

    pub async fn ended(&self, task: TaskId) -> Task {
        self.eventually("the task ends", async || {
            self.find_task(task).await.filter(|task| task.ended.is_some())
        })
        .await
    }

    pub async fn vm(&self, vm: VmId) -> Option<Vm> {
        vms::get(&mut self.store.read().await.unwrap(), vm).await.unwrap()
    }

    pub async fn disks(&self, vm: VmId) -> Vec<disks::Disk> {
        disks::of_vm(&mut self.store.read().await.unwrap(), vm).await.unwrap()
    }

    pub async fn events(&self, kind: &str) -> Vec<vmseal_api::model::Event> {
        let mut read = self.store.read().await.unwrap();
        let mut events = events::after(&mut read, 0, u32::MAX, &Default::default()).await.unwrap();
        events.retain(|event| event.kind == kind);
        events
    }

    pub async fn alarms(&self) -> Vec<String> {
        let raised = alarms::list(&mut self.store.read().await.unwrap()).await.unwrap();
        raised.into_iter().map(|alarm| format!("{} {}", alarm.code, alarm.target)).collect()
    }

    /// The reason of an alarm; `None` if it is not active.
    pub async fn reason(&self, code: &str, target: &str) -> Option<Option<KeyFault>> {
        let raised = alarms::list(&mut self.store.read().await.unwrap()).await.unwrap();
        let wanted = |alarm: &&Alarm| alarm.code == code && alarm.target == target;
        raised.iter().find(wanted).map(|alarm| alarm.reason)
    }

    /// Asserts that nothing is left of a VM: no rows, no file, no registration, and its keys are destroyed.
    pub async fn assert_nothing_left(&self, vm: VmId, what: &str) {
        assert!(self.vm(vm).await.is_none(), "{what}: its row is left");
        assert!(self.disks(vm).await.is_empty(), "{what}: rows of disks are left");
        assert!(self.agent.disks().is_empty(), "{what}: disks are left");
        assert!(self.agent.running().is_empty(), "{what}: it runs");
        // If the host has restarted since, its monitor may have registered the VM meanwhile.
        assert_eq!(self.agent.registered(), [], "{what}: its host knows it");
        let mut read = self.store.read().await.unwrap();
        let living: i64 = sqlx::query_scalar("SELECT COUNT(*) FROM keys WHERE destroyed = 0")
            .fetch_one(&mut *read)
            .await
            .unwrap();
        assert_eq!(living, 0, "{what}: its key is not destroyed");
    }

    /// Asserts that its host runs a VM.
    pub async fn assert_runs(&self, vm: VmId) {
        self.eventually("it runs", async || self.agent.running().contains(&vm).then_some(())).await;
    }

    /// Asserts that a VM is complete: its disks exist and are recorded, and its host has its current definition and key.
    pub async fn assert_whole(&self, vm: VmId, power: Power, what: &str) {
        self.assert_whole_with(vm, power, 2, what).await;
    }

    /// The same of a VM with so many disks.
    pub async fn assert_whole_with(&self, vm: VmId, power: Power, count: usize, what: &str) {
        let row = self.vm(vm).await.unwrap_or_else(|| panic!("{what}: its row is gone"));
        assert_eq!(row.lifecycle, Lifecycle::Ready, "{what}");
        let disks = self.disks(vm).await;
        assert_eq!(disks.len(), count, "{what}");
        for disk in &disks {
            assert!(disk.facts.is_some() && !disk.deleting, "{what}: {disk:?}");
            assert!(self.agent.disks().contains_key(&disk.id), "{what}: a file is gone");
        }
        let encrypted = row.key.is_some();
        self.eventually("its host knows it and has its key", async || {
            let held = !encrypted || self.agent.keys_held().contains(&vm);
            (held && self.agent.registered().contains(&vm)).then_some(())
        })
        .await;
        let stands = matches!(power, Power::Off | Power::Suspended);
        assert_eq!(self.agent.running().contains(&vm), !stands, "{what}");
        self.eventually("the server sees its power", async || {
            self.hosts.view(self.host).vm(vm).filter(|seen| seen.power == power).map(drop)
        })
        .await;
        let Some(key) = row.key else { return };
        self.providers.get(key.provider).unwrap().get_key(vm, &key).await.unwrap();
    }
}

async fn begin(
    store: &Arc<Store>,
    providers: &Arc<Providers>,
    connector: &ToSimulated,
    remotes: &Arc<Remotes>,
    retry: Retry,
) -> (Arc<Hosts>, Arc<Engine>) {
    let hosts =
        Hosts::start(Arc::clone(store), Arc::clone(providers), Arc::new(connector.clone())).await;
    let hosts = Arc::new(hosts.unwrap());
    let engine = Engine::new(
        Arc::clone(store),
        Arc::clone(providers),
        Arc::clone(&hosts),
        Arc::clone(remotes),
        retry,
    );
    (hosts, Arc::new(engine))
}
