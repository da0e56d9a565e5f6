//! What a VM that moves leaves where it was, or would leave there: core dumps, which are beside its first disk, and replicas do not go with
//! the copies of its disks; backups stay in the inventory that has them.
//!
//! A VM with core dumps or replicas is refused before anything begins. These checks are for what has come since: the host writes core
//! dumps by itself. Beside a disk that is deleted they would be in no list, and at another control plane's VM under a key that is destroyed.

use sqlx::SqliteConnection;
use vmseal_api::host::{HostState, KeyReference, SendJob};

use crate::store::disks::Disk;
use crate::store::vms::Vm;
use crate::store::{StoreError, backups, dumps, providers};
use crate::tasks::run::{Run, StepError, state_of, wrong_state};

/// How many backups under one key are named: all of them would fill an event.
const NAMED_MAX: usize = 8;

/// Refuses a VM that has got, since it was looked at, what does not go to another control plane.
pub(super) async fn require_nothing(run: &Run<'_>, disks: &[Disk]) -> Result<(), StepError> {
    let dumps = dumps::of_vm(&mut *run.store().read().await?, run.vm_id).await?;
    let what = if !dumps.is_empty() {
        "core dumps"
    } else if disks.iter().any(|disk| disk.replica.is_some()) {
        "a replica"
    } else {
        return Ok(());
    };
    Err(wrong_state(format!(
        "VM '{}' has {what} now, which would stay behind: begin the migration again, which says what to do",
        run.task.target
    )))
}

/// Refuses to go on with a VM whose host has written a core dump beside its first disk, where that is copied: its guest has panicked
/// while it was sent. What the source has told is what is there: from when the guest stands still on, it does not panic.
pub(super) fn require_no_dump(
    run: &Run<'_>,
    source: &HostState,
    sent: &SendJob,
) -> Result<(), StepError> {
    let is_first_copied = sent.disks.first().is_some_and(|first| sent.copies.contains(first));
    let has_none = state_of(source, run.vm_id).is_none_or(|seen| seen.panic_dumps.is_empty());
    if !is_first_copied || has_none {
        return Ok(());
    }
    Err(wrong_state(format!(
        "the guest of VM '{0}' has panicked, and its host has written a core dump beside its first disk, which would stay behind: decrypt it if it is needed, delete it (vmseal dump list {0}), and begin the migration again",
        run.task.target
    )))
}

/// What is said of the backups of a VM that goes to another control plane: they stay here, and so do the keys that open them. None where
/// there are none.
///
/// # Errors
/// [`StoreError`].
pub(crate) async fn backups_of(
    from: &mut SqliteConnection,
    vm: &Vm,
) -> Result<Option<String>, StoreError> {
    let all = backups::of_vm(&mut *from, vm.id).await?;
    if all.is_empty() {
        return Ok(None);
    }
    let mut by_key: Vec<(Option<&KeyReference>, Vec<&str>)> = Vec::new();
    for backup in &all {
        let key = backup.key.as_ref();
        match by_key.iter_mut().find(|(known, _)| *known == key) {
            Some((_, names)) => names.push(backup.name.as_str()),
            None => by_key.push((key, vec![backup.name.as_str()])),
        }
    }
    let providers = providers::names(from).await?;
    let told = by_key.iter().map(|(key, names)| {
        let under = match key {
            Some(KeyReference { provider, key_id, .. }) => {
                let provider = providers.get(provider).cloned();
                let provider = provider.unwrap_or_else(|| "a former provider".to_owned());
                format!("under key '{key_id}' of '{provider}'")
            }
            None => "without a key".to_owned(),
        };
        format!("{} {under}", named(names))
    });
    let told: Vec<_> = told.collect();
    Ok(Some(format!(
        "its backups stay in this inventory (vmseal backup list {0}): {1}. Each key is kept until the last backup under it is deleted; until then they can be restored here as another VM (vmseal backup restore {0} BACKUP --as NAME)",
        vm.name,
        told.join("; ")
    )))
}

/// The names of backups, for people.
fn named(names: &[&str]) -> String {
    let shown: Vec<_> = names.iter().take(NAMED_MAX).map(|name| format!("'{name}'")).collect();
    match names.len().saturating_sub(NAMED_MAX) {
        0 => shown.join(", "),
        more => format!("{} and {more} more", shown.join(", ")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_few_names_are_told_and_the_others_are_counted() {
        assert_eq!(named(&["one", "two"]), "'one', 'two'");
        let many = ["b"; NAMED_MAX + 3];
        assert!(named(&many).ends_with("'b' and 3 more"), "{}", named(&many));
        assert_eq!(named(&many[..NAMED_MAX]).matches('b').count(), NAMED_MAX);
    }
}
