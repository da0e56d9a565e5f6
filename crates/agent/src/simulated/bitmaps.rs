//! Dirty bitmaps: only their names are kept. Nothing is ever dirty, as nothing is written.

use jiff::Timestamp;
use vmseal_api::bitmap;
use vmseal_api::filter::{BITMAP_GRANULE, BitmapChange, BitmapStatus};
use vmseal_api::id::{DiskId, VmId};
use vmseal_api::problem::Problem;

use super::Inside;
use crate::rules;
use crate::rules::exclusion::Action;

impl Inside {
    /// Forgets those of a disk that is written to while no filter marks that.
    pub fn forget_bitmaps(&mut self, vm: VmId, disk: DiskId) {
        if let Some(disks) = self.persisted.bitmaps.get_mut(&vm) {
            disks.remove(&disk);
        }
    }

    /// A disk's bitmaps, after one of them has been changed as asked.
    pub fn bitmaps(
        &mut self,
        vm: VmId,
        disk: DiskId,
        change: Option<(String, BitmapChange)>,
    ) -> Result<Vec<BitmapStatus>, Problem> {
        let spec = self.known(vm)?.spec.clone();
        let disk = rules::find_disk(&spec, disk)?;
        if let Some((name, change)) = &change {
            rules::check_bitmap(name, *change)?;
        }
        self.situation(vm)?.may(Action::Bitmaps, Some(disk))?;
        let all = self.persisted.bitmaps.entry(vm).or_default().entry(disk.disk).or_default();
        let Some((name, change)) = change else { return Ok(all.clone()) };
        bitmap::check(all.iter().map(|bitmap| &*bitmap.name), &name, change).map_err(|error| {
            Problem::new(error.code(), format!("{}: {error}", rules::disk_of(&spec, disk)))
        })?;
        if change != BitmapChange::Clear {
            all.retain(|bitmap| bitmap.name != name);
        }
        let since = Timestamp::now();
        match change {
            BitmapChange::Start => {
                let (granularity, dirty_bytes) = (BITMAP_GRANULE, 0);
                all.push(BitmapStatus { name, since, granularity, dirty_bytes });
            }
            BitmapChange::Clear => {
                let found = all.iter_mut().filter(|bitmap| bitmap.name == name);
                found.for_each(|bitmap| bitmap.since = since);
            }
            BitmapChange::Remove => {}
        }
        Ok(all.clone())
    }
}
