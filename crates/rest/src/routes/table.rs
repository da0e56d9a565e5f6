//! The table of all routes: each with the causes of its errors, by the privilege that it needs.
//!
//! What its errors come from is found in its function of [`vmseal_control::services`]. The tests refuse an answer that does not
//! follow from what is here.

use utoipa::openapi::OpenApi;
use utoipa_axum::routes;
use vmseal_control::services::Privilege;

use super::declared::Declared;
use super::{
    about, arrivals, backups, bitmaps, changes, console, datastores, disks, dumps, events, guest,
    guests, hosts, kmip, kmip_servers, log_levels, nics, policies, proofs, providers, remotes,
    server_backup, snapshots, tasks, usage, vm_devices, vms,
};
use crate::document::causes::Cause::*;

/// The routes that need no user.
pub(super) fn open_routes(document: OpenApi) -> Declared {
    Declared::in_document(document)
        .with(routes!(about::show), [Itself])
        .with(routes!(super::show_document), [Itself])
        .with(routes!(hosts::join), [TakesName, JoinsHost])
}

/// The routes that need a user, by the privilege that each needs. The services require it too; here it is asked for
/// before anything else of a request is looked at.
pub(super) fn user_routes() -> [(Privilege, Declared); 17] {
    let new = Declared::new;
    [
        (
            Privilege::Read,
            new()
                .with(routes!(hosts::list), [Inventory])
                .with(routes!(hosts::show), [Inventory])
                .with(routes!(log_levels::show), [Itself])
                .with(routes!(log_levels::show_host), [AsksHost])
                .with(routes!(datastores::list), [Inventory])
                .with(routes!(datastores::show), [Inventory])
                .with(routes!(datastores::scan), [AsksHost, ReadsFiles])
                .with(routes!(providers::list), [Inventory])
                .with(routes!(providers::show), [Inventory])
                .with(routes!(policies::list), [Inventory])
                .with(routes!(policies::show), [Inventory])
                .with(routes!(vms::list), [Inventory])
                .with(routes!(vms::show), [Inventory])
                .with(routes!(usage::show), [Names])
                .with(routes!(bitmaps::list), [AsksHost, NeedsState, NeedsUnused])
                .with(routes!(snapshots::list), [Inventory])
                .with(routes!(snapshots::show), [Inventory])
                .with(routes!(backups::list_all), [Inventory])
                .with(routes!(backups::list), [Inventory])
                .with(routes!(backups::show), [Inventory])
                .with(routes!(dumps::list), [Inventory])
                .with(routes!(dumps::show), [Inventory])
                .with(routes!(proofs::prove), [AsksHost, NeedsState, StartsTask])
                .with(routes!(proofs::kept), [Inventory])
                .with(routes!(disks::replica), [AsksHost, NeedsState])
                .with(routes!(tasks::list), [Inventory])
                .with(routes!(tasks::show), [Inventory])
                .with(routes!(events::list), [Inventory])
                .with(routes!(events::alarms), [Inventory])
                .with(routes!(remotes::list), [Inventory])
                .with(routes!(remotes::show), [Inventory])
                .with(routes!(remotes::check), [AsksRemote])
                .with(routes!(changes::show), [Itself]),
        ),
        (
            Privilege::VmPower,
            new()
                .with(
                    routes!(vms::start),
                    [AsksHost, NeedsState, NeedsKey, NeedsMachine, OpensDisk, StartsTask],
                )
                .with(routes!(vms::stop), [AsksHost, NeedsState, StartsTask])
                .with(routes!(vms::suspend), [AsksHost, NeedsState, NeedsKey, StartsTask])
                .with(
                    routes!(vms::resume),
                    [AsksHost, NeedsState, NeedsKey, NeedsMachine, OpensDisk, StartsTask],
                )
                .with(routes!(guests::reboot), [AsksHost, NeedsState, NeedsKey, StartsTask])
                .with(routes!(guests::reset), [AsksHost, NeedsState])
                .with(routes!(guests::pause), [AsksHost, NeedsState])
                .with(routes!(guests::unpause), [AsksHost, NeedsState])
                .with(routes!(guests::wakeup), [AsksHost, NeedsState]),
        ),
        (
            Privilege::VmConfigure,
            new()
                .with(
                    routes!(vms::create),
                    [
                        Names,
                        TakesName,
                        NeedsState,
                        AsksHost,
                        NeedsMachine,
                        NeedsRoom,
                        AsksProvider,
                        StartsTask,
                    ],
                )
                .with(
                    routes!(vms::clone),
                    [
                        Names,
                        TakesName,
                        NeedsState,
                        AsksHost,
                        NeedsMachine,
                        NeedsRoom,
                        AsksProvider,
                        StartsTask,
                    ],
                )
                .with(
                    routes!(vms::move_disks),
                    [Names, NeedsState, AsksHost, NeedsKey, NeedsRoom, PlansJob, StartsTask],
                )
                .with(
                    routes!(vms::migrate),
                    [Names, NeedsState, AsksHost, NeedsKey, AsksRemote, StartsTask],
                )
                .with(
                    routes!(vms::evacuate),
                    [Names, NeedsState, AsksHost, NeedsKey, AsksProvider, StartsTask],
                )
                .with(routes!(arrivals::check), [Inventory])
                .with(routes!(arrivals::begin), [TakesName, NeedsState, AsksProvider, StartsTask])
                .with(routes!(arrivals::show), [Inventory])
                .with(
                    routes!(arrivals::session),
                    [TakesSecret, NeedsState, AsksHost, NeedsKey, BeginsJob],
                )
                .with(routes!(arrivals::commit), [Inventory])
                .with(routes!(arrivals::cancel), [Inventory])
                .with(
                    routes!(vms::set),
                    [Names, TakesName, NeedsState, AsksHost, NeedsMachine, ChangesVm],
                )
                .with(routes!(vms::delete), [AsksHost, NeedsState, StartsTask])
                .with(routes!(datastores::adopt), [AsksHost, ReadsFiles])
                .with(
                    routes!(vm_devices::add_disk),
                    [Names, TakesName, NeedsState, AsksHost, NeedsMachine, NeedsRoom, StartsTask],
                )
                .with(
                    routes!(vm_devices::remove_disk),
                    [AsksHost, NeedsState, NeedsUnused, StartsTask],
                )
                .with(
                    routes!(vm_devices::resize_disk),
                    [AsksHost, NeedsState, NeedsUnused, NeedsRoom, StartsTask],
                )
                .with(
                    routes!(vm_devices::add_tpm),
                    [TakesName, NeedsState, AsksHost, NeedsMachine, StartsTask],
                )
                .with(routes!(vm_devices::remove_tpm), [AsksHost, NeedsState, StartsTask])
                .with(
                    routes!(vm_devices::add_nic),
                    [TakesName, NeedsState, AsksHost, NeedsMachine, StartsTask],
                )
                .with(routes!(nics::set), [NeedsState, ChangesVm])
                .with(routes!(vm_devices::remove_nic), [AsksHost, NeedsState, StartsTask])
                .with(routes!(backups::verify), [AsksHost, NeedsState, StartsTask])
                .with(
                    routes!(backups::restore),
                    [
                        Names,
                        TakesName,
                        NeedsState,
                        AsksHost,
                        AsksProvider,
                        NeedsMachine,
                        NeedsRoom,
                        ReadsFiles,
                        StartsTask,
                    ],
                )
                .with(routes!(backups::delete), [NeedsUnused, StartsTask])
                .with(routes!(dumps::delete), [AsksHost, NeedsState, StartsTask])
                .with(routes!(snapshots::take), [TakesName, NeedsState, AsksHost, StartsTask])
                .with(routes!(snapshots::revert), [AsksHost, NeedsState, NeedsKey, StartsTask])
                .with(routes!(snapshots::delete), [AsksHost, NeedsState, PlansJob, StartsTask])
                .with(routes!(bitmaps::add), [AsksHost, NeedsState, AsksFilter, NeedsRoom])
                .with(routes!(bitmaps::clear), [AsksHost, NeedsState, AsksFilter])
                .with(routes!(bitmaps::remove), [AsksHost, NeedsState, AsksFilter]),
        ),
        (
            Privilege::VmConsole,
            new()
                .with(routes!(console::open), [AsksHost, ReachesGuest])
                .with(routes!(guest::screen), [AsksHost, ReachesGuest]),
        ),
        (Privilege::VmGuest, new().with(routes!(guest::ask), [AsksHost, ReachesGuest])),
        (
            Privilege::ManageTasks,
            new()
                .with(routes!(tasks::cancel), [NeedsState])
                .with(routes!(tasks::resolve), [NeedsState])
                .with(routes!(tasks::set), [NeedsState, NeedsFeature])
                .with(routes!(tasks::pause), [NeedsState, NeedsFeature])
                .with(routes!(tasks::resume), [NeedsState, NeedsFeature]),
        ),
        (
            Privilege::ManageDatastores,
            new()
                .with(
                    routes!(datastores::add),
                    [Names, TakesName, NeedsState, TakesSecret, AsksHost, ReadsFiles, NeedsRoom],
                )
                .with(routes!(datastores::set), [TakesSecret, NeedsState, AsksHost])
                .with(routes!(datastores::set_key), [TakesSecret, NeedsState, AsksHost])
                .with(routes!(datastores::remount), [NeedsState, NeedsUnused, AsksHost])
                .with(routes!(datastores::remove), [NeedsUnused])
                .with(
                    routes!(datastores::share),
                    [Names, TakesName, AsksHost, ReadsFiles, NeedsRoom],
                )
                .with(routes!(datastores::unshare), [NeedsUnused]),
        ),
        (
            Privilege::Diagnostics,
            new()
                .with(routes!(log_levels::set), [Inventory])
                .with(routes!(log_levels::set_host), [AsksHost]),
        ),
        (
            Privilege::Encrypt,
            new().with(
                routes!(vms::encrypt),
                [
                    Names,
                    NeedsState,
                    AsksHost,
                    NeedsKey,
                    NeedsRoom,
                    PlansJob,
                    AsksProvider,
                    StartsTask,
                ],
            ),
        ),
        (
            Privilege::Decrypt,
            new().with(
                routes!(vms::decrypt),
                [Names, NeedsState, AsksHost, NeedsKey, NeedsRoom, PlansJob, StartsTask],
            ),
        ),
        (
            Privilege::Recrypt,
            new().with(
                routes!(vms::recrypt),
                [
                    Names,
                    NeedsState,
                    AsksHost,
                    NeedsKey,
                    NeedsRoom,
                    PlansJob,
                    AsksProvider,
                    StartsTask,
                ],
            ),
        ),
        (
            Privilege::DirectAccess,
            new()
                .with(routes!(disks::export), [Names, NeedsState, AsksHost, PlansJob, StartsTask])
                .with(routes!(disks::expose), [AsksHost, NeedsState, OpensDisk])
                .with(
                    routes!(backups::create),
                    [TakesName, NeedsState, AsksHost, NeedsKey, ReadsFiles, StartsTask],
                )
                .with(
                    routes!(dumps::take),
                    [TakesName, NeedsState, AsksHost, NeedsKey, PlansJob, StartsTask],
                )
                .with(routes!(dumps::decrypt), [NeedsState, AsksHost, PlansJob, StartsTask]),
        ),
        (
            Privilege::ManageKeys,
            new()
                .with(routes!(providers::backup), [TakesSecret, NeedsState, NeedsKind])
                .with(routes!(providers::verify), [TakesSecret, NeedsState, OpensSealed]),
        ),
        (
            Privilege::ManageProviders,
            new()
                .with(routes!(providers::add), [TakesName, TakesSecret, OpensSealed, NeedsRoom])
                .with(routes!(providers::remove), [NeedsUnused])
                .with(routes!(providers::unlock), [TakesSecret, OpensSealed])
                .with(routes!(providers::change_passphrase), [TakesSecret, OpensSealed, NeedsRoom])
                .with(routes!(providers::make_default), [Inventory])
                .with(routes!(kmip::certificate), [NeedsKind, AsksProvider])
                .with(routes!(kmip::trust), [NeedsKind, AsksProvider])
                .with(
                    routes!(kmip::request_certificate),
                    [NeedsKind, TakesSecret, NeedsState, NeedsRoom],
                )
                .with(routes!(kmip::self_sign), [NeedsKind, TakesSecret, NeedsState, NeedsRoom])
                .with(
                    routes!(kmip::set_certificate),
                    [NeedsKind, TakesSecret, OpensSealed, NeedsState, NeedsRoom],
                )
                .with(routes!(kmip::test), [NeedsKind, AsksProvider])
                .with(routes!(kmip_servers::add), [NeedsKind, TakesName])
                .with(routes!(kmip_servers::set), [NeedsKind])
                .with(routes!(kmip_servers::remove), [NeedsKind, NeedsState])
                .with(routes!(kmip_servers::move_to), [NeedsKind]),
        ),
        (
            Privilege::ManagePolicies,
            new()
                .with(routes!(policies::add), [Names, TakesName])
                .with(routes!(policies::set), [Names, TakesName, NeedsState, NeedsUnused])
                .with(routes!(policies::remove), [NeedsUnused]),
        ),
        (
            Privilege::RegisterHost,
            new()
                .with(routes!(hosts::change), [TakesName])
                .with(routes!(hosts::remove), [NeedsUnused])
                .with(routes!(hosts::drain), [Inventory])
                .with(routes!(hosts::undrain), [Inventory])
                .with(routes!(hosts::make_token), [Inventory])
                .with(routes!(remotes::look), [AsksRemote])
                .with(routes!(remotes::add), [TakesName, TakesSecret, AsksRemote, NeedsRoom])
                .with(routes!(remotes::remove), [NeedsState]),
        ),
        (
            Privilege::BackUpServer,
            new().with(routes!(server_backup::make), [TakesSecret, NeedsState, NeedsRoom]),
        ),
    ]
}
