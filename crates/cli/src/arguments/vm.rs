//! `vmseal vm`.

use std::path::PathBuf;
use std::time::Duration;

use clap::{Args, Subcommand, ValueEnum};
use vmseal_api::model;

use super::hardware::{HardwareOptions, OnCrash};
use super::migration_encryption::{EncryptionOfMigrations, MigrationEncryption};
use super::wait::duration;
use super::{
    BootDevice, Cdrom, Console, DryRun, DumpFormat, FirstBoot, Guest, Launch, List, Prove, Show,
    Ssh, TakeDump, Vnc, Wait,
};
use crate::size::parse_size;

#[derive(Subcommand)]
pub enum Vm {
    /// List the VMs
    #[command(visible_alias = "ls")]
    List(ListVms),
    /// Show one VM
    Show(ShowVm),
    /// Show what the VMs that run use: processor, memory, disks and network; Ctrl-C ends it
    Top(Top),
    /// Create a VM, with disks that are empty or filled from images; it is not started
    Create {
        /// The new VM's name
        name: String,
        /// The storage policy's name or id
        #[arg(long)]
        policy: String,
        /// Virtual processors
        #[arg(long, default_value_t = 1)]
        vcpus: u32,
        /// Memory, such as 512M or 2G (powers of 1024)
        #[arg(long, default_value = "512MiB", value_name = "SIZE", value_parser = parse_size)]
        memory: u64,
        /// The host's name or id, where several share the datastores [default: one that answers, with the most memory left]
        #[arg(long)]
        host: Option<String>,
        /// A disk: `datastore=NAME,size=SIZE[,name=NAME][,image=FILE,format=raw|qcow2][,encrypted=yes|no]`; may be
        /// repeated, in boot order. The datastore decides the host; write `HOST:NAME` if several hosts have one of that name.
        /// `image` is a file on the host that the disk is filled from, in `format`, or the name of one of `vmseal
        /// image list`; `size` (20G) may be left out if the image is on this machine too. Disks are named `disk0`,
        /// `disk1`, ... unless `name` is
        /// given. A disk is encrypted if the policy encrypts; with `encrypted=no` this one is in the clear all the
        /// same. `encrypted=yes` needs such a policy. Write a comma within a value twice (`image=/a,,b.raw`)
        #[arg(long = "disk", value_name = "OPTIONS", required = true)]
        disks: Vec<String>,
        /// A network card: `user[,forward=tcp:HOST-PORT:GUEST-PORT]`, `bridge=BRIDGE` or `tap=TAP`, each with
        /// `[,mac=ADDRESS][,model=virtio|e1000e][,name=NAME][,link=up|down]`; may be repeated. Without one the VM
        /// has no network. `user` needs nothing on the host: the guest reaches out through it, and is reached at
        /// forwarded ports alone (`forward=tcp:22` takes any free port of the host's loopback,
        /// `forward=tcp:0.0.0.0:8080:80` is one of all its addresses; may be repeated). Bridges and taps are
        /// those of the VM's host
        #[arg(long = "nic", value_name = "OPTIONS")]
        nics: Vec<String>,
        /// Fill disks from images that are said to be raw even if they begin as images of another format do
        #[arg(long)]
        force: bool,
        #[command(flatten)]
        hardware: HardwareOptions,
        #[command(flatten)]
        about: About,
        #[command(flatten)]
        migration: EncryptionOfMigrations,
        #[command(flatten)]
        first_boot: FirstBoot,
        #[command(flatten)]
        dry_run: DryRun,
        #[command(flatten)]
        wait: Wait,
    },
    /// Create a VM from images or a libvirt domain, and encrypt it on the way
    Import(Import),
    /// Power a VM on; a suspended one goes on where it was
    Start {
        /// Name or id
        name: String,
        /// What its firmware tries first this time; when the guest is reset or reboots, the usual order holds
        #[arg(long, value_enum, value_name = "DEVICE")]
        boot_once: Option<BootDevice>,
        /// Give the saved memory of a suspended VM up and boot from its disks, which are as after a power cut
        #[arg(long)]
        discard_memory: bool,
        #[command(flatten)]
        dry_run: DryRun,
        #[command(flatten)]
        wait: Wait,
    },
    /// Shut a VM down through its guest, and wait until it is off
    Stop {
        /// Name or id
        name: String,
        /// Turn the VM off at once; unwritten data of the guest is lost
        #[arg(long)]
        force: bool,
        /// How long to wait for the guest (90s, 5m); then the task fails and the guest keeps running [default: 2m]
        #[arg(long, value_name = "DURATION", value_parser = duration, conflicts_with = "force")]
        grace_period: Option<Duration>,
        #[command(flatten)]
        dry_run: DryRun,
        #[command(flatten)]
        wait: Wait,
    },
    /// Change a VM: name, processors, memory, description, labels, autostart, template, policy
    ///
    /// A VM that runs gets processors, memory and the limits of another policy when it is started next; `vmseal vm show`
    /// says so until then.
    Set(SetVm),
    /// Shut a VM's guest down and start it again, with what was changed of it
    Reboot {
        /// Name or id
        name: String,
        /// How long to wait for the guest (90s, 5m); then the task fails and the guest keeps running [default: 2m]
        #[arg(long, value_name = "DURATION", value_parser = duration)]
        grace_period: Option<Duration>,
        #[command(flatten)]
        dry_run: DryRun,
        #[command(flatten)]
        wait: Wait,
    },
    /// Press a VM's reset button: its guest boots again at once; its unwritten data is lost
    Reset {
        /// Name or id
        name: String,
        #[command(flatten)]
        dry_run: DryRun,
    },
    /// Pause a VM: its processors stand still, and its memory and disks are kept
    Pause {
        /// Name or id
        name: String,
        #[command(flatten)]
        dry_run: DryRun,
    },
    /// Save the memory of a VM, sealed with the VM's key, and power the VM off; `resume` has it go on
    ///
    /// The memory is kept beside the VM's first disk. Of a VM without a key it is kept in the clear, as its disks are.
    /// Until the VM is resumed, nothing of its disks and its machine can change.
    Suspend {
        /// Name or id
        name: String,
        #[command(flatten)]
        dry_run: DryRun,
        #[command(flatten)]
        wait: Wait,
    },
    /// Have a suspended VM go on where it was
    Resume {
        /// Name or id
        name: String,
        /// Take the memory that is there, also where it is not the one that was saved last: only for disks that were put back with it
        #[arg(long)]
        accept_memory: bool,
        #[command(flatten)]
        dry_run: DryRun,
        #[command(flatten)]
        wait: Wait,
    },
    /// Let a paused VM go on
    Unpause {
        /// Name or id
        name: String,
        #[command(flatten)]
        dry_run: DryRun,
    },
    /// Wake VMs whose guests are suspended to RAM (ACPI S3), as by `systemctl suspend` in them
    ///
    /// `vmseal vm show` says `suspended-to-ram` of such a VM. A VM that `vmseal vm suspend` has suspended is resumed by `vmseal vm resume`.
    Wakeup {
        /// Names or ids
        #[arg(required = true, value_name = "VM")]
        vms: Vec<String>,
        #[command(flatten)]
        dry_run: DryRun,
    },
    /// Clone a VM, off, running or suspended, or a snapshot of one
    ///
    /// The clone has disks of its own that hold the same, encrypted with keys of its own, other addresses of its network
    /// cards and an empty TPM. Forwarded ports of the host are chosen when it starts. Of a VM that runs a snapshot is taken,
    /// copied and dropped: what the guest's disks hold at one instant, with its file systems frozen for a moment if its agent
    /// answers. A VM that is suspended stays so: the clone has what its disks hold and nothing of its saved memory, as after a power
    /// cut.
    ///
    /// With --host the clone is for another host: its disks are made where both hosts have their datastore, or they are made on the VM's
    /// host, sent to the other one and removed where they were made. The dry run says which.
    ///
    /// If cloud-init in the VM has a disk to read, the clone gets one with the same data and an instance id of its own, so that
    /// cloud-init sets its guest up anew (host name, SSH host keys); or one with the data that is given here. Otherwise its
    /// guest is what the other one was, with its host name and keys.
    Clone {
        /// The VM's name or id
        vm: String,
        /// The clone's name
        name: String,
        /// Clone what this snapshot keeps
        #[arg(long, value_name = "NAME")]
        snapshot: Option<String>,
        /// The host that the clone is for, by name or id [default: the VM's host]
        #[arg(long, value_name = "HOST")]
        host: Option<String>,
        /// Have all disks of the clone on this datastore of its host, by name or id [default: those of the VM's disks; on a host that lacks
        /// one of these, one that both hosts have, or the one with the most free room]
        #[arg(long, value_name = "NAME")]
        datastore: Option<String>,
        /// Do not freeze the file systems of a guest that runs
        #[arg(long, conflicts_with = "snapshot")]
        no_quiesce: bool,
        /// Share the data, and the data key, of the snapshot (--snapshot): the clone takes room only for what it writes
        ///
        /// It has a key-encryption key of its own. The snapshot, and those before it, cannot be deleted while the clone stands on it.
        /// The other VM cannot be converted with --in-place meanwhile, nor moved to a host without its datastores. It can be
        /// encrypted, decrypted, moved or deeply recrypted: the clone keeps the former files, under the former data key or in
        /// the clear, and shares nothing with it any more. `vm recrypt --deep` of the clone gives it data and keys of its own
        #[arg(long)]
        linked: bool,
        #[command(flatten)]
        first_boot: FirstBoot,
        #[command(flatten)]
        rate: CopyRate,
        #[command(flatten)]
        dry_run: DryRun,
        #[command(flatten)]
        wait: Wait,
    },
    /// Encrypt VMs that are there, off, suspended or running
    ///
    /// The disks are copied to encrypted images, each guest changes to the copies in one instant, and the former images are
    /// overwritten with zeroes once and removed, except files that linked clones stand on, which are named. Core dumps and the memory of a suspended VM are encrypted, too. Until the change it can be
    /// cancelled. On flash, journaled or copy-on-write storage, and in snapshots and backups of the datastore, older copies of the data may
    /// remain.
    ///
    /// With --disk the disks that are named are encrypted, and others stay as they are. What is no disk of the guest's, as the
    /// variables of its firmware, is encrypted with the VM in any case.
    Encrypt {
        /// Names or ids
        #[arg(required = true, value_name = "VM")]
        vms: Vec<String>,
        /// The policy that they get, by name or id: it encrypts, and is otherwise as theirs [default: the only such one]
        #[arg(long, value_name = "NAME")]
        policy: Option<String>,
        /// The provider of their keys [default: the policy's]
        #[arg(long, value_name = "NAME")]
        provider: Option<String>,
        /// A disk to encrypt, by name or id; may be given several times [default: all]
        #[arg(long = "disk", value_name = "NAME")]
        disks: Vec<String>,
        /// Convert each disk in its own file: for a VM that is off, where there is no room for copies; it cannot start before the
        /// end
        #[arg(long)]
        in_place: bool,
        #[command(flatten)]
        rate: CopyRate,
        #[command(flatten)]
        dry_run: DryRun,
        #[command(flatten)]
        wait: Wait,
    },
    /// Decrypt VMs, off, suspended or running: their data is on the datastore in the clear after that
    ///
    /// The disks are copied to plain images, each guest changes to the copies in one instant, the former images are
    /// overwritten and removed, and the VM's key is destroyed: older copies of the disks, such as sealed exports, cannot be opened
    /// any more. A key that backups of vmseal's need is kept until the last of these is deleted. Core dumps and the memory of a
    /// suspended VM are in the clear, too. A VM with a TPM keeps its key.
    ///
    /// With --disk the disks that are named are decrypted, and the VM keeps its key and its policy, also where these are all of its
    /// disks.
    Decrypt {
        /// Names or ids
        #[arg(required = true, value_name = "VM")]
        vms: Vec<String>,
        /// The policy that they get, by name or id: it does not encrypt, and is otherwise as theirs [default: the only such
        /// one]
        #[arg(long, value_name = "NAME", conflicts_with = "disks")]
        policy: Option<String>,
        /// A disk to decrypt, by name or id; may be given several times [default: all]
        #[arg(long = "disk", value_name = "NAME")]
        disks: Vec<String>,
        /// Do not ask
        #[arg(short, long)]
        yes: bool,
        /// Convert each disk in its own file: for a VM that is off, where there is no room for copies; it cannot start before the
        /// end
        #[arg(long)]
        in_place: bool,
        #[command(flatten)]
        rate: CopyRate,
        #[command(flatten)]
        dry_run: DryRun,
        #[command(flatten)]
        wait: Wait,
    },
    /// Move VMs' disks to another datastore of their host, off, suspended or running
    ///
    /// The disks are copied, each guest changes to the copies in one instant, and the former images are removed: what was in the
    /// clear is overwritten with zeroes once. Encrypted disks get new data keys under the key that the VM has. Until the
    /// change it can be cancelled. Core dumps and the memory of a suspended VM go with its first disk. What a TPM keeps goes along
    /// while the VM is off or suspended, and stays where it is while its guest runs.
    Move {
        /// Names or ids
        #[arg(required = true, value_name = "VM")]
        vms: Vec<String>,
        /// The datastore, by name or id
        #[arg(long, value_name = "NAME")]
        datastore: String,
        /// A disk to move, by name or id; may be given several times [default: all]
        #[arg(long = "disk", value_name = "NAME")]
        disks: Vec<String>,
        #[command(flatten)]
        rate: CopyRate,
        #[command(flatten)]
        dry_run: DryRun,
        #[command(flatten)]
        wait: Wait,
    },
    /// Move a VM to another host, also while it runs
    ///
    /// While it runs, its memory is sent; then the guest stands still for an instant, and goes on at the other host. All
    /// that is sent is encrypted with a key for this migration alone. Disks on datastores that the host does not have (`vmseal
    /// datastore share`) are copied there, with new data keys, while the guest runs; the former images are removed at the end. Until the guest goes on there the migration can be cancelled, and the guest goes on where it was.
    ///
    /// Snapshots of these disks go along, with the memory that they keep. A linked clone's disks become disks of their own there:
    /// what they share with other VMs is copied as well.
    ///
    /// A VM that is off or suspended is registered at the other host, which needs all of its datastores: nothing is sent or
    /// copied. It is started or resumed there afterwards.
    ///
    /// With --remote a VM that runs, is off or suspended goes to a host of another control plane, with copies of all its disks,
    /// under a key that the other control plane makes: no key leaves this one. It has the policy of the same name there, unless
    /// another is named. When it is there, running, off or suspended as it was, it is gone here, and its former key is destroyed.
    /// A dry run shows all that was looked at there.
    ///
    /// With --watch it is shown how fast the memory is sent and how fast the guest changes it, how often it was gone through, how
    /// long the guest is expected to stand still, and what sealing needs of the processor. At the end it is told how it went, as
    /// `vmseal task show` does afterwards.
    Migrate {
        /// Its name or id
        #[arg(value_name = "VM")]
        name: String,
        /// The host, by name or id [default: the one with the most free memory that can take it]
        host: Option<String>,
        /// The control plane that the host belongs to (`vmseal remote add`) [default: this one]
        #[arg(long, value_name = "NAME")]
        remote: Option<String>,
        /// The policy at the other control plane [default: that of the same name]
        #[arg(long, value_name = "NAME", requires = "remote")]
        policy: Option<String>,
        /// The datastore of that host for disks of a running VM on datastores that it does not have [default: the one with the most free room]
        #[arg(long, value_name = "NAME")]
        datastore: Option<String>,
        /// Send memory and disks together at most so fast, in bytes per second, such as 100M, at least 1MiB; 0 is no limit, as is
        /// none
        #[arg(long, value_name = "SIZE", value_parser = parse_size)]
        rate: Option<u64>,
        /// How long the guest may stand still while the rest of its memory is sent (100ms, 2s): the memory is sent again and again
        /// until what is left takes no longer [default: that of the policy, else 300ms]
        #[arg(long, value_name = "DURATION", value_parser = duration)]
        downtime: Option<Duration>,
        /// Compress the memory of a running VM before it is encrypted, where that gets it there sooner: for slow networks. Who
        /// watches the network learns something of the memory from how long what is sent is
        #[arg(long)]
        compress: bool,
        /// Show how far it is: in place on a terminal, else a line each second; with -o json a document on each line
        #[arg(long, conflicts_with_all = ["no_wait", "dry_run"])]
        watch: bool,
        #[command(flatten)]
        dry_run: DryRun,
        #[command(flatten)]
        wait: Wait,
    },
    /// Give a VM to another host while its host is down, and start it there
    ///
    /// All of its disks must be on pools of Ceph that the other host has, too (`vmseal datastore share`), and its host must not have
    /// answered for a minute. Whether the guest runs there nobody knows: the cluster takes no writes of that host any more for these
    /// disks, and ends what it has under way. What the guest had not flushed is lost, as at a power cut. When the host answers again,
    /// its agent ends the guest and forgets the VM; nothing in the pool is touched.
    ///
    /// Snapshots and saved memory come along. A host that answers is emptied with `vmseal host drain`.
    Evacuate {
        /// Its name or id
        #[arg(value_name = "VM")]
        name: String,
        /// The host, by name or id [default: the one with the most free memory that can take it]
        #[arg(long, value_name = "NAME")]
        host: Option<String>,
        /// Leave it off there: otherwise it is started if it ran when its host was last heard
        #[arg(long)]
        no_start: bool,
        /// Do not ask
        #[arg(short, long)]
        yes: bool,
        #[command(flatten)]
        dry_run: DryRun,
        #[command(flatten)]
        wait: Wait,
    },
    /// Give a VM a new key, or encrypt its data again (--deep); it may run
    ///
    /// The keys of its disks, core dumps and saved memory are wrapped with the new key; their data is not rewritten. The old key is destroyed: older
    /// copies of the disks, such as sealed exports, cannot be opened any more. It is kept while backups of vmseal's need it.
    ///
    /// With --deep the disks get new keys of their own, and the VM keeps its key: the disks are copied as by `vmseal vm
    /// encrypt`, also while the VM runs. What its TPM keeps is encrypted again while the VM is off or suspended.
    Recrypt {
        /// Names or ids
        #[arg(required = true, value_name = "VM")]
        vms: Vec<String>,
        /// The provider of the new key [default: the provider of its present key]
        #[arg(long, value_name = "NAME", conflicts_with = "deep")]
        provider: Option<String>,
        /// Encrypt all data again with new keys of the disks, and keep the VM's key
        #[arg(long)]
        deep: bool,
        /// With --deep: encrypt each disk in its own file: for a VM that is off, where there is no room for copies
        #[arg(long, requires = "deep")]
        in_place: bool,
        /// With --deep: a disk to encrypt again, by name or id; may be given several times [default: all]
        #[arg(long = "disk", value_name = "NAME", requires = "deep")]
        disks: Vec<String>,
        /// Copy each disk at most so fast, in bytes per second, such as 50M, at least 1MiB; 0 is no limit, as is none
        #[arg(long, value_name = "SIZE", value_parser = parse_size, requires = "deep")]
        rate: Option<u64>,
        #[command(flatten)]
        dry_run: DryRun,
        #[command(flatten)]
        wait: Wait,
    },
    /// Read the bytes of a VM on its datastores, and report whether they are encrypted; it may run
    ///
    /// The host reads disks, layers of snapshots, replicas, what a TPM keeps and suspended memory as they are stored, and
    /// signs what it has found. Sectors must look like ciphertext and decrypt with the disk's key, and headers must open
    /// with the VM's key. The exit status is 0 only for `encrypted`. What that proves, and what not: docs/proof.md.
    Prove(Prove),
    /// Write what the memory of a VM's guest holds to a core dump, encrypted, beside its first disk
    ///
    /// The guest stands still meanwhile, and goes on. The file is encrypted under the VM's key; that of a VM without a key
    /// is not. 'vmseal dump' lists, decrypts and deletes core dumps. docs/dumps.md says how to read one.
    Dump(TakeDump),
    /// Create a VM from an image, start it, and wait until its SSH server answers
    Launch(Launch),
    /// Log in to a running VM by SSH, or run a command there
    Ssh(Ssh),
    /// Open a VM's serial console; one user at a time
    Console(Console),
    /// Show a VM's screen to VNC viewers on this machine, for as long as the command runs
    Vnc(Vnc),
    /// Change what is in a VM's CD-ROM drive
    #[command(subcommand)]
    Cdrom(Cdrom),
    /// Ask the agent in a guest (package qemu-guest-agent)
    #[command(subcommand)]
    Guest(Guest),
    /// Delete a VM that is off, and its disks
    #[command(visible_alias = "rm")]
    Delete {
        /// Name or id
        name: String,
        #[command(flatten)]
        dry_run: DryRun,
        #[command(flatten)]
        wait: Wait,
    },
}

/// Which VMs are listed, and how.
#[derive(Args)]
pub struct ListVms {
    /// Only those with this label: `KEY=VALUE`, or `KEY` with any value
    #[arg(long, value_name = "LABEL")]
    pub label: Option<String>,
    #[command(flatten)]
    pub how: List<model::Vm>,
}

/// What users say of a new VM.
#[derive(Args, Default)]
pub struct About {
    /// What it is for
    #[arg(long, value_name = "TEXT")]
    pub description: Option<String>,
    /// A label: `KEY=VALUE`; may be repeated
    #[arg(long = "label", value_name = "KEY=VALUE", value_parser = parse_label)]
    pub labels: Vec<(String, String)>,
    /// Start it after its host has rebooted, once its key is there
    #[arg(long, value_enum, value_name = "on|off")]
    pub autostart: Option<OnOff>,
}

/// What is changed of a VM; what is not given stays.
#[derive(Args)]
#[group(id = "change", required = true, multiple = true)]
pub struct SetVm {
    /// Name or id
    #[arg(group = "which")]
    pub vm: String,
    /// Another name
    #[arg(long, value_name = "NAME", group = "change")]
    pub name: Option<String>,
    /// Virtual processors
    #[arg(long, group = "change")]
    pub vcpus: Option<u32>,
    /// Memory, such as 512M or 2G (powers of 1024)
    #[arg(long, value_name = "SIZE", value_parser = parse_size, group = "change")]
    pub memory: Option<u64>,
    /// What it is for; an empty text removes it
    #[arg(long, value_name = "TEXT", group = "change")]
    pub description: Option<String>,
    /// A label to set: `KEY=VALUE`; may be repeated
    #[arg(long = "label", value_name = "KEY=VALUE", value_parser = parse_label, group = "change")]
    pub labels: Vec<(String, String)>,
    /// A label to remove; may be repeated
    #[arg(long = "remove-label", value_name = "KEY", group = "change")]
    pub remove_labels: Vec<String>,
    /// Start it after its host has rebooted, once its key is there
    #[arg(long, value_enum, value_name = "on|off", group = "change")]
    pub autostart: Option<OnOff>,
    /// Whether its memory and disks are encrypted while it migrates to another host. Those of an encrypted VM always are.
    /// `opportunistic`: encrypted if both hosts support it
    #[arg(long, value_enum, value_name = "MODE", group = "change")]
    pub migration_encryption: Option<MigrationEncryption>,
    /// What happens to it while it runs when its host is emptied (`vmseal host drain`): it moves to another host, its guest is shut
    /// down, or it is left as it is
    #[arg(long, value_enum, value_name = "WHAT", group = "change")]
    pub on_drain: Option<OnDrain>,
    /// Make a VM that is off a template, which is cloned, and neither started nor changed; or an ordinary VM again
    #[arg(long, value_enum, value_name = "on|off", group = "change")]
    pub template: Option<OnOff>,
    /// What the firmware starts from, in this order: `disk`, `cdrom` and `network`, separated by commas; of a VM that
    /// runs, at its next start
    #[arg(long, value_name = "ORDER", value_delimiter = ',', group = "change")]
    pub boot: Vec<BootDevice>,
    /// What its host does when its guest panics: stop it, reset it, or leave it as it is, paused; `coredump-` writes an
    /// encrypted core dump first
    #[arg(long, value_enum, group = "change")]
    pub on_crash: Option<OnCrash>,
    /// The format of the core dumps that are written then
    #[arg(long, value_enum, value_name = "FORMAT", group = "change")]
    pub crash_dump_format: Option<DumpFormat>,
    /// Another policy, which asks the same of disks and keys and may have other limits and another cache
    #[arg(long, value_name = "NAME", group = "change")]
    pub policy: Option<String>,
    /// Give a VM that is off a TPM 2.0, new and empty, or take its TPM from it: what that keeps is destroyed. Nothing else
    /// is changed together with it
    #[arg(long, value_enum, value_name = "on|off", group = "change",
        conflicts_with_all = ["name", "vcpus", "memory", "description", "labels", "remove_labels", "autostart", "migration_encryption", "on_drain", "template", "boot", "on_crash", "crash_dump_format", "policy"])]
    pub tpm: Option<OnOff>,
    /// Do not ask before a TPM is taken away
    #[arg(long, requires = "tpm")]
    pub yes: bool,
    #[command(flatten)]
    pub dry_run: DryRun,
}

/// What happens to a VM that runs when its host is emptied.
#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum OnDrain {
    Migrate,
    Stop,
    Leave,
}

impl From<OnDrain> for vmseal_api::drain::OnDrain {
    fn from(what: OnDrain) -> Self {
        match what {
            OnDrain::Migrate => Self::Migrate,
            OnDrain::Stop => Self::Stop,
            OnDrain::Leave => Self::Leave,
        }
    }
}

/// Whether something is wanted.
#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum OnOff {
    On,
    Off,
}

#[derive(Args)]
pub struct Import {
    /// The new VM's name [default: the libvirt domain's]
    #[arg(required_unless_present = "libvirt")]
    pub name: Option<String>,
    /// The storage policy's name or id
    #[arg(long)]
    pub policy: String,
    /// Virtual processors [default: 1, or the domain's]
    #[arg(long)]
    pub vcpus: Option<u32>,
    /// Memory, such as 2G [default: 512MiB, or the domain's]
    #[arg(long, value_name = "SIZE", value_parser = parse_size)]
    pub memory: Option<u64>,
    /// A disk, as for `vm create`:
    /// `datastore=NAME,image=FILE,format=raw|qcow2[,size=SIZE][,name=NAME][,encrypted=yes|no]`; may be repeated, in
    /// boot order
    #[arg(
        long = "disk",
        value_name = "OPTIONS",
        required_unless_present = "libvirt",
        conflicts_with = "libvirt"
    )]
    pub disks: Vec<String>,
    /// A network card, as for `vm create`, beside those of the libvirt domain; may be repeated
    #[arg(long = "nic", value_name = "OPTIONS")]
    pub nics: Vec<String>,
    /// Import images that are said to be raw even if they begin as images of another format do
    #[arg(long)]
    pub force: bool,
    #[command(flatten)]
    pub hardware: HardwareOptions,
    /// The file with a libvirt domain, as `virsh dumpxml --inactive` prints it. Its images are on this
    /// machine, which must be the host of the datastore. What no option says of the machine, such as --firmware, is as the domain has
    /// it. What is not imported is listed
    #[arg(long, value_name = "FILE", requires = "datastore")]
    pub libvirt: Option<PathBuf>,
    /// The datastore for the disks of the libvirt domain
    #[arg(long, value_name = "NAME", requires = "libvirt")]
    pub datastore: Option<String>,
    /// A file in place of the image of a disk of the libvirt domain, such as vda:/srv/old/web.raw: a copy of what is in a Ceph
    /// cluster or on a block device, in the format that the domain names; may be repeated
    #[arg(long = "image", value_name = "TARGET:FILE", requires = "libvirt")]
    pub images: Vec<String>,
    /// What a network of the libvirt domain becomes: `NETWORK:bridge=NAME`, `NETWORK:tap=NAME` or
    /// `NETWORK:user[,forward=FORWARD]`, such as default:bridge=virbr0; may be repeated
    #[arg(long = "network", value_name = "IN:OUT", requires = "libvirt")]
    pub networks: Vec<String>,
    /// The host's bridge in place of a bridge of the libvirt domain's, such as br0:br1; may be repeated
    #[arg(long = "bridge", value_name = "IN:OUT", requires = "libvirt")]
    pub bridges: Vec<String>,
    /// The file with the variables of the UEFI firmware, in a transfer directory of the host: raw, of OVMF's 4M build
    /// [default: the libvirt domain's `<nvram>`]
    #[arg(long, value_name = "FILE")]
    pub nvram: Option<PathBuf>,
    /// Begin with new variables of the UEFI firmware; those of the libvirt domain, with its boot entries, are not taken
    #[arg(long, requires = "libvirt", conflicts_with = "nvram")]
    pub reset_nvram: bool,
    /// The file with what the TPM (--tpm, or that of the libvirt domain) keeps, in a transfer directory of the host: swtpm's
    /// tpm2-00.permall, not encrypted, or what `swtpm_ioctl --save permanent` has written [default: that of the libvirt domain in
    /// /var/lib/libvirt/swtpm]
    #[arg(long, value_name = "FILE")]
    pub tpm_state: Option<PathBuf>,
    /// Begin with an empty TPM; what the guest has sealed to that of the libvirt domain stays closed
    #[arg(long, requires = "libvirt", conflicts_with = "tpm_state")]
    pub reset_tpm: bool,
    #[command(flatten)]
    pub dry_run: DryRun,
    #[command(flatten)]
    pub wait: Wait,
}

/// What `vm top` shows, and how often.
#[derive(Args)]
pub struct Top {
    /// Only this VM, by name or id
    pub name: Option<String>,
    /// The time between two looks (2s, 1m); rates are those of this time
    #[arg(short, long, value_name = "DURATION", default_value = "2s", value_parser = delay)]
    pub delay: Duration,
    /// End after this many looks [default: Ctrl-C ends it]
    #[arg(short = 'n', long, value_name = "NUMBER", value_parser = clap::value_parser!(u64).range(1..))]
    pub iterations: Option<u64>,
    /// Print one table after the other, as for a file; also done where standard output is no terminal
    #[arg(short, long)]
    pub batch: bool,
    /// The order of the VMs
    #[arg(long, value_enum, default_value = "cpu")]
    pub sort: TopOrder,
}

/// The order of VMs in `vm top`.
#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum TopOrder {
    Cpu,
    Memory,
    Io,
    Network,
    Name,
}

/// A duration of at least a tenth of a second: a look is a request to every host.
fn delay(text: &str) -> Result<Duration, String> {
    let delay = duration(text)?;
    match delay < Duration::from_millis(100) {
        true => Err("it must be at least 0.1s".to_owned()),
        false => Ok(delay),
    }
}

/// Which VM is shown, and how.
#[derive(Args)]
pub struct ShowVm {
    #[command(flatten)]
    pub of: Show,
    /// Print it as a libvirt domain (XML, so without -o). The disks of a VM that runs are the sockets of its filter; those of any other
    /// are files, and standard error says which commands export them
    #[arg(long, conflicts_with = "watch")]
    pub libvirt: bool,
    /// The directory that the domain's files will be in, an absolute path; also for a VM that runs [default: those of libvirt]
    #[arg(long, value_name = "DIR", requires = "libvirt", value_parser = absolute)]
    pub images: Option<PathBuf>,
}

/// A domain has no directory that its paths begin at.
fn absolute(text: &str) -> Result<PathBuf, String> {
    let path = PathBuf::from(text);
    if path.is_absolute() { Ok(path) } else { Err("give an absolute path".to_owned()) }
}

fn parse_label(text: &str) -> Result<(String, String), String> {
    let (key, value) = text.split_once('=').ok_or("give it as KEY=VALUE")?;
    Ok((key.to_owned(), value.to_owned()))
}

/// How fast disks are copied.
#[derive(Args)]
pub struct CopyRate {
    /// Copy each disk at most so fast, in bytes per second, such as 50M, at least 1MiB; 0 is no limit, as is none
    #[arg(long, value_name = "SIZE", value_parser = parse_size)]
    pub rate: Option<u64>,
}
