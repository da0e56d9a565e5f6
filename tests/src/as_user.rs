//! Commands as a user gives them who is not root, though the tests are root's.

use std::process::Command;

use nix::unistd::geteuid;

/// By its path: a test may put programs of its own before those of the machine.
const UNSHARE: &str = "/usr/bin/unshare";

/// A user namespace in which root has this number, and no right beyond those of an owner of files.
const NAMESPACE: [&str; 2] = ["--user", "--map-user=1000"];

/// The same command, of a user who is not root and has the same files. None where there can be no user namespace, which is said.
#[must_use]
pub fn as_user(of: &Command) -> Option<Command> {
    let mut command = Command::new(of.get_program());
    if geteuid().is_root() {
        let possible = Command::new(UNSHARE).args(NAMESPACE).arg("true").status();
        if !possible.is_ok_and(|status| status.success()) {
            crate::skipped("no user namespace can be made");
            return None;
        }
        command = Command::new(UNSHARE);
        command.args(NAMESPACE).arg(of.get_program());
    }
    command.args(of.get_args());
    for (name, value) in of.get_envs() {
        match value {
            Some(value) => command.env(name, value),
            None => command.env_remove(name),
        };
    }
    // What follows HOME, which a test has set.
    command.env_remove("XDG_CACHE_HOME").env_remove("XDG_CONFIG_HOME");
    Some(command)
}
