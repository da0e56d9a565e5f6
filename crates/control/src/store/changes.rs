//! Change numbers, one for each kind of resource: a watcher of one kind is not woken by a change of another.
//!
//! SQLite reports which tables a transaction wrote. The state of a host and the progress of a task are not in a table:
//! the monitor and the task report their changes.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use sqlx::SqliteConnection;
use tokio::sync::watch;
use vmseal_api::model::ChangeKind;

/// A set of kinds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Kinds(u32);

impl Kinds {
    /// No kind.
    pub const NONE: Self = Self(0);
    /// The kinds in a host's state: the host, its VMs and its datastores.
    pub const OF_HOST: Self =
        Self::NONE.with(ChangeKind::Host).with(ChangeKind::Vm).with(ChangeKind::Datastore);
    /// All kinds except tasks and events. An alarm may be about any of these.
    const RESOURCES: Self =
        Self::OF_HOST.with(ChangeKind::Provider).with(ChangeKind::Policy).with(ChangeKind::Alarm);

    /// All kinds.
    #[must_use]
    pub fn all() -> Self {
        ChangeKind::ALL.iter().fold(Self::NONE, |kinds, kind| kinds.with(*kind))
    }

    /// These and one more.
    #[must_use]
    pub const fn with(self, kind: ChangeKind) -> Self {
        Self(self.0 | 1 << kind as u32)
    }

    /// The union of both sets.
    #[must_use]
    pub const fn and(self, others: Self) -> Self {
        Self(self.0 | others.0)
    }

    fn has(self, kind: usize) -> bool {
        self.0 & 1 << kind != 0
    }

    /// The kinds that rows of a table belong to.
    fn of_table(table: &str) -> Self {
        match table {
            "hosts" | "drains" | "drained_vms" => Self::NONE.with(ChangeKind::Host),
            "datastores" | "datastore_hosts" | "datastore_keys" => {
                Self::NONE.with(ChangeKind::Datastore)
            }
            "providers" | "kmip_servers" | "kmip_clients" => Self::NONE.with(ChangeKind::Provider),
            "policies" => Self::NONE.with(ChangeKind::Policy),
            "vms" | "placements" | "disks" | "volumes" | "nics" | "snapshots" | "dumps"
            | "backups" => Self::NONE.with(ChangeKind::Vm),
            "tasks" | "task_claims" => Self::NONE.with(ChangeKind::Task),
            "alarms" => Self::RESOURCES,
            "events" => Self::NONE.with(ChangeKind::Event),
            _ => Self::NONE,
        }
    }

    /// The kinds that an event is about, by its kind: `provider.unlocked` reports a change that is not in a table.
    pub(super) fn of_event(kind: &str) -> Self {
        let noun = kind.split('.').next().unwrap_or(kind);
        match noun {
            "host" => Self::OF_HOST,
            "datastore" => Self::NONE.with(ChangeKind::Datastore),
            "provider" => Self::NONE.with(ChangeKind::Provider),
            "policy" => Self::NONE.with(ChangeKind::Policy),
            "vm" | "disk" => Self::NONE.with(ChangeKind::Vm),
            _ => Self::NONE,
        }
    }
}

/// The number of the last change of each kind.
#[derive(Clone, Copy, Debug)]
pub struct Numbers([u64; ChangeKind::ALL.len()]);

impl Numbers {
    /// The number of the last change of any of these.
    #[must_use]
    pub fn of(&self, kinds: Kinds) -> u64 {
        let of = self.0.iter().enumerate().filter(|(kind, _)| kinds.has(*kind));
        of.map(|(_, number)| *number).max().unwrap_or(0)
    }

    fn note(&mut self, kinds: Kinds) {
        let next = self.of(Kinds::all()) + 1;
        let of = self.0.iter_mut().enumerate().filter(|(kind, _)| kinds.has(*kind));
        of.for_each(|(_, number)| *number = next);
    }
}

/// The numbers, with a way to wait for a change.
pub(super) struct Changes(watch::Sender<Numbers>);

impl Changes {
    /// Numbers that begin with the time, so that two runs of a server have none in common.
    pub(super) fn begin() -> Self {
        let now = jiff::Timestamp::now().as_microsecond().unsigned_abs();
        Self(watch::Sender::new(Numbers([now; ChangeKind::ALL.len()])))
    }

    pub(super) fn note(&self, kinds: Kinds) {
        if kinds != Kinds::NONE {
            self.0.send_modify(|numbers| numbers.note(kinds));
        }
    }

    pub(super) fn subscribe(&self) -> watch::Receiver<Numbers> {
        self.0.subscribe()
    }
}

/// The kinds that the transaction of a connection has written so far.
#[derive(Clone, Default)]
pub(super) struct Written(Arc<AtomicU32>);

impl Written {
    /// Starts to record what a connection writes.
    ///
    /// # Errors
    /// The connection's worker has ended.
    pub(super) async fn watch(&self, connection: &mut SqliteConnection) -> Result<(), sqlx::Error> {
        let written = Arc::clone(&self.0);
        connection.lock_handle().await?.set_update_hook(move |update| {
            written.fetch_or(Kinds::of_table(update.table).0, Ordering::Relaxed);
        });
        Ok(())
    }

    /// The kinds that were written since the last call.
    pub(super) fn take(&self) -> Kinds {
        Kinds(self.0.swap(0, Ordering::Relaxed))
    }
}

#[cfg(test)]
mod tests {
    use crate::store::events::NewEvent;
    use crate::store::{Store, Write};

    use super::*;

    async fn write(store: &Store, change: impl AsyncFnOnce(&mut Write<'_>)) {
        let mut write = store.write().await.unwrap();
        change(&mut write).await;
        write.commit().await.unwrap();
    }

    /// The kinds whose number has changed.
    fn changed(before: Numbers, now: Numbers) -> Vec<ChangeKind> {
        let differ = |kind: &&ChangeKind| {
            let kind = Kinds::NONE.with(**kind);
            before.of(kind) != now.of(kind)
        };
        ChangeKind::ALL.iter().filter(differ).copied().collect()
    }

    #[tokio::test]
    async fn a_change_of_one_kind_wakes_no_watcher_of_another() {
        let directory = tempfile::tempdir().unwrap();
        let store = Store::open(&directory.path().join("db")).await.unwrap();
        let numbers = || *store.changes().borrow();
        let before = numbers();
        write(&store, async |write| {
            sqlx::query("INSERT INTO hosts (id, name, address) VALUES ('h', 'h', 'h')")
                .execute(&mut **write)
                .await
                .unwrap();
        })
        .await;
        assert_eq!(changed(before, numbers()), [ChangeKind::Host]);

        let before = numbers();
        write(&store, async |write| {
            let unlocked =
                NewEvent { kind: "provider.unlocked", actor: "a", target: "t", detail: "" };
            write.event(unlocked).await.unwrap();
        })
        .await;
        assert_eq!(changed(before, numbers()), [ChangeKind::Provider, ChangeKind::Event]);

        let before = numbers();
        write(&store, async |_| {}).await;
        assert_eq!(changed(before, numbers()), []);

        // A transaction that is rolled back changes nothing, and the next one does not report it.
        let mut rolled_back = store.write().await.unwrap();
        sqlx::query("DELETE FROM hosts WHERE id = 'h'").execute(&mut *rolled_back).await.unwrap();
        drop(rolled_back);
        write(&store, async |write| {
            sqlx::query("INSERT INTO users (name, token_sha256) VALUES ('u', 't')")
                .execute(&mut **write)
                .await
                .unwrap();
        })
        .await;
        assert_eq!(changed(before, numbers()), []);

        store.note_change(Kinds::NONE.with(ChangeKind::Task));
        assert_eq!(changed(before, numbers()), [ChangeKind::Task]);
        assert_ne!(before.of(Kinds::all()), numbers().of(Kinds::all()));
    }
}
