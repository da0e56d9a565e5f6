//! Dirty bitmaps of disks in use.

use vmseal_api::client::ServerClient;
use vmseal_api::filter::BitmapStatus;
use vmseal_api::request::AddBitmap;

use super::list;
use crate::arguments::{Bitmap, Output};
use crate::print::{self, plan};

pub async fn run(server: &ServerClient, output: Output, verb: Bitmap) -> anyhow::Result<()> {
    match verb {
        Bitmap::List { of, how } => list::run(server, output, &how, &of.bitmaps()).await,
        Bitmap::Add { of, bitmap, dry_run } => {
            let (path, request) = (of.bitmaps(), AddBitmap { name: bitmap });
            if dry_run.dry_run {
                return plan::show(output, &server.try_post(&path, &request).await?);
            }
            let bitmap: BitmapStatus = server.post(&path, &request).await?;
            print::one(output, &bitmap, &[])
        }
        Bitmap::Clear { of, bitmap, dry_run } => {
            let path = format!("{}/{bitmap}/clear", of.bitmaps());
            if dry_run.dry_run {
                return plan::show(output, &server.try_post(&path, &()).await?);
            }
            let bitmap: BitmapStatus = server.post(&path, &()).await?;
            print::one(output, &bitmap, &[])
        }
        Bitmap::Remove { of, bitmap, dry_run } => {
            let path = format!("{}/{bitmap}", of.bitmaps());
            if dry_run.dry_run {
                return plan::show(output, &server.try_delete(&path).await?);
            }
            Ok(server.delete(&path).await?)
        }
    }
}
