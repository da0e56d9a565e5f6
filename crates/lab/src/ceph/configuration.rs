//! `ceph.conf`.

use super::arguments::PORTS;
use super::layout::Layout;
use super::record::Record;

/// The six settings of the messenger's mode: who connects to whom.
const MODES: [&str; 6] = [
    "ms_cluster_mode",
    "ms_service_mode",
    "ms_client_mode",
    "ms_mon_cluster_mode",
    "ms_mon_service_mode",
    "ms_mon_client_mode",
];

/// What the manager has only in a chroot, which may have another release than this machine.
const MANAGER_IN_CHROOT: &str = "\
# Else managers of Ceph 17 and later make a pool of their own once there are OSDs.
mgr_pool = false
";
/// What OSDs have only there.
const OSD_IN_CHROOT: &str = "\
# The default of Ceph 16. That of later releases goes by what each OSD measures of its disk when it starts.
osd_op_queue = wpq
";

/// The address of the monitor, as Ceph writes it: by the messenger's second version alone, since only that encrypts.
#[must_use]
pub fn monitor(record: &Record) -> String {
    format!("[v2:{}/0]", record.listen)
}

/// The text of `ceph.conf`.
#[must_use]
pub fn of(layout: &Layout, record: &Record) -> String {
    let modes: String =
        MODES.iter().map(|mode| format!("{mode} = {}\n", record.messenger.name())).collect();
    let (directory, address) = (layout.root().display(), record.listen.ip());
    let (first, last) = (record.listen.port() + 1, record.listen.port() + PORTS);
    let (fsid, monitor) = (&record.fsid, monitor(record));
    let (memory, size) = (record.osd_memory_mib << 20, record.osd_gib << 30);
    let block = match record.osd_encryption {
        true => format!("bluestore_block_path = {}/$id\n", layout.blocks().display()),
        false => String::new(),
    };
    let (manager, osd) = match record.chroot.is_some() {
        true => (MANAGER_IN_CHROOT, OSD_IN_CHROOT),
        false => ("", ""),
    };
    format!(
        "\
# Made by `vmseal lab ceph up`, which writes it anew.
[global]
fsid = {fsid}
mon_host = {monitor}
public_addr = {address}
cluster_addr = {address}
ms_bind_msgr1 = false
ms_bind_port_min = {first}
ms_bind_port_max = {last}
{modes}
auth_cluster_required = cephx
auth_service_required = cephx
auth_client_required = cephx
auth_allow_insecure_global_id_reclaim = false
keyring = {directory}/keys/$name.keyring

run_dir = {directory}/run
pid_file = {directory}/run/$name.pid
admin_socket = {directory}/run/$name.asok
crash_dir = {directory}/crash
log_file = {directory}/log/$name.log
mon_cluster_log_file = {directory}/log/cluster.log
log_to_stderr = false
err_to_stderr = true

# One machine: copies are on several OSDs, not on several hosts.
osd_crush_chooseleaf_type = 0
mon_osd_reporter_subtree_level = osd

# Nothing moves data by itself while something is measured; vmseal turns the balancer and scrubs off in the cluster.
osd_pool_default_pg_autoscale_mode = off
mon_max_pg_per_osd = 500
mon_allow_pool_delete = true

# The lab's file system is the user's: how full it is, is no fault of the cluster.
mon_data_avail_warn = 1
mon_data_avail_crit = 0

[client]
# A write is answered once the OSDs have it.
rbd_cache = false
admin_socket =
log_file =
pid_file =

[mon]
mon_data = {directory}/mon

[mgr]
mgr_data = {directory}/mgr
mgr_initial_modules =
{manager}
[osd]
osd_data = {directory}/osd/$id
crush_location = root=default host=lab
osd_memory_target = {memory}
bluestore_block_create = true
bluestore_block_size = {size}
{block}bluestore_block_db_create = false
bluestore_block_wal_create = false
# Disks of virtual machines often call themselves rotational, and then small writes go to the log first.
bluestore_debug_enforce_settings = ssd
osd_recovery_sleep_hdd = 0
{osd}"
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ceph::arguments::{Messenger, UpArguments};

    #[test]
    fn the_configuration_is_what_the_record_says() {
        let place = tempfile::tempdir().unwrap();
        let layout = Layout::make(place.path()).unwrap();
        let mut record = Record::new(&UpArguments::default()).unwrap();
        record.fsid = "fs".into();
        let shown = |record: &Record| {
            let directory = layout.root().to_str().unwrap();
            of(&layout, record).replace(directory, "/cluster")
        };
        let usual = shown(&record);
        assert_eq!(usual, include_str!("recorded/ceph.conf"));
        record.messenger = Messenger::Secure;
        let secure = shown(&record);
        assert_eq!(usual.matches(" = crc\n").count(), 6, "{usual}");
        assert_eq!(secure, usual.replace(" = crc\n", " = secure\n"));
        record = Record { messenger: Messenger::Crc, osd_encryption: true, ..record };
        let size = "bluestore_block_size = 10737418240\n";
        let block = format!("{size}bluestore_block_path = /cluster/block/$id\n");
        assert_eq!(shown(&record), usual.replace(size, &block));
        record = Record { osd_encryption: false, chroot: Some("/srv/reef".into()), ..record };
        let in_chroot = shown(&record);
        let more = [MANAGER_IN_CHROOT, OSD_IN_CHROOT];
        assert!(more.iter().all(|it| in_chroot.contains(it)), "{in_chroot}");
        assert_eq!(more.iter().fold(in_chroot, |text, it| text.replace(it, "")), usual);
    }
}
