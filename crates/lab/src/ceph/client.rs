//! What gets to a pool through Ceph's own library, unlike `vmseal-rbd`: QEMU, fio and `rbd`, by a `ceph.conf` of their own.

use std::path::Path;
use std::process::Command;

use vmseal_api::datastore::RbdPool;

use super::tools;

/// The most bytes of requests in flight, where librbd's default is a fifth less. `vmseal-rbd` has more for all of its disks together, and as
/// many for one of them.
const BYTES_IN_FLIGHT: u64 = 128 << 20;

/// The text of a client's `ceph.conf`: what `vmseal-rbd` tells the library, but for the bytes in flight.
#[must_use]
pub fn configuration(pool: &RbdPool) -> String {
    let keyring: String =
        pool.keyring.iter().map(|path| format!("keyring = {}\n", path.display())).collect();
    let (monitors, mode) = (&pool.monitors, pool.messenger.name());
    format!(
        "\
[global]
mon_host = {monitors}
{keyring}ms_client_mode = {mode}
ms_mon_client_mode = {mode}
rbd_cache = false
objecter_inflight_op_bytes = {BYTES_IN_FLIGHT}
admin_socket =
log_file =
"
    )
}

/// The user's name where `client.` goes without saying.
#[must_use]
pub fn user(pool: &RbdPool) -> &str {
    pool.user.strip_prefix("client.").unwrap_or(&pool.user)
}

/// Ceph's tool for images, as the pool's user.
#[must_use]
pub fn rbd(configuration: &Path, pool: &RbdPool, arguments: &[&str]) -> Command {
    let mut command = tools::isolated(Command::new("rbd"));
    command.arg("-c").arg(configuration).args(["--name", &pool.user]).args(arguments);
    command
}

#[cfg(test)]
pub(crate) mod tests {
    use vmseal_api::datastore::Messenger;

    use super::*;

    pub(crate) fn pool() -> RbdPool {
        RbdPool {
            monitors: "v2:127.0.0.1:17300/0".to_owned(),
            user: "client.one".to_owned(),
            keyring: Some("/x/keyring".into()),
            pool: "some".to_owned(),
            namespace: None,
            data_pool: None,
            messenger: Messenger::Secure,
            create: None,
            changed: None,
        }
    }

    #[test]
    fn a_client_has_the_pool_s_monitors_key_and_mode_and_no_cache() {
        let text = configuration(&pool());
        for line in [
            "mon_host = v2:127.0.0.1:17300/0",
            "keyring = /x/keyring",
            "ms_client_mode = secure",
            "ms_mon_client_mode = secure",
            "rbd_cache = false",
        ] {
            assert!(text.lines().any(|it| it == line), "{line}: {text}");
        }
        let crc = configuration(&RbdPool { messenger: Messenger::Crc, ..pool() });
        assert_eq!(crc, text.replace("= secure", "= crc"));
        assert_eq!(user(&pool()), "one");
    }

    #[test]
    fn images_are_made_by_the_pool_s_user_whatever_the_caller_has_set() {
        let command = rbd(Path::new("/x/ceph.conf"), &pool(), &["ls", "some"]);
        let words: Vec<_> = command.get_args().collect();
        assert_eq!(words, ["-c", "/x/ceph.conf", "--name", "client.one", "ls", "some"]);
        assert_eq!(command.get_envs().filter(|(_, value)| value.is_none()).count(), 3);
    }
}
