//! Examples of commands, for the end of `--help` and of the manual pages.

/// By manual page: the purpose, and the command.
pub const EXAMPLES: &[(&str, &str, &str)] = &[
    ("vmseal", "Show what is wrong:", "vmseal alarms"),
    ("vmseal", "Show running tasks:", "vmseal task list --state running"),
    ("vmseal", "For a script:", "vmseal vm list -o csv -c name,power,host --no-header"),
    ("vmseal-init", "Show what it would do on this machine:", "vmseal init --dry-run"),
    (
        "vmseal-init",
        "With disks on another file system, and the backup on a stick:",
        "vmseal init --datastore /srv/nvme --backup /media/stick/keys.backup",
    ),
    (
        "vmseal-init",
        "By a script, without questions:",
        "vmseal init --yes --passphrase-file /root/passphrase",
    ),
    (
        "vmseal-server",
        "Listen for hosts and users, under a DNS name:",
        "vmseal server --listen 192.0.2.10:8443 --name control.example.org",
    ),
    ("vmseal-agent", "Run the agent after `vmseal agent join`:", "vmseal agent"),
    (
        "vmseal-agent-join",
        "Join with a token in a file:",
        "vmseal agent join --to https://192.0.2.10:8443 --name host1 --join-token-file token",
    ),
    (
        "vmseal-host-set",
        "The host has a new address (its agent was restarted with --listen):",
        "vmseal host set host1 --address 192.0.2.21:8444",
    ),
    ("vmseal-host-drain", "See first where each VM would go:", "vmseal host drain host1 --dry-run"),
    (
        "vmseal-host-drain",
        "Shut down what cannot be moved, and follow the drain later:",
        "vmseal host drain host1 --stop-others --no-wait",
    ),
    (
        "vmseal-host-evacuate",
        "See first where each VM would go, and which ones cannot:",
        "vmseal host evacuate host1 --dry-run",
    ),
    (
        "vmseal-vm-set",
        "Shut it down when its host is emptied:",
        "vmseal vm set web1 --on-drain stop",
    ),
    (
        "vmseal-login",
        "Save the server once:",
        "vmseal login --server https://192.0.2.10:8443 --ca ca.pem --token-file admin.token",
    ),
    (
        "vmseal-server-backup",
        "From a timer, to a file of its own for each day:",
        "vmseal server backup --to monday.backup --passphrase-file passphrase",
    ),
    (
        "vmseal-server-restore",
        "Check a backup and its passphrase, and restore nothing:",
        "vmseal server restore /backup/server-2026-11-23 --dry-run",
    ),
    (
        "vmseal-datastore-adopt",
        "See first what would become of each VM:",
        "vmseal datastore adopt local --dry-run",
    ),
    (
        "vmseal-vm-start",
        "Install a system from the medium in its CD-ROM drive, and boot it from its disk after that:",
        "vmseal vm start web1 --boot-once cdrom",
    ),
    (
        "vmseal-vm-cdrom-insert",
        "A file in a directory that the host imports from:",
        "vmseal vm cdrom insert web1 /srv/iso/debian-13-netinst.iso",
    ),
    ("vmseal-vm-top", "For a program, one look:", "vmseal vm top --iterations 1 -o json"),
    ("vmseal-host-token", "Save it to a file for the new host:", "vmseal host token > token"),
    ("vmseal-host-list", "For a program:", "vmseal host list -o json"),
    (
        "vmseal-datastore-add",
        "Check a directory first:",
        "vmseal datastore add fast --host host1 --path /srv/nvme --dry-run",
    ),
    (
        "vmseal-datastore-share",
        "Check first whether the other host has the same file system there:",
        "vmseal datastore share nas --host host2 --dry-run",
    ),
    ("vmseal-nic-set", "Pull the cable of a network card:", "vmseal nic set web nic0 --link down"),
    (
        "vmseal-datastore-remount",
        "See first whether the cluster takes the new key, and whose guests wait:",
        "vmseal datastore remount ceph --dry-run",
    ),
    ("vmseal-datastore-scan", "List images and their size:", "vmseal datastore scan fast -o csv"),
    (
        "vmseal-provider-add",
        "A native provider, built into the server:",
        "vmseal provider add keys",
    ),
    (
        "vmseal-provider-add",
        "Restore it on a new server:",
        "vmseal provider add keys --restore keys.backup",
    ),
    (
        "vmseal-provider-add",
        "Two key servers that replicate:",
        "vmseal provider add kms --kms one=kms1.example.org --kms two=kms2.example.org:5696",
    ),
    (
        "vmseal-provider-trust",
        "After comparing with what the KMS displays:",
        "vmseal provider trust kms",
    ),
    (
        "vmseal-provider-certificate",
        "A request for the KMS's authority, then the certificate that it signed:",
        "vmseal provider certificate kms --csr > kms.csr",
    ),
    ("vmseal-provider-certificate", "", "vmseal provider certificate kms --import kms.pem"),
    (
        "vmseal-provider-certificate",
        "The passphrase is lost: a new key; import its certificate when it is signed:",
        "vmseal provider certificate kms --replace --csr > kms.csr",
    ),
    ("vmseal-provider-server-add", "", "vmseal provider server add kms three=kms3.example.org"),
    ("vmseal-provider-server-remove", "", "vmseal provider server remove kms three"),
    (
        "vmseal-provider-server-set",
        "It has a new address:",
        "vmseal provider server set kms two=kms2.example.net:5697",
    ),
    ("vmseal-provider-server-move", "Check first:", "vmseal provider server move kms two --to 1"),
    ("vmseal-provider-passphrase", "", "vmseal provider passphrase kms"),
    ("vmseal-provider-test", "Test whether keys can be created:", "vmseal provider test kms --key"),
    (
        "vmseal-provider-backup",
        "Write it, then verify it:",
        "vmseal provider backup keys --to keys.backup",
    ),
    ("vmseal-provider-backup", "", "vmseal provider verify keys --from keys.backup"),
    (
        "vmseal-policy-create",
        "Encrypted, with keys of the default provider:",
        "vmseal policy create encrypted --encrypt",
    ),
    (
        "vmseal-policy-create",
        "Encrypted with keys of another one, and preallocated:",
        "vmseal policy create secret --encrypt --provider keys2 --preallocate",
    ),
    (
        "vmseal-policy-create",
        "For slow storage: keep what guests read in memory, as ciphertext:",
        "vmseal policy create cached --encrypt --cache 64MiB",
    ),
    (
        "vmseal-policy-create",
        "With a second copy of each disk on the datastore `second` of the VM's host:",
        "vmseal policy create copied --encrypt --replicate-to second --replicate-rate 50MiB",
    ),
    (
        "vmseal-vm-create",
        "An encrypted VM from a raw image, and an empty disk on another datastore:",
        "vmseal vm create web1 --policy encrypted --vcpus 2 --memory 2GiB \\\n        --disk datastore=fast,size=20GiB,image=/srv/images/debian.raw,format=raw \\\n        --disk datastore=bulk,size=1TiB,name=data",
    ),
    (
        "vmseal-vm-create",
        "From an image that `vmseal image build debian` has built, with who logs in:",
        "vmseal vm create web1 --policy encrypted --memory 1GiB \\\n        --disk datastore=fast,size=20GiB,image=debian \\\n        --nic user,forward=tcp:22 --ssh-key ~/.ssh/id_ed25519.pub",
    ),
    ("vmseal-image-build", "Debian, to be named as image=debian:", "vmseal image build debian"),
    (
        "vmseal-vm-create",
        "Check first:",
        "vmseal vm create web1 --policy encrypted --disk datastore=fast,size=20GiB --dry-run",
    ),
    (
        "vmseal-vm-launch",
        "A VM with Debian, reached by SSH:",
        "vmseal vm launch web1 --image debian --ssh-key ~/.ssh/id_ed25519.pub",
    ),
    (
        "vmseal-vm-launch",
        "A larger one, on a bridge:",
        "vmseal vm launch db1 --image debian --ssh-key key.pub --vcpus 4 --memory 8G \\\n        --disk-size 100G --nic bridge=br0",
    ),
    ("vmseal-vm-ssh", "Run one command:", "vmseal vm ssh web1 -- uname -a"),
    (
        "vmseal-vm-import",
        "From a libvirt domain that is off:",
        "vmseal vm import --libvirt web.xml --policy encrypted --datastore fast",
    ),
    (
        "vmseal-vm-import",
        "The same, with its card on libvirt's network 'default' on the bridge of that network:",
        "vmseal vm import --libvirt web.xml --policy encrypted --datastore fast \\\n        --network default:bridge=virbr0",
    ),
    (
        "vmseal-vm-import",
        "From an image:",
        "vmseal vm import web1 --policy encrypted --memory 2GiB \\\n        --disk datastore=fast,image=/srv/old/web1.qcow2,format=qcow2",
    ),
    (
        "vmseal-server-log-level",
        "Log all requests for a while:",
        "vmseal server log-level info,vmseal_control=debug",
    ),
    (
        "vmseal-host-log-level",
        "Log more on one host:",
        "vmseal host log-level host1 info,vmseal=debug",
    ),
    ("vmseal-vm-list", "Follow the power of all VMs:", "vmseal vm list -w -c name,power,host"),
    (
        "vmseal-vm-stop",
        "Give the guest five minutes, but return after one:",
        "vmseal vm stop web1 --grace-period 5m --timeout 1m",
    ),
    (
        "vmseal-vm-encrypt",
        "See first what would be done, then do it while the VM runs:",
        "vmseal vm encrypt web1 --policy encrypted --dry-run",
    ),
    ("vmseal-vm-encrypt", "", "vmseal vm encrypt web1 --policy encrypted"),
    ("vmseal-vm-encrypt", "One disk of it:", "vmseal vm encrypt web1 --disk data"),
    ("vmseal-vm-recrypt", "After a data key may have been seen:", "vmseal vm recrypt web1 --deep"),
    ("vmseal-vm-console", "Take it over from another user:", "vmseal vm console web1 --force"),
    (
        "vmseal-vm-console",
        "With another escape key than Ctrl-]:",
        "vmseal vm console web1 --escape ^A",
    ),
    (
        "vmseal-disk-export",
        "A file that cryptsetup opens anywhere:",
        "vmseal disk export web1 disk0 --format luks2 --to /srv/out/web1.luks",
    ),
    (
        "vmseal-disk-export",
        "A plaintext one, for QEMU:",
        "vmseal disk export web1 disk0 --format qcow2 --plaintext --to /srv/out/web1.qcow2",
    ),
    (
        "vmseal-disk-export",
        "What its TPM keeps, not encrypted, for libvirt:",
        "vmseal disk export web1 tpm --format raw --plaintext --to /srv/out/tpm2-00.permall",
    ),
    (
        "vmseal-vm-show",
        "A libvirt domain of its exported disks:",
        "vmseal vm show web1 --libvirt --images /srv/out > web1.xml",
    ),
    (
        "vmseal-disk-expose",
        "A backup, from another terminal while this one runs:",
        "vmseal disk expose web1 disk0 --socket /run/web1.sock",
    ),
    (
        "vmseal-disk-expose",
        "Of one instant, while the VM runs, and still encrypted:",
        "vmseal disk expose web1 disk0 --snapshot nightly --sealed --socket /run/web1.sock",
    ),
    (
        "vmseal-disk-bitmap",
        "Before a full backup, and what has changed since:",
        "vmseal disk bitmap add web1 disk0 sunday",
    ),
    ("vmseal-disk-bitmap", "", "vmseal disk bitmap list web1 disk0"),
    ("vmseal-disk-replica", "Watch it catch up:", "vmseal disk replica web1 disk0 -w"),
    ("vmseal-task-watch", "All running tasks:", "vmseal task watch"),
    (
        "vmseal-task-wait",
        "At most ten minutes:",
        "vmseal task wait 0192f0c1-7a52-7d14-9c1f-5b1c5c6b2c11 --timeout 10m",
    ),
    ("vmseal-events", "Every use of a key from now on:", "vmseal events --kind key --since 0s -f"),
    ("vmseal-events", "The events of a VM today:", "vmseal events --target web1 --since 24h"),
    ("vmseal-alarms", "Stay, and print alarms as they come and go:", "vmseal alarms -w"),
    (
        "vmseal-doctor",
        "With a directory that will be a datastore:",
        "vmseal doctor --datastore /srv/nvme",
    ),
    ("vmseal-completion", "For this shell:", "source <(vmseal completion bash)"),
    (
        "vmseal-completion",
        "For all of them:",
        "vmseal completion bash > /etc/bash_completion.d/vmseal",
    ),
    (
        "vmseal-lab-ceph-up",
        "With encrypted connections, and enough OSDs for an erasure-coded pool 4+2:",
        "vmseal lab ceph up --osds 6 --messenger secure",
    ),
    ("vmseal-lab-ceph-up", "", "vmseal lab ceph pool add ec42 --erasure 4+2"),
    ("vmseal-lab-ceph-down", "Remove it:", "vmseal lab ceph down --destroy --yes"),
    (
        "vmseal-lab-ceph-pool-add",
        "Two copies, of which one may be lost:",
        "vmseal lab ceph pool add two --size 2 --min-size 1",
    ),
    ("vmseal-lab-disk", "The shortest useful run:", "vmseal lab disk --rounds 5 --seconds 1"),
    (
        "vmseal-lab-run",
        "What a storage latency hides of the encryption, with all values in a file:",
        "vmseal lab run v10 --report v10.json",
    ),
    (
        "vmseal-lab-run",
        "On a cluster that vmseal lab ceph up --directory /srv/lab has made:",
        "vmseal lab run v5 v6 v9 --ceph-directory /srv/lab",
    ),
    (
        "vmseal-lab-run",
        "On clusters that run at the same time and of which one encrypts what is sent:",
        "vmseal lab run c3 --ceph-directory /srv/lab --ceph-directory /srv/secure",
    ),
];

/// The examples of a page.
pub fn of(page: &str) -> impl Iterator<Item = (&'static str, &'static str)> {
    EXAMPLES.iter().filter(move |(of, ..)| *of == page).map(|(_, what, typed)| (*what, *typed))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::help;

    /// Examples must stay valid when options are renamed.
    #[test]
    fn every_example_is_valid_and_fits() {
        for (_, _, typed) in EXAMPLES {
            assert!(typed.lines().all(|line| line.len() <= 92), "the line is too long: {typed}");
            let inner = typed.trim_start_matches("source <(").trim_end_matches(')');
            let (ours, _) = inner.split_once(" > ").unwrap_or((inner, ""));
            let words = ours.split_whitespace().filter(|word| *word != "\\");
            let parsed = help::command().try_get_matches_from(words);
            assert!(parsed.is_ok(), "{typed}: {}", parsed.unwrap_err());
        }
    }
}
