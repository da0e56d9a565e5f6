//! Network cards of VMs, and the addresses that are made up for them.

use std::collections::HashMap;

use sqlx::{FromRow, SqliteConnection};
use vmseal_api::host::NicSpec;
use vmseal_api::id::{HostId, NicId, VmId};
use vmseal_api::nic::{MacAddress, MacPrefix, NicLink};

use super::{Part, StoreError, from_json, from_name, parse, taken, to_json, to_name};

/// How often an address is made up before it is given up: of 16 million, few are taken.
const ATTEMPTS: usize = 64;

#[derive(FromRow)]
struct Row {
    vm_id: String,
    id: String,
    name: String,
    mac: String,
    model: String,
    backend: String,
    link: String,
    leaving: bool,
}

impl Row {
    fn read(self) -> Result<(VmId, NicSpec), StoreError> {
        let nic = NicSpec {
            nic: parse(&self.id, "a network card's id")?,
            name: self.name,
            mac: parse(&self.mac, "a network card's address")?,
            model: from_name(&self.model, "a network card's model")?,
            backend: from_json(&self.backend, "what a network card is connected to")?,
            link: from_name(&self.link, "whether a network card is plugged in")?,
        };
        Ok((parse(&self.vm_id, "a VM's id")?, nic))
    }
}

/// Adds a network card.
///
/// # Errors
/// [`StoreError::Taken`]: another card has its address.
pub async fn insert(
    to: &mut SqliteConnection,
    vm: VmId,
    position: usize,
    nic: &NicSpec,
) -> Result<(), StoreError> {
    sqlx::query(
        "INSERT INTO nics (id, vm_id, position, name, mac, model, backend, link)
         VALUES ($1, $2, $3, $4, $5, $6, $7, $8)",
    )
    .bind(nic.nic.to_string())
    .bind(vm.to_string())
    .bind(i64::try_from(position).unwrap_or(i64::MAX))
    .bind(&nic.name)
    .bind(nic.mac.to_string())
    .bind(to_name(&nic.model))
    .bind(to_json(&nic.backend))
    .bind(to_name(&nic.link))
    .execute(to)
    .await
    .map_err(taken(|| format!("a network card with the address {}", nic.mac)))?;
    Ok(())
}

/// The network cards that a VM has, in their order: without one that is being taken from it.
pub async fn of_vm(from: &mut SqliteConnection, vm: VmId) -> Result<Vec<NicSpec>, StoreError> {
    let mut rows = rows_of(from, vm).await?;
    rows.retain(|row| !row.leaving);
    rows.into_iter().map(|row| Ok(row.read()?.1)).collect()
}

/// The same with one that is being taken from it: its guest may have it, and its name and address are taken.
pub async fn all_of_vm(from: &mut SqliteConnection, vm: VmId) -> Result<Vec<NicSpec>, StoreError> {
    let rows = rows_of(from, vm).await?;
    rows.into_iter().map(|row| Ok(row.read()?.1)).collect()
}

async fn rows_of(from: &mut SqliteConnection, vm: VmId) -> Result<Vec<Row>, StoreError> {
    Ok(sqlx::query_as(
        "SELECT vm_id, id, name, mac, model, backend, link, leaving FROM nics WHERE vm_id = $1
         ORDER BY position",
    )
    .bind(vm.to_string())
    .fetch_all(from)
    .await?)
}

/// The network cards of the VMs that a part of their list has, by VM, in their order; with those that are being taken from them.
pub async fn of_part(
    from: &mut SqliteConnection,
    part: &Part,
) -> Result<HashMap<VmId, Vec<NicSpec>>, StoreError> {
    let rows: Vec<Row> = sqlx::query_as(
        "SELECT vm_id, id, name, mac, model, backend, link, leaving FROM nics
         WHERE vm_id IN (SELECT id FROM vms WHERE id > $1 ORDER BY id LIMIT $2) ORDER BY position",
    )
    .bind(&part.after)
    .bind(part.limit)
    .fetch_all(from)
    .await?;
    let mut nics: HashMap<VmId, Vec<NicSpec>> = HashMap::new();
    for row in rows {
        let (vm, nic) = row.read()?;
        nics.entry(vm).or_default().push(nic);
    }
    Ok(nics)
}

/// How the network cards of a host's VMs are to be plugged in, without those that are being taken from them.
pub async fn links_on_host(
    from: &mut SqliteConnection,
    host: HostId,
) -> Result<HashMap<NicId, NicLink>, StoreError> {
    let rows: Vec<(String, String)> = sqlx::query_as(
        "SELECT n.id, n.link FROM placements o JOIN nics n ON n.vm_id = o.vm_id
         WHERE o.host_id = $1 AND o.role = 'owner' AND NOT n.leaving",
    )
    .bind(host.to_string())
    .fetch_all(from)
    .await?;
    let read = |(nic, link): (String, String)| {
        let link: NicLink = from_name(&link, "whether a network card is plugged in")?;
        Ok::<_, StoreError>((parse(&nic, "a network card's id")?, link))
    };
    rows.into_iter().map(read).collect()
}

/// The place of a network card among those of its VM; none where there is no such card.
pub async fn position(
    from: &mut SqliteConnection,
    nic: NicId,
) -> Result<Option<usize>, StoreError> {
    let found: Option<i64> = sqlx::query_scalar("SELECT position FROM nics WHERE id = $1")
        .bind(nic.to_string())
        .fetch_optional(from)
        .await?;
    Ok(found.map(|position| usize::try_from(position).unwrap_or(0)))
}

/// The place behind the last network card of a VM.
pub async fn next_position(from: &mut SqliteConnection, vm: VmId) -> Result<usize, StoreError> {
    let next: i64 =
        sqlx::query_scalar("SELECT COALESCE(MAX(position) + 1, 0) FROM nics WHERE vm_id = $1")
            .bind(vm.to_string())
            .fetch_one(from)
            .await?;
    Ok(usize::try_from(next).unwrap_or(0))
}

/// Removes a network card.
pub async fn delete(to: &mut SqliteConnection, nic: NicId) -> Result<(), StoreError> {
    sqlx::query("DELETE FROM nics WHERE id = $1").bind(nic.to_string()).execute(to).await?;
    Ok(())
}

/// Records whether a network card is being taken from its VM.
pub async fn set_leaving(
    to: &mut SqliteConnection,
    nic: NicId,
    leaving: bool,
) -> Result<(), StoreError> {
    sqlx::query("UPDATE nics SET leaving = $1 WHERE id = $2")
        .bind(leaving)
        .bind(nic.to_string())
        .execute(to)
        .await?;
    Ok(())
}

/// Plugs a network card in or out.
pub async fn set_link(
    to: &mut SqliteConnection,
    nic: NicId,
    link: NicLink,
) -> Result<(), StoreError> {
    sqlx::query("UPDATE nics SET link = $1 WHERE id = $2")
        .bind(to_name(&link))
        .bind(nic.to_string())
        .execute(to)
        .await?;
    Ok(())
}

/// The VM that has a card of this address, by name; also where the card is being taken from it.
pub async fn owner(
    from: &mut SqliteConnection,
    mac: MacAddress,
) -> Result<Option<String>, StoreError> {
    Ok(sqlx::query_scalar(
        "SELECT v.name FROM nics n JOIN vms v ON v.id = n.vm_id WHERE n.mac = $1",
    )
    .bind(mac.to_string())
    .fetch_optional(from)
    .await?)
}

/// An address that no card has. `random` gives random bytes: an address is the prefix of this control plane and
/// three of them.
pub async fn new_mac(
    to: &mut SqliteConnection,
    mut random: impl FnMut() -> [u8; 3],
) -> Result<MacAddress, StoreError> {
    let known: Option<String> = sqlx::query_scalar("SELECT prefix FROM mac_prefix WHERE id = 1")
        .fetch_optional(&mut *to)
        .await?;
    let prefix: MacPrefix = match known {
        Some(prefix) => parse(&prefix, "the prefix of addresses of network cards")?,
        None => {
            let prefix = MacPrefix::from_random(random());
            sqlx::query("INSERT INTO mac_prefix (id, prefix) VALUES (1, $1)")
                .bind(prefix.to_string())
                .execute(&mut *to)
                .await?;
            prefix
        }
    };
    for _ in 0..ATTEMPTS {
        let mac = prefix.address(random());
        if owner(to, mac).await?.is_none() {
            return Ok(mac);
        }
    }
    Err(StoreError::Taken(format!("a network card with every address of {prefix} that was tried")))
}

#[cfg(test)]
mod tests {
    use super::super::Store;
    use super::*;

    #[tokio::test]
    async fn made_up_addresses_share_a_prefix_that_is_kept_and_none_is_given_twice() {
        let directory = tempfile::tempdir().unwrap();
        let store = Store::open(&directory.path().join("db")).await.unwrap();
        let mut write = store.write().await.unwrap();
        let first = new_mac(&mut write, || [0xff, 1, 2]).await.unwrap();
        assert_eq!(first.to_string(), "fe:01:02:ff:01:02");
        let second = new_mac(&mut write, || [9, 9, 9]).await.unwrap();
        assert_eq!(second.to_string(), "fe:01:02:09:09:09");
        assert_eq!(owner(&mut write, first).await.unwrap(), None);
    }
}
