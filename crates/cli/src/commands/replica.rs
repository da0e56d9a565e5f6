//! How far the replica of a disk is behind, once or watched.

use std::time::Duration;

use vmseal_api::client::ServerClient;
use vmseal_api::model::{Disk, Vm};
use vmseal_api::problem::Problem;

use super::reconnect::repeated;
use crate::arguments::Output;
use crate::print::{self, Lines};
use crate::rows::{Change, DiskReplica, differences};

/// The time between two requests: the server does not report changes of a replica's lag.
const PAUSE: Duration = Duration::from_secs(1);

pub async fn run(
    server: &ServerClient,
    output: Output,
    vm: &Vm,
    disk: Disk,
    watch: bool,
) -> anyhow::Result<()> {
    let path = format!("vms/{}/disks/{}/replica", vm.id, disk.id);
    let datastore = disk.replica.map(|replica| replica.datastore);
    let read = async || -> Result<DiskReplica, Problem> {
        let (vm, disk, datastore) = (vm.name.clone(), disk.name.clone(), datastore.clone());
        Ok(DiskReplica { vm, disk, datastore, status: server.get(&path).await? })
    };
    let mut before = read().await?;
    if !watch {
        return print::one(output, &before, &[]);
    }
    let mut lines = Lines::usual(output);
    print::changes(output, &mut lines, &[(Change::Listed, before.clone())])?;
    while !print::is_closed() {
        tokio::time::sleep(PAUSE).await;
        let now = repeated(&read).await?;
        let news = differences(Some(&[before]), std::slice::from_ref(&now));
        print::changes(output, &mut lines, &news)?;
        before = now;
    }
    Ok(())
}
