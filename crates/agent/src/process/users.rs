//! The users that guests' processes run as: three for each VM, from a range that nothing else on the host uses,
//! so that a process that breaks out has access to nothing.

use std::collections::BTreeSet;
use std::sync::{Arc, Mutex, PoisonError};

/// How many VMs and imports may run at a time.
const SLOTS: u32 = 4096;

/// The users of this host's VMs; none where the agent is not root.
#[derive(Clone, Debug)]
pub struct Users {
    base: Option<u32>,
    taken: Arc<Mutex<BTreeSet<u32>>>,
}

/// The users of a VM, free again when dropped.
#[derive(Debug)]
pub struct Slot {
    users: Users,
    number: u32,
}

impl Users {
    /// The users from `base` on; without a base everything runs as the agent's user.
    #[must_use]
    pub fn new(base: Option<u32>) -> Self {
        Self { base, taken: Arc::default() }
    }

    /// The lowest free pair; none when all are taken.
    #[must_use]
    pub fn take(&self) -> Option<Slot> {
        let mut taken = self.taken.lock().unwrap_or_else(PoisonError::into_inner);
        let number = (0..SLOTS).find(|number| !taken.contains(number))?;
        taken.insert(number);
        Some(Slot { users: self.clone(), number })
    }

    /// Takes the pair that a VM has had since before the agent's start.
    #[must_use]
    pub fn take_again(&self, number: u32) -> Slot {
        self.taken.lock().unwrap_or_else(PoisonError::into_inner).insert(number);
        Slot { users: self.clone(), number }
    }
}

impl Users {
    /// Takes the pair to which the user of a running QEMU belongs; none if it belongs to no pair.
    #[must_use]
    pub fn take_of_qemu(&self, user: u32) -> Option<Slot> {
        let offset = user.checked_sub(self.base?)?;
        // The even ones are filters'.
        (offset % 2 == 1 && offset / 2 < SLOTS).then(|| self.take_again(offset / 2))
    }
}

impl Slot {
    /// The number of the pair.
    #[must_use]
    pub fn number(&self) -> u32 {
        self.number
    }

    /// The filter's user.
    #[must_use]
    pub fn filter(&self) -> Option<u32> {
        self.users.base.map(|base| base + 2 * self.number)
    }

    /// QEMU's user.
    #[must_use]
    pub fn qemu(&self) -> Option<u32> {
        self.users.base.map(|base| base + 2 * self.number + 1)
    }
}

impl Slot {
    /// The TPM's user. These come after the pairs of filters and QEMUs, whose numbers are as they were before VMs had TPMs.
    #[must_use]
    pub fn tpm(&self) -> Option<u32> {
        self.users.base.map(|base| base + 2 * SLOTS + self.number)
    }
}

impl Drop for Slot {
    fn drop(&mut self) {
        self.users.taken.lock().unwrap_or_else(PoisonError::into_inner).remove(&self.number);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_two_processes_share_a_user() {
        let users = Users::new(Some(1000));
        let again = users.take_again(1);
        let (first, second) = (users.take().unwrap(), users.take().unwrap());
        let of = |slot: &Slot| [slot.filter().unwrap(), slot.qemu().unwrap()];
        assert_eq!(
            [of(&first), of(&again), of(&second)],
            [[1000, 1001], [1002, 1003], [1004, 1005]]
        );
        assert_eq!(first.tpm(), Some(1000 + 2 * SLOTS));
        assert_eq!(second.tpm(), Some(1000 + 2 * SLOTS + 2));
        drop(first);
        let of_qemu = users.take_of_qemu(1007).unwrap();
        assert_eq!((of_qemu.number(), of_qemu.qemu()), (3, Some(1007)));
        for other in [999, 1006, 1000 + 2 * SLOTS + 1] {
            assert!(users.take_of_qemu(other).is_none(), "{other}");
        }
        assert_eq!(users.take().unwrap().number(), 0);
        assert_eq!(Users::new(None).take().unwrap().filter(), None);
    }

    #[test]
    fn users_run_out() {
        let users = Users::new(Some(0));
        let slots: Vec<Slot> = std::iter::from_fn(|| users.take()).collect();
        assert_eq!(slots.len(), SLOTS as usize);
    }
}
