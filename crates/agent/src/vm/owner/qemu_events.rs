//! What QEMU reports by itself, as the owner of its VM handles it.

use super::Owner;
use crate::hypervisor::qmp::Event;

impl Owner {
    /// QEMU has reported something.
    pub(super) async fn qemu_reported(&mut self, event: Event) {
        match event {
            Event::DeviceDeleted(device) => self.device_gone(&device).await,
            Event::GuestAsleep => {
                self.note_sleep().await;
                self.asleep_while_sent().await;
            }
            Event::GuestAwake | Event::Resumed => self.note_sleep().await,
            Event::GuestPanicked { .. } | Event::Shutdown(_) | Event::Other(_) => {
                let Some(running) = self.running() else { return };
                let stays = event == Event::GuestPanicked { stays: true };
                running.qemu_end.note(event);
                if stays {
                    self.guest_panicked().await;
                }
            }
        }
    }
}
