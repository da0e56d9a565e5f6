//! Sending the disks of a VM that is off to another host. See [`super::migration`].
//!
//! ```text
//! connect ─► AtRest ─► (what goes before them) ─► one disk after the other, whole ─► all are there
//! ```
//! Each is read by a filter of its own, decrypted, and encrypted with the key of its copy, which the other host has made. A disk that is
//! read is locked: nothing else writes it. The disk of a TPM is empty: what the TPM keeps goes before.

use std::convert::Infallible;
use std::net::SocketAddr;
use std::num::NonZeroU64;
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicU64, Ordering};

use tokio::sync::{oneshot, watch};
use vmseal_api::host::{Attachment, MigrationProgress};
use vmseal_api::id::MigrationId;
use vmseal_api::problem::{ErrorCode, Problem};
use vmseal_secret::SecretBytes;

use super::departing_parts::{self, next_part};
use super::internal;
use super::migration::{Link, Message, lost, unexpected};
use super::mirroring::copy_whole;
use super::report::{Progress, Report};
use super::to_copy::{Departing, ToCopy, copy_of};
use crate::migration::figures;
use crate::migration::transport::{self, Handle, Spec};
use crate::storage::locked::Access;
use crate::storage::open;

/// See the module.
pub struct SendingAtRest {
    pub session: Spec,
    pub to: SocketAddr,
    /// The highest rate, in bytes a second.
    pub rates: watch::Receiver<Option<u64>>,
    pub migration: MigrationId,
    pub copies: ToCopy,
}

impl SendingAtRest {
    /// Sends them. When this returns, nothing reads them any more.
    ///
    /// # Errors
    /// Those of the connection, the files and the filters; `cancelled`.
    pub async fn run(
        self,
        show: &Progress,
        cancelled: oneshot::Receiver<()>,
    ) -> Result<(), Problem> {
        let _counted = figures::OUT.begin();
        let Self { session, to, rates, migration, copies } = self;
        let work = async {
            let link = Link::of(transport::connect(session, to).await.map_err(lost)?)?;
            let handle = link.handle();
            tokio::select! {
                sent = send(&copies, migration, link, show) => sent,
                never = keep_rate(rates, &handle) => match never {},
            }
        };
        let sent = tokio::select! {
            sent = work => sent,
            Ok(()) = cancelled => Err(Problem::new(ErrorCode::Cancelled, "it is not sent")),
        };
        if sent.is_err() {
            sweep(&copies).await;
        }
        sent
    }
}

/// Ends what an attempt that has failed has left: a filter has the lock of its disk.
async fn sweep(copies: &ToCopy) {
    for departing in &copies.disks {
        let directory = copies.shared.run_dir.export(departing.disk.disk);
        if let Err(error) = directory.sweep().await {
            tracing::warn!(directory = directory.name(), %error, "the filter of a copy is left");
        }
    }
}

/// Has the session send at the rate of now.
async fn keep_rate(mut rates: watch::Receiver<Option<u64>>, session: &Handle) -> Infallible {
    loop {
        let rate = *rates.borrow_and_update();
        session.set_rate(rate.and_then(NonZeroU64::new));
        if rates.changed().await.is_err() {
            // Nothing changes it any more.
            std::future::pending::<()>().await;
        }
    }
}

async fn send(
    copies: &ToCopy,
    migration: MigrationId,
    mut link: Link,
    show: &Progress,
) -> Result<(), Problem> {
    let failed = link.failed();
    // What the connection says is why the filter cannot copy.
    tokio::select! {
        biased;
        lost = failed => return Err(lost),
        sent = send_disks(copies, migration, &mut link, show) => sent?,
    }
    link.finish().await;
    Ok(())
}

async fn send_disks(
    copies: &ToCopy,
    migration: MigrationId,
    link: &mut Link,
    show: &Progress,
) -> Result<(), Problem> {
    let meter = link.disks_meter();
    let tell = |progress| show.progress(Report::Sending(meter.measured(progress)));
    let (ids, before) = copies.told();
    link.send(&Message::AtRest { copies: ids, before }).await?;
    let keys = departing_parts::send(copies, migration, link, tell).await?;
    if keys.len() != copies.disks.len() {
        return Err(unexpected());
    }
    let mut later: u64 = copies.disks.iter().map(|departing| departing.disk.size).sum();
    let mut before = 0;
    for (place, (departing, key)) in copies.disks.iter().zip(keys).enumerate() {
        later = later.saturating_sub(departing.disk.size);
        if departing.disk.role.attachment() == Attachment::Tpm {
            continue;
        }
        let copied_now = AtomicU64::new(0);
        let tell_disk = |lacking: u64, copied: u64| {
            copied_now.store(copied, Ordering::Relaxed);
            let (remaining, sent) = (lacking.saturating_add(later), copied.saturating_add(before));
            tell(MigrationProgress { remaining, sent, ..Default::default() });
        };
        let of = (place, departing, key.as_deref());
        send_disk(copies, migration, of, link, tell_disk).await?;
        before += copied_now.load(Ordering::Relaxed);
    }
    Ok(())
}

/// Sends one, to its end.
async fn send_disk(
    copies: &ToCopy,
    migration: MigrationId,
    (place, departing, key): (usize, &Departing, Option<&str>),
    link: &mut Link,
    tell: impl Fn(u64, u64),
) -> Result<(), Problem> {
    next_part(link).await?;
    let (theirs, ours) = UnixStream::pair().map_err(internal)?;
    let bridge = link.carry_disk(place, ours)?;
    let copy = copy_of(copies, migration, departing, key, (theirs, departing.has_layers()))?;
    let builder = copies.shared.builder(copies.shared.run_dir.export(departing.disk.disk));
    let kek = copies.kek.as_ref().map(SecretBytes::try_clone).transpose().map_err(internal)?;
    let spec = copies.spec.clone();
    let (disk, facts) = (departing.disk.clone(), departing.facts.clone());
    let open = move || open::open(&spec, &disk, &facts, kek.as_ref(), Access::Read);
    copy_whole((copies.spec.vm, departing.disk.clone()), open, copy, builder, tell).await?;
    bridge.done().await.map(drop).map_err(lost)
}
