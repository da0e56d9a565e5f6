//! Tells the network where a guest is.

use serde_json::json;
use vmseal_api::id::VmId;

use crate::hypervisor::qmp::Qmp;

/// How often the cards are announced, and the pauses in milliseconds: QEMU's own usual values. A frame may be lost, and a switch
/// may learn late.
const ROUNDS: u32 = 5;
const FIRST_PAUSE: u32 = 50;
const LONGER_BY: u32 = 100;
const LONGEST_PAUSE: u32 = 550;

/// Has QEMU send frames from all cards of a guest that has just moved: switches learn where it is, and peers by an ARP of the guest's
/// driver. QEMU does that by itself when it has loaded a guest, which is before anybody knows whether the guest runs there.
pub(crate) async fn announce(qmp: &Qmp, vm: VmId) {
    let how = json!({
        "initial": FIRST_PAUSE,
        "max": LONGEST_PAUSE,
        "rounds": ROUNDS,
        "step": LONGER_BY,
    });
    if let Err(error) = qmp.execute("announce-self", how).await {
        // Its own frames tell them as well, when it sends some.
        tracing::warn!(%vm, %error, "its network cards are not announced");
    }
}
