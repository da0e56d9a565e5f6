//! Dirty bitmaps of disks in use: the changes since a point in time, for backups. The filter that serves a disk
//! keeps them; they are not in the inventory.

use vmseal_api::bitmap;
use vmseal_api::filter::{BitmapChange, BitmapStatus};
use vmseal_api::model::Page;
use vmseal_api::problem::{ErrorCode, Problem};
use vmseal_api::request::AddBitmap;

use super::caller::{Caller, Privilege};
use super::disks::find;
use super::unnoted::unnoted;
use super::vms::require_ready;
use super::{Outcome, Services};
use crate::store::disks::Disk;
use crate::store::events::NewEvent;
use crate::store::vms::Vm;

/// Lists the dirty bitmaps of a disk whose VM runs. They are in a file on the VM's host, and survive a restart of
/// filter, agent or guest, and a stop of the VM unless something else writes to the disk.
pub async fn list(
    services: &Services,
    caller: &Caller,
    vm: &str,
    disk: &str,
) -> Result<Page<BitmapStatus>, Problem> {
    caller.require(Privilege::Read)?;
    let (vm, disk) = find(services, vm, disk).await?;
    let items = read(services, &vm, &disk).await?;
    Ok(Page { items, next: None })
}

/// Starts a dirty bitmap of a disk whose VM runs: changes from now on are dirty. Refused if the bitmap exists.
pub async fn add(
    services: &Services,
    caller: &Caller,
    vm: &str,
    disk: &str,
    request: AddBitmap,
    dry_run: bool,
) -> Result<Outcome<BitmapStatus>, Problem> {
    caller.require(Privilege::VmConfigure)?;
    let of = Target { vm, disk, bitmap: &request.name };
    change(services, caller, of, BitmapChange::Start, dry_run).await?.try_map(reported)
}

/// Clears a dirty bitmap: only changes from now on are dirty. Refused while
/// it is being read.
pub async fn clear(
    services: &Services,
    caller: &Caller,
    of: Target<'_>,
    dry_run: bool,
) -> Result<Outcome<BitmapStatus>, Problem> {
    caller.require(Privilege::VmConfigure)?;
    change(services, caller, of, BitmapChange::Clear, dry_run).await?.try_map(reported)
}

/// Removes a dirty bitmap. Refused while it is being read.
pub async fn remove(
    services: &Services,
    caller: &Caller,
    of: Target<'_>,
    dry_run: bool,
) -> Result<Outcome<()>, Problem> {
    caller.require(Privilege::VmConfigure)?;
    Ok(change(services, caller, of, BitmapChange::Remove, dry_run).await?.map(drop))
}

/// A bitmap of a disk of a VM.
#[derive(Clone, Copy, Debug)]
pub struct Target<'a> {
    /// The VM's name or id.
    pub vm: &'a str,
    /// The disk's name within the VM, or its id.
    pub disk: &'a str,
    /// The bitmap's name.
    pub bitmap: &'a str,
}

/// Changes a bitmap, or plans that; returns it unless it was removed.
async fn change(
    services: &Services,
    caller: &Caller,
    Target { vm, disk, bitmap: name }: Target<'_>,
    change: BitmapChange,
    dry_run: bool,
) -> Result<Outcome<Option<BitmapStatus>>, Problem> {
    bitmap::check_name(name).map_err(|error| Problem::invalid("name", error.to_string()))?;
    let (vm, disk) = find(services, vm, disk).await?;
    let (done, kind, step) = match change {
        BitmapChange::Start => {
            ("disk.bitmap-added", "disk.bitmap.add", "begin to note what changes on")
        }
        BitmapChange::Clear => {
            ("disk.bitmap-cleared", "disk.bitmap.clear", "forget what has changed on")
        }
        BitmapChange::Remove => {
            ("disk.bitmap-removed", "disk.bitmap.remove", "end to note what changes on")
        }
    };
    if dry_run {
        let bitmaps = read(services, &vm, &disk).await?;
        bitmap::check(bitmaps.iter().map(|bitmap| &*bitmap.name), name, change).map_err(
            |error| {
                let what = format!("disk '{}' of VM '{}': {error}", disk.name, vm.name);
                Problem::new(error.code(), what)
            },
        )?;
        let step = format!("{step} disk '{}', as bitmap '{name}'", disk.name);
        return Ok(Outcome::planned(kind, &vm.name, step));
    }
    require_ready(&vm)?;
    let agent = services.hosts.connected(vm.host)?;
    let bitmaps = agent.change_bitmap(vm.id, disk.id, name.to_owned(), change).await?;
    let detail = format!("bitmap '{name}' of disk '{}'", disk.name);
    let noted = async {
        let mut write = services.store.write().await?;
        let (actor, target) = (caller.name(), vm.name.as_str());
        write.event(NewEvent { kind: done, actor, target, detail: &detail }).await?;
        Ok::<_, Problem>(write.commit().await?)
    };
    noted.await.map_err(|problem| {
        let was = match change {
            BitmapChange::Start => "started",
            BitmapChange::Clear => "cleared",
            BitmapChange::Remove => "removed",
        };
        unnoted(&format!("{detail} of VM '{}' was {was}", vm.name), problem)
    })?;
    Ok(Outcome::Done(bitmaps.into_iter().find(|bitmap| bitmap.name == name)))
}

async fn read(services: &Services, vm: &Vm, disk: &Disk) -> Result<Vec<BitmapStatus>, Problem> {
    require_ready(vm)?;
    services.hosts.connected(vm.host)?.bitmaps(vm.id, disk.id).await
}

/// The bitmap that was just changed, and not removed.
fn reported(bitmap: Option<BitmapStatus>) -> Result<BitmapStatus, Problem> {
    bitmap.ok_or_else(|| {
        Problem::new(ErrorCode::Internal, "the host does not name the bitmap that it has changed")
    })
}
